package netpolicy

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// packet is the first one of a connection. Port 0 is a protocol without ports.
type packet struct {
	from, to string
	protocol network.Protocol
	port     uint16
}

func tcp(from, to string, port uint16) packet { return packet{from, to, network.TCP, port} }
func udp(from, to string, port uint16) packet { return packet{from, to, network.UDP, port} }
func icmp(from, to string) packet             { return packet{from: from, to: to} }

// passes does what the network does with a packet: both ends must allow it.
func passes(p network.Policies, of map[string]vm.ID, x packet) bool {
	from, to := netip.MustParseAddr(x.from), netip.MustParseAddr(x.to)
	if from == to {
		return true
	}
	for _, g := range p.Guests {
		if g.ID == of[x.from] && !some(p.Egress, g.Egress, to, to, x) || g.ID == of[x.to] && !some(p.Ingress, g.Ingress, from, to, x) {
			return false
		}
	}
	return true
}

func some(all []network.Policy, mine []int, peer, to netip.Addr, x packet) bool {
	for _, i := range mine {
		if slices.ContainsFunc(all[i].Rules, func(r network.Rule) bool {
			inside := r.Anyone || slices.ContainsFunc(r.Peers, func(s network.Range) bool {
				return s.First.Is4() == peer.Is4() && !peer.Less(s.First) && !s.Last.Less(peer)
			})
			open := r.AllPorts || x.protocol != 0 && (slices.ContainsFunc(r.Ports, func(s network.Port) bool {
				return s.Protocol == x.protocol && s.First <= x.port && x.port <= s.Last
			}) || slices.Contains(r.Named, network.Endpoint{Addr: to, Protocol: x.protocol, Port: x.port}))
			return inside && open
		}) {
			return true
		}
	}
	return len(mine) == 0
}

// member makes a pod with that address. Pods in 10.1 are on this node.
func member(namespace, name, ip string, of map[string]string, change ...func(*corev1.Pod)) pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: of}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{
		{Name: "web", ContainerPort: 8080}, {Name: "dns", ContainerPort: 53, Protocol: corev1.ProtocolUDP},
	}}}
	for _, fn := range change {
		fn(p)
	}
	out := pod{Pod: p}
	if ip != "" {
		a := netip.MustParseAddr(ip)
		out.addresses = []netip.Addr{a}
		if netip.MustParsePrefix("10.1.0.0/16").Contains(a) {
			out.guests = []vm.ID{vm.ID(name)}
			out.addresses = append(out.addresses, netip.MustParseAddr("fd00::"+a.String()[len("10.1.0."):]))
		}
	}
	return out
}

// world is a cluster: a, b and c in namespace prod, d in dev, on this node; far in prod, elsewhere.
func world(t *testing.T, policies ...string) cluster {
	t.Helper()
	app := func(name string) map[string]string { return map[string]string{"app": name} }
	c := cluster{
		namespaces: map[string]labels.Set{"prod": {"env": "prod"}, "dev": {"env": "dev"}},
		pods: []pod{
			member("prod", "a", "10.1.0.1", app("a")), member("prod", "b", "10.1.0.2", app("b")), member("prod", "c", "10.1.0.3", app("c"), func(p *corev1.Pod) {
				p.Spec.Containers[0].Ports[0].ContainerPort = 9090
			}),
			member("dev", "d", "10.1.0.4", app("a")), member("prod", "far", "10.2.0.1", app("a")),
			member("prod", "waiting", "", app("a"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
			member("prod", "done", "10.2.0.9", app("a"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
			member("prod", "host", "10.3.0.1", app("a"), func(p *corev1.Pod) { p.Spec.HostNetwork = true }),
		},
	}
	for _, text := range policies {
		p := &networkingv1.NetworkPolicy{}
		if err := yaml.UnmarshalStrict([]byte("metadata: {namespace: prod}\nspec:\n  "+text), p); err != nil {
			t.Fatal(err)
		}
		p.Name = text[:min(len(text), 20)]
		c.policies = append(c.policies, p)
	}
	return c
}

var ids = map[string]vm.ID{"10.1.0.1": "a", "10.1.0.2": "b", "10.1.0.3": "c", "10.1.0.4": "d", "fd00::1": "a", "fd00::2": "b", "fd00::3": "c", "fd00::4": "d"}

const (
	a, b, c, d      = "10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.4"
	far, done       = "10.2.0.1", "10.2.0.9"
	hostNet, world1 = "10.3.0.1", "198.51.100.7"
)

func TestCompile(t *testing.T) {
	for name, tt := range map[string]struct {
		policies []string
		yes, no  []packet
	}{
		"no policies": {nil, []packet{tcp(a, b, 80), icmp(world1, a), udp(d, far, 53)}, nil},
		"deny all ingress": {
			[]string{`{podSelector: {}}`},
			[]packet{tcp(a, far, 80), tcp(a, d, 80), tcp(a, a, 80), icmp(a, world1)},
			[]packet{tcp(b, a, 80), icmp(world1, b), tcp(far, c, 80), tcp("fd00::1", "fd00::2", 80)},
		},
		"deny all egress": {
			[]string{`{podSelector: {}, policyTypes: [Egress]}`},
			[]packet{tcp(far, a, 80), tcp(d, a, 80)},
			[]packet{tcp(a, b, 80), icmp(a, world1), tcp(a, d, 80), udp("fd00::1", "fd00::4", 53)},
		},
		"deny both":       {[]string{`{podSelector: {matchLabels: {app: a}}, policyTypes: [Ingress, Egress]}`}, []packet{tcp(b, c, 80), tcp(b, d, 80)}, []packet{tcp(a, b, 1), tcp(b, a, 1)}},
		"types: defaults": {[]string{`{podSelector: {}, egress: [{to: [{ipBlock: {cidr: 198.51.100.0/24}}]}]}`}, []packet{tcp(a, world1, 80)}, []packet{tcp(a, far, 80), tcp(world1, a, 80)}},
		"types: egress rules have no effect": {
			[]string{`{podSelector: {}, policyTypes: [Ingress], egress: [{to: [{ipBlock: {cidr: 198.51.100.0/24}}]}]}`}, []packet{tcp(a, far, 80)}, []packet{tcp(b, a, 80)},
		},
		"allow everything":  {[]string{`{podSelector: {}}`, `{podSelector: {}, ingress: [{}]}`}, []packet{tcp(b, a, 80), icmp(world1, a)}, nil},
		"an empty from":     {[]string{`{podSelector: {}, ingress: [{from: [], ports: [{port: 80}]}]}`}, []packet{tcp(world1, a, 80)}, []packet{tcp(world1, a, 81), icmp(world1, a)}},
		"a pod selector":    {[]string{`{podSelector: {matchLabels: {app: b}}, ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]}`}, []packet{tcp(a, b, 1), icmp(far, b), udp("fd00::1", "fd00::2", 9)}, []packet{tcp(c, b, 1), tcp(d, b, 1), tcp(hostNet, b, 1), tcp(done, b, 1)}},
		"expressions":       {[]string{`{podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [a, c]}]}}`}, []packet{tcp(b, a, 1), tcp(b, c, 1)}, []packet{tcp(a, b, 1)}},
		"an empty selector": {[]string{`{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}`}, []packet{tcp(a, b, 1), tcp(far, b, 1)}, []packet{tcp(d, b, 1), tcp(world1, b, 1)}},
		"namespaces":        {[]string{`{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {env: dev}}}]}]}`}, []packet{tcp(d, b, 1)}, []packet{tcp(a, b, 1), tcp(far, b, 1)}},
		"every namespace":   {[]string{`{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}]}`}, []packet{tcp(d, b, 1), tcp(far, b, 1)}, []packet{tcp(world1, b, 1), tcp(hostNet, b, 1)}},
		"both selectors": {
			[]string{`{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {env: prod}}, podSelector: {matchLabels: {app: a}}}]}]}`},
			[]packet{tcp(a, b, 1), tcp(far, b, 1)},
			[]packet{tcp(d, b, 1), tcp(c, b, 1)},
		},
		"two peers": {
			[]string{`{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {env: dev}}}, {podSelector: {matchLabels: {app: c}}}]}]}`},
			[]packet{tcp(d, b, 1), tcp(c, b, 1)},
			[]packet{tcp(a, b, 1)},
		},
		"a block": {
			[]string{`{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 198.51.0.0/16, except: [198.51.100.0/29, 198.51.100.16/28]}}]}]}`},
			[]packet{tcp(a, "198.51.100.8", 1), icmp(a, "198.51.0.0"), tcp(a, "198.51.255.255", 1)},
			[]packet{tcp(a, world1, 1), tcp(a, "198.51.100.20", 1), tcp(a, "198.52.0.0", 1), tcp(a, b, 1), tcp("fd00::1", "fd00::2", 1)},
		},
		"a block of IPv6": {[]string{`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: "fd00::/64", except: ["fd00::3/128"]}}]}]}`}, []packet{tcp("fd00::1", "fd00::2", 1)}, []packet{tcp("fd00::3", "fd00::2", 1), tcp(a, b, 1)}},
		"a bad exception": {[]string{`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [noise]}}]}]}`}, nil, []packet{tcp(a, b, 1)}},
		"ports": {
			[]string{`{podSelector: {}, ingress: [{ports: [{port: 80}, {protocol: UDP, port: 53}, {protocol: SCTP}]}]}`},
			[]packet{tcp(a, b, 80), udp(a, b, 53), {a, b, network.SCTP, 7}},
			[]packet{udp(a, b, 80), tcp(a, b, 53), icmp(a, b)},
		},
		"a range": {
			[]string{`{podSelector: {}, ingress: [{ports: [{port: 8000, endPort: 8010}]}]}`},
			[]packet{tcp(a, b, 8000), tcp(a, b, 8010)},
			[]packet{tcp(a, b, 7999), tcp(a, b, 8011), udp(a, b, 8005)},
		},
		"a named port": {
			[]string{`{podSelector: {}, ingress: [{from: [{podSelector: {}}], ports: [{port: web}]}]}`},
			[]packet{tcp(a, b, 8080), tcp(a, c, 9090), tcp("fd00::1", "fd00::3", 9090)},
			[]packet{tcp(a, c, 8080), tcp(a, b, 9090), tcp(d, b, 8080), udp(a, b, 8080)},
		},
		"a named port of another protocol": {[]string{`{podSelector: {}, ingress: [{ports: [{port: dns}, {port: missing}]}]}`}, nil, []packet{udp(a, b, 53), tcp(a, b, 53), tcp(a, b, 8080)}},
		"a named port of a receiver": {
			[]string{`{podSelector: {matchLabels: {app: a}}, policyTypes: [Egress], egress: [{to: [{podSelector: {}}], ports: [{port: web}, {protocol: UDP, port: dns}]}]}`},
			[]packet{tcp(a, b, 8080), tcp(a, c, 9090), udp(a, far, 53)},
			[]packet{tcp(a, c, 8080), tcp(a, d, 8080), udp(a, d, 53)},
		},
		"a named port of any receiver": {
			[]string{`{podSelector: {matchLabels: {app: a}}, policyTypes: [Egress], egress: [{ports: [{port: web}]}]}`},
			[]packet{tcp(a, b, 8080), tcp(a, d, 8080)},
			[]packet{tcp(a, world1, 8080), tcp(a, c, 8080)},
		},
		"a named port in a block": {
			[]string{`{podSelector: {matchLabels: {app: a}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.1.0.0/16}}], ports: [{port: web}]}]}`},
			[]packet{tcp(a, b, 8080), tcp(a, d, 8080)},
			[]packet{tcp(a, far, 8080), tcp(a, b, 9090)},
		},
		"policies add up": {
			[]string{
				`{podSelector: {matchLabels: {app: b}}, ingress: [{from: [{podSelector: {matchLabels: {app: a}}}], ports: [{port: 80}]}]}`,
				`{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: c}}}]}]}`,
			},
			[]packet{tcp(a, b, 80), tcp(c, b, 81), tcp(c, a, 1)},
			[]packet{tcp(a, b, 81), tcp(b, a, 1), tcp(d, b, 80)},
		},
		"both ends": {
			[]string{
				`{podSelector: {matchLabels: {app: a}}, policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {app: b}}}], ports: [{port: 80}, {port: 81}]}]}`,
				`{podSelector: {matchLabels: {app: b}}, ingress: [{from: [{podSelector: {matchLabels: {app: a}}}], ports: [{port: 81}, {port: 82}]}]}`,
			},
			[]packet{tcp(a, b, 81), tcp(b, a, 1)},
			[]packet{tcp(a, b, 80), tcp(a, b, 82), tcp(a, c, 81)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, _ := compile("n", world(t, tt.policies...))
			if err := p.Validate(); err != nil {
				t.Fatal(err)
			}
			if len(p.Guests) != 4 {
				t.Errorf("guests %+v", p.Guests)
			}
			for _, x := range tt.yes {
				if !passes(p, ids, x) {
					t.Errorf("%+v does not pass", x)
				}
			}
			for _, x := range tt.no {
				if passes(p, ids, x) {
					t.Errorf("%+v passes", x)
				}
			}
		})
	}
}

// Policies that select no pod of the node are not sent to it, and the same cluster gives the same policies.
func TestCompileIsStable(t *testing.T) {
	in := world(t, `{podSelector: {matchLabels: {app: nobody}}, ingress: [{}]}`, `{podSelector: {}, policyTypes: [Ingress, Egress], ingress: [{ports: [{port: web}]}], egress: [{ports: [{port: web}]}]}`)
	want, _ := compile("n", in)
	if len(want.Ingress) != 1 || len(want.Egress) != 1 || want.Ingress[0].Name == "" {
		t.Errorf("%+v", want)
	}
	for range 20 {
		slices.Reverse(in.pods)
		slices.Reverse(in.policies)
		got, _ := compile("n", in)
		if d := diff.Of(want, got); d != "" {
			t.Fatal(d)
		}
	}
}

func TestSlimPod(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	full := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "p", UID: "u", ResourceVersion: "7", Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"big": "text"}},
		Spec: corev1.PodSpec{
			NodeName: "here", HostNetwork: true,
			Containers:     []corev1.Container{{Env: []corev1.EnvVar{{Name: "SECRET", Value: "x"}}, Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 1, HostIP: "1"}, {ContainerPort: 2}}}},
			InitContainers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "first", ContainerPort: 3}}}, {RestartPolicy: &always, Ports: []corev1.ContainerPort{{Name: "side", ContainerPort: 4}}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}, ContainerStatuses: []corev1.ContainerStatus{{ContainerID: "cocoon://x", Image: "big"}}},
	}
	want := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "p", UID: "u", ResourceVersion: "7", Labels: map[string]string{"a": "b"}},
		Spec: corev1.PodSpec{
			NodeName: "here", HostNetwork: true, Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 1}, {Name: "side", ContainerPort: 4}}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}, ContainerStatuses: []corev1.ContainerStatus{{ContainerID: "cocoon://x"}}},
	}
	got, err := slimPod("here", nil)(full)
	if d := diff.Of[any](want, got); err != nil || d != "" {
		t.Error(err, d)
	}
	want.Status.ContainerStatuses = nil
	if got, _ = slimPod("elsewhere", nil)(full); diff.Of[any](want, got) != "" {
		t.Error(diff.Of[any](want, got))
	}
}
