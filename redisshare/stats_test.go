package redisshare

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// A pair is a Window in Redis and a quotashare.Window in one bubble, for which the same happens.
type pair struct {
	t      *testing.T
	shared *replica
	alone  *quotashare.Window
	grants [][2]*quotashare.Grant
	waited bool // some call waited, and was admitted: Redis, which was told of it, goes on to remember that for a window
}

func (b *bubbleRedis) pair(t *testing.T, quota quotashare.Quota, wait ...time.Duration) *pair {
	t.Helper()
	var here []Option
	var there []quotashare.Option
	for class, d := range wait {
		here = append(here, WithMaxWait(quotashare.Class(class), d))
		there = append(there, quotashare.WithMaxWait(quotashare.Class(class), d))
	}
	alone, err := quotashare.NewWindow(quota, there...)
	require.NoError(t, err)
	p := &pair{t: t, shared: b.replica(t, quota, here...), alone: alone}
	p.shared.usage() // from now on both know the time
	return p
}

// try makes a call by TryAcquire.
func (p *pair) try(class quotashare.Class, tokens int64) quotashare.Decision {
	p.t.Helper()
	mine, want := p.alone.TryAcquire(class, tokens)
	grant, got, err := p.shared.TryAcquire(p.t.Context(), class, tokens)
	require.NoError(p.t, err)
	want.RetryAfter, got.RetryAfter = up(want.RetryAfter), up(got.RetryAfter)
	require.Equal(p.t, want, got)
	if got.Admitted {
		p.grants = append(p.grants, [2]*quotashare.Grant{&grant, &mine})
	}
	return got
}

// acquire makes a call by Acquire, which comes back when it waits.
func (p *pair) acquire(ctx context.Context, class quotashare.Class, tokens int64) *bubbleCall {
	go func() {
		if grant, err := p.alone.Acquire(ctx, class, tokens); err == nil {
			grant.Settle(-1)
		}
	}()
	return p.shared.acquire(ctx, class, tokens)
}

// each does the same with both grants of a call.
func (p *pair) each(call int, do func(*quotashare.Grant)) {
	for _, g := range p.grants[call] {
		do(g)
	}
	synctest.Wait()
}

// same wants both to tell the same: what it was that was told last, once it was asked for.
func (p *pair) same() quotashare.Stats {
	p.t.Helper()
	usage, told := p.alone.Usage(), p.shared.usage()
	want, got := p.alone.Stats(), p.shared.Stats()
	all := got
	for c := range want.Classes {
		if p.waited {
			require.GreaterOrEqual(p.t, told.Demand[c], usage.Demand[c])
			usage.Demand[c], want.Classes[c].Held = told.Demand[c], got.Classes[c].Held
		}
		mine, theirs := &got.Classes[c], &want.Classes[c]
		require.InDelta(p.t, theirs.FillAtRefusal, mine.FillAtRefusal, 1e-9, "fill of %v at %v", quotashare.Class(c),
			time.Since(p.shared.start))
		require.InDelta(p.t, theirs.WaitTime.Seconds(), mine.WaitTime.Seconds(), late.Seconds())
		theirs.FillAtRefusal, theirs.WaitTime = mine.FillAtRefusal, mine.WaitTime
	}
	require.Equal(p.t, usage, told, "at %v", time.Since(p.shared.start))
	require.Nil(p.t, want.Shared, "it is not shared")
	got.Shared = nil
	require.Equal(p.t, want, got, "at %v", time.Since(p.shared.start))
	require.Equal(p.t, want.Advice(), got.Advice())
	return all
}

// TestStatsCountWhatHappened follows one story, in which something happens for every field.
func TestStatsCountWhatHappened(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		quota := quotashare.Quota{
			Tokens:   1000,
			Shares:   quotashare.Fractions{interactive: 0.5, background: 0.3, batchClass: 0.2},
			Floors:   quotashare.Fractions{interactive: 0.2, background: 0.1, batchClass: 0.1},
			Ceilings: quotashare.Fractions{background: 0.35},
			Pace:     2,
		}
		p := b.pair(t, quota, 30*time.Second, 2*time.Minute, -1)
		w := p.shared
		p.same()
		for _, call := range []struct {
			class  quotashare.Class
			tokens int64
			want   quotashare.Reason
		}{
			{interactive, 100, quotashare.ReasonOwnShare},
			{batchClass, 200, quotashare.ReasonOwnShare},
			{batchClass, 100, quotashare.ReasonBorrowed},
			{background, 300, quotashare.ReasonOwnShare},
			{background, 60, quotashare.ReasonCapped},
			{background, 351, quotashare.ReasonTooLarge},
			{background, 0, quotashare.ReasonInvalid},
			{quotashare.NumClasses, 1, quotashare.ReasonInvalid},
			{interactive, 350, quotashare.ReasonQuotaFull},
			{batchClass, 250, quotashare.ReasonReserved},
		} {
			require.Equal(t, call.want, p.try(call.class, call.tokens).Reason)
			p.same()
		}

		// Waits: the first ends by the longest wait of its class, the second by its context, the third before it had its
		// turn.
		w.at(10 * time.Second)
		p.each(0, func(g *quotashare.Grant) { g.Settle(60) })
		ctx, cancel := context.WithCancel(t.Context())
		expires := p.acquire(t.Context(), interactive, 400)
		leaves := p.acquire(ctx, batchClass, 150)
		behind := p.acquire(ctx, batchClass, 200)
		require.Equal(t, quotashare.ReasonQueued, p.try(interactive, 10).Reason)
		w.wakeAll() // and tell of the one behind
		s := p.same()
		require.Equal(t, 1, s.Classes[interactive].Waiting)
		require.EqualValues(t, 1, s.Classes[interactive].Refused[quotashare.ReasonQueued])
		require.EqualValues(t, 1, s.Classes[batchClass].Waits[quotashare.ReasonQueued])
		w.at(20 * time.Second)
		cancel()
		synctest.Wait()
		leaves.deniedAt(20 * time.Second)
		behind.deniedAt(20 * time.Second)
		require.EqualValues(t, 2, p.same().Classes[batchClass].WaitsCancelled)
		w.at(40 * time.Second)
		expires.deniedAt(40 * time.Second)
		require.EqualValues(t, 1, p.same().Classes[interactive].WaitsExpired)

		// One ends in an admission, when what was charged at the start leaves; and one by another quota.
		w.at(45 * time.Second)
		admitted := p.acquire(t.Context(), background, 290)
		w.at(50 * time.Second)
		p.each(2, (*quotashare.Grant).Cancel)
		p.same()
		w.at(time.Minute + late)
		admitted.admittedAfter(time.Minute, late)
		p.waited = true
		require.EqualValues(t, 1, p.same().Classes[background].WaitsAdmitted)
		tooLarge := p.acquire(t.Context(), background, 300)
		tooLarge.waits()
		smaller := quota
		smaller.Ceilings = quotashare.Fractions{background: 0.3 - 1e-3}
		smaller.Shares[background] = 0.2
		require.NoError(t, w.SetQuota(smaller))
		require.NoError(t, p.alone.SetQuota(smaller))
		synctest.Wait()
		tooLarge.deniedAt(time.Minute + late)
		require.EqualValues(t, 1, p.same().Classes[background].WaitsRefused)

		// More than was estimated is counted, late or not. What nobody knows is not, nor is whatever comes second.
		w.at(70 * time.Second)
		p.each(1, func(g *quotashare.Grant) { g.Settle(170) })
		p.each(3, func(g *quotashare.Grant) { g.Settle(-1) })
		for call := range p.grants {
			p.each(call, func(g *quotashare.Grant) {
				g.Settle(1)
				g.Cancel()
			})
		}
		s = p.same()
		require.EqualValues(t, 60, s.Classes[interactive].SettledTokens)
		require.EqualValues(t, 170, s.Classes[batchClass].SettledTokens)
		require.EqualValues(t, 100, s.Classes[batchClass].CancelledTokens)

		// What the provider counts beside.
		w.Observe(100, 0)
		p.alone.Observe(100, 0)
		synctest.Wait()
		require.Positive(t, p.same().Others)

		// What is in the window goes, and what was asked for is forgotten; what was counted stays.
		w.at(10 * time.Minute)
		p.waited = false
		s = p.same()
		require.Zero(t, s.Used)
		require.EqualValues(t, 2, s.Classes[background].Admitted)
		require.NoError(t, w.SetQuota(quota))
		require.NoError(t, p.alone.SetQuota(quota))
		p.same()
	})
}

// TestStatsEqualThoseOfAWindow: the same random steps are counted the same.
func TestStatsEqualThoseOfAWindow(t *testing.T) {
	b := newBubbleRedis(t)
	held, within, advice := uint64(0), uint64(0), 0
	for seed := range uint64(40) {
		b.bubble(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 13))
			quota := randomQuota(r)
			quota.Tokens, quota.Overdraft = 1000+r.Int64N(100_000), 0
			quota.Window = []time.Duration{6 * time.Second, time.Minute}[seed%2]
			p := b.pair(t, quota)
			for range 100 {
				p.try(quotashare.Class(r.IntN(4)), 1+r.Int64N(quota.Tokens>>r.IntN(7)))
				if n := len(p.grants); n > 0 && r.IntN(3) == 0 {
					actual := r.Int64N(quota.Tokens / 10)
					end := func(g *quotashare.Grant) { g.Settle(actual) }
					if r.IntN(4) == 0 {
						end = (*quotashare.Grant).Cancel
					}
					p.each(r.IntN(n), end)
				}
				if r.IntN(40) == 0 {
					remaining := r.Int64N(quota.Tokens)
					p.alone.Observe(remaining, 0)
					p.shared.Observe(remaining, 0)
					synctest.Wait()
				}
				time.Sleep(time.Duration(r.Int64N(quota.Window.Microseconds()/40)) * time.Microsecond)
			}
			s := p.same()
			for _, c := range s.Classes {
				held += c.Waits[quotashare.ReasonQuotaFull] + c.Refused[quotashare.ReasonQuotaFull]
				within += c.HeldUpWithinShare
			}
			advice += len(s.Advice())
		})
	}
	require.NotZero(t, held)
	require.NotZero(t, within)
	require.NotZero(t, advice)
}

// TestStatsTellWhatIsKnown: a snapshot asks nobody; it tells what Redis told last, in whatever answer.
func TestStatsTellWhatIsKnown(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w, other := b.replica(t, classQuota(interactive, 1000)), b.replica(t, classQuota(interactive, 1000))
		require.Zero(t, w.Stats().Used)
		require.EqualValues(t, 1000, w.Stats().Quota)
		require.Equal(t, "closed", w.Stats().Shared.Mode)
		other.admit(interactive, 300)
		b.forget()
		require.Zero(t, w.Stats().Used)
		require.Empty(t, b.requests)
		grant := w.admit(interactive, 100)
		require.EqualValues(t, 400, w.Stats().Used)
		require.EqualValues(t, 400, w.Stats().Classes[interactive].Used)
		require.EqualValues(t, 400, w.Stats().Classes[interactive].Held)
		w.settled(grant, 50)
		require.EqualValues(t, 350, w.Stats().Used)
		require.EqualValues(t, 1, w.Stats().Classes[interactive].Admitted, "of this replica")
	})
}

// TestStatsOfAnOutage: calls without a decision are counted as such. They say nothing of how full the window was, and
// nothing is to be advised of them.
func TestStatsOfAnOutage(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.replica(t, classQuota(interactive, 1000))
		w.admit(interactive, 900)
		w.refuse(interactive, 200)
		b.before.set(func(context.Context, *bubbleRequest) error { return errors.New("gone") })
		for range 1000 {
			_, _, err := w.TryAcquire(t.Context(), interactive, 200)
			require.ErrorIs(t, err, ErrAway)
		}
		waits := w.acquire(t.Context(), batchClass, 100)
		waits.waits()
		behind := w.acquire(t.Context(), batchClass, 100)
		_, d, err := w.TryAcquire(t.Context(), batchClass, 100)
		require.NoError(t, err)
		require.Equal(t, refusal(quotashare.ReasonQueued, quotashare.Backoff(batchClass, time.Minute)), d)

		s := w.Stats()
		require.EqualValues(t, 1000, s.Classes[interactive].Refused[quotashare.ReasonNone])
		require.EqualValues(t, 1, s.Classes[interactive].Refused[quotashare.ReasonQuotaFull])
		require.InDelta(t, 0.9, s.Classes[interactive].FillAtRefusal, 1e-9)
		require.Zero(t, s.Classes[interactive].HeldUpWithinShare)
		require.EqualValues(t, 1, s.Classes[batchClass].Waits[quotashare.ReasonNone])
		require.EqualValues(t, 1, s.Classes[batchClass].Waits[quotashare.ReasonQueued])
		require.EqualValues(t, 1, s.Classes[batchClass].Refused[quotashare.ReasonQueued])
		require.Zero(t, s.Classes[batchClass].HeldUpWithinShare)
		require.InDelta(t, 0.9, s.Classes[batchClass].FillAtRefusal, 1e-9, "as full as it was known to be")
		require.EqualValues(t, 1, s.Shared.Outages)
		require.ErrorContains(t, s.Shared.Away, "gone")
		require.Empty(t, s.Advice())

		// Nor does a replica that knew no better say that the window was empty.
		idle := b.replica(t, classQuota(interactive, 1000))
		for range 10 {
			_, _, err := idle.TryAcquire(t.Context(), interactive, 200)
			require.ErrorIs(t, err, ErrAway)
		}
		require.EqualValues(t, 10, idle.Stats().Classes[interactive].Refused[quotashare.ReasonNone])
		require.Empty(t, idle.Stats().Advice())

		b.before.set(nil)
		w.at(3 * time.Minute)
		for _, call := range []*bubbleCall{waits, behind} {
			require.True(t, call.hasEnded(), call.name)
			require.NoError(t, call.err)
		}
		require.NoError(t, w.Stats().Shared.Away)
		require.EqualValues(t, 2, w.Stats().Classes[batchClass].WaitsAdmitted)
	})
}

// TestStatsOfCorrections: what is still to be sent, and what was given up.
func TestStatsOfCorrections(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.replica(t, classQuota(interactive, 1000))
		var grants []*quotashare.Grant
		for range 40 {
			grants = append(grants, w.admit(interactive, 10))
		}
		lost := errors.New("lost")
		b.before.set(func(_ context.Context, r *bubbleRequest) error {
			if r.operation == "correct" {
				return lost
			}
			return nil
		})
		for i, g := range grants {
			g.Settle(5)
			g.Cancel()
			if i == 0 {
				synctest.Wait() // it is on its way alone
			}
		}
		require.EqualValues(t, 40, w.Stats().Shared.Pending, "one on its way is not there yet")
		synctest.Wait()
		require.EqualValues(t, 40, w.Stats().Shared.Pending)
		require.EqualValues(t, 200, w.Stats().Classes[interactive].SettledTokens)
		require.Zero(t, w.Stats().Shared.Dropped)
		w.at(6 * time.Second) // that one was given up, and the others follow
		require.EqualValues(t, 39, w.Stats().Shared.Pending)
		require.EqualValues(t, 1, w.Stats().Shared.Dropped)
		b.before.set(nil)
		w.at(10 * time.Second)
		require.Zero(t, w.Stats().Shared.Pending)
		require.EqualValues(t, 1, w.Stats().Shared.Dropped)
		w.used(10 + 39*5)
	})
}
