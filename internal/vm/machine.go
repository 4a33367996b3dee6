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

// Program names the hypervisor of m with its version and the format of its saved state.
func (m Machine) Program() string {
	name := m.Driver
	if m.Version != "" {
		name += " " + m.Version
	}
	if m.Type != "" {
		name += " (" + m.Type + ")"
	}
	return name
}

// Resumes reports whether host can resume a state that was saved on m. The error is FailedPrecondition, and names both programs and every other
// difference.
func (m Machine) Resumes(host Machine) error {
	var why []string
	differ := func(what, saved, here string) {
		if saved != here {
			why = append(why, what+" "+saved+" (here: "+here+")")
		}
	}
	differ("architecture", m.Arch, host.Arch)
	differ("accelerator", string(m.Accel), string(host.Accel))
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
	if len(why) == 0 && m.Driver == host.Driver && m.Type == host.Type {
		return nil
	}
	programs := "by " + m.Program() + ", and this node has " + host.Program()
	return errdefs.Preconditionf("it was saved on another kind of machine: %s", strings.Join(append([]string{programs}, why...), "; "))
}
