package quotashare

import (
	"fmt"
	"sort"
	"time"

	"github.com/quotashare/quotashare/internal/sliding"
)

// Stats is a snapshot of a Window: the account now, and what was decided since the Window was made. Tokens are tokens
// of the quota.
type Stats struct {
	Used    int64 // tokens in the window now, of all classes and Others
	Others  int64 // of these, what others hold on the same account
	Quota   int64 // tokens that the quota allows in one window
	Classes [NumClasses]ClassStats

	Shared *SharedStats // nil for a Window, which is not shared
}

// ClassStats is the part of one class. Counts and sums are since the Window was made and never fall.
type ClassStats struct {
	Used  int64 // tokens in the window now
	Share int64 // tokens that the class may always claim
	Held  int64 // tokens kept for it now, used ones included: its recent demand and its floor, up to its share

	Admitted uint64             // calls, at once or after a wait
	Borrowed uint64             // of these, above the share
	Refused  [NumReasons]uint64 // calls by Reason; in a shadow Window, those that would have been refused
	Waits    [NumReasons]uint64 // calls that had to wait in Acquire, by the Reason why they did not fit at once

	// HeldUpWithinShare counts those of Refused and Waits that waiting could help and that the class's share had room
	// for, with nobody of the class ahead.
	HeldUpWithinShare uint64

	// FillAtRefusal is how full the window was, on average, when a call of the class was refused that waiting could
	// help, or had to wait: 0.4 is 40 % of the quota. It is 0 if there was none.
	FillAtRefusal float64

	EstimatedTokens int64 // of the calls admitted
	SettledTokens   int64 // what Settle was told, late or not; a use that is not known is left out
	CancelledTokens int64 // estimates of the calls cancelled

	Waiting        int           // calls that wait in Acquire now
	WaitsAdmitted  uint64        // waits that ended in an admission
	WaitsCancelled uint64        // waits that the context ended
	WaitsExpired   uint64        // waits that the longest wait of the class ended
	WaitsRefused   uint64        // waits that SetQuota ended, for the call became too large
	WaitTime       time.Duration // of all waits that have ended

	// WaitTimes counts these waits by their length: those up to WaitBounds[i], and longer than the bound before.
	WaitTimes [NumWaitBounds]uint64
}

// NumWaitBounds is the number of WaitBounds.
const NumWaitBounds = 5

// WaitBounds are the lengths by which ClassStats.WaitTimes counts waits. Treat them as constants.
var WaitBounds = [NumWaitBounds]time.Duration{
	100 * time.Millisecond, time.Second, 10 * time.Second, time.Minute, 5 * time.Minute,
}

// SharedStats is how a replica of a window that many share stands with what they share it by, since it was made.
type SharedStats struct {
	Mode    string // what decides while that does not: "closed", "open", "local(0.125)"
	Away    error  // why it does not decide now; nil if it does
	Outages uint64 // how often that began
	Alone   uint64 // decisions without it

	Disagreements uint64 // decisions before which another quota was in force: one for each change, ever more if replicas differ

	Pending int    // corrections that are to be sent: what was settled and cancelled, and what the provider told
	Dropped uint64 // corrections that were given up
}

// Stats returns a snapshot, all of one instant. For the zero Window it is zero.
func (w *Window) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rule.window == 0 {
		return Stats{}
	}
	w.advance()
	held := w.rule.held(&w.usage)
	s := Stats{Used: w.usage.total(), Others: w.usage.Others, Quota: w.rule.quota}
	for c := range s.Classes {
		n, q := w.stats[c], &w.queues[c]
		n.Used, n.Share, n.Held = w.usage.Used[c], w.rule.share[c], held[c]
		n.Waiting = q.within.Len() + q.above.Len()
		if heldUp := n.HeldUp(); heldUp > 0 {
			n.FillAtRefusal = n.fill / float64(heldUp)
		}
		s.Classes[c] = n.ClassStats
	}
	return s
}

// HeldUp returns how many calls were refused that waiting could help, or had to wait: those over which FillAtRefusal is
// the average. Calls that another limiter counts as ReasonNone, since it could not decide, are not among them: nobody
// knows how full the window was.
func (c *ClassStats) HeldUp() (calls uint64) {
	for reason := ReasonNone + 1; reason < NumReasons; reason++ {
		if !reason.permanent() {
			calls += c.Refused[reason] + c.Waits[reason]
		}
	}
	return calls
}

// Advice says in words what the numbers of a class mean, one sentence a class, and nothing for a class that does well.
// It counts times of asking: a call is held up if it was refused and waiting could help, or if it had to wait. The rule
// is:
//
//   - Fewer than 1 of 100 held up: nothing.
//   - Held up while the window was at most 40 % full on average: the class has the wrong share (or ceiling, or the others
//     have the wrong floors); the quota is not too small.
//   - Held up while it was at least 90 % full on average, and at least half of the time within its share: the quota is too
//     small for what is asked. That a class is held up above its share in a full window is how shares work, and is no
//     advice.
//
// The numbers are of all the Window's life: after a change of shares it takes as long again to tell.
func (s Stats) Advice() []string {
	var advice []string
	for class := range Class(NumClasses) {
		c := &s.Classes[class]
		heldUp := c.HeldUp()
		calls := c.Admitted - c.WaitsAdmitted + heldUp
		if heldUp == 0 || heldUp*100 < calls {
			continue
		}
		told := fmt.Sprintf("%v was refused or had to wait %d of %d times while the window was %.0f %% full on average",
			class, heldUp, calls, 100*c.FillAtRefusal)
		switch {
		case c.FillAtRefusal <= 0.4+tolerance:
			advice = append(advice, told+": its share is wrong, the quota is not too small; "+c.remedy())
		case c.FillAtRefusal >= 0.9-tolerance && 2*c.HeldUpWithinShare >= heldUp:
			advice = append(advice, told+": the quota is too small for what is asked; raise it, or move work elsewhere")
		}
	}
	return advice
}

// remedy says what to change for a class that is held up in a window that is far from full.
func (c *ClassStats) remedy() string {
	most, times := ReasonReserved, uint64(0)
	for _, reason := range []Reason{ReasonQuotaFull, ReasonReserved, ReasonCapped, ReasonPaced} {
		if n := c.Refused[reason] + c.Waits[reason]; n > times {
			most, times = reason, n
		}
	}
	switch most {
	case ReasonQuotaFull:
		return "its calls are large, so make them smaller or raise its share"
	case ReasonCapped:
		return "raise its ceiling"
	case ReasonPaced:
		return "raise its share, so that it need not borrow"
	}
	return "raise its share, or lower the floors of the others"
}

// counts is what a Window counts for a class: the counts and sums of ClassStats, and fill. Stats fills in the rest.
type counts struct {
	ClassStats
	fill float64 // sum, over calls held up, of how full the window was
}

func (n *counts) admit(tokens int64, reason Reason) {
	n.Admitted++
	if reason == ReasonBorrowed {
		n.Borrowed++
	}
	n.EstimatedTokens = sliding.Add(n.EstimatedTokens, tokens)
}

func (n *counts) settle(estimated, actual int64, cancelled bool) {
	if cancelled {
		n.CancelledTokens = sliding.Add(n.CancelledTokens, estimated)
	} else {
		n.SettledTokens = sliding.Add(n.SettledTokens, actual)
	}
}

// waited counts the nanoseconds of a wait that has ended.
func (n *counts) waited(ns int64) {
	n.WaitTime = time.Duration(sliding.Add(int64(n.WaitTime), ns))
	if i := sort.Search(NumWaitBounds, func(i int) bool { return ns <= int64(WaitBounds[i]) }); i < NumWaitBounds {
		n.WaitTimes[i]++
	}
}

// holdUp counts a refusal that waiting can help, or the beginning of a wait.
func (w *Window) holdUp(c Class, e int64, reason Reason) {
	n := &w.stats[c]
	if reason != ReasonQueued && w.withinShare(c, e) {
		n.HeldUpWithinShare++
	}
	n.fill += float64(w.usage.total()) / float64(w.rule.quota)
}

// total returns all tokens in the window.
func (u *Usage) total() int64 { return sliding.Add(u.Others, u.charged()) }

// charged returns the tokens of all classes in the window.
func (u *Usage) charged() (sum int64) {
	for _, used := range u.Used {
		sum = sliding.Add(sum, used)
	}
	return sum
}
