package engine_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

func severalSpec() vm.Spec {
	s := spec("web")
	s.Process, s.Restart = vm.Process{}, vm.RestartOnFailure
	s.Containers = []vm.Container{
		{Name: "init", Image: s.Image, Kind: vm.ContainerInit, Process: vm.Process{Args: []string{"prepare"}}},
		{Name: "app", Image: s.Image, Kind: vm.ContainerApp, Hold: true},
	}
	return s
}

func TestContainers(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var older atomic.Bool
	r.world.Fault = func(call string) error {
		if older.Load() && call == "agent.KillContainer" {
			return errdefs.Unsupportedf("this agent is older")
		}
		return nil
	}
	rec := r.must(r.Launch(ctx, severalSpec()))
	if !rec.Process.Empty() || len(rec.Containers) != 2 || rec.Containers[0].Process.Args[0] != "prepare" || rec.Containers[0].ImageDigest == "" {
		t.Errorf("launched: %+v", rec.Containers)
	}
	r.await("web", "ready", ready)
	g := r.world.Guest(rec.ID)
	told := g.Identity()
	if told.Process != nil || len(told.Containers) != 2 || told.Containers[1].Run != 1 || !told.Containers[1].Hold || told.Containers[0].Hold || told.Restart != vm.RestartOnFailure {
		t.Errorf("the guest was told %+v", told)
	}
	at := time.Unix(100, 0).UTC()
	exit := &vm.ContainerExit{Code: 3, Reason: vm.ContainerError, StartedAt: at, FinishedAt: at}
	done := vm.ContainerStatus{State: vm.ContainerTerminated, StartedAt: at, Exit: &vm.ContainerExit{Reason: vm.ContainerCompleted}}
	g.Stand(done, vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: at, Restarts: 1, Last: exit})
	rec = r.await("web", "the app running again", func(rec vm.Record) bool { return rec.Container("app").Status.Restarts == 1 })
	if s := rec.Container("app").Status; s.Last == nil || s.Last.Code != 3 {
		t.Errorf("the app: %+v", s)
	}

	// Each container has its own log, and so has each run of the app. A lost link loses and duplicates nothing.
	line := func(run int, seq uint64, text string) guest.LogEntry {
		return guest.LogEntry{Run: run, Seq: seq, Time: at, Stream: "stdout", Data: []byte(text)}
	}
	g.PrintIn("app", line(1, 0, ""))
	g.PrintIn("app", line(1, 1, "dies\n"))
	g.PrintIn("app", line(2, 0, ""))
	g.PrintIn("app", line(2, 1, "lives\n"))
	g.Drop()
	r.await("web", "ready", ready)
	g.PrintIn("app", line(2, 2, "on\n"))
	g.PrintIn("init", line(1, 1, "prepared\n"))
	for _, l := range []struct {
		want string
		o    guest.LogOptions
	}{
		{"lives\non\n", guest.LogOptions{Tail: -1}},
		{"dies\n", guest.LogOptions{Tail: -1, Container: "app", Previous: true}},
		{"prepared\n", guest.LogOptions{Tail: -1, Container: "init"}},
	} {
		want, o := l.want, l.o
		for deadline := time.Now().Add(time.Minute); logOf(t, r, "web", o) != want && time.Now().Before(deadline); {
			<-time.After(time.Millisecond)
		}
		if got := logOf(t, r, "web", o); got != want {
			t.Errorf("log %+v: %q, want %q", o, got, want)
		}
	}
	_, err := r.Exec(ctx, "web", guest.Exec{Container: "none", Command: []string{"echo", "x"}}, guest.Streams{})
	wantClass(t, "exec in no container", err, errdefs.NotFound)

	// Only one container is killed. A run that is over is not requested again.
	before := rec.Container("app").Status
	for range 2 {
		err := r.KillContainer(ctx, "web", "app", before.Run(), 3*time.Second)
		for ; errdefs.IsUnavailable(err); err = r.KillContainer(ctx, "web", "app", before.Run(), 3*time.Second) { // until the link is there again
			<-time.After(time.Millisecond)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	rec = r.await("web", "the app once more", func(rec vm.Record) bool { return rec.Container("app").Status.Run() == before.Run()+1 })
	if s := rec.Container("app").Status; s.Last.Code != 143 || s.Last.Message != "3s" || rec.Container("init").Status.Restarts != 0 || rec.Restarts != 0 {
		t.Errorf("after the app was killed: %+v", rec.Containers)
	}
	wantClass(t, "no such container", r.KillContainer(ctx, "web", "none", 0, 0), errdefs.NotFound)
	wantClass(t, "no container", r.KillContainer(ctx, "web", "", 0, 0), errdefs.NotFound)
	wantClass(t, "no such VM", r.KillContainer(ctx, "none", "app", 0, 0), errdefs.NotFound)
	wantClass(t, "no such run", r.KillContainer(ctx, "web", "app", -1, 0), errdefs.InvalidArgument)
	if err := r.ReleaseContainer(ctx, "web", "app"); err != nil {
		t.Error(err)
	}
	wantClass(t, "release of no such container", r.ReleaseContainer(ctx, "web", "none"), errdefs.NotFound)
	older.Store(true)
	wantClass(t, "an older agent", r.KillContainer(ctx, "web", "app", 0, -1), errdefs.Unsupported)

	// The containers end with a guest that dies; the next guest continues the count.
	r.must(r.Restart(ctx, "web", 0))
	r.await("web", "ready", ready)
	told = r.world.Guest(rec.ID).Identity()
	if told.Containers[0].Run != 2 || told.Containers[1].Run != 4 {
		t.Errorf("runs of the next boot: %d and %d", told.Containers[0].Run, told.Containers[1].Run)
	}
	rec, err = r.Inspect(ctx, "web")
	if s := rec.Container("app").Status; err != nil || s.State != vm.ContainerWaiting || s.Last == nil || s.Last.Code != vm.LostExitCode {
		t.Errorf("the app after the restart: %+v, %v", s, err)
	}
}

// severalScripts are operations with a VM of several containers.
func severalScripts() map[string]script {
	written := func(ctx context.Context, r *rig) error {
		s := severalSpec()
		s.Containers[0].Image = "layered"
		if _, err := r.Launch(ctx, s); err != nil {
			return err
		}
		return errors.Join(until(ctx, r, ready), write(ctx, r, "one."))
	}
	wake := func(ctx context.Context, r *rig) error { _, err := r.Wake(ctx, "web"); return err }
	return map[string]script{
		"clone several": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(written(ctx, r), save(ctx, r)) },
			act: func(ctx context.Context, r *rig) error {
				return errors.Join(clone(ctx, r), until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "a" && v.AgentReady }))
			},
			only: clone, after: []vm.State{"", vm.StateRunning}, disk: []string{"one."}, name: "a",
		},
		"wake several": {
			before: func(ctx context.Context, r *rig) error {
				if err := written(ctx, r); err != nil {
					return err
				}
				_, err := r.Hibernate(ctx, "web", "")
				return err
			},
			act:  func(ctx context.Context, r *rig) error { return errors.Join(wake(ctx, r), until(ctx, r, ready)) },
			only: wake, after: []vm.State{vm.StateRunning, vm.StateHibernated}, disk: []string{"one."},
		},
	}
}

// A VM of several containers is hibernated, woken, cloned and restored: the status and output of its containers
// continue, and a clone shows nothing that its source wrote.
func TestContainersGoOn(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := severalSpec()
	s.Containers[0].Image = "layered"
	rec := r.must(r.Launch(ctx, s))
	r.await("web", "ready", ready)
	if len(rec.Disks) != 2 || len(rec.Containers[0].Layers) != 1 || r.ImageInUse("sha256:other") {
		t.Fatalf("launched with the disks %+v, containers %+v", rec.Disks, rec.Containers)
	}
	at := time.Unix(100, 0).UTC()
	line := func(run int, seq uint64, text string) guest.LogEntry {
		return guest.LogEntry{Run: run, Seq: seq, Time: at, Stream: "stdout", Data: []byte(text)}
	}
	shows := func(ref, want string, o guest.LogOptions) {
		t.Helper()
		o.Tail, o.Container = -1, "app"
		for deadline := time.Now().Add(time.Minute); logOf(t, r, ref, o) != want && time.Now().Before(deadline); {
			<-time.After(time.Millisecond)
		}
		if got := logOf(t, r, ref, o); got != want {
			t.Errorf("log of %s %+v: %q, want %q", ref, o, got, want)
		}
	}
	done := vm.ContainerStatus{State: vm.ContainerTerminated, StartedAt: at, Exit: &vm.ContainerExit{Reason: vm.ContainerCompleted}}
	second := vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: at, Restarts: 1, Last: &vm.ContainerExit{Code: 3}}
	g := r.world.Guest(rec.ID)
	g.Stand(done, second)
	g.PrintIn("app", line(1, 1, "dies\n"))
	g.PrintIn("app", line(2, 1, "lives\n"))
	shows("web", "lives\n", guest.LogOptions{})
	stands := func(ref string, restarts int) {
		t.Helper()
		got := r.await(ref, "its containers are known", func(rec vm.Record) bool {
			return rec.AgentReady && rec.Container("app").Status.State == vm.ContainerRunning && rec.Container("app").Status.Restarts == restarts
		})
		if s := got.Container("init").Status; s.State != vm.ContainerTerminated || s.Exit == nil || len(got.Container("init").Layers) != 1 {
			t.Errorf("%s: %+v", ref, got.Containers)
		}
	}
	stands("web", 1)

	slept := r.must(r.Hibernate(ctx, "web", ""))
	if slept.Container("app").Status.State != vm.ContainerRunning || !r.ImageInUse("sha256:layered") {
		t.Errorf("asleep: %+v", slept.Containers)
	}
	r.restart()
	if woken := r.must(r.Wake(ctx, "web")); woken.Container("app").Status.State != vm.ContainerRunning {
		t.Errorf("woken: %+v", woken.Containers)
	}
	stands("web", 1)
	g = r.world.Guest(rec.ID)
	g.PrintIn("app", line(2, 2, "on\n"))
	shows("web", "lives\non\n", guest.LogOptions{})
	shows("web", "dies\n", guest.LogOptions{Previous: true})

	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	third := second
	third.Restarts = 2
	g.Stand(done, third)
	g.PrintIn("app", line(3, 1, "third\n"))
	shows("web", "third\n", guest.LogOptions{})
	live := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "live"}))
	stands("live", 1)
	shows("live", "", guest.LogOptions{})
	r.restart()
	c := r.world.Guest(live.ID)
	r.await("live", "ready", ready)
	c.PrintIn("app", line(2, 3, "mine\n"))
	shows("live", "mine\n", guest.LogOptions{})
	c.PrintIn("app", line(3, 1, "anew\n"))
	shows("live", "anew\n", guest.LogOptions{})
	shows("live", "mine\n", guest.LogOptions{Previous: true})

	cold := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "cold", Cold: true}))
	r.await("cold", "ready", ready)
	if told := r.world.Guest(cold.ID).Identity(); len(told.Containers) != 2 || told.Containers[1].Run != 1 || told.Containers[0].Layers[0] != rec.Containers[0].Layers[0] {
		t.Errorf("the guest that boots was told %+v", told)
	}

	r.must(r.Restore(ctx, "web", "gold"))
	stands("web", 1)
	g = r.world.Guest(rec.ID)
	g.PrintIn("app", line(2, 3, "once more\n"))
	shows("web", "once more\n", guest.LogOptions{})
	for _, ref := range []string{"web", "live", "cold"} {
		if err := r.Remove(ctx, ref, true); err != nil {
			t.Error(err)
		}
	}
	if !r.ImageInUse("sha256:layered") {
		t.Error("the image of a saved container is nobody's")
	}
	r.clearAll("gold")
}

func TestContainersThatCannotBe(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := severalSpec()
	s.Containers[0].Image = "disk"
	_, err := r.Launch(ctx, s)
	wantClass(t, "a disk image", err, errdefs.InvalidArgument)
	s = severalSpec()
	s.Containers[0].Kind = vm.ContainerApp
	s.Containers[1].Kind = vm.ContainerInit
	_, err = r.Launch(ctx, s)
	wantClass(t, "init after app", err, errdefs.InvalidArgument)
	s = severalSpec()
	s.Containers[0].Hold = true
	_, err = r.Launch(ctx, s)
	wantClass(t, "an init container that holds", err, errdefs.InvalidArgument)
	s = severalSpec()
	s.Containers[1].Name = "init"
	_, err = r.Launch(ctx, s)
	wantClass(t, "two of one name", err, errdefs.InvalidArgument)
}

// A container may have the root of its VM: it needs no layers of its own, its state resumes in a clone, and in an image that
// boots itself it is no container.
func TestAContainerWithTheRootOfItsVM(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rooted := func(name, image string) vm.Spec {
		s := spec(name)
		s.Image, s.Restart = image, vm.RestartAlways
		s.Containers = []vm.Container{{Name: "c", Kind: vm.ContainerApp, Root: true, Process: s.Process}}
		s.Process = vm.Process{}
		return s
	}
	rec := r.must(r.Launch(ctx, rooted("web", "layered")))
	r.await("web", "ready", ready)
	if c := rec.Containers; len(c) != 1 || len(c[0].Layers) != 0 || c[0].ImageDigest != rec.ImageDigest || c[0].Process.Empty() || !rec.Process.Empty() {
		t.Errorf("launched: %+v", rec)
	}
	if told := r.world.Guest(rec.ID).Identity(); told.Process != nil || len(told.Containers) != 1 || !told.Containers[0].Root {
		t.Errorf("the guest was told %+v", told)
	}
	r.world.Guest(rec.ID).Stand(vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Unix(100, 0).UTC(), Restarts: 3})
	if err := r.KillContainer(ctx, "web", "whatever", 0, 0); err != nil {
		t.Errorf("by another name: %v", err)
	}
	r.await("web", "killed", func(rec vm.Record) bool { return rec.Container("c").Status.Restarts == 4 })
	x, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	if err != nil {
		t.Fatal(err)
	}
	if images := x.Images(); len(images) != 1 {
		t.Errorf("images of the snapshot: %+v", images)
	}
	for _, cold := range []bool{false, true} {
		name := map[bool]string{false: "live", true: "cold"}[cold]
		r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: name, Cold: cold}))
		clone := r.await(name, "ready", func(rec vm.Record) bool {
			return rec.AgentReady && len(rec.Containers) == 1 && (cold || rec.Containers[0].Status.State == vm.ContainerRunning)
		})
		if n := clone.Containers[0].Status.Restarts; n != map[bool]int{false: 4, true: 0}[cold] {
			t.Errorf("%s has restarted %d times", name, n)
		}
	}
	r.must(r.Launch(ctx, func() vm.Spec { s := rooted("own", "disk"); s.Containers[0].Process = vm.Process{}; return s }()))
	if own := r.await("own", "running", func(rec vm.Record) bool { return rec.State == vm.StateRunning }); len(own.Containers)+len(own.Spec.Containers) != 0 || own.Spec.Restart != "" {
		t.Errorf("an image that boots itself: %+v", own)
	}
	for what, change := range map[string]func(*vm.Spec){
		"two containers": func(s *vm.Spec) {
			s.Containers = append(s.Containers, vm.Container{Name: "d", Image: "demo", Kind: vm.ContainerApp})
		},
		"no app":        func(s *vm.Spec) { s.Containers[0].Kind = vm.ContainerSidecar },
		"another image": func(s *vm.Spec) { s.Containers[0].Image = "other" },
	} {
		s := rooted("wrong", "demo")
		change(&s)
		_, err := r.Launch(ctx, s)
		wantClass(t, what, err, errdefs.InvalidArgument)
	}
	r.clearAll("gold")
}
