package quotashare_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

// A waitScript is all that is done to one Window: who asks when, how long they wait, when their calls are over, and
// when the quota changes. It says nothing of what comes of it. It is played twice: to a Window, by a goroutine for each
// call, and to the oracle, in a single thread.
type waitScript struct {
	seed    uint64
	quota   Quota
	maxWait [NumClasses]time.Duration
	calls   []*waitCall
	quotas  []waitQuota
	looks   []time.Duration // when usage is compared
}

// All instants are since the Window was made.
type waitCall struct {
	number int
	at     time.Duration
	class  Class
	tokens int64
	try    bool // TryAcquire instead of Acquire

	leaves   time.Duration // how long its context lasts: 0 for ever, negative if it is done before the call
	deadline bool          // the context ends by its deadline, and is not cancelled

	hold   time.Duration // from the admission to the end of the call, 0 if it is never told
	cancel bool          // it ends by Cancel, and not by Settle
	actual int64
}

func (c *waitCall) String() string {
	name := "Acquire"
	if c.try {
		name = "TryAcquire"
	}
	return fmt.Sprintf("call %d, at %v: %s(%v, %d), context ends after %v",
		c.number, c.at, name, c.class, c.tokens, c.leaves)
}

type waitQuota struct {
	at    time.Duration
	quota Quota
}

// A waitResult is what came of a script.
type waitResult struct {
	outcomes []waitOutcome // of the calls
	looks    []waitLook
	stats    [NumClasses]ClassStats // at the end, without what is of that instant only
}

// A waitOutcome is how a call ended. Of calls that are admitted at the same instant no order can be told, and none
// matters: the charges of one class and instant are one.
type waitOutcome struct {
	At       time.Duration
	Decision Decision // of TryAcquire or, if Acquire refused, of its error; Acquire gives no Reason for an admission
	Usage    Usage    // what the error told
	Cause    string   // what ended the wait: the context's error
}

type waitLook struct {
	Usage   Usage
	Waiting [NumClasses]int
}

// A waitSim is section 6 of the design, written down as plainly as it can be on top of the oracle of the window: time
// goes from one instant at which anything can change to the next, and at each of them the room is offered to those who
// wait, class by class.
type waitSim struct {
	*oracle
	script  *waitScript
	events  []waitEvent
	waiting [NumClasses][]*waitCall // in the order of their arrival
	result  waitResult

	cause string         // what happens now
	seen  map[string]int // how often what came about, so that the random scripts can be seen to come to everything
	clash bool           // two events are at the same instant, so that their order is not defined
}

type waitEvent struct {
	at   time.Duration
	what string
	do   func()
}

// never is later than everything. A call that waits is for the oracle a refusal of that instant, which counts as demand
// and does not grow old.
const never = time.Duration(math.MaxInt64)

// simulate plays a script to the oracle.
func (s *waitScript) simulate() *waitSim {
	sim := &waitSim{
		oracle: newOracle(s.quota, time.Time{}),
		script: s,
		result: waitResult{outcomes: make([]waitOutcome, len(s.calls)), looks: make([]waitLook, len(s.looks))},
		seen:   map[string]int{},
	}
	for _, call := range s.calls {
		sim.expect(call.at, "arrival", func() { sim.arrive(call) })
	}
	for _, q := range s.quotas {
		sim.expect(q.at, "quota", func() { sim.changeQuota(q.quota) })
	}
	for i, at := range s.looks {
		sim.expect(at, "look", func() { sim.look(&sim.result.looks[i]) })
	}
	sim.run()
	return sim
}

func (s *waitSim) expect(at time.Duration, what string, do func()) {
	for _, e := range s.events {
		s.clash = s.clash || e.at == at
	}
	s.events = append(s.events, waitEvent{at, what, do})
}

func (s *waitSim) run() {
	for {
		i := s.nextEvent()
		switch change := s.nextChange(); {
		case i < 0 && change == never:
			return
		case i < 0 || change <= s.events[i].at:
			s.advance(change)
			s.cause = "time"
		default:
			event := s.events[i]
			s.events = slices.Delete(s.events, i, i+1)
			s.advance(event.at)
			s.cause = event.what
			event.do()
			s.note()
		}
		s.serve()
	}
}

func (s *waitSim) nextEvent() int {
	next := -1
	for i, e := range s.events {
		if next < 0 || e.at < s.events[next].at {
			next = i
		}
	}
	return next
}

// nextChange returns the next instant at which somebody who waits may fit though nothing is done: where a charge leaves
// the window or a part of it over which the pace is taken, and where a part of the window's time begins.
func (s *waitSim) nextChange() time.Duration {
	if len(s.waiting[Interactive])+len(s.waiting[Background])+len(s.waiting[Batch]) == 0 {
		return never
	}
	next := time.Duration(s.part(s.now)+1) * s.partLength()
	for _, c := range s.charges {
		for _, span := range append(s.spans, s.window) {
			if leaves := c.at + span; leaves > s.now {
				next = min(next, leaves)
			}
		}
	}
	return next
}

// serve admits those who fit, one by one, until nobody does.
func (s *waitSim) serve() {
	for {
		call, reason := s.next()
		if call == nil {
			return
		}
		first := s.waiting[call.class][0] == call
		s.leave(call)
		s.admit(call, reason)
		s.stats(call).WaitsAdmitted++
		s.seen["admitted at "+s.cause]++
		if !first {
			s.seen["admitted past a larger one"]++
		}
	}
}

// next returns who is to be admitted next, or nil. Of each class it is who came first or, if that one is larger than
// the share and so can only be served by a loan, the first that is not and fits within the share.
func (s *waitSim) next() (*waitCall, Reason) {
	for class, queue := range s.waiting {
		share := s.limits[class].Share
		for i, call := range queue {
			if i > 0 && call.tokens > share {
				continue
			}
			admitted, reason := s.rule(Class(class), call.tokens)
			if admitted && (i == 0 || reason == ReasonOwnShare) {
				return call, reason
			}
			if call.tokens <= share {
				break
			}
		}
	}
	return nil, ReasonNone
}

// decide decides on a call that comes now, behind those of its class that wait.
func (s *waitSim) decide(class Class, tokens int64) (bool, Reason) {
	admitted, reason := s.rule(class, tokens)
	if reason == ReasonInvalid || reason == ReasonTooLarge {
		return false, reason
	}
	needsLoan := tokens > s.limits[class].Share-s.used(class)
	for _, ahead := range s.waiting[class] {
		if ahead.tokens <= s.limits[class].Share || needsLoan {
			return false, ReasonQueued
		}
	}
	return admitted, reason
}

// hint returns when a call that is refused now is told to come back. It leaves those of other classes who wait out, but
// what they have asked for is remembered.
func (s *waitSim) hint(class Class, tokens int64, reason Reason) time.Duration {
	alone := *s.oracle
	alone.refusals = slices.DeleteFunc(slices.Clone(s.refusals), func(r oracleRefusal) bool { return r.at == never })
	wait := time.Duration(-1)
	if reason == ReasonQueued {
		wait = s.behind(&alone, class, tokens)
	} else {
		wait = alone.untilAdmitted(class, tokens)
	}
	if class != Interactive {
		wait = max(wait, Backoff(class, s.window))
	}
	return wait
}

// behind returns when a call that is queued fits: as one with all who wait, or within the share, as one with those who
// fit within it.
func (s *waitSim) behind(alone *oracle, class Class, tokens int64) time.Duration {
	limits := s.limits[class]
	all, within := tokens, tokens
	for _, ahead := range s.waiting[class] {
		all = addTokens(all, ahead.tokens)
		if ahead.tokens <= limits.Share {
			within = addTokens(within, ahead.tokens)
		}
	}
	windows := (all - 1) / limits.Largest
	all -= windows * limits.Largest
	wait := time.Duration(windows) * s.window
	if fits, _ := alone.rule(class, all); !fits || windows == 0 {
		wait += alone.untilAdmitted(class, all)
	}
	if windows > 0 {
		s.seen["hint beyond a window"]++
	}
	if within <= limits.Share {
		s.seen["hint within the share"]++
		own := alone.until(class, within, func(reason Reason) bool { return reason == ReasonOwnShare })
		wait = min(wait, own)
	}
	return wait
}

// note brings demand up to who waits now. A call that is larger than the share does not count: a loan is never reserved
// for.
func (s *waitSim) note() {
	s.refusals = slices.DeleteFunc(s.refusals, func(r oracleRefusal) bool { return r.at == never })
	for class, queue := range s.waiting {
		for _, call := range queue {
			if call.tokens <= s.limits[class].Share {
				s.refusals = append(s.refusals, oracleRefusal{never, Class(class), call.tokens})
			}
		}
	}
	s.remember()
}

// stats returns the counts of the call's class. Those of a call of no class go nowhere.
func (s *waitSim) stats(call *waitCall) *ClassStats {
	if call.class >= NumClasses {
		return &ClassStats{}
	}
	return &s.result.stats[call.class]
}

// end writes down how a call ended.
func (s *waitSim) end(call *waitCall, decision Decision, cause string) {
	o := waitOutcome{At: s.now, Decision: decision, Cause: cause}
	switch {
	case !decision.Admitted && !call.try:
		o.Usage = s.usage()
	case decision.Admitted && !call.try:
		o.Decision.Reason = ReasonNone
	}
	s.result.outcomes[call.number] = o
	if decision.Reason != ReasonNone {
		s.seen[decision.Reason.String()]++
	}
}

func (s *waitSim) arrive(call *waitCall) {
	if !call.try && call.leaves < 0 {
		s.end(call, Decision{}, context.Canceled.Error())
		s.seen["gone before it came"]++
		return
	}
	admitted, reason := s.decide(call.class, call.tokens)
	permanent := reason == ReasonTooLarge || reason == ReasonInvalid
	switch {
	case admitted:
		s.admit(call, reason)
	case permanent || call.try || s.script.maxWait[call.class] == 0:
		s.refuse(call, reason)
	default:
		s.stats(call).Waits[reason]++
		s.holdUp(call, reason)
		s.waiting[call.class] = append(s.waiting[call.class], call)
		if wait := s.script.maxWait[call.class]; wait > 0 {
			s.expect(s.now+wait, "leaving", func() { s.giveUp(call, "") })
		}
		if call.leaves > 0 {
			cause := context.Canceled
			if call.deadline {
				cause = context.DeadlineExceeded
			}
			s.expect(s.now+call.leaves, "leaving", func() { s.giveUp(call, cause.Error()) })
		}
		s.seen["waiting"]++
	}
}

func (s *waitSim) admit(call *waitCall, reason Reason) {
	charge := &oracleCharge{at: s.now, class: call.class, tokens: call.tokens}
	s.charges = append(s.charges, charge)
	s.note()
	stats := s.stats(call)
	stats.Admitted++
	stats.EstimatedTokens = addTokens(stats.EstimatedTokens, call.tokens)
	if reason == ReasonBorrowed {
		stats.Borrowed++
	}
	s.end(call, Decision{Admitted: true, Reason: reason}, "")
	switch {
	case call.hold > 0 && call.cancel:
		s.expect(s.now+call.hold, "cancel", func() {
			stats.CancelledTokens += call.tokens
			s.settle(charge, 0)
		})
	case call.hold > 0 && call.actual >= 0:
		s.expect(s.now+call.hold, "settle", func() {
			stats.SettledTokens += call.actual
			s.settle(charge, call.actual)
		})
	}
}

func (s *waitSim) settle(c *oracleCharge, actual int64) {
	if s.now-c.at < s.window {
		c.tokens = actual
	}
}

// holdUp counts a call that is refused or has to wait.
func (s *waitSim) holdUp(call *waitCall, reason Reason) {
	if reason != ReasonQueued && call.tokens <= s.limits[call.class].Share-s.used(call.class) {
		s.stats(call).HeldUpWithinShare++
	}
}

// refuse refuses a call that does not wait. It counts as demand as long as it is within the share and nobody is ahead.
func (s *waitSim) refuse(call *waitCall, reason Reason) {
	s.stats(call).Refused[reason]++
	d := Decision{Reason: reason}
	if reason != ReasonTooLarge && reason != ReasonInvalid {
		s.holdUp(call, reason)
		d.RetryAfter = s.hint(call.class, call.tokens, reason)
		if reason != ReasonQueued && call.tokens <= s.limits[call.class].Share {
			s.refusals = append(s.refusals, oracleRefusal{s.now, call.class, call.tokens})
			s.note()
		}
	}
	s.end(call, d, "")
}

// leave takes a call out of its queue.
func (s *waitSim) leave(call *waitCall) {
	queue := &s.waiting[call.class]
	*queue = slices.DeleteFunc(*queue, func(c *waitCall) bool { return c == call })
	wait := s.now - call.at
	s.stats(call).WaitTime += wait
	for i, bound := range WaitBounds {
		if wait <= bound && (i == 0 || wait > WaitBounds[i-1]) {
			s.stats(call).WaitTimes[i]++
		}
	}
	s.note()
}

// giveUp ends a wait by the context or by the longest wait of the class, unless it has ended before. The call is told
// to come back as if it came behind all who wait then, and that is not counted as a refusal.
func (s *waitSim) giveUp(call *waitCall, cause string) {
	if !slices.Contains(s.waiting[call.class], call) {
		return
	}
	s.leave(call)
	s.serve()
	if cause == "" {
		s.stats(call).WaitsExpired++
		s.seen["longest wait over"]++
	} else {
		s.stats(call).WaitsCancelled++
		s.seen["context over"]++
	}
	admitted, reason := s.decide(call.class, call.tokens)
	if admitted {
		panic(fmt.Sprintf("%v leaves, and would have fit before", call))
	}
	s.end(call, Decision{Reason: reason, RetryAfter: s.hint(call.class, call.tokens, reason)}, cause)
}

func (s *waitSim) changeQuota(quota Quota) {
	s.setQuota(quota)
	var tooLarge []*waitCall
	for class, queue := range s.waiting {
		for _, call := range queue {
			if call.tokens > s.limits[class].Largest {
				tooLarge = append(tooLarge, call)
			}
		}
	}
	for _, call := range tooLarge {
		s.leave(call)
	}
	s.note()
	s.serve()
	for _, call := range tooLarge {
		s.stats(call).WaitsRefused++
		s.end(call, Decision{Reason: ReasonTooLarge}, "")
		s.seen["made too large"]++
	}
}

func (s *waitSim) look(look *waitLook) {
	look.Usage = s.usage()
	for class, queue := range s.waiting {
		look.Waiting[class] = len(queue)
	}
}

// play plays a script to a Window.
func (s *waitScript) play(t *testing.T) (result waitResult) {
	t.Helper()
	result.outcomes = make([]waitOutcome, len(s.calls))
	result.looks = make([]waitLook, len(s.looks))
	synctest.Test(t, func(t *testing.T) {
		w := newWaitWindow(t, s.quota, s.maxWait)
		start := time.Now()
		var all sync.WaitGroup
		for i, call := range s.calls {
			all.Go(func() {
				time.Sleep(call.at)
				grant, outcome := call.make(t, s.seed, w)
				outcome.At = time.Since(start)
				result.outcomes[i] = outcome
				if call.hold == 0 || !outcome.Decision.Admitted {
					return
				}
				time.Sleep(call.hold)
				if call.cancel {
					grant.Cancel()
				} else {
					grant.Settle(call.actual)
				}
			})
		}
		for _, q := range s.quotas {
			all.Go(func() {
				time.Sleep(q.at)
				if err := w.SetQuota(q.quota); err != nil {
					t.Errorf("seed %d: SetQuota(%+v): %v", s.seed, q.quota, err)
				}
			})
		}
		for i, at := range s.looks {
			all.Go(func() {
				time.Sleep(at)
				result.looks[i].Usage = w.Usage()
				for class, stats := range w.Stats().Classes {
					result.looks[i].Waiting[class] = stats.Waiting
				}
			})
		}
		all.Wait()
		result.stats = w.Stats().Classes
		for class := range result.stats {
			stats := &result.stats[class]
			stats.Used, stats.Share, stats.Held, stats.FillAtRefusal = 0, 0, 0, 0
		}
		time.Sleep(3 * window(s.quota))
		if diff := gocmp.Diff(Usage{}, w.Usage()); diff != "" {
			t.Errorf("seed %d: usage three windows later (- none, + Window):\n%s", s.seed, diff)
		}
	})
	return result
}

// make makes the call. At is left to the caller.
func (c *waitCall) make(t *testing.T, seed uint64, w *Window) (*Grant, waitOutcome) {
	if c.try {
		grant, decision := w.TryAcquire(c.class, c.tokens)
		return &grant, waitOutcome{Decision: decision}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	switch {
	case c.leaves < 0:
		cancel()
	case c.leaves > 0 && c.deadline:
		ctx, cancel = context.WithTimeout(ctx, c.leaves)
		defer cancel()
	case c.leaves > 0:
		defer time.AfterFunc(c.leaves, cancel).Stop()
	}
	grant, err := w.Acquire(ctx, c.class, c.tokens)
	if err == nil {
		return &grant, waitOutcome{Decision: Decision{Admitted: true}}
	}
	denied, ok := errors.AsType[*DeniedError](err)
	if !ok {
		t.Errorf("seed %d: %v: error is %v: want a *DeniedError", seed, c, err)
		return &grant, waitOutcome{}
	}
	outcome := waitOutcome{Decision: denied.Decision, Usage: denied.Usage}
	if cause := errors.Unwrap(denied); cause != nil {
		outcome.Cause = cause.Error()
		if !errors.Is(err, ctx.Err()) {
			t.Errorf("seed %d: %v: error is %v: want one that is %v", seed, c, err, ctx.Err())
		}
	}
	if denied.Class != c.class || denied.Tokens != c.tokens || denied.Quota != w.Quota() {
		t.Errorf("seed %d: %v: error is about another call or quota: %+v", seed, c, denied)
	}
	return &grant, outcome
}

func newWaitWindow(t *testing.T, quota Quota, maxWait [NumClasses]time.Duration) *Window {
	t.Helper()
	var options []Option
	for class, wait := range maxWait {
		options = append(options, WithMaxWait(Class(class), wait))
	}
	w, err := NewWindow(quota, options...)
	require.NoError(t, err)
	return w
}

// compare returns the first thing in which the results differ, or "". What differs later may come of that.
func (s *waitScript) compare(want, got *waitResult) string {
	type difference struct {
		at   time.Duration
		text string
	}
	var differences []difference
	for i, call := range s.calls {
		want, got := want.outcomes[i], got.outcomes[i]
		if diff := gocmp.Diff(want, got); diff != "" {
			differences = append(differences, difference{min(want.At, got.At), fmt.Sprintf("%v\n%s", call, diff)})
		}
	}
	for i, at := range s.looks {
		if diff := gocmp.Diff(want.looks[i], got.looks[i]); diff != "" {
			differences = append(differences, difference{at, "a look\n" + diff})
		}
	}
	if diff := gocmp.Diff(want.stats, got.stats); diff != "" {
		differences = append(differences, difference{never, "the counts at the end\n" + diff})
	}
	if len(differences) == 0 {
		return ""
	}
	first := slices.MinFunc(differences, func(a, b difference) int { return cmp.Compare(a.at, b.at) })
	return fmt.Sprintf("%d differences, the first at %v (- oracle, + Window): %s",
		len(differences), first.at, first.text)
}

// randomWaitScript returns a script that asks for more than there is.
func randomWaitScript(seed uint64) *waitScript {
	random := rand.New(rand.NewPCG(seed, 23))
	s := &waitScript{seed: seed, quota: randomWaitQuota(random)}
	length := window(s.quota)
	for class := range s.maxWait {
		switch random.IntN(5) {
		case 0: // not at all
		case 1, 2:
			s.maxWait[class] = 1 + randomDuration(random, 3*length)
		default:
			s.maxWait[class] = -1
		}
	}

	// No two instants are the same. Some are nanoseconds after another, so that much happens almost at once.
	var taken []time.Duration
	instant := func(limit time.Duration) time.Duration {
		for {
			at := 1 + randomDuration(random, limit)
			if len(taken) > 0 && random.IntN(6) == 0 {
				at = taken[random.IntN(len(taken))] + 1 + time.Duration(random.IntN(50))
			}
			if !slices.Contains(taken, at) {
				taken = append(taken, at)
				return at
			}
		}
	}

	end := length * time.Duration(1+random.IntN(4))
	portion := int64(4 << random.IntN(4))
	sparse := random.IntN(3) == 0 // nobody is there to read the clock but those who wait
	number := 10 + random.IntN(50)
	if sparse {
		number = 6 + random.IntN(8)
		portion = 2 + random.Int64N(3)
	}
	quota := s.quota
	if random.IntN(2) == 0 {
		for range 1 + random.IntN(3) {
			quota = nextWaitQuota(random, s.quota, quota)
			s.quotas = append(s.quotas, waitQuota{instant(end), quota})
		}
	}
	for i := range number {
		class := Class(random.IntN(NumClasses))
		call := &waitCall{
			number: i,
			at:     instant(end),
			class:  class,
			tokens: randomWaitTokens(random, s.quota, s.quota.Limits(class), portion),
			try:    random.IntN(4) == 0 && !sparse,
			cancel: random.IntN(3) == 0,
		}
		if call.try && random.IntN(30) == 0 {
			call.class = NumClasses + Class(random.IntN(3))
		}
		switch random.IntN(8) {
		case 0, 1, 2:
			call.leaves = 1 + randomDuration(random, 2*length)
			call.deadline = random.IntN(2) == 0
		case 3:
			if random.IntN(5) == 0 {
				call.leaves = -1
			}
		}
		// Of sums that have come to the largest int64 the Window and the oracle take off different things.
		if huge := s.quota.Tokens > math.MaxInt64/2; !huge && random.IntN(3) > 0 {
			call.hold = 1 + randomDuration(random, length/time.Duration(1+random.IntN(8)))
			if random.IntN(10) == 0 {
				call.hold += length
			}
		}
		switch tokens := max(call.tokens, 0); random.IntN(8) {
		case 0:
			call.actual = -1 // not known
		case 1:
			call.actual = addTokens(tokens, upTo(random, tokens))
		default:
			call.actual = upTo(random, tokens)
		}
		s.calls = append(s.calls, call)
	}
	if !sparse {
		for range 10 {
			s.looks = append(s.looks, instant(end+length))
		}
	}
	return s
}

// randomWaitTokens returns the size of a call, within the share of its class and above it.
func randomWaitTokens(random *rand.Rand, quota Quota, limits Limits, portion int64) int64 {
	switch random.IntN(16) {
	case 0:
		return limits.Share - 1 + random.Int64N(3)
	case 1, 2, 3: // a loan alone can serve it
		return addTokens(limits.Share, 1+upTo(random, max(limits.Largest-limits.Share-1, 0)))
	case 4, 5, 6:
		return 1 + upTo(random, limits.Share)
	case 7:
		return 1 + random.Int64N(3)
	case 8:
		if random.IntN(3) == 0 {
			return addTokens(limits.Largest-1, random.Int64N(3))
		}
	case 9:
		if random.IntN(8) == 0 {
			return -random.Int64N(3)
		}
	}
	return min(1+upTo(random, 2*(quota.Tokens/portion)), max(limits.Largest, 1))
}

// randomWaitQuota returns a valid random quota, of a window in which it is unlikely that two random instants are one.
func randomWaitQuota(random *rand.Rand) Quota {
	quota := oracleQuota(random)
	quota.Tokens = []int64{
		5 + random.Int64N(12), 100, 1000 + random.Int64N(1000), 2_000_000, math.MaxInt64 - random.Int64N(2),
	}[random.IntN(5)]
	quota.Window = []time.Duration{0, time.Minute, time.Second, 7*time.Second + 13, 24 * time.Hour}[random.IntN(5)]
	quota.Overdraft = upTo(random, min(quota.Overdraft, quota.Tokens/4))
	if random.IntN(3) == 0 {
		quota.Shares, quota.Floors, quota.Ceilings = Fractions{}, Fractions{}, Fractions{}
		if random.IntN(2) == 0 {
			quota.Floors = NoFloors
		}
	}
	return quota
}

// nextWaitQuota returns a quota to set: another size or the first one again, other shares, or one that is too small for
// almost all calls.
func nextWaitQuota(random *rand.Rand, first, last Quota) Quota {
	quota := last
	switch random.IntN(6) {
	case 0:
		return first
	case 1:
		quota.Tokens = 1 + last.Tokens/10
	case 2, 3:
		quota = randomWaitQuota(random)
		quota.Tokens, quota.Window = first.Tokens, first.Window
	default:
		quota.Tokens = addTokens(1+first.Tokens/2, upTo(random, first.Tokens))
	}
	quota.Overdraft = min(quota.Overdraft, quota.Tokens/4)
	return quota
}

// TestWaitersEqualOracle compares when and how each of many random calls ends to what section 6 of the design says, to
// the nanosecond.
func TestWaitersEqualOracle(t *testing.T) {
	t.Parallel()
	seeds := uint64(1500)
	if testing.Short() {
		seeds /= 10
	}
	seen := map[string]int{}
	for seed := range seeds {
		script := randomWaitScript(seed)
		sim := script.simulate()
		if sim.clash {
			t.Fatalf("seed %d: two events are at the same instant: take another seed", seed)
		}
		got := script.play(t)
		if diff := script.compare(&sim.result, &got); diff != "" {
			t.Fatalf("seed %d: %s", seed, diff)
		}
		for what, times := range sim.seen {
			seen[what] += times
		}
	}

	// The scripts are random, so see that they came to everything that is to be compared.
	for _, what := range []string{
		"waiting", "admitted past a larger one", "gone before it came", "context over", "longest wait over",
		"admitted at time", "admitted at settle", "admitted at cancel", "admitted at quota", "admitted at leaving",
		"made too large", "hint beyond a window", "hint within the share",
		"own_share", "borrowed", "quota_full", "reserved", "capped", "paced", "queued", "too_large", "invalid",
	} {
		if !testing.Short() && seen[what] < 20 {
			t.Errorf("%q only %d times", what, seen[what])
		}
	}
	t.Logf("seen: %v", seen)
}

// TestWakesOnlyWhoFits is about what can make room: each time exactly those are admitted who fit then, at that instant
// and not when somebody happens to look.
func TestWakesOnlyWhoFits(t *testing.T) {
	// The classes own 50, 30 and 20 tokens, and lend all that nobody asks for.
	shares := Fractions{Interactive: 0.5, Background: 0.3, Batch: 0.2}
	quota := Quota{Tokens: 100, Shares: shares, Floors: NoFloors, Pace: 1}
	paced := Quota{Tokens: 100, Shares: shares, Floors: NoFloors}
	resized := func(tokens int64) func(*Window, []*Grant) {
		return func(w *Window, _ []*Grant) {
			quota := quota
			quota.Tokens = tokens
			require.NoError(t, w.SetQuota(quota))
		}
	}

	type call struct {
		at     int // in seconds after the start
		class  Class
		tokens int64
		leaves int // the same; 0: never
	}
	full := []call{{0, Interactive, 50, 0}, {1, Background, 30, 0}, {2, Batch, 20, 0}}
	waiting := []call{
		{3, Batch, 5, 0}, {4, Batch, 6, 0},
		{5, Background, 7, 0}, {6, Interactive, 9, 0},
	}
	for _, test := range []struct {
		name  string
		quota Quota
		calls []call
		act   func(w *Window, grants []*Grant) // half a minute after the start; may be nil
		want  []string                         // how the calls end that must wait, in this order
	}{
		{
			name: "time", quota: quota, calls: slices.Concat(full, waiting),
			want: []string{"1m0s interactive 9", "1m1s background 7", "1m2s batch 5", "1m2s batch 6"},
		}, {
			name: "a call settled at less", quota: quota, calls: slices.Concat(full, waiting),
			act:  func(_ *Window, grants []*Grant) { grants[0].Settle(35) },
			want: []string{"30s interactive 9", "1m1s background 7", "1m2s batch 5", "1m2s batch 6"},
		}, {
			name: "a call settled at a little less", quota: quota, calls: slices.Concat(full, waiting),
			act:  func(_ *Window, grants []*Grant) { grants[0].Settle(42) },
			want: []string{"1m0s interactive 9", "1m1s background 7", "1m2s batch 5", "1m2s batch 6"},
		}, {
			name: "a call settled at its estimate", quota: quota, calls: slices.Concat(full, waiting),
			act:  func(_ *Window, grants []*Grant) { grants[0].Settle(50) },
			want: []string{"1m0s interactive 9", "1m1s background 7", "1m2s batch 5", "1m2s batch 6"},
		}, {
			name: "a call cancelled", quota: quota, calls: slices.Concat(full, waiting),
			act:  func(_ *Window, grants []*Grant) { grants[2].Cancel() },
			want: []string{"30s batch 5", "30s batch 6", "1m0s interactive 9", "1m1s background 7"},
		}, {
			name: "a call cancelled whose room is for the first of two only", quota: quota,
			calls: slices.Concat(full, []call{{3, Batch, 15, 0}, {4, Batch, 6, 0}}),
			act:   func(_ *Window, grants []*Grant) { grants[2].Cancel() },
			want:  []string{"30s batch 15", "1m30s batch 6"},
		}, {
			name: "a larger quota for one", quota: quota, calls: slices.Concat(full, waiting), act: resized(118),
			want: []string{"30s interactive 9", "1m1s background 7", "1m2s batch 5", "1m2s batch 6"},
		}, {
			name: "a larger quota for all", quota: quota, calls: slices.Concat(full, waiting), act: resized(200),
			want: []string{"30s batch 5", "30s batch 6", "30s background 7", "30s interactive 9"},
		}, {
			name: "a smaller quota in which one will never fit", quota: quota,
			calls: slices.Concat(full, []call{{3, Batch, 60, 0}, {4, Batch, 10, 0}}),
			act:   resized(50),
			want:  []string{"30s batch 60 too_large", "1m2s batch 10"},
		}, {
			name: "the first leaves", quota: quota,
			calls: []call{
				{0, Interactive, 50, 0}, {1, Background, 30, 0}, {2, Batch, 10, 0},
				{3, Batch, 15, 40}, {4, Batch, 4, 0}, {5, Batch, 7, 0},
			},
			want: []string{"40s batch 15 context canceled", "40s batch 4", "1m2s batch 7"},
		}, {
			name: "the second leaves, and the first still does not fit", quota: quota,
			calls: []call{
				{0, Interactive, 50, 0}, {1, Background, 30, 0}, {2, Batch, 10, 0},
				{3, Batch, 15, 0}, {4, Batch, 4, 40}, {5, Batch, 3, 0},
			},
			want: []string{"40s batch 4 context canceled", "1m2s batch 15", "1m2s batch 3"},
		}, {
			name: "interactive comes first, whoever came first", quota: quota,
			calls: []call{
				{0, Interactive, 40, 0}, {1, Background, 30, 0}, {2, Background, 30, 0},
				{3, Batch, 10, 0}, {5, Interactive, 10, 0},
			},
			act:  func(_ *Window, grants []*Grant) { grants[2].Settle(20) },
			want: []string{"30s interactive 10", "1m0s batch 10"},
		}, {
			// The 40 need a loan, and hold up the 12, which need one too until the 15 are gone. What others asked for
			// is held until it is forgotten.
			name: "within the share past a larger one", quota: quota,
			calls: []call{
				{0, Interactive, 50, 0}, {1, Background, 30, 0}, {2, Interactive, 20, 0},
				{3, Batch, 40, 0}, {4, Batch, 15, 0}, {5, Batch, 12, 0},
			},
			act:  func(_ *Window, grants []*Grant) { grants[2].Cancel() },
			want: []string{"30s batch 15", "1m30s batch 12", "2m0s batch 40"},
		}, {
			// The pace of 20 tokens is that of a third of them when two twelfths of the window are over.
			name: "pace", quota: paced,
			calls: []call{{0, Batch, 20, 0}, {1, Batch, 10, 0}, {2, Batch, 11, 0}},
			want:  []string{"10s batch 10", "15s batch 11"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWaitWindow(t, test.quota, [NumClasses]time.Duration{-1, -1, -1})
				start := time.Now()
				grants := make([]*Grant, len(test.calls))
				type end struct {
					at   time.Duration
					text string
				}
				ends := make([]end, len(test.calls))
				for i, c := range test.calls {
					go func() {
						arrives := time.Duration(c.at) * time.Second
						time.Sleep(arrives)
						ctx, cancel := context.WithCancel(t.Context())
						defer cancel()
						if c.leaves > 0 {
							time.AfterFunc(time.Duration(c.leaves-c.at)*time.Second, cancel)
						}
						grant, err := w.Acquire(ctx, c.class, c.tokens)
						grants[i] = &grant
						at := time.Since(start)
						if at == arrives {
							return
						}
						text := fmt.Sprintf("%v %v %d", at, c.class, c.tokens)
						if denied, ok := errors.AsType[*DeniedError](err); ok && denied.Decision.Permanent() {
							text += fmt.Sprint(" ", denied.Decision.Reason)
						} else if ok {
							text += fmt.Sprint(" ", errors.Unwrap(denied))
						}
						ends[i] = end{at, text}
					}()
				}
				time.Sleep(30 * time.Second)
				synctest.Wait()
				if test.act != nil {
					test.act(w, grants)
				}
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				slices.SortStableFunc(ends, func(a, b end) int { return cmp.Compare(a.at, b.at) })
				var got []string
				for _, e := range ends {
					if e.text != "" {
						got = append(got, e.text)
					}
				}
				require.Equal(t, test.want, got)
			})
		})
	}
}

// A stressCaller makes calls, one after the other, and counts what it is told.
type stressCaller struct {
	seed   uint64
	random *rand.Rand
	start  time.Time

	mu      sync.Mutex             // nobody ever waits for it: it is for the race detector
	stats   [NumClasses]ClassStats // what the Window must have counted of it, and whether it waits
	charges []oracleCharge
}

const (
	// A tick is longer than what charges are merged over. A window, a twelfth of it and the parts of a pace are whole
	// ticks, so all that grows old does so at a tick.
	stressTick   = time.Millisecond
	stressWindow = 60 * stressTick

	// At a beat the quota changes and many contexts end, so that many calls are admitted and given up at one instant.
	stressBeat = 5 * stressTick
)

// TestStress has thousands of callers do everything at once. All that happens is at the ticks of one clock, so that
// arrivals, admissions, settles, cancels, the ends of contexts and of the longest waits, and changes of the quota meet
// at one instant, where goroutines that run in parallel race for the order. Between two ticks, when nothing can happen,
// the Window must count just what its callers were told.
func TestStress(t *testing.T) {
	const rounds = 3
	seeds, callers := uint64(2), 4000
	if testing.Short() {
		seeds, callers = 1, 1000
	}
	quotas := []Quota{
		{Tokens: 10_000, Floors: NoFloors},
		{Tokens: 4_000},
		{Tokens: 40_000, Pace: 1},
		{Tokens: 12_000, Floors: ElasticFloors, Pace: 1},
		{Tokens: 6_000, Shares: Fractions{Interactive: 0.1, Background: 0.1, Batch: 0.8}, Overdraft: 2_000},
		// With the last two most who wait, or all of a class, will never fit.
		{Tokens: 100},
		{Tokens: 10_000, Floors: NoFloors, Ceilings: Fractions{Interactive: 0.7, Batch: Closed}},
	}
	for i := range quotas {
		quotas[i].Window = stressWindow
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			w := newWaitWindow(t, quotas[0], [NumClasses]time.Duration{Background: stressWindow, Batch: -1})
			start := time.Now()
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			all := make([]*stressCaller, callers)
			var running sync.WaitGroup
			for i := range all {
				c := &stressCaller{seed: seed, random: rand.New(rand.NewPCG(seed, uint64(i))), start: start}
				all[i] = c
				running.Go(func() {
					for range rounds {
						c.sleep(stressWindow)
						c.call(ctx, t, w)
					}
				})
			}
			running.Go(func() {
				random := rand.New(rand.NewPCG(seed, math.MaxUint64))
				for i := range 60 {
					time.Sleep(stressBeat)
					next := i % (len(quotas) - 2)
					if random.IntN(20) == 0 && i < 59 {
						next = len(quotas) - 1 - random.IntN(2)
					}
					if err := w.SetQuota(quotas[next]); err != nil {
						t.Error(err)
					}
				}
			})
			over := make(chan struct{})
			go func() {
				running.Wait()
				close(over)
			}()

			var counted, most [NumClasses]ClassStats
			time.Sleep(stressTick / 2)
			for ended := false; !ended; {
				time.Sleep(7 * stressTick)
				synctest.Wait()
				select {
				case <-over:
					ended = true
				default:
				}
				diff := ""
				if counted, diff = stressCounts(w, all); diff == "" && time.Since(start) > time.Minute {
					diff = "somebody waits for ever"
				}
				if diff != "" {
					stop()
					<-over
					t.Fatalf("seed %d, at %v: counts (- callers, + Window): %s", seed, time.Since(start), diff)
				}
				for class := range most {
					most[class].Waiting = max(most[class].Waiting, counted[class].Waiting)
				}
			}
			for class, stats := range counted {
				require.Zero(t, stats.Waiting)
				require.Positive(t, stats.Admitted)
				require.Positive(t, stats.Refused[ReasonTooLarge]+stats.WaitsRefused)
				require.Equal(t, class != int(Interactive), stats.WaitsCancelled > 0)
				require.Equal(t, class == int(Background), stats.WaitsExpired > 0)
			}
			t.Logf("seed %d took %v; up to %d and %d waited",
				seed, time.Since(start), most[Background].Waiting, most[Batch].Waiting)
			time.Sleep(stressWindow)
			require.Equal(t, ClassTokens{}, w.Usage().Used, "seed %d: one window later", seed)
			time.Sleep(2 * stressWindow)
			require.Equal(t, Usage{}, w.Usage(), "seed %d: three windows later", seed)
		})
	}
}

// ticks returns a random number of ticks, up to the limit.
func (c *stressCaller) ticks(limit time.Duration) time.Duration {
	return stressTick * randomDuration(c.random, limit/stressTick+1)
}

func (c *stressCaller) sleep(limit time.Duration) { time.Sleep(max(c.ticks(limit), stressTick)) }

// count changes what the caller has counted of a class.
func (c *stressCaller) count(class Class, change func(*ClassStats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.stats[class])
}

// call makes a call and, if it is admitted, ends it in any of the ways there are.
func (c *stressCaller) call(ctx context.Context, t *testing.T, w *Window) {
	class := Class(c.random.IntN(NumClasses))
	tokens := 1 + c.random.Int64N(400)
	if c.random.IntN(20) == 0 {
		tokens = []int64{0, 10 * tokens, math.MaxInt64}[c.random.IntN(3)]
	}
	grant, admitted := c.ask(ctx, t, w, class, tokens)
	if !admitted {
		return
	}
	at, last := time.Since(c.start), len(c.charges)
	c.count(class, func(s *ClassStats) {
		s.Admitted++
		s.EstimatedTokens += tokens
		c.charges = append(c.charges, oracleCharge{at: at, class: class, tokens: tokens})
	})

	c.sleep(stressWindow)
	var end func()
	switch actual := c.random.Int64N(tokens + 1); c.random.IntN(4) {
	case 0:
		return
	case 1:
		end = grant.Cancel
		c.count(class, func(s *ClassStats) {
			s.CancelledTokens += tokens
			c.charges[last].tokens = 0
		})
	default:
		end = func() { grant.Settle(actual) }
		c.count(class, func(s *ClassStats) {
			s.SettledTokens += actual
			c.charges[last].tokens = actual
		})
	}
	// Some calls are ended by two at once, of whom one counts.
	var both sync.WaitGroup
	for range 1 + c.random.IntN(2) {
		both.Go(end)
	}
	both.Wait()
}

// ask asks for a call, with patience or without.
func (c *stressCaller) ask(ctx context.Context, t *testing.T, w *Window, class Class, tokens int64) (*Grant, bool) {
	if c.random.IntN(4) == 0 {
		grant, d := w.TryAcquire(class, tokens)
		if !d.Admitted {
			c.count(class, func(s *ClassStats) { s.Refused[d.Reason]++ })
		}
		return &grant, d.Admitted
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	after := c.ticks(2 * stressWindow)
	if c.random.IntN(2) == 0 {
		after = (time.Since(c.start) + after).Truncate(stressBeat) + stressBeat - time.Since(c.start)
	}
	switch c.random.IntN(8) {
	case 0:
		ctx, cancel = context.WithTimeout(ctx, after)
		defer cancel()
	case 1, 2:
		defer time.AfterFunc(after, cancel).Stop()
	}
	c.count(class, func(s *ClassStats) { s.Waiting = 1 })
	grant, err := w.Acquire(ctx, class, tokens)
	c.count(class, func(s *ClassStats) {
		s.Waiting = 0
		if err == nil {
			return
		}
		denied, ok := errors.AsType[*DeniedError](err)
		switch cause := errors.Unwrap(err); {
		case !ok || cause != nil && !errors.Is(err, ctx.Err()):
			t.Errorf("seed %d, at %v: error is %v", c.seed, time.Since(c.start), err)
		case cause != nil && denied.Decision.Reason != ReasonNone: // none: it was done before, which is not counted
			s.WaitsCancelled++
		case cause == nil && class == Background && !denied.Decision.Permanent():
			s.WaitsExpired++
		case cause == nil:
			s.Refused[denied.Decision.Reason]++
		}
	})
	return &grant, err == nil
}

// stressCounts returns what the callers were told, and how what the Window counts differs.
func stressCounts(w *Window, callers []*stressCaller) (want [NumClasses]ClassStats, diff string) {
	now := time.Since(callers[0].start)
	for _, c := range callers {
		c.mu.Lock()
		for class, stats := range c.stats {
			sum := &want[class]
			sum.Waiting += stats.Waiting
			sum.Admitted += stats.Admitted
			for reason, calls := range stats.Refused {
				sum.Refused[reason] += calls
			}
			sum.EstimatedTokens += stats.EstimatedTokens
			sum.SettledTokens += stats.SettledTokens
			sum.CancelledTokens += stats.CancelledTokens
			sum.WaitsCancelled += stats.WaitsCancelled
			sum.WaitsExpired += stats.WaitsExpired
		}
		for _, charge := range c.charges {
			if now-charge.at < stressWindow {
				want[charge.class].Used += charge.tokens
			}
		}
		c.mu.Unlock()
	}
	got := w.Stats().Classes
	for class := range got {
		stats := &got[class]
		// The callers do not know this, nor whether they waited before they were refused for good.
		stats.Share, stats.Held, stats.FillAtRefusal, stats.HeldUpWithinShare = 0, 0, 0, 0
		stats.Borrowed, stats.Waits, stats.WaitsAdmitted = 0, [NumReasons]uint64{}, 0
		stats.WaitTime, stats.WaitTimes = 0, [NumWaitBounds]uint64{}
		stats.Refused[ReasonTooLarge] += stats.WaitsRefused
		stats.WaitsRefused = 0
	}
	return want, gocmp.Diff(want, got)
}

// TestAContextEndsAsTheCallIsAdmitted has contexts end just before the room comes, so that calls are often admitted
// whose goroutine has been woken by the context. Either may win. What was admitted is charged, and nothing else.
func TestAContextEndsAsTheCallIsAdmitted(t *testing.T) {
	admitted := uint64(0)
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			w := newWaitWindow(t, wholeQuota(100), [NumClasses]time.Duration{-1, -1, -1})
			full, d := w.TryAcquire(Interactive, 100)
			require.True(t, d.Admitted)
			ctx, cancel := context.WithCancel(t.Context())
			errs := make([]error, 50)
			for i := range errs {
				go func() { _, errs[i] = w.Acquire(ctx, Interactive, 1) }()
			}
			synctest.Wait()
			require.Equal(t, len(errs), w.Stats().Classes[Interactive].Waiting)
			cancel()
			full.Settle(0)
			synctest.Wait()

			got := w.Stats().Classes[Interactive]
			want := uint64(0)
			for _, err := range errs {
				if err == nil {
					want++
				}
			}
			require.Equal(t, want, got.WaitsAdmitted)
			require.Equal(t, uint64(len(errs))-want, got.WaitsCancelled)
			require.Equal(t, int64(want), got.Used)
			require.Zero(t, got.Waiting)
			admitted += want
		})
	}
	t.Logf("%d calls were admitted", admitted)
}

// A busyTime is a time in which callers of each class ask for a call, wait for it, hold it for a while, settle it at
// its estimate or below, and ask again.
type busyTime struct {
	quota   Quota
	length  time.Duration
	callers [NumClasses]int
	tokens  int64 // the largest estimate; the smallest is a quarter of it

	// rest returns for how long a caller has nothing to ask for; nil: never.
	rest func(class Class, random *rand.Rand, now time.Duration) time.Duration
}

// busyStart is the time within which callers begin, so that no two ask at the same instant.
const busyStart = time.Second

// A busyCall is a call that was admitted. Instants are since the start.
type busyCall struct {
	arrived, admitted time.Duration
	actual            int64
}

// run returns the calls of each class in the order of their arrival.
func (b *busyTime) run(t *testing.T, w *Window) (calls [NumClasses][]busyCall) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), b.length)
	defer cancel()
	start := time.Now()
	var (
		all     sync.WaitGroup
		callers [NumClasses][][]busyCall
	)
	for class, number := range b.callers {
		callers[class] = make([][]busyCall, number)
		for i := range callers[class] {
			mine, class := &callers[class][i], Class(class)
			random := rand.New(rand.NewPCG(uint64(class), uint64(i)))
			all.Go(func() {
				time.Sleep(randomDuration(random, busyStart))
				for {
					if b.rest != nil {
						time.Sleep(b.rest(class, random, time.Since(start)))
					}
					tokens := b.tokens/4 + random.Int64N(b.tokens-b.tokens/4)
					call := busyCall{arrived: time.Since(start), actual: tokens/2 + random.Int64N(tokens-tokens/2)}
					grant, err := w.Acquire(ctx, class, tokens)
					if err != nil {
						if ctx.Err() == nil {
							t.Errorf("at %v: %v", call.arrived, err)
						}
						return
					}
					call.admitted = time.Since(start)
					if used := usedTotal(w); used > b.quota.Tokens {
						t.Errorf("at %v: %d tokens are charged, of %d", call.admitted, used, b.quota.Tokens)
					}
					*mine = append(*mine, call)
					time.Sleep(randomDuration(random, 10*time.Second))
					grant.Settle(call.actual)
				}
			})
		}
	}
	all.Wait()
	for class := range calls {
		calls[class] = slices.Concat(callers[class]...)
		slices.SortFunc(calls[class], func(a, b busyCall) int { return cmp.Compare(a.arrived, b.arrived) })
	}
	return calls
}

// requireOrder requires that of each class the calls were admitted in the order in which they came.
func requireOrder(t *testing.T, calls [NumClasses][]busyCall) {
	t.Helper()
	for class, calls := range calls {
		for i := 1; i < len(calls); i++ {
			require.GreaterOrEqual(t, calls[i].admitted, calls[i-1].admitted, "%v: %+v came after %+v",
				Class(class), calls[i], calls[i-1])
		}
	}
}

// requireQuota requires that no interval of one Window holds more than the quota.
func requireQuota(t *testing.T, quota Quota, calls [NumClasses][]busyCall) {
	t.Helper()
	all := slices.Concat(calls[:]...)
	slices.SortFunc(all, func(a, b busyCall) int { return cmp.Compare(a.admitted, b.admitted) })
	oldest, sum := 0, int64(0)
	for _, call := range all {
		sum += call.actual
		for ; call.admitted-all[oldest].admitted >= window(quota); oldest++ {
			sum -= all[oldest].actual
		}
		require.LessOrEqual(t, sum, quota.Tokens, "in the Window to %v", call.admitted)
	}
}

// requireGuarantee3 requires that who waits within the share and has come to the head of the class is admitted one
// Window later at the latest; where another class meanwhile woke and passed what was held for it, within one Window of
// that. A class is awake busyStart after each of its wakes, for then all that it asks for is held. What it had lent
// before is back one Window later, so that it passes what was held for it until then, and not later.
func requireGuarantee3(
	t *testing.T, quota Quota, calls [NumClasses][]busyCall, wakes [NumClasses][]time.Duration,
) (longest time.Duration) {
	t.Helper()
	length := window(quota)
	for class, calls := range calls {
		var before time.Duration // when the one before was admitted
		for _, call := range calls {
			head := max(call.arrived, before)
			before = call.admitted
			deadline := head + length
			for other, wakes := range wakes {
				for _, woke := range wakes {
					if passed := woke + busyStart + length; other != class && woke <= deadline && head <= passed {
						deadline = max(deadline, passed+length)
					}
				}
			}
			require.LessOrEqual(t, call.admitted, deadline, "%v: at the head at %v: %+v", Class(class), head, call)
			longest = max(longest, call.admitted-head)
		}
	}
	return longest
}

// TestSaturatedHours lets callers ask for more than there is for hours, and measures who was given what, and when.
func TestSaturatedHours(t *testing.T) {
	t.Parallel()
	hour := time.Hour
	if testing.Short() {
		hour /= 6
	}
	saturated := [NumClasses]time.Duration{-1, -1, -1}
	everyClassAtTheStart := [NumClasses][]time.Duration{{0}, {0}, {0}}

	t.Run("all classes", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := busyTime{
				quota:   Quota{Tokens: 2_000_000},
				length:  2 * hour,
				callers: [NumClasses]int{Interactive: 1200, Background: 500, Batch: 300},
				tokens:  16_000,
			}
			w := newWaitWindow(t, b.quota, saturated)

			// A call that can only be served by a loan waits all the time, and holds up nobody.
			var larger error
			ctx, cancel := context.WithTimeout(t.Context(), b.length)
			defer cancel()
			go func() {
				time.Sleep(time.Minute)
				_, larger = w.Acquire(ctx, Batch, b.quota.Limits(Batch).Share+1)
			}()
			calls := b.run(t, w)
			synctest.Wait()
			require.ErrorIs(t, larger, context.DeadlineExceeded)

			requireOrder(t, calls)
			requireQuota(t, b.quota, calls)
			longest := requireGuarantee3(t, b.quota, calls, everyClassAtTheStart)

			var tokens [NumClasses]float64
			total, number := 0.0, 0
			for class, calls := range calls {
				for _, call := range calls {
					tokens[class] += float64(call.actual)
				}
				total += tokens[class]
				number += len(calls)
			}
			for class, share := range DefaultShares {
				require.InDelta(t, share, tokens[class]/total, 0.02, "%v", Class(class))
			}
			require.Greater(t, total/(float64(b.quota.Tokens)*b.length.Minutes()), 0.9)
			t.Logf("%d calls, %.3g tokens: %.3g; longest time at the head %v", number, total, tokens, longest)
		})
	})

	t.Run("one inside its floor", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := busyTime{
				quota:   Quota{Tokens: 2_000_000, Floors: ElasticFloors},
				length:  hour,
				callers: [NumClasses]int{Interactive: 12, Background: 500, Batch: 300},
				tokens:  16_000,
				rest: func(class Class, random *rand.Rand, _ time.Duration) time.Duration {
					if class != Interactive {
						return 0
					}
					// Each has one call in a Window, so together they are inside the floor. Some are quiet for long.
					return time.Minute + randomDuration(random, 2*time.Minute)
				},
			}
			require.LessOrEqual(t, int64(b.callers[Interactive])*b.tokens, b.quota.Limits(Interactive).Floor)
			w := newWaitWindow(t, b.quota, saturated)
			calls := b.run(t, w)
			for _, call := range calls[Interactive] {
				require.Equal(t, call.arrived, call.admitted)
			}
			require.Greater(t, len(calls[Interactive]), int(200*hour/time.Hour))
			require.Positive(t, w.Stats().Classes[Batch].Borrowed)
			requireOrder(t, calls)
			requireQuota(t, b.quota, calls)
			t.Logf("%d calls inside the floor", len(calls[Interactive]))
		})
	})

	t.Run("one wakes now and then", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			const every = 10 * time.Minute
			b := busyTime{
				quota:   Quota{Tokens: 2_000_000, Floors: NoFloors, Pace: 1},
				length:  2 * hour,
				callers: [NumClasses]int{Interactive: 100, Background: 200, Batch: 200},
				tokens:  16_000,
				rest: func(class Class, random *rand.Rand, now time.Duration) time.Duration {
					if class != Interactive || now%every < every/2 {
						return 0
					}
					return every - now%every + randomDuration(random, busyStart)
				},
			}
			w := newWaitWindow(t, b.quota, saturated)
			calls := b.run(t, w)
			wakes := everyClassAtTheStart
			for woke := every; woke < b.length; woke += every {
				wakes[Interactive] = append(wakes[Interactive], woke)
			}
			require.Positive(t, w.Stats().Classes[Batch].Borrowed)
			requireOrder(t, calls)
			requireQuota(t, b.quota, calls)
			longest := requireGuarantee3(t, b.quota, calls, wakes)
			t.Logf("longest time at the head %v", longest)
		})
	})
}
