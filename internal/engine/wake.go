package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Wake resumes a hibernated VM. Waking a running VM is no error. If it fails, the VM stays hibernated and can be
// woken again. Wake returns, and removes the snapshot, when the guest has answered, or has run for a while if it has
// no agent.
// Errors: FailedPrecondition (not hibernated, another kind of machine), Unavailable (the hypervisor does not work here now), DataLoss (its snapshot is gone or damaged).
func (e *Engine) Wake(caller context.Context, ref string) (vm.Record, error) {
	return e.operate(caller, opWake, ref, (*machine).wake)
}

func (m *machine) wake(ctx context.Context) (vm.Record, error) {
	r := m.record()
	switch r.State {
	case vm.StateRunning:
		return r, nil
	case vm.StateHibernated:
	case vm.StateError:
		return r, broken(r)
	default:
		return r, errdefs.Preconditionf("it is not hibernated (%s); start it", r.State)
	}
	store, err := m.store()
	if err != nil {
		return r, err
	}
	h, err := store.Hold(ctx, r.Snapshot)
	if errdefs.IsNotFound(err) {
		return r, errdefs.DataLossf("the snapshot %s with its memory is missing; restore it from a backup, or remove the VM", r.Snapshot)
	}
	if err != nil {
		return m.unusable(ctx, err)
	}
	defer h.Release()
	if err := h.Verify(ctx); err != nil {
		return m.unusable(ctx, err)
	}
	accel, err := m.drivers.resumable(ctx, h.Snapshot(), r.Spec.Accel, remedyWake)
	if err != nil {
		return r, err
	}
	args := snapshotArgs{Snapshot: r.Snapshot, Files: ownFiles(m.dirs.state(m.id), r.Disks)}
	w := &wake{machine: m, held: h, accel: accel, was: r, args: args}
	return wakeOperation.run(ctx, m, w, args.json())
}

// wake resumes a hibernated VM.
type wake struct {
	*machine
	held  snapshot.Held
	accel vm.Accel
	was   vm.Record // the VM while it is hibernated
	back  undo.Stack
	args  snapshotArgs
	aftermath
}

var wakeOperation = operation[*wake]{
	name: opWake, told: true, recall: recallWake, release: (*wake).release,
	steps: []step[*wake]{
		{word: stepLaunch, run: (*wake).launch, undo: (*wake).undo, recover: recoverIn(stepLaunch)},
		{word: stepAnswer, run: (*wake).answer, undo: (*wake).undoAnswer, recover: recoverIn(stepAnswer), lasting: true},
		{word: stepClean, run: (*wake).clean, undo: (*wake).undoClean, recover: recoverIn(stepClean)},
	},
}

func recallWake(m *machine, in journal.Intent) (*wake, error) {
	args, err := argsOfSnapshot(in)
	w := &wake{machine: m, was: m.record(), args: args}
	w.was.State, w.was.Snapshot, w.was.Disks, w.was.Attached = vm.StateHibernated, args.Snapshot, below(w.was.Disks), unsized(w.was.Attached)
	return w, err
}

// launch resumes the VM. It writes nothing to the journal before the process runs: until then the VM is hibernated.
func (w *wake) launch(ctx context.Context) (outcome, error) {
	done, err := w.resume(ctx)
	return done, damaged(w.held.Snapshot(), err)
}

func (w *wake) resume(ctx context.Context) (outcome, error) {
	r := w.record()
	if err := w.dirs.make(w.id); err != nil { // a reboot of the host removes the runtime folder
		return outcome{}, err
	}
	nics, err := w.nics.attach(ctx, r, &w.back, false)
	if err != nil {
		return outcome{}, err
	}
	// A failed attempt may have let the guest write, so each attempt begins with its own overlays or copies.
	disks, err := w.disks(ctx)
	if err != nil {
		return outcome{}, err
	}
	has, err := w.withVolumes(ctx, r, disks, nil)
	if err != nil {
		return outcome{}, err
	}
	known, grownBefore := macsOf(r.NICs), []string(nil)
	if r.Resume != nil { // it was saved before its agent was told
		grownBefore = r.Resume.Volumes
	}
	r.NICs, r.Disks, r.Attached, r.Spec.Accel = nics, has.disks, has.attached, w.accel
	if r.Resume == nil || !r.Resume.Clone { // a clone that has not received its identity remains a clone
		r.Resume = &vm.Resume{Fresh: w.held.Snapshot().Fresh}
		if r.ImageType == vm.ImageOCI && !slices.Equal(macsOf(nics), known) { // the network chose other MACs after a host restart
			r.Resume.Clone, r.Resume.MACs, r.Cloned = true, known, true
		}
	}
	resume := *r.Resume
	resume.Volumes = slices.Concat(grownBefore, has.grown)
	r.Resume = &resume
	incoming := incomingOf(w.held)
	incoming.Alone, incoming.LinksDown, incoming.Grown = true, !r.Itself(), grown(r)
	startedAt, restarts := r.StartedAt, r.Restarts
	return w.launchProcess(ctx, r, launchOptions{
		ready: w.dirs.syncing(w.id, r.Disks), incoming: incoming, log: w.logs.Main.Resume,
		change: func(to *vm.Record) {
			to.NICs, to.Disks, to.Attached, to.Resume, to.Cloned, to.Snapshot = r.NICs, r.Disks, r.Attached, r.Resume, r.Cloned, ""
			to.StartedAt, to.Restarts = startedAt, restarts // for the guest there was no interruption
		},
	}, &w.back)
}

// disks makes the writable disks of this attempt.
func (w *wake) disks(ctx context.Context) ([]vm.Disk, error) {
	r := w.record()
	if !w.drivers.rawOnly(r.Driver) {
		disks, _, err := w.overlaysOn(ctx)
		return disks, err
	}
	images, err := w.imagesOf(vm.OnBehalf(ctx, vm.Owner{}), w.held.Snapshot()) // the VM uses them already
	if err != nil {
		return nil, err
	}
	saved, err := w.disksFrom(ctx, w.id, r.Driver, 0, w.held, images)
	if err != nil {
		return nil, err
	}
	disks := slices.Clone(r.Disks)
	for i, d := range disks {
		if at := slices.IndexFunc(saved, func(s vm.Disk) bool { return s.Serial == d.Serial && !s.ReadOnly }); at >= 0 {
			disks[i] = saved[at]
			disks[i].Port = d.Port
		}
	}
	return disks, nil
}

// answer waits for the guest. The caller may go away: the VM is awake or hibernated in the end.
func (w *wake) answer(context.Context) (outcome, error) {
	w.back.Release() // from here the process is on record
	x := w.held.Snapshot()
	if err := w.proven(x.Live && x.Record.AgentReady); err != nil {
		return outcome{}, err
	}
	w.answered = true
	w.held.Release()
	return outcome{}, nil
}

func (w *wake) clean(ctx context.Context) (outcome, error) {
	done, err := w.aftermath.clean(ctx, w.machine, w.was.Snapshot, w.args.Files...)
	done.then = w.shorten
	return done, err
}

// undo leaves the VM hibernated, as it was before.
func (w *wake) undo(ctx context.Context, cause error) error {
	if err := w.back.Run(ctx); err != nil {
		cause = errors.Join(cause, fmt.Errorf("undo: %w", err))
	}
	was := w.was
	_ = w.settleAssumed(ctx, opWake, func(r *vm.Record) {
		r.State, r.Snapshot, r.Disks, r.Attached, r.Resume, r.Cloned = was.State, was.Snapshot, was.Disks, was.Attached, was.Resume, was.Cloned
		r.Containers, r.Ephemeral, r.ExitCode = was.Containers, was.Ephemeral, was.ExitCode
		r.Handle, r.PID, r.AgentReady, r.Reason, r.Message = nil, 0, false, vm.ReasonWakeFailed, cause.Error()
		if errdefs.Is(cause, errdefs.DataLoss) {
			r.Reason = vm.ReasonDataLoss
		}
	})
	w.tidy()
	return cause
}

// undoAnswer ends the process of a guest that does not answer, and leaves the VM hibernated. What the guest wrote is
// removed with its overlays.
func (w *wake) undoAnswer(ctx context.Context, cause error) error {
	if w.answered {
		return w.cleanUnsettled(ctx, w.machine, w.was.Snapshot, w.args.Files...)
	}
	if err := w.retire(ctx); err != nil {
		w.fail(ctx, opWake, vm.ReasonWakeFailed, err)
		return err
	}
	return w.undo(ctx, cause)
}

func (w *wake) undoClean(_ context.Context, err error) error { return w.aftermath.undo(w.machine, err) }

func (w *wake) release() {
	if w.held != nil {
		w.held.Release()
	}
}

// recoverIn returns recover for the step with that word.
func recoverIn(word string) func(*wake, context.Context) (next string, err error) {
	return func(w *wake, ctx context.Context) (string, error) { return w.recover(ctx, word) }
}

// recover finishes waking a VM whose process is on record and runs; if it was about to answer, it goes on to wait for
// that. A VM that was awake and whose process has ended is stopped, and any other is still hibernated.
func (w *wake) recover(ctx context.Context, at string) (next string, err error) {
	r, slept := w.record(), w.was.Snapshot
	if err := w.reattach(ctx); err != nil {
		return "", err
	}
	there, err := w.committed(ctx, w.id, slept)
	if run := w.run.Load(); run != nil {
		if err := w.settlePause(ctx, run); err != nil {
			return "", err
		}
		if err == nil && at == stepAnswer && there {
			w.held, err = w.snapshots.Hold(ctx, slept)
			return stepAnswer, err
		}
		if err != nil {
			w.log.Warn("hibernation snapshot of a running vm not removed", "vm", w.id, "snapshot", slept, "err", err)
			slept = ""
		}
		if err := w.durable(ctx); err != nil { // until then, the VM may still be in the snapshot after a power cut
			return "", err
		}
		w.dropSlept(ctx, slept)
		w.settleFailed(ctx, opWake, same)
		w.tidy(w.args.Files...)
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if len(r.Handle) > 0 && (at == stepClean || r.AgentReady || !there) {
		if err := w.adoptAndSettle(ctx); err != nil {
			return "", err
		}
		w.tidy(w.args.Files...)
		return "", nil
	}
	return "", w.recoverHibernated(ctx)
}

// recoverHibernated records that the VM, which has no process, is hibernated as before the attempt to wake it.
func (w *wake) recoverHibernated(ctx context.Context) error {
	r := w.record()
	if err := w.reap(ctx); err != nil {
		return err
	}
	if err := w.nics.detachAll(ctx, r); err != nil {
		return err
	}
	err := w.settle(ctx, func(to *vm.Record) {
		if len(r.Handle) > 0 {
			to.Disks, to.Attached = w.was.Disks, w.was.Attached
		}
		to.State, to.Snapshot, to.Handle, to.PID, to.AgentReady = vm.StateHibernated, w.was.Snapshot, nil, 0, false
		to.Reason, to.Message = vm.ReasonWakeFailed, "its wake was interrupted when cocoond ended; wake it again"
	})
	w.tidy(w.args.Files...)
	return err
}
