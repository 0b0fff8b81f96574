package sharetest

import (
	"math/bits"
	"time"

	"github.com/quotashare/quotashare"
)

// A Provider is the account at the provider, which enforces the quota by itself: what it answers 429 is not done. The
// zero Provider allows what the Quota says in an exact sliding window, and counts what calls used.
type Provider struct {
	// Tokens is what it allows in a Window; 0: what the Quota says. Another number is a quota that was configured
	// wrong.
	Tokens int64

	// Bucket makes it a token bucket that is refilled continuously, and holds what the account allows in this time. A
	// Window is usual; less is a limit that is enforced in parts, "60,000 a minute may be enforced as 1,000 a second"
	// (OpenAI's and Anthropic's rate limit guides say so): time.Second, or a tenth of it. A call larger than the bucket
	// needs a full one, and is paid off before the next. 0: no bucket, but an exact sliding window.
	Bucket time.Duration

	// CountsReserved is a provider that counts the estimate, and not what was used in the end: callers do not settle.
	CountsReserved bool
}

// A bucket is a token bucket, kept as the instant at which it is full again (GCRA): a token is the time that it takes
// to refill it.
type bucket struct {
	tokens int64         // that are refilled
	window time.Duration // in this time
	size   time.Duration
	full   time.Duration
}

// take takes tokens at the instant now, or reports that there are too few.
func (b *bucket) take(now time.Duration, tokens int64) bool {
	full := max(b.full, now) + b.time(tokens)
	if full > now+b.size && b.full > now {
		return false
	}
	b.full = min(full, 2*maxTime)
	return true
}

// put puts back tokens that were taken and not used; of less than 0, it takes more at the instant now.
func (b *bucket) put(now time.Duration, tokens int64) {
	if tokens < 0 {
		b.full = min(max(b.full, now)+b.time(-tokens), 2*maxTime)
	} else {
		b.full -= b.time(tokens)
	}
}

// time returns how long it takes to refill tokens, in whole nanoseconds.
func (b *bucket) time(tokens int64) time.Duration {
	high, low := bits.Mul64(uint64(tokens), uint64(b.window))
	if high >= uint64(b.tokens) {
		return maxTime
	}
	nanos, _ := bits.Div64(high, low, uint64(b.tokens))
	return time.Duration(min(nanos, maxTime))
}

// A book is what the account charged, written as plainly as can be. It shares nothing with what decides, so that each
// is a check of the other: a charge counts until a Window after it was made, and not at that instant.
type book struct {
	window  time.Duration
	shares  quotashare.ClassTokens
	charges []charge // all of them, oldest first
	expired int      // so many of them are out of the window
	used    quotashare.ClassTokens
	loans   func(at time.Duration, class quotashare.Class, tokens int64) // told when what a class has above its share changes
}

type charge struct {
	at     time.Duration
	tokens int64
	class  quotashare.Class
}

// charge charges tokens at the instant now, and returns the number that settle wants. Instants must not run backwards.
func (b *book) charge(now time.Duration, class quotashare.Class, tokens int64) int {
	b.add(now, class, tokens)
	b.charges = append(b.charges, charge{now, tokens, class})
	return len(b.charges) - 1
}

// settle makes a charge one of so many tokens, as if they had been charged in the first place, and reports whether it
// still counted. Out of the window it stays as it is.
func (b *book) settle(now time.Duration, number int, tokens int64) bool {
	if number < b.expired {
		return false
	}
	c := &b.charges[number]
	b.add(now, c.class, tokens-c.tokens)
	c.tokens = tokens
	return true
}

// next returns when the oldest charge leaves the window.
func (b *book) next() (at time.Duration, ok bool) {
	if b.expired == len(b.charges) {
		return 0, false
	}
	return b.charges[b.expired].at + b.window, true
}

// expire takes the oldest charge out of the window, and returns its class.
func (b *book) expire() quotashare.Class {
	c := &b.charges[b.expired]
	b.expired++
	b.add(c.at+b.window, c.class, -c.tokens)
	return c.class
}

func (b *book) add(at time.Duration, class quotashare.Class, tokens int64) {
	before := max(b.used[class]-b.shares[class], 0)
	b.used[class] += tokens
	if loan := max(b.used[class]-b.shares[class], 0) - before; loan != 0 {
		b.loans(at, class, loan)
	}
}

func (b *book) total() int64 { return sum(b.used) }
