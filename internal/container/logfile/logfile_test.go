package logfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/container"
)

// all returns the data of the entries that Read delivers, without following.
func all(t *testing.T, dir string, o container.LogOptions) string {
	t.Helper()
	var text strings.Builder
	err := Read(t.Context(), dir, o, nil, func(e container.LogEntry) error {
		text.Write(e.Data)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return text.String()
}

func lines(from, to int) string {
	var b strings.Builder
	for i := from; i < to; i++ {
		fmt.Fprintf(&b, "line %d\n", i)
	}
	return b.String()
}

func opened(t *testing.T, dir string, limit int64) *writer {
	t.Helper()
	w, err := open(dir, limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.close() })
	return w
}

func TestTailAndSince(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	if Exists(dir) {
		t.Error("a log exists before it is made")
	}
	if got := all(t, dir, container.LogOptions{Tail: -1}); got != "" {
		t.Errorf("a log that is not there has %q", got)
	}
	w := opened(t, dir, 1<<20)
	start := time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)
	for i := range 5 {
		w.write(start.Add(time.Duration(i)*time.Second), stdout, []byte(lines(i, i+1)))
	}
	w.write(start.Add(5*time.Second), stderr, []byte("part"))
	w.write(start.Add(6*time.Second), stderr, []byte("ial\nrest"))
	if !Exists(dir) {
		t.Error("the log does not exist")
	}
	for _, tt := range []struct {
		o    container.LogOptions
		want string
	}{
		{container.LogOptions{Tail: -1}, lines(0, 5) + "partial\nrest"},
		{container.LogOptions{Tail: 100}, lines(0, 5) + "partial\nrest"},
		{container.LogOptions{Tail: 3}, lines(4, 5) + "partial\nrest"},
		{container.LogOptions{Tail: 1}, "rest"},
		{container.LogOptions{Tail: 0}, ""},
		{container.LogOptions{Tail: -1, Since: start.Add(3 * time.Second)}, lines(3, 5) + "partial\nrest"},
		{container.LogOptions{Tail: 4, Since: start.Add(time.Hour)}, ""},
	} {
		if got := all(t, dir, tt.o); got != tt.want {
			t.Errorf("%+v: got %q, want %q", tt.o, got, tt.want)
		}
	}
}

func TestBoundAndOrder(t *testing.T) {
	dir := t.TempDir()
	const limit = 4 << 10
	w := opened(t, dir, limit)
	for i := range 1000 {
		w.write(time.Now(), stdout, []byte(lines(i, i+1)))
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Fatalf("the log has the files %v (%v), want two", files, err)
	}
	for _, f := range files {
		if fi, err := f.Info(); err != nil || fi.Size() > limit {
			t.Errorf("%s has %d bytes (%v), want at most %d", f.Name(), fi.Size(), err, limit)
		}
	}
	got := all(t, dir, container.LogOptions{Tail: -1})
	if !strings.HasSuffix(lines(0, 1000), got) || strings.Count(got, "\n") < 50 {
		t.Errorf("the log is not the end of what was written: %.200q", got)
	}
	if got := all(t, dir, container.LogOptions{Tail: 75}); got != lines(925, 1000) {
		t.Errorf("the last 75 lines, of both files, are %.200q", got)
	}
}

func TestLongLinesAreWhole(t *testing.T) {
	dir := t.TempDir()
	w := opened(t, dir, 1<<20)
	text := strings.Repeat("x", 3*maxText+5) + "\nnext\n"
	w.write(time.Now(), stdout, []byte(text))
	if got := all(t, dir, container.LogOptions{Tail: -1}); got != text {
		t.Errorf("got %d bytes, want %d", len(got), len(text))
	}
	if got := all(t, dir, container.LogOptions{Tail: 2}); got != text {
		t.Errorf("the last two lines have %d bytes, want %d", len(got), len(text))
	}
}

func TestInterruptedWrite(t *testing.T) {
	dir := t.TempDir()
	w := opened(t, dir, 1<<20)
	w.write(time.Now(), stdout, []byte(lines(0, 2)))
	if _, err := w.f.WriteString("2026-11-28T12:00:00Z stdout F half a li"); err != nil {
		t.Fatal(err)
	}
	if got := all(t, dir, container.LogOptions{Tail: -1}); got != lines(0, 2) {
		t.Errorf("before the log is opened again, got %q", got)
	}
	again := opened(t, dir, 1<<20)
	again.write(time.Now(), stdout, []byte(lines(2, 3)))
	if got := all(t, dir, container.LogOptions{Tail: -1}); got != lines(0, 3) {
		t.Errorf("got %q", got)
	}
}

func TestLostOutputIsCounted(t *testing.T) {
	dir := t.TempDir()
	w := opened(t, dir, 1<<20)
	good := w.f
	bad, err := os.Open(filepath.Join(dir, current)) // cannot be written
	if err != nil {
		t.Fatal(err)
	}
	defer bad.Close()
	w.f = bad
	w.write(time.Now(), stdout, []byte(lines(0, 2)))
	w.f = good
	w.write(time.Now(), stdout, []byte(lines(2, 3)))
	if got, want := all(t, dir, container.LogOptions{Tail: -1}), "[14 bytes of output were lost, because the log could not be written]\n"+lines(2, 3); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestFollow lets a reader follow a log that rotates faster than it is written whole: the reader keeps up, so it gets all.
func TestFollow(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	const n = 2000
	ended := make(chan struct{})
	var got bytes.Buffer
	turn := make(chan struct{}, 1)
	done := make(chan error, 1)
	go func() {
		done <- Read(t.Context(), dir, container.LogOptions{Follow: true, Tail: -1}, ended, func(e container.LogEntry) error {
			got.Write(e.Data)
			if bytes.Equal(e.Data, []byte("turn\n")) {
				turn <- struct{}{}
			}
			return nil
		})
	}()
	out, in := io.Pipe()
	written := make(chan error, 1)
	go func() { written <- copyOutput(opened(t, dir, 2<<10), out, strings.NewReader("")) }()
	var want strings.Builder
	for i := range n {
		text := lines(i, i+1)
		if i%20 == 19 { // more do not fit into both files
			text += "turn\n"
		}
		want.WriteString(text)
		if _, err := io.WriteString(in, text); err != nil {
			t.Fatal(err)
		}
		if i%20 == 19 {
			<-turn
		}
	}
	in.Close()
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	close(ended)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got.String() != want.String() {
		t.Errorf("got %d bytes, want %d", got.Len(), want.Len())
	}
}

func TestReadEnds(t *testing.T) {
	dir := t.TempDir()
	w := opened(t, dir, 1<<20)
	w.write(time.Now(), stdout, []byte(lines(0, 1)))
	why := errors.New("enough")
	err := Read(t.Context(), dir, container.LogOptions{Follow: true, Tail: -1}, nil, func(container.LogEntry) error { return why })
	if !errors.Is(err, why) {
		t.Errorf("got %v, want the error of the function", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err = Read(ctx, dir, container.LogOptions{Follow: true, Tail: -1}, nil, func(container.LogEntry) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the end of the context", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("2026-11-28T12:00:00.5Z stdout F text"))
	f.Add([]byte("2026-11-28T12:00:00Z stderr P "))
	f.Add([]byte("2026-11-28T12:00:00Z stderr"))
	f.Fuzz(func(t *testing.T, line []byte) {
		e, ok := parse(line)
		if !ok || bytes.ContainsAny(line, "\n") || len(e.Data) == 0 || len(e.Data) > maxText {
			return
		}
		out := appendEntry(nil, e.Time, e.Stream, e.Data)
		again, ok := parse(bytes.TrimSuffix(out, []byte("\n")))
		if !ok || !again.Time.Equal(e.Time) || again.Stream != e.Stream || !bytes.Equal(again.Data, e.Data) {
			t.Errorf("%q became %+v, then %q, then %+v", line, e, out, again)
		}
	})
}
