package podprovider

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// bringUp creates the pod's VM from an image or from a snapshot, or resumes it from elsewhere.
type bringUp struct {
	base
	asleep *hibernation
	pulls  pulls

	prior    *podState        // had the VM name before; nil: nobody
	claimed  bool             // this node has claimed the VM's state
	launched time.Time        // when this process requested the VM; zero when adopted
	mode     string           // how this process created the VM
	lacking  []convert.Absent // missing references that were already reported
}

// createAndStart creates and starts the pod's VM, or finds out why that is not possible.
func (b *bringUp) createAndStart(ctx context.Context, pod *corev1.Pod) turn {
	if errs := convert.Check(pod); len(errs) > 0 {
		b.refuse(reasonNotSupported, errs.ToAggregate().Error())
		return whenWoken
	}
	if b.remote() && (contract.AsksSnapshot(pod.Annotations) || contract.ComesBack(pod.Annotations)) && !contract.Pushable(b.vmName) {
		b.refuse(reasonNotSupported, "the VM name "+b.vmName+" is not a valid repository name, and the state of the VM is stored under that name; use lower-case letters and digits, with single . _ - between them")
		return whenWoken
	}
	if b.prior != nil {
		if b.prior.look().removal != nil {
			b.publish(b.cfg.Settle)
			select {
			case <-b.prior.freed:
			case <-ctx.Done():
				return atOnce
			}
		}
		b.prior = nil
	}
	if again, ok := b.claim(ctx, pod); !ok {
		return again
	}
	at, sleeps, err := b.asleep.elsewhere(ctx, pod)
	switch {
	case err != nil:
		reason, _ := waiting(err)
		return b.retry(ctx, reason, err, retryTaskFirst, retryTaskMost)
	case sleeps:
		if contract.Hibernate(pod.Annotations) {
			if _, err := b.named(ctx, b.vmName); err != nil {
				return b.asleep.sleeps("")
			}
		}
		return b.wakeRemote(ctx, pod, at)
	}
	if origin := convert.OriginOf(pod); !origin.Boots() {
		return b.cloneUp(ctx, pod, origin)
	}
	return b.boot(ctx, pod)
}

// claim claims this node for a VM that must stay on the node that holds its state, before anything of the VM is created.
// While there is no claim, it returns false and when to retry.
func (b *bringUp) claim(ctx context.Context, pod *corev1.Pod) (turn, bool) {
	ask, _ := contract.ParseSticky(pod.Annotations)
	switch {
	case !ask.Asked || b.claimed:
		return whenWoken, true
	case b.Placements == nil:
		b.refuse(reasonNotSupported, "the VM must stay on its node ("+contract.KeySticky+"), but this node cannot create VMPlacements")
		return whenWoken, false
	}
	if why := placement.Check(pod); why != "" {
		b.refuse(reasonNotSupported, why)
		return whenWoken, false
	}
	if err := b.Placements.Hold(ctx, pod); err != nil {
		reason := reasonUnclaimed
		if errdefs.IsFailedPrecondition(err) {
			reason = reasonElsewhere
		}
		return b.retry(ctx, reason, err, time.Second, 30*time.Second), false
	}
	b.claimed = true
	b.succeeded()
	return whenWoken, true
}

// boot creates the pod's VM from its image.
func (b *bringUp) boot(ctx context.Context, pod *corev1.Pod) turn {
	spec, reason, err := b.resolve(ctx, pod)
	if err != nil {
		return b.retry(ctx, reason, err, time.Second, 30*time.Second)
	}
	b.publish(b.cfg.Settle)
	if again, ok := b.pulls.pull(ctx, pod); !ok {
		return again
	}
	rec, err := b.once(ctx, func() (vm.Record, error) {
		rec, err := b.vms.Launch(ctx, spec)
		if err == nil {
			b.volumes.Launched(spec.Volumes)
		}
		return rec, err
	})
	return b.created(ctx, rec, err, modeRun, b.cfg.BackoffBase, b.cfg.BackoffMax)
}

// once calls create unless a VM of our name exists: the pod's own, or one that the operator offers.
func (b *bringUp) once(ctx context.Context, create func() (vm.Record, error)) (vm.Record, error) {
	if b.launched.IsZero() {
		b.launched = time.Now()
	}
	switch _, err := b.named(ctx, b.vmName); {
	case err == nil:
		return b.occupied(ctx, create)
	case !errdefs.IsNotFound(err):
		return vm.Record{}, err
	}
	rec, err := create()
	if errdefs.IsAlreadyExists(err) {
		return b.occupied(ctx, create)
	}
	return rec, err
}

// created handles the outcome of a creation. A failure that may pass is retried after first, then after growing pauses.
func (b *bringUp) created(ctx context.Context, rec vm.Record, err error, mode string, first, most time.Duration) turn {
	if ctx.Err() != nil {
		return atOnce // removal requested, or the node stops; a VM that was created is found by its label
	}
	b.Metrics.done("create", err)
	reason, never := waiting(err)
	switch {
	case err == nil:
		b.succeeded()
		b.mode = mode
		b.take(rec)
		if mode == modeClone {
			b.log.Info("vm cloned", "vm", rec.ID, "snapshot", rec.Snapshot)
		} else {
			b.log.Info("vm launched", "vm", rec.ID)
		}
		return atOnce
	case never:
		b.refuse(reason, err.Error())
		return whenWoken
	}
	return b.retry(ctx, reason, err, first, most)
}

// occupied handles a VM that already has our name: our own earlier VM, the leftover of a pod that is gone, a VM that was
// made by hand for this pod, or the VM of another pod of the namespace.
func (b *bringUp) occupied(ctx context.Context, anew func() (vm.Record, error)) (vm.Record, error) {
	rec, err := b.vms.Inspect(ctx, b.vmName)
	if err != nil {
		return vm.Record{}, errdefs.Unavailablef("VM %s: the name is taken, but no VM of that name is found: %v", b.vmName, err)
	}
	label := rec.Spec.Labels
	switch uid := label[contract.VMLabelPodUID]; {
	case uid == string(b.uid) && (rec.State != vm.StateError || !rec.StartedAt.IsZero()):
		return rec, nil
	case uid == string(b.uid): // it never came up
	case uid == "" && b.may(rec):
		if other := b.index.reserve(b.podState, rec.ID); other != nil {
			return vm.Record{}, errdefs.Unavailablef("the VM name %s is taken by pod %s", b.vmName, other.key)
		}
		b.event(corev1.EventTypeNormal, eventAdopted, "Adopted the existing VM %s", b.vmName)
		if rec.State == vm.StateStopped || rec.State == vm.StateCreated {
			return b.vms.Start(ctx, string(rec.ID))
		}
		return rec, nil
	case uid == "" || label[contract.VMLabelNode] != b.cfg.Node.Name || b.index.withUID(types.UID(uid)) != nil:
		return vm.Record{}, errdefs.Unavailablef("the VM name %s is taken by pod %s/%s", b.vmName, label[contract.VMLabelPodNamespace], label[contract.VMLabelPodName])
	case b.cfg.Orphans != OrphanDestroy && !rec.StartedAt.IsZero(): // nobody has given up the VM's content
		return vm.Record{}, leftover{errdefs.Unavailablef("VM %s (%s) of the deleted pod %s/%s is still on node %s, and the orphan policy %q does not remove it; "+
			"if you need it, save it there with `cocoon snapshot save --name NAME %[2]s`; then remove it with `cocoon vm rm --force %[2]s`, or set VK_ORPHAN_POLICY=destroy",
			b.vmName, rec.ID, label[contract.VMLabelPodNamespace], label[contract.VMLabelPodName], b.cfg.Node.Name, b.cfg.Orphans)}
	}
	b.log.Info("removing leftover vm", "vm", rec.ID)
	if err := b.removeOrphan(ctx, rec); err != nil {
		return vm.Record{}, err
	}
	return anew()
}

// start starts a VM that was created but never ran.
func (b *bringUp) start(ctx context.Context, rec *vm.Record) turn {
	got, err := b.vms.Start(ctx, string(rec.ID))
	if err != nil {
		return b.retry(ctx, reasonRunError, err, b.cfg.BackoffBase, b.cfg.BackoffMax)
	}
	b.take(got)
	return atOnce
}

// announce reports once per run that the guest is up.
func (b *bringUp) announce(rec *vm.Record) {
	if b.told.Equal(rec.StartedAt) {
		return
	}
	b.told = rec.StartedAt
	pod := b.look().pod
	if len(pod.Spec.Containers) > 0 {
		kind := "image"
		if b.images[convert.Image(pod)].local {
			kind = "local image"
		}
		what := "container " + pod.Spec.Containers[0].Name
		if n := len(rec.Containers); n > 0 {
			what = fmt.Sprintf("%d containers", n)
		}
		b.event(corev1.EventTypeNormal, eventStarted, "Created and started %s as VM %s from %s %s", what, rec.Spec.Name, kind, rec.Spec.Image)
	}
	if left := convert.Ignored(pod); len(left) > 0 && rec.Restarts == 0 {
		b.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "These settings have no effect in this VM: %s", strings.Join(left, ", "))
	}
	if empty := emptyVolumes(rec); rec.ImageType == vm.ImageDisk && len(empty) > 0 && rec.Restarts == 0 {
		b.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "emptyDir %s not mounted, because the image of this VM boots its own system; use the disk of the VM", strings.Join(empty, ", "))
	}
	if !b.launched.IsZero() {
		b.Metrics.booted(b.mode, rec.Driver, time.Since(b.launched))
		b.launched = time.Time{}
	}
}
