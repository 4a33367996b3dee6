package engine

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// designClone returns the first record of the clone id of x. Everything that can be refused is refused here.
func (n *node) designClone(ctx context.Context, x snapshot.Snapshot, spec vm.CloneSpec, id vm.ID) (vm.Record, []image.Image, error) {
	if err := n.copyable(ctx, x, vm.Behalf(ctx)); err != nil {
		return vm.Record{}, nil, err
	}
	if err := notInSnapshots(vm.Record{Spec: x.Record.Spec, ImageType: x.ImageType}); err != nil { // nothing of ours has saved such a VM
		return vm.Record{}, nil, fmt.Errorf("snapshot %s: %w", x.Name, err)
	}
	if x.Record.Spec.Sandbox || x.Record.Spec.CgroupParent != "" {
		return vm.Record{}, nil, fmt.Errorf("snapshot %s: %w", x.Name, errNoSandbox())
	}
	ephemeral, err := ephemeralIn(x, x.Live && !spec.Cold)
	if err != nil {
		return vm.Record{}, nil, err
	}
	return n.designCopy(ctx, x, spec, id, ephemeral)
}

// designCopy is designClone for a clone that has these added containers, whatever x says.
func (n *node) designCopy(ctx context.Context, x snapshot.Snapshot, spec vm.CloneSpec, id vm.ID, ephemeral []vm.Ephemeral) (vm.Record, []image.Image, error) {
	live := x.Live && !spec.Cold
	s, err := cloneSpec(x, spec, id, live)
	if err != nil {
		return vm.Record{}, nil, err
	}
	if live {
		remedy := remedyClone
		if s.Sandbox {
			remedy = remedySandbox
		}
		if s.Accel, err = n.drivers.resumable(ctx, x, s.Accel, remedy); err != nil {
			return vm.Record{}, nil, err
		}
	}
	driver := x.Hypervisor
	if !live && !n.drivers.usable(ctx, driver) { // any driver here can boot its disks
		driver = n.cfg.DefaultDriver
	}
	images, err := n.imagesOf(ctx, x)
	if err != nil {
		return vm.Record{}, nil, err
	}
	process := x.Record.Process
	s.Process = process // resolved: nothing from the image is laid over it
	if err := s.Validate(); err != nil {
		return vm.Record{}, nil, err
	}
	r, err := n.design(s, driver, images[0])
	if err != nil {
		return r, nil, err
	}
	r.ID, r.Owner, r.Process, r.Snapshot = id, vm.Behalf(ctx), process, x.ID
	if r.Spec.KeepsFirmware() != "" && !sameVM(x, r.Owner, r.Spec) { // what its firmware keeps is the source's alone
		r.Spec.Hardware.Keep = ""
	}
	if r.Containers, err = containersIn(x, r.Spec, live); err != nil {
		return r, nil, err
	}
	if r.ImageVolumes, err = imageVolumesIn(x, r.Spec); err != nil {
		return r, nil, err
	}
	r.Ephemeral = ephemeral
	r.Spec.Process = x.Record.Spec.Process
	if live && len(r.Spec.NICs) != x.NICs {
		return r, nil, errdefs.Preconditionf("its guest has %d network interfaces, but the clone would have %d; request the same number, or clone it cold", x.NICs, len(r.Spec.NICs))
	}
	if err := n.nics.choosable(r.Owner, spec.NICs); err != nil {
		return r, nil, err
	}
	if live && r.ImageType != vm.ImageOCI {
		if err := keepMACs(x, r.Owner, &r.Spec); err != nil {
			return r, nil, err
		}
	}
	if live && hasSeed(x.Record.Disks) && n.seeds == nil {
		return r, nil, errdefs.Preconditionf("its guest has a cloud-init disk, but this node cannot create one; clone it cold")
	}
	if live || r.ImageType == vm.ImageOCI { // a disk guest that boots gets its identity from its seed
		r.Cloned = live
		r.Resume = &vm.Resume{Clone: true, MachineID: newMachineID(), SSHHostKeys: spec.SSHHostKeys}
	}
	if err := n.possible(ctx, r); err != nil {
		return r, nil, err
	}
	if live {
		r.Resume.Fresh = x.Fresh
		for _, nic := range x.NIC {
			r.Resume.MACs = append(r.Resume.MACs, nic.MAC)
		}
		if r.Spec.Storage > x.Storage {
			r.Resume.Storage = r.Spec.Storage
		}
	}
	return r, images, nil
}

// sameVM reports whether s is the VM that x was taken of: it wakes here.
func sameVM(x snapshot.Snapshot, owner vm.Owner, s vm.Spec) bool {
	return s.Name == x.Source.VMName && owner.Namespace == x.Owner.Namespace
}

// keepMACs gives the interfaces of s that cannot be replaced while the guest runs the hardware addresses that they have in x, if s is the same
// VM of the same owner, which wakes here. It returns an error for any other clone of x.
func keepMACs(x snapshot.Snapshot, owner vm.Owner, s *vm.Spec) error {
	for i := range s.NICs {
		if s.Hardware == nil || i >= len(s.Hardware.NICs) || s.Hardware.NICs[i].Virtio() || i >= len(x.NIC) {
			continue
		}
		if n := &s.NICs[i]; n.MAC == "" && sameVM(x, owner, *s) {
			n.MAC = x.NIC[i].MAC
		}
		if s.NICs[i].MAC != x.NIC[i].MAC {
			return errdefs.Preconditionf("its guest has a network interface of model %s, whose hardware address cannot change while it runs; clone it cold, or take a snapshot of a VM with virtio", s.Hardware.NICs[i])
		}
	}
	return nil
}

// defaultName is the name of a clone if the caller gives none.
func defaultName(id vm.ID) string { return "cocoon-clone-" + string(id) }

// cloneSpec lays what spec asks for over the spec of the snapshot's VM.
func cloneSpec(x snapshot.Snapshot, spec vm.CloneSpec, id vm.ID, live bool) (vm.Spec, error) {
	s := x.Record.Spec.Clone()
	s.Name, s.Hostname, s.Labels, s.Offered, s.Image = spec.Name, spec.Hostname, spec.Labels, nil, x.Image
	if !live {
		s = s.Created()
	}
	s.Domain = "" // of the source's name
	s.SMBIOS = s.SMBIOS.Anew()
	s.CPUs, s.Memory, s.Storage = x.CPU, x.Memory, x.Storage
	s.Name = cmp.Or(s.Name, defaultName(id))
	if live && spec.Keep.Size {
		spec.CPUs, spec.Memory = 0, 0
	}
	if spec.Keep.NICs {
		spec.NICs = slices.Repeat(spec.NICs, x.NICs)
	}
	if live && (spec.CPUs != 0 && spec.CPUs != x.CPU || spec.Memory != 0 && spec.Memory != x.Memory) {
		return s, errdefs.Preconditionf("its guest has %d CPUs and %d bytes of memory, and a resumed guest keeps them; omit CPUs and memory, or clone it cold", x.CPU, x.Memory)
	}
	if spec.Storage != 0 && spec.Storage < x.Storage {
		return s, errdefs.Invalidf("its disk has %d bytes, more than the requested %d; a disk cannot shrink", x.Storage, spec.Storage)
	}
	s.Memory, s.Storage = cmp.Or(spec.Memory, s.Memory), cmp.Or(spec.Storage, s.Storage)
	s.StopGrace, s.CPUs = cmp.Or(spec.StopGrace, s.StopGrace), cmp.Or(spec.CPUs, s.CPUs)
	s.DiskRate = spec.DiskRate.Over(s.DiskRate)
	if spec.DNS != nil {
		s.DNS = spec.DNS.Clone()
		s.DNS.Offered = true // a guest that boots itself keeps its own
	}
	for i := range s.NICs { // a requested MAC and ports of the host belong to the source alone
		s.NICs[i].MAC, s.NICs[i].Ports = "", nil
	}
	if len(spec.NICs) > 0 {
		s.NICs = vm.Spec{NICs: spec.NICs}.Clone().NICs
		if live {
			s.NICs = vm.InOrderOf(s.NICs, x.NIC)
		}
	}
	for i := range s.NICs {
		s.NICs[i].Policed, s.NICs[i].Place = spec.Policed, 0
		if live && i < len(x.Record.Spec.NICs) { // as its guest knows it
			s.NICs[i].Place = x.Record.Spec.NICs[i].Place
		}
	}
	return s.Default(), nil
}

// newMachineID returns the machine-id of a new clone.
func newMachineID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the process instead
	return hex.EncodeToString(b[:])
}

// imagesOf returns the images that the disks of x depend on, that of the VM (see imageOf) and those of its containers. It finds
// them by digest, whatever their names mean here now. Whoever may clone what the operator shares may also use its
// images. A snapshot of a namespace can claim anything about its images, so the namespace needs a right to them.
func (n *node) imagesOf(ctx context.Context, x snapshot.Snapshot) ([]image.Image, error) {
	if x.Owner.Operator() {
		ctx = vm.OnBehalf(ctx, x.Owner)
	}
	var out []image.Image
	if x.Record.Spec.Sandbox {
		out = append(out, image.Blank())
	} else if _, ok := vm.BootVolume(x.Image); ok {
		out = append(out, noImage(x.Image))
	}
	for _, want := range x.Images() {
		img, err := n.images.Get(ctx, want.Digest)
		if err == nil && img.ID != want.Digest || errdefs.IsNotFound(err) || errdefs.IsInvalid(err) {
			return nil, errdefs.NotFoundf("its disks need image %s with the digest %s, which is not on this node; pull or import it", want.Name, want.Digest)
		}
		if err != nil {
			return nil, err
		}
		out = append(out, img)
	}
	return out, nil
}

func hasSeed(disks []vm.Disk) bool {
	return slices.ContainsFunc(disks, func(d vm.Disk) bool { return d.Role == vm.RoleCidat })
}

// cloneOf returns the saved state of h for the clone r.
func cloneOf(h snapshot.Held, r vm.Record) *hypervisor.Incoming {
	in := incomingOf(h)
	in.LinksDown, in.Grown = true, grown(r)
	return in
}

// incomingOf returns the saved state of h.
func incomingOf(h snapshot.Held) *hypervisor.Incoming {
	in := &hypervisor.Incoming{
		State: filepath.Join(h.Dir(), snapshot.FileState), Memory: filepath.Join(h.Dir(), snapshot.FileMemory),
		Booting: h.Snapshot().Fresh, Summed: h.Snapshot().Summed, DiskRate: h.Snapshot().Record.Spec.DiskRate, Feed: h.Feed(),
	}
	if h.Snapshot().MemoryBase != "" {
		in.Base = filepath.Join(h.Dir(), snapshot.FileBase)
	}
	return in
}

// grown returns the serials of the disks of r that are larger than its resumed guest knows.
func grown(r vm.Record) []string {
	var serials []string
	for _, d := range r.Disks {
		if r.Resume != nil && r.Resume.Storage > 0 && d.Role == vm.RoleCOW {
			serials = append(serials, d.Serial)
		}
	}
	for _, v := range r.Attached {
		if r.Resume != nil && slices.Contains(r.Resume.Volumes, v.Volume) {
			serials = append(serials, v.Serial)
		}
	}
	return serials
}

// disksFrom creates the disks of a snapshot for the VM id of a driver, in a new folder. The writable disk has storage bytes.
func (n *node) disksFrom(ctx context.Context, id vm.ID, driver string, storage int64, h snapshot.Held, images []image.Image) ([]vm.Disk, error) {
	base, err := n.baseOf(ctx, h.Snapshot(), images)
	if err != nil {
		return nil, err
	}
	dir, err := n.dirs.newDisks(id)
	if err != nil {
		return nil, err
	}
	if n.drivers.rawOnly(driver) {
		return n.snapshots.RawDisks(ctx, h, base, dir, storage)
	}
	return n.snapshots.Disks(ctx, h, base, dir, storage)
}
