package llmhttp

import (
	"bytes"
	"encoding/json"
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
	line   line
	object object
}

// A line is how far a line of server-sent events was read.
type line struct {
	data  int  // so many bytes were seen, all of them of dataField; -1: it is another line
	after byte // the byte that ended the line before: CR and LF together end one line
}

const dataField = "data:"

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
		if f.line.data == 0 { // an empty line ends an event
			f.object = object{}
		}
		f.line = line{after: p[end]}
		p = p[end+1:]
	}
	return n, nil
}

// field reads on in a line of events.
func (f *finder) field(p []byte) {
	for ; len(p) > 0 && f.line.data < len(dataField); p = p[1:] {
		if f.line.data < 0 || p[0] != dataField[f.line.data] {
			f.line.data = -1
			return
		}
		f.line.data++
	}
	f.object.write(p, &f.found)
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

// mostUsage is how many bytes a usage may take. None takes a tenth of it.
const mostUsage = 1 << 14

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
		case b == ',':
			o.key = other
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

// add takes a usage in any of the forms that there are. A number that is missing, negative or none is not told. What is
// told later replaces what was told before.
func (u *usage) add(text []byte, whole bool) {
	type details struct {
		Cached *float64 `json:"cached_tokens"`
	}
	var told struct {
		// OpenAI's Chat Completions, Completions and Embeddings; cached tokens are part of the prompt's, and reasoning
		// tokens of the completion's.
		Prompt        *float64 `json:"prompt_tokens"`
		Completion    *float64 `json:"completion_tokens"`
		Total         *float64 `json:"total_tokens"`
		PromptDetails details  `json:"prompt_tokens_details"`

		// OpenAI's Responses; cached tokens are part of the input's. And Anthropic's Messages; they stand beside it.
		Input        *float64 `json:"input_tokens"`
		Output       *float64 `json:"output_tokens"`
		InputDetails details  `json:"input_tokens_details"`
		CacheRead    *float64 `json:"cache_read_input_tokens"`
		CacheWrite   *float64 `json:"cache_creation_input_tokens"`

		// Bedrock's Converse.
		BedrockInput  *float64 `json:"inputTokens"`
		BedrockOutput *float64 `json:"outputTokens"`
		BedrockRead   *float64 `json:"cacheReadInputTokens"`
		BedrockWrite  *float64 `json:"cacheWriteInputTokens"`
	}
	_ = json.Unmarshal(text, &told) // what it cannot read stays untold

	input, hasInput := tell(told.Prompt, told.Input, told.BedrockInput)
	output, hasOutput := tell(told.Completion, told.Output, told.BedrockOutput)
	total, hasTotal := tell(told.Total)
	inside, _ := tell(told.PromptDetails.Cached, told.InputDetails.Cached)
	read, hasRead := tell(told.CacheRead, told.BedrockRead)
	write, hasWrite := tell(told.CacheWrite, told.BedrockWrite)
	switch {
	case hasInput && (hasRead || hasWrite):
		u.input, u.cached = input+write, read
	case hasInput:
		u.cached = min(inside, input)
		u.input = input - u.cached
	case hasTotal:
		u.input, u.cached = max(total-output, 0), 0
	}
	if hasOutput {
		u.output = output
	} else if hasTotal && hasInput {
		u.output = max(total-input, 0)
	}
	u.hasInput = u.hasInput || hasInput || hasTotal
	u.whole = u.whole || whole && u.hasInput
}

// tell returns the first number that is told.
func tell(numbers ...*float64) (tokens int64, told bool) {
	for _, n := range numbers {
		if n != nil && *n >= 0 && *n <= 1<<53 {
			return int64(*n), true
		}
	}
	return 0, false
}
