package oci_test

import (
	"bytes"
	"context"
	"io"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/image/oci"
	. "cocoonstack.io/cocoon/internal/testkit/ociimage" // a vocabulary for tables of images
)

// memory is a file in memory.
type memory struct {
	data []byte
	pos  int64
}

func (m *memory) Write(p []byte) (int, error) {
	if end := m.pos + int64(len(p)); end > int64(len(m.data)) {
		m.data = append(m.data, make([]byte, end-int64(len(m.data)))...)
	}
	m.pos += int64(copy(m.data[m.pos:], p))
	return len(p), nil
}

func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(m.data).ReadAt(p, off)
}

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	if end := off + int64(len(p)); end > int64(len(m.data)) {
		m.data = append(m.data, make([]byte, end-int64(len(m.data)))...)
	}
	return copy(m.data[off:], p), nil
}

func (m *memory) Truncate(size int64) error {
	m.data = append(m.data, make([]byte, max(0, size-int64(len(m.data))))...)[:size]
	return nil
}

// FuzzArchive passes archives of every kind through the whole process: the result is always a classified error or a file
// system.
func FuzzArchive(f *testing.F) {
	img := Image{Layers: []Layer{Of(Dir("d"), File("d/a", "1"), HardLink("b", "d/a"), Symlink("s", "d")), Of(Whiteout("d", "a"), Opaque("d"), File("s/x", "2"))}}
	f.Add(img.OCI())
	f.Add(Docker(map[string]Image{"app:latest": img}))
	f.Add(Tar(Symlink("a", "b"), Symlink("b", "a")))
	f.Add(Image{Layers: []Layer{{Tar: img.Layers[0].Tar, Compress: "gzip"}, {Tar: img.Layers[1].Tar, Compress: "zstd"}}}.OCI())
	lim := oci.Limits{Archive: 4 << 20, Unpacked: 1 << 20, File: 1 << 19, Entries: 1000}
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := oci.Read(t.Context(), bytes.NewReader(data), &memory{}, lim)
		if err == nil {
			_, err = a.Image("app:latest", "amd64")
		}
		if err != nil && errdefs.ClassOf(err) == errdefs.Internal {
			t.Errorf("unclassified: %v", err)
		}
	})
}

// FuzzLayer passes layers with a matching digest through the whole process: built, restored, read, merged.
func FuzzLayer(f *testing.F) {
	f.Add(Tar(Dir("d"), File("d/a", "1"), HardLink("b", "d/a"), Symlink("s", "d")), Tar(Whiteout("d", "a"), Opaque("d"), File("s/x", "2")))
	f.Add(Tar(Symlink("a", "../b"), Symlink("b", "/a"), File("a/b/c", "1")), Tar(Device("a"), File(".wh.b", "")))
	f.Add(Tar(Entry{Name: "x", Body: "y", Mode: 0o7777, UID: 1 << 20, Xattrs: map[string]string{"user.a": "b", "system.posix_acl_access": "\x02\x00\x00\x00"}}), []byte{})
	lim := oci.Limits{Archive: 4 << 20, Unpacked: 1 << 20, File: 1 << 19, Entries: 1000}
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		img, err := choose(t, Image{Layers: []Layer{{Tar: lower}, {Tar: upper}}}.OCI(), "app:latest")
		if err != nil {
			t.Skip() // the layer happens to be compressed
		}
		var below []*ext4.FS
		budget := oci.NewBudget(lim)
		for n, want := range img.DiffIDs {
			out, recipe := &memory{}, &bytes.Buffer{}
			_, err = oci.BuildLayer(t.Context(), img.Layer(n), want, oci.Target{
				FS: out, Recipe: recipe, Budget: budget, Below: func(context.Context) (*oci.Stack, error) { return oci.NewStack(below) },
			})
			if err != nil {
				break
			}
			if err := oci.Restore(t.Context(), io.Discard, out, recipe, want); err != nil {
				t.Errorf("the layer cannot be given back: %v", err)
			}
			fs, err := ext4.Open(out)
			if err != nil {
				t.Fatalf("what was written cannot be read: %v", err)
			}
			below = append(below, fs)
		}
		if err == nil {
			stack, serr := oci.NewStack(below)
			if serr != nil {
				t.Fatal(serr)
			}
			for _, path := range []string{"/d/a", "/s/x", "/b", "/a/b/c"} {
				if e, err := stack.File(path); err == nil {
					if _, err := io.Copy(io.Discard, e.Open()); err != nil {
						t.Errorf("%s cannot be read: %v", path, err)
					}
				} else if !errdefs.IsNotFound(err) && !errdefs.IsInvalid(err) {
					t.Errorf("%s: %v", path, err)
				}
			}
			if _, err := oci.Merge(t.Context(), stack, &memory{}, "", budget); err != nil && errdefs.ClassOf(err) != errdefs.ResourceExhausted {
				t.Errorf("layers that were built cannot be merged: %v", err)
			}
		}
		if err != nil && errdefs.ClassOf(err) == errdefs.Internal {
			t.Errorf("unclassified: %v", err)
		}
	})
}
