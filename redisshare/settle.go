package redisshare

import (
	"errors"
	"sync"
	"time"

	"github.com/quotashare/quotashare"
)

// A Correction is what Redis is told after a decision: what a call used in the end, and what the provider says. It is
// sent beside the calls, and tried again a few times.
type Correction struct {
	// Op is what it is, for a log: "settle" or "cancel" of a call, "charge" of what a local Window admitted in an outage,
	// "observe" or "throttled".
	Op        string
	Class     quotashare.Class // of a call and of a charge
	Estimated int64            // tokens that the call is charged with
	Actual    int64            // tokens that it used; of a charge those to be charged, of observe those that are left

	at   int64         // of the charge
	wait time.Duration // of observe and throttled
	made time.Time
}

// args appends the correction as the script takes it.
func (c *Correction) args(to []int64) []int64 {
	const settle, add, observe, throttled = 0, 1, 2, 3
	switch c.Op {
	case "charge":
		return append(to, add, int64(c.Class), 0, 0, c.Actual)
	case "observe": // the answer is as old as it is by now
		return append(to, observe, 0, 0, (c.wait + time.Since(c.made)).Microseconds(), c.Actual)
	case "throttled":
		return append(to, throttled, 0, 0, 0, max(c.wait-time.Since(c.made), 0).Microseconds())
	}
	return append(to, settle, int64(c.Class), c.at, c.Estimated, c.Actual)
}

const (
	maxPending = 1 << 16 // corrections; more are dropped
	batch      = 32      // corrections in one request
	tries      = 10      // of one request: four seconds, and what they take
	firstRetry = 20 * time.Millisecond
	lastRetry  = time.Second
)

var errPending = errors.New("redisshare: too many corrections are pending")

// A mailbox sends corrections, in their order, beside the calls. Its goroutine runs only while there are any.
type mailbox struct {
	deliver func([]Correction) error
	sent    func([]Correction)      // after they were delivered
	dropped func(Correction, error) // nil if nobody asks
	start   func(func()) bool       // in a goroutine, or false after Close

	mu      sync.Mutex
	pending []Correction
	sending int // those that were taken last
	running bool
	drops   uint64
}

func (m *mailbox) put(c Correction) {
	c.made = time.Now()
	m.mu.Lock()
	if len(m.pending) >= maxPending {
		m.mu.Unlock()
		m.drop([]Correction{c}, errPending)
		return
	}
	m.pending = append(m.pending, c)
	start := !m.running
	m.running = true
	m.mu.Unlock()
	if start && !m.start(func() { m.run(m.deliver) }) {
		m.run(func([]Correction) error { return ErrClosed })
	}
}

// take returns the oldest corrections, up to n of them. If there are none the mailbox no longer runs.
func (m *mailbox) take(n int) []Correction {
	m.mu.Lock()
	defer m.mu.Unlock()
	n = min(n, len(m.pending))
	some := m.pending[:n:n]
	m.pending, m.sending = m.pending[n:], n
	if n == 0 {
		m.pending, m.running = nil, false
	}
	return some
}

func (m *mailbox) run(deliver func([]Correction) error) {
	for some := m.take(batch); len(some) > 0; some = m.take(batch) {
		if err := deliver(some); err != nil {
			m.drop(some, err)
		} else {
			m.sent(some)
		}
	}
}

func (m *mailbox) drop(some []Correction, err error) {
	m.mu.Lock()
	m.drops += uint64(len(some))
	m.mu.Unlock()
	if m.dropped == nil {
		return
	}
	for _, c := range some {
		m.dropped(c, err)
	}
}

// state returns how many corrections wait to be sent, and how many were dropped.
func (m *mailbox) state() (pending int, drops uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.pending) + m.sending, m.drops
}
