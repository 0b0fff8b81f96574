package sharetest_test

import (
	"fmt"
	"os"
	"time"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// checkShares fails a test if the shares that the service starts with would not carry a bad night: the eval suite runs
// all night, and at 07:00 people wake up.
//
// To copy it, call it TestShares, and let it take a *testing.T.
func checkShares(t sharetest.TestingT) {
	t.Helper()

	// The table is the one that the service loads, not a copy of it.
	file, err := os.ReadFile("testdata/shares.json")
	if err != nil {
		t.Errorf("%v", err)
		return
	}
	quota, err := quotashare.ParseQuota(file)
	if err != nil {
		t.Errorf("%v", err) // it names the key, and says what would be right
		return
	}

	// The traffic that it must carry, as fractions of the quota. ReadLog reads that of a real night instead.
	const morning, end = 40 * time.Minute, time.Hour
	trace, err := sharetest.Generate(quota, end, 1,
		sharetest.Flow{Class: quotashare.Interactive, Load: 0.05},
		sharetest.Flow{Class: quotashare.Interactive, Load: 0.45, From: morning},
		sharetest.Flow{Class: quotashare.Background, Load: 0.05},
		sharetest.Suite{
			Concurrency: 50,
			Tokens:      sharetest.Completions.WithMean(16_000),
			Durations:   sharetest.Durations{4 * time.Second, 8 * time.Second, 20 * time.Second},
		})
	if err != nil {
		t.Errorf("%v", err)
		return
	}
	trace.Start = time.Date(2026, time.November, 30, 6, 20, 0, 0, time.UTC) // so that reports tell the time of day

	// The callers: people wait ten seconds, and everybody asks for half as much again as a call uses in the end.
	options := sharetest.Options{Name: "shares.json"}
	for class := range options.Callers {
		options.Callers[class].Overestimate = 1.5
	}
	options.Callers[quotashare.Interactive].Patience = 10 * time.Second

	report, err := sharetest.Replay(quota, trace, &options)
	if err != nil {
		t.Errorf("%v", err)
		return
	}
	sharetest.Check(t, report,
		sharetest.TooMany().AtMost(0),
		sharetest.GaveUp(quotashare.Interactive).AtMost(0),
		sharetest.Wait(quotashare.Interactive, 0.99).AtMost(500*time.Millisecond),
		sharetest.ShareDelay(quotashare.Interactive).AtMost(quota.Window),
		sharetest.Share(quotashare.Batch).AtLeast(0.45).During(0, morning),
		sharetest.Share(quotashare.Batch).AtLeast(0.10).During(morning, end))
}

// A test of shares.json for CI: it replays a night and a morning, and says what was measured, what was wished, and when
// it went wrong.
func Example_sharesInCI() {
	t := &printer{}
	checkShares(t)
	if !t.failed {
		fmt.Println("the shares carry the night")
	}
	// Output: the shares carry the night
}

// printer stands for the *testing.T of a test.
type printer struct{ failed bool }

func (p *printer) Helper() {}

func (p *printer) Errorf(format string, args ...any) {
	p.failed = true
	fmt.Printf(format+"\n", args...)
}
