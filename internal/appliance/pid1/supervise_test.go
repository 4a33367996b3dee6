package pid1

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestDelays(t *testing.T) {
	b := delays()
	var got []time.Duration
	for range 9 {
		got = append(got, b.NextBackOff())
	}
	if got[0] != firstDelay || got[1] != 2*firstDelay || got[8] != longDelay {
		t.Errorf("got %v", got)
	}
	b.Reset()
	if d := b.NextBackOff(); d != firstDelay {
		t.Errorf("after a reset: %v", d)
	}
}

// A child that ends is started again, and what a child left running can still write after it.
func TestChildIsKeptRunning(t *testing.T) {
	dir := t.TempDir()
	turns := filepath.Join(dir, "turns")
	s := newSupervisor([]Child{{Name: "turn", Path: "/bin/sh", Args: []string{"-c", `echo "turn $WORD"; echo x >>"$TURNS"; [ "$(wc -l <"$TURNS")" -lt 2 ] && kill -9 $$; exec sleep 600`}, Env: []string{"WORD=said", "TURNS=" + turns}}},
		newReaper(), slog.New(slog.DiscardHandler), dir)
	ctx, stop := context.WithCancel(t.Context())
	s.start(ctx)
	waitFor(t, func() bool { b, _ := os.ReadFile(turns); return len(b) == 4 })
	waitFor(t, func() bool {
		b, _ := os.ReadFile(filepath.Join(dir, "turn.log"))
		return string(b) == "turn said\nturn said\n"
	})
	stop()
	s.stop(time.Minute, time.Minute) // sleep ends with SIGTERM
	if len(s.running) != 0 {
		t.Errorf("still running: %v", s.running)
	}
}

// The watched child ends first: it needs the others while it ends.
func TestDaemonEndsBeforeWhatItNeeds(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "out")
	s := newSupervisor([]Child{
		{Name: "needed", Path: "/bin/sh", Args: []string{"-c", `echo $$ >"$DIR/pid"; exec sleep 600`}, Env: []string{"DIR=" + dir}},
		{
			Name: "daemon", Path: "/bin/sh", Env: []string{"DIR=" + dir}, Watched: true,
			Args: []string{"-c", `trap 'sleep 0.2; kill -0 "$(cat "$DIR/pid")" && echo there >"$DIR/out"; exit' TERM; : >"$DIR/ready"; while :; do sleep 0.05; done`},
		},
	}, newReaper(), slog.New(slog.DiscardHandler), dir)
	ctx, stop := context.WithCancel(t.Context())
	s.start(ctx)
	waitFor(t, func() bool { b, _ := os.ReadFile(filepath.Join(dir, "pid")); return bytes.HasSuffix(b, []byte("\n")) })
	waitFor(t, func() bool { _, err := os.Stat(filepath.Join(dir, "ready")); return err == nil })
	stop()
	s.stop(time.Minute, time.Minute)
	if b, _ := os.ReadFile(out); string(b) != "there\n" || len(s.running) != 0 {
		t.Errorf("it saw %q, and still running are %v", b, s.running)
	}
}

func waitFor(t *testing.T, what func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !what() {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("it did not happen")
		case <-time.After(time.Minute):
			t.Fatal("it did not happen")
		}
	}
}

func TestChildThatDoesNotStart(t *testing.T) {
	s := newSupervisor(nil, newReaper(), slog.New(slog.DiscardHandler), t.TempDir())
	if err := s.once(t.Context(), Child{Name: "none", Path: "/no/such/program"}); err == nil {
		t.Error("it started")
	}
	if err := s.once(t.Context(), Child{Name: "short", Path: "/bin/true"}); err == nil || !strings.Contains(err.Error(), "by itself") {
		t.Errorf("a child that ends well: got %v", err)
	}
}

func TestLogHasALimit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	line := strings.Repeat("a", 1023) + "\n"
	keepLog(io.MultiReader(strings.NewReader(strings.Repeat(line, logLimit/1024+10)), strings.NewReader("end, without a line feed")), path)
	old, err := os.Stat(path + ".1")
	if err != nil || old.Size() < logLimit || old.Size() > logLimit+2048 {
		t.Fatalf("got %v, %v", old, err)
	}
	b, err := os.ReadFile(path)
	if err != nil || !bytes.HasSuffix(b, []byte("end, without a line feed")) || len(b) > 20*1024 {
		t.Errorf("got %d bytes, %v", len(b), err)
	}
}

// The output of a program is not held open by what it leaves behind, and its error says what it said.
func TestRunProgram(t *testing.T) {
	m := &machine{reaper: newReaper()}
	out, err := m.run(t.Context(), "sh", "-c", "echo said; echo why >&2; sleep 600 & echo $!; exit 3")
	said, pid, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	defer func() { _ = exec.Command("kill", pid).Run() }()
	if said != "said" || err == nil || !strings.Contains(err.Error(), "why") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got %q, %v", out, err)
	}
	if _, err := m.run(t.Context(), "/no/such/program"); err == nil {
		t.Error("it ran")
	}
}

func TestRunIsForProcessOne(t *testing.T) {
	if err := Run(Config{}); err == nil {
		t.Error("it ran")
	}
}

// A step that panics does not end process 1.
func TestGuard(t *testing.T) {
	m := &machine{log: slog.New(slog.DiscardHandler)}
	if m.guard("panic", func() error { panic("x") }) || m.guard("fail", func() error { return io.EOF }) || !m.guard("work", func() error { return nil }) {
		t.Error("the results are wrong")
	}
}
