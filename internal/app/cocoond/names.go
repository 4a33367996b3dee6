package cocoond

import (
	"net/netip"

	"cocoonstack.io/cocoon/internal/appliance/desired"
)

// workloadNames are the names of workloads on the bridge, as long as they run. It implements resolver.Zone.
type workloadNames struct{ store *desired.Store }

// Addresses implements resolver.Zone.
func (w workloadNames) Addresses(label string) ([]netip.Addr, bool) {
	a, err := netip.ParseAddr(w.store.Address(label))
	if err != nil {
		return nil, false
	}
	return []netip.Addr{a}, true
}

// Name implements resolver.Zone.
func (w workloadNames) Name(a netip.Addr) string { return w.store.At(a.String()) }
