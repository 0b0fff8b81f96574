package sharetest_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

// shortNight is a night of ten minutes and a morning of five: an eval suite that never ends, and people who wake up.
func shortNight(t *testing.T) sharetest.Trace {
	t.Helper()
	trace, err := sharetest.Generate(quotashare.Quota{Tokens: account}, 15*time.Minute, 1,
		people(0.05, 0), people(0.5, dawn), scheduled(0.1, 0), hungry(0, batchSizes[0]))
	require.NoError(t, err)
	return trace
}

const dawn = 10 * time.Minute

func search(t *testing.T, quota quotashare.Quota, wishes ...sharetest.Wish) sharetest.Found {
	t.Helper()
	found, err := sharetest.Search(quota, shortNight(t), &sharetest.Options{Callers: patient}, wishes...)
	require.NoError(t, err)
	return found
}

func skipShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("it is some hundred replays")
	}
}

func atNight(least float64) sharetest.Wish {
	return sharetest.Share(batch).AtLeast(least).During(0, dawn)
}

var nobodyGivesUp = []sharetest.Wish{
	sharetest.GaveUp(interactive).AtMost(0), sharetest.Wait(interactive, 0.99).AtMost(time.Second),
}

func TestSearchLeavesATableThatDoesWell(t *testing.T) {
	quota := quotashare.Quota{Tokens: account, Shares: quotashare.Fractions{0.6, 0.2, 0.1}, Pace: 6}
	found := search(t, quota, append(nobodyGivesUp, atNight(0.1))...)
	assert.Equal(t, 1, found.Tries)
	assert.Nil(t, found.Unmet)
	assert.Equal(t, quota.Shares, found.Quota.Shares)
	assert.Equal(t, 6, found.Quota.Pace)
	assert.Equal(t, found.Quota, found.Report.Quota)
	assert.Contains(t, found.String(), "after 1 tries: all wishes are fulfilled")
}

func TestSearchFindsATable(t *testing.T) {
	skipShort(t)
	for name, test := range map[string]struct {
		quota  quotashare.Quota
		wishes []sharetest.Wish
	}{
		"by the floors": {
			quotashare.Quota{Tokens: account}, append(nobodyGivesUp, atNight(0.6)),
		},
		"by a share, for nothing is lent": {
			quotashare.Quota{
				Tokens:   account,
				Shares:   quotashare.Fractions{0.8, 0.15, 0.05},
				Ceilings: quotashare.Fractions{0.8, 0.15, 0.05},
			},
			append(nobodyGivesUp, atNight(0.25)),
		},
		"by a ceiling": {
			quotashare.Quota{Tokens: account, Floors: quotashare.NoFloors},
			append(nobodyGivesUp, sharetest.Share(batch).AtMost(0.5).During(0, dawn), atNight(0.2)),
		},
		"by several": {
			quotashare.Quota{Tokens: account, Shares: quotashare.Fractions{0.2, 0.4, 0.4}},
			append(nobodyGivesUp, atNight(0.7), sharetest.Share(background).AtLeast(0.09)),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found := search(t, test.quota, test.wishes...)
			t.Log(found)
			require.Nil(t, found.Unmet)
			require.NoError(t, found.Quota.Validate())
			assert.Greater(t, found.Tries, 1, "the table that it began with does not do")

			// What was found holds when it is replayed.
			report, err := sharetest.Replay(found.Quota, shortNight(t), &sharetest.Options{Callers: patient})
			require.NoError(t, err)
			sharetest.Check(t, report, test.wishes...)
			assert.Equal(t, found, search(t, test.quota, test.wishes...), "the same arguments find the same")
		})
	}
}

func TestSearchSaysWhatCannotBeHad(t *testing.T) {
	skipShort(t)
	t.Run("alone", func(t *testing.T) {
		t.Parallel()
		found := search(t, quotashare.Quota{Tokens: account}, append(nobodyGivesUp, atNight(0.97))...)
		require.Len(t, found.Unmet, 1)
		unmet := found.Unmet[0]
		assert.Equal(t, atNight(0.97).String(), unmet.Wish.String())
		require.ErrorContains(t, unmet.Best, "want at least 97.0 %")
		require.ErrorContains(t, unmet.Nearest, "want at least 97.0 %")
		assert.Greater(t, found.Report.Between(0, dawn).Classes[batch].Share, 0.8, "as near as it comes")
		assert.Contains(t, found.String(), "the nearest of the tables tried")
		for class, share := range found.Quota.Shares {
			assert.GreaterOrEqual(t, share, 0.05, "share of %v", quotashare.Class(class))
		}
	})
	t.Run("together", func(t *testing.T) {
		t.Parallel()
		most := sharetest.Share(batch).AtMost(0.15).During(0, dawn)
		found := search(t, quotashare.Quota{Tokens: account}, atNight(0.5), most)
		require.Len(t, found.Unmet, 1)
		unmet := found.Unmet[0]
		require.Error(t, unmet.Best)
		require.NoError(t, unmet.Nearest)
		assert.Contains(t, found.String(), "alone it can be had, with {")
		alone, err := sharetest.Replay(unmet.With, shortNight(t), &sharetest.Options{Callers: patient})
		require.NoError(t, err)
		assert.NoError(t, unmet.Wish.Test(alone))
	})
}

func TestSearchLeavesAClosedClassClosed(t *testing.T) {
	quota := quotashare.Quota{Tokens: account, Ceilings: quotashare.Fractions{batch: quotashare.Closed}}
	found := search(t, quota, atNight(0.01))
	assert.Equal(t, quotashare.Closed, found.Quota.Ceilings[batch])
	require.Len(t, found.Unmet, 1)
	assert.Error(t, found.Unmet[0].Nearest)
}

func TestSearchErrors(t *testing.T) {
	_, err := sharetest.Search(quotashare.Quota{}, shortNight(t), nil)
	require.ErrorContains(t, err, "tokens is 0")
	_, err = sharetest.Search(quotashare.Quota{Tokens: 1}, sharetest.Trace{}, nil)
	require.ErrorContains(t, err, "length of the trace is 0s")
	assert.Equal(t, "nothing", sharetest.Found{}.String())
}
