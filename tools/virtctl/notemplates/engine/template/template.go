// Package template stands in for the processor of KubeVirt's templates of VMs: it processes none.
package template

import (
	"errors"

	"k8s.io/apimachinery/pkg/util/validation/field"
	virtv1 "kubevirt.io/api/core/v1"

	"kubevirt.io/virt-template-api/core/v1beta1"
)

var errNone = errors.New("this build of virtctl has no templates of VMs; use `virtctl create vm` or a manifest")

// Processor yields the VM of a template.
type Processor interface {
	Process(tpl *v1beta1.VirtualMachineTemplate) (*virtv1.VirtualMachine, string, error)
}

type none struct{}

func (none) Process(*v1beta1.VirtualMachineTemplate) (*virtv1.VirtualMachine, string, error) {
	return nil, "", errNone
}

// GetDefaultProcessor returns a processor that refuses every template.
func GetDefaultProcessor() Processor { return none{} }

// MergeParameters returns an error, always.
func MergeParameters([]v1beta1.Parameter, map[string]string) ([]v1beta1.Parameter, error) {
	return nil, errNone
}

// ValidateParameterReferences returns an error, always.
func ValidateParameterReferences(*v1beta1.VirtualMachineTemplate) (warnings []string, errs field.ErrorList) {
	return nil, field.ErrorList{field.InternalError(nil, errNone)}
}
