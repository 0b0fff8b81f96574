package llmhttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	. "github.com/quotashare/quotashare/llmhttp"
)

// The tests of this file hold the package to what is publicly known to have gone wrong in other limiters and gateways.
// The numbers are those of the list of cases. Each test covers the kind of the failure, not only the one input that was
// reported.

// headroom wants so many tokens, and not one more, to fit now. It leaves no trace.
func headroom(t *testing.T, w *quotashare.Window, class quotashare.Class, want int64) {
	t.Helper()
	assert.False(t, quotashare.Admit(class, want+1, w.Usage(), w.Quota()).Admitted, "more than %d", want)
	assert.True(t, want == 0 || quotashare.Admit(class, want, w.Usage(), w.Quota()).Admitted, "less than %d", want)
}

// Case 3: an answer can end in many ways, and each of them closes the grant, once.
func TestEveryEndOfAnAnswerClosesItsGrant(t *testing.T) {
	const chunk = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n"
	const last = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":20}}\n\ndata: [DONE]\n\n"
	for name, c := range map[string]struct {
		body io.Reader
		end  func(*testing.T, context.CancelFunc, io.ReadCloser)
		want int64
	}{
		"read to its end": {strings.NewReader(chunk + last), func(t *testing.T, _ context.CancelFunc, b io.ReadCloser) {
			_, err := io.ReadAll(b)
			require.NoError(t, err)
		}, 120},
		"left after two chunks": {strings.NewReader(chunk + chunk + last), func(
			t *testing.T, _ context.CancelFunc, b io.ReadCloser,
		) {
			_, err := io.ReadFull(b, make([]byte, 2*len(chunk)))
			require.NoError(t, err)
			require.NoError(t, b.Close())
		}, 300},
		"never read": {strings.NewReader(last), func(t *testing.T, _ context.CancelFunc, b io.ReadCloser) {
			require.NoError(t, b.Close())
		}, 300},
		"broken off": {io.MultiReader(strings.NewReader(chunk), iotest.ErrReader(io.ErrUnexpectedEOF)), func(
			t *testing.T, _ context.CancelFunc, b io.ReadCloser,
		) {
			_, err := io.ReadAll(b)
			require.Equal(t, io.ErrUnexpectedEOF, err)
		}, 300},
		"cancelled": {strings.NewReader(chunk + last), func(t *testing.T, cancel context.CancelFunc, b io.ReadCloser) {
			_, err := io.ReadFull(b, make([]byte, len(chunk)))
			require.NoError(t, err)
			cancel()
			_, err = io.ReadAll(b)
			require.Equal(t, context.Canceled, err)
		}, 300},
		"an error event": {strings.NewReader(chunk + "event: error\ndata: {\"type\":\"error\",\"error\":{}}\n\n"), func(
			t *testing.T, _ context.CancelFunc, b io.ReadCloser,
		) {
			_, err := io.ReadAll(b)
			require.NoError(t, err)
		}, 300},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWindow(t, quotaOf(quotashare.Interactive, 2000))
			limiter := &tally{}
			ctx, cancel := context.WithCancel(interactive())
			defer cancel()
			transport := &Transport{
				Base: base(func(r *http.Request) (*http.Response, error) {
					body := io.NopCloser(readerFunc(func(p []byte) (int, error) {
						if err := r.Context().Err(); err != nil {
							return 0, err
						}
						return c.body.Read(p)
					}))
					return &http.Response{StatusCode: 200, Header: contentType(events), Body: body}, r.Body.Close()
				}),
				Limits: []Limit{{Limiter: w}, {Limiter: limiter}}, Estimate: estimated(300),
			}
			answer, err := transport.RoundTrip(newRequest(ctx, t, chat, "{}"))
			require.NoError(t, err)
			assert.EqualValues(t, 300, used(w))
			c.end(t, cancel, answer.Body)
			assert.Equal(t, c.want, used(w))
			for range 3 { // whatever comes then changes nothing
				_ = answer.Body.Close()
				_, _ = io.ReadAll(answer.Body)
				assert.Equal(t, c.want, used(w))
				assert.Equal(t, c.want, limiter.charge(t))
			}
		})
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Case 4: whoever asks, and leaves before the answer is told, has used the provider all the same.
func TestLeavingEarlyIsNotFree(t *testing.T) {
	start := `data: {"type":"message_start","message":{"usage":{"input_tokens":1,"output_tokens":1}}}` + "\n\n"
	chunk := `data: {"choices":[{"delta":{"content":"x"}}],"usage":null}` + "\n\n"
	for name, stream := range map[string]string{
		"OpenAI": strings.Repeat(chunk, 9), "Anthropic": start + strings.Repeat(chunk, 9),
	} {
		for _, profile := range []Profile{{}, OpenAI, Azure, Anthropic, Bedrock, Groq} {
			for _, status := range []int{200, 500} {
				w := newWindow(t, quotaOf(quotashare.Interactive, 100_000))
				transport := &Transport{
					Base:    says(status, stream, "Content-Type", events),
					Limits:  []Limit{{Limiter: w}},
					Profile: profile, Estimate: func(*http.Request, []byte) Tokens { return Tokens{Input: 1000, Output: 200} },
				}
				answer := send(t, transport, "{}")
				_, err := io.ReadFull(answer.Body, make([]byte, len(start)+4*len(chunk)))
				require.NoError(t, err)
				require.NoError(t, answer.Body.Close())
				assert.EqualValues(t, 1200, used(w), name)
			}
		}
	}
}

// Case 6: where the total is missing it is the sum of input and output, and never one.
func TestAMissingTotalIsTheSum(t *testing.T) {
	for _, usage := range []string{
		`{"prompt_tokens":100,"completion_tokens":50}`, `{"input_tokens":100,"output_tokens":50}`,
		`{"inputTokens":100,"outputTokens":50}`, `{"prompt_tokens":100,"completion_tokens":50,"total_tokens":null}`,
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWindow(t, quotaOf(quotashare.Interactive, 30))
			transport := &Transport{
				Base: says(200, `{"usage":`+usage+`}`), Limits: []Limit{{Limiter: w}}, Estimate: estimated(1),
			}
			readAll(t, send(t, transport, "{}"))
			assert.EqualValues(t, 150, used(w))
			answer := send(t, transport, "{}")
			assert.Equal(t, 429, answer.StatusCode)
			assert.Equal(t, "60", answer.Header.Get("Retry-After"))
			time.Sleep(time.Minute)
			assert.Equal(t, 200, send(t, transport, "{}").StatusCode)
		})
	}
}

// Case 7: what uses no tokens is not charged, not even one.
func TestWhatUsesNoTokensIsNotCharged(t *testing.T) {
	w := newWindow(t, quotaOf(quotashare.Batch, 75))
	transport := &Transport{Base: says(200, `{"data":[]}`), Limits: []Limit{{Limiter: w}, {w, Requests}}}
	for range 75 {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://provider.test/v1/models", nil)
		require.NoError(t, err)
		answer, err := transport.RoundTrip(r)
		require.NoError(t, err)
		readAll(t, answer)
	}
	assert.Zero(t, used(w))
	assert.Zero(t, w.Stats().Classes[quotashare.Batch].Admitted)
	assert.Zero(t, transport.Unstamped(), "and so nobody need stamp it")
}

// Case 9: where two output limits are given the larger is reserved.
func TestTheLargerOutputLimitIsReserved(t *testing.T) {
	for _, body := range []string{
		`{"max_tokens":1,"max_completion_tokens":10000}`, `{"max_completion_tokens":10000,"max_tokens":1}`,
		`{"max_tokens":10000,"max_output_tokens":1}`, `{"max_tokens":1,"inferenceConfig":{"maxTokens":10000}}`,
	} {
		w := newWindow(t, quotaOf(quotashare.Interactive, 100))
		transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: w}}, Profile: OpenAI}
		assert.Equal(t, 413, send(t, transport, body).StatusCode, "never")
		assert.Zero(t, used(w))
		assert.GreaterOrEqual(t, estimate(t, OpenAI, body).Output, int64(10_000))
	}
}

// Case 10: reasoning tokens are a part of the output, and not counted beside it.
func TestReasoningIsPartOfTheOutput(t *testing.T) {
	for _, usage := range []string{
		`{"prompt_tokens":2008,"completion_tokens":266,"total_tokens":2274,` +
			`"completion_tokens_details":{"reasoning_tokens":261}}`,
		`{"input_tokens":2008,"output_tokens":266,"total_tokens":2274,"output_tokens_details":{"reasoning_tokens":261}}`,
		`{"prompt_tokens":2008,"completion_tokens":266,"reasoning_tokens":261}`,
	} {
		body := `{"usage":` + usage + `}`
		assert.Equal(t, metered{2008, 266, true}, meter(t, Profile{}, contentType(object), body), usage)
	}
}

// Case 11: providers differ in whether cached input is part of the input or beside it, and in whether it counts. The
// first is seen from the answer, the second is a setting.
func TestCachedInputCountsAsTheProfileSays(t *testing.T) {
	const inside = `{"usage":{"prompt_tokens":10000,"completion_tokens":0,"prompt_tokens_details":{"cached_tokens":8000}}}`
	const beside = `{"usage":{"input_tokens":50,"cache_read_input_tokens":8000,"cache_creation_input_tokens":0}}`
	for _, c := range []struct {
		body string
		free bool
		want int64
		fit  int
	}{
		{inside, true, 2000, 5}, {inside, false, 10_000, 1}, {beside, true, 50, 200}, {beside, false, 8050, 2},
	} {
		w := newWindow(t, quotaOf(quotashare.Interactive, 10_000))
		transport := &Transport{
			Base: says(200, c.body), Limits: []Limit{{Limiter: w}}, Profile: Profile{CachedInputFree: c.free},
			Estimate: estimated(1),
		}
		fit := 0
		for answer := send(t, transport, "{}"); answer.StatusCode == 200; answer = send(t, transport, "{}") {
			readAll(t, answer)
			fit++
			assert.EqualValues(t, int64(fit)*c.want, used(w))
		}
		assert.Equal(t, c.fit, fit)
	}
}

// Case 18: an attempt that reached nobody costs nothing, so an outage does not become a limit. One that the provider
// answered with an error costs what the provider counts for it.
func TestAttemptsThatReachedNobodyCostNothing(t *testing.T) {
	down := httptest.NewServer(http.NotFoundHandler())
	down.Close()
	w, requests := newWindow(t, quotaOf(quotashare.Interactive, 1000)), newWindow(t, quotaOf(quotashare.Interactive, 2))
	under := &http.Transport{}
	defer under.CloseIdleConnections()
	transport := &Transport{
		Base: under, Limits: []Limit{{Limiter: w}, {requests, Requests}}, Estimate: estimated(400),
	}
	for range 3 {
		_, err := transport.RoundTrip(newRequest(interactive(), t, down.URL+"/v1/responses", "{}"))
		require.Error(t, err)
		assert.Zero(t, used(w))
		assert.Zero(t, used(requests))
	}
	transport.Base = says(200, `{"usage":{"prompt_tokens":300,"completion_tokens":80}}`)
	readAll(t, send(t, transport, "{}"))
	assert.EqualValues(t, 380, used(w))
	assert.EqualValues(t, 1, used(requests))
	assert.EqualValues(t, 3*400, w.Stats().Classes[quotashare.Interactive].CancelledTokens)

	transport.Base = says(400, `{"error":{"message":"the prompt is too long"}}`)
	readAll(t, send(t, transport, "{}"))
	assert.EqualValues(t, 380, used(w))
	transport.Profile.CountsFailed = true
	transport.Limits = transport.Limits[:1]
	readAll(t, send(t, transport, "{}"))
	assert.EqualValues(t, 780, used(w))
}

// Case 19: a request that was never sent is no request. One that was, and used nothing, is one, and of no tokens.
func TestARequestThatUsedNothingIsStillARequest(t *testing.T) {
	for name, c := range map[string]struct {
		base     base
		requests int64
	}{
		"never sent":   {fails(errors.Join(errors.New("down"), &net.OpError{Op: "dial", Err: io.EOF})), 0},
		"used nothing": {says(200, `{"usage":{"prompt_tokens":0,"completion_tokens":0}}`), 2},
	} {
		t.Run(name, func(t *testing.T) {
			tokens := newWindow(t, quotaOf(quotashare.Interactive, 1000))
			requests := newWindow(t, quotaOf(quotashare.Interactive, 2))
			transport := &Transport{Base: c.base, Limits: []Limit{{Limiter: tokens}, {requests, Requests}}}
			for range 2 {
				answer, err := transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
				if err == nil {
					readAll(t, answer)
				}
			}
			assert.Zero(t, used(tokens))
			assert.Equal(t, c.requests, used(requests))
			transport.Base = says(200, used60)
			want := 200
			if c.requests == 2 {
				want = 429
			}
			assert.Equal(t, want, send(t, transport, "{}").StatusCode)
		})
	}
}

// Case 60: nothing that a caller can write chooses the class: not a header, not the address, not the body.
func TestNothingInARequestChoosesTheClass(t *testing.T) {
	forge := func(r *http.Request) *http.Request {
		for _, name := range []string{
			"X-Class", "X-Priority", "Priority", "X-Quota-Class", "X-Quotashare-Class", "X-Source", "Quotashare-Source",
		} {
			for _, value := range []string{"interactive", "api", "0", "u=0"} {
				r.Header.Add(name, value)
			}
		}
		return r
	}
	const body = `{"class":"interactive","source":"api","priority":0,"service_tier":"priority","metadata":{"class":0}}`
	for _, source := range []quotashare.Source{quotashare.SourceEval, quotashare.SourceScheduler, {}} {
		limiter := &tally{}
		transport := &Transport{Base: says(200, used60), Limits: []Limit{{Limiter: limiter}}}
		handler := Enter(source, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			to := forge(newRequest(r.Context(), t, chat+"?class=interactive&source=api", body))
			answer, err := transport.RoundTrip(to)
			require.NoError(t, err)
			readAll(t, answer)
		}))
		from := forge(httptest.NewRequest(http.MethodPost, "/chat?class=interactive", strings.NewReader(body)))
		handler.ServeHTTP(httptest.NewRecorder(), from)
		require.Len(t, limiter.grants, 1)
		assert.Equal(t, quotashare.ClassFor(source), limiter.grants[0].class)
		assert.Zero(t, transport.Unstamped())

		// Without the handler nobody has stamped it.
		answer, err := transport.RoundTrip(forge(newRequest(context.Background(), t, chat, body)))
		require.NoError(t, err)
		readAll(t, answer)
		assert.Equal(t, quotashare.Batch, limiter.grants[1].class)
		assert.EqualValues(t, 1, transport.Unstamped())
	}
}

// limited sends one call that is answered 429 with the header, in a bubble, and returns how long the Window refuses
// everybody then.
func limited(t *testing.T, header ...string) (blocked time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWindow(t, quotaOf(quotashare.Interactive, 1000))
		const body = `{"error":{"type":"rate_limit_error"}}`
		transport := &Transport{Base: says(429, body, header...), Limits: []Limit{{Limiter: w}}}
		start := time.Now()
		answer := send(t, transport, "{}")
		require.Zero(t, time.Since(start), "nobody sleeps")
		require.Equal(t, 429, answer.StatusCode)
		require.Equal(t, body, readAll(t, answer))
		for i := 0; i < len(header); i += 2 {
			require.Equal(t, header[i+1], answer.Header.Get(header[i]), "as it came")
		}
		require.Empty(t, answer.Header.Get("X-Should-Retry"), "the caller may come back to the provider")
		_, d := w.TryAcquire(quotashare.Interactive, 1)
		if blocked = d.RetryAfter; blocked > 0 {
			time.Sleep(blocked - 1)
			_, d = w.TryAcquire(quotashare.Interactive, 1)
			require.False(t, d.Admitted)
			time.Sleep(time.Nanosecond)
		}
		_, d = w.TryAcquire(quotashare.Interactive, 1)
		require.True(t, d.Admitted, "not a nanosecond longer")
	})
	return blocked
}

// backoff is how long everybody is refused after a 429 that does not say for how long.
var backoff = quotashare.Backoff(quotashare.Interactive, time.Minute)

// Case 71: a long Retry-After is neither slept through nor cut short. Up to two Windows it stops everybody for as long
// as it says. Beyond that it is no word on this limit, and the caller alone hears of it.
func TestALongRetryAfterIsNeitherSleptNorCutShort(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"1": time.Second, "59": 59 * time.Second, "60": time.Minute, "61": 61 * time.Second, "119": 119 * time.Second,
		"120": 2 * time.Minute, "121": 0, "86400": 0,
	} {
		assert.Equal(t, want, limited(t, "Retry-After", text), text)
		ms := text + "000"
		assert.Equal(t, want, limited(t, "Retry-After-Ms", ms), ms)
	}
}

// Case 72: Retry-After may be a date, in any of the three forms, and is measured by the clock of whoever wrote it.
func TestRetryAfterMayBeADate(t *testing.T) {
	for _, off := range []time.Duration{0, -2 * time.Minute, 2 * time.Minute, 10 * 365 * 24 * time.Hour} {
		theirs := bubbleTime.Add(off)
		date := theirs.Format(http.TimeFormat)
		for _, form := range []string{http.TimeFormat, "Monday, 02-Jan-06 15:04:05 GMT", time.ANSIC} {
			after := theirs.Add(37 * time.Second).Format(form)
			assert.Equal(t, 37*time.Second, limited(t, "Date", date, "Retry-After", after), after)
			after = theirs.Add(-37 * time.Second).Format(form)
			assert.Equal(t, backoff, limited(t, "Date", date, "Retry-After", after), after)
		}
	}
	// Without a Date, or with one that is none, it is ours.
	after := bubbleTime.Add(37 * time.Second).Format(http.TimeFormat)
	assert.Equal(t, 37*time.Second, limited(t, "Retry-After", after))
	assert.Equal(t, 37*time.Second, limited(t, "Date", "today", "Retry-After", after))
	assert.Equal(t, backoff, limited(t, "Date", after, "Retry-After", after), "now")
	assert.Equal(t, backoff, limited(t, "Retry-After", "Wed, 21 Oct"))
}

// Case 73: nothing, zero, and less are not at once: then our own backoff holds.
func TestRetryAfterOfNothingIsNotAtOnce(t *testing.T) {
	require.Positive(t, backoff)
	for _, text := range []string{"0", "-5", "", " ", "0.0", "-0", "soon", "-9223372036854775808"} {
		assert.Equal(t, backoff, limited(t, "Retry-After", text), "%q", text)
		assert.Equal(t, backoff, limited(t, "Retry-After-Ms", text), "%q", text)
		assert.Equal(t, backoff, limited(t, "Retry-After-Ms", text, "Retry-After", text), "%q", text)
	}
	assert.Equal(t, backoff, limited(t))
	assert.Equal(t, backoff, limited(t, "Retry-After", "Sat, 21 Oct 1995 07:28:00 GMT"))
}

// Case 74: seconds that no Duration holds are as many as it holds, and so more than two Windows; they are never a time
// that is over. What is no number at all is nothing.
func TestRetryAfterThatNoDurationHoldsIsTheLongest(t *testing.T) {
	for _, text := range []string{
		"9223372036", "9223372037", "9223372036854775807", "18446744073709551616", strings.Repeat("9", 1000),
	} {
		assert.Zero(t, limited(t, "Retry-After", text), "the caller's alone")
		assert.GreaterOrEqual(t, wait(t, "Retry-After", text), 9223372036*time.Second)
	}
	assert.Equal(t, time.Duration(math.MaxInt64), wait(t, "Retry-After", "18446744073709551616"))
	assert.Equal(t, time.Duration(math.MaxInt64), wait(t, "Retry-After-Ms", "18446744073709551616"))
	assert.Equal(t, backoff, limited(t, "Retry-After", "18446744073709551616x"))
}

// Case 76: a reset may be a duration with all its units and fractions.
func TestAResetMayBeADuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"6m0s":            6 * time.Minute,
		"17ms":            17 * time.Millisecond,
		"12us":            12 * time.Microsecond,
		"1.5s":            1500 * time.Millisecond,
		"23h47m36.648s":   85_656_648 * time.Millisecond,
		"2m59.56s":        179_560 * time.Millisecond,
		"7.66s":           7660 * time.Millisecond,
		"1h2m":            62 * time.Minute,
		"60s":             time.Minute,
		"0s":              0,
		"1m 30s":          0, // malformed
		"-1s":             0,
		"-2562047h47m16s": 0,
		"2562048h":        0, // more than a Duration holds
		"s":               0,
		"":                0,
	} {
		got := wait(t, "X-RateLimit-Remaining-Tokens", "0", "X-RateLimit-Reset-Tokens", text)
		assert.Equal(t, want, got, "%q", text)
	}
	limit := func(reset string) time.Duration {
		return limited(t, "X-RateLimit-Remaining-Requests", "0", "X-RateLimit-Reset-Requests", reset)
	}
	assert.Equal(t, 7660*time.Millisecond, limit("7.66s"))
	assert.Equal(t, backoff, limit("-1s"))
	assert.Equal(t, backoff, limit("1m 30s"))
}

// Case 77: a reset may be a time. It is not the number that it begins with.
func TestAResetMayBeATime(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"2000-01-01T00:00:30Z":         30 * time.Second,
		"2000-01-01T02:00:30+02:00":    30 * time.Second,
		"1999-12-31T16:00:30.25-08:00": 30_250 * time.Millisecond,
		"1999-12-31T23:59:30Z":         0,
		"2026":                         2026 * time.Second,
		"2000-01-01":                   0,
		"2000-01-01T00:00:30":          0, // of no place
		"9999-12-31T23:59:59Z":         math.MaxInt64,
	} {
		name, reset := "Anthropic-Ratelimit-Input-Tokens-Remaining", "Anthropic-Ratelimit-Input-Tokens-Reset"
		assert.Equal(t, want, wait(t, name, "0", reset, text), "%q", text)
	}
	limit := func(reset string) time.Duration {
		return limited(t, "Anthropic-Ratelimit-Requests-Remaining", "0", "Anthropic-Ratelimit-Requests-Reset", reset)
	}
	assert.Equal(t, 30*time.Second, limit("2000-01-01T00:00:30Z"))
	assert.Equal(t, backoff, limit("1999-12-31T23:59:30Z"))
	assert.Zero(t, limit("2010-01-01T00:00:30Z"))
}

// Case 79: -1 is what a provider writes that does not know. It is no information, and not nothing left.
func TestUnknownIsNotZero(t *testing.T) {
	unknown := []string{
		"X-RateLimit-Limit-Tokens", "-1", "X-RateLimit-Remaining-Tokens", "-1", "X-RateLimit-Reset-Tokens", "0",
		"X-RateLimit-Limit-Requests", "-1", "X-RateLimit-Remaining-Requests", "-1", "X-RateLimit-Reset-Requests", "0",
	}
	w := newWindow(t, quotaOf(quotashare.Interactive, 100_000))
	transport := &Transport{
		Base: says(200, used60, unknown...), Limits: []Limit{{Limiter: w}}, Estimate: estimated(60),
	}
	readAll(t, send(t, transport, "{}"))
	headroom(t, w, quotashare.Interactive, 99_940)
	assert.EqualValues(t, 100_000, w.Quota().Tokens)
	assert.Equal(t, backoff, limited(t, unknown...))

	// What is left, alone, keeps the room down. It says nothing of the quota.
	transport.Base = says(200, used60, "X-RateLimit-Remaining-Tokens", "61353")
	readAll(t, send(t, transport, "{}"))
	headroom(t, w, quotashare.Interactive, 61_353)
	assert.EqualValues(t, 100_000, w.Quota().Tokens)
}

// Case 81: answers come in any order, and some tell old values. The last to come does not loosen what was told before,
// and of several limits the smallest is the one.
func TestLateHeadersDoNotLoosen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, other := newWindow(t, quotaOf(quotashare.Interactive, 1000)), newWindow(t, quotaOf(quotashare.Interactive, 1000))
		answer := func(sent, took time.Duration, left ...string) {
			time.Sleep(sent)
			transport := &Transport{
				Base: serve(func(w http.ResponseWriter, _ *http.Request) {
					time.Sleep(took)
					w.Header().Set("X-RateLimit-Remaining-Tokens", left[0])
					if len(left) > 1 {
						w.Header().Set("X-RateLimit-Remaining-Project-Tokens", left[1])
					}
				}),
				Limits:   []Limit{{Limiter: w}, {Limiter: other}},
				Estimate: estimated(1),
				Profile:  Profile{CountsReserved: true},
			}
			readAll(t, send(t, transport, "{}"))
		}
		go answer(0, 3*time.Second, "900")
		go answer(time.Second, time.Second, "100")
		time.Sleep(2500 * time.Millisecond)
		headroom(t, w, quotashare.Interactive, 100)
		time.Sleep(time.Second)
		headroom(t, w, quotashare.Interactive, 100)
		headroom(t, other, quotashare.Interactive, 100)
		answer(0, 0, "800", "50")
		headroom(t, w, quotashare.Interactive, 50)
		answer(0, 0, "5000")
		headroom(t, w, quotashare.Interactive, 49)
		assert.EqualValues(t, 1000, w.Quota().Tokens)
	})
	// No header lets more pass than there was.
	w := newWindow(t, quotaOf(quotashare.Interactive, 1000))
	transport := &Transport{
		Base:     says(500, "", "X-RateLimit-Remaining-Tokens", strconv.Itoa(math.MaxInt)),
		Limits:   []Limit{{Limiter: w}},
		Estimate: estimated(300),
	}
	send(t, transport, "{}")
	headroom(t, w, quotashare.Interactive, 700)
}

// Case 82: a 429 that no wait cures is sent once, is the caller's as it came, is charged nothing, and stops nobody.
func TestA429ThatNoWaitCuresIsTheCallersAlone(t *testing.T) {
	for _, body := range []string{
		`{"error":{"message":"none left","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}`,
		`{"type":"error","error":{"type":"rate_limit_error","details":{"error_code":"enforced_spend_limit_reached"}}}`,
	} {
		for _, profile := range []Profile{{}, OpenAI, Azure, Anthropic} {
			w := newWindow(t, quotashare.Quota{Tokens: 1000, Floors: quotashare.NoFloors, Pace: 1})
			sent := 0
			spent := says(429, body)
			transport := &Transport{
				Base: base(func(r *http.Request) (*http.Response, error) {
					sent++
					return spent(r)
				}),
				Limits: []Limit{{Limiter: w}}, Profile: profile, Estimate: estimated(50),
			}
			answer, err := (&http.Client{Transport: transport}).Do(newRequest(interactive(), t, chat, "{}"))
			require.NoError(t, err)
			assert.Equal(t, 429, answer.StatusCode)
			assert.Equal(t, body, readAll(t, answer))
			assert.Equal(t, 1, sent)
			assert.Zero(t, used(w))
			for class := range quotashare.Class(quotashare.NumClasses) {
				_, d := w.TryAcquire(class, 200)
				assert.True(t, d.Admitted, "%v, and a loan", class)
			}
		}
	}
}

// Case 84: headers and bodies of other families are known, or left out without an error. None is read as 0.
func TestOtherFamiliesOfHeadersDoNoHarm(t *testing.T) {
	w := newWindow(t, quotaOf(quotashare.Interactive, 6_000_000))
	transport := &Transport{Limits: []Limit{{Limiter: w}}, Estimate: estimated(60)}
	get := func(status int, body string, header ...string) *http.Response {
		transport.Base = says(status, body, header...)
		answer := send(t, transport, "{}")
		require.Equal(t, status, answer.StatusCode)
		require.Equal(t, body, readAll(t, answer))
		return answer
	}
	get(200, used60, "RateLimit", `"default";r=0;t=50`, "RateLimit-Remaining", "0", "X-RateLimit-Remaining", "0",
		"X-RateLimit-Remaining-Tokens-Day", "0", "Anthropic-Ratelimit-Unified-5h-Reset", "1")
	headroom(t, w, quotashare.Interactive, 6_000_000-60)
	get(200, used60, "X-RateLimit-Limit-Tokens-Minute", "5000000", "X-RateLimit-Remaining-Tokens-Minute", "4999911")
	headroom(t, w, quotashare.Interactive, 4_999_911)

	answer := get(503, `{}`, "X-Should-Retry", "false", "Retry-After", "20")
	assert.Equal(t, "false", answer.Header.Get("X-Should-Retry"), "as it came")
	headroom(t, w, quotashare.Interactive, 4_999_911)

	get(429, fmt.Sprintf(`{"error":{"code":429,"details":[{"@type":"RetryInfo","retryDelay":%q}]}}`, "59s"))
	_, d := w.TryAcquire(quotashare.Interactive, 1)
	assert.Equal(t, quotashare.ReasonQuotaFull, d.Reason)
	assert.LessOrEqual(t, d.RetryAfter, backoff)
}
