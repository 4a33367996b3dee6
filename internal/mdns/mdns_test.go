package mdns

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var (
	here      = Announcement{CapsuleID: "3d1f6f0e-2a43-4f0c-9d0b-6a55c2a3d001", ShortID: "capsule-a3f2", Version: "v1", Port: 50000}
	installer = Announcement{
		CapsuleID: here.CapsuleID, ShortID: here.ShortID, Hostname: `Ann's "box".1 \o/`, Version: "v1", Mode: ModeInstaller, Port: 50000,
		TargetDisk: "/dev/nvme0n1", TargetSize: 1 << 40, Targets: []string{"/dev/sda", "/dev/nvme0n1"},
	}
	addrs = []netip.Addr{netip.MustParseAddr("fe80::1"), netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")}
)

// The keys are those of the documented system.
func TestText(t *testing.T) {
	if d := diff.Of([]string{
		"capsule_id=" + here.CapsuleID, "short_id=capsule-a3f2", "adopted=false", "version=v1", "mode=installer", `hostname=Ann's "box".1 \o/`,
		"target_disk=/dev/nvme0n1", "target_size_bytes=1099511627776", "targets=/dev/nvme0n1,/dev/sda",
	}, installer.text()); d != "" {
		t.Error(d)
	}
	many := installer
	many.Targets = slices.Repeat([]string{"/dev/disk/by-id/" + strings.Repeat("x", 50)}, 20)
	many.Version = strings.Repeat("v", 300)
	for _, s := range many.text() {
		if len(s) > maxText || strings.HasPrefix(s, "targets=") && strings.HasSuffix(s, ",") {
			t.Errorf("%d bytes: %q", len(s), s)
		}
	}
}

func TestCheck(t *testing.T) {
	for name, change := range map[string]func(*Announcement){
		"no ID": func(a *Announcement) { a.CapsuleID = "" }, "odd ID": func(a *Announcement) { a.CapsuleID = "a.b" },
		"long short ID": func(a *Announcement) { a.ShortID = strings.Repeat("a", 64) }, "no port": func(a *Announcement) { a.Port = 0 },
		"odd name": func(a *Announcement) { a.Hostname = "a\x1bb" }, "long name": func(a *Announcement) { a.Hostname = strings.Repeat("a", 64) },
	} {
		a := here
		change(&a)
		if _, err := New(a, nil, nil, nil); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// exchange puts questions to a zone as over the network, and returns what the asker notes.
func exchange(t *testing.T, z zone, legacy bool, questions ...dns.Question) (*found, *dns.Msg, bool) {
	t.Helper()
	q := wire(t, &dns.Msg{MsgHdr: dns.MsgHdr{Id: 7}, Question: questions})
	m, unicast := z.answer(q, legacy)
	f := &found{hosts: map[string][]netip.Addr{}, instances: map[string]*instance{}}
	if m != nil {
		m = wire(t, m)
		f.add(m, "eth0")
	}
	return f, m, unicast
}

func wire(t *testing.T, m *dns.Msg) *dns.Msg {
	t.Helper()
	data, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	got := new(dns.Msg)
	if err := got.Unpack(data); err != nil {
		t.Fatal(err)
	}
	return got
}

func question(name string, kind uint16) dns.Question {
	return dns.Question{Name: name, Qtype: kind, Qclass: dns.ClassINET}
}

func TestOneAnswerSaysAll(t *testing.T) {
	f, m, unicast := exchange(t, newZone(installer, false, addrs), false, question("_CAPSULE._tcp.local.", dns.TypePTR))
	if unicast || !m.Response || !m.Authoritative || m.Id != 0 || len(m.Question) > 0 {
		t.Errorf("unicast %v, %v", unicast, m)
	}
	if d := diff.Of([]Entry{{
		Instance: installer.Hostname, Addr: "192.0.2.7:50000", CapsuleID: here.CapsuleID, ShortID: here.ShortID, Hostname: installer.Hostname, Version: "v1",
		Mode: ModeInstaller, TargetDisk: "/dev/nvme0n1", TargetSize: 1 << 40, Targets: []string{"/dev/nvme0n1", "/dev/sda"},
	}}, f.entries()); d != "" {
		t.Error(d)
	}
	f.add(wire(t, newZone(installer, false, addrs).goodbye()), "")
	if got := f.entries(); len(got) > 0 {
		t.Errorf("after the goodbye: %+v", got)
	}
}

func TestAnswers(t *testing.T) {
	z := newZone(here, false, addrs)
	for name, tc := range map[string]struct {
		q       dns.Question
		legacy  bool
		answers int
		unicast bool
	}{
		"any":               {question(Service, dns.TypeANY), false, 1, false},
		"unicast wished":    {dns.Question{Name: Service, Qtype: dns.TypePTR, Qclass: dns.ClassINET | topBit}, false, 1, true},
		"legacy":            {question(Service, dns.TypePTR), true, 1, true},
		"services":          {question(servicesQuery, dns.TypePTR), false, 1, false},
		"instance":          {question("capsule-a3f2."+Service, dns.TypeANY), false, 2, false},
		"SRV":               {question("capsule-a3f2."+Service, dns.TypeSRV), false, 1, false},
		"A":                 {question("capsule-a3f2.local.", dns.TypeA), false, 1, false},
		"AAAA":              {question("Capsule-A3F2.local.", dns.TypeAAAA), false, 2, false},
		"other class":       {dns.Question{Name: Service, Qtype: dns.TypePTR, Qclass: dns.ClassCHAOS}, false, 0, false},
		"other type":        {question(Service, dns.TypeA), false, 0, false},
		"another's service": {question("_http._tcp.local.", dns.TypePTR), false, 0, false},
		"another's name":    {question("other.local.", dns.TypeA), false, 0, false},
	} {
		_, m, unicast := exchange(t, z, tc.legacy, tc.q)
		if m == nil {
			m = &dns.Msg{}
		}
		if len(m.Answer) != tc.answers || unicast != tc.unicast {
			t.Errorf("%s: unicast %v, %v", name, unicast, m)
		}
		for _, rr := range slices.Concat(m.Answer, m.Extra) {
			if tc.legacy && (rr.Header().Class != dns.ClassINET || rr.Header().Ttl > ttlLegacy || m.Id != 7) {
				t.Errorf("%s: %v", name, rr)
			}
		}
	}
}

func TestKnownAnswersAreNotRepeated(t *testing.T) {
	z := newZone(here, false, addrs)
	q := &dns.Msg{Question: []dns.Question{question(Service, dns.TypePTR)}, Answer: []dns.RR{z.ptr()}}
	if m, _ := z.answer(wire(t, q), false); m != nil {
		t.Errorf("got %v", m)
	}
	q.Answer[0].Header().Ttl = ttlOther/2 - 1
	if m, _ := z.answer(wire(t, q), false); m == nil {
		t.Error("an answer that is known for a short time only is not repeated")
	}
}

func TestConflict(t *testing.T) {
	z := newZone(here, false, addrs)
	if z.contradicts(wire(t, z.all())) {
		t.Error("a machine contradicts itself")
	}
	other := here
	other.CapsuleID = "ffffffff-2a43-4f0c-9d0b-6a55c2a3d001"
	o := newZone(other, false, nil)
	if !z.contradicts(wire(t, o.all())) || z.contradicts(wire(t, o.goodbye())) {
		t.Error("a conflict is not seen, or one is that has ended")
	}
	renamed := newZone(here, true, addrs)
	if renamed.label != "capsule-a3f2-3d1f6f0e" || renamed.host != "capsule-a3f2-3d1f6f0e.local." || renamed.contradicts(wire(t, o.all())) {
		t.Errorf("renamed to %q, %q", renamed.label, renamed.host)
	}
}

func TestAddress(t *testing.T) {
	for want, list := range map[string][]netip.Addr{
		"":                 nil,
		"192.0.2.7:1":      addrs,
		"[2001:db8::7]:1":  {addrs[0], addrs[2]},
		"[fe80::1%eth0]:1": {addrs[0].WithZone("eth0")},
		"169.254.0.1:1":    {addrs[0], netip.MustParseAddr("169.254.0.1")},
	} {
		if got := address(list, 1); got != want {
			t.Errorf("%v: %q, want %q", list, got, want)
		}
	}
	if got := address(addrs, 0); got != "" {
		t.Errorf("without a port: %q", got)
	}
}

// Whatever arrives, it is answered or noted within bounds, and what is shown is printable.
func FuzzMessage(f *testing.F) {
	for _, m := range []*dns.Msg{
		newZone(installer, false, addrs).all(), newZone(here, true, addrs).goodbye(),
		{Question: []dns.Question{question(Service, dns.TypePTR), question(instanceName(here.ShortID), dns.TypeANY)}},
	} {
		data, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m := new(dns.Msg)
		if m.Unpack(data) != nil {
			return
		}
		z := newZone(installer, false, addrs)
		for _, legacy := range []bool{false, true} {
			if reply, _ := z.answer(m.Copy(), legacy); reply != nil {
				if _, err := reply.Pack(); err != nil && !legacy {
					t.Errorf("an answer that cannot be sent: %v", err)
				}
			}
		}
		z.contradicts(m)
		x := &found{hosts: map[string][]netip.Addr{}, instances: map[string]*instance{}}
		x.add(m, "eth0")
		for _, e := range x.entries() {
			for _, s := range slices.Concat([]string{e.Instance, e.CapsuleID, e.ShortID, e.Hostname, e.Version, e.Mode, e.TargetDisk, e.Addr}, e.Targets) {
				if !printable(s) || len(s) > maxText {
					t.Errorf("%q is shown", s)
				}
			}
		}
		if len(x.instances) > maxFound || len(x.hosts) > maxFound {
			t.Errorf("%d instances, %d hosts", len(x.instances), len(x.hosts))
		}
	})
}
