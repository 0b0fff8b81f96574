package quotashare_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

// The guarantees of the README, each a test over random quotas and random traffic.

// clock is the time of a Window under test.
type clock struct{ now time.Time }

func newClock() *clock { return &clock{time.Date(2026, 1, 1, 2, 0, 0, 0, time.UTC)} }

func (c *clock) read() time.Time         { return c.now }
func (c *clock) advance(d time.Duration) { c.now = c.now.Add(d) }

// newTestWindow returns a Window of the quota and the clock that it reads.
func newTestWindow(t *testing.T, q Quota) (*Window, *clock) {
	t.Helper()
	c := newClock()
	w, err := NewWindow(q, WithClock(c.read))
	require.NoError(t, err)
	return w, c
}

// randomQuota returns a quota with some of everything: shares that leave something over or nothing, floors from none
// to the share, ceilings, any pace, large and small numbers, long and short windows.
func randomQuota(r *rand.Rand) Quota {
	q := Quota{
		Tokens: []int64{10, 1000, 1_000_000, 3_000_000_000}[r.IntN(4)] + r.Int64N(1000),
		Window: []time.Duration{0, time.Second, time.Minute, 7*time.Second + 13, 24 * time.Hour}[r.IntN(5)],
		Pace:   r.IntN(13),
	}
	if r.IntN(4) > 0 {
		left := 1.0
		for _, c := range r.Perm(NumClasses) {
			q.Shares[c] = left * r.Float64()
			left -= q.Shares[c]
		}
		if r.IntN(2) == 0 {
			q.Shares[r.IntN(NumClasses)] += left
		}
	}
	shares := q.Shares
	if shares == (Fractions{}) {
		shares = DefaultShares
	}
	switch r.IntN(4) {
	case 0:
		q.Floors = NoFloors
	case 1:
		for c := range q.Floors {
			q.Floors[c] = shares[c] * r.Float64()
		}
	case 2:
		q.Floors = shares
	}
	for c := range q.Ceilings {
		switch r.IntN(8) {
		case 0:
			q.Ceilings[c] = shares[c] + (1-shares[c])*r.Float64()
		case 1:
			q.Ceilings[c] = max(shares[c], 1e-6)
		case 2:
			if c != int(Interactive) {
				q.Ceilings[c] = Closed
			}
		}
	}
	return q
}

func window(q Quota) time.Duration {
	if q.Window == 0 {
		return time.Minute
	}
	return q.Window
}

// randomSize returns the size of a call: mostly small, sometimes as large as any that is admitted.
func randomSize(r *rand.Rand, l Limits) int64 {
	most := max(l.Largest, 1)
	if r.IntN(8) > 0 {
		most = max(most/int64(1+r.IntN(100)), 1)
	}
	return 1 + r.Int64N(most)
}

// many is n, or a tenth of it in a short run, as under the race detector.
func many(n int) int {
	if testing.Short() {
		return n / 10
	}
	return n
}

// eachSeed runs test with many seeds. A failure names the seed.
func eachSeed(t *testing.T, seeds int, test func(r *rand.Rand)) {
	t.Helper()
	for seed := range many(seeds) {
		func() {
			defer func() {
				if t.Failed() {
					t.Log("seed", seed)
				}
			}()
			test(rand.New(rand.NewPCG(uint64(seed), 7)))
		}()
	}
}

// A charge is what a call used in the end.
type charge struct {
	at     time.Time
	tokens int64
}

func TestGuarantee1NoIntervalHoldsMoreThanTheQuota(t *testing.T) {
	t.Parallel()
	eachSeed(t, 3000, func(r *rand.Rand) {
		q := randomQuota(r)
		if r.IntN(3) == 0 {
			q.Overdraft = r.Int64N(q.Tokens)
		}
		w, clock := newTestWindow(t, q)
		var charges []*charge
		var open []func() // settles or cancels a call that is under way
		for range 300 {
			c := Class(r.IntN(NumClasses))
			estimate := randomSize(r, q.Limits(c))
			grant, d := w.TryAcquire(c, estimate)
			if d.Admitted {
				made := &charge{clock.now, estimate}
				charges = append(charges, made)
				switch r.IntN(4) {
				case 0: // forgotten
				case 1:
					open = append(open, func() { grant.Cancel(); settle(made, clock.now, q, 0) })
				default:
					actual := r.Int64N(estimate + 1)
					open = append(open, func() { grant.Settle(actual); settle(made, clock.now, q, actual) })
				}
			}
			if len(open) > 0 && r.IntN(2) == 0 {
				i := r.IntN(len(open))
				open[i]()
				open = append(open[:i], open[i+1:]...)
			}
			require.LessOrEqual(t, usedTotal(w), q.Tokens+q.Overdraft)
			clock.advance(time.Duration(r.Int64N(int64(window(q)) / 30)))
		}
		for _, first := range charges {
			sum := int64(0)
			for _, c := range charges {
				if !c.at.Before(first.at) && c.at.Before(first.at.Add(window(q))) {
					sum += c.tokens
				}
			}
			require.LessOrEqual(t, sum, q.Tokens+q.Overdraft, "in the window from %v", first.at)
		}
	})
}

func settle(c *charge, now time.Time, q Quota, actual int64) {
	if now.Before(c.at.Add(window(q))) {
		c.tokens = actual
	}
}

func usedTotal(w *Window) (sum int64) {
	for _, used := range w.Usage().Used {
		sum += used
	}
	return sum
}

func TestGuarantee2InsideItsFloorAClassIsAdmittedAtOnce(t *testing.T) {
	inside := 0
	eachSeed(t, 3000, func(r *rand.Rand) {
		q := randomQuota(r)
		if r.IntN(3) == 0 {
			q.Overdraft = r.Int64N(q.Tokens)
		}
		w, clock := newTestWindow(t, q)
		quiet := r.IntN(NumClasses) // a class that seldom asks, so that the others have all the time to borrow from it
		for range 300 {
			c := Class(r.IntN(NumClasses))
			if int(c) == quiet && r.IntN(10) > 0 {
				continue
			}
			size := randomSize(r, q.Limits(c))
			before := w.Usage()
			_, d := w.TryAcquire(c, size)
			if before.Used[c]+size <= q.Limits(c).Floor {
				inside++
				require.True(t, d.Admitted, "%v: %d tokens inside a floor of %d: %+v, %+v", c, size, q.Limits(c).Floor, d, before)
			}
			clock.advance(time.Duration(r.Int64N(int64(window(q)) / 50)))
		}
	})
	require.Greater(t, inside, many(10_000))
}

// A loan is tokens that a class was admitted above its share, and what was held for the others at that instant.
type loan struct {
	at   time.Time
	by   Class
	held ClassTokens
}

// TestGuarantee3... follows single calls that were refused within their class's share. Such a call comes back exactly
// when it is told to, while the other classes do what they like.
func TestGuarantee3WhatIsRefusedWithinTheShareIsAdmittedOneWindowLater(t *testing.T) {
	t.Parallel()
	refused, undisturbed := 0, 0
	eachSeed(t, 2000, func(r *rand.Rand) {
		q := randomQuota(r)
		if r.IntN(2) == 0 {
			q.Floors, q.Ceilings = NoFloors, Fractions{} // all that is idle is lent
		}
		w, clock := newTestWindow(t, q)
		waiting := Class(r.IntN(NumClasses))
		share := q.Limits(waiting).Share
		if share == 0 {
			return
		}
		var (
			tokens   int64     // of the call that waits, 0 if none does
			back     time.Time // when it was told to come back
			deadline time.Time
			woke     bool
			loans    []loan
		)
		for range 2000 {
			next := clock.now.Add(time.Duration(r.Int64N(int64(window(q)) / 200)))
			if tokens > 0 && !back.After(next) {
				clock.now = back
				_, d := w.TryAcquire(waiting, tokens)
				switch {
				case d.Admitted:
					tokens = 0
					if !woke {
						undisturbed++
					}
				default:
					require.True(t, clock.now.Before(deadline), "%v refused %d tokens %v after its deadline: %+v, %+v",
						waiting, tokens, clock.now.Sub(deadline), d, w.Usage())
					back = clock.now.Add(d.RetryAfter)
				}
				// The least wait of Background and Batch may go past the deadline.
				slack := Backoff(waiting, window(q))
				require.False(t, tokens > 0 && back.After(deadline.Add(slack)), "told to come back after the deadline")
				continue
			}
			clock.now = next
			c := Class(r.IntN(NumClasses))
			l := q.Limits(c)
			before := w.Usage()
			size := randomSize(r, l)
			if c == waiting {
				// It asks seldom, so that its demand is forgotten and the others have borrowed from it by then.
				if tokens > 0 || before.Used[c] >= share || r.IntN(60) > 0 {
					continue
				}
				size = 1 + r.Int64N(share-before.Used[c])
			}
			_, d := w.TryAcquire(c, size)
			after := before.Used[c] + size
			switch {
			case d.Reason == ReasonBorrowed:
				loans = append(loans, loan{clock.now, c, held(q, before)})
			case d.Admitted:
				for _, loan := range loans {
					// The class took, within its share, what had been lent to another because nobody had asked for it.
					if loan.by != c && clock.now.Before(loan.at.Add(window(q))) && after > loan.held[c] {
						deadline, woke = clock.now.Add(window(q)), true
					}
				}
			case c == waiting && !d.Permanent() && after <= share:
				refused++
				tokens, back, deadline, woke = size, clock.now.Add(d.RetryAfter), clock.now.Add(window(q)), false
				loans = nil
			}
		}
	})
	require.Greater(t, refused, many(1_500))
	require.Greater(t, undisturbed, many(1_000))
}

func held(q Quota, u Usage) (held ClassTokens) {
	for c := range held {
		l := q.Limits(Class(c))
		held[c] = min(u.Demand[c]+l.Floor, l.Share)
	}
	return held
}

func TestGuarantee4ALoneClassReachesAllButTheOtherFloors(t *testing.T) {
	eachSeed(t, 2000, func(r *rand.Rand) {
		q := randomQuota(r)
		w, clock := newTestWindow(t, q)
		c := Class(r.IntN(NumClasses))
		most := q.Limits(c).Largest // all but the other floors, or its ceiling
		if most == 0 {
			return
		}
		size := max(most/int64(50+r.IntN(200)), 1)
		used := int64(0)
		const steps = 240
		for range steps {
			for {
				if _, d := w.TryAcquire(c, size); !d.Admitted {
					break
				}
			}
			used = max(used, w.Usage().Used[c])
			clock.advance(window(q)/steps - 1) // the last step is within the first window
		}
		require.Greater(t, used, most-size, "%v of %+v", c, q)
	})
}

func TestGuarantee7ARefusedCallIsAdmittedExactlyAtItsRetryAfter(t *testing.T) {
	t.Parallel()
	waits := 0
	for seed := range uint64(many(6000)) {
		replay := func() (w *Window, clock *clock, c Class, size int64) {
			r := rand.New(rand.NewPCG(seed, 11))
			q := randomQuota(r)
			if r.IntN(3) == 0 {
				q.Overdraft = r.Int64N(q.Tokens)
			}
			w, clock = newTestWindow(t, q)
			for range 10 + r.IntN(400) {
				c = Class(r.IntN(NumClasses))
				grant, d := w.TryAcquire(c, randomSize(r, q.Limits(c)))
				if d.Admitted && r.IntN(2) == 0 {
					grant.Settle(r.Int64N(q.Tokens / 10))
				}
				clock.advance(time.Duration(r.Int64N(int64(window(q)) / 40)))
			}
			c = Class(r.IntN(NumClasses))
			return w, clock, c, randomSize(r, q.Limits(c))
		}
		if requireExactHint(t, seed, replay) {
			waits++
		}
	}
	require.Greater(t, waits, many(1500))
}

// requireExactHint requires of the call that replay returns that, if it is refused, it is admitted exactly at its
// RetryAfter, and no nanosecond before. It reports whether that could be seen: it was not told to wait longer than it
// must. Replay makes the same Window with the same history each time.
func requireExactHint(t *testing.T, seed uint64, replay func() (*Window, *clock, Class, int64)) bool {
	t.Helper()
	w, clock, c, size := replay()
	_, refusal := w.TryAcquire(c, size)
	if refusal.Admitted || refusal.Permanent() {
		return false
	}
	require.Positive(t, refusal.RetryAfter, "seed %d", seed)
	clock.advance(refusal.RetryAfter)
	_, d := w.TryAcquire(c, size)
	require.True(t, d.Admitted, "seed %d: %v, %d tokens: %+v, and then %+v", seed, c, size, refusal, d)

	if c != Interactive && refusal.RetryAfter == Backoff(c, w.Quota().Window) {
		return false
	}
	w, clock, _, _ = replay()
	w.TryAcquire(c, size)
	clock.advance(refusal.RetryAfter - 1)
	_, d = w.TryAcquire(c, size)
	require.False(t, d.Admitted, "seed %d: %v, %d tokens: %+v, but admitted 1 ns before", seed, c, size, refusal)
	require.LessOrEqual(t, d.RetryAfter, leastWait(c, w), "seed %d", seed)
	return true
}

// TestGuarantee7InACrowd is the same for logs in which charges were merged: the hint still is when the call is admitted.
func TestGuarantee7InACrowd(t *testing.T) {
	waits := 0
	eachSeed(t, 400, func(r *rand.Rand) {
		q := randomQuota(r)
		w, clock := newTestWindow(t, q)
		var grants []*Grant
		crowd, part := Class(r.IntN(NumClasses)), int64(200)<<r.IntN(6)
		for range 500 + r.IntN(2500) {
			c := Class(r.IntN(NumClasses))
			if r.IntN(3) > 0 {
				c = crowd
			}
			size := 1 + r.Int64N(2*max(q.Limits(c).Largest/part, 1))
			grant, d := w.TryAcquire(c, size)
			if d.Admitted {
				grants = append(grants, &grant)
			}
			if len(grants) > 0 && r.IntN(4) == 0 {
				grants[max(0, len(grants)-1-r.IntN(400))].Settle(r.Int64N(2 * size))
			}
			if r.IntN(700) == 0 {
				changed := randomQuota(r)
				changed.Window = q.Window
				q = changed
				require.NoError(t, w.SetQuota(q))
			}
			clock.advance(time.Duration(r.Int64N(int64(window(q))/1000 + 1)))
		}
		c := Class(r.IntN(NumClasses))
		size := randomSize(r, q.Limits(c))
		_, refusal := w.TryAcquire(c, size)
		if refusal.Admitted || refusal.Permanent() {
			return
		}
		waits++
		clock.advance(refusal.RetryAfter)
		_, d := w.TryAcquire(c, size)
		require.True(t, d.Admitted, "%v, %d tokens: %+v, and then %+v", c, size, refusal, d)
	})
	require.Greater(t, waits, many(150))
}

func leastWait(c Class, w *Window) time.Duration {
	if c == Interactive {
		return 1
	}
	return Backoff(c, w.Quota().Window)
}

func TestGuarantee8ForgottenGrantsAndLateSettlesLeakNothing(t *testing.T) {
	eachSeed(t, 500, func(r *rand.Rand) {
		q := randomQuota(r)
		w, clock := newTestWindow(t, q)
		var grants []*Grant
		for range 200 {
			c := Class(r.IntN(NumClasses))
			grant, _ := w.TryAcquire(c, randomSize(r, q.Limits(c)))
			grants = append(grants, &grant)
			for range r.IntN(4) {
				switch g := grants[r.IntN(len(grants))]; r.IntN(3) {
				case 0:
					g.Cancel()
				default:
					g.Settle(r.Int64N(q.Tokens))
				}
			}
			clock.advance(time.Duration(r.Int64N(int64(window(q)) / 20)))
			if r.IntN(20) == 0 {
				clock.advance(-time.Duration(r.Int64N(int64(2 * window(q))))) // somebody sets the clock
				w.Usage()
			}
		}
		// A reading that is hardly older than the last counts as late, and may cost so much.
		clock.advance(window(q) + window(q)/600)
		require.Equal(t, ClassTokens{}, w.Usage().Used)
		for _, g := range grants {
			g.Settle(1)
			g.Cancel()
		}
		require.Equal(t, ClassTokens{}, w.Usage().Used)
		clock.advance(3 * window(q))
		require.Equal(t, Usage{}, w.Usage())
	})
}

// TestAHintIsSearchedAnewWhenItMust: what happens between refusals of a class shows in the last, as if the first ones had
// not been. They are of the same call, and of a smaller and a larger one.
func TestAHintIsSearchedAnewWhenItMust(t *testing.T) {
	happened := map[string]int{}
	eachSeed(t, 15_000, func(r *rand.Rand) {
		q := randomQuota(r)
		c, size := Class(r.IntN(NumClasses)), int64(0)
		if q.Limits(c).Largest == 0 {
			return
		}
		size = 1 + r.Int64N(q.Limits(c).Largest)
		less, more := size-r.Int64N(size/8+1), min(size+r.Int64N(size/8+1), q.Limits(c).Largest)
		history, what := r.Uint64(), r.IntN(9)
		asked := [][]int64{{size}, {less, more, size}}[r.IntN(2)]
		if what == 8 {
			asked = []int64{less, more}
		}
		replay := func(twice bool) (event string, d Decision) {
			r := rand.New(rand.NewPCG(history, 0))
			w, clock := newTestWindow(t, q)
			var grants []*Grant
			for range 2 + r.IntN(30) {
				d := Class(r.IntN(NumClasses))
				grant, _ := w.TryAcquire(d, 1+r.Int64N(max(q.Limits(d).Largest/4, 1)))
				grants = append(grants, &grant)
				clock.advance(time.Duration(r.Int64N(int64(w.Quota().Window) / 20)))
			}
			var before []time.Duration
			if twice {
				for _, tokens := range asked {
					_, d := w.TryAcquire(c, tokens)
					if d.Admitted {
						return "", d
					}
					before = append(before, d.RetryAfter)
				}
			}
			switch other := (c + 1 + Class(r.IntN(2))) % NumClasses; what {
			case 0, 1:
				_, d := w.TryAcquire(other, 1+r.Int64N(max(q.Limits(other).Share, 1)))
				event = d.Reason.String() + " of another class"
			case 2:
				grants[r.IntN(len(grants))].Settle(r.Int64N(100))
				event = "settle"
			case 3:
				w.Observe(r.Int64N(q.Tokens), 0)
				event = "observe"
			case 4:
				w.Throttled(time.Duration(1 + r.Int64N(int64(w.Quota().Window))))
				event = "throttled"
			case 5:
				clock.advance(time.Duration(r.Int64N(int64(w.Quota().Window) / 2)))
				event = "time"
			case 6: // Interactive is refused at once
				ctx, cancel := context.WithCancel(t.Context())
				done, tokens := make(chan struct{}), 1+r.Int64N(max(q.Limits(other).Share, 1))
				go func() {
					defer close(done)
					_, _ = w.Acquire(ctx, other, tokens)
				}()
				defer func() {
					cancel()
					<-done
				}()
				for w.Stats().Classes[other].Waiting == 0 {
					select {
					case <-done:
						return "no wait", d
					default:
						runtime.Gosched()
					}
				}
				event = "a wait of another class"
			case 7:
				other := q
				other.Tokens = q.Tokens + 1 + r.Int64N(q.Tokens)
				require.NoError(t, w.SetQuota(other))
				event = "quota"
			case 8:
				event = "nothing"
				if less < size && size < more && twice && before[0] == before[1] {
					event = "nothing, and both fit at once"
				}
			}
			_, d = w.TryAcquire(c, size)
			return event, d
		}
		event, again := replay(true)
		sameEvent, once := replay(false)
		if event == sameEvent || what == 8 && event != "" { // to be refused is to be known as demand, which may have changed what happened
			happened[event]++
			require.Equal(t, once, again, "%s, %v of %d", event, c, size)
		}
	})
	for _, event := range []string{
		"own_share of another class", "borrowed of another class", "reserved of another class", "quota_full of another class",
		"a wait of another class", "settle", "observe", "throttled", "time", "quota",
		"nothing", "nothing, and both fit at once",
	} {
		require.Greater(t, happened[event], many(20), event)
	}
}
