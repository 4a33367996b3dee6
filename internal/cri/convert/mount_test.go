package convert_test

import (
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// finds is a node with a folder, a file and a disk, and a store with each image that is asked for.
var finds = convert.Finds{
	Path: func(path string) (convert.Source, error) {
		return convert.Source{Path: "/real" + path, File: path == "/file" || path == "/message"}, nil
	},
	Device: func(path string) (string, error) {
		if path == "/pods/claim" {
			return "/dev/loop7", nil
		}
		return "", nil
	},
	Image: func(i *cri.ImageSpec) (string, error) {
		if i.GetImage() == "" {
			return "", errdefs.NotFoundf("no image")
		}
		return "sha256:" + i.GetImage(), nil
	},
}

// TestMounted: folders and files of the node, images and block devices are volumes of the container alone.
func TestMounted(t *testing.T) {
	from := container()
	from.Mounts = []*cri.Mount{
		{HostPath: "/folder", ContainerPath: "/data/"},
		{HostPath: "/file", ContainerPath: "/etc/hosts", Readonly: true},
		{HostPath: "/message", ContainerPath: "/dev/termination-log"},
		{ContainerPath: "/models", Image: &cri.ImageSpec{Image: "ab"}},
		{ContainerPath: "/part", Image: &cri.ImageSpec{Image: "ab"}, ImageSubPath: "../a/b/"},
	}
	from.Devices = []*cri.Device{{HostPath: "/pods/claim", ContainerPath: "/dev/xvda", Permissions: "mrw"}, {HostPath: "/pods/claim", ContainerPath: "/disk", Permissions: "r"}}
	c, err := convert.Container(from, "name")
	if err != nil {
		t.Fatal(err)
	}
	if c, err = convert.Mounted(c, from, finds); err != nil {
		t.Fatal(err)
	}
	if err := c.ValidateEphemeral(); err != nil {
		t.Errorf("the engine refuses it: %v", err)
	}
	if err := c.ValidateIn(nil); err != nil {
		t.Errorf("the engine refuses it: %v", err)
	}
	dir := func(name, path string, file, ro bool) vm.Volume {
		return vm.Volume{Name: name, Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: path, File: file, ReadOnly: ro, Trusted: true}}
	}
	disk := func(name string, ro bool) vm.Volume {
		return vm.Volume{Name: name, Kind: vm.VolumeHostDisk, HostDisk: &vm.HostDisk{Path: "/dev/loop7", ReadOnly: ro, Trusted: true}}
	}
	image := func(name string) vm.Volume { return vm.Volume{Name: name, Kind: vm.VolumeImage, Image: "sha256:ab"} }
	if d := diff.Of([]vm.Volume{dir("m0", "/real/folder", false, false), dir("m1", "/real/file", true, true), image("m3"), image("m4"), disk("d0", false), disk("d1", true)}, c.Volumes); d != "" {
		t.Error(d)
	}
	want := []vm.Mount{
		{Volume: "m0", Path: "/data"},
		{Volume: "m1", Path: "/etc/hosts", SubPath: vm.DirFile, ReadOnly: true},
		{Volume: "m3", Path: "/models", ReadOnly: true},
		{Volume: "m4", Path: "/part", SubPath: "a/b", ReadOnly: true},
		{Volume: "d0", Path: "/dev/xvda", Device: true},
		{Volume: "d1", Path: "/disk", ReadOnly: true, Device: true},
	}
	if d := diff.Of(want, c.Mounts); d != "" {
		t.Error(d)
	}
	if c.MessagePath != "/dev/termination-log" {
		t.Errorf("the path of the message is %q", c.MessagePath)
	}
}

// TestRefusedMounts: a device that is no disk is refused, and so is an image that is missing.
func TestRefusedMounts(t *testing.T) {
	for class, change := range map[errdefs.Class]func(*cri.ContainerConfig){
		errdefs.InvalidArgument: func(c *cri.ContainerConfig) { c.Devices = []*cri.Device{{HostPath: "/dev/kvm"}} },
		errdefs.NotFound:        func(c *cri.ContainerConfig) { c.Mounts = []*cri.Mount{{ContainerPath: "/m", Image: &cri.ImageSpec{}}} },
	} {
		c := container()
		change(c)
		if _, err := convert.Mounted(vm.Container{}, c, finds); !errdefs.Is(err, class) {
			t.Errorf("got %v, want %v", err, class)
		}
	}
}
