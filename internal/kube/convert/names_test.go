package convert

import (
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestHostNames(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*corev1.PodSpec)
		domain string
		want   []string
	}{
		"of the pod":         {func(*corev1.PodSpec) {}, "", []string{"web"}},
		"its own":            {func(s *corev1.PodSpec) { s.Hostname = "box" }, "", []string{"box"}},
		"subdomain":          {func(s *corev1.PodSpec) { s.Hostname, s.Subdomain = "box", "svc-1" }, "", []string{"box.svc-1.default.svc.cluster.local", "box"}},
		"another cluster":    {func(s *corev1.PodSpec) { s.Subdomain = "svc-1" }, "corp.example", []string{"web.svc-1.default.svc.corp.example", "web"}},
		"full":               {func(s *corev1.PodSpec) { s.Subdomain, s.SetHostnameAsFQDN = "svc-1", ptr(true) }, "", []string{"web.svc-1.default.svc.cluster.local", "web"}},
		"full, of no domain": {func(s *corev1.PodSpec) { s.SetHostnameAsFQDN = ptr(true) }, "", []string{"web"}},
		"override":           {func(s *corev1.PodSpec) { s.Subdomain, s.HostnameOverride = "svc-1", ptr("any.name") }, "", []string{"any.name", "any"}},
	} {
		pod := plain(func(p *corev1.Pod) { tc.change(&p.Spec) })
		if errs := Check(pod); len(errs) > 0 {
			t.Errorf("%s: %v", name, errs)
		}
		s := Spec(pod, Node{ClusterDomain: tc.domain}, nil)
		if d := diff.Of(tc.want, s.HostNames()); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		if full := name == "full"; full != (s.Hostname == tc.want[0] && len(tc.want) == 2) && name != "override" {
			t.Errorf("%s: the host name is %s", name, s.Hostname)
		}
	}
}

// With name servers of the cluster a guest's resolv.conf is that of a container on a kubelet.
func TestClusterDNS(t *testing.T) {
	node := Node{ClusterDNS: []string{"10.96.0.10"}, ClusterDomain: "corp.example", Searches: []string{"lab.example"}}
	cluster := vm.DNS{
		Own: true, Offered: true, Servers: []string{"10.96.0.10"}, Options: []string{"ndots:5"},
		Searches: []string{"default.svc.corp.example", "svc.corp.example", "corp.example", "lab.example"},
	}
	asked := cluster
	asked.Offered = false
	asked.Servers = []string{"10.96.0.10", "1.1.1.1"}
	asked.Searches = append(asked.Searches[:4:4], "a.example")
	asked.Options = []string{"ndots:1", "edns0"}
	config := &corev1.PodDNSConfig{
		Nameservers: []string{"1.1.1.1", "10.96.0.10"}, Searches: []string{"a.example", "corp.example"},
		Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr("1")}, {Name: "edns0"}},
	}
	for name, tc := range map[string]struct {
		policy corev1.DNSPolicy
		config *corev1.PodDNSConfig
		node   Node
		want   *vm.DNS
	}{
		"first":                  {corev1.DNSClusterFirst, nil, node, &cluster},
		"not said":               {"", nil, node, &cluster},
		"first, of the host":     {corev1.DNSClusterFirstWithHostNet, nil, node, &cluster},
		"of the node":            {corev1.DNSDefault, nil, node, nil},
		"no servers":             {corev1.DNSClusterFirst, nil, Node{ClusterDomain: "corp.example"}, nil},
		"with more":              {corev1.DNSClusterFirst, config, node, &asked},
		"of the node, with more": {corev1.DNSDefault, &corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1"}}, node, &vm.DNS{Servers: []string{"1.1.1.1"}}},
		"none":                   {corev1.DNSNone, &corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1"}}, node, &vm.DNS{Own: true, Servers: []string{"1.1.1.1"}}},
	} {
		pod := plain(func(p *corev1.Pod) { p.Spec.DNSPolicy, p.Spec.DNSConfig = tc.policy, tc.config })
		if d := diff.Of(tc.want, Spec(pod, tc.node, nil).DNS); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	long := strings.Repeat("a", 200) + ".example"
	var many []string
	for i := range 40 {
		many = append(many, strconv.Itoa(i)+"."+long)
	}
	if got := fitting(many); len(strings.Join(got, " ")) > 2048 || len(got) != 9 {
		t.Errorf("%d domains", len(got))
	}
}

func TestHostEntriesAndDNS(t *testing.T) {
	pod := plain(func(p *corev1.Pod) {
		p.Spec.HostAliases = []corev1.HostAlias{{IP: "123.45.67.89", Hostnames: []string{"foo", "bar"}}}
		p.Spec.DNSPolicy = corev1.DNSNone
		p.Spec.DNSConfig = &corev1.PodDNSConfig{
			Nameservers: []string{"1.1.1.1"}, Searches: []string{"resolv.conf.local"},
			Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr("2")}, {Name: "edns0"}},
		}
	})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	s := Spec(pod, Node{}, nil)
	if len(s.Hosts) != 1 || s.Hosts[0].Line() != "123.45.67.89\tfoo\tbar" {
		t.Errorf("entries: %+v", s.Hosts)
	}
	want := &vm.DNS{Own: true, Servers: []string{"1.1.1.1"}, Searches: []string{"resolv.conf.local"}, Options: []string{"ndots:2", "edns0"}}
	if d := diff.Of(want, s.DNS); d != "" {
		t.Error(d)
	}
	if lines := s.DNS.Lines(); len(lines) != 2 || lines[0] != "search resolv.conf.local" || lines[1] != "options ndots:2 edns0" {
		t.Errorf("lines: %q", lines)
	}
	if plain := Spec(plain(), Node{}, nil); plain.DNS != nil || plain.Hosts != nil || plain.Domain != "" {
		t.Errorf("a pod that says nothing: %+v", plain)
	}
}
