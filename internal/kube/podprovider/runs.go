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

// forgiveAfter is how many maximum back-offs a run must last to reset the back-off.
const forgiveAfter = 2

// runs begins and ends the runs of the pod's VM after the first.
type runs struct {
	base
	restarted  time.Time    // when a managed VM was last restarted
	unanswered time.Time    // since when the engine does not answer the restart of a managed VM
	backoff    wait.Backoff // before the next start
	due        time.Time    // of the next start
	dueFor     time.Time    // the stop that due belongs to
}

// stopForKill stops the VM because a probe or hook demands it. A restart is handled after the VM has ended.
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

// startAgain begins the next run.
func (r *runs) startAgain(ctx context.Context, rec *vm.Record) error {
	r.publish(0) // report the end before the start, which takes too long to wait for
	r.last = podstatus.Terminated(rec)
	got, err := r.vms.Start(ctx, string(rec.ID))
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

// restart begins the next run, or says when to try again.
func (r *runs) restart(ctx context.Context, rec *vm.Record) turn {
	err := r.startAgain(ctx, rec)
	if err == nil || ctx.Err() != nil {
		return atOnce
	}
	again := r.retry(ctx, reasonRunError, err, r.cfg.BackoffBase, r.cfg.BackoffMax)
	r.due = time.Now().Add(time.Duration(again))
	return again
}

// schedule sets when the next run begins: the first at once, then after base, 2×base … A long run resets the back-off.
func (r *runs) schedule(rec *vm.Record) {
	if !rec.StartedAt.IsZero() && rec.StoppedAt.Sub(rec.StartedAt) > forgiveAfter*r.cfg.BackoffMax {
		r.backoff = wait.Backoff{}
	}
	hold := r.backoff.Step() // none the first time
	r.dueFor, r.due = rec.StoppedAt, time.Now().Add(hold)
	if hold > 0 {
		message := "back-off " + hold.String() + " restarting failed container"
		r.pause = podstatus.Pause{Reason: reasonCrashLoop, Message: message}
		r.event(corev1.EventTypeWarning, eventBackOff, "Back-off restarting failed container as VM %s", rec.Spec.Name)
	} else {
		r.backoff = pauses.Growing(r.cfg.BackoffBase, r.cfg.BackoffMax, 0)
	}
}

// Managed VMs are restarted in place and at once, but not again and again. A VM that cannot be restarted, or that crashes
// too soon, is given up, so that its manager creates it anew.
const (
	restartCooldown = 30 * time.Second
	inspectFirst    = time.Second
	inspectMost     = 30 * time.Second
	inspectBudget   = 30 * time.Minute // for an engine that does not answer
)

// restartInPlace starts a managed VM that has ended. Its disk and addresses are kept.
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

// evict gives up a pod: it marks the pod Failed, reports that, and deletes the pod's object so that its controller creates
// another. What is left of the VM is removed as for any deleted pod.
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
	if err := r.writer.erase(ctx); err != nil {
		r.log.Warn("evicted pod not deleted", "err", err)
	}
	return whenWoken
}

// expire stops a pod that has used up its active deadline, also one that has no VM yet.
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
