package cli_test

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// dial connects to a socket as soon as somebody listens.
func dial(t *testing.T, network string, address func() string) net.Conn {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-tick.C {
		if at := address(); at != "" {
			if c, err := net.Dial(network, at); err == nil {
				return c
			}
		}
	}
	t.Fatal("nobody listens")
	return nil
}

// TestVNC: the viewer and the VM see each other. The command ends with either of them.
func TestVNC(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vnc")
	for _, c := range []struct {
		name string
		args []string
		end  func(viewer, server net.Conn)
	}{
		{"the viewer leaves", nil, func(viewer, _ net.Conn) { viewer.Close() }},
		{"the VM ends", []string{"--preserve-session"}, func(_, server net.Conn) { server.Close() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			ours, theirs := net.Pipe()
			n := &node{console: theirs}
			run := serve(t, n)
			type result struct {
				code     int
				out, err string
			}
			done := make(chan result, 1)
			go func() {
				code, out, errOut := run("", append([]string{"vm", "vnc", "--socket", path, "web"}, c.args...)...)
				done <- result{code, out, errOut}
			}()
			viewer := dial(t, "unix", func() string { return path })
			if st, err := os.Stat(path); err == nil && st.Mode().Perm() != 0o600 {
				t.Errorf("the socket has the mode %v", st.Mode())
			}
			go func() { _, _ = ours.Write([]byte("RFB ")) }()
			buf := make([]byte, 4)
			if _, err := io.ReadFull(viewer, buf); err != nil || string(buf) != "RFB " {
				t.Errorf("%q, %v", buf, err)
			}
			go func() { _, _ = viewer.Write([]byte("key!")) }()
			if _, err := io.ReadFull(ours, buf); err != nil || string(buf) != "key!" {
				t.Errorf("%q, %v", buf, err)
			}
			c.end(viewer, ours)
			if r := <-done; r.code != 0 || r.out != path+"\n" {
				t.Errorf("%+v", r)
			}
			if want := []bool{len(c.args) > 0}; !slices.Equal(n.kept, want) {
				t.Errorf("the session before is kept: %v", n.kept)
			}
			ours.Close()
			viewer.Close()
			if _, err := os.Stat(path); err == nil {
				t.Error("the socket is left behind")
			}
		})
	}
	t.Run("without an address", func(t *testing.T) {
		t.Setenv("TMPDIR", t.TempDir())
		ours, theirs := net.Pipe()
		run := serve(t, &node{console: theirs})
		done := make(chan string, 1)
		go func() { _, out, errOut := run("", "vm", "vnc", "web"); done <- out + errOut }()
		at := ""
		viewer := dial(t, "unix", func() string {
			if made, _ := filepath.Glob(filepath.Join(os.Getenv("TMPDIR"), "cocoon-vnc-*", "vnc")); len(made) == 1 {
				at = made[0]
			}
			return at
		})
		if st, err := os.Stat(filepath.Dir(at)); err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("the folder of the socket: %v, %v", st.Mode(), err)
		}
		viewer.Close()
		left := <-done
		if _, err := os.Stat(filepath.Dir(at)); left != at+"\n" || err == nil {
			t.Errorf("%q, and its folder: %v", left, err)
		}
		ours.Close()
	})
	t.Run("at a port", func(t *testing.T) {
		ours, theirs := net.Pipe()
		run := serve(t, &node{console: theirs})
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		address := l.Addr().String()
		l.Close()
		done := make(chan string, 1)
		go func() {
			_, out, errOut := run("", "vm", "vnc", "--port", address[strings.LastIndexByte(address, ':')+1:], "web")
			done <- out + errOut
		}()
		dial(t, "tcp", func() string { return address }).Close()
		if out := <-done; out != address+"\n" {
			t.Errorf("%q", out)
		}
		ours.Close()
	})
	if code, out, errOut := serve(t, &node{})("", "vm", "vnc", "web"); code == 0 || out != "" || !strings.Contains(errOut, "no graphics") {
		t.Errorf("%d %q %q", code, out, errOut)
	}
}

func TestScreenshot(t *testing.T) {
	n := &node{}
	run := serve(t, n)
	path := filepath.Join(t.TempDir(), "web.png")
	if code, _, errOut := run("", "vm", "screenshot", "-o", path, "web"); code != 0 {
		t.Error(errOut)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "\x89PNG" {
		t.Errorf("%q, %v", got, err)
	}
	if code, out, errOut := run("", "vm", "screenshot", "--wake", "web"); code != 0 || out != "\x89PNG" {
		t.Errorf("%q %s", out, errOut)
	}
	if !slices.Equal(n.kept, []bool{false, true}) {
		t.Error(n.kept)
	}
	if code, _, errOut := run("", "vm", "screenshot", "-o", path+"2", "other"); code == 0 || !strings.Contains(errOut, "no graphics") {
		t.Errorf("%d %s", code, errOut)
	}
	if _, err := os.Stat(path + "2"); err == nil {
		t.Error("a file was made for no picture")
	}
}
