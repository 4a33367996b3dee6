package guestagent

import (
	"context"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// waiting are the containers of a guest that waits for them.
func waiting(t *testing.T) *containers {
	t.Helper()
	p := newContainers(newProcs(false), restartPace{base: time.Millisecond, most: time.Millisecond, forgive: time.Hour})
	go p.await() // ends with the stop
	t.Cleanup(func() { p.shutdown(context.Background(), 0); <-p.done })
	return p
}

func later(name, text string) *container {
	c := script(name, vm.ContainerEphemeral, vm.RestartNever, text)
	c.manual = true
	return c
}

func stateOf(p *containers, name string) vm.ContainerStatus {
	names, all, _ := p.report()
	for i := range names {
		if names[i] == name {
			return all[i]
		}
	}
	return vm.ContainerStatus{}
}

func joined(t *testing.T, p *containers, all ...*container) {
	t.Helper()
	for _, c := range all {
		if err := p.join(c); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStartContainer(t *testing.T) {
	p, ctx := waiting(t), t.Context()
	missing := later("missing", "")
	missing.command.args = []string{"/no/such"}
	joined(t, p, later("web", "exec sleep 1000"), later("short", "exit 3"), missing, later("idle", "true"))
	for _, name := range []string{"web", "short", "missing", "idle"} {
		if s := stateOf(p, name); s.State != vm.ContainerCreated {
			t.Errorf("%s, which nobody has started: %+v", name, s)
		}
	}
	if err := p.start(ctx, "none"); !errdefs.IsNotFound(err) {
		t.Errorf("no such container: %v", err)
	}
	for range 2 { // again is no error
		if err := p.start(ctx, "web"); err != nil {
			t.Fatal(err)
		}
	}
	if s := stateOf(p, "web"); s.State != vm.ContainerRunning || s.StartedAt.IsZero() {
		t.Errorf("started: %+v", s)
	}
	for name, code := range map[string]int{"short": 3, "missing": 128} {
		if err := p.start(ctx, name); err != nil {
			t.Fatal(err)
		}
		c, _ := p.find(name)
		<-c.over
		if s := stateOf(p, name); s.State != vm.ContainerTerminated || s.Exit.Code != code {
			t.Errorf("%s: %+v", name, s)
		}
		if err := p.start(ctx, name); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s is started again: %v", name, err)
		}
	}

	// The guest stays when no container runs, and one that nobody has started ends with it.
	if err := p.kill(ctx, "web", 0, time.Minute); err != nil {
		t.Fatal(err)
	}
	if isClosed(p.done) {
		t.Error("the guest ends without containers")
	}
	p.shutdown(ctx, 0)
	<-p.done
	if s := stateOf(p, "idle"); s.State != vm.ContainerTerminated || s.Exit.Code != 137 || !s.StartedAt.IsZero() {
		t.Errorf("one that nobody has started: %+v", s)
	}
	if err := p.join(later("late", "true")); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("joined after the end: %v", err)
	}
	if x := p.exit(); x.GetCode() != 0 {
		t.Errorf("the end of the guest: %+v", x)
	}
}

func TestKillOfTheUnstarted(t *testing.T) {
	p, ctx := waiting(t), t.Context()
	joined(t, p, later("idle", "true"), later("deaf", "trap '' TERM; while :; do sleep 0.01; done"))
	for range 2 {
		if err := p.kill(ctx, "idle", 0, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	if s := stateOf(p, "idle"); s.State != vm.ContainerTerminated || s.Exit.Code != 137 {
		t.Errorf("killed: %+v", s)
	}
	if err := p.start(ctx, "idle"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("started after its end: %v", err)
	}
	if err := p.start(ctx, "deaf"); err != nil {
		t.Fatal(err)
	}
	c, _ := p.find("deaf")
	if err := p.retire(ctx, c); err != nil {
		t.Fatal(err)
	}
	if s := stateOf(p, "deaf"); s.State != vm.ContainerTerminated || s.Exit.Code != 137 {
		t.Errorf("retired: %+v", s)
	}
}
