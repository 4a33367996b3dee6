package lvm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// control is the device by which the kernel's device mapper is asked.
const control = "/dev/mapper/control"

const (
	sector    = 512      // bytes
	metaBlock = 4 << 10  // bytes of a block of a thin pool's metadata
	maxStatus = 16 << 10 // bytes of an answer
)

// errNoDevice says that a logical volume has no device now.
var errNoDevice = errors.New("it has no device")

// kernel asks the device mapper, which starts no program and reads no disk.
type kernel struct {
	mu sync.Mutex
	f  *os.File // of control; nil: not open yet
}

func (k *kernel) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.f == nil {
		return nil
	}
	return k.f.Close()
}

// target is what the device mapper says of a device that consists of one target.
type target struct {
	dev    uint64 // number of the device
	kind   string // such as thin-pool
	params string // its state, or its table
}

// ask asks for the state of the device called name, or with the flag DM_STATUS_TABLE_FLAG for its table.
// Errors: errNoDevice.
func (k *kernel) ask(name string, flags uint32) (target, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.f == nil {
		f, err := os.OpenFile(control, os.O_RDWR|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
			return target{}, errdefs.Unavailablef("the kernel has no device mapper (%w); load it with `modprobe dm-thin-pool`", err)
		}
		if err != nil {
			return target{}, err
		}
		k.f = f
	}
	buf := make([]uint64, maxStatus/8) // aligned as the kernel's structures are
	raw := unsafe.Slice((*byte)(unsafe.Pointer(&buf[0])), maxStatus)
	head := (*unix.DmIoctl)(unsafe.Pointer(&buf[0]))
	head.Version, head.Data_size, head.Data_start = [3]uint32{4}, maxStatus, uint32(unsafe.Sizeof(*head))
	head.Flags = flags | unix.DM_NOFLUSH_FLAG // the kernel does not write the pool's metadata for this
	if copy(head.Name[:len(head.Name)-1], name) < len(name) {
		return target{}, errNoDevice
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, k.f.Fd(), unix.DM_TABLE_STATUS, uintptr(unsafe.Pointer(head))); errno != 0 {
		if errno == unix.ENXIO {
			return target{}, errNoDevice
		}
		return target{}, fmt.Errorf("ask the device mapper about %s: %w", name, errno)
	}
	at := int(head.Data_start)
	size := int(unsafe.Sizeof(unix.DmTargetSpec{}))
	if head.Target_count != 1 || head.Flags&unix.DM_BUFFER_FULL_FLAG != 0 || at < 0 || at+size > maxStatus {
		return target{}, fmt.Errorf("the device %s has %d targets and is not one of a thin pool", name, head.Target_count)
	}
	spec := (*unix.DmTargetSpec)(unsafe.Pointer(&raw[at]))
	return target{dev: head.Dev, kind: text(spec.Target_type[:]), params: text(raw[at+size:])}, nil
}

// text returns the bytes before the first zero.
func text(b []byte) string {
	if end := bytes.IndexByte(b, 0); end >= 0 {
		b = b[:end]
	}
	return string(b)
}

// thin returns the number of the device of a thin volume and the bytes that it occupies in its pool. Errors: errNoDevice.
func (k *kernel) thin(name string) (dev uint64, allocated int64, err error) {
	t, err := k.ask(name, 0)
	if err != nil {
		return 0, 0, err
	}
	allocated, err = parseThin(t)
	return t.dev, allocated, err
}

// parseThin reads "<mapped sectors> <highest mapped sector>".
func parseThin(t target) (int64, error) {
	fields := strings.Fields(t.params)
	if t.kind != "thin" || len(fields) == 0 {
		return 0, fmt.Errorf("a device of the kind %.20q is not a thin volume", t.kind)
	}
	n, err := strconv.ParseInt(fields[0], 10, 64)
	if err != nil || n < 0 || n > 1<<62/sector {
		return 0, errdefs.DataLossf("the kernel says that the thin volume has failed (%.100q)", t.params)
	}
	return n * sector, nil
}

// filled is how full a thin pool is, and what is wrong with it.
type filled struct {
	used, size         int64 // bytes of data
	metaUsed, metaSize int64 // bytes of metadata
	fault              string
	unsafe             bool // it does not zero what it gives to volumes
}

// thinPool returns how full a pool is. Errors: errNoDevice.
func (k *kernel) thinPool(name string) (filled, error) {
	state, err := k.ask(name, 0)
	if err != nil {
		return filled{}, err
	}
	table, err := k.ask(name, unix.DM_STATUS_TABLE_FLAG)
	if err != nil {
		return filled{}, err
	}
	return parsePool(state, table)
}

// parsePool reads the state of a pool, "<transaction> <used>/<total metadata blocks> <used>/<total data blocks> <held root> <mode>
// <discards> <when full> <needs_check|-> …", and its table, "<metadata device> <data device> <sectors of a block> <low water mark>
// <number of features> <features>…". See the kernel's admin-guide/device-mapper/thin-provisioning.
func parsePool(state, table target) (filled, error) {
	if state.kind != "thin-pool" || table.kind != "thin-pool" {
		return filled{}, errdefs.Preconditionf("a device of the kind %.20q is not a thin pool", state.kind)
	}
	s, t := strings.Fields(state.params), strings.Fields(table.params)
	const tableHead, stateFields = 5, 8
	if len(t) < tableHead {
		return filled{}, fmt.Errorf("the table of the pool is %.100q", table.params)
	}
	var f filled
	for _, feature := range t[tableHead:] {
		f.unsafe = f.unsafe || feature == "skip_block_zeroing"
	}
	if len(s) < stateFields { // "Fail", "Error"
		f.fault = "it has failed (" + state.params[:min(len(state.params), 100)] + ")"
		return f, nil
	}
	block, err := strconv.ParseInt(t[2], 10, 64)
	metaUsed, metaSize, err1 := share(s[1], metaBlock)
	used, size, err2 := share(s[2], block*sector)
	if err := errors.Join(err, err1, err2); err != nil {
		return filled{}, fmt.Errorf("the state of the pool is %.100q: %w", state.params, err)
	}
	f.used, f.size, f.metaUsed, f.metaSize = used, size, metaUsed, metaSize
	switch mode := s[4]; {
	case s[7] == "needs_check":
		f.fault = "its metadata need a check (lvconvert --repair)"
	case mode == "out_of_data_space":
		f.fault = "it is full"
	case mode != "rw":
		f.fault = "it is " + mode[:min(len(mode), 100)]
	}
	return f, nil
}

// share reads "<used>/<total>", in units of unit bytes, and returns bytes.
func share(text string, unit int64) (used, total int64, err error) {
	a, b, _ := strings.Cut(text, "/")
	used, err1 := strconv.ParseInt(a, 10, 64)
	total, err2 := strconv.ParseInt(b, 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return 0, 0, err
	}
	if unit <= 0 || used < 0 || used > total || total > 1<<62/unit {
		return 0, 0, fmt.Errorf("%d of %d blocks of %d bytes are impossible", used, total, unit)
	}
	return used * unit, total * unit, nil
}

// deviceName is the name by which the device mapper knows the device of a logical volume.
func deviceName(vg, lv string) string {
	double := func(s string) string { return strings.ReplaceAll(s, "-", "--") }
	return double(vg) + "-" + double(lv)
}

// usedPool ends the name of the device of a thin pool that has volumes.
const usedPool = "-tpool"
