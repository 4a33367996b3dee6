package cloudhypervisor

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// Names of the files in Plan.Dir.
const (
	apiSocket  = "api.sock"
	consoleLog = "console.log"
	programLog = "cloud-hypervisor.log"
	eventLog   = "events.json"

	privateDir  = "private" // the only folder that the process can write to
	agentSocket = "agent.sock"
	kernelLink  = "kernel"
)

// Paths in the root of the process.
const (
	rootPrivate  = "/run"
	rootKernel   = "/boot/kernel"
	rootInitrd   = "/boot/initrd"
	rootFirmware = "/boot/firmware"
	rootDisks    = "/disks"
)

const (
	maxDisks   = 24 // with 4 interfaces and the other devices, the 31 places of its bus
	maxNICs    = 4
	maxBacking = 9 // layers below a qcow2 disk that the program opens
	guestCID   = 3 // of the guest's virtio socket; each process has addresses of its own
	queueSize  = 256
)

// The types of the requests, as far as the driver uses them.

type vmConfig struct {
	CPUs     cpusConfig      `json:"cpus"`
	Memory   memoryConfig    `json:"memory"`
	Payload  payloadConfig   `json:"payload"`
	Disks    []diskConfig    `json:"disks,omitempty"`
	RNG      rngConfig       `json:"rng"`
	Balloon  *balloonConfig  `json:"balloon,omitempty"`
	Serial   consoleConfig   `json:"serial"`
	Console  consoleConfig   `json:"console"`
	VSOCK    *vsockConfig    `json:"vsock,omitempty"`
	Platform *platformConfig `json:"platform,omitempty"`
}

type cpusConfig struct {
	Boot     int           `json:"boot_vcpus"`
	Max      int           `json:"max_vcpus"`
	Topology *cpusTopology `json:"topology,omitempty"`
	Nested   bool          `json:"nested"`
}

type cpusTopology struct {
	Threads  int `json:"threads_per_core"`
	Cores    int `json:"cores_per_die"`
	Dies     int `json:"dies_per_package"`
	Packages int `json:"packages"`
}

type memoryConfig struct {
	Size     int64 `json:"size"`
	Huge     bool  `json:"hugepages,omitempty"`
	HugeSize int64 `json:"hugepage_size,omitempty"`
	Prefault bool  `json:"prefault,omitempty"`
}

type payloadConfig struct {
	Firmware string `json:"firmware,omitempty"`
	Kernel   string `json:"kernel,omitempty"`
	Cmdline  string `json:"cmdline,omitempty"`
	Initrd   string `json:"initramfs,omitempty"`
}

type diskConfig struct {
	ID       string `json:"id"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"readonly"`
	Serial   string `json:"serial,omitempty"`
	Type     string `json:"image_type"`
	Backing  bool   `json:"backing_files,omitempty"`
	Queues   int    `json:"num_queues"`
	Size     int    `json:"queue_size"`
}

type rngConfig struct {
	Source string `json:"src"`
}

type balloonConfig struct {
	Size      int64 `json:"size"`
	OnOOM     bool  `json:"deflate_on_oom"`
	Reporting bool  `json:"free_page_reporting"`
}

type consoleConfig struct {
	Mode string `json:"mode"`
}

type vsockConfig struct {
	CID    int    `json:"cid"`
	Socket string `json:"socket"`
}

type platformConfig struct {
	UUID   string `json:"uuid"`
	Serial string `json:"serial_number,omitempty"`
}

type netConfig struct {
	ID     string `json:"id"`
	MAC    string `json:"mac"`
	Queues int    `json:"num_queues"`
	Size   int    `json:"queue_size"`
}

// rootFile is a file that the process finds at the path at.
type rootFile struct {
	at       string
	path     string // on the node
	root     string // the folder below which path has no symbolic links; "": path is the node's own
	readOnly bool
}

// setup is all that the program is told, in the order of the requests, and what it needs in its root.
type setup struct {
	VM    vmConfig    `json:"vm.create"`
	NICs  []netConfig `json:"vm.add-net,omitempty"`
	files []rootFile
}

// build turns a plan into requests. It is pure: the same plan gives the same requests. firmware is the path of the node's firmware, "" if there is
// none.
func build(p hypervisor.Plan, firmware string) (setup, error) {
	if err := check(p, firmware); err != nil {
		return setup{}, err
	}
	s := &setup{VM: vmConfig{
		CPUs: cpusConfig{Boot: p.CPUs, Max: p.CPUs}, Memory: memoryConfig{Size: p.Memory >> 20 << 20}, RNG: rngConfig{"/dev/urandom"},
		Balloon: &balloonConfig{OnOOM: true, Reporting: true}, Serial: consoleConfig{"Tty"}, Console: consoleConfig{"Off"}, Platform: &platformConfig{UUID: jail.UUID(p.ID)},
	}}
	if t := p.Topology; t != (vm.Topology{}) {
		s.VM.CPUs.Topology = &cpusTopology{Threads: t.Threads, Cores: t.Cores, Dies: 1, Packages: t.Sockets}
	}
	if p.Huge > 0 { // all of them at once, so that a guest never finds out that there are too few
		s.VM.Memory.Huge, s.VM.Memory.HugeSize, s.VM.Memory.Prefault = true, int64(p.Huge), true
	}
	if p.Agent != "" {
		s.VM.VSOCK = &vsockConfig{CID: guestCID, Socket: filepath.Join(rootPrivate, agentSocket)}
	}
	if b := p.SMBIOS; b != nil {
		s.VM.Platform.Serial = b.Serial
		if b.UUID != "" {
			s.VM.Platform.UUID = b.UUID
		}
	}
	s.boot(p, firmware)
	for n, d := range p.Disks {
		s.disk(n, d, min(p.CPUs, 4))
	}
	for n, nic := range p.NICs {
		s.NICs = append(s.NICs, netConfig{ID: "net" + strconv.Itoa(vm.PlaceOf(p.NICs, n)), MAC: nic.MAC, Queues: 2, Size: queueSize})
	}
	return *s, nil
}

func (s *setup) place(f rootFile) {
	if !slices.ContainsFunc(s.files, func(o rootFile) bool { return o.at == f.at }) { // disks may share layers
		s.files = append(s.files, f)
	}
}

func (s *setup) boot(p hypervisor.Plan, firmware string) {
	if !p.Boot.Direct() {
		s.VM.Payload.Firmware = rootFirmware
		s.place(rootFile{at: rootFirmware, path: firmware, readOnly: true})
		return
	}
	// The kernel is behind a link, which is removed when the guest runs: the program, which would start a guest again that resets, then ends.
	s.VM.Payload.Kernel, s.VM.Payload.Cmdline = filepath.Join(rootPrivate, kernelLink), hypervisor.KernelArgs
	s.place(rootFile{at: rootKernel, path: p.Boot.Kernel, readOnly: true})
	if p.Boot.Cmdline != "" {
		s.VM.Payload.Cmdline += " " + p.Boot.Cmdline
	}
	if p.Boot.Initrd != "" {
		s.VM.Payload.Initrd = rootInitrd
		s.place(rootFile{at: rootInitrd, path: p.Boot.Initrd, readOnly: true})
	}
}

// disk adds the disk with the number n, and its layers. Of a layer, the file above it says where it is.
func (s *setup) disk(n int, d vm.Disk, queues int) {
	at := filepath.Join(rootDisks, strconv.Itoa(n))
	c := diskConfig{ID: "disk" + strconv.Itoa(n), Path: at, ReadOnly: d.ReadOnly, Serial: d.Serial, Type: "Raw", Queues: queues, Size: queueSize}
	if d.Format == vm.DiskQCOW2 {
		c.Type, c.Backing = "Qcow2", d.Backing != nil
	}
	s.VM.Disks = append(s.VM.Disks, c)
	s.place(rootFile{at: at, path: d.Path, root: d.Root, readOnly: d.ReadOnly})
	for b := d.Backing; b != nil; b = b.Backing {
		s.place(rootFile{at: b.Path, path: b.Path, root: b.Root, readOnly: true})
	}
}

// check refuses what Cloud Hypervisor, or this driver, cannot do.
func check(p hypervisor.Plan, firmware string) error {
	switch {
	case p.ID == "" || p.Dir == "":
		return errdefs.Invalidf("plan of VM %q has no id or no folder", p.Name)
	case p.CPUs < 1 || p.CPUs > vm.MaxCPUs:
		return errdefs.Invalidf("VM %s: invalid number of CPUs %d; use 1 to %d", p.Name, p.CPUs, vm.MaxCPUs)
	case p.Memory < 1<<20:
		return errdefs.Invalidf("VM %s: %d bytes of memory are less than 1 MiB", p.Name, p.Memory)
	case p.Huge > 0 && p.Memory%int64(p.Huge) != 0:
		return errdefs.Invalidf("VM %s: %d bytes of memory are no multiple of a huge page of %s", p.Name, p.Memory, p.Huge)
	case p.Incoming != nil && p.Paused:
		return errdefs.Invalidf("VM %s resumes from saved state, so it cannot start paused", p.Name)
	case len(p.Disks) > maxDisks:
		return errdefs.Invalidf("VM %s has %d disks; Cloud Hypervisor can have %d of ours", p.Name, len(p.Disks), maxDisks)
	case len(p.NICs) > maxNICs:
		return errdefs.Invalidf("VM %s has %d network interfaces; Cloud Hypervisor can have %d of ours", p.Name, len(p.NICs), maxNICs)
	case p.Boot.Kernel == "" && len(p.Disks) == 0:
		return errdefs.Invalidf("VM %s has neither a kernel nor a disk to boot from", p.Name)
	}
	if what := lacks(p); what != "" {
		return errdefs.Unsupportedf("VM %s: Cloud Hypervisor has no %s; run the VM with the driver qemu", p.Name, what)
	}
	if !p.Boot.Direct() && firmware == "" {
		return errdefs.Unsupportedf("VM %s boots by firmware, and this node has none for Cloud Hypervisor; install CLOUDHV.fd of EDK2, or run the VM with the driver qemu", p.Name)
	}
	if err := p.Topology.Validate(p.CPUs); err != nil {
		return fmt.Errorf("VM %s: %w", p.Name, err)
	}
	for _, d := range p.Disks {
		if err := checkDisk(p.Name, d); err != nil {
			return err
		}
	}
	return nil
}

// lacks names what a plan asks for and the driver does not have, "" if it has all.
func lacks(p hypervisor.Plan) string {
	for _, l := range []struct {
		asked bool
		what  string
	}{
		{p.Accel == vm.AccelTCG, "emulation (tcg): it needs kvm"},
		{p.Incoming != nil, "saved state that this driver can resume"},
		{p.Graphics, "screen"},
		{p.Growth != (vm.Growth{}), "CPUs or memory that grow with this driver"},
		{p.CPU.Model != "" || len(p.CPU.Features) > 0 || p.CPU.HideKVM || len(p.CPU.HyperV.All()) > 0 || p.CPU.HyperV.Spinlocks > 0 || p.CPU.HyperV.VendorID != "", "other CPU than the host's"},
		{p.Clock != (vm.Clock{}), "other clock than one of UTC"},
		{p.Boot.Firmware != "" && p.Boot.Firmware != vm.FirmwareUEFI, "BIOS"},
		{p.Boot.Firmware != "" && p.Boot.Kernel != "", "firmware that boots a kernel"},
		{p.UEFI != (vm.UEFI{}), "UEFI that keeps its variables or verifies signatures"},
		{p.TPM != "", "TPM with this driver"},
		{p.VSOCK, "virtio socket that the host's programs reach (VSOCK)"},
		{p.Watchdog != "", "watchdog of Intel's 6300ESB"},
		{p.Panic != "", "device for panics with this driver"},
		{p.Drive != nil, "drive for CD-ROMs"},
		{len(p.Shares) > 0, "shared folders with this driver"},
		{len(p.Devices) > 0, "disks on other buses than virtio"},
		{slices.ContainsFunc(p.Models, func(m vm.NICModel) bool { return m != "" && m != vm.NICVirtio }), "network interfaces that are not virtio"},
		{slices.ContainsFunc(p.NICs, func(n vm.NIC) bool { return n.LinkDown }), "network interfaces without a carrier"},
		{slices.ContainsFunc(p.Disks, func(d vm.Disk) bool { return d.Port != 0 }), "disks that are plugged with this driver"},
		{p.SMBIOS != nil && p.SMBIOS.Chassis != (vm.Chassis{}), "description of a chassis"},
	} {
		if l.asked {
			return l.what
		}
	}
	return ""
}

func checkDisk(name string, d vm.Disk) error {
	if len(d.Serial) > 20 {
		return errdefs.Invalidf("VM %s: disk serial %q is longer than 20 bytes", name, d.Serial)
	}
	depth := 0
	for b := &d; b != nil; b, depth = b.Backing, depth+1 {
		switch {
		case b.Format != vm.DiskRaw && b.Format != vm.DiskQCOW2:
			return errdefs.Invalidf("VM %s: disk %s has the unknown format %q", name, b.Path, b.Format)
		case b.Backing != nil && b.Format != vm.DiskQCOW2:
			return errdefs.Invalidf("VM %s: disk %s has format %s, which cannot have a backing disk", name, b.Path, b.Format)
		case depth > maxBacking:
			return errdefs.Unsupportedf("VM %s: disk %s has more than %d layers below it, which Cloud Hypervisor does not open; run the VM with the driver qemu", name, d.Path, maxBacking)
		case depth > 0 && (!filepath.IsAbs(b.Path) || filepath.Clean(b.Path) != b.Path):
			return errdefs.Invalidf("VM %s: the layer %s has no absolute, clean path", name, b.Path)
		}
	}
	return nil
}
