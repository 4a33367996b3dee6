package session

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// entropyBytes is how much of the host's randomness a resumed guest gets: otherwise all guests of one state have the
// same.
const entropyBytes = 64

// Foreign reports whether r's guest was resumed from another VM's state and has not received its own identity.
func Foreign(r vm.Record) bool { return r.Cloned && r.Resume != nil && r.Resume.Clone }

// setUpResumed is setUp for a guest that resumed from saved state. One call tells it its identity and the time. Then
// it gets its carrier back and is ready. Whatever fails before that, its state is not lost: the next session tries
// again.
func (l *Link) setUpResumed(ctx context.Context, agent guest.Agent) error {
	limit := l.cfg.AgentTimeout
	if l.vm.Record().ImageType != vm.ImageOCI {
		limit = max(limit, diskGuestTimeout)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	leave, err := l.Identity.Take(ctx)
	if err != nil {
		return err
	}
	defer leave()
	r := l.vm.Record()
	resume := r.Resume
	if resume == nil { // it has been told meanwhile
		return nil
	}
	resumer, ok := agent.(guest.Resumer)
	cold := resume.Clone && !r.Cloned
	if cold || !ok && !resume.Clone { // it has booted, or its identity has not changed
		if err := l.introduce(ctx, agent); err != nil {
			return err
		}
	} else if !ok { // commands can run in it, so somebody can give it its identity
		l.cfg.Log.Info("agent of clone cannot set the identity of its guest", "vm", l.proc.ID)
		return nil
	}
	began := time.Now()
	var reply guest.ResumedReply
	if ok {
		var err error
		if r, err = l.swapped(ctx); err != nil {
			return l.setUpFailed(ctx, err)
		}
		reply, err = resumer.Resumed(ctx, Resumed(r))
		if Foreign(r) && errdefs.Is(err, errdefs.Unsupported) { // its owner does not allow it: treat the agent as unable
			l.cfg.Log.Info("agent of clone cannot set the identity of its guest", "vm", l.proc.ID, "err", err)
			return nil
		}
		if err != nil {
			return l.setUpFailed(ctx, err)
		}
	}
	if err := l.skipLogs(reply); err != nil {
		return errdefs.As(errdefs.Unavailable, err)
	}
	if Foreign(r) {
		if err := l.linksUp(ctx, r); err != nil {
			return l.setUpFailed(ctx, err)
		}
	}
	if resume.Fresh {
		if err := l.setUpLate(ctx, agent, leave); err != nil {
			return err
		}
	} else if r.ImageType == vm.ImageOCI && !cold && len(r.Spec.Volumes) > 0 { // they may have changed while it did not run
		if err := l.pushVolumes(ctx, agent); err != nil {
			return errdefs.As(errdefs.Unavailable, err)
		}
	}
	if r.ImageType == vm.ImageOCI && !resume.Fresh {
		if err := l.growResumed(ctx, agent); err != nil {
			return errdefs.As(errdefs.Unavailable, err)
		}
	}
	if r.ImageType == vm.ImageOCI && !resume.Clone && !resume.Fresh {
		if err := l.resizeResumed(ctx, agent); err != nil {
			return errdefs.As(errdefs.Unavailable, err)
		}
	}
	if err := l.rejoinLater(ctx, agent); err != nil {
		return l.setUpFailed(ctx, err)
	}
	l.cfg.Log.Debug("resumed guest has its identity", "vm", l.proc.ID, "dur", time.Since(began))
	_, err = l.vm.Update(ctx, func(r *vm.Record) {
		r.AgentReady, r.Resume, r.Message = r.State == vm.StateRunning, nil, ""
	})
	return errdefs.As(errdefs.Unavailable, err) // the journal may accept it the next time
}

// diskGuestTimeout bounds how long a guest may take to change its identity with its own tools: they are slow.
const diskGuestTimeout = 5 * time.Minute

// swapped makes sure that a clone whose agent is not ours has its own NICs before it receives its identity, if the
// driver can do that, and returns its record. Preconditions: l.Identity is held.
func (l *Link) swapped(ctx context.Context) (vm.Record, error) {
	r := l.vm.Record()
	swapper, ok := hypervisor.As[hypervisor.NICSwapper](l.proc.Inst)
	if !ok || r.ImageType == vm.ImageOCI || !Foreign(r) {
		return r, nil
	}
	err := l.swapAll(ctx, swapper)
	return l.vm.Record(), err
}

// setUpLate sets up a guest that was saved before its setup and has now received its identity. First it records that
// the guest has its own MACs, then it releases l.Identity with leave: setup takes time, and the guest may be saved again
// meanwhile. Preconditions: l.Identity is held.
func (l *Link) setUpLate(ctx context.Context, agent guest.Agent, leave func()) error {
	_, err := l.vm.Update(ctx, func(r *vm.Record) {
		resume := *r.Resume
		resume.MACs = nil
		for _, n := range r.NICs {
			resume.MACs = append(resume.MACs, n.MAC)
		}
		r.Resume = &resume
	})
	if err != nil {
		return errdefs.As(errdefs.Unavailable, err)
	}
	leave()
	return l.introduce(ctx, agent)
}

// setUpFailed records why a guest has not received its identity yet. The error ends the session, and another session
// tries again. The guest is never ended for this, because its state may be the only copy.
func (l *Link) setUpFailed(ctx context.Context, cause error) error {
	if text := "its guest has no identity of its own yet: " + cause.Error(); !lost(cause) && l.vm.Record().Message != text {
		l.cfg.Log.Warn("identity of resumed guest not set, trying again", "vm", l.proc.ID, "err", cause)
		if _, err := l.vm.Update(ctx, func(r *vm.Record) { r.Message = text }); err != nil {
			l.cfg.Log.Debug("message not recorded", "vm", l.proc.ID, "err", err)
		}
	}
	return errdefs.As(errdefs.Unavailable, cause)
}

// Resumed returns what the guest of r is told.
func Resumed(r vm.Record) guest.Resumed {
	setup := setupOf(r)
	out := guest.Resumed{
		Now: time.Now(), Entropy: make([]byte, entropyBytes), Hostname: setup.Hostname, NICs: setup.NICs, Hosts: setup.Hosts, Resolver: setup.Resolver,
	}
	out.Storage = r.Resume.Storage
	_, _ = rand.Read(out.Entropy) // never fails
	if r.Resume.Clone {
		out.Clone = &guest.CloneIdentity{MACs: r.Resume.MACs, MachineID: r.Resume.MachineID, SSHHostKeys: r.Resume.SSHHostKeys}
	}
	return out
}

// linksUp turns on the carrier of those of a clone's NICs that are to have one.
func (l *Link) linksUp(ctx context.Context, r vm.Record) error {
	open := hypervisor.OpensLinks(l.proc.Inst)
	if open == nil {
		return nil
	}
	for i, n := range r.NICs {
		if n.LinkDown {
			continue
		}
		if err := open(ctx, vm.PlaceOf(r.NICs, i)); err != nil {
			return fmt.Errorf("set the link of interface %d up: %w", i, err)
		}
	}
	return nil
}

// swapTimeout bounds the replacement of one NIC: the guest has to agree to it.
const swapTimeout = 30 * time.Second

// SwapNICs replaces the NICs of a clone that possibly nobody can tell its MACs. The new NICs have these MACs, and
// only they get a carrier. The rest of the guest's identity does not change. It retries until it succeeds or the
// process ends.
func (l *Link) SwapNICs(ctx context.Context) {
	swapper, ok := hypervisor.As[hypervisor.NICSwapper](l.proc.Inst)
	if !ok {
		l.cfg.Log.Info("interfaces of clone stay down until its guest has its own identity", "vm", l.proc.ID)
		return
	}
	wait := l.pauses(l.cfg.SilentMax)
	for ctx.Err() == nil && !l.proc.Over() {
		err := l.swapOnce(ctx, swapper)
		if err == nil {
			return
		}
		l.cfg.Log.Debug("interfaces of clone not replaced", "vm", l.proc.ID, "err", err)
		process.Pause(wait.NextBackOff(), ctx.Done(), l.proc.Ended())
	}
}

func (l *Link) swapOnce(ctx context.Context, swapper hypervisor.NICSwapper) error {
	leave, err := l.Identity.Take(ctx)
	if err != nil {
		return err
	}
	defer leave()
	return l.swapAll(ctx, swapper)
}

// swapAll replaces the NICs that are not replaced yet. Preconditions: l.Identity is held.
func (l *Link) swapAll(ctx context.Context, swapper hypervisor.NICSwapper) error {
	for i, nic := range l.vm.Record().NICs {
		r := l.vm.Record()
		if !Foreign(r) || i >= len(r.Resume.MACs) {
			return nil // it received its identity meanwhile
		}
		if r.Resume.MACs[i] == nic.MAC {
			continue
		}
		limited, cancel := context.WithTimeout(ctx, swapTimeout)
		err := swapper.SwapNIC(limited, vm.PlaceOf(r.NICs, i), nic.MAC)
		cancel()
		if err != nil {
			return fmt.Errorf("replace interface %d: %w", i, err)
		}
		_, err = l.vm.Update(ctx, func(r *vm.Record) {
			resume := *r.Resume
			resume.MACs = append([]string(nil), resume.MACs...)
			resume.MACs[i] = nic.MAC
			r.Resume = &resume
		})
		if err != nil {
			return err
		}
	}
	return l.linksUp(ctx, l.vm.Record())
}
