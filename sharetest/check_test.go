package sharetest_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// measured is a replay of an account of a hundred tokens a minute over four of them, that starts at nine. Batch takes
// all of it at once. A scheduled call of 30 tokens asks at 20 s, comes back when it is told, and is admitted at 60 s.
// Somebody asks at 30 s, waits ten seconds, and gives up; and somebody for more than there is.
func measured(t *testing.T) sharetest.Report {
	trace := sharetest.Trace{
		Start: time.Date(2026, 7, 28, 9, 0, 0, 0, time.UTC), Length: 4 * time.Minute,
		Arrivals: []sharetest.Arrival{
			{Class: batch, Estimate: 100, Actual: 100},
			{At: 20 * time.Second, Class: background, Estimate: 30, Actual: 30},
			{At: 30 * time.Second, Class: interactive, Estimate: 40, Actual: 40},
			{At: 3 * time.Minute, Class: interactive, Estimate: 101},
			{At: 3 * time.Minute, Class: interactive, Estimate: 10, Actual: 10},
		},
	}
	quota := hundred
	quota.Shares = quotashare.Fractions{0.6, 0.3, 0.1}
	return mustReplay(t, quota, trace, &sharetest.Options{Name: "mine", Callers: callers(10 * time.Second)})
}

// A limit is just met by a measure, and just not.
func TestMeasures(t *testing.T) {
	r := measured(t)
	tooMany := mustReplay(t, hundred, calls([2]int64{0, 100}, [2]int64{10, 100}), &sharetest.Options{
		Policy: sharetest.Undecided, Callers: callers(600 * time.Millisecond),
	})
	for name, test := range map[string]struct {
		r             sharetest.Report
		fulfilled     []sharetest.Wish
		not           sharetest.Wish
		is, wish, why string // why is when it happened
	}{
		"offered": {
			r,
			[]sharetest.Wish{sharetest.Offered(interactive).AtLeast(3), sharetest.Offered(interactive).AtMost(3)},
			sharetest.Offered(interactive).AtLeast(4),
			"interactive calls offered: 3", "at least 4", "",
		},
		"admitted": {
			r,
			[]sharetest.Wish{sharetest.Admitted(interactive).AtLeast(1), sharetest.Admitted(interactive).AtMost(1)},
			sharetest.Admitted(interactive).AtLeast(2),
			"interactive calls admitted: 1", "at least 2", "",
		},
		"pending": {
			r.Between(0, 30*time.Second),
			[]sharetest.Wish{sharetest.Pending(background).AtLeast(1), sharetest.Pending(batch).AtMost(0)},
			sharetest.Pending(background).AtMost(0),
			"background calls pending: 1", "at most 0", "",
		},
		"gave up": {
			r,
			[]sharetest.Wish{sharetest.GaveUp(interactive).AtLeast(2), sharetest.GaveUp(interactive).AtMost(2)},
			sharetest.GaveUp(interactive).AtMost(1),
			"interactive calls given up: 2", "at most 1", "first about 09:00:40, and most about 09:00:40 (1)",
		},
		"held up": {
			r,
			[]sharetest.Wish{sharetest.HeldUp(interactive).AtLeast(2.0 / 3), sharetest.HeldUp(interactive).AtMost(2.0 / 3)},
			sharetest.HeldUp(interactive).AtMost(0.666),
			"interactive calls held up: 66.7 %", "at most 66.6 %",
			"first about 09:00:30, and most about 09:00:30 (1)",
		},
		"wait": {
			r,
			[]sharetest.Wish{
				sharetest.Wait(background, 0.5).AtLeast(40 * time.Second), sharetest.Wait(background, 0.5).AtMost(40 * time.Second),
				sharetest.Wait(interactive, 1).AtMost(0),
			},
			sharetest.Wait(background, 0.99).AtMost(39 * time.Second),
			"background wait at 0.99: 40 s", "at most 39 s", "the longest, 40 s, of a call that first asked at 09:00:20",
		},
		"share": {
			r,
			[]sharetest.Wish{sharetest.Share(batch).AtLeast(0.25), sharetest.Share(batch).AtMost(0.25)},
			sharetest.Share(batch).AtLeast(0.26),
			"batch share: 25.0 %", "at least 26.0 %", "100 tokens were asked for, and 100 admitted",
		},
		"share delay": {
			r,
			[]sharetest.Wish{
				sharetest.ShareDelay(background).AtLeast(40 * time.Second),
				sharetest.ShareDelay(background).AtMost(40 * time.Second),
				sharetest.ShareDelay(interactive).AtMost(10 * time.Second), sharetest.ShareDelay(batch).AtMost(0),
			},
			sharetest.ShareDelay(background).AtMost(39 * time.Second),
			"background share delay: 40 s", "at most 39 s", "its demand rose at 09:00:20",
		},
		"utilisation": {
			r,
			[]sharetest.Wish{sharetest.Utilisation().AtLeast(0.35), sharetest.Utilisation().AtMost(0.35 + 1e-12)},
			sharetest.Utilisation().AtLeast(0.5),
			"utilisation: 35.0 %", "at least 50.0 %", "",
		},
		"429s": {
			tooMany,
			[]sharetest.Wish{sharetest.TooMany().AtLeast(2), sharetest.TooMany().AtMost(2)},
			sharetest.TooMany().AtMost(0),
			"answers of 429: 2", "at most 0", "first about 0:10, and most about 0:10 (1)",
		},
		"no 429s": {
			r, []sharetest.Wish{sharetest.TooMany().AtMost(0)}, sharetest.TooMany().AtLeast(1),
			"answers of 429: 0", "at least 1", "",
		},
		"highest window": {
			r,
			[]sharetest.Wish{sharetest.HighestWindow().AtLeast(100), sharetest.HighestWindow().AtMost(100)},
			sharetest.HighestWindow().AtMost(99),
			"tokens in the highest window: 100", "at most 99", "at 09:00:00",
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, w := range test.fulfilled {
				assert.NoError(t, w.Test(test.r), "%v", w)
			}
			err := test.not.Test(test.r)
			require.Error(t, err)
			place := "mine, 09:00:00 to 09:04:00: "
			if test.r.To == 30*time.Second {
				place = "mine, 09:00:00 to 09:00:30: "
			}
			if test.r.Name != "mine" {
				place = "nothing decides, 0:00 to 3:00: "
			}
			want := "sharetest: " + place + test.is + ", want " + test.wish
			if test.why != "" {
				want += "; " + test.why
			}
			assert.EqualError(t, err, want)
			name, _, _ := strings.Cut(test.is, ": ")
			assert.Equal(t, name+" "+test.wish, test.not.String())
		})
	}
}

func TestLongestWaitIsTold(t *testing.T) {
	trace := calls([2]int64{0, 60}, [2]int64{20, 60}, [2]int64{30, 100}, [2]int64{179, 1})
	trace.Length = 4 * time.Minute
	r := mustReplay(t, hundred, trace, &sharetest.Options{Callers: callers(-1)})
	require.Equal(t, []time.Duration{0, time.Second, 40 * time.Second, 90 * time.Second}, r.Classes[interactive].Waits)
	err := sharetest.Wait(interactive, 0.5).AtMost(0).Test(r)
	assert.ErrorContains(t, err, "; the longest, 90 s, of a call that first asked at 0:30")
}

func TestMeasureOf(t *testing.T) {
	r := measured(t)
	assert.Equal(t, 3, sharetest.Offered(interactive).Of(r))
	assert.Equal(t, 1, sharetest.Offered(batch).Of(r))
	assert.Equal(t, 2, sharetest.GaveUp(interactive).Of(r))
	assert.InDelta(t, 2.0/3, sharetest.HeldUp(interactive).Of(r), 1e-12)
	assert.Zero(t, sharetest.HeldUp(batch).Of(r))
	assert.Equal(t, 40*time.Second, sharetest.Wait(background, 1).Of(r))
	assert.InDelta(t, 0.25, sharetest.Share(batch).Of(r), 1e-12)
	assert.Equal(t, 40*time.Second, sharetest.ShareDelay(background).Of(r))
	assert.InDelta(t, 0.35, sharetest.Utilisation().Of(r), 1e-12)
	assert.Zero(t, sharetest.TooMany().Of(r))
	assert.EqualValues(t, 100, sharetest.HighestWindow().Of(r))
	assert.Zero(t, sharetest.HeldUp(interactive).Of(sharetest.Report{}), "of no calls none is held up")
}

func TestWishDuringAnInterval(t *testing.T) {
	r := measured(t)
	whole := sharetest.GaveUp(interactive).AtMost(1)
	first, second := whole.During(0, 2*time.Minute), whole.During(30*time.Second, time.Hour)
	require.Error(t, whole.Test(r))
	assert.NoError(t, first.Test(r))
	assert.ErrorContains(t, second.Test(r), `interactive calls given up: 2, want at most 1`)
	assert.ErrorContains(t, second.Test(r), "mine, 09:00:30 to 09:04:00: ", "the interval that was looked at")
	assert.Equal(t, "interactive calls given up at most 1", whole.String(), "it stays as it was")
	assert.Equal(t, "interactive calls given up at most 1 from 0s to 2m0s", first.String())
	assert.NoError(t, second.During(0, time.Minute).Test(r), "the last interval counts")

	wait := sharetest.Wait(background, 1).AtMost(0).During(50*time.Second, 61*time.Second)
	assert.ErrorContains(t, wait.Test(r), "of a call that first asked at 09:00:20", "an admission of the interval")
	assert.NoError(t, sharetest.Wait(background, 1).AtMost(0).During(0, time.Minute).Test(r))
	assert.Error(t, sharetest.Offered(batch).AtLeast(1).During(1, time.Minute).Test(r))
}

func TestWishServesForAnyNumberOfReports(t *testing.T) {
	wish := sharetest.GaveUp(interactive).AtMost(1)
	require.Error(t, wish.Test(measured(t)))
	require.NoError(t, wish.Test(sharetest.Report{}))
	require.Error(t, wish.Test(measured(t)))
}

// A recorder is a testing.T that keeps what it was told.
type recorder struct {
	helper int
	errors []string
}

func (r *recorder) Helper() { r.helper++ }

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func TestCheckTellsEachWishAndTheTableOnce(t *testing.T) {
	r := measured(t)
	good, bad := sharetest.GaveUp(interactive).AtMost(2), sharetest.GaveUp(interactive).AtMost(1)
	worse := sharetest.TooMany().AtLeast(1)

	var told recorder
	assert.True(t, sharetest.Check(&told, r, good, good))
	assert.Empty(t, told.errors)
	assert.Equal(t, 1, told.helper)
	assert.True(t, sharetest.Check(&told, r), "nothing is wished")

	assert.False(t, sharetest.Check(&told, r, bad, good, worse))
	assert.Equal(t, []string{bad.Test(r).Error(), worse.Test(r).Error(), r.String()}, told.errors)
	assert.Equal(t, 3, told.helper)
}

func TestZeroWishIsFulfilled(t *testing.T) {
	var w sharetest.Wish
	for _, wish := range []sharetest.Wish{w, w.During(0, time.Second)} {
		require.NoError(t, wish.Test(sharetest.Report{}))
		require.NoError(t, wish.Test(measured(t)))
	}
	assert.Empty(t, w.String())
	assert.True(t, sharetest.Check(&recorder{}, measured(t), w))
}

func TestUnknownClassHasNothing(t *testing.T) {
	const unknown = quotashare.Class(quotashare.NumClasses)
	for _, r := range []sharetest.Report{{}, measured(t)} {
		assert.Zero(t, sharetest.Offered(unknown).Of(r))
		assert.Zero(t, sharetest.GaveUp(unknown).Of(r))
		assert.Zero(t, sharetest.HeldUp(unknown).Of(r))
		assert.Zero(t, sharetest.Wait(unknown, 1).Of(r))
		assert.Zero(t, sharetest.Share(unknown).Of(r))
		assert.Zero(t, sharetest.ShareDelay(unknown).Of(r))
		assert.ErrorContains(t, sharetest.Offered(unknown).AtLeast(1).Test(r), "class(3) calls offered: 0")
		assert.ErrorContains(t, sharetest.Wait(unknown, 1).AtMost(-time.Second).Test(r), "class(3) wait at 1: 0 s")
		assert.ErrorContains(t, sharetest.GaveUp(unknown).AtMost(-1).Test(r), "when cannot be told")
		assert.ErrorContains(t, sharetest.HeldUp(unknown).AtMost(-1).Test(r), "when cannot be told")
	}
}

func TestZeroReportSaysThatItCannotTellWhen(t *testing.T) {
	var r sharetest.Report
	r.TooMany, r.Classes[batch].GaveUp = 1, 1
	assert.ErrorContains(t, sharetest.TooMany().AtMost(0).Test(r), "when cannot be told")
	assert.ErrorContains(t, sharetest.GaveUp(batch).AtMost(0).Test(r), "when cannot be told")
	r.Classes[batch].Waits = []time.Duration{time.Second}
	assert.ErrorContains(t, sharetest.Wait(batch, 1).AtMost(0).Test(r), "batch wait at 1: 1.0 s, want at most 0 s")
}

func TestALimitThatIsNoNumberIsNotFulfilled(t *testing.T) {
	for _, limit := range []float64{math.NaN(), math.Inf(1)} {
		require.Error(t, sharetest.Utilisation().AtLeast(limit).Test(measured(t)), limit)
	}
	require.Error(t, sharetest.Utilisation().AtMost(math.NaN()).Test(measured(t)))
	require.NoError(t, sharetest.Utilisation().AtMost(math.Inf(1)).Test(measured(t)))
}

func TestValuesThatPrintAlikeAreToldInFull(t *testing.T) {
	r := measured(t)
	require.ErrorContains(t, sharetest.Share(batch).AtLeast(0.2501).Test(r), "batch share: 0.25, want at least 0.2501")
	require.ErrorContains(t, sharetest.ShareDelay(background).AtMost(40*time.Second-1).Test(r), "40s, want at most 39.999999999s")
}

func TestAnIntervalOutsideOfTheReplayFulfilsNothing(t *testing.T) {
	r := measured(t)
	for _, interval := range [][2]time.Duration{{20 * time.Minute, 30 * time.Minute}, {2 * time.Minute, time.Minute}, {0, 0}} {
		err := sharetest.TooMany().AtMost(0).During(interval[0], interval[1]).Test(r)
		require.ErrorContains(t, err, "nothing of that is in the replay", interval)
	}
}

func TestTheWaitOfAClassThatGetsNothingIsForEver(t *testing.T) {
	trace := sharetest.Trace{Length: time.Minute, Arrivals: []sharetest.Arrival{{Class: batch, Estimate: 50}}}
	r := mustReplay(t, quotashare.Quota{Tokens: 100, Shares: quotashare.Fractions{interactive: 1}}, trace, nil)
	require.Zero(t, r.Classes[batch].Admitted)
	require.ErrorContains(t, sharetest.Wait(batch, 0.5).AtMost(time.Hour).Test(r), "batch wait at 0.5: for ever, want at most 60.0 min")
	require.NoError(t, sharetest.Wait(interactive, 0.5).AtMost(0).Test(r), "nobody asked")
}
