// Package testguest is a small guest for tests of drivers: busybox as process 1, which obeys its console.
package testguest

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// guestInit is the init of the test guest: it obeys commands on the console and the power button, and echoes the agent port. /echo, if it is there, does that for other
// kinds of ports.
const guestInit = `#!/bin/busybox sh
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for m in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_console virtio_blk \
	failover net_failover virtio_net vsock vmw_vsock_virtio_transport_common vmw_vsock_virtio_transport button evdev scsi_common scsi_mod sd_mod virtio_scsi fuse virtiofs virtio_mem; do
	f=$(find / -xdev -name $m.ko -o -xdev -name $m.ko.gz | head -n 1)
	case "$f" in *.gz) gunzip $f; f=${f%.gz} ;; esac
	[ -n "$f" ] && insmod $f 2>/dev/null
done
off() { # a machine that cannot cut its power is reset by its keyboard controller instead
	grep -q cocoon.off=kbd /proc/cmdline && echo kbd >/sys/kernel/reboot/type && reboot -f
	poweroff -f
}
trap off INT # Ctrl+Alt+Del is the power button of such a machine
echo online >/sys/devices/system/memory/auto_online_blocks
mdev -s
for p in /sys/class/virtio-ports/*; do
	[ "$(cat $p/name)" = cocoon.agent ] || continue
	(exec 3<>/dev/${p##*/}; while :; do cat <&3 >&3; sleep 0.02; done) &
done
[ -x /echo ] && /echo &
button=$(grep -l "Power Button" /sys/class/input/event*/device/name | cut -d/ -f5)
[ -n "$button" ] && (dd if=/dev/input/$button bs=24 count=1 of=/dev/null 2>/dev/null; off) &
disks=
for b in /sys/block/vd*; do disks="$disks $(cat $b/serial) $(cat $b/ro)"; done 2>/dev/null
echo GUEST-READY disks:$disks macs: $(cat /sys/class/net/eth*/address 2>/dev/null)
while read word arg; do
	echo "HEARD $word"
	case "$word" in
	poweroff) off ;;
	reset) reboot -f ;;
	panic) echo c >/proc/sysrq-trigger ;;
	flood) while :; do echo 0123456789012345678901234567890123456789012345678901234567890123456789; done ;;
	write) echo "$arg" >/dev/vda && sync && echo WRITTEN ;;
	count) (n=0; while :; do n=$((n+1)); echo "COUNT $n"; sleep 0.03; done) & ;;
	both) (n=0; while :; do n=$((n+1)); echo "$n" | dd of=/dev/vda oflag=direct bs=512 conv=sync,notrunc 2>/dev/null; echo "COUNT $n"; done) & ;;
	read) echo "DISK $(dd if=/dev/vda iflag=direct bs=512 count=1 2>/dev/null | head -n 1)" ;;
	dirty) mkdir -p /t; mount -t tmpfs -o size=64m t /t; while :; do dd if=/dev/urandom of=/t/x bs=1M count=8 conv=notrunc 2>/dev/null; done & echo DIRTYING ;;
	chatter) (while :; do ping -c 1 -W 1 $arg; done >/dev/null 2>&1) & ;;
	mac) cat /sys/class/net/eth0/address; echo "LINK $(cat /sys/class/net/eth0/carrier)" 2>/dev/null ;;
	plugged) echo "PLUGGED$(for p in /sys/block/sd*/device/vpd_pg80; do [ -f $p ] && echo " $(dd bs=1 skip=4 <$p 2>/dev/null) $(cat ${p%%/device*}/ro)"; done | sort | tr -d '\n')." ;;
	size) for b in /sys/block/*; do
			serial=$(cat $b/serial || dd bs=1 skip=4 <$b/device/vpd_pg80)
			[ "$serial" = "$arg" ] || continue
			[ -e $b/device/rescan ] && echo 1 >$b/device/rescan
			echo "SIZE $arg $(cat $b/size)."
		done 2>/dev/null ;;
	take) first=$(grep -o 'cocoon.disks=[^ ,]*' /proc/cmdline) # of a machine whose disks have no serials
		for b in /sys/block/*; do
			serial=$(cat $b/serial || dd bs=1 skip=4 <$b/device/vpd_pg80)
			[ "$serial" = "${arg% *}" ] || [ "$b $first" = "/sys/block/vda cocoon.disks=${arg% *}" ] || continue
			echo "TOOK $(dd if=/dev/${b##*/} of=/dev/null iflag=direct bs=65536 count=$((${arg#* }/65536)) 2>&1 | head -n 1)"
		done 2>/dev/null ;;
	sh) echo "$(sh -c "$arg" 2>&1 | tr '\n' ' ')." ;;
	has) for c in /sys/devices/system/cpu/cpu*/online; do [ "$(cat $c)" = 1 ] || echo 1 >$c; done 2>/dev/null
		echo "HAS $(grep -c ^processor /proc/cpuinfo) $(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)." ;;
	up) ip link set eth0 up; ip addr add $arg dev eth0; echo UP ;;
	esac
done
off
`

// Guest is a kernel and an initial file system, which is the configured one (for its modules) plus our init.
type Guest struct{ Kernel, Initrd string }

// Need builds the guest. The files, by their paths, are in it, and can be executed.
func Need(t testing.TB, files map[string][]byte) Guest {
	t.Helper()
	kernel, base := os.Getenv("COCOON_TEST_KERNEL"), os.Getenv("COCOON_TEST_INITRD")
	busybox, err := os.ReadFile(filepath.Join(filepath.Dir(kernel), "busybox"))
	for what, missing := range map[string]bool{
		"COCOON_TEST_KERNEL and COCOON_TEST_INITRD (`make guest` makes the files)": kernel == "" || base == "",
		"root": os.Geteuid() != 0, "busybox beside the kernel (`make guest`)": err != nil,
	} {
		if missing && os.Getenv("COCOON_TEST_REQUIRE") == "1" {
			t.Fatalf("this test needs %s", what)
		} else if missing {
			t.Skipf("this test needs %s", what)
		}
	}
	data, err := os.ReadFile(base)
	if err != nil {
		t.Fatal(err)
	}
	buf := bytes.NewBuffer(append(data, make([]byte, -len(data)&511)...)) // the kernel accepts concatenated archives
	w := cpio.NewWriter(buf)
	type file struct {
		name string
		mode cpio.FileMode
		data []byte
	}
	add := []file{{"bin", cpio.TypeDir | 0o755, nil}, {"bin/busybox", cpio.TypeReg | 0o755, busybox}, {"testinit", cpio.TypeReg | 0o755, []byte(guestInit)}}
	for name, data := range files {
		add = append(add, file{name, cpio.TypeReg | 0o755, data})
	}
	for _, f := range add {
		if err := w.WriteHeader(&cpio.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	initrd := filepath.Join(t.TempDir(), "initrd")
	if err := os.WriteFile(initrd, buf.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return Guest{kernel, initrd}
}

// Dir returns the hardest runtime folder: closed to other users, and with a path too long for a socket.
func Dir(t testing.TB) string {
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep/", 30), "vm")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Plan returns a plan of a VM with an agent channel.
func (a Guest) Plan(t testing.TB) hypervisor.Plan {
	return hypervisor.Plan{
		ID: vm.NewID(), Name: "test", CPUs: 1, Memory: 128 << 20, Agent: "cocoon.agent", Dir: Dir(t),
		Boot: vm.Boot{Kernel: a.Kernel, Initrd: a.Initrd, Cmdline: "rdinit=/testinit"},
	}
}

// Say types a line on the guest's console, and returns when the guest has read it.
func Say(t testing.TB, i hypervisor.Instance, line string) {
	t.Helper()
	console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	word, _, _ := strings.Cut(line, " ")
	heard := func() int {
		log, _ := os.ReadFile(console.ConsoleLog())
		return bytes.Count(log, []byte("HEARD "+word))
	}
	before := heard()
	c, err := console.OpenConsole(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() { _, _ = io.Copy(io.Discard, c) }()
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		t.Fatal(err)
	}
	// Closing earlier could lose the line before the guest reads it.
	Await(t, "the guest hears "+line, func() bool { return heard() > before })
}

// Await waits for a condition that no event announces.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(15 * time.Minute); !ok(); <-tick.C { // firmware that reads sector by sector on an emulated machine takes minutes
		if time.Now().After(deadline) {
			t.Fatalf("in vain waited until %s", what)
		}
	}
}

// Logged waits until the console has said text, and returns its log.
func Logged(t testing.TB, i hypervisor.Instance, text string) string {
	t.Helper()
	console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	var log []byte
	defer func() {
		if t.Failed() {
			t.Logf("the console:\n%s", log[max(0, len(log)-4000):])
		}
	}()
	Await(t, "the console says "+text, func() bool {
		log, _ = os.ReadFile(console.ConsoleLog())
		return bytes.Contains(log, []byte(text))
	})
	return string(log)
}

// Line waits for text on the console and returns the complete line that starts with it.
func Line(t testing.TB, i hypervisor.Instance, text string) (line string) {
	t.Helper()
	Await(t, "the line of "+text+" ends", func() bool {
		_, rest, _ := strings.Cut(Logged(t, i, text), text)
		var whole bool
		line, _, whole = strings.Cut(rest, "\n")
		return whole
	})
	return line
}

// Firmware returns a plan of the demo disk, which the firmware boots.
func (a Guest) Firmware(t testing.TB) hypervisor.Plan {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(filepath.Dir(a.Kernel), "disk.img"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	p := a.Plan(t)
	p.Memory, p.Boot = 192<<20, vm.Boot{}
	p.Disks = []vm.Disk{{Path: path, Format: vm.DiskRaw, Serial: "root", Role: vm.RoleCOW}}
	return p
}

// Booted returns Fixture.Booted of one test. Each call for the guest of the demo disk waits for one more boot of it: it says so when it
// obeys its power button.
func Booted() func(*testing.T, hypervisor.Instance) {
	boots := map[string]int{}
	return func(t *testing.T, i hypervisor.Instance) {
		console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
		defer func() {
			if t.Failed() {
				log := Console(t, i)
				t.Logf("the console:\n%s", log[max(0, len(log)-4000):])
			}
		}()
		var ready bool
		Await(t, "the guest has booted", func() bool {
			ready = strings.Contains(Console(t, i), "GUEST-READY")
			return ready || strings.Count(Console(t, i), "disk-demo is up") > boots[console.ConsoleLog()]
		})
		if !ready {
			boots[console.ConsoleLog()]++
		}
	}
}

// Console returns what the guest has printed.
func Console(t testing.TB, i hypervisor.Instance) string {
	t.Helper()
	c, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	b, err := os.ReadFile(c.ConsoleLog())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Reads is Fixture.Reads: each request of the guest is of 64 KiB at most.
func Reads(t *testing.T, i hypervisor.Instance, serial string, n int64) {
	t.Helper()
	want := fmt.Sprintf("TOOK %d+0 records in", n>>16)
	Await(t, "the guest says "+want, func() bool { // a disk that was plugged may need a moment
		before := strings.Count(Console(t, i), "TOOK")
		Say(t, i, fmt.Sprintf("take %s %d", serial, n))
		Say(t, i, "end")
		return strings.Count(Console(t, i), "TOOK") > before
	})
	log := Console(t, i)
	if got := log[strings.LastIndex(log, "TOOK"):]; !strings.HasPrefix(got, want) {
		t.Fatalf("the guest says %q, want %q", got, want)
	}
}
