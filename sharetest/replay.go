package sharetest

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/quotashare/quotashare"
)

// Options say how a trace is replayed.
type Options struct {
	// Name heads the report. Empty: the name of the policy.
	Name string

	// Policy is who decides.
	Policy Policy

	// Callers are those of each class, indexed by Class.
	Callers [quotashare.NumClasses]Callers

	// Provider is what stands behind the decision.
	Provider Provider

	// Seed selects the jitter of callers whom the provider answered 429.
	Seed uint64
}

// Callers say how the callers of a class behave.
type Callers struct {
	// Patience is how long a caller comes back before it gives up, from when it first asked. 0: as long as
	// Window.Acquire makes its class wait, which is not at all for Interactive, two Windows for Background, and for
	// ever for Batch. Negative: for ever.
	Patience time.Duration

	// Concurrency is how many calls of the class may be under way or ask at once, of those that are in no Pool; the
	// others are in line, and have not asked. 0: no limit.
	Concurrency int

	// Overestimate is a factor on the estimates: 1.5 is half too much. They are settled when the call ends. 0 is 1.
	Overestimate float64
}

// Replay lets callers ask for the calls of a trace, and reports what came of them.
//
// Each call asks what decides. A refused caller comes back exactly when it was told to, and not earlier, until its
// patience ends; one who is refused for good drops the call, and is back for another after quotashare.Backoff. What is
// admitted goes to the provider, which counts the estimate at once, and both put the actual number in its place when
// the call ends. A caller whom the provider answers 429 was charged nothing, and comes back after half a second, then
// one, two, four, and eight seconds from then on, each less up to a quarter at random: as the SDKs do, but until it
// gives up.
//
// So nobody is in line but in a Pool: callers are those of Window.TryAcquire. The waiters of Window.Acquire are served
// in the order of their arrival, so large calls wait less there, and small ones more. Where far more is asked for than
// there is, and all of it keeps coming back, give the class a Concurrency or a Patience: the replay takes as long as
// there are answers.
//
// The error names what is wrong with the quota, the trace or the options, or says that there were more than ten million
// answers. Nil options are the zero Options.
func Replay(quota quotashare.Quota, trace Trace, options *Options) (Report, error) {
	r := &replay{trace: trace}
	if options != nil {
		r.options = *options
	}
	if err := r.open(quota); err != nil {
		return Report{}, err
	}
	if err := r.play(); err != nil {
		return Report{}, err
	}
	return r.close().Between(0, trace.Length), nil
}

func (o *Options) validate() error {
	if o.Policy >= numPolicies {
		return fmt.Errorf("sharetest: policy is %v: want ByWindow or another of the constants", o.Policy)
	}
	for class, c := range o.Callers {
		var err error
		switch {
		case c.Concurrency < 0:
			err = fmt.Errorf("concurrency is %d: want 0 or more", c.Concurrency)
		case c.Patience > maxTime:
			err = fmt.Errorf("patience is %v: want 36 years at most, or less than 0 for ever", c.Patience)
		case !(c.Overestimate >= 0 && c.Overestimate <= 1000):
			err = fmt.Errorf("overestimate is %v: want a factor up to 1000, such as 1.5", c.Overestimate)
		}
		if err != nil {
			return fmt.Errorf("sharetest: callers[%v]: %w", quotashare.Class(class), err)
		}
	}
	switch p := o.Provider; {
	case p.Tokens < 0:
		return fmt.Errorf("sharetest: provider: tokens is %d: want 0 or more", p.Tokens)
	case p.Bucket < 0 || p.Bucket > maxTime:
		return fmt.Errorf("sharetest: provider: bucket is %v: want 0 or more, such as a second", p.Bucket)
	}
	return nil
}

// mostEntries is how much is kept of a replay: half a gigabyte. Tests make it less.
var mostEntries = 10_000_000

// writtenOut returns a quota with its defaults written out, or the error that it has.
func writtenOut(quota quotashare.Quota) (quotashare.Quota, error) {
	window, err := quotashare.NewWindow(quota)
	if err != nil {
		return quotashare.Quota{}, err
	}
	return window.Quota(), nil
}

// A replay is one in progress.
type replay struct {
	trace   Trace
	options Options
	quota   quotashare.Quota // with its defaults written out

	now     time.Duration
	arrived int   // so many arrivals have come
	agenda  queue // what happens next
	planned int   // so many times something was planned

	window   *quotashare.Window // nil: no Window decides
	provider Provider           // with its defaults written out
	bucket   *bucket            // nil: an exact window
	book     book
	jitter   *rand.PCG

	pools     map[*Pool]*pool
	ofClass   [quotashare.NumClasses]*Pool // for those in no Pool; nil: no limit
	waiting   [quotashare.NumClasses]int
	shortOf   [quotashare.NumClasses]waitingCalls
	shortFrom [quotashare.NumClasses]time.Duration // -1: it is not short

	history history
}

// A pool is a Pool at work.
type pool struct {
	free int
	line []*call // in the order of their arrival
}

// A call is an arrival on its way. Of each there is one thing that happens next.
type call struct {
	Arrival
	pool   *pool
	next   time.Duration
	plan   int // of what is planned for one instant, the lower happens first
	do     what
	first  time.Duration    // when it was first asked for
	asked  bool             // at least once
	many   int              // how often the provider answered 429
	waits  bool             // was refused and is neither admitted nor over
	grant  quotashare.Grant // of the Window; zero where none decides
	charge int              // in the book
	entry  int              // of its admission in the history
}

// What happens.
type what uint8

const (
	ask what = iota
	giveUp
	end   // of a call
	leave // of the caller of a call that was dropped
)

func (r *replay) open(quota quotashare.Quota) (err error) {
	if r.quota, err = writtenOut(quota); err != nil {
		return err
	}
	if err := errors.Join(r.trace.Validate(), r.options.validate()); err != nil {
		return err
	}
	start := r.trace.Start
	clock := func() time.Time { return start.Add(r.now) }
	if r.window, err = r.options.Policy.newWindow(r.quota, clock); err != nil {
		return err
	}
	r.provider = r.options.Provider
	if r.provider.Tokens == 0 {
		r.provider.Tokens = r.quota.Tokens
	}
	if size := r.provider.Bucket; size > 0 {
		r.bucket = &bucket{tokens: r.provider.Tokens, window: r.quota.Window, size: size}
	}
	r.jitter = rand.NewPCG(r.options.Seed, math.MaxUint64) // none of Generate's
	r.pools = map[*Pool]*pool{}
	r.history = newHistory(r.trace, r.quota, &r.options)
	r.book = book{window: r.quota.Window, loans: r.history.loan}
	for class := range quotashare.Class(quotashare.NumClasses) {
		r.book.shares[class] = r.quota.Limits(class).Share
		r.shortFrom[class] = -1
		c := &r.options.Callers[class]
		if c.Concurrency > 0 {
			r.ofClass[class] = &Pool{c.Concurrency}
		}
		if c.Patience == 0 {
			c.Patience = [quotashare.NumClasses]time.Duration{0, 2 * r.quota.Window, -1}[class]
		}
	}
	return nil
}

// play lets everything happen, in the order of time. Of what falls on one instant first charges leave the window, then
// comes a tick of the history, then what was planned, then what arrives.
func (r *replay) play() error {
	const never = math.MaxInt64
	for {
		tick, expiry, planned, arrival := r.history.nextTick(), time.Duration(never), time.Duration(never), time.Duration(never)
		if at, ok := r.book.next(); ok {
			expiry = at
		}
		if len(r.agenda) > 0 {
			planned = r.agenda[0].next
		}
		if r.arrived < len(r.trace.Arrivals) {
			arrival = r.trace.Arrivals[r.arrived].At
		}
		r.now = min(expiry, tick, planned, arrival)
		switch {
		case r.now >= r.trace.Length:
			return nil
		case r.now == expiry:
			r.looked(r.book.expire())
		case r.now == tick:
			r.history.tick()
			r.picture()
		case r.now == planned:
			c := heap.Pop(&r.agenda).(*call)
			if err := r.happen(c); err != nil {
				return err
			}
		default:
			if err := r.arrive(&r.trace.Arrivals[r.arrived]); err != nil {
				return err
			}
			r.arrived++
		}
	}
}

func (r *replay) happen(c *call) error {
	switch c.do {
	case ask:
		return r.ask(c)
	case giveUp:
		r.noLongerWaits(c)
		r.looked(c.Class)
		r.history.note(entry{at: r.now, class: c.Class, what: gaveUp})
	case end:
		r.end(c)
	case leave:
	}
	return r.over(c)
}

func (r *replay) plan(c *call, at time.Duration, do what) {
	c.next, c.plan, c.do = at, r.planned, do
	r.planned++
	heap.Push(&r.agenda, c)
}

func (r *replay) arrive(a *Arrival) error {
	r.history.note(entry{at: r.now, class: a.Class, what: arrived})
	c := &call{Arrival: *a}
	if c.Pool == nil {
		c.Pool = r.ofClass[c.Class]
	}
	if c.Pool == nil {
		return r.ask(c)
	}
	p := r.pools[c.Pool]
	if p == nil {
		p = &pool{free: c.Pool.Workers}
		r.pools[c.Pool] = p
	}
	c.pool = p
	if p.free == 0 {
		p.line = append(p.line, c)
		return nil
	}
	p.free--
	return r.ask(c)
}

// over lets the worker of a call that is over take the next.
func (r *replay) over(c *call) error {
	switch p := c.pool; {
	case p == nil:
		return nil
	case len(p.line) == 0:
		p.free++
		return nil
	default:
		next := p.line[0]
		p.line = p.line[1:]
		return r.ask(next)
	}
}

// ask asks for a call, for the first time or again.
func (r *replay) ask(c *call) error {
	if !c.asked {
		c.asked, c.first = true, r.now
		if factor := r.options.Callers[c.Class].Overestimate; factor > 0 {
			c.Estimate = int64(min(max(math.Round(float64(c.Estimate)*factor), 1), maxTokens))
		}
		r.history.note(entry{at: r.now, class: c.Class, what: offered, tokens: c.Estimate})
	}
	d := r.decide(c)
	switch {
	case d.Permanent():
		r.history.note(entry{at: r.now, class: c.Class, what: dropped, reason: d.Reason})
		// Whoever has more of them goes on a little later.
		r.plan(c, r.now+quotashare.Backoff(c.Class, r.quota.Window), leave)
		return nil
	case !d.Admitted:
		return r.refuse(c, entry{what: refused, reason: d.Reason}, d.RetryAfter)
	case !r.allows(c.Estimate):
		c.grant.Cancel()
		c.many++
		return r.refuse(c, entry{what: tooMany}, r.backoff(c.many))
	}
	r.admit(c, d.Reason)
	return nil
}

func (r *replay) decide(c *call) (d quotashare.Decision) {
	if r.window == nil {
		return r.options.Policy.decide(c.Class, c.Estimate, r.quota, r.book.used, r.waiting)
	}
	c.grant, d = r.window.TryAcquire(c.Class, c.Estimate)
	return d
}

// allows reports whether the provider allows so many tokens now.
func (r *replay) allows(tokens int64) bool {
	if r.bucket != nil {
		return r.bucket.take(r.now, tokens)
	}
	return tokens <= r.provider.Tokens-r.book.total()
}

func (r *replay) admit(c *call, reason quotashare.Reason) {
	r.noLongerWaits(c)
	c.charge = r.book.charge(r.now, c.Class, c.Estimate)
	c.entry = r.history.note(entry{
		at: r.now, class: c.Class, what: admitted, reason: reason, tokens: c.Estimate,
		wait: r.now - c.first, held: r.book.total(),
	})
	r.picture()
	r.looked(c.Class)
	r.plan(c, r.now+c.Duration, end)
}

// end ends a call that was admitted.
func (r *replay) end(c *call) {
	if r.provider.CountsReserved {
		return
	}
	c.grant.Settle(c.Actual)
	if r.bucket != nil {
		r.bucket.put(r.now, c.Estimate-c.Actual)
	}
	if !r.book.settle(r.now, c.charge, c.Actual) {
		return
	}
	r.history.settle(c.entry, c.Actual)
	if c.Actual > c.Estimate {
		r.history.note(entry{at: r.now, class: c.Class, what: grew, held: r.book.total()})
		r.picture()
	}
	r.looked(c.Class)
}

// refuse makes the caller come back after a wait, or give up before.
func (r *replay) refuse(c *call, e entry, wait time.Duration) error {
	if wait <= 0 {
		return errors.New("sharetest: a refusal says to come back after no time at all, which would never end")
	}
	e.at, e.class, e.first = r.now, c.Class, !c.waits
	if r.history.note(e) > mostEntries {
		return fmt.Errorf("sharetest: callers of %v come back more than ten million times: want a Concurrency or a Patience of the class", c.Class)
	}
	if !c.waits {
		c.waits = true
		r.waiting[c.Class]++
		heap.Push(&r.shortOf[c.Class], c)
	}
	r.looked(c.Class)
	// However early a caller may know that it will give up, it is there until then.
	patience := r.options.Callers[c.Class].Patience
	if deadline := c.first + patience; patience >= 0 && wait > deadline-r.now {
		r.plan(c, deadline, giveUp)
		return nil
	}
	r.plan(c, r.now+wait, ask)
	return nil
}

func (r *replay) noLongerWaits(c *call) {
	if c.waits {
		c.waits = false
		r.waiting[c.Class]--
	}
}

// looked looks at whether a class is short of its share: whether a call of it waits that the share has room for.
func (r *replay) looked(class quotashare.Class) {
	waiting := &r.shortOf[class]
	for waiting.Len() > 0 && !waiting.queue[0].waits {
		heap.Pop(waiting)
	}
	short := waiting.Len() > 0 && r.book.used[class]+waiting.queue[0].Estimate <= r.book.shares[class]
	switch from := r.shortFrom[class]; {
	case short && from < 0:
		r.shortFrom[class] = r.now
	case !short && from >= 0:
		r.history.short(class, from, r.now)
		r.shortFrom[class] = -1
	}
}

// picture shows the history what the window holds.
func (r *replay) picture() {
	if !r.history.higher(r.book.total()) {
		return
	}
	var kept quotashare.ClassTokens
	if r.window != nil {
		for class, c := range r.window.Stats().Classes {
			kept[class] = max(c.Held-c.Used, 0)
		}
	}
	r.history.picture(r.book.used, kept)
}

func (r *replay) close() *history {
	for class, from := range r.shortFrom {
		if from >= 0 {
			r.history.short(quotashare.Class(class), from, r.trace.Length)
		}
	}
	if r.window != nil {
		r.history.advice = r.window.Stats().Advice()
	}
	return &r.history
}

// The waits of the SDKs after a 429.
const (
	firstBackoff  = 500 * time.Millisecond
	longestWait   = 8 * time.Second
	backoffJitter = 0.25
)

// backoff returns how long a caller waits whom the provider answered 429 so many times.
func (r *replay) backoff(times int) time.Duration {
	wait := longestWait
	if times <= 4 {
		wait = firstBackoff << (times - 1)
	}
	return wait - time.Duration(backoffJitter*unit(r.jitter)*float64(wait))
}

// A queue is a heap of calls, the one that happens next first.
type queue []*call

func (q queue) Len() int      { return len(q) }
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q queue) Less(i, j int) bool {
	return q[i].next < q[j].next || q[i].next == q[j].next && q[i].plan < q[j].plan
}
func (q *queue) Push(x any) { *q = append(*q, x.(*call)) }
func (q *queue) Pop() any {
	last := len(*q) - 1
	c := (*q)[last]
	(*q)[last], *q = nil, (*q)[:last]
	return c
}

// waitingCalls are a heap of calls that wait, and of some that no longer do, the one with the smallest estimate first.
type waitingCalls struct{ queue }

func (w waitingCalls) Less(i, j int) bool { return w.queue[i].Estimate < w.queue[j].Estimate }
