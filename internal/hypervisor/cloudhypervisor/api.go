package cloudhypervisor

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxAnswer limits an answer of the API, in bytes: the process may be in the hands of its guest.
const maxAnswer = 4 << 20

// apiError is the refusal of a request by the program. It lists causes, the most general first.
type apiError struct {
	method string
	status int
	causes []string
}

func (e *apiError) Error() string {
	if len(e.causes) == 0 {
		return fmt.Sprintf("Cloud Hypervisor refuses %s with status %d and gives no reason", e.method, e.status)
	}
	return fmt.Sprintf("Cloud Hypervisor refuses %s: %s", e.method, strings.Join(e.causes, ": "))
}

// call sends one request on a connection of its own. body and answer may be nil. The files go with the request, as descriptors.
// Errors: Unavailable if the process does not answer, *apiError if it refuses.
func call(ctx context.Context, conn net.Conn, verb, method string, body, answer any, files ...*os.File) error {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := exchange(conn, verb, method, body, answer, files)
	if _, refused := errors.AsType[*apiError](err); err == nil || refused {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", method, ctx.Err())
	}
	return errdefs.Unavailablef("%s: Cloud Hypervisor does not answer: %w", method, err)
}

func exchange(conn net.Conn, verb, method string, body, answer any, files []*os.File) error {
	if err := send(conn, verb, method, body, files); err != nil {
		return err
	}
	r, err := http.ReadResponse(bufio.NewReader(io.LimitReader(conn, maxAnswer)), nil)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode == http.StatusNoContent { // it has no body, whatever its headers say
		return nil
	}
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if r.StatusCode != http.StatusOK {
		return refusal(method, r.StatusCode, text)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}

// refusal reads why a request was refused: a list of strings, or a text.
func refusal(method string, status int, text []byte) *apiError {
	e := &apiError{method: method, status: status}
	if json.Unmarshal(text, &e.causes) != nil {
		e.causes = []string{string(text)}
	}
	for n, cause := range e.causes {
		cause = strings.ToValidUTF8(strings.Join(strings.Fields(cause), " "), "")
		e.causes[n] = cause[:min(len(cause), 300)]
	}
	e.causes = slices.DeleteFunc(e.causes, func(s string) bool { return s == "" })
	e.causes = e.causes[:min(len(e.causes), 10)]
	return e
}

func send(conn net.Conn, verb, method string, body any, files []*os.File) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s /api/v1/%s HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n", verb, method)
	if body != nil {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(text))
	}
	b.WriteString("\r\n")
	b.Write(text)
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for n, f := range files {
			fds[n] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	sock, ok := conn.(*net.UnixConn)
	if !ok {
		return errors.New("the API is no unix socket")
	}
	n, _, err := sock.WriteMsgUnix(b.Bytes(), rights, nil)
	if err == nil && n < b.Len() {
		_, err = conn.Write(b.Bytes()[n:])
	}
	return err
}
