package main

import (
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A provider stands for the hosted model. It answers as OpenAI's Chat Completions do, and counts by itself what it
// answers, in a sliding window. Above its quota it answers 429.
type provider struct {
	quota  int64
	window time.Duration

	mu    sync.Mutex
	used  int64
	calls []call // that are in the window, the oldest first
}

type call struct {
	at     time.Time
	tokens int64
}

// count counts a call if the quota has room for it. It returns what is left, and how long it is until there is room, or
// until all is left again.
func (p *provider) count(tokens int64) (ok bool, left int64, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for len(p.calls) > 0 && now.Sub(p.calls[0].at) >= p.window {
		p.used -= p.calls[0].tokens
		p.calls = p.calls[1:]
	}
	if p.used+tokens <= p.quota {
		p.used += tokens
		p.calls = append(p.calls, call{now, tokens})
		return true, p.quota - p.used, p.window
	}
	for room, i := p.quota-p.used, 0; room < tokens && i < len(p.calls); i++ {
		room += p.calls[i].tokens
		wait = p.calls[i].at.Add(p.window).Sub(now)
	}
	return false, p.quota - p.used, wait
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var request struct {
		MaxTokens int64 `json:"max_tokens"`
	}
	if err != nil || json.Unmarshal(body, &request) != nil || request.MaxTokens < 1 {
		p.answer(w, http.StatusBadRequest, object{"error": object{
			"type": "invalid_request_error", "message": "max_tokens: want 1 or more",
		}})
		return
	}
	part := 0.3 + 0.6*rand.Float64() // of what it may use
	in, out := int64(len(body)/4), 1+int64(part*float64(request.MaxTokens-1))
	ok, left, wait := p.count(in + out)
	w.Header().Set("X-Ratelimit-Limit-Tokens", strconv.FormatInt(p.quota, 10))
	w.Header().Set("X-Ratelimit-Remaining-Tokens", strconv.FormatInt(left, 10))
	w.Header().Set("X-Ratelimit-Reset-Tokens", wait.String())
	if !ok {
		w.Header().Set("Retry-After-Ms", strconv.FormatInt(wait.Milliseconds()+1, 10))
		p.answer(w, http.StatusTooManyRequests, object{"error": object{
			"type": "tokens", "code": "rate_limit_exceeded", "message": "Rate limit reached on tokens per min.",
		}})
		return
	}
	if !pause(r.Context(), time.Duration(part*float64(p.window)/30)) { // it thinks
		return
	}
	p.answer(w, http.StatusOK, object{
		"object": "chat.completion",
		"model":  "fake-model",
		"choices": []object{{
			"index": 0, "finish_reason": "stop",
			"message": object{"role": "assistant", "content": strings.Repeat("well ", int(out))},
		}},
		"usage": object{"prompt_tokens": in, "completion_tokens": out, "total_tokens": in + out},
	})
}

type object map[string]any

func (p *provider) answer(w http.ResponseWriter, status int, body object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // whoever asked may be gone
}
