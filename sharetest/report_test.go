package sharetest_test

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

func TestIntervalsAddUp(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 11))
		quota, trace, options := randomCase(random)
		whole := mustReplay(t, quota, trace, &options)
		cuts := []time.Duration{0, trace.Length}
		for range random.IntN(6) {
			cuts = append(cuts, time.Duration(random.Int64N(int64(trace.Length))))
		}
		slices.Sort(cuts)

		var total sharetest.Report
		var last sharetest.Report
		for i := 1; i < len(cuts); i++ {
			last = whole.Between(cuts[i-1], cuts[i])
			assert.Equal(t, cuts[i-1], last.From)
			assert.Equal(t, cuts[i], last.To)
			if last.HighestWindow > total.HighestWindow {
				total.HighestWindow, total.HighestAt = last.HighestWindow, last.HighestAt
			}
			total.Utilisation += last.Utilisation * float64(last.To-last.From) / float64(trace.Length)
			total.TooMany += last.TooMany
			total.Lent += last.Lent
			total.TakenBack += last.TakenBack
			total.Timeline = append(total.Timeline, last.Timeline...)
			for class, c := range last.Classes {
				sum := &total.Classes[class]
				sum.Offered += c.Offered
				sum.OfferedTokens += c.OfferedTokens
				sum.Admitted += c.Admitted
				sum.AdmittedTokens += c.AdmittedTokens
				sum.Borrowed += c.Borrowed
				sum.Share += c.Share * float64(last.To-last.From) / float64(trace.Length)
				for reason, n := range c.Refused {
					sum.Refused[reason] += n
				}
				sum.TooMany += c.TooMany
				sum.HeldUp += c.HeldUp
				sum.GaveUp += c.GaveUp
				sum.Dropped += c.Dropped
				sum.Waits = append(sum.Waits, c.Waits...)
				sum.Pending = c.Pending // of the last
				sum.ShareDelay, sum.ShareDelayAt = max(sum.ShareDelay, c.ShareDelay), whole.Classes[class].ShareDelayAt
			}
		}
		for class := range total.Classes {
			slices.Sort(total.Classes[class].Waits)
		}
		// What is of the replay, and not of an interval.
		total.Name, total.Policy, total.Quota, total.Start = whole.Name, whole.Policy, whole.Quota, whole.Start
		total.From, total.To, total.Advice = 0, trace.Length, whole.Advice
		require.Empty(t, diff(whole, total), "seed %d", seed)

		for class, c := range whole.Classes {
			come := 0
			for _, a := range trace.Arrivals {
				if a.Class == quotashare.Class(class) {
					come++
				}
			}
			assert.Equal(t, come, c.Admitted+c.GaveUp+c.Dropped+c.Pending, "every %d is in one of these states", class)
			assert.LessOrEqual(t, c.Offered, come)
			assert.Len(t, c.Waits, c.Admitted)
			assert.GreaterOrEqual(t, c.Offered, c.HeldUp+c.Dropped)
		}
		assert.Empty(t, diff(whole, whole.Between(-time.Hour, 1<<62)), "what lies outside is left out")
		assert.Empty(t, diff(whole, last.Between(0, trace.Length)), "a part knows the whole")
		if len(cuts) > 2 {
			assert.Nil(t, last.Advice, "it is of the whole replay")
		}
	}
}

func TestEmptyInterval(t *testing.T) {
	whole := mustReplay(t, hundred, calls([2]int64{0, 100}, [2]int64{10, 100}), &sharetest.Options{Callers: callers(-1)})
	for _, interval := range [][2]time.Duration{{20, 20}, {40, 20}} {
		r := whole.Between(interval[0]*time.Second, interval[1]*time.Second)
		assert.Equal(t, interval[0]*time.Second, r.From)
		assert.Equal(t, r.From, r.To, "it does not end before it begins")
		c := r.Classes[interactive]
		assert.Equal(t, 1, c.Pending)
		c.Pending = 0
		assert.Zero(t, c)
		assert.Zero(t, r.Utilisation)
		assert.Empty(t, r.Timeline)
	}
	r := whole.Between(time.Hour, 2*time.Hour)
	assert.Equal(t, 3*time.Minute, r.From)
	assert.Equal(t, 3*time.Minute, r.To)
}

func TestTimelineHas480Moments(t *testing.T) {
	for _, length := range []time.Duration{time.Second, time.Minute + 7, 8 * time.Hour, 24*time.Hour + 1} {
		trace := sharetest.Trace{Length: length, Arrivals: []sharetest.Arrival{
			{Class: batch, Estimate: 60, Actual: 60}, {At: length / 2, Class: batch, Estimate: 100, Actual: 100},
		}}
		options := sharetest.Options{}
		options.Callers[batch].Patience = 1
		r := mustReplay(t, quotashare.Quota{Tokens: 100, Window: 2 * length, Floors: quotashare.NoFloors}, trace, &options)
		require.Len(t, r.Timeline, 480, length)
		var refused, gaveUp []int
		for i, m := range r.Timeline {
			assert.Equal(t, time.Duration(i)*r.Timeline[1].At, m.At)
			assert.Equal(t, quotashare.ClassTokens{batch: 60}, m.Used)
			if m.Refused[batch] > 0 {
				refused = append(refused, i)
			}
			if m.GaveUp[batch] > 0 {
				gaveUp = append(gaveUp, i)
			}
		}
		half := int(length / 2 / r.Timeline[1].At)
		assert.Equal(t, []int{half}, refused)
		assert.Equal(t, []int{half}, gaveUp)
		assert.Len(t, r.Between(r.Timeline[7].At, r.Timeline[9].At).Timeline, 2)
		assert.Len(t, r.Between(r.Timeline[7].At+1, r.Timeline[9].At+1).Timeline, 2)
	}
}

func TestTimelineShowsWhatIsKept(t *testing.T) {
	// The floors keep 20 and 10 for the classes above while batch has 5 of its share of 20, and nothing more of its
	// floor.
	trace := sharetest.Trace{Length: time.Minute, Arrivals: []sharetest.Arrival{{Class: batch, Estimate: 5, Actual: 5}}}
	r := mustReplay(t, shared, trace, nil)
	want := quotashare.ClassTokens{interactive: 20, background: 10, batch: 5} // its floor, beyond what it asked for
	assert.Equal(t, want, r.Timeline[7].Kept)
	for _, policy := range []sharetest.Policy{sharetest.Undecided, sharetest.StrictPriority, sharetest.PatternSketch} {
		r = mustReplay(t, shared, trace, &sharetest.Options{Policy: policy})
		assert.Zero(t, r.Timeline[7].Kept, policy)
		assert.Equal(t, quotashare.ClassTokens{batch: 5}, r.Timeline[7].Used, policy)
	}
}

func TestAdviceIsThatOfTheWindow(t *testing.T) {
	// Batch asks for far more than its ceiling, in an account that is all but empty.
	trace := sharetest.Trace{Length: 5 * time.Minute}
	for at := time.Duration(0); at < trace.Length; at += time.Second {
		trace.Arrivals = append(trace.Arrivals, sharetest.Arrival{At: at, Class: batch, Estimate: 10, Actual: 10})
	}
	quota := quotashare.Quota{Tokens: 100, Ceilings: quotashare.Fractions{batch: 0.1}}
	r := mustReplay(t, quota, trace, nil)
	require.Len(t, r.Advice, 1)
	assert.Contains(t, r.Advice[0], "raise its ceiling")
	assert.Equal(t, 1, strings.Count(r.String(), "\n advice      "+r.Advice[0]+"\n"))
	assert.Nil(t, r.Between(0, time.Minute).Advice)
	assert.Equal(t, r.Advice, r.Between(0, time.Minute).Between(0, trace.Length).Advice)
	assert.Nil(t, mustReplay(t, quota, trace, &sharetest.Options{Policy: sharetest.Undecided}).Advice)
}

func TestWaitIsTheNearestRank(t *testing.T) {
	c := sharetest.ClassReport{}
	assert.Zero(t, c.Wait(0.5))
	for i := range 200 {
		c.Waits = append(c.Waits, time.Duration(i+1))
	}
	for fraction, want := range map[float64]time.Duration{
		-1: 1, 0: 1, 0.005: 1, 0.0051: 2, 0.5: 100, 0.99: 198, 0.991: 199, 0.999: 200, 1: 200, 2: 200,
	} {
		assert.Equal(t, want, c.Wait(fraction), fraction)
	}
}

func TestRefusalsAddUpReasons(t *testing.T) {
	c := sharetest.ClassReport{TooMany: 1000}
	for i := range c.Refused {
		c.Refused[i] = 1 << i
	}
	assert.Equal(t, 1<<quotashare.NumReasons-1, c.Refusals())
}

// tabled is a report that has something of everything.
func tabled() sharetest.Report {
	return sharetest.Report{
		Name: "the table", Quota: quotashare.Quota{Tokens: 1_000_000}, From: time.Minute, To: 12*time.Hour + 5*time.Second,
		HighestWindow: 999_999, Utilisation: 0.9876, TooMany: 1234, Advice: []string{"one.", "two."},
		Classes: [quotashare.NumClasses]sharetest.ClassReport{
			{
				Offered: 123_456, AdmittedTokens: 172_849_999, Share: 0.61, HeldUp: 999, GaveUp: 7, Dropped: 3,
				ShareDelay: 119 * time.Second, Waits: []time.Duration{
					0, 0, 1, 1_000_001, 997_000_001, 1_240_000_000, 9_940_000_000, 59_400_000_000, 2 * time.Minute, time.Hour,
				}},
			{Offered: 1, Waits: []time.Duration{12 * time.Second}},
			{},
		},
	}
}

func TestReportAsATable(t *testing.T) {
	assert.Equal(t, strings.TrimPrefix(`
the table, 1:00 to 720:05
               tokens of quota    calls  held up  gave up   median     99th  longest share after
 interactive  172.8 M   61.0 %  123,456      999       10   998 ms 60.0 min 60.0 min       119 s
 background         0    0.0 %        1        0        0     12 s     12 s     12 s         0 s
 batch              0    0.0 %        0        0        0        -        -        -         0 s
 account     98.8 % of the quota used; highest window 999,999 of 1,000,000 tokens; 429s: 1,234
 advice      one.
 advice      two.
`, "\n"), tabled().String())

	r := tabled()
	r.Start = time.Date(2026, 7, 28, 23, 59, 59, 0, time.UTC)
	assert.True(t, strings.HasPrefix(r.String(), "the table, 00:00:59 to 12:00:04\n"), "the time of day: %v", r)
	r.To += 24 * time.Hour
	assert.True(t, strings.HasPrefix(r.String(), "the table, Jul 29 00:00:59 to Jul 30 12:00:04\n"), "and the day: %v", r)
}

func TestDurationsInATable(t *testing.T) {
	for wait, want := range map[time.Duration]string{
		0: "0 s", 1: "1 ms", time.Millisecond: "1 ms", time.Millisecond + 1: "2 ms", 998 * time.Millisecond: "998 ms",
		time.Second: "1.0 s", 9900 * time.Millisecond: "9.9 s", 10 * time.Second: "10 s",
		2*time.Minute - time.Second: "119 s",
		2 * time.Minute:             "2.0 min", 90 * time.Minute: "90.0 min",
		2*time.Hour - time.Minute: "119.0 min", 2 * time.Hour: "2.0 h",
		25 * time.Hour: "25.0 h",
	} {
		r := sharetest.Report{}
		r.Classes[batch].ShareDelay = wait
		line := strings.Split(r.String(), "\n")[4]
		assert.True(t, strings.HasSuffix(line, " "+want), "%v: want %s at the end of %q", wait, want, line)
	}
}

func TestTablesAreOfOneWidth(t *testing.T) {
	var wide sharetest.Report
	wide.Name = "wide"
	for class := range wide.Classes {
		wide.Classes[class] = sharetest.ClassReport{
			Offered: 9_999_999, AdmittedTokens: 99_999e6, Share: 9.999, HeldUp: 9_999_999, GaveUp: 9_999_999,
			Waits: []time.Duration{9999 * time.Minute}, ShareDelay: 9999 * time.Minute,
		}
	}
	for _, r := range []sharetest.Report{{}, tabled(), wide} {
		rows := strings.Split(r.String(), "\n")[1:5]
		for _, row := range rows {
			assert.Len(t, row, len(rows[0]))
			assert.LessOrEqual(t, len(row), 120)
		}
		for _, row := range rows[1:] {
			cells := strings.NewReplacer(" %", "%", " M", "M", " min", "min", " ms", "ms", " s", "s", " h", "h").Replace(row)
			assert.Len(t, strings.Fields(cells), 10, "columns do not run into each other: %s", row)
		}
	}
}

func TestReportsAreMarshalled(t *testing.T) {
	trace := calls([2]int64{0, 100}, [2]int64{10, 100})
	trace.Start = time.Date(2026, 7, 28, 9, 0, 0, 0, time.UTC)
	r := mustReplay(t, hundred, trace, &sharetest.Options{Callers: callers(-1), Policy: sharetest.StaticPartition})
	text, err := json.Marshal(r)
	require.NoError(t, err)
	var got map[string]any
	require.NoError(t, json.Unmarshal(text, &got))
	assert.Equal(t, "static partition", got["Policy"])
	assert.Equal(t, "2026-07-28T09:00:00Z", got["Start"])
	assert.Len(t, got["Timeline"], 480)
	assert.Len(t, got["Classes"], quotashare.NumClasses)
	assert.InDelta(t, 1, got["Classes"].([]any)[0].(map[string]any)["Dropped"].(float64)/2, 1e-9)
	assert.NotContains(t, got, "history")
}

func TestZeroReport(t *testing.T) {
	var r sharetest.Report
	assert.Zero(t, r.Between(1, 2))
	assert.Contains(t, r.String(), "account     0.0 % of the quota used; highest window 0 of 0 tokens; 429s: 0\n")
	for class, c := range r.Classes {
		assert.Zero(t, c.Wait(0.5), class)
		assert.Zero(t, c.Refusals(), class)
	}
}
