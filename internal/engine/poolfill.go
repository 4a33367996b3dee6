package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// poolFile is in the state folder of an entry: its record, which no journal has. From it, an engine that finds the
// folder after a crash knows which addresses to release.
const poolFile = "pool.json"

// Pool returns the state of the pool of clones.
func (e *Engine) Pool() PoolStats { return e.pool.stats() }

// pooled reports whether r, which is about to be cloned as spec says, may come from the pool.
func (e *Engine) pooled(r vm.Record, spec vm.CloneSpec) bool {
	return e.pool.size > 0 && spec.FromDir == "" && r.Cloned && r.ImageType == vm.ImageOCI && e.agents[r.ImageType] != nil
}

// claim makes r a VM with a process from the pool. ok is false if there is none.
func (e *Engine) claim(ctx context.Context, x snapshot.Snapshot, r vm.Record) (_ vm.Record, ok bool, _ error) {
	for {
		en := e.pool.take(shapeOf(r))
		if en == nil {
			return r, false, nil
		}
		if err := en.resume(ctx); err != nil {
			e.log.Warn("clone in the pool does not go on", "vm", en.id, "err", err)
			e.evict(ctx, en)
			continue
		}
		if r.Spec.Name == defaultName(r.ID) {
			if r.Spec.Hostname == r.Spec.Name {
				r.Spec.Hostname = defaultName(en.id)
			}
			r.Spec.Name = defaultName(en.id)
		}
		r.ID = en.id
		built := false
		claimed, err := e.buildNew(ctx, r, opClone, func(m *machine, back *undo.Stack) (vm.Record, error) {
			built = true
			return e.buildClaimed(ctx, m, x, en, back)
		})
		if !built {
			e.evict(ctx, en)
		}
		return claimed, true, err
	}
}

// resume resumes the guest of an entry.
func (en *entry) resume(ctx context.Context) error {
	pauser, ok := hypervisor.As[hypervisor.Pauser](en.inst)
	if !ok {
		return errdefs.Unsupportedf("its driver cannot have it go on")
	}
	return pauser.Resume(ctx)
}

// buildClaimed gives m, which is made from the entry en, what else a VM has, and settles. Its guest already runs, but
// does not know its identity yet.
func (e *Engine) buildClaimed(ctx context.Context, m *machine, x snapshot.Snapshot, en *entry, back *undo.Stack) (vm.Record, error) {
	r := m.record()
	back.Push(func(context.Context) error { return e.removeDirs(m.id) })
	back.Push(func(ctx context.Context) error { return e.detach(ctx, en.rec.NICs, true) })
	back.Push(func(ctx context.Context) error { return errors.Join(en.inst.Kill(ctx), en.inst.Close()) })
	if err := os.Remove(filepath.Join(e.stateDir(m.id), poolFile)); err != nil { // from here the journal has its record
		return r, fmt.Errorf("take clone out of the pool: %w", err)
	}
	if err := e.inheritVolumes(m, x); err != nil {
		return r, err
	}
	for i, want := range r.Spec.NICs { // the lease gets the VM's name
		n, err := e.network(want)
		if err != nil {
			return r, err
		}
		if nic, err := n.Attach(ctx, r.ID, r.Owner.Qualify(r.Spec.Name), i, want); err != nil {
			return r, err
		} else if nic.MAC != en.rec.NICs[i].MAC || nic.Tap != en.rec.NICs[i].Tap {
			return r, errdefs.New(errdefs.Internal, "interface %d was %s on %s in the pool and is %s on %s", i, en.rec.NICs[i].MAC, en.rec.NICs[i].Tap, nic.MAC, nic.Tap)
		}
	}
	f := launchOptions{inst: en.inst, log: e.foreignLogs(m), done: e.journal.Settle, change: func(to *vm.Record) {
		to.Disks, to.NICs = en.rec.Disks, en.rec.NICs
		resume := *to.Resume
		resume.MACs = nil
		for _, n := range en.rec.NICs { // its guest already has them
			resume.MACs = append(resume.MACs, n.MAC)
		}
		to.Resume = &resume
	}}
	return e.launchProcess(ctx, m, r, f, back)
}

// refill starts to fill the pool after a VM was cloned as spec says.
func (e *Engine) refill(r vm.Record, spec vm.CloneSpec, hit bool) {
	if e.pool.used(r, spec, hit) {
		e.life.spawn(e.fillPool)
	}
}

// fillPool makes the missing entries of the pool, one after the other.
func (e *Engine) fillPool(ctx context.Context) {
	ctx, cancel := e.life.bound(ctx)
	defer cancel()
	pause(e.cfg.PoolPause, ctx.Done(), nil)
	for ctx.Err() == nil {
		t, surplus := e.pool.next()
		e.evict(ctx, surplus...)
		e.pool.left()
		if t != nil {
			e.fillOne(ctx, t)
		} else if len(surplus) == 0 {
			return
		}
	}
}

func (e *Engine) fillOne(ctx context.Context, t *template) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f := e.pool.begin(t, cancel)
	if f == nil {
		return
	}
	defer close(f.done)
	began := time.Now()
	en, err := e.prepare(ctx, t.shape.snapshot, f.spec)
	if err != nil {
		if ctx.Err() == nil {
			e.log.Warn("no clone made for the pool", "snapshot", t.shape.snapshot, "err", err)
		}
		en = nil
	} else {
		e.log.Debug("clone made for the pool", "vm", en.id, "snapshot", t.shape.snapshot, "dur", time.Since(began))
	}
	e.evict(ctx, e.pool.end(f, en)...)
	e.pool.left()
}

// prepare makes an entry. Everything that it has is named by its ID, in folders that are created first, so that what
// a crash leaves can be found.
func (e *Engine) prepare(ctx context.Context, snapshot string, spec vm.CloneSpec) (_ *entry, err error) {
	h, err := e.snapshots.Hold(ctx, snapshot)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	id := vm.NewID()
	spec.Name, spec.Hostname, spec.Labels = "", "", nil
	r, images, err := e.designClone(ctx, h.Snapshot(), spec, id)
	if err != nil {
		return nil, err
	}
	r.Spec.Name = "cocoon-pooled-" + string(id)
	m := e.newMachine(r)
	var back undo.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, back.Run(ctx))
		}
	}()
	back.Push(func(context.Context) error { return e.removeDirs(id) })
	if err := e.makeUnborn(id); err != nil {
		return nil, err
	}
	if err := e.notePooled(r); err != nil {
		return nil, err
	}
	if r.Disks, err = e.disksFrom(ctx, m, h, images); err != nil {
		return nil, err
	}
	if r.NICs, err = e.attach(ctx, r, &back, true); err != nil {
		return nil, err
	}
	if err := e.syncing(id, r.Disks)(); err != nil { // now, and not while a caller waits for it
		return nil, err
	}
	d, err := e.driver(r.Driver)
	if err != nil {
		return nil, err
	}
	plan := planOf(r, e.runDir(id))
	plan.Incoming = cloneOf(h, r)
	inst, err := d.Launch(ctx, plan)
	if err != nil {
		return nil, err
	}
	back.Push(func(ctx context.Context) error { return errors.Join(inst.Kill(ctx), inst.Close()) })
	if err := e.rehearse(ctx, inst, r); err != nil {
		return nil, err
	}
	return &entry{id: id, inst: inst, rec: r}, nil
}

// rehearse makes the guest of r do what it will do when it is claimed, and then pauses it.
func (e *Engine) rehearse(ctx context.Context, inst hypervisor.Instance, r vm.Record) (err error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.AgentTimeout)
	defer cancel()
	pauser, ok := hypervisor.As[hypervisor.Pauser](inst)
	if !ok {
		return errdefs.Unsupportedf("driver %s cannot have a guest stand still", r.Driver)
	}
	dialer, ok := hypervisor.As[hypervisor.GuestDialer](inst)
	if !ok {
		return errdefs.Unsupportedf("driver %s cannot reach the agent in a guest", r.Driver)
	}
	for range rehearsals {
		if err := e.rehearseOnce(ctx, dialer, r); err != nil {
			return err
		}
	}
	return pauser.Pause(ctx)
}

// rehearsals is how often a guest rehearses: the second time it accepts a session after another one, as when it is
// claimed.
const rehearsals = 2

func (e *Engine) rehearseOnce(ctx context.Context, dialer hypervisor.GuestDialer, r vm.Record) (err error) {
	agent, err := e.agents[r.ImageType].Connect(ctx, dialer.DialGuest)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.Close()) }()
	resumer, ok := agent.(guest.Resumer)
	if !ok {
		return errdefs.Unsupportedf("the agent of the guest cannot tell it who it is")
	}
	if _, err := resumer.Resumed(ctx, resumedOf(r)); err != nil {
		return err
	}
	_, err = agent.Info(ctx) // later calls use gRPC, too
	return err
}

// evict ends entries and removes what they have. The next start of the engine removes what evict cannot.
func (e *Engine) evict(ctx context.Context, entries ...*entry) {
	for _, en := range entries {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
		err := errors.Join(en.inst.Kill(ctx), en.inst.Close())
		if err == nil {
			err = e.detach(ctx, en.rec.NICs, true)
		}
		if err == nil {
			err = e.removeDirs(en.id)
		}
		if err != nil {
			e.log.Warn("clone in the pool not removed", "vm", en.id, "err", err)
		}
		cancel()
	}
}

// emptyPool removes the entries of a snapshot, "" for all, so that nothing holds it.
func (e *Engine) emptyPool(ctx context.Context, id string) {
	entries, made, leaving := e.pool.drop(id)
	if made != nil {
		<-made.done
	}
	if leaving != nil {
		<-leaving
	}
	e.evict(ctx, entries...)
}

// removeStored removes the pool's entries of a snapshot, then the snapshot.
func (e *Engine) removeStored(ctx context.Context, id string) error {
	e.emptyPool(ctx, id)
	return e.snapshots.Remove(ctx, id)
}

func (e *Engine) notePooled(r vm.Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("note clone in the pool: %w", err)
	}
	return atomicfile.WriteFile(filepath.Join(e.stateDir(r.ID), poolFile), text, 0o600)
}

// releasePooled releases the NICs of an entry that an earlier engine left. A folder without an entry is no error.
// Preconditions: its process has ended.
func (e *Engine) releasePooled(ctx context.Context, id vm.ID) error {
	text, err := os.ReadFile(filepath.Join(e.stateDir(id), poolFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var r vm.Record
	if err := json.Unmarshal(text, &r); err != nil || r.ID != id {
		return errdefs.DataLossf("the record of clone %s in the pool is damaged", id)
	}
	nics, err := e.nicsOf(ctx, r, true)
	if err != nil {
		return err
	}
	return e.detach(ctx, nics, true)
}
