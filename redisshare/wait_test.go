package redisshare

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

const (
	interactive = quotashare.Interactive
	background  = quotashare.Background
	batchClass  = quotashare.Batch
)

// A bubbleRedis is a Redis that stands outside of the bubbles of testing/synctest and serves the Windows in them. Its
// scripts read the bubble's clock, and no time passes while it is asked. So waits take no time, and what happens at an
// instant has happened when synctest.Wait returns.
type bubbleRedis struct {
	redis.Scripter // the rest, which no Window uses
	client         *redis.Client

	// Of the goroutine that asks, outside. One request is under way at a time.
	jobs chan func()
	done chan struct{}
	free chan struct{}

	// Of one bubble.
	requests []*bubbleRequest
	skew     time.Duration // the clock of Redis less the bubble's
	before   hook          // an error: the request does not arrive
	after    hook          // an error: the answer does not arrive
}

// A hook is called with each request, in the bubble. The zero hook does nothing.
type hook struct {
	lock sync.Mutex
	call func(context.Context, *bubbleRequest) error
}

func (h *hook) set(call func(context.Context, *bubbleRequest) error) {
	h.lock.Lock()
	defer h.lock.Unlock()
	h.call = call
}

func (h *hook) run(ctx context.Context, r *bubbleRequest) error {
	h.lock.Lock()
	call := h.call
	h.lock.Unlock()
	if call == nil {
		return nil
	}
	return call(ctx, r)
}

// A bubbleRequest is what was asked, and what was answered.
type bubbleRequest struct {
	at        time.Time
	operation string
	numbers   []int64 // of the request, and of the operation from the seventh on
	rule      string
	slot      string
	answer    []int64
}

// reason returns the reason of a decision.
func (r *bubbleRequest) reason() quotashare.Reason { return quotashare.Reason(r.answer[1]) }

// asks returns the class and the tokens of a request for a decision.
func (r *bubbleRequest) asks() (quotashare.Class, int64) {
	return quotashare.Class(r.numbers[7]), r.numbers[8]
}

func newBubbleRedis(t testing.TB) *bubbleRedis { return newBubbleRedisOf(t, newNode(t).client()) }

// newBubbleMiniredis is newBubbleRedis of an embedded server, whose keys can be made to expire.
func newBubbleMiniredis(t testing.TB) (*bubbleRedis, *miniredis.Miniredis) {
	mini := miniredis.RunT(t)
	n := &node{t: t, addr: mini.Addr(), mini: mini}
	return newBubbleRedisOf(t, n.client()), mini
}

func newBubbleRedisOf(t testing.TB, client *redis.Client) *bubbleRedis {
	b := &bubbleRedis{
		Scripter: client, client: client,
		jobs: make(chan func()), done: make(chan struct{}), free: make(chan struct{}, 1),
	}
	go func() {
		for job := range b.jobs {
			job()
			b.done <- struct{}{}
		}
	}()
	t.Cleanup(func() { close(b.jobs) })
	return b
}

// outside does something outside of the bubble.
func (b *bubbleRedis) outside(do func(ctx context.Context)) {
	b.free <- struct{}{}
	b.jobs <- func() { do(context.Background()) }
	<-b.done
	<-b.free
}

// bubble runs a test in a bubble of its own, on an empty Redis.
func (b *bubbleRedis) bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	require.NoError(t, b.client.FlushAll(context.Background()).Err())
	b.requests, b.skew = nil, 0
	b.before.set(nil)
	b.after.set(nil)
	synctest.Test(t, test)
}

// EvalSha implements redis.Scripter.
func (b *bubbleRedis) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	return b.eval(ctx, args, func(p redis.Pipeliner) *redis.Cmd { return p.EvalSha(ctx, sha, keys, args...) })
}

// Eval implements redis.Scripter.
func (b *bubbleRedis) Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd {
	return b.eval(ctx, args, func(p redis.Pipeliner) *redis.Cmd { return p.Eval(ctx, script, keys, args...) })
}

func (b *bubbleRedis) eval(ctx context.Context, args []any, ask func(redis.Pipeliner) *redis.Cmd) *redis.Cmd {
	r := &bubbleRequest{
		at: time.Now(), operation: args[0].(string), numbers: numbers(string(args[1].([]byte))),
		rule: string(args[2].([]byte)), slot: args[3].(string),
	}
	answer := redis.NewCmd(ctx)
	if err := b.before.run(ctx, r); err != nil {
		answer.SetErr(err)
		return answer
	}
	b.outside(func(ctx context.Context) {
		us := r.at.Add(b.skew).UnixMicro()
		p := b.client.Pipeline()
		p.HSet(ctx, "clock", "s", us/1e6, "us", us%1e6)
		asked := ask(p)
		_, _ = p.Exec(ctx)
		answer.SetVal(asked.Val())
		answer.SetErr(asked.Err())
		if text, err := asked.Text(); err == nil {
			r.answer = numbers(text)
			b.requests = append(b.requests, r)
		}
	})
	if err := b.after.run(ctx, r); err != nil {
		answer.SetErr(err)
	}
	return answer
}

func numbers(packed string) (n []int64) {
	for ; len(packed) >= 8; packed = packed[8:] {
		n = append(n, int64(binary.BigEndian.Uint64([]byte(packed))))
	}
	return n
}

// asked returns the requests of the operation since the last call of forget.
func (b *bubbleRedis) asked(operation string) (some []*bubbleRequest) {
	b.outside(func(context.Context) {
		for _, r := range b.requests {
			if r.operation == operation {
				some = append(some, r)
			}
		}
	})
	return some
}

func (b *bubbleRedis) forget() { b.outside(func(context.Context) { b.requests = nil }) }

// A replica is a Window in a bubble. Times are given as so long after it was made.
type replica struct {
	*Window
	t     *testing.T
	redis *bubbleRedis
	start time.Time
}

// replica returns a Window of the test's name.
func (b *bubbleRedis) replica(t *testing.T, quota quotashare.Quota, options ...Option) *replica {
	t.Helper()
	return b.named(t, t.Name(), quota, options...)
}

func (b *bubbleRedis) named(t *testing.T, name string, quota quotashare.Quota, options ...Option) *replica {
	t.Helper()
	w, err := New(b, name, quota, Closed, options...)
	require.NoError(t, err)
	closeAfter(t, w)
	useClock(t, w)
	return &replica{w, t, b, time.Now()}
}

// at sleeps until the time, and then until all that happens at that time has happened.
func (w *replica) at(sinceStart time.Duration) {
	w.t.Helper()
	require.LessOrEqual(w.t, time.Since(w.start), sinceStart, "it is later than that")
	time.Sleep(sinceStart - time.Since(w.start))
	synctest.Wait()
}

// admit wants the call to be admitted by TryAcquire.
func (w *replica) admit(class quotashare.Class, tokens int64) *quotashare.Grant {
	w.t.Helper()
	g, d, err := w.TryAcquire(w.t.Context(), class, tokens)
	require.NoError(w.t, err)
	require.True(w.t, d.Admitted, "%v call of %d tokens at %v: %+v", class, tokens, time.Since(w.start), d)
	return &g
}

// refuse wants the call to be refused by TryAcquire.
func (w *replica) refuse(class quotashare.Class, tokens int64) quotashare.Decision {
	w.t.Helper()
	g, d, err := w.TryAcquire(w.t.Context(), class, tokens)
	require.NoError(w.t, err)
	require.False(w.t, d.Admitted, "%v call of %d tokens at %v: %+v", class, tokens, time.Since(w.start), d)
	require.True(w.t, reflect.ValueOf(&g).Elem().IsZero())
	return d
}

// usage returns the usage when all that was settled is known to Redis.
func (w *replica) usage() quotashare.Usage {
	w.t.Helper()
	synctest.Wait()
	u, err := w.Usage(w.t.Context())
	require.NoError(w.t, err)
	return u
}

// used wants all classes together to hold so many tokens.
func (w *replica) used(want int64) {
	w.t.Helper()
	u := w.usage()
	require.Equal(w.t, want, u.Used[0]+u.Used[1]+u.Used[2], "tokens used at %v", time.Since(w.start))
}

// waiting wants so many calls of the class to wait.
func (w *replica) waiting(class quotashare.Class, want int) {
	w.t.Helper()
	require.Equal(w.t, want, w.Stats().Classes[class].Waiting, "%v calls that wait at %v", class, time.Since(w.start))
	if want == 0 {
		q := &w.queues[class]
		require.Equal(w.t, [2]int64{}, [2]int64{q.all, q.asked}, "tokens that wait when nobody does")
	}
}

// settled is Settle that has reached Redis.
func (w *replica) settled(g *quotashare.Grant, actual int64) {
	g.Settle(actual)
	synctest.Wait()
}

// A bubbleCall is a call of Acquire by a goroutine of its own. What it came to may be read once ended is closed.
type bubbleCall struct {
	window *replica
	name   string
	ended  chan struct{}
	at     time.Duration
	grant  quotashare.Grant
	err    error
}

// acquire makes a call, and comes back when it has ended or waits. So calls arrive in the order in which they are made.
func (w *replica) acquire(ctx context.Context, class quotashare.Class, tokens int64) *bubbleCall {
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

// admittedAt wants the call to have been admitted at exactly this time: at once, or because somebody woke it.
func (c *bubbleCall) admittedAt(at time.Duration) *quotashare.Grant {
	c.window.t.Helper()
	require.True(c.window.t, c.hasEnded(), "%s: waits", c.name)
	require.NoError(c.window.t, c.err, c.name)
	require.Equal(c.window.t, at, c.at, c.name)
	return &c.grant
}

// admittedAfter wants the call to have been admitted at this time, at which room came, and no more than so much later.
func (c *bubbleCall) admittedAfter(at, late time.Duration) *quotashare.Grant {
	c.window.t.Helper()
	require.True(c.window.t, c.hasEnded(), "%s: waits", c.name)
	require.NoError(c.window.t, c.err, c.name)
	require.GreaterOrEqual(c.window.t, c.at, at, c.name)
	require.LessOrEqual(c.window.t, c.at, at+late, c.name)
	return &c.grant
}

// deniedAt wants the call to have failed at exactly this time, with a Grant that stands for nothing.
func (c *bubbleCall) deniedAt(at time.Duration) *quotashare.DeniedError {
	c.window.t.Helper()
	require.True(c.window.t, c.hasEnded(), "%s: waits", c.name)
	require.Error(c.window.t, c.err, c.name)
	require.Equal(c.window.t, at, c.at, c.name)
	require.True(c.window.t, reflect.ValueOf(&c.grant).Elem().IsZero(), c.name)
	var denied *quotashare.DeniedError
	require.ErrorAs(c.window.t, c.err, &denied, c.name)
	require.False(c.window.t, denied.Decision.Admitted, c.name)
	return denied
}

// late is how much later than room comes a call of a minute's window may ask.
const late = 11 * time.Minute / 600

// classQuota is a quota of a minute that one class may use all of at once. The others may only borrow of it.
func classQuota(class quotashare.Class, tokens int64) quotashare.Quota {
	quota := quotashare.Quota{Tokens: tokens, Floors: quotashare.NoFloors, Pace: 1}
	quota.Shares[class] = 1
	return quota
}

func tokensOf(class quotashare.Class, tokens int64) (u quotashare.ClassTokens) {
	u[class] = tokens
	return u
}

func refusal(reason quotashare.Reason, wait time.Duration) quotashare.Decision {
	return quotashare.Decision{Reason: reason, RetryAfter: wait}
}

// Acquire as each class waits by default.

func TestInteractiveIsRefusedAtOnce(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.replica(t, classQuota(interactive, 100))
		w.acquire(t.Context(), interactive, 100).admittedAt(0)
		w.at(10 * time.Second)
		call := w.acquire(t.Context(), interactive, 60)
		denied := call.deniedAt(10 * time.Second)
		require.Equal(t, &quotashare.DeniedError{
			Class: interactive, Tokens: 60, Decision: refusal(quotashare.ReasonQuotaFull, 50*time.Second),
			Usage: quotashare.Usage{Used: tokensOf(interactive, 100), Demand: tokensOf(interactive, 160)}, Quota: w.Quota(),
		}, denied)
		require.Same(t, denied, call.err, "nothing but the decision ended it")
		require.Equal(t, refusal(quotashare.ReasonQuotaFull, 50*time.Second), w.refuse(interactive, 60))
		w.used(100)
		w.at(time.Minute)
		w.acquire(t.Context(), interactive, 60).admittedAt(time.Minute)
	})
}

// TestBackgroundGivesUpAfterItsPatience: the error tells the last hint, as long as it still is.
func TestBackgroundGivesUpAfterItsPatience(t *testing.T) {
	b := newBubbleRedis(t)
	t.Run("with an option", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(background, 100), WithMaxWait(background, 40*time.Second))
			w.admit(background, 100)
			first := w.acquire(t.Context(), background, 60)
			behind := w.acquire(t.Context(), background, 10)
			w.at(40*time.Second - 1)
			first.waits()
			behind.waits()
			w.at(40 * time.Second)
			denied := first.deniedAt(40 * time.Second)
			require.Same(t, denied, first.err, "no context ended it")
			require.Equal(t, refusal(quotashare.ReasonQuotaFull, 20*time.Second), denied.Decision)
			require.Equal(t, tokensOf(background, 100), denied.Usage.Used)
			require.Equal(t, w.Quota(), denied.Quota)

			denied = behind.deniedAt(40 * time.Second)
			require.Same(t, denied, behind.err)
			require.Equal(t, quotashare.ReasonQueued, denied.Decision.Reason)
			require.GreaterOrEqual(t, denied.Decision.RetryAfter, quotashare.Backoff(background, time.Minute),
				"that it was never its turn does not mean that it need not wait")
			w.waiting(background, 0)
			w.used(100)
			w.at(time.Minute)
			w.admit(background, 60)
		})
	})

	t.Run("by default", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(background, 100))
			w.admit(background, 100)
			call := w.acquire(t.Context(), background, 60)
			for second := range time.Duration(12) { // so that there never is room
				w.at(10 * second * time.Second)
				w.Throttled(time.Minute)
			}
			w.at(2*time.Minute - 1)
			call.waits()
			w.at(2 * time.Minute)
			require.Equal(t, quotashare.ReasonQuotaFull, call.deniedAt(2*time.Minute).Decision.Reason)
		})
	})
}

// TestBatchWaitsUntilItsContextEnds: the error is the context's, and tells how long it is to wait from then on.
func TestBatchWaitsUntilItsContextEnds(t *testing.T) {
	b := newBubbleRedis(t)
	for _, end := range []error{context.Canceled, context.DeadlineExceeded} {
		t.Run(end.Error(), func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				w := b.replica(t, classQuota(batchClass, 100))
				grant := w.admit(batchClass, 100)
				ctx, cancel := context.WithCancel(t.Context())
				if end == context.DeadlineExceeded {
					ctx, cancel = context.WithTimeout(ctx, 30*time.Second)
				}
				defer cancel()
				first := w.acquire(ctx, batchClass, 60)
				behind := w.acquire(ctx, batchClass, 20)
				stays := w.acquire(t.Context(), batchClass, 100)
				w.at(30 * time.Second)
				cancel()
				synctest.Wait()
				for _, one := range []*bubbleCall{first, behind} {
					denied := one.deniedAt(30 * time.Second)
					require.ErrorIs(t, one.err, end)
					require.ErrorIs(t, one.err, ctx.Err())
					require.NotErrorIs(t, one.err, ErrAway)
					if one == first {
						require.Equal(t, refusal(quotashare.ReasonQuotaFull, 30*time.Second), denied.Decision)
					} else {
						require.Equal(t, quotashare.ReasonQueued, denied.Decision.Reason)
						require.GreaterOrEqual(t, denied.Decision.RetryAfter, quotashare.Backoff(batchClass, time.Minute))
					}
				}
				w.waiting(batchClass, 1)
				w.settled(grant, 0)
				stays.admittedAt(30 * time.Second)
				w.used(100)
			})
		})
	}

	// Without an end it waits for as long as it takes, also longer than Background does.
	t.Run("never", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(batchClass, 100))
			w.Throttled(2 * time.Minute)
			synctest.Wait()
			call := w.acquire(t.Context(), batchClass, 60)
			w.at(100 * time.Second)
			w.Throttled(2 * time.Minute)
			w.at(220*time.Second - 1)
			call.waits()
			w.at(5 * time.Minute)
			call.admittedAfter(220*time.Second, late)
		})
	})
}

// TestADoneContextTakesNothing: nothing is asked, decided or counted.
func TestADoneContextTakesNothing(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		expired, cancel := context.WithDeadline(t.Context(), time.Now())
		defer cancel()
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		w := b.replica(t, classQuota(interactive, 100), WithMaxWait(background, -1))
		w.admit(interactive, 100)
		waits := w.acquire(t.Context(), batchClass, 10)
		before, stats := w.usage(), w.Stats()
		b.forget()
		for _, ctx := range []context.Context{cancelled, expired} {
			for class := range quotashare.Class(quotashare.NumClasses) {
				call := w.acquire(ctx, class, 10)
				denied := call.deniedAt(0)
				require.ErrorIs(t, call.err, ctx.Err())
				require.Zero(t, denied.Decision, "nothing was decided")

				_, d, err := w.TryAcquire(ctx, class, 10)
				require.ErrorIs(t, err, ctx.Err())
				require.Zero(t, d)
			}
		}
		require.Empty(t, b.requests)
		require.Equal(t, stats, w.Stats(), "not even a refusal")
		require.Equal(t, before, w.usage())
		waits.waits()
	})
}

// TestADeadlineOfTheCallerIsNoOutage: the client gives up at the deadline, which it may notice before the context does.
func TestADeadlineOfTheCallerIsNoOutage(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.replica(t, classQuota(interactive, 100))
		b.before.set(func(ctx context.Context, _ *bubbleRequest) error {
			deadline, _ := ctx.Deadline()
			time.Sleep(time.Until(deadline))
			return errors.New("i/o timeout")
		})
		for range 100 {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			_, d, err := w.TryAcquire(ctx, interactive, 10)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorIs(t, err, ctx.Err())
			require.NotErrorIs(t, err, ErrAway)
			require.Zero(t, d)
			cancel()
		}
		require.Zero(t, w.Stats().Shared.Outages)
		require.Zero(t, w.Stats().Classes[interactive].Refused)

		// A context that lasts longer than Redis is waited for is another matter.
		ctx, cancel := context.WithTimeout(t.Context(), 101*time.Millisecond)
		defer cancel()
		_, _, err := w.TryAcquire(ctx, interactive, 10)
		require.ErrorIs(t, err, ErrAway)
		require.EqualValues(t, 1, w.Stats().Shared.Outages)
	})
}

// Who waits, and who goes first.

// TestWaitersAreServedInOrder: in the order of arrival, whatever their size, and those who come later stand behind.
func TestWaitersAreServedInOrder(t *testing.T) {
	b := newBubbleRedis(t)
	for class := range quotashare.Class(quotashare.NumClasses) {
		t.Run(class.String(), func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				w := b.replica(t, classQuota(class, 100), WithMaxWait(class, -1))
				full := w.admit(class, 70)
				w.admit(class, 30)
				var calls []*bubbleCall
				for _, tokens := range []int64{31, 7, 9, 5, 11, 3, 16} { // there is room for six of them
					calls = append(calls, w.acquire(t.Context(), class, tokens))
				}
				b.forget()
				d := w.refuse(class, 1)
				require.Equal(t, refusal(quotashare.ReasonQueued, time.Minute), d)
				w.waiting(class, 7)
				w.at(10 * time.Second)
				w.settled(full, 4)
				var order []int64
				for _, r := range b.asked("acquire") {
					if _, tokens := r.asks(); r.reason() <= quotashare.ReasonBorrowed {
						order = append(order, tokens)
					}
				}
				require.Equal(t, []int64{31, 7, 9, 5, 11, 3}, order)
				for _, call := range calls[:6] {
					call.admittedAt(10 * time.Second)
				}
				calls[6].waits()
				w.used(100)
				w.at(2 * time.Minute)
				calls[6].admittedAfter(time.Minute, late)
				w.waiting(class, 0)
			})
		})
	}

	// Calls that asked side by side before they waited stand in the order of arrival all the same.
	t.Run("side by side", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			var q queue
			for _, share := range []int64{100, 11, 1} { // within, some above, and above
				places := []uint64{q.arrive(), q.arrive(), q.arrive(), q.arrive()}
				for _, i := range []int{2, 0, 3, 1} {
					q.join(int64(10+i), share, places[i], false)
				}
				for i := range places {
					first, _ := q.nextLocked()
					require.EqualValues(t, 10+i, first.tokens)
					q.leave(first)
				}
			}
			require.Zero(t, q.len())
		})
	})
}

// TestACallAboveTheShareDoesNotWedgeItsClass: it can be served by a loan alone, which may be long in coming. Meanwhile
// the class has its share all the same, by either way to ask.
func TestACallAboveTheShareDoesNotWedgeItsClass(t *testing.T) {
	b := newBubbleRedis(t)
	quota := quotashare.Quota{
		Tokens: 1000,
		Shares: quotashare.Fractions{interactive: 0.8, background: 0.1, batchClass: 0.1},
		Floors: quotashare.NoFloors,
		Pace:   1,
	}
	for _, class := range []quotashare.Class{background, batchClass} {
		t.Run(class.String(), func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				w := b.replica(t, quota, WithMaxWait(class, -1))
				w.admit(interactive, 790)
				g := w.admit(interactive, 10)
				loan := w.acquire(t.Context(), class, 300)
				loan.waits()
				require.Zero(t, w.usage().Demand[class], "a loan is never held for")

				// The share is there at once, and once only. What goes beyond needs a loan, and comes after the first,
				// though there is room for it.
				w.acquire(t.Context(), class, 40).admittedAt(0)
				w.admit(class, 40)
				require.Equal(t, quotashare.ReasonQueued, w.refuse(class, 21).Reason)
				require.EqualValues(t, 80, w.usage().Demand[class], "what is queued is no demand")
				w.admit(class, 20).Cancel()
				synctest.Wait()
				small := w.acquire(t.Context(), class, 21)
				w.settled(g, 5)
				small.waits()
				require.Equal(t, quotashare.ReasonQueued, w.refuse(class, 20).Reason, "who waits is first, also within the share")

				// Interactive goes on to ask for all of its share, so there is no loan for as long as that lasts: the
				// class has its share in every window.
				for minute := range time.Duration(5) {
					now := (1 + minute) * time.Minute
					w.at(now)
					w.admit(interactive, 800)
					w.at(now + late)
					loan.waits()
					if minute == 0 {
						small.admittedAfter(now, late)
						require.EqualValues(t, 21, w.usage().Used[class])
						w.acquire(t.Context(), class, 79).admittedAt(now + late)
					} else {
						w.acquire(t.Context(), class, 50).admittedAt(now + late)
						w.admit(class, 50)
					}
					require.EqualValues(t, 100, w.usage().Used[class])
					w.waiting(class, 1)
				}

				// A window after that the charges are gone, and a window later the demand is forgotten.
				w.at(7*time.Minute - 1)
				loan.waits()
				w.at(8 * time.Minute)
				loan.admittedAfter(7*time.Minute, late+time.Minute/12)
				w.waiting(class, 0)
			})
		})
	}
}

// TestACallThatStopsWaitingLeavesNothing: at any place in the queue, by any end. The others are served, in their order,
// as if it had never come.
func TestACallThatStopsWaitingLeavesNothing(t *testing.T) {
	b := newBubbleRedis(t)
	for _, end := range []string{"cancelled", "deadline", "too large"} {
		for _, place := range []int{0, 1, 5, 10} {
			t.Run(fmt.Sprintf("%s at place %d", end, place), func(t *testing.T) {
				b.bubble(t, func(t *testing.T) {
					w := b.replica(t, classQuota(background, 100), WithMaxWait(background, -1))
					w.admit(background, 50)
					w.at(10 * time.Second)
					w.admit(background, 50)
					ctx, cancel := context.WithCancel(t.Context())
					if end == "deadline" {
						ctx, cancel = context.WithTimeout(t.Context(), 20*time.Second)
					}
					defer cancel()
					var ends *bubbleCall
					var stay []*bubbleCall
					for i := range 11 {
						if i == place {
							ends = w.acquire(ctx, background, 20)
						} else {
							stay = append(stay, w.acquire(t.Context(), background, 10))
						}
					}

					w.at(30 * time.Second)
					switch end {
					case "cancelled":
						cancel()
					case "too large":
						for _, tokens := range []int64{19, 50, 100} {
							require.NoError(t, w.SetQuota(classQuota(background, tokens)))
							synctest.Wait()
						}
					}
					synctest.Wait()
					denied := ends.deniedAt(30 * time.Second)
					if end == "too large" {
						require.Equal(t, quotashare.Decision{Reason: quotashare.ReasonTooLarge}, denied.Decision)
						require.Same(t, denied, ends.err)
					}
					w.waiting(background, 10)
					w.used(100)
					w.at(time.Minute + late)
					for _, call := range stay[:5] {
						call.admittedAfter(time.Minute, late)
					}
					w.waiting(background, 5)
					w.at(70*time.Second + late)
					for i, call := range stay[5:] {
						call.admittedAfter(70*time.Second, late)
						require.GreaterOrEqual(t, call.at, stay[4+i].at)
					}
					w.waiting(background, 0)
				})
			})
		}
	}

	t.Run("no goroutine", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(batchClass, 100))
			w.admit(batchClass, 100)
			ctx, cancel := context.WithCancel(t.Context())
			for range 10 {
				w.acquire(ctx, batchClass, 10)
			}
			require.Equal(t, 10, strings.Count(stacks(), "redisshare.(*Window).Acquire("))
			require.NotContains(t, stacks(), "created by github.com/quotashare/quotashare/redisshare.(*Window)",
				"the callers' own goroutines")
			cancel()
			synctest.Wait()
			require.NotContains(t, stacks(), "redisshare.(*Window).Acquire(")
			w.waiting(batchClass, 0)
		})
	})
}

// stacks returns the stacks of all goroutines.
func stacks() string {
	all := make([]byte, 1<<20)
	return string(all[:runtime.Stack(all, true)])
}

// TestWhatMakesRoomInThisProcessWakesWhoIsFirst: at once, without a hint.
func TestWhatMakesRoomInThisProcessWakesWhoIsFirst(t *testing.T) {
	b := newBubbleRedis(t)
	for name, makeRoom := range map[string]func(*replica, *quotashare.Grant){
		"settle": func(_ *replica, g *quotashare.Grant) { g.Settle(40) },
		"cancel": func(_ *replica, g *quotashare.Grant) { g.Cancel() },
		"quota": func(w *replica, _ *quotashare.Grant) {
			require.NoError(w.t, w.SetQuota(classQuota(interactive, 160)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b.bubble(t, func(t *testing.T) {
				w := b.replica(t, classQuota(interactive, 100), WithMaxWait(interactive, -1))
				g := w.admit(interactive, 100)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				call := w.acquire(ctx, interactive, 60)
				w.at(5*time.Second - 1)
				call.waits()
				makeRoom(w, g)
				synctest.Wait()
				w.settled(call.admittedAt(5*time.Second-1), 7)
				w.at(5 * time.Second)
				w.used(7 + map[string]int64{"settle": 40, "quota": 100}[name])
			})
		})
	}

	// Too little room wakes it, too; it asks and waits on. What needs more room wakes nobody.
	t.Run("too little", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(interactive, 100), WithMaxWait(interactive, -1))
			g, same, more := w.admit(interactive, 50), w.admit(interactive, 25), w.admit(interactive, 25)
			call := w.acquire(t.Context(), interactive, 60)
			b.forget()
			w.settled(g, 41)
			require.Len(t, b.asked("acquire"), 1)
			w.settled(same, 25)
			w.settled(more, 26)
			require.Len(t, b.asked("acquire"), 1)
			call.waits()
			w.at(2 * time.Minute)
			call.admittedAfter(time.Minute, late)
		})
	})

	// What another replica settles is not told: the call is served when it may have been without.
	t.Run("another replica", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w, other := b.replica(t, classQuota(batchClass, 100)), b.replica(t, classQuota(batchClass, 100))
			g := other.admit(batchClass, 100)
			call := w.acquire(t.Context(), batchClass, 60)
			w.at(10 * time.Second)
			other.settled(g, 0)
			call.waits()
			w.at(2 * time.Minute)
			call.admittedAfter(time.Minute, late)
		})
	})
}

// TestAWaiterUnderAnotherQuota: those that become too large are told so at once, wherever they stand; and those that
// become larger than the share let the others pass.
func TestAWaiterUnderAnotherQuota(t *testing.T) {
	b := newBubbleRedis(t)
	t.Run("too large", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(batchClass, 100))
			w.admit(batchClass, 100)
			fits := w.acquire(t.Context(), batchClass, 50)
			tooLarge := w.acquire(t.Context(), batchClass, 51)
			w.at(10 * time.Second)
			require.NoError(t, w.SetQuota(classQuota(batchClass, 50)))
			synctest.Wait()
			denied := tooLarge.deniedAt(10 * time.Second)
			require.Equal(t, quotashare.Decision{Reason: quotashare.ReasonTooLarge}, denied.Decision)
			require.True(t, denied.Decision.Permanent())
			require.EqualValues(t, 50, denied.Quota.Tokens, "the quota that refused it")
			fits.waits()
			w.used(100)
			w.at(2 * time.Minute)
			fits.admittedAfter(time.Minute, late)
		})
	})

	// The quota changes just after the call was refused, and before it waits.
	t.Run("too large before it waits", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, classQuota(batchClass, 100))
			w.admit(batchClass, 100)
			b.after.set(func(context.Context, *bubbleRequest) error { return w.SetQuota(classQuota(batchClass, 50)) })
			denied := w.acquire(t.Context(), batchClass, 51).deniedAt(0)
			require.Equal(t, quotashare.Decision{Reason: quotashare.ReasonTooLarge}, denied.Decision)
		})
	})

	t.Run("above the share", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			quota := quotashare.Quota{Tokens: 1000, Floors: quotashare.NoFloors, Pace: 1}
			quota.Shares = quotashare.Fractions{interactive: 0.5, batchClass: 0.5}
			w := b.replica(t, quota)
			w.admit(interactive, 500)
			w.admit(batchClass, 500)
			large := w.acquire(t.Context(), batchClass, 400)
			small := w.acquire(t.Context(), batchClass, 100)

			// From now on the class has a share of 200. Interactive asks for the rest in every window, so the large call
			// has no loan.
			quota.Shares = quotashare.Fractions{interactive: 0.8, batchClass: 0.2}
			w.at(30 * time.Second)
			require.NoError(t, w.SetQuota(quota))
			w.refuse(interactive, 800)
			w.at(time.Minute)
			w.admit(interactive, 800)
			w.at(time.Minute + late)
			large.waits()
			small.admittedAfter(time.Minute, late)
			w.admit(batchClass, 100)
			require.Equal(t, quotashare.ReasonQueued, w.refuse(batchClass, 1).Reason)
			w.waiting(batchClass, 1)
		})
	})

	// And back: within the share again, it is passed by nobody.
	t.Run("within the share", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			quota := quotashare.Quota{Tokens: 1000, Floors: quotashare.NoFloors, Pace: 1}
			quota.Shares = quotashare.Fractions{interactive: 0.9, batchClass: 0.1}
			w := b.replica(t, quota)
			w.admit(interactive, 900)
			large := w.acquire(t.Context(), batchClass, 400)
			small := w.acquire(t.Context(), batchClass, 100)
			small.admittedAt(0)
			quota.Shares = quotashare.Fractions{interactive: 0.5, batchClass: 0.5}
			require.NoError(t, w.SetQuota(quota))
			synctest.Wait()
			large.waits()
			require.Equal(t, quotashare.ReasonQueued, w.refuse(batchClass, 10).Reason)
			require.EqualValues(t, 500, w.usage().Demand[batchClass], "of which 400 wait, and are held now")
		})
	})
}

// TestWaitersAreDemand: Redis is told of them, each once a window for as long as they wait.
func TestWaitersAreDemand(t *testing.T) {
	b := newBubbleRedis(t)
	quota := quotashare.Quota{Tokens: 1000, Floors: quotashare.NoFloors, Pace: 1}
	quota.Shares = quotashare.Fractions{interactive: 0.5, batchClass: 0.5}

	t.Run("once", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, quota)
			demand := func(want int64) {
				t.Helper()
				require.Equal(t, want, w.usage().Demand[batchClass], "at %v", time.Since(w.start))
			}
			w.admit(interactive, 1000)
			w.acquire(t.Context(), batchClass, 30)
			demand(30)
			w.acquire(t.Context(), batchClass, 20)
			w.acquire(t.Context(), batchClass, 501) // for which nothing is held
			demand(30)
			for range 3 {
				w.wakeAll()
				demand(50) // the first asks, and tells of the second
			}
			ctx, cancel := context.WithCancel(t.Context())
			w.acquire(ctx, batchClass, 7)
			cancel() // before anybody told of it
			synctest.Wait()
			w.acquire(t.Context(), batchClass, 9)
			w.at(30 * time.Second)
			w.wakeAll()
			demand(59)
		})
	})

	// Who is admitted tells nothing, nor does who hears nothing.
	t.Run("not by those who are admitted", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, quota)
			g := w.admit(interactive, 40)
			w.admit(interactive, 960)
			first := w.acquire(t.Context(), batchClass, 30)
			w.acquire(t.Context(), batchClass, 20)
			w.settled(g, 10)
			first.admittedAt(0)
			require.EqualValues(t, 30+30+20, w.usage().Demand[batchClass], "used, refused before, and refused now")
			b.before.set(func(context.Context, *bubbleRequest) error { return errors.New("gone") })
			w.acquire(t.Context(), batchClass, 5)
			w.wakeAll()
			synctest.Wait()
			b.before.set(nil)
			w.at(10 * time.Second)
			w.wakeAll() // Redis is back
			synctest.Wait()
			w.wakeAll()
			require.EqualValues(t, 30+30+20+5, w.usage().Demand[batchClass])
		})
	})

	// A full window of others keeps them waiting for as long as they can wait, and what they ask for is held all the time.
	t.Run("for as long as they wait", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w := b.replica(t, quota)
			for part := range time.Duration(60) { // five windows
				w.at(part * 5 * time.Second)
				w.Throttled(2 * time.Minute)
				if part == 1 {
					w.acquire(t.Context(), batchClass, 100)
					w.acquire(t.Context(), batchClass, 150)
				}
				if part > 1 {
					w.wakeAll()
					require.EqualValues(t, 250, w.usage().Demand[batchClass], "at %v", time.Since(w.start))
				}
			}
			w.waiting(batchClass, 2)
		})
	})

	// And it is held for them: a class that borrows gets what nobody waits for.
	t.Run("held", func(t *testing.T) {
		b.bubble(t, func(t *testing.T) {
			w, other := b.replica(t, quota), b.replica(t, quota)
			w.admit(batchClass, 400)
			w.admit(interactive, 600)
			large := w.acquire(t.Context(), batchClass, 300)
			require.Equal(t, quotashare.ReasonQuotaFull, other.refuse(interactive, 450).Reason)
			w.at(time.Minute - 1000)
			require.EqualValues(t, 700, w.usage().Demand[batchClass])
			w.at(time.Minute)
			require.Equal(t, quotashare.ReasonReserved, other.refuse(interactive, 501).Reason)
			other.admit(interactive, 500)
			w.at(time.Minute + late)
			large.admittedAfter(time.Minute, late)
		})
	})
}

// TestWhoWaitsAsksNoSoonerThanItMayFit: later adds to a hint a tenth and a grain at most, and takes nothing off.
func TestWhoWaitsAsksNoSoonerThanItMayFit(t *testing.T) {
	for _, window := range []time.Duration{time.Microsecond, 600 * time.Millisecond, time.Minute, 24 * time.Hour} {
		w, err := New(redis.NewClient(&redis.Options{ContextTimeoutEnabled: true}), t.Name(),
			quotashare.Quota{Tokens: 100, Window: window}, Closed)
		require.NoError(t, err)
		grain := max(window/600, time.Microsecond)
		for _, hint := range []time.Duration{
			0, 1, grain - 1, grain, 3 * grain, 100 * grain, window, 2 * window, 1000 * window,
		} {
			least := max(hint, grain)
			low, high := 2*least, time.Duration(0)
			for range 1000 {
				wait := w.later(quotashare.Decision{RetryAfter: hint})
				require.GreaterOrEqual(t, wait, least, "%v in %v", hint, window)
				require.LessOrEqual(t, wait, least+least/10+grain, "%v in %v", hint, window)
				require.LessOrEqual(t, wait, least+11*grain, "%v in %v", hint, window)
				low, high = min(low, wait), max(high, wait)
			}
			require.Less(t, low, high, "not all at once")
		}
	}
}

// TestWaitersOfAllReplicasAreServed: nobody asks before it was told to, but who waits for others of its process; and
// the quota holds.
func TestWaitersOfAllReplicasAreServed(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		replicas := []*replica{}
		for range 3 {
			replicas = append(replicas, b.replica(t, classQuota(batchClass, 100)))
		}
		replicas[0].admit(batchClass, 100)
		var calls []*bubbleCall
		for i := range 30 {
			calls = append(calls, replicas[i%3].acquire(t.Context(), batchClass, 20))
		}
		replicas[0].at(20 * time.Minute)
		admitted := [3]time.Duration{}
		for i, call := range calls {
			require.True(t, call.hasEnded(), call.name)
			require.NoError(t, call.err, call.name)
			require.GreaterOrEqual(t, call.at, admitted[i%3], "in the order of their arrival there")
			admitted[i%3] = call.at
		}

		// In any window five of them fit, and each window has some.
		slices.SortFunc(calls, func(a, b *bubbleCall) int { return cmp.Compare(a.at, b.at) })
		for i, call := range calls {
			if i >= 5 {
				require.GreaterOrEqual(t, call.at-calls[i-5].at, time.Minute)
			}
			require.LessOrEqual(t, call.at, time.Duration(1+i/5)*(time.Minute+late), "the room was there")
		}

		last := map[string]*bubbleRequest{} // the last decision by replica
		early := 0
		for _, r := range b.asked("acquire") {
			by := r.slot[:strings.LastIndex(r.slot, ":")]
			before := last[by]
			last[by] = r
			if before != nil && before.reason() > quotashare.ReasonBorrowed {
				told := microseconds(before.answer[3])
				if r.at.Sub(before.at) < told {
					early++
				}
			}
		}
		require.Zero(t, early)
		require.LessOrEqual(t, len(b.asked("acquire")), 1+30+3+40, "nobody polls")
	})
}

// TestTheSameInRealTime: real timers, and the clock of Redis.
func TestTheSameInRealTime(t *testing.T) {
	client := newNode(t).client()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	quota := classQuota(batchClass, 100)
	quota.Window = 300 * time.Millisecond
	now := func() time.Time {
		at, err := client.Time(ctx).Result()
		require.NoError(t, err)
		return at
	}
	replicas := []*Window{}
	for range 2 {
		w, err := New(client, t.Name(), quota, Closed,
			WithTimeout(4*time.Second), WithMaxWait(background, 20*time.Millisecond))
		require.NoError(t, err)
		closeAfter(t, w)
		replicas = append(replicas, w)
	}
	began := now()
	_, err := replicas[0].Acquire(ctx, batchClass, 100)
	require.NoError(t, err)
	_, err = replicas[1].Acquire(ctx, background, 10)
	var denied *quotashare.DeniedError
	require.ErrorAs(t, err, &denied)
	require.NoError(t, ctx.Err())

	type admission struct {
		at  time.Time
		err error
	}
	admissions := make(chan admission)
	for i := range 8 {
		go func() {
			_, err := replicas[i%2].Acquire(ctx, batchClass, 50)
			admissions <- admission{now(), err}
		}()
	}
	for i := range 8 {
		a := <-admissions
		require.NoError(t, a.err)
		require.GreaterOrEqual(t, a.at.Sub(began), time.Duration(1+i/2)*quota.Window)
	}
}

// TestCloseEndsWaits, wherever the calls stand.
func TestCloseEndsWaits(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.replica(t, classQuota(batchClass, 100), WithMaxWait(background, -1))
		w.admit(batchClass, 100)
		calls := []*bubbleCall{}
		for _, class := range []quotashare.Class{batchClass, batchClass, background} {
			calls = append(calls, w.acquire(t.Context(), class, 10))
		}
		w.at(10 * time.Second)
		require.NoError(t, w.Close(t.Context()))
		synctest.Wait()
		for _, call := range calls {
			denied := call.deniedAt(10 * time.Second)
			require.ErrorIs(t, call.err, ErrClosed)
			require.Positive(t, denied.Decision.RetryAfter)
		}
		w.waiting(batchClass, 0)
		w.waiting(background, 0)
		b.forget()
		for class := range quotashare.Class(quotashare.NumClasses) {
			require.ErrorIs(t, w.acquire(t.Context(), class, 10).err, ErrClosed)
			_, d, err := w.TryAcquire(t.Context(), class, 10)
			require.ErrorIs(t, err, ErrClosed)
			require.Zero(t, d)
		}
		require.Empty(t, b.requests)
	})
}

// TestStress: many callers of two replicas, who wait, give up, settle and cancel, some of them twice. In the end what
// is used is what they used.
func TestStress(t *testing.T) {
	client := newNode(t).client()
	ctx := context.Background()
	quota := quotashare.Quota{Tokens: 40_000, Floors: quotashare.ElasticFloors} // of a minute, so nothing leaves
	var replicas []*Window
	for range 2 {
		w, err := New(client, t.Name(), quota, Closed, WithTimeout(4*time.Second))
		require.NoError(t, err)
		closeAfter(t, w)
		replicas = append(replicas, w)
	}
	began := time.Now()
	var lock sync.Mutex
	var used quotashare.ClassTokens
	var running sync.WaitGroup
	for i := range 200 {
		running.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 7))
			for range 5 {
				w, class, tokens := replicas[r.IntN(2)], quotashare.Class(r.IntN(3)), 1+r.Int64N(100)
				patience, cancel := context.WithTimeout(ctx, time.Duration(r.IntN(200))*time.Millisecond)
				var grant quotashare.Grant
				if r.IntN(3) == 0 {
					grant, _, _ = w.TryAcquire(patience, class, tokens)
				} else {
					grant, _ = w.Acquire(patience, class, tokens)
				}
				cancel()
				if reflect.ValueOf(&grant).Elem().IsZero() {
					continue
				}
				actual := r.Int64N(2 * tokens)
				end := func() { grant.Settle(actual) }
				if r.IntN(4) == 0 {
					actual, end = 0, grant.Cancel
				}
				var both sync.WaitGroup
				for range 1 + r.IntN(2) {
					both.Go(end)
				}
				both.Wait()
				lock.Lock()
				used[class] += actual
				lock.Unlock()
			}
		})
	}
	running.Wait()
	require.Less(t, time.Since(began), 50*time.Second, "too slow a machine for this test")
	for _, w := range replicas {
		require.Eventually(t, func() bool { return idle(w) }, 10*time.Second, time.Millisecond)
		for class := range quotashare.Class(quotashare.NumClasses) {
			require.Zero(t, w.Stats().Classes[class].Waiting)
		}
		// A call whose context ended on the way is taken back by the next in its slot: have one in each.
		var taken []*slot
		for range slots {
			one, err := w.server.take(ctx)
			require.NoError(t, err)
			taken = append(taken, one)
		}
		for _, one := range taken {
			if one.sent > 0 {
				one.sent++
				_, err := w.server.send(ctx, one, w.rules.Load(), "usage")
				require.NoError(t, err)
				one.loose = 0
			}
			w.server.release(one)
		}
	}
	u, err := replicas[0].Usage(ctx)
	require.NoError(t, err)
	require.Equal(t, used, u.Used)
	require.NotZero(t, replicas[0].Stats().Classes[batchClass].WaitsCancelled)
	require.Zero(t, replicas[0].Stats().Shared.Outages)
}

// idle reports whether all corrections were sent.
func idle(w *Window) bool {
	w.mailbox.mu.Lock()
	defer w.mailbox.mu.Unlock()
	return !w.mailbox.running
}
