// Package bench measures quotashare beside its peers, in one process. It is a module of its own, so that no peer is a
// dependency of the library. BENCHMARKS.md has the numbers and says what they mean; `make bench` measures them again.
//
// Every benchmark checks the answer that it measures.
package bench

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/quotashare/quotashare"
	"golang.org/x/time/rate"
)

const (
	interactive = quotashare.Interactive
	background  = quotashare.Background
	batch       = quotashare.Batch
)

// plenty is never used up.
const plenty = 1 << 50

// A benchmark is one row of a table of BENCHMARKS.md, or one cell.
type benchmark struct {
	name string
	run  func(b *testing.B)
}

// groups are the tables of BENCHMARKS.md, which TestThePageHasAllBenchmarks holds against it.
var groups = map[string][]benchmark{
	"Floor":         floor,
	"Admitted":      admitted,
	"Settled":       settled,
	"Refused":       refused,
	"Queued":        queued,
	"Watched":       watched,
	"Rates":         rates(),
	"GrowthCalls":   growthCalls(),
	"GrowthWindows": growthWindows(),
	"GrowthWaiters": growthWaiters(),
	"Redis":         redisGroup(),
}

func BenchmarkFloor(b *testing.B)         { run(b, "Floor") }
func BenchmarkAdmitted(b *testing.B)      { run(b, "Admitted") }
func BenchmarkSettled(b *testing.B)       { run(b, "Settled") }
func BenchmarkRefused(b *testing.B)       { run(b, "Refused") }
func BenchmarkQueued(b *testing.B)        { run(b, "Queued") }
func BenchmarkWatched(b *testing.B)       { run(b, "Watched") }
func BenchmarkRates(b *testing.B)         { run(b, "Rates") }
func BenchmarkGrowthCalls(b *testing.B)   { run(b, "GrowthCalls") }
func BenchmarkGrowthWindows(b *testing.B) { run(b, "GrowthWindows") }
func BenchmarkGrowthWaiters(b *testing.B) { run(b, "GrowthWaiters") }

func run(b *testing.B, group string) {
	for _, one := range groups[group] {
		b.Run(one.name, one.run)
	}
}

// A call asks a limiter, the n-th time, and reports whether its answer is the one that is measured.
type call func(n int) bool

// each measures a call from as many goroutines as there are CPUs, which share the limiter: alone at -cpu 1.
func each(setup func(b *testing.B) call) func(b *testing.B) {
	return func(b *testing.B) {
		ask := setup(b)
		b.ReportAllocs()
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			for n := rand.IntN(1 << 30); pb.Next(); n++ { // no two goroutines ask for the same
				if !ask(n) {
					b.Error(wrong)
					return
				}
			}
		})
	}
}

// loop measures a call from one goroutine.
func loop(b *testing.B, ask call) {
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if !ask(n) {
			b.Fatal(wrong)
		}
	}
}

const wrong = "not the answer that is measured"

func newWindow(tb testing.TB, q quotashare.Quota, options ...quotashare.Option) *quotashare.Window {
	tb.Helper()
	w, err := quotashare.NewWindow(q, options...)
	if err != nil {
		tb.Fatal(err)
	}
	return w
}

// floor is what a limiter that knows the time and is safe for concurrent use cannot go below.
var floor = []benchmark{
	{"time.Now", each(func(*testing.B) call {
		return func(int) bool { return !time.Now().IsZero() }
	})},
	{"time.Since", each(func(*testing.B) call {
		start := time.Now()
		return func(int) bool { return time.Since(start) >= 0 }
	})},
	{"sync.Mutex", each(func(*testing.B) call {
		var mu sync.Mutex
		count := 0
		return func(int) bool {
			mu.Lock()
			count++
			ok := count > 0
			mu.Unlock()
			return ok
		}
	})},
	{"sync.Mutex+time.Since", each(func(*testing.B) call {
		var mu sync.Mutex
		start, latest := time.Now(), time.Duration(0)
		return func(int) bool {
			mu.Lock()
			latest = max(latest, time.Since(start))
			ok := latest >= 0
			mu.Unlock()
			return ok
		}
	})},
}

// watched sets TryAcquire while somebody takes a snapshot after every thousandth call, which is far more often than
// anybody scrapes, beside the snapshot.
var watched = []benchmark{
	{"quotashare.TryAcquire_watched", each(func(b *testing.B) call {
		window := newWindow(b, quotashare.Quota{Tokens: plenty})
		return func(n int) bool {
			if n%1000 == 0 && window.Stats().Quota != plenty {
				return false
			}
			_, d := window.TryAcquire(interactive, 10)
			return d.Admitted
		}
	})},
	{"quotashare.Stats", each(func(b *testing.B) call {
		window := newWindow(b, quotashare.Quota{Tokens: plenty})
		return func(int) bool { return window.Stats().Quota == plenty }
	})},
}

// A virtual clock costs what the real one costs that it stands for.
type virtual struct {
	start, now time.Time
	step       time.Duration // of each reading
}

func newVirtual(step time.Duration) *virtual {
	now := time.Now()
	return &virtual{now, now, step}
}

// since stands for the time.Since of a Window.
func (v *virtual) since() time.Time {
	_ = time.Since(v.start)
	v.now = v.now.Add(v.step)
	return v.now
}

// read stands for the time.Now of a caller of x/time.
func (v *virtual) read() time.Time {
	_ = time.Now()
	v.now = v.now.Add(v.step)
	return v.now
}

// rates asks so many times a minute. The tokens in the window are the same. The borrower is a heavy one, whose pace must
// be looked at.
func rates() (all []benchmark) {
	for _, calls := range []int64{100, 10_000, 1_000_000} {
		size := plenty / 2 / calls
		for _, series := range []struct {
			name  string
			setup func(b *testing.B, clock *virtual) call
		}{
			{"xtime.AllowN", func(_ *testing.B, clock *virtual) call {
				xtime := rate.NewLimiter(plenty/60, plenty)
				return func(int) bool { return xtime.AllowN(clock.read(), int(size)) }
			}},
			{"quotashare.TryAcquire", func(b *testing.B, clock *virtual) call {
				window := newWindow(b, quotashare.Quota{Tokens: plenty}, quotashare.WithClock(clock.since))
				return func(int) bool {
					_, d := window.TryAcquire(interactive, size)
					return d.Reason == quotashare.ReasonOwnShare
				}
			}},
			{"quotashare.TryAcquire_loan", func(b *testing.B, clock *virtual) call {
				window := newWindow(b, quotashare.Quota{
					Tokens: 2 * plenty, Shares: quotashare.Fractions{interactive: 1}, Floors: quotashare.NoFloors,
				}, quotashare.WithClock(clock.since))
				return func(int) bool {
					_, d := window.TryAcquire(batch, size)
					return d.Reason == quotashare.ReasonBorrowed
				}
			}},
		} {
			all = append(all, benchmark{fmt.Sprintf("%s/calls=%d", series.name, calls), func(b *testing.B) {
				ask := series.setup(b, newVirtual(time.Minute/time.Duration(calls)))
				for n := range 2 * int(calls) {
					if !ask(n) {
						b.Fatal(wrong)
					}
				}
				loop(b, ask)
			}})
		}
	}
	return all
}
