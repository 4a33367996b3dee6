// Package grpcerr carries the classes of errdefs across gRPC: the one table between them and the status codes.
//
// Both of our protocols (guest and node) use it, so that an error has the same class and the same text on either side
// of a socket. It does not log, retry or decide what a user may see.
package grpcerr

import (
	"context"
	"errors"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// MaxMessage bounds the text of an error that crosses a socket, in bytes. The peer may be a hostile guest.
const MaxMessage = 4096

// Code returns the status code that stands for class c on the wire.
func Code(c errdefs.Class) codes.Code {
	switch c {
	case errdefs.InvalidArgument:
		return codes.InvalidArgument
	case errdefs.NotFound:
		return codes.NotFound
	case errdefs.AlreadyExists:
		return codes.AlreadyExists
	case errdefs.FailedPrecondition:
		return codes.FailedPrecondition
	case errdefs.Conflict:
		return codes.Aborted
	case errdefs.ResourceExhausted:
		return codes.ResourceExhausted
	case errdefs.Unavailable:
		return codes.Unavailable
	case errdefs.Unsupported:
		return codes.Unimplemented
	case errdefs.DataLoss:
		return codes.DataLoss
	case errdefs.Unauthenticated:
		return codes.Unauthenticated
	case errdefs.PermissionDenied:
		return codes.PermissionDenied
	case errdefs.Canceled:
		return codes.Canceled
	case errdefs.DeadlineExceeded:
		return codes.DeadlineExceeded
	default:
		return codes.Internal
	}
}

// Class returns the class that c stands for. Codes that Cocoon never sends get the nearest one.
func Class(c codes.Code) errdefs.Class {
	switch c {
	case codes.InvalidArgument, codes.OutOfRange:
		return errdefs.InvalidArgument
	case codes.NotFound:
		return errdefs.NotFound
	case codes.AlreadyExists:
		return errdefs.AlreadyExists
	case codes.FailedPrecondition:
		return errdefs.FailedPrecondition
	case codes.Aborted:
		return errdefs.Conflict
	case codes.ResourceExhausted:
		return errdefs.ResourceExhausted
	case codes.Unavailable:
		return errdefs.Unavailable
	case codes.Unimplemented:
		return errdefs.Unsupported
	case codes.DataLoss:
		return errdefs.DataLoss
	case codes.Unauthenticated:
		return errdefs.Unauthenticated
	case codes.PermissionDenied:
		return errdefs.PermissionDenied
	case codes.Canceled:
		return errdefs.Canceled
	case codes.DeadlineExceeded:
		return errdefs.DeadlineExceeded
	default:
		return errdefs.Internal
	}
}

// ToStatus turns err into a gRPC status error for the peer: its class becomes the code, its text the message.
// nil stays nil; a status error nobody classified keeps its code.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	class := errdefs.ClassOf(err)
	if class == errdefs.Internal {
		if s, ok := status.FromError(err); ok {
			return status.Error(s.Code(), Clean(s.Message()))
		}
	}
	return status.Error(Code(class), Clean(err.Error()))
}

// FromStatus turns what a gRPC call returned into an error with a class and the peer's text. nil stays nil and errors
// that are no status (io.EOF of a stream) stay as they are. A Canceled or DeadlineExceeded status satisfies errors.Is
// with the error of package context.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	var g interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &g) {
		return err
	}
	s := g.GRPCStatus()
	r := &remote{text: Clean(s.Message())}
	switch s.Code() {
	case codes.OK:
		return nil
	case codes.Canceled:
		r.cause = context.Canceled
	case codes.DeadlineExceeded:
		r.cause = context.DeadlineExceeded
	default: // a class says it all
	}
	return errdefs.As(Class(s.Code()), r)
}

// remote is an error that happened on the other side.
type remote struct {
	text  string
	cause error
}

func (r *remote) Error() string { return r.text }
func (r *remote) Unwrap() error { return r.cause }

// Clean makes text of a peer safe to show: valid UTF-8, no control characters, at most MaxMessage bytes.
func Clean(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return ' '
		}
		return r
	}, text)
	if len(text) <= MaxMessage {
		return text
	}
	cut := MaxMessage
	for !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut]
}
