package guestagent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/agent"
	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/guest/link/linktest"
	"cocoonstack.io/cocoon/internal/guestagent"
	"cocoonstack.io/cocoon/internal/vm"
)

// machine stands in for the VM: this test must not rename or power off the computer it runs on.
type machine struct {
	mu      sync.Mutex
	ids     []guestagent.Identity
	resumed []guestagent.Resumption
	frozen  bool
	thaws   int
	forgot  int
	tuned   []vm.Sysctl
	settled int
	clock   time.Time
	broken  error // of Freeze
	off     chan struct{}
}

func (m *machine) Identify(_ context.Context, id guestagent.Identity) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ids = append(m.ids, id)
	return nil
}

func (m *machine) Resume(_ context.Context, r guestagent.Resumption) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.frozen {
		return errors.New("resumed while frozen")
	}
	m.resumed = append(m.resumed, r)
	return nil
}

func (m *machine) SetClock(now time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.clock = now
	return nil
}

func (m *machine) Tune(settings []vm.Sysctl) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tuned = append(m.tuned, settings...)
	return nil
}

func (m *machine) Settle(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.settled++
	return nil
}

func (m *machine) Forget() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgot++
	return nil
}

func (m *machine) Freeze() (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken != nil {
		return 0, m.broken
	}
	m.frozen = true
	return 2, nil
}

func (m *machine) Thaw() (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen = false
	m.thaws++
	return 2, nil
}

func (m *machine) settles() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.settled
}

func (m *machine) isFrozen() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.frozen
}

func (m *machine) Off() { close(m.off) }

// guestOf runs an agent whose commands are processes of this computer.
func guestOf(t *testing.T) (*linktest.Sim, *machine) {
	t.Helper()
	sim, m := linktest.New(), &machine{off: make(chan struct{})}
	srv := guestagent.New(guestagent.Config{Version: "test"}, m)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx, link.NewPort(sim)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("agent: %v", err)
		}
		sim.Close()
	})
	return sim, m
}

func connect(t *testing.T, sim *linktest.Sim) guest.Agent {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a, err := agent.Connector{}.Connect(ctx, sim.Dial)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func newAgent(t *testing.T) (guest.Agent, *machine) {
	t.Helper()
	sim, m := guestOf(t)
	return connect(t, sim), m
}

// sh runs a shell script as the exec of a.
func sh(script string) guest.Exec { return guest.Exec{Command: []string{"sh", "-c", script}} }

func (s signalOnWrite) Write(p []byte) (int, error) {
	s <- struct{}{}
	return len(p), nil
}

func setup(script string) guest.Setup {
	return guest.Setup{
		Hostname: "web-0",
		NICs:     []vm.NIC{{MAC: "02:00:00:00:00:01", IP: "10.0.0.2", Prefix: 24, Gateway: "10.0.0.1", DNS: []string{"10.0.0.1"}, MTU: 1400}},
		Process:  &vm.Process{Entrypoint: []string{"sh", "-c"}, Args: []string{script}, Env: []vm.EnvVar{{Name: "ROLE", Value: "main"}}},
	}
}

func logs(t *testing.T, a guest.Agent, after uint64) (out []guest.LogEntry) {
	t.Helper()
	err := a.Logs(t.Context(), after, func(e guest.LogEntry) error {
		out = append(out, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestLifeOfAMainProcess(t *testing.T) {
	sim, m := guestOf(t)
	a := connect(t, sim)
	s := setup("echo one; echo two >&2; printf half; exit 3")
	for range 2 { // the second call starts nothing again
		if err := a.Setup(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	got := logs(t, a, 0)
	var text []string
	for i, e := range got {
		text = append(text, e.Stream+":"+string(e.Data))
		if e.Seq != uint64(i+1) || time.Since(e.Time) > time.Minute {
			t.Errorf("entry %d: seq %d at %v", i, e.Seq, e.Time)
		}
	}
	joined := strings.Join(text, "|")
	if len(got) != 3 || !strings.Contains(joined, "stdout:one\n") || !strings.Contains(joined, "stderr:two\n") || !strings.Contains(joined, "stdout:half") {
		t.Errorf("log %q", joined)
	}
	a.Close() // the host's daemon disconnects; the exit code is kept for it
	a = connect(t, sim)
	if tail := logs(t, a, 2); len(tail) != 1 || tail[0].Seq != 3 {
		t.Errorf("after 2: %v", tail)
	}
	exit, err := a.Wait(t.Context())
	if err != nil || exit.Code != 3 || exit.FinishedAt.Before(exit.StartedAt) {
		t.Errorf("exit %+v, %v", exit, err)
	}
	info, err := a.Info(t.Context())
	if err != nil || !info.SetUp || info.Process || info.Version != "test" || info.BootID == "" || info.UptimeMS <= 0 {
		t.Errorf("info %+v, %v", info, err)
	}
	select {
	case <-m.off:
		t.Fatal("powered off before the exit code was acknowledged")
	default:
	}
	if err := a.AckExit(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-m.off
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.ids) != 2 || m.ids[0].Hostname != "web-0" || m.ids[0].NICs[0].Gateway != "10.0.0.1" || m.ids[0].NICs[0].MTU != 1400 {
		t.Errorf("identities %+v", m.ids)
	}
}

func TestExecInheritsFromTheMainProcess(t *testing.T) {
	a, _ := newAgent(t)
	s := setup("exec sleep 100")
	s.Process.WorkDir = t.TempDir()
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if _, err := a.Exec(t.Context(), sh("echo $ROLE $HOSTNAME; pwd"), guest.Streams{Stdout: &out}); err != nil {
		t.Fatal(err)
	}
	if want := "main web-0\n" + s.Process.WorkDir + "\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
	if err := a.AckExit(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("acknowledged the exit of a running process: %v", err)
	}
	if err := a.Poweroff(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
}

func TestPoweroffAsksThenKills(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		grace  time.Duration
		code   int
	}{
		"asked":  {"trap 'exit 4' TERM; echo up; while :; do sleep 0.01; done", 10 * time.Second, 4},
		"killed": {"trap '' TERM; echo up; while :; do sleep 0.01; done", 50 * time.Millisecond, 137},
	} {
		t.Run(name, func(t *testing.T) {
			a, m := newAgent(t)
			if err := a.Setup(t.Context(), setup(c.script)); err != nil {
				t.Fatal(err)
			}
			stop := errors.New("seen")
			if err := a.Logs(t.Context(), 0, func(guest.LogEntry) error { return stop }); !errors.Is(err, stop) {
				t.Fatal(err)
			}
			code := make(chan int, 1)
			waiting := make(chan struct{})
			go func() {
				close(waiting)
				exit, err := a.Wait(t.Context())
				if err != nil {
					t.Errorf("wait: %v", err)
				}
				_ = a.AckExit(t.Context())
				code <- exit.Code
			}()
			<-waiting
			if _, err := a.Info(t.Context()); err != nil { // so Wait's request was sent before this one
				t.Fatal(err)
			}
			if err := a.Poweroff(t.Context(), c.grace); err != nil {
				t.Fatal(err)
			}
			<-m.off
			if got := <-code; got != c.code {
				t.Errorf("exit code %d, want %d", got, c.code)
			}
		})
	}
}

func TestMainProcessThatCannotStart(t *testing.T) {
	a, _ := newAgent(t)
	s := setup("")
	s.Process.Entrypoint = []string{"/no/such/entrypoint"}
	if err := a.Setup(t.Context(), s); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "/no/such/entrypoint") {
		t.Fatalf("got %v", err)
	}
	if err := a.Setup(t.Context(), setup("true")); err != nil { // the guest stays up and accepts a corrected Setup
		t.Fatal(err)
	}
	if exit, err := a.Wait(t.Context()); err != nil || exit.Code != 0 {
		t.Errorf("exit %+v, %v", exit, err)
	}
}

func TestStats(t *testing.T) {
	a, _ := newAgent(t)
	s, err := a.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.CPUSeconds <= 0 || s.MemoryTotal <= s.MemoryUsed || s.MemoryUsed <= 0 || s.DiskTotal < s.DiskUsed || s.Processes < 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestLostLink(t *testing.T) {
	sim, _ := guestOf(t)
	a := connect(t, sim)
	pr, pw := io.Pipe()
	var pid int
	result := make(chan error, 1)
	go func() {
		_, err := a.Exec(t.Context(), sh("echo $$; exec sleep 100"), guest.Streams{Stdout: pw})
		result <- err
	}()
	if _, err := fmt.Fscan(pr, &pid); err != nil {
		t.Fatal(err)
	}
	a.Close()
	if err := <-result; !errdefs.IsUnavailable(err) && !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	<-a.Done()
	if _, err := a.Info(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("after the end: %v", err)
	}
	waitFor(t, func() bool { return syscall.Kill(pid, 0) != nil || zombie(pid) })
}

func TestReconnectsUnderLoad(t *testing.T) {
	sim, _ := guestOf(t)
	for range 50 {
		a := connect(t, sim)
		go func() { // disconnect in the middle
			_, _ = a.Exec(t.Context(), sh("head -c 100000 /dev/zero; exec sleep 10"), guest.Streams{Stdin: endless{}, Stdout: io.Discard})
		}()
		if _, err := a.Info(t.Context()); err != nil {
			t.Fatal(err)
		}
		a.Close()
	}
}
