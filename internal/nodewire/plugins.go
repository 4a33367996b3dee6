package nodewire

import (
	"maps"
	"slices"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/vm"
)

// Published is a published volume, as a VM can have it.
type Published struct {
	csinode.Published
	Volume vm.ID // of the volume of the node that its device is; "" for a folder
}

// EncodeDrivers returns all as a message.
func EncodeDrivers(all []csinode.Driver) *nodev1.Drivers {
	return &nodev1.Drivers{Drivers: each(all, func(d csinode.Driver) *nodev1.PluginDriver {
		return &nodev1.PluginDriver{Name: d.Name, NodeId: d.NodeID, Topology: maps.Clone(d.Topology), MaxVolumes: d.MaxVolumes}
	})}
}

// DecodeDrivers returns the drivers in m.
func DecodeDrivers(m *nodev1.Drivers) []csinode.Driver {
	return each(m.GetDrivers(), func(d *nodev1.PluginDriver) csinode.Driver {
		return csinode.Driver{Name: d.GetName(), NodeID: d.GetNodeId(), Topology: maps.Clone(d.GetTopology()), MaxVolumes: d.GetMaxVolumes()}
	})
}

// EncodeVolumeKey returns k as a message, without its owner, on whose behalf the call is made.
func EncodeVolumeKey(k csinode.Key) *nodev1.VolumeKey {
	return &nodev1.VolumeKey{Holder: k.Holder, Name: k.Name}
}

// DecodeVolumeKey returns the key in m, of a volume of owner.
func DecodeVolumeKey(owner vm.Owner, m *nodev1.VolumeKey) csinode.Key {
	return csinode.Key{Owner: owner, Holder: m.GetHolder(), Name: m.GetName()}
}

// EncodePublish returns r as a message.
func EncodePublish(r csinode.Request) *nodev1.PublishVolumeRequest {
	return &nodev1.PublishVolumeRequest{
		Key: EncodeVolumeKey(r.Key), Driver: r.Driver, Handle: r.Handle, Access: string(r.Access), Mode: r.Mode, FsType: r.FSType, MountFlags: slices.Clone(r.MountFlags),
		Group: r.Group, ReadOnly: r.ReadOnly, Ephemeral: r.Ephemeral, Again: r.Again, Attributes: maps.Clone(r.Attributes), Attachment: maps.Clone(r.Attachment),
		StageSecrets: maps.Clone(r.Secrets.Stage), PublishSecrets: maps.Clone(r.Secrets.Publish), ContextSecrets: maps.Clone(r.Secrets.Context),
	}
}

// DecodePublish returns the request in m, for owner.
func DecodePublish(owner vm.Owner, m *nodev1.PublishVolumeRequest) csinode.Request {
	return csinode.Request{
		Key: DecodeVolumeKey(owner, m.GetKey()), Driver: m.GetDriver(), Handle: m.GetHandle(), Access: csinode.Access(m.GetAccess()), Mode: m.GetMode(), FSType: m.GetFsType(), MountFlags: cloneSlice(m.GetMountFlags()),
		Group: m.GetGroup(), ReadOnly: m.GetReadOnly(), Ephemeral: m.GetEphemeral(), Again: m.GetAgain(), Attributes: maps.Clone(m.GetAttributes()), Attachment: maps.Clone(m.GetAttachment()),
		Secrets: csinode.Secrets{Stage: maps.Clone(m.GetStageSecrets()), Publish: maps.Clone(m.GetPublishSecrets()), Context: maps.Clone(m.GetContextSecrets())},
	}
}

// EncodePublished returns p as a message.
func EncodePublished(p Published) *nodev1.PublishedVolume {
	return &nodev1.PublishedVolume{
		Key: EncodeVolumeKey(p.Key), Owner: EncodeOwner(p.Owner), Driver: p.Driver, Handle: p.Handle, Access: string(p.Access), ReadOnly: p.ReadOnly,
		Path: p.Path, Volume: string(p.Volume), Grouped: p.Grouped, Ready: p.Ready,
	}
}

// DecodePublished returns the published volume in m.
func DecodePublished(m *nodev1.PublishedVolume) Published {
	return Published{Volume: vm.ID(m.GetVolume()), Published: csinode.Published{
		Key: DecodeVolumeKey(DecodeOwner(m.GetOwner()), m.GetKey()), Driver: m.GetDriver(), Handle: m.GetHandle(), Access: csinode.Access(m.GetAccess()), ReadOnly: m.GetReadOnly(),
		Path: m.GetPath(), Grouped: m.GetGrouped(), Ready: m.GetReady(),
	}}
}

// EncodePublishedUsage returns u as a message.
func EncodePublishedUsage(u csinode.Usage) *nodev1.PublishedUsage {
	amount := func(a csinode.Amount) *nodev1.Amount {
		return &nodev1.Amount{Total: a.Total, Used: a.Used, Available: a.Available}
	}
	return &nodev1.PublishedUsage{Bytes: amount(u.Bytes), Inodes: amount(u.Inodes), Abnormal: u.Abnormal}
}

// DecodePublishedUsage returns the usage in m.
func DecodePublishedUsage(m *nodev1.PublishedUsage) csinode.Usage {
	amount := func(a *nodev1.Amount) csinode.Amount {
		return csinode.Amount{Total: a.GetTotal(), Used: a.GetUsed(), Available: a.GetAvailable()}
	}
	return csinode.Usage{Bytes: amount(m.GetBytes()), Inodes: amount(m.GetInodes()), Abnormal: m.GetAbnormal()}
}
