package update

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/bundle"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// counted reads what a client has announced, and no more.
type counted struct {
	r    io.Reader
	left int64
	sum  hash.Hash
}

func newCounted(r io.Reader, size uint64) *counted {
	return &counted{r: r, left: int64(min(size, 1<<62)), sum: sha256.New()}
}

func (c *counted) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	c.sum.Write(p[:n])
	if errors.Is(err, io.EOF) && c.left > 0 {
		err = errdefs.DataLossf("the update ends %d bytes too early; push it again", c.left)
	}
	return n, err
}

// verify reads the rest, and compares all of it with the checksum that the client has announced.
func (c *counted) verify(sum string) error {
	if _, err := io.Copy(io.Discard, c); err != nil {
		return err
	}
	if got := hex.EncodeToString(c.sum.Sum(nil)); !strings.EqualFold(got, sum) {
		return errdefs.New(errdefs.InvalidArgument, "the update has the SHA-256 %s, and %.64s was announced; push it again", got, sum)
	}
	return nil
}

// writer writes a bundle to a slot.
type writer struct {
	cfg  Config
	slot bootctl.Slot
	id   string

	device *os.File
	size   int64 // bytes of the slot
}

func (w *writer) open() error {
	path, err := w.cfg.Slot(w.slot)
	if err != nil {
		return err
	}
	if w.device, err = os.OpenFile(filepath.Clean(path), os.O_RDWR|unix.O_EXCL, 0); err != nil {
		return fmt.Errorf("open slot %s: %w", w.slot, err)
	}
	if w.size, err = w.device.Seek(0, io.SeekEnd); err != nil {
		w.close()
		return fmt.Errorf("measure slot %s: %w", w.slot, err)
	}
	return nil
}

func (w *writer) close() {
	if w.device != nil {
		_ = w.device.Close() // what counts was synced
	}
}

// write writes all files of a bundle, durably, and reads the slot back.
func (w *writer) write(ctx context.Context, b *bundle.Reader) error {
	if err := w.clean(); err != nil {
		return err
	}
	for {
		f, r, err := b.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		r = stoppable{ctx, r}
		switch f.Name {
		case bundle.Kernel:
			err = w.bootFile("vmlinuz", r)
		case bundle.Initramfs:
			err = w.bootFile("initramfs", r)
		case bundle.Root:
			err = WriteSlot(w.device, string(w.slot), f, r)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
}

// clean removes the boot files of the slot, which starts nothing any more.
func (w *writer) clean() error {
	all, err := os.ReadDir(w.cfg.BootDir)
	if err != nil {
		return err
	}
	for _, f := range all {
		for _, kind := range []string{"vmlinuz_", "initramfs_"} {
			if strings.HasPrefix(f.Name(), kind+string(w.slot)) {
				if err := os.Remove(filepath.Join(w.cfg.BootDir, f.Name())); err != nil {
					return err
				}
			}
		}
	}
	return atomicfile.SyncDir(w.cfg.BootDir)
}

// bootFile writes a new file to the boot partition. No file there is ever written again.
func (w *writer) bootFile(kind string, r io.Reader) (err error) {
	path := filepath.Join(w.cfg.BootDir, fmt.Sprintf("%s_%s-%s", kind, w.slot, w.id))
	f, err := os.OpenFile(filepath.Clean(path), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		if errors.Is(err, unix.ENOSPC) {
			return errdefs.New(errdefs.ResourceExhausted, "the boot partition is full: %w", err)
		}
		return err
	}
	return atomicfile.SyncDir(w.cfg.BootDir)
}

// WriteSlot writes the root file system f, which r has, to the open device of a slot, and compares what the disk keeps. Errors: DataLoss.
func WriteSlot(device *os.File, slot string, f bundle.File, r io.Reader) error {
	if _, err := device.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{device}, r, make([]byte, 1<<20)); err != nil {
		return err
	}
	if err := device.Sync(); err != nil {
		return err
	}
	// What is read back comes from the disk, and not from memory. A file, as of a test, has no such buffers.
	if err := unix.IoctlSetInt(int(device.Fd()), unix.BLKFLSBUF, 0); err != nil && !errors.Is(err, unix.ENOTTY) {
		return fmt.Errorf("drop the buffers of the slot: %w", err)
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(device, 0, f.Size)); err != nil {
		return fmt.Errorf("read it back: %w", err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != f.SHA256 {
		return errdefs.DataLossf("the disk does not keep what was written to slot %s: it has the SHA-256 %s, and the update %s; replace the disk", slot, got, f.SHA256)
	}
	return nil
}

// stoppable is a reader that ends with a context.
type stoppable struct {
	ctx context.Context //nolint:containedctx // of the call
	r   io.Reader
}

func (s stoppable) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		return 0, err
	}
	return s.r.Read(p)
}
