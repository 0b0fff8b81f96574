package redisshare

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
)

// TestUnderAnLLMSDK: llmhttp takes two shared windows as it takes two of quotashare's: it settles both, and what the
// provider says reaches another replica.
func TestUnderAnLLMSDK(t *testing.T) {
	client := newNode(t).client()
	ctx := quotashare.WithSource(context.Background(), quotashare.SourceAPI)
	replica := func(name string, tokens int64) *Window {
		w, err := New(client, name, quotashare.Quota{Tokens: tokens}, Closed, WithTimeout(4*time.Second))
		require.NoError(t, err)
		closeAfter(t, w)
		return w
	}
	throttle := false
	provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if throttle {
			w.Header().Set("Retry-After", "30")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Ratelimit-Remaining-Tokens", "60000")
		fmt.Fprint(w, `{"usage":{"prompt_tokens":100,"completion_tokens":23,"total_tokens":123}}`)
	}))
	defer provider.Close()

	tokens, requests, other := replica("tokens", 100_000), replica("requests", 100), replica("tokens", 100_000)
	used := llmhttp.OpenAI
	used.CountsReserved = false // so that what was used is settled
	sdk := &http.Client{Transport: &llmhttp.Transport{Profile: used, Limits: []llmhttp.Limit{
		{Limiter: tokens}, {Limiter: requests, Unit: llmhttp.Requests},
	}}}
	post := func() int {
		body := `{"model":"m","max_tokens":1000,"messages":[{"role":"user","content":"Where is my parcel?"}]}`
		request, err := http.NewRequestWithContext(ctx, "POST", provider.URL+"/v1/chat/completions", strings.NewReader(body))
		require.NoError(t, err)
		request.Header.Set("Content-Type", "application/json")
		response, err := sdk.Do(request)
		require.NoError(t, err)
		defer response.Body.Close()
		var discard [1024]byte
		for err == nil {
			_, err = response.Body.Read(discard[:])
		}
		return response.StatusCode
	}

	require.Equal(t, http.StatusOK, post())
	require.Eventually(t, func() bool {
		u, err := other.Usage(ctx)
		return err == nil && u.Used[quotashare.Interactive] == 123 && u.Others > 35_000
	}, 5*time.Second, time.Millisecond, "the usage is settled, and what the provider told is known to all")
	u, err := requests.Usage(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 1, u.Used[quotashare.Interactive])

	throttle = true
	require.Equal(t, http.StatusTooManyRequests, post())
	require.Eventually(t, func() bool {
		_, d, err := other.TryAcquire(ctx, quotashare.Interactive, 10)
		return err == nil && d.Reason == quotashare.ReasonQuotaFull && d.RetryAfter > 20*time.Second
	}, 5*time.Second, time.Millisecond, "a 429 stops the other replicas, too")
}
