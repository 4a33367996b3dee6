package cni

import (
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/vm"
)

// Packets of a guest to closed networks end at its tap; it reaches its own subnet, its name server and open networks. A UDP
// packet of the guest either arrives at a socket of the host, which has all those addresses, or does not.
func TestClosedEndsAtTheTap(t *testing.T) {
	plugins(t)
	dir := t.TempDir()
	write(t, dir, "10.124.0.0/24", true)
	cfg := at(dir)
	cfg.Closed, cfg.Open = []string{"10.0.0.0/8", "fd99::/16"}, []string{"10.9.9.9", "169.254.20.0/24", "fd99:7::/32"}
	n := build(t, cfg)
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	nic, err := n.Attach(t.Context(), vm.NewID(), "web", 0, vm.NICSpec{})
	if err != nil {
		t.Fatal(err)
	}
	tap := open(t, nic)
	defer tap.Close()
	gateway := gatewayMAC(t, nic)
	for name, tt := range map[string]struct {
		to   string
		want bool
	}{
		"own subnet":                {"10.124.0.1:80", true},
		"elsewhere":                 {"203.0.113.9:80", true},
		"elsewhere by IPv6":         {"[2001:db8:9::1]:80", true},
		"metadata":                  {"169.254.169.254:80", false},
		"metadata by IPv6":          {"[fd00:ec2::254]:80", false},
		"name server":               {"9.9.9.9:53", true},
		"closed by name":            {"10.9.9.8:80", false},
		"closed by name, IPv6":      {"[fd99::1]:80", false},
		"opened":                    {"10.9.9.9:80", true},
		"opened of what is closed":  {"169.254.20.10:53", true},
		"opened by IPv6":            {"[fd99:7::1]:80", true},
		"a service named 53 beyond": {"169.254.169.254:53", false},
	} {
		t.Run(name, func(t *testing.T) {
			at := netip.MustParseAddrPort(tt.to)
			ipnet := &net.IPNet{IP: at.Addr().AsSlice(), Mask: net.CIDRMask(at.Addr().BitLen(), at.Addr().BitLen())}
			if at.Addr().String() != nic.Gateway {
				if err := netlink.AddrReplace(lo, &netlink.Addr{IPNet: ipnet, Flags: unix.IFA_F_NODAD}); err != nil {
					t.Fatal(err)
				}
			}
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			packet := datagram(t, nic, gateway, at)
			within := 300 * time.Millisecond
			if tt.want {
				within = 10 * time.Second
			}
			got, buf := false, make([]byte, 64)
			for end := time.Now().Add(within); !got && time.Now().Before(end); {
				if _, err := tap.Write(packet); err != nil {
					t.Fatal(err)
				}
				_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
				k, _, err := c.ReadFrom(buf)
				got = err == nil && string(buf[:k]) == "hello"
			}
			if got != tt.want {
				t.Errorf("%s is reached: %v, want %v", tt.to, got, tt.want)
			}
		})
	}
}

// open opens the tap of an interface as a hypervisor would.
func open(t *testing.T, nic vm.NIC) *os.File {
	t.Helper()
	var fd int
	err := host.Space{Path: nic.NetNS}.Do(func() (err error) {
		fd, err = unix.Open(host.TunDevice, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		ifr, err := unix.NewIfreq(nic.Tap)
		if err != nil {
			return err
		}
		ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
	})
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), nic.Tap)
}

// gatewayMAC returns the MAC of the plugins' bridge, which has the gateway's address.
func gatewayMAC(t *testing.T, nic vm.NIC) net.HardwareAddr {
	t.Helper()
	links, err := host.ListLinks()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		addrs, _ := netlink.AddrList(l, netlink.FAMILY_V4)
		if slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.String() == nic.Gateway }) {
			return l.Attrs().HardwareAddr
		}
	}
	t.Fatalf("no link has %s", nic.Gateway)
	return nil
}

// datagram returns a frame with UDP "hello" from the guest.
func datagram(t *testing.T, nic vm.NIC, gateway net.HardwareAddr, at netip.AddrPort) []byte {
	t.Helper()
	mac, err := net.ParseMAC(nic.MAC)
	if err != nil {
		t.Fatal(err)
	}
	from := netip.MustParseAddr(nic.IP)
	if at.Addr().Is6() {
		from = netip.MustParseAddr("2001:db8:7::7")
	}
	const length = 8 + 5
	udp := slices.Concat([]byte{0x30, 0x39, byte(at.Port() >> 8), byte(at.Port()), 0, length, 0, 0}, []byte("hello"))
	pseudo := slices.Concat(from.AsSlice(), at.Addr().AsSlice(), []byte{0, unix.IPPROTO_UDP, 0, length}, udp)
	sum := checksum(pseudo)
	udp[6], udp[7] = byte(sum>>8), byte(sum)
	if at.Addr().Is6() {
		header := slices.Concat([]byte{0x60, 0, 0, 0, 0, length, unix.IPPROTO_UDP, 64}, from.AsSlice(), at.Addr().AsSlice())
		return slices.Concat(gateway, mac, []byte{0x86, 0xdd}, header, udp)
	}
	header := slices.Concat([]byte{0x45, 0, 0, 20 + length, 0, 0, 0x40, 0, 64, unix.IPPROTO_UDP, 0, 0}, from.AsSlice(), at.Addr().AsSlice())
	sum = checksum(header)
	header[10], header[11] = byte(sum>>8), byte(sum)
	return slices.Concat(gateway, mac, []byte{8, 0}, header, udp)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
