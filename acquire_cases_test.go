package quotashare_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

// The cases of calls that wait; cases_test.go has the others. They run in bubbles of testing/synctest, where time
// passes only while everybody sleeps or waits: what happens at once takes no time at all, and every other time is
// exact.

// A bubbleWindow is a Window in a bubble. Times are given as so long after it was made.
type bubbleWindow struct {
	*Window
	t     *testing.T
	start time.Time
}

func newBubbleWindow(t *testing.T, quota Quota, options ...Option) *bubbleWindow {
	t.Helper()
	w, err := NewWindow(quota, options...)
	require.NoError(t, err)
	return &bubbleWindow{w, t, time.Now()}
}

// at sleeps until the time, and then until all that happens at that time has happened.
func (w *bubbleWindow) at(sinceStart time.Duration) {
	w.t.Helper()
	require.LessOrEqual(w.t, time.Since(w.start), sinceStart, "it is later than that")
	time.Sleep(sinceStart - time.Since(w.start))
	synctest.Wait()
}

// admit wants the call to be admitted by TryAcquire.
func (w *bubbleWindow) admit(class Class, tokens int64) *Grant {
	w.t.Helper()
	g, d := w.TryAcquire(class, tokens)
	require.True(w.t, d.Admitted, "%v call of %d tokens at %v: %+v", class, tokens, time.Since(w.start), d)
	return &g
}

// refuse wants the call to be refused by TryAcquire.
func (w *bubbleWindow) refuse(class Class, tokens int64) Decision {
	w.t.Helper()
	_, d := w.TryAcquire(class, tokens)
	require.False(w.t, d.Admitted, "%v call of %d tokens at %v: %+v", class, tokens, time.Since(w.start), d)
	return d
}

// used wants all classes together to hold so many tokens.
func (w *bubbleWindow) used(want int64) {
	w.t.Helper()
	require.Equal(w.t, want, usedTotal(w.Window), "tokens used at %v", time.Since(w.start))
}

// waiting wants so many calls of the class to wait.
func (w *bubbleWindow) waiting(class Class, want int) {
	w.t.Helper()
	require.Equal(w.t, want, w.Stats().Classes[class].Waiting, "%v calls that wait at %v", class, time.Since(w.start))
}

// A bubbleCall is a call of Acquire by a goroutine of its own. What it came to may be read once ended is closed.
type bubbleCall struct {
	window *bubbleWindow
	name   string
	ended  chan struct{}
	at     time.Duration
	grant  Grant
	err    error
}

// acquire makes a call, and comes back when it has ended or waits. So calls arrive in the order in which they are made.
func (w *bubbleWindow) acquire(ctx context.Context, class Class, tokens int64) *bubbleCall {
	c := &bubbleCall{window: w, ended: make(chan struct{})}
	c.name = fmt.Sprintf("%v call of %d tokens, made at %v", class, tokens, time.Since(w.start))
	go func() {
		c.grant, c.err = w.Acquire(ctx, class, tokens)
		c.at = time.Since(w.start)
		close(c.ended)
	}()
	synctest.Wait()
	return c
}

// hasEnded reports whether the call waits no more.
func (c *bubbleCall) hasEnded() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// waits wants the call to wait still.
func (c *bubbleCall) waits() {
	c.window.t.Helper()
	if c.hasEnded() {
		require.Fail(c.window.t, "ended", "%s: at %v: %v", c.name, c.at, c.err)
	}
}

// admittedAt wants the call to have been admitted at exactly this time.
func (c *bubbleCall) admittedAt(at time.Duration) *Grant {
	c.window.t.Helper()
	require.True(c.window.t, c.hasEnded(), "%s: waits", c.name)
	require.NoError(c.window.t, c.err, c.name)
	require.Equal(c.window.t, at, c.at, c.name)
	return &c.grant
}

// deniedAt wants the call to have failed at exactly this time, with a Grant that stands for nothing.
func (c *bubbleCall) deniedAt(at time.Duration) *DeniedError {
	c.window.t.Helper()
	require.True(c.window.t, c.hasEnded(), "%s: waits", c.name)
	require.Error(c.window.t, c.err, c.name)
	require.Equal(c.window.t, at, c.at, c.name)
	require.True(c.window.t, reflect.ValueOf(&c.grant).Elem().IsZero(), c.name)
	var denied *DeniedError
	require.ErrorAs(c.window.t, c.err, &denied, c.name)
	require.False(c.window.t, denied.Decision.Admitted, c.name)
	return denied
}

// classQuota is a quota that one class may use all of at once. The others may only borrow of it.
func classQuota(class Class, tokens int64) Quota {
	quota := wholeQuota(tokens)
	quota.Shares = shareOf(class, 1)
	return quota
}

func wantLargest(tokens int64) string {
	if tokens == 0 {
		return "leaves nothing for the class"
	}
	return fmt.Sprintf("possible is %d tokens", tokens)
}

// Case 40: a call that is larger than its class is ever admitted is told so at once, in an idle window and in a full
// one, however long it was ready to wait. The largest call possible is not told so: it waits like any other.
func TestACallThatCanNeverFitDoesNotWait(t *testing.T) {
	for class := range Class(NumClasses) {
		other := (class + 1) % NumClasses
		ceiling := Quota{Tokens: 100, Floors: NoFloors, Ceilings: shareOf(class, 0.85), Pace: 1}
		closed := ceiling
		closed.Ceilings = shareOf(class, Closed)
		for _, limit := range []struct {
			name    string
			quota   Quota
			largest ClassTokens
		}{
			{"the quota", classQuota(class, 100), ClassTokens{100, 100, 100}},
			{"the floors", Quota{Tokens: 100, Pace: 1}, ClassTokens{85, 25, 20}},
			{"its ceiling", ceiling, ClassTokens{85, 85, 85}},
			{"closed", closed, ClassTokens{}},
		} {
			largest := limit.largest[class]
			for _, tokens := range []int64{largest + 1, 200, math.MaxInt64} {
				for _, full := range []bool{false, true} {
					t.Run(fmt.Sprintf("%v above %s/%d/full %t", class, limit.name, tokens, full), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) {
							w := newBubbleWindow(t, limit.quota, WithMaxWait(class, -1))
							used := int64(0)
							if full {
								w.admit(other, 1).Settle(100)
								used = 100
							}
							denied := w.acquire(t.Context(), class, tokens).deniedAt(0)
							require.Equal(t, Decision{Reason: ReasonTooLarge}, denied.Decision)
							require.True(t, denied.Decision.Permanent())
							require.NoError(t, denied.Unwrap(), "no context ended it")
							require.ErrorContains(t, denied, wantLargest(largest))
							require.Equal(t, tokensOf(other, used), denied.Usage.Used)
							require.Equal(t, tokensOf(other, used), w.Usage().Used)
							require.Zero(t, w.Usage().Demand[class], "nothing is held for a call that cannot come")
							w.waiting(class, 0)

							if largest == 0 {
								return
							}
							if !full {
								w.acquire(t.Context(), class, largest).admittedAt(0)
								return
							}
							hint := w.refuse(class, largest).RetryAfter
							call := w.acquire(t.Context(), class, largest)
							// Nor does it take its turn, where one waits that may fit.
							w.acquire(t.Context(), class, tokens).deniedAt(0)
							w.at(hint - 1)
							call.waits()
							w.at(hint)
							call.admittedAt(hint)
						})
					})
				}
			}
		}
	}

	t.Run("from now on", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, classQuota(Batch, 100))
			w.admit(Batch, 100)
			tooLarge := w.acquire(t.Context(), Batch, 51)
			largest := w.acquire(t.Context(), Batch, 50)
			w.at(10 * time.Second)
			require.NoError(t, w.SetQuota(classQuota(Batch, 50)))
			synctest.Wait()
			denied := tooLarge.deniedAt(10 * time.Second)
			require.Equal(t, Decision{Reason: ReasonTooLarge}, denied.Decision)
			require.Equal(t, int64(50), denied.Quota.Tokens, "the quota that refused it")
			w.used(100)
			w.at(time.Minute)
			largest.admittedAt(time.Minute)
		})
	})

	// What is no call at all cannot wait for anything either.
	t.Run("invalid", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, classQuota(Batch, 100))
			zero := &bubbleWindow{new(Window), t, time.Now()}
			for _, call := range []*bubbleCall{
				w.acquire(t.Context(), Batch, 0),
				w.acquire(t.Context(), Batch, -1),
				w.acquire(t.Context(), Batch, math.MinInt64),
				w.acquire(t.Context(), NumClasses, 1),
				w.acquire(t.Context(), 255, 1),
				zero.acquire(t.Context(), Batch, 1),
			} {
				denied := call.deniedAt(0)
				require.Equal(t, Decision{Reason: ReasonInvalid}, denied.Decision, call.name)
				require.True(t, denied.Decision.Permanent())
			}
			w.used(0)
		})
	})
}

// Case 57: however long calls of a class have waited, and however many they are, they are of that class. They do not
// take the headroom of a class above, they are charged to their own, and one of a class above that comes last goes
// first.
func TestWaitingRaisesNoCall(t *testing.T) {
	for _, class := range []Class{Background, Batch} {
		for name, floors := range map[string]Fractions{"default": DefaultFloors, "elastic": ElasticFloors} {
			t.Run(fmt.Sprintf("headroom/%v/%s", class, name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					quota := Quota{Tokens: 1000, Floors: floors, Pace: 1}
					floor := quota.Limits(Interactive).Floor
					size := quota.Limits(class).Largest / 20 // so 20 calls fill what the class may hold
					w := newBubbleWindow(t, quota, WithMaxWait(class, -1))
					var calls []*bubbleCall
					for range 100 {
						calls = append(calls, w.acquire(t.Context(), class, size))
					}

					// Three windows later 60 have been admitted, in order, and the rest have waited all the time.
					w.at(3*time.Minute - 1)
					w.waiting(class, 40)
					require.Equal(t, tokensOf(class, 20*size), w.Usage().Used)
					require.Zero(t, w.Usage().Demand[Interactive], "what waits is demand of its own class")
					w.acquire(t.Context(), Interactive, floor).admittedAt(3*time.Minute - 1)
					want := tokensOf(class, 20*size)
					want[Interactive] = floor
					require.Equal(t, want, w.Usage().Used)

					// What was lent before may be asked for by its owner now, but the share of the class is its own.
					w.at(10 * time.Minute)
					for i, call := range calls {
						require.True(t, call.hasEnded(), call.name)
						require.NoError(t, call.err, call.name)
						if i > 0 {
							require.GreaterOrEqual(t, call.at, calls[i-1].at, "in the order of arrival")
						}
						if i < 60 {
							call.admittedAt(time.Duration(i/20) * time.Minute)
						}
					}
					stats := w.Stats().Classes
					require.Equal(t, uint64(100), stats[class].Admitted)
					require.Equal(t, 100*size, stats[class].EstimatedTokens)
					require.Equal(t, uint64(1), stats[Interactive].Admitted)
					require.Equal(t, floor, stats[Interactive].EstimatedTokens)
				})
			})
		}
	}

	t.Run("order", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			quota := Quota{Tokens: 1000, Shares: Fractions{Interactive: 0.2, Batch: 0.2}, Floors: NoFloors, Pace: 1}
			w := newBubbleWindow(t, quota, WithMaxWait(Interactive, -1), WithMaxWait(Background, -1))
			w.admit(Background, 1000)
			var batch []*bubbleCall
			for range 100 {
				batch = append(batch, w.acquire(t.Context(), Batch, 10))
			}
			// Just before there is room: enough for all of the 100, if nobody else came.
			w.at(time.Minute - 1)
			background := w.acquire(t.Context(), Background, 300)
			interactive := w.acquire(t.Context(), Interactive, 500)
			w.at(time.Minute)
			interactive.admittedAt(time.Minute)
			background.admittedAt(time.Minute)
			for i, call := range batch {
				if i < 20 {
					call.admittedAt(time.Minute) // its share, which the loans of the others leave alone
				} else {
					call.waits()
				}
			}
			w.used(1000)
			w.at(2 * time.Minute)
			for _, call := range batch[20:] {
				call.admittedAt(2 * time.Minute)
			}
		})
	})
}

// Case 58: a call that waits for much room holds up nobody of another class, and is charged nothing for its wait. Nor
// do small calls that come all the time hold it up for ever: what is held for its class is not theirs, and those of its
// own class stand behind it.
func TestALargeCallThatWaitsHoldsUpNobody(t *testing.T) {
	quota := Quota{Tokens: 1000, Shares: Fractions{Interactive: 0.2, Batch: 0.8}, Floors: NoFloors, Pace: 1}

	t.Run("of another class", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, quota)
			w.admit(Background, 900)
			w.at(time.Second)
			large := w.acquire(t.Context(), Batch, 800)
			w.used(900)
			w.at(2 * time.Second)
			w.acquire(t.Context(), Interactive, 50).admittedAt(2 * time.Second)
			w.used(950)
			w.at(time.Minute - 1)
			large.waits()
			w.used(950)
			w.at(time.Minute)
			large.admittedAt(time.Minute)
			w.used(850)
		})
	})

	for _, floors := range []Fractions{NoFloors, {Batch: 0.8}} {
		t.Run(fmt.Sprintf("by a stream of others/floors %v", floors), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				quota := quota
				quota.Floors = floors
				w := newBubbleWindow(t, quota)
				w.admit(Batch, 1).Settle(900)
				w.at(time.Second)
				large := w.acquire(t.Context(), Batch, 800)
				admitted := 0
				for second := range time.Duration(118) {
					w.at((2 + second) * time.Second)
					// They have little time, and do not spend it on the wait of the large one.
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					call := w.acquire(ctx, Interactive, 50)
					require.True(t, call.hasEnded())
					if call.err == nil {
						admitted++
					}
					cancel()
					require.LessOrEqual(t, usedTotal(w.Window), int64(1000))
				}
				large.admittedAt(time.Minute)
				require.Equal(t, 2+4, admitted, "what is left of the window at first, and their share in the next")
			})
		})
	}

	t.Run("by a stream of its own class", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, quota)
			w.admit(Background, 900)
			w.at(time.Second)
			large := w.acquire(t.Context(), Batch, 790)
			var small []*bubbleCall
			for second := range time.Duration(50) {
				w.at((2 + second) * time.Second)
				small = append(small, w.acquire(t.Context(), Batch, 10))
				require.Equal(t, ReasonQueued, w.refuse(Batch, 1).Reason)
			}
			w.used(900)
			w.at(time.Minute)
			large.admittedAt(time.Minute)
			for i, call := range small {
				if i < 1+20 {
					call.admittedAt(time.Minute) // with the large one the share, and then what nobody has asked for
				} else {
					call.waits()
				}
			}
			w.used(1000)
			w.at(2 * time.Minute)
			for _, call := range small[21:] {
				call.admittedAt(2 * time.Minute)
			}
		})
	})

	t.Run("that goes away", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, quota)
			w.admit(Background, 900)
			ctx, cancel := context.WithCancel(t.Context())
			large := w.acquire(ctx, Batch, 800)
			next := w.acquire(t.Context(), Batch, 100)
			next.waits()
			w.at(time.Second)
			cancel()
			synctest.Wait()
			require.ErrorIs(t, large.deniedAt(time.Second), context.Canceled)
			next.admittedAt(time.Second)
			w.used(1000)
		})
	})
}

// Case 58: a call above its class's share can be served by a loan alone, and loans may be long in coming. Meanwhile
// the class has its share all the same, by either way to ask.
func TestACallAboveTheShareDoesNotWedgeItsClass(t *testing.T) {
	quota := Quota{
		Tokens: 1000,
		Shares: Fractions{Interactive: 0.8, Background: 0.1, Batch: 0.1},
		Floors: NoFloors,
		Pace:   1,
	}
	for _, class := range []Class{Background, Batch} {
		t.Run(class.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newBubbleWindow(t, quota, WithMaxWait(class, -1))
				w.admit(Interactive, 790)
				g := w.admit(Interactive, 10)
				loan := w.acquire(t.Context(), class, 300)
				loan.waits()
				require.Zero(t, w.Usage().Demand[class], "a loan is never held for")

				// The share is there at once, and once only. What goes beyond needs a loan, and comes after the first,
				// though there is room for it.
				w.acquire(t.Context(), class, 40).admittedAt(0)
				w.admit(class, 40)
				require.Equal(t, ReasonQueued, w.refuse(class, 21).Reason)
				w.admit(class, 20).Cancel()
				small := w.acquire(t.Context(), class, 21)
				g.Settle(5)
				synctest.Wait()
				small.waits()
				require.Equal(t, ReasonQueued, w.refuse(class, 20).Reason, "who waits is first, also within the share")

				// Interactive goes on to ask for all of its share, so there is no loan for as long as that lasts: the
				// class has its share in every window.
				for minute := range time.Duration(10) {
					now := (1 + minute) * time.Minute
					w.at(now - 1)
					loan.waits()
					w.at(now)
					w.admit(Interactive, 800)
					if minute == 0 {
						small.admittedAt(now)
						require.Equal(t, int64(21), w.Usage().Used[class])
						w.acquire(t.Context(), class, 79).admittedAt(now)
					} else {
						w.acquire(t.Context(), class, 50).admittedAt(now)
						w.admit(class, 50)
					}
					require.Equal(t, int64(100), w.Usage().Used[class])
					w.waiting(class, 1)
				}

				// A window after that the charges are gone, and a window later the demand is forgotten.
				w.at(12*time.Minute - 1)
				loan.waits()
				w.at(12 * time.Minute)
				loan.admittedAt(12 * time.Minute)
			})
		})
	}
}

// Case 58: whoever is refused because others of the class wait is told when these and the call itself will fit, and no
// sooner. That is also so where one above the share waits, which only those pass who are within it.
func TestWhoStandsBehindACallAboveTheShareIsToldTheTruth(t *testing.T) {
	quota := Quota{
		Tokens: 1000,
		Shares: Fractions{Interactive: 0.8, Background: 0.1, Batch: 0.1},
		Floors: NoFloors,
		Pace:   1,
	}
	for _, test := range []struct {
		name   string
		first  ClassTokens // charged at the start
		large  int64
		within bool // whether the call fits within the share before it fits behind the large one
	}{
		{"the share drains first", ClassTokens{Interactive: 800}, 300, true},
		{"the loan comes first", ClassTokens{Interactive: 500, Background: 200}, 250, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newBubbleWindow(t, quota)
				for class, tokens := range test.first {
					if tokens > 0 {
						w.admit(Class(class), tokens)
					}
				}
				now := time.Duration(0)
				if !test.within {
					now = 30 * time.Second
					w.at(now)
				}
				w.admit(Batch, 80)
				large := w.acquire(t.Context(), Batch, test.large)
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()

				// By either way to ask. Room for these 21 tokens there is already, but it is not theirs.
				require.Equal(t, Decision{Reason: ReasonQueued, RetryAfter: time.Minute - now}, w.refuse(Batch, 21))
				call := w.acquire(ctx, Batch, 21)
				w.at(now + 10*time.Second)
				require.Equal(t, Decision{Reason: ReasonQueued, RetryAfter: time.Minute - now - 10*time.Second},
					call.deniedAt(now+10*time.Second).Decision)

				w.at(time.Minute - 1)
				w.refuse(Batch, 21)
				w.at(time.Minute)
				require.Equal(t, test.within, !large.hasEnded())
				w.admit(Batch, 21)
			})
		})
	}
}

// So is one behind calls that take windows beyond the end of time.
func TestWhoStandsBehindAllOfTimeIsToldItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quota := classQuota(Batch, 1000)
		quota.Window = 100 * 365 * 24 * time.Hour
		w := newBubbleWindow(t, quota)
		w.admit(Batch, 1000)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for n, want := range []time.Duration{quota.Window, 2 * quota.Window, math.MaxInt64, math.MaxInt64} {
			require.Equal(t, want, w.refuse(Batch, 1000).RetryAfter, "behind %d", n)
			w.acquire(ctx, Batch, 1000).waits()
		}
	})
}

// Case 61: a call whose context is done takes nothing, whatever there would be to take.
func TestADoneContextTakesNothing(t *testing.T) {
	expired, cancel := context.WithDeadline(context.Background(), time.Time{})
	defer cancel()
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for _, ctx := range []context.Context{cancelled, expired} {
		for class := range Class(NumClasses) {
			t.Run(fmt.Sprintf("%v/%v", ctx.Err(), class), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					taken := func(w *bubbleWindow, tokens int64) {
						t.Helper()
						before, stats := w.Usage(), w.Stats()
						call := w.acquire(ctx, class, tokens)
						denied := call.deniedAt(time.Since(w.start))
						require.ErrorIs(t, call.err, ctx.Err())
						require.Equal(t, &DeniedError{Class: class, Tokens: tokens, Usage: before, Quota: w.Quota()},
							withoutCause(denied), "nothing was decided")
						require.Equal(t, before, w.Usage())
						require.Equal(t, stats, w.Stats(), "not even a refusal")
					}
					w := newBubbleWindow(t, classQuota(class, 100), WithMaxWait(class, -1))
					taken(w, 10)
					w.used(0)
					taken(w, 200) // too large, but nobody is there to be told

					w.admit(class, 100)
					w.at(10 * time.Second)
					taken(w, 10)
					w.used(100)

					call := w.acquire(t.Context(), class, 10)
					taken(w, 10)
					w.waiting(class, 1)
					w.at(time.Minute)
					call.admittedAt(time.Minute)
					w.used(10)

					shadow := newBubbleWindow(t, classQuota(class, 100), WithShadow(func(d *DeniedError) {
						t.Error("reported", d)
					}))
					taken(shadow, 10)
					taken(shadow, 200)
				})
			})
		}
	}
}

// A done context is told of a Window as it is now, and of one that is none.
func TestADoneContextSeesThePresent(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	quota := Quota{Tokens: 10, Window: 1, Ceilings: Fractions{Batch: Closed}}
	w, clock := newTestWindow(t, quota)
	_, d := w.TryAcquire(Interactive, 5)
	require.True(t, d.Admitted)
	clock.advance(1)
	_, err := w.Acquire(ctx, Batch, 5)
	var denied *DeniedError
	require.ErrorAs(t, err, &denied)
	require.Zero(t, denied.Usage.Used)
	require.EqualError(t, err, "quotashare: batch call of 5 tokens not admitted: context canceled", "nothing was decided")

	var zero Window
	_, err = zero.Acquire(ctx, Interactive, 5)
	require.ErrorIs(t, err, context.Canceled)
}

// TestNoHintOutlivesWhatHappensInTheFirstInstant: TestAHintIsSearchedAnewWhenItMust, before any time has passed.
func TestNoHintOutlivesWhatHappensInTheFirstInstant(t *testing.T) {
	quota := Quota{Tokens: 1000, Shares: Fractions{Interactive: 0.5, Batch: 0.5}, Floors: NoFloors, Pace: 1}
	for name, event := range map[string]func(ctx context.Context, w *bubbleWindow, first *Grant){
		"nothing":   func(context.Context, *bubbleWindow, *Grant) {},
		"charge":    func(_ context.Context, w *bubbleWindow, _ *Grant) { w.admit(Batch, 10) },
		"settle":    func(_ context.Context, _ *bubbleWindow, first *Grant) { first.Settle(450) },
		"observe":   func(_ context.Context, w *bubbleWindow, _ *Grant) { w.Observe(400, 0) },
		"throttled": func(_ context.Context, w *bubbleWindow, _ *Grant) { w.Throttled(time.Second) },
		"quota":     func(_ context.Context, w *bubbleWindow, _ *Grant) { require.NoError(w.t, w.SetQuota(quota)) },
		"wait":      func(ctx context.Context, w *bubbleWindow, _ *Grant) { w.acquire(ctx, Batch, 600).waits() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newBubbleWindow(t, quota)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				first := w.admit(Interactive, 500)
				require.Equal(t, time.Minute, w.refuse(Interactive, 600).RetryAfter)
				event(ctx, w, first)
				require.GreaterOrEqual(t, w.refuse(Interactive, 600).RetryAfter, time.Minute)
			})
		})
	}
}

// A call that waits is remembered as demand for longer than it was when a hint was given: the next is as exact.
func TestAHintIsSearchedAnewWhileCallsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quota := Quota{Tokens: 1000, Shares: Fractions{Interactive: 0.5, Batch: 0.5}, Floors: NoFloors, Pace: 1}
		w := newBubbleWindow(t, quota)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		w.admit(Interactive, 500).Settle(5000)
		w.acquire(ctx, Batch, 450).waits()
		for _, now := range []time.Duration{0, 10 * time.Second} {
			w.at(now)
			require.Equal(t, 65*time.Second, w.refuse(Interactive, 600).RetryAfter, "as if who waits went away now")
		}
	})
}

// Whoever gives up at the instant at which those before it fit is told a time to come back, though they have not been
// admitted yet.
func TestWhoGivesUpBehindCallsThatFitIsToldToWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := newClock()
		w := newBubbleWindow(t, classQuota(Interactive, 1000), WithClock(clock.read), WithMaxWait(Interactive, -1))
		w.admit(Interactive, 1000)
		ctx, cancel := context.WithCancel(t.Context())
		first, second := w.acquire(t.Context(), Interactive, 100), w.acquire(ctx, Interactive, 100)
		clock.advance(time.Minute)
		cancel()
		synctest.Wait()
		require.Positive(t, second.deniedAt(0).Decision.RetryAfter)
		w.at(time.Minute)
		require.True(t, first.hasEnded())
		require.NoError(t, first.err)
	})
}

// Waiters that ask for more than an int64 together ask for the largest.
func TestWaitersBeyondAnInt64(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newBubbleWindow(t, classQuota(Batch, math.MaxInt64))
		w.Throttled(time.Minute)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range 2 {
			w.acquire(ctx, Batch, 1<<62).waits()
		}
		require.Equal(t, tokensOf(Batch, math.MaxInt64), w.Usage().Demand)
		require.Equal(t, Decision{Reason: ReasonQueued, RetryAfter: time.Minute}, w.refuse(Batch, 1<<62))
	})
}

// withoutCause returns the fields of the error that can be written down here.
func withoutCause(e *DeniedError) *DeniedError {
	return &DeniedError{Class: e.Class, Tokens: e.Tokens, Decision: e.Decision, Usage: e.Usage, Quota: e.Quota}
}

// stacks returns the stacks of all goroutines.
func stacks() string {
	all := make([]byte, 1<<20)
	return string(all[:runtime.Stack(all, true)])
}

// Case 62: a call that stops waiting, however it stops, leaves nothing behind: no charge, no place in the queue, no
// goroutine. What it waited for goes to those who still wait.
func TestACallThatStopsWaitingLeavesNothing(t *testing.T) {
	t.Run("charge", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, classQuota(Batch, 100))
			w.admit(Batch, 100)
			var calls []*bubbleCall
			for range 10 {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				calls = append(calls, w.acquire(ctx, Batch, 10))
			}
			w.waiting(Batch, 10)
			require.Equal(t, 10, strings.Count(stacks(), "quotashare.(*Window).Acquire("))
			require.NotContains(t, stacks(), "created by github.com/quotashare/quotashare.", "the callers' own goroutines")
			w.at(5*time.Second - 1)
			w.waiting(Batch, 10)
			w.at(5 * time.Second)
			for _, call := range calls {
				require.ErrorIs(t, call.deniedAt(5*time.Second), context.DeadlineExceeded)
			}
			w.waiting(Batch, 0)
			w.used(100)
			require.NotContains(t, stacks(), "quotashare.(*Window).Acquire(")
			w.at(time.Minute)
			w.used(0)
			w.acquire(t.Context(), Batch, 100).admittedAt(time.Minute)
			w.used(100)
		})
	})

	// At any place in the queue, by any end: the others are served, in their order, as if it had never come.
	for _, end := range []string{"cancelled", "deadline", "too large"} {
		for place := range 11 {
			t.Run(fmt.Sprintf("%s at place %d", end, place), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newBubbleWindow(t, classQuota(Background, 100), WithMaxWait(Background, -1))
					w.admit(Background, 50)
					w.at(10 * time.Second)
					w.admit(Background, 50)
					ctx, cancel := context.WithCancel(t.Context())
					if end == "deadline" {
						ctx, cancel = context.WithTimeout(t.Context(), 20*time.Second)
					}
					defer cancel()
					var ends *bubbleCall
					var stay []*bubbleCall
					for i := range 11 {
						if i == place {
							ends = w.acquire(ctx, Background, 20)
						} else {
							stay = append(stay, w.acquire(t.Context(), Background, 10))
						}
					}

					w.at(30 * time.Second)
					switch end {
					case "cancelled":
						cancel()
					case "too large":
						for _, tokens := range []int64{19, 50, 100} {
							require.NoError(t, w.SetQuota(classQuota(Background, tokens)))
						}
					}
					synctest.Wait()
					ends.deniedAt(30 * time.Second)
					w.waiting(Background, 10)
					w.used(100)
					w.at(time.Minute)
					for _, call := range stay[:5] {
						call.admittedAt(time.Minute)
					}
					w.waiting(Background, 5)
					w.at(70 * time.Second)
					for _, call := range stay[5:] {
						call.admittedAt(70 * time.Second)
					}
					w.waiting(Background, 0)
					w.used(100)
				})
			})
		}
	}

	t.Run("longest wait", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, classQuota(Background, 100), WithMaxWait(Background, 40*time.Second))
			w.admit(Background, 100)
			ends := w.acquire(t.Context(), Background, 20)
			w.at(35 * time.Second)
			stays := w.acquire(t.Context(), Background, 90)
			w.at(40 * time.Second)
			ends.deniedAt(40 * time.Second)
			w.waiting(Background, 1)
			w.used(100)
			w.at(time.Minute)
			stays.admittedAt(time.Minute)
			w.waiting(Background, 0)
			w.used(90)
		})
	})

	// When there is room in the very instant in which the context ends a call is admitted or goes away. It is never
	// charged and refused, nor does it lose what it was given already.
	for name, both := range map[string]func(makeRoom, cancel func()){
		"then the context ends":       func(makeRoom, cancel func()) { makeRoom(); cancel() },
		"the context has ended":       func(makeRoom, cancel func()) { cancel(); makeRoom() },
		"while the context is ending": func(makeRoom, cancel func()) { go makeRoom(); go cancel() },
	} {
		t.Run("room comes, "+name, func(t *testing.T) {
			for range 50 {
				synctest.Test(t, func(t *testing.T) {
					w := newBubbleWindow(t, classQuota(Batch, 100))
					first := w.admit(Batch, 100)
					ctx, cancel := context.WithCancel(t.Context())
					var calls []*bubbleCall
					for range 20 {
						calls = append(calls, w.acquire(ctx, Batch, 10))
					}
					both(func() { first.Settle(0) }, cancel)
					synctest.Wait()
					w.waiting(Batch, 0)
					used := int64(0)
					for _, call := range calls {
						require.True(t, call.hasEnded(), call.name)
						if call.err == nil {
							used += 10
						} else {
							require.ErrorIs(t, call.err, context.Canceled)
						}
					}
					w.used(used)
					if name == "then the context ends" {
						require.Equal(t, int64(100), used, "ten of them were admitted by then")
					}
				})
			}
		})
	}
}

// Case 65: a call whose deadline is sooner than its wait stays until then, for what others settle, cancel or are
// allowed may make room before. If nothing does, its error is that of the context, and says how long it is to wait from
// then on.
func TestADeadlineSoonerThanTheWaitIsWaitedFor(t *testing.T) {
	// Interactive is not told to wait for longer than it must, so its hints are exact.
	patient := WithMaxWait(Interactive, -1)

	for _, deadline := range []time.Duration{1, 5 * time.Second, time.Minute - 1} {
		t.Run(fmt.Sprintf("nothing happens in %v", deadline), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newBubbleWindow(t, wholeQuota(100), patient)
				w.admit(Interactive, 100)
				ctx, cancel := context.WithTimeout(t.Context(), deadline)
				defer cancel()
				call := w.acquire(ctx, Interactive, 60)
				w.at(deadline - 1)
				call.waits()
				w.at(deadline)
				denied := call.deniedAt(deadline)
				require.ErrorIs(t, call.err, context.DeadlineExceeded)
				require.NotErrorIs(t, call.err, context.Canceled)
				require.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: time.Minute - deadline}, denied.Decision)
				require.Equal(t, tokensOf(Interactive, 100), denied.Usage.Used)
				w.used(100)
				w.waiting(Interactive, 0)

				// And the hint is true.
				w.at(time.Minute - 1)
				w.refuse(Interactive, 60)
				w.at(time.Minute)
				w.admit(Interactive, 60)
			})
		})
	}

	for name, makeRoom := range map[string]func(*bubbleWindow, *Grant){
		"settle": func(_ *bubbleWindow, g *Grant) { g.Settle(40) },
		"cancel": func(_ *bubbleWindow, g *Grant) { g.Cancel() },
		"quota":  func(w *bubbleWindow, _ *Grant) { require.NoError(w.t, w.SetQuota(wholeQuota(160))) },
	} {
		t.Run("room comes by a "+name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newBubbleWindow(t, wholeQuota(100), patient)
				g := w.admit(Interactive, 100)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				call := w.acquire(ctx, Interactive, 60)
				w.at(5*time.Second - 1)
				call.waits()
				makeRoom(w, g)
				synctest.Wait()
				call.admittedAt(5*time.Second - 1).Settle(7)
				w.at(5 * time.Second)
				require.NoError(t, call.err, "the deadline comes too late")
				w.used(7 + map[string]int64{"settle": 40, "quota": 100}[name])
			})
		})
	}

	t.Run("too little room comes", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, wholeQuota(100), patient)
			g := w.admit(Interactive, 100)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			call := w.acquire(ctx, Interactive, 60)
			g.Settle(41)
			w.at(5 * time.Second)
			require.ErrorIs(t, call.deniedAt(5*time.Second), context.DeadlineExceeded)
			w.used(41)
		})
	})

	t.Run("room comes at the deadline", func(t *testing.T) {
		for range 20 { // whichever of the two the goroutine hears of first
			synctest.Test(t, func(t *testing.T) {
				w := newBubbleWindow(t, wholeQuota(100), patient)
				w.admit(Interactive, 100)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				call := w.acquire(ctx, Interactive, 60)
				w.at(time.Minute)
				if call.err == nil {
					call.admittedAt(time.Minute)
					w.used(60)
				} else {
					require.ErrorIs(t, call.deniedAt(time.Minute), context.DeadlineExceeded)
					w.used(0)
				}
			})
		}
	})

	// By the window's clock it may be time already when a context ends whose deadline is before. Who is woken by the end of
	// its context takes nothing: the call would not be made.
	t.Run("room has come by the deadline", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var ahead atomic.Int64
			clock := WithClock(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
			w := newBubbleWindow(t, wholeQuota(100), patient, clock)
			w.admit(Interactive, 100)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute-1)
			defer cancel()
			call := w.acquire(ctx, Interactive, 60)
			ahead.Store(1)
			w.at(time.Minute - 1)
			denied := call.deniedAt(time.Minute - 1)
			require.ErrorIs(t, denied, context.DeadlineExceeded)
			want := Decision{Reason: ReasonQueued, RetryAfter: Backoff(Interactive, time.Minute)}
			require.Equal(t, want, denied.Decision, "it may come back, and must not be told never to")
			w.used(0)
			w.waiting(Interactive, 0)
		})
	})

	t.Run("behind the others", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, wholeQuota(100), patient)
			w.admit(Interactive, 100)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			call := w.acquire(ctx, Interactive, 60)
			next := w.acquire(t.Context(), Interactive, 60)
			w.at(5 * time.Second)
			// The other fills the next window, and this one would come back behind it.
			want := Decision{Reason: ReasonQueued, RetryAfter: 2*time.Minute - 5*time.Second}
			require.Equal(t, want, call.deniedAt(5*time.Second).Decision)
			w.at(time.Minute)
			next.admittedAt(time.Minute)
			w.at(2*time.Minute - 1)
			w.refuse(Interactive, 60)
			w.at(2 * time.Minute)
			w.admit(Interactive, 60)
		})
	})

	// Those whom nobody waits for are told to wait for their backoff at least, here as everywhere.
	t.Run("least wait", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, classQuota(Batch, 100))
			w.admit(Batch, 100)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute-1)
			defer cancel()
			call := w.acquire(ctx, Batch, 60)
			w.at(time.Minute - 1)
			require.Equal(t, Backoff(Batch, time.Minute), call.deniedAt(time.Minute-1).Decision.RetryAfter)
		})
	})

	// A deadline of the library's own, the longest wait of the class, is none of the context's.
	t.Run("longest wait", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, wholeQuota(100), WithMaxWait(Interactive, 5*time.Second))
			w.admit(Interactive, 100)
			ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
			defer cancel()
			call := w.acquire(ctx, Interactive, 60)
			w.at(5 * time.Second)
			denied := call.deniedAt(5 * time.Second)
			require.NotErrorIs(t, call.err, context.DeadlineExceeded)
			require.NoError(t, errors.Unwrap(call.err))
			require.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: 55 * time.Second}, denied.Decision)
		})
	})
}

// Case 66: when there is room for some of the many who wait for it, so many are admitted, in the order of their
// arrival. The rest wait on, and neither they nor those before them look at the clock for nothing.
func TestWhoeverDoesNotFitYetWaitsOnWithoutSpinning(t *testing.T) {
	for class := range Class(NumClasses) {
		t.Run(class.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var reads atomic.Int64
				clock := WithClock(func() time.Time { reads.Add(1); return time.Now() })
				w := newBubbleWindow(t, classQuota(class, 1000), clock, WithMaxWait(class, -1))
				w.admit(class, 1000)
				var calls []*bubbleCall
				for range 100 {
					calls = append(calls, w.acquire(t.Context(), class, 100))
				}
				require.LessOrEqual(t, reads.Load(), int64(1+1+100), "one each")
				reads.Store(0)

				w.at(time.Minute - 1)
				w.waiting(class, 100)
				require.Equal(t, int64(1), reads.Load(), "but for the line before, nobody looked")
				w.at(time.Minute)
				for _, call := range calls[:10] {
					call.admittedAt(time.Minute)
				}
				for _, call := range calls[10:] {
					call.waits()
				}
				w.waiting(class, 90)
				w.used(1000)

				// And so on: as each ten of them leave the window the next ten are admitted.
				w.at(10 * time.Minute)
				for i, call := range calls {
					call.admittedAt(time.Duration(1+i/10) * time.Minute)
				}
				require.LessOrEqual(t, reads.Load(), int64(2*len(calls)))
			})
		})
	}

	t.Run("room comes bit by bit", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var reads atomic.Int64
			clock := WithClock(func() time.Time { reads.Add(1); return time.Now() })
			w := newBubbleWindow(t, classQuota(Batch, 1000), clock)
			var grants []*Grant
			for second := range time.Duration(100) {
				w.at(second * 100 * time.Millisecond)
				grants = append(grants, w.admit(Batch, 10))
			}
			var calls []*bubbleCall
			for range 40 {
				calls = append(calls, w.acquire(t.Context(), Batch, 25))
			}
			reads.Store(0)
			// Ten of what was charged last come to nothing, and that is room for four.
			for _, g := range grants[90:] {
				w.at(time.Since(w.start) + 1)
				g.Settle(0)
			}
			synctest.Wait()
			w.used(1000)
			w.waiting(Batch, 36)
			// The others leave the window one by one, from the oldest on: five of them are room for two.
			w.at(time.Hour)
			for i, call := range calls[4:] {
				leaves := time.Duration((5*(i+1)-1)/2) * 100 * time.Millisecond
				call.admittedAt(time.Minute + leaves)
			}
			require.LessOrEqual(t, reads.Load(), int64(3*len(calls)+10))
		})
	})

	// Those who do not wait here but come back when they are told are told the exact time, all the same one: there is
	// no jitter, which could only add to the wait. Of those who come back then so many as fit are admitted.
	t.Run("hints", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, wholeQuota(1000))
			w.admit(Interactive, 1000)
			want := Decision{Reason: ReasonQuotaFull, RetryAfter: time.Minute}
			for range 100 {
				require.Equal(t, want, w.refuse(Interactive, 100))
			}
			w.at(time.Minute)
			for range 10 {
				w.admit(Interactive, 100)
			}
			for range 90 {
				require.Equal(t, want, w.refuse(Interactive, 100))
			}
		})
	})
}

// Case 68: a timer that fires early or late decides nothing. Whoever wakes looks at the window again: if it is too
// early it waits on, and if it is late the call is admitted and charged then, once.
func TestAWaitEndsByTheWindowAndNotByTheTimer(t *testing.T) {
	// The window reads the bubble's time and so much more or less. Timers fire by the bubble's time, so for the window
	// they are early if it lags behind, and late if it is ahead.
	type skewed struct {
		*bubbleWindow
		skew  atomic.Int64
		reads atomic.Int64
		call  *bubbleCall
	}
	const tokens = 60
	wait := func(t *testing.T) *skewed {
		w := &skewed{}
		w.bubbleWindow = newBubbleWindow(t, classQuota(Batch, 100), WithClock(func() time.Time {
			w.reads.Add(1)
			return time.Now().Add(time.Duration(w.skew.Load()))
		}))
		w.admit(Batch, 100)
		w.call = w.acquire(t.Context(), Batch, tokens) // sets its timer to a minute from now
		return w
	}
	chargedOnceUntil := func(w *skewed, leaves time.Duration) {
		w.t.Helper()
		w.used(tokens)
		stats := w.Stats().Classes[Batch]
		require.Equal(w.t, uint64(2), stats.Admitted)
		require.Equal(w.t, uint64(1), stats.WaitsAdmitted)
		require.Equal(w.t, int64(100+tokens), stats.EstimatedTokens)
		w.waiting(Batch, 0)
		w.at(leaves - 1)
		w.used(tokens)
		w.at(leaves)
		w.used(0)
	}

	for _, lag := range []time.Duration{1, time.Millisecond, 5 * time.Millisecond, 90 * time.Millisecond} {
		t.Run(fmt.Sprintf("early by %v", lag), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := wait(t)
				w.at(59 * time.Second)
				w.skew.Store(-int64(lag))
				w.reads.Store(0)
				w.at(time.Minute)
				require.Equal(t, int64(1), w.reads.Load(), "it woke, once")
				w.call.waits()
				w.used(100)
				w.at(time.Minute + lag - 1)
				w.call.waits()
				w.at(time.Minute + lag)
				w.call.admittedAt(time.Minute + lag)
				chargedOnceUntil(w, 2*time.Minute+lag)
			})
		})

		t.Run(fmt.Sprintf("early by %v, and then the clock catches up", lag), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := wait(t)
				w.at(59 * time.Second)
				w.skew.Store(-int64(lag))
				w.at(time.Minute)
				w.call.waits()
				w.skew.Store(0) // but nobody looks before its timer fires again
				w.at(time.Minute + lag - 1)
				w.call.waits()
				w.at(time.Minute + lag)
				w.call.admittedAt(time.Minute + lag)
				chargedOnceUntil(w, 2*time.Minute+lag)
			})
		})
	}

	t.Run("early again and again", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := wait(t)
			w.at(59 * time.Second)
			w.reads.Store(0)
			for i := range time.Duration(5) {
				w.skew.Store(-int64((1 + i) * 5 * time.Millisecond))
				w.at(time.Minute + i*5*time.Millisecond)
				w.call.waits()
				require.Equal(t, int64(1+i), w.reads.Load(), "a timer that is early is set again, to what is left")
			}
			w.at(time.Minute + 25*time.Millisecond)
			w.call.admittedAt(time.Minute + 25*time.Millisecond)
			chargedOnceUntil(w, 2*time.Minute+25*time.Millisecond)
		})
	})

	for _, late := range []time.Duration{1, 5 * time.Millisecond, 15 * time.Millisecond, time.Second, time.Hour} {
		t.Run(fmt.Sprintf("late by %v", late), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := wait(t)
				w.at(59 * time.Second)
				w.skew.Store(int64(late))
				w.at(time.Minute - 1)
				w.call.waits()
				w.at(time.Minute)
				w.call.admittedAt(time.Minute)
				chargedOnceUntil(w, 2*time.Minute) // a window later by its own clock too
			})
		})
	}

	t.Run("late, and then the clock catches up", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			const late = 15 * time.Millisecond
			w := wait(t)
			w.at(59 * time.Second)
			w.skew.Store(int64(late))
			w.at(time.Minute)
			w.call.admittedAt(time.Minute)
			w.skew.Store(0) // by less than a 600th of the window, so its time stands still until the clock is there
			w.at(time.Minute + late)
			chargedOnceUntil(w, 2*time.Minute+late) // when it was charged was late
		})
	})

	// Whoever comes first when there is room lets in those who wait, before their timers fire, and is decided after.
	t.Run("late, and somebody comes before", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := wait(t)
			w.at(59 * time.Second)
			w.skew.Store(int64(15 * time.Millisecond))
			w.at(time.Minute - 10*time.Millisecond)
			w.call.waits()
			require.Equal(t, ReasonQuotaFull, w.refuse(Interactive, 50).Reason)
			synctest.Wait()
			w.call.admittedAt(time.Minute - 10*time.Millisecond)
			w.at(time.Minute) // nothing of its timer is left
			chargedOnceUntil(w, 2*time.Minute-10*time.Millisecond)
		})
	})

	t.Run("many", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := wait(t)
			calls := []*bubbleCall{w.call}
			for range 11 {
				calls = append(calls, w.acquire(t.Context(), Batch, 20))
			}
			for minute := range time.Duration(5) {
				w.at((1+minute)*time.Minute - time.Second)
				w.skew.Store(-int64(minute+1) * int64(5*time.Millisecond))
			}
			w.at(10 * time.Minute)
			for _, call := range calls {
				require.True(t, call.hasEnded(), call.name)
				require.NoError(t, call.err, call.name)
			}
			require.Equal(t, int64(100+tokens+11*20), w.Stats().Classes[Batch].EstimatedTokens)
			require.Equal(t, uint64(12), w.Stats().Classes[Batch].WaitsAdmitted)
		})
	})
}

// Case 69: who waits holds no lock. While a call waits, everything else that can be asked of the window is answered in
// no time.
func TestACallThatWaitsBlocksNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quota := Quota{Tokens: 1000, Shares: Fractions{Interactive: 0.5, Batch: 0.5}, Floors: NoFloors, Pace: 1}
		w := newBubbleWindow(t, quota)
		g := w.admit(Background, 900)
		call := w.acquire(t.Context(), Batch, 500)
		w.at(time.Second)

		answers := make(chan bool, 60)
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				_, d := w.TryAcquire(Interactive, 1)
				answers <- d.Admitted
			})
			all.Go(func() {
				_, err := w.Acquire(t.Context(), Interactive, 1)
				answers <- err == nil
			})
			all.Go(func() {
				_, d := w.TryAcquire(Batch, 1)
				answers <- d.Reason == ReasonQueued
			})
			all.Go(func() { answers <- w.Stats().Classes[Batch].Waiting == 1 })
			all.Go(func() { answers <- w.Usage().Used[Background] == 900 })
			all.Go(func() { answers <- w.SetQuota(w.Quota()) == nil })
		}
		all.Wait()
		for range 60 {
			require.True(t, <-answers)
		}
		g.Settle(800)
		w.used(820)
		require.Equal(t, time.Second, time.Since(w.start), "all of it took no time")
		call.waits()

		// Nor do other calls wait for this one: room is for whoever it fits.
		w.acquire(t.Context(), Interactive, 100).admittedAt(time.Second)
		w.at(time.Minute)
		call.admittedAt(time.Minute)
	})
}
