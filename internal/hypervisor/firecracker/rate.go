package firecracker

import "cocoonstack.io/cocoon/internal/vm"

// driveLimit changes the limits of a drive.
type driveLimit struct {
	ID    string       `json:"drive_id"`
	Limit *rateLimiter `json:"rate_limiter"`
}

// rateLimiter limits what a drive transfers. A bucket that is missing leaves that limit as it is.
type rateLimiter struct {
	Bandwidth *tokenBucket `json:"bandwidth,omitempty"`
	Ops       *tokenBucket `json:"ops,omitempty"`
}

// tokenBucket is a limit, and how many milliseconds it takes until an empty bucket is full; both 0: no limit.
type tokenBucket struct {
	Size   int64 `json:"size"`
	Refill int64 `json:"refill_time"`
}

// limiter returns the limits of a new drive, nil for none.
func limiter(r vm.DiskRate) *rateLimiter {
	if r == (vm.DiskRate{}) {
		return nil
	}
	l := limits(r)
	if r.Bytes == 0 {
		l.Bandwidth = nil
	}
	if r.Ops == 0 {
		l.Ops = nil
	}
	return l
}

// limits returns the limits of a drive that may have others.
func limits(r vm.DiskRate) *rateLimiter {
	bucket := func(n int64) *tokenBucket {
		if n == 0 {
			return &tokenBucket{}
		}
		return &tokenBucket{Size: n, Refill: 1000}
	}
	return &rateLimiter{bucket(r.Bytes), bucket(r.Ops)}
}

// limited sets the limits of the n-th disk of a guest that has been loaded.
func limited(n int, r vm.DiskRate) request {
	return request{"PATCH", "/drives/" + diskID(n), driveLimit{diskID(n), limits(r)}}
}
