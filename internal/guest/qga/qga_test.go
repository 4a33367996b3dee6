package qga

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// startAgent runs the real agent and returns the function that connects to it.
func startAgent(t *testing.T, args ...string) guest.Dial {
	t.Helper()
	bin := need.Tool(t, "qemu-ga")
	dir, err := os.MkdirTemp("", "qga") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	sock := filepath.Join(dir, "s")
	cmd := exec.Command(bin, append([]string{"-m", "unix-listen", "-p", sock, "-t", dir}, args...)...)
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return func(ctx context.Context) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			conn, err := new(net.Dialer).DialContext(ctx, "unix", sock)
			if err == nil || ctx.Err() != nil {
				return conn, err
			}
			<-tick.C // it does not listen yet
		}
	}
}

func connect(t *testing.T, dial guest.Dial) guest.Agent {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a, err := Connector{}.Connect(ctx, dial)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func TestRealAgent(t *testing.T) {
	dial := startAgent(t)
	a, ctx := connect(t, dial), t.Context()
	info, err := a.Info(ctx)
	if err != nil || info.Version == "" || len(info.BootID) != 36 || info.UptimeMS <= 0 || !info.SetUp || info.Process {
		t.Errorf("Info = %+v, %v", info, err)
	}
	if err := a.Setup(ctx, guest.Setup{Hostname: "x"}); err != nil {
		t.Errorf("Setup: %v", err)
	}
	if st, err := a.Stats(ctx); err != nil || st.MemoryTotal <= 0 || st.MemoryUsed <= 0 || st.CPUSeconds <= 0 || st.Processes <= 0 {
		t.Errorf("Stats = %+v, %v", st, err)
	}
	nr := a.(guest.NetworkReporter)
	found, err := nr.Interfaces(ctx)
	if err != nil || len(found) == 0 {
		t.Errorf("Interfaces = %+v, %v", found, err)
	}
	for _, i := range found {
		if i.Name == "lo" && (len(i.Addresses) == 0 || !i.Addresses[0].Addr().IsLoopback()) {
			t.Errorf("lo = %+v", i)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Info(ctx); !errdefs.IsUnavailable(err) {
		t.Errorf("Info after Close: %v", err)
	}
	if _, err := a.Wait(ctx); !errdefs.IsUnavailable(err) {
		t.Errorf("Wait after Close: %v", err)
	}
	if err := a.Logs(ctx, 0, nil); err != nil {
		t.Errorf("Logs after Close: %v", err)
	}
	connect(t, dial) // the next session finds a working agent
}

func TestExec(t *testing.T) {
	a := connect(t, startAgent(t))
	t.Setenv("COCOON_QGA_TEST", "not the agent's")
	for name, tt := range map[string]struct {
		e      guest.Exec
		stdin  string
		out    string
		stderr string
		code   int
		class  errdefs.Class // Internal (the zero value): no error
	}{
		"output":         {e: guest.Exec{Command: []string{"sh", "-c", "echo out; echo err >&2; exit 3"}}, out: "out\n", stderr: "err\n", code: 3},
		"signal":         {e: guest.Exec{Command: []string{"sh", "-c", "kill -9 $$"}}, code: 137},
		"stdin":          {e: guest.Exec{Command: []string{"cat"}}, stdin: "hello\x00\xff", out: "hello\x00\xff"},
		"env":            {e: guest.Exec{Command: []string{"sh", "-c", "echo $A $HOME"}, Env: []vm.EnvVar{{Name: "A", Value: "b=c d"}}}, out: "b=c d /root\n"},
		"folder":         {e: guest.Exec{Command: []string{"pwd"}, WorkDir: "/usr"}, out: "/usr\n"},
		"missing folder": {e: guest.Exec{Command: []string{"pwd"}, WorkDir: "/nope"}, class: errdefs.InvalidArgument},
		"missing":        {e: guest.Exec{Command: []string{"no-such-command"}}, class: errdefs.NotFound},
		"nothing":        {class: errdefs.InvalidArgument},
		"terminal":       {e: guest.Exec{Command: []string{"true"}, TTY: true}, class: errdefs.Unsupported},
		"user":           {e: guest.Exec{Command: []string{"true"}, User: "nobody"}, class: errdefs.Unsupported},
		"much output":    {e: guest.Exec{Command: []string{"head", "-c", "5000000", "/dev/zero"}}, out: strings.Repeat("\x00", 5000000)},
		"too much":       {e: guest.Exec{Command: []string{"head", "-c", "40000000", "/dev/zero"}}, class: errdefs.ResourceExhausted},
		"too long":       {e: guest.Exec{Command: []string{"sh", "-c", "head -c 15000000 /dev/zero; head -c 15000000 /dev/zero >&2"}}, class: errdefs.ResourceExhausted},
		"too much stdin": {e: guest.Exec{Command: []string{"cat"}}, stdin: strings.Repeat("x", maxStdin+1), class: errdefs.ResourceExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			var out, stderr bytes.Buffer
			st := guest.Streams{Stdout: &out, Stderr: &stderr}
			if tt.stdin != "" {
				st.Stdin = strings.NewReader(tt.stdin)
			}
			code, err := a.Exec(t.Context(), tt.e, st)
			if tt.class != errdefs.Internal {
				if !errdefs.Is(err, tt.class) {
					t.Fatalf("%v, want %v", err, tt.class)
				}
				return
			}
			if err != nil || code != tt.code || out.String() != tt.out || stderr.String() != tt.stderr {
				t.Errorf("%d, %v, %.40q, %q", code, err, out.String(), stderr.String())
			}
		})
	}
}

func TestExecSignalsAndCancel(t *testing.T) {
	a := connect(t, startAgent(t))
	signals := make(chan int, 1)
	signals <- 15
	if code, err := a.Exec(t.Context(), guest.Exec{Command: []string{"sleep", "1000"}}, guest.Streams{Signals: signals}); err != nil || code != 143 {
		t.Errorf("after SIGTERM: %d, %v", code, err)
	}
	pidFile := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := a.Exec(ctx, guest.Exec{Command: []string{"sh", "-c", "echo $$ >" + pidFile + "; exec sleep 1000"}}, guest.Streams{})
		done <- err
	}()
	// Other commands may run at the same time: this one waits until the first has begun.
	if code, err := a.Exec(t.Context(), guest.Exec{Command: []string{"sh", "-c", "until [ -s " + pidFile + " ]; do sleep 0.01; done"}}, guest.Streams{}); err != nil || code != 0 {
		t.Fatalf("%d, %v", code, err)
	}
	cancel()
	if err := <-done; !errdefs.Is(err, errdefs.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	pid, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/proc/" + strings.TrimSpace(string(pid))); err == nil {
		t.Error("the cancelled command runs on")
	}
}

func TestSwitchedOff(t *testing.T) {
	a, ctx := connect(t, startAgent(t, "-b", "guest-exec,guest-fsfreeze-freeze,guest-network-get-interfaces,guest-shutdown")), t.Context()
	if info, err := a.Info(ctx); err != nil || info.Version == "" || info.BootID != "" {
		t.Errorf("Info = %+v, %v", info, err)
	}
	_, stats := a.Stats(ctx)
	_, exec := a.Exec(ctx, guest.Exec{Command: []string{"true"}}, guest.Streams{})
	_, freeze := a.(guest.Freezer).Freeze(ctx)
	_, network := a.(guest.NetworkReporter).Interfaces(ctx)
	for what, err := range map[string]error{"stats": stats, "exec": exec, "freeze": freeze, "network": network, "poweroff": a.Poweroff(ctx, time.Second)} {
		if !errdefs.Is(err, errdefs.Unsupported) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
