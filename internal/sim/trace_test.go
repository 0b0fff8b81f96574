package sim_test

import (
	"errors"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare/internal/sim"
)

const header = "TIMESTAMP,ContextTokens,GeneratedTokens"

func TestReadTrace(t *testing.T) {
	at := func(nanos int) time.Time { return time.Date(2023, 11, 16, 18, 15, 46, nanos, time.UTC) }
	two := []sim.Row{
		{At: at(680_590_000), ContextTokens: 374, GeneratedTokens: 44},
		{At: at(995_169_000), ContextTokens: 396, GeneratedTokens: 0},
	}
	rows := []string{header, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:46.9951690,396,0"}
	for name, test := range map[string]struct {
		text string
		want []sim.Row
	}{
		"as recorded: CRLF, the last line not ended": {strings.Join(rows, "\r\n"), two},
		"LF, the last line ended":                    {strings.Join(rows, "\n") + "\n", two},
		"byte order mark":                            {"\uFEFF" + strings.Join(rows, "\r\n"), two},
		"quoted fields": {
			`"TIMESTAMP","ContextTokens","GeneratedTokens"` + "\r\n" +
				`"2023-11-16 18:15:46.6805900","374",44` + "\r\n" + `2023-11-16 18:15:46.9951690,396,"0"`, two,
		},
		"empty lines between": {strings.Join(rows, "\n\n"), two},
		"no fraction, the same time twice": {
			header + "\n2023-11-16 18:15:46,1,2\n2023-11-16 18:15:46,3,4",
			[]sim.Row{{At: at(0), ContextTokens: 1, GeneratedTokens: 2}, {At: at(0), ContextTokens: 3, GeneratedTokens: 4}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := sim.ReadTrace("conv.csv", iotest.OneByteReader(strings.NewReader(test.text)))
			require.NoError(t, err)
			assert.Empty(t, cmp.Diff(test.want, got))
		})
	}
}

func TestReadTraceErrors(t *testing.T) {
	const good = header + "\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
	for name, test := range map[string]struct{ text, want string }{
		"empty":                {"", "conv.csv:1: the file is empty: want the header " + header},
		"only a mark":          {"\uFEFF", "conv.csv:1: the file is empty"},
		"no header":            {"2023-11-16 18:15:46.6805900,374,44", `conv.csv:1: the header is "2023-11-16 18:15:46.6805900,374,44": want ` + header},
		"another header":       {"TIMESTAMP,Tokens\n", `conv.csv:1: the header is "TIMESTAMP,Tokens"`},
		"no rows":              {header + "\r\n", "conv.csv:1: no rows follow the header"},
		"no number":            {good + "2023-11-16 18:15:47,many,44", `conv.csv:3: ContextTokens is "many": want a whole number of tokens`},
		"a fraction":           {good + "2023-11-16 18:15:47,374,4.5", `conv.csv:3: GeneratedTokens is "4.5"`},
		"empty number":         {good + "2023-11-16 18:15:47,374,", `conv.csv:3: GeneratedTokens is ""`},
		"too large":            {good + "2023-11-16 18:15:47,9223372036854775807,1", `conv.csv:3: ContextTokens is "9223372036854775807"`},
		"negative":             {good + "2023-11-16 18:15:47,374,-44", "conv.csv:3: GeneratedTokens is -44: want 0 or more"},
		"no time":              {good + "yesterday,374,44", `conv.csv:3: TIMESTAMP is "yesterday": want a time such as 2006-01-02 15:04:05`},
		"out of order":         {good + "2023-11-16 18:15:46.6805899,374,44", `conv.csv:3: TIMESTAMP is "2023-11-16 18:15:46.6805899", before that of the row above`},
		"too few fields":       {good + "2023-11-16 18:15:47,374\r\n", "conv.csv:3: the row has another number of fields than the header"},
		"too many fields":      {good + "2023-11-16 18:15:47,374,44,1\r\n", "conv.csv:3: the row has another number of fields than the header"},
		"open quote":           {good + `2023-11-16 18:15:47,374,"44`, "conv.csv:3: "},
		"after an empty line":  {good + "\r\n\r\nyesterday,374,44", "conv.csv:5: "},
		"bare quote in header": {`TIMESTAMP,Context"Tokens` + "\n", "conv.csv:1: "},
	} {
		t.Run(name, func(t *testing.T) {
			rows, err := sim.ReadTrace("conv.csv", strings.NewReader(test.text))
			require.ErrorContains(t, err, test.want)
			assert.True(t, strings.HasPrefix(err.Error(), "conv.csv:"), err)
			assert.Nil(t, rows)
		})
	}
}

func TestReadTraceFailingReader(t *testing.T) {
	broken := errors.New("broken")
	_, err := sim.ReadTrace("conv.csv", iotest.ErrReader(broken))
	require.ErrorIs(t, err, broken)
	assert.ErrorContains(t, err, "conv.csv: ")
}
