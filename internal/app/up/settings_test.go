package up

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// taken occupies a TCP port on loopback until the test ends.
func taken(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", net.JoinHostPort(nodeIP, "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln.Addr().(*net.TCPAddr).Port
}

// free returns a port that was free a moment ago.
func free(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", net.JoinHostPort(nodeIP, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

func TestSettle(t *testing.T) {
	l := layout{t.TempDir()}
	api, node, metrics, registry := free(t), free(t), free(t), free(t)
	settled := func(o Options) Settings {
		t.Helper()
		var p ports
		defer p.Close()
		s, err := settle(l, o, &p)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	off, on := false, true
	s := settled(Options{APIPort: api, NodePort: node, MetricsPort: metrics, Services: &off, With: []string{}})
	if d := diff.Of(Settings{Services: &off, APIPort: api, With: []string{}, Nodes: []NodeSettings{{Name: defaultNodeName, Port: node, MetricsPort: metrics}}}, s); d != "" {
		t.Error(d)
	}
	// A choice stays until another one is requested.
	three := 3
	s = settled(Options{NodeName: "other-7", Nodes: &three, With: []string{partEpoch}, EpochPort: registry})
	if len(s.Nodes) != 3 || s.Nodes[0] != (NodeSettings{Name: "other-7", Port: node, MetricsPort: metrics}) || s.Nodes[1].Name != "other-8" || s.Nodes[2].Port == s.Nodes[1].Port || s.EpochPort != registry || !s.with(partEpoch) {
		t.Errorf("got %+v", s)
	}
	if with := settled(Options{With: []string{partEpoch, partMetricsServer}}); with.ServerPort == 0 || !with.with(partMetricsServer) {
		t.Errorf("got %+v", with)
	}
	if s = settled(Options{With: []string{partEpoch}}); s.with(partMetricsServer) {
		t.Errorf("got %+v", s)
	}
	if d := diff.Of(s, settled(Options{})); d != "" {
		t.Error(d)
	}
	s = settled(Options{ExtraConfig: []string{"apiServer.event-ttl=2h", "controllerManager.a=b=c"}})
	if got := settled(Options{}).extraArgs("controllerManager"); !reflect.DeepEqual(got, map[string]string{"a": "b=c"}) || !reflect.DeepEqual(s.extraArgs("apiServer"), map[string]string{"event-ttl": "2h"}) {
		t.Errorf("flags are %v of %v", got, s.ExtraConfig)
	}
	settled(Options{AllowImages: []string{"192.168.7.0/24", "localhost:5000"}})
	if s = settled(Options{}); !slices.Equal(s.AllowImages, []string{"192.168.7.0/24", "localhost:5000"}) {
		t.Errorf("images may come from %v", s.AllowImages)
	}
	if images := cocoondConfig(layout{"/a"}.node(s, 0), pki{}, s, Assets{}, false)["images"].(object); !reflect.DeepEqual(images["allow"], s.AllowImages) {
		t.Errorf("cocoond is told %v", images)
	}
	if s = settled(Options{AllowImages: []string{}}); len(s.AllowImages) > 0 {
		t.Errorf("images may still come from %v", s.AllowImages)
	}
	settled(Options{HostPaths: []string{"/srv/data", "prod=/srv/prod:ro"}})
	if s = settled(Options{}); !reflect.DeepEqual(cocoondConfig(layout{"/a"}.node(s, 0), pki{}, s, Assets{}, false)["hostPaths"], []string{"/srv/data", "prod=/srv/prod:ro"}) {
		t.Errorf("folders %v", s.HostPaths)
	}
	if s = settled(Options{HostPaths: []string{}}); cocoondConfig(layout{"/a"}.node(s, 0), pki{}, s, Assets{}, false)["hostPaths"] != nil {
		t.Errorf("folders %v are still shared", s.HostPaths)
	}
	if s = settled(Options{Services: &on}); !s.wantServices() || s.DNSPort == 0 || s.ProxyHealthPort == s.ProxyMetricsPort {
		t.Errorf("got %+v", s)
	}
	if again := settled(Options{}); !*again.Services || again.DNSPort != s.DNSPort {
		t.Errorf("got %+v", again)
	}
	none := 0
	if s := settled(Options{Nodes: &none, With: []string{}}); len(s.Nodes) != 0 || len(s.With) != 0 || len(settled(Options{}).Nodes) != 0 {
		t.Errorf("a control plane alone is %+v", s)
	}
	if fi, err := os.Stat(l.settings()); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
}

// TestUsualParts: a new instance with nodes has the manager, unless the user chooses other parts. An instance that exists keeps its parts.
func TestUsualParts(t *testing.T) {
	none, one := 0, 1
	for name, c := range map[string]struct {
		starts []Options
		want   []string
	}{
		"new":                           {[]Options{{}}, []string{partManager}},
		"new, by number":                {[]Options{{Nodes: &one}}, []string{partManager}},
		"again":                         {[]Options{{}, {}}, []string{partManager}},
		"none chosen":                   {[]Options{{With: []string{}}}, nil},
		"none chosen earlier":           {[]Options{{With: []string{}}, {}}, nil},
		"another chosen":                {[]Options{{With: []string{partEpoch}}}, []string{partEpoch}},
		"a control plane alone":         {[]Options{{Nodes: &none}}, nil},
		"a control plane that gets one": {[]Options{{Nodes: &none}, {Nodes: &one}}, nil},
	} {
		l := layout{t.TempDir()}
		for _, o := range c.starts {
			var p ports
			s, err := settle(l, o, &p)
			p.Close()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if !slices.Equal(s.With, c.want) {
				t.Errorf("%s: after --with %q it has %q, want %q", name, o.With, s.With, c.want)
			}
		}
	}
}

func TestSettleReadsWhatOneNodeKept(t *testing.T) {
	l := layout{t.TempDir()}
	api, node := free(t), free(t)
	if err := os.WriteFile(l.settings(), fmt.Appendf(nil, `{"nodeName":"old","apiPort":%d,"nodePort":%d}`, api, node), 0o600); err != nil {
		t.Fatal(err)
	}
	var p ports
	defer p.Close()
	s, err := settle(l, Options{}, &p)
	if err != nil || s.APIPort != api || len(s.Nodes) != 1 || s.Nodes[0].Name != "old" || s.Nodes[0].Port != node || s.Nodes[0].MetricsPort == 0 {
		t.Errorf("got %+v, %v", s, err)
	}
}

func TestSettleRefuses(t *testing.T) {
	busy, many := taken(t), mostNodes+1
	for _, c := range []struct {
		name  string
		o     Options
		kept  string
		class errdefs.Class
		says  string
	}{
		{"name in upper case", Options{NodeName: "Node"}, "", errdefs.InvalidArgument, `"Node"`},
		{"name with a slash", Options{NodeName: "a/b"}, "", errdefs.InvalidArgument, `"a/b"`},
		{"long name", Options{NodeName: strings.Repeat("a", 64)}, "", errdefs.InvalidArgument, "63"},
		{"negative port", Options{APIPort: -1}, "", errdefs.InvalidArgument, "-1"},
		{"large port", Options{NodePort: 65536}, "", errdefs.InvalidArgument, "65536"},
		{"port taken", Options{APIPort: busy}, "", errdefs.ResourceExhausted, "--api-port"},
		{"node port taken", Options{NodePort: busy}, "", errdefs.ResourceExhausted, "--node-port"},
		{"too many nodes", Options{Nodes: &many}, "", errdefs.InvalidArgument, "17"},
		{"unknown part", Options{With: []string{"epoch", "docker"}}, "", errdefs.InvalidArgument, `"docker"`},
		{"flag of nobody", Options{ExtraConfig: []string{"kubelet.v=4"}}, "", errdefs.InvalidArgument, `"kubelet.v=4"`},
		{"network of nobody", Options{AllowImages: []string{"10.0.0.1/8"}}, "", errdefs.InvalidArgument, `"10.0.0.1/8"`},
		{"folder by a relative path", Options{HostPaths: []string{"srv"}}, "", errdefs.InvalidArgument, `--host-paths`},
		{"flag without value", Options{ExtraConfig: []string{"scheduler.v"}}, "", errdefs.InvalidArgument, `"scheduler.v"`},
		{"damaged file", Options{}, "{", errdefs.DataLoss, "up.json"},
		{"changed by hand", Options{}, `{"nodeName":"A","apiPort":1}`, errdefs.DataLoss, "up.json"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := layout{t.TempDir()}
			if c.kept != "" {
				if err := os.WriteFile(l.settings(), []byte(c.kept), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var p ports
			defer p.Close()
			err := c.o.check()
			if err == nil {
				_, err = settle(l, c.o, &p)
			}
			if !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("got %v (%v), want %v that says %s", err, errdefs.ClassOf(err), c.class, c.says)
			}
			if data, err := os.ReadFile(l.settings()); string(data) != c.kept {
				t.Errorf("settings are %q (%v) after a refusal", data, err)
			}
		})
	}
}

func TestPortsOfTwoInstances(t *testing.T) {
	usual := free(t)
	var first, second ports
	defer second.Close()
	a, err := first.choose("API server", "--api-port", 0, 0, usual)
	if err != nil {
		t.Fatal(err)
	}
	// Nothing listens on the first instance's port yet, and still the port is not given twice.
	b, err := second.choose("API server", "--api-port", 0, 0, usual)
	if err != nil {
		t.Fatal(err)
	}
	if a == b {
		t.Fatalf("both got port %d", a)
	}
	if got, err := second.chooseInner("manager", "--manager-port", 0, a, usual); err != nil || got == a || got == b {
		t.Errorf("the other instance has the port of an earlier start, and it got %d, %v", got, err)
	}
	if _, err := second.chooseInner("manager", "--manager-port", a, 0, usual); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("the other instance has the port that is asked for: %v", err)
	}
	if _, err := second.choose("API server", "--api-port", a, 0, usual); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a port of another instance: %v", err)
	}
	first.Close()
	if got, err := second.choose("API server", "--api-port", a, 0, usual); err != nil || got != a {
		t.Errorf("after its end: %d, %v", got, err)
	}
}

func TestPortsRunOut(t *testing.T) {
	// There are no ports above 65535.
	ln, err := net.Listen("tcp", net.JoinHostPort(nodeIP, "65535"))
	if err == nil {
		defer ln.Close()
	}
	var p ports
	defer p.Close()
	if _, err := p.choose("API server", "--api-port", 0, 0, 65535); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("got %v", err)
	}
}

func TestPreflight(t *testing.T) {
	if err := haveTun(filepath.Join(t.TempDir(), "tun")); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "modprobe tun") {
		t.Errorf("without the device: %v", err)
	}
	if err := haveTun(t.TempDir()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("with a folder in its place: %v", err)
	}
	if err := (Assets{ControlPlane: "/nonexistent/cocoon-up"}).check(); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "make build") {
		t.Errorf("without a build: %v", err)
	}
}
