package podvolumes

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/vm"
)

// renewEvery is the time between two renewals of the volumes of CSI drivers that want them, as with the kubelet.
const renewEvery = 90 * time.Second

// renewer publishes the volumes of a VM again from time to time, if their CSI drivers want that. run is its goroutine.
type renewer struct {
	id     vm.ID
	cancel context.CancelFunc
}

func (r *renewer) stop() {
	if r != nil {
		r.cancel()
	}
}

// keepPublished renews the folders of CSI drivers that rec, the VM of the pod, has, until Stop. Preconditions: v.mu is held.
func (v *Volumes) keepPublished(rec *vm.Record, spawn Spawn) {
	if v.renew != nil && v.renew.id == rec.ID {
		return
	}
	v.renew.stop()
	v.renew = nil
	names := map[string]bool{}
	for _, d := range rec.Spec.Dirs() {
		if d.Dir.Published {
			names[d.Name] = true
		}
	}
	if v.from.Plugins != nil && len(names) > 0 {
		v.renew = &renewer{rec.ID, spawn(func(ctx context.Context) { v.republish(ctx, rec.ID, names) })}
	}
}

// republish renews the volumes with these names until ctx ends.
func (v *Volumes) republish(ctx context.Context, id vm.ID, names map[string]bool) {
	from := v.from
	from.renew = true
	complaint := ""
	for pauses.Sleep(ctx, nil, renewEvery, false) {
		pod := v.owner.Pod()
		volumes := slices.DeleteFunc(convert.Disks(pod), func(v vm.Volume) bool { return !names[v.Name] })
		err := convert.Fill(ctx, pod, v.node, from, volumes)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			complaint = ""
		case complaint != err.Error():
			complaint = err.Error()
			v.owner.Complain(id, err)
		}
	}
}

// Renew publishes the volumes of CSI drivers of pod again that the machine has lost since it started.
// Errors: those of Fill.
func (v *Volumes) Renew(ctx context.Context, pod *corev1.Pod) error {
	if v.from.Plugins == nil || !convert.Published(pod) {
		return nil
	}
	stale, err := v.from.Plugins.Stale(ctx, pod)
	if err != nil || !stale {
		return err
	}
	return v.Fill(ctx, pod, convert.Disks(pod))
}

// Release unpublishes the volumes of CSI drivers of pod, whose VM is gone.
func (v *Volumes) Release(ctx context.Context, pod *corev1.Pod) error {
	if v.from.Plugins == nil || !convert.Published(pod) {
		return nil
	}
	return v.from.Plugins.Release(ctx, pod)
}
