package uplink

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func fixedAt(address, gateway string) *capsulev1.NetworkConfig {
	return &capsulev1.NetworkConfig{Link: "eth0", Ipv4: &capsulev1.NetworkIPv4{Method: capsulev1.IPv4Method_IPV4_METHOD_STATIC, Address: address, Gateway: gateway}}
}

// pretender is a machine whose links take any address, except those that it refuses.
type pretender struct {
	mu      sync.Mutex
	using   *capsulev1.NetworkConfig
	refuses string
	at      int // how many use it at the same time
	most    int
}

func (p *pretender) Use(ctx context.Context, c *capsulev1.NetworkConfig, tell func(*capsulev1.NetworkState)) error {
	p.mu.Lock()
	p.at++
	p.most = max(p.most, p.at)
	p.using = c
	refused := p.refuses != "" && c.GetIpv4().GetAddress() == p.refuses
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.at--
		p.mu.Unlock()
	}()
	if refused {
		return errors.New("the link takes no such address")
	}
	address := c.GetIpv4().GetAddress()
	if address == "" {
		address = "192.0.2.99/24"
	}
	tell(&capsulev1.NetworkState{Addresses: []string{address}})
	<-ctx.Done()
	return ctx.Err()
}

func (p *pretender) now() *capsulev1.NetworkConfig {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.using
}

// appliance is a machine with a manager and a control. Its time is that of the test.
type appliance struct {
	t     *testing.T
	files Files
	links *pretender
	wake  chan struct{}
	began time.Time
	*Control
}

func newAppliance(t *testing.T, files Files) *appliance {
	a := &appliance{t: t, files: files, links: &pretender{}, wake: make(chan struct{}, 1), began: time.Now()}
	a.Control = &Control{
		Files: files, Age: func() time.Duration { return time.Since(a.began) },
		Wake: func() error {
			select {
			case a.wake <- struct{}{}:
			default:
			}
			return nil
		},
		Machine: func() (Machine, error) {
			return Machine{Links: []*capsulev1.NetworkLink{{Name: "eth0", Mac: "52:54:00:12:34:56", Up: true, Carrier: true}}, Inner: []netip.Prefix{netip.MustParsePrefix("172.20.0.0/16")}}, nil
		},
	}
	return a
}

// boot runs process 1 until the returned function is called.
func (a *appliance) boot() (off func()) {
	ctx, cancel := context.WithCancel(a.t.Context())
	done := make(chan struct{})
	m := &Manager{Files: a.files, Age: a.Age, User: a.links, Log: slog.New(slog.DiscardHandler), Changed: func(*capsulev1.NetworkState) {}}
	go func() { defer close(done); m.Run(ctx, a.wake) }()
	synctest.Wait()
	return func() { cancel(); <-done }
}

func (a *appliance) uses(what string, want *capsulev1.NetworkConfig) {
	a.t.Helper()
	synctest.Wait()
	if got := a.links.now(); !proto.Equal(got, want) {
		a.t.Errorf("%s: the machine uses %v, want %v", what, got, want)
	}
	a.links.mu.Lock()
	defer a.links.mu.Unlock()
	if a.links.most > 1 {
		a.t.Errorf("%s: %d configurations were in use at the same time", what, a.links.most)
	}
}

func (a *appliance) set(c *capsulev1.NetworkConfig, within time.Duration) {
	a.t.Helper()
	if r, err := a.Set(a.t.Context(), c, within, false); err != nil || !r.GetTrial() || r.GetSecondsLeft() != uint32(max(within, DefaultWithin).Seconds()) && within == 0 {
		a.t.Fatalf("set: %v, %v", r, err)
	}
	<-time.After(answerTime)
	synctest.Wait()
}

// A trial that nobody confirms ends at its deadline, and one that somebody confirms stays, also over restarts.
func TestTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAppliance(t, Files{t.TempDir(), t.TempDir()})
		off := a.boot()
		first, wrong, right := &capsulev1.NetworkConfig{}, fixedAt("198.51.100.7/24", ""), fixedAt("192.0.2.7/24", "192.0.2.1")
		a.uses("at first", first)
		if _, err := a.Confirm(t.Context(), netip.MustParseAddr("192.0.2.99")); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("confirm nothing: %v", err)
		}
		if _, err := a.Set(t.Context(), wrong, time.Minute, false); err != nil {
			t.Fatal(err)
		}
		a.uses("before the answer is there", first)
		<-time.After(answerTime)
		a.uses("during the trial", wrong)
		if g, err := a.Get(t.Context()); err != nil || !proto.Equal(g.GetTrial(), wrong) || g.GetTrialSecondsLeft() != 59 || !proto.Equal(g.GetConfirmed(), first) {
			t.Errorf("get: %v, %v", g, err)
		}
		if _, err := a.Confirm(t.Context(), netip.MustParseAddr("172.20.0.1")); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "no address of the uplink") {
			t.Errorf("confirmed by another way: %v", err)
		}
		<-time.After(58 * time.Second)
		a.uses("just before the deadline", wrong)
		<-time.After(time.Second)
		a.uses("after the deadline", first)
		if _, err := a.Confirm(t.Context(), netip.MustParseAddr("198.51.100.7")); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "too late") {
			t.Errorf("confirmed too late: %v", err)
		}
		if g, err := a.Get(t.Context()); err != nil || g.GetTrial() != nil || g.GetTrialEnded() == "" {
			t.Errorf("get after the fall back: %v, %v", g, err)
		}
		<-time.After(time.Hour)
		a.uses("an hour later", first)

		a.set(right, 0)
		<-time.After(80 * time.Second)
		if _, err := a.Confirm(t.Context(), netip.MustParseAddr("::ffff:192.0.2.7")); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Hour)
		a.uses("confirmed", right)
		if g, err := a.Get(t.Context()); err != nil || g.GetTrial() != nil || g.GetTrialEnded() != "" {
			t.Errorf("get after the confirmation: %v, %v", g, err)
		}

		// A trial in place of another one, and the end of one by setting what is confirmed.
		a.set(wrong, time.Minute)
		a.set(first, time.Hour)
		a.uses("the second trial", first)
		if r, err := a.Set(t.Context(), right, time.Minute, false); err != nil || r.GetTrial() {
			t.Errorf("set what is confirmed: %v, %v", r, err)
		}
		a.uses("set back, before the answer is there", first)
		<-time.After(answerTime)
		a.uses("set back", right)
		off()
		b := newAppliance(t, Files{a.files.Keep, t.TempDir()})
		defer b.boot()()
		b.uses("after a restart of the machine", right)
	})
}

// A machine that restarts during a trial begins with what was confirmed: the folder of the trial is empty then.
func TestPowerCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		keep := t.TempDir()
		a := newAppliance(t, Files{keep, t.TempDir()})
		off := a.boot()
		right, wrong := fixedAt("192.0.2.7/24", ""), fixedAt("198.51.100.7/24", "")
		a.set(right, time.Minute)
		if _, err := a.Confirm(t.Context(), netip.MustParseAddr("192.0.2.7")); err != nil {
			t.Fatal(err)
		}
		a.set(wrong, time.Hour)
		off()
		b := newAppliance(t, Files{keep, t.TempDir()})
		defer b.boot()()
		b.uses("after a power cut", right)
	})
}

// A daemon that is killed at any step of a confirmation leaves the trial, or what it confirmed.
func TestDaemonIsKilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		right, old := fixedAt("192.0.2.7/24", ""), &capsulev1.NetworkConfig{}
		for step, want := range map[string]*capsulev1.NetworkConfig{"before it is stored": old, "after it is stored": right, "after the trial is removed": right} {
			a := newAppliance(t, Files{t.TempDir(), t.TempDir()})
			off := a.boot()
			a.set(right, time.Minute)
			if step != "before it is stored" {
				if err := a.files.keep(right); err != nil {
					t.Fatal(err)
				}
			}
			if step == "after the trial is removed" {
				if err := a.files.endTrial(); err != nil {
					t.Fatal(err)
				}
			}
			<-time.After(30 * time.Second)
			a.uses(step+", before the deadline", right)
			<-time.After(time.Hour)
			a.uses(step+", after the deadline", want)
			off()
		}
	})
}

// What is damaged, or cannot be used, does not keep the machine from going back.
func TestDamage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAppliance(t, Files{t.TempDir(), t.TempDir()})
		if err := os.WriteFile(a.files.confirmed(), []byte(`{"vlan": 5000}`), 0o600); err != nil {
			t.Fatal(err)
		}
		defer a.boot()()
		a.uses("with a damaged configuration", &capsulev1.NetworkConfig{})
		if _, err := a.Get(t.Context()); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("get: %v", err)
		}
		refused := fixedAt("192.0.2.7/24", "")
		a.links.refuses = "192.0.2.7/24"
		a.set(refused, time.Minute)
		if _, err := a.Confirm(t.Context(), netip.MustParseAddr("192.0.2.7")); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "takes no such address") {
			t.Errorf("confirm what is not in use: %v", err)
		}
		<-time.After(2 * time.Minute)
		a.uses("after a trial that could not be used", &capsulev1.NetworkConfig{})
		a.set(fixedAt("192.0.2.8/24", ""), time.Minute)
		if _, err := a.Confirm(t.Context(), netip.MustParseAddr("192.0.2.8")); err != nil {
			t.Error(err)
		}
		if err := os.WriteFile(a.files.trial(), []byte(`{`), 0o600); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Minute)
		a.uses("with a damaged trial", fixedAt("192.0.2.8/24", ""))
	})
}

// What cannot work is refused, and changes nothing.
func TestRefused(t *testing.T) {
	a := newAppliance(t, Files{t.TempDir(), t.TempDir()})
	with := func(change func(*capsulev1.NetworkConfig)) *capsulev1.NetworkConfig {
		c := fixedAt("192.0.2.7/24", "192.0.2.1")
		change(c)
		return c
	}
	for what, tc := range map[string]struct {
		config *capsulev1.NetworkConfig
		words  string
		class  errdefs.Class
	}{
		"no prefix length":     {fixedAt("192.0.2.7", ""), "ipv4.address", errdefs.InvalidArgument},
		"IPv6 as IPv4":         {fixedAt("2001:db8::7/64", ""), "ipv4.address", errdefs.InvalidArgument},
		"loopback":             {fixedAt("127.0.0.2/8", ""), "ipv4.address", errdefs.InvalidArgument},
		"the network":          {fixedAt("192.0.2.0/24", ""), "the network itself", errdefs.InvalidArgument},
		"broadcast":            {fixedAt("192.0.2.255/24", ""), "broadcast", errdefs.InvalidArgument},
		"a gateway elsewhere":  {fixedAt("192.0.2.7/24", "198.51.100.1"), "cannot be reached", errdefs.InvalidArgument},
		"itself as gateway":    {fixedAt("192.0.2.7/24", "192.0.2.7"), "the machine itself", errdefs.InvalidArgument},
		"broadcast as gateway": {fixedAt("192.0.2.7/24", "192.0.2.255"), "not the address of a machine", errdefs.InvalidArgument},
		"an address with DHCP": {&capsulev1.NetworkConfig{Ipv4: &capsulev1.NetworkIPv4{Address: "192.0.2.7/24"}}, "method STATIC", errdefs.InvalidArgument},
		"neither family":       {&capsulev1.NetworkConfig{Ipv4: &capsulev1.NetworkIPv4{Method: capsulev1.IPv4Method_IPV4_METHOD_OFF}}, "static IPv6", errdefs.InvalidArgument},
		"a tag":                {with(func(c *capsulev1.NetworkConfig) { c.Vlan = 4095 }), "vlan", errdefs.InvalidArgument},
		"an MTU":               {with(func(c *capsulev1.NetworkConfig) { c.Mtu = 900 }), "mtu", errdefs.InvalidArgument},
		"a name server":        {with(func(c *capsulev1.NetworkConfig) { c.Dns = []string{"dns.example"} }), "dns[0]", errdefs.InvalidArgument},
		"a server of time":     {with(func(c *capsulev1.NetworkConfig) { c.Ntp = []string{"a b"} }), "ntp[0]", errdefs.InvalidArgument},
		"a method":             {with(func(c *capsulev1.NetworkConfig) { c.Ipv6 = &capsulev1.NetworkIPv6{Method: 9} }), "DHCPv6", errdefs.InvalidArgument},
		"a path as link":       {with(func(c *capsulev1.NetworkConfig) { c.Link = "../x" }), "link", errdefs.InvalidArgument},
		"a bond and a link":    {with(func(c *capsulev1.NetworkConfig) { c.Bond = &capsulev1.NetworkBond{Links: []string{"eth0"}} }), "link", errdefs.InvalidArgument},
		"a bond of nothing":    {with(func(c *capsulev1.NetworkConfig) { c.Link = ""; c.Bond = &capsulev1.NetworkBond{} }), "bond.links", errdefs.InvalidArgument},
		"no such link":         {with(func(c *capsulev1.NetworkConfig) { c.Link = "eth7" }), "no Ethernet link eth7", errdefs.FailedPrecondition},
		"a link twice": {with(func(c *capsulev1.NetworkConfig) {
			c.Link = ""
			c.Bond = &capsulev1.NetworkBond{Links: []string{"eth0", "52:54:00:12:34:56"}}
		}), "twice", errdefs.FailedPrecondition},
		"the workloads' network": {fixedAt("172.20.3.4/24", ""), "network of the workloads", errdefs.FailedPrecondition},
	} {
		_, err := a.Set(t.Context(), tc.config, time.Minute, false)
		if !errdefs.Is(err, tc.class) || !strings.Contains(err.Error(), tc.words) {
			t.Errorf("%s: %v, want %v with %q", what, err, tc.class, tc.words)
		}
	}
	for _, within := range []time.Duration{time.Second, 2 * time.Hour} {
		if _, err := a.Set(t.Context(), fixedAt("192.0.2.7/24", ""), within, false); !errdefs.IsInvalid(err) {
			t.Errorf("%s to confirm: %v", within, err)
		}
	}
	if r, err := a.Set(t.Context(), fixedAt("192.0.2.7/24", ""), time.Minute, true); err != nil || !r.GetTrial() {
		t.Errorf("dry run: %v, %v", r, err)
	}
	a.Machine = func() (Machine, error) {
		return Machine{Links: []*capsulev1.NetworkLink{{Name: "eth0", Up: true}}}, nil
	}
	if _, err := a.Set(t.Context(), fixedAt("192.0.2.7/24", ""), time.Minute, false); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "no cable") {
		t.Errorf("a link without a cable: %v", err)
	}
	for _, f := range []string{a.files.confirmed(), a.files.trial()} {
		if _, err := os.Stat(f); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there: %v", f, err)
		}
	}
}

// FuzzConfirmed: whatever the file of the confirmed configuration has, it is damaged, or a valid configuration that is written as it was
// read.
func FuzzConfirmed(f *testing.F) {
	for _, seed := range []string{`{}`, `{"link":"eth0","vlan":7,"ipv4":{"method":"IPV4_METHOD_STATIC","address":"192.0.2.7/24","gateway":"192.0.2.1"}}`, `{"ipv6":{"method":2,"address":"2001:db8::7/64","gateway":"fe80::1"},"ipv4":{"method":3},"ntp":["pool.ntp.org"]}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, again := &capsulev1.NetworkConfig{}, &capsulev1.NetworkConfig{}
		if decode(data, c) != nil {
			return
		}
		text, err := protojson.Marshal(c)
		if err := errors.Join(err, Validate(c), decode(text, again)); err != nil || !proto.Equal(c, again) {
			t.Errorf("%v became %v, %v", c, again, err)
		}
		_ = Check(c, Machine{})
		_ = fixed(c)
	})
}
