package podprovider

import (
	"context"
	"math"
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

// running makes sure that a running VM is probed and that its status says so.
func (w *worker) running(ctx context.Context, pod *corev1.Pod, rec *vm.Record) {
	w.again, w.due, w.pause = false, time.Time{}, podstatus.Pause{}
	if !podstatus.Up(rec) {
		w.health.Stop()
		w.publish(w.p.cfg.Settle)
		return
	}
	w.announce(rec)
	w.health.Watch(ctx, pod, rec, w.trusted)
	w.trusted = false
	w.publish(0)
}

// stopForKill stops the VM because a probe or hook demands it. A restart is handled after the VM has ended.
func (w *worker) stopForKill(ctx context.Context, pod *corev1.Pod, rec *vm.Record, s *podhealth.StopRequest) turn {
	w.health.Report(rec, s)
	w.health.Stop()
	w.publish(0)
	got, err := w.vms.Stop(ctx, string(rec.ID), w.health.PreStop(ctx, pod, rec, s.Grace(pod)))
	if ctx.Err() != nil {
		return atOnce
	}
	if err != nil {
		return w.retry(ctx, reasonRunError, err, time.Second, 30*time.Second)
	}
	w.tries, w.killed = wait.Backoff{}, rec.StartedAt
	w.take(got)
	return atOnce
}

// restart begins the next run.
func (w *worker) restart(ctx context.Context, rec *vm.Record) turn {
	w.publish(0) // report the end before the start, which takes too long to wait for
	w.last = podstatus.Terminated(rec)
	got, err := w.vms.Start(ctx, string(rec.ID))
	if ctx.Err() != nil {
		return atOnce
	}
	w.p.Metrics.done("restart", err)
	if err != nil {
		again := w.retry(ctx, reasonRunError, err, w.p.cfg.BackoffBase, w.p.cfg.BackoffMax)
		w.due = time.Now().Add(time.Duration(again))
		return again
	}
	w.tries, w.pause, w.again = wait.Backoff{}, podstatus.Pause{}, false
	w.take(got)
	return atOnce
}

// schedule sets when the next run begins: the first at once, then after base, 2×base … A long run resets the back-off.
func (w *worker) schedule(rec *vm.Record) {
	if !rec.StartedAt.IsZero() && rec.StoppedAt.Sub(rec.StartedAt) > forgiveAfter*w.p.cfg.BackoffMax {
		w.backoff = wait.Backoff{}
	}
	hold := w.backoff.Step() // none the first time
	w.dueFor, w.due = rec.StoppedAt, time.Now().Add(hold)
	if hold > 0 {
		message := "back-off " + hold.String() + " restarting failed container"
		w.pause = podstatus.Pause{Reason: reasonCrashLoop, Message: message}
		w.event(corev1.EventTypeWarning, eventBackOff, "Back-off restarting failed container as VM %s", rec.Spec.Name)
	} else {
		w.backoff = pauses.Growing(w.p.cfg.BackoffBase, w.p.cfg.BackoffMax, 0)
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
func (w *worker) restartInPlace(ctx context.Context, rec *vm.Record) turn {
	if since := time.Since(w.restarted); !w.restarted.IsZero() && since < restartCooldown {
		return w.evict(ctx, reasonCooldown, "VM "+rec.Spec.Name+" ended again "+since.Round(time.Second).String()+" after it was restarted")
	}
	w.publish(0)
	w.last = podstatus.Terminated(rec)
	got, err := w.vms.Start(ctx, string(rec.ID))
	if ctx.Err() != nil {
		return atOnce
	}
	w.p.Metrics.done("restart", err)
	switch {
	case err == nil:
		w.tries, w.pause, w.again = wait.Backoff{}, podstatus.Pause{}, false
		w.restarted, w.unanswered = time.Now(), time.Time{}
		w.event(corev1.EventTypeNormal, eventRestarted, "VM %s ended (%s) and was restarted in place", rec.Spec.Name, rec.Reason)
		w.take(got)
		return atOnce
	case !errdefs.IsUnavailable(err):
		return w.evict(ctx, reasonRestartFailed, "VM "+rec.Spec.Name+" ended and cannot be restarted: "+err.Error())
	case w.unanswered.IsZero():
		w.unanswered = time.Now()
	case time.Since(w.unanswered) > inspectBudget:
		return w.evict(ctx, reasonInspect, "VM "+rec.Spec.Name+" ended, and the VM engine does not say what became of it: "+err.Error())
	}
	return w.retry(ctx, reasonRunError, err, inspectFirst, inspectMost)
}

// evict gives up a pod: it marks the pod Failed, reports that, and deletes the pod's object so that its controller creates
// another. What is left of the VM is removed as for any deleted pod.
func (w *worker) evict(ctx context.Context, reason, message string) turn {
	w.health.Stop()
	w.stopKeeper()
	w.log.Warn("pod evicted", "op", reason, "err", message)
	w.again, w.verdict = false, &podstatus.Verdict{Reason: reason, Message: message}
	w.event(corev1.EventTypeWarning, reason, "%s", message)
	w.p.Metrics.lifecycle.WithLabelValues("evict", "success").Inc()
	w.publish(0)
	if err := w.writer.flush(ctx); err != nil {
		return whenWoken
	}
	if err := w.writer.erase(ctx); err != nil {
		w.log.Warn("evicted pod not deleted", "err", err)
	}
	return whenWoken
}

// vanish records that the run of rec is over. Nobody knows when or how it ended.
func (w *worker) vanish(rec *vm.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	end := *rec
	end.State, end.ExitCode, end.StoppedAt = vm.StateError, nil, time.Now()
	w.rec = &end
}

// late returns how much of the pod's active deadline is left; a very long time when it has none. Preconditions: mu is
// held.
func (w *worker) late() time.Duration {
	limit := w.pod.Spec.ActiveDeadlineSeconds
	if limit == nil || w.status.StartTime == nil || podstatus.Over(w.rec) && !w.again {
		return math.MaxInt64
	}
	return time.Until(w.status.StartTime.Add(time.Duration(*limit) * time.Second))
}

// inTime returns wait, or the rest of the pod's active deadline if that is less.
func (w *worker) inTime(wait turn) turn {
	w.mu.Lock()
	left := w.late()
	w.mu.Unlock()
	if left < math.MaxInt64 {
		return sooner(wait, after(left))
	}
	return wait
}

// bringUpBefore runs createAndStart, limited by the pod's active deadline. The deadline counts from when the pod came to
// this node.
func (w *worker) bringUpBefore(ctx context.Context, pod *corev1.Pod) turn {
	if pod.Spec.ActiveDeadlineSeconds == nil {
		return w.createAndStart(ctx, pod)
	}
	w.publish(w.p.cfg.Settle) // the status records the start time
	w.mu.Lock()
	left := w.late()
	w.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	return w.createAndStart(limited, pod)
}

// expire stops a pod that has used up its active deadline, also one that has no VM yet.
func (w *worker) expire(ctx context.Context, pod *corev1.Pod, rec *vm.Record) turn {
	w.health.Stop()
	if rec == nil { // an interrupted launch may have left a VM
		var err error
		if rec, err = w.findVM(ctx); err != nil {
			return w.retry(ctx, reasonDeadline, err, time.Second, w.p.cfg.BackoffMax)
		}
	}
	if rec != nil && !podstatus.Over(rec) {
		got, err := w.vms.Stop(ctx, string(rec.ID), w.health.PreStop(ctx, pod, rec, convert.Grace(pod)))
		if ctx.Err() != nil {
			return atOnce
		}
		if err != nil {
			return w.retry(ctx, reasonDeadline, err, time.Second, w.p.cfg.BackoffMax)
		}
		w.take(got)
	}
	message := "Pod was active on the node longer than the specified deadline"
	w.again, w.verdict = false, &podstatus.Verdict{Reason: reasonDeadline, Message: message}
	w.event(corev1.EventTypeNormal, reasonDeadline, "%s", message)
	w.publish(0)
	return whenWoken
}
