package engine

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Clone creates a VM that resumes from a snapshot. It returns when its CPUs run; the VM is ready when it has its own
// identity.
// Errors, before anything changes: NotFound (snapshot, image), InvalidArgument, AlreadyExists (name),
// FailedPrecondition (it cannot resume here, and why). If it fails later, the whole VM is rolled back.
func (e *Engine) Clone(caller context.Context, spec vm.CloneSpec) (vm.Record, error) {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	began := time.Now()
	from := spec.Snapshot
	if from == "" {
		from = spec.FromDir
	}
	r, err := e.clone(ctx, spec)
	if err != nil {
		return vm.Record{}, e.life.ended(caller, fmt.Errorf("clone %s: %w", from, err))
	}
	e.log.Info("vm created", "vm", r.ID, "op", opClone, "snapshot", r.Snapshot, "dur", time.Since(began))
	return r.Clone(), nil
}

func (e *Engine) clone(ctx context.Context, spec vm.CloneSpec) (vm.Record, error) {
	h, err := e.holdFor(ctx, spec)
	if err != nil {
		return vm.Record{}, err
	}
	defer h.Release()
	if err := h.Verify(ctx); err != nil {
		return vm.Record{}, damaged(h.Snapshot(), err)
	}
	r, images, err := e.designClone(ctx, h.Snapshot(), spec, vm.NewID())
	if err != nil {
		return vm.Record{}, err
	}
	build := func(m *machine, back *undo.Stack) (vm.Record, error) { return e.buildClone(ctx, m, h, images, back) }
	if !e.pooled(r, spec) {
		c, err := e.buildNew(ctx, r, opClone, build)
		return c, damaged(h.Snapshot(), err)
	}
	c, hit, err := e.claim(ctx, h.Snapshot(), r)
	if !hit {
		c, err = e.buildNew(ctx, r, opClone, build)
	}
	if err == nil {
		e.refill(r, spec, hit)
	}
	return c, damaged(h.Snapshot(), err)
}

// holdFor prevents the removal of what spec names.
func (e *Engine) holdFor(ctx context.Context, spec vm.CloneSpec) (snapshot.Held, error) {
	store, err := e.store()
	switch {
	case err != nil:
		return nil, err
	case (spec.Snapshot == "") == (spec.FromDir == ""):
		return nil, errdefs.Invalidf("name either a snapshot or a folder with one")
	case spec.FromDir != "" && !filepath.IsAbs(spec.FromDir):
		return nil, errdefs.Invalidf("the folder %q must be an absolute path", spec.FromDir)
	case spec.FromDir != "":
		return e.holdDir(ctx, store, spec.FromDir)
	}
	return store.Hold(ctx, spec.Snapshot)
}

// holdDir is Store.HoldDir on behalf of the owner in ctx. Non-operators clone only from folders that the operator
// lists, and not from what belongs to another namespace there.
func (e *Engine) holdDir(ctx context.Context, store snapshot.Store, dir string) (snapshot.Held, error) {
	who := vm.Behalf(ctx)
	if !who.Operator() && !e.openDir(dir) {
		return nil, errdefs.NotFoundf("namespace %s may not clone from the folder %s; the operator lists folders for that in cloneDirs", who.Namespace, dir)
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
func (e *Engine) openDir(dir string) bool {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(e.cfg.CloneDirs, func(parent string) bool {
		parent, err := filepath.EvalSymlinks(parent)
		if err != nil {
			return false
		}
		below, err := filepath.Rel(parent, real)
		return err == nil && filepath.IsLocal(below)
	})
}

// designClone returns the first record of the clone id of x. Everything that can be refused is refused here.
func (e *Engine) designClone(ctx context.Context, x snapshot.Snapshot, spec vm.CloneSpec, id vm.ID) (vm.Record, []image.Image, error) {
	live := x.Live && !spec.Cold
	s, err := cloneSpec(x, spec, id, live)
	if err != nil {
		return vm.Record{}, nil, err
	}
	if live {
		if s.Accel, err = e.resumable(ctx, x, s.Accel); err != nil {
			return vm.Record{}, nil, err
		}
	} else if e.drivers[x.Hypervisor] == nil { // any driver here can boot its disks
		s.Driver = e.cfg.DefaultDriver
	}
	images, err := e.imagesOf(ctx, x)
	if err != nil {
		return vm.Record{}, nil, err
	}
	process := x.Record.Process
	s.Process = process // resolved: nothing from the image is laid over it
	if err := s.Validate(); err != nil {
		return vm.Record{}, nil, err
	}
	r, err := e.design(s, images[0])
	if err != nil {
		return r, nil, err
	}
	r.ID, r.Owner, r.Process, r.Snapshot = id, vm.Behalf(ctx), process, x.ID
	if r.Containers, err = containersIn(x, r.Spec, live); err != nil {
		return r, nil, err
	}
	r.Spec.Process = x.Record.Spec.Process
	if live && len(r.Spec.NICs) != x.NICs {
		return r, nil, errdefs.Preconditionf("its guest has %d network interfaces, and %d are possible here; ask for as many, or clone it cold", x.NICs, len(r.Spec.NICs))
	}
	if live && hasSeed(x.Record.Disks) && e.seeds == nil {
		return r, nil, errdefs.Preconditionf("its guest has a cloud-init disk, and none can be made here; clone it cold")
	}
	if live || r.ImageType == vm.ImageOCI { // a disk guest that boots gets its identity from its seed
		r.Cloned = live
		r.Resume = &vm.Resume{Clone: true, MachineID: newMachineID(), SSHHostKeys: spec.SSHHostKeys}
	}
	if live {
		r.Resume.Fresh = x.Fresh
		for _, n := range x.NIC {
			r.Resume.MACs = append(r.Resume.MACs, n.MAC)
		}
		if r.Spec.Storage > x.Storage {
			r.Resume.Storage = r.Spec.Storage
		}
	}
	return r, images, nil
}

// defaultName is the name of a clone if the caller gives none.
func defaultName(id vm.ID) string { return "cocoon-clone-" + string(id) }

// cloneSpec lays what spec asks for over the spec of the snapshot's VM.
func cloneSpec(x snapshot.Snapshot, spec vm.CloneSpec, id vm.ID, live bool) (vm.Spec, error) {
	s := x.Record.Spec.Clone()
	s.Name, s.Hostname, s.Labels, s.Offered, s.Driver, s.Image = spec.Name, spec.Hostname, spec.Labels, nil, x.Hypervisor, x.Image
	s.CPUs, s.Memory, s.Storage = x.CPU, x.Memory, x.Storage
	if s.Name == "" {
		s.Name = defaultName(id)
	}
	if live && (spec.CPUs != 0 && spec.CPUs != x.CPU || spec.Memory != 0 && spec.Memory != x.Memory) {
		return s, errdefs.Preconditionf("its guest has %d CPUs and %d bytes of memory, which cannot change while it goes on; leave them out, or clone it cold", x.CPU, x.Memory)
	}
	if spec.Storage != 0 && spec.Storage < x.Storage {
		return s, errdefs.Invalidf("its disk has %d bytes, more than the %d asked for; a disk cannot shrink", x.Storage, spec.Storage)
	}
	for _, f := range []struct {
		to   *int64
		want int64
	}{{&s.Memory, spec.Memory}, {&s.Storage, spec.Storage}, {(*int64)(&s.StopGrace), int64(spec.StopGrace)}} {
		if f.want != 0 {
			*f.to = f.want
		}
	}
	if spec.CPUs != 0 {
		s.CPUs = spec.CPUs
	}
	for i := range s.NICs { // a requested MAC belongs to the source alone
		s.NICs[i].MAC = ""
	}
	if len(spec.NICs) > 0 {
		s.NICs = slices.Clone(spec.NICs)
	}
	return s.Default(), nil
}

// resumable refuses saved state that cannot resume here, and returns the accelerator with which it can. An emulated
// guest stays emulated, even if something better is available now.
func (e *Engine) resumable(ctx context.Context, x snapshot.Snapshot, accel vm.Accel) (vm.Accel, error) {
	d := e.drivers[x.Hypervisor]
	if d == nil {
		return accel, errdefs.Preconditionf("it was saved by the hypervisor %s, and only %s runs here; clone it where it fits, or cold", x.Hypervisor, names(slices.Collect(maps.Keys(e.drivers))))
	}
	teller, ok := hypervisor.As[hypervisor.MachineTeller](d)
	if !ok {
		return accel, errdefs.Unsupportedf("driver %s cannot go on from saved memory; clone it cold", d.Name())
	}
	host, err := teller.Machine(ctx, accel)
	if err != nil {
		return accel, err
	}
	err = x.Machine.Resumes(host)
	if err != nil && accel == vm.AccelAuto && x.Machine.Accel == vm.AccelTCG && host.Accel != vm.AccelTCG {
		return e.resumable(ctx, x, vm.AccelTCG)
	}
	return accel, err
}

// imagesOf returns the images that the disks of x depend on, that of the VM and those of its containers. It finds
// them by digest, whatever their names mean here now. Whoever may clone what the operator shares may also use its
// images. A snapshot of a namespace can claim anything about its images, so the namespace needs a right to them.
func (e *Engine) imagesOf(ctx context.Context, x snapshot.Snapshot) ([]image.Image, error) {
	if x.Owner.Operator() {
		ctx = vm.OnBehalf(ctx, x.Owner)
	}
	var out []image.Image
	for _, want := range x.Images() {
		img, err := e.images.Get(ctx, want.Digest)
		if err == nil && img.ID != want.Digest || errdefs.IsNotFound(err) || errdefs.IsInvalid(err) {
			return nil, errdefs.NotFoundf("its disks stand on image %s with the digest %s, which is not here; pull or import it", want.Name, want.Digest)
		}
		if err != nil {
			return nil, err
		}
		out = append(out, img)
	}
	return out, nil
}

func hasSeed(disks []vm.Disk) bool {
	return slices.ContainsFunc(disks, func(d vm.Disk) bool { return d.Role == vm.RoleCidat })
}

// buildClone creates the disks and NICs of m and resumes or boots it. It writes nothing to the journal before the
// process runs: after a crash, leftovers are found by the VM's ID.
func (e *Engine) buildClone(ctx context.Context, m *machine, h snapshot.Held, images []image.Image, back *undo.Stack) (vm.Record, error) {
	r := m.record()
	back.Push(func(context.Context) error { return e.removeDirs(m.id) })
	if err := e.makeUnborn(m.id); err != nil {
		return r, err
	}
	if err := e.inheritVolumes(m, h.Snapshot()); err != nil {
		return r, err
	}
	var err error
	if r.Disks, err = e.disksFrom(ctx, m, h, images); err != nil {
		return r, err
	}
	if r.NICs, err = e.attach(ctx, r, back, true); err != nil {
		return r, err
	}
	if r.Cloned && hasSeed(h.Snapshot().Record.Disks) || !r.Cloned { // a resumed guest has the disks that it had
		if r.Disks, err = e.seed(ctx, r, r.NICs); err != nil {
			return r, err
		}
	}
	if r.Resume != nil && !r.Cloned { // it boots with its own NICs
		resume := *r.Resume
		for _, n := range r.NICs {
			resume.MACs = append(resume.MACs, n.MAC)
		}
		r.Resume = &resume
	}
	f := launchOptions{ready: e.syncing(m.id, r.Disks), log: m.log.Begin, done: e.journal.Settle, change: func(to *vm.Record) {
		to.Disks, to.NICs, to.Resume = r.Disks, r.NICs, r.Resume
	}}
	if r.Cloned {
		f.log, f.incoming = e.foreignLogs(m), cloneOf(h, r)
	}
	return e.launchProcess(ctx, m, r, f, back)
}

// cloneOf returns the saved state of h for the clone r.
func cloneOf(h snapshot.Held, r vm.Record) *hypervisor.Incoming {
	in := incomingOf(h)
	in.LinksDown, in.Grown = true, grown(r)
	return in
}

// incomingOf returns the saved state of h.
func incomingOf(h snapshot.Held) *hypervisor.Incoming {
	in := &hypervisor.Incoming{
		State: filepath.Join(h.Dir(), snapshot.FileState), Memory: filepath.Join(h.Dir(), snapshot.FileMemory),
		Booting: h.Snapshot().Fresh, Summed: h.Snapshot().Summed,
	}
	if h.Snapshot().MemoryBase != "" {
		in.Base = filepath.Join(h.Dir(), snapshot.FileBase)
	}
	return in
}

// grown returns the serials of the disks of r that are larger than its resumed guest knows.
func grown(r vm.Record) []string {
	var serials []string
	for _, d := range r.Disks {
		if r.Resume != nil && r.Resume.Storage > 0 && d.Role == vm.RoleCOW {
			serials = append(serials, d.Serial)
		}
	}
	return serials
}

// disksFrom creates the disks of a snapshot for m, in a new folder.
func (e *Engine) disksFrom(ctx context.Context, m *machine, h snapshot.Held, images []image.Image) ([]vm.Disk, error) {
	base, err := e.baseOf(ctx, h.Snapshot(), images)
	if err != nil {
		return nil, err
	}
	dir, err := e.newDiskDir(m.id)
	if err != nil {
		return nil, fmt.Errorf("make a folder for disks: %w", err)
	}
	return e.snapshots.Disks(ctx, h, base, dir, m.record().Spec.Storage)
}

// inheritVolumes gives m the content of its source VM's file volumes. No snapshot has that content: if the source is
// not here, the volumes are empty until somebody updates them. A resumed guest keeps what it had mounted.
//
// The engine believes what a snapshot says of its source only if the source knows the snapshot: a foreign snapshot
// may say anything, and the content may be secret.
func (e *Engine) inheritVolumes(m *machine, x snapshot.Snapshot) error {
	source := e.index.get(x.Source.VMID)
	known := source != nil && slices.Contains(source.record().SnapshotIDs, x.ID)
	var volumes []vm.Volume
	for _, v := range m.record().Spec.Volumes {
		if v.Kind != vm.VolumeFiles {
			continue
		}
		v.Files = nil
		if known {
			var err error
			if v.Files, err = e.readVolume(source.id, v.Name); err != nil && e.index.get(source.id) == source {
				return err
			}
		}
		if v.Files == nil {
			e.log.Info("volume of clone is empty, its source is not here", "vm", m.id, "volume", v.Name)
		}
		volumes = append(volumes, v)
	}
	return e.writeVolumes(m.id, volumes)
}
