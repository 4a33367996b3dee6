package firecracker

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
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxAnswer limits an answer of the API, in bytes: the process may be in the hands of its guest.
const maxAnswer = 1 << 20

// apiError is the refusal of a request by the program.
type apiError struct{ method, why string }

func (e *apiError) Error() string {
	return fmt.Sprintf("Firecracker refuses %s: %s", e.method, e.why)
}

// call sends one request on a connection of its own. body and answer may be nil.
// Errors: Unavailable if the process does not answer, *apiError if it refuses.
func call(ctx context.Context, conn net.Conn, verb, path string, body, answer any) error {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := exchange(conn, verb, path, body, answer)
	if _, refused := errors.AsType[*apiError](err); err == nil || refused {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s %s: %w", verb, path, ctx.Err())
	}
	return errdefs.Unavailablef("%s %s: Firecracker does not answer: %w", verb, path, err)
}

func exchange(conn net.Conn, verb, path string, body, answer any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	req, err := http.NewRequest(verb, "http://localhost"+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "application/json")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if err := req.Write(conn); err != nil {
		return err
	}
	return readAnswer(conn, verb+" "+path, answer)
}

// readAnswer reads the answer to the request method.
func readAnswer(from io.Reader, method string, answer any) error {
	r, err := http.ReadResponse(bufio.NewReader(io.LimitReader(from, maxAnswer)), nil)
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

// refusal reads why a request was refused.
func refusal(method string, status int, text []byte) *apiError {
	var fault struct {
		Message string `json:"fault_message"`
	}
	if json.Unmarshal(text, &fault) != nil || fault.Message == "" {
		fault.Message = string(text)
	}
	why := jail.OneLine(fault.Message)
	if why == "" {
		why = fmt.Sprintf("status %d, and no reason", status)
	}
	return &apiError{method: method, why: why}
}
