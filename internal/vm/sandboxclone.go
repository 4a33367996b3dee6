package vm

import (
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// SandboxClone asks for a sandbox that resumes from a snapshot of one, which is in a folder. Only code in cocoond makes one: the folders that its
// containers share may be any of the node.
type SandboxClone struct {
	Dir        string      // absolute path of the folder
	Spec       Spec        // of the new sandbox, as for a VM that boots; its size and sysctls are those of the snapshot
	Containers []Container // those that run in the snapshot, by their names there. Their images, processes and names are not changed by it
}

// savedDir stands for the path of a folder of the node in a snapshot.
const savedDir = "/saved"

// Saved returns c as a snapshot has it: nothing of it names a folder of the node.
func (c Container) Saved() Container {
	c = c.Clone()
	for i, v := range c.Volumes {
		if v.Dir != nil {
			c.Volumes[i].Dir = &HostDir{Path: savedDir, ReadOnly: v.Dir.ReadOnly, File: v.Dir.File}
		}
	}
	return c
}

// Resumed returns c, which a snapshot has, with the folders of the node and the settings of next, which is the same container elsewhere. The guest
// knows folders by their places, so those stay.
// Errors: FailedPrecondition if next has other mounts.
func (c Container) Resumed(next Container) (Container, error) {
	out := next.Clone()
	out.Name, out.Image, out.Kind, out.Process, out.Manual, out.PIDs = c.Name, c.Image, c.Kind, c.Process, c.Manual, c.PIDs
	out.Volumes, out.Mounts = cloneSlice(c.Volumes), cloneSlice(c.Mounts)
	if len(next.Mounts) != len(c.Mounts) || next.MessagePath != c.MessagePath {
		return out, errdefs.Preconditionf("container %s has %d mounts in the snapshot, and %d now; give it the same", c.Name, len(c.Mounts), len(next.Mounts))
	}
	for _, m := range c.Mounts {
		at := slices.IndexFunc(next.Mounts, func(o Mount) bool { return o.Path == m.Path && o.ReadOnly == m.ReadOnly && o.SubPath == m.SubPath })
		if at < 0 {
			return out, errdefs.Preconditionf("container %s has a mount at %s in the snapshot, and no such one now; give it the same mounts", c.Name, m.Path)
		}
		from := slices.IndexFunc(next.Volumes, func(v Volume) bool { return v.Name == next.Mounts[at].Volume })
		to := slices.IndexFunc(c.Volumes, func(v Volume) bool { return v.Name == m.Volume })
		if from >= 0 && to >= 0 && c.Volumes[to].Kind == VolumeImage && next.Volumes[from].Kind == VolumeImage && c.Volumes[to].Image == next.Volumes[from].Image {
			continue // the guest has its files
		}
		if from < 0 || to < 0 || next.Volumes[from].Dir == nil || c.Volumes[to].Dir == nil || next.Volumes[from].Dir.File != c.Volumes[to].Dir.File ||
			next.Volumes[from].Dir.ReadOnly != c.Volumes[to].Dir.ReadOnly {
			return out, errdefs.Preconditionf("container %s has something else mounted at %s in the snapshot than now; give it the same mounts", c.Name, m.Path)
		}
		dir := *next.Volumes[from].Dir
		out.Volumes[to].Dir = &dir
	}
	return out, nil
}
