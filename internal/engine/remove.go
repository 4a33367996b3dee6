package engine

import (
	"context"
	"errors"
	"slices"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Remove deletes a VM with its disks, logs and addresses. A running VM is removed only with force, which kills it. If
// something cannot be removed, the VM stays in StateError and can be removed again.
func (e *Engine) Remove(caller context.Context, ref string, force bool) error {
	_, err := e.operate(caller, opRemove, ref, func(ctx context.Context, m *machine) (vm.Record, error) {
		r := m.record()
		if r.State == vm.StateRunning && !force {
			return r, errdefs.Preconditionf("it is running; stop it first, or remove it by force")
		}
		if err := e.open(ctx, m, opRemove, stepKill, nil); err != nil {
			return r, err
		}
		if err := e.durable(ctx); err != nil {
			return r, err
		}
		return r, e.remove(context.WithoutCancel(ctx), m, r.State == vm.StateError)
	})
	return err
}

// remove erases m under the open intent and forgets it.
func (e *Engine) remove(ctx context.Context, m *machine, thorough bool) error {
	err := e.erase(ctx, m, thorough)
	if err == nil {
		e.dropHibernation(ctx, m)
		err = e.forget(ctx, m)
	}
	if err != nil {
		e.fail(ctx, m, m.record().Reason, err)
	}
	return err
}

// erase removes everything that m has on this host except its record. It is idempotent. thorough is for a VM whose
// record may be incomplete: a process that nobody watches, NICs that were not recorded.
func (e *Engine) erase(ctx context.Context, m *machine, thorough bool) error {
	if r := m.run.Load(); r != nil {
		if err := kill(ctx, r); err != nil {
			return err
		}
		e.reclaim(ctx, m, r)
	} else if thorough || m.remains.Load() {
		if err := e.reap(ctx, m.record()); err != nil {
			return err
		}
	}
	nics, err := e.nicsOf(ctx, m.record(), thorough)
	if err != nil {
		return err
	}
	if err := e.detach(ctx, nics, true); err != nil {
		return err
	}
	return e.removeDirs(m.id)
}

// reap ends a process that nobody watches: the one of the handle, and any that was launched without leaving a handle.
func (e *Engine) reap(ctx context.Context, r vm.Record) error {
	d, err := e.driver(r.Driver)
	if err != nil {
		return err
	}
	if len(r.Handle) > 0 {
		inst, err := d.Adopt(ctx, hypervisor.Handle(r.Handle))
		if err == nil {
			err = errors.Join(inst.Kill(ctx), inst.Close())
		}
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsInvalid(err) {
			return err
		}
	}
	return d.Reap(ctx, r.ID, e.runDir(r.ID))
}

// nicsOf returns the NICs of r. NICs that may have been created without being recorded are asked for again: Attach
// gives the same answer for the same VM.
func (e *Engine) nicsOf(ctx context.Context, r vm.Record, thorough bool) ([]vm.NIC, error) {
	nics := r.NICs
	for i := len(nics); thorough && i < len(r.Spec.NICs); i++ {
		n := e.networks.Get(e.networkName(r.Spec.NICs[i]))
		if n == nil {
			continue // no longer configured: it sweeps its taps itself if it comes back
		}
		nic, err := n.Attach(ctx, r.ID, r.Owner.Qualify(r.Spec.Name), i, r.Spec.NICs[i])
		if errdefs.Is(err, errdefs.ResourceExhausted) {
			continue // it has no address, so it was never created
		}
		if err != nil {
			return nil, err
		}
		nics = append(slices.Clip(nics), nic) // the record's own slice stays unchanged
	}
	return nics, nil
}

// resetWidth is how many VMs Reset removes at a time.
const resetWidth = 8

// Reset removes every VM by force, and the entries of the pool. FailedPrecondition while unknown VMs are kept aside.
func (e *Engine) Reset(ctx context.Context) error {
	if err := e.life.ready(ctx); err != nil {
		return err
	}
	if n := e.StrayCount(); n > 0 {
		return errdefs.Preconditionf("%d VMs that are not on record are kept aside; look at them with `cocoon recover`, and adopt or remove each", n)
	}
	all := e.index.all()
	errs := make([]error, len(all))
	slots := make(chan struct{}, resetWidth)
	var wg sync.WaitGroup
	for i, m := range all {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := e.Remove(ctx, string(m.id), true); !errdefs.IsNotFound(err) {
				errs[i] = err
			}
		})
	}
	wg.Wait()
	e.emptyPool(ctx, "")
	return errors.Join(errs...)
}
