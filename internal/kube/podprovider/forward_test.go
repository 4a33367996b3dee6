package podprovider

import (
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// neighbour starts a machine at 10.77.0.2, in the same network as the node at 10.77.0.1. Both run an echo server on a port, on
// all their addresses.
func neighbour(t *testing.T) (port int) {
	t.Helper()
	ns := netns.New(t)
	f, err := os.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "node0"
	link := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(f.Fd()))}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	up := func(name, cidr string) error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(cidr)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(l, addr); err != nil {
			return err
		}
		return netlink.LinkSetUp(l)
	}
	if err := up("node0", "10.77.0.1/24"); err != nil {
		t.Fatal(err)
	}
	var there net.Listener
	netns.Do(t, ns, func() error {
		if err := up("eth0", "10.77.0.2/24"); err != nil {
			return err
		}
		there, err = net.Listen("tcp", "0.0.0.0:7777") //nolint:gosec // a server of this test
		return err
	})
	here, err := net.Listen("tcp", ":7777") //nolint:gosec // a server of this test
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []net.Listener{there, here} {
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.Copy(c, c)
				c.Close()
			}
		}()
	}
	return 7777
}

// Ports of a static pod are forwarded only to networks that the operator allows, and never to the node itself.
func TestForwardStatic(t *testing.T) {
	netns.Require(t)
	port := neighbour(t)
	everything := []string{"0.0.0.0/0", "::/0"}
	for name, tt := range map[string]struct {
		ip      string
		allowed []string
		want    string // part of the error; "" for no error
	}{
		"default":              {"10.77.0.2", nil, "the node's operator allows networks in VK_STATIC_FORWARD_NETWORKS"},
		"another network":      {"10.77.0.2", []string{"10.78.0.0/24"}, "the node's operator allows"},
		"allowed":              {"10.77.0.2", []string{"10.77.0.0/24"}, ""},
		"allowed, as IPv6":     {"::ffff:10.77.0.2", []string{"10.77.0.0/24"}, ""},
		"the node":             {"10.77.0.1", everything, "an address of the node itself"},
		"the node, as IPv6":    {"::ffff:10.77.0.1", everything, "an address of the node itself"},
		"the node's loopback":  {"127.0.0.1", everything, "the node's loopback"},
		"loopback by IPv6":     {"::1", everything, "the node's loopback"},
		"loopback, as IPv6":    {"::ffff:127.0.0.1", everything, "the node's loopback"},
		"unspecified":          {"0.0.0.0", everything, "not the address of a host"},
		"unspecified, by IPv6": {"::", everything, "not the address of a host"},
		"metadata":             {"169.254.169.254", everything, "a metadata service of clouds"},
		"link-local":           {"169.254.1.1", everything, "an address of the node's own link"},
		"multicast":            {"224.0.0.1", everything, "a multicast or broadcast address"},
	} {
		t.Run(name, func(t *testing.T) {
			st := &podState{subject: subject{static: true}, facts: facts{pod: &corev1.Pod{}}}
			st.pod.Namespace, st.pod.Name = "default", "web"
			st.pod.Annotations = map[string]string{contract.KeyMode: string(contract.ModeStatic), contract.KeyID: "pc-7", contract.KeyIP: tt.ip}
			d := &door{pods: &index{pods: map[string]*podState{"default/web": st}}}
			for _, n := range tt.allowed {
				d.allowed = append(d.allowed, netip.MustParsePrefix(n))
			}
			s := &both{Reader: strings.NewReader("in")}
			err := d.Forward(t.Context(), "default", "web", port, s)
			switch {
			case tt.want == "" && (err != nil || s.said.String() != "in"):
				t.Errorf("%q, %v", s.said.String(), err)
			case tt.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tt.want) || s.said.Len() > 0):
				t.Errorf("%q, %v", s.said.String(), err)
			}
		})
	}
}
