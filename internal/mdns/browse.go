package mdns

import (
	"cmp"
	"context"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	maxFound = 256 // appliances, and host names
	maxAddrs = 16  // of one host name
)

// askAt is when the question is put, after the begin.
var askAt = []time.Duration{0, time.Second, 3 * time.Second, 9 * time.Second}

// Browse asks for appliances on the interfaces with these names, on all without names, and returns what has answered after timeout,
// or when ctx ends, by name. Errors: Unavailable without a network.
func Browse(ctx context.Context, timeout time.Duration, ifaces []string) ([]Entry, error) {
	chosen, err := interfaces(ifaces, nil)
	if err != nil {
		return nil, err
	}
	sockets, err := open(chosen)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	f := &found{hosts: map[string][]netip.Addr{}, instances: map[string]*instance{}}
	var wg sync.WaitGroup
	for _, s := range sockets {
		wg.Go(func() { f.listen(s) })
	}
	begin := time.Now()
	for _, at := range askAt {
		if at >= timeout {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(at - time.Since(begin)):
			f.ask(sockets)
		}
	}
	<-ctx.Done()
	for _, s := range sockets {
		_ = s.close()
	}
	wg.Wait()
	return f.entries(), nil
}

// found is what has answered so far.
type found struct {
	mu        sync.Mutex
	instances map[string]*instance    // by whole name in lower case
	hosts     map[string][]netip.Addr // by whole name in lower case
}

type instance struct {
	label, name string // name as it was received
	host        string
	port        uint16
	text        []string // nil: unknown
}

// ask asks for all appliances, and for what is missing of those that are known.
func (f *found) ask(sockets []*socket) {
	missing := &dns.Msg{}
	f.mu.Lock()
	for _, i := range f.instances {
		switch {
		case len(missing.Question) >= maxStrings: // the next time
		case i.host == "" || i.text == nil:
			missing.Question = append(missing.Question, dns.Question{Name: i.name, Qtype: dns.TypeANY, Qclass: dns.ClassINET})
		case len(f.hosts[i.host]) == 0:
			missing.Question = append(missing.Question, dns.Question{Name: i.host, Qtype: dns.TypeANY, Qclass: dns.ClassINET})
		}
	}
	f.mu.Unlock()
	for _, q := range []*dns.Msg{{Question: []dns.Question{{Name: Service, Qtype: dns.TypePTR, Qclass: dns.ClassINET}}}, missing} {
		data, err := q.Pack()
		if err != nil || len(q.Question) == 0 {
			continue // nothing is missing, or names of somebody's that cannot be asked for
		}
		for _, s := range sockets {
			for _, iface := range s.joined {
				_ = s.send(data, iface, nil) // another interface, or the other version of IP, may do
			}
		}
	}
}

// listen reads answers until the socket is closed.
func (f *found) listen(s *socket) {
	buf := make([]byte, maxPacket)
	for {
		p, err := s.read(buf)
		if err != nil { // closed by Browse
			return
		}
		m := new(dns.Msg)
		if m.Unpack(p.data) == nil && m.Response && m.Opcode == dns.OpcodeQuery && m.Rcode == dns.RcodeSuccess && p.from.Port == port {
			f.add(m, p.from.Zone)
		}
	}
}

// add notes the records of an answer. zone is the interface for link-local addresses of IPv6.
func (f *found) add(m *dns.Msg, zone string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, rr := range slices.Concat(m.Answer, m.Extra) {
		switch rr := rr.(type) {
		case *dns.PTR:
			if strings.EqualFold(rr.Hdr.Name, Service) {
				if rr.Hdr.Ttl == 0 {
					delete(f.instances, strings.ToLower(rr.Ptr))
				} else {
					f.instance(rr.Ptr)
				}
			}
		case *dns.SRV:
			if i := f.instance(rr.Hdr.Name); i != nil && rr.Hdr.Ttl > 0 {
				i.host, i.port = strings.ToLower(rr.Target), rr.Port
			}
		case *dns.TXT:
			if i := f.instance(rr.Hdr.Name); i != nil && rr.Hdr.Ttl > 0 {
				i.text = rr.Txt[:min(len(rr.Txt), maxStrings)]
			}
		case *dns.A:
			f.host(rr.Hdr, rr.A, "")
		case *dns.AAAA:
			f.host(rr.Hdr, rr.AAAA, zone)
		}
	}
}

// instance returns the instance with a name, nil if it is none of ours or there are too many.
func (f *found) instance(name string) *instance {
	key := strings.ToLower(name)
	if i, ok := f.instances[key]; ok {
		return i
	}
	label, ok := labelOf(name)
	if !ok || len(f.instances) >= maxFound {
		return nil
	}
	i := &instance{label: label, name: name}
	f.instances[key] = i
	return i
}

func (f *found) host(h dns.RR_Header, ip net.IP, zone string) {
	a, ok := netip.AddrFromSlice(ip)
	a = a.Unmap()
	if !ok || h.Ttl == 0 || !a.IsGlobalUnicast() && !a.IsLinkLocalUnicast() && !a.IsLoopback() {
		return
	}
	if a.Is6() && a.IsLinkLocalUnicast() {
		a = a.WithZone(zone)
	}
	key := strings.ToLower(h.Name)
	if known, has := f.hosts[key]; (has || len(f.hosts) < maxFound) && len(known) < maxAddrs && !slices.Contains(known, a) {
		f.hosts[key] = append(known, a)
	}
}

// entries returns the appliances that said who they are.
func (f *found) entries() []Entry {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := []Entry{}
	for _, key := range slices.Sorted(maps.Keys(f.instances)) {
		i := f.instances[key]
		e := Entry{Instance: i.label, Addr: address(f.hosts[i.host], i.port)}
		if e.read(i.text); e.CapsuleID != "" {
			out = append(out, e)
		}
	}
	slices.SortStableFunc(out, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.CapsuleID, b.CapsuleID))
	})
	return out
}
