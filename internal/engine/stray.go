package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Strays returns what this host has of VMs that the journal does not know, sorted by ID. Non-operators get none.
func (e *Engine) Strays(ctx context.Context) ([]vm.Stray, error) {
	if err := e.life.ready(ctx); err != nil {
		return nil, err
	}
	ids := e.strays.ids()
	if len(ids) == 0 || !vm.Behalf(ctx).Operator() {
		return nil, nil
	}
	pids, err := e.drivers.seek(ctx, ids)
	if err != nil {
		return nil, err
	}
	out := make([]vm.Stray, 0, len(ids))
	for _, id := range ids {
		out = append(out, e.strays.describe(id, pids[id]))
	}
	return out, nil
}

// describe says what there is of one of them.
func (s *strays) describe(id vm.ID, pids []int) vm.Stray {
	x := vm.Stray{ID: id, PIDs: pids, Reason: "the journal does not know it"}
	if row, err := s.kept(id); err == nil {
		x.Name, x.State = row.Record.Spec.Name, row.Record.State
	} else {
		x.Reason += ", and " + err.Error()
	}
	for _, dir := range []string{s.dirs.state(id), s.dirs.run(id)} {
		if _, err := os.Stat(dir); err == nil {
			x.Dirs = append(x.Dirs, dir)
		}
	}
	nics, _ := s.get(id)
	for _, n := range nics {
		x.Taps = append(x.Taps, n.Tap)
	}
	return x
}

// AdoptStray adds a VM that the journal does not know to the journal, under its own name ("") or another, as the
// record in its folder says. Its guest continues if it runs, and an unfinished operation is finished or undone.
// Errors: NotFound, DataLoss (its record), AlreadyExists (its name).
func (e *Engine) AdoptStray(caller context.Context, ref, name string) (vm.Record, error) {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	id, err := e.strays.find(ctx, ref)
	var r vm.Record
	if err == nil {
		r, err = e.strays.adopt(ctx, id, name)
	}
	if err != nil {
		return vm.Record{}, e.life.ended(caller, fmt.Errorf("adopt unknown vm %s: %w", ref, err))
	}
	e.log.Warn("unknown vm adopted on request", "vm", id)
	if err := e.durable(ctx); err != nil {
		return r, err
	}
	return r.Clone(), nil
}

func (s *strays) adopt(ctx context.Context, id vm.ID, name string) (vm.Record, error) {
	row, err := s.kept(id)
	if err != nil {
		return vm.Record{}, err
	}
	r := row.Record
	if name != "" {
		r.Spec.Name = name
		if err := vm.ValidateName(name); err != nil {
			return r, err
		}
	}
	in := row.Intent
	if in == nil {
		in = &journal.Intent{ID: id, Op: opAdopt, Step: stepAdopt, Began: now()}
	}
	if o := operationOf(*in); o != nil && !o.worthFinishing() {
		return r, errdefs.Preconditionf("its %s was not finished; remove it with `cocoon recover rm %s`", in.Op, id)
	}
	release, err := s.vms.queue.Lock(ctx, id)
	if err != nil {
		return r, err
	}
	if _, ok := s.get(id); !ok {
		release()
		return r, errdefs.NotFoundf("it is no longer an unknown VM")
	}
	m, err := s.enlist(ctx, r, *in)
	if err != nil {
		release()
		return r, err
	}
	s.drop(id)
	m.recover(context.WithoutCancel(ctx), in, release)
	return m.record(), nil
}

// enlist records r with an unsettled operation.
func (s *strays) enlist(ctx context.Context, r vm.Record, in journal.Intent) (*machine, error) {
	m := s.newMachine(r)
	if err := s.vms.reserve(m.key(), r.ID); err != nil {
		return nil, err
	}
	m.remains.Store(true) // not known, so assume it
	err := m.insert(ctx, func(ctx context.Context, r vm.Record) (vm.Record, error) { return s.journal.Begin(ctx, in, r) })
	if err != nil {
		s.vms.unreserve(m.key())
		return nil, err
	}
	return m, nil
}

// RemoveStray ends the process of a VM that the journal does not know, and removes its NICs, addresses and folders. Its volumes stay.
// Errors: NotFound if ref is no stray.
func (e *Engine) RemoveStray(caller context.Context, ref string) error {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return err
	}
	defer leave()
	id, err := e.strays.find(ctx, ref)
	if err == nil {
		err = e.strays.remove(ctx, id)
	}
	if err != nil {
		return e.life.ended(caller, fmt.Errorf("remove unknown vm %s: %w", ref, err))
	}
	e.log.Warn("unknown vm removed on request", "vm", id)
	return nil
}

// unknown is how requests refer to strays.
var unknown = vm.Kind{Noun: "unknown VM", List: "cocoon recover"}

// find resolves an ID or a unique prefix of one. Strays belong to the operator, whoever owned the VM.
func (s *strays) find(ctx context.Context, ref string) (vm.ID, error) {
	return unknown.Match(vm.Behalf(ctx), ref, func(yield func(vm.Named) bool) {
		for _, id := range s.ids() {
			if !yield(vm.Named{ID: id}) {
				return
			}
		}
	})
}

func (s *strays) remove(caller context.Context, id vm.ID) error {
	release, err := s.vms.queue.Lock(caller, id)
	if err != nil {
		return err
	}
	defer release()
	nics, ok := s.get(id)
	if !ok || s.vms.get(id) != nil {
		return errdefs.NotFoundf("it is no longer an unknown VM")
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(caller), undo.Limit)
	defer cancel()
	if err := s.drivers.reapUnknown(ctx, id, s.dirs.run(id)); err != nil {
		return err
	}
	if err := s.nics.detach(ctx, nics, true); err != nil {
		return err
	}
	if err := s.releaseVolumes(ctx, id); err != nil {
		return err
	}
	if err := s.dirs.remove(id); err != nil {
		return err
	}
	s.drop(id)
	return nil
}

// sweep removes what is proven to belong to no VM, and keeps aside what is merely unknown. It logs what it cannot
// remove and tries again next time.
func (s *strays) sweep(ctx context.Context) {
	unborn := map[vm.ID]bool{}
	for _, id := range s.unknownFolders() {
		proven, err := s.unborn(id)
		if err != nil {
			s.log.Warn("folder of unknown vm not read", "vm", id, "err", err)
		}
		if !proven {
			s.add(id)
			continue
		}
		unborn[id] = true
		s.sweepUnborn(ctx, id)
	}
	s.sweepTaps(ctx, unborn)
	if err := s.sweepVolumes(ctx); err != nil {
		s.log.Warn("volumes of unknown vms not released", "err", err)
	}
	var records []vm.Record
	for _, id := range s.ids() {
		if row, err := s.kept(id); err == nil {
			records = append(records, row.Record)
		}
		x := s.describe(id, nil)
		s.log.Warn("unknown vm kept aside, its guest goes on if it runs; see cocoon recover", "vm", id, "dirs", x.Dirs, "taps", x.Taps)
	}
	s.nics.remember(ctx, records)
}

// unknownFolders returns the IDs of folders that belong to no VM. It also finishes interrupted removals.
func (s *strays) unknownFolders() []vm.ID {
	found := map[vm.ID]bool{}
	for _, parent := range []string{s.dirs.runParent, s.dirs.stateParent} {
		entries, err := os.ReadDir(parent)
		if err != nil {
			s.log.Warn("unused folders not found", "err", err)
			continue
		}
		for _, entry := range entries {
			name := entry.Name()
			if id := vm.ID(name); id.Valid() && s.vms.get(id) == nil {
				found[id] = true
			}
			if strings.HasPrefix(name, gonePrefix) {
				if err := atomicfile.RemoveAll(filepath.Join(parent, name)); err != nil {
					s.log.Warn("folder of removed vm not deleted", "err", err)
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// unborn reports whether no VM is lost with the folders of id, which the journal does not know. The VM's own record counts for more than a
// marker.
func (s *strays) unborn(id vm.ID) (bool, error) {
	if row, err := s.kept(id); err == nil && (row.Intent == nil || row.Record.State != vm.StateCreating) {
		return false, nil // a power cut brought the marker back
	}
	return s.dirs.unborn(id)
}

// sweepUnborn removes everything of a VM that no caller was told of.
func (s *strays) sweepUnborn(ctx context.Context, id vm.ID) {
	ctx, cancel := context.WithTimeout(ctx, undo.Limit)
	defer cancel()
	if err := s.drivers.reapUnknown(ctx, id, s.dirs.run(id)); err != nil {
		s.log.Warn("process of unfinished vm not ended", "vm", id, "err", err)
		return
	}
	if err := (poolMaker{s.node}).forget(ctx, id); err != nil {
		s.log.Warn("addresses of a clone in the pool not released", "vm", id, "err", err)
	}
	if err := s.dirs.remove(id); err != nil {
		s.log.Warn("folders of unfinished vm not removed", "vm", id, "err", err)
		return
	}
	s.log.Info("folders of unfinished vm removed", "vm", id)
}

// sweepVolumes ends the attachments to VMs of which there is neither a record nor a folder nor a process, unless something else has the id. After a power cut, the store
// may have the attachment of a VM whose creation the journal did not keep.
func (s *strays) sweepVolumes(ctx context.Context) error {
	if s.volumes == nil {
		return nil
	}
	all, err := s.volumes.List(vm.OnBehalf(ctx, vm.Owner{}))
	if err != nil {
		return err
	}
	gone := map[vm.ID]bool{}
	for _, v := range all {
		for _, a := range v.Attachments {
			if _, aside := s.get(a.VM); !aside && s.vms.get(a.VM) == nil && !s.perhapsOther(ctx, a.VM) {
				gone[a.VM] = true
			}
		}
	}
	if len(gone) == 0 {
		return nil
	}
	pids, err := s.drivers.seek(ctx, slices.Collect(maps.Keys(gone)))
	if err != nil {
		return err
	}
	var errs []error
	for id := range gone {
		if len(pids[id]) > 0 {
			s.log.Warn("volumes of an unknown vm not released, its process runs", "vm", id, "pids", pids[id])
			continue
		}
		s.log.Warn("volumes released, nothing is left of the vm that had them", "vm", id)
		errs = append(errs, s.releaseVolumes(ctx, id))
	}
	return errors.Join(errs...)
}

// other reports whether something else than a VM has the id, such as a container.
func (s *strays) other(ctx context.Context, id vm.ID) (bool, error) {
	if s.cfg.Others == nil {
		return false, nil
	}
	return s.cfg.Others(ctx, id)
}

// perhapsOther is other for a caller that would remove something: it reports true if that is not known.
func (s *strays) perhapsOther(ctx context.Context, id vm.ID) bool {
	is, err := s.other(ctx, id)
	if err != nil {
		s.log.Warn("volumes kept, it is not known whose they are", "vm", id, "err", err)
	}
	return is || err != nil
}

// sweepTaps removes taps of known VMs that are not in their records. unborn are IDs of which nothing may remain; they
// count as known.
func (s *strays) sweepTaps(ctx context.Context, unborn map[vm.ID]bool) {
	keep := map[string][]string{}
	for _, m := range s.vms.all() {
		for _, nic := range m.record().NICs { // also of stopped VMs: if the tap is removed, its address may be released
			keep[nic.Network] = append(keep[nic.Network], nic.Tap)
		}
	}
	known := func(id vm.ID) bool { return unborn[id] || s.vms.get(id) != nil }
	for _, n := range s.nics.All() {
		name := n.Name()
		taps, found, err := n.Sweep(ctx, keep[name], known)
		if err != nil {
			s.log.Warn("unused taps not removed", "network", name, "err", err)
		}
		if len(taps) > 0 {
			s.log.Info("unused taps removed", "network", name, "taps", taps)
		}
		slices.SortFunc(found, func(a, b network.Stray) int { return cmp.Compare(a.NIC.Tap, b.NIC.Tap) })
		for _, x := range found {
			if is, err := s.other(ctx, x.ID); err == nil && is {
				continue
			}
			s.add(x.ID, x.NIC)
		}
	}
}
