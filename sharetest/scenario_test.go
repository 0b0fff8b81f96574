package sharetest_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// The tests of this file are what the rule is there for: traffic, offered to a Window in virtual time, and what each
// class must get of an account of a million tokens a minute. Behind the Window stands a provider with a sliding window
// of its own, which must never answer 429. Run them with -v to see what was measured.

const (
	account = 1_000_000 // tokens a minute
	window  = time.Minute

	interactive = quotashare.Interactive
	background  = quotashare.Background
	batch       = quotashare.Batch
)

// floors are those that a requirement holds for, by name.
type floors map[string]quotashare.Fractions

var (
	defaultFloors = floors{"DefaultFloors": quotashare.DefaultFloors}
	elasticFloors = floors{"ElasticFloors": quotashare.ElasticFloors}
	servingFloors = floors{"DefaultFloors": quotashare.DefaultFloors, "ElasticFloors": quotashare.ElasticFloors}
	lendingFloors = floors{"ElasticFloors": quotashare.ElasticFloors, "NoFloors": quotashare.NoFloors}
	allFloors     = floors{
		"DefaultFloors": quotashare.DefaultFloors, "ElasticFloors": quotashare.ElasticFloors, "NoFloors": quotashare.NoFloors,
	}
)

// people are interactive calls of about 1,400 tokens.
func people(load float64, from time.Duration) sharetest.Flow {
	return sharetest.Flow{
		Class: interactive, Load: load, From: from, Tokens: lognormal[int64](1400, 0.6), Durations: lognormal(3*time.Second, 0.5),
	}
}

func scheduled(load float64, from time.Duration) sharetest.Flow {
	return sharetest.Flow{
		Class: background, Load: load, From: from, Tokens: lognormal[int64](3000, 0.6), Durations: lognormal(5*time.Second, 0.5),
	}
}

// hungry is an eval suite that never ends. It has enough workers that there is always one about to ask, whatever the
// size of its calls: each of them comes back at Backoff, five seconds, at the earliest.
func hungry(start time.Duration, tokens int64) sharetest.Suite {
	return sharetest.Suite{
		Start: start, Concurrency: 100, Tokens: sharetest.Tokens{tokens}, Durations: lognormal(5*time.Second, 0.5),
	}
}

// lognormal is the percentiles of values whose logarithms have the standard deviation sigma.
func lognormal[T ~int64](mean T, sigma float64) sharetest.Quantiles[T] {
	percentiles := make(sharetest.Quantiles[T], 101)
	for i := range percentiles {
		p := min(max(float64(i)/100, 0.001), 0.999)
		percentiles[i] = T(float64(mean) * math.Exp(sigma*math.Sqrt2*math.Erfinv(2*p-1)))
	}
	return percentiles.WithMean(mean)
}

// patient are people who wait ten seconds, and all others as they are.
var patient = [quotashare.NumClasses]sharetest.Callers{interactive: {Patience: 10 * time.Second}}

// seeds is how often a requirement must hold, each time with other random numbers.
func seeds() uint64 {
	if testing.Short() {
		return 1
	}
	return 5
}

// eachSeed replays traffic of some length for each of the floors, with five seeds. That the provider never had to
// refuse is checked for all of it.
func eachSeed(t *testing.T, f floors, length time.Duration, traffic []sharetest.Part, check func(*testing.T, sharetest.Report)) {
	for _, name := range slices.Sorted(maps.Keys(f)) {
		for seed := range seeds() {
			t.Run(fmt.Sprintf("%s/seed=%d", name, seed), func(t *testing.T) {
				t.Parallel()
				quota := quotashare.Quota{Tokens: account, Floors: f[name]}
				trace, err := sharetest.Generate(quota, length, seed, traffic...)
				require.NoError(t, err)
				report, err := sharetest.Replay(quota, trace, &sharetest.Options{Callers: patient})
				require.NoError(t, err)
				sharetest.Check(t, report, sharetest.TooMany().AtMost(0), sharetest.HighestWindow().AtMost(account))
				check(t, report)
			})
		}
	}
}

// batchSizes are 0.4 %, 2 % and 5 % of the quota a call.
var batchSizes = []int64{0.004 * account, 0.02 * account, 0.05 * account}

func TestNightBatchFillsWhatDefaultFloorsLeave(t *testing.T) {
	testNight(t, defaultFloors, 0.19, batchSizes)
}

func TestNightBatchFillsWhatElasticFloorsLeave(t *testing.T) {
	// The largest size is left out: 15 such calls are 75 % to the token, and 16 too many.
	testNight(t, elasticFloors, 0.75, batchSizes[:2])
}

// testNight is batch alone beside light interactive traffic, for twenty minutes after three windows of warm-up: batch
// takes its loan over the first, and demand is remembered for one more.
func testNight(t *testing.T, f floors, least float64, sizes []int64) {
	const from, to = 3 * window, 23 * window
	for _, tokens := range sizes {
		t.Run(fmt.Sprintf("batch=%v", tokens), func(t *testing.T) {
			eachSeed(t, f, to, []sharetest.Part{people(0.05, 0), hungry(0, tokens)}, func(t *testing.T, r sharetest.Report) {
				sharetest.Check(t, r.Between(from, to), sharetest.Share(batch).AtLeast(least), sharetest.GaveUp(interactive).AtMost(0))
			})
		})
	}
}

func TestMorningNobodyWaits(t *testing.T) {
	// The rush begins after five windows, when batch holds all that it can. People would wait in the two windows in
	// which batch gives back, so the quantile is of these alone. What batch keeps is measured after them, since at
	// first it still holds more than its share; over ten windows, for of the largest calls it is two in each.
	const rush, settled, end = 5 * window, 7 * window, 17 * window
	for _, tokens := range batchSizes {
		t.Run(fmt.Sprintf("batch=%v", tokens), func(t *testing.T) {
			traffic := []sharetest.Part{people(0.05, 0), people(0.5, rush), scheduled(0.19, rush), hungry(0, tokens)}
			eachSeed(t, servingFloors, end, traffic, func(t *testing.T, r sharetest.Report) {
				sharetest.Check(t, r,
					sharetest.GaveUp(interactive).AtMost(0),
					sharetest.Offered(interactive).AtLeast(1).During(rush, settled),
					sharetest.Wait(interactive, 0.99).AtMost(500*time.Millisecond-1).During(rush, settled),
					sharetest.Share(batch).AtLeast(0.09).During(settled, end))
			})
		})
	}
}

func TestHugeInteractiveCallIdlesNothing(t *testing.T) {
	// A call of 71 % is a loan, as its class's share is 70 %. It comes when the account is full, at three windows, and
	// again whenever it was admitted; nothing must be kept for it. Light interactive traffic and background go on.
	const start, from, to = 3 * window, 5 * window, 20 * window
	huge, one := sharetest.Trace{Length: to}, &sharetest.Pool{Workers: 1}
	for range 100 {
		huge.Arrivals = append(huge.Arrivals, sharetest.Arrival{
			At: start, Class: interactive, Estimate: 0.71 * account, Actual: 0.71 * account, Duration: 30 * time.Second, Pool: one,
		})
	}
	for _, name := range slices.Sorted(maps.Keys(lendingFloors)) {
		for seed := range seeds() {
			quota := quotashare.Quota{Tokens: account, Floors: lendingFloors[name]}
			trace, err := sharetest.Generate(quota, to, seed, people(0.05, 0), scheduled(0.19, 0), hungry(0, batchSizes[1]))
			require.NoError(t, err)
			r, err := sharetest.Replay(quota, sharetest.Merge(trace, huge), &sharetest.Options{
				Callers: [quotashare.NumClasses]sharetest.Callers{interactive: {Patience: -1}},
			})
			require.NoError(t, err)
			require.NotZero(t, r.Between(from, to).Classes[interactive].Refusals(), "the call keeps coming back")
			sharetest.Check(t, r, sharetest.TooMany().AtMost(0), sharetest.GaveUp(interactive).AtMost(0),
				sharetest.Share(interactive).AtMost(0.1).During(from, to), // the huge call is not what fills the account
				sharetest.Utilisation().AtLeast(0.8).During(from, to))
		}
	}
}

func TestSaturatedEverybodyHasItsShare(t *testing.T) {
	// Everybody asks for far more than its share, from the start on. Three windows of warm-up.
	const from, to = 3 * window, 9 * window
	traffic := []sharetest.Part{people(1.2, 0), scheduled(0.6, 0), hungry(0, batchSizes[1])}
	eachSeed(t, allFloors, to, traffic, func(t *testing.T, r sharetest.Report) { checkDefaultShares(t, r.Between(from, to), 0.02) })
}

func TestFloodLeavesLatecomersTheirShares(t *testing.T) {
	// Interactive alone asks for half as much again as the account has, and borrows all it can. In the very first
	// window after the others have come they must be admitted their shares, to a percent of the quota, and have them
	// from then on.
	const come, to = 3 * window, 6 * window
	traffic := []sharetest.Part{people(1.5, 0), scheduled(0.6, come), hungry(come, batchSizes[1])}
	eachSeed(t, allFloors, to, traffic, func(t *testing.T, r sharetest.Report) {
		sharetest.Check(t, r, sharetest.Share(interactive).AtLeast(0.8).During(window, come)) // it is alone
		checkDefaultShares(t, r.Between(come, come+window), 0.01)
		checkDefaultShares(t, r.Between(come+window, to), 0.01)
		sharetest.Check(t, r, sharetest.ShareDelay(background).AtMost(window), sharetest.ShareDelay(batch).AtMost(window))
	})
}

func checkDefaultShares(t *testing.T, r sharetest.Report, within float64) {
	t.Helper()
	for class, share := range quotashare.DefaultShares {
		of := sharetest.Share(quotashare.Class(class))
		sharetest.Check(t, r, of.AtLeast(share-within), of.AtMost(share+within))
	}
}

func TestRealTraces(t *testing.T) {
	if testing.Short() {
		t.Skip("it is an hour of 28,185 calls")
	}
	quota, trace := realTraces(t)
	report, err := sharetest.Replay(quota, trace, nil)
	require.NoError(t, err)
	t.Log(report)
	sharetest.Check(t, report, sharetest.TooMany().AtMost(0), sharetest.HighestWindow().AtMost(account),
		sharetest.HeldUp(interactive).AtMost(0.0015), // of people who do not come back
		sharetest.Utilisation().AtLeast(0.79))
}

// readAzure reads one of the recordings, which are not part of the repository.
func readAzure(t testing.TB, name string, class quotashare.Class) sharetest.Trace {
	t.Helper()
	file, err := os.Open(filepath.Join("..", "..", "shared", "traces", name))
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("the recorded traffic is not there: %v", err)
	}
	require.NoError(t, err)
	defer file.Close()
	trace, err := sharetest.ReadAzure(name, file, class)
	require.NoError(t, err)
	return trace
}

// realTraces are the two recorded hours together, and a hungry batch.
func realTraces(t testing.TB) (quotashare.Quota, sharetest.Trace) {
	t.Helper()
	quota := quotashare.Quota{
		Tokens: account,
		Shares: quotashare.Fractions{interactive: 0.8, background: 0.1, batch: 0.1},
		Floors: quotashare.ElasticFloors,
	}
	recorded := sharetest.Merge(
		readAzure(t, "azure_llm_2023_conv.csv", interactive), readAzure(t, "azure_llm_2023_code.csv", background))
	require.Len(t, recorded.Arrivals, 28_185)
	suite, err := sharetest.Generate(quota, recorded.Length, 1, hungry(0, batchSizes[1]))
	require.NoError(t, err)
	return quota, sharetest.Merge(recorded, suite)
}

// BenchmarkRealTraces replays an hour: go test ./sharetest -run '^$' -bench RealTraces
func BenchmarkRealTraces(b *testing.B) {
	quota, trace := realTraces(b)
	for b.Loop() {
		report, err := sharetest.Replay(quota, trace, nil)
		require.NoError(b, err)
		require.Zero(b, report.TooMany)
	}
}
