//go:build vm

package cocoond_test

import (
	"bytes"
	"strings"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// TestSilentGuest stops the process of a guest while a command runs in it. That simulates a kernel that has died, which
// no stream reports.
func TestSilentGuest(t *testing.T) {
	n := newNode(t, "guest: {silenceSeconds: 20}")
	rec := n.counting("web")
	said := make(chan string, 1)
	ended := make(chan error, 1)
	go func() {
		_, err := n.Exec(t.Context(), "web", guest.Exec{Command: []string{"sh", "-c", "echo up; sleep 1000"}}, guest.Streams{Stdout: first{said}})
		ended <- err
	}()
	select {
	case got := <-said:
		if got != "up\n" {
			t.Fatalf("the command said %q", got)
		}
	case err := <-ended:
		t.Fatalf("the command ended: %v", err)
	}
	if err := syscall.Kill(rec.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(rec.PID, syscall.SIGCONT) })
	silent := func(what string, err error) {
		t.Helper()
		if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "vm web has stopped answering") {
			t.Errorf("%s: %v", what, err)
		}
	}
	silent("a command that runs", <-ended)
	_, err := n.Exec(t.Context(), "web", guest.Exec{Command: []string{"true"}}, guest.Streams{})
	silent("a command after that", err)
	silent("a port after that", n.Forward(t.Context(), "web", 80, guest.Streams{Stdin: strings.NewReader("")}))

	before := len(n.counts("web"))
	if err := syscall.Kill(rec.PID, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if got := n.sh("web", "echo again"); got != "again" {
		t.Errorf("once it answers: %q", got)
	}
	n.until("its log goes on", func() bool { return len(n.counts("web")) > before })
}

// first sends the first bytes written to it.
type first struct{ said chan<- string }

func (f first) Write(p []byte) (int, error) {
	select {
	case f.said <- string(bytes.Clone(p)):
	default:
	}
	return len(p), nil
}
