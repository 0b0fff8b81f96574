package redisshare

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

const away = "-ERR away\r\n"

// slack is how much later than promised a call may return on a busy machine.
const slack = time.Second

// wholeQuota is a quota of which each class may use all that nobody else uses.
func wholeQuota(tokens int64) quotashare.Quota {
	return quotashare.Quota{
		Tokens: tokens,
		Window: time.Minute,
		Shares: quotashare.Fractions{interactive: 1},
		Floors: quotashare.NoFloors,
		Pace:   1,
	}
}

func newShared(t testing.TB, client redis.Scripter, quota quotashare.Quota, mode Mode, options ...Option) *Window {
	t.Helper()
	w, err := New(client, "shared", quota, mode, options...)
	require.NoError(t, err)
	closeAfter(t, w)
	return w
}

// admit requires that a call is admitted.
func admit(t testing.TB, w *Window, class quotashare.Class, tokens int64) *quotashare.Grant {
	t.Helper()
	grant, d, err := w.TryAcquire(context.Background(), class, tokens)
	require.NoError(t, err)
	require.True(t, d.Admitted, "%+v", d)
	return &grant
}

// comesBack waits until Redis decides again, as calls would that come in.
func comesBack(t testing.TB, w *Window) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, cause := w.away()
		return cause == nil
	}, 10*time.Second, time.Millisecond)
}

// delivered waits until Redis has all corrections.
func delivered(t testing.TB, w *Window) {
	t.Helper()
	require.Eventually(t, func() bool {
		w.mailbox.mu.Lock()
		defer w.mailbox.mu.Unlock()
		return !w.mailbox.running
	}, 10*time.Second, time.Millisecond)
}

// waiting waits until so many calls of Batch wait.
func waiting(t testing.TB, w *Window, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return w.Stats().Classes[batchClass].Waiting == n }, 5*time.Second, time.Millisecond)
}

func used(t testing.TB, w *Window) quotashare.ClassTokens {
	t.Helper()
	var usage quotashare.Usage
	require.Eventually(t, func() (ok bool) { // a busy machine may be slower than the timeout
		var err error
		usage, err = w.Usage(context.Background())
		return err == nil
	}, 10*time.Second, time.Millisecond)
	return usage.Used
}

// silent returns the address of a server that accepts and never answers.
func silent(t testing.TB) string {
	t.Helper()
	listen, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var group sync.WaitGroup
	group.Go(func() {
		var conns []net.Conn
		for {
			conn, err := listen.Accept()
			if err != nil {
				break
			}
			conns = append(conns, conn)
		}
		for _, conn := range conns {
			_ = conn.Close()
		}
	})
	t.Cleanup(func() {
		_ = listen.Close()
		group.Wait()
	})
	return listen.Addr().String()
}

func clientOf(t testing.TB, addr string, retries int) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: retries})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// aways are the ways in which Redis can be away.
var aways = []struct {
	name   string
	client func(t *testing.T) *redis.Client
	says   string // in the error
}{
	{"nothing listens", func(t *testing.T) *redis.Client { return clientOf(t, freeAddr(t), 0) }, ""},
	{"no answer", func(t *testing.T) *redis.Client { return clientOf(t, silent(t), 0) }, ""},
	{"no connection", func(t *testing.T) *redis.Client {
		ended := make(chan struct{})
		c := redis.NewClient(&redis.Options{
			ContextTimeoutEnabled: true,
			Dialer: func(context.Context, string, string) (net.Conn, error) {
				<-ended
				return nil, errors.New("the test is over")
			},
		})
		t.Cleanup(func() {
			close(ended)
			_ = c.Close()
		})
		return c
	}, ""},
	{"a replica", func(t *testing.T) *redis.Client {
		node := newRealNode(t)
		host, port, err := net.SplitHostPort(freeAddr(t))
		require.NoError(t, err)
		require.NoError(t, node.client().Do(context.Background(), "REPLICAOF", host, port).Err())
		return clientOf(t, node.addr, -1)
	}, "READONLY"},
	{"a replica, asked again", answersAgain("-READONLY You can't write against a read only replica.\r\n"), ""},
	{"full", func(t *testing.T) *redis.Client {
		c := newRealNode(t).client()
		require.NoError(t, c.ConfigSet(context.Background(), "maxmemory-policy", "noeviction").Err())
		require.NoError(t, c.ConfigSet(context.Background(), "maxmemory", "1").Err())
		return c
	}, "OOM"},
	{"loading", answers("-LOADING Redis is loading the dataset in memory\r\n"), "LOADING"},
	{"loading, asked again", answersAgain("-LOADING Redis is loading the dataset in memory\r\n"), ""},
	{"failing over", answers("-MASTERDOWN Link with MASTER is down\r\n"), "MASTERDOWN"},
	{"an error", answers("-ERR no such thing\r\n"), "no such thing"},
	{"scripts not allowed", answers("-NOPERM this user has no permissions\r\n"), "NOPERM"},
	{"no answer of ours", answers("$3\r\nyes\r\n"), `"yes"`},
	{"nil", answers("$-1\r\n"), "nil"},
	{"a key of another type", func(t *testing.T) *redis.Client {
		c := newNode(t).client()
		require.NoError(t, c.Set(context.Background(), "quotashare:1:{shared}", "taken", 0).Err())
		return c
	}, "WRONGTYPE"},
	{"another window", func(t *testing.T) *redis.Client {
		c := newNode(t).client()
		quota := wholeQuota(1000)
		quota.Window = time.Hour
		admit(t, newShared(t, c, quota, Closed), interactive, 1)
		return c
	}, "window of 1h"},
}

// answers returns a client of a Redis that answers so to every script.
func answers(answer string) func(t *testing.T) *redis.Client {
	return func(t *testing.T) *redis.Client {
		p := newProxy(t, newNode(t).addr)
		p.set(scripts(answer))
		return p.client(-1)
	}
}

// answersAgain is answers to a client that asks again after such an error, for as long as it may.
func answersAgain(answer string) func(t *testing.T) *redis.Client {
	return func(t *testing.T) *redis.Client {
		p := newProxy(t, newNode(t).addr)
		p.set(scripts(answer))
		return p.client(0)
	}
}

// TestAwayFromTheStart is case 94: however Redis is away, the mode decides, and a thousand calls together lose less than
// a second by it.
func TestAwayFromTheStart(t *testing.T) {
	const calls = 1000
	for _, c := range aways {
		for _, mode := range []Mode{Closed, Open, Local(0.5)} {
			t.Run(fmt.Sprint(c.name, "/", mode), func(t *testing.T) {
				w := newShared(t, c.client(t), wholeQuota(calls), mode)
				admitted, refused, undecided := 0, 0, 0
				began := time.Now()
				for range calls {
					grant, d, err := w.TryAcquire(context.Background(), interactive, 1)
					switch {
					case err != nil:
						undecided++
						require.ErrorIs(t, err, ErrAway)
						require.ErrorContains(t, err, c.says)
						require.Equal(t, quotashare.ReasonNone, d.Reason)
						require.False(t, d.Admitted)
						require.Positive(t, d.RetryAfter)
					case d.Admitted:
						admitted++
						grant.Settle(1)
					default:
						refused++
						require.Equal(t, quotashare.ReasonQuotaFull, d.Reason)
						require.Positive(t, d.RetryAfter)
					}
				}
				require.Less(t, time.Since(began), time.Second)

				want := map[Mode][3]int{
					Closed: {0, 0, calls}, Open: {calls, 0, 0}, Local(0.5): {calls / 2, calls / 2, 0},
				}[mode]
				require.Equal(t, want, [3]int{admitted, refused, undecided})
				s := w.Stats()
				require.Equal(t, mode.String(), s.Shared.Mode)
				require.ErrorContains(t, s.Shared.Away, c.says)
				require.EqualValues(t, 1, s.Shared.Outages)
				require.EqualValues(t, admitted+refused, s.Shared.Alone)
				require.EqualValues(t, admitted, s.Classes[interactive].Admitted)
				require.EqualValues(t, undecided, s.Classes[interactive].Refused[quotashare.ReasonNone])
				require.EqualValues(t, refused, s.Classes[interactive].Refused[quotashare.ReasonQuotaFull])
			})
		}
	}
}

// TestManyCallersOfASilentRedis: calls under way at once, more than there are slots, all return in time.
func TestManyCallersOfASilentRedis(t *testing.T) {
	const timeout = 200 * time.Millisecond
	w := newShared(t, clientOf(t, silent(t), 0), wholeQuota(1000), Closed, WithTimeout(timeout))
	var slowest atomic.Int64
	var group sync.WaitGroup
	for range 2 * slots {
		group.Go(func() {
			began := time.Now()
			_, _, err := w.TryAcquire(context.Background(), interactive, 1)
			if !errors.Is(err, ErrAway) {
				t.Error(err)
			}
			for took := int64(time.Since(began)); ; {
				before := slowest.Load()
				if took <= before || slowest.CompareAndSwap(before, took) {
					return
				}
			}
		})
	}
	group.Wait()
	require.Less(t, time.Duration(slowest.Load()), timeout+slack)
	require.EqualValues(t, 1, w.Stats().Shared.Outages)
}

// TestNewChoosesNoMode: the owner chooses, and a choice that makes no sense is refused.
func TestNewChoosesNoMode(t *testing.T) {
	client := clientOf(t, freeAddr(t), 0)
	for want, mode := range map[string]Mode{
		"mode is none: want Closed, Open or Local": {},
		"mode is local(0)":                         Local(0),
		"mode is local(-0.5)":                      Local(-0.5),
		"mode is local(1.01)":                      Local(1.01),
		"mode is local(NaN)":                       Local(math.NaN()),
		"mode is local(+Inf)":                      Local(math.Inf(1)),
		"mode is local(0.0009): want a part of at least one token": Local(0.0009),
	} {
		_, err := New(client, "shared", wholeQuota(1000), mode)
		require.ErrorContains(t, err, want)
	}
	for _, mode := range []Mode{Closed, Open, Local(1), Local(0.001)} {
		require.Equal(t, mode.String(), newShared(t, client, wholeQuota(1000), mode).Stats().Shared.Mode)
	}
}

func TestModeString(t *testing.T) {
	for want, mode := range map[string]Mode{
		"none": {}, "closed": Closed, "open": Open, "local(0.25)": Local(0.25), "local(1)": Local(1),
	} {
		require.Equal(t, want, mode.String())
	}
}

// TestNewRefusesAClientWithoutDeadlines: such a client would wait for seconds in an outage.
func TestNewRefusesAClientWithoutDeadlines(t *testing.T) {
	addr := freeAddr(t)
	for _, enabled := range []bool{false, true} {
		for _, client := range []redis.UniversalClient{
			redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: enabled}),
			redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{addr}, ContextTimeoutEnabled: enabled}),
			redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": addr}, ContextTimeoutEnabled: enabled}),
		} {
			t.Cleanup(func() { _ = client.Close() })
			w, err := New(client, "shared", wholeQuota(1000), Closed)
			if enabled {
				require.NoError(t, err, "%T", client)
				closeAfter(t, w)
			} else {
				require.ErrorContains(t, err, "want ContextTimeoutEnabled", "%T", client)
			}
		}
	}
	_, err := New(nil, "shared", wholeQuota(1000), Closed)
	require.ErrorContains(t, err, "client is nil")
}

// TestLocalHasItsPartOfTheQuota: tokens and overdraft are rounded down, what is in force for the classes stays.
func TestLocalHasItsPartOfTheQuota(t *testing.T) {
	client := clientOf(t, freeAddr(t), 0)
	quota := quotashare.Quota{
		Tokens: 1003, Overdraft: 11, Window: time.Minute, Pace: 3,
		Shares:   quotashare.Fractions{0.5, 0.3, 0.2},
		Floors:   quotashare.Fractions{0.1, 0.1, 0},
		Ceilings: quotashare.Fractions{0.6, 0.3, quotashare.Closed},
	}
	w := newShared(t, client, quota, Local(0.25))
	part := w.Quota()
	part.Tokens, part.Overdraft = 250, 2
	require.Equal(t, part, w.local.Load().Quota())

	quota.Tokens = 2000
	require.NoError(t, w.SetQuota(quota))
	require.EqualValues(t, 500, w.local.Load().Quota().Tokens)
	quota.Tokens = 3
	require.ErrorContains(t, w.SetQuota(quota), "want a part of at least one token")
	require.EqualValues(t, 500, w.local.Load().Quota().Tokens)
	require.EqualValues(t, 2000, w.Quota().Tokens)

	// Also in an outage, where what was admitted stays charged.
	admit(t, w, interactive, 200)
	quota.Tokens = 1000
	require.NoError(t, w.SetQuota(quota))
	_, d, err := w.TryAcquire(context.Background(), interactive, 100)
	require.NoError(t, err)
	require.Equal(t, quotashare.ReasonQuotaFull, d.Reason)
	require.EqualValues(t, 200, w.local.Load().Usage().Used[interactive])
}

// TestErrorsOfAnOutage: what the error of TryAcquire and of Acquire tells.
func TestErrorsOfAnOutage(t *testing.T) {
	ctx := context.Background()
	p := newProxy(t, newNode(t).addr)
	p.set(scripts(away))
	w := newShared(t, p.client(-1), wholeQuota(1000), Closed)
	check := func(class quotashare.Class, d quotashare.Decision, err error) {
		t.Helper()
		require.ErrorIs(t, err, ErrAway)
		require.NotErrorIs(t, err, ErrLost)
		require.ErrorContains(t, err, "ERR away")
		var denied *quotashare.DeniedError
		require.ErrorAs(t, err, &denied)
		require.Equal(t, class, denied.Class)
		require.EqualValues(t, 7, denied.Tokens)
		require.Equal(t, d, denied.Decision)
		require.Equal(t, w.Quota(), denied.Quota)
		require.Equal(t, quotashare.Decision{RetryAfter: d.RetryAfter}, d)
		require.Positive(t, d.RetryAfter)
		require.False(t, d.Permanent())
	}
	for range 3 {
		_, d, err := w.TryAcquire(ctx, interactive, 7)
		check(interactive, d, err)
		_, d, err = w.TryAcquire(ctx, batchClass, 7)
		check(batchClass, d, err)
		require.GreaterOrEqual(t, d.RetryAfter, quotashare.Backoff(batchClass, time.Minute))
		_, err = w.Acquire(ctx, interactive, 7)
		var denied *quotashare.DeniedError
		require.ErrorAs(t, err, &denied)
		check(interactive, denied.Decision, err)
	}
	_, err := w.Usage(ctx)
	require.ErrorIs(t, err, ErrAway)

	// What no Redis would admit is refused as ever.
	for tokens, reason := range map[int64]quotashare.Reason{0: quotashare.ReasonInvalid, 1001: quotashare.ReasonTooLarge} {
		_, d, err := w.TryAcquire(ctx, interactive, tokens)
		require.NoError(t, err)
		require.Equal(t, quotashare.Decision{Reason: reason}, d)
	}
}

// TestATimeoutIsNotTheCallersContext: that a request ran out of time says nothing about ctx.
func TestATimeoutIsNotTheCallersContext(t *testing.T) {
	w := newShared(t, clientOf(t, silent(t), 0), wholeQuota(1000), Closed, WithTimeout(20*time.Millisecond))
	_, _, err := w.TryAcquire(context.Background(), interactive, 1)
	require.ErrorIs(t, err, ErrAway)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	_, err = w.Usage(context.Background())
	require.ErrorIs(t, err, ErrAway)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
}

// TestTheCallersContextIsNoOutage: a ctx that ends ends the call with its error, and tells nothing about Redis.
func TestTheCallersContextIsNoOutage(t *testing.T) {
	for _, mode := range []Mode{Closed, Open, Local(1)} {
		for _, retries := range []int{-1, 0} {
			t.Run(fmt.Sprint(mode, "/", retries), func(t *testing.T) {
				w := newShared(t, clientOf(t, silent(t), retries), wholeQuota(1000), mode, WithTimeout(time.Second))
				for i := range 40 {
					ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+i%5)*time.Millisecond)
					_, d, err := w.TryAcquire(ctx, interactive, 1)
					cancel()
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.NotErrorIs(t, err, ErrAway)
					require.Equal(t, quotashare.Decision{}, d)
				}
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				_, err := w.Acquire(ctx, batchClass, 1)
				require.ErrorIs(t, err, context.Canceled)
				s := w.Stats()
				require.NoError(t, s.Shared.Away)
				require.Zero(t, s.Shared.Outages)
				require.Zero(t, s.Shared.Alone)
			})
		}
	}
}

// TestTheCallersContextInAnOutage: it comes before what the mode says.
func TestTheCallersContextInAnOutage(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	p.set(scripts(away))
	for _, mode := range []Mode{Closed, Open, Local(1)} {
		w := newShared(t, p.client(-1), wholeQuota(1000), mode)
		_, _, _ = w.TryAcquire(context.Background(), interactive, 1)
		require.Error(t, w.Stats().Shared.Away)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, d, err := w.TryAcquire(ctx, interactive, 1)
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, ErrAway)
		require.False(t, d.Admitted)
	}
	w := newShared(t, p.client(-1), wholeQuota(1000), Closed)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() {
		_, err := w.Acquire(ctx, batchClass, 1)
		ended <- err
	}()
	require.Eventually(t, func() bool {
		s := w.Stats()
		return s.Shared.Away != nil && s.Classes[batchClass].Waiting == 1
	}, 5*time.Second, time.Millisecond)
	cancel()
	err := <-ended
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, ErrAway)
	var denied *quotashare.DeniedError
	require.ErrorAs(t, err, &denied)
	s := w.Stats()
	require.EqualValues(t, 1, s.Classes[batchClass].WaitsCancelled)
	require.Zero(t, s.Classes[batchClass].Waiting)
}

// TestOpenCountsNothing: a Grant of the mode settles nothing.
func TestOpenCountsNothing(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	w := newShared(t, p.client(-1), wholeQuota(1000), Open)
	admit(t, w, interactive, 100)
	p.set(scripts(away))
	for range 30 {
		grant, d, err := w.TryAcquire(context.Background(), interactive, 1000)
		require.NoError(t, err)
		require.Equal(t, quotashare.Decision{Admitted: true}, d)
		grant.Settle(5)
		admit(t, w, background, 1000).Cancel()
	}
	s := w.Stats()
	require.Zero(t, s.Shared.Pending)
	require.EqualValues(t, 60, s.Shared.Alone)
	p.set(nil)
	comesBack(t, w)
	require.Equal(t, quotashare.ClassTokens{interactive: 100}, used(t, w))
	_, d, err := w.TryAcquire(context.Background(), interactive, 1000)
	require.NoError(t, err)
	require.Equal(t, quotashare.ReasonQuotaFull, d.Reason)
	require.EqualValues(t, 1, w.Stats().Shared.Outages)
}

// TestAfterAnOutageRedisChargesTheLocalWindow: what it holds, for one window from then.
func TestAfterAnOutageRedisChargesTheLocalWindow(t *testing.T) {
	node := newNode(t)
	p := newProxy(t, node.addr)
	w := newShared(t, p.client(-1), wholeQuota(1000), Local(0.5))
	d := duel{t: t, client: node.client(), now: time.UnixMicro(1_800_000_000_000_000)}
	useClock(t, w)
	d.setClock()

	p.set(scripts(away))
	grant := admit(t, w, interactive, 100)
	admit(t, w, background, 50)
	admit(t, w, batchClass, 30).Cancel()
	grant.Settle(60)
	_, denied, err := w.TryAcquire(context.Background(), interactive, 391)
	require.NoError(t, err)
	require.Equal(t, quotashare.ReasonQuotaFull, denied.Reason)
	s := w.Stats()
	require.Zero(t, s.Shared.Pending)
	require.EqualValues(t, 4, s.Shared.Alone)

	p.set(nil)
	d.now = d.now.Add(30 * time.Second)
	d.setClock()
	comesBack(t, w)
	delivered(t, w)
	require.Equal(t, quotashare.ClassTokens{interactive: 60, background: 50}, used(t, w))
	require.NoError(t, w.Stats().Shared.Away)
	d.now = d.now.Add(time.Minute - time.Microsecond)
	d.setClock()
	require.Equal(t, quotashare.ClassTokens{interactive: 60, background: 50}, used(t, w))
	d.now = d.now.Add(time.Microsecond)
	d.setClock()
	require.Zero(t, used(t, w))
}

// TestAnOutageTakesWhatRedisToldLast: of the local quota so large a part is taken as of the quota was used.
func TestAnOutageTakesWhatRedisToldLast(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	quota := wholeQuota(1000)
	quota.Window = 3 * time.Second
	w := newShared(t, p.client(-1), quota, Local(0.5))
	admit(t, w, interactive, 600)
	p.set(scripts(away))
	_, d, err := w.TryAcquire(context.Background(), interactive, 201)
	require.NoError(t, err)
	require.Equal(t, quotashare.ReasonQuotaFull, d.Reason)
	require.LessOrEqual(t, d.RetryAfter, quota.Window+quota.Window/6)
	admit(t, w, interactive, 200)
	_, d, err = w.TryAcquire(context.Background(), interactive, 1)
	require.NoError(t, err)
	require.Equal(t, quotashare.ReasonQuotaFull, d.Reason)
	require.Eventually(t, func() bool { // a window later
		_, d, err := w.TryAcquire(context.Background(), interactive, 500)
		return err == nil && d.Admitted
	}, 10*time.Second, 10*time.Millisecond)
	require.EqualValues(t, 1, w.Stats().Shared.Outages)
}

// TestManyOutagesInAWindow: all together the local Window admits its part once, and Redis charges it once.
func TestManyOutagesInAWindow(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	w := newShared(t, p.client(-1), wholeQuota(1000), Local(0.5))
	held, letGo := p.hold()
	p.set(func(args []string) any {
		switch {
		case isScript(args, "acquire"):
			return away
		case isScript(args, "correct"):
			return held
		}
		return nil
	})
	admitted := int64(0)
	for range 5 {
		for range 3 { // 300 in the first outage, 200 in the second
			_, d, err := w.TryAcquire(context.Background(), interactive, 100)
			require.NoError(t, err)
			if d.Admitted {
				admitted += 100
			}
		}
		comesBack(t, w)
	}
	require.EqualValues(t, 5, w.Stats().Shared.Outages)
	require.EqualValues(t, 500, admitted)
	p.set(nil)
	letGo()
	delivered(t, w)
	require.Equal(t, quotashare.ClassTokens{interactive: 500}, used(t, w))
}

// TestTheNextOutageTakesWhatRedisToldLast: also where the local Window still holds something, which Redis has told, too.
func TestTheNextOutageTakesWhatRedisToldLast(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	p.set(scripts(away))
	w := newShared(t, p.client(-1), wholeQuota(1000), Local(0.5))
	admit(t, w, interactive, 100)
	p.set(nil)
	comesBack(t, w)
	delivered(t, w)
	admit(t, w, interactive, 600)
	p.set(scripts(away))
	_, d, err := w.TryAcquire(context.Background(), interactive, 151) // of 500, half of the 700 are taken
	require.NoError(t, err)
	require.Equal(t, quotashare.ReasonQuotaFull, d.Reason)
	admit(t, w, interactive, 150)
	require.EqualValues(t, 2, w.Stats().Shared.Outages)
}

// TestALossTakesWhatRedisToldLast: also where a correction was the first to see an empty Redis.
func TestALossTakesWhatRedisToldLast(t *testing.T) {
	for _, settles := range []bool{false, true} {
		node := newNode(t)
		w := newShared(t, node.client(), wholeQuota(1000), Local(0.5))
		admit(t, w, interactive, 500)
		grant := admit(t, w, interactive, 101)
		require.NoError(t, node.client().FlushAll(context.Background()).Err())
		if settles {
			grant.Settle(100)
			delivered(t, w)
		}
		_, d, err := w.TryAcquire(context.Background(), interactive, 201)
		require.NoError(t, err)
		require.Equal(t, quotashare.ReasonQuotaFull, d.Reason)
		admit(t, w, interactive, 199)
		s := w.Stats()
		require.ErrorIs(t, s.Shared.Away, ErrLost)
		require.EqualValues(t, 1, s.Shared.Outages)
	}
}

// TestALossLastsAWindow: what its error tells, and that it ends.
func TestALossLastsAWindow(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	node := newNode(t)
	quota := wholeQuota(1000)
	quota.Window = 2 * time.Second
	w := newShared(t, node.client(), quota, Closed, WithTimeout(time.Second))
	admit(t, w, interactive, 1000)
	lost := time.Now()
	require.NoError(t, node.client().FlushAll(ctx).Err())
	for range 2 { // what Redis says, and what is known without it
		_, d, err := w.TryAcquire(ctx, interactive, 7)
		require.ErrorIs(t, err, ErrLost)
		require.NotErrorIs(t, err, ErrAway)
		var denied *quotashare.DeniedError
		require.ErrorAs(t, err, &denied)
		require.Equal(t, d, denied.Decision)
		require.Equal(t, quotashare.Decision{RetryAfter: d.RetryAfter}, d)
		require.LessOrEqual(t, d.RetryAfter, quota.Window)
		require.GreaterOrEqual(t, time.Now().Add(d.RetryAfter), lost.Add(quota.Window))
	}
	_, err := w.Usage(ctx)
	require.ErrorIs(t, err, ErrLost)
	require.NotErrorIs(t, err, ErrAway)
	s := w.Stats()
	require.ErrorIs(t, s.Shared.Away, ErrLost)
	require.EqualValues(t, 1, s.Shared.Outages)
	require.EqualValues(t, 1000, s.Used) // as Redis told last

	_, err = w.Acquire(ctx, batchClass, 1000)
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(lost), quota.Window)
	require.NoError(t, w.Stats().Shared.Away)
	require.Equal(t, quotashare.ClassTokens{batchClass: 1000}, used(t, w))
}

// newcomers returns a client of a Redis with a fake clock, and what makes replicas that have seen nothing before.
func newcomers(t *testing.T) (*duel, func() *Window) {
	d := &duel{t: t, client: newNode(t).client(), now: time.UnixMicro(1_800_000_000_000_000)}
	d.setClock()
	return d, func() *Window {
		w := newShared(t, d.client, wholeQuota(1000), Closed, WithTimeout(time.Second))
		useClock(t, w)
		return w
	}
}

// requireLostForAWindow requires that nobody is admitted for a window from now, and then as if nothing was charged.
func requireLostForAWindow(d *duel, newcomer func() *Window, replicas ...*Window) {
	d.t.Helper()
	for _, step := range []time.Duration{0, time.Minute / 2, time.Minute/2 - time.Microsecond} {
		d.now = d.now.Add(step)
		d.setClock()
		for _, w := range append(replicas, newcomer()) {
			_, _, err := w.TryAcquire(context.Background(), interactive, 1)
			require.ErrorIs(d.t, err, ErrLost)
		}
	}
	d.now = d.now.Add(time.Microsecond)
	d.setClock()
	admit(d.t, newcomer(), interactive, 1000)
}

// TestALossIsKnownToNewcomers: a replica that has seen nothing before is told, too, until the window is over.
func TestALossIsKnownToNewcomers(t *testing.T) {
	d, newcomer := newcomers(t)
	w := newcomer()
	admit(t, w, interactive, 1000)
	require.NoError(t, d.client.Del(context.Background(), w.server.key).Err())
	requireLostForAWindow(d, newcomer, w)
}

// TestANewcomerIsTheFirstAfterALoss: it cannot know, and is admitted; the next who knows ends that.
func TestANewcomerIsTheFirstAfterALoss(t *testing.T) {
	d, newcomer := newcomers(t)
	w := newcomer()
	admit(t, w, interactive, 1000)
	require.NoError(t, d.client.Del(context.Background(), w.server.key).Err())
	d.now = d.now.Add(time.Microsecond)
	d.setClock()
	first := newcomer()
	admit(t, first, interactive, 1)
	requireLostForAWindow(d, newcomer, w, first)
}

// TestARollbackIsALoss: Redis has again what it had before.
func TestARollbackIsALoss(t *testing.T) {
	ctx := context.Background()
	d, newcomer := newcomers(t)
	w := newcomer()
	admit(t, w, interactive, 300)
	before, err := d.client.HGetAll(ctx, w.server.key).Result()
	require.NoError(t, err)
	admit(t, w, interactive, 300)
	require.NoError(t, d.client.Del(ctx, w.server.key).Err())
	require.NoError(t, d.client.HSet(ctx, w.server.key, before).Err())
	requireLostForAWindow(d, newcomer, w)
}

// TestTooLargeForLocalMayFitLater: Redis could admit the call, so the refusal is not for ever.
func TestTooLargeForLocalMayFitLater(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	w := newShared(t, p.client(-1), wholeQuota(1000), Local(0.25))
	p.set(scripts(away))
	_, d, err := w.TryAcquire(context.Background(), interactive, 251)
	require.ErrorIs(t, err, ErrAway)
	require.Equal(t, quotashare.Decision{RetryAfter: d.RetryAfter}, d)
	require.Positive(t, d.RetryAfter)
	require.False(t, d.Permanent())
	require.Zero(t, w.Stats().Shared.Alone)
	require.EqualValues(t, 1, w.Stats().Classes[interactive].Refused[quotashare.ReasonNone])

	ended := make(chan error)
	go func() {
		_, err := w.Acquire(context.Background(), batchClass, 251)
		ended <- err
	}()
	waiting(t, w, 1)
	admit(t, w, interactive, 250)
	p.set(nil)
	require.NoError(t, <-ended)
	delivered(t, w)
	require.Equal(t, quotashare.ClassTokens{interactive: 250, batchClass: 251}, used(t, w))
}

// TestWaitersOutlastAnOutage: in mode Closed Batch waits until Redis is back, Background as long as it would.
func TestWaitersOutlastAnOutage(t *testing.T) {
	const waiters = 20
	p := newProxy(t, newNode(t).addr)
	var asked atomic.Int64
	p.set(func(args []string) any {
		if !isScript(args) {
			return nil
		}
		asked.Add(1)
		return away
	})
	w := newShared(t, p.client(-1), wholeQuota(1000), Closed, WithMaxWait(background, 300*time.Millisecond))
	ended := make(chan error, waiters)
	for range waiters {
		go func() {
			_, err := w.Acquire(context.Background(), batchClass, 10)
			ended <- err
		}()
	}
	_, err := w.Acquire(context.Background(), background, 10)
	require.ErrorIs(t, err, ErrAway)
	require.EqualValues(t, 1, w.Stats().Classes[background].WaitsExpired)

	require.Eventually(t, func() bool { return asked.Load() >= 3 }, 10*time.Second, time.Millisecond)
	require.Empty(t, ended)
	s := w.Stats()
	require.EqualValues(t, waiters, s.Classes[batchClass].Waiting)
	require.EqualValues(t, 1, s.Shared.Outages)
	p.set(nil)
	for range waiters {
		require.NoError(t, <-ended)
	}
	require.Equal(t, quotashare.ClassTokens{batchClass: waiters * 10}, used(t, w))
	s = w.Stats()
	require.EqualValues(t, waiters, s.Classes[batchClass].WaitsAdmitted)
	require.Zero(t, s.Classes[batchClass].Waiting)
	require.Zero(t, s.Shared.Alone)
}

// TestWaitersOfAnOutageBeginning: those who wait for Redis to have room are decided by the mode as soon as it decides,
// and nobody waits behind them.
func TestWaitersOfAnOutageBeginning(t *testing.T) {
	const waiters = 5
	p := newProxy(t, newNode(t).addr)
	w := newShared(t, p.client(-1), wholeQuota(1000), Open)
	admit(t, w, interactive, 1000) // for a minute
	ended := make(chan error, waiters)
	for range waiters {
		go func() {
			_, err := w.Acquire(context.Background(), batchClass, 10)
			ended <- err
		}()
	}
	waiting(t, w, waiters)
	p.set(scripts(away))
	admit(t, w, interactive, 1000)
	for range waiters {
		select {
		case err := <-ended:
			require.NoError(t, err)
		case <-time.After(10 * time.Second):
			require.Fail(t, "still waiting")
		}
	}
	admit(t, w, batchClass, 10)
	require.EqualValues(t, waiters+2, w.Stats().Shared.Alone)
}

// TestWaitersOfALocalWindowAskRedis: as soon as it is back, and not only when the local Window may have room.
func TestWaitersOfALocalWindowAskRedis(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	p.set(scripts(away))
	w := newShared(t, p.client(-1), wholeQuota(1000), Local(0.5))
	admit(t, w, interactive, 500) // for a minute
	ended := make(chan error)
	go func() {
		_, err := w.Acquire(context.Background(), batchClass, 100)
		ended <- err
	}()
	waiting(t, w, 1)
	p.set(nil)
	comesBack(t, w)
	select {
	case err := <-ended:
		require.NoError(t, err)
	case <-time.After(10 * time.Second):
		require.Fail(t, "still waiting")
	}
}

// TestBehindWaitersInAnOutage: those who ask behind waiters find out, too, that Redis is away, and cost no more.
func TestBehindWaitersInAnOutage(t *testing.T) {
	for _, mode := range []Mode{Closed, Open, Local(0.5)} {
		t.Run(mode.String(), func(t *testing.T) {
			p := newProxy(t, newNode(t).addr)
			w := newShared(t, p.client(0), wholeQuota(1000), mode)
			admit(t, w, interactive, 1000) // for a minute
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error)
			go func() {
				_, err := w.Acquire(ctx, batchClass, 10)
				ended <- err
			}()
			waiting(t, w, 1)
			held, _ := p.hold()
			p.set(scripts(held))
			began := time.Now()
			for range 1000 {
				_, _, _ = w.TryAcquire(context.Background(), batchClass, 10)
			}
			require.Less(t, time.Since(began), time.Second)
			require.EqualValues(t, 1, w.Stats().Shared.Outages)
			cancel()
			if err := <-ended; mode != Open {
				require.ErrorIs(t, err, context.Canceled)
			}
		})
	}
}

// TestOneProbeBesideTheCalls: to find out whether Redis is back holds up nobody, and is tried once at a time.
func TestOneProbeBesideTheCalls(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	w := newShared(t, p.client(-1), wholeQuota(1000), Closed, WithTimeout(maxTimeout))
	admit(t, w, interactive, 1)
	p.set(scripts(away))
	call := func() {
		began := time.Now()
		_, _, err := w.TryAcquire(context.Background(), interactive, 1)
		require.ErrorIs(t, err, ErrAway)
		require.Less(t, time.Since(began), slack)
	}
	call()
	held, letGo := p.hold()
	var probes atomic.Int64
	p.set(func(args []string) any {
		if !isScript(args, "usage") {
			return nil
		}
		probes.Add(1)
		return held
	})
	for probes.Load() == 0 {
		call()
	}
	for range 1000 {
		call()
	}
	letGo()
	comesBack(t, w)
	require.NoError(t, w.Close(context.Background())) // and so all that it had begun is over
	require.EqualValues(t, 1, probes.Load())
}

// TestCloseWhileRedisIsAway: it is over when its ctx is; what could not be sent is counted and reported, and no
// goroutine stays.
func TestCloseWhileRedisIsAway(t *testing.T) {
	const grants = 50
	p := newProxy(t, newNode(t).addr)
	var mu sync.Mutex
	var dropped []Correction
	var w *Window
	pprof.Do(context.Background(), pprof.Labels("test", t.Name()), func(context.Context) {
		var err error
		w, err = New(p.client(0), "shared", wholeQuota(1000), Closed, WithDropped(func(c Correction, err error) {
			mu.Lock()
			defer mu.Unlock()
			dropped = append(dropped, c)
			if !errors.Is(err, ErrClosed) {
				t.Errorf("%+v: %v", c, err)
			}
		}))
		require.NoError(t, err)
		var made []*quotashare.Grant
		for range grants {
			made = append(made, admit(t, w, interactive, 10))
		}
		held, _ := p.hold()
		p.set(scripts(held))
		_, _, err = w.TryAcquire(context.Background(), interactive, 10)
		require.ErrorIs(t, err, ErrAway)
		waiter := make(chan error)
		go func() {
			_, err := w.Acquire(context.Background(), batchClass, 10)
			waiter <- err
		}()
		waiting(t, w, 1)
		for _, grant := range made {
			grant.Settle(3)
		}

		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		began := time.Now()
		require.ErrorIs(t, w.Close(ctx), context.DeadlineExceeded)
		require.Less(t, time.Since(began), 100*time.Millisecond+slack)
		require.ErrorIs(t, <-waiter, ErrClosed)
		_, _, err = w.TryAcquire(context.Background(), interactive, 10)
		require.ErrorIs(t, err, ErrClosed)
	})
	require.Eventually(t, func() bool { return w.Stats().Shared.Dropped == grants }, 5*time.Second, time.Millisecond)
	require.Zero(t, w.Stats().Shared.Pending)
	require.Eventually(t, func() bool { return goroutines(t) == "" }, 5*time.Second, 10*time.Millisecond)
	w.Observe(5, 0) // what comes now is dropped at once
	require.EqualValues(t, grants+1, w.Stats().Shared.Dropped)
	require.NoError(t, w.Close(context.Background()))

	mu.Lock()
	defer mu.Unlock()
	require.Len(t, dropped, grants+1)
	for i, c := range dropped {
		c.at, c.made = 0, time.Time{}
		want := Correction{Op: "settle", Class: interactive, Estimated: 10, Actual: 3}
		if i == grants {
			want = Correction{Op: "observe", Actual: 5}
		}
		require.Equal(t, want, c)
	}
}

// TestALocalChargeIsDroppedWhereItCannotBeSent: it is reported as what it is.
func TestALocalChargeIsDroppedWhereItCannotBeSent(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	p.set(scripts(away))
	dropped := make(chan Correction, 1)
	w := newShared(t, p.client(-1), wholeQuota(1000), Local(1), WithDropped(func(c Correction, err error) {
		assert.ErrorIs(t, err, ErrClosed)
		dropped <- c
	}))
	admit(t, w, background, 70)
	held, _ := p.hold()
	p.set(scripts(held, "correct"))
	comesBack(t, w)
	require.Eventually(t, func() bool { return p.held.Load() == 1 }, 5*time.Second, time.Millisecond)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, w.Close(ctx), context.Canceled)
	c := <-dropped
	c.made = time.Time{}
	require.Equal(t, Correction{Op: "charge", Class: background, Actual: 70}, c)
	require.EqualValues(t, 1, w.Stats().Shared.Dropped)
}

// goroutines returns the stacks of the goroutines of this package that the test has started in pprof.Do.
func goroutines(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	require.NoError(t, pprof.Lookup("goroutine").WriteTo(&all, 1))
	stacks := strings.Split(all.String(), "\n\n")
	return strings.Join(slices.DeleteFunc(stacks, func(stack string) bool {
		return !strings.Contains(stack, fmt.Sprintf("%q:%q", "test", t.Name())) || !strings.Contains(stack, "redisshare.(*")
	}), "\n\n")
}

func (b *bubbleRedis) inMode(t *testing.T, quota quotashare.Quota, mode Mode, options ...Option) *replica {
	t.Helper()
	w, err := New(b, t.Name(), quota, mode, options...)
	require.NoError(t, err)
	useClock(t, w)
	return &replica{w, t, b, time.Now()}
}

// TestACallThatEndedIsTakenBackInModeOpen: whatever is asked in its slot meanwhile.
func TestACallThatEndedIsTakenBackInModeOpen(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.inMode(t, classQuota(interactive, 1000), Open)
		w.admit(interactive, 1)
		b.after.set(func(ctx context.Context, _ *bubbleRequest) error {
			d, _ := ctx.Deadline()
			time.Sleep(time.Until(d))
			return errors.New("cut")
		})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, _, err := w.TryAcquire(ctx, interactive, 100)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		b.after.set(nil)
		b.before.set(func(context.Context, *bubbleRequest) error { return errors.New("gone") })
		_, d, err := w.TryAcquire(t.Context(), interactive, 7)
		require.NoError(t, err)
		require.True(t, d.Admitted)
		b.before.set(nil)
		time.Sleep(time.Second)
		_, _, _ = w.TryAcquire(t.Context(), interactive, 1)
		time.Sleep(time.Second)
		w.admit(interactive, 2)
		w.used(1 + 2)
		require.NoError(t, w.Close(context.Background()))
	})
}

// TestAnOutageBeginsUnderTheQuotaInForce: a request that was under way as the quota was set does not bring the old one back.
func TestAnOutageBeginsUnderTheQuotaInForce(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.inMode(t, classQuota(interactive, 1000), Local(1))
		b.before.set(func(context.Context, *bubbleRequest) error {
			require.NoError(t, w.SetQuota(classQuota(interactive, 100)))
			return errors.New("gone")
		})
		_, d, err := w.TryAcquire(t.Context(), interactive, 60)
		require.NoError(t, err)
		require.True(t, d.Admitted)
		_, d, err = w.TryAcquire(t.Context(), interactive, 60)
		require.NoError(t, err)
		require.False(t, d.Admitted, "100 is the quota")
		require.NoError(t, w.Close(context.Background()))
	})
}

// TestAWaiterTooLargeForLocalHoldsNobodyUp: those behind it fit the local Window.
func TestAWaiterTooLargeForLocalHoldsNobodyUp(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.inMode(t, classQuota(batchClass, 1000), Local(0.125))
		b.before.set(func(context.Context, *bubbleRequest) error { return errors.New("gone") })
		ctx, cancel := context.WithCancel(t.Context())
		large := w.acquire(ctx, batchClass, 200)
		small := w.acquire(ctx, batchClass, 10)
		w.at(30 * time.Second)
		ended := small.hasEnded()
		_, d, err := w.TryAcquire(t.Context(), batchClass, 10)
		cancel()
		<-large.ended
		<-small.ended
		require.NoError(t, w.Close(context.Background()))
		require.True(t, ended, "10 of 125 fit")
		require.NoError(t, err)
		require.True(t, d.Admitted)
	})
}
