package textui

import (
	"math"
	"strconv"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Seconds is the value of a flag for a duration, in seconds if it has no unit.
type Seconds time.Duration

func (s *Seconds) Type() string { return "duration" }

// String returns it with its units.
func (s *Seconds) String() string { return time.Duration(*s).String() }

// Set reads it. Errors: InvalidArgument.
func (s *Seconds) Set(v string) error {
	if _, err := strconv.Atoi(v); err == nil {
		v += "s"
	}
	d, err := time.ParseDuration(v)
	if err != nil {
		return errdefs.Invalidf("it is a number of seconds or a duration such as 1m30s")
	}
	*s = Seconds(d)
	return nil
}

var sizeUnits = []string{"", "K", "M", "G", "T", "P"} // powers of 1024

// ParseSize parses a number of bytes: 512M, 1.5G, 10GiB, 4096. The units K, M, G, T and P are powers of 1024, in
// either case, with or without "i" and "B".
func ParseSize(s string) (int64, error) {
	number := strings.TrimRight(s, "kKmMgGtTpPiIbB")
	unit := strings.ToUpper(s[len(number):])
	for exp, u := range sizeUnits {
		if unit != u && unit != u+"B" && (u == "" || unit != u+"I" && unit != u+"IB") {
			continue
		}
		if strings.ContainsFunc(number, func(r rune) bool { return r != '.' && (r < '0' || r > '9') }) {
			break
		}
		if n, err := strconv.ParseInt(number, 10, 64); err == nil {
			if n > math.MaxInt64>>(10*exp) {
				return 0, errdefs.Invalidf("size %q is too large", s)
			}
			return n << (10 * exp), nil
		}
		f, err := strconv.ParseFloat(number, 64)
		if err != nil {
			break
		}
		if f *= math.Ldexp(1, 10*exp); f >= math.MaxInt64 {
			return 0, errdefs.Invalidf("size %q is too large", s)
		}
		return int64(f), nil
	}
	return 0, errdefs.Invalidf("%q is not a size; write for example 512M, 1.5G or 10G", s)
}

// FormatSize prints bytes the way ParseSize reads them, with at most one digit after the point.
func FormatSize(n int64) string {
	if n < 0 {
		return strconv.FormatInt(n, 10)
	}
	exp := 0
	f := float64(n)
	for f >= 1023.95 && exp < len(sizeUnits)-1 {
		f /= 1024
		exp++
	}
	return strings.TrimSuffix(strconv.FormatFloat(f, 'f', 1, 64), ".0") + sizeUnits[exp]
}

// Size is a size on the command line; zero is refused, because the engine treats it as "not given".
type Size int64

// String returns it as FormatSize does.
func (s *Size) String() string { return FormatSize(int64(*s)) }
func (s *Size) Type() string   { return "size" }

// Set reads it. Errors: InvalidArgument.
func (s *Size) Set(v string) error {
	n, err := ParseSize(v)
	if err != nil {
		return err
	}
	if n == 0 {
		return errdefs.Invalidf("it must be more than 0")
	}
	*s = Size(n)
	return nil
}
