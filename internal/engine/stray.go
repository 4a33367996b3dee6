package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// unbornFile exists in the state folder of a VM from before any other file until just before the creation is settled.
// No caller was ever told of a VM whose folder has it. The file has no content.
const unbornFile = "unborn"

// gonePrefix begins the name of a VM's state folder once its removal is decided.
const gonePrefix = ".gone-"

// strays are the remains that recovery found of VMs that the journal does not know.
type strays struct {
	mu   sync.Mutex
	byID map[vm.ID][]vm.NIC
}

func (s *strays) add(id vm.ID, nics ...vm.NIC) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID == nil {
		s.byID = map[vm.ID][]vm.NIC{}
	}
	s.byID[id] = append(s.byID[id], nics...)
}

func (s *strays) get(id vm.ID) ([]vm.NIC, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	nics, ok := s.byID[id]
	return nics, ok
}

func (s *strays) drop(id vm.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, id)
}

func (s *strays) ids() []vm.ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.byID))
}

// StrayCount returns how many VMs are kept aside.
func (e *Engine) StrayCount() int { return len(e.strays.ids()) }

// Strays returns what this host has of VMs that the journal does not know, sorted by ID. Non-operators get none.
func (e *Engine) Strays(ctx context.Context) ([]vm.Stray, error) {
	if err := e.life.ready(ctx); err != nil {
		return nil, err
	}
	ids := e.strays.ids()
	if len(ids) == 0 || !vm.Behalf(ctx).Operator() {
		return nil, nil
	}
	pids := map[vm.ID][]int{}
	for _, d := range e.drivers {
		seeker, ok := hypervisor.As[hypervisor.Seeker](d)
		if !ok {
			continue
		}
		found, err := seeker.Seek(ctx, ids)
		if err != nil {
			return nil, fmt.Errorf("look for processes of driver %s: %w", d.Name(), err)
		}
		maps.Copy(pids, found)
	}
	out := make([]vm.Stray, 0, len(ids))
	for _, id := range ids {
		out = append(out, e.stray(id, pids[id]))
	}
	return out, nil
}

func (e *Engine) stray(id vm.ID, pids []int) vm.Stray {
	s := vm.Stray{ID: id, PIDs: pids, Reason: "the journal does not know it"}
	if row, err := e.kept(id); err == nil {
		s.Name, s.State = row.Record.Spec.Name, row.Record.State
	} else {
		s.Reason += ", and " + err.Error()
	}
	for _, dir := range []string{e.stateDir(id), e.runDir(id)} {
		if _, err := os.Stat(dir); err == nil {
			s.Dirs = append(s.Dirs, dir)
		}
	}
	nics, _ := e.strays.get(id)
	for _, n := range nics {
		s.Taps = append(s.Taps, n.Tap)
	}
	return s
}

// kept returns the row of a VM as its folder has it.
func (e *Engine) kept(id vm.ID) (journal.Row, error) {
	if e.records == nil {
		return journal.Row{}, errdefs.NotFoundf("vm %s has no record in its folder", id)
	}
	return e.records.Kept(id)
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
	id, err := e.findStray(ctx, ref)
	var r vm.Record
	if err == nil {
		r, err = e.adoptStray(ctx, id, name)
	}
	if err != nil {
		return vm.Record{}, e.life.ended(caller, fmt.Errorf("adopt unknown vm %s: %w", ref, err))
	}
	e.log.Warn("unknown vm adopted as asked for", "vm", id)
	if err := e.durable(ctx); err != nil {
		return r, err
	}
	return r.Clone(), nil
}

func (e *Engine) adoptStray(ctx context.Context, id vm.ID, name string) (vm.Record, error) {
	row, err := e.kept(id)
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
	switch {
	case in == nil:
		in = &journal.Intent{ID: id, Op: opAdopt, Step: stepAdopt, Began: now()}
	case in.Op == opCreate, in.Op == opLaunch, in.Op == opClone, in.Op == opRemove:
		return r, errdefs.Preconditionf("its %s was not finished; remove it with `cocoon recover rm %s`", in.Op, id)
	}
	release, err := e.queue.acquire(ctx, id)
	if err != nil {
		return r, err
	}
	if _, ok := e.strays.get(id); !ok {
		release()
		return r, errdefs.NotFoundf("it is not kept aside any more")
	}
	m, err := e.enlist(ctx, r, *in)
	if err != nil {
		release()
		return r, err
	}
	e.strays.drop(id)
	e.recoverHeld(context.WithoutCancel(ctx), m, in, release)
	return m.record(), nil
}

// enlist records r with an unsettled operation.
func (e *Engine) enlist(ctx context.Context, r vm.Record, in journal.Intent) (*machine, error) {
	m := e.newMachine(r)
	if err := e.index.reserve(m.key(), r.ID); err != nil {
		return nil, err
	}
	m.remains.Store(true) // not known, so assume it
	err := e.insert(ctx, m, func(ctx context.Context, r vm.Record) (vm.Record, error) { return e.journal.Begin(ctx, in, r) })
	if err != nil {
		e.index.unreserve(m.key())
		return nil, err
	}
	return m, nil
}

// RemoveStray ends the process of a VM that the journal does not know, and removes its NICs, addresses and folders.
// Errors: NotFound if ref is no stray.
func (e *Engine) RemoveStray(caller context.Context, ref string) error {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return err
	}
	defer leave()
	id, err := e.findStray(ctx, ref)
	if err == nil {
		err = e.removeStray(ctx, id)
	}
	if err != nil {
		return e.life.ended(caller, fmt.Errorf("remove unknown vm %s: %w", ref, err))
	}
	e.log.Warn("unknown vm removed as asked for", "vm", id)
	return nil
}

// unknown is how requests refer to strays.
var unknown = vm.Kind{Noun: "unknown VM", List: "cocoon recover"}

// findStray resolves an ID or a unique prefix of one. Strays belong to the operator, whoever owned the VM.
func (e *Engine) findStray(ctx context.Context, ref string) (vm.ID, error) {
	return unknown.Match(vm.Behalf(ctx), ref, func(yield func(vm.Named) bool) {
		for _, id := range e.strays.ids() {
			if !yield(vm.Named{ID: id}) {
				return
			}
		}
	})
}

func (e *Engine) removeStray(caller context.Context, id vm.ID) error {
	release, err := e.queue.acquire(caller, id)
	if err != nil {
		return err
	}
	defer release()
	nics, ok := e.strays.get(id)
	if !ok || e.index.get(id) != nil {
		return errdefs.NotFoundf("it is not kept aside any more")
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(caller), undo.Limit)
	defer cancel()
	if err := e.reapUnknown(ctx, id); err != nil {
		return err
	}
	if err := e.detach(ctx, nics, true); err != nil {
		return err
	}
	if err := e.removeDirs(id); err != nil {
		return err
	}
	e.strays.drop(id)
	return nil
}

// reapUnknown ends every process that any driver may have launched for id.
func (e *Engine) reapUnknown(ctx context.Context, id vm.ID) error {
	for _, d := range e.drivers {
		if err := d.Reap(ctx, id, e.runDir(id)); err != nil {
			return fmt.Errorf("end its process of driver %s: %w", d.Name(), err)
		}
	}
	return nil
}

// sweep removes what is proven to belong to no VM, and keeps aside what is merely unknown. It logs what it cannot
// remove and tries again next time.
func (e *Engine) sweep(ctx context.Context) {
	unborn := map[vm.ID]bool{}
	for _, id := range e.unknownFolders() {
		proven, err := e.unborn(id)
		if err != nil {
			e.log.Warn("folder of unknown vm not understood", "vm", id, "err", err)
		}
		if !proven {
			e.strays.add(id)
			continue
		}
		unborn[id] = true
		e.sweepUnborn(ctx, id)
	}
	e.sweepTaps(ctx, unborn)
	var records []vm.Record
	for _, id := range e.strays.ids() {
		if row, err := e.kept(id); err == nil {
			records = append(records, row.Record)
		}
		s := e.stray(id, nil)
		e.log.Warn("unknown vm kept aside, its guest goes on if it runs; see cocoon recover", "vm", id, "dirs", s.Dirs, "taps", s.Taps)
	}
	e.remember(ctx, records)
}

// unknownFolders returns the IDs of folders that belong to no VM. It also finishes interrupted removals.
func (e *Engine) unknownFolders() []vm.ID {
	found := map[vm.ID]bool{}
	for _, parent := range []string{e.cfg.RunDir, e.cfg.StateDir} {
		entries, err := os.ReadDir(filepath.Join(parent, "vms"))
		if err != nil {
			e.log.Warn("folders not swept", "err", err)
			continue
		}
		for _, entry := range entries {
			name := entry.Name()
			if id := vm.ID(name); id.Valid() && e.index.get(id) == nil {
				found[id] = true
			}
			if strings.HasPrefix(name, gonePrefix) {
				if err := os.RemoveAll(filepath.Join(parent, "vms", name)); err != nil {
					e.log.Warn("removed folder not emptied", "err", err)
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// unborn reports whether the folders of id, which the journal does not know, prove that no VM is lost with them: it
// is a clone of the pool, its creation never ended, or they are empty. The VM's own record counts for more than a
// marker.
func (e *Engine) unborn(id vm.ID) (bool, error) {
	if row, err := e.kept(id); err == nil && (row.Intent == nil || row.Record.State != vm.StateCreating) {
		return false, nil // a power cut brought the marker back
	}
	for _, name := range []string{poolFile, unbornFile} {
		_, err := os.Lstat(filepath.Join(e.stateDir(id), name))
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
	}
	for _, dir := range []string{e.stateDir(id), e.runDir(id)} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		if len(entries) > 0 {
			return false, nil
		}
	}
	return true, nil
}

// sweepUnborn removes everything of a VM that no caller was told of.
func (e *Engine) sweepUnborn(ctx context.Context, id vm.ID) {
	ctx, cancel := context.WithTimeout(ctx, undo.Limit)
	defer cancel()
	if err := e.reapUnknown(ctx, id); err != nil {
		e.log.Warn("process of unfinished vm not reaped", "vm", id, "err", err)
		return
	}
	if err := e.releasePooled(ctx, id); err != nil {
		e.log.Warn("addresses of a clone in the pool not given back", "vm", id, "err", err)
	}
	if err := e.removeDirs(id); err != nil {
		e.log.Warn("folders of unfinished vm not removed", "vm", id, "err", err)
		return
	}
	e.log.Info("folders of unfinished vm removed", "vm", id)
}

// sweepTaps removes taps of known VMs that are not in their records. unborn are IDs of which nothing may remain; they
// count as known.
func (e *Engine) sweepTaps(ctx context.Context, unborn map[vm.ID]bool) {
	keep := map[string][]string{}
	for _, m := range e.index.all() {
		for _, nic := range m.record().NICs { // also of stopped VMs: if the tap is removed, its address may be released
			keep[nic.Network] = append(keep[nic.Network], nic.Tap)
		}
	}
	known := func(id vm.ID) bool { return unborn[id] || e.index.get(id) != nil }
	for _, n := range e.networks.All() {
		name := n.Name()
		taps, found, err := n.Sweep(ctx, keep[name], known)
		if err != nil {
			e.log.Warn("taps not swept", "network", name, "err", err)
		}
		if len(taps) > 0 {
			e.log.Info("taps of no interface removed", "network", name, "taps", taps)
		}
		slices.SortFunc(found, func(a, b network.Stray) int { return cmp.Compare(a.NIC.Tap, b.NIC.Tap) })
		for _, s := range found {
			e.strays.add(s.ID, s.NIC)
		}
	}
}

// unplugDown removes the NICs of VMs that do not run and that no operation is about to start.
func (e *Engine) unplugDown(ctx context.Context, busy func(vm.ID) bool) {
	for _, m := range e.index.all() {
		r := m.record()
		down := r.State == vm.StateStopped || r.State == vm.StateCreated || r.State == vm.StateHibernated
		if !down || busy(m.id) {
			continue
		}
		if err := e.detach(ctx, r.NICs, false); err != nil {
			e.log.Warn("interfaces of vm not removed", "vm", m.id, "err", err)
		}
	}
}

// makeUnborn creates the folders of a VM that is being created, with a marker that identifies what a crash leaves.
func (e *Engine) makeUnborn(id vm.ID) error {
	if err := e.makeDirs(id); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(e.stateDir(id), unbornFile), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	return f.Close()
}

// born removes the marker of makeUnborn: from here the journal alone decides what becomes of the VM.
func (e *Engine) born(id vm.ID) error {
	if err := os.Remove(filepath.Join(e.stateDir(id), unbornFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("finish the folder: %w", err)
	}
	return nil
}

// removeDirs removes the folders of a VM. One rename decides the removal, so that no half-removed folder is ever
// taken for a VM.
func (e *Engine) removeDirs(id vm.ID) error {
	gone := filepath.Join(e.cfg.StateDir, "vms", gonePrefix+string(id))
	err := errors.Join(os.RemoveAll(gone), os.RemoveAll(e.runDir(id)))
	if err != nil {
		return err
	}
	if err := os.Rename(e.stateDir(id), gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(gone)
}
