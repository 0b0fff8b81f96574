package redisshare

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// The tests of this file break Redis under a load, and compare what was charged with what was admitted.

// Traffic calls for all classes, in several replicas, until it is stopped.
type traffic struct {
	t        *testing.T
	replicas []*Window
	ended    chan struct{}
	stop     func()
	group    sync.WaitGroup

	mu      sync.Mutex
	made    []*admission
	slowest time.Duration             // TryAcquire
	asking  map[*Window]time.Duration // in all: Interactive of the replica, since it was reset
	held    []func()                  // what settles the calls that last until the load stops
}

// An admission is a call that was admitted.
type admission struct {
	replica           *Window
	class             quotashare.Class
	at                int64 // by the clock of Redis, in microseconds; 0 if a mode admitted the call
	began, returned   int64 // on this process' clock, which is the same
	estimated, actual int64
	settled           int64 // when it was
}

// chargeOf returns what a Grant charged in Redis, nil if it is of a mode.
func chargeOf(grant *quotashare.Grant) *charge {
	settler := reflect.ValueOf(grant).Elem().FieldByName("settler").Elem()
	if !settler.IsValid() || settler.Type() != reflect.TypeFor[*charge]() {
		return nil
	}
	return (*charge)(settler.UnsafePointer())
}

const maxEstimate = 80

func startLoad(t *testing.T, replicas ...*Window) *traffic {
	ended := make(chan struct{})
	l := &traffic{t: t, replicas: replicas, ended: ended, asking: make(map[*Window]time.Duration)}
	l.stop = sync.OnceFunc(func() {
		close(ended)
		l.group.Wait()
	})
	t.Cleanup(l.stop)
	for i, w := range replicas {
		for _, class := range []quotashare.Class{interactive, background, batchClass} {
			for _, try := range []bool{true, false} {
				r := rand.New(rand.NewPCG(uint64(i), uint64(class)))
				l.group.Go(func() { l.run(w, class, try, r) })
			}
		}
	}
	return l
}

func (l *traffic) run(w *Window, class quotashare.Class, try bool, r *rand.Rand) {
	for {
		select {
		case <-l.ended:
			return
		case <-time.After(time.Duration(4000+r.IntN(8000)) * time.Microsecond):
		}
		a := &admission{replica: w, class: class, estimated: 20 + r.Int64N(maxEstimate-20) + 1, began: time.Now().UnixMicro()}
		began := time.Now()
		var grant quotashare.Grant
		var d quotashare.Decision
		var err error
		if try {
			grant, d, err = w.TryAcquire(context.Background(), class, a.estimated)
			l.took(w, class, time.Since(began))
		} else {
			// Some of these end while Redis is asked.
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.IntN(50_000))*time.Microsecond)
			grant, err = w.Acquire(ctx, class, a.estimated)
			cancel()
			d.Admitted = err == nil
		}
		if !d.Admitted {
			l.refused(err)
			continue
		}
		a.returned = time.Now().UnixMicro()
		if c := chargeOf(&grant); c != nil {
			a.at = c.c.at
		}
		l.mu.Lock()
		l.made = append(l.made, a)
		l.mu.Unlock()
		settle := func() { l.settle(a, &grant, r) }
		if r.IntN(4) == 0 {
			l.mu.Lock()
			l.held = append(l.held, settle)
			l.mu.Unlock()
			continue
		}
		time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond) // the call
		settle()
	}
}

// settle settles a call, at no more than it was estimated at.
func (l *traffic) settle(a *admission, grant *quotashare.Grant, r *rand.Rand) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.settled = time.Now().UnixMicro()
	if r.IntN(8) == 0 {
		grant.Cancel()
		return
	}
	a.actual = r.Int64N(a.estimated + 1)
	grant.Settle(a.actual)
}

func (l *traffic) took(w *Window, class quotashare.Class, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slowest = max(l.slowest, d)
	if class == interactive {
		l.asking[w] += d
	}
}

// refused requires that a refusal is of one of the kinds there are.
func (l *traffic) refused(err error) {
	var denied *quotashare.DeniedError
	switch {
	case err == nil, errors.Is(err, ErrAway), errors.Is(err, ErrLost), errors.Is(err, context.DeadlineExceeded):
	case errors.As(err, &denied) && denied.Decision.Reason != quotashare.ReasonNone:
	default:
		l.t.Error(err)
	}
}

// admitted returns how many calls were admitted so far.
func (l *traffic) admitted() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.made)
}

// grows waits until so many more calls were admitted.
func (l *traffic) grows(n int) {
	l.t.Helper()
	before := l.admitted()
	require.Eventually(l.t, func() bool { return l.admitted() >= before+n }, 20*time.Second, time.Millisecond)
}

// fills waits until the quota is used, but for a little.
func (l *traffic) fills() {
	l.t.Helper()
	require.Eventually(l.t, func() bool {
		s := l.replicas[0].Stats()
		return s.Used >= s.Quota/10*9
	}, 20*time.Second, time.Millisecond)
}

// end stops the load, and waits until Redis knows what was settled.
func (l *traffic) end() {
	l.t.Helper()
	l.stop()
	for _, settle := range l.held {
		settle()
	}
	for _, w := range l.replicas {
		delivered(l.t, w)
		require.Zero(l.t, w.Stats().Shared.Dropped)
	}
}

// instants returns between which instants a call was admitted.
func (a *admission) instants() (from, to int64) {
	if a.at != 0 {
		return a.at, a.at
	}
	return a.began, a.returned
}

func byRedis(a *admission) bool { return a.at != 0 }
func byMode(a *admission) bool  { return a.at == 0 }
func byAny(*admission) bool     { return true }

func (l *traffic) count(of func(*admission) bool) (n int) {
	for _, a := range l.made {
		if of(a) {
			n++
		}
	}
	return n
}

// requireNeverAbove requires that those of the calls that are surely in one window, at what each was known to use then,
// are never more than the limit.
func (l *traffic) requireNeverAbove(limit int64, of func(*admission) bool) {
	l.t.Helper()
	window := l.replicas[0].Quota().Window.Microseconds()
	made := slices.DeleteFunc(slices.Clone(l.made), func(a *admission) bool { return !of(a) })
	highest := int64(0)
	for _, newest := range made {
		_, now := newest.instants()
		sum := int64(0)
		for _, a := range made {
			from, to := a.instants()
			switch {
			case from <= now-window || to > now:
			case a.settled <= now:
				sum += a.actual
			default:
				sum += a.estimated
			}
		}
		highest = max(highest, sum)
	}
	require.LessOrEqual(l.t, highest, limit)
}

// requireExact requires that what Redis has in the window is what was admitted less what was settled, to the token, and
// up to so many tokens more.
func (l *traffic) requireExact(more int64) {
	l.t.Helper()
	for _, w := range l.replicas {
		takeBack(l.t, w)
	}
	w := l.replicas[0]
	var a answer
	require.Eventually(l.t, func() (ok bool) {
		var err error
		a, err = w.ask(context.Background(), w.rules.Load(), "usage")
		return err == nil
	}, 10*time.Second, time.Millisecond)
	var want quotashare.ClassTokens
	for _, one := range l.made {
		if one.at != 0 && one.at >= a.epoch && one.at > a.at-w.Quota().Window.Microseconds() {
			want[one.class] += one.actual
		}
	}
	require.NotZero(l.t, want)
	if more == 0 {
		require.Equal(l.t, want, a.usage.Used)
	}
	for class := range want {
		require.GreaterOrEqual(l.t, a.usage.Used[class], want[class])
		require.LessOrEqual(l.t, a.usage.Used[class], want[class]+more)
	}
}

// takeBack sends requests until each slot had one after its last request that got no answer.
func takeBack(t *testing.T, w *Window) {
	t.Helper()
	owing := func() int {
		w.server.mu.Lock()
		defer w.server.mu.Unlock()
		return len(w.server.owing)
	}
	for owing() > 0 {
		_ = used(t, w)
	}
}

// replicasOf returns two Windows of one name in different processes, as it were.
func replicasOf(t *testing.T, addr string, retries int, quota quotashare.Quota, mode Mode, options ...Option) []*Window {
	t.Helper()
	var all []*Window
	for range 2 {
		all = append(all, newShared(t, clientOf(t, addr, retries), quota, mode, options...))
	}
	return all
}

// loadQuota is one that the load fills.
func loadQuota(window time.Duration) quotashare.Quota {
	return quotashare.Quota{Tokens: 4000, Window: window}
}

// modes runs a test for each mode, side by side, each with a server of its own.
func modes(t *testing.T, do func(t *testing.T, mode Mode)) {
	for _, mode := range []Mode{Closed, Open, Local(0.5)} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			do(t, mode)
		})
	}
}

// requireBounds requires what the mode promises of two replicas.
func (l *traffic) requireBounds(mode Mode) {
	l.t.Helper()
	quota := l.replicas[0].Quota().Tokens
	switch mode {
	case Closed:
		require.Zero(l.t, l.count(byMode))
		l.requireNeverAbove(quota, byAny)
	case Open:
		l.requireNeverAbove(2*quota, byRedis)
	default:
		l.requireNeverAbove(quota, byRedis)
		l.requireNeverAbove(quota, byMode)
		l.requireNeverAbove(2*quota, byAny)
	}
}

// requireBack waits until all replicas ask Redis again, and as many calls were admitted as may be.
func (l *traffic) requireBack() {
	l.t.Helper()
	for _, w := range l.replicas {
		require.Eventually(l.t, func() bool { return w.Stats().Shared.Away == nil }, 20*time.Second, time.Millisecond)
	}
	l.grows(40)
	l.fills()
}

// TestScriptFlush is case 88: the scripts are gone, and nobody notices.
func TestScriptFlush(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	l := startLoad(t, replicasOf(t, node.addr, 0, loadQuota(2*time.Second), Closed, WithTimeout(maxTimeout))...)
	l.fills()
	for range 10 {
		l.grows(10)
		require.NoError(t, node.client().ScriptFlush(context.Background()).Err())
	}
	l.grows(10)
	l.end()
	for _, w := range l.replicas {
		require.Zero(t, w.Stats().Shared.Outages)
	}
	l.requireBounds(Closed)
	l.requireExact(0)
}

// TestFlushAll: what was charged is gone. Redis decides nothing for a window, unless the mode is Open.
func TestFlushAll(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, mode Mode) {
		node := newNode(t)
		quota := loadQuota(2 * time.Second)
		l := startLoad(t, replicasOf(t, node.addr, 0, quota, mode, WithTimeout(maxTimeout))...)
		l.fills()
		before := time.Now()
		require.NoError(t, node.client().FlushAll(context.Background()).Err())
		after := time.Now()
		if mode != Open {
			for _, w := range l.replicas {
				lost := func() bool { return errors.Is(w.Stats().Shared.Away, ErrLost) }
				require.Eventually(t, lost, 10*time.Second, time.Millisecond)
			}
		}
		l.requireBack()
		l.end()
		l.requireBounds(mode)
		sooner := l.count(func(a *admission) bool {
			return a.at > after.UnixMicro() && a.at < before.Add(quota.Window).UnixMicro()
		})
		if mode == Open {
			require.NotZero(t, sooner)
			require.Zero(t, l.count(byMode))
		} else {
			require.Zero(t, sooner)
		}
		if mode != Local(0.5) {
			l.requireExact(0)
		}
	})
}

// TestRestart: Redis comes back without anything.
func TestRestart(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, mode Mode) {
		node := newRealNode(t)
		l := startLoad(t, replicasOf(t, node.addr, 0, loadQuota(2*time.Second), mode)...)
		l.fills()
		node.stop()
		node.start()
		l.requireBack()
		l.end()
		l.requireBounds(mode)
		l.requireInTime()
		if mode == Closed {
			l.requireExact(0)
		}
	})
}

// TestRollback: Redis comes back with what it had some time ago.
func TestRollback(t *testing.T) {
	t.Parallel()
	modes(t, func(t *testing.T, mode Mode) {
		node := newRealNode(t, "--dir", t.TempDir())
		l := startLoad(t, replicasOf(t, node.addr, 0, loadQuota(2*time.Second), mode)...)
		l.grows(20)
		require.NoError(t, node.client().Save(context.Background()).Err())
		l.fills()
		node.stop()
		node.start()
		require.Positive(t, node.client().Exists(context.Background(), l.replicas[0].server.key).Val())
		l.requireBack()
		l.end()
		l.requireBounds(mode)
		l.requireInTime()
		if mode == Closed {
			l.requireExact(0)
		}
	})
}

// requireInTime requires that no decision took longer than it may.
func (l *traffic) requireInTime() {
	l.t.Helper()
	require.Less(l.t, l.slowest, l.replicas[0].timeout+slack)
}

// TestPause: Redis stands still, and later does all that it was asked in between.
func TestPause(t *testing.T) {
	t.Parallel()
	pause := 5 * time.Second
	if testing.Short() {
		pause = 2 * time.Second
	}
	modes(t, func(t *testing.T, mode Mode) {
		node := newRealNode(t)
		window := pause + time.Second // what was charged before still counts after
		if mode == Local(0.5) {
			window = time.Second // and here it does not for long, so that there is room
		}
		l := startLoad(t, replicasOf(t, node.addr, 0, loadQuota(window), mode)...)
		l.fills()
		l.mu.Lock()
		clear(l.asking)
		l.mu.Unlock()
		patient := redis.NewClient(&redis.Options{Addr: node.addr, ReadTimeout: time.Minute})
		require.NoError(t, patient.Do(context.Background(), "DEBUG", "SLEEP", pause.Seconds()).Err())
		require.NoError(t, patient.Close())
		l.mu.Lock()
		asking := maps.Clone(l.asking)
		l.mu.Unlock()
		for _, w := range l.replicas {
			require.Less(t, asking[w], time.Second)
			require.NotZero(t, w.Stats().Shared.Outages)
		}
		l.requireBack()
		l.end()
		l.requireBounds(mode)
		l.requireInTime()
		switch mode {
		case Closed:
			l.requireExact(0)
		case Open: // what Redis charged for calls that the mode had admitted stands
			require.NotZero(t, l.count(byMode))
			l.requireExact(int64(len(l.replicas)) * 4 * maxEstimate)
		default:
			require.NotZero(t, l.count(byMode))
		}
	})
}

// TestAnswersAreCutOff: every fifth run of the script is done, but its answer is lost. The client asks again, and gets
// the same answer; or it does not, and what was charged is taken back.
func TestAnswersAreCutOff(t *testing.T) {
	t.Parallel()
	for _, retries := range []int{0, -1} {
		t.Run(fmt.Sprint(retries), func(t *testing.T) {
			t.Parallel()
			p := newProxy(t, newNode(t).addr)
			l := startLoad(t, replicasOf(t, p.addr, retries, loadQuota(2*time.Second), Closed)...)
			l.fills()
			var runs atomic.Int64
			p.set(func(args []string) any {
				if isScript(args) && runs.Add(1)%5 == 0 {
					return cut{}
				}
				return nil
			})
			l.grows(100)
			p.set(nil)
			l.requireBack()
			l.end()
			require.Greater(t, runs.Load(), int64(100))
			l.requireBounds(Closed)
			l.requireExact(0)
		})
	}
}

// TestRequestsThatRunLate: Redis does a request after its caller has given up. What it charges is taken back by the next
// request in its slot, or it comes after that one and charges nothing; but where the call is made, for the mode is Open,
// it stands.
func TestRequestsThatRunLate(t *testing.T) {
	t.Parallel()
	three := []int64{10, 20, 30}
	for _, c := range []struct {
		mode  Mode
		calls []int64 // at once
		stale bool    // the next requests are first
		ends  bool    // the callers' ctx ends, and not the timeout
		late  int64   // what the late requests charge
		want  int64   // in the end
	}{
		{mode: Closed, calls: three, late: 60},
		{mode: Closed, calls: three, stale: true},
		{mode: Closed, calls: three, ends: true, late: 60},
		{mode: Open, calls: three, late: 60, want: 60},
		{mode: Open, calls: []int64{60}, stale: true},
		{mode: Open, calls: three, ends: true, late: 60},
		{mode: Local(0.5), calls: three, late: 60, want: 60}, // by the local Window
		{mode: Local(0.5), calls: three, stale: true, want: 60},
	} {
		t.Run(fmt.Sprintf("%v/stale=%v/ends=%v", c.mode, c.stale, c.ends), func(t *testing.T) {
			node := newNode(t)
			p := newProxy(t, node.addr)
			timeout := 400 * time.Millisecond
			w := newShared(t, p.client(-1), wholeQuota(1000), c.mode, WithTimeout(timeout))
			other := newShared(t, node.client(), wholeQuota(1000), Closed, WithTimeout(maxTimeout))
			admit(t, w, interactive, 100)
			ctx := context.Background()
			if c.ends {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout/2)
				defer cancel()
			}
			held, letGo := p.hold()
			p.set(scripts(held, "acquire"))
			var group sync.WaitGroup
			for _, tokens := range c.calls {
				group.Go(func() {
					grant, d, err := w.TryAcquire(ctx, interactive, tokens)
					switch {
					case c.ends:
						assert.ErrorIs(t, err, context.DeadlineExceeded)
					case c.mode == Closed:
						assert.ErrorIs(t, err, ErrAway)
					default:
						assert.True(t, d.Admitted)
						if c.mode == Open {
							grant.Settle(1)
						}
					}
				})
			}
			group.Wait()
			require.EqualValues(t, len(c.calls), p.held.Load())
			if !c.stale {
				letGo()
				require.Equal(t, 100+c.late, used(t, other)[interactive])
			}
			p.set(nil)
			comesBack(t, w)
			for range c.calls {
				_ = used(t, w)
			}
			delivered(t, w)
			if c.stale {
				letGo()
			}
			require.Equal(t, quotashare.ClassTokens{interactive: 100 + c.want}, used(t, other))
		})
	}
}

// TestACutAnswerIsAskedForAgain: the client sends the request again, and gets the answer that was lost.
func TestACutAnswerIsAskedForAgain(t *testing.T) {
	p := newProxy(t, newNode(t).addr)
	w := newShared(t, p.client(0), wholeQuota(1000), Closed, WithTimeout(maxTimeout))
	admit(t, w, interactive, 1)
	var runs atomic.Int64
	once := func(operation string) {
		runs.Store(0)
		p.set(func(args []string) any {
			if isScript(args, operation) && runs.Add(1) == 1 {
				return cut{}
			}
			return nil
		})
	}
	once("acquire")
	grant := admit(t, w, interactive, 999)
	require.EqualValues(t, 2, runs.Load())
	require.Equal(t, quotashare.ClassTokens{interactive: 1000}, used(t, w))
	once("correct")
	grant.Settle(599)
	delivered(t, w)
	require.EqualValues(t, 2, runs.Load())
	require.Equal(t, quotashare.ClassTokens{interactive: 600}, used(t, w))
	require.Zero(t, w.Stats().Shared.Outages)
}

// TestACorrectionThatRunsTwice: the mailbox has sent it again, and then Redis does the first one, too.
func TestACorrectionThatRunsTwice(t *testing.T) {
	for _, op := range []string{"settle", "charge"} {
		for _, next := range []bool{false, true} { // another correction comes between them
			t.Run(fmt.Sprint(op, "/", next), func(t *testing.T) {
				t.Parallel()
				p := newProxy(t, newNode(t).addr)
				w := newShared(t, p.client(-1), wholeQuota(1000), Local(1))
				grant := admit(t, w, interactive, 100)
				if op == "charge" {
					p.set(scripts(away))
					admit(t, w, interactive, 10)
				}
				held, letGo := p.hold()
				p.set(scripts(held, "correct"))
				want := int64(110)
				if op == "settle" {
					grant.Settle(120) // replaced twice it would be 140
					want = 120
				} else {
					comesBack(t, w)
				}
				require.Eventually(t, func() bool { return p.held.Load() == 1 }, 5*time.Second, time.Millisecond)
				p.set(nil)
				delivered(t, w)
				if next {
					admit(t, w, background, 5).Settle(7)
					delivered(t, w)
				}
				letGo()
				require.Equal(t, want, used(t, w)[interactive])
			})
		}
	}
}
