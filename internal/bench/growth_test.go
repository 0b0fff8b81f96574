package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/failsafe-go/failsafe-go/bulkhead"
	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"

	"github.com/quotashare/quotashare"
)

// memory returns the bytes that are in use, on the heap and in stacks.
func memory() (heap, stacks float64) {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what finalizers and pools let go of
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc), float64(m.StackInuse)
}

// growthCalls admits calls of all classes in turn, with so many calls in the window. In the minute before as many are
// refused, but at most 100 in each of the 600 parts of it that a Window tells apart, for they take long. The memory is
// that after this minute.
func growthCalls() (all []benchmark) {
	for calls := 10; calls <= 10_000_000; calls *= 10 {
		all = append(all, benchmark{fmt.Sprintf("quotashare/calls=%d", calls), func(b *testing.B) {
			before, _ := memory()
			clock := newVirtual(time.Minute / time.Duration(calls))
			quota := quotashare.Quota{Tokens: plenty, Ceilings: quotashare.DefaultShares}
			window := newWindow(b, quota, quotashare.WithClock(clock.since))
			ask := func(n int) bool {
				_, d := window.TryAcquire(quotashare.Class(n%quotashare.NumClasses), 10)
				return d.Reason == quotashare.ReasonOwnShare
			}
			for n := range calls {
				ok := ask(n)
				if n%max(1, calls/60_000) == 0 {
					class := quotashare.Class(n % quotashare.NumClasses)
					clock.now = clock.now.Add(-clock.step) // it comes with the call before
					ok = ok && refuses(window, class, window.Quota().Limits(class).Share)
				}
				if !ok {
					b.Fatal(wrong)
				}
			}
			after, _ := memory()
			loop(b, ask)
			b.ReportMetric(after-before, "B/window")
		}})
	}
	return all
}

// growthWindows asks one of so many limiters, another each time and in no order.
func growthWindows() (all []benchmark) {
	for windows := 1; windows <= 100_000; windows *= 10 {
		all = append(all,
			benchmark{fmt.Sprintf("quotashare/windows=%d", windows), func(b *testing.B) {
				spreadOver(b, windows, func() call {
					window := newWindow(b, quotashare.Quota{Tokens: plenty})
					return func(int) bool {
						_, d := window.TryAcquire(interactive, 10)
						return d.Reason == quotashare.ReasonOwnShare
					}
				})
			}},
			benchmark{fmt.Sprintf("xtime/windows=%d", windows), func(b *testing.B) {
				spreadOver(b, windows, func() call {
					limiter := rate.NewLimiter(plenty, plenty)
					return func(int) bool { return limiter.AllowN(time.Now(), 10) }
				})
			}},
		)
	}
	return all
}

func spreadOver(b *testing.B, n int, limiter func() call) {
	asks := make([]call, n)
	before, _ := memory()
	for i := range asks {
		asks[i] = limiter()
		for range 10 { // so that it has calls to remember
			asks[i](0)
		}
	}
	after, _ := memory()
	rand.Shuffle(n, func(i, j int) { asks[i], asks[j] = asks[j], asks[i] })
	loop(b, func(k int) bool { return asks[k%n](k) })
	b.ReportMetric((after-before)/float64(n), "B/window")
}

// A line lets one caller in at a time.
type line struct {
	name string
	// open returns what waits until it may come in, and returns how to leave.
	open func(b *testing.B, ctx context.Context) (enter func() (leave func(), err error))
}

var lines = []line{
	{"quotashare", func(b *testing.B, ctx context.Context) func() (func(), error) {
		window := newWindow(b, quotashare.Quota{
			Tokens: 10, Window: 24 * time.Hour, Shares: quotashare.Fractions{batch: 1}, Floors: quotashare.NoFloors,
		})
		return func() (func(), error) {
			grant, err := window.Acquire(ctx, batch, 10)
			return grant.Cancel, err
		}
	}},
	{"xsync", func(_ *testing.B, ctx context.Context) func() (func(), error) {
		weighted := semaphore.NewWeighted(1)
		return func() (func(), error) {
			err := weighted.Acquire(ctx, 1)
			return func() { weighted.Release(1) }, err
		}
	}},
	{"channel", func(_ *testing.B, ctx context.Context) func() (func(), error) {
		limiter := bulkhead.New[any](1) // which is that
		return func() (func(), error) {
			err := limiter.AcquirePermit(ctx)
			return limiter.ReleasePermit, err
		}
	}},
}

// growthWaiters has so many goroutines wait in line. ns/next is what it costs who leaves to let the next one in, two
// readings of the clock included; ns/op is all of a turn: that, a switch to the next goroutine and back, and a new one
// that comes to wait. Both are for -cpu 1, where nobody has to wake another CPU.
func growthWaiters() (all []benchmark) {
	for waiters := 1; waiters <= 100_000; waiters *= 10 {
		for _, line := range lines {
			all = append(all, benchmark{fmt.Sprintf("%s/waiters=%d", line.name, waiters), func(b *testing.B) {
				ctx, cancel := context.WithCancel(b.Context())
				enter := line.open(b, ctx)
				leave, err := enter()
				if err != nil {
					b.Fatal(err)
				}

				var (
					all     sync.WaitGroup
					waiting atomic.Int64
					next    = make(chan func())
				)
				come := func() {
					for range waiters - int(waiting.Load()) {
						all.Go(func() {
							waiting.Add(1)
							leave, err := enter()
							waiting.Add(-1)
							if err == nil {
								next <- leave
							}
						})
					}
					for int(waiting.Load()) < waiters {
						runtime.Gosched()
					}
				}
				heap, stacks := memory()
				come()
				heapAfter, stacksAfter := memory()

				var handing time.Duration
				b.ReportAllocs()
				for b.Loop() {
					began := time.Now()
					leave()
					handing += time.Since(began)
					leave = <-next
					come()
				}
				b.ReportMetric(float64(handing.Nanoseconds())/float64(b.N), "ns/next")
				if waiters >= 1000 { // of fewer, chance decides whether there is a stack to use again
					b.ReportMetric((heapAfter-heap+stacksAfter-stacks)/float64(waiters), "B/waiter")
				}

				cancel()
				leave()
				go func() {
					all.Wait()
					close(next)
				}()
				for leave := range next { // who was let in though the line closed
					leave()
				}
			}})
		}
	}
	return all
}
