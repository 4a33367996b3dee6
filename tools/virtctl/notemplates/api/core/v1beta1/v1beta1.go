// Package v1beta1 has what virtctl writes of KubeVirt's templates of VMs. It reads none and registers no kind.
package v1beta1

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"kubevirt.io/virt-template-api/core"
)

// GroupVersion is the version of this package's types.
var GroupVersion = schema.GroupVersion{Group: core.GroupName, Version: "v1beta1"}

// VirtualMachineTemplate is what `virtctl template convert` prints.
type VirtualMachineTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	Spec VirtualMachineTemplateSpec `json:"spec"`
}

// DeepCopyObject makes a template an object of an informer.
func (t *VirtualMachineTemplate) DeepCopyObject() runtime.Object {
	out := *t
	out.ObjectMeta = *t.ObjectMeta.DeepCopy()
	if t.Spec.VirtualMachine != nil {
		out.Spec.VirtualMachine = t.Spec.VirtualMachine.DeepCopy()
	}
	out.Spec.Parameters = slices.Clone(t.Spec.Parameters)
	return &out
}

// VirtualMachineTemplateSpec is a VirtualMachine with parameters.
type VirtualMachineTemplateSpec struct {
	VirtualMachine *runtime.RawExtension `json:"virtualMachine"`
	Parameters     []Parameter           `json:"parameters,omitempty"`
	Message        string                `json:"message,omitempty"`
}

// Parameter is a variable of a template.
type Parameter struct {
	Name        string `json:"name"`
	DisplayName string `json:"displayName,omitempty"`
	Description string `json:"description,omitempty"`
	Value       string `json:"value,omitempty"`
	Generate    string `json:"generate,omitempty"`
	From        string `json:"from,omitempty"`
	Required    bool   `json:"required,omitempty"`
}

// VirtualMachineTemplateRequest asks for a template of a VM.
type VirtualMachineTemplateRequest struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	Spec VirtualMachineTemplateRequestSpec `json:"spec"`
}

// VirtualMachineTemplateRequestSpec names the VM and the template.
type VirtualMachineTemplateRequestSpec struct {
	VirtualMachineRef VirtualMachineReference `json:"virtualMachineRef"`
	TemplateName      string                  `json:"templateName,omitempty"`
}

// VirtualMachineReference names a VM.
type VirtualMachineReference struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
}
