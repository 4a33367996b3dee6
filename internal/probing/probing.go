// Package probing checks guests and containers over the network, turns a series of results into a verdict, and runs checks when they are
// due. One timer serves any number of targets.
//
// It knows no API that describes probes. The caller decides what follows from a verdict.
package probing

// Result is the outcome of one probe.
type Result int

// The results of probes.
const (
	Unknown Result = iota // the probe could not be run, so the state of its target is unknown
	Success
	Warning // success, with a message
	Failure
)

// Judge turns a series of results into a verdict. The verdict changes only after as many equal results in a row as its
// threshold requires.
type Judge struct {
	Successes int // required in a row; 1 if below 1
	Failures  int

	last Result
	row  int
}

// Take adds a result and returns the verdict: Success, Failure, or Unknown while too few equal results follow each other.
func (j *Judge) Take(r Result) Result {
	switch r {
	case Unknown:
		return Unknown
	case Warning:
		r = Success
	case Success, Failure:
	}
	if j.last != r {
		j.last, j.row = r, 0
	}
	j.row++
	if r == Success && j.row < j.Successes || r == Failure && j.row < j.Failures {
		return Unknown
	}
	return r
}
