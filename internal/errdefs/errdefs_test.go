package errdefs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestClassSurvivesWrapping(t *testing.T) {
	base := NotFoundf("vm not found: %q", "x")
	for _, tc := range []struct {
		name string
		err  error
		want Class
	}{
		{"bare", base, NotFound},
		{"wrapped twice", fmt.Errorf("start: %w", fmt.Errorf("resolve: %w", base)), NotFound},
		{"joined", errors.Join(io.EOF, base), NotFound},
		{"outermost wins", New(Unavailable, "node: %w", base), Unavailable},
		{"unclassified", io.EOF, Internal},
		{"canceled", fmt.Errorf("x: %w", context.Canceled), Canceled},
		{"deadline", context.DeadlineExceeded, DeadlineExceeded},
		{"As", As(DataLoss, io.ErrUnexpectedEOF), DataLoss},
	} {
		if got := ClassOf(tc.err); got != tc.want {
			t.Errorf("%s: class %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestWrappedErrorStaysInTheChain(t *testing.T) {
	if err := New(DataLoss, "read: %w", io.ErrUnexpectedEOF); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v does not wrap its cause", err)
	}
}

func TestNoErrorHasNoClass(t *testing.T) {
	if As(NotFound, nil) != nil {
		t.Error("As of nil is an error")
	}
	if Is(nil, Internal) || IsNotFound(nil) {
		t.Error("nil has a class")
	}
}

func TestClassNames(t *testing.T) {
	if got := ResourceExhausted.String(); got != "resource exhausted" {
		t.Errorf("got %q", got)
	}
	if got := Class(99).String(); got != "class(99)" {
		t.Errorf("got %q", got)
	}
}
