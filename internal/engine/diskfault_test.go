package engine_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/vm"
)

// full is an engine whose disks have as much space as the test says.
func full(t *testing.T) (*rig, *fake.Host, *atomic.Int64) {
	t.Helper()
	var free atomic.Int64
	r, host := realStore(t, func(r *rig) {
		r.room = func(string) (engine.Room, error) { return engine.Room{Free: free.Load(), Size: 1 << 40}, nil }
	})
	return r, host, &free
}

func because(reason string) func(vm.Record) bool {
	return func(r vm.Record) bool { return r.State == vm.StateRunning && r.Reason == reason }
}

var noSpace = hypervisor.DiskFault{Stands: true, Full: true, Cause: "No space left on device"}

// TestDiskFull: a guest that is paused because the disk is full is reported, is not saved, survives the daemon, and
// resumes by itself.
func TestDiskFull(t *testing.T) {
	r, host, free := full(t)
	ctx := t.Context()
	web := r.must(r.Inspect(ctx, "web"))
	if err := host.Remember(web.ID, "one"); err != nil {
		t.Fatal(err)
	}
	if err := host.Fault(web.ID, noSpace); err != nil {
		t.Fatal(err)
	}
	stuck := r.await("web", "stuck", because(vm.ReasonDiskFull))
	if !strings.Contains(stuck.Message, r.dir) || stuck.PID != web.PID {
		t.Errorf("it is %+v", stuck)
	}
	_, err := r.Hibernate(ctx, "web", "")
	wantClass(t, "hibernate", err, errdefs.FailedPrecondition)
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	wantClass(t, "save", err, errdefs.FailedPrecondition)

	r.restart()
	still := r.must(r.Inspect(ctx, "web"))
	if still.Reason != vm.ReasonDiskFull || still.State != vm.StateRunning {
		t.Errorf("after a restart of the daemon it is %s: %s", still.State, still.Reason)
	}
	if p, err := host.Paused(web.ID); err != nil || !p {
		t.Errorf("it was let go on a full disk: %v", err)
	}
	free.Store(1 << 30)
	went := r.await("web", "going on", because(""))
	if p, err := host.Paused(web.ID); err != nil || p || went.Message != "" || went.PID != web.PID {
		t.Errorf("it stands: %v, %v; %+v", p, err, went)
	}
	if got, _ := host.Memory(web.ID); got != "one" {
		t.Errorf("it remembers %q", got)
	}
	r.must(r.Hibernate(ctx, "web", ""))
	r.must(r.Wake(ctx, "web"))
	r.clearAll()
}

// TestDiskFullAndEnded: the reason why a VM ended is not mixed up with its earlier disk fault.
func TestDiskFullAndEnded(t *testing.T) {
	r, host, _ := full(t)
	web := r.must(r.Inspect(t.Context(), "web"))
	if err := host.Fault(web.ID, noSpace); err != nil {
		t.Fatal(err)
	}
	r.await("web", "stuck", because(vm.ReasonDiskFull))
	if got := r.must(r.Stop(t.Context(), "web", 0)); ofDisk(got.Reason) || got.Reason == "" {
		t.Errorf("stopped it is %s: %s", got.Reason, got.Message)
	}
	if got := r.must(r.Start(t.Context(), "web")); got.Reason != "" {
		t.Errorf("started it is %s: %s", got.Reason, got.Message)
	}
}

func ofDisk(reason string) bool { return reason == vm.ReasonDiskFull || reason == vm.ReasonDiskError }

// TestDiskError: a guest that was told of an error keeps running; a paused one is retried, with growing pauses.
func TestDiskError(t *testing.T) {
	r, host, free := full(t)
	free.Store(1 << 30)
	web := r.must(r.Inspect(t.Context(), "web"))
	if err := host.Fault(web.ID, hypervisor.DiskFault{Cause: "Input/output error"}); err != nil {
		t.Fatal(err)
	}
	if got := r.await("web", "told", because(vm.ReasonDiskError)); !strings.Contains(got.Message, "Input/output error") {
		t.Errorf("it says %q", got.Message)
	}
	tried, began := 0, time.Now()
	for time.Since(began) < 10*time.Second {
		if err := host.Fault(web.ID, hypervisor.DiskFault{Stands: true, Cause: "Input/output error"}); err != nil {
			t.Fatal(err)
		}
		for time.Since(began) < 10*time.Second {
			if p, err := host.Paused(web.ID); err != nil || !p {
				tried++
				break
			}
			<-time.After(5 * time.Millisecond)
		}
	}
	if tried < 1 || tried > 4 {
		t.Errorf("in 10 s it was tried %d times", tried)
	}
}
