package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	remote "k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// requestedStreams are the streams that a client requested.
type requestedStreams struct{ stdin, stdout, stderr, tty bool }

func parseWishes(r *http.Request) (requestedStreams, error) {
	q := r.URL.Query()
	on := func(key string) bool { v := q.Get(key); return v == "1" || v == "true" }
	w := requestedStreams{stdin: on("input"), stdout: on("output"), stderr: on("error"), tty: on("tty")}
	if w.tty {
		w.stderr = false // a terminal has only one output stream
	}
	if !w.stdin && !w.stdout && !w.stderr {
		return w, errdefs.Invalidf("you must specify at least 1 of stdin, stdout, stderr")
	}
	return w, nil
}

// session is the open streams of one client, independent of the transport.
type session struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	resize         io.Reader // JSON sizes; nil without a terminal
	status         io.Writer
	plainStatus    bool            // the protocol reports errors as plain text, not as metav1.Status
	lost           <-chan struct{} // closed when the client disconnects
	close          func()
}

// exec runs a command for kubectl exec, over SPDY, which the API server uses, or over a websocket.
func (s *Server) exec(w http.ResponseWriter, r *http.Request) {
	want, err := parseWishes(r)
	command := r.URL.Query()["command"]
	if err == nil && len(command) == 0 {
		err = errdefs.Invalidf("you must specify a command")
	}
	if err != nil {
		s.fail(w, err)
		return
	}
	s.session(w, r, want, "executing command in", func(ctx context.Context, se *session) (int, error) {
		return s.cfg.Backend.Exec(ctx, r.PathValue("namespace"), r.PathValue("pod"), r.PathValue("container"),
			guest.Exec{Command: command, TTY: want.tty},
			guest.Streams{Stdin: se.stdin, Stdout: se.stdout, Stderr: se.stderr, Resize: sizes(ctx, se.resize)})
	})
}

// attach serves kubectl attach and kubectl run -i: it connects to the standard streams of a container's process. A header of the request can
// ask for the screen of the guest instead, or for its description.
func (s *Server) attach(w http.ResponseWriter, r *http.Request) {
	if how := r.Header.Get(contract.HeaderDisplay); how != "" {
		s.display(w, r, how)
		return
	}
	if what := r.Header.Get(contract.HeaderGuest); what != "" {
		s.askGuest(w, r, what)
		return
	}
	want, err := parseWishes(r)
	if err != nil {
		s.fail(w, err)
		return
	}
	s.session(w, r, want, "attaching to", func(ctx context.Context, se *session) (int, error) {
		streams := guest.Streams{Stdin: se.stdin, Stdout: se.stdout, Stderr: se.stderr, Resize: sizes(ctx, se.resize)}
		if want.tty { // the process may have no terminal although one was requested
			streams.Stderr = se.stdout
		}
		return 0, s.cfg.Backend.Attach(ctx, r.PathValue("namespace"), r.PathValue("pod"), r.PathValue("container"), guest.Attach{}, streams)
	})
}

// session opens the requested streams, calls run with them while the client is connected, and reports how run ended.
func (s *Server) session(w http.ResponseWriter, r *http.Request, want requestedStreams, doing string, run func(context.Context, *session) (code int, err error)) {
	// http.Server does not wait for sessions, because they hijack the connection.
	s.streams.Add(1)
	defer s.streams.Done()
	var se *session
	var err error
	if wsstream.IsWebSocketRequest(r) {
		se, err = openWebSocket(w, r, want)
	} else {
		se, err = openSPDY(w, r, want)
	}
	if err != nil {
		s.cfg.Log.Debug("session not opened", "path", r.URL.Path, "err", err)
		return // the client has already received the error
	}
	defer se.close()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		select {
		case <-se.lost:
			cancel()
		case <-s.life.Done():
			se.close() // unblocks reads of the streams
			cancel()
		case <-ctx.Done():
		}
	}()
	code, err := run(ctx, se)
	if se.plainStatus {
		if err != nil || code != 0 {
			fmt.Fprintf(se.status, "%s", outcome(doing, code, err).Message)
		}
		return
	}
	if body, merr := json.Marshal(outcome(doing, code, err)); merr == nil {
		_, _ = se.status.Write(body)
	}
}

// outcome returns the result of a command, or of another operation on a container, in the form of which remotecommand clients
// read the exit code.
func outcome(doing string, code int, err error) metav1.Status {
	switch {
	case err != nil:
		return metav1.Status{
			Status: metav1.StatusFailure, Reason: metav1.StatusReasonInternalError, Code: http.StatusInternalServerError,
			Message: fmt.Sprintf("Internal error occurred: error %s container: %v", doing, err),
		}
	case code != 0:
		return metav1.Status{
			Status: metav1.StatusFailure, Reason: remote.NonZeroExitCodeReason,
			Message: fmt.Sprintf("command terminated with non-zero exit code: %d", code),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: remote.ExitCodeCauseType, Message: strconv.Itoa(code)}}},
		}
	}
	return metav1.Status{Status: metav1.StatusSuccess}
}

// sizes decodes the stream of terminal sizes into a channel, which is closed when the stream ends.
func sizes(ctx context.Context, in io.Reader) <-chan guest.WinSize {
	if in == nil {
		return nil
	}
	out := make(chan guest.WinSize)
	go func() {
		defer close(out)
		for dec := json.NewDecoder(in); ; {
			var s struct{ Width, Height uint16 }
			if dec.Decode(&s) != nil {
				return
			}
			select {
			case out <- guest.WinSize{Rows: s.Height, Cols: s.Width}:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}
