package quotashare_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"runtime"
	"sort"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	. "github.com/quotashare/quotashare"
)

func TestLimitsAreWholeTokens(t *testing.T) {
	third := 1.0 / 3
	for _, test := range []struct {
		name    string
		quota   Quota
		shares  ClassTokens
		floors  ClassTokens
		ceiling ClassTokens
		largest ClassTokens
	}{
		{
			"the defaults",
			Quota{Tokens: 1000},
			ClassTokens{Interactive: 700, Background: 200, Batch: 100},
			ClassTokens{Interactive: 700, Background: 100, Batch: 50},
			ClassTokens{Interactive: 1000, Background: 1000, Batch: 1000},
			ClassTokens{Interactive: 850, Background: 250, Batch: 200},
		},
		{
			"decimals mean what was written, not what the float64 is",
			Quota{Tokens: 100, Shares: Fractions{Interactive: 0.29, Background: 0.57, Batch: 0.01}, Floors: NoFloors},
			ClassTokens{Interactive: 29, Background: 57, Batch: 1},
			ClassTokens{},
			ClassTokens{Interactive: 100, Background: 100, Batch: 100},
			ClassTokens{Interactive: 100, Background: 100, Batch: 100},
		},
		{
			"three thirds are a whole",
			Quota{Tokens: 100, Shares: Fractions{third, third, third}, Floors: Fractions{third, third, third}, Ceilings: Fractions{third, third, 0.335}},
			ClassTokens{Interactive: 34, Background: 33, Batch: 33},
			ClassTokens{Interactive: 34, Background: 33, Batch: 33},
			ClassTokens{Interactive: 34, Background: 33, Batch: 33},
			ClassTokens{Interactive: 34, Background: 33, Batch: 33},
		},
		{
			"a third of three billion is a billion",
			Quota{Tokens: 3_000_000_000, Shares: Fractions{Interactive: third, Batch: third}, Floors: NoFloors},
			ClassTokens{Interactive: 1_000_000_000, Batch: 1_000_000_000},
			ClassTokens{},
			ClassTokens{3_000_000_000, 3_000_000_000, 3_000_000_000},
			ClassTokens{3_000_000_000, 3_000_000_000, 3_000_000_000},
		},
		{
			"what rounding leaves goes where it cut most",
			Quota{Tokens: 104, Floors: NoFloors},
			ClassTokens{Interactive: 73, Background: 21, Batch: 10}, // of 72.8, 20.8 and 10.4
			ClassTokens{},
			ClassTokens{104, 104, 104},
			ClassTokens{104, 104, 104},
		},
		{
			"among those cut as much, to the larger share, and then to the higher class",
			Quota{Tokens: 10, Shares: Fractions{Interactive: 0.25, Background: 0.25, Batch: 0.5}, Floors: NoFloors},
			ClassTokens{Interactive: 3, Background: 2, Batch: 5},
			ClassTokens{},
			ClassTokens{10, 10, 10},
			ClassTokens{10, 10, 10},
		},
		{
			"and to the larger share first",
			Quota{Tokens: 4, Shares: Fractions{Interactive: 0.125, Background: 0.375, Batch: 0.5}, Floors: NoFloors},
			ClassTokens{Interactive: 0, Background: 2, Batch: 2}, // of 0.5 and 1.5
			ClassTokens{},
			ClassTokens{4, 4, 4},
			ClassTokens{4, 4, 4},
		},
		{
			"a whole that misses 1 by less than tolerance is a whole, and the largest share makes up for it",
			Quota{Tokens: 1_000_000_000_000, Shares: Fractions{0.2, 0.7, 0.1 + 5e-10}, Floors: NoFloors},
			ClassTokens{200_000_000_000, 699_999_999_500, 100_000_000_500},
			ClassTokens{},
			ClassTokens{1_000_000_000_000, 1_000_000_000_000, 1_000_000_000_000},
			ClassTokens{1_000_000_000_000, 1_000_000_000_000, 1_000_000_000_000},
		},
		{
			"and makes up for one that is above 1, with a floor that passes it and a ceiling that equals it",
			Quota{
				Tokens: 1_000_000_000_000, Shares: Fractions{0.7 + 4e-10, 0.2, 0.1},
				Floors: Fractions{Interactive: 0.7 + 2e-10}, Ceilings: Fractions{Interactive: 0.7 + 4e-10, Batch: 0.5},
			},
			ClassTokens{700_000_000_000, 200_000_000_000, 100_000_000_000},
			ClassTokens{Interactive: 700_000_000_000},
			ClassTokens{700_000_000_000, 1_000_000_000_000, 500_000_000_000},
			ClassTokens{700_000_000_000, 300_000_000_000, 300_000_000_000},
		},
		{
			"the share that rounding cut comes before it, once",
			Quota{Tokens: 4_000_000_000, Shares: Fractions{0.5, 0.3, 799_999_998.5 / 4e9}, Floors: NoFloors},
			ClassTokens{2_000_000_001, 1_200_000_000, 799_999_999},
			ClassTokens{},
			ClassTokens{4_000_000_000, 4_000_000_000, 4_000_000_000},
			ClassTokens{4_000_000_000, 4_000_000_000, 4_000_000_000},
		},
		{
			"be it one of each",
			Quota{
				Tokens: 500_000_000, Floors: NoFloors,
				Shares: Fractions{299_999_999.9 / 5e8, 149_999_999.9 / 5e8, 49_999_999.8 / 5e8},
			},
			ClassTokens{300_000_000, 150_000_000, 50_000_000},
			ClassTokens{},
			ClassTokens{500_000_000, 500_000_000, 500_000_000},
			ClassTokens{500_000_000, 500_000_000, 500_000_000},
		},
		{
			"unless more is missing than a token each",
			Quota{
				Tokens: 4_000_000_000, Floors: NoFloors,
				Shares: Fractions{1_999_999_999.9 / 4e9, 1_199_999_999.9 / 4e9, 799_999_998.9 / 4e9},
			},
			ClassTokens{2_000_000_003, 1_199_999_999, 799_999_998},
			ClassTokens{},
			ClassTokens{4_000_000_000, 4_000_000_000, 4_000_000_000},
			ClassTokens{4_000_000_000, 4_000_000_000, 4_000_000_000},
		},
		{
			"a closed class has no share and no floor, and nobody else gets them",
			Quota{Tokens: 1000, Ceilings: Fractions{Batch: Closed}},
			ClassTokens{Interactive: 700, Background: 200},
			ClassTokens{Interactive: 700, Background: 100},
			ClassTokens{Interactive: 1000, Background: 1000},
			ClassTokens{Interactive: 900, Background: 300},
		},
		{
			"the largest quota there is",
			Quota{Tokens: math.MaxInt64, Shares: Fractions{0.5, 0.25, 0.25}, Floors: Fractions{0.5, 0.25, 0.25}},
			ClassTokens{1<<62 - 1, 1 << 61, 1 << 61}, // of 2^62 - 1/2 and 2^61 - 1/4
			ClassTokens{1<<62 - 1, 1 << 61, 1 << 61},
			ClassTokens{math.MaxInt64, math.MaxInt64, math.MaxInt64},
			ClassTokens{1<<62 - 1, 1 << 61, 1 << 61},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			require.NoError(t, test.quota.Validate())
			for c := range Class(NumClasses) {
				want := Limits{test.shares[c], test.floors[c], test.ceiling[c], test.largest[c]}
				require.Equal(t, want, test.quota.Limits(c), c)
			}
			require.Equal(t, Limits{}, test.quota.Limits(NumClasses))
		})
	}
}

// TestSharesAreApportionedExactly holds Limits against exact rational arithmetic on the decimals that were written.
func TestSharesAreApportionedExactly(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range many(20_000) {
		// Shares in steps of 1/scale that add up to the whole, or to less.
		scale := []int64{10, 100, 1000, 10_000, 1_000_000}[r.IntN(5)]
		first := r.Int64N(scale + 1)
		second := r.Int64N(scale - first + 1)
		third := scale - first - second
		whole := r.IntN(2) == 0
		if !whole {
			third = r.Int64N(third + 1)
		}
		parts := []int64{first, second, third}
		q := Quota{Tokens: 1 + r.Int64N([]int64{10, 1000, 1e6, 1e9, 1e12}[r.IntN(5)]), Floors: NoFloors}
		for c, part := range parts {
			q.Shares[c] = float64(part) / float64(scale)
		}
		if q.Shares == (Fractions{}) {
			continue // would be the default
		}
		sum := int64(0)
		for c, part := range parts {
			// The share is below the next whole number of tokens, or, if it was given one that rounding left, below the
			// one after that.
			exact := new(big.Rat).SetFrac64(part, scale)
			exact.Mul(exact, new(big.Rat).SetInt64(q.Tokens))
			down := new(big.Int).Quo(exact.Num(), exact.Denom()).Int64()
			share := q.Limits(Class(c)).Share
			sum += share
			if first+second+third == scale && !exact.IsInt() {
				require.GreaterOrEqual(t, share, down, "%v of %d", q.Shares, q.Tokens)
				require.LessOrEqual(t, share, down+1, "%v of %d", q.Shares, q.Tokens)
			} else {
				require.Equal(t, down, share, "%v of %d", q.Shares, q.Tokens)
			}
		}
		if first+second+third == scale {
			require.Equal(t, q.Tokens, sum, "%v", q.Shares)
			if q.Tokens <= 1e15/scale { // so few that float64s tell all shares of this scale apart
				requireLargestRemainders(t, q, parts, scale)
			}
		}
	}
	q := Quota{Tokens: 22}
	require.Equal(t, int64(16), q.Limits(Interactive).Share, "15.4 and 4.4 are cut as much")
}

// requireLargestRemainders wants what rounding left of the parts of scale to go where the remainder is largest, among
// equals to the larger share, among these to the higher class.
func requireLargestRemainders(t *testing.T, q Quota, parts []int64, scale int64) {
	t.Helper()
	order := []Class{Interactive, Background, Batch}
	remainder := func(c Class) int64 {
		product := new(big.Int).Mul(big.NewInt(parts[c]), big.NewInt(q.Tokens))
		return product.Mod(product, big.NewInt(scale)).Int64()
	}
	sort.SliceStable(order, func(i, j int) bool {
		a, b := order[i], order[j]
		return remainder(a) > remainder(b) || remainder(a) == remainder(b) && parts[a] > parts[b]
	})
	left := (remainder(0) + remainder(1) + remainder(2)) / scale
	for i, c := range order {
		want := new(big.Int).Mul(big.NewInt(parts[c]), big.NewInt(q.Tokens))
		want.Div(want, big.NewInt(scale))
		if int64(i) < left {
			want.Add(want, big.NewInt(1))
		}
		require.Equal(t, want.Int64(), q.Limits(c).Share, "%v, %v of %d", c, q.Shares, q.Tokens)
	}
}

// sketch is the pattern's own rule, in the numbers of its defaults: an own share always, and otherwise what is left
// beside the floors of the classes with a larger share.
func sketch(c Class, tokens int64, used ClassTokens, shares, floors ClassTokens, quota int64) bool {
	if used[c]+tokens <= shares[c] {
		return true
	}
	spare := quota
	for d := range used {
		spare -= used[d]
		if shares[d] > shares[c] {
			spare -= max(floors[d]-used[d], 0)
		}
	}
	return tokens <= spare
}

func TestAdmitIsThePatternsSketchButForWhatItSays(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	q := Quota{Tokens: 2000, Floors: DefaultFloors}
	overdraft := q
	overdraft.Overdraft = math.MaxInt64
	shares := ClassTokens{Interactive: 1400, Background: 400, Batch: 200}
	floors := ClassTokens{Interactive: 1400, Background: 200, Batch: 100}
	same, differ := 0, 0
	for range many(200_000) {
		c := Class(r.IntN(NumClasses))
		tokens := 1 + r.Int64N(2*shares[c])
		var used ClassTokens
		total, kept := int64(0), int64(0) // kept: of the floors of all other classes, what they have not used
		for d := range used {
			used[d] = r.Int64N(2 * shares[d])
			total += used[d]
			if Class(d) != c {
				kept += max(floors[d]-used[d], 0)
			}
		}
		theirs := sketch(c, tokens, used, shares, floors, q.Tokens)
		ours := Admit(c, tokens, Usage{Used: used}, q)

		// Whether within the share or above it, the total stays within the quota and all floors are preserved, not only
		// those of the classes with a larger share. That is the only difference.
		require.Equal(t, theirs && tokens <= q.Tokens-total-kept, ours.Admitted, "%v %d %v", c, tokens, used)
		if ours.Admitted == theirs {
			same++
		} else {
			differ++
		}
		if !ours.Admitted {
			tooLarge := tokens > q.Limits(c).Largest
			require.Equal(t, tooLarge, ours.Permanent())
			if !tooLarge {
				require.Equal(t, Backoff(c, time.Minute), ours.RetryAfter)
			}
		}
		if used[c]+tokens <= shares[c] {
			require.True(t, Admit(c, tokens, Usage{Used: used}, overdraft).Admitted, "%v %d %v", c, tokens, used)
		}
	}
	require.Greater(t, same, many(100_000))
	require.Greater(t, differ, many(1000))
}

func TestAdmitGivesTheFirstReasonThatApplies(t *testing.T) {
	q := Quota{Tokens: 1000, Floors: ElasticFloors, Ceilings: Fractions{Batch: 0.5}} // floors 100, 50, 50
	used := func(interactive, background, batch int64) Usage {
		return Usage{Used: ClassTokens{Interactive: interactive, Background: background, Batch: batch}}
	}
	recent, demand, others := used(0, 0, 300), used(0, 0, 0), used(0, 0, 0)
	recent.Recent[Batch] = 42 // 42 * 12 is not below the ceiling of 500, 41 * 12 is
	demand.Demand[Interactive] = 450
	others.Others = 840
	for _, test := range []struct {
		name  string
		class Class
		e     int64
		usage Usage
		want  Reason
	}{
		{"nothing asked for", Interactive, 0, Usage{}, ReasonInvalid},
		{"negative", Interactive, -1, Usage{}, ReasonInvalid},
		{"no class", NumClasses, 1, Usage{}, ReasonInvalid},
		{"all but the other floors", Interactive, 900, Usage{}, ReasonBorrowed},
		{"larger", Interactive, 901, Usage{}, ReasonTooLarge},
		{"larger, and the window is full", Interactive, 901, used(1000, 0, 0), ReasonTooLarge},
		{"above the ceiling", Batch, 501, Usage{}, ReasonTooLarge},
		{"own share to the last token", Batch, 100, Usage{}, ReasonOwnShare},
		{"a token above it", Batch, 101, Usage{}, ReasonBorrowed},
		{"own share, the window full", Batch, 1, used(900, 100, 0), ReasonQuotaFull},
		{"own share, the rest is a floor", Interactive, 51, used(0, 0, 900), ReasonReserved},
		{"own share, up to that floor", Interactive, 50, used(0, 0, 900), ReasonOwnShare},
		{"a loan, the window full", Batch, 101, used(900, 0, 0), ReasonQuotaFull},
		{"a loan, the rest is a floor", Batch, 151, used(0, 0, 200), ReasonBorrowed},
		{"a loan, the rest is held", Batch, 400, demand, ReasonBorrowed},
		{"a loan, a token more", Batch, 401, demand, ReasonReserved},
		{"no more than its ceiling", Batch, 201, used(0, 0, 300), ReasonCapped},
		{"faster than a loan may be taken", Batch, 1, recent, ReasonPaced},
		{"what others hold is gone", Interactive, 111, others, ReasonReserved},
		{"and no more than that", Interactive, 60, others, ReasonOwnShare},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := Admit(test.class, test.e, test.usage, q)
			require.Equal(t, test.want, d.Reason)
			require.Equal(t, test.want == ReasonOwnShare || test.want == ReasonBorrowed, d.Admitted)
		})
	}
	recent.Recent[Batch] = 41
	require.Equal(t, ReasonBorrowed, Admit(Batch, 1, recent, q).Reason)
	q.Pace = 1
	recent.Recent[Batch] = 500
	require.Equal(t, ReasonBorrowed, Admit(Batch, 1, recent, q).Reason, "not paced")
	require.Equal(t, Decision{Reason: ReasonInvalid}, Admit(Batch, 1, Usage{}, Quota{}))
}

// A token of others is one that is not left, be everybody within his share.
func TestAdmitMindsTheLastToken(t *testing.T) {
	usage := Usage{Used: ClassTokens{Interactive: 699, Background: 200, Batch: 100}}
	require.Equal(t, ReasonOwnShare, Admit(Interactive, 1, usage, Quota{Tokens: 1000}).Reason)
	usage.Others = 1
	require.Equal(t, ReasonQuotaFull, Admit(Interactive, 1, usage, Quota{Tokens: 1000}).Reason)
}

// TestNegativeUsageIsNone: each number of a Usage that is negative counts as 0, in every decision near to a limit.
func TestNegativeUsageIsNone(t *testing.T) {
	floors := Fractions{Interactive: 0.3, Background: 0.1, Batch: 0.1}
	for _, q := range []Quota{{Tokens: 20, Floors: floors}, {Tokens: 20, Floors: floors, Pace: 1}} {
		for used := range int64(10) {
			for field := range 10 {
				base := Usage{Used: ClassTokens{used, used / 2, used / 3}}
				numbers := []*int64{&base.Others}
				for c := range Class(NumClasses) {
					numbers = append(numbers, &base.Used[c], &base.Recent[c], &base.Demand[c])
				}
				*numbers[field] = 0
				none := base
				for _, negative := range []int64{-1, -7, math.MinInt64} {
					*numbers[field] = negative
					for c := range Class(NumClasses) {
						for e := int64(1); e <= q.Tokens; e++ {
							require.Equal(t, Admit(c, e, none, q), Admit(c, e, base, q), "%v of %d: %+v", c, e, base)
						}
					}
				}
			}
		}
	}
}

func TestReasonsAndDecisions(t *testing.T) {
	names := map[Reason]string{
		ReasonNone: "none", ReasonOwnShare: "own_share", ReasonBorrowed: "borrowed", ReasonQuotaFull: "quota_full",
		ReasonReserved: "reserved", ReasonCapped: "capped", ReasonPaced: "paced", ReasonQueued: "queued",
		ReasonTooLarge: "too_large", ReasonInvalid: "invalid", NumReasons: "reason(10)", 77: "reason(77)",
	}
	require.Len(t, names, NumReasons+2)
	for reason, name := range names {
		require.Equal(t, name, reason.String())
		text, err := json.Marshal(reason)
		require.NoError(t, err)
		require.Equal(t, `"`+name+`"`, string(text))
		permanent := reason == ReasonTooLarge || reason == ReasonInvalid
		require.Equal(t, permanent, Decision{Reason: reason}.Permanent())
	}
	for _, reason := range []Reason{ReasonOwnShare, ReasonTooLarge} { // the latter in a shadow
		require.False(t, Decision{Admitted: true, Reason: reason}.Permanent())
	}
}

func TestQuotaInJSON(t *testing.T) {
	written := Quota{
		Tokens: 2_000_000, Window: time.Minute, Shares: DefaultShares, Floors: DefaultFloors, Pace: 12,
	}
	with := func(change func(*Quota)) Quota {
		q := written
		change(&q)
		return q
	}
	for _, test := range []struct {
		name, text string
		want       Quota
	}{
		{"only tokens", `{"tokens": 2000000}`, written},
		{"an exponent", `{"tokens": 2e6}`, written},
		{"a fraction that is none", ` { "tokens" : 2000000.000 } `, written},
		{
			"all of it",
			`{"tokens": 2000000, "window": "30s", "shares": {"interactive": 0.5, "background": 0.3, "batch": 0.2},
			  "floors": {"interactive": 0.1, "batch": 0.05}, "ceilings": {"interactive": 1, "background": 0.3, "batch": 0},
			  "pace": 4, "overdraft": 1e3}`,
			Quota{
				Tokens: 2_000_000, Window: 30 * time.Second,
				Shares:   Fractions{Interactive: 0.5, Background: 0.3, Batch: 0.2},
				Floors:   Fractions{Interactive: 0.1, Batch: 0.05},
				Ceilings: Fractions{Interactive: 1, Background: 0.3, Batch: Closed},
				Pace:     4, Overdraft: 1000,
			},
		},
		{"no floors", `{"tokens": 2000000, "floors": "none"}`, with(func(q *Quota) { q.Floors = NoFloors })},
		{"floors of 0", `{"tokens": 2000000, "floors": {"batch": 0}}`, with(func(q *Quota) { q.Floors = NoFloors })},
		{"an exponent with zeros", `{"tokens": 2e0000006}`, written},
		{"the shortest window", `{"tokens": 2000000, "window": "1ns"}`, with(func(q *Quota) { q.Window = 1 })},
		{"the default pace", `{"tokens": 2000000, "pace": 0}`, written},
		{"the largest", `{"tokens": 9223372036854775807}`, with(func(q *Quota) { q.Tokens = math.MaxInt64 })},
	} {
		t.Run(test.name, func(t *testing.T) {
			q, err := ParseQuota([]byte(test.text))
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(test.want, q))

			text, err := json.Marshal(q)
			require.NoError(t, err)
			var again Quota
			require.NoError(t, json.Unmarshal(text, &again))
			require.Empty(t, cmp.Diff(q, again), "written and read again")
		})
	}
	text, err := json.Marshal(Quota{Tokens: 5, Ceilings: Fractions{Batch: Closed}})
	require.NoError(t, err)
	require.JSONEq(t, `{"tokens": 5, "window": "1m0s", "shares": {"interactive": 0.7, "background": 0.2, "batch": 0.1},
		"floors": {"interactive": 0.7, "background": 0.1, "batch": 0.05}, "ceilings": {"batch": 0}, "pace": 12,
		"overdraft": 0}`, string(text))
	text, err = json.Marshal(Quota{Tokens: 5})
	require.NoError(t, err)
	require.NotContains(t, string(text), "ceilings", "there are none")
	_, err = json.Marshal(Quota{})
	require.ErrorContains(t, err, "tokens is 0")
}

func TestQuotaInJSONIsStrict(t *testing.T) {
	for text, want := range map[string]string{
		``:                                "unexpected end",
		`null`:                            "want an object",
		`[]`:                              "want an object",
		`{"tokens": 5} {}`:                "after top-level",
		`{"tokens": 5,}`:                  "invalid character",
		`{}`:                              "tokens is 0: want at least 1",
		`{"tokens": 0}`:                   "tokens is 0: want at least 1",
		`{"tokens": -5}`:                  "tokens is -5",
		`{"tokens": 1.5}`:                 "tokens is 1.5: want a whole number",
		`{"tokens": "5"}`:                 `tokens is "5": want a whole number`,
		`{"tokens": null}`:                "tokens is null",
		`{"tokens": 9223372036854775808}`: "tokens is 9223372036854775808: want a whole number that fits",
		`{"tokens": 1e1000000000}`:        "tokens is 1e1000000000",
		`{"tokens": 5, "overdraft": 1e-1000000000}`:                  "overdraft is 1e-1000000000",
		`{"tokens": 5, "overdraft": -1}`:                             "overdraft is -1: want 0 or more",
		`{"tokens": 5, "tokens": 5}`:                                 `key "tokens" twice`,
		`{"Tokens": 5}`:                                              `unknown key "Tokens"`,
		`{"tokens": 5, "limit": 5}`:                                  `unknown key "limit": want tokens, window`,
		`{"tokens": 5, "window": 60}`:                                `window is 60: want a positive duration such as "1m"`,
		`{"tokens": 5, "window": "minute"}`:                          `window is "minute"`,
		`{"tokens": 5, "window": "-1m"}`:                             `window is "-1m": want a positive duration`,
		`{"tokens": 5, "window": "0s"}`:                              `window is "0s": want a positive duration`,
		`{"tokens": 5, "shares": [0.7, 0.2, 0.1]}`:                   "shares is [0.7, 0.2, 0.1]: want an object",
		`{"tokens": 5, "shares": {}}`:                                "shares are all 0",
		`{"tokens": 5, "shares": {"interactve": 0.6}}`:               `unknown key "interactve" in shares: want interactive`,
		`{"tokens": 5, "shares": {"batch": 0.6, "batch": 0.6}}`:      `shares has the key "batch" twice`,
		`{"tokens": 5, "shares": {"class(3)": 0.6}}`:                 `unknown key "class(3)" in shares`,
		`{"tokens": 5, "ceilings": {"batch": 1.5}}`:                  "ceilings.batch is 1.5: want a fraction from 0 to 1",
		`{"tokens": 5, "shares": {"batch": "0.6"}}`:                  `shares.batch is "0.6": want a fraction`,
		`{"tokens": 5, "shares": {"batch": null}}`:                   "shares.batch is null",
		`{"tokens": 5, "shares": {"batch": 50}}`:                     "shares.batch is 50: want a fraction from 0 to 1",
		`{"tokens": 5, "shares": {"batch": 0.6, "background": 0.8}}`: "shares add up to 1.4: want at most 1",
		`{"tokens": 5, "floors": "some"}`:                            `floors is "some": want an object or "none"`,
		`{"tokens": 5, "floors": null}`:                              "floors is null",
		`{"tokens": 5, "floors": {"batch": 0.2}}`:                    "floors.batch is 0.2: want a fraction from 0 to the class's share",
		`{"tokens": 5, "ceilings": {"batch": 0.05}}`:                 "ceilings.batch is 0.05: want a fraction from the class's share",
		`{"tokens": 5, "ceilings": {"batch": -1}}`:                   "ceilings.batch is -1: want a fraction from 0 to 1",
		`{"tokens": 5, "ceilings": {"batch": 1e-400}}`:               "ceilings.batch is 1e-400: want 0 or a fraction",
		`{"tokens": 5, "pace": 13}`:                                  "pace is 13: want 1 to 12, or 0 for 12",
		`{"tokens": 5, "pace": -1}`:                                  "pace is -1",
		`{"tokens": 5, "pace": 4294967297}`:                          "pace is 4294967297", // 1, where an int has 32 bits
		`{"tokens": 5, "pace": -4294967295}`:                         "pace is -4294967295",
	} {
		q, err := ParseQuota([]byte(text))
		require.ErrorContains(t, err, want, text)
		require.Equal(t, Quota{}, q, text)
		kept := Quota{Tokens: 7}
		require.Error(t, kept.UnmarshalJSON([]byte(text)), text)
		require.Equal(t, Quota{Tokens: 7}, kept, "an error leaves the quota as it was")
	}
}

// TestALargeExponentTakesNoMemory: a number of as many digits would.
func TestALargeExponentTakesNoMemory(t *testing.T) {
	for _, exponent := range []string{"100000", "-100000"} {
		text := []byte(`{"tokens": 1e` + exponent + `}`)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := ParseQuota(text)
		runtime.ReadMemStats(&after)
		require.ErrorContains(t, err, "want a whole number")
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(16<<10), exponent)
	}
}

func TestValidateNamesTheField(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for want, q := range map[string]Quota{
		"tokens is 0":                           {},
		"tokens is -1":                          {Tokens: -1},
		"window is -1ns":                        {Tokens: 1, Window: -1},
		"pace is 13: want 1 to 12, or 0 for 12": {Tokens: 1, Pace: 13},
		"pace is -1":                            {Tokens: 1, Pace: -1},
		"overdraft is -1":                       {Tokens: 1, Overdraft: -1},
		"shares.batch is NaN":                   {Tokens: 1, Shares: Fractions{Batch: nan}},
		"shares.batch is +Inf":                  {Tokens: 1, Shares: Fractions{Batch: inf}},
		"shares.background is -0.1":             {Tokens: 1, Shares: Fractions{Interactive: 0.6, Background: -0.1, Batch: 0.5}},
		"shares.interactive is 50":              {Tokens: 1, Shares: Fractions{50, 30, 20}},
		"shares add up to 1.4":                  {Tokens: 1, Shares: Fractions{0.6, 0.8, 0}},
		"floors.interactive is NaN":             {Tokens: 1, Floors: Fractions{Interactive: nan}},
		"floors.background is 0.3":              {Tokens: 1, Floors: Fractions{Background: 0.3}},
		"floors.batch is -1":                    {Tokens: 1, Floors: Fractions{Batch: -1}},
		"ceilings.interactive is NaN":           {Tokens: 1, Ceilings: Fractions{Interactive: nan}},
		"ceilings.interactive is 0.5":           {Tokens: 1, Ceilings: Fractions{Interactive: 0.5}},
		"ceilings.interactive is 1.001":         {Tokens: 1, Ceilings: Fractions{Interactive: 1.001}},
		"ceilings.batch is -0.5":                {Tokens: 1, Ceilings: Fractions{Batch: -0.5}},
		"ceilings.batch is -1e-11":              {Tokens: 1, Shares: Fractions{Interactive: 0.9}, Ceilings: Fractions{Batch: -1e-11}},
	} {
		require.ErrorContains(t, q.Validate(), "quotashare: "+want)
		require.Equal(t, Limits{}, q.Limits(Interactive))
		require.Equal(t, Decision{Reason: ReasonInvalid}, Admit(Interactive, 1, Usage{}, q))
		_, err := NewWindow(q)
		require.ErrorContains(t, err, want)
	}
	for name, q := range map[string]Quota{
		"a sum just below 1":       {Tokens: 1, Shares: Fractions{0.6, 0.3, 0.1}}, // 0.9999999999999999
		"a sum just above 1":       {Tokens: 1, Shares: Fractions{0.1 * 7, 0.2, 0.1 + 1e-10}},
		"a floor just above 0.3":   {Tokens: 1, Shares: Fractions{Batch: 0.3}, Floors: Fractions{Batch: 0.3 + 1e-10}},
		"a ceiling just below 0.3": {Tokens: 1, Shares: Fractions{Batch: 0.3}, Ceilings: Fractions{Batch: 0.3 - 1e-10}},
	} {
		require.NoError(t, q.Validate(), name)
	}
}

// TestNoFloorsKeepsItsValue is for quotas that somebody stored with it.
func TestNoFloorsKeepsItsValue(t *testing.T) {
	require.Equal(t, Fractions{-1, -1, -1}, NoFloors)
}

// TestDefaultsWrittenOutChangeNothing also says that writing them out again changes nothing more.
func TestDefaultsWrittenOutChangeNothing(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		q := randomQuota(r)
		w, err := NewWindow(q)
		require.NoError(t, err)
		written := w.Quota()
		require.NoError(t, w.SetQuota(written))
		require.Equal(t, written, w.Quota())
		for c := range Class(NumClasses) {
			require.Equal(t, q.Limits(c), written.Limits(c))
		}
	}
}

func FuzzParseQuota(f *testing.F) {
	f.Add([]byte(`{"tokens": 2000000, "window": "1m", "shares": {"interactive": 0.7, "background": 0.2, "batch": 0.1},
		"floors": {"interactive": 0.7, "background": 0.1, "batch": 0.05}, "ceilings": {"batch": 0}, "pace": 12, "overdraft": 0}`))
	f.Add([]byte(`{"tokens": 1e6, "floors": "none"}`))
	f.Add([]byte(`{"tokens": 1, "tokens": 1}`))
	f.Add([]byte(`{"tokens": 1, "shares": {"batch": 5e-324}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		q, err := ParseQuota(data)
		if err != nil {
			require.Equal(t, Quota{}, q)
			require.Contains(t, err.Error(), "quotashare: ")
			return
		}
		require.NoError(t, q.Validate())
		requireSoundLimits(t, q)
		text, err := json.Marshal(q)
		require.NoError(t, err)
		again, err := ParseQuota(text)
		require.NoError(t, err)
		require.Equal(t, q, again)
	})
}

func requireSoundLimits(t *testing.T, q Quota) {
	t.Helper()
	shares, floors := new(big.Int), new(big.Int)
	for c := range Class(NumClasses) {
		l := q.Limits(c)
		shares.Add(shares, big.NewInt(l.Share))
		floors.Add(floors, big.NewInt(l.Floor))
		require.True(t, 0 <= l.Floor && l.Floor <= l.Share && l.Share <= l.Ceiling && l.Ceiling <= q.Tokens, "%+v", l)
		require.True(t, 0 <= l.Largest && l.Largest <= l.Ceiling, "%+v", l)
		require.True(t, l.Share <= l.Largest, "a share can be claimed at once: %+v", l)
	}
	require.LessOrEqual(t, shares.Cmp(big.NewInt(q.Tokens)), 0, "shares %v of %d", shares, q.Tokens)
	require.LessOrEqual(t, floors.Cmp(big.NewInt(q.Tokens)), 0, "floors %v of %d", floors, q.Tokens)
}

// FuzzAdmit holds Admit against the rule in numbers that cannot overflow.
func FuzzAdmit(f *testing.F) {
	f.Add(uint8(0), int64(5), int64(1000), int64(0), int64(0), 12, 0.7, 0.2, 0.1, 0.7, 0.1, 0.05, 0.0, 0.0, -1.0,
		int64(1), int64(2), int64(3), int64(4), int64(5), int64(6), int64(7), int64(8), int64(9), int64(0))
	f.Add(uint8(2), int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MaxInt64), 1, 0.0, 0.0, 1.0,
		0.0, 0.0, 0.0, 1.0, 1.0, 1.0, int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MaxInt64),
		int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MinInt64), int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, class uint8, e, tokens, window, overdraft int64, pace int,
		s0, s1, s2, f0, f1, f2, c0, c1, c2 float64, u0, u1, u2, r0, r1, r2, d0, d1, d2, others int64,
	) {
		q := Quota{
			Tokens: tokens, Window: time.Duration(window), Overdraft: overdraft, Pace: pace,
			Shares: Fractions{s0, s1, s2}, Floors: Fractions{f0, f1, f2}, Ceilings: Fractions{c0, c1, c2},
		}
		u := Usage{
			Used: ClassTokens{u0, u1, u2}, Recent: ClassTokens{r0, r1, r2}, Demand: ClassTokens{d0, d1, d2}, Others: others,
		}
		requireRule(t, Class(class), e, u, q)
	})
}

// TestAdmitIsTheRule is FuzzAdmit on inputs in which something is at stake.
func TestAdmitIsTheRule(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(8, 9))
	reasons := map[Reason]int{}
	for range many(100_000) {
		q := randomQuota(r)
		if r.IntN(4) == 0 {
			q.Overdraft = r.Int64N(q.Tokens)
		}
		var u Usage
		for c := range Class(NumClasses) {
			l := q.Limits(c)
			u.Used[c] = r.Int64N(l.Share + 2)
			u.Demand[c] = u.Used[c] + r.Int64N(l.Share+1)
			u.Recent[c] = r.Int64N(u.Used[c]/6 + 1)
		}
		c := Class(r.IntN(NumClasses))
		reasons[requireRule(t, c, randomSize(r, q.Limits(c)), u, q)]++
	}
	for reason := ReasonOwnShare; reason < NumReasons; reason++ {
		if reason != ReasonQueued && reason != ReasonInvalid {
			require.Greater(t, reasons[reason], many(50), fmt.Sprint(reason))
		}
	}
}

func requireRule(t *testing.T, class Class, e int64, u Usage, q Quota) Reason {
	t.Helper()
	got := Admit(class, e, u, q)
	if q.Validate() == nil {
		requireSoundLimits(t, q)
	}
	want := bigRule(class, e, u, q)
	require.Equal(t, want, got.Reason, "%v %d %+v %+v", class, e, u, q)
	temporary := want >= ReasonQuotaFull && want <= ReasonQueued
	require.Equal(t, want == ReasonOwnShare || want == ReasonBorrowed, got.Admitted)
	require.Equal(t, temporary, got.RetryAfter > 0)
	return want
}

// bigRule is section by section what the doc of Admit says, in numbers of any size.
func bigRule(class Class, e int64, u Usage, q Quota) Reason {
	if e < 1 || class >= NumClasses || q.Validate() != nil {
		return ReasonInvalid
	}
	num := big.NewInt
	add := func(a, b *big.Int) *big.Int { return new(big.Int).Add(a, b) }
	sub := func(a, b *big.Int) *big.Int { return new(big.Int).Sub(a, b) }
	atMost := func(a, b *big.Int) bool { return a.Cmp(b) <= 0 }
	smaller := func(a, b *big.Int) *big.Int {
		if atMost(a, b) {
			return a
		}
		return b
	}
	limits := func(c Class) Limits { return q.Limits(c) }
	used := func(c Class) *big.Int { return num(max(u.Used[c], 0)) }

	own := limits(class)
	tokens, est := num(q.Tokens), num(e)
	total := num(max(u.Others, 0))
	largest, floors, held := tokens, num(0), num(0)
	for d := range Class(NumClasses) {
		total = add(total, used(d))
		if d == class {
			continue
		}
		l := limits(d)
		largest = sub(largest, num(l.Floor))
		if unused := sub(num(l.Floor), used(d)); unused.Sign() > 0 {
			floors = add(floors, unused)
		}
		hold := smaller(add(num(max(u.Demand[d], 0)), num(l.Floor)), num(l.Share))
		if unused := sub(hold, used(d)); unused.Sign() > 0 {
			held = add(held, unused)
		}
	}
	if !atMost(est, largest) || !atMost(est, num(own.Ceiling)) {
		return ReasonTooLarge
	}
	if atMost(add(used(class), est), num(own.Share)) {
		room := sub(add(tokens, num(q.Overdraft)), total)
		switch {
		case atMost(est, sub(room, floors)):
			return ReasonOwnShare
		case atMost(est, room):
			return ReasonReserved
		}
		return ReasonQuotaFull
	}
	room := sub(tokens, total)
	free := sub(room, held)
	pace := q.Pace
	if pace == 0 {
		pace = 12
	}
	recent := new(big.Int).Mul(num(max(u.Recent[class], 0)), num(int64(pace)))
	switch {
	case !atMost(est, room):
		return ReasonQuotaFull
	case !atMost(est, free):
		return ReasonReserved
	case !atMost(add(used(class), est), num(own.Ceiling)):
		return ReasonCapped
	case pace > 1 && recent.Cmp(smaller(add(free, used(class)), num(own.Ceiling))) >= 0:
		return ReasonPaced
	}
	return ReasonBorrowed
}
