package vm

import (
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestValidateSandbox(t *testing.T) {
	ok := Spec{Name: "pod", Sandbox: true, Volumes: []Volume{{Name: "v", Kind: VolumeEmpty}}}
	if err := ok.Default().Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Spec){
		"image of its own":         func(s *Spec) { s.Image = "demo" },
		"process of its own":       func(s *Spec) { s.Process.Env = []EnvVar{{"A", "b"}} },
		"containers when it boots": func(s *Spec) { s.Containers = []Container{{Name: "c", Image: "i", Kind: ContainerApp}} },
		"mounts of its own":        func(s *Spec) { s.Mounts = []Mount{{Volume: "v", Path: "/v"}} },
		"cloud-init":               func(s *Spec) { s.CloudInit = &CloudInit{} },
		"guest that boots itself":  func(s *Spec) { s.Graphics = true },
		"the name " + SharedVolume: func(s *Spec) { s.Volumes[0].Name = SharedVolume },
		"only containers of a sandb": func(s *Spec) {
			s.Volumes[0] = Volume{Name: "v", Kind: VolumeDir, Dir: &HostDir{Path: "/d", Trusted: true}}
		},
		"only a sandbox can be in": func(s *Spec) { s.Sandbox, s.Image, s.CgroupParent = false, "demo", "/kubepods/pod1" },
	} {
		s := ok.Clone()
		change(&s)
		if err := s.Default().Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestValidateCgroup(t *testing.T) {
	s := Spec{Name: "pod", Sandbox: true}.Default()
	for _, good := range []string{"", "/kubepods/burstable/pod1", "/kubepods.slice/kubepods-pod1_2.slice", "/..a"} {
		if s.CgroupParent = good; s.Validate() != nil {
			t.Errorf("%q: %v", good, s.Validate())
		}
	}
	for _, bad := range []string{"/", "kubepods", "/a/", "/a//b", "/a/../b", "/..", "/a/.", "/a\nb", "/a\x00", "/\xff", "/" + strings.Repeat("a", 256), strings.Repeat("/a", 2100)} {
		if s.CgroupParent = bad; !errdefs.IsInvalid(s.Validate()) {
			t.Errorf("%q: %v", bad, s.Validate())
		}
	}
}

func TestOwnVolumes(t *testing.T) {
	dir := func(name string, d HostDir) Volume { return Volume{Name: name, Kind: VolumeDir, Dir: &d} }
	c := Container{
		Name: "app", Image: "i", Kind: ContainerEphemeral,
		Volumes: []Volume{dir("data", HostDir{Path: "/d"}), dir("file", HostDir{Path: "/f", File: true, ReadOnly: true})},
		Mounts: []Mount{
			{Volume: "data", Path: "/data", SubPath: "part"},
			{Volume: "data", Path: "/all", ReadOnly: true},
			{Volume: "file", Path: "/etc/hosts", SubPath: DirFile},
			{Volume: "of-vm", Path: "/v"},
		},
	}
	of := []Volume{{Name: "of-vm", Kind: VolumeEmpty}}
	if err := c.ValidateEphemeral(); err != nil {
		t.Error(err)
	}
	if err := c.ValidateIn(of); err != nil {
		t.Error(err)
	}
	want := []Mount{
		{Volume: SharedVolume, Path: "/data", SubPath: "app/0/part"},
		{Volume: SharedVolume, Path: "/all", SubPath: "app/0", ReadOnly: true},
		{Volume: SharedVolume, Path: "/etc/hosts", SubPath: "app/1", ReadOnly: true},
		{Volume: "of-vm", Path: "/v"},
	}
	if got := c.GuestMounts(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	for _, name := range []string{"data", "app.data"} {
		if err := c.ValidateIn([]Volume{{Name: name, Kind: VolumeEmpty}, of[0]}); err == nil {
			t.Errorf("its volume has the name of the volume %s of the VM, here or in the guest", name)
		}
	}
	group := int64(1)
	for want, change := range map[string]func(*Container){
		"given to no group": func(c *Container) { c.Volumes[0].Group = &group },
		"a folder, a file":  func(c *Container) { c.Volumes[0] = Volume{Name: "e", Kind: VolumeEmpty} },
		"shown as a device": func(c *Container) { c.Mounts[0].SubPath, c.Mounts[0].Device = "", true },
		"has the capacity": func(c *Container) {
			c.Volumes[0] = Volume{Name: "data", Kind: VolumeHostDisk, HostDisk: &HostDisk{Path: "/dev/x", Trusted: true, Capacity: 1}}
		},
		"two of its volumes":  func(c *Container) { c.Volumes[1].Name = "data" },
		"mount its part":      func(c *Container) { c.Mounts[2].SubPath = "" },
		"is there already":    func(c *Container) { c.Volumes[0].Dir = &HostDir{Path: "/d", Trusted: true, Create: true} },
		"not the path of":     func(c *Container) { c.Volumes[0].Dir = &HostDir{Path: "/d/../e"} },
		"at most 256":         func(c *Container) { c.Volumes = make([]Volume, MaxMounts+1) },
		"; choose one":        func(c *Container) { c.PIDs = PIDs{Own: true, Of: "other"} },
		"processes and those": func(c *Container) { c.PIDs.Of = c.Name },
		"a file of the node ": func(c *Container) { c.Volumes[1].Group = &group },
	} {
		bad := c.Clone()
		change(&bad)
		if err := bad.ValidateEphemeral(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
