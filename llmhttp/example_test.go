package llmhttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
)

// Two lines: a handler that stamps where work enters, and a Transport under whatever calls the model.
func Example() {
	provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"content":[{"type":"text","text":"At your door."}],"usage":{"input_tokens":25,"output_tokens":6}}`)
	}))
	defer provider.Close()

	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: 1_000_000})
	if err != nil {
		panic(err)
	}
	client := &http.Client{Transport: &llmhttp.Transport{
		Limits:  []llmhttp.Limit{{Limiter: window}},
		Profile: llmhttp.Anthropic,
	}}

	chat := llmhttp.Enter(quotashare.SourceAPI, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		question := strings.NewReader(`{"max_tokens":500,"messages":[{"role":"user","content":"Where is my parcel?"}]}`)
		request, err := http.NewRequestWithContext(r.Context(), http.MethodPost, provider.URL+"/v1/messages", question)
		if err != nil {
			panic(err)
		}
		answer, err := client.Do(request)
		if err != nil {
			panic(err)
		}
		defer answer.Body.Close()
		_, _ = io.Copy(w, answer.Body)
	}))

	recorder := httptest.NewRecorder()
	chat.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/chat", nil))
	fmt.Println(recorder.Code, "interactive used", window.Usage().Used[quotashare.Interactive])
	// Output: 200 interactive used 31
}

// A handler turns a refusal into 429 in one line.
func ExampleWriteDenied() {
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 1000})
	handler := func(w http.ResponseWriter, r *http.Request) {
		grant, err := window.Acquire(r.Context(), quotashare.ClassFrom(r.Context()), 100)
		if llmhttp.WriteDenied(w, err) {
			return
		}
		grant.Settle(80)
	}
	chat := llmhttp.Enter(quotashare.SourceAPI, http.HandlerFunc(handler))

	busy, _ := window.TryAcquire(quotashare.Interactive, 700)
	recorder := httptest.NewRecorder()
	chat.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/chat", nil))
	fmt.Println(recorder.Code, recorder.Header().Get("Retry-After"))
	busy.Cancel()
	// Output: 429 45
}

// A job of a scheduler enters otherwise, and is stamped all the same.
func ExampleEnterFunc() {
	job := llmhttp.EnterFunc(quotashare.SourceScheduler, func(ctx context.Context) error {
		fmt.Println(quotashare.ClassFrom(ctx))
		return errors.New("nothing to do")
	})
	fmt.Println(job(context.Background()))
	// Output:
	// background
	// nothing to do
}
