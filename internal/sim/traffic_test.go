package sim_test

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/exp/stats"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/internal/sim"
)

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

func TestPoissonIsDeterministic(t *testing.T) {
	traffic := interactive(rate(0, 0.05), rate(10*time.Minute, 0.55))
	first := traffic.Calls(20*time.Minute, seeded(1))
	assert.Empty(t, gocmp.Diff(first, traffic.Calls(20*time.Minute, seeded(1))), "the same seed")
	assert.NotEqual(t, first, traffic.Calls(20*time.Minute, seeded(2)), "another seed")
	longer := traffic.Calls(30*time.Minute, seeded(1))
	assert.Equal(t, first, longer[:len(first)], "a longer run begins the same")
}

func TestPoissonKeepsItsRate(t *testing.T) {
	traffic := interactive(rate(5*time.Minute, 0.55), rate(55*time.Minute, 0), rate(60*time.Minute, 0.05))
	calls := traffic.Calls(160*time.Minute, seeded(1))
	require.True(t, slices.IsSortedFunc(calls, func(a, b sim.Call) int { return cmp.Compare(a.At, b.At) }))
	tokens := func(from, to time.Duration) (sum float64) {
		for _, c := range calls {
			if c.At >= from && c.At < to {
				sum += float64(c.Estimate)
			}
		}
		return sum
	}
	assert.Zero(t, tokens(0, 5*time.Minute))
	assert.InEpsilon(t, 0.55*account, tokens(5*time.Minute, 55*time.Minute)/50, 0.03)
	assert.Zero(t, tokens(55*time.Minute, 60*time.Minute))
	assert.InEpsilon(t, 0.05*account, tokens(60*time.Minute, 160*time.Minute)/100, 0.05)
	assert.Less(t, calls[len(calls)-1].At, 160*time.Minute)

	// The times between calls of a Poisson process are exponential: as long on average as they are spread.
	var gaps []float64
	for i := 1; i < len(calls) && calls[i].At < 55*time.Minute; i++ {
		gaps = append(gaps, (calls[i].At - calls[i-1].At).Seconds())
	}
	mean, deviation := stats.MeanAndStdDev(gaps)
	assert.InEpsilon(t, mean, deviation, 0.05)
}

func TestDist(t *testing.T) {
	for name, test := range map[string]struct {
		dist      sim.Dist
		mean      float64
		low, high int64
	}{
		"fixed":     {sim.Fixed(4000), 4000, 4000, 4000},
		"uniform":   {sim.Uniform(1000, 3000), 2000, 1000, 3000},
		"lognormal": {sim.Lognormal(1400, 0.6), 1400, 50, 30_000},
		"tiny":      {sim.Fixed(0.1), 0.1, 1, 1}, // a call is of 1 token at least
	} {
		t.Run(name, func(t *testing.T) {
			assert.InDelta(t, test.mean, test.dist.Mean(), 1e-9)
			traffic := sim.Poisson{
				Kind: sim.Kind{Tokens: test.dist},
				Rate: []sim.Step{{TokensPerMinute: 10_000 * test.dist.Mean()}},
			}
			calls := traffic.Calls(time.Minute, seeded(1))
			sum := int64(0)
			for _, c := range calls {
				sum += c.Estimate
				assert.GreaterOrEqual(t, c.Estimate, test.low)
				assert.LessOrEqual(t, c.Estimate, test.high)
				assert.Equal(t, c.Estimate, c.Actual, "all of the estimate is used where nothing else is said")
				assert.Zero(t, c.Length)
			}
			assert.InEpsilon(t, max(test.mean, 1), float64(sum)/float64(len(calls)), 0.03)
		})
	}
	assert.Zero(t, sim.Dist{}.Mean())
}

func TestCallsUsePartOfTheirEstimates(t *testing.T) {
	traffic := sim.Poisson{
		Kind: sim.Kind{
			Class:    quotashare.Background,
			Tokens:   sim.Fixed(1000),
			Used:     sim.Uniform(0.5, 0.9),
			Seconds:  sim.Fixed(2.5),
			Patience: time.Minute,
		},
		Rate: []sim.Step{{TokensPerMinute: 100_000}},
	}
	for _, c := range traffic.Calls(time.Minute, seeded(1)) {
		assert.EqualValues(t, 1000, c.Estimate)
		assert.GreaterOrEqual(t, c.Actual, int64(500))
		assert.LessOrEqual(t, c.Actual, int64(900))
		assert.Equal(t, 2500*time.Millisecond, c.Length)
		assert.Equal(t, time.Minute, c.Patience)
		assert.Equal(t, quotashare.Background, c.Class)
	}
}
