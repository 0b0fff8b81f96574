package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// start runs the service, and returns the address of each thing that it prints, and how to end it, which the end of the
// test does otherwise. After that nothing of it serves any more.
func start(t *testing.T, c config) (at map[string]string, stop func()) {
	t.Helper()
	c.addr, c.provider = "127.0.0.1:0", "127.0.0.1:0"
	ctx, cancel := context.WithCancel(context.Background())
	read, write := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := run(ctx, c, write)
		_ = write.CloseWithError(err)
		done <- err
	}()
	text := make([]byte, 1024)
	n, err := read.Read(text) // all is printed at once
	require.NoError(t, err)
	at = map[string]string{}
	address := regexp.MustCompile(`(?m)^(\w+) +(http://127\.0\.0\.1:\d+\S*)`)
	for _, line := range address.FindAllStringSubmatch(string(text[:n]), -1) {
		at[line[1]] = line[2]
	}
	require.Len(t, at, 4, string(text[:n]))
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(20 * time.Second):
			require.Fail(t, "the service does not end")
		}
		for _, url := range at {
			_, err := http.Get(url)
			require.Error(t, err)
		}
	})
	t.Cleanup(stop)
	return at, stop
}

func get(t *testing.T, url string) string {
	t.Helper()
	answer, err := http.Get(url)
	require.NoError(t, err)
	defer answer.Body.Close()
	require.Equal(t, http.StatusOK, answer.StatusCode)
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return string(text)
}

// TestLoad sees calls of all three classes admitted and settled, no call without a stamp, and both views of that.
func TestLoad(t *testing.T) {
	at, _ := start(t, config{tokens: 100_000, window: 2 * time.Second, load: true})
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		var vars struct {
			Quotashare struct {
				Model     quotashare.Stats `json:"fake-model"`
				Unstamped uint64           `json:"unstamped"`
			} `json:"quotashare"`
		}
		answer, err := http.Get(at["expvar"])
		require.NoError(t, err)
		defer answer.Body.Close()
		require.NoError(t, json.NewDecoder(answer.Body).Decode(&vars))
		assert.Zero(t, vars.Quotashare.Unstamped)
		assert.EqualValues(t, 95_000, vars.Quotashare.Model.Quota)
		for _, class := range vars.Quotashare.Model.Classes {
			assert.Positive(t, class.Admitted)
			assert.Positive(t, class.SettledTokens)
		}
	}, 20*time.Second, 50*time.Millisecond)
	page := get(t, at["metrics"])
	for class := range quotashare.Class(quotashare.NumClasses) {
		require.Regexp(t, `quotashare_settled_tokens_total\{class="`+class.String()+`",window="fake-model"\} [1-9]`, page)
	}
}

// TestRefused shows who chats what the window refuses: 429, and when to come back. Without -load nobody else is there.
func TestRefused(t *testing.T) {
	at, _ := start(t, config{tokens: 1000, window: 10 * time.Second})
	chat := func() *http.Response {
		answer, err := http.Post(at["chat"], "text/plain", strings.NewReader("Where is my parcel?"))
		require.NoError(t, err)
		t.Cleanup(func() { _ = answer.Body.Close() })
		return answer
	}
	answer := chat()
	require.Equal(t, http.StatusOK, answer.StatusCode)
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(text), "well "), string(text))

	answer = chat()
	require.Equal(t, http.StatusTooManyRequests, answer.StatusCode)
	require.NotEmpty(t, answer.Header.Get("Retry-After"))
	page := get(t, at["metrics"])
	require.Contains(t, page, `quotashare_decisions_total{class="interactive",reason="own_share",window="fake-model"} 1`)
	require.Regexp(t, `class="interactive",reason="(paced|quota_full|reserved)",window="fake-model"\} 1\n`, page)
}

// TestEnd ends the service while it answers somebody, who gets the answer.
func TestEnd(t *testing.T) {
	at, stop := start(t, config{tokens: 1000, window: time.Minute}) // it thinks for half a second at least
	answered := make(chan error, 1)
	go func() {
		answer, err := http.Post(at["chat"], "text/plain", strings.NewReader("Where is my parcel?"))
		if err == nil {
			_, err = io.Copy(io.Discard, answer.Body)
			err = errors.Join(err, answer.Body.Close())
			if answer.StatusCode != http.StatusOK {
				err = errors.New(answer.Status)
			}
		}
		answered <- err
	}()
	require.Eventually(t, func() bool {
		return strings.Contains(get(t, at["metrics"]), `reason="own_share",window="fake-model"} 1`)
	}, 10*time.Second, 10*time.Millisecond)
	stop()
	require.NoError(t, <-answered)
}

func TestErrors(t *testing.T) {
	require.ErrorContains(t, run(t.Context(), config{}, io.Discard), "tokens is 0")
	require.ErrorContains(t, run(t.Context(), config{tokens: 1000, provider: "nowhere"}, io.Discard), "nowhere")
	c := config{tokens: 1000, provider: "127.0.0.1:0", addr: "nowhere"}
	require.ErrorContains(t, run(t.Context(), c, io.Discard), "nowhere")
}

// TestProvider fills the provider, which then answers 429 and tells when to come back, and not later than it must.
func TestProvider(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &provider{quota: 1000, window: time.Minute}
		ask := func(body string) *httptest.ResponseRecorder {
			w := httptest.NewRecorder()
			p.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)))
			return w
		}
		require.Equal(t, http.StatusBadRequest, ask(`{}`).Code)
		require.Equal(t, http.StatusBadRequest, ask(`not JSON`).Code)

		used := int64(0)
		w := ask(`{"max_tokens": 400}`)
		for ; w.Code == http.StatusOK; w = ask(`{"max_tokens": 400}`) {
			var answer struct {
				Usage struct {
					Prompt     int64 `json:"prompt_tokens"`
					Completion int64 `json:"completion_tokens"`
					Total      int64 `json:"total_tokens"`
				} `json:"usage"`
			}
			require.NoError(t, json.NewDecoder(bytes.NewReader(w.Body.Bytes())).Decode(&answer))
			require.Equal(t, answer.Usage.Total, answer.Usage.Prompt+answer.Usage.Completion)
			require.LessOrEqual(t, answer.Usage.Completion, int64(400))
			used += answer.Usage.Total
			require.Equal(t, strconv.FormatInt(1000-used, 10), w.Header().Get("X-Ratelimit-Remaining-Tokens"))
		}
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		require.Contains(t, w.Body.String(), "rate_limit_exceeded")
		require.LessOrEqual(t, used, int64(1000))
		require.Greater(t, used, int64(1000-400))
		wait, err := strconv.Atoi(w.Header().Get("Retry-After-Ms"))
		require.NoError(t, err)
		require.LessOrEqual(t, time.Duration(wait)*time.Millisecond, time.Minute)

		// A Window after the last call all is there again.
		time.Sleep(time.Minute)
		w = ask(`{"max_tokens": 1}`)
		require.Equal(t, http.StatusOK, w.Code)
		require.Equal(t, "995", w.Header().Get("X-Ratelimit-Remaining-Tokens"))
	})
}

// TestProviderTellsWhenThereIsRoom comes back when told, and finds room; a moment sooner there is none.
func TestProviderTellsWhenThereIsRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &provider{quota: 1000, window: time.Minute}
		for range 4 {
			ok, _, _ := p.count(250)
			require.True(t, ok)
			time.Sleep(time.Second)
		}
		ok, left, wait := p.count(500)
		require.False(t, ok)
		require.Zero(t, left)
		require.Equal(t, 57*time.Second, wait)
		time.Sleep(wait - 1)
		ok, _, _ = p.count(500)
		require.False(t, ok)
		time.Sleep(time.Nanosecond)
		ok, left, _ = p.count(500)
		require.True(t, ok)
		require.Zero(t, left)
	})
}
