package up

import (
	"io"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// rules runs commands of nft in the namespace of the test, and returns the tables that then exist.
func rules(t *testing.T, script string) []string {
	t.Helper()
	if _, err := nft(script, "-f", "-"); err != nil {
		t.Fatal(err)
	}
	_, tables, err := listRules()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, table := range tables {
		names = append(names, table.Family+" "+table.Name)
	}
	return names
}

func TestTablesOfServices(t *testing.T) {
	netns.Require(t)
	need.Tool(t, "nft")
	t.Cleanup(func() { rules(t, "flush ruleset") })
	mine, other := layout{"/a"}, layout{"/b"}

	for what, foreign := range map[string]string{
		"a kube-proxy":             "table ip kube-proxy { chain nat { }\n}",
		"one of iptables":          "table ip nat { chain KUBE-SERVICES { }\n}",
		"a kubelet":                "table ip mangle { chain KUBE-KUBELET-CANARY { }\n}",
		"the unit":                 "table inet cocoon_kube_proxy { }",
		"a kube-proxy and bridges": "table ip6 kube-proxy { }\ntable inet cocoon-services-default { }",
	} {
		before := rules(t, foreign)
		if why, err := takeTables(mine); err != nil || !strings.Contains(why, "another cluster") {
			t.Errorf("%s: %q, %v", what, why, err)
		}
		if err := dropServices(mine); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if after := rules(t, ""); !reflect.DeepEqual(before, after) {
			t.Errorf("%s: %v became %v", what, before, after)
		}
		rules(t, "flush ruleset")
	}

	bystander := rules(t, "table inet cocoon-a-default { }\ntable ip filter { chain DOCKER { }\n}")
	if why, err := takeTables(mine); why != "" || err != nil {
		t.Fatal(why, err)
	}
	rules(t, "table ip kube-proxy { chain nat { }\n}\ntable ip6 kube-proxy { }")
	if err := dropServices(other); err != nil { // not its tables
		t.Fatal(err)
	}
	if got := rules(t, ""); len(got) != len(bystander)+3 {
		t.Errorf("another instance dropped rules: %v", got)
	}
	if why, err := takeTables(other); why != "" || err != nil { // the first instance was killed
		t.Fatal(why, err)
	}
	if got := rules(t, ""); len(got) != len(bystander)+1 {
		t.Errorf("rules of a killed instance stay: %v", got)
	}
	if err := dropServices(other); err != nil {
		t.Fatal(err)
	}
	if got := rules(t, ""); !reflect.DeepEqual(got, bystander) {
		t.Errorf("rules: %v, before %v", got, bystander)
	}
}

// Of two instances in one namespace only one serves Services. Who asked for them is refused, who did not goes without.
func TestServicesHaveOneOwner(t *testing.T) {
	netns.Require(t)
	need.Tool(t, "nft")
	t.Cleanup(func() { rules(t, "flush ruleset") })
	yes, no := true, false
	claim := func(dir string, wanted *bool, nodes int) (*instance, string, error) {
		in := &instance{layout: layout{dir}, settings: Settings{Services: wanted, Nodes: make([]NodeSettings, nodes)}}
		said := ""
		in.report = func(step string, _ time.Duration) { said = step }
		err := in.claimServices()
		return in, said, err
	}
	for what, tc := range map[string]struct {
		wanted *bool
		nodes  int
	}{"switched off": {&no, 1}, "without nodes": {nil, 0}} {
		if in, said, err := claim("/a", tc.wanted, tc.nodes); in.services || said != "" || err != nil {
			t.Errorf("%s: %v, %q, %v", what, in.services, said, err)
		}
	}
	first, said, err := claim("/a", nil, 1)
	if !first.services || said != "" || err != nil {
		t.Fatalf("%v, %q, %v", first.services, said, err)
	}
	if in, said, err := claim("/b", nil, 1); in.services || !strings.Contains(said, "another instance") || err != nil {
		t.Errorf("the second: %v, %q, %v", in.services, said, err)
	}
	if _, _, err := claim("/b", &yes, 1); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "--services=false") {
		t.Errorf("the second, which needs them: %v", err)
	}
	if err := downServices(layout{"/a"}); err != nil {
		t.Error(err)
	}
	if got := rules(t, ""); len(got) != 1 {
		t.Errorf("rules in use were removed: %v", got)
	}
	first.ports.Close()
	if err := downServices(layout{"/a"}); err != nil {
		t.Error(err)
	}
	if got := rules(t, ""); len(got) != 0 {
		t.Errorf("rules stay: %v", got)
	}
}

func TestCorefile(t *testing.T) {
	s := Settings{DNSPort: 1, DNSReadyPort: 2, DNSMetricsPort: 3}
	with := string(corefile(s, "10.88.0.1", "/a b/kubeconfig", []byte("search x\nnameserver 127.0.0.53\nnameserver 9.9.9.9\n")))
	for _, want := range []string{".:1 {", "bind 10.88.0.1", "ready 127.0.0.1:2", "kubernetes cluster.local", `kubeconfig "/a b/kubeconfig"`, "forward . /etc/resolv.conf", "loop"} {
		if strings.Count(with, want) != 1 {
			t.Errorf("%q is not once in\n%s", want, with)
		}
	}
	if without := string(corefile(s, "10.88.0.1", "/k", []byte("#nameserver 9.9.9.9\nnameserver\n"))); strings.Contains(without, "forward") || strings.Contains(without, "loop") {
		t.Errorf("it asks a server that does not exist:\n%s", without)
	}
}

func TestNodesAreToldOfServices(t *testing.T) {
	s := Settings{Nodes: []NodeSettings{{Name: "n-0", Address: "10.88.0.1"}, {Name: "n-1", Address: "10.88.1.1"}}}
	l := layout{"/a"}
	c := cocoondConfig(l.node(s, 0), pki{}, s, Assets{}, true)
	network, node := c["network"].(object), c["virtualNode"].(object)
	if !reflect.DeepEqual(network["services"], []string{"10.96.0.1:443", "10.96.0.10:53"}) || node["clusterDNS"] != "10.96.0.10" {
		t.Errorf("%v, %v", network, node)
	}
	if !reflect.DeepEqual(network["peers"], []string{bridgeName(l.node(s, 1))}) {
		t.Errorf("peers: %v", network["peers"])
	}
	c = cocoondConfig(l.node(s, 0), pki{}, s, Assets{}, false)
	if network, node := c["network"].(object), c["virtualNode"].(object); network["services"] != nil || node["clusterDNS"] != nil {
		t.Errorf("without Services: %v, %v", network, node)
	}
	if got := proxyConfig(s, "/k"); got["hostnameOverride"] != "n-0" || !reflect.DeepEqual(got["nodePortAddresses"], []string{"10.88.0.1/32", "10.88.1.1/32"}) {
		t.Errorf("kube-proxy: %v", got)
	}
	if _, err := serviceManifests("10.88.0.1", 1, 2); err != nil {
		t.Error(err)
	}
}

func TestRelay(t *testing.T) {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		for {
			c, err := server.Accept()
			if err != nil {
				return
			}
			go func() { // answers when the question has ended
				defer c.Close()
				asked, _ := io.ReadAll(c)
				_, _ = c.Write(append([]byte("you said "), asked...))
			}()
		}
	}()
	r, err := startRelay(t.Context(), "127.0.0.1", server.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	dial := func() *net.TCPConn {
		c, err := net.DialTCP("tcp", nil, r.ln.Addr().(*net.TCPAddr))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := dial()
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); string(got) != "you said hello" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	idle := dial()
	defer idle.Close()
	if _, err := idle.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	r.Close()               // ends the idle connection too
	_, _ = io.ReadAll(idle) // returns, because the connection has ended
	if _, err := net.Dial("tcp", r.ln.Addr().String()); err == nil {
		t.Error("it still listens")
	}
}
