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
	apiSocket   = "api.sock"
	programLog  = "cloud-hypervisor.log"
	eventLog    = "events.json"
	restoreFile = "restore.json" // what the process is, until it has resumed
)

// Names of what is in rootPrivate.
const (
	agentSocket = "agent.sock"
	kernelLink  = "kernel"
)

// Paths in the root of the process.
const (
	rootPrivate  = "/run" // the folder of its sockets; the process can write to it
	rootKernel   = "/boot/kernel"
	rootInitrd   = "/boot/initrd"
	rootFirmware = "/boot/firmware"
	rootDisks    = "/disks"
	rootPlugged  = "/plugged" // of disks with a port

	rootSave     = "/save"               // place of the folder to which it saves
	rootRestore  = "/restore"            // from which it resumes
	restoreState = "/restore/state.json" // this name and the next are the program's
	restoreVM    = "/restore/config.json"
)

const (
	maxDisks   = 24 // with 4 interfaces and the other devices, the 31 places of its bus; plugged ones count
	maxNICs    = 4
	maxSerial  = 20
	guestCID   = 3 // of the guest's virtio socket; each process has addresses of its own
	queueSize  = 256
	memoryZone = "mem0" // the program's name for the memory of a guest that has booted
)

// The types of the requests, as far as the driver uses them.

type vmConfig struct {
	CPUs     cpusConfig      `json:"cpus"`
	Memory   memoryConfig    `json:"memory"`
	Payload  payloadConfig   `json:"payload"`
	Disks    []diskConfig    `json:"disks,omitempty"`
	NICs     []netConfig     `json:"net,omitempty"` // of a guest that resumes
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
	Size     int64        `json:"size"`
	Huge     bool         `json:"hugepages,omitempty"`
	HugeSize int64        `json:"hugepage_size,omitempty"`
	Prefault bool         `json:"prefault,omitempty"`
	Zones    []zoneConfig `json:"zones,omitempty"`
}

// zoneConfig is memory that is a file.
type zoneConfig struct {
	ID     string `json:"id"`
	Size   int64  `json:"size"`
	File   string `json:"file"`
	Shared bool   `json:"shared"` // otherwise what the guest writes is a copy
}

type payloadConfig struct {
	Firmware string `json:"firmware,omitempty"`
	Kernel   string `json:"kernel,omitempty"`
	Cmdline  string `json:"cmdline,omitempty"`
	Initrd   string `json:"initramfs,omitempty"`
}

type diskConfig struct {
	ID       string       `json:"id"`
	Path     string       `json:"path"`
	ReadOnly bool         `json:"readonly"`
	Serial   string       `json:"serial,omitempty"`
	Type     string       `json:"image_type"`
	Queues   int          `json:"num_queues"`
	Size     int          `json:"queue_size"`
	Limit    *rateLimiter `json:"rate_limiter_config,omitempty"`
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
	ID     string `json:"id"` // what the state of the device is called; a name that the program makes is another one when it resumes
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
	FDs    []int  `json:"fds,omitempty"` // in a file, where they say only how many come with the request
}

type restoreConfig struct {
	Source string        `json:"source_url"`
	NICs   []restoredNet `json:"net_fds,omitempty"`
}

type restoredNet struct {
	ID  string `json:"id"`
	FDs int    `json:"num_fds"`
}

type removedDevice struct {
	ID string `json:"id"`
}

type saveConfig struct {
	Destination string `json:"destination_url"`
}

type diskSize struct {
	ID   string `json:"id"`
	Size int64  `json:"desired_size"`
}

// setup is all that the program is told, in the order of the requests, and what it needs in its root. If Restore is not nil, it finds VM in a file.
type setup struct {
	VM      vmConfig       `json:"vm.create"`
	NICs    []netConfig    `json:"vm.add-net,omitempty"`
	Restore *restoreConfig `json:"vm.restore,omitempty"`
	files   []jail.RootedFile
}

// build turns a plan into requests. It is pure: the same plan gives the same requests. firmware is the path of the node's firmware, "" if there is
// none, and memory that of the memory of saved state.
func build(p hypervisor.Plan, firmware, memory string) (setup, error) {
	if !p.Boot.Direct() && len(p.Disks) == 0 {
		return setup{}, errdefs.Invalidf("VM %s has neither a kernel nor a disk to boot from", p.Name)
	}
	if err := check(p, firmware); err != nil {
		return setup{}, err
	}
	s := &setup{VM: vmConfig{
		CPUs: cpusConfig{Boot: p.CPUs, Max: p.CPUs}, Memory: memoryConfig{Size: p.Memory}, RNG: rngConfig{"/dev/urandom"},
		Balloon: &balloonConfig{OnOOM: true, Reporting: true}, Serial: consoleConfig{"Tty"}, Console: consoleConfig{"Off"}, Platform: &platformConfig{UUID: jail.UUID(p.ID)},
	}}
	if t := p.Topology; t != (vm.Topology{}) {
		s.VM.CPUs.Topology = &cpusTopology{Threads: t.Threads, Cores: t.Cores, Dies: 1, Packages: t.Sockets}
	}
	if p.Huge > 0 { // all of them at once, so that a guest never finds out that there are too few
		s.VM.Memory.Huge, s.VM.Memory.HugeSize, s.VM.Memory.Prefault = true, int64(p.Huge), true
	}
	if p.Agent != "" {
		s.VM.VSOCK = &vsockConfig{ID: "agent", CID: guestCID, Socket: filepath.Join(rootPrivate, agentSocket)}
	}
	if b := p.SMBIOS; b != nil {
		s.VM.Platform.Serial = b.Serial
		if b.UUID != "" {
			s.VM.Platform.UUID = b.UUID
		}
	}
	s.boot(p, firmware)
	fixed := 0
	for _, d := range p.Disks {
		id, at := diskID(fixed), diskPath(fixed)
		if d.Port != 0 {
			id, at = plugID(d), plugPath(d.Port)
		} else {
			fixed++
		}
		s.VM.Disks = append(s.VM.Disks, diskOf(id, at, d, queuesOf(p), p.DiskRate))
		s.place(jail.RootedFile{At: at, Path: d.Path, Root: d.Root, ReadOnly: d.ReadOnly})
	}
	for n, nic := range p.NICs {
		s.NICs = append(s.NICs, netOf(vm.PlaceOf(p.NICs, n), nic.MAC))
	}
	if p.Incoming != nil {
		s.resume(p, memory)
	}
	return *s, nil
}

// diskID is the name of the disk with the number n of those without a port.
func diskID(n int) string { return "disk" + strconv.Itoa(n) }

func nicID(place int) string { return "net" + strconv.Itoa(place) }

func diskPath(n int) string { return filepath.Join(rootDisks, strconv.Itoa(n)) }

func (s *setup) place(f jail.RootedFile) { s.files = append(s.files, f) }

// resume makes the machine one that resumes. It is described as the one that was saved, except for its memory, which is a file.
func (s *setup) resume(p hypervisor.Plan, memory string) {
	s.VM.Memory = memoryConfig{Zones: []zoneConfig{{ID: memoryZone, Size: p.Memory, File: memory, Shared: p.Incoming.Alone}}}
	s.Restore = &restoreConfig{Source: "file://" + rootRestore}
	for _, nic := range s.NICs {
		s.Restore.NICs = append(s.Restore.NICs, restoredNet{nic.ID, 1})
		nic.FDs = []int{-1}
		s.VM.NICs = append(s.VM.NICs, nic)
	}
	s.NICs = nil
	s.place(jail.RootedFile{At: restoreState, Path: p.Incoming.State, ReadOnly: true})
}

func (s *setup) boot(p hypervisor.Plan, firmware string) {
	if !p.Boot.Direct() {
		s.VM.Payload.Firmware = rootFirmware
		s.place(jail.RootedFile{At: rootFirmware, Path: firmware, ReadOnly: true})
		return
	}
	// The kernel is behind a link, which is removed when the guest runs: the program, which would start a guest again that resets, then ends.
	s.VM.Payload.Kernel, s.VM.Payload.Cmdline = filepath.Join(rootPrivate, kernelLink), hypervisor.KernelArgs
	if p.Boot.Cmdline != "" {
		s.VM.Payload.Cmdline += " " + p.Boot.Cmdline
	}
	if p.Incoming != nil { // it has all that in its memory
		return
	}
	s.place(jail.RootedFile{At: rootKernel, Path: p.Boot.Kernel, ReadOnly: true})
	if p.Boot.Initrd != "" {
		s.VM.Payload.Initrd = rootInitrd
		s.place(jail.RootedFile{At: rootInitrd, Path: p.Boot.Initrd, ReadOnly: true})
	}
}

func diskOf(id, at string, d vm.Disk, queues int, rate vm.DiskRate) diskConfig {
	return diskConfig{ID: id, Path: at, ReadOnly: d.ReadOnly, Serial: d.Serial, Type: "Raw", Queues: queues, Size: queueSize, Limit: limiter(rate)}
}

// queuesOf returns how many queues each disk of p has.
func queuesOf(p hypervisor.Plan) int { return min(p.CPUs, 4) }

func netOf(place int, mac string) netConfig {
	return netConfig{ID: nicID(place), MAC: mac, Queues: 2, Size: queueSize}
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
	case p.Memory%(1<<20) != 0:
		return errdefs.Unsupportedf("VM %s: %d bytes of memory are no multiple of 1 MiB, which Cloud Hypervisor needs; ask for one, or run the VM with the driver qemu", p.Name, p.Memory)
	case p.Huge > 0 && p.Memory%int64(p.Huge) != 0:
		return errdefs.Invalidf("VM %s: %d bytes of memory are no multiple of a huge page of %s", p.Name, p.Memory, p.Huge)
	case p.Incoming != nil && p.Paused:
		return errdefs.Invalidf("VM %s resumes from saved state, so it cannot start paused", p.Name)
	case p.Incoming != nil && p.Incoming.Feed != "":
		return errdefs.Unsupportedf("VM %s: Cloud Hypervisor resumes a guest only when all of its memory is here; clone it when its snapshot has been pulled", p.Name)
	case len(p.Disks) > maxDisks:
		return errdefs.Unsupportedf("VM %s has %d disks; Cloud Hypervisor can have %d of ours; run the VM with the driver qemu", p.Name, len(p.Disks), maxDisks)
	case len(p.NICs) > maxNICs:
		return errdefs.Unsupportedf("VM %s has %d network interfaces; Cloud Hypervisor can have %d of ours; run the VM with the driver qemu", p.Name, len(p.NICs), maxNICs)
	}
	if what := lacks(p); what != "" {
		return errdefs.Unsupportedf("VM %s: Cloud Hypervisor has no %s; run the VM with the driver qemu", p.Name, what)
	}
	if !p.Boot.Direct() && firmware == "" {
		return errdefs.Unsupportedf("VM %s boots by firmware, and this node has none for Cloud Hypervisor; name one by cloudHypervisor.firmware in cocoond's file (docs/hypervisors.md), or run the VM with the driver qemu", p.Name)
	}
	if err := p.Topology.Validate(p.CPUs); err != nil {
		return fmt.Errorf("VM %s: %w", p.Name, err)
	}
	return checkPlaces(p)
}

// checkPlaces checks each disk, and that no two disks or interfaces have the same place.
func checkPlaces(p hypervisor.Plan) error {
	ports, places := map[int]bool{}, map[int]bool{}
	for _, d := range p.Disks {
		if err := checkDisk(p.Name, d); err != nil {
			return err
		}
		if d.Port != 0 && ports[d.Port] {
			return errdefs.Invalidf("VM %s: two disks have the port %d", p.Name, d.Port)
		}
		ports[d.Port] = true
	}
	for n := range p.NICs {
		place := vm.PlaceOf(p.NICs, n)
		if place < 0 || places[place] {
			return errdefs.Invalidf("VM %s: interface %d has the invalid place %d", p.Name, n, place)
		}
		places[place] = true
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
		{p.Incoming != nil && p.Huge > 0, "saved state in huge pages"},
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
		{p.SMBIOS != nil && p.SMBIOS.Chassis != (vm.Chassis{}), "description of a chassis"},
	} {
		if l.asked {
			return l.what
		}
	}
	return ""
}

func checkDisk(name string, d vm.Disk) error {
	switch {
	case d.Format != vm.DiskRaw && d.Format != vm.DiskQCOW2:
		return errdefs.Invalidf("VM %s: disk %s has the unknown format %q", name, d.Path, d.Format)
	case d.Format == vm.DiskQCOW2 || d.Backing != nil:
		return errdefs.Unsupportedf("VM %s: disk %s is a qcow2, and the driver of Cloud Hypervisor has raw disks only; run the VM with the driver qemu", name, d.Path)
	case len(d.Serial) > maxSerial:
		return errdefs.Invalidf("VM %s: disk serial %q is longer than %d bytes", name, d.Serial, maxSerial)
	case d.Port < 0 || d.Port > vm.MaxPort || d.Port > 0 && d.Serial == "":
		return errdefs.Invalidf("VM %s: disk %s with the serial %q has the invalid port %d", name, d.Path, d.Serial, d.Port)
	}
	return nil
}
