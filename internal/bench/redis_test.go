package bench

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/redisshare"
)

// startRedis starts a redis-server that ends with the benchmark, and returns a client of it.
func startRedis(b *testing.B) *redis.Client {
	b.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		b.Skip("redis-server is not installed")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	l.Close()
	server := exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", b.TempDir())
	if err := server.Start(); err != nil {
		b.Fatal(err)
	}
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + port, ContextTimeoutEnabled: true})
	b.Cleanup(func() {
		client.Close()
		_ = server.Process.Kill()
		_ = server.Wait()
	})
	for range 1000 {
		if client.Ping(context.Background()).Err() == nil {
			return client
		}
		time.Sleep(10 * time.Millisecond)
	}
	b.Fatal("redis-server does not answer")
	return nil
}

func BenchmarkRedis(b *testing.B) { run(b, "Redis") }

// redisGroup asks redisshare and redis_rate's Allow in turn, on the same server, and gives the median of each and their
// ratio. Calls is how many there were in the window before. At last it gives the decisions a second of one server, from
// as many callers as it takes.
func redisGroup() (all []benchmark) {
	for _, calls := range []int{10, 1000, 100_000} {
		for _, to := range []toRedis{
			{"own", interactive, 1, quotashare.ReasonOwnShare},
			{"borrow", background, 1, quotashare.ReasonBorrowed},
			{"refuse", batch, plenty, quotashare.ReasonQuotaFull},
		} {
			all = append(all, benchmark{fmt.Sprintf("%s/calls=%d", to.name, calls), func(b *testing.B) { to.beside(b, calls) }})
		}
	}
	return append(all, benchmark{"throughput", redisThroughput})
}

// toRedis is a call that is measured, and its answer. Those before it are of the same class, and of one token.
type toRedis struct {
	name   string
	class  quotashare.Class
	tokens int64
	want   quotashare.Reason
}

func (to *toRedis) beside(b *testing.B, calls int) {
	client := startRedis(b)
	ctx := context.Background()
	limiter := redis_rate.NewLimiter(client)
	w, err := redisshare.New(client, b.Name(), quotashare.Quota{
		Tokens: plenty,
		Shares: quotashare.Fractions{interactive: .5, batch: .5},
		Floors: quotashare.NoFloors,
	}, redisshare.Closed, redisshare.WithTimeout(time.Second))
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close(ctx)
	for range calls {
		if _, d, err := w.TryAcquire(ctx, to.class, 1); err != nil || !d.Admitted {
			b.Fatal(d, err)
		}
	}
	var ours, theirs []time.Duration
	for b.Loop() {
		began := time.Now()
		_, d, err := w.TryAcquire(ctx, to.class, to.tokens)
		ours = append(ours, time.Since(began))
		if err != nil || d.Reason != to.want {
			b.Fatal(d, err)
		}
		began = time.Now()
		r, err := limiter.Allow(ctx, "bench", redis_rate.PerSecond(1<<30))
		theirs = append(theirs, time.Since(began))
		if err != nil || r.Allowed != 1 {
			b.Fatal(r, err)
		}
	}
	slices.Sort(ours)
	slices.Sort(theirs)
	us, them := ours[len(ours)/2], theirs[len(theirs)/2]
	b.ReportMetric(float64(us.Nanoseconds())/1e3, "us/decision")
	b.ReportMetric(float64(them.Nanoseconds())/1e3, "us/redis_rate")
	b.ReportMetric(float64(us)/float64(them), "ratio")
	b.ReportMetric(0, "ns/op")
}

func redisThroughput(b *testing.B) {
	client := startRedis(b)
	ctx := context.Background()
	w, err := redisshare.New(client, b.Name(), quotashare.Quota{Tokens: plenty}, redisshare.Closed, redisshare.WithTimeout(5*time.Second))
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close(ctx)
	b.SetParallelism(16)
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if _, d, err := w.TryAcquire(ctx, interactive, 1000); err != nil || !d.Admitted {
				b.Error(d, err)
				return
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "decisions/s")
}
