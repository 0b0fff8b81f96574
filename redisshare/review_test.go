package redisshare

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

func (b *bubbleRedis) inMode(t *testing.T, quota quotashare.Quota, mode Mode, options ...Option) *replica {
	t.Helper()
	w, err := New(b, t.Name(), quota, mode, options...)
	require.NoError(t, err)
	useClock(t, w)
	return &replica{w, t, b, time.Now()}
}

// TestCloseGivesUp: while Redis is away Close does not try each of many pending corrections for seconds.
func TestCloseGivesUp(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		quota := classQuota(interactive, 100_000)
		quota.Window = time.Hour
		w := b.inMode(t, quota, Closed)
		var grants []*quotashare.Grant
		for range 50 * batch {
			grants = append(grants, w.admit(interactive, 10))
		}
		b.before.set(func(context.Context, *bubbleRequest) error { return errors.New("gone") })
		for _, g := range grants {
			g.Settle(4)
		}
		began := time.Now()
		require.NoError(t, w.Close(context.Background()))
		t.Log("Close took", time.Since(began))
		require.Less(t, time.Since(began), 30*time.Second)
		require.EqualValues(t, 50*batch, w.Stats().Shared.Dropped)
	})
}

// TestManyShortLivedCallersAreForgotten: as fast as they come.
func TestManyShortLivedCallersAreForgotten(t *testing.T) {
	client := newRealNode(t).client()
	quota := classQuota(interactive, 1_000_000)
	l := newLoad(t, client, quota)
	for i := range 30_000 { // 100 a second, for 300 seconds
		l.call(fmt.Sprint("slot:", i, ":0"), interactive, 1)
		l.now = l.now.Add(10 * time.Millisecond)
		if i%1000 == 0 {
			l.flush()
		}
		if i%5000 == 0 {
			t.Log(i/100, "s:", l.fields(), "fields", l.memory(), "bytes")
		}
	}
	l.flush()
	t.Log(l.fields(), "fields")
	require.Less(t, l.fields(), int64(75*100*3/2))
}

// TestACallThatEndedIsTakenBackInModeOpen: whatever is asked in its slot meanwhile.
func TestACallThatEndedIsTakenBackInModeOpen(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.inMode(t, classQuota(interactive, 1000), Open)
		w.admit(interactive, 1)
		b.after.set(func(ctx context.Context, _ *bubbleRequest) error {
			d, _ := ctx.Deadline()
			time.Sleep(time.Until(d))
			return errors.New("cut")
		})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, _, err := w.TryAcquire(ctx, interactive, 100)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		b.after.set(nil)
		b.before.set(func(context.Context, *bubbleRequest) error { return errors.New("gone") })
		_, d, err := w.TryAcquire(t.Context(), interactive, 7)
		require.NoError(t, err)
		require.True(t, d.Admitted)
		b.before.set(nil)
		time.Sleep(time.Second)
		_, _, _ = w.TryAcquire(t.Context(), interactive, 1)
		time.Sleep(time.Second)
		w.admit(interactive, 2)
		w.used(1 + 2)
		require.NoError(t, w.Close(context.Background()))
	})
}

// TestAnOutageBeginsUnderTheQuotaInForce: a request that was under way as the quota was set does not bring the old one back.
func TestAnOutageBeginsUnderTheQuotaInForce(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.inMode(t, classQuota(interactive, 1000), Local(1))
		b.before.set(func(context.Context, *bubbleRequest) error {
			require.NoError(t, w.SetQuota(classQuota(interactive, 100)))
			return errors.New("gone")
		})
		_, d, err := w.TryAcquire(t.Context(), interactive, 60)
		require.NoError(t, err)
		require.True(t, d.Admitted)
		_, d, err = w.TryAcquire(t.Context(), interactive, 60)
		require.NoError(t, err)
		require.False(t, d.Admitted, "100 is the quota")
		require.NoError(t, w.Close(context.Background()))
	})
}

// TestAWaiterTooLargeForLocalHoldsNobodyUp: those behind it fit the local Window.
func TestAWaiterTooLargeForLocalHoldsNobodyUp(t *testing.T) {
	b := newBubbleRedis(t)
	b.bubble(t, func(t *testing.T) {
		w := b.inMode(t, classQuota(batchClass, 1000), Local(0.125))
		b.before.set(func(context.Context, *bubbleRequest) error { return errors.New("gone") })
		ctx, cancel := context.WithCancel(t.Context())
		large := w.acquire(ctx, batchClass, 200)
		small := w.acquire(ctx, batchClass, 10)
		w.at(30 * time.Second)
		ended := small.hasEnded()
		_, d, err := w.TryAcquire(t.Context(), batchClass, 10)
		cancel()
		<-large.ended
		<-small.ended
		require.NoError(t, w.Close(context.Background()))
		require.True(t, ended, "10 of 125 fit")
		require.NoError(t, err)
		require.True(t, d.Admitted)
	})
}
