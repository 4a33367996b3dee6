package registry

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
)

// failure is an error with its HTTP representation. Empty fields are derived from the error.
type failure struct {
	status  int
	code    content.Code
	err     error
	allow   string        // of 405: the methods
	action  access.Action // of 401: the action that needs a token
	invalid bool          // of 401: the token is wrong
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// retryAfter tells a client that a limit refused when to retry, in seconds: other uploads end in the meantime.
const retryAfter = "10"

// statusOf is the only place that maps error classes to HTTP status codes.
func statusOf(err error) int {
	if errors.Is(err, content.ErrRange) {
		return http.StatusRequestedRangeNotSatisfiable
	}
	switch errdefs.ClassOf(err) {
	case errdefs.InvalidArgument:
		return http.StatusBadRequest
	case errdefs.NotFound:
		return http.StatusNotFound
	case errdefs.AlreadyExists, errdefs.Conflict, errdefs.FailedPrecondition:
		return http.StatusConflict
	case errdefs.ResourceExhausted:
		if content.CodeOf(err) == content.Denied { // quota: a retry does not help
			return http.StatusForbidden
		}
		if content.CodeOf(err) == content.TooManyRequests {
			return http.StatusTooManyRequests
		}
		return http.StatusInsufficientStorage
	case errdefs.Unsupported:
		return http.StatusMethodNotAllowed
	case errdefs.Unavailable, errdefs.Canceled, errdefs.DeadlineExceeded:
		return http.StatusServiceUnavailable
	default:
		return http.StatusInternalServerError
	}
}

// fail sends an error in the format of the specification.
func (g *Registry) fail(r *request, err error) {
	f := failure{err: err}
	if own, ok := errors.AsType[*failure](err); ok {
		f = *own
	}
	f.code = cmp.Or(f.code, content.CodeOf(err))
	f.status = cmp.Or(f.status, statusOf(f.err))
	if f.status == http.StatusNotFound && f.code == content.ManifestBlobUnknown {
		f.status = http.StatusBadRequest // the URL is right, the manifest is not
	}
	if f.code == "" {
		f.code = "UNKNOWN"
		if f.status == http.StatusInsufficientStorage {
			f.code = content.Denied
		}
	}
	message := f.err.Error()
	if f.status >= 500 {
		g.log.Error("request failed", "op", r.route.Kind.String(), "method", r.Method, "repository", r.route.Name, "err", f.err)
		if errdefs.ClassOf(f.err) == errdefs.Internal {
			message = "the registry failed; its log says why" // the error may name files of the host
		}
	}
	h := r.w.Header()
	h.Del("Content-Length")
	h.Del("ETag")
	h.Del("Cache-Control")
	if f.status == http.StatusMethodNotAllowed {
		h.Set("Allow", f.allow)
	}
	if f.status == http.StatusTooManyRequests {
		h.Set("Retry-After", retryAfter)
	}
	if f.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", g.challenge(r, f))
	}
	said := map[string]any{"code": f.code, "message": message}
	if f.status == http.StatusForbidden && errdefs.Is(f.err, errdefs.ResourceExhausted) {
		said["detail"] = map[string]string{"reason": "QUOTA_EXCEEDED"} // the specification's codes do not distinguish it from missing rights
	}
	_ = r.json(f.status, "application/json", map[string]any{"errors": []any{said}})
}

// json sends a JSON document.
func (r *request) json(status int, mediaType string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return r.bytes(status, mediaType, data)
}

func (r *request) bytes(status int, mediaType string, data []byte) error {
	r.w.Header().Set("Content-Type", mediaType)
	r.w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	r.w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return nil
	}
	_, err := r.w.Write(data)
	return err
}
