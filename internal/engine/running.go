package engine

import (
	"context"
	"errors"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/engine/session"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// launchOptions says how a process starts and what is recorded about it.
type launchOptions struct {
	ready    func() error         // waits for what must exist before the process is recorded; may be nil
	inst     hypervisor.Instance  // already running; nil: one is launched
	incoming *hypervisor.Incoming // saved state to resume from; nil: it boots
	log      func() error         // begins the log, or continues it
	change   func(*vm.Record)     // what else the process changes in the record; may be nil
}

// launchProcess starts the process of m as r says, which may be newer than m's record. Once its outcome is committed,
// the process is watched.
func (m *machine) launchProcess(ctx context.Context, r vm.Record, f launchOptions, back *undo.Stack) (outcome, error) {
	d, err := m.drivers.get(r.Driver)
	if err != nil {
		return outcome{}, err
	}
	if err := f.log(); err != nil {
		return outcome{}, err
	}
	back.Push(func(context.Context) error { m.logs.Finish(); return nil })
	inst, lacks := f.inst, ""
	if inst == nil {
		plan := m.planOf(r)
		lacks = m.missingDrivers(plan.Drive)
		plan.Incoming = f.incoming
		plan.Paused = r.Spec.Paused && f.incoming == nil
		if plan.Shares, err = m.sharesOf(r); err != nil {
			return outcome{}, err
		}
		if inst, err = d.Launch(ctx, plan); err != nil {
			return outcome{}, err
		}
		back.Push(func(ctx context.Context) error { return errors.Join(inst.Kill(ctx), inst.Close()) })
	}
	if f.ready != nil {
		if err := f.ready(); err != nil {
			return outcome{}, err
		}
	}
	if err := m.dirs.born(m.id); err != nil {
		return outcome{}, err
	}
	handle, pid, at := inst.Handle(), inst.PID(), now()
	cid := uint32(0)
	if t, ok := hypervisor.As[hypervisor.SocketTeller](inst); ok {
		cid = t.CID()
	}
	change := func(r *vm.Record) {
		started(r, handle, pid, at)
		r.CID = cid
		if lacks != "" {
			r.Reason, r.Message = vm.ReasonNoDrivers, lacks
		}
		if f.inst == nil && f.incoming == nil {
			r.Containers = eachContainer(r.Containers, again)
			if r.Spec.Paused {
				r.Paused = vm.PausedAtStart
			}
		}
		if f.change != nil {
			f.change(r)
		}
	}
	return outcome{change: change, synced: true, then: func(context.Context) { m.attend(inst) }}, nil
}

// boot starts the process of m as its record says.
func (m *machine) boot(ctx context.Context, back *undo.Stack) (outcome, error) {
	return m.launchProcess(ctx, m.record(), launchOptions{log: m.logs.Main.Begin}, back)
}

// attend watches a running process from now on. Preconditions: the VM is held.
func (m *machine) attend(inst hypervisor.Instance) {
	p := process.New(m.id, inst, m.dirs.run(m.id))
	p.Held.Store(m.record().Paused != "")
	kind := m.record().ImageType
	agent, dial := m.agents[kind], guest.Dial(nil)
	if d, ok := hypervisor.As[hypervisor.GuestDialer](inst); ok {
		dial = d.DialGuest
	} else {
		agent = nil
	}
	r := &run{Process: p, link: session.New(m.sessions(), guestVM{m}, p, m.logs, agent, dial)}
	if r.link.HasAgent() {
		m.life.spawn(r.link.Run)
	}
	m.run.Store(r)
	if w, ok := hypervisor.As[hypervisor.DiskWatcher](inst); ok {
		m.life.spawn(diskWatch{m, r, w}.watch)
	}
	m.life.spawn(func(ctx context.Context) { m.await(ctx, r) })
	if session.Foreign(m.record()) && kind != vm.ImageOCI {
		m.life.spawn(r.link.SwapNICs)
	}
}

// await waits for the end of the process and records it, unless an operation does.
func (m *machine) await(ctx context.Context, r *run) {
	ended, err := r.Await(ctx)
	if !ended {
		return
	}
	if err != nil {
		m.log.Error("exit status of vm unknown", "vm", m.id, "err", err)
	}
	release, err := m.vms.queue.Lock(ctx, m.id)
	if err != nil {
		return
	}
	defer release()
	if m.run.Load() != r {
		return
	}
	m.reclaim(ctx)
	at := now()
	rec, err := m.update(ctx, func(rec *vm.Record) { stopped(rec, ending{exit: r.Exit()}, at) })
	if err != nil {
		m.log.Error("end of vm not recorded", "vm", m.id, "err", err)
		return
	}
	m.log.Info("vm ended", "vm", m.id, "reason", rec.Reason)
}

// reclaim releases what the ended process of m used, except what its next start uses again. m may have no process.
// What fails here is swept by the next recovery at the latest.
func (m *machine) reclaim(ctx context.Context) {
	if r := m.run.Load(); r != nil {
		r.link.Drain()
		if err := r.Kill(ctx); err != nil { // it has ended: this removes its sockets and cgroup
			m.remains.Store(true)
			m.log.Warn("sockets and cgroup of vm not removed", "vm", m.id, "err", err)
		}
		if err := r.Inst.Close(); err != nil {
			m.log.Warn("handle of vm not closed", "vm", m.id, "err", err)
		}
		m.run.Store(nil)
	}
	m.logs.Finish()
	m.unshare()
	if err := m.nics.detach(context.WithoutCancel(ctx), m.record().NICs, false); err != nil {
		m.log.Warn("interfaces of vm not removed", "vm", m.id, "err", err)
	}
}

// unshare ends what a sandbox shares with the node. What fails here is tried again with the next end or start.
func (m *machine) unshare() {
	if !m.record().Spec.Sandbox {
		return
	}
	if err := m.dirs.unshare(m.id); err != nil {
		m.log.Warn("folders of a sandbox are still shared", "vm", m.id, "err", err)
	}
}

// retire ends the process of m, if it has one, whose state is durable elsewhere or no longer needed.
func (m *machine) retire(ctx context.Context) error {
	if r := m.run.Load(); r != nil {
		if err := r.Retire(ctx); err != nil {
			return err
		}
	}
	m.reclaim(ctx)
	return nil
}

// reap ends a process of m that nobody watches.
func (m *machine) reap(ctx context.Context) error {
	if err := m.drivers.reap(ctx, m.record(), m.dirs.run(m.id)); err != nil {
		return err
	}
	m.unshare()
	return nil
}

// reattach watches the process of m again if it has one that still runs.
func (m *machine) reattach(ctx context.Context) error {
	r := m.record()
	if len(r.Handle) == 0 {
		return nil
	}
	d, err := m.drivers.get(r.Driver)
	if err != nil {
		return err
	}
	inst, err := d.Adopt(ctx, hypervisor.Handle(r.Handle))
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := m.logs.Main.Resume(); err != nil {
		return errors.Join(err, inst.Close())
	}
	m.attend(inst)
	return nil
}

// adopt watches the process of m again if its record has one, or records that it has ended.
func (m *machine) adopt(ctx context.Context) error {
	r := m.record()
	if len(r.Handle) == 0 {
		if r.State == vm.StateRunning || r.State == vm.StateCreating { // no intent explains it: this cannot happen
			return errdefs.New(errdefs.Internal, "its state is %s, but no process is recorded", r.State)
		}
		return nil
	}
	if err := m.reattach(ctx); err != nil {
		return err
	}
	if run := m.run.Load(); run != nil {
		if err := m.settlePause(ctx, run); err != nil {
			return err
		}
		m.settleLinks(ctx)
		if r.State == vm.StateRunning {
			return nil
		}
		_, err := m.update(ctx, func(r *vm.Record) { // it was not reachable last time
			r.State, r.Reason, r.Message = vm.StateRunning, "", ""
		})
		return err
	}
	how := m.drivers.lastExit(ctx, r)
	if err := m.reap(ctx); err != nil {
		return err
	}
	m.reclaim(ctx)
	at := now()
	_, err := m.update(ctx, func(r *vm.Record) {
		if r.State == vm.StateError {
			r.Reason = ""
		}
		stopped(r, how, at)
	})
	return err
}

// readopt finds m as the earlier process of the engine has left it. It reports whether m runs. Otherwise its taps are removed.
func (m *machine) readopt(ctx context.Context) (runs bool, err error) {
	if err := m.adopt(ctx); err != nil || m.run.Load() != nil {
		return err == nil, err
	}
	return false, m.nics.detach(ctx, m.record().NICs, false)
}

// runs reports whether m has a process, which may use its disks and taps.
func (m *machine) runs() bool {
	run := m.run.Load()
	return run != nil && !run.Over()
}

// endedProcess returns err as an operation returns it if the process of the VM has ended.
func endedProcess(err error) error {
	if errdefs.IsNotFound(err) {
		return errdefs.Preconditionf("its process has ended: %w", err)
	}
	return err
}

// ending reports whether m has no process, or one that has ended or ends now: for whoever has lost the process or its guest.
func (m *machine) ending() bool {
	run := m.run.Load()
	return run == nil || run.Ending()
}

// orEnded returns err, which came from the guest of m, as an operation returns it if the guest was lost with the process of m.
func (m *machine) orEnded(err error) error {
	if errdefs.IsUnavailable(err) && m.ending() {
		return errdefs.Preconditionf("its process has ended: %w", err)
	}
	return err
}

// adoptAndSettle settles an operation of which nothing is left to do but to watch the process again.
func (m *machine) adoptAndSettle(ctx context.Context) error {
	if err := m.adopt(ctx); err != nil {
		return err
	}
	return m.settle(ctx, same)
}

// proven waits until the guest of m, which has just resumed, has shown that it works. If answers, its agent answered
// when it was saved and has to answer again; otherwise its process has to run for a while. Until then the earlier
// state of the VM must stay. It waits as long as calls wait for an agent, or until the engine ends.
// Errors: FailedPrecondition when the process has ended, Unavailable when the guest does not answer in time.
func (m *machine) proven(answers bool) error {
	run := m.run.Load()
	if run == nil {
		return errdefs.Preconditionf("its process ended before its guest answered")
	}
	answers = answers && run.link.HasAgent()
	limit := m.cfg.ProvenAfter
	if answers {
		limit = m.cfg.AgentTimeout
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		_, ready, changed := run.link.Peek()
		if answers && ready {
			return nil
		}
		select {
		case <-changed:
		case <-run.Ended():
			return errdefs.Preconditionf("its process ended before its guest answered; its serial log may say why")
		case <-timer.C:
			if !answers {
				return nil
			}
			return errdefs.Unavailablef("its guest has not answered for %s since it was resumed; its serial log may say why", limit)
		case <-m.life.serving.Done():
			return stopping()
		}
	}
}
