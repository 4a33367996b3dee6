package nodejson

import (
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Container is one container of a VM, without its process: the environment may be secret.
type Container struct {
	Name        string             `json:"name"`
	Image       string             `json:"image,omitempty"` // of a container that was added to the VM
	ImageDigest string             `json:"image_digest"`
	Root        bool               `json:"root,omitempty"` // its root is the VM's own
	Status      vm.ContainerStatus `json:"status"`

	// Of a container that was added to the VM.
	Manual    bool              `json:"manual,omitempty"` // it starts when somebody starts it
	Labels    map[string]string `json:"labels,omitempty"`
	CreatedAt time.Time         `json:"created_at,omitzero"`
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
		out = append(out, Container{Name: e.Record.Name, Image: e.Spec.Image, ImageDigest: e.Record.ImageDigest, Status: e.Record.Status, Manual: e.Spec.Manual, Labels: e.Spec.Labels, CreatedAt: e.CreatedAt})
	}
	return out
}

func ephemeralRecords(all []Container) (out []vm.Ephemeral) {
	for _, c := range all {
		out = append(out, vm.Ephemeral{
			Spec:      vm.Container{Name: c.Name, Image: c.Image, Kind: vm.ContainerEphemeral, Manual: c.Manual, Labels: c.Labels},
			Record:    vm.ContainerRecord{Name: c.Name, ImageDigest: c.ImageDigest, Status: c.Status},
			CreatedAt: c.CreatedAt,
		})
	}
	return out
}
