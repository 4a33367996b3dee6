package local

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// spool is a scratch file in a temporary folder: written once from its start, then read at any offset.
type spool struct {
	f *os.File
	w *bufio.Writer
}

func newSpool(path string) (*spool, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a scratch file: %w", err)
	}
	return &spool{f: f, w: bufio.NewWriterSize(f, 1<<20)}, nil
}

func (s *spool) Write(p []byte) (int, error)             { return s.w.Write(p) }
func (s *spool) ReadFrom(r io.Reader) (int64, error)     { return s.w.ReadFrom(r) }
func (s *spool) ReadAt(p []byte, off int64) (int, error) { return s.f.ReadAt(p, off) }

// drop frees the file's space now, before the temporary folder is removed.
func (s *spool) drop() error { return errors.Join(s.f.Truncate(0), s.f.Close()) }

// readArchive reads a container image to its end and chooses the image to store.
func (s *Store) readArchive(ctx context.Context, work *workdir, name string, in io.Reader, lim oci.Limits) (builder, error) {
	blobs, err := newSpool(work.join("archive"))
	if err != nil {
		return builder{}, err
	}
	a, err := oci.Read(ctx, in, blobs, lim)
	if err != nil {
		return builder{}, errors.Join(err, blobs.f.Close())
	}
	if err := blobs.w.Flush(); err != nil {
		return builder{}, errors.Join(err, blobs.f.Close())
	}
	img, err := a.Image(name, s.cfg.Arch)
	if err != nil {
		return builder{}, errors.Join(err, blobs.f.Close())
	}
	open := func(ctx context.Context, n int) (io.ReadCloser, error) {
		return io.NopCloser(img.Layer(n)), ctx.Err()
	}
	return builder{hex: strings.TrimPrefix(img.ID, "sha256:"), build: func(ctx context.Context, dir string) (record, error) {
		rec, err := s.buildImage(ctx, work, img, open, dir, lim)
		return rec, errors.Join(err, blobs.drop())
	}}, nil
}

// readDisk reads a disk image and checks that it is complete and has no backing file.
func (s *Store) readDisk(work *workdir, head []byte, in io.Reader, room int64) (builder, error) {
	format, err := disk.Recognise(head)
	if err != nil {
		return builder{}, err
	}
	rec := record{Type: vm.ImageDisk, File: rawFile, Format: format, Arch: s.cfg.Arch}
	var q qcow2.Header
	switch format {
	case vm.DiskRaw:
	case vm.DiskQCOW2:
		rec.File = qcow2File
		if q, err = qcow2.Parse(head); err != nil { // refuse it before it uses any disk space
			return builder{}, err
		}
		if rec.VirtualSize = q.VirtualSize; rec.VirtualSize > s.cfg.Disk {
			return builder{}, s.tooLarge(rec.VirtualSize)
		}
	default:
		rec.File = sourceFile
	}
	sum := sha256.New()
	path := work.join(rec.File)
	size, err := writeSynced(path, func(f *os.File) error {
		n, err := copySparse(f, io.TeeReader(in, sum), s.cfg.Disk, room)
		switch {
		case err != nil:
			return err
		case format == vm.DiskQCOW2:
			return q.Check(f, n)
		case format == vm.DiskRaw:
			return disk.CheckRaw(head, n)
		}
		virtual, err := disk.Check(format, f, n)
		if err == nil && virtual > s.cfg.Disk {
			err = s.tooLarge(virtual)
		}
		return err
	})
	if err != nil {
		return builder{}, err
	}
	hex := hex.EncodeToString(sum.Sum(nil))
	if rec.File == sourceFile {
		return builder{hex: hex, phase: image.PhaseConvert, build: func(ctx context.Context, dir string) (record, error) {
			return s.convert(ctx, work, rec, path, filepath.Join(dir, qcow2File))
		}}, nil
	}
	if format == vm.DiskRaw {
		rec.VirtualSize = size
	}
	rec.VirtualSize = roundUp(rec.VirtualSize, qcow2.SectorSize)
	return builder{hex: hex, build: func(_ context.Context, dir string) (record, error) {
		return rec, os.Rename(path, filepath.Join(dir, rec.File))
	}}, nil
}

func (s *Store) tooLarge(virtual int64) error {
	return errdefs.Exhaustedf("the disk image claims a size of %s, and the limit is %s", human(virtual), human(s.cfg.Disk))
}

// convert converts a disk of another format to qcow2. The result is checked like any untrusted disk.
func (s *Store) convert(ctx context.Context, work *workdir, rec record, from, to string) (_ record, err error) {
	in, err := os.Open(from)
	if err != nil {
		return record{}, fmt.Errorf("convert the disk: %w", err)
	}
	defer in.Close()
	said, err := os.OpenFile(work.join("said"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return record{}, fmt.Errorf("convert the disk: %w", err)
	}
	defer said.Close()
	room, err := s.room()
	if err != nil {
		return record{}, err
	}
	_, err = writeSynced(to, func(f *os.File) error {
		if err := (disk.Converter{Path: s.cfg.QemuImg}).Convert(ctx, rec.Format, in, f, said, room); err != nil {
			if left, rerr := s.room(); rerr == nil && left < mkfsRoom && ctx.Err() == nil {
				return errdefs.Exhaustedf("the disk of the image store is full: no room to convert the disk; `cocoon image rm` frees some")
			}
			return err
		}
		info, err := f.Stat()
		if err != nil {
			return fmt.Errorf("convert the disk: %w", err)
		}
		head := make([]byte, min(disk.HeadSize, info.Size()))
		if _, err := f.ReadAt(head, 0); err != nil {
			return fmt.Errorf("convert the disk: %w", err)
		}
		q, err := qcow2.Parse(head)
		if err != nil {
			return err
		}
		if rec.VirtualSize = q.VirtualSize; rec.VirtualSize > s.cfg.Disk {
			return s.tooLarge(rec.VirtualSize)
		}
		return q.Check(f, info.Size())
	})
	rec.File, rec.Format, rec.VirtualSize = qcow2File, vm.DiskQCOW2, roundUp(rec.VirtualSize, qcow2.SectorSize)
	return rec, errors.Join(err, os.Remove(from))
}

// writeSynced creates a file with the content that fill writes, syncs it, and returns its length.
func writeSynced(path string, fill func(*os.File) error) (size int64, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return 0, fmt.Errorf("write image: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := fill(f); err != nil {
		return 0, err
	}
	if err := f.Sync(); err != nil {
		return 0, fmt.Errorf("write image: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("write image: %w", err)
	}
	return info.Size(), nil
}

// copySparse copies r to f, leaves holes where r has zeros, and returns the length: at most limit bytes, of which at most
// room may use disk space.
func copySparse(f *os.File, r io.Reader, limit, room int64) (int64, error) {
	const chunk = 64 << 10
	buf := make([]byte, chunk)
	var size int64
	for {
		n, err := io.ReadFull(r, buf)
		if size+int64(n) > limit {
			return 0, errdefs.Exhaustedf("the disk image is larger than the limit of %d bytes", limit)
		}
		if n > 0 && !sparse.IsZero(buf[:n]) {
			if room -= int64(n); room < 0 {
				return 0, errdefs.Exhaustedf("the disk of the image store has too little free space for the disk image; free some with `cocoon image rm`")
			}
			if _, err := f.WriteAt(buf[:n], size); err != nil {
				return 0, fmt.Errorf("write image: %w", err)
			}
		}
		size += int64(n)
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) && n < chunk && ended(r):
			if err := f.Truncate(size); err != nil {
				return 0, fmt.Errorf("write image: %w", err)
			}
			return size, nil
		case err != nil:
			return 0, badCompression(err)
		}
	}
}

// ended tells the end of the input, which ReadFull reports as an unexpected EOF, from truncated compressed input.
func ended(r io.Reader) bool {
	n, err := r.Read(make([]byte, 1))
	return n == 0 && errors.Is(err, io.EOF)
}
