package sharetest_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// years36 is the longest time that a trace takes.
const years36 = 1 << 60

func TestValidateNamesWhatIsWrong(t *testing.T) {
	good := sharetest.Arrival{At: 10, Class: batch, Estimate: 1, Actual: 1}
	for name, test := range map[string]struct {
		change func(*sharetest.Arrival)
		want   string
	}{
		"before the row above": {
			func(a *sharetest.Arrival) { a.At = 9 }, "at is 9ns: want arrivals in order of time, from 0 on (here from 10ns)",
		},
		"negative": {func(a *sharetest.Arrival) { a.At = -1 }, "at is -1ns: want arrivals in order of time"},
		"at the end": {
			func(a *sharetest.Arrival) { a.At = 100 }, "at is 100ns: want less than the length of the trace, 100ns",
		},
		"class": {
			func(a *sharetest.Arrival) { a.Class = 3 }, "class is class(3): want interactive, background or batch",
		},
		"no estimate": {func(a *sharetest.Arrival) { a.Estimate = 0 }, "estimate is 0 tokens: want 1 to 4294967296"},
		"negative estimate": {
			func(a *sharetest.Arrival) { a.Estimate = math.MinInt64 }, "estimate is -9223372036854775808 tokens: want 1 to",
		},
		"large estimate": {
			func(a *sharetest.Arrival) { a.Estimate = 1<<32 + 1 }, "estimate is 4294967297 tokens: want 1 to 4294967296",
		},
		"negative actual": {func(a *sharetest.Arrival) { a.Actual = -1 }, "actual is -1 tokens: want 0 to 4294967296"},
		"large actual":    {func(a *sharetest.Arrival) { a.Actual = 1<<32 + 1 }, "actual is 4294967297 tokens: want 0 to"},
		"negative duration": {
			func(a *sharetest.Arrival) { a.Duration = -1 }, "duration is -1ns: want 0 or more, and 36 years at most",
		},
		"long duration": {
			func(a *sharetest.Arrival) { a.Duration = years36 + 1 }, "duration is 320255h58m24.606846977s: want 0 or more",
		},
		"pool of nobody": {
			func(a *sharetest.Arrival) { a.Pool = &sharetest.Pool{} }, "pool has 0 workers: want 1 or more",
		},
	} {
		t.Run(name, func(t *testing.T) {
			bad := good
			test.change(&bad)
			trace := sharetest.Trace{Length: 100, Arrivals: []sharetest.Arrival{good, bad, good}}
			err := trace.Validate()
			require.ErrorContains(t, err, "sharetest: arrivals[1]: "+test.want)
			_, replayed := sharetest.Replay(hundred, trace, nil)
			assert.ErrorContains(t, replayed, err.Error(), "Replay does not take it either")
		})
	}
}

func TestValidateTakesTheBounds(t *testing.T) {
	trace := sharetest.Trace{Length: years36, Arrivals: []sharetest.Arrival{
		{Estimate: 1}, {Estimate: 1 << 32, Actual: 1 << 32, Duration: years36, Pool: &sharetest.Pool{Workers: 1}},
		{At: years36 - 1, Class: batch, Estimate: 1},
	}}
	require.NoError(t, trace.Validate())
	// What it takes can be replayed, and nothing overflows.
	quota := quotashare.Quota{Tokens: math.MaxInt64, Window: math.MaxInt64}
	forEver := sharetest.Callers{Patience: years36, Overestimate: 1000}
	for _, provider := range []sharetest.Provider{{}, {Bucket: years36}, {Bucket: 1, Tokens: 1}, {Tokens: math.MaxInt64}} {
		r := mustReplay(t, quota, trace, &sharetest.Options{
			Callers: [quotashare.NumClasses]sharetest.Callers{forEver, forEver, forEver}, Provider: provider,
		})
		assert.Equal(t, 3, r.Classes[interactive].Offered+r.Classes[batch].Offered)
		assert.Equal(t, int64(1<<32+1000), r.Classes[interactive].OfferedTokens, "an estimate keeps to the bound of a call")
		assert.GreaterOrEqual(t, r.Utilisation, 0.0)
	}
	require.NoError(t, sharetest.Trace{Length: 1}.Validate(), "no traffic at all")
}

func TestValidateLength(t *testing.T) {
	for _, length := range []time.Duration{0, -1, years36 + 1, math.MaxInt64} {
		err := sharetest.Trace{Length: length}.Validate()
		assert.EqualError(t, err,
			"sharetest: length of the trace is "+length.String()+": want more than 0, and 36 years at most")
	}
}

// arrivals are calls of one token at some instants. Their estimates tell them apart.
func arrivals(estimate int64, instants ...time.Duration) (all []sharetest.Arrival) {
	for _, at := range instants {
		all = append(all, sharetest.Arrival{At: at, Estimate: estimate})
	}
	return all
}

func TestMergeAlignsTracesByTheirStarts(t *testing.T) {
	nine := time.Date(2026, 7, 28, 9, 0, 0, 0, time.UTC)
	pool := &sharetest.Pool{Workers: 2}
	later := sharetest.Trace{Start: nine.Add(10), Length: 30, Arrivals: arrivals(1, 0, 5, 29)}
	first := sharetest.Trace{Start: nine.In(time.FixedZone("", 3600)), Length: 20, Arrivals: arrivals(2, 0, 10, 15)}
	anywhere := sharetest.Trace{Length: 25, Arrivals: arrivals(3, 0, 10, 24)}
	first.Arrivals[1].Pool = pool
	got := sharetest.Merge(later, first, anywhere, sharetest.Trace{})
	assert.True(t, nine.Equal(got.Start), "the earliest")
	assert.Equal(t, time.Duration(40), got.Length, "all are within")
	want := []sharetest.Arrival{
		{At: 0, Estimate: 2}, {At: 0, Estimate: 3},
		{At: 10, Estimate: 1}, {At: 10, Estimate: 2, Pool: pool}, {At: 10, Estimate: 3}, // in the order of the traces
		{At: 15, Estimate: 1}, {At: 15, Estimate: 2}, {At: 24, Estimate: 3}, {At: 39, Estimate: 1},
	}
	assert.Equal(t, want, got.Arrivals)
	for i := range want {
		assert.Same(t, want[i].Pool, got.Arrivals[i].Pool)
	}
	require.NoError(t, got.Validate())

	assert.Equal(t, arrivals(1, 0, 5, 29), later.Arrivals, "what is merged stays as it was")
	assert.Equal(t, time.Duration(25), sharetest.Merge(anywhere, sharetest.Trace{Length: 20}).Length)
	assert.Equal(t, time.Duration(25), sharetest.Merge(sharetest.Trace{Length: 20}, anywhere).Length)
	assert.True(t, sharetest.Merge(anywhere).Start.IsZero())
	assert.Empty(t, sharetest.Merge().Arrivals)
}

func TestMergeKeepsTheOrderOfOneInstant(t *testing.T) {
	// So many that an order that is not kept shows.
	instants := append(make([]time.Duration, 100), slices.Repeat([]time.Duration{1}, 100)...)
	var traces []sharetest.Trace
	var first, second []sharetest.Arrival
	for i := range int64(5) {
		traces = append(traces, sharetest.Trace{Length: 2, Arrivals: arrivals(i+1, instants...)})
		first, second = append(first, traces[i].Arrivals[:100]...), append(second, traces[i].Arrivals[100:]...)
	}
	assert.Equal(t, slices.Concat(first, second), sharetest.Merge(traces...).Arrivals)
}

func TestMergeDoesNotDependOnTheOrderOfTraces(t *testing.T) {
	nine := time.Date(2026, 7, 28, 9, 0, 0, 0, time.UTC)
	a := sharetest.Trace{Start: nine.Add(time.Hour), Length: time.Hour, Arrivals: arrivals(1, 0, 7)}
	b := sharetest.Trace{Start: nine, Length: time.Hour, Arrivals: arrivals(2, 1, 8)}
	assert.Equal(t, sharetest.Merge(a, b), sharetest.Merge(b, a))
	assert.Equal(t, sharetest.Merge(a, b), sharetest.Merge(sharetest.Merge(b), a))
}
