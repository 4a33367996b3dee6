// Package placement keeps a VM on the node that holds its state, with a VMPlacement. The node claims the VM before it creates
// the VM (Claims.Hold). The manager, which creates or admits the VM's next pod, binds the pod to that node (Stamp).
//
// It does not schedule pods; the scheduler does. It does not release claims; users and the manager do.
package placement

import (
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// Node identifies the node that claims.
type Node struct {
	Name      string
	UID       types.UID
	MachineID string
}

// NameOf returns the name of the VMPlacement of pod's VM, which is the VM's name. It returns "" for a pod whose name is not
// generated yet. Such a pod has no claim.
func NameOf(pod *corev1.Pod) string {
	if pod.Name == "" && pod.Annotations[contract.KeyName] == "" {
		return ""
	}
	return convert.VMName(pod)
}

// Lookup finds, with get, the claim of the VM with that name in the namespace. A claim of an earlier release has the name that
// the VM had then. The error is the error of get: NotFound (of the API server) if the VM has no claim.
func Lookup[T any](namespace, vmName string, get func(name string) (T, error)) (claim T, err error) {
	for _, name := range contract.Aliases(namespace, vmName) {
		if claim, err = get(name); !apierrors.IsNotFound(err) {
			return claim, err
		}
	}
	return claim, err
}

// Check returns why the VM of a sticky pod cannot be claimed, or "" if it can.
func Check(pod *corev1.Pod) string {
	if errs := validation.IsDNS1123Subdomain(NameOf(pod)); len(errs) > 0 {
		return "the VM cannot stay on its node, because its name is not valid for a VMPlacement: " + strconv.Quote(NameOf(pod)) + ": " + strings.Join(errs, ", ")
	}
	return ""
}

// Bound returns the node to which a claim binds the VM, or "" for none.
func Bound(claim *v1.VMPlacement) string {
	if claim == nil || claim.DeletionTimestamp != nil {
		return ""
	}
	return claim.Status.NodeName
}

// Stamp binds pod, which is about to be created, to the node of claim, by a required node affinity. claim is the claim of the
// pod's VM (NameOf), nil if there is none. Stamp first removes the affinity of an earlier Stamp, because the pod may be a copy
// of a pod whose claim was released. It adds no affinity to pods that are not sticky, and to pods of the sticky scheduler,
// which checks the claim itself. It reports whether it changed the pod. A second call with the same claim changes nothing.
func Stamp(pod *corev1.Pod, claim *v1.VMPlacement) bool {
	node := Bound(claim)
	if ask, err := contract.ParseSticky(pod.Annotations); err != nil || !ask.Asked || pod.Spec.SchedulerName == contract.StickyScheduler {
		node = ""
	}
	was := pod.Annotations[contract.KeyPlacedOn]
	if was == node {
		return false
	}
	if was != "" {
		unpin(pod, was)
		delete(pod.Annotations, contract.KeyPlacedOn)
	}
	if node != "" {
		pin(pod, node)
		metav1.SetMetaDataAnnotation(&pod.ObjectMeta, contract.KeyPlacedOn, node)
	}
	return true
}

// Prefer sends pod, where possible, to a node that has the hypervisor that it asks for. It reports whether it changed the pod. A second call
// changes nothing.
func Prefer(pod *corev1.Pod) bool {
	b := contract.Backend(pod.Annotations[contract.KeyBackend])
	if !slices.Contains(contract.Backends(), b) || pod.Spec.NodeName != "" {
		return false
	}
	want := corev1.NodeSelectorRequirement{Key: contract.LabelBackend(b), Operator: corev1.NodeSelectorOpExists}
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{}
	}
	if pod.Spec.Affinity.NodeAffinity == nil {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	preferred := &pod.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	for _, p := range *preferred {
		for _, r := range p.Preference.MatchExpressions {
			if r.Key == want.Key {
				return false
			}
		}
	}
	*preferred = append(*preferred, corev1.PreferredSchedulingTerm{Weight: 100, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{want}}})
	return true
}

func on(node string) corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}
}

// pin adds a requirement for node to each node selector term of the pod.
func pin(pod *corev1.Pod, node string) {
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{}
	}
	if pod.Spec.Affinity.NodeAffinity == nil {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	affinity := pod.Spec.Affinity.NodeAffinity
	if affinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		affinity.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{}}}
	}
	terms := affinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	for i := range terms {
		terms[i].MatchFields = append(terms[i].MatchFields, on(node))
	}
}

// unpin removes the requirements that pin added.
func unpin(pod *corev1.Pod, node string) {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.NodeAffinity == nil {
		return
	}
	affinity := pod.Spec.Affinity.NodeAffinity
	required := affinity.RequiredDuringSchedulingIgnoredDuringExecution
	if required == nil {
		return
	}
	for i := range required.NodeSelectorTerms {
		t := &required.NodeSelectorTerms[i]
		t.MatchFields = slices.DeleteFunc(t.MatchFields, func(r corev1.NodeSelectorRequirement) bool {
			return r.Key == metav1.ObjectNameField && r.Operator == corev1.NodeSelectorOpIn && slices.Equal(r.Values, []string{node})
		})
	}
	// pin created the term if it has no other requirements. Such a term would match no node.
	required.NodeSelectorTerms = slices.DeleteFunc(required.NodeSelectorTerms, func(t corev1.NodeSelectorTerm) bool { return len(t.MatchFields) == 0 && len(t.MatchExpressions) == 0 })
	if len(required.NodeSelectorTerms) == 0 {
		affinity.RequiredDuringSchedulingIgnoredDuringExecution = nil
	}
}

// Unavailable returns why the VM cannot run on the claim's node: the reason of a condition and a sentence. It returns "" if
// node is the machine that holds the VM's state and is Ready. node is the API server's object, nil if it does not exist.
func Unavailable(claim *v1.VMPlacement, node *corev1.Node) (reason, text string) {
	s := claim.Status
	switch {
	case node == nil:
		return v1.ReasonNodeRemoved, "node " + s.NodeName + ", which holds the VM's state, was removed from the cluster"
	case !same(s, Node{Name: node.Name, UID: node.UID, MachineID: node.Status.NodeInfo.MachineID}):
		return v1.ReasonNodeReplaced, "node " + s.NodeName + " is now another machine, which does not hold the VM's state"
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return "", ""
		}
	}
	return v1.ReasonNodeNotReady, "node " + s.NodeName + ", which holds the VM's state, is not ready"
}

// same reports whether node is the node of the claim: it has the same UID, or it is the same machine, registered again.
func same(s v1.VMPlacementStatus, node Node) bool {
	return s.NodeName == node.Name && (s.NodeUID == node.UID || s.MachineID != "" && s.MachineID == node.MachineID)
}

// hold returns the status of the claim of pod's VM, which is about to be created on node. Errors: FailedPrecondition if the
// VM's state is on another machine.
func hold(s v1.VMPlacementStatus, name string, pod *corev1.Pod, node Node, now metav1.Time) (v1.VMPlacementStatus, error) {
	if s.NodeName != "" {
		switch {
		case same(s, node):
			if s.ClaimedAt != nil {
				now = *s.ClaimedAt
			}
		case s.NodeName == node.Name:
			return s, errdefs.Preconditionf("the state of VM %s is on another machine, which was node %s before (UID %s); to give the state up, delete the VMPlacement %s", name, s.NodeName, s.NodeUID, name)
		default:
			return s, errdefs.Preconditionf("the state of VM %s is on node %s; delete this pod, so that the next pod goes to that node, or delete the VMPlacement %s to give the state up", name, s.NodeName, name)
		}
	}
	s.NodeName, s.NodeUID, s.MachineID, s.PodUID, s.PodName, s.ClaimedAt = node.Name, node.UID, node.MachineID, pod.UID, pod.Name, &now
	return s, nil
}
