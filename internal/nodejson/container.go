package nodejson

import "cocoonstack.io/cocoon/internal/vm"

// Container is one container of a VM, without its process: the environment may be secret.
type Container struct {
	Name        string             `json:"name"`
	Image       string             `json:"image,omitempty"` // of a container that was added to the VM
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

func ephemeral(all []vm.Ephemeral) (out []Container) {
	for _, e := range all {
		out = append(out, Container{Name: e.Record.Name, Image: e.Spec.Image, ImageDigest: e.Record.ImageDigest, Status: e.Record.Status})
	}
	return out
}

func ephemeralRecords(all []Container) (out []vm.Ephemeral) {
	for _, c := range all {
		out = append(out, vm.Ephemeral{
			Spec:   vm.Container{Name: c.Name, Image: c.Image, Kind: vm.ContainerEphemeral},
			Record: vm.ContainerRecord{Name: c.Name, ImageDigest: c.ImageDigest, Status: c.Status},
		})
	}
	return out
}
