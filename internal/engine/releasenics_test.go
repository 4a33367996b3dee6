package engine_test

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestReleaseNICs: a sandbox that does not run gives its interfaces and addresses back, once and also after a failure, and never starts again.
func TestReleaseNICs(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var faulty atomic.Bool
	r.world.Fault = func(call string) error {
		if faulty.Load() && call == "network.Release" {
			return errdefs.Unavailablef("told to fail")
		}
		return nil
	}
	leases := func() int {
		t.Helper()
		all, err := os.ReadDir(filepath.Join(r.world.Dir, "leases"))
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	other := spec("other")
	r.must(r.Create(ctx, other))
	_, err := r.ReleaseNICs(ctx, "other")
	wantClass(t, "of a VM that is no sandbox", err, errdefs.FailedPrecondition)

	before := leases()
	s := sandbox()
	s.NICs = []vm.NICSpec{{Network: "lab"}}
	rec := r.must(r.Launch(ctx, s))
	if len(rec.NICs) != 1 || leases() != before+1 {
		t.Fatalf("launched with %+v", rec.NICs)
	}
	_, err = r.ReleaseNICs(ctx, "web")
	wantClass(t, "while it runs", err, errdefs.FailedPrecondition)
	r.must(r.Stop(ctx, "web", 0))
	faulty.Store(true)
	_, err = r.ReleaseNICs(ctx, "web")
	wantClass(t, "while the network fails", err, errdefs.Unavailable)
	if rec := r.must(r.Inspect(ctx, "web")); len(rec.NICs) != 1 {
		t.Errorf("after a failure the record has forgotten its interface")
	}
	faulty.Store(false)
	for range 2 {
		if rec := r.must(r.ReleaseNICs(ctx, "web")); len(rec.NICs) != 0 || leases() != before {
			t.Errorf("released: %+v, %d leases more", rec.NICs, leases()-before)
		}
	}
	_, err = r.Start(ctx, "web")
	wantClass(t, "a start without interfaces", err, errdefs.FailedPrecondition)
	if err := r.Remove(ctx, "web", false); err != nil {
		t.Error(err)
	}
}
