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

// Claimed is closed when Serve has found that no other machine serves the node. Until then its pods must not be touched.
func (n *Node) Claimed() <-chan struct{} { return n.claimed }

// claim fails with FailedPrecondition if another machine serves the node of this name now: two such machines would treat each
// other's pods as orphans. A node whose heartbeat has stopped may be taken over. Whether it has stopped is not decided by
// comparing the clocks of two machines.
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
	beat, err := n.heartbeat(ctx, client)
	if err != nil || beat.IsZero() {
		return err
	}
	const sound = vknode.DefaultLeaseDuration * time.Second
	age := now.Sub(beat)
	if age < -claimSkew || age > sound {
		// It has stopped, or one of the two clocks is wrong. Watching for a new heartbeat does not depend on clocks.
		select {
		case <-time.After(claimWatch):
		case <-ctx.Done():
			return ctx.Err()
		}
		later, err := n.heartbeat(ctx, client)
		if err != nil || later.Equal(beat) {
			return err
		}
		age = 0
	}
	return errdefs.Preconditionf("node %s is served by another machine (machine id %s, last heartbeat %s ago); give this node another name, or stop the other machine and wait %d s",
		n.cfg.Name, other, max(age, 0).Round(time.Second), vknode.DefaultLeaseDuration)
}

const (
	claimSkew  = 10 * time.Second               // maximum difference between the clocks of two machines
	claimWatch = 2 * vknode.DefaultPingInterval // time in which a live node sends a heartbeat
)

// heartbeat returns the last heartbeat of the node with our name, by that node's clock; zero: never.
func (n *Node) heartbeat(ctx context.Context, client kubernetes.Interface) (time.Time, error) {
	lease, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, n.cfg.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return time.Time{}, nil
	case err != nil:
		return time.Time{}, fmt.Errorf("look up the heartbeat of node %s: %w", n.cfg.Name, err)
	case lease.Spec.RenewTime == nil:
		return time.Time{}, nil
	}
	return lease.Spec.RenewTime.Time, nil
}
