package qemu

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// growing is a plan of a guest that can grow.
func growing() hypervisor.Plan {
	p := diskPlan()
	p.CPUs, p.Memory, p.Topology = 4, 1<<30, vm.Topology{Sockets: 2, Cores: 1, Threads: 2}
	p.Growth = vm.Growth{Sockets: 8, Memory: 4 << 30}
	return p
}

// The command of a guest that grew has the size with which it booted, and room for what it got since.
func TestBuildGrowing(t *testing.T) {
	resumed := growing()
	resumed.CPUs, resumed.Topology.Sockets, resumed.Memory, resumed.Growth.Plugged = 6, 3, 3<<30, 2<<30
	resumed.Incoming = &hypervisor.Incoming{State: "/snap/state", Memory: "/snap/memory"}
	shared := growing()
	shared.Shares = []hypervisor.Share{{Tag: "a", Root: "/srv", Path: "/srv/a"}}
	sockets := growing()
	sockets.Growth.Memory = 0
	for name, p := range map[string]hypervisor.Plan{"growing": growing(), "growing-resumed": resumed, "growing-shared": shared, "growing-sockets": sockets} {
		c, err := build(p, testFacts(vm.AccelTCG))
		if err != nil {
			t.Fatal(err)
		}
		golden(t, name, c.String())
	}
}

func TestBuildRefusesGrowth(t *testing.T) {
	for what, spoil := range map[string]func(*hypervisor.Plan){
		"huge pages":              func(p *hypervisor.Plan) { p.Huge = vm.HugePages2M },
		"plugged before it boots": func(p *hypervisor.Plan) { p.Growth.Plugged = 2 << 20 },
		"fewer sockets":           func(p *hypervisor.Plan) { p.Growth.Sockets = 1 },
		"no topology":             func(p *hypervisor.Plan) { p.Topology = vm.Topology{} },
		"less memory":             func(p *hypervisor.Plan) { p.Growth.Memory = 2 << 20 },
	} {
		p := growing()
		spoil(&p)
		if _, err := build(p, testFacts(vm.AccelTCG)); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
