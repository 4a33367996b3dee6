package vm

import (
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func withVolumes(change func(*Spec)) Spec {
	s := Spec{Name: "a", Image: "b", Volumes: []Volume{
		{Name: "conf", Kind: VolumeFiles, Files: []VolumeFile{{Path: "a/b", Data: []byte("x"), Mode: 0o644}, {Path: "c", Mode: 0o400}}},
		{Name: "tmp", Kind: VolumeEmpty, Memory: true, SizeLimit: 1 << 20},
	}, Mounts: []Mount{{Volume: "conf", Path: "/etc/app"}, {Volume: "conf", Path: "/etc/one", SubPath: "a/b"}, {Volume: "tmp", Path: "/dev/shm"}}}
	change(&s)
	return s.Default()
}

func TestVolumesAreValidated(t *testing.T) {
	if err := withVolumes(func(*Spec) {}).Validate(); err != nil {
		t.Fatal(err)
	}
	if err := withVolumes(func(s *Spec) { s.Volumes[1].Memory = false }).Validate(); err != nil {
		t.Errorf("a limit on disk: %v", err)
	}
	file := func(path string) func(*Spec) { return func(s *Spec) { s.Volumes[0].Files[0].Path = path } }
	mount := func(path string) func(*Spec) { return func(s *Spec) { s.Mounts[0].Path = path } }
	sub := func(path string) func(*Spec) { return func(s *Spec) { s.Mounts[0].SubPath = path } }
	minus, big := int64(-1), int64(1<<32-1)
	for name, change := range map[string]func(*Spec){
		"name twice":         func(s *Spec) { s.Volumes[1].Name = "conf" },
		"name with slash":    func(s *Spec) { s.Volumes[0].Name = "a/b" },
		"name of dots":       func(s *Spec) { s.Volumes[0].Name = ".." },
		"no name":            func(s *Spec) { s.Volumes[0].Name = "" },
		"long name":          func(s *Spec) { s.Volumes[0].Name = strings.Repeat("a", 64) },
		"kind":               func(s *Spec) { s.Volumes[0].Kind = "drum" },
		"files in memory":    func(s *Spec) { s.Volumes[0].Memory = true },
		"empty with files":   func(s *Spec) { s.Volumes[1].Files = s.Volumes[0].Files },
		"negative limit":     func(s *Spec) { s.Volumes[1].SizeLimit = -1 },
		"limit of files":     func(s *Spec) { s.Volumes[0].SizeLimit = 1 << 20 },
		"image without name": func(s *Spec) { s.Volumes[1] = Volume{Name: "files", Kind: VolumeImage} },
		"image with a group": func(s *Spec) {
			s.Volumes[1] = Volume{Name: "files", Kind: VolumeImage, Image: "demo", Group: new(int64)}
		},
		"image in memory": func(s *Spec) { s.Volumes[1] = Volume{Name: "files", Kind: VolumeImage, Image: "demo", Memory: true} },
		"image with files": func(s *Spec) {
			s.Volumes[1] = Volume{Name: "files", Kind: VolumeImage, Image: "demo", Files: s.Volumes[0].Files}
		},
		"empty with an image":   func(s *Spec) { s.Volumes[1].Image = "demo" },
		"negative group":        func(s *Spec) { s.Volumes[0].Group = &minus },
		"group that means none": func(s *Spec) { s.Volumes[0].Group = &big },
		"user":                  func(s *Spec) { s.Volumes[0].Files[0].UID = &big },
		"mode":                  func(s *Spec) { s.Volumes[0].Files[0].Mode = 0o4755 },
		"too large":             func(s *Spec) { s.Volumes[0].Files[0].Data = make([]byte, MaxVolumeSize) },
		"too large together": func(s *Spec) {
			for _, n := range []string{"1", "2", "3", "4", "5"} {
				s.Volumes = append(s.Volumes, Volume{Name: n, Kind: VolumeFiles, Files: []VolumeFile{{Path: "f", Data: make([]byte, MaxVolumeSize-1)}}})
			}
		},
		"too many files":   func(s *Spec) { s.Volumes[0].Files = make([]VolumeFile, MaxVolumeFiles+1) },
		"too many volumes": func(s *Spec) { s.Volumes = make([]Volume, MaxVolumes+1) },
		"file twice":       file("c"), "file and folder": file("c/d"), "folder and file": func(s *Spec) { s.Volumes[0].Files[1].Path = "a" },
		"absolute file": file("/a"), "file outside": file("../a"), "file outside later": file("a/../../b"), "unclean file": file("a//b"),
		"file with dots first": file("..data"), "file with NUL": file("a\x00"), "no path": file(""), "itself": file("."), "long part": file(strings.Repeat("a", 256)),
		"unknown volume": func(s *Spec) { s.Mounts[0].Volume = "gone" },
		"mount twice":    mount("/etc/one"), "root": mount("/"), "relative": mount("etc"), "unclean": mount("/etc/"), "climbing": mount("/etc/../proc"),
		"proc": mount("/proc"), "below sys": mount("/sys/fs"), "dev": mount("/dev"), "device": mount("/dev/null"), "no mount path": mount(""), "mount NUL": mount("/a\x00"),
		"absolute sub path": sub("/a"), "sub path outside": sub(".."), "unclean sub path": sub("a/"), "sub path NUL": sub("\x00"),
	} {
		if err := withVolumes(change).Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := withVolumes(mount("/system")).Validate(); err != nil {
		t.Errorf("/system is not /sys: %v", err)
	}
}

// FuzzPaths: an accepted file path stays inside its volume.
func FuzzPaths(f *testing.F) {
	for _, p := range []string{"a", "a/b", "..", "../a", "/a", "a/..", "a/../..", ".", "", "..data", "a\x00b", "a//b", "a/./b"} {
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, p string) {
		err := ValidateFiles("v", []VolumeFile{{Path: p}})
		bad := strings.HasPrefix(p, "/") || strings.HasPrefix(p, "..") || strings.Contains("/"+p+"/", "/../") || strings.Contains(p, "\x00") || p == ""
		if bad && err == nil {
			t.Errorf("%q passes", p)
		}
		if !bad && err != nil && !strings.Contains("/"+p+"/", "/./") && !strings.Contains(p+"/", "//") && len(p) <= maxPathPart {
			t.Errorf("%q does not pass: %v", p, err)
		}
	})
}

// A volume that is added to a spec and taken from it leaves the spec as it was.
func TestSpecWithVolume(t *testing.T) {
	one := Spec{Name: "web"}
	several := Spec{Name: "web", Containers: []Container{{Name: "a", Mounts: []Mount{{Volume: "x", Path: "/x"}}}, {Name: "b"}}}
	v := Volume{Name: "data", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "d"}}
	for _, s := range []Spec{one, several} {
		for _, path := range []string{"", "/data"} {
			with := s.WithVolume(v, path)
			mounts := with.Mounts
			for _, c := range with.Containers {
				mounts = append(mounts, c.Mounts...)
			}
			n := 0
			for _, m := range mounts {
				if m.Volume == "data" && m.Path == "/data" {
					n++
				}
			}
			want := max(1, len(s.Containers))
			if path == "" {
				want = 0
			}
			if n != want || len(with.Volumes) != 1 || with.MountPath("data") != path {
				t.Errorf("with the volume at %q: %+v", path, with)
			}
			if got := with.WithoutVolume("data"); !reflect.DeepEqual(got, s) {
				t.Errorf("without it: %+v, want %+v", got, s)
			}
		}
	}
}

func TestHostFile(t *testing.T) {
	ok := Spec{
		Name: "web", Image: "a",
		Volumes: []Volume{{Name: "f", Kind: VolumeDir, Dir: &HostDir{Path: "/srv/f", File: true}}},
		Mounts:  []Mount{{Volume: "f", Path: "/etc/f", SubPath: DirFile}},
	}.Default()
	if err := ok.Validate(); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(s *Spec){
		"the folder around it": func(s *Spec) { s.Mounts[0].SubPath = "" },
		"a part":               func(s *Spec) { s.Mounts[0].SubPath = "file/x" },
		"a part, in a container": func(s *Spec) {
			s.Containers = []Container{{Name: "a", Image: "a", Kind: ContainerApp, Mounts: []Mount{{Volume: "f", Path: "/f", SubPath: "x"}}}}
		},
		"a group":      func(s *Spec) { g := int64(1); s.Volumes[0].Group = &g },
		"published":    func(s *Spec) { s.Volumes[0].Dir.Published = true },
		"the root":     func(s *Spec) { s.Volumes[0].Dir.Path = "/" },
		"of no path":   func(s *Spec) { s.Volumes[0].Dir.Path = "" },
		"a dotted one": func(s *Spec) { s.Volumes[0].Dir.Path = "/srv/../etc/shadow" },
	} {
		s := ok.Clone()
		change(&s)
		if err := s.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
