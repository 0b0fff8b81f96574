package tools

import (
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/tools/go/types/typeutil"
)

// TestCodeOnPagesIsExampleCode keeps it compiled: each block stands, but for the indentation, in an example or in the
// service that is one.
func TestCodeOnPagesIsExampleCode(t *testing.T) {
	examples := ""
	for _, file := range append(files(t, "example*_test.go"), "internal/service/main.go") {
		examples += read(t, file)
	}
	examples = regexp.MustCompile(`(?m)^\t`).ReplaceAllString(examples, "")
	for _, page := range files(t, "*.md") {
		for _, block := range regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, page), -1) {
			if !strings.Contains(examples, block[1]) {
				t.Errorf("%s: no example has\n%s", page, block[1])
			}
		}
	}
}

func TestLinksOnPagesLeadSomewhere(t *testing.T) {
	for _, page := range files(t, "*.md") {
		for _, link := range regexp.MustCompile(`\]\(([^)#]*)#?([^)]*)\)`).FindAllStringSubmatch(read(t, page), -1) {
			path, heading := filepath.Join(filepath.Dir(page), link[1]), link[2]
			if link[1] == "" {
				path = page
			}
			switch _, err := os.Stat(filepath.Join(root, path)); {
			case strings.Contains(link[1], "://"):
			case heading != "":
				assert.Contains(t, headings(read(t, path)), heading, page)
			default:
				assert.NoError(t, err, page)
			}
		}
	}
}

// headings returns the names by which GitHub links to the headings of a page.
func headings(page string) (names []string) {
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(page, -1) {
		name := regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}

// TestNamesOnPagesExist looks up what stands in backquotes: names of Go, and the commands' folders and targets.
// BENCHMARKS.md is full of others' names.
func TestNamesOnPagesExist(t *testing.T) {
	known := exported(t)
	for _, name := range []string{"AllowN", "ReserveN"} { // of golang.org/x/time/rate
		known[name] = true
	}
	targets := strings.Fields(regexp.MustCompile(`(?m)^\.PHONY: (.*)$`).FindStringSubmatch(read(t, "Makefile"))[1])
	name := regexp.MustCompile(`^\*?((?:[A-Za-z]\w*\.)?[A-Z]\w*)(?:\(.*\))?$`)
	for _, page := range files(t, "*.md") {
		quoted := regexp.MustCompile("`[^`]+`").FindAllString(regexp.MustCompile("(?s)```.*?```").ReplaceAllString(read(t, page), ""), -1)
		for _, text := range quoted {
			text = strings.Join(strings.Fields(strings.Trim(text, "`")), " ")
			if command, ok := strings.CutPrefix(text, "cd "); ok {
				assert.DirExists(t, filepath.Join(root, strings.Fields(command)[0]), page)
			}
			if target, ok := strings.CutPrefix(text, "make "); ok {
				assert.Contains(t, targets, strings.Fields(target)[0], page)
			}
			if name := name.FindStringSubmatch(text); name != nil && !known[name[1]] && page != "BENCHMARKS.md" {
				t.Errorf("%s: nothing exported is %s", page, text)
			}
		}
	}
	for _, target := range targets {
		if !regexp.MustCompile("`(make )?" + target + "`").MatchString(read(t, "README.md")) {
			t.Errorf("README.md does not tell of make %s", target)
		}
	}
}

// exported returns what the packages that can be imported export: each name, alone and after that of its package or type.
func exported(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, dir := range published(t) {
		for _, p := range load(t, dir).Packages {
			add := func(of string, object types.Object) {
				names[object.Name()], names[of+"."+object.Name()] = true, true
			}
			for _, name := range p.Scope().Names() {
				object := p.Scope().Lookup(name)
				add(p.Name(), object)
				if _, ok := object.(*types.TypeName); !ok {
					continue
				}
				for _, method := range typeutil.IntuitiveMethodSet(object.Type(), nil) {
					add(name, method.Obj())
				}
				if s, ok := object.Type().Underlying().(*types.Struct); ok {
					for field := range s.Fields() {
						add(name, field)
					}
				}
			}
		}
	}
	return names
}

// TestFilesInCommentsExist finds the files that comments name, beside the code or in the root.
func TestFilesInCommentsExist(t *testing.T) {
	named := regexp.MustCompile(`[\w./-]*\w\.(?:go|lua|md|html)\b`)
	for _, source := range files(t, "*.go") {
		file, err := parser.ParseFile(token.NewFileSet(), source, read(t, source), parser.ParseComments)
		require.NoError(t, err)
		for _, comment := range file.Comments {
			for _, name := range named.FindAllString(comment.Text(), -1) {
				_, beside := os.Stat(filepath.Join(root, filepath.Dir(source), name))
				_, inRoot := os.Stat(filepath.Join(root, name))
				if beside != nil && inRoot != nil {
					t.Errorf("%s: there is no %s", source, name)
				}
			}
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
			if !strings.Contains(read(t, "guarantee_test.go"), "func TestGuarantee"+line[1]) {
				t.Errorf("line %s has no test", line[1])
			}
		}
	}
}

// files returns those of the repository, in all modules, with names of a pattern. A path begins at the root.
func files(t *testing.T, pattern string) (paths []string) {
	t.Helper()
	require.NoError(t, fs.WalkDir(os.DirFS(root), ".", func(path string, _ fs.DirEntry, err error) error {
		if ok, _ := filepath.Match(pattern, filepath.Base(path)); ok {
			paths = append(paths, path)
		}
		return err
	}))
	require.NotEmpty(t, paths)
	return paths
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	require.NoError(t, err)
	return string(text)
}
