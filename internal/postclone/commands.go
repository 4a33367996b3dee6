package postclone

import (
	"net"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/vm"
)

// Clone is the identity that the guest gets.
type Clone struct {
	ID        vm.ID
	Hostname  string
	NICs      []vm.NIC
	MACs      []string // current MACs of the interfaces, in the order of NICs
	MachineID string   // 32 hex digits; "": unchanged
}

// Commands returns the shell commands for a clone of class c, for root in the guest; "" for Automatic. They are
// idempotent.
func Commands(c Class, v Clone) (string, error) {
	var s script
	switch c {
	case Automatic:
	case CloudImage:
		s.begin(v)
		if err := s.cloudInit(v); err != nil {
			return "", err
		}
	case StaticOCI:
		s.begin(v)
		s.networkd(v)
	case FrozenMAC:
		s.begin(v)
		s.changeMACs(v)
		s.networkd(v)
	}
	return s.String(), nil
}

// script builds a shell script. It quotes every value.
type script struct{ strings.Builder }

func (s *script) line(words ...string) { s.WriteString(strings.Join(words, " ") + "\n") }

// file writes lines to path.
func (s *script) file(path string, lines ...string) {
	words := []string{"printf", `'%s\n'`}
	for _, l := range lines {
		words = append(words, quote(l))
	}
	s.line(append(words, ">", quote(path))...)
}

// quote returns v as one shell word.
func quote(v string) string { return "'" + strings.ReplaceAll(v, "'", `'\''`) + "'" }

// plain returns v without control characters, for line-based files.
func plain(v string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return -1
		}
		return r
	}, v)
}

// begin drops the guest's page cache, and changes what does not belong to the network.
func (s *script) begin(v Clone) {
	s.line("sync; echo 3 > /proc/sys/vm/drop_caches")
	s.line("hwclock -s 2>/dev/null || true # the time went on while the guest was saved")
	if name := plain(v.Hostname); name != "" {
		s.line("hostnamectl set-hostname", quote(name), "2>/dev/null || hostname", quote(name))
		s.file("/etc/hostname", name)
	}
	if v.MachineID != "" {
		s.file("/etc/machine-id", plain(v.MachineID))
	}
}

// seedDir is where cloud-init looks for its data before it looks at disks; the clone still has the source's seed disk.
const seedDir = "/var/lib/cloud/seed/nocloud"

func (s *script) cloudInit(v Clone) error {
	seed, err := cloudinit.Build(cloudinit.Guest{ID: v.ID, Hostname: plain(v.Hostname), NICs: v.NICs}, vm.CloudInit{})
	if err != nil {
		return err
	}
	s.line("cloud-init clean --logs")
	s.line("mkdir -p", seedDir)
	for _, name := range []string{"meta-data", "user-data", "network-config"} {
		if doc, ok := seed.Files[name]; ok {
			s.file(seedDir+"/"+name, strings.TrimSuffix(string(doc), "\n"))
		}
	}
	s.file("/etc/cloud/cloud.cfg.d/99-cocoon-clone.cfg", "datasource: {NoCloud: {fs_label: null}}")
	s.line("cloud-init init --local && cloud-init init && cloud-init modules --mode=config")
	s.line("if command -v netplan >/dev/null; then netplan apply")
	s.line("elif systemctl is-enabled -q systemd-networkd 2>/dev/null; then systemctl restart systemd-networkd")
	s.line("else systemctl restart networking; fi")
	return nil
}

// networkd writes a file for each interface, matched by MAC, and removes the files that name a MAC of the source.
func (s *script) networkd(v Clone) {
	s.line("mkdir -p /etc/systemd/network")
	for i, n := range vm.OneDefaultRoute(v.NICs) {
		mac, err := net.ParseMAC(n.MAC)
		if err != nil {
			continue
		}
		if old := v.old(i); old != "" && old != mac.String() {
			s.line("for f in /etc/systemd/network/*.network; do grep -qi", quote(old), `"$f" && rm -f "$f"; done`)
		}
		name := strings.ReplaceAll(mac.String(), ":", "")
		s.file("/etc/systemd/network/10-cocoon-"+name+".network", networkFile(n, mac.String())...)
	}
	s.line("systemctl restart systemd-networkd")
}

func networkFile(n vm.NIC, mac string) []string {
	lines := []string{"[Match]", "MACAddress=" + mac, "", "[Network]"}
	if n.IP == "" || n.Prefix == 0 {
		lines = append(lines, "DHCP=yes")
	} else {
		lines = append(lines, "Address="+plain(n.IP)+"/"+strconv.Itoa(n.Prefix))
		for _, a := range n.Addresses {
			lines = append(lines, "Address="+plain(a))
		}
		if n.Gateway != "" {
			lines = append(lines, "Gateway="+plain(n.Gateway))
		}
	}
	for _, d := range n.DNS {
		lines = append(lines, "DNS="+plain(d))
	}
	if n.IP != "" {
		for _, r := range n.Routes {
			lines = append(lines, "", "[Route]", "Destination="+plain(r.To))
			if r.Via != "" {
				lines = append(lines, "Gateway="+plain(r.Via))
			}
		}
	}
	if n.MTU > 0 {
		lines = append(lines, "", "[Link]", "MTUBytes="+strconv.Itoa(n.MTU))
	}
	return lines
}

// changeMACs gives every interface its new MAC; it finds the interface by the old one.
func (s *script) changeMACs(v Clone) {
	for i, n := range v.NICs {
		mac, err := net.ParseMAC(n.MAC)
		old := v.old(i)
		if err != nil || old == "" || old == mac.String() {
			continue
		}
		s.line(`for d in /sys/class/net/*; do [ "$(cat "$d/address")" =`, quote(old), "] || continue; d=${d##*/}")
		s.line(`  ip link set dev "$d" down; ip addr flush dev "$d"`)
		s.line(`  ip link set dev "$d" address`, quote(mac.String())+`; ip link set dev "$d" up`)
		s.line("done")
	}
}

// old returns the MAC of the source's interface i in the kernel's notation, "" if unknown.
func (v Clone) old(i int) string {
	if i >= len(v.MACs) {
		return ""
	}
	mac, err := net.ParseMAC(v.MACs[i])
	if err != nil {
		return ""
	}
	return mac.String()
}
