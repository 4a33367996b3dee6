package qemu

import (
	"context"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
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
	p, err := proc.Open(h.PID, h.Start, h.UUID)
	if err != nil {
		if errdefs.IsNotFound(err) && !answers(ctx, h.Dir) {
			err = errors.Join(err, endServers(ctx, h), d.jail.Clear(h.ID, h.Dir, h.Cgroup))
		}
		return nil, fmt.Errorf("adopt VM %s: %w", h.ID, err)
	}
	d.jail.Users.Hold(h.UID)
	i := newInstance(d, h, p)
	i.raw = append(hypervisor.Handle(nil), raw...)
	if i.shares, err = openServers(h); err != nil {
		i.lost <- err.Error() // the instance ends at once, and says why
	}
	i.run(ctx, nil)
	return i, nil
}

// answers reports whether a later run of the VM listens in dir. If so, the files there do not belong to the ended run.
func answers(ctx context.Context, dir string) bool {
	conn, err := jail.Dial(ctx, dir, qmpSocket)
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

// LastExit implements hypervisor.ExitTeller.
func (d *Driver) LastExit(_ context.Context, raw hypervisor.Handle) (hypervisor.Exit, error) {
	h, err := decodeHandle(raw)
	if err != nil {
		return hypervisor.Exit{}, err
	}
	reason, err := jail.ReadEnd(h.Dir, h.PID, h.Start)
	if err != nil {
		return hypervisor.Exit{}, fmt.Errorf("VM %s: %w", h.ID, err)
	}
	if reason == "" {
		return hypervisor.Exit{}, errdefs.NotFoundf("the end of VM %s was not recorded", h.ID)
	}
	return ended(reason), nil
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
