// Package hostmount mounts volumes on the host, for the containers of the node. The file system is made, checked and grown by the rules of
// guests (package filesystem), so that a volume moves between a container and a VM as it is.
//
// It attaches no volume: the caller has it attached in the store, under an id of its own, for as long as it is mounted. It keeps no records:
// what is mounted is what the kernel says, so a process may be killed in each method. It never touches a mount or a loop device of others.
package hostmount

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filesystem"
	"cocoonstack.io/cocoon/internal/filesystem/signature"
	"cocoonstack.io/cocoon/internal/keylock"
	"cocoonstack.io/cocoon/internal/vm"
)

// Config configures a Mounter.
type Config struct {
	Dir string       // absolute; the folder of all mounts, made when missing, mode 0700. It becomes a mount of its own, whose unmounts reach every copy of it
	Log *slog.Logger // nil discards
}

// Mounter mounts volumes. It is safe for concurrent use.
type Mounter struct {
	dir   string
	log   *slog.Logger
	disks keylock.Locks[string] // by path
	dirs  keylock.Locks[string]
}

// Options say how a volume is mounted.
type Options struct {
	ReadOnly bool   // also if the disk can be written to; a disk that cannot is mounted read-only in any case
	FSType   string // of a new file system: "xfs", or else ext4
	Group    *int64 // of the root folder of a new file system; nil: root's
}

// Mount is a volume that is mounted.
type Mount struct {
	Dir      string // where
	Path     string // of the disk: a file or a device. " (deleted)" follows the path of a file that is gone
	Device   string // the loop device
	Type     string // of the file system
	ReadOnly bool   // also after an error of the file system
}

// New checks the configuration. It touches nothing.
func New(cfg Config) (*Mounter, error) {
	if !filepath.IsAbs(cfg.Dir) || filepath.Clean(cfg.Dir) != cfg.Dir || cfg.Dir == "/" {
		return nil, errdefs.Invalidf("the folder of mounted volumes %q must be an absolute path without empty, \".\" and \"..\" parts", cfg.Dir)
	}
	log := cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Mounter{dir: cfg.Dir, log: log}, nil
}

// Mount mounts the raw disk of a volume at dir, a folder below Config.Dir, which it makes. A blank disk gets a file system; one with errors is
// repaired; one that is smaller than the disk grows. Device files there are closed, and programs get no rights of their owners (nodev, nosuid).
// Idempotent.
// Errors: InvalidArgument for another dir or format, FailedPrecondition if dir has another mount, if something uses the disk, or if it has
// something else than a file system, DataLoss if that is damaged, Unavailable while an earlier check of the disk still runs.
func (m *Mounter) Mount(ctx context.Context, disk vm.Disk, dir string, o Options) (Mount, error) {
	got, err := m.mount(ctx, disk, dir, o)
	if err != nil {
		return Mount{}, fmt.Errorf("mount %s at %s: %w", disk.Path, dir, err)
	}
	return got, nil
}

func (m *Mounter) mount(ctx context.Context, disk vm.Disk, dir string, o Options) (got Mount, err error) {
	if err := mountable(disk); err != nil {
		return got, err
	}
	if err := m.inside(dir); err != nil {
		return got, err
	}
	unlock, err := m.disks.Lock(ctx, disk.Path)
	if err != nil {
		return got, err
	}
	defer unlock()
	unlockDir, err := m.dirs.Lock(ctx, dir)
	if err != nil {
		return got, err
	}
	defer unlockDir()
	b, err := openBacking(disk)
	if err != nil {
		return got, err
	}
	defer b.Close()
	there, err := m.settle(b, dir)
	if err != nil {
		return got, err
	}
	if there == nil {
		return m.anew(ctx, b, dir, o)
	}
	readOnly := o.ReadOnly || disk.ReadOnly
	if there.mountedReadOnly != readOnly {
		return got, errdefs.Preconditionf("it is mounted there in another way (read-only: %v); unmount it first", there.mountedReadOnly)
	}
	return there.Mount, m.extend(there.Mount)
}

// mountable refuses disks that the host's kernel cannot mount, or must not.
func mountable(d vm.Disk) error {
	switch {
	case d.Format != vm.DiskRaw || d.Backing != nil:
		return errdefs.Invalidf("its format is %s, and the host mounts only raw disks; convert it, or use it in a VM", d.Format)
	case d.Shared:
		return errdefs.Invalidf("several machines share it, and a file system can be mounted by one only; attach it for one, or to read only")
	}
	return nil
}

// inside makes sure that dir is below the folder of all mounts, where only the node makes folders.
func (m *Mounter) inside(dir string) error {
	if filepath.Clean(dir) != dir || !strings.HasPrefix(dir, m.dir+"/") {
		return errdefs.Invalidf("it is not a folder below %s", m.dir)
	}
	return nil
}

// settle returns the mount of b at dir. If there is none, it removes what a killed process has left of an attempt, claims b, and returns nil.
func (m *Mounter) settle(b *backing, dir string) (*mounted, error) {
	at, err := mountAt(dir)
	if err != nil {
		return nil, err
	}
	all, err := loops()
	if err != nil {
		return nil, err
	}
	mark := markOf(dir)
	for _, l := range all {
		switch same := b.behind(l); {
		case l.mark == mark && at != nil && at.device == l.device:
			if !same {
				return nil, errdefs.Preconditionf("another disk is mounted there (%s); unmount it first", l.file)
			}
			return &mounted{Mount: mountOf(*at, l), mountedReadOnly: at.readOnly}, nil
		case l.mark == mark:
			m.log.Info("loop device of an interrupted mount released", "path", l.path, "file", l.file)
			if err := l.release(); err != nil {
				return nil, err
			}
		case same && (!l.readOnly || !b.readOnly):
			return nil, errdefs.Preconditionf("the host uses it already, by %s%s; end that first", l.path, l.owner())
		}
	}
	if at != nil {
		return nil, errdefs.Preconditionf("something else is mounted there (%s); use another folder", at.kind)
	}
	return nil, b.claim()
}

// mounted is a mount that Mount has found.
type mounted struct {
	Mount
	mountedReadOnly bool // as it was asked for
}

// anew mounts b at dir. The loop device goes away with its last user: with this process before it is mounted, and with the mount after that.
func (m *Mounter) anew(ctx context.Context, b *backing, dir string, o Options) (got Mount, err error) {
	if err := m.own(ctx); err != nil {
		return got, err
	}
	at, err := m.folder(dir)
	if err != nil {
		return got, err
	}
	defer at.Close()
	loop, err := b.loop(markOf(dir))
	if err != nil {
		return got, err
	}
	defer func() { err = errors.Join(err, loop.Close()) }()
	kind, options, err := m.prepare(ctx, loop.Name(), b, o)
	if err != nil {
		return got, err
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
	if b.readOnly || o.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	if err := unix.Mount(loop.Name(), fmt.Sprintf("/proc/self/fd/%d", at.Fd()), string(kind), flags, options); err != nil {
		return got, filesystem.MountError(kind, err)
	}
	got = Mount{Dir: dir, Path: b.Name(), Device: loop.Name(), Type: string(kind), ReadOnly: b.readOnly || o.ReadOnly}
	if err := m.extend(got); err != nil {
		return Mount{}, errors.Join(err, unix.Unmount(dir, unix.UMOUNT_NOFOLLOW))
	}
	m.log.Info("volume mounted", "path", got.Path, "dir", dir, "device", got.Device, "type", got.Type)
	return got, nil
}

// prepare makes the file system of a loop device ready. It returns with the device closed: some kernels mount none that a program may write to.
func (m *Mounter) prepare(ctx context.Context, dev string, b *backing, o Options) (kind signature.Kind, options string, err error) {
	disk, err := filesystem.Open(dev, b.readOnly)
	if err != nil {
		return "", "", err
	}
	kind, options, err = filesystem.Prepare(ctx, disk, m.rules(b, o))
	return kind, options, errors.Join(err, disk.Close())
}

// folder makes dir and opens it. None of its parts is a link.
func (m *Mounter) folder(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := noLink(dir); err != nil {
		return nil, err
	}
	return os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// extend makes the file system of a mount use all of its disk.
func (m *Mounter) extend(at Mount) error {
	if at.ReadOnly {
		return nil
	}
	loop, err := os.Open(at.Device)
	if err != nil {
		return err
	}
	defer loop.Close()
	if err := unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("make %s look at the size of its disk: %w", at.Device, err)
	}
	root, err := os.OpenFile(at.Dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer root.Close()
	err = filesystem.Grow(root, at.Device)
	if errors.Is(err, unix.EPERM) {
		return errdefs.New(errdefs.FailedPrecondition, "a mounted ext4 file system grows only for a daemon with CAP_SYS_RESOURCE, and after no error was found on it: %w", err)
	}
	return err
}

// Grow makes the file system that is mounted at dir use all of its disk, which the store has grown. Idempotent.
// Errors: NotFound if no volume is mounted there.
func (m *Mounter) Grow(ctx context.Context, dir string) error {
	err := m.grow(ctx, dir)
	if err != nil {
		return fmt.Errorf("grow the file system at %s: %w", dir, err)
	}
	return nil
}

func (m *Mounter) grow(ctx context.Context, dir string) error {
	if err := m.inside(dir); err != nil {
		return err
	}
	unlock, err := m.dirs.Lock(ctx, dir)
	if err != nil {
		return err
	}
	defer unlock()
	all, err := m.list(func(at string) bool { return at == dir })
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return errdefs.NotFoundf("no volume is mounted there")
	}
	return m.extend(all[len(all)-1])
}

// List returns the volumes that are mounted at dir or below it, in the order in which they were mounted.
func (m *Mounter) List(dir string) ([]Mount, error) {
	all, err := m.list(func(at string) bool { return at == dir || strings.HasPrefix(at, strings.TrimSuffix(dir, "/")+"/") })
	if err != nil {
		return nil, fmt.Errorf("list volumes mounted at %s: %w", dir, err)
	}
	return all, nil
}

func (m *Mounter) list(which func(dir string) bool) (out []Mount, err error) {
	lines, err := mountLines()
	if err != nil {
		return nil, err
	}
	var all []loopDevice
	for _, line := range lines {
		if !which(line.at) || m.inside(line.at) != nil {
			continue
		}
		if all == nil {
			if all, err = loops(); err != nil {
				return nil, err
			}
		}
		for _, l := range all {
			if l.device == line.device && l.mark == markOf(line.at) {
				out = append(out, mountOf(line, l))
			}
		}
	}
	return out, nil
}

func mountOf(line mountLine, l loopDevice) Mount {
	return Mount{Dir: line.at, Path: l.file, Device: l.path, Type: line.kind, ReadOnly: line.readOnly || line.superReadOnly}
}

// releaseLimit is how long Unmount waits until the kernel has let go of a disk.
const releaseLimit = 5 * time.Second

// Unmount unmounts the volume at dir and removes the folder. When it returns nil, the host does not use the disk any more, so that the caller may
// detach the volume. It is no error if nothing is mounted there.
// Errors: InvalidArgument for another dir; FailedPrecondition if something else is mounted there, or while the volume is in use: by a program,
// or in the mount namespace of a container.
func (m *Mounter) Unmount(ctx context.Context, dir string) error {
	if err := m.unmount(ctx, dir); err != nil {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}

func (m *Mounter) unmount(ctx context.Context, dir string) error {
	if err := m.inside(dir); err != nil {
		return err
	}
	unlock, err := m.dirs.Lock(ctx, dir)
	if err != nil {
		return err
	}
	defer unlock()
	at, err := mountAt(dir)
	if err != nil {
		return err
	}
	if at != nil {
		ours, err := m.list(func(at string) bool { return at == dir })
		if err != nil {
			return err
		}
		if len(ours) == 0 {
			return errdefs.Preconditionf("what is mounted there (%s) is no volume, and stays", at.kind)
		}
		switch err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); {
		case errors.Is(err, unix.EBUSY):
			return errdefs.Preconditionf("a program has a file of the volume open or works there, or something is mounted below; end that first")
		case err != nil:
			return err
		}
		m.log.Info("volume unmounted", "path", ours[len(ours)-1].Path, "dir", dir)
	}
	if err := awaitRelease(ctx, markOf(dir)); err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return fmt.Errorf("remove the folder: %w", err)
	}
	return nil
}

// markOf is the mark of the loop device that is mounted at dir.
func markOf(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return markPrefix + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:]))[:markHash]
}

const (
	markPrefix = "cocoon-mount:"
	markHash   = 40 // characters; the mark fits into the 63 of a loop device's name
)
