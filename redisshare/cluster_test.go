package redisshare

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// command sends a command to a node of the test's own.
func command(t *testing.T, c *redis.Client, args ...any) any {
	t.Helper()
	got, err := c.Do(context.Background(), args...).Result()
	require.NoError(t, err, "%v", args)
	return got
}

// A cluster is a Redis Cluster of so many masters.
type cluster struct {
	nodes   []*node
	clients []*redis.Client // of each node alone
	ids     []string
}

func newCluster(t *testing.T, size int) *cluster {
	t.Helper()
	c := &cluster{}
	var bus []string
	for i := range size {
		_, port, err := net.SplitHostPort(freeAddr(t))
		require.NoError(t, err)
		n := newRealNode(t, "--cluster-enabled", "yes", "--cluster-port", port)
		client := n.client()
		command(t, client, "CLUSTER", "ADDSLOTSRANGE", 16384*i/size, 16384*(i+1)/size-1)
		command(t, client, "CLUSTER", "SET-CONFIG-EPOCH", i+1)
		c.nodes, c.clients, bus = append(c.nodes, n), append(c.clients, client), append(bus, port)
		c.ids = append(c.ids, command(t, client, "CLUSTER", "MYID").(string))
	}
	for i := 1; i < size; i++ {
		host, port, err := net.SplitHostPort(c.nodes[i].addr)
		require.NoError(t, err)
		command(t, c.clients[0], "CLUSTER", "MEET", host, port, bus[i])
	}
	for _, client := range c.clients {
		require.Eventually(t, func() bool {
			info := client.ClusterInfo(context.Background()).Val()
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_slots_ok:16384") &&
				strings.Contains(info, fmt.Sprintf("cluster_size:%d\r\n", size))
		}, 10*time.Second, 10*time.Millisecond)
	}
	return c
}

// client returns a client of the whole.
func (c *cluster) client(t *testing.T) *redis.ClusterClient {
	options := &redis.ClusterOptions{ContextTimeoutEnabled: true}
	for _, n := range c.nodes {
		options.Addrs = append(options.Addrs, n.addr)
	}
	client := redis.NewClusterClient(options)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// keysOf returns the keys of a node.
func keysOf(t *testing.T, c *redis.Client) []string {
	t.Helper()
	names, err := c.Keys(context.Background(), "*").Result()
	require.NoError(t, err)
	return names
}

// decide makes a few calls at two replicas: what one charged, settled or cancelled counts for the other.
func decide(t *testing.T, a, b *Window) {
	t.Helper()
	ctx := context.Background()
	interactive, d, err := a.TryAcquire(ctx, quotashare.Interactive, 60)
	require.NoError(t, err)
	require.True(t, d.Admitted, "%+v", d)
	batch, d, err := b.TryAcquire(ctx, quotashare.Batch, 8)
	require.NoError(t, err)
	require.True(t, d.Admitted, "%+v", d)
	_, d, err = b.TryAcquire(ctx, quotashare.Interactive, 30)
	require.NoError(t, err)
	require.Equal(t, quotashare.ReasonReserved, d.Reason)
	interactive.Settle(25)
	batch.Cancel()
	awaitUsed(t, b, quotashare.ClassTokens{quotashare.Interactive: 25})
	_, d, err = b.TryAcquire(ctx, quotashare.Interactive, 30)
	require.NoError(t, err)
	require.True(t, d.Admitted, "%+v", d)
	awaitUsed(t, a, quotashare.ClassTokens{quotashare.Interactive: 55})
}

// awaitUsed waits until so much is used.
func awaitUsed(t *testing.T, w *Window, want quotashare.ClassTokens) {
	t.Helper()
	require.Eventually(t, func() bool {
		got, err := w.Usage(context.Background())
		return err == nil && got.Used == want
	}, 5*time.Second, time.Millisecond, "want %v", want)
}

// TestCluster: names are spread over the nodes of a Redis Cluster, and each has one key on one of them; a name whose
// slot moves to another node takes its window along.
func TestCluster(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	first, second := c.client(t), c.client(t)
	quota := quotashare.Quota{Tokens: 100, Window: time.Minute}
	names := []string{"gpt", "gpt 5/a", "claude", "gemini", "llama", "mistral", "über", "a:b"}
	for _, name := range names {
		decide(t, newReplica(t, first, name, quota), newReplica(t, second, name, quota))
	}
	home := map[string]int{}
	for i, client := range c.clients {
		some := keysOf(t, client)
		require.NotEmpty(t, some, "node %d", i)
		for _, key := range some {
			require.NotContains(t, home, key, "a key is on one node")
			home[key] = i
		}
	}
	require.Len(t, home, len(names), "a name has one key")

	// While the key moves, and when it has.
	w := newReplica(t, first, names[0], quota)
	key := w.server.key
	from := home[key]
	to := (from + 1) % len(c.nodes)
	slot := command(t, c.clients[0], "CLUSTER", "KEYSLOT", key)
	host, port, err := net.SplitHostPort(c.nodes[to].addr)
	require.NoError(t, err)
	grant, d, err := w.TryAcquire(t.Context(), quotashare.Background, 5)
	require.NoError(t, err)
	require.True(t, d.Admitted)
	command(t, c.clients[to], "SCRIPT", "FLUSH")
	command(t, c.clients[to], "CLUSTER", "SETSLOT", slot, "IMPORTING", c.ids[from])
	command(t, c.clients[from], "CLUSTER", "SETSLOT", slot, "MIGRATING", c.ids[to])
	awaitUsed(t, w, quotashare.ClassTokens{quotashare.Interactive: 55, quotashare.Background: 5})
	command(t, c.clients[from], "MIGRATE", host, port, key, 0, 5000)
	awaitUsed(t, w, quotashare.ClassTokens{quotashare.Interactive: 55, quotashare.Background: 5})
	command(t, c.clients[to], "CLUSTER", "SETSLOT", slot, "NODE", c.ids[to])
	command(t, c.clients[from], "CLUSTER", "SETSLOT", slot, "NODE", c.ids[to])
	grant.Settle(3)
	awaitUsed(t, w, quotashare.ClassTokens{quotashare.Interactive: 55, quotashare.Background: 3})
	require.Contains(t, keysOf(t, c.clients[to]), key)
	require.NotContains(t, keysOf(t, c.clients[from]), key)
	require.Zero(t, w.Stats().Shared.Outages)
}

// A sentinel is a master and a replica of it that Redis Sentinel watches.
type sentinel struct {
	t               *testing.T
	master, replica *node
	addr            string
	client          *redis.SentinelClient
}

func newSentinel(t *testing.T) *sentinel {
	t.Helper()
	s := &sentinel{t: t, master: newRealNode(t, "--repl-diskless-sync-delay", "0"), addr: freeAddr(t)}
	host, port, err := net.SplitHostPort(s.master.addr)
	require.NoError(t, err)
	s.replica = newRealNode(t, "--replicaof", host, port)
	s.watch(host, port)
	return s
}

// watch starts the sentinel, and waits until it would make the replica the master.
func (s *sentinel) watch(host, port string) {
	t := s.t
	t.Helper()
	_, own, err := net.SplitHostPort(s.addr)
	require.NoError(t, err)
	dir := t.TempDir()
	config := filepath.Join(dir, "sentinel.conf")
	require.NoError(t, os.WriteFile(config, []byte(strings.Join([]string{
		"port " + own,
		"bind " + host,
		"dir " + dir,
		"logfile " + filepath.Join(dir, "log"),
		"sentinel monitor mine " + host + " " + port + " 1",
		"sentinel down-after-milliseconds mine 200",
		"sentinel failover-timeout mine 4000",
	}, "\n")), 0o600))
	watcher := exec.Command("redis-server", config, "--sentinel")
	require.NoError(t, watcher.Start())
	t.Cleanup(func() {
		_ = watcher.Process.Kill()
		_ = watcher.Wait()
	})
	s.client = redis.NewSentinelClient(&redis.Options{Addr: s.addr, ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = s.client.Close() })
	require.Eventually(t, func() bool {
		replicas, err := s.client.Replicas(t.Context(), "mine").Result()
		return err == nil && len(replicas) == 1 && replicas[0]["flags"] == "slave" &&
			replicas[0]["master-link-status"] == "ok"
	}, 15*time.Second, 10*time.Millisecond)
}

// over reports whether the sentinel has made the replica the master.
func (s *sentinel) over() bool {
	addr, err := s.client.GetMasterAddrByName(s.t.Context(), "mine").Result()
	return err == nil && net.JoinHostPort(addr[0], addr[1]) == s.replica.addr
}

// replicated waits until the replica has all that was charged.
func (s *sentinel) replicated() {
	s.t.Helper()
	require.EqualValues(s.t, 1, command(s.t, s.master.client(), "WAIT", 1, 5000))
}

// open returns one replica's Window of the name.
func (s *sentinel) open(name string, quota quotashare.Quota) *caller {
	client := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: "mine", SentinelAddrs: []string{s.addr}, ContextTimeoutEnabled: true,
	})
	s.t.Cleanup(func() { _ = client.Close() })
	return &caller{t: s.t, w: newReplica(s.t, client, name, quota, WithTimeout(100*time.Millisecond))}
}

// A caller makes calls through a Window, and knows what was admitted.
type caller struct {
	t *testing.T
	w *Window

	mu         sync.Mutex
	calls      []*admitted
	away, lost int
}

// call reports whether a call of so many tokens was admitted. If it was not, the quota is full, or Redis is away or has
// lost what was charged.
func (c *caller) call(tokens int64) bool {
	grant, d, err := c.w.TryAcquire(context.Background(), quotashare.Interactive, tokens)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case errors.Is(err, ErrAway):
		c.away++
	case errors.Is(err, ErrLost):
		c.lost++
	case err != nil:
		c.t.Error(err)
	case !d.Admitted:
		if d.Reason != quotashare.ReasonQuotaFull {
			c.t.Errorf("refused as %v", d.Reason)
		}
	default:
		c.calls = append(c.calls, &admitted{class: quotashare.Interactive, at: chargedAt(&grant), estimated: tokens})
	}
	return d.Admitted
}

// must makes a call of so many tokens, which is admitted as soon as there is a connection.
func (c *caller) must(tokens int64) {
	c.t.Helper()
	require.Eventually(c.t, func() bool { return c.call(tokens) }, 5*time.Second, time.Millisecond)
}

// admitted returns how many calls were admitted, and whether Redis decides.
func (c *caller) admitted() (n int, there bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.calls), c.w.Stats().Shared.Away == nil
}

// across makes calls by both, all the time, while fail makes the replica the master. No window has more than the quota
// in it, and the whole quota is admitted again afterwards.
func (s *sentinel) across(a, b *caller, quota quotashare.Quota, fail func()) {
	t := s.t
	t.Helper()
	const parts = 10
	watchers := redis.NewClient(&redis.Options{Addr: s.addr, ContextTimeoutEnabled: true})
	defer watchers.Close()
	require.Eventually(t, func() bool { // the sentinel tells both, once they listen
		return strings.Count(watchers.ClientList(t.Context()).Val(), "cmd=subscribe") >= 2
	}, 5*time.Second, 10*time.Millisecond)
	var group sync.WaitGroup
	stop := make(chan struct{})
	for _, c := range []*caller{a, b} {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(2 * time.Millisecond):
					c.call(quota.Tokens / parts)
				}
			}
		})
	}
	finish := sync.OnceFunc(func() {
		close(stop)
		group.Wait()
	})
	defer finish()
	fail()
	require.Eventually(t, s.over, 15*time.Second, time.Millisecond)
	na, _ := a.admitted()
	nb, _ := b.admitted()
	before := na + nb
	require.Eventually(t, func() bool {
		na, aThere := a.admitted()
		nb, bThere := b.admitted()
		return na+nb >= before+parts && aThere && bThere
	}, 15*time.Second, time.Millisecond)
	finish()
	requireQuota(t, append(a.calls, b.calls...), quota)
}

func failoverQuota() quotashare.Quota {
	return quotashare.Quota{
		Tokens: 100, Window: 4 * time.Second, Pace: 1,
		Shares: quotashare.Fractions{quotashare.Interactive: 1}, Floors: quotashare.NoFloors,
	}
}

// TestSentinelFailover: the replica, which has all that was charged, becomes the master in the place of one that works.
func TestSentinelFailover(t *testing.T) {
	if testing.Short() {
		t.Skip("takes six seconds")
	}
	t.Parallel()
	s := newSentinel(t)
	quota := failoverQuota()
	a, b := s.open("failover", quota), s.open("failover", quota)
	a.must(60)
	b.must(40)
	s.replicated()
	s.across(a, b, quota, func() {
		require.Eventually(t, func() bool {
			return s.client.Failover(t.Context(), "mine").Err() == nil
		}, 5*time.Second, time.Millisecond)
	})
}

// TestSentinelFailoverAfterLoss: the master dies, and the replica that takes its place has not all that was charged.
func TestSentinelFailoverAfterLoss(t *testing.T) {
	if testing.Short() {
		t.Skip("takes six seconds")
	}
	t.Parallel()
	s := newSentinel(t)
	quota := failoverQuota()
	a, b := s.open("loss", quota), s.open("loss", quota)
	a.must(40)
	s.replicated()
	replica := s.replica.client()
	command(t, replica, "CONFIG", "SET", "masterauth", "wrong") // once cut off, it stays so
	command(t, replica, "CLIENT", "KILL", "TYPE", "master")
	require.Eventually(t, func() bool {
		return strings.Contains(replica.Info(t.Context(), "replication").Val(), "master_link_status:down")
	}, 5*time.Second, time.Millisecond)
	a.must(60)
	awaitUsed(t, b.w, quotashare.ClassTokens{quotashare.Interactive: 100})
	s.across(a, b, quota, s.master.stop)
	require.NotZero(t, a.lost)
	require.NotZero(t, b.lost)
}

// TestLossIsNoticedByWhoWasCharged: a was charged 50 on the old master, which the new one never got. b, which saw nothing
// of it, asks first and is admitted until the count is above what a saw. Nobody can know better until a comes, whose
// slot was answered later than the new master remembers: then nothing more is admitted for a window.
func TestLossIsNoticedByWhoWasCharged(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a failover takes seconds")
	}
	s := newSentinel(t)
	quota := failoverQuota()
	a, b := s.open("loss", quota), s.open("loss", quota)
	b.must(10)
	a.must(40)
	s.replicated()
	replica := s.replica.client()
	command(t, replica, "CONFIG", "SET", "masterauth", "wrong")
	command(t, replica, "CLIENT", "KILL", "TYPE", "master")
	require.Eventually(t, func() bool {
		return strings.Contains(replica.Info(t.Context(), "replication").Val(), "master_link_status:down")
	}, 5*time.Second, time.Millisecond)
	a.must(50)
	s.master.stop()
	require.Eventually(t, s.over, 15*time.Second, time.Millisecond)
	for range 5 {
		b.must(10)
	}
	require.Eventually(t, func() bool { a.call(1); return a.lost > 0 }, 15*time.Second, time.Millisecond)
	noticed := len(a.calls) + len(b.calls)
	b.call(1)
	require.NotZero(t, b.lost)
	require.Len(t, append(a.calls, b.calls...), noticed, "nothing is admitted from then on")
	require.Eventually(t, func() bool { b.call(1); return b.w.Stats().Shared.Away == nil }, 15*time.Second, time.Millisecond)
}
