package session

import (
	"context"
	"errors"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file takes the folder that a sandbox shares with its node from the guest, because no driver can save a guest that has it, and gives it back.
// The containers are paused meanwhile.

// Part pauses the containers of a sandbox and takes the folder from its guest, until rejoin.
// Errors: FailedPrecondition if a program has something open in the folder, or if the guest does not answer; Unsupported for a guest, or a process, of an
// earlier release. The containers run then as before.
func (l *Link) Part(ctx context.Context) (rejoin func(context.Context) error, err error) {
	agent, err := l.Ready(ctx, l.cfg.AgentTimeout)
	if errdefs.Is(err, errdefs.DeadlineExceeded) {
		err = errdefs.Preconditionf("its guest does not answer, so its containers cannot be paused")
	}
	if err != nil {
		return nil, err
	}
	pauser, ok := agent.(guest.ContainerPauser)
	plugger, can := hypervisor.As[hypervisor.FolderPlugger](l.proc.Inst)
	if !ok || !can {
		return nil, errdefs.Unsupportedf("its guest, or its driver, cannot do without the folder that it shares with the node")
	}
	leave, err := l.folder.Take(ctx)
	if err != nil {
		return nil, err
	}
	rejoin = func(ctx context.Context) error {
		defer leave()
		return l.rejoin(ctx, agent)
	}
	err = pauser.PauseContainers(ctx)
	if err == nil {
		err = plugger.UnplugShare(ctx, vm.SharedTag)
	}
	if err != nil {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.cfg.AgentTimeout)
		defer cancel()
		return nil, errors.Join(err, rejoin(limited))
	}
	return rejoin, nil
}

// rejoinLater ends, at the begin of a session, what an earlier engine, or one on another node, has begun with Part.
func (l *Link) rejoinLater(ctx context.Context, agent guest.Agent) error {
	if !l.vm.Record().Spec.Sandbox || !l.OurAgent() {
		return nil
	}
	leave, err := l.folder.Take(ctx)
	if err != nil {
		return errdefs.As(errdefs.Unavailable, err)
	}
	defer leave()
	return errdefs.As(errdefs.Unavailable, l.rejoin(ctx, agent))
}

// rejoin gives the guest its folder and lets its containers go on, except those that wait for their start. Preconditions: l.folder is held.
func (l *Link) rejoin(ctx context.Context, agent guest.Agent) error {
	if err := l.vm.Share(ctx); err != nil && !errdefs.Is(err, errdefs.Unsupported) { // a process of an earlier release has never been without
		return err
	}
	pauser, ok := agent.(guest.ContainerPauser)
	if !ok {
		return nil
	}
	var held []string
	for _, e := range l.vm.Record().Ephemeral {
		if e.Record.Status.State == vm.ContainerCreated {
			held = append(held, e.Record.Name)
		}
	}
	err := pauser.ResumeContainers(ctx, held)
	if errdefs.Is(err, errdefs.Unsupported) {
		return nil // an agent of an earlier release has never paused them
	}
	return err
}

// Rejoin calls rejoin, of Part, also for a caller that has gone away. If that fails, a new session begins with another attempt.
func (l *Link) Rejoin(ctx context.Context, rejoin func(context.Context) error) error {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.cfg.AgentTimeout)
	defer cancel()
	err := rejoin(limited)
	if err == nil || l.proc.Over() {
		return nil
	}
	l.cfg.Log.Error("containers of sandbox stay paused", "vm", l.proc.ID, "err", err)
	if agent, _, _ := l.Peek(); agent != nil {
		_ = agent.Close() // the next session tries again
	}
	return err
}
