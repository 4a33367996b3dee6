package vm

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// A sandbox shares one folder with its node. What containers have of the node appears in it, as long as they exist.
const (
	// SharedTag is the tag of that folder.
	SharedTag = "cocoon:shared"
	// SharedVolume is the volume of the guest that is that folder. No other volume of a sandbox has this name.
	SharedVolume = "cocoon-shared"
)

// SharedPath is the path of the i-th of the Volumes of a container in the folder that its sandbox shares with the node.
func SharedPath(container string, i int) string { return path.Join(container, strconv.Itoa(i)) }

// OwnVolume is the name in the guest of a volume that only the container has and that is a disk. No volume of its VM may have it.
func OwnVolume(container, volume string) string { return container + "." + volume }

// GuestMounts returns the mounts of c as the guest makes them: those of c's own volumes are parts of SharedVolume, or have the name OwnVolume.
func (c Container) GuestMounts() []Mount {
	out := cloneSlice(c.Mounts)
	for i, m := range out {
		at := slices.IndexFunc(c.Volumes, func(v Volume) bool { return v.Name == m.Volume })
		if at < 0 {
			continue
		}
		if c.Volumes[at].Kind != VolumeDir {
			out[i].Volume = OwnVolume(c.Name, m.Volume)
			continue
		}
		sub := SharedPath(c.Name, at)
		if !c.Volumes[at].Dir.File {
			sub = path.Join(sub, m.SubPath)
		}
		out[i] = Mount{Volume: SharedVolume, Path: m.Path, SubPath: sub, ReadOnly: c.Volumes[at].Dir.fixed(m.ReadOnly)}
	}
	return out
}

// fixed reports whether the guest mounts d so that nothing can be written there, if its mount is readOnly. Where only a part of it is, the node
// sees to that.
func (d HostDir) fixed(readOnly bool) bool {
	return (readOnly || d.ReadOnly) && (!d.Below || d.ReadOnlyBelow)
}

// validateVolumes checks the volumes that only c has.
func (c Container) validateVolumes() error {
	if len(c.Volumes) > MaxMounts {
		return errdefs.Invalidf("%d volumes of its own; at most %d are possible", len(c.Volumes), MaxMounts)
	}
	for i, v := range c.Volumes {
		if err := v.validate(); err != nil {
			return err
		}
		device := v.Kind == VolumeHostDisk && v.HostDisk.Trusted
		if v.Kind != VolumeDir && v.Kind != VolumeImage && !device || v.Group != nil {
			return errdefs.Invalidf("volume %s: a container's own volume is a folder, a file or a block device of the node, or the files of an image, and is given to no group", v.Name)
		}
		for _, m := range c.Mounts {
			if m.Volume == v.Name && m.Device != device {
				return errdefs.Invalidf("mount at %s: a block device of the node is shown as a device, and no other volume is", m.Path)
			}
		}
		if slices.ContainsFunc(c.Volumes[:i], func(o Volume) bool { return o.Name == v.Name }) {
			return errdefs.Invalidf("two of its volumes have the name %q", v.Name)
		}
	}
	if err := (Spec{Volumes: c.Volumes}).validateFileMounts(c.Mounts); err != nil {
		return fmt.Errorf("its own volumes: %w", err)
	}
	return nil
}

// validateSandbox is the part of Validate that checks what a sandbox cannot have.
func (s Spec) validateSandbox() error {
	if !s.Sandbox {
		if s.CgroupParent != "" {
			return errdefs.Invalidf("only a sandbox can be in the cgroup %q of the node", s.CgroupParent)
		}
		return nil
	}
	if err := validateCgroup(s.CgroupParent); err != nil {
		return err
	}
	const text = "a sandbox has no %s; add containers to it while it runs"
	switch {
	case len(s.Containers) > 0 || s.Restart != "": // it may have given the VM its image
		return errdefs.Invalidf(text, "containers when it boots")
	case s.Image != "":
		return errdefs.Invalidf(text, "image of its own")
	case !s.Process.Empty() || s.Process.ReadOnlyRoot || s.Process.Security != nil || len(s.Process.Env) > 0:
		return errdefs.Invalidf(text, "process of its own")
	case len(s.Mounts) > 0:
		return errdefs.Invalidf(text, "mounts of its own")
	case s.CloudInit != nil:
		return errdefs.Invalidf(text, "cloud-init")
	case slices.ContainsFunc(s.Volumes, func(v Volume) bool { return v.Name == SharedVolume }):
		return errdefs.Invalidf("no volume of a sandbox can have the name %s", SharedVolume)
	case s.Hardware != nil && !s.Hardware.onlyGrows() || s.Graphics || s.Firmware != "":
		return errdefs.Invalidf(text, "firmware, screen or hardware of a guest that boots itself")
	}
	return nil
}

// CgroupPrefix begins the name of the folder that a VM has below its Spec.CgroupParent. Its ID follows.
const CgroupPrefix = "cocoon-"

// validateCgroup checks Spec.CgroupParent.
func validateCgroup(parent string) error {
	switch {
	case parent == "":
		return nil
	case !path.IsAbs(parent) || path.Clean(parent) != parent || parent == "/" || len(parent) > maxPath || !utf8.ValidString(parent) || strings.ContainsFunc(parent, unicode.IsControl):
		return errdefs.Invalidf("invalid cgroup %.80q; use a clean absolute path below the root", parent)
	case slices.ContainsFunc(strings.Split(parent, "/"), func(part string) bool { return len(part) > maxPathPart }):
		return errdefs.Invalidf("invalid cgroup %.80q: a part of its path is longer than %d bytes", parent, maxPathPart)
	}
	return nil
}
