package guestagent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// cgroupLike returns a folder that stands for a control group with that memory usage. Its files keep what is written to them.
func cgroupLike(t *testing.T, memory string) (path string, fd *int) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"cpu.max": "", "cpu.weight": "", "memory.oom.group": "", "memory.max": "max", "memory.current": memory, "memory.stat": "inactive_file 0\n", "cpu.stat": "usage_usec 1\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(n) })
	return dir, &n
}

// TestResizeContainers: all containers of a request are resized or none is.
func TestResizeContainers(t *testing.T) {
	paths, groups := map[string]string{}, map[string]*int{}
	paths["one"], groups["one"] = cgroupLike(t, "1000")
	paths["two"], groups["two"] = cgroupLike(t, "50000000")
	p := newContainers(newProcs(false), kubernetesPace) // they never run
	for _, name := range []string{"one", "two"} {
		c := script(name, vm.ContainerApp, vm.RestartNever, "true")
		c.command.cgroup = groups[name]
		p.add(c, 1)
	}
	s := New(Config{}, nil)
	s.several = p
	has := func(name, file string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(paths[name], file))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	to := func(name string, r *guestv1.Resources) *guestv1.ContainerResources {
		return &guestv1.ContainerResources{Name: name, Resources: r}
	}
	small := &guestv1.Resources{CpuLimit: 50, CpuWeight: 5, MemoryLimit: 1 << 20, OomScoreAdj: 900}
	for what, tc := range map[string]struct {
		all  []*guestv1.ContainerResources
		want errdefs.Class
	}{
		"one uses more":      {[]*guestv1.ContainerResources{to("one", small), to("two", small)}, errdefs.FailedPrecondition},
		"one does not exist": {[]*guestv1.ContainerResources{to("one", small), to("three", small)}, errdefs.NotFound},
		"one is invalid":     {[]*guestv1.ContainerResources{to("one", small), to("two", &guestv1.Resources{CpuLimit: -1})}, errdefs.InvalidArgument},
		"one has none":       {[]*guestv1.ContainerResources{to("one", small), to("two", nil)}, errdefs.InvalidArgument},
	} {
		_, err := s.ResizeContainers(t.Context(), &guestv1.ResizeContainersRequest{Containers: tc.all})
		if !errdefs.Is(err, tc.want) || has("one", "cpu.max") != "" {
			t.Errorf("%s: %v, and the other one has %q", what, err, has("one", "cpu.max"))
		}
	}
	if _, err := s.ResizeContainers(t.Context(), &guestv1.ResizeContainersRequest{Containers: []*guestv1.ContainerResources{
		to("one", small), to("two", &guestv1.Resources{CpuLimit: 5, MemoryLimit: 64 << 20}),
	}}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"one": "5000/5/1048576/1", "two": "1000/100/67108864/1"} {
		got := strings.Join([]string{strings.TrimSuffix(has(name, "cpu.max"), " 100000"), has(name, "cpu.weight"), has(name, "memory.max"), has(name, "memory.oom.group")}, "/")
		if got != want {
			t.Errorf("%s has %s, want %s", name, got, want)
		}
	}

	// What the host says in another setup holds as far as it fits.
	s.several.resizeTo([]*guestv1.Container{{Name: "one"}, {Name: "two", Resources: small}})
	if got := has("one", "cpu.weight") + " " + has("two", "cpu.weight"); got != "100 100" {
		t.Errorf("after another setup: %s", got)
	}
}
