package resolver

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// zone has the guest web.
type zone struct{}

func (zone) Addresses(label string) ([]netip.Addr, bool) {
	if label != "web" {
		return nil, false
	}
	return []netip.Addr{netip.MustParseAddr("10.88.7.2")}, true
}

func (zone) Name(a netip.Addr) string {
	if a == netip.MustParseAddr("10.88.7.2") {
		return "web"
	}
	return ""
}

// world is a resolver of the world: it answers A with 192.0.2.1, and for long.example with more than fits into a datagram.
func world(t *testing.T, answers bool) netip.AddrPort {
	t.Helper()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", udp.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		if !answers {
			_ = w.WriteMsg(new(dns.Msg).SetRcode(q, dns.RcodeServerFailure))
			return
		}
		m := new(dns.Msg).SetReply(q)
		n := 1
		if strings.HasPrefix(q.Question[0].Name, "long.") {
			n = 200
		}
		for i := range n {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(192, 0, 2, byte(i+1))})
		}
		if _, isUDP := w.RemoteAddr().(*net.UDPAddr); isUDP {
			m.Truncate(maxUDP)
		}
		_ = w.WriteMsg(m)
	})
	for _, s := range []*dns.Server{{PacketConn: udp, Handler: handler}, {Listener: tcp, Handler: handler}} {
		go func() { _ = s.ActivateAndServe() }()
	}
	t.Cleanup(func() { udp.Close(); tcp.Close() })
	return udp.LocalAddr().(*net.UDPAddr).AddrPort()
}

func newResolver(guests string, servers ...netip.AddrPort) *Resolver {
	return New(Config{
		Domain: "capsule.internal", Guests: []netip.Prefix{netip.MustParsePrefix(guests)}, Zone: func() Zone { return zone{} },
		Servers: func() []netip.AddrPort { return servers }, Answered: func(string) {},
	})
}

func TestAnswer(t *testing.T) {
	r := newResolver("10.88.7.0/24", world(t, false), world(t, true))
	for _, tc := range []struct {
		name   string
		kind   uint16
		rcode  int
		answer string
		result string
	}{
		{"web.", dns.TypeA, dns.RcodeSuccess, "10.88.7.2", Own},
		{"WEB.Capsule.Internal.", dns.TypeA, dns.RcodeSuccess, "10.88.7.2", Own},
		{"web.capsule.internal.", dns.TypeAAAA, dns.RcodeSuccess, "", Own},
		{"web.capsule.internal.", dns.TypeMX, dns.RcodeSuccess, "", Own},
		{"other.capsule.internal.", dns.TypeA, dns.RcodeNameError, "", Own},
		{"a.web.capsule.internal.", dns.TypeA, dns.RcodeNameError, "", Own},
		{"capsule.internal.", dns.TypeA, dns.RcodeSuccess, "", Own},
		{"other.", dns.TypeA, dns.RcodeNameError, "", Own},
		{"2.7.88.10.in-addr.arpa.", dns.TypePTR, dns.RcodeSuccess, "web.capsule.internal.", Own},
		{"9.7.88.10.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, "", Own},
		{"example.com.", dns.TypeA, dns.RcodeSuccess, "192.0.2.1", Forwarded}, // the first server fails
		{"1.2.0.192.in-addr.arpa.", dns.TypeA, dns.RcodeSuccess, "192.0.2.1", Forwarded},
		{"com.", dns.TypeNS, dns.RcodeSuccess, "192.0.2.1", Forwarded},
		{"example.com.", dns.TypeAXFR, dns.RcodeRefused, "", Refused},
		{"example.com.", dns.TypeANY, dns.RcodeRefused, "", Refused},
	} {
		q := new(dns.Msg).SetQuestion(tc.name, tc.kind)
		m, result := r.Answer(t.Context(), q)
		var got string
		if len(m.Answer) > 0 {
			got = strings.Fields(m.Answer[0].String())[4]
		}
		if m.Rcode != tc.rcode || got != tc.answer || result != tc.result || m.Id != q.Id || !m.Response {
			t.Errorf("%s %s: %s %q %s, want %s %q %s\n%v", dns.TypeToString[tc.kind], tc.name, dns.RcodeToString[m.Rcode], got, result, dns.RcodeToString[tc.rcode], tc.answer, tc.result, m)
		}
	}
	nobody := newResolver("10.88.7.0/24", world(t, false))
	if m, result := nobody.Answer(t.Context(), new(dns.Msg).SetQuestion("example.com.", dns.TypeA)); m.Rcode != dns.RcodeServerFailure || result != Failed {
		t.Errorf("without a server that answers: %v, %s", m, result)
	}
	early := newResolver("10.88.7.0/24")
	early.cfg.Zone = func() Zone { return nil }
	if m, _ := early.Answer(t.Context(), new(dns.Msg).SetQuestion("web.", dns.TypeA)); m.Rcode != dns.RcodeServerFailure {
		t.Errorf("before the names are known: %v", m)
	}
}

// Guests are answered by UDP and TCP; nobody else is, even on the same link.
func TestServe(t *testing.T) {
	need.Root(t)
	for guests, served := range map[string]bool{"127.0.0.0/8": true, "10.88.7.0/24": false} {
		r := newResolver(guests, world(t, true))
		var on *Sockets
		for on == nil { // the port of UDP may be taken for TCP
			probe, err := net.ListenPacket("udp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			at := probe.LocalAddr().(*net.UDPAddr).AddrPort()
			probe.Close()
			if on, err = Listen(t.Context(), "lo", []netip.AddrPort{at}); err != nil {
				t.Log(err)
			}
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Serve(ctx, on) }()
		for _, network := range []string{"udp", "tcp"} {
			for _, name := range []string{"web.capsule.internal.", "long.example."} {
				c := dns.Client{Net: network, Timeout: time.Minute}
				if !served {
					c.Timeout = 50 * time.Millisecond
				}
				m, _, err := c.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), on.Addr().String())
				if !served {
					if err == nil {
						t.Errorf("%s %s for a stranger: %v", network, name, m)
					}
					continue
				}
				want := "1 false"
				switch {
				case name == "long.example." && network == "tcp":
					want = "200 false"
				case name == "long.example.":
					want = fmt.Sprintf("%d true", len(m.Answer))
				}
				if err != nil || fmt.Sprint(len(m.Answer), m.Truncated) != want {
					t.Errorf("%s %s: %v, %v, want %s", network, name, m, err, want)
				}
			}
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// One guest cannot use up what is for all.
func TestBounds(t *testing.T) {
	r := newResolver("10.0.0.0/8")
	greedy, modest := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for i := range maxOfGuest {
		if !r.begin(greedy) {
			t.Fatalf("question %d of %d is refused", i, maxOfGuest)
		}
	}
	if r.begin(greedy) || !r.begin(modest) {
		t.Error("one guest has more than its share, or another none")
	}
	r.end(greedy)
	if !r.begin(greedy) {
		t.Error("a question that was answered still counts")
	}
	b := &bounded{of: map[netip.Addr]int{}}
	for range maxConnsGuest {
		b.add(greedy)
	}
	if b.add(greedy) || !b.add(modest) {
		t.Error("one guest has more connections than its share, or another none")
	}
	b.remove(greedy)
	b.remove(modest)
	if !b.add(greedy) || len(b.of) != 1 {
		t.Errorf("connections %v", b.of)
	}
}

func TestAddressOf(t *testing.T) {
	for name, want := range map[string]string{
		"2.7.88.10.in-addr.arpa.":   "10.88.7.2",
		"7.88.10.in-addr.arpa.":     "",
		"256.7.88.10.in-addr.arpa.": "",
		"example.com.":              "",
		"1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa.": "2001:db8::1",
		"1.0.ip6.arpa.": "",
	} {
		a, ok := addressOf(name)
		if got := a.String(); ok != (want != "") || ok && got != want {
			t.Errorf("%s: %s, %v, want %q", name, got, ok, want)
		}
	}
}

// FuzzQuestion: whatever message a guest sends, the answer is one that can be sent, for the same question, and asks no server about our
// names.
func FuzzQuestion(f *testing.F) {
	for _, name := range []string{"web.", "web.capsule.internal.", "2.7.88.10.in-addr.arpa.", "example.com."} {
		b, err := new(dns.Msg).SetQuestion(name, dns.TypeA).SetEdns0(4096, true).Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		q := new(dns.Msg)
		if q.Unpack(b) != nil {
			return
		}
		r := newResolver("10.88.7.0/24")
		r.cfg.Servers = func() []netip.AddrPort {
			if name := dns.CanonicalName(q.Question[0].Name); name == "capsule.internal." || strings.HasSuffix(name, ".capsule.internal.") || strings.HasSuffix(name, ".7.88.10.in-addr.arpa.") && strings.Count(name, ".") == 6 {
				if _, ok := addressOf(name); ok || strings.HasSuffix(name, "internal.") {
					t.Errorf("a server is asked for %q", name)
				}
			}
			return nil
		}
		m, _ := r.Answer(t.Context(), q)
		m.Truncate(dns.MinMsgSize)
		if _, err := m.Pack(); err != nil || m.Id != q.Id || !m.Response || m.Rcode > dns.RcodeRefused {
			t.Errorf("%v\nis answered %v: %v", q, m, err)
		}
	})
}

// Sockets that cannot be bound to their link are not opened: they would answer everybody.
func TestListenNeedsTheLink(t *testing.T) {
	s, err := Listen(t.Context(), "no-such-link", []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")})
	if err == nil {
		s.Close()
		t.Fatal("it listens on all links")
	}
}
