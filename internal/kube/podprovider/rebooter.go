package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// rebooter starts the guest of the pod's VM again when an annotation of the pod asks for it. Each request is done once, and answered by
// another annotation. If the node is killed between the two, it does the request again.
type rebooter struct{ base }

// due reports whether there is a request that has no answer.
func (b *rebooter) due(f facts) bool {
	ask, err := contract.ParseReboot(f.pod.Annotations)
	return err == nil && ask.ID != "" && ask.ID != b.rebooted.ID && ask.ID != contract.ParseRebooted(f.pod.Annotations).ID
}

// act starts the guest of rec again. A request that fails is answered, too: it is not tried again.
func (b *rebooter) act(ctx context.Context, pod *corev1.Pod, rec *vm.Record) {
	ask, _ := contract.ParseReboot(pod.Annotations)
	got, err := b.vms.Reboot(ctx, string(rec.ID), ask.Hard)
	if ctx.Err() != nil {
		return
	}
	b.Metrics.done("reboot", err)
	b.rebooted = contract.Rebooted{ID: ask.ID}
	how := "in order"
	if ask.Hard {
		how = "by a reset"
	}
	if err != nil {
		b.rebooted.Why = err.Error()
		b.event(corev1.EventTypeWarning, eventRebootFailed, "VM %s is not rebooted: %s", b.vmName, err)
		b.log.Warn("vm not rebooted", "err", err)
	} else {
		b.event(corev1.EventTypeNormal, eventRebooted, "The guest of VM %s starts again %s", b.vmName, how)
		b.take(got)
	}
	b.publish(0)
}
