//go:build vm

package cocoond_test

import (
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/kube/stats"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMStatsAreTrue compares the reported values of a VM with the work of its guest: computing, filling memory,
// receiving and sending. Then the VM is restarted, and no counter decreases.
func TestVMStatsAreTrue(t *testing.T) {
	n := newNode(t)
	spec := vm.Spec{
		Name: "busy", Image: demo, CPUs: 1, Memory: 512 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}},
		Process: vm.Process{Entrypoint: []string{"sleep", "100000"}},
	}
	if _, err := n.Launch(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	rec := n.ready("busy")
	c, err := stats.New(stats.Config{Root: n.dir, Log: slog.New(slog.DiscardHandler), Source: func() []stats.VM {
		v := stats.VM{ID: rec.ID, Name: rec.Spec.Name, PID: rec.PID, StartedAt: rec.StartedAt}
		for _, nic := range rec.NICs {
			v.Taps = append(v.Taps, stats.Tap{Name: nic.Tap, NetNS: nic.NetNS})
		}
		for _, d := range rec.Disks {
			if d.Role == vm.RoleCOW {
				v.COW = d.Path
			}
		}
		return []stats.VM{v}
	}})
	if err != nil {
		t.Fatal(err)
	}
	measure := func() stats.Usage {
		t.Helper()
		u := c.Collect()[0]
		if u.Process == nil || u.Network == nil || u.Disk == nil {
			t.Fatalf("not all is known: %+v", u)
		}
		return u
	}
	number := func(script string) float64 {
		t.Helper()
		f, err := strconv.ParseFloat(n.sh("busy", script), 64)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	near := func(what string, told, done, slack float64) {
		t.Helper()
		t.Logf("%s: told %.0f, the guest did %.0f (%+.1f %%)", what, told, done, 100*(told-done)/done)
		if diff := told - done; diff > done*0.05+slack || diff < -done*0.05-slack {
			t.Errorf("%s: told %.0f, the guest did %.0f", what, told, done)
		}
	}

	// A guest does not see that it waits for a CPU of a busy host: it counts that time as computing.
	const compute = "i=0; while [ $i -lt 150000 ]; do i=$((i+1)); done; cut -d' ' -f1 /proc/$$/schedstat" // nanoseconds
	number("i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done; echo 0")                                     // is translated
	before, wait, steal := measure(), waiting(t, rec.PID), stolen(t)
	computed := number(compute)
	after := measure()
	told, waited := after.Process.CPU-before.Process.CPU, waiting(t, rec.PID)-wait
	t.Logf("CPU: told %s, and %s waited for one", told, waited)
	// QEMU works for an emulated guest in other threads, too, and its CPUs wait for these: allow a fifth for that, and what the host's own host has taken.
	near("CPU in ms", float64((told + waited).Milliseconds()), computed/1e6, computed/1e6*0.20+float64((stolen(t)-steal).Milliseconds()))

	// Memory that the guest has returned since boot is reused first, so use it up before measuring.
	const fill = "mkdir -p /mem && (mountpoint -q /mem || mount -t tmpfs -o size=100% tmpfs /mem) && dd if=/dev/zero bs=1M count=%M of=/mem/%N 2>/dev/null"
	n.sh("busy", strings.NewReplacer("%M", "160", "%N", "first").Replace(fill))
	before = measure()
	n.sh("busy", strings.NewReplacer("%M", "160", "%N", "second").Replace(fill))
	near("memory in KiB", float64(measure().Process.RSS-before.Process.RSS)/1024, 160<<10, 0)

	before = measure()
	rx, tx := number("cat /sys/class/net/eth0/statistics/rx_bytes"), number("cat /sys/class/net/eth0/statistics/tx_bytes")
	exchange(t, n, rec.NICs[0].IP)
	rx, tx = number("cat /sys/class/net/eth0/statistics/rx_bytes")-rx, number("cat /sys/class/net/eth0/statistics/tx_bytes")-tx
	after = measure()
	near("bytes received", float64(after.Network.RxBytes-before.Network.RxBytes), rx, 2048)
	near("bytes sent", float64(after.Network.TxBytes-before.Network.TxBytes), tx, 2048)

	n.sh("busy", "dd if=/dev/urandom of=/data bs=1M count=16 2>/dev/null; sync")
	near("bytes of disk", float64(*measure().Disk-*before.Disk), 16<<20, 4<<20) // plus the file system's own data

	last := measure()
	if _, err := n.Restart(t.Context(), "busy", 0); err != nil {
		t.Fatal(err)
	}
	rec = n.ready("busy")
	u := measure()
	if u.Process.CPU <= last.Process.CPU || u.Network.RxBytes < last.Network.RxBytes || u.Network.TxBytes < last.Network.TxBytes || !u.Process.Since.Equal(last.Process.Since) {
		t.Errorf("fell at a restart: %+v %+v, before %+v %+v", u.Process, u.Network, last.Process, last.Network)
	}
	if u.Process.RSS >= last.Process.RSS {
		t.Errorf("a fresh process holds %d bytes, the old one %d", u.Process.RSS, last.Process.RSS)
	}
}

// waiting is how long the virtual CPUs of a process have waited for physical ones.
func waiting(t *testing.T, pid int) (sum time.Duration) {
	t.Helper()
	threads, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range threads {
		name, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err != nil || !strings.HasPrefix(string(name), "CPU ") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, "schedstat"))
		if err != nil {
			t.Fatal(err)
		}
		ns, err := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += time.Duration(ns)
	}
	return sum
}

// stolen returns the steal time of this machine: its own host ran something else then (proc_stat(5), in ticks of 10 ms).
func stolen(t *testing.T) time.Duration {
	t.Helper()
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		t.Fatal(err)
	}
	ticks, err := strconv.ParseInt(strings.Fields(string(text))[8], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// exchange sends the guest 2 MiB and makes it send as much back.
func exchange(t *testing.T, n *node, ip string) {
	t.Helper()
	n.sh("busy", "(nc -l -p 9000 >/got; nc -l -p 9001 </got) >/dev/null 2>&1 &")
	for _, port := range []string{"9000", "9001"} {
		var conn net.Conn
		n.until("the guest listens", func() (ok bool) {
			var err error
			conn, err = net.DialTimeout("tcp", net.JoinHostPort(ip, port), time.Second)
			return err == nil
		})
		if port == "9000" {
			if _, err := conn.Write(make([]byte, 2<<20)); err != nil {
				t.Fatal(err)
			}
		} else if got, err := io.Copy(io.Discard, conn); err != nil || got != 2<<20 {
			t.Fatalf("the guest sent %d bytes, %v", got, err)
		}
		conn.Close()
	}
}
