package bundle

import "strings"

// Compare returns -1, 0 or 1 as version a is older than b, the same, or newer. Runs of digits are numbers, other runs are text; a version that
// goes on where the other one ends is newer, unless it goes on with a tilde: 1.2~rc1 < 1.2 < 1.2-5-gabc < 1.10. A leading v says nothing.
func Compare(a, b string) int {
	a, b = strings.TrimPrefix(a, "v"), strings.TrimPrefix(b, "v")
	for a != "" || b != "" {
		var x, y string
		x, a = run(a)
		y, b = run(b)
		if c := compareRun(x, y); c != 0 {
			return c
		}
	}
	return 0
}

// run splits off the longest start that is all digits, or has none. A tilde is a run of its own.
func run(s string) (string, string) {
	if strings.HasPrefix(s, "~") {
		return "~", s[1:]
	}
	i := 0
	for i < len(s) && s[i] != '~' && digit(s[i]) == digit(s[0]) {
		i++
	}
	return s[:i], s[i:]
}

func compareRun(x, y string) int {
	switch {
	case x == y:
		return 0
	case x == "~":
		return -1
	case y == "~":
		return 1
	case x == "":
		return -1
	case y == "":
		return 1
	case digit(x[0]) && digit(y[0]):
		x, y = strings.TrimLeft(x, "0"), strings.TrimLeft(y, "0")
		if len(x) != len(y) {
			if len(x) < len(y) {
				return -1
			}
			return 1
		}
	}
	return strings.Compare(x, y)
}

func digit(c byte) bool { return c >= '0' && c <= '9' }
