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

// entropyBytes is how much of the host's randomness a resumed guest gets: otherwise all guests of one state have the
// same.
const entropyBytes = 64

// foreign reports whether r's guest was resumed from another VM's state and has not received its own identity.
func foreign(r vm.Record) bool { return r.Cloned && r.Resume != nil && r.Resume.Clone }

// newMachineID returns the machine-id of a new clone.
func newMachineID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the process instead
	return hex.EncodeToString(b[:])
}

// setUpResumed is setUp for a guest that resumed from saved state. One call tells it its identity and the time. Then
// it gets its carrier back and is ready. Whatever fails before that, its state is not lost: the next session tries
// again.
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
	if resume == nil { // it has been told meanwhile
		return nil
	}
	resumer, ok := agent.(guest.Resumer)
	cold := resume.Clone && !r.Cloned
	if cold || !ok && !resume.Clone { // it has booted, or its identity has not changed
		if err := e.introduce(ctx, m, agent); err != nil {
			return err
		}
	} else if !ok { // commands can run in it, so somebody can give it its identity
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
		if foreign(r) && errdefs.Is(err, errdefs.Unsupported) { // its owner does not allow it: treat the agent as unable
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
	} else if r.ImageType == vm.ImageOCI && !cold && len(r.Spec.Volumes) > 0 { // they may have changed while it did not run
		if err := e.pushVolumes(ctx, m, agent); err != nil {
			return errdefs.As(errdefs.Unavailable, err)
		}
	}
	e.log.Debug("guest brought to itself", "vm", m.id, "dur", time.Since(began))
	_, err = e.commit(ctx, m, e.journal.Update, func(r *vm.Record) {
		r.AgentReady, r.Resume, r.Message = r.State == vm.StateRunning, nil, ""
	})
	return errdefs.As(errdefs.Unavailable, err) // the journal may accept it the next time
}

// diskGuestTimeout bounds how long a guest may take to change its identity with its own tools: they are slow.
const diskGuestTimeout = 5 * time.Minute

// swapped makes sure that a clone whose agent is not ours has its own NICs before it receives its identity, if the
// driver can do that, and returns its record. Preconditions: m.self is held.
func (e *Engine) swapped(ctx context.Context, m *machine, run *run) (vm.Record, error) {
	r := m.record()
	swapper, ok := hypervisor.As[hypervisor.NICSwapper](run.inst)
	if !ok || r.ImageType == vm.ImageOCI || !foreign(r) {
		return r, nil
	}
	err := e.swapAll(ctx, m, run, swapper)
	return m.record(), err
}

// setUpLate sets up a guest that was saved before its setup and has now received its identity. First it records that
// the guest has its own MACs, then it releases m.self with leave: setup takes time, and the guest may be saved again
// meanwhile. Preconditions: m.self is held.
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

// introduce sets up a guest that booted, or whose agent does not support being resumed.
func (e *Engine) introduce(ctx context.Context, m *machine, agent guest.Agent) error {
	r := m.record()
	if r.ImageType == vm.ImageOCI {
		if err := e.pushVolumes(ctx, m, agent); err != nil {
			return err
		}
	}
	return agent.Setup(ctx, setupOf(r))
}

// setUpFailed records why a guest has not received its identity yet. The error ends the session, and another session
// tries again. The guest is never ended for this, because its state may be the only copy.
func (e *Engine) setUpFailed(ctx context.Context, m *machine, cause error) error {
	if text := "its guest has not come to itself: " + cause.Error(); !lost(cause) && m.record().Message != text {
		e.log.Warn("resumed guest not brought to itself, trying again", "vm", m.id, "err", cause)
		if _, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) { r.Message = text }); err != nil {
			e.log.Debug("message not recorded", "vm", m.id, "err", err)
		}
	}
	return errdefs.As(errdefs.Unavailable, cause)
}

// resumedOf returns what the guest of r is told.
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

// linksUp turns on the carrier of a clone's NICs.
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

// swapTimeout bounds the replacement of one NIC: the guest has to agree to it.
const swapTimeout = 30 * time.Second

// swapNICs replaces the NICs of a clone that possibly nobody can tell its MACs. The new NICs have these MACs, and
// only they get a carrier. The rest of the guest's identity does not change. It retries until it succeeds or the
// process ends.
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

// swapAll replaces the NICs that are not replaced yet. Preconditions: m.self is held.
func (e *Engine) swapAll(ctx context.Context, m *machine, run *run, swapper hypervisor.NICSwapper) error {
	for i, nic := range m.record().NICs {
		r := m.record()
		if !foreign(r) || i >= len(r.Resume.MACs) {
			return nil // it received its identity meanwhile
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
