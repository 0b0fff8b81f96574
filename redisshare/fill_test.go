package redisshare

import (
	"context"
	"sync"
	"testing"
	"time"

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
