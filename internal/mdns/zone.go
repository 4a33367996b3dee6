package mdns

import (
	"cmp"
	"net"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
)

const (
	ttlHost   = 120  // seconds, of records with an address or a host name
	ttlOther  = 4500 // seconds
	ttlLegacy = 10   // seconds, in an answer to a client that is no multicast one

	topBit = 1 << 15 // of a class: in a question, an answer to the asker alone is enough; in an answer, the only one
)

// zone is the records of one appliance on one interface.
type zone struct {
	label string // of the instance
	host  string // whole name of the addresses
	Announcement
	addrs []netip.Addr
}

// newZone returns the records of a. After a conflict with another machine their names end in a part of the UUID.
func newZone(a Announcement, conflict bool, addrs []netip.Addr) zone {
	suffix := ""
	if conflict {
		suffix = "-" + a.CapsuleID[:min(8, len(a.CapsuleID))]
	}
	return zone{label: cmp.Or(a.Hostname, a.ShortID) + suffix, host: a.ShortID + suffix + ".local.", Announcement: a, addrs: addrs}
}

func header(name string, kind uint16, ttl uint32, unique bool) dns.RR_Header {
	class := uint16(dns.ClassINET)
	if unique {
		class |= topBit
	}
	return dns.RR_Header{Name: name, Rrtype: kind, Class: class, Ttl: ttl}
}

func (z zone) ptr() dns.RR {
	return &dns.PTR{Hdr: header(Service, dns.TypePTR, ttlOther, false), Ptr: instanceName(z.label)}
}

// instance returns the records of the instance of one type, or of all.
func (z zone) instance(kind uint16) (rrs []dns.RR) {
	name := instanceName(z.label)
	if kind == dns.TypeSRV || kind == dns.TypeANY {
		rrs = append(rrs, &dns.SRV{Hdr: header(name, dns.TypeSRV, ttlHost, true), Port: z.Port, Target: z.host})
	}
	if kind == dns.TypeTXT || kind == dns.TypeANY {
		rrs = append(rrs, &dns.TXT{Hdr: header(name, dns.TypeTXT, ttlOther, true), Txt: escaped(z.text())})
	}
	return rrs
}

// escaped prepares strings for the library, which reads \ as the begin of an escape.
func escaped(text []string) []string {
	for i, s := range text {
		text[i] = strings.ReplaceAll(s, `\`, `\\`)
	}
	return text
}

func (z zone) addresses(kind uint16) (rrs []dns.RR) {
	for _, a := range z.addrs {
		switch {
		case a.Is4() && (kind == dns.TypeA || kind == dns.TypeANY):
			rrs = append(rrs, &dns.A{Hdr: header(z.host, dns.TypeA, ttlHost, true), A: net.IP(a.AsSlice())})
		case a.Is6() && (kind == dns.TypeAAAA || kind == dns.TypeANY):
			rrs = append(rrs, &dns.AAAA{Hdr: header(z.host, dns.TypeAAAA, ttlHost, true), AAAA: net.IP(a.AsSlice())})
		}
	}
	return rrs
}

// all returns an announcement of everything.
func (z zone) all() *dns.Msg {
	m := response()
	m.Answer = append([]dns.RR{z.ptr()}, z.instance(dns.TypeANY)...)
	m.Answer = append(m.Answer, z.addresses(dns.TypeANY)...)
	return m
}

// goodbye returns an announcement that the instance ends.
func (z zone) goodbye() *dns.Msg {
	m := z.all()
	for _, rr := range m.Answer {
		rr.Header().Ttl = 0
	}
	return m
}

func response() *dns.Msg {
	return &dns.Msg{MsgHdr: dns.MsgHdr{Response: true, Authoritative: true}, Compress: true}
}

// answer returns the answer to the questions in q, nil if there is none, and whether it is for the asker alone. legacy is a
// client that does not speak from the port of multicast DNS.
func (z zone) answer(q *dns.Msg, legacy bool) (m *dns.Msg, unicast bool) {
	m, unicast = response(), true
	for _, question := range q.Question[:min(len(q.Question), maxStrings)] {
		answers, extra := z.about(question)
		if !legacy {
			answers = unknown(answers, q.Answer)
		}
		if len(answers) == 0 {
			continue
		}
		m.Answer = append(m.Answer, answers...)
		m.Extra = append(m.Extra, extra...)
		unicast = unicast && question.Qclass&topBit != 0
	}
	if len(m.Answer) == 0 {
		return nil, false
	}
	if legacy {
		m.Id, m.Question, unicast = q.Id, q.Question, true
		for _, rr := range append(m.Answer, m.Extra...) {
			rr.Header().Class &^= topBit
			rr.Header().Ttl = min(rr.Header().Ttl, ttlLegacy)
		}
	}
	return m, unicast
}

// about returns the records that answer a question, and those that will be asked for next.
func (z zone) about(q dns.Question) (answers, extra []dns.RR) {
	if class := q.Qclass &^ topBit; class != dns.ClassINET && class != dns.ClassANY {
		return nil, nil
	}
	pointer := q.Qtype == dns.TypePTR || q.Qtype == dns.TypeANY
	switch {
	case strings.EqualFold(q.Name, Service) && pointer:
		return []dns.RR{z.ptr()}, append(z.instance(dns.TypeANY), z.addresses(dns.TypeANY)...)
	case strings.EqualFold(q.Name, servicesQuery) && pointer:
		return []dns.RR{&dns.PTR{Hdr: header(servicesQuery, dns.TypePTR, ttlOther, false), Ptr: Service}}, nil
	case strings.EqualFold(q.Name, instanceName(z.label)):
		return z.instance(q.Qtype), z.addresses(dns.TypeANY)
	case strings.EqualFold(q.Name, z.host):
		return z.addresses(q.Qtype), nil
	}
	return nil, nil
}

// unknown returns the answers that are not among those that the asker knows for at least half of their time.
func unknown(answers, known []dns.RR) (rest []dns.RR) {
	for _, a := range answers {
		has := false
		for _, k := range known[:min(len(known), maxStrings)] {
			has = has || k.Header().Ttl >= a.Header().Ttl/2 && dns.IsDuplicate(withoutTop(a), withoutTop(k))
		}
		if !has {
			rest = append(rest, a)
		}
	}
	return rest
}

func withoutTop(rr dns.RR) dns.RR {
	rr = dns.Copy(rr)
	rr.Header().Class &^= topBit
	return rr
}

// contradicts reports whether a message of another machine claims our names for itself.
func (z zone) contradicts(m *dns.Msg) bool {
	for _, rr := range append(m.Answer, m.Extra...) {
		if rr.Header().Ttl == 0 {
			continue
		}
		if srv, ok := rr.(*dns.SRV); ok && strings.EqualFold(srv.Hdr.Name, instanceName(z.label)) && (!strings.EqualFold(srv.Target, z.host) || srv.Port != z.Port) {
			return true
		}
		if txt, ok := rr.(*dns.TXT); ok && strings.EqualFold(txt.Hdr.Name, instanceName(z.label)) {
			var e Entry
			if e.read(txt.Txt); e.CapsuleID != z.CapsuleID {
				return true
			}
		}
	}
	return false
}
