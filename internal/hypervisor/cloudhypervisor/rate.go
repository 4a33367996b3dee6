package cloudhypervisor

import "cocoonstack.io/cocoon/internal/vm"

// rateLimiter limits what a disk transfers, by all of its queues together.
type rateLimiter struct {
	Bandwidth *tokenBucket `json:"bandwidth,omitempty"`
	Ops       *tokenBucket `json:"ops,omitempty"`
}

// tokenBucket is a limit, and how many milliseconds it takes until an empty bucket is full.
type tokenBucket struct {
	Size   int64 `json:"size"`
	Refill int64 `json:"refill_time"`
}

// limiter returns the limits of a disk, nil for none. They are not in saved state: a guest that resumes has those of its plan.
func limiter(r vm.DiskRate) *rateLimiter {
	if r == (vm.DiskRate{}) {
		return nil
	}
	bucket := func(n int64) *tokenBucket {
		if n == 0 {
			return nil
		}
		return &tokenBucket{Size: n, Refill: 1000}
	}
	return &rateLimiter{bucket(r.Bytes), bucket(r.Ops)}
}
