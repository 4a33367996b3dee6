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

// Extents returns where f has data, up to size bytes. A file system that does not tell gets one extent. It moves the
// offset of f, which callers that share f must not rely on.
func Extents(f *os.File, size int64) ([]Extent, error) {
	var m []Extent
	for at := int64(0); at < size; {
		start, err := f.Seek(at, unix.SEEK_DATA)
		switch {
		case errors.Is(err, unix.ENXIO): // nothing but a hole up to the end
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
		if end <= start { // it shrinks while we look
			return m, nil
		}
		m = append(m, Extent{start, end - start})
		at = end
	}
	return m, nil
}

// Occupied returns how many bytes a file takes on its disk.
func Occupied(info fs.FileInfo) int64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return info.Size()
}

// Clone makes dst, which is empty, share the content of src, where the file system can: both are on it, and it is xfs,
// btrfs or the like.
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

const copyBuffer = 1 << 20

// Copy makes dst, which is empty, a copy of src: by Clone where that can be done, else by copying its data. Blocks of
// zeros become holes.
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

// CopyFile makes path, which must not be there, a durable copy of the file src, with mode 0600. It is there wholly or not
// at all only in what callers see of success; callers that may be killed put it where nobody looks yet.
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

// LinkFile makes path, which must not be there, the same file as src by a hard link or, on another file system, or where
// the kernel forbids the link or the file has all it may have, a copy of it.
func LinkFile(ctx context.Context, path, src string) error {
	err := os.Link(src, path)
	for _, no := range []error{unix.EXDEV, unix.EMLINK, unix.EPERM, unix.EOPNOTSUPP} {
		if errors.Is(err, no) {
			return CopyFile(ctx, path, src)
		}
	}
	return err
}

// Flush asks the kernel to begin writing n bytes of f at off to the disk, so that a later Sync has less to wait for. It
// does not wait, and whether it helps is nobody's failure.
func Flush(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}
