package ipam

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// This file chooses the addresses of an interface.

// leftover finds a lease that r inherits: one of an earlier VM of the same name that is no longer attached, or one that another
// program wrote for exactly that MAC. Names are unique among existing VMs, so the earlier VM is gone.
func (p *Pool) leftover(r Request) *Lease {
	want := r.MAC
	if want != "" {
		hw, err := net.ParseMAC(want)
		if err != nil {
			return nil
		}
		want = hw.String()
	} else {
		want = p.nameMAC(r, 0)
	}
	l := p.byMAC[want]
	if l == nil || p.attached[l] || l.Owned() && (l.VM != r.Name || l.Index != r.Index) {
		return nil
	}
	return l
}

func (p *Pool) freeMAC(r Request) (string, error) {
	if r.MAC != "" {
		hw, err := net.ParseMAC(r.MAC)
		if err != nil || len(hw) != 6 || hw[0]&1 != 0 {
			return "", errdefs.Invalidf("%q is not a unicast MAC address", r.MAC)
		}
		mac := hw.String()
		if mac == p.cfg.ReservedMAC.String() {
			return "", errdefs.Existsf("MAC %s is the gateway's; choose another", mac)
		}
		if other := p.byMAC[mac]; other != nil {
			return "", errdefs.Existsf("MAC %s belongs to %s; choose another or none", mac, other.holder())
		}
		return mac, nil
	}
	for salt := 0; ; salt++ {
		mac := p.nameMAC(r, salt)
		if p.byMAC[mac] == nil && mac != p.cfg.ReservedMAC.String() {
			return mac, nil
		}
	}
}

// nameMAC returns the locally administered unicast MAC of an interface; salt numbers the alternatives.
func (p *Pool) nameMAC(r Request, salt int) string {
	sum := hash("mac", p.cfg.Salt, r.Name, strconv.Itoa(r.Index), strconv.Itoa(salt))
	return net.HardwareAddr{0x02, sum[0], sum[1], sum[2], sum[3], sum[4]}.String()
}

// freeIP starts at the address that follows from the name and returns the next free one, outside quarantine if possible.
func (p *Pool) freeIP(r Request, now time.Time) (netip.Addr, error) {
	base := binary.BigEndian.Uint32(p.cfg.Prefix.Addr().AsSlice())
	hosts := uint32(1)<<(32-p.cfg.Prefix.Bits()) - 2 // without network and broadcast
	if uint32(len(p.byIP)) >= hosts-1 {              // and without the gateway
		return netip.Addr{}, errdefs.Exhaustedf("all %d addresses of subnet %s are taken; remove VMs or configure a larger subnet", hosts-1, p.cfg.Prefix)
	}
	sum := hash("ip", r.Name, strconv.Itoa(r.Index))
	var disputed netip.Addr
	for i, at := uint32(0), binary.BigEndian.Uint32(sum[:4])%hosts; i < hosts; i, at = i+1, (at+1)%hosts {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], base+1+at)
		ip := netip.AddrFrom4(b)
		if ip == p.cfg.Gateway || p.byIP[ip] != nil {
			continue
		}
		if !now.Before(p.declined[ip]) {
			return ip, nil
		}
		if !disputed.IsValid() {
			disputed = ip
		}
	}
	if disputed.IsValid() {
		return disputed, nil
	}
	return netip.Addr{}, errdefs.Exhaustedf("no address of subnet %s is free; remove VMs or configure a larger subnet", p.cfg.Prefix)
}
