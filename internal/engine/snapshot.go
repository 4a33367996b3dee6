package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// freezeTimeout bounds how long a guest may take to freeze or thaw its file systems.
const freezeTimeout = 30 * time.Second

// snapshotArgs are the journal arguments of operations with a snapshot.
type snapshotArgs struct {
	Snapshot string   `json:"snapshot"`        // id; for save and hibernate: of the snapshot to be made
	Files    []string `json:"files,omitempty"` // for restore: disks in the VM's folder that are not needed after it
	Slept    string   `json:"slept,omitempty"` // for restore: id of the snapshot that the VM was hibernated in
	// Was, for restore, is the record that the VM returns to if its guest does not answer.
	Was *vm.Record `json:"was,omitempty"`
}

func (a snapshotArgs) json() []byte {
	b, _ := json.Marshal(a) // plain values always encode
	return b
}

// store returns the snapshot store, or Unsupported.
func (e *Engine) store() (snapshot.Store, error) {
	if e.snapshots == nil {
		return nil, errdefs.Unsupportedf("this node keeps no snapshots")
	}
	return e.snapshots, nil
}

// SaveSnapshot saves the VM of ref: a running VM with its memory, while it keeps running; a stopped VM with its
// disks.
// Errors: InvalidArgument and AlreadyExists (name), FailedPrecondition (state, a guest that cannot be frozen) and
// Unsupported before anything changes. Whatever fails, the VM continues as before and no snapshot remains.
func (e *Engine) SaveSnapshot(caller context.Context, ref string, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	var saved snapshot.Snapshot
	_, err := e.operate(caller, opSave, ref, func(ctx context.Context, m *machine) (vm.Record, error) {
		var err error
		saved, err = e.save(ctx, m, spec)
		return m.record(), err
	})
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	return saved, nil
}

func (e *Engine) save(ctx context.Context, m *machine, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	store, err := e.store()
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	c, err := e.capture(m, spec.Quiesce)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	draft, err := store.Create(ctx, spec.Name)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer e.discard(m, draft)
	if err := e.open(ctx, m, opSave, stepSave, snapshotArgs{Snapshot: draft.ID()}.json()); err != nil {
		return snapshot.Snapshot{}, err
	}
	x := snapshot.Snapshot{Name: spec.Name, Description: spec.Description, Labels: spec.Labels}
	x, err = e.shoot(ctx, m, c, draft, x)
	if err != nil {
		e.settleFailed(ctx, m, opSave, func(*vm.Record) {})
		e.tidy(m)
		return snapshot.Snapshot{}, err
	}
	if _, err := e.commit(ctx, m, e.journal.Settle, func(r *vm.Record) { listed(r, x.ID) }); err != nil {
		// The snapshot exists and is complete. Only the list in the record lacks it; the next recovery adds it.
		e.log.Error("snapshot saved, and the journal does not take it", "vm", m.id, "snapshot", x.ID, "err", err)
		return x, nil
	}
	e.shorten(ctx, m)
	return x, nil
}

// listed adds a snapshot to the list of those that were taken of r.
func listed(r *vm.Record, id string) {
	if !slices.Contains(r.SnapshotIDs, id) {
		r.SnapshotIDs = append(slices.Clip(r.SnapshotIDs), id)
	}
}

// settleFailed settles an operation that failed and left the VM as change says. If the journal fails, the intent
// stays: the next operation or recovery settles it.
func (e *Engine) settleFailed(ctx context.Context, m *machine, op string, change func(*vm.Record)) {
	if _, err := e.commit(ctx, m, e.journal.Settle, change); err != nil {
		e.log.Error("failed operation not settled", "vm", m.id, "op", op, "err", err)
	}
}

func (e *Engine) discard(m *machine, draft snapshot.Draft) {
	if err := draft.Discard(); err != nil {
		e.log.Warn("unfinished snapshot not removed", "vm", m.id, "err", err)
	}
}

// capturer is what is needed to take a snapshot of one VM.
type capturer struct {
	run     *run                   // nil: only its disks are saved
	save    hypervisor.Snapshotter // of run
	freezer guest.Freezer          // nil: its file systems are not frozen
	hold    bool                   // the guest stays paused
	fresh   bool                   // the guest may not have been set up since it booted
}

// capture determines how m can be saved, or returns why it cannot.
func (e *Engine) capture(m *machine, quiesce bool) (capturer, error) {
	r := m.record()
	if err := roomOnTop(r); err != nil {
		return capturer{}, err
	}
	switch r.State {
	case vm.StateCreated, vm.StateStopped:
		return capturer{}, nil
	case vm.StateRunning:
	case vm.StateHibernated:
		return capturer{}, errdefs.Preconditionf("it is hibernated in snapshot %s; export that, or wake it first", r.Snapshot)
	default:
		return capturer{}, broken(r)
	}
	if r.Reason == vm.ReasonDiskFull {
		return capturer{}, errdefs.Preconditionf("it cannot be saved now: %s", r.Message)
	}
	c := capturer{run: m.run.Load(), fresh: fresh(r)}
	if c.run == nil || c.run.over() {
		return c, errdefs.Preconditionf("its process has just ended; try again")
	}
	var ok bool
	if c.save, ok = hypervisor.As[hypervisor.Snapshotter](c.run.inst); !ok {
		return c, errdefs.Unsupportedf("driver %s cannot save a running VM; stop it first", r.Driver)
	}
	if !quiesce {
		return c, nil
	}
	agent, ready, _ := c.run.link.peek()
	if !ready {
		return c, errdefs.Preconditionf("its guest's agent does not answer, which would freeze the file systems; wait for it, or save without quiescing")
	}
	if c.freezer, ok = agent.(guest.Freezer); !ok {
		return c, errdefs.Unsupportedf("its guest's agent cannot freeze file systems; save without quiescing")
	}
	return c, nil
}

// fresh reports whether the running guest of r has, as far as is known, not been set up since it booted. Setting up a
// guest again changes nothing.
func fresh(r vm.Record) bool {
	switch {
	case r.ImageType != vm.ImageOCI:
		return false
	case r.Resume != nil && (r.Cloned || !r.Resume.Clone):
		return r.Resume.Fresh
	}
	return !r.AgentReady
}

// shoot saves m into draft under the open intent and completes x. On error the guest runs as before, unless it was to
// be held; then it may be paused.
func (e *Engine) shoot(ctx context.Context, m *machine, c capturer, draft snapshot.Draft, x snapshot.Snapshot) (snapshot.Snapshot, error) {
	if c.run != nil && m.record().Resume != nil { // memory and record must have the same identity of the guest
		leave, err := m.self.take(ctx)
		if err != nil {
			return x, err
		}
		defer leave()
	}
	frozen := m.record().Disks
	overlays, err := e.overlay(ctx, m)
	if err != nil {
		return x, err
	}
	if c.run != nil {
		base, err := draft.Base(ctx, relatedSnapshots(m.record())...)
		if err != nil {
			return x, err
		}
		saved, quiesced, err := e.saveMemory(ctx, m, c, draft.Dir(), base != "", overlays)
		if err != nil {
			return x, err
		}
		if saved.Delta {
			x.MemoryBase = base
		}
		x.Live, x.Machine, x.Pause, x.Method, x.Quiesced, x.Fresh = true, saved.Machine, saved.Pause, saved.Method, quiesced, c.fresh
	}
	if x.Disks, err = linkDisks(ctx, draft, m.record(), frozen); err != nil {
		return x, err
	}
	describe(&x, m.record())
	x.ImageManifest = e.manifestOf(ctx, x.ImageDigest)
	for i, c := range x.Record.Containers {
		x.Record.Containers[i].ImageManifest = e.manifestOf(ctx, c.ImageDigest)
	}
	return draft.Commit(ctx, x)
}

// manifestOf returns the digest by which the origin of an image knows it; "" if unknown: then a clone elsewhere has
// to find the image by its name.
func (e *Engine) manifestOf(ctx context.Context, digest string) string {
	img, err := e.images.Get(vm.OnBehalf(ctx, vm.Owner{}), digest) // the VM uses it already
	if err != nil {
		return ""
	}
	return img.Digest
}

// relatedSnapshots returns the snapshots whose memory is most like that of r: those taken of it, the newest first,
// then the one that it was resumed from.
func relatedSnapshots(r vm.Record) []string {
	ids := slices.Clone(r.SnapshotIDs)
	slices.Reverse(ids)
	if r.Snapshot != "" {
		ids = append(ids, r.Snapshot)
	}
	return ids
}

// overlay puts an empty overlay on each writable disk of m, records them and returns them for the driver.
//
// They are recorded before the guest writes to them. That is safe after any crash: until the guest writes, they are
// empty and the disk below them has the same content; once it writes, the record leads to what it wrote.
func (e *Engine) overlay(ctx context.Context, m *machine) ([]hypervisor.DiskOverlay, error) {
	disks, overlays, err := e.overlaysOn(ctx, m)
	if err != nil {
		return nil, err
	}
	if err := e.syncing(m.id, disks)(); err != nil {
		return nil, err
	}
	if _, err := e.commit(ctx, m, e.step(stepSave), func(r *vm.Record) { r.Disks = disks }); err != nil {
		return nil, err
	}
	return overlays, e.durable(ctx)
}

// overlaysOn creates an empty overlay for each writable disk of m, with a name that was never used before.
func (e *Engine) overlaysOn(ctx context.Context, m *machine) (disks []vm.Disk, overlays []hypervisor.DiskOverlay, err error) {
	disks = slices.Clone(m.record().Disks)
	for i, d := range disks {
		if d.ReadOnly {
			continue
		}
		over, err := e.snapshots.Overlay(ctx, d, e.stateDir(m.id), topPrefix+string(vm.NewID())+".qcow2")
		if err != nil {
			return nil, nil, fmt.Errorf("make an overlay on disk %s: %w", d.Serial, err)
		}
		disks[i] = over
		overlays = append(overlays, hypervisor.DiskOverlay{Serial: d.Serial, Disk: over})
	}
	return disks, overlays, nil
}

// saveMemory makes the driver save the guest and switch its disks, with its file systems frozen if c can do that.
func (e *Engine) saveMemory(ctx context.Context, m *machine, c capturer, dir string, based bool, overlays []hypervisor.DiskOverlay) (s hypervisor.Saved, quiesced bool, err error) {
	plan := hypervisor.SavePlan{
		State: dir + "/" + snapshot.FileState, Memory: dir + "/" + snapshot.FileMemory, Overlays: overlays, Hold: c.hold,
	}
	if based {
		plan.Base = dir + "/" + snapshot.FileBase
	}
	e.settleGuest(ctx, m, c)
	if c.freezer != nil {
		limited, cancel := context.WithTimeout(ctx, freezeTimeout)
		defer cancel()
		thaw := sync.OnceFunc(func() { e.thaw(ctx, m, c.freezer) })
		defer thaw()
		plan.Taken = thaw
		if _, err := c.freezer.Freeze(limited); err != nil {
			return s, false, errdefs.Preconditionf("freeze the guest's file systems: %w; save without quiescing", err)
		}
		quiesced = true
	}
	c.run.still.Store(true)
	s, err = c.save.Save(ctx, plan)
	c.run.still.Store(c.hold)
	if err != nil {
		return s, false, fmt.Errorf("save its memory: %w", err)
	}
	return s, quiesced, nil
}

// settleTimeout bounds how long a guest may take to settle: a guest that always writes to its disks never does.
const settleTimeout = 2 * time.Second

// settleGuest lets a guest settle that others will resume from. A guest whose agent cannot do that is saved as it is.
func (e *Engine) settleGuest(ctx context.Context, m *machine, c capturer) {
	agent, ready, _ := c.run.link.peek()
	settler, ok := agent.(guest.Settler)
	if c.hold || !ready || !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	began := time.Now()
	err := settler.Settle(ctx)
	e.log.Debug("guest settled", "vm", m.id, "dur", time.Since(began), "err", err)
}

// thaw runs even if the caller has gone away: otherwise the guest thaws itself, but only after a while.
func (e *Engine) thaw(ctx context.Context, m *machine, f guest.Freezer) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), freezeTimeout)
	defer cancel()
	if _, err := f.Thaw(ctx); err != nil {
		e.log.Warn("file systems of guest not thawed; it does so itself within a minute", "vm", m.id, "err", err)
	}
}

// describe fills in what a snapshot of r says about it.
func describe(x *snapshot.Snapshot, r vm.Record) {
	x.Image, x.ImageDigest, x.ImageType = r.Spec.Image, r.ImageDigest, r.ImageType
	if r.ImageType != vm.ImageOCI {
		x.ImageBlobIDs = []string{r.ImageDigest}
	}
	x.Hypervisor, x.Boot = r.Driver, r.Boot
	x.CPU, x.Memory, x.Storage, x.NICs = r.Spec.CPUs, r.Spec.Memory, r.Spec.Storage, len(r.Spec.NICs)
	x.Owner, x.Source = r.Owner, snapshot.Source{VMID: r.ID, VMName: r.Spec.Name}
	x.Record = inheritance(r)
	x.NIC = x.Record.NICs
	if len(x.NIC) > 0 {
		x.Network = x.NIC[0].Network
	}
}

// inheritance returns what a clone may know of the VM whose state it resumes from: what was requested and what its
// guest knows, but nothing about this host or the callers.
func inheritance(r vm.Record) vm.Record {
	r = r.Clone()
	nics := slices.Clone(r.NICs)
	for i := range nics {
		nics[i].Tap, nics[i].NetNS = "", ""
		if r.Resume != nil && i < len(r.Resume.MACs) { // it does not have its own MAC yet
			nics[i].MAC = r.Resume.MACs[i]
		}
	}
	var disks []vm.Disk
	for _, d := range r.Disks {
		disks = append(disks, vm.Disk{Format: d.Format, ReadOnly: d.ReadOnly, Serial: d.Serial, Role: d.Role})
	}
	r.Spec.Labels = nil
	return vm.Record{
		ID: r.ID, Spec: r.Spec, State: r.State, Driver: r.Driver, ImageType: r.ImageType, ImageDigest: r.ImageDigest,
		Boot: r.Boot, Process: r.Process, Disks: disks, NICs: nics, FirstBooted: r.FirstBooted, AgentReady: r.AgentReady,
		CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt, StartedAt: r.StartedAt, Containers: r.Containers,
	}
}

// RemoveSnapshot deletes a snapshot unless a VM is hibernated in it. VMs that were cloned from it are not touched.
// Errors: NotFound, FailedPrecondition while a hibernated VM or somebody else needs it.
func (e *Engine) RemoveSnapshot(caller context.Context, ref string) error {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return err
	}
	defer leave()
	if err := e.removeSnapshot(ctx, ref); err != nil {
		return e.life.ended(caller, fmt.Errorf("remove snapshot %s: %w", ref, err))
	}
	return nil
}

func (e *Engine) removeSnapshot(ctx context.Context, ref string) error {
	store, err := e.store()
	if err != nil {
		return err
	}
	x, err := store.Get(ctx, ref)
	if err != nil {
		return err
	}
	if !vm.Behalf(ctx).Reaches(x.Owner) {
		return errdefs.Preconditionf("it is the operator's, who published it; only the operator removes it")
	}
	if _, busy := e.settling.Load(x.ID); busy {
		return errdefs.Preconditionf("vm %s is being hibernated in it", x.Source.VMName)
	}
	var listing []*machine
	for _, m := range e.index.all() {
		r := m.record()
		if r.State == vm.StateHibernated && r.Snapshot == x.ID {
			return errdefs.Preconditionf("vm %s is hibernated in it; wake or remove the VM", m.name())
		}
		if slices.Contains(r.SnapshotIDs, x.ID) {
			listing = append(listing, m)
		}
	}
	for _, id := range e.strays.ids() {
		if row, err := e.kept(id); err == nil && row.Record.State == vm.StateHibernated && row.Record.Snapshot == x.ID {
			return errdefs.Preconditionf("vm %s, which is not on record, is hibernated in it; see `cocoon recover`", id)
		}
	}
	if err := e.removeStored(ctx, x.ID); err != nil {
		return err
	}
	for _, m := range listing { // an operation on the VM may take long: do not wait for it
		e.life.spawn(func(ctx context.Context) { e.unlist(ctx, m, x.ID) })
	}
	return nil
}

// unlist removes a deleted snapshot from the list in the record of m.
func (e *Engine) unlist(ctx context.Context, m *machine, id string) {
	ctx, cancel := e.life.bound(ctx)
	defer cancel()
	release, err := e.queue.acquire(ctx, m.id)
	if err != nil {
		return
	}
	defer release()
	if e.index.get(m.id) != m {
		return
	}
	_, err = e.commit(ctx, m, e.journal.Update, func(r *vm.Record) {
		r.SnapshotIDs = slices.DeleteFunc(slices.Clone(r.SnapshotIDs), func(s string) bool { return s == id })
	})
	if err != nil {
		e.log.Warn("snapshot not taken off the list of its vm", "vm", m.id, "snapshot", id, "err", err)
	}
}
