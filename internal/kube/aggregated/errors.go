package aggregated

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// fail answers with a metav1.Status.
func fail(w http.ResponseWriter, err error) {
	status := statusOf(err)
	status.Kind, status.APIVersion = "Status", "v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(status.Code))
	_ = json.NewEncoder(w).Encode(status)
}

// statusOf translates an error. An error of the API server keeps its code, except 401, which is about our own credentials.
func statusOf(err error) metav1.Status {
	var of apierrors.APIStatus
	switch {
	case errors.As(err, &of) && (of.Status().Code != http.StatusUnauthorized || isOurs(err)) && of.Status().Code >= http.StatusBadRequest:
		status := of.Status()
		if !isOurs(err) {
			status.Message = err.Error() // says what was attempted
		}
		return status
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return apierrors.NewTimeoutError(err.Error(), 1).Status()
	}
	switch errdefs.ClassOf(err) {
	case errdefs.InvalidArgument:
		return apierrors.NewBadRequest(err.Error()).Status()
	case errdefs.FailedPrecondition, errdefs.Conflict, errdefs.Unsupported:
		return apierrors.NewConflict(schema.GroupResource{Group: Group}, "", err).Status()
	case errdefs.Unavailable:
		return apierrors.NewServiceUnavailable(err.Error()).Status()
	case errdefs.ResourceExhausted:
		return apierrors.NewTooManyRequests(err.Error(), 1).Status()
	default:
		return apierrors.NewInternalError(err).Status()
	}
}

// isOurs reports whether err itself is an answer, and not a wrapped one of the API server.
func isOurs(err error) bool {
	_, ok := err.(apierrors.APIStatus) // a wrapped status is of the API server
	return ok
}

// missing is the answer for a path that is not served.
func missing(r *http.Request) error {
	return apierrors.NewGenericServerResponse(http.StatusNotFound, r.Method, schema.GroupResource{}, "", fmt.Sprintf("%s is not a path of the API %s", r.URL.Path, Group), 0, false)
}
