package hypervisortest

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

const moreMemory = 128 << 20

// growing returns a plan of a guest with two CPUs in two sockets, which can have four, and three times moreMemory above its memory.
func (s *suite) growing(t *testing.T) hypervisor.Plan {
	p := s.plan(t)
	p.Memory = 192 << 20 // the kernel needs some of it for what may come
	p.CPUs, p.Topology = 2, vm.Topology{Sockets: 2, Cores: 1, Threads: 1}
	p.Growth = vm.Growth{Sockets: 4, Memory: p.Memory + 3*moreMemory}
	return p
}

// resizer launches a VM and waits until its guest reacts. It skips drivers that cannot change its size.
func (s *suite) resizer(t *testing.T, p hypervisor.Plan) (hypervisor.Instance, hypervisor.Resizer) {
	t.Helper()
	i := asking[hypervisor.Resizer](t, s, p)
	r, ok := hypervisor.As[hypervisor.Resizer](i)
	if !ok {
		t.Skip("no Resizer")
	}
	s.Booted(t, i)
	return i, r
}

// has checks what the guest has been given, and waits until it uses it.
func (s *suite) has(t *testing.T, i hypervisor.Instance, want vm.Size) {
	t.Helper()
	r, _ := hypervisor.As[hypervisor.Resizer](i)
	if got, err := r.Size(s.ctx(t)); err != nil || got != want {
		t.Fatalf("Size: %+v, %v; want %+v", got, err, want)
	}
	if s.Has != nil {
		s.Has(t, i, want)
	}
}

func testGrow(t *testing.T, s *suite) {
	p := s.growing(t)
	i, r := s.resizer(t, p)
	size := vm.Size{CPUs: p.CPUs, Memory: p.Memory}
	s.has(t, i, size)
	for _, to := range []vm.Size{{CPUs: 3, Memory: size.Memory}, {CPUs: 3, Memory: size.Memory + moreMemory}} {
		for range 2 { // again is no error
			if err := r.Grow(s.ctx(t), to); err != nil {
				t.Fatalf("Grow: %v", err)
			}
		}
		s.has(t, i, to)
		size = to
	}
	if err := r.Grow(s.ctx(t), vm.Size{CPUs: 1, Memory: p.Memory}); err != nil { // nothing is taken away
		t.Errorf("a smaller size: %v", err)
	}
	s.has(t, i, size)
	for _, to := range []vm.Size{{CPUs: 5, Memory: size.Memory}, {CPUs: size.CPUs, Memory: p.Growth.Memory + moreMemory}} {
		if err := r.Grow(s.ctx(t), to); !errdefs.IsInvalid(err) {
			t.Errorf("beyond the maximum: %v, want InvalidArgument", err)
		}
	}
	s.has(t, i, size)

	// A later daemon goes on.
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	r, _ = hypervisor.As[hypervisor.Resizer](i)
	s.has(t, i, size)
	size = vm.Size{CPUs: 4, Memory: p.Growth.Memory}
	if err := r.Grow(s.ctx(t), size); err != nil {
		t.Fatalf("Grow after Adopt: %v", err)
	}
	s.has(t, i, size)
	s.kill(t, i)
	if err := r.Grow(s.ctx(t), size); !errdefs.IsNotFound(err) {
		t.Errorf("after the end: %v, want NotFound", err)
	}

	// Without a maximum there is no room.
	plain := s.plan(t)
	i, r = s.resizer(t, plain)
	for _, to := range []vm.Size{{CPUs: plain.CPUs + 1, Memory: plain.Memory}, {CPUs: plain.CPUs, Memory: plain.Memory + moreMemory}} {
		if err := r.Grow(s.ctx(t), to); !errdefs.IsInvalid(err) {
			t.Errorf("without a maximum: %v, want InvalidArgument", err)
		}
	}
	s.kill(t, i)
}

// testSaveGrown saves a guest that has grown, and lets another one go on from there and grow further.
func testSaveGrown(t *testing.T, s *suite) {
	p := s.growing(t)
	i, r := s.resizer(t, p)
	snapshotter, ok := hypervisor.As[hypervisor.Snapshotter](i)
	if !ok {
		t.Skip("no Snapshotter")
	}
	size := vm.Size{CPUs: 3, Memory: p.Memory + moreMemory}
	if err := r.Grow(s.ctx(t), size); err != nil {
		t.Fatalf("Grow: %v", err)
	}
	s.has(t, i, size)
	plan := savePlan(t)
	if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
		t.Fatalf("Save: %v", err)
	}
	s.has(t, i, size)
	q := s.from(t, plan)
	q.CPUs, q.Memory, q.Topology, q.Growth = size.CPUs, size.Memory, p.Topology, p.Growth
	q.Topology.Sockets, q.Growth.Plugged = 3, moreMemory
	j := s.launch(t, q)
	s.has(t, j, size)
	resumed, _ := hypervisor.As[hypervisor.Resizer](j)
	size = vm.Size{CPUs: 4, Memory: p.Memory + 2*moreMemory}
	for _, one := range []struct {
		hypervisor.Resizer
		of hypervisor.Instance
	}{{r, i}, {resumed, j}} {
		if err := one.Grow(s.ctx(t), size); err != nil {
			t.Fatalf("Grow after Save: %v", err)
		}
		s.has(t, one.of, size)
		s.kill(t, one.of)
	}
}
