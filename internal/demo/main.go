// Command demo shows what a Window changes: one night and one morning of an account, in virtual time, once with nothing
// deciding, once by the default floors, and once by elastic ones.
//
//	go run ./internal/demo [-seed N] [-conv FILE -code FILE]
//
// With -conv and -code, which are recordings as sim.ReadTrace reads them, the traffic is theirs: conv as interactive,
// code as background, and an eval suite that never ends beside them.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/internal/sim"
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
	s := night()
	if *conv != "" {
		var err error
		if s, err = recorded(*conv, *code); err != nil {
			return err
		}
	}
	return s.show(out, *seed)
}

// A story is some traffic, and how to tell what came of it.
type story struct {
	title   string
	shares  quotashare.Fractions
	traffic []sim.Traffic
	acts    []act
}

// An act is a part of a story.
type act struct {
	name     string
	when     string // "at night", as part of a sentence
	from, to time.Duration
}

// suite is the eval suite: enough fixtures that it never ends before the story does, however much it is given.
func suite(items int) sim.Suite {
	return sim.Suite{
		Items:       items,
		Concurrency: 50,
		Kind: sim.Kind{
			Class:   quotashare.Batch,
			Tokens:  sim.Lognormal(16_000, 0.3),
			Seconds: sim.Lognormal(8, 0.5),
		},
	}
}

// night is the story of the pattern: an eval suite at night, beside light live traffic, and then the morning.
func night() story {
	const dawn, end = 40 * time.Minute, time.Hour
	live := func(kind sim.Kind, quiet, busy float64) sim.Traffic {
		return sim.Poisson{Kind: kind, Rate: []sim.Step{
			{From: 0, TokensPerMinute: quiet * account}, {From: dawn, TokensPerMinute: busy * account},
		}}
	}
	people := sim.Kind{
		Class:    quotashare.Interactive,
		Tokens:   sim.Lognormal(1400, 0.6),
		Seconds:  sim.Lognormal(3, 0.5),
		Patience: 10 * time.Second,
	}
	scheduled := sim.Kind{
		Class:    quotashare.Background,
		Tokens:   sim.Lognormal(3000, 0.6),
		Seconds:  sim.Lognormal(5, 0.5),
		Patience: 2 * time.Minute,
	}
	return story{
		title: "An account of 1,000,000 tokens a minute. At night 4,000 eval fixtures start at concurrency 50, beside\n" +
			"light live traffic. After 40 minutes the morning rush begins: interactive calls go from 5 % of the quota\n" +
			"to 55 %, background to 19 %, and the suite still wants all it can get. People give up after 10 s. Waits\n" +
			"are of the calls that were admitted. All of it is in virtual time.",
		shares:  quotashare.DefaultShares,
		traffic: []sim.Traffic{live(people, 0.05, 0.55), live(scheduled, 0.02, 0.19), suite(4000)},
		acts: []act{
			{"night, 40 min", "at night", 0, dawn},
			{"morning, 20 min", "in the morning", dawn, end},
		},
	}
}

// recorded is the story of two recordings of the same hour.
func recorded(convFile, codeFile string) (story, error) {
	conv, err := readTrace(convFile)
	if err != nil {
		return story{}, err
	}
	code, err := readTrace(codeFile)
	if err != nil {
		return story{}, err
	}
	origin, last := conv[0].At, conv[len(conv)-1].At
	if code[0].At.Before(origin) {
		origin = code[0].At
	}
	if code[len(code)-1].At.After(last) {
		last = code[len(code)-1].At
	}
	length := last.Sub(origin) + 1 // the last row too
	return story{
		title: "An account of 1,000,000 tokens a minute, and recorded traffic: conversations are interactive, code\n" +
			"completions are background, and beside them runs an eval suite at concurrency 50 that never ends. People\n" +
			"give up after 10 s. Waits are of the calls that were admitted. All of it is in virtual time.",
		shares: quotashare.Fractions{
			quotashare.Interactive: 0.80, quotashare.Background: 0.10, quotashare.Batch: 0.10,
		},
		traffic: []sim.Traffic{
			sim.Replay{Class: quotashare.Interactive, Rows: conv, Origin: origin, Patience: 10 * time.Second},
			sim.Replay{Class: quotashare.Background, Rows: code, Origin: origin, Patience: 2 * time.Minute},
			suite(0),
		},
		acts: []act{{fmt.Sprintf("all, %.0f min", length.Minutes()), "in all", 0, length}},
	}, nil
}

func readTrace(name string) ([]sim.Row, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return sim.ReadTrace(name, file)
}

// A policy is a way to decide, and what to say of it.
type policy struct {
	heading   string
	undecided bool
	floors    quotashare.Fractions
}

// policies numbers the ways to decide. What the headings say of the floors is read off the quota, so that it stays true
// for other shares.
func (s *story) policies() []policy {
	byDefault := quotashare.Quota{Tokens: account, Shares: s.shares}
	elastic := quotashare.Quota{Tokens: account, Shares: s.shares, Floors: quotashare.ElasticFloors}
	return []policy{{
		heading: "1. NOTHING DECIDES: every call goes to the provider, which answers 429 when the account is full;\n" +
			"   whoever gets one tries again after 0.5 s, 1 s, 2 s, ... 8 s.",
		undecided: true,
	}, {
		heading: fmt.Sprintf("2. A WINDOW WITH THE DEFAULT FLOORS: %s of the account is always kept free for people, so that\n"+
			"   no loan is ever in their way; batch gets at most %s, however quiet it is.",
			quotaPercent(byDefault.Limits(quotashare.Interactive).Floor), quotaPercent(byDefault.Limits(quotashare.Batch).Largest)),
	}, {
		heading: fmt.Sprintf("3. A WINDOW WITH ELASTIC FLOORS: %s of the account is kept free beyond what people lately asked\n"+
			"   for; batch borrows what is idle, and gives it back within a window.",
			quotaPercent(elastic.Limits(quotashare.Interactive).Floor)),
		floors: elastic.Floors,
	}}
}

// quotaPercent says what part of the account so many tokens are, as people write it: 70 %.
func quotaPercent(tokens int64) string {
	return strconv.FormatFloat(100*float64(tokens)/account, 'f', -1, 64) + " %"
}

// show plays the story by each policy.
func (s *story) show(out io.Writer, seed uint64) error {
	fmt.Fprintln(out, s.title)
	for _, p := range s.policies() {
		history, err := sim.Run(sim.Scenario{
			Quota:     quotashare.Quota{Tokens: account, Shares: s.shares, Floors: p.floors},
			Undecided: p.undecided,
			Length:    s.acts[len(s.acts)-1].to,
			Traffic:   s.traffic,
			Seed:      seed,
		})
		if err != nil {
			return err
		}
		if err := s.tell(out, p, history); err != nil {
			return err
		}
	}
	return nil
}
