package quotashare

import (
	"container/list"
	"context"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
	"strings"
	"time"

	"github.com/quotashare/quotashare/internal/sliding"
)

// Backoff returns how long a refused caller of the class waits when nothing better is known: Window/120 for
// Interactive, Window/30 for Background and Window/12 for Batch, rounded down but at least 1 ns and at most window.
// A window of 0 is one minute, as in Quota; a negative one gives 0. An unknown class waits as Batch does.
//
// Admit, which knows no ages of charges, gives it as RetryAfter. A Window knows when the call will fit and says that;
// there Backoff is the least that Background and Batch are told to wait, so that work that nobody waits for does not
// come back for every few tokens that drain.
func Backoff(class Class, window time.Duration) time.Duration {
	switch {
	case window == 0:
		window = defaultWindow
	case window < 0:
		return 0
	}
	part := window / 12
	switch class {
	case Interactive:
		part = window / 120
	case Background:
		part = window / 30
	}
	return max(part, 1)
}

// A DeniedError says that a call was not admitted: who asked for what, the decision, and who held what of which quota
// at that instant. Acquire's error is always a *DeniedError. It implements slog.LogValuer.
type DeniedError struct {
	Class    Class
	Tokens   int64 // the estimate
	Decision Decision
	Usage    Usage
	Quota    Quota // with its defaults written out

	cause error
}

// Error says who was refused what and why, when to come back (rounded up to a millisecond), and who holds what; for a
// call that is never admitted, what would be.
func (e *DeniedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "quotashare: %v call of %d tokens not admitted", e.Class, e.Tokens)
	switch d := e.Decision; {
	case d.Reason == ReasonInvalid:
		b.WriteString(": invalid: want at least 1 token, a known class and a Window that NewWindow made")
	case d.Reason == ReasonTooLarge && e.Quota.Limits(e.Class).Largest == 0:
		b.WriteString(": too_large: the quota leaves nothing for the class")
	case d.Reason == ReasonTooLarge:
		fmt.Fprintf(&b, ": too_large: the largest %v call possible is %d tokens", e.Class, e.Quota.Limits(e.Class).Largest)
	case d.Reason != ReasonNone:
		wait := d.RetryAfter.Truncate(time.Millisecond)
		if wait < d.RetryAfter {
			wait += time.Millisecond
		}
		fmt.Fprintf(&b, ": %v, retry after %v (of %d tokens:", d.Reason, wait, e.Quota.Tokens)
		for c, used := range e.Usage.Used {
			fmt.Fprintf(&b, " %v holds %d,", Class(c), used)
		}
		fmt.Fprintf(&b, " others %d)", e.Usage.Others)
	}
	if e.cause != nil {
		fmt.Fprintf(&b, ": %v", e.cause)
	}
	return b.String()
}

// Unwrap returns what ended the wait: the context's error, or nil if it was the decision.
func (e *DeniedError) Unwrap() error { return e.cause }

// LogValue returns a group: the class, the tokens and the reason, when to come back if that can help, and the cause if
// there is one.
func (e *DeniedError) LogValue() slog.Value {
	attrs := []slog.Attr{
		slog.String("class", e.Class.String()),
		slog.Int64("tokens", e.Tokens),
		slog.String("reason", e.Decision.Reason.String()),
	}
	if e.Decision.RetryAfter > 0 {
		attrs = append(attrs, slog.Duration("retry_after", e.Decision.RetryAfter))
	}
	if e.cause != nil {
		attrs = append(attrs, slog.String("cause", e.cause.Error()))
	}
	return slog.GroupValue(attrs...)
}

// WithMaxWait sets how long Acquire waits, by the real clock, for calls of the class to fit: 0 not at all, negative
// without limit. Without it Interactive is refused at once, Background waits for two Windows and Batch without limit.
func WithMaxWait(class Class, d time.Duration) Option {
	return Option{func(w *Window) error {
		if class >= NumClasses {
			return fmt.Errorf("quotashare: WithMaxWait of %v: want Interactive, Background or Batch", class)
		}
		w.maxWait[class] = d
		return nil
	}}
}

// WithShadow makes a Window that decides and counts as always but admits everything, so that shares can be tried
// before they are trusted. A call that would be refused is reported, counts as refused in Stats and as demand, charges
// nothing, never waits, and gets the zero Grant; its Decision is Admitted, with the Reason of the refusal. A call that
// would have to wait in Acquire is one of these: how its wait would end nobody knows.
//
// Report is called by the goroutine that asked, without the Window's lock, and so possibly by many at once. A nil
// report counts only.
func WithShadow(report func(*DeniedError)) Option {
	return Option{func(w *Window) error {
		w.shadow = report
		if report == nil {
			w.shadow = func(*DeniedError) {}
		}
		return nil
	}}
}

// Acquire is TryAcquire with the class's own patience. A call that does not fit waits until it does: Interactive not
// at all, Background for up to two Windows, Batch until ctx is done. WithMaxWait changes that.
//
// Waiters of one class are served in the order of their arrival; classes do not block each other, and room is offered
// to Interactive first, then Background, then Batch. A waiter that is larger than its class's share can be served by a
// loan alone; it holds up those who need a loan too, and a call within the share passes it. A waiter charges nothing.
// It counts as demand of its class while it waits, unless it is larger than the share. It waits on a channel and a
// timer of its own: nothing polls, and no goroutine is started.
//
// The error is a *DeniedError. It comes at once for a call that will never fit (Permanent), also if SetQuota makes it
// so during the wait; when the class's longest wait is over; and when ctx is done, and then errors.Is(err, ctx.Err()).
// Its Decision says when the call would fit if it came back, which is behind all who wait then. A ctx that is done
// before the call takes nothing, is counted nowhere, and leaves the Decision zero; one that is done as room comes may
// win or lose. A ctx whose deadline is sooner than the call can fit waits all the same, for room may come from calls
// that are settled or cancelled. The zero Window refuses as TryAcquire does.
func (w *Window) Acquire(ctx context.Context, class Class, estTokens int64) (Grant, error) {
	w.mu.Lock()
	if err := ctx.Err(); err != nil {
		if w.rule.window > 0 {
			w.advance()
		}
		denied := w.denied(class, estTokens, Decision{})
		w.mu.Unlock()
		denied.cause = err
		return Grant{}, denied
	}
	reason := w.decide(class, estTokens)
	if reason.admits() {
		at := w.charge(class, estTokens, reason)
		w.mu.Unlock()
		return Grant{window: w, class: class, at: at, tokens: estTokens}, nil
	}
	if reason.permanent() || w.shadow != nil || w.maxWait[class] == 0 {
		denied := w.denied(class, estTokens, w.refuse(class, estTokens, reason))
		w.mu.Unlock()
		if w.shadow == nil {
			return Grant{}, denied
		}
		w.shadow(denied)
		return Grant{}, nil
	}
	one := w.enqueue(class, estTokens, reason)
	w.mu.Unlock()
	if err := w.wait(ctx, one); err != nil {
		return Grant{}, err
	}
	return Grant{window: w, class: class, at: one.at, tokens: estTokens}, nil
}

// denied returns the error for a refusal.
func (w *Window) denied(c Class, e int64, d Decision) *DeniedError {
	return &DeniedError{Class: c, Tokens: e, Decision: d, Usage: w.usageNow(), Quota: w.quota}
}

// A waiter is a call that waits in Acquire. Its fields are guarded by the Window's lock until done is closed.
type waiter struct {
	class    Class
	tokens   int64
	place    uint64     // in the order of arrival
	in       *list.List // where element is
	element  *list.Element
	since    int64
	deadline time.Time   // by the real clock; zero if there is none
	timer    *time.Timer // at the deadline, or sooner if the call may fit sooner

	done   chan struct{} // closed when reason is known
	reason Reason
	at     int64 // when it was known
}

// A queue holds the waiters of one class. Those that are larger than its share stand apart, for the others may pass
// them. It must not be copied.
type queue struct {
	within list.List // of *waiter: no larger than the share
	above  list.List
	asked  tokenSum // within: demand of the class
	all    tokenSum
	places uint64
}

// next returns whose turn it is, and who may pass it if it fits within the share; nil for nobody.
func (q *queue) next() (first, passing *waiter) {
	within, above := front(&q.within), front(&q.above)
	if above == nil || within != nil && within.place < above.place {
		return within, nil
	}
	return above, within
}

func front(l *list.List) *waiter {
	if l.Len() == 0 {
		return nil
	}
	return l.Front().Value.(*waiter)
}

// push puts a waiter behind all in the queue.
func (q *queue) push(one *waiter, share int64) {
	one.in = &q.above
	if one.tokens <= share {
		one.in = &q.within
		q.asked.add(one.tokens)
	}
	q.all.add(one.tokens)
	one.element = one.in.PushBack(one)
}

// remove takes a waiter out of the queue, wherever it stands.
func (q *queue) remove(one *waiter) {
	if one.in == &q.within {
		q.asked.sub(one.tokens)
	}
	q.all.sub(one.tokens)
	one.in.Remove(one.element)
}

// A tokenSum adds up any number of waiters exactly, for what is added is taken off again.
type tokenSum struct{ hi, lo uint64 }

func (s *tokenSum) add(tokens int64) {
	var carry uint64
	s.lo, carry = bits.Add64(s.lo, uint64(tokens), 0)
	s.hi += carry
}

func (s *tokenSum) sub(tokens int64) {
	var borrow uint64
	s.lo, borrow = bits.Sub64(s.lo, uint64(tokens), 0)
	s.hi -= borrow
}

// tokens returns the sum, or math.MaxInt64 if it is larger.
func (s *tokenSum) tokens() int64 {
	if s.hi > 0 || s.lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(s.lo)
}

// behind returns what the reason for a decision becomes if the call comes behind those of its class that wait.
func (w *Window) behind(c Class, e int64, reason Reason) Reason {
	q := &w.queues[c]
	if q.within.Len() > 0 || q.above.Len() > 0 && !w.withinShare(c, e) {
		return ReasonQueued
	}
	return reason
}

// fitsBehind returns the first instant after now at which a call that is refused as ReasonQueued would fit: together
// with all of its class that wait, or within the share, together with those that are no larger than the share.
func (w *Window) fitsBehind(c Class, e int64) int64 {
	q := &w.queues[c]
	at := w.fitsTogether(c, sliding.Add(q.all.tokens(), e))
	if tokens := sliding.Add(q.asked.tokens(), e); tokens <= w.rule.share[c] {
		at = min(at, w.fitsAt(c, tokens, false))
	}
	return at
}

// fitsTogether returns when so many tokens would fit as one call. What is more than the largest call possible takes a
// window for each of these.
func (w *Window) fitsTogether(c Class, tokens int64) int64 {
	largest := w.rule.largest(c)
	windows := (tokens - 1) / largest
	tokens -= windows * largest
	at := w.now
	if windows == 0 || !w.willFit(c, tokens, w.now, true) {
		at = w.fitsAt(c, tokens, true)
	}
	if windows > (math.MaxInt64-at)/int64(w.rule.window) {
		return math.MaxInt64
	}
	return at + windows*int64(w.rule.window)
}

// enqueue makes a waiter of a call that does not fit for the reason.
func (w *Window) enqueue(c Class, e int64, reason Reason) *waiter {
	q := &w.queues[c]
	w.hint.at = 0
	w.stats[c].Waits[reason]++
	w.holdUp(c, e, reason)
	one := &waiter{
		class: c, tokens: e, place: q.places, since: w.now,
		done: make(chan struct{}), timer: time.NewTimer(math.MaxInt64),
	}
	if w.maxWait[c] > 0 {
		one.deadline = time.Now().Add(w.maxWait[c])
	}
	q.places++
	q.push(one, w.rule.share[c])
	w.waiting++
	w.noteDemand(c)
	w.schedule(one)
	return one
}

// schedule sets the timer of a waiter: to when it may fit if its turn has come, and to its deadline.
func (w *Window) schedule(one *waiter) {
	wait := time.Duration(math.MaxInt64)
	if !one.deadline.IsZero() {
		wait = time.Until(one.deadline)
	}
	if first, passing := w.queues[one.class].next(); one == first || one == passing {
		due := w.fitsAt(one.class, one.tokens, one == first)
		w.due = min(w.due, due)
		wait = min(wait, time.Duration(due-w.now))
	}
	one.timer.Reset(wait)
}

// serve admits the waiters that fit now, class by class in their order, and sets the timers of those whose turn comes.
func (w *Window) serve() {
	w.due = math.MaxInt64
	for c := range Class(NumClasses) {
		q := &w.queues[c]
		first, passing := q.next()
		for ; first != nil; first, passing = q.next() {
			if reason := w.fits(c, first.tokens); reason.admits() {
				w.finish(first, reason)
			} else if passing != nil && w.fits(c, passing.tokens) == ReasonOwnShare {
				w.finish(passing, ReasonOwnShare)
			} else {
				break
			}
		}
		for _, one := range []*waiter{first, passing} {
			if one != nil {
				w.schedule(one)
			}
		}
	}
}

// finish ends a wait by an admission, which it charges, or by a refusal for good.
func (w *Window) finish(one *waiter, reason Reason) {
	c := one.class
	w.queues[c].remove(one)
	w.waiting--
	if reason.admits() {
		w.charge(c, one.tokens, reason)
		w.stats[c].WaitsAdmitted++
	} else {
		w.stats[c].WaitsRefused++
	}
	w.stats[c].waited(w.now - one.since)
	one.reason, one.at = reason, w.now
	close(one.done)
}

// requeue puts the waiters in their places under a new quota.
func (w *Window) requeue() {
	if w.waiting == 0 {
		return
	}
	for c := range Class(NumClasses) {
		q := &w.queues[c]
		var all []*waiter
		for first, _ := q.next(); first != nil; first, _ = q.next() {
			all = append(all, first)
			q.remove(first)
		}
		for _, one := range all {
			q.push(one, w.rule.share[c])
			if one.tokens > w.rule.largest(c) {
				w.finish(one, ReasonTooLarge)
			}
		}
		w.noteDemand(c)
	}
	w.serve()
}

// wait waits for a waiter's turn. It returns nil if the call was admitted.
func (w *Window) wait(ctx context.Context, one *waiter) error {
	defer one.timer.Stop()
	for {
		select {
		case <-one.done:
			if one.reason.admits() {
				return nil
			}
		case <-one.timer.C:
		case <-ctx.Done():
		}
		w.mu.Lock()
		cause := ctx.Err()
		if one.reason == ReasonNone && cause == nil {
			w.advance() // it may be this one's turn
		}
		switch {
		case one.reason.admits():
			w.mu.Unlock()
			return nil
		case one.reason.permanent():
			denied := w.denied(one.class, one.tokens, Decision{Reason: one.reason})
			w.mu.Unlock()
			return denied
		case cause != nil || !one.deadline.IsZero() && !time.Now().Before(one.deadline):
			denied := w.leave(one, cause)
			w.mu.Unlock()
			return denied
		}
		// The timer was early, or the room was taken by others.
		w.schedule(one)
		w.mu.Unlock()
	}
}

// leave ends a wait without a decision.
func (w *Window) leave(one *waiter, cause error) *DeniedError {
	c := one.class
	w.age() // but serve nobody who is about to leave
	first, passing := w.queues[c].next()
	w.queues[c].remove(one)
	w.waiting--
	if one == first || one == passing {
		w.serve()
	}
	if cause != nil {
		w.stats[c].WaitsCancelled++
	} else {
		w.stats[c].WaitsExpired++
	}
	w.stats[c].waited(w.now - one.since)
	d := Decision{Reason: w.behind(c, one.tokens, w.fits(c, one.tokens))}
	if d.Reason.admits() { // room came as the context ended
		d = Decision{Reason: ReasonQueued, RetryAfter: Backoff(c, w.rule.window)}
	} else {
		d.RetryAfter = w.retryAfter(c, one.tokens, d.Reason)
	}
	denied := w.denied(c, one.tokens, d)
	denied.cause = cause
	return denied
}
