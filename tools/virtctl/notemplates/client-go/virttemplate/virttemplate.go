// Package virttemplate stands in for the client of KubeVirt's templates of VMs. It has no client: the commands of virtctl that
// need one end with an error.
package virttemplate

import (
	"context"
	"errors"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"kubevirt.io/virt-template-api/core/subresourcesv1beta1"
	"kubevirt.io/virt-template-api/core/v1beta1"
)

// Interface is the part of the client that virtctl calls.
type Interface interface{ TemplateV1beta1() Version }

// Version is the client of one version of the API.
type Version interface {
	RESTClient() rest.Interface
	VirtualMachineTemplates(namespace string) Templates
	VirtualMachineTemplateRequests(namespace string) Requests
}

// Templates is the client of a namespace's templates.
type Templates interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*v1beta1.VirtualMachineTemplate, error)
	Process(ctx context.Context, name string, opts subresourcesv1beta1.ProcessOptions) (*subresourcesv1beta1.ProcessedVirtualMachineTemplate, error)
	CreateVirtualMachine(ctx context.Context, name string, opts subresourcesv1beta1.ProcessOptions) (*subresourcesv1beta1.ProcessedVirtualMachineTemplate, error)
}

// Requests is the client of a namespace's requests of templates.
type Requests interface {
	Create(ctx context.Context, request *v1beta1.VirtualMachineTemplateRequest, opts metav1.CreateOptions) (*v1beta1.VirtualMachineTemplateRequest, error)
}

// NewForConfig returns an error, always.
func NewForConfig(*rest.Config) (Interface, error) {
	return nil, errors.New("this build of virtctl has no templates of VMs; use `virtctl create vm` or a manifest")
}
