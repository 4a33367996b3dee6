package nodewire

import (
	"maps"
	"slices"
	"strings"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

// EncodeContainer returns c as a message.
func EncodeContainer(c vm.Container) *nodev1.Container {
	return &nodev1.Container{
		Name: c.Name, Image: c.Image, Kind: string(c.Kind), Process: EncodeProcess(c.Process), Mounts: each(c.Mounts, encodeMount),
		Hold: c.Hold, Root: c.Root, MessagePath: c.MessagePath, MessageFromLog: c.MessageFromLog,
		Resources: encodeResources(c.Resources), Restart: encodeRestart(c.Restart), Labels: maps.Clone(c.Labels), Manual: c.Manual,
		Volumes: each(c.Volumes, encodeVolume), OwnPids: c.PIDs.Own, PidsOf: c.PIDs.Of,
	}
}

// DecodeContainer returns the container in m.
func DecodeContainer(m *nodev1.Container) vm.Container {
	return vm.Container{
		Name: m.GetName(), Image: m.GetImage(), Kind: vm.ContainerKind(m.GetKind()),
		Process: DecodeProcess(m.GetProcess()), Mounts: each(m.GetMounts(), decodeMount), Hold: m.GetHold(), Root: m.GetRoot(),
		MessagePath: m.GetMessagePath(), MessageFromLog: m.GetMessageFromLog(),
		Resources: decodeResources(m.GetResources()), Restart: decodeRestart(m.GetRestart()), Labels: maps.Clone(m.GetLabels()), Manual: m.GetManual(),
		Volumes: each(m.GetVolumes(), decodeVolume), PIDs: vm.PIDs{Own: m.GetOwnPids(), Of: m.GetPidsOf()},
	}
}

func encodeRestart(r *vm.Restart) *nodev1.Restart {
	if r == nil {
		return nil
	}
	return &nodev1.Restart{Policy: string(r.Policy), Rules: each(r.Rules, func(rule vm.RestartRule) *nodev1.RestartRule {
		return &nodev1.RestartRule{Not: rule.Not, Codes: each(rule.Codes, func(code int) int32 { return int32(code) })}
	})}
}

func decodeRestart(m *nodev1.Restart) *vm.Restart {
	if m == nil {
		return nil
	}
	return &vm.Restart{Policy: vm.RestartPolicy(m.GetPolicy()), Rules: each(m.GetRules(), func(rule *nodev1.RestartRule) vm.RestartRule {
		return vm.RestartRule{Not: rule.GetNot(), Codes: each(rule.GetCodes(), func(code int32) int { return int(code) })}
	})}
}

func encodeResources(r *vm.Resources) *nodev1.Resources {
	if r == nil {
		return nil
	}
	return &nodev1.Resources{CpuLimit: r.CPULimit, CpuWeight: r.CPUWeight, MemoryLimit: r.MemoryLimit, OomScoreAdj: int32(r.OOMScoreAdj), CpuShares: r.CPUShares}
}

func decodeResources(m *nodev1.Resources) *vm.Resources {
	if m == nil {
		return nil
	}
	return &vm.Resources{CPULimit: m.GetCpuLimit(), CPUWeight: m.GetCpuWeight(), MemoryLimit: m.GetMemoryLimit(), OOMScoreAdj: int(m.GetOomScoreAdj()), CPUShares: m.GetCpuShares()}
}

// EncodeResized returns the resources of containers as a message, by name.
func EncodeResized(want map[string]vm.Resources) map[string]*nodev1.Resources {
	out := make(map[string]*nodev1.Resources, len(want))
	for name, r := range want {
		out[name] = encodeResources(&r)
	}
	return out
}

// DecodeResized returns the resources of containers in m, by name.
func DecodeResized(m map[string]*nodev1.Resources) map[string]vm.Resources {
	out := make(map[string]vm.Resources, len(m))
	for name, r := range m {
		if r := decodeResources(r); r != nil {
			out[name] = *r
		}
	}
	return out
}

func encodeContainerRecord(c vm.ContainerRecord) *nodev1.ContainerRecord {
	return &nodev1.ContainerRecord{
		Name: c.Name, ImageDigest: c.ImageDigest, Root: c.Root, ImageManifest: c.ImageManifest, Process: EncodeProcess(c.Process), Layers: slices.Clone(c.Layers),
		Status: encodeContainerStatus(c.Status),
	}
}

func decodeContainerRecord(m *nodev1.ContainerRecord) vm.ContainerRecord {
	return vm.ContainerRecord{
		Name: m.GetName(), ImageDigest: m.GetImageDigest(), Root: m.GetRoot(), ImageManifest: m.GetImageManifest(), Process: DecodeProcess(m.GetProcess()), Layers: cloneSlice(m.GetLayers()),
		Status: decodeContainerStatus(m.GetStatus()),
	}
}

func encodeContainerStatus(s vm.ContainerStatus) *nodev1.ContainerStatus {
	return &nodev1.ContainerStatus{
		State: string(s.State), Reason: s.Reason, Message: strings.ToValidUTF8(s.Message, "\uFFFD"), StartedAtNs: EncodeTime(s.StartedAt),
		Exit: encodeContainerExit(s.Exit), Last: encodeContainerExit(s.Last), Restarts: int64(s.Restarts),
		User: encodeContainerUser(s.User),
	}
}

func decodeContainerStatus(m *nodev1.ContainerStatus) vm.ContainerStatus {
	return vm.ContainerStatus{
		State: vm.ContainerState(m.GetState()), Reason: m.GetReason(), Message: m.GetMessage(), StartedAt: DecodeTime(m.GetStartedAtNs()),
		Exit: decodeContainerExit(m.GetExit()), Last: decodeContainerExit(m.GetLast()), Restarts: int(m.GetRestarts()),
		User: decodeContainerUser(m.GetUser()),
	}
}

func encodeContainerUser(u *vm.ContainerUser) *nodev1.ContainerUser {
	if u == nil {
		return nil
	}
	return &nodev1.ContainerUser{Uid: u.UID, Gid: u.GID, Groups: slices.Clone(u.Groups)}
}

func decodeContainerUser(m *nodev1.ContainerUser) *vm.ContainerUser {
	if m == nil {
		return nil
	}
	return &vm.ContainerUser{UID: m.GetUid(), GID: m.GetGid(), Groups: cloneSlice(m.GetGroups())}
}

func encodeContainerExit(x *vm.ContainerExit) *nodev1.ContainerExit {
	if x == nil {
		return nil
	}
	return &nodev1.ContainerExit{
		Code: int64(x.Code), Reason: x.Reason, Message: strings.ToValidUTF8(x.Message, "\uFFFD"),
		StartedAtNs: EncodeTime(x.StartedAt), FinishedAtNs: EncodeTime(x.FinishedAt),
	}
}

func decodeContainerExit(m *nodev1.ContainerExit) *vm.ContainerExit {
	if m == nil {
		return nil
	}
	return &vm.ContainerExit{
		Code: int(m.GetCode()), Reason: m.GetReason(), Message: m.GetMessage(),
		StartedAt: DecodeTime(m.GetStartedAtNs()), FinishedAt: DecodeTime(m.GetFinishedAtNs()),
	}
}

func encodeEphemeral(e vm.Ephemeral) *nodev1.Ephemeral {
	return &nodev1.Ephemeral{Spec: EncodeContainer(e.Spec), Record: encodeContainerRecord(e.Record), CreatedAtNs: EncodeTime(e.CreatedAt), Volumes: each(e.Volumes, encodeImageVolume)}
}

func decodeEphemeral(m *nodev1.Ephemeral) vm.Ephemeral {
	return vm.Ephemeral{Spec: DecodeContainer(m.GetSpec()), Record: decodeContainerRecord(m.GetRecord()), CreatedAt: DecodeTime(m.GetCreatedAtNs()), Volumes: each(m.GetVolumes(), decodeImageVolume)}
}
