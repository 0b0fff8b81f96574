package promshare

import (
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/quotashare/quotashare"
)

// BenchmarkCollect100Windows collects as a registry does: into a channel with room for 1000 metrics, which somebody
// drains meanwhile.
func BenchmarkCollect100Windows(b *testing.B) {
	c := hundred(b)
	b.ReportAllocs()
	for b.Loop() {
		metrics := make(chan prometheus.Metric, 1000)
		go func() {
			c.Collect(metrics)
			close(metrics)
		}()
		n := 0
		for range metrics {
			n++
		}
		require.Equal(b, 100*ownMetrics, n)
	}
}

// BenchmarkGather100Windows is all that a scrape costs but for the text: collecting, and what the registry checks.
func BenchmarkGather100Windows(b *testing.B) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(hundred(b))
	b.ReportAllocs()
	for b.Loop() {
		_, err := registry.Gather()
		require.NoError(b, err)
	}
}

func hundred(b *testing.B) *Collector {
	b.Helper()
	c := &Collector{}
	for i := range 100 {
		w, err := quotashare.NewWindow(quotashare.Quota{Tokens: 2_000_000})
		require.NoError(b, err)
		for class := range quotashare.Class(quotashare.NumClasses) {
			for range 100 {
				w.TryAcquire(class, 10_000)
			}
		}
		require.NoError(b, c.Add(fmt.Sprintf("model %d", i), w))
	}
	return c
}
