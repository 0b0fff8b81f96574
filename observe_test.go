package quotashare_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

// What the provider says of the account: what is left of it, and that it is full.

// plain is an account of a thousand tokens a minute that lends all that is idle, and at any pace.
var plain = Quota{Tokens: 1000, Floors: NoFloors, Pace: 1}

func TestOthersKeepEverybodysRoomDown(t *testing.T) {
	w, clock := newTestWindow(t, plain)
	grant, d := w.TryAcquire(Batch, 300)
	require.True(t, d.Admitted)

	// The provider counts 500: our 300, and 200 of others.
	w.Observe(500, 0)
	assert.EqualValues(t, 200, w.Usage().Others)
	assert.EqualValues(t, 500, w.Stats().Used)
	for c := range Class(NumClasses) {
		_, d = w.TryAcquire(c, 501)
		assert.Equal(t, ReasonQuotaFull, d.Reason, c)
	}
	grant.Cancel()
	_, d = w.TryAcquire(Interactive, 701)
	assert.False(t, d.Admitted)
	_, d = w.TryAcquire(Interactive, 700)
	assert.True(t, d.Admitted)

	// What was told is remembered for a Window, and a twelfth longer at most. The hint counts that in.
	_, d = w.TryAcquire(Interactive, 900)
	require.Equal(t, ReasonQuotaFull, d.Reason)
	assert.GreaterOrEqual(t, d.RetryAfter, time.Minute)
	assert.LessOrEqual(t, d.RetryAfter, time.Minute+5*time.Second)
	clock.advance(time.Minute - 1)
	assert.EqualValues(t, 200, w.Usage().Others)
	clock.advance(5*time.Second + 1)
	assert.Zero(t, w.Usage().Others)
}

// What was charged in the part of the window that is under way is known when Observe is called for the first time, too: the
// provider may still count what was settled meanwhile.
func TestTheFirstObserveKnowsWhatWasSettledOfLate(t *testing.T) {
	w, clock := newTestWindow(t, plain)
	clock.advance(2 * time.Second)
	grant, d := w.TryAcquire(Interactive, 600)
	require.True(t, d.Admitted)
	clock.advance(4 * time.Second) // a part has begun, with 600
	require.EqualValues(t, 600, w.Usage().Used[Interactive])
	grant.Settle(100)
	clock.advance(time.Second)
	w.Observe(350, 0)
	require.EqualValues(t, 50, w.Usage().Others)
}

func TestObserveOnlyTightens(t *testing.T) {
	// The case of late values: the answer to the second call, with 100 left, comes before that to the first, with 900.
	w, _ := newTestWindow(t, plain)
	w.Observe(100, 0)
	w.Observe(900, 0)
	assert.EqualValues(t, 900, w.Usage().Others)
	_, d := w.TryAcquire(Interactive, 101)
	assert.False(t, d.Admitted)
	_, d = w.TryAcquire(Interactive, 100)
	assert.True(t, d.Admitted)

	// More is left than there ever was: the quota is ours, not the provider's.
	w, _ = newTestWindow(t, plain)
	w.Observe(50_000, 0)
	assert.Zero(t, w.Usage().Others)
	_, d = w.TryAcquire(Interactive, 1001)
	assert.True(t, d.Permanent())
}

func TestObserveLeavesOutWhatSaysNothing(t *testing.T) {
	for name, observe := range map[string]func(*Window){
		"negative is unknown":      func(w *Window) { w.Observe(-1, 0) },
		"a time to come":           func(w *Window) { w.Observe(0, -1) },
		"a window old":             func(w *Window) { w.Observe(0, time.Minute) },
		"older than all there was": func(w *Window) { w.Observe(0, 1<<62) },
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := newTestWindow(t, plain)
			observe(w)
			assert.Zero(t, w.Usage().Others)
		})
	}
	var zero Window
	zero.Observe(0, 0)
	zero.Throttled(time.Second)
	zero.Throttled(0)
	assert.Zero(t, zero.Stats())
}

func TestObserveAllowsForWhatWasChargedMeanwhile(t *testing.T) {
	w, clock := newTestWindow(t, plain)
	charge := func(tokens int64) {
		t.Helper()
		_, d := w.TryAcquire(Interactive, tokens)
		require.True(t, d.Admitted)
	}
	// A call was sent when 800 tokens were ours. Its answer says that 200 are left, but comes when they have left the
	// window.
	charge(800)
	clock.advance(59 * time.Second)
	charge(100)
	clock.advance(10 * time.Second)
	w.Observe(100, 10*time.Second)
	assert.Zero(t, w.Usage().Others, "the 800 explain it")

	// One that was sent after they had left says something. Parts of the window are a twelfth, so it must be a while
	// after.
	clock.advance(15 * time.Second)
	w.Observe(99, 5*time.Second)
	assert.EqualValues(t, 801, w.Usage().Others)
}

// TestObserveKnowsWhatWasChargedWhenTheProviderAnswered, which may have left the window since; and it forgets it then.
func TestObserveKnowsWhatWasChargedWhenTheProviderAnswered(t *testing.T) {
	for _, test := range []struct {
		name         string
		used, others int64
	}{
		{"some", 250, 200}, // what is not left of 1000 is 700
		{"more than an int64", math.MaxInt64 - 1, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			w, clock := newTestWindow(t, Quota{Tokens: 1000, Floors: NoFloors})
			w.Observe(1000, 0) // from now on the Window remembers
			clock.advance(time.Second)
			one, _ := w.TryAcquire(Interactive, 200)
			other, d := w.TryAcquire(Background, 200)
			require.True(t, d.Admitted)
			one.Settle(test.used)
			other.Settle(test.used)
			clock.advance(61 * time.Second)
			w.Observe(300, 1500*time.Millisecond)
			require.Equal(t, test.others, w.Usage().Others)
			clock.advance(2 * time.Minute)
			w.Observe(299, 0)
			require.Equal(t, int64(701), w.Usage().Others)
		})
	}
}

func TestObserveKnowsWhatWasSettledSinceTheProviderAnswered(t *testing.T) {
	w, clock := newTestWindow(t, Quota{Tokens: 1000, Floors: NoFloors})
	w.Observe(1000, 0)
	clock.advance(time.Second)
	grant, d := w.TryAcquire(Interactive, 500)
	require.True(t, d.Admitted)
	clock.advance(time.Second)
	grant.Settle(0)
	clock.advance(time.Second)
	w.Observe(300, 1500*time.Millisecond)
	require.Equal(t, int64(200), w.Usage().Others)
}

// TestObserveKnowsWhenTheProviderMayHaveAnswered charges 400 tokens for a moment, and is told at another that 500 are
// left, in the answer to a call that was sent so long ago. What was charged explains it if the answer may be of the same
// part of the window, and be it for a nanosecond.
func TestObserveKnowsWhenTheProviderMayHaveAnswered(t *testing.T) {
	for _, test := range []struct {
		charged, told, sent time.Duration
		explained           bool
	}{
		{16 * time.Second, 22 * time.Second, time.Second, false},
		{16 * time.Second, 22 * time.Second, 2 * time.Second, false},
		{16 * time.Second, 22 * time.Second, 2*time.Second + 1, true},
		{11 * time.Second, 24 * time.Second, 5 * time.Second, false},
		{6 * time.Second, 22 * time.Second, 12 * time.Second, false},
		{6 * time.Second, 22 * time.Second, 12*time.Second + 1, true},
		{1 * time.Second, 60 * time.Second, 59 * time.Second, true},
	} {
		w := newCaseWindow(t, Quota{Tokens: 1000, Floors: NoFloors})
		w.Observe(1000, 0)
		w.at(test.charged)
		grant := w.admit(Interactive, 400)
		w.at(test.charged + time.Second)
		grant.Settle(0)
		w.at(test.told)
		w.Observe(500, test.sent)
		want := int64(500)
		if test.explained {
			want = 100
		}
		require.Equal(t, want, w.Usage().Others, "%+v", test)
	}
}

// What was only asked for explains nothing, but before the first Observe, for until then it is all that is known.
func TestObserveTakesARefusalForNoCharge(t *testing.T) {
	w := newCaseWindow(t, Quota{Tokens: 1000, Floors: NoFloors, Ceilings: Fractions{Interactive: 0.7}})
	w.Observe(1000, 0)
	w.at(10 * time.Second)
	w.admit(Interactive, 100)
	w.refuse(Interactive, 650)
	w.at(20 * time.Second)
	w.Observe(500, 15*time.Second)
	require.Equal(t, int64(400), w.Usage().Others)
}

// TestAHintKnowsWhenOthersAreForgotten: when the part of the window ends in which they were told, the window later.
func TestAHintKnowsWhenOthersAreForgotten(t *testing.T) {
	w := newCaseWindow(t, wholeQuota(1000))
	w.Observe(999, 0) // a single token
	w.wait(Interactive, 1000, 65*time.Second)

	w = newCaseWindow(t, wholeQuota(1000))
	w.Observe(500, 0)
	w.at(3 * time.Second)
	w.admit(Interactive, 500)
	w.at(62 * time.Second)
	w.wait(Interactive, 600, 3*time.Second) // not when the charge leaves, which is sooner
}

func TestObserveTakesACachedValueOnce(t *testing.T) {
	w, clock := newTestWindow(t, Quota{Tokens: 100_000, Floors: NoFloors, Pace: 1})
	w.Observe(90_000, 0)
	require.EqualValues(t, 10_000, w.Usage().Others)
	for range 5 {
		clock.advance(20 * time.Second)
		_, d := w.TryAcquire(Interactive, 600)
		require.True(t, d.Admitted)
		w.Observe(90_000, 0)
	}
	assert.Zero(t, w.Usage().Others, "it was told long ago, whatever is told since")
	w.Observe(90_001, 0)
	assert.NotZero(t, w.Usage().Others)
	assert.Less(t, w.Usage().Others, int64(10_000))
}

// A value that is told again is taken while no more was charged than providers round by.
func TestObserveTakesAValueAgainWhileLittleIsCharged(t *testing.T) {
	for _, test := range []struct {
		quota, most int64
	}{
		{1_000_000, 1000},
		{9_900, 99}, // a hundredth
	} {
		for _, charged := range []int64{test.most, test.most + 1} {
			w, clock := newTestWindow(t, Quota{Tokens: test.quota, Floors: NoFloors})
			w.Observe(test.quota/2, 0)
			clock.advance(40 * time.Second)
			_, d := w.TryAcquire(Interactive, charged)
			require.True(t, d.Admitted)
			w.Observe(test.quota/2, 0)
			clock.advance(30 * time.Second)
			require.Equal(t, charged == test.most, w.Usage().Others > 0, "%d of %d", charged, test.quota)
		}
	}
}

func TestObserveInTheShortestWindow(t *testing.T) {
	w, _ := newTestWindow(t, Quota{Tokens: 100, Window: 1})
	w.Observe(40, 0)
	require.Equal(t, int64(60), w.Usage().Others)
}

func TestObserveKnowsAValueThatIsToldForTheFirstTime(t *testing.T) {
	quota := Quota{Tokens: 100_000, Floors: NoFloors, Pace: 1}
	w, _ := newTestWindow(t, quota)
	_, d := w.TryAcquire(Interactive, 5_000)
	require.True(t, d.Admitted)
	w.Observe(0, 0)
	require.EqualValues(t, 95_000, w.Usage().Others, "nothing is left, though more than a thousand tokens were charged")

	// Told again after a little was charged, it is no cached one: it is remembered from then on.
	w, clock := newTestWindow(t, quota)
	w.TryAcquire(Interactive, 5_000)
	w.Observe(90_000, 0)
	require.EqualValues(t, 5_000, w.Usage().Others)
	clock.advance(40 * time.Second)
	w.TryAcquire(Interactive, 500)
	w.Observe(90_000, 0)
	clock.advance(30 * time.Second)
	assert.EqualValues(t, 4_500, w.Usage().Others)
}

func TestThrottledStopsEverybodyAndLoansForLonger(t *testing.T) {
	w, clock := newTestWindow(t, plain) // shares of 700, 200 and 100
	w.Throttled(20 * time.Second)
	for c := range Class(NumClasses) {
		_, d := w.TryAcquire(c, 1)
		assert.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: 20 * time.Second}, d, c)
		_, d = w.TryAcquire(c, 701)
		assert.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: time.Minute}, d, "%v: a loan", c)
		_, d = w.TryAcquire(c, 1001)
		assert.True(t, d.Permanent())
	}
	w.Throttled(time.Second) // which does not shorten it
	clock.advance(20*time.Second - 1)
	_, d := w.TryAcquire(Batch, 1)
	assert.False(t, d.Admitted)
	clock.advance(1)
	_, d = w.TryAcquire(Batch, 100)
	assert.Equal(t, ReasonOwnShare, d.Reason)
	_, d = w.TryAcquire(Batch, 1)
	assert.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: 40 * time.Second}, d)
	clock.advance(40 * time.Second)
	_, d = w.TryAcquire(Batch, 1)
	assert.Equal(t, ReasonBorrowed, d.Reason)
}

func TestThrottledForLongerThanAWindow(t *testing.T) {
	w, clock := newTestWindow(t, plain)
	w.Throttled(90 * time.Second)
	w.Throttled(time.Second)
	clock.advance(70 * time.Second)
	for c := range Class(NumClasses) {
		_, d := w.TryAcquire(c, 1)
		assert.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: 20 * time.Second}, d, c)
		_, d = w.TryAcquire(c, 701)
		assert.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: 20 * time.Second}, d, "%v: a loan", c)
	}
}

func TestThrottledForANanosecond(t *testing.T) {
	for _, length := range []time.Duration{1, time.Minute} {
		w := newCaseWindow(t, Quota{Tokens: 1000, Window: length, Floors: NoFloors})
		w.at(length / 2)
		w.Throttled(1)
		w.wait(Interactive, 1, 1)
		w.wait(Interactive, 800, length) // which is a loan
		w.at(length/2 + 1)
		w.admit(Interactive, 1)
	}
}

// TestThrottledAtTheEndOfTime: what is not over before the window's time ends holds for ever.
func TestThrottledAtTheEndOfTime(t *testing.T) {
	w := newCaseWindow(t, Quota{Tokens: 1000, Window: math.MaxInt64, Floors: NoFloors})
	w.at(200 * 365 * 24 * time.Hour)
	w.Throttled(time.Hour)
	w.wait(Interactive, 1, time.Hour)
	w.wait(Interactive, 800, math.MaxInt64-200*365*24*time.Hour)
	w.at(math.MaxInt64)
	w.Throttled(time.Hour)
	w.wait(Interactive, 1, 1)
	w.wait(Interactive, 1, 1)
}

func TestThrottledWithoutAHint(t *testing.T) {
	for _, hint := range []time.Duration{0, -5 * time.Second} {
		w, _ := newTestWindow(t, plain)
		w.Throttled(hint)
		_, d := w.TryAcquire(Interactive, 1)
		assert.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: time.Minute / 120}, d)
	}
}

func TestThrottledByAnotherLimitChangesNothing(t *testing.T) {
	for hint, want := range map[time.Duration]bool{
		time.Minute: false, 2 * time.Minute: false, 2*time.Minute + 2: true, 24 * time.Hour: true, 1<<63 - 1: true,
	} {
		w, _ := newTestWindow(t, plain)
		w.Throttled(hint)
		_, d := w.TryAcquire(Batch, 500)
		assert.Equal(t, want, d.Admitted, hint)
	}
}

func TestWaitersWaitUntilTheProviderIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := NewWindow(plain)
		require.NoError(t, err)
		start := time.Now()
		w.Throttled(20 * time.Second)
		grant, err := w.Acquire(t.Context(), Background, 200)
		require.NoError(t, err)
		assert.Equal(t, 20*time.Second, time.Since(start))
		grant.Settle(200)

		// It comes while one waits already: the room that it waits for is no longer enough.
		_, err = w.Acquire(t.Context(), Batch, 800)
		require.NoError(t, err)
		assert.Equal(t, time.Minute, time.Since(start), "no loan before")
		time.AfterFunc(30*time.Second, func() { w.Throttled(100 * time.Second) })
		_, err = w.Acquire(t.Context(), Batch, 100)
		require.NoError(t, err)
		assert.Equal(t, time.Minute+130*time.Second, time.Since(start))
	})
}

// TestGuarantee7WithOthersOnTheAccount is guarantee 7 where the provider has its say: the hint is exact all the same.
// And guarantee 1 counts what others hold.
func TestGuarantee7WithOthersOnTheAccount(t *testing.T) {
	waits, others, stopped := 0, 0, 0
	for seed := range uint64(many(1500)) {
		replay := func() (w *Window, clock *clock, c Class, size int64) {
			r := rand.New(rand.NewPCG(seed, 12))
			q := randomQuota(r)
			w, clock = newTestWindow(t, q)
			for range 10 + r.IntN(200) {
				c = Class(r.IntN(NumClasses))
				grant, d := w.TryAcquire(c, randomSize(r, q.Limits(c)))
				if d.Admitted {
					require.LessOrEqual(t, w.Stats().Used, q.Tokens, "seed %d", seed)
					if r.IntN(2) == 0 {
						grant.Settle(r.Int64N(q.Tokens / 10))
					}
				}
				sent := time.Duration(r.Int64N(int64(window(q)) / 4))
				switch r.IntN(12) {
				case 0:
					w.Observe(r.Int64N(q.Tokens), sent)
				case 1:
					w.Observe(q.Tokens/2+r.Int64N(q.Tokens), sent)
				case 2:
					w.Throttled(time.Duration(r.Int64N(int64(window(q)) / 4)))
				}
				clock.advance(time.Duration(r.Int64N(int64(window(q)) / 40)))
			}
			if r.IntN(4) == 0 {
				w.Throttled(time.Duration(r.Int64N(int64(window(q)))))
				stopped++
			}
			c = Class(r.IntN(NumClasses))
			return w, clock, c, randomSize(r, q.Limits(c))
		}
		if w, _, _, _ := replay(); w.Usage().Others > 0 {
			others++
		}
		if requireExactHint(t, seed, replay) {
			waits++
		}
	}
	require.Greater(t, waits, many(400))
	require.Greater(t, others, many(400))
	require.Greater(t, stopped, many(400))
}
