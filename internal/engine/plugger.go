package engine

import (
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// plugger returns what plugs disks into the running guest of m.
func (m *machine) plugger() (hypervisor.DiskPlugger, error) {
	run := m.run.Load()
	if run == nil {
		return nil, errdefs.Preconditionf("its process has ended")
	}
	plugger, ok := hypervisor.As[hypervisor.DiskPlugger](run.Inst)
	if !ok {
		return nil, errdefs.Unsupportedf("driver %s cannot plug disks into a running VM", m.record().Driver)
	}
	return plugger, nil
}

// nicPlugger returns what plugs interfaces into the running guest of m.
func (m *machine) nicPlugger() (hypervisor.NICPlugger, error) {
	run := m.run.Load()
	if run == nil {
		return nil, errdefs.Preconditionf("its process has ended")
	}
	plugger, ok := hypervisor.As[hypervisor.NICPlugger](run.Inst)
	if !ok {
		return nil, errdefs.Unsupportedf("driver %s cannot plug network interfaces into a running VM", m.record().Driver)
	}
	return plugger, nil
}

// linker returns what sets the links of the running guest of m.
func (m *machine) linker() (hypervisor.Linker, error) {
	run := m.run.Load()
	if run == nil {
		return nil, errdefs.Preconditionf("its process has ended")
	}
	linker, ok := hypervisor.As[hypervisor.Linker](run.Inst)
	if !ok {
		return nil, errdefs.Unsupportedf("driver %s cannot set the link of an interface of a running VM", m.record().Driver)
	}
	return linker, nil
}

// ports are the places that plugged disks have taken.
type ports map[int]bool

func portsOf(disks []vm.Disk) ports {
	p := ports{}
	for _, d := range disks {
		p[d.Port] = true
	}
	return p
}

// take returns a free place. ResourceExhausted if there is none.
func (p ports) take() (int, error) {
	for port := 1; port <= vm.MaxPort; port++ {
		if !p[port] {
			p[port] = true
			return port, nil
		}
	}
	return 0, errdefs.Exhaustedf("the guest has %d plugged disks and no place for another one; restart the VM to free those of ended containers", vm.MaxPort)
}
