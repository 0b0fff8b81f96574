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
	modules := map[string]bool{}
	for _, path := range strings.Fields(string(out)) {
		modules[path] = true
	}
	require.Equal(t, map[string]bool{
		"github.com/quotashare/quotashare":            true,
		"github.com/quotashare/quotashare/redisshare": true,
		"github.com/redis/go-redis/v9":                true,
		"github.com/cespare/xxhash/v2":                true,
		"go.uber.org/atomic":                          true,
	}, modules)
}
