package engine_test

import (
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
		{Name: "app", Image: s.Image, Kind: vm.ContainerApp},
	}
	return s
}

func TestContainers(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, severalSpec()))
	if !rec.Process.Empty() || len(rec.Containers) != 2 || rec.Containers[0].Process.Args[0] != "prepare" || rec.Containers[0].ImageDigest == "" {
		t.Errorf("launched: %+v", rec.Containers)
	}
	r.await("web", "ready", ready)
	g := r.world.Guest(rec.ID)
	told := g.Identity()
	if told.Process != nil || len(told.Containers) != 2 || told.Containers[1].Run != 1 || told.Restart != vm.RestartOnFailure {
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

	// Each container has a log of its own, and a run of the app has one too. A lost link costs and doubles nothing.
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
		for deadline := time.Now().Add(10 * time.Second); logOf(t, r, "web", o) != want && time.Now().Before(deadline); {
			<-time.After(time.Millisecond)
		}
		if got := logOf(t, r, "web", o); got != want {
			t.Errorf("log %+v: %q, want %q", o, got, want)
		}
	}
	_, err := r.Exec(ctx, "web", guest.Exec{Container: "none", Command: []string{"echo", "x"}}, guest.Streams{})
	wantClass(t, "exec in no container", err, errdefs.NotFound)
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "s"})
	wantClass(t, "a snapshot of containers", err, errdefs.Unsupported)

	// A guest that dies takes its containers along; the next one counts on.
	r.must(r.Restart(ctx, "web", 0))
	r.await("web", "ready", ready)
	told = r.world.Guest(rec.ID).Identity()
	if told.Containers[0].Run != 2 || told.Containers[1].Run != 3 {
		t.Errorf("runs of the next boot: %d and %d", told.Containers[0].Run, told.Containers[1].Run)
	}
	rec, err = r.Inspect(ctx, "web")
	if s := rec.Container("app").Status; err != nil || s.State != vm.ContainerWaiting || s.Last == nil || s.Last.Code != vm.LostExitCode {
		t.Errorf("the app after the restart: %+v, %v", s, err)
	}
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
	s.Containers[1].Name = "init"
	_, err = r.Launch(ctx, s)
	wantClass(t, "two of one name", err, errdefs.InvalidArgument)
}
