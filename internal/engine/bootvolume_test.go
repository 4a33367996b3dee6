package engine_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// rootSpec is a VM that boots from the volume root and has the volume data, too.
func rootSpec(name string) vm.Spec {
	s := cloud()
	s.Name, s.Image = name, vm.FromVolume("root")
	s.Volumes = []vm.Volume{
		{Name: "other", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "data"}},
		{Name: "root", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "system"}},
	}
	return s
}

// places describes the disks of a VM in their order: their roles, and for volumes their names.
func places(rec vm.Record) string {
	var out []string
	for _, d := range rec.Disks {
		word := string(d.Role)
		for _, a := range rec.Attached {
			if a.Serial == d.Serial {
				word += " " + a.Volume
			}
		}
		out = append(out, word)
	}
	return strings.Join(out, ", ")
}

func (r *rig) placed(what, want string, rec vm.Record) {
	r.t.Helper()
	if d := diff.Of(want, places(rec)); d != "" {
		r.t.Errorf("%s: disks %s", what, d)
	}
}

// Saved state knows the disks of a guest by their places, so these never change.
func TestDisksKeepTheirPlaces(t *testing.T) {
	for name, tt := range map[string]struct {
		make func(r *rig) vm.Spec
		want string
	}{
		"of an image": {func(*rig) vm.Spec {
			s := cloud()
			s.Volumes = []vm.Volume{{Name: "other", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "data"}}}
			return s
		}, "cow, volume other, cidata"},
		"with files": {func(*rig) vm.Spec {
			s := cloud()
			s.Volumes = []vm.Volume{{Name: "cfg", Kind: vm.VolumeFiles, Label: "CFG"}, {Name: "other", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "data"}}}
			return s
		}, "cow, volume other, cidata, cidata"},
		"of a volume": {func(r *rig) vm.Spec {
			r.system()
			return rootSpec("web")
		}, "volume root, volume other, cidata"},
	} {
		t.Run(name, func(t *testing.T) {
			r, ctx := newRig(t), t.Context()
			if err := createData(ctx, r); err != nil {
				t.Fatal(err)
			}
			r.placed("launched", tt.want, r.must(r.Launch(ctx, tt.make(r))))
			r.await("web", "ready", ready)
			r.saved("gold")
			r.placed("cloned", tt.want, r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "copy"})))
			r.placed("hibernated", tt.want, r.must(r.Hibernate(ctx, "web", "")))
			r.placed("awake", tt.want, r.must(r.Wake(ctx, "web")))
			r.await("web", "ready", ready)
			r.must(r.Stop(ctx, "web", -1))
			r.placed("started", tt.want, r.must(r.Start(ctx, "web")))
			r.await("web", "ready", ready)
			r.restart()
			r.placed("adopted", tt.want, r.must(r.Inspect(ctx, "web")))
		})
	}
}

// system creates the volume from which rootSpec boots.
func (r *rig) system() {
	r.t.Helper()
	if _, err := r.Volumes().Import(r.t.Context(), volume.Spec{Name: "system", Size: 1 << 20}, bytes.NewReader([]byte("a system")), nil); err != nil {
		r.t.Fatal(err)
	}
}

// A VM that boots from a volume needs no image, and what it writes is there when it boots again, also as another VM.
func TestBootFromVolume(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.system()
	rec := r.must(r.Launch(ctx, rootSpec("web")))
	if rec.ImageType != vm.ImageDisk || rec.ImageDigest != "" || rec.Boot.Firmware == "" {
		t.Errorf("record: %+v", rec)
	}
	r.await("web", "ready", ready)
	_, err := r.DetachVolume(ctx, "web", "system")
	r.refused("detach it", errdefs.FailedPrecondition, err)
	r.refused("remove it", errdefs.FailedPrecondition, r.Volumes().Delete(ctx, "system"))
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.must(r.Launch(ctx, rootSpec("again")))
	if got := r.content(ctx, "system"); got != "a system" {
		t.Errorf("the volume holds %q", got)
	}
	if err := r.Remove(ctx, "again", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

func TestBootFromVolumeRefused(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	if err := createData(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.system()
	for what, change := range map[string]func(s *vm.Spec){
		"a volume that it does not have": func(s *vm.Spec) { s.Image = vm.FromVolume("none") },
		"no name":                        func(s *vm.Spec) { s.Image = vm.FromVolume("") },
		"a volume of files":              func(s *vm.Spec) { s.Volumes[1] = vm.Volume{Name: "root", Kind: vm.VolumeEmpty} },
		"a command":                      func(s *vm.Spec) { s.Process.Args = []string{"true"} },
		"a mount":                        func(s *vm.Spec) { s.Mounts = []vm.Mount{{Volume: "root", Path: "/x"}} },
		"containers": func(s *vm.Spec) {
			s.Containers = []vm.Container{{Name: "a", Image: "demo", Kind: vm.ContainerApp}}
		},
	} {
		s := rootSpec("web")
		s.Volumes = slices.Clone(s.Volumes)
		change(&s)
		_, err := r.Launch(ctx, s)
		r.refused(what, errdefs.InvalidArgument, err)
	}
	s := rootSpec("web")
	s.Volumes[1].Disk = &vm.VolumeUse{Ref: "missing"}
	_, err := r.Launch(ctx, s)
	r.refused("a volume that does not exist", errdefs.NotFound, err)
	r.clean()
}
