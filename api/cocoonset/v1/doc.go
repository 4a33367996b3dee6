// Package v1 is the API group cocoonset.cocoonstack.io/v1: sets of VMs that belong together, their hibernation, and
// the claims of VMs on nodes.
//
// The types hold no behaviour. What a schema or a CEL rule can refuse is refused by the API server; see the markers.
//
// +kubebuilder:object:generate=true
// +groupName=cocoonset.cocoonstack.io
package v1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion of the types.
var GroupVersion = schema.GroupVersion{Group: "cocoonset.cocoonstack.io", Version: "v1"}

// AddToScheme makes the types known to a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &CocoonSet{}, &CocoonSetList{}, &CocoonHibernation{}, &CocoonHibernationList{}, &VMPlacement{}, &VMPlacementList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// Finalizers of the controllers.
const (
	FinalizerSet         = "cocoonset.cocoonstack.io/finalizer"
	FinalizerHibernation = "cocoonhibernation.cocoonset.cocoonstack.io/finalizer"
)

// Conditions that all kinds share.
const (
	ConditionReady       = "Ready"
	ConditionProgressing = "Progressing"
)
