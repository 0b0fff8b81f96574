// Package llmhttp makes the HTTP client of any LLM SDK obey the shares of a [quotashare.Window]. It takes two lines: a
// handler that stamps where work enters, and a [Transport] under the SDK.
//
//	http.Handle("/chat", llmhttp.Enter(quotashare.SourceAPI, chat))
//	client := &http.Client{Transport: &llmhttp.Transport{Limits: limits, Profile: llmhttp.Anthropic}}
//
// Before each attempt the Transport estimates the tokens of the request and acquires them, for the class that the
// request's context was stamped with; after it, it settles with the usage that the answer tells, if that is what the
// provider counts. What cannot be admitted is answered 429 in the form that the SDKs know, and never sent. What the
// provider says of the account, in its headers and by its own 429s, tightens the Window.
//
// Everything is safe for concurrent use. No goroutine is started but one that closes the body of a request, if that is
// cancelled while a body is read that can be read only once.
package llmhttp

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/quotashare/quotashare"
)

// Enter returns a handler that stamps each request with the source, which is where the work enters, and hands it on:
// what is called with the context of the request is of that class. As with quotashare.WithSource, nothing raises the
// class of a context that was stamped before, and nothing in the request has a say.
func Enter(source quotashare.Source, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r.WithContext(quotashare.WithSource(r.Context(), source)))
	})
}

// EnterFunc is Enter for work that enters otherwise: a job of a scheduler, a message of a queue, an eval.
func EnterFunc(source quotashare.Source, next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return next(quotashare.WithSource(ctx, source)) }
}

// WriteDenied answers a request with the refusal that err holds, and reports whether it holds one: a
// *quotashare.DeniedError, wrapped or not. If it does not, nothing is written, and the caller goes on.
//
//	if llmhttp.WriteDenied(w, err) {
//		return
//	}
//
// The answer is 429 with Retry-After (in seconds) and Retry-After-Ms, or 413 if no wait can help. Its body is JSON and
// tells nothing of who holds what.
func WriteDenied(w http.ResponseWriter, err error) bool {
	var denied *quotashare.DeniedError
	if !errors.As(err, &denied) {
		return false
	}
	message := "too many requests: come back later"
	if denied.Decision.Permanent() {
		message = "the request is too large for the quota"
	}
	w.WriteHeader(setDenied(w.Header(), denied))
	_, _ = w.Write(deniedBody(denied, message)) // whoever asked may be gone
	return true
}

// setDenied sets the headers of the answer to a refusal, and returns its status. Both SDKs read Retry-After-Ms before
// Retry-After.
func setDenied(h http.Header, denied *quotashare.DeniedError) (status int) {
	h.Set("Content-Type", "application/json")
	d := denied.Decision
	if d.Permanent() {
		return http.StatusRequestEntityTooLarge
	}
	if d.RetryAfter <= 0 { // the context ended before anything was decided
		d.RetryAfter = time.Second
	}
	h.Set("Retry-After", strconv.FormatInt(d.RetryAfterSeconds(), 10))
	ms := d.RetryAfter / time.Millisecond
	if d.RetryAfter%time.Millisecond > 0 {
		ms++
	}
	h.Set("Retry-After-Ms", strconv.FormatInt(int64(ms), 10))
	return http.StatusTooManyRequests
}

// deniedBody returns a body that the SDKs of OpenAI and of Anthropic read as their own errors.
func deniedBody(denied *quotashare.DeniedError, message string) []byte {
	kind := "rate_limit_error"
	code := "rate_limit_exceeded"
	if denied.Decision.Permanent() {
		kind, code = "request_too_large", "request_too_large"
	}
	type apiError struct {
		Type    string  `json:"type"`
		Code    string  `json:"code"`
		Param   *string `json:"param"`
		Message string  `json:"message"`
	}
	body, _ := json.Marshal(struct { // strings always marshal
		Type  string   `json:"type"`
		Error apiError `json:"error"`
	}{"error", apiError{kind, code, nil, message}})
	return body
}
