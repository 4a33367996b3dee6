package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/kube/podhealth"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// forgiveAfter is how long a run must last to reset the back-off, in units of the maximum back-off.
const forgiveAfter = 2

// runs restarts the pod's VM, and stops it for probes, hooks and the active deadline.
type runs struct {
	base
	restarted  time.Time    // when a managed VM was last restarted
	unanswered time.Time    // since when the engine does not answer the restart of a managed VM
	backoff    wait.Backoff // back-off before the next start
	due        time.Time    // time of the next start
	dueFor     time.Time    // time of the VM's end for which due is set
}

// stopForKill stops the VM because of s, the request of a probe or hook. A later step restarts the VM.
func (r *runs) stopForKill(ctx context.Context, pod *corev1.Pod, rec *vm.Record, s *podhealth.StopRequest) turn {
	r.health.Report(rec, s)
	r.health.Stop()
	r.publish(0)
	got, err := r.vms.Stop(ctx, string(rec.ID), r.health.PreStop(ctx, pod, rec, s.Grace(pod)))
	if ctx.Err() != nil {
		return atOnce
	}
	if err != nil {
		return r.retry(ctx, reasonRunError, err, time.Second, 30*time.Second)
	}
	r.tries, r.killed = wait.Backoff{}, rec.StartedAt
	r.take(got)
	return atOnce
}

// startAgain starts the VM again.
func (r *runs) startAgain(ctx context.Context, rec *vm.Record) error {
	r.publish(0) // report the end first, because the start takes some time
	r.last = podstatus.Terminated(rec)
	got, err := r.startVM(ctx, rec)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	r.Metrics.done("restart", err)
	if err == nil {
		r.again = false
		r.succeeded()
		r.take(got)
	}
	return err
}

// restart starts the VM again. If that fails, it returns when to retry.
func (r *runs) restart(ctx context.Context, rec *vm.Record) turn {
	err := r.startAgain(ctx, rec)
	if err == nil || ctx.Err() != nil {
		return atOnce
	}
	again := r.retry(ctx, reasonRunError, err, r.cfg.BackoffBase, r.cfg.BackoffMax)
	r.due = time.Now().Add(time.Duration(again))
	return again
}

// schedule sets the time of the next start: immediately for the first restart, then after base, 2×base … A long run resets the
// back-off.
func (r *runs) schedule(rec *vm.Record) {
	if !rec.StartedAt.IsZero() && rec.StoppedAt.Sub(rec.StartedAt) > forgiveAfter*r.cfg.BackoffMax {
		r.backoff = wait.Backoff{}
	}
	hold := r.backoff.Step() // zero for the first restart
	r.dueFor, r.due = rec.StoppedAt, time.Now().Add(hold)
	if hold > 0 {
		message := "back-off " + hold.String() + " restarting failed container"
		r.pause = podstatus.Pause{Reason: reasonCrashLoop, Message: message}
		r.event(corev1.EventTypeWarning, eventBackOff, "Back-off restarting failed container as VM %s", rec.Spec.Name)
	} else {
		r.backoff = pauses.Growing(r.cfg.BackoffBase, r.cfg.BackoffMax, 0)
	}
}

// Managed VMs are restarted in place and immediately. If a VM cannot be restarted, or ends again within restartCooldown, its
// pod is evicted, so that its controller creates it again.
const (
	restartCooldown = 30 * time.Second
	inspectFirst    = time.Second
	inspectMost     = 30 * time.Second
	inspectBudget   = 30 * time.Minute // how long an engine may not answer before the pod is evicted
)

// restartInPlace starts a managed VM that has ended. The VM keeps its disk and addresses.
func (r *runs) restartInPlace(ctx context.Context, rec *vm.Record) turn {
	if since := time.Since(r.restarted); !r.restarted.IsZero() && since < restartCooldown {
		return r.evict(ctx, reasonCooldown, "VM "+rec.Spec.Name+" ended again "+since.Round(time.Second).String()+" after it was restarted")
	}
	err := r.startAgain(ctx, rec)
	switch {
	case err == nil:
		r.restarted, r.unanswered = time.Now(), time.Time{}
		r.event(corev1.EventTypeNormal, eventRestarted, "VM %s ended (%s) and was restarted in place", rec.Spec.Name, rec.Reason)
		return atOnce
	case ctx.Err() != nil:
		return atOnce
	case !errdefs.IsUnavailable(err):
		return r.evict(ctx, reasonRestartFailed, "VM "+rec.Spec.Name+" ended and cannot be restarted: "+err.Error())
	case r.unanswered.IsZero():
		r.unanswered = time.Now()
	case time.Since(r.unanswered) > inspectBudget:
		return r.evict(ctx, reasonInspect, "VM "+rec.Spec.Name+" ended, and the VM engine does not answer: "+err.Error())
	}
	return r.retry(ctx, reasonRunError, err, inspectFirst, inspectMost)
}

// evict marks the pod Failed, reports that, and deletes the pod's object so that its controller creates another. The rest of
// the VM is removed as for any deleted pod.
func (r *runs) evict(ctx context.Context, reason, message string) turn {
	r.health.Stop()
	r.volumes.Stop()
	r.log.Warn("pod evicted", "op", reason, "err", message)
	r.again, r.verdict = false, &podstatus.Verdict{Reason: reason, Message: message}
	r.event(corev1.EventTypeWarning, reason, "%s", message)
	r.Metrics.lifecycle.WithLabelValues("evict", "success").Inc()
	r.publish(0)
	if err := r.writer.flush(ctx); err != nil {
		return whenWoken
	}
	if err := r.writer.deleteObject(ctx); err != nil {
		r.log.Warn("evicted pod not deleted", "err", err)
	}
	return whenWoken
}

// reject fails a pod that the node does not admit, in the words of a kubelet.
func (r *runs) reject(reason, message string) turn {
	r.log.Warn("pod rejected", "op", reason, "err", message)
	r.verdict = &podstatus.Verdict{Reason: reason, Message: "Pod was rejected: " + message}
	r.event(corev1.EventTypeWarning, reason, "%s", message)
	r.Metrics.lifecycle.WithLabelValues("create", "refused").Inc()
	r.publish(0)
	return whenWoken
}

// expire stops a pod that has exceeded its active deadline, also a pod that has no VM yet.
func (r *runs) expire(ctx context.Context, pod *corev1.Pod, rec *vm.Record) turn {
	r.health.Stop()
	if rec == nil { // an interrupted launch may have left a VM
		var err error
		if rec, err = r.findVM(ctx); err != nil {
			return r.retry(ctx, reasonDeadline, err, time.Second, r.cfg.BackoffMax)
		}
	}
	if rec != nil && !podstatus.Over(rec) {
		got, err := r.vms.Stop(ctx, string(rec.ID), r.health.PreStop(ctx, pod, rec, convert.Grace(pod)))
		if ctx.Err() != nil {
			return atOnce
		}
		if err != nil {
			return r.retry(ctx, reasonDeadline, err, time.Second, r.cfg.BackoffMax)
		}
		r.take(got)
	}
	message := "Pod was active on the node longer than the specified deadline"
	r.again, r.verdict = false, &podstatus.Verdict{Reason: reasonDeadline, Message: message}
	r.event(corev1.EventTypeNormal, reasonDeadline, "%s", message)
	r.publish(0)
	return whenWoken
}
