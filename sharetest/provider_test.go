package sharetest_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// sent replays calls of which nothing decides, and returns those that the provider took at once.
func sent(t *testing.T, p sharetest.Provider, arrivals ...sharetest.Arrival) (took []bool, highest int64) {
	t.Helper()
	r := mustReplay(t, hundred, sharetest.Trace{Length: 5 * time.Minute, Arrivals: arrivals}, &sharetest.Options{
		Policy: sharetest.Undecided, Callers: callers(1), Provider: p, // they give up at once
	})
	for _, a := range arrivals {
		took = append(took, r.Between(a.At, a.At+1).Classes[interactive].TooMany == 0)
	}
	return took, r.HighestWindow
}

func at(when time.Duration, tokens int64) sharetest.Arrival {
	return sharetest.Arrival{At: when, Estimate: tokens, Actual: tokens}
}

func TestExactProviderCountsAChargeForOneWindow(t *testing.T) {
	took, highest := sent(t, sharetest.Provider{},
		at(0, 101), at(1, 60), at(time.Second, 41), at(2*time.Second, 40), at(time.Minute, 1),
		at(time.Minute+1, 61), at(time.Minute+2, 60), at(2*time.Minute, 40))
	assert.Equal(t, []bool{false, true, false, true, false, false, true, true}, took)
	assert.EqualValues(t, 100, highest)
}

func TestProviderWithAnotherNumberOfTokens(t *testing.T) {
	took, highest := sent(t, sharetest.Provider{Tokens: 60}, at(0, 61), at(1, 60), at(2, 1), at(time.Minute+1, 60))
	assert.Equal(t, []bool{false, true, false, true}, took)
	assert.EqualValues(t, 60, highest)
	took, highest = sent(t, sharetest.Provider{Tokens: 120}, at(0, 120), at(1, 1))
	assert.Equal(t, []bool{true, false}, took)
	assert.EqualValues(t, 120, highest)

	// A quota that was configured wrong: what decides admits, and the provider does not.
	trace := calls([2]int64{0, 60}, [2]int64{1, 40})
	r := mustReplay(t, hundred, trace, &sharetest.Options{
		Callers: callers(10 * time.Second), Provider: sharetest.Provider{Tokens: 60},
	})
	people := r.Classes[interactive]
	assert.Zero(t, people.Refusals())
	assert.Equal(t, people.TooMany, r.TooMany)
	assert.Equal(t, 1, people.HeldUp)
	assert.Equal(t, 1, people.GaveUp)
	assert.Equal(t, 1, people.Admitted)
}

func TestA429ChargesNothing(t *testing.T) {
	// The Window has room for 100, and the provider for 60: what it did not take must not stay in the Window, where it
	// would be in the way of the last.
	trace := calls([2]int64{0, 60}, [2]int64{1, 40}, [2]int64{61, 60}, [2]int64{121, 60})
	r := mustReplay(t, hundred, trace, &sharetest.Options{Callers: callers(1), Provider: sharetest.Provider{Tokens: 60}})
	assert.Equal(t, 3, r.Classes[interactive].Admitted)
	assert.Zero(t, r.Classes[interactive].Refusals())
}

func TestBucketRefillsContinuously(t *testing.T) {
	// A hundred tokens a minute are one in 600 ms. A bucket of a minute holds all of them, and one of six seconds ten.
	const token = 600 * time.Millisecond
	took, highest := sent(t, sharetest.Provider{Bucket: time.Minute},
		at(0, 60), at(1, 41), at(2, 40), at(token-1, 1), at(token, 1), at(11*token-1, 10), at(11*token, 10),
		at(21*token-1, 10), at(4*time.Minute, 100), at(4*time.Minute+1, 1))
	assert.Equal(t, []bool{true, false, true, false, true, false, true, false, true, false}, took)
	assert.EqualValues(t, 111, highest, "a bucket lets pass more than the quota in a window")

	took, _ = sent(t, sharetest.Provider{Bucket: 10 * token},
		at(0, 10), at(1, 1), at(token, 1), at(4*token, 4), at(4*token+1, 3),
		at(4*token+2, 1), at(time.Minute, 10), at(time.Minute+1, 1))
	assert.Equal(t, []bool{true, false, true, false, true, false, true, false}, took, "it is never fuller than full")
}

func TestCallLargerThanTheBucketNeedsAFullOne(t *testing.T) {
	const token = 600 * time.Millisecond
	took, _ := sent(t, sharetest.Provider{Bucket: 10 * token},
		at(0, 25), at(1, 1), // 15 tokens in debt: 16 tokens until there is one
		at(16*token-1, 1), at(16*token, 1),
		at(26*token-1, 11), at(26*token, 11), // one token less in debt
		at(27*token, 1), at(28*token, 1))
	assert.Equal(t, []bool{true, false, false, true, false, true, false, true}, took)
}

func TestSettledTokensGoBackToTheBucket(t *testing.T) {
	const token = 600 * time.Millisecond
	call := sharetest.Arrival{Estimate: 10, Actual: 4, Duration: 2 * token}
	// Two were refilled by then, and six come back.
	took, _ := sent(t, sharetest.Provider{Bucket: 10 * token}, call, at(2*token-1, 2), at(2*token+1, 9), at(2*token+2, 8))
	assert.Equal(t, []bool{true, false, false, true}, took)

	took, _ = sent(t, sharetest.Provider{Bucket: 10 * token, CountsReserved: true},
		call, at(2*token+1, 3), at(2*token+2, 2))
	assert.Equal(t, []bool{true, false, true}, took, "if it counts what was used")

	call.Duration = 9 * token // it is as good as full
	took, _ = sent(t, sharetest.Provider{Bucket: 10 * token}, call, at(9*token+1, 10), at(9*token+2, 1))
	assert.Equal(t, []bool{true, true, false}, took, "it is never fuller than full")

	call = sharetest.Arrival{Estimate: 6, Actual: 9, Duration: 2 * token}
	took, _ = sent(t, sharetest.Provider{Bucket: 10 * token}, call, at(2*token-1, 6), at(2*token+1, 4), at(2*token+2, 3))
	assert.Equal(t, []bool{true, false, false, true}, took, "more than was estimated is taken")
}

func TestBucketOfExtremes(t *testing.T) {
	b := sharetest.NewBucket(1, math.MaxInt64, time.Second)
	assert.True(t, b.Take(0, 1<<32), "a full one takes anything")
	assert.False(t, b.Take(1<<60-1, 1), "and is not paid off in 36 years")
	b = sharetest.NewBucket(1, 1<<62, time.Second)
	assert.True(t, b.Take(0, 4), "2^64 ns to refill")
	assert.False(t, b.Take(1<<60-1, 1))
	b = sharetest.NewBucket(math.MaxInt64, 1, 1)
	for range 100 {
		assert.True(t, b.Take(0, 1<<32), "it takes no time to refill")
	}
	b = sharetest.NewBucket(3, 10, 10)
	assert.True(t, b.Take(0, 3))
	assert.False(t, b.Take(2, 1))
	assert.True(t, b.Take(3, 1), "a third of ten nanoseconds is rounded down")
}

func TestBucketOfASecondRefusesWhatAMinuteAllows(t *testing.T) {
	// 60 calls of a thousand tokens at once are what a quota of 60,000 a minute allows; enforced as 1,000 a second one
	// of them passes at a time.
	quota, trace := quotashare.Quota{Tokens: 60_000}, sharetest.Trace{Length: time.Minute}
	for range 60 {
		trace.Arrivals = append(trace.Arrivals, at(0, 1000))
	}
	for size, passes := range map[time.Duration]int{time.Minute: 60, time.Second: 1, 10 * time.Second: 10, 0: 60} {
		r := mustReplay(t, quota, trace, &sharetest.Options{
			Policy: sharetest.Undecided, Callers: callers(1), Provider: sharetest.Provider{Bucket: size},
		})
		assert.Equal(t, passes, r.Classes[interactive].Admitted, size)
		assert.Equal(t, 60-passes, r.TooMany, size)
	}
}
