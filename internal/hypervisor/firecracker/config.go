package firecracker

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Names of the files in Plan.Dir.
const (
	programLog = "firecracker.log"
	errorLog   = "firecracker.err" // what it says when it cannot log
	memoryLog  = "memory.log"      // of the pager that gives memory that comes later
)

// Names of the sockets in rootPrivate.
const (
	apiSocket    = "api.sock"
	agentSocket  = "agent.sock"
	memorySocket = "memory.sock" // on which the process says where its memory is that comes later
)

// Paths in the root of the process.
const (
	rootPrivate = "/run" // the folder of its sockets; the process can write to it
	rootLog     = "/log"
	rootKernel  = "/boot/kernel"
	rootInitrd  = "/boot/initrd"
	rootDisks   = "/disks"

	rootState       = "/saved/state" // from which the guest resumes
	rootSavedState  = "/save/state"  // places of what is saved
	rootSavedMemory = "/save/memory"
)

const (
	maxCPUs   = 32
	maxDisks  = 20 // with 6 interfaces and the other devices, the 31 places of its bus
	maxNICs   = 6
	guestCID  = 3    // of the guest's virtio socket; each process has addresses of its own
	maxArgs   = 2048 // bytes of a kernel's command line
	maxSerial = 20
)

// kernelArgs come after hypervisor.KernelArgs and those of the plan. The keyboard has no LEDs, no mouse and no other ports, which the kernel need not look for. Its
// Ctrl+Alt+Del is the power button of this machine, which process 1 gets as SIGINT. See end.go for reboot=t.
const kernelArgs = "8250.nr_uarts=1 i8042.noaux i8042.nomux i8042.dumbkbd sysctl.kernel.ctrl-alt-del=0 reboot=t " + vm.ArgOff

// The types of the requests, as far as the driver uses them.

type machineConfig struct {
	CPUs int   `json:"vcpu_count"`
	MiB  int64 `json:"mem_size_mib"`
	SMT  bool  `json:"smt"`
}

type bootSource struct {
	Kernel string `json:"kernel_image_path"`
	Initrd string `json:"initrd_path,omitempty"`
	Args   string `json:"boot_args"`
}

type driveConfig struct {
	ID       string       `json:"drive_id"`
	Path     string       `json:"path_on_host"`
	Root     bool         `json:"is_root_device"`
	ReadOnly bool         `json:"is_read_only"`
	Cache    string       `json:"cache_type"`
	Limit    *rateLimiter `json:"rate_limiter,omitempty"`
}

// driveFile makes the program look at the file of a drive again.
type driveFile struct {
	ID   string `json:"drive_id"`
	Path string `json:"path_on_host"`
}

type netConfig struct {
	ID  string `json:"iface_id"`
	MAC string `json:"guest_mac,omitempty"`
	Tap string `json:"host_dev_name"`
}

type vsockConfig struct {
	CID    int    `json:"guest_cid"`
	Socket string `json:"uds_path"`
}

type balloonConfig struct {
	MiB       int64 `json:"amount_mib"`
	OnOOM     bool  `json:"deflate_on_oom"`
	Reporting bool  `json:"free_page_reporting"`
}

type action struct {
	Type string `json:"action_type"`
}

type runState struct {
	State string `json:"state"`
}

type saveConfig struct {
	Type   string `json:"snapshot_type"`
	State  string `json:"snapshot_path"`
	Memory string `json:"mem_file_path"`
}

type loadConfig struct {
	State  string        `json:"snapshot_path"`
	Memory memoryConfig  `json:"mem_backend"`
	NICs   []netOverride `json:"network_overrides,omitempty"`
	Resume bool          `json:"resume_vm"`
}

type memoryConfig struct {
	Type string `json:"backend_type"`
	Path string `json:"backend_path"`
}

type netOverride struct {
	ID  string `json:"iface_id"`
	Tap string `json:"host_dev_name"`
}

// request is one call of the API.
type request struct {
	Verb string `json:"verb"`
	Path string `json:"path"`
	Body any    `json:"body"`
}

// setup is all that the program is told before its guest runs, and what it needs in its root. Taps come between machine and last.
type setup struct {
	machine []request
	last    []request
	files   []jail.RootedFile
}

// build turns a plan into requests. It is pure: the same plan gives the same requests. memory is the path of the memory of saved state.
func build(p hypervisor.Plan, memory string) (setup, error) {
	if err := check(p); err != nil {
		return setup{}, err
	}
	var s setup
	for n, d := range p.Disks {
		s.files = append(s.files, jail.RootedFile{At: diskPath(n), Path: d.Path, Root: d.Root, ReadOnly: d.ReadOnly})
	}
	if p.Incoming != nil {
		s.resume(p, memory)
		return s, nil
	}
	return s, s.boot(p)
}

func diskPath(n int) string  { return filepath.Join(rootDisks, strconv.Itoa(n)) }
func diskID(n int) string    { return "disk" + strconv.Itoa(n) }
func nicID(place int) string { return "net" + strconv.Itoa(place) }

// resume makes the program load saved state. Drives and sockets are where they were when it was saved.
func (s *setup) resume(p hypervisor.Plan, memory string) {
	s.files = append(s.files, jail.RootedFile{At: rootState, Path: p.Incoming.State, ReadOnly: true})
	load := loadConfig{State: rootState, Memory: memoryConfig{"File", memory}}
	if p.Incoming.Feed != "" {
		load.Memory = memoryConfig{"Uffd", filepath.Join(rootPrivate, memorySocket)}
	}
	for n, nic := range p.NICs {
		load.NICs = append(load.NICs, netOverride{nicID(vm.PlaceOf(p.NICs, n)), nic.Tap})
	}
	s.last = []request{{"PUT", "/snapshot/load", load}}
	for n, d := range p.Disks {
		if slices.Contains(p.Incoming.Grown, d.Serial) {
			s.last = append(s.last, grown(n))
		}
		if none := (vm.DiskRate{}); p.DiskRate != none || p.Incoming.DiskRate != none { // state from elsewhere may have other limits than it says
			s.last = append(s.last, limited(n, p.DiskRate))
		}
	}
}

// agentVSOCK is the virtio socket of a guest with an agent.
func agentVSOCK() vsockConfig { return vsockConfig{guestCID, filepath.Join(rootPrivate, agentSocket)} }

// grown makes the program look how large a disk is, and tell its guest.
func grown(n int) request {
	return request{"PATCH", "/drives/" + diskID(n), driveFile{diskID(n), diskPath(n)}}
}

func (s *setup) boot(p hypervisor.Plan) error {
	put := func(path string, body any) { s.machine = append(s.machine, request{"PUT", path, body}) }
	put("/machine-config", machineConfig{CPUs: p.CPUs, MiB: p.Memory >> 20})
	args := []string{hypervisor.KernelArgs}
	b := bootSource{Kernel: rootKernel}
	s.files = append(s.files, jail.RootedFile{At: rootKernel, Path: p.Boot.Kernel, ReadOnly: true})
	if p.Boot.Initrd != "" {
		b.Initrd = rootInitrd
		s.files = append(s.files, jail.RootedFile{At: rootInitrd, Path: p.Boot.Initrd, ReadOnly: true})
	}
	if p.Boot.Cmdline != "" {
		args = append(args, p.Boot.Cmdline)
	}
	args = append(args, kernelArgs)
	if len(p.Disks) > 0 {
		var serials []string
		for _, d := range p.Disks {
			serials = append(serials, d.Serial)
		}
		args = append(args, vm.ArgDisks+strings.Join(serials, ","))
	}
	if b.Args = strings.Join(args, " "); len(b.Args) > maxArgs {
		return errdefs.Invalidf("VM %s: the arguments of its kernel have %d bytes, and the kernel takes %d", p.Name, len(b.Args), maxArgs)
	}
	put("/boot-source", b)
	for n, d := range p.Disks {
		put("/drives/"+diskID(n), driveConfig{ID: diskID(n), Path: diskPath(n), ReadOnly: d.ReadOnly, Cache: "Writeback", Limit: limiter(p.DiskRate)})
	}
	if p.Agent != "" {
		put("/vsock", agentVSOCK())
	}
	put("/balloon", balloonConfig{OnOOM: true, Reporting: true})
	put("/entropy", struct{}{})
	for n, nic := range p.NICs {
		id := nicID(vm.PlaceOf(p.NICs, n))
		s.last = append(s.last, request{"PUT", "/network-interfaces/" + id, netConfig{id, nic.MAC, nic.Tap}})
	}
	return nil
}

// check refuses what Firecracker, or this driver, cannot do.
func check(p hypervisor.Plan) error {
	switch {
	case p.ID == "" || p.Dir == "":
		return errdefs.Invalidf("plan of VM %q has no id or no folder", p.Name)
	case p.CPUs < 1 || p.CPUs > vm.MaxCPUs:
		return errdefs.Invalidf("VM %s: invalid number of CPUs %d; use 1 to %d", p.Name, p.CPUs, maxCPUs)
	case p.CPUs > maxCPUs:
		return errdefs.Unsupportedf("VM %s has %d CPUs; Firecracker can have %d; run the VM with the driver qemu", p.Name, p.CPUs, maxCPUs)
	case p.Memory < 1<<20:
		return errdefs.Invalidf("VM %s: %d bytes of memory are less than 1 MiB", p.Name, p.Memory)
	case p.Memory%(1<<20) != 0:
		return errdefs.Unsupportedf("VM %s: %d bytes of memory are no multiple of 1 MiB, which Firecracker needs; ask for one, or run the VM with the driver qemu", p.Name, p.Memory)
	case p.Incoming != nil && p.Paused:
		return errdefs.Invalidf("VM %s resumes from saved state, so it cannot start paused", p.Name)
	case p.Incoming != nil && p.Incoming.Feed != "" && p.Incoming.Base != "":
		return errdefs.Invalidf("VM %s resumes while its memory is loaded, so that cannot be a delta", p.Name)
	case len(p.Disks) > maxDisks:
		return errdefs.Unsupportedf("VM %s has %d disks; Firecracker can have %d of ours; run the VM with the driver qemu", p.Name, len(p.Disks), maxDisks)
	case len(p.NICs) > maxNICs:
		return errdefs.Unsupportedf("VM %s has %d network interfaces; Firecracker can have %d of ours; run the VM with the driver qemu", p.Name, len(p.NICs), maxNICs)
	}
	if what := lacks(p); what != "" {
		return errdefs.Unsupportedf("VM %s: Firecracker has no %s; run the VM with the driver qemu", p.Name, what)
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
		{!p.Boot.Direct(), "firmware, so it boots kernels of ours only"},
		{p.Huge > 0, "huge pages that another program cannot take: it does not reserve them"},
		{p.Graphics, "screen"},
		{p.Topology != (vm.Topology{}), "topology of CPUs to choose"},
		{p.Growth != (vm.Growth{}), "CPUs or memory that grow with this driver"},
		{p.CPU.Model != "" || len(p.CPU.Features) > 0 || p.CPU.HideKVM || len(p.CPU.HyperV.All()) > 0 || p.CPU.HyperV.Spinlocks > 0 || p.CPU.HyperV.VendorID != "", "other CPU than the host's"},
		{p.Clock != (vm.Clock{}), "other clock than one of UTC"},
		{p.UEFI != (vm.UEFI{}), "UEFI"},
		{p.SMBIOS != nil, "description of the machine (SMBIOS)"},
		{p.TPM != "", "TPM"},
		{p.VSOCK, "virtio socket that the host's programs reach (VSOCK)"},
		{p.Watchdog != "", "watchdog"},
		{p.Panic != "", "device for panics"},
		{p.Drive != nil, "drive for CD-ROMs"},
		{len(p.Shares) > 0, "shared folders"},
		{len(p.Devices) > 0, "disks on other buses than virtio"},
		{slices.ContainsFunc(p.Models, func(m vm.NICModel) bool { return m != "" && m != vm.NICVirtio }), "network interfaces that are not virtio"},
		{slices.ContainsFunc(p.NICs, func(n vm.NIC) bool { return n.LinkDown }), "network interfaces without a carrier"},
		{slices.ContainsFunc(p.Disks, func(d vm.Disk) bool { return d.Port != 0 }), "disks that are plugged with this driver"},
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
		return errdefs.Unsupportedf("VM %s: disk %s is a qcow2, and Firecracker reads raw disks only; run the VM with the driver qemu", name, d.Path)
	case len(d.Serial) > maxSerial:
		return errdefs.Invalidf("VM %s: disk serial %q is longer than %d bytes", name, d.Serial, maxSerial)
	case strings.ContainsFunc(d.Serial, func(r rune) bool { return r <= ' ' || r > '~' || r == ',' || r == '"' }): // it is an argument of the kernel
		return errdefs.Unsupportedf("VM %s: disk serial %q has a character that Firecracker cannot tell the guest; run the VM with the driver qemu", name, d.Serial)
	}
	return nil
}
