package capsulectl_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// networkServer is the network of a machine, whose new configuration is in use after some attempts to confirm it.
type networkServer struct {
	capsulev1.UnimplementedNetworkServiceServer

	mu        sync.Mutex
	confirmed *capsulev1.NetworkConfig
	trial     *capsulev1.NetworkConfig
	busy      int
	late      bool
}

func (n *networkServer) Get(context.Context, *capsulev1.NetworkGetRequest) (*capsulev1.NetworkGetResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &capsulev1.NetworkGetResponse{
		Confirmed: n.confirmed, Trial: n.trial, TrialSecondsLeft: 42,
		State: &capsulev1.NetworkState{Link: "eth0", Addresses: []string{"192.0.2.7/24"}, Dns: []string{"192.0.2.53"}, Clock: &capsulev1.NetworkClock{Synchronized: true, Server: "pool.ntp.org", OffsetMicroseconds: 1500}},
		Links: []*capsulev1.NetworkLink{{Name: "eth0", Mac: "52:54:00:12:34:56", Up: true, Carrier: true}, {Name: "eth1"}},
	}, nil
}

func (n *networkServer) Set(_ context.Context, r *capsulev1.NetworkSetRequest) (*capsulev1.NetworkSetResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r.GetConfig().GetLink() == "eth7" {
		return nil, errdefs.Preconditionf("no Ethernet link eth7")
	}
	if !r.GetDryRun() {
		n.trial = r.GetConfig()
	}
	return &capsulev1.NetworkSetResponse{Trial: true, SecondsLeft: r.GetConfirmWithinSeconds()}, nil
}

func (n *networkServer) Confirm(context.Context, *capsulev1.NetworkConfirmRequest) (*capsulev1.NetworkConfirmResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.late:
		return nil, errdefs.Preconditionf("it is too late")
	case n.busy > 0:
		n.busy--
		return nil, errdefs.Unavailablef("not in use yet")
	}
	n.confirmed, n.trial = n.trial, nil
	return &capsulev1.NetworkConfirmResponse{Confirmed: n.confirmed}, nil
}

func TestNetwork(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	file := write(t, "link: eth0\nvlan: 7\nipv4: {method: static, address: 192.0.2.7/24, gateway: 192.0.2.1}\nipv6: {method: \"off\"}\ndns: [192.0.2.53]\n")
	has(t, o.ok("network", "set", "-f", file, "--dry-run"), "would try it for 90s")
	if m.network.trial != nil {
		t.Error("a dry run sets it")
	}
	has(t, o.ok("network", "set", "-f", file), "tries it for 90s", "network confirm")
	if c := m.network.trial; c.GetVlan() != 7 || c.GetIpv4().GetMethod() != capsulev1.IPv4Method_IPV4_METHOD_STATIC || c.GetIpv6().GetMethod() != capsulev1.IPv6Method_IPV6_METHOD_OFF {
		t.Errorf("it was told %v", c)
	}
	has(t, o.ok("network", "get"), "192.0.2.7/24", "goes back in 42s", "eth0  52:54:00:12:34:56  connected", "eth1", "by pool.ntp.org, which it differed from by 1.5ms")
	m.network.late = true
	o.fails(5, "too late", "network", "confirm")
	m.network.late = false
	has(t, o.ok("network", "confirm"), "keeps it")
	has(t, o.ok("network", "get", "--config"), `"vlan": 7`)
	m.network.busy = 3
	same := strings.Replace(m.addr, "127.0.0.1", "localhost", 1)
	has(t, o.ok("network", "set", "-f", file, "--auto-confirm", "--at", same), "keeps it", "has the address "+same)
	has(t, o.ok("context", "list"), same)
	// What it prints can be set again; an empty file is DHCP.
	has(t, o.ok("network", "set", "-f", write(t, o.ok("network", "get", "--config")), "--dry-run"), "would try")
	has(t, o.ok("network", "set", "-f", write(t, "# the default\n"), "--dry-run"), "would try")
	for text, want := range map[string]string{"vlan: x": "vlan: it must be a number", "vlam: 7": "there is no such field", "[]": "no mapping", "link: a\n---\nlink: b": "one document"} {
		o.fails(2, want, "network", "set", "-f", write(t, text))
	}
	o.fails(5, "no Ethernet link", "network", "set", "-f", write(t, "link: eth7"))
}

// A machine whose clock is wrong, also by decades, can be used: tokens are made for the time that it has.
func TestWrongClock(t *testing.T) {
	for _, ahead := range []time.Duration{-time.Since(time.Unix(1000, 0)), 10 * 365 * 24 * time.Hour} {
		m := newMachine(t)
		m.ahead = ahead
		o := adopted(t, m)
		has(t, o.ok("capsule", "info"), "hostname         lab")
		has(t, o.ok("capsule", "logs", "-n", "3"), "daemon false 3")
		o.ok("volume", "create", "data")
	}
}
