package llmhttp_test

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
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

// What is left of a limit, by the names that providers have for it.
func TestRemainingOfEveryProvider(t *testing.T) {
	const none = -7
	for name, c := range map[string]struct {
		header []string
		want   [4]int64 // by unit
	}{
		"none": {nil, [4]int64{none, none, none, none}},
		"OpenAI, Azure, Groq": {[]string{
			"x-ratelimit-limit-requests", "60", "x-ratelimit-limit-tokens", "150000",
			"x-ratelimit-remaining-requests", "59", "x-ratelimit-remaining-tokens", "149984",
			"x-ratelimit-reset-requests", "1s", "x-ratelimit-reset-tokens", "6m0s",
		}, [4]int64{149_984, none, none, 59}},
		"OpenAI, a project's": {[]string{
			"x-ratelimit-remaining-tokens", "149984", "x-ratelimit-remaining-project-tokens", "70",
		}, [4]int64{70, none, none, none}},
		"the smallest of several": {[]string{
			"x-ratelimit-remaining-tokens", "70", "x-ratelimit-remaining-project-tokens", "149984",
			"anthropic-ratelimit-tokens-remaining", "71",
		}, [4]int64{70, none, none, none}},
		"Mistral": {[]string{
			"x-ratelimit-limit-tokens-minute", "5000000", "x-ratelimit-remaining-tokens-minute", "4999911",
		}, [4]int64{4_999_911, none, none, none}},
		"Anthropic": {[]string{
			"anthropic-ratelimit-requests-limit", "1000", "anthropic-ratelimit-requests-remaining", "999",
			"anthropic-ratelimit-requests-reset", "2026-08-07T21:00:00Z",
			"anthropic-ratelimit-tokens-remaining", "540000", "anthropic-ratelimit-input-tokens-remaining", "449000",
			"anthropic-ratelimit-output-tokens-remaining", "90000",
		}, [4]int64{540_000, 449_000, 90_000, 999}},
		"Anthropic, others": {[]string{
			"anthropic-priority-input-tokens-remaining", "1", "anthropic-ratelimit-unified-5h-utilization", "0.5",
		}, [4]int64{none, none, none, none}},
		"nothing is left": {[]string{
			"x-ratelimit-remaining-requests", "0", "x-ratelimit-remaining-tokens", "0",
		}, [4]int64{0, none, none, 0}},
		"unknown": {[]string{
			"x-ratelimit-remaining-requests", "-1", "x-ratelimit-remaining-tokens", "-1",
		}, [4]int64{none, none, none, none}},
		"unknown, and known": {[]string{
			"x-ratelimit-remaining-tokens", "-1", "x-ratelimit-remaining-project-tokens", "70",
		}, [4]int64{70, none, none, none}},
		"malformed": {[]string{
			"x-ratelimit-remaining-requests", "many", "x-ratelimit-remaining-tokens", "",
			"anthropic-ratelimit-input-tokens-remaining", "1e3", "anthropic-ratelimit-output-tokens-remaining", "12x",
		}, [4]int64{none, none, none, none}},
		"more than there is": {[]string{
			"x-ratelimit-remaining-requests", "9223372036854775808", "x-ratelimit-remaining-tokens", "9223372036854775807",
		}, [4]int64{math.MaxInt64, none, none, none}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, status := range []int{200, 204, 400, 500} { // an answer is an answer; 429 says it by itself
				transport := &Transport{Base: says(status, "", c.header...), Estimate: estimated(500)}
				var limiters [4]*tally
				for unit := range limiters {
					limiters[unit] = &tally{}
					transport.Limits = append(transport.Limits, Limit{limiters[unit], Unit(unit)})
				}
				// Limiters that want to know nothing are told nothing.
				transport.Limits = append(transport.Limits, Limit{&remote{tally: &tally{}}, Requests})
				readAll(t, send(t, transport, "{}"))
				for unit, want := range c.want {
					if want == none {
						assert.Empty(t, limiters[unit].observed, "%d: unit %d", status, unit)
					} else {
						assert.Equal(t, []int64{want}, limiters[unit].observed, "%d: unit %d", status, unit)
					}
				}
			}
		})
	}
}

// What is told is as old as the request: the time since it was sent, without what it waited before.
func TestWhatIsToldIsAsOldAsTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWindow(t, quotaOf(quotashare.Batch, 1000))
		take(t, w, quotashare.Batch, 1000)
		limiter := &tally{}
		transport := &Transport{
			Base: serve(func(w http.ResponseWriter, _ *http.Request) {
				time.Sleep(7 * time.Second)
				w.Header().Set("X-RateLimit-Remaining-Tokens", "100")
			}),
			Limits: []Limit{{Limiter: w}, {Limiter: limiter}},
		}
		start := time.Now()
		answer, err := transport.RoundTrip(newRequest(t.Context(), t, chat, "{}"))
		require.NoError(t, err)
		assert.Equal(t, 67*time.Second, time.Since(start))
		time.Sleep(time.Hour)
		readAll(t, answer)
		assert.Equal(t, []int64{100}, limiter.observed)
		assert.Equal(t, []time.Duration{7 * time.Second}, limiter.ages)
	})
}

// wait returns how long a 429 with the header says to wait, at the time that it is in a bubble.
func wait(t *testing.T, header ...string) (told time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		limiter, second := &tally{}, &tally{}
		transport := &Transport{
			Base:   says(429, `{"error":{"type":"rate_limit_error"}}`, header...),
			Limits: []Limit{{Limiter: limiter}, {second, Requests}},
		}
		answer := send(t, transport, "{}")
		require.Len(t, limiter.throttled, 1, "before its body is read")
		require.Equal(t, limiter.throttled, second.throttled, "all limits are told")
		require.Equal(t, `{"error":{"type":"rate_limit_error"}}`, readAll(t, answer))
		require.Equal(t, 429, answer.StatusCode)
		told = limiter.throttled[0]
	})
	return told
}

// bubbleTime is the time at which a bubble begins.
var bubbleTime = time.Date(2000, time.January, 1, 0, 0, 0, 0, time.UTC)

func TestRetryAfterOfEveryForm(t *testing.T) {
	in := func(d time.Duration) string { return bubbleTime.Add(d).Format(http.TimeFormat) }
	for _, c := range []struct {
		header []string
		want   time.Duration
	}{
		{nil, 0},
		{[]string{"Retry-After", "7"}, 7 * time.Second},
		{[]string{"Retry-After", " 7 "}, 7 * time.Second},
		{[]string{"Retry-After", "0.25"}, 250 * time.Millisecond},
		{[]string{"Retry-After", "7."}, 7 * time.Second},
		{[]string{"Retry-After", ".5"}, 500 * time.Millisecond},
		{[]string{"Retry-After", "0.0000000001"}, 1},
		{[]string{"Retry-After-Ms", "1500"}, 1500 * time.Millisecond},
		{[]string{"Retry-After-Ms", "0.5"}, 500 * time.Microsecond},
		{[]string{"Retry-After-Ms", "1500", "Retry-After", "9"}, 1500 * time.Millisecond},
		{[]string{"Retry-After-Ms", "0", "Retry-After", "9"}, 9 * time.Second},
		{[]string{"Retry-After-Ms", "-1", "Retry-After", "9"}, 9 * time.Second},
		{[]string{"Retry-After-Ms", "x", "Retry-After", "9"}, 9 * time.Second},
		{[]string{"Retry-After", in(37 * time.Second)}, 37 * time.Second},
		{[]string{"Retry-After", in(-time.Second)}, 0},
		{[]string{"Retry-After", "-5"}, 0},
		{[]string{"Retry-After", "+5"}, 0},
		{[]string{"Retry-After", "1e3"}, 0},
		{[]string{"Retry-After", "0x10"}, 0},
		{[]string{"Retry-After", "1_000"}, 0},
		{[]string{"Retry-After", "."}, 0},
		{[]string{"Retry-After", "1.2.3"}, 0},
		{[]string{"Retry-After", "7 s"}, 0},
		{[]string{"Retry-After", "NaN"}, 0},
		{[]string{"Retry-After", "Inf"}, 0},
		{[]string{"Retry-After", strings.Repeat("9", 400)}, math.MaxInt64},
		// By the reset of what is used up, but only without these.
		{[]string{"x-ratelimit-remaining-tokens", "0", "x-ratelimit-reset-tokens", "7s"}, 7 * time.Second},
		{[]string{"x-ratelimit-remaining-tokens", "1", "x-ratelimit-reset-tokens", "7s"}, 0},
		{[]string{"x-ratelimit-remaining-tokens", "", "x-ratelimit-reset-tokens", "7s"}, 0},
		{[]string{"x-ratelimit-reset-tokens", "7s"}, 0},
		{[]string{"x-ratelimit-remaining-tokens", "0"}, 0},
		{[]string{"x-ratelimit-remaining-tokens-minute", "0"}, 0},
		{[]string{
			"x-ratelimit-remaining-tokens", "0", "x-ratelimit-reset-tokens", "7s", "Retry-After", "2",
		}, 2 * time.Second},
		{[]string{
			"x-ratelimit-remaining-tokens", "0", "x-ratelimit-reset-tokens", "7s", "Retry-After", "x",
		}, 7 * time.Second},
		{[]string{"x-ratelimit-remaining-requests", "0", "x-ratelimit-reset-requests", "17ms"}, 17 * time.Millisecond},
		{[]string{"x-ratelimit-remaining-project-tokens", "0", "x-ratelimit-reset-project-tokens", "3"}, 3 * time.Second},
		{[]string{
			"x-ratelimit-remaining-requests", "0", "x-ratelimit-reset-requests", "9s",
			"x-ratelimit-remaining-tokens", "0", "x-ratelimit-reset-tokens", "7s",
		}, 9 * time.Second},
		{[]string{
			"x-ratelimit-remaining-requests", "12", "x-ratelimit-reset-requests", "9s",
			"x-ratelimit-remaining-tokens", "0", "x-ratelimit-reset-tokens", "7s",
		}, 7 * time.Second},
		{[]string{
			"anthropic-ratelimit-input-tokens-remaining", "0",
			"anthropic-ratelimit-input-tokens-reset", "2000-01-01T00:00:05Z",
		}, 5 * time.Second},
		{[]string{
			"anthropic-ratelimit-output-tokens-remaining", "0",
			"anthropic-ratelimit-output-tokens-reset", "2000-01-01T01:00:06.5+01:00",
		}, 6500 * time.Millisecond},
		{[]string{
			"anthropic-ratelimit-tokens-remaining", "0", "anthropic-ratelimit-tokens-reset", "2000-01-01T00:00:07Z",
			"anthropic-ratelimit-requests-remaining", "0", "anthropic-ratelimit-requests-reset", "2000-01-01T00:00:08Z",
		}, 8 * time.Second},
	} {
		assert.Equal(t, c.want, wait(t, c.header...), "%q", c.header)
	}
}

// A 429 stops everybody who shares the limits, whoever it answered, until the time that it told, and lends nothing for
// a whole Window.
func TestA429StopsEverybody(t *testing.T) {
	in := func(d time.Duration) string { return bubbleTime.Add(d).Format(http.TimeFormat) }
	for name, c := range map[string]struct {
		header []string
		want   time.Duration
	}{
		"in seconds":      {[]string{"Retry-After", "20"}, 20 * time.Second},
		"in milliseconds": {[]string{"Retry-After-Ms", "20500"}, 20500 * time.Millisecond},
		"a date":          {[]string{"Retry-After", in(20 * time.Second)}, 20 * time.Second},
		"a reset": {[]string{
			"X-RateLimit-Remaining-Requests", "0", "X-RateLimit-Reset-Requests", "1m40s",
		}, 100 * time.Second},
		"without a word": {nil, quotashare.Backoff(quotashare.Interactive, time.Minute)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				quota := quotashare.Quota{Tokens: 1000, Floors: quotashare.NoFloors, Pace: 1}
				w := newWindow(t, quota)
				limited := &Transport{Base: says(429, `{}`, c.header...), Limits: []Limit{{Limiter: w}}}
				other := &Transport{Base: says(200, used60), Limits: []Limit{{Limiter: w}}, Estimate: estimated(100)}
				start := time.Now()
				assert.Equal(t, 429, send(t, limited, "{}").StatusCode)
				waited := make(chan time.Duration)
				go func() {
					_, err := other.RoundTrip(newRequest(context.Background(), t, chat, "{}")) // Batch: within its share
					assert.NoError(t, err)
					waited <- time.Since(start)
				}()
				synctest.Wait()
				time.Sleep(c.want - 1)
				refused := send(t, other, "{}")
				assert.Equal(t, 429, refused.StatusCode)
				assert.Equal(t, "false", refused.Header.Get("X-Should-Retry"), "it is ours")
				assert.Equal(t, "1", refused.Header.Get("Retry-After-Ms"))
				assert.Equal(t, c.want, <-waited)
				assert.Equal(t, 200, send(t, other, "{}").StatusCode)
				other.Estimate = estimated(701) // a loan
				loan := max(time.Minute, c.want)
				if wait := loan - time.Since(start); wait > 0 {
					time.Sleep(wait - 1)
					assert.Equal(t, 429, send(t, other, "{}").StatusCode)
				}
			})
		})
	}
}

// The body of a 429 is the caller's, byte for byte, whatever is in it and wherever it breaks off.
func TestTheBodyOfA429ReachesTheCaller(t *testing.T) {
	long := strings.Repeat("0123456789abcdef", 1<<13)
	for name, c := range map[string]struct {
		body io.Reader
		want string
		err  error
	}{
		"empty":           {strings.NewReader(""), "", nil},
		"JSON":            {strings.NewReader(`{"error":{}}`), `{"error":{}}`, nil},
		"no JSON":         {strings.NewReader("<html>\x00\xff"), "<html>\x00\xff", nil},
		"long":            {strings.NewReader(long), long, nil},
		"in small pieces": {iotest.OneByteReader(strings.NewReader(long[:70_000])), long[:70_000], nil},
		"data and end":    {iotest.DataErrReader(strings.NewReader(long[:1<<16])), long[:1<<16], nil},
		"broken off": {
			io.MultiReader(strings.NewReader(`{"error":`), iotest.ErrReader(io.ErrUnexpectedEOF)),
			`{"error":`, io.ErrUnexpectedEOF,
		},
		"broken off late": {
			io.MultiReader(strings.NewReader(long), iotest.ErrReader(io.ErrUnexpectedEOF)), long, io.ErrUnexpectedEOF,
		},
	} {
		t.Run(name, func(t *testing.T) {
			limiter := &tally{}
			body := &trackedBody{Reader: c.body, err: io.ErrShortWrite}
			transport := &Transport{
				Base: base(func(r *http.Request) (*http.Response, error) {
					return &http.Response{StatusCode: 429, Header: http.Header{}, Body: body}, r.Body.Close()
				}),
				Limits: []Limit{{Limiter: limiter}},
			}
			answer := send(t, transport, "{}")
			assert.Len(t, limiter.throttled, 1)
			assert.Zero(t, body.closed)
			got, err := io.ReadAll(answer.Body)
			assert.Equal(t, c.err, err)
			assert.True(t, c.want == string(got))
			assert.Equal(t, io.ErrShortWrite, answer.Body.Close())
			assert.Equal(t, 1, body.closed)
		})
	}
}

// A 429 that says that the money is spent is one that no wait cures: it stops nobody, and costs nothing.
func TestA429ForMoneyStopsNobody(t *testing.T) {
	spent := []string{
		`{"error":{"message":"none left","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}`,
		`{"error":{"type":"insufficient_quota","code":null}}`,
		`{"error":{"type":"requests","code":"insufficient_quota"}}`,
		`{"error":{"type":"invalid_request_error","code":"billing_hard_limit_reached"}}`,
		`{"error":{"code":"billing_not_active"}}`,
		`{"type":"error","error":{"type":"rate_limit_error","details":{"error_code":"enforced_spend_limit_reached"}}}`,
		`{"error":{"type":7,"code":["x"],"details":{"error_code":"enforced_spend_limit_reached","x":1}}}`,
		`{"error":{"message":"` + strings.Repeat("long ", 13_000) + `","code":"insufficient_quota"}}`,
	}
	others := []string{
		``, `{}`, `null`, `"insufficient_quota"`, `[{"error":{"code":"insufficient_quota"}}]`,
		`{"error":"insufficient_quota"}`,
		`{"error":{"message":"insufficient_quota"}}`,
		`{"error":{"type":"tokens","code":"rate_limit_exceeded"}}`,
		`{"type":"error","error":{"type":"rate_limit_error"}}`,
		`{"error":{"code":{"code":"insufficient_quota"},"type":["insufficient_quota"]}}`,
		`{"code":"insufficient_quota"}`,
		`{"error":{"code":"insufficient_quota"}`,
		`{"error":{"code":429,"status":"RESOURCE_EXHAUSTED","details":[{"retryDelay":"59s"}]}}`,
		`{"message":"Too many requests, please wait before trying again."}`,
	}
	for i, body := range append(spent, others...) {
		for _, packed := range []bool{false, true} {
			for _, counts := range []bool{false, true} {
				limiter := &tally{}
				header, want := []string{"Retry-After", "20"}, body
				if packed {
					header, want = append(header, "Content-Encoding", "gzip"), zip(t, gzip.BestSpeed, body)
				}
				transport := &Transport{
					Base:     says(429, want, header...),
					Limits:   []Limit{{Limiter: limiter}},
					Profile:  Profile{CountsFailed: counts},
					Estimate: estimated(500),
				}
				answer := send(t, transport, "{}")
				assert.Equal(t, 429, answer.StatusCode)
				assert.Equal(t, "20", answer.Header.Get("Retry-After"))
				assert.True(t, want == readAll(t, answer))
				if i < len(spent) {
					assert.Empty(t, limiter.throttled, body)
					assert.Zero(t, limiter.charge(t), body)
					continue
				}
				assert.Equal(t, []time.Duration{20 * time.Second}, limiter.throttled, body)
				charge := int64(0)
				if counts {
					charge = 500
				}
				assert.Equal(t, charge, limiter.charge(t), body)
			}
		}
	}
}

// Only a 429 of the provider stops others: not another status, not a refusal of ours, not an error.
func TestOnlyA429StopsOthers(t *testing.T) {
	for _, status := range []int{200, 400, 403, 408, 413, 500, 503, 529} {
		limiter := &tally{}
		transport := &Transport{Base: says(status, `{}`, "Retry-After", "20"), Limits: []Limit{{Limiter: limiter}}}
		readAll(t, send(t, transport, "{}"))
		assert.Empty(t, limiter.throttled, status)
	}
	w := newWindow(t, quotashare.Quota{Tokens: 1000, Floors: quotashare.NoFloors, Pace: 1})
	transport := &Transport{Base: fails(errors.New("sent")), Limits: []Limit{{Limiter: w}}, Estimate: estimated(1001)}
	require.Equal(t, 413, send(t, transport, "{}").StatusCode)
	transport.Estimate = estimated(600)
	_, err := transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
	require.Error(t, err)
	require.Equal(t, 429, send(t, transport, "{}").StatusCode, "the first may have been sent")
	_, d := w.TryAcquire(quotashare.Batch, 300) // a loan
	assert.True(t, d.Admitted)
}

// What is charged for calls in flight is allowed for, so that they are not taken for those of others.
func TestCallsInFlightAreNotOthers(t *testing.T) {
	w := newWindow(t, quotaOf(quotashare.Interactive, 1000))
	left := 1000
	transport := &Transport{
		Base: serve(func(w http.ResponseWriter, _ *http.Request) {
			left -= 100
			w.Header().Set("X-RateLimit-Remaining-Tokens", fmt.Sprint(left))
		}),
		Limits: []Limit{{Limiter: w}}, Estimate: estimated(100),
	}
	for range 5 {
		send(t, transport, "{}") // and is not read, so its estimate stands
	}
	assert.Zero(t, w.Usage().Others)
	assert.EqualValues(t, 500, used(w))
	left -= 200
	send(t, transport, "{}")
	assert.EqualValues(t, 200, w.Usage().Others)
	assert.Equal(t, 429, send(t, &Transport{Limits: transport.Limits, Estimate: estimated(201)}, "{}").StatusCode)
	assert.Equal(t, 200, send(t, transport, "{}").StatusCode)
}

// What a 429 says is left need not be of this limit: of a day, or of money.
func TestA429SaysNothingByWhatIsLeft(t *testing.T) {
	for name, c := range map[string]struct {
		body  string
		after string
	}{
		"a daily limit": {`{}`, "7200"},
		"money":         {`{"error":{"type":"insufficient_quota"}}`, "20"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWindow(t, quotaOf(quotashare.Interactive, 30))
			transport := &Transport{
				Base:   says(429, c.body, "X-RateLimit-Remaining-Requests", "0", "Retry-After", c.after),
				Limits: []Limit{{w, Requests}},
			}
			readAll(t, send(t, transport, "{}"))
			assert.Zero(t, w.Usage().Others)
			headroom(t, w, quotashare.Interactive, 30)
		})
	}
}

func TestAnAnswerOutOfACacheTellsNothing(t *testing.T) {
	for age, want := range map[string]int64{"": 900, "0": 900, "1": 0, "3600": 0} {
		w := newWindow(t, quotaOf(quotashare.Interactive, 1000))
		transport := &Transport{
			Base:     says(200, "{}", "X-RateLimit-Remaining-Tokens", "40", "Age", age),
			Limits:   []Limit{{Limiter: w}},
			Estimate: estimated(60),
		}
		readAll(t, send(t, transport, "{}"))
		assert.Equal(t, want, w.Usage().Others, age)
	}
}
