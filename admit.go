// Package quotashare decides who gets an account's token quota, before every call to a hosted model.
//
// One quota (tokens per minute, say) feeds three classes of work: people who wait (Interactive), scheduled work
// (Background), and evals and backfills without a deadline (Batch). A [Quota] reserves a share of it for each class,
// lends what is idle, and takes it back by not admitting: nothing in flight is ever killed. A [Window] meters a
// Quota over a sliding window of time, and is asked before each call. The class of a call comes from where the work
// entered the process ([WithSource], [ClassFrom]), never from the caller. A refusal says truthfully when to come back.
//
// The rule itself is [Admit], a pure function. All numbers are tokens, of whatever the quota counts: a second Window
// may just as well count requests. The package starts no goroutines. Unless a comment says otherwise, functions and
// methods are safe for concurrent use, and values may be copied.
package quotashare

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"math/bits"
	"strconv"
	"time"

	"github.com/quotashare/quotashare/internal/sliding"
)

// ClassTokens holds a number of tokens for each class. Write it with keys: ClassTokens{Interactive: 1200}.
type ClassTokens [NumClasses]int64

// Fractions holds a fraction of the quota for each class, 0.25 for a quarter. Write it with keys:
// Fractions{Interactive: 0.7, Background: 0.2, Batch: 0.1}. Fields of Quota say what other values mean there.
type Fractions [NumClasses]float64

// Shares and floors to begin with. Treat them as constants.
var (
	// DefaultShares are what Quota.Shares is when all of it is zero.
	DefaultShares = Fractions{Interactive: 0.70, Background: 0.20, Batch: 0.10}

	// DefaultFloors are what Quota.Floors is, for DefaultShares, when all of it is zero: a burst of interactive calls
	// always finds its whole share free, so nobody who waits ever waits for a loan to drain. It costs utilisation:
	// batch alone fills 20 % of the account, however quiet it is.
	DefaultFloors = Fractions{Interactive: 0.70, Background: 0.10, Batch: 0.05}

	// ElasticFloors let batch alone fill 85 % of an account, less what the others ask for: about 80 % of a quiet one. The
	// price is paid when a class that was quiet wakes: what goes beyond its floor above its recent demand waits for the
	// loan to drain, at most one window.
	ElasticFloors = Fractions{Interactive: 0.10, Background: 0.05, Batch: 0.05}

	// NoFloors, as Quota.Floors, keep no headroom free at all: only the recent demand of a class is held for it. A class
	// that was silent for one to two windows is forgotten: its first calls wait for the loan to drain.
	NoFloors = Fractions{-1, -1, -1}
)

// Closed, as a ceiling, is for a class that is admitted nothing: its share and its floor are 0 too.
const Closed = -1.0

const (
	defaultWindow = time.Minute
	defaultPace   = sliding.MaxParts

	// tolerance is how far fractions may miss each other through the rounding of floating point numbers.
	tolerance = 1e-9
)

// A Quota says what an account allows in one window, and how the classes share it. Only Tokens is required; the zero
// value of every other field is a default. Fractions are of Tokens. ParseQuota reads a Quota from JSON.
type Quota struct {
	// Tokens is what the account allows in one Window, at least 1.
	Tokens int64

	// Window is the length of time for which a charge counts. 0 is one minute.
	Window time.Duration

	// Shares are what each class may always claim: 0 to 1 each, and not above 1 together. What they leave of the quota
	// can be borrowed. All zero is DefaultShares.
	Shares Fractions

	// Floors are headroom that is kept free for each class, beyond what it lately asked for, up to its share: 0 up to
	// the class's share each. A class inside its floor is admitted at once, whatever the others do. All zero is a floor
	// of interactive's share for Interactive, and of half their shares for the others, which is DefaultFloors if the
	// shares are DefaultShares. Write NoFloors for none.
	Floors Fractions

	// Ceilings are the most that each class may hold, borrowed tokens included: from the class's share up to 1, 0 for
	// no ceiling of its own, or Closed. A ceiling that equals the share forbids borrowing.
	Ceilings Fractions

	// Pace spreads borrowing over so many parts of a Window, 1 to 12, so that a loan comes back as evenly as it was
	// taken. 0 is 12, the smoothest. 1 does not spread: a loan taken in one second comes back in one second, a Window
	// later, and its lender waits until then.
	Pace int

	// Overdraft is the number of tokens above Tokens that calls within their class's share may reach while borrowed
	// tokens drain. 0 never admits above Tokens. It is for accounts whose provider lets a little more through.
	Overdraft int64
}

// Limits are the numbers of one class in whole tokens.
type Limits struct {
	Share   int64 // what the class may always claim
	Floor   int64 // headroom kept free for it beyond what it lately asked for
	Ceiling int64 // the most that it may hold; Quota.Tokens if it has no ceiling of its own
	Largest int64 // the largest call that it is ever admitted: a larger one is refused as ReasonTooLarge
}

// Validate returns nil if the quota can be used, and otherwise an error that names the field, by its key in JSON, and
// says what would be right.
func (q Quota) Validate() error {
	var r rule
	return q.compile(&r)
}

// Limits returns the limits of the class. They are zero for an unknown class and for a quota that Validate refuses.
//
// Shares are whole tokens, rounded down; if their fractions add up to 1, they add up to Tokens, and what rounding left
// goes one token each to those that it cut most. Floors and ceilings are rounded down, except that one of the same
// fraction as the share is the same number of tokens, and none lies on the wrong side of it. A fraction means the
// decimal number that was written, as far as a float64 can tell: 0.29 of 100 is 29.
func (q Quota) Limits(class Class) Limits {
	var r rule
	if err := q.compile(&r); err != nil || class >= NumClasses {
		return Limits{}
	}
	return Limits{Share: r.share[class], Floor: r.floor[class], Ceiling: r.ceiling[class], Largest: r.largest(class)}
}

// withDefaults returns the quota with every default written out. It changes no limit, and doing it twice changes
// nothing more.
func (q Quota) withDefaults() Quota {
	if q.Window == 0 {
		q.Window = defaultWindow
	}
	if q.Pace == 0 {
		q.Pace = defaultPace
	}
	var other Fractions
	shares, floors := q.fractions(&other)
	q.Shares, q.Floors = *shares, *floors
	if q.Floors == (Fractions{}) {
		q.Floors = NoFloors
	}
	return q
}

// fractions returns the shares and the floors with the defaults filled in, the latter in other if they are not q's own.
// Other is zero before.
func (q *Quota) fractions(other *Fractions) (shares, floors *Fractions) {
	shares, floors = &q.Shares, &q.Floors
	if *shares == (Fractions{}) {
		shares = &DefaultShares
	}
	switch {
	case *floors == (Fractions{}):
		other[Interactive], other[Background], other[Batch] = shares[Interactive], shares[Background]/2, shares[Batch]/2
		floors = other
	case *floors == NoFloors:
		floors = other
	}
	return shares, floors
}

// A rule is a Quota in whole tokens: everything that the decision needs to know of it.
type rule struct {
	quota   int64
	most    uint64 // quota and overdraft, which together may pass an int64
	share   ClassTokens
	floor   ClassTokens
	ceiling ClassTokens
	floors  int64 // all together
	pace    uint64
	window  time.Duration
}

// compile fills in r from q, or says what is wrong with q.
func (q *Quota) compile(r *rule) error {
	var other Fractions
	shares, floors := q.fractions(&other)
	err := r.divide(q, shares, floors)
	if err == nil {
		r.bound(q, shares, floors)
	}
	return err
}

// divide fills in r from q, of which the shares and floors are given with their defaults filled in, but for the floors
// and ceilings, or says what is wrong with q. Together with bound it is most of the cost of Admit, so no Quota is copied.
func (r *rule) divide(q *Quota, shares, floors *Fractions) error {
	r.quota, r.pace, r.window = q.Tokens, uint64(q.Pace), q.Window
	if r.pace == 0 {
		r.pace = defaultPace
	}
	if r.window == 0 {
		r.window = defaultWindow
	}
	switch {
	case r.quota < 1:
		return fmt.Errorf("quotashare: tokens is %d: want at least 1", r.quota)
	case r.window < 0:
		return fmt.Errorf("quotashare: window is %v: want a positive duration, or 0 for one minute", r.window)
	case r.pace > sliding.MaxParts: // or q.Pace below 0
		return fmt.Errorf("quotashare: pace is %d: want 1 to %d, or 0 for %[2]d", q.Pace, sliding.MaxParts)
	case q.Overdraft < 0:
		return fmt.Errorf("quotashare: overdraft is %d: want 0 or more", q.Overdraft)
	}
	r.most = uint64(r.quota) + uint64(q.Overdraft)

	var cut [NumClasses]uint64
	all, open, left := 0.0, 0.0, r.quota
	for c := range shares {
		share, floor, ceiling := shares[c], floors[c], q.Ceilings[c]
		switch {
		// Conditions are written so that a NaN fails them.
		case !(share >= 0 && share <= 1):
			return fmt.Errorf("quotashare: shares.%v is %v: want a fraction from 0 to 1", Class(c), share)
		case !(floor >= 0 && floor <= share+tolerance):
			return fmt.Errorf("quotashare: floors.%v is %v: want a fraction from 0 to the class's share, which is %v (NoFloors, or \"none\" in JSON, for no floor at all)", Class(c), floor, share)
		case ceiling != 0 && ceiling != Closed && !(ceiling > 0 && ceiling >= share-tolerance && ceiling <= 1):
			return fmt.Errorf("quotashare: ceilings.%v is %v: want a fraction from the class's share, which is %v, to 1 (to admit nothing: Closed, or 0 in JSON)", Class(c), ceiling, share)
		}
		all += share
		if ceiling == Closed {
			share = 0
		}
		open += share
		r.share[c], cut[c] = portion(r.quota, share)
		left -= r.share[c]
	}
	if all > 1+tolerance {
		return fmt.Errorf("quotashare: shares add up to %v: want at most 1", all)
	}
	if left != 0 && open >= 1-tolerance {
		r.share.apportion(r.quota, left, &cut, shares)
	}
	return nil
}

// bound fills in the floors and ceilings of q, after divide.
func (r *rule) bound(q *Quota, shares, floors *Fractions) {
	for c := range shares {
		share, floor, ceiling := r.share[c], r.share[c], r.quota
		if floors[c] < shares[c] {
			floor, _ = portion(r.quota, floors[c])
			floor = min(floor, share)
		}
		if q.Ceilings[c] > shares[c] {
			ceiling, _ = portion(r.quota, q.Ceilings[c])
			ceiling = max(ceiling, share)
		} else if q.Ceilings[c] != 0 { // the share, or Closed, of which the share is 0
			ceiling = share
		}
		r.floor[c], r.ceiling[c] = floor, ceiling
	}
	r.floors = r.floor[Interactive] + r.floor[Background] + r.floor[Batch]
}

// apportion adds what rounding left of the quota to parts, each of which is its share of tokens, rounded down in the
// sense of portion, and cut by so much; the shares add up to 1 within tolerance. It is the one division that satisfies
// all of these:
//
//   - a part is its share or one token more, as long as tolerance is below a token;
//   - the parts add up to tokens;
//   - what rounding left goes to the parts that it cut most (the method of largest remainders), among equals to the
//     larger share, among these to the higher class;
//   - what tolerance lets the shares miss 1 by, if it is whole tokens, is the largest share's.
func (parts *ClassTokens) apportion(tokens, left int64, cut *[NumClasses]uint64, shares *Fractions) {
	largest := 0
	for c := range shares {
		if shares[c] > shares[largest] {
			largest = c
		}
	}
	if left < 0 || left > NumClasses {
		parts[largest] += left
		return
	}
	for ; left > 0; left-- {
		most := largest
		for c := range cut {
			// Of 22 tokens 0.2 and 0.7 are cut by 0.4, as they were written; what float64s miss of that, at most what portion
			// allows for both, makes no difference.
			more := (int64(cut[c]) - int64(cut[most])) >> 9
			missed := sliding.Add(parts[c]+parts[most], tokens>>8+2)
			if more > missed || more >= -missed && shares[c] > shares[most] {
				most = c
			}
		}
		parts[most]++
		cut[most] = 0
	}
}

// portion returns a fraction, 0 to 1, of tokens in whole tokens, rounded down, and what rounding cut off in units of
// 2^-62 tokens. A float64 stands for all numbers that round to it, and somebody wrote one of them: 0.29, not
// 0.28999999999999998. So if a whole number of tokens lies within that rounding, just above, it is the answer.
func portion(tokens int64, fraction float64) (whole int64, cut uint64) {
	const one = 1 << 62
	hi, lo := bits.Mul64(uint64(int64(fraction*one)), uint64(tokens))
	w := hi<<2 | lo>>62
	cut = lo & (one - 1)
	// The fraction is at most 2^-53 of itself too small as it was written, and 2^-62 as it was converted.
	if cut > 0 && (one-cut)>>9 <= w+uint64(tokens)>>9+1 {
		w, cut = w+1, 0
	}
	return int64(w), cut
}

// Usage says who holds what of a quota. A Window fills it in; Admit takes it. Negative fields count as 0.
type Usage struct {
	// Used is the tokens charged to each class that are still inside the window.
	Used ClassTokens

	// Recent is the pace of each class's charges, by which borrowing is spread (Quota.Pace): the largest of the tokens
	// charged in the last Window/Pace, half of those in the last 2 Window/Pace, a third of those in the last 3, and so on
	// down to a Pace-th of those in the whole Window, each rounded down.
	Recent ClassTokens

	// Demand is the most that each class lately asked for in one window, refused calls included. It is what is held
	// for the class; zero holds nothing beyond its floor.
	Demand ClassTokens

	// Others is the tokens that others hold on the same account, as far as the provider tells: part of the total, of
	// no class. A Window knows them from Observe.
	Others int64
}

// A Reason says why a call was admitted or refused.
type Reason uint8

const (
	ReasonNone      Reason = iota // no decision: the zero Decision
	ReasonOwnShare                // admitted within the class's share
	ReasonBorrowed                // admitted above it, out of what the others leave idle
	ReasonQuotaFull               // refused: the window has no room for the call
	ReasonReserved                // refused: the room that is left is kept for other classes
	ReasonCapped                  // refused: the class would pass its ceiling
	ReasonPaced                   // refused: the class borrows faster than a loan may be taken
	ReasonQueued                  // refused: others of the class wait, and they come first
	ReasonTooLarge                // refused for good: larger than the class is ever admitted
	ReasonInvalid                 // refused for good: tokens below 1, no such class, or a quota that Validate refuses
)

// NumReasons is the number of reasons.
const NumReasons = 10

var reasons = [NumReasons]string{
	"none", "own_share", "borrowed", "quota_full", "reserved", "capped", "paced", "queued", "too_large", "invalid",
}

// String returns the reason as a label for logs and metrics: "own_share", "quota_full", "too_large"; "none" for
// ReasonNone and "reason(42)" for a value that is no reason.
func (r Reason) String() string {
	if int(r) < len(reasons) {
		return reasons[r]
	}
	return "reason(" + strconv.Itoa(int(r)) + ")"
}

// MarshalText returns String. The error is always nil.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// admits reports whether the reason is one of an admission.
func (r Reason) admits() bool { return r == ReasonOwnShare || r == ReasonBorrowed }

// permanent reports whether the reason is one of a refusal that no wait can help.
func (r Reason) permanent() bool { return r == ReasonTooLarge || r == ReasonInvalid }

// A Decision answers whether a call may be made now.
type Decision struct {
	Admitted bool
	Reason   Reason

	// RetryAfter is how long from the decision to wait before the call is asked for again: 0 when it was admitted, and
	// when no wait can help.
	RetryAfter time.Duration
}

// Permanent reports whether the call was refused and no wait can help: it is too large for the class, or invalid.
func (d Decision) Permanent() bool { return !d.Admitted && d.Reason.permanent() }

// RetryAfterSeconds returns RetryAfter in whole seconds for an HTTP Retry-After header, rounded up, so that nobody is
// told to come back too early. It is at least 1 for a refusal that can be waited for, and 0 for an admission and for
// a Permanent refusal.
func (d Decision) RetryAfterSeconds() int64 {
	if d.Admitted || d.Permanent() {
		return 0
	}
	seconds := int64(d.RetryAfter / time.Second)
	if d.RetryAfter%time.Second > 0 {
		seconds++
	}
	return max(seconds, 1)
}

// Admit decides whether a call of the class, estimated at estTokens, may be made under the quota, given who holds what
// of it. It is the rule that a Window applies, as a pure function: it reads no clock, charges nothing, allocates
// nothing, and gives an answer to every input. As it knows no ages of charges, its RetryAfter is Backoff.
//
// With Q the quota, S, F and C the share, floor and ceiling of each class, U, R and D its Used, Recent and Demand, and
// T the sum of all U and Others, a call of e tokens of class c is decided so:
//
//  1. e < 1, no such class, or a quota that Validate refuses: ReasonInvalid.
//  2. e above Q less the floors of the other classes, or above C: ReasonTooLarge.
//  3. Own share, if U + e <= S: admitted if e <= Q + Overdraft - T, less what the others have not used of their floors.
//  4. Borrowing, otherwise. What is held for another class is D + F, but at most S. Free is Q - T, less what the
//     others have not used of what is held for them. Admitted if e <= free, and U + e <= C, and, with a Pace above 1,
//     R * Pace < min(free + U, C).
//  5. A refusal gives the first of these that applies: ReasonQuotaFull, ReasonReserved, ReasonCapped, ReasonPaced.
func Admit(class Class, estTokens int64, usage Usage, quota Quota) Decision {
	var (
		r     rule
		other Fractions
	)
	shares, floors := quota.fractions(&other)
	if err := r.divide(&quota, shares, floors); err != nil {
		return Decision{Reason: ReasonInvalid}
	}
	if r.ample(class, estTokens, &usage) {
		return decision(ReasonOwnShare)
	}
	r.bound(&quota, shares, floors)
	reason, holdable := r.judge(class, estTokens, &usage)
	if reason == ReasonBorrowed && r.paced(usage.Recent[class], holdable) {
		reason = ReasonPaced
	}
	d := decision(reason)
	if !d.Admitted && !d.Permanent() {
		d.RetryAfter = Backoff(class, r.window)
	}
	return d
}

func decision(r Reason) Decision { return Decision{Admitted: r.admits(), Reason: r} }

// ample reports whether a call is within its class's share, and every other class within its own. Then it fits whatever
// the floors are, for they are within the shares, and these within the quota.
func (r *rule) ample(c Class, e int64, u *Usage) bool {
	if e < 1 || c >= NumClasses || e > r.share[c]-max(u.Used[c], 0) || u.Others > 0 {
		return false
	}
	for d, used := range &u.Used {
		if used > r.share[d] {
			return false
		}
	}
	return true
}

// judge is the rule that Admit states, but for the pace, which a Window needs to know of loans alone. For a loan it also
// returns what the class may hold, borrowed or not: in the terms of Admit min(free + U, C).
func (r *rule) judge(c Class, e int64, u *Usage) (reason Reason, holdable uint64) {
	if e < 1 || c >= NumClasses {
		return ReasonInvalid, 0
	}
	used := max(u.Used[c], 0)
	if e <= r.share[c]-used {
		switch {
		case fits(e, take(rest(r.most, c, u, &r.floor), used)):
			return ReasonOwnShare, 0
		case fits(e, take(rest(r.most, c, u, &ClassTokens{}), used)):
			return ReasonReserved, 0
		}
		return ReasonQuotaFull, 0
	}
	if e > r.largest(c) { // no call within the share is, for the shares of all are within the quota
		return ReasonTooLarge, 0
	}
	held := r.held(u)
	holdable = rest(uint64(r.quota), c, u, &held)
	switch {
	case fits(e, take(holdable, used)):
	case fits(e, take(rest(uint64(r.quota), c, u, &ClassTokens{}), used)):
		return ReasonReserved, 0
	default:
		return ReasonQuotaFull, 0
	}
	if e > r.ceiling[c]-used {
		return ReasonCapped, 0
	}
	return ReasonBorrowed, min(holdable, uint64(r.ceiling[c]))
}

// largest returns the tokens of the largest call that the class is ever admitted.
func (r *rule) largest(c Class) int64 { return min(r.quota-(r.floors-r.floor[c]), r.ceiling[c]) }

// held returns what is held for each class: what it lately asked for, and its floor as headroom on top, but at most
// its share.
func (r *rule) held(u *Usage) (held ClassTokens) {
	for d := range held {
		held[d] = r.floor[d] + min(max(u.Demand[d], 0), r.share[d]-r.floor[d])
	}
	return held
}

// paced reports whether charges of the recent pace would take all that the class may hold before a window is over.
func (r *rule) paced(recent int64, holdable uint64) bool {
	if r.pace == 1 {
		return false
	}
	hi, lo := bits.Mul64(uint64(max(recent, 0)), r.pace)
	return hi > 0 || lo >= holdable
}

// tooFast returns the lowest recent pace that is too fast.
func (r *rule) tooFast(holdable uint64) int64 {
	return int64((holdable + r.pace - 1) / r.pace)
}

// rest returns what is left of total for class c when each other class takes what it uses, or what is kept for it if
// that is more. It is 0 where nothing is left. Subtracting one by one from an unsigned total is exact for every input.
func rest(total uint64, c Class, u *Usage, kept *ClassTokens) uint64 {
	total = take(total, u.Others)
	for d := range kept {
		if Class(d) != c {
			total = take(total, max(u.Used[d], kept[d]))
		}
	}
	return total
}

// take returns total less tokens, of which a negative number is none, but at least 0.
func take(total uint64, tokens int64) uint64 {
	t := uint64(max(tokens, 0))
	return total - min(t, total)
}

func fits(e int64, room uint64) bool { return uint64(e) <= room }

// ParseQuota reads a Quota from JSON:
//
//	{
//	  "tokens": 2000000,
//	  "window": "1m",
//	  "shares": {"interactive": 0.7, "background": 0.2, "batch": 0.1},
//	  "floors": {"interactive": 0.1, "background": 0.05, "batch": 0.05},
//	  "ceilings": {"batch": 0.5},
//	  "pace": 12,
//	  "overdraft": 0
//	}
//
// Only tokens is required. A key that is left out is the default of its field, which the result has written out. But a
// class that is left out of shares has none, as in a Go literal, and one that is left out of floors or ceilings has no
// floor, or no ceiling of its own. "floors": "none" is NoFloors, and so are floors that are all 0; a ceiling of 0 is
// Closed. A window is written for time.ParseDuration.
//
// The form is strict. An unknown or repeated key, a value of the wrong kind, a number that is no whole int64 where one
// is due (1e6 and 1000000.0 are), a quota that Validate refuses, and anything after the object are errors that name
// the key and say what would be right; the Quota is then zero.
func ParseQuota(data []byte) (Quota, error) {
	q, err := parseQuota(data)
	if err != nil {
		return Quota{}, err
	}
	if err := q.Validate(); err != nil {
		return Quota{}, err
	}
	return q.withDefaults(), nil
}

// UnmarshalJSON is ParseQuota. On an error the quota is left as it was.
func (q *Quota) UnmarshalJSON(data []byte) error {
	parsed, err := ParseQuota(data)
	if err == nil {
		*q = parsed
	}
	return err
}

// MarshalJSON returns the form that ParseQuota reads, with the defaults written out. A quota that Validate refuses is
// an error.
func (q Quota) MarshalJSON() ([]byte, error) {
	if err := q.Validate(); err != nil {
		return nil, err
	}
	q = q.withDefaults()
	var ceilings struct {
		Interactive *float64 `json:"interactive,omitempty"`
		Background  *float64 `json:"background,omitempty"`
		Batch       *float64 `json:"batch,omitempty"`
	}
	for c, to := range []**float64{&ceilings.Interactive, &ceilings.Background, &ceilings.Batch} {
		if ceiling := q.Ceilings[c]; ceiling != 0 {
			closed := max(ceiling, 0) // Closed is written as 0
			*to = &closed
		}
	}
	form := struct {
		Tokens    int64  `json:"tokens"`
		Window    string `json:"window"`
		Shares    any    `json:"shares"`
		Floors    any    `json:"floors"`
		Ceilings  any    `json:"ceilings,omitempty"`
		Pace      int    `json:"pace"`
		Overdraft int64  `json:"overdraft"`
	}{q.Tokens, q.Window.String(), q.Shares.form(), q.Floors.form(), nil, q.Pace, q.Overdraft}
	if q.Floors == NoFloors {
		form.Floors = noFloors
	}
	if q.Ceilings != (Fractions{}) {
		form.Ceilings = ceilings
	}
	return json.Marshal(form)
}

// noFloors is NoFloors in JSON.
const noFloors = "none"

func (f Fractions) form() any {
	return struct {
		Interactive float64 `json:"interactive"`
		Background  float64 `json:"background"`
		Batch       float64 `json:"batch"`
	}{f[Interactive], f[Background], f[Batch]}
}

// parseQuota reads the form and leaves to Validate what holds for a Quota however it came about.
func parseQuota(data []byte) (q Quota, err error) {
	err = eachKey(data, "the quota", func(key string, value json.RawMessage) (err error) {
		switch key {
		case "tokens":
			q.Tokens, err = parseTokens(key, value)
		case "window":
			q.Window, err = parseWindow(key, value)
		case "shares":
			q.Shares, err = parseFractions(key, value, 0)
			if err == nil && q.Shares == (Fractions{}) {
				err = errors.New("quotashare: shares are all 0: want one above 0, or no such key for the default shares")
			}
		case "floors":
			if value[0] == '"' {
				q.Floors = NoFloors
				if string(value) != `"`+noFloors+`"` {
					err = fmt.Errorf("quotashare: floors is %s: want an object or %q", value, noFloors)
				}
				return err
			}
			q.Floors, err = parseFractions(key, value, 0)
			if q.Floors == (Fractions{}) {
				q.Floors = NoFloors // whoever writes 0 does not mean the default
			}
		case "ceilings":
			q.Ceilings, err = parseFractions(key, value, Closed)
		case "pace":
			var pace int64
			if pace, err = parseTokens(key, value); err == nil && (pace < 0 || pace > sliding.MaxParts) {
				err = fmt.Errorf("quotashare: pace is %s: want 1 to %d, or 0 for %[2]d", value, sliding.MaxParts)
			}
			q.Pace = int(pace)
		case "overdraft":
			q.Overdraft, err = parseTokens(key, value)
		default:
			err = fmt.Errorf("quotashare: unknown key %q: want tokens, window, shares, floors, ceilings, pace or overdraft", key)
		}
		return err
	})
	return q, err
}

// eachKey calls do for each key of the JSON object, in the order in which they stand. It is an error if data is no
// object or a key stands twice.
func eachKey(data []byte, name string, do func(key string, value json.RawMessage) error) error {
	if err := json.Unmarshal(data, new(json.RawMessage)); err != nil { // all of the syntax, to the end of data
		return fmt.Errorf("quotashare: %s: %w", name, err)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	if start, _ := dec.Token(); start != json.Delim('{') {
		return fmt.Errorf("quotashare: %s is %s: want an object", name, bytes.TrimSpace(data))
	}
	seen := map[string]bool{}
	for dec.More() {
		token, _ := dec.Token()
		key := token.(string)
		if seen[key] {
			return fmt.Errorf("quotashare: %s has the key %q twice: want it once", name, key)
		}
		seen[key] = true
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return fmt.Errorf("quotashare: %s: %w", name, err)
		}
		if err := do(key, value); err != nil {
			return err
		}
	}
	return nil
}

// parseTokens reads a whole number, in any of the ways in which JSON can write it.
func parseTokens(key string, value json.RawMessage) (int64, error) {
	// A large exponent is no int64, and is not worth the memory that its digits would take.
	exponent := 0
	if e := bytes.IndexAny(value, "eE"); e >= 0 {
		exponent, _ = strconv.Atoi(string(value[e+1:]))
	}
	if -1000 < exponent && exponent < 1000 {
		if number, ok := new(big.Rat).SetString(string(value)); ok && number.IsInt() && number.Num().IsInt64() {
			return number.Num().Int64(), nil
		}
	}
	return 0, fmt.Errorf("quotashare: %s is %s: want a whole number that fits an int64", key, value)
}

func parseWindow(key string, value json.RawMessage) (time.Duration, error) {
	var text string
	if err := json.Unmarshal(value, &text); err == nil {
		if d, err := time.ParseDuration(text); err == nil && d > 0 {
			return d, nil
		}
	}
	return 0, fmt.Errorf(`quotashare: %s is %s: want a positive duration such as "1m" or "30s"`, key, value)
}

// parseFractions reads an object of classes; zero is what a 0 that is written down stands for.
func parseFractions(key string, value json.RawMessage, zero float64) (fractions Fractions, err error) {
	err = eachKey(value, key, func(name string, value json.RawMessage) error {
		for c := range Class(NumClasses) {
			if c.String() != name {
				continue
			}
			f := -1.0 // stays for null
			if err := json.Unmarshal(value, &f); err != nil || f < 0 || f > 1 {
				return fmt.Errorf("quotashare: %s.%s is %s: want a fraction from 0 to 1", key, name, value)
			}
			if f == 0 {
				if digits, _, _ := bytes.Cut(bytes.ToLower(value), []byte("e")); bytes.ContainsAny(digits, "123456789") {
					return fmt.Errorf("quotashare: %s.%s is %s: want 0 or a fraction that a float64 can tell from it", key, name, value)
				}
				f = zero
			}
			fractions[c] = f
			return nil
		}
		return fmt.Errorf("quotashare: unknown key %q in %s: want interactive, background or batch", name, key)
	})
	return fractions, err
}
