package placement

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// Resource is the VMPlacement resource. A VMPlacement is called a claim here.
var Resource = v1.GroupVersion.WithResource("vmplacements")

// Claims creates the claims of one node.
type Claims struct {
	Custom dynamic.Interface    // of VMPlacements
	Nodes  kubernetes.Interface // for the node's own object
	Node   string
}

// Hold claims the VM of pod, which is about to be created on this node, for the node. It is idempotent. If two nodes call it
// at the same time, one wins, because every write names the version of the claim to which it applies.
// Preconditions: the pod is sticky (contract.ParseSticky), and Check returned "".
// Errors: FailedPrecondition if the VM's state is on another machine, Unavailable if that cannot be determined now.
func (c Claims) Hold(ctx context.Context, pod *corev1.Pod) error {
	ask, err := contract.ParseSticky(pod.Annotations)
	if err != nil {
		return errdefs.As(errdefs.InvalidArgument, err)
	}
	name := NameOf(pod)
	there, err := c.Nodes.CoreV1().Nodes().Get(ctx, c.Node, metav1.GetOptions{})
	if err != nil {
		return errdefs.Unavailablef("claim node %s for VM %s: get the node: %w", c.Node, name, err)
	}
	node := Node{Name: there.Name, UID: there.UID, MachineID: there.Status.NodeInfo.MachineID}
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		claim, err := c.find(ctx, pod, ask)
		if err != nil {
			return err
		}
		next, err := hold(claim.Status, name, pod, node, metav1.NewTime(time.Now().Truncate(time.Second)))
		if err != nil || equality.Semantic.DeepEqual(next, claim.Status) {
			return err
		}
		claim.Status = next
		o, err := encode(claim)
		if err != nil {
			return err
		}
		_, err = c.Custom.Resource(Resource).Namespace(pod.Namespace).UpdateStatus(ctx, o, metav1.UpdateOptions{})
		return err
	})
	if err == nil || errdefs.IsFailedPrecondition(err) || ctx.Err() != nil {
		return err
	}
	return errdefs.Unavailablef("claim node %s for VM %s: %w", c.Node, name, err)
}

// Holder returns the node that has claimed the VM. found is false if no node has: the VM has no claim, or its claim is being
// deleted.
func (c Claims) Holder(ctx context.Context, namespace, vmName string) (node string, found bool, err error) {
	got, err := Lookup(namespace, vmName, func(name string) (*unstructured.Unstructured, error) {
		return c.Custom.Resource(Resource).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	})
	if apierrors.IsNotFound(err) {
		return "", false, nil
	}
	if err != nil {
		return "", false, errdefs.Unavailablef("get the VMPlacement of VM %s: %w", vmName, err)
	}
	claim, err := decode(got)
	if err != nil {
		return "", false, err
	}
	node = Bound(claim)
	return node, node != "", nil
}

// find reads the VM's claim, and creates it if the VM has none.
func (c Claims) find(ctx context.Context, pod *corev1.Pod, ask contract.Sticky) (*v1.VMPlacement, error) {
	claims := c.Custom.Resource(Resource).Namespace(pod.Namespace)
	got, err := Lookup(pod.Namespace, NameOf(pod), func(name string) (*unstructured.Unstructured, error) {
		return claims.Get(ctx, name, metav1.GetOptions{})
	})
	if apierrors.IsNotFound(err) {
		var o *unstructured.Unstructured
		if o, err = encode(New(pod, ask, ownerOf(pod))); err != nil {
			return nil, err
		}
		got, err = claims.Create(ctx, o, metav1.CreateOptions{})
	}
	switch {
	case apierrors.IsAlreadyExists(err): // another writer was first: handle it like a conflict
		return nil, apierrors.NewConflict(Resource.GroupResource(), NameOf(pod), err)
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("the cluster does not know VMPlacements; install the custom resources of Cocoon: %w", err)
	case err != nil:
		return nil, err
	}
	claim, err := decode(got)
	if err != nil {
		return nil, err
	}
	if owner := ownerOf(pod); contract.HibernatesOnDelete(pod.Annotations) && owner != nil && len(claim.OwnerReferences) > 0 && claim.OwnerReferences[0].UID != owner.UID {
		return nil, fmt.Errorf("VMPlacement %s belongs to an earlier %s, with which it is about to be deleted", claim.Name, claim.OwnerReferences[0].Kind)
	}
	return claim, nil
}

func decode(o *unstructured.Unstructured) (*v1.VMPlacement, error) {
	claim := &v1.VMPlacement{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, claim); err != nil {
		return nil, fmt.Errorf("decode VMPlacement: %w", err)
	}
	return claim, nil
}

func encode(claim *v1.VMPlacement) (*unstructured.Unstructured, error) {
	claim.SetGroupVersionKind(v1.GroupVersion.WithKind("VMPlacement"))
	o, err := runtime.DefaultUnstructuredConverter.ToUnstructured(claim)
	if err != nil {
		return nil, fmt.Errorf("encode VMPlacement: %w", err)
	}
	return &unstructured.Unstructured{Object: o}, nil
}

// New returns a claim of the VM of pod, which nobody has yet. It goes with owner, if there is one.
func New(pod *corev1.Pod, ask contract.Sticky, owner *metav1.OwnerReference) *v1.VMPlacement {
	claim := &v1.VMPlacement{ObjectMeta: metav1.ObjectMeta{Name: NameOf(pod), Namespace: pod.Namespace}, Spec: v1.VMPlacementSpec{Release: v1.ReleaseWait}}
	if ask.Never {
		claim.Spec.Release = v1.ReleaseNever
	}
	if ask.Wait != nil {
		claim.Spec.WaitSeconds = new(int64(ask.Wait.Seconds()))
	}
	if owner != nil {
		claim.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	return claim
}

// ownerOf returns the owner of pod's VM: the pod's controller if its next pod has the same VM, else the pod. A pod without a
// controller has a VM without an owner, because users recreate the pod under its name.
func ownerOf(pod *corev1.Pod) *metav1.OwnerReference {
	controller := metav1.GetControllerOf(pod)
	if controller == nil {
		return nil
	}
	if convert.Renames(controller.Kind) && pod.Annotations[contract.KeyName] == "" { // its next pod has another VM
		return &metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	return &metav1.OwnerReference{APIVersion: controller.APIVersion, Kind: controller.Kind, Name: controller.Name, UID: controller.UID}
}
