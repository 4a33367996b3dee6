package cni

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/networktest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// plugins requires the reference plugins.
func plugins(t testing.TB) {
	t.Helper()
	netns.Require(t)
	need.Tun(t)
	for _, dir := range DefaultBinDirs {
		if _, err := os.Stat(filepath.Join(dir, "bridge")); err == nil {
			return
		}
	}
	need.Tool(t, "the CNI plugin bridge")
}

const conflist = `{"cniVersion": "1.0.0", "name": "lab", "plugins": [
	{"type": "bridge", "bridge": %q, "isGateway": %v, "mtu": 1400, "capabilities": {"mac": true},
	 "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}},
	{"type": "tuning"}]}`

// write writes a conflist with its own bridge into dir.
func write(t testing.TB, dir, subnet string, gateway bool) {
	t.Helper()
	sum := sha256.Sum256([]byte(dir))
	bridge := "br" + hex.EncodeToString(sum[:5])
	text := fmt.Sprintf(conflist, bridge, gateway, filepath.Join(dir, "ipam"), subnet)
	if err := os.WriteFile(filepath.Join(dir, "10-lab.conflist"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if l, err := netlink.LinkByName(bridge); err == nil {
			_ = netlink.LinkDel(l)
		}
	})
}

func build(t testing.TB, cfg Config) *Network {
	t.Helper()
	cfg.DNS = []string{"9.9.9.9"}
	n, err := New(cfg, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func at(dir string) Config {
	return Config{Name: "lab", ConfDir: dir, StateDir: filepath.Join(dir, "state"), NetNSDir: filepath.Join(dir, "netns")}
}

func TestContract(t *testing.T) {
	plugins(t)
	networktest.Run(t, func(t testing.TB, dir, subnet string) network.Network {
		if _, err := os.Stat(filepath.Join(dir, "10-lab.conflist")); err != nil {
			write(t, dir, subnet, false)
			t.Cleanup(func() { assertClean(t, dir) })
		}
		return build(t, at(dir))
	}, networktest.ForeignAddresses)
}

// assertClean checks that nothing is left of any attachment: no namespace, record, cache entry, veth or reservation.
func assertClean(t testing.TB, dir string) {
	t.Helper()
	for _, sub := range []string{"netns", "state", "ipam"} {
		_ = filepath.WalkDir(filepath.Join(dir, sub), func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && d.Name() != "lock" && d.Name() != "last_reserved_ip.0" {
				t.Errorf("%s is left", path)
			}
			return nil
		})
	}
}

// A guest behind the tap reaches the host with the settings of its NIC, whatever was interrupted before.
func TestGuestIsReached(t *testing.T) {
	plugins(t)
	dir := t.TempDir()
	write(t, dir, "10.124.0.0/24", true)
	n := build(t, at(dir))
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	id := vm.NewID()
	attach := func(n *Network, index int) vm.NIC {
		t.Helper()
		nic, err := n.Attach(t.Context(), id, "web", index, vm.NICSpec{})
		if err != nil {
			t.Fatal(err)
		}
		return nic
	}
	nic, second := attach(n, 0), attach(n, 1)
	if nic.Gateway != "10.124.0.1" || nic.MTU != 1400 || nic.DHCP || !slices.Equal(nic.DNS, []string{"9.9.9.9"}) || nic.NetNS != filepath.Join(dir, "netns", "cocoon-"+string(id)) {
		t.Errorf("NIC %+v", nic)
	}
	if !answers(t, nic) || !answers(t, second) {
		t.Fatal("a guest is not reached")
	}
	// The VM stops, and starts under another daemon with the same address.
	if err := n.Detach(t.Context(), nic); err != nil {
		t.Fatal(err)
	}
	later := build(t, at(dir))
	if err := later.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := attach(later, 0); again.IP != nic.IP || again.MAC != nic.MAC || !answers(t, again) {
		t.Errorf("after a restart %+v, before %+v", again, nic)
	}
	// After a host restart the files exist, but none of the links.
	if err := (host.Space{Path: nic.NetNS}).Remove(); err != nil {
		t.Fatal(err)
	}
	if again := attach(later, 0); !answers(t, again) {
		t.Errorf("after the namespace was lost: %+v", again)
	}
	// kill -9 after the record is written and before the plugins run.
	other := vm.NewID()
	if err := later.save(record{ID: other, VM: "half", Index: 0}); err != nil {
		t.Fatal(err)
	}
	if _, err := later.Attach(t.Context(), other, "half", 0, vm.NICSpec{}); err != nil {
		t.Errorf("after a crash half-way: %v", err)
	}
	// The conflist is removed; its attachment is still undone.
	if err := os.Remove(filepath.Join(dir, "10-lab.conflist")); err != nil {
		t.Fatal(err)
	}
	if _, err := later.Attach(t.Context(), vm.NewID(), "late", 0, vm.NICSpec{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("attach without conflist: %v", err)
	}
	if err := later.Teardown(t.Context()); err != nil {
		t.Fatal(err)
	}
	assertClean(t, dir)
}

// answers sends ARP as the guest behind nic: a request for the gateway from the guest's addresses gets an answer.
func answers(t *testing.T, nic vm.NIC) (ok bool) {
	t.Helper()
	tap := open(t, nic)
	defer tap.Close()
	mac, _ := net.ParseMAC(nic.MAC)
	me, gateway := netip.MustParseAddr(nic.IP).AsSlice(), netip.MustParseAddr(nic.Gateway).AsSlice()
	ask := slices.Concat([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac, []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, mac, me, make([]byte, 6), gateway)
	_ = tap.SetDeadline(time.Now().Add(time.Minute))
	buf := make([]byte, 2048)
	for {
		if _, err := tap.Write(ask); err != nil {
			t.Log("write:", err)
			return false
		}
		k, err := tap.Read(buf)
		if err != nil {
			t.Log("read:", err)
			return false
		}
		if f := buf[:k]; k >= 42 && f[12] == 8 && f[13] == 6 && f[21] == 2 && slices.Equal(f[:6], mac) && slices.Equal(f[28:32], gateway) {
			return true
		}
	}
}

func TestRefusals(t *testing.T) {
	plugins(t)
	dir := t.TempDir()
	if err := build(t, at(dir)).Setup(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("no conflist: %v", err)
	}
	text := `{"cniVersion": "1.0.0", "name": "lab", "plugins": [{"type": "nobody-has-this"}]}`
	if err := os.WriteFile(filepath.Join(dir, "lab.conflist"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := build(t, at(dir)).Setup(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("no plugin: %v", err)
	}
	if names, err := Names(dir); err != nil || !slices.Equal(names, []string{"lab"}) {
		t.Errorf("names %v (%v)", names, err)
	}
	if names, err := Names(filepath.Join(dir, "nowhere")); err != nil || names != nil {
		t.Errorf("names of nothing: %v (%v)", names, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "broken.conflist"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Names(dir); !errdefs.IsInvalid(err) {
		t.Errorf("noise: %v", err)
	}
}

// Ports of the host are given to a plugin that can forward them. Without one the VM is refused, and nothing of it is left.
// TestPodArguments: plugins are told of a pod as a kubelet's runtime tells them, and of another VM only its name.
func TestPodArguments(t *testing.T) {
	n, err := New(Config{Name: "lab", StateDir: t.TempDir()}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for want, r := range map[string]record{
		"[[IgnoreUnknown 1] [K8S_POD_NAME web]]": {ID: "i", VM: "web"},
		"[[IgnoreUnknown 1] [K8S_POD_NAMESPACE shop] [K8S_POD_NAME web] [K8S_POD_INFRA_CONTAINER_ID i] [K8S_POD_UID u1]]": {ID: "i", VM: "shop/web.12.0", Pod: vm.PodName{Namespace: "shop", Name: "web", UID: "u1"}},
	} {
		if got := fmt.Sprint(n.runtime(r).Args); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestPorts(t *testing.T) {
	plugins(t)
	dir := t.TempDir()
	write(t, dir, "10.124.4.0/24", true)
	n := build(t, at(dir))
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	spec := vm.NICSpec{Ports: []vm.PortMapping{{Protocol: vm.TCP, HostIP: "192.0.2.7", HostPort: 8080, GuestPort: 80}}}
	if _, err := n.Attach(t.Context(), vm.NewID(), "web", 0, spec); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without a plugin that forwards ports: %v", err)
	}
	assertClean(t, dir)
	got, err := json.Marshal(n.runtime(record{ID: vm.NewID(), Ports: spec.Ports, Bandwidth: vm.Bandwidth{Ingress: 1000000}}).CapabilityArgs)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"bandwidth":{"ingressRate":1000000,"ingressBurst":4294967295},"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"192.0.2.7"}]}`
	if string(got) != want {
		t.Errorf("plugins are given %s, want %s", got, want)
	}
}
