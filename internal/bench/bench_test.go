// Package bench measures quotashare beside golang.org/x/time/rate in one process. It is a module of its own, so that
// the peer is no dependency of the library.
//
// Every benchmark checks the answer that it measures.
package bench

import (
	"context"
	"fmt"
	"runtime"
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

const plenty = 1 << 50

func newWindow(b *testing.B, q quotashare.Quota, options ...quotashare.Option) *quotashare.Window {
	b.Helper()
	w, err := quotashare.NewWindow(q, options...)
	if err != nil {
		b.Fatal(err)
	}
	return w
}

// fill takes every class's share.
func fill(w *quotashare.Window) {
	for c := range quotashare.Class(quotashare.NumClasses) {
		w.TryAcquire(c, w.Quota().Limits(c).Share)
	}
}

// limiter is one side of a comparison: each call returns the answer that the benchmark wants.
type limiter struct {
	name string
	call func() bool
}

// compare measures the limiters one after the other, alone and from all CPUs.
func compare(b *testing.B, limiters ...limiter) {
	for _, l := range limiters {
		b.Run(l.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if !l.call() {
					b.Fatal("not the answer that is measured")
				}
			}
		})
		b.Run(l.name+"/parallel", func(b *testing.B) {
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if !l.call() {
						b.Error("not the answer that is measured")
						return
					}
				}
			})
		})
	}
}

func BenchmarkAdmitted(b *testing.B) {
	xtime := rate.NewLimiter(plenty, plenty)
	window := newWindow(b, quotashare.Quota{Tokens: plenty})
	lender := newWindow(b, quotashare.Quota{
		Tokens: plenty, Shares: quotashare.Fractions{interactive: 1}, Floors: quotashare.NoFloors,
	})
	compare(b,
		limiter{"xtime", func() bool { return xtime.AllowN(time.Now(), 10) }},
		limiter{"quotashare", func() bool {
			_, d := window.TryAcquire(interactive, 10)
			return d.Reason == quotashare.ReasonOwnShare
		}},
		limiter{"quotashare_borrowed", func() bool {
			_, d := lender.TryAcquire(batch, 10)
			return d.Reason == quotashare.ReasonBorrowed
		}},
	)
}

func BenchmarkAdmittedAndSettled(b *testing.B) {
	xtime := rate.NewLimiter(plenty, plenty)
	window := newWindow(b, quotashare.Quota{Tokens: plenty})
	compare(b,
		limiter{"xtime", func() bool {
			r := xtime.ReserveN(time.Now(), 10)
			r.Cancel()
			return r.OK()
		}},
		limiter{"quotashare", func() bool {
			grant, d := window.TryAcquire(interactive, 10)
			grant.Settle(7)
			return d.Admitted
		}},
	)
}

func BenchmarkRefused(b *testing.B) {
	xtime := rate.NewLimiter(1e-9, 1)
	xtime.AllowN(time.Now(), 1)
	window := newWindow(b, quotashare.Quota{Tokens: 1000, Window: time.Hour})
	fill(window)
	compare(b,
		limiter{"xtime", func() bool { return !xtime.AllowN(time.Now(), 1) }},
		limiter{"quotashare", func() bool {
			_, d := window.TryAcquire(interactive, 1)
			return d.RetryAfter > 0
		}},
		limiter{"quotashare_loan", func() bool {
			_, d := window.TryAcquire(batch, 101)
			return d.RetryAfter > 0
		}},
	)
}

// A virtual clock moves on with each call of a benchmark. It costs what the real one costs that it stands for.
type virtual struct {
	start, now time.Time
	step       time.Duration
}

// since stands for the time.Since of a Window.
func (v *virtual) since() time.Time {
	_ = time.Since(v.start)
	return v.now
}

// read stands for the time.Now of a caller of x/time.
func (v *virtual) read() time.Time {
	_ = time.Now()
	return v.now
}

// BenchmarkRate asks at another number of calls a minute. The tokens in the window are the same, and so must be the
// cost. The borrower is a heavy one, whose pace must be looked at.
func BenchmarkRate(b *testing.B) {
	for _, calls := range []int64{100, 10_000, 1_000_000} {
		size := plenty / 2 / calls
		clock := &virtual{start: time.Now(), now: time.Now(), step: time.Minute / time.Duration(calls)}
		xtime := rate.NewLimiter(plenty/60, plenty)
		own := newWindow(b, quotashare.Quota{Tokens: plenty}, quotashare.WithClock(clock.since))
		loan := newWindow(b, quotashare.Quota{
			Tokens: 2 * plenty, Shares: quotashare.Fractions{interactive: 1}, Floors: quotashare.NoFloors,
		}, quotashare.WithClock(clock.since))
		for _, l := range []limiter{
			{"xtime", func() bool { return xtime.AllowN(clock.read(), int(size)) }},
			{"own_share", func() bool {
				_, d := own.TryAcquire(interactive, size)
				return d.Reason == quotashare.ReasonOwnShare
			}},
			{"borrowed", func() bool {
				_, d := loan.TryAcquire(batch, size)
				return d.Reason == quotashare.ReasonBorrowed
			}},
		} {
			b.Run(fmt.Sprintf("%s/calls=%d", l.name, calls), func(b *testing.B) {
				call := func() {
					clock.now = clock.now.Add(clock.step)
					if !l.call() {
						b.Fatal("not the answer that is measured")
					}
				}
				for range 2 * calls {
					call()
				}
				b.ReportAllocs()
				for b.Loop() {
					call()
				}
			})
		}
	}
}

// crowd returns a Window in which the logs of charges and of refusals of every class are full of what was merged.
func crowd(b *testing.B, clock *virtual, tokens int64) *quotashare.Window {
	const steps = 20_000
	window := newWindow(b, quotashare.Quota{Tokens: tokens, Floors: quotashare.NoFloors}, quotashare.WithClock(clock.since))
	for range 2 * steps {
		clock.now = clock.now.Add(time.Minute / steps)
		for c := range quotashare.Class(quotashare.NumClasses) {
			share := window.Quota().Limits(c).Share
			window.TryAcquire(c, share/steps)
			window.TryAcquire(c, share)
		}
	}
	return window
}

// BenchmarkHint is the worst case of a refusal: the logs of every class are full, and the call waits for most of what is
// in them, within its share or for a loan.
func BenchmarkHint(b *testing.B) {
	for _, call := range []struct {
		class quotashare.Class
		part  float64 // of the quota
	}{
		{interactive, 0.01}, {interactive, 0.3}, {interactive, 0.69}, {batch, 0.05}, {batch, 0.3}, {batch, 0.9},
	} {
		b.Run(fmt.Sprintf("%v/part=%v", call.class, call.part), func(b *testing.B) {
			const tokens = 100_000_000
			clock := &virtual{start: time.Now(), now: time.Now()}
			window := crowd(b, clock, tokens)
			var d quotashare.Decision
			b.ReportAllocs()
			for b.Loop() {
				if _, d = window.TryAcquire(call.class, int64(call.part*tokens)); d.RetryAfter <= 0 {
					b.Fatal(d)
				}
			}
			b.ReportMetric(d.RetryAfter.Seconds(), "s/wait")
		})
	}
}

func BenchmarkAdmit(b *testing.B) {
	quota := quotashare.Quota{Tokens: 1_000_000}
	usage := quotashare.Usage{Used: quotashare.ClassTokens{interactive: 100_000, background: 100_000, batch: 90_000}}
	b.ReportAllocs()
	for b.Loop() {
		if d := quotashare.Admit(interactive, 1000, usage, quota); !d.Admitted {
			b.Fatal(d)
		}
	}
}

// BenchmarkFloor is what no limiter can go below: a clock read and an uncontended lock.
func BenchmarkFloor(b *testing.B) {
	start := time.Now()
	b.Run("time.Since", func(b *testing.B) {
		for b.Loop() {
			_ = time.Since(start)
		}
	})
	b.Run("time.Now", func(b *testing.B) {
		for b.Loop() {
			_ = time.Now()
		}
	})
}

// BenchmarkAcquire sets Acquire that need not wait beside TryAcquire.
func BenchmarkAcquire(b *testing.B) {
	try, acquire := newWindow(b, quotashare.Quota{Tokens: plenty}), newWindow(b, quotashare.Quota{Tokens: plenty})
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	compare(b,
		limiter{"try", func() bool {
			_, d := try.TryAcquire(interactive, 10)
			return d.Admitted
		}},
		limiter{"acquire", func() bool {
			_, err := acquire.Acquire(ctx, interactive, 10)
			return err == nil
		}},
	)
}

// BenchmarkQueuedWait hands the room for one call from one caller to the next: each waits for the one before to be
// cancelled. A timer alone is 3 allocations.
func BenchmarkQueuedWait(b *testing.B) {
	for _, waiters := range []int{10, 1000, 100_000} {
		b.Run(fmt.Sprintf("waiters=%d", waiters), func(b *testing.B) {
			window := newWindow(b, quotashare.Quota{
				Tokens: 10, Window: 24 * time.Hour, Shares: quotashare.Fractions{batch: 1}, Floors: quotashare.NoFloors,
			})
			first, d := window.TryAcquire(batch, 10)
			if !d.Admitted {
				b.Fatal(d)
			}
			admitted := make(chan struct{})
			ctx, cancel := context.WithCancel(b.Context())
			var all sync.WaitGroup
			call := func() {
				if grant, err := window.Acquire(ctx, batch, 10); err == nil {
					admitted <- struct{}{}
					grant.Cancel()
				}
			}
			for range waiters {
				all.Go(call)
			}
			for window.Stats().Classes[batch].Waiting < waiters {
				runtime.Gosched()
			}
			first.Cancel()
			b.ReportAllocs()
			for b.Loop() {
				all.Go(call) // so that as many go on waiting
				<-admitted
			}
			cancel()
			go func() {
				all.Wait()
				close(admitted)
			}()
			for range admitted {
			}
		})
	}
}

// BenchmarkStats sets TryAcquire beside itself while somebody takes a snapshot after every thousandth call, which is far
// more often than anybody scrapes.
func BenchmarkStats(b *testing.B) {
	window := newWindow(b, quotashare.Quota{Tokens: plenty})
	watched := newWindow(b, quotashare.Quota{Tokens: plenty})
	calls := 0
	try := func(w *quotashare.Window) bool {
		_, d := w.TryAcquire(interactive, 10)
		return d.Admitted
	}
	for _, l := range []limiter{
		{"stats", func() bool { return window.Stats().Quota == plenty }},
		{"try", func() bool { return try(window) }},
		{"try_watched", func() bool {
			if calls++; calls%1000 == 0 && watched.Stats().Quota != plenty {
				return false
			}
			return try(watched)
		}},
	} {
		b.Run(l.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if !l.call() {
					b.Fatal("not the answer that is measured")
				}
			}
		})
	}
}
