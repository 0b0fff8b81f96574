// Package promshare shows Prometheus what quotashare windows decide: who uses how much of which quota, who is refused
// and why, how long calls wait, and how full a window was when it refused.
//
// Make one [Collector] of all windows of the process, and register it. All that it tells comes from each window's
// Stats, which is asked once for each scrape: nothing is done between scrapes, and the calls that the windows decide
// pay nothing for it.
//
// # Metrics
//
// Tokens are tokens of the quota: a window that meters requests tells requests. Counters count since the window was
// made. Each metric has the label window, the name that the owner gave, and where it says so class (interactive,
// background, batch) and reason, result or mode. Nothing out of a request is a label: a window has 113 series, a shared
// one 125, whatever is asked of it, and all are there from the start.
//
//	quotashare_quota_tokens                      gauge      what the quota allows in one window
//	quotashare_others_tokens                     gauge      what others hold on the same account
//	quotashare_used_tokens                       gauge      {class} in the window
//	quotashare_share_tokens                      gauge      {class} what it may always claim
//	quotashare_held_tokens                       gauge      {class} kept for it, used ones included
//	quotashare_borrowed_tokens                   gauge      {class} used above the share
//	quotashare_waiters                           gauge      {class} calls that wait in Acquire
//	quotashare_decisions_total                   counter    {class,reason} calls admitted and refused
//	quotashare_waits_begun_total                 counter    {class,reason} calls that had to wait in Acquire
//	quotashare_waits_total                       counter    {class,result} waits that have ended
//	quotashare_wait_seconds                      histogram  {class} how long these were
//	quotashare_held_up_within_share_total        counter    {class} refusals and waits while the share had room
//	quotashare_fill_at_refusal_ratio             summary    {class} how full the window was at refusals and waits
//	quotashare_estimated_tokens_total            counter    {class} of the calls admitted
//	quotashare_settled_tokens_total              counter    {class} that calls really used
//	quotashare_cancelled_tokens_total            counter    {class} estimates of calls that were never sent
//
// A window that replicas share (package redisshare) has these too, each of one replica:
//
//	quotashare_shared_away                       gauge      {mode} 1 while the replica decides by its mode
//	quotashare_shared_outages_total              counter    how often that began
//	quotashare_shared_alone_decisions_total      counter    decisions by the mode
//	quotashare_shared_disagreements_total        counter    decisions that found another quota in force
//	quotashare_shared_pending_corrections        gauge      corrections that are to be sent
//	quotashare_shared_dropped_corrections_total  counter    corrections that were given up
//
// What such a window counts adds up over the replicas. Its used, held and others tokens do not, for each replica tells
// those of all, as it was told last; one that decides nothing for a window tells 0.
//
// # What is counted where
//
// A call that is decided at once is one decision. The reasons own_share and borrowed are admissions, all others are
// refusals. A call that has to wait in Acquire begins a wait, with the reason why it did not fit at once. It becomes a
// decision only if it is admitted; otherwise it ends in waits_total alone, as cancelled (by its context), expired (its
// class waits no longer) or refused (a new quota made it too large). So what a class asked for and did not get is its
// refused decisions and those three. A shadow window counts what it would have refused as refused.
//
// The reason none is there for a shared window alone. It counts calls for which there was no decision, as what the
// window is shared by was away. What the mode open admits then is counted as own_share.
//
// fill_at_refusal_ratio counts what waiting could help: refusals but for too_large and invalid, and waits that began;
// and none of those with reason none, of which nobody knows how full the window was. Its rate of the sum over its rate
// of the count is the average fill, 0.4 for 40 % of the quota.
package promshare

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/quotashare/quotashare"
)

// A Window is what a Collector watches: a *quotashare.Window, or one of package redisshare. Stats is called once for
// each scrape, possibly by many goroutines, and must be quick.
type Window interface {
	Stats() quotashare.Stats
}

var _ Window = (*quotashare.Window)(nil)

// A Collector tells Prometheus of windows, each under a name. It is a prometheus.Collector: register one for the
// process. A second one in the same registry is a prometheus.AlreadyRegisteredError, whatever its windows: Add them to
// the first. It is safe for concurrent use, while it is scraped too, and must not be copied. The zero Collector watches
// nothing yet.
type Collector struct {
	mu      sync.Mutex
	windows []*watched // sorted by name; replaced, never changed
}

var _ prometheus.Collector = (*Collector)(nil)

// NewCollector returns a Collector of the windows, by the names that they have in the label window. The map is copied;
// it may be empty. The error is that of Add for the first name that is wrong.
func NewCollector(windows map[string]Window) (*Collector, error) {
	c := &Collector{}
	for _, name := range slices.Sorted(maps.Keys(windows)) {
		if err := c.Add(name, windows[name]); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Add watches another window, from the next scrape on. Give names that are few and stay: those of models and accounts,
// nothing out of a request. Any text in UTF-8 is a name. It is an error if the name is empty, no UTF-8 or another
// window's, or if the window is nil; then nothing is changed.
func (c *Collector) Add(name string, window Window) error {
	switch {
	case name == "":
		return errors.New("promshare: the name of a window is empty: want the value of its label")
	case !utf8.ValidString(name):
		return fmt.Errorf("promshare: window %q: want a name in UTF-8", name)
	case isNil(window):
		return fmt.Errorf("promshare: window %q is nil: want one that was made", name)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	i, found := c.find(name)
	if found {
		return fmt.Errorf("promshare: there is a window %q already: want another name, or Remove it first", name)
	}
	w := &watched{name: name, label: pair("window", name), window: window}
	c.windows = slices.Insert(slices.Clone(c.windows), i, w)
	return nil
}

// Remove watches the window of the name no longer: from the next scrape on its series are gone. It reports whether
// there was one.
func (c *Collector) Remove(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, found := c.find(name)
	if found {
		c.windows = slices.Delete(slices.Clone(c.windows), i, i+1)
	}
	return found
}

func (c *Collector) find(name string) (int, bool) {
	return slices.BinarySearchFunc(c.windows, name, func(w *watched, name string) int {
		return strings.Compare(w.name, name)
	})
}

// isNil reports whether a window is nil, or a nil pointer or function, whose Stats would bring down the process at the
// first scrape.
func isNil(window Window) bool {
	switch v := reflect.ValueOf(window); v.Kind() {
	case reflect.Invalid:
		return true
	case reflect.Pointer, reflect.Func:
		return v.IsNil()
	}
	return false
}

// Describe sends the descriptions of all metrics, those of shared windows too. They are the same for every Collector.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, f := range families {
		to <- f[0].desc
	}
}

// Collect asks each window for its Stats once, and sends what it told. All series of one window are of one instant.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	c.mu.Lock()
	windows := c.windows
	c.mu.Unlock()
	for _, w := range windows {
		s, told := w.snapshot(), templates
		if s.Shared == nil {
			told = templates[:ownTemplates]
		}
		metrics := make([]metric, len(told))
		for i, t := range told {
			metrics[i] = metric{t, s}
			to <- &metrics[i]
		}
	}
}

// watched is a window with its label.
type watched struct {
	name   string
	label  *dto.LabelPair
	window Window

	mu   sync.Mutex
	last [quotashare.NumClasses]heldUp // as it was told
}

func pair(name, value string) *dto.LabelPair { return &dto.LabelPair{Name: &name, Value: &value} }

// A metric is one series in one scrape.
type metric struct {
	*template
	of *snapshot
}

// Desc implements prometheus.Metric.
func (m *metric) Desc() *prometheus.Desc { return m.desc }

// Write implements prometheus.Metric.
func (m *metric) Write(out *dto.Metric) error {
	out.Label = append(slices.Clip(m.labels), m.of.label)
	m.write(m.of, m.class, out)
	return nil
}

// A snapshot is what a window told in one scrape.
type snapshot struct {
	label *dto.LabelPair
	quotashare.Stats
	held [quotashare.NumClasses]heldUp
}

// heldUp is how many calls were held up while it was known how full the window was, and the sum of that.
type heldUp struct {
	calls uint64
	fill  float64
}

func (w *watched) snapshot() *snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &snapshot{label: w.label, Stats: w.window.Stats()}
	for class := range s.Classes {
		held := heldUp{calls: s.Classes[class].HeldUp()}
		held.fill = s.Classes[class].FillAtRefusal * float64(held.calls)
		// The sum is right but for rounding. Were it told to fall by that, Prometheus would take it for one that began
		// anew, and count all of it once more.
		if last := w.last[class]; held.calls >= last.calls {
			held.fill = max(held.fill, last.fill)
		}
		w.last[class], s.held[class] = held, held
	}
	return s
}

// A write fills in the value of a metric.
type write func(*snapshot, quotashare.Class, *dto.Metric)

// A template is what a series of all windows has in common.
type template struct {
	desc   *prometheus.Desc
	labels []*dto.LabelPair // but for window, which comes last in the order of the names
	class  quotashare.Class // if the metric has one
	shared bool             // for shared windows alone
	write  write
}

// A family is what has one name.
type family []template

// A line is the template for one value of a label; for each class, if the metric has classes.
type line struct {
	value  string
	shared bool
	write  write
}

// newFamily returns the family with the label window, and those of class and label if there are.
func newFamily(name, help string, classes int, label string, lines ...line) (f family) {
	var labels []string
	if classes > 0 {
		labels = append(labels, "class")
	}
	if label != "" {
		labels = append(labels, label)
	}
	desc := prometheus.NewDesc("quotashare_"+name, help, append(labels, "window"), nil)
	for class := range quotashare.Class(max(classes, 1)) {
		for _, l := range lines {
			t := template{desc: desc, class: class, shared: l.shared, write: l.write}
			if classes > 0 {
				t.labels = append(t.labels, pair("class", class.String()))
			}
			if l.value != "" {
				t.labels = append(t.labels, pair(label, l.value))
			}
			f = append(f, t)
		}
	}
	return f
}

func ofWindow(name, help string, write write) family {
	return newFamily(name, help, 0, "", line{write: write})
}

func ofClass(name, help string, write write) family {
	return newFamily(name, help, quotashare.NumClasses, "", line{write: write})
}

func ofShared(name, help string, write write) family {
	return newFamily(name, help, 0, "", line{shared: true, write: write})
}

// The templates, those for shared windows last.
var templates, ownTemplates = func() (all []*template, own int) {
	for _, shared := range []bool{false, true} {
		for _, f := range families {
			for i := range f {
				if f[i].shared == shared {
					all = append(all, &f[i])
				}
			}
		}
		if !shared {
			own = len(all)
		}
	}
	return all, own
}()

var families = []family{
	ofWindow("quota_tokens", "Tokens that the quota allows in one window.",
		gauge(func(s *quotashare.Stats) int64 { return s.Quota })),
	ofWindow("others_tokens", "Tokens in the window that others hold on the same account.",
		gauge(func(s *quotashare.Stats) int64 { return s.Others })),
	ofClass("used_tokens", "Tokens of the class in the window.",
		classGauge(func(c *quotashare.ClassStats) int64 { return c.Used })),
	ofClass("share_tokens", "Tokens that the class may always claim.",
		classGauge(func(c *quotashare.ClassStats) int64 { return c.Share })),
	ofClass("held_tokens", "Tokens kept for the class, used ones included.",
		classGauge(func(c *quotashare.ClassStats) int64 { return c.Held })),
	ofClass("borrowed_tokens", "Tokens of the class in the window above its share.",
		classGauge(func(c *quotashare.ClassStats) int64 { return max(c.Used-c.Share, 0) })),
	ofClass("waiters", "Calls that wait to be admitted.",
		classGauge(func(c *quotashare.ClassStats) int { return c.Waiting })),

	newFamily("decisions_total", "Calls decided: admitted as own_share or borrowed, otherwise refused.",
		quotashare.NumClasses, "reason",
		line{quotashare.ReasonOwnShare.String(), false,
			classCounter(func(c *quotashare.ClassStats) uint64 { return c.Admitted - c.Borrowed })},
		line{quotashare.ReasonBorrowed.String(), false,
			classCounter(func(c *quotashare.ClassStats) uint64 { return c.Borrowed })},
		refused(quotashare.ReasonQuotaFull),
		refused(quotashare.ReasonReserved),
		refused(quotashare.ReasonCapped),
		refused(quotashare.ReasonPaced),
		refused(quotashare.ReasonQueued),
		refused(quotashare.ReasonTooLarge),
		refused(quotashare.ReasonInvalid),
		refused(quotashare.ReasonNone)),
	newFamily("waits_begun_total", "Calls that had to wait, by the reason why they did not fit at once.",
		quotashare.NumClasses, "reason",
		began(quotashare.ReasonQuotaFull),
		began(quotashare.ReasonReserved),
		began(quotashare.ReasonCapped),
		began(quotashare.ReasonPaced),
		began(quotashare.ReasonQueued),
		began(quotashare.ReasonNone)),
	newFamily("waits_total", "Waits that have ended.", quotashare.NumClasses, "result",
		line{"admitted", false, classCounter(func(c *quotashare.ClassStats) uint64 { return c.WaitsAdmitted })},
		line{"cancelled", false, classCounter(func(c *quotashare.ClassStats) uint64 { return c.WaitsCancelled })},
		line{"expired", false, classCounter(func(c *quotashare.ClassStats) uint64 { return c.WaitsExpired })},
		line{"refused", false, classCounter(func(c *quotashare.ClassStats) uint64 { return c.WaitsRefused })}),
	ofClass("wait_seconds", "How long waits were that have ended.", waitSeconds),
	ofClass("held_up_within_share_total", "Calls refused or made to wait while their class's share had room for them.",
		classCounter(func(c *quotashare.ClassStats) uint64 { return c.HeldUpWithinShare })),
	ofClass("fill_at_refusal_ratio",
		"How full the window was when it refused a call that waiting could help or made one wait.", fillAtRefusal),
	ofClass("estimated_tokens_total", "Tokens at which the calls admitted were estimated.",
		classCounter(func(c *quotashare.ClassStats) int64 { return c.EstimatedTokens })),
	ofClass("settled_tokens_total", "Tokens that calls really used, as they were settled.",
		classCounter(func(c *quotashare.ClassStats) int64 { return c.SettledTokens })),
	ofClass("cancelled_tokens_total", "Tokens at which calls were estimated that were cancelled, never having been sent.",
		classCounter(func(c *quotashare.ClassStats) int64 { return c.CancelledTokens })),

	newFamily("shared_away", "1 while this replica decides by its mode and not with the others, 0 otherwise.", 0, "mode",
		line{"", true, away}),
	ofShared("shared_outages_total", "How often this replica began to decide by its mode.",
		counter(func(s *quotashare.Stats) uint64 { return s.Shared.Outages })),
	ofShared("shared_alone_decisions_total", "Decisions that this replica took by its mode.",
		counter(func(s *quotashare.Stats) uint64 { return s.Shared.Alone })),
	ofShared("shared_disagreements_total", "Decisions of this replica that found another quota in force.",
		counter(func(s *quotashare.Stats) uint64 { return s.Shared.Disagreements })),
	ofShared("shared_pending_corrections", "What this replica settled, cancelled or was told, and is still to send.",
		gauge(func(s *quotashare.Stats) int { return s.Shared.Pending })),
	ofShared("shared_dropped_corrections_total", "What this replica settled, cancelled or was told, and gave up sending.",
		counter(func(s *quotashare.Stats) uint64 { return s.Shared.Dropped })),
}

type number interface{ int | int64 | uint64 }

func gauge[N number](value func(*quotashare.Stats) N) write {
	return func(s *snapshot, _ quotashare.Class, out *dto.Metric) {
		out.Gauge = &dto.Gauge{Value: new(float64(value(&s.Stats)))}
	}
}

func classGauge[N number](value func(*quotashare.ClassStats) N) write {
	return func(s *snapshot, class quotashare.Class, out *dto.Metric) {
		out.Gauge = &dto.Gauge{Value: new(float64(value(&s.Classes[class])))}
	}
}

func counter[N number](value func(*quotashare.Stats) N) write {
	return func(s *snapshot, _ quotashare.Class, out *dto.Metric) {
		out.Counter = &dto.Counter{Value: new(float64(value(&s.Stats)))}
	}
}

func classCounter[N number](value func(*quotashare.ClassStats) N) write {
	return func(s *snapshot, class quotashare.Class, out *dto.Metric) {
		out.Counter = &dto.Counter{Value: new(float64(value(&s.Classes[class])))}
	}
}

func refused(reason quotashare.Reason) line {
	value := func(c *quotashare.ClassStats) uint64 { return c.Refused[reason] }
	return line{reason.String(), reason == quotashare.ReasonNone, classCounter(value)}
}

func began(reason quotashare.Reason) line {
	value := func(c *quotashare.ClassStats) uint64 { return c.Waits[reason] }
	return line{reason.String(), reason == quotashare.ReasonNone, classCounter(value)}
}

func waitSeconds(s *snapshot, class quotashare.Class, out *dto.Metric) {
	c := &s.Classes[class]
	h := &dto.Histogram{
		SampleCount: new(c.WaitsAdmitted + c.WaitsCancelled + c.WaitsExpired + c.WaitsRefused),
		SampleSum:   new(c.WaitTime.Seconds()),
	}
	upTo := uint64(0)
	for i, bound := range quotashare.WaitBounds {
		upTo += c.WaitTimes[i]
		h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: new(bound.Seconds()), CumulativeCount: new(upTo)})
	}
	out.Histogram = h
}

func fillAtRefusal(s *snapshot, class quotashare.Class, out *dto.Metric) {
	held := s.held[class]
	out.Summary = &dto.Summary{SampleCount: &held.calls, SampleSum: &held.fill}
}

// away has its mode as a label, which the snapshot tells.
func away(s *snapshot, _ quotashare.Class, out *dto.Metric) {
	value := 0.0
	if s.Shared.Away != nil {
		value = 1
	}
	out.Gauge = &dto.Gauge{Value: &value}
	out.Label = append([]*dto.LabelPair{pair("mode", s.Shared.Mode)}, out.Label...)
}
