package node

import (
	"context"
	"fmt"
	"time"

	vknode "github.com/virtual-kubelet/virtual-kubelet/node"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Claimed is closed when Serve has found that no other machine serves the node. Until then its pods are to be left alone.
func (n *Node) Claimed() <-chan struct{} { return n.claimed }

// claim fails with FailedPrecondition when another machine serves the node of this name now: two that do would take each
// other's pods for orphans. A node whose heartbeat has ended may be taken over.
func (n *Node) claim(ctx context.Context, client kubernetes.Interface, now time.Time) error {
	there, err := client.CoreV1().Nodes().Get(ctx, n.cfg.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up node %s: %w", n.cfg.Name, err)
	}
	other, own := there.Status.NodeInfo.MachineID, n.Object().Status.NodeInfo.MachineID
	if other == "" || own == "" || other == own {
		return nil
	}
	lease, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, n.cfg.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up the heartbeat of node %s: %w", n.cfg.Name, err)
	}
	if lease.Spec.RenewTime == nil {
		return nil
	}
	age := now.Sub(lease.Spec.RenewTime.Time)
	if age > vknode.DefaultLeaseDuration*time.Second {
		return nil
	}
	return errdefs.Preconditionf("node %s is served by another machine (machine id %s, last heartbeat %s ago): give this one another name, or stop that one and wait %d s",
		n.cfg.Name, other, age.Round(time.Second), vknode.DefaultLeaseDuration)
}
