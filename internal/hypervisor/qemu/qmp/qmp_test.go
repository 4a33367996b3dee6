package qmp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

const hello = `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": ["oob"]}}` + "\r\n"

// peer is QEMU's end of the connection: it answers each line with what answer returns.
func peer(t *testing.T, answer func(cmd string, id uint64) string) net.Conn {
	t.Helper()
	ours, theirs := net.Pipe()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer theirs.Close()
		if _, err := io.WriteString(theirs, hello); err != nil {
			return
		}
		for sc := bufio.NewScanner(theirs); sc.Scan(); {
			var cmd struct {
				Execute string
				ID      uint64
			}
			if err := json.Unmarshal(sc.Bytes(), &cmd); err != nil {
				t.Errorf("client wrote %q: %v", sc.Text(), err)
			}
			if _, err := io.WriteString(theirs, answer(cmd.Execute, cmd.ID)); err != nil {
				return
			}
		}
	})
	t.Cleanup(func() {
		_ = ours.Close()
		wg.Wait()
	})
	return ours
}

func ok(cmd string, id uint64) string {
	switch cmd {
	case "query-status":
		return `{"timestamp": {"seconds": 5, "microseconds": 7}, "event": "RESUME"}` + "\r\n" +
			fmt.Sprintf(`{"return": {"status": "running"}, "id": %d}`, id) + "\r\n"
	case "bad":
		return fmt.Sprintf(`{"id": %d, "error": {"class": "GenericError", "desc": "no such thing"}}`, id) + "\r\n"
	case "silent":
		return ""
	case "garbage":
		return "}{\r\n"
	}
	return fmt.Sprintf(`{"return": {}, "id": %d}`, id) + "\r\n"
}

func TestExecute(t *testing.T) {
	var events []string
	c, err := Open(t.Context(), peer(t, ok), func(e Event) {
		events = append(events, fmt.Sprint(e.Name, e.Time.UnixMicro()))
	})
	if err != nil {
		t.Fatal(err)
	}
	if d := diff.Of(Version{7, 2, 22, "Debian"}, c.Version()); d != "" {
		t.Error(d)
	}
	var status struct{ Status string }
	if err := c.Execute(t.Context(), "query-status", nil, &status); err != nil || status.Status != "running" {
		t.Errorf("query-status: %+v, %v", status, err)
	}
	err = c.Execute(t.Context(), "bad", map[string]int{"a": 1}, nil)
	if qe, ok := errors.AsType[*Error](err); !ok || qe.Class != "GenericError" {
		t.Errorf("bad: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Execute(ctx, "silent", nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("silent: %v", err)
	}
	if err := c.Execute(t.Context(), "again", nil, nil); err != nil {
		t.Errorf("after a cancelled command: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if fmt.Sprint(events) != "[RESUME5000007]" {
		t.Errorf("events %v", events)
	}
	if err := c.Execute(t.Context(), "late", nil, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("after Close: %v, want Unavailable", err)
	}
}

func TestConcurrent(t *testing.T) {
	c, err := Open(t.Context(), peer(t, ok), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := c.Execute(t.Context(), "query-status", nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(c.pending) != 0 {
		t.Errorf("%d commands are still pending", len(c.pending))
	}
}

func TestBrokenPeer(t *testing.T) {
	tests := []struct {
		name, greeting string
		class          errdefs.Class
	}{
		{"closed", "", errdefs.Unavailable},
		{"half a greeting", `{"QMP"`, errdefs.Unavailable},
		{"no greeting", `{"return": {}}` + "\n", errdefs.DataLoss},
		{"endless", strings.Repeat("x", MaxFrame+5000), errdefs.DataLoss},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ours, theirs := net.Pipe()
			go func() {
				_, _ = io.WriteString(theirs, tt.greeting)
				_ = theirs.Close()
			}()
			if _, err := Open(t.Context(), ours, nil); !errdefs.Is(err, tt.class) {
				t.Errorf("Open: %v (%v), want %v", err, errdefs.ClassOf(err), tt.class)
			}
		})
	}
	t.Run("garbage later", func(t *testing.T) {
		c, err := Open(t.Context(), peer(t, ok), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Execute(t.Context(), "garbage", nil, nil); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("garbage: %v", err)
		}
		<-c.Done()
	})
	t.Run("mute", func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Open(ctx, ours, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("Open: %v, want canceled", err)
		}
	})
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte(hello))
	f.Add([]byte(ok("query-status", 3)))
	f.Add([]byte(ok("bad", 3)))
	f.Add([]byte("\r\n\r\n{}\n"))
	f.Add([]byte(`{"return": null, "id": "x"}`))
	f.Add([]byte(`{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}, "timestamp": {"seconds": -1, "microseconds": -1}}` + "\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bufio.NewReaderSize(bytes.NewReader(data), 16)
		for {
			fr, err := readFrame(r)
			if err != nil {
				return
			}
			if n := btoi(fr.greeting != nil) + btoi(fr.event != nil) + btoi(fr.answer != nil); n != 1 {
				t.Fatalf("a frame is %d things at once", n)
			}
		}
	})
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestExecuteFile(t *testing.T) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		return c.(*net.UnixConn)
	}
	ours, theirs := conn(fds[0]), conn(fds[1])
	defer theirs.Close()
	got := make(chan string, 1)
	go func() {
		_, _ = io.WriteString(theirs, hello)
		buf, oob := make([]byte, 4096), make([]byte, 64)
		for id := uint64(1); ; id++ {
			n, oobn, _, _, err := theirs.ReadMsgUnix(buf, oob)
			if err != nil || n == 0 {
				return
			}
			if msgs, err := syscall.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) == 1 {
				if fds, err := syscall.ParseUnixRights(&msgs[0]); err == nil && len(fds) == 1 {
					f := os.NewFile(uintptr(fds[0]), "received")
					data, _ := io.ReadAll(f)
					_ = f.Close()
					got <- string(buf[:n]) + string(data)
				}
			}
			_, _ = io.WriteString(theirs, ok("", id))
		}
	}()
	c, err := Open(t.Context(), ours, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("what it holds"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := c.ExecuteFile(t.Context(), "getfd", map[string]string{"fdname": "x"}, nil, f); err != nil {
		t.Fatal(err)
	}
	if s := <-got; !strings.Contains(s, `"getfd"`) || !strings.HasSuffix(s, "what it holds") {
		t.Errorf("the peer got %q", s)
	}

	piped, err := Open(t.Context(), peer(t, ok), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer piped.Close()
	if err := piped.ExecuteFile(t.Context(), "getfd", nil, nil, f); !errdefs.IsUnavailable(err) {
		t.Errorf("over something else than a unix socket: %v", err)
	}
}
