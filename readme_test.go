package quotashare_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReadmeCodeIsExampleCode keeps the README's code compiled: each of its blocks stands, but for the indentation, in
// an example.
func TestReadmeCodeIsExampleCode(t *testing.T) {
	readme := read(t, "README.md")
	examples := ""
	for _, file := range []string{
		"example_test.go", "sharetest/example_shares_test.go", "internal/sdktest/example_test.go", "redisshare/example_test.go",
	} {
		examples += read(t, file)
	}
	examples = regexp.MustCompile(`(?m)^\t`).ReplaceAllString(examples, "")
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(readme, -1)
	require.NotEmpty(t, blocks)
	for _, block := range blocks {
		require.Contains(t, examples, block[1])
	}
}

func TestReadmeLinksLeadSomewhere(t *testing.T) {
	for _, link := range regexp.MustCompile(`\]\(([^)#]+)`).FindAllStringSubmatch(read(t, "README.md"), -1) {
		if !strings.Contains(link[1], "://") {
			_, err := os.Stat(filepath.FromSlash(link[1]))
			require.NoError(t, err)
		}
	}
}

// TestReadmeGuaranteesHaveTests finds a test for each line that is not true by construction.
func TestReadmeGuaranteesHaveTests(t *testing.T) {
	lines := regexp.MustCompile(`(?m)^([1-9])\. `).FindAllStringSubmatch(read(t, "README.md"), -1)
	require.Len(t, lines, 8)
	for _, line := range lines {
		switch line[1] {
		case "5": // nothing in the package holds a call, so nothing can kill one
		case "6": // TestNothingMakesASource, TestWithSourceNeverRaises
		default:
			require.Contains(t, read(t, "guarantee_test.go"), "func TestGuarantee"+line[1])
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}
