package sdktest

import (
	"context"

	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A recorder is a Window that records its grants. Its TryAcquire has a context, as that of a limiter elsewhere has.
type recorder struct {
	*quotashare.Window

	mu     sync.Mutex
	grants []*recorded
}

// A recorded is a grant. NewGrant lets at most one of its methods through.
type recorded struct {
	grant  quotashare.Grant
	call   string
	before time.Time // the admission was between before and after
	after  time.Time

	mu        sync.Mutex
	tokens    int64 // the estimate, and what it is settled with
	settled   int
	cancelled int
}

func (r *recorded) Settle(tokens int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settled++
	if tokens >= 0 {
		r.tokens = tokens
	}
	r.grant.Settle(tokens)
}

func (r *recorded) Cancel() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cancelled++
	r.grant.Cancel()
}

type callKey struct{}

func (r *recorder) record(ctx context.Context, g *recorded) quotashare.Grant {
	g.after = time.Now()
	g.call, _ = ctx.Value(callKey{}).(string)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.grants = append(r.grants, g)
	return quotashare.NewGrant(g)
}

func (r *recorder) Acquire(ctx context.Context, class quotashare.Class, tokens int64) (quotashare.Grant, error) {
	g := &recorded{before: time.Now(), tokens: tokens}
	var err error
	if g.grant, err = r.Window.Acquire(ctx, class, tokens); err != nil {
		return quotashare.Grant{}, err
	}
	return r.record(ctx, g), nil
}

func (r *recorder) TryAcquire(
	ctx context.Context, class quotashare.Class, tokens int64,
) (quotashare.Grant, quotashare.Decision, error) {
	g := &recorded{before: time.Now(), tokens: tokens}
	var d quotashare.Decision
	if g.grant, d = r.Window.TryAcquire(class, tokens); !d.Admitted {
		return quotashare.Grant{}, d, nil
	}
	return r.record(ctx, g), d, nil
}

// A load is many calls at once, of all classes, by one SDK.
type load struct {
	name     string
	reserves bool
	profile  llmhttp.Profile
	quotas   [numLedgers]int64
	call     func(ctx context.Context, r *rig, text string, tokens int64, stream bool) error
}

const loadCalls = 200

func loadOpenAI(ctx context.Context, r *rig, text string, tokens int64, stream bool) error {
	call := chat
	if stream {
		call = chatStream
	}
	_, err := call(ctx, r, chatParams(text, tokens))
	return err
}

func loadAnthropic(ctx context.Context, r *rig, text string, tokens int64, stream bool) error {
	call := message
	if stream {
		call = messageStream
	}
	_, err := call(ctx, r, messageParams(text, tokens))
	return err
}

// The quotas are a half to a third of what the calls ask for, so that they take some windows.
var loads = []load{
	{"used", false, llmhttp.Profile{}, [numLedgers]int64{total: 20_000}, loadOpenAI},
	{"reserved", true, llmhttp.OpenAI, [numLedgers]int64{total: 25_000, requests: 100}, loadOpenAI},
	{
		"anthropic", false, llmhttp.Anthropic, [numLedgers]int64{input: 9_000, output: 7_500, requests: 120},
		loadAnthropic,
	},
}

// run makes the calls and returns the recorders, by ledger. Who is refused comes back when told, as a worker does.
func (l load) run(
	t *testing.T, p *provider, base http.RoundTripper, url string, waits bool,
) (recorders [numLedgers]*recorder) {
	p.reserves = l.reserves
	r := &rig{provider: p, transport: &llmhttp.Transport{Profile: l.profile}}
	r.transport.Base = roundTripper(func(q *http.Request) (*http.Response, error) {
		q = q.Clone(q.Context())
		q.Header.Set("X-Call", q.Context().Value(callKey{}).(string))
		return base.RoundTrip(q)
	})
	for i, tokens := range l.quotas {
		p.ledgers[i].quota = tokens
		if tokens == 0 {
			continue
		}
		var options []quotashare.Option
		for class := range quotashare.Class(quotashare.NumClasses) {
			if !waits {
				options = append(options, quotashare.WithMaxWait(class, 0))
			}
		}
		quota := quotashare.Quota{Tokens: tokens, Window: p.window, Floors: quotashare.NoFloors}
		window, err := quotashare.NewWindow(quota, options...)
		require.NoError(t, err)
		recorders[i] = &recorder{Window: window}
		r.transport.Limits = append(r.transport.Limits, llmhttp.Limit{Limiter: recorders[i], Unit: units[i]})
	}
	r.openai, r.anthropic = clients(&http.Client{Transport: r.transport}, url)

	sources := []quotashare.Source{quotashare.SourceAPI, quotashare.SourceScheduler, quotashare.SourceEval}
	var wait sync.WaitGroup
	for i := range loadCalls {
		ctx := context.WithValue(t.Context(), callKey{}, strconv.Itoa(i))
		if i%4 < len(sources) {
			ctx = quotashare.WithSource(ctx, sources[i%4])
		}
		wait.Go(func() {
			text := fmt.Sprint(i, strings.Repeat(" and then", i*7%50))
			for {
				err := l.call(ctx, r, text, 50+int64(i*13%100), i%3 == 0)
				if err == nil {
					return
				}
				var wait int
				status, answer, ok := refusal(err)
				if ok {
					wait, err = strconv.Atoi(answer.Header.Get("Retry-After-Ms"))
				}
				if !assert.NoError(t, err) || !assert.Equal(t, http.StatusTooManyRequests, status) {
					return
				}
				time.Sleep(time.Duration(wait) * time.Millisecond)
			}
		})
	}
	wait.Wait()
	assert.GreaterOrEqual(t, r.transport.Unstamped(), uint64(loadCalls/4))
	return recorders
}

// check asserts that each grant was closed once, and that what is charged is what the server has counted.
func (l load) check(t *testing.T, p *provider, recorders [numLedgers]*recorder) {
	for i, r := range recorders {
		if r == nil {
			continue
		}
		charged, stood := int64(0), 0
		for _, g := range r.grants {
			if g.cancelled > 0 { // another limit had no room
				continue
			}
			charged += g.tokens
			stood++
			assert.Equal(t, 1, g.settled, "ledger %d: a grant that was not closed once", i)
		}
		assert.Equal(t, loadCalls, stood)
		assert.Equal(t, p.counted(i), charged, "ledger %d", i)
		for class, stats := range r.Stats().Classes {
			assert.Positive(t, stats.Admitted, "class %d", class)
			assert.Zero(t, stats.Waiting)
		}
	}
}

// A span is a call whose admission was not before from, and not after to.
type span struct {
	from, to time.Time
	tokens   int64
}

// surely returns the most that is known to have been admitted in one interval [t, t + window): a call is in it if all
// of its span is.
func surely(spans []span, window time.Duration) (most int64) {
	for _, first := range spans {
		sum := int64(0)
		for _, s := range spans {
			if !s.from.Before(first.from) && s.to.Sub(first.from) < window {
				sum += s.tokens
			}
		}
		most = max(most, sum)
	}
	return most
}

// TestLoad makes the calls on loopback. The guarantee is on the times of admission, and the server counts a call when
// it has come, some time later: on a busy machine as late as a good part of the window. So a call is held against the
// quota of an interval if it was surely admitted within it: it was asked for after the interval began, and came to the
// server before the interval was over. It is not, if it lies across a border: then nobody can tell. Nobody waits inside
// Acquire here, so that asking is but a moment before the admission.
func TestLoad(t *testing.T) {
	for _, l := range loads {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			p := &provider{window: time.Second, silent: true}
			url := start(t, p)
			base := &http.Transport{MaxIdleConnsPerHost: loadCalls}
			defer base.CloseIdleConnections()
			warm(t, base, url)
			recorders := l.run(t, p, base, url, false)
			l.check(t, p, recorders)

			for i, r := range recorders {
				if r == nil {
					continue
				}
				came := map[string]entry{}
				for _, e := range p.ledgers[i].entries {
					came[e.call] = e
				}
				var admitted, counted []span
				for _, g := range r.grants {
					if g.cancelled == 0 {
						admitted = append(admitted, span{g.before, g.after, g.tokens})
						counted = append(counted, span{g.before, came[g.call].at, came[g.call].tokens})
					}
				}
				here, there := surely(admitted, p.window), surely(counted, p.window)
				assert.LessOrEqual(t, here, l.quotas[i], "admitted, ledger %d", i)
				assert.LessOrEqual(t, there, l.quotas[i], "counted by the server, ledger %d", i)
				t.Log("ledger", i, "surely admitted", here, "surely counted", there, "of", l.quotas[i])
			}
		})
	}
}

// warm opens the connections, so that calls are not late for that.
func warm(t *testing.T, base *http.Transport, url string) {
	var ready, wait sync.WaitGroup
	ready.Add(loadCalls)
	for range loadCalls {
		wait.Go(func() {
			answer, err := base.RoundTrip(httptest.NewRequest(http.MethodGet, url+"/v1/models", nil))
			ready.Done()
			if assert.NoError(t, err) {
				ready.Wait() // each keeps its connection until all have one
				_, _ = io.Copy(io.Discard, answer.Body)
				_ = answer.Body.Close()
			}
		})
	}
	wait.Wait()
}

// TestLoadWaiting makes the calls on loopback with the patience of their classes. It asserts on grants and sums alone:
// when a call that waited was admitted cannot be seen from outside. TestLoadExact can.
func TestLoadWaiting(t *testing.T) {
	for _, l := range loads {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			p := &provider{window: time.Second}
			base := &http.Transport{MaxIdleConnsPerHost: loadCalls}
			defer base.CloseIdleConnections()
			l.check(t, p, l.run(t, p, base, start(t, p), true))
		})
	}
}

// TestLoadExact makes the calls in virtual time, where a call comes at the instant of its admission: no window of the
// server's is ever above a quota, by not a token, and it refuses nothing. What the server tells of its quotas is not
// needed for that, and does no harm.
func TestLoadExact(t *testing.T) {
	for i := range 2 * len(loads) {
		l, silent := loads[i/2], i%2 == 0
		t.Run(l.name+map[bool]string{false: "/told", true: "/silent"}[silent], func(t *testing.T) {
			p := &provider{window: time.Minute, refuses: true, silent: silent}
			p.takes = func(hash uint64) time.Duration { return time.Duration(hash % uint64(20*time.Second)) }
			synctest.Test(t, func(t *testing.T) {
				base := startPipes(t, p)
				l.check(t, p, l.run(t, p, base, "http://provider", true))
				p.check(t)
				for i, ledger := range p.ledgers {
					if ledger.quota > 0 {
						most := peak(ledger.entries, p.window)
						assert.Greater(t, most, ledger.quota/2, "ledger %d: too little traffic to show anything", i)
						t.Log("ledger", i, "at most", most, "of", ledger.quota)
					}
				}
			})
		})
	}
}
