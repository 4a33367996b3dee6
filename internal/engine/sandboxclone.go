package engine

import (
	"context"
	"fmt"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file is about sandboxes in snapshots. A sandbox is saved without the folder that it shares with its node. It resumes only for whoever knows
// what is to be in that folder.

// CloneSandbox creates a sandbox that resumes from a snapshot of one. Its containers are in the state created, with all that they have done so far,
// and go on when they are started. It returns when its CPUs run.
// Errors, before anything changes: InvalidArgument, NotFound (folder, image), AlreadyExists (name), FailedPrecondition (it cannot resume here, and
// why), DataLoss. If it fails later, the whole VM is rolled back.
func (e *Engine) CloneSandbox(caller context.Context, c vm.SandboxClone) (vm.Record, error) {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	began := time.Now()
	r, err := e.cloneSandbox(ctx, c)
	if err != nil {
		return vm.Record{}, e.life.ended(caller, fmt.Errorf("resume the sandbox in %s: %w", c.Dir, err))
	}
	e.log.Info("vm created", "vm", r.ID, "op", opClone, "snapshot", r.Snapshot, "dur", time.Since(began))
	return r.Clone(), nil
}

func (n *node) cloneSandbox(ctx context.Context, c vm.SandboxClone) (vm.Record, error) {
	store, err := n.store()
	if err != nil {
		return vm.Record{}, err
	}
	h, err := store.HoldDir(ctx, c.Dir)
	if err != nil {
		return vm.Record{}, err
	}
	defer h.Release()
	if err := h.Verify(ctx); err != nil {
		return vm.Record{}, damaged(h.Snapshot(), err)
	}
	r, images, err := n.designSandbox(ctx, h.Snapshot(), c)
	if err != nil {
		return vm.Record{}, err
	}
	r, err = cloneOperation.create(ctx, n, r, func(m *machine) *clone { return &clone{newVM: newVM{machine: m}, held: h, images: images} })
	return r, damaged(h.Snapshot(), err)
}

// designSandbox returns the first record of a sandbox that resumes from x. Everything that can be refused is refused here.
func (n *node) designSandbox(ctx context.Context, x snapshot.Snapshot, c vm.SandboxClone) (vm.Record, []image.Image, error) {
	switch saved := x.Record.Spec; {
	case !saved.Sandbox || !x.Live || x.Fresh:
		return vm.Record{}, nil, errdefs.Invalidf("it is not the snapshot of a sandbox that runs")
	case x.Owner.Namespace != vm.Behalf(ctx).Namespace && !x.Owner.Operator():
		return vm.Record{}, nil, errdefs.NotFoundf("there is no snapshot of namespace %s in the folder", vm.Behalf(ctx).Namespace)
	case len(x.Record.Containers) > 0 || len(saved.Volumes) > 0 || len(x.Volumes) > 0 || saved.CgroupParent != "":
		return vm.Record{}, nil, errdefs.DataLossf("the snapshot is damaged: its sandbox has what no sandbox of a pod can have")
	}
	ephemeral, err := resumedContainers(x, c.Containers)
	if err != nil {
		return vm.Record{}, nil, err
	}
	r, images, err := n.designCopy(ctx, x, vm.CloneSpec{
		FromDir: c.Dir, Name: c.Spec.Name, Labels: c.Spec.Labels, NICs: c.Spec.NICs, Hostname: c.Spec.Hostname, StopGrace: c.Spec.StopGrace, DNS: c.Spec.DNS, DiskRate: c.Spec.DiskRate,
	}, vm.NewID(), ephemeral)
	if err != nil {
		return r, nil, err
	}
	if r.Spec.DNS != nil {
		r.Spec.DNS.Offered = false
	}
	r.Spec.CgroupParent, r.Spec.Domain, r.Spec.Hosts = c.Spec.CgroupParent, c.Spec.Domain, c.Spec.Hosts
	return r, images, r.Spec.Validate()
}

// resumedContainers returns the containers of a sandbox that resumes from x: those that want says. A snapshot from elsewhere may say anything.
func resumedContainers(x snapshot.Snapshot, want []vm.Container) (out []vm.Ephemeral, err error) {
	if len(x.Record.Ephemeral) > maxEphemeral {
		return nil, errdefs.DataLossf("the snapshot is damaged: it has %d containers; at most %d are possible", len(x.Record.Ephemeral), maxEphemeral)
	}
	for _, e := range x.Record.Clone().Ephemeral {
		if e.Record.Status.State == vm.ContainerTerminated {
			continue
		}
		at := slices.IndexFunc(want, func(c vm.Container) bool { return c.Name == e.Record.Name })
		if at < 0 {
			return nil, errdefs.Preconditionf("container %s runs in the snapshot, and is to run no more; name it", e.Record.Name)
		}
		if e.Spec.Name != e.Record.Name || !onlyImages(e) || find(out, e.Record.Name) >= 0 || e.Spec.ValidateEphemeral() != nil || e.Record.Process.Allowed() != nil {
			return nil, errdefs.DataLossf("the snapshot is damaged: container %q is not valid", e.Record.Name)
		}
		if e.Spec, err = e.Spec.Resumed(want[at]); err != nil {
			return nil, err
		}
		if err := e.Spec.ValidateEphemeral(); err != nil {
			return nil, err
		}
		e.Record.Status, e.Record.ImageManifest, e.CreatedAt = vm.ContainerStatus{State: vm.ContainerCreated}, "", now()
		for i := range e.Volumes {
			e.Volumes[i].ImageManifest = ""
		}
		out = append(out, e)
	}
	if len(out) != len(want) {
		return nil, errdefs.Preconditionf("%d containers are to be resumed, and the snapshot has %d that run; name those", len(want), len(out))
	}
	return out, nil
}

// onlyImages reports whether all disks that e has as volumes hold the files of images, those that its configuration names.
func onlyImages(e vm.Ephemeral) bool {
	var want []string
	for _, v := range e.Spec.Volumes {
		if v.Kind == vm.VolumeImage {
			want = append(want, v.Name)
		}
	}
	return slices.EqualFunc(e.Volumes, want, func(v vm.ImageVolume, name string) bool {
		return v.Volume == name && v.ImageDigest != "" && len(v.Layers) > 0
	})
}
