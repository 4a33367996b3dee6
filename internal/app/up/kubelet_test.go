package up

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// programsIn makes empty files for all that a node with a kubelet needs, and returns their places.
func programsIn(t *testing.T, dir string) Assets {
	t.Helper()
	for _, name := range []string{"containerd", "containerd-shim-runc-v2", "ctr", "runc", "pause.tar", "nft"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	return Assets{Containerd: filepath.Join(dir, "containerd"), CNIPlugins: "/plugins", Pause: filepath.Join(dir, "pause.tar")}
}

func TestKubeletIsRefused(t *testing.T) {
	zero, one := 0, 1
	on := true
	for name, c := range map[string]struct {
		change func(dir string, a *Assets, o *Options)
		class  errdefs.Class
		says   string
	}{
		"no containerd": {func(dir string, _ *Assets, _ *Options) { os.Remove(filepath.Join(dir, "runc")) }, errdefs.FailedPrecondition, "make containerd"},
		"no pause":      {func(_ string, a *Assets, _ *Options) { a.Pause = "/none" }, errdefs.FailedPrecondition, "make demo-image"},
		"no plugins":    {func(_ string, a *Assets, _ *Options) { a.CNIPlugins = "" }, errdefs.FailedPrecondition, "containernetworking-plugins"},
		"no nft":        {func(dir string, _ *Assets, _ *Options) { os.Remove(filepath.Join(dir, "nft")) }, errdefs.FailedPrecondition, "nftables"},
		"no nodes":      {func(_ string, _ *Assets, o *Options) { o.Nodes = &zero }, errdefs.InvalidArgument, "--nodes 1"},
		"name is taken": {func(_ string, _ *Assets, o *Options) { o.NodeName = kubeletName }, errdefs.InvalidArgument, "--node-name"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, off := t.TempDir(), false
			l := layout{t.TempDir()}
			o := Options{Kubelet: &on, Nodes: &one, With: []string{}, Services: &off, Assets: programsIn(t, dir)}
			c.change(dir, &o.Assets, &o)
			var p ports
			defer p.Close()
			_, err := settle(l, o, &p)
			if errdefs.ClassOf(err) != c.class || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v", err)
			}
			if exists(l.settings()) {
				t.Error("the refused choice is stored")
			}
		})
	}
}

// TestKubeletNodeByHand: nobody starts the node's processes on the machine itself, where they would end all others.
func TestKubeletNodeByHand(t *testing.T) {
	for _, args := range [][]string{{}, {"--worker"}} {
		cmd := kubeletCommand(func() string { return t.TempDir() })
		cmd.SetArgs(args)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.Execute(); !errdefs.IsInvalid(err) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func TestKubeletIsStored(t *testing.T) {
	l := layout{t.TempDir()}
	on, off := true, false
	a := programsIn(t, t.TempDir())
	settled := func(o Options) Settings {
		t.Helper()
		o.Assets = a
		var p ports
		defer p.Close()
		s, err := settle(l, o, &p)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := settled(Options{With: []string{}, Services: &off}); s.Kubelet != nil {
		t.Errorf("nobody asked for %+v", s.Kubelet)
	}
	first := settled(Options{Kubelet: &on})
	if first.Kubelet == nil || first.Kubelet.check() != nil {
		t.Fatalf("got %+v", first.Kubelet)
	}
	if again := settled(Options{}); !reflect.DeepEqual(again.Kubelet, first.Kubelet) {
		t.Errorf("the next start has %+v, want %+v", again.Kubelet, first.Kubelet)
	}
	peers := cocoondConfig(l.node(first, 0), pki{}, first, a, false)["network"].(object)["peers"].([]string)
	if !slices.Contains(peers, l.kubelet().link()) {
		t.Errorf("the virtual node does not know the other, but %v", peers)
	}
	if s := settled(Options{Kubelet: &off}); s.Kubelet != nil || settled(Options{}).Kubelet != nil {
		t.Errorf("it has still %+v", s.Kubelet)
	}
}

func TestKubeletAddresses(t *testing.T) {
	s := KubeletSettings{Subnet: "10.89.7.0/24"}
	if s.machine().String() != "10.89.7.1" || s.node().String() != "10.89.7.2" || s.pods().String() != "10.89.7.128/25" {
		t.Errorf("got %s, %s, %s", s.machine(), s.node(), s.pods())
	}
	for _, bad := range []string{"", "10.89.7.0/25", "10.89.7.1/24", "fd00::/64", "x"} {
		if err := (KubeletSettings{Subnet: bad}).check(); errdefs.ClassOf(err) != errdefs.InvalidArgument {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestRoutesOf(t *testing.T) {
	const table = `Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	010200C0	0003	0	0	0	00000000	0	0	0
eth0	000200C0	00000000	0001	0	0	0	00FFFFFF	0	0	0
klet1	80DE590A	02DE590A	0003	0	0	0	80FFFFFF	0	0	0
tun0	00405A0A	00000000	0001	0	0	0	00C0FFFF	0	0	0
`
	want := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("10.90.64.0/18")}
	if got := routesOf([]byte(table), "klet1"); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestKubeletRules: pods of the node keep their addresses towards the bridges of virtual nodes only, and nothing else enters by the link.
func TestKubeletRules(t *testing.T) {
	l := layout{"/a"}
	s := Settings{Nodes: []NodeSettings{{Name: "one"}, {Name: "two"}}, Kubelet: &KubeletSettings{Subnet: "10.89.7.0/24"}}
	rules := string(kubeletRules(l.kubelet(), s))
	link, one, two := l.kubelet().link(), bridgeName(l.node(s, 0)), bridgeName(l.node(s, 1))
	for _, want := range []string{
		"add table inet " + l.kubelet().table() + "\ndelete table inet " + l.kubelet().table() + "\n",
		`ip saddr 10.89.7.0/24 oifname != { "` + link + `", "lo", "` + one + `", "` + two + `" } masquerade`,
		`iifname "` + link + `" ip saddr != 10.89.7.0/24 drop`,
		`oifname "` + link + `" drop`,
		"ct original ip daddr " + serviceCIDR + " accept",
	} {
		if !strings.Contains(rules, want) {
			t.Errorf("no %q in\n%s", want, rules)
		}
	}
}

func TestKubeletManifests(t *testing.T) {
	list, err := kubeletManifests()
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, m := range list {
		paths = append(paths, m.path)
		if !strings.Contains(string(m.body), `"app.kubernetes.io/managed-by":"cocoon-up"`) {
			t.Errorf("%s is not removed when the node is not wanted any more", m.path)
		}
	}
	if want := []string{"/apis/node.k8s.io/v1/runtimeclasses/cocoon", "/apis/node.k8s.io/v1/runtimeclasses/runc"}; !slices.Equal(paths, want) {
		t.Errorf("got %v, want %v", paths, want)
	}
}
