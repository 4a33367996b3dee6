package engine_test

import (
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// sleeping runs a command in web that does not end, and returns its later result.
func (r *rig) sleeping() <-chan error {
	errs := make(chan error, 1)
	go func() {
		_, err := r.Exec(r.t.Context(), "web", guest.Exec{Command: []string{"sleep"}}, guest.Streams{})
		errs <- err
	}()
	return errs
}

func wantSilent(t *testing.T, what string, err error) {
	t.Helper()
	wantClass(t, what, err, errdefs.Unavailable)
	if err != nil && !strings.Contains(err.Error(), "the guest of vm web has stopped answering") {
		t.Errorf("%s: %v", what, err)
	}
}

func TestSilentGuest(t *testing.T) {
	r := newRig(t, func(r *rig) { r.cfg.Silence = 100 * time.Millisecond })
	rec := r.must(r.Launch(t.Context(), spec("web")))
	r.await("web", "ready", ready)
	g := r.world.Guest(rec.ID)
	under := r.sleeping()
	g.Quiet(true)
	wantSilent(t, "a command that runs", <-under)
	wantSilent(t, "a command after that", <-r.sleeping())
	wantSilent(t, "a port after that", r.Forward(t.Context(), "web", 80, guest.Streams{}))
	g.Quiet(false)
	for deadline := time.Now().Add(time.Minute); ; {
		_, err := r.Exec(t.Context(), "web", guest.Exec{Command: []string{"echo", "hi"}}, guest.Streams{Stdout: &strings.Builder{}})
		if err == nil {
			break
		}
		wantSilent(t, "until it answers", err)
		if time.Now().After(deadline) {
			t.Fatal("it answers, and nobody notices")
		}
	}
	g.Quiet(true)
	r.must(r.Stop(t.Context(), "web", 0))
}

// TestSavedGuestIsNotSilent pauses a guest for longer than a guest may be silent, because it is saved.
func TestSavedGuestIsNotSilent(t *testing.T) {
	const silence = 500 * time.Millisecond // both replies of a guest that is not silent come in time, also from a busy machine
	var g *enginetest.Guest
	r := newRig(t, func(r *rig) {
		r.cfg.Silence = silence
		r.world.Fault = func(call string) error {
			if call == "driver.Save" {
				g.Quiet(true)
				<-time.After(3 * silence)
				g.Quiet(false)
			}
			return nil
		}
	})
	rec := r.must(r.Launch(t.Context(), spec("web")))
	r.await("web", "ready", ready)
	g = r.world.Guest(rec.ID)
	under := r.sleeping()
	if _, err := r.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: "base"}); err != nil {
		t.Fatal(err)
	}
	g.Drop()
	err := <-under
	wantClass(t, "a command when the link is lost", err, errdefs.Unavailable)
	if strings.Contains(err.Error(), "stopped answering") {
		t.Errorf("while it was saved: %v", err)
	}
	r.clearAll("base")
}
