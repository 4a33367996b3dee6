package bridge

import (
	"context"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// guest is a separate network stack behind a tap of the network, like a VM: a namespace with eth0, and a pump that copies
// frames between the two taps as a hypervisor does.
type guest struct {
	t   *testing.T
	ns  string
	id  vm.ID
	nic vm.NIC
}

func newGuest(t *testing.T, n *Network, name string, ports ...vm.PortMapping) guest {
	t.Helper()
	return newGuestOf(t, n, vm.NewID(), name, vm.NICSpec{Ports: ports})
}

func newGuestOf(t *testing.T, n *Network, id vm.ID, name string, spec vm.NICSpec) guest {
	t.Helper()
	nic, err := n.Attach(t.Context(), id, name, 0, spec)
	if err != nil {
		t.Fatal(err)
	}
	g := guest{t, netns.New(t), id, nic}
	host := openTap(t, nic.Tap)
	var inner *os.File
	g.do(func() error {
		inner = openTap(t, "eth0")
		return g.setMAC(nic.MAC)
	})
	done := make(chan struct{}, 2)
	for _, p := range [][2]*os.File{{host, inner}, {inner, host}} {
		go func() {
			defer func() { done <- struct{}{} }()
			pump(p[0], p[1])
		}()
	}
	t.Cleanup(func() {
		host.Close()
		inner.Close()
		<-done
		<-done
	})
	return g
}

// openTap opens a tap as a hypervisor would, but without the offload header, because two taps are joined.
func openTap(t *testing.T, name string) *os.File {
	t.Helper()
	fd, err := unix.Open(host.TunDevice, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		t.Fatal(err)
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		t.Fatalf("open tap %s: %v", name, err)
	}
	return os.NewFile(uintptr(fd), name)
}

func pump(from, to *os.File) {
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		_, _ = to.Write(buf[:n]) // a frame may be lost, as on a real link
	}
}

// do runs fn on a thread in the guest's namespace.
func (g guest) do(fn func() error) {
	g.t.Helper()
	netns.Do(g.t, g.ns, fn)
}

func (g guest) setMAC(mac string) error {
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	hw, err := net.ParseMAC(mac)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetHardwareAddr(eth0, hw); err != nil {
		return err
	}
	return netlink.LinkSetUp(eth0)
}

// configure gives the guest ip and the default route, and replaces earlier ones.
func (g guest) configure(ip string) {
	g.t.Helper()
	g.do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := setAddress(eth0, netip.PrefixFrom(netip.MustParseAddr(ip), g.nic.Prefix)); err != nil {
			return err
		}
		return netlink.RouteReplace(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: net.ParseIP(g.nic.Gateway)})
	})
}

// patience is how long a packet that should arrive may take. impatience is how long a test waits for a packet that should not
// arrive.
const (
	patience   = time.Minute
	impatience = 200 * time.Millisecond
)

// dials reports whether a TCP connection from the guest to addr succeeds.
func (g guest) dials(addr string, within time.Duration) (ok bool) {
	g.t.Helper()
	g.do(func() error {
		ok = dial(g.t, addr, within)
		return nil
	})
	return ok
}

func dial(t *testing.T, addr string, within time.Duration) bool {
	t.Helper()
	c, err := (&net.Dialer{Timeout: within}).DialContext(t.Context(), "tcp", addr)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// pings reports whether to answers an echo request from the guest.
func (g guest) pings(to string, within time.Duration) (ok bool) {
	g.t.Helper()
	g.do(func() error {
		c, err := listenICMP(to)
		if err != nil {
			return err
		}
		defer c.Close()
		ok = ping(c, to, within)
		return nil
	})
	return ok
}

func listenICMP(to string) (*icmp.PacketConn, error) {
	if netip.MustParseAddr(to).Is6() {
		return icmp.ListenPacket("ip6:ipv6-icmp", "::")
	}
	return icmp.ListenPacket("ip4:icmp", "0.0.0.0")
}

func ping(c *icmp.PacketConn, to string, within time.Duration) bool {
	var ask, answer icmp.Type = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	if netip.MustParseAddr(to).Is6() {
		ask, answer = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	deadline := time.Now().Add(within)
	buf := make([]byte, 1500)
	for seq := 1; time.Now().Before(deadline); seq++ {
		msg, err := (&icmp.Message{Type: ask, Body: &icmp.Echo{ID: 7, Seq: seq}}).Marshal(nil)
		if err != nil {
			return false
		}
		if _, err := c.WriteTo(msg, &net.IPAddr{IP: net.ParseIP(to)}); err != nil {
			return false
		}
		_ = c.SetReadDeadline(time.Now().Add(min(within, 200*time.Millisecond)))
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				break
			}
			if m, err := icmp.ParseMessage(ask.Protocol(), buf[:n]); err == nil && m.Type == answer && from.String() == to {
				return true
			}
		}
	}
	return false
}

// listen serves TCP in the namespace at ns ("" is the test's own) and returns the address. The channel receives the address of
// each client.
func listen(t *testing.T, ns, addr string) (string, <-chan string) {
	t.Helper()
	var l net.Listener
	open := func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", addr)
		return err
	}
	if ns == "" {
		if err := open(); err != nil {
			t.Fatal(err)
		}
	} else {
		netns.Do(t, ns, open)
	}
	t.Cleanup(func() { l.Close() })
	peers := make(chan string, 16)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			peers <- host
			c.Close()
		}
	}()
	return l.Addr().String(), peers
}

// start sets the network up and serves it until the test ends. After that nothing of it may be left.
func start(t *testing.T, cfg Config) *Network {
	t.Helper()
	if cfg.StateDir == "" {
		cfg.StateDir = t.TempDir()
	}
	n := build(t, cfg)
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error("run:", err)
		}
		if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
			t.Error("teardown:", err)
		}
		assertClean(t)
	})
	return n
}

// outside creates a network beyond the host: a namespace connected by a veth, with 198.51.100.1 on the host's end and
// 198.51.100.2 on its own.
func outside(t *testing.T) string {
	t.Helper()
	ns := netns.New(t)
	f, err := os.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "uplink"
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(f.Fd()))}); err != nil {
		t.Fatal(err)
	}
	up := func(name, cidr string) error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if err := setAddress(l, netip.MustParsePrefix(cidr)); err != nil {
			return err
		}
		return netlink.LinkSetUp(l)
	}
	if err := up("uplink", "198.51.100.1/24"); err != nil {
		t.Fatal(err)
	}
	netns.Do(t, ns, func() error { return up("eth0", "198.51.100.2/24") })
	t.Cleanup(func() {
		if l, err := netlink.LinkByName("uplink"); err == nil {
			_ = netlink.LinkDel(l)
		}
	})
	return ns
}

// addPort connects the namespace at ns to a bridge by a veth, and gives its eth0 an address.
func addPort(t *testing.T, br netlink.Link, ns, cidr string) {
	t.Helper()
	f, err := os.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = "port0", br.Attrs().Index
	attrs.HardwareAddr = net.HardwareAddr{0xfe, 0x54, 0, 0, 0, 0x50} // as high as another hypervisor sets it
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(f.Fd()))}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	if err := netlink.LinkSetUp(veth); err != nil {
		t.Fatal(err)
	}
	netns.Do(t, ns, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := setAddress(l, netip.MustParsePrefix(cidr)); err != nil {
			return err
		}
		return netlink.LinkSetUp(l)
	})
}
