package nodejson

import "cocoonstack.io/cocoon/internal/vm"

// Container is one container of a VM, without its process: the environment may be secret.
type Container struct {
	Name        string             `json:"name"`
	ImageDigest string             `json:"image_digest"`
	Root        bool               `json:"root,omitempty"` // its root is the VM's own
	Status      vm.ContainerStatus `json:"status"`
}

func containers(all []vm.ContainerRecord) (out []Container) {
	for _, c := range all {
		out = append(out, Container{Name: c.Name, ImageDigest: c.ImageDigest, Root: c.Root, Status: c.Status})
	}
	return out
}

func containerRecords(all []Container) (out []vm.ContainerRecord) {
	for _, c := range all {
		out = append(out, vm.ContainerRecord{Name: c.Name, ImageDigest: c.ImageDigest, Root: c.Root, Status: c.Status})
	}
	return out
}
