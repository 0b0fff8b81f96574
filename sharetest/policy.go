package sharetest

import (
	"fmt"
	"time"

	"github.com/quotashare/quotashare"
)

// A Policy is who decides in a replay. All but [ByWindow] are there to be compared with it.
type Policy uint8

const (
	// ByWindow is the quotashare.Window of the quota.
	ByWindow Policy = iota

	// Undecided is nobody: every call goes to the provider. Of the quota only Tokens and Window matter. Give
	// Interactive some Patience: without it the first 429 is the end of a call.
	Undecided

	// StaticPartition gives each class its share and nothing else: a Window whose ceilings are the shares.
	StaticPartition

	// StrictPriority admits a call while the window has room and no call of a class above waits. Floors and shares mean
	// nothing to it. The refused come back after quotashare.Backoff.
	StrictPriority

	// PatternSketch is the rule in its first form: a class may have its share whatever the others hold, and borrow
	// what the classes with larger shares leave beyond their floors. It can admit more than the quota. The refused
	// come back after quotashare.Backoff.
	PatternSketch

	numPolicies = iota
)

// String returns "shares", "nothing decides", "static partition", "strict priority" or "the pattern's sketch".
func (p Policy) String() string {
	switch p {
	case ByWindow:
		return "shares"
	case Undecided:
		return "nothing decides"
	case StaticPartition:
		return "static partition"
	case StrictPriority:
		return "strict priority"
	case PatternSketch:
		return "the pattern's sketch"
	}
	return fmt.Sprintf("policy(%d)", uint8(p))
}

// MarshalText returns what String returns.
func (p Policy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// newWindow returns the Window that decides by the policy, or nil if none does.
func (p Policy) newWindow(quota quotashare.Quota, clock func() time.Time) (*quotashare.Window, error) {
	switch p {
	case ByWindow:
	case StaticPartition:
		quota.Ceilings = quota.Shares
		for c, share := range quota.Shares {
			if share == 0 { // as a ceiling that would be none
				quota.Ceilings[c] = quotashare.Closed
			}
		}
	default:
		return nil, nil
	}
	return quotashare.NewWindow(quota, quotashare.WithClock(clock))
}

// decide decides on a call, where no Window does, by what is charged and who waits.
func (p Policy) decide(class quotashare.Class, tokens int64, quota quotashare.Quota, used quotashare.ClassTokens,
	waiting [quotashare.NumClasses]int,
) quotashare.Decision {
	admitted := quotashare.Decision{Admitted: true, Reason: quotashare.ReasonOwnShare}
	if used[class]+tokens > quota.Limits(class).Share {
		admitted.Reason = quotashare.ReasonBorrowed
	}
	refused := quotashare.Decision{
		Reason: quotashare.ReasonQuotaFull, RetryAfter: quotashare.Backoff(class, quota.Window),
	}
	free := quota.Tokens - sum(used)
	switch p {
	case Undecided:
		return admitted
	case StrictPriority:
		for above := range class {
			if waiting[above] > 0 {
				refused.Reason = quotashare.ReasonReserved
				return refused
			}
		}
	case PatternSketch:
		own := quota.Limits(class).Share
		if used[class]+tokens <= own {
			return admitted
		}
		for other := range quotashare.Class(quotashare.NumClasses) {
			if l := quota.Limits(other); l.Share > own {
				free -= max(l.Floor-used[other], 0)
			}
		}
	}
	if tokens <= free {
		return admitted
	}
	return refused
}
