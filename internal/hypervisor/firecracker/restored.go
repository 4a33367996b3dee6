package firecracker

import (
	"cmp"
	"context"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// restored is what the program says of a machine whose state it has loaded. All that a machine can have besides is a clock, a serial port, a source of randomness, limits
// of rates and caches of disks, which cost the node nothing.
type restored struct {
	Machine struct {
		CPUs int    `json:"vcpu_count"`
		MiB  int64  `json:"mem_size_mib"`
		SMT  bool   `json:"smt"`
		Huge string `json:"huge_pages"`
	} `json:"machine-config"`
	Drives []struct {
		ID       string `json:"drive_id"`
		Path     string `json:"path_on_host"` // "" for one that another process serves
		ReadOnly bool   `json:"is_read_only"`
		Engine   string `json:"io_engine"`
	} `json:"drives"`
	NICs []struct {
		ID string `json:"iface_id"`
	} `json:"network-interfaces"`
	VSOCK    *vsockConfig   `json:"vsock"`
	Balloon  *balloonConfig `json:"balloon"`
	Pmem     []struct{}     `json:"pmem"`
	Hotplug  *struct{}      `json:"memory-hotplug"`
	Metadata *struct{}      `json:"mmds-config"`
}

// What the program says of a machine without huge pages, and of a disk that it reads and writes by ordinary system calls.
const hugeNone, engineSync = "None", "Sync"

// compare refuses a machine that is not the one of the plan, before its guest runs: state from elsewhere may have more CPUs or memory, or other devices, than the
// record beside it says.
func (l *launch) compare(ctx context.Context, i *instance) error {
	var r restored
	if err := i.callLong(ctx, "GET", "/vm/config", nil, &r); err != nil {
		return err
	}
	if what := r.differs(l.Plan); what != "" {
		return errdefs.DataLossf("the saved state is that of another machine: it has %s", what)
	}
	return nil
}

// differs says in what r is not the machine of p, "" if it is.
func (r restored) differs(p hypervisor.Plan) string {
	switch {
	case r.Machine.CPUs != p.CPUs:
		return fmt.Sprintf("%d CPUs, not %d", r.Machine.CPUs, p.CPUs)
	case r.Machine.SMT:
		return "CPUs with threads"
	case r.Machine.MiB != p.Memory>>20:
		return fmt.Sprintf("%d MiB of memory, not %d", r.Machine.MiB, p.Memory>>20)
	case r.Machine.Huge != "" && r.Machine.Huge != hugeNone:
		return fmt.Sprintf("huge pages (%.40s)", r.Machine.Huge)
	case r.Balloon != nil && r.Balloon.MiB != 0:
		return fmt.Sprintf("a balloon of %d MiB", r.Balloon.MiB)
	case r.Hotplug != nil:
		return "memory that can be plugged"
	case len(r.Pmem) > 0:
		return fmt.Sprintf("%d devices of persistent memory", len(r.Pmem))
	case r.Metadata != nil:
		return "a metadata service"
	case r.VSOCK == nil && p.Agent != "":
		return "no virtio socket"
	case r.VSOCK != nil && (p.Agent == "" || *r.VSOCK != agentVSOCK()):
		return fmt.Sprintf("the virtio socket at %.80q with the address %d", r.VSOCK.Socket, r.VSOCK.CID)
	}
	return cmp.Or(r.otherDrives(p), r.otherNICs(p))
}

func (r restored) otherDrives(p hypervisor.Plan) string {
	if len(r.Drives) != len(p.Disks) {
		return fmt.Sprintf("%d disks, not %d", len(r.Drives), len(p.Disks))
	}
	want := map[string]int{}
	for n := range p.Disks {
		want[diskID(n)] = n
	}
	for _, d := range r.Drives {
		n, ok := want[d.ID]
		switch {
		case !ok || d.Path != diskPath(n):
			return fmt.Sprintf("the disk %.40q at %.80q", d.ID, d.Path)
		case d.Engine != "" && d.Engine != engineSync:
			return fmt.Sprintf("the disk %.40q with the engine %.40q", d.ID, d.Engine)
		case d.ReadOnly && !p.Disks[n].ReadOnly:
			return fmt.Sprintf("the disk %.40q, which the guest can only read", d.ID)
		case !d.ReadOnly && p.Disks[n].ReadOnly:
			return fmt.Sprintf("the disk %.40q, which the guest can write to", d.ID)
		}
		delete(want, d.ID) // each one once
	}
	return ""
}

func (r restored) otherNICs(p hypervisor.Plan) string {
	if len(r.NICs) != len(p.NICs) {
		return fmt.Sprintf("%d network interfaces, not %d", len(r.NICs), len(p.NICs))
	}
	want := map[string]bool{}
	for n := range p.NICs {
		want[nicID(vm.PlaceOf(p.NICs, n))] = true
	}
	for _, n := range r.NICs {
		if !want[n.ID] {
			return fmt.Sprintf("the network interface %.40q", n.ID)
		}
		delete(want, n.ID)
	}
	return ""
}
