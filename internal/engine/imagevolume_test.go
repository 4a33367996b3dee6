package engine_test

import (
	"reflect"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

func imageVolumeSpec() vm.Spec {
	s := severalSpec()
	s.Volumes = []vm.Volume{{Name: "files", Kind: vm.VolumeImage, Image: "layered"}, {Name: "same", Kind: vm.VolumeImage, Image: "layered"}}
	s.Containers[1].Mounts = []vm.Mount{{Volume: "files", Path: "/files"}, {Volume: "same", Path: "/same"}}
	return s
}

// The image of a volume is a disk of the VM and in use as long as the VM or a snapshot of it exists, whatever becomes of the VM.
func TestImageVolumes(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, imageVolumeSpec()))
	r.await("web", "ready", ready)
	stands := func(ref string) {
		t.Helper()
		now := r.await(ref, "ready", ready)
		if len(now.Disks) != 2 || len(now.ImageVolumes) != 2 || !r.ImageInUse("sha256:layered") {
			t.Fatalf("%s has the disks %+v, volumes %+v", ref, now.Disks, now.ImageVolumes)
		}
		for _, v := range now.ImageVolumes {
			if v.ImageDigest != "sha256:layered" || v.ImageManifest != "" || !reflect.DeepEqual(v.Layers, rec.ImageVolumes[0].Layers) || len(v.Layers) != 1 {
				t.Errorf("%s: %+v", ref, v)
			}
		}
	}
	told := func(id vm.ID) {
		t.Helper()
		if got := r.world.Guest(id).Identity().VolumeLayers; len(got) != 2 || !reflect.DeepEqual(got["same"], rec.ImageVolumes[1].Layers) {
			t.Errorf("the guest was told %+v", got)
		}
	}
	stands("web")
	told(rec.ID)
	r.must(r.Restart(ctx, "web", 0))
	stands("web")
	told(rec.ID)

	r.must(r.Hibernate(ctx, "web", ""))
	if !r.ImageInUse("sha256:layered") {
		t.Error("the image of a hibernated VM is nobody's")
	}
	r.restart()
	r.must(r.Wake(ctx, "web"))
	stands("web")
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "live"}))
	stands("live")
	cold := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "cold", Cold: true}))
	stands("cold")
	told(cold.ID)
	r.must(r.Restore(ctx, "web", "gold"))
	stands("web")
	for _, ref := range []string{"web", "live", "cold"} {
		if err := r.Remove(ctx, ref, true); err != nil {
			t.Error(err)
		}
	}
	if !r.ImageInUse("sha256:layered") {
		t.Error("the image of a saved VM's volume is nobody's")
	}
	r.clearAll("gold")
}

func TestImageVolumesThatCannotBe(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	for image, class := range map[string]errdefs.Class{"disk": errdefs.InvalidArgument, "none": errdefs.NotFound} {
		s := imageVolumeSpec()
		s.Volumes[1].Image = image
		_, err := r.Launch(ctx, s)
		wantClass(t, "the image "+image, err, class)
	}
	s := cloud()
	s.Volumes = []vm.Volume{{Name: "files", Kind: vm.VolumeImage, Image: "layered"}}
	_, err := r.Launch(ctx, s)
	wantClass(t, "a VM that boots itself", err, errdefs.InvalidArgument)
}
