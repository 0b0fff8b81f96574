package sharetest

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/quotashare/quotashare"
)

// ReadAzure reads recorded calls of one class, written as the Azure LLM inference traces are (github.com/Azure/
// AzurePublicDataset): CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens, times such as
// "2023-11-16 18:15:46.6805900", taken for UTC, and rows in order of time.
//
// The trace starts with the first row and ends with the last. The estimate of a call is what it used, ContextTokens and
// GeneratedTokens together, 1 at least. How long it took is not recorded: Duration is 0, and can be filled in. So can a
// longer Length.
//
// It reads the whole of r. An error begins with name, which is that of the file, and the line: "conv.csv:17: ..."; one
// of r itself has no line. A file without rows is an error.
func ReadAzure(name string, r io.Reader, class quotashare.Class) (Trace, error) {
	if class >= quotashare.NumClasses {
		return Trace{}, fmt.Errorf("sharetest: class is %v: want interactive, background or batch", class)
	}
	return readTrace(name, r, format{
		columns: []string{"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
		time:    "2006-01-02 15:04:05", // a fraction of a second may follow
		parse: func(fields []string) (Arrival, error) {
			return parseTokens(Arrival{Class: class}, "ContextTokens", fields[1], "GeneratedTokens", fields[2])
		},
	})
}

// ReadLog reads calls as a service would export them: CSV with the header
//
//	time,class,input_tokens,output_tokens,seconds
//
// of which the last may be left out. The time is when the call was first asked for, as in RFC 3339, with any zone, in
// order: a log of when calls ended wants sorting. The class is "interactive", "background" or "batch", the tokens are
// what the call used, and seconds is how long it took (without it 0). All else is as for [ReadAzure].
func ReadLog(name string, r io.Reader) (Trace, error) {
	return readTrace(name, r, format{
		columns:  []string{"time", "class", "input_tokens", "output_tokens", "seconds"},
		optional: 1,
		time:     time.RFC3339,
		parse: func(fields []string) (a Arrival, err error) {
			// The one place where text becomes a class: this is a file that the owner of a service tests with. No
			// request gets here.
			for a.Class.String() != fields[1] {
				if a.Class++; a.Class == quotashare.NumClasses {
					return Arrival{}, fmt.Errorf("class is %q: want interactive, background or batch", fields[1])
				}
			}
			if len(fields) > 4 {
				seconds, err := strconv.ParseFloat(fields[4], 64)
				if err != nil || !(seconds >= 0 && seconds <= maxTime/1e9) {
					return Arrival{}, fmt.Errorf("seconds is %q: want a number, 0 or more", fields[4])
				}
				a.Duration = time.Duration(math.Round(seconds * 1e9))
			}
			return parseTokens(a, "input_tokens", fields[2], "output_tokens", fields[3])
		},
	})
}

// A format is how the rows of a file are written.
type format struct {
	columns  []string // the time is in the first
	optional int      // so many of the last columns may be left out, in the whole file
	time     string   // layout, for time.Parse
	parse    func(fields []string) (Arrival, error)
}

func (f *format) accepts(header []string) bool {
	n := len(header)
	return n <= len(f.columns) && n >= len(f.columns)-f.optional && slices.Equal(header, f.columns[:n])
}

func readTrace(name string, r io.Reader, f format) (Trace, error) {
	text, err := skipByteOrderMark(r)
	if err != nil {
		return Trace{}, csvError(name, err)
	}
	in := csv.NewReader(text)
	in.ReuseRecord = true
	want := "want " + strings.Join(f.columns, ",")
	fail := func(format string, args ...any) (Trace, error) {
		line, _ := in.FieldPos(0)
		return Trace{}, fmt.Errorf("%s:%d: %w", name, line, fmt.Errorf(format, args...))
	}

	header, err := in.Read()
	switch {
	case err == io.EOF:
		return Trace{}, fmt.Errorf("%s:1: the file is empty: %s", name, want)
	case err != nil:
		return Trace{}, csvError(name, err)
	case !f.accepts(header):
		return fail("the header is %q: %s", strings.Join(header, ","), want)
	}

	var t Trace
	for {
		fields, err := in.Read()
		switch {
		case err == io.EOF && len(t.Arrivals) == 0:
			return Trace{}, fmt.Errorf("%s:1: no rows follow the header: want at least one", name)
		case err == io.EOF:
			t.Length = t.Arrivals[len(t.Arrivals)-1].At + 1 // the last row too
			return t, nil
		case err != nil:
			return Trace{}, csvError(name, err)
		case len(t.Arrivals) == maxArrivals:
			return fail("the file has more than %d rows: want that many at most", maxArrivals)
		}
		// Not time.Parse, which makes times local where the zone is that of the machine.
		at, err := time.ParseInLocation(f.time, fields[0], time.UTC)
		if err != nil {
			return fail("%s is %q: want a time such as %s", f.columns[0], fields[0], time.Unix(0, 0).UTC().Format(f.time))
		}
		a, err := f.parse(fields)
		if err != nil {
			return fail("%w", err)
		}
		if len(t.Arrivals) == 0 {
			t.Start = at
		}
		a.At = at.Sub(t.Start)
		if n := len(t.Arrivals); n > 0 && a.At < t.Arrivals[n-1].At {
			return fail("%s is %q, before that of the row above: want rows in order of time", f.columns[0], fields[0])
		}
		if a.At >= maxTime {
			return fail("%s is %q, %v after the first row: want 36 years at most", f.columns[0], fields[0], a.At)
		}
		t.Arrivals = append(t.Arrivals, a)
	}
}

// parseTokens returns a with the tokens of a prompt and of its answer.
func parseTokens(a Arrival, inColumn, in, outColumn, out string) (Arrival, error) {
	for _, field := range [...]struct{ column, text string }{{inColumn, in}, {outColumn, out}} {
		n, err := strconv.ParseInt(field.text, 10, 64)
		switch {
		case err != nil:
			return Arrival{}, fmt.Errorf("%s is %q: want a whole number of tokens", field.column, field.text)
		case n < 0 || n > maxTokens/2:
			return Arrival{}, fmt.Errorf("%s is %d: want 0 to %d", field.column, n, int64(maxTokens/2))
		}
		a.Actual += n
	}
	a.Estimate = max(a.Actual, 1) // a call of nothing is no call that can be asked for
	return a, nil
}

// csvError gives an error of the reader the form that all others have.
func csvError(name string, err error) error {
	var syntax *csv.ParseError
	switch {
	case !errors.As(err, &syntax):
		return fmt.Errorf("%s: %w", name, err)
	case errors.Is(err, csv.ErrFieldCount):
		return fmt.Errorf("%s:%d: the row has another number of fields than the header", name, syntax.Line)
	}
	return fmt.Errorf("%s:%d: %w", name, syntax.Line, syntax.Err)
}

// skipByteOrderMark skips what some programs begin a file of UTF-8 with.
func skipByteOrderMark(r io.Reader) (io.Reader, error) {
	const mark = "\uFEFF"
	buffered := bufio.NewReader(r)
	start, err := buffered.Peek(len(mark))
	if err != nil && err != io.EOF {
		return nil, err
	}
	if string(start) == mark {
		_, err = buffered.Discard(len(mark)) // it was peeked, so it is there
		return buffered, err
	}
	return buffered, nil
}
