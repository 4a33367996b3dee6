//go:build vm

package cocoond_test

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMHasIPv6 gives guests a prefix. A VM and its clone each have the address in their record, which they make
// themselves or are told. They reach the router and can be reached, and the clone keeps no address of its source.
func TestVMHasIPv6(t *testing.T) {
	for mode, length := range map[string]string{"slaac": "/64", "stateful": "/128"} {
		t.Run(mode, func(t *testing.T) { hasIPv6(t, mode, length) })
	}
}

func hasIPv6(t *testing.T, mode, length string) {
	n := newNode(t, `network: {subnet6: "fd00:88:6::/64", ipv6Mode: `+mode+`}`)
	n.counting("source")
	if _, err := n.SaveSnapshot(t.Context(), "source", vm.SaveSpec{Name: "base"}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "base", Name: "clone"}); err != nil {
		t.Fatal(err)
	}
	source, clone := n.ready("source").NICs[0].IPv6, n.ready("clone").NICs[0].IPv6
	if source == "" || source == clone {
		t.Fatalf("the addresses are %q and %q", source, clone)
	}
	for name, own := range map[string]string{"source": source, "clone": clone} {
		n.until(name+" has "+own, func() bool {
			return strings.Contains(n.sh(name, "ip -6 addr show eth0 scope global"), own+length)
		})
		if all := n.sh(name, "ip -6 addr show eth0"); name == "clone" && strings.Contains(all, source) {
			t.Errorf("the clone has an address of its source: %s", all)
		}
		n.until(name+" has heard of its router", func() bool { return strings.Contains(n.sh(name, "ip -6 route"), "default via fe80::1") })
		n.sh(name, "for i in 1 2 3 4 5 6 7 8 9 10; do ping -6 -c 1 -W 2 fd00:88:6::1 && exit; done; exit 1")
		n.until("it serves on "+own, func() bool {
			reply, err := http.Get("http://" + net.JoinHostPort(own, "8080") + "/")
			if err != nil {
				return false
			}
			reply.Body.Close()
			return reply.StatusCode == http.StatusOK
		})
	}
}
