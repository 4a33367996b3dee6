package stats

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// reader reads small kernel files into one buffer, because a scrape reads thousands of files.
type reader struct{ buf [4096]byte }

// read returns the beginning of the file at path. The result is valid until the next call.
func (r *reader) read(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	n, err := unix.Read(fd, r.buf[:])
	if err != nil {
		return nil, err
	}
	return r.buf[:n], nil
}

// processStat is the relevant part of /proc/PID/stat.
type processStat struct {
	start uint64 // ticks since boot
	cpu   uint64 // nanoseconds of all its threads, including ended ones
	rss   uint64 // bytes
}

func (h Host) process(r *reader, pid int) (processStat, error) {
	data, err := r.read(h.proc() + "/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return processStat{}, errdefs.NotFoundf("process %d has ended: %w", pid, err)
	}
	return parseProcessStat(data)
}

// parseProcessStat parses the line in /proc/PID/stat. The command name may contain any character, so fields are counted from
// its last parenthesis.
func parseProcessStat(data []byte) (st processStat, err error) {
	const state, utime, stime, start, rss = 0, 11, 12, 19, 21 // fields 3, 14, 15, 22 and 24 of proc(5)
	i := bytes.LastIndexByte(data, ')')
	if i < 0 {
		return st, errdefs.New(errdefs.Internal, "stat line %.40q has no command name", data)
	}
	var field int
	var ticks uint64
	for f := range bytes.FieldsSeq(data[i+1:]) {
		var to *uint64
		switch field {
		case state:
			if f[0] == 'Z' || f[0] == 'X' {
				return st, errdefs.NotFoundf("the process has ended")
			}
		case utime, stime:
			n, err := strconv.ParseUint(string(f), 10, 64)
			if err != nil {
				return st, fmt.Errorf("CPU time in stat line: %w", err)
			}
			ticks += n
		case start:
			to = &st.start
		case rss:
			to = &st.rss
		}
		if to != nil {
			if *to, err = strconv.ParseUint(string(f), 10, 64); err != nil {
				return st, fmt.Errorf("stat line: %w", err)
			}
		}
		if field++; field > rss {
			st.cpu = ticks * uint64(userTick)
			st.rss *= uint64(os.Getpagesize())
			return st, nil
		}
	}
	return st, errdefs.New(errdefs.Internal, "stat line %.40q is too short", data)
}

// cgroup2 returns the mount point of the cgroup v2 tree, also on hybrid hosts, or "" if there is none.
func (h Host) cgroup2() string {
	f, err := os.Open(h.proc() + "/self/mountinfo")
	if err != nil {
		return ""
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		mount, fs, ok := strings.Cut(sc.Text(), " - ")
		if fields := strings.Fields(mount); ok && len(fields) > 4 && strings.HasPrefix(fs, "cgroup2 ") {
			return proc.MountPath(fields[4])
		}
	}
	return ""
}

// ownCgroup returns the directory of the cgroup of v's process, or "" if other processes share the cgroup.
func (h Host) ownCgroup(r *reader, mount string, v VM) string {
	if mount == "" {
		return ""
	}
	data, err := r.read(h.proc() + "/" + strconv.Itoa(v.PID) + "/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(data)) {
		path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::")
		if !ok || strings.TrimPrefix(filepath.Base(path), vm.CgroupPrefix) != string(v.ID) {
			continue // a cgroup without the VM's id may be shared
		}
		if dir := filepath.Join(mount, path); unix.Access(filepath.Join(dir, "cpu.stat"), unix.R_OK) == nil {
			return dir
		}
	}
	return ""
}

// cgroupCPU returns the nanoseconds that the processes of a cgroup have used.
func (r *reader) cgroupCPU(dir string) (uint64, bool) {
	data, err := r.read(dir + "/cpu.stat")
	if err != nil {
		return 0, false
	}
	usec, ok := keyed(data, "usage_usec")
	return usec * 1000, ok
}

// cgroupMemory returns the memory of a cgroup without inactive file pages, or false without a memory controller.
func (r *reader) cgroupMemory(dir string) (uint64, bool) {
	data, err := r.read(dir + "/memory.current")
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(string(bytes.TrimSpace(data)), 10, 64)
	if err != nil {
		return 0, false
	}
	if data, err = r.read(dir + "/memory.stat"); err != nil {
		return 0, false
	}
	inactive, _ := keyed(data, "inactive_file")
	return n - min(n, inactive), true
}

// keyed returns VALUE of the line "key VALUE" in data.
func keyed(data []byte, key string) (uint64, bool) {
	for line := range bytes.Lines(data) {
		k, v, ok := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
		if ok && string(k) == key {
			n, err := strconv.ParseUint(string(v), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
