package qemu

import (
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestMachineOf(t *testing.T) {
	m := machineOf(binaryFacts{version: "7.2.22", machine: "pc-q35-7.2"}, vm.AccelTCG)
	if m.CPU != "max-7.2" || m.Flags != nil || m.Type != "pc-q35-7.2" || m.Version != "7.2.22" || m.Accel != vm.AccelTCG || m.Driver != Name {
		t.Errorf("%+v", m)
	}
	if err := m.Resumes(machineOf(binaryFacts{version: "7.2.23", machine: "pc-q35-7.2"}, vm.AccelTCG)); err != nil {
		t.Errorf("a later bug fix of QEMU: %v", err)
	}
	if m.Resumes(machineOf(binaryFacts{version: "8.0.0", machine: "pc-q35-7.2"}, vm.AccelTCG)) == nil {
		t.Error("another QEMU emulates another CPU")
	}
	if k := machineOf(binaryFacts{version: "7.2.22", machine: "pc-q35-7.2"}, vm.AccelKVM); k.CPU != "host" {
		t.Errorf("%+v", k)
	}
}

func TestQ35Alias(t *testing.T) {
	const help = "Supported machines are:\nmicrovm              microvm (i386)\npc                   Standard PC (i440FX + PIIX, 1996) (alias of pc-i440fx-7.2)\n" +
		"pc-q35-7.1           Standard PC (Q35 + ICH9, 2009)\nq35                  Standard PC (Q35 + ICH9, 2009) (alias of pc-q35-7.2)\n"
	if m := q35RE.FindStringSubmatch(help); m == nil || m[1] != "pc-q35-7.2" {
		t.Errorf("%q", m)
	}
}

func TestCPUFlags(t *testing.T) {
	tests := []struct {
		info string
		want []string
	}{
		{"processor\t: 0\nflags\t\t: sse2 avx sse2 fpu\n\nprocessor\t: 1\nflags\t\t: other\n", []string{"avx", "fpu", "sse2"}},
		{"vmx flags\t: vnmi\n", nil},
		{"", nil},
	}
	for _, tt := range tests {
		if got := jail.CPUFlags(tt.info); !slices.Equal(got, tt.want) {
			t.Errorf("%q: %q, want %q", tt.info, got, tt.want)
		}
	}
}
