package engine

import (
	"context"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// designContainers adds the containers to the first record of a VM and returns their images.
func (n *node) designContainers(ctx context.Context, r *vm.Record) ([]image.Image, error) {
	var images []image.Image
	for _, c := range r.Spec.Containers {
		if c.Root {
			c.Image = r.Spec.Image
		}
		img, err := n.images.Get(ctx, c.Image)
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", c.Name, err)
		}
		if img.Type != vm.ImageOCI {
			return nil, errdefs.Invalidf("container %s: image %s boots itself, so it cannot be one of several containers", c.Name, c.Image)
		}
		process := c.Process.Over(img.Config)
		if process.Empty() {
			return nil, errdefs.Invalidf("container %s: image %s has no entrypoint; give a command", c.Name, c.Image)
		}
		if err := process.Allowed(); err != nil {
			return nil, fmt.Errorf("container %s: %w", c.Name, err)
		}
		images = append(images, img)
		r.Containers = append(r.Containers, vm.ContainerRecord{Name: c.Name, ImageDigest: img.ID, Root: c.Root, Process: process})
	}
	return images, nil
}

// designImageVolumes adds the volumes with the files of images to the first record of a VM and returns their images.
func (n *node) designImageVolumes(ctx context.Context, r *vm.Record) ([]image.Image, error) {
	var images []image.Image
	for _, v := range r.Spec.ImageVolumes() {
		img, err := n.images.Get(ctx, v.Image)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		if img.Type != vm.ImageOCI {
			return nil, errdefs.Invalidf("volume %s: image %s boots itself, so its files cannot be mounted", v.Name, v.Image)
		}
		images = append(images, img)
		r.ImageVolumes = append(r.ImageVolumes, vm.ImageVolume{Volume: v.Name, ImageDigest: img.ID})
	}
	return images, nil
}

// layImages records in r which disks hold the images of its containers and volumes, which are images in this order, and returns
// disks with the missing ones added. Layers that several images share are one disk.
func (n *node) layImages(ctx context.Context, r vm.Record, images []image.Image, disks []vm.Disk) ([]vm.Disk, error) {
	serials := map[string]string{} // by path
	for _, d := range disks {
		if d.Role == vm.RoleLayer {
			serials[d.Path] = d.Serial
		}
	}
	added := 0
	lay := func(img image.Image) (of []string, err error) {
		layers, err := n.images.Base(ctx, img)
		if err != nil {
			return nil, err
		}
		for _, d := range layers {
			serial, ok := serials[d.Path]
			if !ok {
				serial = image.SerialContainerLayer(added)
				d.Serial = serial
				disks, serials[d.Path] = append(disks, d), serial
				added++
			}
			of = append(of, serial)
		}
		return of, nil
	}
	var err error
	for i := range r.Containers {
		if c := &r.Containers[i]; !r.RootContainer() { // of that one, the VM's own disks are the layers
			if c.Layers, err = lay(images[i]); err != nil {
				return nil, fmt.Errorf("container %s: %w", c.Name, err)
			}
		}
	}
	for i := range r.ImageVolumes {
		v := &r.ImageVolumes[i]
		if k := r.Spec.Kernel(); k != nil && k.Volume == v.Volume { // only the node reads it
			continue
		}
		if v.Layers, err = lay(images[len(r.Containers)+i]); err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Volume, err)
		}
	}
	return disks, nil
}

// eachContainer returns all with their statuses changed by f.
func eachContainer(all []vm.ContainerRecord, f func(vm.ContainerStatus) vm.ContainerStatus) []vm.ContainerRecord {
	all = slices.Clone(all)
	for i := range all {
		all[i].Status = f(all[i].Status)
	}
	return all
}

// again returns s for a guest that boots once more.
func again(s vm.ContainerStatus) vm.ContainerStatus {
	if s.State == "" {
		return s
	}
	if s.Exit != nil {
		s.Last, s.Exit = s.Exit, nil
	}
	s.State, s.Reason, s.Message = vm.ContainerWaiting, vm.ContainerInitGoing, ""
	return s
}

// standsOn reports whether r's VM uses the image with that digest.
func standsOn(r vm.Record, digest string) bool {
	return r.ImageDigest == digest ||
		slices.ContainsFunc(r.Containers, func(c vm.ContainerRecord) bool { return c.ImageDigest == digest }) ||
		slices.ContainsFunc(r.ImageVolumes, func(v vm.ImageVolume) bool { return v.ImageDigest == digest }) ||
		slices.ContainsFunc(r.Ephemeral, func(e vm.Ephemeral) bool {
			return e.Record.ImageDigest == digest && len(e.Record.Layers) > 0 ||
				slices.ContainsFunc(e.Volumes, func(v vm.ImageVolume) bool { return v.ImageDigest == digest && len(v.Layers) > 0 })
		})
}

// containerOf resolves the name of a container: in a VM with several, "" means the first app container.
func containerOf(r vm.Record, name string) (string, error) {
	if name == "" {
		for _, c := range r.Spec.Containers {
			if c.Kind == vm.ContainerApp {
				return c.Name, nil
			}
		}
		return "", nil
	}
	c := r.Container(name)
	if c == nil {
		return "", errdefs.NotFoundf("vm %s has no container %q", r.Spec.Name, name)
	}
	if r.Boots(name) { // it is the whole guest
		return "", nil
	}
	return c.Name, nil
}

// containersIn returns the containers of x for a VM of spec that resumes from it or boots its disks. A snapshot from
// elsewhere may say anything.
func containersIn(x snapshot.Snapshot, spec vm.Spec, live bool) ([]vm.ContainerRecord, error) {
	out := x.Record.Clone().Containers
	if !slices.EqualFunc(out, spec.Containers, func(r vm.ContainerRecord, c vm.Container) bool {
		return r.Name == c.Name && r.Root == c.Root
	}) {
		return nil, errdefs.DataLossf("snapshot %s is damaged: its %d containers do not match the %d of its VM", x.Name, len(out), len(spec.Containers))
	}
	for i := range out {
		if spec.Containers[i].Root {
			out[i].ImageDigest, out[i].Layers = x.ImageDigest, nil
		}
		out[i].ImageManifest = ""
		if !live {
			out[i].Status = vm.ContainerStatus{}
		}
	}
	return out, nil
}

// imageVolumesIn returns the volumes of x with the files of images, for a VM of spec. A snapshot from elsewhere may say anything.
func imageVolumesIn(x snapshot.Snapshot, spec vm.Spec) ([]vm.ImageVolume, error) {
	out := x.Record.Clone().ImageVolumes
	if !slices.EqualFunc(out, spec.ImageVolumes(), func(r vm.ImageVolume, v vm.Volume) bool { return r.Volume == v.Name }) {
		return nil, errdefs.DataLossf("snapshot %s is damaged: its %d volumes of images do not match the %d of its VM", x.Name, len(out), len(spec.ImageVolumes()))
	}
	for i := range out {
		out[i].ImageManifest = ""
	}
	return out, nil
}

// baseOf returns the disks of the images that x depends on, with the serials and ports that its guest knows.
func (n *node) baseOf(ctx context.Context, x snapshot.Snapshot, images []image.Image) ([]vm.Disk, error) {
	var base []vm.Disk
	if images[0].ID != "" {
		var err error
		if base, err = n.images.Base(ctx, images[0]); err != nil {
			return nil, err
		}
	}
	ports := map[string]int{} // by serial
	for _, d := range x.Record.Disks {
		ports[d.Serial] = d.Port
	}
	for i, c := range x.Layered() {
		layers, err := n.images.Base(ctx, images[i+1])
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", c.Name, err)
		}
		if len(layers) != len(c.Layers) {
			return nil, errdefs.DataLossf("snapshot %s is damaged: container %s has %d layers, but its image has %d", x.Name, c.Name, len(c.Layers), len(layers))
		}
		for j, d := range layers {
			d.Serial = c.Layers[j]
			d.Port = ports[d.Serial]
			at := slices.IndexFunc(base, func(b vm.Disk) bool { return b.Serial == d.Serial })
			switch {
			case at < 0:
				base = append(base, d)
			case base[at].Path != d.Path:
				return nil, errdefs.DataLossf("snapshot %s is damaged: container %s has the disk %s of another image", x.Name, c.Name, d.Serial)
			}
		}
	}
	return base, nil
}
