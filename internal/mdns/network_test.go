package mdns

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// link makes a network of one machine.
func link(t *testing.T, name, addr string) {
	t.Helper()
	l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"}
	if err := netlink.LinkAdd(l); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(l) })
	a, err := netlink.ParseAddr(addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(l, a); err != nil {
		t.Fatal(err)
	}
	peer, err := netlink.LinkByName(l.PeerName)
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []netlink.Link{l, peer} {
		if err := netlink.LinkSetUp(end); err != nil {
			t.Fatal(err)
		}
	}
}

// until browses until what is found is as wanted.
func until(t *testing.T, what string, ifaces []string, wanted func([]Entry) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var got []Entry
	for ctx.Err() == nil {
		var err error
		if got, err = Browse(ctx, 300*time.Millisecond, ifaces); err != nil {
			t.Fatal(err)
		}
		if wanted(got) {
			return
		}
	}
	t.Fatalf("%s: %+v", what, got)
}

func TestAnnouncedMachineIsFound(t *testing.T) {
	netns.Require(t)
	link(t, "uplink", "192.0.2.7/24")
	link(t, "inside", "198.51.100.1/24")
	a, err := New(here, []string{"uplink"}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.Start(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("started twice: %v", err)
	}
	until(t, "announced", nil, func(e []Entry) bool {
		return len(e) == 1 && e[0].CapsuleID == here.CapsuleID && e[0].Addr == "192.0.2.7:50000" && !e[0].Adopted
	})
	a.Update(true)
	until(t, "adopted", []string{"uplink"}, func(e []Entry) bool { return len(e) == 1 && e[0].Adopted })
	until(t, "on an interface that it is not for", []string{"inside"}, func(e []Entry) bool { return len(e) == 0 })

	other := here
	other.CapsuleID = "ffffffff-2a43-4f0c-9d0b-6a55c2a3d001"
	b, err := New(other, []string{"uplink"}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	until(t, "two of one name", nil, func(e []Entry) bool { return len(e) == 2 && e[0].CapsuleID != e[1].CapsuleID })
	b.Close()
	a.Close()
	until(t, "gone", nil, func(e []Entry) bool { return len(e) == 0 })
	if err := a.Start(t.Context()); err != nil {
		t.Errorf("started again: %v", err)
	}
}

func TestNoNetwork(t *testing.T) {
	netns.Require(t)
	if _, err := Browse(t.Context(), time.Millisecond, []string{"none"}); !errdefs.IsUnavailable(err) {
		t.Errorf("browse: %v", err)
	}
	a, err := New(here, []string{"none"}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Start(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("start: %v", err)
	}
	a.Close()
}
