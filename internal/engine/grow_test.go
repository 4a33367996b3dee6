package engine_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

const more = 128 << 20

var grownSize = vm.Size{CPUs: 3, Memory: 1<<30 + more}

// growable is a VM that boots itself, with a CPU that can become four, and a gibibyte that can become two.
func growable() vm.Spec {
	s := cloud()
	s.CPUs, s.Memory = 1, 1<<30
	s.Hardware = &vm.Hardware{Topology: vm.Topology{Sockets: 1, Cores: 1, Threads: 1}, Growth: vm.Growth{Sockets: 4, Memory: 2 << 30}}
	return s
}

func grow(ctx context.Context, r *rig) error {
	_, err := r.Resize(ctx, "web", grownSize)
	return err
}

func growScripts() map[string]script {
	launched := func(ctx context.Context, r *rig) error {
		_, err := r.Launch(ctx, growable())
		return err
	}
	grown := func(ctx context.Context, r *rig) error { return errors.Join(launched(ctx, r), grow(ctx, r)) }
	night := func(ctx context.Context, r *rig) error {
		_, err := r.Hibernate(ctx, "web", "night")
		return err
	}
	return map[string]script{
		"grow":            {before: launched, act: grow, after: []vm.State{vm.StateRunning}},
		"hibernate grown": {before: grown, act: night, after: []vm.State{vm.StateRunning, vm.StateHibernated}},
	}
}

// hasSize checks that the hypervisor has given a running VM what its record says.
func (r *rig) hasSize(rec vm.Record, where string) {
	r.t.Helper()
	if rec.State != vm.StateRunning {
		return
	}
	if got := r.world.Size(rec.ID); got != rec.Spec.Size() {
		r.t.Errorf("%s: the record says %+v, the guest has %+v", where, rec.Spec.Size(), got)
	}
}

// A VM keeps what it was given, whatever happens to it.
func TestGrow(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	_, err := r.Resize(ctx, "none", grownSize)
	r.refused("no such VM", errdefs.NotFound, err)
	s := growable()
	s.Hardware.Growth.Plugged = more // nobody else may say so
	r.must(r.Launch(ctx, s))
	has := func(what string, want vm.Size, plugged int64) {
		t.Helper()
		rec := r.must(r.Inspect(ctx, "web"))
		if rec.Spec.Size() != want || rec.Spec.Hardware.Growth.Plugged != plugged || rec.Spec.Hardware.Topology.Sockets != want.CPUs {
			t.Errorf("%s: %+v", what, rec.Spec.Hardware)
		}
		r.hasSize(rec, what)
	}
	first := vm.Size{CPUs: 1, Memory: 1 << 30}
	has("launched", first, 0)
	for what, to := range map[string]vm.Size{"too many CPUs": {CPUs: 5, Memory: 1 << 30}, "too much memory": {CPUs: 1, Memory: 3 << 30}, "less": {CPUs: 1, Memory: 1 << 29}} {
		_, err := r.Resize(ctx, "web", to)
		r.refused(what, errdefs.FailedPrecondition, err)
	}
	r.must(r.Pause(ctx, "web"))
	r.refused("paused", errdefs.FailedPrecondition, grow(ctx, r))
	r.must(r.Unpause(ctx, "web"))
	for range 2 { // again is no error
		if err := grow(ctx, r); err != nil {
			t.Fatal(err)
		}
		has("grown", grownSize, more)
	}
	r.restart()
	has("after a restart of the daemon", grownSize, more)
	r.must(r.Hibernate(ctx, "web", ""))
	has("hibernated", grownSize, more)
	r.refused("grow while hibernated", errdefs.FailedPrecondition, func() error { _, err := r.Resize(ctx, "web", vm.Size{CPUs: 4, Memory: grownSize.Memory}); return err }())
	r.must(r.Wake(ctx, "web"))
	has("woken", grownSize, more)
	r.must(r.Stop(ctx, "web", 0))
	r.must(r.Start(ctx, "web"))
	has("started again", grownSize, 0)
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.must(r.Launch(ctx, spec("plain")))
	rec := r.must(r.Inspect(ctx, "plain"))
	_, err = r.Resize(ctx, "plain", vm.Size{CPUs: rec.Spec.CPUs + 1, Memory: rec.Spec.Memory})
	r.refused("without a maximum", errdefs.FailedPrecondition, err)
	if err := r.Remove(ctx, "plain", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// A guest of a container image grows, too, and so does a sandbox.
func TestGrowOfContainerImages(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	plain, pod := spec("web"), vm.Spec{Name: "pod", Sandbox: true}
	for _, s := range []vm.Spec{plain, pod} {
		s.CPUs, s.Memory, s.Hardware = 1, 1<<30, growable().Hardware
		r.must(r.Launch(ctx, s))
		rec := r.must(r.Resize(ctx, s.Name, grownSize))
		if rec.Spec.Size() != grownSize {
			t.Errorf("%s has %+v", s.Name, rec.Spec.Size())
		}
		r.hasSize(rec, s.Name)
		if err := r.Remove(ctx, s.Name, true); err != nil {
			t.Fatal(err)
		}
	}
	pod.Hardware = &vm.Hardware{TPM: vm.TPMEphemeral}
	_, err := r.Launch(ctx, pod)
	r.refused("a sandbox with a TPM", errdefs.InvalidArgument, err)
	r.clean()
}

// What the guest got before the rest failed is on record.
func TestGrowFails(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var fail atomic.Bool
	r.world.Fault = func(call string) error {
		if fail.Load() && call == "driver.Grow half" {
			return errdefs.Preconditionf("the guest takes no memory")
		}
		return nil
	}
	r.must(r.Launch(ctx, growable()))
	fail.Store(true)
	r.refused("a guest that takes no memory", errdefs.FailedPrecondition, grow(ctx, r))
	rec := r.must(r.Inspect(ctx, "web"))
	if rec.Spec.Size() != (vm.Size{CPUs: 3, Memory: 1 << 30}) {
		t.Errorf("it has %+v", rec.Spec.Size())
	}
	r.hasSize(rec, "failed")
	fail.Store(false)
	if err := grow(ctx, r); err != nil {
		t.Fatal(err)
	}
	r.hasSize(r.must(r.Inspect(ctx, "web")), "grown")
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
}
