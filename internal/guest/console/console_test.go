package console

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// screen is the output that a session has received.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) take() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.text.Reset()
	return s.text.String()
}

// opener opens a console.
type opener struct {
	con   io.ReadWriteCloser
	err   error
	count int
	last  string // its last screen
}

func (o *opener) source() Source {
	return Source{o.open, func(context.Context) []byte { return []byte(o.last) }}
}

func (o *opener) open(context.Context) (io.ReadWriteCloser, error) {
	o.count++
	return o.con, o.err
}

// Two sessions share a console: both see the output. The newer one writes, until it leaves. The last one closes the console.
func TestSharedConsole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Consoles
		near, far := net.Pipe()
		serial := &opener{con: near}
		var got screen
		gone := make(chan struct{})
		go func() { _, _ = io.Copy(&got, far); close(gone) }()

		var seen [2]screen
		var typed [2]*io.PipeWriter
		var cancels [2]context.CancelFunc
		var ends [2]chan error
		for i := range seen {
			var in *io.PipeReader
			in, typed[i] = io.Pipe()
			ctx, cancel := context.WithCancel(t.Context())
			cancels[i], ends[i] = cancel, make(chan error, 1)
			go func() {
				ends[i] <- c.Attach(ctx, "one", serial.source(), guest.Streams{Stdin: in, Stdout: &seen[i]})
				in.Close()
			}()
			synctest.Wait()
		}
		_, _ = far.Write([]byte("login: "))
		_, _ = typed[0].Write([]byte("a"))
		_, _ = typed[1].Write([]byte("b"))
		synctest.Wait()
		if one, two := seen[0].take(), seen[1].take(); serial.count != 1 || one != nowReads+"login: " || two != "login: " {
			t.Errorf("opened %d times; the sessions have seen %q and %q", serial.count, one, two)
		}
		if text := got.take(); text != "b" {
			t.Errorf("the guest has got %q", text)
		}
		cancels[1]()
		if err := <-ends[1]; !errors.Is(err, context.Canceled) {
			t.Errorf("a session whose client left: %v", err)
		}
		_, _ = far.Write([]byte("more"))
		_, _ = typed[0].Write([]byte("c"))
		synctest.Wait()
		if one, text := seen[0].take(), got.take(); one != nowWrites+"more" || text != "c" {
			t.Errorf("the other session sees %q, and the guest has got %q", one, text)
		}
		cancels[0]()
		if err := <-ends[0]; !errors.Is(err, context.Canceled) {
			t.Errorf("the last session: %v", err)
		}
		<-gone // the console was closed
		if len(c.open) != 0 {
			t.Error("a console without sessions is kept")
		}
	})
}

// A session whose input has ended writes no more, and one without input never did.
func TestConsoleInputEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Consoles
		near, far := net.Pipe()
		serial := &opener{con: near}
		var got, first, second screen
		go func() { _, _ = io.Copy(&got, far) }()
		in, typed := io.Pipe()
		ends := make(chan error, 3)
		attach := func(s guest.Streams) {
			go func() { ends <- c.Attach(t.Context(), "one", serial.source(), s) }()
			synctest.Wait()
		}
		attach(guest.Streams{Stdin: in, Stdout: &first})
		attach(guest.Streams{Stdout: &second})
		if text := first.take(); text != "" {
			t.Errorf("a session that only reads: the other one sees %q", text)
		}
		attach(guest.Streams{Stdin: strings.NewReader("script\n")})
		_, _ = typed.Write([]byte("back\n"))
		synctest.Wait()
		if one, text := first.take(), got.take(); one != nowReads+nowWrites || text != "script\nback\n" {
			t.Errorf("after a script the first session sees %q, and the guest has got %q", one, text)
		}
		far.Close()
		typed.Close()
		for range 3 {
			if err := <-ends; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestConsoleEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Consoles
		refused := &opener{err: errdefs.Conflictf("in use")}
		if err := c.Attach(t.Context(), "one", refused.source(), guest.Streams{}); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("a console that does not open: %v", err)
		}
		near, far := net.Pipe()
		serial := &opener{con: near}
		end := make(chan error, 1)
		var seen screen
		go func() {
			end <- c.Attach(t.Context(), "one", serial.source(), guest.Streams{Stdin: strings.NewReader(""), Stdout: &seen})
		}()
		synctest.Wait()
		_, _ = far.Write([]byte("bye"))
		far.Close()
		if err := <-end; err != nil || seen.take() != "bye" {
			t.Errorf("the VM has stopped: %v", err)
		}
		if len(c.open) != 0 {
			t.Error("a console that has ended is kept")
		}
	})
}

// A session that reads nothing is ended, and does not stop the others.
func TestConsoleOfASlowSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Consoles
		near, far := net.Pipe()
		serial := &opener{con: near}
		stuck, release := io.Pipe()
		slow, fast := make(chan error, 1), make(chan error, 1)
		go func() { slow <- c.Attach(t.Context(), vm.ID("one"), serial.source(), guest.Streams{Stdout: release}) }()
		var seen screen
		go func() { fast <- c.Attach(t.Context(), vm.ID("one"), serial.source(), guest.Streams{Stdout: &seen}) }()
		synctest.Wait()
		total := 0
		for range consoleBacklog + 10 {
			_, _ = far.Write([]byte("x"))
			synctest.Wait()
			total += len(seen.take())
		}
		if total != consoleBacklog+10 {
			t.Errorf("the other session has seen %d pieces", total)
		}
		go func() { _, _ = io.Copy(io.Discard, stuck) }()
		if err := <-slow; !errdefs.IsUnavailable(err) {
			t.Errorf("the slow session: %v", err)
		}
		far.Close()
		if err := <-fast; err != nil {
			t.Error(err)
		}
		stuck.Close()
	})
}

// A session sees the last screen first, and nothing of it twice.
func TestLastScreenOfConsole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Consoles
		near, far := net.Pipe()
		serial := &opener{con: near, last: "one\ntwo\n$ "}
		var first, second screen
		ends := make(chan error, 2)
		go func() { ends <- c.Attach(t.Context(), "one", serial.source(), guest.Streams{Stdout: &first}) }()
		synctest.Wait()
		_, _ = far.Write([]byte("ls\n"))
		synctest.Wait()
		if got := first.take(); got != "one\ntwo\n$ ls\n" {
			t.Errorf("the first session sees %q", got)
		}
		reading := serial.source()
		log := make(chan string)
		reading.Screen = func(context.Context) []byte { return []byte(<-log) }
		go func() { ends <- c.Attach(t.Context(), "one", reading, guest.Streams{Stdout: &second}) }()
		synctest.Wait()
		_, _ = far.Write([]byte("a file\n")) // the guest writes while the log is read, and afterwards
		_, _ = far.Write([]byte("$ "))
		synctest.Wait()
		log <- "two\n$ ls\na file\n"
		synctest.Wait()
		if got := second.take(); got != "two\n$ ls\na file\n$ " {
			t.Errorf("the second session sees %q", got)
		}
		far.Close()
		for range 2 {
			if err := <-ends; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestUnseen(t *testing.T) {
	for _, c := range []struct{ screen, since, want string }{
		{"", "", ""}, {"abc", "", ""}, {"", "abc", "abc"}, {"abc", "abc", ""}, {"abc", "bcd", "d"}, {"abc", "d", "d"}, {"aa", "aaa", "a"}, {"xabc", "abcabc", "abc"},
	} {
		if got := string(unseen([]byte(c.screen), []byte(c.since))); got != c.want {
			t.Errorf("%q, then %q: %q, want %q", c.screen, c.since, got, c.want)
		}
	}
}
