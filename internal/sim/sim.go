// Package sim runs model calls against the quota of an account in virtual time: an hour of traffic takes
// milliseconds, and the same Scenario always takes the same course.
//
// A Scenario says who calls (Poisson, Suite, Replay), what the account allows, and whether a quotashare.Window decides
// or nothing does. Run plays it, and History.Report says what came of it for each class. Every call ends up at a
// Provider, which enforces the quota by itself, as a real one would: where a Window decides, it must never have to.
//
// Instants are durations since the start of the run. Tokens are whole tokens of the quota. The package starts no
// goroutines and reads no clock, and nothing in it is safe for concurrent use.
package sim
