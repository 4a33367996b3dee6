package contract

import (
	"path"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Mode says how a VM is created. Empty: a managed VM is cloned, any other is run.
type Mode string

// The modes.
const (
	ModeClone  Mode = "clone"
	ModeRun    Mode = "run"
	ModeStatic Mode = "static"
)

// OS is the guest's operating system. Empty means linux.
type OS string

// The operating systems.
const (
	OSLinux   OS = "linux"
	OSWindows OS = "windows"
	OSAndroid OS = "android"
	OSMacOS   OS = "macos"
)

// SnapshotPolicy says which VMs are saved before they are deleted. Empty means always.
type SnapshotPolicy string

// The snapshot policies.
const (
	SnapshotAlways   SnapshotPolicy = "always"
	SnapshotMainOnly SnapshotPolicy = "main-only"
	SnapshotNever    SnapshotPolicy = "never"
)

// ConnType is how a person reaches the guest. Empty means that it is derived from the OS.
type ConnType string

// The connection types.
const (
	ConnSSH ConnType = "ssh"
	ConnRDP ConnType = "rdp"
	ConnVNC ConnType = "vnc"
	ConnADB ConnType = "adb"
)

// Backend names a hypervisor. Empty means the node's default.
type Backend string

// The backends.
const (
	BackendCloudHypervisor Backend = "cloud-hypervisor"
	BackendFirecracker     Backend = "firecracker"
	BackendQEMU            Backend = "qemu"
)

// Backends returns the hypervisors that there are.
func Backends() []Backend { return []Backend{BackendCloudHypervisor, BackendFirecracker, BackendQEMU} }

// VMSpec is what a pod's annotations ask for. The zero value asks for nothing.
type VMSpec struct {
	Name           string // of the VM
	Image          string
	Mode           Mode
	OS             OS
	Storage        resource.Quantity // of the root disk; zero: not given
	Network        string
	SnapshotPolicy SnapshotPolicy
	Managed        bool // the node manages the VM's life cycle
	ForcePull      bool
	ForkFrom       string // name of a running VM
	ConnType       ConnType
	Backend        Backend
	NoDirectIO     bool
	ProbePort      int32  // TCP port of the readiness probe; 0: ICMP
	CloneFromDir   string // absolute folder on the node with an exported snapshot
}

// ParseVMSpec reads a VMSpec. The error, if any, is an Errors with every bad key. The good keys are read anyway.
func ParseVMSpec(annotations map[string]string) (VMSpec, error) {
	r := &reader{from: annotations}
	s := VMSpec{
		Name:           r.text(KeyName),
		Image:          r.text(KeyImage),
		Mode:           oneOf(r, KeyMode, ModeClone, ModeRun, ModeStatic),
		OS:             oneOf(r, KeyOS, OSLinux, OSWindows, OSAndroid, OSMacOS),
		Storage:        r.storage(),
		Network:        r.text(KeyNetwork),
		SnapshotPolicy: oneOf(r, KeySnapshotPolicy, SnapshotAlways, SnapshotMainOnly, SnapshotNever),
		Managed:        r.flag(KeyManaged),
		ForcePull:      r.flag(KeyForcePull),
		ForkFrom:       r.text(KeyForkFrom),
		ConnType:       oneOf(r, KeyConnType, ConnSSH, ConnRDP, ConnVNC, ConnADB),
		Backend:        oneOf(r, KeyBackend, Backends()...),
		NoDirectIO:     r.flag(KeyNoDirectIO),
		ProbePort:      r.port(KeyProbePort),
		CloneFromDir:   r.dir(),
	}
	return s, r.errs.err()
}

// ParseBackend reads the Backend of a VMSpec alone. Errors: Errors.
func ParseBackend(annotations map[string]string) (Backend, error) {
	r := &reader{from: annotations}
	b := oneOf(r, KeyBackend, Backends()...)
	return b, r.errs.err()
}

func (r *reader) storage() resource.Quantity {
	v := r.from[KeyStorage]
	if v == "" {
		return resource.Quantity{}
	}
	q, err := resource.ParseQuantity(v)
	if err != nil || q.Sign() <= 0 {
		r.bad(KeyStorage, "must be a positive quantity such as 10Gi")
		return resource.Quantity{}
	}
	return q
}

func (r *reader) dir() string {
	v := r.from[KeyCloneFromDir]
	if v != "" && (!path.IsAbs(v) || path.Clean(v) != v) {
		r.bad(KeyCloneFromDir, "must be an absolute path without . and ..")
		return ""
	}
	return v
}

// Apply writes s to annotations: keys of empty fields are removed.
func (s VMSpec) Apply(annotations map[string]string) {
	put(annotations, KeyName, s.Name)
	put(annotations, KeyImage, s.Image)
	put(annotations, KeyMode, string(s.Mode))
	put(annotations, KeyOS, string(s.OS))
	storage := ""
	if !s.Storage.IsZero() {
		storage = s.Storage.String()
	}
	put(annotations, KeyStorage, storage)
	put(annotations, KeyNetwork, s.Network)
	put(annotations, KeySnapshotPolicy, string(s.SnapshotPolicy))
	put(annotations, KeyManaged, flagText(s.Managed))
	put(annotations, KeyForcePull, flagText(s.ForcePull))
	put(annotations, KeyForkFrom, s.ForkFrom)
	put(annotations, KeyConnType, string(s.ConnType))
	put(annotations, KeyBackend, string(s.Backend))
	put(annotations, KeyNoDirectIO, flagText(s.NoDirectIO))
	put(annotations, KeyProbePort, portText(s.ProbePort))
	put(annotations, KeyCloneFromDir, s.CloneFromDir)
}
