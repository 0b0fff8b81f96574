package quotashare_test

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"math/big"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

// The tests of this file hold the library to what is publicly known to have gone wrong in other limiters. The numbers
// are those of the list of cases. Each test covers the kind of the failure, not only the one input that was reported.

// A caseWindow is a Window under a fake clock, with an assertion for each outcome that a case can want.
type caseWindow struct {
	*Window
	t     *testing.T
	clock *clock
	start time.Time
}

func newCaseWindow(t *testing.T, quota Quota) *caseWindow {
	t.Helper()
	// The start is no round time of day, so that nothing works by the accident of a boundary.
	return newCaseWindowAt(t, quota, time.Date(2026, time.March, 3, 10, 36, 17, 123456789, time.UTC))
}

func newCaseWindowAt(t *testing.T, quota Quota, start time.Time) *caseWindow {
	t.Helper()
	clock := &clock{start}
	w, err := NewWindow(quota, WithClock(clock.read))
	require.NoError(t, err)
	return &caseWindow{w, t, clock, start}
}

// wholeQuota is a quota with one class that may use all of it at once, for the cases that are not about classes.
func wholeQuota(tokens int64) Quota {
	return Quota{
		Tokens: tokens,
		Shares: Fractions{Interactive: 1},
		Floors: NoFloors,
		Pace:   1,
	}
}

// wholeQuotaWritten is wholeQuota with its defaults written out.
func wholeQuotaWritten(tokens int64) Quota {
	quota := wholeQuota(tokens)
	quota.Window = time.Minute
	return quota
}

func shareOf(class Class, fraction float64) (f Fractions) {
	f[class] = fraction
	return f
}

func tokensOf(class Class, tokens int64) (u ClassTokens) {
	u[class] = tokens
	return u
}

// at sets the clock to so long after the start.
func (w *caseWindow) at(sinceStart time.Duration) { w.clock.now = w.start.Add(sinceStart) }

// elapsed returns how long after the start it is.
func (w *caseWindow) elapsed() time.Duration { return w.clock.now.Sub(w.start) }

// admit wants the call to be admitted at once.
func (w *caseWindow) admit(class Class, tokens int64) *Grant {
	w.t.Helper()
	g, d := w.TryAcquire(class, tokens)
	require.True(w.t, d.Admitted, "%v call of %d tokens at %v: %+v", class, tokens, w.elapsed(), d)
	require.Zero(w.t, d.RetryAfter, "an admission tells nobody to wait")
	return &g
}

// wait wants the call to be refused with exactly this hint, and to be charged nothing.
func (w *caseWindow) wait(class Class, tokens int64, want time.Duration) Reason {
	w.t.Helper()
	d := w.refuse(class, tokens)
	require.False(w.t, d.Permanent(), "%v call of %d tokens at %v: %+v", class, tokens, w.elapsed(), d)
	require.Equal(w.t, want, d.RetryAfter, "hint for a %v call of %d tokens at %v", class, tokens, w.elapsed())
	return d.Reason
}

// never wants the call to be refused for good, and to be charged nothing.
func (w *caseWindow) never(class Class, tokens int64) Reason {
	w.t.Helper()
	d := w.refuse(class, tokens)
	require.True(w.t, d.Permanent(), "%v call of %d tokens at %v: %+v", class, tokens, w.elapsed(), d)
	require.Zero(w.t, d.RetryAfter, "there is nothing to wait for")
	require.Zero(w.t, d.RetryAfterSeconds(), "there is nothing to wait for")
	return d.Reason
}

// refuse wants the call to be refused, and to be charged nothing.
func (w *caseWindow) refuse(class Class, tokens int64) Decision {
	w.t.Helper()
	before := w.Usage().Used
	g, d := w.TryAcquire(class, tokens)
	require.False(w.t, d.Admitted, "%v call of %d tokens at %v: %+v", class, tokens, w.elapsed(), d)
	g.Settle(0) // the grant of a refusal stands for no charge, so this must take nothing from anybody
	require.Equal(w.t, before, w.Usage().Used, "a refusal charges nothing")
	return d
}

// used wants all classes together to hold so many tokens.
func (w *caseWindow) used(want int64) {
	w.t.Helper()
	require.Equal(w.t, want, usedTotal(w.Window), "tokens used at %v", w.elapsed())
}

// headroom wants so many tokens, and not one more, to be admitted to the class now, by the pure rule and by the
// window alike. It leaves no charge. It is for quotas that fit an int.
func (w *caseWindow) headroom(class Class, want int64) {
	w.t.Helper()
	usage, quota := w.Usage(), w.Quota()
	got := sort.Search(int(quota.Limits(class).Largest), func(n int) bool {
		return !Admit(class, int64(n)+1, usage, quota).Admitted
	})
	require.Equal(w.t, want, int64(got), "headroom at %v", w.elapsed())
	w.refuse(class, want+1)
	if want > 0 {
		w.admit(class, want).Cancel()
	}
}

// fill makes calls of so many tokens until one is refused, and returns what was admitted.
func (w *caseWindow) fill(class Class, tokens int64) (admitted int64) {
	w.t.Helper()
	for {
		_, d := w.TryAcquire(class, tokens)
		if !d.Admitted {
			return admitted
		}
		admitted += tokens
	}
}

// orders returns every order of the numbers from 0 to n-1. A slice that it yields is only good until the next.
func orders(n int) iter.Seq[[]int] {
	return func(yield func([]int) bool) {
		order := make([]int, n)
		for i := range order {
			order[i] = i
		}
		var permute func(k int) bool
		permute = func(k int) bool {
			if k == n {
				return yield(order)
			}
			for i := k; i < n; i++ {
				order[k], order[i] = order[i], order[k]
				if !permute(k + 1) {
					return false
				}
				order[k], order[i] = order[i], order[k]
			}
			return true
		}
		permute(0)
	}
}

// Accounting.

// Case 1: the check and the charge are one step, so that of calls which do not fit together only so many are admitted
// as do fit, in whatever order they come and however they overlap.
func TestCallsThatDoNotFitTogetherAreNotAdmittedTogether(t *testing.T) {
	estimates := []int64{58, 80, 175, 175, 175}

	t.Run("in every order", func(t *testing.T) {
		for order := range orders(len(estimates)) {
			w := newCaseWindow(t, wholeQuota(100))
			charged := int64(0)
			for _, i := range order {
				switch estimate := estimates[i]; {
				case estimate > 100:
					require.Equal(t, ReasonTooLarge, w.never(Interactive, estimate))
				case charged == 0:
					w.admit(Interactive, estimate)
					charged = estimate
				default:
					w.wait(Interactive, estimate, time.Minute)
				}
				w.used(charged)
			}
		}
	})

	t.Run("at the same time", func(t *testing.T) {
		for _, estimates := range [][]int64{estimates, slices.Repeat([]int64{7}, 100)} {
			for range 100 {
				w := newCaseWindow(t, wholeQuota(100))
				var calls, tokens atomic.Int64
				var all sync.WaitGroup
				for _, estimate := range estimates {
					all.Go(func() {
						if _, d := w.TryAcquire(Interactive, estimate); d.Admitted {
							calls.Add(1)
							tokens.Add(estimate)
						}
					})
				}
				all.Wait()
				if estimates[0] == 7 {
					require.Equal(t, int64(14), calls.Load(), "100/7 calls fit")
				} else {
					require.Equal(t, int64(1), calls.Load(), "58 and 80 exclude each other")
				}
				w.used(tokens.Load())
			}
		}
	})
}

// Case 5: of all that is done to end one call only the first counts, whatever follows in whatever order; a second
// refund would be taken from what others were charged.
func TestOnlyTheFirstEndOfACallCounts(t *testing.T) {
	ends := []struct {
		name string
		end  func(*Grant)
		want int64 // what the call is charged if this end comes first
	}{
		{"settle 55", func(g *Grant) { g.Settle(55) }, 55},
		{"settle 0", func(g *Grant) { g.Settle(0) }, 0},
		{"cancel", func(g *Grant) { g.Cancel() }, 0},
		{"settle unknown", func(g *Grant) { g.Settle(-1) }, 220}, // the estimate stays
		{"settle 55 again", func(g *Grant) { g.Settle(55) }, 55},
	}
	for order := range orders(len(ends)) {
		w := newCaseWindow(t, wholeQuota(1000))
		w.admit(Interactive, 100) // somebody else's
		g := w.admit(Interactive, 220)
		w.used(320)
		for i, next := range order {
			ends[next].end(g)
			require.Equal(t, 100+ends[order[0]].want, usedTotal(w.Window), "%q first, then %d more", ends[order[0]].name, i)
			w.clock.advance(time.Second)
		}
	}

	t.Run("from many goroutines", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(1000))
		w.admit(Interactive, 100)
		g := w.admit(Interactive, 220)
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() { g.Settle(55) })
		}
		all.Wait()
		w.used(155)
	})

	// A grant of no call has no charge to refund.
	t.Run("of no call", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(1000))
		w.admit(Interactive, 220)
		refused, d := w.TryAcquire(Interactive, 900)
		require.False(t, d.Admitted)
		fake := NewGrant(nil)
		for _, g := range []*Grant{{}, &refused, &fake} {
			for _, end := range ends {
				end.end(g)
				w.used(220)
			}
		}
	})
}

// Case 13: what a call used beyond its estimate is charged in full, past the quota if need be, and whoever comes next
// waits until it has left. It counts from when the call was admitted, not from when it was settled.
func TestUseAboveTheEstimateIsChargedInFull(t *testing.T) {
	for _, actual := range []int64{1000, 1001, 1200, 1 << 40, math.MaxInt64} {
		t.Run(strconv.FormatInt(actual, 10), func(t *testing.T) {
			w := newCaseWindow(t, wholeQuota(1000))
			g := w.admit(Interactive, 100)
			w.at(500 * time.Millisecond)
			g.Settle(actual)
			w.at(time.Second)
			w.used(actual)
			w.headroom(Interactive, 0)
			w.wait(Interactive, 1, 59*time.Second)
			w.at(time.Minute - 1)
			w.wait(Interactive, 1, 1)
			w.at(time.Minute)
			w.admit(Interactive, 1)
			w.used(1)
		})
	}

	t.Run("by many calls", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(1000))
		var grants []*Grant
		for range 10 {
			grants = append(grants, w.admit(Interactive, 100))
			w.clock.advance(time.Second)
		}
		for i, g := range grants {
			g.Settle(1200)
			w.used(1000 + 1100*int64(i+1))
		}
		// All but the last must leave before there is room, and then the last still fills the window.
		w.wait(Interactive, 1, 59*time.Second)
		w.at(69*time.Second - 1)
		w.used(1200)
		w.at(69 * time.Second)
		w.used(0)
	})
}

// Case 14: an estimate of 0 is neither a way past a full window nor a claim to all of it. It is a mistake, and is
// told so.
func TestAnEstimateOfZeroIsRefusedAndChargesNothing(t *testing.T) {
	for class := range Class(NumClasses) {
		quota := wholeQuota(1000)
		quota.Shares = shareOf(class, 1)
		w := newCaseWindow(t, quota)
		require.Equal(t, ReasonInvalid, w.never(class, 0), "idle")
		w.admit(class, 1000)
		require.Equal(t, ReasonInvalid, w.never(class, 0), "full")
		w.used(1000)

		want := Decision{Reason: ReasonInvalid}
		for _, used := range []int64{0, 999, 1000, 2000} {
			usage := Usage{Used: tokensOf(class, used)}
			require.Equal(t, want, Admit(class, 0, usage, quota), "%d used", used)
		}
	}
}

// Case 15: no negative number of tokens, wherever it is given, makes room.
func TestNegativeTokensMakeNoRoom(t *testing.T) {
	negatives := []int64{-1, -5, -10, -1 << 31, -1<<32 + 1, math.MinInt64 + 1, math.MinInt64}

	t.Run("as an estimate", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(10))
		for _, tokens := range negatives {
			require.Equal(t, ReasonInvalid, w.never(Interactive, tokens))
		}
		w.used(0)
		w.admit(Interactive, 10)
		for _, tokens := range negatives {
			require.Equal(t, ReasonInvalid, w.never(Interactive, tokens))
		}
		w.used(10)
		w.wait(Interactive, 1, time.Minute)
	})

	// What a call used cannot be negative, so the number says nothing, and the estimate is the best that is known.
	t.Run("as an actual", func(t *testing.T) {
		for _, tokens := range negatives {
			w := newCaseWindow(t, wholeQuota(10))
			g := w.admit(Interactive, 9)
			g.Settle(tokens)
			w.used(9)
			g.Settle(0) // the grant is closed
			w.used(9)
			w.admit(Interactive, 1)
			w.wait(Interactive, 1, time.Minute)
		}
	})

	t.Run("as a usage", func(t *testing.T) {
		for _, tokens := range negatives {
			usage := Usage{
				Used: ClassTokens{Interactive: 10, Background: tokens, Batch: tokens},
			}
			require.False(t, Admit(Interactive, 1, usage, wholeQuota(10)).Admitted)
			usage = Usage{Used: ClassTokens{Interactive: 10}, Others: tokens}
			require.False(t, Admit(Interactive, 1, usage, wholeQuota(10)).Admitted)
			usage = Usage{Used: ClassTokens{Interactive: tokens}}
			require.True(t, Admit(Interactive, 10, usage, wholeQuota(10)).Admitted)
			require.False(t, Admit(Interactive, 11, usage, wholeQuota(10)).Admitted)
		}
	})
}

// Case 17: a call passes every limit or is charged to none, so nobody uses up what is shared by running into a limit
// of his own.
func TestARefusedCallIsChargedToNoLimit(t *testing.T) {
	quota := Quota{
		Tokens:   10,
		Shares:   Fractions{Interactive: 0.9, Batch: 0.1},
		Floors:   NoFloors,
		Ceilings: Fractions{Batch: 0.1},
		Pace:     1,
	}

	t.Run("by the class", func(t *testing.T) {
		w := newCaseWindow(t, quota)
		w.admit(Batch, 1)
		for range 19 {
			require.Equal(t, ReasonCapped, w.wait(Batch, 1, time.Minute))
		}
		w.used(1)
		w.admit(Interactive, 1)
		require.Equal(t, int64(8), w.fill(Interactive, 1), "all that batch does not hold")
	})

	t.Run("by the account", func(t *testing.T) {
		w := newCaseWindow(t, quota)
		require.Equal(t, int64(10), w.fill(Interactive, 1))
		w.at(time.Second)
		for range 20 {
			require.Equal(t, ReasonQuotaFull, w.wait(Batch, 1, 59*time.Second))
		}
		require.Zero(t, w.Usage().Used[Batch])
		w.at(time.Minute)
		w.admit(Batch, 1) // the class's own limit was not used up either
	})

	// A limit on requests is a Window of its own. A call that one of the two admits and the other refuses was never
	// sent, so it is cancelled and leaves nothing in either.
	t.Run("by one of two windows", func(t *testing.T) {
		requests, tokens := newCaseWindow(t, wholeQuota(10)), newCaseWindow(t, wholeQuota(1000))
		tokens.admit(Interactive, 950)
		for range 20 {
			g := requests.admit(Interactive, 1)
			tokens.refuse(Interactive, 100)
			g.Cancel()
		}
		requests.used(0)
		tokens.used(950)
		requests.headroom(Interactive, 10)
		tokens.headroom(Interactive, 50)
	})

	t.Run("for any reason", func(t *testing.T) {
		quota := Quota{
			Tokens:   1200,
			Shares:   Fractions{Interactive: 0.5, Background: 0.25, Batch: 0.25},
			Floors:   Fractions{Interactive: 0.25},
			Ceilings: Fractions{Batch: 0.5},
		}
		const class = Batch
		tests := []struct {
			reason Reason
			before func(w *caseWindow)
			tokens int64
		}{
			{ReasonQuotaFull, func(w *caseWindow) { w.admit(Background, 900) }, 301},
			{ReasonReserved, func(w *caseWindow) { w.admit(Background, 900) }, 1},
			{ReasonCapped, func(w *caseWindow) { w.admit(class, 600) }, 1},
			{ReasonPaced, func(w *caseWindow) { w.admit(class, 500) }, 1},
			{ReasonTooLarge, func(w *caseWindow) {}, 601},
			{ReasonInvalid, func(w *caseWindow) {}, 0},
		}
		for _, test := range tests {
			w := newCaseWindow(t, quota)
			test.before(w)
			for range 20 {
				require.Equal(t, test.reason, w.refuse(class, test.tokens).Reason) // refuse looks at what is used
			}
		}
	})
}

// Window arithmetic.

// Case 20: a full burst is not followed by a second one before the first has left. What is free at any moment is the
// quota less what was charged within the last window, exactly.
func TestABurstCountsForTheWholeWindow(t *testing.T) {
	w := newCaseWindow(t, wholeQuota(2_000_000))
	w.admit(Interactive, 1_800_000)
	for _, second := range []time.Duration{0, 1, 15, 30, 59} {
		w.at(second * time.Second)
		w.wait(Interactive, 900_000, (60-second)*time.Second)
		w.headroom(Interactive, 200_000)
	}
	w.at(time.Minute)
	w.headroom(Interactive, 2_000_000)
	w.admit(Interactive, 900_000)
}

// Cases 20 and 37: whatever is admitted, settled and cancelled, no interval as long as the window holds more than the
// quota, and what counts is what a list of all charges says, not an approximation of it.
func TestNoIntervalOfOneWindowHoldsMoreThanTheQuota(t *testing.T) {
	type charge struct {
		class  Class
		at     time.Duration
		tokens int64
		grant  *Grant
	}
	tests := []struct {
		name  string
		quota Quota
		steps int
		exact bool // so few calls that no charges are merged
	}{
		{"one class", wholeQuota(1000), 200, true},
		{"one call at a time", Quota{Tokens: 1, Window: 10 * time.Second, Shares: Fractions{Interactive: 1}}, 200, true},
		{"defaults", Quota{Tokens: 1000}, 200, true},
		{"elastic", Quota{Tokens: 100_000, Floors: ElasticFloors}, 200, true},
		{"not spread", Quota{Tokens: 997, Window: time.Second, Floors: NoFloors, Pace: 1}, 200, true},
		{"odd window", Quota{Tokens: 997, Window: 7, Floors: NoFloors, Pace: 3}, 200, true},
		{"crowded", Quota{Tokens: 1_000_000, Floors: NoFloors, Pace: 1}, 2000, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for seed := range uint64(10) {
				rng := rand.New(rand.NewPCG(20, seed))
				w := newCaseWindow(t, test.quota)
				q := w.Quota()
				largest := max(q.Tokens/int64(1+rng.IntN(40)), 1)
				longest := int64(q.Window) / int64(1+rng.IntN(40))
				if !test.exact {
					largest, longest = q.Tokens/200, int64(q.Window)/300
				}
				var charges []*charge
				for range test.steps {
					if rng.IntN(3) > 0 {
						w.clock.advance(time.Duration(rng.Int64N(longest + 1)))
					}
					now := w.elapsed()
					if n := len(charges); n > 0 && rng.IntN(3) == 0 {
						c := charges[rng.IntN(n)]
						// A grant may have been ended before, and a charge may have left before: neither changes then.
						counts := c.grant != nil && now-c.at < q.Window
						actual := rng.Int64N(c.tokens + 1)
						switch {
						case c.grant == nil:
						case rng.IntN(4) == 0:
							actual = 0
							c.grant.Cancel()
						default:
							c.grant.Settle(actual)
						}
						c.grant = nil
						if counts {
							c.tokens = actual
						}
					} else {
						class := Class(rng.IntN(NumClasses))
						if !test.exact {
							class = Interactive // one log takes all the calls
						}
						tokens := 1 + rng.Int64N(largest)
						if g, d := w.TryAcquire(class, tokens); d.Admitted {
							charges = append(charges, &charge{class, now, tokens, &g})
						}
					}

					var want ClassTokens
					for _, c := range slices.Backward(charges) {
						if now-c.at >= q.Window {
							break
						}
						want[c.class] += c.tokens
					}
					got := w.Usage().Used
					require.LessOrEqual(t, usedTotal(w.Window), q.Tokens, "seed %d at %v", seed, now)
					if test.exact {
						require.Equal(t, want, got, "seed %d at %v", seed, now)
					}
					for class := range want { // what was merged may leave late
						require.GreaterOrEqual(t, got[class], want[class], "seed %d at %v: left early", seed, now)
					}
				}

				within, first := int64(0), 0
				for _, c := range charges {
					within += c.tokens
					for ; c.at-charges[first].at >= q.Window; first++ {
						within -= charges[first].tokens
					}
					require.LessOrEqual(t, within, q.Tokens, "seed %d: in the window that ends at %v", seed, c.at)
				}
				require.NotEmpty(t, charges)
			}
		})
	}
}

// Case 37: what is left is what would be admitted, to the token, and a quota of a single token is usable: once a
// window, and again at its very end.
func TestWhatIsLeftIsWhatIsAdmitted(t *testing.T) {
	t.Run("one token", func(t *testing.T) {
		quota := wholeQuota(1)
		quota.Window = 10 * time.Second
		w := newCaseWindow(t, quota)
		for i := range time.Duration(100) {
			w.at(10 * time.Second * i)
			w.headroom(Interactive, 1)
			w.admit(Interactive, 1)
			w.headroom(Interactive, 0)
			w.clock.advance(quota.Window - 1)
			w.wait(Interactive, 1, 1)
		}
	})

	t.Run("random trace", func(t *testing.T) {
		for seed := range uint64(10) {
			rng := rand.New(rand.NewPCG(37, seed))
			w := newCaseWindow(t, wholeQuota(1000))
			for range 200 {
				w.clock.advance(time.Duration(rng.Int64N(int64(10 * time.Second))))
				tokens := 1 + rng.Int64N(400)
				left := 1000 - usedTotal(w.Window)
				w.headroom(Interactive, left)
				if tokens <= left {
					w.admit(Interactive, tokens)
				} else {
					w.refuse(Interactive, tokens)
				}
			}
		}
	})
}

// Case 21: the window of a call begins with the call. No minute of the wall clock, and no other round time, starts a
// new one or is named by a hint.
func TestRoundTimesOfTheClockMeanNothing(t *testing.T) {
	for _, window := range []time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour} {
		boundaries := []time.Time{
			time.Unix(0, 0).UTC().Add(window),
			time.Date(2026, time.March, 3, 11, 0, 0, 0, time.UTC),
			time.Date(2026, time.December, 31, 24, 0, 0, 0, time.UTC),
		}
		for _, boundary := range boundaries {
			for _, off := range []time.Duration{1, time.Microsecond, 5 * time.Millisecond, window / 3} {
				quota := wholeQuota(1)
				quota.Window = window
				// The window is made on a boundary too, so that its own age is as round as the clock.
				w := newCaseWindowAt(t, quota, boundary.Add(-window))
				w.at(window - off)
				w.admit(Interactive, 1)
				w.at(window + off)
				w.wait(Interactive, 1, window-2*off)
				w.at(2*window - off - 1)
				w.wait(Interactive, 1, 1)
				w.at(2*window - off)
				w.admit(Interactive, 1)
			}
		}
	}
}

// Case 22: limits on requests and on tokens know nothing of each other's time. A steady load that fits both is
// admitted for ever, whatever the lengths of the two windows are.
func TestTwoLimitsKeepTheirOwnTime(t *testing.T) {
	for _, window := range []time.Duration{time.Second, 7 * time.Second, time.Minute, time.Hour} {
		requestQuota := wholeQuota(1000)
		requestQuota.Window = window
		requests, tokens := newCaseWindow(t, requestQuota), newCaseWindow(t, wholeQuota(186))
		for i := range time.Duration(40) {
			requests.at(10 * time.Second * i)
			tokens.at(10 * time.Second * i)
			requests.admit(Interactive, 1)
			tokens.admit(Interactive, 31)
			tokens.used(31 * int64(min(i+1, 6))) // six calls fit, and the seventh comes just as the first leaves
		}
		tokens.wait(Interactive, 1, 10*time.Second)
	}
}

// Case 23: a charge does not come back at the same time of another day.
func TestAChargeDoesNotComeBackAtTheSameTimeOfDay(t *testing.T) {
	start := time.Date(2026, time.February, 28, 10, 37, 30, 0, time.UTC)
	for _, days := range []int{1, 2, 7, 28, 31, 365, 366, 36525} {
		w := newCaseWindowAt(t, wholeQuota(120_000), start)
		w.admit(Interactive, 70_000)
		w.clock.now = start.AddDate(0, 0, days)
		w.admit(Interactive, 70_000)
		w.used(70_000)
		w.headroom(Interactive, 50_000)
	}

	t.Run("every hour of a year", func(t *testing.T) {
		w := newCaseWindowAt(t, wholeQuota(120_000), start)
		for range 365 * 24 {
			w.admit(Interactive, 70_000)
			w.used(70_000)
			w.clock.advance(time.Hour)
		}
	})
}

// Case 25: refused calls are not charged and move no mark, so a caller who polls is told a wait that ends at the same
// instant each time, and gets in then.
func TestRefusedCallsDoNotExtendTheWait(t *testing.T) {
	for class := range Class(NumClasses) {
		for _, every := range []time.Duration{time.Second, 3 * time.Second, 7 * time.Second, 100 * time.Millisecond} {
			t.Run(fmt.Sprintf("%v every %v", class, every), func(t *testing.T) {
				quota := wholeQuota(100)
				quota.Shares = shareOf(class, 1)
				w := newCaseWindow(t, quota)
				w.admit(class, 100)
				for w.at(every); w.elapsed() < time.Minute; w.clock.advance(every) {
					left := time.Minute - w.elapsed()
					if class != Interactive {
						left = max(left, Backoff(class, time.Minute))
					}
					w.wait(class, 10, left)
					w.never(class, 101)
					w.never(class, 0)
					w.used(100)
				}
				w.at(time.Minute)
				w.admit(class, 10)
				w.used(10)
			})
		}
	}

	// The other callers' polling does not extend it either.
	t.Run("many callers", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(100))
		w.admit(Interactive, 60)
		w.at(10 * time.Second)
		w.admit(Interactive, 40)
		for second := time.Duration(11); second < 60; second++ {
			w.at(second * time.Second)
			for tokens := int64(1); tokens <= 60; tokens++ {
				w.wait(Interactive, tokens, (60-second)*time.Second)
			}
			for tokens := int64(61); tokens <= 100; tokens++ {
				w.wait(Interactive, tokens, (70-second)*time.Second)
			}
		}
		w.at(time.Minute)
		w.headroom(Interactive, 60)
	})
}

// Case 26: what is charged above the quota leaves the window like anything else, even if nothing but refused calls
// happens meanwhile.
func TestAnOvershootDrains(t *testing.T) {
	const quota = 5_000_000
	for _, settled := range []time.Duration{0, 20 * time.Second, time.Minute - 1} {
		for _, actual := range []int64{quota, quota + 1, 5_006_972, 100 * quota} {
			w := newCaseWindow(t, wholeQuota(quota))
			g := w.admit(Interactive, quota)
			w.at(settled)
			g.Settle(actual)
			for w.elapsed() < time.Minute {
				w.used(actual)
				w.wait(Interactive, 1, time.Minute-w.elapsed())
				w.clock.advance(time.Second)
			}
			w.at(time.Minute)
			w.admit(Interactive, 1)
			w.used(1)
		}
	}

	t.Run("charge by charge", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(quota))
		for range 5 {
			w.admit(Interactive, quota/10).Settle(quota / 2)
			w.clock.advance(time.Second)
			if usedTotal(w.Window) == quota {
				break
			}
		}
		w.used(quota)
		w.wait(Interactive, 1, 58*time.Second)
		w.at(time.Minute)
		w.headroom(Interactive, quota/2)
		w.at(61 * time.Second)
		w.headroom(Interactive, quota)
	})
}

// Case 28: exactly as much as fits is admitted, one token more is not. What exactly fills the quota is not too large,
// what is one above it is, and a charge is gone exactly at the end of its window.
func TestTheLastTokenThatFitsIsAdmitted(t *testing.T) {
	for _, quota := range []int64{1, 2, 10, 1000, 1<<31 - 1, 1 << 32, math.MaxInt64 - 1} {
		w := newCaseWindow(t, wholeQuota(quota))
		require.Equal(t, ReasonTooLarge, w.never(Interactive, quota+1), "idle")
		w.admit(Interactive, quota)
		require.Equal(t, ReasonTooLarge, w.never(Interactive, quota+1), "full")
		for _, tokens := range []int64{1, quota} {
			w.at(0)
			require.Equal(t, ReasonQuotaFull, w.wait(Interactive, tokens, time.Minute))
		}
		w.at(time.Minute - 1)
		w.wait(Interactive, quota, 1)
		w.at(time.Minute)
		w.admit(Interactive, quota)
		w.wait(Interactive, 1, time.Minute)
	}

	// The same holds for the limits of a class.
	t.Run("of a class", func(t *testing.T) {
		quota := Quota{
			Tokens:   1000,
			Floors:   Fractions{Interactive: 0.3, Background: 0.1},
			Ceilings: Fractions{Background: 0.4},
			Pace:     1,
		}
		largest := ClassTokens{Interactive: 900, Background: 400, Batch: 600}
		for class := range Class(NumClasses) {
			require.Equal(t, largest[class], quota.Limits(class).Largest)
			w := newCaseWindow(t, quota)
			require.Equal(t, ReasonTooLarge, w.never(class, largest[class]+1))
			w.admit(class, largest[class])
			w.wait(class, 1, time.Minute)
		}
	})
}

// Case 29: in whole seconds a wait is rounded up, so that nobody comes back too early, and is never 0 unless there is
// nothing to wait for.
func TestAHintInSecondsIsNeverTooShort(t *testing.T) {
	tests := []struct {
		wait time.Duration
		want int64
	}{
		{1, 1},
		{400 * time.Millisecond, 1},
		{time.Second - 1, 1},
		{time.Second, 1},
		{time.Second + 1, 2},
		{1500 * time.Millisecond, 2},
		{9 * time.Second, 9},
		{9*time.Second + 1, 10},
		{time.Minute, 60},
		{24*time.Hour + time.Millisecond, 86401},
		{(math.MaxInt64 / time.Second) * time.Second, 9223372036},
		{math.MaxInt64 - 1, 9223372037},
		{math.MaxInt64, 9223372037},
		// No wait, or less, is no wait that a Window tells; but a caller's own Decision must not become a 0 either.
		{0, 1},
		{-1, 1},
		{math.MinInt64, 1},
	}
	for _, test := range tests {
		for _, reason := range []Reason{
			ReasonQuotaFull, ReasonReserved, ReasonCapped, ReasonPaced, ReasonQueued,
		} {
			d := Decision{Reason: reason, RetryAfter: test.wait}
			require.Equal(t, test.want, d.RetryAfterSeconds(), "%+v", d)
		}
		for _, d := range []Decision{
			{Admitted: true, Reason: ReasonOwnShare, RetryAfter: test.wait},
			{Admitted: true, Reason: ReasonBorrowed, RetryAfter: test.wait},
			{Reason: ReasonTooLarge, RetryAfter: test.wait},
			{Reason: ReasonInvalid, RetryAfter: test.wait},
		} {
			require.Zero(t, d.RetryAfterSeconds(), "%+v", d)
		}
	}

	// Whoever comes back after that many seconds is admitted.
	t.Run("from a window", func(t *testing.T) {
		rng := rand.New(rand.NewPCG(29, 0))
		for range 500 {
			quota := wholeQuota(10)
			quota.Window = time.Duration(1 + rng.Int64N(int64(3*time.Second)))
			w := newCaseWindow(t, quota)
			w.admit(Interactive, 10)
			w.at(time.Duration(rng.Int64N(int64(quota.Window))))
			d := w.refuse(Interactive, 10)
			seconds := d.RetryAfterSeconds()
			require.Positive(t, seconds)
			require.Less(t, time.Duration(seconds)*time.Second-d.RetryAfter, time.Second, "nor is it too long")
			w.clock.advance(time.Duration(seconds) * time.Second)
			w.admit(Interactive, 10)
		}
	})
}

// Case 31: a share is the decimal number that was written, in whole tokens, and parts that make a whole are the whole.
// Floating point loses no token.
func TestSharesAreExact(t *testing.T) {
	share := func(tokens int64, fraction float64) int64 {
		quota := Quota{Tokens: tokens, Shares: Fractions{Batch: fraction}}
		return quota.Limits(Batch).Share
	}
	require.Equal(t, int64(29), share(100, 0.29))
	require.Equal(t, int64(57), share(100, 0.57))

	t.Run("of one class", func(t *testing.T) {
		for _, tokens := range []int64{1, 7, 100, 1000, 999_999, 3_000_000_000, 1_000_000_000_001} {
			for n := 1; n < 1000; n++ {
				decimal := fmt.Sprintf("0.%03d", n)
				exact, _ := new(big.Rat).SetString(decimal)
				exact.Mul(exact, new(big.Rat).SetInt64(tokens))
				want := new(big.Int).Quo(exact.Num(), exact.Denom()).Int64()
				fraction, err := strconv.ParseFloat(decimal, 64)
				require.NoError(t, err)
				require.Equal(t, want, share(tokens, fraction), "%s of %d", decimal, tokens)
			}
		}
	})

	t.Run("that make a whole", func(t *testing.T) {
		rng := rand.New(rand.NewPCG(31, 0))
		wholes := []Fractions{
			{1. / 3, 1. / 3, 1. / 3}, {1. / 7, 2. / 7, 4. / 7}, {0.6, 0.3, 0.1}, {0.1, 0.2, 0.7}, {0.29, 0.57, 0.14},
			DefaultShares,
		}
		for range 500 {
			a, b := rng.Float64(), rng.Float64()
			wholes = append(wholes, Fractions{min(a, b), max(a, b) - min(a, b), 1 - max(a, b)})
		}
		for _, shares := range wholes {
			for _, tokens := range []int64{1, 2, 10, 100, 1000, 1_000_003, 3_000_000_000} {
				quota := Quota{Tokens: tokens, Shares: shares, Pace: 1}
				sum := int64(0)
				for class := range Class(NumClasses) {
					part := quota.Limits(class).Share
					require.InDelta(t, shares[class]*float64(tokens), part, 1.0001, "%v of %d", shares, tokens)
					sum += part
				}
				require.Equal(t, tokens, sum, "%v of %d", shares, tokens)
			}
		}
	})

	// A fresh window admits each class exactly its share, all of them together.
	t.Run("and can be claimed", func(t *testing.T) {
		for _, shares := range []Fractions{{1. / 3, 1. / 3, 1. / 3}, {0.29, 0.57, 0.14}, {0.57, 0.14, 0.29}} {
			quota := Quota{Tokens: 100, Shares: shares, Floors: shares, Pace: 1}
			w := newCaseWindow(t, quota)
			for class := range Class(NumClasses) {
				w.admit(class, quota.Limits(class).Share)
				w.wait(class, 1, time.Minute)
			}
			w.used(100)
		}
	})
}

// Clocks.

// Case 32: readings of the clock that arrive out of order create no tokens: the later one rules.
func TestAnOlderReadingOfTheClockFreesNothing(t *testing.T) {
	w := newCaseWindow(t, wholeQuota(100))
	w.at(10 * time.Second)
	w.admit(Interactive, 100)
	w.at(9999 * time.Millisecond)
	w.wait(Interactive, 1, time.Minute)
	for range 1000 {
		w.at(10001 * time.Millisecond)
		w.wait(Interactive, 1, 59999*time.Millisecond)
		w.at(9999 * time.Millisecond)
		w.wait(Interactive, 1, 59999*time.Millisecond)
		w.used(100)
	}
	w.at(70*time.Second - 1)
	w.wait(Interactive, 1, 1)
	w.at(70 * time.Second)
	w.admit(Interactive, 1)

	t.Run("by any small step", func(t *testing.T) {
		for seed := range uint64(4) {
			rng := rand.New(rand.NewPCG(32, seed))
			w := newCaseWindow(t, wholeQuota(100))
			w.admit(Interactive, 100)
			latest := time.Duration(0)
			for real := time.Duration(0); latest < time.Minute; real += time.Duration(rng.Int64N(int64(10 * time.Millisecond))) {
				// Each of many callers reads the clock at real, and is delayed by up to a 600th of the window.
				reading := max(real-time.Duration(rng.Int64N(int64(time.Minute/600)+1)), 0)
				latest = max(latest, reading)
				w.at(reading)
				if latest < time.Minute {
					w.wait(Interactive, 100, time.Minute-latest)
				}
			}
			w.admit(Interactive, 100)
		}
	})
}

// Case 33: a clock that is set does not hold a charge in the window for longer than a window, does not let it go
// early because it was set back, and never makes a wait longer than the window. This is about a caller's clock: nobody
// can set the monotonic one that a Window has of its own.
func TestSettingTheClockNeitherFreesNorHoldsTokens(t *testing.T) {
	const (
		small = time.Minute / 600 // up to this an older reading is a late one, not a clock that was set
		year  = 365 * 24 * time.Hour
	)

	t.Run("back", func(t *testing.T) {
		for _, back := range []time.Duration{
			small + 1, time.Second, 10 * time.Second, time.Minute, 8 * time.Hour, year, 200 * year,
		} {
			t.Run(back.String(), func(t *testing.T) {
				w := newCaseWindow(t, wholeQuota(100))
				w.admit(Interactive, 100)
				w.at(10 * time.Second)
				w.wait(Interactive, 100, 50*time.Second)
				w.clock.advance(-back)
				for left := 50 * time.Second; left > 0; left -= time.Second {
					w.wait(Interactive, 100, left)
					w.used(100)
					w.clock.advance(time.Second)
				}
				w.clock.advance(-1)
				w.used(100) // this reading is late, so it changes nothing
				w.clock.advance(1)
				w.admit(Interactive, 100)
				w.wait(Interactive, 1, time.Minute)
			})
		}
	})

	// Nobody looked between the step and the next call, so nobody can know how much of a window has passed. Then the
	// charge is not freed early, and the wait is a window at most.
	t.Run("back unseen", func(t *testing.T) {
		for _, back := range []time.Duration{61 * time.Second, time.Hour, 8 * time.Hour, 200 * year} {
			w := newCaseWindow(t, wholeQuota(100))
			w.admit(Interactive, 100)
			w.clock.advance(-back)
			w.clock.advance(time.Minute)
			w.wait(Interactive, 100, time.Minute)
			w.clock.advance(time.Minute)
			w.admit(Interactive, 100)
		}
	})

	t.Run("back by little", func(t *testing.T) {
		for _, back := range []time.Duration{1, time.Microsecond, 17 * time.Millisecond, small} {
			w := newCaseWindow(t, wholeQuota(100))
			w.admit(Interactive, 100)
			w.at(10 * time.Second)
			w.wait(Interactive, 100, 50*time.Second)
			w.clock.advance(-back)
			w.wait(Interactive, 100, 50*time.Second)
			w.clock.advance(50 * time.Second)
			w.wait(Interactive, 100, back) // late by so little, and never early
			w.clock.advance(back)
			w.admit(Interactive, 100)
		}
	})

	// A step forward cannot be told from time that passed. It frees what is as old as that, and nothing is lost when
	// the clock is set right again.
	t.Run("forward and back", func(t *testing.T) {
		for _, forward := range []time.Duration{
			1, time.Second, 49 * time.Second, 50*time.Second - 1, 50 * time.Second, time.Minute, 8 * time.Hour, 200 * year,
		} {
			w := newCaseWindow(t, wholeQuota(100))
			w.admit(Interactive, 100)
			w.at(10 * time.Second)
			w.wait(Interactive, 100, 50*time.Second)
			w.clock.advance(forward)
			left := 50*time.Second - forward
			if left <= 0 {
				w.admit(Interactive, 100)
				left = time.Minute
			}
			w.wait(Interactive, 100, left)
			w.clock.advance(-forward)
			w.wait(Interactive, 100, left)
			w.clock.advance(left)
			if forward <= small {
				w.wait(Interactive, 100, forward)
				w.clock.advance(forward)
			}
			w.admit(Interactive, 100)
		}
	})

	// However often it is set back, a full window is never followed by another before a window of real time is over,
	// and what a step can cost is the time since the clock was read before.
	t.Run("back again and again", func(t *testing.T) {
		const poll = 100 * time.Millisecond
		for seed := range uint64(20) {
			rng := rand.New(rand.NewPCG(33, seed))
			w := newCaseWindow(t, wholeQuota(100))
			w.admit(Interactive, 100)
			age, cost := time.Duration(0), time.Duration(0) // of the full window in real time
			for range 3000 {
				w.clock.advance(poll)
				age += poll
				if rng.IntN(40) == 0 {
					w.clock.advance(-poll - small - 1 - time.Duration(rng.Int64N(int64(10*time.Hour))))
					cost += poll
				}
				_, d := w.TryAcquire(Interactive, 100)
				require.LessOrEqual(t, d.RetryAfter, time.Minute)
				require.Equal(t, age-cost >= time.Minute, d.Admitted, "seed %d: a full window of age %v: %+v", seed, age, d)
				if d.Admitted {
					age, cost = 0, 0
				}
			}
		}
	})
}

// Case 34: a window follows the clock that it is given. With one that ran on while the machine slept the charge is gone
// on waking; with one that stood still it counts for what was left of its window, and no longer.
func TestAfterASuspendNobodyWaitsForMoreThanWhatWasLeft(t *testing.T) {
	for _, asleep := range []time.Duration{59 * time.Second, 10 * time.Minute, 10 * time.Hour, 30 * 24 * time.Hour} {
		wall, monotonic := newCaseWindow(t, wholeQuota(100)), newCaseWindow(t, wholeQuota(100))
		wall.admit(Interactive, 100)
		monotonic.admit(Interactive, 100)
		wall.clock.advance(asleep + time.Second)
		monotonic.clock.advance(time.Second)
		wall.admit(Interactive, 100)
		wall.used(100)
		monotonic.wait(Interactive, 100, 59*time.Second)
		monotonic.clock.advance(59 * time.Second)
		monotonic.admit(Interactive, 100)
	}
}

// Case 35: after however long a pause the window admits what it allows, and then refuses; and a clock may begin at the
// zero time.
func TestALongPauseChangesNothing(t *testing.T) {
	starts := map[string]time.Time{
		"zero time": {},
		"epoch":     time.Unix(0, 0),
		"today":     time.Date(2026, time.March, 3, 10, 37, 30, 0, time.UTC),
	}
	for name, start := range starts {
		t.Run(name, func(t *testing.T) {
			w := newCaseWindowAt(t, wholeQuota(100), start)
			claim := func() {
				t.Helper()
				w.admit(Interactive, 100)
				w.used(100)
				w.wait(Interactive, 1, time.Minute)
			}
			w.clock.advance(30 * time.Second) // idle from the beginning
			claim()
			for _, pause := range []time.Duration{
				time.Minute, time.Hour, 7 * 24 * time.Hour, 30 * 24 * time.Hour, 100 * 365 * 24 * time.Hour, math.MaxInt64,
			} {
				w.clock.advance(pause)
				claim()
			}
			for _, years := range []int{300, 2000, 5000} { // longer than any Duration
				w.clock.now = w.clock.now.AddDate(years, 0, 0)
				claim()
			}
		})
	}
}

// Nothing is remembered after a pause, however short the window is.
func TestALongPauseForgetsEverything(t *testing.T) {
	for length := time.Duration(1); length <= 30; length++ {
		quota := wholeQuota(100)
		quota.Window = length
		w := newCaseWindow(t, quota)
		w.admit(Interactive, 100)
		w.clock.advance(time.Hour)
		require.Equal(t, Usage{}, w.Usage(), length)
	}
}

// Case 38: no quota and no window is turned into a time per token, which would be 0 or inexact: counts and waits are
// exact for all of them.
func TestAnyQuotaInAnyWindowIsExact(t *testing.T) {
	tests := []struct {
		quota  int64
		window time.Duration
		call   int64
	}{
		{5_000_000, time.Second, 2500},
		{5_000_000, time.Minute, 2500},
		{5_000_000, time.Minute, 4999},
		{1, 24 * time.Hour, 1},
		{2000, time.Second, 1},
		{65525, time.Minute, 25},
		{1_000_001, time.Hour, 1000},
		{math.MaxInt64, time.Second, math.MaxInt64 / 100},
		{1000, 1, 1},
		{1000, 7, 1},
		{1000, time.Microsecond - 1, 3},
		{1, 50 * 365 * 24 * time.Hour, 1},
	}
	for _, test := range tests {
		t.Run(fmt.Sprintf("%d in %v", test.quota, test.window), func(t *testing.T) {
			quota := wholeQuota(test.quota)
			quota.Window = test.window
			w := newCaseWindow(t, quota)
			for range 3 {
				calls := test.quota / test.call
				require.Equal(t, calls*test.call, w.fill(Interactive, test.call))
				w.used(calls * test.call)
				w.wait(Interactive, test.quota, test.window)
				w.clock.advance(test.window - 1)
				w.used(calls * test.call)
				w.wait(Interactive, test.quota, 1)
				w.clock.advance(1)
				w.used(0)
			}
		})
	}
}

// A window that is longer than time itself is full for good.
func TestTheLongestWindowIsExact(t *testing.T) {
	const century = 100 * 365 * 24 * time.Hour
	quota := wholeQuota(10)
	quota.Window = math.MaxInt64
	w := newCaseWindow(t, quota)
	w.at(century)
	w.admit(Interactive, 4)
	w.at(2 * century)
	w.admit(Interactive, 6)
	w.wait(Interactive, 1, math.MaxInt64-2*century)
	w.wait(Batch, 1, math.MaxInt64-2*century) // also for whoever must wait until demand is forgotten
	w.at(math.MaxInt64)
	w.wait(Interactive, 1, 1) // for ever: the window's time has come to its end
	w.clock.advance(time.Hour)
	w.wait(Interactive, 1, 1)
	w.used(10)
}

// Quotas.

// Case 39: nothing is nothing. A quota of 0 is no quota and a class without share that may not borrow is admitted
// nothing, at once and for good, however idle the system is; neither is another word for unlimited.
func TestNothingAllowedIsNothingAdmitted(t *testing.T) {
	estimates := []int64{1, 2, 1000, math.MaxInt64}

	t.Run("no quota", func(t *testing.T) {
		for _, tokens := range []int64{0, -1, math.MinInt64} {
			quota := wholeQuota(tokens)
			_, err := NewWindow(quota)
			require.ErrorContains(t, err, "tokens")
			_, err = ParseQuota(fmt.Appendf(nil, `{"tokens": %d}`, tokens))
			require.ErrorContains(t, err, "tokens")
			require.Zero(t, quota.Limits(Interactive))
			for _, estimate := range estimates {
				want := Decision{Reason: ReasonInvalid}
				d := Admit(Interactive, estimate, Usage{}, quota)
				require.Equal(t, want, d)
				require.True(t, d.Permanent())
			}
		}
	})

	t.Run("zero values", func(t *testing.T) {
		var w Window
		for class := range Class(NumClasses + 1) {
			for _, estimate := range estimates {
				want := Decision{Reason: ReasonInvalid}
				require.Equal(t, want, Admit(class, estimate, Usage{}, Quota{}))
				g, d := w.TryAcquire(class, estimate)
				require.Equal(t, want, d)
				g.Settle(1)
				g.Cancel()
			}
		}
		require.Zero(t, w.Usage())
		require.Zero(t, w.Quota())
		require.Error(t, w.SetQuota(wholeQuota(1000)))
		require.Error(t, Quota{}.Validate())
	})

	t.Run("no share and no loan", func(t *testing.T) {
		parsed, err := ParseQuota([]byte(
			`{"tokens": 1000, "shares": {"interactive": 0.8, "background": 0.2}, "floors": "none", "ceilings": {"batch": 0}}`))
		require.NoError(t, err)
		for _, quota := range []Quota{
			parsed,
			{Tokens: 1000, Shares: Fractions{Interactive: 1}, Ceilings: Fractions{Batch: Closed}},
			{Tokens: 1000, Ceilings: Fractions{Batch: Closed}}, // its share is taken away too
			{Tokens: math.MaxInt64, Overdraft: math.MaxInt64, Ceilings: Fractions{Batch: Closed}},
		} {
			require.Zero(t, quota.Limits(Batch))
			w := newCaseWindow(t, quota)
			for _, estimate := range estimates {
				require.Equal(t, ReasonTooLarge, w.never(Batch, estimate))
				require.True(t, Admit(Batch, estimate, Usage{}, quota).Permanent())
			}
			w.admit(Interactive, 1)
		}
	})

	// No share alone is no prohibition, and no ceiling alone is no limit: what is not written down is the default.
	t.Run("no share but a loan", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(1000))
		w.admit(Batch, 1000)
	})
}

// Case 41: a quota is for its window. It is not cut into smaller ones, so an idle window admits at once whatever it
// admits at all. Nor does the pace of borrowing cut up a call.
func TestAnIdleWindowAdmitsAnyCallAtOnce(t *testing.T) {
	spread := wholeQuota(40_000)
	spread.Pace = 12
	for _, quota := range []Quota{wholeQuota(40_000), spread} {
		for class := range Class(NumClasses) { // with its own share, and borrowing
			for _, tokens := range []int64{1, 666, 667, 800, 3334, 20_000, 39_999, 40_000} {
				w := newCaseWindow(t, quota)
				w.admit(class, tokens)
				w.at(time.Minute)
				w.admit(class, tokens)
				w.at(time.Hour)
				w.admit(class, tokens)
			}
		}
	}

	// Many calls at once are as good as a large one, within a share.
	w := newCaseWindow(t, spread)
	for range 50 {
		w.admit(Interactive, 800)
	}
	w.used(40_000)
}

// Case 42: the quota is shared by all who call the window, not divided among them. However many they are, a call of
// half the quota is admitted to any one of them.
func TestTheQuotaIsNotDividedAmongItsCallers(t *testing.T) {
	const quota = 2_000_000
	for _, callers := range []int64{1, 2, 10, 100, 1000} {
		w := newCaseWindow(t, wholeQuota(quota))
		for range callers {
			w.admit(Interactive, 1) // everybody is active
		}
		w.admit(Interactive, quota/2)
		w.used(quota/2 + callers)
		// The same caller may have the rest too, and then there is nothing left for any of them.
		w.admit(Interactive, quota/2-callers)
		for range callers {
			w.wait(Interactive, 1, time.Minute)
		}
	}
}

// Case 44: a quota that is lowered below what is used leaves no room, not less than none. What is charged drains as
// before, hints name the true time under the new quota, and open calls are settled and cancelled as ever.
func TestAQuotaBelowItsUseHasNoRoom(t *testing.T) {
	w := newCaseWindow(t, wholeQuota(1000))
	w.admit(Interactive, 300)
	w.at(10 * time.Second)
	second := w.admit(Interactive, 300)
	w.at(20 * time.Second)
	third := w.admit(Interactive, 200)
	w.at(30 * time.Second)
	require.NoError(t, w.SetQuota(wholeQuota(500)))
	w.used(800)
	w.headroom(Interactive, 0)
	w.wait(Interactive, 1, 40*time.Second)
	w.wait(Interactive, 300, 40*time.Second)
	w.wait(Interactive, 301, 50*time.Second)
	require.Equal(t, ReasonTooLarge, w.never(Interactive, 501))

	second.Settle(100)
	w.used(600)
	w.headroom(Interactive, 0)
	third.Cancel()
	w.used(400)
	w.headroom(Interactive, 100)
	w.at(time.Minute)
	w.headroom(Interactive, 400)

	t.Run("to any quota", func(t *testing.T) {
		for _, quota := range []int64{1, 199, 200, 201, 499, 500, 501, 799, 800, 801} {
			w := newCaseWindow(t, wholeQuota(1000))
			w.admit(Interactive, 300)
			w.at(10 * time.Second)
			w.admit(Interactive, 300)
			w.at(20 * time.Second)
			w.admit(Interactive, 200)
			require.NoError(t, w.SetQuota(wholeQuota(quota)))
			for _, step := range []struct {
				at   time.Duration
				used int64
			}{{20, 800}, {60, 500}, {70, 200}, {80, 0}} {
				w.at(step.at * time.Second)
				w.used(step.used)
				w.headroom(Interactive, max(quota-step.used, 0))
			}
		}
	})

	// A lower share of a class is the same, for that class.
	t.Run("of a class", func(t *testing.T) {
		quota := Quota{
			Tokens:   1000,
			Shares:   Fractions{Interactive: 0.5, Batch: 0.5},
			Floors:   NoFloors,
			Ceilings: Fractions{Batch: 0.5},
			Pace:     1,
		}
		w := newCaseWindow(t, quota)
		w.admit(Batch, 400)
		quota.Shares[Batch], quota.Ceilings[Batch] = 0.1, 0.1
		require.NoError(t, w.SetQuota(quota))
		w.at(20 * time.Second)
		require.Equal(t, ReasonCapped, w.wait(Batch, 1, 40*time.Second))
		w.used(400)
		w.headroom(Interactive, 600)
	})
}

// Case 46: putting a quota in force again refills nothing, and a new one is in force at once.
func TestAReloadKeepsWhatIsCharged(t *testing.T) {
	reload := func(w *caseWindow, tokens int64) {
		data := fmt.Appendf(nil,
			`{"tokens": %d, "window": "1m", "shares": {"interactive": 1}, "floors": "none", "pace": 1}`, tokens)
		quota, err := ParseQuota(data)
		require.NoError(t, err)
		require.NoError(t, w.SetQuota(quota))
		require.Empty(t, cmp.Diff(quota, w.Quota()))
	}
	w := newCaseWindow(t, wholeQuota(1000))
	w.admit(Interactive, 600)
	w.at(time.Second)
	open := w.admit(Interactive, 400)
	for second := time.Duration(2); second < 12; second++ {
		w.at(second * time.Second)
		reload(w, 1000)
		w.used(1000)
		w.headroom(Interactive, 0)
		w.wait(Interactive, 600, (60-second)*time.Second)
		w.wait(Interactive, 601, (61-second)*time.Second)
	}
	reload(w, 1500)
	w.used(1000)
	w.headroom(Interactive, 500)
	reload(w, 1000)
	w.headroom(Interactive, 0)
	open.Settle(100) // of before all the reloads
	w.used(700)
	w.headroom(Interactive, 300)

	// What classes lately asked for, and the pace at which they borrow, outlive a reload too: it is no way round either.
	t.Run("of a loan", func(t *testing.T) {
		quota := Quota{Tokens: 1200, Floors: ElasticFloors}
		w := newCaseWindow(t, quota)
		w.admit(Interactive, 700)
		w.admit(Batch, 110)
		before, d := w.Usage(), w.refuse(Batch, 20)
		for range 10 {
			require.NoError(t, w.SetQuota(w.Quota()))
			after := w.Usage()
			after.Demand[Batch] = before.Demand[Batch] // the refused calls count in it
			require.Empty(t, cmp.Diff(before, after))
			require.Equal(t, d, w.refuse(Batch, 20))
		}
	})
}

// Case 48: a key that is misspelt or stands twice is an error that names it, wherever it stands, and what was in force
// stays in force.
func TestAnUnknownOrRepeatedKeyIsAnErrorThatNamesIt(t *testing.T) {
	tests := []struct{ data, key string }{
		{`{"tokens": 1000, "interactve": 0.6}`, `"interactve"`},
		{`{"tokens": 1000, "tpm": 5}`, `"tpm"`},
		{`{"tpm": 1000}`, `"tpm"`},
		{`{"Tokens": 1000}`, `"Tokens"`},
		{`{"tokens": 1000, "": 1}`, `""`},
		{`{"tokens": 1000, "share": {"interactive": 1}}`, `"share"`},
		{`{"tokens": 1000, "Pace": 1}`, `"Pace"`},
		{`{"tokens": 1000, "tokens ": 1000}`, `"tokens "`},
		{`{"tokens": 1000, "limits": {"tokens": 5}}`, `"limits"`},
		{`{"tokens": 1000, "shares": {"interactve": 0.6, "batch": 0.4}}`, `"interactve"`},
		{`{"tokens": 1000, "shares": {"Interactive": 0.6, "batch": 0.4}}`, `"Interactive"`},
		{`{"tokens": 1000, "shares": {"interactive": 0.6, "default": 0.4}}`, `"default"`},
		{`{"tokens": 1000, "shares": {"0": 0.6, "batch": 0.4}}`, `"0"`},
		{`{"tokens": 1000, "floors": {"back_ground": 0.1}}`, `"back_ground"`},
		{`{"tokens": 1000, "ceilings": {"batsh": 0.1}}`, `"batsh"`},
		{`{"tokens": 1000, "ceilings": {"batsh": null}}`, `"batsh"`},

		{`{"tokens": 1000, "tokens": 1000}`, `"tokens"`},
		{`{"tokens": 1000, "window": "1m", "window": "1m"}`, `"window"`},
		{`{"tokens": 1000, "tok\u0065ns": 2000}`, `"tokens"`},
		{`{"tokens": 1000, "pace": 1, "pace": 12}`, `"pace"`},
		{`{"tokens": 1000, "shares": {"batch": 1}, "shares": {"interactive": 1}}`, `"shares"`},
		{`{"tokens": 1000, "shares": {"batch": 0.1, "interactive": 0.5, "batch": 0.2}}`, `"batch"`},
		{`{"tokens": 1000, "shares": {"batch": 0, "batch": 0.2}}`, `"batch"`},
		{`{"tokens": 1000, "floors": "none", "floors": {"batch": 0.1}}`, `"floors"`},
		{`{"tokens": 1000, "floors": {"background": 0.1, "background": 0.1}}`, `"background"`},
		{`{"tokens": 1000, "ceilings": {"interactive": 0.8, "interactive": 0.9}}`, `"interactive"`},
	}
	want := wholeQuotaWritten(700)
	running := func(t *testing.T) *caseWindow {
		w := newCaseWindow(t, want)
		w.admit(Interactive, 500)
		return w
	}
	stays := func(w *caseWindow) {
		w.t.Helper()
		require.Empty(w.t, cmp.Diff(want, w.Quota()))
		w.used(500)
		w.headroom(Batch, 200) // a loan first: what is refused within a share is held for it from then on
		w.headroom(Interactive, 200)
	}
	for _, test := range tests {
		t.Run(test.data, func(t *testing.T) {
			parsed, err := ParseQuota([]byte(test.data))
			require.ErrorContains(t, err, test.key)
			require.Zero(t, parsed, "nothing that could be mistaken for a quota")

			kept := want
			require.ErrorContains(t, kept.UnmarshalJSON([]byte(test.data)), test.key)
			require.Empty(t, cmp.Diff(want, kept))
			require.ErrorContains(t, json.Unmarshal([]byte(test.data), &kept), test.key)
			require.Empty(t, cmp.Diff(want, kept))
			config := struct{ Model Quota }{kept}
			require.ErrorContains(t, json.Unmarshal([]byte(`{"model": `+test.data+`}`), &config), test.key)
			require.Empty(t, cmp.Diff(want, config.Model))

			// Even whoever does not look at the error of parsing cannot put the outcome in force.
			w := running(t)
			require.Error(t, w.SetQuota(parsed))
			stays(w)
		})
	}

	t.Run("failed SetQuota", func(t *testing.T) {
		for _, change := range []func(*Quota){
			func(q *Quota) { q.Tokens = 0 },
			func(q *Quota) { q.Window = time.Hour },
			func(q *Quota) { q.Window = -1 },
			func(q *Quota) { q.Shares[Batch] = 0.5 },
			func(q *Quota) { q.Floors = Fractions{Batch: 0.5} },
			func(q *Quota) { q.Pace = 13 },
			func(q *Quota) { q.Overdraft = -1 },
		} {
			bad := want
			bad.Tokens = 2000 // were any of it put in force, there would be room
			change(&bad)
			w := running(t)
			require.Error(t, w.SetQuota(bad))
			stays(w)
		}
	})
}

// Case 49: fractions that cannot be meant are errors that name the key. Nothing is rescaled, cut or ignored; and
// rounding in the sum is no error.
func TestImpossibleFractionsAreErrorsThatNameTheKey(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	shares := func(f Fractions) Quota { return Quota{Tokens: 1000, Shares: f} }
	floors := func(f Fractions) Quota { return Quota{Tokens: 1000, Floors: f} }
	ceilings := func(f Fractions) Quota { return Quota{Tokens: 1000, Ceilings: f} }
	tests := []struct {
		key   string
		quota Quota
	}{
		{"shares add up to 1.4", shares(Fractions{0.6, 0.8})},
		{"shares add up to", shares(Fractions{0.6, 0.3, 0.2})},
		{"shares add up to", shares(Fractions{0.6, 0.3, 0.1 + 2e-9})},
		{"shares add up to 3", shares(Fractions{1, 1, 1})},
		{"shares.interactive", shares(Fractions{-0.1, 0.6, 0.5})},
		{"shares.background", shares(Fractions{0.6, -1e-12, 0.4})},
		{"shares.batch", shares(Fractions{0.6, 0.3, -1})},
		{"shares.interactive", shares(Fractions{-1, -1, -1})}, // only floors can be NoFloors
		{"shares.interactive", shares(Fractions{50, 30, 20})},
		{"shares.batch", shares(Fractions{0, 0, 1.1})},
		{"shares.interactive", shares(Fractions{nan, 0.3, 0.1})},
		{"shares.batch", shares(Fractions{0.6, 0.3, nan})},
		{"shares.background", shares(Fractions{0, inf, 0})},
		{"shares.background", shares(Fractions{1, -inf, 0})},

		// Floors add up to more than the quota only if one of them is above its share.
		{"floors.background", floors(Fractions{0.7, 0.3, 0.1})},
		{"floors.interactive", floors(Fractions{0.8, 0.2, 0.1})},
		{"floors.batch", floors(Fractions{0, 0, 0.1 + 2e-9})},
		{"floors.interactive", floors(Fractions{10, 5, 5})},
		{"floors.interactive", floors(Fractions{-0.1, 0.1, 0.1})},
		{"floors.interactive", floors(Fractions{-1, -1, 0})},
		{"floors.background", floors(Fractions{0.1, nan, 0})},
		{"floors.batch", floors(Fractions{0, 0, inf})},

		{"ceilings.interactive", ceilings(Fractions{0.5, 0, 0})}, // its share is 0.7
		{"ceilings.background", ceilings(Fractions{0, 1.5, 0})},
		{"ceilings.batch", ceilings(Fractions{0, 0, 50})},
		{"ceilings.batch", ceilings(Fractions{0, 0, -0.5})},
		{"ceilings.batch", ceilings(Fractions{0, 0, -2})},
		{"ceilings.batch", ceilings(Fractions{0, 0, nan})},
		{"ceilings.interactive", ceilings(Fractions{inf, 0, 0})},

		{"tokens", Quota{}},
		{"tokens", Quota{Tokens: -1000}},
		{"window", Quota{Tokens: 1000, Window: -time.Second}},
		{"pace", Quota{Tokens: 1000, Pace: -1}},
		{"pace", Quota{Tokens: 1000, Pace: 13}},
		{"overdraft", Quota{Tokens: 1000, Overdraft: -1}},
	}
	for _, test := range tests {
		require.ErrorContains(t, test.quota.Validate(), test.key)
		_, err := NewWindow(test.quota)
		require.ErrorContains(t, err, test.key)
		w := newCaseWindow(t, wholeQuota(1000))
		if test.quota.Window == 0 {
			require.ErrorContains(t, w.SetQuota(test.quota), test.key)
		}
		require.Empty(t, cmp.Diff(wholeQuotaWritten(1000), w.Quota()))
		_, err = json.Marshal(test.quota)
		require.ErrorContains(t, err, test.key)
		for class := range Class(NumClasses) {
			require.Zero(t, test.quota.Limits(class), "%v: not rescaled", test.quota)
			d := Admit(class, 1, Usage{}, test.quota)
			require.Equal(t, Decision{Reason: ReasonInvalid}, d)
		}
	}

	t.Run("in JSON", func(t *testing.T) {
		tests := []struct{ data, key string }{
			{`"shares": {"interactive": 0.6, "background": 0.8}`, "shares add up to 1.4"},
			{`"shares": {"interactive": -0.1, "background": 0.6, "batch": 0.5}`, "shares.interactive"},
			{`"shares": {"interactive": 50, "background": 30, "batch": 20}`, "shares.interactive"},
			{`"shares": {"interactive": "NaN", "batch": 0.1}`, "shares.interactive"},
			{`"shares": {"batch": "0.1"}`, "shares.batch"},
			{`"shares": {"batch": null}`, "shares.batch"},
			{`"shares": {"batch": true}`, "shares.batch"},
			{`"shares": {"batch": [0.1]}`, "shares.batch"},
			{`"shares": {"batch": 1e400}`, "shares.batch"},
			{`"shares": {"interactive": 0, "batch": 0}`, "shares"}, // would silently be the defaults
			{`"shares": {}`, "shares"},
			{`"shares": null`, "shares"},
			{`"shares": [0.7, 0.2, 0.1]`, "shares"},
			{`"shares": "none"`, "shares"},
			{`"floors": {"background": 0.3}`, "floors.background"},
			{`"floors": {"interactive": 0.7, "background": 0.2, "batch": 0.2}`, "floors.batch"},
			{`"floors": {"batch": -1}`, "floors.batch"},
			{`"floors": {"batch": "NaN"}`, "floors.batch"},
			{`"floors": "all"`, "floors"},
			{`"floors": null`, "floors"},
			{`"ceilings": {"interactive": 0.5}`, "ceilings.interactive"},
			{`"ceilings": {"batch": 50}`, "ceilings.batch"},
			{`"ceilings": {"batch": -1}`, "ceilings.batch"}, // Closed is written as 0
			{`"ceilings": {"batch": "NaN"}`, "ceilings.batch"},
			{`"ceilings": 0.5`, "ceilings"},
			{`"window": "-1m"`, "window"},
			{`"window": 60`, "window"},
			{`"pace": 13`, "pace"},
			{`"pace": 1.5`, "pace"},
			{`"overdraft": -1`, "overdraft"},
			{`"overdraft": "1"`, "overdraft"},
		}
		for _, test := range tests {
			quota, err := ParseQuota([]byte(`{"tokens": 1000, ` + test.data + `}`))
			require.ErrorContains(t, err, test.key, test.data)
			require.Zero(t, quota)
		}
	})

	// In floating point 0.6+0.3+0.1 is a little less than 1, and other sums are a little more.
	t.Run("but for rounding", func(t *testing.T) {
		for _, parts := range []Fractions{{0.6, 0.3, 0.1}, {0.7, 0.2, 0.1}, {0.55, 0.35, 0.1}, {0.1 + 5e-10, 0.7, 0.2}} {
			for order := range orders(len(parts)) {
				f := Fractions{parts[order[0]], parts[order[1]], parts[order[2]]}
				quota := Quota{Tokens: 1000, Shares: f, Floors: f, Ceilings: f}
				require.NoError(t, quota.Validate(), "%v", f)
				for class := range Class(NumClasses) {
					part := int64(math.Round(1000 * f[class]))
					want := Limits{Share: part, Floor: part, Ceiling: part, Largest: part}
					require.Equal(t, want, quota.Limits(class), "%v of %v", class, f)
				}
			}
		}
	})
}

// Case 51: tokens are 64 bits wide where an int is not. This is worth most where the tests are built for 32 bits.
func TestQuotasBeyond32BitsWork(t *testing.T) {
	quotas := []int64{
		1<<31 - 1, 1 << 31, 3_000_000_000, 3_355_443_200, 1<<32 - 1, 1 << 32, 1<<32 + 1, 10_000_000_000, 1<<53 + 1,
		math.MaxInt64 - 1, math.MaxInt64,
	}
	for _, tokens := range quotas {
		t.Run(strconv.FormatInt(tokens, 10), func(t *testing.T) {
			data := fmt.Appendf(nil, `{"tokens": %d, "shares": {"interactive": 1}, "floors": "none", "pace": 1}`, tokens)
			quota, err := ParseQuota(data)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(wholeQuotaWritten(tokens), quota))
			require.Equal(t, Limits{Share: tokens, Ceiling: tokens, Largest: tokens}, quota.Limits(Interactive))
			written, err := json.Marshal(quota)
			require.NoError(t, err)
			read, err := ParseQuota(written)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(quota, read))

			w := newCaseWindow(t, quota)
			w.admit(Interactive, tokens-1)
			w.used(tokens - 1)
			w.wait(Interactive, 2, time.Minute)
			open := w.admit(Interactive, 1)
			w.used(tokens)
			w.wait(Interactive, 1, time.Minute)
			w.wait(Interactive, tokens, time.Minute)
			open.Settle(0)
			w.used(tokens - 1)
			w.at(time.Minute)
			w.admit(Interactive, tokens)

			// The classes divide it without a token lost.
			sum := int64(0)
			for class := range Class(NumClasses) {
				limits := Quota{Tokens: tokens}.Limits(class)
				require.Positive(t, limits.Floor)
				require.GreaterOrEqual(t, limits.Share, limits.Floor)
				sum += limits.Share
			}
			require.Equal(t, tokens, sum)
		})
	}

	// What is cut to 32 bits may become valid: 2^32+1 would be 1, and so would 1-2^32.
	t.Run("small numbers do not wrap", func(t *testing.T) {
		for _, pace := range []int64{1<<32 + 1, 1<<32 + 12, 1<<33 + 6, 1 - 1<<32, math.MaxInt64, math.MinInt64 + 1} {
			_, err := ParseQuota(fmt.Appendf(nil, `{"tokens": 1000, "pace": %d}`, pace))
			require.ErrorContains(t, err, "pace", "%d", pace)
		}
		for _, tokens := range []string{"9223372036854775808", "18446744073709551617", "-4294967295", "1e19"} {
			_, err := ParseQuota([]byte(`{"tokens": ` + tokens + `}`))
			require.ErrorContains(t, err, "tokens", tokens)
			_, err = ParseQuota([]byte(`{"tokens": 1000, "overdraft": ` + tokens + `}`))
			require.ErrorContains(t, err, "overdraft", tokens)
		}
	})
}

// Classes.

// Case 53: a class that is alone may use all but the floors of the others, and all if there are none. No threshold
// turns its share into a ceiling.
func TestAClassAloneUsesAllButTheFloorsOfTheOthers(t *testing.T) {
	tests := []struct {
		name   string
		shares Fractions
		floors Fractions
		want   ClassTokens
	}{
		{"reported", DefaultShares, Fractions{0.3, 0.1, 0}, ClassTokens{900, 700, 600}},
		{"no floors", DefaultShares, NoFloors, ClassTokens{1000, 1000, 1000}},
		{"defaults", Fractions{}, Fractions{}, ClassTokens{850, 250, 200}},
		{"elastic", Fractions{}, ElasticFloors, ClassTokens{900, 850, 850}},
		{"batch alone has a share", Fractions{0, 0, 1}, Fractions{0, 0, 0.5}, ClassTokens{500, 500, 1000}},
		{"not all is shared", Fractions{0.5, 0, 0}, Fractions{0.5, 0, 0}, ClassTokens{1000, 500, 500}},
	}
	for _, test := range tests {
		for class := range Class(NumClasses) {
			t.Run(fmt.Sprintf("%s/%v", test.name, class), func(t *testing.T) {
				quota := Quota{Tokens: 1000, Shares: test.shares, Floors: test.floors, Pace: 1}
				want := test.want[class]
				require.Equal(t, want, quota.Limits(class).Largest)
				newCaseWindow(t, quota).admit(class, want)

				w := newCaseWindow(t, quota)
				require.Equal(t, want, w.fill(class, 1), "in small calls")
				w.wait(class, 1, time.Minute)

				// Spread over a window it is the same sum; it only comes part by part.
				quota.Pace = 12
				w, most := newCaseWindow(t, quota), int64(0)
				for range 240 {
					w.fill(class, 1)
					most = max(most, usedTotal(w.Window))
					w.clock.advance(time.Second)
				}
				require.Equal(t, want, most, "spread")
			})
		}
	}
}

// Case 55: a class can be held to its share, or to its share and so much more, however much is free.
func TestACeilingForbidsOrLimitsBorrowing(t *testing.T) {
	for class := range Class(NumClasses) {
		for _, test := range []struct {
			share, ceiling float64
			want           int64
		}{
			{0.25, 0.25, 250},  // no borrowing
			{0.25, 0.375, 375}, // half as much again
			{0.25, 0.251, 251},
			{0.25, 0.9999, 999},
			{0.25, 1, 1000},
			{0.25, 0, 1000}, // no ceiling
			{0, 0.25, 250},  // nothing of its own, but so much of what is free
			{0.001, 0.001, 1},
			{0.25, Closed, 0},
		} {
			t.Run(fmt.Sprintf("%v %v of %v", class, test.ceiling, test.share), func(t *testing.T) {
				other := (class + 1) % NumClasses
				quota := Quota{
					Tokens:   1000,
					Floors:   NoFloors,
					Ceilings: shareOf(class, test.ceiling),
					Pace:     1,
				}
				quota.Shares[class], quota.Shares[other] = test.share, 0.5
				w := newCaseWindow(t, quota)
				require.Equal(t, ReasonTooLarge, w.never(class, test.want+1))
				require.Equal(t, test.want, w.fill(class, 1))
				if 0 < test.want && test.want < 1000 {
					require.Equal(t, ReasonCapped, w.wait(class, 1, time.Minute))
				}
				require.Equal(t, 1000-test.want, w.fill(other, 1), "the rest stays free for others")
			})
		}
	}
}

// Case 60: a class comes from the code that stamped the context. Nothing that a caller can send, in a header or
// otherwise, names one, and what is not stamped is Batch.
func TestNoRequestDataSelectsAClass(t *testing.T) {
	type key string
	forged := context.Background()
	for _, name := range []string{"class", "Class", "source", "Source", "priority", "quotashare.Class", "X-Quota-Class"} {
		for _, value := range []any{"interactive", "api", 0, uint8(0), Interactive, SourceAPI} {
			//lint:ignore SA1029 a string for a key is the point
			forged = context.WithValue(forged, name, value)
			forged = context.WithValue(forged, key(name), value)
		}
	}
	//lint:ignore SA1029 a key that anybody can make is the point
	forged = context.WithValue(forged, struct{}{}, SourceAPI)

	t.Run("by a context", func(t *testing.T) {
		require.Equal(t, Batch, ClassFrom(forged))
		_, stamped := SourceFrom(forged)
		require.False(t, stamped)
		for source, want := range map[Source]Class{
			{}:              Batch,
			SourceAPI:       Interactive,
			SourceScheduler: Background,
			SourceEval:      Batch,
			SourceBackfill:  Batch,
		} {
			require.Equal(t, want, ClassFrom(WithSource(forged, source)))
		}
	})

	t.Run("by a request", func(t *testing.T) {
		forge := func(ctx context.Context) *http.Request {
			r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/?class=interactive&source=api",
				strings.NewReader(`{"class": "interactive", "source": "api", "priority": 0}`))
			for _, name := range []string{"Class", "X-Class", "X-Quota-Class", "X-Quotashare-Class", "X-Source", "Priority"} {
				r.Header.Set(name, "interactive")
				r.Header.Add(name, "0")
			}
			return r
		}
		for _, source := range []Source{{}, SourceEval, SourceBackfill} {
			served := false
			handler := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				served = true
				require.Equal(t, Batch, ClassFrom(r.Context()))
				// Nor does a handler raise what an eval has called.
				raised := WithSource(r.Context(), SourceAPI)
				require.Equal(t, Batch, ClassFrom(raised))
			})
			handler.ServeHTTP(httptest.NewRecorder(), forge(WithSource(forged, source)))
			require.True(t, served)
		}
		require.Equal(t, Batch, ClassFrom(forge(forged).Context()), "nothing stamped")
	})

	t.Run("by text", func(t *testing.T) {
		for _, name := range []string{"interactive", "api", "Interactive", "batch", "urgent", ""} {
			class := Batch
			require.Error(t, json.Unmarshal([]byte(strconv.Quote(name)), &class))
			require.Equal(t, Batch, class)
			source := SourceEval
			//lint:ignore SA9005 that it cannot be read is what is tested
			require.Error(t, json.Unmarshal([]byte(strconv.Quote(name)), &source))
			//lint:ignore SA9005 the same
			require.NoError(t, json.Unmarshal([]byte(`{"entry": 1, "Entry": 1}`), &source))
			require.Equal(t, SourceEval, source)
		}
	})

	// All the methods of the two types: none parses, scans or sets one. (TestNothingMakesASource looks at the functions.)
	t.Run("by a method", func(t *testing.T) {
		for _, typ := range []reflect.Type{reflect.TypeFor[*Class](), reflect.TypeFor[*Source]()} {
			var methods []string
			for i := range typ.NumMethod() {
				methods = append(methods, typ.Method(i).Name)
			}
			require.Equal(t, []string{"MarshalText", "String"}, methods, "%v", typ)
		}
		for field := range reflect.TypeFor[Source]().Fields() {
			require.False(t, field.IsExported(), field.Name)
			require.Equal(t, "entry", field.Type.Name(), "a type that no value outside the package converts to")
		}
	})
}

// Backoff.

// Case 70: a backoff is a part of the window, whatever the window is. It does not grow with the number of attempts, so
// there is nothing that could overflow.
func TestABackoffIsAPartOfTheWindow(t *testing.T) {
	windows := []time.Duration{
		1, 2, 11, 12, 13, 29, 30, 119, 120, 121, time.Microsecond, time.Second, time.Minute, time.Hour, 24 * time.Hour,
		math.MaxInt64 / 120, math.MaxInt64 / 2, math.MaxInt64 - 1, math.MaxInt64,
	}
	classes := []Class{Interactive, Background, Batch, 3, 255}
	shorter := make([]time.Duration, len(classes))
	for _, window := range windows {
		least := time.Duration(1)
		for i, class := range classes {
			backoff := Backoff(class, window)
			require.GreaterOrEqual(t, backoff, least, "%v in %v: a lower class waits no less", class, window)
			require.LessOrEqual(t, backoff, window, "%v in %v", class, window)
			require.GreaterOrEqual(t, backoff, shorter[i], "%v in %v: no less than in a shorter window", class, window)
			least, shorter[i] = backoff, backoff
		}
	}
	for _, class := range classes {
		require.Equal(t, Backoff(class, time.Minute), Backoff(class, 0), "the default window")
		for _, window := range []time.Duration{-1, -time.Minute, math.MinInt64 + 1, math.MinInt64} {
			require.Zero(t, Backoff(class, window), "%v in %v", class, window)
		}
	}
	require.Equal(t, 500*time.Millisecond, Backoff(Interactive, time.Minute))
	require.Equal(t, 2*time.Second, Backoff(Background, time.Minute))
	require.Equal(t, 5*time.Second, Backoff(Batch, time.Minute))

	t.Run("after any number of refusals", func(t *testing.T) {
		for class := range Class(NumClasses) {
			quota := wholeQuota(100)
			quota.Shares = shareOf(class, 1)
			usage := Usage{Used: tokensOf(class, 100)}
			w := newCaseWindow(t, quota)
			w.admit(class, 100)
			w.at(time.Minute - 1)
			wait := time.Duration(1)
			if class != Interactive {
				wait = Backoff(class, time.Minute)
			}
			for range 1000 {
				w.wait(class, 1, wait)
				require.Equal(t, Backoff(class, time.Minute), Admit(class, 1, usage, quota).RetryAfter)
			}
		}
	})
}

// Case 90: a call whose owner is gone gives its tokens back when they leave the window; and one that is ended later
// than that has nothing left to give back.
func TestForgottenAndLateGrantsLeakNothing(t *testing.T) {
	t.Run("forgotten", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(1000))
		for i := range time.Duration(100) {
			w.at(i * time.Minute)
			w.admit(Interactive, 500) // and nobody ever hears of it
			w.admit(Interactive, 500)
			w.clock.advance(time.Minute - 1)
			w.used(1000)
			w.wait(Interactive, 1000, 1)
		}
		w.clock.advance(1)
		w.used(0)
		w.headroom(Interactive, 1000)
	})

	t.Run("late", func(t *testing.T) {
		ends := map[string]func(*Grant){
			"cancel":         func(g *Grant) { g.Cancel() },
			"settle 0":       func(g *Grant) { g.Settle(0) },
			"settle 200":     func(g *Grant) { g.Settle(200) },
			"settle 900":     func(g *Grant) { g.Settle(900) },
			"settle unknown": func(g *Grant) { g.Settle(-1) },
		}
		for name, end := range ends {
			for _, late := range []time.Duration{time.Minute, time.Minute + 1, 90 * time.Second, 30 * 24 * time.Hour} {
				w := newCaseWindow(t, wholeQuota(1000))
				g := w.admit(Interactive, 500)
				w.at(late - 1)
				left := usedTotal(w.Window)
				w.admit(Interactive, 100) // it must not be taken from somebody else either
				w.at(late)
				end(g)
				require.Equal(t, int64(100), usedTotal(w.Window), "%s at %v", name, late)
				w.headroom(Interactive, 900)
				if late == time.Minute {
					require.Equal(t, int64(500), left, "it counted until then")
				}
			}
		}
	})

	t.Run("just in time", func(t *testing.T) {
		w := newCaseWindow(t, wholeQuota(1000))
		g := w.admit(Interactive, 500)
		w.at(time.Minute - 1)
		g.Settle(200)
		w.used(200)
		w.headroom(Interactive, 800)
		w.at(time.Minute)
		w.used(0)
	})
}
