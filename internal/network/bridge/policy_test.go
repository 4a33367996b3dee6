package bridge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

var policedSpec = vm.NICSpec{Policed: true}

// policed attaches a guest that is policed and configures it.
func policed(t *testing.T, n *Network, name string) guest {
	t.Helper()
	g := newGuestOf(t, n, vm.NewID(), name, policedSpec)
	g.configure(g.nic.IP)
	return g
}

func police(t *testing.T, n *Network, p network.Policies) {
	t.Helper()
	if p.Node == "" {
		p.Node = "node"
	}
	if err := n.Police(t.Context(), p); err != nil {
		t.Fatal(err)
	}
}

func only(addr string) []network.Range {
	a := netip.MustParseAddr(addr)
	return []network.Range{{First: a, Last: a}}
}

func portOf(t *testing.T, addr string) uint16 {
	t.Helper()
	_, port, _ := net.SplitHostPort(addr)
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	return uint16(n)
}

// want checks which of the addresses a guest reaches by TCP.
func (g guest) want(what, addr string, ok bool) {
	g.t.Helper()
	within := impatience
	if ok {
		within = patience
	}
	if got := g.dials(addr, within); got != ok {
		g.t.Errorf("%s: reaches %s: %v", what, addr, got)
	}
}

func TestPolicies(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	t.Run("routed", policies)
	t.Run("filtered", func(t *testing.T) {
		showBridged(t)
		policies(t)
	})
}

func policies(t *testing.T) {
	beyond := outside(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	a, b, other := policed(t, n, "a"), policed(t, n, "b"), configured(t, n, "other")
	at := func(g guest) string {
		addr, _ := listen(t, g.ns, net.JoinHostPort(g.nic.IP, "0"))
		return addr
	}
	aServes, bServes, bAlso, otherServes := at(a), at(b), at(b), at(other)
	away, _ := listen(t, beyond, "198.51.100.2:0")

	t.Run("closed from the first packet", func(t *testing.T) {
		a.want("closed", bServes, false)
		a.want("closed", otherServes, false)
		a.want("closed", away, false)
		other.want("to a closed one", aServes, false)
		if a.pings(other.nic.IP, impatience) {
			t.Error("it pings")
		}
		if !a.pings(a.nic.Gateway, patience) || !dial(t, aServes, patience) {
			t.Error("a closed guest and its host do not reach each other")
		}
		other.want("not policed", away, true)
	})
	set := func(p network.Policies) { police(t, n, p) }
	guests := func(ingress, egress []int) []network.Guest {
		return []network.Guest{{ID: a.id}, {ID: b.id, Ingress: ingress, Egress: egress}}
	}
	allow := func(rules ...network.Rule) []network.Policy {
		return []network.Policy{{Name: "none"}, {Name: "some", Rules: rules}}
	}

	t.Run("no policies", func(t *testing.T) {
		set(network.Policies{Guests: guests(nil, nil)})
		a.want("open", bServes, true)
		other.want("open", bServes, true)
		b.want("open", away, true)
	})
	t.Run("deny ingress", func(t *testing.T) {
		set(network.Policies{Guests: guests([]int{0}, nil), Ingress: allow()})
		a.want("denied", bServes, false)
		other.want("denied", bServes, false)
		b.want("the other direction", aServes, true)
		if !dial(t, bServes, patience) {
			t.Error("the host does not reach the guest")
		}
	})
	t.Run("deny egress", func(t *testing.T) {
		set(network.Policies{Guests: guests(nil, []int{0}), Egress: allow()})
		a.want("the other direction", bServes, true)
		b.want("denied", aServes, false)
		b.want("denied", away, false)
		if !b.pings(b.nic.Gateway, patience) {
			t.Error("the guest does not reach its host")
		}
	})
	t.Run("one peer", func(t *testing.T) {
		set(network.Policies{Guests: guests([]int{0, 1}, nil), Ingress: allow(network.Rule{Peers: only(a.nic.IP), AllPorts: true})})
		a.want("allowed", bServes, true)
		other.want("denied", bServes, false)
		if !a.pings(b.nic.IP, patience) || other.pings(b.nic.IP, impatience) {
			t.Error("ping does not follow the rule for all ports")
		}
	})
	t.Run("one port", func(t *testing.T) {
		port := portOf(t, bServes)
		set(network.Policies{Guests: guests([]int{1}, nil), Ingress: allow(network.Rule{Anyone: true, Ports: []network.Port{{Protocol: network.TCP, First: port, Last: port}}})})
		other.want("the port", bServes, true)
		other.want("another port", bAlso, false)
		if other.pings(b.nic.IP, impatience) {
			t.Error("ping passes a rule for one port")
		}
	})
	t.Run("ports of another protocol", func(t *testing.T) {
		set(network.Policies{Guests: guests([]int{1}, nil), Ingress: allow(network.Rule{Anyone: true, Ports: []network.Port{{Protocol: network.UDP, First: 0, Last: 65535}}})})
		a.want("udp", bServes, false)
	})
	t.Run("a range of ports", func(t *testing.T) {
		low, high := min(portOf(t, bServes), portOf(t, bAlso)), max(portOf(t, bServes), portOf(t, bAlso))
		rule := func(first, last uint16) []network.Policy {
			return allow(network.Rule{Anyone: true, Ports: []network.Port{{Protocol: network.TCP, First: first, Last: last}}})
		}
		set(network.Policies{Guests: guests([]int{1}, nil), Ingress: rule(low, high)})
		a.want("in the range", bServes, true)
		a.want("in the range", bAlso, true)
		set(network.Policies{Guests: guests([]int{1}, nil), Ingress: rule(low+1, high)})
		a.want("below", net.JoinHostPort(b.nic.IP, fmt.Sprint(low)), false)
		a.want("at the end", net.JoinHostPort(b.nic.IP, fmt.Sprint(high)), true)
	})
	t.Run("a named port", func(t *testing.T) {
		named := network.Endpoint{Addr: netip.MustParseAddr(b.nic.IP), Protocol: network.TCP, Port: portOf(t, bServes)}
		set(network.Policies{Guests: guests([]int{1}, nil), Ingress: allow(network.Rule{Peers: only(a.nic.IP), Named: []network.Endpoint{named}})})
		a.want("named", bServes, true)
		a.want("another port", bAlso, false)
		other.want("another peer", bServes, false)
	})
	t.Run("a network without a part of it", func(t *testing.T) {
		most := network.RangeOf(netip.MustParsePrefix("0.0.0.0/0")).Without(only(a.nic.IP))
		set(network.Policies{Guests: guests(nil, []int{1}), Egress: allow(network.Rule{Peers: most, AllPorts: true})})
		b.want("in the network", away, true)
		b.want("in the network", otherServes, true)
		b.want("in the hole", aServes, false)
	})
	t.Run("both ends must allow", func(t *testing.T) {
		set(network.Policies{
			Guests: []network.Guest{{ID: a.id, Egress: []int{0}}, {ID: b.id, Ingress: []int{1}}},
			Egress: allow(), Ingress: allow(network.Rule{Anyone: true, AllPorts: true}),
		})
		a.want("only the receiver allows", bServes, false)
		other.want("not policed", bServes, true)
	})
	t.Run("itself by a service", func(t *testing.T) {
		set(network.Policies{Guests: guests([]int{0}, []int{0}), Ingress: allow(), Egress: allow()})
		const service = "10.96.0.9:80"
		proxied(t, service, bServes)
		b.want("itself", service, true)
		a.want("denied", service, false)
	})
	t.Run("two nodes", func(t *testing.T) {
		set(network.Policies{Guests: []network.Guest{{ID: a.id}}})
		police(t, n, network.Policies{Node: "another", Guests: []network.Guest{{ID: b.id, Ingress: []int{0}}}, Ingress: allow()})
		a.want("the policies of the other node", bServes, false)
		b.want("open", aServes, true)
	})
	police(t, n, network.Policies{Node: "another"})

	t.Run("established connections survive", func(t *testing.T) {
		set(network.Policies{Guests: guests(nil, nil)})
		alive := a.converse(b)
		set(network.Policies{Guests: guests([]int{0}, []int{0}), Ingress: allow(), Egress: allow()})
		a.want("a new connection", bServes, false)
		if err := alive(); err != nil {
			t.Error(err)
		}
	})
	t.Run("a pod that is gone", func(t *testing.T) {
		set(network.Policies{Guests: []network.Guest{{ID: a.id}}})
		a.want("closed again", bServes, false)
		b.want("closed again", aServes, false)
	})
	t.Run("before it is attached", func(t *testing.T) {
		id := vm.NewID()
		set(network.Policies{Guests: append(guests(nil, nil), network.Guest{ID: id, Ingress: []int{1}}), Ingress: allow(network.Rule{Peers: only(a.nic.IP), AllPorts: true})})
		late := newGuestOf(t, n, id, "late", vm.NICSpec{Policed: true})
		late.configure(late.nic.IP)
		lateServes := at(late)
		a.want("allowed", lateServes, true)
		other.want("denied", lateServes, false)
	})
	t.Run("a guest that was not policed", func(t *testing.T) {
		set(network.Policies{Guests: append(guests(nil, nil), network.Guest{ID: other.id, Ingress: []int{0}}), Ingress: allow()})
		a.want("denied", otherServes, false)
	})
}

// converse opens a connection to another guest and returns what says whether it still works.
func (g guest) converse(with guest) func() error {
	g.t.Helper()
	var l net.Listener
	with.do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(g.t.Context(), "tcp", net.JoinHostPort(with.nic.IP, "0"))
		return err
	})
	g.t.Cleanup(func() { l.Close() })
	go func() {
		if c, err := l.Accept(); err == nil {
			_, _ = io.Copy(c, c)
			c.Close()
		}
	}()
	var c net.Conn
	g.do(func() (err error) {
		c, err = (&net.Dialer{Timeout: patience}).DialContext(g.t.Context(), "tcp", l.Addr().String())
		return err
	})
	g.t.Cleanup(func() { c.Close() })
	alive := func() error {
		_ = c.SetDeadline(time.Now().Add(patience))
		buf := make([]byte, 5)
		_, err := c.Write([]byte("hello"))
		if _, rerr := io.ReadFull(c, buf); err == nil {
			err = rerr
		}
		return err
	}
	if err := alive(); err != nil {
		g.t.Fatal(err)
	}
	return alive
}

func TestPolicies6(t *testing.T) {
	for name, before := range map[string]func(*testing.T){"routed": func(*testing.T) {}, "filtered": showBridged} {
		t.Run(name, func(t *testing.T) {
			netns.Require(t)
			before(t)
			n := start6(t, Config{NAT: true})
			a := newGuestOf(t, n, vm.NewID(), "a", vm.NICSpec{Policed: true}).joined()
			b := newGuestOf(t, n, vm.NewID(), "b", vm.NICSpec{Policed: true}).joined()
			c := newGuest(t, n, "c").joined()
			serves, _ := listen(t, b.ns, net.JoinHostPort(b.nic.IPv6, "0"))
			a.want("closed", serves, false)
			c.want("closed", serves, false)
			if !dial(t, serves, patience) {
				t.Error("the host does not reach the guest")
			}
			named := network.Endpoint{Addr: netip.MustParseAddr(b.nic.IPv6), Protocol: network.TCP, Port: portOf(t, serves)}
			for what, rule := range map[string]network.Rule{
				"a peer":     {Peers: only(a.nic.IPv6), AllPorts: true},
				"a port":     {Peers: only(a.nic.IPv6), Ports: []network.Port{{Protocol: network.TCP, First: named.Port, Last: named.Port}}},
				"named":      {Peers: only(a.nic.IPv6), Named: []network.Endpoint{named}},
				"a hole":     {Peers: network.RangeOf(netip.MustParsePrefix("::/0")).Without(only(c.nic.IPv6)), AllPorts: true},
				"both kinds": {Peers: append(only(a.nic.IPv6), only(a.nic.IP)...), AllPorts: true},
			} {
				police(t, n, network.Policies{
					Guests: []network.Guest{{ID: a.id}, {ID: b.id, Ingress: []int{0}}}, Ingress: []network.Policy{{Name: what, Rules: []network.Rule{rule}}},
				})
				a.want(what, serves, true)
				c.want(what, serves, false)
			}
		})
	}
}

// Guests whose policies name only each other find each other on the link.
func TestPolicies6Neighbours(t *testing.T) {
	for name, before := range map[string]func(*testing.T){"routed": func(*testing.T) {}, "filtered": showBridged} {
		t.Run(name, func(t *testing.T) {
			netns.Require(t)
			before(t)
			n := start6(t, Config{NAT: true})
			a, b := newGuestOf(t, n, vm.NewID(), "a", policedSpec).joined(), newGuestOf(t, n, vm.NewID(), "b", policedSpec).joined()
			c := newGuest(t, n, "c").joined()
			peers := func(g guest) []network.Policy {
				return []network.Policy{{Name: "peer", Rules: []network.Rule{{Peers: append(only(g.nic.IPv6), only(g.nic.IP)...), AllPorts: true}}}}
			}
			police(t, n, network.Policies{
				Guests: []network.Guest{{ID: a.id, Egress: []int{0}, Ingress: []int{0}}}, Egress: peers(b), Ingress: peers(b),
			})
			police(t, n, network.Policies{
				Node: "another", Guests: []network.Guest{{ID: b.id, Egress: []int{0}, Ingress: []int{0}}}, Egress: peers(a), Ingress: peers(a),
			})
			if !a.pings(b.nic.IPv6, patience) || !b.pings(a.nic.IPv6, patience) {
				t.Error("peers do not reach each other")
			}
			if a.pings(c.nic.IPv6, impatience) || c.pings(a.nic.IPv6, impatience) {
				t.Error("another guest is reached")
			}
		})
	}
}

// Where guests exchange packets past the host's rules, nobody may believe that policies are enforced.
func TestNotPoliced(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	for name, cfg := range map[string]Config{"switched": {NAT: true, Switched: true}, "unguarded": {Unguarded: true}} {
		t.Run(name, func(t *testing.T) {
			cfg.Subnet, cfg.StateDir = testSubnet, t.TempDir()
			n := build(t, cfg)
			if err := n.Polices(); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("before: %v", err)
			}
			m := start(t, cfg)
			if err := m.Polices(); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("after: %v", err)
			}
			if err := m.Police(t.Context(), network.Policies{Node: "n"}); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("set: %v", err)
			}
			a, b := policed(t, m, "a"), policed(t, m, "b")
			if !a.pings(b.nic.IP, patience) {
				t.Error("guests do not reach each other")
			}
		})
	}
	n := start(t, Config{Subnet: testSubnet})
	if err := n.Polices(); err != nil {
		t.Error(err)
	}
	if err := n.Police(t.Context(), network.Policies{Guests: []network.Guest{{}}}); !errdefs.IsInvalid(err) {
		t.Errorf("invalid policies: %v", err)
	}
}

// Who stops showing bridged packets to the rules ends policies. Then nobody may believe that they are enforced.
func TestNotPolicedAnyMore(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	for key, cfg := range map[string]Config{filteredKey: {Subnet: testSubnet}, filtered6Key: {Subnet: testSubnet, Subnet6: testSubnet6}} {
		t.Run(key, func(t *testing.T) {
			showBridged(t)
			n := start(t, cfg)
			if err := errors.Join(n.Polices(), n.Police(t.Context(), network.Policies{Node: "n"})); err != nil {
				t.Fatal(err)
			}
			if err := host.SetSysctl(key, "0"); err != nil {
				t.Fatal(err)
			}
			if err := n.Polices(); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("they are enforced: %v", err)
			}
			if err := n.Police(t.Context(), network.Policies{Node: "n"}); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("set: %v", err)
			}
			if err := host.SetSysctl(key, "1"); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(n.Polices(), n.Police(t.Context(), network.Policies{Node: "n"})); err != nil {
				t.Error("again:", err)
			}
		})
	}
}

// BenchmarkPolice sets the policies of 100 guests, which have two of 20 policies, each with as many peers as the name says: all of
// them again with a peer more (replaced), or with the same policies for a guest more or less (guest).
func BenchmarkPolice(b *testing.B) {
	netns.Require(b)
	need.Tun(b)
	for _, peers := range []int{10, 100, 1000} {
		for _, kind := range []string{"replaced", "guest"} {
			b.Run(fmt.Sprintf("%s/%d", kind, peers), func(b *testing.B) { benchPolice(b, peers, kind == "replaced") })
		}
	}
}

func benchPolice(b *testing.B, peers int, replaced bool) {
	b.Helper()
	n := build(b, Config{Subnet: "10.77.0.0/16", StateDir: b.TempDir(), NAT: true})
	if err := n.Setup(b.Context()); err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := n.Teardown(context.WithoutCancel(b.Context())); err != nil {
			b.Error(err)
		}
	}()
	p := network.Policies{Node: "node"}
	for i := range 20 {
		r := network.Rule{Ports: []network.Port{{Protocol: network.TCP, First: 80, Last: 90}}}
		for k := range peers {
			r.Peers = append(r.Peers, only(fmt.Sprintf("10.%d.%d.%d", 100+i, k/100, 2*(k%100)+1))...)
		}
		p.Ingress = append(p.Ingress, network.Policy{Name: fmt.Sprint("policy ", i), Rules: []network.Rule{r}})
	}
	for i := range 100 {
		id := vm.ID(fmt.Sprint(i))
		if _, err := n.Attach(b.Context(), id, fmt.Sprint("vm", i), 0, vm.NICSpec{Policed: true}); err != nil {
			b.Fatal(err)
		}
		p.Guests = append(p.Guests, network.Guest{ID: id, Ingress: []int{i % 20, (i + 7) % 20}})
	}
	rounds := 0
	for b.Loop() {
		next := p
		if rounds++; replaced {
			next.Ingress = append(slices.Clone(p.Ingress), network.Policy{Name: fmt.Sprint(rounds)})
		} else if rounds%2 == 1 {
			next.Guests = p.Guests[1:]
		}
		if err := n.Police(b.Context(), next); err != nil {
			b.Fatal(err)
		}
	}
}
