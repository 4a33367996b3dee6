// Package resolver answers the DNS questions of guests: by a zone of our own for their names, and by other resolvers for the rest of
// the world.
//
// It serves one link and the addresses behind it, and nobody else, so it is no open resolver. It keeps no answers: the resolvers that it
// asks do. It knows no workloads and changes no links.
package resolver

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// Bounds of what guests can make the host do.
const (
	maxQuestions  = 512             // that are being answered, of all guests
	maxOfGuest    = 64              // of one guest
	maxConns      = 128             // TCP connections
	maxConnsGuest = 16              // of one guest
	maxUDP        = 1232            // bytes of a message over UDP, which pass every link in one piece
	serverTime    = 2 * time.Second // for one resolver to answer
	questionTime  = 6 * time.Second // for all of them
)

// TTL is how long guests keep the address of a name of ours.
const TTL = 5 * time.Second

// Zone has the names of guests. Safe for concurrent use.
type Zone interface {
	// Addresses returns the addresses of the guest with that name, a single label in lower case; known is false if there is none.
	Addresses(label string) (addrs []netip.Addr, known bool)
	// Name returns the name of the guest with an address; "" if there is none.
	Name(a netip.Addr) (label string)
}

// Config says who is served, and how.
type Config struct {
	Domain string         // of our names, such as capsule.internal, which are never asked elsewhere
	Guests []netip.Prefix // only these are answered; their reverse names are ours, too
	// Zone returns the names, nil as long as nobody knows them.
	Zone func() Zone
	// Servers returns the resolvers to ask for other names, best first.
	Servers func() []netip.AddrPort
	// Answered is told what became of each question: own, forwarded, failed or refused.
	Answered func(result string)
}

// The results of questions.
const (
	Own       = "own"
	Forwarded = "forwarded"
	Failed    = "failed"
	Refused   = "refused"
)

// Resolver answers questions.
type Resolver struct {
	cfg    Config
	domain string // fully qualified

	mu     sync.Mutex
	asking map[netip.Addr]int
	total  int
	last   netip.AddrPort // the server that answered last
}

// New returns a resolver. It serves nothing yet.
func New(cfg Config) *Resolver {
	return &Resolver{cfg: cfg, domain: dns.CanonicalName(cfg.Domain), asking: map[netip.Addr]int{}}
}

// begin counts a question of a guest in, unless there are too many.
func (r *Resolver) begin(guest netip.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.total >= maxQuestions || r.asking[guest] >= maxOfGuest {
		return false
	}
	r.total++
	r.asking[guest]++
	return true
}

func (r *Resolver) end(guest netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total--
	if r.asking[guest]--; r.asking[guest] <= 0 {
		delete(r.asking, guest)
	}
}

// ServeDNS implements dns.Handler. Whoever is no guest gets no answer.
func (r *Resolver) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	guest, ok := sender(w.RemoteAddr())
	if !ok || !r.serves(guest) {
		return
	}
	if !r.begin(guest) {
		r.cfg.Answered(Refused)
		return // it asks again
	}
	defer r.end(guest)
	ctx, cancel := context.WithTimeout(context.Background(), questionTime)
	defer cancel()
	answer, result := r.Answer(ctx, q)
	r.cfg.Answered(result)
	limit := dns.MaxMsgSize
	if _, udp := w.RemoteAddr().(*net.UDPAddr); udp {
		limit = dns.MinMsgSize
		if o := q.IsEdns0(); o != nil {
			limit = min(max(int(o.UDPSize()), dns.MinMsgSize), maxUDP)
		}
	}
	answer.Truncate(limit)
	_ = w.WriteMsg(answer) // the guest asks again
}

func sender(a net.Addr) (netip.Addr, bool) {
	switch a := a.(type) {
	case *net.UDPAddr:
		p := a.AddrPort()
		return p.Addr().Unmap(), true
	case *net.TCPAddr:
		p := a.AddrPort()
		return p.Addr().Unmap(), true
	}
	return netip.Addr{}, false
}

func (r *Resolver) serves(a netip.Addr) bool {
	for _, p := range r.cfg.Guests {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// Answer answers one message, and says what became of it. It never fails: an answer may say that there is none.
func (r *Resolver) Answer(ctx context.Context, q *dns.Msg) (*dns.Msg, string) {
	switch {
	case q.Response || q.Opcode != dns.OpcodeQuery:
		return code(q, dns.RcodeNotImplemented), Refused
	case len(q.Question) != 1:
		return code(q, dns.RcodeFormatError), Refused
	}
	ask := q.Question[0]
	switch {
	case ask.Qclass != dns.ClassINET, ask.Qtype == dns.TypeAXFR, ask.Qtype == dns.TypeIXFR, ask.Qtype == dns.TypeANY:
		return code(q, dns.RcodeRefused), Refused
	}
	name := dns.CanonicalName(ask.Name)
	if a, own := r.reverse(name); own {
		return r.pointer(q, a)
	}
	label, own := r.own(name, ask.Qtype)
	if own {
		return r.address(q, label)
	}
	answer, ok := r.forward(ctx, q)
	if !ok {
		return code(q, dns.RcodeServerFailure), Failed
	}
	return answer, Forwarded
}

// own returns the label of a name of ours, "" for the domain itself and what is deeper than a guest. A name of one label is ours, because
// it means nothing elsewhere, except for the records of top-level domains.
func (r *Resolver) own(name string, kind uint16) (label string, own bool) {
	if name == r.domain {
		return "", true
	}
	if label, inside := strings.CutSuffix(name, "."+r.domain); inside {
		if strings.Contains(label, ".") {
			return "", true
		}
		return label, true
	}
	label = strings.TrimSuffix(name, ".")
	return label, label != "" && !strings.Contains(label, ".") && (kind == dns.TypeA || kind == dns.TypeAAAA)
}

// address answers a question about a guest.
func (r *Resolver) address(q *dns.Msg, label string) (*dns.Msg, string) {
	z := r.cfg.Zone()
	if z == nil {
		return code(q, dns.RcodeServerFailure), Failed
	}
	addrs, known := []netip.Addr(nil), dns.CanonicalName(q.Question[0].Name) == r.domain
	if label != "" {
		addrs, known = z.Addresses(label)
	}
	if !known {
		return r.nothing(q, dns.RcodeNameError), Own
	}
	m := code(q, dns.RcodeSuccess)
	m.Authoritative = true
	head := dns.RR_Header{Name: q.Question[0].Name, Class: dns.ClassINET, Ttl: uint32(TTL / time.Second), Rrtype: q.Question[0].Qtype}
	for _, a := range addrs {
		switch {
		case a.Is4() && head.Rrtype == dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{Hdr: head, A: a.AsSlice()})
		case a.Is6() && head.Rrtype == dns.TypeAAAA:
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: head, AAAA: a.AsSlice()})
		}
	}
	if len(m.Answer) == 0 {
		return r.nothing(q, dns.RcodeSuccess), Own
	}
	return m, Own
}

// reverse returns the address that a name of the reverse tree is about, and whether it is one of guests.
func (r *Resolver) reverse(name string) (netip.Addr, bool) {
	a, ok := addressOf(name)
	return a, ok && r.serves(a)
}

// pointer answers a question about the name of an address.
func (r *Resolver) pointer(q *dns.Msg, a netip.Addr) (*dns.Msg, string) {
	z := r.cfg.Zone()
	if z == nil {
		return code(q, dns.RcodeServerFailure), Failed
	}
	label := z.Name(a)
	switch {
	case label == "":
		return r.nothing(q, dns.RcodeNameError), Own
	case q.Question[0].Qtype != dns.TypePTR:
		return r.nothing(q, dns.RcodeSuccess), Own
	}
	m := code(q, dns.RcodeSuccess)
	m.Authoritative = true
	m.Answer = []dns.RR{&dns.PTR{
		Hdr: dns.RR_Header{Name: q.Question[0].Name, Class: dns.ClassINET, Ttl: uint32(TTL / time.Second), Rrtype: dns.TypePTR}, Ptr: label + "." + r.domain,
	}}
	return m, Own
}

// nothing says that there is no such name or record, and for how long guests may believe it.
func (r *Resolver) nothing(q *dns.Msg, rcode int) *dns.Msg {
	m := code(q, rcode)
	m.Authoritative = true
	ttl := uint32(TTL / time.Second)
	m.Ns = []dns.RR{&dns.SOA{
		Hdr: dns.RR_Header{Name: r.domain, Class: dns.ClassINET, Ttl: ttl, Rrtype: dns.TypeSOA},
		Ns:  r.domain, Mbox: "nobody." + r.domain, Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: ttl,
	}}
	return m
}

// code returns an answer without records.
func code(q *dns.Msg, rcode int) *dns.Msg {
	m := new(dns.Msg)
	m.SetRcode(q, rcode)
	m.RecursionAvailable = true
	if o := q.IsEdns0(); o != nil {
		m.SetEdns0(maxUDP, o.Do())
	}
	return m
}
