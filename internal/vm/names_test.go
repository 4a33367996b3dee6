package vm

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestNamesAreValidated(t *testing.T) {
	label := strings.Repeat("a", 60)
	for name, tc := range map[string]struct {
		change func(*Spec)
		valid  bool
	}{
		"label":          {func(s *Spec) { s.Hostname = "web-0" }, true},
		"full name":      {func(s *Spec) { s.Hostname = "web-0.sub.ns.svc.cluster.local" }, true},
		"64 characters":  {func(s *Spec) { s.Hostname = label + ".aaa" }, true},
		"65 characters":  {func(s *Spec) { s.Hostname = label + ".aaaa" }, false},
		"long label":     {func(s *Spec) { s.Hostname = label + "aaaa" }, false},
		"empty label":    {func(s *Spec) { s.Hostname = "a..b" }, false},
		"line end":       {func(s *Spec) { s.Hostname = "a\n" }, false},
		"domain":         {func(s *Spec) { s.Domain = "sub.ns.svc.cluster.local" }, true},
		"bad domain":     {func(s *Spec) { s.Domain = "sub ns" }, false},
		"entry":          {func(s *Spec) { s.Hosts = []HostEntry{{IP: "fd00::1", Names: []string{"a", "b.c"}}} }, true},
		"entry, no name": {func(s *Spec) { s.Hosts = []HostEntry{{IP: "10.0.0.1"}} }, false},
		"entry, no IP":   {func(s *Spec) { s.Hosts = []HostEntry{{IP: "a", Names: []string{"a"}}} }, false},
		"entry, two":     {func(s *Spec) { s.Hosts = []HostEntry{{IP: "10.0.0.1", Names: []string{"a\n10.0.0.2 b"}}} }, false},
		"DNS": {func(s *Spec) {
			s.DNS = &DNS{Servers: []string{"1.1.1.1"}, Searches: []string{"a.b", "."}, Options: []string{"ndots:2"}}
		}, true},
		"server by name":  {func(s *Spec) { s.DNS = &DNS{Servers: []string{"dns"}} }, false},
		"two lines":       {func(s *Spec) { s.DNS = &DNS{Searches: []string{"a\nnameserver 10.0.0.1"}} }, false},
		"option of words": {func(s *Spec) { s.DNS = &DNS{Options: []string{"a b"}} }, false},
	} {
		s := Spec{Name: "a", Image: "i"}.Default()
		tc.change(&s)
		if err := s.Validate(); tc.valid != (err == nil) || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestResolvConf(t *testing.T) {
	nics := []NIC{{DNS: []string{"9.9.9.9", "fd00::1"}}, {}, {DNS: []string{"1.1.1.1", "8.8.8.8"}}}
	for _, c := range []struct {
		nics  []NIC
		lines []string
		want  string
	}{
		{nil, nil, ""},
		{nics, nil, "nameserver 9.9.9.9\nnameserver fd00::1\nnameserver 1.1.1.1\n"},
		{nics[:1], (&DNS{Searches: []string{"a.example", "b"}, Options: []string{"ndots:2"}}).Lines(), "nameserver 9.9.9.9\nnameserver fd00::1\nsearch a.example b\noptions ndots:2\n"},
		{[]NIC{{DNS: []string{"9.9.9.9\nnameserver 6.6.6.6"}}}, []string{"x\r\ny"}, "nameserver 9.9.9.9 nameserver 6.6.6.6\nx  y\n"},
	} {
		if got := ResolvConf(c.nics, c.lines); got != c.want {
			t.Errorf("%+v, %q: %q, want %q", c.nics, c.lines, got, c.want)
		}
	}
}
