package engine_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// A disk guest has the files of a volume with a label on a disk, which stays as it is: a guest that sleeps may have it mounted. So has a clone.
func TestFilesOnADisk(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := cloud()
	s.Volumes = []vm.Volume{{Name: "cfg", Kind: vm.VolumeFiles, Label: "CFG", Files: []vm.VolumeFile{{Path: "a", Data: []byte("secret")}}}}
	has := func(when string, rec vm.Record) {
		t.Helper()
		if n := len(rec.Disks); n < 2 || filepath.Base(rec.Disks[n-1].Path) != "files-cfg" || !rec.Disks[n-1].ReadOnly {
			t.Fatalf("%s: its disks are %+v", when, rec.Disks)
		} else if text, err := os.ReadFile(rec.Disks[n-1].Path); err != nil || string(text) != " a=secret" {
			t.Errorf("%s: %q, %v", when, text, err)
		}
		if seed, err := os.ReadFile(rec.Disks[len(rec.Disks)-2].Path); err != nil || strings.Contains(string(seed), "secret") {
			t.Errorf("%s: the seed is %q, %v", when, seed, err)
		}
	}
	has("launched", r.must(r.Launch(ctx, s)))
	r.await("web", "ready", ready)
	if err := r.UpdateVolume(ctx, "web", "cfg", nil); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "stays as it is") {
		t.Errorf("update: %v", err)
	}
	r.saved("gold")
	has("cloned", r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "copy"})))
	r.must(r.Hibernate(ctx, "web", ""))
	has("awake", r.must(r.Wake(ctx, "web")))

	s = spec("oci")
	s.Volumes = []vm.Volume{{Name: "cfg", Kind: vm.VolumeFiles, Label: "CFG"}}
	if _, err := r.Launch(ctx, s); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "label CFG") {
		t.Errorf("a container image: %v", err)
	}
	s = cloud()
	s.Name, s.Volumes = "mounted", []vm.Volume{{Name: "cfg", Kind: vm.VolumeFiles, Label: "CFG"}}
	s.Mounts = []vm.Mount{{Volume: "cfg", Path: "/etc/cfg"}}
	if _, err := r.Launch(ctx, s); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "leave out the path") {
		t.Errorf("a mounted disk: %v", err)
	}
	s.Mounts, s.Volumes[0].Label = nil, "two words"
	if _, err := r.Launch(ctx, s); !errdefs.IsInvalid(err) {
		t.Errorf("a label that is none: %v", err)
	}
}
