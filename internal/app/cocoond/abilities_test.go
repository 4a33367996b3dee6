package cocoond

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/cloudhypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/hypervisor/firecracker"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/section"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestAbilities: the documentation says what each driver can do. The driver's types and its refusals decide.
func TestAbilities(t *testing.T) {
	firmware := filepath.Join(t.TempDir(), "firmware")
	if err := os.WriteFile(firmware, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	q, err := qemu.New(qemu.Config{}, log)
	if err != nil {
		t.Fatal(err)
	}
	c, err := cloudhypervisor.New(cloudhypervisor.Config{Firmware: []string{firmware}}, log)
	if err != nil {
		t.Fatal(err)
	}
	f, err := firecracker.New(firecracker.Config{}, log)
	if err != nil {
		t.Fatal(err)
	}
	drivers := []hypervisor.Driver{q, c, f}

	var b strings.Builder
	b.WriteString("| ability | what |")
	for _, d := range drivers {
		fmt.Fprintf(&b, " %s |", d.Name())
	}
	b.WriteString("\n|---|---|---|---|---|\n")
	for _, a := range hypervisor.AllAbilities() {
		fmt.Fprintf(&b, "| `%s` | %s |", a, a.Text())
		for _, d := range drivers {
			can := slices.Contains(hypervisor.Abilities(t.Context(), d), a)
			if _, late := hypervisor.As[hypervisor.LateLoader](d); late && a == hypervisor.EarlyClones { // this host may lack what it needs
				can = true
			}
			fmt.Fprintf(&b, " %s |", map[bool]string{true: "yes", false: "no"}[can])
		}
		b.WriteString("\n")
	}
	section.Check(t, "docs/reference.md", "abilities", b.String())
}

// late is a driver that could run clones early, on a host that cannot.
type late struct{ hypervisor.Driver }

func (late) LoadsLate() string { return "this host has no /dev/userfaultfd" }
func (l late) Unwrap() any     { return l.Driver }

// TestNodeTellsAbilities: the node tells what a driver can do on it, and why it cannot do all that the driver could.
func TestNodeTellsAbilities(t *testing.T) {
	machines, err := fake.NewHost(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	full := fake.New(fake.Config{}, machines)
	broken := fake.New(fake.Config{Fault: func(fake.Op, vm.ID) error { return errdefs.Unavailablef("it is not installed") }}, machines)
	n := &node{drivers: map[string]hypervisor.Driver{"full": full, "late": late{full}, "broken": broken}}
	got := map[string]nodewire.Driver{}
	for _, d := range n.described(t.Context()) {
		got[d.Name] = d
	}
	all := len(hypervisor.AllAbilities())
	if d := got["full"]; len(d.Abilities) != all || len(d.Notes) != 0 {
		t.Errorf("%d of %d abilities, notes %q", len(d.Abilities), all, d.Notes)
	}
	if d := got["late"]; len(d.Abilities) != all-1 || slices.Contains(d.Abilities, string(hypervisor.EarlyClones)) || !slices.Equal(d.Notes, []string{"this host has no /dev/userfaultfd"}) {
		t.Errorf("early clones cannot be, but the node tells %q, notes %q", d.Abilities, d.Notes)
	}
	if d := got["broken"]; d.Error == "" || len(d.Abilities) != 0 {
		t.Errorf("a driver that cannot run tells %q", d.Abilities)
	}
}

// TestStateThatCannotBeGiven: a node whose state is on a file system that does not map users tells that of the hypervisors that need it.
func TestStateThatCannotBeGiven(t *testing.T) {
	need.Root(t)
	programs, state := t.TempDir(), t.TempDir()
	if err := unix.Mount("ramfs", state, "ramfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(state, unix.MNT_DETACH) })
	script := func(name, text string) string {
		path := filepath.Join(programs, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	var cfg Config
	cfg.StateDir = state
	cfg.CloudHypervisor.Binary = script("cloud-hypervisor", "echo cloud-hypervisor v53.0\n")
	cfg.Firecracker.Binary = script("firecracker", `case $1 in --version) echo Firecracker v1.16.1 ;; *) echo v10.0.0 ;; esac`)
	drivers, err := (&daemon{cfg: cfg, log: slog.New(slog.DiscardHandler)}).drivers()
	if err != nil {
		t.Fatal(err)
	}
	n := &node{drivers: drivers}
	for _, name := range []string{cloudhypervisor.Name, firecracker.Name} {
		if d := n.driver(t.Context(), name); !strings.Contains(d.Error, state+" is on a file system on which Linux cannot give it") {
			t.Errorf("%s: %q", name, d.Error)
		}
	}
}
