package nodeapi

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

type vms struct {
	nodev1.UnimplementedVMsServer
	life       lifecycle
	reboots    rebooter
	records    reader
	guests     guests
	containers guest.Containers
	attacher   attacher
	states     states
	snapshots  imageCloner // nil: no snapshots
	removals   *removals
}

func (v *vms) Create(ctx context.Context, r *nodev1.CreateRequest) (*nodev1.Record, error) {
	s := nodewire.DecodeSpec(r.GetSpec())
	if err := requested(s); err != nil {
		return nil, err
	}
	return answer(nodewire.EncodeRecord)(v.life.Create(ctx, s))
}

func (v *vms) Launch(ctx context.Context, r *nodev1.LaunchRequest) (*nodev1.Record, error) {
	s := nodewire.DecodeSpec(r.GetSpec())
	if err := requested(s); err != nil {
		return nil, err
	}
	return answer(nodewire.EncodeRecord)(v.life.Launch(ctx, s))
}

// requested refuses what only code of cocoond sets.
func requested(s vm.Spec) error {
	if s.CgroupParent != "" {
		return errdefs.Invalidf("VM %s: a request of the node API chooses no cgroup of the node", s.Name)
	}
	return nil
}

func (v *vms) Start(ctx context.Context, r *nodev1.StartRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.life.Start(ctx, r.GetRef()))
}

func (v *vms) Stop(ctx context.Context, r *nodev1.StopRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.life.Stop(ctx, r.GetRef(), grace(r.GraceNs)))
}

func (v *vms) Restart(ctx context.Context, r *nodev1.RestartRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.life.Restart(ctx, r.GetRef(), grace(r.GraceNs)))
}

func (v *vms) Reboot(ctx context.Context, r *nodev1.RebootRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.reboots.Reboot(ctx, r.GetRef(), r.GetHard()))
}

func (v *vms) Pause(ctx context.Context, r *nodev1.PauseRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.life.Pause(ctx, r.GetRef()))
}

func (v *vms) Unpause(ctx context.Context, r *nodev1.UnpauseRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.life.Unpause(ctx, r.GetRef()))
}

func (v *vms) Remove(ctx context.Context, r *nodev1.RemoveRequest) (*nodev1.RemoveResponse, error) {
	rec, err := v.records.Inspect(ctx, r.GetRef())
	if err != nil {
		return nil, err
	}
	end := v.removals.begin(ctx, rec.ID)
	err = v.life.Remove(ctx, string(rec.ID), r.GetForce())
	end(err)
	return &nodev1.RemoveResponse{}, err
}

func (v *vms) Inspect(ctx context.Context, r *nodev1.InspectRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.records.Inspect(ctx, r.GetRef()))
}

func (v *vms) List(_ *nodev1.ListRequest, stream grpc.ServerStreamingServer[nodev1.Record]) error {
	return sendAll(stream, nodewire.EncodeRecord)(v.records.List(stream.Context()))
}

// Watch blocks in Send if the client does not read; the engine keeps no queue for it but continues to read the
// journal. The event of a removal waits until the removal is answered.
func (v *vms) Watch(r *nodev1.WatchRequest, stream grpc.ServerStreamingServer[nodev1.Event]) error {
	ctx := stream.Context()
	return v.records.Watch(ctx, r.GetAfter(), func(e vm.Event) error {
		if e.Type == vm.EventDeleted {
			v.removals.wait(ctx, e.Record.ID)
		}
		return stream.Send(nodewire.EncodeEvent(e))
	})
}

func (v *vms) Logs(r *nodev1.LogsRequest, stream grpc.ServerStreamingServer[nodev1.LogEntry]) error {
	ref, o := nodewire.DecodeLogOptions(r)
	return v.guests.Logs(stream.Context(), ref, o, func(e guest.LogEntry) error { return stream.Send(nodewire.EncodeLogEntry(e)) })
}

func (v *vms) Stats(ctx context.Context, r *nodev1.StatsRequest) (*nodev1.StatsResponse, error) {
	s, err := v.guests.Stats(ctx, r.GetRef())
	return nodewire.EncodeStats(s), err
}

func (v *vms) Describe(ctx context.Context, r *nodev1.DescribeRequest) (*nodev1.DescribeResponse, error) {
	d, err := v.guests.Describe(ctx, r.GetRef())
	return nodewire.EncodeDescription(d), err
}

func (v *vms) Freeze(ctx context.Context, r *nodev1.FreezeRequest) (*nodev1.FreezeResponse, error) {
	return &nodev1.FreezeResponse{}, v.guests.Freeze(ctx, r.GetRef(), time.Duration(r.GetMostMs())*time.Millisecond)
}

func (v *vms) Thaw(ctx context.Context, r *nodev1.ThawRequest) (*nodev1.ThawResponse, error) {
	held, err := v.guests.Thaw(ctx, r.GetRef())
	return &nodev1.ThawResponse{Held: held}, err
}

func (v *vms) SetLogins(ctx context.Context, r *nodev1.SetLoginsRequest) (*nodev1.SetLoginsResponse, error) {
	return &nodev1.SetLoginsResponse{}, v.guests.SetLogins(ctx, r.GetRef(), nodewire.DecodeLogins(r))
}

func (v *vms) UpdateVolume(ctx context.Context, r *nodev1.UpdateVolumeRequest) (*nodev1.UpdateVolumeResponse, error) {
	return &nodev1.UpdateVolumeResponse{}, v.containers.UpdateVolume(ctx, r.GetRef(), r.GetVolume(), nodewire.DecodeVolumeFiles(r.GetFiles()))
}

func (v *vms) KillContainer(ctx context.Context, r *nodev1.KillContainerRequest) (*nodev1.KillContainerResponse, error) {
	return &nodev1.KillContainerResponse{}, v.containers.KillContainer(ctx, r.GetRef(), r.GetContainer(), int(r.GetRun()), grace(r.GraceNs))
}

func (v *vms) ReleaseContainer(ctx context.Context, r *nodev1.ReleaseContainerRequest) (*nodev1.ReleaseContainerResponse, error) {
	return &nodev1.ReleaseContainerResponse{}, v.containers.ReleaseContainer(ctx, r.GetRef(), r.GetContainer())
}

func (v *vms) AddContainer(ctx context.Context, r *nodev1.AddContainerRequest) (*nodev1.Record, error) {
	c := nodewire.DecodeContainer(r.GetContainer())
	if slices.ContainsFunc(c.Volumes, func(v vm.Volume) bool {
		return v.Dir != nil && v.Dir.Trusted || v.HostDisk != nil && v.HostDisk.Trusted
	}) {
		return nil, errdefs.Invalidf("container %s: a request of the node API has no folder or device that the list of the operator does not have", c.Name)
	}
	return answer(nodewire.EncodeRecord)(v.containers.AddContainer(ctx, r.GetRef(), c))
}

func (v *vms) StartContainer(ctx context.Context, r *nodev1.StartContainerRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.containers.StartContainer(ctx, r.GetRef(), r.GetContainer()))
}

func (v *vms) RemoveContainer(ctx context.Context, r *nodev1.RemoveContainerRequest) (*nodev1.RemoveContainerResponse, error) {
	return &nodev1.RemoveContainerResponse{}, v.containers.RemoveContainer(ctx, r.GetRef(), r.GetContainer())
}

func (v *vms) ResizeContainers(ctx context.Context, r *nodev1.ResizeContainersRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.containers.ResizeContainers(ctx, r.GetRef(), nodewire.DecodeResized(r.GetContainers())))
}

func (v *vms) Resize(ctx context.Context, r *nodev1.ResizeRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.attacher.Resize(ctx, r.GetRef(), vm.Size{CPUs: int(r.GetCpus()), Memory: r.GetMemory()}))
}

func (v *vms) AttachVolume(ctx context.Context, r *nodev1.AttachVolumeRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.attacher.AttachVolume(ctx, r.GetRef(), nodewire.DecodeVolumeUse(r.GetVolume()), r.GetPath()))
}

func (v *vms) DumpMemory(ctx context.Context, r *nodev1.DumpMemoryRequest) (*nodev1.DumpMemoryResponse, error) {
	return &nodev1.DumpMemoryResponse{}, v.attacher.DumpMemory(ctx, r.GetRef(), r.GetVolume(), r.GetFile())
}

func (v *vms) DetachVolume(ctx context.Context, r *nodev1.DetachVolumeRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.attacher.DetachVolume(ctx, r.GetRef(), r.GetVolume()))
}

func (v *vms) AttachNIC(ctx context.Context, r *nodev1.AttachNICRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.attacher.AttachNIC(ctx, r.GetRef(), nodewire.DecodeNICSpec(r.GetNic())))
}

func (v *vms) DetachNIC(ctx context.Context, r *nodev1.DetachNICRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.attacher.DetachNIC(ctx, r.GetRef(), r.GetNic()))
}

func (v *vms) SetLink(ctx context.Context, r *nodev1.SetLinkRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.attacher.SetLink(ctx, r.GetRef(), r.GetNic(), r.GetDown()))
}

func (v *vms) Clone(ctx context.Context, r *nodev1.CloneRequest) (*nodev1.Record, error) {
	spec, pull, auth := nodewire.DecodeClone(r)
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	if pull && v.snapshots == nil {
		return nil, errdefs.Unsupportedf("this cocoond has no snapshots")
	}
	if pull {
		return answer(nodewire.EncodeRecord)(v.snapshots.CloneWithImage(ctx, spec, auth))
	}
	return answer(nodewire.EncodeRecord)(v.states.Clone(ctx, spec))
}

func (v *vms) Restore(ctx context.Context, r *nodev1.RestoreRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.states.Restore(ctx, r.GetRef(), r.GetSnapshot()))
}

func (v *vms) Hibernate(ctx context.Context, r *nodev1.HibernateRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.states.Hibernate(ctx, r.GetRef(), r.GetName()))
}

func (v *vms) Wake(ctx context.Context, r *nodev1.WakeRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(v.states.Wake(ctx, r.GetRef()))
}

// grace converts a missing value, and a meaningless negative one, to the engine's -1: the grace of the spec.
func grace(ns *int64) time.Duration {
	if ns == nil || *ns < 0 {
		return -1
	}
	return time.Duration(*ns)
}
