// Package doctor examines a host for what Cocoon needs: what exists, what is missing, for which feature, and the
// command that fixes it.
//
// It works without the daemon. It changes nothing unless asked to fix, and then makes only safe changes: Cocoon's own
// folders and a missing device node. It never installs packages and never judges the state of VMs.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"strings"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Statuses of a check.
const (
	OK   = "ok"
	Warn = "warn" // a feature is missing or slow
	Fail = "fail" // VMs cannot run
)

// Config names what to check. Empty fields are skipped, except the last three, which default to the real folders.
type Config struct {
	StateDir string
	RunDir   string
	Kernel   string // of OCI guests
	Initrd   string
	QEMU     string // binary; the name of the host's architecture by default
	Group    string // group that may use the daemon without being root

	Kubelet *Kubelet // nil: cocoond serves no kubelet

	// MappingProblems returns the problems with the mappings of image names; nil: unavailable.
	MappingProblems func(ctx context.Context) ([]image.MappingProblem, error)

	// Networks returns the networks of the node; nil: unavailable.
	Networks func(ctx context.Context) ([]nodewire.Network, error)

	// Strays returns the VMs on this host that are not on record; nil: unavailable.
	Strays func(ctx context.Context) ([]vm.Stray, error)

	// Drivers returns the hypervisors of the node; nil: unavailable.
	Drivers func(ctx context.Context) ([]nodewire.Driver, error)

	// Pools returns how full the pools of volumes are; nil: unavailable.
	Pools func(ctx context.Context) ([]volume.Pool, error)

	Dev  string // /dev
	Sys  string // /sys
	Proc string // /proc
}

// finding is the result of one check.
type finding struct {
	status string
	detail string
	remedy string
}

// check is one thing to check.
type check struct {
	name    string
	feature string
	look    func(ctx context.Context) finding
	fix     func() error // nil: there is no safe fix
}

// Run examines the host. With fix it applies the safe fixes and checks again.
func Run(ctx context.Context, cfg Config, fix bool) []nodewire.Check {
	d := doctor{cfg.withDefaults()}
	var out []nodewire.Check
	for _, c := range d.checks() {
		f := c.look(ctx)
		result := nodewire.Check{Name: c.name, Feature: c.feature, Fixable: c.fix != nil && f.status != OK}
		if fix && result.Fixable {
			if err := c.fix(); err != nil {
				f.detail = fmt.Sprintf("%s; fixing it failed: %v", f.detail, err)
			} else {
				f = c.look(ctx)
				result.Fixed = f.status == OK
			}
		}
		result.Status, result.Detail, result.Remedy = f.status, f.detail, f.remedy
		out = append(out, result)
	}
	return out
}

func (c Config) withDefaults() Config {
	c.QEMU = cmp.Or(c.QEMU, qemuBinary())
	c.Dev, c.Sys, c.Proc = cmp.Or(c.Dev, "/dev"), cmp.Or(c.Sys, "/sys"), cmp.Or(c.Proc, "/proc")
	return c
}

func qemuBinary() string {
	switch runtime.GOARCH {
	case "arm64":
		return "qemu-system-aarch64"
	case "amd64":
		return "qemu-system-x86_64"
	}
	return "qemu-system-" + runtime.GOARCH
}

type doctor struct{ cfg Config }

// checks are in the order in which an operator would fix problems.
func (d doctor) checks() []check {
	all := []check{
		{name: "root", feature: "everything", look: d.root},
		{name: "qemu", feature: "running VMs", look: d.qemu},
		{name: "acceleration", feature: "speed", look: d.acceleration},
		{name: "tun", feature: "networks", look: d.tun, fix: d.fixTun},
		{name: "nftables", feature: "networks: NAT and guard", look: d.nftables},
		{name: "cgroup v2", feature: "resource limits per VM", look: d.cgroup},
		{name: "user namespaces", feature: "isolation", look: d.userns},
		{name: "memory", feature: "running VMs", look: d.memory},
		{name: "mkfs.ext4", feature: "container images", look: d.mkfs},
	}
	if d.cfg.Kernel != "" || d.cfg.Initrd != "" {
		all = append(all, check{name: "guest kernel", feature: "container images", look: d.guest})
	}
	all = append(all,
		check{name: "uefi firmware", feature: "disk images that need UEFI", look: d.firmware},
		check{name: "swtpm", feature: "guests with a TPM", look: d.tpm},
		check{name: "qemu-img", feature: "VMDK, VHD and VHDX disks", look: d.conversion})
	all = append(all, check{name: "userfaultfd", feature: "clones in Firecracker that run before their memory is here", look: d.userfaultfd})
	if d.cfg.StateDir != "" {
		all = append(
			all,
			check{name: "state folder", feature: "everything", look: d.folder(d.cfg.StateDir), fix: makeFolder(d.cfg.StateDir)},
			check{name: "disk space", feature: "images, disks and snapshots", look: d.space},
			check{name: "reflink", feature: "quick copies of snapshots", look: d.reflink},
			check{name: "mapped mounts", feature: "VMs in Cloud Hypervisor and Firecracker", look: d.mapped},
		)
	}
	if d.cfg.RunDir != "" {
		all = append(all, check{name: "run folder", feature: "everything", look: d.folder(d.cfg.RunDir), fix: makeFolder(d.cfg.RunDir)})
	}
	if d.cfg.MappingProblems != nil {
		all = append(all, check{name: "image mappings", feature: "images by alias", look: d.mappings})
	}
	if d.cfg.Drivers != nil {
		all = append(all, check{name: "hypervisors", feature: "VMs that ask for one", look: d.drivers})
	}
	if d.cfg.Networks != nil {
		all = append(all, check{name: "networks", feature: "networks of the bridge and of CNI", look: d.networks})
	}
	if d.cfg.Strays != nil {
		all = append(all, check{name: "records", feature: "VMs that survive what happens to cocoond", look: d.strays})
	}
	if d.cfg.Pools != nil {
		all = append(all, check{name: "volume pools", feature: "volumes on a thin pool", look: d.pools})
	}
	if d.cfg.Kubelet != nil {
		all = append(all, d.kubeletChecks()...)
	}
	if d.cfg.Group != "" {
		all = append(all, check{name: "group", feature: "using cocoon without root", look: d.group})
	}
	return all
}

// apt is the remedy for missing packages.
func apt(packages ...string) string { return "sudo apt-get install " + strings.Join(packages, " ") }
