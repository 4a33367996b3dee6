package netpolicy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// oracle decides about one packet as the documentation of NetworkPolicy reads, without sets and without indexes.
type oracle struct{ cluster }

func (o oracle) at(addr netip.Addr) *pod {
	for i, p := range o.pods {
		if p.peer() && slices.Contains(p.addresses, addr) {
			return &o.pods[i]
		}
	}
	return nil
}

func (o oracle) passes(x packet) bool {
	from, to := netip.MustParseAddr(x.from), netip.MustParseAddr(x.to)
	if from == to {
		return true
	}
	src, dst := o.at(from), o.at(to)
	if src != nil && len(src.guests) > 0 && !o.direction(*src, networkingv1.PolicyTypeEgress, to, dst, dst, x) {
		return false
	}
	return dst == nil || len(dst.guests) == 0 || o.direction(*dst, networkingv1.PolicyTypeIngress, from, src, dst, x)
}

// direction decides for the pod me, whose peer is other at addr. to is the pod that receives.
func (o oracle) direction(me pod, kind networkingv1.PolicyType, addr netip.Addr, other, to *pod, x packet) bool {
	isolated := false
	for _, p := range o.policies {
		types := p.Spec.PolicyTypes
		if len(types) == 0 {
			types = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
			if len(p.Spec.Egress) > 0 {
				types = append(types, networkingv1.PolicyTypeEgress)
			}
		}
		if p.Namespace != me.Namespace || !slices.Contains(types, kind) || !matches(&p.Spec.PodSelector, me.Labels) {
			continue
		}
		isolated = true
		if kind == networkingv1.PolicyTypeIngress {
			for _, r := range p.Spec.Ingress {
				if o.peer(p.Namespace, r.From, addr, other) && port(r.Ports, to, x) {
					return true
				}
			}
			continue
		}
		for _, r := range p.Spec.Egress {
			if o.peer(p.Namespace, r.To, addr, other) && port(r.Ports, to, x) {
				return true
			}
		}
	}
	return !isolated
}

func matches(s *metav1.LabelSelector, of map[string]string) bool {
	m, _ := metav1.LabelSelectorAsSelector(s)
	return m.Matches(labels.Set(of))
}

func (o oracle) peer(namespace string, peers []networkingv1.NetworkPolicyPeer, addr netip.Addr, other *pod) bool {
	if len(peers) == 0 {
		return true
	}
	for _, p := range peers {
		if p.IPBlock != nil {
			if netip.MustParsePrefix(p.IPBlock.CIDR).Contains(addr) && !slices.ContainsFunc(p.IPBlock.Except, func(e string) bool { return netip.MustParsePrefix(e).Contains(addr) }) {
				return true
			}
			continue
		}
		if other == nil {
			continue
		}
		space := other.Namespace == namespace
		if p.NamespaceSelector != nil {
			set, there := o.namespaces[other.Namespace]
			space = there && matches(p.NamespaceSelector, set)
		}
		if space && (p.PodSelector == nil || matches(p.PodSelector, other.Labels)) {
			return true
		}
	}
	return false
}

func port(ports []networkingv1.NetworkPolicyPort, to *pod, x packet) bool {
	if len(ports) == 0 {
		return true
	}
	name := map[network.Protocol]corev1.Protocol{network.TCP: corev1.ProtocolTCP, network.UDP: corev1.ProtocolUDP, network.SCTP: corev1.ProtocolSCTP}[x.protocol]
	for _, p := range ports {
		kind := corev1.ProtocolTCP
		if p.Protocol != nil {
			kind = *p.Protocol
		}
		switch {
		case kind != name:
		case p.Port == nil:
			return true
		case p.Port.Type == intstr.Int && p.EndPort == nil:
			if int32(x.port) == p.Port.IntVal {
				return true
			}
		case p.Port.Type == intstr.Int:
			if int32(x.port) >= p.Port.IntVal && int32(x.port) <= *p.EndPort {
				return true
			}
		case to != nil:
			for _, c := range to.Spec.Containers {
				for _, own := range c.Ports {
					protocol := own.Protocol
					if protocol == "" {
						protocol = corev1.ProtocolTCP
					}
					if own.Name == p.Port.StrVal && protocol == name && int32(x.port) == own.ContainerPort {
						return true
					}
				}
			}
		}
	}
	return false
}

// random makes clusters and packets of few values, so that they meet.
type random struct{ *rand.Rand }

func one[T any](r random, of ...T) T { return of[r.IntN(len(of))] }

func (r random) labels() map[string]string {
	return map[string]string{"app": one(r, "a", "b", "c"), "tier": one(r, "x", "y")}
}

func (r random) selector() *metav1.LabelSelector {
	switch r.IntN(5) {
	case 0:
		return &metav1.LabelSelector{}
	case 1:
		return &metav1.LabelSelector{MatchLabels: r.labels()}
	case 2:
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{
			Key: one(r, "app", "tier", "env"), Operator: one(r, metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn), Values: []string{one(r, "a", "x", "prod"), "b"},
		}}}
	case 3:
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{
			Key: one(r, "app", "env", "missing"), Operator: one(r, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist),
		}}}
	}
	return &metav1.LabelSelector{MatchLabels: map[string]string{one(r, "app", "env"): one(r, "a", "b", "prod", "dev")}}
}

func (r random) peers() (out []networkingv1.NetworkPolicyPeer) {
	for range r.IntN(3) {
		var p networkingv1.NetworkPolicyPeer
		switch r.IntN(4) {
		case 0:
			p.IPBlock = &networkingv1.IPBlock{CIDR: one(r, "10.1.0.0/16", "10.0.0.0/8", "0.0.0.0/0", "10.1.0.4/30")}
			for range r.IntN(3) {
				p.IPBlock.Except = append(p.IPBlock.Except, one(r, "10.1.0.0/30", "10.1.0.5/32", "10.2.0.0/16", "10.1.0.0/29"))
			}
			if r.IntN(4) == 0 {
				p.IPBlock = &networkingv1.IPBlock{CIDR: "fd00::/16", Except: []string{"fd00::/126"}}
			}
		case 1:
			p.PodSelector = r.selector()
		case 2:
			p.NamespaceSelector = r.selector()
		default:
			p.PodSelector, p.NamespaceSelector = r.selector(), r.selector()
		}
		out = append(out, p)
	}
	return out
}

func (r random) ports() (out []networkingv1.NetworkPolicyPort) {
	for range r.IntN(3) {
		p := networkingv1.NetworkPolicyPort{}
		if r.IntN(2) == 0 {
			kind := one(r, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
			p.Protocol = &kind
		}
		switch r.IntN(4) {
		case 0:
			at := intstr.FromString(one(r, "web", "dns", "missing"))
			p.Port = &at
		case 1:
			at, end := intstr.FromInt32(one[int32](r, 1, 50, 80)), one[int32](r, 80, 8080, 65535)
			p.Port, p.EndPort = &at, &end
		case 2:
			at := intstr.FromInt32(one[int32](r, 53, 80, 8080))
			p.Port = &at
		}
		out = append(out, p)
	}
	return out
}

func (r random) policy(i int) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: one(r, "prod", "dev"), Name: fmt.Sprint("p", i)}}
	p.Spec.PodSelector = *r.selector()
	p.Spec.PolicyTypes = one(r, nil, []networkingv1.PolicyType{"Ingress"}, []networkingv1.PolicyType{"Egress"}, []networkingv1.PolicyType{"Ingress", "Egress"})
	for range r.IntN(3) {
		p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: r.peers(), Ports: r.ports()})
	}
	for range r.IntN(3) {
		p.Spec.Egress = append(p.Spec.Egress, networkingv1.NetworkPolicyEgressRule{To: r.peers(), Ports: r.ports()})
	}
	return p
}

func (r random) cluster() (cluster, map[string]vm.ID) {
	c, ids := cluster{namespaces: map[string]labels.Set{"prod": {"env": "prod", "app": "a"}, "dev": {"env": "dev"}}}, map[string]vm.ID{}
	for i := range 8 {
		ip := fmt.Sprintf("10.%d.0.%d", 1+r.IntN(2), i)
		p := member(one(r, "prod", "dev", "unknown"), fmt.Sprint("pod", i), ip, r.labels(), func(p *corev1.Pod) {
			p.Spec.Containers[0].Ports[0].ContainerPort = one[int32](r, 80, 8080)
			p.Status.Phase = one(r, corev1.PodRunning, corev1.PodRunning, corev1.PodPending, corev1.PodFailed)
			p.Spec.HostNetwork = r.IntN(8) == 0
		})
		if len(p.guests) > 0 {
			p.Spec.HostNetwork, p.Status.Phase = false, corev1.PodRunning
		}
		for _, a := range p.addresses {
			if len(p.guests) > 0 {
				ids[a.String()] = p.guests[0]
			}
		}
		c.pods = append(c.pods, p)
	}
	for i := range 1 + r.IntN(4) {
		c.policies = append(c.policies, r.policy(i))
	}
	return c, ids
}

// FuzzCompile compares the compiled policies with the oracle, packet by packet.
func FuzzCompile(f *testing.F) {
	for seed := range uint64(300) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := random{rand.New(rand.NewPCG(seed, 7))}
		c, ids := r.cluster()
		p, _ := compile("n", c)
		if err := p.Validate(); err != nil {
			t.Fatal(err)
		}
		v4, v6 := []string{"198.51.100.7"}, []string{"2001:db8::7"}
		for _, one := range c.pods {
			for _, a := range one.addresses {
				if a.Is4() {
					v4 = append(v4, a.String())
				} else {
					v6 = append(v6, a.String())
				}
			}
		}
		for _, addrs := range [][]string{v4, v6} {
			for range 200 {
				x := packet{one(r, addrs...), one(r, addrs...), one(r, network.TCP, network.UDP, network.SCTP, 0), one[uint16](r, 1, 53, 79, 80, 8080, 9000)}
				if x.protocol == 0 {
					x.port = 0
				}
				if got, want := passes(p, ids, x), (oracle{c}).passes(x); got != want {
					for _, p := range c.policies {
						y, _ := yaml.Marshal(p)
						t.Logf("%s", y)
					}
					for _, p := range c.pods {
						t.Log(p.Namespace, p.Name, p.addresses, p.Labels, p.Status.Phase, p.Spec.HostNetwork, p.Spec.Containers[0].Ports)
					}
					t.Fatalf("%+v passes: %v, and should: %v", x, got, want)
				}
			}
		}
	})
}
