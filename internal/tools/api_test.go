package tools

import (
	"archive/zip"
	"flag"
	"go/token"
	"go/types"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/exp/apidiff"
	"golang.org/x/tools/go/gcexportdata"
	"golang.org/x/tools/go/packages"
)

var update = flag.Bool("update", false, "record the API as it is")

// TestAPI compares what the modules export with what was last recorded. An addition must be recorded as well: nobody
// would see that it is taken away again. The files are apidiff's: "apidiff -m old.api new.api" reads them too.
func TestAPI(t *testing.T) {
	for _, dir := range published(t) {
		now := load(t, dir)
		file := filepath.Join("api", path.Base(now.Path)+".api")
		changes := apidiff.Report{}
		if _, err := os.Stat(file); err == nil || !*update {
			changes = apidiff.ModuleChanges(record(t, file), now)
		}
		if *update {
			t.Log(file, changes)
			write(t, file, now)
		} else if len(changes.Changes) > 0 {
			t.Errorf("The API of %s is not what is recorded; if that is meant, run make api.\n%s", now.Path, changes)
		}
	}
}

// TestAPIOn32Bits finds the same API where an int has 32 bits.
func TestAPIOn32Bits(t *testing.T) {
	changes := apidiff.ModuleChanges(load(t, "."), load(t, ".", "GOARCH=386", "CGO_ENABLED=0"))
	if len(changes.Changes) > 0 {
		t.Error(changes)
	}
}

// load returns the packages of the module in a folder that others can import.
func load(t *testing.T, dir string, env ...string) *apidiff.Module {
	t.Helper()
	mode := packages.NeedName | packages.NeedTypes | packages.NeedModule
	loaded, err := packages.Load(&packages.Config{
		Mode: mode, Dir: filepath.Join(root, dir), Env: append(os.Environ(), env...),
	}, "./...")
	require.NoError(t, err)
	module := &apidiff.Module{Path: loaded[0].Module.Path}
	for _, p := range loaded {
		for _, err := range p.Errors {
			t.Error(err)
		}
		if p.Name != "main" && !strings.Contains(p.PkgPath, "/internal/") {
			module.Packages = append(module.Packages, p.Types)
		}
	}
	return module
}

// write writes no positions, which the packages' own FileSet would add: what is recorded does not depend on where.
func write(t *testing.T, file string, module *apidiff.Module) {
	t.Helper()
	f, err := os.Create(file)
	require.NoError(t, err)
	archive := zip.NewWriter(f)
	entry, err := archive.Create("module")
	require.NoError(t, err)
	_, err = io.WriteString(entry, module.Path)
	require.NoError(t, err)
	for _, p := range module.Packages {
		entry, err := archive.Create(p.Path() + ".x")
		require.NoError(t, err)
		require.NoError(t, gcexportdata.Write(entry, token.NewFileSet(), p))
	}
	require.NoError(t, archive.Close())
	require.NoError(t, f.Close())
}

func record(t *testing.T, file string) *apidiff.Module {
	t.Helper()
	archive, err := zip.OpenReader(file)
	require.NoError(t, err)
	defer archive.Close()
	module := &apidiff.Module{}
	for _, f := range archive.File {
		entry, err := f.Open()
		require.NoError(t, err)
		if path, isPackage := strings.CutSuffix(f.Name, ".x"); isPackage {
			p, err := gcexportdata.Read(entry, token.NewFileSet(), map[string]*types.Package{}, path)
			require.NoError(t, err)
			module.Packages = append(module.Packages, p)
		} else {
			path, err := io.ReadAll(entry)
			require.NoError(t, err)
			module.Path = string(path)
		}
	}
	return module
}
