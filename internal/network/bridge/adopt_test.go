package bridge

import (
	"context"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// An adopted bridge serves guests with its own address. The rules apply to guests only, and the bridge stays unchanged.
func TestAdopt(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	refused(t, Config{Adopt: true}, "no bridge cocoon0")
	bare := addLink(t, "lan0", "")
	refused(t, Config{Adopt: true, Bridge: "lan0"}, "no IPv4 address")
	if err := netlink.LinkDel(bare); err != nil {
		t.Fatal(err)
	}
	br := addLink(t, "lan0", "10.88.7.3/24")
	// A neighbour that existed before, with its own port on the bridge and no tap of ours.
	neighbour := netns.New(t)
	addPort(t, br, neighbour, "10.88.7.77/24")
	open, _ := listen(t, "", "10.88.7.3:0")
	reaches := func() (ok bool) {
		netns.Do(t, neighbour, func() error { ok = dial(t, open, patience); return nil })
		return ok
	}
	before := snapshot(t)
	n := build(t, Config{Adopt: true, Bridge: "lan0", StateDir: t.TempDir(), DNS: []string{}})
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	g := newGuest(t, n, "web")
	if g.nic.Gateway != "10.88.7.3" {
		t.Errorf("NIC %+v", g.nic)
	}
	if lease := g.request(t); lease.ACK.YourIPAddr.String() != g.nic.IP {
		t.Errorf("leased %s", lease.ACK.Summary())
	}
	g.configure(g.nic.IP)
	if !g.pings(g.nic.Gateway, patience) || !g.pings("10.88.7.77", patience) {
		t.Error("the guest does not reach the gateway and its neighbour")
	}
	if g.dials(open, impatience) {
		t.Error("the guest reaches a port of the host")
	}
	if !reaches() {
		t.Error("the neighbour does not reach what it reached before")
	}
	g.configure("10.88.7.200")
	if g.pings(g.nic.Gateway, impatience) {
		t.Error("the guest speaks under another address")
	}
	if err := n.Setup(t.Context()); err != nil {
		t.Error("set up again:", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error("run:", err)
	}
	if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
		t.Error("teardown:", err)
	}
	if after := snapshot(t); !slices.Equal(after, before) {
		t.Errorf("left %v, before %v", after, before)
	}
	if !reaches() {
		t.Error("after the teardown the neighbour is cut off")
	}
}
