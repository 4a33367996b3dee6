package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// pauser pauses the guest of the pod's VM, and lets it continue, as an annotation of the pod says.
type pauser struct {
	base
	attempt retryTask
}

// act pauses the guest of rec, or lets it continue. After a failure, decide waits until the retry is due.
func (p *pauser) act(ctx context.Context, rec *vm.Record, pause bool) {
	op, reason, failed, done, call := "unpause", eventUnpaused, eventUnpauseFailed, "runs again", p.vms.Unpause
	if pause {
		op, reason, failed, done, call = "pause", eventPaused, eventPauseFailed, "is paused", p.vms.Pause
	}
	p.health.Stop() // a probe of a guest that stands still would fail
	got, err := call(ctx, string(rec.ID))
	if ctx.Err() != nil {
		return
	}
	p.Metrics.done(op, err)
	if err != nil {
		if p.attempt.failed(err) {
			p.event(corev1.EventTypeWarning, failed, "The node cannot %s VM %s, and tries again: %s", op, p.vmName, err)
			p.log.Warn("vm not paused or unpaused", "op", op, "err", err)
		}
		return
	}
	p.attempt = retryTask{}
	p.event(corev1.EventTypeNormal, reason, "VM %s %s", p.vmName, done)
	p.take(got)
}
