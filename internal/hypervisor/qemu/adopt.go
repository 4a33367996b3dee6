package qemu

import (
	"context"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// Adopt implements hypervisor.Driver. It returns as soon as the process is proven to be the right one; QMP is connected in the
// background.
func (d *Driver) Adopt(ctx context.Context, raw hypervisor.Handle) (hypervisor.Instance, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	h, err := decodeHandle(raw)
	if err != nil {
		return nil, err
	}
	p, err := d.jail.Open(h.Handle, h.UUID, func() bool { return jail.Listens(ctx, h.Dir, qmpSocket) }, func() error { return endServers(ctx, h) })
	if err != nil {
		return nil, err
	}
	i := newInstance(d, h, raw, p)
	if i.shares, err = openServers(h); err != nil {
		i.lost <- err.Error() // the instance ends at once, and says why
	}
	i.run(ctx, nil)
	return i, nil
}

// LastExit implements hypervisor.ExitTeller.
func (d *Driver) LastExit(_ context.Context, raw hypervisor.Handle) (hypervisor.Exit, error) {
	h, err := decodeHandle(raw)
	if err != nil {
		return hypervisor.Exit{}, err
	}
	reason, err := h.Recorded()
	return h.LastExit(reason, err, ended)
}

// Reap implements hypervisor.Driver.
func (d *Driver) Reap(ctx context.Context, id vm.ID, dir string) error {
	return d.jail.Reap(ctx, id, dir)
}

// Seek implements hypervisor.Seeker with one scan of all processes.
func (d *Driver) Seek(ctx context.Context, ids []vm.ID) (map[vm.ID][]int, error) {
	return d.jail.Seek(ctx, ids)
}

// markOf returns the UUID of the VM whose QEMU, or server, has these arguments; "" if it is neither.
func markOf(args []string) string {
	for i := 1; i < len(args); i++ {
		if args[i-1] == "-uuid" {
			return args[i]
		}
	}
	return marked(args)
}
