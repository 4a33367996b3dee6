package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/bundle"
	"cocoonstack.io/cocoon/internal/appliance/disk"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/appliance/update"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filesystem/signature"
)

// Files of the boot partition of the installer.
const (
	manifestFile  = "install/MANIFEST.json"
	signatureFile = "install/MANIFEST.sig"
)

const (
	loader       = "BOOTX64.EFI"
	loaderConfig = "grub.cfg"
	environment  = "grubenv"
	efiDir       = "EFI/BOOT"
	sealFile     = "firstboot.json"
	stateDir     = "cocoon" // of /perm
	complete     = 100      // percent
)

// writer installs on one disk.
type writer struct {
	Config
	disk     Disk
	request  Request
	seal     identity.Seal
	progress Progress

	manifest bundle.Manifest
	layout   disk.Layout
	group    disk.Group
	boot     string            // where the boot partition of the disk is mounted
	perm     string            // and /perm
	written  map[string]string // SHA-256 of the files on the boot partition and /perm, by their paths below WorkDir
	mounted  []string
}

// write installs.
func (i *Installer) write(ctx context.Context, d Disk, r Request, seal identity.Seal, progress Progress) (err error) {
	w := &writer{
		Config: i.cfg, disk: d, request: r, seal: seal, progress: progress, written: map[string]string{},
		boot: filepath.Join(i.cfg.WorkDir, "boot"), perm: filepath.Join(i.cfg.WorkDir, "perm"),
	}
	defer func() { err = errors.Join(err, w.release(context.WithoutCancel(ctx))) }()
	for _, step := range []struct {
		name, what string
		do         func(context.Context) error
	}{
		{Verify, "what will be installed", w.verify},
		{Partition, d.Path, w.partition},
		{WriteBoot, "boot loader, kernel and initramfs", w.writeBoot},
		{PatchBoot, "configuration of the boot loader", w.patchBoot},
		{SlotA, "the system", func(ctx context.Context) error { return w.slot(ctx, SlotA, 2) }},
		{SlotB, "the system", func(ctx context.Context) error { return w.slot(ctx, SlotB, 3) }},
		{InitLVM, "state and volumes", w.initLVM},
		{SealPhase, "identity and first operator", w.sealFirstBoot},
		{Sync, "read back what was written", w.sync},
	} {
		if err := ctx.Err(); err != nil {
			return err
		}
		progress(step.name, 0, step.what)
		i.cfg.Log.Info("phase", "op", step.name)
		if err := phase(step.name, step.do(ctx)); err != nil {
			return err
		}
		progress(step.name, complete, step.what)
	}
	return nil
}

// verify reads all that is going to be installed, and compares it with what was signed.
func (w *writer) verify(ctx context.Context) error {
	manifest, err := os.ReadFile(filepath.Join(w.BootDir, manifestFile))
	if err != nil {
		return fmt.Errorf("read the installer: %w", err)
	}
	signed, err := os.ReadFile(filepath.Join(w.BootDir, signatureFile))
	if err != nil {
		return fmt.Errorf("read the installer: %w", err)
	}
	if w.manifest, err = bundle.Verify(manifest, signed, w.Keys); err != nil {
		return err
	}
	if err := w.manifest.Check(bundle.System{Architecture: w.Arch, SlotSize: w.SlotMiB << 20}); err != nil {
		return err
	}
	if w.layout, err = disk.Plan(w.disk.Size, w.SlotMiB); err != nil {
		return err
	}
	for _, name := range []string{bundle.Kernel, bundle.Initramfs, bundle.Root} {
		if err := w.source(ctx, name, Verify, func(_ bundle.File, r io.Reader) error {
			_, err := io.Copy(io.Discard, r)
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// source gives use what the installer has of a file of the system. It is verified chunk by chunk.
func (w *writer) source(ctx context.Context, name, phase string, use func(bundle.File, io.Reader) error) error {
	file, _ := w.manifest.Find(name) // each manifest has it
	path := filepath.Join(w.BootDir, name)
	if name == bundle.Root {
		var err error
		if path, err = w.Root.Partition(w.SysBlock, w.Dev, w.Root.Number); err != nil {
			return err
		}
	}
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return fmt.Errorf("read the installer: %w", err)
	}
	defer f.Close()
	if err := use(file, &watched{ctx: ctx, r: file.Content(f), total: file.Size, tell: func(percent uint32) { w.progress(phase, percent, name) }}); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// partition clears what could be taken for data of before, the first sector first, and has the kernel know the partitions that will be. The disk has no table then.
func (w *writer) partition(context.Context) error {
	if err := w.unchanged(); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Clean(w.disk.Path), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	data := w.layout[disk.DataPartition-1]
	for _, part := range [][2]int64{
		{0, disk.SectorSize},
		{0, signature.Window},
		{w.disk.Size - signature.Window, signature.Window},
		{int64(data.Start) * disk.SectorSize, signature.Window},
		{(int64(data.Start)+int64(data.Size))*disk.SectorSize - signature.Window, signature.Window},
	} {
		if _, err := f.WriteAt(make([]byte, part[1]), part[0]); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return disk.Present(f, w.layout)
}

// unchanged refuses a disk that somebody uses, or that is another one by now.
func (w *writer) unchanged() error {
	f, err := os.OpenFile(filepath.Clean(w.disk.Path), os.O_RDWR|unix.O_EXCL, 0)
	if err != nil {
		if errors.Is(err, unix.EBUSY) {
			return errdefs.Preconditionf("%s is in use", w.disk.Path)
		}
		return err
	}
	defer f.Close()
	now, err := look(filepath.Join(w.SysBlock, w.disk.name), w.disk.Path)
	if err != nil {
		return err
	}
	if now.name = w.disk.name; now != w.disk {
		return errdefs.Preconditionf("%s changed while the installation began; start it again", w.disk.Path)
	}
	return nil
}

// device returns the device of a partition of the disk.
func (w *writer) device(number int) (string, error) {
	return disk.PartitionOf(w.SysBlock, w.Dev, w.disk.name, number)
}

// writeBoot makes the boot partition. The environment is first: its sectors follow each other there.
func (w *writer) writeBoot(ctx context.Context) error {
	device, err := w.device(disk.BootPartition)
	if err != nil {
		return err
	}
	if _, err := w.Run(ctx, "mkfs.vfat", "-F", "32", "-n", "CAPSULEBOOT", "-i", fmt.Sprintf("%08x", disk.Signature), device); err != nil {
		return err
	}
	if err := w.mount(device, w.boot, "vfat", unix.MS_NOEXEC); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(w.boot, efiDir), 0o755); err != nil {
		return err
	}
	id := w.manifest.ID()
	block, err := bootctl.NewBlock(id)
	if err != nil {
		return err
	}
	if err := w.file(filepath.Join(w.boot, efiDir, environment), 0o644, bytes.NewReader(block)); err != nil {
		return err
	}
	if err := w.copied(loader); err != nil {
		return err
	}
	for _, name := range []string{bundle.Kernel, bundle.Initramfs} {
		for _, slot := range []bootctl.Slot{bootctl.A, bootctl.B} {
			if err := w.source(ctx, name, WriteBoot, func(_ bundle.File, r io.Reader) error {
				return w.file(filepath.Join(w.boot, fmt.Sprintf("%s_%s-%s", name, slot, id)), 0o644, r)
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// patchBoot writes the configuration of the boot loader.
func (w *writer) patchBoot(context.Context) error { return w.copied(loaderConfig) }

// copied copies a file of the boot loader.
func (w *writer) copied(name string) error {
	f, err := os.Open(filepath.Join(w.LoaderDir, name))
	if err != nil {
		return fmt.Errorf("read the installer: %w", err)
	}
	defer f.Close()
	return w.file(filepath.Join(w.boot, efiDir, name), 0o644, f)
}

// file writes a new file, durably.
func (w *writer) file(path string, mode os.FileMode, r io.Reader) error {
	f, err := os.OpenFile(filepath.Clean(path), os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, sum), r)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	w.written[path] = hex.EncodeToString(sum.Sum(nil))
	return atomicfile.SyncDir(filepath.Dir(path))
}

// slot writes the root file system to a slot, and reads it back.
func (w *writer) slot(ctx context.Context, phase string, number int) error {
	device, err := w.device(number)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Clean(device), os.O_RDWR|unix.O_EXCL, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return w.source(ctx, bundle.Root, phase, func(file bundle.File, r io.Reader) error {
		return update.WriteSlot(f, strings.TrimPrefix(phase, "write_slot_"), file, r)
	})
}

// initLVM makes the volumes as the first start of a machine does.
func (w *writer) initLVM(ctx context.Context) error {
	device, err := w.device(disk.DataPartition)
	if err != nil {
		return err
	}
	w.group = disk.Group{Run: w.Run, Device: device, Log: w.Log}
	if err := w.group.Prepare(ctx, func() (string, error) { return device, nil }); err != nil {
		return err
	}
	if err := w.group.MakePool(ctx); err != nil {
		return err
	}
	return w.mount(disk.PermDevice, w.perm, "ext4", 0)
}

// sealFirstBoot writes who the machine is, and what keeps its address.
func (w *writer) sealFirstBoot(context.Context) error {
	state := filepath.Join(w.perm, stateDir)
	if err := os.MkdirAll(state, 0o750); err != nil {
		return err
	}
	for _, name := range []string{"dhcp-clientid", "dhcp-address"} {
		text, err := os.ReadFile(filepath.Join(w.StateDir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = w.file(filepath.Join(state, name), 0o600, bytes.NewReader(text))
		}
		if err != nil {
			return err
		}
	}
	if !w.request.Seal {
		return nil
	}
	text, err := w.seal.Encode()
	if err != nil {
		return err
	}
	return w.file(filepath.Join(w.perm, sealFile), 0o600, bytes.NewReader(text))
}

// sync reads back what the disk keeps, and makes the disk start.
func (w *writer) sync(ctx context.Context) error {
	if err := w.unmount(); err != nil {
		return err
	}
	boot, err := w.device(disk.BootPartition)
	if err != nil {
		return err
	}
	if err := w.mount(boot, w.boot, "vfat", unix.MS_RDONLY); err != nil {
		return err
	}
	if err := w.mount(disk.PermDevice, w.perm, "ext4", unix.MS_RDONLY); err != nil {
		return err
	}
	for path, want := range w.written {
		if err := same(path, want); err != nil {
			return err
		}
	}
	if err := w.release(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil { // from here on the disk starts
		return err
	}
	return w.commit()
}

// same compares a file with its checksum.
func same(path, want string) error {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return fmt.Errorf("read back: %w", err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return fmt.Errorf("read back %s: %w", path, err)
	}
	if hex.EncodeToString(sum.Sum(nil)) != want {
		return errdefs.DataLossf("the disk does not keep what was written to %s; replace it", filepath.Base(path))
	}
	return nil
}

// commit writes the first sector, without which nothing starts.
func (w *writer) commit() error {
	f, err := os.OpenFile(filepath.Clean(w.disk.Path), os.O_RDWR|unix.O_SYNC, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil { // all that is before it
		return err
	}
	record := w.layout.Record(disk.Signature)
	if _, err := f.WriteAt(record[:], 0); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.BLKFLSBUF, 0); err != nil && !errors.Is(err, unix.ENOTTY) {
		return fmt.Errorf("drop the buffers of %s: %w", w.disk.Path, err)
	}
	var back [disk.SectorSize]byte
	if _, err := f.ReadAt(back[:], 0); err != nil {
		return fmt.Errorf("read back: %w", err)
	}
	if back != record {
		return errdefs.DataLossf("the disk does not keep its first sector; replace it")
	}
	return nil
}

func (w *writer) mount(device, dir, kind string, flags uintptr) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	options := ""
	if kind == "vfat" {
		options = "fmask=0077,dmask=0077"
	}
	if err := unix.Mount(device, dir, kind, flags|unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID, options); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	w.mounted = append(w.mounted, dir)
	return nil
}

func (w *writer) unmount() error {
	for len(w.mounted) > 0 {
		last := len(w.mounted) - 1
		if err := unix.Unmount(w.mounted[last], 0); err != nil {
			return fmt.Errorf("unmount %s: %w", w.mounted[last], err)
		}
		w.mounted = w.mounted[:last]
	}
	return nil
}

// release lets go of the disk.
func (w *writer) release(ctx context.Context) error {
	err := w.unmount()
	if w.group.Device == "" || err != nil {
		return err
	}
	if err := w.group.Deactivate(ctx); err != nil {
		return err
	}
	w.group.Device = ""
	return nil
}

// watched is a reader that ends with a context, and tells how much was read.
type watched struct {
	ctx         context.Context //nolint:containedctx // of the call
	r           io.Reader
	done, total int64
	told        uint32
	tell        func(percent uint32)
}

func (p *watched) Read(b []byte) (int, error) {
	if err := p.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := p.r.Read(b)
	p.done += int64(n)
	if percent := uint32(p.done * complete / max(p.total, 1)); percent > p.told {
		p.told = percent
		p.tell(percent)
	}
	return n, err
}
