package redisshare

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// An admitted is one admitted call. Instants are microseconds by the clock of Redis, which is this machine's.
type admitted struct {
	class     quotashare.Class
	at        int64
	estimated int64
	actual    int64
	settled   int64 // when that began, 0 if it did not
}

// holds returns the least that Redis may count of the call at an instant within its window: it cannot know what a call
// used before the call is settled.
func (a *admitted) holds(at int64) int64 {
	if a.settled == 0 || a.settled > at {
		return a.estimated
	}
	return a.actual
}

// chargedAt returns the instant at which a call was charged in Redis.
func chargedAt(g *quotashare.Grant) int64 {
	settler := reflect.ValueOf(g).Elem().FieldByName("settler").Elem()
	return settler.Elem().FieldByName("c").FieldByName("at").Int() // of a *charge
}

// inWindow returns what the calls hold at an instant, by class.
func inWindow(calls []*admitted, at int64, window time.Duration) (held quotashare.ClassTokens) {
	for _, call := range calls {
		if at-window.Microseconds() < call.at && call.at <= at {
			held[call.class] += call.holds(at)
		}
	}
	return held
}

func sumOf(tokens quotashare.ClassTokens) (sum int64) {
	for _, n := range tokens {
		sum += n
	}
	return sum
}

// requireQuota wants no window with more than the quota in it. A sum is highest where a call was just admitted.
func requireQuota(t *testing.T, calls []*admitted, quota quotashare.Quota) {
	t.Helper()
	for _, call := range calls {
		held := inWindow(calls, call.at, quota.Window)
		require.LessOrEqual(t, sumOf(held), quota.Tokens, "tokens in the window up to %d: %v", call.at, held)
	}
}

// newReplica returns one replica's Window of the name, which refuses while Redis is away.
func newReplica(t *testing.T, client redis.Scripter, name string, quota quotashare.Quota, options ...Option) *Window {
	t.Helper()
	w, err := New(client, name, quota, Closed, append([]Option{WithTimeout(maxTimeout)}, options...)...)
	require.NoError(t, err)
	closeAfter(t, w)
	return w
}

// processEnv is set in a process of TestEightProcesses, to the address of Redis.
const processEnv = "REDISSHARE_PROCESS"

func processQuota() quotashare.Quota {
	return quotashare.Quota{Tokens: 100_000, Window: time.Second}
}

func windowOfProcess(t *testing.T, addr string) *Window {
	client := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = client.Close() })
	return newReplica(t, client, "processes", processQuota(),
		WithMaxWait(quotashare.Interactive, -1), WithMaxWait(quotashare.Background, -1))
}

// runProcess is one of the processes. From the lines "batch" and "others" on its input to the end of it, it makes as
// many calls of these classes as are admitted. The calls that are over after the line "exact" are not settled: they
// used what they were estimated at.
func runProcess(t *testing.T, addr string) {
	w := windowOfProcess(t, addr)
	_, err := w.Usage(t.Context())
	require.NoError(t, err)
	// One write is one line, so that what was said by a process that is killed is whole.
	say := func(format string, args ...any) { _, _ = fmt.Printf("process: "+format+"\n", args...) }
	say("up")

	var exact atomic.Bool
	var last atomic.Int64
	var calls, held sync.WaitGroup
	call := func(class quotashare.Class) bool {
		tokens := 200 + rand.Int64N(401)
		grant, err := w.Acquire(context.Background(), class, tokens)
		if err != nil {
			if !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
			return false
		}
		id := last.Add(1)
		say("admitted %d %d %d %d", id, class, chargedAt(&grant), tokens)
		held.Go(func() {
			time.Sleep(50*time.Millisecond + rand.N(100*time.Millisecond))
			if exact.Load() {
				return
			}
			actual := tokens
			if rand.IntN(2) == 0 {
				actual = tokens/2 + rand.Int64N(tokens/2)
			}
			say("settled %d %d %d", id, actual, time.Now().UnixMicro())
			grant.Settle(actual)
		})
		return true
	}
	callers := func(class quotashare.Class) {
		for range 2 {
			calls.Go(func() {
				for call(class) {
				}
			})
		}
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		switch lines.Text() {
		case "batch":
			callers(quotashare.Batch)
		case "others":
			callers(quotashare.Interactive)
			callers(quotashare.Background)
		case "exact":
			exact.Store(true)
		}
	}
	require.NoError(t, w.Close(context.Background()))
	calls.Wait()
	held.Wait()
	shared := w.Stats().Shared
	require.Zero(t, shared.Outages, "Redis was there all the time")
	require.Zero(t, shared.Dropped)
}

// A process is one that runs runProcess.
type process struct {
	cmd   *exec.Cmd
	input io.WriteCloser
	up    chan struct{} // closed when it is ready
	over  chan struct{} // closed when it has said all

	mu    sync.Mutex
	calls map[int64]*admitted
	rest  strings.Builder // what else it said
}

func startProcess(t *testing.T, addr string) *process {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	p := &process{up: make(chan struct{}), over: make(chan struct{}), calls: map[int64]*admitted{}}
	p.cmd = exec.Command(self, "-test.run=^"+t.Name()+"$", "-test.timeout=1m")
	p.cmd.Env = append(os.Environ(), processEnv+"="+addr)
	p.cmd.Stderr = os.Stderr
	output, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.input, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go p.listen(output)
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
			<-p.over
			_ = p.cmd.Wait()
		}
	})
	return p
}

func (p *process) listen(output io.Reader) {
	defer close(p.over)
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		p.hear(lines.Text())
	}
}

func (p *process) hear(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var id, a, b, c int64
	if line == "process: up" {
		close(p.up)
	} else if n, _ := fmt.Sscanf(line, "process: admitted %d %d %d %d", &id, &a, &b, &c); n == 4 {
		p.calls[id] = &admitted{class: quotashare.Class(a), at: b, estimated: c, actual: c}
	} else if n, _ := fmt.Sscanf(line, "process: settled %d %d %d", &id, &a, &b); n == 3 {
		p.calls[id].actual, p.calls[id].settled = a, b
	} else {
		p.rest.WriteString(line + "\n")
	}
}

// holds reports whether a call of the process stands unsettled since the instant.
func (p *process) holds(since int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, call := range p.calls {
		if call.at >= since && call.settled == 0 {
			return true
		}
	}
	return false
}

func (p *process) tell(t *testing.T, line string) {
	t.Helper()
	_, err := io.WriteString(p.input, line+"\n")
	require.NoError(t, err)
}

// end waits for the process, whose input or life has ended.
func (p *process) end() error {
	<-p.over
	return p.cmd.Wait()
}

// TestEightProcesses: processes that make calls of all classes, more than fit, are admitted no more than the quota
// together, and each class its share, though batch had borrowed before; of one that is killed nothing is left a window
// later.
func TestEightProcesses(t *testing.T) {
	if addr := os.Getenv(processEnv); addr != "" {
		runProcess(t, addr)
		return
	}
	addr := newRealNode(t).addr // an embedded one is too slow
	quota := processQuota()
	second := quota.Window.Microseconds()
	windows := int64(3)
	if testing.Short() {
		windows = 2
	}
	var processes []*process
	for range 8 {
		processes = append(processes, startProcess(t, addr))
	}
	for _, p := range processes {
		select {
		case <-p.up:
		case <-p.over:
			require.Fail(t, "a process did not start", p.rest.String())
		}
	}

	// What Redis says is in the window, again and again.
	type sample struct {
		at   int64
		used quotashare.ClassTokens
	}
	var samples []sample
	w := windowOfProcess(t, addr)
	look := func() int64 {
		a, err := w.ask(t.Context(), w.rules.Load(), "usage")
		require.NoError(t, err)
		samples = append(samples, sample{a.at, a.usage.Used})
		return a.at
	}
	lookUntil := func(at int64) {
		for look() < at {
			time.Sleep(20 * time.Millisecond)
		}
	}
	tellAll := func(line string) int64 {
		for _, p := range processes {
			p.tell(t, line)
		}
		return look()
	}
	lookUntil(tellAll("batch") + second) // it borrows
	begun := tellAll("others")
	lookUntil(begun + windows*second)
	exact := tellAll("exact") + second/2
	lookUntil(exact + second)

	killed := processes[3]
	require.Eventually(t, func() bool { return killed.holds(exact) }, 5*time.Second, time.Millisecond)
	before := look()
	require.NoError(t, killed.cmd.Process.Kill())
	require.Error(t, killed.end())
	look()
	after := look() // what was on its way as the process died, Redis has got before the second of these
	lookUntil(after + 2*second)

	// What is under way is answered, and said, before a process ends.
	var living, all []*admitted
	for _, p := range processes {
		if p != killed {
			require.NoError(t, p.input.Close())
		}
	}
	for i, p := range processes {
		if p != killed {
			require.NoError(t, p.end(), "process %d: %s", i, &p.rest)
		}
		require.NotEmpty(t, p.calls, "process %d had a part", i)
		for _, call := range p.calls {
			all = append(all, call)
			if p != killed {
				living = append(living, call)
			}
		}
	}
	requireQuota(t, all, quota)

	var inexact int64 // the last instant at which a call was charged that used less than that
	for _, call := range all {
		if call.actual < call.estimated {
			inexact = max(inexact, call.at)
		}
	}
	var full, without int64 // samples, and what the calls held at them
	var use, back quotashare.ClassTokens
	for _, s := range samples {
		require.LessOrEqual(t, sumOf(s.used), quota.Tokens)
		held := inWindow(all, s.at, quota.Window)
		for class, tokens := range held { // the process that was killed may not have said all
			require.GreaterOrEqual(t, s.used[class], tokens, "%v at %d", quotashare.Class(class), s.at)
		}
		if begun+2*second <= s.at && s.at <= before {
			full++
			for class, tokens := range held {
				use[class] += tokens
			}
		}
		if s.at >= max(after, inexact)+second {
			held := inWindow(living, s.at, quota.Window)
			require.Equal(t, held, s.used, "at %d, a window after a process was killed", s.at)
			without++
			for class, tokens := range held {
				back[class] += tokens
			}
		}
	}
	require.Greater(t, float64(sumOf(use)), 0.9*float64(full*quota.Tokens), "tokens used")
	for class, share := range quotashare.DefaultShares {
		part := float64(use[class]) / float64(sumOf(use))
		require.InDelta(t, share, part, 0.03, "%v of what was used", quotashare.Class(class))
	}
	require.NotZero(t, without)
	require.Greater(t, float64(sumOf(back)), 0.9*float64(without*quota.Tokens), "tokens used a window after the kill")
}

// TestCase85LocalCheckSharedWrite: of eleven calls by each of three replicas, all at once, as many are admitted as the
// quota has tokens.
func TestCase85LocalCheckSharedWrite(t *testing.T) {
	n := newNode(t)
	quota := quotashare.Quota{Tokens: 10, Window: time.Minute, Floors: quotashare.NoFloors, Pace: 1}
	var replicas []*Window
	for range 3 {
		replicas = append(replicas, newReplica(t, n.client(), "case-85", quota))
	}
	var reasons [quotashare.NumReasons]atomic.Int64
	var group sync.WaitGroup
	begin := make(chan struct{})
	for _, w := range replicas {
		for range 11 {
			group.Go(func() {
				<-begin
				_, d, err := w.TryAcquire(t.Context(), quotashare.Interactive, 1)
				if err != nil {
					t.Error(err)
				}
				reasons[d.Reason].Add(1)
			})
		}
	}
	close(begin)
	group.Wait()
	require.EqualValues(t, 7, reasons[quotashare.ReasonOwnShare].Load())
	require.EqualValues(t, 3, reasons[quotashare.ReasonBorrowed].Load())
	require.EqualValues(t, 23, reasons[quotashare.ReasonQuotaFull].Load())
	for _, w := range replicas {
		usage, err := w.Usage(t.Context())
		require.NoError(t, err)
		require.Equal(t, quotashare.ClassTokens{quotashare.Interactive: 10}, usage.Used)
	}
}
