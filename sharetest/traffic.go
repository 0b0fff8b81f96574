package sharetest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/quotashare/quotashare"
)

// A Part is a piece of traffic: a [Flow] or a [Suite].
type Part interface {
	validate(length time.Duration) error
	arrivals(*generator) ([]Arrival, error)
}

// Generate returns the traffic of all parts together, over a length of time. Loads are fractions of quota, of which
// Tokens and Window matter alone.
//
// The same seed gives the same trace on every machine. Each part has random numbers of its own, by its place among the
// parts, so one more at the end changes none of the others. Errors name the part and its field.
func Generate(quota quotashare.Quota, length time.Duration, seed uint64, parts ...Part) (Trace, error) {
	quota, err := writtenOut(quota)
	if err != nil {
		return Trace{}, err
	}
	if length <= 0 || length > maxTime {
		return Trace{}, fmt.Errorf("sharetest: length is %v: want more than 0, and 36 years at most", length)
	}
	t := Trace{Length: length}
	for i, part := range parts {
		if part == nil {
			return Trace{}, fmt.Errorf("sharetest: parts[%d] is nil: want a Flow or a Suite", i)
		}
		err := part.validate(length)
		if err == nil {
			g := generator{quota.Tokens, quota.Window, length, rand.NewPCG(seed, uint64(i))}
			var arrivals []Arrival
			arrivals, err = part.arrivals(&g)
			t.Arrivals = append(t.Arrivals, arrivals...)
		}
		if err != nil {
			return Trace{}, fmt.Errorf("sharetest: parts[%d]: %w", i, err)
		}
	}
	sortByTime(t.Arrivals)
	return t, nil
}

// A generator is what a part is made of.
type generator struct {
	tokens         int64 // that the quota allows in a window
	window, length time.Duration
	random         *rand.PCG
}

var errTooMany = fmt.Errorf("it would be more than %d calls: want fewer, or larger ones", maxArrivals)

// A Flow is calls of many callers who know nothing of each other, at a mean rate (a Poisson process). Flows add up: a
// step is a flow that begins later beside one that is there all the time, and a burst one that soon ends.
type Flow struct {
	Class quotashare.Class

	// Load is how many tokens are asked for on average, as a fraction of the quota: 0.05 is 5 %.
	Load float64

	// From and To are when it begins and ends. To 0: it goes on to the end.
	From, To time.Duration

	// Curve is a factor on Load at each instant, 0 or more, such as [Day]; nil: 1 all the time. It is read 60 times a
	// Window, but a million times at most.
	Curve func(at time.Duration) float64

	// Tokens are the sizes of the calls: estimate, and what they have used in the end; 1 token at least. Nil:
	// [Conversations] for Interactive, and [Completions] for the others.
	Tokens Tokens

	// Durations are how long the calls take. Nil: 0, no time at all, which changes nothing but how soon estimates that
	// are off are settled.
	Durations Durations
}

func (f Flow) validate(length time.Duration) error {
	switch {
	case f.Class >= quotashare.NumClasses:
		return fmt.Errorf("class is %v: want interactive, background or batch", f.Class)
	case !(f.Load >= 0 && f.Load <= 1000): // NaN too
		return fmt.Errorf("load is %v: want a fraction of the quota such as 0.05, from 0 to 1000", f.Load)
	case f.From < 0 || f.From > length:
		return fmt.Errorf("from is %v: want an instant of the trace, 0 to %v", f.From, length)
	case f.To != 0 && f.To < f.From:
		return fmt.Errorf("to is %v: want an instant after from, %v, or 0 for the end", f.To, f.From)
	}
	return errors.Join(f.Tokens.validate("tokens", maxTokens), f.Durations.validate("durations", maxTime))
}

func (f Flow) arrivals(g *generator) ([]Arrival, error) {
	sizes := f.Tokens
	if sizes == nil {
		sizes = Completions
		if f.Class == quotashare.Interactive {
			sizes = Conversations
		}
	}
	to := g.length
	if f.To != 0 {
		to = min(to, f.To)
	}
	// Where the rate never changes one piece is enough.
	piece := to
	if f.Curve != nil {
		piece = max(g.window/60, g.length/1_000_000, 1)
	}
	callsPerNano := f.Load * float64(g.tokens) / float64(g.window) / max(sizes.Mean(), 1)
	var calls []Arrival
	// A Poisson process of one call per unit of time is stretched by the rate. next is what is left of the time, in
	// these units, from the start of a piece to the next call. The conversions keep a processor that can from fusing
	// two operations to one, which would round otherwise.
	next := exponential(g.random)
	for start := f.From; start < to; start += piece {
		end, rate := min(start+piece, to), callsPerNano
		if f.Curve != nil {
			factor := f.Curve(start)
			if !(factor >= 0 && factor <= 1000) {
				return nil, fmt.Errorf("curve is %v at %v: want a factor from 0 to 1000", factor, start)
			}
			rate = float64(rate * factor)
		}
		units := float64(float64(end-start) * rate)
		for ; next < units; next += exponential(g.random) {
			if len(calls) == maxArrivals {
				return nil, errTooMany
			}
			at := min(start+time.Duration(next/rate), end-1)
			calls = append(calls, arrival(at, f.Class, sizes, f.Durations, g.random))
		}
		next -= units
	}
	return calls, nil
}

// Day is a curve of working days: a factor of 1 on average over 24 hours from midnight on, 0.2 in the night, and 1.9 at
// its highest in the afternoon. A Curve is asked for instants of the trace: for one that starts at 22:00 it is
// func(at time.Duration) float64 { return Day(at + 22*time.Hour) }.
func Day(at time.Duration) float64 {
	at = (at%(24*time.Hour) + 24*time.Hour) % (24 * time.Hour)
	hour, rest := at/time.Hour, at%time.Hour
	low, high := day[hour], day[(hour+1)%24]
	return float64(low)/10 + float64(float64(high-low)/10*rest.Hours())
}

// day has the factors at the full hours, in tenths. They add up to 24.
var day = [24]int{4, 3, 2, 2, 2, 2, 3, 6, 10, 14, 17, 17, 15, 17, 19, 19, 18, 16, 13, 11, 9, 8, 7, 6}

// A Suite is batch work in a Pool of its own, as the nightly eval suite or a backfill is.
type Suite struct {
	Start time.Duration // when the workers begin

	// Count is how many calls there are. 0: so many that the suite outlasts the trace, were it given all of the quota.
	Count int

	// Concurrency is how many workers make them, at least 1.
	Concurrency int

	// Tokens are the sizes of the calls, and must be given: Tokens{20_000} for calls that are all alike.
	Tokens Tokens

	// Durations are how long the calls take, and must be given.
	Durations Durations
}

func (s Suite) validate(length time.Duration) error {
	switch {
	case s.Start < 0 || s.Start >= length:
		return fmt.Errorf("start is %v: want an instant of the trace, 0 to less than %v", s.Start, length)
	case s.Count < 0:
		return fmt.Errorf("count is %d: want 0 or more", s.Count)
	case s.Concurrency < 1:
		return fmt.Errorf("concurrency is %d: want at least 1", s.Concurrency)
	case len(s.Tokens) == 0:
		return errors.New("tokens are missing: want such as Tokens{20_000}")
	case len(s.Durations) == 0:
		return errors.New("durations are missing: want such as Durations{5 * time.Second}")
	}
	return errors.Join(s.Tokens.validate("tokens", maxTokens), s.Durations.validate("durations", maxTime))
}

func (s Suite) arrivals(g *generator) ([]Arrival, error) {
	// In a time of n Windows, begun ones included, no account gives more than n+1 times the quota; each worker may
	// hold a call beyond that, still to be admitted.
	most, spare := float64(g.tokens)*(float64(g.length/g.window)+2), s.Concurrency
	pool := &Pool{Workers: s.Concurrency}
	var calls []Arrival
	for tokens := 0.0; len(calls) < s.Count || s.Count == 0 && spare > 0; {
		if len(calls) == maxArrivals {
			return nil, errTooMany
		}
		a := arrival(s.Start, quotashare.Batch, s.Tokens, s.Durations, g.random)
		a.Pool = pool
		calls = append(calls, a)
		if tokens += float64(a.Actual); tokens > most {
			spare--
		}
	}
	return calls, nil
}

// arrival draws a call. All that is drawn is drawn for every call in the same order.
func arrival(at time.Duration, class quotashare.Class, sizes Tokens, durations Durations, r *rand.PCG) Arrival {
	tokens := max(sizes.draw(r), 1)
	return Arrival{At: at, Class: class, Estimate: tokens, Actual: tokens, Duration: durations.draw(r)}
}

// Quantiles are a distribution: its quantiles, at equal steps from the smallest value to the largest. One value is
// always that, two are uniform between them, three have the median in the middle, and 101 are the percentiles. Between
// two neighbours all values are equally likely. Nil draws 0.
type Quantiles[T ~int64] []T

// Tokens are sizes of calls, in tokens.
type Tokens = Quantiles[int64]

// Durations are lengths of calls.
type Durations = Quantiles[time.Duration]

// Conversations are the sizes of calls in a chat, prompt and answer together, 1,366 tokens on average: the distribution
// of the 19,366 calls in the Azure LLM inference trace "conv" of 2023, to one in a hundred.
//
// Source: Azure Public Dataset, CC BY 4.0; Patel et al., "Splitwise: Efficient generative LLM inference using phase
// splitting", ISCA 2024. The largest value is 5,176, and not 14,089, so that the mean is that of the trace.
var Conversations = Tokens{
	64, 197, 280, 314, 342, 368, 392, 425, 443, 458,
	473, 482, 489, 495, 500, 506, 513, 522, 534, 556,
	800, 1024, 1240, 1362, 1393, 1412, 1426, 1438, 1449, 1459,
	1469, 1479, 1489, 1499, 1510, 1522, 1534, 1550, 1568, 1594,
	1628, 1694, 1837, 2136, 2483, 2819, 4108, 4127, 4147, 4186,
	5176,
}

// Completions are the sizes of calls that complete code, 2,076 tokens on average: the distribution of the 8,819 calls
// in the trace "code", to two in a hundred. The source is that of [Conversations].
var Completions = Tokens{
	12, 55, 83, 106, 134, 167, 199, 238, 287, 354,
	411, 497, 576, 644, 726, 798, 876, 932, 994, 1050,
	1099, 1155, 1231, 1329, 1404, 1493, 1590, 1673, 1750, 1846,
	1937, 2056, 2155, 2246, 2353, 2455, 2568, 2700, 2840, 2998,
	3222, 3490, 3749, 4127, 4588, 5204, 5982, 6600, 7442, 7449,
	7845,
}

// Mean returns the mean of the distribution, 0 for nil.
func (q Quantiles[T]) Mean() float64 {
	switch len(q) {
	case 0:
		return 0
	case 1:
		return float64(q[0])
	}
	sum := 0.0 // of the means between neighbours
	for i := range len(q) - 1 {
		sum += (float64(q[i]) + float64(q[i+1])) / 2
	}
	return sum / float64(len(q)-1)
}

// WithMean returns the distribution stretched to another mean, each value rounded. The mean of the values that are
// there must not be 0.
func (q Quantiles[T]) WithMean(mean T) Quantiles[T] {
	stretched := make(Quantiles[T], len(q))
	for i, value := range q {
		stretched[i] = T(math.Round(float64(value) * float64(mean) / q.Mean()))
	}
	return stretched
}

func (q Quantiles[T]) validate(name string, most T) error {
	for i, value := range q {
		switch {
		case value < 0 || value > most:
			return fmt.Errorf("%s[%d] is %v: want 0 to %v", name, i, value, most)
		case i > 0 && value < q[i-1]:
			return fmt.Errorf("%s[%d] is %v, less than the one before: want quantiles from the smallest to the largest", name, i, value)
		}
	}
	return nil
}

// draw draws a value.
func (q Quantiles[T]) draw(r *rand.PCG) T {
	switch len(q) {
	case 0:
		return 0
	case 1:
		return q[0]
	}
	at := float64(unit(r) * float64(len(q)-1))
	i := int(at)
	low, high := q[i], q[min(i+1, len(q)-1)] // at may have been rounded up to the last
	return low + T(math.Round(float64(high-low)*(at-float64(i))))
}

// unit draws a number from 0 to 1, uniformly.
func unit(r *rand.PCG) float64 { return float64(r.Uint64()>>11) / (1 << 53) }

// exponential draws a number from the exponential distribution with mean 1, by von Neumann's method: it compares
// uniform numbers and takes no logarithm, which not every machine rounds alike.
//
// Of a run of numbers that fall, u > u1 > u2 > ..., the length is odd with probability exp(-u); then u is the fraction
// of the result, and the runs that were rejected before are its whole part. (John von Neumann, "Various techniques used
// in connection with random digits", 1951.)
func exponential(r *rand.PCG) float64 {
	for whole := 0.0; ; whole++ {
		first := r.Uint64()
		odd, last := true, first
		for next := r.Uint64(); next < last; next = r.Uint64() {
			odd, last = !odd, next
		}
		if odd {
			return whole + float64(first>>11)/(1<<53)
		}
	}
}
