package hypervisortest

import (
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

func resetterOf(t *testing.T, i hypervisor.Instance) hypervisor.Resetter {
	t.Helper()
	r, ok := hypervisor.As[hypervisor.Resetter](i)
	if !ok {
		t.Skip("no Resetter")
	}
	return r
}

// testReset resets a guest, and lets it power off when that is a reset and when it is the end. The process stays as long.
func testReset(t *testing.T, s *suite) {
	if s.Firmware == nil {
		t.Skip("no guest that boots by firmware")
	}
	p := s.Firmware(t)
	i := s.launch(t, p)
	r := resetterOf(t, i)
	s.Booted(t, i)
	pid := i.PID()
	if err := r.Reset(s.ctx(t)); err != nil {
		t.Fatal(err)
	}
	s.state(t, i, hypervisor.Running)
	s.Booted(t, i)
	if err := r.ResetOnPoweroff(s.ctx(t), time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := i.Shutdown(s.ctx(t)); err != nil {
		t.Fatal(err)
	}
	s.Booted(t, i)
	if i.PID() != pid {
		t.Errorf("the process was %d and is %d", pid, i.PID())
	}
	for _, until := range []time.Time{time.Now().Add(time.Hour), {}} {
		if err := r.ResetOnPoweroff(s.ctx(t), until); err != nil {
			t.Fatal(err)
		}
	}
	if err := i.Shutdown(s.ctx(t)); err != nil {
		t.Fatal(err)
	}
	if e := s.wait(t, i); !e.GuestShutdown {
		t.Errorf("after a shutdown: %+v", e)
	}
	for _, err := range []error{r.Reset(s.ctx(t)), r.ResetOnPoweroff(s.ctx(t), time.Time{})} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("after the end: %v, want NotFound", err)
		}
	}
	s.kill(t, i)
	s.nothingLeft(t, p)
}

// testResetRefused: a guest with a kernel of ours would end, so it is not reset.
func testResetRefused(t *testing.T, s *suite) {
	p := s.plan(t)
	if !p.Boot.Direct() {
		t.Skip("the guest boots by firmware")
	}
	i := s.launch(t, p)
	r := resetterOf(t, i)
	for _, err := range []error{r.Reset(s.ctx(t)), r.ResetOnPoweroff(s.ctx(t), time.Now().Add(time.Hour))} {
		if !errdefs.Is(err, errdefs.Unsupported) {
			t.Errorf("%v, want Unsupported", err)
		}
	}
	s.state(t, i, hypervisor.Running)
	s.kill(t, i)
}
