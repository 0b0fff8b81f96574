package sharetest_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// A node is an element of a page.
type node struct {
	XMLName xml.Name
	Attrs   []xml.Attr `xml:",any,attr"`
	Text    string     `xml:",chardata"`
	Nodes   []node     `xml:",any"`
}

func (n *node) attr(name string) string {
	for _, a := range n.Attrs {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func (n *node) number(t *testing.T, name string) float64 {
	t.Helper()
	value, err := strconv.ParseFloat(strings.TrimSuffix(n.attr(name), "%"), 64)
	require.NoError(t, err, "%s of %s", name, n.XMLName.Local)
	return value
}

// all returns the elements in the node that have the name and the class. An empty class is any.
func (n *node) all(name, class string) (found []*node) {
	for i := range n.Nodes {
		child := &n.Nodes[i]
		if child.XMLName.Local == name && (class == "" || child.attr("class") == class) {
			found = append(found, child)
		}
		found = append(found, child.all(name, class)...)
	}
	return found
}

// told is all the text in the node.
func (n *node) told() string {
	text := n.Text
	for i := range n.Nodes {
		text += " " + n.Nodes[i].told()
	}
	return strings.Join(strings.Fields(text), " ")
}

func html(t *testing.T, r sharetest.Report, others ...sharetest.Report) string {
	t.Helper()
	var text bytes.Buffer
	require.NoError(t, r.WriteHTML(&text, others...))
	return text.String()
}

// parse parses a page as XML, which is stricter than HTML: each element must be closed.
func parse(t *testing.T, text string) *node {
	t.Helper()
	var root node
	require.NoError(t, xml.Unmarshal([]byte(text), &root))
	require.Equal(t, "html", root.XMLName.Local)
	return &root
}

// sections returns what the page shows of each report.
func sections(t *testing.T, r sharetest.Report, others ...sharetest.Report) []*node {
	t.Helper()
	found := parse(t, html(t, r, others...)).all("section", "")
	require.Len(t, found, 1+len(others))
	return found
}

// heights returns how high a path stands above the base of its chart at each place, in thousandths of the chart.
func heights(t *testing.T, path string) (high [2400]int) {
	t.Helper()
	if path == "" {
		return high
	}
	steps := regexp.MustCompile(`([MhvHV])(\d+|-\d+)(?: (\d+))?`).FindAllStringSubmatch(strings.TrimSuffix(path, "z"), -1)
	x, y, length := 0, 0, 1
	for _, step := range steps {
		length += len(step[0])
		to, err := strconv.Atoi(step[2])
		require.NoError(t, err)
		from := x
		switch step[1] {
		case "M":
			x = to
			from = x
			y, err = strconv.Atoi(step[3])
			require.NoError(t, err)
		case "h":
			x += to
		case "H":
			x = to
		case "v":
			y += to
		case "V":
			y = to
		}
		for i := from; i < x; i++ {
			high[i] = 1000 - y
		}
	}
	require.Len(t, path, length, "the path has steps of other kinds: %s", path)
	return high
}

// story is traffic that makes every number of a report differ from 0: little of it at first, then a rush.
func story(t *testing.T, policy sharetest.Policy, provider int64) sharetest.Report {
	t.Helper()
	quota := quotashare.Quota{Tokens: account, Floors: quotashare.ElasticFloors}
	trace, err := sharetest.Generate(quota, 10*time.Minute, 1,
		people(0.05, 0), people(0.8, 5*time.Minute), scheduled(0.3, 0), hungry(0, 20_000))
	require.NoError(t, err)
	trace.Start = time.Date(2026, time.January, 1, 6, 55, 0, 0, time.UTC)
	report, err := sharetest.Replay(quota, trace, &sharetest.Options{
		Policy: policy, Callers: patient, Provider: sharetest.Provider{Tokens: provider},
	})
	require.NoError(t, err)
	return report
}

// tiny is a report of four minutes, made by hand, whose chart is 1125 tokens high.
func tiny() sharetest.Report {
	r := sharetest.Report{Name: "tiny", Quota: quotashare.Quota{Tokens: 1000, Window: time.Minute}, To: 4 * time.Minute}
	r.Timeline = []sharetest.Moment{
		{At: 0, Used: quotashare.ClassTokens{225, 0, 675}, Kept: quotashare.ClassTokens{0, 100, 0}},
		{At: time.Minute, Used: quotashare.ClassTokens{225, 0, 675}, Kept: quotashare.ClassTokens{0, 100, 0}},
		{At: 2 * time.Minute},
		{At: 3 * time.Minute, Used: quotashare.ClassTokens{450, 225, 225}},
	}
	return r
}

func TestPageNeedsNothingButItself(t *testing.T) {
	text := html(t, story(t, sharetest.ByWindow, 0), story(t, sharetest.Undecided, 0))
	for _, outside := range []string{"http", "//", "src=", "href", "@import", "<script", "<link", "data:", "@font-face"} {
		require.NotContains(t, text, outside)
	}
	root := parse(t, text)
	for _, url := range regexp.MustCompile(`url\(([^)]*)\)`).FindAllStringSubmatch(text, -1) {
		require.Contains(t, text, `id="`+strings.TrimPrefix(url[1], "#")+`"`, "what it refers to is in the page")
	}
	ids := map[string]bool{}
	for _, id := range regexp.MustCompile(` id="([^"]*)"`).FindAllStringSubmatch(text, -1) {
		require.False(t, ids[id[1]], "two elements have the id %s", id[1])
		ids[id[1]] = true
	}
	require.Equal(t, "en", root.attr("lang"))
	require.Equal(t, "Who got the tokens: shares, nothing decides", root.all("title", "")[0].told())
}

func TestPageIsSmallAndAlwaysTheSame(t *testing.T) {
	a, b := story(t, sharetest.ByWindow, 0), story(t, sharetest.Undecided, 0)
	text := html(t, a, b, a)
	require.Equal(t, text, html(t, story(t, sharetest.ByWindow, 0), story(t, sharetest.Undecided, 0), a))
	require.Less(t, len(text), 150_000)
}

func TestPageEscapes(t *testing.T) {
	const name = `<script>alert("1")&amp;'</script>`
	r := tiny()
	r.Name, r.Advice = name, []string{name}
	text := html(t, r)
	require.NotContains(t, text, "<script")
	section := parse(t, text).all("section", "")[0]
	require.Equal(t, name, section.all("h2", "")[0].told())
	require.Contains(t, section.told(), "Advice: "+name)
}

func TestPageTellsTheNumbersOfTheReport(t *testing.T) {
	for name, r := range map[string]sharetest.Report{
		"shares":  story(t, sharetest.ByWindow, 900_000),
		"nothing": story(t, sharetest.Undecided, 0),
		"part":    story(t, sharetest.ByWindow, 0).Between(5*time.Minute, 7*time.Minute),
	} {
		t.Run(name, func(t *testing.T) {
			section := sections(t, r)[0]
			rows := map[string][]string{}
			for _, row := range section.all("tr", "") {
				if head := row.all("th", ""); len(head) == 1 {
					for _, cell := range row.all("td", "") {
						rows[head[0].told()] = append(rows[head[0].told()], cell.told())
					}
				}
			}
			for class, c := range r.Classes {
				for row, want := range map[string]int{
					"tokens": int(c.AdmittedTokens), "calls": c.Offered, "admitted": c.Admitted, "– borrowed": c.Borrowed,
					"held up": c.HeldUp, "gave up": c.GaveUp + c.Dropped, "refusals": c.Refusals(), "429s": c.TooMany,
				} {
					assert.Equal(t, strconv.Itoa(want), strings.ReplaceAll(rows[row][class], ",", ""), "%s of %d", row, class)
				}
				for reason, n := range c.Refused {
					row := rows["– "+strings.ReplaceAll(quotashare.Reason(reason).String(), "_", " ")]
					if n > 0 {
						assert.Equal(t, strconv.Itoa(n), strings.ReplaceAll(row[class], ",", ""))
					}
				}
				assert.Equal(t, fmt.Sprintf("%.1f %%", 100*c.Share), rows["of the quota"][class])
			}
			account := strings.ReplaceAll(section.all("dl", "")[0].told(), ",", "")
			for _, want := range []string{
				fmt.Sprintf("highest window %d of 1000000 tokens at 0", r.HighestWindow),
				fmt.Sprintf("used %.1f %% of the quota", 100*r.Utilisation), fmt.Sprintf("429s %d ", r.TooMany),
				fmt.Sprintf("lent %d tokens", r.Lent), fmt.Sprintf("taken back %d tokens", r.TakenBack),
			} {
				assert.Contains(t, account, want)
			}
			for _, advice := range r.Advice {
				assert.Contains(t, section.told(), advice)
			}
		})
	}
}

func TestPageTellsWaitsAndDelays(t *testing.T) {
	r := tiny()
	c := &r.Classes[background]
	for i := range 100 {
		c.Waits = append(c.Waits, time.Duration(i+1)*time.Second)
	}
	c.GaveUp, c.Dropped, c.ShareDelay, c.ShareDelayAt = 3, 4, 2*time.Second, 90*time.Second
	table := sections(t, r)[0].all("table", "")[0].told()
	require.Contains(t, table, "gave up 0 7 0")
	require.Contains(t, table, "median wait – 50 s – 95th of 100 – 95 s – 99th of 100 – 99 s – longest wait – 100 s –")
	require.Contains(t, table, "share delay 0 s 2.0 s from 1:30 0 s")
}

func TestPageSaysWhatMattersFirst(t *testing.T) {
	waits := []time.Duration{0, 3 * time.Second}
	const nothing = " The provider never answered 429. 0.0 % of the quota was used."
	for want, r := range map[string]sharetest.Report{
		"1,200 of 1,500 interactive calls gave up. 429s from the provider: 24,456. " +
			"95.0 % of the quota was used: batch 95.0 %.": {
			Classes: [quotashare.NumClasses]sharetest.ClassReport{
				interactive: {Offered: 1500, GaveUp: 1100, Dropped: 100, HeldUp: 1300}, batch: {Share: 0.95},
			},
			TooMany: 24456, Utilisation: 0.95,
		},
		"None of 2 interactive calls gave up; 1 had to wait, 3.0 s at the longest." + nothing: {
			Classes: [quotashare.NumClasses]sharetest.ClassReport{
				interactive: {Offered: 2, Admitted: 2, HeldUp: 1, Waits: waits},
			},
		},
		"None of 2 interactive calls had to wait." + nothing: {
			Classes: [quotashare.NumClasses]sharetest.ClassReport{interactive: {Offered: 2, Admitted: 2}},
		},
	} {
		require.Contains(t, sections(t, r)[0].all("p", "")[0].told(), want)
	}
}

func TestPageDrawsTheTimeline(t *testing.T) {
	section := sections(t, tiny())[0]
	areas := section.all("svg", "edge")[0]
	for class, minutes := range map[string][4]int{
		// Tokens of the class and of those below it, in thousandths of 1125.
		"interactive": {200, 200, 0, 400}, "background": {200, 200, 0, 600}, "batch": {800, 800, 0, 800},
	} {
		high := heights(t, areas.all("path", class)[0].attr("d"))
		for x := range high {
			require.Equal(t, minutes[x/600], high[x], "%s at %d", class, x)
		}
	}
	drawn := make([]string, 0, quotashare.NumClasses)
	for _, path := range areas.all("path", "") {
		drawn = append(drawn, path.attr("class"))
	}
	require.Equal(t, []string{"batch", "background", "interactive"}, drawn, "the lower must cover the higher")

	kept := section.all("clipPath", "")[0].all("path", "")[0]
	require.Equal(t, "M0 111v89h1200v-89H2400V111z", kept.attr("d"), "100 tokens, down from the quota")
	require.InDelta(t, 11.1, section.all("line", "quota")[0].number(t, "y1"), 0.001)
}

func TestPageDrawsWhatHappenedWhen(t *testing.T) {
	few := tiny()
	few.Timeline[1].TooMany = [quotashare.NumClasses]int{interactive: 10, batch: 40}
	few.Timeline[2].TooMany[background] = 1
	few.Timeline[3].GaveUp[interactive] = 1
	few.Classes[interactive].TooMany, few.Classes[batch].TooMany, few.Classes[interactive].GaveUp = 10, 40, 1
	many := tiny()
	many.Timeline[0].TooMany[batch] = 100
	many.Classes[batch].TooMany = 100
	shown := sections(t, few, many)

	strips := shown[0].all("svg", "strip")
	require.Len(t, strips, 2, "nothing was refused, so there is no strip of it")
	gaveUp := heights(t, strips[0].all("path", "interactive")[0].attr("d"))
	require.Equal(t, slices.Repeat([]int{1000}, 600), gaveUp[1800:])
	require.Equal(t, slices.Repeat([]int{0}, 1800), gaveUp[:1800])
	tooMany := heights(t, strips[1].all("path", "batch")[0].attr("d"))
	require.Equal(t, 500, tooMany[600], "50 of what the other report has 100 of")
	require.Equal(t, 100, heights(t, strips[1].all("path", "interactive")[0].attr("d"))[600])
	require.Equal(t, 62, heights(t, strips[1].all("path", "background")[0].attr("d"))[1200], "one of 100 is seen")
	require.Equal(t, 1000, heights(t, shown[1].all("svg", "strip")[0].all("path", "batch")[0].attr("d"))[0])
	captions := shown[0].all("figure", "")[0].all("p", "")
	require.Contains(t, captions[1].told(), ": interactive 10, batch 40 (full height: 100 in 60 s)")
	require.Contains(t, captions[2].told(), ": none")
}

func TestPageShowsWhereTheQuotaIsPassed(t *testing.T) {
	r := story(t, sharetest.Undecided, 1.5*account)
	require.Greater(t, r.HighestWindow, int64(1.3*account))
	shown := sections(t, tiny(), r)
	for _, section := range shown {
		for _, path := range section.all("svg", "edge")[0].all("path", "") {
			high := heights(t, path.attr("d"))
			require.LessOrEqual(t, slices.Max(high[:]), 1000)
			require.GreaterOrEqual(t, slices.Min(high[:]), 0)
		}
	}
	quota := 10 * (100 - shown[1].all("line", "quota")[0].number(t, "y1"))
	batches := heights(t, shown[1].all("svg", "edge")[0].all("path", "batch")[0].attr("d"))
	require.Greater(t, float64(slices.Max(batches[:])), 1.3*quota)
}

func TestPageTellsWhatOnePointsAt(t *testing.T) {
	r := story(t, sharetest.ByWindow, 0)
	require.Len(t, r.Timeline, 480)
	bins := sections(t, r)[0].all("svg", "bins")[0].all("rect", "")
	require.Len(t, bins, 120)
	for i, bin := range bins {
		fullest := slices.MaxFunc(r.Timeline[4*i:4*i+4], func(a, b sharetest.Moment) int {
			total := func(m sharetest.Moment) int64 { return m.Used[interactive] + m.Used[background] + m.Used[batch] }
			return int(total(a) - total(b))
		})
		told := strings.ReplaceAll(bin.told(), ",", "")
		require.Contains(t, told, r.Start.Add(fullest.At).Format("15:04:05: "))
		require.Contains(t, told, fmt.Sprint("batch ", fullest.Used[batch], "; kept free: "))
		require.InDelta(t, 20*i, bin.number(t, "x"), 0)
		require.InDelta(t, 20, bin.number(t, "width"), 0)
	}
}

func TestPageHasOneScale(t *testing.T) {
	small, large := tiny(), tiny()
	large.Quota.Tokens, large.To = 2000, 8*time.Minute
	for i := range large.Timeline {
		large.Timeline[i].At *= 2
	}
	shown := sections(t, large, small)
	paths := func(section *node) [2400]int {
		return heights(t, section.all("svg", "edge")[0].all("path", "batch")[0].attr("d"))
	}
	a, b := paths(shown[1]), paths(shown[0])
	require.Equal(t, 400, a[0], "the same 900 tokens")
	require.Equal(t, 400, b[0])
	require.Equal(t, 400, a[599], "for two minutes")
	require.Equal(t, 0, a[600])
	require.Equal(t, 400, b[1199], "for four")
	require.Equal(t, 0, b[1200])
	require.Equal(t, 0, a[1200], "its interval is over")
	require.InDelta(t, 50, shown[1].all("rect", "plot")[0].number(t, "width"), 0)
}

func TestPageTellsTheTime(t *testing.T) {
	ticks := func(start time.Time, from, to time.Duration) (told []string) {
		r := sharetest.Report{
			Quota: quotashare.Quota{Tokens: 1}, Start: start, From: from, To: to, Timeline: []sharetest.Moment{{At: from}},
		}
		for _, text := range sections(t, r)[0].all("svg", "chart")[0].all("text", "") {
			if text.attr("y") == "100%" {
				told = append(told, text.told())
			}
		}
		return told
	}
	start := time.Date(2026, time.January, 1, 6, 20, 0, 0, time.UTC)
	const day = 24 * time.Hour
	require.Equal(t, []string{"06:30", "06:45", "07:00", "07:15"}, ticks(start, 0, time.Hour))
	require.Equal(t, []string{"06:58", "07:00", "07:02"}, ticks(start, 38*time.Minute, 49*time.Minute)[:3])
	require.Equal(t, []string{"06:20:00", "06:20:01"}, ticks(start, 0, time.Second))
	require.Equal(t, []string{"23:00", "00:00", "01:00", "02:00"}, ticks(start, 16*time.Hour, 20*time.Hour))
	require.Equal(t, []string{"12:00", "Jan 2", "12:00"}, ticks(start, 0, 36*time.Hour))
	require.Equal(t, []string{"Jan 5", "Jan 9", "Jan 13", "Jan 17", "Jan 21"}, ticks(start, 0, 21*day))
	require.Equal(t, []string{"0 min", "15", "30", "45", "60"}, ticks(time.Time{}, 0, time.Hour))
	require.Equal(t, []string{"0:10", "0:15", "0:20"}, ticks(time.Time{}, 10*time.Second, 23*time.Second))
	require.Empty(t, ticks(start, 100*time.Millisecond, 200*time.Millisecond))
}

func TestPageTellsTokens(t *testing.T) {
	for quota, want := range map[int64][]string{
		1:             {"0", "1"},
		1000:          {"0", "200", "400", "600", "800", "1 k"},
		account:       {"0", "200 k", "400 k", "600 k", "800 k", "1 M"},
		1_500_000:     {"0", "500 k", "1 M", "1.5 M"},
		math.MaxInt64: {"0", "2 E", "4 E", "6 E", "8 E", "10 E"},
	} {
		r := tiny()
		r.Quota.Tokens, r.Timeline = quota, r.Timeline[2:3]
		var told []string
		for _, text := range sections(t, r)[0].all("svg", "chart")[0].all("text", "") {
			if text.attr("text-anchor") == "end" && text.attr("class") == "" {
				told = append(told, text.told())
				require.GreaterOrEqual(t, text.number(t, "y"), 0.0)
				require.LessOrEqual(t, text.number(t, "y"), 100.0)
			}
		}
		require.Equal(t, want, told)
	}
}

func TestPageLabelsWhatHasRoom(t *testing.T) {
	labels := func(r sharetest.Report) (found []string) {
		for _, text := range sections(t, r)[0].all("text", "on") {
			if text.attr("text-anchor") == "middle" {
				found = append(found, text.told())
			}
		}
		return found
	}
	require.Equal(t, []string{"interactive", "batch", "idle", "kept free"}, labels(tiny()), "background is too short")
	r := tiny()
	r.Timeline[0].Kept[background], r.Timeline[2].Used = 20, r.Timeline[3].Used
	require.Equal(t, []string{"interactive", "background", "batch", "idle"}, labels(r), "what is kept is too low")
}

func TestPageOfAnyReport(t *testing.T) {
	whole := story(t, sharetest.ByWindow, 0)
	instant := tiny()
	instant.To = 0
	for name, r := range map[string]sharetest.Report{
		"zero": {}, "part": whole.Between(time.Minute, 3*time.Minute), "nothing": whole.Between(time.Minute, time.Minute),
		"less than a moment": whole.Between(1, 2), "instant": instant,
	} {
		t.Run(name, func(t *testing.T) {
			text := html(t, r, whole)
			for _, broken := range []string{"NaN", "Inf", "ZgotmplZ", "%!", "<no value>"} {
				require.NotContains(t, text, broken)
			}
			shown := parse(t, text).all("section", "")
			require.Len(t, shown[0].all("svg", "chart"), min(len(r.Timeline), 1))
			require.NotEmpty(t, shown[0].all("h2", "")[0].told())
			require.Len(t, shown[1].all("svg", "chart"), 1)
		})
	}
}

func TestPageSummarisesItsCharts(t *testing.T) {
	chart := sections(t, story(t, sharetest.ByWindow, 0))[0].all("svg", "chart")[0]
	require.Equal(t, "img", chart.attr("role"))
	require.Regexp(t, `^Tokens in the window from 06:55:00 to 07:05:00, with a quota of 1,000,000\. `+
		`The most: interactive [\d,]+, background [\d,]+, batch [\d,]+, and [\d,]+ in all\.$`, chart.attr("aria-label"))
}

// A full writer fails after so many bytes.
type full int

var errFull = errors.New("full")

func (f full) Write(p []byte) (int, error) { return min(len(p), int(f)), errFull }

func TestPageReturnsTheErrorOfTheWriter(t *testing.T) {
	require.ErrorIs(t, tiny().WriteHTML(full(0)), errFull)
	require.ErrorIs(t, tiny().WriteHTML(full(100), tiny()), errFull)
}
