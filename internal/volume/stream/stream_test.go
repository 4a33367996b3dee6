package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestEach(t *testing.T) {
	for name, r := range map[string]io.Reader{"whole": strings.NewReader("abcdefgh"), "bytes": iotest.OneByteReader(strings.NewReader("abcdefgh")), "data and end": iotest.DataErrReader(strings.NewReader("abcdefgh"))} {
		var parts []string
		n, err := Each(r, make([]byte, 3), 8, func(part []byte, at int64) error {
			if at != int64(len(strings.Join(parts, ""))) {
				t.Errorf("%s: part at %d after %q", name, at, parts)
			}
			parts = append(parts, string(part))
			return nil
		})
		if err != nil || n != 8 || strings.Join(parts, ",") != "abc,def,gh" {
			t.Errorf("%s: %d, %q, %v", name, n, parts, err)
		}
	}
	boom := errors.New("boom")
	keep := func([]byte, int64) error { return nil }
	for name, c := range map[string]struct {
		r    io.Reader
		fn   func([]byte, int64) error
		want error
		of   errdefs.Class
	}{
		"too long": {strings.NewReader("abcdefghi"), keep, nil, errdefs.InvalidArgument},
		"empty":    {strings.NewReader(""), keep, nil, errdefs.InvalidArgument},
		"cut":      {io.MultiReader(strings.NewReader("abcd"), iotest.ErrReader(io.ErrUnexpectedEOF)), keep, io.ErrUnexpectedEOF, errdefs.Internal},
		"refused":  {strings.NewReader("abc"), func([]byte, int64) error { return boom }, boom, errdefs.Internal},
	} {
		if _, err := Each(c.r, make([]byte, 3), 8, c.fn); c.want != nil && !errors.Is(err, c.want) || !errdefs.Is(err, c.of) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// holed has a hole of 5 bytes before each "ab", and one of tail bytes at its end.
type holed struct{ parts, tail int64 }

func (h *holed) Skip() (int64, error) {
	if h.parts > 0 {
		return 5, nil
	}
	n := h.tail
	h.tail = 0
	return n, nil
}

func (h *holed) Read(p []byte) (int, error) {
	if h.parts == 0 {
		return 0, io.EOF
	}
	h.parts--
	return copy(p, "ab"), nil
}

func TestEachSkipsHoles(t *testing.T) {
	for name, r := range map[string]io.Reader{"holed": &holed{2, 3}, "interrupted": Interrupted{Ctx: t.Context(), R: &holed{2, 3}}} {
		var got []string
		n, err := Each(r, make([]byte, 2), 17, func(part []byte, at int64) error {
			got = append(got, fmt.Sprintf("%s at %d", part, at))
			return nil
		})
		if err != nil || n != 17 || strings.Join(got, ", ") != "ab at 5, ab at 12" {
			t.Errorf("%s: %d, %q, %v", name, n, got, err)
		}
	}
	if _, err := Each(&holed{0, 9}, make([]byte, 2), 8, nil); !errdefs.IsInvalid(err) {
		t.Errorf("a hole beyond the limit: %v", err)
	}
	if n, err := Each(&holed{0, 8}, make([]byte, 2), 8, nil); n != 8 || err != nil {
		t.Errorf("only a hole: %d, %v", n, err)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r := Interrupted{Ctx: ctx, R: iotest.OneByteReader(bytes.NewReader(make([]byte, 10)))}
	if _, err := io.ReadFull(r, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if n, err := io.ReadAll(r); len(n) != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d bytes, %v", len(n), err)
	}
}
