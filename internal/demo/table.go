package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/exp/stats"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/internal/sim"
)

// tell writes what came of a run: its heading, a table for each act, and what happened to the people.
func (s *story) tell(out io.Writer, p policy, history *sim.History) error {
	fmt.Fprintf(out, "\n%s\n\n", p.heading)
	// The width is above that of any cell, so that the columns of all tables stand below each other.
	table := tabwriter.NewWriter(out, 11, 0, 1, ' ', tabwriter.AlignRight)
	for i, a := range s.acts {
		if i > 0 {
			fmt.Fprintln(table)
		}
		writeAct(table, a.name, history.Report(a.from, a.to))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	background := history.Report(0, history.Length()).Classes[quotashare.Background]
	_, err := fmt.Fprintf(out, "\n   The people waiting: %s\n   Of %s background calls %s gave up.\n", s.people(history),
		count(int64(background.Offered)), count(int64(background.GaveUp)))
	return err
}

func writeAct(w io.Writer, name string, r sim.Report) {
	// The table is right-aligned but for the names, which are padded here.
	const row = "%-18s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n"
	fmt.Fprintf(w, row, name, "tokens", "of quota", "calls", "refusals", "gave up", "median wait", "99th", "longest")
	tokens := int64(0)
	for class, c := range r.Classes {
		tokens += c.AdmittedTokens
		median, most, longest := "-", "-", "-"
		if len(c.Waits) > 0 {
			q := stats.Quantiles(nanoseconds(c.Waits), 0.5, 0.99, 1)
			median, most, longest = wait(time.Duration(q[0])), wait(time.Duration(q[1])), wait(time.Duration(q[2]))
		}
		fmt.Fprintf(w, row, "  "+quotashare.Class(class).String(), millions(c.AdmittedTokens), percent(c.Share),
			count(int64(c.Offered)), count(int64(c.Refused+c.Dropped)), count(int64(c.GaveUp)), median, most, longest)
	}
	fmt.Fprintf(w, "%-18s\t%s\t%s\t   429 from the provider: %s; highest window: %s tokens\n", "  account",
		millions(tokens), percent(r.Utilisation), count(int64(r.TooMany)), count(r.HighestWindow))
}

func nanoseconds(waits []time.Duration) []float64 {
	ns := make([]float64, len(waits))
	for i, w := range waits {
		ns[i] = float64(w)
	}
	return ns
}

// people says in a sentence what happened to the interactive calls.
func (s *story) people(history *sim.History) string {
	all := history.Report(0, history.Length()).Classes[quotashare.Interactive]
	if all.GaveUp > 0 {
		var parts []string
		for _, a := range s.acts {
			c := history.Report(a.from, a.to).Classes[quotashare.Interactive]
			parts = append(parts, fmt.Sprintf("%s, %s of %s (%.0f %%)",
				a.when, count(int64(c.GaveUp)), count(int64(c.Offered)), 100*float64(c.GaveUp)/float64(max(c.Offered, 1))))
		}
		return "many gave up: " + strings.Join(parts, "; ") + "."
	}
	waited := 0
	for _, d := range all.Waits {
		if d > 0 {
			waited++
		}
	}
	if waited == 0 {
		return fmt.Sprintf("nobody gave up, and nobody waited: all %s calls were admitted at once.", count(int64(all.Admitted)))
	}
	return fmt.Sprintf("nobody gave up; %s of %s calls waited, for %s at the longest.",
		count(int64(waited)), count(int64(all.Admitted)), wait(all.Wait(1)))
}

// wait returns a duration in the precision that a person cares for.
func wait(d time.Duration) string {
	switch {
	case d == 0:
		return "0 s"
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", math.Ceil(float64(d)/float64(time.Millisecond)))
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 100*time.Second:
		return fmt.Sprintf("%.0f s", d.Seconds())
	}
	return fmt.Sprintf("%.1f min", d.Minutes())
}

func percent(fraction float64) string { return fmt.Sprintf("%.1f %%", 100*fraction) }

func millions(tokens int64) string { return fmt.Sprintf("%.1f M", float64(tokens)/1e6) }

// count returns a number with a comma before each three digits.
func count(n int64) string {
	digits := strconv.FormatInt(n, 10)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
