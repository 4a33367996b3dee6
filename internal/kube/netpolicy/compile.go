package netpolicy

import (
	"cmp"
	"encoding/json"
	"maps"
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

// compile is pure: it returns the policies of the guests of a node, and those that are closed because they are over a budget. Only
// policies that select one of its pods are in them. The result depends on the content of the cluster alone, not on the order of
// its lists, and Validate accepts it.
func compile(node string, c cluster) (network.Policies, []refusal) {
	slices.SortFunc(c.pods, func(a, b pod) int { return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name)) })
	slices.SortFunc(c.policies, func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	k := compiler{cluster: c, peers: map[string][]pod{}, mine: map[string][]pod{}, work: map[string]int{}}
	guests := k.count()
	r := selection{tenants: map[string]*tenant{}}
	for _, policy := range c.policies {
		if selected := k.selected(policy); len(selected) > 0 {
			r.add(k.draft(policy, selected))
		}
	}
	return assemble(node, guests, r.drafts), r.refused()
}

// count fills peers and mine, and returns the guests of the node in the order of their IDs. Those beyond the network's limit are
// left out, so they stay closed.
func (k *compiler) count() []vm.ID {
	seen := map[vm.ID]bool{}
	for _, p := range k.pods {
		if p.peer() {
			k.peers[p.Namespace] = append(k.peers[p.Namespace], p)
			k.all++
		}
		p.guests = slices.DeleteFunc(slices.Clone(p.guests), func(id vm.ID) bool {
			there := seen[id]
			seen[id] = true
			return there
		})
		if len(p.guests) > 0 {
			k.mine[p.Namespace] = append(k.mine[p.Namespace], p)
		}
	}
	ids := slices.Sorted(maps.Keys(seen))
	return ids[:min(len(ids), network.MaxGuests)]
}

// assemble puts the drafts together.
func assemble(node string, ids []vm.ID, drafts []*draft) network.Policies {
	out := network.Policies{Node: node}
	at := map[vm.ID]int{}
	for i, id := range ids {
		at[id] = i
		out.Guests = append(out.Guests, network.Guest{ID: id})
	}
	for _, d := range drafts {
		if d.ingress != nil {
			out.Ingress = append(out.Ingress, *d.ingress)
		}
		if d.egress != nil {
			out.Egress = append(out.Egress, *d.egress)
		}
		for _, id := range d.guests {
			i, there := at[id]
			if !there {
				continue
			}
			if g := &out.Guests[i]; d.ingress != nil {
				g.Ingress = append(g.Ingress, len(out.Ingress)-1)
			}
			if g := &out.Guests[i]; d.egress != nil {
				g.Egress = append(g.Egress, len(out.Egress)-1)
			}
		}
	}
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
	all   int              // how many peers there are
	mine  map[string][]pod // by namespace, those with a guest on this node
	work  map[string]int   // by namespace of the policies, see spend
}

// selected returns the pods of this node that a policy selects.
func (k *compiler) selected(policy *networkingv1.NetworkPolicy) (out []pod) {
	mine := k.mine[policy.Namespace]
	if len(mine) == 0 {
		return nil
	}
	match := selector(&policy.Spec.PodSelector)
	for _, p := range mine {
		if match.Matches(labels.Set(p.Labels)) {
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

// rule is a rule of a policy in either direction.
type rule struct {
	Peers []networkingv1.NetworkPolicyPeer `json:",omitempty"`
	Ports []networkingv1.NetworkPolicyPort `json:",omitempty"`
}

// distinct drops rules that are there already.
func distinct(rules []rule) []rule {
	if len(rules) < 2 {
		return rules
	}
	seen := map[string]bool{}
	return slices.DeleteFunc(rules, func(r rule) bool {
		key, err := json.Marshal(r)
		there := seen[string(key)]
		seen[string(key)] = true
		return err == nil && there
	})
}

// draft compiles a policy that selects these pods, until it is over a budget.
func (k *compiler) draft(policy *networkingv1.NetworkPolicy, selected []pod) *draft {
	d := &draft{policy: policy}
	for _, p := range selected {
		d.guests = append(d.guests, p.guests...)
	}
	in, eg := directions(policy.Spec)
	if in {
		var rules []rule
		for _, r := range policy.Spec.Ingress {
			rules = append(rules, rule{r.From, r.Ports})
		}
		d.ingress = k.direction(d, rules, func(ends, []networkingv1.NetworkPolicyPort) ([]pod, bool) { return selected, true })
	}
	if eg {
		var rules []rule
		for _, r := range policy.Spec.Egress {
			rules = append(rules, rule{r.To, r.Ports})
		}
		d.egress = k.direction(d, rules, func(e ends, ports []networkingv1.NetworkPolicyPort) ([]pod, bool) {
			return k.receivers(policy.Namespace, e, ports)
		})
	}
	return d
}

// direction compiles one direction of a policy. receivers returns the pods whose ports a name can mean.
func (k *compiler) direction(d *draft, rules []rule, receivers func(ends, []networkingv1.NetworkPolicyPort) ([]pod, bool)) *network.Policy {
	out := &network.Policy{Name: nameOf(d.policy)}
	d.cost.rules++ // the chain of a policy costs as much as a rule
	d.cost.selections += len(d.guests)
	if d.why != "" {
		return out
	}
	for _, r := range distinct(rules) {
		e, ok := k.ends(d.policy.Namespace, r.Peers)
		if !ok {
			d.why = whySlow
			break
		}
		named, ok := receivers(e, r.Ports)
		if !ok {
			d.why = whySlow
			break
		}
		n := len(out.Rules)
		if out.Rules = appendRule(out.Rules, e, r.Ports, named); len(out.Rules) > n {
			d.cost = d.cost.plus(costOf(out.Rules[n]))
		}
		if d.cost.over(policyLimit) {
			d.why = whyPolicy
			break
		}
	}
	return out
}

// nameOf returns the name that the rules of a policy have, as far as the kernel's tools show it.
func nameOf(p *networkingv1.NetworkPolicy) string {
	name := p.Namespace + "/" + p.Name
	return name[:min(len(name), maxName)]
}

// receivers returns the pods among the peers, also those that a block contains, if a port has a name. ok is false if that would
// take too long.
func (k *compiler) receivers(namespace string, e ends, ports []networkingv1.NetworkPolicyPort) (pods []pod, ok bool) {
	named := slices.ContainsFunc(ports, func(p networkingv1.NetworkPolicyPort) bool { return p.Port != nil && p.Port.Type == intstr.String })
	if !named || !e.anyone && len(e.blocks) == 0 {
		return e.pods, true
	}
	if !k.spend(namespace, k.all*max(1, len(e.blocks))) {
		return nil, false
	}
	out := slices.Clone(e.pods)
	for _, all := range k.peers {
		for _, p := range all {
			if e.anyone || slices.ContainsFunc(p.addresses, e.contains) {
				out = append(out, p)
			}
		}
	}
	return out, true
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

// ends returns the peers of a rule, each once. ok is false if that would take too long.
func (k *compiler) ends(namespace string, peers []networkingv1.NetworkPolicyPeer) (out ends, ok bool) {
	out = ends{anyone: len(peers) == 0}
	seen := map[*corev1.Pod]bool{}
	for _, p := range peers {
		if p.IPBlock != nil {
			if !k.spend(namespace, 1+len(p.IPBlock.Except)) {
				return ends{}, false
			}
			out.blocks = append(out.blocks, block(p.IPBlock)...)
			continue
		}
		match := labels.Everything()
		if p.PodSelector != nil {
			match = selector(p.PodSelector)
		}
		spaces, ok := k.spaces(namespace, p.NamespaceSelector)
		if !ok {
			return ends{}, false
		}
		for _, ns := range spaces {
			if !k.spend(namespace, len(k.peers[ns])) {
				return ends{}, false
			}
			for _, other := range k.peers[ns] {
				if !match.Matches(labels.Set(other.Labels)) || seen[other.Pod] {
					continue
				}
				if out.pods = append(out.pods, other); len(peers) > 1 {
					seen[other.Pod] = true
				}
			}
		}
	}
	return out, true
}

// spaces returns the namespaces that a peer means: that of the policy, without a selector. ok is false if that would take too long.
func (k *compiler) spaces(own string, s *metav1.LabelSelector) (out []string, ok bool) {
	if s == nil {
		return []string{own}, k.spend(own, 1)
	}
	if !k.spend(own, len(k.namespaces)) {
		return nil, false
	}
	match := selector(s)
	for name, set := range k.namespaces {
		if match.Matches(set) {
			out = append(out, name)
		}
	}
	return out, true
}

// mapped are the IPv6 addresses that stand for IPv4 addresses.
var mapped = netip.MustParsePrefix("::ffff:0:0/96")

// block returns the addresses of an IP block. What is not a network contains none.
func block(b *networkingv1.IPBlock) []network.Range {
	whole, err := netip.ParsePrefix(b.CIDR)
	if err != nil || whole.Addr().Is4In6() {
		return nil
	}
	var holes []network.Range
	if whole.Addr().Is6() { // packets have no such addresses, and a range may not begin or end among them
		holes = append(holes, network.RangeOf(mapped))
	}
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
	names := map[portName]bool{}
	for _, port := range ports {
		number, known := protocol(port.Protocol)
		switch {
		case !known:
		case port.Port == nil:
			r.Ports = append(r.Ports, network.Port{Protocol: number, First: 0, Last: 1<<16 - 1})
		case port.Port.Type == intstr.String:
			names[portName{number, port.Port.StrVal}] = true
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
	slices.SortFunc(r.Ports, func(a, b network.Port) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.First, b.First), cmp.Compare(a.Last, b.Last))
	})
	r.Ports = slices.Compact(r.Ports)
	if r.Named = endpoints(named, names); len(r.Named) > 1 {
		slices.SortFunc(r.Named, func(a, b network.Endpoint) int {
			return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
		})
	}
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

type portName struct {
	protocol network.Protocol
	name     string
}

// endpoints returns the ports of pods that have one of the names.
func endpoints(pods []pod, names map[portName]bool) (out []network.Endpoint) {
	if len(names) == 0 {
		return nil
	}
	for _, p := range pods {
		for _, port := range namedPorts(p.Pod) {
			number, known := protocol(&port.Protocol)
			if !known || !names[portName{number, port.Name}] || port.ContainerPort <= 0 || port.ContainerPort >= 1<<16 {
				continue
			}
			for _, a := range p.addresses {
				out = append(out, network.Endpoint{Addr: a, Protocol: number, Port: uint16(port.ContainerPort)})
			}
		}
	}
	return out
}
