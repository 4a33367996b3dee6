package disk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// growing is the name of the document in the table of the system that says that somebody wants the disk to grow.
const growing = "grow-disk"

// Grower gives the data partition, the group, /perm and the pool the room that the disk of the system has behind them. Nothing grows before somebody asks.
//
// It notes first that it was asked. Each step after that can be cut off, and is taken up by Resume: the partition table changes by one sector, LVM
// changes its records at once, and ext4 grows by its journal. Safe for concurrent use.
type Grower struct {
	Root      Root
	Group     Group
	Documents journal.Documents
	SysBlock  string // the kernel's disks
	Dev       string
	Log       *slog.Logger

	mu sync.Mutex
}

// Size is how large the parts are, and how much the partition has grown, in bytes.
type Size struct{ Disk, Perm, Pool, Grown int64 }

// Disk returns the device of the disk of the system, its size, and by how much its data can grow, in bytes. Errors: NotFound, FailedPrecondition.
func (g *Grower) Disk() (device string, size, room int64, err error) {
	name, entries, err := g.Root.Find(g.SysBlock, g.Dev)
	if err != nil {
		return "", 0, 0, err
	}
	device = filepath.Join(g.Dev, name)
	if size, err = sizeOf(g.SysBlock, name); err != nil {
		return device, 0, 0, err
	}
	next, err := grown(entries, size)
	if err != nil {
		return device, size, 0, err
	}
	return device, size, int64(next.Size-entries[DataPartition-1].Size) * SectorSize, nil
}

// sizeOf returns the bytes of a disk, as the kernel knows them.
func sizeOf(sysBlock, name string) (int64, error) {
	text, err := os.ReadFile(filepath.Join(sysBlock, name, "size"))
	if err != nil {
		return 0, fmt.Errorf("measure disk %s: %w", name, err)
	}
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 54)
	if err != nil {
		return 0, fmt.Errorf("measure disk %s: %w", name, err)
	}
	return sectors * SectorSize, nil // the kernel's unit, whatever the disk's is
}

// Grow grows all that can grow. Without room it does nothing. Errors: FailedPrecondition for a disk that is not laid out as one of Cocoon OS.
func (g *Grower) Grow(ctx context.Context) (Size, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.Documents.Write(ctx, journal.Change{Table: journal.OSState, Name: growing, Data: []byte("{}")}); err != nil {
		return Size{}, err
	}
	return g.grow(ctx)
}

// Resume goes on with what Grow was asked for and did not finish.
func (g *Grower) Resume(ctx context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, err := g.Documents.Get(ctx, journal.OSState, growing)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err == nil {
		_, err = g.grow(ctx)
	}
	return err
}

func (g *Grower) grow(ctx context.Context) (Size, error) {
	ctx = context.WithoutCancel(ctx) // a step that has begun ends
	name, entries, err := g.Root.Find(g.SysBlock, g.Dev)
	if err != nil {
		return Size{}, err
	}
	size, err := sizeOf(g.SysBlock, name)
	if err != nil {
		return Size{}, err
	}
	data, err := grown(entries, size)
	if err != nil {
		return Size{}, errors.Join(err, g.forget(ctx))
	}
	if err := g.partition(filepath.Join(g.Dev, name), data); err != nil {
		return Size{}, fmt.Errorf("grow partition %d of %s: %w", DataPartition, name, err)
	}
	device, err := g.Root.Partition(g.SysBlock, g.Dev, DataPartition)
	if err != nil {
		return Size{}, err
	}
	v, err := g.Group.grow(ctx, device)
	if err != nil {
		return Size{}, fmt.Errorf("grow the volumes: %w", err)
	}
	g.Log.Info("the disk has grown", "device", device, "bytes", int64(data.Size)*SectorSize)
	more := int64(data.Size-entries[DataPartition-1].Size) * SectorSize
	return Size{Disk: size, Perm: v.sizes[permVolume], Pool: v.sizes[pool], Grown: more}, g.forget(ctx)
}

func (g *Grower) forget(ctx context.Context) error {
	return g.Documents.Write(ctx, journal.Change{Table: journal.OSState, Name: growing})
}

// partition gives the data partition its size, on the disk and in the kernel.
func (g *Grower) partition(device string, data Entry) error {
	f, err := os.OpenFile(filepath.Clean(device), os.O_RDWR|unix.O_SYNC, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := setSize(f, data); err != nil {
		return err
	}
	err = blkpg(f, unix.BLKPG_RESIZE_PARTITION, DataPartition, data)
	if errors.Is(err, unix.ENOTTY) { // a file, as of a test
		return nil
	}
	return err
}

// setSize writes the size of the data partition into the table, by one write that changes one sector, and reads it back.
func setSize(f interface {
	io.ReaderAt
	io.WriterAt
}, data Entry,
) error {
	var old, now [SectorSize]byte
	if _, err := f.ReadAt(old[:], 0); err != nil {
		return err
	}
	now = old
	binary.LittleEndian.PutUint32(now[tables+16*(DataPartition-1)+12:], data.Size)
	if now == old {
		return nil
	}
	if _, err := f.WriteAt(now[:], 0); err != nil {
		return err
	}
	_, entries, err := ReadTable(f)
	if err == nil && entries[DataPartition-1] != data {
		err = errdefs.DataLossf("the disk does not keep its partition table; replace it")
	}
	return err
}

// blkpg tells the kernel of one partition of a disk, which it looks up in no table then.
func blkpg(disk *os.File, op int32, number int, e Entry) error {
	p := unix.BlkpgPartition{Start: int64(e.Start) * SectorSize, Length: int64(e.Size) * SectorSize, Pno: int32(number)}
	arg := unix.BlkpgIoctlArg{Op: op, Datalen: int32(unsafe.Sizeof(p)), Data: (*byte)(unsafe.Pointer(&p))}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, disk.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg))); errno != 0 {
		return errno
	}
	return nil
}

// Present makes the partitions of a layout known to the kernel, on a disk whose table does not have them. Those that the kernel knew go.
func Present(disk *os.File, l Layout) error {
	for number := 1; number <= 128; number++ {
		if err := blkpg(disk, unix.BLKPG_DEL_PARTITION, number, Entry{}); err != nil && !errors.Is(err, unix.ENXIO) {
			return fmt.Errorf("forget partition %d of %s: %w", number, disk.Name(), err)
		}
	}
	for i, e := range l {
		if err := blkpg(disk, unix.BLKPG_ADD_PARTITION, i+1, e); err != nil {
			return fmt.Errorf("make partition %d of %s: %w", i+1, disk.Name(), err)
		}
	}
	return nil
}

// grow gives all parts of the group, whose partition has grown, their sizes. It returns what there is then.
func (g *Group) grow(ctx context.Context, device string) (volumes, error) {
	if _, err := g.lvm(ctx, "pvresize", device); err != nil {
		return volumes{}, err
	}
	v, err := g.volumes(ctx)
	if err != nil {
		return v, err
	}
	perm, thin, err := growth(v)
	if err != nil {
		return v, err
	}
	if err := g.extend(ctx, permVolume, v.sizes[permVolume], perm); err != nil {
		return v, err
	}
	if _, err := g.Run(ctx, "resize2fs", PermDevice); err != nil {
		return v, err
	}
	if v.has(pool) {
		if err := g.extend(ctx, pool, v.sizes[pool], thin); err != nil {
			return v, err
		}
	}
	return g.volumes(ctx)
}

func (g *Group) extend(ctx context.Context, name string, from, to int64) error {
	if to <= from {
		return nil
	}
	g.Log.Info("a volume grows", "volume", name, "bytes", to)
	_, err := g.lvm(ctx, "lvextend", "-y", "-L", strconv.FormatInt(to, 10)+"b", group+"/"+name)
	return err
}
