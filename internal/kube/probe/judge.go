package probe

// Result is what one probe found.
type Result int

// The results of probes.
const (
	Unknown Result = iota // the probe itself could not be made: it says nothing of what was probed
	Success
	Warning // success, with something to say about it
	Failure
)

// Judge turns a row of results into a verdict, which changes only after as many equal ones in a row as its threshold says.
type Judge struct {
	Successes int // in a row that it takes; below 1 is 1
	Failures  int

	last Result
	row  int
}

// Take adds a result and returns the verdict on it: Success, Failure or, as long as the row is too short, Unknown.
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
