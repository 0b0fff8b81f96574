package sharetest_test

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/sharetest"
)

const (
	azureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens"
	logHeader   = "time,class,input_tokens,output_tokens,seconds"
	shortHeader = "time,class,input_tokens,output_tokens"
	azureGood   = azureHeader + "\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
	logGood     = logHeader + "\n2026-07-28T09:00:00Z,interactive,800,200,2.5\n"
	byteOrder   = "\uFEFF"
)

func TestReadAzure(t *testing.T) {
	start := time.Date(2023, 11, 16, 18, 15, 46, 680_590_000, time.UTC)
	call := func(at time.Duration, tokens int64) sharetest.Arrival {
		return sharetest.Arrival{At: at, Class: background, Estimate: max(tokens, 1), Actual: tokens}
	}
	two := []sharetest.Arrival{call(0, 418), call(314_579_000, 396)}
	rows := []string{azureHeader, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:46.9951690,396,0"}
	for name, test := range map[string]struct {
		text string
		want []sharetest.Arrival
	}{
		"as recorded: CRLF, the last line not ended": {strings.Join(rows, "\r\n"), two},
		"LF, the last line ended":                    {strings.Join(rows, "\n") + "\n", two},
		"byte order mark":                            {byteOrder + strings.Join(rows, "\r\n"), two},
		"quoted fields": {
			`"TIMESTAMP","ContextTokens","GeneratedTokens"` + "\r\n" +
				`"2023-11-16 18:15:46.6805900","374",44` + "\r\n" + `2023-11-16 18:15:46.9951690,396,"0"`, two,
		},
		"quoted after a byte order mark": {
			byteOrder + `"TIMESTAMP",ContextTokens,GeneratedTokens` + "\n" + strings.Join(rows[1:], "\n"), two,
		},
		"empty lines between": {strings.Join(rows, "\n\n"), two},
		"the same time twice, a call of nothing": {
			azureHeader + "\n2023-11-16 18:15:46.68059,1,2\n2023-11-16 18:15:46.68059,0,0",
			[]sharetest.Arrival{call(0, 3), call(0, 0)},
		},
		"the largest": {
			azureHeader + "\n2023-11-16 18:15:46.68059,2147483648,2147483648", []sharetest.Arrival{call(0, 1<<32)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := sharetest.ReadAzure("conv.csv", iotest.OneByteReader(strings.NewReader(test.text)), background)
			require.NoError(t, err)
			length := test.want[len(test.want)-1].At + 1
			assert.Empty(t, gocmp.Diff(sharetest.Trace{Start: start, Length: length, Arrivals: test.want}, got))
			assert.NoError(t, got.Validate())
		})
	}
	got, err := sharetest.ReadAzure("conv.csv", strings.NewReader(azureHeader+"\n2023-11-16 18:15:46,1,2"), batch)
	require.NoError(t, err)
	assert.Equal(t, start.Truncate(time.Second), got.Start, "no fraction of a second")
	assert.Equal(t, batch, got.Arrivals[0].Class)
}

func TestReadLog(t *testing.T) {
	text := logHeader + `
2026-07-28T09:00:00.000000001Z,interactive,800,200,2.5
2026-07-28T11:00:01+02:00,background,0,7,0
2026-07-28T05:00:01.5-04:00,batch,0,0,0.0000000015
2026-07-28T09:00:01.5Z,batch,3,0,1e3
`
	got, err := sharetest.ReadLog("calls.csv", strings.NewReader(text))
	require.NoError(t, err)
	second := time.Second - 1
	want := []sharetest.Arrival{
		{At: 0, Class: interactive, Estimate: 1000, Actual: 1000, Duration: 2500 * time.Millisecond},
		{At: second, Class: background, Estimate: 7, Actual: 7},
		{At: second + 500*time.Millisecond, Class: batch, Estimate: 1, Actual: 0, Duration: 2}, // rounded
		{At: second + 500*time.Millisecond, Class: batch, Estimate: 3, Actual: 3, Duration: 1000 * time.Second},
	}
	assert.Empty(t, gocmp.Diff(want, got.Arrivals))
	assert.True(t, time.Date(2026, 7, 28, 9, 0, 0, 1, time.UTC).Equal(got.Start))
	assert.Equal(t, 1500*time.Millisecond, got.Length, "the last row is part of it")
	require.NoError(t, got.Validate())

	text = byteOrder + shortHeader + "\r\n2026-07-28T09:00:00+02:00,batch,1,2"
	got, err = sharetest.ReadLog("calls.csv", strings.NewReader(text))
	require.NoError(t, err)
	assert.Equal(t, []sharetest.Arrival{{Class: batch, Estimate: 3, Actual: 3}}, got.Arrivals)
	assert.True(t, time.Date(2026, 7, 28, 7, 0, 0, 0, time.UTC).Equal(got.Start))
	_, offset := got.Start.Zone()
	assert.Equal(t, 2*60*60, offset, "times are told in the zone of the log")
}

func TestReadersSayWhatIsWrongAndWhere(t *testing.T) {
	azure := func(r io.Reader) (sharetest.Trace, error) { return sharetest.ReadAzure("a.csv", r, interactive) }
	log := func(r io.Reader) (sharetest.Trace, error) { return sharetest.ReadLog("a.csv", r) }
	type reader func(io.Reader) (sharetest.Trace, error)
	const day = "2026-07-28T"
	for name, test := range map[string]struct {
		read reader
		text string
		want string
	}{
		"azure: empty":       {azure, "", "a.csv:1: the file is empty: want " + azureHeader},
		"azure: only a mark": {azure, byteOrder, "a.csv:1: the file is empty"},
		"azure: half a mark": {azure, byteOrder[:2], "a.csv:1: the header is"},
		"azure: no header": {
			azure, "2023-11-16 18:15:46,374,44", `a.csv:1: the header is "2023-11-16 18:15:46,374,44": want ` + azureHeader,
		},
		"azure: another header": {azure, "TIMESTAMP,Tokens\n", `a.csv:1: the header is "TIMESTAMP,Tokens"`},
		"azure: a column more": {
			azure, azureHeader + ",x\n", `a.csv:1: the header is "TIMESTAMP,ContextTokens,GeneratedTokens,x"`,
		},
		"azure: a column less": {
			azure, "TIMESTAMP,ContextTokens\n", `a.csv:1: the header is "TIMESTAMP,ContextTokens"`,
		},
		"azure: columns swapped": {azure, "TIMESTAMP,GeneratedTokens,ContextTokens\n", "a.csv:1: the header is"},
		"azure: header of a log": {azure, logHeader + "\n", "a.csv:1: the header is"},
		"azure: header only":     {azure, azureHeader + "\r\n", "a.csv:1: no rows follow the header: want at least one"},
		"azure: no number": {
			azure, azureGood + "2023-11-16 18:15:47,many,44",
			`a.csv:3: ContextTokens is "many": want a whole number of tokens`,
		},
		"azure: a fraction": {
			azure, azureGood + "2023-11-16 18:15:47,374,4.5",
			`a.csv:3: GeneratedTokens is "4.5": want a whole number of tokens`,
		},
		"azure: empty number": {azure, azureGood + "2023-11-16 18:15:47,374,", `a.csv:3: GeneratedTokens is ""`},
		"azure: space":        {azure, azureGood + "2023-11-16 18:15:47,374, 4", `a.csv:3: GeneratedTokens is " 4"`},
		"azure: above an int64": {
			azure, azureGood + "2023-11-16 18:15:47,9223372036854775808,1", `a.csv:3: ContextTokens is "9223372036854775808"`,
		},
		"azure: too large": {
			azure, azureGood + "2023-11-16 18:15:47,2147483649,1",
			"a.csv:3: ContextTokens is 2147483649: want 0 to 2147483648",
		},
		"azure: too large an answer": {
			azure, azureGood + "2023-11-16 18:15:47,1,9223372036854775807",
			"a.csv:3: GeneratedTokens is 9223372036854775807: want 0 to 2147483648",
		},
		"azure: negative": {
			azure, azureGood + "2023-11-16 18:15:47,374,-44", "a.csv:3: GeneratedTokens is -44: want 0 to 2147483648",
		},
		"azure: no time": {
			azure, azureGood + "yesterday,374,44",
			`a.csv:3: TIMESTAMP is "yesterday": want a time such as 1970-01-01 00:00:00`,
		},
		"azure: time of a log": {
			azure, azureGood + "2023-11-16T18:15:47Z,374,44", `a.csv:3: TIMESTAMP is "2023-11-16T18:15:47Z"`,
		},
		"azure: out of order": {
			azure, azureGood + "2023-11-16 18:15:46.6805899,374,44",
			`a.csv:3: TIMESTAMP is "2023-11-16 18:15:46.6805899", before that of the row above: want rows in order of time`,
		},
		"azure: too few fields": {
			azure, azureGood + "2023-11-16 18:15:47,374\r\n", "a.csv:3: the row has another number of fields than the header",
		},
		"azure: too many fields": {
			azure, azureGood + "2023-11-16 18:15:47,374,44,1\r\n",
			"a.csv:3: the row has another number of fields than the header",
		},
		"azure: open quote":           {azure, azureGood + `2023-11-16 18:15:47,374,"44`, "a.csv:3: "},
		"azure: after empty lines":    {azure, azureGood + "\r\n\r\nyesterday,374,44", "a.csv:5: "},
		"azure: after a field of two": {azure, azureGood + "2023-11-16 18:15:47,1,2\n\"x\ny\",1,2", "a.csv:4: TIMESTAMP is"},
		"azure: bare quote in header": {azure, `TIMESTAMP,Context"Tokens` + "\n", "a.csv:1: "},
		"azure: 36 years": {
			azure, azureHeader + "\n1980-01-01 00:00:00,1,1\n2020-01-01 00:00:00,1,1", "a.csv:3: TIMESTAMP is",
		},
		"azure: a thousand years": {
			azure, azureHeader + "\n0001-01-01 00:00:00,1,1\n2020-01-01 00:00:00,1,1", "want 36 years at most",
		},

		"log: empty":       {log, "", "a.csv:1: the file is empty: want " + logHeader},
		"log: header only": {log, shortHeader + "\n", "a.csv:1: no rows follow the header"},
		"log: header of Azure": {
			log, azureHeader, `a.csv:1: the header is "TIMESTAMP,ContextTokens,GeneratedTokens": want ` + logHeader,
		},
		"log: two columns less": {log, "time,class,input_tokens\n", "a.csv:1: the header is"},
		"log: capital":          {log, "Time,class,input_tokens,output_tokens\n", "a.csv:1: the header is"},
		"log: another last":     {log, shortHeader + ",duration\n", "a.csv:1: the header is"},
		"log: a column more":    {log, logHeader + ",x\n", "a.csv:1: the header is"},
		"log: unknown class": {
			log, logGood + day + "09:00:01Z,chat,1,2,3", `a.csv:3: class is "chat": want interactive, background or batch`,
		},
		"log: number of a class": {log, logGood + day + "09:00:01Z,0,1,2,3", `a.csv:3: class is "0"`},
		"log: no class":          {log, logGood + day + "09:00:01Z,,1,2,3", `a.csv:3: class is ""`},
		"log: class(3)":          {log, logGood + day + "09:00:01Z,class(3),1,2,3", `a.csv:3: class is "class(3)"`},
		"log: capital class":     {log, logGood + day + "09:00:01Z,Batch,1,2,3", `a.csv:3: class is "Batch"`},
		"log: negative": {
			log, logGood + day + "09:00:01Z,batch,-1,2,3", "a.csv:3: input_tokens is -1: want 0 to 2147483648",
		},
		"log: too large": {
			log, logGood + day + "09:00:01Z,batch,1,2147483649,3", "a.csv:3: output_tokens is 2147483649: want 0 to",
		},
		"log: fraction": {log, logGood + day + "09:00:01Z,batch,1.5,2,3", `a.csv:3: input_tokens is "1.5"`},
		"log: exponent": {log, logGood + day + "09:00:01Z,batch,1e3,2,3", `a.csv:3: input_tokens is "1e3"`},
		"log: NaN": {
			log, logGood + day + "09:00:01Z,batch,1,2,NaN", `a.csv:3: seconds is "NaN": want a number, 0 or more`,
		},
		"log: negative seconds": {log, logGood + day + "09:00:01Z,batch,1,2,-0.1", `a.csv:3: seconds is "-0.1"`},
		"log: infinite":         {log, logGood + day + "09:00:01Z,batch,1,2,+Inf", `a.csv:3: seconds is "+Inf"`},
		"log: huge":             {log, logGood + day + "09:00:01Z,batch,1,2,1e400", `a.csv:3: seconds is "1e400"`},
		"log: 37 years":         {log, logGood + day + "09:00:01Z,batch,1,2,1152921505", `a.csv:3: seconds is "1152921505"`},
		"log: no seconds":       {log, logGood + day + "09:00:01Z,batch,1,2,", `a.csv:3: seconds is ""`},
		"log: duration":         {log, logGood + day + "09:00:01Z,batch,1,2,3s", `a.csv:3: seconds is "3s"`},
		"log: no zone": {
			log, logGood + day + "09:00:01,batch,1,2,3",
			`a.csv:3: time is "2026-07-28T09:00:01": want a time such as 1970-01-01T00:00:00Z`,
		},
		"log: no such day": {log, logGood + "2026-02-30T09:00:01Z,batch,1,2,3", "a.csv:3: time is"},
		"log: out of order": {
			log, logGood + day + "11:30:00+03:00,batch,1,2,3",
			`a.csv:3: time is "2026-07-28T11:30:00+03:00", before that of the row above`,
		},
		"log: order within": {
			log, logGood + day + "09:00:02Z,batch,1,2,3\n" + day + "09:00:01Z,batch,1,2,3", "a.csv:4: time is",
		},
		"log: too few fields": {
			log, logGood + day + "09:00:01Z,batch,1,2", "a.csv:3: the row has another number of fields",
		},
		"log: seconds unheard": {
			log, shortHeader + "\n" + day + "09:00:01Z,batch,1,2,3", "a.csv:2: the row has another number of fields",
		},
		"log: 36 years":  {log, logGood + "2066-07-28T09:00:01Z,batch,1,2,3", "want 36 years at most"},
		"log: 400 years": {log, logGood + "2466-07-28T09:00:01Z,batch,1,2,3", "want 36 years at most"},
	} {
		t.Run(name, func(t *testing.T) {
			trace, err := test.read(strings.NewReader(test.text))
			require.ErrorContains(t, err, test.want)
			assert.Regexp(t, `^a\.csv:[0-9]+: `, err.Error())
			assert.Zero(t, trace)
		})
	}
	_, err := sharetest.ReadAzure("a.csv", strings.NewReader(azureGood), 3)
	assert.EqualError(t, err, "sharetest: class is class(3): want interactive, background or batch")
}

func TestReadersReturnTheErrorOfTheFile(t *testing.T) {
	broken := errors.New("broken")
	for _, before := range []string{"", "t", azureHeader[:10], azureGood[:50], azureGood} {
		_, err := sharetest.ReadAzure("a.csv", io.MultiReader(strings.NewReader(before), iotest.ErrReader(broken)), batch)
		require.ErrorIs(t, err, broken)
		assert.Regexp(t, `^a\.csv:`, err.Error())
	}
	for _, before := range []string{"", "time,", logGood[:50], logGood} {
		_, err := sharetest.ReadLog("a.csv", io.MultiReader(strings.NewReader(before), iotest.ErrReader(broken)))
		require.ErrorIs(t, err, broken)
		assert.Regexp(t, `^a\.csv:`, err.Error())
	}
}

// A generated file is read a row at a time, so that it takes no memory.
type generated struct {
	row  func(i int) string
	rows int
	next int
	rest string
}

func (g *generated) Read(p []byte) (int, error) {
	if g.rest == "" {
		if g.next == g.rows {
			return 0, io.EOF
		}
		g.rest = g.row(g.next)
		g.next++
	}
	n := copy(p, g.rest)
	g.rest = g.rest[n:]
	return n, nil
}

func TestReadLogOfAMillionRows(t *testing.T) {
	t.Parallel()
	rows := 1_000_000
	if testing.Short() {
		rows = 50_000
	}
	start := time.Date(2026, 7, 28, 0, 0, 0, 0, time.UTC)
	file := &generated{rows: rows + 1, row: func(i int) string {
		if i == 0 {
			return logHeader + "\n"
		}
		at := start.Add(time.Duration(i) * 10 * time.Millisecond)
		return fmt.Sprintf("%s,%v,%d,%d,%d\n", at.Format(time.RFC3339Nano), quotashare.Class(i%3), i%1000, 7, i%5)
	}}
	trace, err := sharetest.ReadLog("calls.csv", file)
	require.NoError(t, err)
	require.Len(t, trace.Arrivals, rows)
	var tokens, seconds int64
	var classes [quotashare.NumClasses]int
	for _, a := range trace.Arrivals {
		tokens += a.Actual
		seconds += int64(a.Duration / time.Second)
		classes[a.Class]++
	}
	assert.EqualValues(t, rows/1000*(999*1000/2)+7*rows, tokens)
	assert.EqualValues(t, 2*rows, seconds)
	assert.Equal(t, [quotashare.NumClasses]int{rows / 3, (rows + 2) / 3, (rows + 1) / 3}, classes)
	assert.Equal(t, time.Duration(rows-1)*10*time.Millisecond+1, trace.Length)
}

func FuzzReadLog(f *testing.F) {
	for _, text := range []string{
		"", logHeader, logGood, shortHeader + "\r\n2026-07-28T09:00:00+02:00,batch,1,2", byteOrder + logGood,
		logGood + "2026-07-28T09:00:00Z,batch,2147483648,2147483648,1152921504.606846976\n",
		logGood + "2063-01-01T09:00:00.5Z,\"background\",0,0,0x1p-3\n", logGood + "\n\n\"",
		logGood + "2026-07-28T09:00:00Z,batch,1,1,-0",
		logHeader + "\n0000-01-01T00:00:00Z,batch,1,1,1\n9999-12-31T23:59:59Z,batch,1,1,1\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		trace, err := sharetest.ReadLog("f.csv", strings.NewReader(text))
		checkRead(t, trace, err)
	})
}

func FuzzReadAzure(f *testing.F) {
	for _, text := range []string{
		"", azureHeader, azureGood, byteOrder + azureGood, azureGood + "2023-11-16 18:15:47,2147483648,2147483648",
		azureGood + "2023-11-16 18:15:46.6805900000001,0,0\n", azureGood + "\"2060-01-16 18:15:47,5\",0,0\n",
		azureHeader + "\n0000-01-01 00:00:00,1,1\n9999-12-31 23:59:59,1,1\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		trace, err := sharetest.ReadAzure("f.csv", strings.NewReader(text), background)
		checkRead(t, trace, err)
	})
}

// checkRead checks that what was read is an error that names the place, or a trace.
func checkRead(t *testing.T, trace sharetest.Trace, err error) {
	if err != nil {
		require.Regexp(t, `^f\.csv:[0-9]+: .`, err.Error())
		require.Zero(t, trace)
		return
	}
	require.NoError(t, trace.Validate())
	require.NotEmpty(t, trace.Arrivals)
	require.Equal(t, trace.Length, trace.Arrivals[len(trace.Arrivals)-1].At+1)
	require.True(t, slices.IsSortedFunc(trace.Arrivals, byTime))
	for _, a := range trace.Arrivals {
		require.GreaterOrEqual(t, a.Actual, int64(0))
		require.Equal(t, max(a.Actual, 1), a.Estimate)
		require.GreaterOrEqual(t, a.Duration, time.Duration(0))
		require.Nil(t, a.Pool)
	}
}

func TestReadLogDoesNotDependOnTheZoneOfTheMachine(t *testing.T) {
	here := time.Local
	defer func() { time.Local = here }()
	const text = "time,class,input_tokens,output_tokens\n2026-10-25T02:30:00+02:00,batch,1,1\n2026-10-25T04:30:00+02:00,batch,1,1\n"
	elsewhere, err := sharetest.ReadLog("calls.csv", strings.NewReader(text))
	require.NoError(t, err)
	time.Local = time.FixedZone("HERE", 2*60*60)
	trace, err := sharetest.ReadLog("calls.csv", strings.NewReader(text))
	require.NoError(t, err)
	assert.Equal(t, elsewhere.Start.String(), trace.Start.String())
	assert.Equal(t, 2*time.Hour, trace.Arrivals[1].At)
}

func TestAReaderThatFailsAtOnceIsNotTakenForAnEmptyFile(t *testing.T) {
	// It fails once, and has text afterwards.
	_, err := sharetest.ReadLog("calls.csv", iotest.TimeoutReader(iotest.OneByteReader(strings.NewReader("time"))))
	require.ErrorIs(t, err, iotest.ErrTimeout)
}
