package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func output(t *testing.T, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, run(args, &out, io.Discard))
	return out.String()
}

func TestNightIsTheSameOnEachRun(t *testing.T) {
	first := output(t)
	assert.Equal(t, first, output(t))
	assert.Equal(t, first, output(t, "-seed", "1"))
	assert.NotEqual(t, first, output(t, "-seed", "2"))
}

func TestNightIsReadable(t *testing.T) {
	out := output(t)
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "Stats.Advice") {
			continue // it is a sentence of its own
		}
		assert.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), 110, line)
	}
	for _, text := range []string{"NOTHING DECIDES:", "DEFAULT FLOORS:", "ELASTIC FLOORS:"} {
		assert.Equal(t, 1, strings.Count(out, text), text)
	}
	for _, text := range []string{"night, 40 min", "morning, 20 min", "The people waiting:"} {
		assert.Equal(t, 3, strings.Count(out, text), text)
	}
	// With a Window the provider refuses nothing and nobody gives up, in two runs of two tables each.
	assert.Equal(t, 4, strings.Count(out, "; 429s: 0\n"))
	assert.Equal(t, 2, strings.Count(out, "nobody gave up"))
}

func TestRecordings(t *testing.T) {
	conv := write(t, "conv.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.68,374,44\r\n2023-11-16 18:17:46,396,109")
	code := write(t, "code.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:40,4808,10\r\n")
	out := output(t, "-conv", conv, "-code", code)
	assert.Contains(t, out, "all, 2 min")
	assert.Contains(t, out, "nobody gave up, and nobody waited: all 2 calls were admitted at once.")
}

func TestPage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "night.html")
	out := output(t, "-page", file)
	assert.True(t, strings.HasPrefix(out, output(t)), "the page changes nothing of the table")
	assert.Contains(t, out, "to open in a browser: "+file)
	page, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, name := range []string{"Nothing decides", "Shares with the default floors", "Shares with elastic floors"} {
		assert.Contains(t, string(page), ">"+name+"</h2>")
	}

	err = run([]string{"-page", filepath.Join(file, "inside a file")}, io.Discard, io.Discard)
	require.ErrorContains(t, err, "night.html")
}

func TestErrors(t *testing.T) {
	good := write(t, "good.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
	bad := write(t, "bad.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,-4\n")
	missing := filepath.Join(t.TempDir(), "missing.csv")
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"one file":     {[]string{"-conv", good}, "-conv and -code go together"},
		"the other":    {[]string{"-code", good}, "-conv and -code go together"},
		"missing file": {[]string{"-conv", missing, "-code", good}, missing},
		"bad row":      {[]string{"-conv", good, "-code", bad}, bad + ":2: GeneratedTokens is -4"},
		"argument":     {[]string{"night"}, `unexpected argument "night"`},
		"unknown flag": {[]string{"-night"}, "-night"},
		"bad seed":     {[]string{"-seed", "one"}, "one"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			require.ErrorContains(t, run(test.args, &out, io.Discard), test.want)
			assert.Empty(t, out.String())
		})
	}
}

func TestHelp(t *testing.T) {
	var out, usage bytes.Buffer
	require.NoError(t, run([]string{"-help"}, &out, &usage))
	assert.Empty(t, out.String())
	for _, flag := range []string{"-conv file", "-code file", "-seed"} {
		assert.Contains(t, usage.String(), flag)
	}
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}
