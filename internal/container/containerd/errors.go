package containerd

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	registry "github.com/containerd/containerd/v2/core/remotes/errors"
	cerrdefs "github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// classes are our classes of containerd's errors, the first that fits.
var classes = []struct {
	is    func(error) bool
	class errdefs.Class
}{
	{cerrdefs.IsCanceled, errdefs.Canceled},
	{cerrdefs.IsDeadlineExceeded, errdefs.DeadlineExceeded},
	{cerrdefs.IsUnavailable, errdefs.Unavailable},
	{cerrdefs.IsNotFound, errdefs.NotFound},
	{cerrdefs.IsAlreadyExists, errdefs.AlreadyExists},
	{cerrdefs.IsInvalidArgument, errdefs.InvalidArgument},
	{cerrdefs.IsFailedPrecondition, errdefs.FailedPrecondition},
	{cerrdefs.IsConflict, errdefs.Conflict},
	{cerrdefs.IsAborted, errdefs.Conflict},
	{cerrdefs.IsResourceExhausted, errdefs.ResourceExhausted},
	{cerrdefs.IsNotImplemented, errdefs.Unsupported},
	{cerrdefs.IsDataLoss, errdefs.DataLoss},
}

// classOf returns the class of an error of containerd's client; Internal for what it does not say.
func classOf(err error) errdefs.Class {
	if c := errdefs.ClassOf(err); c != errdefs.Internal {
		return c
	}
	native := errgrpc.ToNative(err)
	for _, c := range classes {
		if c.is(err) || c.is(native) {
			return c.class
		}
	}
	return errdefs.Internal
}

// failed gives an error of containerd's client a class, and says what was attempted.
func failed(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if c := classOf(err); c == errdefs.Unavailable {
		return errdefs.Unavailablef("%s: containerd does not answer: %w", what, err)
	} else {
		return errdefs.As(c, fmt.Errorf("%s: %w", what, err))
	}
}

// refused is failed for what runc does with the values of a user: containerd passes its words on, and no class.
func refused(err error, format string, args ...any) error {
	ours := []errdefs.Class{errdefs.Unavailable, errdefs.Canceled, errdefs.DeadlineExceeded, errdefs.ResourceExhausted, errdefs.DataLoss}
	if slices.Contains(ours, classOf(err)) {
		return failed(err, format, args...)
	}
	return errdefs.As(errdefs.FailedPrecondition, fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err))
}

// unpulled is failed for what a registry answers.
func unpulled(err error, ref string) error {
	what := "pull image " + ref
	var status registry.ErrUnexpectedStatus
	var dial net.Error
	switch {
	case errors.Is(err, docker.ErrInvalidAuthorization),
		errors.As(err, &status) && (status.StatusCode == http.StatusUnauthorized || status.StatusCode == http.StatusForbidden):
		return errdefs.Preconditionf("%s: the registry denies access; check the credentials: %w", what, err)
	case errors.As(err, &status) && (status.StatusCode == http.StatusTooManyRequests || status.StatusCode >= http.StatusInternalServerError):
		return errdefs.Unavailablef("%s: the registry cannot answer now: %w", what, err)
	case errors.As(err, &dial):
		return errdefs.Unavailablef("%s: the registry cannot be reached: %w", what, err)
	}
	return failed(err, "%s", what)
}
