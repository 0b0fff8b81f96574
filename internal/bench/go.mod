module github.com/quotashare/quotashare/internal/bench

go 1.26.0

require (
	github.com/quotashare/quotashare v0.0.0
	golang.org/x/time v0.16.0
)

replace github.com/quotashare/quotashare => ../..
