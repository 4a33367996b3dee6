package eviction

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
)

// DecideInstance answers a request to evict pod, which is the VM of vmi, as evictionStrategy says. Preconditions: Decide allows it, and the
// pod has no policy of its own.
func DecideInstance(vmi *v1.VirtualMachineInstance, pod *corev1.Pod) Verdict {
	if pod.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning || vmi.Spec.EvictionStrategy == nil {
		return Verdict{}
	}
	const remedy = "stop it with virtctl, or give its template the annotation " + contract.KeyEvictionPolicy + ": shutdown"
	switch *vmi.Spec.EvictionStrategy {
	case v1.EvictionStrategyLiveMigrate:
		return Verdict{Answer: Wait, Why: "VirtualMachineInstance " + vmi.Name + " has the evictionStrategy LiveMigrate, and nodes of Cocoon do not migrate VMs; " + remedy}
	case v1.EvictionStrategyExternal:
		why := "VirtualMachineInstance " + vmi.Name + " has the evictionStrategy External: status.evacuationNodeName tells the program that empties nodes; " + remedy
		return Verdict{Answer: Wait, Evacuate: vmi.Status.EvacuationNodeName != pod.Spec.NodeName, Why: why}
	case v1.EvictionStrategyNone, v1.EvictionStrategyLiveMigrateIfPossible:
	}
	return Verdict{}
}

// Evacuate notes in vmi that node is being emptied of it.
func Evacuate(ctx context.Context, c client.Client, vmi *v1.VirtualMachineInstance, node string) error {
	next := vmi.DeepCopy()
	next.Status.EvacuationNodeName = node
	if err := c.Patch(ctx, next, client.MergeFromWithOptions(vmi, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("note that VirtualMachineInstance %s is to leave node %s: %w", vmi.Name, node, err)
	}
	return nil
}
