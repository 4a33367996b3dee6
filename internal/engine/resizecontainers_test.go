package engine_test

import (
	"context"
	"errors"
	"maps"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	small = vm.Resources{CPULimit: 100, CPUWeight: 10, MemoryLimit: 32 << 20, OOMScoreAdj: 900}
	large = vm.Resources{CPULimit: 500, CPUWeight: 50, MemoryLimit: 64 << 20, OOMScoreAdj: 800}
)

// sizedSpec is severalSpec with an app whose resources are limited.
func sizedSpec() vm.Spec {
	s := severalSpec()
	s.Containers[1].Resources = &small
	return s
}

func resizeApp(ctx context.Context, r *rig) error {
	_, err := r.ResizeContainers(ctx, "web", map[string]vm.Resources{"app": large, "init": small})
	return err
}

// resizeScripts are the operations with containers that are resized.
func resizeScripts() map[string]script {
	sized := func(ctx context.Context, r *rig) error {
		if _, err := r.Launch(ctx, sizedSpec()); err != nil {
			return err
		}
		return errors.Join(until(ctx, r, ready), write(ctx, r, "one."))
	}
	return map[string]script{
		"resize containers": {before: sized, act: resizeApp, after: []vm.State{vm.StateRunning}, disk: []string{"one."}},
		"restore resized": {
			before: func(ctx context.Context, r *rig) error {
				return errors.Join(sized(ctx, r), save(ctx, r), resizeApp(ctx, r))
			},
			act: restore, after: []vm.State{vm.StateRunning}, disk: []string{"one."},
		},
	}
}

func TestResizeContainers(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var fault atomic.Value
	fault.Store("")
	r.world.Fault = func(call string) error {
		if call == fault.Load() {
			return errdefs.Preconditionf("told to fail")
		}
		return nil
	}
	want := map[string]vm.Resources{"app": large}
	_, err := r.ResizeContainers(ctx, "none", want)
	wantClass(t, "no such VM", err, errdefs.NotFound)
	r.must(r.Launch(ctx, spec("plain")))
	_, err = r.ResizeContainers(ctx, "plain", want)
	wantClass(t, "a VM without containers", err, errdefs.Unsupported)
	disk := cloud()
	disk.Name = "cloud"
	r.must(r.Launch(ctx, disk))
	_, err = r.ResizeContainers(ctx, "cloud", want)
	wantClass(t, "a VM that boots itself", err, errdefs.Unsupported)

	rec := r.must(r.Launch(ctx, sizedSpec()))
	r.await("web", "ready", ready)
	has := func(what string, want map[string]vm.Resources) {
		t.Helper()
		r.eventually(what, func() bool { return maps.Equal(r.world.Guest(rec.ID).Sized(), want) })
		if got := vm.ResourcesOf(r.must(r.Inspect(ctx, "web")).Spec.Containers); !maps.Equal(got, want) {
			t.Errorf("%s: on record %+v", what, got)
		}
	}
	first := map[string]vm.Resources{"app": small}
	has("launched", first)
	_, err = r.ResizeContainers(ctx, "web", map[string]vm.Resources{"none": large})
	wantClass(t, "no such container", err, errdefs.NotFound)
	_, err = r.ResizeContainers(ctx, "web", map[string]vm.Resources{"app": {CPULimit: -1}})
	wantClass(t, "invalid", err, errdefs.InvalidArgument)
	for _, call := range []string{"agent.ResizeContainers", "agent.ResizeContainers done"} {
		fault.Store(call)
		_, err = r.ResizeContainers(ctx, "web", map[string]vm.Resources{"app": large, "init": small})
		wantClass(t, call, err, errdefs.FailedPrecondition)
		fault.Store("")
		if call == "agent.ResizeContainers" { // the guest knows nothing of it
			has("refused", first)
			continue
		}
		r.world.Guest(rec.ID).Drop() // it refused to go back too; its next session does that
		has("refused when it was done", first)
		r.await("web", "ready", ready)
	}

	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	both := map[string]vm.Resources{"app": large, "init": small}
	for range 2 { // again is no error
		for err = resizeApp(ctx, r); errdefs.IsUnavailable(err); err = resizeApp(ctx, r) { // until the link is there again
		}
		if err != nil {
			t.Fatal(err)
		}
		has("resized", both)
	}
	clone := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"}))
	if got := vm.ResourcesOf(clone.Spec.Containers); !maps.Equal(got, first) {
		t.Errorf("the clone has %+v", got)
	}

	// A new engine, a lost session, a hibernation, a boot and a restore keep the new values.
	r.restart()
	r.await("web", "ready", ready)
	r.world.Guest(rec.ID).Drop()
	has("another session", both)
	r.await("web", "ready", ready)
	if _, err := r.Hibernate(ctx, "web", ""); err != nil {
		t.Fatal(err)
	}
	_, err = r.ResizeContainers(ctx, "web", first)
	wantClass(t, "a VM that does not run", err, errdefs.FailedPrecondition)
	r.must(r.Wake(ctx, "web"))
	has("woken", both)
	r.must(r.Restart(ctx, "web", 0))
	r.await("web", "ready", ready)
	has("booted", both)
	r.must(r.Restore(ctx, "web", "gold"))
	r.await("web", "ready", ready)
	has("restored", both)
}
