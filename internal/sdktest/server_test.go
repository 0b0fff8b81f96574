package sdktest

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// A provider is a server that answers as OpenAI and Anthropic do, and counts tokens in a sliding window. It shares no
// code with the library: what it counts is what the library is held against.
type provider struct {
	window   time.Duration
	reserves bool // it counts what a request reserves, and not what it uses
	refuses  bool // it answers 429 when over a quota; otherwise it records alone
	silent   bool // it tells nothing of what is left

	// takes is how long an answer takes to be made, if it is not nil.
	takes func(hash uint64) time.Duration

	mu       sync.Mutex
	ledgers  [numLedgers]ledger
	faults   []fault  // what comes of the next calls, in the place of answers
	attempts []string // the paths of the calls that came
	refused  int
}

// The ledgers of an account, one a limit.
const (
	total = iota
	input
	output
	requests

	numLedgers
)

// A ledger is all that was counted for one limit.
type ledger struct {
	quota   int64 // 0: there is no limit
	entries []entry
}

type entry struct {
	at     time.Time
	tokens int64
	call   string // what the caller names it
}

func (l *ledger) sum() (tokens int64) {
	for _, e := range l.entries {
		tokens += e.tokens
	}
	return tokens
}

// used returns what counts in the window that ends now, and how long until nothing does.
func (l *ledger) used(now time.Time, window time.Duration) (tokens int64, whole time.Duration) {
	for _, e := range l.entries {
		if left := e.at.Add(window).Sub(now); left > 0 {
			tokens += e.tokens
			whole = max(whole, left)
		}
	}
	return tokens, whole
}

// peak returns the most that any interval [t, t + length) holds. It tries each that begins with an entry: every other
// holds no more than one of these.
func peak(entries []entry, length time.Duration) (most int64) {
	entries = slices.Clone(entries)
	slices.SortFunc(entries, func(a, b entry) int { return a.at.Compare(b.at) })
	sum, end := int64(0), 0
	for _, first := range entries {
		for end < len(entries) && entries[end].at.Sub(first.at) < length {
			sum += entries[end].tokens
			end++
		}
		most = max(most, sum)
		sum -= first.tokens
	}
	return most
}

// A fault is an answer that is none.
type fault struct {
	status int
	header map[string]string
	body   string
	hold   bool // instead: a stream stops after its first piece, until the client has left
	bare   bool // instead: an answer without a usage

	// Instead: a stream of so many pieces, each of which the client confirms before the next is sent.
	steps     int
	confirmed chan struct{}
}

// start serves p on loopback and returns its address.
func start(t testing.TB, p *provider) (url string) {
	server := httptest.NewServer(p)
	t.Cleanup(server.Close)
	return server.URL
}

// startPipes serves p in memory and returns a transport that reaches it at any address: in a bubble of testing/synctest
// the time stands still while anything moves, so that the server counts a call at the instant of its admission.
func startPipes(t testing.TB, p *provider) *http.Transport {
	ctx, cancel := context.WithCancel(t.Context())
	l := pipes{make(chan net.Conn), ctx}
	transport := &http.Transport{DialContext: l.dial}
	server := &http.Server{Handler: p}
	done := make(chan error)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		_ = server.Close()
		cancel()
		<-done
	})
	return transport
}

type pipes struct {
	conns chan net.Conn
	ctx   context.Context
}

func (l pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case l.conns <- server:
		return client, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

func (l pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

func (l pipes) Close() error   { return nil }
func (l pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes"} }

// next makes the next calls fail, one each.
func (p *provider) next(faults ...fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, faults...)
}

// counted returns what the server has counted for a limit.
func (p *provider) counted(ledger int) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledgers[ledger].sum()
}

// came returns how many calls came to the server.
func (p *provider) came() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.attempts)
}

// check asserts that no window was ever above a quota.
func (p *provider) check(t testing.TB) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, l := range p.ledgers {
		if l.quota > 0 {
			assert.LessOrEqual(t, peak(l.entries, p.window), l.quota, "ledger %d", i)
		}
	}
	assert.Zero(t, p.refused, "calls refused by the provider")
}

// A call is a request as the server reads it.
type call struct {
	Model               string            `json:"model"`
	Stream              bool              `json:"stream"`
	StreamOptions       map[string]bool   `json:"stream_options"`
	Tools               []json.RawMessage `json:"tools"`
	MaxTokens           int64             `json:"max_tokens"`
	MaxCompletionTokens int64             `json:"max_completion_tokens"`
	MaxOutputTokens     int64             `json:"max_output_tokens"`
	N                   int64             `json:"n"`

	api   string // the end of its path
	hash  uint64
	bytes int // of text
	files int

	in, cached, out int64 // the tokens that it uses
	reserved        [2]int64
}

// read reads a call, and decides what it uses: fewer tokens than its estimate, as English does, and a part of its
// output limit that its body determines.
func read(r *http.Request, body []byte) (*call, error) {
	c := &call{api: strings.TrimPrefix(r.URL.Path, "/v1/")}
	var all any
	if err := json.Unmarshal(body, &all); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(body, c); err != nil {
		return nil, err
	}
	hash := fnv.New64a()
	_, _ = hash.Write(body)
	c.hash = hash.Sum64()
	c.bytes = len(body)
	c.look(all)

	limit := max(c.MaxTokens, c.MaxCompletionTokens, c.MaxOutputTokens)
	c.reserved = [2]int64{
		int64(math.Ceil(float64(c.bytes)/3)) + 1600*int64(c.files),
		limit * max(c.N, 1),
	}
	c.in = int64(c.bytes/4 + 1000*c.files)
	c.cached = c.in * int64(c.hash%4) / 8
	if c.api != "embeddings" {
		c.out = 20
		if limit > 0 {
			c.out = 1 + limit*int64(60+c.hash%40)/100
		}
	}
	return c, nil
}

// look finds the files in a request: values that are data URLs, or the data of a source that is base64.
func (c *call) look(value any) {
	switch v := value.(type) {
	case []any:
		for _, element := range v {
			c.look(element)
		}
	case map[string]any:
		data, _ := v["data"].(string)
		if url, _ := v["url"].(string); strings.HasPrefix(url, "data:") {
			data = url
		}
		if url, _ := v["image_url"].(string); strings.HasPrefix(url, "data:") {
			data = url
		}
		if data != "" {
			c.files++
			c.bytes -= len(data)
		}
		for _, member := range v {
			c.look(member)
		}
	}
}

// costs returns what the call counts for, by ledger.
func (p *provider) costs(c *call) (costs [numLedgers]int64) {
	in, out := c.in, c.out
	switch {
	case p.reserves:
		in, out = c.reserved[0], c.reserved[1]
	case c.api == "messages":
		in -= c.cached
	}
	return [numLedgers]int64{total: in + out, input: in, output: out, requests: 1}
}

// charge counts a call, and reports whether the quotas had room for it.
func (p *provider) charge(name string, c *call) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, costs := time.Now(), p.costs(c)
	for i := range p.ledgers {
		l := &p.ledgers[i]
		if used, _ := l.used(now, p.window); p.refuses && l.quota > 0 && used+costs[i] > l.quota {
			p.refused++
			return false
		}
	}
	for i := range p.ledgers {
		p.ledgers[i].entries = append(p.ledgers[i].entries, entry{now, costs[i], name})
	}
	return true
}

// tell sets the headers that tell what is left: those of OpenAI, or those of Anthropic, which rounds tokens to the
// nearest thousand.
func (p *provider) tell(h http.Header, anthropic bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent {
		return
	}
	now := time.Now()
	names := [numLedgers]string{"tokens", "input-tokens", "output-tokens", "requests"}
	for i, l := range p.ledgers {
		if l.quota == 0 {
			continue
		}
		used, whole := l.used(now, p.window)
		left := max(l.quota-used, 0)
		set := func(form, what, value string) { h.Set(fmt.Sprintf(form, what), value) }
		switch {
		case anthropic:
			form := "anthropic-ratelimit-" + names[i] + "-%s"
			if i != requests {
				left = (left + 500) / 1000 * 1000
			}
			set(form, "limit", strconv.FormatInt(l.quota, 10))
			set(form, "remaining", strconv.FormatInt(left, 10))
			set(form, "reset", now.Add(whole).UTC().Truncate(time.Second).Format(time.RFC3339))
		case i == total || i == requests:
			form := "x-ratelimit-%s-" + names[i]
			set(form, "limit", strconv.FormatInt(l.quota, 10))
			set(form, "remaining", strconv.FormatInt(left, 10))
			set(form, "reset", whole.Truncate(time.Millisecond).String())
		}
	}
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	f := fault{}
	p.mu.Lock()
	p.attempts = append(p.attempts, r.URL.Path)
	if len(p.faults) > 0 {
		f, p.faults = p.faults[0], p.faults[1:]
	}
	p.mu.Unlock()

	anthropic := r.Header.Get("Anthropic-Version") != ""
	switch {
	case r.Method == http.MethodGet && r.URL.Path == "/v1/models":
		model := m{"id": "model", "object": "model", "type": "model"}
		reply(w, m{"object": "list", "has_more": false, "data": []m{model}})
		return
	case r.URL.Path == "/v1/messages/count_tokens":
		reply(w, m{"input_tokens": len(body) / 4})
		return
	}
	c, err := read(r, body)
	if err != nil {
		fail(w, anthropic, 400, "invalid_request_error", "", "We could not parse the JSON body of your request.")
		return
	}
	if f.status != 0 {
		if p.reserves { // unsuccessful requests count too
			p.charge(r.Header.Get("X-Call"), c)
		}
		p.tell(w.Header(), anthropic)
		for name, value := range f.header {
			w.Header().Set(name, value)
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(f.status)
		_, _ = io.WriteString(w, f.body)
		return
	}
	admitted := p.charge(r.Header.Get("X-Call"), c)
	p.tell(w.Header(), anthropic)
	if !admitted {
		w.Header().Set("Retry-After", "1")
		message := "This request would exceed the rate limit of your organization."
		if anthropic {
			fail(w, true, 429, "rate_limit_error", "", message)
		} else {
			fail(w, false, 429, "tokens", "rate_limit_exceeded", message)
		}
		return
	}
	if p.takes != nil {
		time.Sleep(p.takes(c.hash)) // virtual
	}
	a := &answer{w, r, c, f}
	switch c.api {
	case "chat/completions":
		a.chat()
	case "responses":
		a.responses()
	case "embeddings":
		a.embeddings()
	case "messages":
		a.messages()
	default:
		http.NotFound(w, r)
	}
}

// m is a JSON object.
type m map[string]any

func reply(w http.ResponseWriter, value m) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(value) // who has left reads nothing
}

// fail answers with an error in the form of OpenAI or of Anthropic.
func fail(w http.ResponseWriter, anthropic bool, status int, kind, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, errorBody(anthropic, kind, code, message))
}

func errorBody(anthropic bool, kind, code, message string) string {
	detail := m{"type": kind, "message": message}
	whole := m{"error": detail}
	switch {
	case !anthropic:
		detail["param"], detail["code"] = nil, code
		if code == "" {
			detail["code"] = nil
		}
	default:
		whole["type"], whole["request_id"] = "error", "req_1"
		if code != "" {
			detail["details"] = m{"error_code": code}
		}
	}
	text, _ := json.Marshal(whole)
	return string(text)
}

// An answer is one to a call that was counted.
type answer struct {
	w http.ResponseWriter
	r *http.Request
	c *call
	f fault
}

// words are the pieces of the answer. There are fewer than tokens, so that a test takes no time.
func (a *answer) words() []string {
	if a.f.steps > 0 {
		return slices.Repeat([]string{"well "}, a.f.steps)
	}
	return slices.Repeat([]string{"well "}, int(min(a.c.out, 20)))
}

func (a *answer) text() string { return strings.Join(a.words(), "") }

// event sends one event of a stream. Without a name it has data alone, as in Chat Completions.
func (a *answer) event(name string, data any) {
	a.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	text, _ := json.Marshal(data)
	if name != "" {
		fmt.Fprintf(a.w, "event: %s\n", name)
	}
	fmt.Fprintf(a.w, "data: %s\n\n", text)
	_ = http.NewResponseController(a.w).Flush()
}

// pieces sends each piece of an answer, and reports whether the client has stayed.
func (a *answer) pieces(send func(word string)) (stayed bool) {
	for _, word := range a.words() {
		send(word)
		if a.f.hold {
			<-a.r.Context().Done()
			return false
		}
		if a.f.steps > 0 {
			select {
			case <-a.f.confirmed:
			case <-a.r.Context().Done():
				return false
			}
		}
	}
	return true
}

const toolArguments = `{"place":"Graz"}`

func (a *answer) chat() {
	c := a.c
	usage := m{
		"prompt_tokens": c.in, "completion_tokens": c.out, "total_tokens": c.in + c.out,
		"prompt_tokens_details":     m{"cached_tokens": c.cached, "audio_tokens": 0},
		"completion_tokens_details": m{"reasoning_tokens": c.out / 2},
	}
	head := m{"id": "chatcmpl-1", "created": 1, "model": c.Model, "system_fingerprint": "fp_1"}
	with := func(members m) m {
		for name, value := range head {
			members[name] = value
		}
		return members
	}
	message := m{"role": "assistant", "content": a.text(), "refusal": nil}
	reason := "stop"
	if len(c.Tools) > 0 {
		message["content"], reason = nil, "tool_calls"
		message["tool_calls"] = []m{{
			"index": 0, "id": "call_1", "type": "function",
			"function": m{"name": "weather", "arguments": toolArguments},
		}}
	}
	if !c.Stream {
		whole := with(m{"object": "chat.completion", "usage": usage, "choices": []m{
			{"index": 0, "message": message, "logprobs": nil, "finish_reason": reason},
		}})
		if a.f.bare {
			delete(whole, "usage")
		}
		reply(a.w, whole)
		return
	}
	chunk := func(delta m, reason any) {
		piece := with(m{"object": "chat.completion.chunk", "choices": []m{
			{"index": 0, "delta": delta, "finish_reason": reason},
		}})
		if c.StreamOptions["include_usage"] {
			piece["usage"] = nil
		}
		a.event("", piece)
	}
	if len(c.Tools) > 0 {
		chunk(message, nil)
	} else if !a.pieces(func(word string) { chunk(m{"content": word}, nil) }) {
		return
	}
	chunk(m{}, reason)
	if c.StreamOptions["include_usage"] {
		a.event("", with(m{"object": "chat.completion.chunk", "choices": []m{}, "usage": usage}))
	}
	_, _ = io.WriteString(a.w, "data: [DONE]\n\n")
}

func (a *answer) responses() {
	c := a.c
	item := m{"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": []m{
		{"type": "output_text", "text": a.text(), "annotations": []m{}},
	}}
	if len(c.Tools) > 0 {
		item = m{
			"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": toolArguments,
			"status": "completed",
		}
	}
	whole := func(status string, usage any) m {
		return m{
			"id": "resp_1", "object": "response", "created_at": 1, "model": c.Model, "status": status, "error": nil,
			"output": []m{item}, "usage": usage, "metadata": m{},
		}
	}
	usage := m{
		"input_tokens": c.in, "input_tokens_details": m{"cached_tokens": c.cached},
		"output_tokens": c.out, "output_tokens_details": m{"reasoning_tokens": c.out / 2}, "total_tokens": c.in + c.out,
	}
	if !c.Stream {
		reply(a.w, whole("completed", usage))
		return
	}
	a.event("response.created", m{"type": "response.created", "response": whole("in_progress", nil)})
	stayed := a.pieces(func(word string) {
		const delta = "response.output_text.delta"
		a.event(delta, m{"type": delta, "item_id": "msg_1", "delta": word})
	})
	if stayed {
		a.event("response.completed", m{"type": "response.completed", "response": whole("completed", usage)})
	}
}

func (a *answer) embeddings() {
	reply(a.w, m{
		"object": "list", "model": a.c.Model,
		"data":  []m{{"object": "embedding", "index": 0, "embedding": []float64{0.5}}},
		"usage": m{"prompt_tokens": a.c.in, "total_tokens": a.c.in},
	})
}

func (a *answer) messages() {
	c := a.c
	created := (c.in - c.cached) / 4
	usage := m{
		"input_tokens": c.in - c.cached - created, "cache_creation_input_tokens": created,
		"cache_read_input_tokens": c.cached, "output_tokens": c.out, "service_tier": "standard",
		"cache_creation": m{"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0},
	}
	a.w.Header().Set("Request-Id", "req_1")
	block, reason := m{"type": "text", "text": a.text()}, "end_turn"
	if len(c.Tools) > 0 {
		block = m{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": json.RawMessage(toolArguments)}
		reason = "tool_use"
	}
	message := m{
		"id": "msg_1", "type": "message", "role": "assistant", "model": c.Model, "content": []m{block},
		"stop_reason": reason, "stop_sequence": nil, "usage": usage,
	}
	if !c.Stream {
		reply(a.w, message)
		return
	}
	begun := m{}
	for name, value := range usage {
		begun[name] = value
	}
	begun["output_tokens"] = 1
	message["content"], message["stop_reason"], message["usage"] = []m{}, nil, begun
	a.event("message_start", m{"type": "message_start", "message": message})
	delta := func(delta m) {
		a.event("content_block_delta", m{"type": "content_block_delta", "index": 0, "delta": delta})
	}
	if len(c.Tools) > 0 {
		block["input"] = m{}
		a.event("content_block_start", m{"type": "content_block_start", "index": 0, "content_block": block})
		delta(m{"type": "input_json_delta", "partial_json": toolArguments})
	} else {
		block["text"] = ""
		a.event("content_block_start", m{"type": "content_block_start", "index": 0, "content_block": block})
		a.event("ping", m{"type": "ping"})
		if !a.pieces(func(word string) { delta(m{"type": "text_delta", "text": word}) }) {
			return
		}
	}
	a.event("content_block_stop", m{"type": "content_block_stop", "index": 0})
	if c.hash%2 == 0 { // older models tell the output alone
		usage = m{"output_tokens": c.out}
	}
	a.event("message_delta", m{
		"type": "message_delta", "delta": m{"stop_reason": reason, "stop_sequence": nil}, "usage": usage,
	})
	a.event("message_stop", m{"type": "message_stop"})
}
