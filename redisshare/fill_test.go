package redisshare

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// A call that waits behind others, or is refused for them, found the window as full as they did.
func TestFillOfWhatIsQueued(t *testing.T) {
	quota := quotashare.Quota{Tokens: 1000, Shares: quotashare.Fractions{quotashare.Batch: 1}}
	w, err := New(newNode(t).client(), "fill", quota, Closed, WithTimeout(time.Second))
	require.NoError(t, err)
	closeAfter(t, w)
	_, d, err := w.TryAcquire(t.Context(), quotashare.Batch, 900)
	require.NoError(t, err)
	require.True(t, d.Admitted)

	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	for waiting := 1; waiting <= 2; waiting++ {
		group.Go(func() { _, _ = w.Acquire(ctx, quotashare.Batch, 200) })
		require.Eventually(t, func() bool { return w.Stats().Classes[quotashare.Batch].Waiting == waiting }, 5*time.Second, time.Millisecond)
	}
	_, d, err = w.TryAcquire(t.Context(), quotashare.Batch, 10)
	require.NoError(t, err)
	require.Equal(t, quotashare.ReasonQueued, d.Reason)
	batch := w.Stats().Classes[quotashare.Batch]
	require.EqualValues(t, 1, batch.Waits[quotashare.ReasonQueued])
	require.InDelta(t, 0.9, batch.FillAtRefusal, 1e-12)
}

// While the local Window decides, it is the local Window that is full, and the local share that has room or not.
func TestFillOfTheLocalWindow(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true, MaxRetries: -1}) // nobody listens
	defer client.Close()
	quota := quotashare.Quota{
		Tokens: 1000, Shares: quotashare.Fractions{quotashare.Interactive: 0.5, quotashare.Batch: 0.5}, Floors: quotashare.NoFloors, Pace: 1,
	}
	w, err := New(client, "fill", quota, Local(0.1))
	require.NoError(t, err)
	closeAfter(t, w)
	try := func(class quotashare.Class, tokens int64) quotashare.Reason {
		_, d, err := w.TryAcquire(t.Context(), class, tokens)
		require.NoError(t, err)
		return d.Reason
	}
	require.Equal(t, quotashare.ReasonBorrowed, try(quotashare.Batch, 80))
	require.Equal(t, quotashare.ReasonQuotaFull, try(quotashare.Batch, 30))       // above the share
	require.Equal(t, quotashare.ReasonQuotaFull, try(quotashare.Interactive, 30)) // within it
	stats := w.Stats()
	require.InDelta(t, 0.8, stats.Classes[quotashare.Batch].FillAtRefusal, 1e-12)
	require.InDelta(t, 0.8, stats.Classes[quotashare.Interactive].FillAtRefusal, 1e-12)
	require.Zero(t, stats.Classes[quotashare.Batch].HeldUpWithinShare)
	require.EqualValues(t, 1, stats.Classes[quotashare.Interactive].HeldUpWithinShare)
}
