package sdktest

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/anthropics/anthropic-sdk-go/v2"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/openai/openai-go/v3"
	openaioption "github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A rig is both SDKs on one Transport, with a Window for each limit, before a server.
type rig struct {
	provider  *provider
	transport *llmhttp.Transport
	windows   [numLedgers]*quotashare.Window
	tries     atomic.Int64 // round trips that the SDKs asked of the Transport

	openai    openai.Client
	anthropic anthropic.Client
}

var units = [numLedgers]llmhttp.Unit{
	total: llmhttp.TotalTokens, input: llmhttp.InputTokens, output: llmhttp.OutputTokens, requests: llmhttp.Requests,
}

const quotaTokens = 1_000_000

// newRig returns a rig before p at url, which base reaches.
func newRig(t testing.TB, p *provider, base http.RoundTripper, url string, profile llmhttp.Profile) *rig {
	p.window, p.refuses = time.Minute, true
	r := &rig{provider: p}
	r.transport = &llmhttp.Transport{Base: base, Profile: profile}
	for i := numLedgers - 1; i >= 0; i-- { // total is the last, for a refusal by it to take back what the others admitted
		p.ledgers[i].quota = quotaTokens
		window, err := quotashare.NewWindow(quotashare.Quota{Tokens: quotaTokens})
		require.NoError(t, err)
		r.windows[i] = window
		r.transport.Limits = append(r.transport.Limits, llmhttp.Limit{Limiter: window, Unit: units[i]})
	}
	client := &http.Client{Transport: roundTripper(func(q *http.Request) (*http.Response, error) {
		r.tries.Add(1)
		return r.transport.RoundTrip(q)
	})}
	r.openai, r.anthropic = clients(client, url)
	return r
}

// clients returns the clients of both SDKs that use an http.Client.
func clients(client *http.Client, url string) (openai.Client, anthropic.Client) {
	o := openai.NewClient(
		openaioption.WithBaseURL(url+"/v1/"), openaioption.WithAPIKey("key"), openaioption.WithHTTPClient(client))
	a := anthropic.NewClient(
		anthropicoption.WithBaseURL(url), anthropicoption.WithAPIKey("key"), anthropicoption.WithHTTPClient(client))
	return o, a
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// bubble runs a test in virtual time, where the SDKs wait for a Retry-After of any length at no cost.
func bubble(t *testing.T, p *provider, profile llmhttp.Profile, test func(*testing.T, *rig)) {
	synctest.Test(t, func(t *testing.T) {
		test(t, newRig(t, p, startPipes(t, p), "http://provider", profile))
	})
}

// used returns what is charged for a limit.
func (r *rig) used(ledger int) (tokens int64) {
	for _, n := range r.windows[ledger].Usage().Used {
		tokens += n
	}
	return tokens
}

// requireCharged requires that the Windows hold what the server has counted, and extra tokens more in all.
func (r *rig) requireCharged(t *testing.T, extra int64) {
	t.Helper()
	assert.Equal(t, r.provider.counted(input)+r.provider.counted(output), r.provider.counted(total))
	require.Equal(t, r.provider.counted(total)+extra, r.used(total))
	if extra == 0 {
		for i := range r.windows {
			require.Equal(t, r.provider.counted(i), r.used(i), "ledger %d", i)
		}
	}
}

// refusal returns what an SDK's own error tells, and whether err is one.
func refusal(err error) (status int, response *http.Response, ok bool) {
	var o *openai.Error
	if errors.As(err, &o) {
		return o.StatusCode, o.Response, true
	}
	var a *anthropic.Error
	if errors.As(err, &a) {
		return a.StatusCode, a.Response, true
	}
	return 0, nil, false
}

// requireRefusal requires that err is an SDK's own error.
func requireRefusal(t *testing.T, err error, status int, kind string) *http.Response {
	t.Helper()
	told, response, ok := refusal(err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, status, told)
	var o *openai.Error
	var a *anthropic.Error
	if errors.As(err, &o) {
		assert.Equal(t, kind, o.Type)
	} else if errors.As(err, &a) {
		assert.EqualValues(t, kind, a.Type())
	}
	return response
}

// An sdkCall is one call by an SDK. It returns what the SDK says was used, in the tokens that the provider counts.
type sdkCall struct {
	name string
	call func(context.Context, *rig) (used int64, err error)
}

const (
	question = "Where is my parcel?"
	pixel    = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)

var schema = map[string]any{"place": map[string]any{"type": "string"}}

func chatParams(text string, tokens int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:               openai.ChatModelGPT5_2,
		Messages:            []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)},
		MaxCompletionTokens: openai.Int(tokens),
	}
}

func chatTools(params openai.ChatCompletionNewParams) openai.ChatCompletionNewParams {
	params.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(
		openai.FunctionDefinitionParam{Name: "weather", Parameters: openai.FunctionParameters{"properties": schema}})}
	return params
}

func chat(ctx context.Context, r *rig, params openai.ChatCompletionNewParams) (int64, error) {
	answer, err := r.openai.Chat.Completions.New(ctx, params)
	if err != nil {
		return 0, err
	}
	if len(params.Tools) > 0 && answer.Choices[0].Message.ToolCalls[0].Function.Arguments != toolArguments {
		return 0, errors.New("no tool call")
	}
	return answer.Usage.TotalTokens, nil
}

func chatStream(ctx context.Context, r *rig, params openai.ChatCompletionNewParams) (int64, error) {
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := r.openai.Chat.Completions.NewStreaming(ctx, params)
	var whole openai.ChatCompletionAccumulator
	for stream.Next() {
		whole.AddChunk(stream.Current())
	}
	if stream.Err() == nil && len(params.Tools) > 0 && len(whole.Choices[0].Message.ToolCalls) != 1 {
		return 0, errors.New("no tool call")
	}
	return whole.Usage.TotalTokens, stream.Err()
}

func responseParams(tokens int64) responses.ResponseNewParams {
	return responses.ResponseNewParams{
		Model:           openai.ChatModelGPT5_2,
		Input:           responses.ResponseNewParamsInputUnion{OfString: openai.String(question)},
		MaxOutputTokens: openai.Int(tokens),
	}
}

func response(ctx context.Context, r *rig, params responses.ResponseNewParams) (int64, error) {
	answer, err := r.openai.Responses.New(ctx, params)
	if err != nil {
		return 0, err
	}
	if len(params.Tools) > 0 && answer.Output[0].AsFunctionCall().Arguments != toolArguments {
		return 0, errors.New("no tool call")
	}
	return answer.Usage.TotalTokens, nil
}

func responseStream(ctx context.Context, r *rig, params responses.ResponseNewParams) (used int64, err error) {
	stream := r.openai.Responses.NewStreaming(ctx, params)
	for stream.Next() {
		if event := stream.Current(); event.Type == "response.completed" {
			used = event.Response.Usage.TotalTokens
		}
	}
	return used, stream.Err()
}

func messageParams(text string, tokens int64) anthropic.MessageNewParams {
	return anthropic.MessageNewParams{
		Model:     anthropic.ModelClaudeOpus5_5,
		MaxTokens: tokens,
		Messages:  []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(text))},
	}
}

func messageTools(params anthropic.MessageNewParams) anthropic.MessageNewParams {
	params.Tools = []anthropic.ToolUnionParam{{OfTool: &anthropic.ToolParam{
		Name: "weather", InputSchema: anthropic.ToolInputSchemaParam{Properties: schema},
	}}}
	return params
}

// messageUsed returns what Anthropic counts: it does not count what was read from the cache.
func messageUsed(message *anthropic.Message) int64 {
	return message.Usage.InputTokens + message.Usage.CacheCreationInputTokens + message.Usage.OutputTokens
}

func message(ctx context.Context, r *rig, params anthropic.MessageNewParams) (int64, error) {
	answer, err := r.anthropic.Messages.New(ctx, params)
	if err != nil {
		return 0, err
	}
	if len(params.Tools) > 0 && string(answer.Content[0].Input) != toolArguments {
		return 0, errors.New("no tool call")
	}
	return messageUsed(answer), nil
}

func messageStream(ctx context.Context, r *rig, params anthropic.MessageNewParams) (int64, error) {
	stream := r.anthropic.Messages.NewStreaming(ctx, params)
	var whole anthropic.Message
	for stream.Next() {
		if err := whole.Accumulate(stream.Current()); err != nil {
			return 0, err
		}
	}
	if stream.Err() == nil && len(params.Tools) > 0 && string(whole.Content[0].Input) != toolArguments {
		return 0, errors.New("no tool call")
	}
	return messageUsed(&whole), stream.Err()
}

// simple is one call of each kind that the SDKs make: one of an SDK is enough where the SDK is not what differs.
var simple = []sdkCall{
	{"openai", func(ctx context.Context, r *rig) (int64, error) { return chat(ctx, r, chatParams(question, 300)) }},
	{"openai stream", func(ctx context.Context, r *rig) (int64, error) {
		return chatStream(ctx, r, chatParams(question, 300))
	}},
	{"openai responses", func(ctx context.Context, r *rig) (int64, error) {
		return response(ctx, r, responseParams(300))
	}},
	{"anthropic", func(ctx context.Context, r *rig) (int64, error) {
		return message(ctx, r, messageParams(question, 300))
	}},
	{"anthropic stream", func(ctx context.Context, r *rig) (int64, error) {
		return messageStream(ctx, r, messageParams(question, 300))
	}},
}

var all = append([]sdkCall{
	{"openai tools", func(ctx context.Context, r *rig) (int64, error) {
		return chat(ctx, r, chatTools(chatParams(question, 300)))
	}},
	{"openai stream tools", func(ctx context.Context, r *rig) (int64, error) {
		return chatStream(ctx, r, chatTools(chatParams(question, 300)))
	}},
	{"openai several", func(ctx context.Context, r *rig) (int64, error) {
		params := chatParams(question, 300)
		params.N = openai.Int(3)
		return chat(ctx, r, params)
	}},
	{"openai image", func(ctx context.Context, r *rig) (int64, error) {
		params := chatParams(question, 300)
		image := openai.ChatCompletionContentPartImageImageURLParam{URL: "data:image/png;base64," + pixel}
		parts := []openai.ChatCompletionContentPartUnionParam{openai.ImageContentPart(image)}
		params.Messages = append(params.Messages, openai.UserMessage(parts))
		return chat(ctx, r, params)
	}},
	{"openai embeddings", func(ctx context.Context, r *rig) (int64, error) {
		answer, err := r.openai.Embeddings.New(ctx, openai.EmbeddingNewParams{
			Model: openai.EmbeddingModelTextEmbedding3Small,
			Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{question, "And when?"}},
		})
		if err != nil {
			return 0, err
		}
		return answer.Usage.TotalTokens, nil
	}},
	{"openai responses stream", func(ctx context.Context, r *rig) (int64, error) {
		return responseStream(ctx, r, responseParams(300))
	}},
	{"openai responses tools", func(ctx context.Context, r *rig) (int64, error) {
		params := responseParams(300)
		params.Tools = []responses.ToolUnionParam{{
			OfFunction: &responses.FunctionToolParam{Name: "weather", Parameters: schema},
		}}
		return response(ctx, r, params)
	}},
	{"anthropic tools", func(ctx context.Context, r *rig) (int64, error) {
		return message(ctx, r, messageTools(messageParams(question, 300)))
	}},
	{"anthropic stream tools", func(ctx context.Context, r *rig) (int64, error) {
		return messageStream(ctx, r, messageTools(messageParams(question, 300)))
	}},
	{"anthropic image", func(ctx context.Context, r *rig) (int64, error) {
		params := messageParams(question, 300)
		// A file in a request has no size in tokens that its bytes tell.
		image := anthropic.NewImageBlockBase64("image/png", strings.Repeat(pixel, 100))
		params.Messages = append(params.Messages, anthropic.NewUserMessage(image))
		return message(ctx, r, params)
	}},
}, simple...)

// profile returns how the provider of a call counts.
func (c sdkCall) profile(reserves bool) llmhttp.Profile {
	switch {
	case reserves:
		return llmhttp.OpenAI
	case strings.HasPrefix(c.name, "anthropic"):
		return llmhttp.Anthropic
	}
	return llmhttp.Profile{}
}

func interactive(t testing.TB) context.Context {
	return quotashare.WithSource(t.Context(), quotashare.SourceAPI)
}

// TestCharged makes each kind of call: what is charged is what the provider counts, for each of its limits.
func TestCharged(t *testing.T) {
	for _, c := range all {
		for _, reserves := range []bool{false, true} {
			t.Run(c.name+map[bool]string{false: "/used", true: "/reserved"}[reserves], func(t *testing.T) {
				p := &provider{reserves: reserves}
				r := newRig(t, p, nil, start(t, p), c.profile(reserves))
				used, err := c.call(interactive(t), r)
				require.NoError(t, err)
				require.Positive(t, used)
				if !reserves {
					assert.Equal(t, p.counted(total), used, "the SDK does not see what the provider sent")
				}
				r.requireCharged(t, 0)
				assert.Equal(t, r.used(total), r.windows[total].Usage().Used[quotashare.Interactive])
				assert.Zero(t, r.transport.Unstamped())
				p.check(t)
			})
		}
	}
}

// TestUntold makes calls whose answer tells no usage, or none to the end: the estimate stands, which is what they
// reserve.
func TestUntold(t *testing.T) {
	tests := []struct {
		sdkCall
		fault fault
	}{
		{sdkCall{"openai without usage", simple[0].call}, fault{bare: true}},
		{sdkCall{"openai stream without usage", func(ctx context.Context, r *rig) (int64, error) {
			stream := r.openai.Chat.Completions.NewStreaming(ctx, chatParams(question, 300))
			for stream.Next() {
			}
			return 0, stream.Err()
		}}, fault{}},
		{sdkCall{"openai stream closed half way", func(ctx context.Context, r *rig) (int64, error) {
			params := chatParams(question, 300)
			params.StreamOptions.IncludeUsage = openai.Bool(true)
			stream := r.openai.Chat.Completions.NewStreaming(ctx, params)
			stream.Next()
			return 0, errors.Join(stream.Err(), stream.Close())
		}}, fault{hold: true}},
		{sdkCall{"openai responses stream closed half way", func(ctx context.Context, r *rig) (int64, error) {
			stream := r.openai.Responses.NewStreaming(ctx, responseParams(300))
			for stream.Next() && stream.Current().Type != "response.output_text.delta" {
			}
			return 0, errors.Join(stream.Err(), stream.Close())
		}}, fault{hold: true}},
		{sdkCall{"anthropic stream closed half way", func(ctx context.Context, r *rig) (int64, error) {
			stream := r.anthropic.Messages.NewStreaming(ctx, messageParams(question, 300))
			for stream.Next() && stream.Current().Type != "content_block_delta" {
			}
			return 0, errors.Join(stream.Err(), stream.Close())
		}}, fault{hold: true}},
		{sdkCall{"anthropic stream cancelled half way", func(ctx context.Context, r *rig) (int64, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			stream := r.anthropic.Messages.NewStreaming(ctx, messageParams(question, 300))
			for stream.Next() {
				if stream.Current().Type == "content_block_delta" {
					cancel()
				}
			}
			if err := stream.Err(); !errors.Is(err, context.Canceled) {
				return 0, errors.Join(errors.New("not cancelled"), err)
			}
			return 0, stream.Close()
		}}, fault{hold: true}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			// The server counts what is reserved, to be held against the estimate. The library does not know that it does.
			p := &provider{reserves: true}
			r := newRig(t, p, nil, start(t, p), test.profile(false))
			p.next(test.fault)
			_, err := test.call(interactive(t), r)
			require.NoError(t, err)
			r.requireCharged(t, 0)
			assert.Zero(t, r.windows[total].Stats().Classes[quotashare.Interactive].SettledTokens)
		})
	}
}

// TestMissedByTheEstimate makes a call without an output limit, which the estimate knows nothing of: what it used is
// charged all the same.
func TestMissedByTheEstimate(t *testing.T) {
	p := &provider{}
	r := newRig(t, p, nil, start(t, p), llmhttp.Profile{BytesPerToken: 1000})
	params := chatParams(question, 0)
	params.MaxCompletionTokens = openai.ChatCompletionNewParams{}.MaxCompletionTokens
	used, err := chat(interactive(t), r, params)
	require.NoError(t, err)
	stats := r.windows[total].Stats().Classes[quotashare.Interactive]
	assert.EqualValues(t, 1, stats.EstimatedTokens)
	assert.Equal(t, used, stats.SettledTokens)
	r.requireCharged(t, 0)
}

// TestTakesNothing makes the calls that use no tokens.
func TestTakesNothing(t *testing.T) {
	p := &provider{}
	r := newRig(t, p, nil, start(t, p), llmhttp.Profile{})
	_, err := r.openai.Models.List(t.Context())
	require.NoError(t, err)
	_, err = r.anthropic.Models.List(t.Context(), anthropic.ModelListParams{})
	require.NoError(t, err)
	counted, err := r.anthropic.Messages.CountTokens(t.Context(), anthropic.MessageCountTokensParams{
		Model: anthropic.ModelClaudeOpus5_5, Messages: messageParams(question, 1).Messages,
	})
	require.NoError(t, err)
	assert.Positive(t, counted.InputTokens)
	assert.EqualValues(t, 3, r.tries.Load())
	for i := range r.windows {
		assert.Zero(t, r.used(i))
	}
	assert.Zero(t, r.transport.Unstamped())
}

func TestUnstamped(t *testing.T) {
	p := &provider{}
	r := newRig(t, p, nil, start(t, p), llmhttp.Profile{})
	_, err := simple[0].call(t.Context(), r)
	require.NoError(t, err)
	assert.EqualValues(t, 1, r.transport.Unstamped())
	assert.Equal(t, p.counted(total), r.windows[total].Usage().Used[quotashare.Batch])
}

// tooMany is a 429 of the provider's own.
func tooMany(c sdkCall) fault {
	if strings.HasPrefix(c.name, "anthropic") {
		return fault{status: 429, header: map[string]string{"Retry-After": "7"},
			body: errorBody(true, "rate_limit_error", "", "This request would exceed your organization's rate limit.")}
	}
	return fault{status: 429, header: map[string]string{"Retry-After": "7", "Retry-After-Ms": "6500"},
		body: errorBody(false, "tokens", "rate_limit_exceeded", "Rate limit reached for gpt-5.2 on tokens per min (TPM).")}
}

// TestThrottled answers 429 as the provider does: the SDK tries again, and each attempt is acquired for itself. When
// the SDK comes back as it was told the Window lets it.
func TestThrottled(t *testing.T) {
	for _, c := range simple {
		for _, reserves := range []bool{false, true} {
			t.Run(c.name+map[bool]string{false: "/used", true: "/reserved"}[reserves], func(t *testing.T) {
				p := &provider{reserves: reserves}
				bubble(t, p, c.profile(reserves), func(t *testing.T, r *rig) {
					p.next(tooMany(c), tooMany(c))
					_, err := c.call(interactive(t), r)
					require.NoError(t, err)
					assert.EqualValues(t, 3, r.tries.Load())
					assert.Equal(t, 3, p.came())
					assert.EqualValues(t, 3, r.windows[total].Stats().Classes[quotashare.Interactive].Admitted)
					r.requireCharged(t, 0)
				})
			})
		}
	}
}

// TestThrottledToTheEnd gives the SDK no answer but 429: it returns the provider's, and not the library's.
func TestThrottledToTheEnd(t *testing.T) {
	for _, c := range simple {
		t.Run(c.name, func(t *testing.T) {
			p := &provider{}
			bubble(t, p, c.profile(false), func(t *testing.T, r *rig) {
				kind := "tokens"
				if strings.HasPrefix(c.name, "anthropic") {
					kind = "rate_limit_error"
				}
				p.next(tooMany(c), tooMany(c), tooMany(c))
				_, err := c.call(interactive(t), r)
				answer := requireRefusal(t, err, http.StatusTooManyRequests, kind)
				assert.Equal(t, "7", answer.Header.Get("Retry-After"))
				assert.Equal(t, 3, p.came())
				r.requireCharged(t, 0)

				// Whoever else comes is told to come back when the provider wants to be asked again.
				_, err = c.call(interactive(t), r)
				answer = requireRefusal(t, err, http.StatusTooManyRequests, "rate_limit_error")
				assert.Equal(t, "7", answer.Header.Get("Retry-After"))
				assert.Equal(t, 3, p.came())
			})
		})
	}
}

// TestSpent answers that the money is spent: no wait cures that, so nobody is made to wait.
func TestSpent(t *testing.T) {
	tests := []struct {
		sdkCall
		kind string
		body string
	}{
		{simple[0], "insufficient_quota",
			errorBody(false, "insufficient_quota", "insufficient_quota", "You exceeded your current quota.")},
		{simple[3], "rate_limit_error",
			errorBody(true, "rate_limit_error", "enforced_spend_limit_reached", "The spend limit is reached.")},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p := &provider{}
			bubble(t, p, test.profile(false), func(t *testing.T, r *rig) {
				f := fault{status: 429, body: test.body}
				p.next(f, f, f)
				_, err := test.call(interactive(t), r)
				requireRefusal(t, err, http.StatusTooManyRequests, test.kind)
				assert.Zero(t, r.used(total))
				_, err = test.call(interactive(t), r)
				require.NoError(t, err)
				r.requireCharged(t, 0)
			})
		})
	}
}

// TestFailed answers with errors: those that the SDK tries again may have used tokens, so that their estimates stand.
func TestFailed(t *testing.T) {
	for _, c := range simple {
		t.Run(c.name, func(t *testing.T) {
			p := &provider{reserves: true}
			bubble(t, p, c.profile(false), func(t *testing.T, r *rig) {
				p.next(fault{status: 500, body: errorBody(true, "api_error", "", "Internal server error")},
					fault{status: 502, body: "<html>upstream connect error</html>"},
					fault{status: 504, body: "<html>upstream request timeout</html>"})
				_, err := c.call(interactive(t), r)
				require.Error(t, err)
				assert.Equal(t, 3, p.came())
				r.requireCharged(t, 0)
			})
		})
		t.Run(c.name+" turned away", func(t *testing.T) {
			p := &provider{}
			bubble(t, p, c.profile(false), func(t *testing.T, r *rig) {
				p.next(fault{status: 529, body: errorBody(true, "overloaded_error", "", "Overloaded")},
					fault{status: 503, body: "<html>no healthy upstream</html>"})
				_, err := c.call(interactive(t), r)
				require.NoError(t, err)
				assert.Equal(t, 3, p.came())
				assert.Equal(t, p.counted(total), r.used(total), "an outage uses up nothing")
				assert.EqualValues(t, 3, r.used(requests))
			})
		})
		t.Run(c.name+" invalid", func(t *testing.T) {
			p := &provider{}
			r := newRig(t, p, nil, start(t, p), c.profile(false))
			p.next(fault{status: 400, body: errorBody(strings.HasPrefix(c.name, "anthropic"),
				"invalid_request_error", "", "max_tokens: must be at least 1")})
			_, err := c.call(interactive(t), r)
			requireRefusal(t, err, http.StatusBadRequest, "invalid_request_error")
			assert.Equal(t, 1, p.came())
			assert.Zero(t, r.used(total))
			assert.EqualValues(t, 1, r.used(requests), "it was a request all the same")
		})
	}
}

// TestRefused makes calls that a Window refuses: they become the rate limit error of the SDK, at once and without a
// retry, and the server sees none of them.
func TestRefused(t *testing.T) {
	for _, c := range simple {
		t.Run(c.name, func(t *testing.T) {
			p := &provider{}
			bubble(t, p, c.profile(false), func(t *testing.T, r *rig) {
				// Without a loan there is one time at which the call will fit.
				ceilings := quotashare.Fractions{quotashare.Interactive: 0.7}
				require.NoError(t, r.windows[total].SetQuota(quotashare.Quota{Tokens: quotaTokens, Ceilings: ceilings}))
				_, full := r.windows[total].TryAcquire(quotashare.Interactive, quotaTokens*7/10)
				require.True(t, full.Admitted)
				time.Sleep(12500 * time.Millisecond)
				begun := time.Now()
				_, err := c.call(interactive(t), r)
				answer := requireRefusal(t, err, http.StatusTooManyRequests, "rate_limit_error")
				assert.Equal(t, "48", answer.Header.Get("Retry-After"))
				assert.Equal(t, "47500", answer.Header.Get("Retry-After-Ms"))
				assert.EqualValues(t, 1, r.tries.Load())
				assert.Zero(t, time.Since(begun))
				assert.Zero(t, p.came())
				assert.Zero(t, r.used(requests), "what the other limits had admitted is not taken back")

				// The truth was told: then it is admitted.
				time.Sleep(47500 * time.Millisecond)
				_, err = c.call(interactive(t), r)
				require.NoError(t, err)
				r.requireCharged(t, 0)
			})
		})
		t.Run(c.name+" too large", func(t *testing.T) {
			p := &provider{}
			r := newRig(t, p, nil, start(t, p), c.profile(false))
			require.NoError(t, r.windows[total].SetQuota(quotashare.Quota{Tokens: 100}))
			_, err := c.call(interactive(t), r)
			answer := requireRefusal(t, err, http.StatusRequestEntityTooLarge, "request_too_large")
			assert.Empty(t, answer.Header.Get("Retry-After"))
			assert.EqualValues(t, 1, r.tries.Load())
			assert.Zero(t, p.came())
		})
		t.Run(c.name+" as error", func(t *testing.T) {
			p := &provider{}
			bubble(t, p, c.profile(false), func(t *testing.T, r *rig) {
				r.transport.DeniedAsError = true
				_, full := r.windows[total].TryAcquire(quotashare.Interactive, quotaTokens*7/10)
				require.True(t, full.Admitted)
				_, err := c.call(interactive(t), r)
				var denied *quotashare.DeniedError
				require.ErrorAs(t, err, &denied)
				assert.Equal(t, quotashare.Interactive, denied.Class)
				assert.Positive(t, denied.Decision.RetryAfter)
				assert.EqualValues(t, 3, r.tries.Load(), "SDKs try again after an error of the transport")
				assert.Zero(t, p.came())
			})
		})
	}
}

// TestCancelled ends the context of a call before it is asked for, while it waits, and while it is answered.
func TestCancelled(t *testing.T) {
	for _, c := range simple {
		t.Run(c.name+" before", func(t *testing.T) {
			p := &provider{}
			r := newRig(t, p, nil, start(t, p), c.profile(false))
			ctx, cancel := context.WithCancel(interactive(t))
			cancel()
			_, err := c.call(ctx, r)
			require.ErrorIs(t, err, context.Canceled)
			assert.Zero(t, p.came())
			assert.Zero(t, r.used(total))
		})
		t.Run(c.name+" waiting", func(t *testing.T) {
			p := &provider{}
			bubble(t, p, c.profile(false), func(t *testing.T, r *rig) {
				_, full := r.windows[total].TryAcquire(quotashare.Batch, quotaTokens/10)
				require.True(t, full.Admitted)
				_, full = r.windows[total].TryAcquire(quotashare.Interactive, quotaTokens*7/10)
				require.True(t, full.Admitted)
				ctx, cancel := context.WithCancel(t.Context())
				result := make(chan error)
				go func() {
					_, err := c.call(ctx, r)
					result <- err
				}()
				synctest.Wait()
				assert.Equal(t, 1, r.windows[total].Stats().Classes[quotashare.Batch].Waiting)
				cancel()
				require.ErrorIs(t, <-result, context.Canceled)
				stats := r.windows[total].Stats().Classes[quotashare.Batch]
				assert.Zero(t, stats.Waiting)
				assert.EqualValues(t, quotaTokens/10, stats.Used)
				assert.Zero(t, p.came())
			})
		})
		t.Run(c.name+" answering", func(t *testing.T) {
			p := &provider{reserves: true, takes: func(uint64) time.Duration { return time.Minute / 2 }}
			bubble(t, p, c.profile(false), func(t *testing.T, r *rig) {
				ctx, cancel := context.WithCancel(interactive(t))
				result := make(chan error)
				go func() {
					_, err := c.call(ctx, r)
					result <- err
				}()
				synctest.Wait()
				cancel()
				require.ErrorIs(t, <-result, context.Canceled)
				r.requireCharged(t, 0) // it was sent: the provider may count it
				time.Sleep(time.Minute / 2)
			})
		})
	}
}
