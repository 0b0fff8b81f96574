package main

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// chat is people who ask the service: few for two windows, many for the next two. Who is refused gives up.
func chat(ctx context.Context, url string, window time.Duration) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	defer client.CloseIdleConnections()
	var people sync.WaitGroup
	defer people.Wait()
	for start := time.Now(); ; {
		gap := window / 20
		if time.Since(start)/(2*window)%2 == 1 {
			gap = window / 160
		}
		if !pause(ctx, gap) {
			return
		}
		people.Go(func() {
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader("Where is my parcel?"))
			if err != nil {
				return
			}
			answer, err := client.Do(request)
			if err != nil {
				return
			}
			defer answer.Body.Close()
			_, _ = io.Copy(io.Discard, answer.Body)
		})
	}
}
