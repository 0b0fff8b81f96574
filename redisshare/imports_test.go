package redisshare

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestImports keeps what a service links to the standard library, quotashare, and the client of Redis with what that
// needs itself.
func TestImports(t *testing.T) {
	format := `{{if .Module}}{{.Module.Path}}{{else if eq .ImportPath "testing" "flag"}}{{.ImportPath}}{{end}}`
	out, err := exec.Command("go", "list", "-deps", "-f", format, ".").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Subset(t, []string{
		"github.com/quotashare/quotashare",
		"github.com/quotashare/quotashare/redisshare",
		"github.com/redis/go-redis/v9",
		"github.com/cespare/xxhash/v2",
		"go.uber.org/atomic",
		"golang.org/x/sys",
	}, strings.Fields(string(out)))
}
