package guestagent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
)

// cgroupRoot is the folder of the guest's control groups.
const cgroupRoot = "/sys/fs/cgroup"

// openCgroup makes a control group for a container and opens it; nil in a guest without control groups. Then processes
// that a container leaves behind live until the guest ends, and its usage is unknown.
func openCgroup(name string) *int {
	// CPU time is counted in any case.
	_ = os.WriteFile(cgroupRoot+"/cgroup.subtree_control", []byte("+memory"), 0o644)
	dir := cgroupRoot + "/container-" + name
	if err := unix.Mkdir(dir, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return &fd
}

func killCgroup(dir *int) {
	if dir == nil {
		return
	}
	fd, err := unix.Openat(*dir, "cgroup.kill", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_, _ = unix.Write(fd, []byte("1"))
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

// cgroupUsage returns the CPU time that a control group has used and the bytes of memory that it needs, without file
// pages that were not read lately.
func cgroupUsage(dir int) (cpu time.Duration, memory int64, err error) {
	stat, err := readCgroup(dir, "cpu.stat")
	if err != nil {
		return 0, 0, err
	}
	usec, ok := keyed(stat, "usage_usec")
	if !ok {
		return 0, 0, errors.New("cpu.stat has no usage_usec")
	}
	current, err := readCgroup(dir, "memory.current")
	if err != nil {
		return 0, 0, err
	}
	if memory, err = strconv.ParseInt(string(bytes.TrimSpace(current)), 10, 64); err != nil {
		return 0, 0, fmt.Errorf("memory.current: %w", err)
	}
	if stat, err = readCgroup(dir, "memory.stat"); err != nil {
		return 0, 0, err
	}
	idle, _ := keyed(stat, "inactive_file")
	return time.Duration(usec) * time.Microsecond, max(memory-idle, 0), nil
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

// usage is what the containers use, or have used; containers with unknown usage are left out.
func (p *containers) usage() (out []*guestv1.ContainerStats) {
	if p == nil {
		return nil
	}
	for _, c := range p.list() {
		if c.command.cgroup == nil {
			continue
		}
		if cpu, memory, err := cgroupUsage(*c.command.cgroup); err == nil {
			out = append(out, &guestv1.ContainerStats{Name: c.name, CpuSeconds: cpu.Seconds(), Memory: memory})
		}
	}
	return out
}
