// Package coredisk writes a file system with one file to a disk. A stream brings the content of the file: the memory of a guest.
//
// It knows nothing of VMs, volumes and dumps.
package coredisk

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Disk is a raw disk.
type Disk interface {
	io.ReaderAt
	io.WriterAt
	Sync() error
}

// mark is at the start of each disk that Write has begun. There, ext4 keeps room for the boot loader of a PC. Tools that make another file
// system overwrite it.
var mark = []byte("memory dump of a VM by Cocoon\n")

// edge is how much of the start and of the end of a disk Check reads. What partitions a disk or is a file system has something there.
const edge = 1 << 20

// Check returns an error unless Write may overwrite the disk of size bytes: it is empty, or Write has begun to write it.
// Errors: FailedPrecondition.
func Check(d io.ReaderAt, size int64) error {
	first, last := make([]byte, min(edge, size)), make([]byte, min(edge, size))
	if _, err := d.ReadAt(first, 0); err != nil {
		return fmt.Errorf("read its start: %w", err)
	}
	if bytes.HasPrefix(first, mark) {
		return nil
	}
	if _, err := d.ReadAt(last, size-int64(len(last))); err != nil {
		return fmt.Errorf("read its end: %w", err)
	}
	if !sparse.IsZero(first) || !sparse.IsZero(last) {
		return errdefs.Preconditionf("it is neither empty nor has it an earlier dump, so what is on it stays; use a new volume")
	}
	return nil
}

// Write makes the disk of size bytes a file system with the file called name, which anybody may read and whose content is what fill writes.
// What was on the disk is lost. It is a file system only once everything is durable. Kernels mount it to read only.
// Errors: ResourceExhausted if the disk is too small, those of fill, and those of the disk.
func Write(d Disk, size int64, name string, at time.Time, fill func(io.Writer) error) error {
	t := &target{Disk: d, size: size}
	if err := t.begin(); err != nil {
		return err
	}
	w := ext4.NewWriter(t)
	body, err := w.Stream(fill)
	if err != nil {
		return err
	}
	if err := t.sync(); err != nil {
		return err
	}
	file := &ext4.Node{Inode: &ext4.Inode{Mode: ext4.TypeRegular | 0o444, ModTime: at, Content: body}}
	root := &ext4.Node{Inode: &ext4.Inode{Mode: ext4.TypeFolder | 0o755, ModTime: at}, Children: map[string]*ext4.Node{name: file}}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	if _, err := w.Finish(root, id); err != nil {
		return err
	}
	return t.sync()
}

// target is a disk as the writer of the file system wants it: what was never written reads as zeros, and it has an end.
type target struct {
	Disk
	size int64
	end  int64 // what is before was written
}

// begin marks the disk, and ends what file system it has.
func (t *target) begin() error {
	head := make([]byte, min(edge, t.size))
	copy(head, mark)
	if _, err := t.WriteAt(head, 0); err != nil {
		return err
	}
	return t.sync()
}

// sync makes what was written durable.
func (t *target) sync() error {
	if err := t.Sync(); err != nil {
		return fmt.Errorf("write it to the disk: %w", full(err))
	}
	return nil
}

// full turns the errors of storage that has no more room into ResourceExhausted.
func full(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return errdefs.Exhaustedf("the storage of the volume is full; free some room there (%w)", err)
	}
	return err
}

// WriteAt implements ext4.File.
func (t *target) WriteAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > t.size {
		return 0, errdefs.Exhaustedf("it has %d bytes, and the dump needs more; use a larger volume", t.size)
	}
	zeros := make([]byte, min(edge, max(off-t.end, 0)))
	for t.end < off {
		n, err := t.Disk.WriteAt(zeros[:min(int64(len(zeros)), off-t.end)], t.end)
		if err != nil {
			return 0, full(err)
		}
		t.end += int64(n)
	}
	n, err := t.Disk.WriteAt(p, off)
	t.end = max(t.end, off+int64(n))
	return n, full(err)
}

// Truncate implements ext4.File. A disk keeps its size.
func (t *target) Truncate(size int64) error {
	if size > t.size {
		return errdefs.Exhaustedf("it has %d bytes, and the dump needs %d; use a larger volume", t.size, size)
	}
	return nil
}
