//go:build vm

package guestagent_test

import (
	"fmt"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// limitsOf returns what a command in the container app sees of its limits.
func limitsOf(t *testing.T, a guest.Agent) string {
	t.Helper()
	e := sh("cd /sys/fs/cgroup; cat cpu.max cpu.weight memory.max memory.oom.group; cat /proc/self/oom_score_adj /proc/1/oom_score_adj /proc/self/cgroup")
	e.Container = "app"
	return strings.Join(strings.Fields(output(t, a, e)), " ")
}

// TestVMResources: containers have the limits that they were given, see them as any container does, and keep new ones. Commands, kills
// and restarts work in a container with hardly any CPU time.
func TestVMResources(t *testing.T) {
	for _, root := range []bool{false, true} {
		t.Run(fmt.Sprint("root ", root), func(t *testing.T) {
			q := bootGuest(t, busyboxDisks(t))
			a := q.connect(t)
			defer a.Close()
			k, resizer := a.(guest.ContainerKeeper), a.(guest.ContainerResizer)
			app := containerOf("app", vm.ContainerApp, "exec sleep 1000")
			app.Process.Security = &vm.Security{}
			app.Resources = &vm.Resources{CPULimit: 500, CPUWeight: 5, MemoryLimit: 32 << 20, OOMScoreAdj: 950}
			if root {
				app.Root, app.Layers = true, nil
			}
			s := guest.Setup{Hostname: "web-0", Restart: vm.RestartAlways, Containers: []guest.Container{app}}
			if err := a.Setup(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			running := func(restarts int) {
				t.Helper()
				until(t, k, func(all []vm.ContainerStatus) bool {
					return all[0].State == vm.ContainerRunning && all[0].Restarts == restarts
				})
			}
			running(0)
			const first = "50000 100000 5 33554432 1 950 950 0::/"
			if got := limitsOf(t, a); got != first {
				t.Errorf("the container has %q", got)
			}
			e := sh("(echo max > /sys/fs/cgroup/cpu.max) 2>&1; ls -d /sys/fs/cgroup/container-* 2>&1; mount -t cgroup2 | tail -n 1")
			e.Container = "app"
			if got := output(t, a, e); !strings.Contains(got, "Read-only file system") || strings.Contains(got, "/container-app\n") || !strings.Contains(got, " on /sys/fs/cgroup ") {
				t.Errorf("the container can change its limits, or sees other groups: %q", got)
			}

			// Setup again changes nothing that is the same, and says what the containers are to have by now.
			for _, weight := range []int64{5, 7} {
				s.Containers[0].Resources = &vm.Resources{CPULimit: 500, CPUWeight: weight, MemoryLimit: 32 << 20, OOMScoreAdj: 950}
				if err := a.Setup(t.Context(), s); err != nil {
					t.Fatal(err)
				}
			}
			if got := limitsOf(t, a); got != strings.Replace(first, "100000 5 ", "100000 7 ", 1) {
				t.Errorf("after another setup the container has %q", got)
			}

			resize := func(to vm.Resources, want string) {
				t.Helper()
				if err := resizer.ResizeContainers(t.Context(), map[string]vm.Resources{"app": to}); err != nil {
					t.Fatal(err)
				}
				if got := limitsOf(t, a); got != want {
					t.Errorf("resized to %+v, the container has %q", to, got)
				}
			}
			resize(vm.Resources{CPULimit: 200, CPUWeight: 1, OOMScoreAdj: 900}, "20000 100000 1 max 0 950 950 0::/") // its run keeps the OOM score
			// With a twentieth of a CPU, a command takes twenty times its CPU time, which is much in an emulated guest. So there is one.
			if err := resizer.ResizeContainers(t.Context(), map[string]vm.Resources{"app": {CPULimit: 50, CPUWeight: 1, OOMScoreAdj: 900}}); err != nil {
				t.Fatal(err)
			}
			e = sh("true")
			e.Container = "app"
			output(t, a, e)
			if err := k.KillContainer(t.Context(), "app", 1, 0); err != nil {
				t.Fatal(err)
			}
			running(1)
			resize(vm.Resources{CPULimit: 200, CPUWeight: 1, OOMScoreAdj: 900}, "20000 100000 1 max 0 900 900 0::/")
			err := resizer.ResizeContainers(t.Context(), map[string]vm.Resources{"app": {CPULimit: 1000, MemoryLimit: 4096}})
			if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "memory limit (4096) below current usage (") {
				t.Errorf("a memory limit below the usage: %v", err)
			}
			if got := limitsOf(t, a); got != "20000 100000 1 max 0 900 900 0::/" {
				t.Errorf("after a resize that was refused the container has %q", got)
			}
			if err := resizer.ResizeContainers(t.Context(), map[string]vm.Resources{"none": {}}); !errdefs.IsNotFound(err) {
				t.Errorf("no such container: %v", err)
			}
			resize(vm.Resources{}, "max 100000 100 max 0 900 900 0::/")
			if err := a.Poweroff(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			q.waitEnd(t)
		})
	}
}
