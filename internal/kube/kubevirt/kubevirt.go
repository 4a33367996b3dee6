// Package kubevirt knows KubeVirt's objects: it says what of a VirtualMachineInstance Cocoon honours, and converts one to the pod
// that a node of ours runs as a VM.
//
// It also says what a VirtualMachine becomes with its instancetype and its preference, and which claim a DataVolume is.
//
// It is pure: it reads and writes no object of a cluster. The controllers and the aggregated API stand on it.
package kubevirt

import (
	"errors"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clonev1beta1 "kubevirt.io/api/clone/v1beta1"
	"kubevirt.io/api/core"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"
	poolv1beta1 "kubevirt.io/api/pool/v1beta1"
	snapshotv1beta1 "kubevirt.io/api/snapshot/v1beta1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
)

// AddToScheme registers the kinds of KubeVirt that Cocoon serves, in the versions that are stored.
func AddToScheme(s *runtime.Scheme) error {
	group := schema.GroupVersion{Group: core.GroupName, Version: "v1"}
	s.AddKnownTypes(group, &v1.VirtualMachine{}, &v1.VirtualMachineList{}, &v1.VirtualMachineInstance{}, &v1.VirtualMachineInstanceList{},
		&v1.VirtualMachineInstanceReplicaSet{}, &v1.VirtualMachineInstanceReplicaSetList{}, &v1.KubeVirt{}, &v1.KubeVirtList{})
	metav1.AddToGroupVersion(s, group)
	s.AddKnownTypes(cdi.SchemeGroupVersion, &cdi.DataVolume{}, &cdi.DataVolumeList{}, &cdi.CDIConfig{}, &cdi.CDIConfigList{})
	metav1.AddToGroupVersion(s, cdi.SchemeGroupVersion)
	return errors.Join(v1beta1.AddToScheme(s), snapshotv1beta1.AddToScheme(s), clonev1beta1.AddToScheme(s), poolv1beta1.AddToScheme(s))
}
