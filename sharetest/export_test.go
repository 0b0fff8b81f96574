package sharetest

import (
	"math/rand/v2"
	"time"
)

// Exponential is exponential, which nothing but flows of calls shows otherwise.
func Exponential(r *rand.PCG) float64 { return exponential(r) }

// A Bucket is a bucket, of which a replay shows only what waits for it.
type Bucket struct{ bucket }

func NewBucket(tokens int64, window, size time.Duration) *Bucket {
	return &Bucket{bucket{tokens: tokens, window: window, size: size}}
}

func (b *Bucket) Take(now time.Duration, tokens int64) bool { return b.take(now, tokens) }

// SetMostEntries makes a replay keep no more than that many entries, until the test is over.
func SetMostEntries(t interface{ Cleanup(func()) }, most int) {
	before := mostEntries
	mostEntries = most
	t.Cleanup(func() { mostEntries = before })
}
