package vm

import (
	"maps"
	"math/bits"
	"regexp"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Hardware is what the machine of a disk guest is like beyond its CPUs, memory and firmware. The zero value is the usual machine.
type Hardware struct {
	Topology Topology              `json:"topology,omitzero"`
	CPU      CPU                   `json:"cpu,omitzero"`
	Clock    Clock                 `json:"clock,omitzero"`
	UEFI     UEFI                  `json:"uefi,omitzero"`
	TPM      TPM                   `json:"tpm,omitempty"`
	Keep     string                `json:"keep,omitempty"` // what is persistent of UEFI and TPM outlives the VM on the node, for the next one of its owner with its name and this key
	Watchdog Watchdog              `json:"watchdog,omitempty"`
	Panic    Panic                 `json:"panic,omitempty"`
	Disks    map[string]DiskDevice `json:"disks,omitempty"` // by the name of a volume that is a disk, DiskOfImage or DiskOfSeed
	NICs     []NICModel            `json:"nics,omitempty"`  // in the order of the interfaces; those beyond are virtio

	// HugePages are the pages of the guest's memory, if they are huge: the node has set them aside. A VM with huge pages cannot be saved.
	HugePages HugePages `json:"huge_pages,omitempty"`

	// Growth is how far the guest can grow while it runs.
	Growth Growth `json:"growth,omitzero"`

	// Kernel is what the guest boots instead of a disk; nil: it boots from a disk.
	Kernel *Kernel `json:"kernel,omitempty"`

	// VSOCK says that the guest has a virtio socket, by which it and programs of the node reach each other. A VM with one cannot be saved.
	VSOCK bool `json:"vsock,omitempty"`

	// Windows says that the guest is Windows: what is left open is then as in windows.go, and the VM has a drive for the CD-ROM of drivers.
	Windows bool `json:"windows,omitempty"`
}

// Usual reports whether h asks for nothing.
func (h Hardware) Usual() bool {
	return h.Topology == Topology{} && h.CPU.empty() && h.Clock == Clock{} && h.UEFI == UEFI{} && h.TPM == "" && h.Keep == "" && h.Watchdog == "" && h.Panic == "" && len(h.Disks) == 0 && len(h.NICs) == 0 && !h.Windows && h.HugePages == 0 && h.Growth == Growth{} && h.Kernel == nil && !h.VSOCK
}

// onlyGrows reports whether h asks for nothing but that the guest can grow.
func (h Hardware) onlyGrows() bool {
	h.Topology, h.Growth = Topology{}, Growth{}
	return h.Usual()
}

// UEFI says what the firmware of a guest that boots by UEFI is like.
type UEFI struct {
	Persistent bool `json:"persistent,omitempty"`  // its variables stay as long as the VM, or longer (Hardware.Keep); otherwise each boot by Cocoon begins with new ones
	SecureBoot bool `json:"secure_boot,omitempty"` // it starts only what somebody has signed whom its variables name: Microsoft
}

// TPM is a TPM 2.0 of a guest. "" is none.
type TPM string

// The kinds of TPMs.
const (
	TPMEphemeral  TPM = "ephemeral"  // each start by Cocoon begins with an empty one
	TPMPersistent TPM = "persistent" // its state stays as long as the VM, or longer (Hardware.Keep)
)

func (t TPM) validate() error {
	if !slices.Contains([]TPM{"", TPMEphemeral, TPMPersistent}, t) {
		return errdefs.Invalidf("invalid TPM %q; use ephemeral or persistent", t)
	}
	return nil
}

// HasTPM reports whether the guest of s has a TPM.
func (s Spec) HasTPM() bool { return s.Hardware != nil && s.Hardware.TPM != "" }

// Topology says how a guest sees its CPUs. Their product is the number of CPUs. The zero value is one socket with a core for each CPU.
type Topology struct {
	Sockets int `json:"sockets,omitempty"`
	Cores   int `json:"cores,omitempty"`   // of each socket
	Threads int `json:"threads,omitempty"` // of each core
}

// Watchdog is what happens to a guest that started its watchdog timer (Intel 6300ESB) and no longer resets it. "" is no watchdog.
type Watchdog string

// The actions of watchdogs.
const (
	WatchdogReset    Watchdog = "reset"    // the guest starts again
	WatchdogPowerOff Watchdog = "poweroff" // the VM ends
	WatchdogShutdown Watchdog = "shutdown" // the guest is asked to shut down
)

// Names of disks in Hardware.Disks that are no volumes.
const (
	DiskOfImage = "@image"      // from which the guest boots, if it boots from an image
	DiskOfSeed  = "@cloud-init" // with the documents of cloud-init
)

// DiskDevice says by which device a guest sees a disk. The zero value is a virtio disk.
type DiskDevice struct {
	Bus      DiskBus `json:"bus,omitempty"`
	CDROM    bool    `json:"cdrom,omitempty"`  // read-only, and not on virtio
	ReadOnly bool    `json:"ro,omitempty"`     // the guest cannot write to it
	Serial   string  `json:"serial,omitempty"` // the serial number that the guest sees; "": the node chooses it
	Blocks   Blocks  `json:"blocks,omitzero"`
}

// Blocks are the sizes in bytes of the blocks that a guest sees on a disk. The zero value is 512 for both.
type Blocks struct {
	Logical  int `json:"logical,omitempty"`
	Physical int `json:"physical,omitempty"`
}

// Limits of disks.
const (
	MaxDiskSerial = 20 // bytes, on each bus; of virtio and SATA, the shortest
	minBlock      = 512
	maxBlock      = 2 << 20
)

// diskSerial matches the serial numbers that KubeVirt takes.
var diskSerial = regexp.MustCompile(`^[A-Za-z0-9_.+-]+$`)

// ownSerials begin the serial numbers that nodes choose.
var ownSerials = []string{"cocoon-", "vol-"}

// ValidateDiskSerial returns an InvalidArgument error unless a guest can see a disk with that serial number.
func ValidateDiskSerial(serial string) error {
	if serial == "" {
		return nil
	}
	if len(serial) > MaxDiskSerial || !diskSerial.MatchString(serial) {
		return errdefs.Invalidf("invalid serial number %q of a disk; use at most %d letters, digits, '_', '.', '+' and '-'", serial, MaxDiskSerial)
	}
	for _, own := range ownSerials {
		if strings.HasPrefix(strings.ToLower(serial), own) {
			return errdefs.Invalidf("serial number %q of a disk begins with %s, as those that nodes choose; use another one", serial, own)
		}
	}
	return nil
}

// ValidateBlocks returns an InvalidArgument error unless d can have blocks of its sizes.
func (d DiskDevice) ValidateBlocks() error {
	b := d.Blocks
	valid := func(n int) bool { return n >= minBlock && n <= maxBlock && bits.OnesCount(uint(n)) == 1 }
	switch {
	case b == Blocks{}:
		return nil
	case !valid(b.Logical) || !valid(b.Physical) || b.Logical > b.Physical:
		return errdefs.Invalidf("invalid blocks of %d bytes, physically %d; use powers of two from %d to %d, the first not larger", b.Logical, b.Physical, minBlock, maxBlock)
	case d.CDROM || d.Bus == DiskSATA && b.Logical != minBlock:
		return errdefs.Invalidf("a CD-ROM cannot have blocks of another size, and a disk on sata has blocks of %d bytes; leave out the sizes, or use another bus", minBlock)
	}
	return nil
}

// DiskBus is the bus of a disk's device. "" is DiskVirtio.
type DiskBus string

// The buses of disks.
const (
	DiskVirtio DiskBus = "virtio"
	DiskSATA   DiskBus = "sata"
	DiskSCSI   DiskBus = "scsi" // virtio-scsi
	DiskUSB    DiskBus = "usb"
)

// BusRoom returns how many disks can be on bus; 0 for no limit but that of all disks.
func BusRoom(bus DiskBus) int {
	switch bus {
	case DiskSATA:
		return 6
	case DiskUSB:
		return 15
	case DiskVirtio, DiskSCSI:
	}
	return 0
}

var diskBuses = []DiskBus{"", DiskVirtio, DiskSATA, DiskSCSI, DiskUSB}

// Validate returns an InvalidArgument error if no guest can see a disk by d.
func (d DiskDevice) Validate() error {
	switch {
	case !slices.Contains(diskBuses, d.Bus):
		return errdefs.Invalidf("invalid bus %q of a disk; use virtio, sata, scsi or usb", d.Bus)
	case d.CDROM && (d.Bus == "" || d.Bus == DiskVirtio):
		return errdefs.Invalidf("a CD-ROM cannot be on virtio; use sata, scsi or usb")
	case d.ReadOnly && !d.CDROM && d.Bus == DiskSATA:
		return errdefs.Invalidf("a disk on sata cannot be read-only; make it a CD-ROM, or use another bus")
	}
	if err := ValidateDiskSerial(d.Serial); err != nil {
		return err
	}
	return d.ValidateBlocks()
}

// Validate returns an InvalidArgument error unless t is the topology of that number of CPUs.
func (t Topology) Validate(cpus int) error {
	if t == (Topology{}) {
		return nil
	}
	if t.Sockets < 1 || t.Cores < 1 || t.Threads < 1 || max(t.Sockets, t.Cores, t.Threads) > MaxCPUs || t.Sockets*t.Cores*t.Threads != cpus {
		return errdefs.Invalidf("%d sockets with %d cores with %d threads are not %d CPUs", t.Sockets, t.Cores, t.Threads, cpus)
	}
	return nil
}

// validateHardware checks the machine of a disk guest. Whether a disk exists is known only with its volumes.
func (s Spec) validateHardware() error {
	h := s.Hardware
	if h == nil {
		return nil
	}
	if err := h.Topology.Validate(s.CPUs); err != nil {
		return err
	}
	if err := s.validateGrowth(); err != nil {
		return err
	}
	if err := s.validateHugePages(); err != nil {
		return err
	}
	if err := s.validateKernel(); err != nil {
		return err
	}
	if h.UEFI != (UEFI{}) && s.Firmware != FirmwareUEFI {
		return errdefs.Invalidf("its hardware has settings of UEFI, but its firmware is not uefi; set the firmware to uefi, or leave them out")
	}
	for _, err := range []error{h.CPU.Validate(), h.Clock.Validate(), h.Panic.validate(), h.TPM.validate(), h.validateKeep()} {
		if err != nil {
			return err
		}
	}
	if !slices.Contains([]Watchdog{"", WatchdogReset, WatchdogPowerOff, WatchdogShutdown}, h.Watchdog) {
		return errdefs.Invalidf("invalid action %q of its watchdog; use reset, poweroff or shutdown", h.Watchdog)
	}
	if len(h.NICs) > len(s.NICs) {
		return errdefs.Invalidf("its hardware has models for %d network interfaces, and it has %d", len(h.NICs), len(s.NICs))
	}
	for i, m := range h.NICs {
		if err := m.Validate(); err != nil {
			return errdefs.Invalidf("interface %d: %w", i+1, err)
		}
	}
	used, serials := map[DiskBus]int{}, map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(h.Disks)) {
		d := h.Disks[name]
		known := name == DiskOfSeed || slices.ContainsFunc(s.Volumes, func(v Volume) bool {
			return v.Name == name && (v.Kind == VolumeDisk || v.Kind == VolumeHostDisk || v.Label != "")
		})
		if _, boots := BootVolume(s.Image); name == DiskOfImage {
			known = !boots
		}
		if !known {
			return errdefs.Invalidf("its hardware has the disk %q, but no volume of that name is a disk", name)
		}
		if err := d.Validate(); err != nil {
			return errdefs.Invalidf("disk %s: %w", name, err)
		}
		if other := serials[d.Serial]; d.Serial != "" && other != "" {
			return errdefs.Invalidf("the disks %s and %s have the same serial number %s", other, name, d.Serial)
		}
		serials[d.Serial] = name
		used[d.Bus]++
		most := BusRoom(d.Bus)
		if d.Bus == DiskSATA {
			most = h.sataRoom()
		}
		if most > 0 && used[d.Bus] > most {
			return errdefs.Invalidf("more than %d disks are on %s", most, d.Bus)
		}
	}
	return nil
}

// Clone returns a copy of h that shares no memory with it.
func (h *Hardware) Clone() *Hardware {
	if h == nil {
		return nil
	}
	c := *h
	if h.Kernel != nil {
		k := *h.Kernel
		c.Kernel = &k
	}
	c.Disks, c.CPU, c.NICs = maps.Clone(h.Disks), h.CPU.clone(), slices.Clone(h.NICs)
	return &c
}
