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
			err = w.bootFile("vmlinuz", f, r)
		case bundle.Initramfs:
			err = w.bootFile("initramfs", f, r)
		case bundle.Root:
			err = WriteSlot(w.device, string(w.slot), f, r)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
}

// room refuses an update whose boot files do not fit on the boot partition, together with those of the good slot. Those that write replaces make room.
func (w *writer) room(m bundle.Manifest) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(w.cfg.BootDir, &fs); err != nil {
		return fmt.Errorf("measure the boot partition: %w", err)
	}
	free := int64(fs.Bavail) * fs.Bsize //nolint:gosec // bytes of a disk
	all, err := os.ReadDir(w.cfg.BootDir)
	if err != nil {
		return err
	}
	for _, f := range all {
		if slot, _ := ofSlot(f.Name()); slot != w.slot {
			continue
		}
		if fi, err := f.Info(); err == nil {
			free += fi.Size()
		}
	}
	need := int64(bootSlack)
	for _, name := range []string{bundle.Kernel, bundle.Initramfs} {
		f, _ := m.Find(name)
		need += f.Size
	}
	if need > free {
		return errdefs.Exhaustedf("the boot files of version %s need %d bytes, and the boot partition has %d free; remove files of others from it", m.Version, need, free)
	}
	return nil
}

// bootSlack is for the clusters and folders of the boot partition, in bytes.
const bootSlack = 1 << 20

// ofSlot returns the slot and the id in the name of a boot file; None if it is none.
func ofSlot(name string) (bootctl.Slot, string) {
	for _, kind := range []string{"vmlinuz_", "initramfs_"} {
		if rest, ok := strings.CutPrefix(name, kind); ok {
			if slot, id, ok := strings.Cut(rest, "-"); ok && (slot == string(bootctl.A) || slot == string(bootctl.B)) {
				return bootctl.Slot(slot), id
			}
		}
	}
	return bootctl.None, ""
}

// removeLeftovers removes boot files that the boot environment does not name: those of an update that was interrupted, whole or not. What is no boot file of a slot is
// left alone.
func removeLeftovers(dir string, named bootctl.Files) error {
	all, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	removed := false
	for _, f := range all {
		slot, id := ofSlot(f.Name())
		if slot == bootctl.None || !f.Type().IsRegular() || id == named.Of(slot) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, f.Name())); err != nil {
			return err
		}
		removed = true
	}
	if !removed {
		return nil
	}
	return atomicfile.SyncDir(dir)
}

// clean removes the boot files of the slot, which starts nothing any more.
func (w *writer) clean() error {
	all, err := os.ReadDir(w.cfg.BootDir)
	if err != nil {
		return err
	}
	for _, f := range all {
		if slot, _ := ofSlot(f.Name()); slot == w.slot {
			if err := os.Remove(filepath.Join(w.cfg.BootDir, f.Name())); err != nil {
				return err
			}
		}
	}
	return atomicfile.SyncDir(w.cfg.BootDir)
}

// bootFile writes a new file to the boot partition, and compares what the disk keeps. No file there is ever written again.
func (w *writer) bootFile(kind string, want bundle.File, r io.Reader) (err error) {
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
	if err := atomicfile.SyncDir(w.cfg.BootDir); err != nil {
		return err
	}
	return w.reread(path, want)
}

// reread compares a file with what was signed. It comes from the disk, and not from memory, as far as the kernel drops that when it is asked to.
func (w *writer) reread(path string, want bundle.File) error {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("drop the buffers of %s: %w", path, err)
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return fmt.Errorf("read it back: %w", err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want.SHA256 {
		return errdefs.DataLossf("the disk does not keep what was written to %s: it has the SHA-256 %s, and the update %s; replace the disk", path, got, want.SHA256)
	}
	return nil
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
