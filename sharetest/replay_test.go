package sharetest_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// hundred is an account of a hundred tokens a minute of which a class may have all.
var hundred = quotashare.Quota{Tokens: 100, Floors: quotashare.NoFloors, Pace: 1}

// callers are callers of interactive calls that have so much patience.
func callers(patience time.Duration) [quotashare.NumClasses]sharetest.Callers {
	return [quotashare.NumClasses]sharetest.Callers{interactive: {Patience: patience}}
}

// calls are interactive calls of so many tokens at so many seconds, over three minutes.
func calls(secondsAndTokens ...[2]int64) sharetest.Trace {
	trace := sharetest.Trace{Length: 3 * time.Minute}
	for _, c := range secondsAndTokens {
		at := time.Duration(c[0]) * time.Second
		trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{At: at, Estimate: c[1], Actual: c[1]})
	}
	return trace
}

func mustReplay(
	t testing.TB, quota quotashare.Quota, trace sharetest.Trace, options *sharetest.Options,
) sharetest.Report {
	t.Helper()
	report, err := sharetest.Replay(quota, trace, options)
	require.NoError(t, err)
	return report
}

func TestRefusedCallersComeBackWhenTold(t *testing.T) {
	r := mustReplay(t, hundred, calls([2]int64{0, 100}, [2]int64{10, 100}), &sharetest.Options{Callers: callers(-1)})
	people := r.Classes[interactive]
	assert.Equal(t, []time.Duration{0, 50 * time.Second}, people.Waits)
	assert.Equal(t, 1, people.Refusals())
	assert.Equal(t, 1, people.Refused[quotashare.ReasonQuotaFull])
	assert.Equal(t, 1, people.HeldUp)
	assert.Equal(t, 2, people.Admitted)
	assert.EqualValues(t, 200, people.AdmittedTokens)
	assert.InDelta(t, 200.0/300, people.Share, 1e-12)

	early := r.Between(0, time.Minute).Classes[interactive]
	assert.Equal(t, 1, early.Pending)
	assert.Equal(t, 1, early.Admitted, "the end of the interval is not part of it")
	assert.Equal(t, 2, r.Between(0, time.Minute+1).Classes[interactive].Admitted)
}

func TestCallersGiveUpWhenTheirPatienceEnds(t *testing.T) {
	// The second call asks at 10 s, and would fit at 60 s.
	for name, test := range map[string]struct {
		policy   sharetest.Policy
		patience time.Duration
		gaveUp   int
	}{
		"shares, a nanosecond too little": {sharetest.ByWindow, 50*time.Second - 1, 1},
		"shares, just enough":             {sharetest.ByWindow, 50 * time.Second, 0},
		"shares, for ever":                {sharetest.ByWindow, -1, 0},
		"undecided, too little":           {sharetest.Undecided, 20 * time.Second, 1},
		"undecided, enough":               {sharetest.Undecided, 59 * time.Second, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := mustReplay(t, hundred, calls([2]int64{0, 100}, [2]int64{10, 100}), &sharetest.Options{
				Policy: test.policy, Callers: callers(test.patience),
			})
			people := r.Classes[interactive]
			assert.Equal(t, test.gaveUp, people.GaveUp)
			assert.Equal(t, 2-test.gaveUp, people.Admitted)
			assert.Zero(t, people.Pending)

			if test.patience > 0 {
				deadline := 10*time.Second + test.patience
				assert.Zero(t, r.Between(0, deadline).Classes[interactive].GaveUp, "it is there until then")
				assert.Equal(t, test.gaveUp, r.Between(deadline, deadline+1).Classes[interactive].GaveUp)
			}
		})
	}
}

func TestPatienceZeroIsThatOfAcquire(t *testing.T) {
	// Each half minute a call takes half of the account, so that there is never room for one of 90.
	trace := sharetest.Trace{Length: 5 * time.Minute}
	for at := time.Duration(0); at < trace.Length; at += 30 * time.Second {
		trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{At: at, Estimate: 50, Actual: 50})
		if at == 30*time.Second {
			for class := range quotashare.Class(quotashare.NumClasses) {
				trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{At: at + 1, Class: class, Estimate: 90, Actual: 90})
			}
		}
	}
	r := mustReplay(t, hundred, trace, nil)
	gaveUp := func(class quotashare.Class, at time.Duration) int { return r.Between(at, at+1).Classes[class].GaveUp }
	assert.Equal(t, 1, gaveUp(interactive, 30*time.Second+1), "not at all")
	assert.Equal(t, 1, gaveUp(background, 150*time.Second+1), "two windows")
	assert.Equal(t, 1, r.Classes[batch].Pending, "for ever")
	assert.Zero(t, r.Classes[batch].GaveUp)
}

func TestCallersBackOffAsTheSDKsDo(t *testing.T) {
	for seed := range uint64(20) {
		r := mustReplay(t, hundred, calls([2]int64{0, 100}, [2]int64{0, 100}), &sharetest.Options{
			Policy: sharetest.Undecided, Callers: callers(-1), Seed: seed,
		})
		// The waits are 0.5, 1, 2, 4, 8, 8, ... seconds, each less a quarter at most.
		tooMany := func(from, to float64) int {
			interval := r.Between(time.Duration(from*1e9), time.Duration(to*1e9))
			assert.Equal(t, interval.Classes[interactive].TooMany, interval.TooMany)
			assert.Zero(t, interval.Classes[interactive].Refusals(), "nothing decides")
			return interval.TooMany
		}
		low, high := 0.0, 0.0
		for n, wait := range []float64{0.5, 1, 2, 4, 8, 8} {
			assert.Equal(t, n+1, tooMany(0, low+0.75*wait), "none comes back before three quarters of %v s", wait)
			low, high = low+0.75*wait, high+wait
			assert.GreaterOrEqual(t, tooMany(0, high+1e-6), n+2, "all come back after %v s", wait)
		}
		wait := r.Classes[interactive].Wait(1)
		assert.GreaterOrEqual(t, wait, time.Minute)
		assert.LessOrEqual(t, wait, 68*time.Second)
		assert.Equal(t, 1, r.Classes[interactive].HeldUp)
	}
}

func TestJitterIsUpToAQuarterAndOfTheSeed(t *testing.T) {
	// A thousand calls that are answered 429 at once come back over an eighth of a second.
	trace := sharetest.Trace{Length: time.Second}
	for range 1001 {
		trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{Estimate: 100, Actual: 100})
	}
	instants := func(seed uint64) (parts [4]int) {
		r := mustReplay(t, hundred, trace, &sharetest.Options{
			Policy: sharetest.Undecided, Callers: callers(600 * time.Millisecond), Seed: seed,
		})
		assert.Equal(t, 1000, r.Between(0, 375*time.Millisecond).TooMany)
		assert.Equal(t, 1000, r.Between(375*time.Millisecond, 500*time.Millisecond+1).TooMany)
		for i := range parts {
			from := 375*time.Millisecond + time.Duration(i)*time.Second/32
			parts[i] = r.Between(from, from+time.Second/32).TooMany
			assert.InDelta(t, 250, parts[i], 60, "the jitter is uniform")
		}
		return parts
	}
	assert.Equal(t, instants(1), instants(1))
	assert.NotEqual(t, instants(1), instants(2))
}

func TestCallsRefusedForGoodAreDropped(t *testing.T) {
	// Work of that kind must not stop the time: each of two workers drops a call every five seconds, Backoff.
	trace := calls([2]int64{1, 101}, [2]int64{2, 100})
	pool := &sharetest.Pool{Workers: 2}
	for range 100 {
		trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{
			At: 2 * time.Second, Class: batch, Estimate: 101, Duration: time.Second, Pool: pool,
		})
	}
	r := mustReplay(t, hundred, trace, nil)
	people, evals := r.Classes[interactive], r.Between(0, 62*time.Second).Classes[batch]
	assert.Equal(t, 1, people.Dropped)
	assert.Equal(t, 1, people.Admitted)
	assert.Zero(t, people.HeldUp, "it could not wait")
	assert.Equal(t, 2*12, evals.Dropped)
	assert.Equal(t, 2*12, evals.Offered)
	assert.Equal(t, 2*12, evals.Refused[quotashare.ReasonTooLarge])
	assert.Equal(t, 100-2*12, evals.Pending, "they are in line")
	assert.Zero(t, evals.HeldUp)
}

func TestPoolHoldsItsWorkers(t *testing.T) {
	trace := sharetest.Trace{Length: time.Minute}
	one, two := &sharetest.Pool{Workers: 3}, &sharetest.Pool{Workers: 1}
	for i := range 7 {
		for _, pool := range []*sharetest.Pool{one, two} {
			trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{
				At: 5*time.Second + time.Duration(i), Class: batch, Estimate: 1, Actual: 1, Duration: 10 * time.Second, Pool: pool,
			})
		}
	}
	r := mustReplay(t, hundred, trace, nil)
	offered := func(from, to time.Duration) int {
		return r.Between(from*time.Second, to*time.Second).Classes[batch].Offered
	}
	assert.Zero(t, offered(0, 5))
	assert.Equal(t, 3+1, offered(5, 15))
	assert.Equal(t, 3+1, offered(15, 25))
	assert.Equal(t, 1+1, offered(25, 35))
	assert.Equal(t, 1, offered(35, 45))
	assert.Equal(t, 7+6, offered(0, 60), "one pool is through, the other has a call in line")
	assert.Equal(t, []time.Duration{0, 0, 0}, r.Between(0, 5*time.Second+3).Classes[batch].Waits[:3])
}

func TestPoolGoesOnAfterGivingUp(t *testing.T) {
	trace, pool := sharetest.Trace{Length: 2 * time.Minute}, &sharetest.Pool{Workers: 1}
	for range 3 {
		trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{
			Class: batch, Estimate: 100, Actual: 100, Duration: time.Second, Pool: pool,
		})
	}
	var options sharetest.Options
	options.Callers[batch].Patience = 20 * time.Second
	c := mustReplay(t, hundred, trace, &options).Classes[batch]
	assert.Equal(t, 3, c.Offered)
	assert.Equal(t, 1, c.Admitted)
	assert.Equal(t, 2, c.GaveUp)
}

func TestConcurrencyOfAClass(t *testing.T) {
	// Five calls at once of a class that makes two at a time, ten seconds each; a call in a Pool is not one of them.
	trace := sharetest.Trace{Length: time.Minute}
	for range 5 {
		trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{Class: background, Estimate: 1, Duration: 10 * time.Second})
	}
	trace.Arrivals = append(trace.Arrivals,
		sharetest.Arrival{Class: background, Estimate: 1, Pool: &sharetest.Pool{Workers: 1}},
		sharetest.Arrival{Class: batch, Estimate: 1}, sharetest.Arrival{Class: batch, Estimate: 1},
		sharetest.Arrival{Class: batch, Estimate: 1})
	var options sharetest.Options
	options.Callers[background].Concurrency = 2
	r := mustReplay(t, hundred, trace, &options)
	assert.Equal(t, 3, r.Between(0, 1).Classes[background].Offered)
	assert.Equal(t, 3, r.Between(0, 1).Classes[batch].Offered, "a class without a limit")
	assert.Equal(t, 3, r.Between(0, 10*time.Second).Classes[background].Offered)
	assert.Equal(t, 2, r.Between(10*time.Second, 10*time.Second+1).Classes[background].Offered)
	assert.Equal(t, 1, r.Between(20*time.Second, 20*time.Second+1).Classes[background].Offered)
	assert.Equal(t, make([]time.Duration, 6), r.Classes[background].Waits, "in line they have not asked")
}

func TestOverestimatesAreSettled(t *testing.T) {
	for _, test := range []struct {
		factor   float64
		estimate int64
	}{{0, 41}, {1, 41}, {1.5, 62}, {0.5, 21}, {0.001, 1}, {1000, 41_000}} {
		trace := calls([2]int64{0, 41})
		trace.Arrivals[0].Duration = 10 * time.Second
		options := sharetest.Options{Callers: [quotashare.NumClasses]sharetest.Callers{{Overestimate: test.factor}}}
		r := mustReplay(t, quotashare.Quota{Tokens: 100_000}, trace, &options)
		assert.Equal(t, test.estimate, r.Classes[interactive].OfferedTokens, test.factor)
		assert.EqualValues(t, 41, r.Classes[interactive].AdmittedTokens, test.factor)
		assert.Equal(t, max(test.estimate, 41), r.HighestWindow, test.factor)
		trace.Length = 10 * time.Second // which is when it ends
		r = mustReplay(t, quotashare.Quota{Tokens: 100_000}, trace, &options)
		assert.Equal(t, test.estimate, r.Classes[interactive].AdmittedTokens, "it does not end in time")
	}
}

func TestWhatCallsUsedReplacesTheirEstimates(t *testing.T) {
	for name, test := range map[string]struct {
		used, duration int64
		reserved       bool          // the provider counts the estimate, and callers do not settle
		tokens, second int64         // that the first call counts for in the end, and that a second one asks for
		wait           time.Duration // of the second, which asks after 20 seconds
		highest        int64
	}{
		"less":                         {40, 10, false, 40, 60, 0, 100},
		"nothing":                      {0, 10, false, 0, 100, 0, 100},
		"all":                          {100, 10, false, 100, 60, 40 * time.Second, 100},
		"more":                         {150, 10, false, 150, 60, 40 * time.Second, 150},
		"less, but too late":           {40, 60, false, 100, 60, 40 * time.Second, 100},
		"less, a nanosecond too late":  {40, 61, false, 100, 60, 40 * time.Second, 100},
		"less, after a while":          {40, 30, false, 40, 60, 40 * time.Second, 100},
		"less, but the estimate stays": {40, 10, true, 100, 60, 40 * time.Second, 100},
		"more, but the estimate stays": {150, 10, true, 100, 60, 40 * time.Second, 100},
	} {
		for _, policy := range []sharetest.Policy{sharetest.ByWindow, sharetest.Undecided, sharetest.StrictPriority} {
			t.Run(fmt.Sprintf("%s/%v", name, policy), func(t *testing.T) {
				trace := calls([2]int64{0, 100}, [2]int64{20, test.second})
				trace.Length = 2 * time.Minute
				trace.Arrivals[0].Actual = test.used
				trace.Arrivals[0].Duration = time.Duration(test.duration) * time.Second
				r := mustReplay(t, hundred, trace, &sharetest.Options{
					Policy: policy, Callers: callers(-1), Provider: sharetest.Provider{CountsReserved: test.reserved},
				})
				people := r.Classes[interactive]
				assert.Equal(t, test.tokens+test.second, people.AdmittedTokens)
				assert.Equal(t, test.highest, r.HighestWindow)
				assert.InDelta(t, float64(people.AdmittedTokens)/200, r.Utilisation, 1e-12)
				if policy == sharetest.ByWindow {
					assert.Equal(t, test.wait, people.Wait(1))
					assert.Zero(t, r.TooMany)
				}
			})
		}
	}
}

func TestShareDelayIsHowLongAClassWasShort(t *testing.T) {
	// Batch holds the whole account from 0 on, and people ask for their share of 70 at 20 s. They have room in it until
	// 60 s, when they get it, and want no more.
	trace := calls([2]int64{20, 70}, [2]int64{20, 80})
	trace.Arrivals = slices.Insert(trace.Arrivals, 0, sharetest.Arrival{Class: batch, Estimate: 100, Actual: 100})
	r := mustReplay(t, hundred, trace, &sharetest.Options{Callers: callers(-1)})
	shares := func(r sharetest.Report) [2]time.Duration {
		c := r.Classes[interactive]
		return [2]time.Duration{c.ShareDelay, c.ShareDelayAt}
	}
	want := [2]time.Duration{40 * time.Second, 20 * time.Second}
	assert.Equal(t, want, shares(r), "a call of 80 is above the share, so what it waits for does not count")
	assert.Zero(t, r.Classes[batch].ShareDelay)
	assert.Equal(t, [2]time.Duration{}, shares(r.Between(0, 20*time.Second)), "before")
	assert.Equal(t, [2]time.Duration{10 * time.Second, 20 * time.Second}, shares(r.Between(0, 30*time.Second)), "so far")
	assert.Equal(t, want, shares(r.Between(50*time.Second, 90*time.Second)), "from when the demand rose")
	assert.Equal(t, [2]time.Duration{}, shares(r.Between(61*time.Second, 90*time.Second)), "after")

	trace.Length = 45 * time.Second
	r = mustReplay(t, hundred, trace, &sharetest.Options{Callers: callers(-1)})
	assert.Equal(t, [2]time.Duration{25 * time.Second, 20 * time.Second}, shares(r), "until the end of the replay")
}

func TestLoansAreTakenAndGivenBack(t *testing.T) {
	// Batch, whose share is 10, takes 100 for a minute; 30 of it, and then 20 more, turn out not to have been used.
	trace := sharetest.Trace{Length: 2 * time.Minute, Arrivals: []sharetest.Arrival{
		{Class: batch, Estimate: 60, Actual: 30, Duration: 20 * time.Second},
		{Class: batch, Estimate: 40, Actual: 50, Duration: 30 * time.Second},
	}}
	r := mustReplay(t, hundred, trace, nil)
	loans := func(from, to time.Duration) [2]int64 {
		part := r.Between(from*time.Second, to*time.Second)
		return [2]int64{part.Lent, part.TakenBack}
	}
	assert.Equal(t, [2]int64{90, 0}, loans(0, 20))
	assert.Equal(t, [2]int64{0, 30}, loans(20, 21), "settled for less")
	assert.Equal(t, [2]int64{10, 0}, loans(30, 31), "settled for more")
	assert.Equal(t, [2]int64{0, 70}, loans(60, 61), "aged")
	assert.Equal(t, [2]int64{100, 100}, loans(0, 120))
	assert.EqualValues(t, 1, r.Classes[batch].Borrowed-1, "both calls were above the share")
}

func TestReplayLeavesItsArgumentsAlone(t *testing.T) {
	trace, pool := calls([2]int64{0, 100}, [2]int64{10, 100}), &sharetest.Pool{Workers: 1}
	for i := range trace.Arrivals {
		trace.Arrivals[i].Pool = pool
	}
	options := sharetest.Options{Callers: [quotashare.NumClasses]sharetest.Callers{{Overestimate: 0.5}}}
	before, optionsBefore := slices.Clone(trace.Arrivals), options
	first := mustReplay(t, hundred, trace, &options)
	assert.Equal(t, before, trace.Arrivals)
	assert.Equal(t, optionsBefore, options)
	assert.Equal(t, 1, pool.Workers)
	assert.Empty(t, diff(first, mustReplay(t, hundred, trace, &options)), "and so it can be repeated")
}

func TestNilOptionsAreZeroOptions(t *testing.T) {
	trace := calls([2]int64{0, 100}, [2]int64{10, 100})
	assert.Empty(t, diff(mustReplay(t, hundred, trace, nil), mustReplay(t, hundred, trace, &sharetest.Options{})))
}

func TestReportSaysWhatWasReplayed(t *testing.T) {
	trace := calls([2]int64{0, 1})
	trace.Start = time.Date(2026, 7, 28, 8, 0, 0, 0, time.UTC)
	r := mustReplay(t, quotashare.Quota{Tokens: 100}, trace, &sharetest.Options{Policy: sharetest.StrictPriority})
	assert.Equal(t, "strict priority", r.Name)
	assert.Equal(t, sharetest.StrictPriority, r.Policy)
	assert.Equal(t, trace.Start, r.Start)
	assert.Equal(t, time.Duration(0), r.From)
	assert.Equal(t, 3*time.Minute, r.To)
	assert.Equal(t, quotashare.DefaultShares, r.Quota.Shares, "the defaults are written out")
	assert.Equal(t, time.Minute, r.Quota.Window)
	r = mustReplay(t, hundred, trace, &sharetest.Options{Name: "mine"})
	assert.Equal(t, "mine", r.Name)
}

func TestReplayErrors(t *testing.T) {
	good := calls([2]int64{0, 1})
	for name, test := range map[string]struct {
		quota  quotashare.Quota
		trace  sharetest.Trace
		change func(*sharetest.Options)
		want   string
	}{
		"quota": {quotashare.Quota{}, good, nil, "tokens is 0: want at least 1"},
		"trace": {hundred, sharetest.Trace{}, nil, "sharetest: length of the trace is 0s"},
		"policy": {
			hundred, good, func(o *sharetest.Options) { o.Policy = 5 },
			"sharetest: policy is policy(5): want ByWindow or another of the constants",
		},
		"concurrency": {
			hundred, good, func(o *sharetest.Options) { o.Callers[batch].Concurrency = -1 },
			"sharetest: callers[batch]: concurrency is -1: want 0 or more",
		},
		"patience": {
			hundred, good, func(o *sharetest.Options) { o.Callers[background].Patience = math.MaxInt64 },
			"sharetest: callers[background]: patience is 2562047h47m16.854775807s: want 36 years at most",
		},
		"negative overestimate": {
			hundred, good, func(o *sharetest.Options) { o.Callers[interactive].Overestimate = -1 },
			"sharetest: callers[interactive]: overestimate is -1: want a factor up to 1000",
		},
		"large overestimate": {
			hundred, good, func(o *sharetest.Options) { o.Callers[interactive].Overestimate = 1000.5 }, "overestimate is 1000.5",
		},
		"overestimate NaN": {
			hundred, good, func(o *sharetest.Options) { o.Callers[interactive].Overestimate = math.NaN() },
			"overestimate is NaN",
		},
		"provider's tokens": {
			hundred, good, func(o *sharetest.Options) { o.Provider.Tokens = -1 },
			"sharetest: provider: tokens is -1: want 0 or more",
		},
		"bucket": {
			hundred, good, func(o *sharetest.Options) { o.Provider.Bucket = -1 },
			"sharetest: provider: bucket is -1ns: want 0 or more",
		},
		"large bucket": {
			hundred, good, func(o *sharetest.Options) { o.Provider.Bucket = math.MaxInt64 },
			"sharetest: provider: bucket is 2562047h",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var options sharetest.Options
			if test.change != nil {
				test.change(&options)
			}
			r, err := sharetest.Replay(test.quota, test.trace, &options)
			require.ErrorContains(t, err, test.want)
			assert.Empty(t, diff(sharetest.Report{}, r))
		})
	}
	_, err := sharetest.Replay(hundred, sharetest.Trace{}, &sharetest.Options{Policy: 5})
	require.ErrorContains(t, err, "length of the trace")
	assert.ErrorContains(t, err, "policy(5)", "all that is wrong is told")
}

// diff compares reports, but for what they were made of.
func diff(want, got sharetest.Report) string {
	if slices.Equal(want.Timeline, got.Timeline) { // it is long, and go-cmp slow
		want.Timeline, got.Timeline = nil, nil
	}
	for c := range want.Classes {
		if slices.Equal(want.Classes[c].Waits, got.Classes[c].Waits) {
			want.Classes[c].Waits, got.Classes[c].Waits = nil, nil
		}
	}
	return cmp.Diff(want, got, cmpopts.IgnoreUnexported(sharetest.Report{}), cmpopts.EquateEmpty(),
		cmpopts.EquateApprox(1e-12, 1e-12))
}

// TestReplayAgreesWithAnOracle replays random traffic, and has it replayed by what is written as plainly as can be.
func TestReplayAgreesWithAnOracle(t *testing.T) {
	t.Parallel()
	seeds := uint64(200)
	if testing.Short() {
		seeds = 40
	}
	var seen sharetest.ClassReport // how much of everything the seeds had, so that none of it is left out unnoticed
	var lent, takenBack, grew, delays int64
	for seed := range seeds {
		random := rand.New(rand.NewPCG(seed, 7))
		quota, trace, options := randomCase(random)
		got, err := sharetest.Replay(quota, trace, &options)
		require.NoError(t, err, "seed %d", seed)
		want := newOracle(t, quota, trace, options)
		want.run()

		lent, takenBack = lent+got.Lent, takenBack+got.TakenBack
		if got.HighestWindow > quota.Tokens {
			grew++
		}
		for _, c := range got.Classes {
			seen.Offered += c.Offered
			seen.Admitted += c.Admitted
			seen.Borrowed += c.Borrowed
			seen.TooMany += c.TooMany
			seen.HeldUp += c.HeldUp
			seen.GaveUp += c.GaveUp
			seen.Dropped += c.Dropped
			seen.Pending += c.Pending
			for reason, n := range c.Refused {
				seen.Refused[reason] += n
			}
			if c.ShareDelay > 0 {
				delays++
			}
		}
		intervals := [][2]time.Duration{{0, trace.Length}, {-1, math.MaxInt64}}
		for range 5 {
			from, to := instant(random, quota, trace.Length), instant(random, quota, trace.Length)
			intervals = append(intervals, [2]time.Duration{min(from, to), max(from, to)})
		}
		for _, i := range intervals {
			if d := diff(want.report(i[0], i[1]), got.Between(i[0], i[1])); d != "" {
				t.Fatalf("seed %d, %v, from %v to %v: want -, got +\n%s", seed, options.Policy, i[0], i[1], d)
			}
		}
		require.Empty(t, diff(got, got.Between(0, trace.Length)), "the report is that of the whole interval")
	}
	t.Logf("%d seeds: %+v; lent %d, taken back %d, above the quota %d, delays %d",
		seeds, seen, lent, takenBack, grew, delays)
	for name, n := range map[string]int{
		"offered": seen.Offered, "admitted": seen.Admitted, "borrowed": seen.Borrowed, "429s": seen.TooMany,
		"held up": seen.HeldUp, "given up": seen.GaveUp, "dropped": seen.Dropped, "pending": seen.Pending,
		"quota full": seen.Refused[quotashare.ReasonQuotaFull], "reserved": seen.Refused[quotashare.ReasonReserved],
		"capped": seen.Refused[quotashare.ReasonCapped], "paced": seen.Refused[quotashare.ReasonPaced],
		"too large": seen.Refused[quotashare.ReasonTooLarge],
		"lent":      int(lent), "taken back": int(takenBack), "above the quota": int(grew), "delays": int(delays),
	} {
		assert.Greater(t, n, 5, "too little of it to tell: %s", name)
	}
}

// instant is one of a coarse grid, so that many coincide.
func instant(r *rand.Rand, quota quotashare.Quota, length time.Duration) time.Duration {
	grain := quota.Window / 20
	return time.Duration(r.Int64N(int64(length/grain))) * grain
}

// pick returns one of several values.
func pick[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

func randomCase(r *rand.Rand) (quotashare.Quota, sharetest.Trace, sharetest.Options) {
	// A token takes a whole number of nanoseconds to refill, so that nothing is rounded.
	quota := quotashare.Quota{
		Tokens: pick[int64](r, 100, 250, 500, 1000, 2000),
		Window: pick(r, time.Second, 2*time.Second, 4*time.Second),
		Shares: pick(r, quotashare.Fractions{}, quotashare.Fractions{0.5, 0.3, 0.2}, quotashare.Fractions{0.2, 0.2, 0.1},
			quotashare.Fractions{0.8, 0.1, 0.1}, quotashare.Fractions{1, 0, 0}),
		Pace:      pick(r, 0, 1, 3, 12),
		Overdraft: pick[int64](r, 0, 0, 0, 20),
	}
	switch r.IntN(3) {
	case 0:
		quota.Floors = quotashare.NoFloors
	case 1:
		for c, share := range quota.Shares {
			quota.Floors[c] = share * r.Float64()
		}
	}
	for c := range quota.Ceilings {
		share := quota.Shares[c]
		if quota.Shares == (quotashare.Fractions{}) {
			share = quotashare.DefaultShares[c]
		}
		quota.Ceilings[c] = pick(r, 0, 0, 0, share+(1-share)*r.Float64())
		if r.IntN(40) == 0 {
			quota.Ceilings[c] = quotashare.Closed
		}
	}

	trace := sharetest.Trace{Start: time.Date(2026, 7, 28, 9, 0, 0, 0, time.UTC), Length: 10 * quota.Window}
	if r.IntN(2) == 0 {
		trace.Start = time.Time{}
	}
	pools := []*sharetest.Pool{nil, nil, nil, {Workers: 1 + r.IntN(4)}, {Workers: 1 + r.IntN(4)}}
	for range 100 + r.IntN(300) {
		a := sharetest.Arrival{
			At:       instant(r, quota, trace.Length),
			Class:    quotashare.Class(r.IntN(quotashare.NumClasses)),
			Estimate: 1 + r.Int64N(quota.Tokens/8),
			Duration: time.Duration(r.IntN(10)) * quota.Window / 20,
			Pool:     pick(r, pools...),
		}
		switch r.IntN(40) {
		case 0:
			a.Estimate = 1 + r.Int64N(quota.Tokens+quota.Tokens/10)
		case 1:
			a.Duration = time.Duration(r.IntN(45)) * quota.Window / 20
		}
		a.Actual = pick(r, a.Estimate, a.Estimate, 0, r.Int64N(a.Estimate+1), r.Int64N(2*a.Estimate))
		trace.Arrivals = append(trace.Arrivals, a)
	}
	slices.SortStableFunc(trace.Arrivals, func(a, b sharetest.Arrival) int { return int(a.At/1000 - b.At/1000) })

	options := sharetest.Options{
		Policy: pick(r, sharetest.ByWindow, sharetest.ByWindow, sharetest.ByWindow, sharetest.Undecided, sharetest.StaticPartition,
			sharetest.StrictPriority, sharetest.PatternSketch),
		Seed: r.Uint64(),
	}
	for c := range options.Callers {
		options.Callers[c] = sharetest.Callers{
			Patience: pick(r, 0, -1, time.Duration(r.IntN(60))*quota.Window/20,
				time.Duration(r.Int64N(int64(2*quota.Window)))),
			Concurrency:  pick(r, 0, 0, 1+r.IntN(8)),
			Overestimate: pick(r, 0, 0, 1, 0.5, 1.1, 1.5, 2),
		}
	}
	if r.IntN(3) == 0 {
		options.Provider.Tokens = pick[int64](r, 50, 80, 400, 1000)
	}
	if r.IntN(3) == 0 {
		options.Provider.Bucket = pick(r, time.Millisecond, time.Second/10, quota.Window/4, quota.Window, 2*quota.Window)
	}
	options.Provider.CountsReserved = r.IntN(4) == 0
	return quota, trace, options
}

// An oracle is a replay that keeps everything in slices, and adds up all of them whenever it wants to know something.
type oracle struct {
	quota   quotashare.Quota
	trace   sharetest.Trace
	options sharetest.Options
	window  *quotashare.Window // nil where the policy has none
	now     time.Duration

	calls   []*oracleCall // that have arrived
	plans   []oraclePlan
	planned int
	jitter  *rand.PCG
	level   int64 // of the bucket: tokens times Window, full at the capacity
	levelAt time.Duration

	loan       [quotashare.NumClasses]int64
	shortSince [quotashare.NumClasses]time.Duration // negative: it is not short
	happened   []oracleEvent
	pictures   []oraclePicture
	moments    []sharetest.Moment
}

type oracleCall struct {
	sharetest.Arrival
	state    oracleState
	first    time.Duration
	tooMany  int // answers of 429
	grant    quotashare.Grant
	admitted time.Duration
	counts   int64 // tokens; only once it is admitted
	left     bool  // the window
}

type oracleState int

const (
	inLine   oracleState = iota // for a worker
	asking                      // and not refused yet
	waiting                     // was refused
	underWay                    // admitted
	away                        // was refused for good, and its caller is not yet ready for another
	over
)

// An oraclePlan is something that will happen. Of one instant what was planned earlier happens earlier.
type oraclePlan struct {
	at    time.Duration
	order int
	do    func()
}

// An oracleEvent changes a report that has its instant.
type oracleEvent struct {
	at     time.Duration
	class  quotashare.Class
	change func(*sharetest.Report, *sharetest.ClassReport)
}

// An oraclePicture is what the window held of each class, and what was kept for it. Some begin a moment.
type oraclePicture struct {
	at         time.Duration
	begins     bool
	used, kept quotashare.ClassTokens
}

func newOracle(t *testing.T, quota quotashare.Quota, trace sharetest.Trace, options sharetest.Options) *oracle {
	o := &oracle{
		trace: trace, options: options, shortSince: [quotashare.NumClasses]time.Duration{-1, -1, -1},
		// That the jitter is this generator's is known from nowhere but the code; it is part of what a seed means.
		jitter: rand.NewPCG(options.Seed, math.MaxUint64),
	}
	plain, err := quotashare.NewWindow(quota)
	require.NoError(t, err)
	o.quota = plain.Quota()
	decides := o.quota
	switch options.Policy {
	case sharetest.StaticPartition:
		for c, share := range decides.Shares {
			if decides.Ceilings[c] = share; share == 0 {
				decides.Ceilings[c] = quotashare.Closed
			}
		}
		fallthrough
	case sharetest.ByWindow:
		clock := func() time.Time { return trace.Start.Add(o.now) }
		o.window, err = quotashare.NewWindow(decides, quotashare.WithClock(clock))
		require.NoError(t, err)
	}
	if o.options.Provider.Tokens == 0 {
		o.options.Provider.Tokens = quota.Tokens
	}
	o.level = o.capacity()
	for class, patience := range [quotashare.NumClasses]time.Duration{0, 2 * o.quota.Window, -1} {
		if c := &o.options.Callers[class]; c.Patience == 0 {
			c.Patience = patience
		}
	}
	return o
}

// run lets one thing after the other happen. Of one instant charges leave the window first, then comes what was
// planned, and then what arrives.
func (o *oracle) run() {
	step := (o.trace.Length + 479) / 480
	moment := time.Duration(0)
	arrived := 0
	for {
		next, do := o.trace.Length, func() {}
		found := func(at time.Duration, what func()) {
			if at < next {
				next, do = at, what
			}
		}
		for _, c := range o.calls {
			if c.state >= underWay && !c.left && c.counts >= 0 {
				found(c.admitted+o.quota.Window, func() { c.left = true })
			}
		}
		found(moment, func() {
			o.photograph(true)
			moment += step
		})
		if first := o.firstPlan(); first >= 0 {
			p := o.plans[first]
			found(p.at, func() {
				o.plans = slices.Delete(o.plans, first, first+1)
				p.do()
			})
		}
		if arrived < len(o.trace.Arrivals) {
			a := o.trace.Arrivals[arrived]
			found(a.At, func() {
				arrived++
				o.arrive(a)
			})
		}
		if next == o.trace.Length {
			break
		}
		o.now = next
		do()
		o.look()
	}
	// The time is over for those that are still short.
	for class, since := range o.shortSince {
		if since >= 0 {
			o.short(quotashare.Class(class), since, o.trace.Length)
		}
	}
	o.moments = o.timeline()
}

func (o *oracle) firstPlan() int {
	first := -1
	for i, p := range o.plans {
		if first < 0 || p.at < o.plans[first].at || p.at == o.plans[first].at && p.order < o.plans[first].order {
			first = i
		}
	}
	return first
}

func (o *oracle) plan(at time.Duration, do func()) {
	o.plans = append(o.plans, oraclePlan{at, o.planned, do})
	o.planned++
}

func (o *oracle) note(class quotashare.Class, change func(*sharetest.Report, *sharetest.ClassReport)) {
	o.happened = append(o.happened, oracleEvent{o.now, class, change})
}

// used adds up what counts of each class.
func (o *oracle) used() (used quotashare.ClassTokens) {
	for _, c := range o.calls {
		if c.counts > 0 && c.admitted+o.quota.Window > o.now {
			used[c.Class] += c.counts
		}
	}
	return used
}

func (o *oracle) total() int64 {
	u := o.used()
	return u[0] + u[1] + u[2]
}

// look notes what has changed: loans, and who is short of its share.
func (o *oracle) look() {
	used := o.used()
	for class := range quotashare.Class(quotashare.NumClasses) {
		share := o.quota.Limits(class).Share
		loan := max(used[class]-share, 0)
		switch more := loan - o.loan[class]; {
		case more > 0:
			o.note(class, func(r *sharetest.Report, _ *sharetest.ClassReport) { r.Lent += more })
		case more < 0:
			o.note(class, func(r *sharetest.Report, _ *sharetest.ClassReport) { r.TakenBack -= more })
		}
		o.loan[class] = loan

		short := false
		for _, c := range o.calls {
			if c.Class == class && c.state == waiting && used[class]+c.Estimate <= share {
				short = true
			}
		}
		switch since := o.shortSince[class]; {
		case short && since < 0:
			o.shortSince[class] = o.now
		case !short && since >= 0:
			o.short(class, since, o.now)
			o.shortSince[class] = -1
		}
	}
}

// short notes that a class was short for a time, for every interval that has some of it.
func (o *oracle) short(class quotashare.Class, from, to time.Duration) {
	o.happened = append(o.happened, oracleEvent{-1, class, func(r *sharetest.Report, c *sharetest.ClassReport) {
		if delay := min(to, r.To) - from; from < r.To && to > r.From && delay > c.ShareDelay {
			c.ShareDelay, c.ShareDelayAt = delay, from
		}
	}})
}

func (o *oracle) photograph(begins bool) {
	p := oraclePicture{at: o.now, begins: begins, used: o.used()}
	if o.window != nil {
		for class, c := range o.window.Stats().Classes {
			p.kept[class] = max(c.Held-c.Used, 0)
		}
	}
	o.pictures = append(o.pictures, p)
}

// together reports how many of the calls of the same pool, or of the same class with a limit, are neither in line nor
// over.
func (o *oracle) together(c *oracleCall) (atOnce, limit int) {
	limit = math.MaxInt
	if c.Pool != nil {
		limit = c.Pool.Workers
	} else if n := o.options.Callers[c.Class].Concurrency; n > 0 {
		limit = n
	}
	for _, other := range o.calls {
		same := other.Pool == c.Pool && (c.Pool != nil || other.Class == c.Class)
		if same && other.state != inLine && other.state != over {
			atOnce++
		}
	}
	return atOnce, limit
}

func (o *oracle) arrive(a sharetest.Arrival) {
	c := &oracleCall{Arrival: a, counts: -1}
	o.calls = append(o.calls, c)
	if atOnce, limit := o.together(c); atOnce < limit {
		o.ask(c)
	}
}

// end makes a call over, and lets the next in its line ask.
func (o *oracle) end(c *oracleCall) {
	c.state = over
	o.look()
	for _, other := range o.calls {
		same := other.Pool == c.Pool && (c.Pool != nil || other.Class == c.Class)
		if same && other.state == inLine {
			o.ask(other)
			return
		}
	}
}

func (o *oracle) ask(c *oracleCall) {
	if c.state == inLine {
		c.state, c.first = asking, o.now
		if factor := o.options.Callers[c.Class].Overestimate; factor != 0 {
			c.Estimate = max(int64(math.Round(float64(c.Estimate)*factor)), 1)
		}
		o.note(c.Class, func(_ *sharetest.Report, r *sharetest.ClassReport) {
			r.Offered++
			r.OfferedTokens += c.Estimate
		})
	}
	d := o.decide(c)
	switch {
	case d.Permanent():
		c.state = away
		o.note(c.Class, func(_ *sharetest.Report, r *sharetest.ClassReport) {
			r.Refused[d.Reason]++
			r.Dropped++
		})
		o.plan(o.now+quotashare.Backoff(c.Class, o.quota.Window), func() { o.end(c) })
	case !d.Admitted:
		o.note(c.Class, func(_ *sharetest.Report, r *sharetest.ClassReport) { r.Refused[d.Reason]++ })
		o.wait(c, d.RetryAfter)
	case !o.allowed(c.Estimate):
		c.grant.Cancel()
		o.note(c.Class, func(all *sharetest.Report, r *sharetest.ClassReport) {
			all.TooMany++
			r.TooMany++
		})
		wait := min(time.Second/2<<min(c.tooMany, 10), 8*time.Second)
		c.tooMany++
		part := float64(o.jitter.Uint64()>>11) / (1 << 53)
		o.wait(c, wait-time.Duration(0.25*part*float64(wait)))
	default:
		o.admit(c, d.Reason)
	}
}

// decide is the policies, in the words of their documentation.
func (o *oracle) decide(c *oracleCall) (d quotashare.Decision) {
	if o.window != nil {
		c.grant, d = o.window.TryAcquire(c.Class, c.Estimate)
		return d
	}
	used, share := o.used(), o.quota.Limits(c.Class).Share
	room := o.quota.Tokens - o.total()
	within := used[c.Class]+c.Estimate <= share
	d = quotashare.Decision{Admitted: true, Reason: quotashare.ReasonBorrowed}
	if within {
		d.Reason = quotashare.ReasonOwnShare
	}
	refused := quotashare.Decision{
		Reason: quotashare.ReasonQuotaFull, RetryAfter: quotashare.Backoff(c.Class, o.quota.Window),
	}
	switch o.options.Policy {
	case sharetest.StrictPriority:
		for _, other := range o.calls {
			if other.Class < c.Class && other.state == waiting {
				refused.Reason = quotashare.ReasonReserved
				return refused
			}
		}
	case sharetest.PatternSketch:
		if within {
			return d
		}
		for class := range quotashare.Class(quotashare.NumClasses) {
			if l := o.quota.Limits(class); l.Share > share {
				room -= max(0, l.Floor-used[class])
			}
		}
	default:
		return d
	}
	if c.Estimate > room {
		return refused
	}
	return d
}

func (o *oracle) capacity() int64 {
	return o.options.Provider.Tokens * int64(o.options.Provider.Bucket)
}

// fill lets the bucket fill: an allowance of Tokens in a Window, each nanosecond, until it is full.
func (o *oracle) fill() {
	o.level = min(o.level+o.options.Provider.Tokens*int64(o.now-o.levelAt), o.capacity())
	o.levelAt = o.now
}

func (o *oracle) allowed(tokens int64) bool {
	if o.options.Provider.Bucket == 0 {
		return o.total()+tokens <= o.options.Provider.Tokens
	}
	o.fill()
	cost := tokens * int64(o.quota.Window)
	if cost > o.level && o.level < o.capacity() {
		return false
	}
	o.level -= cost
	return true
}

func (o *oracle) admit(c *oracleCall, reason quotashare.Reason) {
	c.state, c.admitted, c.counts = underWay, o.now, c.Estimate
	wait, total := o.now-c.first, o.total()
	o.note(c.Class, func(all *sharetest.Report, r *sharetest.ClassReport) {
		r.Admitted++
		r.AdmittedTokens += c.counts
		r.Waits = append(r.Waits, wait)
		if reason == quotashare.ReasonBorrowed {
			r.Borrowed++
		}
		if total > all.HighestWindow {
			all.HighestWindow, all.HighestAt = total, c.admitted
		}
	})
	o.photograph(false)
	o.look()
	o.plan(o.now+c.Duration, func() { o.settle(c) })
}

func (o *oracle) settle(c *oracleCall) {
	if !o.options.Provider.CountsReserved {
		c.grant.Settle(c.Actual)
		if o.options.Provider.Bucket > 0 {
			o.fill()
			o.level = min(o.level+(c.Estimate-c.Actual)*int64(o.quota.Window), o.capacity())
		}
		if c.admitted+o.quota.Window > o.now {
			c.counts = c.Actual
			if total, at := o.total(), o.now; c.Actual > c.Estimate {
				o.note(c.Class, func(all *sharetest.Report, _ *sharetest.ClassReport) {
					if total > all.HighestWindow {
						all.HighestWindow, all.HighestAt = total, at
					}
				})
				o.photograph(false)
			}
		}
	}
	o.end(c)
}

// wait makes a caller come back, or give up if its patience ends before.
func (o *oracle) wait(c *oracleCall, retryAfter time.Duration) {
	if c.state == asking {
		o.note(c.Class, func(_ *sharetest.Report, r *sharetest.ClassReport) { r.HeldUp++ })
	}
	c.state = waiting
	o.look()
	patience := o.options.Callers[c.Class].Patience
	if patience < 0 || o.now+retryAfter <= c.first+patience {
		o.plan(o.now+retryAfter, func() { o.ask(c) })
		return
	}
	o.plan(c.first+patience, func() {
		o.note(c.Class, func(_ *sharetest.Report, r *sharetest.ClassReport) { r.GaveUp++ })
		o.end(c)
	})
}

// report adds up what happened in an interval.
func (o *oracle) report(from, to time.Duration) sharetest.Report {
	r := sharetest.Report{
		Name: o.options.Policy.String(), Policy: o.options.Policy, Quota: o.quota, Start: o.trace.Start,
		From: max(from, 0), To: min(to, o.trace.Length),
	}
	if r.From == 0 && r.To == o.trace.Length && o.window != nil {
		r.Advice = o.window.Stats().Advice()
	}
	var scrap sharetest.Report // for what is not wanted of a change
	for i := range r.Classes {
		var before sharetest.ClassReport // what had happened until the end
		for _, e := range o.happened {
			if e.class != quotashare.Class(i) {
				continue
			}
			if e.at < r.To {
				e.change(&scrap, &before)
			}
			if e.at < 0 || e.at >= r.From && e.at < r.To {
				e.change(&r, &r.Classes[i])
			}
		}
		r.Classes[i].Pending = -before.Admitted - before.GaveUp - before.Dropped
		for _, a := range o.trace.Arrivals {
			if a.Class == quotashare.Class(i) && a.At < r.To {
				r.Classes[i].Pending++
			}
		}
	}
	// The highest window is the first of all classes.
	var highest sharetest.Report
	for _, e := range o.happened {
		if e.at >= r.From && e.at < r.To {
			e.change(&highest, &scrap.Classes[0])
		}
	}
	r.HighestWindow, r.HighestAt = highest.HighestWindow, highest.HighestAt
	windows := float64(r.To-r.From) / float64(o.quota.Window)
	for i := range r.Classes {
		c := &r.Classes[i]
		slices.Sort(c.Waits)
		if r.To > r.From {
			c.Share = float64(c.AdmittedTokens) / (windows * float64(o.quota.Tokens))
		}
		r.Utilisation += c.Share
	}
	for _, m := range o.moments {
		if m.At >= r.From && m.At < r.To {
			r.Timeline = append(r.Timeline, m)
		}
	}
	return r
}

// timeline divides the replay into 480 moments.
func (o *oracle) timeline() (all []sharetest.Moment) {
	step := (o.trace.Length + 479) / 480
	var scrap sharetest.Report
	var counts [][quotashare.NumClasses]sharetest.ClassReport
	for at := time.Duration(0); at < o.trace.Length; at += step {
		all = append(all, sharetest.Moment{At: at})
		counts = append(counts, [quotashare.NumClasses]sharetest.ClassReport{})
	}
	var fullest int64
	for _, p := range o.pictures {
		m := &all[p.at/step]
		if total := p.used[0] + p.used[1] + p.used[2]; p.begins || total > fullest {
			m.Used, m.Kept, fullest = p.used, p.kept, total
		}
	}
	for _, e := range o.happened {
		if e.at >= 0 {
			e.change(&scrap, &counts[e.at/step][e.class])
		}
	}
	for i := range all {
		for class, c := range counts[i] {
			all[i].Refused[class], all[i].GaveUp[class], all[i].TooMany[class] = c.Refusals(), c.GaveUp, c.TooMany
		}
	}
	return all
}

// What the same seed, quota and options give is the same on every machine, also where the processor fuses a
// multiplication and an addition to one operation, or has 32 bits. These are what it must be. Where they change on
// purpose, all that anybody has noted down of a seed is void.
func TestResultsAreTheSameOnEveryMachine(t *testing.T) {
	quota := quotashare.Quota{Tokens: 200_003, Window: 59 * time.Second}
	trace, err := sharetest.Generate(quota, 26*time.Minute+7, 42,
		sharetest.Flow{
			Class: interactive, Load: 0.37, Durations: sharetest.Durations{time.Second, 3 * time.Second, 20 * time.Second},
		},
		sharetest.Flow{
			Class: background, Load: 1.0 / 3, From: 3*time.Minute + 1, To: 20 * time.Minute,
			Curve: func(at time.Duration) float64 { return sharetest.Day(17 * at) },
		},
		sharetest.Flow{
			Class: interactive, Load: 0.1, Curve: sharetest.Day, Tokens: sharetest.Conversations.WithMean(777),
			Durations: sharetest.Durations{5 * time.Second},
		},
		sharetest.Suite{
			Start: time.Minute, Concurrency: 7, Tokens: sharetest.Completions, Durations: sharetest.Durations{1, 7_777_777_777},
		},
		sharetest.Suite{
			Count: 50, Concurrency: 2, Tokens: sharetest.Tokens{5000}, Durations: sharetest.Durations{1e9, 2e9, 60e9},
		},
		sharetest.Flow{Class: batch, Load: 0.05, Tokens: sharetest.Tokens{1, 999}},
	)
	require.NoError(t, err)
	// What callers used differs from what they thought.
	for i := range trace.Arrivals {
		trace.Arrivals[i].Actual = trace.Arrivals[i].Actual * int64(80+i%41) / 100
	}
	require.Greater(t, len(trace.Arrivals), 2000)

	var text strings.Builder
	pools := map[*sharetest.Pool]int{nil: 0}
	for _, a := range trace.Arrivals {
		if _, ok := pools[a.Pool]; !ok {
			pools[a.Pool] = len(pools)
		}
		workers := 0
		if a.Pool != nil {
			workers = a.Pool.Workers
		}
		fmt.Fprintln(&text, int64(a.At), uint8(a.Class), a.Estimate, a.Actual, int64(a.Duration), pools[a.Pool], workers)
	}
	for at := time.Duration(0); at < 24*time.Hour; at += 7*time.Minute + 1 {
		fmt.Fprintf(&text, "%x %x\n", math.Float64bits(sharetest.Day(at)), math.Float64bits(sharetest.Completions.Mean()))
	}
	assert.Equal(t, goldenTrace, sum(text.String()), "trace")

	for name, test := range map[string]struct {
		options sharetest.Options
		want    string
	}{
		"shares": {sharetest.Options{Callers: [quotashare.NumClasses]sharetest.Callers{
			{Patience: 9 * time.Second, Overestimate: 1.37}, {Concurrency: 5, Overestimate: 0.9}, {},
		}}, goldenShares},
		"undecided": {sharetest.Options{
			Policy: sharetest.Undecided, Seed: 3, Callers: callers(50 * time.Second),
		}, goldenUndecided},
		"bucket": {sharetest.Options{
			Callers: callers(9 * time.Second), Seed: 9,
			Provider: sharetest.Provider{Bucket: time.Second, Tokens: 180_001, CountsReserved: true},
		}, goldenBucket},
		"pattern's sketch": {sharetest.Options{Policy: sharetest.PatternSketch, Seed: 4}, goldenSketch},
	} {
		t.Run(name, func(t *testing.T) {
			r := mustReplay(t, quota, trace, &test.options)
			text, err := json.Marshal([]sharetest.Report{r, r.Between(3*time.Minute, 11*time.Minute)})
			require.NoError(t, err)
			assert.Equal(t, test.want, sum(string(text)), "%v", r)
		})
	}
}

func sum(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) }

const (
	goldenTrace     = "a56e2467c82ded0149ef44c32c76d80fa15bae74454ba953877abd26476baa05"
	goldenShares    = "4d1e576f70312294d4a79b9df83c136f47594475bd1f15b43cf4844d0cfb4f8e"
	goldenUndecided = "39b6d1e7bebd587e2c905f8302ea8c9a4497dea827a42b3d34e2a77f3a1a45ba"
	goldenBucket    = "72e5dc9bc1b28fd286cbf1301505736aeda538e6902243cf485e8a8ded13efad"
	goldenSketch    = "14071b63a4a557278df8264050027086021e092d15ba273beb43a9a0497fa3e9"
)

func TestCallersWhoComeBackWithoutEndAreAnError(t *testing.T) {
	// Not parallel: it changes the bound for all.
	trace := sharetest.Trace{Length: 24 * time.Hour, Arrivals: []sharetest.Arrival{
		{Class: batch, Estimate: 10}, {Class: batch, Estimate: 10},
	}}
	quota := quotashare.Quota{Tokens: 10, Window: time.Hour, Floors: quotashare.NoFloors}
	options := sharetest.Options{Policy: sharetest.StrictPriority, Provider: sharetest.Provider{Tokens: 1}}
	mustReplay(t, quota, trace, &options)
	sharetest.SetMostEntries(t, 1000)
	_, err := sharetest.Replay(quota, trace, &options)
	require.ErrorContains(t, err, "callers of batch come back more than ten million times: want a Concurrency or a Patience")
}
