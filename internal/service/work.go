package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
)

// A service calls a model for three kinds of work. Whose a call is says its context, which is stamped where the work
// enters; below that nobody needs to know.
type service struct {
	client *http.Client
	model  string // the address of the provider
}

// chat answers people. llmhttp.Enter has stamped its requests.
func (s *service) chat(w http.ResponseWriter, r *http.Request) {
	question, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<16))
	if err != nil {
		http.Error(w, "the question is too long", http.StatusRequestEntityTooLarge)
		return
	}
	answer, err := s.ask(r.Context(), string(question), 500)
	switch {
	case llmhttp.WriteDenied(w, err): // 429, with when to come back
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadGateway)
	default:
		_, _ = io.WriteString(w, answer) // whoever asked may be gone
	}
}

// schedule runs a job now and then.
func (s *service) schedule(ctx context.Context, every time.Duration) {
	job := llmhttp.EnterFunc(quotashare.SourceScheduler, func(ctx context.Context) error {
		_, err := s.ask(ctx, "Sum up what has come in since the last time.", 2000)
		return err
	})
	for pause(ctx, every) {
		_ = job(ctx) // what was refused comes again with the next
	}
}

// evaluate runs the eval suite over and over, so many fixtures at once. They may be as many as you like: what does not
// fit waits for its turn, and holds up nobody.
func (s *service) evaluate(ctx context.Context, workers int) {
	fixture := llmhttp.EnterFunc(quotashare.SourceEval, func(ctx context.Context) error {
		_, err := s.ask(ctx, "Which of these two answers is the better one, and why?", 1000)
		return err
	})
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for ctx.Err() == nil {
				if fixture(ctx) != nil {
					pause(ctx, time.Second)
				}
			}
		})
	}
	all.Wait()
}

// pause waits, and reports whether there is still something to do.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// ask asks the model, as an SDK would do it.
func (s *service) ask(ctx context.Context, question string, maxTokens int) (string, error) {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	body, err := json.Marshal(map[string]any{
		"model": "fake-model", "messages": []message{{"user", question}}, "max_tokens": maxTokens,
	})
	if err != nil {
		return "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.model+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	answer, err := s.client.Do(request)
	if err != nil {
		return "", err // a *quotashare.DeniedError among others
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(answer.Body) // to its end, where the usage stands
	if err != nil {
		return "", err
	}
	if answer.StatusCode != http.StatusOK {
		return "", fmt.Errorf("the model answers %s", answer.Status)
	}
	var completion struct {
		Choices []struct {
			Message message `json:"message"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(body, &completion); err != nil {
		return "", err
	}
	if len(completion.Choices) == 0 {
		return "", fmt.Errorf("the model answers nothing")
	}
	return completion.Choices[0].Message.Content, nil
}
