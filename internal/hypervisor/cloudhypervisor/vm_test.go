//go:build vm

package cloudhypervisor

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/hypervisortest"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestMain lets the test binary be /echo of the guest: it sends back what comes over the virtio socket.
func TestMain(m *testing.M) {
	if os.Args[0] == "/echo" {
		dev, err := link.OpenVSOCK(vm.AgentPort)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		for buf := make([]byte, 4096); ; {
			n, err := dev.Read(buf, false)
			if err == nil {
				_, err = dev.Write(buf[:n])
			}
			if err != nil {
				fmt.Println(err)
			}
		}
	}
	os.Exit(m.Run())
}

func needGuest(t testing.TB) testguest.Guest {
	t.Helper()
	need.Hypervisor(t, DefaultBinary)
	if problem := jail.ReadKVM().Problem(); problem != "" {
		t.Skip("KVM is needed: " + problem)
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	return testguest.Need(t, map[string][]byte{"echo": self})
}

func testDriver(t testing.TB) *Driver {
	t.Helper()
	return driverWith(t, need.FindHypervisor(testFirmware))
}

// driverWith is a driver with a firmware; "" is none.
func driverWith(t testing.TB, firmware string) *Driver {
	t.Helper()
	cfg := Config{Binary: need.Hypervisor(t, DefaultBinary), Cgroup: "cocoon-test-" + strconv.Itoa(os.Getpid())}
	if firmware != "" {
		cfg.Firmware = []string{firmware}
	}
	d, err := New(cfg, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// testFirmware is rust-hypervisor-firmware, which `make hypervisors` builds.
const testFirmware = "hypervisor-fw"

// edk2Firmware is the one of EDK2, of Debian's package cloudhv-efi-x86-64. The tests find it like a program, so it has to be executable.
const edk2Firmware = "CLOUDHV.fd"

func TestContract(t *testing.T) {
	a := needGuest(t)
	var firmware func(*testing.T) hypervisor.Plan
	if need.FindHypervisor(testFirmware) != "" {
		firmware = func(t *testing.T) hypervisor.Plan { return a.Firmware(t) }
	}
	hypervisortest.Run(t, func(t *testing.T) hypervisortest.Fixture {
		return hypervisortest.Fixture{
			New: func(t *testing.T) hypervisor.Driver { return testDriver(t) },
			Plan: func(t *testing.T) hypervisor.Plan {
				p := a.Plan(t)
				t.Cleanup(func() {
					if t.Failed() {
						text, _ := os.ReadFile(filepath.Join(p.Dir, programLog))
						t.Logf("the log of the program:\n%s", text[max(0, len(text)-4000):])
					}
				})
				return p
			},
			Broken: func(t *testing.T) hypervisor.Plan {
				p := a.Plan(t)
				p.Boot.Kernel = filepath.Join(t.TempDir(), "kernel")
				if err := os.WriteFile(p.Boot.Kernel, make([]byte, 4096), 0o600); err != nil {
					t.Fatal(err)
				}
				return p
			},
			Firmware: firmware,
			Plugged: func(t *testing.T, i hypervisor.Instance, serials ...string) {
				says(t, i, "for b in /sys/block/vd*; do s=$(cat $b/serial); [ ${s#plugged} = $s ] || echo $s $(cat $b/ro); done 2>/dev/null | sort", func() (want []string) {
					for _, serial := range slices.Sorted(slices.Values(serials)) {
						want = append(want, serial+" 1") // read-only
					}
					return want
				}()...)
			},
			NICs: func(t *testing.T, n int) (nics []vm.NIC) {
				ns := testguest.Bridged(t, n)
				for i := range n {
					nics = append(nics, vm.NIC{Tap: fmt.Sprintf("tap%d", i), NetNS: "/run/netns/" + ns, MAC: fmt.Sprintf("02:00:00:00:00:%02x", 0x40+i)})
				}
				return nics
			},
			Connected: func(t *testing.T, i hypervisor.Instance, macs ...string) {
				says(t, i, "cat /sys/class/net/eth*/address | sort", slices.Sorted(slices.Values(macs))...)
			},
			Sized: func(t *testing.T, i hypervisor.Instance, serial string, size int64) {
				says(t, i, fmt.Sprintf("for b in /sys/block/vd*; do [ $(cat $b/serial) = %s ] && cat $b/size; done 2>/dev/null", serial), strconv.FormatInt(size/512, 10))
			},
			Reads:    testguest.Reads,
			Booted:   testguest.Booted(),
			PowerOff: func(t *testing.T, i hypervisor.Instance) { testguest.Say(t, i, "poweroff") },
			Reset:    func(t *testing.T, i hypervisor.Instance) { testguest.Say(t, i, "reset") },
			Crash: func(t *testing.T, pid int) {
				// It is process 1 of its namespace, and only SIGKILL from outside can end it.
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
			},
			Left: func(t *testing.T, p hypervisor.Plan) []string { return jailtest.Left(t, testDriver(t).jail, p) },
		}
	})
}

// says runs a command in the guest until these words are all that it says.
func says(t *testing.T, i hypervisor.Instance, command string, words ...string) {
	t.Helper()
	want := strings.Join(append(append([]string{"SAYS"}, words...), "."), " ")
	var last string
	defer func() {
		if t.Failed() {
			t.Logf("the guest says at last: %s", last)
		}
	}()
	testguest.Await(t, "the guest says "+want, func() bool {
		before := strings.Count(testguest.Console(t, i), "HEARD sh")
		testguest.Say(t, i, "sh echo SAYS $("+command+")")
		testguest.Await(t, "the guest answers", func() bool {
			answers := strings.Split(testguest.Console(t, i), "HEARD sh")
			last = answers[len(answers)-1]
			return len(answers) > before+1 && strings.Contains(last, " .")
		})
		return strings.Contains(last, want)
	})
}

// TestBoots is the shortest way to see what is wrong.
func TestBoots(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		text, _ := os.ReadFile(filepath.Join(p.Dir, programLog))
		t.Fatalf("%v\n%s", err, text)
	}
	defer func() { _ = i.Kill(t.Context()) }()
	t.Cleanup(func() {
		text, _ := os.ReadFile(filepath.Join(p.Dir, programLog))
		t.Logf("%s", text)
	})
	testguest.Logged(t, i, "GUEST-READY")
	guest, _ := hypervisor.As[hypervisor.GuestDialer](i)
	conn, err := guest.DialGuest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(conn, "hello")
	buf := make([]byte, 5)
	if _, err := io.ReadFull(conn, buf); err != nil || string(buf) != "hello" {
		t.Errorf("%q, %v", buf, err)
	}
	testguest.Say(t, i, "poweroff")
	e, err := i.Wait(t.Context())
	t.Logf("%+v, %v", e, err)
}

// TestDisksAndNICs gives a guest disks that only root may open, and interfaces in another network namespace.
func TestDisksAndNICs(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, append([]byte(content+"\n"), make([]byte, 1<<20-1-len(content))...), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	p.Disks = []vm.Disk{{Path: file("cow", "base"), Format: vm.DiskRaw, Serial: "cow", Role: vm.RoleCOW}, {Path: file("ro", "only read"), Format: vm.DiskRaw, ReadOnly: true, Serial: "ro"}, {Path: file("rw", "written"), Format: vm.DiskRaw, Serial: "rw"}}
	ns := fmt.Sprintf("cocoon-ch-%d", os.Getpid())
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v\n%s", args, err, out)
		}
	}
	ip("netns", "add", ns)
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", ns).Run() })
	for n := range 2 {
		tap := fmt.Sprintf("tap%d", n)
		ip("-n", ns, "tuntap", "add", tap, "mode", "tap", "vnet_hdr")
		ip("-n", ns, "link", "set", tap, "up")
		p.NICs = append(p.NICs, vm.NIC{Tap: tap, NetNS: "/run/netns/" + ns, MAC: fmt.Sprintf("02:00:00:00:00:%02x", 0x40+n)})
	}
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = i.Kill(t.Context()) }()
	testguest.Logged(t, i, "GUEST-READY disks: cow 0 ro 1 rw 0 macs: 02:00:00:00:00:40 02:00:00:00:00:41")
	testguest.Say(t, i, "read")
	testguest.Logged(t, i, "DISK base")
	testguest.Say(t, i, "write overlay")
	testguest.Logged(t, i, "WRITTEN")
	testguest.Say(t, i, "read")
	testguest.Logged(t, i, "DISK overlay")
	testguest.Say(t, i, "poweroff")
	if e, err := i.Wait(t.Context()); err != nil || !e.GuestShutdown {
		t.Errorf("%+v, %v", e, err)
	}
}

// TestConfined looks at the process from outside.
func TestConfined(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = i.Kill(t.Context()) }()
	if uid, err := proc.UID(i.PID()); err != nil || !d.jail.Users.Owns(uid) {
		t.Errorf("it runs as user %d, %v", uid, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", i.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("its status has no %q", want)
		}
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", i.PID()))
	if err != nil || len(threads) < 5 {
		t.Errorf("threads: %v, %v", threads, err)
	}
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if main := fmt.Sprintf("/task/%d/", i.PID()); err != nil || !strings.Contains(string(text), "Seccomp:\t2") && !strings.Contains(path, main) {
			t.Errorf("a thread without a filter of system calls: %.40q, %v", text, err)
		}
	}
	for _, ns := range []string{"net", "mnt", "pid", "ipc", "uts"} {
		ours, _ := os.Readlink("/proc/self/ns/" + ns)
		if its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", i.PID(), ns)); err != nil || its == ours {
			t.Errorf("its namespace %s is ours, %v", ns, err)
		}
	}
	var all []string
	root := fmt.Sprintf("/proc/%d/root", i.PID())
	err = filepath.WalkDir(root+"/", func(path string, e os.DirEntry, err error) error {
		if rel := strings.TrimPrefix(path, root); rel == "/proc" {
			return filepath.SkipDir
		} else if err == nil && !e.IsDir() {
			all = append(all, rel)
		}
		return err
	})
	binary := d.cfg.Binary
	want := []string{"/boot/initrd", "/boot/kernel", "/dev/kvm", "/dev/null", "/dev/urandom", "/run/agent.sock", binary}
	slices.Sort(all)
	slices.Sort(want)
	if err != nil || !slices.Equal(all, want) {
		t.Errorf("it sees %q, %v; want %q", all, err, want)
	}
}
