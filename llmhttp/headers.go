package llmhttp

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// The headers in which providers tell how much of a limit is left, and when it will be whole again, by unit, in the
// form that http.Header keeps. OpenAI, Azure and Groq write x-ratelimit-..., Mistral with -minute, Anthropic
// anthropic-ratelimit-.... Where several are there the smallest counts.
var limitHeaders = [numUnits][]struct{ remaining, reset string }{
	TotalTokens: {
		{"X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Tokens"},
		{"X-Ratelimit-Remaining-Project-Tokens", "X-Ratelimit-Reset-Project-Tokens"},
		{"X-Ratelimit-Remaining-Tokens-Minute", ""},
		{"Anthropic-Ratelimit-Tokens-Remaining", "Anthropic-Ratelimit-Tokens-Reset"},
	},
	InputTokens: {
		{"Anthropic-Ratelimit-Input-Tokens-Remaining", "Anthropic-Ratelimit-Input-Tokens-Reset"},
	},
	OutputTokens: {
		{"Anthropic-Ratelimit-Output-Tokens-Remaining", "Anthropic-Ratelimit-Output-Tokens-Reset"},
	},
	Requests: {
		{"X-Ratelimit-Remaining-Requests", "X-Ratelimit-Reset-Requests"},
		{"Anthropic-Ratelimit-Requests-Remaining", "Anthropic-Ratelimit-Requests-Reset"},
	},
}

// remaining returns what is left of a limit, and false if that is not told. Azure writes -1 for what it does not know.
func remaining(h http.Header, unit Unit) (left int64, told bool) {
	for _, names := range limitHeaders[unit] {
		n, err := strconv.ParseInt(first(h, names.remaining), 10, 64)
		if err == nil && n >= 0 && (!told || n < left) {
			left, told = n, true
		}
	}
	return left, told
}

// retryAfter returns how long an answer of 429 tells to wait, 0 if it does not: by Retry-After-Ms, by Retry-After in
// seconds or as a date, and without these by the reset of what is used up. It is never negative, and more than a
// Duration holds is the longest.
func retryAfter(h http.Header, now time.Time) time.Duration {
	// By the provider's clock, which is not ours.
	if date, err := http.ParseTime(first(h, "Date")); err == nil {
		now = date
	}
	if wait, ok := number(first(h, "Retry-After-Ms"), time.Millisecond); ok && wait > 0 {
		return wait
	}
	after := first(h, "Retry-After")
	if wait, ok := number(after, time.Second); ok {
		return wait
	}
	if at, err := http.ParseTime(after); err == nil {
		return max(at.Sub(now), 0)
	}
	wait := time.Duration(0)
	for unit := range limitHeaders {
		for _, names := range limitHeaders[unit] {
			if left, err := strconv.ParseInt(first(h, names.remaining), 10, 64); err == nil && left == 0 {
				wait = max(wait, reset(first(h, names.reset), now))
			}
		}
	}
	return wait
}

// reset returns how long it is until a limit is whole again, 0 if that is not told: a duration as Go writes it ("6m0s",
// "17ms"; OpenAI, Groq), seconds (Azure), or a time as in RFC 3339 (Anthropic).
func reset(text string, now time.Time) time.Duration {
	if wait, ok := number(text, time.Second); ok {
		return wait
	}
	if wait, err := time.ParseDuration(text); err == nil {
		return max(wait, 0)
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return max(at.Sub(now), 0)
	}
	return 0
}

// number reads a number of units, 0 or more, without sign or exponent. What no Duration holds is the longest.
func number(text string, unit time.Duration) (time.Duration, bool) {
	text = strings.TrimSpace(text)
	if strings.Trim(text, "0123456789.") != "" {
		return 0, false
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil && n == 0 {
		return 0, false
	}
	if n *= float64(unit); n < math.MaxInt64 {
		return time.Duration(math.Ceil(n)), true
	}
	return math.MaxInt64, true
}

// first returns the first value of a header, whose name is in the form that http.Header keeps.
func first(h http.Header, name string) string {
	if values := h[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}
