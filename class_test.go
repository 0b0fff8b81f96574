package quotashare_test

import (
	"context"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

var sources = []Source{SourceAPI, SourceScheduler, SourceEval, SourceBackfill, {}}

func TestClassesAndSources(t *testing.T) {
	for source, want := range map[Source]struct {
		name  string
		class Class
	}{
		SourceAPI:       {"api", Interactive},
		SourceScheduler: {"scheduler", Background},
		SourceEval:      {"eval", Batch},
		SourceBackfill:  {"backfill", Batch},
		{}:              {"unknown", Batch},
	} {
		require.Equal(t, want.class, ClassFor(source))
		require.Equal(t, want.name, source.String())
		text, err := json.Marshal(source)
		require.NoError(t, err)
		require.Equal(t, `"`+want.name+`"`, string(text))
	}
	for class, name := range map[Class]string{
		Interactive: "interactive", Background: "background", Batch: "batch", NumClasses: "class(3)",
	} {
		require.Equal(t, name, class.String())
		text, err := json.Marshal(class)
		require.NoError(t, err)
		require.Equal(t, `"`+name+`"`, string(text))
	}
}

func TestContextCarriesTheSource(t *testing.T) {
	source, ok := SourceFrom(t.Context())
	require.False(t, ok)
	require.Equal(t, Source{}, source)
	require.Equal(t, Batch, ClassFrom(t.Context()), "nothing was stamped")
	for _, want := range sources {
		ctx := WithSource(t.Context(), want)
		source, ok := SourceFrom(ctx)
		require.True(t, ok)
		require.Equal(t, want, source)
		require.Equal(t, ClassFor(want), ClassFrom(ctx))
	}
}

func TestWithSourceNeverRaises(t *testing.T) {
	for _, first := range sources {
		for _, second := range sources {
			for _, third := range sources {
				ctx := WithSource(WithSource(WithSource(t.Context(), first), second), third)
				lowest := max(ClassFor(first), ClassFor(second), ClassFor(third))
				require.Equal(t, lowest, ClassFrom(ctx), "%v, %v, %v", first, second, third)
			}
		}
	}
	ctx := WithSource(t.Context(), SourceEval)
	require.Equal(t, ctx, WithSource(ctx, SourceAPI), "the context is not even wrapped")
	source, _ := SourceFrom(WithSource(ctx, SourceBackfill))
	require.Equal(t, SourceBackfill, source, "of two that are as low, the last")
}

// TestNothingMakesASource reads the package for any way from a string, a number, JSON, text or a header to a Source or
// to a Class that is not a constant.
func TestNothingMakesASource(t *testing.T) {
	// No conversion: a struct converts only from a struct with the same fields, and these are not exported.
	source := reflect.TypeFor[Source]()
	require.Equal(t, reflect.Struct, source.Kind())
	for field := range source.NumField() {
		require.False(t, source.Field(field).IsExported())
	}
	// No decoding, no fmt.Scan, no flag, no database column: a pointer has no method that takes anything.
	for _, typ := range []reflect.Type{reflect.TypeFor[*Source](), reflect.TypeFor[*Class]()} {
		for i := range typ.NumMethod() {
			method := typ.Method(i)
			require.Equal(t, 1, method.Type.NumIn(), "%v.%s takes only its receiver", typ, method.Name)
		}
	}
	for _, text := range []string{`"api"`, `1`, `{"entry": 1}`, `{"Entry": 1}`, `["api"]`, `null`} {
		var s Source
		//lint:ignore SA9005 that it cannot be read is what is tested
		_ = json.Unmarshal([]byte(text), &s)
		require.Equal(t, Source{}, s, text)
	}
	// No function: those that return a Source or a Class take nothing but a context or a Source.
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	seen := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			function, ok := decl.(*ast.FuncDecl)
			if !ok || !function.Name.IsExported() || !mentions(function.Type.Results, "Source", "Class") {
				continue
			}
			seen++
			for _, param := range function.Type.Params.List {
				require.True(t, mentions(&ast.FieldList{List: []*ast.Field{param}}, "Context", "Source"), function.Name.Name)
			}
		}
	}
	require.Equal(t, 3, seen, "ClassFor, ClassFrom, SourceFrom")

	type key string
	ctx := context.WithValue(t.Context(), key("source"), SourceAPI)
	require.Equal(t, Batch, ClassFrom(ctx), "a key of the caller's own is not the stamp")
}

// mentions reports whether one of the fields is of one of the types.
func mentions(fields *ast.FieldList, types ...string) (found bool) {
	if fields == nil {
		return false
	}
	ast.Inspect(fields, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok {
			for _, name := range types {
				found = found || id.Name == name
			}
		}
		return true
	})
	return found
}
