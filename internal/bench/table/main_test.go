package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// rounds returns what so many rounds print. Theirs takes twice as long as ours on 1 CPU in each of them. On 2 CPUs theirs
// gets slower as ours gets faster.
func rounds(n int) string {
	var b strings.Builder
	b.WriteString("goos: linux\ncpu: Some CPU\n")
	for i := n; i > 0; i-- {
		fmt.Fprintf(&b, "BenchmarkSettled/quotashare.TryAcquire+Settle 100 %d ns/op 0 allocs/op\n", 100*i)
		fmt.Fprintf(&b, "BenchmarkSettled/quotashare.TryAcquire+Settle-2 100 %d ns/op 0 allocs/op\n", 100*i)
		fmt.Fprintf(&b, "BenchmarkSettled/xtime.ReserveN+Cancel 100 %d ns/op 1 allocs/op\n", 200*i)
		fmt.Fprintf(&b, "BenchmarkSettled/xtime.ReserveN+Cancel-2 100 %d ns/op 1 allocs/op\n", 100*(n+1-i))
	}
	return b.String()
}

const page = "# A page\n\n<!-- table: Settled -->\nold\n<!-- end -->\n\nprose\n\n<!-- table: Queued -->\nkept\n<!-- end -->\n"

// write runs the program on the page and on what was measured, and returns the page after it.
func write(t *testing.T, page, measured string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	pageFile, measuredFile := filepath.Join(dir, "page.md"), filepath.Join(dir, "measured.txt")
	for file, text := range map[string]string{pageFile: page, measuredFile: measured} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	err := rewrite(pageFile, measuredFile)
	text, readErr := os.ReadFile(pageFile)
	if readErr != nil {
		t.Fatal(readErr)
	}
	return string(text), err
}

func TestTheTableIsWritten(t *testing.T) {
	const want = "# A page\n\n<!-- table: Settled -->\n\n" +
		"|  | 1 CPU | 2 CPUs | `quotashare.TryAcquire+Settle` / it, 1 CPU | 2 CPUs | allocations |\n" +
		"|---|---|---|---|---|---|\n" +
		"| `quotashare.TryAcquire+Settle` | 400 ns | 400 ns |  |  | 0 |\n" +
		"| `xtime.ReserveN+Cancel` | 800 ns | 400 ns | 0.50 (0.50–0.50) | 1.00 (0.14–7.00) | 1 |\n" +
		"\n<!-- end -->\n\nprose\n\n<!-- table: Queued -->\nkept\n<!-- end -->\n"
	once, err := write(t, page, rounds(7))
	if err != nil || once != want {
		t.Fatalf("%v\n%s", err, once)
	}
	if twice, err := write(t, once, rounds(7)); err != nil || twice != want {
		t.Fatalf("not the same again: %v\n%s", err, twice)
	}
	few, err := write(t, page, rounds(2)) // too few to say between what the ratio lies
	if err != nil || !strings.Contains(few, "| 0.50 | 1.25 |") {
		t.Fatalf("%v\n%s", err, few)
	}
}

func TestWhatIsMissingIsAnError(t *testing.T) {
	full := rounds(7)
	for name, c := range map[string]struct{ page, measured, want string }{
		"a benchmark that failed": {page, full + "BenchmarkSettled/a \t--- FAIL: BenchmarkSettled/a\n", "did a benchmark fail"},
		"a row":                   {page, strings.ReplaceAll(full, "Settled/quotashare.TryAcquire+Settle", "Settled/quotashare.Renamed"), "quotashare.TryAcquire+Settle"},
		"half of a round":         {page, full + "BenchmarkSettled/xtime.ReserveN+Cancel 100 5 ns/op\n", "want as many"},
		"everything":              {page, "PASS\n", "no results"},
		"the table's kind":        {strings.ReplaceAll(page, "Settled", "Unheard"), strings.ReplaceAll(full, "Settled", "Unheard"), "knows no such table"},
	} {
		t.Run(name, func(t *testing.T) {
			after, err := write(t, c.page, c.measured)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatal(err)
			}
			if after != c.page {
				t.Fatalf("the page changed:\n%s", after)
			}
		})
	}
}
