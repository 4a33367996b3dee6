package engine

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// SaveSnapshot saves the VM of ref: a running VM with its memory, while it keeps running; a stopped VM with its
// disks. Of a hibernated VM it keeps the snapshot that the VM is hibernated in, under the name of spec.
// Errors: InvalidArgument and AlreadyExists (name), FailedPrecondition (state, a guest that cannot be frozen) and
// Unsupported before anything changes. Whatever fails, the VM continues as before and no snapshot remains.
func (e *Engine) SaveSnapshot(caller context.Context, ref string, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	var saved snapshot.Snapshot
	_, err := e.operate(caller, opSave, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		store, err := m.store()
		if err != nil {
			return m.record(), err
		}
		if err := m.savable(ctx, m.record()); err != nil {
			return m.record(), err
		}
		if m.record().State == vm.StateHibernated {
			saved, err = m.keepHibernated(ctx, spec)
			return m.record(), err
		}
		c, err := m.capture(ctx, spec.Quiesce)
		if err != nil {
			return m.record(), err
		}
		if c.draft, err = store.Create(ctx, spec.Name); err != nil {
			return m.record(), err
		}
		defer c.discard()
		c.others = true
		s := &save{capture: c, x: snapshot.Snapshot{Name: spec.Name, Description: spec.Description, Labels: spec.Labels}}
		r, err := saveOperation.run(ctx, m, s, snapshotArgs{Snapshot: c.draft.ID()}.json())
		saved = s.x
		return r, err
	})
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	return saved, nil
}

// keepHibernated makes the snapshot that m is hibernated in one of its own: it stays when m wakes or is removed. That is
// one write to the store, so it needs no intent. Nothing is copied.
func (m *machine) keepHibernated(ctx context.Context, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	r := m.record()
	if spec.Quiesce {
		return snapshot.Snapshot{}, errdefs.Preconditionf("it is hibernated, so its file systems cannot be frozen; save it without quiescing")
	}
	x, err := m.snapshots.Update(ctx, r.Snapshot, func(x *snapshot.Snapshot) {
		x.Kept, x.Name, x.Description, x.Labels = true, spec.Name, spec.Description, spec.Labels
	})
	if errdefs.IsNotFound(err) {
		return x, errdefs.DataLossf("the snapshot %s with its memory is missing; restore it from a backup, or remove the VM", r.Snapshot)
	}
	if err != nil {
		return x, err
	}
	if _, err := m.update(ctx, func(r *vm.Record) { listed(r, x.ID) }); err != nil {
		m.log.Warn("kept snapshot not listed in the record of its vm", "vm", m.id, "snapshot", x.ID, "err", err)
	}
	return x, nil
}

// save makes a snapshot of a VM, which goes on as before.
type save struct {
	capture
	x    snapshot.Snapshot
	done bool         // the snapshot exists and is complete
	args snapshotArgs // of a save that an earlier process of the engine began
}

var saveOperation = operation[*save]{
	name: opSave, told: true, recall: recallSave,
	steps: []step[*save]{
		{word: stepSave, run: (*save).save, undo: (*save).undo, recover: (*save).recover},
	},
}

func recallSave(m *machine, in journal.Intent) (*save, error) {
	args, err := argsOfSnapshot(in)
	return &save{capture: capture{machine: m}, args: args}, err
}

func (s *save) save(ctx context.Context) (outcome, error) {
	x, err := s.shoot(ctx, s.x)
	if err != nil {
		return outcome{}, err
	}
	s.x, s.done = x, true
	return outcome{change: func(r *vm.Record) { listed(r, x.ID) }, then: s.shorten}, nil
}

// undo leaves the VM as it was. If the snapshot is complete, only the list in the record lacks it; the next recovery
// adds it.
func (s *save) undo(ctx context.Context, err error) error {
	if s.done {
		s.log.Error("snapshot saved, but the journal did not record it", "vm", s.id, "snapshot", s.x.ID, "err", err)
		return nil
	}
	if run := s.run.Load(); run != nil && !run.Over() { // its driver gives up to let the guest go on when that takes long
		err = errors.Join(err, s.settlePause(context.WithoutCancel(ctx), run))
	}
	err = errors.Join(err, s.dropKept(context.WithoutCancel(ctx), s.draft.ID()))
	s.settleFailed(ctx, opSave, same)
	s.tidy()
	return err
}

// recover ends an interrupted save: the snapshot exists or not, and the guest continues in either case.
func (s *save) recover(ctx context.Context) (next string, err error) {
	if err := s.adopt(ctx); err != nil {
		return "", err
	}
	there, err := s.committed(ctx, s.id, s.args.Snapshot)
	if err == nil && !there {
		err = s.dropKept(ctx, s.args.Snapshot)
	}
	if err != nil {
		return "", err
	}
	err = s.settle(ctx, func(r *vm.Record) {
		if there {
			listed(r, s.args.Snapshot)
		}
	})
	s.tidy()
	return "", err
}

// listed adds a snapshot to the list of those that were taken of r.
func listed(r *vm.Record, id string) {
	if !slices.Contains(r.SnapshotIDs, id) {
		r.SnapshotIDs = append(slices.Clip(r.SnapshotIDs), id)
	}
}

// snapshotArgs are the journal arguments of operations with a snapshot.
type snapshotArgs struct {
	Snapshot string   `json:"snapshot"`        // id; for save and hibernate: of the snapshot to be made
	Files    []string `json:"files,omitempty"` // for wake and restore: disks in the VM's folder that may not be needed after it
	Slept    string   `json:"slept,omitempty"` // for restore: id of the snapshot that the VM was hibernated in
	// Was, for restore, is the record that the VM returns to if its guest does not answer.
	Was *vm.Record `json:"was,omitempty"`
}

func (a snapshotArgs) json() []byte {
	b, _ := json.Marshal(a) // plain values always encode
	return b
}

// argsOfSnapshot returns the arguments of an unfinished operation with a snapshot.
func argsOfSnapshot(in journal.Intent) (snapshotArgs, error) {
	var args snapshotArgs
	if err := json.Unmarshal(in.Args, &args); err != nil || args.Snapshot == "" {
		return args, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return args, nil
}

// committed reports whether a snapshot of a VM exists; its commit is one atomic change. A snapshot of another VM is an
// error: it does not belong to this one, whatever the journal says.
func (n *node) committed(ctx context.Context, of vm.ID, id string) (bool, error) {
	store, err := n.store()
	if err != nil {
		return false, err
	}
	x, err := store.Get(ctx, id)
	switch {
	case errdefs.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, err
	case x.Source.VMID != of:
		return false, errdefs.DataLossf("the journal is damaged: snapshot %s belongs to another VM", id)
	}
	return true, nil
}
