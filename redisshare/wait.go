package redisshare

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/quotashare/quotashare"
)

// A waiter is a call that waits in Acquire. But for turn, the lock of its queue guards it.
type waiter struct {
	tokens  int64
	place   uint64 // in the order of arrival
	in      *list.List
	home    *list.List // where it goes back from aside
	element *list.Element
	told    time.Time     // when Redis was told of it last: it remembers a demand for one window
	turn    chan struct{} // holds one: ask now
}

// A queue holds the waiters of one class in this process. Those that are larger than the class's share stand apart: they
// can be served by a loan alone, and calls within the share pass them. The zero queue is empty.
type queue struct {
	mu     sync.Mutex
	within list.List // of *waiter: no larger than the share
	above  list.List
	aside  list.List // those of both that are too large for the local Window: they hold nobody up in an outage
	places uint64
	all    int64 // tokens that wait
	asked  int64 // of these, within: they are demand

	fresh []*waiter // those of which Redis was not told, and perhaps some more
	due   time.Time // no other is to be told of before
}

// ahead reports whether a call must wait for its turn, or else whether it may have a loan; and how many tokens wait
// with it then, in all and within the share.
func (q *queue) ahead(tokens, share int64) (queued, loan bool, all, within int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	queued = q.within.Len() > 0 || q.above.Len() > 0 && tokens > share
	return queued, q.above.Len() == 0, saturated(q.all + tokens), saturated(q.asked + tokens)
}

// arrive returns a place in the order of arrival.
func (q *queue) arrive() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.places++
	return q.places
}

// join puts a call in its place; told says that its tokens were told as demand.
func (q *queue) join(tokens, share int64, place uint64, told bool) *waiter {
	q.mu.Lock()
	defer q.mu.Unlock()
	one := &waiter{tokens: tokens, place: place, in: &q.above, turn: make(chan struct{}, 1)}
	q.all += tokens
	if tokens <= share {
		one.in = &q.within
		q.asked += tokens
		if told {
			one.told = time.Now()
		} else {
			q.fresh = append(q.fresh, one)
		}
	}
	one.insertLocked()
	return one
}

// insertLocked puts a waiter in its place: calls that asked first, side by side, may come out of order.
func (one *waiter) insertLocked() {
	before := one.in.Back()
	for before != nil && before.Value.(*waiter).place > one.place {
		before = before.Prev()
	}
	if before == nil {
		one.element = one.in.PushFront(one)
	} else {
		one.element = one.in.InsertAfter(one, before)
	}
}

// stepAside lets those behind a waiter pass it, until wake.
func (q *queue) stepAside(one *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if one.in == &q.aside {
		return
	}
	one.in.Remove(one.element)
	if one.in == &q.within {
		q.asked -= one.tokens
	}
	one.home, one.in = one.in, &q.aside
	one.element = q.aside.PushBack(one)
	q.wakeLocked()
}

// backLocked puts those aside back in their places.
func (q *queue) backLocked() {
	for one := front(&q.aside); one != nil; one = front(&q.aside) {
		q.aside.Remove(one.element)
		one.in = one.home
		if one.in == &q.within {
			q.asked += one.tokens
			q.fresh = append(q.fresh, one)
		}
		one.insertLocked()
	}
}

// leave takes a waiter out of the queue, and wakes those whose turn it is then.
func (q *queue) leave(one *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	one.in.Remove(one.element)
	q.all -= one.tokens
	if one.in == &q.within {
		q.asked -= one.tokens
	}
	one.in = nil
	if len(q.fresh) > 2*q.within.Len()+64 { // so many came and went while nobody asked
		q.fresh = slices.DeleteFunc(q.fresh, func(each *waiter) bool { return each.in == nil })
	}
	q.wakeLocked()
}

// requeue puts the waiters where they stand under another quota, and wakes those that may fit by it or never will.
func (q *queue) requeue(limits quotashare.Limits) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.backLocked()
	var all []*waiter
	for first, _ := q.nextLocked(); first != nil; first, _ = q.nextLocked() {
		all = append(all, first)
		first.in.Remove(first.element)
	}
	q.asked = 0
	for _, one := range all {
		one.in = &q.above
		if one.tokens <= limits.Share {
			one.in = &q.within
			q.asked += one.tokens
			q.fresh = append(q.fresh, one)
		}
		one.element = one.in.PushBack(one)
		if one.tokens > limits.Largest {
			one.wake()
		}
	}
	q.wakeLocked()
}

func (q *queue) wake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.backLocked()
	q.wakeLocked()
}

func (q *queue) wakeLocked() {
	first, passing := q.nextLocked()
	for _, one := range []*waiter{first, passing} {
		if one != nil {
			one.wake()
		}
	}
}

func (one *waiter) wake() {
	select {
	case one.turn <- struct{}{}:
	default:
	}
}

// nextLocked returns whose turn it is, and who may pass it within the share; nil for nobody.
func (q *queue) nextLocked() (first, passing *waiter) {
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

// turn reports whether a waiter may ask now, and whether for a loan; and who is to be told of as demand if it is refused,
// with their tokens: those that are within the share, and were not told of in the last window.
func (q *queue) turn(one *waiter, window time.Duration) (mine, loan bool, asked int64, some []*waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	first, passing := q.nextLocked()
	if one != first && one != passing && one.in != &q.aside {
		return false, false, 0, nil
	}
	now := time.Now()
	tell := func(each *waiter) {
		each.told = now
		asked += each.tokens
		some = append(some, each)
	}
	for _, each := range q.fresh {
		if each.in == &q.within && now.Sub(each.told) >= window {
			tell(each)
		}
	}
	q.fresh = q.fresh[:0]
	if !now.Before(q.due) {
		q.due = now.Add(window)
		for e := q.within.Front(); e != nil; e = e.Next() {
			if each := e.Value.(*waiter); now.Sub(each.told) >= window {
				tell(each)
			} else if again := each.told.Add(window); again.Before(q.due) {
				q.due = again
			}
		}
	}
	return true, one == first, exact(asked), some
}

// untold takes back that these were told of.
func (q *queue) untold(some []*waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, each := range some {
		each.told = time.Time{}
	}
	q.fresh = append(q.fresh, some...)
}

func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.within.Len() + q.above.Len() + q.aside.Len()
}

// exact returns what a script can hold of a sum, which may have overflowed.
func exact(tokens int64) int64 { return min(saturated(tokens), maxTokens) }

func saturated(tokens int64) int64 {
	if tokens < 0 {
		return math.MaxInt64
	}
	return tokens
}

// Acquire waits, as the class does, until the call is admitted: see quotashare.Window.Acquire. Waiters of one class in one
// process are served in order of arrival. The first of them asks Redis, when it was told that it may fit, a little later
// at random, so that the processes do not ask all at once; and as soon as a call of this process used less than it was
// estimated at. The others ask nothing.
//
// The error wraps a *quotashare.DeniedError with the last decision; errors.Is finds what ended the wait beside it: ctx's
// error, ErrClosed, or, if the mode is Closed (or Local, and the call too large for it), ErrAway or ErrLost. While Redis
// is away Background and Batch go on waiting, for as long as they always would.
func (w *Window) Acquire(ctx context.Context, class quotashare.Class, estTokens int64) (quotashare.Grant, error) {
	patience := time.Duration(0)
	if class < quotashare.NumClasses {
		patience = w.maxWait[class]
	}
	began, place := time.Now(), uint64(0)
	if patience != 0 {
		place = w.queues[class].arrive()
	}
	v, err := w.try(ctx, class, estTokens, patience == 0)
	if patience == 0 || v.decision.Admitted || v.decision.Permanent() || final(err) {
		w.stats.decided(class, estTokens, v, err, w.rules.Load())
	} else {
		w.stats.waits(class, estTokens, v, w.rules.Load())
		v, err = w.wait(ctx, class, estTokens, place, patience, v)
		w.stats.waited(class, estTokens, v, err, time.Since(began))
	}
	if v.decision.Admitted {
		return v.grant(), nil
	}
	w.patient(class, &v)
	return quotashare.Grant{}, w.denied(class, estTokens, v, err)
}

// final reports whether no wait can help after the error: of those of a decision, all but that Redis is away.
func final(err error) bool {
	return err != nil && !errors.Is(err, ErrAway) && !errors.Is(err, ErrLost)
}

// tells reports whether the decision is one with which Redis was told of demand.
func tells(d quotashare.Decision) bool {
	return !d.Admitted && d.Reason != quotashare.ReasonNone && d.Reason != quotashare.ReasonQueued
}

// wait waits for a call's turn, after a first decision.
func (w *Window) wait(ctx context.Context, class quotashare.Class, tokens int64, place uint64, patience time.Duration, v verdict) (verdict, error) {
	q := &w.queues[class]
	r := w.rules.Load()
	one := q.join(tokens, r.limits[class].Share, place, tells(v.decision))
	defer q.leave(one)
	if next := w.rules.Load(); next != r || tokens > r.limits[class].Largest { // SetQuota did not see it
		q.requeue(next.limits[class])
	}
	var over <-chan time.Time
	if patience > 0 {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		over = timer.C
	}
	again := time.NewTimer(w.later(v.decision))
	defer again.Stop()
	var last error // of the latest decision
	decided := time.Now()
	left := func() verdict { // that decision, with how long is to be waited from now on
		d := &v.decision
		if d.RetryAfter -= time.Since(decided); d.RetryAfter <= 0 { // or it was never told, as it was never its turn
			d.RetryAfter = quotashare.Backoff(class, w.Quota().Window)
		}
		return v
	}
	for {
		select {
		case <-one.turn:
		case <-again.C:
		case <-over:
			return left(), last
		case <-ctx.Done():
			return left(), ctx.Err()
		case <-w.closed:
			return left(), ErrClosed
		}
		r = w.rules.Load()
		if tokens > r.limits[class].Largest {
			return verdict{decision: quotashare.Decision{Reason: quotashare.ReasonTooLarge}}, nil
		}
		mine, loan, asked, some := q.turn(one, r.quota.Window)
		if !mine {
			continue
		}
		next, err := w.decide(ctx, r, class, tokens, loan, asked)
		if !tells(next.decision) {
			q.untold(some)
		}
		if final(err) {
			return left(), err
		}
		v, last, decided = next, err, time.Now()
		if v.decision.Admitted {
			return v, nil
		}
		if err != nil && w.mode.kind == local {
			q.stepAside(one)
		}
		again.Reset(w.later(v.decision))
	}
}

// later returns when to ask again after a refusal: not sooner than it may fit, and later by a random part of a tenth of
// that (ten 600ths of a window at most) and a 600th, so that those who were told the same do not all ask at once. A 600th
// of a window is the least, so that Redis has time for others.
func (w *Window) later(d quotashare.Decision) time.Duration {
	grain := max(w.Quota().Window/600, time.Microsecond)
	wait := max(d.RetryAfter, grain)
	return wait + rand.N(min(wait/10, 10*grain)+grain)
}

// denied returns the error for a refusal, and what caused it if it was not the decision.
func (w *Window) denied(class quotashare.Class, tokens int64, v verdict, cause error) error {
	if v.usage == (quotashare.Usage{}) { // a refusal without a decision of Redis
		v.usage = w.server.latest(w.Quota().Window)
	}
	denied := &quotashare.DeniedError{Class: class, Tokens: tokens, Decision: v.decision, Usage: v.usage, Quota: w.Quota()}
	if cause == nil {
		return denied
	}
	return fmt.Errorf("%w: %w", denied, cause)
}

// requeueAll is requeue of all classes.
func (w *Window) requeueAll(r *rules) {
	for class := range w.queues {
		w.queues[class].requeue(r.limits[class])
	}
}

// wakeAll lets those who are first ask again.
func (w *Window) wakeAll() {
	for class := range w.queues {
		w.queues[class].wake()
	}
}
