package vm

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// This file is about what a guest knows of names: its own, and how it resolves others.

// maxHostname is the longest host name of a Linux kernel.
const maxHostname = 64

// HostEntry gives an address names that the guest alone knows.
type HostEntry struct {
	IP    string   `json:"ip"`
	Names []string `json:"names"`
}

// Line returns the entry as a line of /etc/hosts.
func (h HostEntry) Line() string { return h.IP + "\t" + strings.Join(h.Names, "\t") }

// DNS says how a guest resolves names.
type DNS struct {
	Servers  []string `json:"servers,omitempty"` // after those of its networks
	Own      bool     `json:"own,omitempty"`     // those of its networks are not used
	Searches []string `json:"searches,omitempty"`
	Options  []string `json:"options,omitempty"` // as in resolv.conf: name or name:value
	Offered  bool     `json:"offered,omitempty"` // nobody asked for it: a VM that boots itself does without
}

// Lines returns the lines of resolv.conf that name no server.
func (d *DNS) Lines() (out []string) {
	if d == nil {
		return nil
	}
	if len(d.Searches) > 0 {
		out = append(out, "search "+strings.Join(d.Searches, " "))
	}
	if len(d.Options) > 0 {
		out = append(out, "options "+strings.Join(d.Options, " "))
	}
	return out
}

// maxNameServers is how many name servers libc uses.
const maxNameServers = 3

// ResolvConf returns the content of resolv.conf for a guest or container with these interfaces: their name servers, and more lines, as
// those of DNS.Lines. "" if there is neither.
func ResolvConf(nics []NIC, lines []string) string {
	var b strings.Builder
	n := 0
	for _, nic := range nics {
		for _, server := range nic.DNS {
			if n++; n <= maxNameServers {
				b.WriteString("nameserver " + oneLine(server) + "\n")
			}
		}
	}
	for _, line := range lines {
		b.WriteString(oneLine(line) + "\n")
	}
	return b.String()
}

// oneLine keeps a value from being more than one line of a file.
func oneLine(s string) string {
	return strings.NewReplacer("\n", " ", "\r", " ").Replace(s)
}

// Clone returns a copy of d that shares no memory with it.
func (d *DNS) Clone() *DNS {
	if d == nil {
		return nil
	}
	c := *d
	c.Servers, c.Searches, c.Options = cloneSlice(d.Servers), cloneSlice(d.Searches), cloneSlice(d.Options)
	return &c
}

// HostNames returns the names of the guest itself, the longest first.
func (s Spec) HostNames() []string {
	first, _, qualified := strings.Cut(s.Hostname, ".")
	switch {
	case qualified:
		return []string{s.Hostname, first}
	case s.Domain != "":
		return []string{s.Hostname + "." + s.Domain, s.Hostname}
	}
	return []string{s.Hostname}
}

// Limits of what a guest knows of names.
const (
	maxHostEntries = 1024
	maxEntryNames  = 64
	maxDNSWords    = 64
	maxDomain      = 253
)

// A word of resolv.conf or /etc/hosts.
var wordRE = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,253}$`)

func (s Spec) validateNames() error {
	labels := strings.Split(s.Hostname, ".")
	if len(s.Hostname) > maxHostname || slices.ContainsFunc(labels, func(l string) bool { return len(l) > 63 || !hostRE.MatchString(l) }) {
		return errdefs.Invalidf("invalid host name %q; it must consist of DNS labels and have at most %d characters", s.Hostname, maxHostname)
	}
	if s.Domain != "" && (len(s.Domain) > maxDomain || slices.ContainsFunc(strings.Split(s.Domain, "."), func(l string) bool { return len(l) > 63 || !hostRE.MatchString(l) })) {
		return errdefs.Invalidf("%q is not a DNS domain", s.Domain)
	}
	if len(s.Hosts) > maxHostEntries {
		return errdefs.Invalidf("too many entries for /etc/hosts: %d; at most %d are possible", len(s.Hosts), maxHostEntries)
	}
	for _, h := range s.Hosts {
		if _, err := netip.ParseAddr(h.IP); err != nil {
			return errdefs.Invalidf("an entry for /etc/hosts has %q instead of an IP address", h.IP)
		}
		if len(h.Names) == 0 || len(h.Names) > maxEntryNames || !words(h.Names) {
			return errdefs.Invalidf("the entry of %s for /etc/hosts has no valid names; use host names, at most %d", h.IP, maxEntryNames)
		}
	}
	if s.DNS == nil {
		return nil
	}
	for _, server := range s.DNS.Servers {
		if _, err := netip.ParseAddr(server); err != nil {
			return errdefs.Invalidf("name server %q is not an IP address", server)
		}
	}
	for _, list := range [][]string{s.DNS.Servers, s.DNS.Searches, s.DNS.Options} {
		if len(list) > maxDNSWords || !words(list) {
			return errdefs.Invalidf("invalid DNS settings; use words without spaces, at most %d of a kind", maxDNSWords)
		}
	}
	return nil
}

func words(list []string) bool {
	return !slices.ContainsFunc(list, func(w string) bool { return !wordRE.MatchString(w) })
}
