package promshare

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// A window has so many metrics, and these so many series with the buckets, sums and counts, whatever is asked of it.
const (
	ownMetrics    = 89
	sharedMetrics = 101
	ownSeries     = 113
	sharedSeries  = 125
)

// fake is a window that tells what it is given.
type fake func() quotashare.Stats

func (f fake) Stats() quotashare.Stats { return f() }

// telling is a window that tells the stats, as they are when it is asked.
func telling(s *quotashare.Stats) Window { return fake(func() quotashare.Stats { return *s }) }

func newCollector(t testing.TB, windows map[string]Window) *Collector {
	t.Helper()
	c, err := NewCollector(windows)
	require.NoError(t, err)
	return c
}

// registered returns a registry that checks all that a Collector may get wrong.
func registered(t testing.TB, c *Collector) *prometheus.Registry {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	require.NoError(t, r.Register(c))
	return r
}

// scrape returns what Prometheus is answered.
func scrape(t testing.TB, c *Collector) string {
	t.Helper()
	answer := httptest.NewRecorder()
	handler := promhttp.HandlerFor(registered(t, c), promhttp.HandlerOpts{})
	handler.ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
	require.Equal(t, 200, answer.Code)
	return answer.Body.String()
}

// gather returns every value, by its series as Prometheus writes it but for the prefix quotashare_, and by the type.
func gather(t testing.TB, from prometheus.Gatherer) (values map[string]float64, types map[string]dto.MetricType) {
	t.Helper()
	families, err := from.Gather()
	require.NoError(t, err)
	values, types = map[string]float64{}, map[string]dto.MetricType{}
	for _, f := range families {
		name, ok := strings.CutPrefix(f.GetName(), "quotashare_")
		require.True(t, ok, f.GetName())
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			put := func(suffix string, value float64, more ...string) {
				series := fmt.Sprintf("%s%s{%s}", name, suffix, strings.Join(append(labels, more...), ","))
				require.NotContains(t, values, series)
				values[series], types[series] = value, f.GetType()
			}
			switch f.GetType() {
			case dto.MetricType_GAUGE:
				put("", m.Gauge.GetValue())
			case dto.MetricType_COUNTER:
				put("", m.Counter.GetValue())
			case dto.MetricType_SUMMARY:
				require.Empty(t, m.Summary.Quantile)
				put("_count", float64(m.Summary.GetSampleCount()))
				put("_sum", m.Summary.GetSampleSum())
			case dto.MetricType_HISTOGRAM:
				for _, b := range m.Histogram.Bucket {
					put("_bucket", float64(b.GetCumulativeCount()), fmt.Sprintf("le=\"%v\"", b.GetUpperBound()))
				}
				put("_count", float64(m.Histogram.GetSampleCount()))
				put("_sum", m.Histogram.GetSampleSum())
			}
		}
	}
	return values, types
}

// nonzero returns what is not 0 of a collector's only window, whose label is left out.
func nonzero(t testing.TB, c *Collector) map[string]float64 {
	t.Helper()
	values, _ := gather(t, registered(t, c))
	told := map[string]float64{}
	for series, value := range values {
		if value != 0 {
			series = strings.NewReplacer(`window="w",`, "", `,window="w"`, "", `{window="w"}`, "").Replace(series)
			told[series] = value
		}
	}
	return told
}

// requireNonzero wants these values, and 0 for all else. Sums may differ by what rounding makes.
func requireNonzero(t testing.TB, c *Collector, want map[string]float64) {
	t.Helper()
	got := nonzero(t, c)
	for series, value := range want {
		if strings.HasSuffix(strings.SplitN(series, "{", 2)[0], "_sum") && got[series] != 0 {
			require.InEpsilon(t, value, got[series], 1e-12, series)
			got[series] = value
		}
	}
	require.Equal(t, want, got)
}

// with returns the values with changes.
func with(values, changes map[string]float64) map[string]float64 {
	changed := map[string]float64{}
	for series, value := range values {
		changed[series] = value
	}
	for series, value := range changes {
		if value == 0 {
			delete(changed, series)
		} else {
			changed[series] = value
		}
	}
	return changed
}

// A bubbleWindow is a Window in a bubble of testing/synctest. Times are given as so long after it was made.
type bubbleWindow struct {
	*quotashare.Window
	t     *testing.T
	start time.Time
}

func newBubbleWindow(t *testing.T, quota quotashare.Quota, options ...quotashare.Option) *bubbleWindow {
	t.Helper()
	w, err := quotashare.NewWindow(quota, options...)
	require.NoError(t, err)
	return &bubbleWindow{w, t, time.Now()}
}

// at sleeps until the time, and then until all that happens at that time has happened.
func (w *bubbleWindow) at(sinceStart time.Duration) {
	time.Sleep(sinceStart - time.Since(w.start))
	synctest.Wait()
}

func (w *bubbleWindow) admit(class quotashare.Class, tokens int64) *quotashare.Grant {
	w.t.Helper()
	g, d := w.TryAcquire(class, tokens)
	require.True(w.t, d.Admitted, "%+v", d)
	return &g
}

func (w *bubbleWindow) refuse(class quotashare.Class, tokens int64, reason quotashare.Reason) {
	w.t.Helper()
	_, d := w.TryAcquire(class, tokens)
	require.Equal(w.t, reason, d.Reason)
}

// acquire makes a call, and comes back when it has ended or waits.
func (w *bubbleWindow) acquire(ctx context.Context, class quotashare.Class, tokens int64) <-chan *quotashare.Grant {
	admitted := make(chan *quotashare.Grant, 1)
	go func() {
		if g, err := w.Acquire(ctx, class, tokens); err == nil {
			admitted <- &g
		}
	}()
	synctest.Wait()
	return admitted
}

// All that there is to tell is told from the start, as 0. The file is what a scrape shows of a shared window.
func TestEveryMetricIsThereFromTheStart(t *testing.T) {
	shared := telling(&quotashare.Stats{Shared: &quotashare.SharedStats{Mode: "local(0.125)"}})
	file, err := os.Open("testdata/shared.txt")
	require.NoError(t, err)
	defer file.Close()
	require.NoError(t, testutil.CollectAndCompare(newCollector(t, map[string]Window{"gpt-5": shared}), file))
}

// A window that is not shared has no metric of sharing, and no reason "none".
func TestZeroWindow(t *testing.T) {
	c := newCollector(t, map[string]Window{"w": &quotashare.Window{}})
	requireNonzero(t, c, map[string]float64{})
	values, _ := gather(t, registered(t, c))
	for series := range values {
		require.NotContains(t, series, "shared_")
		require.NotContains(t, series, `"none"`)
	}
}

// TestMetricsTellWhatHappened follows one story, in which something happens for every metric.
func TestMetricsTellWhatHappened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newBubbleWindow(t, quotashare.Quota{
			Tokens:   1000,
			Shares:   quotashare.Fractions{quotashare.Interactive: 0.5, quotashare.Background: 0.3, quotashare.Batch: 0.2},
			Floors:   quotashare.Fractions{quotashare.Interactive: 0.2, quotashare.Background: 0.1, quotashare.Batch: 0.1},
			Ceilings: quotashare.Fractions{quotashare.Background: 0.35},
			Pace:     2,
		}, quotashare.WithMaxWait(quotashare.Interactive, 30*time.Second))
		c := newCollector(t, map[string]Window{"w": w})

		// Nobody asked for anything yet, so the floors are held.
		want := map[string]float64{
			`quota_tokens`:                      1000,
			`share_tokens{class="interactive"}`: 500,
			`share_tokens{class="background"}`:  300,
			`share_tokens{class="batch"}`:       200,
			`held_tokens{class="interactive"}`:  200,
			`held_tokens{class="background"}`:   100,
			`held_tokens{class="batch"}`:        100,
		}
		requireNonzero(t, c, want)

		// Admissions, the last of batch above its share.
		answered := w.admit(quotashare.Interactive, 100)
		late := w.admit(quotashare.Batch, 200)
		unsent := w.admit(quotashare.Batch, 100)
		unknown := w.admit(quotashare.Background, 300)
		want = with(want, map[string]float64{
			`used_tokens{class="interactive"}`:                        100,
			`used_tokens{class="background"}`:                         300,
			`used_tokens{class="batch"}`:                              300,
			`held_tokens{class="interactive"}`:                        300, // the floor on top of what was asked for
			`held_tokens{class="background"}`:                         300,
			`held_tokens{class="batch"}`:                              200,
			`borrowed_tokens{class="batch"}`:                          100,
			`decisions_total{class="interactive",reason="own_share"}`: 1,
			`decisions_total{class="background",reason="own_share"}`:  1,
			`decisions_total{class="batch",reason="own_share"}`:       1,
			`decisions_total{class="batch",reason="borrowed"}`:        1,
			`estimated_tokens_total{class="interactive"}`:             100,
			`estimated_tokens_total{class="background"}`:              300,
			`estimated_tokens_total{class="batch"}`:                   300,
		})
		requireNonzero(t, c, want)

		// Refusals while the window is 70 % full. Those for good are decisions, and no matter of how full it was.
		w.refuse(quotashare.Background, 60, quotashare.ReasonCapped)
		w.refuse(quotashare.Background, 351, quotashare.ReasonTooLarge)
		w.refuse(quotashare.Background, 0, quotashare.ReasonInvalid)
		w.refuse(quotashare.Interactive, 350, quotashare.ReasonQuotaFull)
		w.refuse(quotashare.Batch, 250, quotashare.ReasonReserved)
		want = with(want, map[string]float64{
			`decisions_total{class="background",reason="capped"}`:      1,
			`decisions_total{class="background",reason="too_large"}`:   1,
			`decisions_total{class="background",reason="invalid"}`:     1,
			`decisions_total{class="interactive",reason="quota_full"}`: 1,
			`decisions_total{class="batch",reason="reserved"}`:         1,
			`held_up_within_share_total{class="interactive"}`:          1,
			`fill_at_refusal_ratio_count{class="interactive"}`:         1,
			`fill_at_refusal_ratio_count{class="background"}`:          1,
			`fill_at_refusal_ratio_count{class="batch"}`:               1,
			`fill_at_refusal_ratio_sum{class="interactive"}`:           0.7,
			`fill_at_refusal_ratio_sum{class="background"}`:            0.7,
			`fill_at_refusal_ratio_sum{class="batch"}`:                 0.7,
			`held_tokens{class="interactive"}`:                         500,
		})
		requireNonzero(t, c, want)

		// Two calls begin to wait while it is 66 % full, and a third finds one of them before it.
		w.at(10 * time.Second)
		answered.Settle(60)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		w.acquire(t.Context(), quotashare.Interactive, 400)
		w.acquire(ctx, quotashare.Batch, 150)
		w.refuse(quotashare.Interactive, 10, quotashare.ReasonQueued)
		want = with(want, map[string]float64{
			`used_tokens{class="interactive"}`:                           60,
			`settled_tokens_total{class="interactive"}`:                  60,
			`waits_begun_total{class="interactive",reason="quota_full"}`: 1,
			`waits_begun_total{class="batch",reason="reserved"}`:         1,
			`waiters{class="interactive"}`:                               1,
			`waiters{class="batch"}`:                                     1,
			`decisions_total{class="interactive",reason="queued"}`:       1,
			`held_up_within_share_total{class="interactive"}`:            2,
			`fill_at_refusal_ratio_count{class="interactive"}`:           3,
			`fill_at_refusal_ratio_count{class="batch"}`:                 2,
			`fill_at_refusal_ratio_sum{class="interactive"}`:             0.7 + 0.66 + 0.66,
			`fill_at_refusal_ratio_sum{class="batch"}`:                   0.7 + 0.66,
		})
		requireNonzero(t, c, want)

		// The context ends one of the waits after 10 s, and the longest wait of the class the other after 30 s. Neither
		// is a decision.
		w.at(20 * time.Second)
		cancel()
		w.at(40 * time.Second)
		want = with(want, map[string]float64{
			`waiters{class="interactive"}`:                      0,
			`waiters{class="batch"}`:                            0,
			`waits_total{class="batch",result="cancelled"}`:     1,
			`waits_total{class="interactive",result="expired"}`: 1,
			`wait_seconds_sum{class="batch"}`:                   10,
			`wait_seconds_count{class="batch"}`:                 1,
			`wait_seconds_bucket{class="batch",le="10"}`:        1,
			`wait_seconds_bucket{class="batch",le="60"}`:        1,
			`wait_seconds_bucket{class="batch",le="300"}`:       1,
			`wait_seconds_sum{class="interactive"}`:             30,
			`wait_seconds_count{class="interactive"}`:           1,
			`wait_seconds_bucket{class="interactive",le="60"}`:  1,
			`wait_seconds_bucket{class="interactive",le="300"}`: 1,
		})
		requireNonzero(t, c, want)

		// A third wait ends in an admission after 15 s, when what was charged at the start leaves.
		w.at(45 * time.Second)
		admitted := w.acquire(t.Context(), quotashare.Background, 290)
		w.at(50 * time.Second)
		unsent.Cancel()
		w.at(time.Minute)
		want = with(want, map[string]float64{
			`used_tokens{class="interactive"}`:                        0,
			`used_tokens{class="background"}`:                         290,
			`used_tokens{class="batch"}`:                              0,
			`borrowed_tokens{class="batch"}`:                          0,
			`cancelled_tokens_total{class="batch"}`:                   100,
			`waits_begun_total{class="background",reason="reserved"}`: 1,
			`waits_total{class="background",result="admitted"}`:       1,
			`wait_seconds_sum{class="background"}`:                    15,
			`wait_seconds_count{class="background"}`:                  1,
			`wait_seconds_bucket{class="background",le="60"}`:         1,
			`wait_seconds_bucket{class="background",le="300"}`:        1,
			`fill_at_refusal_ratio_count{class="background"}`:         2,
			`fill_at_refusal_ratio_sum{class="background"}`:           0.7 + 0.66,
			`decisions_total{class="background",reason="own_share"}`:  2,
			`estimated_tokens_total{class="background"}`:              590,
		})
		requireNonzero(t, c, want)

		// More than was estimated is borrowed too. What is late is counted; what nobody knows, or comes twice, is not.
		w.at(70 * time.Second)
		grant := <-admitted
		grant.Settle(310)
		late.Settle(170)
		unknown.Settle(-1)
		for _, g := range []*quotashare.Grant{answered, late, unknown, unsent, grant} {
			g.Settle(1)
			g.Cancel()
		}
		want = with(want, map[string]float64{
			`used_tokens{class="background"}`:          310,
			`borrowed_tokens{class="background"}`:      10,
			`settled_tokens_total{class="background"}`: 310,
			`settled_tokens_total{class="batch"}`:      170,
		})
		requireNonzero(t, c, want)

		// Others hold what is neither left nor charged.
		w.Observe(300, 0)
		w.refuse(quotashare.Interactive, 400, quotashare.ReasonQuotaFull)
		want = with(want, map[string]float64{
			`others_tokens`: 1000 - 300 - 310,
			`decisions_total{class="interactive",reason="quota_full"}`: 2,
			`held_up_within_share_total{class="interactive"}`:          3,
			`fill_at_refusal_ratio_count{class="interactive"}`:         4,
			`fill_at_refusal_ratio_sum{class="interactive"}`:           0.7 + 0.66 + 0.66 + 0.7,
		})
		requireNonzero(t, c, want)

		// What is in the window goes, and what was asked for is forgotten; what was counted stays.
		w.at(10 * time.Minute)
		requireNonzero(t, c, with(want, map[string]float64{
			`others_tokens`:                       0,
			`used_tokens{class="background"}`:     0,
			`borrowed_tokens{class="background"}`: 0,
			`held_tokens{class="interactive"}`:    200,
			`held_tokens{class="background"}`:     100,
			`held_tokens{class="batch"}`:          100,
		}))
	})
}

// Pace refuses, and makes wait.
func TestMetricsOfAPacedClass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newBubbleWindow(t, quotashare.Quota{
			Tokens: 1200, Shares: quotashare.Fractions{quotashare.Interactive: 1}, Floors: quotashare.NoFloors, Pace: 12,
		})
		w.admit(quotashare.Batch, 100) // all that one of the parts may take
		w.refuse(quotashare.Batch, 100, quotashare.ReasonPaced)
		w.acquire(t.Context(), quotashare.Batch, 100)
		w.at(5 * time.Second)
		requireNonzero(t, newCollector(t, map[string]Window{"w": w}), map[string]float64{
			`quota_tokens`:                                     1200,
			`share_tokens{class="interactive"}`:                1200,
			`used_tokens{class="batch"}`:                       200,
			`borrowed_tokens{class="batch"}`:                   200,
			`decisions_total{class="batch",reason="borrowed"}`: 2,
			`decisions_total{class="batch",reason="paced"}`:    1,
			`waits_begun_total{class="batch",reason="paced"}`:  1,
			`waits_total{class="batch",result="admitted"}`:     1,
			`wait_seconds_sum{class="batch"}`:                  5,
			`wait_seconds_count{class="batch"}`:                1,
			`wait_seconds_bucket{class="batch",le="10"}`:       1,
			`wait_seconds_bucket{class="batch",le="60"}`:       1,
			`wait_seconds_bucket{class="batch",le="300"}`:      1,
			`fill_at_refusal_ratio_count{class="batch"}`:       2,
			`fill_at_refusal_ratio_sum{class="batch"}`:         2 * 100.0 / 1200,
			`estimated_tokens_total{class="batch"}`:            200,
		})
	})
}

// A ceiling makes wait, those behind wait too, and a smaller quota ends a wait.
func TestMetricsOfACappedClass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quota := quotashare.Quota{
			Tokens:   1000,
			Shares:   quotashare.Fractions{quotashare.Interactive: 0.8, quotashare.Batch: 0.2},
			Floors:   quotashare.NoFloors,
			Ceilings: quotashare.Fractions{quotashare.Batch: 0.3},
			Pace:     1,
		}
		w := newBubbleWindow(t, quota)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		w.admit(quotashare.Batch, 200)
		w.acquire(ctx, quotashare.Batch, 150)
		w.acquire(ctx, quotashare.Batch, 50)
		want := map[string]float64{
			`quota_tokens`:                                      1000,
			`share_tokens{class="interactive"}`:                 800,
			`share_tokens{class="batch"}`:                       200,
			`held_tokens{class="batch"}`:                        200,
			`used_tokens{class="batch"}`:                        200,
			`waiters{class="batch"}`:                            2,
			`decisions_total{class="batch",reason="own_share"}`: 1,
			`waits_begun_total{class="batch",reason="capped"}`:  1,
			`waits_begun_total{class="batch",reason="queued"}`:  1,
			`fill_at_refusal_ratio_count{class="batch"}`:        2,
			`fill_at_refusal_ratio_sum{class="batch"}`:          0.2 + 0.2,
			`estimated_tokens_total{class="batch"}`:             200,
		}
		c := newCollector(t, map[string]Window{"w": w})
		requireNonzero(t, c, want)

		w.at(100 * time.Millisecond)
		quota.Tokens = 400 // of which batch may hold 120
		require.NoError(t, w.SetQuota(quota))
		w.at(time.Second)
		cancel()
		synctest.Wait()
		requireNonzero(t, c, with(want, map[string]float64{
			`quota_tokens`:                                  400,
			`share_tokens{class="interactive"}`:             320,
			`share_tokens{class="batch"}`:                   80,
			`held_tokens{class="batch"}`:                    80,
			`borrowed_tokens{class="batch"}`:                120,
			`waiters{class="batch"}`:                        0,
			`waits_total{class="batch",result="refused"}`:   1,
			`waits_total{class="batch",result="cancelled"}`: 1,
			`wait_seconds_sum{class="batch"}`:               1.1,
			`wait_seconds_count{class="batch"}`:             2,
			`wait_seconds_bucket{class="batch",le="0.1"}`:   1,
			`wait_seconds_bucket{class="batch",le="1"}`:     2,
			`wait_seconds_bucket{class="batch",le="10"}`:    2,
			`wait_seconds_bucket{class="batch",le="60"}`:    2,
			`wait_seconds_bucket{class="batch",le="300"}`:   2,
		}))
	})
}

// What a shadow window would have refused counts as refused.
func TestMetricsOfAShadowWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quota := quotashare.Quota{Tokens: 100, Shares: quotashare.Fractions{quotashare.Batch: 1}}
		w := newBubbleWindow(t, quota, quotashare.WithShadow(nil))
		w.admit(quotashare.Batch, 80)
		w.admit(quotashare.Batch, 30)
		told := nonzero(t, newCollector(t, map[string]Window{"w": w}))
		require.Equal(t, 1.0, told[`decisions_total{class="batch",reason="own_share"}`])
		require.Equal(t, 1.0, told[`decisions_total{class="batch",reason="quota_full"}`])
		require.Equal(t, 80.0, told[`used_tokens{class="batch"}`])
	})
}

// A shared window tells how it stands with what it is shared by. Of calls that nobody decided it is not known how full
// the window was, so they are no part of the summary, in its sum and in its count.
func TestMetricsOfASharedWindow(t *testing.T) {
	stats := quotashare.Stats{Quota: 1000, Shared: &quotashare.SharedStats{
		Mode: "closed", Away: errors.New("connection refused"),
		Outages: 2, Alone: 3, Disagreements: 4, Pending: 5, Dropped: 6,
	}}
	batch := &stats.Classes[quotashare.Batch]
	batch.Refused[quotashare.ReasonNone] = 3
	batch.Refused[quotashare.ReasonReserved] = 1
	batch.Waits[quotashare.ReasonNone] = 5
	batch.Waits[quotashare.ReasonQueued] = 1
	batch.FillAtRefusal = (0.5 + 0.75) / 2
	batch.Waiting = 6
	c := newCollector(t, map[string]Window{"w": telling(&stats)})
	want := map[string]float64{
		`quota_tokens`: 1000,
		`decisions_total{class="batch",reason="none"}`:     3,
		`decisions_total{class="batch",reason="reserved"}`: 1,
		`waits_begun_total{class="batch",reason="none"}`:   5,
		`waits_begun_total{class="batch",reason="queued"}`: 1,
		`waiters{class="batch"}`:                           6,
		`fill_at_refusal_ratio_count{class="batch"}`:       2,
		`fill_at_refusal_ratio_sum{class="batch"}`:         0.5 + 0.75,
		`shared_away{mode="closed"}`:                       1,
		`shared_outages_total`:                             2,
		`shared_alone_decisions_total`:                     3,
		`shared_disagreements_total`:                       4,
		`shared_pending_corrections`:                       5,
		`shared_dropped_corrections_total`:                 6,
	}
	requireNonzero(t, c, want)

	// It is back.
	stats.Shared.Away = nil
	requireNonzero(t, c, with(want, map[string]float64{`shared_away{mode="closed"}`: 0}))
	values, _ := gather(t, registered(t, c))
	require.Contains(t, values, `shared_away{mode="closed",window="w"}`)
}

// An average times a number is not always the sum that it was made of. The sum that is told never falls by that, for
// then Prometheus would take all of it for new. It begins anew with a window that does.
func TestSumOfFillsNeverFallsByRounding(t *testing.T) {
	var stats quotashare.Stats
	batch := &stats.Classes[quotashare.Batch]
	tell := func(calls uint64, fill float64) {
		batch.Refused = [quotashare.NumReasons]uint64{quotashare.ReasonQuotaFull: calls}
		batch.FillAtRefusal = fill / float64(calls)
	}
	const fill = 0.7
	calls := uint64(1)
	for fill/float64(calls+1)*float64(calls+1) >= fill/float64(calls)*float64(calls) {
		calls++
		require.Less(t, calls, uint64(1000))
	}
	c := newCollector(t, map[string]Window{"w": telling(&stats)})
	sum := func() float64 { return nonzero(t, c)[`fill_at_refusal_ratio_sum{class="batch"}`] }

	tell(calls, fill)
	before := sum()
	require.InDelta(t, fill, before, 1e-12)
	tell(calls+1, fill) // refused while the window was empty, as the provider had throttled
	require.Equal(t, before, sum())
	tell(calls+1, 0.9)
	require.InDelta(t, 0.9, sum(), 1e-12)

	batch.Refused = [quotashare.NumReasons]uint64{}
	batch.FillAtRefusal = 0
	require.Zero(t, sum())
}

// Each scrape asks each window once, and all that it tells is of that instant, when it is written later too.
func TestOneSnapshotForEachScrape(t *testing.T) {
	asked := atomic.Int64{}
	window := fake(func() (s quotashare.Stats) {
		n := asked.Add(1)
		s.Quota, s.Others = n, n
		for class := range s.Classes {
			c := &s.Classes[class]
			c.Used, c.Share, c.Held, c.EstimatedTokens, c.SettledTokens, c.CancelledTokens = 2*n, n, n, n, n, n
			c.Admitted, c.Borrowed, c.Waiting, c.HeldUpWithinShare = 2*uint64(n), uint64(n), int(n), uint64(n)
			c.WaitsAdmitted, c.WaitsCancelled, c.WaitsExpired, c.WaitsRefused = uint64(n), uint64(n), uint64(n), uint64(n)
		}
		return s
	})
	c := newCollector(t, map[string]Window{"w": window})
	registry := registered(t, c)
	asked.Store(0) // registering asks nothing, but Describe might

	const scrapers, scrapes = 4, 25
	var group sync.WaitGroup
	for range scrapers {
		group.Go(func() {
			for range scrapes {
				values, _ := gather(t, registry)
				n := values[`quota_tokens{window="w"}`]
				for series, value := range values {
					if value == 0 {
						continue
					}
					want := n
					switch strings.SplitN(series, "{", 2)[0] {
					case "used_tokens":
						want = 2 * n
					case "wait_seconds_count":
						want = 4 * n
					}
					if value != want { // not require, which must not end another goroutine than the test's
						t.Errorf("%s is %v: want %v", series, value, want)
					}
				}
			}
		})
	}
	group.Wait()
	require.EqualValues(t, scrapers*scrapes, asked.Load())

	metrics := make(chan prometheus.Metric, 1000)
	c.Collect(metrics)
	gather(t, registry)
	var out dto.Metric
	require.NoError(t, (<-metrics).Write(&out))
	require.EqualValues(t, scrapers*scrapes+1, out.Gauge.GetValue())
}

// While calls are admitted, refused, settled and cancelled, what counts never falls, and all that one scrape tells
// agrees.
func TestScrapesUnderLoad(t *testing.T) {
	window, err := quotashare.NewWindow(quotashare.Quota{
		Tokens: 1000, Window: 100 * time.Millisecond, Floors: quotashare.ElasticFloors,
		Ceilings: quotashare.Fractions{quotashare.Background: 0.5}, Pace: 2,
	}, quotashare.WithMaxWait(quotashare.Batch, 10*time.Millisecond))
	require.NoError(t, err)
	c := newCollector(t, map[string]Window{"w": window})
	registry := registered(t, c)

	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	for seed := range uint64(4) {
		group.Go(func() {
			r := rand.New(rand.NewPCG(7, seed))
			for ctx.Err() == nil {
				class, tokens := quotashare.Class(r.IntN(quotashare.NumClasses)), 1+r.Int64N(100)
				call, cancel := context.WithTimeout(ctx, time.Duration(r.IntN(30))*time.Millisecond)
				if grant, err := window.Acquire(call, class, tokens); err == nil {
					if r.IntN(3) > 0 {
						grant.Settle(r.Int64N(100))
					} else {
						grant.Cancel()
					}
				}
				cancel()
				time.Sleep(time.Duration(r.IntN(200)) * time.Microsecond) // leaves something of the processors to the scrapes
			}
		})
	}
	// Windows come and go meanwhile.
	group.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			name := fmt.Sprint("other ", i%3)
			if !c.Remove(name) {
				if err := c.Add(name, window); err != nil {
					t.Error(err)
				}
			}
			time.Sleep(100 * time.Microsecond)
		}
	})

	last := map[string]float64{}
	agree := func(values map[string]float64, left, right []string) {
		t.Helper()
		for class := range quotashare.Class(quotashare.NumClasses) {
			sum := func(series []string) (sum float64) {
				for _, s := range series {
					s = fmt.Sprintf(s, class)
					require.Contains(t, values, s)
					sum += values[s]
				}
				return sum
			}
			require.Equal(t, sum(left), sum(right), "%v: %v and %v", class, left, right)
		}
	}
	begun := []string{
		`waits_begun_total{class="%v",reason="quota_full",window="w"}`,
		`waits_begun_total{class="%v",reason="reserved",window="w"}`,
		`waits_begun_total{class="%v",reason="capped",window="w"}`, `waits_begun_total{class="%v",reason="paced",window="w"}`,
		`waits_begun_total{class="%v",reason="queued",window="w"}`,
	}
	ended := []string{
		`waits_total{class="%v",result="admitted",window="w"}`, `waits_total{class="%v",result="cancelled",window="w"}`,
		`waits_total{class="%v",result="expired",window="w"}`, `waits_total{class="%v",result="refused",window="w"}`,
	}
	var refused []string
	for _, s := range begun {
		refused = append(refused, strings.Replace(s, "waits_begun_total", "decisions_total", 1))
	}
	// What must have happened for the test to tell something.
	missing := func() (series []string) {
		for _, s := range []string{
			`waits_total{class="background",result="admitted",window="w"}`,
			`waits_total{class="batch",result="cancelled",window="w"}`,
			`waits_total{class="batch",result="expired",window="w"}`,
			`cancelled_tokens_total{class="interactive",window="w"}`,
			`decisions_total{class="interactive",reason="quota_full",window="w"}`,
		} {
			if last[s] == 0 {
				series = append(series, s)
			}
		}
		return series
	}
	began := time.Now()
	for scrape := 0; scrape < 50 || len(missing()) > 0; scrape++ {
		require.Less(t, time.Since(began), 30*time.Second, missing())
		values, types := gather(t, registry)
		for series, before := range last {
			if strings.Contains(series, `window="w"`) && types[series] != dto.MetricType_GAUGE {
				require.GreaterOrEqual(t, values[series], before, series)
			}
		}
		agree(values, begun, append([]string{`waiters{class="%v",window="w"}`}, ended...))
		agree(values, ended, []string{`wait_seconds_count{class="%v",window="w"}`})
		agree(values, append(refused, begun...), []string{`fill_at_refusal_ratio_count{class="%v",window="w"}`})
		require.Zero(t, len(values)%len(oneWindow(values)), "whole windows")
		last = values
	}
}

// oneWindow returns what is told of the window w.
func oneWindow(values map[string]float64) map[string]float64 {
	one := map[string]float64{}
	for series, value := range values {
		if strings.Contains(series, `window="w"`) {
			one[series] = value
		}
	}
	return one
}

// The number of series does not grow with what is asked.
func TestSeriesAreBounded(t *testing.T) {
	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: 1000})
	require.NoError(t, err)
	shared := quotashare.Stats{Shared: &quotashare.SharedStats{}}
	c := newCollector(t, map[string]Window{"own": window, "shared": telling(&shared)})
	require.Equal(t, ownMetrics+sharedMetrics, testutil.CollectAndCount(c))
	require.Equal(t, ownSeries+sharedSeries, strings.Count("\n"+scrape(t, c), "\nquotashare_"))

	r := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		window.Acquire(ctx, quotashare.Class(r.UintN(256)), r.Int64N(2000)-500)
		grant, _ := window.TryAcquire(quotashare.Class(r.UintN(256)), r.Int64N(2000)-500)
		grant.Settle(r.Int64N(2000) - 500)
	}
	shared.Shared = &quotashare.SharedStats{Mode: "closed", Away: errors.New(strings.Repeat("x", 100)), Outages: 7}
	require.Equal(t, ownMetrics+sharedMetrics, testutil.CollectAndCount(c))
	require.Equal(t, ownSeries+sharedSeries, strings.Count("\n"+scrape(t, c), "\nquotashare_"))
}

// A scrape makes one snapshot of each window and the metrics of it in one piece, however many they are.
func TestCollectAllocatesLittle(t *testing.T) {
	c := &Collector{}
	const windows = 10
	for i := range windows {
		require.NoError(t, c.Add(fmt.Sprint(i), &quotashare.Window{}))
	}
	metrics := make(chan prometheus.Metric, windows*ownMetrics)
	allocations := testing.AllocsPerRun(10, func() {
		c.Collect(metrics)
		for range windows * ownMetrics {
			<-metrics
		}
	})
	require.LessOrEqual(t, allocations, 2.0*windows)
}

func TestLint(t *testing.T) {
	problems, err := testutil.CollectAndLint(newCollector(t, map[string]Window{
		"own":    &quotashare.Window{},
		"shared": telling(&quotashare.Stats{Shared: &quotashare.SharedStats{Mode: "open"}}),
	}))
	require.NoError(t, err)
	require.Empty(t, problems)
}

// Any text is a name, and is told as it is.
func TestNames(t *testing.T) {
	names := map[string]string{
		`gpt-5 tokens/min`: `gpt-5 tokens/min`,
		`a "quoted" one`:   `a \"quoted\" one`,
		"two\nlines":       `two\nlines`,
		`back\slash`:       `back\\slash`,
		"Größe 窓 🪟":        "Größe 窓 🪟",
		"{} \t\x00, =":     "{} \t\x00, =",
		" ":                " ",
	}
	c := &Collector{}
	for name := range names {
		require.NoError(t, c.Add(name, &quotashare.Window{}))
	}
	text := scrape(t, c)
	for _, written := range names {
		require.Contains(t, text, "\nquotashare_quota_tokens{window=\""+written+"\"} 0\n")
	}
	require.Equal(t, len(names), strings.Count(text, "\nquotashare_quota_tokens{"))
}

func TestAddAndRemove(t *testing.T) {
	var c Collector // the zero Collector is ready
	require.Zero(t, testutil.CollectAndCount(&c))
	registry := registered(t, &c)

	require.NoError(t, c.Add("b", telling(&quotashare.Stats{Quota: 2})))
	require.NoError(t, c.Add("a", telling(&quotashare.Stats{Quota: 1})))
	require.NoError(t, c.Add("c", telling(&quotashare.Stats{Quota: 3})))
	quotas := func() map[string]float64 {
		quotas, _ := gather(t, registry)
		for series := range quotas {
			if !strings.HasPrefix(series, "quota_tokens") {
				delete(quotas, series)
			}
		}
		return quotas
	}
	require.Equal(t, map[string]float64{
		`quota_tokens{window="a"}`: 1, `quota_tokens{window="b"}`: 2, `quota_tokens{window="c"}`: 3,
	}, quotas())

	require.False(t, c.Remove("d"))
	require.True(t, c.Remove("b"))
	require.False(t, c.Remove("b"))
	require.Equal(t, map[string]float64{`quota_tokens{window="a"}`: 1, `quota_tokens{window="c"}`: 3}, quotas())

	// The name is free again.
	require.NoError(t, c.Add("b", telling(&quotashare.Stats{Quota: 4})))
	require.Equal(t, 4.0, quotas()[`quota_tokens{window="b"}`])
}

// The map is the caller's.
func TestNewCollectorCopiesTheMap(t *testing.T) {
	windows := map[string]Window{"a": &quotashare.Window{}}
	c := newCollector(t, windows)
	windows["b"] = nil
	delete(windows, "a")
	require.Equal(t, ownMetrics, testutil.CollectAndCount(c))
	require.Zero(t, testutil.CollectAndCount(newCollector(t, nil)))
}

func TestErrorsSayWhatIsWrong(t *testing.T) {
	ok := &quotashare.Window{}
	for _, test := range []struct {
		name   string
		window Window
		want   string
	}{
		{"", ok, `promshare: the name of a window is empty: want the value of its label`},
		{"a\xff", ok, `promshare: window "a\xff": want a name in UTF-8`},
		{"nil", nil, `promshare: window "nil" is nil: want one that was made`},
		{"nil", (*quotashare.Window)(nil), `promshare: window "nil" is nil: want one that was made`},
		{"nil", fake(nil), `promshare: window "nil" is nil: want one that was made`},
		{"there", ok, `promshare: there is a window "there" already: want another name, or Remove it first`},
	} {
		c := newCollector(t, map[string]Window{"there": ok})
		require.EqualError(t, c.Add(test.name, test.window), test.want)
		require.Equal(t, ownMetrics, testutil.CollectAndCount(c), "as it was")
		if test.name != "there" {
			c, err := NewCollector(map[string]Window{test.name: test.window})
			require.EqualError(t, err, test.want)
			require.Nil(t, c)
		}
	}
	// Of several the first by name, whatever the order of the map.
	for range 20 {
		_, err := NewCollector(map[string]Window{"z": nil, "b": nil, "a": ok, "c": nil})
		require.EqualError(t, err, `promshare: window "b" is nil: want one that was made`)
	}
}

// One registry takes one Collector. Where there must be two, their registerers tell them apart.
func TestTwoCollectors(t *testing.T) {
	one := newCollector(t, map[string]Window{"a": &quotashare.Window{}})
	two := newCollector(t, map[string]Window{"b": &quotashare.Window{}})
	registry := registered(t, one)
	var already prometheus.AlreadyRegisteredError
	require.ErrorAs(t, registry.Register(two), &already)
	require.Same(t, one, already.ExistingCollector)

	registry = prometheus.NewPedanticRegistry()
	for part, c := range map[string]*Collector{"x": one, "y": two} {
		require.NoError(t, prometheus.WrapRegistererWith(prometheus.Labels{"part": part}, registry).Register(c))
	}
	for range 2 {
		values, _ := gather(t, registry)
		require.Contains(t, values, `waiters{class="batch",part="x",window="a"}`)
		require.Contains(t, values, `waiters{class="batch",part="y",window="b"}`)
	}
	require.True(t, prometheus.WrapRegistererWith(prometheus.Labels{"part": "x"}, registry).Unregister(one))
}
