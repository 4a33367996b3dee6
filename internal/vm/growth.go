package vm

import (
	"math/bits"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Growth is how far a guest can grow while it runs. The zero value: not at all.
type Growth struct {
	Sockets int   `json:"sockets,omitempty"` // most sockets, each like those of the topology; 0: the number of CPUs stays
	Memory  int64 `json:"memory,omitempty"`  // most bytes; 0: the memory stays
	// Plugged is how many of the bytes of Spec.Memory the guest got after it had booted. Saved state refers to it. The VM sets it.
	Plugged int64 `json:"plugged,omitempty"`
}

// Size is what a guest has of what can grow while it runs.
type Size struct {
	CPUs   int   `json:"cpus"`
	Memory int64 `json:"memory"` // bytes
}

// MemoryStep is the unit in bytes in which the memory of a running guest grows.
const MemoryStep = 2 << 20

// maxCPUID is the highest number that a CPU can have. With a topology the numbers have gaps, because sockets and cores begin at powers of two.
const maxCPUID = 254

// Room returns the most sockets that a guest with sockets like those of t can have.
func (t Topology) Room() int {
	round := func(n int) int { return 1 << bits.Len(uint(max(n, 1)-1)) }
	each := max(t.Cores, 1) * max(t.Threads, 1)
	return min((maxCPUID+1)/(round(t.Cores)*round(t.Threads)), MaxCPUs/each)
}

// Size returns the present size of the guest of s.
func (s Spec) Size() Size { return Size{s.CPUs, s.Memory} }

// growth returns how far the guest of s can grow.
func (s Spec) growth() Growth {
	if s.Hardware == nil {
		return Growth{}
	}
	return s.Hardware.Growth
}

// CanGrow reports whether the guest of s can get CPUs or memory while it runs.
func (s Spec) CanGrow() bool { return s.growth() != Growth{} }

// MaxCPUs returns the most CPUs that the guest of s can have while it runs.
func (s Spec) MaxCPUs() int {
	if g := s.growth(); g.Sockets > 0 {
		return g.Sockets * s.Hardware.Topology.Cores * s.Hardware.Topology.Threads
	}
	return s.CPUs
}

// MaxMemory returns the most bytes of memory that the guest of s can have while it runs.
func (s Spec) MaxMemory() int64 { return max(s.growth().Memory, s.Memory) }

// Grown returns s with another size, which the guest can have while it runs. Both sizes may be the same.
// Errors: FailedPrecondition, which says what has to be done instead.
func (s Spec) Grown(to Size) (Spec, error) {
	const advice = "the change is effective when the VM is stopped and created again"
	g := s.growth()
	switch {
	case to.CPUs < s.CPUs || to.Memory < s.Memory:
		return s, errdefs.Preconditionf("it has %d CPUs and %d bytes of memory, and neither shrinks while it runs: %s", s.CPUs, s.Memory, advice)
	case to.CPUs > s.CPUs && g.Sockets == 0:
		return s, errdefs.Preconditionf("it was created without a maximum of sockets, so it cannot get CPUs while it runs: %s", advice)
	case to.CPUs > s.MaxCPUs():
		return s, errdefs.Preconditionf("it can have %d CPUs while it runs, and not %d: %s", s.MaxCPUs(), to.CPUs, advice)
	case to.Memory > s.Memory && g.Memory == 0:
		return s, errdefs.Preconditionf("it was created without a maximum of memory, so it cannot get memory while it runs: %s", advice)
	case to.Memory > s.MaxMemory():
		return s, errdefs.Preconditionf("it can have %d bytes of memory while it runs, and not %d: %s", g.Memory, to.Memory, advice)
	}
	if each := s.MaxCPUs() / max(g.Sockets, 1); to.CPUs > s.CPUs && to.CPUs%each != 0 {
		return s, errdefs.Preconditionf("each of its sockets has %d CPUs, so it cannot have %d; ask for a multiple", each, to.CPUs)
	}
	if (to.Memory-s.Memory)%MemoryStep != 0 {
		return s, errdefs.Preconditionf("its memory grows by multiples of %d bytes, and not by %d", int64(MemoryStep), to.Memory-s.Memory)
	}
	return s.sized(to), nil
}

// sized returns s with another size.
func (s Spec) sized(to Size) Spec {
	if s.Size() == to {
		return s
	}
	h := *s.Hardware
	if g := h.Growth; g.Sockets > 0 {
		h.Topology.Sockets = to.CPUs / (h.Topology.Cores * h.Topology.Threads)
	}
	h.Growth.Plugged += to.Memory - s.Memory
	s.CPUs, s.Memory, s.Hardware = to.CPUs, to.Memory, &h
	return s
}

// SizedAs returns s with the size of o, of which it resumes saved state.
func (s Spec) SizedAs(o Spec) Spec {
	s.CPUs, s.Memory, s.BootNICs = o.CPUs, o.Memory, o.BootNICs
	if s.Hardware != nil && o.Hardware != nil {
		h := *s.Hardware
		h.Topology, h.Growth, s.Hardware = o.Hardware.Topology, o.Hardware.Growth, &h
	}
	return s
}

// Created returns s as that of a new VM.
func (s Spec) Created() Spec { return s.unplaced().Booted() }

// Booted returns s as that of a VM that boots with all its memory and interfaces.
func (s Spec) Booted() Spec {
	s.BootNICs = 0
	if s.growth().Plugged == 0 {
		return s
	}
	h := *s.Hardware
	h.Growth.Plugged, s.Hardware = 0, &h
	return s
}

// Validate returns an InvalidArgument error unless a guest of that size and topology can grow by g.
func (g Growth) Validate(now Size, t Topology) error {
	switch {
	case g.Sockets == 0:
	case t == Topology{}:
		return errdefs.Invalidf("it has a maximum of sockets, but no topology; say how many sockets, cores and threads its CPUs are")
	case g.Sockets < t.Sockets || g.Sockets > t.Room():
		return errdefs.Invalidf("invalid maximum of %d sockets; use %d to %d", g.Sockets, t.Sockets, t.Room())
	}
	boot := now.Memory - g.Plugged
	switch {
	case g.Plugged < 0 || boot < 0 || g.Plugged%MemoryStep != 0 || g.Plugged > 0 && g.Memory == 0:
		return errdefs.Invalidf("invalid plugged memory of %d bytes", g.Plugged)
	case g.Memory == 0:
	case g.Memory < now.Memory || g.Memory > MaxMemory || (g.Memory-boot)%MemoryStep != 0:
		return errdefs.Invalidf("invalid maximum of %d bytes of memory; use its memory of %d bytes and multiples of %d more, at most %d", g.Memory, boot, int64(MemoryStep), int64(MaxMemory))
	}
	return nil
}

func (s Spec) validateGrowth() error {
	h := s.Hardware
	if h.HugePages > 0 && h.Growth.Memory > 0 {
		return errdefs.Invalidf("its memory is huge pages, so it cannot grow while it runs; leave out its maximum")
	}
	return h.Growth.Validate(s.Size(), h.Topology)
}
