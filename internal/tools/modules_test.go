package tools

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/licensecheck"
	"github.com/stretchr/testify/require"
	"golang.org/x/vuln/scan"
)

const root = "../.."

// linked are the modules that a service links with each package, beyond the standard library and this repository's own.
var linked = map[string][]string{
	".":         {},
	"llmhttp":   {},
	"sharetest": {},
	"promshare": {
		"github.com/beorn7/perks",
		"github.com/cespare/xxhash/v2",
		"github.com/munnerz/goautoneg",
		"github.com/prometheus/client_golang",
		"github.com/prometheus/client_model",
		"github.com/prometheus/common",
		"github.com/prometheus/procfs",
		"golang.org/x/sys",
		"google.golang.org/protobuf",
	},
	"redisshare": {
		"github.com/cespare/xxhash/v2",
		"github.com/redis/go-redis/v9",
		"go.uber.org/atomic",
		"golang.org/x/sys",
	},
}

// licences are those that ask of a service that links the code no more than that their text goes with it.
var licences = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"}

// vulndb is Go's vulnerability database as a module, which a proxy serves where the database itself is out of reach. It
// stands here and not in go.mod because it would bring ninety requirements of its own programs, which are not needed.
// "go list -m golang.org/x/vulndb@latest" tells the newest version.
const vulndb = "golang.org/x/vulndb@v0.0.0-20261105234957-e22db6528018"

// A pkg is what go list tells of a package.
type pkg struct {
	Dir, ImportPath string
	Standard        bool
	GoFiles         []string
	Module          *struct{ Path, Dir string }
}

func (p pkg) own() bool {
	return p.Module != nil && strings.HasPrefix(p.Module.Path+"/", "github.com/quotashare/quotashare/")
}

func list(t *testing.T, dir string, args ...string) (all []pkg) {
	t.Helper()
	command := exec.Command("go", append([]string{"list", "-json=Dir,ImportPath,Standard,GoFiles,Module"}, args...)...)
	command.Dir = filepath.Join(root, dir)
	command.Stderr = os.Stderr
	out, err := command.Output()
	require.NoError(t, err)
	return decode[pkg](t, out)
}

// decode returns the values of JSON that stand one after the other.
func decode[T any](t *testing.T, text []byte) (all []T) {
	t.Helper()
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		var one T
		if err := decoder.Decode(&one); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			require.NoError(t, err)
		}
		all = append(all, one)
	}
}

// modules returns the folders of the modules, but for this one: nothing is built with it.
func modules(t *testing.T) (dirs []string) {
	t.Helper()
	for _, file := range files(t, "go.mod") {
		if dir := filepath.Dir(file); dir != "internal/tools" {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// published returns the folders of the modules that others can require.
func published(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(modules(t), func(dir string) bool { return strings.HasPrefix(dir, "internal/") })
}

// TestImports keeps what a service links small, and free of what belongs to tests and commands.
func TestImports(t *testing.T) {
	packages := 0
	for _, dir := range published(t) {
		packages += len(load(t, dir).Packages)
	}
	require.Equal(t, len(linked), packages, "each package has its line")
	for dir, want := range linked {
		for _, p := range list(t, dir, "-deps", ".") {
			if p.ImportPath == "flag" || p.ImportPath == "testing" {
				t.Errorf("%s links %s", dir, p.ImportPath)
			}
			if !p.Standard && !p.own() && !slices.Contains(want, p.Module.Path) {
				t.Errorf("%s links %s, want of other modules only %v", dir, p.ImportPath, want)
			}
		}
	}
}

// TestNothingStartsAGoroutine holds for all that a service links but redisshare, which sends to Redis beside the calls.
func TestNothingStartsAGoroutine(t *testing.T) {
	files := 0
	for _, dir := range []string{".", "llmhttp", "sharetest", "promshare"} {
		for _, p := range list(t, dir, "-deps", ".") {
			for _, name := range p.GoFiles {
				if !p.own() {
					continue
				}
				files++
				fset := token.NewFileSet()
				file, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
				require.NoError(t, err)
				ast.Inspect(file, func(n ast.Node) bool {
					_, starts := n.(*ast.GoStmt)
					if call, ok := n.(*ast.SelectorExpr); ok {
						starts = call.Sel.Name == "Go"
					}
					if starts {
						t.Error(fset.Position(n.Pos()))
					}
					return true
				})
			}
		}
	}
	require.Greater(t, files, 10)
}

// TestLicences reads the licences of all that is built here, for tests and benchmarks too.
func TestLicences(t *testing.T) {
	dirs := map[string]string{"this repository": root}
	for _, dir := range modules(t) {
		for _, p := range list(t, dir, "-deps", "-test", "./...") {
			if p.Module != nil && !p.own() {
				dirs[p.Module.Path] = p.Module.Dir
			}
		}
	}
	require.Greater(t, len(dirs), 20)
	for module, dir := range dirs {
		found := []string{}
		files, err := filepath.Glob(filepath.Join(dir, "[LC][IO][CP][EY]*"))
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			known := licensecheck.Scan(text)
			if known.Percent < 75 { // Go's own site for packages draws the line there
				found = append(found, "unknown")
			}
			for _, match := range known.Match {
				found = append(found, match.ID)
			}
		}
		if len(found) == 0 || slices.ContainsFunc(found, func(id string) bool { return !slices.Contains(licences, id) }) {
			t.Errorf("licences of %s: %v, want some, and of %v", module, found, licences)
		}
	}
}

// TestVulnerabilities looks for packages used here, if only by a test, of which vulnerabilities are known. Those of the
// standard library are told and fail nothing: they go with the Go that a service is built with, not with this code.
func TestVulnerabilities(t *testing.T) {
	out, err := exec.Command("go", "mod", "download", "-json", vulndb).Output()
	if err != nil {
		t.Skipf("what is known of vulnerabilities cannot be had, so none was looked for: %v\n%s", err, out)
	}
	db := "file://" + filepath.ToSlash(decode[struct{ Dir string }](t, out)[0].Dir) + "/data/osv"
	std := map[string]bool{}
	for _, dir := range modules(t) {
		args := []string{"-C", filepath.Join(root, dir), "-db", db, "-scan", "package", "-format", "json", "./..."}
		for _, p := range list(t, dir, "-deps", "-test", "./...") { // -test of govulncheck misses tests inside a package
			if !p.Standard && !p.own() {
				args = append(args, p.ImportPath)
			}
		}
		command := scan.Command(t.Context(), args...)
		var out, complaints bytes.Buffer
		command.Stdout, command.Stderr = &out, &complaints
		require.NoError(t, command.Start())
		require.NoError(t, command.Wait(), complaints.String())
		for _, message := range decode[struct {
			Finding struct {
				OSV   string
				Fixed string `json:"fixed_version"`
				Trace []struct{ Module, Version, Package string }
			}
		}](t, out.Bytes()) {
			found := message.Finding
			switch {
			case len(found.Trace) == 0 || found.Trace[0].Package == "": // of what is required, and not used
			case found.Trace[0].Module == "stdlib":
				std[found.OSV] = true
			default:
				t.Errorf("%s: %s in %v, fixed in %q", dir, found.OSV, found.Trace[0], found.Fixed)
			}
		}
	}
	t.Log(runtime.Version(), "itself:", slices.Sorted(maps.Keys(std)))
}
