package redisshare_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
	"github.com/quotashare/quotashare/redisshare"
)

// Each replica of the service makes its end of the window at start-up. Here there are eight, and an embedded server
// stands for Redis.
func Example() {
	addr, stop := embedded()
	defer stop()

	// At start-up, in each of the eight replicas:
	client := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	window, err := redisshare.New(client, "gpt-5", quotashare.Quota{Tokens: 2_000_000}, redisshare.Local(1.0/8))
	if err != nil {
		panic(err) // it names what is wrong
	}
	defer window.Close(context.Background()) // sends what is not settled yet

	// Before each model call:
	ctx := quotashare.WithSource(context.Background(), quotashare.SourceScheduler)
	grant, err := window.Acquire(ctx, quotashare.ClassFrom(ctx), 1_200)
	if err != nil {
		fmt.Println(err) // who holds what, and when to come back
		return
	}
	grant.Settle(800) // does not wait for Redis

	fmt.Println(window.Stats().Classes[quotashare.Background].Admitted, "admitted")
	// Output:
	// 1 admitted
}

// What a replica decides while Redis is away is the owner's choice. With Closed it refuses, and says why and when to
// come back.
func ExampleMode() {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true, MaxRetries: -1}) // nobody listens
	for _, mode := range []redisshare.Mode{redisshare.Closed, redisshare.Open, redisshare.Local(0.5)} {
		window, err := redisshare.New(client, "gpt-5", quotashare.Quota{Tokens: 1000}, mode)
		if err != nil {
			panic(err)
		}
		for range 2 {
			_, decision, err := window.TryAcquire(context.Background(), quotashare.Interactive, 300)
			fmt.Println(mode, decision.Admitted, decision.Reason, errors.Is(err, redisshare.ErrAway))
		}
		window.Close(context.Background())
	}
	// Output:
	// closed false none true
	// closed false none true
	// open true none false
	// open true none false
	// local(0.5) true own_share false
	// local(0.5) false quota_full false
}

// Under the HTTP client of an LLM SDK a shared window is a limit like any other: estimated, acquired and settled with
// what the answer used. What the provider's headers and 429s say reaches all replicas.
func ExampleNew_llmhttp() {
	addr, stop := embedded()
	defer stop()
	client := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	tokens, err := redisshare.New(client, "gpt-5 tokens", quotashare.Quota{Tokens: 2_000_000}, redisshare.Closed)
	if err != nil {
		panic(err)
	}
	requests, err := redisshare.New(client, "gpt-5 requests", quotashare.Quota{Tokens: 5_000}, redisshare.Closed)
	if err != nil {
		panic(err)
	}
	limits := []llmhttp.Limit{{Limiter: tokens}, {Limiter: requests, Unit: llmhttp.Requests}}
	_ = &http.Client{Transport: &llmhttp.Transport{Limits: limits, Profile: llmhttp.OpenAI}}
}

// A 503 with Retry-After is the honest answer while Redis is away and the mode is Closed: nobody knows how much of the
// quota is used.
func ExampleWindow_TryAcquire() {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true, MaxRetries: -1}) // nobody listens
	window, err := redisshare.New(client, "gpt-5", quotashare.Quota{Tokens: 1000}, redisshare.Closed,
		redisshare.WithTimeout(50*time.Millisecond))
	if err != nil {
		panic(err)
	}
	defer window.Close(context.Background())

	_, decision, err := window.TryAcquire(context.Background(), quotashare.Interactive, 300)
	switch {
	case errors.Is(err, redisshare.ErrAway), errors.Is(err, redisshare.ErrLost):
		fmt.Println(http.StatusServiceUnavailable, "Retry-After:", decision.RetryAfterSeconds())
	case err != nil:
		fmt.Println(err)
	case !decision.Admitted:
		fmt.Println(http.StatusTooManyRequests, "Retry-After:", decision.RetryAfterSeconds())
	}
	// Output:
	// 503 Retry-After: 1
}

// embedded starts a server for an example.
func embedded() (addr string, stop func()) {
	server, err := miniredis.Run()
	if err != nil {
		panic(err)
	}
	return server.Addr(), server.Close
}
