package llmhttp

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/http/httptrace"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quotashare/quotashare"
)

// A Unit is what a limit counts.
type Unit uint8

const (
	TotalTokens  Unit = iota // input and output together
	InputTokens              // of the prompt
	OutputTokens             // of the answer, times the profile's OutputFactor
	Requests                 // one each

	numUnits = iota
)

// A Limit is one limit of an account: a Limiter, such as a *quotashare.Window, and what it counts.
type Limit struct {
	Limiter quotashare.Limiter
	Unit    Unit
}

// A Transport is an http.RoundTripper that acquires what a request may use before it is sent, and settles it with what
// it did use. It belongs below the SDK and its retries: each attempt is acquired for itself. It must not be copied, and
// is safe for concurrent use; its fields must not be changed once it is used.
//
// The class is that of the request's context (quotashare.ClassFrom), which is what Enter stamped; nothing in the
// request has a say. A request without a stamp is Batch, and counted: see Unstamped.
//
// The body of an answer reaches the caller byte for byte, as it comes. The grant is closed once, when the body was
// read to its end or closed, or when there is none: with the usage that the answer told, if Profile's provider counts
// what was used. Without a usage, and for a stream that was left before its end, the estimate stands. It is taken back
// if the request was never sent, and settled with no tokens if it was turned away (3xx, 4xx, 503, 529) by a provider
// that does not count such.
//
// A request's body that can be read only once, for GetBody is nil, is read before anything is sent, and kept until
// then.
//
// A timeout of the http.Client or of the SDK includes the wait: Batch wants a long one, or none.
type Transport struct {
	// Base sends the requests; nil is http.DefaultTransport.
	Base http.RoundTripper

	// Limits are all limits that a request must stay within, such as tokens and requests a minute of the account. It
	// is admitted by all of them or by none, and while it waits for one it holds nothing of the others; it waits as
	// its class does for each of them in turn. If there are several, each must be a Limiter of its own that decides at
	// once too: by TryAcquire(Class, int64) (Grant, Decision), as *quotashare.Window has it, or by
	// TryAcquire(context.Context, Class, int64) (Grant, Decision, error). A call that one of them refuses and then
	// makes wait counts twice in its Stats, and a refusal tells when that one has room.
	Limits []Limit

	// LimitsFor chooses the limits of a request in the place of Limits, where models or accounts have limits of their
	// own. Model is what the body names, "" if it names none. Returning none lets the request pass. What is returned
	// must not be changed afterwards.
	LimitsFor func(r *http.Request, model string) []Limit

	// Profile is how the provider counts.
	Profile Profile

	// Estimate returns what a request may use at most, in the place of the estimate by Profile: of input that the body
	// does not hold, say, but names (a file, a previous response). It must not keep or change the body.
	Estimate func(r *http.Request, body []byte) Tokens

	// Meters reports whether a request uses tokens; others pass untouched. Nil: a POST to a path that ends in one of
	// /chat/completions, /completions, /responses, /responses/compact, /embeddings, /messages (OpenAI, Azure, Groq,
	// Anthropic), /invoke, /invoke-with-response-stream, /converse, and /converse-stream (Bedrock), but for those of
	// threads.
	Meters func(r *http.Request) bool

	// DeniedAsError makes RoundTrip return the *quotashare.DeniedError of a refusal. Without it a refusal is an answer
	// of status 429 with Retry-After, Retry-After-Ms, and X-Should-Retry: false, or 413 if no wait can help, whose
	// body the SDKs read as a rate limit error of their own. SDKs try again after an error of the transport: tell them
	// not to.
	DeniedAsError bool

	unstamped atomic.Uint64
}

// Unstamped returns how many requests that use tokens came without a stamp, and so were Batch, each attempt counted:
// entry points that nobody has classified.
func (t *Transport) Unstamped() uint64 { return t.unstamped.Load() }

// RoundTrip sends a request when it may be sent. The error is that of Base, that of reading the request's body, that
// of a Limiter that could not decide, or, where the request's context ended the wait, a *quotashare.DeniedError with
// errors.Is(err, ctx.Err()); see also DeniedAsError.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	meters := t.Meters
	if meters == nil {
		meters = inference
	}
	if !meters(r) {
		return t.base().RoundTrip(r)
	}
	body, sent, err := peek(r)
	if err != nil {
		return nil, err
	}
	x, err := t.begin(r, body)
	if err != nil {
		closeBody(sent)
		return t.denied(r, err)
	}
	answer, err := x.roundTrip(t.base(), sent)
	if answer != nil {
		answer.Request = r
	}
	return answer, err
}

// CloseIdleConnections closes those of Base, if it has any to close.
func (t *Transport) CloseIdleConnections() {
	if base, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

var inferencePaths = []string{
	"/chat/completions", "/completions", "/responses", "/responses/compact", "/embeddings", "/messages",
	"/invoke", "/invoke-with-response-stream", "/converse", "/converse-stream",
}

func inference(r *http.Request) bool {
	// The messages of a thread of OpenAI's Assistants are only stored.
	if r.Method != http.MethodPost || strings.Contains(r.URL.Path, "/threads/") {
		return false
	}
	for _, path := range inferencePaths {
		if strings.HasSuffix(r.URL.Path, path) {
			return true
		}
	}
	return false
}

// peek returns the body of a request, and the request to send: r itself, or one like it if r's body could be read only
// once. If there is an error the body is closed.
func peek(r *http.Request) (body []byte, sent *http.Request, err error) {
	if r.Body == nil || r.Body == http.NoBody {
		return nil, r, nil
	}
	if r.GetBody != nil {
		again, err := r.GetBody()
		if err != nil {
			closeBody(r)
			return nil, nil, err
		}
		body, err = readAll(again, r.ContentLength)
		if err = errors.Join(err, again.Close()); err != nil {
			closeBody(r)
		}
		return body, r, err
	}
	// A reader may hang. It is closed when the request is cancelled, which frees those that closing frees.
	closeOnce := sync.OnceValue(r.Body.Close)
	stop := context.AfterFunc(r.Context(), func() { _ = closeOnce() })
	body, err = readAll(r.Body, r.ContentLength)
	stop()
	if err = errors.Join(err, closeOnce()); err != nil {
		return nil, nil, errors.Join(r.Context().Err(), err)
	}
	sent = new(http.Request)
	*sent = *r
	sent.Body = io.NopCloser(bytes.NewReader(body))
	sent.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	return body, sent, nil
}

// readAll reads a body, of so many bytes as far as is known.
func readAll(r io.Reader, length int64) ([]byte, error) {
	var b bytes.Buffer
	if length > 0 && length <= 1<<20 {
		b.Grow(int(length) + bytes.MinRead) // so that the end is found without growing
	}
	_, err := b.ReadFrom(r)
	return b.Bytes(), err
}

func closeBody(r *http.Request) {
	if r.Body != nil {
		_ = r.Body.Close() // nothing was sent of it
	}
}

// begin admits a request.
func (t *Transport) begin(r *http.Request, body []byte) (*exchange, error) {
	ctx := r.Context()
	if _, stamped := quotashare.SourceFrom(ctx); !stamped {
		t.unstamped.Add(1)
	}
	var request map[string]json.RawMessage
	if t.Estimate == nil || t.LimitsFor != nil {
		request = members(body)
	}
	x := &exchange{profile: &t.Profile, limits: t.Limits}
	if t.LimitsFor != nil {
		model := ""
		_ = json.Unmarshal(request["model"], &model) // a name that is none is none
		x.limits = t.LimitsFor(r, model)
	}
	var tokens Tokens
	if t.Estimate != nil {
		tokens = t.Estimate(r, body)
	} else {
		tokens = t.Profile.estimate(body, request)
	}
	if tokens.Input < 0 || tokens.Output < 0 {
		return nil, fmt.Errorf("llmhttp: the estimate is %d tokens of input and %d of output: want 0 or more", tokens.Input, tokens.Output)
	}
	return x, x.acquire(ctx, quotashare.ClassFrom(ctx), tokens)
}

// denied is what comes of a request that was not admitted.
func (t *Transport) denied(r *http.Request, err error) (*http.Response, error) {
	var denied *quotashare.DeniedError
	if t.DeniedAsError || !errors.As(err, &denied) || r.Context().Err() != nil && errors.Is(err, r.Context().Err()) {
		return nil, err
	}
	header := http.Header{}
	status := setDenied(header, denied)
	header.Set("X-Should-Retry", "false")
	body := deniedBody(denied, denied.Error())
	return &http.Response{
		Status:        fmt.Sprintf("%d %s", status, http.StatusText(status)),
		StatusCode:    status,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        header,
		Body:          io.NopCloser(bytes.NewReader(body)),
		ContentLength: int64(len(body)),
		Request:       r,
	}, nil
}

// An exchange is a request that was admitted, and its answer.
type exchange struct {
	profile *Profile
	limits  []Limit
	grants  []quotashare.Grant // of limits
	closed  atomic.Bool
}

// A trier is a Limiter that decides at once: *quotashare.Window.
type trier interface {
	TryAcquire(class quotashare.Class, estTokens int64) (quotashare.Grant, quotashare.Decision)
}

// A remoteTrier is one that has to ask somebody else.
type remoteTrier interface {
	TryAcquire(ctx context.Context, class quotashare.Class, estTokens int64) (quotashare.Grant, quotashare.Decision, error)
}

// acquire acquires what is needed of all limits. It waits for one of them at a time, and holds nothing of the others
// while it does: what it then cannot have at once of another it waits for next, and begins anew.
func (x *exchange) acquire(ctx context.Context, class quotashare.Class, tokens Tokens) error {
	if err := x.validate(); err != nil {
		return err
	}
	if x.profile.CountsReserved { // what is not reserved is not counted in the end
		x.limits = slices.DeleteFunc(slices.Clone(x.limits), func(l Limit) bool { return tokens.in(l.Unit) == 0 })
	}
	if len(x.limits) == 0 {
		return nil
	}
	for wait := x.hopeless(class, tokens); ; {
		x.grants = make([]quotashare.Grant, len(x.limits))
		var err error
		if x.grants[wait], err = x.limits[wait].Limiter.Acquire(ctx, class, x.limits[wait].of(tokens)); err != nil {
			return err
		}
		full := -1
		for i := range x.limits {
			if i == wait {
				continue
			}
			ok, err := x.try(ctx, i, class, x.limits[i].of(tokens))
			if err != nil {
				x.cancel()
				return err
			}
			if !ok {
				full = i
				break
			}
		}
		if full < 0 {
			return nil
		}
		x.cancel()
		wait = full
	}
}

// hopeless returns a limit that a request will never fit, as it is refused by that at once, and otherwise the first.
func (x *exchange) hopeless(class quotashare.Class, tokens Tokens) int {
	return max(0, slices.IndexFunc(x.limits, func(l Limit) bool {
		w, ok := l.Limiter.(interface{ Quota() quotashare.Quota })
		return ok && len(x.limits) > 1 && l.of(tokens) > w.Quota().Limits(class).Largest
	}))
}

// of returns what is needed of the limit for so many tokens. It is 1 at least, so that there is a grant, which is
// settled with what was used.
func (l Limit) of(tokens Tokens) int64 { return max(tokens.in(l.Unit), 1) }

func (x *exchange) validate() error {
	for i, l := range x.limits {
		if l.Limiter == nil || l.Unit >= numUnits {
			return fmt.Errorf("llmhttp: limits[%d]: want a Limiter, and a Unit of the constants", i)
		}
		for j, other := range x.limits[:i] {
			// What one of them takes the other would wait for, for ever.
			if reflect.ValueOf(l.Limiter).Comparable() && l.Limiter == other.Limiter {
				return fmt.Errorf("llmhttp: limits[%d]: it is the Limiter of limits[%d] too: want one for each (TotalTokens counts both)", i, j)
			}
		}
	}
	return nil
}

// try acquires what is needed of a limit if that is possible at once.
func (x *exchange) try(ctx context.Context, i int, class quotashare.Class, tokens int64) (ok bool, err error) {
	var d quotashare.Decision
	switch l := x.limits[i].Limiter.(type) {
	case trier:
		x.grants[i], d = l.TryAcquire(class, tokens)
	case remoteTrier:
		x.grants[i], d, err = l.TryAcquire(ctx, class, tokens)
	default:
		err = fmt.Errorf("llmhttp: limits[%d]: %T has no TryAcquire: want one where there are several limits", i, l)
	}
	return d.Admitted, err
}

// cancel takes everything back: nothing was sent.
func (x *exchange) cancel() {
	for i := range x.grants {
		x.grants[i].Cancel()
	}
}

// end closes the grants, once: with what the answer used, or with their estimates.
func (x *exchange) end(u usage) {
	if !u.whole || x.profile.CountsReserved {
		x.settle(func(Unit) int64 { return -1 }) // it is not known, and the estimate stands
		return
	}
	tokens := x.profile.tokens(u)
	x.settle(tokens.in)
}

func (x *exchange) settle(used func(Unit) int64) {
	if x.closed.Swap(true) {
		return
	}
	for i := range x.grants {
		x.grants[i].Settle(used(x.limits[i].Unit))
	}
}

// failed closes the grants of a request that was turned away: with so much, if the provider does not count such.
func (x *exchange) failed(used func(Unit) int64) {
	if x.profile.CountsFailed {
		x.end(usage{})
	} else {
		x.settle(used)
	}
}

// nothing is what a request used of which the provider counted not even that it was one.
func nothing(Unit) int64 { return 0 }

// statusOverloaded is Anthropic's status for what 503 is elsewhere: the request was turned away.
const statusOverloaded = 529

// roundTrip sends the request, and sees to it that the grants are closed.
func (x *exchange) roundTrip(base http.RoundTripper, r *http.Request) (*http.Response, error) {
	// Whether a request that failed was sent cannot be told from the error. It was not if no connection was had for it.
	var asked, connected atomic.Bool
	ctx := httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		GetConn: func(string) { asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { connected.Store(true) },
	})
	start := time.Now()
	answer, err := base.RoundTrip(r.WithContext(ctx))
	if err != nil {
		// Of a Base that tells nothing by the trace, only a failure to dial is sure.
		var failed *net.OpError
		_, tells := base.(*http.Transport)
		if !connected.Load() && (tells || asked.Load() || errors.As(err, &failed) && failed.Op == "dial") {
			x.cancel()
		}
		x.end(usage{})
		return answer, err
	}
	if answer.StatusCode != http.StatusTooManyRequests { // which says it by itself
		x.observe(answer.Header, time.Since(start))
	}
	switch status := answer.StatusCode; {
	case status == http.StatusTooManyRequests:
		x.throttled(answer)
	case status >= 300 && status < 500, status == http.StatusServiceUnavailable, status == statusOverloaded:
		x.failed(Tokens{}.in) // no tokens, but it was a request
	case status >= 500 || status == http.StatusSwitchingProtocols || answer.Body == nil:
		x.end(usage{})
	default:
		x.read(answer)
	}
	return answer, nil
}

// read makes the answer end the exchange when it was read.
func (x *exchange) read(answer *http.Response) {
	kind, _, _ := mime.ParseMediaType(answer.Header.Get("Content-Type")) // without one it is JSON, or nothing
	if kind == "application/vnd.amazon.eventstream" {
		x.end(usage{}) // its events are binary, and tell no usage that could be found
		return
	}
	b := &answerBody{ReadCloser: answer.Body, exchange: x, finder: finder{events: kind == "text/event-stream"}}
	if isGzip(answer.Header) {
		b.packed = &bytes.Buffer{}
	}
	answer.Body = b
}

// An observer is a Limiter that takes what the provider says: *quotashare.Window.
type observer interface {
	Observe(remaining int64, sent time.Duration)
	Throttled(retryAfter time.Duration)
}

// observe tells the limits what the provider says is left of them, if it was the provider and not a cache.
func (x *exchange) observe(h http.Header, sent time.Duration) {
	if age := first(h, "Age"); age != "" && age != "0" {
		return
	}
	for _, l := range x.limits {
		if o, ok := l.Limiter.(observer); ok {
			if left, told := remaining(h, l.Unit); told {
				o.Observe(left, sent)
			}
		}
	}
}

// throttled takes an answer of 429. One that no wait can cure stops nobody else, and was not counted. Only its body
// tells, so it is waited for, whatever the headers say.
func (x *exchange) throttled(answer *http.Response) {
	var read bytes.Buffer
	if answer.Body != nil {
		_, _ = read.ReadFrom(io.LimitReader(answer.Body, mostError)) // the caller meets the error again, after what was read
		answer.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(read.Bytes()), answer.Body), answer.Body}
	}
	if spent(answer.Header, read.Bytes()) {
		x.settle(nothing)
		return
	}
	wait := retryAfter(answer.Header, time.Now())
	for _, l := range x.limits {
		if o, ok := l.Limiter.(observer); ok {
			o.Throttled(wait)
		}
	}
	x.failed(nothing)
}

// spentCodes are the types and codes of errors with status 429 that no wait cures: those of OpenAI, and those of
// Anthropic's spend limits.
var spentCodes = []string{
	"insufficient_quota", "billing_hard_limit_reached", "billing_not_active",
	"enforced_spend_limit_reached", "contract_spend_limit_reached",
}

func spent(h http.Header, body []byte) bool {
	if isGzip(h) {
		var unpacked bytes.Buffer
		unpack(&unpacked, body, mostError)
		body = unpacked.Bytes()
	}
	e := members(members(body)["error"])
	for _, code := range []json.RawMessage{e["type"], e["code"], members(e["details"])["error_code"]} {
		name := ""
		if json.Unmarshal(code, &name) == nil && slices.Contains(spentCodes, name) {
			return true
		}
	}
	return false
}

func isGzip(h http.Header) bool { return strings.EqualFold(h.Get("Content-Encoding"), "gzip") }

// unpack writes what was packed to w, as far as it goes and up to so many bytes.
func unpack(w io.Writer, packed []byte, most int64) {
	if r, err := gzip.NewReader(bytes.NewReader(packed)); err == nil {
		_, _ = io.Copy(w, io.LimitReader(r, most))
	}
}

// The bounds of what is read of an answer besides what the caller reads. None has a tenth of it.
const (
	mostError    = 1 << 16 // bytes of an answer of 429
	mostPacked   = 4 << 20 // bytes of a packed answer that are kept to find its usage in the end
	mostUnpacked = 1 << 26 // and what they may unpack to
)

// An answerBody is the body of an answer. It finds the usage in what is read, and ends the exchange.
type answerBody struct {
	io.ReadCloser
	exchange *exchange

	mu     sync.Mutex // a body may be closed while it is read
	finder finder
	packed *bytes.Buffer // what was read, if the caller asked for gzip; nil otherwise
	missed bool          // it was too much to keep
}

func (b *answerBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.packed == nil:
		_, _ = b.finder.Write(p[:n])
	case !b.missed && b.packed.Len()+n <= mostPacked:
		b.packed.Write(p[:n])
	default:
		b.missed = true
		b.packed = &bytes.Buffer{}
	}
	if err != nil {
		b.end(err == io.EOF)
	}
	return n, err
}

func (b *answerBody) Close() error {
	err := b.ReadCloser.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.end(false)
	return err
}

// end ends the exchange with what was read, which is all of the answer or not.
func (b *answerBody) end(all bool) {
	if b.packed != nil {
		unpack(&b.finder, b.packed.Bytes(), mostUnpacked)
		b.packed = &bytes.Buffer{}
	}
	b.exchange.end(b.finder.usage(all))
}
