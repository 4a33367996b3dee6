package up

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// eventually polls ok until it returns true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		<-time.After(5 * time.Millisecond)
	}
}

func logged(path string) string {
	data, _ := os.ReadFile(path) // does not exist yet: nothing logged
	return string(data)
}

// kept runs c under a supervisor and returns a function that stops the child and returns when it has ended.
func kept(t *testing.T, c child) (ended chan error, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended, done := make(chan error, 1), make(chan struct{})
	s := newSpawner()
	go func() {
		s.keep(ctx, c, slog.New(slog.DiscardHandler), ended)
		close(done)
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return ended, stop
}

func script(t *testing.T, text string) child {
	t.Helper()
	return child{name: "child", path: "/bin/sh", args: []string{"-c", text}, log: filepath.Join(t.TempDir(), "child.log"), stop: 20 * time.Second}
}

// TestChildrenIgnoreTheShell exports settings of our programs, as the README does, before an instance starts.
func TestChildrenIgnoreTheShell(t *testing.T) {
	for _, name := range []string{"EPOCH_TOKEN", "VK_NODE_CPU", "COCOOND_STATE_DIR", "KUBECONFIG", "NOTIFY_SOCKET", "METRICS_ADDR"} {
		t.Setenv(name, "of-the-shell")
	}
	t.Setenv("https_proxy", "http://proxy.test:3128")
	c := script(t, "env")
	c.env = []string{"OWN=1"}
	_, stop := kept(t, c)
	eventually(t, "the child has ended", func() bool { return strings.Contains(logged(c.log), "OWN=1") })
	stop()
	if got := logged(c.log); strings.Contains(got, "of-the-shell") || !strings.Contains(got, "https_proxy=http://proxy.test:3128\n") || !strings.Contains(got, "PATH=") {
		t.Errorf("environment of the child:\n%s", got)
	}
}

func TestAChildThatEndsIsStartedAgain(t *testing.T) {
	c := script(t, "echo run; exit 3")
	ended, stop := kept(t, c)
	err := <-ended // the test's own timeout ends it otherwise
	if err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("the child that does not start was told as %v", err)
	}
	if runs := strings.Count(logged(c.log), "run\n"); runs < startTries {
		t.Errorf("the child was given up after %d runs: the next one may start", runs)
	}
	eventually(t, "another run", func() bool { return strings.Count(logged(c.log), "run\n") > startTries })
	stop()
}

func TestAChildIsAskedToEnd(t *testing.T) {
	c := script(t, "trap 'echo asked; exit 0' TERM; echo up; while :; do sleep 0.05; done")
	_, stop := kept(t, c)
	eventually(t, "up", func() bool { return logged(c.log) != "" })
	stop()
	if got := logged(c.log); got != "up\nasked\n" {
		t.Errorf("log %q", got)
	}
}

func TestADeafChildIsKilled(t *testing.T) {
	c := script(t, "trap '' TERM; echo up; while :; do sleep 0.05; done")
	c.stop = 100 * time.Millisecond
	_, stop := kept(t, c)
	eventually(t, "up", func() bool { return logged(c.log) != "" })
	stop() // does not return before its end
}

func TestAChildThatCannotStart(t *testing.T) {
	c := script(t, "")
	c.path = filepath.Join(t.TempDir(), "missing")
	ended, _ := kept(t, c)
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "start child") {
			t.Errorf("got %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("nobody was told")
	}
}

func TestALongLogIsPutAside(t *testing.T) {
	c := script(t, "echo anew")
	if err := os.WriteFile(c.log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(c.log, maxLog+1); err != nil { // sparse
		t.Fatal(err)
	}
	p, err := newSpawner().run(c)
	if err != nil {
		t.Fatal(err)
	}
	<-p.done
	if got := logged(c.log); got != "anew\n" {
		t.Errorf("log of %d bytes", len(got))
	}
	if fi, err := os.Stat(c.log + ".1"); err != nil || fi.Size() != maxLog+1 {
		t.Errorf("the old log: %v, %v", fi, err)
	}
}
