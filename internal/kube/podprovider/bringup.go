package podprovider

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// createAndStart creates and starts the pod's VM, or finds out why that is not possible.
func (w *worker) createAndStart(ctx context.Context, pod *corev1.Pod) turn {
	if errs := convert.Check(pod); len(errs) > 0 {
		w.refuse(reasonNotSupported, errs.ToAggregate().Error())
		return whenWoken
	}
	if w.p.remote() && (contract.AsksSnapshot(pod.Annotations) || contract.ComesBack(pod.Annotations)) && !contract.Pushable(w.vmName) {
		w.refuse(reasonNotSupported, "the VM name "+w.vmName+" cannot be that of a repository, in which its state would be kept; use small letters, digits and single . _ - between them")
		return whenWoken
	}
	if w.prior != nil {
		if w.prior.leaving() {
			w.publish(w.p.cfg.Settle)
			if !await(ctx, w.prior.freed) {
				return atOnce
			}
		}
		w.prior = nil
	}
	if again, ok := w.claim(ctx, pod); !ok {
		return again
	}
	at, sleeps, err := w.elsewhere(ctx, pod)
	switch {
	case err != nil:
		reason, _ := waiting(err)
		return w.retry(ctx, reason, err, retryTaskFirst, retryTaskMost)
	case sleeps && contract.Hibernate(pod.Annotations) && !w.here(ctx):
		return w.sleeps("")
	case sleeps:
		return w.wakeRemote(ctx, pod, at)
	}
	if origin := convert.OriginOf(pod); !origin.Boots() {
		return w.cloneUp(ctx, pod, origin)
	}
	return w.boot(ctx, pod)
}

// claim claims this node for a VM that must stay on the node that holds its state, before anything of the VM is created.
// While there is no claim, it returns false and when to retry.
func (w *worker) claim(ctx context.Context, pod *corev1.Pod) (turn, bool) {
	ask, _ := contract.ParseSticky(pod.Annotations)
	switch {
	case !ask.Asked || w.claimed:
		return whenWoken, true
	case w.p.Placements == nil:
		w.refuse(reasonNotSupported, "the VM is to stay on its node ("+contract.KeySticky+"), but this node cannot claim VMs")
		return whenWoken, false
	}
	if why := placement.Check(pod); why != "" {
		w.refuse(reasonNotSupported, why)
		return whenWoken, false
	}
	if err := w.p.Placements.Hold(ctx, pod); err != nil {
		reason := reasonUnclaimed
		if errdefs.IsFailedPrecondition(err) {
			reason = reasonElsewhere
		}
		return w.retry(ctx, reason, err, time.Second, 30*time.Second), false
	}
	w.claimed, w.tries, w.pause = true, wait.Backoff{}, podstatus.Pause{}
	return whenWoken, true
}

// boot creates the pod's VM from its image.
func (w *worker) boot(ctx context.Context, pod *corev1.Pod) turn {
	spec, reason, err := w.resolve(ctx, pod)
	if err != nil {
		return w.retry(ctx, reason, err, time.Second, 30*time.Second)
	}
	w.publish(w.p.cfg.Settle)
	if again, ok := w.pull(ctx, pod); !ok {
		return again
	}
	if w.launched.IsZero() {
		w.launched = time.Now()
	}
	rec, err := w.launchOnce(ctx, spec)
	if ctx.Err() != nil {
		return atOnce // removal requested, or the node stops; a VM that was created is found by its label
	}
	if err == nil {
		w.tries, w.pause, w.mode = wait.Backoff{}, podstatus.Pause{}, modeRun
		w.p.Metrics.done("create", nil)
		w.take(rec)
		w.log.Info("vm launched", "vm", rec.ID)
		return atOnce
	}
	w.p.Metrics.done("create", err)
	reason, never := waiting(err)
	if never {
		w.refuse(reason, err.Error())
		return whenWoken
	}
	return w.retry(ctx, reason, err, w.p.cfg.BackoffBase, w.p.cfg.BackoffMax)
}

// launchOnce creates a VM unless one of that name exists: the pod's own, or one that the operator offers.
func (w *worker) launchOnce(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	launch := func() (vm.Record, error) { return w.launch(ctx, spec) }
	switch _, err := w.named(ctx, w.vmName); {
	case err == nil:
		return w.occupied(ctx, launch)
	case !errdefs.IsNotFound(err):
		return vm.Record{}, err
	}
	rec, err := launch()
	if errdefs.IsAlreadyExists(err) {
		return w.occupied(ctx, launch)
	}
	return rec, err
}

func await(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return false
	}
}

// refuse ends the pod before anything was done for it.
func (w *worker) refuse(reason, message string) {
	w.log.Warn("pod refused", "err", message)
	w.verdict = &podstatus.Verdict{Reason: reason, Message: message}
	w.event(corev1.EventTypeWarning, reason, "%s", message)
	w.p.Metrics.lifecycle.WithLabelValues("create", "refused").Inc()
	w.publish(0)
}

// retry shows why the container waits and returns when to try again: after base, then twice as long each time.
func (w *worker) retry(ctx context.Context, reason string, err error, base, most time.Duration) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if w.pause.Reason != reason || w.pause.Message != err.Error() {
		kind := eventFailed
		if reason == reasonImageMissing {
			kind = reasonImageMissing
		}
		if reason == podstatus.ReasonCreating { // the error is complete without the reason
			w.event(corev1.EventTypeWarning, eventFailedMount, "%s", err)
		} else {
			w.event(corev1.EventTypeWarning, kind, "Error: %s: %s", reason, err)
		}
		w.log.Warn("vm not brought up", "op", reason, "err", err)
	}
	w.pause = podstatus.Pause{Reason: reason, Message: err.Error()}
	w.publish(0)
	return after(step(&w.tries, base, most))
}

// occupied handles a VM that already has our name: our own earlier VM, the leftover of a pod that is gone, a VM that was
// made by hand for this pod, or the VM of another pod of the namespace.
func (w *worker) occupied(ctx context.Context, anew func() (vm.Record, error)) (vm.Record, error) {
	rec, err := w.vms.Inspect(ctx, w.vmName)
	if err != nil {
		return vm.Record{}, errdefs.Unavailablef("VM %s is there and is not: %v", w.vmName, err)
	}
	label := rec.Spec.Labels
	switch uid := label[contract.VMLabelPodUID]; {
	case uid == string(w.uid) && (rec.State != vm.StateError || !rec.StartedAt.IsZero()):
		return rec, nil
	case uid == string(w.uid): // it never came up
	case uid == "" && w.may(rec):
		if other := w.p.reserve(w, rec.ID); other != nil {
			return vm.Record{}, errdefs.Unavailablef("the VM name %s is taken by pod %s", w.vmName, other.key)
		}
		w.event(corev1.EventTypeNormal, eventAdopted, "Adopted the VM %s that was there already", w.vmName)
		return w.wakeUp(ctx, rec)
	case uid == "" || label[contract.VMLabelNode] != w.p.cfg.Node.Name || w.p.alive(uid):
		return vm.Record{}, errdefs.Unavailablef("the VM name %s is taken by pod %s/%s", w.vmName, label[contract.VMLabelPodNamespace], label[contract.VMLabelPodName])
	case w.p.cfg.Orphans != OrphanDestroy && !rec.StartedAt.IsZero(): // nobody has given up the VM's content
		return vm.Record{}, leftover{errdefs.Unavailablef("VM %s (%s) of the deleted pod %s/%s is still on node %s, whose orphan policy %q leaves it alone: "+
			"save it there if it is needed (`cocoon snapshot save --name NAME %[2]s`) and remove it (`cocoon vm rm --force %[2]s`), or set VK_ORPHAN_POLICY=destroy",
			w.vmName, rec.ID, label[contract.VMLabelPodNamespace], label[contract.VMLabelPodName], w.p.cfg.Node.Name, w.p.cfg.Orphans)}
	}
	w.log.Info("removing leftover vm", "vm", rec.ID)
	if err := w.p.removeOrphan(ctx, rec); err != nil {
		return vm.Record{}, err
	}
	return anew()
}

// here reports whether a VM of our name exists on this node.
func (w *worker) here(ctx context.Context) bool {
	_, err := w.named(ctx, w.vmName)
	return err == nil
}

// named returns the VM of exactly that name; NotFound when there is none. A ref may also be the beginning of a VM's ID,
// and a name can look like one.
func (t tenant) named(ctx context.Context, name string) (vm.Record, error) {
	rec, err := t.vms.Inspect(ctx, name)
	if errdefs.IsInvalid(err) || errdefs.IsNotFound(err) || err == nil && rec.Spec.Name != name {
		return vm.Record{}, errdefs.NotFoundf("no VM of namespace %s is named %s", t.owner.Namespace, name)
	}
	return rec, err
}

// known does the same as named for a VM of another pod, which an earlier release may have created.
func (t tenant) known(ctx context.Context, name string) (rec vm.Record, err error) {
	for _, alias := range contract.Aliases(t.owner.Namespace, name) {
		if rec, err = t.named(ctx, alias); !errdefs.IsNotFound(err) {
			return rec, err
		}
	}
	return rec, err
}

// wanted returns the spec of the VM that pod asks for, with what the pod refers to in the cluster.
func (w *worker) wanted(ctx context.Context, pod *corev1.Pod) (vm.Spec, error) {
	from := podvolumes.Resolver{Client: w.p.Client}
	services, err := w.p.services(pod.Namespace)
	if err != nil {
		return vm.Spec{}, err
	}
	env, err := convert.Env(ctx, pod, w.p.cfg.Node, from, services, w.lacks)
	if err == nil {
		err = convert.CheckMounts(pod, env)
	}
	if err != nil {
		return vm.Spec{}, err
	}
	spec := convert.Spec(pod, w.p.cfg.Node, env)
	spec.CloudInit, err = convert.CloudInit(ctx, pod, from)
	return spec, err
}

// lacks reports each missing reference of the pod's environment once.
func (w *worker) lacks(a convert.Absent) {
	if !slices.Contains(w.lacking, a) {
		w.lacking = append(w.lacking, a)
		w.event(corev1.EventTypeWarning, a.Reason(), "%s", a)
	}
}

// wakeUp starts an adopted VM that does not run.
func (w *worker) wakeUp(ctx context.Context, rec vm.Record) (vm.Record, error) {
	if rec.State == vm.StateStopped || rec.State == vm.StateCreated {
		return w.vms.Start(ctx, string(rec.ID))
	}
	return rec, nil
}

// start starts a VM that was created but never ran.
func (w *worker) start(ctx context.Context, rec *vm.Record) turn {
	got, err := w.vms.Start(ctx, string(rec.ID))
	if err != nil {
		return w.retry(ctx, reasonRunError, err, w.p.cfg.BackoffBase, w.p.cfg.BackoffMax)
	}
	w.take(got)
	return atOnce
}

// announce reports once per run that the guest is up.
func (w *worker) announce(rec *vm.Record) {
	if w.told.Equal(rec.StartedAt) {
		return
	}
	w.told = rec.StartedAt
	pod, _, _ := w.look()
	if len(pod.Spec.Containers) > 0 {
		kind := "image"
		if w.images[convert.Image(pod)].local {
			kind = "local image"
		}
		what := "container " + pod.Spec.Containers[0].Name
		if n := len(rec.Containers); n > 0 {
			what = fmt.Sprintf("%d containers", n)
		}
		w.event(corev1.EventTypeNormal, eventStarted, "Created and started %s as VM %s from %s %s", what, rec.Spec.Name, kind, rec.Spec.Image)
	}
	if left := convert.Ignored(pod); len(left) > 0 && rec.Restarts == 0 {
		w.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "Without effect in this VM: %s", strings.Join(left, ", "))
	}
	if empty := emptyVolumes(rec); rec.ImageType == vm.ImageDisk && len(empty) > 0 && rec.Restarts == 0 {
		w.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "Not mounted, because this VM's image boots itself: emptyDir %s; it has its disk", strings.Join(empty, ", "))
	}
	if !w.launched.IsZero() {
		w.p.Metrics.booted(w.mode, rec.Driver, time.Since(w.launched))
		w.launched = time.Time{}
	}
}
