package bridge

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// Real DHCP clients request a lease. The test reads the results from the clients' files.
func TestClients(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{
		Subnet: testSubnet, NAT: true, DNS: []string{"9.9.9.9"}, MTU: 1400, Search: []string{"pods.example", "example"},
		Routes: []Route{{To: "192.168.0.0/16", Via: "10.88.7.9"}},
	})
	for name, client := range map[string]struct {
		tool  string
		run   func(t *testing.T, g guest, tool string)
		words []string
	}{
		"udhcpc": {"busybox", udhcpc, []string{
			"lease=86400", "mtu=1400", "dns=9.9.9.9", "domain=pods.example", "search=pods.example example",
			"serverid=10.88.7.1", "router=10.88.7.1", "staticroutes=0.0.0.0/0 10.88.7.1 192.168.0.0/16 10.88.7.9",
		}},
		"dhclient": {"dhclient", dhclient, []string{
			"new_dhcp_lease_time=86400", "new_dhcp_renewal_time=43200", "new_dhcp_rebinding_time=75600", "new_interface_mtu=1400",
			"new_domain_name_servers=9.9.9.9", "new_domain_search=pods.example. example.", "new_routers=10.88.7.1",
			"new_rfc3442_classless_static_routes=0 10 88 7 1 16 192 168 10 88 7 9",
		}},
		"dhcpcd": {"dhcpcd", dhcpcd, []string{
			"new_dhcp_lease_time=86400", "new_interface_mtu=1400", "new_domain_name_servers=9.9.9.9", "new_domain_search=pods.example example",
			"new_classless_static_routes=0.0.0.0/0 10.88.7.1 192.168.0.0/16 10.88.7.9",
		}},
		"systemd-networkd": {"/lib/systemd/systemd-networkd", networkd, []string{
			"T1=43200", "T2=75600", "LIFETIME=86400", "MTU=1400", "DNS=9.9.9.9", "DOMAINNAME=pods.example", "DOMAIN_SEARCH_LIST=pods.example example",
			"ROUTES=0.0.0.0/0,10.88.7.1 192.168.0.0/16,10.88.7.9", "CLIENTID=",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			tool := need.Tool(t, client.tool)
			g := newGuest(t, n, "with-"+strings.ReplaceAll(name, "systemd-", ""))
			client.run(t, g, tool)
			told := told(t, "/run/told")
			for _, w := range append(client.words, g.nic.IP) {
				if !strings.Contains(told, w) {
					t.Errorf("%q is not in what the client was told:\n%s", w, told)
				}
			}
		})
	}
}

// private gives the test its own folders where clients keep theirs. The test binary's mounts are its own.
func private(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range append(dirs, "/run") {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("none", dir, "tmpfs", 0, "mode=0755"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
}

// script returns the script that clients call with a lease in its environment.
func script(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "script")
	const text = "#!/bin/sh\ncase \"$1$reason\" in *bound*|*BOUND*|*REBOOT*) env > /run/told.new && mv /run/told.new /run/told;; esac\n"
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// told waits for the file that a client writes.
func told(t *testing.T, path string) string {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); <-time.After(10 * time.Millisecond) {
		if b, err := os.ReadFile(path); err == nil {
			return string(b)
		}
	}
	t.Fatal("the client got no lease")
	return ""
}

// run starts a client in the guest and kills it when the test ends.
func (g guest) run(t *testing.T, tool string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, tool, args...)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID} // some have helper processes, which end with it
	g.do(cmd.Start)
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
	})
}

func udhcpc(t *testing.T, g guest, tool string) {
	t.Helper()
	private(t)
	g.run(t, tool, "udhcpc", "-i", "eth0", "-f", "-s", script(t), "-O", "search", "-O", "staticroutes", "-O", "mtu")
}

func dhclient(t *testing.T, g guest, tool string) {
	t.Helper()
	private(t)
	conf := filepath.Join(t.TempDir(), "conf")
	const text = `option rfc3442-classless-static-routes code 121 = array of unsigned integer 8;
request subnet-mask, routers, domain-name-servers, domain-search, interface-mtu, dhcp-renewal-time, dhcp-rebinding-time, rfc3442-classless-static-routes;
`
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	g.run(t, tool, "-4", "-d", "-cf", conf, "-lf", "/run/leases", "-pf", "/run/pid", "-sf", script(t), "eth0")
}

func dhcpcd(t *testing.T, g guest, tool string) {
	t.Helper()
	private(t, "/var/lib/dhcpcd")
	conf := filepath.Join(t.TempDir(), "conf")
	const text = "noipv6\nnoarp\nnodelay\nduid\noption classless_static_routes, interface_mtu, domain_search, domain_name_servers, routers\n"
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	g.run(t, tool, "-4", "-B", "-f", conf, "-c", script(t), "eth0")
}

func networkd(t *testing.T, g guest, tool string) {
	t.Helper()
	g.runNetworkd(t, tool, "leases", "[Match]\nName=eth0\n[Network]\nDHCP=ipv4\nLinkLocalAddressing=no\n[DHCPv4]\nUseDomains=yes\nUseMTU=yes\n")
}

// runNetworkd makes networkd configure eth0 by text. networkd keeps its results in a file in the folder, named after the link's
// index.
func (g guest) runNetworkd(t *testing.T, tool, folder, text string) {
	t.Helper()
	private(t, "/etc/systemd/network")
	if err := os.WriteFile("/etc/systemd/network/eth0.network", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir("/run/systemd", 0o755); err != nil { // it creates the folders below for its own user
		t.Fatal(err)
	}
	// It finds devices in /sys. If that is read-only, it does not wait for udev.
	index := 0
	g.do(func() error {
		if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_RDONLY, ""); err != nil {
			return err
		}
		eth0, err := netlink.LinkByName("eth0")
		if err == nil {
			index = eth0.Attrs().Index
		}
		return err
	})
	if err := os.Symlink(fmt.Sprintf("/run/systemd/netif/%s/%d", folder, index), "/run/told"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount("/sys", unix.MNT_DETACH) })
	g.run(t, tool)
}

// A lease is renewed by unicast from the leased address, shown, declined and released by RFC 2131. Messages with another
// guest's hardware address are dropped.
func TestConversation(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true, DNS: []string{}})
	a, b := newGuest(t, n, "a"), newGuest(t, n, "b")
	lease := a.request(t)
	a.configure(a.nic.IP)
	b.configure(b.nic.IP)
	var client *nclient4.Client
	a.do(func() (err error) {
		client, err = nclient4.New("eth0", nclient4.WithTimeout(time.Second), nclient4.WithRetry(5))
		return err
	})
	defer client.Close()
	if renewed, err := client.Renew(t.Context(), lease); err != nil || renewed.ACK.YourIPAddr.String() != a.nic.IP {
		t.Errorf("renewed: %+v (%v)", renewed, err)
	}
	if told, err := client.Inform(t.Context(), net.ParseIP(a.nic.IP)); err != nil || !told.YourIPAddr.IsUnspecified() || told.Router()[0].String() != a.nic.Gateway {
		t.Errorf("informed: %v (%v)", told, err)
	}
	// b sends declines of a's address in a's name, complete and in fragments: none of it arrives.
	forged := message(t, a.nic, dhcpv4.MessageTypeDecline, dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(a.nic.IP))))
	b.says(forged)
	b.says(append(forged, make([]byte, 3000)...))
	b.says([]byte("noise"))
	b.says(message(t, b.nic, dhcpv4.MessageTypeRelease, dhcpv4.WithClientIP(net.ParseIP(b.nic.IP))))
	waitFor(t, "b's release is heard", func() bool { return n.DHCPMessages()["released"] == 1 })
	if heard := n.DHCPMessages(); heard["declined"] != 0 {
		t.Errorf("a guest spoke for another: %v", heard)
	}
	a.says(forged) // from a the same message is valid
	waitFor(t, "a's decline is heard", func() bool { return n.DHCPMessages()["declined"] == 1 })
	if again := a.request(t); again.ACK.YourIPAddr.String() != a.nic.IP {
		t.Errorf("after a decline a running guest was told %s", again.ACK.YourIPAddr)
	}
	id := vm.NewID()
	if err := n.Detach(t.Context(), a.nic); err != nil {
		t.Fatal(err)
	}
	if err := n.Release(t.Context(), a.nic); err != nil {
		t.Fatal(err)
	}
	if nic, err := n.Attach(t.Context(), id, "a", 0, vm.NICSpec{}); err != nil || nic.IP == a.nic.IP || nic.MAC != a.nic.MAC {
		t.Errorf("after the quarantine began the name got %+v (%v)", nic, err)
	}
}

func message(t *testing.T, of vm.NIC, kind dhcpv4.MessageType, change ...dhcpv4.Modifier) []byte {
	t.Helper()
	hw, err := net.ParseMAC(of.MAC)
	if err != nil {
		t.Fatal(err)
	}
	change = append(change, dhcpv4.WithHwAddr(hw), dhcpv4.WithMessageType(kind), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.ParseIP(of.Gateway))))
	m, err := dhcpv4.New(change...)
	if err != nil {
		t.Fatal(err)
	}
	return m.ToBytes()
}

// says sends payload to the DHCP server from the guest's own address.
func (g guest) says(payload []byte) {
	g.t.Helper()
	g.do(func() error {
		c, err := (&net.Dialer{}).DialContext(g.t.Context(), "udp4", net.JoinHostPort(g.nic.Gateway, "67"))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(payload)
		return err
	})
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it never came true that ", what)
		}
	}
}
