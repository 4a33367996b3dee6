package hypervisortest

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// carriers waits until the guest has a carrier on each interface whose LinkDown is false, and on no other.
func (s *suite) carriers(t *testing.T, i hypervisor.Instance, nics ...vm.NIC) {
	t.Helper()
	if s.Carriers != nil {
		s.Carriers(t, i, nics...)
	}
}

// refusesDown reports whether the driver refuses p for an interface without a carrier.
func (s *suite) refusesDown(t *testing.T, p hypervisor.Plan) bool {
	t.Helper()
	checker, ok := hypervisor.As[hypervisor.Checker](s.driver)
	return ok && errdefs.Is(checker.Check(s.ctx(t), p), errdefs.Unsupported)
}

// testLinks sets links while the guest runs, and lets others be down from the beginning: of its boot, of a plugged NIC, and after saved state.
func testLinks(t *testing.T, s *suite) {
	p, nics := s.plan(t), s.nics(t, 3)
	nics[1].LinkDown = true
	p.NICs = nics[:2:2]
	if s.refusesDown(t, p) {
		t.Skip("the driver has no interface without a carrier")
	}
	i, plugger := s.nicPlugger(t, p)
	linker, ok := hypervisor.As[hypervisor.Linker](i)
	if !ok {
		t.Skip("no Linker")
	}
	s.carriers(t, i, nics[:2]...)
	set := func(place int, down bool) {
		t.Helper()
		for range 2 { // again is no error
			if err := linker.SetLink(s.ctx(t), place, !down); err != nil {
				t.Fatalf("SetLink: %v", err)
			}
		}
		nics[place].LinkDown = down
	}
	set(0, true)
	set(1, false)
	s.carriers(t, i, nics[:2]...)
	if err := linker.SetLink(s.ctx(t), 2, true); !errdefs.IsNotFound(err) {
		t.Errorf("link of an interface that is not there: %v, want NotFound", err)
	}
	for range 2 { // again changes nothing
		nics[2].LinkDown = true
		if err := plugger.PlugNIC(s.ctx(t), nics[2]); err != nil {
			t.Fatal(err)
		}
		s.carriers(t, i, nics...)
	}

	// A later daemon finds the links as they are.
	_ = i.Close()
	s.driver = s.New(t)
	i = s.adopt(t, s.driver, i.Handle())
	linker, _ = hypervisor.As[hypervisor.Linker](i)
	s.carriers(t, i, nics...)
	set(2, false)
	s.carriers(t, i, nics...)

	snapshotter, ok := hypervisor.As[hypervisor.Snapshotter](i)
	if !ok {
		t.Skip("no Snapshotter")
	}
	plan := savePlan(t)
	plan.Hold = true
	if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
		t.Fatalf("Save: %v", err)
	}
	s.kill(t, i)
	q := s.from(t, plan)
	nics[0].LinkDown, nics[2].LinkDown = false, true // not as they were saved
	q.NICs, q.BootNICs = nics, 2
	j := s.launch(t, q)
	s.carriers(t, j, nics...)
	s.kill(t, j)
	if err := linker.SetLink(s.ctx(t), 0, true); !errdefs.IsNotFound(err) {
		t.Errorf("after the end: %v, want NotFound", err)
	}
}
