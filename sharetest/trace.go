package sharetest

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/quotashare/quotashare"
)

// A Trace is traffic: the calls that callers want to make, whatever becomes of them.
type Trace struct {
	// Start is the time of day of instant 0, for traffic that was recorded, or that shall read as if it were. Reports
	// and pages tell times by it. Zero: instants are told as durations.
	Start time.Time

	// Length is how long the traffic is replayed. What is under way or waits at its end stays so.
	Length time.Duration

	// Arrivals are the calls, in the order of At.
	Arrivals []Arrival
}

// An Arrival is a call that somebody wants to make.
type Arrival struct {
	// At is when it is first asked for, or, in a Pool, when it joins the end of the line for a worker.
	At    time.Duration
	Class quotashare.Class

	// Estimate is how many tokens are asked for, at least 1, and Actual how many the call has used when it ends.
	Estimate, Actual int64

	// Duration is how long the call takes, from its admission to its end.
	Duration time.Duration

	// Pool is who makes the call; nil: a caller of its own.
	Pool *Pool
}

// A Pool is a number of workers who make calls that have the same Pool. Each takes the next call, in the order of At,
// asks for it until it is admitted, is busy until it ends (or until the worker gives it up), and takes the next.
type Pool struct {
	Workers int // at least 1
}

// The bounds of what a replay takes, so that no sum of it overflows.
const (
	maxTokens   = 1 << 32 // of one call: more than any model takes
	maxTime     = 1 << 60 // nanoseconds, 36 years
	maxArrivals = 10_000_000
)

// Validate returns an error that names the first arrival that Replay could not take, by its index, and says what would
// be right.
func (t Trace) Validate() error {
	switch {
	case t.Length <= 0 || t.Length > maxTime:
		return fmt.Errorf("sharetest: length of the trace is %v: want more than 0, and 36 years at most", t.Length)
	case len(t.Arrivals) > maxArrivals:
		return fmt.Errorf("sharetest: the trace has %d arrivals: want %d at most", len(t.Arrivals), maxArrivals)
	}
	before := time.Duration(0)
	for i := range t.Arrivals {
		a := &t.Arrivals[i]
		if err := a.validate(before, t.Length); err != nil {
			return fmt.Errorf("sharetest: arrivals[%d]: %w", i, err)
		}
		before = a.At
	}
	return nil
}

func (a *Arrival) validate(before, length time.Duration) error {
	switch {
	case a.At < before:
		return fmt.Errorf("at is %v: want arrivals in order of time, from 0 on (here from %v)", a.At, before)
	case a.At >= length:
		return fmt.Errorf("at is %v: want less than the length of the trace, %v", a.At, length)
	case a.Class >= quotashare.NumClasses:
		return fmt.Errorf("class is %v: want interactive, background or batch", a.Class)
	case a.Estimate < 1 || a.Estimate > maxTokens:
		return fmt.Errorf("estimate is %d tokens: want 1 to %d", a.Estimate, int64(maxTokens))
	case a.Actual < 0 || a.Actual > maxTokens:
		return fmt.Errorf("actual is %d tokens: want 0 to %d", a.Actual, int64(maxTokens))
	case a.Duration < 0 || a.Duration > maxTime:
		return fmt.Errorf("duration is %v: want 0 or more, and 36 years at most", a.Duration)
	case a.Pool != nil && a.Pool.Workers < 1:
		return fmt.Errorf("pool has %d workers: want 1 or more", a.Pool.Workers)
	}
	return nil
}

// Merge lays traces over each other. Those with a Start keep their places in time, the earliest Start is that of the
// result; those without begin when the result does. It is as long as needed to hold them all. Of calls at one instant
// those of the earlier trace come first.
func Merge(traces ...Trace) Trace {
	var all Trace
	calls := 0
	for _, t := range traces {
		if !t.Start.IsZero() && (all.Start.IsZero() || t.Start.Before(all.Start)) {
			all.Start = t.Start
		}
		calls += len(t.Arrivals)
	}
	all.Arrivals = make([]Arrival, 0, calls)
	for _, t := range traces {
		shift := time.Duration(0)
		if !t.Start.IsZero() {
			shift = t.Start.Sub(all.Start)
		}
		all.Length = max(all.Length, shift+t.Length)
		for _, a := range t.Arrivals {
			a.At += shift
			all.Arrivals = append(all.Arrivals, a)
		}
	}
	sortByTime(all.Arrivals)
	return all
}

// sortByTime sorts arrivals. Those of one instant stay in their order.
func sortByTime(arrivals []Arrival) {
	slices.SortStableFunc(arrivals, func(a, b Arrival) int { return cmp.Compare(a.At, b.At) })
}
