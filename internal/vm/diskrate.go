package vm

import (
	"cmp"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// DiskRate limits what a guest reads from and writes to each of its disks, both together: image, writable disk, volumes, also those that it gets while it
// runs. Each disk has a budget of its own, of which one that was idle may use up to two seconds' worth at once. The zero value is no limit.
type DiskRate struct {
	Bytes int64 `json:"bytes,omitempty"` // per second; 0: no limit
	Ops   int64 `json:"ops,omitempty"`   // requests per second; 0: no limit
}

// Limits of a DiskRate. Less than these is less than a single request of a guest, or a guest that does not boot in minutes.
const (
	MinDiskBytes = 1 << 20
	MaxDiskBytes = 1 << 40
	MinDiskOps   = 10
	MaxDiskOps   = 1e9
)

// Validate returns an InvalidArgument error unless disks can have that limit.
func (r DiskRate) Validate() error {
	switch {
	case r.Bytes != 0 && (r.Bytes < MinDiskBytes || r.Bytes > MaxDiskBytes):
		return errdefs.Invalidf("invalid limit of %d bytes per second of a disk; use %d (1 MiB) to %d, or none", r.Bytes, MinDiskBytes, int64(MaxDiskBytes))
	case r.Ops != 0 && (r.Ops < MinDiskOps || r.Ops > MaxDiskOps):
		return errdefs.Invalidf("invalid limit of %d requests per second of a disk; use %d to %d, or none", r.Ops, MinDiskOps, int64(MaxDiskOps))
	}
	return nil
}

// Over returns r with the limits of below where r has none.
func (r DiskRate) Over(below DiskRate) DiskRate {
	return DiskRate{Bytes: cmp.Or(r.Bytes, below.Bytes), Ops: cmp.Or(r.Ops, below.Ops)}
}
