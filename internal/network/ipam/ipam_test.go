package ipam

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 6, time.UTC)

func pool(t testing.TB, cidr string) *Pool {
	t.Helper()
	prefix := netip.MustParsePrefix(cidr)
	p, err := New(Config{Salt: "s", Prefix: prefix, Gateway: prefix.Addr().Next(), ReservedMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func reserve(t testing.TB, p *Pool, id, name string) Lease {
	t.Helper()
	l, _, err := p.Reserve(Request{ID: vm.ID(id), Name: name}, now)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestCheckPrefix(t *testing.T) {
	for cidr, ok := range map[string]bool{
		"10.88.0.0/24": true, "10.0.0.0/8": true, "192.168.1.4/30": true, "100.64.0.0/10": true,
		"10.88.0.1/24": false, "10.0.0.0/31": false, "0.0.0.0/8": false, "127.0.0.0/8": false, "224.0.0.0/8": false,
		"169.254.0.0/16": false, "fd00::/64": false, "8.0.0.0/7": false, "240.0.0.0/8": false,
	} {
		err := CheckPrefix(netip.MustParsePrefix(cidr))
		if (err == nil) != ok || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", cidr, err)
		}
	}
	if err := CheckPrefix(netip.Prefix{}); !errdefs.IsInvalid(err) {
		t.Errorf("no prefix: %v", err)
	}
}

func TestNameDecides(t *testing.T) {
	a, b := pool(t, "10.1.0.0/16"), pool(t, "10.1.0.0/16")
	reserve(t, b, "x", "other")
	first, again := reserve(t, a, "1", "web"), reserve(t, b, "2", "web")
	if first.MAC != again.MAC || first.IP != again.IP {
		t.Errorf("the same name got %s %s and %s %s", first.MAC, first.IP, again.MAC, again.IP)
	}
	if !strings.HasPrefix(first.MAC, "02:") {
		t.Errorf("MAC %s is not locally administered", first.MAC)
	}
	if d := diff.Of(first, reserve(t, a, "1", "web")); d != "" {
		t.Errorf("asking again: %s", d)
	}
	a.Attach("1", 0, "tap1")
	if got := reserve(t, a, "3", "web"); got.MAC == first.MAC || got.IP == first.IP {
		t.Errorf("a second VM of the name took over %+v, which is attached", got)
	}
	a.Detach(first.MAC, "tap1")
	if got := reserve(t, a, "4", "web"); got.MAC != first.MAC || got.IP != first.IP {
		t.Errorf("what a gone VM of the name left was not inherited: %+v", got)
	}
	a.Release(first.MAC, "tap1")
	if _, ok := a.ByMAC(first.MAC); !ok {
		t.Error("the release of the gone VM took the lease of its heir")
	}
	two, _, err := a.Reserve(Request{ID: "1", Name: "web", Index: 1}, now)
	if err != nil || two.MAC == first.MAC || two.IP == first.IP {
		t.Errorf("second interface: %+v, %v", two, err)
	}
}

// A VM that is created before it is requested keeps its address when it gets its name. From then on the name decides which VM
// may inherit the lease.
func TestNamedLater(t *testing.T) {
	p := pool(t, "10.1.0.0/16")
	made := reserve(t, p, "1", "waiting")
	p.Attach("1", 0, "tap1")
	before := p.Version()
	named := reserve(t, p, "1", "web")
	if named.MAC != made.MAC || named.IP != made.IP || named.VM != "web" || p.Version() == before {
		t.Errorf("it was %+v and is %+v", made, named)
	}
	p.Detach(made.MAC, "tap1")
	if other := reserve(t, p, "2", "waiting"); other.MAC == made.MAC || other.IP == made.IP {
		t.Errorf("another VM has its lease: %+v", other)
	}
}

func TestExhausted(t *testing.T) {
	p := pool(t, "10.9.9.0/29")
	seen := map[netip.Addr]bool{}
	for i := range 5 {
		l := reserve(t, p, fmt.Sprint(i), fmt.Sprint("vm", i))
		if seen[l.IP] || l.IP == p.cfg.Gateway || l.IP.String() == "10.9.9.0" || l.IP.String() == "10.9.9.7" {
			t.Errorf("address %s", l.IP)
		}
		seen[l.IP] = true
	}
	_, _, err := p.Reserve(Request{ID: "more", Name: "more"}, now)
	if !errdefs.Is(err, errdefs.ResourceExhausted) || !strings.Contains(err.Error(), "10.9.9.0/29") {
		t.Errorf("sixth VM: %v", err)
	}
	l := reserve(t, p, "0", "vm0")
	p.Attach("0", 0, "t")
	p.Release(l.MAC, "t")
	if got := reserve(t, p, "more", "more"); got.IP != l.IP {
		t.Errorf("got %s, free was %s", got.IP, l.IP)
	}
}

func TestExplicitMAC(t *testing.T) {
	p := pool(t, "10.1.0.0/24")
	ask := func(id, mac string) (Lease, error) {
		l, _, err := p.Reserve(Request{ID: vm.ID(id), Name: id, MAC: mac}, now)
		return l, err
	}
	if l, err := ask("a", "AA:BB:CC:DD:EE:00"); err != nil || l.MAC != "aa:bb:cc:dd:ee:00" {
		t.Errorf("%+v, %v", l, err)
	}
	if _, err := ask("b", "aa:bb:cc:dd:ee:00"); !errdefs.IsAlreadyExists(err) {
		t.Errorf("duplicate: %v", err)
	}
	if _, err := ask("b", "02:00:00:00:00:01"); !errdefs.IsAlreadyExists(err) {
		t.Errorf("the gateway's: %v", err)
	}
	for _, bad := range []string{"x", "01:00:00:00:00:00", "02:00:00:00:00:00:00:01"} {
		if _, err := ask("b", bad); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	if leases, _ := p.Snapshot(); len(leases) != 1 {
		t.Errorf("refused requests left leases: %+v", leases)
	}
}

func TestForeignLeases(t *testing.T) {
	p := pool(t, "10.1.0.0/24")
	live := Lease{MAC: "02:00:00:00:00:aa", IP: netip.MustParseAddr("10.1.0.7"), Expiry: now.Add(time.Minute)}
	dead := Lease{MAC: "02:00:00:00:00:bb", IP: netip.MustParseAddr("10.1.0.8"), Expiry: now.Add(-time.Minute)}
	if err := p.Load([]Lease{live, dead}, now); err != nil {
		t.Fatal(err)
	}
	if leases, _ := p.Snapshot(); len(leases) != 1 || leases[0] != live {
		t.Errorf("loaded %+v", leases)
	}
	if _, ok := p.ByMAC(live.MAC); ok {
		t.Error("a stranger's lease is served")
	}
	p.Refresh(now.Add(time.Hour))
	if leases, _ := p.Snapshot(); len(leases) != 0 {
		t.Errorf("after expiry: %+v", leases)
	}
	outside := Lease{MAC: "02:00:00:00:00:cc", IP: netip.MustParseAddr("10.2.0.8"), Expiry: now, ID: "v", VM: "v"}
	if err := p.Load([]Lease{outside}, now); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("outside: %v", err)
	}
	if err := p.Load([]Lease{live, live}, now); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("twice: %v", err)
	}
}

func TestExpiryStaysAhead(t *testing.T) {
	p := pool(t, "10.1.0.0/24")
	l := reserve(t, p, "a", "a")
	if want := now.Add(time.Hour).Truncate(time.Second); !l.Expiry.Equal(want) {
		t.Errorf("expiry %s, want %s", l.Expiry, want)
	}
	later := now.Add(45 * time.Minute)
	p.Refresh(later)
	if l, _ := p.ByMAC(l.MAC); !l.Expiry.After(later.Add(50 * time.Minute)) {
		t.Errorf("after refresh it expires at %s", l.Expiry)
	}
	if version := p.Version(); p.Renew(l.MAC, later.Add(time.Minute)) || p.Version() != version {
		t.Error("a guest that asks again at once has the file written again")
	}
	if !p.Renew(l.MAC, later.Add(10*time.Minute)) {
		t.Error("nothing was renewed")
	}
	if l, _ := p.ByMAC(l.MAC); !l.Expiry.Equal(later.Add(70 * time.Minute).Truncate(time.Second)) {
		t.Errorf("after renew it expires at %s", l.Expiry)
	}
}

func TestFileRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "net", "leases.json")
	f, p := NewFile(path), pool(t, "10.1.0.0/24")
	if got, err := f.Read(); err != nil || got != nil {
		t.Errorf("no file: %v, %v", got, err)
	}
	if err := f.Sync(p); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(path); string(b) != "[]\n" {
		t.Errorf("empty file holds %q", b)
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if _, _, err := p.Reserve(Request{ID: vm.ID(fmt.Sprint(i)), Name: fmt.Sprint(i)}, now); err != nil {
				t.Error(err)
			}
			if err := f.Sync(p); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	want, _ := p.Snapshot()
	got, err := NewFile(path).Read()
	if err != nil || len(got) != len(want) {
		t.Fatalf("read %d leases (%v), want %d", len(got), err, len(want))
	}
	for i := range got {
		if d := diff.Of(want[i], got[i]); d != "" {
			t.Errorf("lease %d: %s", i, d)
		}
	}
	fewer := pool(t, "10.1.0.0/24")
	l := reserve(t, fewer, "a", "a")
	fewer.Attach("a", 0, "tap")
	if err := f.Sync(fewer); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Read(); err != nil || len(got) != 1 {
		t.Errorf("another pool of a lower version was not written: %+v (%v)", got, err)
	}
	for _, tap := range []string{"another", "tap", "tap"} {
		if err := f.Release(l.MAC, tap); err != nil {
			t.Fatal(err)
		}
		got, err := f.Read()
		if err != nil || len(got) != map[string]int{"another": 1, "tap": 0}[tap] {
			t.Errorf("after the release of %s: %+v (%v)", tap, got, err)
		}
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Read(); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), path) {
		t.Errorf("broken file: %v", err)
	}
}

// What a File remembers from its last write must never appear in the next one.
func TestFileFollowsChanges(t *testing.T) {
	f, p := NewFile(filepath.Join(t.TempDir(), "leases.json")), pool(t, "10.1.0.0/24")
	l := reserve(t, p, "a", "a")
	for name, change := range map[string]func(){
		"nothing": func() {},
		"a tap":   func() { p.Attach("a", 0, "tap") },
		"a lease": func() { reserve(t, p, "b", "b") },
		"expiry":  func() { p.Renew(l.MAC, now.Add(time.Hour)) },
		"release": func() { p.Release(l.MAC, "tap") },
	} {
		change()
		if err := f.Sync(p); err != nil {
			t.Fatal(err)
		}
		want, _ := p.Snapshot()
		if got, err := f.Read(); err != nil || !slices.Equal(got, want) {
			t.Errorf("after a change of %s: %v, %s", name, err, diff.Of(want, got))
		}
		text, err := os.ReadFile(f.path)
		fresh, ferr := new(formatter).format(want)
		if err != nil || ferr != nil || !bytes.Equal(text, fresh) {
			t.Errorf("after a change of %s the file holds %s (%v), want %s (%v)", name, text, err, fresh, ferr)
		}
	}
}

// BenchmarkFormat formats a thousand leases, one of which is new.
func BenchmarkFormat(b *testing.B) {
	p := pool(b, "10.1.0.0/16")
	for i := range 1000 {
		reserve(b, p, fmt.Sprint(i), fmt.Sprint("vm", i))
	}
	leases, _ := p.Snapshot()
	var f formatter
	for n := 0; b.Loop(); n++ {
		leases[n%len(leases)].Expiry = now.Add(time.Duration(n) * time.Second)
		if _, err := f.format(leases); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`[]`))
	f.Add([]byte(`null`))
	f.Add([]byte(`[{"mac":"02:00:00:00:00:01","ip":"10.88.0.2","expiry":"2030-01-02T03:04:05Z"}]`))
	f.Add([]byte(`[{"mac":"02:00:00:00:00:01","ip":"::1","expiry":"2030-01-02T03:04:05Z","extra":{"a":[1]}}]`))
	f.Add([]byte(`[{"mac":"02:00:00:00:00:01","ip":"10.88.0.2","expiry":"2030-01-02T03:04:05.5+01:00","vm":"a","vm_id":"b","nic":1,"tap":"t"}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		leases, err := Parse(b)
		if err != nil {
			return
		}
		out, err := new(formatter).format(leases)
		if err != nil {
			t.Skip() // JSON cannot represent the year
		}
		again, err := Parse(out)
		if err != nil || len(again) != len(leases) {
			t.Fatalf("%s\nbecame %s: %v", b, out, err)
		}
		_ = pool(t, "10.88.0.0/16").Load(again, now)
	})
}

func TestDeclined(t *testing.T) {
	now := time.Now()
	p := pool(t, "10.1.0.0/29")
	first, _, err := p.Reserve(Request{ID: "1", Name: "web"}, now)
	if err != nil {
		t.Fatal(err)
	}
	p.Attach("1", 0, "tap1")
	p.Decline(first.MAC, now)
	if l, _, err := p.Reserve(Request{ID: "1", Name: "web"}, now); err != nil || l.IP != first.IP {
		t.Errorf("a guest that runs was moved to %s (%v)", l.IP, err)
	}
	p.Detach(first.MAC, "tap1")
	moved, _, err := p.Reserve(Request{ID: "1", Name: "web"}, now)
	if err != nil || moved.IP == first.IP || moved.MAC != first.MAC {
		t.Errorf("started anew it got %s %s, in quarantine is %s (%v)", moved.MAC, moved.IP, first.IP, err)
	}
	seen := map[netip.Addr]bool{moved.IP: true}
	for i := range 4 {
		l, _, err := p.Reserve(Request{ID: vm.ID(fmt.Sprint("n", i)), Name: fmt.Sprint("n", i)}, now)
		if err != nil || seen[l.IP] || (l.IP == first.IP) != (i == 3) {
			t.Errorf("VM %d got %s (%v): the address in quarantine comes last", i, l.IP, err)
		}
		seen[l.IP] = true
	}
	p.Refresh(now.Add(Quarantine))
	if len(p.declined) != 0 {
		t.Error("the quarantine does not end")
	}
}

// TestFileIsNotWrittenAgain checks that a starting daemon does not write an unchanged file: on a full disk it could not.
func TestFileIsNotWrittenAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases.json")
	p := pool(t, "10.1.0.0/24")
	reserve(t, p, "a", "a")
	if err := NewFile(path).Sync(p); err != nil {
		t.Fatal(err)
	}
	was, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	next := NewFile(path)
	if err := next.Sync(p); err != nil {
		t.Fatal(err)
	}
	if now, err := os.Stat(path); err != nil || !os.SameFile(was, now) {
		t.Errorf("it is another file, %v", err)
	}
	reserve(t, p, "b", "b")
	if err := next.Sync(p); err != nil {
		t.Fatal(err)
	}
	if got, err := NewFile(path).Read(); err != nil || len(got) != 2 {
		t.Errorf("it has %+v, %v", got, err)
	}
}
