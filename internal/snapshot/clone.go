package snapshot

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Clone returns a copy of s that shares no memory with it.
func (s Snapshot) Clone() Snapshot {
	s.ImageBlobIDs = slices.Clone(s.ImageBlobIDs)
	s.Published = slices.Clone(s.Published)
	s.Machine.Flags = slices.Clone(s.Machine.Flags)
	s.Disks = slices.Clone(s.Disks)
	for i := range s.Disks {
		s.Disks[i].Layers = slices.Clone(s.Disks[i].Layers)
	}
	s.Volumes = slices.Clone(s.Volumes)
	s.NIC = slices.Clone(s.NIC)
	for i := range s.NIC {
		s.NIC[i].DNS = slices.Clone(s.NIC[i].DNS)
	}
	s.Record = s.Record.Clone()
	s.Labels = maps.Clone(s.Labels)
	return s
}

// Portable returns an error if s cannot leave the node. Errors: FailedPrecondition.
func (s Snapshot) Portable() error {
	if len(s.Volumes) == 0 {
		return nil
	}
	return errdefs.Preconditionf("snapshot %s has volumes (%s), whose content stays on this node; export copies of them, and save the VM without them", s.Name, s.Volumes[0].Volume)
}

// Files returns the names of the files in the snapshot's folder, without FileMeta and checksums, in the order in which
// they are transferred. The files of Whole are the ones transferred.
func (s Snapshot) Files() []string {
	var names []string
	if s.Live {
		names = append(names, FileState, FileMemory)
	}
	if s.Live && s.MemoryBase != "" {
		names = append(names, FileBase)
	}
	for _, d := range s.Disks {
		for _, l := range d.Layers {
			names = append(names, l.File)
		}
	}
	return names
}

// Whole returns the record of the same snapshot with its memory in one file, as Held.Open presents it and as it is
// transferred.
func (s Snapshot) Whole() Snapshot {
	s = s.Clone()
	s.MemoryBase, s.Summed = "", false
	return s
}

// documentedDefault is what the documented system runs a VM in that asks for no hypervisor.
const documentedDefault = "cloud-hypervisor"

// Backend returns the hypervisor that the VM asked for. It is the documented key hypervisor of snapshots: programs that
// clone compare it with what the new VM asks for. Hypervisor is the driver that really took the snapshot.
func (s Snapshot) Backend() string { return cmp.Or(s.Record.Spec.Driver, documentedDefault) }

// TakenBy reports whether the keys hypervisor and driver of a description fit s. driver may be "": other programs drop
// that key, and in descriptions of earlier releases hypervisor is the driver.
func (s Snapshot) TakenBy(hypervisor, driver string) bool {
	if driver != "" {
		return driver == s.Hypervisor
	}
	return hypervisor == s.Hypervisor || hypervisor == s.Backend()
}

// Travels returns the record as it is sent elsewhere: without what only this node knows, so that an unchanged snapshot
// is sent as the same bytes again.
func (s Snapshot) Travels() Snapshot {
	s = s.Foreign().Whole()
	s.Digest, s.UsedAt, s.Size = "", time.Time{}, 0
	return s
}

// Foreign returns the part of the record that is valid on another machine. It drops what is only true on this one, such
// as the process, paths, taps, volumes and the namespaces that its operator publishes it to.
func (s Snapshot) Foreign() Snapshot {
	s = s.Clone()
	s.Published, s.Kept, s.Volumes = nil, false, nil
	s.Record.Handle, s.Record.PID = nil, 0
	for i := range s.Record.Disks {
		s.Record.Disks[i].Path, s.Record.Disks[i].Backing = "", nil
	}
	s.Record.Snapshot, s.Record.SnapshotIDs, s.Record.Resume = "", nil, nil
	for _, nics := range [][]vm.NIC{s.Record.NICs, s.NIC} {
		for i := range nics {
			nics[i].Tap, nics[i].NetNS = "", ""
		}
	}
	return s
}

// Heir returns the record of a copy of s that arrives on behalf of who: what is valid here, of whoever owns the copy. The operator's copy keeps
// its owner. A namespace gets copies of its own snapshots and of the operator's, and owns them.
// Errors: NotFound for a snapshot of another owner.
func (s Snapshot) Heir(who vm.Owner) (Snapshot, error) {
	if !who.Operator() && !s.Owner.Operator() && !who.Reaches(s.Owner) {
		return Snapshot{}, errdefs.NotFoundf("snapshot not found: none of this name belongs to namespace %s", who.Namespace)
	}
	s = s.Foreign()
	if !who.Operator() {
		s.Owner = who
	}
	return s, nil
}

// Writable reports whether a VM made from the snapshot writes to the disk, on its own overlay.
func (d Disk) Writable() bool { return d.Role == vm.RoleCOW || d.Role == vm.RoleData }
