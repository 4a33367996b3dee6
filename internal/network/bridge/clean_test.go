package bridge

import (
	"strings"
	"testing"

	"github.com/google/nftables"

	"cocoonstack.io/cocoon/internal/network/host"
)

// assertClean checks that nothing of ours is in the calling thread's namespace.
func assertClean(t testing.TB) {
	t.Helper()
	links, err := host.ListLinks()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if l.Type() == "bridge" || l.Type() == "tuntap" || strings.HasPrefix(l.Attrs().Name, "ct") {
			t.Errorf("%s %s is left (%s)", l.Type(), l.Attrs().Name, l.Attrs().Alias)
		}
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	tables, err := c.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		t.Errorf("nftables table %s is left", table.Name)
	}
	if v, err := host.Sysctl(forwardKey); err != nil || v != "0" {
		t.Errorf("ip_forward is %s (%v), was 0", v, err)
	}
}
