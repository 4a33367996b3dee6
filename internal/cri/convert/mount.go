package convert

import (
	"fmt"
	"path"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Source is what is at the path of a mount on the node.
type Source struct {
	Path  string // without symbolic links
	File  bool   // a regular file; otherwise a folder
	Below bool   // something is mounted below the folder
}

// Finds are what finds the things that a configuration names. Their errors are passed on.
type Finds struct {
	Path   func(path string) (Source, error)           // what is at a path of the node
	Device func(path string) (real string, err error)  // a block device of the node, without symbolic links; "": it is something else
	Image  func(*cri.ImageSpec) (id string, err error) // in our store

	Profile func(path string) (text []byte, err error) // a seccomp profile of the node
}

// Mounted returns c with the mounts and the devices of a configuration.
// Errors: InvalidArgument for one that a VM cannot have.
func Mounted(c vm.Container, from *cri.ContainerConfig, find Finds) (vm.Container, error) {
	for i, m := range from.GetMounts() {
		if m.GetImage() != nil {
			id, err := find.Image(m.GetImage())
			if err != nil {
				return c, fmt.Errorf("mount %s: %w", m.GetContainerPath(), err)
			}
			v := vm.Volume{Name: fmt.Sprintf("m%d", i), Kind: vm.VolumeImage, Image: id}
			mount := vm.Mount{Volume: v.Name, Path: path.Clean(m.GetContainerPath()), ReadOnly: true}
			if sub := m.GetImageSubPath(); sub != "" {
				mount.SubPath = strings.TrimPrefix(path.Clean("/"+sub), "/")
			}
			c.Volumes, c.Mounts = append(c.Volumes, v), append(c.Mounts, mount)
			continue
		}
		at, err := find.Path(m.GetHostPath())
		if err != nil {
			return c, fmt.Errorf("mount %s: %w", m.GetContainerPath(), err)
		}
		if target := path.Clean(m.GetContainerPath()); at.File && strings.HasPrefix(target, "/dev/") {
			c.MessagePath = target // the guest has a /dev of its own; a kubelet puts the file for the message of the end there
			continue
		}
		v := vm.Volume{Name: fmt.Sprintf("m%d", i), Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: at.Path, ReadOnly: m.GetReadonly(), File: at.File, Trusted: true, Below: at.Below, ReadOnlyBelow: at.Below && m.GetRecursiveReadOnly()}}
		mount := vm.Mount{Volume: v.Name, Path: path.Clean(m.GetContainerPath()), ReadOnly: m.GetReadonly()}
		if at.File {
			mount.SubPath = vm.DirFile
		}
		c.Volumes, c.Mounts = append(c.Volumes, v), append(c.Mounts, mount)
	}
	return withDevices(c, from.GetDevices(), find)
}

// withDevices returns c with block devices of the node, which the kubelet has for claims in block mode.
func withDevices(c vm.Container, devices []*cri.Device, find Finds) (vm.Container, error) {
	for i, d := range devices {
		real, err := find.Device(d.GetHostPath())
		switch {
		case err != nil:
			return c, fmt.Errorf("device %s: %w", d.GetContainerPath(), err)
		case real == "":
			return c, errdefs.Invalidf("a VM has no device of the node but disks, so not %s either; remove it", d.GetHostPath())
		}
		readOnly := !strings.Contains(d.GetPermissions(), "w")
		v := vm.Volume{Name: fmt.Sprintf("d%d", i), Kind: vm.VolumeHostDisk, HostDisk: &vm.HostDisk{Path: real, ReadOnly: readOnly, Trusted: true}}
		c.Volumes = append(c.Volumes, v)
		c.Mounts = append(c.Mounts, vm.Mount{Volume: v.Name, Path: path.Clean(d.GetContainerPath()), ReadOnly: readOnly, Device: true})
	}
	return c, nil
}

// Message returns what a container has left as the message of its end, and the file of the node in which the kubelet looks for it; "": there is
// none, or the container has written it there itself.
func Message(e vm.Ephemeral) (file, text string) {
	x := e.Record.Status.Exit
	if e.Spec.MessagePath == "" || x == nil {
		return "", ""
	}
	for _, m := range configOf(e.Spec).GetMounts() {
		if path.Clean(m.GetContainerPath()) == e.Spec.MessagePath {
			return m.GetHostPath(), x.Message
		}
	}
	return "", ""
}
