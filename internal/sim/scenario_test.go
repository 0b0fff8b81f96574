package sim_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/internal/sim"
)

// The tests of this file are what the rule is there for: traffic, offered to a Window in virtual time, and what each
// class must get of an account of a million tokens a minute. Behind the Window stands a provider with a sliding window
// of its own, which must never answer 429. Run them with -v to see what was measured.

const (
	account = 1_000_000 // tokens a minute
	window  = time.Minute
)

// seeds is how often a requirement must hold, each time with other random numbers.
func seeds() uint64 {
	if testing.Short() {
		return 1
	}
	return 5
}

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

// interactive is people who wait: calls of about 1,400 tokens, for which nobody has more than ten seconds.
func interactive(rate ...sim.Step) sim.Poisson {
	return sim.Poisson{Rate: rate, Kind: sim.Kind{
		Class:    quotashare.Interactive,
		Tokens:   sim.Lognormal(1400, 0.6),
		Seconds:  sim.Lognormal(3, 0.5),
		Patience: 10 * time.Second,
	}}
}

// background is scheduled work, which waits for two windows at most.
func background(rate ...sim.Step) sim.Poisson {
	return sim.Poisson{Rate: rate, Kind: sim.Kind{
		Class:    quotashare.Background,
		Tokens:   sim.Lognormal(3000, 0.6),
		Seconds:  sim.Lognormal(5, 0.5),
		Patience: 2 * window,
	}}
}

// hungryBatch is an endless eval suite. It has enough workers that there is always one about to ask, whatever the size
// of its calls: each of them comes back at Backoff, five seconds, at the earliest.
func hungryBatch(start time.Duration, tokens float64) sim.Suite {
	return sim.Suite{Start: start, Concurrency: 100, Kind: sim.Kind{
		Class:   quotashare.Batch,
		Tokens:  sim.Fixed(tokens),
		Seconds: sim.Lognormal(5, 0.5),
	}}
}

func rate(from time.Duration, quotaFraction float64) sim.Step {
	return sim.Step{From: from, TokensPerMinute: quotaFraction * account}
}

// eachSeed runs traffic of some length for each of the floors and seeds, and hands over what happened. That the
// provider never had to refuse is checked for all of it.
func eachSeed(
	t *testing.T, f floors, length time.Duration, traffic []sim.Traffic, check func(*testing.T, *sim.History),
) {
	for _, name := range slices.Sorted(maps.Keys(f)) {
		for seed := range seeds() {
			t.Run(fmt.Sprintf("%s/seed=%d", name, seed), func(t *testing.T) {
				t.Parallel()
				history, err := sim.Run(sim.Scenario{
					Quota:   quotashare.Quota{Tokens: account, Window: window, Floors: f[name]},
					Length:  length,
					Traffic: traffic,
					Seed:    seed,
				})
				require.NoError(t, err)
				requireQuotaKept(t, history, account)
				check(t, history)
			})
		}
	}
}

func requireQuotaKept(t *testing.T, history *sim.History, quota int64) {
	t.Helper()
	whole := history.Report(0, history.Length())
	require.Zero(t, whole.TooMany, "answers of 429 by the provider")
	require.LessOrEqual(t, whole.HighestWindow, quota, "tokens in the highest window")
}

// batchSizes are 0.4 %, 2 % and 5 % of the quota a call.
var batchSizes = []float64{0.004 * account, 0.02 * account, 0.05 * account}

func TestNightBatchFillsWhatDefaultFloorsLeave(t *testing.T) {
	testNight(t, defaultFloors, 0.19, batchSizes)
}

func TestNightBatchFillsWhatElasticFloorsLeave(t *testing.T) {
	// The largest size is left out: 15 such calls are 75 % to the token, and 16 too many.
	testNight(t, elasticFloors, 0.75, batchSizes[:2])
}

// testNight is batch alone beside light interactive traffic.
func testNight(t *testing.T, f floors, least float64, sizes []float64) {
	// Twenty minutes, after three windows of warm-up: batch takes its loan over the first, and demand is remembered for
	// one more.
	const from, to = 3 * window, 23 * window
	for _, tokens := range sizes {
		t.Run(fmt.Sprintf("batch=%v", tokens), func(t *testing.T) {
			traffic := []sim.Traffic{interactive(rate(0, 0.05)), hungryBatch(0, tokens)}
			eachSeed(t, f, to, traffic, func(t *testing.T, history *sim.History) {
				r := history.Report(from, to)
				t.Logf("batch %.4f", r.Classes[quotashare.Batch].Share)
				require.GreaterOrEqual(t, r.Classes[quotashare.Batch].Share, least, "batch's share of the quota")
				require.Zero(t, r.Classes[quotashare.Interactive].GaveUp)
			})
		})
	}
}

func TestMorningNobodyWaits(t *testing.T) {
	// The rush begins after five windows, when batch holds all that it can. People would wait in the two windows in
	// which batch gives back, so the quantile is of these alone. What batch keeps is measured after them, since at first
	// it still holds more than its share; over ten windows, for of the largest calls it is two in each.
	const (
		rush    = 5 * window
		settled = rush + 2*window
		end     = settled + 10*window
	)
	for _, tokens := range batchSizes {
		t.Run(fmt.Sprintf("batch=%v", tokens), func(t *testing.T) {
			traffic := []sim.Traffic{
				interactive(rate(0, 0.05), rate(rush, 0.55)), background(rate(rush, 0.19)), hungryBatch(0, tokens),
			}
			eachSeed(t, servingFloors, end, traffic, func(t *testing.T, history *sim.History) {
				all, first, later := history.Report(rush, end), history.Report(rush, settled), history.Report(settled, end)
				people, batch := first.Classes[quotashare.Interactive], later.Classes[quotashare.Batch]
				t.Logf("gave up %d; waits: 99th %v, longest %v; batch %.4f",
					all.Classes[quotashare.Interactive].GaveUp, people.Wait(0.99), people.Wait(1), batch.Share)
				require.NotEmpty(t, people.Waits)
				require.Zero(t, all.Classes[quotashare.Interactive].GaveUp, "people who gave up")
				require.Less(t, people.Wait(0.99), 500*time.Millisecond, "99th of a hundred waits")
				require.GreaterOrEqual(t, batch.Share, 0.09, "batch's share of the quota")
			})
		})
	}
}

func TestHugeInteractiveCallIdlesNothing(t *testing.T) {
	// A call of 71 % is a loan, as its class's share is 70 %. It comes when the account is full, at three windows, and
	// comes back whenever it is told to; nothing must be kept for it. Light interactive traffic and background go on.
	const start, from, to = 3 * window, 5 * window, 20 * window
	huge := sim.Suite{Start: start, Concurrency: 1, Kind: sim.Kind{
		Class: quotashare.Interactive, Tokens: sim.Fixed(0.71 * account), Seconds: sim.Fixed(30),
	}}
	traffic := []sim.Traffic{
		interactive(rate(0, 0.05)), background(rate(0, 0.19)), hungryBatch(0, batchSizes[1]), huge,
	}
	eachSeed(t, lendingFloors, to, traffic, func(t *testing.T, history *sim.History) {
		r := history.Report(from, to)
		people := r.Classes[quotashare.Interactive]
		t.Logf("utilisation %.4f, of which interactive %.4f; refusals %d", r.Utilisation, people.Share, people.Refused)
		require.Less(t, people.Share, 0.1, "interactive's share: the huge call must not be what fills the account")
		require.Zero(t, people.Dropped, "the call is not too large")
		require.NotZero(t, people.Refused, "the call keeps coming back")
		require.Greater(t, r.Utilisation, 0.8)
	})
}

func TestSaturatedEverybodyHasItsShare(t *testing.T) {
	// Everybody asks for far more than its share, from the start on. Three windows of warm-up.
	const from, to = 3 * window, 9 * window
	traffic := []sim.Traffic{interactive(rate(0, 1.2)), background(rate(0, 0.6)), hungryBatch(0, batchSizes[1])}
	eachSeed(t, allFloors, to, traffic, func(t *testing.T, history *sim.History) {
		requireShares(t, history.Report(from, to), 0.02)
	})
}

func TestFloodLeavesLatecomersTheirShares(t *testing.T) {
	// Interactive alone asks for half as much again as the account has, and borrows all it can. In the very first window
	// after the others have come they must be admitted their shares, to a percent of the quota, and have them from then
	// on.
	const come, to = 3 * window, 6 * window
	traffic := []sim.Traffic{interactive(rate(0, 1.5)), background(rate(come, 0.6)), hungryBatch(come, batchSizes[1])}
	eachSeed(t, allFloors, to, traffic, func(t *testing.T, history *sim.History) {
		before := history.Report(window, come)
		t.Logf("interactive alone: %.4f", before.Classes[quotashare.Interactive].Share)
		require.Greater(t, before.Classes[quotashare.Interactive].Share, 0.8, "interactive's share, alone")
		requireShares(t, history.Report(come, come+window), 0.01)
		requireShares(t, history.Report(come+window, to), 0.01)
	})
}

func requireShares(t *testing.T, r sim.Report, within float64) {
	t.Helper()
	t.Logf("from %v: interactive %.4f, background %.4f, batch %.4f", r.From,
		r.Classes[quotashare.Interactive].Share, r.Classes[quotashare.Background].Share, r.Classes[quotashare.Batch].Share)
	for class, want := range quotashare.DefaultShares {
		require.InDelta(t, want, r.Classes[class].Share, within, "share of %v from %v on", quotashare.Class(class), r.From)
	}
}

func TestSettledCallsKeepTheQuota(t *testing.T) {
	// What calls used replaces their estimates while others come and go, after up to two windows. The Window and the
	// provider must agree all the time.
	settling := func(k sim.Kind) sim.Kind {
		k.Used, k.Seconds = sim.Uniform(0, 1), sim.Lognormal(20, 1)
		return k
	}
	people := interactive(rate(0, 0.05), rate(5*window, 0.8))
	scheduled, batch := background(rate(0, 0.3)), hungryBatch(0, batchSizes[0])
	people.Kind, scheduled.Kind, batch.Kind = settling(people.Kind), settling(scheduled.Kind), settling(batch.Kind)
	traffic := []sim.Traffic{people, scheduled, batch}
	eachSeed(t, allFloors, 10*window, traffic, func(t *testing.T, history *sim.History) {
		r := history.Report(0, history.Length())
		t.Logf("utilisation %.4f, highest window %d", r.Utilisation, r.HighestWindow)
	})
}

func TestRealTraces(t *testing.T) {
	conv, code := readTrace(t, "azure_llm_2023_conv.csv"), readTrace(t, "azure_llm_2023_code.csv")
	origin, last := conv[0].At, code[len(code)-1].At
	traffic := []sim.Traffic{
		sim.Replay{Class: quotashare.Interactive, Rows: conv, Origin: origin, Patience: 10 * time.Second},
		sim.Replay{Class: quotashare.Background, Rows: code, Origin: origin, Patience: 2 * window},
		hungryBatch(0, batchSizes[1]),
	}
	for _, name := range slices.Sorted(maps.Keys(allFloors)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			history, err := sim.Run(sim.Scenario{
				Quota: quotashare.Quota{
					Tokens: account,
					Window: window,
					Shares: quotashare.Fractions{
						quotashare.Interactive: 0.8, quotashare.Background: 0.1, quotashare.Batch: 0.1,
					},
					Floors: allFloors[name],
				},
				Length:  last.Sub(origin),
				Traffic: traffic,
			})
			require.NoError(t, err)
			requireQuotaKept(t, history, account)
			r := history.Report(0, history.Length())
			people := r.Classes[quotashare.Interactive]
			t.Logf("utilisation %.4f; interactive: gave up %d of %d, longest wait %v",
				r.Utilisation, people.GaveUp, people.Offered, people.Wait(1))
		})
	}
}

// readTrace reads one of the recordings, which are not part of the repository.
func readTrace(t *testing.T, name string) []sim.Row {
	t.Helper()
	path := filepath.Join("..", "..", "..", "shared", "traces", name)
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("the recorded traffic is not there: %v", err)
	}
	require.NoError(t, err)
	defer file.Close()
	rows, err := sim.ReadTrace(name, file)
	require.NoError(t, err)
	return rows
}
