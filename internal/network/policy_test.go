package network

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func span(text string) Range {
	first, last, _ := strings.Cut(text, "-")
	if last == "" {
		last = first
	}
	return Range{netip.MustParseAddr(first), netip.MustParseAddr(last)}
}

func spans(texts ...string) (out []Range) {
	for _, t := range texts {
		out = append(out, span(t))
	}
	return out
}

func shown(all []Range) string {
	var out []string
	for _, r := range all {
		out = append(out, fmt.Sprintf("%s-%s", r.First, r.Last))
	}
	return strings.Join(out, " ")
}

func TestMerge(t *testing.T) {
	for _, tt := range []struct {
		in   []Range
		want string
	}{
		{nil, ""},
		{spans("10.0.0.5", "10.0.0.4"), "10.0.0.4-10.0.0.5"},
		{spans("10.0.0.5", "10.0.0.7"), "10.0.0.5-10.0.0.5 10.0.0.7-10.0.0.7"},
		{spans("10.0.0.0-10.0.0.9", "10.0.0.3", "10.0.0.8-10.0.0.20"), "10.0.0.0-10.0.0.20"},
		{spans("255.255.255.255", "0.0.0.0-255.255.255.255", "::"), "0.0.0.0-255.255.255.255 ::-::"},
		{spans("fd00::1", "fd00::2"), "fd00::1-fd00::2"},
	} {
		if got := shown(Merge(tt.in)); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}

func TestWithout(t *testing.T) {
	for _, tt := range []struct {
		prefix string
		holes  []Range
		want   string
	}{
		{"10.0.0.0/24", nil, "10.0.0.0-10.0.0.255"},
		{"10.0.0.0/24", spans("10.0.0.0-10.0.0.127"), "10.0.0.128-10.0.0.255"},
		{"10.0.0.0/24", spans("10.0.0.255", "10.0.0.7"), "10.0.0.0-10.0.0.6 10.0.0.8-10.0.0.254"},
		{"10.0.0.0/24", spans("10.0.0.0-10.0.0.255"), ""},
		{"0.0.0.0/0", spans("10.0.0.0-255.255.255.255"), "0.0.0.0-9.255.255.255"},
		{"10.0.0.0/24", spans("fd00::-fd00::ffff", "11.0.0.0"), "10.0.0.0-10.0.0.255"},
		{"::/0", spans("ffff::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"), "::-fffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff"},
	} {
		if got := shown(RangeOf(netip.MustParsePrefix(tt.prefix)).Without(tt.holes)); got != tt.want {
			t.Errorf("%s without %s: %q, want %q", tt.prefix, shown(tt.holes), got, tt.want)
		}
	}
}

func TestPoliciesValidate(t *testing.T) {
	rule := func(r Rule) Policies { return Policies{Ingress: []Policy{{Name: "p", Rules: []Rule{r}}}} }
	good := Policies{
		Node: "n", Guests: []Guest{{ID: "a", Ingress: []int{0}}, {ID: "b", Egress: []int{0}}},
		Ingress: []Policy{{Rules: []Rule{{Peers: spans("10.0.0.1-10.0.0.3"), Ports: []Port{{TCP, 0, 65535}}}}}},
		Egress:  []Policy{{Rules: []Rule{{Anyone: true, Named: []Endpoint{{netip.MustParseAddr("fd00::1"), SCTP, 7}}}}}},
	}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for name, p := range map[string]Policies{
		"no id":            {Guests: []Guest{{}}},
		"twice":            {Guests: []Guest{{ID: "a"}, {ID: "a"}}},
		"unknown policy":   {Guests: []Guest{{ID: "a", Ingress: []int{0}}}},
		"negative":         {Guests: []Guest{{ID: "a", Egress: []int{-1}}}, Egress: []Policy{{}}},
		"two families":     rule(Rule{Peers: []Range{{netip.MustParseAddr("1.1.1.1"), netip.MustParseAddr("fd00::1")}}}),
		"backwards":        rule(Rule{Peers: spans("10.0.0.2-10.0.0.1")}),
		"mapped":           rule(Rule{Peers: spans("::ffff:1.2.3.4")}),
		"no address":       rule(Rule{Peers: []Range{{}}}),
		"unknown protocol": rule(Rule{Ports: []Port{{1, 1, 1}}}),
		"ports backwards":  rule(Rule{Ports: []Port{{TCP, 2, 1}}}),
		"port 0":           rule(Rule{Named: []Endpoint{{netip.MustParseAddr("1.1.1.1"), TCP, 0}}}),
	} {
		if err := p.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	many := Policies{Guests: make([]Guest, MaxGuests+1)}
	if err := many.Validate(); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Error(err)
	}
}
