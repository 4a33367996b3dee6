package vm

import (
	"strings"
	"testing"
)

// TestSavedContainer: a snapshot does not know the folders of its node, and a container that resumes has those of its new one at the same places.
func TestSavedContainer(t *testing.T) {
	dir := func(path string, readOnly, file bool) *HostDir {
		return &HostDir{Path: path, ReadOnly: readOnly, File: file, Trusted: true}
	}
	was := Container{
		Name: "a", Kind: ContainerEphemeral, Image: "sha256:1", Manual: true, PIDs: PIDs{Own: true}, Process: Process{Entrypoint: []string{"run"}},
		Volumes: []Volume{{Name: "m0", Kind: VolumeDir, Dir: dir("/old/secret", true, false)}, {Name: "m1", Kind: VolumeDir, Dir: dir("/old/hosts", false, true)}},
		Mounts:  []Mount{{Volume: "m0", Path: "/secret", ReadOnly: true}, {Volume: "m1", Path: "/etc/hosts", SubPath: DirFile}},
	}
	saved := was.Saved()
	for _, v := range saved.Volumes {
		if v.Dir.Path != savedDir || v.Dir.Trusted {
			t.Errorf("saved: %+v", v.Dir)
		}
	}
	if was.Volumes[0].Dir.Path != "/old/secret" {
		t.Error("the container itself has changed")
	}
	if err := saved.ValidateEphemeral(); err != nil {
		t.Error(err)
	}
	next := func() Container { // in another order, under other names
		return Container{
			Name: "x", Image: "other", Labels: map[string]string{"pod": "next"}, Resources: &Resources{CPULimit: 100}, Process: Process{Entrypoint: []string{"other"}},
			Volumes: []Volume{{Name: "n0", Kind: VolumeDir, Dir: dir("/new/hosts", false, true)}, {Name: "n1", Kind: VolumeDir, Dir: dir("/new/secret", true, false)}},
			Mounts:  []Mount{{Volume: "n0", Path: "/etc/hosts", SubPath: DirFile}, {Volume: "n1", Path: "/secret", ReadOnly: true}},
		}
	}
	got, err := saved.Resumed(next())
	if err != nil {
		t.Fatal(err)
	}
	if got.Name != "a" || got.Image != "sha256:1" || !got.Manual || !got.PIDs.Own || got.Process.Entrypoint[0] != "run" || got.Labels["pod"] != "next" || got.Resources.CPULimit != 100 {
		t.Errorf("resumed: %+v", got)
	}
	for i, want := range []string{"/new/secret", "/new/hosts"} {
		if v := got.Volumes[i]; v.Dir.Path != want || !v.Dir.Trusted || v.Name != was.Volumes[i].Name || got.Mounts[i] != was.Mounts[i] {
			t.Errorf("volume %d: %+v, %+v", i, v.Dir, got.Mounts[i])
		}
	}
	if saved.Volumes[0].Dir.Path != savedDir {
		t.Error("the saved container has changed")
	}
	for what, change := range map[string]func(*Container){
		"2 mounts in the snapshot, and 1 now": func(c *Container) { c.Mounts = c.Mounts[:1] },
		"a mount at /secret":                  func(c *Container) { c.Mounts[1].Path = "/other" },
		"else mounted at /etc/hosts":          func(c *Container) { c.Volumes[0].Dir.File = false },
		"else mounted at /secret":             func(c *Container) { c.Volumes[1].Dir.ReadOnly = false },
		"something else mounted":              func(c *Container) { c.Volumes[1] = Volume{Name: "n1", Kind: VolumeImage, Image: "i"} },
		"2 now; give it the same":             func(c *Container) { c.MessagePath = "/dev/termination-log" },
	} {
		c := next()
		change(&c)
		if _, err := saved.Resumed(c); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
