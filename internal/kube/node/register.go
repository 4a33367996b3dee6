package node

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	vknode "github.com/virtual-kubelet/virtual-kubelet/node"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Serve registers the node and keeps its heartbeat until ctx ends. It retries while the API server is unreachable, and
// recreates the node object if it was deleted. If another machine serves the node, it returns FailedPrecondition without a
// retry.
func (n *Node) Serve(ctx context.Context, client kubernetes.Interface, log *slog.Logger) error {
	pauses := wait.Backoff{Duration: 250 * time.Millisecond, Factor: 2, Jitter: 0.1, Steps: math.MaxInt, Cap: 10 * time.Second}
	return pauses.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := n.serve(ctx, client, log)
		switch {
		case ctx.Err() != nil:
			return false, ctx.Err()
		case errdefs.IsFailedPrecondition(err):
			return false, err
		}
		log.Warn("node not registered", "node", n.cfg.Name, "err", err)
		return false, nil
	})
}

func (n *Node) serve(ctx context.Context, client kubernetes.Interface, log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx) // stops the goroutines of a controller that failed to start
	defer cancel()
	if err := n.claim(ctx, client, time.Now()); err != nil {
		return err
	}
	n.once.Do(func() { close(n.claimed) })
	switch err := n.addMissing(ctx, client); {
	case apierrors.IsForbidden(err):
		// The API server does not let a node's own credentials change its taints. The creator of the node sets them.
		log.Warn("taint or provider id of the node not set", "err", err)
	case err != nil:
		return err
	}
	controller, err := vknode.NewNodeController(n, n.Object(), client.CoreV1().Nodes(),
		vknode.WithNodeEnableLeaseV1(client.CoordinationV1().Leases(corev1.NamespaceNodeLease), vknode.DefaultLeaseDuration),
		vknode.WithNodeStatusUpdateErrorHandler(func(ctx context.Context, err error) error {
			if !apierrors.IsNotFound(err) {
				return err
			}
			_, err = client.CoreV1().Nodes().Create(ctx, n.Object(), metav1.CreateOptions{})
			return err
		}))
	if err != nil {
		return fmt.Errorf("set up node controller: %w", err)
	}
	return controller.Run(ctx)
}

// addMissing adds the taint and the provider id to an existing node object that lacks them. The node controller sets them only
// when it creates the object.
func (n *Node) addMissing(ctx context.Context, client kubernetes.Interface) error {
	there, err := client.CoreV1().Nodes().Get(ctx, n.cfg.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil // the controller creates it
	}
	if err != nil {
		return fmt.Errorf("look up node %s: %w", n.cfg.Name, err)
	}
	spec := map[string]any{}
	tainted := slices.ContainsFunc(there.Spec.Taints, func(t corev1.Taint) bool { own := Taint(); return t.MatchTaint(&own) })
	if !tainted {
		spec["taints"] = append(there.Spec.Taints, Taint())
	}
	if there.Spec.ProviderID == "" && n.cfg.ProviderID != "" {
		spec["providerID"] = n.cfg.ProviderID
	}
	if len(spec) == 0 {
		return nil
	}
	// The patch replaces the list of taints. With the resource version it fails if the list has changed meanwhile.
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": there.ResourceVersion}, "spec": spec})
	if err != nil {
		return fmt.Errorf("encode node patch: %w", err)
	}
	if _, err := client.CoreV1().Nodes().Patch(ctx, n.cfg.Name, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("update node %s: %w", n.cfg.Name, err)
	}
	return nil
}

// Claimed returns a channel that is closed when Serve has found that no other machine serves the node. Until then the caller
// must not touch the node's pods.
func (n *Node) Claimed() <-chan struct{} { return n.claimed }

// claim fails with FailedPrecondition if another machine serves the node of this name now, because two such machines would
// treat each other's pods as orphans. A node whose heartbeat has stopped may be taken over. To find that out, claim does not
// compare the clocks of two machines.
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
		// The heartbeat has stopped, or one of the two clocks is wrong. To wait for a new heartbeat does not depend on clocks.
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

// heartbeat returns the last heartbeat of the node with our name, by that node's clock. Zero: the node has never sent one.
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
