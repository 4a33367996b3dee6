package qemu

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
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
			err = errors.Join(err, endServers(ctx, h), d.clear(h.ID, h.Dir, h.Cgroup))
		}
		return nil, fmt.Errorf("adopt VM %s: %w", h.ID, err)
	}
	d.holdUID(h.UID)
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
	conn, err := dialUnix(ctx, dir, qmpSocket)
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
	reason, err := h.readNote()
	if err != nil {
		return hypervisor.Exit{}, fmt.Errorf("VM %s: %w", h.ID, err)
	}
	if reason == "" {
		return hypervisor.Exit{}, errdefs.NotFoundf("the end of VM %s was not recorded", h.ID)
	}
	return ended(reason), nil
}

// Reap implements hypervisor.Driver. A process is ours if it is in one of the VM's cgroups. It is there from its first instruction, so
// no crash of the daemon can hide it. On hosts without a cgroup tree it is ours if it runs as one of our users and has the VM's
// UUID as the value of its -uuid option. Both are set only when it becomes QEMU. Until then it holds the daemon's lock, which
// it inherited, so the next daemon cannot run yet.
func (d *Driver) Reap(ctx context.Context, id vm.ID, dir string) error {
	want := uuidOf(id)
	found, err := proc.Find(func(pid int, args []string) bool {
		if !follows(args, "-uuid", want) && !slices.Contains(args, marker(want)) {
			return false
		}
		uid, err := proc.UID(pid)
		return err == nil && d.ownUID(uid)
	})
	groups, gerr := d.cgroupsOf(dir, nil)
	born, berr := groups.processes(id)
	err = errors.Join(err, gerr, berr)
	for _, p := range append(found, born...) {
		err = errors.Join(err, p.Kill(ctx), p.Close())
	}
	if err == nil {
		err = d.clear(id, dir, nil)
	}
	if err != nil {
		return fmt.Errorf("reap VM %s: %w", id, err)
	}
	return nil
}

// Seek implements hypervisor.Seeker with one scan of all processes.
func (d *Driver) Seek(ctx context.Context, ids []vm.ID) (map[vm.ID][]int, error) {
	byUUID := make(map[string]vm.ID, len(ids))
	for _, id := range ids {
		byUUID[uuidOf(id)] = id
	}
	found := map[vm.ID][]int{}
	note := func(id vm.ID, p *proc.Process) error {
		if !slices.Contains(found[id], p.PID()) {
			found[id] = append(found[id], p.PID())
		}
		return p.Close()
	}
	owners := map[int]vm.ID{}
	all, err := proc.Find(func(pid int, args []string) bool {
		id, ok := byUUID[after(args, "-uuid")]
		if !ok {
			id, ok = byUUID[marked(args)]
		}
		if !ok {
			return false
		}
		owners[pid] = id
		uid, err := proc.UID(pid)
		return err == nil && d.ownUID(uid)
	})
	for _, p := range all {
		err = errors.Join(err, note(owners[p.PID()], p))
	}
	for _, id := range ids {
		born, gerr := d.cgroups().processes(id)
		err = errors.Join(err, gerr, ctx.Err())
		for _, p := range born {
			err = errors.Join(err, note(id, p))
		}
	}
	if err != nil {
		return found, fmt.Errorf("look for processes of VMs: %w", err)
	}
	return found, nil
}

// after returns the argument that follows option, "" if there is none.
func after(args []string, option string) string {
	for i := 1; i < len(args); i++ {
		if args[i-1] == option {
			return args[i]
		}
	}
	return ""
}

func follows(args []string, option, value string) bool {
	for i := 1; i < len(args); i++ {
		if args[i-1] == option && args[i] == value {
			return true
		}
	}
	return false
}
