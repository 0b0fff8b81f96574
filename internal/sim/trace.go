package sim

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Row is one call of a recording: only its time and its tokens.
type Row struct {
	At              time.Time
	ContextTokens   int64 // of the prompt
	GeneratedTokens int64 // of the answer
}

// columns is the header of a trace.
var columns = []string{"TIMESTAMP", "ContextTokens", "GeneratedTokens"}

// timestamp is how a trace writes a time. A fraction of a second may follow.
const timestamp = "2006-01-02 15:04:05"

// byteOrderMark is what some programs begin a file of UTF-8 with.
const byteOrderMark = "\uFEFF"

// ReadTrace reads a recording of calls, as the Azure LLM inference traces are written: CSV with the header
// TIMESTAMP,ContextTokens,GeneratedTokens, times as "2023-11-16 18:15:46.6805900" without a zone (they are taken for
// UTC), and rows in order of time. It reads the whole of r.
//
// An error begins with the name, which is that of the file, and the line: "conv.csv:17: ...". A trace without rows is
// an error.
func ReadTrace(name string, r io.Reader) ([]Row, error) {
	in := csv.NewReader(skipByteOrderMark(r))
	in.ReuseRecord = true
	fail := func(format string, args ...any) error {
		line, _ := in.FieldPos(0)
		return fmt.Errorf("%s:%d: %w", name, line, fmt.Errorf(format, args...))
	}

	header, err := in.Read()
	switch {
	case err == io.EOF:
		return nil, fmt.Errorf("%s:1: the file is empty: want the header %s", name, strings.Join(columns, ","))
	case err != nil:
		return nil, csvError(name, err)
	case !slices.Equal(header, columns):
		return nil, fail("the header is %q: want %s", strings.Join(header, ","), strings.Join(columns, ","))
	}

	var rows []Row
	for {
		record, err := in.Read()
		switch {
		case err == io.EOF && len(rows) == 0:
			return nil, fmt.Errorf("%s:1: no rows follow the header: want at least one", name)
		case err == io.EOF:
			return rows, nil
		case err != nil:
			return nil, csvError(name, err)
		}
		row, err := parseRow(record)
		switch {
		case err != nil:
			return nil, fail("%w", err)
		case len(rows) > 0 && row.At.Before(rows[len(rows)-1].At):
			return nil, fail("TIMESTAMP is %q, before that of the row above: want rows in order of time", record[0])
		}
		rows = append(rows, row)
	}
}

func parseRow(record []string) (row Row, err error) {
	if row.At, err = time.Parse(timestamp, record[0]); err != nil {
		return Row{}, fmt.Errorf("TIMESTAMP is %q: want a time such as %s.6805900", record[0], timestamp)
	}
	if row.ContextTokens, err = parseTokens(columns[1], record[1]); err != nil {
		return Row{}, err
	}
	row.GeneratedTokens, err = parseTokens(columns[2], record[2])
	return row, err
}

func parseTokens(column, text string) (int64, error) {
	// 32 bits are more than any model takes, and the sum of two such numbers is safe.
	n, err := strconv.ParseInt(text, 10, 32)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s is %q: want a whole number of tokens", column, text)
	case n < 0:
		return 0, fmt.Errorf("%s is %d: want 0 or more", column, n)
	}
	return n, nil
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

func skipByteOrderMark(r io.Reader) io.Reader {
	buffered := bufio.NewReader(r)
	if start, _ := buffered.Peek(len(byteOrderMark)); string(start) == byteOrderMark {
		_, _ = buffered.Discard(len(byteOrderMark)) // it was peeked, so it is there
	}
	return buffered
}
