package cloudhypervisor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// answering is a process that answers one request with these bytes. It passes on what it has read, and the descriptors.
func answering(t *testing.T, answer string) (net.Conn, <-chan *http.Request, <-chan *os.File) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	requests, files := make(chan *http.Request, 1), make(chan *os.File, 1)
	go func() {
		defer close(requests)
		defer close(files)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buf, rights := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4))
		n, m, _, _, err := c.(*net.UnixConn).ReadMsgUnix(buf, rights)
		if err != nil {
			return
		}
		if msgs, err := unix.ParseSocketControlMessage(rights[:m]); err == nil && len(msgs) > 0 {
			if fds, err := unix.ParseUnixRights(&msgs[0]); err == nil {
				files <- os.NewFile(uintptr(fds[0]), "right")
			}
		}
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(buf[:n])))
		if err != nil {
			return
		}
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		requests <- r
		_, _ = io.WriteString(c, answer)
	}()
	conn, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return conn, requests, files
}

func TestCall(t *testing.T) {
	conn, requests, _ := answering(t, "HTTP/1.1 200 \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\nContent-Length: 19\r\n\r\n{\"state\":\"Running\"}")
	var info struct{ State string }
	if err := call(t.Context(), conn, "GET", "vm.info", nil, &info); err != nil || info.State != "Running" {
		t.Errorf("%+v, %v", info, err)
	}
	if r := <-requests; r.Method != "GET" || r.URL.Path != "/api/v1/vm.info" || r.ContentLength != 0 {
		t.Errorf("%+v", r)
	}
	conn, requests, files := answering(t, "HTTP/1.1 204 \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\n\r\n")
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := call(t.Context(), conn, "PUT", "vm.add-net", netConfig{ID: "net0"}, nil, null); err != nil {
		t.Error(err)
	}
	r := <-requests
	if body, err := io.ReadAll(r.Body); err != nil || !strings.Contains(string(body), `"id":"net0"`) || r.Header.Get("Content-Type") != "application/json" {
		t.Errorf("%s, %v, %v", body, r.Header, err)
	}
	f := <-files
	if f == nil {
		t.Fatal("no descriptor came")
	}
	f.Close()
}

func TestCallIsRefused(t *testing.T) {
	conn, _, _ := answering(t, "HTTP/1.1 500 \r\nContent-Length: 46\r\n\r\n[\"Error from API\",\"The disk\\nis bad\",\"\",\"x y\"]")
	err := call(t.Context(), conn, "PUT", "vm.boot", nil, nil)
	if _, ok := errors.AsType[*apiError](err); !ok || err.Error() != "Cloud Hypervisor refuses vm.boot: Error from API: The disk is bad: x y" {
		t.Errorf("%v", err)
	}
	conn, _, _ = answering(t, "HTTP/1.1 404 \r\nContent-Length: 0\r\n\r\n")
	if err := call(t.Context(), conn, "PUT", "vm.boot", nil, nil); err == nil || !strings.Contains(err.Error(), "status 404") {
		t.Errorf("%v", err)
	}
	for _, answer := range []string{"", "nonsense", "HTTP/1.1 200 \r\nContent-Length: 10\r\n\r\n{"} {
		conn, _, _ := answering(t, answer)
		if err := call(t.Context(), conn, "GET", "vm.info", nil, &struct{}{}); !errdefs.IsUnavailable(err) {
			t.Errorf("%q: %v", answer, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	conn, _, _ = answering(t, "")
	if err := call(ctx, conn, "GET", "vm.info", nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// FuzzRefusal makes one short line of whatever a process answers.
func FuzzRefusal(f *testing.F) {
	f.Add([]byte(`["Error from API","x"]`))
	f.Add([]byte("<html>\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if got := refusal("vm.boot", 500, text).Error(); strings.ContainsAny(got, "\n\r\x00") && !bytes.ContainsAny(text, "\x00") || len(got) > 4000 {
			t.Errorf("%q", got)
		}
	})
}
