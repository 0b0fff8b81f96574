// Package redisshare shares one quotashare.Window among the replicas of a service, through Redis: the same rule, the
// same hints, one account. A decision is one round trip to Redis, where one script takes it, on Redis' clock.
//
// What a replica does while Redis is away is the owner's choice, a [Mode], which New requires.
package redisshare

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/quotashare/quotashare"
)

// A Window is one replica's end of a window that all Windows of the same name in the same Redis share. It is made by
// New, is safe for concurrent use, and must not be copied. It satisfies quotashare.Limiter.
//
// A charge is kept in Redis for one Quota.Window from the instant at which it was made, by the clock of Redis, and is
// nobody's: when a replica dies, what it had charged leaves as if it lived. There is no lease to renew.
//
// It has goroutines only while there is something to do beside the calls: one that sends what was settled, and one that
// looks whether Redis is back. Close ends them.
type Window struct {
	mode    Mode
	timeout time.Duration
	maxWait [quotashare.NumClasses]time.Duration // negative: no limit

	server  *server
	breaker breaker
	mailbox mailbox
	setting sync.Mutex // so that rules and local change together
	rules   atomic.Pointer[rules]
	local   atomic.Pointer[quotashare.Window]   // of Local; a new one for each outage, but while it holds something
	alone   [quotashare.NumClasses]atomic.Int64 // tokens that it admitted, and that are to be charged in Redis

	queues [quotashare.NumClasses]queue
	stats  counters

	life    sync.Mutex // guards closing against goroutines that begin
	closing bool
	closed  chan struct{} // closed by Close
	group   sync.WaitGroup
	ctx     context.Context // of what goes on beside the calls
	stop    context.CancelFunc
}

// An Option changes how New makes a Window; if it cannot, New returns its error. The zero Option changes nothing.
type Option struct{ apply func(*Window) error }

// WithMaxWait sets how long Acquire waits for calls of the class to fit: 0 not at all, negative without limit. Without it
// Interactive is refused at once, Background waits for two Windows and Batch without limit.
func WithMaxWait(class quotashare.Class, d time.Duration) Option {
	return Option{func(w *Window) error {
		if class >= quotashare.NumClasses {
			return fmt.Errorf("redisshare: WithMaxWait of %v: want Interactive, Background or Batch", class)
		}
		w.maxWait[class] = d
		return nil
	}}
}

// WithTimeout sets how long one decision waits for Redis, 1 ms to 5 s, before the mode decides. Without it that is
// 100 ms. It should be shorter than the deadlines of the callers: a call that its own context ends tells nothing of
// Redis, and begins no outage.
func WithTimeout(d time.Duration) Option {
	return Option{func(w *Window) error {
		if d < time.Millisecond || d > maxTimeout {
			return fmt.Errorf("redisshare: WithTimeout of %v: want 1ms to %v", d, maxTimeout)
		}
		w.timeout = d
		return nil
	}}
}

// WithDropped makes the Window report each Correction that it gives up, and why: Redis was away for five seconds (fifteen
// where it takes a request and does not answer, longer with a long WithTimeout), 65,536 were pending, or the Window was
// closed. What a call was estimated at then stays charged for its window. Report is called by a goroutine of the
// Window, or by the one that settles; it must be quick, and must not call Close.
func WithDropped(report func(Correction, error)) Option {
	return Option{func(w *Window) error {
		w.mailbox.dropped = report
		return nil
	}}
}

// New returns one replica's Window of the name. All replicas give the same name and quota: what is charged is shared by
// name, and each decision is by the quota of the replica that asks. SharedStats.Disagreements counts where they differ.
//
// The client is a redis.Client (a single node, or behind Sentinel), a redis.ClusterClient, a redis.Ring, or what wraps
// one; New sends nothing yet, and never closes it. It must have ContextTimeoutEnabled in its options, for otherwise it
// does not give up when it is told: New looks where it can, which it cannot in what wraps one.
//
// What a name needs in Redis is one hash, whose key begins with "quotashare:" and has the name as its hash tag for a
// Cluster. It takes less than 100 KiB at any rate of calls, and 200 bytes for each of those that were under way at once
// lately: a Window has 128 at most. It is gone ten seconds and 13 twelfths of a window after the last call. Scripts must
// be allowed. It is tested with Redis 7. A window of another length under the same name is, to this replica, as if Redis
// were away.
//
// The error is that of Quota.Validate or of an option, or says what is wrong with the name or the mode, or with the
// quota for Redis: a window that is no whole number of microseconds, or above a year; tokens and overdraft above 2^53.
func New(client redis.Scripter, name string, quota quotashare.Quota, mode Mode, options ...Option) (*Window, error) {
	switch {
	case client == nil || reflect.ValueOf(client).Kind() == reflect.Pointer && reflect.ValueOf(client).IsNil():
		return nil, errors.New("redisshare: client is nil: want a client of Redis")
	case name == "" || len(name) > 200 || strings.ContainsAny(name, "{}"):
		return nil, fmt.Errorf("redisshare: name is %q: want 1 to 200 bytes without braces, which a Cluster reads as a hash tag", name)
	}
	if !keepsDeadlines(client) {
		return nil, errors.New("redisshare: client waits for longer than it is told: want ContextTimeoutEnabled in its options")
	}
	w := &Window{mode: mode, timeout: 100 * time.Millisecond, closed: make(chan struct{})}
	if err := mode.validate(); err != nil {
		return nil, err
	}
	if err := w.setRules(quota); err != nil {
		return nil, err
	}
	w.maxWait = [quotashare.NumClasses]time.Duration{
		quotashare.Background: 2 * w.Quota().Window,
		quotashare.Batch:      -1,
	}
	for _, option := range options {
		if option.apply == nil {
			continue
		}
		if err := option.apply(w); err != nil {
			return nil, err
		}
	}
	w.ctx, w.stop = context.WithCancel(context.Background())
	w.server = newServer(client, name)
	if mode.kind == open {
		w.server.open = 1
	}
	w.mailbox.start = w.begin
	w.mailbox.deliver, w.mailbox.sent = w.correct, w.corrected
	return w, nil
}

// keepsDeadlines reports whether the client gives up a request when its context does, as far as we know its kind:
// without that an outage costs each call the client's own timeouts, which are seconds, and several of them.
func keepsDeadlines(client redis.Scripter) bool {
	switch c := client.(type) {
	case interface{ Options() *redis.Options }:
		return c.Options().ContextTimeoutEnabled
	case interface{ Options() *redis.ClusterOptions }:
		return c.Options().ContextTimeoutEnabled
	case interface{ Options() *redis.RingOptions }:
		return c.Options().ContextTimeoutEnabled
	}
	return true
}

var _ quotashare.Limiter = (*Window)(nil)

// Quota returns the quota of this replica, with its defaults written out.
func (w *Window) Quota() quotashare.Quota { return w.rules.Load().quota }

// SetQuota puts another quota in force for this replica, at once; the others need to be told, too. What was charged stays
// charged. On an error, which is one of New's or says that the length of the window differs, the quota stays as it was.
func (w *Window) SetQuota(quota quotashare.Quota) error {
	w.setting.Lock()
	defer w.setting.Unlock()
	if err := w.setRules(quota); err != nil {
		return err
	}
	w.requeueAll(w.rules.Load())
	return nil
}

func (w *Window) setRules(quota quotashare.Quota) error {
	r, err := newRules(quota)
	if err != nil {
		return err
	}
	if old := w.rules.Load(); old != nil && old.quota.Window != r.quota.Window {
		return fmt.Errorf("redisshare: window is %v: want %v, the length that this Window was made with (or make a new Window, of another name)", r.quota.Window, old.quota.Window)
	}
	if w.mode.kind == local {
		part, err := w.mode.localQuota(r.quota)
		if err != nil {
			return err
		}
		if now := w.local.Load(); now != nil {
			err = now.SetQuota(part)
		} else {
			err = w.newLocal(part, 0)
		}
		if err != nil {
			return err
		}
	}
	w.rules.Store(r)
	return nil
}

// newLocal makes the local Window anew, with so much of its quota taken by others.
func (w *Window) newLocal(quota quotashare.Quota, taken int64) error {
	fresh, err := quotashare.NewWindow(quota)
	if err != nil {
		return err
	}
	if taken > 0 {
		fresh.Observe(max(quota.Tokens-taken, 0), 0)
	}
	w.local.Store(fresh)
	return nil
}

// TryAcquire decides as quotashare.Window.TryAcquire does, for all replicas at once, in one round trip: two for a call
// that needs a loan behind larger waiters, and none for one that is invalid or too large. RetryAfter is exact to the
// microsecond when nobody else asks.
//
// While calls of the class wait in Acquire of this process, they come first, and the refusal is ReasonQueued. Other
// processes' waiters are not known: they come back like anybody else.
//
// An error says that there is no decision, and nothing is charged: ctx ended, the Window is closed (ErrClosed), or the
// mode is Closed and Redis is away (ErrAway) or has lost its data (ErrLost); or it is Local, and the local Window can
// never admit so large a call. It wraps a *quotashare.DeniedError beside. For ErrAway and ErrLost the Decision tells when
// to come back, with ReasonNone. A Decision of mode Open has ReasonNone, too.
func (w *Window) TryAcquire(ctx context.Context, class quotashare.Class, estTokens int64) (quotashare.Grant, quotashare.Decision, error) {
	v, err := w.try(ctx, class, estTokens, true)
	w.stats.decided(class, estTokens, v, err, w.rules.Load())
	w.patient(class, &v)
	if err != nil {
		err = w.denied(class, estTokens, v, err)
	}
	return v.grant(), v.decision, err
}

// A verdict is a decision, whoever took it.
type verdict struct {
	decision quotashare.Decision
	usage    quotashare.Usage
	local    *quotashare.Window // whose usage it is; nil for the shared one's
	settler  quotashare.Settler // nil if nothing was charged
}

func (v *verdict) grant() quotashare.Grant { return quotashare.NewGrant(v.settler) }

// try decides, unless others of the class come first: then it finds out how long they take, if that is asked.
func (w *Window) try(ctx context.Context, class quotashare.Class, tokens int64, hint bool) (v verdict, err error) {
	r := w.rules.Load()
	switch {
	case tokens < 1 || class >= quotashare.NumClasses:
		v.decision.Reason = quotashare.ReasonInvalid
		return v, nil
	case tokens > r.limits[class].Largest:
		v.decision.Reason = quotashare.ReasonTooLarge
		return v, nil
	case ended(ctx) != nil:
		return v, ctx.Err()
	}
	select {
	case <-w.closed:
		return v, ErrClosed
	default:
	}
	share := r.limits[class].Share
	queued, loan, all, within := w.queues[class].ahead(tokens, share)
	switch {
	case queued && hint:
		v.decision.Reason = quotashare.ReasonQueued
		v.decision.RetryAfter, v.usage = w.behind(ctx, r, class, all, within)
		return v, nil
	case queued:
		v.decision.Reason, v.usage = quotashare.ReasonQueued, w.server.latest(r.quota.Window)
		return v, nil
	}
	asked := tokens
	if tokens > share { // a loan is never reserved for
		asked = 0
	}
	v, err = w.decide(ctx, r, class, tokens, loan, asked)
	if hint && err == nil && v.decision.Reason == quotashare.ReasonQueued { // it may come sooner with those above the share
		wait, _ := w.behind(ctx, r, class, all, within)
		v.decision.RetryAfter = min(v.decision.RetryAfter, wait)
	}
	return v, err
}

// decide asks Redis, or whoever decides while it is away. Of a call that is refused so many tokens count as demand.
func (w *Window) decide(ctx context.Context, r *rules, class quotashare.Class, tokens int64, loan bool, asked int64) (verdict, error) {
	wait, cause := w.away()
	if cause != nil {
		return w.without(class, tokens, cause, wait)
	}
	a, err := w.ask(ctx, r, "acquire", int64(class), tokens, boolean(loan), asked)
	if err != nil {
		if end := ended(ctx); end != nil {
			return verdict{}, end
		}
		w.failed(err)
		if wait, cause = w.away(); cause == nil { // it is back already
			cause = err
		}
		return w.without(class, tokens, cause, wait)
	}
	if a.changed {
		w.stats.disagree()
	}
	v := verdict{usage: a.usage}
	v.decision = quotashare.Decision{Admitted: a.reason <= quotashare.ReasonBorrowed, Reason: a.reason, RetryAfter: a.wait}
	if v.decision.Admitted {
		v.settler = &charge{w, Correction{Class: class, Estimated: tokens, at: a.at}}
	}
	return v, nil
}

// patient tells those for whom nobody waits to wait for Backoff at least.
func (w *Window) patient(class quotashare.Class, v *verdict) {
	if d := &v.decision; d.RetryAfter > 0 && class != quotashare.Interactive {
		d.RetryAfter = max(d.RetryAfter, quotashare.Backoff(class, w.Quota().Window))
	}
}

// without decides without Redis.
func (w *Window) without(class quotashare.Class, tokens int64, cause error, wait time.Duration) (v verdict, err error) {
	switch w.mode.kind {
	case open:
		w.stats.alone()
		v.decision.Admitted = true
		return v, nil
	case local:
		g := &localCharge{w: w, class: class, tokens: tokens}
		v.local = w.local.Load()
		g.grant, v.decision = v.local.TryAcquire(class, tokens)
		if !v.decision.Permanent() { // what is too large here is not too large for Redis
			w.stats.alone()
			if v.decision.Admitted {
				w.alone[class].Add(tokens)
				v.settler = g
			}
			v.usage = v.local.Usage()
			return v, nil
		}
	}
	v.decision = quotashare.Decision{RetryAfter: max(wait, firstPause/10)}
	if errors.Is(cause, ErrLost) {
		return v, cause
	}
	return v, awayError(cause)
}

// behind returns when a call would fit that comes behind those of its class that wait.
func (w *Window) behind(ctx context.Context, r *rules, class quotashare.Class, all, within int64) (time.Duration, quotashare.Usage) {
	largest := r.limits[class].Largest
	windows := (all - 1) / largest // what is more than the largest call possible takes a window for each of these
	if within > r.limits[class].Share {
		within = 0
	}
	wait := quotashare.Backoff(class, r.quota.Window)
	if _, cause := w.away(); cause != nil {
		return wait, w.server.latest(r.quota.Window)
	}
	a, err := w.ask(ctx, r, "behind", int64(class), all-windows*largest, boolean(windows > 0), within)
	if err != nil {
		if ended(ctx) == nil {
			w.failed(err)
		}
		return wait, w.server.latest(r.quota.Window)
	}
	windows = min(windows, int64((1<<62)/r.quota.Window))
	wait = a.wait + time.Duration(windows)*r.quota.Window
	if within > 0 {
		wait = min(wait, a.within)
	}
	return wait, a.usage
}

func boolean(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// Usage returns who holds what of the quota now. It is one round trip. The error is ErrAway, with what is wrong and
// without a round trip while that is known, ErrLost, ErrClosed, or that of ctx.
func (w *Window) Usage(ctx context.Context) (quotashare.Usage, error) {
	select {
	case <-w.closed:
		return quotashare.Usage{}, ErrClosed
	default:
	}
	var a answer
	_, err := w.away()
	if err == nil {
		a, err = w.ask(ctx, w.rules.Load(), "usage")
	}
	switch {
	case err == nil:
		return a.usage, nil
	case ended(ctx) != nil:
		return quotashare.Usage{}, ctx.Err()
	case errors.Is(err, ErrLost):
		return quotashare.Usage{}, err
	}
	return quotashare.Usage{}, awayError(err)
}

// awayError does not wrap the cause: that a request to Redis ran out of time is not that the caller's context did.
func awayError(cause error) error { return fmt.Errorf("%w: %v", ErrAway, cause) }

// Observe takes what the provider says is left of the account, for all replicas: see quotashare.Window.Observe. It is
// sent beside the calls.
func (w *Window) Observe(remaining int64, sent time.Duration) {
	if remaining >= 0 && sent >= 0 {
		w.mailbox.put(Correction{Op: "observe", Actual: min(remaining, maxTokens-1), wait: sent})
	}
}

// Throttled takes an answer of 429 by the provider, for all replicas: see quotashare.Window.Throttled. It is sent beside
// the calls.
func (w *Window) Throttled(retryAfter time.Duration) {
	window := w.Quota().Window
	switch {
	case retryAfter/2 > window: // no word on this limit
		return
	case retryAfter <= 0:
		retryAfter = quotashare.Backoff(quotashare.Interactive, window)
	}
	w.mailbox.put(Correction{Op: "throttled", wait: retryAfter})
}

// A charge in Redis.
type charge struct {
	w *Window
	c Correction
}

// Settle implements quotashare.Settler. What Redis cannot hold exactly is as much as it can.
func (c *charge) Settle(actual int64) {
	if actual < 0 {
		return
	}
	c.w.stats.settled(c.c.Class, actual)
	c.c.Op, c.c.Actual = "settle", min(actual, maxTokens)
	if c.c.Actual != c.c.Estimated {
		c.w.mailbox.put(c.c)
	}
}

// Cancel implements quotashare.Settler.
func (c *charge) Cancel() {
	c.w.stats.cancelled(c.c.Class, c.c.Estimated)
	c.c.Op = "cancel"
	c.w.mailbox.put(c.c)
}

// A localCharge is one in a local Window.
type localCharge struct {
	w      *Window
	class  quotashare.Class
	tokens int64
	grant  quotashare.Grant
}

// Settle implements quotashare.Settler.
func (c *localCharge) Settle(actual int64) {
	if actual >= 0 {
		c.w.stats.settled(c.class, actual)
	}
	c.grant.Settle(actual)
}

// Cancel implements quotashare.Settler.
func (c *localCharge) Cancel() {
	c.w.stats.cancelled(c.class, c.tokens)
	c.grant.Cancel()
}

// begin runs do in a goroutine that Close waits for; after Close it does not, and returns false.
func (w *Window) begin(do func()) bool {
	w.life.Lock()
	defer w.life.Unlock()
	if w.closing {
		return false
	}
	w.group.Go(do)
	return true
}

// ask asks Redis for a decision, for as long as ctx and the timeout allow.
func (w *Window) ask(ctx context.Context, r *rules, operation string, args ...int64) (a answer, err error) {
	within, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	one, err := w.server.take(within)
	if err != nil {
		return a, fmt.Errorf("%d requests are under way: %w", slots, err)
	}
	defer w.server.release(one)
	one.sent++
	a, err = w.server.send(within, one, r, operation, args...)
	switch {
	case err == nil:
		one.loose = 0
	case w.mode.kind == open && ended(ctx) == nil: // the call is made, and what it was charged is used
	case one.loose == 0: // whether it was charged or not, the next request in the slot takes it back
		one.loose = one.sent
	}
	return a, err
}

// ended returns what ended ctx, if anything did. The client may notice that its deadline is over before it does.
func ended(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
		<-ctx.Done()
	}
	return ctx.Err()
}

// away returns for how long at least Redis cannot be asked, and why; nil if it can.
func (w *Window) away() (time.Duration, error) {
	wait, probe, cause := w.breaker.look()
	if probe && !w.begin(w.probe) {
		w.breaker.probed(ErrClosed)
	}
	return wait, cause
}

// failed tells that Redis did not answer a call. Those who wait for Redis to have room may be admitted by the mode now.
func (w *Window) failed(cause error) {
	w.breaker.fail(cause, func() {
		w.beginAlone()
		w.wakeAll()
	})
}

// beginAlone gets the local Window ready for an outage.
func (w *Window) beginAlone() {
	if w.mode.kind != local {
		return
	}
	w.setting.Lock()
	defer w.setting.Unlock()
	r := w.rules.Load() // not those of the request, for they may have been replaced
	part, err := w.mode.localQuota(r.quota)
	if err != nil { // it was good when it was set
		return
	}
	usage := w.server.latest(r.quota.Window)
	taken := w.mode.of(total(&usage))
	if now := w.local.Load(); now.Usage().Used != (quotashare.ClassTokens{}) { // there was an outage a moment ago
		now.Observe(max(part.Tokens-taken, 0), 0)
		return
	}
	_ = w.newLocal(part, taken)
}

// probe looks whether Redis is back.
func (w *Window) probe() {
	_, err := w.ask(w.ctx, w.rules.Load(), "usage")
	w.breaker.probed(err)
	if err != nil {
		return
	}
	if w.mode.kind == local {
		for class, used := range w.local.Load().Usage().Used {
			if used = min(used, w.alone[class].Swap(0)); used > 0 {
				w.mailbox.put(Correction{Op: "charge", Class: quotashare.Class(class), Actual: used})
			}
		}
	}
	w.wakeAll()
}

// correct sends corrections until Redis has them. It applies them once.
func (w *Window) correct(some []Correction) (err error) {
	one, err := w.server.take(w.ctx)
	if err != nil {
		return ErrClosed
	}
	defer w.server.release(one)
	one.sent++
	r := w.rules.Load()
	pause := firstRetry
	for try := range tries {
		if try > 0 {
			select {
			case <-time.After(pause):
			case <-w.ctx.Done():
			}
			pause = min(2*pause, lastRetry)
		}
		if w.ctx.Err() != nil {
			return ErrClosed
		}
		args := make([]int64, 0, 5*len(some))
		for i := range some {
			if time.Since(some[i].made) < r.quota.Window { // what was charged before has left by then
				args = some[i].args(args)
			}
		}
		if len(args) == 0 {
			return nil
		}
		ctx, cancel := context.WithTimeout(w.ctx, max(w.timeout, time.Second))
		_, err = w.server.send(ctx, one, r, "correct", args...)
		cancel()
		if err == nil || errors.Is(err, ErrLost) {
			one.loose = 0
			return nil
		}
	}
	select {
	case <-w.closed: // Close does not wait so long for each of the others
		w.stop()
	default:
	}
	return err
}

// corrected wakes those who may fit now.
func (w *Window) corrected(some []Correction) {
	for _, c := range some {
		if c.Actual < c.Estimated {
			w.wakeAll()
			return
		}
	}
}

// Close ends the Window: Acquire and TryAcquire return ErrClosed, those who wait too; what is pending is sent, until ctx
// ends or Redis turns out to be away. What it started is over when it returns, or, if ctx ended first, a second later or
// after WithTimeout. The error is ctx's. What was charged stays charged, and the client stays open. Closing twice is the
// same as once.
func (w *Window) Close(ctx context.Context) error {
	w.life.Lock()
	if !w.closing {
		w.closing = true
		close(w.closed)
	}
	w.life.Unlock()
	done := make(chan struct{})
	go func() {
		w.group.Wait()
		w.stop()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		w.stop()
		return ctx.Err()
	}
}
