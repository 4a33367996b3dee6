package serial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/guest"
)

func write(t *testing.T, path, text string, flags int) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|flags, 0o600)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	if err := Read(t.Context(), path, -1, 0, false, nil, nil); err != nil {
		t.Errorf("no file: %v", err)
	}
	long := strings.Repeat("x", maxLine+10)
	write(t, path, "one\n\n"+long+"\nlast", os.O_TRUNC)
	for tail, want := range map[int][]string{
		-1: {"one\n", "\n", long[:maxLine], long[maxLine:] + "\n", "last"},
		0:  nil,
		1:  {"last"},
		2:  {long[:maxLine], long[maxLine:] + "\n", "last"},
		3:  {"\n", long[:maxLine], long[maxLine:] + "\n", "last"},
		99: {"one\n", "\n", long[:maxLine], long[maxLine:] + "\n", "last"},
	} {
		var got []string
		err := Read(t.Context(), path, tail, 0, false, nil, func(e guest.LogEntry) error {
			got = append(got, string(e.Data))
			if e.Seq != uint64(len(got)) {
				t.Errorf("entry %d has number %d", len(got), e.Seq)
			}
			return nil
		})
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("tail %d: %v, %d entries, want %d", tail, err, len(got), len(want))
		}
	}
}

func TestFollow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	ended, lines, done := make(chan struct{}), make(chan string), make(chan error, 1)
	go func() {
		done <- Read(t.Context(), path, -1, 0, true, ended, func(e guest.LogEntry) error { lines <- string(e.Data); return nil })
	}()
	next := func(want string) {
		t.Helper()
		if got := <-lines; got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	write(t, path, "first\npart", 0)
	next("first\n")
	write(t, path, " two\n", os.O_APPEND)
	next("part two\n")
	write(t, path, "cut\n", os.O_TRUNC) // the writer bounds its file by truncating it
	next("cut\n")
	if err := os.Rename(path, path+".1"); err != nil { // or by replacing it
		t.Fatal(err)
	}
	write(t, path, "fresh\nend", 0)
	next("fresh\n")
	close(ended)
	next("end")
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestFollowIsCanceled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	write(t, path, "x\n", 0)
	ctx, cancel := context.WithCancel(t.Context())
	err := Read(ctx, path, -1, 0, true, nil, func(guest.LogEntry) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	stop := fmt.Errorf("enough")
	if err := Read(t.Context(), path, -1, 0, true, nil, func(guest.LogEntry) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
	if err := Read(t.Context(), "/does/not/exist/x", -1, 0, true, nil, nil); err == nil {
		t.Error("a folder that does not exist can be followed")
	}
}

// TestReadFrom: reading goes on where it ended, and begins again if the file has become shorter.
func TestReadFrom(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	read := func(from int64) (text string, end int64) {
		t.Helper()
		err := Read(t.Context(), path, -1, from, false, nil, func(e guest.LogEntry) error {
			text, end = text+string(e.Data), e.End
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return text, end
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("one\ntwo\n")
	text, end := read(0)
	if text != "one\ntwo\n" || end != 8 {
		t.Fatalf("%q, %d", text, end)
	}
	write("one\ntwo\nthree\n")
	if text, end = read(end); text != "three\n" || end != 14 {
		t.Errorf("goes on with %q, %d", text, end)
	}
	write("new\n")
	if text, _ = read(end); text != "new\n" {
		t.Errorf("in a shorter file: %q", text)
	}
}

// TestTailOfZeros: the search for lines ends, whatever size the log has. A hypervisor can make it large without writing a byte.
func TestTailOfZeros(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	write(t, path, "one\n", 0)
	if err := os.Truncate(path, 4*maxTail); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if at, err := tailOffset(f, 1); err != nil || at != 3*maxTail {
		t.Errorf("the last line begins at %d, %v; want %d", at, err, 3*maxTail)
	}
}
