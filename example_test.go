package quotashare_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/quotashare/quotashare"
)

// callModel stands for the call to the hosted model; it returns the tokens that the provider's answer says were used.
func callModel(context.Context, string) (usedTokens int64, err error) { return 850, nil }

// Guard a call: one Window for the account, one question before each model call.
func Example() {
	// At start-up: the account allows two million tokens a minute.
	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: 2_000_000})
	if err != nil {
		panic(err) // it names the field that is wrong
	}

	// Where the work enters, here a handler behind which somebody waits:
	ctx := quotashare.WithSource(context.Background(), quotashare.SourceAPI)

	// Before each model call, with the tokens of the prompt and of the longest answer:
	grant, decision := window.TryAcquire(quotashare.ClassFrom(ctx), 1_200)
	if !decision.Admitted {
		fmt.Println("come back in", decision.RetryAfter)
		return
	}
	used, err := callModel(ctx, "Where is my parcel?")
	if err == nil {
		grant.Settle(used)
	}
	fmt.Println(decision.Reason, window.Usage().Used[quotashare.Interactive])
	// Output: own_share 850
}

// What the provider says is left of the account keeps everybody's room down, if others use it too. Package llmhttp reads
// it off the headers of each answer.
func ExampleWindow_Observe() {
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 100_000})
	window.TryAcquire(quotashare.Interactive, 20_000)

	// The answer to a call that was sent two seconds ago says: x-ratelimit-remaining-tokens: 50000.
	window.Observe(50_000, 2*time.Second)
	fmt.Println("others hold", window.Usage().Others)

	// And another is 429, with Retry-After: 7.
	window.Throttled(7 * time.Second)
	_, decision := window.TryAcquire(quotashare.Interactive, 1_000)
	fmt.Println(decision.Reason, decision.RetryAfterSeconds())
	// Output:
	// others hold 30000
	// quota_full 7
}

// Settle with what the provider says was used. A call that was sent has used tokens even if it failed, so what is not
// known stays charged as it was estimated, until it leaves the window. That is why Cancel is not deferred: it would
// give back the tokens of calls that were sent. It is for the call that never was.
func ExampleGrant_Settle() {
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 100_000})
	used := func() int64 { return window.Usage().Used[quotashare.Interactive] }

	answered, _ := window.TryAcquire(quotashare.Interactive, 1_000)
	answered.Settle(640) // the provider's usage
	fmt.Println("answered:", used())

	timedOut, _ := window.TryAcquire(quotashare.Interactive, 1_000)
	timedOut.Settle(-1) // or nothing at all: nobody knows what it used
	fmt.Println("timed out:", used())

	unsent, _ := window.TryAcquire(quotashare.Interactive, 1_000)
	unsent.Cancel() // the prompt could not be built
	fmt.Println("never sent:", used())
	// Output:
	// answered: 640
	// timed out: 1640
	// never sent: 1640
}

// What to do when refused: give up if no wait can help; tell whoever waits when to come back, or come back then.
func ExampleDecision() {
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 100_000})
	window.TryAcquire(quotashare.Interactive, 70_000)

	for _, tokens := range []int64{20_000, 90_000} {
		_, decision := window.TryAcquire(quotashare.Interactive, tokens)
		switch {
		case decision.Admitted:
			fmt.Println("call the model")
		case decision.Permanent():
			largest := window.Quota().Limits(quotashare.Interactive).Largest
			fmt.Printf("413, %v: no call above %d tokens is ever admitted\n", decision.Reason, largest)
		default:
			fmt.Printf("429, %v, Retry-After: %d\n", decision.Reason, decision.RetryAfterSeconds())
		}
	}
	// Output:
	// 429, reserved, Retry-After: 60
	// 413, too_large: no call above 85000 tokens is ever admitted
}

// Which class am I? The one of the entry point, all the way down. A lower class stays, and no stamp at all is Batch.
func ExampleWithSource() {
	background := context.Background()
	request := quotashare.WithSource(background, quotashare.SourceAPI)
	cron := quotashare.WithSource(background, quotashare.SourceScheduler)
	eval := quotashare.WithSource(background, quotashare.SourceEval)

	fmt.Println(quotashare.ClassFrom(request))
	fmt.Println(quotashare.ClassFrom(cron))
	fmt.Println(quotashare.ClassFrom(quotashare.WithSource(eval, quotashare.SourceAPI)), "- an eval that calls the API")
	fmt.Println(quotashare.ClassFrom(background), "- nobody said")
	// Output:
	// interactive
	// background
	// batch - an eval that calls the API
	// batch - nobody said
}

// Load the shares from a file, and put a changed file in force while calls are under way.
func ExampleParseQuota() {
	quota, err := quotashare.ParseQuota([]byte(`{
		"tokens": 2000000,
		"shares": {"interactive": 0.6, "background": 0.2, "batch": 0.2},
		"floors": {"interactive": 0.1, "background": 0.05, "batch": 0.05},
		"ceilings": {"batch": 0.5}
	}`))
	if err != nil {
		panic(err)
	}
	window, _ := quotashare.NewWindow(quota)
	fmt.Printf("%v, batch: %+v\n", window.Quota().Window, window.Quota().Limits(quotashare.Batch))

	_, err = quotashare.ParseQuota([]byte(`{"tokens": 2000000, "shares": {"interactve": 0.6}}`))
	fmt.Println(err)

	changed, _ := quotashare.ParseQuota([]byte(`{"tokens": 3000000}`))
	fmt.Println(window.SetQuota(changed)) // what was charged stays charged
	// Output:
	// 1m0s, batch: {Share:400000 Floor:100000 Ceiling:1000000 Largest:1000000}
	// quotashare: unknown key "interactve" in shares: want interactive, background or batch
	// <nil>
}

// Two limits at once: an account that counts tokens and requests has a Window for each. A call needs both; what the
// first granted is cancelled when the second refuses, for the call is not sent.
func ExampleNewWindow_twoLimits() {
	tokens, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 1_000_000})
	requests, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 10}) // counts requests

	call := func(class quotashare.Class, estimate int64) quotashare.Decision {
		grant, decision := tokens.TryAcquire(class, estimate)
		if !decision.Admitted {
			return decision
		}
		if _, decision := requests.TryAcquire(class, 1); !decision.Admitted {
			grant.Cancel()
			return decision
		}
		if used, err := callModel(context.Background(), "..."); err == nil {
			grant.Settle(used)
		}
		return decision
	}
	admitted := 0
	for range 10 {
		if call(quotashare.Interactive, 1_000).Admitted {
			admitted++
		}
	}
	fmt.Println(admitted, "calls,", tokens.Usage().Used[quotashare.Interactive], "tokens")
	// Output:
	// 7 calls, 5950 tokens
}

// A twoLimits is a Limiter over an account that counts tokens and requests.
type twoLimits struct{ tokens, requests *quotashare.Window }

func (l twoLimits) Acquire(ctx context.Context, class quotashare.Class, estimate int64) (quotashare.Grant, error) {
	request, err := l.requests.Acquire(ctx, class, 1)
	if err != nil {
		return quotashare.Grant{}, err
	}
	grant, err := l.tokens.Acquire(ctx, class, estimate)
	if err != nil {
		request.Cancel()
		return quotashare.Grant{}, err
	}
	return quotashare.NewGrant(call{&grant, &request}), nil
}

// A call is what a twoLimits knows of a call that it admitted.
type call struct{ tokens, request *quotashare.Grant }

func (c call) Settle(actualTokens int64) { c.tokens.Settle(actualTokens) }

func (c call) Cancel() {
	c.tokens.Cancel()
	c.request.Cancel()
}

// A Limiter of your own: what it knows of a call, it puts into the Grant.
func ExampleNewGrant() {
	tokens, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 1_000_000})
	requests, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 10}) // counts requests
	var limiter quotashare.Limiter = twoLimits{tokens, requests}

	sent, _ := limiter.Acquire(context.Background(), quotashare.Interactive, 1_000)
	sent.Settle(850)
	unsent, _ := limiter.Acquire(context.Background(), quotashare.Interactive, 1_000)
	unsent.Cancel()
	fmt.Println(tokens.Usage().Used[quotashare.Interactive], "tokens,", requests.Usage().Used[quotashare.Interactive], "request")
	// Output:
	// 850 tokens, 1 request
}

// Check a share table in a unit test: what each class is sure of, and what it may borrow.
func ExampleQuota_Limits() {
	quota := quotashare.Quota{Tokens: 1_000_000, Floors: quotashare.ElasticFloors}
	for _, class := range []quotashare.Class{quotashare.Interactive, quotashare.Background, quotashare.Batch} {
		limits := quota.Limits(class)
		fmt.Printf("%-11v share %6d, floor %6d, largest call %6d\n", class, limits.Share, limits.Floor, limits.Largest)
	}

	// The longest prompt of the eval suite, beside a quiet service and beside a busy one:
	quiet := quotashare.Usage{Used: quotashare.ClassTokens{quotashare.Interactive: 20_000}}
	busy := quotashare.Usage{
		Used:   quotashare.ClassTokens{quotashare.Interactive: 500_000, quotashare.Batch: 100_000},
		Demand: quotashare.ClassTokens{quotashare.Interactive: 600_000, quotashare.Batch: 100_000},
	}
	fmt.Println(quotashare.Admit(quotashare.Batch, 120_000, quiet, quota))
	fmt.Println(quotashare.Admit(quotashare.Batch, 120_000, busy, quota))
	fmt.Println(quotashare.Admit(quotashare.Batch, 260_000, busy, quota))
	// Output:
	// interactive share 700000, floor 100000, largest call 900000
	// background  share 200000, floor  50000, largest call 850000
	// batch       share 100000, floor  50000, largest call 850000
	// {true borrowed 0s}
	// {true borrowed 0s}
	// {false reserved 5s}
}

// A replay in virtual time: the Window reads the clock that it is given.
func ExampleWithClock() {
	now := time.Date(2026, 1, 1, 2, 0, 0, 0, time.UTC)
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 1_000}, quotashare.WithClock(func() time.Time { return now }))

	window.TryAcquire(quotashare.Interactive, 700)
	now = now.Add(45 * time.Second)
	_, decision := window.TryAcquire(quotashare.Interactive, 700)
	fmt.Println(decision.Reason, decision.RetryAfter)

	now = now.Add(decision.RetryAfter)
	_, decision = window.TryAcquire(quotashare.Interactive, 700)
	fmt.Println(decision.Reason)
	// Output:
	// quota_full 15s
	// own_share
}

// A worker pool for each class: before each call a worker waits, as its class does, until the call is admitted. A large
// pool takes nothing from the others, for it is the quota that is shared and not the workers.
func ExampleWindow_Acquire_workerPool() {
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 2_000_000})
	var workers sync.WaitGroup
	pool := func(ctx context.Context, size int) chan<- string {
		prompts := make(chan string)
		for range size {
			workers.Go(func() {
				for prompt := range prompts {
					grant, err := window.Acquire(ctx, quotashare.ClassFrom(ctx), 1_200)
					if err != nil {
						fmt.Println("to be done later:", prompt, err)
						continue
					}
					if used, err := callModel(ctx, prompt); err == nil {
						grant.Settle(used)
					}
				}
			})
		}
		return prompts
	}
	enrichment := pool(quotashare.WithSource(context.Background(), quotashare.SourceScheduler), 2)
	evals := pool(quotashare.WithSource(context.Background(), quotashare.SourceEval), 50)

	for range 10 {
		enrichment <- "Which products does this ticket name?"
	}
	for range 100 {
		evals <- "Answer as if you were the agent."
	}
	close(enrichment)
	close(evals)
	workers.Wait()
	for class, stats := range window.Stats().Classes {
		fmt.Println(quotashare.Class(class), stats.Admitted, "calls,", stats.SettledTokens, "tokens")
	}
	// Output:
	// interactive 0 calls, 0 tokens
	// background 10 calls, 8500 tokens
	// batch 100 calls, 85000 tokens
}

// An HTTP handler: whoever is refused is told when to come back, and what no wait can help is told apart.
func Example_httpHandler() {
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 100_000})
	handler := func(w http.ResponseWriter, r *http.Request) {
		ctx := quotashare.WithSource(r.Context(), quotashare.SourceAPI)
		prompt := r.FormValue("prompt")
		estimate := int64(1_000 + len(prompt)/4) // the longest answer and the prompt
		grant, decision := window.TryAcquire(quotashare.ClassFrom(ctx), estimate)
		switch {
		case decision.Permanent():
			http.Error(w, "the prompt is too long", http.StatusRequestEntityTooLarge)
			return
		case !decision.Admitted:
			w.Header().Set("Retry-After", strconv.FormatInt(decision.RetryAfterSeconds(), 10))
			http.Error(w, "too many people ask", http.StatusTooManyRequests)
			return
		}
		if used, err := callModel(ctx, prompt); err == nil {
			grant.Settle(used)
		}
	}

	ask := func(length int) {
		response := httptest.NewRecorder()
		request := httptest.NewRequest(http.MethodPost, "/", nil)
		request.Form = map[string][]string{"prompt": {string(make([]byte, length))}}
		handler(response, request)
		fmt.Printf("%d, Retry-After: %q\n", response.Code, response.Header().Get("Retry-After"))
	}
	ask(400)
	window.TryAcquire(quotashare.Interactive, 69_000) // many others ask
	ask(400)
	ask(400_000)
	// Output:
	// 200, Retry-After: ""
	// 429, Retry-After: "45"
	// 413, Retry-After: ""
}

// A graceful shutdown: when the context is cancelled, calls that wait leave, and take nothing with them. Calls in
// flight go on and are settled.
func ExampleWindow_Acquire_shutdown() {
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 1_000})
	ctx, stop := context.WithCancel(context.Background()) // in a service: signal.NotifyContext

	inFlight, _ := window.Acquire(ctx, quotashare.Batch, 100)
	var waiting sync.WaitGroup
	for range 3 {
		waiting.Go(func() {
			_, err := window.Acquire(ctx, quotashare.Batch, 150) // more than batch may hold beside the first
			fmt.Println("sent:", err == nil, "- because of the shutdown:", errors.Is(err, context.Canceled))
		})
	}

	stop()
	waiting.Wait()
	inFlight.Settle(80) // its answer has come meanwhile
	fmt.Println(window.Usage().Used[quotashare.Batch], "tokens used")
	// Output:
	// sent: false - because of the shutdown: true
	// sent: false - because of the shutdown: true
	// sent: false - because of the shutdown: true
	// 80 tokens used
}

// Log a refusal: to log/slog the error is a group.
func ExampleDeniedError_LogValue() {
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{} // so that the output is always the same
			}
			return a
		},
	}))
	clock := func() time.Time { return time.Date(2026, 1, 1, 2, 0, 0, 0, time.UTC) }
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 1_000}, quotashare.WithClock(clock))

	for _, tokens := range []int64{600, 300, 900} {
		if _, err := window.Acquire(context.Background(), quotashare.Interactive, tokens); err != nil {
			logger.Warn("not admitted", "err", err)
		}
	}
	// Output:
	// level=WARN msg="not admitted" err.class=interactive err.tokens=300 err.reason=reserved err.retry_after=1m0s
	// level=WARN msg="not admitted" err.class=interactive err.tokens=900 err.reason=too_large
}

// Try shares before they are trusted: a shadow Window admits everything, and tells what it would refuse.
func ExampleWithShadow() {
	wouldRefuse := func(d *quotashare.DeniedError) { // in a service: log it
		fmt.Println("would refuse:", d.Class, d.Decision.Reason)
	}
	window, _ := quotashare.NewWindow(quotashare.Quota{Tokens: 1_000}, quotashare.WithShadow(wouldRefuse))

	for range 5 {
		grant, err := window.Acquire(context.Background(), quotashare.Batch, 40) // never waits, and the error is nil
		if err != nil {
			panic(err)
		}
		grant.Settle(30)
	}
	batch := window.Stats().Classes[quotashare.Batch]
	fmt.Println(batch.Admitted, "within the rule, and", batch.Refused[quotashare.ReasonPaced], "borrow too fast")
	// Output:
	// would refuse: batch paced
	// would refuse: batch paced
	// 3 within the rule, and 2 borrow too fast
}

// Change how long a class waits: here somebody at a prompt waits two seconds rather than be refused, and batch, which
// comes back by itself, does not wait.
func ExampleWithMaxWait() {
	window, err := quotashare.NewWindow(quotashare.Quota{Tokens: 1_000},
		quotashare.WithMaxWait(quotashare.Interactive, 2*time.Second),
		quotashare.WithMaxWait(quotashare.Batch, 0))
	if err != nil {
		panic(err)
	}
	for range 2 {
		_, err := window.Acquire(context.Background(), quotashare.Batch, 100)
		var denied *quotashare.DeniedError
		if errors.As(err, &denied) {
			fmt.Println("come back later:", denied.Decision.Reason)
			continue
		}
		fmt.Println("admitted")
	}
	// Output:
	// admitted
	// come back later: paced
}

// Ask after a day whether the shares are right: here background was given too little.
func ExampleStats_Advice() {
	window, err := quotashare.NewWindow(quotashare.Quota{
		Tokens: 1_000, Shares: quotashare.Fractions{quotashare.Interactive: 0.9, quotashare.Background: 0.1},
	})
	if err != nil {
		panic(err)
	}
	for range 10 {
		window.TryAcquire(quotashare.Background, 20)
	}
	for _, advice := range window.Stats().Advice() {
		fmt.Println(advice)
	}
	// Output:
	// background was refused or had to wait 5 of 10 times while the window was 10 % full on average: its share is wrong, the quota is not too small; raise its share, or lower the floors of the others
}
