package bench

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/RussellLuo/slidingwindow"
	"github.com/cockroachdb/tokenbucket"
	"github.com/failsafe-go/failsafe-go/adaptivelimiter"
	"github.com/failsafe-go/failsafe-go/bulkhead"
	"github.com/failsafe-go/failsafe-go/ratelimiter"
	golimiter "github.com/sethvargo/go-limiter"
	"github.com/sethvargo/go-limiter/memorystore"
	"go.uber.org/ratelimit"
	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"

	"github.com/quotashare/quotashare"
)

// guarded makes a token bucket of cockroachdb, which is not safe for concurrent use, so.
type guarded struct {
	mu sync.Mutex
	tb tokenbucket.TokenBucket
}

func newGuarded(rate tokenbucket.TokensPerSecond, burst tokenbucket.Tokens) *guarded {
	g := &guarded{}
	g.tb.Init(rate, burst)
	return g
}

func (g *guarded) take(tokens tokenbucket.Tokens) (ok bool, retry time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tb.TryToFulfill(tokens)
}

func (g *guarded) giveBack(tokens tokenbucket.Tokens) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tb.Adjust(tokens)
}

func newStore(b *testing.B, tokens uint64) golimiter.Store {
	b.Helper()
	store, err := memorystore.New(&memorystore.Config{Tokens: tokens, Interval: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = store.Close(context.Background()) })
	return store
}

func newSliding(b *testing.B, size time.Duration, limit int64) *slidingwindow.Limiter {
	b.Helper()
	l, stop := slidingwindow.NewLimiter(size, limit, func() (slidingwindow.Window, slidingwindow.StopFunc) {
		return slidingwindow.NewLocalWindow()
	})
	b.Cleanup(stop)
	return l
}

// admitted admits a call of ten tokens where the limiter knows tokens, and one call where it does not.
var admitted = []benchmark{
	{"quotashare.TryAcquire", each(func(b *testing.B) call {
		window := newWindow(b, quotashare.Quota{Tokens: plenty})
		return func(int) bool {
			_, d := window.TryAcquire(interactive, 10)
			return d.Reason == quotashare.ReasonOwnShare
		}
	})},
	{"quotashare.TryAcquire_loan", each(func(b *testing.B) call {
		window := newWindow(b, quotashare.Quota{
			Tokens: plenty, Shares: quotashare.Fractions{interactive: 1}, Floors: quotashare.NoFloors,
		})
		return func(int) bool {
			_, d := window.TryAcquire(batch, 10)
			return d.Reason == quotashare.ReasonBorrowed
		}
	})},
	{"quotashare.Acquire", each(func(b *testing.B) call {
		ctx, window := b.Context(), newWindow(b, quotashare.Quota{Tokens: plenty})
		return func(int) bool {
			_, err := window.Acquire(ctx, interactive, 10)
			return err == nil
		}
	})},
	{"quotashare.Admit", each(func(*testing.B) call {
		quota := quotashare.Quota{Tokens: 1_000_000}
		usage := quotashare.Usage{Used: quotashare.ClassTokens{interactive: 100_000, background: 100_000, batch: 90_000}}
		return func(int) bool { return quotashare.Admit(interactive, 1000, usage, quota).Admitted }
	})},
	{"xtime.AllowN", each(func(*testing.B) call {
		limiter := rate.NewLimiter(plenty, plenty)
		return func(int) bool { return limiter.AllowN(time.Now(), 10) }
	})},
	{"xtime.WaitN", each(func(b *testing.B) call {
		ctx, limiter := b.Context(), rate.NewLimiter(plenty, plenty)
		return func(int) bool { return limiter.WaitN(ctx, 10) == nil }
	})},
	{"xsync.TryAcquire", each(func(*testing.B) call {
		weighted := semaphore.NewWeighted(1 << 62)
		return func(int) bool { return weighted.TryAcquire(10) }
	})},
	{"uber.Take", each(func(*testing.B) call {
		limiter := ratelimit.New(1_000_000_000) // it does not sleep
		return func(int) bool { return !limiter.Take().IsZero() }
	})},
	{"golimiter.Take", each(func(b *testing.B) call {
		ctx, store := b.Context(), newStore(b, plenty)
		return func(int) bool {
			_, _, _, ok, err := store.Take(ctx, "key")
			return ok && err == nil
		}
	})},
	{"failsafe.RateLimiter", each(func(*testing.B) call {
		limiter := ratelimiter.NewBursty[any](plenty, time.Hour)
		return func(int) bool { return limiter.TryAcquirePermits(10) }
	})},
	{"tokenbucket.TryToFulfill", each(func(*testing.B) call {
		bucket := newGuarded(plenty, plenty)
		return func(int) bool {
			ok, _ := bucket.take(10)
			return ok
		}
	})},
	{"slidingwindow.AllowN", each(func(b *testing.B) call {
		limiter := newSliding(b, time.Minute, plenty)
		return func(int) bool { return limiter.AllowN(time.Now(), 10) }
	})},
}

// settled admits a call and tells in the end what it used, or gives it back where that is all there is.
var settled = []benchmark{
	{"quotashare.TryAcquire+Settle", each(func(b *testing.B) call {
		window := newWindow(b, quotashare.Quota{Tokens: plenty})
		return func(int) bool {
			grant, d := window.TryAcquire(interactive, 10)
			grant.Settle(7)
			return d.Admitted
		}
	})},
	{"quotashare.TryAcquire+Cancel", each(func(b *testing.B) call {
		window := newWindow(b, quotashare.Quota{Tokens: plenty})
		return func(int) bool {
			grant, d := window.TryAcquire(interactive, 10)
			grant.Cancel()
			return d.Admitted
		}
	})},
	{"xtime.ReserveN+Cancel", each(func(*testing.B) call {
		limiter := rate.NewLimiter(plenty, plenty)
		return func(int) bool {
			r := limiter.ReserveN(time.Now(), 10)
			r.Cancel()
			return r.OK()
		}
	})},
	{"xtime.ReserveN+CancelAt", each(func(*testing.B) call {
		limiter := rate.NewLimiter(plenty, plenty)
		return func(int) bool {
			now := time.Now()
			r := limiter.ReserveN(now, 10)
			r.CancelAt(now)
			return r.OK()
		}
	})},
	{"xsync.TryAcquire+Release", each(func(*testing.B) call {
		weighted := semaphore.NewWeighted(plenty)
		return func(int) bool {
			if !weighted.TryAcquire(10) {
				return false
			}
			weighted.Release(10)
			return true
		}
	})},
	{"failsafe.Bulkhead", each(func(*testing.B) call {
		limiter := bulkhead.New[any](1000)
		return func(int) bool {
			if !limiter.TryAcquirePermit() {
				return false
			}
			limiter.ReleasePermit()
			return true
		}
	})},
	{"failsafe.AdaptiveLimiter", each(func(*testing.B) call {
		limiter := adaptivelimiter.NewWithDefaults[any]()
		return func(int) bool {
			permit, ok := limiter.TryAcquirePermit()
			if ok {
				permit.Record()
			}
			return ok
		}
	})},
	{"tokenbucket.TryToFulfill+Adjust", each(func(*testing.B) call {
		bucket := newGuarded(plenty, plenty)
		return func(int) bool {
			ok, _ := bucket.take(10)
			bucket.giveBack(3)
			return ok
		}
	})},
}

// refused asks where there is no room. A hint is checked where there is one.
var refused = []benchmark{
	{"quotashare.TryAcquire", each(func(b *testing.B) call {
		window := fullWindow(b)
		return func(int) bool { return refuses(window, interactive, 1) }
	})},
	{"quotashare.TryAcquire_loan", each(func(b *testing.B) call {
		window := fullWindow(b)
		return func(int) bool { return refuses(window, batch, 15_000) }
	})},
	{"quotashare.TryAcquire_sizes", each(func(b *testing.B) call {
		window := fullWindow(b)
		return func(n int) bool { return refuses(window, interactive, spread(n, 1, 700)) }
	})},
	{"quotashare.TryAcquire_sizes_loan", each(func(b *testing.B) call {
		window := fullWindow(b)
		return func(n int) bool { return refuses(window, batch, spread(n, 10_001, 10_100)) }
	})},
	{"quotashare.TryAcquire_search", each(func(b *testing.B) call {
		window := fullWindow(b)
		return func(n int) bool {
			if n%2 == 0 { // who is refused last has its hint remembered
				return refuses(window, batch, spread(n, 10_001, 20_000))
			}
			return refuses(window, interactive, spread(n, 1, 70_000))
		}
	})},
	{"quotashare.TryAcquire_worst", each(func(b *testing.B) call {
		window := crowdedWindow(b)
		return func(n int) bool {
			if n%2 == 0 {
				return refuses(window, batch, spread(n, 10_000_001, 90_000_000))
			}
			return refuses(window, interactive, spread(n, 1_000_000, 70_000_000))
		}
	})},
	{"xtime.AllowN", each(func(*testing.B) call {
		limiter := rate.NewLimiter(1e-9, 1)
		limiter.Allow()
		return func(int) bool { return !limiter.AllowN(time.Now(), 1) }
	})},
	{"xtime.ReserveN+Delay+Cancel", each(func(*testing.B) call {
		// A reservation that another one follows before it is cancelled is not given back. At a lower rate than this the
		// debt that two CPUs pile up is soon longer than a time.Duration.
		limiter := rate.NewLimiter(0.01, 1)
		limiter.Allow()
		return func(int) bool {
			now := time.Now()
			r := limiter.ReserveN(now, 1)
			wait := r.DelayFrom(now)
			r.CancelAt(now)
			return wait > 0
		}
	})},
	{"xsync.TryAcquire", each(func(*testing.B) call {
		weighted := semaphore.NewWeighted(1)
		weighted.TryAcquire(1)
		return func(int) bool { return !weighted.TryAcquire(1) }
	})},
	{"golimiter.Take", each(func(b *testing.B) call {
		ctx, store := b.Context(), newStore(b, 1)
		_, _, _, _, _ = store.Take(ctx, "key")
		return func(int) bool {
			_, _, reset, ok, err := store.Take(ctx, "key")
			return !ok && reset > 0 && err == nil
		}
	})},
	{"failsafe.RateLimiter", each(func(*testing.B) call {
		limiter := ratelimiter.NewBursty[any](1, time.Hour)
		limiter.TryAcquirePermit()
		return func(int) bool { return !limiter.TryAcquirePermit() }
	})},
	{"failsafe.Bulkhead", each(func(*testing.B) call {
		limiter := bulkhead.New[any](1)
		limiter.TryAcquirePermit()
		return func(int) bool { return !limiter.TryAcquirePermit() }
	})},
	{"failsafe.AdaptiveLimiter", each(func(*testing.B) call {
		limiter := adaptivelimiter.NewBuilder[any]().WithLimits(1, 1, 1).Build()
		limiter.TryAcquirePermit()
		return func(int) bool {
			_, ok := limiter.TryAcquirePermit()
			return !ok
		}
	})},
	{"tokenbucket.TryToFulfill", each(func(*testing.B) call {
		bucket := newGuarded(1e-9, 1)
		bucket.take(1)
		return func(int) bool {
			ok, retry := bucket.take(1)
			return !ok && retry > 0
		}
	})},
	{"slidingwindow.AllowN", each(func(b *testing.B) call {
		limiter := newSliding(b, time.Hour, 1)
		limiter.Allow()
		return func(int) bool { return !limiter.AllowN(time.Now(), 1) }
	})},
}

func refuses(w *quotashare.Window, c quotashare.Class, tokens int64) bool {
	_, d := w.TryAcquire(c, tokens)
	return d.RetryAfter > 0
}

// spread returns another size, from lo to hi, for each n of any that follow each other.
func spread(n int, lo, hi int64) int64 { return lo + int64(n)*7919%(hi-lo+1) }

// fullWindow returns a Window of which every class has its share, in a hundred charges.
func fullWindow(b *testing.B) *quotashare.Window {
	b.Helper()
	window := newWindow(b, quotashare.Quota{Tokens: 100_000, Window: time.Hour})
	for range 100 {
		for c := range quotashare.Class(quotashare.NumClasses) {
			if _, d := window.TryAcquire(c, window.Quota().Limits(c).Share/100); !d.Admitted {
				b.Fatal(d)
			}
		}
	}
	return window
}

// crowdedWindow returns a Window, of 100,000,000 tokens, in which the logs of charges and of refusals of every class are
// full of what was merged: nothing takes longer to search.
func crowdedWindow(b *testing.B) *quotashare.Window {
	b.Helper()
	const steps = 5000
	clock := newVirtual(0)
	quota := quotashare.Quota{Tokens: 100_000_000, Floors: quotashare.NoFloors}
	window := newWindow(b, quota, quotashare.WithClock(clock.since))
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

// queued hands permits from call to call: 16 callers for 4 permits, and who has one lets the others come before it gives
// it back. The limiters that wait for time alone are not here: nobody can hand them anything.
var queued = []benchmark{
	{"quotashare.Acquire+Cancel", inLine(func(b *testing.B) func() bool {
		ctx := b.Context()
		window := newWindow(b, quotashare.Quota{
			Tokens: callersInLine / 4, Window: 24 * time.Hour, Shares: quotashare.Fractions{batch: 1}, Floors: quotashare.NoFloors,
		})
		b.Cleanup(func() {
			if n := window.Stats().Classes[batch].WaitsAdmitted; b.N > 1000 && int(n) < b.N/4 {
				b.Errorf("of %d calls %d waited: there is nothing to measure", b.N, n)
			}
		})
		return func() bool {
			grant, err := window.Acquire(ctx, batch, 1)
			runtime.Gosched()
			grant.Cancel()
			return err == nil
		}
	})},
	{"xsync.Acquire+Release", inLine(func(b *testing.B) func() bool {
		ctx, weighted := b.Context(), semaphore.NewWeighted(callersInLine/4)
		return func() bool {
			err := weighted.Acquire(ctx, 1)
			runtime.Gosched()
			weighted.Release(1)
			return err == nil
		}
	})},
	{"failsafe.Bulkhead", inLine(func(b *testing.B) func() bool {
		ctx, limiter := b.Context(), bulkhead.New[any](callersInLine/4)
		return func() bool {
			err := limiter.AcquirePermit(ctx)
			runtime.Gosched()
			limiter.ReleasePermit()
			return err == nil
		}
	})},
	{"failsafe.AdaptiveLimiter", inLine(func(b *testing.B) func() bool {
		ctx := b.Context()
		const permits = callersInLine / 4
		limiter := adaptivelimiter.NewBuilder[any]().WithLimits(permits, permits, permits).
			WithQueueing(callersInLine, callersInLine).Build()
		return func() bool {
			permit, err := limiter.AcquirePermit(ctx)
			if err != nil {
				return false
			}
			runtime.Gosched()
			permit.Record()
			return true
		}
	})},
}

const callersInLine = 16

// inLine measures a call from 16 goroutines, whatever the number of CPUs.
func inLine(setup func(b *testing.B) func() bool) func(b *testing.B) {
	return func(b *testing.B) {
		ask := setup(b)
		b.SetParallelism(max(1, callersInLine/runtime.GOMAXPROCS(0)))
		b.ReportAllocs()
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if !ask() {
					b.Error(wrong)
					return
				}
			}
		})
	}
}
