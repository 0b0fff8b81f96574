package sharetest

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/quotashare/quotashare"
)

// A Report is what came of the traffic in an interval of a replay. It is data: a test reads its fields, and
// encoding/json writes them.
type Report struct {
	Name   string
	Policy Policy
	Quota  quotashare.Quota // with its defaults written out

	Start    time.Time     // that of the trace
	From, To time.Duration // the interval, To not included

	Classes [quotashare.NumClasses]ClassReport // indexed by Class

	// HighestWindow is the most tokens that the account ever counted in one window, of all windows that end with an
	// admission in the interval, or with a call that used more than its estimate; HighestAt is when.
	HighestWindow int64
	HighestAt     time.Duration

	// Utilisation is the part of what the quota allowed in the interval that was used, 1 for all. It passes 1 by up to
	// what one window allows: all of that can be used in an instant, and so again a Window later.
	Utilisation float64

	TooMany int // how often the provider answered 429

	// Lent is how many tokens classes took above their shares, TakenBack how many of those left the window again, aged
	// or settled for less. The difference, from the beginning of the replay on, is what is on loan.
	Lent, TakenBack int64

	// Advice is Stats.Advice of the Window at the end of the replay. It is of the whole replay, and nil for a part of
	// it, or if no Window decided.
	Advice []string

	// Timeline is the course of the interval in short equal steps, 480 for the whole replay (fewer if that is a few
	// nanoseconds long).
	Timeline []Moment

	history *history
}

// A ClassReport is what came of the calls of one class. Each number counts what happened in the interval: a call may be
// offered in one and admitted in the next.
type ClassReport struct {
	Offered       int   // calls that were asked for, for the first time
	OfferedTokens int64 // their estimates

	Admitted       int   // calls that were admitted, by what decides and by the provider
	AdmittedTokens int64 // as they counted in the end: what they used, or their estimates where they did not end in time
	Borrowed       int   // of the admitted calls, those above the share

	// Share is AdmittedTokens as a part of what the quota allowed in the interval, 1 for all.
	Share float64

	Refused [quotashare.NumReasons]int // answers, by Reason; one call may get many
	TooMany int                        // answers of 429 by the provider
	HeldUp  int                        // calls that were refused at least once and could wait, by what decides or by the provider
	GaveUp  int                        // calls whose patience ended
	Dropped int                        // calls that were refused for good
	Pending int                        // calls that had come, and were neither admitted nor over at the end of the interval

	// Waits are the times from the first asking to the admission, of all that were admitted, the shortest first.
	Waits []time.Duration

	// ShareDelay is how long after its demand rose the class had its share: the longest time for which a call of it was
	// waiting that its share had room for. ShareDelayAt is when that began, which may be before the interval.
	ShareDelay, ShareDelayAt time.Duration
}

// Wait returns the wait that a fraction of the admitted calls did not exceed: 0.5 is the median, 0.99 the wait of the
// 99th of a hundred, 1 the longest. It is one of Waits (the nearest rank), and 0 if there are none.
func (c ClassReport) Wait(fraction float64) time.Duration {
	n := len(c.Waits)
	if n == 0 {
		return 0
	}
	rank := int(math.Ceil(fraction * float64(n)))
	return c.Waits[min(max(rank, 1), n)-1]
}

// Refusals returns how many answers of "come back later" and "never" there were, those of the provider left out.
func (c ClassReport) Refusals() int {
	sum := 0
	for _, n := range c.Refused {
		sum += n
	}
	return sum
}

// lost returns how many calls gave up or were refused for good.
func (c ClassReport) lost() int { return c.GaveUp + c.Dropped }

// A Moment is a short part of a replay.
type Moment struct {
	At time.Duration // when it begins

	// Used is what the window held of each class when it was fullest, Kept what was then kept free for each: what it
	// lately asked for, and its floor, up to its share, less what it had. Kept is zero where no Window decides.
	Used, Kept quotashare.ClassTokens

	Refused [quotashare.NumClasses]int // answers in the part
	GaveUp  [quotashare.NumClasses]int // calls
	TooMany [quotashare.NumClasses]int // answers of 429 by the provider
}

// Between returns the report of an interval of the replay, to not included. What lies outside of the replay is left out
// of the interval.
func (r Report) Between(from, to time.Duration) Report {
	if r.history == nil {
		return r // the zero Report
	}
	return r.history.Between(from, to)
}

// A history is all that happened in a replay.
type history struct {
	report  Report // what all intervals have in common
	length  time.Duration
	entries []entry // in the order of time
	periods []period
	advice  []string

	step    time.Duration
	moments []Moment
	highest int64 // of the last moment
}

// An entry is one thing that happened.
type entry struct {
	at     time.Duration
	tokens int64         // of offered: the estimate; of admitted: what counts in the end; of lent: less than 0 for taken back
	wait   time.Duration // of admitted
	held   int64         // of what makes it grow: the tokens in the window
	class  quotashare.Class
	what   happened
	reason quotashare.Reason
	first  bool // of a refusal: the call's first
}

type happened uint8

const (
	arrived happened = iota
	offered
	admitted
	refused
	tooMany
	gaveUp
	dropped
	grew // a call used more than its estimate
	lent
)

// A period is a time for which a class was short of its share.
type period struct {
	class    quotashare.Class
	from, to time.Duration
}

// moments is how many moments a replay has.
const moments = 480

func newHistory(trace Trace, quota quotashare.Quota, options *Options) history {
	name := options.Name
	if name == "" {
		name = options.Policy.String()
	}
	return history{
		report: Report{Name: name, Policy: options.Policy, Quota: quota, Start: trace.Start},
		length: trace.Length,
		step:   (trace.Length + moments - 1) / moments,

		// Each call is offered, admitted and leaves the window; some are refused.
		entries: make([]entry, 0, 4*len(trace.Arrivals)),
	}
}

// note appends an entry and returns its number.
func (h *history) note(e entry) int {
	h.entries = append(h.entries, e)
	m := &h.moments[len(h.moments)-1]
	switch e.what {
	case refused, dropped:
		m.Refused[e.class]++
	case tooMany:
		m.TooMany[e.class]++
	case gaveUp:
		m.GaveUp[e.class]++
	}
	return len(h.entries) - 1
}

// settle puts what a call used in the place of its estimate.
func (h *history) settle(number int, tokens int64) { h.entries[number].tokens = tokens }

func (h *history) loan(at time.Duration, class quotashare.Class, tokens int64) {
	h.note(entry{at: at, class: class, what: lent, tokens: tokens})
}

func (h *history) short(class quotashare.Class, from, to time.Duration) {
	h.periods = append(h.periods, period{class, from, to})
}

// nextTick returns when the next moment begins.
func (h *history) nextTick() time.Duration { return time.Duration(len(h.moments)) * h.step }

func (h *history) tick() {
	h.moments = append(h.moments, Moment{At: h.nextTick()})
	h.highest = -1
}

// higher reports whether the window is fuller than it was in this moment so far.
func (h *history) higher(total int64) bool { return total > h.highest }

func (h *history) picture(used, kept quotashare.ClassTokens) {
	m := &h.moments[len(h.moments)-1]
	m.Used, m.Kept = used, kept
	h.highest = sum(used)
}

// Between is Report.Between.
func (h *history) Between(from, to time.Duration) Report {
	r := h.report
	r.history = h
	r.From = min(max(from, 0), h.length)
	r.To = max(min(to, h.length), r.From)
	if r.From == 0 && r.To == h.length {
		r.Advice = h.advice
	}
	for i := range h.entries {
		e := &h.entries[i]
		if e.at >= r.To {
			break
		}
		r.Classes[e.class].Pending += e.what.pending()
		if e.at >= r.From {
			r.add(e)
		}
	}
	for _, p := range h.periods {
		c := &r.Classes[p.class]
		if delay := min(p.to, r.To) - p.from; p.from < r.To && p.to > r.From && delay > c.ShareDelay {
			c.ShareDelay, c.ShareDelayAt = delay, p.from
		}
	}
	for _, m := range h.moments {
		if m.At >= r.From && m.At < r.To {
			r.Timeline = append(r.Timeline, m)
		}
	}
	allowed := float64(h.report.Quota.Tokens) * float64(r.To-r.From) / float64(h.report.Quota.Window)
	for c := range r.Classes {
		class := &r.Classes[c]
		slices.Sort(class.Waits)
		if allowed > 0 {
			class.Share = float64(class.AdmittedTokens) / allowed
			r.Utilisation += class.Share
		}
	}
	return r
}

func (r *Report) add(e *entry) {
	class := &r.Classes[e.class]
	if e.held > r.HighestWindow {
		r.HighestWindow, r.HighestAt = e.held, e.at
	}
	if e.first {
		class.HeldUp++
	}
	switch e.what {
	case offered:
		class.Offered++
		class.OfferedTokens += e.tokens
	case admitted:
		class.Admitted++
		class.AdmittedTokens += e.tokens
		class.Waits = append(class.Waits, e.wait)
		if e.reason == quotashare.ReasonBorrowed {
			class.Borrowed++
		}
	case refused:
		class.Refused[e.reason]++
	case tooMany:
		class.TooMany++
		r.TooMany++
	case gaveUp:
		class.GaveUp++
	case dropped:
		class.Refused[e.reason]++
		class.Dropped++
	case lent:
		r.Lent += max(e.tokens, 0)
		r.TakenBack += max(-e.tokens, 0)
	}
}

// pending returns by how many calls more are pending.
func (h happened) pending() int {
	switch h {
	case arrived:
		return 1
	case admitted, gaveUp, dropped:
		return -1
	}
	return 0
}

// String returns the report as a table for people, with a line for each class and one for the account, and the advice
// below it.
func (r Report) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s, %s to %s\n", r.Name, r.clock(r.From), r.clock(r.To))
	// The width is above that of any cell, so that the columns of all reports stand below each other.
	table := tabwriter.NewWriter(&text, 9, 0, 1, ' ', tabwriter.AlignRight)
	// The table is right-aligned but for the names, which are padded here.
	const row = "%-11s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n"
	fmt.Fprintf(table, row, "", "tokens", "of quota", "calls", "held up", "gave up", "median", "99th", "longest", "share after")
	for class, c := range r.Classes {
		median, most, longest := "-", "-", "-"
		if len(c.Waits) > 0 {
			median, most, longest = seconds(c.Wait(0.5)), seconds(c.Wait(0.99)), seconds(c.Wait(1))
		}
		fmt.Fprintf(table, row, quotashare.Class(class), millions(c.AdmittedTokens), percent(c.Share), count(c.Offered),
			count(c.HeldUp), count(c.lost()), median, most, longest, seconds(c.ShareDelay))
	}
	table.Flush() // it writes to a Builder, which does not fail
	fmt.Fprintf(&text, " %-11s %s of the quota used; highest window %s of %s tokens; 429s: %s\n",
		"account", percent(r.Utilisation), count(r.HighestWindow), count(r.Quota.Tokens), count(r.TooMany))
	for _, advice := range r.Advice {
		fmt.Fprintf(&text, " advice      %s\n", advice)
	}
	return text.String()
}

// clock tells an instant: the time of day, if the trace has one, or minutes and seconds since its start.
func (r Report) clock(at time.Duration) string {
	switch {
	case !r.Start.IsZero() && r.To > 24*time.Hour:
		return r.Start.Add(at).Format("Jan 2 15:04:05")
	case !r.Start.IsZero():
		return r.Start.Add(at).Format("15:04:05")
	}
	at = at.Round(time.Second)
	return fmt.Sprintf("%d:%02d", at/time.Minute, at%time.Minute/time.Second)
}

// seconds tells a duration in the precision that a person cares for.
func seconds(d time.Duration) string {
	switch {
	case d == 0:
		return "0 s"
	case d <= 999*time.Millisecond:
		return fmt.Sprintf("%.0f ms", math.Ceil(float64(d)/float64(time.Millisecond)))
	case d < 9950*time.Millisecond:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.1f min", d.Minutes())
	}
	if d == math.MaxInt64 {
		return "for ever"
	}
	return fmt.Sprintf("%.1f h", d.Hours())
}

func percent(part float64) string { return fmt.Sprintf("%.1f %%", 100*part) }

// millions tells tokens in millions, and below one in full.
func millions(tokens int64) string {
	if tokens < 1e6 {
		return count(tokens)
	}
	return fmt.Sprintf("%.1f M", float64(tokens)/1e6)
}

// sum adds up what there is of each class.
func sum[T int | int64](n [quotashare.NumClasses]T) (total T) {
	for _, n := range n {
		total += n
	}
	return total
}

// count writes a number with a comma between groups of three digits.
func count[T ~int | ~int64](n T) string {
	digits := fmt.Sprint(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
