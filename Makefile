# Everything here needs only Go and make.

NESTED   := internal/bench
FUZZTIME ?= 30s
CONV     ?=
CODE     ?=
PAGE     ?= demo.html

.PHONY: help demo test lint fuzz bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## the night of the eval suite, in virtual time, and PAGE=file; CONV=file CODE=file replays traces instead
	@go run ./internal/demo -page $(PAGE) $(if $(CONV),-conv $(CONV)) $(if $(CODE),-code $(CODE))

test: ## run all tests
	go test -shuffle=on ./...
	@for module in $(NESTED); do (cd $$module && go test ./...) || exit 1; done

lint: ## gofmt, vet and staticcheck, on every module
	@test -z "$$(gofmt -l .)" || { gofmt -d .; exit 1; }
	@root=$$PWD; for module in . $(NESTED); do \
		(cd $$module && go vet ./... && go tool -modfile=$$root/internal/tools/go.mod staticcheck ./...) || exit 1; \
	done

fuzz: ## each fuzz target for FUZZTIME
	go test -run '^$$' -fuzz '^FuzzParseQuota$$' -fuzztime $(FUZZTIME) .
	go test -run '^$$' -fuzz '^FuzzAdmit$$' -fuzztime $(FUZZTIME) .

bench: ## benchmarks, beside golang.org/x/time/rate
	cd internal/bench && go test -bench . -count 6 .
