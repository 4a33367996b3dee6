package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file keeps the states of VMs whose pods were deleted with the deletion policy hibernate. The state is a snapshot on this
// node; see podsnapshots.States.Keep. It is kept for as long as this node has the claim of the VM. The API server's garbage
// collector deletes the claim with the controller of the pod, whatever kind that is, so the node needs no right to read it.

// retention hibernates the VM of a pod that is being deleted.
type retention struct {
	base
	kept   vm.ID // the VM whose state was kept
	gone   bool  // the owner of the state is gone
	saving retryTask
}

// first hibernates rec and keeps its state, if the pod's policy asks for that and its owner exists. Until the state is durable
// it returns false and when to retry. Meanwhile the VM stays, and the pod is Terminating.
func (k *retention) first(ctx context.Context, rec *vm.Record) (turn, bool) {
	pod := k.look().pod
	if !contract.HibernatesOnDelete(pod.Annotations) || k.states == nil || k.Placements == nil || k.kept == rec.ID {
		return whenWoken, true
	}
	if left := k.saving.left(); left > 0 {
		return after(left), false
	}
	stage := eventHibernateFailed
	claimed, err := k.claimFirst(ctx, pod)
	if err == nil && claimed {
		return after(claimSettles), false
	}
	if err == nil {
		stage, err = k.keep(ctx, rec)
	}
	switch {
	case ctx.Err() != nil:
		return atOnce, false
	case err == nil:
		k.saving, k.kept = retryTask{}, rec.ID
		return whenWoken, true
	}
	k.Metrics.done("hibernate", err)
	if k.saving.failed(err) {
		k.event(corev1.EventTypeWarning, stage, "VM %s cannot be hibernated, so it is not removed (to give its state up, set the annotation %s to %s): %s",
			k.vmName, contract.KeyDeletionPolicy, contract.DeleteRemoves, err)
		k.log.Warn("vm not hibernated, so it is not removed", "vm", rec.ID, "op", stage, "err", err)
	}
	return after(k.saving.left()), false
}

// claimFirst claims the node for the VM, if the VM has no claim and this process has not seen one. The annotation may be newer than
// the VM, and the API server may not have answered since, so the absence does not mean that the owner is gone. It returns true if it
// has created a claim. If the owner is gone, the garbage collector deletes that claim, too, before claimSettles has passed. A node
// cannot claim anything for a pod whose object is gone.
func (k *retention) claimFirst(ctx context.Context, pod *corev1.Pod) (bool, error) {
	if k.claimed || k.writer.lost() || len(convert.Check(pod)) > 0 || placement.Check(pod) != "" {
		return false, nil
	}
	_, found, err := k.Placements.Holder(ctx, k.owner.Namespace, k.vmName)
	if err != nil || found {
		k.claimed = found
		return false, err
	}
	if err := k.Placements.Hold(ctx, pod); err != nil {
		return false, err
	}
	k.claimed = true
	return true, nil
}

// claimSettles is how long the garbage collector has to delete a claim whose owner does not exist.
const claimSettles = 10 * time.Second

// keep hibernates rec and keeps its state. On failure it returns the failed step, as the reason for an Event. A guest that is
// not up has no state of its own yet: what it resumes from is kept already. A guest that has ended has none any more.
func (k *retention) keep(ctx context.Context, rec *vm.Record) (failed string, err error) {
	if rec.State == vm.StateRunning {
		switch wanted, err := k.wanted(ctx); {
		case err != nil || !wanted:
			return eventHibernateFailed, err
		case !podstatus.Up(rec) || !hasIdentity(rec, true):
			return "", nil
		}
		if err := k.states.Check(ctx); err != nil {
			return eventHibernateFailed, err
		}
		got, err := k.states.Hibernate(ctx, rec)
		if err != nil {
			return eventHibernateFailed, err
		}
		rec = k.take(got)
		k.Metrics.done("hibernate", nil)
	}
	if rec.State != vm.StateHibernated {
		return "", nil
	}
	// The owner may have gone while the guest was saved. Then the state goes with the VM.
	if wanted, err := k.wanted(ctx); err != nil || !wanted {
		return eventHibernateFailed, err
	}
	if failed, err = k.states.Keep(ctx, rec); err != nil {
		return failed, err
	}
	k.keeper.saw(k.vmKey())
	k.event(corev1.EventTypeNormal, eventHibernated, "VM %s is hibernated; the next pod %s resumes it", k.vmName, k.look().pod.Name)
	k.log.Info("vm hibernated before its removal", "vm", rec.ID)
	return "", nil
}

// wanted reports whether the state of the VM is kept, because its owner exists. If not, it removes a state that was kept
// earlier.
func (k *retention) wanted(ctx context.Context) (bool, error) {
	node, found, err := k.Placements.Holder(ctx, k.owner.Namespace, k.vmName)
	if err != nil || found && node == k.cfg.Node.Name {
		return err == nil, err
	}
	if !k.gone {
		k.event(corev1.EventTypeNormal, eventStateDropped, "The state of VM %s is not kept, %s", k.vmName, whyDropped(found))
	}
	k.gone = true
	if err = k.states.DropKept(ctx, !found); errdefs.IsFailedPrecondition(err) { // an earlier process has kept it, and rec is in it
		err = nil
	}
	return false, err
}

// whyDropped says why a node does not keep the state of a VM that another node has claimed, or none.
func whyDropped(found bool) string {
	if found {
		return "because another node has claimed the VM (VMPlacement)"
	}
	return "because the VM has no VMPlacement, so its owner is gone"
}

// removed drops what is left of the state when the VM is removed and the owner is gone.
func (k *retention) removed(ctx context.Context) {
	if !k.gone {
		return
	}
	if err := k.states.DropKept(ctx, false); err != nil && ctx.Err() == nil {
		k.log.Warn("kept state of vm not removed, the node tries again", "err", err)
	}
}

// keepsState reports whether the VM hibernates at the deletion of its pod.
func keepsState(rec vm.Record) bool {
	return rec.Spec.Labels[contract.VMLabelHibernate] == "true" && !rec.StartedAt.IsZero()
}

// keepOrphan hibernates a VM whose pod is gone and keeps its state, if a label of the VM requires that and its owner exists.
func (c *common) keepOrphan(ctx context.Context, states *podsnapshots.States, rec vm.Record) error {
	if !keepsState(rec) || states == nil || c.Placements == nil {
		return nil
	}
	node, found, err := c.Placements.Holder(ctx, ownerOfVM(rec).Namespace, rec.Spec.Name)
	if err != nil || !found || node != c.cfg.Node.Name {
		return err
	}
	if podstatus.Up(&rec) && hasIdentity(&rec, true) {
		if rec, err = states.Hibernate(ctx, &rec); err != nil {
			return err
		}
	}
	if rec.State == vm.StateHibernated {
		_, err = states.Keep(ctx, &rec)
	}
	return err
}

// sweepKept removes kept states whose owners are gone until ctx ends.
func (p *Provider) sweepKept(ctx context.Context) {
	if p.Placements == nil {
		return
	}
	for pauses.Sleep(ctx, nil, sweepPeriod, false) {
		states, err := p.node.snapshots.Kept(ctx)
		if err != nil && ctx.Err() == nil {
			p.Log.Warn("kept states of vms not listed", "err", err)
		}
		for _, s := range states {
			if err := p.sweepOne(ctx, s); err != nil && ctx.Err() == nil {
				p.Log.Warn("kept state of vm not checked", "vm", s.Owner.Qualify(s.VM), "err", err)
			}
		}
		p.sweepFirmware(ctx)
	}
}

// firmwareKeeper is a Runtime that keeps what the firmware of removed VMs has written.
type firmwareKeeper interface {
	KeptFirmware(ctx context.Context) ([]vm.KeptFirmware, error)
	DropFirmware(ctx context.Context, k vm.KeptFirmware) error
}

// sweepFirmware removes what the firmware of VMs has kept whose claims this node no longer has.
func (p *Provider) sweepFirmware(ctx context.Context) {
	keeper, ok := p.node.runtime.(firmwareKeeper)
	if !ok {
		return
	}
	all, err := keeper.KeptFirmware(ctx)
	for _, k := range all {
		if k.Owner.Operator() {
			continue // a person has asked for it
		}
		gone, _, e := p.unclaimed(ctx, k.Owner, k.VM)
		if e == nil && gone {
			e = keeper.DropFirmware(ctx, k)
		}
		if e != nil && !errdefs.IsNotFound(e) && err == nil {
			err = e
		}
	}
	if err != nil && ctx.Err() == nil {
		p.Log.Warn("kept state of firmware not checked", "err", err)
	}
}

// unclaimed reports whether this node need not keep what it has of a VM any more: the VM has no pod and does not exist, and gone is true if
// the node has no claim of it. found says that another node has one.
func (p *Provider) unclaimed(ctx context.Context, owner vm.Owner, name string) (gone, found bool, err error) {
	if p.index.holds(owner.Qualify(name)) {
		return false, false, nil
	}
	if _, err := p.on(owner).named(ctx, name); err == nil || !errdefs.IsNotFound(err) {
		return false, false, err
	}
	node, found, err := p.Placements.Holder(ctx, owner.Namespace, name)
	if err != nil {
		return false, found, err
	}
	if found && node == p.cfg.Node.Name {
		p.keeper.saw(owner.Qualify(name))
		return false, true, nil
	}
	return true, found, nil
}

// sweepOne removes a kept state if this node no longer has the claim of its VM. It leaves the states of VMs that have a pod or
// exist to their workers.
func (p *Provider) sweepOne(ctx context.Context, s podsnapshots.KeptState) error {
	key := s.Owner.Qualify(s.VM)
	gone, found, err := p.unclaimed(ctx, s.Owner, s.VM)
	if err != nil || !gone {
		return err
	}
	states := p.node.snapshots.States(podsnapshots.Owner{Owner: s.Owner, VM: s.VM, Log: p.Log})
	err = states.DropKept(ctx, !found && p.keeper.recent(key))
	if err == nil {
		p.Log.Info("kept state of vm removed, its owner is gone", "vm", key)
		at := corev1.ObjectReference{APIVersion: v1.GroupVersion.String(), Kind: "VMPlacement", Namespace: s.Owner.Namespace, Name: s.VM}
		p.Recorder.Eventf(&at, corev1.EventTypeNormal, eventStateDropped, "The state of VM %s is not kept any more, %s", s.VM, whyDropped(found))
		p.keeper.forget(key)
	}
	return err
}
