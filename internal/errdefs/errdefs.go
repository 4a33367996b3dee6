// Package errdefs is the closed set of error classes that every package of Cocoon uses.
//
// A class says what kind of failure occurred, so that a caller can decide and an API boundary can translate it (gRPC status,
// Kubernetes reason, exit code). The message says what was attempted on what, and how to fix it. The class survives any number
// of fmt.Errorf("...: %w") wraps. The package does not format for users or log.
package errdefs

import (
	"context"
	"errors"
	"fmt"
)

// Class is one kind of failure. The zero value is Internal: an unclassified error is our own fault.
type Class int

// The closed set of classes. Their order is not part of any wire format.
const (
	Internal           Class = iota // a broken invariant, an unexpected failure of the host
	InvalidArgument                 // the request can never work as written
	NotFound                        // the named object does not exist
	AlreadyExists                   // the name is taken
	FailedPrecondition              // the object is not in a state that allows this; something else must happen first
	Conflict                        // a concurrent change won; retry with fresh data
	ResourceExhausted               // a bounded resource is used up: addresses, disk, memory
	Unavailable                     // temporary: a peer is down or starting; retry later
	Unsupported                     // this backend, host or guest cannot do it at all
	DataLoss                        // stored bytes differ from what was written
	Unauthenticated                 // the caller did not prove who it is
	PermissionDenied                // the caller is known and may not do this
	Canceled                        // the caller has gone away
	DeadlineExceeded                // the caller's deadline has passed
)

var names = [...]string{
	"internal", "invalid argument", "not found", "already exists", "failed precondition", "conflict",
	"resource exhausted", "unavailable", "unsupported", "data loss", "unauthenticated", "permission denied", "canceled", "deadline exceeded",
}

// String returns the class in lower-case words, for logs and metrics.
func (c Class) String() string {
	if c < 0 || int(c) >= len(names) {
		return fmt.Sprintf("class(%d)", int(c))
	}
	return names[c]
}

// ClassNamed returns the class whose String is name; false if there is none.
func ClassNamed(name string) (Class, bool) {
	for i, n := range names {
		if n == name {
			return Class(i), true
		}
	}
	return Internal, false
}

type classified struct {
	class Class
	err   error
}

func (e *classified) Error() string { return e.err.Error() }
func (e *classified) Unwrap() error { return e.err }

// New returns an error of class c. The format is that of fmt.Errorf, including %w; the class of a wrapped error is hidden.
func New(c Class, format string, args ...any) error {
	return &classified{class: c, err: fmt.Errorf(format, args...)}
}

// As gives err the class c and keeps its text and chain. A nil error stays nil.
func As(c Class, err error) error {
	if err == nil {
		return nil
	}
	return &classified{class: c, err: err}
}

// ClassOf returns the outermost class in err's chain. Context errors have their own classes; any other error is Internal.
func ClassOf(err error) Class {
	if c, ok := errors.AsType[*classified](err); ok {
		return c.class
	}
	switch {
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return DeadlineExceeded
	}
	return Internal
}

// Is reports whether a non-nil err is of class c.
func Is(err error, c Class) bool { return err != nil && ClassOf(err) == c }

// Invalidf returns an InvalidArgument error.
func Invalidf(format string, args ...any) error { return New(InvalidArgument, format, args...) }

// NotFoundf returns a NotFound error.
func NotFoundf(format string, args ...any) error { return New(NotFound, format, args...) }

// Existsf returns an AlreadyExists error.
func Existsf(format string, args ...any) error { return New(AlreadyExists, format, args...) }

// Preconditionf returns a FailedPrecondition error.
func Preconditionf(format string, args ...any) error { return New(FailedPrecondition, format, args...) }

// Conflictf returns a Conflict error.
func Conflictf(format string, args ...any) error { return New(Conflict, format, args...) }

// Exhaustedf returns a ResourceExhausted error.
func Exhaustedf(format string, args ...any) error { return New(ResourceExhausted, format, args...) }

// Unavailablef returns an Unavailable error.
func Unavailablef(format string, args ...any) error { return New(Unavailable, format, args...) }

// Unsupportedf returns an Unsupported error.
func Unsupportedf(format string, args ...any) error { return New(Unsupported, format, args...) }

// DataLossf returns a DataLoss error.
func DataLossf(format string, args ...any) error { return New(DataLoss, format, args...) }

// Unauthenticatedf returns an Unauthenticated error.
func Unauthenticatedf(format string, args ...any) error { return New(Unauthenticated, format, args...) }

// Deniedf returns a PermissionDenied error.
func Deniedf(format string, args ...any) error { return New(PermissionDenied, format, args...) }

// IsInvalid reports whether err is of class InvalidArgument.
func IsInvalid(err error) bool { return Is(err, InvalidArgument) }

// IsNotFound reports whether err is of class NotFound.
func IsNotFound(err error) bool { return Is(err, NotFound) }

// IsAlreadyExists reports whether err is of class AlreadyExists.
func IsAlreadyExists(err error) bool { return Is(err, AlreadyExists) }

// IsFailedPrecondition reports whether err is of class FailedPrecondition.
func IsFailedPrecondition(err error) bool { return Is(err, FailedPrecondition) }

// IsUnavailable reports whether err is of class Unavailable.
func IsUnavailable(err error) bool { return Is(err, Unavailable) }
