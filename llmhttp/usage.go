package llmhttp

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
)

// A usage is what an answer tells of the tokens that its call used.
type usage struct {
	input  int64 // but for what was read from the cache
	cached int64
	output int64

	hasInput bool
	whole    bool // it is of the whole answer, and not of its beginning
}

// tokens returns what the usage counts for.
func (p *Profile) tokens(u usage) Tokens {
	t := Tokens{u.input, p.output(float64(u.output))}
	if !p.CachedInputFree {
		t.Input += u.cached
	}
	return t
}

// A finder reads an answer as it comes, in pieces of any size, and finds its usage: in a JSON object, or in a stream of
// server-sent events whose data are such. Of the answer it keeps the usage alone.
//
// The usage is the member "usage" of the object, or of its member "message" (at the beginning of a stream of
// Anthropic's, where it tells the input only), "response" (at the end of one of OpenAI's Responses) or "x_groq".
type finder struct {
	found  usage
	events bool // server-sent events, and not an object
	ended  bool // the event that is the last of a stream has come
	line   line
	object object
}

// A line is how far a line of server-sent events was read.
type line struct {
	text   [32]byte // its beginning
	length int
	after  byte // the byte that ended the line before: CR and LF together end one line
}

const dataField = "data:"

// lastLines are lines that a stream ends with: of OpenAI's Chat Completions, its Responses, and Anthropic's Messages.
// After one of them callers leave the stream, whether or not there is more. Without one the usage may be an interim
// one.
var lastLines = []string{
	"data: [DONE]", "data:[DONE]",
	"event: response.completed", "event: response.incomplete", "event: response.failed",
	"event: message_stop",
}

// usage returns the usage of the answer, of which all was read or not. It is not whole if more of it may come.
func (f *finder) usage(all bool) usage {
	u := f.found
	u.whole = u.whole && (all || f.ended || !f.events)
	return u
}

// Write reads on. It takes all of p, and its error is always nil.
func (f *finder) Write(p []byte) (n int, err error) {
	n = len(p)
	if !f.events {
		f.object.write(p, &f.found)
		return n, nil
	}
	for len(p) > 0 {
		if p[0] == '\n' && f.line.after == '\r' {
			f.line.after, p = 0, p[1:]
			continue
		}
		f.line.after = 0
		end := bytes.IndexAny(p, "\r\n")
		if end < 0 {
			f.field(p)
			break
		}
		f.field(p[:end])
		switch text := string(f.line.text[:min(f.line.length, len(f.line.text))]); {
		case text == "": // an empty line ends an event
			f.object = object{}
		case slices.Contains(lastLines, text):
			f.ended = true
		}
		f.line = line{after: p[end]}
		p = p[end+1:]
	}
	return n, nil
}

// field reads on in a line of events.
func (f *finder) field(p []byte) {
	l := &f.line
	read := l.length
	if read < len(l.text) {
		copy(l.text[read:], p)
	}
	l.length += len(p)
	if string(l.text[:len(dataField)]) == dataField {
		f.object.write(p[min(max(len(dataField)-read, 0), len(p)):], &f.found)
	}
}

// An object is how far a JSON object was read.
type object struct {
	depth   int
	quoted  bool // inside a string
	escaped bool // after a backslash
	text    [16]byte
	length  int    // of the last string; text is its beginning
	key     member // whose value comes
	parent  member // whose value depth 2 is inside of

	usage  []byte // that is being read; nil: none
	inside int    // the depth that it is at
}

// A member is a key that matters.
type member uint8

const (
	other member = iota
	usageMember
	messageMember
	responseMember // or "x_groq"
)

const (
	mostUsage = 1 << 14 // bytes that a usage may take; none takes a tenth of it
	mostTold  = 1 << 53 // tokens that a number of it may tell, so that they add up
)

func (o *object) write(p []byte, found *usage) {
	for _, b := range p {
		if o.usage != nil && len(o.usage) < mostUsage {
			o.usage = append(o.usage, b)
		}
		switch {
		case o.escaped:
			o.escaped = false
		case o.quoted && b == '\\':
			o.escaped = true
			o.length = len(o.text) + 1 // no key that matters has one
		case o.quoted && b == '"':
			o.quoted = false
		case o.quoted:
			if o.length < len(o.text) {
				o.text[o.length] = b
			}
			o.length++
		case b == '"':
			o.quoted, o.length = true, 0
		case b == ':':
			o.key = o.member()
		case b == '{' || b == '[':
			if b == '{' && o.key == usageMember && o.usage == nil && (o.depth == 1 || o.depth == 2 && o.parent != other) {
				o.usage, o.inside = []byte{b}, o.depth
			}
			if o.depth == 1 {
				o.parent = o.key
			}
			o.depth++
			o.key = other
		case b == '}' || b == ']':
			o.depth--
			if o.usage != nil && o.depth == o.inside {
				found.add(o.usage, o.inside == 1 || o.parent == responseMember)
				o.usage = nil
			}
		}
	}
}

// member returns the key that was the last string.
func (o *object) member() member {
	switch string(o.text[:min(o.length, len(o.text))]) {
	case "usage":
		return usageMember
	case "message":
		return messageMember
	case "response", "x_groq":
		return responseMember
	}
	return other
}

// add takes a usage in any of the forms that there are. Numbers that are missing, or none, are not told. Where more
// than one is told, at once or one after the other, the largest counts: use only grows.
func (u *usage) add(text []byte, whole bool) {
	told := members(text)
	input, hasInput := largest(told, mostTold, "prompt_tokens", "input_tokens", "inputTokens")
	output, hasOutput := largest(told, mostTold, "completion_tokens", "output_tokens", "outputTokens")
	total, hasTotal := largest(told, mostTold, "total_tokens", "totalTokens")
	if !hasInput && !hasOutput && !hasTotal {
		return
	}
	// Anthropic and Bedrock tell of the cache beside the input; OpenAI's cached tokens are a part of it, as its
	// reasoning tokens are a part of the completion's.
	read, hasRead := largest(told, mostTold, "cache_read_input_tokens", "cacheReadInputTokens")
	write, hasWrite := largest(told, mostTold, "cache_creation_input_tokens", "cacheWriteInputTokens")
	_, inside := told["prompt_tokens"]
	switch {
	case (hasRead || hasWrite) && !inside:
		input += write
	case hasInput:
		read = 0
		for _, details := range [...]string{"prompt_tokens_details", "input_tokens_details"} {
			cached, _ := largest(members(told[details]), mostTold, "cached_tokens")
			read = max(read, cached)
		}
		read = min(read, input)
		input -= read
	case hasTotal:
		input = max(total-output, 0)
	}
	if hasTotal && !hasOutput {
		output = max(total-input-read, 0)
	}
	u.input, u.cached, u.output = max(u.input, input), max(u.cached, read), max(u.output, output)
	u.hasInput = u.hasInput || hasInput || hasTotal
	u.whole = u.whole || whole && u.hasInput
}

// members returns the members of a JSON object, nil if it is none.
func members(text []byte) (m map[string]json.RawMessage) {
	if json.Unmarshal(text, &m) != nil {
		return nil
	}
	return m
}

// largest returns the largest of the numbers of tokens that some members are, and false if none of them is one, from 0
// to most.
func largest(m map[string]json.RawMessage, most float64, names ...string) (tokens int64, told bool) {
	for _, name := range names {
		if n, err := strconv.ParseFloat(string(m[name]), 64); err == nil && n >= 0 && n <= most {
			tokens, told = max(tokens, whole(n)), true
		}
	}
	return tokens, told
}
