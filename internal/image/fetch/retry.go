package fetch

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// pauses is a back-off that doubles, plus or minus a quarter so that many nodes do not retry at once.
func (o Options) pauses() *backoff.ExponentialBackOff {
	return &backoff.ExponentialBackOff{InitialInterval: o.Backoff, RandomizationFactor: 0.25, Multiplier: 2, MaxInterval: o.MaxWait}
}

// wait returns the wait before the next attempt: what the server asked for, or the next of the pauses. It never exceeds the
// client's limit. After progress there is no wait.
func (b *Body) wait(asked time.Duration) time.Duration {
	if asked == 0 && b.tries > 0 {
		asked = b.pauses.NextBackOff()
	}
	return min(asked, b.s.c.opts.MaxWait)
}

// retryAfter reads the Retry-After header: seconds or a date. An invalid value counts as no wait.
func retryAfter(value string, now time.Time) time.Duration {
	const longest = 24 * time.Hour // far above any limit, and far from overflow
	if seconds, err := strconv.ParseUint(value, 10, 63); err == nil {
		return min(time.Duration(min(seconds, uint64(longest/time.Second)))*time.Second, longest)
	}
	if at, err := http.ParseTime(value); err == nil {
		return min(max(at.Sub(now), 0), longest)
	}
	return 0
}

// contentRange is the part of a file in a response, both ends included. total is -1 if the server does not know it.
type contentRange struct{ first, last, total int64 }

// parseContentRange reads "bytes 0-99/100".
func parseContentRange(value string) (contentRange, bool) {
	unit, rest, ok := strings.Cut(value, " ")
	if !ok || !strings.EqualFold(unit, "bytes") {
		return contentRange{}, false
	}
	span, total, ok := strings.Cut(rest, "/")
	if !ok {
		return contentRange{}, false
	}
	from, to, ok := strings.Cut(span, "-")
	if !ok {
		return contentRange{}, false
	}
	r := contentRange{total: -1}
	var errs [3]error
	r.first, errs[0] = number(from)
	r.last, errs[1] = number(to)
	if total != "*" {
		r.total, errs[2] = number(total)
	}
	for _, err := range errs {
		if err != nil {
			return contentRange{}, false
		}
	}
	return r, r.first <= r.last && (r.total < 0 || r.last < r.total)
}

// number reads only digits: no sign, which ParseInt would accept.
func number(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	return int64(n), err
}
