package sparse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Extents returns where f has data, up to size bytes. If the file system does not tell, it returns one extent. It moves
// the offset of f; callers that share f must not rely on that offset.
func Extents(f *os.File, size int64) ([]Extent, error) {
	var m []Extent
	for at := int64(0); at < size; {
		start, err := f.Seek(at, unix.SEEK_DATA)
		switch {
		case errors.Is(err, unix.ENXIO): // only a hole up to the end
			return m, nil
		case errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP):
			return append(m, Extent{at, size - at}), nil
		case err != nil:
			return nil, fmt.Errorf("look for the data of %s: %w", f.Name(), err)
		case start >= size:
			return m, nil
		}
		end, err := f.Seek(start, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("look for the holes of %s: %w", f.Name(), err)
		}
		end = min(end, size)
		if end <= start { // the file shrinks during the scan
			return m, nil
		}
		m = append(m, Extent{start, end - start})
		at = end
	}
	return m, nil
}

// Occupied returns how many bytes a file uses on its disk.
func Occupied(info fs.FileInfo) int64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return info.Size()
}

// Clone makes dst, which is empty, share the content of src. It needs support of the file system: both must be on the same
// xfs, btrfs or similar.
// Errors: Unsupported when it cannot.
func Clone(dst, src *os.File) error {
	err := unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
	for _, no := range []error{unix.EOPNOTSUPP, unix.ENOTTY, unix.EXDEV, unix.EINVAL, unix.ENOSYS, unix.EPERM} {
		if errors.Is(err, no) {
			return errdefs.Unsupportedf("this file system does not share the content of files: %w", err)
		}
	}
	return err
}

// CanClone tests with files that have no names whether a file in the folder to can share the content of one in the folder from.
// Errors: Unsupported when it cannot. errors.ErrUnsupported, but not Unsupported, when the file system has no files without names, so
// that this is not known.
func CanClone(to, from string) error {
	src, err := unnamed(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := unnamed(to)
	if err != nil {
		return err
	}
	defer dst.Close()
	if _, err := src.Write(make([]byte, Block)); err != nil {
		return err
	}
	return Clone(dst, src)
}

// unnamed makes a file in dir that ends with its last user.
func unnamed(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if errors.Is(err, unix.EISDIR) {
		return nil, fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	}
	return f, err
}

const copyBuffer = 1 << 20

// Copy makes dst, which is empty, a copy of src: by Clone where possible, else by copying the data. Blocks of zeros become
// holes.
func Copy(ctx context.Context, dst, src *os.File) error {
	f, err := NewFile(src)
	if err != nil {
		return err
	}
	if err := Clone(dst, src); !errdefs.Is(err, errdefs.Unsupported) {
		return err
	}
	return CopyData(ctx, dst, f)
}

// CopyData makes dst, which is empty, a copy of src by copying its data. Blocks of zeros become holes.
func CopyData(ctx context.Context, dst *os.File, src *File) error {
	m, err := src.Extents()
	if err != nil {
		return err
	}
	if err := dst.Truncate(src.Size()); err != nil {
		return err
	}
	buf := make([]byte, copyBuffer)
	for _, e := range m {
		for e.Length > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			n, err := src.ReadAt(buf[:min(e.Length, copyBuffer)], e.Offset)
			if n == 0 && err != nil {
				if errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF
				}
				return fmt.Errorf("read %s at byte %d: %w", src.Name(), e.Offset, err)
			}
			if err := WriteAt(dst, buf[:n], e.Offset); err != nil {
				return err
			}
			e.Offset, e.Length = e.Offset+int64(n), e.Length-int64(n)
		}
	}
	return nil
}

// CopyFile makes path, which must not exist, a durable copy of the file src, with mode 0600. On an error it leaves
// nothing. A caller that is killed can leave a partial file, so it must copy to a path that nobody reads yet.
func CopyFile(ctx context.Context, path, src string) (err error) {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, out.Close()); err != nil {
			_ = os.Remove(path)
		}
	}()
	if err := Copy(ctx, out, in); err != nil {
		return fmt.Errorf("copy %s: %w", src, err)
	}
	return out.Sync()
}

// LinkFile makes path, which must not exist, a hard link to the file src. It copies the file if the two are on different
// file systems, the kernel forbids the link or the file has its maximum of links.
func LinkFile(ctx context.Context, path, src string) error {
	err := os.Link(src, path)
	for _, no := range []error{unix.EXDEV, unix.EMLINK, unix.EPERM, unix.EOPNOTSUPP} {
		if errors.Is(err, no) {
			return CopyFile(ctx, path, src)
		}
	}
	return err
}

// Flush asks the kernel to start writing n bytes of f at off to the disk, so that a later Sync takes less time. It does
// not wait, and ignores errors: it is only an optimization.
func Flush(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}
