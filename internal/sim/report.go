package sim

import (
	"math"
	"slices"
	"time"

	"github.com/quotashare/quotashare"
)

// A Report says what came of the traffic in an interval of a run.
type Report struct {
	From, To time.Duration // the interval, To not included

	Classes [quotashare.NumClasses]ClassReport // indexed by Class

	// TooMany is how often the provider answered 429.
	TooMany int

	// HighestWindow is the most tokens that the provider ever counted in one window, of all windows that end with an
	// admission in the interval, or with a call that used more than its estimate.
	HighestWindow int64

	// Utilisation is the part of what the quota allowed in the interval that was used, 1 for all. It passes 1 by up to
	// what one window allows: all of that can be used in an instant, and so again a window later.
	Utilisation float64
}

// A ClassReport is what came of the calls of one class. Each number counts what happened in the interval: a call may be
// offered in one and admitted in the next.
type ClassReport struct {
	Offered       int   // calls that were asked for the first time
	OfferedTokens int64 // their estimates

	Admitted       int   // calls that were admitted, by the Window if one decides and by the provider
	AdmittedTokens int64 // as they counted in the end: what they used, or their estimates where they did not end in time

	// Share is AdmittedTokens as a part of what the quota allowed in the interval, 1 for all.
	Share float64

	Refused int // answers to come back later; one call may get many
	GaveUp  int // calls whose patience ended
	Dropped int // calls that were refused for good
	Pending int // calls that were asked for and still neither admitted nor over at the end of the interval

	// Waits are the times from the first asking to the admission, of all that were admitted, the shortest first.
	Waits []time.Duration
}

// Wait returns the wait that a fraction of the admitted calls did not exceed: 0.5 is the median, 0.99 the wait of the
// 99th of a hundred, 1 the longest. It is one of Waits (the nearest rank), and 0 if there are none.
func (r ClassReport) Wait(fraction float64) time.Duration {
	n := len(r.Waits)
	if n == 0 {
		return 0
	}
	rank := int(math.Ceil(fraction * float64(n)))
	return r.Waits[min(max(rank, 1), n)-1]
}

// A History is all that happened in a run.
type History struct {
	quota   quotashare.Quota
	length  time.Duration
	entries []entry // in the order of time
}

// Length returns how long the run took, in virtual time.
func (h *History) Length() time.Duration { return h.length }

// Report reports on an interval of the run, to not included. What lies outside of the run is left out of the interval.
func (h *History) Report(from, to time.Duration) Report {
	r := Report{From: max(from, 0), To: min(to, h.length)}
	for i := range h.entries {
		e := &h.entries[i]
		if e.at >= r.To {
			break
		}
		class := &r.Classes[e.class]
		class.Pending += e.what.pending()
		if e.at >= r.From {
			r.add(e)
		}
	}
	if r.To <= r.From {
		return r
	}
	allowed := float64(h.quota.Tokens) * float64(r.To-r.From) / float64(h.quota.Window)
	for c := range r.Classes {
		class := &r.Classes[c]
		class.Share = float64(class.AdmittedTokens) / allowed
		r.Utilisation += class.Share
		slices.Sort(class.Waits)
	}
	return r
}

func (r *Report) add(e *entry) {
	class := &r.Classes[e.class]
	r.HighestWindow = max(r.HighestWindow, e.held)
	switch e.what {
	case offered:
		class.Offered++
		class.OfferedTokens += e.tokens
	case admitted:
		class.Admitted++
		class.AdmittedTokens += e.tokens
		class.Waits = append(class.Waits, e.wait)
	case refused:
		class.Refused++
	case gaveUp:
		class.GaveUp++
	case dropped:
		class.Dropped++
	case tooMany:
		r.TooMany++
	}
}

// An entry is one thing that happened.
type entry struct {
	at     time.Duration
	class  quotashare.Class
	what   what
	tokens int64         // of offered: the estimate; of admitted: what counts in the end
	wait   time.Duration // of admitted
	held   int64         // of what makes it grow: the tokens in the provider's window
}

type what uint8

const (
	offered what = iota
	admitted
	refused
	gaveUp
	dropped
	tooMany
	grew // a call used more than its estimate
)

// pending returns by how many calls more are pending.
func (w what) pending() int {
	switch w {
	case offered:
		return 1
	case admitted, gaveUp, dropped:
		return -1
	}
	return 0
}

// note appends an entry and returns its number.
func (h *History) note(e entry) int {
	h.entries = append(h.entries, e)
	return len(h.entries) - 1
}

// settle puts what a call used in the place of its estimate.
func (h *History) settle(number int, tokens int64) { h.entries[number].tokens = tokens }
