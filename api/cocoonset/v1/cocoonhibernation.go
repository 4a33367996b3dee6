package v1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// CocoonHibernation asks for the hibernation of one pod's VM, or for its waking.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=ch,categories=cocoon,path=cocoonhibernations
// +kubebuilder:printcolumn:name="Pod",type=string,JSONPath=`.spec.podRef.name`
// +kubebuilder:printcolumn:name="Desire",type=string,JSONPath=`.spec.desire`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() || self.metadata.name == self.spec.podRef.name",optionalOldSelf=true,message="must be called like its pod: there is one for a pod",fieldPath=".spec.podRef.name",reason=FieldValueInvalid
type CocoonHibernation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// What is wanted.
	Spec CocoonHibernationSpec `json:"spec"`
	// What there is.
	Status CocoonHibernationStatus `json:"status,omitempty"`
}

// CocoonHibernationList is a list of CocoonHibernations.
//
// +kubebuilder:object:root=true
type CocoonHibernationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []CocoonHibernation `json:"items"`
}

// Desire is what is wanted of a VM.
//
// +kubebuilder:validation:Enum=Hibernate;Wake
type Desire string

// The desires.
const (
	DesireHibernate Desire = "Hibernate"
	DesireWake      Desire = "Wake"
)

// CocoonHibernationSpec is what is wanted.
type CocoonHibernationSpec struct {
	// PodRef is the pod, of the same namespace.
	PodRef PodReference `json:"podRef"`
	// Desire says whether its VM hibernates or is awake.
	Desire Desire `json:"desire"`
}

// PodReference names a pod of the same namespace.
type PodReference struct {
	// Name of the pod.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="cannot be changed",reason=FieldValueForbidden
	Name string `json:"name"`
}

// HibernationPhase sums up a CocoonHibernation.
//
// +kubebuilder:validation:Enum=Pending;Hibernating;Hibernated;Waking;Active;Failed
type HibernationPhase string

// The phases of a CocoonHibernation.
const (
	HibernationPending     HibernationPhase = "Pending"
	HibernationHibernating HibernationPhase = "Hibernating"
	HibernationHibernated  HibernationPhase = "Hibernated" // the snapshot is durable and verified in the registry
	HibernationWaking      HibernationPhase = "Waking"
	HibernationActive      HibernationPhase = "Active"
	HibernationFailed      HibernationPhase = "Failed"
)

// CocoonHibernationStatus is what there is.
type CocoonHibernationStatus struct {
	// ObservedGeneration is the generation of the spec that the status answers for.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Phase sums it up.
	// +optional
	Phase HibernationPhase `json:"phase,omitempty"`
	// VMName is the pod's VM.
	// +optional
	VMName string `json:"vmName,omitempty"`
	// Since is when the transition in flight began.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
	// Conditions are Ready.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
