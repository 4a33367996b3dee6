//go:build vm

package qemu

import (
	"context"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest that takes no memory gets none, and can have it later.
func TestGrowWithoutDriver(t *testing.T) {
	d, p := testDriver(t), needGuest(t).plan(t)
	p.Memory = 192 << 20 // the kernel needs some of it for what may come
	p.Topology, p.Growth = vm.Topology{Sockets: 1, Cores: 1, Threads: 1}, vm.Growth{Sockets: 2, Memory: p.Memory + 64<<20}
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = i.Kill(context.Background()) }()
	logged(t, i, "GUEST-READY")
	pauser, _ := hypervisor.As[hypervisor.Pauser](i)
	if err := pauser.Pause(t.Context()); err != nil { // it does not run, so its driver does nothing
		t.Fatal(err)
	}
	r, _ := hypervisor.As[hypervisor.Resizer](i)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := r.Grow(ctx, vm.Size{CPUs: 1, Memory: p.Growth.Memory}); !errdefs.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("a guest that takes no memory: %v", err)
	}
	if got, err := r.Size(t.Context()); err != nil || got != (vm.Size{CPUs: 1, Memory: p.Memory}) {
		t.Errorf("it has %+v, %v", got, err)
	}
	if err := pauser.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	if err := r.Grow(ctx, vm.Size{CPUs: 1, Memory: p.Growth.Memory}); err != nil {
		t.Errorf("a guest that takes it: %v", err)
	}
}

// TestGrowFirmware boots the demo disk by its firmware, whose system switches on by itself what it gets.
func TestGrowFirmware(t *testing.T) {
	d, p := testDriver(t), needGuest(t).firmware(t)
	p.Topology, p.Growth = vm.Topology{Sockets: 1, Cores: 1, Threads: 1}, vm.Growth{Sockets: 4, Memory: p.Memory + 256<<20}
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = i.Kill(context.Background()) }()
	logged(t, i, " is up")
	r, _ := hypervisor.As[hypervisor.Resizer](i)
	if err := r.Grow(t.Context(), vm.Size{CPUs: 3, Memory: p.Memory + 128<<20}); err != nil {
		t.Fatal(err)
	}
	line := `until [ $(grep -c ^processor /proc/cpuinfo) = 3 ] && [ $(sed -n 's/MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo) -gt 196608 ]; do sleep 0.2; done; echo all-$((3+4))`
	shell(t, i, line, "the guest has its new size", func(log string) bool { return strings.Contains(log, "all-7") })
}
