package cloudinit

import (
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// Shared folders are mounted by the tag that their place in the spec gives them, beside the mounts of the user.
func TestMounts(t *testing.T) {
	dir := func(name string, readOnly bool) vm.Volume {
		return vm.Volume{Name: name, Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/srv/" + name, ReadOnly: readOnly}}
	}
	mounts := MountsOf(vm.Spec{
		Volumes: []vm.Volume{dir("unused", false), {Name: "disk", Kind: vm.VolumeDisk}, dir("data", false), dir("fixed", true)},
		Mounts: []vm.Mount{
			{Volume: "fixed", Path: "/fixed"}, {Volume: "disk", Path: "/disk"}, {Volume: "data", Path: "/data"}, {Volume: "data", Path: "/look", ReadOnly: true},
		},
	})
	want := [][]string{
		{"cocoon:d001", "/data", "virtiofs", "rw,nofail", "0", "0"},
		{"cocoon:d001", "/look", "virtiofs", "ro,nofail", "0", "0"},
		{"cocoon:d002", "/fixed", "virtiofs", "ro,nofail", "0", "0"},
	}
	mine := []string{"sdb", "/mine"}
	for name, c := range map[string]struct {
		given vm.CloudInit
		in    string // the file of the seed
		want  [][]string
	}{
		"alone":             {vm.CloudInit{}, "user-data", want},
		"beside the user's": {vm.CloudInit{UserData: "#cloud-config\nmounts:\n- [sdb, /mine]\n"}, "user-data", append([][]string{mine}, want...)},
		"beside a script":   {vm.CloudInit{UserData: "#!/bin/sh\n"}, "vendor-data", want},
	} {
		s, err := Build(Guest{ID: "id", Hostname: "web", Mounts: mounts}, c.given)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var doc struct{ Mounts [][]string }
		if err := yaml.Unmarshal(s.Files[c.in], &doc); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if d := diff.Of(c.want, doc.Mounts); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
	if err := Validate(vm.CloudInit{UserData: "#!/bin/sh\n", VendorData: "#!/bin/sh\n"}, mounts...); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "shared folders need a #cloud-config") {
		t.Errorf("two scripts: %v", err)
	}
	for _, p := range []string{"", "data", "/", "/a/../b", "/a b", "/a\nb / x", "/a\tb", "/a\\040b", "/a#b"} {
		if err := Validate(vm.CloudInit{}, Mount{Tag: "cocoon:d000", Path: p}); !errdefs.IsInvalid(err) {
			t.Errorf("path %q: %v", p, err)
		}
	}
}
