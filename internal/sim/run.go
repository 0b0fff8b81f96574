package sim

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/quotashare/quotashare"
)

// A Scenario is all that a run needs.
type Scenario struct {
	// Quota is what the provider allows, and what the Window decides by.
	Quota quotashare.Quota

	// Undecided leaves the decision to nobody: every call goes straight to the provider. Of Quota only Tokens and
	// Window matter then.
	Undecided bool

	// Length is how long the run takes, in virtual time.
	Length time.Duration

	// Traffic is who calls.
	Traffic []Traffic

	// Seed selects the random numbers. One seed gives the same calls under every Quota, Undecided or not.
	Seed uint64
}

// Run plays a scenario from 0 to its length.
//
// Each call asks the Window. A refused caller comes back exactly when the Window said, and not earlier, until it gives
// up; one who is refused for good drops the call. What is admitted goes to the provider, which counts the estimate at
// once, and both put the actual number in its place when the call ends. A caller whom the provider answers 429 comes
// back after half a second, then one, two, four, and eight seconds from then on, each less up to a quarter at random:
// as the SDKs do, but until it gives up.
func Run(s Scenario) (*History, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	r := &run{length: s.Length, jitter: random(s.Seed, 0)}
	if err := r.open(s.Quota, s.Undecided); err != nil {
		return nil, err
	}
	for i, traffic := range s.Traffic {
		traffic.start(r, random(s.Seed, i+1))
	}
	if err := r.play(); err != nil {
		return nil, err
	}
	return &r.history, nil
}

func (s *Scenario) validate() error {
	if s.Length <= 0 {
		return fmt.Errorf("sim: length is %v: want more than 0", s.Length)
	}
	for i, traffic := range s.Traffic {
		if traffic == nil {
			return fmt.Errorf("sim: traffic[%d] is nil: want a Poisson, a Suite or a Replay", i)
		}
		if err := traffic.validate(); err != nil {
			return fmt.Errorf("sim: traffic[%d]: %w", i, err)
		}
	}
	return nil
}

// random returns the random numbers of one of the uses of a seed, so that more or fewer draws for one do not change
// those for another.
func random(seed uint64, use int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(use))) }

// A run is a scenario in progress.
type run struct {
	now    time.Duration
	length time.Duration
	events events
	count  int   // of the events ever planned
	err    error // ends the run

	window   *quotashare.Window // nil: nothing decides
	provider *Provider
	jitter   *rand.Rand
	history  History
}

// open opens the account.
func (r *run) open(quota quotashare.Quota, undecided bool) error {
	start := time.Unix(0, 0)
	window, err := quotashare.NewWindow(quota, quotashare.WithClock(func() time.Time { return start.Add(r.now) }))
	if err != nil {
		return err
	}
	quota = window.Quota() // its defaults written out
	if !undecided {
		r.window = window
	}
	r.provider = NewProvider(quota.Tokens, quota.Window)
	r.history = History{quota: quota, length: r.length}
	return nil
}

func (r *run) play() error {
	for r.err == nil && len(r.events) > 0 && r.events[0].at < r.length {
		e := heap.Pop(&r.events).(event)
		r.now = e.at
		e.do()
	}
	return r.err
}

// at plans something for an instant from now on. What is planned for one instant happens in the order of planning.
func (r *run) at(at time.Duration, do func()) {
	heap.Push(&r.events, event{at, r.count, do})
	r.count++
}

// An attempt is a call in progress.
type attempt struct {
	Call
	asked  int              // how often it was refused
	grant  quotashare.Grant // of the Window; zero where nothing decides
	charge int              // of the provider
	entry  int              // of its admission in the history
	done   func()           // what the caller does next, however the call ended; nil for nothing
}

// offer plans calls of callers who do nothing else.
func (r *run) offer(calls []Call) {
	for _, c := range calls {
		r.at(c.At, func() { r.ask(&attempt{Call: c}) })
	}
}

// ask asks for a call, for the first time or again.
func (r *run) ask(a *attempt) {
	if a.asked == 0 {
		r.history.note(entry{at: r.now, class: a.Class, what: offered, tokens: a.Estimate})
	}
	if r.window != nil {
		var d quotashare.Decision
		a.grant, d = r.window.TryAcquire(a.Class, a.Estimate)
		switch {
		case d.Permanent():
			r.drop(a)
			return
		case !d.Admitted:
			r.refuse(a, d.RetryAfter)
			return
		}
	}
	charge, ok := r.provider.Charge(r.now, a.Estimate)
	if !ok {
		a.grant.Cancel()
		r.history.note(entry{at: r.now, class: a.Class, what: tooMany})
		r.refuse(a, r.backoff(a.asked))
		return
	}
	a.charge = charge
	r.admit(a)
}

func (r *run) admit(a *attempt) {
	a.entry = r.history.note(entry{
		at: r.now, class: a.Class, what: admitted, tokens: a.Estimate, wait: r.now - a.At, held: r.provider.Used(r.now),
	})
	r.at(r.now+a.Length, func() { r.end(a) })
}

// end ends a call that was admitted.
func (r *run) end(a *attempt) {
	a.grant.Settle(a.Actual)
	if r.provider.Settle(r.now, a.charge, a.Actual) {
		r.history.settle(a.entry, a.Actual)
	}
	if a.Actual > a.Estimate {
		r.history.note(entry{at: r.now, class: a.Class, what: grew, held: r.provider.Used(r.now)})
	}
	a.over()
}

// refuse makes the caller come back after a wait, or give up before.
func (r *run) refuse(a *attempt, wait time.Duration) {
	if wait <= 0 {
		r.err = errors.New("sim: a refusal says to come back after no time at all, which would never end")
		return
	}
	r.history.note(entry{at: r.now, class: a.Class, what: refused})
	a.asked++
	// However early a caller may know that it will give up, it is there until then.
	if deadline := a.At + a.Patience; a.Patience > 0 && wait > deadline-r.now {
		r.at(deadline, func() {
			r.history.note(entry{at: r.now, class: a.Class, what: gaveUp})
			a.over()
		})
		return
	}
	r.at(r.now+wait, func() { r.ask(a) })
}

// drop ends a call that no wait can help. Whoever has more of them goes on a little later, or an endless suite of such
// calls would stop the time.
func (r *run) drop(a *attempt) {
	r.history.note(entry{at: r.now, class: a.Class, what: dropped})
	r.at(r.now+quotashare.Backoff(a.Class, r.history.quota.Window), a.over)
}

func (a *attempt) over() {
	if a.done != nil {
		a.done()
	}
}

// The waits of the SDKs after a 429.
const (
	firstBackoff  = 500 * time.Millisecond
	longestWait   = 8 * time.Second
	backoffJitter = 0.25
)

// backoff returns how long a caller waits who was refused so often before.
func (r *run) backoff(refusals int) time.Duration {
	wait := longestWait
	if refusals < 4 {
		wait = firstBackoff << refusals
	}
	return wait - time.Duration(backoffJitter*r.jitter.Float64()*float64(wait))
}

// An event is something planned.
type event struct {
	at    time.Duration
	count int
	do    func()
}

// events is a heap, the next event first.
type events []event

func (e events) Len() int      { return len(e) }
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].count < e[j].count
}
func (e *events) Push(x any) { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	*e = (*e)[:last]
	return x
}
