package bridge

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// addLink creates a foreign bridge for the test.
func addLink(t *testing.T, name, cidr string) netlink.Link {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		t.Fatal(err)
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(l) })
	if err := netlink.LinkSetUp(l); err != nil {
		t.Fatal(err)
	}
	if cidr != "" {
		if err := setAddress(l, netip.MustParsePrefix(cidr)); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// refused checks that Setup fails with FailedPrecondition and the given words, and that nothing has changed.
func refused(t *testing.T, cfg Config, words ...string) {
	t.Helper()
	before := snapshot(t)
	cfg.StateDir = filepath.Join(t.TempDir(), "state")
	err := build(t, cfg).Setup(t.Context())
	if !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("setup: %v (%s)", err, errdefs.ClassOf(err))
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
	if after := snapshot(t); !slices.Equal(after, before) {
		t.Errorf("a refused setup changed %v to %v", before, after)
	}
	if _, err := os.Stat(cfg.StateDir); err == nil {
		t.Error("a refused setup left files")
	}
}

// snapshot lists what exists in the namespace.
func snapshot(t *testing.T) []string {
	t.Helper()
	links, err := host.ListLinks()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, l := range links {
		out = append(out, l.Attrs().Name)
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	tables, err := c.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		out = append(out, "table "+table.Name)
	}
	for _, key := range []string{forwardKey, forward6Key} {
		value, err := host.Sysctl(key)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, key+" "+value)
	}
	return out
}

func TestSetupRefuses(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	t.Run("a link of somebody else", func(t *testing.T) {
		addLink(t, "cocoon0", "")
		refused(t, Config{}, "cocoon0", "ip link del")
	})
	t.Run("an address in the subnet", func(t *testing.T) {
		addLink(t, "other0", "10.88.7.9/30")
		refused(t, Config{Subnet: testSubnet}, testSubnet, "10.88.7.9/30", "other0", "another subnet")
	})
	t.Run("a route into the subnet", func(t *testing.T) {
		l := addLink(t, "other0", "192.0.2.1/24")
		dst, err := netlink.ParseIPNet("10.88.0.0/16")
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst}); err != nil {
			t.Fatal(err)
		}
		refused(t, Config{Subnet: testSubnet}, "route 10.88.0.0/16 through other0")
	})
	t.Run("no tun device", func(t *testing.T) {
		if err := unix.Mount("none", "/dev/net", "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount("/dev/net", unix.MNT_DETACH) })
		refused(t, Config{}, host.TunDevice, "modprobe tun")
	})
	t.Run("no such namespace", func(t *testing.T) {
		refused(t, Config{NetNS: "nowhere"}, "ip netns add nowhere")
		if err := build(t, Config{NetNS: "nowhere", StateDir: t.TempDir()}).Teardown(t.Context()); err != nil {
			t.Errorf("teardown where nothing can be: %v", err)
		}
	})
	t.Run("not a namespace", func(t *testing.T) {
		refused(t, Config{NetNS: "/proc/self/status"}, "not a network namespace")
	})
	t.Run("no privileges", func(t *testing.T) {
		done := make(chan struct{})
		go func() { // on a thread that ends with its goroutine
			defer close(done)
			runtime.LockOSThread()
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var none [2]unix.CapUserData
			if err := unix.Capset(&header, &none[0]); err != nil {
				t.Error(err)
				return
			}
			err := build(t, Config{StateDir: t.TempDir()}).Setup(t.Context())
			if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "root") {
				t.Errorf("setup: %v", err)
			}
		}()
		<-done
	})
}

func TestFailedSetupLeavesNothing(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	before := snapshot(t)
	// The leases are written last, after everything else exists. No process can create folders in /proc.
	n := build(t, Config{StateDir: t.TempDir(), LeasePath: "/proc/cocoon/leases.json", NAT: true})
	if err := n.Setup(t.Context()); err == nil || !strings.Contains(err.Error(), "write leases") {
		t.Fatalf("setup: %v", err)
	}
	if after := snapshot(t); !slices.Equal(after, before) {
		t.Errorf("left %v, before %v", after, before)
	}
}

func TestAutoSubnetIsFreeAndStays(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	l := addLink(t, "other0", "10.88.0.77/24")
	dir := t.TempDir()
	n := start(t, Config{StateDir: dir})
	if prefix, gateway := n.Subnet(); prefix.String() != "10.88.1.0/24" || gateway.String() != "10.88.1.1" {
		t.Errorf("chose %s, %s", prefix, gateway)
	}
	if err := netlink.LinkDel(l); err != nil {
		t.Fatal(err)
	}
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if prefix, _ := n.Subnet(); prefix.String() != "10.88.1.0/24" {
		t.Errorf("after the other is gone it became %s", prefix)
	}
}

func TestTwoNetworksAndStrangers(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	stranger := addLink(t, "other0", "192.0.2.1/24")
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	foreign := c.AddTable(&nftables.Table{Name: "cocoon-x", Family: nftables.TableFamilyINet})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "ctsomebody"
	if err := netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TAP}); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t)
	t.Cleanup(func() {
		c.DelTable(foreign)
		_ = c.Flush()
		_ = netlink.LinkDel(&netlink.Tuntap{LinkAttrs: attrs})
		assertNothingBut(t, stranger)
	})

	a := build(t, Config{StateDir: t.TempDir(), NAT: true})
	b := build(t, Config{StateDir: t.TempDir(), NAT: true, Name: "second", Bridge: "cocoon1"})
	for _, n := range []*Network{a, b} {
		if err := n.Setup(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if p, _ := a.Subnet(); p.Overlaps(first(b.Subnet())) {
		t.Error("two networks share a subnet")
	}
	id := vm.NewID()
	nic, err := b.Attach(t.Context(), id, "web", 0, vm.NICSpec{})
	if err != nil {
		t.Fatal(err)
	}
	if removed, _, err := a.Sweep(t.Context(), nil, everybody); err != nil || len(removed) != 0 {
		t.Errorf("one network swept %v of others (%v)", removed, err)
	}
	if err := a.Teardown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := netlink.LinkByName(nic.Tap); err != nil {
		t.Errorf("tearing down one network took the tap of the other: %v", err)
	}
	if v, _ := host.Sysctl(forwardKey); v != "1" {
		t.Error("tearing down one network turned off forwarding under the other")
	}
	if err := b.Teardown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := host.SetSysctl(forwardKey, "0"); err != nil { // see restoreForward: the second network found it already on
		t.Fatal(err)
	}
	if after := snapshot(t); !slices.Equal(after, before) {
		t.Errorf("left %v, before %v", after, before)
	}
}

func first(p netip.Prefix, _ netip.Addr) netip.Prefix { return p }

func assertNothingBut(t *testing.T, l netlink.Link) {
	t.Helper()
	if err := netlink.LinkDel(l); err != nil {
		t.Errorf("the stranger's link is gone: %v", err)
	}
	assertClean(t)
}

func TestForwardingComesBack(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	for _, before := range []string{"0", "1"} {
		if err := host.SetSysctl(forwardKey, before); err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		for range 2 { // the second daemon must not mistake our own 1 for the host's
			if err := build(t, Config{StateDir: dir}).Setup(t.Context()); err != nil {
				t.Fatal(err)
			}
			if v, _ := host.Sysctl(forwardKey); v != "1" {
				t.Errorf("forwarding is %s", v)
			}
		}
		if err := build(t, Config{StateDir: dir}).Teardown(t.Context()); err != nil {
			t.Fatal(err)
		}
		if v, _ := host.Sysctl(forwardKey); v != before {
			t.Errorf("forwarding was %s and became %s", before, v)
		}
	}
	if err := host.SetSysctl(forwardKey, "0"); err != nil {
		t.Fatal(err)
	}
}

// A damaged lease file does not stop the network from being set up. The file is kept, and the addresses of VMs that are down
// are restored from their records before any is leased again.
func TestDamagedLeases(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	for name, damage := range map[string]func(text string) string{
		"truncated": func(text string) string { return text[:len(text)/2] },
		"garbage":   func(string) string { return "garbage" },
		"twice": func(text string) string {
			return "[" + strings.Trim(text, "[]\n") + "," + strings.Trim(text, "[]\n") + "]"
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			n := build(t, Config{StateDir: dir, NAT: true})
			setup := func() {
				t.Helper()
				if err := n.Setup(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			setup()
			id := vm.NewID()
			nic, err := n.Attach(t.Context(), id, "asleep", 0, vm.NICSpec{})
			if err == nil {
				err = n.Detach(t.Context(), nic)
			}
			if err == nil {
				err = n.Teardown(t.Context()) // it writes the file
			}
			path := n.cfg.LeasePath
			text, rerr := os.ReadFile(path)
			if err = errors.Join(err, rerr); err == nil {
				err = os.WriteFile(path, []byte(damage(string(text))), 0o644)
			}
			unfinished := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp-1") // the daemon was killed while it wrote
			if err = errors.Join(err, os.WriteFile(unfinished, []byte("["), 0o600)); err != nil {
				t.Fatal(err)
			}
			n = build(t, Config{StateDir: dir, NAT: true})
			setup()
			if _, err := os.Stat(unfinished); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("after the next start the unfinished file is there: %v", err)
			}
			defer func() { _ = n.Teardown(context.WithoutCancel(t.Context())) }()
			kept, err := filepath.Glob(path + ".damaged-*")
			if err != nil || len(kept) != 1 || n.DamagedLeases() != 1 {
				t.Errorf("kept aside: %v, counted %d", kept, n.DamagedLeases())
			}
			if err := n.Remember(t.Context(), []network.Held{{ID: id, Name: "asleep", NIC: nic}}); err != nil {
				t.Fatal(err)
			}
			leases, err := n.file.Read()
			if err != nil || len(leases) != 1 || leases[0].ID != id || leases[0].IP.String() != nic.IP {
				t.Errorf("leases %+v, %v", leases, err)
			}
			again, err := n.Attach(t.Context(), id, "asleep", 0, vm.NICSpec{})
			if err != nil || again.IP != nic.IP || again.MAC != nic.MAC {
				t.Errorf("it has %+v (%v), before %+v", again, err, nic)
			}
		})
	}
}

func TestSweepAfterKillLeavesNothing(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	dir := t.TempDir()
	for _, lines := range []int{0, 1, 2, 3, 4, 5, 8, 11} {
		churn(t, dir, lines)
		n := build(t, Config{StateDir: dir, NAT: true})
		if err := n.Setup(t.Context()); err != nil {
			t.Fatalf("after a kill at line %d: %v", lines, err)
		}
		if _, _, err := n.Sweep(t.Context(), nil, everybody); err != nil {
			t.Errorf("after a kill at line %d: %v", lines, err)
		}
		if err := n.Teardown(t.Context()); err != nil {
			t.Errorf("after a kill at line %d: %v", lines, err)
		}
		assertClean(t)
	}
}

// everybody is for sweeps in which all VMs are known.
func everybody(vm.ID) bool { return true }

const churnEnv = "COCOON_TEST_CHURN"

// churn runs TestChurn in another process and kills it after it has printed that many lines.
func churn(t *testing.T, dir string, lines int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestChurn$")
	cmd.Env = append(os.Environ(), churnEnv+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	sc := bufio.NewScanner(out)
	for range lines {
		if !sc.Scan() {
			t.Fatal("churn ended by itself")
		}
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// TestChurn runs in the process that TestSweepAfterKillLeavesNothing kills: it works until then.
func TestChurn(t *testing.T) {
	dir := os.Getenv(churnEnv)
	if dir == "" {
		return
	}
	fmt.Println("start")
	n := build(t, Config{StateDir: dir, NAT: true})
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	fmt.Println("up")
	go func() { _ = n.Run(context.WithoutCancel(t.Context())) }()
	for i := 0; ; i++ {
		nic, err := n.Attach(t.Context(), vm.NewID(), fmt.Sprint("vm", i), 0, vm.NICSpec{})
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("attached", nic.Tap)
		if i%3 == 0 {
			if err := n.Detach(t.Context(), nic); err != nil {
				t.Fatal(err)
			}
			fmt.Println("detached")
			if err := n.Release(t.Context(), nic); err != nil {
				t.Fatal(err)
			}
			fmt.Println("released")
		}
	}
}

func TestTapOpensAsAHypervisorDoes(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, MTU: 1400})
	nic, err := n.Attach(t.Context(), vm.NewID(), "web", 0, vm.NICSpec{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := netlink.LinkByName(nic.Tap)
	if err != nil || l.Attrs().MTU != 1400 || nic.MTU != 1400 {
		t.Errorf("tap %+v, %v", l.Attrs(), err)
	}
	f, err := os.OpenFile(host.TunDevice, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ifr, err := unix.NewIfreq(nic.Tap)
	if err != nil {
		t.Fatal(err)
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, ifr); err != nil {
		t.Errorf("open tap: %v", err)
	}
	if _, err := n.Attach(t.Context(), vm.NewID(), "other", 0, vm.NICSpec{}); err != nil {
		t.Errorf("attach beside a running one: %v", err)
	}
	if err := n.Setup(t.Context()); err != nil {
		t.Errorf("setup beside a running one: %v", err)
	}
	if err := n.Detach(t.Context(), nic); err != nil {
		t.Errorf("detach of an open tap: %v", err)
	}
}
