package llmhttp_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare/llmhttp"
)

// An oracle finds the usage of an answer that is there as a whole, by encoding/json.
type oracle struct {
	input, cached, output int64
	hasInput, whole       bool
}

// settled returns what a call is settled with.
func (o *oracle) settled(profile Profile) metered {
	if !o.whole {
		return metered{}
	}
	if profile.CachedInputFree {
		return metered{o.input, o.output, true}
	}
	return metered{o.input + o.cached, o.output, true}
}

// members calls back with each member of an object, in its order, under the name that was written.
func members(object []byte, do func(key string, value json.RawMessage)) {
	decoder := json.NewDecoder(bytes.NewReader(object))
	if start, err := decoder.Token(); err != nil || start != json.Delim('{') {
		return
	}
	for decoder.More() {
		before := decoder.InputOffset()
		if _, err := decoder.Token(); err != nil {
			return
		}
		key := object[before:decoder.InputOffset()]
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return
		}
		do(strings.Trim(string(key), ", \t\r\n"), value)
	}
}

// read takes a JSON object of an answer. It returns false for one that nobody need agree on.
func (o *oracle) read(object []byte) (ok bool) {
	ok = true
	usage := func(of json.RawMessage, whole bool) {
		if of[0] == '{' && len(of) <= 1<<14 {
			ok = o.add(of, whole) && ok
		}
	}
	members(object, func(key string, value json.RawMessage) {
		switch key {
		case `"usage"`:
			usage(value, true)
		case `"message"`, `"response"`, `"x_groq"`:
			members(value, func(inner string, value json.RawMessage) {
				if inner == `"usage"` {
					usage(value, key != `"message"`)
				}
			})
		}
	})
	return ok
}

// names are the keys of a usage, by what they mean.
var names = struct{ input, output, total, read, write, details []string }{
	[]string{"prompt_tokens", "input_tokens", "inputTokens"},
	[]string{"completion_tokens", "output_tokens", "outputTokens"},
	[]string{"total_tokens", "totalTokens"},
	[]string{"cache_read_input_tokens", "cacheReadInputTokens"},
	[]string{"cache_creation_input_tokens", "cacheWriteInputTokens"},
	[]string{"prompt_tokens_details", "input_tokens_details"},
}

// add takes a usage. It returns false if a key is there twice, or in letters of another case.
func (o *oracle) add(usage json.RawMessage, whole bool) bool {
	all := slices.Concat(names.input, names.output, names.total, names.read, names.write, names.details)
	values := map[string]json.RawMessage{}
	seen := map[string]bool{}
	ok := true
	note := func(key string, value json.RawMessage, names []string) {
		if json.Unmarshal([]byte(key), &key) != nil {
			return
		}
		for _, name := range names {
			if strings.EqualFold(name, key) {
				ok = ok && name == key && !seen[name]
				seen[name], values[name] = true, value
			}
		}
	}
	members(usage, func(key string, value json.RawMessage) { note(key, value, all) })
	cached := int64(0)
	for _, name := range names.details {
		details := values[name]
		delete(values, "cached_tokens")
		delete(seen, "cached_tokens")
		members(details, func(key string, value json.RawMessage) { note(key, value, []string{"cached_tokens"}) })
		tokens, _ := number(values, "cached_tokens")
		cached = max(cached, tokens)
	}

	input, hasInput := number(values, names.input...)
	output, hasOutput := number(values, names.output...)
	total, hasTotal := number(values, names.total...)
	read, hasRead := number(values, names.read...)
	write, hasWrite := number(values, names.write...)
	if !hasInput && !hasOutput && !hasTotal {
		return ok // it tells nothing, as if it were not there
	}
	_, inside := values["prompt_tokens"]
	if (hasRead || hasWrite) && !inside { // beside the input
		input += write
	} else if hasInput {
		input, read = input-min(cached, input), min(cached, input)
	} else if hasTotal {
		input = max(0, total-output)
	}
	if hasTotal && !hasOutput {
		output = max(0, total-input-read)
	}
	// Use only grows.
	o.input, o.cached, o.output = max(o.input, input), max(o.cached, read), max(o.output, output)
	o.hasInput = o.hasInput || hasInput || hasTotal
	o.whole = o.whole || whole && o.hasInput
	return ok
}

// number returns the largest value that is a number of tokens, rounded up.
func number(values map[string]json.RawMessage, names ...string) (tokens int64, told bool) {
	for _, name := range names {
		if value := values[name]; len(value) > 0 && strings.ContainsRune("-0123456789", rune(value[0])) {
			if n, err := strconv.ParseFloat(string(value), 64); err == nil && n >= 0 && n <= 1<<53 {
				tokens, told = max(tokens, int64(math.Ceil(n))), true
			}
		}
	}
	return tokens, told
}

// readEvents takes an answer of server-sent events. It returns false if one of them is no object that the oracle reads.
func (o *oracle) readEvents(answer string) bool {
	answer = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(answer)
	data, ok := "", true
	for line := range strings.SplitSeq(answer+"\n\n", "\n") {
		if value, found := strings.CutPrefix(line, "data:"); found {
			data += value + "\n"
		}
		if line != "" || data == "" {
			continue
		}
		ok = ok && (json.Valid([]byte(data)) && o.read([]byte(data)) || strings.TrimSpace(data) == "[DONE]")
		data = ""
	}
	return ok
}

// An answer that comes in pieces is settled as if it came whole; and by what encoding/json makes of it, if it is JSON,
// or events of JSON.
func FuzzUsageIsTheSameInPieces(f *testing.F) {
	// A usage that tells nothing does not make that of the beginning the whole.
	f.Add(`data:{"message":{"usage":{"input_tokens":0}},"usage":{}}`, "0")
	for _, a := range answers {
		f.Add(a.body, "\x05\x01\x30")
	}
	for _, body := range []string{
		`{"usage":{"prompt_tokens":1,"prompt_tokens":2}}`, `{"usage":{"input_tokens":1},"usage":{"output_tokens":2}}`,
		`{"usage":{"Prompt_Tokens":1}}`, `{"us\u0061ge":{"prompt_tokens":1}}`, `{"usage":{"prompt\u005ftokens":1}}`,
		`{"response":{"usage":{"prompt_tokens":1}},"message":{"usage":{"input_tokens":2}}}`, "data\r\rdata:{}\r\n\r",
		`{"usage":{"prompt_tokens":"1","completion_tokens":[],"total_tokens":{"prompt_tokens":2}}}`, "data:{}\n\rdata:[",
		`}{"usage":{"prompt_tokens":1}}`, `{"usage":{"prompt_tokens":1}`, `{"usage"::{"prompt_tokens":1}}`, `"`, `\`,
	} {
		f.Add(body, "\x02\x00\xff")
		f.Add("data: "+body+"\r\n\r\ndata:"+body, "\x09\x01")
	}
	f.Fuzz(func(t *testing.T, answer, cuts string) {
		var pieces []string
		rest := answer
		for _, length := range []byte(cuts) {
			n := min(int(length), len(rest))
			pieces, rest = append(pieces, rest[:n]), rest[n:]
		}
		pieces = append(pieces, rest)
		for _, kind := range []string{object, events} {
			for _, profile := range []Profile{{}, {CachedInputFree: true}} {
				whole := meter(t, profile, contentType(kind), answer)
				require.Equal(t, whole, meter(t, profile, contentType(kind), pieces...))
				require.GreaterOrEqual(t, whole.input, int64(0))
				require.GreaterOrEqual(t, whole.output, int64(0))
				var want oracle
				if kind == object && json.Valid([]byte(answer)) && want.read([]byte(answer)) {
					require.Equal(t, want.settled(profile), whole)
				}
				if kind == events && want.readEvents(answer) {
					require.Equal(t, want.settled(profile), whole)
				}
			}
		}
	})
}

// limitNames are the headers of limits, with those of their resets.
var limitNames = [][2]string{
	{"X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Tokens"},
	{"X-Ratelimit-Remaining-Project-Tokens", "X-Ratelimit-Reset-Project-Tokens"},
	{"X-Ratelimit-Remaining-Tokens-Minute", "X-Ratelimit-Reset-Tokens-Minute"},
	{"X-Ratelimit-Remaining-Requests", "X-Ratelimit-Reset-Requests"},
	{"Anthropic-Ratelimit-Tokens-Remaining", "Anthropic-Ratelimit-Tokens-Reset"},
	{"Anthropic-Ratelimit-Input-Tokens-Remaining", "Anthropic-Ratelimit-Input-Tokens-Reset"},
	{"Anthropic-Ratelimit-Output-Tokens-Remaining", "Anthropic-Ratelimit-Output-Tokens-Reset"},
	{"Anthropic-Ratelimit-Requests-Remaining", "Anthropic-Ratelimit-Requests-Reset"},
}

// Whatever is in the headers, nothing panics, nobody is told to wait for less than nothing or that less than nothing is
// left, and a plain number of seconds is what it says.
func FuzzHeaders(f *testing.F) {
	for i, text := range []string{
		"", "0", "-1", "7", "7.5", "1e9", "9223372036854775807", "18446744073709551616", "NaN", "1m30s", "-1s", "2562048h",
		"Wed, 21 Oct 2015 07:28:00 GMT", "Wednesday, 21-Oct-15 07:28:00 GMT", "Wed Oct 21 07:28:00 2015",
		"2026-08-07T21:00:00Z", "9999-12-31T23:59:59.999999999+23:59", "0000-01-01T00:00:00Z", "2026", "\x00", "1_0", "٣",
	} {
		f.Add("", text, "Wed, 21 Oct 2015 07:27:00 GMT", "0", text, uint8(i))
		f.Add(text, "7", text, text, "7s", uint8(i))
		f.Add("x", "x", "", "0", text, uint8(i))
	}
	f.Fuzz(func(t *testing.T, afterMs, after, date, left, reset string, name uint8) {
		names := limitNames[int(name)%len(limitNames)]
		header := http.Header{names[0]: {left, "x"}, names[1]: {reset}}
		for key, value := range map[string]string{"Retry-After-Ms": afterMs, "Retry-After": after, "Date": date} {
			if value != "" {
				header[key] = []string{value}
			}
		}
		before := header.Clone()
		for _, status := range []int{200, 429} {
			transport := &Transport{
				Base: base(func(r *http.Request) (*http.Response, error) {
					return &http.Response{StatusCode: status, Header: header, Body: http.NoBody}, r.Body.Close()
				}),
				Estimate: func(*http.Request, []byte) Tokens { return Tokens{Input: 1, Output: 1} },
			}
			var limiters [4]tally
			for i := range limiters {
				transport.Limits = append(transport.Limits, Limit{&limiters[i], Unit(i)})
			}
			readAll(t, send(t, transport, "{}"))
			require.Equal(t, before, header)
			told := 0
			for i := range limiters {
				for j, n := range limiters[i].observed {
					told++
					written, err := strconv.ParseInt(left, 10, 64)
					require.NoError(t, err)
					require.Equal(t, written, n)
					require.GreaterOrEqual(t, n, int64(0))
					require.GreaterOrEqual(t, limiters[i].ages[j], time.Duration(0))
				}
				if status == 200 {
					require.Empty(t, limiters[i].throttled)
					continue
				}
				require.Len(t, limiters[i].throttled, 1)
				waits := limiters[i].throttled[0]
				require.GreaterOrEqual(t, waits, time.Duration(0))
				if n, err := strconv.ParseUint(after, 10, 32); err == nil && afterMs == "" {
					require.Equal(t, time.Duration(n)*time.Second, waits)
				}
				if n, err := strconv.ParseUint(afterMs, 10, 32); err == nil && n > 0 {
					require.Equal(t, time.Duration(n)*time.Millisecond, waits)
				}
			}
			require.LessOrEqual(t, told, 1, "one name is of one unit")
		}
	})
}

// Whatever is in a body it has an estimate. It is never negative, never less than its text or the attachment that takes
// the place of it, and never less for a larger output limit.
func FuzzRequestBody(f *testing.F) {
	for _, body := range []string{
		``, `{}`, `{"max_tokens":7,"n":2}`, `{"max_tokens":-1}`, `{"n":-1,"best_of":1e300}`,
		`{"inferenceConfig":{"maxTokens":7}}`,
		`{"type":"image","data":"data:image/png;base64,AAAA"}`, `{"type":"image`, `"`, `\"`, `"\`, "\x00\xff",
		`{"input":"` + strings.Repeat("a", 1024) + `"}`, strings.Repeat(`"data:;base64,"`, 9), `{"max_tokens":{}}`,
	} {
		for i := range uint32(4) {
			f.Add(body, 7+i, 1<<20+i, 15.0)
		}
	}
	f.Fuzz(func(t *testing.T, body string, limit, more uint32, factor float64) {
		tokens := estimate(t, Profile{}, body)
		require.GreaterOrEqual(t, tokens.Input, min(perToken(len(body), 3), 1600))
		most := int64(strings.Count(body, `"`)+1) * 1600
		require.LessOrEqual(t, tokens.Input, perToken(len(body), 3)+most)
		require.GreaterOrEqual(t, tokens.Output, int64(0))

		profiles := []Profile{{}, Bedrock, {OutputFactor: factor, BytesPerToken: factor, DefaultOutput: int64(limit)}}
		profile := profiles[more%3]
		tokens = estimate(t, profile, body)
		require.GreaterOrEqual(t, tokens.Input, int64(0))
		require.GreaterOrEqual(t, tokens.Output, int64(0))

		// The same with output limits, beside whatever else the body says.
		text, err := json.Marshal(body)
		require.NoError(t, err)
		format := []string{
			`{"max_tokens":%d,"input":%s}`, `{"input":%[2]s,"max_completion_tokens":%[1]d,"max_tokens":3}`,
			`{"max_output_tokens":%d,"n":2,"input":%s}`, `{"inferenceConfig":{"maxTokens":%d},"input":%s}`,
		}[limit%4]
		less := estimate(t, profile, fmt.Sprintf(format, limit, text))
		larger := estimate(t, profile, fmt.Sprintf(format, uint64(limit)+uint64(more), text))
		require.LessOrEqual(t, less.Output, larger.Output)
		if !(profile.OutputFactor > 0 && profile.OutputFactor < 1) {
			require.GreaterOrEqual(t, less.Output, int64(limit), "the limit, at least")
		}
	})
}
