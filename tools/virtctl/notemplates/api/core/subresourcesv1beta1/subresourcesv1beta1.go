// Package subresourcesv1beta1 has the requests and answers of the subresources of KubeVirt's templates of VMs.
package subresourcesv1beta1

import virtv1 "kubevirt.io/api/core/v1"

// ProcessOptions are the values of a template's parameters.
type ProcessOptions struct {
	Parameters map[string]string `json:"parameters,omitempty"`
}

// ProcessedVirtualMachineTemplate is the VM that a template yields.
type ProcessedVirtualMachineTemplate struct {
	VirtualMachine *virtv1.VirtualMachine `json:"virtualMachine"`
	Message        string                 `json:"message,omitempty"`
}
