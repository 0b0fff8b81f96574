package sim

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/quotashare/quotashare"
)

// A Dist draws numbers: sizes of calls in tokens, their lengths in seconds. The zero Dist always draws 0.
type Dist struct {
	mean float64
	draw func(*rand.Rand) float64
}

// Fixed draws always the same value.
func Fixed(value float64) Dist {
	return Dist{value, func(*rand.Rand) float64 { return value }}
}

// Uniform draws values from low to high, each as likely as any other.
func Uniform(low, high float64) Dist {
	return Dist{(low + high) / 2, func(r *rand.Rand) float64 { return low + (high-low)*r.Float64() }}
}

// Lognormal draws values above 0 whose mean is the one given and whose logarithms have the standard deviation sigma:
// many a little below the mean, and a few far above it, as prompts and answers are. A sigma of 0.5 puts one in a
// hundred at about three times the mean.
func Lognormal(mean, sigma float64) Dist {
	mu := math.Log(mean) - sigma*sigma/2
	return Dist{mean, func(r *rand.Rand) float64 { return math.Exp(mu + sigma*r.NormFloat64()) }}
}

// Mean returns the mean of what is drawn.
func (d Dist) Mean() float64 { return d.mean }

func (d Dist) value(r *rand.Rand) float64 {
	if d.draw == nil {
		return 0
	}
	return d.draw(r)
}

// A Call is one call of a model: when it is first asked for, and what it takes.
type Call struct {
	At       time.Duration // since the start of the run
	Class    quotashare.Class
	Estimate int64         // tokens that are asked for
	Actual   int64         // tokens that it has used when it ends
	Length   time.Duration // from its admission to its end
	Patience time.Duration // from At until the caller gives up; 0: never
}

// A Kind says what the calls of one kind are like.
type Kind struct {
	Class quotashare.Class

	// Tokens is the estimate of a call, in tokens. It is rounded, to 1 at least.
	Tokens Dist

	// Used is the part of its estimate that a call has used when it ends: 1 is all of it, and so is the zero Dist.
	Used Dist

	// Seconds is how long a call takes from its admission on, in seconds.
	Seconds Dist

	// Patience is how long after it first asked a caller gives up. 0 is never.
	Patience time.Duration
}

func (k *Kind) validate() error {
	switch {
	case k.Class >= quotashare.NumClasses:
		return fmt.Errorf("class is %v: want interactive, background or batch", k.Class)
	case !(k.Tokens.mean > 0): // NaN too
		return fmt.Errorf("the mean of tokens is %v: want more than 0", k.Tokens.mean)
	case !(k.Used.mean >= 0 && k.Seconds.mean >= 0):
		return errors.New("the mean of used or of seconds is negative: want 0 or more")
	case k.Patience < 0:
		return fmt.Errorf("patience is %v: want 0 or more", k.Patience)
	}
	return nil
}

func (k *Kind) call(at time.Duration, r *rand.Rand) Call {
	// All that is drawn is drawn for every call in the same order, so that one seed gives the same calls whatever
	// becomes of them.
	estimate := max(math.Round(k.Tokens.value(r)), 1)
	used := 1.0
	if k.Used.draw != nil {
		used = k.Used.value(r)
	}
	return Call{
		At:       at,
		Class:    k.Class,
		Estimate: int64(estimate),
		Actual:   int64(max(math.Round(estimate*used), 0)),
		Length:   seconds(max(k.Seconds.value(r), 0)),
		Patience: k.Patience,
	}
}

func seconds(s float64) time.Duration { return time.Duration(math.Round(s * float64(time.Second))) }

// Traffic is what callers of one kind want: a Poisson, a Suite or a Replay.
type Traffic interface {
	validate() error
	start(*run, *rand.Rand)
}

// Poisson is traffic of many callers who know nothing of each other: the times between calls are exponential.
type Poisson struct {
	Kind
	Rate []Step // in the order of From; before the first there are no calls
}

// A Step is the rate of calls from an instant on.
type Step struct {
	From time.Duration

	// TokensPerMinute is the rate in tokens: so many calls as come to that many on average.
	TokensPerMinute float64
}

func (p Poisson) validate() error {
	for i, step := range p.Rate {
		switch {
		case !(step.TokensPerMinute >= 0 && step.TokensPerMinute <= math.MaxInt64):
			return fmt.Errorf("rate is %v tokens per minute: want 0 or more", step.TokensPerMinute)
		case step.From < 0 || i > 0 && step.From < p.Rate[i-1].From:
			return fmt.Errorf("rate steps at %v: want steps in order, from 0 on", step.From)
		}
	}
	return p.Kind.validate()
}

func (p Poisson) start(r *run, random *rand.Rand) {
	r.offer(p.Calls(r.length, random))
}

// Calls returns the calls before the instant length, in the order in which they are asked for. The same random numbers
// give the same calls.
func (p Poisson) Calls(length time.Duration, random *rand.Rand) []Call {
	var calls []Call
	for i, step := range p.Rate {
		if step.TokensPerMinute <= 0 {
			continue
		}
		end := length
		if i+1 < len(p.Rate) {
			end = min(end, p.Rate[i+1].From)
		}
		// A Poisson process has no memory, so each step may begin anew.
		mean := p.Tokens.mean / step.TokensPerMinute * time.Minute.Seconds()
		for at := step.From; ; {
			at += seconds(mean * random.ExpFloat64())
			if at >= end || at < 0 {
				break
			}
			calls = append(calls, p.call(at, random))
		}
	}
	return calls
}

// A Suite is work in a closed loop, as an eval suite or a backfill is: a number of workers of which each takes the next
// item, asks for it until it is admitted, is busy until the call ends, and takes the next. With Patience, an item is
// dropped by a worker who gives up on it.
type Suite struct {
	Kind
	Items       int           // 0: endless
	Concurrency int           // workers, at least 1
	Start       time.Duration // when all of them begin
}

func (s Suite) validate() error {
	switch {
	case s.Items < 0:
		return fmt.Errorf("items is %d: want 0 or more", s.Items)
	case s.Concurrency < 1:
		return fmt.Errorf("concurrency is %d: want at least 1", s.Concurrency)
	case s.Start < 0:
		return fmt.Errorf("start is %v: want 0 or more", s.Start)
	case !(s.Seconds.mean > 0):
		return fmt.Errorf("the mean of seconds is %v: want more than 0 (or endless work takes no time)", s.Seconds.mean)
	}
	return s.Kind.validate()
}

func (s Suite) start(r *run, random *rand.Rand) {
	taken := 0
	var next func()
	next = func() {
		if s.Items > 0 && taken == s.Items {
			return
		}
		taken++
		r.ask(&attempt{Call: s.call(r.now, random), done: next})
	}
	for range s.Concurrency {
		r.at(s.Start, next)
	}
}

// A Replay is recorded traffic. The estimate of a call is what it used, ContextTokens and GeneratedTokens together. How
// long it took is not recorded, and does not matter: it changes nothing when the call ends.
type Replay struct {
	Class    quotashare.Class
	Rows     []Row
	Origin   time.Time     // what the start of the run is in the recording; rows before it are an error
	Patience time.Duration // how long after it first asked a caller gives up; 0: never
}

func (p Replay) validate() error {
	if p.Class >= quotashare.NumClasses {
		return fmt.Errorf("class is %v: want interactive, background or batch", p.Class)
	}
	for _, row := range p.Rows {
		if row.At.Before(p.Origin) {
			return fmt.Errorf("a row is of %v: want none before the origin, %v", row.At, p.Origin)
		}
	}
	return nil
}

func (p Replay) start(r *run, _ *rand.Rand) {
	calls := make([]Call, len(p.Rows))
	for i, row := range p.Rows {
		tokens := max(row.ContextTokens+row.GeneratedTokens, 1) // a call of nothing is no call that can be asked for
		calls[i] = Call{At: row.At.Sub(p.Origin), Class: p.Class, Estimate: tokens, Actual: tokens, Patience: p.Patience}
	}
	r.offer(calls)
}
