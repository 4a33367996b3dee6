package nodewire

import (
	"maps"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// StoredVolume is a volume with its figures.
type StoredVolume struct {
	volume.Volume
	Allocated int64 // bytes on the storage of the node
}

// ResizedVolume is a volume that was grown, with the VMs that do not see that yet.
type ResizedVolume struct {
	StoredVolume
	Waiting []volume.Waiting
}

// EncodeResizedVolume returns v as a message.
func EncodeResizedVolume(v ResizedVolume) *nodev1.ResizeVolumeResponse {
	return &nodev1.ResizeVolumeResponse{Volume: EncodeStoredVolume(v.StoredVolume), Waiting: each(v.Waiting, func(w volume.Waiting) *nodev1.VolumeWaiting {
		return &nodev1.VolumeWaiting{Vm: string(w.VM), Reason: w.Reason}
	})}
}

// DecodeResizedVolume returns the volume in m.
func DecodeResizedVolume(m *nodev1.ResizeVolumeResponse) ResizedVolume {
	return ResizedVolume{DecodeStoredVolume(m.GetVolume()), each(m.GetWaiting(), func(w *nodev1.VolumeWaiting) volume.Waiting {
		return volume.Waiting{VM: vm.ID(w.GetVm()), Reason: w.GetReason()}
	})}
}

// EncodeStoredVolume returns v as a message.
func EncodeStoredVolume(v StoredVolume) *nodev1.StoredVolume {
	return &nodev1.StoredVolume{
		Id: string(v.ID), Name: v.Name, Owner: EncodeOwner(v.Owner), Kind: v.Kind, Size: v.Size, From: v.From,
		Attachments: each(v.Attachments, func(a volume.Attachment) *nodev1.VolumeAttachment {
			return &nodev1.VolumeAttachment{Vm: string(a.VM), ReadOnly: a.ReadOnly, Shared: a.Shared, SinceNs: EncodeTime(a.Since)}
		}),
		CreatedAtNs: EncodeTime(v.CreatedAt), Labels: maps.Clone(v.Labels), Allocated: v.Allocated, For: v.For,
	}
}

// DecodeStoredVolume returns the volume in m.
func DecodeStoredVolume(m *nodev1.StoredVolume) StoredVolume {
	return StoredVolume{Allocated: m.GetAllocated(), Volume: volume.Volume{
		ID: vm.ID(m.GetId()), Name: m.GetName(), Owner: DecodeOwner(m.GetOwner()), Kind: m.GetKind(), Size: m.GetSize(), From: m.GetFrom(),
		Attachments: each(m.GetAttachments(), func(a *nodev1.VolumeAttachment) volume.Attachment {
			return volume.Attachment{VM: vm.ID(a.GetVm()), Mode: volume.Mode{ReadOnly: a.GetReadOnly(), Shared: a.GetShared()}, Since: DecodeTime(a.GetSinceNs())}
		}),
		CreatedAt: DecodeTime(m.GetCreatedAtNs()), Labels: cloneMap(m.GetLabels()), For: m.GetFor(),
	}}
}

// EncodeVolumeSnapshot returns s as a message.
func EncodeVolumeSnapshot(s volume.Snapshot) *nodev1.VolumeSnapshot {
	return &nodev1.VolumeSnapshot{
		Id: string(s.ID), Name: s.Name, Owner: EncodeOwner(s.Owner), Kind: s.Kind, Volume: string(s.Volume), Source: s.Source, Size: s.Size,
		CreatedAtNs: EncodeTime(s.CreatedAt), Labels: maps.Clone(s.Labels), For: s.For,
	}
}

// DecodeVolumeSnapshot returns the snapshot in m.
func DecodeVolumeSnapshot(m *nodev1.VolumeSnapshot) volume.Snapshot {
	return volume.Snapshot{
		ID: vm.ID(m.GetId()), Name: m.GetName(), Owner: DecodeOwner(m.GetOwner()), Kind: m.GetKind(), Volume: vm.ID(m.GetVolume()), Source: m.GetSource(), Size: m.GetSize(),
		CreatedAt: DecodeTime(m.GetCreatedAtNs()), Labels: cloneMap(m.GetLabels()), For: m.GetFor(),
	}
}

// EncodeVolumeSpec returns s as a message.
func EncodeVolumeSpec(s volume.Spec) *nodev1.VolumeSpec {
	return &nodev1.VolumeSpec{Kind: s.Kind, Name: s.Name, Size: s.Size, Labels: maps.Clone(s.Labels)}
}

// DecodeVolumeSpec returns the spec in m.
func DecodeVolumeSpec(m *nodev1.VolumeSpec) volume.Spec {
	return volume.Spec{Kind: m.GetKind(), Name: m.GetName(), Size: m.GetSize(), Labels: cloneMap(m.GetLabels())}
}
