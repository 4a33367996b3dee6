package kubelet

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// displayOpen is how long it may take to connect to a screen, or to take a picture of it.
const displayOpen = 20 * time.Second

// display connects to the screen of a guest, or sends a picture of it. It does so before it upgrades the connection: the client of a screen
// that does not open gets an HTTP status with the class of the error.
func (s *Server) display(w http.ResponseWriter, r *http.Request, value string) {
	want, err := parseWishes(r)
	how, herr := contract.ParseDisplay(value)
	picture := how == contract.DisplayPicture || how == contract.DisplayPictureWake
	switch {
	case err != nil:
	case herr != nil:
		err = errdefs.As(errdefs.InvalidArgument, herr)
	case want.tty || want.stderr || !want.stdout || want.stdin == picture:
		err = errdefs.Invalidf("a screen needs stdin and stdout, and a picture of it stdout alone")
	}
	if err != nil {
		s.refuse(w, err)
		return
	}
	run, release, err := s.screen(r, how)
	if err != nil {
		s.refuse(w, err)
		return
	}
	defer release()
	s.session(w, r, want, "showing the screen of", run)
}

// screen opens what how asks for. run serves a session with it.
func (s *Server) screen(r *http.Request, how contract.Display) (run func(context.Context, *session) (int, error), release func(), err error) {
	ctx, cancel := context.WithTimeout(r.Context(), displayOpen)
	defer cancel()
	namespace, pod, container := r.PathValue("namespace"), r.PathValue("pod"), r.PathValue("container")
	if how == contract.DisplayPicture || how == contract.DisplayPictureWake {
		end, err := s.pictures.begin(namespace + "/" + pod)
		if err != nil {
			return nil, nil, err
		}
		png, err := s.cfg.Backend.Screenshot(ctx, namespace, pod, container, how == contract.DisplayPictureWake)
		if err != nil {
			end()
			return nil, nil, err
		}
		return func(_ context.Context, se *session) (int, error) {
			_, err := se.stdout.Write(png)
			return 0, err
		}, end, nil
	}
	con, err := s.cfg.Backend.Display(ctx, namespace, pod, container, how == contract.DisplayKeep)
	if err != nil {
		return nil, nil, err
	}
	return func(ctx context.Context, se *session) (int, error) { return 0, watch(ctx, con, se) }, func() { con.Close() }, nil
}

// watch copies between the client and the screen until one of them ends.
func watch(ctx context.Context, con io.ReadWriteCloser, se *session) error {
	defer context.AfterFunc(ctx, func() { con.Close() })()
	var left atomic.Bool
	go func() { // ends with the session
		_, _ = io.Copy(con, se.stdin)
		left.Store(true)
		con.Close()
	}()
	_, err := io.Copy(se.stdout, con)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case left.Load():
		return nil
	}
	return err
}

// refuse answers with a metav1.Status, which clients of a stream read.
func (s *Server) refuse(w http.ResponseWriter, err error) {
	code := statusOf(err)
	reason := map[int]metav1.StatusReason{
		http.StatusBadRequest: metav1.StatusReasonBadRequest, http.StatusNotFound: metav1.StatusReasonNotFound,
		http.StatusConflict: metav1.StatusReasonConflict, http.StatusServiceUnavailable: metav1.StatusReasonServiceUnavailable,
		http.StatusTooManyRequests: metav1.StatusReasonTooManyRequests,
	}[code]
	if reason == "" {
		reason = metav1.StatusReasonInternalError
	}
	status := metav1.Status{Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: err.Error()}
	status.Kind, status.APIVersion = "Status", "v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(status)
}
