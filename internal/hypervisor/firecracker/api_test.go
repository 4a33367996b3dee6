package firecracker

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// answering returns a connection to a process that answers one request, and what it was asked.
func answering(t *testing.T, answer string) (net.Conn, <-chan string) {
	t.Helper()
	here, there := net.Pipe()
	asked := make(chan string, 1)
	go func() {
		defer there.Close()
		buf := make([]byte, 4096)
		n, _ := there.Read(buf)
		for text := string(buf[:n]); ; text += string(buf[:n]) { // the body may come apart
			if !strings.HasPrefix(text, "PUT") || strings.Contains(text, "}") {
				asked <- text
				break
			}
			n, _ = there.Read(buf)
		}
		_, _ = io.WriteString(there, answer)
	}()
	return here, asked
}

func TestCall(t *testing.T) {
	var state runState
	conn, asked := answering(t, "HTTP/1.1 200 \r\nServer: Firecracker API\r\nContent-Length: 19\r\n\r\n{\"state\":\"Running\"}")
	if err := call(t.Context(), conn, http.MethodGet, "/", nil, &state); err != nil || state.State != stateRunning {
		t.Errorf("%+v, %v", state, err)
	}
	if got := <-asked; !strings.HasPrefix(got, "GET / HTTP/1.1\r\n") {
		t.Errorf("asked %q", got)
	}
	conn, asked = answering(t, "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n")
	if err := call(t.Context(), conn, http.MethodPut, "/actions", action{"InstanceStart"}, nil); err != nil {
		t.Error(err)
	}
	if got := <-asked; !strings.HasSuffix(got, "\r\n\r\n{\"action_type\":\"InstanceStart\"}") {
		t.Errorf("asked %q", got)
	}
	conn, _ = answering(t, "HTTP/1.1 400 \r\nContent-Length: 42\r\n\r\n{\"fault_message\":\"no\\n such \\u0000 thing\"}")
	if err := call(t.Context(), conn, http.MethodPut, "/vsock", struct{}{}, nil); err == nil || err.Error() != "Firecracker refuses PUT /vsock: no such thing" {
		t.Errorf("%v", err)
	}
	conn, _ = answering(t, "")
	if err := call(t.Context(), conn, http.MethodGet, "/", nil, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("no answer: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	silent, other := net.Pipe()
	defer other.Close()
	if err := call(ctx, silent, http.MethodGet, "/", nil, nil); errdefs.ClassOf(err) != errdefs.DeadlineExceeded {
		t.Errorf("silence: %v", err)
	}
}

// FuzzAnswer: whatever a process that its guest may have taken over answers, reading it ends, and a refusal is one short line of valid text.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 \r\nContent-Length: 19\r\n\r\n{\"state\":\"Running\"}"))
	f.Add([]byte("HTTP/1.1 204 \r\nContent-Length: 9\r\n\r\n"))
	f.Add([]byte("HTTP/1.1 400 \r\nContent-Length: 22\r\n\r\n{\"fault_message\":\"no\"}"))
	f.Add([]byte("HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\na\nb\xffc\r\n0\r\n\r\n"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		var state runState
		err := readAnswer(strings.NewReader(string(answer)), "GET /", &state)
		if refused, ok := errors.AsType[*apiError](err); ok {
			text := refused.Error()
			if len(text) > 600 || !utf8.ValidString(refused.why) || strings.ContainsAny(text, "\r\n") {
				t.Errorf("%q", text)
			}
		}
	})
}
