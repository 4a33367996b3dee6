package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// entropyBytes is how much of the host's randomness a resumed guest gets: all guests of one state have the same otherwise.
const entropyBytes = 64

// foreign reports whether r's guest was resumed from another VM's state and has not been told who it is.
func foreign(r vm.Record) bool { return r.Cloned && r.Resume != nil && r.Resume.Clone }

// newMachineID returns what a clone gets as its machine-id.
func newMachineID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the process instead
	return hex.EncodeToString(b[:])
}

// setUpResumed is setUp for a guest that went on from saved state: it is told who it is and what time it is, in one call,
// gets its carrier back, and is ready then. Until that has happened its state is not lost, whatever fails: it is tried
// again with the next session.
func (e *Engine) setUpResumed(ctx context.Context, m *machine, run *run, agent guest.Agent) error {
	limit := e.cfg.AgentTimeout
	if m.record().ImageType != vm.ImageOCI {
		limit = max(limit, diskGuestTimeout)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	leave, err := m.self.take(ctx)
	if err != nil {
		return err
	}
	defer leave()
	r := m.record()
	resume := r.Resume
	if resume == nil { // it was told meanwhile
		return nil
	}
	resumer, ok := agent.(guest.Resumer)
	cold := resume.Clone && !r.Cloned
	if cold || !ok && !resume.Clone { // it has booted, or it is who it was
		if err := e.introduce(ctx, m, agent); err != nil {
			return err
		}
	} else if !ok { // commands can be run in it, so that somebody can tell it who it is
		e.log.Info("agent of clone cannot tell its guest who it is", "vm", m.id)
		return nil
	}
	began := time.Now()
	var reply guest.ResumedReply
	if ok {
		var err error
		if r, err = e.swapped(ctx, m, run); err != nil {
			return e.setUpFailed(ctx, m, err)
		}
		reply, err = resumer.Resumed(ctx, resumedOf(r))
		if foreign(r) && errdefs.Is(err, errdefs.Unsupported) { // its owner does not let it: as if nobody could
			e.log.Info("agent of clone cannot tell its guest who it is", "vm", m.id, "err", err)
			return nil
		}
		if err != nil {
			return e.setUpFailed(ctx, m, err)
		}
	}
	if err := e.skipLogs(m, reply); err != nil {
		return errdefs.As(errdefs.Unavailable, err)
	}
	if foreign(r) {
		if err := linksUp(ctx, run, r); err != nil {
			return e.setUpFailed(ctx, m, err)
		}
	}
	if resume.Fresh {
		if err := e.setUpLate(ctx, m, agent, leave); err != nil {
			return err
		}
	} else if r.ImageType == vm.ImageOCI && !cold && len(r.Spec.Volumes) > 0 { // they may have changed while it was away
		if err := e.pushVolumes(ctx, m, agent); err != nil {
			return errdefs.As(errdefs.Unavailable, err)
		}
	}
	e.log.Debug("guest brought to itself", "vm", m.id, "dur", time.Since(began))
	_, err = e.commit(ctx, m, e.journal.Update, func(r *vm.Record) {
		r.AgentReady, r.Resume, r.Message = r.State == vm.StateRunning, nil, ""
	})
	return errdefs.As(errdefs.Unavailable, err) // the journal may take it the next time
}

// diskGuestTimeout bounds how long a guest that brings its own tools may take to become another one: they are not quick.
const diskGuestTimeout = 5 * time.Minute

// swapped makes sure that a clone whose agent is not ours has its own interfaces before it is told who it is, where that
// can be done, and returns its record. Preconditions: m.self is held.
func (e *Engine) swapped(ctx context.Context, m *machine, run *run) (vm.Record, error) {
	r := m.record()
	swapper, ok := hypervisor.As[hypervisor.NICSwapper](run.inst)
	if !ok || r.ImageType == vm.ImageOCI || !foreign(r) {
		return r, nil
	}
	err := e.swapAll(ctx, m, run, swapper)
	return m.record(), err
}

// setUpLate sets up a guest that was saved before that could be done, and has been told who it is. That it has its own MACs is
// on record before, and m.self given up by leave: this takes time, and it may be saved again meanwhile. Preconditions:
// m.self is held.
func (e *Engine) setUpLate(ctx context.Context, m *machine, agent guest.Agent, leave func()) error {
	_, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) {
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
	return e.introduce(ctx, m, agent)
}

// introduce sets up a guest that booted, or whose agent knows nothing of being resumed.
func (e *Engine) introduce(ctx context.Context, m *machine, agent guest.Agent) error {
	r := m.record()
	if r.ImageType == vm.ImageOCI {
		if err := e.pushVolumes(ctx, m, agent); err != nil {
			return err
		}
	}
	return agent.Setup(ctx, setupOf(r))
}

// setUpFailed notes why a guest is not itself yet. The error makes the session end and another one try again: a guest whose
// state may be the only copy is never ended for it.
func (e *Engine) setUpFailed(ctx context.Context, m *machine, cause error) error {
	if text := "its guest has not come to itself: " + cause.Error(); !lost(cause) && m.record().Message != text {
		e.log.Warn("resumed guest not brought to itself, trying again", "vm", m.id, "err", cause)
		if _, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) { r.Message = text }); err != nil {
			e.log.Debug("message not recorded", "vm", m.id, "err", err)
		}
	}
	return errdefs.As(errdefs.Unavailable, cause)
}

// resumedOf is what the guest of r is told.
func resumedOf(r vm.Record) guest.Resumed {
	setup := setupOf(r)
	out := guest.Resumed{
		Now: time.Now(), Entropy: make([]byte, entropyBytes), Hostname: setup.Hostname, NICs: setup.NICs, Hosts: setup.Hosts,
	}
	out.Storage = r.Resume.Storage
	_, _ = rand.Read(out.Entropy) // never fails
	if r.Resume.Clone {
		out.Clone = &guest.CloneIdentity{MACs: r.Resume.MACs, MachineID: r.Resume.MachineID, SSHHostKeys: r.Resume.SSHHostKeys}
	}
	return out
}

// linksUp gives the interfaces of a clone their carrier.
func linksUp(ctx context.Context, run *run, r vm.Record) error {
	linker, ok := hypervisor.As[hypervisor.Linker](run.inst)
	if !ok {
		return nil
	}
	for i := range r.NICs {
		if err := linker.SetLink(ctx, i, true); err != nil {
			return fmt.Errorf("give interface %d its carrier: %w", i, err)
		}
	}
	return nil
}

// swapTimeout bounds one change of an interface: the guest has to agree to it.
const swapTimeout = 30 * time.Second

// swapNICs gives a clone that may have nobody to tell it its MACs other interfaces, which have them, and only these a
// carrier. Who the guest is otherwise is not changed by that. It tries until it succeeds or the process ends.
func (e *Engine) swapNICs(ctx context.Context, m *machine, run *run) {
	swapper, ok := hypervisor.As[hypervisor.NICSwapper](run.inst)
	if !ok {
		e.log.Info("interfaces of clone stay without carrier until it has been told who it is", "vm", m.id)
		return
	}
	wait := e.cfg.ReconnectMin
	for ctx.Err() == nil && !run.over() {
		err := e.swapOnce(ctx, m, run, swapper)
		if err == nil {
			return
		}
		e.log.Debug("interfaces of clone not changed", "vm", m.id, "err", err)
		pause(wait, ctx.Done(), run.ended)
		wait = min(wait*2, e.cfg.SilentMax)
	}
}

func (e *Engine) swapOnce(ctx context.Context, m *machine, run *run, swapper hypervisor.NICSwapper) error {
	leave, err := m.self.take(ctx)
	if err != nil {
		return err
	}
	defer leave()
	return e.swapAll(ctx, m, run, swapper)
}

// swapAll replaces the interfaces that are not replaced yet. Preconditions: m.self is held.
func (e *Engine) swapAll(ctx context.Context, m *machine, run *run, swapper hypervisor.NICSwapper) error {
	for i, nic := range m.record().NICs {
		r := m.record()
		if !foreign(r) || i >= len(r.Resume.MACs) {
			return nil // it was told who it is meanwhile
		}
		if r.Resume.MACs[i] == nic.MAC {
			continue
		}
		limited, cancel := context.WithTimeout(ctx, swapTimeout)
		err := swapper.SwapNIC(limited, i, nic.MAC)
		cancel()
		if err != nil {
			return fmt.Errorf("replace interface %d: %w", i, err)
		}
		_, err = e.commit(ctx, m, e.journal.Update, func(r *vm.Record) {
			resume := *r.Resume
			resume.MACs = append([]string(nil), resume.MACs...)
			resume.MACs[i] = nic.MAC
			r.Resume = &resume
		})
		if err != nil {
			return err
		}
	}
	return linksUp(ctx, run, m.record())
}
