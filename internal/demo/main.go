// Command demo shows what a Window changes: one night and one morning of an account, in virtual time, once with nothing
// deciding, once by the default floors, and once by elastic ones. It writes a table of each, and all of them as a page.
//
//	go run ./internal/demo [-seed N] [-page FILE] [-conv FILE -code FILE]
//
// With -conv and -code, which are recordings as sharetest.ReadAzure reads them, the traffic is theirs: conv as
// interactive, code as background, and an eval suite that never ends beside them.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// account is what the account allows in a minute, in tokens.
const account = 1_000_000

func run(args []string, out, usage io.Writer) error {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // main tells the error, once
	conv := flags.String("conv", "", "recorded `file` to replay as interactive traffic; needs -code")
	code := flags.String("code", "", "recorded `file` to replay as background traffic; needs -conv")
	page := flags.String("page", "", "`file` to write the page to")
	seed := flags.Uint64("seed", 1, "selects the random numbers: one seed always gives the same output")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		flags.SetOutput(usage)
		flags.Usage()
		return nil
	} else if err != nil {
		return err
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected argument %q: want flags only", flags.Arg(0))
	case (*conv == "") != (*code == ""):
		return errors.New("-conv and -code go together: want both files, or neither")
	}
	var s story
	var err error
	if *conv != "" {
		s, err = recorded(*conv, *code, *seed)
	} else {
		s, err = night(*seed)
	}
	if err != nil {
		return err
	}
	reports, err := s.replay(*seed)
	if err != nil {
		return err
	}
	s.tell(out, reports)
	if *page == "" {
		return nil
	}
	if err := writePage(*page, reports); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nThe same as a picture, to open in a browser: %s\n", *page)
	return nil
}

// A story is some traffic, and how to tell what came of it.
type story struct {
	title  string
	shares quotashare.Fractions
	trace  sharetest.Trace
	acts   []act
}

// An act is a part of a story.
type act struct {
	name     string
	when     string // "at night", as part of a sentence
	from, to time.Duration
}

// suite is the eval suite. 4,000 fixtures are so many that it does not end before the story does, however much it is
// given.
func suite(count int) sharetest.Suite {
	return sharetest.Suite{
		Count:       count,
		Concurrency: 50,
		Tokens:      sharetest.Completions.WithMean(16_000),
		Durations:   sharetest.Durations{4 * time.Second, 6 * time.Second, 8 * time.Second, 10 * time.Second, 20 * time.Second},
	}
}

// night is the story of the pattern: an eval suite at night, beside light live traffic, and then the morning.
func night(seed uint64) (story, error) {
	const dawn, end = 40 * time.Minute, time.Hour
	people := sharetest.Flow{
		Class: quotashare.Interactive, Load: 0.05, Durations: sharetest.Durations{time.Second, 3 * time.Second, 8 * time.Second},
	}
	scheduled := sharetest.Flow{
		Class: quotashare.Background, Load: 0.02, Durations: sharetest.Durations{2 * time.Second, 5 * time.Second, 12 * time.Second},
	}
	atDawn := func(flow sharetest.Flow, load float64) sharetest.Flow {
		flow.From, flow.Load = dawn, load
		return flow
	}
	trace, err := sharetest.Generate(quotashare.Quota{Tokens: account}, end, seed,
		people, atDawn(people, 0.50), scheduled, atDawn(scheduled, 0.17), suite(4000))
	trace.Start = time.Date(2026, time.January, 1, 6, 20, 0, 0, time.UTC)
	return story{
		title: "An account of 1,000,000 tokens a minute. At night 4,000 eval fixtures start at concurrency 50, beside\n" +
			"light live traffic. After 40 minutes, at 07:00, the morning rush begins: interactive calls go from 5 %\n" +
			"of the quota to 55 %, background to 19 %, and the suite still wants all it can get. People give up\n" +
			"after 10 s. Waits are of the calls that were admitted. All of it is in virtual time.",
		shares: quotashare.DefaultShares,
		trace:  trace,
		acts: []act{
			{"night, 40 min", "at night", 0, dawn},
			{"morning, 20 min", "in the morning", dawn, end},
		},
	}, err
}

// recorded is the story of two recordings of the same hour.
func recorded(convFile, codeFile string, seed uint64) (story, error) {
	conv, err := readTrace(convFile, quotashare.Interactive)
	if err != nil {
		return story{}, err
	}
	code, err := readTrace(codeFile, quotashare.Background)
	if err != nil {
		return story{}, err
	}
	trace := sharetest.Merge(conv, code)
	length := trace.Length
	evals, err := sharetest.Generate(quotashare.Quota{Tokens: account}, length, seed, suite(0))
	return story{
		title: "An account of 1,000,000 tokens a minute, and recorded traffic: conversations are interactive, code\n" +
			"completions are background, and beside them runs an eval suite at concurrency 50 that never ends. People\n" +
			"give up after 10 s. Waits are of the calls that were admitted. All of it is in virtual time.",
		shares: quotashare.Fractions{
			quotashare.Interactive: 0.80, quotashare.Background: 0.10, quotashare.Batch: 0.10,
		},
		trace: sharetest.Merge(trace, evals),
		acts:  []act{{fmt.Sprintf("all, %.0f min", length.Minutes()), "in all", 0, length}},
	}, err
}

func readTrace(name string, class quotashare.Class) (sharetest.Trace, error) {
	file, err := os.Open(name)
	if err != nil {
		return sharetest.Trace{}, err
	}
	defer file.Close()
	return sharetest.ReadAzure(name, file, class)
}

// replay replays the story by each of three ways to decide.
func (s *story) replay(seed uint64) ([]sharetest.Report, error) {
	var reports []sharetest.Report
	for _, way := range []struct {
		name   string
		policy sharetest.Policy
		floors quotashare.Fractions
	}{
		{"Nothing decides", sharetest.Undecided, quotashare.Fractions{}},
		{"Shares with the default floors", sharetest.ByWindow, quotashare.Fractions{}},
		{"Shares with elastic floors", sharetest.ByWindow, quotashare.ElasticFloors},
	} {
		quota := quotashare.Quota{Tokens: account, Shares: s.shares, Floors: way.floors}
		report, err := sharetest.Replay(quota, s.trace, &sharetest.Options{
			Name:   way.name,
			Policy: way.policy,
			Seed:   seed,
			Callers: [quotashare.NumClasses]sharetest.Callers{
				quotashare.Interactive: {Patience: 10 * time.Second},
			},
		})
		if err != nil {
			return nil, err
		}
		reports = append(reports, report)
	}
	return reports, nil
}

// tell writes the story: a heading and a table for each act of each report, and what happened to the people.
func (s *story) tell(out io.Writer, reports []sharetest.Report) {
	fmt.Fprintln(out, s.title)
	for i, r := range reports {
		fmt.Fprintf(out, "\n%d. %s\n", i+1, heading(r))
		for _, a := range s.acts {
			part := r.Between(a.from, a.to)
			part.Name, part.Advice = a.name, nil // which is told below, once
			fmt.Fprintf(out, "\n%v", part)
		}
		background := r.Classes[quotashare.Background]
		fmt.Fprintf(out, "\nThe people waiting: %s\nOf %d background calls %d gave up.\n",
			s.people(r), background.Offered, background.GaveUp)
		for _, advice := range r.Advice {
			fmt.Fprintf(out, "Stats.Advice says: %s.\n", advice)
		}
	}
}

// heading says what decides. What it says of the floors is read off the quota, so that it stays true for other shares.
func heading(r sharetest.Report) string {
	name := strings.ToUpper(r.Name)
	kept := quotaPercent(r.Quota.Limits(quotashare.Interactive).Floor)
	switch {
	case r.Policy == sharetest.Undecided:
		return name + ": every call goes to the provider, which answers 429 when the account is full;\n" +
			"   whoever gets one tries again after 0.5 s, 1 s, 2 s, ... 8 s."
	case r.Quota.Floors == quotashare.ElasticFloors:
		return name + ": " + kept + " of the account is kept free beyond what people lately asked for;\n" +
			"   batch borrows what is idle, and gives it back within a window."
	}
	return name + ": " + kept + " of the account is always kept free for people, so that no loan\n" +
		"   is ever in their way; batch gets at most " + quotaPercent(r.Quota.Limits(quotashare.Batch).Largest) + ", however quiet it is."
}

// people says in a sentence what happened to the interactive calls.
func (s *story) people(r sharetest.Report) string {
	all := r.Classes[quotashare.Interactive]
	switch {
	case all.GaveUp > 0:
		var parts []string
		for _, a := range s.acts {
			c := r.Between(a.from, a.to).Classes[quotashare.Interactive]
			parts = append(parts, fmt.Sprintf("%s, %d of %d (%.0f %%)",
				a.when, c.GaveUp, c.Offered, 100*float64(c.GaveUp)/float64(max(c.Offered, 1))))
		}
		return "many gave up: " + strings.Join(parts, "; ") + "."
	case all.HeldUp == 0:
		return fmt.Sprintf("nobody gave up, and nobody waited: all %d calls were admitted at once.", all.Admitted)
	}
	return fmt.Sprintf("nobody gave up; %d of %d calls waited, for %.1f s at the longest.",
		all.HeldUp, all.Offered, all.Wait(1).Seconds())
}

// quotaPercent says what part of the account so many tokens are, as people write it: 70 %.
func quotaPercent(tokens int64) string {
	return strconv.FormatFloat(100*float64(tokens)/account, 'f', -1, 64) + " %"
}

func writePage(name string, reports []sharetest.Report) error {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(reports[0].WriteHTML(file, reports[1:]...), file.Close())
}
