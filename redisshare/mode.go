package redisshare

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/quotashare/quotashare"
)

// A Mode says what is decided while Redis cannot decide: while it is away, slow, read-only or failing over, and while it
// does not know what was charged, for one window after it was flushed or lost its data. There is no default: the owner
// of the service chooses. The zero Mode is none, which New refuses.
type Mode struct {
	kind kind
	part float64
}

type kind uint8

const (
	closed kind = iota + 1
	open
	local
)

var (
	// Closed refuses: nothing is admitted while Redis is away, and never more than the quota as long as Redis keeps what it
	// confirmed. A failover may lose the newest charges, for Redis replicates behind its answers, and a flush loses all.
	// Those who were charged notice when they ask next, and nothing is admitted for a window; until then others are.
	Closed = Mode{kind: closed}

	// Open admits everything while Redis is away, and counts none of it. Where Redis has lost what was charged, it goes
	// on with what is left, so up to the quota is admitted once more.
	Open = Mode{kind: open}
)

// Local decides in each process by itself, by a quotashare.Window of so large a part of the quota, above 0 and up to 1.
// A part of 1/replicas admits no more than the quota in all. Beside that:
//
//   - As an outage begins, what Redis told last to be used takes the same part of the local quota, for one window. What
//     others charged since then is not known, so up to the quota may be admitted once more.
//   - As it ends, what the local Window holds is charged in Redis, for one window from then.
func Local(part float64) Mode { return Mode{kind: local, part: part} }

// String returns "closed", "open", "local(0.25)", and "none" for the zero Mode.
func (m Mode) String() string {
	switch m.kind {
	case closed:
		return "closed"
	case open:
		return "open"
	case local:
		return fmt.Sprintf("local(%v)", m.part)
	}
	return "none"
}

func (m Mode) validate() error {
	switch {
	case m.kind == 0:
		return errors.New("redisshare: mode is none: want Closed, Open or Local, for when Redis is away")
	case m.kind == local && !(m.part > 0 && m.part <= 1):
		return fmt.Errorf("redisshare: mode is %v: want a part of the quota above 0 and up to 1", m)
	}
	return nil
}

// localQuota returns the quota of the local Window.
func (m Mode) localQuota(q quotashare.Quota) (quotashare.Quota, error) {
	q.Tokens, q.Overdraft = m.of(q.Tokens), m.of(q.Overdraft)
	if q.Tokens < 1 {
		return q, fmt.Errorf("redisshare: mode is %v: want a part of at least one token", m)
	}
	return q, nil
}

// of returns the mode's part of the tokens, rounded down.
func (m Mode) of(tokens int64) int64 {
	whole := quotashare.Quota{Tokens: tokens, Shares: quotashare.Fractions{quotashare.Interactive: m.part}}
	return whole.Limits(quotashare.Interactive).Share
}

// How long the breaker leaves Redis alone: first, and at most, as it doubles while Redis stays away.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 2 * time.Second
)

// A breaker bounds what an outage costs: after the first request that Redis did not answer the mode decides at once, and
// a request of the breaker's own finds out, now and then and beside the calls, whether Redis is back. Nothing is asked
// while there are no calls.
type breaker struct {
	mu      sync.Mutex
	cause   error         // nil while Redis answers
	until   time.Time     // when to probe
	pause   time.Duration // from the last failure on
	probing bool
	outages uint64
}

// look returns no cause if Redis may be asked, and otherwise why not, for how long at least, and whether it is up to
// the caller to probe.
func (b *breaker) look() (wait time.Duration, probe bool, cause error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cause == nil {
		return 0, false, nil
	}
	wait = time.Until(b.until)
	probe = wait <= 0 && !b.probing
	b.probing = b.probing || probe
	return wait, probe, b.cause
}

// fail tells that Redis did not answer a call. If that begins an outage, begin is called before anybody learns of it.
func (b *breaker) fail(cause error, begin func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cause != nil {
		return // it was under way as the outage began
	}
	b.outages++
	b.pause = firstPause
	begin()
	b.leave(cause)
}

// probed tells what the probe found out.
func (b *breaker) probed(cause error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probing = false
	if cause == nil {
		b.cause = nil
		return
	}
	b.pause = min(2*b.pause, lastPause)
	b.leave(cause)
}

// leave leaves Redis alone for a while.
func (b *breaker) leave(cause error) {
	wait := b.pause
	if lost := (*lostError)(nil); errors.As(cause, &lost) {
		wait = lost.wait
	}
	b.cause, b.until = cause, time.Now().Add(wait)
}

// state returns how often Redis was away, and why it is now, nil if it is not.
func (b *breaker) state() (outages uint64, cause error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.outages, b.cause
}
