// Package core names the API group of KubeVirt's templates of VMs.
package core

// The group and its kinds.
const (
	GroupName                   = "template.kubevirt.io"
	SingularResourceName        = "virtualmachinetemplate"
	PluralResourceName          = "virtualmachinetemplates"
	SingularRequestResourceName = "virtualmachinetemplaterequest"
)
