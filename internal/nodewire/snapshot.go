package nodewire

import (
	"maps"
	"slices"
	"time"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// EncodeSnapshot returns s as a message with the fields that clients need: disks, boot and the source's record stay on
// the node, except for the hypervisor that the source asked for.
func EncodeSnapshot(s snapshot.Snapshot) *nodev1.Snapshot {
	return &nodev1.Snapshot{
		Id: s.ID, Name: s.Name, Description: s.Description,
		Image: s.Image, ImageDigest: s.ImageDigest, ImageType: string(s.ImageType), ImageBlobIds: slices.Clone(s.ImageBlobIDs),
		Hypervisor: s.Hypervisor, Machine: encodeMachine(s.Machine),
		Cpus: int64(s.CPU), Memory: s.Memory, Storage: s.Storage, Nics: int64(s.NICs), Network: s.Network, Windows: s.Windows,
		SourceVmId: string(s.Source.VMID), SourceVmName: s.Source.VMName, SourceNode: s.Source.Node,
		Live: s.Live, Size: s.Size, PauseNs: int64(s.Pause), Method: s.Method, Quiesced: s.Quiesced,
		CreatedAtNs: EncodeTime(s.CreatedAt), UsedAtNs: EncodeTime(s.UsedAt), Digest: s.Digest, Labels: maps.Clone(s.Labels),
		Owner: EncodeOwner(s.Owner), Published: slices.Clone(s.Published), Backend: s.Record.Spec.Driver, Arriving: s.Arriving,
		Volumes: each(s.Volumes, func(v snapshot.Volume) *nodev1.SnapshotVolume {
			return &nodev1.SnapshotVolume{Volume: v.Volume, Snapshot: string(v.Snapshot)}
		}),
	}
}

// DecodeSnapshot returns the snapshot in m.
func DecodeSnapshot(m *nodev1.Snapshot) snapshot.Snapshot {
	return snapshot.Snapshot{
		ID: m.GetId(), Name: m.GetName(), Description: m.GetDescription(),
		Image: m.GetImage(), ImageDigest: m.GetImageDigest(), ImageType: vm.ImageType(m.GetImageType()), ImageBlobIDs: cloneSlice(m.GetImageBlobIds()),
		Hypervisor: m.GetHypervisor(), Machine: decodeMachine(m.GetMachine()),
		CPU: int(m.GetCpus()), Memory: m.GetMemory(), Storage: m.GetStorage(), NICs: int(m.GetNics()), Network: m.GetNetwork(), Windows: m.GetWindows(),
		Source: snapshot.Source{VMID: vm.ID(m.GetSourceVmId()), VMName: m.GetSourceVmName(), Node: m.GetSourceNode()},
		Live:   m.GetLive(), Size: m.GetSize(), Pause: time.Duration(m.GetPauseNs()), Method: m.GetMethod(), Quiesced: m.GetQuiesced(),
		CreatedAt: DecodeTime(m.GetCreatedAtNs()), UsedAt: DecodeTime(m.GetUsedAtNs()), Digest: m.GetDigest(), Labels: cloneMap(m.GetLabels()),
		Owner: DecodeOwner(m.GetOwner()), Published: cloneSlice(m.GetPublished()), Record: vm.Record{Spec: vm.Spec{Driver: m.GetBackend()}}, Arriving: m.GetArriving(),
		Volumes: each(m.GetVolumes(), func(v *nodev1.SnapshotVolume) snapshot.Volume {
			return snapshot.Volume{Volume: v.GetVolume(), Snapshot: vm.ID(v.GetSnapshot())}
		}),
	}
}

func encodeMachine(x vm.Machine) *nodev1.Machine {
	return &nodev1.Machine{
		Driver: x.Driver, Version: x.Version, Type: x.Type, Arch: x.Arch, Accel: string(x.Accel), Cpu: x.CPU, Flags: slices.Clone(x.Flags),
	}
}

func decodeMachine(m *nodev1.Machine) vm.Machine {
	return vm.Machine{
		Driver: m.GetDriver(), Version: m.GetVersion(), Type: m.GetType(), Arch: m.GetArch(), Accel: vm.Accel(m.GetAccel()),
		CPU: m.GetCpu(), Flags: cloneSlice(m.GetFlags()),
	}
}

// EncodeSave returns the request to save the VM of ref.
func EncodeSave(ref string, s vm.SaveSpec) *nodev1.SaveRequest {
	return &nodev1.SaveRequest{Ref: ref, Name: s.Name, Description: s.Description, Quiesce: s.Quiesce, Labels: maps.Clone(s.Labels)}
}

// DecodeSave returns the request in m.
func DecodeSave(m *nodev1.SaveRequest) (ref string, s vm.SaveSpec) {
	return m.GetRef(), vm.SaveSpec{Name: m.GetName(), Description: m.GetDescription(), Quiesce: m.GetQuiesce(), Labels: cloneMap(m.GetLabels())}
}

// EncodeClone returns the request for a clone. With pull, the image is fetched first, with auth.
func EncodeClone(s vm.CloneSpec, pull bool, auth []image.RegistryAuth) *nodev1.CloneRequest {
	return &nodev1.CloneRequest{
		Snapshot: s.Snapshot, FromDir: s.FromDir, Name: s.Name, Labels: maps.Clone(s.Labels), Cpus: int64(s.CPUs), Memory: s.Memory, Storage: s.Storage,
		Nics: each(s.NICs, EncodeNICSpec), Hostname: s.Hostname, SshHostKeys: s.SSHHostKeys, Cold: s.Cold, StopGraceNs: int64(s.StopGrace),
		Dns: encodeDNS(s.DNS), Policed: s.Policed, KeepSize: s.Keep.Size, KeepNics: s.Keep.NICs, DiskRate: encodeDiskRate(s.DiskRate), Pull: pull, Auth: each(auth, encodeRegistryAuth),
	}
}

// DecodeClone returns the request in m.
func DecodeClone(m *nodev1.CloneRequest) (s vm.CloneSpec, pull bool, auth []image.RegistryAuth) {
	return vm.CloneSpec{
		Snapshot: m.GetSnapshot(), FromDir: m.GetFromDir(), Name: m.GetName(), Labels: cloneMap(m.GetLabels()), CPUs: int(m.GetCpus()),
		Memory: m.GetMemory(), Storage: m.GetStorage(), NICs: each(m.GetNics(), DecodeNICSpec), Hostname: m.GetHostname(),
		SSHHostKeys: m.GetSshHostKeys(), Cold: m.GetCold(), StopGrace: time.Duration(m.GetStopGraceNs()),
		DNS: decodeDNS(m.GetDns()), Policed: m.GetPoliced(), Keep: vm.Keep{Size: m.GetKeepSize(), NICs: m.GetKeepNics()}, DiskRate: decodeDiskRate(m.GetDiskRate()),
	}, m.GetPull(), each(m.GetAuth(), decodeRegistryAuth)
}

// EncodeTransfer returns p as a message.
func EncodeTransfer(p snapshot.Progress) *nodev1.TransferProgress {
	return &nodev1.TransferProgress{Phase: p.Phase, Done: p.Done, Total: p.Total, Moved: p.Moved}
}

// DecodeTransfer returns the progress in m.
func DecodeTransfer(m *nodev1.TransferProgress) snapshot.Progress {
	return snapshot.Progress{Phase: m.GetPhase(), Done: m.GetDone(), Total: m.GetTotal(), Moved: m.GetMoved()}
}

// EncodeAuth returns a as a message, which is equally secret.
func EncodeAuth(a snapshot.Auth) *nodev1.RemoteAuth {
	return &nodev1.RemoteAuth{Token: a.Token, Username: a.Username, Password: a.Password, Ca: slices.Clone(a.CA)}
}

// DecodeAuth returns the credentials in m.
func DecodeAuth(m *nodev1.RemoteAuth) snapshot.Auth {
	return snapshot.Auth{Token: m.GetToken(), Username: m.GetUsername(), Password: m.GetPassword(), CA: cloneSlice(m.GetCa())}
}

// EncodePushImage returns r as a message.
func EncodePushImage(r image.PushRequest) *nodev1.PushImageRequest {
	return &nodev1.PushImageRequest{
		Ref: r.Ref, To: r.To,
		Auth: &nodev1.RemoteAuth{Token: r.Token, Username: r.Username, Password: r.Password, Ca: slices.Clone(r.CA)},
	}
}

// DecodePushImage returns the request in m.
func DecodePushImage(m *nodev1.PushImageRequest) image.PushRequest {
	a := m.GetAuth()
	return image.PushRequest{
		Ref: m.GetRef(), To: m.GetTo(), Token: a.GetToken(), Username: a.GetUsername(), Password: a.GetPassword(), CA: cloneSlice(a.GetCa()),
	}
}
