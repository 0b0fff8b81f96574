package sharetest_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// A tried call is one of a class, at a second, of so many tokens.
type tried struct {
	at     int64
	class  quotashare.Class
	tokens int64
}

// try replays calls that take no time and whose callers wait for ever, over two windows.
func try(t *testing.T, policy sharetest.Policy, quota quotashare.Quota, calls ...tried) sharetest.Report {
	t.Helper()
	trace := sharetest.Trace{Length: 2 * time.Minute}
	for _, c := range calls {
		trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{
			At: time.Duration(c.at) * time.Second, Class: c.class, Estimate: c.tokens, Actual: c.tokens,
		})
	}
	forEver := sharetest.Callers{Patience: -1}
	return mustReplay(t, quota, trace, &sharetest.Options{
		Policy: policy, Callers: [quotashare.NumClasses]sharetest.Callers{forEver, forEver, forEver},
	})
}

// shared is an account of a hundred tokens a minute: 50 for interactive, of which 20 are kept free, and 30 and 10, and
// 20 and 5, for the others.
var shared = quotashare.Quota{
	Tokens: 100, Pace: 1,
	Shares: quotashare.Fractions{0.5, 0.3, 0.2},
	Floors: quotashare.Fractions{0.2, 0.1, 0.05},
}

func TestUndecidedSendsEverythingToTheProvider(t *testing.T) {
	r := try(t, sharetest.Undecided, shared, tried{0, batch, 100}, tried{0, interactive, 1}, tried{10, batch, 1})
	assert.EqualValues(t, 100, r.Between(0, time.Minute).Classes[batch].AdmittedTokens, "whoever comes first")
	assert.Equal(t, 1, r.Between(0, time.Minute).Classes[batch].Borrowed)
	assert.Greater(t, r.Classes[interactive].TooMany, 8)
	assert.GreaterOrEqual(t, r.Classes[interactive].Wait(1), time.Minute)
	for class, c := range r.Classes {
		assert.Zero(t, c.Refusals(), class)
		assert.Zero(t, c.Dropped, class)
	}
	assert.Nil(t, r.Advice)
	for _, m := range r.Timeline {
		assert.Zero(t, m.Kept)
	}

	r = try(t, sharetest.Undecided, shared, tried{0, batch, 101})
	assert.Equal(t, 1, r.Classes[batch].Pending, "the provider does not refuse for good")
}

func TestStaticPartitionLeavesIdleWhatAClassDoesNotUse(t *testing.T) {
	r := try(t, sharetest.StaticPartition, shared,
		tried{0, batch, 20}, tried{0, batch, 1}, tried{0, interactive, 50}, tried{1, interactive, 51},
		tried{1, background, 29})
	first := r.Between(0, time.Minute)
	assert.EqualValues(t, 20, first.Classes[batch].AdmittedTokens)
	assert.Equal(t, 1, first.Classes[batch].Pending, "though a token is free")
	assert.Equal(t, []time.Duration{0, time.Minute}, r.Classes[batch].Waits, "until its own tokens are free")
	assert.NotZero(t, first.Classes[batch].Refused[quotashare.ReasonCapped])
	assert.Equal(t, 1, first.Classes[interactive].Dropped, "larger than the share")
	assert.InDelta(t, 0.99, first.Utilisation, 1e-12)
	for class, c := range r.Classes {
		assert.Zero(t, c.Borrowed, class)
	}
	assert.Zero(t, r.Lent)
	assert.Equal(t, shared.Ceilings, r.Quota.Ceilings, "the report has the quota as it was given")

	quota := shared
	quota.Shares, quota.Floors = quotashare.Fractions{0.5, 0.5, 0}, quotashare.Fractions{}
	r = try(t, sharetest.StaticPartition, quota, tried{0, batch, 1}, tried{0, background, 50})
	assert.Equal(t, 1, r.Classes[batch].Dropped, "a share of nothing")
	assert.Equal(t, 1, r.Classes[background].Admitted)
}

func TestStrictPriorityStarvesBatch(t *testing.T) {
	// Floors and shares mean nothing to it: batch may have all, while nobody waits.
	r := try(t, sharetest.StrictPriority, shared, tried{0, batch, 100}, tried{1, batch, 1})
	assert.EqualValues(t, 100, r.Between(0, time.Minute).Classes[batch].AdmittedTokens)
	assert.Equal(t, 12, r.Classes[batch].Refused[quotashare.ReasonQuotaFull], "at 1 s, and each 5 s, Backoff, until 56 s")
	assert.Equal(t, []time.Duration{0, time.Minute}, r.Classes[batch].Waits)

	// People always want more than the account has, and so batch gets nothing though a token is free all the time.
	r = try(t, sharetest.StrictPriority, shared, tried{0, interactive, 90}, tried{0, interactive, 90},
		tried{0, interactive, 90}, tried{0, batch, 1}, tried{0, background, 1})
	for _, class := range []quotashare.Class{background, batch} {
		assert.Zero(t, r.Classes[class].Admitted, class)
		assert.NotZero(t, r.Classes[class].Refused[quotashare.ReasonReserved], class)
		assert.Zero(t, r.Classes[class].Refused[quotashare.ReasonQuotaFull], class)
	}
	assert.Equal(t, 2*120, r.Between(0, time.Minute).Classes[interactive].Refused[quotashare.ReasonQuotaFull],
		"two of them, each half second, Backoff")
	assert.Zero(t, r.TooMany)

	// Batch, in turn, is not in the way of anybody.
	r = try(t, sharetest.StrictPriority, shared, tried{0, batch, 90}, tried{0, batch, 90}, tried{1, interactive, 10})
	assert.Equal(t, []time.Duration{0}, r.Classes[interactive].Waits)
}

func TestPatternSketchBorrowsBeyondTheFloorsOfLargerShares(t *testing.T) {
	// For batch, 20 of interactive and 10 of background are kept, so that it may have 70.
	r := try(t, sharetest.PatternSketch, shared, tried{0, batch, 70}, tried{0, batch, 1})
	assert.Equal(t, 1, r.Between(0, time.Minute).Classes[batch].Admitted)
	assert.Equal(t, 1, r.Between(0, time.Minute).Classes[batch].Borrowed)
	assert.Equal(t, 12, r.Between(0, time.Minute).Classes[batch].Refused[quotashare.ReasonQuotaFull], "each 5 s, Backoff")
	assert.Equal(t, 1, try(t, sharetest.PatternSketch, shared, tried{0, batch, 71}).Classes[batch].Pending)

	// For background, whose share is larger than that of batch, it is those of interactive alone.
	assert.Equal(t, 1, try(t, sharetest.PatternSketch, shared, tried{0, background, 80}).Classes[background].Admitted)
	assert.Equal(t, 1, try(t, sharetest.PatternSketch, shared, tried{0, background, 81}).Classes[background].Pending)

	// And for interactive it is nothing.
	assert.Equal(t, 1, try(t, sharetest.PatternSketch, shared, tried{0, interactive, 100}).Classes[interactive].Admitted)

	// What a class has of its floor need not be kept for it.
	r = try(t, sharetest.PatternSketch, shared, tried{0, interactive, 15}, tried{0, background, 40}, tried{0, batch, 40})
	assert.Equal(t, 1, r.Classes[batch].Admitted, "5 and nothing are left to be kept")
	r = try(t, sharetest.PatternSketch, shared, tried{0, interactive, 15}, tried{0, background, 40}, tried{0, batch, 41})
	assert.Zero(t, r.Between(0, time.Minute).Classes[batch].Admitted)
}

func TestPatternSketchCanPassTheQuota(t *testing.T) {
	// Batch has 70, and interactive may claim its share of 50 all the same: 20 more than the provider allows.
	r := try(t, sharetest.PatternSketch, shared, tried{0, batch, 70}, tried{1, interactive, 50})
	assert.Zero(t, r.Classes[interactive].Refusals())
	assert.NotZero(t, r.TooMany)
	assert.Equal(t, r.TooMany, r.Classes[interactive].TooMany)
	assert.GreaterOrEqual(t, r.Classes[interactive].Wait(1), 59*time.Second)
	assert.EqualValues(t, 70, r.HighestWindow, "the provider sees to it")

	wide := try(t, sharetest.ByWindow, shared, tried{0, batch, 70}, tried{1, interactive, 50})
	assert.Zero(t, wide.TooMany, "shares refuse by themselves")
}

func TestPolicyNames(t *testing.T) {
	for policy, want := range map[sharetest.Policy]string{
		sharetest.ByWindow:        "shares",
		sharetest.Undecided:       "nothing decides",
		sharetest.StaticPartition: "static partition",
		sharetest.StrictPriority:  "strict priority",
		sharetest.PatternSketch:   "the pattern's sketch",
		5:                         "policy(5)",
		255:                       "policy(255)",
	} {
		assert.Equal(t, want, policy.String())
		text, err := json.Marshal(policy)
		require.NoError(t, err)
		var got string
		require.NoError(t, json.Unmarshal(text, &got))
		assert.Equal(t, want, got)
	}
	assert.Zero(t, sharetest.ByWindow, "the zero Options replay what the package is for")
}

func TestUnknownPolicyIsAnError(t *testing.T) {
	for _, policy := range []sharetest.Policy{5, 255} {
		_, err := sharetest.Replay(shared, sharetest.Trace{Length: 1}, &sharetest.Options{Policy: policy})
		assert.ErrorContains(t, err, policy.String())
	}
}
