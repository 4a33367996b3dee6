package grpcerr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestEveryClassSurvivesTheWire(t *testing.T) {
	for c := errdefs.Internal; c <= errdefs.DeadlineExceeded; c++ {
		sent := fmt.Errorf("start web: %w", errdefs.New(c, "the disk %q is odd", "d"))
		got := FromStatus(fmt.Errorf("call: %w", ToStatus(sent)))
		if errdefs.ClassOf(got) != c || got.Error() != sent.Error() {
			t.Errorf("%v: got class %v, text %q", c, errdefs.ClassOf(got), got)
		}
	}
}

func TestContextErrors(t *testing.T) {
	for _, want := range []error{context.Canceled, context.DeadlineExceeded} {
		got := FromStatus(ToStatus(fmt.Errorf("exec: %w", want)))
		if !errors.Is(got, want) {
			t.Errorf("%v is not %v", got, want)
		}
	}
}

func TestWhatIsNoStatusStays(t *testing.T) {
	if err := FromStatus(io.EOF); !errors.Is(err, io.EOF) {
		t.Errorf("io.EOF became %v", err)
	}
	if ToStatus(nil) != nil || FromStatus(nil) != nil {
		t.Error("nil became an error")
	}
	err := FromStatus(ToStatus(status.Error(codes.ResourceExhausted, "too big")))
	if errdefs.ClassOf(err) != errdefs.ResourceExhausted || err.Error() != "too big" {
		t.Errorf("a foreign status became %v (%v)", err, errdefs.ClassOf(err))
	}
}

func TestHostileText(t *testing.T) {
	err := FromStatus(status.Error(codes.NotFound, "a\x1b[31mb\xff\n"+strings.Repeat("é", MaxMessage)))
	if text := err.Error(); len(text) > MaxMessage || strings.Contains(text, "\x1b") || !utf8.ValidString(text) || !strings.HasPrefix(text, "a [31mb\uFFFD\n") {
		t.Errorf("text is %d bytes, %.20q", len(text), text)
	}
}
