# Everything here needs only Go and make.

# Every module but the root and internal/tools, of which nothing is built.
NESTED   := $(filter-out internal/tools,$(patsubst %/go.mod,%,$(sort $(wildcard */go.mod internal/*/go.mod))))
FUZZTIME ?= 30s
CONV     ?=
CODE     ?=
PAGE     ?= demo.html
ADDR     ?= 127.0.0.1:8080
COUNT    ?= 10

.PHONY: help demo serve test cover mutants lint guard api fuzz bench

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
	@for module in $(NESTED); do (cd $$module && $(QUICK) go test -shuffle=on -parallel 8 ./...) || exit 1; done

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
	@for module in $(NESTED) internal/tools; do \
		(cd $$module && $(QUICK) go vet ./... && $(QUICK) $(CURDIR)/bin/staticcheck ./...) || exit 1; \
	done

guard: ## imports, goroutines, licences, known vulnerabilities, and the API against what is recorded
	cd internal/tools && $(QUICK) go test -count 1 -v .

api: ## record the API as it is
	cd internal/tools && $(QUICK) go test -count 1 -v -run 'TestAPI$$' . -update

fuzz: ## each fuzz target for FUZZTIME
	@for target in $$(grep -ro '^func Fuzz[[:alnum:]]*' --include='*_test.go' . | sed 's/func //'); do \
		echo "$${target#*:}"; (cd $${target%/*} && go test -run '^$$' -fuzz "^$${target#*:}\$$" -fuzztime $(FUZZTIME) .) || exit 1; \
	done

MEASURE  := bin/bench.test -test.run '^$$' -test.bench

bench: ## COUNT rounds of the benchmarks beside the peers, into the tables of BENCHMARKS.md
	cd internal/bench && go test -c -o $(CURDIR)/bin/bench.test .
	@rm -f bin/bench.txt
	@for round in $$(seq $(COUNT)); do \
		echo "round $$round of $(COUNT)" && \
		$(MEASURE) 'Floor|Admitted|Settled|Refused|Queued|Watched' -test.cpu 1,2 -test.benchtime 50ms >>bin/bench.txt && \
		$(MEASURE) 'Rates|Growth' -test.cpu 1 -test.benchtime 50ms >>bin/bench.txt || exit 1; \
	done
	@$(MEASURE) Redis -test.benchtime 4000x >>bin/bench.txt
	cd internal/bench && go run ./table -page $(CURDIR)/BENCHMARKS.md $(CURDIR)/bin/bench.txt
