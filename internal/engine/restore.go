package engine

import (
	"context"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Restore returns the VM of ref, running or not, to a snapshot that was taken of it: to its memory or, if it has
// none, to its disks, which the VM boots. Changes since the snapshot are lost. The old disks are removed when the
// guest has answered, or has run for a while if it has no agent.
// Errors: NotFound, FailedPrecondition (a snapshot of another VM, another kind of machine), Unavailable (the hypervisor does not work here now) before
// anything changes.
// If it fails after the process was ended, the VM is stopped, or hibernated as before, and has its earlier disks.
func (e *Engine) Restore(caller context.Context, ref, snap string) (vm.Record, error) {
	return e.operate(caller, opRestore, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.restore(ctx, snap)
	})
}

func (m *machine) restore(ctx context.Context, snap string) (vm.Record, error) {
	r := m.record()
	store, err := m.store()
	if err != nil {
		return r, err
	}
	switch r.State {
	case vm.StateRunning, vm.StateStopped, vm.StateCreated, vm.StateHibernated:
	default:
		return r, broken(r)
	}
	h, err := store.Hold(ctx, snap)
	if err != nil {
		return r, err
	}
	defer h.Release()
	x := h.Snapshot()
	if r.State == vm.StateHibernated && r.Snapshot == x.ID { // its memory is needed only once: wake it instead
		h.Release()
		return m.wake(ctx)
	}
	if err := h.Verify(ctx); err != nil { // its memory is verified after the guest has ended
		return r, damaged(x, err)
	}
	images, err := m.restorable(ctx, r, x)
	if err != nil {
		return r, err
	}
	args := snapshotArgs{Snapshot: x.ID, Files: ownFiles(m.dirs.state(m.id), r.Disks), Was: &r}
	if r.State == vm.StateHibernated {
		args.Slept = r.Snapshot
	}
	s := &restore{machine: m, held: h, x: x, images: images, args: args}
	defer s.unguard()
	return restoreOperation.run(ctx, m, s, args.json())
}

// restorable refuses a snapshot to which r cannot be restored.
func (n *node) restorable(ctx context.Context, r vm.Record, x snapshot.Snapshot) ([]image.Image, error) {
	if r.Spec.Sandbox || x.Record.Spec.Sandbox {
		return nil, errNoSandbox()
	}
	if x.Source.VMID != r.ID {
		return nil, errdefs.Preconditionf("snapshot %s belongs to VM %s, not to this VM; clone it instead", x.Name, x.Source.VMName)
	}
	if v := append(r.Spec.DiskVolumes(), x.Record.Spec.DiskVolumes()...); len(v) > 0 {
		return nil, errdefs.Preconditionf("the VM uses volume %s, whose content is in no snapshot of a VM; restore a snapshot of the volume instead", v[0].Name)
	}
	if _, err := containersIn(x, r.Spec, x.Live); err != nil {
		return nil, err
	}
	if _, err := imageVolumesIn(x, r.Spec); err != nil {
		return nil, err
	}
	if _, err := ephemeralIn(x, x.Live); err != nil {
		return nil, err
	}
	if !x.Live {
		if err := n.startable(r); err != nil {
			return nil, err
		}
	} else if x.Hypervisor != r.Driver {
		return nil, errdefs.Preconditionf("it was saved by %s, and the VM runs in %s, which cannot read that; clone the snapshot instead", savedBy(x), r.Driver)
	} else if !r.Spec.SameNICs(x.Record.Spec) {
		return nil, errdefs.Preconditionf("the VM has got or given back network interfaces since snapshot %s was taken, and a resumed guest has those of then; attach and detach interfaces until it has the same, or clone the snapshot", x.Name)
	} else if _, err := n.drivers.resumable(ctx, x, r.Spec.Accel, remedyRestore); err != nil {
		return nil, err
	}
	return n.imagesOf(vm.OnBehalf(ctx, vm.Owner{}), x) // the VM uses them already
}

// restore returns a VM to a snapshot.
type restore struct {
	*machine
	held   snapshot.Held
	x      snapshot.Snapshot // that of held; may be known without it
	images []image.Image
	args   snapshotArgs
	left   bool      // by an earlier process of the engine: nobody may have cleaned up
	disks  []vm.Disk // made of the snapshot
	was    vm.Record // the VM without its process: where it returns to
	back   undo.Stack
	aftermath
}

var restoreOperation = operation[*restore]{
	name: opRestore, told: true, recall: recallRestore, release: (*restore).release,
	steps: []step[*restore]{
		{word: stepDisks, run: (*restore).makeDisks, undo: (*restore).undoEarly, recover: (*restore).recoverEarly},
		{word: stepKill, run: (*restore).kill, undo: (*restore).undoEarly, recover: (*restore).recoverKilled},
		{word: stepLaunch, run: (*restore).launch, undo: (*restore).undo, recover: (*restore).recoverKilled},
		{word: stepAnswer, run: (*restore).answer, undo: (*restore).undoAnswer, recover: (*restore).recoverAnswer, lasting: true},
		{word: stepClean, run: (*restore).clean, undo: (*restore).undoClean, recover: (*restore).recoverClean},
	},
}

func recallRestore(m *machine, in journal.Intent) (*restore, error) {
	args, err := argsOfSnapshot(in)
	return &restore{machine: m, args: args, left: true}, err
}

// makeDisks makes the disks of the snapshot beside those of the VM.
func (s *restore) makeDisks(ctx context.Context) (outcome, error) {
	var err error
	s.disks, err = s.disksFrom(ctx, s.id, s.record().Driver, s.record().Spec.Storage, s.held, s.images)
	return outcome{}, err
}

// kill ends the process of the VM, if it has one. From its end on, recovery continues the restore.
func (s *restore) kill(ctx context.Context) (outcome, error) {
	if err := s.retire(ctx); err != nil {
		return outcome{}, err
	}
	at := now()
	return outcome{change: func(r *vm.Record) {
		if r.State != vm.StateHibernated {
			r.Reason, r.Message = "", ""
			stopped(r, ending{asked: true}, at)
		}
	}}, nil
}

// launch starts the VM from the snapshot. The caller may go away from now on.
func (s *restore) launch(ctx context.Context) (outcome, error) {
	ctx = context.WithoutCancel(ctx)
	s.was = s.record()
	if s.disks == nil { // those of an earlier process of the engine are removed in the end
		if err := s.reap(ctx); err != nil {
			return outcome{}, err
		}
		if _, err := s.makeDisks(ctx); err != nil {
			return outcome{}, err
		}
	}
	done, err := s.resume(ctx)
	return done, damaged(s.x, err)
}

// resume starts the process.
func (s *restore) resume(ctx context.Context) (outcome, error) {
	r, live := s.record(), s.x.Live
	if !live {
		boot, err := s.bootOf(r.ID, r.Driver, r.Spec, r.ImageType) // the path of the kernel may have changed
		if err != nil {
			return outcome{}, err
		}
		r.Boot = boot
	}
	if err := s.dirs.make(s.id); err != nil {
		return outcome{}, err
	}
	nics, err := s.nics.attach(ctx, r, &s.back, false)
	if err != nil {
		return outcome{}, err
	}
	disks := s.disks
	for _, d := range r.Disks {
		if d.Role == vm.RoleCidat { // the only disks that are in no snapshot
			disks = append(disks, d)
		}
	}
	r.NICs, r.Disks, r.Resume, r.Cloned = nics, disks, nil, false
	if r.Disks, err = s.seed(ctx, r, nics); err != nil {
		return outcome{}, err
	}
	f := launchOptions{ready: s.dirs.syncing(s.id, r.Disks), log: s.logs.Main.Begin}
	if live {
		if err := s.identify(ctx, &r); err != nil {
			return outcome{}, err
		}
		r.Spec = r.Spec.SizedAs(s.x.Record.Spec)
		f.log, f.incoming = s.logs.BeginForeign, incomingOf(s.held)
		f.incoming.Alone, f.incoming.LinksDown = true, r.Cloned
	}
	slept := s.record().State == vm.StateHibernated
	f.change = func(to *vm.Record) {
		to.Boot, to.NICs, to.Disks, to.Resume, to.Cloned = r.Boot, r.NICs, r.Disks, r.Resume, r.Cloned
		to.Ephemeral = endedWith(to.Ephemeral, now())
		if live {
			to.Containers, to.Ephemeral = r.Containers, over(to.Ephemeral, r.Ephemeral)
			to.Spec = to.Spec.SizedAs(r.Spec)
		}
		if slept {
			to.Snapshot = ""
		}
	}
	s.guard()
	return s.launchProcess(ctx, r, f, &s.back)
}

// identify says in r what its guest, which resumes from the snapshot, has to be told.
func (s *restore) identify(ctx context.Context, r *vm.Record) (err error) {
	r.Resume = &vm.Resume{Clone: true}
	for _, n := range s.x.NIC {
		r.Resume.MACs = append(r.Resume.MACs, n.MAC)
	}
	if r.Cloned = !r.Itself(); !r.Cloned {
		r.Resume = &vm.Resume{}
	} else { // its guest had not received its identity yet
		r.Resume.MachineID = newMachineID()
	}
	r.Resume.Fresh = s.x.Fresh
	if r.Spec.Accel, err = s.drivers.resumable(ctx, s.x, r.Spec.Accel, remedyRestore); err != nil {
		return err
	}
	if r.Containers, err = containersIn(s.x, r.Spec, true); err != nil {
		return err
	}
	r.Ephemeral, err = ephemeralIn(s.x, true)
	return err
}

// answer waits for the guest.
func (s *restore) answer(context.Context) (outcome, error) {
	s.back.Release() // from here the process is on record
	s.guard()
	if err := s.proven(s.x.Live && s.x.Record.AgentReady); err != nil {
		return outcome{}, err
	}
	s.answered = true
	return outcome{}, nil
}

func (s *restore) clean(ctx context.Context) (outcome, error) {
	return s.aftermath.clean(ctx, s.machine, s.args.Slept, s.args.Files...)
}

// guard keeps the snapshot that the VM was hibernated in, which no record leads to until the operation has ended.
func (s *restore) guard() {
	if s.args.Slept != "" {
		s.vms.settling.Store(s.args.Slept, true)
	}
}

func (s *restore) unguard() {
	if s.args.Slept != "" {
		s.vms.settling.Delete(s.args.Slept)
	}
}

func (s *restore) release() {
	s.unguard()
	if s.held != nil {
		s.held.Release()
	}
}

// undoEarly leaves the VM with its earlier disks, and stopped if its process has ended.
func (s *restore) undoEarly(ctx context.Context, err error) error {
	s.settleFailed(ctx, opRestore, func(r *vm.Record) {
		if r.State == vm.StateRunning && s.run.Load() == nil {
			stopped(r, ending{asked: true}, now())
		}
		if s.left && r.State != vm.StateRunning {
			r.Reason, r.Message = vm.ReasonStartFailed, err.Error()
		}
	})
	s.tidy()
	return err
}

// undo returns the VM to its earlier state, without its process.
func (s *restore) undo(ctx context.Context, err error) error {
	if undone := s.back.Run(ctx); undone != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w", undone))
	}
	_ = s.settleAssumed(ctx, opRestore, func(r *vm.Record) {
		*r = s.was
		r.Reason, r.Message = vm.ReasonStartFailed, err.Error()
	})
	s.tidy()
	return err
}

// undoAnswer ends the process of a guest that does not answer, and returns the VM to its earlier state.
func (s *restore) undoAnswer(ctx context.Context, err error) error {
	if s.answered {
		return s.cleanUnsettled(ctx, s.machine, s.args.Slept, s.args.Files...)
	}
	if err := s.retire(ctx); err != nil {
		s.fail(ctx, opRestore, vm.ReasonStartFailed, err)
		return err
	}
	return s.undo(ctx, err)
}

func (s *restore) undoClean(_ context.Context, err error) error {
	return s.aftermath.undo(s.machine, err)
}

// recoverEarly leaves the VM as it was: its process has not been touched.
func (s *restore) recoverEarly(ctx context.Context) (next string, err error) {
	err = s.adoptAndSettle(ctx)
	s.tidy()
	return "", err
}

// recoverKilled does the rest of the restore, with new disks. If that is not possible, the VM keeps its earlier state.
func (s *restore) recoverKilled(ctx context.Context) (next string, err error) {
	if err := s.reattach(ctx); err != nil {
		return "", err
	}
	store, err := s.store()
	if err == nil {
		s.held, err = store.Hold(ctx, s.args.Snapshot)
	}
	if err == nil {
		s.x = s.held.Snapshot()
		s.images, err = s.restorable(ctx, s.record(), s.x)
	}
	if err != nil {
		s.log.Error("unfinished operation failed", "vm", s.id, "op", opRestore, "err", err)
		_ = s.undoEarly(ctx, err)
		return "", nil
	}
	return stepKill, nil
}

// recoverAnswer goes on to wait for the guest. If the process has ended, the VM returns to its earlier state.
func (s *restore) recoverAnswer(ctx context.Context) (next string, err error) {
	if s.record().AgentReady {
		return s.recoverClean(ctx)
	}
	if s.args.Was == nil {
		return "", errdefs.DataLossf("the arguments of its unfinished restore are damaged")
	}
	s.was = *s.args.Was
	if s.args.Slept == "" && s.was.State == vm.StateRunning {
		stopped(&s.was, ending{asked: true}, now())
	}
	if err := s.reattach(ctx); err != nil {
		return "", err
	}
	if s.x, err = s.snapshots.Get(ctx, s.args.Snapshot); err != nil && !errdefs.IsNotFound(err) {
		return "", err
	}
	run := s.run.Load()
	if run == nil {
		if err := s.reap(ctx); err != nil {
			return "", err
		}
		s.reclaim(ctx)
		cause := errdefs.Preconditionf("the restore to snapshot %s was interrupted when cocoond ended; restore it again", s.args.Snapshot)
		if err := s.undo(ctx, cause); !errors.Is(err, cause) {
			return "", err
		}
		return "", nil
	}
	return stepAnswer, s.settlePause(ctx, run)
}

// recoverClean removes what is left of the earlier state.
func (s *restore) recoverClean(ctx context.Context) (next string, err error) {
	if err := s.adopt(ctx); err != nil {
		return "", err
	}
	if s.args.Slept != "" {
		s.dropStale(ctx, s.args.Slept)
	}
	s.tidy(s.args.Files...)
	return "", s.settle(ctx, same)
}
