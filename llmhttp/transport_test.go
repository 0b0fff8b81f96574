package llmhttp_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/url"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	. "github.com/quotashare/quotashare/llmhttp"
)

// A base is a provider without a socket.
type base func(*http.Request) (*http.Response, error)

func (b base) RoundTrip(r *http.Request) (*http.Response, error) { return b(r) }

// serve returns a base that reads and closes the body of each request, as each must, and answers as the handler does.
func serve(handler http.HandlerFunc) base {
	return func(r *http.Request) (*http.Response, error) {
		got := r.Clone(r.Context())
		if r.Body != nil {
			body, err := io.ReadAll(r.Body)
			if err = errors.Join(err, r.Body.Close()); err != nil {
				return nil, err
			}
			got.Body = io.NopCloser(bytes.NewReader(body))
		}
		recorder := httptest.NewRecorder()
		handler(recorder, got)
		answer := recorder.Result()
		answer.Request = r
		return answer, nil
	}
}

// says returns a base that always gives the same answer. The header is names and values in turn.
func says(status int, body string, header ...string) base {
	return serve(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i < len(header); i += 2 {
			w.Header()[http.CanonicalHeaderKey(header[i])] = []string{header[i+1]}
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	})
}

// fails returns a base that always gives the same error.
func fails(err error) base {
	return func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, err
	}
}

const used60 = `{"usage":{"prompt_tokens":40,"completion_tokens":20,"total_tokens":60}}`

// A tally is a Limiter that admits everything, unless it is told to fail, and remembers all that it was asked and told.
type tally struct {
	err error

	mu        sync.Mutex
	grants    []*tallied
	observed  []int64
	ages      []time.Duration
	throttled []time.Duration
}

// tallied is a call that a tally admitted.
type tallied struct {
	tally     *tally
	class     quotashare.Class
	estimate  int64
	settled   []int64
	cancelled int
}

func (t *tallied) Settle(actual int64) {
	t.tally.mu.Lock()
	defer t.tally.mu.Unlock()
	t.settled = append(t.settled, actual)
}

func (t *tallied) Cancel() {
	t.tally.mu.Lock()
	defer t.tally.mu.Unlock()
	t.cancelled++
}

func (t *tally) Acquire(_ context.Context, class quotashare.Class, estimate int64) (quotashare.Grant, error) {
	if t.err != nil {
		return quotashare.Grant{}, t.err
	}
	return quotashare.NewGrant(t.admit(class, estimate)), nil
}

func (t *tally) TryAcquire(class quotashare.Class, estimate int64) (quotashare.Grant, quotashare.Decision) {
	return quotashare.NewGrant(t.admit(class, estimate)), admitted
}

func (t *tally) admit(class quotashare.Class, estimate int64) *tallied {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := &tallied{tally: t, class: class, estimate: estimate}
	t.grants = append(t.grants, one)
	return one
}

var admitted = quotashare.Decision{Admitted: true, Reason: quotashare.ReasonOwnShare}

func (t *tally) Observe(remaining int64, sent time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.observed, t.ages = append(t.observed, remaining), append(t.ages, sent)
}

func (t *tally) Throttled(retryAfter time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.throttled = append(t.throttled, retryAfter)
}

// estimates returns what was asked for, call by call.
func (t *tally) estimates() (tokens []int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, one := range t.grants {
		tokens = append(tokens, one.estimate)
	}
	return tokens
}

// charge returns what the calls were charged in the end. It is an error to close a grant twice.
func (t *tally) charge(tb testing.TB) (tokens int64) {
	tb.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, one := range t.grants {
		require.LessOrEqual(tb, len(one.settled)+one.cancelled, 1, "a grant is closed once")
		switch {
		case len(one.settled) > 0 && one.settled[0] >= 0:
			tokens += one.settled[0]
		case one.cancelled == 0:
			tokens += one.estimate
		}
	}
	return tokens
}

// quotaOf is a quota all of which one class may use at once.
func quotaOf(class quotashare.Class, tokens int64) quotashare.Quota {
	quota := quotashare.Quota{Tokens: tokens, Floors: quotashare.NoFloors, Pace: 1}
	quota.Shares[class] = 1
	return quota
}

func newWindow(t testing.TB, quota quotashare.Quota, options ...quotashare.Option) *quotashare.Window {
	t.Helper()
	w, err := quotashare.NewWindow(quota, options...)
	require.NoError(t, err)
	return w
}

// used returns the tokens that all classes hold of a Window.
func used(w *quotashare.Window) (tokens int64) {
	for _, n := range w.Usage().Used {
		tokens += n
	}
	return tokens
}

func take(t testing.TB, w *quotashare.Window, class quotashare.Class, tokens int64) {
	t.Helper()
	_, d := w.TryAcquire(class, tokens)
	require.True(t, d.Admitted)
}

func interactive() context.Context {
	return quotashare.WithSource(context.Background(), quotashare.SourceAPI)
}

const chat = "http://provider.test/v1/chat/completions"

func newRequest(ctx context.Context, t testing.TB, url, body string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	return r
}

// send sends a chat of an interactive call.
func send(t testing.TB, transport *Transport, body string) *http.Response {
	t.Helper()
	answer, err := transport.RoundTrip(newRequest(interactive(), t, chat, body))
	require.NoError(t, err)
	return answer
}

// readAll reads an answer to its end and closes it.
func readAll(t testing.TB, answer *http.Response) string {
	t.Helper()
	body, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	return string(body)
}

// estimated makes every call one of so many tokens of input.
func estimated(tokens int64) func(*http.Request, []byte) Tokens {
	return func(*http.Request, []byte) Tokens { return Tokens{Input: tokens} }
}

// A trackedBody is the body of a request that knows whether it was closed, and that can fail.
type trackedBody struct {
	io.Reader
	closed int
	err    error // of Close
}

func (b *trackedBody) Close() error {
	b.closed++
	return b.err
}

// outcomes are transports, each with an end of its own for a request.
func outcomes(t testing.TB) map[string]*Transport {
	full := newWindow(t, quotaOf(quotashare.Interactive, 1000))
	take(t, full, quotashare.Interactive, 1000)
	ok := says(200, used60)
	return map[string]*Transport{
		"answered":         {Base: ok, Limits: []Limit{{Limiter: &tally{}}}},
		"answered, 400":    {Base: says(400, `{}`), Limits: []Limit{{Limiter: &tally{}}}},
		"answered, 429":    {Base: says(429, `{}`), Limits: []Limit{{Limiter: &tally{}}}},
		"no limits":        {Base: ok},
		"not metered":      {Base: ok, Meters: func(*http.Request) bool { return false }},
		"error of Base":    {Base: fails(io.ErrUnexpectedEOF), Limits: []Limit{{Limiter: &tally{}}}},
		"error of Limiter": {Base: ok, Limits: []Limit{{Limiter: &tally{err: io.ErrNoProgress}}}},
		"no Limiter":       {Base: ok, Limits: []Limit{{}}},
		"refused":          {Base: ok, Limits: []Limit{{Limiter: full}}},
		"refused as error": {Base: ok, Limits: []Limit{{Limiter: full}}, DeniedAsError: true},
		"refused for good": {Base: ok, Limits: []Limit{{Limiter: full}}, Estimate: estimated(1001)},
	}
}

func TestARequestIsNotModified(t *testing.T) {
	const body = `{"model":"m","max_tokens":5}`
	bodies := map[string]func(*http.Request){
		"that can be read again": func(*http.Request) {},
		"that can be read once": func(r *http.Request) {
			r.Body, r.GetBody = &trackedBody{Reader: strings.NewReader(body)}, nil
		},
		"of unknown length": func(r *http.Request) {
			r.Body, r.GetBody = &trackedBody{Reader: strings.NewReader(body)}, nil
			r.ContentLength, r.TransferEncoding = -1, []string{"chunked"}
		},
		"of none": func(r *http.Request) { r.Body, r.GetBody, r.ContentLength = nil, nil, 0 },
		"of nothing": func(r *http.Request) {
			r.Body, r.GetBody, r.ContentLength = http.NoBody, nil, 0
		},
	}
	for name, change := range bodies {
		for outcome, transport := range outcomes(t) {
			t.Run(name+"/"+outcome, func(t *testing.T) {
				r := newRequest(interactive(), t, chat+"?a=b#c", body)
				r.Header = http.Header{"Authorization": {"Bearer k"}, "X-Many": {"1", "2"}}
				r.Trailer = http.Header{"X-After": nil}
				r.Form = url.Values{"a": {"b"}}
				change(r)
				before, header, address := *r, r.Header.Clone(), *r.URL
				answer, err := transport.RoundTrip(r)
				if err == nil {
					readAll(t, answer)
				}

				after := *r
				assert.Equal(t, before.GetBody == nil, after.GetBody == nil)
				assert.True(t, before.Body == after.Body, "the same body")
				assert.Same(t, before.URL, after.URL)
				assert.Equal(t, before.Context(), after.Context())
				assert.Equal(t, header, after.Header)
				assert.Equal(t, address, *after.URL)
				assert.Equal(t, http.Header{"X-After": nil}, after.Trailer)
				before.GetBody, after.GetBody = nil, nil // functions are never equal
				before.Body, after.Body = nil, nil       // and this one was read
				assert.True(t, reflect.DeepEqual(before, after))
			})
		}
	}
}

func TestABodyIsAlwaysClosed(t *testing.T) {
	bad := errors.New("bad body")
	ok := func() *trackedBody { return &trackedBody{Reader: strings.NewReader(`{"model":"m"}`)} }
	broken := func() *trackedBody { return &trackedBody{Reader: iotest.ErrReader(bad)} }
	unclosable := func() *trackedBody { return &trackedBody{Reader: strings.NewReader(`{}`), err: bad} }
	ends := outcomes(t)
	ends["context ended"] = &Transport{
		Base:   says(200, used60),
		Limits: []Limit{{Limiter: newWindow(t, quotaOf(quotashare.Interactive, 1000))}},
	}
	for outcome, transport := range ends {
		for name, body := range map[string]func() *trackedBody{"ok": ok, "broken": broken, "unclosable": unclosable} {
			for _, once := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/%s/once %v", outcome, name, once), func(t *testing.T) {
					ctx, cancel := context.WithCancel(interactive())
					defer cancel()
					if outcome == "context ended" {
						cancel()
					}
					r := newRequest(ctx, t, chat, "")
					bodies := []*trackedBody{ok()}
					if once {
						bodies[0] = body()
					}
					r.Body, r.ContentLength, r.GetBody = bodies[0], -1, nil
					if !once {
						r.GetBody = func() (io.ReadCloser, error) {
							bodies = append(bodies, body())
							return bodies[len(bodies)-1], nil
						}
					}
					answer, err := transport.RoundTrip(r)
					if name != "ok" && outcome != "not metered" {
						require.ErrorIs(t, err, bad)
					}
					if err == nil {
						readAll(t, answer)
					}
					for i, b := range bodies {
						assert.Equal(t, 1, b.closed, "body %d", i)
					}
				})
			}
		}
	}
	t.Run("GetBody fails", func(t *testing.T) {
		r := newRequest(interactive(), t, chat, "")
		b := ok()
		r.Body, r.GetBody = b, func() (io.ReadCloser, error) { return nil, bad }
		limiter := &tally{}
		transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: limiter}}}
		_, err := transport.RoundTrip(r)
		require.ErrorIs(t, err, bad)
		assert.Equal(t, 1, b.closed)
		assert.Empty(t, limiter.grants)
	})
}

// An SDK that tries again sends the same request with a new body. Each attempt is acquired, and each is whole.
func TestEachAttemptOfOneRequestIsWholeAndAcquired(t *testing.T) {
	const body = `{"max_tokens":7,"messages":[]}`
	var got []string
	limiter := &tally{}
	transport := &Transport{
		Base: serve(func(w http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			got = append(got, string(b))
			w.WriteHeader(http.StatusServiceUnavailable)
		}),
		Limits: []Limit{{limiter, OutputTokens}},
	}
	r := newRequest(interactive(), t, chat, body)
	for range 3 {
		answer, err := transport.RoundTrip(r)
		require.NoError(t, err)
		readAll(t, answer)
		r.Body, err = r.GetBody()
		require.NoError(t, err)
	}
	assert.Equal(t, []string{body, body, body}, got)
	assert.Equal(t, []int64{7, 7, 7}, limiter.estimates())
}

// A body that can be read only once is sent whole, of the length that the caller gave it, and Base may read it again
// where a connection broke.
func TestABodyThatCanBeReadOnceIsSentWhole(t *testing.T) {
	type request struct {
		body     string
		length   int64
		encoding []string
	}
	var got request
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = request{string(body), r.ContentLength, r.TransferEncoding}
		_, _ = io.WriteString(w, used60)
	}))
	defer server.Close()
	limiter := &tally{}
	transport := &Transport{Base: server.Client().Transport, Limits: []Limit{{limiter, OutputTokens}}}
	client := &http.Client{Transport: transport}
	body := `{"max_tokens":9,"input":"` + strings.Repeat("word ", 1<<18) + `"}`
	chunked := []string{"chunked"}
	for length, want := range map[int64]request{
		int64(len(body)): {body, int64(len(body)), nil},
		0:                {body, -1, chunked}, // as with any Transport, a body of length 0 is one of unknown length
		-1:               {body, -1, chunked},
	} {
		r := newRequest(interactive(), t, server.URL+"/v1/responses", "")
		r.Body, r.GetBody, r.ContentLength = io.NopCloser(iotest.HalfReader(strings.NewReader(body))), nil, length
		answer, err := client.Do(r)
		require.NoError(t, err)
		readAll(t, answer)
		assert.Equal(t, want, got)
	}
	assert.Equal(t, []int64{9, 9, 9}, limiter.estimates(), "a long body is estimated whole")

	transport.Base = base(func(r *http.Request) (*http.Response, error) {
		for range 2 {
			again, err := r.GetBody()
			require.NoError(t, err)
			b, err := io.ReadAll(again)
			require.NoError(t, err)
			assert.Equal(t, "{}", string(b))
		}
		return nil, io.ErrUnexpectedEOF
	})
	r := newRequest(interactive(), t, chat, "")
	r.Body, r.GetBody = io.NopCloser(strings.NewReader("{}")), nil
	_, err := transport.RoundTrip(r)
	require.Equal(t, io.ErrUnexpectedEOF, err)

	// A length that is not true is Base's to find.
	transport.Base = server.Client().Transport
	r = newRequest(interactive(), t, server.URL+"/v1/responses", "")
	r.Body, r.GetBody, r.ContentLength = io.NopCloser(strings.NewReader("{}")), nil, 5
	_, err = transport.RoundTrip(r)
	require.ErrorContains(t, err, "ContentLength")
}

func TestExpectContinue(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "" {
			w.WriteHeader(http.StatusUnauthorized) // without reading, so the body is never sent
			return
		}
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprintf(w, `{"got":%q,"usage":{"total_tokens":60}}`, body)
	}))
	defer server.Close()
	under := server.Client().Transport.(*http.Transport).Clone()
	under.ExpectContinueTimeout = time.Hour // the server's word is waited for
	defer under.CloseIdleConnections()
	limiter := &tally{}
	transport := &Transport{Base: under, Limits: []Limit{{Limiter: limiter}}}
	for _, once := range []bool{false, true} {
		for _, key := range []string{"k", ""} {
			r := newRequest(interactive(), t, server.URL+"/v1/responses", "hello")
			if once {
				r.Body, r.GetBody = io.NopCloser(strings.NewReader("hello")), nil
			}
			r.Header.Set("Expect", "100-continue")
			want := ""
			if key != "" {
				r.Header.Set("Authorization", key)
				want = `{"got":"hello","usage":{"total_tokens":60}}`
			}
			answer, err := transport.RoundTrip(r)
			require.NoError(t, err)
			assert.Equal(t, want, readAll(t, answer))
		}
	}
	assert.EqualValues(t, 2*60, limiter.charge(t))
}

func TestHTTP2(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, 2, r.ProtoMajor)
		w.Header().Set("Content-Type", "text/event-stream")
		for _, event := range []string{`data: {"choices":[]}`, `data: ` + used60, `data: [DONE]`} {
			_, _ = io.WriteString(w, event+"\n\n")
			w.(http.Flusher).Flush()
		}
	}))
	server.EnableHTTP2 = true
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of bad handshakes
	server.StartTLS()
	defer server.Close()
	limiter := &tally{}
	transport := &Transport{Base: server.Client().Transport, Limits: []Limit{{Limiter: limiter}}}
	client := &http.Client{Transport: transport}
	var calls sync.WaitGroup
	for range 20 {
		calls.Go(func() {
			answer, err := client.Do(newRequest(interactive(), t, server.URL+"/v1/chat/completions", `{}`))
			if assert.NoError(t, err) {
				assert.Equal(t, 2, answer.ProtoMajor)
				_, err = io.Copy(io.Discard, answer.Body)
				assert.NoError(t, err)
				assert.NoError(t, answer.Body.Close())
			}
		})
	}
	calls.Wait()
	assert.Len(t, limiter.grants, 20)
	assert.EqualValues(t, 20*60, limiter.charge(t))

	transport.Base = &http.Transport{Protocols: new(http.Protocols), TLSClientConfig: &tls.Config{}}
	transport.Base.(*http.Transport).Protocols.SetHTTP2(true)
	_, err := client.Do(newRequest(interactive(), t, server.URL+"/v1/chat/completions", `{}`))
	require.Error(t, err, "its certificate is not known")
	assert.EqualValues(t, 20*60, limiter.charge(t), "and so nothing was sent")
}

func TestConcurrentUse(t *testing.T) {
	w := newWindow(t, quotaOf(quotashare.Interactive, 1<<40))
	requests := newWindow(t, quotaOf(quotashare.Interactive, 1<<40))
	transport := &Transport{
		Base: serve(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			_, _ = fmt.Fprintf(w, `{"usage":{"prompt_tokens":0,"completion_tokens":%d}}`, len(body))
		}),
		Limits: []Limit{{Limiter: w}, {requests, Requests}},
	}
	const callers, calls = 16, 50
	var all sync.WaitGroup
	for n := range callers {
		all.Go(func() {
			for i := range calls {
				r := newRequest(interactive(), t, chat, strings.Repeat(" ", n+1))
				if i%2 == 0 {
					r = newRequest(context.Background(), t, chat, strings.Repeat(" ", n+1))
				}
				answer, err := transport.RoundTrip(r)
				if assert.NoError(t, err) && assert.Equal(t, 200, answer.StatusCode) {
					_, _ = io.Copy(io.Discard, answer.Body)
				}
			}
		})
	}
	all.Wait()
	assert.EqualValues(t, calls*callers*(callers+1)/2, used(w), "each call is settled by its own answer")
	assert.EqualValues(t, callers*calls, used(requests))
	assert.EqualValues(t, callers*calls/2, transport.Unstamped())
}

func TestARedirectedAttemptIsAcquiredAgain(t *testing.T) {
	status := http.StatusTemporaryRedirect
	mux := http.NewServeMux()
	mux.HandleFunc("/old/v1/messages", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/new/v1/messages", status)
	})
	mux.HandleFunc("/new/v1/messages", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprintf(w, `{"got":%q,"usage":{"total_tokens":60}}`, r.Method+string(body))
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	limiter := &tally{}
	client := &http.Client{Transport: &Transport{
		Base: server.Client().Transport, Limits: []Limit{{Limiter: limiter}}, Estimate: estimated(500),
	}}
	answer, err := client.Do(newRequest(interactive(), t, server.URL+"/old/v1/messages", "hello"))
	require.NoError(t, err)
	assert.Equal(t, `{"got":"POSThello","usage":{"total_tokens":60}}`, readAll(t, answer))
	require.Len(t, limiter.grants, 2)
	assert.Equal(t, []int64{60}, limiter.grants[1].settled)

	status = http.StatusSeeOther // see it with a GET, which uses no tokens
	answer, err = client.Do(newRequest(interactive(), t, server.URL+"/old/v1/messages", "hello"))
	require.NoError(t, err)
	assert.Equal(t, `{"got":"GET","usage":{"total_tokens":60}}`, readAll(t, answer))
	assert.Len(t, limiter.grants, 3)
}

// The context may end before, while the call waits, and while its answer comes.
func TestAContextThatEndedSendsNothing(t *testing.T) {
	for _, asError := range []bool{false, true} {
		w := newWindow(t, quotaOf(quotashare.Batch, 1000))
		transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: w}}, DeniedAsError: asError}
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(io.ErrNoProgress)
		answer, err := transport.RoundTrip(newRequest(ctx, t, chat, "{}"))
		require.Nil(t, answer)
		require.ErrorIs(t, err, context.Canceled)
		denied := &quotashare.DeniedError{}
		require.ErrorAs(t, err, &denied)
		assert.Zero(t, used(w))
	}
}

func TestAContextThatEndsWhileTheCallWaits(t *testing.T) {
	for _, asError := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWindow(t, quotaOf(quotashare.Batch, 1000))
			take(t, w, quotashare.Batch, 1000)
			transport := &Transport{
				Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: w}}, DeniedAsError: asError,
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			body := &trackedBody{Reader: strings.NewReader("{}")}
			r := newRequest(ctx, t, chat, "")
			r.Body, r.GetBody = body, nil
			start := time.Now()
			answer, err := transport.RoundTrip(r)
			assert.Equal(t, 10*time.Second, time.Since(start))
			require.Nil(t, answer)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			denied := &quotashare.DeniedError{}
			require.ErrorAs(t, err, &denied)
			assert.Equal(t, 1, body.closed)
			assert.EqualValues(t, 1000, used(w))
			assert.Zero(t, w.Stats().Classes[quotashare.Batch].Waiting)
		})
	}
}

func TestAContextThatEndsWhileTheAnswerComes(t *testing.T) {
	gone := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {\"choices\":[]}\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(gone)
	}))
	defer server.Close()
	limiter := &tally{}
	transport := &Transport{
		Base: server.Client().Transport, Limits: []Limit{{Limiter: limiter}}, Estimate: estimated(500),
	}
	ctx, cancel := context.WithCancel(interactive())
	defer cancel()
	answer, err := transport.RoundTrip(newRequest(ctx, t, server.URL+"/chat/completions", "{}"))
	require.NoError(t, err)
	_, err = io.ReadFull(answer.Body, make([]byte, 10))
	require.NoError(t, err)
	assert.NotContains(t, stacks(), "created by github.com/quotashare/quotashare/llmhttp.")
	cancel()
	_, err = io.Copy(io.Discard, answer.Body)
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, answer.Body.Close())
	<-gone
	assert.EqualValues(t, 500, limiter.charge(t), "what was used is not known")
}

// stacks returns the stacks of all goroutines.
func stacks() string {
	all := make([]byte, 1<<20)
	return string(all[:runtime.Stack(all, true)])
}

// No goroutine is started, and none of a caller's is kept: a bubble fails if one of its goroutines is left blocked.
func TestNoGoroutineIsStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tokens := newWindow(t, quotaOf(quotashare.Batch, 1000))
		requests := newWindow(t, quotaOf(quotashare.Batch, 5))
		reader, writer := io.Pipe()
		transport := &Transport{
			Base: base(func(r *http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: 200, Header: http.Header{}, Body: reader}, r.Body.Close()
			}),
			Limits:   []Limit{{Limiter: tokens}, {requests, Requests}},
			Estimate: estimated(1000),
		}
		const created, inside = "created by github.com/quotashare/quotashare/llmhttp.", "llmhttp.(*Transport).RoundTrip("
		answer, err := transport.RoundTrip(newRequest(t.Context(), t, chat, "{}"))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		for range 4 {
			waiting.Go(func() {
				_, err := transport.RoundTrip(newRequest(ctx, t, chat, "{}"))
				assert.ErrorIs(t, err, context.Canceled)
			})
		}
		synctest.Wait()
		assert.NotContains(t, stacks(), created)
		assert.Equal(t, 4, strings.Count(stacks(), inside), "in the goroutines of the callers")
		cancel()
		waiting.Wait()
		require.NoError(t, answer.Body.Close())
		require.NoError(t, writer.Close())
		synctest.Wait()
		assert.NotContains(t, stacks(), inside)
	})
}

// A body may be closed while it is read, and many times. The grant is closed once, by whoever comes first.
func TestAnAnswerMayBeClosedWhileItIsRead(t *testing.T) {
	for range 50 {
		reader, writer := io.Pipe()
		limiter := &tally{}
		transport := &Transport{
			Base: base(func(r *http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: 200, Header: http.Header{}, Body: reader}, r.Body.Close()
			}),
			Limits:   []Limit{{Limiter: limiter}},
			Estimate: estimated(500),
		}
		answer := send(t, transport, "{}")
		began := make(chan struct{})
		var both sync.WaitGroup
		both.Go(func() {
			p := make([]byte, 1)
			for i := 0; ; i++ {
				_, err := answer.Body.Read(p)
				if i == 3 {
					close(began)
				}
				if err != nil {
					assert.ErrorIs(t, err, io.ErrClosedPipe)
					return
				}
			}
		})
		both.Go(func() {
			_, _ = io.WriteString(writer, `{"id":`+strings.Repeat(" ", 1000)+used60) // as far as it comes
		})
		<-began
		for range 2 {
			both.Go(func() { assert.NoError(t, answer.Body.Close()) })
		}
		both.Wait()
		require.EqualValues(t, 500, limiter.charge(t))
		require.Equal(t, []int64{-1}, limiter.grants[0].settled, "it is closed, and the estimate stands")
	}
}

// A rwc is the body of an answer of 101: what is written to it goes to the other side.
type rwc struct {
	bytes.Buffer
	closed bool
}

func (c *rwc) Close() error {
	c.closed = true
	return nil
}

func TestAnswersWithoutABodyOfTheirOwn(t *testing.T) {
	limiter := &tally{}
	transport := &Transport{Limits: []Limit{{Limiter: limiter}}, Estimate: estimated(500)}

	conn := &rwc{}
	transport.Base = base(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 101, Header: http.Header{}, Body: conn}, r.Body.Close()
	})
	answer := send(t, transport, "{}")
	assert.Same(t, conn, answer.Body, "it may be written to")
	assert.EqualValues(t, 500, limiter.charge(t))

	transport.Base = base(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 204, Header: http.Header{}, Body: http.NoBody}, r.Body.Close()
	})
	assert.Empty(t, readAll(t, send(t, transport, "{}")))
	assert.EqualValues(t, 1000, limiter.charge(t))

	transport.Base = base(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Header: http.Header{}}, r.Body.Close() // as some fakes do
	})
	assert.Nil(t, send(t, transport, "{}").Body)
	assert.EqualValues(t, 1500, limiter.charge(t))

	// A 429 may have none either.
	transport.Base = base(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 429, Header: http.Header{}}, r.Body.Close()
	})
	assert.Nil(t, send(t, transport, "{}").Body)
	assert.EqualValues(t, 1500, limiter.charge(t))

	// HEAD uses no tokens, unless somebody says that it does.
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
	}))
	defer server.Close()
	transport.Base = server.Client().Transport
	for _, meters := range []func(*http.Request) bool{nil, func(*http.Request) bool { return true }} {
		transport.Meters = meters
		r, err := http.NewRequestWithContext(interactive(), http.MethodHead, server.URL+"/v1/responses", nil)
		require.NoError(t, err)
		answer, err = transport.RoundTrip(r)
		require.NoError(t, err)
		assert.EqualValues(t, 10, answer.ContentLength)
		assert.Empty(t, readAll(t, answer))
	}
	assert.EqualValues(t, 2000, limiter.charge(t))
	assert.Len(t, limiter.grants, 5)
}

func TestBaseIsTheDefaultTransport(t *testing.T) {
	old := http.DefaultTransport
	defer func() { http.DefaultTransport = old }()
	http.DefaultTransport = says(200, used60)
	limiter := &tally{}
	transport := &Transport{Limits: []Limit{{Limiter: limiter}}}
	assert.Equal(t, used60, readAll(t, send(t, transport, "{}")))
	assert.EqualValues(t, 60, limiter.charge(t))
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://provider.test/v1/models", nil)
	require.NoError(t, err)
	answer, err := transport.RoundTrip(r)
	require.NoError(t, err)
	assert.Equal(t, used60, readAll(t, answer))
	assert.EqualValues(t, 60, limiter.charge(t))
}

// Whatever is sent in its place, the answer is one to the request of the caller.
func TestAnAnswerNamesTheRequestOfTheCaller(t *testing.T) {
	for outcome, transport := range outcomes(t) {
		for _, once := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/once %v", outcome, once), func(t *testing.T) {
				r := newRequest(interactive(), t, chat, "{}")
				if once {
					r.Body, r.GetBody = io.NopCloser(strings.NewReader("{}")), nil
				}
				answer, err := transport.RoundTrip(r)
				if err != nil {
					return
				}
				assert.True(t, r == answer.Request, "it is another one")
				readAll(t, answer)
			})
		}
	}
}

// sendsIt tells whoever traces a request what an http.Transport tells that sends it.
func sendsIt(r *http.Request) {
	trace := httptrace.ContextClientTrace(r.Context())
	if trace == nil {
		return
	}
	if trace.GetConn != nil {
		trace.GetConn("provider.test:80")
	}
	if trace.GotConn != nil {
		trace.GotConn(httptrace.GotConnInfo{})
	}
	if trace.WroteHeaders != nil {
		trace.WroteHeaders()
	}
	if trace.WroteRequest != nil {
		trace.WroteRequest(httptrace.WroteRequestInfo{})
	}
}

// What a request asked for is taken back if it was never sent, and stands if it may have been.
func TestOnlyWhatWasNeverSentIsTakenBack(t *testing.T) {
	refused := httptest.NewServer(http.NotFoundHandler())
	refused.Close()
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		panic(http.ErrAbortHandler)
	}))
	defer broken.Close()
	encrypted := httptest.NewUnstartedServer(http.NotFoundHandler())
	encrypted.Config.ErrorLog = log.New(io.Discard, "", 0) // of bad handshakes
	encrypted.StartTLS()
	defer encrypted.Close()

	ctx, cancel := context.WithCancel(interactive())
	defer cancel()
	dialling := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		cancel()
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	proxied := &http.Transport{Proxy: func(*http.Request) (*url.URL, error) { return url.Parse(refused.URL) }}

	for name, c := range map[string]struct {
		ctx  context.Context
		base http.RoundTripper
		url  string
		want int64
	}{
		"nobody listens":           {nil, &http.Transport{}, refused.URL, 0},
		"no such host":             {nil, &http.Transport{}, "http://nowhere.invalid", 0},
		"no such scheme":           {nil, &http.Transport{}, "nowhere://host", 0},
		"a proxy that is down":     {nil, proxied, "http://provider.test", 0},
		"a certificate of no-one":  {nil, &http.Transport{}, encrypted.URL, 0},
		"the context ends first":   {ctx, dialling, "http://provider.test", 0},
		"it was sent":              {nil, &http.Transport{}, broken.URL, 500},
		"Base: could not dial":     {nil, fails(fmt.Errorf("oops: %w", &net.OpError{Op: "dial"})), chat, 0},
		"Base: could not read":     {nil, fails(&net.OpError{Op: "read"}), chat, 500},
		"Base: says nothing of it": {nil, fails(io.ErrUnexpectedEOF), chat, 500},
		"Base: sent it": {nil, base(func(r *http.Request) (*http.Response, error) {
			sendsIt(r)
			return nil, io.ErrUnexpectedEOF
		}), chat, 500},
		"Base: sent it, and could not dial to send it again": {nil, base(func(r *http.Request) (*http.Response, error) {
			sendsIt(r)
			return nil, &net.OpError{Op: "dial"}
		}), chat, 500},
	} {
		t.Run(name, func(t *testing.T) {
			limiter := &tally{}
			transport := &Transport{Base: c.base, Limits: []Limit{{Limiter: limiter}}, Estimate: estimated(500)}
			if c.ctx == nil {
				c.ctx = interactive()
			}
			answer, err := transport.RoundTrip(newRequest(c.ctx, t, c.url+"/chat/completions", "{}"))
			require.Error(t, err)
			require.Nil(t, answer)
			require.Len(t, limiter.grants, 1)
			assert.Equal(t, c.want, limiter.charge(t))
			if c.want == 0 {
				assert.Empty(t, limiter.grants[0].settled, "a Settle would count as a call")
			} else {
				assert.Equal(t, []int64{-1}, limiter.grants[0].settled, "it is closed, and the estimate stands")
			}
		})
	}
}

// Whoever traces a request is still told of its connection.
func TestATraceOfTheCallersIsKept(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, used60)
	}))
	defer server.Close()
	var told []string
	ctx := httptrace.WithClientTrace(interactive(), &httptrace.ClientTrace{
		GetConn:              func(string) { told = append(told, "get") },
		GotConn:              func(httptrace.GotConnInfo) { told = append(told, "got") },
		GotFirstResponseByte: func() { told = append(told, "answer") },
	})
	transport := &Transport{Base: server.Client().Transport}
	answer, err := transport.RoundTrip(newRequest(ctx, t, server.URL+"/messages", "{}"))
	require.NoError(t, err)
	readAll(t, answer)
	assert.Equal(t, []string{"get", "got", "answer"}, told)
}

func TestMeteredPaths(t *testing.T) {
	limiter := &tally{}
	transport := &Transport{Base: says(200, used60), Limits: []Limit{{Limiter: limiter}}}
	for path, want := range map[string]int{
		"/v1/chat/completions": 1,
		"/v1/completions":      1,
		"/v1/responses":        1,
		"/v1/embeddings":       1,
		"/v1/messages":         1,
		"/openai/deployments/gpt/chat/completions?api-version=2": 1,
		"/openai/v1/chat/completions":                            1,
		"/model/anthropic.claude/invoke":                         1,
		"/model/anthropic.claude/invoke-with-response-stream":    1,
		"/model/arn%3Aaws%3Abedrock%2Fx/converse":                1,
		"/model/anthropic.claude/converse-stream":                1,
		"/v1/models":                    0,
		"/v1/messages/count_tokens":     0,
		"/v1/messages/batches":          0,
		"/v1/responses/resp_1/cancel":   0,
		"/v1/batches":                   0,
		"/v1/files?x=/chat/completions": 0,
		"/":                             0,
	} {
		for _, method := range []string{http.MethodPost, http.MethodGet, http.MethodDelete} {
			limiter.grants = nil
			r, err := http.NewRequestWithContext(interactive(), method, "http://provider.test"+path, strings.NewReader("{}"))
			require.NoError(t, err)
			answer, err := transport.RoundTrip(r)
			require.NoError(t, err)
			readAll(t, answer)
			if method != http.MethodPost {
				want = 0
			}
			assert.Len(t, limiter.grants, want, "%s %s", method, path)
		}
	}
}

// All limits of a request, or none.

func TestAllLimitsAdmitOrNoneDoes(t *testing.T) {
	tokens := newWindow(t, quotaOf(quotashare.Interactive, 1000))
	requests := newWindow(t, quotaOf(quotashare.Interactive, 2))
	for name, limits := range map[string][]Limit{
		"tokens first":   {{tokens, TotalTokens}, {requests, Requests}},
		"requests first": {{requests, Requests}, {tokens, TotalTokens}},
	} {
		t.Run(name, func(t *testing.T) {
			transport := &Transport{Base: says(200, used60), Limits: limits, Estimate: estimated(600)}
			tokens, requests := newWindow(t, tokens.Quota()), newWindow(t, requests.Quota())
			for i := range limits {
				limits[i].Limiter = tokens
				if limits[i].Unit == Requests {
					limits[i].Limiter = requests
				}
			}
			answer := send(t, transport, "{}")
			require.Equal(t, 200, answer.StatusCode)
			assert.EqualValues(t, 600, used(tokens))
			assert.EqualValues(t, 1, used(requests))

			refused := send(t, transport, "{}") // for its tokens
			assert.Equal(t, 429, refused.StatusCode)
			assert.EqualValues(t, 600, used(tokens))
			assert.EqualValues(t, 1, used(requests))

			readAll(t, answer)
			assert.EqualValues(t, 60, used(tokens))
			assert.EqualValues(t, 1, used(requests), "each is settled in its own unit")

			readAll(t, send(t, transport, "{}"))
			assert.EqualValues(t, 120, used(tokens))
			assert.EqualValues(t, 2, used(requests))

			refused = send(t, transport, "{}") // for it is the third request
			assert.Equal(t, 429, refused.StatusCode)
			assert.EqualValues(t, 120, used(tokens))
			assert.EqualValues(t, 2, used(requests))
		})
	}
}

// A call that waits for one limit holds nothing of the others, and takes all at one instant.
func TestNothingIsHeldOfOneLimitWhileAnotherIsWaitedFor(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {1, 2, 0}} {
		synctest.Test(t, func(t *testing.T) {
			windows := []*quotashare.Window{
				newWindow(t, quotaOf(quotashare.Batch, 1000)),
				newWindow(t, quotaOf(quotashare.Batch, 1000)),
				newWindow(t, quotaOf(quotashare.Batch, 10)),
			}
			units := []Unit{InputTokens, OutputTokens, Requests}
			transport := &Transport{
				Base:     says(500, ""), // the estimate stands
				Estimate: func(*http.Request, []byte) Tokens { return Tokens{Input: 600, Output: 700} },
			}
			for _, i := range order {
				transport.Limits = append(transport.Limits, Limit{windows[i], units[i]})
			}
			all := func() (all [3]int64) {
				for i, w := range windows {
					all[i] = used(w)
				}
				return all
			}
			start := time.Now()
			at := func(since time.Duration) {
				time.Sleep(time.Until(start.Add(since)))
				synctest.Wait()
			}
			take(t, windows[0], quotashare.Batch, 1000) // until 60
			at(20 * time.Second)
			take(t, windows[2], quotashare.Batch, 10) // until 80
			at(30 * time.Second)
			ended := time.Duration(0)
			go func() {
				answer, err := transport.RoundTrip(newRequest(t.Context(), t, chat, "{}"))
				if assert.NoError(t, err) {
					assert.Equal(t, 500, answer.StatusCode)
				}
				ended = time.Since(start)
			}()
			synctest.Wait()
			assert.Equal(t, [3]int64{1000, 0, 10}, all())
			at(40 * time.Second)
			take(t, windows[1], quotashare.Batch, 1000) // until 100
			at(61 * time.Second)
			assert.Equal(t, [3]int64{0, 1000, 10}, all())
			at(81 * time.Second)
			assert.Equal(t, [3]int64{0, 1000, 0}, all())
			at(100*time.Second - 1)
			assert.Equal(t, [3]int64{0, 1000, 0}, all())
			assert.Zero(t, ended)
			at(100 * time.Second)
			assert.Equal(t, [3]int64{600, 700, 1}, all())
			assert.Equal(t, 100*time.Second, ended)
		})
	}
}

func TestAWaitThatIsCancelledHoldsNothing(t *testing.T) {
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		synctest.Test(t, func(t *testing.T) {
			windows := []*quotashare.Window{
				newWindow(t, quotaOf(quotashare.Batch, 1000)), newWindow(t, quotaOf(quotashare.Batch, 10)),
			}
			transport := &Transport{Base: fails(errors.New("sent")), Estimate: estimated(600)}
			for _, i := range order {
				transport.Limits = append(transport.Limits, Limit{windows[i], []Unit{TotalTokens, Requests}[i]})
			}
			take(t, windows[0], quotashare.Batch, 1000)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				time.Sleep(10 * time.Second)
				cancel()
			}()
			answer, err := transport.RoundTrip(newRequest(ctx, t, chat, "{}"))
			require.ErrorIs(t, err, context.Canceled)
			require.Nil(t, answer)
			assert.EqualValues(t, 1000, used(windows[0]))
			assert.Zero(t, used(windows[1]))
		})
	}
}

// The second limit's refusal for good is that of the request, and leaves nothing of the first.
func TestARefusalForGoodByTheSecondLimit(t *testing.T) {
	for _, class := range []quotashare.Source{quotashare.SourceAPI, quotashare.SourceBackfill} {
		quota := quotashare.Quota{Tokens: 1000, Shares: quotashare.Fractions{0.5, 0, 0.5}, Floors: quotashare.NoFloors}
		first, second := newWindow(t, quota), newWindow(t, quota)
		transport := &Transport{
			Base:     fails(errors.New("sent")),
			Limits:   []Limit{{first, InputTokens}, {second, OutputTokens}},
			Estimate: func(*http.Request, []byte) Tokens { return Tokens{Input: 400, Output: 1001} },
		}
		ctx := quotashare.WithSource(context.Background(), class)
		answer, err := transport.RoundTrip(newRequest(ctx, t, chat, "{}"))
		require.NoError(t, err)
		assert.Equal(t, http.StatusRequestEntityTooLarge, answer.StatusCode)
		assert.Zero(t, used(first))
		assert.Zero(t, used(second))
	}
}

// waiter is a Limiter that can only wait.
type waiter struct{ *tally }

func (w waiter) Acquire(ctx context.Context, c quotashare.Class, n int64) (quotashare.Grant, error) {
	return w.tally.Acquire(ctx, c, n)
}
func (waiter) TryAcquire() {}

// remote is a Limiter that has to ask somebody else, who may not answer.
type remote struct {
	*tally
	full bool
	err  error
}

func (r *remote) TryAcquire(
	_ context.Context, c quotashare.Class, n int64,
) (quotashare.Grant, quotashare.Decision, error) {
	if r.err != nil || r.full {
		r.full = false
		return quotashare.Grant{}, quotashare.Decision{Reason: quotashare.ReasonQuotaFull}, r.err
	}
	return quotashare.NewGrant(r.admit(c, n)), admitted, nil
}

func TestLimitersOfOtherKinds(t *testing.T) {
	transport := &Transport{Base: says(200, used60), Estimate: estimated(500)}
	first, second := &tally{}, &tally{}

	// One that can only wait will do if it is alone.
	transport.Limits = []Limit{{Limiter: waiter{second}}}
	readAll(t, send(t, transport, "{}"))
	assert.EqualValues(t, 60, second.charge(t))

	// Not beside another. Nothing is held of that one then.
	transport.Limits = []Limit{{Limiter: first}, {Limiter: waiter{second}}}
	_, err := transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
	require.ErrorContains(t, err, "llmhttp: limits[1]: llmhttp_test.waiter has no TryAcquire")
	assert.Zero(t, first.charge(t))
	assert.EqualValues(t, 60, second.charge(t))

	// One that asks somebody else may stand beside another, and may be full for a while.
	first = &tally{}
	other := &remote{tally: &tally{}, full: true}
	transport.Limits = []Limit{{Limiter: first}, {other, Requests}}
	readAll(t, send(t, transport, "{}"))
	assert.EqualValues(t, 60, first.charge(t))
	require.Len(t, first.grants, 2)
	assert.Equal(t, 1, first.grants[0].cancelled, "while the other was waited for")
	assert.EqualValues(t, 1, other.charge(t))

	// Its error is that of the request.
	first = &tally{}
	other = &remote{tally: &tally{}, err: io.ErrNoProgress}
	transport.Limits = []Limit{{Limiter: first}, {Limiter: other}}
	_, err = transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
	require.ErrorIs(t, err, io.ErrNoProgress)
	assert.Zero(t, first.charge(t))
}

// A counter is a Window that counts the calls of Acquire, and ends their context when there were too many.
type counter struct {
	*quotashare.Window
	calls  int
	cancel context.CancelFunc
}

func (c *counter) Acquire(ctx context.Context, class quotashare.Class, n int64) (quotashare.Grant, error) {
	if c.calls++; c.calls == 100 {
		c.cancel()
	}
	return c.Window.Acquire(ctx, class, n)
}

// Two limits may be of one Limiter. If it has room for each of what they need, and not for both, nobody goes round in
// circles: it is refused, or an error.
func TestTwoLimitsOfOneLimiterDoNotSpin(t *testing.T) {
	ctx, cancel := context.WithCancel(interactive())
	defer cancel()
	w := &counter{Window: newWindow(t, quotaOf(quotashare.Interactive, 100)), cancel: cancel}
	transport := &Transport{
		Base:     fails(errors.New("sent")),
		Limits:   []Limit{{w, InputTokens}, {w, OutputTokens}},
		Estimate: func(*http.Request, []byte) Tokens { return Tokens{Input: 60, Output: 60} },
	}
	answer, err := transport.RoundTrip(newRequest(ctx, t, chat, "{}"))
	if err == nil {
		assert.GreaterOrEqual(t, answer.StatusCode, 400)
		readAll(t, answer)
	}
	assert.Less(t, w.calls, 10)
	assert.Zero(t, used(w.Window))
}

func TestLimitsThatCannotBeUsedAreAnError(t *testing.T) {
	good := Limit{Limiter: &tally{}}
	for name, limits := range map[string][]Limit{
		"no Limiter":           {good, {}},
		"no such unit":         {good, {&tally{}, Requests + 1}},
		"no such unit at all":  {good, {&tally{}, 255}},
		"no Limiter, Requests": {good, {Unit: Requests}},
	} {
		for _, tokens := range []int64{0, 500} { // also where nothing is needed of them
			transport := &Transport{Base: fails(errors.New("sent")), Limits: limits, Estimate: estimated(tokens)}
			_, err := transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
			require.EqualError(t, err, "llmhttp: limits[1]: want a Limiter, and a Unit of the constants", name)
		}
	}
	assert.Empty(t, good.Limiter.(*tally).grants)
}

// A Window in the shadow admits everything and charges what it would have, whatever stands beside it.
func TestShadows(t *testing.T) {
	var reported []int64
	shadow := newWindow(t, quotaOf(quotashare.Interactive, 100), quotashare.WithShadow(func(e *quotashare.DeniedError) {
		reported = append(reported, e.Tokens)
	}))
	second := newWindow(t, quotaOf(quotashare.Interactive, 1), quotashare.WithShadow(nil))
	for _, limits := range [][]Limit{
		{{Limiter: shadow}}, {{Limiter: shadow}, {second, Requests}}, {{second, Requests}, {Limiter: shadow}},
	} {
		reported = nil
		transport := &Transport{Base: says(200, used60), Limits: limits, Estimate: estimated(101)}
		for range 3 {
			answer := send(t, transport, "{}")
			assert.Equal(t, 200, answer.StatusCode)
			assert.Equal(t, used60, readAll(t, answer))
		}
		assert.Equal(t, []int64{101, 101, 101}, reported, "each once")
	}
	assert.Zero(t, used(shadow))
	assert.EqualValues(t, 1, used(second))
}

// Refusals.

type refusal struct {
	Type  string
	Error struct {
		Type, Code, Message string
		Param               *string
	}
}

func TestARefusalIsAnAnswerThatSDKsKnow(t *testing.T) {
	for since, want := range map[time.Duration][2]string{
		0:                         {"2", "1500"},
		1:                         {"2", "1500"}, // never too early
		499 * time.Millisecond:    {"2", "1001"},
		500 * time.Millisecond:    {"1", "1000"},
		1500*time.Millisecond - 1: {"1", "1"},
	} {
		synctest.Test(t, func(t *testing.T) {
			quota := quotaOf(quotashare.Interactive, 1000)
			quota.Window = 1500 * time.Millisecond
			w := newWindow(t, quota)
			take(t, w, quotashare.Interactive, 1000)
			time.Sleep(since)
			transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: w}}, Estimate: estimated(7)}
			answer := send(t, transport, "{}")
			assert.Equal(t, 429, answer.StatusCode)
			assert.Equal(t, "429 Too Many Requests", answer.Status)
			assert.Equal(t, "HTTP/1.1", answer.Proto)
			assert.True(t, answer.ProtoAtLeast(1, 1))
			assert.Equal(t, http.Header{
				"Content-Type":   {"application/json"},
				"Retry-After":    {want[0]},
				"Retry-After-Ms": {want[1]},
				"X-Should-Retry": {"false"},
			}, answer.Header)
			body := readAll(t, answer)
			assert.EqualValues(t, len(body), answer.ContentLength)
			var got refusal
			require.NoError(t, json.Unmarshal([]byte(body), &got))
			assert.Equal(t, "error", got.Type)
			assert.Equal(t, "rate_limit_error", got.Error.Type)
			assert.Equal(t, "rate_limit_exceeded", got.Error.Code)
			assert.Contains(t, got.Error.Message, "interactive call of 7 tokens not admitted")
			assert.Contains(t, body, `"param":null`)
			assert.EqualValues(t, 1000, used(w))
		})
	}
}

func TestARefusalForGoodIsAnAnswerThatSDKsKnow(t *testing.T) {
	w := newWindow(t, quotaOf(quotashare.Interactive, 1000))
	transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: w}}, Estimate: estimated(1001)}
	answer := send(t, transport, "{}")
	assert.Equal(t, 413, answer.StatusCode)
	assert.Equal(t, "413 Request Entity Too Large", answer.Status)
	assert.Equal(t, http.Header{
		"Content-Type":   {"application/json"},
		"X-Should-Retry": {"false"},
	}, answer.Header)
	var got refusal
	require.NoError(t, json.Unmarshal([]byte(readAll(t, answer)), &got))
	assert.Equal(t, "error", got.Type)
	assert.Equal(t, "request_too_large", got.Error.Type)
	assert.Equal(t, "request_too_large", got.Error.Code)
	assert.Contains(t, got.Error.Message, "the largest interactive call possible is 1000 tokens")
}

func TestARefusalCanBeAnError(t *testing.T) {
	w := newWindow(t, quotaOf(quotashare.Interactive, 1000))
	transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: w}}, DeniedAsError: true}
	take(t, w, quotashare.Interactive, 1000)
	for tokens, reason := range map[int64]quotashare.Reason{
		7: quotashare.ReasonQuotaFull, 1001: quotashare.ReasonTooLarge,
	} {
		transport.Estimate = estimated(tokens)
		answer, err := transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
		require.Nil(t, answer)
		denied, ok := err.(*quotashare.DeniedError)
		require.True(t, ok, "as it is")
		assert.Equal(t, reason, denied.Decision.Reason)
		_, err = (&http.Client{Transport: transport}).Do(newRequest(interactive(), t, chat, "{}"))
		denied = nil
		require.ErrorAs(t, err, &denied)
		assert.Equal(t, tokens, denied.Tokens)
	}
}

// A class that has waited as long as it may is refused by an answer, as the context is not what ended its wait.
func TestAWaitThatTookTooLongIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWindow(t, quotaOf(quotashare.Background, 1000), quotashare.WithMaxWait(quotashare.Background, time.Second))
		take(t, w, quotashare.Background, 1000)
		transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: w}}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		ctx = quotashare.WithSource(ctx, quotashare.SourceScheduler)
		start := time.Now()
		answer, err := transport.RoundTrip(newRequest(ctx, t, chat, "{}"))
		require.NoError(t, err)
		assert.Equal(t, time.Second, time.Since(start))
		assert.Equal(t, 429, answer.StatusCode)
		assert.Equal(t, "59000", answer.Header.Get("Retry-After-Ms"))
	})
}

func TestErrorsOfALimiterAreErrors(t *testing.T) {
	limiter := &tally{err: fmt.Errorf("no answer: %w", io.ErrNoProgress)}
	for _, asError := range []bool{false, true} {
		transport := &Transport{
			Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: limiter}}, DeniedAsError: asError,
		}
		_, err := transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
		require.Equal(t, limiter.err, err)
	}
	// A refusal is one however it is wrapped.
	limiter.err = fmt.Errorf("elsewhere: %w", &quotashare.DeniedError{
		Decision: quotashare.Decision{Reason: quotashare.ReasonQuotaFull, RetryAfter: 3 * time.Second},
	})
	transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: limiter}}}
	answer := send(t, transport, "{}")
	assert.Equal(t, 429, answer.StatusCode)
	assert.Equal(t, "3", answer.Header.Get("Retry-After"))
}

func TestWriteDenied(t *testing.T) {
	full := &quotashare.DeniedError{
		Class: quotashare.Batch, Tokens: 4711, Quota: quotashare.Quota{Tokens: 90210},
		Decision: quotashare.Decision{Reason: quotashare.ReasonQuotaFull, RetryAfter: 2500*time.Millisecond + 1},
	}
	large := &quotashare.DeniedError{
		Class: quotashare.Batch, Tokens: 4711, Quota: quotashare.Quota{Tokens: 90210},
		Decision: quotashare.Decision{Reason: quotashare.ReasonTooLarge},
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, gone := newWindow(t, quotashare.Quota{Tokens: 1000}).Acquire(ctx, quotashare.Batch, 1)
	wait := http.Header{
		"Content-Type": {"application/json"}, "Retry-After": {"3"}, "Retry-After-Ms": {"2501"},
	}
	for name, c := range map[string]struct {
		err    error
		status int
		header http.Header
		kind   string
	}{
		"full":           {full, 429, wait, "rate_limit_error"},
		"wrapped":        {fmt.Errorf("model: %w", full), 429, wait, "rate_limit_error"},
		"joined":         {errors.Join(io.EOF, full), 429, wait, "rate_limit_error"},
		"of http.Client": {&url.Error{Op: "Post", URL: chat, Err: full}, 429, wait, "rate_limit_error"},
		"large":          {large, 413, http.Header{"Content-Type": {"application/json"}}, "request_too_large"},
		"the context ended first": {gone, 429, http.Header{
			"Content-Type": {"application/json"}, "Retry-After": {"1"}, "Retry-After-Ms": {"1000"},
		}, "rate_limit_error"},
	} {
		t.Run(name, func(t *testing.T) {
			recorder := httptest.NewRecorder()
			require.True(t, WriteDenied(recorder, c.err))
			assert.Equal(t, c.status, recorder.Code)
			assert.Equal(t, c.header, recorder.Result().Header)
			var got refusal
			require.NoError(t, json.Unmarshal(recorder.Body.Bytes(), &got))
			assert.Equal(t, "error", got.Type)
			assert.Equal(t, c.kind, got.Error.Type)
			assert.NotEmpty(t, got.Error.Message)
			for _, secret := range []string{"4711", "90210", "batch", "holds", "provider"} {
				assert.NotContains(t, recorder.Body.String(), secret)
			}
		})
	}
	for _, err := range []error{nil, io.EOF, context.Canceled, &url.Error{Err: io.EOF}} {
		recorder := httptest.NewRecorder()
		require.False(t, WriteDenied(recorder, err))
		assert.False(t, recorder.Flushed)
		assert.Empty(t, recorder.Header())
		assert.Zero(t, recorder.Body.Len())
		recorder.WriteHeader(http.StatusTeapot) // the first to write says what it is
		assert.Equal(t, http.StatusTeapot, recorder.Code)
	}
}

// Where work enters.

func TestTheClassIsThatOfTheContext(t *testing.T) {
	limiter, requests := &tally{}, &tally{}
	transport := &Transport{Base: says(200, used60), Limits: []Limit{{Limiter: limiter}, {requests, Requests}}}
	sources := []quotashare.Source{
		{}, quotashare.SourceBackfill, quotashare.SourceEval, quotashare.SourceScheduler, quotashare.SourceAPI,
	}
	for _, source := range sources {
		limiter.grants, requests.grants = nil, nil
		ctx := quotashare.WithSource(context.Background(), source)
		answer, err := transport.RoundTrip(newRequest(ctx, t, chat, "{}"))
		require.NoError(t, err)
		readAll(t, answer)
		require.Len(t, limiter.grants, 1)
		require.Len(t, requests.grants, 1)
		assert.Equal(t, quotashare.ClassFor(source), limiter.grants[0].class)
		assert.Equal(t, quotashare.ClassFor(source), requests.grants[0].class)
	}
	assert.Zero(t, transport.Unstamped())

	// Without a stamp it is Batch, and counted; not if it uses no tokens.
	for n := range uint64(3) {
		limiter.grants = nil
		answer, err := transport.RoundTrip(newRequest(context.Background(), t, chat, "{}"))
		require.NoError(t, err)
		readAll(t, answer)
		assert.Equal(t, quotashare.Batch, limiter.grants[0].class)
		answer, err = transport.RoundTrip(newRequest(context.Background(), t, "http://provider.test/v1/files", "{}"))
		require.NoError(t, err)
		readAll(t, answer)
		assert.Equal(t, n+1, transport.Unstamped())
	}
	// One that is refused is counted all the same.
	limiter.err = io.ErrNoProgress
	_, err := transport.RoundTrip(newRequest(context.Background(), t, chat, "{}"))
	require.Error(t, err)
	assert.EqualValues(t, 4, transport.Unstamped())
}

func TestEnterStampsAndNeverRaises(t *testing.T) {
	sources := []quotashare.Source{ // from the lowest
		{}, quotashare.SourceBackfill, quotashare.SourceEval, quotashare.SourceScheduler, quotashare.SourceAPI,
	}
	for _, outer := range sources {
		var got context.Context
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got = r.Context()
			w.Header().Set("X-Path", r.URL.Path)
			w.WriteHeader(http.StatusTeapot)
		})
		recorder := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/chat", nil)
		before := r.Context()
		Enter(outer, handler).ServeHTTP(recorder, r)
		assert.Equal(t, http.StatusTeapot, recorder.Code)
		assert.Equal(t, "/chat", recorder.Header().Get("X-Path"))
		assert.Equal(t, before, r.Context(), "the request that came is not changed")
		source, stamped := quotashare.SourceFrom(got)
		assert.True(t, stamped)
		assert.Equal(t, outer, source)

		for _, inner := range sources {
			want := max(quotashare.ClassFor(outer), quotashare.ClassFor(inner)) // Batch is the last
			Enter(outer, Enter(inner, handler)).ServeHTTP(httptest.NewRecorder(), r)
			assert.Equal(t, want, quotashare.ClassFrom(got), "%v in %v", inner, outer)

			fail := errors.New("as it is")
			job := EnterFunc(outer, EnterFunc(inner, func(ctx context.Context) error {
				got = ctx
				return fail
			}))
			assert.Equal(t, fail, job(t.Context()))
			assert.Equal(t, want, quotashare.ClassFrom(got), "%v in %v", inner, outer)

			Enter(outer, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				assert.NoError(t, EnterFunc(inner, func(ctx context.Context) error {
					got = ctx
					return nil
				})(r.Context()))
			})).ServeHTTP(httptest.NewRecorder(), r)
			assert.Equal(t, want, quotashare.ClassFrom(got), "%v in %v", inner, outer)
		}
	}
}

// A request that one of the limits will never admit is not made to wait for another.
func TestAHopelessRequestDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		requests, tokens := newWindow(t, quotaOf(quotashare.Batch, 1)), newWindow(t, quotaOf(quotashare.Batch, 100))
		take(t, requests, quotashare.Batch, 1)
		transport := &Transport{
			Base:     says(200, "{}"),
			Limits:   []Limit{{requests, Requests}, {tokens, TotalTokens}},
			Estimate: estimated(101),
		}
		start := time.Now()
		answer, err := transport.RoundTrip(newRequest(context.Background(), t, chat, "{}"))
		require.NoError(t, err)
		assert.Equal(t, http.StatusRequestEntityTooLarge, answer.StatusCode)
		assert.Zero(t, time.Since(start))
	})
}

// uncomparable is a Limiter that cannot be compared, though its type does not show it.
type uncomparable struct{ any }

func (uncomparable) Acquire(context.Context, quotashare.Class, int64) (quotashare.Grant, error) {
	return quotashare.NewGrant(nil), nil
}

func TestLimitersNeedNotBeComparable(t *testing.T) {
	one := uncomparable{[]int{1}}
	transport := &Transport{Base: says(200, "{}"), Limits: []Limit{{Limiter: one}, {one, Requests}}}
	_, err := transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
	require.ErrorContains(t, err, "has no TryAcquire")
}
