package sim_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare/internal/sim"
)

func TestProviderCountsAChargeForOneWindow(t *testing.T) {
	p := sim.NewProvider(100, time.Minute)
	charge := func(now time.Duration, tokens int64, want bool) {
		t.Helper()
		_, ok := p.Charge(now, tokens)
		assert.Equal(t, want, ok, "%d tokens at %v", tokens, now)
	}
	charge(0, 101, false)
	charge(0, 60, true)
	charge(time.Second, 41, false) // a refusal charges nothing
	charge(time.Second, 40, true)
	charge(time.Minute-1, 1, false)
	charge(time.Minute, 61, false)
	charge(time.Minute, 60, true)
	assert.EqualValues(t, 100, p.Used(time.Minute))
	assert.EqualValues(t, 60, p.Used(time.Minute+time.Second))
	assert.Zero(t, p.Used(2*time.Minute))
}

func TestProviderSettles(t *testing.T) {
	p := sim.NewProvider(100, time.Minute)
	first, ok := p.Charge(0, 60)
	require.True(t, ok)
	second, ok := p.Charge(time.Second, 40)
	require.True(t, ok)

	assert.True(t, p.Settle(2*time.Second, first, 10))
	assert.EqualValues(t, 50, p.Used(2*time.Second))
	assert.True(t, p.Settle(2*time.Second, second, 120), "a call that used more than was estimated counts in full")
	assert.EqualValues(t, 130, p.Used(2*time.Second))
	_, ok = p.Charge(2*time.Second, 1)
	assert.False(t, ok)

	// What was settled still leaves a window after it was charged, and then there is nothing left to settle.
	assert.EqualValues(t, 120, p.Used(time.Minute))
	assert.False(t, p.Settle(time.Minute, first, 60))
	assert.EqualValues(t, 120, p.Used(time.Minute))
	assert.Zero(t, p.Used(time.Minute+time.Second))
}

// The provider keeps a running sum. Adding up all that ever happened must give the same.
func TestProviderAgreesWithAddingUp(t *testing.T) {
	type charge struct {
		at     time.Duration
		tokens int64
	}
	const window, quota = 1000, 5000 // nanoseconds, so that instants coincide
	random := rand.New(rand.NewPCG(1, 0))
	p := sim.NewProvider(quota, window)
	var all []charge
	refusals := 0
	for now := time.Duration(0); now < 50*window; now += time.Duration(random.IntN(20)) {
		used := int64(0)
		for _, c := range all {
			if now-c.at < window {
				used += c.tokens
			}
		}
		require.Equal(t, used, p.Used(now))
		if n := len(all); n > 0 && random.IntN(3) == 0 {
			i := n - 1 - random.IntN(min(n, 150)) // some of them are out of the window
			c, tokens := &all[i], random.Int64N(200)
			counts := now-c.at < window
			require.Equal(t, counts, p.Settle(now, i, tokens))
			if counts {
				c.tokens = tokens
			}
			continue
		}
		tokens := random.Int64N(200)
		number, ok := p.Charge(now, tokens)
		require.Equal(t, used+tokens <= quota, ok)
		if !ok {
			refusals++
			continue
		}
		require.Equal(t, len(all), number)
		all = append(all, charge{now, tokens})
	}
	assert.NotZero(t, refusals)
}
