package engine

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// linkPatience is how long a link waits for a guest that is being told who it is.
const linkPatience = 10 * time.Second

// relink makes the link of the i-th interface of the running guest of m as the spec says. A guest that still has the identity of another VM gets its
// links with its own.
func (m *machine) relink(ctx context.Context, i int) error {
	linker, err := m.linker()
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, linkPatience)
	defer cancel()
	leave, err := m.run.Load().link.Identity.Take(limited)
	if err != nil {
		return err
	}
	defer leave()
	r := m.record()
	down := r.Spec.NICs[i].LinkDown
	if down || r.Itself() {
		if err := linker.SetLink(limited, vm.PlaceOf(r.NICs, i), !down); err != nil {
			return err
		}
	}
	_, err = m.update(ctx, func(r *vm.Record) { *r = r.WithLink(i, down) })
	return err
}

// settleLinks makes the links of the guest of an adopted process as the record says. An earlier engine may have been killed between the record and the
// guest.
func (m *machine) settleLinks(ctx context.Context) {
	r := m.record()
	for i := range min(len(r.NICs), len(r.Spec.NICs)) {
		if r.NICs[i].LinkDown == r.Spec.NICs[i].LinkDown {
			continue
		}
		if err := m.relink(ctx, i); err != nil {
			m.log.Warn("link of interface not set", "vm", m.id, "network", r.NICs[i].Network, "err", err)
		}
	}
}
