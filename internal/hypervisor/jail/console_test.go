package jail

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestConsole types on the console of a process that outlives those who have started it.
func TestConsole(t *testing.T) {
	need.Root(t)
	path := t.TempDir()
	dir, err := OpenDir(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	c, err := NewConsole(dir, "console.log")
	if err != nil {
		t.Fatal(err)
	}
	p, err := proc.Start(proc.Spec{Path: "/bin/cat", Args: []string{"cat"}, In: c.In, Out: c.Out, Files: []*os.File{c.End}})
	c.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(p.Kill(context.Background()), p.Close()) })
	log := filepath.Join(path, "console.log")
	say := func(word string) {
		t.Helper()
		conn, err := OpenConsole(p, 3, log)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, word); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(word))
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != word {
			t.Errorf("%q, %v; want %q", got, err, word)
		}
	}
	say("first\n")
	say("\x03\x04\x00\r\n") // no byte has a meaning
	if text, err := os.ReadFile(log); err != nil || string(text) != "first\n\x03\x04\x00\r\n" {
		t.Errorf("the log has %q, %v", text, err)
	}
	if _, err := OpenConsole(p, 1, log); err == nil {
		t.Error("a file is taken for a console")
	}
	conn, err := OpenConsole(p, 3, log)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(conn); err != nil || len(rest) > 0 {
		t.Errorf("at the end: %q, %v", rest, err)
	}
	if _, err := OpenConsole(p, 3, log); err == nil {
		t.Error("the console of an ended process opens")
	}
}

func TestFollow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	write := func(s string) {
		t.Helper()
		if _, err := w.WriteString(s); err != nil {
			t.Fatal(err)
		}
	}
	write("before ")
	over := make(chan struct{})
	all, err := Follow(path, 0, over)
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	next := func(want string) {
		t.Helper()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(all, got); err != nil || string(got) != want {
			t.Fatalf("%q, %v; want %q", got, err, want)
		}
	}
	next("before ")
	done := make(chan []byte)
	go func() {
		rest, _ := io.ReadAll(all)
		done <- rest
	}()
	write("after ")
	write("end")
	close(over)
	if got := <-done; string(got) != "after end" {
		t.Errorf("%q", got)
	}
	cut, err := Follow(path, 1000, over) // as if it had been longer
	if err != nil {
		t.Fatal(err)
	}
	defer cut.Close()
	if got, err := io.ReadAll(cut); err != nil || len(got) > 0 {
		t.Errorf("of a file that was cut: %q, %v", got, err)
	}
	closed, err := Follow(path, -1, nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = closed.Close() }()
	if n, err := closed.Read(make([]byte, 10)); n != 0 || err == nil || errors.Is(err, io.EOF) {
		t.Errorf("closed: %d, %v", n, err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if _, err := Follow(link, 0, nil); err == nil {
		t.Error("it follows a link")
	}
}

// A node has more VMs than Linux gives a user instances of inotify.
func TestManyFollow(t *testing.T) {
	dir := t.TempDir()
	var all []*Follower
	for n := range 300 {
		path := filepath.Join(dir, strconv.Itoa(n/2)) // two follow each file
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := Follow(path, 0, nil)
		if err != nil {
			t.Fatalf("follower %d: %v", n, err)
		}
		defer f.Close()
		all = append(all, f)
	}
	if err := all[1].Close(); err != nil { // the other one goes on
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for n, f := range all {
		if n == 1 {
			continue
		}
		wg.Go(func() {
			buf := make([]byte, 8)
			if got, err := io.ReadFull(f, buf); err != nil || string(buf[:got]) != "appended" {
				t.Errorf("follower %d reads %q, %v", n, buf[:got], err)
			}
		})
	}
	for n := range len(all) / 2 {
		file, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(n)), os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		_, err = file.WriteString("appended")
		if err := errors.Join(err, file.Close()); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
}
