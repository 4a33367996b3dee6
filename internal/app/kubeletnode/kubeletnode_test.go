package kubeletnode

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
)

func TestRuntimeConfig(t *testing.T) {
	r := Runtime{Root: "/r", State: "/s", Programs: "/bin", Plugins: "/cni", Networks: "/net", Sandbox: "pause:1", Mirrors: "/m", Volatile: true}
	text := r.Config()
	for _, want := range []string{
		"root = '/r'", "state = '/s/state'", "address = '/s/c.sock'", "socket_dir = '/s/s'", "no_sync = true", "sandbox = 'pause:1'", "config_path = '/m'",
		"bin_dirs = ['/cni']", "conf_dir = '/net'", "BinaryName = '/bin/runc'", "Root = '/s/runc'",
	} {
		if !strings.Contains(text, "\n"+want+"\n") {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, path := range regexp.MustCompile(`'/[^']*'`).FindAllString(text, -1) {
		if regexp.MustCompile(`[A-Z]{3}`).MatchString(path) {
			t.Errorf("%s is not filled in", path)
		}
	}
}

func TestConflist(t *testing.T) {
	text, err := Network{Name: "pods", Bridge: "pods0", Subnet: "10.1.0.0/16", NAT: true, IPAM: "/i"}.Conflist()
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		Name    string
		Plugins []struct {
			Type, Bridge string
			IPMasq       bool
			IPAM         struct {
				Ranges [][]struct{ Subnet string }
			}
		}
	}
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	if b := list.Plugins[0]; list.Name != "pods" || b.Type != "bridge" || b.Bridge != "pods0" || !b.IPMasq || b.IPAM.Ranges[0][0].Subnet != "10.1.0.0/16" || list.Plugins[1].Type != "portmap" {
		t.Errorf("got %s", text)
	}
}

func TestKubeletConfig(t *testing.T) {
	k := Kubelet{Name: "n", Address: "10.0.0.2", Socket: "/cri.sock", Dir: "/d", Kubeconfig: "/k", Cgroup: "pods"}
	c := k.Config(map[string]any{"clusterDomain": "cluster.local"})
	if c["cgroupRoot"] != "/pods" || c["containerRuntimeEndpoint"] != "unix:///cri.sock" || c["clusterDomain"] != "cluster.local" || c["staticPodPath"] != "/d/manifests" {
		t.Errorf("got %v", c)
	}
	if args := strings.Join(k.Args("/c", "/root"), " "); args != "kubelet --config /c --kubeconfig /k --root-dir /root --cert-dir /d/certs --hostname-override n --node-ip 10.0.0.2" {
		t.Error(args)
	}
}
