package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/engine/session"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file makes a sandbox the VM of one container whose image boots itself. Its guest is then that container: it starts, stops and ends with it.
// The interfaces and the cgroup of the sandbox stay.

// AddBootContainer adds a container with a disk image to a sandbox in which no other container runs or waits. The guest of the sandbox ends, and
// StartContainer boots the image. It is the only container until it has ended; then another one with a disk image may follow, with a new disk. One that
// was not started yet has ended then. A container of this name that was added before is no error.
// Errors: InvalidArgument, NotFound (VM, image), FailedPrecondition if the VM is no sandbox or has other containers. After an error
// the sandbox is as before, but its guest may have ended; the next container starts it again.
func (v containerVerbs) AddBootContainer(caller context.Context, ref string, c vm.Container, g vm.GuestBoot) (vm.Record, error) {
	if err := errors.Join(c.ValidateEphemeral(), g.Validate()); err != nil {
		return vm.Record{}, err
	}
	return v.operate(caller, opAddBootContainer, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.addBootContainer(ctx, c.Clone(), g)
	})
}

func (m *machine) addBootContainer(ctx context.Context, c vm.Container, g vm.GuestBoot) (vm.Record, error) {
	r := m.record()
	alive := slices.IndexFunc(r.Ephemeral, func(e vm.Ephemeral) bool {
		waits := r.Boots(e.Record.Name) && e.Record.Status.State == vm.ContainerCreated // and has no guest yet, so another one may take its place
		return e.Record.Status.State != vm.ContainerTerminated && !waits
	})
	switch {
	case !r.Spec.Sandbox:
		return r, errdefs.Preconditionf("it is no sandbox, so it boots what it was made for")
	case find(r.Ephemeral, c.Name) >= 0:
		return r, nil
	case !c.Manual:
		return r, errdefs.Invalidf("container %s boots itself, so somebody has to start it", c.Name)
	case alive >= 0:
		return r, errdefs.Preconditionf("container %s is in it, and image %s boots itself, so it is the only container of a VM; end the other one first", r.Ephemeral[alive].Record.Name, c.Image)
	case r.BootContainer == "" && len(r.Spec.Volumes) > 0:
		return r, errdefs.Unsupportedf("it has volumes of its own, which no image that boots itself can have")
	case r.State != vm.StateRunning && r.State != vm.StateCreated && r.State != vm.StateStopped:
		return r, broken(r)
	case len(r.Ephemeral) >= maxEphemeral:
		return r, errdefs.Exhaustedf("it has %d containers that were added, which is the maximum; remove one of them", maxEphemeral)
	}
	if err := netted(r); err != nil {
		return r, err
	}
	next, img, err := m.designBoot(ctx, r, c, g)
	if err != nil {
		return r, fmt.Errorf("container %s: %w", c.Name, err)
	}
	c.Process = vm.Process{}
	b := &bootContainer{machine: m, next: next, image: img, want: vm.Ephemeral{CreatedAt: now(), Spec: c, Record: vm.ContainerRecord{
		Name: c.Name, ImageDigest: img.ID, Status: vm.ContainerStatus{State: vm.ContainerCreated},
	}}}
	return bootContainerOperation.run(ctx, m, b, additionArgs{c.Name}.json())
}

// boots reports whether a container is the guest of its VM.
func (n *node) boots(caller context.Context, ref, container string) bool {
	if n.life.ready(caller) != nil {
		return false
	}
	m, err := n.vms.find(caller, ref)
	if err != nil {
		return false
	}
	r := m.record()
	return r.Boots(container) && find(r.Ephemeral, container) >= 0
}

// startBootContainer boots the container of that name. If it cannot boot, it has ended, and its status says why.
func (m *machine) startBootContainer(ctx context.Context, name string) (vm.Record, error) {
	r := m.record()
	at := find(r.Ephemeral, name)
	switch {
	case !r.Boots(name) || at < 0:
		return r, errdefs.NotFoundf("it has no container %q that boots itself", name)
	case r.State == vm.StateRunning:
		return r, nil
	case r.Ephemeral[at].Record.Status.State != vm.ContainerCreated:
		return r, errdefs.Preconditionf("container %s has ended (%s); remove it and add another one", name, r.Ephemeral[at].Record.Status.Reason)
	}
	if err := netted(r); err != nil {
		return r, err
	}
	r, err := m.startStopped(ctx, r)
	if err == nil || ctx.Err() != nil || errdefs.IsUnavailable(err) {
		return r, err
	}
	if _, failed := m.update(ctx, func(r *vm.Record) {
		if at := find(r.Ephemeral, name); at >= 0 && r.Ephemeral[at].Record.Status.State == vm.ContainerCreated {
			r.Ephemeral = slices.Clone(r.Ephemeral)
			r.Ephemeral[at].Record.Status = session.NeverStarted(err)
		}
	}); failed != nil {
		m.log.Warn("failed start of a container not recorded", "vm", m.id, "container", name, "err", failed)
	}
	return r, err
}

// designBoot returns what the record of a sandbox, r, has when its guest boots the image of c. It changes nothing.
func (m *machine) designBoot(ctx context.Context, r vm.Record, c vm.Container, g vm.GuestBoot) (vm.Record, image.Image, error) {
	img, err := m.images.Get(ctx, c.Image)
	if err != nil {
		return r, img, err
	}
	if img.Type == vm.ImageOCI {
		return r, img, errdefs.Invalidf("image %s is a container image, so no guest can boot it; add it while the sandbox runs", c.Image)
	}
	spec := r.Spec.Booting(c, g)
	if sizes, ok := m.images.(diskSizer); ok && g.Storage == 0 {
		size, err := sizes.DiskSize(ctx, img)
		if err != nil {
			return r, img, err
		}
		spec.Storage = max(spec.Storage, size)
	}
	next, err := m.design(spec, r.Driver, img)
	if err != nil {
		return r, img, err
	}
	next.ID, next.Owner = r.ID, r.Owner
	if next.Boot, err = m.bootOf(r.ID, r.Driver, spec, img.Type); err != nil {
		return r, img, err
	}
	if _, err := m.designImageVolumes(ctx, &next); err != nil {
		return r, img, err
	}
	return next, img, errors.Join(m.designDirs(next), m.designHostDisks(next))
}

// bootContainer makes a sandbox the VM of a container.
type bootContainer struct {
	*machine
	next  vm.Record // what the record of the sandbox has then
	image image.Image
	want  vm.Ephemeral
}

var bootContainerOperation = operation[*bootContainer]{
	name: opAddBootContainer, told: true, recall: recallBootContainer,
	steps: []step[*bootContainer]{
		{word: stepDisks, run: (*bootContainer).lay, undo: (*bootContainer).undo, recover: (*bootContainer).recover},
	},
}

func recallBootContainer(m *machine, in journal.Intent) (*bootContainer, error) {
	var args additionArgs
	if err := json.Unmarshal(in.Args, &args); err != nil || args.Name == "" {
		return nil, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return &bootContainer{machine: m}, nil
}

// lay makes the disk, and then ends the guest.
func (b *bootContainer) lay(ctx context.Context) (outcome, error) {
	if err := b.dirs.make(b.id); err != nil {
		return outcome{}, err
	}
	dir, err := b.dirs.newDisks(b.id)
	if err != nil {
		return outcome{}, err
	}
	root, err := b.images.Prepare(ctx, b.image, image.Layout{Dir: dir, Storage: b.next.Spec.Storage, Raw: b.drivers.rawOnly(b.next.Driver)})
	if err != nil {
		return outcome{}, err
	}
	if err := b.dirs.syncing(b.id, root.Disks)(); err != nil {
		return outcome{}, err
	}
	if err := b.retire(ctx); err != nil {
		return outcome{}, err
	}
	// The console of the guest that has ended is not a part of the log of this one.
	if err := os.Remove(process.ConsolePath(b.dirs.run(b.id))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return outcome{}, fmt.Errorf("begin the log of the console: %w", err)
	}
	was, at := b.record().Disks, now()
	return outcome{synced: true, change: func(r *vm.Record) {
		rested(r, at)
		r.Ephemeral = slices.Clone(r.Ephemeral)
		if i := find(r.Ephemeral, r.BootContainer); i >= 0 && r.Ephemeral[i].Record.Status.State == vm.ContainerCreated {
			r.Ephemeral[i].Record.Status = session.NeverStarted(errdefs.Preconditionf("container %s has taken its place", b.want.Record.Name))
		}
		r.Spec, r.ImageType, r.ImageDigest, r.Boot, r.Process = b.next.Spec, b.next.ImageType, b.next.ImageDigest, b.next.Boot, vm.Process{}
		r.Disks, r.Attached, r.ImageVolumes, r.KernelSums = root.Disks, nil, b.next.ImageVolumes, vm.KernelSums{}
		r.BootContainer, r.Ephemeral = b.want.Record.Name, append(r.Ephemeral, b.want)
		r.FirstBooted = false
	}, then: func(context.Context) { b.tidy(ownFiles(b.dirs.state(b.id), was)...) }}, nil
}

// rested changes r to the record of a sandbox that is ready to start. Its guest has just ended, because another one takes its place.
func rested(r *vm.Record, at time.Time) {
	if r.State == vm.StateRunning {
		stopped(r, ending{asked: true}, at)
	}
	r.State, r.Reason, r.Message = vm.StateCreated, "", ""
}

// undo leaves the sandbox as it was, except that its guest may have ended. The next container starts a guest again.
func (b *bootContainer) undo(ctx context.Context, cause error) error {
	change := same
	if b.record().State == vm.StateRunning && b.run.Load() == nil {
		at := now()
		change = func(r *vm.Record) { rested(r, at) }
	}
	b.settleFailed(context.WithoutCancel(ctx), opAddBootContainer, change)
	b.tidy()
	return cause
}

// recover takes back what an earlier process of the engine has begun: the caller was not told of it.
func (b *bootContainer) recover(ctx context.Context) (next string, err error) {
	r := b.record()
	if err := b.reattach(ctx); err != nil {
		return "", err
	}
	change := same
	if r.State == vm.StateRunning && b.run.Load() == nil {
		if err := b.reap(ctx); err != nil {
			return "", err
		}
		b.reclaim(ctx)
		at := now()
		change = func(r *vm.Record) { rested(r, at) }
	}
	if err := b.settle(ctx, change); err != nil {
		return "", err
	}
	b.tidy()
	return "", nil
}
