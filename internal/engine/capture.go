package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

const (
	freezeTimeout = 30 * time.Second // how long a guest may take to freeze or thaw its file systems
	settleTimeout = 2 * time.Second  // how long it may take to settle: one that always writes to its disks never does
)

// capture takes a snapshot of one VM: the part that save and hibernate share.
type capture struct {
	*machine
	proc    *run                   // nil: only its disks are saved
	driver  hypervisor.Snapshotter // of proc
	freezer guest.Freezer          // nil: its file systems are not frozen
	hold    bool                   // the guest stays paused
	fresh   bool                   // the guest may not have been set up since it booted
	others  bool                   // other VMs may resume from it, so it keeps the volumes too
	kept    []snapshot.Volume
	copied  []snapshot.Disk // disks of a VM that goes on writing to them
	draft   snapshot.Draft
}

// capture determines how m can be saved, or returns why it cannot.
func (m *machine) capture(ctx context.Context, quiesce bool) (capture, error) {
	r := m.record()
	c := capture{machine: m}
	if err := roomOnTop(r); err != nil {
		return c, err
	}
	switch r.State {
	case vm.StateCreated, vm.StateStopped:
		return c, nil
	case vm.StateRunning:
	case vm.StateHibernated:
		return c, errdefs.Preconditionf("it is hibernated in snapshot %s; wake it first", r.Snapshot)
	default:
		return c, broken(r)
	}
	if err := awake(r); err != nil {
		return c, err
	}
	if r.Reason == vm.ReasonDiskFull {
		return c, errdefs.Preconditionf("it cannot be saved now: %s", r.Message)
	}
	if len(r.Moving) > 0 {
		return c, errdefs.Preconditionf("its guest has not given back a network interface; detach it again, or restart the VM")
	}
	c.proc, c.fresh = m.run.Load(), fresh(r)
	if c.proc == nil || c.proc.Over() {
		return c, errdefs.Preconditionf("its process has just ended; try again")
	}
	var ok bool
	if c.driver, ok = hypervisor.As[hypervisor.Snapshotter](c.proc.Inst); !ok {
		return c, errdefs.Unsupportedf("driver %s cannot save a running VM; stop the VM first", r.Driver)
	}
	if !quiesce {
		return c, nil
	}
	var patience time.Duration
	if r.AgentReady { // the session opens right after this is recorded, and again after a restart of the engine
		patience = m.cfg.Silence
	}
	agent, err := c.proc.link.Ready(ctx, patience)
	if ctx.Err() != nil {
		return c, ctx.Err()
	}
	if err != nil {
		return c, errdefs.Preconditionf("the agent in its guest does not answer, so the file systems cannot be frozen; wait for the agent, or save without quiescing")
	}
	if c.freezer, ok = agent.(guest.Freezer); !ok {
		return c, errdefs.Unsupportedf("its guest's agent cannot freeze file systems; save without quiescing")
	}
	return c, nil
}

// shoot saves the VM into the draft under the open intent and completes x. On error the guest runs as before, unless it was to
// be held; then it may be paused.
func (c *capture) shoot(ctx context.Context, x snapshot.Snapshot) (snapshot.Snapshot, error) {
	if c.proc != nil && c.record().Resume != nil { // memory and record must have the same identity of the guest
		leave, err := c.proc.link.Identity.Take(ctx)
		if err != nil {
			return x, err
		}
		defer leave()
	}
	frozen, raw := c.record().Disks, c.drivers.rawOnly(c.record().Driver)
	var overlays []hypervisor.DiskOverlay
	var err error
	if !raw {
		if overlays, err = c.overlay(ctx); err != nil {
			return x, err
		}
	}
	if c.proc == nil {
		if err := c.still(ctx); err != nil {
			return x, err
		}
	} else {
		base, err := c.draft.Base(ctx, relatedSnapshots(c.record())...)
		if err != nil {
			return x, err
		}
		saved, quiesced, err := c.saveMemory(ctx, c.draft.Dir(), base != "", overlays)
		if err != nil {
			return x, err
		}
		if saved.Delta {
			x.MemoryBase = base
		}
		x.Live, x.Machine, x.Pause, x.Method, x.Quiesced, x.Fresh = true, saved.Machine, saved.Pause, saved.Method, quiesced, c.fresh
	}
	if x.Disks = c.copied; !raw {
		if x.Disks, err = keepDisks(ctx, c.draft.Link, c.record(), frozen); err != nil {
			return x, err
		}
	}
	describe(&x, c.record())
	x.Volumes = c.kept
	x.ImageManifest = c.manifestOf(ctx, x.ImageDigest)
	for i := range x.Record.Containers {
		r := &x.Record.Containers[i]
		r.ImageManifest = c.manifestOf(ctx, r.ImageDigest)
	}
	for i := range x.Record.Ephemeral {
		e := &x.Record.Ephemeral[i]
		e.Record.ImageManifest = c.manifestOf(ctx, e.Record.ImageDigest)
		for j := range e.Volumes {
			e.Volumes[j].ImageManifest = c.manifestOf(ctx, e.Volumes[j].ImageDigest)
		}
	}
	for i := range x.Record.ImageVolumes {
		v := &x.Record.ImageVolumes[i]
		v.ImageManifest = c.manifestOf(ctx, v.ImageDigest)
	}
	return c.draft.Commit(ctx, x)
}

// overlay puts an empty overlay on each writable disk of m, records them and returns them for the driver.
//
// They are recorded before the guest writes to them. That is safe after any crash: until the guest writes, they are
// empty and the disk below them has the same content; once it writes, the record leads to what it wrote.
func (c *capture) overlay(ctx context.Context) ([]hypervisor.DiskOverlay, error) {
	disks, overlays, err := c.overlaysOn(ctx)
	if err != nil {
		return nil, err
	}
	if err := c.dirs.syncing(c.id, disks)(); err != nil {
		return nil, err
	}
	if _, err := c.commit(ctx, c.step(stepSave), func(r *vm.Record) { r.Disks = disks }); err != nil {
		return nil, err
	}
	return overlays, c.durable(ctx)
}

// overlaysOn creates an empty overlay for each writable disk of m, with a name that was never used before.
func (m *machine) overlaysOn(ctx context.Context) (disks []vm.Disk, overlays []hypervisor.DiskOverlay, err error) {
	disks = slices.Clone(m.record().Disks)
	for i, d := range disks {
		if d.ReadOnly || d.Role == vm.RoleVolume {
			continue
		}
		over, err := m.snapshots.Overlay(ctx, d, m.dirs.state(m.id), topPrefix+string(vm.NewID())+".qcow2")
		if err != nil {
			return nil, nil, fmt.Errorf("make an overlay on disk %s: %w", d.Serial, err)
		}
		disks[i] = over
		overlays = append(overlays, hypervisor.DiskOverlay{Serial: d.Serial, Disk: over})
	}
	return disks, overlays, nil
}

// saveMemory makes the driver save the guest and switch its disks, with its file systems frozen if c can do that.
func (c *capture) saveMemory(ctx context.Context, dir string, based bool, overlays []hypervisor.DiskOverlay) (s hypervisor.Saved, quiesced bool, err error) {
	plan := hypervisor.SavePlan{
		State: dir + "/" + snapshot.FileState, Memory: dir + "/" + snapshot.FileMemory, Overlays: overlays, Hold: c.hold, Still: c.still,
	}
	if based {
		plan.Base = dir + "/" + snapshot.FileBase
	}
	if attached := c.record().Attached; c.hold && len(attached) > 0 { // they have all of it, also if the VM never wakes
		c.quiet(ctx, attached[0].Volume)()
	}
	c.settleGuest(ctx)
	if c.record().Spec.Sandbox {
		rejoin, failed := c.proc.link.Part(ctx)
		if failed != nil {
			return s, false, failed
		}
		defer func() { err = errors.Join(err, c.proc.link.Rejoin(ctx, rejoin)) }()
	}
	if c.freezer != nil {
		limited, cancel := context.WithTimeout(ctx, freezeTimeout)
		defer cancel()
		done, frozen, err := c.proc.link.Still(limited)
		if err != nil {
			return s, false, err
		}
		defer done()
		if !frozen {
			thaw := sync.OnceFunc(func() { c.thaw(ctx) })
			defer thaw()
			plan.Taken = thaw
			if _, err := c.freezer.Freeze(limited); err != nil {
				return s, false, errdefs.Preconditionf("freeze the guest's file systems: %w; save without quiescing", err)
			}
		}
		quiesced = true
	}
	c.proc.Held.Store(true)
	s, err = c.driver.Save(ctx, plan)
	c.proc.Held.Store(c.hold)
	if err != nil {
		return s, false, fmt.Errorf("save its memory: %w", err)
	}
	return s, quiesced, nil
}

// still keeps what nobody writes to meanwhile, and somebody may write to afterwards: volumes, and disks that get no overlay.
func (c *capture) still(ctx context.Context) (err error) {
	if r := c.record(); c.drivers.rawOnly(r.Driver) {
		if c.copied, err = keepDisks(ctx, c.draft.Copy, r, r.Disks); err != nil {
			return err
		}
	}
	return c.keepVolumes(ctx)
}

// keepVolumes takes snapshots of the volumes of the VM for the draft. Preconditions: nothing writes to them meanwhile.
func (c *capture) keepVolumes(ctx context.Context) error {
	r := c.record()
	if len(r.Attached) == 0 || !c.others {
		return nil
	}
	can, err := c.snapshotter()
	if err != nil {
		return err
	}
	ctx = vm.OnBehalf(ctx, r.Owner)
	for _, a := range r.Attached {
		// A guest that is paused must not wait for a copy of all bytes.
		x, err := can.Snapshot(ctx, string(a.ID), volume.Spec{For: c.draft.ID(), Live: c.proc != nil})
		if err != nil {
			return notKept(a, err, c.proc != nil)
		}
		c.kept = append(c.kept, snapshot.Volume{Volume: a.Volume, Snapshot: x.ID, Serial: a.Serial, Port: portOf(r.Disks, a.Serial), Size: a.Size})
	}
	return nil
}

// settleGuest lets a guest settle that others will resume from. A guest whose agent cannot do that is saved as it is.
func (c *capture) settleGuest(ctx context.Context) {
	agent, ready, _ := c.proc.link.Peek()
	settler, ok := agent.(guest.Settler)
	if c.hold || !ready || !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	began := time.Now()
	err := settler.Settle(ctx)
	c.log.Debug("guest prepared for the save", "vm", c.id, "dur", time.Since(began), "err", err)
}

// quiet freezes the file systems of a running guest, so that a volume of it has all that the guest wrote, and returns what thaws them. A
// guest that cannot do that goes on, and a paused one stays paused: the volume is as after a power cut.
func (m *machine) quiet(ctx context.Context, name string) (thaw func()) {
	thaw = func() {}
	proc := m.run.Load()
	if proc == nil || proc.Over() || m.record().Paused != "" { // a paused guest writes nothing
		return thaw
	}
	limited, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	var patience time.Duration
	if m.record().AgentReady { // its session opens right after this is recorded
		patience = freezeTimeout
	}
	agent, err := proc.link.Ready(limited, patience)
	freezer, ok := agent.(guest.Freezer)
	if err != nil || !ok {
		return thaw
	}
	done, frozen, err := proc.link.Still(limited)
	if err != nil || frozen {
		return thaw
	}
	if _, err := freezer.Freeze(limited); err != nil {
		done()
		m.log.Warn("file systems of guest not frozen, its volume is as after a power cut", "vm", m.id, "volume", name, "err", err)
		return thaw
	}
	c := capture{machine: m, freezer: freezer}
	return func() {
		c.thaw(ctx)
		done()
	}
}

// thaw runs even if the caller has gone away: otherwise the guest thaws itself, but only after a while.
func (c *capture) thaw(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), freezeTimeout)
	defer cancel()
	if _, err := c.freezer.Thaw(ctx); err != nil {
		c.log.Warn("file systems of guest not thawed, the guest thaws them itself within a minute", "vm", c.id, "err", err)
	}
}

// discard removes what an unfinished snapshot left.
func (c *capture) discard() {
	if err := c.draft.Discard(); err != nil {
		c.log.Warn("unfinished snapshot not removed", "vm", c.id, "err", err)
	}
}

// manifestOf returns the digest by which the origin of an image knows it; "" if unknown: then a clone elsewhere has
// to find the image by its name.
func (n *node) manifestOf(ctx context.Context, digest string) string {
	img, err := n.images.Get(vm.OnBehalf(ctx, vm.Owner{}), digest) // the VM uses it already
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

// describe fills in what a snapshot of r says about it.
func describe(x *snapshot.Snapshot, r vm.Record) {
	x.Image, x.ImageDigest, x.ImageType = r.Spec.Image, r.ImageDigest, r.ImageType
	if r.ImageType != vm.ImageOCI && r.ImageDigest != "" {
		x.ImageBlobIDs = []string{r.ImageDigest}
	}
	x.Hypervisor, x.Boot = r.Driver, r.Boot
	x.CPU, x.Memory, x.Storage, x.NICs = r.Spec.CPUs, r.Spec.Memory, r.Spec.Storage, len(r.Spec.NICs)
	x.Windows = r.Spec.IsWindows()
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
	for _, d := range withoutVolumes(r.Disks) {
		disks = append(disks, vm.Disk{Format: d.Format, ReadOnly: d.ReadOnly, Serial: d.Serial, Role: d.Role, Port: d.Port})
	}
	r.Spec.Labels, r.Spec.CgroupParent = nil, ""
	for i := range r.Ephemeral {
		r.Ephemeral[i].Spec = r.Ephemeral[i].Spec.Saved()
	}
	return vm.Record{
		ID: r.ID, Spec: r.Spec, State: r.State, Driver: r.Driver, ImageType: r.ImageType, ImageDigest: r.ImageDigest,
		Boot: r.Boot, Process: r.Process, Disks: disks, NICs: nics, FirstBooted: r.FirstBooted, AgentReady: r.AgentReady,
		CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt, StartedAt: r.StartedAt, Containers: r.Containers, Ephemeral: r.Ephemeral,
		ImageVolumes: r.ImageVolumes,
	}
}
