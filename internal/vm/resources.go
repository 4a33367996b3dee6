package vm

import (
	"maps"
	"math"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Resources is what a container may use. 0 stands for the kernel's own value.
type Resources struct {
	CPULimit    int64 `json:"cpu_limit,omitempty"`    // thousandths of a CPU
	CPUWeight   int64 `json:"cpu_weight,omitempty"`   // its share of busy CPUs: cpu.weight of its control group
	MemoryLimit int64 `json:"memory_limit,omitempty"` // bytes
	// CPUShares, if they are not 0, are those that CPUWeight was made of. Several have the same weight, so they are kept for who asks again.
	CPUShares int64 `json:"cpu_shares,omitempty"`
	// OOMScoreAdj tells the kernel of the guest which processes to kill first when memory runs out. Processes have the value that
	// was set when their container started.
	OOMScoreAdj int `json:"oom_score_adj,omitempty"`
}

// Limits of the kernel.
const (
	maxCPULimit    = 1 << 20
	maxCPUWeight   = 10000
	maxOOMScoreAdj = 1000
)

// CPU shares, which container runtimes are given instead of a weight.
const (
	leastCPUShares = 2
	MaxCPUShares   = 262144
)

// CPUWeightOf returns the CPUWeight for CPU shares as runc calculates it: the curve through their least, their usual and their largest
// value.
func CPUWeightOf(shares int64) int64 {
	switch shares = min(max(shares, leastCPUShares), MaxCPUShares); shares {
	case leastCPUShares:
		return 1
	case MaxCPUShares:
		return maxCPUWeight
	}
	l := math.Log2(float64(shares))
	return int64(math.Ceil(math.Pow(10, (l*l+125*l)/612-7.0/34)))
}

// Validate returns an InvalidArgument error if no guest can have r. nil is valid.
func (r *Resources) Validate() error {
	switch {
	case r == nil:
	case r.CPULimit < 0 || r.CPULimit > maxCPULimit:
		return errdefs.Invalidf("invalid CPU limit of %d thousandths", r.CPULimit)
	case r.CPUWeight < 0 || r.CPUWeight > maxCPUWeight:
		return errdefs.Invalidf("invalid CPU weight %d; use 1 to %d", r.CPUWeight, maxCPUWeight)
	case r.CPUShares != 0 && r.CPUWeight != CPUWeightOf(r.CPUShares):
		return errdefs.Invalidf("%d CPU shares are a CPU weight of %d, not of %d", r.CPUShares, CPUWeightOf(r.CPUShares), r.CPUWeight)
	case r.MemoryLimit < 0 || r.MemoryLimit > MaxMemory:
		return errdefs.Invalidf("invalid memory limit of %d bytes", r.MemoryLimit)
	case r.OOMScoreAdj < -maxOOMScoreAdj || r.OOMScoreAdj > maxOOMScoreAdj:
		return errdefs.Invalidf("invalid OOM score adjustment %d; use %d to %d", r.OOMScoreAdj, -maxOOMScoreAdj, maxOOMScoreAdj)
	}
	return nil
}

// Clone returns a copy of r.
func (r *Resources) Clone() *Resources {
	if r == nil {
		return nil
	}
	return new(*r)
}

// ResourcesOf returns the resources of the containers that have some, by name.
func ResourcesOf(all []Container) map[string]Resources {
	out := map[string]Resources{}
	for _, c := range all {
		if c.Resources != nil {
			out[c.Name] = *c.Resources
		}
	}
	return out
}

// Resized returns s with other resources of its containers. A container that is the whole VM is found by any name, because the pod
// of a clone has names of its own.
// Errors: InvalidArgument, NotFound (container).
func (s Spec) Resized(want map[string]Resources) (Spec, error) {
	s.Containers = slices.Clone(s.Containers)
	for _, name := range slices.Sorted(maps.Keys(want)) {
		r := want[name]
		if err := r.Validate(); err != nil {
			return s, err
		}
		at := slices.IndexFunc(s.Containers, func(c Container) bool { return c.Name == name || c.Root })
		if at < 0 {
			return s, errdefs.NotFoundf("it has no container %q", name)
		}
		s.Containers[at].Resources = &r
	}
	return s, nil
}

// Resources returns the resources of the containers that have some, by name, also of those that were added and have not ended.
func (r Record) Resources() map[string]Resources {
	out := ResourcesOf(r.Spec.Containers)
	for _, e := range r.Ephemeral {
		if e.Spec.Resources != nil && e.Record.Status.State != ContainerTerminated {
			out[e.Spec.Name] = *e.Spec.Resources
		}
	}
	return out
}

// Resized returns r with other resources of its containers, also of those that were added. See Spec.Resized.
// Errors: InvalidArgument, NotFound (container), FailedPrecondition if one that was added has ended.
func (r Record) Resized(want map[string]Resources) (Record, error) {
	r.Ephemeral = slices.Clone(r.Ephemeral)
	rest := map[string]Resources{}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		w := want[name]
		at := slices.IndexFunc(r.Ephemeral, func(e Ephemeral) bool { return e.Spec.Name == name })
		if at < 0 {
			rest[name] = w
			continue
		}
		if err := w.Validate(); err != nil {
			return r, err
		}
		if r.Ephemeral[at].Record.Status.State == ContainerTerminated {
			return r, errdefs.Preconditionf("container %s has ended", name)
		}
		r.Ephemeral[at].Spec.Resources = &w
	}
	var err error
	r.Spec, err = r.Spec.Resized(rest)
	return r, err
}
