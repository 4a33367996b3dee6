package netpolicy

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// of makes a policy of a namespace that selects all of its pods.
func of(namespace, name string, rules ...networkingv1.NetworkPolicyIngressRule) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	p.Spec.Ingress = rules
	return p
}

// onPorts makes n rules, each of its own port.
func onPorts(n int) (out []networkingv1.NetworkPolicyIngressRule) {
	for i := range n {
		out = append(out, networkingv1.NetworkPolicyIngressRule{Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(int32(i%65535 + 1)))}}})
	}
	return out
}

func portsOf(rules []networkingv1.NetworkPolicyIngressRule) (out []networkingv1.NetworkPolicyPort) {
	for _, r := range rules {
		out = append(out, r.Ports...)
	}
	return out
}

// from makes a rule with n addresses that do not touch.
func from(n int) (out networkingv1.NetworkPolicyIngressRule) {
	for i := range n {
		out.From = append(out.From, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: fmt.Sprintf("100.%d.%d.%d/32", i>>15, i>>7&0xff, i<<1&0xff)}})
	}
	return out
}

func names(all []refusal) (out []string) {
	for _, r := range all {
		out = append(out, r.policy.Namespace+"/"+r.policy.Name)
	}
	return out
}

// What one namespace writes must not change what holds in another, and the network must accept the whole.
func TestBudget(t *testing.T) {
	many := func(n int, one func(name string) *networkingv1.NetworkPolicy) (out []*networkingv1.NetworkPolicy) {
		for i := range n {
			out = append(out, one(fmt.Sprintf("p%05d", i)))
		}
		return out
	}
	both := []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8"}}, {IPBlock: &networkingv1.IPBlock{CIDR: "fd00::/8"}}}
	for name, tt := range map[string]struct {
		policies []*networkingv1.NetworkPolicy // of dev
		refused  int                           // -1: some
		open     bool                          // whether port 1 of d is open to a
	}{
		"equal rules":       {[]*networkingv1.NetworkPolicy{of("dev", "p", slices.Repeat([]networkingv1.NetworkPolicyIngressRule{{}}, 65537)...)}, 0, true},
		"rules":             {[]*networkingv1.NetworkPolicy{of("dev", "p", onPorts(65537)...)}, 1, false},
		"as many rules":     {[]*networkingv1.NetworkPolicy{of("dev", "p", onPorts(999)...)}, 0, true},
		"ports":             {[]*networkingv1.NetworkPolicy{of("dev", "p", networkingv1.NetworkPolicyIngressRule{From: both, Ports: portsOf(onPorts(500))})}, 1, false},
		"as many ports":     {[]*networkingv1.NetworkPolicy{of("dev", "p", networkingv1.NetworkPolicyIngressRule{From: both, Ports: portsOf(onPorts(499))})}, 0, true},
		"addresses":         {[]*networkingv1.NetworkPolicy{of("dev", "p", from(20_001))}, 1, false},
		"as many addresses": {[]*networkingv1.NetworkPolicy{of("dev", "p", from(20_000), networkingv1.NetworkPolicyIngressRule{}), of("dev", "q", networkingv1.NetworkPolicyIngressRule{})}, 0, true},
		"policies": {many(6_000, func(name string) *networkingv1.NetworkPolicy {
			return of("dev", name, networkingv1.NetworkPolicyIngressRule{})
		}), 4_000, true},
		"addresses of many policies": {many(30, func(name string) *networkingv1.NetworkPolicy { return of("dev", name, from(10_000)) }), 24, false},
		"the small ones stay": {append(many(30, func(name string) *networkingv1.NetworkPolicy { return of("dev", name, from(10_000)) }),
			of("dev", "z", networkingv1.NetworkPolicyIngressRule{})), 24, true},
		"addresses that stand for others": {[]*networkingv1.NetworkPolicy{of("dev", "p", networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{
			{IPBlock: &networkingv1.IPBlock{CIDR: "::/0", Except: []string{"::fffe:0:0/96"}}}, {IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8"}},
		}})}, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			in := world(t, `{podSelector: {matchLabels: {app: b}}, ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]}`)
			in.policies = append(in.policies, tt.policies...)
			p, refused := compile("n", in)
			if err := p.Validate(); err != nil {
				t.Fatal(err)
			}
			if n := len(refused); n != tt.refused {
				t.Errorf("%d policies are refused instead of %d", n, tt.refused)
			}
			if passes(p, ids, tcp(a, d, 1)) != tt.open {
				t.Errorf("port 1 of d is open: %v", !tt.open)
			}
			if !passes(p, ids, tcp(a, b, 1)) || passes(p, ids, tcp(c, b, 1)) || !passes(p, ids, tcp(b, a, 1)) {
				t.Error("the policies of the other namespace do not hold")
			}
		})
	}
}

// If all namespaces together need too much, the greatest gives first.
func TestBudgetOfTheNode(t *testing.T) {
	in := world(t, `{podSelector: {matchLabels: {app: b}}, ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]}`)
	for i := range 6 {
		ns := fmt.Sprint("ns", i)
		in.pods = append(in.pods, member(ns, "pod-"+ns, fmt.Sprintf("10.1.0.%d", 100+i), nil))
		for j := range 3 + i {
			in.policies = append(in.policies, of(ns, fmt.Sprint("p", j), from(10_000)))
		}
	}
	p, refused := compile("n", in)
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	if !passes(p, ids, tcp(a, b, 1)) || passes(p, ids, tcp(c, b, 1)) {
		t.Error("the policies of a small namespace do not hold")
	}
	left := map[string]int{}
	for _, policy := range p.Ingress {
		if len(policy.Rules) > 0 {
			left[policy.Name[:3]]++
		}
	}
	if left["ns0"] != 3 || left["ns1"] != 4 || left["ns5"] > 5 || len(refused) != 33-24 {
		t.Errorf("%v are left, %v are closed", left, names(refused))
	}
}

// A policy whose selectors ask too much is closed, before they have been asked.
func TestBudgetOfWork(t *testing.T) {
	everybody := networkingv1.NetworkPolicyPeer{NamespaceSelector: &metav1.LabelSelector{}}
	block := networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8"}}
	for name, rule := range map[string]networkingv1.NetworkPolicyIngressRule{
		"namespaces": {From: []networkingv1.NetworkPolicyPeer{everybody}},
		"pods":       {From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}},
		"blocks":     {From: []networkingv1.NetworkPolicyPeer{block, block}},
	} {
		t.Run(name, func(t *testing.T) {
			in := world(t)
			k := compiler{cluster: in, peers: map[string][]pod{}, mine: map[string][]pod{}, work: map[string]int{"prod": workLimit - 1}}
			k.count()
			p := of("prod", "p", rule)
			if d := k.draft(p, k.selected(p)); d.why != whySlow {
				t.Errorf("it is closed because %q", d.why)
			}
			p.Namespace = "dev"
			if d := k.draft(p, k.selected(p)); d.why != "" {
				t.Errorf("that of the other namespace is closed because %q", d.why)
			}
		})
	}
	k := compiler{work: map[string]int{}}
	for _, n := range []int{math.MaxInt, math.MaxInt, 1} {
		if k.spend("n", n) {
			t.Error("what was spent is forgotten")
		}
	}
}

// A guest is named once, and guests beyond the limit stay closed.
func TestGuestsAreNamedOnce(t *testing.T) {
	in := world(t)
	in.pods[3].guests = []vm.ID{"a", "d", "d"} // of namespace dev
	for i := range network.MaxGuests {
		in.pods[3].guests = append(in.pods[3].guests, vm.ID(fmt.Sprint("z", i)))
	}
	p, _ := compile("n", in)
	if err := p.Validate(); err != nil || len(p.Guests) != network.MaxGuests {
		t.Errorf("%d guests: %v", len(p.Guests), err)
	}
}

// A policy over budget is told once, where its owner and the operator look.
func TestComplaints(t *testing.T) {
	var log bytes.Buffer
	events := record.NewFakeRecorder(100)
	closed := prometheus.NewGauge(prometheus.GaugeOpts{})
	c := complaints{log: slog.New(slog.NewTextHandler(&log, nil)), events: events, closed: closed}
	value := func() float64 {
		var m dto.Metric
		if err := closed.Write(&m); err != nil {
			t.Fatal(err)
		}
		return m.GetGauge().GetValue()
	}
	var all []refusal
	for i := range 20 {
		p := of("dev", fmt.Sprint("p", i))
		p.UID = types.UID(p.Name)
		all = append(all, refusal{p, whySpace})
	}
	for range 3 {
		c.tell(all)
	}
	if n := strings.Count(log.String(), "\n"); n != 1 || len(events.Events) != 10 || !strings.Contains(<-events.Events, "Warning NetworkPolicyOverBudget") || value() != 20 {
		t.Errorf("%d lines, %d events", n, len(events.Events))
	}
	c.tell(nil)
	c.tell(all[:1])
	if n := strings.Count(log.String(), "\n"); n != 2 || len(events.Events) != 10 || value() != 1 {
		t.Errorf("%d lines, %d events", n, len(events.Events))
	}
}
