package coredisk_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine/coredisk"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const size = 16 << 20

// disk returns a disk that is full of what somebody else has written.
func disk(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(bytes.Repeat([]byte{0xa5}, size)); err != nil {
		t.Fatal(err)
	}
	return f
}

func of(body []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		for len(body) > 0 { // as a pipe brings it
			n, err := w.Write(body[:min(len(body), 70_001)])
			if err != nil {
				return err
			}
			body = body[n:]
		}
		return nil
	}
}

// holds checks that the file system is sound and has the file.
func holds(t *testing.T, f *os.File, name string, want []byte) {
	t.Helper()
	if out, err := exec.Command("/usr/sbin/e2fsck", "-fn", f.Name()).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	got, err := exec.Command("/usr/sbin/debugfs", "-R", "cat /"+name, f.Name()).Output()
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the file has %d bytes, %v; want %d", len(got), err, len(want))
	}
}

func TestWrite(t *testing.T) {
	f := disk(t)
	for _, n := range []int{0, 1, 4096, 5_000_000, 3} { // each replaces the one before
		body := make([]byte, n)
		_, _ = rand.NewChaCha8([32]byte{}).Read(body)
		if err := coredisk.Write(f, size, "vm.dump", time.Unix(1, 0), of(body)); err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
		holds(t, f, "vm.dump", body)
		if err := coredisk.Check(f, size); err != nil {
			t.Errorf("it cannot be written again: %v", err)
		}
	}
	if info, err := f.Stat(); err != nil || info.Size() != size {
		t.Errorf("the disk has another size: %v, %v", info.Size(), err)
	}
}

// TestInterrupted fails in the middle. The disk is then no file system, and can be written again.
func TestInterrupted(t *testing.T) {
	f, body, gone := disk(t), make([]byte, 3<<20), errors.New("gone")
	if err := coredisk.Write(f, size, "old", time.Unix(1, 0), of(body)); err != nil {
		t.Fatal(err)
	}
	err := coredisk.Write(f, size, "new", time.Unix(1, 0), func(w io.Writer) error {
		return errors.Join(of(body)(w), gone)
	})
	if !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
	if out, err := exec.Command("/usr/sbin/dumpe2fs", "-h", f.Name()).CombinedOutput(); err == nil {
		t.Errorf("it is a file system:\n%s", out)
	}
	if err := coredisk.Check(f, size); err != nil {
		t.Errorf("it cannot be written again: %v", err)
	}
}

func TestTooSmall(t *testing.T) {
	f := disk(t)
	for _, n := range []int{size - (100 << 10), size, 2 * size} {
		if err := coredisk.Write(f, size, "vm.dump", time.Unix(1, 0), of(make([]byte, n))); !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Errorf("%d bytes: %v, want ResourceExhausted", n, err)
		}
	}
	if info, err := f.Stat(); err != nil || info.Size() != size {
		t.Errorf("the disk has another size: %v, %v", info.Size(), err)
	}
}

// fullDisk is a disk whose storage has room for some writes.
type fullDisk struct {
	*os.File
	room int
}

func (d *fullDisk) WriteAt(p []byte, off int64) (int, error) {
	if d.room--; d.room < 0 {
		return 0, &os.PathError{Op: "write", Err: syscall.ENOSPC}
	}
	return d.File.WriteAt(p, off)
}

// The storage of the node may be full before the disk is.
func TestNoRoom(t *testing.T) {
	for room := range 4 {
		d := &fullDisk{disk(t), room}
		if err := coredisk.Write(d, size, "vm.dump", time.Unix(1, 0), of(make([]byte, 3<<20))); !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Errorf("after %d writes: %v, want ResourceExhausted", room, err)
		}
	}
}

// TestCheck refuses disks that hold something else.
func TestCheck(t *testing.T) {
	f := disk(t)
	other := func(what string) {
		t.Helper()
		if err := coredisk.Check(f, size); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v, want FailedPrecondition", what, err)
		}
	}
	other("bytes of somebody else")
	empty := func() {
		t.Helper()
		if err := errors.Join(f.Truncate(0), f.Truncate(size)); err != nil {
			t.Fatal(err)
		}
	}
	empty()
	if err := coredisk.Check(f, size); err != nil {
		t.Errorf("an empty disk: %v", err)
	}
	if _, err := f.WriteAt([]byte("EFI PART"), size-512); err != nil { // the copy of a GPT
		t.Fatal(err)
	}
	other("something at the end")
	empty()
	if err := coredisk.Write(f, size, "vm.dump", time.Unix(1, 0), of(make([]byte, 9))); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("/usr/sbin/mkfs.ext4", "-qF", f.Name()).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	other("a dump that somebody has formatted")
}
