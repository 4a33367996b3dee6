package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// base is what the parts of a worker build on. A part knows neither the worker nor another part, except that creation uses
// pulls and hibernation. Only the worker's goroutine uses report and the parts, unless a part has a lock.
type base struct {
	*report
	states *podsnapshots.States // saved states of the pod's VM; has its own lock; nil: the node keeps no snapshots
}

// findVM returns the pod's VM, also one that an interrupted Launch left; nil when there is none.
func (b base) findVM(ctx context.Context) (*vm.Record, error) {
	rec := b.look().rec
	ref := b.vmName
	if rec != nil {
		ref = string(rec.ID)
	}
	got, err := b.vms.Inspect(ctx, ref)
	switch {
	case errdefs.IsNotFound(err) || errdefs.IsInvalid(err): // a name that is invalid for a VM has no VM
		return nil, nil
	case err != nil:
		return nil, err
	case rec == nil && got.Spec.Labels[contract.VMLabelPodUID] != string(b.uid):
		return nil, nil
	}
	return b.take(got), nil
}

// newStates returns the saved states of the VM of s; nil when the node keeps no snapshots.
func (c *common) newStates(s *podState) *podsnapshots.States {
	return c.node.snapshots.States(podsnapshots.Owner{
		Owner: s.owner, Pod: s.look().pod.Name, VM: s.vmName, Log: s.log,
		Find:     s.known,
		Forkable: func(rec vm.Record) bool { return podstatus.Up(&rec) && itself(&rec, false) },
		// The Events are the same as for an image.
		Pulling: func(from string) func(int64) {
			began := time.Now()
			s.event(corev1.EventTypeNormal, eventPulling, "Pulling snapshot %q", from)
			return func(size int64) {
				s.event(corev1.EventTypeNormal, eventPulled, "Successfully pulled snapshot %q in %s. Snapshot size: %d bytes.",
					from, time.Since(began).Round(time.Millisecond), size)
			}
		},
	})
}
