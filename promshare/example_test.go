package promshare_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/quotashare/quotashare"
	"github.com/quotashare/quotashare/promshare"
)

// Register one Collector of all windows, and let Prometheus scrape it.
func Example() {
	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: 2_000_000})
	if err != nil {
		panic(err)
	}

	// At start-up, with a name for each window:
	collector, err := promshare.NewCollector(map[string]promshare.Window{"gpt-5": window})
	if err != nil {
		panic(err) // it names the window that is wrong
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector)
	handler := promhttp.HandlerFor(registry, promhttp.HandlerOpts{}) // serve it as /metrics

	// The calls are guarded as ever:
	grant, _ := window.TryAcquire(quotashare.Interactive, 1_200)
	grant.Settle(850)
	window.TryAcquire(quotashare.Batch, 300_000) // lent by the others
	window.TryAcquire(quotashare.Batch, 300_000) // more than they lend

	// What Prometheus is answered, in part:
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for line := range strings.Lines(answer.Body.String()) {
		if strings.HasPrefix(line, "quotashare_decisions_total") && !strings.HasSuffix(line, " 0\n") ||
			strings.HasPrefix(line, "quotashare_borrowed_tokens") {
			fmt.Print(line)
		}
	}
	// Output:
	// quotashare_borrowed_tokens{class="background",window="gpt-5"} 0
	// quotashare_borrowed_tokens{class="batch",window="gpt-5"} 100000
	// quotashare_borrowed_tokens{class="interactive",window="gpt-5"} 0
	// quotashare_decisions_total{class="batch",reason="borrowed",window="gpt-5"} 1
	// quotashare_decisions_total{class="batch",reason="reserved",window="gpt-5"} 1
	// quotashare_decisions_total{class="interactive",reason="own_share",window="gpt-5"} 1
}

// A service that learns its models as it runs adds their windows then.
func ExampleCollector_Add() {
	collector, _ := promshare.NewCollector(nil)
	prometheus.NewRegistry().MustRegister(collector)

	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 2_000_000})
	if err := collector.Add("gpt-5", window); err != nil {
		panic(err)
	}
	fmt.Println(collector.Add("gpt-5", window))
	fmt.Println(collector.Remove("gpt-5"))
	// Output:
	// promshare: there is a window "gpt-5" already: want another name, or Remove it first
	// true
}
