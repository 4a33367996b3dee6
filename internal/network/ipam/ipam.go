// Package ipam decides which MAC and IPv4 address each VM has on one subnet, and reads and writes the lease file.
//
// Both depend only on the VM's name, if no other interface holds them. So a VM that is created again under an old name has the
// same address. The package creates no link and answers no packet; networks do that with its results.
package ipam

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Config describes the subnet of a Pool.
type Config struct {
	Salt        string           // salt of the MACs: networks that may share a link have different salts
	Prefix      netip.Prefix     // IPv4, masked
	Gateway     netip.Addr       // never leased
	ReservedMAC net.HardwareAddr // MAC of the gateway; never leased
	TTL         time.Duration    // the expiry of a lease is set this far in the future
}

// Lease is one address held by one interface of one VM. The JSON is public API; other programs read mac, ip and expiry.
type Lease struct {
	MAC    string     `json:"mac"` // lower case, colons
	IP     netip.Addr `json:"ip"`
	Expiry time.Time  `json:"expiry"`

	VM    string `json:"vm,omitempty"` // name
	ID    vm.ID  `json:"vm_id,omitempty"`
	Index int    `json:"nic,omitempty"`
	Tap   string `json:"tap,omitempty"`

	Policed bool `json:"policed,omitempty"` // closed until its policies are set
}

// Owned reports whether l belongs to a VM of ours. Any other lease was written by another program and ends when it expires.
func (l Lease) Owned() bool { return l.ID != "" }

// Request asks for the lease of one interface.
type Request struct {
	ID    vm.ID
	Name  string // name of the VM
	Index int
	MAC   string // "" for the MAC that follows from the name

	Policed bool
}

// Quarantine is how long an address is not leased after another machine was found with it, as long as others are free.
const Quarantine = 10 * time.Minute

type key struct {
	id    vm.ID
	index int
}

// Pool holds the leases of one subnet in memory. It is safe for concurrent use.
type Pool struct {
	cfg Config

	mu       sync.Mutex
	byKey    map[key]*Lease
	byMAC    map[string]*Lease
	byIP     map[netip.Addr]*Lease
	attached map[*Lease]bool
	declined map[netip.Addr]time.Time // end of the quarantine; not saved in the file
	version  uint64                   // grows with every change
}

// New returns an empty pool. It refuses a subnet without room for a gateway and one guest, or no subnet at all.
func New(cfg Config) (*Pool, error) {
	if err := CheckPrefix(cfg.Prefix); err != nil {
		return nil, err
	}
	if !cfg.Prefix.Contains(cfg.Gateway) {
		return nil, errdefs.Invalidf("gateway %s is not in subnet %s", cfg.Gateway, cfg.Prefix)
	}
	p := &Pool{cfg: cfg, declined: map[netip.Addr]time.Time{}}
	p.reset()
	return p, nil
}

// CheckPrefix returns an InvalidArgument error unless p is valid as a subnet of VMs.
func CheckPrefix(p netip.Prefix) error {
	switch {
	case !p.IsValid() || !p.Addr().Is4():
		return errdefs.Invalidf("subnet %s is not an IPv4 subnet such as 10.88.0.0/24", p)
	case p.Masked() != p:
		return errdefs.Invalidf("subnet %s has bits set after its prefix length; use %s", p, p.Masked())
	case p.Bits() < 8 || p.Bits() > 30:
		return errdefs.Invalidf("subnet %s must have a prefix between /8 and /30", p)
	case p.Addr().IsLoopback() || p.Addr().IsMulticast() || p.Addr().IsUnspecified() || p.Addr().IsLinkLocalUnicast() || p.Addr().As4()[0] >= 240:
		return errdefs.Invalidf("subnet %s is not usable for hosts; use a private one such as 10.88.0.0/24", p)
	}
	return nil
}

func (p *Pool) reset() {
	p.byKey, p.byMAC, p.byIP, p.attached = map[key]*Lease{}, map[string]*Lease{}, map[netip.Addr]*Lease{}, map[*Lease]bool{}
}

// Load replaces the content of the pool and drops unowned leases that have expired. A lease that does not fit is an error:
// DataLoss for a contradiction, FailedPrecondition for an address outside the subnet.
func (p *Pool) Load(leases []Lease, now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reset()
	p.version++
	for _, l := range leases {
		if !l.Owned() && l.Expiry.Before(now) {
			continue
		}
		if !p.cfg.Prefix.Contains(l.IP) || l.IP == p.cfg.Gateway {
			return errdefs.Preconditionf("the lease of %s for %s does not fit subnet %s with gateway %s; set the old subnet again or remove the VMs that have the old addresses",
				l.IP, l.holder(), p.cfg.Prefix, p.cfg.Gateway)
		}
		if p.byMAC[l.MAC] != nil || p.byIP[l.IP] != nil || l.Owned() && p.byKey[key{l.ID, l.Index}] != nil {
			return errdefs.DataLossf("two leases have MAC %s or address %s", l.MAC, l.IP)
		}
		p.put(l)
	}
	return nil
}

// Adopt makes sure that l is held and attached. A link in the kernel proves that l is in use.
func (p *Pool) Adopt(l Lease) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	held := p.byKey[key{l.ID, l.Index}]
	if held == nil {
		if other := p.byMAC[l.MAC]; other != nil {
			return errdefs.Conflictf("tap %s has MAC %s, which %s holds", l.Tap, l.MAC, other.holder())
		}
		if other := p.byIP[l.IP]; other != nil {
			return errdefs.Conflictf("tap %s has address %s, which %s holds", l.Tap, l.IP, other.holder())
		}
		if !p.cfg.Prefix.Contains(l.IP) {
			return errdefs.Conflictf("tap %s has address %s outside %s", l.Tap, l.IP, p.cfg.Prefix)
		}
		l.Expiry = p.expiry(time.Now())
		held = p.put(l)
		p.version++
	}
	p.attached[held] = true
	p.police(held, l.Policed)
	return nil
}

// police marks a lease as policed, if on. It stays so until the VM is gone. Preconditions: mu is held.
func (p *Pool) police(held *Lease, on bool) {
	if on && !held.Policed {
		held.Policed = true
		p.version++
	}
}

// Police marks the leases of the VMs as policed.
func (p *Pool) Police(is func(vm.ID) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for at, held := range p.byKey {
		if is(at.id) {
			p.police(held, true)
		}
	}
}

// Attached returns the leases that are in use now.
func (p *Pool) Attached() []Lease {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Lease, 0, len(p.attached))
	for l := range p.attached {
		out = append(out, *l)
	}
	slices.SortFunc(out, func(a, b Lease) int { return a.IP.Compare(b.IP) })
	return out
}

// Remember adds l, which comes from the record of a VM, unless its interface, MAC or address is already held or the address is
// outside the subnet. It reports whether it added l.
func (p *Pool) Remember(l Lease, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !l.IP.IsValid() || p.byKey[key{l.ID, l.Index}] != nil || p.byMAC[l.MAC] != nil || p.byIP[l.IP] != nil ||
		!p.cfg.Prefix.Contains(l.IP) || l.IP == p.cfg.Gateway {
		return false
	}
	l.Expiry = p.expiry(now)
	p.put(l)
	p.version++
	return true
}

// Reserve returns the lease of an interface. It is the same for the same VM and index until it is released. A new one prefers
// the MAC and address that follow from the name. Errors: InvalidArgument and AlreadyExists for an explicit MAC,
// ResourceExhausted if the subnet is full. fresh says that this call made the lease.
func (p *Pool) Reserve(r Request, now time.Time) (l Lease, fresh bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byKey[key{r.ID, r.Index}]; held != nil {
		p.replace(held, r, now)
		if held.VM != r.Name { // the lease was made before the VM had this name
			held.VM = r.Name
			p.version++
		}
		p.police(held, r.Policed)
		return *held, false, nil
	}
	if held := p.leftover(r); held != nil {
		p.replace(held, r, now)
		delete(p.byKey, key{held.ID, held.Index})
		held.ID, held.VM, held.Index, held.Tap, held.Expiry = r.ID, r.Name, r.Index, "", p.expiry(now)
		held.Policed = r.Policed
		p.byKey[key{r.ID, r.Index}] = held
		p.version++
		return *held, false, nil
	}
	mac, err := p.freeMAC(r)
	if err != nil {
		return Lease{}, false, err
	}
	ip, err := p.freeIP(r, now)
	if err != nil {
		return Lease{}, false, err
	}
	held := p.put(Lease{MAC: mac, IP: ip, Expiry: p.expiry(now), VM: r.Name, ID: r.ID, Index: r.Index, Policed: r.Policed})
	p.version++
	return *held, true, nil
}

// replace gives another address to a lease that no guest uses now, if its own is in quarantine and another is free.
func (p *Pool) replace(held *Lease, r Request, now time.Time) {
	if p.attached[held] || !now.Before(p.declined[held.IP]) {
		return
	}
	ip, err := p.freeIP(r, now)
	if err != nil || now.Before(p.declined[ip]) {
		return
	}
	delete(p.byIP, held.IP)
	held.IP = ip
	p.byIP[ip] = held
	p.version++
}

// Decline puts the address of a guest into quarantine, because the guest found another machine with it. The guest keeps the
// lease for now, because all its records name it. It gets another address when its tap is created again.
func (p *Pool) Decline(mac string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byMAC[mac]; held != nil {
		p.declined[held.IP] = now.Add(Quarantine)
	}
}

// Attach records the tap that uses the lease.
func (p *Pool) Attach(id vm.ID, index int, tap string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byKey[key{id, index}]; held != nil {
		p.attached[held] = true
		if held.Tap != tap {
			held.Tap = tap
			p.version++
		}
	}
}

// Detach records that tap is gone. The lease stays reserved.
func (p *Pool) Detach(mac, tap string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byMAC[mac]; held != nil && held.Tap == tap {
		delete(p.attached, held)
	}
}

// Release frees the lease of tap. It does nothing if the lease belongs to another tap meanwhile.
func (p *Pool) Release(mac, tap string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byMAC[mac]; held != nil && held.Tap == tap {
		p.drop(held)
		p.version++
	}
}

// Cancel undoes a fresh reservation that is not used yet.
func (p *Pool) Cancel(l Lease) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byKey[key{l.ID, l.Index}]; held != nil && held.MAC == l.MAC {
		p.drop(held)
		p.version++
	}
}

// ByMAC returns the lease of an owned interface.
func (p *Pool) ByMAC(mac string) (Lease, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byMAC[mac]; held != nil && held.Owned() {
		return *held, true
	}
	return Lease{}, false
}

// ByIP returns the lease of an address.
func (p *Pool) ByIP(ip netip.Addr) (Lease, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byIP[ip]; held != nil {
		return *held, true
	}
	return Lease{}, false
}

// Tap returns the recorded tap of an interface, "" if there is none.
func (p *Pool) Tap(id vm.ID, index int) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held := p.byKey[key{id, index}]; held != nil {
		return held.Tap
	}
	return ""
}

// Renew sets the expiry of a lease one TTL ahead, because its guest has just asked. It reports whether that changed the pool.
// Guests decide how often they ask, so an expiry that is already nearly as far ahead stays unchanged.
func (p *Pool) Renew(mac string, now time.Time) (changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	held := p.byMAC[mac]
	if held == nil || p.expiry(now).Sub(held.Expiry) < p.cfg.TTL/24 {
		return false
	}
	held.Expiry = p.expiry(now)
	p.version++
	return true
}

// Refresh keeps the expiry of owned leases in the future, because they end with their VM and not with time. It drops expired
// unowned leases. Call it at least once per half TTL.
func (p *Pool) Refresh(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.declined, func(_ netip.Addr, end time.Time) bool { return !now.Before(end) })
	for _, l := range p.byIP {
		switch {
		case l.Owned() && l.Expiry.Before(now.Add(p.cfg.TTL/2)):
			l.Expiry = p.expiry(now)
		case !l.Owned() && l.Expiry.Before(now):
			p.drop(l)
		default:
			continue
		}
		p.version++
	}
}

// Snapshot returns all leases in the order of their addresses, and the version of the pool at that moment.
func (p *Pool) Snapshot() ([]Lease, uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Lease, 0, len(p.byIP))
	for _, l := range p.byIP {
		out = append(out, *l)
	}
	slices.SortFunc(out, func(a, b Lease) int { return a.IP.Compare(b.IP) })
	return out, p.version
}

// Size returns the number of leased addresses and the number of addresses that the subnet has for VMs.
func (p *Pool) Size() (leased, total int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.byIP), 1<<(32-p.cfg.Prefix.Bits()) - 3 // without network, broadcast and gateway
}

// Version increases with every change.
func (p *Pool) Version() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.version
}

func (p *Pool) put(l Lease) *Lease {
	held := &l
	p.byMAC[l.MAC], p.byIP[l.IP] = held, held
	if l.Owned() {
		p.byKey[key{l.ID, l.Index}] = held
	}
	return held
}

func (p *Pool) drop(l *Lease) {
	delete(p.byMAC, l.MAC)
	delete(p.byIP, l.IP)
	delete(p.attached, l)
	if l.Owned() {
		delete(p.byKey, key{l.ID, l.Index})
	}
}

// expiry is in UTC with whole seconds, as in the lease file.
func (p *Pool) expiry(now time.Time) time.Time { return now.Add(p.cfg.TTL).UTC().Truncate(time.Second) }

func (l Lease) holder() string {
	if l.VM == "" {
		return "an unknown lease of " + l.MAC
	}
	return fmt.Sprintf("VM %s", l.VM)
}

func hash(parts ...string) [sha256.Size]byte {
	var b []byte
	for _, p := range parts {
		b = append(b, p...)
		b = append(b, 0)
	}
	return sha256.Sum256(b)
}
