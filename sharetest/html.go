package sharetest

import (
	"bytes"
	_ "embed" // for page.html
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/quotashare/quotashare"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"class":   func(index int) quotashare.Class { return quotashare.Class(index) },
	"clock":   Report.clock,
	"number":  count[int],
	"tokens":  count[int64],
	"percent": percent,
	"seconds": seconds,
	"gaveUp":  ClassReport.lost,
	"words":   func(r quotashare.Reason) string { return strings.ReplaceAll(r.String(), "_", " ") },
	"wait": func(c ClassReport, fraction float64) string {
		if len(c.Waits) == 0 {
			return "–"
		}
		return seconds(c.Wait(fraction))
	},
}).Parse(pageText))

// WriteHTML writes the report, and others below it, as one HTML page for people. It shows of each a chart of the tokens
// in the window over time, who gave up and was refused when, the numbers of String and more, and the advice. The charts
// of a page have the same scales, in tokens and in time, so that they can be compared. The page needs nothing but
// itself: no network, no script, no font.
//
// The same reports give the same page, byte for byte, on every machine. Names and advice are escaped. A report without
// a Timeline, as the zero Report, has no chart. The error is that of w.
func (r Report) WriteHTML(w io.Writer, others ...Report) error {
	reports := append([]Report{r}, others...)
	scale, bins := newScale(reports)
	names := make([]string, len(reports))
	sections := make([]section, len(reports))
	for i := range reports {
		sections[i] = scale.section(i, &reports[i], bins[i])
		names[i] = sections[i].Name
	}
	var text bytes.Buffer
	if err := page.Execute(&text, map[string]any{"Names": strings.Join(names, ", "), "Sections": sections}); err != nil {
		return err
	}
	_, err := text.WriteTo(w)
	return err
}

// What the template shows. Positions are percentages of the chart.
type (
	section struct {
		Report
		ID      int
		Outcome []string
		Reasons []quotashare.Reason // for which calls were refused
		Chart   *chart              // nil: there is nothing to draw
	}
	chart struct {
		Summary          string
		Areas            []area // the highest, which stands behind, comes first
		Kept             string // a path
		End              string // of the interval
		Quota, QuotaText string
		Labels           []label
		Tokens, Times    []label
		Bins             []bin
		Strips           []strip
	}
	area  struct{ Class, Path string }
	label struct{ X, Y, Text string }
	strip struct {
		Name, Counts, Most string
		Areas              []area
	}
)

// The size of a chart in the units of its paths. The page stretches it.
const width, height = 5 * moments, 1000

// A scale is what the charts of a page have in common.
type scale struct {
	length time.Duration    // of the time axis
	tokens float64          // at the top of the token axis
	bin    time.Duration    // the length of a bin
	most   [len(events)]int // the events of a kind in a bin
}

// A bin is a few moments in a row: a bar that is wide enough on a phone.
type bin struct {
	X, Width int
	Text     string // for whoever points at it
	events   [len(events)][quotashare.NumClasses]int
}

const maxBins = 120

// events are what the strips below a chart show.
var events = [...]struct {
	name   string
	total  func(*ClassReport) int
	moment func(*Moment) [quotashare.NumClasses]int
}{
	{
		"Gave up, out of patience",
		func(c *ClassReport) int { return c.GaveUp },
		func(m *Moment) [quotashare.NumClasses]int { return m.GaveUp },
	},
	{
		"429s from the provider",
		func(c *ClassReport) int { return c.TooMany },
		func(m *Moment) [quotashare.NumClasses]int { return m.TooMany },
	},
	{
		"Refusals (a call may get many)",
		func(c *ClassReport) int { return c.Refusals() },
		func(m *Moment) [quotashare.NumClasses]int { return m.Refused },
	},
}

// newScale returns the scale of the reports of a page, and the bins of each.
func newScale(reports []Report) (*scale, [][]bin) {
	s := &scale{length: 1}
	step, top := time.Duration(1), 1.0
	for i := range reports {
		r := &reports[i]
		s.length = max(s.length, r.To-r.From)
		top = max(top, float64(r.Quota.Tokens))
		for j := range r.Timeline {
			top = max(top, float64(sum(r.Timeline[j].Used)))
		}
		if len(r.Timeline) > 1 {
			step = max(step, r.Timeline[1].At-r.Timeline[0].At)
		}
	}
	s.tokens = top * 1.125 // so that the quota has its label above it
	s.bin = step * (1 + (s.length-1)/step/maxBins)
	bins := make([][]bin, len(reports))
	for i := range reports {
		bins[i] = s.bins(&reports[i])
		for _, b := range bins[i] {
			for kind, n := range b.events {
				s.most[kind] = max(s.most[kind], sum(n))
			}
		}
	}
	return s, bins
}

func (s *scale) bins(r *Report) (bins []bin) {
	for rest := r.Timeline; len(rest) > 0; {
		first, next := rest[0], r.To
		n := slices.IndexFunc(rest, func(m Moment) bool { return m.At >= first.At+s.bin })
		if n >= 0 {
			next = rest[n].At
		} else {
			n = len(rest)
		}
		b := bin{X: s.x(r, first.At)}
		b.Width = s.x(r, next) - b.X
		fullest := first
		for _, m := range rest[:n] {
			if sum(m.Used) > sum(fullest.Used) {
				fullest = m
			}
			for kind := range events {
				for class, calls := range events[kind].moment(&m) {
					b.events[kind][class] += calls
				}
			}
		}
		b.Text = r.clock(fullest.At) + ": " + perClass(fullest.Used, count) + "; kept free: " + count(sum(fullest.Kept))
		bins, rest = append(bins, b), rest[n:]
	}
	return bins
}

// x and y round to whole numbers at once, so that no machine can draw another picture than the others.
func (s *scale) x(r *Report, at time.Duration) int { return scaled(at-r.From, s.length, width) }
func (s *scale) y(tokens int64) int                { return height - scaled(float64(tokens), s.tokens, height) }

// scaled returns what n is of size, if it is so much of most.
func scaled[T ~int | ~int64 | ~float64](n, most T, size int) int {
	return min(max(int(math.Round(float64(n)/float64(most)*float64(size))), 0), size)
}

// part returns n as a percentage of whole, for a position.
func part(n, whole int) string {
	return strconv.FormatFloat(100*float64(n)/float64(whole), 'f', 2, 64) + "%"
}

// unbroken keeps a number and its unit on one line.
func unbroken(text string) string { return strings.ReplaceAll(text, " ", "\u00a0") }

// perClass tells a number of each class that has one.
func perClass[T int | int64 | float64](n [quotashare.NumClasses]T, tell func(T) string) string {
	var told []string
	for class, n := range n {
		if n > 0 {
			told = append(told, quotashare.Class(class).String()+" "+tell(n))
		}
	}
	if told == nil {
		return "none"
	}
	return strings.Join(told, ", ")
}

func (s *scale) section(id int, r *Report, bins []bin) section {
	v := section{Report: *r, ID: id, Outcome: r.outcome()}
	if v.Name == "" {
		v.Name = r.Policy.String()
	}
	for reason := range quotashare.Reason(quotashare.NumReasons) {
		if slices.ContainsFunc(r.Classes[:], func(c ClassReport) bool { return c.Refused[reason] > 0 }) {
			v.Reasons = append(v.Reasons, reason)
		}
	}
	if len(r.Timeline) > 0 {
		v.Chart = s.chart(r, bins)
	}
	return v
}

// outcome says in sentences what matters most.
func (r *Report) outcome() []string {
	c := &r.Classes[quotashare.Interactive]
	people := fmt.Sprintf("None of %s interactive calls had to wait.", count(c.Offered))
	switch gaveUp := c.lost(); {
	case gaveUp > 0:
		people = fmt.Sprintf("%s of %s interactive calls gave up.", count(gaveUp), count(c.Offered))
	case c.HeldUp > 0:
		people = fmt.Sprintf("None of %s interactive calls gave up; %s had to wait, %s at the longest.",
			count(c.Offered), count(c.HeldUp), unbroken(seconds(c.Wait(1))))
	}
	percent := func(part float64) string { return unbroken(percent(part)) }
	provider, used := "The provider never answered 429.", percent(r.Utilisation)+" of the quota was used"
	if r.TooMany > 0 {
		provider = fmt.Sprintf("429s from the provider: %s.", count(r.TooMany))
	}
	var shares [quotashare.NumClasses]float64
	for class, c := range r.Classes {
		shares[class] = c.Share
	}
	if r.Utilisation > 0 {
		used += ": " + perClass(shares, percent)
	}
	return []string{people, provider, used + "."}
}

func (s *scale) chart(r *Report, bins []bin) *chart {
	// Between two edges is a band. From the bottom up these are the classes, what is idle, and what is kept free.
	bands := [...]string{"interactive", "background", "batch", "idle", "kept free"}
	const kept = len(bands) - 1
	var edges [len(bands) + 1][]int
	var most quotashare.ClassTokens
	var xs []int
	quota := s.y(r.Quota.Tokens)
	for i := range r.Timeline {
		m := &r.Timeline[i]
		xs = append(xs, s.x(r, m.At))
		edges[0] = append(edges[0], height)
		total := int64(0)
		for class, used := range m.Used {
			total += used
			edges[class+1] = append(edges[class+1], s.y(total))
			most[class] = max(most[class], used)
		}
		edges[kept] = append(edges[kept], s.y(r.Quota.Tokens-sum(m.Kept)))
		edges[kept+1] = append(edges[kept+1], quota)
	}
	end := s.x(r, r.To)
	xs = append(xs, end)
	c := &chart{
		Summary: fmt.Sprintf("Tokens in the window from %s to %s, with a quota of %s. The most: %s, and %s in all.",
			r.clock(r.From), r.clock(r.To), count(r.Quota.Tokens), perClass(most, count), count(r.HighestWindow)),
		Kept:      outline(xs, edges[kept], quota),
		End:       part(end, width),
		Quota:     part(quota, height),
		QuotaText: "quota " + count(r.Quota.Tokens),
		Tokens:    s.tokenTicks(),
		Times:     s.timeTicks(r),
		Bins:      bins,
		Strips:    s.strips(r, bins),
	}
	for class := quotashare.NumClasses - 1; class >= 0; class-- {
		c.Areas = append(c.Areas, area{bands[class], outline(xs, edges[class+1], height)})
	}
	for i, name := range bands {
		if x, y, ok := roomiest(xs, edges[i], edges[i+1]); ok {
			c.Labels = append(c.Labels, label{X: part(x, width), Y: part(y, height), Text: name})
		}
	}
	return c
}

// outline returns the path of bars that stand on a base, or hang from it. Bar i is from xs[i] to xs[i+1], and ends at
// ys[i]. The path is empty if all bars are.
func outline(xs, ys []int, base int) string {
	path := fmt.Appendf(nil, "M%d %d", xs[0], base)
	x, y, empty := xs[0], base, true
	for i := range ys {
		if ys[i] == y {
			continue
		}
		if xs[i] > x {
			path = fmt.Appendf(path, "h%d", xs[i]-x)
		}
		path = fmt.Appendf(path, "v%d", ys[i]-y)
		x, y, empty = xs[i], ys[i], false
	}
	if empty {
		return ""
	}
	return string(fmt.Appendf(path, "H%dV%dz", xs[len(ys)], base))
}

// roomiest returns the middle of the highest box between two edges that is wide enough for a label on a phone, and
// whether it is high enough for one.
func roomiest(xs, below, above []int) (x, y int, ok bool) {
	room := height / 14
	for i := range below {
		floor, ceiling := height, 0
		for j := i; j < len(below) && floor-ceiling > room; j++ {
			floor, ceiling = min(floor, below[j]), max(ceiling, above[j])
			if xs[j+1]-xs[i] >= 2*width/7 && floor-ceiling > room {
				room = floor - ceiling
				x, y, ok = (xs[i]+xs[j+1])/2, (floor+ceiling)/2, true
			}
		}
	}
	return x, y, ok
}

func (s *scale) strips(r *Report, bins []bin) (strips []strip) {
	for kind, e := range events {
		var total [quotashare.NumClasses]int
		for class := range r.Classes {
			total[class] = e.total(&r.Classes[class])
		}
		v := strip{Name: e.name, Counts: perClass(total, count)}
		var edges [quotashare.NumClasses][]int
		var xs []int
		for _, b := range bins {
			xs = append(xs, b.X)
			y := height
			for class, n := range b.events[kind] {
				if n > 0 { // however few, they are seen
					y = max(y-max(scaled(n, s.most[kind], height), height/16), 0)
				}
				edges[class] = append(edges[class], y)
			}
		}
		xs = append(xs, s.x(r, r.To))
		for class := quotashare.NumClasses - 1; class >= 0; class-- {
			if path := outline(xs, edges[class], height); path != "" {
				v.Most = "full height: " + count(s.most[kind]) + " in " + unbroken(seconds(s.bin))
				v.Areas = append(v.Areas, area{quotashare.Class(class).String(), path})
			}
		}
		strips = append(strips, v)
	}
	return strips
}

func (s *scale) tokenTicks() (ticks []label) {
	step := 1.0
	for i := 0; s.tokens/step > 6; i++ {
		step *= [...]float64{2, 2.5, 2}[i%3] // 1, 2, 5, 10, 20
	}
	for i := range 1 + int(s.tokens/step) {
		tokens, unit := float64(i)*step, ""
		y := height - scaled(tokens, s.tokens, height)
		for _, next := range []string{" k", " M", " G", " T", " P", " E"} {
			if tokens >= 1000 {
				tokens, unit = tokens/1000, next
			}
		}
		ticks = append(ticks, label{Y: part(y, height), Text: fmt.Sprint(tokens) + unit})
	}
	return ticks
}

// timeTicks returns so few ticks that their labels fit on a phone: at round times of day, if the trace has them.
func (s *scale) timeTicks(r *Report) (ticks []label) {
	const second, minute, hour, day = time.Second, time.Minute, time.Hour, 24 * time.Hour
	step := day
	for _, shorter := range []time.Duration{
		12 * hour, 6 * hour, 3 * hour, 2 * hour, hour, 30 * minute, 15 * minute, 10 * minute, 5 * minute, 2 * minute, minute,
		30 * second, 15 * second, 10 * second, 5 * second, 2 * second, second,
	} {
		if s.length/shorter <= 5 {
			step = shorter
		}
	}
	for s.length/step > 5 {
		step *= 2
	}
	midnight := time.Duration(0)
	if !r.Start.IsZero() {
		y, m, d := r.Start.Date()
		midnight = time.Date(y, m, d, 0, 0, 0, 0, r.Start.Location()).Sub(r.Start)
	}
	for at := (r.From-midnight+step-1)/step*step + midnight; at <= r.To; at += step {
		text := r.clock(at)
		if step >= minute {
			clock := r.Start.Add(at)
			text = strings.TrimSuffix(text, ":00")
			switch {
			case r.Start.IsZero() && len(ticks) == 0:
				text += " min"
			case r.Start.IsZero():
			case s.length > day && clock.Format("15:04") == "00:00":
				text = clock.Format("Jan 2")
			default:
				text = clock.Format("15:04")
			}
		}
		ticks = append(ticks, label{X: part(s.x(r, at), width), Text: text})
	}
	return ticks
}
