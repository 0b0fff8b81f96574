// Command table writes the tables of BENCHMARKS.md. It reads the output of `go test -bench`, of one round after the
// other, and replaces what stands between `<!-- table: Name -->` and `<!-- end -->` in the page. A ratio is the median
// of the ratios of the rounds, for what disturbs one round disturbs both sides of it.
//
// A table of which nothing was measured stays as it is. One of which something misses is an error.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/perf/benchfmt"
	"golang.org/x/perf/benchmath"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("table: ")
	page := flag.String("page", "BENCHMARKS.md", "the `file` whose tables are written")
	flag.Parse()
	if err := rewrite(*page, flag.Arg(0)); err != nil {
		log.Fatal(err)
	}
}

func rewrite(page, measured string) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	file, err := os.Open(measured)
	if err != nil {
		return err
	}
	defer file.Close()
	stat, err := file.Stat()
	if err != nil {
		return err
	}
	r, err := read(file)
	if err != nil {
		return err
	}
	r.when = stat.ModTime()
	out, err := r.fill(string(text))
	if err != nil {
		return err
	}
	return os.WriteFile(page, []byte(out), 0o644)
}

// results are what was measured.
type results struct {
	names  []string // Group/row, in their order
	values map[key][]float64
	cpu    string
	when   time.Time
}

type key struct {
	name  string
	procs int
	unit  string
}

func read(in io.Reader) (*results, error) {
	r := &results{values: map[key][]float64{}}
	reader := benchfmt.NewReader(in, "results")
	seen := map[string]bool{}
	for reader.Scan() {
		switch record := reader.Result().(type) {
		case *benchfmt.SyntaxError:
			return nil, fmt.Errorf("%w (did a benchmark fail?)", record)
		case *benchfmt.Result:
			name, procs := record.Name.String(), 1
			if _, parts := record.Name.Parts(); len(parts) > 0 {
				if last := string(parts[len(parts)-1]); last[0] == '-' {
					name = strings.TrimSuffix(name, last)
					procs, _ = strconv.Atoi(last[1:])
				}
			}
			if !seen[name] {
				seen[name] = true
				r.names = append(r.names, name)
			}
			for _, v := range record.Values {
				k := key{name, procs, v.Unit}
				r.values[k] = append(r.values[k], v.Value)
			}
			r.cpu = record.GetConfig("cpu")
		}
	}
	if err := reader.Err(); err != nil {
		return nil, err
	}
	if len(r.names) == 0 {
		return nil, fmt.Errorf("no results")
	}
	return r, nil
}

var marked = regexp.MustCompile(`(?s)(<!-- table: (\w+) -->\n).*?(<!-- end -->)`)

// fill returns the page with its tables.
func (r *results) fill(page string) (string, error) {
	var failed error
	page = marked.ReplaceAllStringFunc(page, func(block string) string {
		parts := marked.FindStringSubmatch(block)
		table, err := r.table(parts[2])
		switch {
		case err != nil:
			failed = fmt.Errorf("table %s: %w", parts[2], err)
		case table == "":
			log.Printf("nothing was measured for table %s: it stays as it is", parts[2])
		default:
			return parts[1] + "\n" + table + "\n" + parts[3]
		}
		return block
	})
	return page, failed
}

const (
	perCall   = "sec/op"
	perNext   = "sec/next"
	perWindow = "B/window"
	perWaiter = "B/waiter"
)

// table returns a table of the page, "" if nothing of it was measured.
func (r *results) table(name string) (string, error) {
	if name == "Machine" {
		return r.machine(), nil
	}
	measured := func(name string) bool { return len(r.rows(name)) > 0 }
	switch {
	case name == "Promises":
		if !measured("Admitted") || !measured("GrowthWaiters") {
			return "", nil
		}
		return r.promises()
	case !measured(name):
		return "", nil
	}
	series := func(heads ...column) (string, error) { return r.series(name, heads) }
	switch name {
	case "Floor", "Watched":
		return r.limiters(name, "")
	case "Admitted", "Refused":
		return r.limiters(name, "quotashare.TryAcquire")
	case "Settled":
		return r.limiters(name, "quotashare.TryAcquire+Settle")
	case "Queued":
		return r.limiters(name, "quotashare.Acquire+Cancel")
	case "Rates":
		return series(
			column{"`xtime.AllowN`", "xtime.AllowN", perCall, ""},
			column{"`quotashare.TryAcquire`", "quotashare.TryAcquire", perCall, ""},
			column{"ratio", "quotashare.TryAcquire", perCall, "xtime.AllowN/*"},
			column{"`quotashare.TryAcquire_loan`", "quotashare.TryAcquire_loan", perCall, ""},
			column{"ratio", "quotashare.TryAcquire_loan", perCall, "xtime.AllowN/*"},
			column{"`quotashare.TryAcquire+Settle_10s`", "quotashare.TryAcquire+Settle_10s", perCall, ""})
	case "GrowthCalls":
		return series(
			column{"`quotashare`: a call", "quotashare", perCall, ""},
			column{"beside 1,000,000 calls", "quotashare", perCall, "quotashare/calls=1000000"},
			column{"memory", "quotashare", perWindow, ""})
	case "GrowthWindows":
		return series(
			column{"`quotashare`: a call", "quotashare", perCall, ""},
			column{"`xtime`: a call", "xtime", perCall, ""},
			column{"ratio", "quotashare", perCall, "xtime/*"},
			column{"memory of a Window", "quotashare", perWindow, ""},
			column{"of a Limiter", "xtime", perWindow, ""})
	case "GrowthWaiters":
		return series(
			column{"`quotashare`: the next", "quotashare", perNext, ""},
			column{"beside 10 waiters", "quotashare", perNext, "quotashare/waiters=10"},
			column{"`xsync`: the next", "xsync", perNext, ""},
			column{"`channel`: the next", "channel", perNext, ""},
			column{"a turn of quotashare", "quotashare", perCall, ""},
			column{"of xsync", "xsync", perCall, ""},
			column{"of channel", "channel", perCall, ""},
			column{"memory of a waiter of quotashare", "quotashare", perWaiter, ""},
			column{"of xsync", "xsync", perWaiter, ""},
			column{"of channel", "channel", perWaiter, ""})
	case "Redis":
		return r.redis()
	}
	return "", fmt.Errorf("the program knows no such table")
}

func (r *results) machine() string {
	clock, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	if err != nil {
		clock = []byte("not known")
	}
	rounds := 0
	for k, values := range r.values {
		if k.unit == perCall {
			rounds = max(rounds, len(values))
		}
	}
	return fmt.Sprintf("%s, %d CPUs, clock source %s, %s/%s, %s, %s, %d rounds.\n", r.cpu, runtime.NumCPU(),
		strings.TrimSpace(string(clock)), runtime.GOOS, runtime.GOARCH, runtime.Version(), r.when.Format(time.DateOnly), rounds)
}

// rows returns the names of the rows of a group.
func (r *results) rows(group string) (rows []string) {
	for _, name := range r.names {
		if row, ok := strings.CutPrefix(name, group+"/"); ok {
			rows = append(rows, row)
		}
	}
	return rows
}

// limiters is a table of limiters that are asked for the same, with the ratio of ours to each other.
func (r *results) limiters(group, ours string) (string, error) {
	head := []string{"", "1 CPU", "2 CPUs"}
	if ours != "" {
		head = append(head, "`"+ours+"` / it, 1 CPU", "2 CPUs")
	}
	var t table
	t.add(append(head, "allocations")...)
	for _, row := range r.rows(group) {
		cells := []string{"`" + row + "`"}
		for _, procs := range []int{1, 2} {
			cells = append(cells, t.cell(r.median(key{group + "/" + row, procs, perCall})))
		}
		for _, procs := range []int{1, 2} {
			switch {
			case ours == "":
			case strings.HasPrefix(row, "quotashare."):
				cells = append(cells, "")
			default:
				cells = append(cells, t.cell(r.ratio(key{group + "/" + ours, procs, perCall}, group+"/"+row)))
			}
		}
		t.add(append(cells, t.cell(r.median(key{group + "/" + row, 1, "allocs/op"})))...)
	}
	return t.String(), t.err
}

// A column of a table of series shows how one of them grows.
type column struct {
	title  string
	series string
	unit   string
	// beside, if it is not empty, makes the column one of ratios, to this benchmark; * is the row.
	beside string
}

// series is a table with a row for each value of a parameter.
func (r *results) series(group string, columns []column) (string, error) {
	var t table
	head := []string{""}
	for _, c := range columns {
		head = append(head, c.title)
	}
	t.add(head...)
	for _, name := range r.rows(group) {
		row, ok := strings.CutPrefix(name, columns[0].series+"/")
		if !ok {
			continue
		}
		cells := []string{"`" + row + "`"}
		for _, c := range columns {
			k := key{group + "/" + c.series + "/" + row, 1, c.unit}
			switch {
			case c.beside != "":
				cells = append(cells, t.cell(r.ratio(k, group+"/"+strings.ReplaceAll(c.beside, "*", row))))
			case c.unit == perWaiter && r.values[k] == nil: // it is not measured for a few
				cells = append(cells, "")
			default:
				cells = append(cells, t.cell(r.median(k)))
			}
		}
		t.add(cells...)
	}
	return t.String(), t.err
}

func (r *results) promises() (string, error) {
	var t table
	t.add("", "measured as", "1 CPU", "2 CPUs", "wanted")
	for _, p := range []struct {
		what         string
		ours, theirs string
		unit         string
		procs        int     // most
		most         float64 // 0 if nothing is promised
	}{
		{"`TryAcquire` / the floor", "Admitted/quotashare.TryAcquire", "Floor/sync.Mutex+time.Since", perCall, 2, 0},
		{"`TryAcquire` / `AllowN(time.Now(), n)`", "Admitted/quotashare.TryAcquire", "Admitted/xtime.AllowN", perCall, 2, 0.9},
		{"the same, of a loan", "Admitted/quotashare.TryAcquire_loan", "Admitted/xtime.AllowN", perCall, 2, 0.9},
		{"`TryAcquire` / `AllowN(time.Now(), n)`, 100 times a minute", "Rates/quotashare.TryAcquire/calls=100", "Rates/xtime.AllowN/calls=100", perCall, 1, 0.9},
		{"the same, 1,000,000 times a minute", "Rates/quotashare.TryAcquire/calls=1000000", "Rates/xtime.AllowN/calls=1000000", perCall, 1, 0.9},
		{"`Acquire` / `WaitN`, which need not wait", "Admitted/quotashare.Acquire", "Admitted/xtime.WaitN", perCall, 2, 0},
		{"`TryAcquire` and `Settle` / `ReserveN` and `Cancel`", "Settled/quotashare.TryAcquire+Settle", "Settled/xtime.ReserveN+Cancel", perCall, 2, 0.9},
		{"the same / one that gives back", "Settled/quotashare.TryAcquire+Settle", "Settled/xtime.ReserveN+CancelAt", perCall, 2, 0},
		{"a refusal of the same call again / x/time's, without a hint", "Refused/quotashare.TryAcquire", "Refused/xtime.AllowN", perCall, 2, 1.2},
		{"the same, of a loan", "Refused/quotashare.TryAcquire_loan", "Refused/xtime.AllowN", perCall, 2, 1.2},
		{"a refusal of the same call again / x/time's, with a hint", "Refused/quotashare.TryAcquire", "Refused/xtime.ReserveN+Delay+Cancel", perCall, 2, 1.2},
		{"a refusal of another size each time / x/time's, without a hint", "Refused/quotashare.TryAcquire_sizes", "Refused/xtime.AllowN", perCall, 2, 1.2},
		{"the same, of a loan", "Refused/quotashare.TryAcquire_sizes_loan", "Refused/xtime.AllowN", perCall, 2, 1.2},
		{"a refusal whose hint is looked for / x/time's, without a hint", "Refused/quotashare.TryAcquire_search", "Refused/xtime.AllowN", perCall, 2, 1.2},
		{"one in the worst case: every log is full", "Refused/quotashare.TryAcquire_worst", "Refused/xtime.AllowN", perCall, 2, 1.2},
		{"`Admit`, the rule alone, while every class is within its share", "Admitted/quotashare.Admit", "", perCall, 1, 30e-9},
		{"the same, otherwise", "Admitted/quotashare.Admit_loan", "", perCall, 1, 30e-9},
		{"10,000,000 calls in the window / 1,000,000", "GrowthCalls/quotashare/calls=10000000", "GrowthCalls/quotashare/calls=1000000", perCall, 1, 1.1},
		{"their memory", "GrowthCalls/quotashare/calls=10000000", "", perWindow, 1, 64 << 10},
		{"to let the next in, of 100,000 waiters / of 10", "GrowthWaiters/quotashare/waiters=100000", "GrowthWaiters/quotashare/waiters=10", perNext, 1, 1},
	} {
		names := "`" + p.ours + "`"
		if p.theirs != "" {
			names += " / `" + p.theirs + "`"
		}
		cells := []string{p.what, names}
		verdict := ""
		for procs := 1; procs <= 2; procs++ {
			k := key{p.ours, procs, p.unit}
			switch {
			case procs > p.procs:
				cells = append(cells, "")
				continue
			case p.theirs != "":
				cells = append(cells, t.cell(r.ratio(k, p.theirs)))
			default:
				cells = append(cells, t.cell(r.median(k)))
			}
			switch {
			case p.most == 0 || t.last.Center <= p.most:
			case t.last.Lo > p.most:
				verdict = ", **missed**"
			case verdict == "":
				verdict = ", in doubt"
			}
		}
		wanted := ""
		if p.most > 0 {
			unit := ""
			if p.theirs == "" {
				unit = p.unit
			}
			wanted = "≤ " + format(p.most, unit) + verdict
		}
		t.add(append(cells, wanted)...)
	}
	return t.String(), t.err
}

func (r *results) redis() (string, error) {
	var t table
	t.add("", "redisshare", "redis_rate", "ratio", "decisions a second")
	for _, row := range r.rows("Redis") {
		cells := []string{"`" + row + "`"}
		for _, unit := range []string{"us/decision", "us/redis_rate", "ratio", "decisions/s"} {
			cell := ""
			for k := range r.values {
				if k.name == "Redis/"+row && k.unit == unit {
					cell = t.cell(r.median(k))
				}
			}
			cells = append(cells, cell)
		}
		t.add(cells...)
	}
	return t.String(), t.err
}

// A table is one of Markdown. It keeps the first error of its cells.
type table struct {
	text strings.Builder
	last benchmath.Summary // of the latest cell
	err  error
}

func (t *table) add(cells ...string) {
	head := t.text.Len() == 0
	fmt.Fprintf(&t.text, "| %s |\n", strings.Join(cells, " | "))
	if head {
		fmt.Fprintf(&t.text, "|%s\n", strings.Repeat("---|", len(cells)))
	}
}

func (t *table) cell(text string, of benchmath.Summary, err error) string {
	if t.err == nil {
		t.err = err
	}
	t.last = of
	return text
}

func (t *table) String() string { return t.text.String() }

// median returns the median of what was measured, as text too.
func (r *results) median(k key) (string, benchmath.Summary, error) {
	values := r.values[k]
	if len(values) == 0 {
		return "", benchmath.Summary{}, fmt.Errorf("no %s of %s on %d CPUs", k.unit, k.name, k.procs)
	}
	s := summary(values)
	return format(s.Center, k.unit), s, nil
}

// ratio returns the median of the ratios of the rounds, and between what it lies with a confidence of 95 %.
func (r *results) ratio(k key, beside string) (string, benchmath.Summary, error) {
	ours, theirs := r.values[k], r.values[key{beside, k.procs, k.unit}]
	if len(ours) == 0 || len(ours) != len(theirs) {
		return "", benchmath.Summary{}, fmt.Errorf("%d results of %s and %d of %s on %d CPUs: want as many", len(ours), k.name, len(theirs), beside, k.procs)
	}
	ratios := make([]float64, len(ours))
	for i := range ours {
		ratios[i] = ours[i] / theirs[i]
	}
	s := summary(ratios)
	text := format(s.Center, "")
	if !math.IsInf(s.Lo, 0) && !math.IsInf(s.Hi, 0) { // there are too few rounds to say
		text += fmt.Sprintf(" (%s–%s)", format(s.Lo, ""), format(s.Hi, ""))
	}
	return text, s, nil
}

func summary(values []float64) benchmath.Summary {
	sample := benchmath.NewSample(slices.Clone(values), &benchmath.DefaultThresholds) // which sorts what it is given
	return benchmath.AssumeNothing.Summary(sample, 0.95)
}

// format writes a number of a unit, or a ratio, with as many digits as mean something.
func format(v float64, unit string) string {
	switch {
	case unit == perCall || unit == perNext:
		if v < 1e-6 {
			return digits(v*1e9) + " ns"
		}
		return digits(v*1e6) + " µs"
	case unit == perWindow || unit == perWaiter:
		if v < 10_000 {
			return fmt.Sprintf("%.0f B", v)
		}
		return digits(v/1024) + " KiB"
	case strings.HasPrefix(unit, "us/"):
		return digits(v) + " µs"
	case unit == "allocs/op" || unit == "decisions/s":
		return fmt.Sprintf("%.0f", v)
	}
	if v >= 10 { // a ratio
		return digits(v)
	}
	return fmt.Sprintf("%.2f", v)
}

func digits(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}
