//go:build vm

package cocoond_test

import (
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMGrows: guests of container images get CPUs and memory while they run, as those of disks do, and keep them when they are saved and when
// they start again. So do sandboxes.
func TestVMGrows(t *testing.T) {
	n := newNode(t)
	ctx := t.Context()
	const most = 256 << 20
	machine := func(memory int64) *vm.Hardware {
		return &vm.Hardware{Topology: vm.Topology{Sockets: 1, Cores: 1, Threads: 1}, Growth: vm.Growth{Sockets: 3, Memory: memory + most}}
	}
	must := func(_ vm.Record, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	memory := func(ref, container string) int64 {
		t.Helper()
		kib, err := strconv.ParseInt(strings.TrimSpace(n.shIn(ref, container, "sed -n 's/MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo")), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return kib << 10
	}
	cpus := func(ref, container, want string) {
		t.Helper()
		n.until(ref+" has "+want+" CPUs", func() bool {
			return strings.TrimSpace(n.shIn(ref, container, "grep -c ^processor /proc/cpuinfo")) == want
		})
	}

	must(n.Launch(ctx, vm.Spec{Name: "web", Image: demo, CPUs: 1, Memory: 192 << 20, Storage: 64 << 20, Hardware: machine(192 << 20)}))
	must(n.Launch(ctx, vm.Spec{Name: "pod", Sandbox: true, CPUs: 1, Memory: vm.MinMemory, Storage: 64 << 20, Hardware: machine(vm.MinMemory)}))
	must(n.AddContainer(ctx, "pod", vm.Container{Name: "main", Kind: vm.ContainerEphemeral, Image: demo, Process: vm.Process{Entrypoint: []string{"sleep", "100000"}}}))
	n.until("the container runs", func() bool {
		r, err := n.Inspect(ctx, "pod")
		return err == nil && r.Container("main").Status.State == vm.ContainerRunning
	})
	for _, one := range []struct{ ref, container string }{{"web", ""}, {"pod", "main"}} {
		n.ready(one.ref)
		before := memory(one.ref, one.container)
		t.Logf("%s has %d MiB", one.ref, before>>20)
		cpus(one.ref, one.container, "1")
		r, err := n.Inspect(ctx, one.ref)
		must(r, err)
		to := vm.Size{CPUs: 3, Memory: r.Spec.Memory + most}
		must(n.Resize(ctx, one.ref, to))
		cpus(one.ref, one.container, "3")
		if got := memory(one.ref, one.container); got < before+most*9/10 {
			t.Errorf("%s had %d bytes of memory and has %d", one.ref, before, got)
		}
	}

	grown := memory("web", "")
	must(n.Hibernate(ctx, "web", ""))
	must(n.Wake(ctx, "web"))
	n.ready("web")
	cpus("web", "", "3")
	if got := memory("web", ""); got != grown {
		t.Errorf("woken, it has %d bytes of memory, before %d", got, grown)
	}
	must(n.Stop(ctx, "web", 0))
	must(n.Start(ctx, "web"))
	n.ready("web")
	cpus("web", "", "3")
}
