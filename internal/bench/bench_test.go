// Package bench measures quotashare beside golang.org/x/time/rate in one process. It is a module of its own, so that
// the peer is no dependency of the library.
//
// Every benchmark checks the answer that it measures.
package bench

import (
	"fmt"
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

// BenchmarkRate asks at another number of calls a minute, on a clock that moves on with each. What is in the window
// is the same, and so must be the cost.
func BenchmarkRate(b *testing.B) {
	for _, calls := range []int64{100, 10_000, 1_000_000} {
		for _, side := range []struct {
			name  string
			class quotashare.Class
			quota quotashare.Quota
		}{
			{"own_share", interactive, quotashare.Quota{Tokens: plenty}},
			{"borrowed", batch, quotashare.Quota{Tokens: 200 * plenty / 100, Shares: quotashare.Fractions{interactive: 1}, Floors: quotashare.NoFloors}},
		} {
			b.Run(fmt.Sprintf("%s/calls=%d", side.name, calls), func(b *testing.B) {
				now := time.Now()
				window := newWindow(b, side.quota, quotashare.WithClock(func() time.Time { return now }))
				size := plenty / 2 / calls
				call := func() {
					now = now.Add(time.Minute / time.Duration(calls))
					if _, d := window.TryAcquire(side.class, size); !d.Admitted {
						b.Fatalf("%+v, %+v", d, window.Usage())
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

// BenchmarkHint is the worst case of a refusal: every class has a full log of merged charges, and the call waits for
// most of them, within its share or for a loan.
func BenchmarkHint(b *testing.B) {
	for _, call := range []struct {
		class quotashare.Class
		part  float64 // of the quota
	}{
		{interactive, 0.01}, {interactive, 0.3}, {interactive, 0.69}, {batch, 0.05}, {batch, 0.3}, {batch, 0.9},
	} {
		b.Run(fmt.Sprintf("%v/part=%v", call.class, call.part), func(b *testing.B) {
			now := time.Now()
			const tokens, steps = 100_000_000, 20_000
			window := newWindow(b, quotashare.Quota{Tokens: tokens, Floors: quotashare.NoFloors},
				quotashare.WithClock(func() time.Time { return now }))
			for range 2 * steps {
				now = now.Add(time.Minute / steps)
				for c := range quotashare.Class(quotashare.NumClasses) {
					window.TryAcquire(c, window.Quota().Limits(c).Share/steps)
				}
			}
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
