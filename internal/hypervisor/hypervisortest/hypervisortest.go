// Package hypervisortest is the test suite that every implementation of hypervisor.Driver must pass, including the fake one.
//
// It depends on no driver: a Fixture supplies what is special about one. It is for tests only.
package hypervisortest

import (
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Fixture is one implementation on one host.
type Fixture struct {
	// New returns another driver on the same host, as a restarted daemon would create.
	New func(t *testing.T) hypervisor.Driver
	// Plan returns a plan of a new VM with an agent channel, whose guest powers off on request.
	Plan func(t *testing.T) hypervisor.Plan
	// Broken is a plan that passes validation but fails to start. Anything in it except Dir and ID may be unusual.
	Broken func(t *testing.T) hypervisor.Plan
	// Booted waits until the guest reacts to requests.
	Booted func(t *testing.T, i hypervisor.Instance)
	// PowerOff makes the guest power itself off, Reset makes it reset itself, without a request by the driver.
	PowerOff, Reset func(t *testing.T, i hypervisor.Instance)
	// Crash ends the process without the driver's knowledge.
	Crash func(t *testing.T, pid int)
	// Left lists what the host still has of a VM: processes, cgroups, sockets, …
	Left func(t *testing.T, p hypervisor.Plan) []string
	// Plugged waits until the guest finds exactly these plugged disks. nil: the guest cannot tell.
	Plugged func(t *testing.T, i hypervisor.Instance, serials ...string)
	// Sized waits until the guest sees that the disk with that serial has size bytes. nil: the guest cannot tell.
	Sized func(t *testing.T, i hypervisor.Instance, serial string, size int64)
	// Reads makes the guest read the first n bytes of the disk with that serial, past its caches, and waits until it has. nil: the guest cannot.
	Reads func(t *testing.T, i hypervisor.Instance, serial string, n int64)
	// Has waits until the guest uses that many CPUs and at least that many bytes of memory, less what its kernel keeps for itself. nil: the
	// guest cannot tell.
	Has func(t *testing.T, i hypervisor.Instance, size vm.Size)
	// NICs returns that many NICs for one VM, whose taps exist. nil: none are at hand.
	NICs func(t *testing.T, n int) []vm.NIC
	// Connected waits until the guest has exactly the interfaces with these MACs. nil: the guest cannot tell.
	Connected func(t *testing.T, i hypervisor.Instance, macs ...string)
	// Carriers waits until the guest has exactly these interfaces, and a carrier on each if its LinkDown is false. nil: the guest cannot tell.
	Carriers func(t *testing.T, i hypervisor.Instance, nics ...vm.NIC)
	// Firmware returns a plan as Plan does, of a guest that boots by firmware, so that a reset starts it again. nil: no such guest is
	// at hand.
	Firmware func(t *testing.T) hypervisor.Plan
	// Limit bounds each single wait. Zero means one minute.
	Limit time.Duration
}

// Run runs the suite. It calls newFixture once for each test; tests may run in parallel.
func Run(t *testing.T, newFixture func(t *testing.T) Fixture) {
	tests := []struct {
		name string
		test func(*testing.T, *suite)
	}{
		{"Probe", testProbe},
		{"Abilities", testAbilities},
		{"LaunchAndKill", testLaunchAndKill},
		{"Shutdown", testShutdown},
		{"GuestPowersOff", testGuestPowersOff},
		{"GuestResets", testGuestResets},
		{"Crash", testCrash},
		{"Adopt", testAdopt},
		{"AdoptRefuses", testAdoptRefuses},
		{"EndWhileAway", testEndWhileAway},
		{"Wait", testWait},
		{"Closed", testClosed},
		{"LaunchCancelled", testLaunchCancelled},
		{"LaunchFails", testLaunchFails},
		{"Reap", testReap},
		{"Relaunch", testRelaunch},
		{"Parallel", testParallel},
		{"Console", testConsole},
		{"Guest", testGuest},
		{"Pause", testPause},
		{"PausedAdopt", testPausedAdopt},
		{"LaunchPaused", testLaunchPaused},
		{"Reset", testReset},
		{"ResetRefused", testResetRefused},
		{"Display", testDisplay},
		{"NoDisplay", testNoDisplay},
		{"DisplaySaved", testDisplaySaved},
		{"Save", testSave},
		{"Hold", testHold},
		{"SaveFails", testSaveFails},
		{"SaveDamaged", testSaveDamaged},
		{"DumpMemory", testDumpMemory},
		{"PlugDisks", testPlugDisks},
		{"SavePlugged", testSavePlugged},
		{"PlugNICs", testPlugNICs},
		{"SavePluggedNICs", testSavePluggedNICs},
		{"Links", testLinks},
		{"GrowDisks", testGrowDisks},
		{"Grow", testGrow},
		{"SaveGrown", testSaveGrown},
		{"DiskRate", testDiskRate},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			if f.Limit == 0 {
				f.Limit = time.Minute
			}
			tt.test(t, &suite{Fixture: f, driver: f.New(t)})
		})
	}
}

type suite struct {
	Fixture
	driver hypervisor.Driver
}

// plan returns a plan. At the end of the test it checks that nothing of the VM is left.
func (s *suite) plan(t *testing.T) hypervisor.Plan {
	p := s.Plan(t)
	t.Cleanup(func() {
		if err := s.New(t).Reap(context.Background(), p.ID, p.Dir); err != nil {
			t.Errorf("Reap at the end: %v", err)
		}
		s.nothingLeft(t, p)
	})
	return p
}

func (s *suite) nothingLeft(t *testing.T, p hypervisor.Plan) {
	t.Helper()
	if left := s.Left(t, p); len(left) > 0 {
		t.Errorf("the host still holds of VM %s: %s", p.ID, strings.Join(left, "; "))
	}
}

func (s *suite) ctx(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), s.Limit)
	t.Cleanup(cancel)
	return ctx
}

func (s *suite) launch(t *testing.T, p hypervisor.Plan) hypervisor.Instance {
	t.Helper()
	i, err := s.driver.Launch(s.ctx(t), p)
	if err != nil {
		t.Fatalf("Launch: %v", err)
	}
	t.Cleanup(func() { _ = i.Close() })
	return i
}

// asking is launch for a plan that asks for what a driver needs the ability T for. A driver that refuses the plan must not have T; then the test ends.
func asking[T any](t *testing.T, s *suite, p hypervisor.Plan) hypervisor.Instance {
	t.Helper()
	i, err := s.driver.Launch(s.ctx(t), p)
	if errdefs.Is(err, errdefs.Unsupported) {
		s.nothingLeft(t, p)
		plain := s.launch(t, s.plan(t))
		if _, ok := hypervisor.As[T](plain); ok {
			t.Errorf("the driver refuses what it can do: %v", err)
		}
		s.kill(t, plain)
		t.Skipf("the driver lacks it: %v", err)
	}
	if err != nil {
		t.Fatalf("Launch: %v", err)
	}
	t.Cleanup(func() { _ = i.Close() })
	return i
}

func (s *suite) adopt(t *testing.T, d hypervisor.Driver, h hypervisor.Handle) hypervisor.Instance {
	t.Helper()
	i, err := d.Adopt(s.ctx(t), h)
	if err != nil {
		t.Fatalf("Adopt: %v", err)
	}
	t.Cleanup(func() { _ = i.Close() })
	return i
}

func (s *suite) wait(t *testing.T, i hypervisor.Instance) hypervisor.Exit {
	t.Helper()
	e, err := i.Wait(s.ctx(t))
	if err != nil {
		t.Fatalf("Wait: %v", err)
	}
	return e
}

func (s *suite) kill(t *testing.T, i hypervisor.Instance) {
	t.Helper()
	if err := i.Kill(s.ctx(t)); err != nil {
		t.Fatalf("Kill: %v", err)
	}
}

func (s *suite) state(t *testing.T, i hypervisor.Instance, want hypervisor.RunState) {
	t.Helper()
	if got, err := i.State(s.ctx(t)); err != nil || got != want {
		t.Fatalf("State = %q, %v; want %q", got, err, want)
	}
}

func testProbe(t *testing.T, s *suite) {
	info, err := s.driver.Probe(s.ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	if info.Version == "" || info.Why == "" || (info.Accel != vm.AccelKVM && info.Accel != vm.AccelTCG) {
		t.Errorf("Probe = %+v", info)
	}
	if s.driver.Name() == "" || s.driver.Name() != s.New(t).Name() {
		t.Error("the name is empty or changes")
	}
}

func testLaunchAndKill(t *testing.T, s *suite) {
	p := s.plan(t)
	i := s.launch(t, p)
	s.state(t, i, hypervisor.Running)
	h := i.Handle()
	if i.PID() <= 0 || len(h) == 0 {
		t.Fatalf("pid %d, handle %q", i.PID(), h)
	}
	s.kill(t, i)
	s.nothingLeft(t, p)
	if e := s.wait(t, i); e.GuestShutdown || e.GuestReset {
		t.Errorf("a killed guest shows as %+v", e)
	}
	if _, err := i.State(s.ctx(t)); !errdefs.IsNotFound(err) {
		t.Errorf("State after the end: %v, want NotFound", err)
	}
	if i.PID() != 0 {
		t.Errorf("PID after the end is %d", i.PID())
	}
	if !bytes.Equal(h, i.Handle()) {
		t.Error("the handle has changed")
	}
	s.kill(t, i)
}

func testShutdown(t *testing.T, s *suite) {
	p := s.plan(t)
	i := s.launch(t, p)
	s.Booted(t, i)
	if err := i.Shutdown(s.ctx(t)); err != nil {
		t.Fatalf("Shutdown: %v", err)
	}
	if e := s.wait(t, i); !e.GuestShutdown {
		t.Errorf("after Shutdown: %+v", e)
	}
	s.kill(t, i)
	s.nothingLeft(t, p)
}

func testGuestPowersOff(t *testing.T, s *suite) {
	p := s.plan(t)
	i := s.launch(t, p)
	s.Booted(t, i)
	s.PowerOff(t, i)
	if e := s.wait(t, i); !e.GuestShutdown || e.GuestReset || e.Signal != 0 {
		t.Errorf("after the guest's power-off: %+v", e)
	}
	s.nothingLeft(t, p) // even without Kill nothing is left
	if _, err := s.New(t).Adopt(s.ctx(t), i.Handle()); !errdefs.IsNotFound(err) {
		t.Errorf("Adopt after the end: %v, want NotFound", err)
	}
	if teller, ok := hypervisor.As[hypervisor.ExitTeller](s.New(t)); ok {
		if e, err := teller.LastExit(s.ctx(t), i.Handle()); err != nil || !e.GuestShutdown {
			t.Errorf("LastExit = %+v, %v", e, err)
		}
	}
}

func testGuestResets(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	s.Booted(t, i)
	s.Reset(t, i)
	if e := s.wait(t, i); !e.GuestReset || e.GuestShutdown {
		t.Errorf("after the guest's reset: %+v", e)
	}
}

func testWait(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := i.Wait(ctx); errdefs.ClassOf(err) != errdefs.Canceled {
		t.Errorf("Wait with a cancelled context: %v", err)
	}
	var wg sync.WaitGroup
	exits := make([]hypervisor.Exit, 5)
	for n := range exits {
		wg.Go(func() { exits[n], _ = i.Wait(s.ctx(t)) })
	}
	s.kill(t, i)
	wg.Wait()
	for _, e := range exits {
		if e != s.wait(t, i) {
			t.Errorf("waiters disagree: %+v", exits)
		}
	}
}

func testClosed(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	errc := make(chan error, 1)
	go func() {
		_, err := i.Wait(s.ctx(t))
		errc <- err
	}()
	for range 2 {
		if err := i.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-errc; err == nil || errdefs.ClassOf(err) == errdefs.DeadlineExceeded {
		t.Errorf("Wait across Close: %v, want an error at once", err)
	}
	a := s.adopt(t, s.driver, i.Handle())
	s.state(t, a, hypervisor.Running)
	s.kill(t, a)
}

func testLaunchCancelled(t *testing.T, s *suite) {
	p := s.plan(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.driver.Launch(ctx, p); errdefs.ClassOf(err) != errdefs.Canceled {
		t.Errorf("Launch with a cancelled context: %v", err)
	}
	s.nothingLeft(t, p)
	for _, d := range []time.Duration{time.Microsecond, time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		i, err := s.driver.Launch(ctx, p)
		cancel()
		if err == nil {
			s.kill(t, i)
		}
		s.nothingLeft(t, p)
	}
}

func testLaunchFails(t *testing.T, s *suite) {
	p := s.Broken(t)
	_, err := s.driver.Launch(s.ctx(t), p)
	if err == nil {
		t.Fatal("Launch of a broken plan succeeded")
	}
	if len(err.Error()) < 20 || strings.Contains(err.Error(), "\n") {
		t.Errorf("the error does not say what is wrong in one line: %v", err)
	}
	s.nothingLeft(t, p)
}

func testParallel(t *testing.T, s *suite) {
	plans := []hypervisor.Plan{s.plan(t), s.plan(t), s.plan(t)}
	pids := make([]int, len(plans))
	var wg sync.WaitGroup
	for n, p := range plans {
		wg.Go(func() {
			i, err := s.driver.Launch(s.ctx(t), p)
			if err != nil {
				t.Errorf("Launch: %v", err)
				return
			}
			pids[n] = i.PID()
			if err := i.Kill(s.ctx(t)); err != nil {
				t.Errorf("Kill: %v", err)
			}
		})
	}
	wg.Wait()
	if pids[0] == pids[1] || pids[1] == pids[2] {
		t.Errorf("pids %v", pids)
	}
}

func testConsole(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	console, ok := hypervisor.As[hypervisor.ConsoleOpener](i)
	if !ok {
		t.Skip("no ConsoleOpener")
	}
	first, err := console.OpenConsole(s.ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := console.OpenConsole(s.ctx(t)); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a second reader gets %v, want Conflict", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := console.OpenConsole(s.ctx(t))
	if err != nil {
		t.Fatalf("after Close: %v", err)
	}
	if st, err := os.Stat(console.ConsoleLog()); err != nil || !st.Mode().IsRegular() {
		t.Errorf("console log: %v", err)
	}
	s.kill(t, i)
	if _, err := io.Copy(io.Discard, second); err != nil && !errdefs.Is(err, errdefs.Internal) {
		t.Errorf("reading to the end: %v", err)
	}
	_ = second.Close()
	if _, err := console.OpenConsole(s.ctx(t)); err == nil {
		t.Error("the console of an ended VM opens")
	}
}

// testGuest needs a guest that echoes what it reads from the agent's channel.
func testGuest(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	s.Booted(t, i)
	guest, ok := hypervisor.As[hypervisor.GuestDialer](i)
	if !ok {
		t.Skip("no GuestDialer")
	}
	for _, word := range []string{"hello\n", "again\n"} {
		conn, err := guest.DialGuest(s.ctx(t))
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(s.Limit))
		if _, err := io.WriteString(conn, word); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, len(word))
		if _, err := io.ReadFull(conn, buf); err != nil || string(buf) != word {
			t.Fatalf("echo of %q: %q, %v", word, buf, err)
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s.kill(t, i)
	if _, err := guest.DialGuest(s.ctx(t)); err == nil {
		t.Error("an ended guest can be dialled")
	}
}
