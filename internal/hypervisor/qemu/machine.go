package qemu

import (
	"context"
	"fmt"
	"regexp"
	"runtime"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// binaryFacts are what one QEMU binary reports about itself.
type binaryFacts struct {
	version string // e.g. 7.2.22
	machine string // the versioned type that q35 stands for, e.g. pc-q35-7.2
	cpus    *cpuFacts
}

var (
	versionRE = regexp.MustCompile(`version (\d+\.\d+(?:\.\d+)*)`)
	q35RE     = regexp.MustCompile(`(?m)^q35\s.*\(alias of ([\w.-]+)\)`)
)

// ask runs bin to get its facts.
func ask(ctx context.Context, bin string) (f binaryFacts, err error) {
	for arg, what := range map[string]struct {
		re    *regexp.Regexp
		field *string
	}{"-version": {versionRE, &f.version}, "-machine help": {q35RE, &f.machine}} {
		out, err := jail.Output(ctx, bin, strings.Fields(arg)...)
		if err != nil {
			return f, fmt.Errorf("ask %s: %w", bin, err)
		}
		m := what.re.FindStringSubmatch(out)
		if m == nil {
			return f, errdefs.Unavailablef("%s has no usable output for %s", bin, arg)
		}
		*what.field = m[1]
	}
	f.cpus, err = askCPUs(ctx, bin)
	return f, err
}

// Machine implements hypervisor.MachineTeller.
func (d *Driver) Machine(ctx context.Context, accel vm.Accel) (vm.Machine, error) {
	bin, err := d.binary()
	if err != nil {
		return vm.Machine{}, err
	}
	facts, err := d.facts.Facts(ctx, bin, ask)
	if err != nil {
		return vm.Machine{}, err
	}
	resolved, _, err := resolve(jail.ReadKVM(), accel)
	if err != nil {
		return vm.Machine{}, err
	}
	return machineOf(facts, resolved), nil
}

// machineOf describes what a guest depends on. An emulated CPU has what its QEMU can emulate, so its model includes the
// version; a virtualized CPU has the features of the host's.
func machineOf(f binaryFacts, accel vm.Accel) vm.Machine {
	m := vm.Machine{Driver: Name, Version: f.version, Type: f.machine, Arch: runtime.GOARCH, Accel: accel}
	if accel == vm.AccelKVM {
		m.CPU, m.Flags = "host", jail.HostFlags()
		return m
	}
	parts := strings.SplitN(f.version, ".", 3)
	m.CPU = "max-" + strings.Join(parts[:min(len(parts), 2)], ".")
	return m
}
