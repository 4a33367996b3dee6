package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/engine/session"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

func (m *machine) addContainer(ctx context.Context, c vm.Container) (vm.Record, error) {
	r := m.record()
	switch run := m.run.Load(); {
	case find(r.Ephemeral, c.Name) >= 0:
		return r, nil
	case slices.ContainsFunc(r.Containers, func(have vm.ContainerRecord) bool { return have.Name == c.Name }):
		return r, errdefs.Existsf("it has a container %s", c.Name)
	case r.BootContainer != "":
		return r, errdefs.Preconditionf("its guest is container %s, whose image boots itself, so it is the only container; make another sandbox for others", r.BootContainer)
	case r.ImageType != vm.ImageOCI:
		return r, errdefs.Unsupportedf("its guest boots its own system, and no container can be added to that")
	case len(r.Containers) == 0 && !r.Spec.Sandbox:
		return r, errdefs.Unsupportedf("it has a process instead of containers, and no container can be added to that")
	case r.State != vm.StateRunning || run == nil:
		return r, errdefs.Preconditionf("it does not run (%s), so no container can be added to it", r.State)
	case c.PIDs.Of != "" && find(r.Ephemeral, c.PIDs.Of) < 0 && !slices.ContainsFunc(r.Containers, func(have vm.ContainerRecord) bool { return have.Name == c.PIDs.Of }):
		return r, errdefs.NotFoundf("container %s is to see the processes of container %s, which it does not have", c.Name, c.PIDs.Of)
	case len(r.Ephemeral) >= maxEphemeral:
		return r, errdefs.Exhaustedf("it has %d containers that were added, which is the maximum; remove one of them", maxEphemeral)
	}
	if err := c.ValidateIn(r.Spec.Volumes); err != nil {
		return r, err
	}
	if err := awake(r); err != nil {
		return r, err
	}
	if _, err := m.ownShares(c); err != nil {
		return r, fmt.Errorf("container %s: %w", c.Name, err)
	}
	volumes, err := m.ownDisks(ctx, c)
	if err != nil {
		return r, fmt.Errorf("container %s: %w", c.Name, err)
	}
	img, err := m.images.Get(ctx, c.Image)
	if err != nil {
		return r, fmt.Errorf("container %s: %w", c.Name, err)
	}
	if img.Type != vm.ImageOCI {
		return r, errdefs.Invalidf("container %s: image %s boots itself, so it cannot be added to a running VM", c.Name, c.Image)
	}
	process := c.Process.Over(img.Config)
	if process.Empty() {
		return r, errdefs.Invalidf("container %s: image %s has no entrypoint; give a command", c.Name, c.Image)
	}
	if err := process.Allowed(); err != nil {
		return r, fmt.Errorf("container %s: %w", c.Name, err)
	}
	status := vm.ContainerStatus{State: vm.ContainerWaiting, Reason: vm.ContainerCreating}
	if c.Manual {
		status = vm.ContainerStatus{State: vm.ContainerCreated}
	}
	a := &addition{machine: m, image: img, volumes: volumes, name: c.Name, want: vm.Ephemeral{CreatedAt: now(), Spec: c, Record: vm.ContainerRecord{
		Name: c.Name, ImageDigest: img.ID, Process: process, Status: status,
	}}}
	return additionOperation.run(ctx, m, a, additionArgs{c.Name}.json())
}

// addition adds a container to a running VM. From the first step on, the record has the container, and every session
// with the guest begins with telling it.
type addition struct {
	*machine
	name  string
	want  vm.Ephemeral // with image, unless an earlier process of the engine recorded it
	image image.Image

	volumes []ownDisk // as want
}

var additionOperation = operation[*addition]{
	name: opAddContainer, told: true, recall: recallAddition,
	steps: []step[*addition]{
		{word: stepDisks, run: (*addition).plug, undo: (*addition).undo, recover: (*addition).recover, lasting: true},
		{word: stepJoin, run: (*addition).join, undo: (*addition).undo, recover: (*addition).recover, lasting: true},
	},
}

// additionArgs are the journal arguments.
type additionArgs struct {
	Name string `json:"name"` // of the container
}

func (a additionArgs) json() []byte {
	b, _ := json.Marshal(a) // a string always encodes
	return b
}

func recallAddition(m *machine, in journal.Intent) (*addition, error) {
	var args additionArgs
	if err := json.Unmarshal(in.Args, &args); err != nil || args.Name == "" {
		return nil, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return &addition{machine: m, name: args.Name}, nil
}

// plug records the container and its disks, and plugs them.
func (a *addition) plug(ctx context.Context) (outcome, error) {
	plugger, err := a.plugger()
	if err != nil {
		return outcome{}, err
	}
	if find(a.record().Ephemeral, a.name) < 0 {
		if err := a.plan(ctx); err != nil {
			return outcome{}, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.AgentTimeout)
	defer cancel()
	all := a.record().Ephemeral
	if err := a.shareOwn(ctx, all[find(all, a.name)].Spec); err != nil {
		return outcome{}, err
	}
	for _, d := range a.own() {
		if err := plugger.PlugDisk(ctx, d); errdefs.IsNotFound(err) {
			return outcome{}, errdefs.Preconditionf("its process has ended: %w", err)
		} else if err != nil {
			return outcome{}, err
		}
	}
	return outcome{}, nil
}

// plan puts the container and its disks on record.
func (a *addition) plan(ctx context.Context) error {
	layers, err := a.images.Base(ctx, a.image)
	if err != nil {
		return fmt.Errorf("container %s: %w", a.name, err)
	}
	r := a.record()
	serials, add, err := plugged(r.Disks, layers)
	if err != nil {
		return err
	}
	a.want.Record.Layers = serials
	if a.want.Volumes, add, err = a.planOwnDisks(ctx, a.volumes, r.Disks, add); err != nil {
		return fmt.Errorf("container %s: %w", a.name, err)
	}
	_, err = a.commit(ctx, a.step(stepDisks), func(r *vm.Record) {
		r.Ephemeral, r.Disks = append(slices.Clip(r.Ephemeral), a.want), append(slices.Clip(r.Disks), add...)
	})
	return err
}

// own returns the disks that only the container uses.
func (a *addition) own() (disks []vm.Disk) {
	r := a.record()
	for _, d := range r.Disks {
		uses := func(e vm.Ephemeral) bool { return e.Uses(d.Serial) }
		at := slices.IndexFunc(r.Ephemeral, uses) // the first one that has it brought it
		if d.Port != 0 && at >= 0 && at == find(r.Ephemeral, a.name) {
			disks = append(disks, d)
		}
	}
	return disks
}

// join tells the guest. A guest that cannot be reached now is told by the next session.
func (a *addition) join(ctx context.Context) (outcome, error) {
	if run := a.run.Load(); run != nil {
		return outcome{}, run.link.AddContainer(ctx, a.name)
	}
	return outcome{}, errdefs.Preconditionf("its process has ended")
}

// undo removes the container and its disks from the record. If the guest does not release a disk, the container stays on record as
// one that could not be started, because a snapshot of the VM needs its disks.
func (a *addition) undo(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	own := a.own()
	plugger, err := a.plugger()
	if all := a.record().Ephemeral; find(all, a.name) >= 0 {
		if err := a.unshareOwn(ctx, all[find(all, a.name)].Spec); err != nil {
			a.log.Warn("folders of a container that was not added are still shared", "vm", a.id, "err", err)
		}
	}
	for _, d := range own {
		if err == nil {
			err = plugger.UnplugDisk(ctx, d.Serial)
		}
	}
	stuck := err != nil && len(own) > 0 && !a.ending()
	if stuck {
		a.log.Warn("disks of a container that was not added are still plugged", "vm", a.id, "err", err)
	}
	a.settleFailed(ctx, opAddContainer, func(r *vm.Record) {
		at := find(r.Ephemeral, a.name)
		switch {
		case at < 0:
			return
		case stuck:
			r.Ephemeral = slices.Clone(r.Ephemeral)
			r.Ephemeral[at].Record.Status = session.NeverStarted(cause)
			return
		}
		r.Ephemeral = slices.Delete(slices.Clone(r.Ephemeral), at, at+1)
		r.Disks = slices.DeleteFunc(slices.Clone(r.Disks), func(d vm.Disk) bool {
			return slices.ContainsFunc(own, func(o vm.Disk) bool { return o.Serial == d.Serial })
		})
	})
	return cause
}

// recover goes on where the earlier process of the engine ended. If the guest has ended meanwhile, so has the container.
func (a *addition) recover(ctx context.Context) (next string, err error) {
	if err := a.adopt(ctx); err != nil {
		return "", err
	}
	if a.run.Load() == nil || find(a.record().Ephemeral, a.name) < 0 {
		return "", a.settle(ctx, same)
	}
	return stepDisks, nil
}
