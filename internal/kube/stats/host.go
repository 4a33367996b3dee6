package stats

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// userTick is the unit of CPU times in /proc. It has this value on every supported machine.
const userTick = 10 * time.Millisecond

// Host reads the kernel's data about this machine.
type Host struct {
	Proc string // "" is /proc
	Sys  string // "" is /sys
	Root string // directory on the file system that holds the VMs' disks
}

func (h Host) proc() string {
	return cmp.Or(h.Proc, "/proc")
}

// Memory is the machine's memory, in bytes.
type Memory struct {
	Total, Free, Available int64
	InactiveFile           int64
	Huge                   map[vm.HugePages]int64 // all huge pages of each size that the kernel knows
}

// WorkingSet returns the memory that cannot be reclaimed immediately, computed as in the kubelet.
func (m Memory) WorkingSet() int64 { return max(0, m.Total-m.Free-m.InactiveFile) }

// Memory reads /proc/meminfo.
func (h Host) Memory() (Memory, error) {
	f, err := os.Open(filepath.Join(h.proc(), "meminfo"))
	if err != nil {
		return Memory{}, fmt.Errorf("measure memory: %w", err)
	}
	defer f.Close()
	kb := map[string]int64{}
	for sc := bufio.NewScanner(f); sc.Scan(); {
		key, rest, _ := strings.Cut(sc.Text(), ":")
		if fields := strings.Fields(rest); len(fields) > 0 {
			if n, err := strconv.ParseInt(fields[0], 10, 64); err == nil {
				kb[key] = n
			}
		}
	}
	if kb["MemTotal"] == 0 {
		return Memory{}, errdefs.New(errdefs.Internal, "measure memory: no MemTotal in %s/meminfo", h.proc())
	}
	m := Memory{Total: kb["MemTotal"] << 10, Free: kb["MemFree"] << 10, Available: kb["MemAvailable"] << 10, InactiveFile: kb["Inactive(file)"] << 10}
	m.Huge, err = h.hugePages()
	return m, err
}

func (h Host) hugePages() (map[vm.HugePages]int64, error) {
	huge := map[vm.HugePages]int64{}
	for _, p := range vm.AllHugePages {
		text, err := os.ReadFile(filepath.Join(p.Dir(cmp.Or(h.Sys, "/sys")), "nr_hugepages"))
		if errors.Is(err, fs.ErrNotExist) { // the kernel has none of this size
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("measure huge pages: %w", err)
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("measure huge pages of %s: %w", p, err)
		}
		huge[p] = n * int64(p)
	}
	return huge, nil
}

// CPU returns the CPU time of the machine since its boot, and the time of the boot.
func (h Host) CPU() (used time.Duration, boot time.Time, err error) {
	data, err := os.ReadFile(filepath.Join(h.proc(), "stat"))
	if err != nil {
		return 0, boot, fmt.Errorf("measure CPU: %w", err)
	}
	found := false
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		switch {
		case len(fields) > 8 && fields[0] == "cpu":
			// The fields are user nice system idle iowait irq softirq steal. user already includes the time of guests.
			for i, f := range fields[1:9] {
				n, err := strconv.ParseUint(f, 10, 63)
				if err != nil {
					return 0, boot, fmt.Errorf("measure CPU: %w", err)
				}
				if i != 3 && i != 4 {
					used += time.Duration(n) * userTick
				}
			}
			found = true
		case len(fields) == 2 && fields[0] == "btime":
			if n, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
				boot = time.Unix(n, 0)
			}
		}
	}
	if !found {
		return 0, boot, errdefs.New(errdefs.Internal, "measure CPU: no CPU times in %s/stat", h.proc())
	}
	return used, boot, nil
}

// Disk is a file system, in bytes and inodes.
type Disk struct {
	Total, Available   int64
	Inodes, InodesFree int64
}

// Disk measures the file system of Root.
func (h Host) Disk() (Disk, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(h.existing(), &st); err != nil {
		return Disk{}, fmt.Errorf("measure file system of %s: %w", h.Root, err)
	}
	inodes := func(n uint64) int64 { return int64(min(n, math.MaxInt64)) }
	return Disk{blocks(st.Blocks, st.Bsize), blocks(st.Bavail, st.Bsize), inodes(st.Files), inodes(st.Ffree)}, nil
}

// existing returns Root or its nearest existing parent, because Root may not have been created yet.
func (h Host) existing() string {
	for dir := h.Root; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
	}
}

func blocks(n uint64, size int64) int64 {
	if size <= 0 || n > math.MaxInt64/uint64(size) {
		return math.MaxInt64
	}
	return int64(n) * size
}

// Threads returns the current and the maximum number of threads, or zeros if the host does not report them.
func (h Host) Threads() (now, most int64) {
	text := func(name string) string {
		b, err := fs.ReadFile(os.DirFS(h.proc()), name)
		if err != nil {
			return ""
		}
		return string(b)
	}
	if f := strings.Fields(text("loadavg")); len(f) > 3 {
		_, all, _ := strings.Cut(f[3], "/")
		now, _ = strconv.ParseInt(all, 10, 64)
	}
	most, _ = strconv.ParseInt(strings.TrimSpace(text("sys/kernel/pid_max")), 10, 64)
	return now, most
}

// occupied returns the bytes that the file at path occupies on its disk, or nil if the file is not visible.
func occupied(path string) *uint64 {
	if path == "" {
		return nil
	}
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return nil
	}
	return new(uint64(st.Blocks) * 512)
}

// named reports whether an argument of the process names the VM.
func named(proc string, v VM) bool {
	args, err := os.ReadFile(proc + "/" + strconv.Itoa(v.PID) + "/cmdline")
	return err == nil && (v.Name != "" && bytes.Contains(args, []byte(v.Name)) || v.ID != "" && bytes.Contains(args, []byte(v.ID)))
}
