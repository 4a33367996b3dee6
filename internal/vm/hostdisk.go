package vm

import (
	"fmt"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// HostDisk names a file of the node whose bytes are a raw disk. The node's operator lists the folders below which VMs may have files. A VM with a
// HostDisk cannot be saved.
type HostDisk struct {
	Path     string `json:"path"`               // absolute, clean, without symbolic links
	Capacity int64  `json:"capacity,omitempty"` // bytes that it gets if it is missing; 0: it must be there
	ReadOnly bool   `json:"ro,omitempty"`       // the guest cannot write to it
	Shared   bool   `json:"shared,omitempty"`   // several VMs may have it at the same time; each of them has to set this
	// Trusted says that it is a block device for which the node's own kubelet has asked, so the list of the operator does not apply, and Path
	// may have symbolic links. Only containers of a sandbox have such volumes, and no request of the node API.
	Trusted bool `json:"trusted,omitempty"`
}

// HostDisks returns the volumes of s that are files of the node.
func (s Spec) HostDisks() (out []Volume) {
	for _, v := range s.Volumes {
		if v.Kind == VolumeHostDisk {
			out = append(out, v)
		}
	}
	return out
}

// HostDiskSerial is the serial of the disk that is the i-th of the HostDisks of a VM.
func HostDiskSerial(i int) string { return fmt.Sprintf("cocoon-h%03d", i) }

// Validate returns an InvalidArgument error if d can be no file of a node.
func (d HostDisk) Validate() error {
	switch {
	case !strings.HasPrefix(d.Path, "/") || !localPath(d.Path[1:]):
		return errdefs.Invalidf("%q is not the path of a file of the node: it must be absolute and have no empty, \".\" or \"..\" parts", d.Path)
	case d.Trusted && d.Capacity != 0:
		return errdefs.Invalidf("a block device of the node has the capacity that it has; leave it out")
	case d.Capacity < 0 || d.Capacity > MaxStorage:
		return errdefs.Invalidf("a file of the node cannot get a capacity of %d bytes; use at most %d, or 0 for a file that is there", d.Capacity, int64(MaxStorage))
	}
	return nil
}

// onlyHostDisk checks that v is a file of the node, or has none.
func (v Volume) onlyHostDisk() error {
	switch {
	case (v.Kind == VolumeHostDisk) != (v.HostDisk != nil):
		return errdefs.Invalidf("volume %s: a volume of kind %s names a file of the node, and no other volume does", v.Name, VolumeHostDisk)
	case v.HostDisk == nil:
		return nil
	case v.Memory || v.SizeLimit != 0 || len(v.Files) > 0 || v.Group != nil:
		return errdefs.Invalidf("volume %s: a disk of the node cannot have a size limit, a group or given files, or be in memory", v.Name)
	}
	if err := v.HostDisk.Validate(); err != nil {
		return fmt.Errorf("volume %s: %w", v.Name, err)
	}
	return nil
}

// validateHostDisks refuses a file of the node that is two disks, and one that is mounted.
func (s Spec) validateHostDisks() error {
	taken := map[string]string{}
	for _, v := range s.HostDisks() {
		path := v.HostDisk.Path
		if other := taken[path]; other != "" {
			return errdefs.Invalidf("the volumes %s and %s are the same file %s of the node; leave one out", other, v.Name, path)
		}
		taken[path] = v.Name
		if at := s.MountPath(v.Name); at != "" {
			return errdefs.Invalidf("volume %s is a disk of the node, which the guest finds itself; leave out the path %s", v.Name, at)
		}
	}
	return nil
}
