package redisshare

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/quotashare/quotashare"
)

//go:embed window.lua
var source string

var script = redis.NewScript(source)

// maxTokens is the largest number that a script of Redis holds exactly: its numbers are floating point.
const maxTokens = 1 << 53

// slots is how many requests of one Window are under way at once; others wait for one of them to end. Each slot has a
// key in Redis that remembers the last answer given to it, so that a request that is sent again, because its answer
// was lost, gets that answer and charges nothing more.
const slots = 128

// maxTimeout bounds how late a decision is sent again: Redis remembers its answer for longer (ttl in window.lua). A
// correction is sent again for as long as it matters, which is less than a window.
const maxTimeout = 5 * time.Second

// A rules is a quota as the script takes it.
type rules struct {
	quota  quotashare.Quota // with its defaults written out
	limits [quotashare.NumClasses]quotashare.Limits
	digest int64
	packed []byte // for the script
}

func newRules(quota quotashare.Quota) (*rules, error) {
	w, err := quotashare.NewWindow(quota)
	if err != nil {
		return nil, err
	}
	r := &rules{quota: w.Quota()}
	quota = r.quota
	switch {
	case quota.Window%time.Microsecond != 0:
		return nil, fmt.Errorf("redisshare: window is %v: want whole microseconds, which are what the clock of Redis tells", quota.Window)
	case quota.Window > maxWindow:
		return nil, fmt.Errorf("redisshare: window is %v: want at most %v", quota.Window, maxWindow)
	case quota.Tokens > maxTokens:
		return nil, fmt.Errorf("redisshare: tokens is %d: want at most %d, for the numbers of a Redis script are exact up to 2^53", quota.Tokens, int64(maxTokens))
	case quota.Overdraft > maxTokens-quota.Tokens:
		return nil, fmt.Errorf("redisshare: overdraft is %d: want at most %d, so that tokens and overdraft are up to 2^53 together", quota.Overdraft, maxTokens-quota.Tokens)
	}
	numbers := []int64{quota.Window.Microseconds(), int64(quota.Pace), quota.Tokens, quota.Tokens + quota.Overdraft}
	for _, number := range []func(quotashare.Limits) int64{
		func(l quotashare.Limits) int64 { return l.Share },
		func(l quotashare.Limits) int64 { return l.Floor },
		func(l quotashare.Limits) int64 { return l.Ceiling },
	} {
		for c := range r.limits {
			r.limits[c] = quota.Limits(quotashare.Class(c))
			numbers = append(numbers, number(r.limits[c]))
		}
	}
	r.packed = pack(nil, numbers...)
	hash := fnv.New64a()
	_, _ = hash.Write(r.packed)
	r.digest = int64(hash.Sum64() % maxTokens)
	return r, nil
}

// maxWindow keeps instants and sums of windows far below 2^53 microseconds.
const maxWindow = 366 * 24 * time.Hour

// An answer is what the script says.
type answer struct {
	reason  quotashare.Reason
	at      int64 // the instant of the decision, by the clock of Redis, in microseconds
	wait    time.Duration
	usage   quotashare.Usage // but for Recent, which only the operation "usage" tells
	within  time.Duration    // of the operation "behind"
	epoch   int64
	count   int64
	changed bool // another quota was in force before
}

// What the script's answer begins with.
const (
	statusDone = iota
	statusLost
	statusOtherWindow
	statusStale
)

var (
	// ErrAway is in the error of a decision that Redis could not be asked for: it is away, slow, read-only or failing
	// over, or says something else than an answer. The error's text says what was wrong.
	ErrAway = errors.New("redisshare: Redis cannot be asked")

	// ErrLost is in the error of a decision that Redis cannot take, for it has lost what was charged in the last
	// window: it was flushed, or restarted, or failed over to a server that did not have all of it. A window later it
	// is over.
	ErrLost = errors.New("redisshare: Redis has lost what was charged in the last window")

	// ErrClosed is in the error of what is asked of a Window after Close.
	ErrClosed = errors.New("redisshare: the Window is closed")
)

// A lostError says for how long more the usage is not known.
type lostError struct{ wait time.Duration }

func (e *lostError) Error() string { return ErrLost.Error() }
func (e *lostError) Unwrap() error { return ErrLost }

// parse reads the script's answer.
func parse(operation, got string) (a answer, err error) {
	var n [17]int64
	for i := range min(len(got)/8, len(n)) {
		n[i] = int64(binary.BigEndian.Uint64([]byte(got[8*i:])))
	}
	switch {
	case n[0] == statusLost && len(got) == 6*8:
		a.epoch, a.count = n[4], n[5]
		return a, &lostError{microseconds(n[1])}
	case n[0] == statusOtherWindow && len(got) == 2*8:
		return a, fmt.Errorf("redisshare: others of this name have a window of %v: want the same for all, or another name", microseconds(n[1]))
	case n[0] == statusStale && len(got) == 8:
		return a, errors.New("redisshare: a newer request was faster")
	case n[0] != statusDone || len(got) != len(n)*8 && len(got) != 14*8: // without Recent
		return a, fmt.Errorf("redisshare: the script answered %q: want its numbers", got)
	}
	a.reason, a.at, a.wait = quotashare.Reason(n[1]), n[2], microseconds(n[3])
	if operation == "behind" {
		a.within = microseconds(n[14])
	}
	a.epoch, a.count, a.changed = n[4], n[5], n[6] == 1
	a.usage = quotashare.Usage{
		Used: [3]int64(n[7:10]), Demand: [3]int64(n[10:13]), Others: n[13], Recent: [3]int64(n[14:17]),
	}
	return a, nil
}

// pack appends numbers, none of them negative, as the script reads them.
func pack(to []byte, numbers ...int64) []byte {
	for _, n := range numbers {
		to = binary.BigEndian.AppendUint64(to, uint64(n))
	}
	return to
}

func microseconds(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

// A server is Redis as one Window knows it.
type server struct {
	client redis.Scripter
	script *redis.Script
	key    string // of the window
	open   int64  // 1 to go on where usage was lost

	free chan struct{} // as many tokens as slots that are not in use

	mu    sync.Mutex
	idle  []*slot   // those not in use, the one to be used next last, so that few are ever used
	owing []*slot   // those not in use whose next request takes something back: these are used first
	seen  answer    // the latest
	since time.Time // when it was seen
}

// A slot is used by one request at a time.
type slot struct {
	field string
	sent  int64 // the number of the latest request
	loose int64 // the first of those before the next whose answers nobody got, 0 if there is none

	answered int64     // the number of the last request that was answered
	epoch    int64     // of that answer
	since    time.Time // when it came
}

func newServer(client redis.Scripter, name string) *server {
	key := "quotashare:1:{" + name + "}" // 1 is the version of what stands there
	s := &server{client: client, script: script, key: key, free: make(chan struct{}, slots)}
	caller := rand.Text()
	for i := range slots {
		s.idle = append(s.idle, &slot{field: fmt.Sprint("slot:", caller, ":", slots-1-i)})
		s.free <- struct{}{}
	}
	return s
}

// take takes a slot. It waits until one is free or ctx ends.
func (s *server) take(ctx context.Context) (*slot, error) {
	select {
	case <-s.free:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	from := &s.idle
	if len(s.owing) > 0 {
		from = &s.owing
	}
	last := len(*from) - 1
	taken := (*from)[last]
	*from = (*from)[:last]
	return taken, nil
}

func (s *server) release(one *slot) {
	s.mu.Lock()
	if one.loose != 0 {
		s.owing = append(s.owing, one)
	} else {
		s.idle = append(s.idle, one)
	}
	s.mu.Unlock()
	s.free <- struct{}{}
}

// send sends the latest request of the slot to Redis; sent again, it is the same request.
func (s *server) send(ctx context.Context, one *slot, r *rules, operation string, args ...int64) (answer, error) {
	epoch, count := s.known(r.quota.Window)
	answered := int64(0)
	if epoch == one.epoch && time.Since(one.since) < r.quota.Window {
		answered = one.answered
	}
	request := make([]byte, 0, 8*max(7+len(args), 11))
	request = pack(request, one.sent, one.loose, answered, epoch, count, s.open, r.digest)
	request = pack(request, args...)
	request = request[:cap(request)] // the script reads four numbers after the first seven, if not more
	got, err := s.script.Run(ctx, s.client, []string{s.key}, operation, request, r.packed, one.field).Text()
	if err != nil {
		return answer{}, err
	}
	a, err := parse(operation, got)
	lost := errors.Is(err, ErrLost)
	if err == nil || lost { // the script wrote it down
		one.answered, one.epoch, one.since = one.sent, a.epoch, time.Now()
	}
	s.note(a, lost)
	return a, err
}

// known returns what the script needs to tell whether it still has what was charged.
func (s *server) known(window time.Duration) (epoch, count int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.since) >= window {
		return 0, 0
	}
	return s.seen.epoch, s.seen.count
}

// note remembers an answer if it is newer than the latest. One that says that the usage was lost tells no usage.
func (s *server) note(a answer, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.epoch != 0 && (lost || a.epoch != s.seen.epoch || a.count >= s.seen.count) {
		if lost {
			a.usage = s.seen.usage
		}
		s.seen, s.since = a, time.Now()
	}
}

// latest returns the usage that Redis told last, or none if that was a window ago.
func (s *server) latest(window time.Duration) quotashare.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.since) >= window {
		return quotashare.Usage{}
	}
	return s.seen.usage
}
