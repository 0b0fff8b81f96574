package redisshare

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// A proxy stands between a client and a Redis, and does to each request what its rule says.
type proxy struct {
	t      testing.TB
	addr   string
	target string
	listen net.Listener
	group  sync.WaitGroup
	held   atomic.Int64 // requests that Redis has not answered

	mu    sync.Mutex
	rule  func(args []string) any
	conns map[net.Conn]bool
	ended bool
}

// What a rule returns, beside nil, which passes a request on; an answer, a string, in place of Redis'; and hold.
type (
	cut  struct{}      // pass it on, but not its answer: close the connection instead
	hold chan struct{} // pass it on when the channel is closed, whether or not the client still waits: see proxy.hold
)

// newProxy starts a proxy that ends with the test. It passes everything on until it has a rule.
func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	listen, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{t: t, addr: listen.Addr().String(), target: target, listen: listen, conns: make(map[net.Conn]bool)}
	p.group.Go(func() {
		for {
			conn, err := listen.Accept()
			if err != nil {
				return
			}
			p.group.Go(func() { p.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = listen.Close()
		p.cutAll(true)
		p.group.Wait()
	})
	return p
}

// set sets the rule for requests from now on.
func (p *proxy) set(rule func(args []string) any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rule = rule
}

// hold returns a hold, and what lets go those that it holds and waits until Redis has answered them.
func (p *proxy) hold() (held hold, letGo func()) {
	held = make(hold)
	release := sync.OnceFunc(func() { close(held) })
	p.t.Cleanup(release)
	return held, func() {
		p.t.Helper()
		release()
		require.Eventually(p.t, func() bool { return p.held.Load() == 0 }, 10*time.Second, time.Millisecond)
	}
}

// scripts returns a rule that does so to runs of the window's script for the operations, or for any if none is given, and
// passes on everything else.
func scripts(do any, operations ...string) func(args []string) any {
	return func(args []string) any {
		if !isScript(args, operations...) {
			return nil
		}
		return do
	}
}

func isScript(args []string, operations ...string) bool {
	if len(args) < 5 || !strings.HasPrefix(strings.ToLower(args[0]), "eval") {
		return false
	}
	for _, operation := range operations {
		if args[4] == operation {
			return true
		}
	}
	return len(operations) == 0
}

// cutAll closes all connections.
func (p *proxy) cutAll(end bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = p.ended || end
	for conn := range p.conns {
		_ = conn.Close()
	}
}

func (p *proxy) keep(conn net.Conn) (forget func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[conn] = true
	if p.ended {
		_ = conn.Close()
	}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, conn)
		_ = conn.Close()
	}
}

func (p *proxy) serve(client net.Conn) {
	defer p.keep(client)()
	redis, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer p.keep(redis)()
	requests, answers := bufio.NewReader(client), bufio.NewReader(redis)
	for {
		var request, answer bytes.Buffer
		args, err := message(requests, &request)
		if err != nil {
			return
		}
		p.mu.Lock()
		rule := p.rule
		p.mu.Unlock()
		var do any
		if rule != nil {
			do = rule(args)
		}
		switch do := do.(type) {
		case string:
			if _, err := io.WriteString(client, do); err != nil {
				return
			}
			continue
		case hold:
			p.held.Add(1)
			<-do
		}
		if _, err := redis.Write(request.Bytes()); err != nil {
			return
		}
		if _, err := message(answers, &answer); err != nil {
			return
		}
		switch do.(type) {
		case cut:
			return
		case hold:
			p.held.Add(-1)
		}
		if _, err := client.Write(answer.Bytes()); err != nil {
			return
		}
	}
}

// message reads one message of Redis' protocol, as it is, and returns the strings in it.
func message(from *bufio.Reader, to *bytes.Buffer) (found []string, err error) {
	line, err := from.ReadString('\n')
	if err != nil {
		return nil, err
	}
	to.WriteString(line)
	number := func() int {
		n, failed := strconv.Atoi(strings.TrimSpace(line[1:]))
		if failed != nil {
			err = fmt.Errorf("message %q: %w", line, failed)
		}
		return n
	}
	parts := 0
	switch line[0] {
	case '$', '=', '!':
		n := number()
		if n < 0 || err != nil {
			return nil, err
		}
		s := make([]byte, n+len("\r\n"))
		if _, err := io.ReadFull(from, s); err != nil {
			return nil, err
		}
		to.Write(s)
		return []string{string(s[:n])}, nil
	case '*', '~', '>':
		parts = number()
	case '%', '|':
		parts = 2 * number()
	}
	for range parts {
		some, err := message(from, to)
		if err != nil {
			return nil, err
		}
		found = append(found, some...)
	}
	return found, err
}

// client returns a client of the proxy that ends with the test. It sends a request again so often; not at all for -1.
func (p *proxy) client(retries int) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: p.addr, ContextTimeoutEnabled: true, MaxRetries: retries})
	p.t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestProxy: a request is passed on as it is, answered by the proxy, or executed though its answer is lost.
func TestProxy(t *testing.T) {
	ctx := context.Background()
	node := newRealNode(t)
	p := newProxy(t, node.addr)
	client := p.client(-1)
	require.NoError(t, client.HSet(ctx, "hash", "a", 1, "b", "two\r\nlines").Err())
	all, err := client.HGetAll(ctx, "hash").Result()
	require.NoError(t, err)
	require.Equal(t, map[string]string{"a": "1", "b": "two\r\nlines"}, all)

	isIncr := func(do any) func(args []string) any {
		return func(args []string) any {
			if args[0] != "incr" {
				return nil
			}
			return do
		}
	}
	p.set(isIncr("-ERR no\r\n"))
	require.EqualError(t, client.Incr(ctx, "n").Err(), "ERR no")
	p.set(isIncr(cut{}))
	require.Error(t, client.Incr(ctx, "n").Err())
	require.Equal(t, "1", client.Get(ctx, "n").Val())
	held, letGo := p.hold()
	p.set(isIncr(held))
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	require.Error(t, client.Incr(short, "n").Err())
	require.Equal(t, "1", client.Get(ctx, "n").Val())
	letGo()
	require.Equal(t, "2", client.Get(ctx, "n").Val())
}
