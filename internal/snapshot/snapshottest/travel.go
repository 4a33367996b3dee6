package snapshottest

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// export returns a snapshot as a stream.
func export(t *testing.T, s snapshot.Store, ref string) []byte {
	t.Helper()
	h, err := s.Hold(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	var buf bytes.Buffer
	if err := s.Export(t.Context(), h, &buf); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// same checks that two snapshots have the same content.
func same(t *testing.T, s snapshot.Store, a, b string) {
	t.Helper()
	ha, err := s.Hold(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer ha.Release()
	hb, err := s.Hold(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	defer hb.Release()
	sa, sb := ha.Snapshot(), hb.Snapshot()
	if !reflect.DeepEqual(sa.Disks, sb.Disks) || sa.Memory != sb.Memory || !sa.CreatedAt.Equal(sb.CreatedAt) || !reflect.DeepEqual(sa.Labels, sb.Labels) {
		t.Errorf("%s is %+v, %s is %+v", a, sa, b, sb)
	}
	for _, f := range sa.Files() {
		x, err1 := os.ReadFile(filepath.Join(ha.Dir(), f))
		y, err2 := os.ReadFile(filepath.Join(hb.Dir(), f))
		if err1 != nil || err2 != nil || !bytes.Equal(x, y) {
			t.Errorf("%s differs: %d and %d bytes, %v, %v", f, len(x), len(y), err1, err2)
		}
	}
}

func streams(t *testing.T, s snapshot.Store) {
	snap := Save(t, s, NewGuest(t), "one")
	plain := export(t, s, "one")
	if len(plain) > 2<<20 {
		t.Errorf("the stream has %d bytes: the holes of the memory are in it", len(plain))
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, err := z.Write(plain)
	if err := errors.Join(err, z.Close()); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"plain": plain, "gzip": packed.Bytes()} {
		var told int64
		got, err := s.Import(t.Context(), name, "from afar", bytes.NewReader(data), func(n int64) { told = max(told, n) })
		if err != nil {
			t.Fatal(err)
		}
		if got.ID == snap.ID || got.Name != name || got.Description != "from afar" || told == 0 || got.Size > 2<<20 {
			t.Errorf("imported as %+v; %d bytes were told of", got, told)
		}
		if got.Record.PID != 0 || got.NIC[0].Tap != "" || got.Record.Spec.Name != "source" {
			t.Errorf("the record is that of another machine: %+v", got.Record)
		}
		same(t, s, "one", name)
	}
	_, err = s.Import(t.Context(), "", "", bytes.NewReader(plain), nil)
	class(t, "its own name is taken", err, errdefs.AlreadyExists)
	if err := s.Remove(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Import(t.Context(), "", "", bytes.NewReader(plain), nil); err != nil || got.Name != "one" {
		t.Errorf("imported as %q, %v", got.Name, err)
	}
	_, err = s.Import(t.Context(), "bad/name", "", bytes.NewReader(plain), nil)
	class(t, "a bad name", err, errdefs.InvalidArgument)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.Import(canceled, "canceled", "", bytes.NewReader(plain), nil)
	class(t, "canceled", err, errdefs.Canceled)
}

func truncated(t *testing.T, s snapshot.Store) {
	Save(t, s, NewGuest(t), "one")
	plain := export(t, s, "one")
	for _, n := range []int{0, 1, 511, 600, 4000, len(plain) / 2, len(plain) - 3000, len(plain) - 1024, len(plain) - 1} {
		_, err := s.Import(t.Context(), "cut", "", bytes.NewReader(plain[:n]), nil)
		class(t, "cut", err, errdefs.DataLoss)
	}
	for n := len(plain) / 3; n < len(plain); n += len(plain) / 7 {
		bad := bytes.Clone(plain)
		bad[n] ^= 0x10
		if _, err := s.Import(t.Context(), "flipped", "", bytes.NewReader(bad), nil); err == nil && bad[n] != 0x10 {
			t.Errorf("bit of byte %d flipped: not noticed", n)
			_ = s.Remove(t.Context(), "flipped")
		} else if err == nil {
			t.Errorf("padding at byte %d flipped: not noticed", n)
			_ = s.Remove(t.Context(), "flipped")
		}
	}
	if all, err := s.List(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("there are %d snapshots, %v", len(all), err)
	}
	Save(t, s, NewGuest(t), "cut") // its name is free
}

func foreign(t *testing.T, s snapshot.Store) {
	for _, text := range []string{"", "hello", strings.Repeat("x", 5000), "\x1f\x8b\x08"} {
		if _, err := s.Import(t.Context(), "x", "", strings.NewReader(text), nil); !errdefs.IsInvalid(err) && !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%.10q: %v", text, err)
		}
	}
	boom := errdefs.Unavailablef("the client went away")
	Save(t, s, NewGuest(t), "one")
	data := export(t, s, "one")
	_, err := s.Import(t.Context(), "x", "", io.MultiReader(bytes.NewReader(data[:len(data)/2]), failing{boom}), nil)
	class(t, "a reader that fails", err, errdefs.Unavailable)
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func folders(t *testing.T, s snapshot.Store) {
	snap := Save(t, s, NewGuest(t), "one")
	h, err := s.Hold(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	dir := filepath.Join(t.TempDir(), "made")
	if err := s.ExportDir(t.Context(), h, dir); err != nil {
		t.Fatal(err)
	}
	class(t, "a folder with something in it", s.ExportDir(t.Context(), h, dir), errdefs.FailedPrecondition)
	class(t, "relative", s.ExportDir(t.Context(), h, "there"), errdefs.InvalidArgument)
	class(t, "in no folder", s.ExportDir(t.Context(), h, filepath.Join(dir, "a", "b")), errdefs.InvalidArgument)
	class(t, "in a file", s.ExportDir(t.Context(), h, filepath.Join(dir, snapshot.FileMeta, "a")), errdefs.InvalidArgument)
	class(t, "a file", s.ExportDir(t.Context(), h, filepath.Join(dir, snapshot.FileMeta)), errdefs.InvalidArgument)
	outside, err := s.HoldDir(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if outside.Dir() != dir || outside.Snapshot().ID != snap.ID || outside.Snapshot().Record.PID != 0 {
		t.Errorf("held is %+v in %s", outside.Snapshot(), outside.Dir())
	}
	g := NewGuest(t)
	if _, err := s.Disks(t.Context(), outside, g.Disks, t.TempDir(), 0); err != nil {
		t.Errorf("disks of a folder: %v", err)
	}
	var buf bytes.Buffer
	if err := s.Export(t.Context(), outside, &buf); err != nil {
		t.Errorf("export of a folder: %v", err)
	}
	outside.Release()
	got, err := s.ImportDir(t.Context(), "two", "again", dir)
	if err != nil {
		t.Fatal(err)
	}
	if got.ID == snap.ID || got.Name != "two" || got.Description != "again" {
		t.Errorf("imported as %+v", got)
	}
	same(t, s, "one", "two")
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	same(t, s, "one", "two")
}

func folderChecks(t *testing.T, s snapshot.Store) {
	Save(t, s, NewGuest(t), "one")
	h, err := s.Hold(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	layer := h.Snapshot().Disks[1].Layers[1].File
	for name, c := range map[string]struct {
		spoil func(dir string) error
		want  errdefs.Class
	}{
		"no folder":      {os.RemoveAll, errdefs.InvalidArgument},
		"no record":      {func(dir string) error { return os.Remove(filepath.Join(dir, snapshot.FileMeta)) }, errdefs.InvalidArgument},
		"bad record":     {func(dir string) error { return os.WriteFile(filepath.Join(dir, snapshot.FileMeta), []byte("{"), 0o600) }, errdefs.InvalidArgument},
		"no memory":      {func(dir string) error { return os.Remove(filepath.Join(dir, snapshot.FileMemory)) }, errdefs.DataLoss},
		"anybody's":      {func(dir string) error { return os.Chmod(dir, 0o777) }, errdefs.FailedPrecondition},
		"anybody's file": {func(dir string) error { return replace(dir, snapshot.FileState, 0o666) }, errdefs.FailedPrecondition},
		"a group's file": {func(dir string) error { return replace(dir, snapshot.FileState, 0o660) }, errdefs.FailedPrecondition},
		"too much memory": {func(dir string) error {
			return errors.Join(replace(dir, snapshot.FileMemory, 0o600), os.Truncate(filepath.Join(dir, snapshot.FileMemory), Memory+1))
		}, errdefs.InvalidArgument},
		"link": {func(dir string) error {
			f := filepath.Join(dir, layer)
			return errors.Join(os.Remove(f), os.Symlink("/etc/passwd", f))
		}, errdefs.InvalidArgument},
		"no qcow2": {func(dir string) error { return replace(dir, layer, 0o600) }, errdefs.DataLoss},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "x")
			if err := s.ExportDir(t.Context(), h, dir); err != nil {
				t.Fatal(err)
			}
			if err := c.spoil(dir); err != nil {
				t.Fatal(err)
			}
			_, err := s.HoldDir(t.Context(), dir)
			class(t, "HoldDir", err, c.want)
			_, err = s.ImportDir(t.Context(), "x", "", dir)
			class(t, "ImportDir", err, c.want)
		})
	}
	_, err = s.HoldDir(t.Context(), "relative")
	class(t, "relative", err, errdefs.InvalidArgument)
}

// replace puts another file in place of one that may be shared.
func replace(dir, name string, mode os.FileMode) error {
	path := filepath.Join(dir, name)
	return errors.Join(os.Remove(path), os.WriteFile(path, []byte("other"), 0o600), os.Chmod(path, mode))
}
