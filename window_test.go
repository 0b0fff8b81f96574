package quotashare_test

import (
	"math"
	"math/bits"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

func TestZeroWindowRefusesAsInvalid(t *testing.T) {
	var w Window
	grant, d := w.TryAcquire(Interactive, 1)
	require.Equal(t, Decision{Reason: ReasonInvalid}, d)
	grant.Settle(5)
	require.Equal(t, Usage{}, w.Usage())
	require.Equal(t, Quota{}, w.Quota())
	require.ErrorContains(t, w.SetQuota(Quota{Tokens: 1}), "NewWindow")
}

func TestTheZeroOptionChangesNothing(t *testing.T) {
	w, err := NewWindow(Quota{Tokens: 1000}, Option{}, WithMaxWait(Interactive, -1))
	require.NoError(t, err)
	require.Equal(t, int64(1000), w.Quota().Tokens)
}

func TestSetQuotaKeepsTheWindowLength(t *testing.T) {
	w, clock := newTestWindow(t, Quota{Tokens: 1000})
	_, d := w.TryAcquire(Interactive, 600)
	require.True(t, d.Admitted)
	before := w.Quota()
	for want, q := range map[string]Quota{
		"window is 1s: want 1m0s":    {Tokens: 1000, Window: time.Second},
		"window is 1ns: want 1m0s":   {Tokens: 1000, Window: 1},
		"tokens is 0":                {},
		"window is -1s: want a posi": {Tokens: 1, Window: -time.Second},
	} {
		require.ErrorContains(t, w.SetQuota(q), want)
		require.Equal(t, before, w.Quota())
	}
	require.NoError(t, w.SetQuota(Quota{Tokens: 500, Window: time.Minute, Pace: 3}))
	require.Equal(t, int64(600), w.Usage().Used[Interactive])
	require.Equal(t, int64(600), w.Usage().Recent[Interactive])
	_, d = w.TryAcquire(Interactive, 1)
	require.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: time.Minute}, d)
	clock.advance(time.Minute)
	_, d = w.TryAcquire(Interactive, 1)
	require.True(t, d.Admitted)
}

// TestWindowOnTheRealClock is the one that reads no fake clock; the bubble makes the real one stand still.
func TestWindowOnTheRealClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := NewWindow(Quota{Tokens: 1000}, WithClock(nil))
		require.NoError(t, err)
		_, d := w.TryAcquire(Interactive, 700)
		require.True(t, d.Admitted)
		time.Sleep(20 * time.Second)
		_, d = w.TryAcquire(Interactive, 700)
		require.Equal(t, 40*time.Second, d.RetryAfter)
		time.Sleep(d.RetryAfter)
		_, d = w.TryAcquire(Interactive, 700)
		require.True(t, d.Admitted)
	})
}

func TestGrantsOfAnotherLimiter(t *testing.T) {
	var settled []int64
	cancelled := 0
	for range 2 {
		grant := NewGrant(settler{func(n int64) { settled = append(settled, n) }, func() { cancelled++ }})
		grant.Settle(5)
		grant.Cancel()
		grant.Settle(6)
	}
	unknown := NewGrant(settler{func(n int64) { settled = append(settled, n) }, nil})
	unknown.Settle(-1)
	grant := NewGrant(settler{nil, func() { cancelled++ }})
	grant.Cancel()
	grant.Cancel()
	grant.Settle(7)
	require.Equal(t, []int64{5, 5, -1}, settled)
	require.Equal(t, 1, cancelled)

	nothing := NewGrant(nil)
	nothing.Settle(1)
	var zero Grant
	zero.Cancel()
	zero.Settle(1)
}

type settler struct {
	settle func(int64)
	cancel func()
}

func (s settler) Settle(actual int64) { s.settle(actual) }
func (s settler) Cancel()             { s.cancel() }

func TestSettledAboveEverything(t *testing.T) {
	w, clock := newTestWindow(t, Quota{Tokens: 1000, Floors: NoFloors})
	for range 3 {
		first, _ := w.TryAcquire(Interactive, 10)
		second, d := w.TryAcquire(Interactive, 10)
		require.True(t, d.Admitted)
		first.Settle(math.MaxInt64)
		second.Settle(math.MaxInt64)
		require.Equal(t, int64(math.MaxInt64), w.Usage().Used[Interactive], "it saturates")
		require.Equal(t, int64(math.MaxInt64), w.Usage().Demand[Interactive])
		_, d = w.TryAcquire(Batch, 10)
		require.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: time.Minute}, d)
		clock.advance(3 * time.Minute)
	}
}

func TestConcurrentCallersShareOneWindow(t *testing.T) {
	w, err := NewWindow(Quota{Tokens: 1_000_000, Floors: NoFloors, Pace: 1, Window: time.Hour})
	require.NoError(t, err)
	const callers, calls, size = 8, 2000, 100 // more than the quota
	admitted := make([]int64, callers)
	var wait sync.WaitGroup
	for i := range callers {
		wait.Go(func() {
			for n := range calls {
				grant, d := w.TryAcquire(Class(n%NumClasses), size)
				if !d.Admitted {
					continue
				}
				var twice sync.WaitGroup
				twice.Go(func() { grant.Settle(size / 2) })
				grant.Settle(size / 2)
				twice.Wait()
				admitted[i] += size / 2
				w.Usage()
			}
		})
	}
	wait.Wait()
	sum := int64(0)
	for _, n := range admitted {
		sum += n
	}
	require.Equal(t, sum, usedTotal(w))
	require.Greater(t, sum, int64(700_000))
	require.LessOrEqual(t, sum, int64(1_000_000))
}

func TestNothingIsAllocated(t *testing.T) {
	q := Quota{Tokens: 1_000_000, Floors: ElasticFloors}
	w, clock := newTestWindow(t, q)
	lender, lenderClock := newTestWindow(t, q)
	want := func(w *Window, c Class, tokens int64, reason Reason) {
		grant, d := w.TryAcquire(c, tokens)
		if d.Reason != reason || d.RetryAfter == 0 && !d.Admitted && !d.Permanent() {
			t.Fatal(c, tokens, d, w.Usage())
		}
		grant.Settle(1)
	}
	for i := range many(200_000) { // until the logs are as long as they get
		for _, w := range []*Window{w, lender} {
			w.TryAcquire(Class(i%NumClasses), 10+int64(i%20))
			w.TryAcquire(Class(i%NumClasses), 200_000)
		}
		clock.advance(time.Millisecond)
		lenderClock.advance(time.Millisecond)
	}
	clock.advance(3 * time.Minute)
	lenderClock.advance(3 * time.Minute)
	w.TryAcquire(Batch, 50_000)
	lender.TryAcquire(Batch, 100_000)
	run := func() {
		clock.advance(time.Microsecond)
		want(w, Interactive, 1000, ReasonOwnShare)
		want(w, Batch, 60_000, ReasonBorrowed)
		want(w, Batch, 830_000, ReasonReserved)
		want(w, Batch, 990_000, ReasonTooLarge)
		want(lender, Batch, 10_000, ReasonPaced)
	}
	require.Zero(t, testing.AllocsPerRun(1000, run))
	u := w.Usage()
	require.Zero(t, testing.AllocsPerRun(1000, func() { Admit(Interactive, 10, u, q) }))
}

// TestAWaitAllocatesLittle holds a wait to three allocations beyond its timer, and the error that ends this one.
func TestAWaitAllocatesLittle(t *testing.T) {
	w, err := NewWindow(Quota{Tokens: 1000, Window: time.Hour}, WithMaxWait(Batch, 1))
	require.NoError(t, err)
	_, d := w.TryAcquire(Batch, 100)
	require.True(t, d.Admitted)
	wait := func() {
		if _, err := w.Acquire(t.Context(), Batch, 100); err == nil {
			t.Fatal("admitted")
		}
	}
	wait()
	timer := testing.AllocsPerRun(100, func() { time.NewTimer(time.Hour).Stop() })
	require.LessOrEqual(t, testing.AllocsPerRun(100, wait), 3+timer+1)

	require.Zero(t, testing.AllocsPerRun(100, func() {
		if grant, err := w.Acquire(t.Context(), Interactive, 1); err != nil {
			t.Fatal(err)
		} else {
			grant.Settle(0)
		}
	}))
}

func TestMemoryIsBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("millions of calls")
	}
	measure := func(n int, use func(*Window, *clock)) (bytes uint64) {
		windows := make([]*Window, n)
		clocks := make([]*clock, n)
		for i := range clocks {
			clocks[i] = newClock()
		}
		before := heap()
		for i := range windows {
			windows[i], _ = NewWindow(Quota{Tokens: 1_000_000}, WithClock(clocks[i].read))
			use(windows[i], clocks[i])
		}
		after := heap()
		runtime.KeepAlive(windows)
		return (after - before) / uint64(n)
	}
	require.Less(t, measure(1000, func(*Window, *clock) {}), uint64(4<<10))
	busy := measure(2, func(w *Window, clock *clock) {
		for i := range 1_200_000 { // a million calls, admitted and refused, in the last minute
			w.TryAcquire(Class(i%NumClasses), 1+int64(i%7))
			clock.advance(60 * time.Microsecond)
		}
		require.NotEqual(t, ClassTokens{}, w.Usage().Used)
	})
	require.LessOrEqual(t, busy, uint64(64<<10))
}

// TestSizes makes it seen when what is copied with each call grows: 64 bytes are a line of the cache.
func TestSizes(t *testing.T) {
	sizes := []uintptr{
		unsafe.Sizeof(Decision{}), unsafe.Sizeof(Grant{}), unsafe.Sizeof(Source{}), unsafe.Sizeof(Usage{}), unsafe.Sizeof(Quota{}),
	}
	want := map[int][]uintptr{
		32: {12, 36, 1, 80, 100},
		64: {16, 48, 1, 80, 104},
	}
	require.Equal(t, want[bits.UintSize], sizes)
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
