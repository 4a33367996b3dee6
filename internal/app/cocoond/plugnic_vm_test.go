//go:build vm

package cocoond_test

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest gets interfaces on a bridge of CNI plugins and on our bridge while it runs. Each carries traffic, also after kill -9 of the daemon,
// hibernation, a restore and in a clone. Nothing of an interface is left when it is detached.
func TestVMGetsInterfaces(t *testing.T) { getsInterfaces(t, newNode(t)) }

func getsInterfaces(t *testing.T, n *node) {
	t.Helper()
	if _, err := os.Stat("/usr/lib/cni/bridge"); err != nil {
		need.Tool(t, "the CNI plugin bridge")
	}
	conf := filepath.Join(n.dir, "cni")
	if err := os.Mkdir(conf, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, subnet := range map[string]string{"lab": "10.125.0.0/24", "dmz": "10.126.0.0/24"} {
		text := `{"cniVersion": "1.0.0", "name": "` + name + `", "plugins": [{"type": "bridge", "bridge": "` + name + `0", "isGateway": true,
			"ipam": {"type": "host-local", "dataDir": "` + filepath.Join(n.dir, "ipam") + `", "ranges": [[{"subnet": "` + subnet + `"}]]}}]}`
		if err := os.WriteFile(filepath.Join(conf, name+".conflist"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n.flags = append(n.flags, "--cni-conf-dir", conf)
	n.crash()
	if _, err := n.Launch(t.Context(), vm.Spec{Name: "web", Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{Network: "lab"}}}); err != nil {
		t.Fatal(err)
	}
	serves := func(ref string, nics int) vm.Record {
		t.Helper()
		r := n.ready(ref)
		if len(r.NICs) != nics {
			t.Fatalf("%s has the interfaces %+v", ref, r.NICs)
		}
		for _, nic := range r.NICs {
			n.until(ref+" serves on "+nic.IP+" of "+nic.Network, func() bool {
				resp, err := http.Get("http://" + net.JoinHostPort(nic.IP, "8080") + "/")
				if err == nil {
					resp.Body.Close()
				}
				return err == nil
			})
		}
		return r
	}
	serves("web", 1)
	for _, network := range []string{"dmz", ""} { // "" is our bridge
		if _, err := n.AttachNIC(t.Context(), "web", vm.NICSpec{Network: network}); err != nil {
			t.Fatal(err)
		}
	}
	r := serves("web", 3)
	same := func(when string) {
		t.Helper()
		for i, nic := range serves("web", len(r.NICs)).NICs {
			if nic.IP != r.NICs[i].IP || nic.MAC != r.NICs[i].MAC || nic.Network != r.NICs[i].Network {
				t.Errorf("%s, compared with before: %s", when, diff.Of(r.NICs[i], nic))
			}
		}
	}
	if got := n.sh("web", "cat /sys/class/net/eth1/address; cat /sys/class/net/eth2/address"); got != r.NICs[1].MAC+"\n"+r.NICs[2].MAC {
		t.Errorf("the guest has %s, its record %s and %s", got, r.NICs[1].MAC, r.NICs[2].MAC)
	}
	n.crash()
	same("after a crash")
	if _, err := n.Hibernate(t.Context(), "web", ""); err != nil {
		t.Fatal(err)
	}
	n.crash() // no process holds its taps now
	if _, err := n.Wake(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	same("awake")
	if _, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "gold", Name: "copy"}); err != nil {
		t.Fatal(err)
	}
	for i, nic := range serves("copy", 3).NICs {
		if nic.IP == r.NICs[i].IP || nic.Network != r.NICs[i].Network {
			t.Errorf("the clone has %+v", nic)
		}
	}
	if err := n.Remove(t.Context(), "copy", true); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Restore(t.Context(), "web", "gold"); err != nil {
		t.Fatal(err)
	}
	same("restored")
	if _, err := n.DetachNIC(t.Context(), "web", "dmz"); err != nil {
		t.Fatal(err)
	}
	r.NICs = append(r.NICs[:1:1], r.NICs[2])
	same("without the network dmz")
	left, _ := filepath.Glob(filepath.Join(n.dir, "ipam/dmz/10.*"))
	records, _ := filepath.Glob(filepath.Join(n.dir, "state/network/cni/dmz/cx*.json"))
	if all := append(left, records...); len(all) != 0 {
		t.Errorf("left of the network dmz: %v", all)
	}
	if _, err := n.Stop(t.Context(), "web", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Start(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	same("started again")
	if err := n.Remove(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
}
