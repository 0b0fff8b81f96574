package sdktest

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"github.com/anthropics/anthropic-sdk-go/v2"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
)

// Under the SDK of OpenAI.
func Example_openAI() {
	defer serve()()

	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: 2_000_000})
	if err != nil {
		panic(err)
	}
	limits := []llmhttp.Limit{{Limiter: window}}
	transport := &llmhttp.Transport{Limits: limits, Profile: llmhttp.OpenAI}
	client := openai.NewClient(option.WithHTTPClient(&http.Client{Transport: transport}))

	handler := llmhttp.Enter(quotashare.SourceAPI, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, err := client.Chat.Completions.New(r.Context(), openai.ChatCompletionNewParams{
			Model:               openai.ChatModelGPT5_2,
			Messages:            []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Where is my parcel?")},
			MaxCompletionTokens: openai.Int(500),
		})
		if err != nil {
			http.Error(w, "come back later", http.StatusTooManyRequests)
			return
		}
		fmt.Fprint(w, answer.Choices[0].Message.Content)
	}))

	fmt.Println(ask(handler), window.Stats().Classes[quotashare.Interactive].Admitted, "interactive")
	// Output: 200 1 interactive
}

// Under the SDK of Anthropic, which limits input and output apart.
func Example_anthropic() {
	defer serve()()

	input, err := quotashare.NewWindow(quotashare.Quota{Tokens: 2_000_000})
	if err != nil {
		panic(err)
	}
	output, err := quotashare.NewWindow(quotashare.Quota{Tokens: 400_000})
	if err != nil {
		panic(err)
	}
	limits := []llmhttp.Limit{
		{Limiter: input, Unit: llmhttp.InputTokens},
		{Limiter: output, Unit: llmhttp.OutputTokens},
	}
	transport := &llmhttp.Transport{Limits: limits, Profile: llmhttp.Anthropic}
	client := anthropic.NewClient(anthropicoption.WithHTTPClient(&http.Client{Transport: transport}))

	handler := llmhttp.Enter(quotashare.SourceAPI, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, err := client.Messages.New(r.Context(), anthropic.MessageNewParams{
			Model:     anthropic.ModelClaudeOpus5_5,
			MaxTokens: 500,
			Messages: []anthropic.MessageParam{
				anthropic.NewUserMessage(anthropic.NewTextBlock("Where is my parcel?")),
			},
		})
		if err != nil {
			http.Error(w, "come back later", http.StatusTooManyRequests)
			return
		}
		fmt.Fprint(w, answer.Content[0].Text)
	}))

	fmt.Println(ask(handler), output.Stats().Classes[quotashare.Interactive].Admitted, "interactive")
	// Output: 200 1 interactive
}

// Without an SDK: whatever sends requests by an http.Client.
func Example_plain() {
	defer serve()()

	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: 2_000_000})
	if err != nil {
		panic(err)
	}
	limits := []llmhttp.Limit{{Limiter: window}}
	client := &http.Client{Transport: &llmhttp.Transport{Limits: limits, Profile: llmhttp.OpenAI}}

	chat := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := strings.NewReader(`{"max_tokens":500,"messages":[{"role":"user","content":"Where is my parcel?"}]}`)
		url := os.Getenv("OPENAI_BASE_URL") + "/chat/completions"
		request, err := http.NewRequestWithContext(r.Context(), http.MethodPost, url, body)
		if err != nil {
			panic(err)
		}
		answer, err := client.Do(request)
		if err != nil {
			panic(err)
		}
		defer answer.Body.Close()
		w.WriteHeader(answer.StatusCode)
		_, _ = io.Copy(w, answer.Body)
	})
	handler := llmhttp.Enter(quotashare.SourceAPI, chat)

	fmt.Println(ask(handler), window.Stats().Classes[quotashare.Interactive].Admitted, "interactive")
	// Output: 200 1 interactive
}

// serve begins to serve an account, to which the environment points both SDKs. It returns what ends that.
func serve() (stop func()) {
	server := httptest.NewServer(&provider{window: time.Minute})
	environment := map[string]string{
		"OPENAI_BASE_URL": server.URL + "/v1", "OPENAI_API_KEY": "key",
		"ANTHROPIC_BASE_URL": server.URL, "ANTHROPIC_API_KEY": "key",
	}
	for name, value := range environment {
		_ = os.Setenv(name, value)
	}
	return func() {
		for name := range environment {
			_ = os.Unsetenv(name)
		}
		server.Close()
	}
}

// ask asks a handler and returns the status of its answer.
func ask(h http.Handler) (status int) {
	recorder := httptest.NewRecorder()
	h.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/chat", nil))
	return recorder.Code
}
