package redisshare

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// BenchmarkAcquire compares one decision with redis_rate's, on the same server, in turn. It reports the medians.
func BenchmarkAcquire(b *testing.B) {
	ctx := context.Background()
	client := newNode(b).client()
	for _, c := range []struct {
		name   string
		calls  int // in the window, before
		class  quotashare.Class
		tokens int64 // of the quota
		e      int64
		want   quotashare.Reason
	}{
		{"own/10", 10, quotashare.Interactive, 1 << 40, 1000, quotashare.ReasonOwnShare},
		{"own/100", 100, quotashare.Interactive, 1 << 40, 1000, quotashare.ReasonOwnShare},
		{"own/1000", 1000, quotashare.Interactive, 1 << 40, 1000, quotashare.ReasonOwnShare},
		{"own/10000", 10_000, quotashare.Interactive, 1 << 40, 1000, quotashare.ReasonOwnShare},
	} {
		b.Run(c.name, func(b *testing.B) {
			w, err := New(client, b.Name(), quotashare.Quota{Tokens: c.tokens}, Closed, WithTimeout(time.Second))
			require.NoError(b, err)
			defer w.Close(ctx)
			limiter := redis_rate.NewLimiter(client)
			for range c.calls {
				_, _, err := w.TryAcquire(ctx, c.class, c.e)
				require.NoError(b, err)
			}
			var ours, theirs []time.Duration
			for b.Loop() {
				began := time.Now()
				_, d, err := w.TryAcquire(ctx, c.class, c.e)
				ours = append(ours, time.Since(began))
				if err != nil || d.Reason != c.want {
					b.Fatal(d, err)
				}
				began = time.Now()
				r, err := limiter.Allow(ctx, b.Name(), redis_rate.PerSecond(1<<30))
				theirs = append(theirs, time.Since(began))
				if err != nil || r.Allowed != 1 {
					b.Fatal(r, err)
				}
			}
			slices.Sort(ours)
			slices.Sort(theirs)
			b.ReportMetric(float64(ours[len(ours)/2].Nanoseconds())/1e3, "us/decision")
			b.ReportMetric(float64(theirs[len(theirs)/2].Nanoseconds())/1e3, "us/redis_rate")
			b.ReportMetric(float64(ours[len(ours)/2])/float64(theirs[len(theirs)/2]), "ratio")
		})
	}
}
