package guestagent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
)

func TestRingIsBoundedAndShowsItsGap(t *testing.T) {
	r := newRing(10 << 10)
	for i := range 5000 {
		r.add(false, fmt.Appendf(nil, "line %d\n", i))
	}
	if r.size > r.limit {
		t.Errorf("it holds %d of %d bytes", r.size, r.limit)
	}
	e, more, err := r.next(t.Context(), 0)
	if err != nil || !more || e.seq < 4000 || string(e.data) != fmt.Sprintf("line %d\n", e.seq-1) {
		t.Errorf("first entry %d %q, %v", e.seq, e.data, err)
	}
	r.add(true, bytes.Repeat([]byte("x"), 20<<10)) // larger than the ring: kept alone
	if e, _, _ = r.next(t.Context(), 0); e.seq != 5001 || !e.stderr {
		t.Errorf("after a large entry: %d", e.seq)
	}
}

func TestRingFollowers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRing(1 << 20)
		got := make(chan string, 10)
		for range 2 {
			go func() {
				var all strings.Builder
				for seq := uint64(0); ; {
					e, more, err := r.next(t.Context(), seq)
					if err != nil || !more {
						got <- all.String()
						return
					}
					seq = e.seq
					all.Write(e.data)
				}
			}()
		}
		synctest.Wait()
		r.add(false, []byte("a"))
		synctest.Wait()
		r.add(true, []byte("b"))
		r.end()
		for range 2 {
			if s := <-got; s != "ab" {
				t.Errorf("a follower got %q", s)
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := newRing(1).next(ctx, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestLines(t *testing.T) {
	r := newRing(1 << 20)
	l := &lines{out: r}
	for _, p := range []string{"on", "e\ntwo\nthr", "ee", strings.Repeat("x", 2*maxEntry)} {
		l.write([]byte(p))
	}
	l.flush()
	l.flush()
	var sizes []int
	for _, e := range r.entries {
		sizes = append(sizes, len(e.data))
	}
	if fmt.Sprint(sizes) != fmt.Sprint([]int{4, 4, maxEntry, maxEntry, 5}) {
		t.Errorf("entries of %v bytes", sizes)
	}
}

func TestTailOfTheOutput(t *testing.T) {
	r := newRing(1 << 20)
	for i := range 100 {
		r.add(false, fmt.Appendf(nil, "line %d\n", i))
	}
	for _, tc := range []struct {
		lines, size int
		want        string
	}{
		{2, 1000, "line 98\nline 99\n"},
		{80, 11, "98\nline 99\n"},
		{1, 1000, "line 99\n"},
	} {
		if got := r.tail(tc.lines, tc.size); got != tc.want {
			t.Errorf("%d lines and %d bytes: %q, want %q", tc.lines, tc.size, got, tc.want)
		}
	}
	if got := newRing(100).tail(80, 2048); got != "" {
		t.Errorf("of no output: %q", got)
	}
}
