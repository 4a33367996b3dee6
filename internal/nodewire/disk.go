package nodewire

import (
	"slices"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

func encodeCloudInit(c *vm.CloudInit) *nodev1.CloudInit {
	if c == nil {
		return nil
	}
	return &nodev1.CloudInit{
		Datasource: c.Datasource, MetaData: c.MetaData, UserData: c.UserData, VendorData: c.VendorData,
		NetworkConfig: c.NetworkConfig, SshKeys: slices.Clone(c.SSHKeys),
		User: c.User, PasswordHash: c.PasswordHash,
	}
}

func decodeCloudInit(m *nodev1.CloudInit) *vm.CloudInit {
	if m == nil {
		return nil
	}
	return &vm.CloudInit{
		Datasource: m.GetDatasource(), MetaData: m.GetMetaData(), UserData: m.GetUserData(), VendorData: m.GetVendorData(),
		NetworkConfig: m.GetNetworkConfig(), SSHKeys: cloneSlice(m.GetSshKeys()),
		User: m.GetUser(), PasswordHash: m.GetPasswordHash(),
	}
}

func encodeVolume(v vm.Volume) *nodev1.Volume {
	m := &nodev1.Volume{
		Name: v.Name, Kind: string(v.Kind), Memory: v.Memory, SizeLimit: v.SizeLimit, Group: clonePointer(v.Group), Files: EncodeVolumeFiles(v.Files), Label: v.Label, Image: v.Image,
	}
	if v.Disk != nil {
		m.Disk = EncodeVolumeUse(*v.Disk)
	}
	if d := v.Dir; d != nil {
		m.Dir = &nodev1.HostDir{Path: d.Path, ReadOnly: d.ReadOnly, Create: d.Create, GroupOnMismatch: d.GroupOnMismatch, Published: d.Published, File: d.File, Trusted: d.Trusted, Below: d.Below, ReadOnlyBelow: d.ReadOnlyBelow}
	}
	if d := v.HostDisk; d != nil {
		m.HostDisk = &nodev1.HostDisk{Path: d.Path, Capacity: d.Capacity, ReadOnly: d.ReadOnly, Shared: d.Shared, Trusted: d.Trusted}
	}
	if n := v.NFS; n != nil {
		m.Nfs = &nodev1.NFS{Server: n.Server, Path: n.Path, Options: slices.Clone(n.Options), ReadOnly: n.ReadOnly}
	}
	return m
}

func decodeVolume(m *nodev1.Volume) vm.Volume {
	v := vm.Volume{
		Name: m.GetName(), Kind: vm.VolumeKind(m.GetKind()), Memory: m.GetMemory(), SizeLimit: m.GetSizeLimit(),
		Group: clonePointer(m.Group), Files: DecodeVolumeFiles(m.GetFiles()), Label: m.GetLabel(), Image: m.GetImage(),
	}
	if m.GetDisk() != nil {
		v.Disk = new(DecodeVolumeUse(m.GetDisk()))
	}
	if d := m.GetDir(); d != nil {
		v.Dir = &vm.HostDir{Path: d.GetPath(), ReadOnly: d.GetReadOnly(), Create: d.GetCreate(), GroupOnMismatch: d.GetGroupOnMismatch(), Published: d.GetPublished(), File: d.GetFile(), Trusted: d.GetTrusted(), Below: d.GetBelow(), ReadOnlyBelow: d.GetReadOnlyBelow()}
	}
	if d := m.GetHostDisk(); d != nil {
		v.HostDisk = &vm.HostDisk{Path: d.GetPath(), Capacity: d.GetCapacity(), ReadOnly: d.GetReadOnly(), Shared: d.GetShared(), Trusted: d.GetTrusted()}
	}
	if n := m.GetNfs(); n != nil {
		v.NFS = &vm.NFS{Server: n.GetServer(), Path: n.GetPath(), Options: cloneSlice(n.GetOptions()), ReadOnly: n.GetReadOnly()}
	}
	return v
}

// EncodeVolumeUse returns u as a message.
func EncodeVolumeUse(u vm.VolumeUse) *nodev1.VolumeUse {
	return &nodev1.VolumeUse{Ref: u.Ref, ReadOnly: u.ReadOnly, Shared: u.Shared, FsType: u.FSType, GroupOnMismatch: u.GroupOnMismatch}
}

// DecodeVolumeUse returns the use of a volume in m.
func DecodeVolumeUse(m *nodev1.VolumeUse) vm.VolumeUse {
	return vm.VolumeUse{Ref: m.GetRef(), ReadOnly: m.GetReadOnly(), Shared: m.GetShared(), FSType: m.GetFsType(), GroupOnMismatch: m.GetGroupOnMismatch()}
}

// EncodeVolumeFiles returns the files as messages.
func EncodeVolumeFiles(files []vm.VolumeFile) []*nodev1.VolumeFile {
	return each(files, func(f vm.VolumeFile) *nodev1.VolumeFile {
		return &nodev1.VolumeFile{Path: f.Path, Data: f.Data, Mode: f.Mode, Uid: clonePointer(f.UID)}
	})
}

// DecodeVolumeFiles returns the files in m.
func DecodeVolumeFiles(m []*nodev1.VolumeFile) []vm.VolumeFile {
	return each(m, func(f *nodev1.VolumeFile) vm.VolumeFile {
		return vm.VolumeFile{Path: f.GetPath(), Data: f.GetData(), Mode: f.GetMode(), UID: clonePointer(f.Uid)}
	})
}

func encodeMount(m vm.Mount) *nodev1.Mount {
	return &nodev1.Mount{Volume: m.Volume, Path: m.Path, SubPath: m.SubPath, ReadOnly: m.ReadOnly, Device: m.Device}
}

func decodeMount(m *nodev1.Mount) vm.Mount {
	return vm.Mount{Volume: m.GetVolume(), Path: m.GetPath(), SubPath: m.GetSubPath(), ReadOnly: m.GetReadOnly(), Device: m.GetDevice()}
}

func clonePointer[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}

func encodeImageVolume(v vm.ImageVolume) *nodev1.ImageVolume {
	return &nodev1.ImageVolume{Volume: v.Volume, ImageDigest: v.ImageDigest, ImageManifest: v.ImageManifest, Layers: slices.Clone(v.Layers)}
}

func decodeImageVolume(m *nodev1.ImageVolume) vm.ImageVolume {
	return vm.ImageVolume{Volume: m.GetVolume(), ImageDigest: m.GetImageDigest(), ImageManifest: m.GetImageManifest(), Layers: cloneSlice(m.GetLayers())}
}

func encodeAttached(v vm.AttachedVolume) *nodev1.AttachedVolume {
	return &nodev1.AttachedVolume{Volume: v.Volume, Id: string(v.ID), Serial: v.Serial, Size: v.Size}
}

func decodeAttached(m *nodev1.AttachedVolume) vm.AttachedVolume {
	return vm.AttachedVolume{Volume: m.GetVolume(), ID: vm.ID(m.GetId()), Serial: m.GetSerial(), Size: m.GetSize()}
}

func encodeDiskRate(r vm.DiskRate) *nodev1.DiskRate {
	if r == (vm.DiskRate{}) {
		return nil
	}
	return &nodev1.DiskRate{Bytes: r.Bytes, Ops: r.Ops}
}

func decodeDiskRate(m *nodev1.DiskRate) vm.DiskRate {
	return vm.DiskRate{Bytes: m.GetBytes(), Ops: m.GetOps()}
}
