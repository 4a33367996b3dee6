package v1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// VMPlacement is the claim of a VM on the node that holds its state. It is called like the VM. The node is in the status,
// where no copy of a manifest takes it along. Deleting the object releases the VM: its next pod may go to any node.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=vmp,categories=cocoon,path=vmplacements
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name="Release",type=string,JSONPath=`.spec.release`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="NodeAvailable")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type VMPlacement struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// When the claim ends.
	// +optional
	Spec VMPlacementSpec `json:"spec,omitempty"`
	// Where the state is.
	Status VMPlacementStatus `json:"status,omitempty"`
}

// VMPlacementList is a list of VMPlacements.
//
// +kubebuilder:object:root=true
type VMPlacementList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []VMPlacement `json:"items"`
}

// ReleasePolicy says when a claim ends by itself.
//
// +kubebuilder:validation:Enum=Wait;Never
type ReleasePolicy string

// The release policies.
const (
	ReleaseWait  ReleasePolicy = "Wait"  // when the node is gone: at once if the VM hibernates in the registry, else after waitSeconds
	ReleaseNever ReleasePolicy = "Never" // only by deleting the object
)

// VMPlacementSpec says when the claim ends. It is made from what the first pod of the VM asks for, and is the user's to change
// from then on.
//
// +kubebuilder:validation:XValidation:rule="!has(self.waitSeconds) || !has(self.release) || self.release == 'Wait'",message="is for release Wait",fieldPath=".waitSeconds",reason=FieldValueInvalid
type VMPlacementSpec struct {
	// Release says when the claim ends by itself. It never does while a pod of the VM is on the node.
	// +kubebuilder:default=Wait
	// +optional
	Release ReleasePolicy `json:"release,omitempty"`
	// WaitSeconds is how long a node may be away before the claim on it ends although nothing else holds the state. The VM
	// waits for ever when it is not given.
	// +kubebuilder:validation:Minimum=0
	// +optional
	WaitSeconds *int64 `json:"waitSeconds,omitempty"`
}

// ConditionNodeAvailable says whether the node of a claim can run the VM; its reasons are below.
const ConditionNodeAvailable = "NodeAvailable"

// The reasons of ConditionNodeAvailable.
const (
	ReasonNodeReady    = "NodeReady"
	ReasonNodeNotReady = "NodeNotReady" // the node is there and does not answer, or says that it cannot
	ReasonNodeRemoved  = "NodeRemoved"  // there is no node of the name
	ReasonNodeReplaced = "NodeReplaced" // another machine has the name of the node
)

// VMPlacementStatus says where the state is.
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.nodeName) || size(oldSelf.nodeName) == 0 || (has(self.nodeName) && self.nodeName == oldSelf.nodeName)",message="cannot be changed: the state is there. To give it up, delete the VMPlacement",fieldPath=".nodeName",reason=FieldValueForbidden
type VMPlacementStatus struct {
	// NodeName is the node that holds the VM's state; empty: none yet.
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// NodeUID tells a node from another of the same name.
	// +optional
	NodeUID types.UID `json:"nodeUID,omitempty"`
	// MachineID is the machine behind the node: one that was registered anew still holds the state.
	// +optional
	MachineID string `json:"machineID,omitempty"`
	// PodUID is the pod whose VM made the claim.
	// +optional
	PodUID types.UID `json:"podUID,omitempty"`
	// PodName is that pod's name: a node claims for its own pods only.
	// +optional
	PodName string `json:"podName,omitempty"`
	// ClaimedAt is when that was.
	// +optional
	ClaimedAt *metav1.Time `json:"claimedAt,omitempty"`
	// Conditions are NodeAvailable.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
