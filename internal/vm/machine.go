package vm

import (
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Machine is what the saved state of a guest depends on, beyond its spec. Only a compatible machine can resume it.
type Machine struct {
	Driver  string   `json:"driver"`
	Version string   `json:"version"`         // of the hypervisor, e.g. 7.2.22
	Type    string   `json:"type"`            // the machine's versioned type, e.g. pc-q35-7.2
	Arch    string   `json:"arch"`            // a GOARCH value
	Accel   Accel    `json:"accel"`           // kvm or tcg, never auto
	CPU     string   `json:"cpu"`             // model that the guest sees, e.g. max or host
	Flags   []string `json:"flags,omitempty"` // CPU features of the host that the guest may use, sorted; empty when the CPU is emulated
}

// Resumes reports whether host can resume a state that was saved on m. The error is FailedPrecondition and names every
// difference.
func (m Machine) Resumes(host Machine) error {
	var why []string
	differ := func(what, saved, here string) {
		if saved != here {
			why = append(why, what+" "+saved+" (this host: "+here+")")
		}
	}
	differ("hypervisor", m.Driver, host.Driver)
	differ("architecture", m.Arch, host.Arch)
	differ("accelerator", string(m.Accel), string(host.Accel))
	differ("machine type", m.Type, host.Type)
	differ("CPU model", m.CPU, host.CPU)
	var missing []string
	for _, f := range m.Flags {
		if _, ok := slices.BinarySearch(host.Flags, f); !ok {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		why = append(why, "CPU flags "+strings.Join(missing, ", ")+" (missing here)")
	}
	if len(why) == 0 {
		return nil
	}
	return errdefs.Preconditionf("it was saved on another kind of machine: %s; clone it on a host that matches", strings.Join(why, "; "))
}
