package sim_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/internal/sim"
)

// small is an account of a hundred tokens a minute of which a class may have all.
var small = quotashare.Quota{Tokens: 100, Floors: quotashare.NoFloors, Pace: 1}

func run(t *testing.T, s sim.Scenario) *sim.History {
	t.Helper()
	history, err := sim.Run(s)
	require.NoError(t, err)
	return history
}

// calls is interactive traffic of so many tokens at so many seconds.
func calls(patience time.Duration, secondsAndTokens ...[2]int64) sim.Replay {
	traffic := sim.Replay{Class: quotashare.Interactive, Origin: time.Unix(0, 0), Patience: patience}
	for _, c := range secondsAndTokens {
		traffic.Rows = append(traffic.Rows, sim.Row{At: time.Unix(c[0], 0), ContextTokens: c[1]})
	}
	return traffic
}

func TestRefusedCallersComeBackWhenTold(t *testing.T) {
	history := run(t, sim.Scenario{
		Quota: small, Length: 3 * time.Minute, Traffic: []sim.Traffic{calls(0, [2]int64{0, 100}, [2]int64{10, 100})},
	})
	people := history.Report(0, history.Length()).Classes[quotashare.Interactive]
	assert.Equal(t, []time.Duration{0, 50 * time.Second}, people.Waits)
	assert.Equal(t, 1, people.Refused)
	assert.Equal(t, 2, people.Admitted)
	assert.EqualValues(t, 200, people.AdmittedTokens)
	assert.InDelta(t, 200.0/300, people.Share, 1e-9)

	waiting := history.Report(0, time.Minute).Classes[quotashare.Interactive]
	assert.Equal(t, 1, waiting.Pending)
	assert.Equal(t, 1, waiting.Admitted, "the end of the interval is not part of it")
	assert.Equal(t, 2, history.Report(0, time.Minute+1).Classes[quotashare.Interactive].Admitted)
}

func TestCallersGiveUp(t *testing.T) {
	for name, test := range map[string]struct {
		undecided bool
		patience  time.Duration
		gaveUp    int
	}{
		"a Window, too little patience":         {false, 50*time.Second - 1, 1},
		"a Window, just enough patience":        {false, 50 * time.Second, 0},
		"nothing decides, too little patience":  {true, 20 * time.Second, 1},
		"nothing decides, more than it can use": {true, 59 * time.Second, 0},
	} {
		t.Run(name, func(t *testing.T) {
			history := run(t, sim.Scenario{
				Quota: small, Undecided: test.undecided, Length: 3 * time.Minute,
				Traffic: []sim.Traffic{calls(test.patience, [2]int64{0, 100}, [2]int64{10, 100})},
			})
			people := history.Report(0, history.Length()).Classes[quotashare.Interactive]
			assert.Equal(t, test.gaveUp, people.GaveUp)
			assert.Equal(t, 2-test.gaveUp, people.Admitted)
			assert.Zero(t, people.Pending)

			deadline := 10*time.Second + test.patience
			assert.Zero(t, history.Report(0, deadline).Classes[quotashare.Interactive].GaveUp, "it is there until then")
			assert.Equal(t, test.gaveUp, history.Report(deadline, deadline+1).Classes[quotashare.Interactive].GaveUp)
		})
	}
}

func TestUndecidedCallersBackOffAsTheSDKsDo(t *testing.T) {
	for seed := range uint64(20) {
		history := run(t, sim.Scenario{
			Quota: small, Undecided: true, Length: 3 * time.Minute, Seed: seed,
			Traffic: []sim.Traffic{calls(0, [2]int64{0, 100}, [2]int64{0, 100})},
		})
		// The waits are 0.5, 1, 2, 4, 8, 8, ... seconds, each less a quarter at most.
		refused := func(from, to float64) int {
			interval := history.Report(time.Duration(from*1e9), time.Duration(to*1e9))
			assert.Equal(t, interval.Classes[quotashare.Interactive].Refused, interval.TooMany)
			return interval.TooMany
		}
		assert.Equal(t, 1, refused(0, 0.375))
		assert.Equal(t, 1, refused(0.375, 0.500001))
		assert.Equal(t, 1, refused(0.375+0.75, 1.500001))
		assert.Equal(t, 2, refused(0, 0.375+0.75))
		assert.Contains(t, []int{11, 12, 13}, refused(0, 60))
		wait := history.Report(0, history.Length()).Classes[quotashare.Interactive].Wait(1)
		assert.GreaterOrEqual(t, wait, time.Minute)
		assert.LessOrEqual(t, wait, 68*time.Second)
	}
}

func TestCallsRefusedForGoodAreDropped(t *testing.T) {
	// Endless work of that kind must not stop the time.
	endless := sim.Suite{Concurrency: 2, Kind: sim.Kind{
		Class: quotashare.Batch, Tokens: sim.Fixed(101), Seconds: sim.Fixed(1),
	}}
	history := run(t, sim.Scenario{
		Quota: small, Length: time.Minute, Traffic: []sim.Traffic{calls(0, [2]int64{1, 101}, [2]int64{2, 100}), endless},
	})
	r := history.Report(0, history.Length())
	assert.Equal(t, 1, r.Classes[quotashare.Interactive].Dropped)
	assert.Equal(t, 1, r.Classes[quotashare.Interactive].Admitted)
	assert.Equal(t, 2*12, r.Classes[quotashare.Batch].Dropped, "two workers, each every five seconds")
	assert.Equal(t, 2*12, r.Classes[quotashare.Batch].Offered)
	assert.Zero(t, r.Classes[quotashare.Batch].Refused)
}

func TestSuiteHoldsItsConcurrency(t *testing.T) {
	suite := sim.Suite{Items: 7, Concurrency: 3, Start: 5 * time.Second, Kind: sim.Kind{
		Class: quotashare.Batch, Tokens: sim.Fixed(1), Seconds: sim.Fixed(10),
	}}
	s := sim.Scenario{Quota: small, Length: time.Minute, Traffic: []sim.Traffic{suite}}
	history := run(t, s)
	offered := func(from, to time.Duration) int {
		return history.Report(from, to).Classes[quotashare.Batch].Offered
	}
	assert.Zero(t, offered(0, 5*time.Second))
	assert.Equal(t, 3, offered(5*time.Second, 15*time.Second))
	assert.Equal(t, 3, offered(15*time.Second, 25*time.Second))
	assert.Equal(t, 1, offered(25*time.Second, time.Minute))

	suite.Items = 0
	s.Traffic = []sim.Traffic{suite}
	history = run(t, s)
	assert.Equal(t, 3*6, offered(0, time.Minute), "it never ends")
}

func TestSuiteGoesOnAfterGivingUp(t *testing.T) {
	suite := sim.Suite{Items: 3, Concurrency: 1, Kind: sim.Kind{
		Class: quotashare.Batch, Tokens: sim.Fixed(100), Seconds: sim.Fixed(1), Patience: 20 * time.Second,
	}}
	history := run(t, sim.Scenario{Quota: small, Length: 2 * time.Minute, Traffic: []sim.Traffic{suite}})
	r := history.Report(0, history.Length()).Classes[quotashare.Batch]
	assert.Equal(t, 3, r.Offered)
	assert.Equal(t, 1, r.Admitted)
	assert.Equal(t, 2, r.GaveUp)
}

func TestWhatCallsUsedReplacesTheirEstimates(t *testing.T) {
	for name, test := range map[string]struct {
		used           float64
		seconds        float64
		tokens, second int64         // that the first call counts for in the end, and that a second one asks for
		wait           time.Duration // of the second, which asks after 20 seconds
		highest        int64
	}{
		"less":                {0.4, 10, 40, 60, 0, 100},
		"nothing":             {1e-9, 10, 0, 100, 0, 100},
		"all":                 {1, 10, 100, 60, 40 * time.Second, 100},
		"more":                {1.5, 10, 150, 60, 40 * time.Second, 150},
		"less, but too late":  {0.4, 60, 100, 60, 40 * time.Second, 100},
		"less, after a while": {0.4, 30, 40, 60, 40 * time.Second, 100},
	} {
		for _, undecided := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				first := sim.Suite{Items: 1, Concurrency: 1, Kind: sim.Kind{
					Class: quotashare.Interactive, Tokens: sim.Fixed(100), Used: sim.Fixed(test.used), Seconds: sim.Fixed(test.seconds),
				}}
				history := run(t, sim.Scenario{
					Quota: small, Undecided: undecided, Length: 2 * time.Minute,
					Traffic: []sim.Traffic{first, calls(0, [2]int64{20, test.second})},
				})
				r := history.Report(0, history.Length())
				people := r.Classes[quotashare.Interactive]
				assert.Equal(t, test.tokens+test.second, people.AdmittedTokens)
				assert.Equal(t, test.highest, r.HighestWindow)
				assert.InDelta(t, float64(people.AdmittedTokens)/200, r.Utilisation, 1e-9)
				if !undecided {
					assert.Equal(t, test.wait, people.Wait(1))
					assert.Zero(t, r.TooMany)
				}
			})
		}
	}
}

func TestRunIsDeterministic(t *testing.T) {
	scenario := func(seed uint64, undecided bool) sim.Scenario {
		return sim.Scenario{
			Quota: quotashare.Quota{Tokens: account}, Undecided: undecided, Length: 5 * time.Minute, Seed: seed,
			Traffic: []sim.Traffic{interactive(rate(0, 0.3)), background(rate(0, 0.3)), hungryBatch(0, 10_000)},
		}
	}
	report := func(seed uint64, undecided bool) sim.Report {
		return run(t, scenario(seed, undecided)).Report(0, time.Hour)
	}
	for _, undecided := range []bool{false, true} {
		first := report(1, undecided)
		assert.Empty(t, cmp.Diff(first, report(1, undecided)))
		assert.NotEmpty(t, cmp.Diff(first, report(2, undecided)))
		assert.Equal(t, 5*time.Minute, first.To, "what lies outside of the run is no part of the interval")
	}
	decided, undecided := report(1, false).Classes[quotashare.Interactive], report(1, true).Classes[quotashare.Interactive]
	assert.Equal(t, decided.Offered, undecided.Offered, "the same people call, whoever decides")
	assert.Equal(t, decided.OfferedTokens, undecided.OfferedTokens)
}

func TestIntervalsAddUp(t *testing.T) {
	history := run(t, sim.Scenario{
		Quota: quotashare.Quota{Tokens: account}, Undecided: true, Length: 10 * time.Minute,
		Traffic: []sim.Traffic{interactive(rate(0, 0.5)), hungryBatch(0, 10_000)},
	})
	const middle = 4 * time.Minute
	whole, first, second := history.Report(0, time.Hour), history.Report(-time.Hour, middle), history.Report(middle, time.Hour)
	assert.Equal(t, whole.TooMany, first.TooMany+second.TooMany)
	assert.Equal(t, whole.HighestWindow, max(first.HighestWindow, second.HighestWindow))
	assert.InDelta(t, whole.Utilisation, 0.4*first.Utilisation+0.6*second.Utilisation, 1e-9)
	for class, c := range whole.Classes {
		a, b := first.Classes[class], second.Classes[class]
		assert.Equal(t, c.Offered, a.Offered+b.Offered)
		assert.Equal(t, c.OfferedTokens, a.OfferedTokens+b.OfferedTokens)
		assert.Equal(t, c.Admitted, a.Admitted+b.Admitted)
		assert.Equal(t, c.AdmittedTokens, a.AdmittedTokens+b.AdmittedTokens)
		assert.Equal(t, c.Refused, a.Refused+b.Refused)
		assert.Equal(t, c.GaveUp, a.GaveUp+b.GaveUp)
		assert.Equal(t, c.Pending, b.Pending)
		assert.Len(t, c.Waits, len(a.Waits)+len(b.Waits))
		assert.Equal(t, c.Offered, c.Admitted+c.GaveUp+c.Dropped+c.Pending, "every call is in one of these states")
	}
	empty := history.Report(middle, middle)
	assert.Zero(t, empty.Utilisation)
	assert.Zero(t, empty.Classes[quotashare.Interactive].Offered)
	assert.Equal(t, first.Classes[quotashare.Interactive].Pending, empty.Classes[quotashare.Interactive].Pending)
}

func TestWaitIsTheNearestRank(t *testing.T) {
	r := sim.ClassReport{}
	assert.Zero(t, r.Wait(0.5))
	for i := range 200 {
		r.Waits = append(r.Waits, time.Duration(i+1))
	}
	for fraction, want := range map[float64]time.Duration{-1: 1, 0: 1, 0.5: 100, 0.99: 198, 0.999: 200, 1: 200, 2: 200} {
		assert.Equal(t, want, r.Wait(fraction), fraction)
	}
}

func TestRunErrors(t *testing.T) {
	kind := sim.Kind{Class: quotashare.Batch, Tokens: sim.Fixed(1), Seconds: sim.Fixed(1)}
	with := func(change func(*sim.Kind)) sim.Kind {
		k := kind
		change(&k)
		return k
	}
	poisson := func(steps ...sim.Step) sim.Traffic { return sim.Poisson{Kind: kind, Rate: steps} }
	for name, test := range map[string]struct {
		traffic sim.Traffic
		want    string
	}{
		"nil":              {nil, "traffic[0] is nil"},
		"class":            {sim.Suite{Kind: with(func(k *sim.Kind) { k.Class = 3 }), Concurrency: 1}, "class is class(3)"},
		"no tokens":        {sim.Suite{Kind: with(func(k *sim.Kind) { k.Tokens = sim.Dist{} }), Concurrency: 1}, "the mean of tokens is 0"},
		"negative use":     {sim.Suite{Kind: with(func(k *sim.Kind) { k.Used = sim.Fixed(-1) }), Concurrency: 1}, "the mean of used or of seconds is negative"},
		"patience":         {sim.Suite{Kind: with(func(k *sim.Kind) { k.Patience = -1 }), Concurrency: 1}, "patience is -1ns"},
		"no time":          {sim.Suite{Kind: with(func(k *sim.Kind) { k.Seconds = sim.Dist{} }), Concurrency: 1}, "the mean of seconds is 0"},
		"no workers":       {sim.Suite{Kind: kind}, "concurrency is 0"},
		"negative items":   {sim.Suite{Kind: kind, Items: -1, Concurrency: 1}, "items is -1"},
		"start":            {sim.Suite{Kind: kind, Start: -1, Concurrency: 1}, "start is -1ns"},
		"negative rate":    {poisson(sim.Step{TokensPerMinute: -1}), "rate is -1 tokens per minute"},
		"steps":            {poisson(sim.Step{From: 2}, sim.Step{From: 1}), "rate steps at 1ns"},
		"class of replay":  {sim.Replay{Class: 3}, "class is class(3)"},
		"row before":       {sim.Replay{Rows: []sim.Row{{}}, Origin: time.Unix(0, 0)}, "want none before the origin"},
		"class of Poisson": {sim.Poisson{Kind: with(func(k *sim.Kind) { k.Class = 3 })}, "class is class(3)"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := sim.Run(sim.Scenario{Quota: small, Length: time.Minute, Traffic: []sim.Traffic{test.traffic}})
			require.ErrorContains(t, err, test.want)
			assert.ErrorContains(t, err, "sim: traffic[0]")
		})
	}
	_, err := sim.Run(sim.Scenario{Quota: small})
	require.ErrorContains(t, err, "length is 0s")
	_, err = sim.Run(sim.Scenario{Length: time.Minute})
	assert.ErrorContains(t, err, "tokens is 0", "the error of the quota")
}
