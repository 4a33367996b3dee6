package netpolicy

import (
	"cmp"
	"maps"
	"math"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// The policies of all tenants of a node are one value, which the network accepts or refuses as a whole. So each policy, each
// namespace and the node have a budget. A policy that does not fit is closed: it has no rules, so the pods that it selects exchange
// only what other policies allow. The policies of other namespaces stay as they are.

// cost is how much of the budgets a policy needs.
type cost struct {
	rules      int // of the kernel: one for each direction, and one for each port of a rule and family of its peers
	matches    int // ranges, ports and endpoints of the rules
	selections int // guests that it selects, in each direction
}

// The budgets. A policy may name all pods of a cluster of 10,000 with two addresses each, and has as many rules as nobody writes
// by hand. A namespace may have several of those, and no more than a quarter of what the node may have. That is below the limits of
// network.Policies, and fits in one message to the runtime (16 MiB) if each address is one of IPv6 and each name as long as maxName.
// The kernel takes it in seconds.
var (
	policyLimit = cost{1_000, 20_000, 2 * network.MaxGuests}
	spaceLimit  = cost{4_000, 60_000, 32_000}
	nodeLimit   = cost{16_000, 250_000, 250_000}
)

const (
	// workLimit is how often the policies of one namespace may ask whether a pod or a namespace is meant. It is about a second.
	workLimit = 8_000_000
	maxName   = 127 // bytes of a comment that the kernel's tools show
)

// Why a policy is closed.
const (
	whyPolicy  = "it has more than 1,000 rules and ports, or names more than 20,000 addresses and ports"
	whySlow    = "the policies of its namespace have too many selectors for the pods of the cluster"
	whySpace   = "the policies of its namespace together have more than 4,000 rules and ports, or name more than 60,000 addresses and ports, or select too many pods"
	whyNode    = "the policies of this node's pods together have more than 16,000 rules and ports, or name more than 250,000 addresses and ports, or select too many pods"
	whyInvalid = "the network of this node does not accept it"
)

func (c cost) plus(d cost) cost {
	return cost{c.rules + d.rules, c.matches + d.matches, c.selections + d.selections}
}

func (c cost) minus(d cost) cost {
	return cost{c.rules - d.rules, c.matches - d.matches, c.selections - d.selections}
}

func (c cost) over(limit cost) bool {
	return c.rules > limit.rules || c.matches > limit.matches || c.selections > limit.selections
}

// share is the greatest part of the budget of a namespace that c needs.
func (c cost) share() float64 {
	part := func(n, of int) float64 { return float64(n) / float64(of) }
	return max(part(c.rules, spaceLimit.rules), part(c.matches, spaceLimit.matches), part(c.selections, spaceLimit.selections))
}

func costOf(r network.Rule) cost {
	ports, families := 1, 1
	if !r.AllPorts {
		ports = len(r.Ports) + min(len(r.Named), 2) // names of both families
	}
	if !r.Anyone && r.Peers[0].First.Is4() != r.Peers[len(r.Peers)-1].First.Is4() { // they are sorted
		families = 2
	}
	return cost{rules: ports * families, matches: len(r.Peers) + len(r.Ports) + len(r.Named)}
}

// spend reports whether a namespace may still do so much work.
func (k *compiler) spend(namespace string, n int) bool {
	if k.work[namespace] > math.MaxInt-n {
		return false
	}
	k.work[namespace] += n
	return k.work[namespace] <= workLimit
}

// draft is a policy before it is known whether it fits.
type draft struct {
	policy          *networkingv1.NetworkPolicy // nil: it stands for the closed ones of a namespace
	guests          []vm.ID
	ingress, egress *network.Policy // nil: it does not isolate in that direction
	cost            cost
	why             string // why it does not fit
}

// refusal is a policy that is closed, and why.
type refusal struct {
	policy *networkingv1.NetworkPolicy
	why    string
}

// selection decides which policies fit. What is over a budget at any time is not kept in memory.
type selection struct {
	drafts   []*draft
	tenants  map[string]*tenant
	total    cost
	refusals []refusal
}

// tenant is what one namespace uses.
type tenant struct {
	cost            cost
	open            []*draft // those that fit, the smallest first
	ingress, egress closedPolicies
}

// closedPolicies are the closed policies of a namespace in one direction. They are one policy without rules.
type closedPolicies struct {
	draft *draft
	has   map[vm.ID]bool
}

func (r *selection) add(d *draft) {
	s := r.tenants[d.policy.Namespace]
	if s == nil {
		s = &tenant{}
		r.tenants[d.policy.Namespace] = s
	}
	if d.why == "" && !valid(d.ingress, d.egress) {
		d.why = whyInvalid
	}
	if d.why != "" {
		r.close(s, d)
		return
	}
	r.drafts = append(r.drafts, d)
	at, _ := slices.BinarySearchFunc(s.open, d, func(a, b *draft) int { return cmp.Compare(a.cost.share(), b.cost.share()) })
	s.open = slices.Insert(s.open, at, d)
	s.cost, r.total = s.cost.plus(d.cost), r.total.plus(d.cost)
	for s.cost.over(spaceLimit) {
		r.closeLargest(s, whySpace)
	}
	for r.total.over(nodeLimit) {
		r.closeLargest(r.greediest(), whyNode)
	}
}

// greediest returns the namespace that needs most.
func (r *selection) greediest() *tenant {
	names := slices.Sorted(maps.Keys(r.tenants))
	return r.tenants[slices.MaxFunc(names, func(a, b string) int { return cmp.Compare(r.tenants[a].cost.share(), r.tenants[b].cost.share()) })]
}

func (r *selection) closeLargest(s *tenant, why string) {
	d := s.open[len(s.open)-1]
	s.open = s.open[:len(s.open)-1]
	s.cost, r.total = s.cost.minus(d.cost), r.total.minus(d.cost)
	d.why = why
	r.close(s, d)
}

// close makes the guests of d guests of the closed policy of their namespace.
func (r *selection) close(s *tenant, d *draft) {
	r.refusals = append(r.refusals, refusal{d.policy, d.why})
	if d.ingress != nil {
		r.closedIn(&s.ingress, d).ingress = &network.Policy{Name: closedName(d.policy.Namespace)}
	}
	if d.egress != nil {
		r.closedIn(&s.egress, d).egress = &network.Policy{Name: closedName(d.policy.Namespace)}
	}
	d.guests, d.ingress, d.egress = nil, nil, nil
}

func (r *selection) closedIn(s *closedPolicies, d *draft) *draft {
	if s.draft == nil {
		s.draft, s.has = &draft{}, map[vm.ID]bool{}
		r.drafts = append(r.drafts, s.draft)
	}
	for _, id := range d.guests {
		if !s.has[id] {
			s.has[id] = true
			s.draft.guests = append(s.draft.guests, id)
		}
	}
	return s.draft
}

func closedName(namespace string) string { return namespace + ": over budget" }

// refused returns the policies that are closed, in the order of their names.
func (r *selection) refused() []refusal {
	slices.SortFunc(r.refusals, func(a, b refusal) int {
		return cmp.Or(cmp.Compare(a.policy.Namespace, b.policy.Namespace), cmp.Compare(a.policy.Name, b.policy.Name))
	})
	return r.refusals
}

// valid reports whether the network accepts the policies.
func valid(policies ...*network.Policy) bool {
	for _, p := range policies {
		if p != nil && (network.Policies{Ingress: []network.Policy{*p}}).Validate() != nil {
			return false
		}
	}
	return true
}
