package machine

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/vm"
)

const (
	sourceMAC = "02:00:00:00:00:01"
	otherMAC  = "02:00:00:00:00:02"
)

// TestCloneNetwork moves the interfaces of a source, without carrier as in a clone, to the clone's identity.
func TestCloneNetwork(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("iproute2 is needed")
	}
	inNetns(t)
	for _, dev := range []struct{ name, mac string }{{"guest0", sourceMAC}, {"guest1", otherMAC}} {
		ip(t, "link", "add", dev.name, "address", dev.mac, "type", "veth", "peer", "name", "host-"+dev.name) // down: no carrier
	}
	source := []vm.NIC{
		{MAC: sourceMAC, IP: "10.1.0.2", Prefix: 24, Gateway: "10.1.0.1"},
		{MAC: otherMAC, IP: "fd00::2", Prefix: 64, Gateway: "fd00::1"},
	}
	if err := configureAll(t, source, nil); err != nil {
		t.Fatal(err)
	}
	ip(t, "route", "add", "192.0.2.0/24", "via", "10.1.0.7")
	ip(t, "addr", "add", "10.9.0.2/24", "dev", "guest0")
	clone := []vm.NIC{
		{MAC: "02:00:00:00:01:01", IP: "10.1.0.3", Prefix: 24, Gateway: "10.1.0.1", MTU: 1400},
		{MAC: "02:00:00:00:01:02", IP: "fd00::3", Prefix: 64, Gateway: "fd00::1"},
	}
	for range 2 { // the second call finds the work of the first
		if err := configureAll(t, clone, []string{sourceMAC, otherMAC}); err != nil {
			t.Fatal(err)
		}
		for _, dev := range []struct{ name, mac string }{{"guest0", clone[0].MAC}, {"guest1", clone[1].MAC}} {
			link, err := net.InterfaceByName(dev.name)
			if err != nil || link.HardwareAddr.String() != dev.mac || link.Flags&net.FlagUp == 0 {
				t.Errorf("link %+v, %v", link, err)
			}
		}
		addrs := ip(t, "-o", "addr")
		for want, is := range map[string]bool{
			"inet 10.1.0.3/24": true, "inet 10.1.0.2": false, "inet 10.9.0.2": false, "inet6 fd00::3/64": true, "inet6 fd00::2": false,
		} {
			if strings.Contains(addrs, want) != is {
				t.Errorf("%q is %v in %s", want, !is, addrs)
			}
		}
		routes := ip(t, "route") + ip(t, "-6", "route")
		for want, is := range map[string]bool{"default via 10.1.0.1": true, "default via fd00::1": true, "192.0.2.0": false} {
			if strings.Contains(routes, want) != is {
				t.Errorf("%q is %v in %s", want, !is, routes)
			}
		}
	}
	// A clone that has the MAC of the source (the host replaced its interface) changes only its address.
	again := []vm.NIC{{MAC: clone[0].MAC, IP: "10.1.0.4", Prefix: 24, Gateway: "10.1.0.1"}}
	if err := configureAll(t, again, []string{clone[0].MAC}); err != nil {
		t.Fatal(err)
	}
	if addrs := ip(t, "-o", "addr", "show", "guest0"); !strings.Contains(addrs, "10.1.0.4/24") || strings.Contains(addrs, "10.1.0.3") {
		t.Errorf("addresses %s", addrs)
	}
	// An interface for which we have no address still loses those of the source.
	dhcp := []vm.NIC{{MAC: sourceMAC}}
	if err := configureAll(t, dhcp, []string{clone[0].MAC}); err != nil {
		t.Fatal(err)
	}
	if addrs := ip(t, "-4", "-o", "addr", "show", "guest0"); addrs != "" {
		t.Errorf("addresses %s", addrs)
	}
}

func TestNetlinkLists(t *testing.T) {
	s, err := openNetlink()
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	links, err := s.links()
	if err != nil {
		t.Fatal(err)
	}
	known, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	if len(links) != len(known) {
		t.Errorf("%d links, Go knows %d", len(links), len(known))
	}
	addrs, err := s.addresses()
	if err != nil {
		t.Fatal(err)
	}
	var got, want []netip.Prefix
	for _, a := range addrs {
		got = append(got, a.prefix)
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, p)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("addresses %v, Go knows %v", got, want)
	}
	if err := s.address(unix.RTM_DELADDR, 0, 1<<30, netip.MustParsePrefix("10.0.0.1/8")); err == nil {
		t.Error("the kernel's refusal was lost")
	}
	if again, err := s.links(); err != nil || len(again) != len(links) {
		t.Errorf("after a refusal: %v, %v", again, err)
	}
}

func TestForgetAndMachineID(t *testing.T) {
	root := t.TempDir()
	write := func(name string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("of the source\n"), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	gone := []string{
		"var/lib/dhcp/dhclient.eth0.leases", "var/lib/dhcp/dhclient.leases", "run/systemd/netif/leases/2",
		"var/lib/systemd/random-seed", "var/lib/NetworkManager/internal-1-eth0.lease", "var/lib/dhcpcd/eth0.lease6",
	}
	stay := []string{"var/lib/dhcp/notes", "var/lib/systemd/timers"}
	for _, name := range append(gone, append(stay, "etc/machine-id", "var/lib/dbus/machine-id")...) {
		write(name)
	}
	for range 2 {
		if err := forget(root); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range gone {
		if _, err := os.Lstat(filepath.Join(root, name)); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
	for _, name := range stay {
		if _, err := os.Lstat(filepath.Join(root, name)); err != nil {
			t.Error(err)
		}
	}
	const id = "0123456789abcdef0123456789abcdef"
	read := func(name string) string {
		b, _ := os.ReadFile(filepath.Join(root, name))
		return string(b)
	}
	if err := machineAt(root, true, nil).writeMachineID(""); err != nil || read("etc/machine-id") != "of the source\n" {
		t.Errorf("without an id: %q, %v", read("etc/machine-id"), err)
	}
	if err := machineAt(root, true, nil).writeMachineID(id); err != nil || read("etc/machine-id") != id+"\n" || read("var/lib/dbus/machine-id") != id+"\n" {
		t.Errorf("ids %q and %q, %v", read("etc/machine-id"), read("var/lib/dbus/machine-id"), err)
	}
	bare := t.TempDir()
	if err := os.MkdirAll(filepath.Join(bare, "var/lib/dbus"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/machine-id", filepath.Join(bare, "var/lib/dbus/machine-id")); err != nil {
		t.Fatal(err)
	}
	if err := machineAt(bare, true, nil).writeMachineID(id); err != nil {
		t.Fatal(err)
	}
	if target, err := os.Readlink(filepath.Join(bare, "var/lib/dbus/machine-id")); err != nil || target != "/etc/machine-id" {
		t.Errorf("the link became %q, %v", target, err)
	}
}

func TestOnDisks(t *testing.T) {
	const mounts = `22 28 0:20 / /sys rw,nosuid - sysfs sysfs rw
28 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
30 28 0:5 / /dev rw - devtmpfs udev rw,size=1
31 28 254:2 / /boot\040efi ro,relatime shared:2 master:1 - vfat /dev/vda2 rw
32 28 254:1 /home /mnt/bind rw - ext4 /dev/vda1 rw
33 28 254:3 / /usr ro - squashfs /dev/vdb ro
34 28 0:40 / /data rw - btrfs /dev/vdc rw,space_cache
35 28 7:0 / /data/loop rw - ext4 /dev/loop0 rw
36 28 0:41 / /merged rw - overlay overlay rw,lowerdir=/l
37 28 0:42 / /net rw - nfs4 10.0.0.1:/x rw
junk
38 28 0:43 /
`
	got, err := onDisks(strings.NewReader(mounts))
	want := []string{"/data/loop", "/data", "/boot efi", "/"}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
}

// FuzzOnDisks only must not panic: mount point names are arbitrary.
func FuzzOnDisks(f *testing.F) {
	f.Add("28 1 254:1 / / rw shared:1 - ext4 /dev/vda1 rw\n")
	f.Add("28 1 254:1 / /a\\040b rw - ext4 /dev/vda1 ro\n - \n")
	f.Fuzz(func(_ *testing.T, s string) { _, _ = onDisks(strings.NewReader(s)) })
}
