package redisshare

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// A line is one caller's way to the script, of one slot. What gets lost on it is up to the test.
type line struct {
	t      *testing.T
	server *server
	rules  *rules
	slot   *slot
}

// line returns a line to the window of the test's name.
func (b *bubbleRedis) line(t *testing.T, quota quotashare.Quota) *line {
	t.Helper()
	r, err := newRules(quota)
	require.NoError(t, err)
	s := newServer(b, t.Name())
	useClock(t, &Window{server: s})
	return &line{t, s, r, &slot{field: s.idle[0].field}}
}

// next sends a new request.
func (l *line) next(operation string, args ...int64) answer {
	l.t.Helper()
	l.slot.sent++
	a := l.again(operation, args...)
	l.slot.loose = 0
	return a
}

// again sends the latest request once more.
func (l *line) again(operation string, args ...int64) answer {
	l.t.Helper()
	a, err := l.server.send(l.t.Context(), l.slot, l.rules, operation, args...)
	require.NoError(l.t, err)
	return a
}

// lost sends a new request whose answer gets lost.
func (l *line) lost(operation string, args ...int64) {
	l.t.Helper()
	loose := l.slot.loose
	l.next(operation, args...)
	l.slot.loose = loose
	l.miss()
}

// missed is a new request that gets lost.
func (l *line) missed() {
	l.slot.sent++
	l.miss()
}

// miss notes that nobody got the answer to the latest request, as Window.ask does.
func (l *line) miss() {
	if l.slot.loose == 0 {
		l.slot.loose = l.slot.sent
	}
}

// admit wants a new call to be admitted.
func (l *line) admit(class quotashare.Class, tokens int64) answer {
	l.t.Helper()
	a := l.next("acquire", int64(class), tokens, 1, tokens)
	require.LessOrEqual(l.t, a.reason, quotashare.ReasonBorrowed)
	return a
}

// used wants the class to hold so many tokens.
func (l *line) used(class quotashare.Class, want int64) {
	l.t.Helper()
	require.Equal(l.t, want, l.next("usage").usage.Used[class])
}

// decision returns what an answer decides.
func decision(a answer) []any { return []any{a.reason, a.at, a.wait} }

// A request that is sent again.

// TestARequestSentAgainIsTheSame: it gets the same answer, also later, and what it does is done once.
func TestARequestSentAgainIsTheSame(t *testing.T) {
	b := newBubbleRedis(t)
	quota := classQuota(interactive, 1000)
	for _, later := range []time.Duration{0, time.Second, 50 * time.Second} {
		t.Run(fmt.Sprint("admitted/", later), func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				l, look := b.line(t, quota), b.line(t, quota)
				look.admit(interactive, 10)
				first := l.admit(interactive, 100)
				time.Sleep(later)
				look.admit(interactive, 1)
				for range 3 {
					again := l.again("acquire", int64(interactive), 100, 1, 100)
					require.Equal(t, decision(first), decision(again))
				}
				u := look.next("usage").usage
				require.Equal(t, tokensOf(interactive, 111), u.Used)
				require.Equal(t, tokensOf(interactive, 111), u.Demand)
			})
		})

		t.Run(fmt.Sprint("refused/", later), func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				l, look := b.line(t, quota), b.line(t, quota)
				look.admit(interactive, 950)
				time.Sleep(time.Second)
				first := l.next("acquire", int64(interactive), 100, 1, 100)
				require.Equal(t, quotashare.ReasonQuotaFull, first.reason)
				require.Equal(t, 59*time.Second, first.wait)
				time.Sleep(later)
				for range 3 {
					again := l.again("acquire", int64(interactive), 100, 1, 100)
					require.Equal(t, decision(first), decision(again))
				}
				require.EqualValues(t, 1050, look.next("usage").usage.Demand[interactive], "it asked for a hundred, once")
			})
		})

		t.Run(fmt.Sprint("correct/", later), func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				l, look := b.line(t, quota), b.line(t, quota)
				a := look.admit(interactive, 100)
				const settle, add = 0, 1
				some := []int64{
					settle, int64(interactive), a.at, 100, 70,
					add, int64(background), 0, 0, 40,
				}
				l.next("correct", some...)
				look.used(interactive, 70)
				time.Sleep(later)
				for range 3 {
					l.again("correct", some...)
				}
				look.used(interactive, 70)
				look.used(background, 40)
			})
		})
	}

	// What only looks, looks again.
	t.Run("usage", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			l, look := b.line(t, quota), b.line(t, quota)
			look.admit(interactive, 950)
			require.EqualValues(t, 950, l.next("usage").usage.Used[interactive])
			look.admit(interactive, 50)
			require.EqualValues(t, 1000, l.again("usage").usage.Used[interactive])
			require.Equal(t, time.Minute, l.next("behind", int64(interactive), 100, 0, 100).within)
			time.Sleep(10 * time.Second)
			require.Equal(t, 50*time.Second, l.again("behind", int64(interactive), 100, 0, 100).within)
		})
	})

	// However late it comes, as long as it may come at all.
	t.Run("when the window has moved on", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			l, look := b.line(t, quota), b.line(t, quota)
			first := l.admit(interactive, 900)
			for second := range 70 { // so that other calls move it
				time.Sleep(time.Second)
				look.admit(interactive, 1)
				if second == 30 || second == 69 {
					require.Equal(t, decision(first), decision(l.again("acquire", int64(interactive), 900, 1, 900)))
				}
			}
			look.used(interactive, 60)
		})
	})
}

// TestNoDecisionIsNoAdmission: Redis has lost its data, and says so. Asked the same again, it says so again.
func TestNoDecisionIsNoAdmission(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		l := b.line(t, classQuota(interactive, 1000))
		l.admit(interactive, 1000)
		b.outside(func(ctx context.Context) { b.client.Del(ctx, l.server.key) })
		l.slot.sent++
		for second := range time.Duration(3) {
			_, err := l.server.send(t.Context(), l.slot, l.rules, "acquire", int64(interactive), 100, 1, 100)
			require.ErrorIs(t, err, ErrLost, "asked %d times", second+1)
			require.Equal(t, time.Minute-second*time.Second, err.(*lostError).wait)
			time.Sleep(time.Second)
		}

		// It was not charged, so once there is a decision it is the first.
		time.Sleep(57*time.Second - 1000)
		_, err := l.server.send(t.Context(), l.slot, l.rules, "acquire", int64(interactive), 100, 1, 100)
		require.ErrorIs(t, err, ErrLost)
		time.Sleep(1000)
		a := l.again("acquire", int64(interactive), 100, 1, 100)
		require.Equal(t, quotashare.ReasonOwnShare, a.reason)
		require.Equal(t, decision(a), decision(l.again("acquire", int64(interactive), 100, 1, 100)))
		l.used(interactive, 100)
	})
}

// TestAnOlderRequestIsStale: it comes after a newer one of its slot, so nobody waits for it, and it changes nothing.
func TestAnOlderRequestIsStale(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		quota := classQuota(interactive, 1000)
		l, look := b.line(t, quota), b.line(t, quota)
		a := look.admit(interactive, 100)
		l.slot.sent = 7
		l.next("usage")
		before := look.next("usage")
		for _, number := range []int64{1, 6, 7} {
			for operation, args := range map[string][]int64{
				"acquire": {int64(interactive), 10, 1, 10},
				"correct": {0, int64(interactive), a.at, 100, 0},
				"usage":   nil,
				"behind":  {int64(interactive), 10, 0, 0},
			} {
				l.slot.sent, l.slot.loose = number, 0
				if number > 1 {
					l.slot.loose = number - 1
				}
				_, err := l.server.send(t.Context(), l.slot, l.rules, operation, args...)
				require.ErrorContains(t, err, "a newer request was faster")
			}
		}
		require.Equal(t, before.usage, look.next("usage").usage)
	})
}

// A request whose answer nobody got.

// TestALooseRequestIsTakenBack, by the next request in its slot, whatever that is: exactly what it charged, once, and
// only while it counts.
func TestALooseRequestIsTakenBack(t *testing.T) {
	b := newBubbleRedis(t)
	quota := classQuota(interactive, 100_000)

	for name, next := range map[string]func(l *line){
		"acquire": func(l *line) { l.admit(background, 1) },
		"refused": func(l *line) { l.next("acquire", int64(background), 100_001, 1, 0) },
		"correct": func(l *line) { l.next("correct", 3, 0, 0, 0, 0) },
		"usage":   func(l *line) { l.next("usage") },
		"behind":  func(l *line) { l.next("behind", int64(interactive), 10, 0, 0) },
		"lost":    func(l *line) { l.lost("usage") },
	} {
		t.Run(name, func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				l, look := b.line(t, quota), b.line(t, quota)
				look.admit(interactive, 10)
				l.admit(interactive, 20) // which somebody got
				l.lost("acquire", int64(interactive), 100, 1, 100)
				look.admit(interactive, 30) // at the same instant: one charge
				look.used(interactive, 160)
				next(l)
				look.used(interactive, 60)
				u := look.next("usage").usage
				require.EqualValues(t, 160, u.Demand[interactive], "it was asked for all the same")
				next(l)
				look.used(interactive, 60)
			})
		})
	}

	t.Run("sent again", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			l, look := b.line(t, quota), b.line(t, quota)
			look.admit(interactive, 300) // so that more than what is loose could be taken
			l.lost("acquire", int64(interactive), 100, 1, 100)
			l.slot.sent++
			for range 3 {
				l.again("acquire", int64(interactive), 7, 1, 7)
				look.used(interactive, 307)
			}
		})
	})

	t.Run("refused", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			l, look := b.line(t, quota), b.line(t, quota)
			look.admit(interactive, 99_950)
			l.lost("acquire", int64(interactive), 100, 1, 100)
			l.next("usage")
			look.used(interactive, 99_950)
		})
	})

	// What was corrected is not taken back: it is no call.
	t.Run("correct", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			l, look := b.line(t, quota), b.line(t, quota)
			a := look.admit(interactive, 100)
			l.lost("correct", 0, int64(interactive), a.at, 100, 150)
			l.next("usage")
			look.used(interactive, 150)
		})
	})

	// There are more charges in the window than are kept apart, so it is part of a larger one.
	t.Run("merged", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			l, look := b.line(t, quota), b.line(t, quota)
			for i := range 2000 {
				if i == 900 {
					l.lost("acquire", int64(interactive), 40, 1, 40)
				}
				look.admit(interactive, 3)
				time.Sleep(10 * time.Millisecond)
			}
			look.used(interactive, 6040)
			l.next("usage")
			look.used(interactive, 6000)
			time.Sleep(40*time.Second + 8*time.Second) // half a grain before what was charged with it has left, at the latest
			u := look.next("usage").usage.Used[interactive]
			require.GreaterOrEqual(t, u, int64(3*1200))
			require.LessOrEqual(t, u, int64(3*1210))
			time.Sleep(12*time.Second + time.Minute/600)
			look.used(interactive, 0)
		})
	})

	t.Run("when it no longer counts", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			l, look := b.line(t, quota), b.line(t, quota)
			l.lost("acquire", int64(interactive), 100, 1, 100)
			time.Sleep(time.Minute - 1000)
			look.admit(interactive, 300)
			look.used(interactive, 400)
			time.Sleep(1000)
			look.used(interactive, 300)
			l.next("usage")
			look.used(interactive, 300)
		})
	})
}

// TestLooseRequests: of many requests in a slot that get lost, or whose answers do, or that come after the next, only
// those count of which somebody heard.
func TestLooseRequests(t *testing.T) {
	b := newBubbleRedis(t)
	quota := classQuota(interactive, 1_000_000)
	for seed := range uint64(20) {
		b.bubble(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 8))
			l, look := b.line(t, quota), b.line(t, quota)
			var want int64
			var steps []string
			var late []func() // requests that are still on the way
			for range 60 {
				tokens := 1 + r.Int64N(50)
				args := []int64{int64(interactive), tokens, 1, tokens}
				switch n := r.IntN(5); n {
				case 0:
					l.admit(interactive, tokens)
					want += tokens
					steps = append(steps, fmt.Sprint("admitted ", tokens))
				case 1:
					l.lost("acquire", args...)
					steps = append(steps, fmt.Sprint("answer lost ", tokens))
				case 2:
					l.missed()
					steps = append(steps, "request lost")
				case 3:
					l.missed()
					sent := *l.slot
					late = append(late, func() {
						if sent.sent < l.slot.sent { // or it is not late
							_, err := l.server.send(t.Context(), &sent, l.rules, "acquire", args...)
							if err == nil {
								steps = append(steps, fmt.Sprint("came late ", tokens))
							}
						}
					})
					steps = append(steps, fmt.Sprint("late ", tokens))
				case 4:
					a := l.next("acquire", int64(interactive), 1_000_001, 1, 0)
					require.Equal(t, quotashare.ReasonQuotaFull, a.reason)
					steps = append(steps, "refused")
				}
				for len(late) > 0 && r.IntN(2) == 0 {
					late[0]()
					late = late[1:]
				}
				time.Sleep(100 * time.Millisecond)
			}
			l.next("usage")
			for _, do := range late {
				do()
			}
			require.Equal(t, want, look.next("usage").usage.Used[interactive], "seed %d: %s", seed, strings.Join(steps, ", "))
		})
	}
}

// TestLooseCallsOfAWindow is the same for the Window that notes what gets lost, by a client that fails.
func TestLooseCallsOfAWindow(t *testing.T) {
	b := newBubbleRedis(t)
	lose := errors.New("lost")
	for seed := range uint64(20) {
		b.bubble(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 9))
			w := b.replica(t, classQuota(interactive, 1_000_000))
			now := 0 // what happens to the next request: it gets lost at 1, and its answer at 2
			b.before.set(func(context.Context, *bubbleRequest) error {
				if now == 1 {
					return lose
				}
				return nil
			})
			b.after.set(func(context.Context, *bubbleRequest) error {
				if now == 2 {
					return lose
				}
				return nil
			})
			var want int64
			for range 60 {
				tokens := 1 + r.Int64N(50)
				now = r.IntN(3)
				a, err := w.ask(t.Context(), w.rules.Load(), "acquire", int64(interactive), tokens, 1, tokens)
				require.Equal(t, now > 0, err != nil)
				if err == nil {
					require.Equal(t, quotashare.ReasonOwnShare, a.reason)
					want += tokens
				}
				time.Sleep(time.Duration(r.IntN(500)) * time.Millisecond)
			}
			now = 0
			w.used(want)
			w.used(want)
		})
	}
}

// Who shares a window.

// TestAnotherWindowLength: one name is one window, of one length. A replica with another one is told, and changes
// nothing.
func TestAnotherWindowLength(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.replica(t, quotashare.Quota{Tokens: 1000})
		other := b.replica(t, quotashare.Quota{Tokens: 1000, Window: 10 * time.Second})
		w.admit(interactive, 100)
		for range 2 { // the second time nobody is asked
			g, d, err := other.TryAcquire(t.Context(), interactive, 100)
			require.ErrorIs(t, err, ErrAway)
			require.ErrorContains(t, err, "others of this name have a window of 1m0s: want the same for all, or another name")
			require.False(t, d.Admitted)
			g.Settle(1)
		}
		_, err := other.Usage(t.Context())
		require.ErrorContains(t, err, "others of this name have a window of 1m0s")
		require.ErrorContains(t, other.Stats().Shared.Away, "others of this name have a window of 1m0s")
		w.used(100)

		// Of another name it is another window.
		third := b.named(t, "another", quotashare.Quota{Tokens: 1000, Window: 10 * time.Second})
		third.admit(interactive, 100)
		w.used(100)
	})
}

// TestReplicasWithDifferentQuotas: what is charged is shared, each decides by its own quota, and both hear of it.
func TestReplicasWithDifferentQuotas(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		small, large := b.replica(t, classQuota(interactive, 100)), b.replica(t, classQuota(interactive, 1000))
		small.admit(interactive, 60)
		require.Zero(t, small.Stats().Shared.Disagreements)
		large.admit(interactive, 300)
		require.EqualValues(t, 1, large.Stats().Shared.Disagreements)
		require.Equal(t, quotashare.ReasonQuotaFull, small.refuse(interactive, 1).Reason)
		require.EqualValues(t, 1, small.Stats().Shared.Disagreements)
		small.refuse(interactive, 1)
		require.EqualValues(t, 1, small.Stats().Shared.Disagreements, "nobody of another quota asked since")
		large.admit(interactive, 640)
		require.EqualValues(t, 2, large.Stats().Shared.Disagreements)
		large.refuse(interactive, 1)
		require.EqualValues(t, 2, large.Stats().Shared.Disagreements)
		large.used(1000)

		// The same quota written otherwise is the same.
		same := b.replica(t, large.Quota())
		same.refuse(interactive, 1)
		large.refuse(interactive, 1)
		require.Zero(t, same.Stats().Shared.Disagreements)
	})
}

// TestSetQuotaKeepsWhatIsCharged: another quota refills nothing, for nobody.
func TestSetQuotaKeepsWhatIsCharged(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w, other := b.replica(t, classQuota(interactive, 1000)), b.replica(t, classQuota(interactive, 1000))
		grant := w.admit(interactive, 700)
		require.Equal(t, refusal(quotashare.ReasonQuotaFull, time.Minute), w.refuse(interactive, 400))
		for _, tokens := range []int64{1000, 500, 2000, 1, 1100} {
			w.at(time.Since(w.start) + time.Second)
			require.NoError(t, w.SetQuota(classQuota(interactive, tokens)))
			require.Equal(t, tokens, w.Quota().Tokens)
			room := max(tokens-700, 0)
			if tokens > room {
				require.Equal(t, quotashare.ReasonQuotaFull, w.refuse(interactive, min(room+1, tokens)).Reason)
			}
			u := w.usage()
			require.EqualValues(t, 700, u.Used[interactive])
		}
		require.EqualValues(t, 4, w.Stats().Shared.Disagreements, "the quota changed four times")
		w.admit(interactive, 400)
		other.refuse(interactive, 1)
		w.settled(grant, 0)
		other.admit(interactive, 600)
		w.at(2 * time.Minute)
		w.used(0)

		require.ErrorContains(t, w.SetQuota(quotashare.Quota{Tokens: 1000, Window: time.Second}), "window is 1s: want 1m0s")
		require.ErrorContains(t, w.SetQuota(quotashare.Quota{}), "tokens")
		require.Equal(t, classQuota(interactive, 1100).Tokens, w.Quota().Tokens, "it stays as it was")
	})
}

// TestTheEmbeddedCodec: without the struct library, and on an embedded server, the script says and stores the same.
func TestTheEmbeddedCodec(t *testing.T) {
	const library = "rawget(_G, 'struct')"
	require.Equal(t, 1, strings.Count(source, library))
	own := redis.NewScript(strings.NewReplacer(
		library, "nil", "call('TIME')", "call('HMGET', 'clock', 's', 'us')",
	).Replace(source))
	real := newBubbleRedisOf(t, newRealNode(t).client())
	embedded, _ := newBubbleMiniredis(t)
	seeds := uint64(4)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		require.NoError(t, embedded.client.FlushAll(t.Context()).Err())
		real.bubble(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 10))
			quota := randomQuota(r)
			quota.Window = []time.Duration{6 * time.Second, time.Minute}[seed%2]
			if seed < 2 {
				quota.Tokens, quota.Overdraft = maxTokens, 0 // the largest numbers there are
			}
			lines := []*line{real.line(t, quota), embedded.line(t, quota), real.line(t, quota)}
			lines[2].server.script = own
			lines[2].server.key += ":own"
			for _, l := range lines {
				l.slot.field = "slot:one:0"
			}
			var charges []answer
			var sizes []int64
			for step := range 250 {
				operation, args := "acquire", []int64{}
				class, tokens := r.Int64N(3), 1+r.Int64N(max(quota.Tokens>>r.IntN(8), 1))
				switch n := r.IntN(12); {
				case n == 0:
					operation = "usage"
				case n == 1:
					operation, args = "behind", []int64{class, tokens, r.Int64N(2), r.Int64N(tokens)}
				case n < 5 && len(charges) > 0:
					i := r.IntN(len(charges))
					operation = "correct"
					args = []int64{0, charges[i].usage.Others, charges[i].at, sizes[i], r.Int64N(2 * sizes[i])}
				case n == 5:
					operation, args = "correct", []int64{2, 0, 0, r.Int64N(6e6), r.Int64N(quota.Tokens)}
				default:
					args = []int64{class, tokens, 1, min(tokens, lines[0].rules.limits[class].Share)}
				}
				var want answer
				for i, l := range lines {
					got := l.next(operation, args...)
					if i == 0 {
						want = got
					}
					require.Equal(t, want, got, "seed %d, step %d: %s %v", seed, step, operation, args)
				}
				if operation == "acquire" && want.reason <= quotashare.ReasonBorrowed {
					want.usage.Others = class // whose charge it was
					charges, sizes = append(charges, want), append(sizes, tokens)
				}
				if r.IntN(3) == 0 {
					time.Sleep(time.Duration(r.Int64N(int64(quota.Window.Microseconds()/20))) * time.Microsecond)
				}
			}
			state := func(b *bubbleRedis, key string) (fields map[string]string) {
				b.outside(func(ctx context.Context) { fields = b.client.HGetAll(ctx, key).Val() })
				delete(fields, "swept") // where the server goes on to look
				return fields
			}
			want := state(real, lines[0].server.key)
			require.Greater(t, len(want), 10)
			for _, got := range []map[string]string{state(embedded, lines[1].server.key), state(real, lines[2].server.key)} {
				require.ElementsMatch(t, slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(got)))
				require.Equal(t, want, got, "seed %d", seed)
			}
		})
	}
}

// TestHintsBehindWaitersEqualWindow: what is refused for others of its class wait is told the same as by a
// quotashare.Window, whether these are within the share or above.
func TestHintsBehindWaitersEqualWindow(t *testing.T) {
	b := newBubbleRedis(t)
	queued, above, passed := 0, 0, 0
	for seed := range uint64(150) {
		b.bubble(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 11))
			quota := randomQuota(r)
			quota.Window = []time.Duration{6 * time.Second, time.Minute}[seed%2]
			class := quotashare.Class(r.IntN(3))
			ctx, cancel := context.WithCancel(t.Context())
			defer synctest.Wait()
			defer cancel()
			shared := b.replica(t, quota, WithMaxWait(class, -1))
			alone, err := quotashare.NewWindow(quota, quotashare.WithMaxWait(class, -1))
			require.NoError(t, err)
			shared.usage()
			limits := shared.Quota().Limits(class)
			if limits.Largest == 0 {
				return
			}
			try := func(c quotashare.Class, tokens int64) quotashare.Decision {
				_, want := alone.TryAcquire(c, tokens)
				_, got, err := shared.TryAcquire(ctx, c, tokens)
				require.NoError(t, err)
				want.RetryAfter, got.RetryAfter = up(want.RetryAfter), up(got.RetryAfter)
				require.Equal(t, want, got, "seed %d: %v call of %d tokens of %+v, %d wait", seed, c, tokens, shared.Quota(),
					shared.Stats().Classes[class].Waiting)
				return got
			}
			size := func() int64 {
				if r.IntN(3) == 0 {
					return min(1+r.Int64N(max(limits.Share/8, 1)), limits.Largest)
				}
				return 1 + r.Int64N(max(limits.Largest>>r.IntN(4), 1))
			}
			for range 40 {
				c := quotashare.Class(r.IntN(3))
				if c == class && seed%4 < 2 { // so that its share is free
					c = (c + 1) % 3
				}
				try(c, 1+r.Int64N(max(quota.Tokens>>r.IntN(6), 1)))
				time.Sleep(time.Duration(r.Int64N(quota.Window.Microseconds()/20)) * time.Microsecond)
			}
			for range 12 {
				if r.IntN(2) == 0 {
					tokens := size()
					for _, acquire := range []func(context.Context, quotashare.Class, int64) (quotashare.Grant, error){
						alone.Acquire, shared.Acquire,
					} {
						go acquire(ctx, class, tokens)
						synctest.Wait()
					}
					require.Equal(t, alone.Stats().Classes[class].Waiting, shared.Stats().Classes[class].Waiting, "seed %d", seed)
				}
				waiting := shared.Stats().Classes[class].Waiting > 0
				switch d := try(class, size()); {
				case d.Reason == quotashare.ReasonQueued && shared.queues[class].asked < shared.queues[class].all:
					above++
				case d.Reason == quotashare.ReasonQueued:
					queued++
				case waiting && !d.Permanent():
					passed++
				}
			}
		})
	}
	require.Greater(t, queued, 100)
	require.Greater(t, above, 100)
	require.Greater(t, passed, 20)
}
