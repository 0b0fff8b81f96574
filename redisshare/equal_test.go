package redisshare

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// A duel drives a Window in Redis and a quotashare.Window with the same random steps on the same clock, and compares
// all that they say.
type duel struct {
	t      *testing.T
	r      *rand.Rand
	seed   uint64
	steps  []string
	client *redis.Client
	shared *Window
	alone  *quotashare.Window
	now    time.Time
	grants []duelGrant
	fit    struct { // the last refusal that can be waited for
		class  quotashare.Class
		tokens int64
		at     time.Time
	}
	reasons [quotashare.NumReasons]int
}

type duelGrant struct {
	shared, alone *quotashare.Grant
	tokens        int64
}

// setClock gives the script the time.
func (d *duel) setClock() {
	us := d.now.UnixMicro()
	require.NoError(d.t, d.client.HSet(context.Background(), "clock", "s", us/1e6, "us", us%1e6).Err())
}

// useClock makes a Window read the time that setClock sets.
func useClock(t *testing.T, w *Window) {
	t.Helper()
	const read = "call('TIME')"
	require.Equal(t, 1, strings.Count(source, read))
	w.server.script = redis.NewScript(strings.Replace(source, read, "call('HMGET', 'clock', 's', 'us')", 1))
}

func randomQuota(r *rand.Rand) quotashare.Quota {
	// A twelfth and a 600th of these windows are whole microseconds, as the instants of Redis are.
	window := []time.Duration{6 * time.Second, time.Minute, 600 * time.Microsecond * time.Duration(1+r.IntN(3000))}[r.IntN(3)]
	q := quotashare.Quota{
		Tokens: []int64{100, 1000, 999_983, maxTokens - 1_000_000, maxTokens}[r.IntN(5)],
		Window: window,
		Pace:   r.IntN(13),
	}
	if q.Tokens <= maxTokens/2 && r.IntN(3) == 0 {
		q.Overdraft = r.Int64N(q.Tokens)
	}
	if r.IntN(2) == 0 {
		left := 1.0
		for c := range q.Shares {
			q.Shares[c] = left * r.Float64()
			left -= q.Shares[c]
		}
	}
	shares := q.Shares
	if shares == (quotashare.Fractions{}) {
		shares = quotashare.DefaultShares
	}
	switch r.IntN(3) {
	case 0:
		q.Floors = quotashare.NoFloors
	case 1:
		for c := range q.Floors {
			q.Floors[c] = shares[c] * r.Float64()
		}
	}
	for c := range q.Ceilings {
		switch r.IntN(6) {
		case 0:
			q.Ceilings[c] = shares[c]
		case 1:
			q.Ceilings[c] = shares[c] + (1-shares[c])*r.Float64()
		case 2:
			if r.IntN(3) == 0 {
				q.Ceilings[c] = quotashare.Closed
			}
		}
	}
	return q
}

func (d *duel) did(format string, args ...any) {
	d.steps = append(d.steps, fmt.Sprintf(format, args...))
}

func (d *duel) require(want, got any, what string) {
	if fmt.Sprint(want) != fmt.Sprint(got) {
		from := max(len(d.steps)-30, 0)
		d.t.Fatalf("seed %d, step %d: %s: want %v, got %v\n%s\nquota %+v", d.seed, len(d.steps), what, want, got,
			strings.Join(d.steps[from:], "\n"), d.alone.Quota())
	}
}

// up rounds up to what the clock of Redis can tell.
func up(wait time.Duration) time.Duration {
	return (wait + time.Microsecond - 1) / time.Microsecond * time.Microsecond
}

func (d *duel) acquire(class quotashare.Class, tokens int64) {
	ctx := context.Background()
	alone := &quotashare.Grant{}
	var want quotashare.Decision
	grant, want := d.alone.TryAcquire(class, tokens)
	alone = &grant //nolint
	shared, got, err := d.shared.TryAcquire(ctx, class, tokens)
	require.NoError(d.t, err)
	d.did("acquire %v %d: %v", class, tokens, want)
	want.RetryAfter, got.RetryAfter = up(want.RetryAfter), up(got.RetryAfter)
	d.require(want, got, "decision")
	d.reasons[got.Reason]++
	if got.Admitted {
		d.grants = append(d.grants, duelGrant{&shared, alone, tokens})
	} else if !got.Permanent() {
		d.fit.class, d.fit.tokens, d.fit.at = class, tokens, d.now.Add(got.RetryAfter)
	}
}

// flush waits until what was settled is known to Redis.
func (d *duel) flush() {
	require.Eventually(d.t, func() bool {
		d.shared.mailbox.mu.Lock()
		defer d.shared.mailbox.mu.Unlock()
		return !d.shared.mailbox.running
	}, 5*time.Second, 20*time.Microsecond)
}

func (d *duel) settle() {
	if len(d.grants) == 0 {
		return
	}
	i := d.r.IntN(len(d.grants))
	if d.r.IntN(2) == 0 {
		i = len(d.grants) - 1
	}
	g := d.grants[i]
	d.grants = slices.Delete(d.grants, i, i+1)
	if d.r.IntN(4) == 0 {
		d.did("cancel %d", g.tokens)
		g.alone.Cancel()
		g.shared.Cancel()
	} else {
		actual := d.r.Int64N(g.tokens + 1)
		if g.tokens < 1e6 && d.r.IntN(3) == 0 {
			actual *= 2
		}
		d.did("settle %d at %d", g.tokens, actual)
		g.alone.Settle(actual)
		g.shared.Settle(actual)
	}
	d.flush()
}

func (d *duel) correct(args ...int64) {
	_, err := d.shared.ask(context.Background(), d.shared.rules.Load(), "correct", args...)
	require.NoError(d.t, err)
}

func (d *duel) compareUsage() {
	want := d.alone.Usage()
	for c := range want.Demand {
		want.Demand[c] = min(want.Demand[c], maxTokens)
	}
	got, err := d.shared.Usage(context.Background())
	require.NoError(d.t, err)
	d.require(want, got, "usage")
}

func runDuel(t *testing.T, client *redis.Client, seed uint64, steps int, crowded bool) (reasons [quotashare.NumReasons]int) {
	d := &duel{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 6)), client: client}
	quota := randomQuota(d.r)
	window := quota.Window.Microseconds()
	d.now = time.UnixMicro(1_800_000_000_000_000 / window * window)
	name := fmt.Sprintf("duel-%d-%v", seed, crowded)
	var err error
	d.alone, err = quotashare.NewWindow(quota, quotashare.WithClock(func() time.Time { return d.now }))
	require.NoError(t, err)
	d.shared, err = New(client, name, quota, Closed, WithTimeout(4*time.Second))
	require.NoError(t, err)
	closeAfter(t, d.shared)
	useClock(t, d.shared)
	d.setClock()
	d.compareUsage() // from now on both know the time

	portion := quota.Tokens >> (2 + d.r.IntN(7))
	stride := quota.Window >> (3 + d.r.IntN(9))
	moves := 2 + d.r.IntN(8)
	if crowded {
		portion = max(quota.Tokens/2000, 1)
		stride = quota.Window / 1000
		moves = 6
	}
	for range steps {
		switch n := d.r.IntN(40); {
		case n < moves:
			step := time.Duration(d.r.Int64N(int64(stride)*2 + 1))
			switch d.r.IntN(60) {
			case 0:
				step = time.Duration(d.r.Int64N(int64(3 * quota.Window)))
			case 1:
				step = -time.Duration(d.r.Int64N(int64(quota.Window / 2)))
			case 2, 3, 4, 5:
				if back := d.fit.at.Sub(d.now); back > 0 {
					step = back - time.Duration(d.r.IntN(2))*time.Microsecond
				}
			}
			if step < 0 {
				d.compareUsage() // what a clock does between two readings nobody knows
			}
			d.now = d.now.Add(step).Truncate(time.Microsecond)
			d.did("clock %v", step)
			d.setClock()
			d.alone.Usage() // reads it, for a Window lets no more than three windows pass between two readings
			if step < 0 {
				d.compareUsage()
			}
		case n < moves+20:
			class := quotashare.Class(d.r.IntN(3))
			if d.r.IntN(3) == 0 {
				class = quotashare.Class(seed % 3)
			}
			tokens := 1 + d.r.Int64N(max(portion, 1))
			switch d.r.IntN(12) {
			case 0:
				tokens = 1 + d.r.Int64N(quota.Tokens)
			case 1:
				tokens = max(d.shared.Quota().Limits(class).Share, 1)
			}
			if crowded {
				tokens = 1 + d.r.Int64N(portion)
			}
			d.acquire(class, tokens)
		case n < moves+22 && d.fit.tokens > 0:
			d.acquire(d.fit.class, d.fit.tokens)
		case n < moves+27:
			d.settle()
		case n == moves+27 && d.r.IntN(8) == 0 && !crowded:
			next := randomQuota(d.r)
			next.Window, next.Tokens = quota.Window, max(quota.Tokens-d.r.Int64N(quota.Tokens/2), 1)
			next.Overdraft = 0
			if d.alone.SetQuota(next) == nil {
				d.did("quota %+v", next)
				require.NoError(t, d.shared.SetQuota(next))
			}
		case n == moves+28 && d.r.IntN(4) == 0:
			remaining := d.r.Int64N(quota.Tokens)
			sent := time.Duration(d.r.Int64N(quota.Window.Microseconds()/2+1)) * time.Microsecond
			d.did("observe %d %v", remaining, sent)
			d.alone.Observe(remaining, sent)
			d.correct(2, 0, 0, sent.Microseconds(), remaining)
			d.compareUsage()
		case n == moves+29 && d.r.IntN(20) == 0:
			wait := time.Duration(1+d.r.Int64N(quota.Window.Microseconds())) * time.Microsecond
			d.did("throttled %v", wait)
			d.alone.Throttled(wait)
			d.correct(3, 0, 0, 0, wait.Microseconds())
		case n > 37:
			d.compareUsage()
		}
	}
	d.compareUsage()
	return d.reasons
}

// TestScriptEqualsWindow: the same steps on the same clock get the same decisions, reasons, usage and hints.
func TestScriptEqualsWindow(t *testing.T) {
	client := newNode(t).client()
	seeds, steps := uint64(60), 400
	if testing.Short() {
		seeds = 10
	}
	var reasons [quotashare.NumReasons]int
	for seed := range seeds * scale() {
		for reason, n := range runDuel(t, client, seed, steps, false) {
			reasons[reason] += n
		}
	}
	for _, reason := range []quotashare.Reason{
		quotashare.ReasonOwnShare, quotashare.ReasonBorrowed, quotashare.ReasonQuotaFull, quotashare.ReasonReserved,
		quotashare.ReasonCapped, quotashare.ReasonPaced, quotashare.ReasonTooLarge,
	} {
		require.NotZero(t, reasons[reason], "%v never came up", reason)
	}
}

// TestScriptEqualsWindowWhereChargesAreMerged: more charges than are kept apart.
func TestScriptEqualsWindowWhereChargesAreMerged(t *testing.T) {
	client := newNode(t).client()
	seeds := uint64(6)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds * scale() {
		runDuel(t, client, 1000+seed, 4000, true)
	}
}

// scale makes a long run of REDISSHARE_LONG=n.
func scale() uint64 {
	n, err := strconv.ParseUint(os.Getenv("REDISSHARE_LONG"), 10, 64)
	if err != nil {
		return 1
	}
	return n
}
