package quotashare

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quotashare/quotashare/internal/sliding"
)

// A Window meters one Quota over a sliding window of time: a charge counts for exactly Quota.Window from the instant
// at which it was made. There is one Window for each limit of an account and model family: a limit on tokens and one
// on requests are two Windows.
//
// A Window is made by NewWindow, is safe for concurrent use, and must not be copied. It has no goroutine and needs no
// closing. Its memory is bounded at any rate of calls, to 64 KiB: where more than about 300 charges of a class are in
// the window, those closer together than a 600th of it may leave together, up to that much late and never early.
//
// The zero Window refuses everything as ReasonInvalid.
type Window struct {
	mu sync.Mutex

	// What follows is guarded by mu. The first part is what every call touches.
	now     int64 // the latest instant, in nanoseconds since base
	changes int64 // nothing ages before this instant
	rule    rule
	usage   Usage // at now, but for Recent
	used    [NumClasses]sliding.Log
	refused [NumClasses]sliding.Log // what counts as demand of the calls that were refused
	peaks   [NumClasses]sliding.Peak
	own     sliding.Peak // of all that is charged, since watched
	watched int64        // when Observe was first called, for until then it costs too much to know own
	others  sliding.Peak // of Usage.Others
	stopped int64        // nothing is admitted before this instant
	noLoans int64        // nothing is lent before this instant, which is not before stopped
	told    int64        // what was last told to be left
	toldAt  int64        // EstimatedTokens of all classes when that was first told
	hint    hint         // of the latest refusal, as long as nothing happened that changes it
	queues  [NumClasses]queue
	waiting int   // in all queues
	due     int64 // when the first of them may fit; only if some wait

	base  time.Time        // of the monotonic clock
	clock func() time.Time // nil for the monotonic clock
	read  time.Time        // the latest reading of clock
	part  int64            // the length of a part of a Peak
	turn  int64            // when the next such part begins
	spans []int64          // of Usage.Recent
	quota Quota            // with its defaults written out
	stats [NumClasses]counts

	// Set by NewWindow and never changed.
	maxWait [NumClasses]time.Duration // negative: no limit
	shadow  func(*DeniedError)
}

// An Option changes how NewWindow makes a Window; if it cannot, NewWindow returns its error. The zero Option changes
// nothing.
type Option struct{ apply func(*Window) error }

// WithClock makes the Window read the time from now, for tests and for replays in virtual time; nil is the monotonic
// clock of the process, as without the option. It is called with the Window's lock held: it must be quick, must not
// use the Window and must not panic. Acquire sleeps by the real clock all the same, and looks again as often as it
// must while now stands still just before a call fits: to test it, use testing/synctest and no WithClock.
//
// The window's time never runs backwards. A reading that lies back by more than a 600th of the window is a clock that
// was set: the window's time stands still for that step and goes on from there. One that lies back by less is an old
// reading that arrives late, and changes nothing.
func WithClock(now func() time.Time) Option {
	return Option{func(w *Window) error {
		w.clock = now
		return nil
	}}
}

// NewWindow returns a Window of the quota in which nothing is charged yet. Its error is that of Quota.Validate or of an
// option.
//
// Time is the monotonic clock of the process. Setting the machine's clock changes nothing. While a machine sleeps the
// monotonic clock may stand still; then charges made before count for what was left of their window, and nobody waits
// for longer than that. A test in testing/synctest makes its Window inside the bubble.
func NewWindow(quota Quota, options ...Option) (*Window, error) {
	w := &Window{}
	if err := w.setRule(quota); err != nil {
		return nil, err
	}
	w.maxWait = [NumClasses]time.Duration{
		Interactive: 0,
		Background:  time.Duration(sliding.Add(int64(w.rule.window), int64(w.rule.window))),
		Batch:       -1,
	}
	for _, option := range options {
		if option.apply == nil {
			continue
		}
		if err := option.apply(w); err != nil {
			return nil, err
		}
	}
	if w.clock == nil {
		w.base = time.Now()
	} else {
		w.read = w.clock()
	}
	length := int64(w.rule.window)
	w.part = sliding.PeakPart(length)
	w.turn = w.part
	w.changes = w.turn
	w.due = math.MaxInt64
	w.told = -1
	w.watched = math.MaxInt64
	for c := range NumClasses {
		w.used[c], w.refused[c] = sliding.NewLog(length), sliding.NewLog(length)
	}
	return w, nil
}

// Quota returns the quota in force, with its defaults written out. For the zero Window it is zero.
func (w *Window) Quota() Quota {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.quota
}

// SetQuota puts another quota in force at once. What was charged stays charged, so a quota below what is used admits
// nothing until enough has left the window, and setting the same one again changes nothing. Calls that wait in Acquire
// and fit now are admitted; those that will never fit are refused. On an error, which is that of Quota.Validate or says
// that the length of the window differs, the quota stays as it was: another length needs another Window.
func (w *Window) SetQuota(quota Quota) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rule.window == 0 {
		return errors.New("quotashare: SetQuota on a zero Window: want one made by NewWindow")
	}
	if length := quota.withDefaults().Window; length > 0 && length != w.rule.window {
		return fmt.Errorf("quotashare: window is %v: want %v, the length that this Window was made with (or make a new Window)", length, w.rule.window)
	}
	if w.waiting > 0 {
		w.advance()
	}
	if err := w.setRule(quota); err != nil {
		return err
	}
	w.requeue()
	return nil
}

func (w *Window) setRule(quota Quota) error {
	var r rule
	if err := quota.compile(&r); err != nil {
		return err
	}
	w.rule, w.quota = r, quota.withDefaults()
	w.hint.at = 0
	w.spans = sliding.Spans(r.window, int(r.pace))
	for c := range w.used {
		w.used[c].Reset()
	}
	return nil
}

// TryAcquire decides by the rule of Admit whether a call of the class, estimated at so many tokens, may be made now.
// If it may, the tokens are charged in the same step, and the Grant settles them later; the Grant of a refusal is zero.
// A refusal charges nothing, but it counts as demand of the class, so that what was refused within the class's share is
// held for it, if waiting can help and the call is no larger than the share.
//
// Calls of the class that wait in Acquire come first: then the refusal is ReasonQueued, and does not count as demand.
// But a waiter that is larger than the class's share can be served by a loan alone, so a call within the share passes
// it.
//
// RetryAfter is the time until the same call would be admitted if nothing else happened, and not a nanosecond more
// where no charges were merged. For ReasonQueued it is until the call would fit together with those of its class that
// wait, as one call; they may take longer one by one.
// Background and Batch are told to wait for Backoff at least. A caller who comes back earlier is refused again; one who
// comes back then may find that others came first, and is told again.
//
// It allocates nothing, but for the report of a shadow Window, and costs the same at any rate of calls.
func (w *Window) TryAcquire(class Class, estTokens int64) (Grant, Decision) {
	w.mu.Lock()
	reason := w.decide(class, estTokens)
	if reason.admits() {
		at := w.charge(class, estTokens, reason)
		w.mu.Unlock()
		return Grant{window: w, class: class, at: at, tokens: estTokens}, decision(reason)
	}
	d := w.refuse(class, estTokens, reason)
	if w.shadow == nil {
		w.mu.Unlock()
		return Grant{}, d
	}
	denied := w.denied(class, estTokens, d)
	w.mu.Unlock()
	w.shadow(denied)
	return Grant{}, Decision{Admitted: true, Reason: reason}
}

// Usage returns who holds what of the quota now.
func (w *Window) Usage() Usage {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rule.window > 0 {
		w.advance()
	}
	return w.usageNow()
}

// usageNow returns the usage, to the instant of the last advance.
func (w *Window) usageNow() Usage {
	u := w.usage
	for c := range w.used {
		u.Recent[c] = w.used[c].Recent(w.now, w.spans)
	}
	return u
}

// decide brings the window to the present, and applies the rule to a call that comes now.
func (w *Window) decide(c Class, e int64) Reason {
	if w.rule.window == 0 {
		return ReasonInvalid
	}
	w.advance()
	reason := w.fits(c, e)
	if w.waiting > 0 && !reason.permanent() {
		reason = w.behind(c, e, reason)
	}
	return reason
}

// fits applies the rule to the present.
func (w *Window) fits(c Class, e int64) Reason {
	reason, holdable := w.rule.judge(c, e, &w.usage)
	if w.now < w.noLoans && reason.admits() && (reason == ReasonBorrowed || w.now < w.stopped) {
		return ReasonQuotaFull
	}
	// No pace is above all that is used, so a light borrower need not be asked for its own.
	if reason == ReasonBorrowed && w.rule.paced(w.usage.Used[c], holdable) &&
		w.used[c].Paced(w.now, w.rule.tooFast(holdable), w.spans) {
		return ReasonPaced
	}
	return reason
}

// charge charges an admitted call and returns the instant.
func (w *Window) charge(c Class, e int64, reason Reason) (at int64) {
	w.hint.at = 0
	w.used[c].Add(w.now, e)
	w.noteDemand(c)
	w.stats[c].admit(e, reason)
	return w.now
}

// refuse remembers a refusal and returns it, with when to come back.
func (w *Window) refuse(c Class, e int64, reason Reason) Decision {
	d := Decision{Reason: reason}
	if c >= NumClasses || w.rule.window == 0 {
		return d
	}
	w.stats[c].Refused[reason]++
	if reason.permanent() {
		return d
	}
	w.holdUp(c, e, reason)
	d.RetryAfter = w.retryAfter(c, e, reason)
	if reason != ReasonQueued && e <= w.rule.share[c] { // a loan is never reserved for
		w.refused[c].Add(w.now, e)
		w.noteDemand(c)
	}
	return d
}

// retryAfter returns how long a refused call must wait before it fits.
func (w *Window) retryAfter(c Class, e int64, reason Reason) time.Duration {
	at := w.hint.at
	switch {
	case reason == ReasonQueued:
		at = w.fitsBehind(c, e)
	case at <= w.now || c != w.hint.class || e < w.hint.least || e > w.hint.most:
		at = w.fitsAt(c, e, true)
		if at != w.hint.at || c != w.hint.class {
			w.hint = hint{at: at, least: e, most: e, class: c}
		}
		w.hint.least, w.hint.most = min(w.hint.least, e), max(w.hint.most, e)
	}
	wait := time.Duration(at - w.now)
	if c != Interactive {
		wait = max(wait, Backoff(c, w.rule.window))
	}
	return wait
}

// A hint is when a call fits if nothing else happens. It stays true while time passes and while the class itself is
// refused, so a storm of like calls, which is when refusals must be cheap, searches once. No call fits before a smaller
// one, so what is true of two calls is true of those between them.
type hint struct {
	at          int64 // 0 if it holds no more
	least, most int64 // tokens of the calls that were found to fit then
	class       Class
}

// withinShare reports whether the class's share has room for the call, whatever the window has.
func (w *Window) withinShare(c Class, e int64) bool { return e <= w.rule.share[c]-w.usage.Used[c] }

// advance brings the window to the present.
func (w *Window) advance() {
	w.age()
	if w.waiting > 0 && w.now >= w.due {
		w.serve()
	}
}

// age reads the clock and lets what was charged grow older.
func (w *Window) age() {
	w.now = w.readClock()
	if w.now < w.changes {
		return
	}
	if w.now >= w.turn {
		w.turnPeaks()
	}
	w.changes = w.turn
	for c := range w.used {
		w.changes = min(w.changes, w.used[c].Expire(w.now), w.refused[c].Expire(w.now))
		w.usage.Used[c] = w.used[c].Sum()
	}
}

// turnPeaks begins the parts of the peaks that are due. They begin with the demand as it was then, which the logs still
// tell: nothing was charged since. What is older than the peaks remember need not be told.
func (w *Window) turnPeaks() {
	if missed := (w.now-w.turn)/w.part - sliding.PeakParts; missed > 0 {
		w.turn += missed * w.part
	}
	for ; w.turn <= w.now; w.turn = sliding.Add(w.turn, w.part) {
		if w.waiting > 0 { // they are remembered for longer than the hint thought
			w.hint.at = 0
		}
		own := int64(0)
		for c := range w.peaks {
			w.peaks[c].Turn(sliding.Add(w.askedAt(c, w.turn), w.queues[c].asked.tokens()))
			w.usage.Demand[c] = w.peaks[c].MaxAfter(0)
			own = sliding.Add(own, w.used[c].After(w.turn-int64(w.rule.window)))
		}
		w.own.Turn(own)
		w.others.Turn(0)
		w.usage.Others = w.others.MaxAfter(0)
	}
}

// readClock returns the present instant, which is never before the last one.
func (w *Window) readClock() int64 {
	if w.clock == nil {
		return max(w.now, int64(time.Since(w.base)))
	}
	t := w.clock()
	step := int64(t.Sub(w.read))
	switch {
	case step > 0:
		w.read = t
		// After three windows, of parts of a nanosecond at least, nothing is left that could grow older.
		length := max(int64(w.rule.window), sliding.PeakParts)
		step = min(step, sliding.Add(length, sliding.Add(length, length)))
		return min(sliding.Add(w.now, step), math.MaxInt64-1)
	case step < -int64(w.rule.window)/sliding.Grains:
		w.read = t
	}
	return w.now
}

// askedAt returns what the class asked for in the window that ends at t, but for calls that wait: what was charged, and
// what was refused.
func (w *Window) askedAt(c int, t int64) int64 {
	since := t - int64(w.rule.window)
	return sliding.Add(w.used[c].After(since), w.refused[c].After(since))
}

// noteDemand brings usage up to a change of what the class has charged or asked for.
func (w *Window) noteDemand(c Class) {
	used := w.used[c].Sum()
	asked := sliding.Add(sliding.Add(used, w.refused[c].Sum()), w.queues[c].asked.tokens())
	w.peaks[c].Note(asked)
	w.usage.Used[c] = used
	w.usage.Demand[c] = max(w.usage.Demand[c], asked)
	if w.watched < w.now {
		w.own.Note(w.usage.charged())
	}
}

// fitsAt returns the first instant after now at which the rule would admit the call if nothing else happened; without
// loan, at which it would within the share.
//
// While nothing happens charges only leave, demand is only forgotten, and the room for the call only grows. So a call
// that is admitted at an instant is admitted at every later one, and a list of instants can be searched by bisection.
// The rule can change its mind only where a charge leaves the window, where demand is forgotten, or, if pace alone
// stands in the way, where a charge leaves one of the spans of the pace.
//
// Calls that wait are left out: as if they went away without a charge.
func (w *Window) fitsAt(c Class, e int64, loan bool) int64 {
	fits := func(t int64) bool { return w.willFit(c, e, t, loan) }
	// Demand is forgotten where a part of the peaks begins. When two windows of them have begun, nothing is remembered.
	const turns = 2 * sliding.PeakParts
	first := w.turnAt(turns)
	for d := range w.used {
		first = w.used[d].FirstLeaving(first, fits)
	}
	for _, t := range []int64{w.stopped, w.noLoans} {
		if t > w.now && t < first && fits(t) {
			first = t
		}
	}
	own := !loan || w.withinShare(c, e)
	if own && w.usage.Others == 0 {
		return first // a loan needs more room than the share does, and only a loan minds demand and pace
	}
	if first > w.turn {
		before := int((first - 1 - w.turn) / w.part)
		if fits(w.turnAt(before)) {
			first = w.turnAt(sort.Search(before, func(n int) bool { return fits(w.turnAt(n)) }))
		}
	}

	if own {
		return first
	}

	// Until then all but the pace has been as it was the moment before.
	u := w.usageAt(first-1, c, e)
	if reason, holdable := w.rule.judge(c, e, &u); reason == ReasonBorrowed && w.rule.pace > 1 && first > w.noLoans {
		first = min(first, w.used[c].Slows(w.rule.tooFast(holdable), w.spans))
	}
	return first
}

// willFit reports whether the call would be admitted at t, no earlier than now, if nothing happened until then.
func (w *Window) willFit(c Class, e, t int64, loan bool) bool {
	u := w.usageAt(t, c, e)
	switch reason, holdable := w.rule.judge(c, e, &u); reason {
	case ReasonOwnShare:
		return t >= w.stopped
	case ReasonBorrowed:
		return loan && t >= w.noLoans && (w.rule.pace == 1 || !w.used[c].PacedAt(t, w.rule.tooFast(holdable), w.spans))
	}
	return false
}

// usageAt returns what the rule needs to know of the usage at t, no earlier than now, for a call, if nothing happens
// until then; but for Recent.
func (w *Window) usageAt(t int64, c Class, e int64) (u Usage) {
	for d := range w.used {
		u.Used[d] = w.used[d].After(t - int64(w.rule.window))
	}
	if t < w.turn {
		u.Demand, u.Others = w.usage.Demand, w.usage.Others
		return u
	}
	turns := w.turnsAt(t)
	u.Others = w.others.MaxAfter(turns)
	if e > w.rule.share[c]-u.Used[c] { // only a loan minds demand
		for d := range w.used {
			u.Demand[d] = w.demandAt(d, turns)
		}
	}
	return u
}

// demandAt returns the demand of the class after so many more turns of the peaks, 1 or more, if nothing happens until
// then.
func (w *Window) demandAt(c, turns int) int64 {
	if turns <= sliding.PeakParts {
		// The parts that begin until then begin with less than the part under way has seen.
		return w.peaks[c].MaxAfter(turns)
	}
	// Only such parts are left, and the oldest began with the most.
	return w.askedAt(c, w.turnAt(turns-sliding.PeakParts-1))
}

// turnsAt returns how many parts of the peaks will have begun at t, no earlier than the next of them, from now on.
func (w *Window) turnsAt(t int64) int { return int((t-w.turn)/w.part) + 1 }

// turnAt returns the instant at which the n-th part of the peaks from the next one on begins.
func (w *Window) turnAt(n int) int64 {
	if int64(n) > (math.MaxInt64-w.turn)/w.part {
		return math.MaxInt64
	}
	return w.turn + int64(n)*w.part
}

// Observe takes what the provider says is left of the account, in the units of the quota, in its answer to a call that
// was sent so long ago: the header that many send ("x-ratelimit-remaining-tokens"). What the provider counts beyond
// what this Window charged is Usage.Others. It keeps everybody's room down for one Window after it was told, and at
// most a twelfth longer.
//
// It only ever tightens: a value that leaves more room than there is changes nothing. What was charged meanwhile is
// allowed for, as nobody knows whether the provider counted it. Changed by nothing is also a value that is negative,
// that is older than a Window, or that is told again and again while more was charged than a thousand tokens, the step
// to which some round, or a hundredth of a small quota: it is a cached one.
func (w *Window) Observe(remaining int64, sent time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rule.window == 0 || remaining < 0 || sent < 0 || sent >= w.rule.window {
		return
	}
	w.advance()
	charged := int64(0)
	for c := range w.stats {
		charged = sliding.Add(charged, w.stats[c].EstimatedTokens)
	}
	switch {
	case remaining != w.told:
		w.told, w.toldAt = remaining, charged
	case charged-w.toldAt > min(1000, w.rule.quota/100):
		return
	}
	if w.watched == math.MaxInt64 {
		w.watched = w.now - 1
	}
	w.own.Note(w.usage.charged())
	parts := 1 // of the peaks, in which the provider may have answered
	if began := w.turn - w.part; int64(sent) > w.now-began {
		parts += int((int64(sent) - (w.now - began) + w.part - 1) / w.part)
	}
	turns := sliding.PeakParts + 1 - min(parts, sliding.PeakParts+1)
	own := w.own.MaxAfter(turns)
	if w.now-int64(sent) <= w.watched { // what was asked for is no less than what was charged
		asked := int64(0)
		for c := range w.peaks {
			asked = sliding.Add(asked, w.peaks[c].MaxAfter(turns))
		}
		own = max(own, asked)
	}
	if others := w.rule.quota - remaining - own; others > 0 {
		w.hint.at = 0
		w.others.Note(others)
		w.usage.Others = max(w.usage.Others, others)
	}
}

// Throttled takes an answer of 429 by the provider: the account is full, whatever this Window thinks. Nothing is
// admitted until retryAfter is over, and nothing is lent for a whole Window. If the provider does not say when to come
// back, retryAfter is 0 or less, and Backoff of Interactive stands for it. What is refused meanwhile is
// ReasonQuotaFull.
//
// A retryAfter above two Windows is no word on this limit, in which everything is gone a Window after it was counted: a
// daily quota, or a budget, is spent. It changes nothing.
func (w *Window) Throttled(retryAfter time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	length := int64(w.rule.window)
	if length == 0 || int64(retryAfter)/2 > length {
		return
	}
	w.advance()
	if retryAfter <= 0 {
		retryAfter = Backoff(Interactive, w.rule.window)
	}
	w.hint.at = 0
	w.stopped = max(w.stopped, sliding.Add(w.now, int64(retryAfter)))
	w.noLoans = max(w.stopped, sliding.Add(w.now, length))
}

// A Limiter admits calls: a *Window, a window that many replicas share, or a test's fake. It is what code should ask
// for that guards calls.
type Limiter interface {
	// Acquire waits, as the class does, until the call is admitted and charged. Its error is a *DeniedError, or says
	// why the limiter could not decide.
	Acquire(ctx context.Context, class Class, estTokens int64) (Grant, error)
}

var _ Limiter = (*Window)(nil)

// A Grant is an admitted call. When the call is over, Settle it with what it used. A Grant that is neither settled nor
// cancelled leaks nothing: its estimate counts until it ages out of the window.
//
// Settle and Cancel are safe for concurrent use, and of a Grant only the first of them has an effect. The zero Grant
// is safe to settle and to cancel, which does nothing. A Grant must not be copied.
type Grant struct {
	done    atomic.Bool
	class   Class
	window  *Window // nil for the Grant of another limiter
	at      int64
	tokens  int64
	settler Settler
}

// A Settler is what a Limiter of another package knows of one admitted call. NewGrant makes the Grant of it. Of the
// two methods at most one is called, once.
type Settler interface {
	// Settle replaces the estimate by the tokens that the call used, as Grant.Settle says. A negative number means that
	// it is not known: the estimate stays.
	Settle(actualTokens int64)

	// Cancel removes the charge, as Grant.Cancel says.
	Cancel()
}

// NewGrant returns the Grant of an admitted call that is settled with s. A nil s gives a Grant that does nothing, as a
// test's fake may want it. A *Grant is a Settler itself: a limiter that wraps another returns NewGrant(&grant), for a
// Grant must not be copied.
func NewGrant(s Settler) Grant { return Grant{settler: s} }

// Settle replaces the estimate by the tokens that the call really used, as if they had been charged at the instant of
// the admission. More than was estimated is charged whether or not there is room. 0 is a call that was made and used
// nothing. A negative number means that the use is not known: the estimate stays. Later than a Window after the
// admission it changes nothing, for the charge is gone.
//
// A provider that counts what was reserved, not what was used, wants the estimate left to stand: do not settle then.
func (g *Grant) Settle(actualTokens int64) {
	if g.done.Swap(true) {
		return
	}
	switch {
	case g.settler != nil:
		g.settler.Settle(actualTokens)
	case g.window != nil && actualTokens >= 0:
		g.window.settle(g.class, g.at, g.tokens, actualTokens, false)
	}
}

// Cancel removes the charge, for a call that was never sent. A call that was sent has used tokens even if it failed or
// its answer was not read: Settle it, or leave the estimate. So do not defer Cancel: it would refund calls that panic
// or return early after they were sent. What the call asked for goes on counting as recent demand of its class.
func (g *Grant) Cancel() {
	if g.done.Swap(true) {
		return
	}
	switch {
	case g.settler != nil:
		g.settler.Cancel()
	case g.window != nil:
		g.window.settle(g.class, g.at, g.tokens, 0, true)
	}
}

// settle changes a charge if it still counts, and offers the room that this makes to those who wait.
func (w *Window) settle(c Class, at, from, to int64, cancelled bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.advance()
	w.stats[c].settle(from, to, cancelled)
	if w.now-at >= int64(w.rule.window) {
		return
	}
	w.hint.at = 0
	w.used[c].Replace(at, from, to)
	w.noteDemand(c)
	if to < from && w.waiting > 0 {
		w.serve()
	}
}
