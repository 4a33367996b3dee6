package qemu

import (
	"encoding/json"
	"fmt"
	"strconv"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/tsc"
	"cocoonstack.io/cocoon/internal/vm"
)

// Layout of the root bus. Slots are stable, so that a snapshot finds its devices at the same addresses.
const (
	slotBasic   = 0x01                        // rng, balloon, serial, screen
	slotDisks   = 0x02                        // 8 functions in each slot up to slotPorts
	slotPorts   = 0x10                        // root ports, 8 functions in each slot up to the chipset's own at 0x1f
	maxDisks    = (slotPorts - slotDisks) * 8 // without those that are plugged later
	maxPorts    = 8 * 8
	maxBacking  = 64
	maxPortName = 64
	fixedSCSI   = "scsi1" // the controller of disks on SCSI, which are there when the guest boots
	usb         = "xhci"  // the controller of disks on USB
	driveID     = "drive" // the drive for CD-ROMs
	firstFileFd = 3       // 0, 1 and 2 are stdin, stdout and stderr
)

// facts are the inputs of a command line that come from the host and not from the plan.
type facts struct {
	binary   string
	machine  string // versioned type, so that a saved guest gets the same machine again
	uuid     string
	accel    vm.Accel // kvm or tcg
	tbSize   int      // MiB of TCG code cache
	tscKHz   int      // frequency of an emulated guest's time stamp counter; 0 if unknown
	spare    int      // root ports left free for hot-plug
	qboot    string   // path of the small firmware for direct kernel boot, "" if the host does not have it
	uid      uint32   // of the user that the process runs as
	east     int      // seconds that the guest's hardware clock is before UTC
	ovmfCode string   // UEFI guests: path of the firmware
	ovmfVars string   // UEFI guests: path of the VM's own copy of the variable store
}

// fileKind says how the driver must open a file that the process inherits.
type fileKind string

const (
	fileRead   fileKind = "read"
	fileWrite  fileKind = "write"
	fileLog    fileKind = "log"    // append, created if missing
	fileSocket fileKind = "listen" // a listening unix socket
	fileTap    fileKind = "tap"
	fileMemory fileKind = "memory" // the guest's saved memory, loaded by the driver
	fileVSOCK  fileKind = "vsock"
	fileShare  fileKind = "share" // a connection to the server of a shared folder or to a TPM
)

// file is one inherited descriptor. The process itself opens no path below the state folder; it may not have the permission.
type file struct {
	kind fileKind
	path string // for a tap: its name; for a share: its tag
	nic  int    // index into Plan.NICs, taps only
	root string // of a file of the node: the folder below which path has no symbolic links
}

// command is the command to run: args[0] is the binary, files become the descriptors 3, 4, …
type command struct {
	args  []string
	files []file
	state int // descriptor of the saved state; 0 when the guest boots

	smallPages bool   // no huge pages
	timezone   string // TZ of the process; "" is UTC
}

// Names of the files in Plan.Dir.
const (
	qmpSocket     = "qmp.sock"
	consoleSocket = "console.sock"
	agentSocket   = "agent.sock"
	consoleLog    = "console.log"
	qemuLog       = "qemu.log"
)

// build turns a plan into a command line. It is pure: the same plan and facts give the same command.
func build(p hypervisor.Plan, f facts) (command, error) {
	if err := check(p); err != nil {
		return command{}, err
	}
	if err := checkNICs(p, f.spare); err != nil {
		return command{}, err
	}
	c := &command{args: []string{f.binary}}
	c.identity(p, f)
	c.machine(p, f)
	if err := c.boot(p, f); err != nil {
		return command{}, err
	}
	c.channels(p)
	c.basics(p)
	if p.Graphics {
		c.graphics()
	}
	if p.Watchdog != "" {
		c.watchdog(p.Watchdog)
	}
	c.panics(p.Panic)
	c.growing(p)
	if p.TPM != "" {
		c.tpm()
	}
	if p.VSOCK {
		c.vsock(f.uid)
	}
	fixed, plugged := split(p.Disks)
	buses := map[vm.DiskBus]int{}
	for i, d := range fixed {
		c.disk(i, d, p.Devices[d.Serial], p.Boot.Kernel == "", diskQueues(p), buses)
	}
	if p.Drive != nil {
		c.drive(*p.Drive)
	}
	for i, s := range p.Shares {
		c.share(i, len(fixed)+i, s)
	}
	c.ports(width(p) + f.spare)
	c.live(p)
	for i := range p.NICs {
		c.nic(p, i)
	}
	c.plugged(width(p), plugged)
	if p.Incoming != nil {
		c.state = c.fd(file{kind: fileRead, path: p.Incoming.State})
		c.add("-incoming", "defer")
	}
	if p.Incoming != nil || p.Paused || waits(p) {
		c.add("-S") // the guest's CPUs do not run
	}
	return *c, nil
}

func check(p hypervisor.Plan) error {
	fixed, plugged := split(p.Disks)
	switch {
	case p.ID == "" || p.Dir == "":
		return errdefs.Invalidf("plan of VM %q has no id or no folder", p.Name)
	case p.CPUs < 1 || p.CPUs > vm.MaxCPUs:
		return errdefs.Invalidf("VM %s: invalid number of CPUs %d; use 1 to %d", p.Name, p.CPUs, vm.MaxCPUs)
	case p.Memory < 1<<20:
		return errdefs.Invalidf("VM %s: %d bytes of memory are less than 1 MiB", p.Name, p.Memory)
	case len(fixed)+len(p.Shares) > maxDisks:
		return errdefs.Invalidf("VM %s has %d disks and %d shared folders; at most %d are possible", p.Name, len(fixed), len(p.Shares), maxDisks)
	case p.Paused && p.Incoming != nil:
		return errdefs.Invalidf("VM %s resumes from saved state, so it cannot start paused", p.Name)
	case p.Incoming != nil && p.Incoming.Feed != "":
		return errdefs.Unsupportedf("VM %s: QEMU resumes a guest only when all of its memory is here", p.Name)
	case p.TPM != "" && p.Incoming != nil:
		return errdefs.Invalidf("VM %s has a TPM, so it cannot resume from saved state", p.Name)
	case p.VSOCK && p.Incoming != nil:
		return errdefs.Invalidf("VM %s has a virtio socket, so it cannot resume from saved state", p.Name)
	case p.Huge > 0 && p.Incoming != nil:
		return errdefs.Invalidf("VM %s has huge pages, so it cannot resume from saved state", p.Name)
	case p.Incoming == nil && p.Growth.Plugged != 0:
		return errdefs.Invalidf("VM %s boots with all its memory, so none of it is plugged", p.Name)
	case p.Huge > 0 && p.Growth.Memory > 0:
		return errdefs.Invalidf("VM %s has huge pages, so its memory cannot grow", p.Name)
	case p.Huge > 0 && p.Memory%int64(p.Huge) != 0:
		return errdefs.Invalidf("VM %s: %d bytes of memory are no multiple of a huge page of %s", p.Name, p.Memory, p.Huge)
	case len(plugged) > 0 && width(p) >= maxPorts:
		return errdefs.Invalidf("VM %s has %d network interfaces, which leave no port for disks that are plugged while it runs", p.Name, len(p.NICs))
	case len(p.NICs) > maxPorts:
		return errdefs.Invalidf("VM %s has %d network interfaces; at most %d are possible", p.Name, len(p.NICs), maxPorts)
	case p.Incoming != nil && (p.Incoming.State == "" || p.Incoming.Memory == ""):
		return errdefs.Invalidf("VM %s: saved state needs two files: one of memory and one of devices", p.Name)
	case len(p.Agent) > maxPortName:
		return errdefs.Invalidf("VM %s: the agent's port name %q is longer than %d bytes", p.Name, p.Agent, maxPortName)
	case p.Boot.Kernel == "" && len(fixed) == 0:
		return errdefs.Invalidf("VM %s has neither a kernel nor a disk to boot from", p.Name)
	}
	if err := checkShares(p); err != nil {
		return err
	}
	if err := p.Topology.Validate(p.CPUs); err != nil {
		return fmt.Errorf("VM %s: %w", p.Name, err)
	}
	if err := p.Growth.Validate(vm.Size{CPUs: p.CPUs, Memory: p.Memory}, p.Topology); err != nil {
		return fmt.Errorf("VM %s: %w", p.Name, err)
	}
	ports, used := map[int]bool{}, map[vm.DiskBus]int{}
	if p.Drive != nil {
		if p.Boot.Direct() {
			return errdefs.Invalidf("VM %s: a guest of our kernel cannot have a drive for CD-ROMs", p.Name)
		}
		used[vm.DiskSATA]++
	}
	for _, d := range p.Disks {
		if err := checkDisk(p.Name, d, 0); err != nil {
			return err
		}
		dev := p.Devices[d.Serial]
		if err := dev.Validate(); err != nil {
			return errdefs.Invalidf("VM %s: disk %s: %w", p.Name, d.Path, err)
		}
		used[dev.Bus]++
		if most := vm.BusRoom(dev.Bus); most > 0 && (used[dev.Bus] > most || p.Boot.Direct()) {
			return errdefs.Invalidf("VM %s: disk %s cannot be on %s", p.Name, d.Path, dev.Bus)
		}
		if d.Port != 0 && ports[d.Port] {
			return errdefs.Invalidf("VM %s: two disks have the port %d", p.Name, d.Port)
		}
		ports[d.Port] = true
	}
	return nil
}

func checkDisk(name string, d vm.Disk, depth int) error {
	switch {
	case depth > maxBacking:
		return errdefs.Invalidf("VM %s: disk %s has more than %d layers below it", name, d.Path, maxBacking)
	case d.Format != vm.DiskRaw && d.Format != vm.DiskQCOW2:
		return errdefs.Invalidf("VM %s: disk %s has the unknown format %q", name, d.Path, d.Format)
	case d.Backing != nil && d.Format != vm.DiskQCOW2:
		return errdefs.Invalidf("VM %s: disk %s has format %s, which cannot have a backing disk", name, d.Path, d.Format)
	case d.Port < 0 || d.Port > vm.MaxPort || d.Port > 0 && d.Serial == "":
		return errdefs.Invalidf("VM %s: disk %s with the serial %q has the invalid port %d", name, d.Path, d.Serial, d.Port)
	case len(d.Serial) > 20:
		return errdefs.Invalidf("VM %s: disk serial %q is longer than 20 bytes", name, d.Serial)
	case d.Backing != nil:
		return checkDisk(name, *d.Backing, depth+1)
	}
	return nil
}

func (c *command) add(args ...string) { c.args = append(c.args, args...) }

// fd makes the process inherit f and returns its number.
func (c *command) fd(f file) int {
	c.files = append(c.files, f)
	return firstFileFd + len(c.files) - 1
}

// fdset is fd for files that QEMU opens through its block or log layer. It returns a name that QEMU can open repeatedly.
func (c *command) fdset(f file) string {
	n := strconv.Itoa(c.fd(f))
	c.add("-add-fd", "fd="+n+",set="+n)
	return "/dev/fdset/" + n
}

// plain is fd for files that QEMU opens with a plain open(2). The process's user must be able to read the inode, but needs no
// access to the path.
func (c *command) plain(f file) string {
	return "/proc/self/fd/" + strconv.Itoa(c.fd(f))
}

// props describe a device or block node in QEMU's JSON notation, which needs no extra quoting.
type props map[string]any

func (c *command) device(p props)   { c.add("-device", p.json()) }
func (c *command) blockdev(p props) { c.add("-blockdev", p.json()) }

func (p props) json() string {
	b, err := json.Marshal(p) // keys are sorted
	if err != nil {
		panic(err) // strings, numbers and booleans always marshal
	}
	return string(b)
}

// at places a device on the root bus.
func (p props) at(slot, function int) props {
	p["bus"], p["addr"], p["multifunction"] = "pcie.0", fmt.Sprintf("%#x.%#x", slot, function), true
	return p
}

func (c *command) identity(p hypervisor.Plan, f facts) {
	c.add("-name", "guest="+p.Name+",debug-threads=on", "-uuid", f.uuid)
	for _, table := range smbios(p.SMBIOS) {
		c.add("-smbios", table)
	}
	c.add("-nodefaults", "-no-user-config", "-display", "none", "-msg", "timestamp=on")
	c.add("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
}

func (c *command) machine(p hypervisor.Plan, f facts) {
	machine := f.machine + ",memory-backend=mem,dump-guest-core=off"
	switch {
	case p.Boot.Direct():
		machine += ",sata=off,smbus=off"
	case p.Boot.Firmware == vm.FirmwareUEFI:
		machine += ",pflash0=efi-code,pflash1=efi-vars"
		if p.UEFI.SecureBoot {
			machine += ",smm=on"
		}
	default:
		machine += ",graphics=off" // makes SeaBIOS and boot loaders use the serial console
	}
	mib := atBoot(p) >> 20
	accel := "tcg,tb-size=" + strconv.Itoa(f.tbSize)
	if f.accel == vm.AccelKVM {
		accel = "kvm"
	}
	if p.Clock.NoHPET {
		machine += ",hpet=off"
	}
	smp := fmt.Sprintf("cpus=%d,sockets=1", p.CPUs)
	if t := p.Topology; t != (vm.Topology{}) {
		smp = fmt.Sprintf("cpus=%d,sockets=%d,cores=%d,threads=%d", p.CPUs, max(t.Sockets, p.Growth.Sockets), t.Cores, t.Threads)
	}
	if n := p.Growth.Sockets; n > 0 {
		smp += fmt.Sprintf(",maxcpus=%d", n*p.Topology.Cores*p.Topology.Threads)
	}
	c.add("-machine", machine, "-accel", accel, "-cpu", cpuArg(p.CPU, f.accel), "-smp", smp)
	c.clock(p.Clock, f.east)
	c.add("-m", fmt.Sprintf("size=%dM%s", mib, maxMemory(p)), "-object")
	if p.Huge > 0 { // all of them at once, so that a guest never finds out that there are too few
		c.add(fmt.Sprintf("memory-backend-memfd,id=mem,size=%dM,share=on,hugetlb=on,hugetlbsize=%d,prealloc=on", mib, p.Huge))
		return
	}
	if len(p.Shares) > 0 && p.Incoming == nil { // their servers read and write the guest's memory
		c.add(fmt.Sprintf("memory-backend-memfd,id=mem,size=%dM,share=on", mib))
		return
	}
	if p.Incoming == nil {
		c.add(fmt.Sprintf("memory-backend-ram,id=mem,size=%dM", mib))
		return
	}
	share := "off" // copy-on-write
	if p.Incoming.Alone {
		share = "on"
	}
	// A clone shares its memory. Its private memory is mostly translated code, for which QEMU would ask for huge pages.
	c.smallPages = f.accel == vm.AccelTCG && !p.Incoming.Alone
	path := c.plain(file{kind: fileMemory, path: p.Incoming.Memory})
	c.add(fmt.Sprintf("memory-backend-file,id=mem,size=%dM,share=%s,mem-path=%s", mib, share, path))
}

// boot chooses between our kernel and the disk's own boot loader, and sets the effect of a reset: it ends an OCI guest. After a
// power-off the process stays paused until the driver has recorded that. So the cause of the end is not lost if the daemon is
// away at that moment.
func (c *command) boot(p hypervisor.Plan, f facts) error {
	if !p.Boot.Direct() {
		c.add("-action", "shutdown=pause,reboot=reset")
		if p.Boot.Kernel != "" { // after a reset the firmware reads it again
			c.kernel(p.Boot, p.Boot.Cmdline)
		}
		return c.firmware(p, f)
	}
	c.add("-action", "shutdown=pause,reboot=shutdown")
	if f.qboot != "" {
		c.add("-bios", f.qboot)
	}
	if p.Incoming != nil && !p.Incoming.Booting {
		return nil // the kernel is already in memory, and a reset ends the guest
	}
	args := hypervisor.KernelArgs + tscArgs(f)
	if p.Boot.Cmdline != "" {
		args += " " + p.Boot.Cmdline
	}
	c.kernel(p.Boot, args)
	return nil
}

// kernel makes QEMU load the kernel of b.
func (c *command) kernel(b vm.Boot, args string) {
	c.add("-kernel", c.plain(file{kind: fileRead, path: b.Kernel}))
	if b.Initrd != "" {
		c.add("-initrd", c.plain(file{kind: fileRead, path: b.Initrd}))
	}
	if args != "" {
		c.add("-append", args)
	}
}

// tscArgs tell the kernel that its time stamp counter is its clock.
func tscArgs(f facts) string {
	if f.accel != vm.AccelTCG {
		return " tsc=reliable"
	}
	return tsc.Args(f.tscKHz)
}

func (c *command) firmware(p hypervisor.Plan, f facts) error {
	switch p.Boot.Firmware {
	case "", vm.FirmwareBIOS:
		c.add("-boot", "strict=on")
	case vm.FirmwareUEFI:
		if f.ovmfCode == "" {
			what := "OVMF firmware"
			if p.UEFI.SecureBoot {
				what = "OVMF firmware with Microsoft's keys for Secure Boot"
			}
			return errdefs.Unsupportedf("VM %s needs UEFI, but this host has no %s; run `apt-get install ovmf`", p.Name, what)
		}
		code := c.fdset(file{kind: fileRead, path: f.ovmfCode})
		c.blockdev(props{"driver": "raw", "node-name": "efi-code", "read-only": true, "file": fileNode(code, true)})
		vars := c.fdset(file{kind: fileWrite, path: f.ovmfVars})
		c.blockdev(props{"driver": "raw", "node-name": "efi-vars", "file": fileNode(vars, false)})
		if p.UEFI.SecureBoot { // only the firmware can write to the variables, in its own mode of the CPU
			c.add("-global", "driver=cfi.pflash01,property=secure,value=on", "-global", "ICH9-LPC.disable_s3=1")
		}
	default:
		return errdefs.Invalidf("VM %s: invalid firmware %q; use bios or uefi", p.Name, p.Boot.Firmware)
	}
	return nil
}

func fileNode(path string, readOnly bool) props {
	return props{"driver": "file", "filename": path, "read-only": readOnly, "discard": "unmap"}
}

// diskFile is fileNode for the lowest node of d. QEMU has a driver of its own for block devices. Their writes do not go through the host's
// cache: it would accept them, and a device without space, such as one of a thin pool, would lose them later. Neither do those to a disk
// that VMs share: a guest acts on what another one has written, so that must not be lost with the node.
func diskFile(path string, d vm.Disk) props {
	n := fileNode(path, d.ReadOnly)
	if d.Device {
		n["driver"] = "host_device"
	}
	if d.Device || d.Shared {
		n["cache"] = props{"direct": true}
	}
	return n
}

// channels are the host's connections to the VM: QMP, the serial console and the port of the guest's agent.
func (c *command) channels(p hypervisor.Plan) {
	c.socket("qmp", qmpSocket, "")
	c.add("-mon", "chardev=qmp,mode=control")
	c.socket("console", consoleSocket, ",logappend=on,logfile="+c.fdset(file{kind: fileLog, path: consoleLog}))
	c.add("-serial", "chardev:console")
	if p.Agent != "" {
		c.socket("agent", agentSocket, "")
	}
}

func (c *command) socket(id, name, more string) {
	fd := c.fd(file{kind: fileSocket, path: name})
	c.add("-chardev", fmt.Sprintf("socket,id=%s,fd=%d,server=on,wait=off%s", id, fd, more))
}

func (c *command) basics(p hypervisor.Plan) {
	c.add("-object", "rng-builtin,id=rng")
	c.device(props{"driver": "virtio-rng-pci", "rng": "rng", "id": "rng0"}.at(slotBasic, 0))
	c.device(props{"driver": "virtio-balloon-pci", "id": "balloon0", "deflate-on-oom": true}.at(slotBasic, 1))
	c.device(props{"driver": "virtio-serial-pci", "id": "serial0", "max_ports": 4}.at(slotBasic, 2))
	if p.Agent != "" {
		c.device(props{"driver": "virtserialport", "bus": "serial0.0", "nr": 1, "chardev": "agent", "name": p.Agent, "id": "agent0"})
	}
}

// watchdog gives the guest a timer, and says what happens when it expires.
func (c *command) watchdog(w vm.Watchdog) {
	c.device(props{"driver": "i6300esb", "id": "watchdog0"}.at(slotBasic, 4))
	c.add("-action", "watchdog="+string(w))
}
