package sliding

import (
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A plain log is what a Log must be: every charge by itself, added up each time.
type plain struct {
	window  int64
	charges []charged
}

type charged struct{ at, tokens int64 }

func (p *plain) after(t int64) int64 {
	sum := new(big.Int)
	for _, c := range p.charges {
		if c.at > t {
			sum.Add(sum, big.NewInt(c.tokens))
		}
	}
	if !sum.IsInt64() {
		return math.MaxInt64
	}
	return sum.Int64()
}

func (p *plain) recent(now int64, spans []int64) (pace int64) {
	for k, span := range spans {
		pace = max(pace, p.after(now-span)/int64(k+1))
	}
	return pace
}

// seeds is n, or a tenth of it in a short run, as under the race detector.
func seeds(n uint64) uint64 {
	if testing.Short() {
		return n / 10
	}
	return n
}

// TestLogIsExactWhileItIsNotCrowded also covers sums beyond an int64.
func TestLogIsExactWhileItIsNotCrowded(t *testing.T) {
	for seed := range seeds(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		window := 1 + r.Int64N([]int64{20, 1000, 1e6, 1e12}[r.IntN(4)])
		spans := Spans(time.Duration(window), 1+r.IntN(MaxParts))
		log, want, now := NewLog(window), plain{window: window}, int64(0)
		for range 600 {
			now += r.Int64N(window/40 + 2)
			if r.IntN(50) == 0 {
				now += r.Int64N(3 * window)
			}
			log.Expire(now)
			switch i := r.IntN(len(want.charges) + 1); {
			case r.IntN(3) > 0 || i == len(want.charges):
				tokens := r.Int64N(1000)
				if r.IntN(100) == 0 {
					tokens = math.MaxInt64 - r.Int64N(2000)
				}
				if n := len(want.charges); log.Len() < crowded-1 && (n == 0 || want.charges[n-1].at != now) {
					log.Add(now, tokens)
					want.charges = append(want.charges, charged{now, tokens})
				}
			case now-want.charges[i].at < window && want.after(-1) < math.MaxInt64:
				to := r.Int64N(2000)
				log.Replace(want.charges[i].at, want.charges[i].tokens, to)
				want.charges[i].tokens = to
			}
			require.Equal(t, want.after(now-window), log.Sum(), "seed %d", seed)
			require.Equal(t, want.recent(now, spans), log.Recent(now, spans), "seed %d", seed)
			later := now + r.Int64N(window)
			require.Equal(t, want.after(later-window), log.After(later-window), "seed %d", seed)

			recent := want.recent(now, spans)
			pace := 1 + r.Int64N(max(recent, 1))
			for _, pace := range []int64{pace, max(recent, 1), 1 + min(recent, math.MaxInt64-1)} {
				require.Equal(t, recent >= pace, log.Paced(now, pace, spans), "seed %d", seed)
				require.Equal(t, want.recent(later, spans) >= pace, log.PacedAt(later, pace, spans), "seed %d", seed)
			}
			if slows := log.Slows(pace, spans); recent >= pace {
				require.Less(t, want.recent(slows, spans), pace, "seed %d", seed)
				require.GreaterOrEqual(t, want.recent(slows-1, spans), pace, "seed %d", seed)
			}
			limit := now + r.Int64N(2*window)
			threshold := now + r.Int64N(2*window)
			first := limit
			for _, c := range want.charges {
				if leaves := c.at + window; leaves > now && leaves >= threshold {
					first = min(first, leaves)
				}
			}
			require.Equal(t, first, log.FirstLeaving(limit, func(at int64) bool { return at >= threshold }), "seed %d", seed)
		}
	}
}

// TestCrowdedLog holds a Log to its bounds at any rate: no charge leaves early, none more than a grain late, and the
// memory is fixed. Replacing every charge by nothing empties it, whatever was merged.
func TestCrowdedLog(t *testing.T) {
	for seed := range seeds(24) {
		r := rand.New(rand.NewPCG(seed, 2))
		window := int64(1e9) + r.Int64N(1e6)
		rate := []int64{500, 650, 1200, 5000}[r.IntN(4)] // charges in a window
		spans := Spans(time.Duration(window), MaxParts)
		log, want, now := NewLog(window), plain{window: window}, int64(0)
		for i := range 4 * rate {
			now += r.Int64N(2*window/rate) + 1
			if r.IntN(2000) == 0 {
				now += r.Int64N(window)
			}
			log.Expire(now)
			tokens := 1 + r.Int64N(100)
			log.Add(now, tokens)
			want.charges = append(want.charges, charged{now, tokens})
			if i%97 != 0 {
				continue
			}
			want.charges = slices.DeleteFunc(want.charges, func(c charged) bool { return now-c.at > 2*window })
			requireAtMostAGrainLate(t, &want, now-window, log.grain, log.Sum())
			t1 := now - r.Int64N(window)
			requireAtMostAGrainLate(t, &want, t1, log.grain, log.After(t1))
			late := make([]int64, len(spans))
			for k, span := range spans {
				late[k] = span + log.grain
			}
			require.GreaterOrEqual(t, log.Recent(now, spans), want.recent(now, spans))
			require.LessOrEqual(t, log.Recent(now, spans), want.recent(now, late))
			require.True(t, log.PacedAt(now, log.Recent(now, spans), spans))
			require.False(t, log.PacedAt(now, log.Recent(now, spans)+1, spans))
		}
		require.LessOrEqual(t, cap(log.buf), maxCharges)

		late := log.Sum() - want.after(now-window)
		for _, c := range want.charges {
			if now-c.at < window {
				log.Replace(c.at, c.tokens, 0)
			}
		}
		require.Equal(t, late, log.Sum(), "only what is late is left")
		log.Expire(now + window)
		require.Zero(t, log.Sum())
		require.Zero(t, log.Len())
	}
}

// TestLogMergesOnlyWhenItIsCrowded, and only what is in the same 600th of the window.
func TestLogMergesOnlyWhenItIsCrowded(t *testing.T) {
	const second = int64(1e9)
	log := NewLog(600 * second)
	add := func(at int64, kept int) {
		t.Helper()
		log.Expire(at)
		log.Add(at, 1)
		require.Equal(t, kept, log.Len(), at)
	}
	for i := range 100 {
		add(second/5+int64(i), i+1)
	}
	for i := 100; i < crowded; i++ {
		add(600*second+second/10+int64(i), i+1)
	}
	add(600*second+second/10+crowded, crowded)
	require.Equal(t, int64(crowded+1), log.Sum())

	// The oldest leave, so there is room for a charge by itself, be it of the same 600th.
	add(600*second+second/5+49, crowded-50+1)
	for i := range 99 {
		add(600*second+second/2+int64(i), crowded-100+1+i+1)
	}
	add(600*second+second/2+100, crowded)
	add(601*second-1, crowded)
	add(601*second, crowded+1)
	add(602*second-1, crowded+1)
	add(602*second, crowded+2)
	require.Equal(t, int64(crowded+1-100+1+99+5), log.Sum())
}

// TestAFullLogMergesABurst: where a burst and then a charge in each 600th fill a Log, it makes one of the burst, and is
// as exact as ever. It is so too if one charge has left, which makes room for one.
func TestAFullLogMergesABurst(t *testing.T) {
	const second = int64(1e9)
	for _, test := range []struct {
		first, burst, apart int64
	}{
		{0, 0, second},
		{1, 100 * second, second * 165 / 100},
	} {
		log, want, spans := NewLog(600*second), plain{window: 600 * second}, Spans(600*time.Second, MaxParts)
		late := make([]int64, len(spans))
		for k, span := range spans {
			late[k] = span + second
		}
		for i := range int64(maxCharges + 100) {
			now := int64(0)
			switch {
			case i >= crowded:
				now = test.burst + (i-crowded+1)*test.apart
			case i >= test.first:
				now = test.burst + i
			}
			log.Expire(now)
			log.Add(now, i+1)
			want.charges = append(want.charges, charged{now, i + 1})
			if i > maxCharges-10 {
				requireAtMostAGrainLate(t, &want, now-600*second, second, log.Sum())
				require.GreaterOrEqual(t, log.Recent(now, spans), want.recent(now, spans))
				require.LessOrEqual(t, log.Recent(now, spans), want.recent(now, late))
			}
			if i == maxCharges && test.first == 0 {
				require.Equal(t, 1+maxCharges-crowded+1, log.Len())
			}
		}
		require.Equal(t, maxCharges, cap(log.buf))
		log.Expire(math.MaxInt64)
		require.Zero(t, log.Sum())
	}
}

// TestALogGrowsWithWhatItKeeps, whatever passes through it, and allocates nothing when it has.
func TestALogGrowsWithWhatItKeeps(t *testing.T) {
	for _, kept := range []int64{10, 100, 250, 400, 600} {
		log, now := NewLog(600e9), int64(0)
		thousands := func() {
			for range 3000 {
				now += 600e9 / kept
				log.Expire(now)
				log.Add(now, 1)
			}
		}
		thousands()
		require.Zero(t, testing.AllocsPerRun(1, thousands), kept)
		require.Equal(t, kept, log.Sum())
		require.LessOrEqual(t, cap(log.buf), int(min(4*kept, maxCharges)))
	}
}

// TestReplaceLeavesWhatWasForgotten: a charge is worth what is left of it.
func TestReplaceLeavesWhatWasForgotten(t *testing.T) {
	log := NewLog(60e9)
	log.Add(1, math.MaxInt64-5)
	log.Add(2, 100)
	require.Equal(t, int64(math.MaxInt64), log.Sum())
	log.Replace(2, 100, 101)
	require.Equal(t, int64(math.MaxInt64), log.Sum())
	log.Replace(1, math.MaxInt64-5, 0)
	require.Equal(t, int64(101), log.Sum())
}

func TestLogAtTheEndOfTime(t *testing.T) {
	log := NewLog(math.MaxInt64)
	log.Add(math.MaxInt64-10, 5)
	require.Equal(t, int64(math.MaxInt64), log.Expire(math.MaxInt64-1))
	require.Equal(t, int64(5), log.Sum())
	require.Equal(t, int64(math.MaxInt64), log.Slows(5, Spans(math.MaxInt64, MaxParts)))
}

func requireAtMostAGrainLate(t *testing.T, want *plain, after, grain, got int64) {
	t.Helper()
	require.GreaterOrEqual(t, got, want.after(after))
	require.LessOrEqual(t, got, want.after(after-grain))
}

func TestSpans(t *testing.T) {
	require.Equal(t, []int64{60e9}, Spans(time.Minute, 1))
	require.Equal(t, []int64{15e9, 30e9, 45e9, 60e9}, Spans(time.Minute, 4))
	require.Equal(t, []int64{1, 2, 4, 5, 7}, Spans(7, 5))
	require.Equal(t, int64(math.MaxInt64), Spans(math.MaxInt64, MaxParts)[MaxParts-1])
}

func TestAddStopsAtTheLargest(t *testing.T) {
	require.Equal(t, int64(5), Add(2, 3))
	require.Equal(t, int64(math.MaxInt64), Add(math.MaxInt64-2, 2))
	require.Equal(t, int64(math.MaxInt64), Add(math.MaxInt64-2, 3))
	require.Equal(t, int64(math.MaxInt64), Add(math.MaxInt64, math.MaxInt64))
}

func TestPeakRemembersOneWindow(t *testing.T) {
	var p Peak
	p.Note(5)
	p.Note(3)
	require.Equal(t, int64(5), p.MaxAfter(0))
	for turns := range PeakParts {
		require.Equal(t, int64(5), p.MaxAfter(PeakParts-turns))
		require.Less(t, p.MaxAfter(PeakParts-turns+1), int64(5))
		p.Turn(1)
	}
	require.Equal(t, int64(5), p.MaxAfter(0), "a window later")
	require.Zero(t, p.MaxAfter(PeakParts+1), "nothing is left")
	p.Turn(2)
	require.Equal(t, int64(2), p.MaxAfter(0), "a part later still")
	require.Equal(t, int64(5), PeakPart(60))
	require.Equal(t, int64(6), PeakPart(61))
}
