package engine_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

func debugger(name string) vm.Container {
	return vm.Container{Name: name, Image: "layered", Kind: vm.ContainerEphemeral, Process: vm.Process{Args: []string{"look"}}}
}

func severalReady(ctx context.Context, r *rig) error {
	if _, err := r.Launch(ctx, severalSpec()); err != nil {
		return err
	}
	return errors.Join(until(ctx, r, ready), write(ctx, r, "one."))
}

func addDebugger(ctx context.Context, r *rig) error {
	_, err := r.AddContainer(ctx, "web", debugger("debug"))
	return err
}

func debugs(r vm.Record) bool {
	return len(r.Ephemeral) == 1 && r.Ephemeral[0].Record.Status.State == vm.ContainerRunning
}

// addScripts are the operations with a container that is added.
func addScripts() map[string]script {
	added := func(ctx context.Context, r *rig) error {
		return errors.Join(severalReady(ctx, r), addDebugger(ctx, r), until(ctx, r, debugs))
	}
	return map[string]script{
		"add container": {
			before: severalReady,
			act: func(ctx context.Context, r *rig) error {
				return errors.Join(addDebugger(ctx, r), until(ctx, r, debugs))
			},
			only: addDebugger, after: []vm.State{vm.StateRunning}, disk: []string{"one."},
		},
		"hibernate with added": {
			before: added,
			act:    func(ctx context.Context, r *rig) error { _, err := r.Hibernate(ctx, "web", ""); return err },
			after:  []vm.State{vm.StateRunning, vm.StateHibernated}, disk: []string{"one."},
		},
		"clone with added": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(added(ctx, r), save(ctx, r)) },
			act: func(ctx context.Context, r *rig) error {
				return errors.Join(clone(ctx, r), until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "a" && v.AgentReady }))
			},
			only: clone, after: []vm.State{"", vm.StateRunning}, disk: []string{"one."}, name: "a",
		},
		"stop with added": {
			before: added,
			act:    func(ctx context.Context, r *rig) error { return halt(ctx, r) },
			after:  []vm.State{vm.StateRunning, vm.StateStopped}, disk: []string{"one."},
		},
	}
}

func TestAddContainer(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var fault atomic.Value
	fault.Store("")
	r.world.Fault = func(call string) error {
		if slices.Contains(strings.Split(fault.Load().(string), ","), call) {
			return errdefs.Unsupportedf("told to fail")
		}
		return nil
	}
	bad := debugger("debug")
	bad.Kind = vm.ContainerApp
	_, err := r.AddContainer(ctx, "web", bad)
	wantClass(t, "an app", err, errdefs.InvalidArgument)
	_, err = r.AddContainer(ctx, "none", debugger("debug"))
	wantClass(t, "no such VM", err, errdefs.NotFound)
	plain := spec("plain")
	r.must(r.Launch(ctx, plain))
	_, err = r.AddContainer(ctx, "plain", debugger("debug"))
	wantClass(t, "a VM without containers", err, errdefs.Unsupported)
	disk := cloud()
	disk.Name = "cloud"
	r.must(r.Launch(ctx, disk))
	_, err = r.AddContainer(ctx, "cloud", debugger("debug"))
	wantClass(t, "a VM that boots itself", err, errdefs.Unsupported)

	rec := r.must(r.Launch(ctx, severalSpec()))
	r.await("web", "ready", ready)
	_, err = r.AddContainer(ctx, "web", debugger("app"))
	wantClass(t, "a name in use", err, errdefs.AlreadyExists)
	bad = debugger("debug")
	bad.Mounts = []vm.Mount{{Volume: "v", Path: "/v"}}
	_, err = r.AddContainer(ctx, "web", bad)
	wantClass(t, "a volume that the VM does not have", err, errdefs.InvalidArgument)
	bad = debugger("debug")
	bad.PIDs.Of = "none"
	_, err = r.AddContainer(ctx, "web", bad)
	wantClass(t, "the processes of no container", err, errdefs.NotFound)
	bad = debugger("debug")
	bad.Image = "none"
	_, err = r.AddContainer(ctx, "web", bad)
	wantClass(t, "no such image", err, errdefs.NotFound)
	for _, call := range []string{"driver.PlugDisk", "driver.PlugDisk done", "agent.AddContainer"} {
		fault.Store(call)
		_, err = r.AddContainer(ctx, "web", debugger("debug"))
		wantClass(t, call, err, errdefs.Unsupported)
		if now := r.must(r.Inspect(ctx, "web")); len(now.Ephemeral) != 0 || len(now.Disks) != len(rec.Disks) || r.ImageInUse(debugImage(t, r)) {
			t.Errorf("after %s failed: %+v, %+v", call, now.Ephemeral, now.Disks)
		}
	}
	fault.Store("")

	// A guest that does not give the disks back keeps them, and the container has ended.
	stuck := r.must(r.Launch(ctx, func() vm.Spec { s := severalSpec(); s.Name = "stuck"; return s }()))
	r.await("stuck", "ready", ready)
	fault.Store("agent.AddContainer,driver.UnplugDisk")
	_, err = r.AddContainer(ctx, "stuck", debugger("debug"))
	wantClass(t, "a guest that refuses the container and keeps its disks", err, errdefs.Unsupported)
	fault.Store("")
	if now := r.must(r.Inspect(ctx, "stuck")); len(now.Disks) != len(stuck.Disks)+1 || now.Container("debug").Status.Exit.Code != 128 || !r.ImageInUse(debugImage(t, r)) {
		t.Errorf("disks that are stuck: %+v, %+v", now.Ephemeral, now.Disks)
	}
	if _, err := r.SaveSnapshot(ctx, "stuck", vm.SaveSpec{Name: "held"}); err != nil {
		t.Fatal(err)
	}
	if clone := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "held", Name: "held"})); len(clone.Disks) != len(stuck.Disks)+1 {
		t.Errorf("its clone: %+v", clone.Disks)
	}

	for range 2 { // again is no error
		now := r.must(r.AddContainer(ctx, "web", debugger("debug")))
		if len(now.Ephemeral) != 1 || len(now.Ephemeral[0].Record.Layers) != 1 || now.Disks[len(now.Disks)-1].Port != 1 {
			t.Fatalf("added: %+v, disks %+v", now.Ephemeral, now.Disks)
		}
	}
	second := r.must(r.AddContainer(ctx, "web", debugger("second")))
	if len(second.Disks) != len(rec.Disks)+1 { // the layers are there already
		t.Errorf("disks: %+v", second.Disks)
	}
	r.await("web", "with debugger", func(v vm.Record) bool {
		c := v.Container("debug")
		return c != nil && c.Status.State == vm.ContainerRunning && v.Container("second").Status.State == vm.ContainerRunning
	})
	if !r.ImageInUse(debugImage(t, r)) {
		t.Error("the image of the debugger is not in use")
	}
	g := r.world.Guest(rec.ID)
	g.PrintIn("debug", guest.LogEntry{Run: 1, Seq: 1, Stream: "stdout", Data: []byte("seen\n")})
	r.eventually("the output", func() bool {
		return logOf(t, r, "web", guest.LogOptions{Tail: -1, Container: "debug"}) == "seen\n"
	})

	// A new engine, a lost session and a hibernation change nothing.
	r.restart()
	r.await("web", "ready", ready)
	r.world.Guest(rec.ID).Drop()
	r.await("web", "ready", ready)
	if _, err := r.Hibernate(ctx, "web", ""); err != nil {
		t.Fatal(err)
	}
	if now := r.must(r.Inspect(ctx, "web")); now.Ephemeral[0].Record.Status.State != vm.ContainerRunning {
		t.Errorf("hibernated: %+v", now.Ephemeral)
	}
	r.must(r.Wake(ctx, "web"))
	r.await("web", "ready", ready)
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []vm.CloneSpec{{Snapshot: "gold", Name: "warm"}, {Snapshot: "gold", Name: "cold", Cold: true}} {
		clone := r.must(r.Clone(ctx, c))
		ported := slices.ContainsFunc(clone.Disks, func(d vm.Disk) bool { return d.Port != 0 })
		if want := !c.Cold; ported != want || (len(clone.Ephemeral) == 2) != want {
			t.Errorf("clone %s: %+v, disks %+v", c.Name, clone.Ephemeral, clone.Disks)
		}
	}

	// The containers end with the guest, and a guest that boots again does not have them.
	for range 2 {
		if _, err := r.Stop(ctx, "web", 0); err != nil {
			t.Fatal(err)
		}
		now := r.must(r.Inspect(ctx, "web"))
		for _, e := range now.Ephemeral {
			if s := e.Record.Status; s.State != vm.ContainerTerminated || s.Exit == nil || s.Exit.Code != vm.LostExitCode || len(e.Record.Layers) != 0 {
				t.Errorf("after the end: %+v", e.Record)
			}
		}
		if len(now.Ephemeral) != 2 || len(now.Disks) != len(rec.Disks) {
			t.Errorf("after the end: %+v, disks %+v", now.Ephemeral, now.Disks)
		}
		_, err = r.AddContainer(ctx, "web", debugger("late"))
		wantClass(t, "a stopped VM", err, errdefs.FailedPrecondition)
		r.must(r.Start(ctx, "web"))
		r.await("web", "ready", ready)
		if again := r.must(r.AddContainer(ctx, "web", debugger("debug"))); again.Ephemeral[0].Record.Status.State != vm.ContainerTerminated {
			t.Errorf("a container that has ended was started again: %+v", again.Ephemeral)
		}
	}
	if s := r.must(r.Inspect(ctx, "web")); s.ExitCode != nil {
		t.Errorf("the VM: %+v", s)
	}

	// A restore to the time when they ran brings them back.
	r.must(r.Restore(ctx, "web", "gold"))
	r.await("web", "with debugger", func(v vm.Record) bool {
		return v.AgentReady && v.Container("debug").Status.State == vm.ContainerRunning
	})
}

func debugImage(t *testing.T, r *rig) string {
	t.Helper()
	img, err := r.world.Images().Get(t.Context(), "layered")
	if err != nil {
		t.Fatal(err)
	}
	return img.ID
}

// A guest that is not reachable gets the container with its next session.
func TestAddContainerLater(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var deaf, refuse atomic.Bool
	var tries atomic.Int64
	r.world.Fault = func(call string) error {
		if deaf.Load() && call == "agent.Connect" {
			tries.Add(1)
			return errdefs.Unavailablef("not now")
		}
		if refuse.Load() && call == "agent.AddContainer" {
			return errdefs.Invalidf("never")
		}
		return nil
	}
	rec := r.must(r.Launch(ctx, severalSpec()))
	r.await("web", "ready", ready)
	later := func(name string) {
		t.Helper()
		deaf.Store(true)
		tries.Store(0)
		r.world.Guest(rec.ID).Drop()
		r.eventually("the loss of the session", func() bool { return tries.Load() > 0 })
		now := r.must(r.AddContainer(ctx, "web", debugger(name)))
		if s := now.Container(name).Status; s.State != vm.ContainerWaiting || s.Reason != vm.ContainerCreating {
			t.Errorf("told to nobody: %+v", s)
		}
		deaf.Store(false)
	}
	later("debug")
	r.await("web", "with debugger", debugs)
	refuse.Store(true)
	later("other")
	end := r.await("web", "without the other", func(v vm.Record) bool { return v.Container("other").Status.State == vm.ContainerTerminated })
	if x := end.Container("other").Status.Exit; x == nil || x.Code != 128 || x.Reason != vm.ContainerStartError {
		t.Errorf("refused: %+v", x)
	}
}

// eventually waits for a condition that no event announces.
func (r *rig) eventually(what string, ok func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("in vain waited for %s", what)
		}
	}
}
