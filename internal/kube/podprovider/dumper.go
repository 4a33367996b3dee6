package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// dumper writes the memory of the pod's VM to the volume of a claim when an annotation of the pod asks for it. Each request is done once, and
// answered by another annotation. If the node is killed between the two, it does the request again.
type dumper struct {
	base
	attempt retryTask // for a claim that has no volume yet
	of      contract.MemoryDump
}

// due reports whether there is a request that has no answer, and when to look at its claim again.
func (d *dumper) due(f facts) (some bool, left time.Duration) {
	ask, err := contract.ParseMemoryDump(f.pod.Annotations)
	if err != nil || ask == (contract.MemoryDump{}) || d.dumped.Answers(ask) || contract.ParseMemoryDumped(f.pod.Annotations).Answers(ask) {
		return false, 0
	}
	if ask != d.of {
		d.of, d.attempt = ask, retryTask{}
	}
	return true, d.attempt.left()
}

// act writes the memory of rec. A dump that fails is answered, too: it is not tried again. A claim that does not have its volume on this node yet
// may get it.
func (d *dumper) act(ctx context.Context, pod *corev1.Pod, rec *vm.Record) {
	ask, begun := d.of, time.Now()
	use, err := d.volumes.Unnamed(ctx, pod, ask.Claim)
	if err == nil && use.ReadOnly {
		err = errdefs.Preconditionf("persistentvolumeclaim %q is to be read only", ask.Claim)
	}
	if err != nil {
		if ctx.Err() == nil && d.attempt.failed(err) {
			d.event(corev1.EventTypeWarning, eventDumpFailed, "The memory of VM %s is not dumped yet: %s", d.vmName, err)
			d.log.Warn("memory not dumped, trying again", "err", err)
		}
		return
	}
	d.health.Stop() // a probe of a guest that stands still would fail
	err = d.vms.DumpMemory(ctx, string(rec.ID), use.Ref, ask.File)
	if ctx.Err() != nil {
		return
	}
	d.Metrics.done("dump", err)
	d.dumped = contract.MemoryDumped{Claim: ask.Claim, File: ask.File, Begun: begun.UTC().Truncate(time.Second), Ended: time.Now().UTC().Truncate(time.Second)}
	if err != nil {
		d.dumped.Why = err.Error()
		d.event(corev1.EventTypeWarning, eventDumpFailed, "The memory of VM %s is not dumped to claim %s: %s", d.vmName, ask.Claim, err)
		d.log.Warn("memory not dumped", "err", err)
	} else {
		d.event(corev1.EventTypeNormal, eventDumped, "The memory of VM %s is the file %s on the volume of claim %s", d.vmName, ask.File, ask.Claim)
	}
	d.publish(0)
}
