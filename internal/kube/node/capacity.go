package node

import (
	"bufio"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Sizes force parts of the node's capacity; zero values are found out from the host.
type Sizes struct {
	CPU       resource.Quantity
	Memory    resource.Quantity
	Storage   resource.Quantity
	Hugepages resource.Quantity // of 2 MiB
	Pods      int64             // default 256
}

// DefaultPods is how many pods a node takes when nothing else is said.
const DefaultPods = 256

const resourceHugepages = corev1.ResourceName(corev1.ResourceHugePagesPrefix + "2Mi")

// host is where the figures come from.
type host struct {
	proc string // usually /proc
	root string // a folder on the file system that holds the VMs' disks
}

// usage is what the host has and has left. Sizes are bytes.
type usage struct {
	cpus              int64
	memory, memFree   int64
	hugepages         int64
	disk, diskFree    int64
	pids, pidsCeiling int64
}

func (h host) measure() (usage, error) {
	u := usage{cpus: int64(runtime.NumCPU())}
	mem, err := h.meminfo()
	if err != nil {
		return u, err
	}
	u.memory, u.memFree = mem["MemTotal"]<<10, mem["MemAvailable"]<<10
	if mem["Hugepagesize"] == 2048 {
		u.hugepages = mem["HugePages_Total"] * 2 << 20
	}
	var st unix.Statfs_t
	if err := unix.Statfs(h.existing(), &st); err != nil {
		return u, fmt.Errorf("measure file system of %s: %w", h.root, err)
	}
	u.disk, u.diskFree = bytes(st.Blocks, st.Bsize), bytes(st.Bavail, st.Bsize)
	u.pids, u.pidsCeiling = h.threads()
	return u, nil
}

// existing is the nearest folder above root that is there: the disks' folder may not have been made yet.
func (h host) existing() string {
	for dir := h.root; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
	}
}

func bytes(blocks uint64, size int64) int64 {
	if size <= 0 || blocks > math.MaxInt64/uint64(size) {
		return math.MaxInt64
	}
	return int64(blocks) * size
}

func (h host) meminfo() (map[string]int64, error) {
	f, err := os.Open(filepath.Join(h.proc, "meminfo"))
	if err != nil {
		return nil, fmt.Errorf("measure memory: %w", err)
	}
	defer f.Close()
	out := map[string]int64{}
	for sc := bufio.NewScanner(f); sc.Scan(); {
		key, rest, _ := strings.Cut(sc.Text(), ":")
		if fields := strings.Fields(rest); len(fields) > 0 {
			if n, err := strconv.ParseInt(fields[0], 10, 64); err == nil {
				out[key] = n
			}
		}
	}
	if out["MemTotal"] == 0 {
		return nil, errdefs.New(errdefs.Internal, "measure memory: no MemTotal in %s/meminfo", h.proc)
	}
	return out, nil
}

// threads returns how many there are and how many there may be; zeros when the host does not say.
func (h host) threads() (now, most int64) {
	text := func(name string) string {
		b, err := fs.ReadFile(os.DirFS(h.proc), name)
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

// capacity returns what the node has and what it offers: all but reserve per cent. Of storage it offers only what is
// free now: images and the disks that exist are not given away twice.
func capacity(u usage, s Sizes, reserve int) (all, allocatable corev1.ResourceList) {
	pick := func(forced resource.Quantity, found int64, f resource.Format) resource.Quantity {
		if !forced.IsZero() {
			return forced
		}
		return *resource.NewQuantity(found, f)
	}
	pods := s.Pods
	if pods <= 0 {
		pods = DefaultPods
	}
	all = corev1.ResourceList{
		corev1.ResourceCPU:              pick(s.CPU, u.cpus, resource.DecimalSI),
		corev1.ResourceMemory:           pick(s.Memory, u.memory, resource.BinarySI),
		corev1.ResourceEphemeralStorage: pick(s.Storage, u.disk, resource.BinarySI),
		resourceHugepages:               pick(s.Hugepages, u.hugepages, resource.BinarySI),
		corev1.ResourcePods:             *resource.NewQuantity(pods, resource.DecimalSI),
	}
	allocatable = all.DeepCopy()
	if s.Storage.IsZero() {
		allocatable[corev1.ResourceEphemeralStorage] = *resource.NewQuantity(u.diskFree, resource.BinarySI)
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
		q := allocatable[name]
		if name == corev1.ResourceCPU {
			q = *resource.NewMilliQuantity(share(q.MilliValue(), reserve), resource.DecimalSI)
		} else {
			q = *resource.NewQuantity(share(q.Value(), reserve), resource.BinarySI)
		}
		allocatable[name] = q
	}
	return all, allocatable
}

// share is n less reserve per cent, without overflow.
func share(n int64, reserve int) int64 {
	keep := int64(100 - reserve)
	return n/100*keep + n%100*keep/100
}
