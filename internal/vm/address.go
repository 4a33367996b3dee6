package vm

import (
	"net/netip"
	"slices"
	"strings"
)

// Words that a Process may contain for the VM's own addresses. The addresses are known only when the VM has its interfaces, so the
// guest is given them instead of the words when it is set up.
const (
	OwnAddress   = "\x00address\x00"   // of the first interface; "" if it has none
	OwnAddresses = "\x00addresses\x00" // the IPv4 and IPv6 address of the first interface, separated by a comma
)

// Addressed returns p with the addresses of the first of nics in place of the words.
func (p Process) Addressed(nics []NIC) Process {
	var own []string
	if len(nics) > 0 {
		own = slices.DeleteFunc([]string{nics[0].IP, nics[0].IPv6}, func(a string) bool { return a == "" })
	}
	words := strings.NewReplacer(OwnAddress, strings.Join(own[:min(len(own), 1)], ""), OwnAddresses, strings.Join(own, ","))
	p = p.Clone()
	for i := range p.Env {
		p.Env[i].Value = words.Replace(p.Env[i].Value)
	}
	for i := range p.FileKeys {
		p.FileKeys[i].Absent = words.Replace(p.FileKeys[i].Absent)
	}
	for _, list := range [][]string{p.Entrypoint, p.Args} {
		for i := range list {
			list[i] = words.Replace(list[i])
		}
	}
	return p
}

// OneDefaultRoute returns nics such that a guest has one default route of each family: that of the first interface that has one.
func OneDefaultRoute(nics []NIC) []NIC {
	out := slices.Clone(nics)
	seen := map[bool]bool{} // by whether it is of IPv6
	for i := range out {
		n := &out[i]
		has := map[bool]bool{}
		if gw, err := netip.ParseAddr(n.Gateway); err == nil {
			if has[gw.Is6()] = true; seen[gw.Is6()] {
				n.Gateway = ""
			}
		}
		n.Routes = slices.DeleteFunc(slices.Clone(n.Routes), func(r Route) bool {
			to, err := netip.ParsePrefix(r.To)
			if err != nil || to.Bits() > 0 {
				return false
			}
			has[to.Addr().Is6()] = true
			return seen[to.Addr().Is6()]
		})
		for six := range has {
			seen[six] = true
		}
	}
	return out
}
