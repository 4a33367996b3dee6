package container

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestValidate(t *testing.T) {
	with := func(change func(*Spec)) Spec {
		s := Spec{ID: "web", Image: "nginx"}
		change(&s)
		return s
	}
	mount := func(source, path string) Spec {
		return with(func(s *Spec) { s.Mounts = []Mount{{Source: source, Path: path}} })
	}
	good := []Spec{
		with(func(*Spec) {}),
		with(func(s *Spec) { s.ID = "a.b_c-D9" }),
		mount("/srv/x", "/data"),
		mount("/srv/x", "/devices"),
		with(func(s *Spec) { s.Network.NetNS = "/run/netns/web" }),
		with(func(s *Spec) { s.Host.BindPaths = []string{"/dev", "/sys", "/perm"} }),
		with(func(s *Spec) { s.Limits = Limits{CPU: 100, Memory: 64 << 20, PIDs: 10} }),
	}
	for _, s := range good {
		if err := s.Validate(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
	}
	bad := map[string]Spec{
		"no ID":               {Image: "nginx"},
		"ID with a path":      {ID: "../x", Image: "nginx"},
		"ID of dots":          {ID: "..", Image: "nginx"},
		"long ID":             {ID: strings.Repeat("a", 77), Image: "nginx"},
		"no image":            {ID: "web"},
		"null byte":           with(func(s *Spec) { s.Args = []string{"a\x00b"} }),
		"variable":            with(func(s *Spec) { s.Env = []vm.EnvVar{{Name: "A=B"}} }),
		"variable, no name":   with(func(s *Spec) { s.Env = []vm.EnvVar{{Value: "B"}} }),
		"working folder":      with(func(s *Spec) { s.WorkDir = "srv" }),
		"hostname":            with(func(s *Spec) { s.Hostname = "a\nb" }),
		"two networks":        with(func(s *Spec) { s.Network = Network{Host: true, NetNS: "/run/netns/a"} }),
		"relative namespace":  with(func(s *Spec) { s.Network.NetNS = "a" }),
		"large file":          with(func(s *Spec) { s.Files.Hosts = strings.Repeat("x", maxFile+1) }),
		"relative source":     mount("srv", "/data"),
		"relative path":       mount("/srv", "data"),
		"climbing path":       mount("/srv", "/data/../../etc"),
		"climbing source":     mount("/srv/../etc", "/data"),
		"root":                mount("/srv", "/"),
		"proc":                mount("/srv", "/proc/sys"),
		"dev":                 mount("/srv", "/dev"),
		"two mounts":          with(func(s *Spec) { s.Mounts = []Mount{{Source: "/a", Path: "/x"}, {Source: "/b", Path: "/x"}} }),
		"mount and host path": with(func(s *Spec) { s.Mounts, s.Host.BindPaths = []Mount{{Source: "/a", Path: "/x"}}, []string{"/x"} }),
		"the whole node":      with(func(s *Spec) { s.Host.BindPaths = []string{"/"} }),
		"CPU":                 with(func(s *Spec) { s.Limits.CPU = 1 }),
		"memory":              with(func(s *Spec) { s.Limits.Memory = 1 << 20 }),
		"negative memory":     with(func(s *Spec) { s.Limits.Memory = -1 }),
		"PIDs":                with(func(s *Spec) { s.Limits.PIDs = -1 }),
		"labels":              with(func(s *Spec) { s.Labels = map[string]string{"a": strings.Repeat("x", maxLabelText)} }),
	}
	for name, s := range bad {
		t.Run(name, func(t *testing.T) {
			if err := s.Validate(); !errdefs.IsInvalid(err) {
				t.Errorf("got %v, want InvalidArgument", err)
			}
		})
	}
}
