package hypervisortest

import (
	"os"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

func pauserOf(t *testing.T, i hypervisor.Instance) hypervisor.Pauser {
	t.Helper()
	pauser, ok := hypervisor.As[hypervisor.Pauser](i)
	if !ok {
		t.Skip("no Pauser")
	}
	return pauser
}

func testPause(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	pauser := pauserOf(t, i)
	for range 2 {
		for range 2 {
			if err := pauser.Pause(s.ctx(t)); err != nil {
				t.Fatal(err)
			}
			s.state(t, i, hypervisor.Paused)
		}
		for range 2 {
			if err := pauser.Resume(s.ctx(t)); err != nil {
				t.Fatal(err)
			}
			s.state(t, i, hypervisor.Running)
		}
	}
	s.kill(t, i)
	for _, err := range []error{pauser.Pause(s.ctx(t)), pauser.Resume(s.ctx(t))} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("after the end: %v, want NotFound", err)
		}
	}
}

// testPausedAdopt restarts the daemon while a guest is paused. The guest stays paused, and keeps a request to power off until it
// resumes.
func testPausedAdopt(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	pauser := pauserOf(t, i)
	s.Booted(t, i)
	if err := pauser.Pause(s.ctx(t)); err != nil {
		t.Fatal(err)
	}
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	s.state(t, i, hypervisor.Paused)
	if err := i.Shutdown(s.ctx(t)); err != nil {
		t.Fatal(err)
	}
	s.state(t, i, hypervisor.Paused)
	if err := pauserOf(t, i).Resume(s.ctx(t)); err != nil {
		t.Fatal(err)
	}
	if e := s.wait(t, i); !e.GuestShutdown {
		t.Errorf("after a shutdown of a guest that was paused: %+v", e)
	}
}

func testLaunchPaused(t *testing.T, s *suite) {
	p := s.plan(t)
	p.Paused = true
	i := s.launch(t, p)
	pauserOf(t, i)
	s.state(t, i, hypervisor.Paused)
	silent := func() {
		t.Helper()
		console, ok := hypervisor.As[hypervisor.ConsoleOpener](i)
		if !ok {
			return
		}
		if log, err := os.ReadFile(console.ConsoleLog()); err != nil || len(log) > 0 {
			t.Fatalf("a guest that started paused has printed %q, %v", log, err)
		}
	}
	silent()
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	pauser := pauserOf(t, i)
	s.state(t, i, hypervisor.Paused)
	settle := time.NewTimer(200 * time.Millisecond) // a guest that runs prints within this time
	defer settle.Stop()
	<-settle.C
	silent()
	if err := pauser.Resume(s.ctx(t)); err != nil {
		t.Fatal(err)
	}
	s.state(t, i, hypervisor.Running)
	s.Booted(t, i)
	s.kill(t, i)

	saved := s.plan(t)
	saved.Paused, saved.Incoming = true, &hypervisor.Incoming{State: "/state", Memory: "/memory"}
	if j, err := s.driver.Launch(s.ctx(t), saved); !errdefs.IsInvalid(err) {
		if err == nil {
			s.kill(t, j)
		}
		t.Errorf("saved state that starts paused: %v, want InvalidArgument", err)
	}
	saved.Paused, saved.Incoming.Feed = false, "/feed"
	if _, ok := hypervisor.As[hypervisor.LateLoader](s.driver); ok {
		return
	}
	if j, err := s.driver.Launch(s.ctx(t), saved); !errdefs.Is(err, errdefs.Unsupported) {
		if err == nil {
			s.kill(t, j)
		}
		t.Errorf("memory that is still being loaded: %v, want Unsupported", err)
	}
}
