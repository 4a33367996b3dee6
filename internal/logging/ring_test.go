package logging

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

func read(t *testing.T, r *Ring, lines int) string {
	t.Helper()
	var b strings.Builder
	if err := r.Read(t.Context(), lines, false, func(p []byte) error { b.Write(p); return nil }); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestRing(t *testing.T) {
	r := NewRing(100)
	if got := read(t, r, 3); got != "" {
		t.Errorf("an empty ring has %q", got)
	}
	for i := range 5 {
		fmt.Fprintf(r, "line %d\n", i)
	}
	for lines, want := range map[int]string{0: "line 0\nline 1\nline 2\nline 3\nline 4\n", 1: "line 4\n", 2: "line 3\nline 4\n", 9: "line 0\nline 1\nline 2\nline 3\nline 4\n"} {
		if got := read(t, r, lines); got != want {
			t.Errorf("%d lines: %q, want %q", lines, got, want)
		}
	}
	for i := range 1000 {
		fmt.Fprintf(r, "line %d\n", i)
	}
	if got := read(t, r, 0); len(got) < 100 || len(got) > 210 || !strings.HasSuffix(got, "line 998\nline 999\n") {
		t.Errorf("a full ring has %d bytes: %q", len(got), got)
	}
}

// A reader that follows gets all that is written meanwhile, in order.
func TestRingIsFollowed(t *testing.T) {
	r := NewRing(1 << 20)
	fmt.Fprint(r, "a\nb\n")
	ctx, cancel := context.WithCancel(t.Context())
	var got strings.Builder
	n := 0
	err := r.Read(ctx, 1, true, func(p []byte) error {
		got.Write(p)
		if n++; n <= 100 {
			fmt.Fprintf(r, "%d ", n)
		} else {
			cancel()
		}
		return nil
	})
	if err == nil || ctx.Err() == nil || !strings.HasPrefix(got.String(), "b\n1 2 3 ") || !strings.HasSuffix(got.String(), " 99 100 ") {
		t.Errorf("%v, %q", err, got.String())
	}
}
