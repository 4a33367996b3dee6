package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/engine/pool"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Clone creates a VM that resumes from a snapshot. It returns when its CPUs run; the VM is ready when it has its own
// identity.
// Errors, before anything changes: NotFound (snapshot, image), InvalidArgument, AlreadyExists (name),
// FailedPrecondition (it cannot resume here, and why), Unavailable (its hypervisor does not work here now), Unsupported (the hypervisor lacks what it
// needs). If it fails later, the whole VM is rolled back.
func (e *Engine) Clone(caller context.Context, spec vm.CloneSpec) (vm.Record, error) {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	began := time.Now()
	r, err := e.clone(ctx, spec)
	if err != nil {
		return vm.Record{}, e.life.ended(caller, fmt.Errorf("clone %s: %w", cmp.Or(spec.Snapshot, spec.FromDir), err))
	}
	e.log.Info("vm created", "vm", r.ID, "op", opClone, "snapshot", r.Snapshot, "dur", time.Since(began))
	return r.Clone(), nil
}

func (n *node) clone(ctx context.Context, spec vm.CloneSpec) (vm.Record, error) {
	h, err := n.holdFor(ctx, spec)
	if err != nil {
		return vm.Record{}, err
	}
	defer h.Release()
	if err := h.Verify(ctx); err != nil {
		return vm.Record{}, damaged(h.Snapshot(), err)
	}
	r, images, err := n.designClone(ctx, h.Snapshot(), spec, vm.NewID())
	if err != nil {
		return vm.Record{}, err
	}
	pooled := n.pooled(r, spec) && h.Feed() == ""
	var c vm.Record
	hit := false
	if pooled {
		c, hit, err = n.claim(ctx, h.Snapshot(), r)
	}
	if !hit {
		c, err = cloneOperation.create(ctx, n, r, func(m *machine) *clone { return &clone{newVM: newVM{machine: m}, held: h, images: images} })
	}
	if pooled && err == nil && n.pool.Used(r, spec, hit) {
		n.life.spawn(func(ctx context.Context) {
			ctx, cancel := n.life.bound(ctx)
			defer cancel()
			n.pool.Fill(ctx)
		})
	}
	return c, damaged(h.Snapshot(), err)
}

// pooled reports whether r, which is about to be cloned as spec says, may come from the pool.
func (n *node) pooled(r vm.Record, spec vm.CloneSpec) bool {
	ports := slices.ContainsFunc(r.Spec.NICs, func(s vm.NICSpec) bool { return len(s.Ports) > 0 }) // each VM has its own
	return n.pool.Enabled() && !r.Spec.Sandbox && !ports && len(r.Spec.DiskVolumes()) == 0 && spec.FromDir == "" && r.Cloned && r.ImageType == vm.ImageOCI && n.agents[r.ImageType] != nil
}

// claim makes r a VM with a process from the pool. ok is false if there is none.
func (n *node) claim(ctx context.Context, x snapshot.Snapshot, r vm.Record) (_ vm.Record, ok bool, _ error) {
	for {
		en := n.pool.Take(r)
		if en == nil {
			return r, false, nil
		}
		if err := en.Resume(ctx); err != nil {
			n.log.Warn("clone in the pool not resumed", "vm", en.ID, "err", err)
			poolMaker{n}.Discard(ctx, en)
			continue
		}
		if r.Spec.Name == defaultName(r.ID) {
			if r.Spec.Hostname == r.Spec.Name {
				r.Spec.Hostname = defaultName(en.ID)
			}
			r.Spec.Name = defaultName(en.ID)
		}
		r.ID = en.ID
		begun := false
		claimed, err := cloneOperation.create(ctx, n, r, func(m *machine) *clone {
			begun = true
			return &clone{newVM: newVM{machine: m}, entry: en, source: x}
		})
		if !begun {
			poolMaker{n}.Discard(ctx, en)
		}
		return claimed, true, err
	}
}

// clone makes a new VM from a snapshot, or from an entry of the pool.
type clone struct {
	newVM
	held   snapshot.Held // nil for an entry
	images []image.Image
	entry  *pool.Entry
	source snapshot.Snapshot // of the entry
}

// cloneOperation writes nothing to the journal before the process runs: after a crash, leftovers are found by the
// VM's ID.
var cloneOperation = operation[*clone]{
	name: opClone, recall: recallClone,
	steps: []step[*clone]{
		{word: stepDisks, run: (*clone).build, undo: (*clone).undo, recover: (*clone).recover},
	},
}

func recallClone(m *machine, _ journal.Intent) (*clone, error) {
	return &clone{newVM: newVM{machine: m}}, nil
}

func (c *clone) build(ctx context.Context) (outcome, error) {
	if c.entry != nil {
		return c.buildClaimed(ctx)
	}
	return c.buildNew(ctx)
}

// buildNew creates the disks and NICs of the VM and resumes or boots it.
func (c *clone) buildNew(ctx context.Context) (outcome, error) {
	r := c.record()
	c.back.Push(func(context.Context) error { return c.dirs.remove(c.id) })
	if err := c.dirs.makeUnborn(c.id); err != nil {
		return outcome{}, err
	}
	if err := c.inheritVolumes(c.held.Snapshot()); err != nil {
		return outcome{}, err
	}
	var err error
	if r.Disks, err = c.disksFrom(ctx, c.id, r.Driver, r.Spec.Storage, c.held, c.images); err != nil {
		return outcome{}, err
	}
	if !r.Cloned { // a guest that boots has no containers that were added to another one
		r.Disks = withoutPlugged(r.Disks)
	}
	if r, err = c.copyVolumes(ctx, c.held.Snapshot(), r, &c.back); err != nil {
		return outcome{}, err
	}
	if r.NICs, err = c.nics.attach(ctx, r, &c.back, true); err != nil {
		return outcome{}, err
	}
	if r.Cloned && hasSeed(c.held.Snapshot().Record.Disks) || !r.Cloned { // a resumed guest has the disks that it had
		if r.Disks, err = c.seed(ctx, r, r.NICs); err != nil {
			return outcome{}, err
		}
	}
	if r.Resume != nil && !r.Cloned { // it boots with its own NICs
		resume := *r.Resume
		resume.MACs = append(resume.MACs, macsOf(r.NICs)...)
		r.Resume = &resume
	}
	f := launchOptions{ready: c.dirs.syncing(c.id, r.Disks), log: c.logs.Main.Begin, change: func(to *vm.Record) {
		to.Disks, to.NICs, to.Resume, to.Spec.Volumes, to.Attached = r.Disks, r.NICs, r.Resume, r.Spec.Volumes, r.Attached
	}}
	if r.Cloned {
		f.log, f.incoming = c.logs.BeginForeign, cloneOf(c.held, r)
		f.incoming.Alone = r.Spec.Sandbox // the server of its folder writes to its memory
	}
	return c.launchProcess(ctx, r, f, &c.back)
}

// buildClaimed gives the VM what the entry of the pool lacks. Its guest already runs, but does not know its identity
// yet.
func (c *clone) buildClaimed(ctx context.Context) (outcome, error) {
	r, en := c.record(), c.entry
	c.back.Push(func(context.Context) error { return c.dirs.remove(c.id) })
	c.back.Push(func(ctx context.Context) error { return c.nics.detach(ctx, en.Rec.NICs, true) })
	c.back.Push(func(ctx context.Context) error { return errors.Join(en.Inst.Kill(ctx), en.Inst.Close()) })
	if err := os.Remove(c.dirs.pooled(c.id)); err != nil { // from here the journal has its record
		return outcome{}, fmt.Errorf("take clone out of the pool: %w", err)
	}
	if err := c.inheritVolumes(c.source); err != nil {
		return outcome{}, err
	}
	nics := slices.Clone(en.Rec.NICs)
	for i, want := range r.Spec.NICs { // the lease gets the VM's name
		nics[i].LinkDown = want.LinkDown
		n, err := c.nics.network(want)
		if err != nil {
			return outcome{}, err
		}
		if nic, err := attachOne(ctx, n, r, r.Spec.Place(i), want); err != nil {
			return outcome{}, err
		} else if nic.MAC != en.Rec.NICs[i].MAC || nic.Tap != en.Rec.NICs[i].Tap {
			return outcome{}, errdefs.New(errdefs.Internal, "interface %d had MAC %s and tap %s in the pool, but now has MAC %s and tap %s", i, en.Rec.NICs[i].MAC, en.Rec.NICs[i].Tap, nic.MAC, nic.Tap)
		}
	}
	f := launchOptions{inst: en.Inst, log: c.logs.BeginForeign, change: func(to *vm.Record) {
		to.Disks, to.NICs = en.Rec.Disks, nics
		resume := *to.Resume
		resume.MACs = macsOf(en.Rec.NICs) // its guest already has them
		to.Resume = &resume
	}}
	return c.launchProcess(ctx, r, f, &c.back)
}

// holdFor prevents the removal of what spec names.
func (n *node) holdFor(ctx context.Context, spec vm.CloneSpec) (snapshot.Held, error) {
	store, err := n.store()
	if err == nil {
		err = spec.Validate()
	}
	switch {
	case err != nil:
		return nil, err
	case spec.FromDir != "":
		return n.holdDir(ctx, store, spec.FromDir)
	}
	h, err := store.HoldArriving(ctx, spec.Snapshot)
	if err == nil && h.Feed() != "" && (spec.Cold || !hypervisor.LoadsLate(n.drivers[h.Snapshot().Hypervisor])) { // then it needs all of it
		h.Release()
		return store.Hold(ctx, spec.Snapshot)
	}
	return h, err
}

// holdDir is Store.HoldDir on behalf of the owner in ctx. Non-operators clone only from folders that the operator
// lists, and not from what belongs to another namespace there.
func (n *node) holdDir(ctx context.Context, store snapshot.Store, dir string) (snapshot.Held, error) {
	who := vm.Behalf(ctx)
	if !who.Operator() && !n.openDir(dir) {
		return nil, errdefs.NotFoundf("namespace %s may not clone from the folder %s; the operator lists the allowed folders in cloneDirs", who.Namespace, dir)
	}
	h, err := store.HoldDir(ctx, dir)
	if err != nil {
		return nil, err
	}
	if owner := h.Snapshot().Owner; !who.Reaches(owner) && !owner.Operator() {
		h.Release()
		return nil, errdefs.NotFoundf("there is no snapshot of namespace %s in the folder %s", who.Namespace, dir)
	}
	return h, nil
}

// openDir reports whether dir, with links resolved, is below one of the folders that are open to non-operators.
func (n *node) openDir(dir string) bool {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(n.cfg.CloneDirs, func(parent string) bool {
		parent, err := filepath.EvalSymlinks(parent)
		if err != nil {
			return false
		}
		below, err := filepath.Rel(parent, real)
		return err == nil && filepath.IsLocal(below)
	})
}

// inheritVolumes gives the VM the content of its source VM's file volumes. No snapshot has that content: if the source is
// not here, the volumes are empty until somebody updates them. A resumed guest keeps what it had mounted.
//
// The engine believes what a snapshot says of its source only if the source knows the snapshot: a foreign snapshot
// may say anything, and the content may be secret.
func (c *clone) inheritVolumes(x snapshot.Snapshot) error {
	source := c.vms.get(x.Source.VMID)
	known := source != nil && slices.Contains(source.record().SnapshotIDs, x.ID)
	var volumes []vm.Volume
	for _, v := range c.record().Spec.Volumes {
		if v.Kind != vm.VolumeFiles {
			continue
		}
		v.Files = nil
		if known {
			var err error
			if v.Files, err = c.dirs.readVolume(source.id, v.Name); err != nil && c.vms.get(source.id) == source {
				return err
			}
		}
		if v.Files == nil {
			c.log.Info("volume of clone is empty, its source vm is not on this node", "vm", c.id, "volume", v.Name)
		}
		volumes = append(volumes, v)
	}
	return c.dirs.writeVolumes(c.id, volumes)
}
