//go:build bench

package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network/bridge"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	dhcpClients = 200 // each with a reservation
	dhcpRounds  = 5   // leases per client in one run
	dhcpAtOnce  = 16  // clients that wait for an answer at the same time
)

// leases lets the same clients request their reserved addresses from our DHCP server and from dnsmasq, in turns. It compares
// how many complete exchanges of four messages each server does per second.
func leases(t *testing.T, results *table) {
	dnsmasq := need.Tool(t, "dnsmasq")
	var ours, theirs []float64
	for range leaseRuns {
		ours = append(ours, cocoonLeases(t))
		theirs = append(theirs, dnsmasqLeases(t, dnsmasq))
	}
	a, b := median(ours), median(theirs)
	results.add(row{
		what: "DHCP leases per second", a: fmt.Sprintf("%.0f/s", a), b: fmt.Sprintf("%.0f/s, dnsmasq", b),
		figure: fmt.Sprintf("%.2f ×", a/b), goal: "≥ 1 ×", n: leaseRuns, missed: a < b,
	})
}

const leaseRuns = 5

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

func clientMAC(i int) net.HardwareAddr { return net.HardwareAddr{2, 0xc1, 0, 0, byte(i >> 8), byte(i)} }

func cocoonLeases(t *testing.T) float64 {
	t.Helper()
	n, err := bridge.New(bridge.Config{Name: "bench", Bridge: "bench0", Subnet: "10.66.0.0/16", StateDir: t.TempDir(), Unguarded: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	for i := range dhcpClients {
		if _, err := n.Lease(t.Context(), vm.ID(fmt.Sprint(i)), fmt.Sprint("vm", i), 0, clientMAC(i).String()); err != nil {
			t.Fatal(err)
		}
	}
	return rate(t, "bench0")
}

func dnsmasqLeases(t *testing.T, tool string) float64 {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "bench0"
	br := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(br); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = netlink.LinkDel(br) }()
	addr, err := netlink.ParseAddr("10.66.0.1/16")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(br, addr); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(br); err != nil {
		t.Fatal(err)
	}
	var hosts bytes.Buffer
	for i := range dhcpClients {
		fmt.Fprintf(&hosts, "%s,10.66.1.%d,vm%d,24h\n", clientMAC(i), i+1, i)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hosts"), hosts.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(tool, "--keep-in-foreground", "--conf-file=/dev/null", "--user=root", "--port=0", "--interface=bench0", "--bind-interfaces", "--no-ping",
		"--dhcp-authoritative", "--dhcp-lease-max=10000", "--dhcp-range=10.66.0.0,static,24h", "--pid-file="+filepath.Join(dir, "pid"), "--quiet-dhcp", "--log-facility=/dev/null",
		"--dhcp-hostsfile="+filepath.Join(dir, "hosts"), "--dhcp-leasefile="+filepath.Join(dir, "leases"))
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	return rate(t, "bench0")
}

// rate joins the bridge with a veth and returns how many leases per second all clients behind it get.
func rate(t *testing.T, name string) float64 {
	t.Helper()
	br, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = "benchport", br.Attrs().Index
	port := &netlink.Veth{LinkAttrs: attrs, PeerName: "benchclient"}
	if err := netlink.LinkAdd(port); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = netlink.LinkDel(port) }()
	wire, err := netlink.LinkByName("benchclient")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(port); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(wire); err != nil {
		t.Fatal(err)
	}
	proto := binary.NativeEndian.Uint16([]byte{8, 0}) // IPv4, in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(proto))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: wire.Attrs().Index}); err != nil {
		t.Fatal(err)
	}
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200_000})
	w := asker{t: t, fd: fd}
	w.run(dhcpClients) // warm-up: the server is up, and has seen all clients
	began := time.Now()
	w.run(dhcpClients * dhcpRounds)
	return dhcpClients * dhcpRounds / time.Since(began).Seconds()
}

// asker is the set of all clients on one wire.
type asker struct {
	t  *testing.T
	fd int
}

// run obtains total leases, one client after the other. A request without an answer is repeated.
func (a asker) run(total int) {
	a.t.Helper()
	started, done := 0, 0
	open := map[int]func(){} // by client: repeats the request
	discover := func(i int) {
		ask := func() { a.send(i, dhcpv4.MessageTypeDiscover, nil) }
		open[i] = ask
		ask()
	}
	for ; started < dhcpAtOnce; started++ {
		discover(started % dhcpClients)
	}
	buf := make([]byte, 2048)
	for limit := time.Now().Add(time.Minute); done < total; {
		n, err := unix.Read(a.fd, buf)
		if time.Now().After(limit) {
			a.t.Fatalf("%d of %d leases after a minute", done, total)
		}
		if err != nil {
			for _, again := range open {
				again()
			}
			continue
		}
		const headers = 14 + 20 + 8
		if n < headers || buf[23] != unix.IPPROTO_UDP || binary.BigEndian.Uint16(buf[36:]) != 68 {
			continue
		}
		m, err := dhcpv4.FromBytes(buf[headers:n])
		if err != nil {
			continue
		}
		i := int(m.ClientHWAddr[4])<<8 | int(m.ClientHWAddr[5])
		if open[i] == nil {
			continue
		}
		if m.MessageType() == dhcpv4.MessageTypeOffer {
			ask := func() { a.send(i, dhcpv4.MessageTypeRequest, m) }
			open[i] = ask
			ask()
			continue
		}
		if m.MessageType() != dhcpv4.MessageTypeAck {
			a.t.Fatalf("client %d was told %s", i, m.Summary())
		}
		delete(open, i)
		done++
		if started < total {
			discover(started % dhcpClients)
			started++
		}
	}
}

func (a asker) send(i int, kind dhcpv4.MessageType, offer *dhcpv4.DHCPv4) {
	change := []dhcpv4.Modifier{dhcpv4.WithHwAddr(clientMAC(i)), dhcpv4.WithMessageType(kind)}
	if offer != nil {
		change = append(change, dhcpv4.WithTransactionID(offer.TransactionID),
			dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(offer.YourIPAddr)), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(offer.ServerIdentifier())))
	}
	m, err := dhcpv4.New(change...)
	if err != nil {
		a.t.Fatal(err)
	}
	payload := m.ToBytes()
	b := slices.Concat(bytes.Repeat([]byte{0xff}, 6), clientMAC(i), []byte{8, 0, 0x45, 0}, make([]byte, 2+2+2), []byte{64, unix.IPPROTO_UDP, 0, 0}, make([]byte, 4), netip.MustParseAddr("255.255.255.255").AsSlice())
	binary.BigEndian.PutUint16(b[16:], uint16(28+len(payload)))
	sum := uint32(0)
	for j := 14; j < 34; j += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[j:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(b[24:], ^uint16(sum))
	b = append(b, 0, 68, 0, 67)
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
	b = append(append(b, 0, 0), payload...) // no UDP checksum
	if _, err := unix.Write(a.fd, b); err != nil {
		a.t.Fatal(err)
	}
}
