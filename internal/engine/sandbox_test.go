package engine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

func sandbox() vm.Spec {
	s := spec("web")
	s.Sandbox, s.Image, s.Process = true, "", vm.Process{}
	return s
}

// manual is a container that waits for its start.
func manual(name string) vm.Container {
	c := debugger(name)
	c.Manual, c.Labels = true, map[string]string{"pod": "p"}
	return c
}

func inState(name string, want vm.ContainerState) func(vm.Record) bool {
	return func(r vm.Record) bool {
		c := r.Container(name)
		return c != nil && c.Status.State == want
	}
}

// sandboxScripts are the operations with the containers of a sandbox.
func sandboxScripts() map[string]script {
	booted := func(ctx context.Context, r *rig) error {
		_, err := r.Launch(ctx, sandbox())
		return errors.Join(err, until(ctx, r, ready), write(ctx, r, "one."))
	}
	added := func(ctx context.Context, r *rig) error {
		c := manual("app")
		c.Volumes = []vm.Volume{{Name: "tmp", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/", Trusted: true}}}
		_, err := r.AddContainer(ctx, "web", c)
		return err
	}
	begun := func(ctx context.Context, r *rig) error {
		_, err := r.StartContainer(ctx, "web", "app")
		return err
	}
	gone := func(ctx context.Context, r *rig) error { return r.RemoveContainer(ctx, "web", "app") }
	return map[string]script{
		"launch sandbox": {
			act: func(ctx context.Context, r *rig) error {
				_, err := r.Launch(ctx, sandbox())
				return errors.Join(err, until(ctx, r, ready))
			},
			only:  func(ctx context.Context, r *rig) error { _, err := r.Launch(ctx, sandbox()); return err },
			after: []vm.State{"", vm.StateRunning},
		},
		"add to sandbox": {before: booted, act: added, after: []vm.State{vm.StateRunning}, disk: []string{"one."}},
		"start in sandbox": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(booted(ctx, r), added(ctx, r)) },
			act:    begun, after: []vm.State{vm.StateRunning}, disk: []string{"one."},
		},
		"remove from sandbox": {
			before: func(ctx context.Context, r *rig) error {
				return errors.Join(booted(ctx, r), added(ctx, r), begun(ctx, r))
			},
			act: gone, after: []vm.State{vm.StateRunning}, disk: []string{"one."},
		},
		"remove from stopped sandbox": {
			before: func(ctx context.Context, r *rig) error {
				return errors.Join(booted(ctx, r), added(ctx, r), begun(ctx, r), halt(ctx, r))
			},
			act: gone, after: []vm.State{vm.StateStopped}, disk: []string{"one."},
		},
	}
}

// hasContainers checks that the guest of a sandbox has the containers, disks and folders of the record, and no others.
func (r *rig) hasContainers(rec vm.Record, where string) {
	if !rec.Spec.Sandbox || rec.State != vm.StateRunning || rec.BootContainer != "" {
		return
	}
	r.await(rec.Spec.Name, "ready", ready)
	g := r.world.Guest(rec.ID)
	var folders, names []string
	for at := range g.Folders() {
		folders = append(folders, filepath.Base(filepath.Dir(at)))
	}
	for _, e := range rec.Ephemeral {
		names = append(names, e.Record.Name)
	}
	if !slices.Equal(folders, names) || len(g.Serials()) != len(rec.Disks) {
		r.t.Errorf("killed at %s: on record %v and %d disks, the guest has folders of %v and the disks %v", where, names, len(rec.Disks), folders, g.Serials())
	}
	r.eventually("its containers go on", func() bool { return !g.Rests() })
	r.eventually("the guest has the containers of the record", func() bool { return slices.Equal(g.Has(), names) })
}

// TestSandbox: containers are added to a guest without an image, started, ended and removed one by one.
func TestSandbox(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	for what, change := range map[string]func(*vm.Spec){
		"an image":      func(s *vm.Spec) { s.Image = "demo" },
		"a process":     func(s *vm.Spec) { s.Process.Args = []string{"x"} },
		"a container":   func(s *vm.Spec) { s.Containers = severalSpec().Containers },
		"cloud-init":    func(s *vm.Spec) { s.CloudInit = &vm.CloudInit{UserData: "x"} },
		"its own mount": func(s *vm.Spec) { s.Mounts = []vm.Mount{{Volume: "v", Path: "/v"}} },
	} {
		s := sandbox()
		change(&s)
		_, err := r.Launch(ctx, s)
		wantClass(t, "a sandbox with "+what, err, errdefs.InvalidArgument)
	}
	rec := r.must(r.Create(ctx, sandbox()))
	if rec.State != vm.StateCreated || rec.ImageType != vm.ImageOCI || rec.ImageDigest != "" || len(rec.Disks) != 1 || rec.Disks[0].Role != vm.RoleCOW {
		t.Fatalf("created: %+v", rec)
	}
	_, err := r.AddContainer(ctx, "web", manual("app"))
	wantClass(t, "before it boots", err, errdefs.FailedPrecondition)
	r.must(r.Start(ctx, "web"))
	r.await("web", "ready", ready)
	g := r.world.Guest(rec.ID)

	now := r.must(r.AddContainer(ctx, "web", manual("app")))
	if e := now.Ephemeral[0]; e.Record.Status.State != vm.ContainerCreated || e.CreatedAt.IsZero() || e.Spec.Labels["pod"] != "p" || len(now.Disks) != 2 || now.Disks[1].Port != 1 {
		t.Fatalf("added: %+v", now)
	}
	_, err = r.StartContainer(ctx, "web", "none")
	wantClass(t, "no such container", err, errdefs.NotFound)
	for range 2 { // again is no error
		if now = r.must(r.StartContainer(ctx, "web", "app")); now.Container("app").Status.State != vm.ContainerRunning {
			t.Fatalf("started: %+v", now.Ephemeral)
		}
	}
	g.PrintIn("app", guest.LogEntry{Run: 1, Seq: 1, Stream: "stdout", Data: []byte("seen\n")})
	r.eventually("the output", func() bool {
		return logOf(t, r, "web", guest.LogOptions{Tail: -1, Container: "app"}) == "seen\n"
	})
	g.EndContainer("app", 3)
	now = r.await("web", "ended", inState("app", vm.ContainerTerminated))
	if x := now.Container("app").Status.Exit; x.Code != 3 {
		t.Errorf("its end: %+v", x)
	}
	if got := logOf(t, r, "web", guest.LogOptions{Tail: -1, Container: "app"}); got != "seen\n" {
		t.Errorf("the log of one that has ended: %q", got)
	}
	_, err = r.StartContainer(ctx, "web", "app")
	wantClass(t, "one that has ended is started", err, errdefs.FailedPrecondition)
	if err := r.KillContainer(ctx, "web", "app", 0, 0); err != nil {
		t.Errorf("one that has ended is killed: %v", err)
	}

	bad := manual("bad")
	bad.Process = vm.Process{Entrypoint: []string{"missing"}}
	r.must(r.AddContainer(ctx, "web", bad))
	now, err = r.StartContainer(ctx, "web", "bad")
	wantClass(t, "one without a program", err, errdefs.FailedPrecondition)
	if s := now.Container("bad").Status; s.Exit == nil || s.Exit.Code != 128 || s.Reason != vm.ContainerStartError || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("one without a program: %+v, %v", s, err)
	}
	r.must(r.AddContainer(ctx, "web", manual("idle")))
	if err := r.KillContainer(ctx, "web", "idle", 0, time.Second); err != nil {
		t.Fatal(err)
	}
	r.await("web", "ended", inState("idle", vm.ContainerTerminated))

	sized := manual("sized")
	sized.Resources = &vm.Resources{CPULimit: 100}
	r.must(r.AddContainer(ctx, "web", sized))
	_, err = r.ResizeContainers(ctx, "web", map[string]vm.Resources{"idle": {CPULimit: 1}})
	wantClass(t, "a resize of one that has ended", err, errdefs.FailedPrecondition)
	now = r.must(r.ResizeContainers(ctx, "web", map[string]vm.Resources{"sized": {CPULimit: 200}}))
	if got := g.Sized()["sized"].CPULimit; got != 200 || now.Resources()["sized"].CPULimit != 200 {
		t.Errorf("resized: %d, %+v", got, now.Resources())
	}
	r.restart()
	r.await("web", "ready", ready)
	g = r.world.Guest(rec.ID)
	r.eventually("the size after a restart", func() bool { return g.Sized()["sized"].CPULimit == 200 })

	// All share a layer: only the last one takes the disk with it. A name can be used again.
	for i, name := range []string{"app", "bad", "idle", "sized"} {
		for range 2 {
			if err := r.RemoveContainer(ctx, "web", name); err != nil {
				t.Fatal(err)
			}
		}
		now = r.must(r.Inspect(ctx, "web"))
		if last := i == 3; (len(now.Disks) == 1) != last || (len(g.Serials()) == 1) != last || (len(g.Forgotten()) == 1) != last || slices.Contains(g.Has(), name) {
			t.Errorf("without %s: disks %+v, the guest has %v and %v", name, now.Disks, g.Has(), g.Serials())
		}
	}
	if _, err := r.Inspect(ctx, "web"); err != nil || len(now.Ephemeral) != 0 || r.ImageInUse(debugImage(t, r)) {
		t.Errorf("without containers: %+v", now)
	}
	for range 3 {
		r.must(r.AddContainer(ctx, "web", manual("app")))
		if got := logOf(t, r, "web", guest.LogOptions{Tail: -1, Container: "app"}); got != "" {
			t.Errorf("the log of a new one: %q", got)
		}
		r.must(r.StartContainer(ctx, "web", "app"))
		if now = r.must(r.Inspect(ctx, "web")); now.Disks[1].Port != 1 {
			t.Errorf("the port: %+v", now.Disks)
		}
		if err := r.RemoveContainer(ctx, "web", "app"); err != nil {
			t.Fatal(err)
		}
	}

	// The containers end with the guest, and can be removed then.
	r.must(r.AddContainer(ctx, "web", manual("app")))
	r.must(r.StartContainer(ctx, "web", "app"))
	r.must(r.Stop(ctx, "web", 0))
	_, err = r.StartContainer(ctx, "web", "app")
	wantClass(t, "the VM is stopped", err, errdefs.FailedPrecondition)
	if err := r.KillContainer(ctx, "web", "app", 0, 0); err != nil {
		t.Errorf("a kill in a stopped VM: %v", err)
	}
	r.must(r.Start(ctx, "web"))
	now = r.await("web", "ready", ready)
	if s := now.Container("app").Status; s.State != vm.ContainerTerminated || s.Exit.Code != vm.LostExitCode || len(now.Disks) != 1 {
		t.Errorf("after a reboot: %+v", now)
	}
	r.must(r.Stop(ctx, "web", 0))
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	wantClass(t, "a snapshot of one that is stopped", err, errdefs.FailedPrecondition)
	if err := r.RemoveContainer(ctx, "web", "app"); err != nil {
		t.Fatal(err)
	}
	if now = r.must(r.Inspect(ctx, "web")); len(now.Ephemeral) != 0 {
		t.Errorf("removed from a stopped VM: %+v", now.Ephemeral)
	}
}

// TestSandboxFolders: a container has folders of the node of its own, as long as it exists.
func TestSandboxFolders(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(root+"/data", 0o755), os.Symlink("data", root+"/link")); err != nil {
		t.Fatal(err)
	}
	var fault atomic.Value
	fault.Store("")
	r.world.Fault = func(call string) error {
		if call == fault.Load() {
			return errdefs.Unavailablef("told to fail")
		}
		return nil
	}
	rec := r.must(r.Launch(ctx, sandbox()))
	r.await("web", "ready", ready)
	c := manual("app")
	c.Volumes = []vm.Volume{{Name: "data", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: root + "/link", ReadOnly: true}}}
	c.Mounts = []vm.Mount{{Volume: "data", Path: "/data", SubPath: "part"}}
	_, err = r.AddContainer(ctx, "web", c)
	wantClass(t, "a folder that nobody has allowed", err, errdefs.FailedPrecondition)
	c.Volumes[0].Dir.Trusted = true
	missing := c.Clone()
	missing.Volumes[0].Dir.Path = root + "/none"
	_, err = r.AddContainer(ctx, "web", missing)
	wantClass(t, "a folder that does not exist", err, errdefs.FailedPrecondition)
	for _, call := range []string{"driver.PlugFolder", "driver.PlugFolder done", "driver.PlugDisk", "agent.AddContainer"} {
		fault.Store(call)
		_, err := r.AddContainer(ctx, "web", c)
		wantClass(t, call, err, errdefs.Unavailable)
		if now := r.must(r.Inspect(ctx, "web")); len(now.Ephemeral) != 0 || len(r.world.Guest(rec.ID).Folders()) != 0 {
			t.Errorf("after %s failed: %+v, %v", call, now.Ephemeral, r.world.Guest(rec.ID).Folders())
		}
	}
	fault.Store("")
	now := r.must(r.AddContainer(ctx, "web", c))
	if mounts := now.Ephemeral[0].Spec.GuestMounts(); len(mounts) != 1 || mounts[0] != (vm.Mount{Volume: vm.SharedVolume, Path: "/data", SubPath: "app/0/part", ReadOnly: true}) {
		t.Errorf("the guest mounts %+v", mounts)
	}
	var at []string
	for where, what := range r.world.Guest(rec.ID).Folders() {
		if at = append(at, where); what != root+"/data" {
			t.Errorf("%s is shared", what)
		}
	}
	if len(at) != 1 || !strings.HasSuffix(at[0], "/shared/"+string(rec.ID)+"/app/0") {
		t.Errorf("shared: %v", at)
	}
	fault.Store("driver.UnplugFolder")
	wantClass(t, "a folder that stays", r.RemoveContainer(ctx, "web", "app"), errdefs.Unavailable)
	fault.Store("")
	if err := r.RemoveContainer(ctx, "web", "app"); err != nil || len(r.world.Guest(rec.ID).Folders()) != 0 {
		t.Errorf("removed: %v, %v", r.world.Guest(rec.ID).Folders(), err)
	}
	r.must(r.Launch(ctx, func() vm.Spec { s := severalSpec(); s.Name = "several"; return s }()))
	r.await("several", "ready", ready)
	c.Name = "own"
	_, err = r.AddContainer(ctx, "several", c)
	wantClass(t, "in a VM that is no sandbox", err, errdefs.Unsupported)
	bad := sandbox()
	bad.Name, bad.Volumes = "bad", c.Volumes
	_, err = r.Launch(ctx, bad)
	wantClass(t, "a trusted folder of a VM", err, errdefs.InvalidArgument)
}

// TestSandboxFaults: a container is added while the guest boots, and what fails halfway is done again.
func TestSandboxFaults(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var deaf atomic.Bool
	var fault atomic.Value
	fault.Store("")
	r.world.Fault = func(call string) error {
		switch {
		case deaf.Load() && call == "agent.Connect":
			return errdefs.Unavailablef("not now")
		case call == fault.Load():
			return errdefs.Unavailablef("told to fail")
		}
		return nil
	}
	deaf.Store(true)
	rec := r.must(r.Launch(ctx, sandbox()))
	if now := r.must(r.AddContainer(ctx, "web", manual("app"))); now.Container("app").Status.State != vm.ContainerCreated {
		t.Fatalf("added to a guest that boots: %+v", now.Ephemeral)
	}
	started := make(chan error, 1)
	go func() { // ends with the start
		_, err := r.StartContainer(ctx, "web", "app")
		started <- err
	}()
	deaf.Store(false)
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	r.await("web", "started", inState("app", vm.ContainerRunning))
	for _, call := range []string{"agent.RemoveContainer", "agent.RemoveContainer done", "driver.UnplugDisk", "driver.UnplugDisk done"} {
		fault.Store(call)
		wantClass(t, call, r.RemoveContainer(ctx, "web", "app"), errdefs.Unavailable)
		if now := r.must(r.Inspect(ctx, "web")); len(now.Ephemeral) != 1 || len(now.Disks) != 2 {
			t.Errorf("after %s failed: %+v", call, now)
		}
		r.await("web", "ready", ready)
	}
	fault.Store("")
	if err := r.RemoveContainer(ctx, "web", "app"); err != nil {
		t.Fatal(err)
	}
	if now := r.must(r.Inspect(ctx, "web")); len(now.Ephemeral) != 0 || len(now.Disks) != 1 || len(r.world.Guest(rec.ID).Serials()) != 1 {
		t.Errorf("at last: %+v, %v", now.Disks, r.world.Guest(rec.ID).Serials())
	}
	several := severalSpec()
	several.Name = "several"
	r.must(r.Launch(ctx, several))
	r.await("several", "ready", ready)
	wantClass(t, "a container that was not added", r.RemoveContainer(ctx, "several", "app"), errdefs.InvalidArgument)
	_, err := r.StartContainer(ctx, "several", "app")
	wantClass(t, "a container that starts by itself", err, errdefs.InvalidArgument)
}
