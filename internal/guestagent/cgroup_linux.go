package guestagent

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// cgroupRoot is the folder of the guest's control groups.
const cgroupRoot = "/sys/fs/cgroup"

// openCgroups opens the root of the guest's control groups and lets their controllers work below it; nil in a guest without control
// groups. It must be called before a container covers the root with its own group.
func openCgroups() *int {
	fd, err := unix.Open(cgroupRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	known, err := readCgroup(fd, "cgroup.controllers")
	if err != nil {
		unix.Close(fd)
		return nil
	}
	for _, controller := range strings.Fields(string(known)) {
		_ = writeCgroup(fd, "cgroup.subtree_control", "+"+controller) // a guest works without each of them
	}
	return &fd
}

// openCgroup makes a control group for a container and opens it; nil in a guest without control groups. Then the container has no
// limits, processes that it leaves behind live until the guest ends, and its usage is unknown.
func openCgroup(root *int, name string) *int {
	if root == nil {
		return nil
	}
	name = cgroupOf(name)
	if err := unix.Mkdirat(*root, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil
	}
	fd, err := unix.Openat(*root, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return &fd
}

// cgroupOf is the name of the control group of a container.
func cgroupOf(container string) string { return "container-" + container }

// showCgroup shows a control group in the file system at folder as the root of the control groups, as container runtimes do. Where
// that fails, programs see all control groups of the guest.
func showCgroup(dir *int, folder string, writable bool) {
	if dir == nil {
		return
	}
	target := path.Join(folder, cgroupRoot)
	if unix.Mount(fmt.Sprintf("/proc/self/fd/%d", *dir), target, "", unix.MS_BIND, "") != nil || writable {
		return
	}
	_ = unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

// Values of the files of control groups.
const (
	cpuPeriod     = 100_000 // µs
	leastCPUQuota = 1000    // µs in a period: the kernel refuses less
	usualWeight   = 100
)

// limitCgroup makes r the limits of a control group. What its kernel does not know is left out.
func limitCgroup(dir *int, r vm.Resources) error {
	if dir == nil {
		return nil
	}
	quota, memory, group := "max", "max", "0"
	if r.CPULimit > 0 {
		quota = strconv.FormatInt(max(r.CPULimit*cpuPeriod/1000, leastCPUQuota), 10)
	}
	if r.MemoryLimit > 0 {
		memory, group = strconv.FormatInt(r.MemoryLimit, 10), "1"
	}
	var errs []error
	for _, f := range []struct{ name, value string }{
		{"cpu.max", fmt.Sprint(quota, " ", cpuPeriod)},
		{"cpu.weight", strconv.FormatInt(cmp.Or(r.CPUWeight, usualWeight), 10)},
		{"memory.oom.group", group}, // as with a kubelet, a container that has used up its memory ends as a whole
		{"memory.max", memory},
	} {
		if err := writeCgroup(*dir, f.name, f.value); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// fits returns a FailedPrecondition error if a lower memory limit is below what a control group uses. The kernel would kill
// processes to enforce it.
func fits(dir *int, limit int64) error {
	if dir == nil || limit == 0 {
		return nil
	}
	text, err := readCgroup(*dir, "memory.max")
	if err != nil {
		return nil //nolint:nilerr // a kernel that does not limit memory
	}
	if now, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64); err == nil && now <= limit {
		return nil
	}
	if used, err := cgroupUsage(*dir); err == nil && used.GetMemory() > limit {
		return errdefs.Preconditionf("memory limit (%d) below current usage (%d)", limit, used.GetMemory())
	}
	return nil
}

func writeCgroup(dir int, name, value string) error {
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		_, err = unix.Write(fd, []byte(value))
	}
	if err != nil {
		return &os.PathError{Op: "write " + value + " to", Path: name, Err: err}
	}
	return nil
}

func killCgroup(dir *int) {
	if dir != nil {
		_ = writeCgroup(*dir, "cgroup.kill", "1")
	}
}

// oomKills returns how many processes of a control group the kernel has killed because memory ran out.
func oomKills(dir *int) int64 {
	if dir == nil {
		return 0
	}
	events, err := readCgroup(*dir, "memory.events")
	if err != nil {
		return 0
	}
	n, _ := keyed(events, "oom_kill")
	return n
}

func readCgroup(dir int, name string) ([]byte, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return io.ReadAll(f)
}

// keyed returns the number in the line of data that begins with key.
func keyed(data []byte, key string) (int64, bool) {
	for line := range strings.Lines(string(data)) {
		if name, value, _ := strings.Cut(strings.TrimSpace(line), " "); name == key {
			n, err := strconv.ParseInt(value, 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
