package bridge

import (
	"fmt"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// Links removed concurrently go in one request. That request must remove all of them, distinguish links that are already gone
// from links that stay, and touch no other link.
func TestRemovedTogether(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	made := func(name string) netlink.Link {
		if err := host.MakeTap(name, func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		l, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	stranger := made("stranger")
	defer func() { _ = host.RemoveLink(stranger) }()
	if err := netlink.LinkSetGroup(stranger, 7); err != nil {
		t.Fatal(err)
	}
	var links []netlink.Link
	for i := range 100 {
		links = append(links, made(fmt.Sprint("together", i)))
	}
	if err := netlink.LinkDel(links[3]); err != nil {
		t.Fatal(err)
	}
	var all turns
	var wg sync.WaitGroup
	for _, l := range links {
		wg.Go(func() {
			if err := all.remove(l); err != nil {
				t.Error(err)
			}
			if l, err := host.FindLink(l.Attrs().Name); err != nil || l != nil {
				t.Errorf("after its removal: %v, %v", l, err)
			}
		})
	}
	wg.Wait()
	if l, err := host.FindLink("stranger"); err != nil || l == nil {
		t.Errorf("a link of somebody else went too (%v)", err)
	}
}
