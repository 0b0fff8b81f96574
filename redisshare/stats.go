package redisshare

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	"github.com/quotashare/quotashare"
)

// Stats returns a snapshot of what this replica decided and settled since it was made, and in Shared how it stands with
// Redis. Used, Others and Held are of all replicas, as Redis told this one last; a window later that is over, and they
// are as if nothing was used. Refused[ReasonNone] counts the calls for which there was no decision, for Redis was away.
// It asks nobody, and costs no round trip.
func (w *Window) Stats() quotashare.Stats {
	r := w.rules.Load()
	usage := w.server.latest(r.quota.Window)
	s, shared := w.stats.snapshot()
	shared.Mode = w.mode.String()
	shared.Outages, shared.Away = w.breaker.state()
	shared.Pending, shared.Dropped = w.mailbox.state()
	s.Shared = &shared
	s.Used, s.Others, s.Quota = total(&usage), usage.Others, r.quota.Tokens
	for c := range s.Classes {
		n, l := &s.Classes[c], r.limits[c]
		n.Used, n.Share = usage.Used[c], l.Share
		n.Held = l.Floor + min(usage.Demand[c], l.Share-l.Floor)
		n.Waiting = w.queues[c].len()
	}
	return s
}

// total returns all tokens in the window.
func total(u *quotashare.Usage) int64 {
	sum := u.Others
	for _, used := range u.Used {
		sum = plus(sum, used)
	}
	return sum
}

// plus returns a+b, at most math.MaxInt64.
func plus(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// counters is what a Window counts.
type counters struct {
	mu     sync.Mutex
	s      quotashare.Stats // but for what Stats fills in
	shared quotashare.SharedStats
	fill   [quotashare.NumClasses]float64 // sum, over calls held up, of how full the window was
}

func (c *counters) snapshot() (quotashare.Stats, quotashare.SharedStats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.s
	for class, fill := range c.fill {
		if heldUp := s.Classes[class].HeldUp(); heldUp > 0 {
			s.Classes[class].FillAtRefusal = fill / float64(heldUp)
		}
	}
	return s, c.shared
}

// decided counts a decision, or that there was none for Redis was away; but no call whose context ended, or after Close.
func (c *counters) decided(class quotashare.Class, tokens int64, v verdict, err error, r *rules) {
	if class >= quotashare.NumClasses || final(err) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if v.decision.Admitted {
		c.admitLocked(class, tokens, v.decision.Reason)
		return
	}
	c.s.Classes[class].Refused[v.decision.Reason]++
	c.holdUpLocked(class, tokens, v, r)
}

// waits counts the beginning of a wait.
func (c *counters) waits(class quotashare.Class, tokens int64, v verdict, r *rules) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.Classes[class].Waits[v.decision.Reason]++
	c.holdUpLocked(class, tokens, v, r)
}

func (c *counters) admitLocked(class quotashare.Class, tokens int64, reason quotashare.Reason) {
	n := &c.s.Classes[class]
	n.Admitted++
	if reason == quotashare.ReasonBorrowed {
		n.Borrowed++
	}
	n.EstimatedTokens = plus(n.EstimatedTokens, tokens)
}

func (c *counters) holdUpLocked(class quotashare.Class, tokens int64, v verdict, r *rules) {
	if v.decision.Permanent() || v.decision.Reason == quotashare.ReasonNone { // nobody knows how full it was
		return
	}
	quota, share := r.quota.Tokens, r.limits[class].Share
	if v.local != nil {
		q := v.local.Quota()
		quota, share = q.Tokens, q.Limits(class).Share
	}
	c.fill[class] += float64(total(&v.usage)) / float64(quota)
	if v.decision.Reason != quotashare.ReasonQueued && tokens <= share-v.usage.Used[class] {
		c.s.Classes[class].HeldUpWithinShare++
	}
}

// waited counts the end of a wait.
func (c *counters) waited(class quotashare.Class, tokens int64, v verdict, err error, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &c.s.Classes[class]
	n.WaitTime = time.Duration(plus(int64(n.WaitTime), int64(wait)))
	for i, bound := range quotashare.WaitBounds {
		if wait <= bound {
			n.WaitTimes[i]++
			break
		}
	}
	switch {
	case v.decision.Admitted:
		n.WaitsAdmitted++
		c.admitLocked(class, tokens, v.decision.Reason)
	case v.decision.Permanent():
		n.WaitsRefused++
	case errors.Is(err, ErrAway) || errors.Is(err, ErrLost):
		n.WaitsExpired++
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrClosed):
		n.WaitsCancelled++
	default:
		n.WaitsExpired++
	}
}

func (c *counters) settled(class quotashare.Class, actual int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &c.s.Classes[class]
	n.SettledTokens = plus(n.SettledTokens, actual)
}

func (c *counters) cancelled(class quotashare.Class, estimated int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &c.s.Classes[class]
	n.CancelledTokens = plus(n.CancelledTokens, estimated)
}

func (c *counters) disagree() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shared.Disagreements++
}

// alone counts a decision of the mode.
func (c *counters) alone() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shared.Alone++
}
