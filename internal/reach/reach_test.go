package reach

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestKinds(t *testing.T) {
	for addr, want := range map[string]Kind{
		"127.0.0.1": Loopback, "127.9.9.9": Loopback, "::1": Loopback, "0.0.0.0": Nobody, "0.1.2.3": Nobody, "::": Nobody,
		"::ffff:127.0.0.1": Loopback, "64:ff9b::7f00:1": Loopback, "2002:7f00:1::": Loopback, "::ffff:0.0.0.0": Nobody,
		"169.254.1.1": LinkLocal, "fe80::1": LinkLocal, "fe80::1%lo": LinkLocal, "169.254.169.254": Metadata, "::ffff:169.254.169.254": Metadata,
		"64:ff9b::a9fe:a9fe": Metadata, "fd00:ec2::254": Metadata, "100.100.100.200": Metadata, "168.63.129.16": Metadata, "192.0.0.192": Metadata,
		"224.0.0.1": Many, "255.255.255.255": Many, "::ffff:255.255.255.255": Many, "ff02::1": Many, "240.0.0.1": Reserved, "192.0.0.1": Reserved, "100::1": Reserved, "fec0::1": Reserved,
		"10.1.2.3": Private, "172.16.0.1": Private, "172.31.255.255": Private, "192.168.0.1": Private, "100.64.0.1": Private,
		"fd12::1": Private, "64:ff9b::a00:1": Private, "64:ff9b:1::1": Private,
		"172.32.0.1": Public, "8.8.8.8": Public, "1.1.1.1": Public, "2001:4860:4860::8888": Public, "100.128.0.1": Public, "64:ff9b::808:808": Public,
	} {
		if got := KindOf(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s is %s, want %s", addr, got, want)
		}
	}
	if got := KindOf(netip.Addr{}); got != Nobody {
		t.Errorf("no address is %s", got)
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all { // of this machine: none is allowed
		mine, _ := netip.AddrFromSlice(a.(*net.IPNet).IP)
		if err := (Policy{}).check(netip.AddrPortFrom(mine.Unmap(), 80).String()); err == nil {
			t.Errorf("%s of this machine is open", mine)
		}
	}
}

func TestPolicies(t *testing.T) {
	open, err := Policy{}.Open([]string{"10.1.0.0/16", "192.168.7.7", "::1", "files.lan", "Other.LAN:8080"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		p    Policy
		addr string
		ok   bool
	}{
		{Policy{}, "8.8.8.8:80", true},
		{Policy{}, "10.1.2.3:80", false},
		{Policy{}, "[fe80::1%lo]:80", false},
		{Policy{}, "nonsense", false},
		{Policy{Private: true}, "10.1.2.3:80", true},
		{Policy{Private: true}, "127.0.0.1:80", false},
		{Policy{Private: true}, "169.254.169.254:80", false},
		{open, "10.1.2.3:80", true},
		{open, "10.2.2.3:80", false},
		{open, "192.168.7.7:1", true},
		{open, "192.168.7.8:1", false},
		{open, "[::1]:80", true},
	} {
		if err := c.p.check(c.addr); (err == nil) != c.ok {
			t.Errorf("%+v: %s: %v", c.p, c.addr, err)
		}
	}
	for addr, want := range map[string]bool{"files.lan:80": true, "FILES.lan:443": true, "other.lan:8080": true, "other.lan:80": false, "x.files.lan:80": false} {
		if open.named(addr) != want {
			t.Errorf("%s: %v", addr, !want)
		}
	}
	for _, bad := range []string{"", "10.1.2.3/16", "http://x", "a b", "*.lan", "fe80::1%lo", "1:2:3"} {
		if _, err := (Policy{}).Open([]string{bad}); !errdefs.IsInvalid(err) {
			t.Errorf("%q is taken: %v", bad, err)
		}
	}
}

func get(t *testing.T, p Policy, proxy, target string) error {
	t.Helper()
	tr := &http.Transport{}
	if proxy != "" {
		u, err := url.Parse(proxy)
		if err != nil {
			t.Fatal(err)
		}
		tr.Proxy = http.ProxyURL(u)
	}
	p.Guard(tr, &net.Dialer{})
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, target, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := (&http.Client{Transport: tr}).Do(req)
	if err == nil {
		res.Body.Close()
	}
	return err
}

// The address decides, whatever name or redirect leads to it.
func TestGuard(t *testing.T) {
	inside := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(inside.Close)
	at, err := url.Parse(inside.URL)
	if err != nil {
		t.Fatal(err)
	}
	refused := Policy{Setting: "images.allow"}
	for _, host := range []string{"127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0"} {
		err := get(t, refused, "", "http://"+host+":"+at.Port()+"/")
		if err == nil || strings.Contains(host, "ocalhost") && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "images.allow")) {
			t.Errorf("%s is reached: %v", host, err)
		}
	}
	for _, open := range [][]string{{"127.0.0.0/8", "::1"}, {"localhost"}, {"localhost:" + at.Port()}} {
		p, err := refused.Open(open)
		if err != nil {
			t.Fatal(err)
		}
		if err := get(t, p, "", "http://localhost:"+at.Port()+"/"); err != nil {
			t.Errorf("%v: %v", open, err)
		}
	}
	p, err := refused.Open([]string{"files.lan", "localhost:1"})
	if err != nil {
		t.Fatal(err)
	}
	if err := get(t, p, "", inside.URL); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("another host is open: %v", err)
	}

	// The target of an allowed server's redirect is checked on its own.
	from := httptest.NewServer(http.RedirectHandler(strings.Replace(inside.URL, "127.0.0.1", "localhost", 1), http.StatusFound))
	t.Cleanup(from.Close)
	named, err := refused.Open([]string{strings.TrimPrefix(from.URL, "http://")})
	if err != nil {
		t.Fatal(err)
	}
	if err := get(t, named, "", from.URL); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a redirect is followed: %v", err)
	}

	// A proxy is the operator's and is allowed.
	if err := get(t, refused, inside.URL, "http://example.invalid/"); err != nil {
		t.Errorf("by the proxy: %v", err)
	}
	var d net.Dialer
	if c, err := d.DialContext(context.Background(), "tcp", at.Host); err != nil { // Guard does not change the dialer itself
		t.Error(err)
	} else {
		c.Close()
	}
}
