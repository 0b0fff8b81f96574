package bench

import (
	"context"
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

// BENCHMARKS.md says what each peer does less or more.

// guarded makes a token bucket of cockroachdb, which is not safe for concurrent use, so.
type guarded struct {
	mu sync.Mutex
	tb tokenbucket.TokenBucket
}

func (g *guarded) take(tokens tokenbucket.Tokens) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	ok, _ := g.tb.TryToFulfill(tokens)
	return ok
}

func (g *guarded) giveBack(tokens tokenbucket.Tokens) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tb.Adjust(tokens)
}

func newGuarded(rate tokenbucket.TokensPerSecond, burst tokenbucket.Tokens) *guarded {
	g := &guarded{}
	g.tb.Init(rate, burst)
	return g
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

// BenchmarkPeersAdmit admits a call of ten tokens where the limiter knows tokens, and one call where it does not.
func BenchmarkPeersAdmit(b *testing.B) {
	ctx := b.Context()
	window := newWindow(b, quotashare.Quota{Tokens: plenty})
	xtime := rate.NewLimiter(plenty, plenty)
	weighted := semaphore.NewWeighted(1 << 62)
	paced := ratelimit.New(1 << 30)
	store := newStore(b, plenty)
	bursty := ratelimiter.NewBursty[any](1<<50, time.Hour)
	adaptive := adaptivelimiter.NewWithDefaults[any]()
	bucket := newGuarded(plenty, plenty)
	sliding := newSliding(b, time.Minute, plenty)
	compare(b,
		limiter{"quotashare", func() bool {
			_, d := window.TryAcquire(interactive, 10)
			return d.Admitted
		}},
		limiter{"xtime_rate", func() bool { return xtime.AllowN(time.Now(), 10) }},
		limiter{"xsync_semaphore", func() bool { return weighted.TryAcquire(10) }},
		limiter{"uber_ratelimit", func() bool { return !paced.Take().IsZero() }},
		limiter{"sethvargo_golimiter", func() bool {
			_, _, _, ok, err := store.Take(ctx, "key")
			return ok && err == nil
		}},
		limiter{"failsafe_ratelimiter", func() bool { return bursty.TryAcquirePermits(10) }},
		limiter{"failsafe_adaptive", func() bool {
			permit, ok := adaptive.TryAcquirePermit()
			if ok {
				permit.Record()
			}
			return ok
		}},
		limiter{"cockroach_tokenbucket", func() bool { return bucket.take(10) }},
		limiter{"russellluo_slidingwindow", func() bool { return sliding.AllowN(time.Now(), 10) }},
	)
}

// BenchmarkPeersSettle admits a call and tells in the end what it used, or gives it back where that is all there is.
func BenchmarkPeersSettle(b *testing.B) {
	window := newWindow(b, quotashare.Quota{Tokens: plenty})
	xtime := rate.NewLimiter(plenty, plenty)
	weighted := semaphore.NewWeighted(plenty)
	room := bulkhead.New[any](1000)
	bucket := newGuarded(plenty, plenty)
	compare(b,
		limiter{"quotashare", func() bool {
			grant, d := window.TryAcquire(interactive, 10)
			grant.Settle(7)
			return d.Admitted
		}},
		limiter{"xtime_rate", func() bool {
			r := xtime.ReserveN(time.Now(), 10)
			r.Cancel()
			return r.OK()
		}},
		limiter{"xsync_semaphore", func() bool {
			if !weighted.TryAcquire(10) {
				return false
			}
			weighted.Release(10)
			return true
		}},
		limiter{"failsafe_bulkhead", func() bool {
			if !room.TryAcquirePermit() {
				return false
			}
			room.ReleasePermit()
			return true
		}},
		limiter{"cockroach_tokenbucket", func() bool {
			ok := bucket.take(10)
			bucket.giveBack(3)
			return ok
		}},
	)
}

// BenchmarkPeersRefuse asks where there is no room. Only quotashare and tokenbucket say when there will be.
func BenchmarkPeersRefuse(b *testing.B) {
	ctx := b.Context()
	window := newWindow(b, quotashare.Quota{Tokens: 1000, Window: time.Hour})
	fill(window)
	xtime := rate.NewLimiter(1e-9, 1)
	weighted := semaphore.NewWeighted(1)
	store := newStore(b, 1)
	bursty := ratelimiter.NewBursty[any](1, time.Hour)
	room := bulkhead.New[any](1)
	bucket := newGuarded(1e-9, 1)
	sliding := newSliding(b, time.Hour, 1)
	limiters := []limiter{
		{"quotashare", func() bool {
			_, d := window.TryAcquire(interactive, 1)
			return d.RetryAfter > 0
		}},
		{"xtime_rate", func() bool { return !xtime.AllowN(time.Now(), 1) }},
		{"xsync_semaphore", func() bool { return !weighted.TryAcquire(1) }},
		{"sethvargo_golimiter", func() bool {
			_, _, _, ok, err := store.Take(ctx, "key")
			return !ok && err == nil
		}},
		{"failsafe_ratelimiter", func() bool { return !bursty.TryAcquirePermit() }},
		{"failsafe_bulkhead", func() bool { return !room.TryAcquirePermit() }},
		{"cockroach_tokenbucket", func() bool { return !bucket.take(1) }},
		{"russellluo_slidingwindow", func() bool { return !sliding.AllowN(time.Now(), 1) }},
	}
	for _, l := range limiters[1:] {
		l.call() // takes all there is
	}
	compare(b, limiters...)
}
