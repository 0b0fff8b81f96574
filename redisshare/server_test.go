package redisshare

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// A node is a Redis of the test's own: a real one where redis-server is installed, and otherwise an embedded one.
type node struct {
	t    testing.TB
	addr string
	args []string
	cmd  *exec.Cmd // nil for an embedded one
	mini *miniredis.Miniredis
}

// newNode starts a Redis that ends with the test. It keeps nothing on disk.
func newNode(t testing.TB, args ...string) *node {
	t.Helper()
	n := &node{t: t, args: args}
	if _, err := exec.LookPath("redis-server"); err != nil {
		n.mini = miniredis.RunT(t)
		n.addr = n.mini.Addr()
		return n
	}
	n.addr = freeAddr(t)
	n.start()
	t.Cleanup(n.stop)
	return n
}

// newRealNode is newNode for a test that an embedded server cannot stand.
func newRealNode(t testing.TB, args ...string) *node {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Skip("redis-server is not installed")
	}
	return newNode(t, args...)
}

// freeAddr returns an address at which nobody listens. Ports of the kernel's own choice are those that clients get, too,
// so it chooses below them.
func freeAddr(t testing.TB) string {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 15_000+rand.IntN(15_000)))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	require.FailNow(t, "no port is free")
	return ""
}

func (n *node) start() {
	n.t.Helper()
	_, port, err := net.SplitHostPort(n.addr)
	require.NoError(n.t, err)
	dir := n.t.TempDir()
	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(n.t, err)
	defer log.Close()
	args := append([]string{"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", dir,
		"--enable-debug-command", "yes"}, n.args...)
	n.cmd = exec.Command("redis-server", args...)
	n.cmd.Stdout, n.cmd.Stderr = log, log
	require.NoError(n.t, n.cmd.Start())
	c := redis.NewClient(&redis.Options{Addr: n.addr, ContextTimeoutEnabled: true})
	defer c.Close()
	pid := fmt.Sprintf("process_id:%d\r", n.cmd.Process.Pid) // another may have got the port meanwhile
	require.Eventually(n.t, func() bool {
		return strings.Contains(c.Info(context.Background(), "server").Val(), pid)
	}, 10*time.Second, 10*time.Millisecond)
}

func (n *node) stop() {
	_ = n.cmd.Process.Kill()
	_ = n.cmd.Wait()
}

// client returns a client that ends with the test.
func (n *node) client() *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: n.addr, ContextTimeoutEnabled: true})
	n.t.Cleanup(func() { _ = c.Close() })
	return c
}

// close closes a Window at the end of a test.
func closeAfter(t testing.TB, w *Window) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = w.Close(ctx)
	})
}
