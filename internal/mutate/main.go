// Command mutate asks the tests what they are worth: it changes the code of a Window in one place after the other, and
// names each change with which all tests still pass. Run it in the root of the repository.
//
//	go run ./internal/mutate [-all] [-full] [-v] [-match REGEXP] [FILE...]
//
// All mutants are in one test binary, and an environment variable chooses one. So a mutant costs the run of the tests
// that reach it, up to the first that fails, and no build. What survives makes it fail, unless survivors.txt says why:
// those are run with -all alone, and must survive then.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	root    = "."
	sliding = "./internal/sliding"
)

var files = []string{"admit.go", "window.go", "backoff.go", "stats.go", "internal/sliding/log.go", "internal/sliding/peak.go"}

// explained are the survivors that no test can kill, or should, one a line: the name of the mutant, " # " and why.
//
//go:embed survivors.txt
var explained string

func main() {
	all := flag.Bool("all", false, "run what survivors.txt explains, too")
	full := flag.Bool("full", false, "run the tests at full length for what survives them with -short")
	verbose := flag.Bool("v", false, "tell of each mutant which test killed it")
	match := flag.String("match", "", "only mutants whose name matches the `regexp`")
	workers := flag.Int("workers", 2, "how many mutants are tested at once")
	flag.Parse()
	which, err := regexp.Compile(*match)
	if err == nil {
		err = run(flag.Args(), which, *all, *full, *verbose, *workers)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(only []string, which *regexp.Regexp, all, full, verbose bool, workers int) error {
	dir, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	mutants, err := build(dir)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for line := range strings.Lines(explained) {
		if name, _, ok := strings.Cut(line, " # "); ok {
			known[name] = true
		}
	}
	tests, err := measure(dir, mutants)
	if err != nil {
		return err
	}

	var chosen []*mutant
	for _, m := range mutants {
		if (len(only) == 0 || slices.Contains(only, m.file)) && which.MatchString(m.name) {
			chosen = append(chosen, m)
		}
	}
	jobs := make(chan *mutant)
	var done sync.WaitGroup
	for range workers {
		done.Go(func() {
			for m := range jobs {
				if known[m.name] && !all {
					continue
				}
				m.killer = kill(dir, m, tests, "-test.short")
				if m.killer == "" && full && !known[m.name] {
					m.killer = kill(dir, m, tests)
				}
				if verbose {
					fmt.Printf("%d: %s: %s\n", m.line, m.name, cmp.Or(m.killer, "survived"))
				}
			}
		})
	}
	for _, m := range chosen {
		jobs <- m
	}
	close(jobs)
	done.Wait()
	return report(mutants, chosen, known)
}

func report(all, chosen []*mutant, known map[string]bool) error {
	type count struct{ all, killed, explained int }
	counts := map[string]*count{}
	bad := 0
	for name := range known {
		if !slices.ContainsFunc(all, func(m *mutant) bool { return m.name == name }) {
			fmt.Printf("no mutant any more, but in survivors.txt: %s\n", name)
			bad++
		}
	}
	for _, m := range chosen {
		n := counts[m.file]
		if n == nil {
			n = &count{}
			counts[m.file] = n
		}
		n.all++
		switch {
		case m.killer != "":
			n.killed++
			if known[m.name] {
				fmt.Printf("killed, but in survivors.txt: %s (by %s)\n", m.name, m.killer)
				bad++
			}
		case known[m.name]:
			n.explained++
		default:
			fmt.Printf("survived, in line %d: %s\n", m.line, m.name)
			bad++
		}
	}
	for _, file := range files {
		if n := counts[file]; n != nil {
			fmt.Printf("%s: %d mutants, %d killed, %d explained, %d survived\n",
				file, n.all, n.killed, n.explained, n.all-n.killed-n.explained)
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d mutants want a test, or a line in survivors.txt", bad)
	}
	return nil
}

// binary returns where the test binary of a package is.
func binary(dir, pkg string) string { return filepath.Join(dir, filepath.Base(pkg)+".test") }

// build writes the mutated code and builds the test binaries with it.
func build(dir string) ([]*mutant, error) {
	overlay := map[string]string{}
	var mutants []*mutant
	for _, pkg := range []string{root, sliding} {
		sources, all, err := mutate(pkg, 1+len(mutants))
		if err != nil {
			return nil, err
		}
		mutants = append(mutants, all...)
		for name, source := range sources {
			to := filepath.Join(dir, strings.ReplaceAll(name, string(filepath.Separator), "_"))
			if err := os.WriteFile(to, source, 0o600); err != nil {
				return nil, err
			}
			abs, err := filepath.Abs(name)
			if err != nil {
				return nil, err
			}
			overlay[abs] = to
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, err
	}
	for _, pkg := range []string{root, sliding} {
		out, err := exec.Command("go", "test", "-c", "-overlay", file, "-o", binary(dir, pkg), pkg).CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("%w\n%s", err, out)
		}
	}
	return mutants, nil
}

// A test is one of those that must fail if a mutant is to die.
type test struct {
	pkg, name string
	took      time.Duration
	reaches   map[int]bool // by id of mutant
}

// measure runs each test with the mutated code, but no mutant chosen, to learn how long it takes and what it reaches.
// It returns the quickest first.
func measure(dir string, mutants []*mutant) (tests []test, err error) {
	for _, pkg := range []string{root, sliding} {
		list, err := exec.Command(binary(dir, pkg), "-test.list", "^(Test|Example|Fuzz)").Output()
		if err != nil {
			return nil, err
		}
		for name := range strings.FieldsSeq(string(list)) {
			reached := filepath.Join(dir, "reached")
			if err := os.WriteFile(reached, nil, 0o600); err != nil {
				return nil, err
			}
			start := time.Now()
			if out, err := command(dir, pkg, "^"+name+"$", []string{"MUTATE_REACHED=" + reached}, "-test.short").CombinedOutput(); err != nil {
				return nil, fmt.Errorf("%s fails without a mutant: %w\n%s", name, err, out)
			}
			t := test{pkg: pkg, name: name, took: time.Since(start), reaches: map[int]bool{}}
			ids, err := os.ReadFile(reached)
			if err != nil {
				return nil, err
			}
			for id := range strings.FieldsSeq(string(ids)) {
				first, err := strconv.Atoi(id)
				if err != nil {
					return nil, err
				}
				for _, m := range mutants[first-1:] {
					if m.site != first {
						break
					}
					t.reaches[m.id] = true
				}
			}
			tests = append(tests, t)
		}
	}
	slices.SortFunc(tests, func(a, b test) int { return cmp.Compare(a.took, b.took) })
	return tests, nil
}

func command(dir, pkg, run string, env []string, flags ...string) *exec.Cmd {
	cmd := exec.Command(binary(dir, pkg), append(flags, "-test.failfast", "-test.run", run)...)
	cmd.Dir = pkg
	cmd.Env = append(os.Environ(), env...)
	return cmd
}

// quick is how long a test takes that is run together with others.
const quick = 100 * time.Millisecond

// kill returns the test that fails with the mutant, or does not end, and "" if there is none.
func kill(dir string, m *mutant, tests []test, flags ...string) string {
	type group struct {
		pkg, run string
		took     time.Duration
	}
	var groups []*group
	together := map[string]*group{}
	for _, t := range tests {
		if !t.reaches[m.id] {
			continue
		}
		if g := together[t.pkg]; g != nil && t.took < quick {
			g.run += "|" + t.name
			g.took += t.took
			continue
		}
		g := &group{t.pkg, t.name, t.took}
		groups = append(groups, g)
		if t.took < quick {
			together[t.pkg] = g
		}
	}
	own := func(g *group) bool { return filepath.Clean(g.pkg) == filepath.Dir(m.file) }
	slices.SortStableFunc(groups, func(a, b *group) int { // its own tests first, which are sharper
		switch {
		case own(a) && !own(b):
			return -1
		case own(b) && !own(a):
			return 1
		}
		return 0
	})
	for _, g := range groups {
		limit := 10*time.Second + 3*g.took
		if len(flags) == 0 {
			limit = time.Minute + 30*g.took
		}
		flags := append([]string{"-test.timeout", limit.String()}, flags...)
		out, err := command(dir, g.pkg, "^("+g.run+")$", []string{"MUTATE=" + strconv.Itoa(m.id)}, flags...).CombinedOutput()
		if err != nil {
			return failed(out)
		}
	}
	return ""
}

// failed returns the name of the test that failed first, or the panic.
func failed(out []byte) string {
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		if name, ok := strings.CutPrefix(lines.Text(), "--- FAIL: "); ok {
			return strings.Fields(name)[0]
		}
		if strings.HasPrefix(lines.Text(), "panic: ") || strings.HasPrefix(lines.Text(), "fatal error: ") {
			return lines.Text()
		}
	}
	return "failure"
}
