package oci_test

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/oci"
	. "cocoonstack.io/cocoon/internal/testkit/ociimage" // a vocabulary for tables of images
)

// memory is a file that needs no disk.
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

func (m *memory) Read(p []byte) (int, error) {
	n, err := m.ReadAt(p, m.pos)
	m.pos += int64(n)
	return n, err
}

func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(m.data).ReadAt(p, off)
}

func (m *memory) Seek(off int64, whence int) (int64, error) {
	if whence != io.SeekStart {
		return 0, errors.ErrUnsupported
	}
	m.pos = off
	return off, nil
}

// FuzzArchive feeds archives of every kind through the whole path: whatever they are, the answer is a classified error
// or a file system.
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

// FuzzLayer feeds layers, whose digest is made to fit, to the flattener and the file system writer.
func FuzzLayer(f *testing.F) {
	f.Add(Tar(Dir("d"), File("d/a", "1"), HardLink("b", "d/a"), Symlink("s", "d")), Tar(Whiteout("d", "a"), Opaque("d"), File("s/x", "2")))
	f.Add(Tar(Symlink("a", "../b"), Symlink("b", "/a"), File("a/b/c", "1")), Tar(Device("a"), File(".wh.b", "")))
	f.Add(Tar(Entry{Name: "x", Body: "y", Mode: 0o7777, UID: 1 << 20, Xattrs: map[string]string{"user.a": "b", "system.posix_acl_access": "\x02\x00\x00\x00"}}), []byte{})
	lim := oci.Limits{Archive: 4 << 20, Unpacked: 1 << 20, File: 1 << 19, Entries: 1000}
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		img, err := choose(t, Image{Layers: []Layer{{Tar: lower}, {Tar: upper}}}.OCI(), "app:latest")
		if err != nil {
			t.Skip() // a layer that happens to be compressed
		}
		tree, err := img.Unpack(t.Context(), &memory{}, lim)
		if err == nil {
			err = tree.WriteExt4(t.Context(), &memory{})
		}
		if err != nil && errdefs.ClassOf(err) == errdefs.Internal {
			t.Errorf("unclassified: %v", err)
		}
	})
}
