package bridge

import (
	"net/netip"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestConfig(t *testing.T) {
	good := Config{StateDir: "/x"}
	c, err := good.withDefaults()
	if err != nil || c.Name != "default" || c.Bridge != "cocoon0" || c.Subnet != SubnetAuto || c.LeasePath != "/x/leases.json" {
		t.Errorf("%+v, %v", c, err)
	}
	for name, change := range map[string]func(*Config){
		"no state":              func(c *Config) { c.StateDir = "" },
		"name":                  func(c *Config) { c.Name = "A b" },
		"instance":              func(c *Config) { c.Instance = "../x" },
		"long bridge":           func(c *Config) { c.Bridge = strings.Repeat("b", 16) },
		"bridge with a slash":   func(c *Config) { c.Bridge = "a/b" },
		"bridge of dots":        func(c *Config) { c.Bridge = ".." },
		"masquerade link":       func(c *Config) { c.MasqueradeLink = "a b" },
		"subnet":                func(c *Config) { c.Subnet = "x" },
		"IPv6":                  func(c *Config) { c.Subnet = "fd00::/64" },
		"host bits":             func(c *Config) { c.Subnet = "10.0.0.1/24" },
		"gateway without":       func(c *Config) { c.Gateway = "10.0.0.1" },
		"gateway outside":       func(c *Config) { c.Subnet, c.Gateway = "10.0.0.0/24", "10.0.1.1" },
		"gateway is broadcast":  func(c *Config) { c.Subnet, c.Gateway = "10.0.0.0/24", "10.0.0.255" },
		"gateway is the subnet": func(c *Config) { c.Subnet, c.Gateway = "10.0.0.0/24", "10.0.0.0" },
		"DNS":                   func(c *Config) { c.DNS = []string{"::1"} },
		"MTU":                   func(c *Config) { c.MTU = 100 },
	} {
		bad := good
		change(&bad)
		if _, err := New(bad, nil); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestChooseSubnet(t *testing.T) {
	auto := Config{Name: "n", Subnet: SubnetAuto, Instance: "default"}
	another := Config{Name: "n", Subnet: SubnetAuto, Instance: "another"}
	uses := func(cidrs ...string) (out []use) {
		for _, c := range cidrs {
			out = append(out, use{netip.MustParsePrefix(c), "route " + c})
		}
		return out
	}
	p := netip.MustParsePrefix
	tests := map[string]struct {
		cfg    Config
		before netip.Prefix
		keep   bool
		uses   []use
		want   string // "" means FailedPrecondition
	}{
		"first":                     {cfg: auto, want: "10.88.0.0/24"},
		"next":                      {cfg: auto, uses: uses("10.88.0.0/23", "10.88.2.5/32"), want: "10.88.3.0/24"},
		"another instance":          {cfg: another, want: "10.88.20.0/24"},
		"its next":                  {cfg: another, uses: uses("10.88.20.0/24"), want: "10.88.21.0/24"},
		"its last":                  {cfg: another, uses: uses("10.88.20.0/22", "10.88.24.0/21", "10.88.32.0/19", "10.88.64.0/18", "10.88.128.0/17"), want: "10.88.0.0/24"},
		"its second range":          {cfg: another, uses: uses("10.0.0.0/8"), want: "172.30.20.0/24"},
		"its third range":           {cfg: another, uses: uses("10.0.0.0/8", "172.16.0.0/12"), want: "192.168.148.0/24"},
		"range taken":               {cfg: auto, uses: uses("10.0.0.0/8"), want: "172.30.0.0/24"},
		"all ranges taken":          {cfg: auto, uses: uses("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")},
		"as before":                 {cfg: auto, before: p("10.88.9.0/24"), want: "10.88.9.0/24"},
		"clash without VMs":         {cfg: auto, before: p("10.88.0.0/24"), uses: uses("10.88.0.0/24"), want: "10.88.1.0/24"},
		"clash with VMs":            {cfg: auto, before: p("10.88.0.0/24"), keep: true, uses: uses("10.88.0.0/24")},
		"configured":                {cfg: Config{Subnet: "10.1.0.0/16"}, before: p("10.88.0.0/24"), want: "10.1.0.0/16"},
		"configured but not free":   {cfg: Config{Subnet: "10.1.0.0/16"}, uses: uses("10.1.2.3/32")},
		"configured in a big route": {cfg: Config{Subnet: "10.1.0.0/16"}, uses: uses("10.0.0.0/8")},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := chooseSubnet(tt.cfg, tt.before, tt.keep, tt.uses)
			if tt.want == "" {
				if !errdefs.IsFailedPrecondition(err) {
					t.Errorf("got %s, %v", got, err)
				}
			} else if err != nil || got.String() != tt.want {
				t.Errorf("got %s, %v; want %s", got, err, tt.want)
			}
		})
	}
}

func TestTapNames(t *testing.T) {
	seen := map[string]bool{}
	for _, owner := range []string{"default/default", "default/second", "other/default"} {
		for index := range 3 {
			for salt := range 3 {
				name := tapName(owner, "id", index, salt)
				if len(name) != 15 || seen[name] || !strings.HasPrefix(name, tapPrefix(owner)) {
					t.Errorf("tap name %q", name)
				}
				seen[name] = true
			}
		}
	}
}

func FuzzTapAlias(f *testing.F) {
	f.Add("cocoon:default/default tap vm=abc nic=1 mac=02:00:00:00:00:01 ip=10.88.0.2 name=web.one")
	f.Add("cocoon:default/default tap vm=abc nic=0 mac=02:00:00:00:00:01 ip=10.88.0.2 policed=1 name=web")
	f.Add("cocoon:default/default tap ")
	f.Add("cocoon:default/default bridge")
	f.Add("cocoon:default/default2 tap vm=abc")
	f.Add("cocoon:default/default tap vm==x nic=-9999999999999999999 ip=:: mac")
	f.Fuzz(func(t *testing.T, alias string) {
		const owner = "default/default"
		l, ok := parseTapAlias(owner, alias)
		if ok != strings.HasPrefix(alias, "cocoon:default/default tap ") {
			t.Fatalf("%q ours: %v", alias, ok)
		}
		if !ok {
			return
		}
		if again, ok := parseTapAlias(owner, tapAlias(owner, l)); !ok || again != l {
			t.Errorf("read back %v, %s", ok, diff.Of(l, again))
		}
	})
}

func TestTapAliasFits(t *testing.T) {
	owner := strings.Repeat("i", 32) + "/" + strings.Repeat("n", 32)
	l := ipam.Lease{ID: vm.NewID(), VM: strings.Repeat("v", vm.MaxNameLength), Index: 99, MAC: "02:00:00:00:00:01", IP: netip.MustParseAddr("255.255.255.255"), Policed: true}
	if alias := tapAlias(owner, l); len(alias) > 255 {
		t.Errorf("an alias of %d bytes is more than the kernel keeps", len(alias))
	}
}

func TestHostname(t *testing.T) {
	for name, want := range map[string]string{"web": "web", "vk-ns.pod_1": "vk-ns-pod-1", "a._": "a"} {
		if got := hostname(name); got != want {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// A node cannot open or change a guest of another node by naming it.
func TestGuestOfTwoNodesIsClosed(t *testing.T) {
	of := func(ids ...vm.ID) (p network.Policies) {
		for _, id := range ids {
			p.Guests = append(p.Guests, network.Guest{ID: id})
		}
		return p
	}
	got := fatesOf(map[string]network.Policies{"a": of("mine", "both"), "b": of("both", "theirs"), "c": of("both")})
	if open := (fate{passed, passed}); got["both"] != closed || got["mine"] != open || got["theirs"] != open || len(got) != 3 {
		t.Errorf("%v", got)
	}
}
