package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// tearDown removes the pod's VM: it shuts the VM down within the grace, then removes it. It returns true when the VM is
// gone, otherwise when to retry. The caller's ctx is cancelled when a shorter grace is wanted.
func (w *worker) tearDown(ctx context.Context, r removal) (turn, bool) {
	const again = turn(time.Second)
	w.health.Stop()
	w.stopKeeper()
	if !r.confirmed {
		switch gone, leaving, err := w.askServer(ctx); {
		case err != nil:
			if ctx.Err() == nil {
				w.log.Warn("pod not looked up before removing its vm", "err", err)
			}
			return again, false
		case gone:
			w.writer.stop() // no object is left to write to
		case !leaving:
			w.keep(r)
			return atOnce, false
		}
	}
	if w.static {
		return whenWoken, true
	}
	rec, err := w.findVM(ctx)
	if err != nil {
		if ctx.Err() == nil {
			w.log.Warn("vm not found out", "err", err)
		}
		return again, false
	}
	if rec == nil {
		return whenWoken, true
	}
	if wait, ok := w.saveFirst(ctx, rec); !ok {
		return wait, false
	}
	if rec.State == vm.StateRunning {
		// No Event is sent: the API object already shows the deletion and is gone a moment later. Events are for what
		// nobody asked for.
		grace := r.grace
		if !podstatus.Up(rec) {
			grace = 0 // nothing runs in it yet that could shut down
		}
		pod, _, _ := w.look()
		got, err := w.vms.Stop(ctx, string(rec.ID), w.health.PreStop(ctx, pod, rec, grace))
		switch {
		case ctx.Err() != nil:
			return atOnce, false
		case err == nil:
			w.again = false
			w.take(got)
			w.publish(0)
		case !errdefs.IsNotFound(err):
			w.log.Warn("vm not stopped, removing it by force", "vm", rec.ID, "err", err)
		}
	}
	err = w.vms.Remove(ctx, string(rec.ID), true)
	if ctx.Err() != nil {
		return atOnce, false
	}
	if err != nil && !errdefs.IsNotFound(err) {
		w.event(corev1.EventTypeWarning, eventFailedKill, "error killing pod: %s", err)
		w.log.Warn("vm not removed", "vm", rec.ID, "err", err)
		w.p.Metrics.done("delete", err)
		return again, false
	}
	if w.states != nil && len(rec.SnapshotIDs) > 0 { // one may be the snapshot for its forks, which is of no use without the VM
		w.states.DropFork(ctx, w.vmName)
	}
	w.dropTag(ctx)
	w.dropForks(ctx)
	w.p.Metrics.done("delete", nil)
	w.log.Info("vm removed", "vm", rec.ID)
	return whenWoken, true
}

// askServer asks the API server itself whether the pod is gone or is being deleted. A cache is never a reason to destroy
// anything.
func (w *worker) askServer(ctx context.Context) (gone, leaving bool, err error) {
	pod, err := w.writer.lookUp(ctx)
	switch {
	case err != nil:
		return false, false, err
	case pod == nil:
		return true, true, nil
	}
	return pod.UID != w.uid, pod.DeletionTimestamp != nil, nil
}

// keep withdraws the removal r.
func (w *worker) keep(r removal) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.removal != nil && *w.removal == r {
		w.removal = nil
	}
}

// findVM returns the pod's VM, also one that an interrupted Launch left; nil when there is none.
func (w *worker) findVM(ctx context.Context) (*vm.Record, error) {
	_, rec, _ := w.look()
	ref := w.vmName
	if rec != nil {
		ref = string(rec.ID)
	}
	got, err := w.vms.Inspect(ctx, ref)
	switch {
	case errdefs.IsNotFound(err) || errdefs.IsInvalid(err): // a name that is invalid for a VM has no VM
		return nil, nil
	case err != nil:
		return nil, err
	case rec == nil && got.Spec.Labels[contract.VMLabelPodUID] != string(w.uid):
		return nil, nil
	}
	return w.take(got), nil
}

// depart writes the last status and then deletes the pod's object. It does not wait for the rest of the grace, which would
// help nobody. It keeps trying while the API server does not answer.
func (w *worker) depart(ctx context.Context) {
	defer w.p.leaving.done(w.uid)
	defer w.writer.stop()
	if w.writer.flush(ctx) != nil || w.writer.lost() {
		return
	}
	_ = pauses.Growing(100*time.Millisecond, 10*time.Second, pauses.Many).DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := w.writer.erase(ctx)
		if err != nil && ctx.Err() == nil {
			w.log.Warn("pod not deleted", "err", err)
		}
		return err == nil, nil
	})
}
