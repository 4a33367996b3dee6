// Package machine describes the machine of an appliance, and refuses what only Cocoon's own operating system can do.
//
// It reads from the kernel and changes nothing.
package machine

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/version"
)

// Host is a machine that runs another operating system than Cocoon's own, such as a laptop.
type Host struct {
	StateDir string // the file system of the state
	Log      *logging.Ring
}

// Info implements appliance.System. What the kernel does not tell is left out.
func (h *Host) Info(context.Context) (*capsulev1.GetInfoResponse, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("ask the kernel for its name: %w", err)
	}
	info := &capsulev1.GetInfoResponse{
		Hostname: text(name.Nodename[:]), KernelRelease: text(name.Release[:]), KernelVersion: text(name.Version[:]), Architecture: text(name.Machine[:]),
		CapsuleVersion: version.Version, CpuCores: uint32(runtime.NumCPU()), LocalTimeUnix: time.Now().Unix(),
		UptimeSeconds: uint64(Uptime() / time.Second),
		CpuModel:      field("/proc/cpuinfo", "model name"),
	}
	info.MemoryTotalBytes, info.MemoryAvailableBytes = kilobytes(field("/proc/meminfo", "MemTotal")), kilobytes(field("/proc/meminfo", "MemAvailable"))
	var fs unix.Statfs_t
	if unix.Statfs(h.StateDir, &fs) == nil {
		info.PermTotalBytes, info.PermUsedBytes = fs.Blocks*uint64(fs.Bsize), (fs.Blocks-fs.Bfree)*uint64(fs.Bsize)
	}
	return info, nil
}

// Logs implements appliance.System.
func (h *Host) Logs(ctx context.Context, tail int, follow bool, write func([]byte) error) error {
	return h.Log.Read(ctx, tail, follow, write)
}

func foreign() error {
	return errdefs.Preconditionf("this machine runs cocoond on another operating system than Cocoon's own, which has no slots; update and reboot it by its own means")
}

// Update implements appliance.System.
func (*Host) Update(context.Context, io.Reader, *capsulev1.UpdateOSMetadata) (slot, version string, err error) {
	return "", "", foreign()
}

// Confirm implements appliance.System.
func (*Host) Confirm(context.Context) (slot, version string, err error) { return "", "", foreign() }

// Reboot implements appliance.System.
func (*Host) Reboot(context.Context) error { return foreign() }

// GrowDisk implements appliance.System.
func (*Host) GrowDisk(context.Context) (*capsulev1.GrowDiskResponse, error) { return nil, foreign() }

// Uptime returns the time since the machine has booted, including that in which it slept.
func Uptime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// BootID returns the kernel's id of this boot.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("ask the kernel for the id of this boot: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Slot returns the slot from which Cocoon's own system has booted, a or b; "" on another one. The boot loader tells it.
func Slot() string {
	b, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return ""
	}
	return slotOf(string(b))
}

func slotOf(cmdline string) string {
	for _, word := range strings.Fields(cmdline) {
		if slot, ok := strings.CutPrefix(word, "capsule.slot="); ok && (slot == "a" || slot == "b") {
			return slot
		}
	}
	return ""
}

func text(b []byte) string {
	if at := bytes.IndexByte(b, 0); at >= 0 {
		b = b[:at]
	}
	return string(b)
}

// field returns the first value of a key in a file of the kernel with lines "key: value"; "" if there is none.
func field(path, key string) string {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if k, v, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// kilobytes returns the bytes of "N kB".
func kilobytes(s string) uint64 {
	n, err := strconv.ParseUint(strings.TrimSuffix(s, " kB"), 10, 54)
	if err != nil {
		return 0
	}
	return n << 10
}
