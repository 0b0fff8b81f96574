// Package sharetest tells before the night what a table of shares does in it: it replays traffic against a
// [quotashare.Quota] in virtual time, through a real [quotashare.Window], and reports what came of each class. An hour
// of traffic takes a second or less, so the check belongs in CI, beside the table.
//
//   - A [Trace] is the traffic: [Generate] builds one of parts that add up ([Flow], [Suite]), [ReadAzure] and [ReadLog]
//     read recorded ones, [Merge] lays several over each other. It is a list of arrivals, and can be written by hand.
//   - [Replay] lets callers ask for it, as patient, as many at once and as wrong in their estimates as [Options] says, and
//     sends what is admitted to a provider that enforces the quota by itself.
//   - A [Report] holds what came of it, as numbers, as a table ([Report.String]), and as a page that a person
//     reads ([Report.WriteHTML]). [Check] holds it against wishes, such as Wait(quotashare.Interactive, 0.99).AtMost(time.Second).
//   - [Search] finds a table that fulfils the wishes, or says which of them cannot be had and how near one comes.
//
// What decides in a replay is the Window itself; nothing here knows its rule. Everything is deterministic: the same
// trace, quota and options give the same report, byte for byte, on every machine, for it is all computed in whole
// numbers and in floating point operations that are exactly rounded everywhere.
//
// Instants are durations since the start of the trace. Tokens are whole tokens of the quota. The package starts no
// goroutine and reads no clock. Its functions are safe for concurrent use as long as nobody changes what they were
// given.
package sharetest
