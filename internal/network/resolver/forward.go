package resolver

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// forward asks the servers in turn, the one first that answered last. ok is false if none answers.
//
// Nothing of the guest's message reaches them but its question, and whether it wants DNSSEC's records.
func (r *Resolver) forward(ctx context.Context, q *dns.Msg) (answer *dns.Msg, ok bool) {
	ask := new(dns.Msg)
	ask.SetQuestion(q.Question[0].Name, q.Question[0].Qtype) // with an id of its own
	ask.CheckingDisabled = q.CheckingDisabled
	edns := q.IsEdns0()
	ask.SetEdns0(maxUDP, edns != nil && edns.Do())
	for _, server := range r.servers() {
		a, err := exchange(ctx, ask, server)
		if err != nil || a.Rcode == dns.RcodeServerFailure || a.Rcode == dns.RcodeRefused || a.Rcode == dns.RcodeNotImplemented {
			if ctx.Err() != nil {
				return nil, false
			}
			continue
		}
		r.mu.Lock()
		r.last = server
		r.mu.Unlock()
		return reply(q, a), true
	}
	return nil, false
}

// servers returns the servers, the one first that answered last.
func (r *Resolver) servers() []netip.AddrPort {
	all := slices.Clone(r.cfg.Servers())
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(all, r.last); i > 0 {
		all[0], all[i] = all[i], all[0]
	}
	return all
}

// exchange asks one server, each time from another port.
func exchange(ctx context.Context, ask *dns.Msg, server netip.AddrPort) (*dns.Msg, error) {
	c := &dns.Client{Net: "udp", UDPSize: maxUDP, Timeout: serverTime}
	a, _, err := c.ExchangeContext(ctx, ask, server.String())
	if err == nil && a.Truncated {
		c.Net = "tcp"
		a, _, err = c.ExchangeContext(ctx, ask, server.String())
	}
	switch {
	case err != nil:
		return nil, err
	case !a.Response || len(a.Question) != 1 || !strings.EqualFold(a.Question[0].Name, ask.Question[0].Name) || a.Question[0].Qtype != ask.Question[0].Qtype:
		return nil, dns.ErrId // it answers another question
	}
	return a, nil
}

// reply is the answer of a server as an answer to q.
func reply(q, a *dns.Msg) *dns.Msg {
	m := code(q, a.Rcode)
	m.AuthenticatedData = a.AuthenticatedData
	m.Answer, m.Ns = a.Answer, a.Ns
	for _, rr := range a.Extra {
		if rr.Header().Rrtype != dns.TypeOPT { // that of a connection, not of the name
			m.Extra = append(m.Extra, rr)
		}
	}
	return m
}
