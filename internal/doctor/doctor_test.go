package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// host simulates a host with files; apart from these the doctor sees only the real binaries.
func host(t *testing.T, files map[string]string) Config {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Group: "no-such-group-here",
		Kernel: filepath.Join(dir, "vmlinux"), Initrd: filepath.Join(dir, "initramfs"), QEMU: filepath.Join(dir, "qemu"),
		Dev: filepath.Join(dir, "dev"), Sys: filepath.Join(dir, "sys"), Proc: filepath.Join(dir, "proc"),
	}
}

func find(t *testing.T, checks []nodewire.Check, name string) nodewire.Check {
	t.Helper()
	for _, c := range checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %q", name)
	return nodewire.Check{}
}

func TestBareHost(t *testing.T) {
	checks := Run(t.Context(), host(t, nil), false)
	for name, want := range map[string]string{
		"qemu": Fail, "tun": Fail, "guest kernel": Fail, "acceleration": Warn, "userfaultfd": Warn, "cgroup v2": Warn, "user namespaces": Warn,
		"state folder": Warn, "run folder": Warn, "group": Warn,
	} {
		c := find(t, checks, name)
		if c.Status != want || c.Remedy == "" || c.Detail == "" || c.Feature == "" {
			t.Errorf("%s: %+v, want status %s with a detail and a remedy", name, c, want)
		}
	}
	if c := find(t, checks, "disk space"); c.Status == "" || !strings.Contains(c.Detail, "free") {
		t.Errorf("disk space of a folder that is not there yet: %+v", c)
	}
}

func TestGoodHost(t *testing.T) {
	cfg := host(t, map[string]string{
		"dev/kvm": "", "dev/net/tun": "", "dev/userfaultfd": "", "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu vmx sse\n",
		"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n", "proc/sys/user/max_user_namespaces": "1000\n",
		"sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n", "vmlinux": "x", "initramfs": "x", "state/x": "", "run/x": "",
		"qemu": "#!/bin/sh\necho QEMU emulator version 7.2.22 'from somewhere'\n",
	})
	if err := os.Chmod(cfg.QEMU, 0o755); err != nil {
		t.Fatal(err)
	}
	checks := Run(t.Context(), cfg, false)
	for _, name := range []string{"qemu", "tun", "guest kernel", "acceleration", "cgroup v2", "user namespaces", "memory", "state folder", "run folder", "reflink", "userfaultfd", "mapped mounts"} {
		if c := find(t, checks, name); c.Status != OK || c.Remedy != "" {
			t.Errorf("%s: %+v", name, c)
		}
	}
	if c := find(t, checks, "qemu"); !strings.HasSuffix(c.Detail, " 7.2.22") {
		t.Errorf("qemu: %+v", c)
	}
}

// TestMappedMounts: a state folder on a file system that does not map users is told, with what to do.
func TestMappedMounts(t *testing.T) {
	need.Root(t)
	cfg := host(t, map[string]string{"state/x": ""})
	if err := unix.Mount("ramfs", cfg.StateDir, "ramfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(cfg.StateDir, unix.MNT_DETACH) })
	if c := find(t, Run(t.Context(), cfg, false), "mapped mounts"); c.Status != Warn || !strings.Contains(c.Detail, "cannot give it to the user of a VM") || !strings.Contains(c.Remedy, "--state-dir") {
		t.Errorf("%+v", c)
	}
}

func TestKVMWithoutCPUSupportIsNotTrusted(t *testing.T) {
	cfg := host(t, map[string]string{"dev/kvm": "", "proc/cpuinfo": "flags : fpu sse\n"})
	if c := find(t, Run(t.Context(), cfg, false), "acceleration"); c.Status != Warn || !strings.Contains(c.Detail, "vmx") {
		t.Errorf("%+v", c)
	}
}

func TestOldQEMU(t *testing.T) {
	cfg := host(t, map[string]string{"qemu": "#!/bin/sh\necho QEMU emulator version 5.2.0\n"})
	if err := os.Chmod(cfg.QEMU, 0o755); err != nil {
		t.Fatal(err)
	}
	if c := find(t, Run(t.Context(), cfg, false), "qemu"); c.Status != Fail || !strings.Contains(c.Detail, "too old") {
		t.Errorf("%+v", c)
	}
}

func TestFix(t *testing.T) {
	cfg := host(t, nil)
	checks := Run(t.Context(), cfg, true)
	for _, name := range []string{"state folder", "run folder"} {
		if c := find(t, checks, name); c.Status != OK || !c.Fixed {
			t.Errorf("%s: %+v", name, c)
		}
	}
	if fi, err := os.Stat(cfg.StateDir); err != nil || fi.Mode().Perm() != 0o711 {
		t.Errorf("state folder: %v %v", fi, err)
	}
	if c := find(t, checks, "qemu"); c.Fixable || c.Fixed {
		t.Errorf("qemu cannot be fixed: %+v", c)
	}
	if again := find(t, Run(t.Context(), cfg, true), "state folder"); again.Fixed || again.Fixable {
		t.Errorf("nothing was left to fix: %+v", again)
	}
}

// Checking the real host must not panic or fail, whoever runs the test and whatever the host lacks.
func TestRealHost(t *testing.T) {
	for _, c := range Run(t.Context(), Config{StateDir: "/var/lib/cocoon", Group: "cocoon"}, false) {
		if c.Detail == "" || c.Status == "" {
			t.Errorf("%+v says nothing", c)
		}
	}
}

// The check for shared blocks leaves no files.
func TestReflinkLeavesNothing(t *testing.T) {
	cfg := host(t, map[string]string{"state/x": ""})
	if c := find(t, Run(t.Context(), cfg, false), "reflink"); c.Status != OK || !strings.HasPrefix(c.Detail, "yes") && !strings.HasPrefix(c.Detail, "no:") {
		t.Errorf("%+v", c)
	}
	if all, err := os.ReadDir(cfg.StateDir); err != nil || len(all) != 1 {
		t.Errorf("%v, %v", all, err)
	}
}

func TestMappingProblems(t *testing.T) {
	for name, tc := range map[string]struct {
		problems []image.MappingProblem
		err      error
		status   string
		detail   string
	}{
		"none":      {status: OK, detail: "no problems"},
		"no daemon": {err: errors.New("connection refused"), status: OK, detail: "not examined: cocoond does not answer"},
		"two": {
			problems: []image.MappingProblem{{Source: "files", Mapping: "a.yaml", Message: "no YAML"}, {Source: "kubernetes", Mapping: "b", Rule: "name c", Message: "no url"}},
			status:   Warn, detail: "files/a.yaml: no YAML; kubernetes/b, name c: no url",
		},
	} {
		d := doctor{Config{MappingProblems: func(context.Context) ([]image.MappingProblem, error) { return tc.problems, tc.err }}}
		if f := d.mappings(t.Context()); f.status != tc.status || f.detail != tc.detail {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

func TestStrays(t *testing.T) {
	for name, tc := range map[string]struct {
		all            []vm.Stray
		err            error
		status, detail string
	}{
		"no daemon": {err: errors.New("nobody"), status: OK, detail: "not examined: cocoond does not answer"},
		"none":      {status: OK, detail: "all VMs of this host are in the journal"},
		"two":       {all: []vm.Stray{{ID: "a"}, {ID: "b"}}, status: Warn, detail: "2 VMs of this host are not in the journal: a, b"},
	} {
		d := doctor{Config{Strays: func(context.Context) ([]vm.Stray, error) { return tc.all, tc.err }}}
		if f := d.strays(t.Context()); f.status != tc.status || f.detail != tc.detail || (f.status == Warn) != (f.remedy != "") {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

func TestPools(t *testing.T) {
	good := volume.Pool{Name: "vg/pool", Size: 1000, Used: 420, MetadataSize: 100, MetadataUsed: 7}
	bad := volume.Pool{Name: "vg/pool", Fault: "thin pool vg/pool is too full"}
	for name, tc := range map[string]struct {
		all            []volume.Pool
		err            error
		status, detail string
	}{
		"no daemon": {err: errors.New("nobody"), status: OK, detail: "not examined: cocoond does not answer"},
		"none":      {status: OK, detail: "none: volumes are files; `cocoond --volume-pool VG/POOL` uses a thin pool of LVM"},
		"one":       {all: []volume.Pool{good}, status: OK, detail: "vg/pool zeroes its blocks; 42 % of its data and 7 % of its metadata are in use"},
		"full":      {all: []volume.Pool{good, bad}, status: Warn, detail: "thin pool vg/pool is too full"},
	} {
		d := doctor{Config{Pools: func(context.Context) ([]volume.Pool, error) { return tc.all, tc.err }}}
		if f := d.pools(t.Context()); f.status != tc.status || f.detail != tc.detail || (f.status == Warn) != (f.remedy != "") {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

func TestDrivers(t *testing.T) {
	qemu, broken := nodewire.Driver{Name: "qemu", Version: "7.2.22", Accel: "kvm", Firmware: []string{"bios"}, Default: true}, nodewire.Driver{Name: "firecracker", Error: "it needs KVM"}
	for name, tc := range map[string]struct {
		all            []nodewire.Driver
		err            error
		status, detail string
		kubelet        *Kubelet
	}{
		"no daemon": {err: errors.New("nobody"), status: OK, detail: "not examined: cocoond does not answer"},
		"for pods": {
			all:    []nodewire.Driver{{Name: "firecracker", Version: "1.16.1", Accel: "kvm", Default: true}, {Name: "qemu", Version: "7.2.22", Accel: "kvm", Firmware: []string{"bios"}}},
			status: OK, detail: "firecracker 1.16.1 by kvm, no disk images; qemu 7.2.22 by kvm, for VM pods of the kubelet", kubelet: &Kubelet{Driver: "qemu"},
		},
		"not for pods": {
			all:    []nodewire.Driver{{Name: "firecracker", Version: "1.16.1", Accel: "kvm", Default: true}, {Name: "qemu", Error: "it is not installed"}},
			status: Warn, detail: "qemu, in which VM pods of the kubelet run: it is not installed", kubelet: &Kubelet{Driver: "qemu"},
		},
		"all":     {all: []nodewire.Driver{{Name: "cloud-hypervisor", Version: "53.0", Accel: "kvm"}, broken, qemu}, status: OK, detail: "cloud-hypervisor 53.0 by kvm, no disk images; not firecracker: it needs KVM; qemu 7.2.22 by kvm"},
		"default": {all: []nodewire.Driver{{Name: "firecracker", Error: "it needs KVM", Default: true}, qemu}, status: Warn, detail: "firecracker, the default: it needs KVM"},
	} {
		d := doctor{Config{Kubelet: tc.kubelet, Drivers: func(context.Context) ([]nodewire.Driver, error) { return tc.all, tc.err }}}
		if f := d.drivers(t.Context()); f.status != tc.status || f.detail != tc.detail || (f.status == Warn) != (f.remedy != "") {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

func TestNetworks(t *testing.T) {
	for name, tc := range map[string]struct {
		all    []nodewire.Network
		err    error
		status string
		detail string
	}{
		"no daemon": {err: errors.New("nobody"), status: OK, detail: "not examined: cocoond does not answer"},
		"none":      {status: OK, detail: "none: VMs have no interfaces"},
		"all up":    {all: []nodewire.Network{{Name: "default", Kind: "bridge", Up: true}, {Name: "lab", Kind: "cni", Up: true}}, status: OK, detail: "default (bridge), lab (cni)"},
		"one not":   {all: []nodewire.Network{{Name: "default", Kind: "bridge", Up: true}, {Name: "lab", Kind: "cni", Error: "no plugin"}}, status: Warn, detail: "lab: no plugin"},
	} {
		d := doctor{Config{Networks: func(context.Context) ([]nodewire.Network, error) { return tc.all, tc.err }}}
		if f := d.networks(t.Context()); f.status != tc.status || f.detail != tc.detail || (f.status == Warn) != (f.remedy != "") {
			t.Errorf("%s: %+v", name, f)
		}
	}
}
