package hypervisortest

import (
	"bytes"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

func testCrash(t *testing.T, s *suite) {
	p := s.plan(t)
	i := s.launch(t, p)
	s.Crash(t, i.PID())
	if e := s.wait(t, i); e.GuestShutdown || e.GuestReset {
		t.Errorf("a crash shows as %+v", e)
	}
	s.kill(t, i)
	s.nothingLeft(t, p)
	if teller, ok := hypervisor.As[hypervisor.ExitTeller](s.driver); ok {
		if e, err := teller.LastExit(s.ctx(t), i.Handle()); !errdefs.IsNotFound(err) {
			t.Errorf("LastExit of a crash = %+v, %v; want NotFound", e, err)
		}
	}
}

func testAdopt(t *testing.T, s *suite) {
	p := s.plan(t)
	i := s.launch(t, p)
	pid, h := i.PID(), i.Handle()
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
	for range 3 { // the daemon restarts several times
		a := s.adopt(t, s.New(t), h)
		s.state(t, a, hypervisor.Running)
		if a.PID() != pid || !bytes.Equal(a.Handle(), h) {
			t.Errorf("adopted pid %d with handle %q, launched pid %d with %q", a.PID(), a.Handle(), pid, h)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	a := s.adopt(t, s.New(t), h)
	s.Booted(t, a)
	if err := a.Shutdown(s.ctx(t)); err != nil {
		t.Fatal(err)
	}
	if e := s.wait(t, a); !e.GuestShutdown {
		t.Errorf("after Shutdown of an adopted guest: %+v", e)
	}
	s.nothingLeft(t, p)
}

func testAdoptRefuses(t *testing.T, s *suite) {
	for _, h := range []string{"", "{}", "null", "[]", `{"driver":"none","version":1}`, "\x00"} {
		if _, err := s.driver.Adopt(s.ctx(t), hypervisor.Handle(h)); !errdefs.IsInvalid(err) {
			t.Errorf("Adopt(%q) = %v, want InvalidArgument", h, err)
		}
	}
	p := s.plan(t)
	i := s.launch(t, p)
	h := i.Handle()
	s.kill(t, i)
	again := s.launch(t, p) // same VM, another run
	if _, err := s.New(t).Adopt(s.ctx(t), h); !errdefs.IsNotFound(err) {
		t.Errorf("Adopt of the run before = %v, want NotFound", err)
	}
	s.state(t, again, hypervisor.Running)
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	s.kill(t, s.adopt(t, s.New(t), again.Handle())) // the refused Adopt did not damage its sockets
}

func testEndWhileAway(t *testing.T, s *suite) {
	p := s.plan(t)
	i := s.launch(t, p)
	s.Booted(t, i)
	s.PowerOff(t, i)
	h := i.Handle()
	if err := i.Close(); err != nil { // the result must be the same before, during and after the end
		t.Fatal(err)
	}
	d := s.New(t)
	var e hypervisor.Exit
	a, err := d.Adopt(s.ctx(t), h)
	switch teller, ok := hypervisor.As[hypervisor.ExitTeller](d); {
	case err == nil:
		e = s.wait(t, a)
	case errdefs.IsNotFound(err) && ok:
		if e, err = teller.LastExit(s.ctx(t), h); err != nil {
			t.Fatalf("LastExit: %v", err)
		}
	default:
		t.Fatalf("Adopt: %v", err)
	}
	if !e.GuestShutdown {
		t.Errorf("the cause of the end is lost: %+v", e)
	}
	s.nothingLeft(t, p)
}

func testReap(t *testing.T, s *suite) {
	p, other := s.plan(t), s.plan(t)
	i, o := s.launch(t, p), s.launch(t, other)
	_ = i.Close() // its handle is lost
	d := s.New(t)
	for range 2 {
		if err := d.Reap(s.ctx(t), p.ID, p.Dir); err != nil {
			t.Fatalf("Reap: %v", err)
		}
		s.nothingLeft(t, p)
	}
	s.state(t, o, hypervisor.Running)
	if err := d.Reap(s.ctx(t), vm.NewID(), t.TempDir()); err != nil {
		t.Errorf("Reap of a VM that never was: %v", err)
	}
	if err := d.Reap(s.ctx(t), vm.NewID(), t.TempDir()+"/none"); err != nil {
		t.Errorf("Reap without a folder: %v", err)
	}
	s.kill(t, o)
}

func testRelaunch(t *testing.T, s *suite) {
	p := s.plan(t)
	first := s.launch(t, p)
	s.kill(t, first)
	second := s.launch(t, p)
	s.state(t, second, hypervisor.Running)
	if bytes.Equal(first.Handle(), second.Handle()) {
		t.Error("two runs have the same handle")
	}
	s.kill(t, first) // a late Kill of the first run must not touch the second
	s.state(t, second, hypervisor.Running)
	s.kill(t, second)
}
