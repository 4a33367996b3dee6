package hypervisortest

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// nics returns NICs whose taps exist, at the places of their positions. It skips implementations that have none at hand.
func (s *suite) nics(t *testing.T, n int) []vm.NIC {
	t.Helper()
	if s.NICs == nil {
		t.Skip("no NICs are at hand")
	}
	out := s.NICs(t, n)
	for i := range out {
		out[i].Place = i
	}
	return out
}

// nicPlugger launches a VM and waits until its guest reacts. It skips drivers that cannot plug NICs.
func (s *suite) nicPlugger(t *testing.T, p hypervisor.Plan) (hypervisor.Instance, hypervisor.NICPlugger) {
	t.Helper()
	i := s.launch(t, p)
	plugger, ok := hypervisor.As[hypervisor.NICPlugger](i)
	if !ok {
		t.Skip("no NICPlugger")
	}
	s.Booted(t, i)
	return i, plugger
}

// connected waits until the guest has exactly these interfaces.
func (s *suite) connected(t *testing.T, i hypervisor.Instance, nics ...vm.NIC) {
	t.Helper()
	var macs []string
	for _, n := range nics {
		macs = append(macs, n.MAC)
	}
	if s.Connected != nil {
		s.Connected(t, i, macs...)
	}
}

func testPlugNICs(t *testing.T, s *suite) {
	p, nics := s.plan(t), s.nics(t, 4)
	p.NICs = nics[:2:2]
	i, plugger := s.nicPlugger(t, p)
	s.connected(t, i, nics[:2]...)
	for range 2 { // again is no error
		for _, n := range nics[2:] {
			if err := plugger.PlugNIC(s.ctx(t), n); err != nil {
				t.Fatalf("PlugNIC: %v", err)
			}
		}
	}
	s.connected(t, i, nics...)
	other := nics[2]
	other.MAC = "02:00:00:00:0f:0f"
	if err := plugger.PlugNIC(s.ctx(t), other); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("another NIC in the place: %v, want Conflict", err)
	}
	for what, n := range map[string]vm.NIC{"no place": {MAC: other.MAC}, "a multicast address": {MAC: "03:00:00:00:00:01", Place: 4}, "no address": {Place: 4}} {
		if err := plugger.PlugNIC(s.ctx(t), n); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v, want InvalidArgument", what, err)
		}
	}
	other.Place = 100
	if err := plugger.PlugNIC(s.ctx(t), other); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a place without a port: %v, want ResourceExhausted", err)
	}
	if err := plugger.UnplugNIC(s.ctx(t), 0); !errdefs.IsInvalid(err) {
		t.Errorf("the first NIC: %v, want InvalidArgument", err)
	}

	// A later daemon finds the NICs, and removes one that was there when the guest booted and one that came later.
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	plugger, _ = hypervisor.As[hypervisor.NICPlugger](i)
	if err := plugger.PlugNIC(s.ctx(t), nics[2]); err != nil {
		t.Errorf("PlugNIC after Adopt: %v", err)
	}
	for range 2 {
		for _, place := range []int{1, 2} {
			if err := plugger.UnplugNIC(s.ctx(t), place); err != nil {
				t.Fatalf("UnplugNIC: %v", err)
			}
		}
	}
	s.connected(t, i, nics[0], nics[3])
	moved := nics[2]
	moved.Place = 1
	if err := plugger.PlugNIC(s.ctx(t), moved); err != nil {
		t.Fatalf("PlugNIC in a place that was used before: %v", err)
	}
	s.connected(t, i, nics[0], nics[3], moved)
	if disks, ok := hypervisor.As[hypervisor.DiskPlugger](i); ok { // their controller has a port of its own
		d := layers(t, 1)[0]
		if err := disks.PlugDisk(s.ctx(t), d); err != nil {
			t.Errorf("PlugDisk beside NICs: %v", err)
		}
		s.sees(t, i, d)
	}
	s.kill(t, i)
	for _, call := range []error{plugger.PlugNIC(s.ctx(t), nics[2]), plugger.UnplugNIC(s.ctx(t), 3)} {
		if !errdefs.IsNotFound(call) {
			t.Errorf("after the end: %v, want NotFound", call)
		}
	}
}

// testSavePluggedNICs saves a guest whose NICs have changed since it booted, and lets another one go on from there.
func testSavePluggedNICs(t *testing.T, s *suite) {
	p, nics := s.plan(t), s.nics(t, 5)
	p.NICs = nics[:2:2]
	i, plugger := s.nicPlugger(t, p)
	snapshotter, ok := hypervisor.As[hypervisor.Snapshotter](i)
	if !ok {
		t.Skip("no Snapshotter")
	}
	if err := plugger.PlugNIC(s.ctx(t), nics[2]); err != nil {
		t.Fatal(err)
	}
	if err := plugger.UnplugNIC(s.ctx(t), 1); err != nil {
		t.Fatal(err)
	}
	s.connected(t, i, nics[0], nics[2])
	plan := savePlan(t)
	plan.Hold = true
	if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
		t.Fatalf("Save: %v", err)
	}
	s.kill(t, i)
	q := s.from(t, plan)
	q.NICs, q.BootNICs = []vm.NIC{nics[0], nics[2]}, 2
	j := s.launch(t, q)
	s.connected(t, j, q.NICs...)
	resumed, _ := hypervisor.As[hypervisor.NICPlugger](j)
	again := nics[3]
	again.Place = 1
	for _, n := range []vm.NIC{again, func() vm.NIC { n := nics[4]; n.Place = 3; return n }()} {
		if err := resumed.PlugNIC(s.ctx(t), n); err != nil {
			t.Fatalf("PlugNIC into a resumed guest: %v", err)
		}
	}
	s.connected(t, j, nics[0], nics[2], nics[3], nics[4])
	for _, place := range []int{1, 2, 3} {
		if err := resumed.UnplugNIC(s.ctx(t), place); err != nil {
			t.Fatalf("UnplugNIC of a resumed guest: %v", err)
		}
	}
	s.connected(t, j, nics[0])
	s.kill(t, j)
}
