package session

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// How often to ask a guest for addresses that its network does not know. It may have none for a long time.
const (
	addressAttempts = 8
	addressFirst    = time.Second
	addressMost     = 30 * time.Second
)

// learnAddresses records the addresses that the guest reports for NICs whose network gave them none. What a network
// knows is never replaced by what a guest reports.
func (l *Link) learnAddresses(ctx context.Context, agent guest.Agent) {
	reporter, ok := agent.(guest.NetworkReporter)
	if !ok {
		return
	}
	wait := backoff.ExponentialBackOff{InitialInterval: addressFirst, RandomizationFactor: jitter, Multiplier: 2, MaxInterval: addressMost}
	for range addressAttempts {
		if ctx.Err() != nil || !unaddressed(l.vm.Record().NICs) {
			return
		}
		found, err := reporter.Interfaces(ctx)
		if err == nil {
			err = l.noteAddresses(ctx, found)
		}
		if err != nil {
			l.cfg.Log.Debug("addresses of vm not learned", "vm", l.proc.ID, "err", err)
			return
		}
		process.Pause(wait.NextBackOff(), ctx.Done(), agent.Done())
	}
}

func (l *Link) noteAddresses(ctx context.Context, found []guest.Interface) error {
	if _, changed := addressed(l.vm.Record().NICs, found); !changed {
		return nil
	}
	_, err := l.vm.Update(ctx, func(r *vm.Record) { r.NICs, _ = addressed(r.NICs, found) })
	return err
}

func unaddressed(nics []vm.NIC) bool {
	return slices.ContainsFunc(nics, func(n vm.NIC) bool { return n.IP == "" })
}

// addressed returns nics with the addresses of found where they have none, and whether that changed anything.
func addressed(nics []vm.NIC, found []guest.Interface) (_ []vm.NIC, changed bool) {
	nics = slices.Clone(nics)
	for i, n := range nics {
		at := slices.IndexFunc(found, func(f guest.Interface) bool { return f.MAC != "" && strings.EqualFold(f.MAC, n.MAC) })
		if n.IP != "" || at < 0 {
			continue
		}
		if p, ok := bestAddress(found[at].Addresses); ok {
			nics[i].IP, nics[i].Prefix, changed = p.Addr().String(), p.Bits(), true
		}
	}
	return nics, changed
}

// bestAddress returns the first IPv4 address that others can reach, otherwise the first such IPv6 address.
func bestAddress(all []netip.Prefix) (best netip.Prefix, ok bool) {
	for _, p := range all {
		switch {
		case !p.Addr().IsGlobalUnicast():
		case p.Addr().Is4():
			return p, true
		case !ok:
			best, ok = p, true
		}
	}
	return best, ok
}
