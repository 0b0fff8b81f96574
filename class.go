package quotashare

import (
	"context"
	"strconv"
)

// A Class is a kind of work, by who waits for it. Interactive is the highest and Batch the lowest; values other than
// the three constants are no class, and Admit and TryAcquire refuse them as ReasonInvalid.
//
// A class comes from where the work entered the process (ClassFor, ClassFrom), never from the caller: nothing in this
// package parses a class out of text, JSON or a header, so a Class has MarshalText for logs and no UnmarshalText.
type Class uint8

const (
	Interactive Class = iota // somebody waits for the answer
	Background               // scheduled work: nobody waits, but it is due
	Batch                    // no deadline: evals, backfills, and whatever nobody classified
)

// NumClasses is the number of classes, and the length of every array indexed by Class.
const NumClasses = 3

// String returns "interactive", "background" or "batch", and "class(7)" for a value that is no class.
func (c Class) String() string {
	switch c {
	case Interactive:
		return "interactive"
	case Background:
		return "background"
	case Batch:
		return "batch"
	}
	return "class(" + strconv.Itoa(int(c)) + ")"
}

// MarshalText returns String, for logs and for JSON that is written. The error is always nil.
func (c Class) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// A Source says where work entered the process. Which entry point is which:
//
//   - somebody waits for the answer, behind an HTTP or gRPC handler, a chat session or a live queue: SourceAPI;
//   - a cron job, a webhook, the consumer of an ordinary queue: SourceScheduler;
//   - an eval suite or a benchmark: SourceEval;
//   - a backfill, a re-index, a migration: SourceBackfill.
//
// A Source cannot be made from a string, a number, JSON or a header: the four variables and the zero Source are all
// there are. The zero Source is an entry point that nobody named; its class is Batch. Sources are comparable.
type Source struct{ entry entry }

// entry is a type of its own so that no value from outside this package converts to a Source.
type entry uint8

const (
	entryUnknown entry = iota
	entryAPI
	entryScheduler
	entryEval
	entryBackfill
)

// The entry points of a service. See Source for which is which. Treat them as constants.
var (
	SourceAPI       = Source{entryAPI}       // Interactive
	SourceScheduler = Source{entryScheduler} // Background
	SourceEval      = Source{entryEval}      // Batch
	SourceBackfill  = Source{entryBackfill}  // Batch
)

// String returns "api", "scheduler", "eval" or "backfill", and "unknown" for the zero Source.
func (s Source) String() string {
	switch s.entry {
	case entryAPI:
		return "api"
	case entryScheduler:
		return "scheduler"
	case entryEval:
		return "eval"
	case entryBackfill:
		return "backfill"
	}
	return "unknown"
}

// MarshalText returns String, for logs and for JSON that is written. The error is always nil.
func (s Source) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// ClassFor returns the class of work that entered at s: Interactive for SourceAPI, Background for SourceScheduler,
// and Batch for all else, the zero Source too.
func ClassFor(s Source) Class {
	switch s.entry {
	case entryAPI:
		return Interactive
	case entryScheduler:
		return Background
	}
	return Batch
}

type sourceKey struct{}

// WithSource stamps ctx with the entry point of the work that it carries. It is called once, where the work enters:
// in the server's middleware, at the top of the cron job, in the main function of the eval suite.
//
// It never raises: where ctx already carries a source of a lower class, ctx is returned as it is. So an eval that
// calls the service's own handlers stays Batch all the way down.
func WithSource(ctx context.Context, s Source) context.Context {
	if old, ok := SourceFrom(ctx); ok && ClassFor(old) > ClassFor(s) {
		return ctx
	}
	return context.WithValue(ctx, sourceKey{}, s)
}

// SourceFrom returns the source that ctx was stamped with, and whether it was stamped at all.
func SourceFrom(ctx context.Context) (Source, bool) {
	s, ok := ctx.Value(sourceKey{}).(Source)
	return s, ok
}

// ClassFrom returns the class of the work that ctx carries, and Batch where nothing was stamped: forgetting the stamp
// costs priority, it never gains any.
func ClassFrom(ctx context.Context) Class {
	s, _ := SourceFrom(ctx)
	return ClassFor(s)
}
