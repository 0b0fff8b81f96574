package sharetest

import (
	"fmt"
	"math"
	"time"

	"github.com/quotashare/quotashare"
)

// A Measure is a value that can be read off a report: a count, a number of tokens, a fraction, or a duration. Wishes
// are made of it.
type Measure[V int | int64 | float64 | time.Duration] struct {
	name string
	of   func(*Report) V
	tell func(V) string
	when func(*Report) string // when it got so high; nil: that cannot be told
	why  func(*Report) string // why it is so low; nil: that cannot be told
	unit V                    // what counts as far off where the limit is 0; see Wish.miss
}

// Of returns the value in a report.
func (m Measure[V]) Of(r Report) V { return m.of(&r) }

// AtMost wishes that the value is no more than the limit.
func (m Measure[V]) AtMost(limit V) Wish {
	return m.wish("at most", limit, m.when, func(value V) bool { return value <= limit })
}

// AtLeast wishes that the value is no less than the limit.
func (m Measure[V]) AtLeast(limit V) Wish {
	return m.wish("at least", limit, m.why, func(value V) bool { return value >= limit })
}

func (m Measure[V]) wish(most string, limit V, more func(*Report) string, fulfilled func(V) bool) Wish {
	return Wish{
		text: m.name + " " + most + " " + m.tell(limit),
		miss: func(r *Report) (float64, string) {
			value := m.of(r)
			found, wanted := m.tell(value), m.tell(limit)
			if found == wanted { // they differ by less than people care for
				found, wanted = fmt.Sprint(value), fmt.Sprint(limit)
			}
			found = m.name + ": " + found + ", want " + most + " " + wanted
			if fulfilled(value) {
				return 0, found
			}
			if more != nil {
				found += "; " + more(r)
			}
			miss := math.Abs(float64(value)-float64(limit)) / max(math.Abs(float64(limit)), float64(m.unit))
			if !(miss > 0 && miss < math.MaxFloat64) {
				miss = math.MaxFloat64 // the limit is no number, and nothing fulfils it
			}
			return miss, found
		},
	}
}

// A Wish is what a report must show, such as that interactive's 99th wait is at most a second. A [Measure] makes it. It
// serves for any number of reports. The zero Wish is always fulfilled.
type Wish struct {
	text   string
	during *interval // nil: the whole report

	// miss says how far off a report is, as a part of the limit so that wishes of all kinds compare, and what was
	// found. 0 is fulfilled.
	miss func(*Report) (float64, string)
}

type interval struct{ from, to time.Duration }

// During returns the wish for an interval of the replay, to not included. It is not fulfilled where nothing of the
// interval is in the report's replay.
func (w Wish) During(from, to time.Duration) Wish {
	w.during = &interval{from, to}
	return w
}

// String says what is wished.
func (w Wish) String() string {
	if w.during == nil {
		return w.text
	}
	return fmt.Sprintf("%s from %v to %v", w.text, w.during.from, w.during.to)
}

// Test returns nil if the report fulfils the wish, and otherwise an error that says what was measured, what was wished,
// and when it happened.
func (w Wish) Test(r Report) error {
	if miss, found := w.test(&r); miss > 0 {
		return fmt.Errorf("sharetest: %s", found)
	}
	return nil
}

func (w Wish) test(r *Report) (float64, string) {
	if w.miss == nil {
		return 0, ""
	}
	if w.during != nil {
		part := r.Between(w.during.from, w.during.to)
		if part.From >= part.To {
			return math.MaxFloat64, fmt.Sprintf("%s: %v: nothing of that is in the replay", r.Name, w)
		}
		r = &part
	}
	miss, found := w.miss(r)
	return miss, fmt.Sprintf("%s, %s to %s: %s", r.Name, r.clock(r.From), r.clock(r.To), found)
}

// TestingT is what Check needs of a *testing.T.
type TestingT interface {
	Helper()
	Errorf(format string, args ...any)
}

// Check marks a test as failed for each wish that the report does not fulfil, says what was measured, what was wished,
// and when it happened, and shows the table of the report once. It reports whether all are fulfilled.
func Check(t TestingT, r Report, wishes ...Wish) bool {
	t.Helper()
	fulfilled := true
	for _, w := range wishes {
		if err := w.Test(r); err != nil {
			t.Errorf("%v", err)
			fulfilled = false
		}
	}
	if !fulfilled {
		t.Errorf("%v", r)
	}
	return fulfilled
}

// Offered is how many calls of a class were asked for. A test that wishes for some cannot pass because there was no
// traffic.
func Offered(class quotashare.Class) Measure[int] {
	return Measure[int]{
		name: class.String() + " calls offered",
		of:   func(r *Report) int { return r.class(class).Offered },
		tell: count[int], unit: 1,
	}
}

// Admitted is how many calls of a class were admitted.
func Admitted(class quotashare.Class) Measure[int] {
	return Measure[int]{
		name: class.String() + " calls admitted",
		of:   func(r *Report) int { return r.class(class).Admitted },
		tell: count[int], unit: 1,
	}
}

// Pending is how many calls of a class were left at the end: 0 is a suite that is done.
func Pending(class quotashare.Class) Measure[int] {
	return Measure[int]{
		name: class.String() + " calls pending",
		of:   func(r *Report) int { return r.class(class).Pending },
		tell: count[int], unit: 1,
	}
}

// GaveUp is how many callers of a class gave up or were refused for good.
func GaveUp(class quotashare.Class) Measure[int] {
	return Measure[int]{
		name: class.String() + " calls given up",
		of:   func(r *Report) int { return r.class(class).lost() },
		tell: count[int], unit: 1,
		when: func(r *Report) string { return r.worst(func(m *Moment) int { return of(&m.GaveUp, class) }) },
	}
}

// HeldUp is the part of the calls of a class that were refused at least once, by what decides or by the provider: 0.01
// is one in a hundred.
func HeldUp(class quotashare.Class) Measure[float64] {
	return Measure[float64]{
		name: class.String() + " calls held up",
		of: func(r *Report) float64 {
			c := r.class(class)
			return float64(c.HeldUp+c.Dropped) / float64(max(c.Offered, 1))
		},
		tell: percent, unit: 0.01,
		when: func(r *Report) string {
			return r.worst(func(m *Moment) int { return of(&m.Refused, class) + of(&m.TooMany, class) })
		},
	}
}

// Wait is the wait that a fraction of the admitted calls of a class did not exceed: 0.5 is the median, 0.99 the wait
// of the 99th of a hundred, 1 the longest. Those who gave up have no wait: wish for GaveUp too. If calls were asked
// for and in all the replay none was admitted, it is for ever.
func Wait(class quotashare.Class, fraction float64) Measure[time.Duration] {
	return Measure[time.Duration]{
		name: fmt.Sprintf("%v wait at %v", class, fraction),
		of: func(r *Report) time.Duration {
			c := r.class(class)
			if c.Offered > 0 && c.Admitted == 0 {
				if whole := r.Between(0, math.MaxInt64); whole.class(class).Admitted == 0 {
					return math.MaxInt64
				}
			}
			return c.Wait(fraction)
		},
		tell: seconds, unit: time.Second,
		when: func(r *Report) string { return r.longestWait(class) },
	}
}

// Share is the part of what the quota allowed that a class was given, in tokens: 0.3 is 30 %.
func Share(class quotashare.Class) Measure[float64] {
	return Measure[float64]{
		name: class.String() + " share",
		of:   func(r *Report) float64 { return r.class(class).Share },
		tell: percent, unit: 0.01,
		why: func(r *Report) string {
			return count(r.class(class).OfferedTokens) + " tokens were asked for, and " +
				count(r.class(class).AdmittedTokens) + " admitted"
		},
	}
}

// ShareDelay is ClassReport.ShareDelay: how long after its demand rose a class had its share.
func ShareDelay(class quotashare.Class) Measure[time.Duration] {
	return Measure[time.Duration]{
		name: class.String() + " share delay",
		of:   func(r *Report) time.Duration { return r.class(class).ShareDelay },
		tell: seconds, unit: time.Second,
		when: func(r *Report) string { return "its demand rose at " + r.clock(r.class(class).ShareDelayAt) },
	}
}

// Utilisation is the part of what the quota allowed that was used.
func Utilisation() Measure[float64] {
	return Measure[float64]{
		name: "utilisation",
		of:   func(r *Report) float64 { return r.Utilisation },
		tell: percent, unit: 0.01,
	}
}

// TooMany is how often the provider answered 429.
func TooMany() Measure[int] {
	return Measure[int]{
		name: "answers of 429",
		of:   func(r *Report) int { return r.TooMany },
		tell: count[int], unit: 1,
		when: func(r *Report) string { return r.worst(func(m *Moment) int { return sum(m.TooMany) }) },
	}
}

// HighestWindow is the most tokens that the account counted in one window.
func HighestWindow() Measure[int64] {
	return Measure[int64]{
		name: "tokens in the highest window",
		of:   func(r *Report) int64 { return r.HighestWindow },
		tell: count[int64], unit: 1,
		when: func(r *Report) string { return "at " + r.clock(r.HighestAt) },
	}
}

// class returns what came of a class, nothing for one that does not exist.
func (r *Report) class(class quotashare.Class) *ClassReport {
	if class >= quotashare.NumClasses {
		return &ClassReport{}
	}
	return &r.Classes[class]
}

// of returns the number of a class, 0 for one that does not exist.
func of(n *[quotashare.NumClasses]int, class quotashare.Class) int {
	if class >= quotashare.NumClasses {
		return 0
	}
	return n[class]
}

// worst says when something happened first, and when most often.
func (r *Report) worst(of func(*Moment) int) string {
	first, most := -1, 0
	for i := range r.Timeline {
		n := of(&r.Timeline[i])
		if n > 0 && first < 0 {
			first = i
		}
		if n > of(&r.Timeline[most]) {
			most = i
		}
	}
	if first < 0 {
		return "when cannot be told"
	}
	return fmt.Sprintf("first about %s, and most about %s (%s)",
		r.clock(r.Timeline[first].At), r.clock(r.Timeline[most].At), count(of(&r.Timeline[most])))
}

// longestWait says when the call that waited longest had asked.
func (r *Report) longestWait(class quotashare.Class) string {
	var longest entry
	if r.history != nil {
		for _, e := range r.history.entries {
			if e.what == admitted && e.class == class && e.at >= r.From && e.at < r.To && e.wait > longest.wait {
				longest = e
			}
		}
	}
	return fmt.Sprintf("the longest, %s, of a call that first asked at %s", seconds(longest.wait), r.clock(longest.at-longest.wait))
}
