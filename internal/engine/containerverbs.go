package engine

import (
	"context"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// KillContainer ends a run of one container of a running VM, the current one when run is 0: by SIGTERM, and by
// SIGKILL after grace (negative: that of the spec, zero: at once). It returns when the run has ended. The run counts
// as failed, and the restart policy decides whether another one follows. A run that has already ended is no error. If
// ctx ends first, the run may still end.
// Errors: NotFound (VM, container), FailedPrecondition when the VM does not run, Unsupported when its guest has an
// older agent, Unavailable when the guest does not answer or the run does not end in time.
func (v containerVerbs) KillContainer(caller context.Context, ref, container string, run int, grace time.Duration) error {
	return v.life.ended(caller, v.keeperOf(caller, ref, container, func(ctx context.Context, r vm.Record, k guest.ContainerKeeper) error {
		if run < 0 {
			return errdefs.Invalidf("invalid run %d of container %s; runs are counted from 1", run, container)
		}
		if grace < 0 {
			grace = r.Spec.StopGrace
		}
		ctx, cancel := context.WithTimeoutCause(ctx, grace+v.cfg.StopMargin, errdefs.Unavailablef("it has not ended within %s", grace))
		defer cancel()
		return k.KillContainer(ctx, r.Container(container).Name, run, grace)
	}))
}

// ReleaseContainer lets the containers of a running VM start that wait for the given one, which holds them.
// Idempotent.
// Errors as for KillContainer.
func (v containerVerbs) ReleaseContainer(caller context.Context, ref, container string) error {
	return v.life.ended(caller, v.keeperOf(caller, ref, container, func(ctx context.Context, r vm.Record, k guest.ContainerKeeper) error {
		return k.ReleaseContainer(ctx, r.Container(container).Name)
	}))
}

// keeperOf calls f with the agent that manages a container.
func (n *node) keeperOf(caller context.Context, ref, container string, f func(context.Context, vm.Record, guest.ContainerKeeper) error) error {
	ctx, cancel := n.life.bound(caller)
	defer cancel()
	m, _, err := n.running(ctx, ref)
	if err != nil {
		return err
	}
	r := m.record()
	if r.Container(container) == nil {
		return errdefs.NotFoundf("vm %s has no container %q", m.name(), container)
	}
	c, err := n.agentOf(ctx, string(m.id))
	if err != nil {
		return err
	}
	keeper, ok := c.agent.(guest.ContainerKeeper)
	if !ok {
		return errdefs.Unsupportedf("the agent in the guest of vm %s does not support containers", m.name())
	}
	if err := f(ctx, r, keeper); err != nil {
		return c.failed(ctx, fmt.Errorf("container %s of vm %s: %w", container, m.name(), err))
	}
	return nil
}

// AddContainer starts one more container, of kind ephemeral, in a running VM, and returns when its guest has got it, or
// will get it with the next session. It runs once. A container of this name that was added before is no error, also if it
// has ended.
// Errors: InvalidArgument, NotFound (VM, image), AlreadyExists (another container has the name), FailedPrecondition when
// the VM does not run, Unsupported for a guest that cannot have it, ResourceExhausted, Unavailable. After an error the VM
// is as before, except that the guest may keep the disks.
func (v containerVerbs) AddContainer(caller context.Context, ref string, c vm.Container) (vm.Record, error) {
	if err := c.ValidateEphemeral(); err != nil {
		return vm.Record{}, err
	}
	return v.operate(caller, opAddContainer, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.addContainer(ctx, c.Clone())
	})
}

// ResizeContainers changes what containers of a running VM may use, in the size that the VM has: all of them or none. They keep
// the values when they or the VM start again. Idempotent.
// Errors: InvalidArgument, NotFound (VM, container), FailedPrecondition when the VM does not run or a memory limit is below what
// its container uses, Unsupported for a guest that cannot do it, Unavailable when the guest does not answer. After an error
// nothing has changed.
func (v containerVerbs) ResizeContainers(caller context.Context, ref string, want map[string]vm.Resources) (vm.Record, error) {
	return v.operate(caller, opResizeContainers, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.resizeContainers(ctx, want)
	})
}
