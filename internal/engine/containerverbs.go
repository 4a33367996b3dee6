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
	if over, err := v.over(caller, ref, container); over || err != nil {
		return err
	}
	if v.boots(caller, ref, container) {
		_, err := v.stopVM(caller, ref, grace)
		return err
	}
	err := v.keeperOf(caller, ref, container, func(ctx context.Context, c call) error {
		if run < 0 {
			return errdefs.Invalidf("invalid run %d of container %s; runs are counted from 1", run, container)
		}
		r := c.m.record()
		if grace < 0 {
			grace = r.Spec.StopGrace
		}
		ctx, cancel := context.WithTimeoutCause(ctx, grace+v.cfg.StopMargin, errdefs.Unavailablef("it has not ended within %s", grace))
		defer cancel()
		keeper, err := c.keeper()
		if err == nil && find(r.Ephemeral, container) >= 0 {
			err = c.link.Introduce(ctx, c.agent, container)
		}
		if err != nil {
			return err
		}
		return keeper.KillContainer(ctx, r.Container(container).Name, run, grace)
	})
	if errdefs.IsFailedPrecondition(err) { // it may have ended with the process of the VM meanwhile
		if over, _ := v.over(caller, ref, container); over {
			return nil
		}
	}
	return v.life.ended(caller, err)
}

// over reports whether a container is one that was added and has ended, so that nothing is left to end, whatever its VM does. The record may not
// say so yet.
// Errors: NotFound (VM).
func (v containerVerbs) over(caller context.Context, ref, container string) (bool, error) {
	if err := v.life.ready(caller); err != nil {
		return false, err
	}
	m, err := v.vms.find(caller, ref)
	if err != nil {
		return false, err
	}
	r := m.record()
	at := find(r.Ephemeral, container)
	lost := r.Spec.Sandbox && r.State == vm.StateRunning && !m.runs() // another VM may have just resumed
	return at >= 0 && (lost || r.Ephemeral[at].Record.Status.State == vm.ContainerTerminated), nil
}

// ReleaseContainer lets the containers of a running VM start that wait for the given one, which holds them.
// Idempotent.
// Errors as for KillContainer.
func (v containerVerbs) ReleaseContainer(caller context.Context, ref, container string) error {
	return v.life.ended(caller, v.keeperOf(caller, ref, container, func(ctx context.Context, c call) error {
		keeper, err := c.keeper()
		if err != nil {
			return err
		}
		r := c.m.record()
		return keeper.ReleaseContainer(ctx, r.Container(container).Name)
	}))
}

// StartContainer starts a container that was added to a running VM and is Manual. It returns when the guest has started it and the
// record says so; it may have ended by then. It waits for a guest that is booting. A container that runs is no error.
// Errors: NotFound (VM, container), FailedPrecondition when the VM does not run, the container has ended, or it cannot be started:
// then its status says why, and it has ended. Unsupported when its guest has an older agent, Unavailable when the guest does not
// answer; then it is started again.
func (v containerVerbs) StartContainer(caller context.Context, ref, container string) (vm.Record, error) {
	if v.boots(caller, ref, container) {
		return v.operate(caller, opStart, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
			return m.startBootContainer(ctx, container)
		})
	}
	var r vm.Record
	err := v.keeperOf(caller, ref, container, func(ctx context.Context, c call) error {
		all := c.m.record().Ephemeral
		at := find(all, container)
		if at < 0 {
			return errdefs.Invalidf("it was not added to the VM, so it starts by itself")
		}
		if s := all[at].Record.Status; s.State == vm.ContainerTerminated {
			return errdefs.Preconditionf("it has ended (%s); remove it and add another one", s.Reason)
		}
		ctx, cancel := context.WithTimeoutCause(ctx, v.cfg.AgentTimeout, errdefs.Unavailablef("its guest has not started it within %s", v.cfg.AgentTimeout))
		defer cancel()
		if err := c.link.StartContainer(ctx, c.agent, container); err != nil {
			return err
		}
		if err := v.durable(ctx); err != nil {
			return err
		}
		r = c.m.record().Clone()
		if s := r.Container(container); s != nil && s.Status.Reason == vm.ContainerStartError {
			return errdefs.Preconditionf("it could not be started: %s", s.Status.Message)
		}
		return nil
	})
	return r, v.life.ended(caller, err)
}

// RemoveContainer removes a container that was added to a VM: it kills the container if it runs, and the guest forgets its files. Then
// its disks that no other container uses are unplugged, it leaves the record, and its log is deleted. The VM need not run. A
// container that the VM does not have is no error.
// Errors: NotFound (VM), InvalidArgument for a container that was not added, FailedPrecondition for a VM that is paused or
// hibernated, Unsupported when its guest has an older agent, Unavailable when the guest does not answer or does not release a disk.
// After an error the container has ended or is as before; remove it again.
func (v containerVerbs) RemoveContainer(caller context.Context, ref, container string) error {
	_, err := v.operate(caller, opRemoveContainer, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.removeContainer(ctx, container)
	})
	return err
}

// keeper returns the agent as one that manages containers.
func (c call) keeper() (guest.ContainerKeeper, error) {
	keeper, ok := c.agent.(guest.ContainerKeeper)
	if !ok {
		return nil, errdefs.Unsupportedf("the agent in its guest does not support containers")
	}
	return keeper, nil
}

// keeperOf calls f with the session with the guest that has a container.
func (n *node) keeperOf(caller context.Context, ref, container string, f func(context.Context, call) error) error {
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
	if err := f(ctx, c); err != nil {
		return c.failed(ctx, fmt.Errorf("container %s of vm %s: %w", container, m.name(), err))
	}
	return nil
}

// AddContainer starts one more container, of kind ephemeral, in a running VM, or only prepares it if it is Manual, and returns when its guest has got it, or
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
