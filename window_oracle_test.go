package quotashare_test

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/quotashare/quotashare"
)

// The oracle is the Window written down as plainly as it can be: it keeps every charge and every refusal, and adds all
// of them up again for every question. It is slow, and it shares no code with the Window but the conversion of
// fractions to tokens, Quota.Limits, which has tests of its own.
type oracle struct {
	quota  quotashare.Quota
	limits [quotashare.NumClasses]quotashare.Limits
	window time.Duration
	spans  []time.Duration // the last 1, 2, ... of the parts of the window over which the pace is taken

	// reading is the newest reading of the clock, and now is the time of the window: the sum of the clock's steps.
	reading time.Time
	now     time.Duration

	charges  []*oracleCharge
	refusals []oracleRefusal

	// peaks holds the highest demand of each class in each part of the window's time, by the number of the part.
	peaks map[int64]quotashare.ClassTokens
}

// An oracleCharge is shared by the oracle and the grant that settles it.
type oracleCharge struct {
	at     time.Duration
	class  quotashare.Class
	tokens int64
	ended  bool // settled or cancelled: whatever follows has no effect
}

type oracleRefusal struct {
	at     time.Duration
	class  quotashare.Class
	tokens int64
}

func newOracle(quota quotashare.Quota, reading time.Time) *oracle {
	o := &oracle{
		window:  cmp.Or(quota.Window, time.Minute),
		reading: reading,
		peaks:   map[int64]quotashare.ClassTokens{0: {}},
	}
	o.setQuota(quota)
	return o
}

func (o *oracle) setQuota(quota quotashare.Quota) {
	quota.Pace = cmp.Or(quota.Pace, 12)
	o.quota = quota
	for class := range o.limits {
		o.limits[class] = quota.Limits(quotashare.Class(class))
	}
	o.spans = nil
	for k := 1; k <= quota.Pace; k++ {
		span := new(big.Int).Quo(times(int64(o.window), k), wide(int64(quota.Pace)))
		o.spans = append(o.spans, time.Duration(span.Int64()))
	}
}

// look reads the clock.
func (o *oracle) look(reading time.Time) {
	step := reading.Sub(o.reading)
	if step < 0 && step >= -o.window/600 {
		return // an old reading that arrives late
	}
	o.reading = reading
	o.advance(o.now + min(max(step, 0), 3*o.window))
}

// advance lets time pass, in which nothing happens but that things leave the window.
func (o *oracle) advance(instant time.Duration) {
	for part := o.part(o.now) + 1; part <= o.part(instant); part++ {
		o.peaks[part] = o.asked(time.Duration(part) * o.partLength())
	}
	o.now = instant

	// What can never count again is dropped to keep the oracle from being slower than it must be.
	o.charges = slices.DeleteFunc(o.charges, func(c *oracleCharge) bool { return o.now-c.at >= o.window })
	o.refusals = slices.DeleteFunc(o.refusals, func(r oracleRefusal) bool { return o.now-r.at >= o.window })
	maps.DeleteFunc(o.peaks, func(part int64, _ quotashare.ClassTokens) bool { return part < o.part(o.now)-12 })
}

// partLength is the length of a twelfth of the window, rounded up.
func (o *oracle) partLength() time.Duration { return (o.window + 11) / 12 }

func (o *oracle) part(instant time.Duration) int64 { return int64(instant / o.partLength()) }

// charged returns the tokens charged to the class in the given time before the instant.
func (o *oracle) charged(class quotashare.Class, instant, span time.Duration) int64 {
	var sum int64
	for _, c := range o.charges {
		if c.class == class && instant-c.at < span {
			sum = addTokens(sum, c.tokens)
		}
	}
	return sum
}

// asked returns what each class asked for in the window before the instant: what it was charged, and what it was
// refused.
func (o *oracle) asked(instant time.Duration) quotashare.ClassTokens {
	var asked quotashare.ClassTokens
	for class := range asked {
		asked[class] = o.charged(quotashare.Class(class), instant, o.window)
	}
	for _, r := range o.refusals {
		if instant-r.at < o.window {
			asked[r.class] = addTokens(asked[r.class], r.tokens)
		}
	}
	return asked
}

// remember keeps what is asked for now as a peak, if it is one. It is called after every change.
func (o *oracle) remember() {
	part := o.part(o.now)
	o.peaks[part] = highest(o.peaks[part], o.asked(o.now))
}

func (o *oracle) usage() quotashare.Usage {
	usage := quotashare.Usage{Demand: o.demand()}
	for i := range quotashare.NumClasses {
		class := quotashare.Class(i)
		usage.Used[class] = o.used(class)
		usage.Recent[class] = o.recent(class)
	}
	return usage
}

func (o *oracle) used(class quotashare.Class) int64 { return o.charged(class, o.now, o.window) }

func (o *oracle) recent(class quotashare.Class) int64 {
	var recent int64
	for i, span := range o.spans {
		recent = max(recent, o.charged(class, o.now, span)/int64(i+1))
	}
	return recent
}

func (o *oracle) demand() quotashare.ClassTokens {
	var demand quotashare.ClassTokens
	for part := o.part(o.now) - 12; part <= o.part(o.now); part++ {
		demand = highest(demand, o.peaks[part])
	}
	return demand
}

// rule decides as section 4 of the design says. It reports whether the class may have the tokens now, and why.
func (o *oracle) rule(class quotashare.Class, tokens int64) (bool, quotashare.Reason) {
	if tokens < 1 || class >= quotashare.NumClasses {
		return false, quotashare.ReasonInvalid
	}

	limits := o.limits[class]
	demand := o.demand()
	estimate := wide(tokens)

	total := new(big.Int)
	floors := new(big.Int)       // of the other classes
	unusedFloors := new(big.Int) // what they have not used of them
	unusedHolds := new(big.Int)  // what they have not used of what is held for them
	for i, theirs := range o.limits {
		other := quotashare.Class(i)
		used := wide(o.used(other))
		total = plus(total, used)
		if other == class {
			continue
		}
		floor := wide(theirs.Floor)
		hold := smaller(plus(wide(demand[other]), floor), wide(theirs.Share))
		floors = plus(floors, floor)
		unusedFloors = plus(unusedFloors, larger(minus(floor, used), wide(0)))
		unusedHolds = plus(unusedHolds, larger(minus(hold, used), wide(0)))
	}

	if above(estimate, minus(wide(o.quota.Tokens), floors)) || tokens > limits.Ceiling {
		return false, quotashare.ReasonTooLarge
	}

	mine := wide(o.used(class))
	room := minus(wide(o.quota.Tokens), total)

	if !above(plus(mine, estimate), wide(limits.Share)) {
		room = plus(room, wide(o.quota.Overdraft))
		switch {
		case above(estimate, room):
			return false, quotashare.ReasonQuotaFull
		case above(estimate, minus(room, unusedFloors)):
			return false, quotashare.ReasonReserved
		}
		return true, quotashare.ReasonOwnShare
	}

	free := minus(room, unusedHolds)
	ceiling := wide(limits.Ceiling)
	switch {
	case above(estimate, room):
		return false, quotashare.ReasonQuotaFull
	case above(estimate, free):
		return false, quotashare.ReasonReserved
	case above(plus(mine, estimate), ceiling):
		return false, quotashare.ReasonCapped
	case o.quota.Pace > 1 && !above(smaller(plus(free, mine), ceiling), times(o.recent(class), o.quota.Pace)):
		return false, quotashare.ReasonPaced
	}
	return true, quotashare.ReasonBorrowed
}

// acquire is Window.TryAcquire. The charge is nil for a refusal.
func (o *oracle) acquire(reading time.Time, class quotashare.Class, tokens int64) (*oracleCharge, quotashare.Decision) {
	o.look(reading)
	admitted, reason := o.rule(class, tokens)
	decision := quotashare.Decision{Admitted: admitted, Reason: reason}
	switch {
	case admitted:
		made := &oracleCharge{at: o.now, class: class, tokens: tokens}
		o.charges = append(o.charges, made)
		o.remember()
		return made, decision
	case reason == quotashare.ReasonInvalid || reason == quotashare.ReasonTooLarge:
		return nil, decision
	}

	decision.RetryAfter = o.untilAdmitted(class, tokens)
	switch class {
	case quotashare.Background:
		decision.RetryAfter = max(decision.RetryAfter, o.window/30, 1)
	case quotashare.Batch:
		decision.RetryAfter = max(decision.RetryAfter, o.window/12, 1)
	}
	if tokens <= o.limits[class].Share {
		o.refusals = append(o.refusals, oracleRefusal{at: o.now, class: class, tokens: tokens})
		o.remember()
	}
	return nil, decision
}

// settle is Grant.Settle.
func (o *oracle) settle(reading time.Time, c *oracleCharge, actual int64) {
	if c.ended {
		return
	}
	c.ended = true
	if actual < 0 {
		return // nobody knows what was used, so nothing changes and the clock is not read
	}
	o.look(reading)
	if o.now-c.at < o.window {
		c.tokens = actual
		o.remember()
	}
}

// cancel is Grant.Cancel: a call that was not sent used nothing.
func (o *oracle) cancel(reading time.Time, c *oracleCharge) { o.settle(reading, c, 0) }

// untilAdmitted tries every future instant at which anything changes, until the class may have the tokens. It returns
// -1, which no Window says, if that never happens.
func (o *oracle) untilAdmitted(class quotashare.Class, tokens int64) time.Duration {
	return o.until(class, tokens, func(reason quotashare.Reason) bool {
		return reason == quotashare.ReasonOwnShare || reason == quotashare.ReasonBorrowed
	})
}

// until is untilAdmitted for any reason.
func (o *oracle) until(class quotashare.Class, tokens int64, wanted func(quotashare.Reason) bool) time.Duration {
	later := *o
	later.charges = slices.Clone(o.charges)
	later.refusals = slices.Clone(o.refusals)
	later.peaks = maps.Clone(o.peaks)
	for _, instant := range o.changes() {
		later.advance(instant)
		if _, reason := later.rule(class, tokens); wanted(reason) {
			return instant - o.now
		}
	}
	return -1
}

// changes returns the instants to come at which usage changes if nothing happens: where a charge leaves the window or a
// part of it over which the pace is taken, and where a part of the window's time begins.
func (o *oracle) changes() []time.Duration {
	var instants []time.Duration
	for _, c := range o.charges {
		instants = append(instants, c.at+o.window)
		for _, span := range o.spans {
			instants = append(instants, c.at+span)
		}
	}
	// After a window nothing is asked for any more, and thirteen parts later the last peak is forgotten.
	for part := o.part(o.now) + 1; part <= o.part(o.now+o.window)+14; part++ {
		instants = append(instants, time.Duration(part)*o.partLength())
	}
	slices.Sort(instants)
	instants = slices.Compact(instants)
	return slices.DeleteFunc(instants, func(instant time.Duration) bool { return instant <= o.now })
}

// entries returns how many charges or refusals of a class are in the window, whichever is more, for the class of which
// there are most.
func (o *oracle) entries() int {
	var charges, refusals [quotashare.NumClasses]int
	for _, c := range o.charges {
		charges[c.class]++
	}
	for _, r := range o.refusals {
		refusals[r.class]++
	}
	return max(slices.Max(charges[:]), slices.Max(refusals[:]))
}

// addTokens adds two counts of tokens. The sum stops at the largest int64.
func addTokens(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

func highest(a, b quotashare.ClassTokens) quotashare.ClassTokens {
	for class := range a {
		a[class] = max(a[class], b[class])
	}
	return a
}

// The rule is written in numbers that cannot overflow.

func wide(n int64) *big.Int          { return big.NewInt(n) }
func plus(a, b *big.Int) *big.Int    { return new(big.Int).Add(a, b) }
func minus(a, b *big.Int) *big.Int   { return new(big.Int).Sub(a, b) }
func times(a int64, b int) *big.Int  { return new(big.Int).Mul(wide(a), wide(int64(b))) }
func above(a, b *big.Int) bool       { return a.Cmp(b) > 0 }
func larger(a, b *big.Int) *big.Int  { return slices.MaxFunc([]*big.Int{a, b}, (*big.Int).Cmp) }
func smaller(a, b *big.Int) *big.Int { return slices.MinFunc([]*big.Int{a, b}, (*big.Int).Cmp) }

// A duel drives a Window and the oracle with the same random steps, and compares what they say.
type duel struct {
	t      *testing.T
	random *rand.Rand
	seed   uint64
	steps  []string // what was done, for the message of a failure

	reading time.Time // what the clock shows
	window  *quotashare.Window
	oracle  *oracle

	grants []*duelGrant // of all that was admitted, and of some refusals
	retry  duelRetry    // the last refusal that can be waited for

	moves   float64 // how often the clock moves instead of a call being made
	leaps   float64 // how often such a move is not a short one
	stride  time.Duration
	portion int64   // into how many of the usual calls the quota can be divided
	odd     float64 // how often a call is not of the usual size
	patient bool    // usage is compared now and then only, so that looking at it cannot matter

	reasons [quotashare.NumReasons]int
	settles map[string]int
}

// mostEntries is how many charges, or refusals, of a class may be in the window, but for a few. The Window merges none
// below 300.
const mostEntries = 240

type duelGrant struct {
	grant  quotashare.Grant
	charge *oracleCharge // nil for the grant of a refusal
}

type duelRetry struct {
	class  quotashare.Class
	tokens int64
	at     time.Duration
}

func newDuel(t *testing.T, seed uint64, random *rand.Rand, quota quotashare.Quota) *duel {
	t.Helper()
	d := &duel{
		t:       t,
		random:  random,
		seed:    seed,
		reading: time.Date(2026, time.March, 29, 2, 0, 0, 0, time.UTC),
		settles: map[string]int{},
	}
	d.moves = 0.1 + 0.5*d.random.Float64()
	d.leaps = 0.5 * math.Pow(d.random.Float64(), 3)
	d.portion = 4 << d.random.IntN(8)
	d.odd = math.Pow(d.random.Float64(), 2)
	d.patient = d.random.IntN(4) == 0

	d.did("NewWindow(%+v)", quota)
	window, err := quotashare.NewWindow(quota, quotashare.WithClock(func() time.Time { return d.reading }))
	if err != nil {
		d.fail("NewWindow: %v", err)
	}
	d.window, d.oracle = window, newOracle(quota, d.reading)
	d.stride = d.oracle.window>>(3+d.random.IntN(8)) + 1
	return d
}

func (d *duel) did(format string, arguments ...any) {
	d.steps = append(d.steps, fmt.Sprintf(format, arguments...))
}

func (d *duel) fail(format string, arguments ...any) {
	d.t.Helper()
	last := d.steps[max(0, len(d.steps)-12):]
	d.t.Fatalf("seed %d, step %d: %s\nthe last steps:\n\t%s",
		d.seed, len(d.steps)-1, fmt.Sprintf(format, arguments...), strings.Join(last, "\n\t"))
}

// step does one random thing and compares.
func (d *duel) step() {
	d.t.Helper()
	switch chance := d.random.Float64(); {
	case d.oracle.entries() >= mostEntries && d.random.IntN(20) == 0:
		d.moveClock(d.oracle.window)
	case chance < d.moves:
		d.moveClock(d.randomMove())
	default:
		switch choice := d.random.IntN(40); {
		case choice < 29 && d.oracle.entries() < mostEntries:
			class := d.randomClass()
			d.acquire(class, d.randomTokens(class))
		case choice < 31 && d.retry.at > d.oracle.now:
			d.comeBack()
		case choice < 32:
			d.setQuota()
		case choice < 33 && d.random.IntN(4) == 0:
			d.burst()
		default:
			d.end()
		}
	}
	if !d.patient || d.random.IntN(8) == 0 {
		d.compare()
	}
}

func (d *duel) compare() {
	d.t.Helper()
	d.oracle.look(d.reading)
	if diff := gocmp.Diff(d.oracle.usage(), d.window.Usage()); diff != "" {
		d.fail("usage (- oracle, + Window) at %v:\n%s", d.oracle.now, diff)
	}
}

// acquire asks both for a call, and compares the decisions.
func (d *duel) acquire(class quotashare.Class, tokens int64) {
	d.t.Helper()
	d.did("TryAcquire(%v, %d)", class, tokens)
	made, want := d.oracle.acquire(d.reading, class, tokens)
	g := &duelGrant{charge: made}
	var got quotashare.Decision
	g.grant, got = d.window.TryAcquire(class, tokens)
	if diff := gocmp.Diff(want, got); diff != "" {
		d.fail("decision (- oracle, + Window) at %v:\n%s\nusage: %+v", d.oracle.now, diff, d.oracle.usage())
	}
	d.reasons[got.Reason]++
	if got.Admitted || d.random.IntN(20) == 0 {
		d.grants = append(d.grants, g)
	}
	if got.RetryAfter > 0 {
		d.retry = duelRetry{class, tokens, d.oracle.now + got.RetryAfter}
	}
}

// burst asks for many small calls, nanoseconds apart.
func (d *duel) burst() {
	d.t.Helper()
	class := quotashare.Class(d.random.IntN(quotashare.NumClasses))
	for range min(d.random.IntN(120), mostEntries-d.oracle.entries()) {
		d.acquire(class, 1+upTo(d.random, d.oracle.quota.Tokens/1000))
		d.moveClock(time.Duration(d.random.IntN(4)))
	}
}

// comeBack asks again at exactly the instant of the last hint. Others may have come first.
func (d *duel) comeBack() {
	d.t.Helper()
	d.moveClock(d.retry.at - d.oracle.now)
	d.acquire(d.retry.class, d.retry.tokens)
}

// end settles or cancels a random grant, which may have been settled or cancelled before. The newest are the likeliest.
func (d *duel) end() {
	if len(d.grants) == 0 {
		return
	}
	back := 1 + int(float64(len(d.grants))*math.Pow(d.random.Float64(), 3))
	g := d.grants[max(0, len(d.grants)-back)]
	cancel := d.random.IntN(3) == 0
	actual := d.randomActual(g.charge)

	if g.charge == nil {
		d.did("Settle and Cancel of the grant of a refusal")
		g.grant.Settle(actual)
		g.grant.Cancel()
		return
	}
	if d.oracle.usage().Demand[g.charge.class] == math.MaxInt64 {
		// A sum that came to the largest int64 has stopped there. The oracle still knows what lies beyond, and the
		// Window does not: what is taken off then, it takes off the largest int64. No account is so large, and nothing
		// is taken off here as long as such a sum may be in the window.
		cancel, actual = false, max(actual, g.charge.tokens)
	}
	kind := "settled"
	switch late := d.oracle.now-g.charge.at >= d.oracle.window; {
	case g.charge.ended:
		kind = "ended before"
	case late:
		kind = "late"
	case cancel:
		kind = "cancelled"
	}
	d.settles[kind]++

	if cancel {
		d.did("Cancel of %v, %d charged at %v", g.charge.class, g.charge.tokens, g.charge.at)
		d.oracle.cancel(d.reading, g.charge)
		g.grant.Cancel()
		return
	}
	d.did("Settle(%d) of %v, %d charged at %v", actual, g.charge.class, g.charge.tokens, g.charge.at)
	d.oracle.settle(d.reading, g.charge, actual)
	g.grant.Settle(actual)
}

// setQuota sets another quota, or one that cannot be set.
func (d *duel) setQuota() {
	d.t.Helper()
	quota := oracleQuota(d.random)
	length := quota.Window
	quota.Window = d.oracle.window
	if d.random.IntN(4) > 0 { // about as large as the last one
		quota.Tokens = addTokens(1+upTo(d.random, d.oracle.quota.Tokens/2), d.oracle.quota.Tokens/2)
		quota.Overdraft = upTo(d.random, min(quota.Overdraft, quota.Tokens))
	}
	switch d.random.IntN(8) {
	case 0:
		spoilers := []func(){
			func() { quota.Tokens = 0 },
			func() { quota.Window = -1 },
			func() { quota.Shares = quotashare.Fractions{quotashare.Interactive: 0.9, quotashare.Batch: 0.2} },
			func() { quota.Shares[quotashare.Batch] = math.NaN() },
			func() { quota.Floors[quotashare.Background] = 1.5 },
			func() { quota.Ceilings[quotashare.Interactive] = 1.5 },
			func() { quota.Pace = 13 },
			func() { quota.Overdraft = -1 },
		}
		spoilers[d.random.IntN(len(spoilers))]()
		d.did("SetQuota of an invalid quota, %+v", quota)
		if err := d.window.SetQuota(quota); err == nil {
			d.fail("SetQuota gave no error")
		}
		return
	case 1:
		if length == 0 {
			length = time.Minute
		}
		if length != d.oracle.window {
			quota.Window = length
			d.did("SetQuota of another window, %+v", quota)
			if err := d.window.SetQuota(quota); err == nil {
				d.fail("SetQuota gave no error")
			}
			return
		}
	case 2, 3: // the same quota, a little different
		quota = d.oracle.quota
		quota.Pace = 1 + d.random.IntN(12)
		quota.Overdraft = upTo(d.random, quota.Tokens/4)
	case 4:
		if d.oracle.window == time.Minute {
			quota.Window = 0 // which is the same
		}
	}
	d.did("SetQuota(%+v)", quota)
	if err := d.window.SetQuota(quota); err != nil {
		d.fail("SetQuota: %v", err)
	}
	d.oracle.setQuota(quota)
}

func (d *duel) moveClock(by time.Duration) {
	d.did("clock %v at %v", by, d.oracle.now)
	d.reading = d.oracle.reading.Add(by)
}

// randomMove returns a step of the clock, from its newest reading.
func (d *duel) randomMove() time.Duration {
	random, window, now := d.random, d.oracle.window, d.oracle.now
	if random.Float64() >= d.leaps {
		return randomDuration(random, d.stride)
	}
	oneAside := time.Duration(random.IntN(3) - 1)
	switch random.IntN(17) {
	case 0:
		return 0
	case 1, 2:
		return time.Duration(1 + random.IntN(3))
	case 3, 4: // to a hint, or beside it
		if d.retry.at > now {
			return d.retry.at - now + oneAside
		}
	case 5, 6, 7: // to where a charge expires, or beside it
		if n := len(d.oracle.charges); n > 0 {
			if random.IntN(2) == 0 {
				n = min(n, 5) // the oldest, lest all of the others leave at once
			}
			return max(d.oracle.charges[random.IntN(n)].at+window-now+oneAside, 0)
		}
	case 8: // to where a charge leaves a part over which the pace is taken
		if n := len(d.oracle.charges); n > 0 {
			pace := time.Duration(d.oracle.quota.Pace)
			step := d.oracle.charges[random.IntN(n)].at + window/pace*(1+randomDuration(random, pace)) - now + oneAside
			return max(step, 0)
		}
	case 9, 10: // to where a part begins
		next := time.Duration(d.oracle.part(now)+1+random.Int64N(14)) * d.oracle.partLength()
		return next - now + oneAside
	case 11: // an old reading
		return -randomDuration(random, window/600+1)
	case 12: // as far back as an old reading may be, and beyond
		return -window/600 + oneAside
	case 13: // set back
		return -randomDuration(random, 3*window)
	case 14: // a long pause
		return window + randomDuration(random, 4*window)
	case 15:
		const centuries = 2 * 100 * 365 * 24 * time.Hour
		pauses := []time.Duration{
			window, 3 * window, 3*window + 1, window * time.Duration(1+random.IntN(60)), centuries, -centuries,
		}
		return pauses[random.IntN(len(pauses))]
	}
	return randomDuration(random, window)
}

func (d *duel) randomClass() quotashare.Class {
	if d.random.IntN(60) == 0 {
		return quotashare.Class(quotashare.NumClasses + d.random.IntN(256-quotashare.NumClasses))
	}
	return quotashare.Class(d.random.IntN(quotashare.NumClasses))
}

func (d *duel) randomTokens(class quotashare.Class) int64 {
	random, quota := d.random, d.oracle.quota
	if random.Float64() >= d.odd {
		return 1 + upTo(random, 2*(quota.Tokens/d.portion))
	}
	oneAside := random.Int64N(3) - 1
	var limits quotashare.Limits
	var used, left int64
	left = quota.Tokens
	if class < quotashare.NumClasses {
		limits = d.oracle.limits[class]
		usage := d.oracle.usage()
		used = usage.Used[class]
		for _, other := range usage.Used {
			left -= min(left, other)
		}
	}
	switch random.IntN(20) {
	case 0:
		return 0
	case 1:
		return -1 - random.Int64N(math.MaxInt64)
	case 2, 3:
		return 1 + random.Int64N(3)
	case 4, 5, 6:
		return max(limits.Share-used, 0) + oneAside
	case 7, 8:
		return min(limits.Largest, math.MaxInt64-1) + oneAside
	case 9:
		return min(limits.Share, math.MaxInt64-1) + oneAside
	case 10, 11:
		return min(left, math.MaxInt64-1) + oneAside
	case 12:
		return quota.Tokens - random.Int64N(quota.Tokens)
	case 13:
		return math.MaxInt64 - random.Int64N(math.MaxInt64)
	case 14, 15, 16:
		return 1 + upTo(random, limits.Largest/2)
	}
	return 1 + upTo(random, limits.Share/2)
}

// randomActual returns what a call used, compared to what it was charged.
func (d *duel) randomActual(c *oracleCharge) int64 {
	if c == nil {
		return d.random.Int64()
	}
	switch d.random.IntN(10) {
	case 0:
		return 0
	case 1:
		return -1 - d.random.Int64N(math.MaxInt64)
	case 2:
		return c.tokens
	case 3, 4:
		return addTokens(c.tokens, upTo(d.random, d.oracle.quota.Tokens/8))
	case 5:
		if d.random.IntN(8) == 0 {
			return math.MaxInt64 - d.random.Int64N(3)
		}
		return addTokens(c.tokens, 1)
	}
	return upTo(d.random, c.tokens)
}

// upTo returns a number from 0 to the limit.
func upTo(random *rand.Rand, limit int64) int64 { return int64(random.Uint64N(uint64(limit) + 1)) }

// randomDuration returns a duration below the limit.
func randomDuration(random *rand.Rand, limit time.Duration) time.Duration {
	return time.Duration(random.Int64N(int64(limit)))
}

// oracleQuota returns a valid random quota.
func oracleQuota(random *rand.Rand) quotashare.Quota {
	quota := quotashare.Quota{
		Tokens: []int64{
			1 + random.Int64N(12), 100, 1000 + random.Int64N(1000), 2_000_000, 1 << 40,
			math.MaxInt64 - random.Int64N(2),
		}[random.IntN(6)],
		Window: []time.Duration{
			0, time.Minute, time.Second, 7*time.Second + 13, 600, 601, 12 * 600, 24 * time.Hour, 97,
		}[random.IntN(9)],
		Pace: random.IntN(13),
	}
	shares := quotashare.DefaultShares
	if random.IntN(4) > 0 {
		// Cut the whole in four, of which the last is for nobody, and sometimes empty.
		cuts := []float64{random.Float64(), random.Float64(), random.Float64()}
		if random.IntN(2) == 0 {
			cuts[0] = 1
		}
		if random.IntN(2) == 0 { // decimal fractions, as people write them
			for i, cut := range cuts {
				cuts[i] = math.Round(cut*100) / 100
			}
		}
		slices.Sort(cuts)
		shares = quotashare.Fractions{cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1]}
		random.Shuffle(len(shares), func(i, j int) { shares[i], shares[j] = shares[j], shares[i] })
		if shares == (quotashare.Fractions{}) {
			shares = quotashare.DefaultShares
		}
		quota.Shares = shares
	}
	switch random.IntN(5) {
	case 0: // the default
	case 1:
		quota.Floors = quotashare.NoFloors
	case 2:
		quota.Floors = shares
	default:
		for class, share := range shares {
			quota.Floors[class] = share * random.Float64()
		}
	}
	for class, share := range shares {
		switch random.IntN(8) {
		case 0:
			quota.Ceilings[class] = share
		case 1, 2:
			quota.Ceilings[class] = share + (1-share)*random.Float64()
		case 3:
			if random.IntN(3) == 0 {
				quota.Ceilings[class] = quotashare.Closed
			}
		}
	}
	if random.IntN(3) == 0 {
		quota.Overdraft = upTo(random, quota.Tokens/int64(1+random.IntN(10)))
	}
	return quota
}

func TestWindowEqualsOracle(t *testing.T) {
	t.Parallel()
	const steps = 400
	seeds, enough := many(100), many(100)
	var reasons [quotashare.NumReasons]int
	settles := map[string]int{}
	for seed := range uint64(seeds) {
		random := rand.New(rand.NewPCG(seed, 20))
		d := newDuel(t, seed, random, oracleQuota(random))
		for range steps {
			d.step()
		}
		for reason, count := range d.reasons {
			reasons[reason] += count
		}
		for kind, count := range d.settles {
			settles[kind] += count
		}
	}

	// The steps are random, so see that they came to everything that is to be compared.
	for reason := quotashare.ReasonOwnShare; reason < quotashare.NumReasons; reason++ {
		if reason != quotashare.ReasonQueued && reasons[reason] < enough {
			t.Errorf("only %d decisions were %v", reasons[reason], reason)
		}
	}
	for _, kind := range []string{"settled", "cancelled", "late", "ended before"} {
		if settles[kind] < enough {
			t.Errorf("only %d settles were of the kind %q", settles[kind], kind)
		}
	}
	t.Logf("decisions by reason: %v; settles: %v", reasons, settles)
}

// As long as a Window merges no charges, each of them leaves to the nanosecond, however close together they are.
func TestWindowEqualsOracleInACrowd(t *testing.T) {
	t.Parallel()
	for seed := range uint64(5) {
		random := rand.New(rand.NewPCG(seed, 22))
		d := newDuel(t, seed, random, quotashare.Quota{Tokens: 1_000_000, Pace: 1 + random.IntN(12)})
		for d.oracle.entries() < mostEntries {
			d.acquire(quotashare.Class(random.IntN(quotashare.NumClasses)), 1+random.Int64N(100))
			d.moveClock(time.Duration(1 + random.IntN(3)))
		}
		charges := slices.Clone(d.oracle.charges)
		for _, span := range slices.Compact([]time.Duration{d.oracle.spans[0], d.oracle.window}) {
			for _, c := range charges {
				d.moveClock(c.at + span - d.oracle.now)
				d.compare()
			}
		}
	}
}

// Whoever is told to come back is refused until a nanosecond before, is told the same instant by all refusals on the
// way, and is admitted then. It is of Interactive alone, which is told the exact instant.
func TestWindowOracleHintIsTheFirstInstantThatAdmits(t *testing.T) {
	const seeds, calls = 200, 60
	var followed [quotashare.NumReasons]int
	for seed := range uint64(seeds) {
		random := rand.New(rand.NewPCG(seed, 21))
		quota := oracleQuota(random)
		quota.Ceilings[quotashare.Interactive] = max(quota.Ceilings[quotashare.Interactive], 0) // not closed
		reading := time.Date(2026, time.March, 29, 2, 0, 0, 0, time.UTC)
		window, err := quotashare.NewWindow(quota, quotashare.WithClock(func() time.Time { return reading }))
		if err != nil {
			t.Fatalf("seed %d: NewWindow(%+v): %v", seed, quota, err)
		}
		length := window.Quota().Window

		for call := range calls {
			// The others come and go, so that there are loans, demand and charges of all ages.
			for range random.IntN(6) {
				class := quotashare.Class(random.IntN(quotashare.NumClasses))
				most := quota.Limits(class).Largest / int64(1+random.IntN(30))
				grant, _ := window.TryAcquire(class, 1+upTo(random, most))
				if random.IntN(8) == 0 {
					grant.Cancel()
				}
				reading = reading.Add(randomDuration(random, length/24+1))
			}

			most := quota.Limits(quotashare.Interactive).Largest
			tokens := max(upTo(random, most), 1)
			if random.IntN(2) == 0 {
				tokens = max(upTo(random, most/10), 1)
			}
			_, refusal := window.TryAcquire(quotashare.Interactive, tokens)
			if refusal.Admitted || refusal.Permanent() {
				continue
			}
			followed[refusal.Reason]++

			hint := refusal.RetryAfter
			told := reading.Add(hint)
			earlier := []time.Duration{0, randomDuration(random, hint), randomDuration(random, hint), hint - 1}
			slices.Sort(earlier)
			start := reading
			for _, wait := range earlier {
				reading = start.Add(wait)
				_, again := window.TryAcquire(quotashare.Interactive, tokens)
				if again.Admitted || again.RetryAfter != told.Sub(reading) {
					t.Fatalf("seed %d, call %d: %d tokens refused as %v were told to wait %v; after %v of it: %+v",
						seed, call, tokens, refusal.Reason, hint, wait, again)
				}
			}
			reading = told
			if _, then := window.TryAcquire(quotashare.Interactive, tokens); !then.Admitted {
				t.Fatalf("seed %d, call %d: %d tokens refused as %v were told to wait %v; after that: %+v",
					seed, call, tokens, refusal.Reason, hint, then)
			}
		}
	}
	for _, reason := range []quotashare.Reason{
		quotashare.ReasonQuotaFull, quotashare.ReasonReserved, quotashare.ReasonCapped, quotashare.ReasonPaced,
	} {
		if followed[reason] < 50 {
			t.Errorf("only %d refusals were %v", followed[reason], reason)
		}
	}
	t.Logf("hints followed, by reason: %v", followed)
}
