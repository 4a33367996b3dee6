//go:build vm

package qemu

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/hypervisortest"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/vm"
)

// guestInit is the init of the test guest: it obeys commands on the console and the power button, and echoes the agent port.
const guestInit = `#!/bin/busybox sh
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for m in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_console virtio_blk \
	failover net_failover virtio_net button evdev scsi_common scsi_mod sd_mod virtio_scsi fuse virtiofs virtio_mem; do
	f=$(find / -xdev -name $m.ko -o -xdev -name $m.ko.gz | head -n 1)
	case "$f" in *.gz) gunzip $f; f=${f%.gz} ;; esac
	[ -n "$f" ] && insmod $f 2>/dev/null
done
echo online >/sys/devices/system/memory/auto_online_blocks
mdev -s
for p in /sys/class/virtio-ports/*; do
	[ "$(cat $p/name)" = cocoon.agent ] || continue
	(exec 3<>/dev/${p##*/}; while :; do cat <&3 >&3; sleep 0.02; done) &
done
button=$(grep -l "Power Button" /sys/class/input/event*/device/name | cut -d/ -f5)
[ -n "$button" ] && (dd if=/dev/input/$button bs=24 count=1 of=/dev/null 2>/dev/null; poweroff -f) &
disks=
for b in /sys/block/vd*; do disks="$disks $(cat $b/serial) $(cat $b/ro)"; done 2>/dev/null
echo GUEST-READY disks:$disks macs: $(cat /sys/class/net/eth*/address 2>/dev/null)
while read word arg; do
	echo "HEARD $word"
	case "$word" in
	poweroff) poweroff -f ;;
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
	sh) echo "$(sh -c "$arg" 2>&1 | tr '\n' ' ')." ;;
	has) for c in /sys/devices/system/cpu/cpu*/online; do [ "$(cat $c)" = 1 ] || echo 1 >$c; done 2>/dev/null
		echo "HAS $(grep -c ^processor /proc/cpuinfo) $(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)." ;;
	up) ip link set eth0 up; ip addr add $arg dev eth0; echo UP ;;
	esac
done
poweroff -f
`

// assets are the kernel and an initial file system, which is the configured one (for its modules) plus our init.
type assets struct{ kernel, initrd string }

func needGuest(t testing.TB) assets {
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
	for _, f := range []struct {
		name string
		mode cpio.FileMode
		data []byte
	}{{"bin", cpio.TypeDir | 0o755, nil}, {"bin/busybox", cpio.TypeReg | 0o755, busybox}, {"testinit", cpio.TypeReg | 0o755, []byte(guestInit)}} {
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
	return assets{kernel, initrd}
}

func testDriver(t testing.TB) *Driver {
	t.Helper()
	d, err := New(Config{Cgroup: "cocoon-test-" + strconv.Itoa(os.Getpid())}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// deepDir returns the hardest runtime folder: closed to other users, and with a path too long for a socket.
func deepDir(t testing.TB) string {
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep/", 30), "vm")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (a assets) plan(t testing.TB) hypervisor.Plan {
	return hypervisor.Plan{
		ID: vm.NewID(), Name: "test", CPUs: 1, Memory: 128 << 20, Agent: "cocoon.agent", Dir: deepDir(t),
		Boot: vm.Boot{Kernel: a.kernel, Initrd: a.initrd, Cmdline: "rdinit=/testinit"},
	}
}

// say types a line on the guest's console, and returns when the guest has read it.
func say(t testing.TB, i hypervisor.Instance, line string) {
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
	await(t, "the guest hears "+line, func() bool { return heard() > before })
}

// await waits for a condition that no event announces.
func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(4 * time.Minute); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("in vain waited until %s", what)
		}
	}
}

func logged(t testing.TB, i hypervisor.Instance, text string) string {
	t.Helper()
	console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	var log []byte
	defer func() {
		if t.Failed() {
			t.Logf("the console:\n%s", log[max(0, len(log)-4000):])
		}
	}()
	await(t, "the console says "+text, func() bool {
		log, _ = os.ReadFile(console.ConsoleLog())
		return bytes.Contains(log, []byte(text))
	})
	return string(log)
}

// line waits for text on the console and returns the complete line that starts with it.
func line(t testing.TB, i hypervisor.Instance, text string) (line string) {
	t.Helper()
	await(t, "the line of "+text+" ends", func() bool {
		_, rest, _ := strings.Cut(logged(t, i, text), text)
		var whole bool
		line, _, whole = strings.Cut(rest, "\n")
		return whole
	})
	return line
}

// firmware returns a plan of the demo disk, which the firmware boots.
func (a assets) firmware(t testing.TB) hypervisor.Plan {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(filepath.Dir(a.kernel), "disk.img"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	p := a.plan(t)
	p.Memory, p.Boot = 192<<20, vm.Boot{}
	p.Disks = []vm.Disk{{Path: path, Format: vm.DiskRaw, Serial: "root", Role: vm.RoleCOW}}
	return p
}

// booted returns Fixture.Booted of one test. Each call for the guest of the demo disk waits for one more boot of it: it says so when it
// obeys its power button.
func booted() func(*testing.T, hypervisor.Instance) {
	boots := map[string]int{}
	return func(t *testing.T, i hypervisor.Instance) {
		console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
		defer func() {
			if t.Failed() {
				log := consoleOf(t, i)
				t.Logf("the console:\n%s", log[max(0, len(log)-4000):])
			}
		}()
		var ready bool
		await(t, "the guest has booted", func() bool {
			ready = strings.Contains(consoleOf(t, i), "GUEST-READY")
			return ready || strings.Count(consoleOf(t, i), "disk-demo is up") > boots[console.ConsoleLog()]
		})
		if !ready {
			boots[console.ConsoleLog()]++
		}
	}
}

// shell types a line for the shell of a demo disk until the console has the answer: a shell that has just begun may lose what it reads.
func shell(t testing.TB, i hypervisor.Instance, line, what string, answered func(log string) bool) {
	t.Helper()
	console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	c, err := console.OpenConsole(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() { _, _ = io.Copy(io.Discard, c) }()
	const patience = 5 * time.Second
	var typed time.Time
	await(t, what, func() bool {
		if time.Since(typed) > patience {
			if _, err := io.WriteString(c, line+"\n"); err != nil {
				t.Fatal(err)
			}
			typed = time.Now()
		}
		return answered(consoleOf(t, i))
	})
}

func TestContract(t *testing.T) {
	a := needGuest(t)
	hypervisortest.Run(t, func(t *testing.T) hypervisortest.Fixture {
		return hypervisortest.Fixture{
			New:  func(t *testing.T) hypervisor.Driver { return testDriver(t) },
			Plan: func(t *testing.T) hypervisor.Plan { return a.plan(t) },
			Broken: func(t *testing.T) hypervisor.Plan {
				p := a.plan(t)
				path := filepath.Join(t.TempDir(), "bad.qcow2")
				if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
					t.Fatal(err)
				}
				p.Disks = []vm.Disk{{Path: path, Format: vm.DiskQCOW2}}
				return p
			},
			Booted:   booted(),
			Firmware: func(t *testing.T) hypervisor.Plan { return a.firmware(t) },
			PowerOff: func(t *testing.T, i hypervisor.Instance) { say(t, i, "poweroff") },
			Reset:    func(t *testing.T, i hypervisor.Instance) { say(t, i, "reset") },
			Crash: func(t *testing.T, pid int) {
				// It is process 1 of its namespace, and only SIGKILL from outside can end it.
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
			},
			Plugged: func(t *testing.T, i hypervisor.Instance, serials ...string) {
				want := "PLUGGED"
				for _, serial := range slices.Sorted(slices.Values(serials)) {
					want += " " + serial + " 1" // read-only
				}
				var last string
				await(t, "the guest says "+want, func() bool {
					before := strings.Count(consoleOf(t, i), "PLUGGED")
					say(t, i, "plugged")
					await(t, "the guest answers", func() bool {
						answers := strings.Split(consoleOf(t, i), "PLUGGED")
						last, _, _ = strings.Cut(answers[len(answers)-1], ".")
						return len(answers) > before+1 && strings.Contains(answers[len(answers)-1], ".")
					})
					return "PLUGGED"+last == want
				})
			},
			NICs: func(t *testing.T, n int) (nics []vm.NIC) {
				ns := bridged(t, n)
				for i := range n {
					nics = append(nics, vm.NIC{Tap: fmt.Sprintf("tap%d", i), NetNS: "/run/netns/" + ns, MAC: fmt.Sprintf("02:00:00:00:00:%02x", 0x40+i), MTU: 1400})
				}
				return nics
			},
			Connected: func(t *testing.T, i hypervisor.Instance, macs ...string) {
				want := "MACS " + strings.Join(slices.Sorted(slices.Values(macs)), " ") + " ."
				await(t, "the guest says "+want, func() bool {
					before := strings.Count(consoleOf(t, i), "HEARD sh")
					say(t, i, "sh echo MACS $(cat /sys/class/net/eth*/address | sort)")
					await(t, "the guest answers", func() bool {
						answers := strings.Split(consoleOf(t, i), "HEARD sh")
						return len(answers) > before+1 && strings.Contains(answers[len(answers)-1], " .")
					})
					text := consoleOf(t, i)
					return strings.Contains(text[strings.LastIndex(text, "HEARD sh"):], want)
				})
			},
			Carriers: carriers,
			Sized: func(t *testing.T, i hypervisor.Instance, serial string, size int64) {
				want := fmt.Sprintf("SIZE %s %d.", serial, size/512)
				await(t, "the guest says "+want, func() bool {
					before := strings.Count(consoleOf(t, i), "HEARD size")
					say(t, i, "size "+serial)
					await(t, "the guest answers", func() bool { return strings.Count(consoleOf(t, i), "HEARD size") > before })
					return strings.Contains(consoleOf(t, i), want)
				})
			},
			Has: func(t *testing.T, i hypervisor.Instance, size vm.Size) {
				const kept = 120 << 20 // by the kernel, at most: more with each of its releases
				await(t, fmt.Sprintf("the guest has %+v", size), func() bool {
					before := strings.Count(consoleOf(t, i), "\nHAS ")
					say(t, i, "has")
					await(t, "the guest answers", func() bool { return strings.Count(consoleOf(t, i), "\nHAS ") > before })
					text := consoleOf(t, i)
					var cpus int
					var kib int64
					if _, err := fmt.Sscanf(text[strings.LastIndex(text, "\nHAS ")+1:], "HAS %d %d.", &cpus, &kib); err != nil {
						return false
					}
					return cpus == size.CPUs && kib<<10 > size.Memory-kept && kib<<10 < size.Memory
				})
			},
			Left: left,
		}
	})
}

// left searches for traces.
func left(t *testing.T, p hypervisor.Plan) []string { return jailtest.Left(t, testDriver(t).jail, p) }

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
