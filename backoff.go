package quotashare

import "time"

// Backoff returns how long a refused caller of the class waits when nothing better is known: Window/120 for
// Interactive, Window/30 for Background and Window/12 for Batch, rounded down but at least 1 ns and at most window.
// A window of 0 is one minute, as in Quota; a negative one gives 0. An unknown class waits as Batch does.
//
// Admit, which knows no ages of charges, gives it as RetryAfter. A Window knows when the call will fit and says that;
// there Backoff is the least that Background and Batch are told to wait, so that work that nobody waits for does not
// come back for every few tokens that drain.
func Backoff(class Class, window time.Duration) time.Duration {
	switch {
	case window == 0:
		window = defaultWindow
	case window < 0:
		return 0
	}
	part := window / 12
	switch class {
	case Interactive:
		part = window / 120
	case Background:
		part = window / 30
	}
	return max(part, 1)
}
