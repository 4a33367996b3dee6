package guestagent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestExec(t *testing.T) {
	a, _ := newAgent(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "data"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		exec           guest.Exec
		stdin          string
		code           int
		stdout, stderr string
	}{
		"output":      {exec: sh("echo out; echo err >&2"), stdout: "out\n", stderr: "err\n"},
		"exit code":   {exec: sh("exit 7"), code: 7},
		"signal":      {exec: sh("kill -TERM $$"), code: 128 + 15},
		"stdin":       {exec: guest.Exec{Command: []string{"cat"}}, stdin: "fed", stdout: "fed"},
		"no stdin":    {exec: guest.Exec{Command: []string{"cat"}}},
		"environment": {exec: guest.Exec{Command: []string{"sh", "-c", "echo $A-$HOME"}, Env: []vm.EnvVar{{Name: "A", Value: "b"}, {Name: "HOME", Value: "/h"}}}, stdout: "b-/h\n"},
		"folder":      {exec: guest.Exec{Command: []string{"pwd"}, WorkDir: dir}, stdout: dir + "\n"},
		"relative":    {exec: guest.Exec{Command: []string{"./run", "x"}, WorkDir: dir}, stdout: "x\n"},
		"daemon left": {exec: sh("sleep 30 & echo $!; exit 3"), code: 3},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "relative" {
				if err := os.WriteFile(filepath.Join(dir, "run"), []byte("#!/bin/sh\necho $1\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			var out, errs bytes.Buffer
			st := guest.Streams{Stdout: &out, Stderr: &errs}
			if c.stdin != "" {
				st.Stdin = strings.NewReader(c.stdin)
			}
			code, err := a.Exec(t.Context(), c.exec, st)
			if err != nil {
				t.Fatal(err)
			}
			if name == "daemon left" {
				var pid int
				if _, err := fmt.Sscan(out.String(), &pid); err != nil {
					t.Fatal(err)
				}
				_ = syscall.Kill(pid, syscall.SIGKILL)
				out.Reset()
			}
			if code != c.code || out.String() != c.stdout || errs.String() != c.stderr {
				t.Errorf("code %d, stdout %q, stderr %q", code, out.String(), errs.String())
			}
		})
	}
}

func TestExecErrorsHaveClasses(t *testing.T) {
	a, _ := newAgent(t)
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, c := range map[string]struct {
		exec  guest.Exec
		class errdefs.Class
		says  string
	}{
		"nothing":         {guest.Exec{}, errdefs.InvalidArgument, "no command to run"},
		"not in PATH":     {guest.Exec{Command: []string{"no-such-command"}}, errdefs.NotFound, `"no-such-command" was not found in PATH`},
		"no such path":    {guest.Exec{Command: []string{"/no/such"}}, errdefs.NotFound, "/no/such does not exist"},
		"a folder":        {guest.Exec{Command: []string{dir}}, errdefs.InvalidArgument, "is a folder"},
		"not executable":  {guest.Exec{Command: []string{write("plain", "", 0o644)}}, errdefs.InvalidArgument, "not executable"},
		"not a program":   {guest.Exec{Command: []string{write("junk", "\x00\x01", 0o755)}}, errdefs.InvalidArgument, "not a program"},
		"no interpreter":  {guest.Exec{Command: []string{write("script", "#!/no/such\n", 0o755)}}, errdefs.NotFound, "interpreter"},
		"no such user":    {guest.Exec{Command: []string{"true"}, User: "no-such-user"}, errdefs.InvalidArgument, `user "no-such-user"`},
		"no such group":   {guest.Exec{Command: []string{"true"}, User: "0:no-such-group"}, errdefs.InvalidArgument, `group "no-such-group"`},
		"no such folder":  {guest.Exec{Command: []string{"true"}, WorkDir: "/no/such"}, errdefs.InvalidArgument, "/no/such"},
		"relative folder": {guest.Exec{Command: []string{"true"}, WorkDir: "here"}, errdefs.InvalidArgument, "absolute"},
		"NUL":             {guest.Exec{Command: []string{"echo", "a\x00b"}}, errdefs.InvalidArgument, "NUL"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := a.Exec(t.Context(), c.exec, guest.Streams{})
			if errdefs.ClassOf(err) != c.class || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("got %v: %v", errdefs.ClassOf(err), err)
			}
		})
	}
}

func TestTerminal(t *testing.T) {
	a, _ := newAgent(t)
	resize := make(chan guest.WinSize, 1)
	pr, pw := io.Pipe()
	in, feed := io.Pipe()
	done := make(chan error, 1)
	go func() {
		e := sh("stty size; read line; stty size; test -t 1 && echo terminal $line $TERM; exit 5")
		e.TTY, e.Rows, e.Cols = true, 24, 80
		code, err := a.Exec(t.Context(), e, guest.Streams{Stdin: in, Stdout: pw, Resize: resize})
		if err == nil && code != 5 {
			err = fmt.Errorf("exit code %d", code)
		}
		pw.CloseWithError(io.EOF)
		done <- err
	}()
	buf := make([]byte, 100)
	n, err := io.ReadAtLeast(pr, buf, len("24 80\r\n"))
	if err != nil || !strings.HasPrefix(string(buf[:n]), "24 80\r\n") {
		t.Fatalf("first size: %q, %v", buf[:n], err)
	}
	resize <- guest.WinSize{Rows: 50, Cols: 132}
	waitFor(t, func() bool { return len(resize) == 0 })
	fmt.Fprint(feed, "hello\n")
	rest, _ := io.ReadAll(pr)
	feed.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(rest), "50 132\r\n") || !strings.Contains(string(rest), "terminal hello xterm\r\n") {
		t.Errorf("output %q", rest)
	}
}

func TestTerminalEndsWithItsInput(t *testing.T) {
	a, _ := newAgent(t)
	e := guest.Exec{Command: []string{"cat"}, TTY: true}
	if code, err := a.Exec(t.Context(), e, guest.Streams{Stdin: strings.NewReader("bye\n")}); code != 0 || err != nil {
		t.Errorf("code %d, %v", code, err)
	}
}

func TestSignalReachesACommandThatDoesNotRead(t *testing.T) {
	a, _ := newAgent(t)
	signals := make(chan int)
	pr, pw := io.Pipe()
	go func() {
		_, _ = io.ReadFull(pr, make([]byte, 6)) // "ready\n"
		signals <- int(syscall.SIGUSR1)
	}()
	code, err := a.Exec(t.Context(), sh("trap 'exit 9' USR1; echo ready; while :; do sleep 0.01; done"),
		guest.Streams{Stdin: endless{}, Stdout: pw, Signals: signals})
	if code != 9 || err != nil {
		t.Errorf("code %d, %v", code, err)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestLargeInputComesBackWhole(t *testing.T) {
	a, _ := newAgent(t)
	want := bytes.Repeat([]byte("0123456789abcde\n"), 1<<17) // 2 MiB
	var got bytes.Buffer
	code, err := a.Exec(t.Context(), guest.Exec{Command: []string{"cat"}}, guest.Streams{Stdin: bytes.NewReader(want), Stdout: &got})
	if code != 0 || err != nil || !bytes.Equal(got.Bytes(), want) {
		t.Errorf("code %d, %v, %d of %d bytes", code, err, got.Len(), len(want))
	}
}

func TestSlowReaderDoesNotBlockAnother(t *testing.T) {
	a, _ := newAgent(t)
	ctx, cancel := context.WithCancel(t.Context())
	pr, pw := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = a.Exec(ctx, guest.Exec{Command: []string{"yes"}}, guest.Streams{Stdout: pw})
	}()
	_, _ = io.ReadFull(pr, make([]byte, 10)) // it runs; from now on nothing reads
	for range 20 {
		var out bytes.Buffer
		if code, err := a.Exec(t.Context(), sh("echo quick"), guest.Streams{Stdout: &out}); code != 0 || err != nil || out.String() != "quick\n" {
			t.Fatalf("code %d, %v, %q", code, err, out.String())
		}
	}
	cancel()
	pr.Close()
	<-done
}

func TestCancelKillsTheGroup(t *testing.T) {
	a, _ := newAgent(t)
	ctx, cancel := context.WithCancel(t.Context())
	pr, pw := io.Pipe()
	var pid int
	go func() {
		_, _ = fmt.Fscan(pr, &pid)
		cancel()
	}()
	_, err := a.Exec(ctx, sh("sleep 100 & echo $!; wait"), guest.Streams{Stdout: pw})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	waitFor(t, func() bool { return syscall.Kill(pid, 0) != nil || zombie(pid) })
}

func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(time.Minute); !cond(); {
		select {
		case <-tick.C:
		case <-end:
			t.Fatal("it did not happen")
		}
	}
}

func TestManyCommandsAtOnce(t *testing.T) {
	a, _ := newAgent(t)
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			var out bytes.Buffer
			code, err := a.Exec(t.Context(), sh(fmt.Sprintf("echo %d; exit %d", i, i)), guest.Streams{Stdout: &out})
			if code != i || err != nil || out.String() != fmt.Sprintln(i) {
				t.Errorf("%d: code %d, %v, %q", i, code, err, out.String())
			}
		})
	}
	wg.Wait()
}

func TestTooManyCommandsAreRefused(t *testing.T) {
	a, _ := newAgent(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	running := make(chan struct{}, 200)
	for range 128 {
		wg.Go(func() {
			_, _ = a.Exec(ctx, sh("echo; exec sleep 100"), guest.Streams{Stdout: signalOnWrite(running)})
		})
	}
	for range 128 {
		<-running
	}
	_, err := a.Exec(t.Context(), sh("true"), guest.Streams{})
	if errdefs.ClassOf(err) != errdefs.ResourceExhausted || !strings.Contains(err.Error(), "128 commands") {
		t.Errorf("got %v", err)
	}
}

type signalOnWrite chan struct{}
