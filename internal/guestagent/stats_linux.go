package guestagent

import (
	"bufio"
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
)

// userHz is the number of ticks per second in /proc/stat: USER_HZ, 100 on every Linux architecture that we support.
const userHz = 100

func readStats(proc, root string) (*guestv1.StatsReply, error) {
	r := &guestv1.StatsReply{}
	var fs unix.Statfs_t
	if err := unix.Statfs(root, &fs); err != nil {
		return nil, fmt.Errorf("statfs %s: %w", root, err)
	}
	r.DiskTotal = int64(fs.Blocks) * fs.Bsize
	r.DiskUsed = int64(fs.Blocks-fs.Bfree) * fs.Bsize

	for name, parse := range map[string]func(*guestv1.StatsReply, []byte){
		"stat": cpuSeconds, "meminfo": memory, "loadavg": load, "net/dev": network,
	} {
		data, err := os.ReadFile(filepath.Join(proc, name))
		if err != nil {
			return nil, err
		}
		parse(r, data)
	}
	r.Pressure = guestPressure(proc)
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			r.Processes++
		}
	}
	return r, nil
}

// volumeStats converts what the file systems of volumes have, sorted by name.
func volumeStats(all map[string]unix.Statfs_t) (out []*guestv1.VolumeStats) {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fs := all[name]
		out = append(out, &guestv1.VolumeStats{
			Name: name, Size: int64(fs.Blocks) * fs.Bsize, Used: int64(fs.Blocks-fs.Bfree) * fs.Bsize, Available: int64(fs.Bavail) * fs.Bsize,
			Inodes: int64(fs.Files), InodesFree: int64(fs.Ffree),
		})
	}
	return out
}

// cpuSeconds sums the first line of /proc/stat: cpu user nice system idle iowait irq softirq steal ...
func cpuSeconds(r *guestv1.StatsReply, data []byte) {
	line, _, _ := bytes.Cut(data, []byte("\n"))
	for i, field := range strings.Fields(string(line)) {
		if i == 0 || i == 4 || i == 5 || i > 8 { // idle and iowait are not work; guest time is already in user
			continue
		}
		n, _ := strconv.ParseInt(field, 10, 64)
		r.CpuSeconds += float64(n) / userHz
	}
}

func memory(r *guestv1.StatsReply, data []byte) {
	value := map[string]int64{}
	for scan := bufio.NewScanner(bytes.NewReader(data)); scan.Scan(); {
		if f := strings.Fields(scan.Text()); len(f) >= 2 {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			value[f[0]] = n << 10
		}
	}
	r.MemoryTotal = value["MemTotal:"]
	r.MemoryUsed = r.MemoryTotal - value["MemAvailable:"]
}

func load(r *guestv1.StatsReply, data []byte) {
	first, _, _ := strings.Cut(string(data), " ")
	r.LoadAverage_1, _ = strconv.ParseFloat(first, 64)
}

// network sums received and sent bytes of all interfaces except lo.
func network(r *guestv1.StatsReply, data []byte) {
	for scan := bufio.NewScanner(bytes.NewReader(data)); scan.Scan(); {
		name, rest, ok := strings.Cut(scan.Text(), ":")
		f := strings.Fields(rest)
		if !ok || strings.TrimSpace(name) == "lo" || len(f) < 9 {
			continue
		}
		rx, _ := strconv.ParseInt(f[0], 10, 64)
		tx, _ := strconv.ParseInt(f[8], 10, 64)
		r.NetworkRxBytes += rx
		r.NetworkTxBytes += tx
	}
}

// bootID changes with every boot of the guest's kernel; "" when it cannot be read.
func bootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id))
}

// uptime is the time since the guest's kernel started.
func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}
