package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// A mutant is one change of the code.
type mutant struct {
	id, site int // site is the id of the first mutant at the same place
	file     string
	line     int
	name     string // says what is changed where, by content: it stays when lines move
	killer   string
}

// A site is an expression or a statement that can be changed.
type site struct {
	from, to int // offsets
	first    int // id of alternatives[0]
	typ      string
	instead  []string // of an expression; of a statement "" removes it
}

// mutate returns the sources of a package with all mutants in them, by name of file, and the mutants, of which the
// first has the id first.
func mutate(pkg string, first int) (map[string][]byte, []*mutant, error) {
	fset := token.NewFileSet()
	names, err := filepath.Glob(filepath.Join(pkg, "*.go"))
	if err != nil {
		return nil, nil, err
	}
	var parsed []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, nil, err
		}
		parsed = append(parsed, file)
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	imports, err := exports(fset, pkg)
	if err != nil {
		return nil, nil, err
	}
	checked, err := (&types.Config{Importer: imports}).Check(pkg, fset, parsed, info)
	if err != nil {
		return nil, nil, err
	}

	sources := map[string][]byte{
		filepath.Join(pkg, "mutate_chosen.go"): []byte("package " + checked.Name() + chooser),
	}
	var mutants []*mutant
	for _, file := range parsed {
		name := fset.Position(file.Pos()).Filename
		if !slices.Contains(files, filepath.ToSlash(name)) {
			continue
		}
		source, err := os.ReadFile(name)
		if err != nil {
			return nil, nil, err
		}
		f := &finder{
			fset: fset, info: info, pkg: checked, imported: map[string]bool{}, file: filepath.ToSlash(name), source: source,
			next: first + len(mutants), names: map[string]int{},
		}
		for _, spec := range file.Imports {
			f.imported[strings.Trim(spec.Path.Value, `"`)] = true
		}
		ast.PreorderStack(file, nil, f.visit)
		mutants = append(mutants, f.mutants...)
		sources[name] = f.render()
	}
	return sources, mutants, nil
}

// chooser is added to a mutated package. mutateAt returns the id of the mutant that is chosen.
const chooser = `

import (
	"os"
	"strconv"
)

var (
	mutateChosen, _  = strconv.Atoi(os.Getenv("MUTATE")) // 0, which is no mutant, without it
	mutateReached, _ = os.OpenFile(os.Getenv("MUTATE_REACHED"), os.O_WRONLY|os.O_APPEND, 0)
	mutateSeen       [10000]bool
)

func mutateAt(first int) int {
	if !mutateSeen[first] {
		mutateNote(first)
	}
	return mutateChosen
}

func mutateNote(first int) {
	mutateSeen[first] = true
	if mutateReached != nil {
		mutateReached.WriteString(strconv.Itoa(first) + "\n")
	}
}
`

// exports returns an importer of what the package imports, from the compiler's own export data.
func exports(fset *token.FileSet, pkg string) (types.Importer, error) {
	out, err := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", pkg).Output()
	if err != nil {
		return nil, err
	}
	where := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		where[path] = file
	}
	return importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(where[path]) }), nil
}

// A finder finds what can be changed in a file.
type finder struct {
	fset     *token.FileSet
	info     *types.Info
	pkg      *types.Package
	imported map[string]bool // by path
	file     string
	source   []byte
	next     int // id
	sites    []site
	mutants  []*mutant
	names    map[string]int // how often there is one
}

func (f *finder) offset(p token.Pos) int { return f.fset.Position(p).Offset }

func (f *finder) text(n ast.Node) string {
	return string(f.source[f.offset(n.Pos()):f.offset(n.End())])
}

// visit looks at a node, with its parents on the stack. It returns whether to look at what is in the node.
func (f *finder) visit(n ast.Node, stack []ast.Node) bool {
	switch n := n.(type) {
	case *ast.GenDecl:
		return n.Tok == token.VAR
	case *ast.ArrayType, *ast.FuncType, *ast.StructType:
		return false
	case ast.Expr:
		return f.expr(n, stack)
	case ast.Stmt:
		f.stmt(n, stack)
	}
	return true
}

// stmt removes a statement of a block, or turns its operator round.
func (f *finder) stmt(n ast.Stmt, stack []ast.Node) {
	switch parent := stack[len(stack)-1].(type) {
	case *ast.BlockStmt, *ast.CaseClause:
	case *ast.CommClause:
		if parent.Comm == n {
			return
		}
	default:
		return
	}
	var instead []string
	switch n := n.(type) {
	case *ast.ExprStmt:
		if call, ok := n.X.(*ast.CallExpr); ok {
			if method, ok := call.Fun.(*ast.SelectorExpr); ok && (method.Sel.Name == "Lock" || method.Sel.Name == "Unlock") {
				return // for the race detector
			}
		}
		instead = []string{""}
	case *ast.BranchStmt:
		instead = []string{""}
	case *ast.IncDecStmt:
		other := map[token.Token]string{token.INC: "--", token.DEC: "++"}[n.Tok]
		instead = []string{"", f.text(n.X) + other}
	case *ast.AssignStmt:
		if n.Tok == token.DEFINE {
			return
		}
		instead = []string{""}
		if other, ok := map[token.Token]string{
			token.ADD_ASSIGN: "-=", token.SUB_ASSIGN: "+=", token.MUL_ASSIGN: "/=",
		}[n.Tok]; ok {
			instead = append(instead, f.text(n.Lhs[0])+" "+other+" "+f.text(n.Rhs[0]))
		}
	}
	f.add(n, "", instead, stack)
}

// operators are what becomes of each.
var operators = map[token.Token]string{
	token.ADD: "-", token.SUB: "+", token.MUL: "/", token.QUO: "*", token.REM: "/",
	token.AND: "|", token.OR: "&", token.SHL: ">>", token.SHR: "<<",
	token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">",
}

// expr changes an expression.
func (f *finder) expr(n ast.Expr, stack []ast.Node) bool {
	tv := f.info.Types[n]
	parent := stack[len(stack)-1]
	if tv.IsType() || tv.IsBuiltin() {
		return false
	}
	if pair, ok := parent.(*ast.KeyValueExpr); ok && pair.Key == n {
		return false
	}
	if _, ok := n.(*ast.ParenExpr); ok {
		return true
	}
	if tv.Value != nil {
		f.add(n, f.typeName(tv.Type), f.otherConstants(n, tv), stack)
		return false // the largest constant is changed as a whole
	}
	switch n := n.(type) {
	case *ast.BinaryExpr:
		x, y := f.text(n.X), f.text(n.Y)
		if basic, ok := tv.Type.Underlying().(*types.Basic); ok && basic.Info()&types.IsString != 0 {
			return true
		}
		var instead []string
		comparison := n.Op.Precedence() == token.EQL.Precedence()
		// In a comparison with a number its neighbour does the same as the operator's.
		if other, ok := operators[n.Op]; ok && !(comparison && (f.isWhole(n.X) || f.isWhole(n.Y))) {
			instead = append(instead, x+" "+other+" "+y)
		}
		if comparison {
			instead = append(instead, booleans(n, parent)...)
		}
		f.add(n, f.typeName(tv.Type), instead, stack)
	case *ast.UnaryExpr:
		if n.Op == token.SUB {
			f.add(n, f.typeName(tv.Type), []string{f.text(n.X)}, stack)
		}
	case *ast.CallExpr:
		f.call(n, tv, stack)
	case *ast.Ident, *ast.SelectorExpr:
		if isCondition(n, parent) {
			f.add(n, "bool", booleans(n, parent), stack)
		}
	}
	return true
}

// isWhole reports whether n is a constant of which otherConstants tries the neighbours.
func (f *finder) isWhole(n ast.Expr) bool {
	tv := f.info.Types[n]
	if tv.Value == nil {
		return false
	}
	basic, ok := tv.Type.Underlying().(*types.Basic)
	return ok && basic.Info()&types.IsInteger != 0
}

// booleans returns what a condition can be changed to, less what changing the one before it in an && or || does too, and
// less what never ends.
func booleans(n ast.Expr, parent ast.Node) []string {
	if _, ok := parent.(*ast.ForStmt); ok {
		return []string{"false"}
	}
	if both, ok := parent.(*ast.BinaryExpr); ok && both.Y == n {
		switch both.Op {
		case token.LAND:
			return []string{"true"}
		case token.LOR:
			return []string{"false"}
		}
	}
	return []string{"true", "false"}
}

// isCondition reports whether n is what a branch, or an operator of booleans, looks at.
func isCondition(n ast.Expr, parent ast.Node) bool {
	switch p := parent.(type) {
	case *ast.IfStmt:
		return p.Cond == n
	case *ast.ForStmt:
		return p.Cond == n
	case *ast.BinaryExpr:
		return p.Op == token.LAND || p.Op == token.LOR
	case *ast.UnaryExpr:
		return p.Op == token.NOT
	}
	return false
}

func (f *finder) call(n *ast.CallExpr, tv types.TypeAndValue, stack []ast.Node) {
	switch name := f.text(n.Fun); name {
	case "min", "max":
		var instead []string
		for _, arg := range n.Args {
			instead = append(instead, f.text(arg))
		}
		f.add(n, f.typeName(tv.Type), instead, stack)
	case "Add", "sliding.Add":
		x, y := f.text(n.Args[0]), f.text(n.Args[1])
		f.add(n, "int64", []string{x, y, x + "+" + y}, stack)
	default:
		if basic, ok := tv.Type.(*types.Basic); ok && basic.Kind() == types.Bool {
			switch parent := stack[len(stack)-1].(type) {
			case *ast.ExprStmt, *ast.DeferStmt:
			default:
				f.add(n, "bool", booleans(n, parent), stack)
			}
		}
	}
}

// otherConstants returns the neighbours of a number, and the other boolean.
func (f *finder) otherConstants(n ast.Expr, tv types.TypeAndValue) (others []string) {
	basic, ok := tv.Type.Underlying().(*types.Basic)
	if !ok {
		return nil
	}
	switch {
	case basic.Info()&types.IsBoolean != 0:
		return []string{"!" + f.text(n)}
	case basic.Info()&types.IsNumeric != 0:
		for _, op := range []token.Token{token.ADD, token.SUB} {
			changed := constant.BinaryOp(tv.Value, op, constant.MakeInt64(1))
			if f.fits(changed, basic) {
				if _, ok := n.(*ast.BasicLit); ok && changed.Kind() == constant.Int {
					others = append(others, changed.ExactString())
					continue
				}
				text := f.text(n)
				if _, ok := n.(*ast.BinaryExpr); ok {
					text = "(" + text + ")"
				}
				others = append(others, "("+text+op.String()+"1)")
			}
		}
	}
	return others
}

// fits reports whether a constant is one of the type.
func (f *finder) fits(value constant.Value, basic *types.Basic) bool {
	expr := fmt.Sprintf("%s(%s)", basic.Name(), value.ExactString())
	_, err := types.Eval(token.NewFileSet(), nil, token.NoPos, expr)
	return err == nil
}

// typeName returns how the type is written in the file, "" if it cannot be.
func (f *finder) typeName(t types.Type) string {
	writable := true
	name := types.TypeString(types.Default(t), func(p *types.Package) string {
		if p == f.pkg {
			return ""
		}
		writable = writable && f.imported[p.Path()]
		return p.Name()
	})
	if !writable {
		return ""
	}
	return name
}

func (f *finder) add(n ast.Node, typ string, instead []string, stack []ast.Node) {
	if _, isExpr := n.(ast.Expr); len(instead) == 0 || isExpr && typ == "" {
		return
	}
	s := site{f.offset(n.Pos()), f.offset(n.End()), f.next, typ, instead}
	f.sites = append(f.sites, s)
	for _, other := range instead {
		if other == "" {
			other = "nothing"
		}
		name := f.name(n, other, stack)
		f.names[name]++
		if times := f.names[name]; times > 1 {
			name += fmt.Sprintf(" (%d)", times)
		}
		f.mutants = append(f.mutants, &mutant{id: f.next, site: s.first, file: f.file, line: f.fset.Position(n.Pos()).Line, name: name})
		f.next++
	}
}

// name says that n becomes other. Of a constant that would say nothing, so it shows what the constant is part of.
func (f *finder) name(n ast.Node, other string, stack []ast.Node) string {
	was, is := f.text(n), other
	if expr, ok := n.(ast.Expr); ok && f.info.Types[expr].Value != nil {
		around := stack[len(stack)-1]
		if _, ok := around.(*ast.ParenExpr); ok {
			around = n
		}
		before := string(f.source[f.offset(around.Pos()):f.offset(n.Pos())])
		after := string(f.source[f.offset(n.End()):f.offset(around.End())])
		if all := before + was + after; len(all) <= 120 && !strings.Contains(all, "\n") {
			was, is = all, before+is+after
		}
	}
	return fmt.Sprintf("%s %s: %s => %s", f.file, function(stack), oneLine(was), oneLine(is))
}

func function(stack []ast.Node) string {
	for _, n := range stack {
		if decl, ok := n.(*ast.FuncDecl); ok {
			return decl.Name.Name
		}
	}
	return "var"
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// render returns the file with all alternatives in it.
func (f *finder) render() []byte {
	// Sites are found from the outside in: those within another come after it.
	var out bytes.Buffer
	rest := f.sites
	var write func(from, to int)
	write = func(from, to int) {
		for len(rest) > 0 && rest[0].to <= to && rest[0].from >= from {
			s := rest[0]
			rest = rest[1:]
			out.Write(f.source[from:s.from])
			if s.typ == "" {
				fmt.Fprintf(&out, "if m := mutateAt(%d); ", s.first) // no switch, which would catch a break
				for i, other := range s.instead {
					fmt.Fprintf(&out, "m == %d { %s } else if ", s.first+i, other)
				}
				out.WriteString("true { ")
				write(s.from, s.to)
				out.WriteString(" }")
			} else {
				fmt.Fprintf(&out, "func() %s { switch mutateAt(%d) { ", s.typ, s.first)
				for i, other := range s.instead {
					fmt.Fprintf(&out, "case %d: return %s; ", s.first+i, strings.ReplaceAll(other, "\n", " "))
				}
				out.WriteString("}; return ")
				write(s.from, s.to)
				out.WriteString(" }()")
			}
			from = s.to
		}
		out.Write(f.source[from:to])
	}
	write(0, len(f.source))
	if len(rest) > 0 {
		panic("sites are not in the order of the source")
	}
	return out.Bytes()
}
