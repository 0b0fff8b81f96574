package bench

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

var quoted = regexp.MustCompile("`([^`]+)`")

// TestThePageHasAllBenchmarks keeps BENCHMARKS.md and the benchmarks together: each has a row in the table of its group,
// or a row and a column, and no table has one that is not measured. As the page is outside of this module, the go command
// may answer from its cache if only the page changed; with -bench, as in CI, it does not.
func TestThePageHasAllBenchmarks(t *testing.T) {
	page, err := os.ReadFile("../../BENCHMARKS.md")
	if err != nil {
		t.Fatal(err)
	}
	exist := map[string]bool{}
	for group, benchmarks := range groups {
		for _, one := range benchmarks {
			exist[group+"/"+one.name] = true
		}
	}
	shown := map[string]bool{}
	tables := regexp.MustCompile(`(?s)<!-- table: (\w+) -->\n(.*?)<!-- end -->`)
	for _, table := range tables.FindAllStringSubmatch(string(page), -1) {
		group, lines := table[1], strings.Split(strings.TrimSpace(table[2]), "\n")
		switch group {
		case "Machine":
		case "Promises": // of benchmarks that have their rows elsewhere
			for _, name := range quoted.FindAllStringSubmatch(table[2], -1) {
				if group, _, _ := strings.Cut(name[1], "/"); groups[group] != nil && !exist[name[1]] {
					t.Errorf("the page promises something of %s, which is not measured", name[1])
				}
			}
		default:
			if len(lines) < 3 {
				t.Fatalf("table %s is empty: run make bench", group)
			}
			for _, name := range rowsAndColumns(group, lines) {
				shown[name] = true
			}
		}
	}
	for name := range shown {
		if !exist[name] {
			t.Errorf("the page shows %s, which is not measured", name)
		}
	}
	for name := range exist {
		if !shown[name] {
			t.Errorf("the page does not show %s", name)
		}
	}
}

// rowsAndColumns returns the names of the benchmarks in a table: group/row, or group/column/row if it names columns.
func rowsAndColumns(group string, lines []string) (names []string) {
	columns := []string{""}
	for _, head := range regexp.MustCompile("`([^`]+)`( / it)?").FindAllStringSubmatch(lines[0], -1) {
		if head[2] == "" { // not the head of a ratio
			columns = append(columns, head[1]+"/")
		}
	}
	if len(columns) > 1 {
		columns = columns[1:]
	}
	for _, line := range lines[2:] {
		for _, column := range columns {
			names = append(names, group+"/"+column+quoted.FindStringSubmatch(line)[1])
		}
	}
	return names
}
