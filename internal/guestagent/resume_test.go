package guestagent_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	sourceMAC = "02:00:00:00:00:01"
	cloneMAC  = "02:00:00:00:00:02"
	machineID = "0123456789abcdef0123456789abcdef"
)

func resumer(t *testing.T, a guest.Agent) guest.Resumer {
	t.Helper()
	r, ok := a.(guest.Resumer)
	if !ok {
		t.Fatal("our agent cannot be told that it was resumed")
	}
	return r
}

func freezer(t *testing.T, a guest.Agent) guest.Freezer {
	t.Helper()
	f, ok := a.(guest.Freezer)
	if !ok {
		t.Fatal("our agent cannot freeze")
	}
	return f
}

func settler(t *testing.T, a guest.Agent) guest.Settler {
	t.Helper()
	s, ok := a.(guest.Settler)
	if !ok {
		t.Fatal("our agent cannot settle")
	}
	return s
}

func clone() guest.Resumed {
	return guest.Resumed{
		Now: time.Unix(1700000000, 5), Entropy: []byte("from the host"), Hostname: "copy", Hosts: []string{"10.0.0.9 db"},
		NICs:  []vm.NIC{{MAC: cloneMAC, IP: "10.0.0.3", Prefix: 24, Gateway: "10.0.0.1"}},
		Clone: &guest.CloneIdentity{MACs: []string{sourceMAC}, MachineID: machineID}, Storage: 20 << 30,
	}
}

func TestResumedReachesTheMachineAndRepeatsItsAnswer(t *testing.T) {
	a, m := newAgent(t)
	err := a.Setup(t.Context(), guest.Setup{Hostname: "source", Process: &vm.Process{Entrypoint: []string{"sh", "-c", "echo one; echo two; exec cat /dev/tty 2>&1"}}})
	if err != nil {
		t.Fatal(err)
	}
	var seq uint64
	_ = a.Logs(t.Context(), 0, func(e guest.LogEntry) error {
		if seq = e.Seq; seq >= 2 {
			return errors.New("enough")
		}
		return nil
	})
	first, err := resumer(t, a).Resumed(t.Context(), clone())
	if err != nil {
		t.Fatal(err)
	}
	again, err := resumer(t, a).Resumed(t.Context(), clone()) // as if the answer was lost
	if d := diff.Of(first, again); err != nil || d != "" || first.LogSeq < 2 {
		t.Errorf("the first answer is %+v; the second: %v, %s", first, err, d)
	}
	if got := output(t, a, sh("echo $HOSTNAME")); got != "copy\n" {
		t.Errorf("commands of the clone run on %q", got)
	}
	m.mu.Lock()
	got := m.resumed[0]
	m.mu.Unlock()
	if got.Hostname != "copy" || !got.Now.Equal(time.Unix(1700000000, 5)) || string(got.Entropy) != "from the host" ||
		got.Clone == nil || got.Clone.MACs[0] != sourceMAC || got.Clone.MachineID != machineID || got.NICs[0].MAC != cloneMAC || got.Storage != 20<<30 {
		t.Errorf("the machine was told %+v", got)
	}
	waitFor(t, func() bool { m.mu.Lock(); defer m.mu.Unlock(); return m.forgot > 0 })
	booted := clone()
	booted.Clone.MACs = nil
	if _, err := resumer(t, a).Resumed(t.Context(), booted); err != nil {
		t.Errorf("a clone that has booted: %v", err)
	}
	woken := clone()
	woken.Clone, woken.Now = nil, time.Time{}
	if _, err := resumer(t, a).Resumed(t.Context(), woken); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if got := m.resumed[3]; got.Clone != nil || !got.Now.IsZero() {
		t.Errorf("a woken machine was told %+v", got)
	}
}

func TestResumedRefusesNonsenseBeforeItChangesAnything(t *testing.T) {
	a, m := newAgent(t)
	for _, now := range []time.Time{{}, time.Unix(0, 0), time.Unix(-5, 0)} {
		if err := a.(guest.ClockSetter).SetClock(t.Context(), now); !errdefs.IsInvalid(err) {
			t.Errorf("set the clock to %s: %v", now, err)
		}
	}
	for name, change := range map[string]func(*guest.Resumed){
		"entropy":       func(r *guest.Resumed) { r.Entropy = make([]byte, 1<<16) },
		"negative disk": func(r *guest.Resumed) { r.Storage = -1 },
		"long name":     func(r *guest.Resumed) { r.Hostname = strings.Repeat("x", 65) },
		"two lines":     func(r *guest.Resumed) { r.Hostname = "a\nb" },
		"machine id":    func(r *guest.Resumed) { r.Clone.MachineID = "abc" },
		"not hex":       func(r *guest.Resumed) { r.Clone.MachineID = strings.Repeat("x", 32) },
		"too many MACs": func(r *guest.Resumed) { r.Clone.MACs = []string{sourceMAC, cloneMAC} },
	} {
		r := clone()
		change(&r)
		if _, err := resumer(t, a).Resumed(t.Context(), r); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(m.resumed) != 0 {
		t.Errorf("the machine was told %+v", m.resumed)
	}
}

func TestFrozenGuest(t *testing.T) {
	sim, m := guestOf(t)
	a := connect(t, sim)
	f := freezer(t, a)
	if n, err := f.Thaw(t.Context()); n != 0 || err != nil {
		t.Errorf("thawing what is not frozen: %d, %v", n, err)
	}
	for range 2 { // the second call only restarts the timeout
		if n, err := f.Freeze(t.Context()); n != 2 || err != nil {
			t.Fatalf("freeze: %d, %v", n, err)
		}
	}
	if _, err := a.Exec(t.Context(), sh("true"), guest.Streams{}); !errdefs.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("exec: %v", err)
	}
	if err := a.Setup(t.Context(), guest.Setup{}); !errdefs.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("setup: %v", err)
	}
	if err := settler(t, a).Settle(t.Context()); !errdefs.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("settle: %v", err)
	}
	if _, err := a.Info(t.Context()); err != nil {
		t.Errorf("info: %v", err)
	}
	if n, err := f.Thaw(t.Context()); n != 2 || err != nil || m.isFrozen() {
		t.Errorf("thaw: %d, %v", n, err)
	}
	if got := output(t, a, sh("echo free")); got != "free\n" {
		t.Errorf("after the thaw: %q", got)
	}
	if err := settler(t, a).Settle(t.Context()); err != nil || m.settles() != 1 {
		t.Errorf("settle: %v, and the machine has settled %d times", err, m.settles())
	}

	freeze := func() {
		t.Helper()
		if _, err := freezer(t, a).Freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	freeze()
	if _, err := resumer(t, a).Resumed(t.Context(), clone()); err != nil { // a machine that is still frozen would complain
		t.Errorf("resumed while frozen: %v", err)
	}
	freeze()
	a.Close() // the host has gone, or the guest was resumed elsewhere
	waitFor(t, func() bool { return !m.isFrozen() })
	a = connect(t, sim)
	m.mu.Lock()
	m.broken = errors.New("no such ioctl")
	m.mu.Unlock()
	if _, err := freezer(t, a).Freeze(t.Context()); err == nil {
		t.Error("a freeze that failed is none")
	}
	if got := output(t, a, sh("echo free")); got != "free\n" {
		t.Errorf("after a freeze that failed: %q", got)
	}
	m.mu.Lock()
	m.broken = nil
	m.mu.Unlock()
	freeze()
	if err := a.Poweroff(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	<-m.off
	if m.isFrozen() {
		t.Error("it powered off frozen")
	}
}

func output(t *testing.T, a guest.Agent, e guest.Exec) string {
	t.Helper()
	var out, errs bytes.Buffer
	code, err := a.Exec(context.WithoutCancel(t.Context()), e, guest.Streams{Stdout: &out, Stderr: &errs})
	if err != nil || code != 0 {
		t.Fatalf("%v: code %d, %v, %s", e.Command, code, err, errs.String())
	}
	return out.String()
}
