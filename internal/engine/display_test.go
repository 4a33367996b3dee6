package engine_test

import (
	"bytes"
	"image/png"
	"io"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/hypervisor/hypervisortest"
	"cocoonstack.io/cocoon/internal/vm"
)

// withScreens makes the engine's VMs those of the fake driver, which shows screens.
func withScreens(t *testing.T) func(*rig) {
	host, err := fake.NewHost("")
	if err != nil {
		t.Fatal(err)
	}
	return func(r *rig) { r.vmm = fake.New(fake.Config{}, host) }
}

func graphical() vm.Spec {
	s := cloud()
	s.Graphics = true
	return s
}

// closed waits for the end of a stream, which must be an orderly one.
func closed(t *testing.T, what string, c io.Reader) {
	t.Helper()
	end := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, c)
		end <- err
	}()
	select {
	case err := <-end:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%s: its stream does not end", what)
	}
}

// TestDisplay: one viewer at a time. A new one ends the one before, unless it asks not to; a picture disturbs nobody.
func TestDisplay(t *testing.T) {
	r := newRig(t, withScreens(t))
	ctx := t.Context()
	r.must(r.Launch(ctx, graphical()))
	watch := func(keep bool) io.ReadWriteCloser {
		t.Helper()
		c, err := r.Display(ctx, "web", keep)
		if err != nil {
			t.Fatal(err)
		}
		if width, height, err := hypervisortest.Greet(c); err != nil || width == 0 || height == 0 {
			t.Fatalf("a screen of %d x %d: %v", width, height, err)
		}
		return c
	}
	first := watch(true)
	_, err := r.Display(ctx, "web", true)
	wantClass(t, "of a screen that somebody has", err, errdefs.Conflict)
	for _, wake := range []bool{false, true} {
		picture, err := r.Screenshot(ctx, "web", wake)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := png.Decode(bytes.NewReader(picture)); err != nil {
			t.Error(err)
		}
	}
	if _, err := first.Write([]byte{0}); err != nil {
		t.Errorf("the first viewer was disturbed: %v", err)
	}
	second := watch(false)
	closed(t, "the viewer before", first)
	if err := first.Close(); err != nil { // which makes no room for others
		t.Error(err)
	}
	_, err = r.Display(ctx, "web", true)
	wantClass(t, "of a screen that the second one has", err, errdefs.Conflict)
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	third := watch(true)

	// A paused guest has a screen.
	r.must(r.Pause(ctx, "web"))
	if _, err := r.Screenshot(ctx, "web", false); err != nil {
		t.Error(err)
	}
	r.must(r.Unpause(ctx, "web"))

	// The engine ends; the next one knows the VM, whose screen nobody has.
	r.restart()
	fourth := watch(true)
	third.Close()
	r.must(r.Stop(ctx, "web", 0))
	closed(t, "the viewer of a VM that has stopped", fourth)
	_, err = r.Display(ctx, "web", false)
	wantClass(t, "of a VM that does not run", err, errdefs.FailedPrecondition)
	_, err = r.Screenshot(ctx, "web", false)
	wantClass(t, "a picture of a VM that does not run", err, errdefs.FailedPrecondition)
}

func TestDisplayRefused(t *testing.T) {
	r := newRig(t, withScreens(t))
	ctx := t.Context()
	container := spec("x")
	container.Graphics = true // has no effect
	for name, s := range map[string]vm.Spec{"without graphics": cloud(), "a container image": container} {
		s.Name = "x"
		r.must(r.Launch(ctx, s))
		_, err := r.Display(ctx, "x", false)
		wantClass(t, name, err, errdefs.Unsupported)
		_, err = r.Screenshot(ctx, "x", false)
		wantClass(t, name, err, errdefs.Unsupported)
		if err := r.Remove(ctx, "x", true); err != nil {
			t.Fatal(err)
		}
	}
	_, err := r.Display(ctx, "x", false)
	wantClass(t, "of no VM", err, errdefs.NotFound)
}
