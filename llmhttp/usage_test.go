package llmhttp_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	. "github.com/quotashare/quotashare/llmhttp"
)

const (
	object = "application/json"
	events = "text/event-stream; charset=utf-8"
)

// A metered answer is what its call was settled with: tokens of input and output, or nothing.
type metered struct {
	input, output int64
	told          bool
}

// meter sends a call and reads its answer, of the pieces, to the end. It returns what the call was settled with.
func meter(t testing.TB, profile Profile, header http.Header, pieces ...string) metered {
	t.Helper()
	input, output := &tally{}, &tally{}
	readers := make([]io.Reader, len(pieces))
	for i, piece := range pieces {
		readers[i] = strings.NewReader(piece)
	}
	body := &trackedBody{Reader: io.MultiReader(readers...)}
	transport := &Transport{
		Base: base(func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Header: header, Body: body}, r.Body.Close()
		}),
		Limits:   []Limit{{input, InputTokens}, {output, OutputTokens}},
		Profile:  profile,
		Estimate: func(*http.Request, []byte) Tokens { return Tokens{Input: 1, Output: 1} },
	}
	got := readAll(t, send(t, transport, "{}"))
	require.True(t, got == strings.Join(pieces, ""), "byte for byte")
	require.Equal(t, 1, body.closed)
	require.Equal(t, len(input.grants[0].settled), len(output.grants[0].settled))
	if s := input.grants[0].settled; len(s) == 0 || s[0] < 0 {
		require.Zero(t, input.grants[0].cancelled+output.grants[0].cancelled)
		return metered{}
	}
	return metered{input.charge(t), output.charge(t), true}
}

func contentType(kind string) http.Header { return http.Header{"Content-Type": {kind}} }

// answers are the shapes that the providers' answers have, as they write them, with the input that was not read from
// a cache, that which was, and the output.
var answers = map[string]struct {
	kind, body            string
	input, cached, output int64
}{
	"OpenAI, chat": {object, `{
  "id": "chatcmpl-1", "object": "chat.completion", "model": "gpt",
  "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello!"}, "finish_reason": "stop"}],
  "usage": {
    "prompt_tokens": 2008, "completion_tokens": 266, "total_tokens": 2274,
    "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 261, "accepted_prediction_tokens": 0}
  },
  "service_tier": "default"
}`, 88, 1920, 266},
	"OpenAI, chat, streamed": {events, `data: {"id":"1","choices":[{"delta":{"content":""}}],"usage":null}

data: {"id":"1","choices":[{"delta":{"content":"Hello"}}],"usage":null}

data: {"id":"1","choices":[],"usage":{"prompt_tokens":8,"completion_tokens":3,"total_tokens":11}}

data: [DONE]

`, 8, 0, 3},
	"OpenAI, completions": {object, `{"object":"text_completion","choices":[{"text":"x"}],` +
		`"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}}`, 5, 0, 7},
	"OpenAI, embeddings": {object, `{"object":"list","data":[{"embedding":[0.1,-2e-3]}],` +
		`"usage":{"prompt_tokens":8,"total_tokens":8}}`, 8, 0, 0},
	"OpenAI, responses": {object, `{"object":"response","error":null,"output":[{"type":"message","content":[]}],` +
		`"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":6},"output_tokens":87,` +
		`"output_tokens_details":{"reasoning_tokens":80},"total_tokens":123},"metadata":{}}`, 30, 6, 87},
	"OpenAI, responses, streamed": {events, `event: response.created
data: {"type":"response.created","response":{"id":"r","output":[],"usage":null}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"Hi"}

event: response.completed
data: {"type":"response.completed","response":{"id":"r","usage":{"input_tokens":37,"output_tokens":11,` +
		`"output_tokens_details":{"reasoning_tokens":0},"total_tokens":48},"metadata":{}}}

`, 37, 0, 11},
	"Azure, chat": {object, `{"choices":[{"content_filter_results":{"hate":{"filtered":false,"severity":"safe"}},` +
		`"message":{"content":"x"}}],"prompt_filter_results":[{"prompt_index":0}],"usage":{"completion_tokens":2,` +
		`"completion_tokens_details":null,"prompt_tokens":3,"prompt_tokens_details":null,"total_tokens":5}}`, 3, 0, 2},
	"Anthropic, messages": {object, `{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"text",` +
		`"text":"Hi"}],"stop_reason":"end_turn","usage":{"input_tokens":2095,"cache_creation_input_tokens":100,` +
		`"cache_read_input_tokens":8000,"cache_creation":{"ephemeral_5m_input_tokens":100},"output_tokens":503,` +
		`"service_tier":"standard"}}`, 2195, 8000, 503},
	"Anthropic, messages, without a cache": {object, `{"usage":{"input_tokens":12,"output_tokens":6}}`, 12, 0, 6},
	"Anthropic, messages, streamed": {events, `event: message_start
data: {"type":"message_start","message":{"id":"m","content":[],"usage":{"input_tokens":472,` +
		`"cache_creation_input_tokens":10,"cache_read_input_tokens":20,"output_tokens":2}}}

event: ping
data: {"type": "ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Okay"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":89}}

event: message_stop
data: {"type":"message_stop"}

`, 482, 20, 89},
	"Anthropic, messages, streamed, all told again in the end": {events, `event: message_start
data: {"type":"message_start","message":{"usage":{"input_tokens":472,"output_tokens":2}}}

event: message_delta
data: {"type":"message_delta","delta":{},"usage":{"input_tokens":480,"cache_creation_input_tokens":0,` +
		`"cache_read_input_tokens":20,"output_tokens":89}}

`, 480, 20, 89},
	"Bedrock, Converse": {object, `{"metrics":{"latencyMs":551},"output":{"message":{"content":[{"text":"Hi"}],` +
		`"role":"assistant"}},"stopReason":"end_turn","usage":{"inputTokens":30,"outputTokens":628,` +
		`"totalTokens":758,"cacheReadInputTokens":90,"cacheWriteInputTokens":10}}`, 40, 90, 628},
	"Groq, chat": {object, `{"choices":[],"usage":{"queue_time":0.03,"prompt_tokens":18,"prompt_time":0.0006,` +
		`"completion_tokens":556,"completion_time":0.46,"total_tokens":574},"x_groq":{"id":"req_1"}}`, 18, 0, 556},
	"Groq, chat, streamed": {events, `data: {"id":"c","choices":[{"delta":{"content":"x"}}],"x_groq":{"id":"req_1"}}

data: {"id":"c","choices":[{"delta":{},"finish_reason":"stop"}],"x_groq":{"id":"req_1","usage":{"queue_time":0.1,` +
		`"prompt_tokens":25,"completion_tokens":40,"total_tokens":65}}}

data: [DONE]

`, 25, 0, 40},
	"total alone":          {object, `{"usage":{"total_tokens":48}}`, 48, 0, 0},
	"total and input":      {object, `{"usage":{"total_tokens":48,"input_tokens":40}}`, 40, 0, 8},
	"total and output":     {object, `{"usage":{"total_tokens":48,"output_tokens":8}}`, 40, 0, 8},
	"total below a part":   {object, `{"usage":{"total_tokens":8,"output_tokens":48}}`, 0, 0, 48},
	"no total":             {object, `{"usage":{"prompt_tokens":100,"completion_tokens":50}}`, 100, 0, 50},
	"nothing was used":     {object, `{"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}`, 0, 0, 0},
	"more cached than all": {object, `{"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":9}}}`, 0, 5, 0},
	"cached is negative": {object, `{"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":-9}}}`,
		5, 0, 0},
	"cache is unknown": {object, `{"usage":{"input_tokens":5,"output_tokens":2,"cache_read_input_tokens":null,` +
		`"cache_creation_input_tokens":null}}`, 5, 0, 2},
	"written to the cache alone": {object, `{"usage":{"input_tokens":5,"cache_creation_input_tokens":7}}`, 12, 0, 0},
	"numbers with a fraction":    {object, `{"usage":{"prompt_tokens":1.2e2,"completion_tokens":50.0}}`, 120, 0, 50},
	"as many as there may be":    {object, `{"usage":{"prompt_tokens":9007199254740992}}`, 1 << 53, 0, 0},
	"without a type":             {"", `{"usage":{"prompt_tokens":3,"completion_tokens":4}}`, 3, 0, 4},
	"with a type and more":       {"application/json; charset=utf-8", `{"usage":{"prompt_tokens":3}}`, 3, 0, 0},
	"a usage of other things": {object, `{"usage":{"prompt_tokens":3,"completion_tokens":4,"usage":{"prompt_tokens":9},` +
		`"text":"}{\"","list":[{"prompt_tokens":9}]}}`, 3, 0, 4},
	"keys and texts with quotes": {object, `{"a\"":"\\","\\":"\"usage\":{","b":"\\\"","usage":{"prompt_tokens":3}}`,
		3, 0, 0},
	"after what looks like one": {object, `{"message":{"usage":"none"},"response":[{"usage":{"prompt_tokens":9}}],` +
		`"usage":{"prompt_tokens":3}}`, 3, 0, 0},
}

func TestUsageOfEveryShape(t *testing.T) {
	for name, a := range answers {
		t.Run(name, func(t *testing.T) {
			want := metered{a.input + a.cached, a.output, true}
			assert.Equal(t, want, meter(t, Profile{}, contentType(a.kind), a.body))
			want.input = a.input
			assert.Equal(t, want, meter(t, Profile{CachedInputFree: true}, contentType(a.kind), a.body))
			want.output *= 3
			profile := Profile{CachedInputFree: true, OutputFactor: 3}
			assert.Equal(t, want, meter(t, profile, contentType(a.kind), a.body))
			profile.CountsReserved = true
			assert.Zero(t, meter(t, profile, contentType(a.kind), a.body), "what was reserved is what counts")
		})
	}
}

// An answer may come in pieces of any size: cut in two at every byte, and byte by byte.
func TestUsageInPieces(t *testing.T) {
	for name, a := range answers {
		t.Run(name, func(t *testing.T) {
			want := metered{a.input + a.cached, a.output, true}
			for cut := range len(a.body) {
				require.Equal(t, want, meter(t, Profile{}, contentType(a.kind), a.body[:cut], a.body[cut:]), "%d", cut)
			}
			require.Equal(t, want, meter(t, Profile{}, contentType(a.kind), strings.Split(a.body, "")...))
		})
	}
}

// Server-sent events may end their lines in three ways, spread their data over several of them, and end without an
// end.
func TestUsageOfEveryFormOfEvents(t *testing.T) {
	step := 1
	if testing.Short() {
		step = 7
	}
	check := func(t *testing.T, want metered, body string) {
		t.Helper()
		for cut := 0; cut < len(body); cut += step {
			require.Equal(t, want, meter(t, Profile{}, contentType(events), body[:cut], body[cut:]), "%d", cut)
		}
		require.Equal(t, want, meter(t, Profile{}, contentType(events), strings.Split(body, "")...))
	}
	for name, a := range answers {
		if a.kind != events {
			continue
		}
		want := metered{a.input + a.cached, a.output, true}
		for end, lineEnd := range map[string]string{"LF": "\n", "CR": "\r", "CRLF": "\r\n"} {
			t.Run(name+"/"+end, func(t *testing.T) {
				body := strings.ReplaceAll(a.body, "\n", lineEnd)
				check(t, want, body)
				check(t, want, ": a comment"+lineEnd+lineEnd+strings.ReplaceAll(body, "data: ", ":"+lineEnd+"data:"))
				check(t, want, strings.ReplaceAll(body, ",\"", ","+lineEnd+"data: \""))
				check(t, want, strings.TrimRight(body, "\r\n"))
			})
		}
	}
	for name, body := range map[string]string{
		"another field":         "database: " + used60 + "\n\n",
		"a field of no name":    ":" + used60 + "\n\n",
		"a field with a space":  " data: " + used60 + "\n\n",
		"no field at all":       used60 + "\n\n",
		"a field of one letter": "d: " + used60 + "\n\n",
		"of two events":         `data: {"usage":` + "\n\n" + `data: {"prompt_tokens":4}}` + "\n\n",
		"of two events, CR":     `data: {"usage":` + "\r\r" + `data: {"prompt_tokens":4}}` + "\r\r",
		"of two events, mixed":  `data: {"usage":` + "\r\n\n" + `data: {"prompt_tokens":4}}` + "\n",
		"an event not ended":    `data: {"usage":{"prompt_tokens":4}`[:30],
	} {
		t.Run(name, func(t *testing.T) { check(t, metered{}, body) })
	}
	// An event that was broken off does not spoil the next. Of one that has lines of other fields all is read.
	used := metered{40, 20, true}
	check(t, used, `data: {"text":"`+"\n\n"+`data: `+used60+"\n\n")
	check(t, used, "data: {\nid: 7\ndata: \"usage\"\n: {\ndata: :\nretry: 1\ndata: {\"prompt_tokens\":40,"+
		"\ndata: \"completion_tokens\":20}\n\n")
	check(t, used, ": CR, and then LF\rdata: {\"text\":\"\n\ndata: "+used60+"\n\n")
	check(t, used, "data:"+used60+"\n\n")
	check(t, used, "data\ndata: "+used60)
}

// Only the usage of the answer counts: not one in its text, of a part of it, or that is none.
func TestWhatIsNoUsageIsNotTaken(t *testing.T) {
	for _, body := range []string{
		``,
		`null`,
		`"usage"`,
		`[{"usage":{"prompt_tokens":9}}]`,
		`{"usage":null}`,
		`{"usage":[]}`,
		`{"usage":[{"prompt_tokens":9}]}`,
		`{"usage":7}`,
		`{"usage":"{\"prompt_tokens\":9}"}`,
		`{"usage":{}}`,
		`{"usage":{"tokens":9}}`,
		`{"usage":{"completion_tokens":9}}`, // the input is not known
		`{"usage":{"prompt_tokens":null,"total_tokens":null}}`,
		`{"usage":{"prompt_tokens":-1,"total_tokens":-1}}`,
		`{"usage":{"prompt_tokens":9007199254740993e3,"total_tokens":1e300}}`,
		`{"usage":{"prompt_tokens":9007199254740994}}`,
		`{"usage":{"prompt_tokens":` + strings.Repeat(" ", 1<<14) + `9}}`,
		`{"usage":{"prompt_tokens":9`,
		`{"text":"\"usage\":{\"prompt_tokens\":9}"}`,
		`{"text":"}, \"usage\": {\"prompt_tokens\":9}, {"}`,
		`{"choices":[{"message":{"content":"{\"usage\":{\"prompt_tokens\":9}}"}}]}`,
		`{"choices":[{"usage":{"prompt_tokens":9}}]}`,
		`{"metadata":{"usage":{"prompt_tokens":9}}}`,
		`{"response":{"metadata":{"usage":{"prompt_tokens":9}}}}`,
		`{"response":{"output":[{"usage":{"prompt_tokens":9}}]}}`,
		`{"content":[{"type":"tool_use","input":{"usage":{"prompt_tokens":9}}}]}`,
		`{"message":{"usage":{"input_tokens":9,"output_tokens":1}}}`, // the beginning of a stream alone
		`{"messages":{"usage":{"prompt_tokens":9}}}`,
		`{"Usage":{"prompt_tokens":9}}`,
		`{"usage ":{"prompt_tokens":9}}`,
		`{"usage\\":{"prompt_tokens":9}}`,
		`{"usagesagesagesagesage":{"prompt_tokens":9}}`,
		`{"metadata":{"usage":{"prompt_tokens":9}},"usage":{"completion_tokens":4}}`, // of which the first is none
		`{"usage":[{"prompt_tokens":9}],"usage":{"completion_tokens":4}}`,
		`{"response":[{"usage":{"prompt_tokens":9}}],"usage":{"completion_tokens":4}}`,
		`{"key":"usage","value":{"prompt_tokens":9}}`,
		`{"usage":1,"value":{"prompt_tokens":9}}`,
		`{"response":1,"value":{"usage":{"prompt_tokens":9}}}`,
		`{"list":["usage",{"prompt_tokens":9}]}`,
	} {
		assert.Zero(t, meter(t, Profile{}, contentType(object), body), body)
		assert.Zero(t, meter(t, Profile{}, contentType(object), strings.Split(body, "")...), body)
		assert.Zero(t, meter(t, Profile{}, contentType(events), "data: "+body+"\n\n"), body)
		assert.Zero(t, meter(t, Profile{}, contentType(events), body), body)
	}
	// An object is no events, and events are no object.
	assert.Zero(t, meter(t, Profile{}, contentType(events), used60))
}

// A number that is none is not told, whatever is told beside it. That is not the same as 0, which would make the call
// free.
func TestANumberThatIsNoneIsNotZero(t *testing.T) {
	for _, none := range []string{`"12"`, `"x"`, `""`, `true`, `{}`, `[]`, `[12]`, `1e400`, `-1`, `null`} {
		t.Run(none, func(t *testing.T) {
			for format, want := range map[string]metered{
				`{"usage":{"prompt_tokens":%s,"total_tokens":%[1]s}}`:                        {},
				`{"usage":{"input_tokens":%s,"output_tokens":%[1]s}}`:                        {},
				`{"usage":{"prompt_tokens":%s,"completion_tokens":20,"total_tokens":60}}`:    {40, 20, true},
				`{"usage":{"prompt_tokens":40,"completion_tokens":%s,"total_tokens":60}}`:    {40, 20, true},
				`{"usage":{"prompt_tokens":40,"completion_tokens":20,"total_tokens":%s}}`:    {40, 20, true},
				`{"usage":{"input_tokens":40,"output_tokens":20,"input_tokens_details":%s}}`: {40, 20, true},
				`{"usage":{"prompt_tokens":40,"completion_tokens":20},"service_tier":%s}`:    {40, 20, true},
			} {
				body := fmt.Sprintf(format, none)
				assert.Equal(t, want, meter(t, Profile{}, contentType(object), body), body)
			}
		})
	}
}

// What is told later replaces what was told before. A stream that ends before its usage is told keeps its estimate.
func TestTheLastUsageCounts(t *testing.T) {
	first := `data: {"choices":[{}],"usage":{"prompt_tokens":40,"completion_tokens":1}}` + "\n\n"
	last := `data: {"choices":[],"usage":{"prompt_tokens":41,"completion_tokens":20}}` + "\n\n"
	assert.Equal(t, metered{41, 20, true}, meter(t, Profile{}, contentType(events), first, last, "data: [DONE]\n\n"))
	assert.Equal(t, metered{41, 20, true}, meter(t, Profile{}, contentType(events), first, last, first[:40]))

	start := `data: {"type":"message_start","message":{"usage":{"input_tokens":40,"output_tokens":1}}}` + "\n\n"
	broken := `data: {"type":"error","error":{"type":"overloaded_error"}}` + "\n\n"
	assert.Zero(t, meter(t, Profile{}, contentType(events), start, broken))
	created := `data: {"type":"response.created","response":{"usage":null}}` + "\n\n"
	assert.Zero(t, meter(t, Profile{}, contentType(events), created, broken))
}

func zip(t testing.TB, level int, text string) string {
	t.Helper()
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, level)
	require.NoError(t, err)
	_, err = io.WriteString(w, text)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String()
}

// Who asks for gzip gets gzip, and the usage is found all the same.
func TestUsageOfAPackedAnswer(t *testing.T) {
	for name, a := range answers {
		t.Run(name, func(t *testing.T) {
			header := contentType(a.kind)
			header["Content-Encoding"] = []string{"GZIP"}
			want := metered{a.input + a.cached, a.output, true}
			packed := zip(t, gzip.BestSpeed, a.body)
			assert.Equal(t, want, meter(t, Profile{}, header, packed))
			assert.Equal(t, want, meter(t, Profile{}, header, strings.Split(packed, "")...))
		})
	}
	header := http.Header{"Content-Encoding": {"gzip"}, "Content-Type": {object}}
	packed := zip(t, gzip.BestSpeed, used60)
	assert.Zero(t, meter(t, Profile{}, header, packed[:len(packed)/2]))
	assert.Zero(t, meter(t, Profile{}, header, used60), "it is not packed at all")
	assert.Zero(t, meter(t, Profile{}, header))
	header["Content-Encoding"] = []string{"br"}
	assert.Zero(t, meter(t, Profile{}, header, packed))

	// A stream that was left is told as far as it was read. The usage of one that is too long to keep is not found.
	header["Content-Encoding"] = []string{"gzip"}
	long := func(size int) string {
		return zip(t, gzip.NoCompression, `{"text":"`+strings.Repeat(" ", size)+`","usage":{"prompt_tokens":3}}`)
	}
	packed = long(4<<20 - 1<<12)
	require.Less(t, len(packed), 4<<20)
	assert.Equal(t, metered{3, 0, true}, meter(t, Profile{}, header, packed))
	assert.Zero(t, meter(t, Profile{}, header, long(4<<20)))
}

// A small answer may be a large one when it is unpacked. It is not kept as a whole.
func TestAPackedAnswerIsNotKeptUnpacked(t *testing.T) {
	const size = 8 << 20
	packed := zip(t, gzip.BestSpeed, `{"text":"`+strings.Repeat(" ", size)+`","usage":{"prompt_tokens":3}}`)
	header := http.Header{"Content-Encoding": {"gzip"}, "Content-Type": {object}}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	assert.Equal(t, metered{3, 0, true}, meter(t, Profile{}, header, packed))
	runtime.ReadMemStats(&after)
	assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(size/4))
}

// Over a real connection: packed because the caller asked for it, and because http.Transport did, which unpacks it too.
func TestUsageOverAConnection(t *testing.T) {
	var got string // what came as Accept-Encoding
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("Accept-Encoding")
		w.Header().Set("Content-Type", object)
		if strings.Contains(got, "gzip") {
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = io.WriteString(w, zip(t, gzip.BestSpeed, used60))
			return
		}
		_, _ = io.WriteString(w, used60)
	}))
	defer server.Close()
	limiter := &tally{}
	transport := &Transport{Base: server.Client().Transport, Limits: []Limit{{Limiter: limiter}}}
	for i, accept := range []string{"", "gzip", "identity"} {
		r := newRequest(interactive(), t, server.URL+"/v1/responses", "{}")
		want, asked := used60, accept
		switch accept {
		case "":
			asked = "gzip"
		case "gzip":
			want = zip(t, gzip.BestSpeed, used60)
			fallthrough
		default:
			r.Header.Set("Accept-Encoding", accept)
		}
		answer, err := transport.RoundTrip(r)
		require.NoError(t, err)
		assert.Equal(t, want, readAll(t, answer))
		assert.Equal(t, asked, got)
		assert.EqualValues(t, 60*(i+1), limiter.charge(t))
	}
}

// A stream is not held up: the server sends the next event only when the last was confirmed.
func TestAStreamIsNotDelayed(t *testing.T) {
	confirmed := make(chan struct{})
	parts := []string{
		": hello\n\n", "data: {\"choices\":[]}\n\n", "data: {", "\"usage\":", "{\"prompt_tokens\":40,",
		"\"completion_tokens\":20}", "}\n\n", "data: [DONE]\n\n",
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, part := range parts {
			_, _ = io.WriteString(w, part)
			w.(http.Flusher).Flush()
			select {
			case <-confirmed:
			case <-r.Context().Done():
				return
			}
		}
	}))
	defer server.Close()
	w := newWindow(t, quotaOf(quotashare.Interactive, 1_000_000))
	transport := &Transport{
		Base: server.Client().Transport, Limits: []Limit{{Limiter: w}}, Estimate: estimated(500),
	}
	answer, err := transport.RoundTrip(newRequest(interactive(), t, server.URL+"/v1/messages", "{}"))
	require.NoError(t, err)
	for _, part := range parts {
		p := make([]byte, len(part))
		_, err := io.ReadFull(answer.Body, p)
		require.NoError(t, err)
		require.Equal(t, part, string(p))
		assert.EqualValues(t, 500, used(w), "it is settled in the end")
		confirmed <- struct{}{}
	}
	n, err := answer.Body.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	require.Zero(t, n)
	assert.EqualValues(t, 60, used(w), "at the end, before it is closed")
	require.NoError(t, answer.Body.Close())
	assert.EqualValues(t, 60, used(w))
}

// Whoever decodes an object and closes the body, without having met its end, has read its usage.
func TestAnObjectNeedNotBeReadToTheEnd(t *testing.T) {
	limiter := &tally{}
	transport := &Transport{Base: says(200, used60+"\n"), Limits: []Limit{{Limiter: limiter}}}
	answer := send(t, transport, "{}")
	_, err := io.ReadFull(answer.Body, make([]byte, len(used60)))
	require.NoError(t, err)
	assert.Empty(t, limiter.grants[0].settled)
	require.NoError(t, answer.Body.Close())
	assert.Equal(t, []int64{60}, limiter.grants[0].settled)
	require.NoError(t, answer.Body.Close())
	assert.Equal(t, []int64{60}, limiter.grants[0].settled)
}

// Data that come together with the end, as some readers give them, are read too. An error is the caller's.
func TestTheEndOfAnAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		body io.Reader
		err  error
		want int64
	}{
		"with the last data": {iotest.DataErrReader(strings.NewReader(used60)), nil, 60},
		"an error after it": {
			io.MultiReader(strings.NewReader(used60), iotest.ErrReader(io.ErrNoProgress)), io.ErrNoProgress, 60,
		},
		"an error before it": {iotest.ErrReader(io.ErrUnexpectedEOF), io.ErrUnexpectedEOF, 500},
	} {
		t.Run(name, func(t *testing.T) {
			limiter := &tally{}
			closing := &trackedBody{Reader: c.body, err: io.ErrShortWrite}
			transport := &Transport{
				Base: base(func(r *http.Request) (*http.Response, error) {
					return &http.Response{StatusCode: 200, Header: http.Header{}, Body: closing}, r.Body.Close()
				}),
				Limits: []Limit{{Limiter: limiter}}, Estimate: estimated(500),
			}
			answer := send(t, transport, "{}")
			_, err := io.ReadAll(answer.Body)
			assert.Equal(t, c.err, err)
			assert.Equal(t, c.want, limiter.charge(t))
			assert.Equal(t, io.ErrShortWrite, answer.Body.Close())
			assert.Equal(t, 1, closing.closed)
			assert.Equal(t, c.want, limiter.charge(t))
		})
	}
}

// Proxies tell both what OpenAI and what Anthropic would.
func TestCachedInputIsCountedOnce(t *testing.T) {
	const answer = `{"usage":{"prompt_tokens":1000,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":900},` +
		`"cache_read_input_tokens":900,"cache_creation_input_tokens":50}}`
	for _, c := range []struct {
		profile Profile
		want    int64
	}{{Profile{}, 1005}, {Groq, 105}} {
		limiter := &tally{}
		transport := &Transport{Base: says(200, answer), Limits: []Limit{{Limiter: limiter}}, Profile: c.profile}
		readAll(t, send(t, transport, "{}"))
		assert.Equal(t, c.want, limiter.charge(t))
	}
}
