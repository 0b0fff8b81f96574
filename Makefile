# Everything here needs only Go and make.

NESTED   := internal/bench internal/sdktest internal/service promshare redisshare
FUZZTIME ?= 30s
CONV     ?=
CODE     ?=
PAGE     ?= demo.html
ADDR     ?= 127.0.0.1:8080

.PHONY: help demo serve test cover mutants lint fuzz bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## the night of the eval suite, in virtual time, and PAGE=file; CONV=file CODE=file replays traces instead
	@go run ./internal/demo -page $(PAGE) $(if $(CONV),-conv $(CONV)) $(if $(CODE),-code $(CODE))

serve: ## an example service on ADDR, with a fake model, load, and metrics to scrape
	@cd internal/service && go run . -addr $(ADDR)

# The SDKs are large: without optimisation they compile in half the time.
QUICK    := GOFLAGS="'-gcflags=github.com/...=-N -l'"

test: ## run all tests
	go test -shuffle=on ./...
	@for module in $(NESTED); do (cd $$module && $(QUICK) go test -parallel 8 ./...) || exit 1; done

cover: ## what the tests of the decision reach: fails below 95 % of its statements
	@mkdir -p bin
	go test -short -coverpkg .,./internal/sliding -coverprofile bin/cover.out . ./internal/sliding
	@go tool cover -func bin/cover.out | awk '$$3 != "100.0%"; END { exit $$3 + 0 < 95 }'

mutants: ## change the code of the decision in a thousand places, and want a test to fail each time; takes long
	go run ./internal/mutate -full

lint: ## gofmt, vet and staticcheck, on every module
	@test -z "$$(gofmt -l .)" || { gofmt -d .; exit 1; }
	@go build -modfile=internal/tools/go.mod -o bin/ honnef.co/go/tools/cmd/staticcheck
	go vet ./... && bin/staticcheck ./...
	@for module in $(NESTED); do \
		(cd $$module && $(QUICK) go vet ./... && $(QUICK) $(CURDIR)/bin/staticcheck ./...) || exit 1; \
	done

FUZZ     := .:FuzzParseQuota .:FuzzAdmit ./sharetest:FuzzReadAzure ./sharetest:FuzzReadLog \
	./llmhttp:FuzzUsageIsTheSameInPieces ./llmhttp:FuzzHeaders ./llmhttp:FuzzRequestBody

fuzz: ## each fuzz target for FUZZTIME
	@for target in $(FUZZ); do \
		go test -run '^$$' -fuzz "^$${target#*:}\$$" -fuzztime $(FUZZTIME) $${target%:*} || exit 1; \
	done

bench: ## benchmarks, beside golang.org/x/time/rate
	cd internal/bench && go test -bench . -count 6 .
