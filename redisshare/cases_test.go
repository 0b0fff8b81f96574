package redisshare

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// Cases of public failures of limiters that share their state through Redis. Each test is named for what goes right.

// Case 86: replicas whose clocks differ share one window, on the clock of Redis. Nothing of their own clocks is sent.
// And where the clock of Redis itself steps back, for another server has taken over, nothing is forgotten for that.
func TestTheClocksOfReplicasDecideNothing(t *testing.T) {
	b := newBubbleRedis(t)
	for _, window := range []time.Duration{time.Minute, 10 * time.Second, time.Hour} {
		for _, back := range []time.Duration{0, 10 * time.Second, window / 601} {
			t.Run(fmt.Sprintf("back by %v of %v", back, window), func(t *testing.T) {
				b.bubble(t, func(t *testing.T) {
					quota := classQuota(interactive, 4)
					quota.Window = window
					one, another := b.replica(t, quota), b.replica(t, quota)
					admitted := 0
					ask := func(w *replica, wait time.Duration) {
						_, d, err := w.TryAcquire(t.Context(), interactive, 1)
						require.NoError(t, err)
						if d.Admitted {
							admitted++
						} else {
							require.Equal(t, refusal(quotashare.ReasonQuotaFull, wait), d)
						}
					}
					for range 4 {
						ask(one, window)
					}
					b.skew = -back
					ask(another, window)
					for range 4 {
						ask(one, window)
					}
					require.Equal(t, 4, admitted)

					// A window later it is all there again, and no sooner. What lies back by less than a 600th of a window
					// is waited for.
					behind := back
					if back > window/600 {
						behind = 0
					}
					behind = up(behind)
					one.at(window + behind - time.Microsecond)
					ask(another, time.Microsecond)
					require.Equal(t, 4, admitted)
					one.at(window + behind)
					for range 5 {
						ask(another, window)
					}
					require.Equal(t, 8, admitted)
				})
			})
		}
	}

	// The same on the clock of Redis, ten years later by that of the replicas: they send the same.
	var sent [2][]string
	for i := range sent {
		b.bubble(t, func(t *testing.T) {
			time.Sleep(time.Duration(i) * 87600 * time.Hour)
			b.skew = -time.Duration(i) * 87600 * time.Hour
			r := rand.New(rand.NewPCG(1, 86))
			w := b.named(t, "same", quotashare.Quota{Tokens: 1000}, WithMaxWait(background, -1))
			for range 200 {
				class, tokens := quotashare.Class(r.IntN(3)), 1+r.Int64N(100)
				g, _, err := w.TryAcquire(t.Context(), class, tokens)
				require.NoError(t, err)
				switch r.IntN(5) {
				case 0:
					g.Settle(r.Int64N(100))
				case 1:
					g.Cancel()
				case 2:
					w.Observe(r.Int64N(1000), time.Second)
				case 3:
					w.Throttled(time.Second)
				}
				synctest.Wait()
				time.Sleep(time.Duration(r.Int64N(1e9)))
			}
			w.usage()
			for _, r := range b.requests {
				sent[i] = append(sent[i], fmt.Sprintf("%s %d %x", r.operation, r.numbers, r.rule))
			}
		})
	}
	require.Greater(t, len(sent[0]), 250)
	require.Equal(t, sent[0], sent[1])
}

// Case 87: whatever is asked of it, each key expires by itself, no sooner than what it holds is gone, and no later than
// ten seconds and 13 twelfths of a window after the last request. Then nothing is left.
func TestEachKeyExpires(t *testing.T) {
	const margin = 10 * time.Second
	embedded, mini := newBubbleMiniredis(t)
	for name, b := range map[string]*bubbleRedis{"redis": newBubbleRedis(t), "embedded": embedded} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(6) {
				b.bubble(t, func(t *testing.T) {
					r := rand.New(rand.NewPCG(seed, 87))
					quota := randomQuota(r)
					quota.Window = []time.Duration{
						time.Microsecond, 100 * time.Millisecond, 6 * time.Second, time.Minute, 2 * time.Minute, 365 * 24 * time.Hour,
					}[seed]
					w := b.replica(t, quota)
					var grants []*quotashare.Grant
					keys := func() (names []string) {
						b.outside(func(ctx context.Context) {
							names = b.client.Keys(ctx, "quotashare:*").Val()
						})
						return names
					}
					for step := range 150 {
						class, tokens := quotashare.Class(r.IntN(3)), 1+r.Int64N(max(quota.Tokens>>r.IntN(7), 1))
						what, asked := "", false
						switch n := r.IntN(12); {
						case n < 6:
							g, d, err := w.TryAcquire(t.Context(), class, tokens)
							require.NoError(t, err)
							what, asked = d.Reason.String(), !d.Permanent()
							if d.Admitted {
								grants = append(grants, &g)
							}
						case n < 8 && len(grants) > 0:
							grants[r.IntN(len(grants))].Settle(r.Int64N(tokens + 1))
							what = "settle"
						case n == 8 && len(grants) > 0:
							grants[r.IntN(len(grants))].Cancel()
							what = "cancel"
						case n == 9:
							w.Observe(r.Int64N(quota.Tokens), time.Duration(r.Int64N(int64(quota.Window))))
							what = "observe"
						case n == 10:
							next := randomQuota(r)
							next.Window = quota.Window
							if w.SetQuota(next) == nil {
								quota = next
							}
							what = "quota"
						default:
							w.usage()
							what, asked = "usage", true
						}
						synctest.Wait()
						for _, key := range keys() {
							var ttl time.Duration
							b.outside(func(ctx context.Context) { ttl = b.client.PTTL(ctx, key).Val() })
							least := time.Duration(0)
							if asked {
								least = quota.Window.Truncate(time.Millisecond)
							}
							require.Greater(t, ttl, least, "seed %d, step %d: %s", seed, step, what)
							most := quota.Window*13/12 + margin + 2*time.Millisecond
							require.LessOrEqual(t, ttl, most, "seed %d, step %d: %s", seed, step, what)
						}
						step := time.Duration(r.Int64N(int64(quota.Window)/8 + 1))
						if r.IntN(20) == 0 {
							step *= 20
						}
						time.Sleep(step)
						if b == embedded {
							mini.FastForward(step)
						}
					}
					w.usage()
					require.Len(t, keys(), 1, "one for a name")
					if b == embedded {
						mini.FastForward(quota.Window)
						require.Len(t, keys(), 1)
						mini.FastForward(quota.Window/12 + margin + 2*time.Millisecond)
						require.Empty(t, keys())
					}
				})
			}
		})
	}

	// The usual call, which finds the window as it was but for the time, leaves the expiry as it is.
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.replica(t, classQuota(interactive, 1000))
		ttl := func() (left time.Duration) {
			b.outside(func(ctx context.Context) { left = b.client.PTTL(ctx, w.server.key).Val() })
			return left
		}
		w.admit(interactive, 1)
		b.outside(func(ctx context.Context) { b.client.Expire(ctx, w.server.key, time.Minute+margin) })
		for range 4 {
			w.at(time.Since(w.start) + time.Second)
			w.admit(interactive, 1)
			require.InDelta(t, 70, ttl().Seconds(), 5)
		}
		b.outside(func(ctx context.Context) { b.client.Persist(ctx, w.server.key) })
		w.at(5 * time.Second) // a part of the window is over
		w.admit(interactive, 1)
		require.InDelta(t, 75, ttl().Seconds(), 5)
	})
}

// Case 88: Redis has forgotten the script, for it was flushed, or for another server has taken over. The next call
// sends it again, and is charged once.
func TestTheScriptIsSentAgain(t *testing.T) {
	ctx := context.Background()
	client := newNode(t).client()
	w, err := New(client, t.Name(), quotashare.Quota{Tokens: 1000}, Closed, WithTimeout(4*time.Second))
	require.NoError(t, err)
	closeAfter(t, w)
	for i := range int64(3) {
		g, d, err := w.TryAcquire(ctx, interactive, 100)
		require.NoError(t, err)
		require.Equal(t, quotashare.ReasonOwnShare, d.Reason)
		require.NoError(t, client.ScriptFlush(ctx).Err())
		g.Settle(90)
		require.Eventually(t, func() bool { return idle(w) }, 10*time.Second, time.Millisecond)
		require.NoError(t, client.ScriptFlush(ctx).Err())
		u, err := w.Usage(ctx)
		require.NoError(t, err)
		require.Equal(t, 90*(i+1), u.Used[interactive])
		require.NoError(t, client.ScriptFlush(ctx).Err())
	}
	s := w.Stats()
	require.Zero(t, s.Shared.Outages)
	require.Zero(t, s.Shared.Dropped)
	require.EqualValues(t, 3, s.Classes[interactive].Admitted)
}

// Case 90: a replica that dies leaves what it was estimated at, which leaves the window as if it lived. And there is no
// lease that a long stream could outlive: settled late, a charge that has left stays away.
func TestADeadReplicaAndALongStream(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		quota := classQuota(interactive, 500)
		dies, lives := b.replica(t, quota), b.replica(t, quota)
		dies.admit(interactive, 500) // and is not heard of again
		require.Equal(t, refusal(quotashare.ReasonQuotaFull, time.Minute), lives.refuse(interactive, 500))
		lives.at(time.Minute - 1000)
		require.Equal(t, refusal(quotashare.ReasonQuotaFull, 1000), lives.refuse(interactive, 1))
		lives.at(time.Minute)
		lives.used(0)
		lives.admit(interactive, 500)
	})

	for name, end := range map[string]func(*quotashare.Grant){
		"settled":      func(g *quotashare.Grant) { g.Settle(200) },
		"settled high": func(g *quotashare.Grant) { g.Settle(5000) },
		"cancelled":    (*quotashare.Grant).Cancel,
	} {
		t.Run(name, func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				var dropped []error
				w := b.replica(t, classQuota(interactive, 500), WithDropped(func(_ Correction, err error) {
					dropped = append(dropped, err)
				}))
				stream := w.admit(interactive, 500)
				w.at(90 * time.Second)
				w.used(0)
				end(stream)
				w.used(0)
				require.Empty(t, dropped)
				w.admit(interactive, 500)
				w.used(500)
			})
		})
	}
}

// Case 92: numbers keep what they are. Waits are told to the microsecond, which is the unit of Redis' clock. The script
// sees whole numbers, none of them above 2^53; what would not be one is an error that names it.
func TestNumbersAreWhole(t *testing.T) {
	b := newBubbleRedis(t)
	t.Run("waits", func(t *testing.T) {
		for _, left := range []time.Duration{
			700 * time.Millisecond, 999_999 * time.Microsecond, time.Millisecond, 1500 * time.Microsecond,
			999 * time.Microsecond, time.Microsecond, 59*time.Second + 999_999*time.Microsecond,
		} {
			b.bubble(t, func(t *testing.T) {
				w := b.replica(t, classQuota(interactive, 10))
				w.admit(interactive, 10)
				w.at(time.Minute - left)
				d := w.refuse(interactive, 1)
				require.Equal(t, refusal(quotashare.ReasonQuotaFull, left), d)
				require.Positive(t, d.RetryAfterSeconds(), "a wait is no 0 in a header")
				w.at(time.Minute - time.Microsecond)
				w.refuse(interactive, 1)
				w.at(time.Minute)
				w.admit(interactive, 1)
			})
		}
	})

	// What is less than a microsecond of the caller's time is none of Redis'.
	t.Run("parts of a microsecond", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(interactive, 10))
			w.at(999)
			w.admit(interactive, 10)
			w.at(time.Minute - 1)
			require.Equal(t, refusal(quotashare.ReasonQuotaFull, time.Microsecond), w.refuse(interactive, 1))
			w.at(time.Minute)
			w.admit(interactive, 10)
		})
	})

	t.Run("quotas", func(t *testing.T) {
		client := redis.NewClient(&redis.Options{ContextTimeoutEnabled: true})
		defer client.Close()
		for want, quota := range map[string]quotashare.Quota{
			"window is 1.0000015s: want whole microseconds":             {Tokens: 10, Window: time.Second + 1500},
			"window is 1ns: want whole microseconds":                    {Tokens: 10, Window: 1},
			"window is 8784h0m0.000001s: want at most":                  {Tokens: 10, Window: maxWindow + time.Microsecond},
			"tokens is 9007199254740993: want at most 9007199254740992": {Tokens: maxTokens + 1},
			"tokens is 9223372036854775807: want at most":               {Tokens: 1<<63 - 1},
			"overdraft is 9007199254740983: want at most 9007199254740982": {
				Tokens: 10, Overdraft: maxTokens - 9,
			},
			"overdraft is 1: want at most 0":   {Tokens: maxTokens, Overdraft: 1},
			"overdraft is 9223372036854775797": {Tokens: 10, Overdraft: 1<<63 - 11},
		} {
			_, err := New(client, "x", quota, Closed)
			require.ErrorContains(t, err, want)
		}
		w, err := New(client, "x", quotashare.Quota{Tokens: 10}, Closed)
		require.NoError(t, err)
		require.ErrorContains(t, w.SetQuota(quotashare.Quota{Tokens: maxTokens + 1}), "tokens is")
		require.EqualValues(t, 10, w.Quota().Tokens)

		// A quota or an estimate with a fraction cannot be given: in Go it is an integer, and in JSON an error.
		for _, text := range []string{`{"tokens": 10.5}`, `{"tokens": 1e-1}`, `{"tokens": 10, "overdraft": 0.5}`} {
			_, err := quotashare.ParseQuota([]byte(text))
			require.ErrorContains(t, err, "whole number", text)
		}
	})

	// At the limits all is exact.
	t.Run("the largest", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(interactive, maxTokens))
			w.admit(interactive, maxTokens-3)
			require.Equal(t, quotashare.ReasonQuotaFull, w.refuse(interactive, 4).Reason)
			w.admit(interactive, 2)
			g := w.admit(interactive, 1)
			w.refuse(interactive, 1)
			w.used(maxTokens)
			w.settled(g, 0)
			w.used(maxTokens - 1)
			require.Equal(t, quotashare.ReasonTooLarge, w.refuse(interactive, maxTokens+1).Reason)

			// What a local Window admitted in an outage comes on top, as far as it can be held.
			w.mailbox.put(Correction{Op: "charge", Class: interactive, Actual: maxTokens})
			w.used(maxTokens)
		})
		b.bubble(t, func(t *testing.T) {
			quota := classQuota(interactive, 10)
			quota.Window = maxWindow
			w := b.replica(t, quota)
			w.admit(interactive, 10)
			require.Equal(t, refusal(quotashare.ReasonQuotaFull, maxWindow), w.refuse(interactive, 1))
		})
	})

	// Each number that the script is sent, and each that it answers.
	t.Run("sent", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			quota := quotashare.Quota{Tokens: 1000}
			quota.Shares = quotashare.Fractions{interactive: 1.0 / 3, background: 0.29, batchClass: 0.1}
			w := b.replica(t, quota)
			for i := range int64(50) {
				g, _, err := w.TryAcquire(t.Context(), quotashare.Class(i%3), 1+7*i%90)
				require.NoError(t, err)
				g.Settle(i)
				w.Observe(1000-i, time.Duration(i)*123_456_789)
				w.Throttled(time.Duration(i))
				w.usage()
				time.Sleep(1_234_567_891)
			}
			w.Observe(math.MaxInt64, 0)
			w.Observe(math.MinInt64, 0)
			w.Observe(-1, 0)
			w.at(10 * time.Minute)
			w.admit(interactive, 1).Settle(math.MaxInt64)
			w.usage()
			for _, r := range b.requests {
				for _, some := range [][]int64{r.numbers, numbers(r.rule), r.answer} {
					for _, n := range some {
						require.GreaterOrEqual(t, n, int64(0), "%s %d", r.operation, r.numbers)
						require.LessOrEqual(t, n, int64(maxTokens), "%s %d", r.operation, r.numbers)
					}
				}
			}
		})
	})
}

// Case 95: memory is bounded at any rate of calls, and given back.

// A load makes many calls on one window, on a clock of its own, some hundred at a time.
type load struct {
	t        *testing.T
	client   *redis.Client
	script   *redis.Script
	rules    *rules
	key      string
	now      time.Time
	sent     map[string]int64 // by slot
	pipeline redis.Pipeliner
}

func newLoad(t *testing.T, client *redis.Client, quota quotashare.Quota) *load {
	t.Helper()
	r, err := newRules(quota)
	require.NoError(t, err)
	w := &Window{server: newServer(client, t.Name())}
	useClock(t, w)
	l := &load{
		t: t, client: client, script: w.server.script, rules: r, key: w.server.key, sent: map[string]int64{},
		now: time.UnixMicro(1_800_000_000_000_000), pipeline: client.Pipeline(),
	}
	require.NoError(t, l.script.Load(t.Context(), client).Err())
	return l
}

// call makes a call by the slot.
func (l *load) call(slot string, class quotashare.Class, tokens int64) {
	l.sent[slot]++
	asked := tokens
	if tokens > l.rules.limits[class].Share {
		asked = 0
	}
	us := l.now.UnixMicro()
	request := pack(nil, l.sent[slot], 0, 0, 0, 0, 0, l.rules.digest, int64(class), tokens, 1, asked)
	l.pipeline.HSet(l.t.Context(), "clock", "s", us/1e6, "us", us%1e6)
	l.pipeline.EvalSha(l.t.Context(), l.script.Hash(), []string{l.key}, "acquire", request, l.rules.packed, slot)
	if l.pipeline.Len() >= 500 {
		l.flush()
	}
}

func (l *load) flush() {
	_, err := l.pipeline.Exec(l.t.Context())
	require.NoError(l.t, err)
}

// memory returns what the window takes.
func (l *load) memory() int64 {
	l.flush()
	bytes, err := l.client.MemoryUsage(l.t.Context(), l.key, 0).Result()
	require.NoError(l.t, err)
	return bytes
}

func (l *load) fields() int64 { return l.client.HLen(l.t.Context(), l.key).Val() }

// TestAWindowTakesLittleMemory: at any rate of calls it is less than 100 KiB, also where all that can be remembered is.
func TestAWindowTakesLittleMemory(t *testing.T) {
	const limit = 100 << 10
	client := newRealNode(t).client()
	// Nothing is lent, so a class that used a token of its share is refused the whole of it.
	quota := quotashare.Quota{Tokens: 900_000, Pace: 1}
	quota.Shares = quotashare.Fractions{interactive: 1.0 / 3, background: 1.0 / 3, batchClass: 1.0 / 3}
	quota.Floors = quota.Shares
	const share = 300_000

	rates := []int{10, 100, 1000, 20_000}
	if scale() > 1 {
		rates = append(rates, 100_000, 1_000_000)
	}
	for _, rate := range rates {
		t.Run(fmt.Sprint(rate, " in a window"), func(t *testing.T) {
			l := newLoad(t, client, quota)
			most := int64(0)
			for i := range rate + rate/6 {
				class := quotashare.Class(i % 3)
				l.call("slot:one:0", class, 1)
				if i%(1+rate/500) == 0 {
					l.call("slot:one:0", class, share)
				}
				l.now = l.now.Add(time.Minute / time.Duration(rate))
				if i%(rate/10) == 0 {
					most = max(most, l.memory())
				}
			}
			t.Logf("%d bytes, %d fields", max(most, l.memory()), l.fields())
			require.Less(t, max(most, l.memory()), int64(limit))
		})
	}

	// Of each log as many charges as are ever kept apart: 304 as they come, and then one in each 600th of a window.
	for _, spread := range []time.Duration{time.Microsecond, 10 * time.Millisecond, 90 * time.Millisecond} {
		t.Run(fmt.Sprint("all apart, by ", spread), func(t *testing.T) {
			l := newLoad(t, client, quota)
			most := int64(0)
			for i := range 608 + 10 {
				for class := range quotashare.Class(quotashare.NumClasses) {
					l.call("slot:one:0", class, 1)
					l.call("slot:one:0", class, share)
				}
				if i < 303 {
					l.now = l.now.Add(spread)
				} else {
					l.now = l.now.Add(time.Minute / 600)
				}
				if i > 590 {
					most = max(most, l.memory())
				}
			}
			t.Logf("%d bytes, %d fields", most, l.fields())
			require.Less(t, most, int64(limit))
			require.Greater(t, most, int64(6*500*16), "it is all there")
		})
	}
}

// TestCallersAreForgotten: what the window remembers of a caller, so as to know its requests again, goes when it has
// been silent for as long as a window and ten seconds, however many come and go.
func TestCallersAreForgotten(t *testing.T) {
	client := newRealNode(t).client()
	quota := classQuota(interactive, 1_000_000)

	// Replicas that come and go: one call each, a second after the other, by the slot of a Window of its own.
	l := newLoad(t, client, quota)
	most := int64(0)
	for i := range 1000 {
		w := newServer(client, t.Name())
		l.call(w.idle[len(w.idle)-1].field, interactive, 1)
		l.now = l.now.Add(time.Second)
		if i%10 == 0 {
			l.flush()
			most = max(most, l.fields())
		}
	}
	require.Less(t, most, int64(75+40+120), "those of a window and ten seconds, and a few that wait for their turn")
	require.Greater(t, most, int64(75))

	// Many at once are so many bytes more, and all of them are forgotten.
	l.flush()
	before, fields := l.memory(), l.fields()
	for range 10 { // replicas
		for i, one := range newServer(client, t.Name()).idle {
			if i < 100 { // calls under way at once
				l.call(one.field, interactive, 1)
			}
		}
	}
	l.flush()
	added := l.fields() - fields
	require.Greater(t, added, int64(900)) // and some are forgotten meanwhile
	perSlot := (l.memory() - before) / added
	t.Logf("%d bytes a slot", perSlot)
	require.Less(t, perSlot, int64(200))
	for range 75 + 100 {
		l.now = l.now.Add(time.Second)
		l.call("slot:one:0", interactive, 1)
	}
	l.flush()
	require.Less(t, l.fields(), int64(60))
	require.True(t, client.HExists(t.Context(), l.key, "slot:one:0").Val(), "this one is in use")
}

// TestIdleNamesTakeNothing: 10,000 names, and then silence, and one more call.
func TestIdleNamesTakeNothing(t *testing.T) {
	const names = 10_000
	client := newRealNode(t).client()
	ctx := context.Background()
	quota := quotashare.Quota{Tokens: 1000, Window: 100 * time.Millisecond}
	used := func() int64 {
		for line := range strings.Lines(client.Info(ctx, "memory").Val()) {
			if text, ok := strings.CutPrefix(strings.TrimSpace(line), "used_memory:"); ok {
				n, err := strconv.ParseInt(text, 10, 64)
				require.NoError(t, err)
				return n
			}
		}
		t.Fatal("not told")
		return 0
	}
	// The ten seconds for which a request may be sent again are left out, so as not to wait for them.
	const margin = "+ 10000"
	require.Equal(t, 1, strings.Count(source, margin))
	short := redis.NewScript(strings.Replace(source, margin, "+ 300", 1))
	require.NoError(t, short.Load(ctx, client).Err())
	r, err := newRules(quota)
	require.NoError(t, err)
	before := used()
	key := newServer(client, "NAME").key
	call := func(p redis.Cmdable, name string) {
		request := pack(nil, 1, 0, 0, 0, 0, 0, r.digest, int64(interactive), 1, 1, 1)
		p.EvalSha(ctx, short.Hash(), []string{strings.Replace(key, "NAME", name, 1)}, "acquire",
			request, r.packed, "slot:one:0")
	}
	p := client.Pipeline()
	for i := range names {
		call(p, fmt.Sprint("name ", i))
		if p.Len() == 500 {
			_, err := p.Exec(ctx)
			require.NoError(t, err)
		}
	}
	require.Eventually(t, func() bool { return client.DBSize(ctx).Val() == 0 }, 20*time.Second, 20*time.Millisecond)
	call(client, "one more")
	require.EqualValues(t, 1, client.DBSize(ctx).Val())
	require.Less(t, used(), before+1<<20, "as at the start")
}

// TestManyShortLivedCallersAreForgotten: as fast as they come.
func TestManyShortLivedCallersAreForgotten(t *testing.T) {
	client := newRealNode(t).client()
	quota := classQuota(interactive, 1_000_000)
	l := newLoad(t, client, quota)
	for i := range 30_000 { // 100 a second, for 300 seconds
		l.call(fmt.Sprint("slot:", i, ":0"), interactive, 1)
		l.now = l.now.Add(10 * time.Millisecond)
		if i%1000 == 0 {
			l.flush()
		}
		if i%5000 == 0 {
			t.Log(i/100, "s:", l.fields(), "fields", l.memory(), "bytes")
		}
	}
	l.flush()
	t.Log(l.fields(), "fields")
	require.Less(t, l.fields(), int64(75*100*3/2))
}
