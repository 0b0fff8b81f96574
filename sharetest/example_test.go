package sharetest_test

import (
	"fmt"
	"strings"
	"time"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// Does batch get its night's work done, and does anybody wait for it?
func Example() {
	quota := quotashare.Quota{Tokens: 2_000_000, Floors: quotashare.ElasticFloors}
	trace, err := sharetest.Generate(quota, 30*time.Minute, 1,
		sharetest.Flow{Class: quotashare.Interactive, Load: 0.05},
		sharetest.Suite{
			Concurrency: 50, Tokens: sharetest.Tokens{20_000}, Durations: sharetest.Durations{10 * time.Second},
		})
	if err != nil {
		panic(err)
	}
	report, err := sharetest.Replay(quota, trace, nil)
	if err != nil {
		panic(err)
	}
	interactive, batch := report.Classes[quotashare.Interactive], report.Classes[quotashare.Batch]
	fmt.Printf("batch had %.0f %% of the quota, and %d of %d people were refused\n",
		100*batch.Share, interactive.HeldUp, interactive.Offered)
	// Output: batch had 79 % of the quota, and 0 of 2160 people were refused
}

// A wish that is not fulfilled says what was measured, what was wished, and when it happened.
func ExampleWish() {
	quota := quotashare.Quota{Tokens: 1_000_000}
	trace, _ := sharetest.Generate(quota, 10*time.Minute, 1,
		sharetest.Flow{Class: quotashare.Interactive, Load: 0.2},
		sharetest.Flow{Class: quotashare.Interactive, Load: 3, From: 5 * time.Minute, To: 6 * time.Minute})
	report, _ := sharetest.Replay(quota, trace, nil)

	fmt.Println(sharetest.HeldUp(quotashare.Interactive).AtMost(0.01).Test(report))
	// Output:
	// sharetest: shares, 0:00 to 10:00: interactive calls held up: 43.0 %, want at most 1.0 %; first about 5:10, and most about 5:28 (56)
}

// What was decided at night is easily seen beside what else could have decided.
func ExamplePolicy() {
	quota := quotashare.Quota{Tokens: 1_000_000, Floors: quotashare.ElasticFloors}
	trace, _ := sharetest.Generate(quota, 20*time.Minute, 1,
		sharetest.Flow{Class: quotashare.Interactive, Load: 0.05},
		sharetest.Flow{Class: quotashare.Interactive, Load: 0.5, From: 10 * time.Minute},
		sharetest.Suite{
			Concurrency: 50, Tokens: sharetest.Tokens{16_000}, Durations: sharetest.Durations{8 * time.Second},
		})
	for _, policy := range []sharetest.Policy{
		sharetest.Undecided, sharetest.StaticPartition, sharetest.StrictPriority, sharetest.PatternSketch, sharetest.ByWindow,
	} {
		options := sharetest.Options{Policy: policy}
		options.Callers[quotashare.Interactive].Patience = 10 * time.Second
		r, err := sharetest.Replay(quota, trace, &options)
		if err != nil {
			panic(err)
		}
		people, batch := r.Classes[quotashare.Interactive], r.Classes[quotashare.Batch]
		fmt.Printf("%-21v %5d of %d people gave up, batch had %2.0f %%, 429s: %d\n",
			policy, people.GaveUp, people.Offered, 100*batch.Share, r.TooMany)
	}
	// Output:
	// nothing decides        1828 of 4344 people gave up, batch had 86 %, 429s: 21590
	// static partition          0 of 4344 people gave up, batch had 10 %, 429s: 0
	// strict priority         925 of 4344 people gave up, batch had 79 %, 429s: 0
	// the pattern's sketch    250 of 4344 people gave up, batch had 67 %, 429s: 2134
	// shares                    0 of 4344 people gave up, batch had 52 %, 429s: 0
}

// Which shares would do? Or what cannot be had?
func ExampleSearch() {
	quota := quotashare.Quota{Tokens: 1_000_000}
	trace, _ := sharetest.Generate(quota, 20*time.Minute, 1,
		sharetest.Flow{Class: quotashare.Interactive, Load: 0.05},
		sharetest.Flow{Class: quotashare.Interactive, Load: 0.5, From: 10 * time.Minute},
		sharetest.Suite{
			Concurrency: 50, Tokens: sharetest.Tokens{16_000}, Durations: sharetest.Durations{8 * time.Second},
		})
	options := sharetest.Options{}
	options.Callers[quotashare.Interactive].Patience = 10 * time.Second

	found, err := sharetest.Search(quota, trace, &options,
		sharetest.GaveUp(quotashare.Interactive).AtMost(0),
		sharetest.Wait(quotashare.Interactive, 0.99).AtMost(time.Second),
		sharetest.Share(quotashare.Batch).AtLeast(0.30).During(0, 10*time.Minute))
	if err != nil {
		panic(err)
	}
	fmt.Println(found)
	// Output:
	// {"tokens":1000000,"window":"1m0s","shares":{"interactive":0.7,"background":0.2,"batch":0.1},"floors":{"interactive":0.1,"background":0.05,"batch":0.05},"pace":12,"overdraft":0}
	// after 2 tries: all wishes are fulfilled
}

// What a service logged can be replayed: who would have waited, had these shares decided?
func ExampleReadLog() {
	const log = `time,class,input_tokens,output_tokens,seconds
2026-11-30T02:00:00.125Z,batch,14200,1800,9.5
2026-11-30T02:00:00.750Z,interactive,900,350,2.25
2026-11-30T02:00:31Z,batch,14900,1100,8
`
	trace, err := sharetest.ReadLog("calls.csv", strings.NewReader(log))
	if err != nil {
		panic(err)
	}
	report, err := sharetest.Replay(quotashare.Quota{Tokens: 100_000}, trace, nil)
	if err != nil {
		panic(err)
	}
	for class, c := range report.Classes {
		fmt.Printf("%v: %d of %d calls refused at first, %d tokens used\n",
			quotashare.Class(class), c.HeldUp, c.Offered, c.AdmittedTokens)
	}
	// Output:
	// interactive: 0 of 1 calls refused at first, 1250 tokens used
	// background: 0 of 0 calls refused at first, 0 tokens used
	// batch: 1 of 2 calls refused at first, 16000 tokens used
}

// A trace is a list, and can be written by hand.
func ExampleTrace() {
	trace := sharetest.Trace{Length: 2 * time.Minute, Arrivals: []sharetest.Arrival{
		{At: 0, Class: quotashare.Batch, Estimate: 150, Actual: 150},
		{At: 10 * time.Second, Class: quotashare.Batch, Estimate: 150, Actual: 150},
	}}
	report, err := sharetest.Replay(quotashare.Quota{Tokens: 1000}, trace, nil)
	if err != nil {
		panic(err)
	}
	fmt.Println(report.Classes[quotashare.Batch].Waits)
	// Output: [0s 50s]
}
