package netpolicy

import (
	"cmp"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// cluster is what the compiler reads.
type cluster struct {
	pods       []pod
	namespaces map[string]labels.Set
	policies   []*networkingv1.NetworkPolicy
}

// compile is pure: it returns the policies of the guests of a node. Only policies that select one of its pods are in them. The
// result depends on the content of the cluster alone, not on the order of its lists.
func compile(node string, c cluster) network.Policies {
	slices.SortFunc(c.pods, func(a, b pod) int { return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name)) })
	slices.SortFunc(c.policies, func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	k := compiler{cluster: c, peers: map[string][]pod{}}
	for _, p := range c.pods {
		if p.peer() {
			k.peers[p.Namespace] = append(k.peers[p.Namespace], p)
		}
	}
	out := network.Policies{Node: node}
	at := map[vm.ID]int{} // place in out.Guests
	for _, p := range c.pods {
		for _, id := range p.guests {
			at[id] = len(out.Guests)
			out.Guests = append(out.Guests, network.Guest{ID: id})
		}
	}
	for _, policy := range c.policies {
		selected := k.selected(policy)
		if len(selected) == 0 {
			continue
		}
		in, eg := directions(policy.Spec)
		if in {
			out.Ingress = append(out.Ingress, k.ingress(policy, selected))
		}
		if eg {
			out.Egress = append(out.Egress, k.egress(policy))
		}
		for _, p := range selected {
			for _, id := range p.guests {
				g := &out.Guests[at[id]]
				if in {
					g.Ingress = append(g.Ingress, len(out.Ingress)-1)
				}
				if eg {
					g.Egress = append(g.Egress, len(out.Egress)-1)
				}
			}
		}
	}
	slices.SortFunc(out.Guests, func(a, b network.Guest) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// directions returns in which directions a policy isolates the pods that it selects. Without types it is ingress, and egress if
// there are rules for it.
func directions(s networkingv1.NetworkPolicySpec) (ingress, egress bool) {
	if len(s.PolicyTypes) == 0 {
		return true, len(s.Egress) > 0
	}
	return slices.Contains(s.PolicyTypes, networkingv1.PolicyTypeIngress), slices.Contains(s.PolicyTypes, networkingv1.PolicyTypeEgress)
}

type compiler struct {
	cluster
	peers map[string][]pod // by namespace, those that selectors can mean
}

// selected returns the pods of this node that a policy selects.
func (k compiler) selected(policy *networkingv1.NetworkPolicy) (out []pod) {
	match := selector(&policy.Spec.PodSelector)
	for _, p := range k.pods {
		if len(p.guests) > 0 && p.Namespace == policy.Namespace && match.Matches(labels.Set(p.Labels)) {
			out = append(out, p)
		}
	}
	return out
}

// selector returns what a selector means; nil selects nothing.
func selector(s *metav1.LabelSelector) labels.Selector {
	out, err := metav1.LabelSelectorAsSelector(s)
	if err != nil { // the API server accepts none of these
		return labels.Nothing()
	}
	return out
}

func (k compiler) ingress(policy *networkingv1.NetworkPolicy, selected []pod) network.Policy {
	out := network.Policy{Name: policy.Namespace + "/" + policy.Name}
	for _, r := range policy.Spec.Ingress {
		ends := k.ends(policy.Namespace, r.From)
		out.Rules = appendRule(out.Rules, ends, r.Ports, selected)
	}
	return out
}

func (k compiler) egress(policy *networkingv1.NetworkPolicy) network.Policy {
	out := network.Policy{Name: policy.Namespace + "/" + policy.Name}
	for _, r := range policy.Spec.Egress {
		ends := k.ends(policy.Namespace, r.To)
		out.Rules = appendRule(out.Rules, ends, r.Ports, k.receivers(ends, r.Ports))
	}
	return out
}

// receivers returns the pods among the peers, also those that a block contains, if a port has a name.
func (k compiler) receivers(e ends, ports []networkingv1.NetworkPolicyPort) []pod {
	named := slices.ContainsFunc(ports, func(p networkingv1.NetworkPolicyPort) bool { return p.Port != nil && p.Port.Type == intstr.String })
	if !named || !e.anyone && len(e.blocks) == 0 {
		return e.pods
	}
	out := slices.Clone(e.pods)
	for _, all := range k.peers {
		for _, p := range all {
			if e.anyone || slices.ContainsFunc(p.addresses, e.contains) {
				out = append(out, p)
			}
		}
	}
	return out
}

// ends are the peers of one rule.
type ends struct {
	anyone bool
	blocks []network.Range
	pods   []pod
}

// contains reports whether a block contains an address.
func (e ends) contains(a netip.Addr) bool {
	return slices.ContainsFunc(e.blocks, func(r network.Range) bool {
		return r.First.Is4() == a.Is4() && !a.Less(r.First) && !r.Last.Less(a)
	})
}

func (k compiler) ends(namespace string, peers []networkingv1.NetworkPolicyPeer) ends {
	out := ends{anyone: len(peers) == 0}
	for _, p := range peers {
		if p.IPBlock != nil {
			out.blocks = append(out.blocks, block(p.IPBlock)...)
			continue
		}
		match := labels.Everything()
		if p.PodSelector != nil {
			match = selector(p.PodSelector)
		}
		for _, ns := range k.spaces(namespace, p.NamespaceSelector) {
			for _, other := range k.peers[ns] {
				if match.Matches(labels.Set(other.Labels)) {
					out.pods = append(out.pods, other)
				}
			}
		}
	}
	return out
}

// spaces returns the namespaces that a peer means: that of the policy, without a selector.
func (k compiler) spaces(own string, s *metav1.LabelSelector) (out []string) {
	if s == nil {
		return []string{own}
	}
	match := selector(s)
	for name, set := range k.namespaces {
		if match.Matches(set) {
			out = append(out, name)
		}
	}
	return out
}

// block returns the addresses of an IP block. What is not a network contains none.
func block(b *networkingv1.IPBlock) []network.Range {
	whole, err := netip.ParsePrefix(b.CIDR)
	if err != nil || whole.Addr().Is4In6() {
		return nil
	}
	var holes []network.Range
	for _, e := range b.Except {
		hole, err := netip.ParsePrefix(e)
		if err != nil {
			return nil // an exception that is not understood must not be open
		}
		holes = append(holes, network.RangeOf(hole))
	}
	return network.RangeOf(whole).Without(holes)
}

// appendRule adds a rule, unless it allows nothing. named are the pods whose ports a name can mean: those that receive.
func appendRule(rules []network.Rule, e ends, ports []networkingv1.NetworkPolicyPort, named []pod) []network.Rule {
	r := network.Rule{Anyone: e.anyone, AllPorts: len(ports) == 0, Peers: slices.Clone(e.blocks)}
	for _, p := range e.pods {
		for _, a := range p.addresses {
			r.Peers = append(r.Peers, network.Range{First: a, Last: a})
		}
	}
	r.Peers = network.Merge(r.Peers)
	for _, port := range ports {
		number, known := protocol(port.Protocol)
		switch {
		case !known:
		case port.Port == nil:
			r.Ports = append(r.Ports, network.Port{Protocol: number, First: 0, Last: 1<<16 - 1})
		case port.Port.Type == intstr.String:
			r.Named = append(r.Named, endpoints(number, port.Port.StrVal, named)...)
		default:
			last := port.Port.IntVal
			if port.EndPort != nil {
				last = *port.EndPort
			}
			if port.Port.IntVal > 0 && port.Port.IntVal <= last && last < 1<<16 {
				r.Ports = append(r.Ports, network.Port{Protocol: number, First: uint16(port.Port.IntVal), Last: uint16(last)})
			}
		}
	}
	slices.SortFunc(r.Named, func(a, b network.Endpoint) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	r.Named = slices.Compact(r.Named)
	if !r.Anyone && len(r.Peers) == 0 || !r.AllPorts && len(r.Ports) == 0 && len(r.Named) == 0 {
		return rules
	}
	return append(rules, r)
}

func protocol(p *corev1.Protocol) (network.Protocol, bool) {
	if p == nil {
		return network.TCP, true
	}
	switch *p {
	case corev1.ProtocolTCP, "":
		return network.TCP, true
	case corev1.ProtocolUDP:
		return network.UDP, true
	case corev1.ProtocolSCTP:
		return network.SCTP, true
	}
	return 0, false
}

// endpoints returns the ports of pods that have a name.
func endpoints(number network.Protocol, name string, pods []pod) (out []network.Endpoint) {
	for _, p := range pods {
		for _, port := range namedPorts(p.Pod) {
			own, known := protocol(&port.Protocol)
			if port.Name != name || !known || own != number || port.ContainerPort <= 0 || port.ContainerPort >= 1<<16 {
				continue
			}
			for _, a := range p.addresses {
				out = append(out, network.Endpoint{Addr: a, Protocol: number, Port: uint16(port.ContainerPort)})
			}
		}
	}
	return out
}
