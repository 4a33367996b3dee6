//go:build vm

package cocoond_test

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest has an interface on a bridge of CNI plugins, one on our bridge through plugins, and one on our bridge. Each
// carries traffic, also after kill -9 of the daemon, even while the VM is hibernated. Nothing of them is left when the
// VM is removed.
func TestVMWithCNI(t *testing.T) {
	withCNI(t, newNode(t), "")
}

// withCNI takes a VM of the driver with interfaces of three networks, two of them of plugins, through its life. "" is the node's driver.
func withCNI(t *testing.T, n *node, driver string) {
	t.Helper()
	if _, err := os.Stat("/usr/lib/cni/bridge"); err != nil {
		need.Tool(t, "the CNI plugin bridge")
	}
	conf := filepath.Join(n.dir, "cni")
	if err := os.Mkdir(conf, 0o755); err != nil {
		t.Fatal(err)
	}
	lab := `{"cniVersion": "1.0.0", "name": "lab", "plugins": [{"type": "bridge", "bridge": "lab0", "isGateway": true,
		"ipam": {"type": "host-local", "dataDir": "` + filepath.Join(n.dir, "ipam") + `", "ranges": [[{"subnet": "10.125.0.0/24"}], [{"subnet": "fd00:125::/64"}]],
		         "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "10.99.0.0/16", "gw": "10.125.0.9"}]}}]}`
	for name, text := range map[string]string{"10-lab.conflist": lab, network.ConflistFile: network.Conflist("cocoon0")} {
		if err := os.WriteFile(filepath.Join(conf, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n.flags = append(n.flags, "--cni-conf-dir", conf)
	n.crash()
	_, err := n.Launch(t.Context(), vm.Spec{
		Name: "web", Driver: driver, Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20,
		NICs: []vm.NICSpec{{Network: "lab"}, {Network: network.ConflistName}, {}},
	})
	if err != nil {
		t.Fatal(err)
	}
	serves := func() vm.Record {
		t.Helper()
		r := n.ready("web")
		for _, nic := range r.NICs {
			for _, ip := range []string{nic.IP, nic.IPv6} {
				if ip == "" {
					continue
				}
				n.until("it serves on "+ip+" of "+nic.Network, func() bool {
					resp, err := http.Get("http://" + net.JoinHostPort(ip, "8080") + "/")
					if err == nil {
						resp.Body.Close()
					}
					return err == nil
				})
			}
		}
		return r
	}
	r := serves()
	if got := n.sh("web", "cat /sys/class/net/eth0/address"); got != r.NICs[0].MAC || !strings.HasPrefix(r.NICs[0].IP, "10.125.0.") || r.NICs[0].DHCP {
		t.Errorf("the guest has MAC %s, its NIC %+v", got, r.NICs[0])
	}
	if !strings.HasPrefix(r.NICs[0].IPv6, "fd00:125::") {
		t.Errorf("no IPv6 address: %+v", r.NICs[0])
	}
	for _, want := range []string{"default via fd00:125::1 dev eth0", "10.99.0.0/16 via 10.125.0.9 dev eth0"} {
		if routes := n.sh("web", "ip route; ip -6 route"); !strings.Contains(routes, want) {
			t.Errorf("no %q in %s", want, routes)
		}
	}
	if leases, err := os.ReadFile(filepath.Join(n.dir, "state/net/leases.json")); err != nil || !strings.Contains(string(leases), r.NICs[1].MAC) || r.NICs[1].IP == "" || !r.NICs[1].DHCP {
		t.Errorf("the interface on our bridge through plugins is not in the lease file: %+v, %s (%v)", r.NICs[1], leases, err)
	}
	n.crash()
	serves()
	if _, err := n.Hibernate(t.Context(), "web", ""); err != nil {
		t.Fatal(err)
	}
	n.crash() // no process holds its taps now
	if _, err := n.Wake(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	for i, nic := range serves().NICs {
		if nic.IP != r.NICs[i].IP || nic.IPv6 != r.NICs[i].IPv6 || nic.MAC != r.NICs[i].MAC {
			t.Errorf("awake, compared with before: %s", diff.Of(r.NICs[i], nic))
		}
	}
	if err := n.Remove(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(n.dir, "ipam/lab/[1f][0d]*"))
	spaces, _ := filepath.Glob("/run/netns/cocoon-" + string(r.ID))
	records, _ := filepath.Glob(filepath.Join(n.dir, "state/network/cni/*/cx*.json"))
	if all := append(append(left, spaces...), records...); len(all) != 0 {
		t.Errorf("left: %v", all)
	}
}
