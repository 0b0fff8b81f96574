package llmhttp

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"

	"github.com/quotashare/quotashare/internal/sliding"
)

// A Profile says how a provider counts. The zero Profile counts all input and output tokens that were used; those below
// are what providers document, as of 2026. Change what differs for a model or an account.
type Profile struct {
	// CountsReserved is a provider that counts what a request reserves, its input and its output limit, and gives
	// nothing back: the estimate stands.
	CountsReserved bool

	// CountsFailed is a provider that counts requests that it turns away: an answer of 3xx, 4xx, 503 or 529 leaves the
	// estimate. Without it such a request has used no tokens, and was no request either if the answer is 429. Other
	// errors, which may have used tokens, leave the estimate everywhere, and a 429 for a spent budget never does.
	CountsFailed bool

	// CachedInputFree is a provider that does not count input that it read from its cache.
	CachedInputFree bool

	// OutputFactor is how many tokens of the quota a token of output counts for. 0 is 1.
	OutputFactor float64

	// DefaultOutput is the output limit, in tokens, of a request that gives none. What it misses is charged in the end
	// if the provider counts what was used.
	DefaultOutput int64

	// BytesPerToken is how many bytes of a request's body make a token of input. 0 is 3: English has 4 and more,
	// Chinese 3, code about 3. So little is meant, for what an estimate misses is charged whether there is room or
	// not.
	BytesPerToken float64

	// AttachmentTokens is what an image, a sound, or a file counts for, inline as base64 or by its address, whatever
	// its size in bytes. 0 is 1,600: an image of the size that Anthropic scales to. A long PDF is more.
	AttachmentTokens int64
}

var (
	// OpenAI counts the larger of the output limit and of what it makes of the size of the input when the request
	// comes, and unsuccessful requests too. (Rate limits guide; the estimate adds both up, and is never below it.)
	OpenAI = Profile{CountsReserved: true, CountsFailed: true}

	// Azure OpenAI counts prompt, output limit and best_of when the request comes. (Manage quota, Azure OpenAI docs.)
	Azure = Profile{CountsReserved: true, CountsFailed: true}

	// Anthropic counts output as it is produced, and no input read from the cache but for some old models. Its limits
	// are on input and output apart: give a Limit for each. (Rate limits, Anthropic docs.)
	Anthropic = Profile{CachedInputFree: true}

	// Bedrock counts output several times: 15 times for Claude 4.8, 10 for Sonnet 5 and Opus 5, 5 for older ones, and
	// once for most others. OutputFactor is the highest, so that no model passes its quota: set that of yours. (Token
	// burndown, Amazon Bedrock docs.)
	Bedrock = Profile{CachedInputFree: true, OutputFactor: 15, DefaultOutput: 4096}

	// Groq counts what was used, and no input read from the cache. (Rate limits, Groq docs.)
	Groq = Profile{CachedInputFree: true}
)

// Tokens are what a call counts for at its provider, in tokens of the quota.
type Tokens struct{ Input, Output int64 }

// in returns the tokens in a unit.
func (t Tokens) in(u Unit) int64 {
	switch u {
	case InputTokens:
		return t.Input
	case OutputTokens:
		return t.Output
	case Requests:
		return 1
	}
	return sliding.Add(t.Input, t.Output)
}

// estimate returns what a request may use at most, as far as its body tells: input by its size, and the largest of the
// output limits given, as often as it asks for an answer. What cannot be read is left out: the provider has the last
// word.
func (p *Profile) estimate(body []byte, request map[string]json.RawMessage) Tokens {
	perToken, attachment := p.BytesPerToken, p.AttachmentTokens
	if !(perToken > 0) {
		perToken = 3
	}
	if attachment <= 0 {
		attachment = 1600
	}
	count, size := attachments(body)
	input := math.Ceil(float64(len(body)-size)/perToken) + float64(count)*float64(attachment)

	// Chat Completions and Messages; Responses; Llama and Mistral; and Bedrock's Converse, Nova and Titan.
	output, given := largest(request, math.Inf(1), "max_tokens", "max_completion_tokens", "max_output_tokens", "max_gen_len")
	for _, name := range [...]string{"inferenceConfig", "textGenerationConfig"} {
		limit, told := largest(members(request[name]), math.Inf(1), "maxTokens", "max_new_tokens", "maxTokenCount")
		output, given = max(output, limit), given || told
	}
	if !given {
		output = max(p.DefaultOutput, 0)
	}
	answers, _ := largest(request, math.Inf(1), "n", "best_of")
	return Tokens{whole(input), p.output(float64(output) * float64(max(answers, 1)) * prompts(request["prompt"]))}
}

// prompts returns how many prompts a request of Completions has: each text of a list, or each list of token numbers.
func prompts(prompt json.RawMessage) float64 {
	var all []json.RawMessage
	if json.Unmarshal(prompt, &all) != nil || len(all) == 0 || all[0][0] != '"' && all[0][0] != '[' {
		return 1
	}
	return float64(len(all))
}

// output returns what so many tokens of output count for.
func (p *Profile) output(tokens float64) int64 {
	if p.OutputFactor > 0 {
		tokens *= p.OutputFactor
	}
	return whole(tokens)
}

// whole rounds tokens up, and cuts off what no int64 holds, or is no number.
func whole(tokens float64) int64 {
	if tokens < math.MaxInt64 {
		return int64(math.Ceil(tokens))
	}
	return math.MaxInt64
}

var (
	// attachmentTypes are the types of the parts of a request that are attachments, in the APIs of OpenAI and
	// Anthropic.
	attachmentTypes = []string{"image", "image_url", "input_image", "input_audio", "file", "input_file", "document"}

	// inlineKeys are the keys under which these APIs, and Bedrock's, take one as base64, or as a data URL.
	inlineKeys = []string{"data", "url", "image_url", "file_data", "bytes"}
)

// attachments counts the images, sounds and files of a request, and the bytes that they take inline. Of the JSON it
// looks at the strings alone: at each, and at the one before, which is its key if it is a value.
func attachments(body []byte) (count, size int) {
	typed, inline := 0, 0
	var key []byte
	for {
		start := bytes.IndexByte(body, '"')
		if start < 0 {
			return max(typed, inline), size
		}
		body = body[start+1:]
		end := 0
		for end < len(body) && body[end] != '"' {
			if body[end] == '\\' {
				end++
			}
			end++
		}
		text := body[:min(end, len(body))]
		switch {
		case string(key) == "type" && isOneOf(text, attachmentTypes):
			typed++
		case isOneOf(key, inlineKeys) && isBase64(text):
			inline++
			size += len(text)
		}
		key, body = text, body[min(end+1, len(body)):]
	}
}

func isOneOf(text []byte, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return name == string(text) })
}

// isBase64 reports whether a string is a file: a data URL in base64, or base64 that is too long for a word.
func isBase64(text []byte) bool {
	data := text
	if rest, ok := bytes.CutPrefix(text, []byte("data:")); ok {
		_, after, ok := bytes.Cut(rest[:min(len(rest), 200)], []byte(";base64,"))
		if !ok {
			return false
		}
		data = rest[min(len(rest), 200)-len(after):]
	} else if len(text) < 200 {
		return false
	}
	for _, b := range data {
		switch {
		case 'a' <= b && b <= 'z', 'A' <= b && b <= 'Z', '0' <= b && b <= '9':
		case b == '+', b == '/', b == '=', b == '-', b == '_', b == '\\':
		default:
			return false
		}
	}
	return true
}
