package capsulectl

import (
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/capsulewire"
)

// clock is that of a machine, as far as tokens need it: a machine without a battery may believe that it is 1970.
type clock struct {
	ahead atomic.Int64 // nanoseconds
	known atomic.Bool  // a call was not refused, or it said what time it is there
}

func (c *clock) now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

// learn looks at the end of a call, and reports whether it is worth another attempt: its token was refused, and the clocks differ.
func (c *clock) learn(err error, trailer metadata.MD) (again bool) {
	if status.Code(err) != codes.Unauthenticated {
		c.known.Store(c.known.Load() || err == nil)
		return false
	}
	told := trailer.Get(capsulewire.TimeHeader)
	if len(told) != 1 {
		return false
	}
	unix, err := strconv.ParseInt(told[0], 10, 64)
	if err != nil || unix < 0 || unix > 1<<38 {
		return false
	}
	off := time.Unix(unix, 0).Sub(c.now())
	if off.Abs() < capsulewire.Life {
		return false
	}
	c.ahead.Add(int64(off))
	c.known.Store(true)
	return true
}
