// Package objectstest is the test suite that every objects.Store passes.
//
// It tests the contract, not the effects of a crash: each implementation tests those itself.
package objectstest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
)

// Run runs the suite. open returns an empty store each time.
func Run(t *testing.T, open func(t *testing.T) objects.Store) {
	t.Run("objects", func(t *testing.T) { plain(t, open(t)) })
	t.Run("list", func(t *testing.T) { list(t, open(t)) })
	t.Run("seek", func(t *testing.T) { seek(t, open(t)) })
	t.Run("concurrent", func(t *testing.T) { concurrent(t, open(t)) })
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func has(t *testing.T, s objects.Store, key, want string) {
	t.Helper()
	data, info, err := objects.Read(t.Context(), s, key, 1<<20)
	if err != nil || string(data) != want || info.Size != int64(len(want)) || info.Modified.IsZero() {
		t.Errorf("%s: %q, %+v, %v; want %q", key, data, info, err, want)
	}
}

func absent(t *testing.T, s objects.Store, key string) {
	t.Helper()
	if _, err := s.Stat(t.Context(), key); !errdefs.IsNotFound(err) {
		t.Errorf("Stat of %s: %v", key, err)
	}
	if f, _, err := s.Open(t.Context(), key); !errdefs.IsNotFound(err) {
		if err == nil {
			f.Close()
		}
		t.Errorf("Open of %s: %v", key, err)
	}
}

func plain(t *testing.T, s objects.Store) {
	ctx := t.Context()
	absent(t, s, "a/b")
	must(t, s.Write(ctx, "a/b/c", []byte("one")))
	must(t, s.Write(ctx, "a/b/c", []byte("two")))
	must(t, s.Write(ctx, "a/b/empty", nil))
	has(t, s, "a/b/c", "two")
	has(t, s, "a/b/empty", "")
	absent(t, s, "a/b")
	absent(t, s, "a/b/d")
	absent(t, s, "a/b/c/below an object")
	if _, _, err := objects.Read(ctx, s, "a/b/c", 2); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("larger than it may be: %v", err)
	}
	file := filepath.Join(s.Staging(), "upload")
	must(t, os.WriteFile(file, []byte("taken"), 0o600))
	must(t, s.Take(ctx, "x/y", file))
	has(t, s, "x/y", "taken")
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
	if f, ok := s.(objects.Flusher); ok {
		must(t, f.Flush(ctx, "x/y"))
		if err := f.Flush(ctx, "x/z"); !errdefs.IsNotFound(err) {
			t.Errorf("flush of nothing: %v", err)
		}
	}
	must(t, s.Move(ctx, "x/y", "q/x/y"))
	absent(t, s, "x/y")
	has(t, s, "q/x/y", "taken")
	if err := s.Move(ctx, "x/y", "q/z"); !errdefs.IsNotFound(err) {
		t.Errorf("move of nothing: %v", err)
	}
	must(t, s.Remove(ctx, "q/x/y"))
	must(t, s.Remove(ctx, "q/x/y"))
	must(t, s.Remove(ctx, "never/was"))
	absent(t, s, "q/x/y")
	must(t, s.Sync(ctx))
	must(t, s.Sync(ctx))
}

func list(t *testing.T, s objects.Store) {
	ctx := t.Context()
	if all, err := s.List(ctx, "none"); err != nil || len(all) != 0 {
		t.Errorf("nothing: %v, %v", all, err)
	}
	for _, key := range []string{"l/b", "l/a/x", "l/a/y", "l/a.b", "l/_c/d/e", "lx/z"} {
		must(t, s.Write(ctx, key, []byte(key)))
	}
	for i := range 1200 { // more than one page of S3
		must(t, s.Write(ctx, fmt.Sprintf("many/%04d", i), nil))
	}
	all, err := s.List(ctx, "l")
	must(t, err)
	var got []string
	for _, e := range all {
		if e.Dir {
			e.Name += "/"
		} else if e.Size != int64(len("l/"+e.Name)) || e.Modified.IsZero() {
			t.Errorf("%+v", e)
		}
		got = append(got, e.Name)
	}
	if strings.Join(got, " ") != "_c/ a/ a.b b" {
		t.Errorf("%v", got)
	}
	all, err = s.List(ctx, "many")
	must(t, err)
	if len(all) != 1200 || all[0].Name != "0000" || all[1199].Name != "1199" {
		t.Errorf("%d entries", len(all))
	}
}

func seek(t *testing.T, s objects.Store) {
	data := bytes.Repeat([]byte("0123456789abcdef"), 300_000) // several ways to reach an offset
	file := filepath.Join(s.Staging(), "upload")
	must(t, os.WriteFile(file, data, 0o600))
	must(t, s.Take(t.Context(), "big", file))
	f, info, err := s.Open(t.Context(), "big")
	must(t, err)
	defer f.Close()
	if info.Size != int64(len(data)) {
		t.Errorf("%d bytes", info.Size)
	}
	for _, at := range []int64{0, 5, 100, 1000, 3_000_000, 2_999_999, 0, info.Size - 1} {
		if n, err := f.Seek(at, io.SeekStart); err != nil || n != at {
			t.Fatal(n, err)
		}
		buf := make([]byte, min(777, info.Size-at))
		if _, err := io.ReadFull(f, buf); err != nil || !bytes.Equal(buf, data[at:at+int64(len(buf))]) {
			t.Errorf("at %d: %v", at, err)
		}
	}
	if n, err := f.Read(make([]byte, 1)); n != 0 || err != io.EOF { //nolint:errorlint // io.Reader returns io.EOF itself
		t.Errorf("behind the end: %d, %v", n, err)
	}
	if n, err := f.Seek(-3, io.SeekEnd); err != nil || n != info.Size-3 {
		t.Error(n, err)
	}
	rest, err := io.ReadAll(f)
	if err != nil || string(rest) != "def" {
		t.Errorf("%q, %v", rest, err)
	}
}

func concurrent(t *testing.T, s objects.Store) {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 20 {
				text := strings.Repeat(fmt.Sprint(i), 1000)
				if err := s.Write(t.Context(), "shared", []byte(text)); err != nil {
					t.Error(err)
				}
				data, _, err := objects.Read(t.Context(), s, "shared", 1<<20)
				if err != nil || len(data) != 1000 || strings.Trim(string(data), string(data[:1])) != "" {
					t.Errorf("torn: %d bytes, %v", len(data), err)
				}
				if err := s.Write(t.Context(), fmt.Sprintf("own/%d/%d", i, n), nil); err != nil {
					t.Error(err)
				}
				if err := s.Sync(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
