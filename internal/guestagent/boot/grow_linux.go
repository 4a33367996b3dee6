package boot

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// onlineMemory lets the kernel use memory that the host plugs as soon as its driver has it.
func onlineMemory(sys string) {
	_ = os.WriteFile(filepath.Join(sys, "devices/system/memory/auto_online_blocks"), []byte("online"), 0) // a kernel without that cannot grow
}

// WatchCPUs lets the kernel use CPUs that the host plugs, until ctx ends. It returns at once in a guest that can get none.
func WatchCPUs(ctx context.Context) {
	const cpus = "/sys/devices/system/cpu"
	if !canGetCPUs(cpus) {
		return
	}
	// The kernel tells about new devices (netlink(7), NETLINK_KOBJECT_UEVENT) in group 1.
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return
	}
	f := os.NewFile(uintptr(fd), "uevents")
	defer f.Close()
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		return
	}
	defer context.AfterFunc(ctx, func() { f.Close() })()
	online(cpus) // those of before
	for buf := make([]byte, 8192); ; {
		n, err := f.Read(buf)
		if ctx.Err() != nil || err != nil && !errors.Is(err, unix.ENOBUFS) { // ENOBUFS: events were lost
			return
		}
		if err != nil || isCPU(buf[:n]) {
			online(cpus)
		}
	}
}

// canGetCPUs reports whether the machine has places for more CPUs than it has.
func canGetCPUs(dir string) bool {
	possible, err := os.ReadFile(filepath.Join(dir, "possible"))
	if err != nil {
		return false
	}
	present, err := os.ReadFile(filepath.Join(dir, "present"))
	return err == nil && !bytes.Equal(possible, present)
}

// isCPU reports whether an event of the kernel is about a CPU that is there now. An event begins with ACTION@PATH and a zero.
func isCPU(event []byte) bool {
	text, _, _ := bytes.Cut(event, []byte{0})
	name, ok := strings.CutPrefix(string(text), "add@/devices/system/cpu/cpu")
	_, err := strconv.ParseUint(name, 10, 16)
	return ok && err == nil
}

// online has the kernel use all CPUs.
func online(dir string) {
	files, _ := filepath.Glob(dir + "/cpu[0-9]*/online") // the pattern is valid
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(text)) == "0" {
			_ = os.WriteFile(file, []byte("1"), 0)
		}
	}
}
