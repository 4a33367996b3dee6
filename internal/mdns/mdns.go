// Package mdns announces an appliance on its network, and finds those that are announced: DNS-SD (RFC 6763) over multicast DNS
// (RFC 6762), as service _capsule._tcp.
//
// Everything that arrives is anybody's word: it is bounded, and it says where to connect, never whom to trust. The package
// resolves no other names and knows no certificate.
package mdns

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/miekg/dns"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Service is the name under which appliances are announced.
const Service = "_capsule._tcp.local."

// What an appliance does at present.
const (
	ModeRuntime   = "runtime"
	ModeInstaller = "installer"
)

const (
	servicesQuery = "_services._dns-sd._udp.local."

	maxText    = 255 // bytes of one string of a TXT record
	maxLabel   = 63  // bytes of one part of a name
	maxStrings = 32  // of a TXT record that is read
)

// Announcement is what an appliance says of itself.
type Announcement struct {
	CapsuleID  string // UUID
	ShortID    string // capsule-a3f2; with .local it is the name of its addresses
	Hostname   string // "": ShortID
	Version    string
	Mode       string // "": ModeRuntime
	Port       uint16
	Adopted    bool
	TargetDisk string   // of an installer: where it would install
	TargetSize uint64   // bytes
	Targets    []string // all disks that are possible
}

// check returns why a cannot be announced.
func (a Announcement) check() error {
	for what, s := range map[string]string{"capsule ID": a.CapsuleID, "short ID": a.ShortID} {
		if s == "" || len(s) > maxLabel-len("-01234567") || strings.ContainsFunc(s, notInHostname) {
			return errdefs.Invalidf("announce the machine: its %s %q is no host name", what, s)
		}
	}
	if len(a.Hostname) > maxLabel-len("-01234567") || !printable(a.Hostname) {
		return errdefs.Invalidf("announce the machine: its hostname %q is longer than %d bytes, or not printable", a.Hostname, maxLabel-len("-01234567"))
	}
	if a.Port == 0 {
		return errdefs.Invalidf("announce the machine: it has no port")
	}
	return nil
}

func notInHostname(r rune) bool {
	return (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && r != '-'
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// text returns the strings of the TXT record, each at most maxText bytes.
func (a Announcement) text() []string {
	mode := cmp.Or(a.Mode, ModeRuntime)
	out := []string{
		"capsule_id=" + a.CapsuleID, "short_id=" + a.ShortID, "adopted=" + strconv.FormatBool(a.Adopted), "version=" + a.Version, "mode=" + mode,
	}
	if a.Hostname != "" {
		out = append(out, "hostname="+a.Hostname)
	}
	if mode == ModeInstaller {
		if a.TargetDisk != "" {
			out = append(out, "target_disk="+a.TargetDisk)
		}
		if a.TargetSize > 0 {
			out = append(out, "target_size_bytes="+strconv.FormatUint(a.TargetSize, 10))
		}
		list := "targets="
		for i, t := range slices.Sorted(slices.Values(a.Targets)) {
			if i > 0 {
				t = "," + t
			}
			if len(list)+len(t) > maxText {
				break // the list of the machine itself is complete
			}
			list += t
		}
		if len(a.Targets) > 0 {
			out = append(out, list)
		}
	}
	for i, s := range out {
		out[i] = s[:min(len(s), maxText)]
	}
	return out
}

// Entry is an appliance that was found. All of it is the word of somebody on the network.
type Entry struct {
	Instance   string   `json:"instance"`
	Addr       string   `json:"addr"` // host:port; "": it gave no address
	CapsuleID  string   `json:"capsule_id"`
	ShortID    string   `json:"short_id"`
	Hostname   string   `json:"hostname"`
	Adopted    bool     `json:"adopted"`
	Version    string   `json:"version"`
	Mode       string   `json:"mode"`
	TargetDisk string   `json:"target_disk,omitempty"`
	TargetSize uint64   `json:"target_size_bytes,omitempty"` // bytes
	Targets    []string `json:"targets,omitempty"`
}

// Installer reports whether the appliance waits for an installation.
func (e *Entry) Installer() bool { return e.Mode == ModeInstaller }

// read fills e from the strings of a TXT record. The first of several values of a key counts (RFC 6763, 6.4); what is not
// printable or unknown is left out.
func (e *Entry) read(text []string) {
	seen := map[string]bool{}
	for _, s := range text[:min(len(text), maxStrings)] {
		key, value, _ := strings.Cut(plain(s), "=")
		key = strings.ToLower(key)
		if seen[key] || !printable(value) {
			continue
		}
		seen[key] = true
		switch key {
		case "capsule_id":
			e.CapsuleID = value
		case "short_id":
			e.ShortID = value
		case "hostname":
			e.Hostname = value
		case "adopted":
			e.Adopted = value == "true"
		case "version":
			e.Version = value
		case "mode":
			e.Mode = value
		case "target_disk":
			e.TargetDisk = value
		case "target_size_bytes":
			e.TargetSize, _ = strconv.ParseUint(value, 10, 64) // of its own: 0 is unknown
		case "targets":
			e.Targets = strings.FieldsFunc(value, func(r rune) bool { return r == ',' })
		}
	}
	e.Mode = cmp.Or(e.Mode, ModeRuntime)
}

// plain decodes a name or a string, in which the library writes some bytes as \. or \123.
func plain(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var out []byte
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] != '\\' || i+1 == len(s):
			out = append(out, s[i])
		case i+3 < len(s) && isDigit(s[i+1]) && isDigit(s[i+2]) && isDigit(s[i+3]):
			n, _ := strconv.Atoi(s[i+1 : i+4])
			out = append(out, byte(n)) //nolint:gosec // the library writes numbers of bytes
			i += 3
		default:
			i++
			out = append(out, s[i])
		}
	}
	return string(out)
}

func isDigit(b byte) bool { return b >= '0' && b <= '9' }

// instanceName returns the whole name of an instance; its label may have any printable character.
func instanceName(label string) string {
	var b strings.Builder
	for _, c := range []byte(label) {
		if c == '.' || c == '\\' {
			b.WriteByte('\\')
		}
		b.WriteByte(c)
	}
	return b.String() + "." + Service
}

// labelOf returns the label of the instance name; false if it is none of ours.
func labelOf(name string) (string, bool) {
	if len(name) <= len(Service) || !strings.EqualFold(name[len(name)-len(Service):], Service) || dns.CountLabel(name) != dns.CountLabel(Service)+1 {
		return "", false
	}
	label := plain(strings.TrimSuffix(name[:len(name)-len(Service)], "."))
	return label, label != "" && printable(label)
}

// address returns the address to connect to. It prefers IPv4. It returns a link-local address only if there is no other one.
func address(addrs []netip.Addr, port uint16) string {
	best := slices.SortedFunc(slices.Values(addrs), func(a, b netip.Addr) int { return cmp.Or(preference(a)-preference(b), a.Compare(b)) })
	if len(best) == 0 || port == 0 {
		return ""
	}
	return netip.AddrPortFrom(best[0], port).String()
}

func preference(a netip.Addr) int {
	switch {
	case a.Is4() && !a.IsLinkLocalUnicast():
		return 0
	case !a.IsLinkLocalUnicast():
		return 1
	case a.Is4():
		return 2
	}
	return 3
}
