// Command service is a small service that calls a hosted model, to be copied: work enters it at three places, one
// Window decides whose calls are made, and Prometheus and expvar show what it decides. The model is a fake one on
// loopback (provider.go), and so are the people who chat (load.go); main.go and work.go are what a real service has.
//
//	go run . [-addr ADDRESS] [-load=false]
package main

import (
	"context"
	"errors"
	"expvar"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/llmhttp"
	"github.com/quotashare/quotashare/promshare"
)

type config struct {
	addr     string
	provider string
	tokens   int64
	window   time.Duration
	load     bool
}

func main() {
	var c config
	flag.StringVar(&c.addr, "addr", "127.0.0.1:8080", "`address` of the service")
	flag.StringVar(&c.provider, "provider", "127.0.0.1:0", "`address` of the fake provider")
	flag.Int64Var(&c.tokens, "tokens", 100_000, "`tokens` that the account allows in one window")
	flag.DurationVar(&c.window, "window", time.Minute, "`length` of the window")
	flag.BoolVar(&c.load, "load", true, "run the scheduler, the eval suite and people who chat; without it you chat alone")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx, c, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "service:", err)
		os.Exit(1)
	}
}

const addresses = `chat      %[1]s/chat (POST a question)
metrics   %[1]s/metrics
expvar    %[1]s/debug/vars
provider  %[2]s
`

// windows is the view by expvar, one entry a window.
var windows = expvar.NewMap("quotashare")

// run serves until ctx is done, and then lets what is under way end.
func run(ctx context.Context, c config, out io.Writer) error {
	// A little less than the account allows: a call reaches the provider a moment after it was admitted, and leaves its
	// window so much later than ours.
	window, err := quotashare.NewWindow(quotashare.Quota{
		Tokens: c.tokens - c.tokens/20,
		Window: c.window,
		Floors: quotashare.ElasticFloors,
	})
	if err != nil {
		return err
	}
	length := window.Quota().Window

	account, err := listen(c.provider, &provider{quota: c.tokens, window: length})
	if err != nil {
		return err
	}
	defer account.Close()

	// Under whatever calls the model. The zero Profile is a provider that counts what was used.
	base := http.DefaultTransport.(*http.Transport).Clone()
	base.MaxIdleConnsPerHost = 100
	transport := &llmhttp.Transport{
		Base:          base,
		Limits:        []llmhttp.Limit{{Limiter: window}},
		Profile:       llmhttp.Profile{},
		DeniedAsError: true,
	}
	s := &service{client: &http.Client{Transport: transport}, model: account.url}

	// What shows it.
	collector, err := promshare.NewCollector(map[string]promshare.Window{"fake-model": window})
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector)
	windows.Set("fake-model", expvar.Func(func() any { return window.Stats() }))
	windows.Set("unstamped", expvar.Func(func() any { return transport.Unstamped() }))

	mux := http.NewServeMux()
	mux.Handle("POST /chat", llmhttp.Enter(quotashare.SourceAPI, http.HandlerFunc(s.chat)))
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle("GET /debug/vars", expvar.Handler())
	server, err := listen(c.addr, mux)
	if err != nil {
		return err
	}
	defer server.Close()
	fmt.Fprintf(out, addresses, server.url, account.url)

	var work sync.WaitGroup
	if c.load {
		work.Go(func() { s.schedule(ctx, length/8) })
		work.Go(func() { s.evaluate(ctx, 50) })
		work.Go(func() { chat(ctx, server.url+"/chat", length) })
	}
	<-ctx.Done()

	// What waits was told by ctx. What people have asked is answered.
	ending, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	work.Wait()
	err = server.Shutdown(ending)
	base.CloseIdleConnections()
	return errors.Join(err, account.Shutdown(ending))
}

// A listener is a server that serves already.
type listener struct {
	*http.Server
	url string
}

func listen(addr string, handler http.Handler) (listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return listener{}, err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	go server.Serve(l) // until Shutdown or Close
	return listener{server, "http://" + l.Addr().String()}, nil
}
