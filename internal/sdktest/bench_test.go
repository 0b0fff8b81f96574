package sdktest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	benchEvents = 10_000
	benchQuota  = 1 << 40 // nothing is refused
)

// benchServer answers with 2 KiB of JSON, or with a stream of events.
func benchServer(b *testing.B) (url string) {
	const usage = `"usage":{"prompt_tokens":500,"completion_tokens":400,"total_tokens":900}`
	answer := []byte(`{"id":"1","choices":[{"message":{"role":"assistant","content":"` +
		strings.Repeat("well ", 380) + `"}}],` + usage + `}`)
	event := []byte(`data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"gpt-4o",` +
		`"choices":[{"index":0,"delta":{"content":" well"},"finish_reason":null}],"usage":null}` + "\n\n")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("X-Ratelimit-Remaining-Tokens", strconv.Itoa(benchQuota))
		if r.Header.Get("Accept") != "text/event-stream" {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(answer)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range benchEvents {
			_, _ = w.Write(event)
		}
		_, _ = io.WriteString(w, `data: {"choices":[],`+usage+"}\n\ndata: [DONE]\n\n")
	}))
	b.Cleanup(server.Close)
	return server.URL
}

// benchClients returns a client as it is, and one with a Transport. They have the same connections below them.
func benchClients(b *testing.B) (bare, transport *http.Client, window *quotashare.Window) {
	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: benchQuota})
	require.NoError(b, err)
	base := &http.Transport{}
	b.Cleanup(base.CloseIdleConnections)
	limits := []llmhttp.Limit{{Limiter: window}}
	bare = &http.Client{Transport: base}
	transport = &http.Client{Transport: &llmhttp.Transport{Base: base, Limits: limits}}
	return bare, transport, window
}

var benchBody = []byte(`{"model":"gpt-4o","max_tokens":500,"messages":[{"role":"user","content":"` +
	strings.Repeat("where ", 325) + `"}]}`)

// exchange makes one call, and returns how long it took and how many events came.
func exchange(b *testing.B, client *http.Client, url, accept string) (took time.Duration, events int) {
	ctx := quotashare.WithSource(b.Context(), quotashare.SourceAPI)
	begun := time.Now()
	body := bytes.NewReader(benchBody)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", body)
	if err != nil {
		b.Fatal(err)
	}
	request.Header.Set("Accept", accept)
	request.Header.Set("Content-Type", "application/json")
	answer, err := client.Do(request)
	if err != nil || answer.StatusCode != http.StatusOK {
		b.Fatal(answer, err)
	}
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		if bytes.HasPrefix(lines.Bytes(), []byte("data:")) {
			events++
		}
	}
	if err := errors.Join(lines.Err(), answer.Body.Close()); err != nil {
		b.Fatal(err)
	}
	return time.Since(begun), events
}

func median(of []time.Duration) float64 {
	slices.Sort(of)
	return float64(of[len(of)/2].Nanoseconds())
}

// compare makes calls with both clients in turns, so that whatever else the machine does meets both, and reports the
// medians of what one call takes, by so many parts.
func compare(b *testing.B, accept string, parts float64, unit string) {
	url := benchServer(b)
	bare, transport, window := benchClients(b)
	var without, with []time.Duration
	for i := 0; b.Loop(); i++ {
		for turn := range 2 {
			if (i+turn)%2 == 0 {
				took, _ := exchange(b, bare, url, accept)
				without = append(without, took)
				continue
			}
			took, events := exchange(b, transport, url, accept)
			with = append(with, took)
			if events != 0 && events != benchEvents+2 {
				b.Fatal(events, "events")
			}
		}
	}
	stats := window.Stats().Classes[quotashare.Interactive]
	if stats.SettledTokens != 900*int64(len(with)) {
		b.Fatal("not all calls were settled")
	}
	b.ReportMetric(median(without)/parts, "bare-p50-ns"+unit)
	b.ReportMetric(median(with)/parts, "transport-p50-ns"+unit)
	b.ReportMetric((median(with)-median(without))/parts, "added-p50-ns"+unit)
}

// BenchmarkExchange measures an exchange of 2 KiB each way on loopback. The numbers to compare are of Interleaved; the
// others are for profiles.
//
//	go test -run '^$' -bench Exchange/interleaved -benchtime 20000x -count 5
func BenchmarkExchange(b *testing.B) {
	b.Run("interleaved", func(b *testing.B) { compare(b, "application/json", 1, "") })
	url := benchServer(b)
	bare, transport, _ := benchClients(b)
	for _, one := range []struct {
		name   string
		client *http.Client
	}{{"bare", bare}, {"transport", transport}} {
		b.Run(one.name, func(b *testing.B) {
			b.ReportAllocs()
			var took []time.Duration
			for b.Loop() {
				one, _ := exchange(b, one.client, url, "application/json")
				took = append(took, one)
			}
			b.ReportMetric(median(took), "p50-ns")
		})
	}
}

// BenchmarkStream measures a stream of 10,000 events.
//
//	go test -run '^$' -bench Stream -benchtime 200x -count 5
func BenchmarkStream(b *testing.B) { compare(b, "text/event-stream", benchEvents, "/event") }

// TestNothingIsHeldBack streams events of which the server sends none before the client has read the one before: if
// anything on the way kept an event back, all would stand still, which a bubble reports at once.
func TestNothingIsHeldBack(t *testing.T) {
	tests := []struct {
		name   string
		stream func(ctx context.Context, r *rig, seen func()) error
	}{
		{"openai", func(ctx context.Context, r *rig, seen func()) error {
			stream := r.openai.Chat.Completions.NewStreaming(ctx, chatParams(question, 300))
			for stream.Next() {
				if len(stream.Current().Choices) > 0 && stream.Current().Choices[0].Delta.Content != "" {
					seen()
				}
			}
			return stream.Err()
		}},
		{"openai responses", func(ctx context.Context, r *rig, seen func()) error {
			stream := r.openai.Responses.NewStreaming(ctx, responseParams(300))
			for stream.Next() {
				if stream.Current().Type == "response.output_text.delta" {
					seen()
				}
			}
			return stream.Err()
		}},
		{"anthropic", func(ctx context.Context, r *rig, seen func()) error {
			stream := r.anthropic.Messages.NewStreaming(ctx, messageParams(question, 300))
			for stream.Next() {
				if stream.Current().Type == "content_block_delta" {
					seen()
				}
			}
			return stream.Err()
		}},
		{"plain", func(ctx context.Context, r *rig, seen func()) error {
			url := "http://provider/v1/chat/completions"
			body := strings.NewReader(`{"stream":true,"max_tokens":300}`)
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
			if err != nil {
				return err
			}
			answer, err := (&http.Client{Transport: r.transport}).Do(request)
			if err != nil {
				return err
			}
			lines := bufio.NewScanner(answer.Body)
			for lines.Scan() {
				if strings.Contains(lines.Text(), `"content":"well`) {
					seen()
				}
			}
			return errors.Join(lines.Err(), answer.Body.Close())
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p := &provider{}
			bubble(t, p, llmhttp.Profile{}, func(t *testing.T, r *rig) {
				confirmed := make(chan struct{})
				p.next(fault{steps: benchEvents, confirmed: confirmed})
				events := 0
				require.NoError(t, test.stream(interactive(t), r, func() {
					events++
					confirmed <- struct{}{}
				}))
				assert.Equal(t, benchEvents, events)
				assert.EqualValues(t, 1, r.used(requests))
			})
		})
	}
}
