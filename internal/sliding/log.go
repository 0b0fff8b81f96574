// Package sliding remembers what happened within the last window of time, in bounded memory: a Log of tokens, and a
// Peak of a value. It knows tokens and instants; it knows no classes, no limits and no clock. Instants are
// nanoseconds since any origin, at or after it, and are given by the caller, who never lets them run backwards.
// Nothing here is safe for concurrent use.
package sliding

import (
	"math"
	"math/bits"
	"time"
)

// Grains is how many parts a window has within which charges may be merged. It sets the precision (a merged charge
// leaves at most Window/Grains late) and the memory (at most Grains+1 grains are touched by one window).
const Grains = 600

// maxCharges bounds a Log. It leaves room for a few charges beyond the Grains+1 that no merging can avoid, and fills
// an allocation of the runtime to the byte (608 * 16 = 9728), so that six logs stay below 64 KiB.
const maxCharges = 608

// crowded is how many charges a Log keeps apart before it begins to merge. Below it every charge leaves to the
// nanosecond; the other half of the room is for what a window still brings in one charge a grain.
const crowded = maxCharges / 2

// MaxParts is the largest number of parts that Spans divides a window into.
const MaxParts = 12

// A charge is some tokens at an instant. Tokens are kept as a running total, so that what was charged since any
// instant is one subtraction after one binary search. Totals wrap; only their differences mean anything.
type charge struct {
	at    int64 // the last instant of those that were merged into it: it never leaves early
	total int64 // of all charges up to and with this one
}

// A Log is an exact sliding log: a charge made at an instant a counts until a+window, and not at it.
//
// At most half of its room holds charges as they came. Beyond that, charges in the same grain of the window are merged
// and leave together, when the last of them does. The sum never exceeds math.MaxInt64: the oldest tokens are forgotten
// for the newest, so that each suffix of the log saturates just as its true sum would. What Replace takes off later is
// taken off what is left.
type Log struct {
	window int64
	grain  int64
	buf    []charge // buf[head:] is in the window, oldest first
	head   int
	before int64 // the running total before buf[head]
	edge   int64 // where the grain of the newest charge ends, if the log is crowded

	marks [MaxParts]uint16 // see within
}

// NewLog returns a Log of a window in nanoseconds, at least 1.
func NewLog(window int64) Log {
	return Log{window: window, grain: ceilDiv(window, Grains)}
}

// live returns the charges in the window, oldest first.
func (l *Log) live() []charge { return l.buf[l.head:] }

// Len returns the number of charges that are kept apart.
func (l *Log) Len() int { return len(l.buf) - l.head }

// Sum returns the tokens in the log. It is what counts at the instant of the last Expire.
func (l *Log) Sum() int64 {
	if l.Len() == 0 {
		return 0
	}
	return l.buf[len(l.buf)-1].total - l.before
}

// leaves returns the instant at which the i-th oldest charge stops counting.
func (l *Log) leaves(i int) int64 { return Add(l.buf[l.head+i].at, l.window) }

// FirstLeaving returns the first instant before limit at which a charge stops counting and ok holds, and limit if there
// is none. Once ok holds for an instant it holds for every later one.
func (l *Log) FirstLeaving(limit int64, ok func(at int64) bool) int64 {
	n := search(l.Len(), func(i int) bool { return l.leaves(i) >= limit })
	if n == 0 || !ok(l.leaves(n-1)) {
		return limit
	}
	return l.leaves(search(n-1, func(i int) bool { return ok(l.leaves(i)) }))
}

// Expire drops what no longer counts at now. It returns the instant at which the oldest charge that is left stops
// counting, and math.MaxInt64 for an empty log.
func (l *Log) Expire(now int64) (next int64) {
	for l.Len() > 0 {
		if next = l.leaves(0); now < next {
			return next
		}
		l.before = l.buf[l.head].total
		l.head++
	}
	return math.MaxInt64
}

// Add charges tokens, 0 or more, at now, to which the log must have been expired.
func (l *Log) Add(now, tokens int64) {
	l.forget(tokens)
	if n := len(l.buf); n > l.head {
		newest := &l.buf[n-1]
		if now == newest.at || now < l.edge && n-l.head >= crowded {
			newest.at = now
			newest.total += tokens
			return
		}
		tokens += newest.total
	} else {
		tokens += l.before
	}
	if len(l.buf) == cap(l.buf) {
		l.makeRoom()
	}
	l.buf = append(l.buf, charge{now, tokens})
	if l.Len() >= crowded {
		l.edge = l.grainEnd(now)
	}
}

// Replace makes the charge of from tokens that was made at the instant at, and still counts, one of to tokens.
func (l *Log) Replace(at, from, to int64) {
	live := l.live()
	// A merged charge is stamped with the last instant in it, so the charge made at an instant is the first one that
	// is not older. Most calls end soon, so it is looked for among the newest first.
	newest := len(live) - 1
	i := len(live) - search(len(live), func(back int) bool { return live[newest-back].at < at })
	if i == len(live) {
		return
	}
	held := live[i].total - l.totalBefore(i)
	change := max(to-from, -held) // less than from is left only where tokens were forgotten
	for j := i; j < len(live); j++ {
		live[j].total += change
	}
	if change > 0 && l.Sum() < 0 {
		l.drop(l.Sum() - math.MaxInt64) // wraps into what is above MaxInt64
	}
}

// After returns the tokens that were charged after the instant t.
func (l *Log) After(t int64) int64 {
	live := l.live()
	i := search(len(live), func(i int) bool { return live[i].at > t })
	return l.sumFrom(i)
}

// Slows returns the first instant, no earlier than the last Expire, at which Recent is below pace, which is above 0, if
// nothing is charged until then; it may give an earlier instant if Recent is below it already.
func (l *Log) Slows(pace int64, spans []int64) int64 {
	var at int64
	live := l.live()
	for k, span := range spans {
		// As long as the last k+1 parts hold so much, the pace is no lower. What is newer than some charge is less.
		hi, lo := bits.Mul64(uint64(pace), uint64(k+1))
		if sum := l.Sum(); hi == 0 && lo <= uint64(sum) {
			i := search(len(live), func(i int) bool { return uint64(live[i].total-l.before) > uint64(sum)-lo })
			at = max(at, Add(live[i].at, span))
		}
	}
	return at
}

// Recent returns the pace of the charges at now: the largest, over k from 1 to len(spans), of the tokens charged in
// the last spans[k-1] divided by k and rounded down. Spans rise; one Log is always asked with the same ones, between
// calls of Reset.
func (l *Log) Recent(now int64, spans []int64) int64 {
	pace := int64(0)
	for k, span := range spans {
		pace = max(pace, l.within(now, k, span)/int64(k+1))
	}
	return pace
}

// Paced reports whether Recent is at least pace, which is above 0.
func (l *Log) Paced(now, pace int64, spans []int64) bool {
	return l.paced(pace, len(spans), func(k int) int64 { return l.within(now, k, spans[k]) })
}

// PacedAt reports whether Recent will be at least pace at t, no earlier than the last Expire, if nothing is charged
// until then.
func (l *Log) PacedAt(t, pace int64, spans []int64) bool {
	return l.paced(pace, len(spans), func(k int) int64 { return l.After(t - spans[k]) })
}

// paced looks for so many parts that hold too much, the longest first: if the last k parts hold less than a pace in j of
// them allows, so do the last j, and need not be looked at.
func (l *Log) paced(pace int64, parts int, within func(k int) int64) bool {
	most := l.Sum()
	for k := parts; k > 0; k-- {
		hi, lo := bits.Mul64(uint64(pace), uint64(k))
		if hi > 0 || uint64(most) < lo {
			continue
		}
		if most = within(k - 1); uint64(most) >= lo {
			return true
		}
	}
	return false
}

// within returns the tokens charged in the k-th span before now.
func (l *Log) within(now int64, k int, span int64) int64 {
	// The mark of a span is the first charge within it. It only moves forward, so each charge is passed once a span,
	// however often it is asked for.
	i := max(int(l.marks[k]), l.head)
	for i < len(l.buf) && now-l.buf[i].at >= span {
		i++
	}
	l.marks[k] = uint16(i)
	return l.sumFrom(i - l.head)
}

// Reset makes Recent and Paced ready for other spans.
func (l *Log) Reset() { l.marks = [MaxParts]uint16{} }

// totalBefore returns the running total before the i-th oldest charge.
func (l *Log) totalBefore(i int) int64 {
	if i == 0 {
		return l.before
	}
	return l.buf[l.head+i-1].total
}

// sumFrom returns the tokens in the log less those before the i-th oldest charge.
func (l *Log) sumFrom(i int) int64 { return l.Sum() - (l.totalBefore(i) - l.before) }

// forget makes the sum small enough to take tokens more.
func (l *Log) forget(tokens int64) {
	if over := tokens - (math.MaxInt64 - l.Sum()); over > 0 {
		l.drop(over)
	}
}

// drop takes tokens from the oldest charges.
func (l *Log) drop(tokens int64) {
	floor := l.before + tokens
	for i, c := range l.live() {
		if uint64(c.total-l.before) >= uint64(tokens) {
			break
		}
		l.live()[i].total = floor
	}
	l.before = floor
}

// makeRoom makes the capacity larger than the length.
func (l *Log) makeRoom() {
	live := l.live()
	switch {
	case cap(l.buf) < maxCharges && l.head < cap(l.buf)/2 || cap(l.buf) == 0:
		l.buf = append(make([]charge, 0, min(max(2*cap(l.buf), 4), maxCharges)), live...)
	case l.head > 0:
		l.buf = l.buf[:copy(l.buf, live)]
	default:
		l.merge()
	}
	for k := range l.marks {
		l.marks[k] -= min(l.marks[k], uint16(l.head))
	}
	l.head = 0
}

// merge makes one charge of those in each grain. Grains are fixed stretches of time, so that merging twice moves
// nothing twice.
func (l *Log) merge() {
	n, edge := 0, int64(math.MinInt64)
	for _, c := range l.buf {
		if c.at < edge {
			n-- // the charge before is in the same grain; c.total has it already
		} else {
			edge = l.grainEnd(c.at)
		}
		l.buf[n] = c
		n++
	}
	l.buf = l.buf[:n]
	l.Reset()
}

func (l *Log) grainEnd(at int64) int64 { return Add(at-at%l.grain, l.grain) }

// Add returns a+b, of tokens or of instants, and math.MaxInt64 where that would overflow. Neither is negative.
func Add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// Spans returns the lengths of the last 1, 2, ... parts of the window, when it has so many parts in all, rounded down
// to nanoseconds. The last is the window itself.
func Spans(window time.Duration, parts int) []int64 {
	spans := make([]int64, parts)
	for k := range spans {
		hi, lo := bits.Mul64(uint64(window), uint64(k+1))
		span, _ := bits.Div64(hi, lo, uint64(parts))
		spans[k] = int64(span)
	}
	return spans
}

func ceilDiv(a, b int64) int64 { return (a-1)/b + 1 }

// search returns the first i of 0..n-1 for which ok holds, and n if there is none; ok is false and then true. It is
// sort.Search, but it looks at the lowest i first and then ever further ahead: what is asked of a log is mostly near
// one of its ends.
func search(n int, ok func(int) bool) int {
	lo, hi, step := 0, 0, 1
	for hi < n && !ok(hi) {
		lo = hi + 1
		hi += step
		step *= 2
	}
	hi = min(hi, n)
	for lo < hi {
		if mid := int(uint(lo+hi) >> 1); ok(mid) {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}
