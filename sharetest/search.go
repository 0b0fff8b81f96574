package sharetest

import (
	"fmt"
	"math"

	"github.com/quotashare/quotashare"
)

// Found is what Search found.
type Found struct {
	Quota  quotashare.Quota // the best table, with its defaults written out
	Report Report           // what it comes to
	Unmet  []Unmet          // the wishes that it does not fulfil, in their order; nil: it fulfils all
	Tries  int              // how many tables were replayed
}

// Unmet is a wish that the best table does not fulfil.
type Unmet struct {
	Wish Wish

	// Best is what the best table comes to, as Wish.Test tells it.
	Best error

	// Nearest is what the table comes to that, of those that were tried, is nearest to this wish, whatever becomes of
	// the others, and With is that table. Nil: With fulfils it, so it is the wishes together that could not be had.
	Nearest error
	With    quotashare.Quota
}

// String says in a few lines what was found.
func (f Found) String() string {
	table, err := f.Quota.MarshalJSON()
	if err != nil {
		return "nothing" // the zero Found
	}
	text := fmt.Sprintf("%s\nafter %d tries", table, f.Tries)
	if f.Unmet == nil {
		return text + ": all wishes are fulfilled"
	}
	for _, u := range f.Unmet {
		text += fmt.Sprintf("\nunmet: %v", u.Best)
		if u.Nearest == nil {
			with, _ := u.With.MarshalJSON() // it was replayed, so it is valid
			text += fmt.Sprintf("\n  alone it can be had, with %s", with)
		} else {
			text += fmt.Sprintf("\n  the nearest of the tables tried: %v", u.Nearest)
		}
	}
	return text
}

const (
	mostTries  = 100  // tables that Search replays at most
	leastShare = 0.05 // that Search leaves a class
)

// Search finds shares, floors and ceilings with which the trace, replayed as by [Replay], fulfils all wishes, or comes
// as near as it can. It begins with the quota, and keeps all else of it. Where quota fulfils them itself, it is what is
// found.
//
// It tries the quota and the usual floors, and from the best of them on moves share from a class to another, and
// floors and ceilings up and down, in steps of 20, 10, 5 and 2 % of the quota, as long as that helps. How far a table
// is off is the sum over the wishes of m/(1+m), where m is how far the value is beyond its limit, as a part of the
// limit. That finds a table that is better than all those around it: no proof that there is none elsewhere. No class's
// share falls below 5 %, or what it was, lest it starve for the wishes of others. The trace is replayed 100 times at
// most, which takes as many times as long as Replay does. The same arguments always find the same.
//
// The error is that of Replay.
func Search(quota quotashare.Quota, trace Trace, options *Options, wishes ...Wish) (Found, error) {
	quota, err := writtenOut(quota)
	if err != nil {
		return Found{}, err
	}
	s := search{trace: trace, options: options, wishes: wishes, tried: map[quotashare.Quota]bool{}}
	s.nearest = make([]nearest, len(wishes))
	for i := range s.nearest {
		s.nearest[i].miss = math.Inf(1)
	}
	// In a search floors are plain fractions: none are 0.
	if quota.Floors == quotashare.NoFloors {
		quota.Floors = quotashare.Fractions{}
	}
	byDefault, elastic := quota.Shares, quotashare.ElasticFloors
	for class, share := range quota.Shares {
		elastic[class] = min(elastic[class], share)
		if quotashare.Class(class) != quotashare.Interactive {
			byDefault[class] = share / 2
		}
	}
	for _, floors := range []quotashare.Fractions{quota.Floors, elastic, byDefault, {}} {
		quota.Floors = floors
		if _, err := s.try(quota); err != nil {
			return Found{}, err
		}
	}
	for _, step := range []float64{0.20, 0.10, 0.05, 0.02} {
		if err := s.climb(step); err != nil {
			return Found{}, err
		}
	}
	return s.found(), nil
}

// A search is one in progress.
type search struct {
	trace   Trace
	options *Options
	wishes  []Wish
	tried   map[quotashare.Quota]bool

	best    quotashare.Quota // its floors are plain
	report  Report           // of the best
	off     float64          // how far the best table is off; only if one was tried
	nearest []nearest
}

// A nearest is the table that comes nearest to one wish.
type nearest struct {
	quota quotashare.Quota
	miss  float64
	found string
}

func (s *search) done() bool { return len(s.tried) > 0 && s.off == 0 || len(s.tried) == mostTries }

// try replays a table, and reports whether it is better than the best so far. One that is not valid is not.
func (s *search) try(table quotashare.Quota) (better bool, err error) {
	quota := table
	if quota.Floors == (quotashare.Fractions{}) {
		quota.Floors = quotashare.NoFloors
	}
	if s.done() || s.tried[table] || quota.Validate() != nil {
		return false, nil
	}
	s.tried[table] = true
	report, err := Replay(quota, s.trace, s.options)
	if err != nil {
		return false, err
	}
	off := 0.0
	for i, w := range s.wishes {
		miss, found := w.test(&report)
		off += miss / (1 + miss)
		if n := &s.nearest[i]; miss < n.miss {
			*n = nearest{quota, miss, found}
		}
	}
	if len(s.tried) > 1 && off >= s.off {
		return false, nil
	}
	s.best, s.report, s.off = table, report, off
	return true, nil
}

// climb goes from the best table to a better one a step away, until there is none. A move that helped is made again.
func (s *search) climb(step float64) error {
	for improved := true; improved && !s.done(); {
		improved = false
		for _, move := range moves {
			for better := true; better; {
				quota := s.best
				move(&quota, step)
				var err error
				if better, err = s.try(quota); err != nil {
					return err
				}
				improved = improved || better
			}
		}
	}
	return nil
}

func (s *search) found() Found {
	f := Found{Quota: s.report.Quota, Report: s.report, Tries: len(s.tried)}
	for i, w := range s.wishes {
		err := w.Test(s.report)
		if err == nil {
			continue
		}
		u := Unmet{Wish: w, Best: err, With: s.nearest[i].quota}
		if s.nearest[i].miss > 0 {
			u.Nearest = fmt.Errorf("sharetest: %s", s.nearest[i].found)
		}
		f.Unmet = append(f.Unmet, u)
	}
	return f
}

// A move changes a table by a step; what it makes may not be valid.
type move func(q *quotashare.Quota, step float64)

// moves are all that there are, in the order in which they are tried. A class that is closed stays so.
var moves = func() (all []move) {
	classes := []quotashare.Class{quotashare.Interactive, quotashare.Background, quotashare.Batch}
	for _, to := range classes {
		all = append(all, func(q *quotashare.Quota, step float64) { shift(q, to, step) })
		for _, from := range classes {
			if from != to {
				all = append(all, func(q *quotashare.Quota, step float64) { shift(q, from, -step); shift(q, to, step) })
			}
		}
	}
	for _, sign := range []float64{-1, 1} {
		for _, class := range classes {
			all = append(all, func(q *quotashare.Quota, step float64) {
				q.Floors[class] = within(q.Floors[class]+sign*step, 0, q.Shares[class])
			}, func(q *quotashare.Quota, step float64) {
				switch q.Ceilings[class] {
				case quotashare.Closed:
				case 0:
					q.Ceilings[class] = within(1+sign*step, q.Shares[class], 1)
				default:
					q.Ceilings[class] = within(q.Ceilings[class]+sign*step, q.Shares[class], 1)
				}
			})
		}
	}
	return all
}()

// shift gives a class more share, or less. A floor that was all of it stays so, and a ceiling is never below it.
func shift(q *quotashare.Quota, class quotashare.Class, step float64) {
	share := within(q.Shares[class]+step, min(leastShare, q.Shares[class]), 1)
	if q.Floors[class] == q.Shares[class] || q.Floors[class] > share {
		q.Floors[class] = share
	}
	if q.Ceilings[class] > 0 {
		q.Ceilings[class] = max(q.Ceilings[class], share)
	}
	q.Shares[class] = share
}

// within returns the fraction from low to high that is nearest to a value rounded to thousandths.
func within(value, low, high float64) float64 {
	return min(max(math.Round(value*1000)/1000, low), high)
}
