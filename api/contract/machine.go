package contract

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Firmware is what a guest that boots itself starts with. Empty means bios.
type Firmware string

// The kinds of firmware.
const (
	FirmwareBIOS Firmware = "bios"
	FirmwareUEFI Firmware = "uefi"
)

// SMBIOS is what the firmware tells a guest about its machine, beside the UUID, which KeyVirtletSystemUUID sets.
type SMBIOS struct {
	Serial  string  `json:"serial,omitempty"` // of the system
	Chassis Chassis `json:"chassis,omitzero"`
}

// Chassis is what a guest sees as the case of its machine. Its fields are those of KubeVirt.
type Chassis struct {
	Manufacturer string `json:"manufacturer,omitempty"`
	Version      string `json:"version,omitempty"`
	Serial       string `json:"serial,omitempty"`
	Asset        string `json:"asset,omitempty"`
	SKU          string `json:"sku,omitempty"`
}

// Hardware is what the machine of a guest that boots itself is like beyond its CPUs, memory and firmware.
type Hardware struct {
	Topology Topology `json:"topology,omitzero"`
	CPU      CPU      `json:"cpu,omitzero"`
	Clock    Clock    `json:"clock,omitzero"`
	UEFI     UEFI     `json:"uefi,omitzero"`
	Huge     bool     `json:"hugePages,omitempty"` // its memory is huge pages of 2 MiB
	TPM      string   `json:"tpm,omitempty"`       // ephemeral or persistent
	Keep     string   `json:"keep,omitempty"`      // what is persistent of UEFI and TPM stays on the node for the next pod of the VM with this key, as long as the VM is the node's (KeySticky)
	Growth
	Panic    string                `json:"panic,omitempty"`    // isa or pci: the device by which the guest says that its kernel has panicked
	Watchdog string                `json:"watchdog,omitempty"` // reset, poweroff or shutdown: what its end does; "": there is none
	Disks    map[string]DiskDevice `json:"disks,omitempty"`    // by the names of the pod's volumes, or DiskOfImage or DiskOfSeed
	MACs     []string              `json:"macs,omitempty"`     // hardware addresses of the interfaces in their order; "" and those beyond: the node chooses
	NICs     []string              `json:"nics,omitempty"`     // models of the interfaces in their order: virtio, e1000, e1000e or rtl8139
	Links    []string              `json:"links,omitempty"`    // of the interfaces in their order: LinkUp or LinkDown; "" and those beyond: as it is, at first up
	OfNode
}

// What a link of an interface can be.
const (
	LinkUp   = "up"
	LinkDown = "down" // the guest sees no carrier, and no packet passes
)

// OfNode is what a guest has that is no part of a usual machine: its node gives it.
type OfNode struct {
	Kernel    *Kernel             `json:"kernel,omitempty"`    // what the guest boots; nil: it boots from a disk
	HostDisks map[string]HostDisk `json:"hostDisks,omitempty"` // by the names of the pod's volumes that are files of the node
	VSOCK     bool                `json:"vsock,omitempty"`     // a virtio socket, by which the guest and programs of the node reach each other
}

// HostDisk says that a volume of the pod, a hostPath of the type File or FileOrCreate that no container mounts, is a disk of the guest.
type HostDisk struct {
	Capacity int64 `json:"capacity,omitempty"` // bytes of a file that is made; only and always with FileOrCreate
	Shared   bool  `json:"shared,omitempty"`   // several VMs may have it at the same time; each of them has to set this
}

// Kernel is the kernel that a guest boots instead of a disk. A guest without a disk of its own has the image volume://VOLUME.
type Kernel struct {
	Volume string `json:"volume"`           // of the pod, with the files of an image, which no container mounts
	Path   string `json:"path"`             // of the kernel in the image, absolute
	Initrd string `json:"initrd,omitempty"` // as Path
	Args   string `json:"args,omitempty"`   // the command line of the kernel
}

// Growth says how far a resize of the pod can grow the running guest: at most to MaxSockets and MaxMemory. 0: it gets nothing. With CPUShare, the CPU
// request of the pod says how many CPUs the guest has: one for each CPUShare thousandths of a CPU.
type Growth struct {
	MaxSockets int   `json:"maxSockets,omitempty"`
	MaxMemory  int64 `json:"maxMemory,omitempty"` // bytes
	CPUShare   int64 `json:"cpuShare,omitempty"`
}

// CPU says what a guest sees of its CPUs and of their hypervisor.
type CPU struct {
	Model    string       `json:"model,omitempty"`
	Features []CPUFeature `json:"features,omitempty"`
	HideKVM  bool         `json:"hideKVM,omitempty"`
	HyperV   HyperV       `json:"hyperv,omitzero"`
}

// CPUFeature is a feature of a CPU. Its policy is require, optional or disable.
type CPUFeature struct {
	Name   string `json:"name"`
	Policy string `json:"policy,omitempty"`
}

// HyperV is what a guest sees of Hyper-V's interface.
type HyperV struct {
	Features  []string `json:"features,omitempty"`
	Spinlocks int      `json:"spinlocks,omitempty"`
	VendorID  string   `json:"vendorID,omitempty"`
}

// UEFI says what the firmware of a guest that boots by UEFI is like.
type UEFI struct {
	Persistent bool `json:"persistent,omitempty"` // its variables stay as long as the VM
	SecureBoot bool `json:"secureBoot,omitempty"`
}

// Clock is the hardware clock of a machine, and its timers.
type Clock struct {
	Timezone string `json:"timezone,omitempty"`
	Offset   int    `json:"offset,omitempty"` // seconds ahead of UTC
	Local    bool   `json:"local,omitempty"`  // the local time of the node
	CatchUp  bool   `json:"catchUp,omitempty"`
	Guest    bool   `json:"guest,omitempty"`
	NoHPET   bool   `json:"noHPET,omitempty"`
}

// Topology says how a guest sees its CPUs. Their product is the number of CPUs.
type Topology struct {
	Sockets int `json:"sockets,omitempty"`
	Cores   int `json:"cores,omitempty"`
	Threads int `json:"threads,omitempty"`
}

// DiskDevice says by which device a guest sees a disk.
type DiskDevice struct {
	Bus      string `json:"bus,omitempty"` // virtio, sata, scsi or usb; "" is virtio
	CDROM    bool   `json:"cdrom,omitempty"`
	ReadOnly bool   `json:"ro,omitempty"`
	Serial   string `json:"serial,omitempty"` // the serial number that the guest sees
	Blocks   Blocks `json:"blocks,omitzero"`
	Shared   bool   `json:"shared,omitempty"` // several VMs may use the volume of the claim at the same time; each of them has to set this
}

// Blocks are the sizes in bytes of the blocks that a guest sees on a disk.
type Blocks struct {
	Logical  int `json:"logical,omitempty"`
	Physical int `json:"physical,omitempty"`
}

// Names of disks in Hardware.Disks that are no volumes of the pod.
const (
	DiskOfImage = "@image"
	DiskOfSeed  = "@cloud-init"
)

// Machine is what a pod asks of the machine of its VM. The zero value asks for nothing.
type Machine struct {
	Firmware    Firmware
	SMBIOS      SMBIOS
	Graphics    bool // a screen, a keyboard and a mouse, for a guest that boots itself
	Hardware    Hardware
	DiskRate    DiskRate
	FileDisks   map[string]string // labels of disks by the names of the pod's volumes: a guest that boots itself has their files on these disks
	SSHSecrets  []string          // Secrets of the pod's namespace; each value is lines of authorized_keys
	Logins      Logins            // of a guest that boots itself, by its agent
	NetworkData Source            // of the guest's network configuration, instead of the generated one; an empty key is networkdata
}

// DiskRate limits what each disk of a VM reads and writes per second. 0: no limit, or that of the snapshot.
type DiskRate struct {
	Bytes int64
	Ops   int64
}

// Logins are Secrets of the pod's namespace by which users log in.
type Logins struct {
	Keys      map[string][]string `json:"keys,omitempty"`      // users by the Secret; each of its values is lines of authorized_keys
	Passwords []string            `json:"passwords,omitempty"` // Secrets whose keys are users, and whose values are their passwords
}

// Secrets returns the names of all Secrets, each once.
func (l Logins) Secrets() []string {
	all := slices.Concat(slices.Collect(maps.Keys(l.Keys)), l.Passwords)
	slices.Sort(all)
	return slices.Compact(all)
}

// NetworkDataKey is the key of Machine.NetworkData if it names none.
const NetworkDataKey = "networkdata"

// ParseMachine reads a Machine. It reads the good keys even if others are bad. Errors: Errors, with each bad key.
func ParseMachine(annotations map[string]string) (Machine, error) {
	r := &reader{from: annotations}
	m := Machine{
		Firmware:    oneOf(r, KeyFirmware, FirmwareBIOS, FirmwareUEFI),
		SMBIOS:      r.smbios(),
		Graphics:    r.flag(KeyGraphics),
		Hardware:    r.hardware(),
		DiskRate:    r.diskRate(),
		FileDisks:   r.ofVolumes(KeyFileDisks, diskLabel, "must be a list of NAME=LABEL by comma, each NAME once; a LABEL has at most 16 letters, digits, '.', '_' and '-'"),
		SSHSecrets:  r.secrets(KeySSHSecrets),
		Logins:      r.logins(),
		NetworkData: r.source(KeyNetworkData, true),
	}
	return m, r.errs.err()
}

// document reads a JSON document without unknown fields into v, and reports whether there is one.
func (r *reader) document(key string, v any, form string) bool {
	text := r.from[key]
	if text == "" {
		return false
	}
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil || d.More() {
		r.bad(key, "must be JSON like "+form)
		return false
	}
	return true
}

func (r *reader) hardware() (h Hardware) {
	if !r.document(KeyHardware, &h, `{"topology": {"sockets": 1, "cores": 2, "threads": 1}, "watchdog": "reset", "disks": {"data": {"bus": "sata", "cdrom": true, "ro": true, "serial": "D1"}}, "nics": ["e1000e"]}`) {
		return Hardware{}
	}
	if len(h.Disks) == 0 {
		h.Disks = nil
	}
	if len(h.NICs) == 0 {
		h.NICs = nil
	}
	if len(h.MACs) == 0 {
		h.MACs = nil
	}
	if len(h.Links) == 0 {
		h.Links = nil
	}
	if len(h.HostDisks) == 0 {
		h.HostDisks = nil
	}
	return h
}

// ParseDiskRate reads the DiskRate of a Machine alone. Errors: Errors, with each bad key.
func ParseDiskRate(annotations map[string]string) (DiskRate, error) {
	r := &reader{from: annotations}
	d := r.diskRate()
	return d, r.errs.err()
}

func (r *reader) diskRate() DiskRate {
	return DiskRate{Bytes: r.bytes(KeyDiskBandwidth), Ops: r.count(KeyDiskIOPS)}
}

// bytes reads a positive whole number of bytes as a quantity; 0: absent.
func (r *reader) bytes(key string) int64 {
	v := r.from[key]
	if v == "" {
		return 0
	}
	q, err := resource.ParseQuantity(v)
	n, whole := q.AsInt64()
	if err != nil || !whole || n <= 0 {
		r.bad(key, "must be a positive quantity such as 100Mi")
		return 0
	}
	return n
}

// count reads a positive number; 0: absent.
func (r *reader) count(key string) int64 {
	v := r.from[key]
	if v == "" {
		return 0
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n <= 0 {
		r.bad(key, "must be a positive number such as 1000")
		return 0
	}
	return n
}

func (r *reader) smbios() (b SMBIOS) {
	if !r.document(KeySMBIOS, &b, `{"serial": "…", "chassis": {"manufacturer": "…", "version": "…", "serial": "…", "asset": "…", "sku": "…"}}`) {
		return SMBIOS{}
	}
	return b
}

// Apply writes m to annotations: keys of empty fields are removed.
func (m Machine) Apply(annotations map[string]string) {
	put(annotations, KeyFirmware, string(m.Firmware))
	put(annotations, KeySMBIOS, document(m.SMBIOS, m.SMBIOS == SMBIOS{}))
	put(annotations, KeyHardware, document(m.Hardware, reflect.ValueOf(m.Hardware).IsZero()))
	put(annotations, KeyGraphics, flagText(m.Graphics))
	bandwidth, ops := "", ""
	if m.DiskRate.Bytes > 0 {
		bandwidth = resource.NewQuantity(m.DiskRate.Bytes, resource.BinarySI).String()
	}
	if m.DiskRate.Ops > 0 {
		ops = strconv.FormatInt(m.DiskRate.Ops, 10)
	}
	put(annotations, KeyDiskBandwidth, bandwidth)
	put(annotations, KeyDiskIOPS, ops)
	put(annotations, KeyFileDisks, VolumesText(m.FileDisks))
	put(annotations, KeySSHSecrets, strings.Join(m.SSHSecrets, ","))
	put(annotations, KeyLogins, document(m.Logins, len(m.Logins.Secrets()) == 0))
	put(annotations, KeyNetworkData, m.NetworkData.String())
}

// secrets reads a list of names of Secrets.
func (r *reader) secrets(key string) []string {
	text := r.from[key]
	if text == "" {
		return nil
	}
	list := strings.Split(text, ",")
	for _, name := range list {
		if !nameRE.MatchString(name) {
			r.bad(key, "must be names of Secrets by comma")
			return nil
		}
	}
	return list
}

// maxLoginUsers bounds the users of all Secrets.
const maxLoginUsers = 64

func (r *reader) logins() (l Logins) {
	form := `{"keys": {"SECRET": ["USER"]}, "passwords": ["SECRET"]}`
	if !r.document(KeyLogins, &l, form) {
		return Logins{}
	}
	users := 0
	for _, of := range l.Keys {
		users += len(of)
		if len(of) == 0 || slices.Contains(of, "") {
			r.bad(KeyLogins, "must name the users of each Secret in keys")
			return Logins{}
		}
	}
	if users > maxLoginUsers || slices.ContainsFunc(l.Secrets(), func(name string) bool { return !nameRE.MatchString(name) }) {
		r.bad(KeyLogins, "must be JSON like "+form+" with names of Secrets and at most 64 users")
		return Logins{}
	}
	if len(l.Secrets()) == 0 {
		return Logins{}
	}
	return l
}

// document returns v as JSON; "" if it is empty.
func document(v any, empty bool) string {
	if empty {
		return ""
	}
	b, _ := json.Marshal(v) // strings, numbers and flags always marshal
	return string(b)
}
