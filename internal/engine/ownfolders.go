package engine

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file shares folders of the node with a sandbox while it runs: those of one container, as long as the sandbox has it. They are
// mounted in the one folder that the guest shares with the node.

// folderPlugger returns what shares folders with the running guest of m.
func (m *machine) folderPlugger() (hypervisor.FolderPlugger, error) {
	run := m.run.Load()
	if run == nil {
		return nil, errdefs.Preconditionf("its process has ended")
	}
	plugger, ok := hypervisor.As[hypervisor.FolderPlugger](run.Inst)
	if !ok {
		return nil, errdefs.Unsupportedf("driver %s cannot share folders with a running VM", m.record().Driver)
	}
	return plugger, nil
}

// ownShares returns the folders that only c has, by the index of their volume.
// Errors: as of node.allowed, Unsupported for a VM that is no sandbox, FailedPrecondition if one is missing.
func (m *machine) ownShares(c vm.Container) (map[int]hypervisor.Share, error) {
	if len(c.Volumes) > 0 && !m.record().Spec.Sandbox {
		return nil, errdefs.Unsupportedf("it is no sandbox, so a container that is added has no volumes of its own")
	}
	out := map[int]hypervisor.Share{}
	for i, v := range c.Volumes {
		if v.Dir == nil {
			continue
		}
		s, err := m.shareOf(m.record().Owner, *v.Dir)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		out[i] = s
	}
	return out, nil
}

// shareOwn shares the folders of a container on record. Idempotent.
func (m *machine) shareOwn(ctx context.Context, c vm.Container) error {
	shares, err := m.ownShares(c)
	if err != nil || len(shares) == 0 {
		return err
	}
	plugger, err := m.folderPlugger()
	if err != nil {
		return err
	}
	for _, i := range slices.Sorted(maps.Keys(shares)) {
		s := shares[i]
		if err := plugger.PlugFolder(ctx, filepath.Join(m.dirs.shared(m.id), vm.SharedPath(c.Name, i)), s); err != nil {
			return fmt.Errorf("volume %s: %w", c.Volumes[i].Name, err)
		}
	}
	return nil
}

// Share implements session.VM. The folders of a guest that has only been without the device are mounted still, and may not exist any more where they
// came from.
func (g guestVM) Share(ctx context.Context) error {
	plugger, err := g.folderPlugger()
	if err != nil {
		return err
	}
	r := g.record()
	for _, e := range r.Ephemeral {
		if r.Resume == nil || e.Record.Status.State == vm.ContainerTerminated {
			continue
		}
		if err := g.shareOwn(ctx, e.Spec); err != nil {
			return fmt.Errorf("container %s: %w", e.Record.Name, err)
		}
	}
	return plugger.PlugShare(ctx, vm.SharedTag)
}

// unshareOwn ends what shareOwn does. Idempotent.
func (m *machine) unshareOwn(ctx context.Context, c vm.Container) error {
	if !slices.ContainsFunc(c.Volumes, func(v vm.Volume) bool { return v.Dir != nil }) {
		return nil
	}
	plugger, err := m.folderPlugger()
	if err != nil {
		return err
	}
	for i := range c.Volumes {
		if c.Volumes[i].Dir == nil {
			continue
		}
		if err := plugger.UnplugFolder(ctx, filepath.Join(m.dirs.shared(m.id), vm.SharedPath(c.Name, i))); err != nil {
			return fmt.Errorf("volume %s: %w", c.Volumes[i].Name, err)
		}
	}
	return nil
}
