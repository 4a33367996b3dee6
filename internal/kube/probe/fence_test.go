package probe

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// own gives the test's namespace addresses besides loopback: a second one of a link, and a whole network that is local.
func own(t *testing.T) {
	t.Helper()
	netns.Require(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "own0"
	link := &netlink.Veth{LinkAttrs: attrs, PeerName: "own1"}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	for _, a := range []string{"10.77.0.1/24", "10.77.0.2/24", "fd77::1/64"} {
		p := netip.MustParsePrefix(a)
		ipnet := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipnet, Flags: unix.IFA_F_NODAD}); err != nil {
			t.Fatal(err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	_, local, _ := net.ParseCIDR("10.78.0.0/24")
	route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: local, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST}
	if err := netlink.RouteAdd(route); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.RouteDel(route) })
}

func TestForbidden(t *testing.T) {
	own(t)
	for addr, forbidden := range map[string]bool{
		"127.0.0.1": true, "127.8.8.8": true, "::1": true, "::ffff:127.0.0.1": true, "0.0.0.0": true, "::": true, "::ffff:0.0.0.0": true,
		"169.254.169.254": true, "::ffff:169.254.1.1": true, "fe80::1": true, "fe80::1%own0": true, "fd00:ec2::254": true, "168.63.129.16": true,
		"224.0.0.1": true, "ff02::1": true, "255.255.255.255": true, "::ffff:255.255.255.255": true,
		"10.77.0.1": true, "10.77.0.2": true, "::ffff:10.77.0.2": true, "fd77::1": true, "10.78.0.9": true,
		"10.77.0.3": false, "fd77::2": false, "203.0.113.9": false, "2001:db8::9": false, "::ffff:10.77.0.3": false,
	} {
		if err := Forbidden(netip.MustParseAddr(addr)); (err != nil) != forbidden || forbidden && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

// The node answers nobody's probes and hooks with what itself serves, though the guest's own address, here loopback, is reached.
func TestProbesDoNotReachTheNode(t *testing.T) {
	own(t)
	l, err := net.Listen("tcp", "0.0.0.0:0") //nolint:noctx,gosec // a server of this test
	if err != nil {
		t.Fatal(err)
	}
	var asked int
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/away" {
			http.Redirect(w, r, "http://10.77.0.2:"+r.URL.Query().Get("port")+"/", http.StatusFound)
			return
		}
		asked++
	}))
	s.Listener = l
	s.Start()
	defer s.Close()
	port := intstr.FromInt(l.Addr().(*net.TCPAddr).Port)
	guest := Target{IP: "127.0.0.1", Container: &corev1.Container{}}
	for _, host := range []string{"10.77.0.1", "127.0.0.2", "localhost", "::ffff:10.77.0.2"} {
		for what, h := range map[string]corev1.ProbeHandler{
			"tcp":  {TCPSocket: &corev1.TCPSocketAction{Host: host, Port: port}},
			"http": {HTTPGet: &corev1.HTTPGetAction{Host: host, Port: port}},
		} {
			got, why, err := guest.Probe(t.Context(), &corev1.Probe{TimeoutSeconds: 5, ProbeHandler: h})
			if err != nil || got != Failure || !strings.Contains(why, "the node does not connect to") {
				t.Errorf("%s of %s: %d %q %v", what, host, got, why, err)
			}
		}
	}
	hook := corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/away?port=" + port.String(), Port: port}}
	if err := guest.Hook(t.Context(), &hook); err == nil || !strings.Contains(err.Error(), "an address of the node itself") {
		t.Errorf("a hook that is sent to the node: %v", err)
	}
	if asked != 0 {
		t.Errorf("the node was asked %d times", asked)
	}
	if got, why, err := guest.Probe(t.Context(), &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: port}}}); got != Success || err != nil {
		t.Errorf("the guest itself: %d %q %v", got, why, err)
	}
}
