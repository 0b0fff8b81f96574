package redisshare

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// The end of a call.

// TestSettleReplacesTheEstimate: by what was used, at the instant at which the call was admitted.
func TestSettleReplacesTheEstimate(t *testing.T) {
	b := newBubbleRedis(t)
	for _, test := range []struct {
		name string
		end  func(*quotashare.Grant)
		used int64 // of an estimate of 100, beside 10 of another call
	}{
		{"less", func(g *quotashare.Grant) { g.Settle(40) }, 50},
		{"the same", func(g *quotashare.Grant) { g.Settle(100) }, 110},
		{"more", func(g *quotashare.Grant) { g.Settle(150) }, 160},
		{"more than the quota", func(g *quotashare.Grant) { g.Settle(2000) }, 2010},
		{"nothing", func(g *quotashare.Grant) { g.Settle(0) }, 10},
		{"unknown", func(g *quotashare.Grant) { g.Settle(-1) }, 110},
		{"unknown, the least", func(g *quotashare.Grant) { g.Settle(math.MinInt64) }, 110},
		{"the most", func(g *quotashare.Grant) { g.Settle(math.MaxInt64) }, maxTokens},
		{"cancelled", func(g *quotashare.Grant) { g.Cancel() }, 10},
		{"settled twice", func(g *quotashare.Grant) { g.Settle(40); g.Settle(70) }, 50},
		{"settled and cancelled", func(g *quotashare.Grant) { g.Settle(40); g.Cancel() }, 50},
		{"cancelled and settled", func(g *quotashare.Grant) { g.Cancel(); g.Settle(40) }, 10},
		{"unknown and settled", func(g *quotashare.Grant) { g.Settle(-1); g.Settle(40) }, 110},
		{"forgotten", func(*quotashare.Grant) {}, 110},
	} {
		t.Run(test.name, func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				quota := classQuota(interactive, 1000)
				w, other := b.replica(t, quota), b.replica(t, quota)
				grant := w.admit(interactive, 100)
				other.admit(interactive, 10) // at the same instant
				w.at(20 * time.Second)
				test.end(grant)
				w.used(test.used)
				if test.used > 1000 {
					require.Equal(t, refusal(quotashare.ReasonQuotaFull, 40*time.Second), other.refuse(interactive, 1))
				}
				require.Zero(t, w.Stats().Shared.Dropped)
				w.at(time.Minute - 1000)
				w.used(test.used)
				w.at(time.Minute)
				w.used(0)
			})
		})
	}

	t.Run("when the charge has left", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(interactive, 1000))
			settled, cancelled := w.admit(interactive, 100), w.admit(interactive, 100)
			w.at(time.Second)
			w.admit(interactive, 7) // which is none of theirs
			w.at(time.Minute)
			cancelled.Cancel()
			w.used(7)
			settled.Settle(500)
			w.used(7)
			require.EqualValues(t, 500, w.Stats().Classes[interactive].SettledTokens)
		})
	})

	// Of many who end a call at once one wins, and Redis hears of one.
	t.Run("at once", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(interactive, 1000))
			grant := w.admit(interactive, 100)
			var all sync.WaitGroup
			for i := range 10 {
				all.Go(func() { grant.Settle(int64(i)) })
				all.Go(grant.Cancel)
			}
			all.Wait()
			u := w.usage().Used[interactive]
			require.Less(t, u, int64(10))
			require.Len(t, b.asked("correct"), 1)
			s := w.Stats().Classes[interactive]
			require.Equal(t, u, s.SettledTokens)
			if s.CancelledTokens > 0 {
				require.Zero(t, u)
			}
		})
	})

	// What did not change is not told.
	t.Run("as estimated", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(interactive, 1000))
			w.admit(interactive, 100).Settle(100)
			w.admit(interactive, 100).Settle(-1)
			synctest.Wait()
			require.Empty(t, b.asked("correct"))
			require.EqualValues(t, 100, w.Stats().Classes[interactive].SettledTokens)
		})
	})
}

// TestSettleAfterClose: it is dropped, and told.
func TestSettleAfterClose(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		var dropped []Correction
		w := b.replica(t, classQuota(interactive, 1000), WithDropped(func(c Correction, err error) {
			require.ErrorIs(t, err, ErrClosed)
			dropped = append(dropped, c)
		}))
		settled, cancelled := w.admit(interactive, 100), w.admit(interactive, 30)
		require.NoError(t, w.Close(t.Context()))
		settled.Settle(40)
		cancelled.Cancel()
		cancelled.Cancel()
		w.Observe(0, 0)
		w.Throttled(time.Second)
		require.Len(t, dropped, 4)
		for i, want := range []Correction{
			{Op: "settle", Class: interactive, Estimated: 100, Actual: 40},
			{Op: "cancel", Class: interactive, Estimated: 30},
			{Op: "observe"},
			{Op: "throttled"},
		} {
			dropped[i].at, dropped[i].wait, dropped[i].made = 0, 0, time.Time{}
			require.Equal(t, want, dropped[i])
		}
		require.EqualValues(t, 4, w.Stats().Shared.Dropped)
		require.Zero(t, w.Stats().Shared.Pending)
		require.Empty(t, b.asked("correct"))
		require.EqualValues(t, 40, w.Stats().Classes[interactive].SettledTokens)
		require.NoError(t, w.Close(t.Context()), "twice is the same as once")
	})
}

// The mailbox.

// A fakePost is what a mailbox delivers to.
type fakePost struct {
	mailbox
	delivered []Correction
	lost      []Correction
	causes    []error
}

// newFakePost returns one whose deliveries may be kept waiting, or fail.
func newFakePost(deliver func([]Correction) error) *fakePost {
	p := &fakePost{}
	p.deliver = func(some []Correction) error {
		err := deliver(some)
		if err == nil {
			p.delivered = append(p.delivered, some...)
		}
		return err
	}
	p.sent = func([]Correction) {}
	p.start = func(run func()) bool { go run(); return true }
	p.dropped = func(c Correction, err error) {
		p.lost, p.causes = append(p.lost, c), append(p.causes, err)
	}
	return p
}

// corrections returns so many that can be told apart.
func corrections(n int) []Correction {
	some := make([]Correction, n)
	for i := range some {
		some[i] = Correction{Op: "settle", Actual: int64(i)}
	}
	return some
}

func (p *fakePost) put(some []Correction) {
	for _, c := range some {
		p.mailbox.put(c)
	}
}

func actuals(some []Correction) (n []int64) {
	for _, c := range some {
		n = append(n, c.Actual)
	}
	return n
}

// TestCorrectionsKeepTheirOrder, also where more come while some are on the way; no request has more than a batch.
func TestCorrectionsKeepTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		largest := 0
		p := newFakePost(func(some []Correction) error {
			largest = max(largest, len(some))
			time.Sleep(time.Second)
			return nil
		})
		all := corrections(500)
		for len(all) > 0 {
			n := min(len(all), 61)
			p.put(all[:n])
			all = all[n:]
			time.Sleep(700 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, actuals(corrections(500)), actuals(p.delivered))
		require.Equal(t, batch, largest)
		require.Empty(t, p.lost)
		pending, drops := p.state()
		require.Zero(t, pending)
		require.Zero(t, drops)
		require.NotContains(t, stacks(), "redisshare.(*mailbox).run", "with nothing to do nothing runs")
	})
}

// TestCorrectionsThatCannotBeDelivered are dropped with their cause, and those after them have their turn.
func TestCorrectionsThatCannotBeDelivered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gone := errors.New("gone")
		times := 0
		p := newFakePost(func([]Correction) error {
			time.Sleep(time.Second)
			if times++; times == 2 {
				return gone
			}
			return nil
		})
		p.put(corrections(1)) // which is on its way alone
		synctest.Wait()
		p.put(corrections(100))
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, actuals(corrections(batch)), actuals(p.lost))
		require.Equal(t, append([]int64{0}, actuals(corrections(100)[batch:])...), actuals(p.delivered))
		for _, err := range p.causes {
			require.Equal(t, gone, err)
		}
		_, drops := p.state()
		require.EqualValues(t, batch, drops)
	})
}

// TestPendingCorrectionsAreBounded: the newest are dropped then, by who settles.
func TestPendingCorrectionsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan struct{})
		p := newFakePost(func([]Correction) error { <-hangs; return nil })
		p.put(corrections(1))
		synctest.Wait()
		p.put(corrections(maxPending))
		require.Empty(t, p.lost)
		p.put(corrections(3))
		require.Len(t, p.lost, 3)
		for _, err := range p.causes {
			require.Equal(t, errPending, err)
		}
		pending, drops := p.state()
		require.Equal(t, maxPending+1, pending)
		require.EqualValues(t, 3, drops)
		close(hangs)
		synctest.Wait()
		require.Len(t, p.delivered, maxPending+1)
		p.put(corrections(1))
		synctest.Wait()
		require.Len(t, p.delivered, maxPending+2, "there is room again")
	})
}

// TestACorrectionIsTriedAgain: some times, ever later, as the same request; and then it is given up.
func TestACorrectionIsTriedAgain(t *testing.T) {
	b := newBubbleRedis(t)
	gone := errors.New("gone")
	for _, answered := range []bool{false, true} {
		for _, fails := range []int{1, tries - 1, tries} {
			t.Run(fmt.Sprintf("%d times/answered %v", fails, answered), func(t *testing.T) {
				b.bubble(t, func(t *testing.T) {
					var dropped []Correction
					w := b.replica(t, classQuota(interactive, 1000), WithDropped(func(c Correction, err error) {
						require.Equal(t, gone, err)
						dropped = append(dropped, c)
					}))
					grant := w.admit(interactive, 100)
					var at []time.Time
					numbers := map[int64]bool{}
					fail := func(_ context.Context, r *bubbleRequest) error {
						if r.operation != "correct" {
							return nil
						}
						at = append(at, r.at)
						numbers[r.numbers[0]] = true
						if len(at) <= fails {
							return gone
						}
						return nil
					}
					if answered { // it arrives, but nobody hears of it
						b.after.set(fail)
					} else {
						b.before.set(fail)
					}
					// As one request.
					w.mailbox.pending = []Correction{{Op: "charge", Class: background, Actual: 20, made: time.Now()}}
					grant.Settle(130)
					w.at(30 * time.Second)
					require.Len(t, numbers, 1, "one request, by its number")
					require.Len(t, at, min(fails+1, tries))
					for i := 1; i < len(at); i++ {
						pause := at[i].Sub(at[i-1])
						require.GreaterOrEqual(t, pause, firstRetry)
						require.LessOrEqual(t, pause, lastRetry)
						if i > 1 {
							require.GreaterOrEqual(t, pause, at[i-1].Sub(at[i-2]))
						}
					}
					used := quotashare.ClassTokens{interactive: 130, background: 20}
					if fails == tries && !answered {
						used = quotashare.ClassTokens{interactive: 100}
					}
					require.Equal(t, used, w.usage().Used)
					if fails == tries {
						require.Len(t, dropped, 2)
						require.Equal(t, "charge", dropped[0].Op)
						require.Equal(t, "settle", dropped[1].Op)
						require.EqualValues(t, 2, w.Stats().Shared.Dropped)
					} else {
						require.Empty(t, dropped)
					}
					require.Zero(t, w.Stats().Shared.Outages, "calls find out themselves")

					// And the mailbox goes on.
					w.settled(w.admit(interactive, 1), 3)
					used[interactive] += 3
					require.Equal(t, used, w.usage().Used)
				})
			})
		}
	}

	// The window is shorter than the tries last: what would change nothing any more is no loss.
	t.Run("too late to matter", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			quota := classQuota(interactive, 1000)
			quota.Window = time.Second
			var causes []error
			w := b.replica(t, quota, WithDropped(func(_ Correction, err error) { causes = append(causes, err) }))
			grant := w.admit(interactive, 100)
			b.before.set(func(context.Context, *bubbleRequest) error { return gone })
			grant.Settle(0)
			w.at(10 * time.Second)
			require.Empty(t, causes)
			require.Zero(t, w.Stats().Shared.Pending)
		})
	})
}

// TestCloseSendsWhatIsPending, and waits for it for as long as its context allows.
func TestCloseSendsWhatIsPending(t *testing.T) {
	b := newBubbleRedis(t)
	gone := errors.New("gone")
	for _, patient := range []bool{true, false} {
		t.Run(fmt.Sprint("patient ", patient), func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				quota := classQuota(interactive, 1000)
				var causes []error
				w := b.replica(t, quota, WithDropped(func(_ Correction, err error) { causes = append(causes, err) }))
				look := b.replica(t, quota)
				var grants []*quotashare.Grant
				for range 50 {
					grants = append(grants, w.admit(interactive, 10))
				}
				back := time.Now().Add(2 * time.Second)
				b.before.set(func(_ context.Context, r *bubbleRequest) error {
					if r.operation == "correct" && time.Now().Before(back) {
						return gone
					}
					return nil
				})
				for _, g := range grants {
					g.Settle(4)
				}
				ctx, began := t.Context(), time.Now()
				if !patient {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, time.Second)
					defer cancel()
				}
				err := w.Close(ctx)
				took := time.Since(began)
				synctest.Wait()
				require.NotContains(t, stacks(), "redisshare.(*mailbox).run")
				if patient {
					require.NoError(t, err)
					require.GreaterOrEqual(t, took, 2*time.Second)
					look.used(50 * 4)
					require.Empty(t, causes)
					return
				}
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, time.Second, took)
				require.Len(t, causes, 50)
				for _, cause := range causes {
					require.ErrorIs(t, cause, ErrClosed)
				}
				require.EqualValues(t, 50, w.Stats().Shared.Dropped)
				look.used(50 * 10)
			})
		})
	}
}

// TestSettleDoesNotWaitForRedis: it hangs, and those who settle go on at once.
func TestSettleDoesNotWaitForRedis(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.replica(t, classQuota(interactive, 1000))
		var grants []*quotashare.Grant
		for range 100 {
			grants = append(grants, w.admit(interactive, 1))
		}
		b.before.set(func(ctx context.Context, _ *bubbleRequest) error {
			<-ctx.Done()
			return ctx.Err()
		})
		for i, g := range grants {
			if i%2 == 0 {
				g.Settle(3)
			} else {
				g.Cancel()
			}
		}
		w.Observe(500, 0)
		w.Throttled(time.Second)
		require.Zero(t, time.Since(w.start))
		require.Equal(t, 102, w.Stats().Shared.Pending)
		synctest.Wait()
		require.Equal(t, 102, w.Stats().Shared.Pending)
		b.before.set(nil)
		w.at(10 * time.Second)
		require.Zero(t, w.Stats().Shared.Pending)
		w.used(150)
	})
}

// What the provider says.

// TestTheProvidersWordReachesAllReplicas: what one observes, or is told by a 429, all decide by.
func TestTheProvidersWordReachesAllReplicas(t *testing.T) {
	b := newBubbleRedis(t)
	quota := quotashare.Quota{Tokens: 1000, Floors: quotashare.NoFloors, Pace: 1}

	t.Run("observe", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w, other := b.replica(t, quota), b.replica(t, quota)
			w.admit(batchClass, 100)
			other.admit(batchClass, 200)
			w.Observe(500, 0) // so 500 are counted: 300 of ours
			synctest.Wait()
			require.EqualValues(t, 200, other.usage().Others)
			require.EqualValues(t, 500, other.Stats().Used)
			require.Equal(t, quotashare.ReasonQuotaFull, other.refuse(interactive, 501).Reason)
			other.admit(interactive, 500)

			// It is remembered for a window, and a twelfth longer at most.
			w.at(time.Minute - 1)
			require.EqualValues(t, 200, other.usage().Others)
			w.at(65 * time.Second)
			require.Zero(t, other.usage().Others)
		})
	})

	t.Run("throttled", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w, other := b.replica(t, quota), b.replica(t, quota)
			w.Throttled(20 * time.Second)
			w.Throttled(time.Second) // which does not shorten it
			synctest.Wait()
			for class := range quotashare.Class(quotashare.NumClasses) {
				d := other.refuse(class, 1)
				require.Equal(t, refusal(quotashare.ReasonQuotaFull, 20*time.Second), d)
				require.Equal(t, refusal(quotashare.ReasonQuotaFull, time.Minute), other.refuse(class, 701), "a loan")
			}
			w.at(20*time.Second - 1000)
			other.refuse(interactive, 1)
			w.at(20 * time.Second)
			other.admit(batchClass, 100)
			require.Equal(t, refusal(quotashare.ReasonQuotaFull, 40*time.Second), other.refuse(batchClass, 1))
			w.at(time.Minute)
			other.admit(batchClass, 1)
		})
	})

	t.Run("throttled without a hint", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w, other := b.replica(t, quota), b.replica(t, quota)
			w.Throttled(0)
			synctest.Wait()
			require.Equal(t, refusal(quotashare.ReasonQuotaFull, time.Minute/120), other.refuse(interactive, 1))
			w.at(time.Second)
			w.Throttled(-5 * time.Second)
			synctest.Wait()
			require.Equal(t, refusal(quotashare.ReasonQuotaFull, time.Minute/120), other.refuse(interactive, 1))
		})
	})

	// Those who wait in any replica wait until the provider is back.
	t.Run("waiters", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w, other := b.replica(t, quota), b.replica(t, quota)
			w.Throttled(20 * time.Second)
			synctest.Wait()
			call := other.acquire(t.Context(), batchClass, 100)
			w.at(20*time.Second - 1)
			call.waits()
			w.at(25 * time.Second)
			call.admittedAfter(20*time.Second, late)
		})
	})

	for name, say := range map[string]func(*replica){
		"negative is unknown":      func(w *replica) { w.Observe(-1, 0) },
		"a time to come":           func(w *replica) { w.Observe(0, -1) },
		"a window old":             func(w *replica) { w.Observe(0, time.Minute) },
		"older than all there was": func(w *replica) { w.Observe(0, 1<<62) },
		"more than there ever was": func(w *replica) { w.Observe(50_000, 0) },
		"the most there can be":    func(w *replica) { w.Observe(math.MaxInt64, 0) },
		"a daily quota is spent":   func(w *replica) { w.Throttled(2*time.Minute + 2) },
		"for ever":                 func(w *replica) { w.Throttled(math.MaxInt64) },
	} {
		t.Run(name, func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				w, other := b.replica(t, quota), b.replica(t, quota)
				w.admit(interactive, 100)
				before := other.usage()
				say(w)
				synctest.Wait()
				require.Equal(t, before, other.usage())
				require.Zero(t, w.Stats().Shared.Dropped)
				other.admit(batchClass, 900)
			})
		})
	}

	// As it is sent late, it is as old as it is by then.
	t.Run("late", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w, other := b.replica(t, quota), b.replica(t, quota)
			w.admit(interactive, 800)
			w.at(57 * time.Second)
			gone := errors.New("gone")
			b.before.set(func(_ context.Context, r *bubbleRequest) error {
				if r.operation == "correct" && time.Since(w.start) < 61*time.Second {
					return gone
				}
				return nil
			})
			w.Observe(200, 0)
			w.Throttled(6 * time.Second)
			w.at(62 * time.Second)
			u := other.usage()
			require.Zero(t, u.Others, "at the time the 800 explained it")
			require.Equal(t, refusal(quotashare.ReasonQuotaFull, time.Second), other.refuse(interactive, 1))
		})
	})
}

// TestCloseGivesUp: while Redis is away Close does not try each of many pending corrections for seconds.
func TestCloseGivesUp(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		quota := classQuota(interactive, 100_000)
		quota.Window = time.Hour
		w := b.inMode(t, quota, Closed)
		var grants []*quotashare.Grant
		for range 50 * batch {
			grants = append(grants, w.admit(interactive, 10))
		}
		b.before.set(func(context.Context, *bubbleRequest) error { return errors.New("gone") })
		for _, g := range grants {
			g.Settle(4)
		}
		began := time.Now()
		require.NoError(t, w.Close(context.Background()))
		t.Log("Close took", time.Since(began))
		require.Less(t, time.Since(began), 30*time.Second)
		require.EqualValues(t, 50*batch, w.Stats().Shared.Dropped)
	})
}
