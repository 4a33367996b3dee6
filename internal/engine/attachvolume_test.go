package engine_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// attach attaches the volume data to the VM web.
func attach(ctx context.Context, r *rig) error {
	_, err := r.AttachVolume(ctx, "web", vm.VolumeUse{Ref: "data"}, "/data")
	return err
}

func detach(ctx context.Context, r *rig) error {
	_, err := r.DetachVolume(ctx, "web", "data")
	return err
}

// hasVolumes checks that a running VM has exactly the volumes on its record: as disks and mounted in its guest.
func (r *rig) hasVolumes(rec vm.Record, where string) {
	r.t.Helper()
	if rec.State != vm.StateRunning {
		return
	}
	g, serials, want := r.world.Guest(rec.ID), []string(nil), map[string]enginetest.GuestVolume{}
	for _, a := range rec.Attached {
		serials = append(serials, a.Serial)
		want[a.Volume] = enginetest.GuestVolume{Serial: a.Serial, Path: rec.Spec.MountPath(a.Volume)}
	}
	var onRecord, plugged []string
	for _, d := range rec.Disks {
		if d.Role == vm.RoleVolume {
			onRecord = append(onRecord, d.Serial)
		}
	}
	for _, serial := range g.Serials() {
		if strings.HasPrefix(serial, "vol-") {
			plugged = append(plugged, serial)
		}
	}
	if !slices.Equal(onRecord, serials) || !slices.Equal(plugged, serials) {
		r.t.Errorf("%s: attached are %v, disks of the record are %v, of the guest %v", where, serials, onRecord, plugged)
	}
	if rec.ImageType != vm.ImageOCI {
		return
	}
	r.eventually("the mounts on record "+where, func() bool {
		have := maps.Clone(g.Volumes())
		for name, v := range have {
			v.Size = 0
			have[name] = v
		}
		return maps.Equal(have, want)
	})
}

// A volume goes to a running VM and to the next one. It stays with its VM whatever happens to the VM and the daemon.
func TestAttachVolume(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "other"} {
		r.must(r.Launch(ctx, spec(name)))
		r.await(name, "ready", ready)
	}
	has := func(what string) vm.Record {
		t.Helper()
		rec, v := r.must(r.Inspect(ctx, "web")), r.data(ctx)
		if len(rec.Attached) != 1 || rec.Attached[0].ID != v.ID || !v.AttachedTo(rec.ID) || len(v.Attachments) != 1 || rec.Spec.MountPath("data") != "/data" {
			t.Errorf("%s: %+v, %+v, attachments %+v", what, rec.Spec, rec.Attached, v.Attachments)
		}
		if i := slices.IndexFunc(rec.Disks, func(d vm.Disk) bool { return d.Role == vm.RoleVolume }); i < 0 || rec.Disks[i].Port != 1 {
			t.Errorf("%s: disks %+v", what, rec.Disks)
		}
		r.hasVolumes(rec, what)
		return rec
	}
	for range 2 { // again is no error
		if err := attach(ctx, r); err != nil {
			t.Fatal(err)
		}
		has("attached")
	}
	_, err := r.AttachVolume(ctx, "web", vm.VolumeUse{Ref: "data"}, "/elsewhere")
	r.refused("attach it in another way", errdefs.AlreadyExists, err)
	_, err = r.AttachVolume(ctx, "other", vm.VolumeUse{Ref: "data"}, "/data")
	r.refused("attach what another VM has", errdefs.FailedPrecondition, err)
	r.refused("remove it", errdefs.FailedPrecondition, r.Volumes().Delete(ctx, "data"))
	r.restart()
	rec := has("after a restart of the daemon")
	r.await("web", "ready", ready)
	r.world.Guest(rec.ID).Busy(true)
	r.refused("detach what a program uses", errdefs.FailedPrecondition, detach(ctx, r))
	has("refused")
	r.world.Guest(rec.ID).Busy(false)
	r.must(r.Hibernate(ctx, "web", ""))
	r.refused("detach it from a hibernated VM", errdefs.FailedPrecondition, detach(ctx, r))
	has("hibernated")
	r.must(r.Wake(ctx, "web"))
	has("woken")
	r.must(r.Stop(ctx, "web", 0))
	has("stopped")
	r.must(r.Start(ctx, "web"))
	r.await("web", "ready again", ready)
	has("started")
	if err := detach(ctx, r); err != nil {
		t.Fatal(err)
	}
	rec = r.must(r.Inspect(ctx, "web"))
	r.hasVolumes(rec, "detached")
	if v := r.data(ctx); len(v.Attachments) > 0 || len(rec.Spec.Volumes) > 0 || len(rec.Spec.Mounts) > 0 || len(rec.Attached) > 0 {
		t.Errorf("detached: %+v, %+v", v.Attachments, rec.Spec)
	}
	r.refused("detach it again", errdefs.NotFound, detach(ctx, r))
	next := r.must(r.AttachVolume(ctx, "other", vm.VolumeUse{Ref: "data", ReadOnly: true}, ""))
	r.hasVolumes(next, "attached to the next VM")
	r.must(r.DetachVolume(ctx, "other", string(r.data(ctx).ID)))
	r.must(r.Stop(ctx, "web", 0))
	if err := attach(ctx, r); err != nil {
		t.Fatal(err)
	}
	has("attached while stopped")
	r.must(r.Hibernate(ctx, string(r.must(r.Start(ctx, "web")).ID), ""))
	r.must(r.Wake(ctx, "web"))
	has("attached while stopped, started, hibernated and woken")
	if err := detach(ctx, r); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "other"} {
		if err := r.Remove(ctx, name, true); err != nil {
			t.Fatal(err)
		}
	}
	r.clean()
}

// What cannot be attached is refused, and nothing has changed.
func TestAttachVolumeRefuses(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	dev := vm.OnBehalf(ctx, vm.Owner{Namespace: "dev"})
	for _, c := range []context.Context{ctx, dev} {
		if err := createData(c, r); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Volumes().Create(dev, volume.Spec{Name: "theirs", Size: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	r.must(r.Launch(ctx, spec("web")))
	boots := cloud()
	boots.Name = "boots"
	r.must(r.Launch(dev, boots))
	r.must(r.Launch(dev, attachedSpec("given")))
	r.await("web", "ready", ready)
	for what, tt := range map[string]struct {
		vm, volume, path string
		want             errdefs.Class
	}{
		"no VM":                                 {"none", "data", "/data", errdefs.NotFound},
		"no volume":                             {"web", "none", "/data", errdefs.NotFound},
		"of another owner":                      {"given", "secret", "/data", errdefs.NotFound},
		"the kernel's folder":                   {"web", "data", "/proc/x", errdefs.InvalidArgument},
		"a relative path":                       {"web", "data", "data", errdefs.InvalidArgument},
		"what it holds":                         {"web", "data", "/bad", errdefs.FailedPrecondition},
		"a path in use":                         {"given", "theirs", "/data", errdefs.InvalidArgument},
		"a mount in an image that boots itself": {"boots", "theirs", "/data", errdefs.InvalidArgument},
	} {
		_, err := r.AttachVolume(ctx, tt.vm, vm.VolumeUse{Ref: tt.volume}, tt.path)
		wantClass(t, what, err, tt.want)
	}
	_, err := r.DetachVolume(dev, "given", "data")
	r.refused("detach from a running VM what it was created with", errdefs.FailedPrecondition, err)
	for _, name := range []string{"web", "boots", "given"} {
		r.hasVolumes(r.must(r.Inspect(ctx, name)), name)
	}
	for what, v := range map[string]volume.Volume{"data": r.data(ctx)} {
		if len(v.Attachments) > 0 {
			t.Errorf("%s has the attachments %+v", what, v.Attachments)
		}
	}
	r.must(r.AttachVolume(dev, "boots", vm.VolumeUse{Ref: "theirs"}, ""))
	rec := r.must(r.Inspect(ctx, "boots"))
	r.hasVolumes(rec, "a disk for an image that boots itself")
	r.await("boots", "ready", ready)
	r.world.Guest(rec.ID).Busy(true)
	_, err = r.DetachVolume(dev, "boots", "theirs")
	r.refused("detach what such a guest has mounted", errdefs.FailedPrecondition, err)
	r.world.Guest(rec.ID).Busy(false)
	r.must(r.DetachVolume(dev, "boots", "theirs"))
	r.must(r.Stop(dev, "given", 0))
	r.must(r.DetachVolume(dev, "given", "data"))
	if rec := r.must(r.Inspect(dev, "given")); len(rec.Attached)+len(rec.Spec.Volumes)+len(rec.Spec.Mounts) > 0 || slices.ContainsFunc(rec.Disks, func(d vm.Disk) bool { return d.Role == vm.RoleVolume }) {
		t.Errorf("detached while stopped: %+v", rec)
	}
	for _, name := range []string{"web", "boots", "given"} {
		if err := r.Remove(ctx, name, true); err != nil {
			t.Fatal(err)
		}
	}
	r.clean()
}

// In a VM with containers, each of them gets the mount.
func TestAttachVolumeToContainers(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.must(r.Launch(ctx, severalSpec()))
	r.await("web", "ready", ready)
	if err := attach(ctx, r); err != nil {
		t.Fatal(err)
	}
	rec := r.must(r.Inspect(ctx, "web"))
	for _, c := range rec.Spec.Containers {
		if i := slices.IndexFunc(c.Mounts, func(m vm.Mount) bool { return m.Volume == "data" && m.Path == "/data" }); i < 0 {
			t.Errorf("container %s has the mounts %+v", c.Name, c.Mounts)
		}
	}
	r.hasVolumes(rec, "attached")
	r.must(r.Restart(ctx, "web", 0))
	r.await("web", "ready", ready)
	r.hasVolumes(r.must(r.Inspect(ctx, "web")), "restarted")
	if err := detach(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.hasVolumes(r.must(r.Inspect(ctx, "web")), "detached")
}

// A guest that cannot give a volume back keeps it, and so does its VM: also when the guest does not answer any more.
func TestVolumeThatStays(t *testing.T) {
	var fault atomic.Pointer[string]
	r, ctx := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if f := fault.Load(); f != nil && strings.Contains(*f, call+";") {
				return errdefs.Unavailablef("fault at %s", call)
			}
			return nil
		}
	}), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	for _, calls := range []string{"driver.UnplugDisk;", "driver.UnplugDisk done;", "volumes.Detach;", "driver.UnplugDisk;driver.PlugDisk;", "driver.UnplugDisk;agent.AttachVolume;"} {
		if err := attach(ctx, r); err != nil {
			t.Fatal(err)
		}
		fault.Store(&calls)
		err := detach(ctx, r)
		fault.Store(nil)
		r.refused("detach with a fault at "+calls, errdefs.Unavailable, err)
		if rec := r.must(r.Inspect(ctx, "web")); len(rec.Attached) != 1 || !r.data(ctx).AttachedTo(rec.ID) {
			t.Errorf("%s: %+v", calls, rec.Attached)
		} else if !strings.Contains(calls, "Plug") && !strings.Contains(calls, "AttachVolume") {
			r.hasVolumes(rec, calls)
		}
		if err := detach(ctx, r); err != nil {
			t.Fatal(err)
		}
		r.hasVolumes(r.must(r.Inspect(ctx, "web")), calls)
	}
	calls := "agent.AttachVolume done;agent.DetachVolume;"
	fault.Store(&calls)
	err := attach(ctx, r)
	fault.Store(nil)
	if r.refused("attach with faults", errdefs.Unavailable, err); err != nil && !strings.Contains(err.Error(), "keeps volume data") {
		t.Errorf("it does not say that the volume stays: %v", err)
	}
	r.hasVolumes(r.must(r.Inspect(ctx, "web")), "a volume that cannot be taken back")
	if err := detach(ctx, r); err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// attachScripts attach a volume to a VM, and detach it.
func attachScripts() map[string]script {
	start := func(ctx context.Context, r *rig) error {
		if _, err := r.Launch(ctx, spec("web")); err != nil {
			return err
		}
		return errors.Join(createData(ctx, r), until(ctx, r, ready))
	}
	create := func(ctx context.Context, r *rig) error {
		_, err := r.Create(ctx, spec("web"))
		return errors.Join(err, createData(ctx, r))
	}
	then := func(before func(context.Context, *rig) error) func(context.Context, *rig) error {
		return func(ctx context.Context, r *rig) error {
			if err := before(ctx, r); err != nil {
				return err
			}
			return attach(ctx, r)
		}
	}
	running, created := []vm.State{vm.StateRunning}, []vm.State{vm.StateCreated}
	return map[string]script{
		"attach volume":                  {before: start, act: attach, after: running},
		"detach volume":                  {before: then(start), act: detach, after: running},
		"attach volume to a stopped VM":  {before: create, act: attach, after: created},
		"detach volume of a stopped VM":  {before: then(create), act: detach, after: created},
		"hibernate with attached volume": {before: then(start), act: func(ctx context.Context, r *rig) error { _, err := r.Hibernate(ctx, "web", ""); return err }, after: []vm.State{vm.StateRunning, vm.StateHibernated}},
	}
}
