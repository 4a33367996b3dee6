package engine_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	volumefile "cocoonstack.io/cocoon/internal/volume/file"
)

// attachedSpec is a VM that mounts the volume data.
func attachedSpec(name string) vm.Spec {
	s := spec(name)
	s.Volumes = []vm.Volume{{Name: "disk", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "data"}}}
	s.Mounts = []vm.Mount{{Volume: "disk", Path: "/data"}}
	return s
}

func createData(ctx context.Context, r *rig) error {
	_, err := r.world.Volumes().Create(ctx, volume.Spec{Name: "data", Size: 1 << 20})
	return err
}

func (r *rig) data(ctx context.Context) volume.Volume {
	r.t.Helper()
	v, err := r.world.Volumes().Get(ctx, "data")
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

func (r *rig) refused(what string, class errdefs.Class, err error) {
	r.t.Helper()
	if errdefs.ClassOf(err) != class {
		r.t.Errorf("%s: %v, want %v", what, err, class)
	}
}

// A VM has its volume from its creation until it is removed, whatever happens to the VM and to the daemon.
func TestAttachedVolume(t *testing.T) {
	var frozen atomic.Int64
	r, ctx := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if call == "agent.Freeze" {
				frozen.Add(1)
			}
			return nil
		}
	}), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	rec := r.must(r.Launch(ctx, attachedSpec("web")))
	has := func(what string) {
		t.Helper()
		now := r.must(r.Inspect(ctx, "web"))
		disks := slices.DeleteFunc(slices.Clone(now.Disks), func(d vm.Disk) bool { return d.Role != vm.RoleVolume })
		v := r.data(ctx)
		if len(disks) != 1 || disks[0].Serial != volume.Serial(v.ID) || disks[0].ReadOnly || !v.AttachedTo(rec.ID) || len(v.Attachments) != 1 {
			t.Errorf("%s: disks %+v, attachments %+v", what, disks, v.Attachments)
		}
		r.refused(what+": remove the volume", errdefs.FailedPrecondition, r.Volumes().Delete(ctx, "data"))
		_, err := r.Launch(ctx, attachedSpec("other"))
		r.refused(what+": attach it twice", errdefs.FailedPrecondition, err)
	}
	r.await("web", "ready", ready)
	if got := r.world.Guest(rec.ID).Identity().VolumeSerials; got["disk"] != volume.Serial(r.data(ctx).ID) {
		t.Errorf("the guest was told %v", got)
	}
	has("launched")
	r.must(r.Restart(ctx, "web", 0))
	has("restarted")
	r.restart()
	has("after a restart of the daemon")
	r.must(r.Stop(ctx, "web", 0))
	has("stopped")
	r.must(r.Start(ctx, "web"))
	has("started")
	r.await("web", "ready", ready)
	r.must(r.Hibernate(ctx, "web", "night"))
	has("hibernated")
	if frozen.Load() != 1 {
		t.Errorf("the guest wrote to its volume before it slept %d times", frozen.Load())
	}
	if x, err := r.world.Snapshots().Get(ctx, "night"); err != nil || slices.ContainsFunc(x.Disks, func(d snapshot.Disk) bool { return d.Role == vm.RoleVolume }) {
		t.Errorf("the snapshot has the disks %+v, %v", x.Disks, err)
	}
	_, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "night", Name: "thief"})
	r.refused("clone a VM with a volume", errdefs.FailedPrecondition, err)
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	r.refused("keep the snapshot of a hibernated VM with a volume", errdefs.FailedPrecondition, err)
	r.must(r.Wake(ctx, "web"))
	has("woken")
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	if v := r.data(ctx); len(v.Attachments) > 0 {
		t.Errorf("removed: %+v", v.Attachments)
	}
	r.must(r.Launch(ctx, attachedSpec("other")))
	if err := r.Remove(ctx, "other", true); err != nil {
		t.Fatal(err)
	}
	if err := r.Volumes().Delete(ctx, "data"); err != nil {
		t.Error(err)
	}
}

// What cannot be attached is refused before anything is made, and nothing is left of a creation that fails.
func TestVolumesThatAreNotAttached(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(vm.OnBehalf(ctx, vm.Owner{Namespace: "prod"}), r); err != nil {
		t.Fatal(err)
	}
	prod, dev := vm.OnBehalf(ctx, vm.Owner{Namespace: "prod"}), vm.OnBehalf(ctx, vm.Owner{Namespace: "dev"})
	_, err := r.Launch(dev, attachedSpec("web"))
	r.refused("the volume of another namespace", errdefs.NotFound, err)
	both := attachedSpec("web")
	both.Volumes = append(both.Volumes, vm.Volume{Name: "again", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "data"}})
	_, err = r.Launch(prod, both)
	r.refused("one volume twice", errdefs.InvalidArgument, err)
	boots := attachedSpec("web")
	boots.Image = "cloud"
	_, err = r.Launch(prod, boots)
	r.refused("a mount in an image that boots itself", errdefs.InvalidArgument, err)
	for what, mounts := range map[string][]vm.Mount{"disk alone": nil, "device": {{Volume: "disk", Path: "/dev/data", Device: true}}} {
		boots.Mounts = mounts
		if rec := r.must(r.Launch(prod, boots)); !slices.ContainsFunc(rec.Disks, func(d vm.Disk) bool { return d.Role == vm.RoleVolume }) {
			t.Errorf("%s: disks %+v", what, rec.Disks)
		}
		if err := r.Remove(prod, "web", true); err != nil {
			t.Fatal(err)
		}
	}
	r.must(r.Launch(prod, attachedSpec("web")))
	if err := r.Remove(prod, "web", true); err != nil {
		t.Fatal(err)
	}
	r.world.Fault = func(call string) error {
		if call == "driver.Launch" {
			return errors.New("no")
		}
		return nil
	}
	if _, err := r.Launch(prod, attachedSpec("web")); err == nil {
		t.Fatal("launched")
	}
	r.world.Fault = func(string) error { return nil }
	if v := r.data(ctx); len(v.Attachments) > 0 {
		t.Errorf("after a failed launch: %+v", v.Attachments)
	}
	r.clean()
}

// Several VMs may read one volume. None of them can write to it.
func TestReadersOfAVolume(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		s := attachedSpec(name)
		s.Volumes[0].Disk.ReadOnly = true
		rec := r.must(r.Launch(ctx, s))
		if i := slices.IndexFunc(rec.Disks, func(d vm.Disk) bool { return d.Role == vm.RoleVolume }); i < 0 || !rec.Disks[i].ReadOnly {
			t.Errorf("%s has the disks %+v", name, rec.Disks)
		}
	}
	_, err := r.Launch(ctx, attachedSpec("writer"))
	r.refused("write to what others read", errdefs.FailedPrecondition, err)
	if _, err := r.Volumes().Clone(ctx, "data", volume.Spec{Name: "copy"}); err != nil {
		t.Errorf("copy what is only read: %v", err)
	}
}

// liveVolumes is a store that copies the bytes of one instant. It notes how the guest that writes to a volume is meanwhile.
type liveVolumes struct {
	*volumefile.Store
	guest func() *enginetest.Guest
	seen  []string
}

func (l *liveVolumes) note(what string, s volume.Spec) volume.Spec {
	if s.Live {
		what += ", live"
	}
	if g := l.guest(); g != nil && g.Self().Frozen {
		what += ", frozen"
	}
	l.seen = append(l.seen, what)
	s.Live = false // the guests of these tests write nothing at that moment
	return s
}

func (l *liveVolumes) Snapshot(ctx context.Context, ref string, s volume.Spec) (volume.Snapshot, error) {
	return l.Store.Snapshot(ctx, ref, l.note("snapshot", s))
}

func (l *liveVolumes) Clone(ctx context.Context, ref string, s volume.Spec) (volume.Volume, error) {
	return l.Store.Clone(ctx, ref, l.note("clone", s))
}

// A copy of a volume has the bytes of one instant. The file systems of the guest that writes to it are frozen meanwhile, if its agent is
// there.
func TestCopiesOfAVolume(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var id vm.ID
	file, err := volumefile.New(ctx, volumefile.Config{Dir: filepath.Join(t.TempDir(), "live")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	store := &liveVolumes{Store: file, guest: func() *enginetest.Guest { return r.world.Guest(id) }}
	r.stop()
	r.world.Keep(store).Shares = false
	var busy atomic.Bool
	r.world.Fault = func(call string) error {
		if call == "agent.Freeze" && busy.Load() {
			return errdefs.Preconditionf("the guest is busy")
		}
		return nil
	}
	r.start()
	v := r.Volumes()
	if _, err := v.Import(ctx, volume.Spec{Name: "data", Size: 1 << 20}, bytes.NewReader([]byte("one")), nil); err != nil {
		t.Fatal(err)
	}
	id = r.must(r.Launch(ctx, attachedSpec("web"))).ID
	r.await("web", "ready", ready)
	if _, err = v.Snapshot(ctx, "data", volume.Spec{Name: "kept"}); err != nil {
		t.Error(err)
	}
	if _, err = v.Clone(ctx, "data", volume.Spec{Name: "copy"}); err != nil {
		t.Error(err)
	}
	if r.world.Guest(id).Self().Frozen {
		t.Error("the guest stays frozen")
	}
	busy.Store(true)
	if _, err = v.Snapshot(ctx, "data", volume.Spec{Name: "cut"}); err != nil {
		t.Error(err)
	}
	r.refused("an export while a VM writes", errdefs.FailedPrecondition, v.Export(ctx, "data", io.Discard))
	r.must(r.Stop(ctx, "web", 0))
	if _, err = v.Snapshot(ctx, "data", volume.Spec{Name: "still"}); err != nil {
		t.Error(err)
	}
	want := []string{"snapshot, live, frozen", "clone, live, frozen", "snapshot, live", "snapshot"}
	if d := diff.Of(want, store.seen); d != "" {
		t.Error(d)
	}
	var out bytes.Buffer
	if err := v.Export(ctx, "copy", &out); err != nil || out.Len() != 1<<20 || !bytes.HasPrefix(out.Bytes(), []byte("one")) {
		t.Errorf("exported %d bytes, %v", out.Len(), err)
	}
}

// attachedScripts are operations of a VM with a volume.
func attachedScripts() map[string]script {
	launch := func(ctx context.Context, r *rig) error {
		if err := createData(ctx, r); err != nil {
			return err
		}
		if _, err := r.Launch(ctx, attachedSpec("web")); err != nil {
			return err
		}
		return until(ctx, r, ready)
	}
	return map[string]script{
		"launch attached": {
			before: createData,
			act: func(ctx context.Context, r *rig) error {
				if _, err := r.Launch(ctx, attachedSpec("web")); err != nil {
					return err
				}
				return until(ctx, r, ready)
			},
			only:  func(ctx context.Context, r *rig) error { _, err := r.Launch(ctx, attachedSpec("web")); return err },
			after: []vm.State{"", vm.StateRunning},
		},
		"start attached": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(launch(ctx, r), halt(ctx, r)) },
			act:    func(ctx context.Context, r *rig) error { _, err := r.Start(ctx, "web"); return err },
			after:  []vm.State{vm.StateStopped, vm.StateRunning},
		},
		"remove attached": {
			before: launch,
			act:    func(ctx context.Context, r *rig) error { return r.Remove(ctx, "web", true) },
			after:  []vm.State{vm.StateRunning, ""},
		},
		"save attached": {
			before: launch,
			act:    save,
			after:  []vm.State{vm.StateRunning},
		},
		"clone attached": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(launch(ctx, r), save(ctx, r)) },
			act: func(ctx context.Context, r *rig) error {
				if err := clone(ctx, r); err != nil {
					return err
				}
				return until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "a" && v.AgentReady })
			},
			only:  clone,
			after: []vm.State{"", vm.StateRunning},
			name:  "a",
		},
		"wake attached": {
			before: func(ctx context.Context, r *rig) error {
				err := launch(ctx, r)
				if err == nil {
					_, err = r.Hibernate(ctx, "web", "")
				}
				return err
			},
			act:   func(ctx context.Context, r *rig) error { _, err := r.Wake(ctx, "web"); return err },
			after: []vm.State{vm.StateRunning, vm.StateHibernated},
		},
	}
}
