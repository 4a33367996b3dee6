package guestagent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

func runMain(t *testing.T, a guest.Agent, p vm.Process, script string) {
	t.Helper()
	p.Entrypoint, p.Args = []string{"sh", "-c"}, []string{script}
	if err := a.Setup(t.Context(), guest.Setup{Hostname: "web", Process: &p}); err != nil {
		t.Fatal(err)
	}
}

// joined is an open session.
type joined struct {
	in    *io.PipeWriter
	out   *io.PipeReader
	leave func() // breaks the connection
	ended chan error
}

func join(t *testing.T, a guest.Agent, at guest.Attach) *joined {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	inRead, in := io.Pipe()
	out, outWrite := io.Pipe()
	j := &joined{in: in, out: out, leave: cancel, ended: make(chan error, 1)}
	go func() {
		err := a.(guest.Attacher).Attach(ctx, at, guest.Streams{Stdin: inRead, Stdout: outWrite})
		outWrite.Close()
		j.ended <- err
	}()
	t.Cleanup(func() { cancel(); in.Close(); out.Close() })
	return j
}

func (j *joined) say(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(j.in, text); err != nil {
		t.Fatal(err)
	}
}

func (j *joined) hear(t *testing.T, want string) {
	t.Helper()
	buf := make([]byte, len(want))
	if n, err := io.ReadFull(j.out, buf); err != nil || string(buf) != want {
		t.Fatalf("heard %q, want %q; %v", buf[:n], want, err)
	}
}

// The input of a main process stays open while sessions, and the host's whole connection, come and go.
func TestAttachKeepsTheInput(t *testing.T) {
	sim, _ := guestOf(t)
	a := connect(t, sim)
	runMain(t, a, vm.Process{Stdin: true}, "while read -r line; do echo got $line; done")
	first := join(t, a, guest.Attach{})
	first.say(t, "one\n")
	first.hear(t, "got one\n")
	second := join(t, a, guest.Attach{})
	second.say(t, "two\n")
	second.hear(t, "got two\n")
	first.hear(t, "got two\n")
	second.in.Close()
	if err := <-second.ended; err != nil {
		t.Errorf("a session whose input ended: %v", err)
	}
	first.say(t, "three\n")
	first.hear(t, "got three\n")
	first.leave()
	if err := <-first.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("a session that was left: %v", err)
	}
	a.Close()
	b := connect(t, sim)
	third := join(t, b, guest.Attach{})
	third.say(t, "four\n")
	third.hear(t, "got four\n")
	if info, err := b.Info(t.Context()); err != nil || !info.Process {
		t.Errorf("the process: %+v, %v", info, err)
	}
}

// stdinOnce: the process sees the end of its input when the first session ends, and the session sees the end of the
// process.
func TestAttachOnce(t *testing.T) {
	a, _ := newAgent(t)
	runMain(t, a, vm.Process{Stdin: true, StdinOnce: true}, "cat; echo over >&2; exit 3")
	in := bytes.Repeat([]byte("0123456789abcdef"), 100_000) // many windows
	var out, said bytes.Buffer
	err := a.(guest.Attacher).Attach(t.Context(), guest.Attach{}, guest.Streams{Stdin: bytes.NewReader(in), Stdout: &out, Stderr: &said})
	if err != nil || !bytes.Equal(out.Bytes(), in) || said.String() != "over\n" {
		t.Errorf("%v, %d bytes of %d, %q", err, out.Len(), len(in), said.String())
	}
	if x, err := a.Wait(t.Context()); err != nil || x.Code != 3 {
		t.Errorf("%+v, %v", x, err)
	}
	err = a.(guest.Attacher).Attach(t.Context(), guest.Attach{}, guest.Streams{})
	if !errdefs.IsFailedPrecondition(err) {
		t.Errorf("attach to what has ended: %v", err)
	}
}

// A session that is cut off ends the input as a normal end does, and the input is not offered again.
func TestAttachOnceCut(t *testing.T) {
	a, _ := newAgent(t)
	runMain(t, a, vm.Process{Stdin: true, StdinOnce: true}, "cat; sleep 1000")
	s := join(t, a, guest.Attach{})
	s.say(t, "x\n")
	s.hear(t, "x\n")
	watcher := make(chan error, 1)
	go func() {
		watcher <- a.(guest.Attacher).Attach(t.Context(), guest.Attach{}, guest.Streams{Stdout: io.Discard})
	}()
	s.leave()
	t.Log("left:", <-s.ended)
	deadline := time.Now().Add(time.Minute)
	for {
		// A session that comes before the agent notices the cut is accepted, and is cut off as well.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		silent, _ := io.Pipe()
		err := a.(guest.Attacher).Attach(ctx, guest.Attach{}, guest.Streams{Stdin: silent})
		cancel()
		silent.Close()
		if errdefs.IsFailedPrecondition(err) && strings.Contains(err.Error(), "stdinOnce") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("a second session with input: %v", err)
		}
	}
	if err := a.Poweroff(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if err := <-watcher; err != nil {
		t.Errorf("who only watches sees the end: %v", err)
	}
}

func TestAttachTerminal(t *testing.T) {
	a, _ := newAgent(t)
	runMain(t, a, vm.Process{Stdin: true, StdinOnce: true, TTY: true}, `stty -echo; read -r x; stty size; read -r x; echo "$x"`)
	s := join(t, a, guest.Attach{Rows: 33, Cols: 99})
	s.say(t, "\n")
	if got := sized(t, s); got != "33 99" {
		t.Errorf("the terminal is %q", got)
	}
	s.in.Close() // this does not end a terminal
	if err := <-s.ended; err != nil {
		t.Error(err)
	}
	again := join(t, a, guest.Attach{})
	again.say(t, "bye\n")
	again.hear(t, "bye\r\n")
	if err := <-again.ended; err != nil {
		t.Error(err)
	}
}

// sized is the line with the terminal's size, after echoes from before the echo was switched off.
func sized(t *testing.T, s *joined) string {
	t.Helper()
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := s.out.Read(b); err != nil {
			t.Fatal(err)
		}
		switch text := strings.TrimSpace(string(line)); {
		case b[0] != '\n':
			line = append(line, b[0])
		case text != "":
			return text
		default:
			line = nil
		}
	}
}

func TestAttachWithoutInput(t *testing.T) {
	a, _ := newAgent(t)
	at := a.(guest.Attacher)
	if err := at.Attach(t.Context(), guest.Attach{}, guest.Streams{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("before there is a process: %v", err)
	}
	runMain(t, a, vm.Process{}, "read -r x || while :; do echo tick; sleep 0.1; done")
	if err := at.Attach(t.Context(), guest.Attach{}, guest.Streams{Stdin: strings.NewReader("x")}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("with input: %v", err)
	}
	if err := at.Attach(t.Context(), guest.Attach{Container: "side"}, guest.Streams{}); !errdefs.IsNotFound(err) {
		t.Errorf("a container that is not: %v", err)
	}
	out, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- at.Attach(ctx, guest.Attach{}, guest.Streams{Stdout: w}) }()
	(&joined{out: out}).hear(t, "tick\n")
	cancel()
	out.Close()
	t.Log("cancelled:", <-ended)
}

// A process that does not read blocks the session that types, and nothing else.
func TestAttachToWhoDoesNotRead(t *testing.T) {
	a, _ := newAgent(t)
	runMain(t, a, vm.Process{Stdin: true}, "while [ -e "+t.TempDir()+" ]; do sleep 0.1; done") // as long as the test
	s := join(t, a, guest.Attach{})
	stuck := make(chan struct{})
	go func() {
		_, _ = s.in.Write(make([]byte, 4<<20))
		close(stuck)
	}()
	select {
	case <-stuck:
		t.Fatal("4 MiB were taken by nobody")
	case <-time.After(300 * time.Millisecond):
	}
	s.leave()
	if err := <-s.ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	s.in.Close()
	<-stuck
	var out bytes.Buffer
	if code, err := a.Exec(t.Context(), sh("echo fine"), guest.Streams{Stdout: &out}); code != 0 || err != nil || out.String() != "fine\n" {
		t.Errorf("%d, %v, %q", code, err, out.String())
	}
}

// echoes answers each connection with its input and then "bye", after the end of the input.
func echoes(t *testing.T, address string) int {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
				_, _ = io.WriteString(c, "bye")
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func TestForward(t *testing.T) {
	a, _ := newAgent(t)
	f := a.(guest.Forwarder)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(address, func(t *testing.T) {
			if strings.HasPrefix(address, "[") {
				need.IPv6(t)
			}
			port := echoes(t, address)
			var all sync.WaitGroup
			for i := range 8 {
				all.Go(func() {
					in := bytes.Repeat(fmt.Appendf(nil, "%d", i), 1<<20)
					var out bytes.Buffer
					err := f.Forward(t.Context(), port, guest.Streams{Stdin: bytes.NewReader(in), Stdout: &out})
					if err != nil || out.String() != string(in)+"bye" {
						t.Errorf("%v, %d bytes", err, out.Len())
					}
				})
			}
			all.Wait()
		})
	}
}

// Input is not read until there is a connection to send it to.
func TestForwardToNobody(t *testing.T) {
	a, _ := newAgent(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	in := strings.NewReader("kept")
	if err := a.(guest.Forwarder).Forward(t.Context(), port, guest.Streams{Stdin: in}); !errdefs.IsUnavailable(err) || in.Len() != 4 {
		t.Errorf("%v, %d bytes left", err, in.Len())
	}
	for _, port := range []int{0, 65536, -1} {
		if err := a.(guest.Forwarder).Forward(t.Context(), port, guest.Streams{}); !errdefs.IsInvalid(err) {
			t.Errorf("port %d: %v", port, err)
		}
	}
}

// A connection ends when its caller does.
func TestForwardIsCut(t *testing.T) {
	a, _ := newAgent(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	in, w := io.Pipe()
	defer w.Close()
	go func() {
		ended <- a.(guest.Forwarder).Forward(ctx, l.Addr().(*net.TCPAddr).Port, guest.Streams{Stdin: in, Stdout: io.Discard})
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%d, %v", n, err)
	}
}
