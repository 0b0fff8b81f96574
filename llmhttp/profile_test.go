package llmhttp_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	. "github.com/quotashare/quotashare/llmhttp"
)

// estimate returns what a request with the body asks for.
func estimate(t testing.TB, profile Profile, body string) Tokens {
	t.Helper()
	input, output := &tally{}, &tally{}
	transport := &Transport{
		Base: says(500, ""), Limits: []Limit{{input, InputTokens}, {output, OutputTokens}}, Profile: profile,
	}
	readAll(t, send(t, transport, body))
	var tokens Tokens
	for _, asked := range input.estimates() {
		require.Positive(t, asked)
		tokens.Input = asked
	}
	for _, asked := range output.estimates() {
		require.Positive(t, asked)
		tokens.Output = asked
	}
	return tokens
}

// perToken counts a token for so many bytes of input, rounded up.
func perToken(bytes int, perToken float64) int64 { return int64(math.Ceil(float64(bytes) / perToken)) }

// Of several output limits the largest counts, as often as an answer is asked for.
func TestOutputIsTheLargestLimitTimesTheAnswers(t *testing.T) {
	profile := Profile{DefaultOutput: 1000}
	for body, want := range map[string]int64{
		`{}`:                          1000,
		`{"max_tokens":7}`:            7,
		`{"max_completion_tokens":7}`: 7,
		`{"max_output_tokens":7}`:     7,
		`{"inferenceConfig":{"maxTokens":7,"topP":1}}`:                             7,
		`{"max_tokens":1,"max_completion_tokens":10000}`:                           10_000,
		`{"max_tokens":10000,"max_completion_tokens":1}`:                           10_000,
		`{"max_output_tokens":9,"max_tokens":5,"inferenceConfig":{"maxTokens":8}}`: 9,
		`{"max_tokens":7,"max_completion_tokens":null}`:                            7,
		`{"max_tokens":null}`:                                                      1000,
		`{"max_tokens":-1}`:                                                        1000, // as some write for no limit
		`{"max_tokens":-1,"max_output_tokens":7}`:                                  7,
		`{"max_tokens":7.5}`:                                                       8,
		`{"max_tokens":7e1}`:                                                       70,
		`{"max_tokens":1e300}`:                                                     math.MaxInt64,
		`{"max_tokens":9223372036854775807}`:                                       math.MaxInt64,
		`{"max_tokens":7,"n":3}`:                                                   21,
		`{"max_tokens":7,"best_of":3}`:                                             21,
		`{"max_tokens":7,"n":2,"best_of":3}`:                                       21,
		`{"max_tokens":7,"n":3,"best_of":2}`:                                       21,
		`{"max_tokens":7,"n":0,"best_of":-4}`:                                      7,
		`{"max_tokens":7,"n":null}`:                                                7,
		`{"max_tokens":7,"n":"3"}`:                                                 7,
		`{"n":3}`:                                                                  3000,
		`{"max_tokens":1e300,"n":1e300}`:                                           math.MaxInt64,
		`{"messages":[{"max_tokens":5000}],"max_tokens":7}`:                        7,
		`{"messages":"\"max_tokens\":5000","max_tokens":7}`:                        7,
		`{"max_tokens":7`:                                                          1000, // malformed
		`[{"max_tokens":7}]`:                                                       1000,
		`not JSON`:                                                                 1000,
		`{"model":3,"max_tokens":7}`:                                               7, // the rest is read
		`{"inferenceConfig":7,"n":2}`:                                              2000,
		" \n{\"max_tokens\":7}\n":                                                  7,
		`{"max_tokens":7}{"n":3}`:                                                  1000,
		`{"thinking":{"budget_tokens":6},"max_tokens":7}`:                          7,
	} {
		assert.Equal(t, want, estimate(t, profile, body).Output, body)
	}
	for body, profile := range map[string]Profile{
		`{}`:               {},
		`{ }`:              {DefaultOutput: -5},
		`{"max_tokens":0}`: profile, // it is given
	} {
		assert.LessOrEqual(t, estimate(t, profile, body).Output, int64(1), body)
	}
}

// A limit that is no number says nothing. It is not a limit of 0, for many a server reads "7" as 7.
func TestAnOutputLimitThatIsNoNumberIsNotZero(t *testing.T) {
	for _, none := range []string{`"7"`, `{}`, `[]`, `true`, `1e400`} {
		body := fmt.Sprintf(`{"max_tokens":%s}`, none)
		assert.EqualValues(t, 1000, estimate(t, Profile{DefaultOutput: 1000}, body).Output, body)
	}
}

func TestOutputFactor(t *testing.T) {
	for factor, want := range map[float64]int64{
		0: 7, 1: 7, 5: 35, 15: 105, 1.5: 11, 0.1: 1, -3: 7, math.NaN(): 7,
		1e300: math.MaxInt64, math.Inf(1): math.MaxInt64,
	} {
		assert.Equal(t, want, estimate(t, Profile{OutputFactor: factor}, `{"max_tokens":7}`).Output, "%v", factor)
	}
	profile := Profile{OutputFactor: 15, DefaultOutput: 100}
	assert.EqualValues(t, 1500, estimate(t, profile, `{}`).Output)
	assert.EqualValues(t, 3000, estimate(t, profile, `{"n":2}`).Output)
	assert.EqualValues(t, 1, estimate(t, profile, `{}`).Input, "of the output alone")
}

func TestInputIsTheSizeOfTheBody(t *testing.T) {
	for _, text := range []string{
		"", "a", strings.Repeat("word ", 1000), strings.Repeat("語", 999), strings.Repeat("\x00", 77),
	} {
		body := fmt.Sprintf(`{"input":"%s"}`, text)
		assert.Equal(t, perToken(len(body), 3), estimate(t, Profile{}, body).Input)
		assert.Equal(t, perToken(len(body), 4.5), estimate(t, Profile{BytesPerToken: 4.5}, body).Input)
		assert.Equal(t, perToken(len(body), 0.5), estimate(t, Profile{BytesPerToken: 0.5}, body).Input)
		for _, unset := range []float64{0, -4, math.NaN()} {
			assert.Equal(t, perToken(len(body), 3), estimate(t, Profile{BytesPerToken: unset}, body).Input)
		}
	}
	assert.Equal(t, int64(math.MaxInt64), estimate(t, Profile{BytesPerToken: 1e-300}, `{}`).Input)
}

// An image counts for what the profile says, whatever its size in bytes, and once however many strings name it.
func TestAttachmentsCountByTheProfile(t *testing.T) {
	file := func(size int) string { return base64.StdEncoding.EncodeToString(make([]byte, size)) }
	for name, c := range map[string]struct {
		body        string
		count, size int
	}{
		"OpenAI, chat, inline": {`{"messages":[{"role":"user","content":[{"type":"text","text":"What is this?"},` +
			`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + file(90_000) + `"}}]}]}`, 1, 120_022},
		"OpenAI, chat, by address": {`{"messages":[{"content":[{"type":"image_url","image_url":` +
			`{"url":"https://example.com/a.png"}},{"type":"image_url","image_url":{"url":"https://example.com/b.png"}}]}]}`,
			2, 0},
		"OpenAI, chat, sound": {`{"messages":[{"content":[{"type":"input_audio","input_audio":{"data":"` +
			file(3000) + `","format":"wav"}}]}]}`, 1, 4000},
		"OpenAI, chat, a short sound": {`{"messages":[{"content":[{"type":"input_audio","input_audio":{"data":"AAAA"}}]}]}`,
			1, 0},
		"OpenAI, responses, both": {`{"input":[{"content":[{"type":"input_image","image_url":"https://example.com/a.png"},` +
			`{"type":"input_file","filename":"a.pdf","file_data":"data:application/pdf;base64,` + file(30) + `"}]}]}`, 2, 68},
		"Anthropic, inline": {`{"messages":[{"content":[{"type":"image","source":{"type":"base64",` +
			`"media_type":"image/jpeg","data":"` + file(6000) + `"}}]}]}`, 1, 8000},
		"Anthropic, by address": {`{"messages":[{"content":[{"type":"document","source":{"type":"url",` +
			`"url":"https://example.com/a.pdf"}},{"type":"file","source":{}}]}]}`, 2, 0},
		"Bedrock, Converse": {`{"messages":[{"content":[{"image":{"format":"png","source":{"bytes":"` +
			file(6000) + `"}}},{"image":{"format":"png","source":{"bytes":"` + file(768) + `"}}}]}]}`, 2, 9024},
		"written for the web":       {`{"data":"` + strings.Repeat("-_9z", 500) + `"}`, 1, 2000},
		"with escaped slashes":      {`{"data":"` + strings.Repeat(`ab\/`, 256) + `"}`, 1, 1024},
		"a long name of its type":   {`{"url":"data:image\/png;` + strings.Repeat("a", 150) + `;base64,AAAA"}`, 1, 178},
		"spaces beside the colon":   {`{"type" :  "image"}`, 1, 0},
		"short text like base64":    {`{"input":"` + strings.Repeat("a", 1023) + `"}`, 0, 0},
		"long text with spaces":     {`{"input":"` + strings.Repeat("a", 1023) + ` ` + strings.Repeat("a", 99) + `"}`, 0, 0},
		"long text with a dot":      {`{"input":"` + strings.Repeat("a", 4000) + `."}`, 0, 0},
		"long text, not of ASCII":   {`{"input":"` + strings.Repeat("語", 4000) + `"}`, 0, 0},
		"long text with a quote":    {`{"input":"` + strings.Repeat(`a\"`, 4000) + `"}`, 0, 0},
		"a data URL of text":        {`{"input":"data:text/plain,hello"}`, 0, 0},
		"talk of data":              {`{"input":"data: see ;base64 and others"}`, 0, 0},
		"base64 told too late":      {`{"input":"data:` + strings.Repeat(" ", 200) + `;base64,"}`, 0, 0},
		"a type of another kind":    {`{"type":"text","kind":"image","image":"file"}`, 0, 0},
		"a type in a text":          {`{"input":"\"type\":\"image\""}`, 0, 0},
		"after an escaped quote":    {`{"input":"\"","data":"` + strings.Repeat("A", 2000) + `"}`, 1, 2000},
		"malformed, not ended":      {`{"type":"image","data":"` + strings.Repeat("A", 2000), 1, 2000},
		"malformed, ends by escape": {`{"type":"image\`, 0, 0},
		"malformed, no JSON at all": {`type image "`, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			text := perToken(len(c.body)-c.size, 3)
			assert.Equal(t, text+int64(c.count)*1600, estimate(t, Profile{}, c.body).Input)
			assert.Equal(t, text+int64(c.count)*85, estimate(t, Profile{AttachmentTokens: 85}, c.body).Input)
			assert.Equal(t, text+int64(c.count)*1600, estimate(t, Profile{AttachmentTokens: -1}, c.body).Input)
		})
	}
	body := `[{"type":"image"},{"type":"image"}]`
	assert.Equal(t, int64(math.MaxInt64), estimate(t, Profile{AttachmentTokens: math.MaxInt64}, body).Input)
}

// What is held against a limit is what its unit counts. A request needs nothing of a limit of which it uses none.
func TestUnits(t *testing.T) {
	for _, c := range []struct {
		tokens Tokens
		want   [4][]int64 // by unit
	}{
		{Tokens{Input: 40, Output: 20}, [4][]int64{{60}, {40}, {20}, {1}}},
		{Tokens{Input: 40}, [4][]int64{{40}, {40}, nil, {1}}},
		{Tokens{Output: 20}, [4][]int64{{20}, nil, {20}, {1}}},
		{Tokens{}, [4][]int64{nil, nil, nil, {1}}},
		{Tokens{math.MaxInt64, math.MaxInt64}, [4][]int64{{math.MaxInt64}, {math.MaxInt64}, {math.MaxInt64}, {1}}},
	} {
		var limiters [4]*tally
		transport := &Transport{
			Base:     says(200, `{"usage":{"prompt_tokens":7,"completion_tokens":5}}`),
			Estimate: func(*http.Request, []byte) Tokens { return c.tokens },
		}
		for i := range limiters {
			limiters[i] = &tally{}
			transport.Limits = append(transport.Limits, Limit{limiters[i], Unit(i)})
		}
		readAll(t, send(t, transport, "{}"))
		for unit, settled := range map[Unit]int64{TotalTokens: 12, InputTokens: 7, OutputTokens: 5, Requests: 1} {
			asked := limiters[unit].estimates()
			if c.want[unit] == nil && (len(asked) == 0 || asked[0] == 1) {
				continue // it uses nothing, or as little as can be asked for
			}
			require.Equal(t, c.want[unit], asked, "%v: unit %d", c.tokens, unit)
			assert.Equal(t, settled, limiters[unit].charge(t), "%v: unit %d", c.tokens, unit)
		}
	}
	assert.Equal(t, TotalTokens, Limit{}.Unit)
}

// What an answer used is charged in the end, though the request said nothing of it: a limit on output is no limit on
// requests alone that name an output limit.
func TestOutputIsChargedThoughNoLimitWasGiven(t *testing.T) {
	w := newWindow(t, quotaOf(quotashare.Interactive, 100))
	transport := &Transport{
		Base:    says(200, `{"usage":{"prompt_tokens":7,"completion_tokens":100}}`),
		Limits:  []Limit{{w, OutputTokens}},
		Profile: Groq,
	}
	answer := send(t, transport, `{"messages":[]}`)
	require.Equal(t, 200, answer.StatusCode)
	readAll(t, answer)
	assert.EqualValues(t, 100, used(w))
	assert.Equal(t, 429, send(t, transport, `{"messages":[]}`).StatusCode)
}

// An estimate below 0 is a mistake. It must not let the request pass uncounted.
func TestANegativeEstimateDoesNotPassUncounted(t *testing.T) {
	w := newWindow(t, quotaOf(quotashare.Interactive, 100))
	sent := 0
	transport := &Transport{
		Base: serve(func(http.ResponseWriter, *http.Request) { sent++ }), Limits: []Limit{{Limiter: w}},
		Estimate: estimated(-1),
	}
	answer, err := transport.RoundTrip(newRequest(interactive(), t, chat, "{}"))
	if err == nil {
		readAll(t, answer)
	}
	assert.True(t, sent == 0 || used(w) > 0)
}

func TestEstimateIsAskedInThePlaceOfTheProfile(t *testing.T) {
	limiter := &tally{}
	const body = `{"model":"m","max_tokens":700}`
	transport := &Transport{
		Base:    says(500, ""),
		Limits:  []Limit{{Limiter: limiter}},
		Profile: Profile{OutputFactor: 15, DefaultOutput: 1000},
		Estimate: func(r *http.Request, got []byte) Tokens {
			assert.Equal(t, body, string(got))
			assert.Equal(t, "/v1/chat/completions", r.URL.Path)
			assert.Equal(t, quotashare.Interactive, quotashare.ClassFrom(r.Context()))
			return Tokens{Input: 3, Output: 4}
		},
	}
	readAll(t, send(t, transport, body))
	assert.Equal(t, []int64{7}, limiter.estimates(), "as it is")

	// A request without a body has an estimate too.
	transport.Estimate = func(_ *http.Request, got []byte) Tokens {
		assert.Empty(t, got)
		return Tokens{Input: 9}
	}
	for _, r := range []*http.Request{newRequest(interactive(), t, chat, ""), newRequest(interactive(), t, chat, "")} {
		r.GetBody = nil
		if len(limiter.estimates()) == 1 {
			r.Body = nil
		}
		answer, err := transport.RoundTrip(r)
		require.NoError(t, err)
		readAll(t, answer)
	}
	assert.Equal(t, []int64{7, 9, 9}, limiter.estimates())
}

func TestMetersSaysWhatUsesTokens(t *testing.T) {
	limiter := &tally{}
	transport := &Transport{
		Base:     says(200, used60),
		Limits:   []Limit{{Limiter: limiter}},
		Meters:   func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, ":generateContent") },
		Estimate: estimated(500),
	}
	readAll(t, send(t, transport, "{}"))
	assert.Empty(t, limiter.grants, "a chat is not one any more")
	r := newRequest(context.Background(), t, "http://provider.test/v1/models/gemini:generateContent", "{}")
	answer, err := transport.RoundTrip(r)
	require.NoError(t, err)
	readAll(t, answer)
	assert.EqualValues(t, 60, limiter.charge(t))
	assert.EqualValues(t, 1, transport.Unstamped())
}

func TestLimitsForChoosesByTheModel(t *testing.T) {
	large, small, requests, rest := &tally{}, &tally{}, &tally{}, &tally{}
	transport := &Transport{
		Base:   says(200, used60, "X-RateLimit-Remaining-Tokens", "4"),
		Limits: []Limit{{Limiter: rest}},
	}
	var models []string
	transport.LimitsFor = func(r *http.Request, model string) []Limit {
		assert.Equal(t, chat, r.URL.String())
		models = append(models, model)
		switch model {
		case "large":
			return []Limit{{Limiter: large}}
		case "small":
			return []Limit{{Limiter: small}, {requests, Requests}}
		case "bad":
			return []Limit{{}}
		}
		return nil
	}
	bodies := []string{`{"model":"large"}`, `{"model":"small","n":1}`, `{"model":"x"}`, `{}`, `{"model":7}`, `-`, ``}
	for _, body := range bodies {
		assert.Equal(t, used60, readAll(t, send(t, transport, body)))
	}
	assert.Equal(t, []string{"large", "small", "x", "", "", "", ""}, models)
	assert.EqualValues(t, 60, large.charge(t))
	assert.EqualValues(t, 60, small.charge(t))
	assert.EqualValues(t, 1, requests.charge(t))
	assert.Empty(t, rest.grants, "its place is taken")
	assert.Equal(t, []int64{4}, large.observed)
	assert.Equal(t, []int64{4}, small.observed)
	assert.Empty(t, rest.observed)
	_, err := transport.RoundTrip(newRequest(interactive(), t, chat, `{"model":"bad"}`))
	require.ErrorContains(t, err, "limits[0]")
}

// The profiles, as the providers' documents have it.
func TestProfiles(t *testing.T) {
	const request = `{"max_tokens":100}`
	const answer = `{"usage":{"input_tokens":50,"cache_read_input_tokens":8000,"output_tokens":10}}`
	reserved := perToken(len(request), 3) + 100
	for name, c := range map[string]struct {
		profile      Profile
		estimate, ok int64
		failed       int64 // of the estimate, in percent
	}{
		"zero":      {Profile{}, reserved, 8060, 0},
		"OpenAI":    {OpenAI, reserved, reserved, 100},
		"Azure":     {Azure, reserved, reserved, 100},
		"Anthropic": {Anthropic, reserved, 60, 0},
		"Bedrock":   {Bedrock, reserved + 1400, 50 + 150, 0},
		"Groq":      {Groq, reserved, 60, 0},
	} {
		t.Run(name, func(t *testing.T) {
			for status, want := range map[int]int64{
				200: c.ok,
				201: c.ok,
				400: c.estimate * c.failed / 100,
				401: c.estimate * c.failed / 100,
				404: c.estimate * c.failed / 100,
				413: c.estimate * c.failed / 100,
				429: c.estimate * c.failed / 100,
				499: c.estimate * c.failed / 100,
				500: c.estimate, // it may have used tokens
				502: c.estimate,
				503: c.estimate * c.failed / 100,
				504: c.estimate,
				529: c.estimate * c.failed / 100,
			} {
				limiter := &tally{}
				transport := &Transport{Base: says(status, answer), Limits: []Limit{{Limiter: limiter}}, Profile: c.profile}
				got := send(t, transport, request)
				require.Equal(t, status, got.StatusCode)
				require.Equal(t, []int64{c.estimate}, limiter.estimates())
				if status >= 400 {
					assert.Equal(t, want, limiter.charge(t), "%d, before its body is read", status)
				}
				assert.Equal(t, answer, readAll(t, got))
				assert.Equal(t, want, limiter.charge(t), status)
				assert.Zero(t, limiter.grants[0].cancelled, "it was sent")
			}
		})
	}
	assert.EqualValues(t, 15*4096, estimate(t, Bedrock, `{}`).Output)
}

// Completions answers each prompt of a list.
func TestEachPromptIsAnswered(t *testing.T) {
	for body, want := range map[string]int64{
		`{"max_tokens":7,"prompt":"a"}`:                7,
		`{"max_tokens":7,"prompt":["a","b","c"]}`:      21,
		`{"max_tokens":7,"prompt":["a","b"],"n":2}`:    28,
		`{"max_tokens":7,"prompt":[1,2,3]}`:            7,
		`{"max_tokens":7,"prompt":[[1,2,3],[4]]}`:      14,
		`{"max_tokens":7,"prompt":[]}`:                 7,
		`{"max_tokens":7,"prompt":{"a":["b"]}}`:        7,
		`{"max_tokens":7,"messages":["a","b"]}`:        7,
		`{"max_tokens":7,"prompt":null,"input":["a"]}`: 7,
	} {
		assert.Equal(t, want, estimate(t, Profile{}, body).Output, body)
	}
}
