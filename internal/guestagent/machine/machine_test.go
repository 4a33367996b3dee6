package machine

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestFiles(t *testing.T) {
	root := t.TempDir()
	etc, m := filepath.Join(root, "etc"), machineAt(root, true, nil)
	id := guestagent.Identity{
		Hostname: "web-0", Hosts: []string{"10.0.0.9 db", "10.0.0.8\nevil"},
		NICs: []vm.NIC{{IP: "10.0.0.2", DNS: []string{"10.0.0.1", "1.1.1.1"}}, {DNS: []string{"8.8.8.8", "9.9.9.9"}}},
	}
	if err := os.Mkdir(etc, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/run/elsewhere/resolv.conf", etc+"/resolv.conf"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := m.writeFiles(id, anew); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"hostname":    "web-0\n",
		"resolv.conf": "nameserver 10.0.0.1\nnameserver 1.1.1.1\nnameserver 8.8.8.8\n",
		"hosts":       "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n10.0.0.2\tweb-0\n10.0.0.9 db\n10.0.0.8 evil\n",
	} {
		if got, err := os.ReadFile(filepath.Join(etc, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if entries, _ := os.ReadDir(etc); len(entries) != 3 {
		t.Errorf("left behind: %v", entries)
	}
	id.Hosts, id.Resolver = []string{"10.0.0.2 web-0.sub.ns web-0", "10.0.0.9\tdb\tdata"}, []string{"search ns.svc", "options ndots:2\nnameserver 6.6.6.6"}
	if err := m.writeFiles(id, anew); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"resolv.conf": "nameserver 10.0.0.1\nnameserver 1.1.1.1\nnameserver 8.8.8.8\nsearch ns.svc\noptions ndots:2 nameserver 6.6.6.6\n",
		"hosts":       "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n10.0.0.2 web-0.sub.ns web-0\n10.0.0.9\tdb\tdata\n",
	} {
		if got, err := os.ReadFile(filepath.Join(etc, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if err := m.writeFiles(guestagent.Identity{Hostname: "lone"}, anew); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(etc + "/hosts"); !strings.Contains(string(got), "127.0.1.1\tlone\n") {
		t.Errorf("hosts of a guest without address: %q", got)
	}
	if got, _ := os.ReadFile(etc + "/resolv.conf"); !strings.Contains(string(got), "10.0.0.1") {
		t.Errorf("resolv.conf was touched without a name server: %q", got)
	}
}

func TestTune(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"kernel/shm_rmid_forced", "net/ipv4/conf/eth0.5/rp_filter"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	err := tune(dir, []vm.Sysctl{{Name: "kernel.shm_rmid_forced", Value: "1"}, {Name: "net/ipv4/conf/eth0.5/rp_filter", Value: "2"}})
	one, _ := os.ReadFile(dir + "/kernel/shm_rmid_forced")
	two, _ := os.ReadFile(dir + "/net/ipv4/conf/eth0.5/rp_filter")
	if err != nil || string(one)+string(two) != "12" {
		t.Errorf("%q and %q, %v", one, two, err)
	}
	if err := tune(dir, []vm.Sysctl{{Name: "kernel.none", Value: "1"}}); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "no such setting") {
		t.Errorf("an unknown setting: %v", err)
	}
	if err := tune(dir, []vm.Sysctl{{Name: "kernel", Value: "1"}}); !errdefs.IsInvalid(err) {
		t.Errorf("a folder: %v", err)
	}
}

// inNetns runs the test in its own empty network namespace.
func inNetns(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); errors.Is(err, unix.EPERM) {
		t.Skip("root is needed for a network namespace")
	} else if err != nil {
		t.Fatal(err)
	}
}

const mac = "02:00:00:00:00:07"

func ip(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("ip %v: %v: %s", args, err, out)
	}
	return string(out)
}

func TestConfigure(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("iproute2 is needed")
	}
	inNetns(t)
	if err := Loopback(); err != nil {
		t.Fatal(err)
	}
	ip(t, "link", "add", "guest0", "address", mac, "type", "veth", "peer", "name", "host0")
	ip(t, "link", "set", "host0", "up")
	for _, nic := range []vm.NIC{
		{MAC: mac, IP: "10.1.0.2", Prefix: 24, Gateway: "10.1.0.1", MTU: 1400},
		{MAC: mac, IP: "10.1.0.2", Prefix: 24, Gateway: "10.1.0.1", MTU: 1400}, // again: nothing changes
		{MAC: mac, IP: "fd00::2", Prefix: 64, Gateway: "fd00::1"},
		{MAC: mac, IP: "10.2.0.2", Prefix: 32, Gateway: "10.3.0.1"},
		{
			MAC: mac, IP: "10.2.0.2", Prefix: 32, Gateway: "10.3.0.1", Addresses: []string{"10.4.0.2/24", "fd01::2/64"},
			Routes: []vm.Route{{To: "10.5.0.0/16", Via: "10.4.0.1"}, {To: "fd05::/32", Via: "fd01::1"}, {To: "10.6.0.0/16"}, {To: "::/0", Via: "fe80::1"}},
		},
	} {
		if err := configureAll(t, []vm.NIC{nic}, nil); err != nil {
			t.Fatalf("%+v: %v", nic, err)
		}
	}
	link, err := net.InterfaceByName("guest0")
	if err != nil || link.MTU != 1400 || link.Flags&net.FlagUp == 0 {
		t.Errorf("link %+v, %v", link, err)
	}
	addrs := ip(t, "addr", "show", "guest0")
	for want, is := range map[string]bool{
		"inet 10.2.0.2/32": true, "inet 10.4.0.2/24": true, "inet6 fd01::2/64": true, "inet6 fd00::2": false, "inet 10.1.0.2": false,
	} {
		if strings.Contains(addrs, want) != is {
			t.Errorf("%q is %v in %s", want, !is, addrs)
		}
	}
	routes := ip(t, "route") + ip(t, "-6", "route")
	for _, want := range []string{
		"default via 10.3.0.1 dev guest0", "10.5.0.0/16 via 10.4.0.1 dev guest0", "10.6.0.0/16 dev guest0",
		"default via fe80::1 dev guest0", "fd05::/32 via fd01::1 dev guest0",
	} {
		if !strings.Contains(routes, want) {
			t.Errorf("%q is not in %s", want, routes)
		}
	}
	for _, bad := range []vm.NIC{
		{MAC: "no"},
		{MAC: mac, IP: "no"},
		{MAC: mac, IP: "10.0.0.1", Prefix: 33},
		{MAC: mac, IP: "10.0.0.1", Prefix: 8, Gateway: "fd00::1"},
		{MAC: mac, IP: "10.0.0.1", Prefix: 8, Addresses: []string{"10.0.0.2"}},
		{MAC: mac, IP: "10.0.0.1", Prefix: 8, Routes: []vm.Route{{To: "no"}}},
		{MAC: mac, IP: "10.0.0.1", Prefix: 8, Routes: []vm.Route{{To: "fd00::/8", Via: "10.0.0.2"}}},
	} {
		if err := configureAll(t, []vm.NIC{bad}, nil); !errdefs.IsInvalid(err) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if err := configureAll(t, []vm.NIC{{MAC: "02:00:00:00:00:08"}}, nil); !errdefs.IsNotFound(err) {
		t.Errorf("a missing interface: %v", err)
	}
}

// configureAll is configure in the namespace of the test; a socket stays in its namespace.
func configureAll(t *testing.T, nics []vm.NIC, olds []string) error {
	t.Helper()
	s, err := openNetlink()
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	return s.configure(t.Context(), nics, olds)
}

// TestOff: a machine that cannot cut its power is reset by its keyboard controller, and no other one.
func TestOff(t *testing.T) {
	dir := t.TempDir()
	cmdline, by := filepath.Join(dir, "cmdline"), filepath.Join(dir, "type")
	for args, want := range map[string][]int{
		"quiet panic=-1\n":                   {unix.LINUX_REBOOT_CMD_POWER_OFF},
		"quiet " + vm.ArgOff + " reboot=t\n": {unix.LINUX_REBOOT_CMD_RESTART, unix.LINUX_REBOOT_CMD_POWER_OFF},
	} {
		if err := errors.Join(os.WriteFile(cmdline, []byte(args), 0o600), os.WriteFile(by, []byte("triple"), 0o600)); err != nil {
			t.Fatal(err)
		}
		var got []int
		off(cmdline, by, func(how int) error { got = append(got, how); return nil })
		text, err := os.ReadFile(by)
		if err != nil || !slices.Equal(got, want) || (string(text) == "kbd") != (len(want) == 2) {
			t.Errorf("%q: %x, %q, %v", args, got, text, err)
		}
	}
}
