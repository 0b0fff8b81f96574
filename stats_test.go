package quotashare_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

// requireStats compares all of two Stats. Averages may differ by what rounding of floating point numbers makes.
func requireStats(t *testing.T, want, got Stats) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(0, 1e-12)); diff != "" {
		t.Fatal("stats (-want +got):\n", diff)
	}
}

// TestStatsCountWhatHappened follows one story, in which something happens for every field.
func TestStatsCountWhatHappened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quota := Quota{
			Tokens:   1000,
			Shares:   Fractions{Interactive: 0.5, Background: 0.3, Batch: 0.2},
			Floors:   Fractions{Interactive: 0.2, Background: 0.1, Batch: 0.1},
			Ceilings: Fractions{Background: 0.35},
			Pace:     2,
		}
		w := newBubbleWindow(t, quota, WithMaxWait(Interactive, 30*time.Second))
		want := Stats{Quota: 1000}
		interactive, background, batch := &want.Classes[Interactive], &want.Classes[Background], &want.Classes[Batch]
		interactive.Share, interactive.Held = 500, 200 // nobody asked for anything yet, so the floors are held
		background.Share, background.Held = 300, 100
		batch.Share, batch.Held = 200, 100
		requireStats(t, want, w.Stats())

		// Admissions, one of them above the share.
		answered := w.admit(Interactive, 100)
		late := w.admit(Batch, 200)
		unsent := w.admit(Batch, 100)
		unknown := w.admit(Background, 300)
		want.Used = 700
		interactive.Used, interactive.Held, interactive.Admitted, interactive.EstimatedTokens = 100, 300, 1, 100
		background.Used, background.Held, background.Admitted, background.EstimatedTokens = 300, 300, 1, 300
		batch.Used, batch.Held, batch.Admitted, batch.EstimatedTokens = 300, 200, 2, 300
		batch.Borrowed = 1
		requireStats(t, want, w.Stats())

		// Refusals, all while the window is 70 % full. Those for good count as calls, not for the average.
		require.Equal(t, ReasonCapped, w.refuse(Background, 60).Reason)
		require.Equal(t, ReasonTooLarge, w.refuse(Background, 351).Reason)
		require.Equal(t, ReasonInvalid, w.refuse(Background, 0).Reason)
		require.Equal(t, ReasonInvalid, w.refuse(NumClasses, 1).Reason, "counted nowhere, being of no class")
		require.Equal(t, ReasonQuotaFull, w.refuse(Interactive, 350).Reason)
		require.Equal(t, ReasonReserved, w.refuse(Batch, 250).Reason)
		background.Refused = [NumReasons]uint64{ReasonCapped: 1, ReasonTooLarge: 1, ReasonInvalid: 1}
		interactive.Refused = [NumReasons]uint64{ReasonQuotaFull: 1}
		interactive.HeldUpWithinShare = 1
		batch.Refused = [NumReasons]uint64{ReasonReserved: 1}
		interactive.FillAtRefusal, background.FillAtRefusal, batch.FillAtRefusal = 0.7, 0.7, 0.7
		interactive.Held = 500
		requireStats(t, want, w.Stats())

		// Waits: the first ends by the longest wait of its class, the second by its context.
		w.at(10 * time.Second)
		answered.Settle(60)
		ctx, cancel := context.WithCancel(t.Context())
		expires := w.acquire(t.Context(), Interactive, 400)
		leaves := w.acquire(ctx, Batch, 150)
		require.Equal(t, ReasonQueued, w.refuse(Interactive, 10).Reason)
		want.Used, interactive.Used, interactive.SettledTokens = 660, 60, 60
		interactive.Waits[ReasonQuotaFull], batch.Waits[ReasonReserved] = 1, 1
		interactive.Refused[ReasonQueued], interactive.FillAtRefusal = 1, (0.7+0.66+0.66)/3
		batch.FillAtRefusal = (0.7 + 0.66) / 2
		interactive.HeldUpWithinShare = 2
		interactive.Waiting, batch.Waiting = 1, 1
		requireStats(t, want, w.Stats())

		w.at(20 * time.Second)
		cancel()
		synctest.Wait()
		leaves.deniedAt(20 * time.Second)
		batch.Waiting, batch.WaitsCancelled, batch.WaitTime = 0, 1, 10*time.Second
		batch.WaitTimes[2] = 1 // up to 10 s
		requireStats(t, want, w.Stats())

		w.at(40 * time.Second)
		expires.deniedAt(40 * time.Second)
		interactive.Waiting, interactive.WaitsExpired, interactive.WaitTime = 0, 1, 30*time.Second
		interactive.WaitTimes[3] = 1 // up to a minute
		requireStats(t, want, w.Stats())

		// A third wait ends in an admission, when what was charged at the start leaves.
		w.at(45 * time.Second)
		admitted := w.acquire(t.Context(), Background, 290)
		w.at(50 * time.Second)
		unsent.Cancel()
		want.Used, batch.Used, batch.CancelledTokens = 560, 200, 100
		background.Waiting, background.Waits[ReasonReserved] = 1, 1
		background.FillAtRefusal = (0.7 + 0.66) / 2
		requireStats(t, want, w.Stats())
		w.at(time.Minute)
		grant := admitted.admittedAt(time.Minute)
		want.Used, interactive.Used, background.Used, batch.Used = 290, 0, 290, 0
		background.Admitted, background.EstimatedTokens = 2, 590
		background.Waiting, background.WaitsAdmitted, background.WaitTime = 0, 1, 15*time.Second
		background.WaitTimes[3] = 1 // up to a minute
		requireStats(t, want, w.Stats())

		// More than was estimated is counted, late or not. What nobody knows is not, nor is whatever comes second.
		w.at(70 * time.Second)
		grant.Settle(310)
		late.Settle(170)
		unknown.Settle(-1)
		for _, g := range []*Grant{answered, late, unknown, unsent, grant} {
			g.Settle(1)
			g.Cancel()
		}
		want.Used, background.Used, background.SettledTokens = 310, 310, 310
		batch.SettledTokens = 170
		requireStats(t, want, w.Stats())

		// What is in the window goes, and what was asked for is forgotten; what was counted stays.
		w.at(10 * time.Minute)
		want.Used, background.Used = 0, 0
		interactive.Held, background.Held, batch.Held = 200, 100, 100
		requireStats(t, want, w.Stats())

		quota.Tokens = 2000
		require.NoError(t, w.SetQuota(quota))
		want.Quota = 2000
		interactive.Share, background.Share, batch.Share = 1000, 600, 400
		interactive.Held, background.Held, batch.Held = 400, 200, 200
		requireStats(t, want, w.Stats())
	})
}

func TestStatsOfAPacedClass(t *testing.T) {
	w, clock := newTestWindow(t, Quota{Tokens: 1200, Shares: Fractions{Interactive: 1}, Floors: NoFloors, Pace: 12})
	w.TryAcquire(Batch, 100) // all that one of the parts may take
	for range 3 {
		_, d := w.TryAcquire(Batch, 100)
		require.Equal(t, ReasonPaced, d.Reason)
		require.False(t, d.Admitted)
	}
	clock.advance(5 * time.Second)
	w.TryAcquire(Batch, 100)
	want := Stats{Used: 200, Quota: 1200}
	want.Classes[Interactive] = ClassStats{Share: 1200}
	want.Classes[Batch] = ClassStats{
		Used: 200, Admitted: 2, Borrowed: 2, EstimatedTokens: 200,
		Refused: [NumReasons]uint64{ReasonPaced: 3}, FillAtRefusal: 100.0 / 1200,
	}
	requireStats(t, want, w.Stats())
}

func TestStatsOfAnOverfullWindow(t *testing.T) {
	quota := wholeQuota(1000)
	w, _ := newTestWindow(t, quota)
	grant, _ := w.TryAcquire(Interactive, 10)
	grant.Settle(1500)
	_, d := w.TryAcquire(Interactive, 10)
	require.Equal(t, ReasonQuotaFull, d.Reason)
	quota.Tokens = 6000
	require.NoError(t, w.SetQuota(quota))
	want := Stats{Used: 1500, Quota: 6000}
	want.Classes[Interactive] = ClassStats{
		Used: 1500, Share: 6000, Held: 1510, Admitted: 1, EstimatedTokens: 10, SettledTokens: 1500,
		Refused: [NumReasons]uint64{ReasonQuotaFull: 1}, FillAtRefusal: 1.5, // of the quota at that time
	}
	requireStats(t, want, w.Stats())

	// Sums saturate, and no more than the share is held.
	grant, _ = w.TryAcquire(Interactive, 10)
	grant.Settle(math.MaxInt64)
	stats := w.Stats()
	require.Equal(t, int64(math.MaxInt64), stats.Used)
	require.Equal(t, int64(math.MaxInt64), stats.Classes[Interactive].SettledTokens)
	require.Equal(t, int64(6000), stats.Classes[Interactive].Held)
}

// TestStatsSaturate: sums that would pass an int64 stay at the largest.
func TestStatsSaturate(t *testing.T) {
	quota := Quota{Tokens: math.MaxInt64, Window: 100 * 365 * 24 * time.Hour, Shares: Fractions{0.5, 0, 0.5}, Floors: NoFloors}
	t.Run("tokens", func(t *testing.T) {
		w, _ := newTestWindow(t, quota)
		for range 3 {
			grant, d := w.TryAcquire(Batch, 1<<61)
			require.True(t, d.Admitted)
			grant.Cancel()
		}
		require.Equal(t, int64(3<<61), w.Stats().Classes[Batch].CancelledTokens)
		for range 3 {
			grant, _ := w.TryAcquire(Batch, 1<<61)
			grant.Cancel()
		}
		require.Equal(t, int64(math.MaxInt64), w.Stats().Classes[Batch].CancelledTokens)

		var grants [NumClasses]Grant
		for class := range grants {
			grants[class], _ = w.TryAcquire(Class(class), 1)
		}
		for class := range grants {
			grants[class].Settle(math.MaxInt64 - 1)
			require.Equal(t, int64(math.MaxInt64-1), w.Stats().Classes[class].Used)
		}
		require.Equal(t, int64(math.MaxInt64), w.Stats().Used, "of all classes")
	})
	t.Run("of others on the account", func(t *testing.T) {
		w, _ := newTestWindow(t, quota)
		grant, _ := w.TryAcquire(Batch, 10)
		w.Observe(0, 0)
		grant.Settle(math.MaxInt64)
		require.Equal(t, int64(math.MaxInt64), w.Stats().Used)
	})
	t.Run("waits", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newBubbleWindow(t, quota)
			w.admit(Batch, quota.Tokens)
			ctx, cancel := context.WithCancel(t.Context())
			for range 4 {
				w.acquire(ctx, Batch, quota.Tokens).waits()
			}
			w.at(quota.Window - 1)
			cancel()
			synctest.Wait()
			require.Equal(t, time.Duration(math.MaxInt64), w.Stats().Classes[Batch].WaitTime)
		})
	})
}

func TestWaitBoundsAreWhatDashboardsShow(t *testing.T) {
	want := [NumWaitBounds]time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second, time.Minute, 5 * time.Minute}
	require.Equal(t, want, WaitBounds)
}

// A wait that SetQuota ends is over like any other, and counted by itself.
func TestStatsOfAWaitThatBecomesTooLarge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newBubbleWindow(t, classQuota(Batch, 1000))
		w.admit(Batch, 1000)
		call := w.acquire(t.Context(), Batch, 300)
		w.at(20 * time.Second)
		require.NoError(t, w.SetQuota(classQuota(Batch, 200)))
		synctest.Wait()
		call.deniedAt(20 * time.Second)
		want := Stats{Used: 1000, Quota: 200}
		want.Classes[Batch] = ClassStats{
			Used: 1000, Share: 200, Held: 200, Admitted: 1, EstimatedTokens: 1000,
			Waits: [NumReasons]uint64{ReasonQuotaFull: 1}, WaitsRefused: 1, WaitTime: 20 * time.Second, WaitTimes: [NumWaitBounds]uint64{3: 1},
			HeldUpWithinShare: 0, FillAtRefusal: 1,
		}
		requireStats(t, want, w.Stats())
	})
}

func TestStatsOfTheZeroWindow(t *testing.T) {
	var w Window
	w.TryAcquire(Interactive, 1)
	_, err := w.Acquire(t.Context(), Interactive, 1)
	require.Error(t, err)
	require.Zero(t, w.Stats())
	require.Empty(t, w.Stats().Advice())
}

// TestStatsAreOfOneInstant reads while others change what is read. As every call is of one size, and what is not needed
// is cancelled, the numbers of a snapshot add up only if all of them are of the same instant.
func TestStatsAreOfOneInstant(t *testing.T) {
	const size = 7
	w, err := NewWindow(Quota{Tokens: 100_000, Window: 24 * time.Hour, Floors: NoFloors, Pace: 1})
	require.NoError(t, err)
	var callers sync.WaitGroup
	for class := range Class(NumClasses) {
		for range 2 {
			callers.Go(func() {
				for i := range 3000 {
					grant, d := w.TryAcquire(class, size)
					if d.Admitted && i%3 > 0 {
						grant.Cancel()
					}
				}
			})
		}
	}
	done := make(chan struct{})
	go func() { callers.Wait(); close(done) }()
	var before Stats
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		default:
		}
		s := w.Stats()
		used := int64(0)
		for c, class := range s.Classes {
			used += class.Used
			require.Equal(t, int64(size*class.Admitted), class.EstimatedTokens)
			require.Equal(t, class.EstimatedTokens-class.CancelledTokens, class.Used)
			require.LessOrEqual(t, class.Borrowed, class.Admitted)
			require.LessOrEqual(t, class.Held, class.Share)
			last := before.Classes[c]
			require.GreaterOrEqual(t, class.Admitted, last.Admitted)
			require.GreaterOrEqual(t, class.CancelledTokens, last.CancelledTokens)
			for reason, n := range class.Refused {
				require.GreaterOrEqual(t, n, last.Refused[reason])
			}
		}
		require.Equal(t, used, s.Used)
		before = s
	}
	for _, class := range before.Classes {
		calls := class.Admitted
		for _, n := range class.Refused {
			calls += n
		}
		require.Equal(t, uint64(6000), calls, "each call is counted once")
	}
}

func TestStatsAllocateNothing(t *testing.T) {
	w, clock := newTestWindow(t, Quota{Tokens: 1000})
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		clock.advance(time.Second)
		w.TryAcquire(Batch, 100)
		w.Stats()
	}))
}

// adviceStats returns the Stats in which one class was admitted and refused so often, always within its share.
func adviceStats(class Class, admitted uint64, reason Reason, refused uint64, fill float64) Stats {
	var s Stats
	s.Classes[class] = ClassStats{Admitted: admitted, FillAtRefusal: fill}
	s.Classes[class].Refused[reason] = refused
	s.Classes[class].HeldUpWithinShare = refused
	return s
}

func TestAdviceSaysWhatIsWrong(t *testing.T) {
	for _, test := range []struct {
		stats Stats
		want  string
	}{
		{
			adviceStats(Batch, 5, ReasonReserved, 95, 0.25),
			"batch was refused or had to wait 95 of 100 times while the window was 25 % full on average: its share is wrong, the " +
				"quota is not too small; raise its share, or lower the floors of the others",
		},
		{
			adviceStats(Background, 90, ReasonCapped, 30, 0.375),
			"background was refused or had to wait 30 of 120 times while the window was 38 % full on average: its share is wrong, " +
				"the quota is not too small; raise its ceiling",
		},
		{
			adviceStats(Batch, 1, ReasonQuotaFull, 3, 0.35),
			"batch was refused or had to wait 3 of 4 times while the window was 35 % full on average: its share is wrong, " +
				"the quota is not too small; its calls are large, so make them smaller or raise its share",
		},
		{
			adviceStats(Batch, 2, ReasonPaced, 2, 0),
			"batch was refused or had to wait 2 of 4 times while the window was 0 % full on average: its share is wrong, the quota " +
				"is not too small; raise its share, so that it need not borrow",
		},
		{
			adviceStats(Interactive, 1, ReasonQuotaFull, 5000, 0.97),
			"interactive was refused or had to wait 5000 of 5001 times while the window was 97 % full on average: the quota is too " +
				"small for what is asked; raise it, or move work elsewhere",
		},
	} {
		require.Equal(t, []string{test.want}, test.stats.Advice())
	}

	t.Run("of the most frequent refusal", func(t *testing.T) {
		s := adviceStats(Batch, 0, ReasonPaced, 40, 0.2)
		s.Classes[Batch].Refused[ReasonCapped] = 41
		s.Classes[Batch].Refused[ReasonTooLarge] = 1000 // which no share would admit
		want := "batch was refused or had to wait 81 of 81 times while the window was 20 % full on average: its share is wrong, the " +
			"quota is not too small; raise its ceiling"
		require.Equal(t, []string{want}, s.Advice())
	})

	t.Run("of the most frequent one, refusals and waits together", func(t *testing.T) {
		s := adviceStats(Batch, 0, ReasonReserved, 10, 0.2)
		s.Classes[Batch].Waits[ReasonPaced] = 5
		s.Classes[Batch].Refused[ReasonNone] = 1000 // which nobody decided
		want := "batch was refused or had to wait 15 of 15 times while the window was 20 % full on average: its share is wrong, the " +
			"quota is not too small; raise its share, or lower the floors of the others"
		require.Equal(t, []string{want}, s.Advice())

		s = adviceStats(Batch, 0, ReasonQueued, 15, 0.2) // behind calls that were not counted yet
		require.Equal(t, []string{want}, s.Advice())
	})

	t.Run("a sentence for each class", func(t *testing.T) {
		s := adviceStats(Interactive, 0, ReasonQuotaFull, 1, 0.95)
		s.Classes[Batch] = adviceStats(Batch, 0, ReasonReserved, 1, 0.1).Classes[Batch]
		advice := s.Advice()
		require.Len(t, advice, 2)
		require.Contains(t, advice[0], "interactive was refused")
		require.Contains(t, advice[1], "batch was refused")
	})
}

func TestAdviceIsSilentWhereAllIsWell(t *testing.T) {
	require.Empty(t, Stats{}.Advice())
	const speaks, silent = 1, 0
	below := func(fill float64) float64 { return math.Nextafter(fill, 0) }
	for class := range Class(NumClasses) {
		for _, test := range []struct {
			name  string
			stats Stats
			want  int
		}{
			{"nothing refused", adviceStats(class, 100, ReasonNone, 0, 0), silent},
			{"1 of 100 refused", adviceStats(class, 99, ReasonReserved, 1, 0.2), speaks},
			{"fewer refused", adviceStats(class, 100, ReasonReserved, 1, 0.2), silent},
			{"10 of 1000 refused", adviceStats(class, 990, ReasonReserved, 10, 0.2), speaks},
			{"9 of 1000 refused", adviceStats(class, 991, ReasonReserved, 9, 0.2), silent},
			{"all refused for good", adviceStats(class, 1, ReasonTooLarge, 1000, 0), silent},
			{"all refused as invalid", adviceStats(class, 1, ReasonInvalid, 1000, 0), silent},
			{"below 40 %", adviceStats(class, 0, ReasonReserved, 1, below(0.4)), speaks},
			{"40 %", adviceStats(class, 0, ReasonReserved, 1, 0.4), speaks},
			{"above 40 %", adviceStats(class, 0, ReasonReserved, 1, 0.401), silent},
			{"65 %", adviceStats(class, 0, ReasonReserved, 1, 0.65), silent},
			{"below 90 %", adviceStats(class, 0, ReasonQuotaFull, 1, 0.899), silent},
			{"90 %", adviceStats(class, 0, ReasonQuotaFull, 1, 0.9), speaks},
			{"150 %", adviceStats(class, 0, ReasonQuotaFull, 1, 1.5), speaks},
		} {
			require.Len(t, test.stats.Advice(), test.want, "%v: %s", class, test.name)
		}

		s := adviceStats(class, 0, ReasonQuotaFull, 9, 1)
		s.Classes[class].HeldUpWithinShare = 5
		require.Len(t, s.Advice(), 1, "mostly within its share in a full window")
		s.Classes[class].HeldUpWithinShare = 4
		require.Empty(t, s.Advice(), "mostly above its share in a full window")
		s.Classes[class].Refused[ReasonQuotaFull] = 8
		require.Len(t, s.Advice(), 1, "half of the time")
	}

	t.Run("those refused for good are no calls", func(t *testing.T) {
		s := adviceStats(Batch, 99, ReasonReserved, 1, 0.2)
		s.Classes[Batch].Refused[ReasonTooLarge] = 1000
		s.Classes[Batch].Refused[ReasonInvalid] = 1000
		require.Len(t, s.Advice(), 1)
		require.Contains(t, s.Advice()[0], "had to wait 1 of 100 times")
	})
}

// TestAdviceOnTheWarningOfThePattern makes the night that the advice is for: the window is far from full, and batch is
// refused all the time. The shares are wrong and not the quota, which shows in that others let batch do its work.
func TestAdviceOnTheWarningOfThePattern(t *testing.T) {
	night := func(floors Fractions) Stats {
		w, clock := newTestWindow(t, Quota{Tokens: 1000, Floors: floors, Pace: 1})
		for second := range 600 {
			if second%60 == 0 {
				_, d := w.TryAcquire(Interactive, 100) // a few people
				require.True(t, d.Admitted)
			}
			if second%2 == 0 {
				w.TryAcquire(Batch, 10) // fixtures: 300 tokens a minute
			}
			clock.advance(time.Second)
		}
		return w.Stats()
	}
	// Of 30 fixtures a minute 20 find room, and then the window is 30 % full until the first of them leaves.
	want := "batch was refused or had to wait 100 of 300 times while the window was 30 % full on average: its share is wrong, the " +
		"quota is not too small; raise its share, or lower the floors of the others"
	require.Equal(t, []string{want}, night(DefaultFloors).Advice())
	require.Empty(t, night(ElasticFloors).Advice())
}

// TestAdviceSeesWhoWaits is the same warning for calls that are never refused, for they wait until they fit or give up.
func TestAdviceSeesWhoWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newBubbleWindow(t, Quota{Tokens: 1000, Floors: NoFloors, Ceilings: Fractions{Background: 0.2}})
		w.admit(Background, 200)
		var calls []*bubbleCall
		for range 3 {
			calls = append(calls, w.acquire(t.Context(), Background, 150))
		}
		w.at(3 * time.Minute)
		for _, call := range calls {
			require.True(t, call.hasEnded())
		}
		want := "background was refused or had to wait 3 of 4 times while the window was 20 % full on average: its share " +
			"is wrong, the quota is not too small; raise its ceiling"
		require.Equal(t, []string{want}, w.Stats().Advice())
	})
}

// TestAdviceDependsOnWhatHappened asks for advice at once, and again when all that was charged has left the window.
// What was refused is the same, and so is what there is to say of it.
func TestAdviceDependsOnWhatHappened(t *testing.T) {
	w, clock := newTestWindow(t, Quota{Tokens: 1000, Floors: NoFloors, Pace: 1})
	for _, call := range []struct {
		class  Class
		tokens int64
	}{{Interactive, 600}, {Background, 100}, {Batch, 300}} {
		_, d := w.TryAcquire(call.class, call.tokens)
		require.True(t, d.Admitted)
	}
	for range 100 {
		_, d := w.TryAcquire(Batch, 10)
		require.Equal(t, ReasonQuotaFull, d.Reason)
	}
	require.Empty(t, w.Stats().Advice(), "refused above its share in a full window")
	clock.advance(10 * time.Minute)
	require.Empty(t, w.Stats().Advice(), "refused above its share in a full window, some time ago")
}

func TestDeniedErrorSaysWhyAndWhoHoldsWhat(t *testing.T) {
	const (
		invalid = "invalid: want at least 1 token, a known class and a Window that NewWindow made"

		busy = " (of 1000 tokens: interactive holds 700, background holds 90, batch holds 110, others 50)"
		idle = " (of 1000 tokens: interactive holds 0, background holds 0, batch holds 0, others 0)"
	)
	quota := Quota{Tokens: 1000}
	used := Usage{Used: ClassTokens{Interactive: 700, Background: 90, Batch: 110}, Others: 50}
	for _, test := range []struct {
		class    Class
		tokens   int64
		decision Decision
		usage    Usage
		want     string
	}{
		{Interactive, 300, Decision{Reason: ReasonQuotaFull, RetryAfter: 1500 * time.Millisecond}, used,
			"interactive call of 300 tokens not admitted: quota_full, retry after 1.5s" + busy},
		{Background, 5, Decision{Reason: ReasonReserved, RetryAfter: 2 * time.Minute}, used,
			"background call of 5 tokens not admitted: reserved, retry after 2m0s" + busy},
		{Batch, 5, Decision{Reason: ReasonCapped, RetryAfter: 1}, Usage{},
			"batch call of 5 tokens not admitted: capped, retry after 1ms" + idle},
		{Batch, 5, Decision{Reason: ReasonPaced, RetryAfter: time.Second}, Usage{},
			"batch call of 5 tokens not admitted: paced, retry after 1s" + idle},
		{Batch, 5, Decision{Reason: ReasonQueued, RetryAfter: time.Second}, Usage{},
			"batch call of 5 tokens not admitted: queued, retry after 1s" + idle},
		{Interactive, 851, Decision{Reason: ReasonTooLarge}, used,
			"interactive call of 851 tokens not admitted: too_large: the largest interactive call possible is 850 tokens"},
		{Batch, 201, Decision{Reason: ReasonTooLarge}, used,
			"batch call of 201 tokens not admitted: too_large: the largest batch call possible is 200 tokens"},
		{Batch, -1, Decision{Reason: ReasonInvalid}, used, "batch call of -1 tokens not admitted: " + invalid},
		{NumClasses, 1, Decision{Reason: ReasonInvalid}, used, "class(3) call of 1 tokens not admitted: " + invalid},
		{Interactive, 0, Decision{}, Usage{}, "interactive call of 0 tokens not admitted"},
	} {
		denied := &DeniedError{
			Class: test.class, Tokens: test.tokens, Decision: test.decision, Usage: test.usage, Quota: quota,
		}
		require.EqualError(t, denied, "quotashare: "+test.want)
		require.NoError(t, denied.Unwrap())
	}
}

// deniedBy returns the error of a call that a context ended: before it began, or in the fifth second of its wait.
func deniedBy(t *testing.T, before bool) (err error) {
	synctest.Test(t, func(t *testing.T) {
		w := newBubbleWindow(t, classQuota(Batch, 1000))
		w.admit(Batch, 1000)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if before {
			cancel()
		}
		_, err = w.Acquire(ctx, Batch, 300)
	})
	return err
}

func TestDeniedErrorTellsItsCause(t *testing.T) {
	done, ended := deniedBy(t, true), deniedBy(t, false)
	require.EqualError(t, done, "quotashare: batch call of 300 tokens not admitted: context canceled")
	require.EqualError(t, ended, "quotashare: batch call of 300 tokens not admitted: quota_full, retry after 55s "+
		"(of 1000 tokens: interactive holds 0, background holds 0, batch holds 1000, others 0): context deadline exceeded")

	require.Equal(t, context.Canceled, errors.Unwrap(done))
	require.Equal(t, context.DeadlineExceeded, errors.Unwrap(ended))
	wrapped := fmt.Errorf("summarising: %w", ended)
	require.ErrorIs(t, wrapped, context.DeadlineExceeded)
	require.NotErrorIs(t, wrapped, context.Canceled)
	var denied *DeniedError
	require.ErrorAs(t, wrapped, &denied)
	require.Same(t, ended, denied)
	require.Equal(t, Batch, denied.Class)
	require.Equal(t, int64(300), denied.Tokens)
	require.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: 55 * time.Second}, denied.Decision)
	require.Equal(t, int64(1000), denied.Usage.Used[Batch])
	require.Equal(t, classQuota(Batch, 1000).Shares, denied.Quota.Shares)
	require.Equal(t, time.Minute, denied.Quota.Window, "defaults are written out")
}

func TestDeniedErrorIsLoggedAsAGroup(t *testing.T) {
	noTime := &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{}
		}
		return a
	}}
	for _, test := range []struct {
		err        error
		text, json string
	}{
		{
			&DeniedError{
				Class: Interactive, Tokens: 1200,
				Decision: Decision{Reason: ReasonReserved, RetryAfter: 1500 * time.Millisecond},
			},
			"err.class=interactive err.tokens=1200 err.reason=reserved err.retry_after=1.5s",
			`{"class":"interactive","tokens":1200,"reason":"reserved","retry_after":1500000000}`,
		},
		{
			&DeniedError{Class: Batch, Tokens: 1, Decision: Decision{Reason: ReasonPaced, RetryAfter: 1}},
			"err.class=batch err.tokens=1 err.reason=paced err.retry_after=1ns",
			`{"class":"batch","tokens":1,"reason":"paced","retry_after":1}`,
		},
		{
			&DeniedError{Class: Background, Tokens: 9000, Decision: Decision{Reason: ReasonTooLarge}},
			"err.class=background err.tokens=9000 err.reason=too_large",
			`{"class":"background","tokens":9000,"reason":"too_large"}`,
		},
		{
			deniedBy(t, false),
			"err.class=batch err.tokens=300 err.reason=quota_full err.retry_after=55s " +
				`err.cause="context deadline exceeded"`,
			`{"class":"batch","tokens":300,"reason":"quota_full","retry_after":55000000000,` +
				`"cause":"context deadline exceeded"}`,
		},
	} {
		var text, json bytes.Buffer
		slog.New(slog.NewTextHandler(&text, noTime)).Warn("refused", "err", test.err)
		slog.New(slog.NewJSONHandler(&json, noTime)).Warn("refused", "err", test.err)
		require.Equal(t, "level=WARN msg=refused "+test.text+"\n", text.String())
		require.Equal(t, `{"level":"WARN","msg":"refused","err":`+test.json+"}\n", json.String())
	}
}

// A shadow is a shadow Window under a fake clock, and what it reported.
type shadow struct {
	*Window
	clock    *clock
	reported []*DeniedError
	stats    Stats // at the latest report
}

func newShadow(t *testing.T, quota Quota) *shadow {
	t.Helper()
	s := &shadow{clock: newClock()}
	w, err := NewWindow(quota, WithClock(s.clock.read), WithShadow(func(d *DeniedError) {
		s.reported = append(s.reported, d)
		s.stats = s.Stats() // which would never come back if the lock were held
	}))
	require.NoError(t, err)
	s.Window = w
	return s
}

// eachWayToAsk runs test with TryAcquire and with Acquire, whose answers must say that the call is admitted, and at
// once.
func eachWayToAsk(t *testing.T, test func(t *testing.T, ask func(*Window, Class, int64) *Grant)) {
	t.Run("TryAcquire", func(t *testing.T) {
		test(t, func(w *Window, class Class, tokens int64) *Grant {
			before := w.Stats()
			grant, d := w.TryAcquire(class, tokens)
			require.Equal(t, Decision{Admitted: true, Reason: reasonCounted(before, w.Stats(), class)}, d)
			return &grant
		})
	})
	t.Run("Acquire", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			test(t, func(w *Window, class Class, tokens int64) *Grant {
				ctx, cancel := context.WithTimeout(t.Context(), 1) // so a wait would be an error
				defer cancel()
				grant, err := w.Acquire(ctx, class, tokens)
				require.NoError(t, err)
				return &grant
			})
		})
	})
}

// reasonCounted returns the reason of the one call that was decided between two Stats.
func reasonCounted(before, after Stats, class Class) Reason {
	if class >= NumClasses {
		return ReasonInvalid
	}
	b, a := before.Classes[class], after.Classes[class]
	for reason := range a.Refused {
		if a.Refused[reason] > b.Refused[reason] {
			return Reason(reason)
		}
	}
	if a.Borrowed > b.Borrowed {
		return ReasonBorrowed
	}
	return ReasonOwnShare
}

func TestShadowAdmitsAllAndReportsWhatItWouldRefuse(t *testing.T) {
	eachWayToAsk(t, func(t *testing.T, ask func(*Window, Class, int64) *Grant) {
		w := newShadow(t, Quota{Tokens: 1000, Pace: 1})

		// Within the rule all is as always: charged, and settled.
		ask(w.Window, Batch, 100)
		ask(w.Window, Batch, 100).Settle(90)
		require.Equal(t, ClassTokens{Batch: 190}, w.Usage().Used)
		require.Empty(t, w.reported)

		// What would be refused is charged nothing, and its Grant stands for nothing.
		w.clock.advance(10 * time.Second)
		grant := ask(w.Window, Batch, 50)
		require.True(t, reflect.ValueOf(grant).Elem().IsZero())
		grant.Settle(1000)
		grant.Cancel()
		want := DeniedError{
			Class:    Batch,
			Tokens:   50,
			Decision: Decision{Reason: ReasonReserved, RetryAfter: 50 * time.Second},
			Usage: Usage{
				Used:   ClassTokens{Batch: 190},
				Recent: ClassTokens{Batch: 190},
				Demand: ClassTokens{Batch: 240}, // it was asked for
			},
			Quota: w.Quota(),
		}
		require.Equal(t, []*DeniedError{&want}, w.reported)
		require.Equal(t, want.Usage, w.Usage())

		// It was counted as a refusal by then, and what is not charged is neither admitted nor settled.
		stats := ClassStats{
			Used: 190, Share: 100, Held: 100, Admitted: 2, Borrowed: 1, EstimatedTokens: 200, SettledTokens: 90,
			Refused: [NumReasons]uint64{ReasonReserved: 1}, FillAtRefusal: 0.19,
		}
		require.Equal(t, stats, w.stats.Classes[Batch])
		require.Equal(t, stats, w.Stats().Classes[Batch])

		// As no charge was made, the hint stays true however many calls come in between.
		for range 100 {
			ask(w.Window, Batch, 50)
		}
		require.Len(t, w.reported, 101)
		w.clock.advance(50 * time.Second)
		ask(w.Window, Batch, 50)
		require.Len(t, w.reported, 101)
		require.Equal(t, ClassTokens{Batch: 50}, w.Usage().Used)
	})
}

func TestShadowAdmitsWhatWouldNeverFit(t *testing.T) {
	eachWayToAsk(t, func(t *testing.T, ask func(*Window, Class, int64) *Grant) {
		w := newShadow(t, Quota{Tokens: 1000})
		for i, test := range []struct {
			class  Class
			tokens int64
			want   Reason
		}{
			{Batch, 201, ReasonTooLarge},
			{Interactive, math.MaxInt64, ReasonTooLarge},
			{Background, 0, ReasonInvalid},
			{Background, math.MinInt64, ReasonInvalid},
			{NumClasses, 1, ReasonInvalid},
		} {
			grant := ask(w.Window, test.class, test.tokens)
			require.True(t, reflect.ValueOf(grant).Elem().IsZero())
			require.Len(t, w.reported, i+1)
			require.Equal(t, &DeniedError{
				Class: test.class, Tokens: test.tokens, Decision: Decision{Reason: test.want}, Quota: w.Quota(),
			}, w.reported[i])
			require.True(t, w.reported[i].Decision.Permanent())
			if test.class < NumClasses {
				require.Positive(t, w.stats.Classes[test.class].Refused[test.want])
			}
		}
		require.Equal(t, Usage{}, w.Usage(), "nor is it demand")
	})
}

// TestShadowDecidesAsAlways holds a shadow Window against one that refuses, and has no patience, under the same calls.
// As a refusal charges nothing in either, they agree on everything.
func TestShadowDecidesAsAlways(t *testing.T) {
	eachSeed(t, 300, func(r *rand.Rand) {
		q := randomQuota(r)
		shadow := newShadow(t, q)
		w, err := NewWindow(q, WithClock(shadow.clock.read),
			WithMaxWait(Interactive, 0), WithMaxWait(Background, 0), WithMaxWait(Batch, 0))
		require.NoError(t, err)
		var grants, shadowGrants []*Grant
		for range 200 {
			c := Class(r.IntN(NumClasses))
			size := randomSize(r, q.Limits(c)) - r.Int64N(2)
			known := len(shadow.reported)
			var denied *DeniedError
			if r.IntN(2) == 0 {
				grant, d := w.TryAcquire(c, size)
				shadowGrant, shadowed := shadow.TryAcquire(c, size)
				require.Equal(t, Decision{Admitted: true, Reason: d.Reason}, shadowed)
				grants, shadowGrants = append(grants, &grant), append(shadowGrants, &shadowGrant)
				if !d.Admitted {
					denied = &DeniedError{Class: c, Tokens: size, Decision: d, Usage: w.Usage(), Quota: w.Quota()}
				}
			} else {
				grant, err := w.Acquire(t.Context(), c, size)
				shadowGrant, shadowErr := shadow.Acquire(t.Context(), c, size)
				require.NoError(t, shadowErr)
				grants, shadowGrants = append(grants, &grant), append(shadowGrants, &shadowGrant)
				require.Equal(t, err != nil, errors.As(err, &denied))
			}
			if denied == nil {
				require.Len(t, shadow.reported, known)
			} else {
				require.Equal(t, denied, shadow.reported[known])
			}
			if i := r.IntN(len(grants)); r.IntN(2) == 0 {
				actual := r.Int64N(q.Tokens)
				grants[i].Settle(actual)
				shadowGrants[i].Settle(actual)
			}
			require.Equal(t, w.Stats(), shadow.Stats())
			require.Equal(t, w.Usage(), shadow.Usage())
			shadow.clock.advance(time.Duration(r.Int64N(int64(window(q)) / 50)))
		}
	})
}

func TestShadowReportsFromManyGoroutines(t *testing.T) {
	var w *Window
	var reported atomic.Uint64
	w, err := NewWindow(Quota{Tokens: 1000, Window: 24 * time.Hour}, WithShadow(func(d *DeniedError) {
		reported.Add(1)
		if w.Stats().Classes[d.Class].Refused[d.Decision.Reason] == 0 {
			t.Error("reported before it was counted:", d)
		}
	}))
	require.NoError(t, err)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				if _, d := w.TryAcquire(Batch, 50); !d.Admitted {
					t.Error(d)
				}
				if _, err := w.Acquire(t.Context(), Batch, 50); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	stats := w.Stats().Classes[Batch]
	refused := uint64(0)
	for _, n := range stats.Refused {
		refused += n
	}
	require.Equal(t, refused, reported.Load())
	require.Equal(t, uint64(1600), stats.Admitted+refused)
}

func TestShadowWithoutReportCountsOnly(t *testing.T) {
	eachWayToAsk(t, func(t *testing.T, ask func(*Window, Class, int64) *Grant) {
		w, err := NewWindow(Quota{Tokens: 1000, Pace: 1}, WithShadow(nil))
		require.NoError(t, err)
		ask(w, Batch, 200)
		ask(w, Batch, 200).Settle(1)
		ask(w, Batch, 1001)
		want := [NumReasons]uint64{ReasonReserved: 1, ReasonTooLarge: 1}
		require.Equal(t, want, w.Stats().Classes[Batch].Refused)
		require.Equal(t, ClassTokens{Batch: 200}, w.Usage().Used)
	})
}

// newBusyWindow returns a Window that interactive has for itself: it takes all of the quota, and busyUntil makes it do
// so again in every window. So a class that can only borrow waits until it gives up.
func newBusyWindow(t *testing.T, length time.Duration, options ...Option) *bubbleWindow {
	quota := wholeQuota(1000)
	quota.Window = length
	w := newBubbleWindow(t, quota, options...)
	w.admit(Interactive, 1000)
	return w
}

// busyUntil lets windows pass, each of them taken by interactive at its beginning.
func (w *bubbleWindow) busyUntil(sinceStart time.Duration) {
	w.t.Helper()
	length := w.Quota().Window
	for next := (time.Since(w.start)/length + 1) * length; next <= sinceStart; next += length {
		w.at(next)
		w.admit(Interactive, 1000)
	}
	w.at(sinceStart)
}

func TestMaxWaitIsThatOfTheClassByDefault(t *testing.T) {
	for _, length := range []time.Duration{time.Second, time.Minute, 90 * time.Minute} {
		t.Run(length.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newBusyWindow(t, length)
				ctx, cancel := context.WithCancel(t.Context())
				interactive := w.acquire(t.Context(), Interactive, 1)
				background := w.acquire(t.Context(), Background, 1)
				batch := w.acquire(ctx, Batch, 1)

				denied := interactive.deniedAt(0)
				require.Equal(t, Decision{Reason: ReasonQuotaFull, RetryAfter: length}, denied.Decision)
				require.Zero(t, w.Stats().Classes[Interactive].WaitTime, "it did not wait")
				require.Equal(t, uint64(1), w.Stats().Classes[Interactive].Refused[ReasonQuotaFull])

				w.busyUntil(2*length - 1)
				background.waits()
				w.at(2 * length)
				denied = background.deniedAt(2 * length)
				require.NoError(t, denied.Unwrap(), "no context ended it")
				require.Equal(t, ReasonReserved, denied.Decision.Reason)
				require.GreaterOrEqual(t, denied.Decision.RetryAfter, Backoff(Background, length), "and when to retry")
				require.Equal(t, uint64(1), w.Stats().Classes[Background].WaitsExpired)
				require.Equal(t, 2*length, w.Stats().Classes[Background].WaitTime)

				w.admit(Interactive, 1000)
				w.busyUntil(100 * length)
				batch.waits()
				cancel()
				synctest.Wait()
				require.ErrorIs(t, batch.deniedAt(100*length), context.Canceled)
				require.Equal(t, uint64(1), w.Stats().Classes[Batch].WaitsCancelled)
				require.Equal(t, 100*length, w.Stats().Classes[Batch].WaitTime)
			})
		})
	}
}

func TestMaxWaitCanBeChanged(t *testing.T) {
	for class := range Class(NumClasses) {
		for _, longest := range []time.Duration{0, 1, 3 * time.Second, time.Minute - 1} {
			t.Run(fmt.Sprintf("%v waits %v", class, longest), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newBubbleWindow(t, classQuota(class, 100), WithMaxWait(class, -1), WithMaxWait(class, longest))
					g := w.admit(class, 100)
					call := w.acquire(t.Context(), class, 60)
					w.at(max(longest-1, 0))
					if longest > 0 {
						call.waits()
					}
					w.at(longest)
					denied := call.deniedAt(longest)
					require.NoError(t, denied.Unwrap())
					require.Equal(t, ReasonQuotaFull, denied.Decision.Reason)

					// It is the longest wait: what fits before it is over is admitted then.
					if longest > 1 {
						call := w.acquire(t.Context(), class, 60)
						g.Settle(40)
						synctest.Wait()
						call.admittedAt(longest)
					}
					w.at(3 * time.Minute)
					w.acquire(t.Context(), class, 60).admittedAt(3 * time.Minute)
				})
			})
		}

		t.Run(fmt.Sprintf("%v without limit", class), func(t *testing.T) {
			for _, longest := range []time.Duration{-1, -time.Hour, math.MinInt64, math.MaxInt64} {
				synctest.Test(t, func(t *testing.T) {
					other := (class + 1) % NumClasses
					w := newBubbleWindow(t, classQuota(other, 1000), WithMaxWait(class, longest))
					w.admit(other, 1000)
					ctx, cancel := context.WithCancel(t.Context())
					call := w.acquire(ctx, class, 1)
					for minute := range time.Duration(1000) {
						w.at(minute * time.Minute)
						if minute > 0 {
							w.admit(other, 1000)
						}
					}
					call.waits()
					cancel()
					synctest.Wait()
					require.ErrorIs(t, call.deniedAt(999*time.Minute), context.Canceled)
				})
			}
		})
	}
}

func TestMaxWaitOfNoClassIsAnError(t *testing.T) {
	for _, class := range []Class{NumClasses, 255} {
		w, err := NewWindow(Quota{Tokens: 1}, WithMaxWait(class, time.Second))
		require.Nil(t, w)
		want := fmt.Sprintf("quotashare: WithMaxWait of %v: want Interactive, Background or Batch", class)
		require.EqualError(t, err, want)
	}
}
