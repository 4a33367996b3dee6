package engine

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// seed writes the disk from which a disk guest learns its identity, and returns the disks of r with it. It is written
// again before each start, because addresses change. The file is in the state folder and is removed with it.
func (e *Engine) seed(ctx context.Context, r vm.Record, nics []vm.NIC) ([]vm.Disk, error) {
	if r.ImageType == vm.ImageOCI || e.seeds == nil {
		return r.Disks, nil
	}
	spec, err := e.withFiles(r)
	if err != nil {
		return nil, err
	}
	disk, err := e.seeds.Seed(ctx, r.ID, spec, nics, e.stateDir(r.ID))
	if err != nil {
		return nil, fmt.Errorf("write the cloud-init seed: %w", err)
	}
	disk.Role = vm.RoleCidat
	disks := slices.DeleteFunc(slices.Clone(r.Disks), func(d vm.Disk) bool { return d.Role == vm.RoleCidat })
	return append(disks, disk), nil
}

// How often to ask a guest for addresses that its network does not know. It may have none for a long time.
const (
	addressAttempts = 8
	addressFirst    = time.Second
	addressMost     = 30 * time.Second
)

// learnAddresses records the addresses that the guest reports for NICs whose network gave them none. What a network
// knows is never replaced by what a guest reports.
func (e *Engine) learnAddresses(ctx context.Context, m *machine, agent guest.Agent) {
	reporter, ok := agent.(guest.NetworkReporter)
	if !ok {
		return
	}
	wait := addressFirst
	for range addressAttempts {
		if ctx.Err() != nil || !unaddressed(m.record().NICs) {
			return
		}
		found, err := reporter.Interfaces(ctx)
		if err == nil {
			err = e.noteAddresses(ctx, m, found)
		}
		if err != nil {
			e.log.Debug("addresses of vm not learned", "vm", m.id, "err", err)
			return
		}
		pause(wait, ctx.Done(), agent.Done())
		wait = min(wait*2, addressMost)
	}
}

func (e *Engine) noteAddresses(ctx context.Context, m *machine, found []guest.Interface) error {
	if _, changed := addressed(m.record().NICs, found); !changed {
		return nil
	}
	_, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) { r.NICs, _ = addressed(r.NICs, found) })
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
