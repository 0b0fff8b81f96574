# Everything here needs only Go and make.

# Every module but the root and internal/tools, of which nothing is built.
NESTED   := $(filter-out internal/tools,$(patsubst %/go.mod,%,$(sort $(wildcard */go.mod internal/*/go.mod))))
FUZZTIME ?= 30s
CONV     ?=
CODE     ?=
PAGE     ?= demo.html
ADDR     ?= 127.0.0.1:8080

.PHONY: help demo serve test lint guard api fuzz bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## the night of the eval suite, in virtual time, and PAGE=file; CONV=file CODE=file replays traces instead
	@go run ./internal/demo -page $(PAGE) $(if $(CONV),-conv $(CONV)) $(if $(CODE),-code $(CODE))

serve: ## an example service on ADDR, with a fake model, load, and metrics to scrape
	@cd internal/service && go run . -addr $(ADDR)

# The SDKs are large: without optimisation they compile in half the time.
QUICK    := GOFLAGS="'-gcflags=github.com/...=-N -l'"

test: ## run all tests
	go test -shuffle=on ./...
	@for module in $(NESTED); do (cd $$module && $(QUICK) go test -shuffle=on -parallel 8 ./...) || exit 1; done

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

bench: ## benchmarks, beside golang.org/x/time/rate
	cd internal/bench && go test -bench . -count 6 .
