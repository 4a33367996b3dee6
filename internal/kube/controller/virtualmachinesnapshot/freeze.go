package virtualmachinesnapshot

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// A node freezes a guest for the moment in which it keeps one volume. For several volumes of one instant, the guest is frozen before the first
// and thawed after the last. The node thaws it after freezeMost at the latest, also if no manager lives any more.
const (
	freezeMost  = time.Minute
	freezePause = 5 * time.Second // before it is tried again
)

// together reports whether the guest is to be frozen for all volumes together.
func (x *seen) together() bool {
	return x.content != nil && len(x.content.Spec.VolumeBackups) > 1 && x.online() &&
		isTrue(x.vmi, v1.VirtualMachineInstanceAgentConnected) && !isTrue(x.vmi, v1.VirtualMachineInstancePaused)
}

// freezes reports whether the guest is to be frozen now. Once a VolumeSnapshot exists it is too late: a manager that was killed may have left
// it so, and the guest may have been thawed meanwhile.
func (x *seen) freezes() bool {
	for _, v := range x.taken {
		if v != nil {
			return false
		}
	}
	return x.together()
}

// freezeTime is for how long the guest is frozen at most: no longer than the snapshot may take.
func (x *seen) freezeTime() time.Duration {
	if d := x.deadline(); d > 0 {
		return max(min(freezeMost, d), time.Second)
	}
	return freezeMost
}

// pod returns the pod of the instance.
func (x *seen) pod() types.NamespacedName {
	return types.NamespacedName{Namespace: x.vmi.Namespace, Name: kubevirt.PodName(x.vmi)}
}

// thaw ends a freeze, and reports whether it lasted until now. If it fails, the node thaws the guest when its time is over.
func (r *Reconciler) thaw(ctx context.Context, x *seen) bool {
	if !x.online() || !isTrue(x.vmi, v1.VirtualMachineInstanceAgentConnected) || isTrue(x.vmi, v1.VirtualMachineInstancePaused) {
		return false
	}
	held, err := r.Guests.Thaw(ctx, x.pod())
	return held && err == nil
}
