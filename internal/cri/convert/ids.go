// Package convert translates between the messages of CRI and the values of package vm: a pod sandbox is a sandbox VM, and its
// containers are those that are added to it.
//
// It is pure: it does no I/O and keeps nothing. What CRI wants to see again, and a VM has no field for, is a label of the VM or of
// the container.
package convert

import (
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// prefix begins the ids of our sandboxes and containers. Those of containerd are hexadecimal digits.
const prefix = "vm-"

// Ours reports whether id is that of a sandbox or a container of ours, or the beginning of one.
func Ours(id string) bool { return strings.HasPrefix(id, prefix) }

// SandboxID returns the id of the sandbox that a VM is.
func SandboxID(id vm.ID) string { return prefix + string(id) }

// ContainerID returns the id of a container of a VM; name is that of the container in the VM.
func ContainerID(id vm.ID, name string) string { return SandboxID(id) + "-" + name }

// ParseID returns the beginning of the id of the VM, and that of the name of the container, if the id has one.
// Errors: NotFound if it is no id of ours.
func ParseID(id string) (machine, container string, err error) {
	rest, ok := strings.CutPrefix(id, prefix)
	machine, container, _ = strings.Cut(rest, "-")
	if !ok || machine == "" {
		return "", "", errdefs.NotFoundf("no VM pod has the id %q", id)
	}
	return machine, container, nil
}

// NewContainerName returns the name that a new container has in its VM. The names of CRI are in its labels, because a container that
// is created again has the same one.
func NewContainerName() string { return string(vm.NewID())[:nameLength] }

const nameLength = 13
