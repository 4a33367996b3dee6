package probe

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
	Successes int // required in a row; below 1 is 1
	Failures  int

	last Result
	row  int
}

// Take adds a result and returns the verdict: Success, Failure or, while the row is too short, Unknown.
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
