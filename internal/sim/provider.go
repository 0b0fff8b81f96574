package sim

import "time"

// A Provider is the account at the provider, which enforces its quota by itself: in no window of time are more tokens
// charged than it allows. It is written as plainly as can be, and shares nothing with what decides before it, so that
// each is a check of the other.
type Provider struct {
	tokens  int64
	window  time.Duration
	charges []charge // all of them, oldest first
	expired int      // so many of them are out of the window
	used    int64    // the sum of the others
}

type charge struct {
	at     time.Duration
	tokens int64
}

// NewProvider returns an account that allows so many tokens in each window of time.
func NewProvider(tokens int64, window time.Duration) *Provider {
	return &Provider{tokens: tokens, window: window}
}

// Charge charges tokens at the instant now, or answers that they are too many (HTTP status 429) and charges nothing.
// Instants must not run backwards. The number of the charge, counted from 0, is what Settle wants.
func (p *Provider) Charge(now time.Duration, tokens int64) (number int, ok bool) {
	if tokens > p.tokens-p.Used(now) {
		return 0, false
	}
	p.charges = append(p.charges, charge{now, tokens})
	p.used += tokens
	return len(p.charges) - 1, true
}

// Settle makes a charge one of so many tokens, as if they had been charged in the first place, and reports whether it
// still counted. Out of the window it stays as it is.
func (p *Provider) Settle(now time.Duration, number int, tokens int64) bool {
	p.expire(now)
	if number < p.expired {
		return false
	}
	c := &p.charges[number]
	p.used += tokens - c.tokens
	c.tokens = tokens
	return true
}

// Used returns the tokens in the window that ends at now.
func (p *Provider) Used(now time.Duration) int64 {
	p.expire(now)
	return p.used
}

// expire lets a charge count until a window after it was made, and not at that instant.
func (p *Provider) expire(now time.Duration) {
	for p.expired < len(p.charges) && now-p.charges[p.expired].at >= p.window {
		p.used -= p.charges[p.expired].tokens
		p.expired++
	}
}
