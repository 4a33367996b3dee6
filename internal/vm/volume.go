package vm

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Limits of volumes. Sizes are bytes and include the paths of files.
const (
	MaxVolumes     = 256
	MaxMounts      = 256
	MaxVolumeFiles = 4096     // of one volume
	MaxVolumeSize  = 3 << 20  // of the files of one volume; they are sent in one message
	MaxVolumesSize = 12 << 20 // of the files of all volumes of a VM
	maxPath        = 4095
	maxPathPart    = 255
	maxID          = 1<<32 - 2 // of users and groups
)

// reserved are folders that belong to the guest's kernel. No volume may be mounted there, except over /dev/shm.
var reserved = []string{"/proc", "/sys", "/dev"}

// ValidateVolumes is the part of Validate that checks volumes and mounts.
func (s Spec) ValidateVolumes() error {
	if len(s.Volumes) > MaxVolumes || len(s.Mounts) > MaxMounts {
		return errdefs.Invalidf("too many volumes or mounts: %d volumes and %d mounts; at most %d volumes and %d mounts are possible", len(s.Volumes), len(s.Mounts), MaxVolumes, MaxMounts)
	}
	known, size := map[string]VolumeKind{}, 0
	for _, v := range s.Volumes {
		if known[v.Name] != "" {
			return errdefs.Invalidf("two volumes have the name %q", v.Name)
		}
		known[v.Name] = v.Kind
		if err := v.validate(); err != nil {
			return err
		}
		size += filesSize(v.Files)
	}
	if size > MaxVolumesSize {
		return errdefs.Invalidf("the volumes hold %d bytes; at most %d are possible", size, MaxVolumesSize)
	}
	if slices.ContainsFunc(s.Volumes, func(v Volume) bool { return v.Dir != nil && v.Dir.Trusted || v.HostDisk != nil && v.HostDisk.Trusted }) {
		return errdefs.Invalidf("only containers of a sandbox can have a folder or a device that the list of the operator does not have")
	}
	if err := validateMounts(s.Mounts, known); err != nil {
		return err
	}
	if err := s.validateFileMounts(s.Mounts); err != nil {
		return err
	}
	for _, c := range s.Containers {
		if err := s.validateFileMounts(c.Mounts); err != nil {
			return fmt.Errorf("container %s: %w", c.Name, err)
		}
		if len(c.Mounts) > MaxMounts {
			return errdefs.Invalidf("container %s has %d mounts; at most %d are possible", c.Name, len(c.Mounts), MaxMounts)
		}
		if err := validateMounts(c.Mounts, known); err != nil {
			return fmt.Errorf("container %s: %w", c.Name, err)
		}
		if err := c.validateFileKeys(s.Volumes); err != nil {
			return err
		}
	}
	return s.validateShared()
}

// WithVolume returns s with one more volume, mounted at path for its main process, or in each of its containers; with "" it is not
// mounted. It does not check the result.
func (s Spec) WithVolume(v Volume, path string) Spec {
	s = s.Clone()
	s.Volumes = append(s.Volumes, v)
	switch m := (Mount{Volume: v.Name, Path: path}); {
	case path == "":
	case len(s.Containers) == 0:
		s.Mounts = append(s.Mounts, m)
	default:
		for i := range s.Containers {
			s.Containers[i].Mounts = append(s.Containers[i].Mounts, m)
		}
	}
	return s
}

// WithoutVolume returns s without the volume of that name and its mounts.
func (s Spec) WithoutVolume(name string) Spec {
	s = s.Clone()
	of := func(m Mount) bool { return m.Volume == name }
	s.Volumes = without(s.Volumes, func(v Volume) bool { return v.Name == name })
	s.Mounts = without(s.Mounts, of)
	for i := range s.Containers {
		s.Containers[i].Mounts = without(s.Containers[i].Mounts, of)
	}
	return s
}

// without is slices.DeleteFunc, but returns nil instead of an empty slice, which encodes to the same JSON.
func without[T any](s []T, del func(T) bool) []T {
	if s = slices.DeleteFunc(s, del); len(s) == 0 {
		return nil
	}
	return s
}

// MountPath returns where a volume is mounted first; "" if it is mounted nowhere.
func (s Spec) MountPath(volume string) string {
	all := s.Mounts
	for _, c := range s.Containers {
		all = append(slices.Clip(all), c.Mounts...)
	}
	if i := slices.IndexFunc(all, func(m Mount) bool { return m.Volume == volume }); i >= 0 {
		return all[i].Path
	}
	return ""
}

func validateMounts(mounts []Mount, known map[string]VolumeKind) error {
	taken := map[string]bool{}
	for _, m := range mounts {
		switch {
		case known[m.Volume] == "":
			return errdefs.Invalidf("mount at %s: there is no volume %q", m.Path, m.Volume)
		case m.Device && known[m.Volume] != VolumeDisk && known[m.Volume] != VolumeHostDisk:
			return errdefs.Invalidf("device %s: volume %s is not a disk; mount it instead", m.Path, m.Volume)
		case taken[m.Path]:
			return errdefs.Invalidf("two volumes have the mount path %s", m.Path)
		}
		taken[m.Path] = true
		if err := m.validate(); err != nil {
			return err
		}
	}
	return nil
}

// labelRE is what both trees of an ISO 9660 image can have as their label.
var labelRE = regexp.MustCompile(`^[A-Za-z0-9._-]{1,16}$`)

// ValidDiskLabel reports whether label can be the Label of a volume.
func ValidDiskLabel(label string) bool { return labelRE.MatchString(label) }

var volumeKinds = []VolumeKind{VolumeFiles, VolumeEmpty, VolumeImage, VolumeDisk, VolumeDir, VolumeNFS, VolumeHostDisk}

func (v Volume) validate() error {
	switch {
	case len(v.Name) > MaxNameLength || !nameRE.MatchString(v.Name):
		return errdefs.Invalidf("invalid volume name %q; use at most %d letters, digits, '.', '_' and '-', and begin with a letter or digit", v.Name, MaxNameLength)
	case !slices.Contains(volumeKinds, v.Kind):
		return errdefs.Invalidf("volume %s: invalid kind %q; use one of %v", v.Name, v.Kind, volumeKinds)
	case v.Kind == VolumeNFS && (v.Memory || v.SizeLimit != 0 || v.Group != nil || len(v.Files) > 0):
		return errdefs.Invalidf("volume %s: a folder of an NFS server cannot have a size limit, a group or given files, or be in memory", v.Name)
	case (v.Kind == VolumeNFS) != (v.NFS != nil):
		return errdefs.Invalidf("volume %s: a volume of kind %s names a folder of an NFS server, and no other volume does", v.Name, VolumeNFS)
	case v.Kind == VolumeDir && (v.Memory || v.SizeLimit != 0 || len(v.Files) > 0):
		return errdefs.Invalidf("volume %s: a folder of the node cannot have a size limit or given files, or be in memory", v.Name)
	case v.Dir != nil && v.Dir.File && v.Group != nil:
		return errdefs.Invalidf("volume %s: a file of the node cannot be given to a group", v.Name)
	case (v.Kind == VolumeDir) != (v.Dir != nil):
		return errdefs.Invalidf("volume %s: a volume of kind %s names a folder of the node, and no other volume does", v.Name, VolumeDir)
	case v.Kind == VolumeDisk && (v.Memory || v.SizeLimit != 0 || len(v.Files) > 0):
		return errdefs.Invalidf("volume %s: a disk of the volume store cannot have a size limit or given files, or be in memory", v.Name)
	case (v.Kind == VolumeDisk) != (v.Disk != nil):
		return errdefs.Invalidf("volume %s: a volume of kind %s names a disk of the volume store, and no other volume does", v.Name, VolumeDisk)
	case v.Kind == VolumeImage && (v.Memory || v.SizeLimit != 0 || v.Group != nil || len(v.Files) > 0):
		return errdefs.Invalidf("volume %s: a volume with the files of an image cannot have a size limit, a group or other files, or be in memory", v.Name)
	case (v.Kind == VolumeImage) != (v.Image != ""):
		return errdefs.Invalidf("volume %s: a volume of kind %s needs an image, and no other volume has one", v.Name, VolumeImage)
	case v.Label != "" && v.Kind != VolumeFiles:
		return errdefs.Invalidf("volume %s: only a volume of files has a label", v.Name)
	case v.Label != "" && !ValidDiskLabel(v.Label):
		return errdefs.Invalidf("volume %s: invalid label %q of its disk; use at most 16 letters, digits, '.', '_' and '-'", v.Name, v.Label)
	case v.Kind == VolumeFiles && (v.Memory || v.SizeLimit != 0):
		return errdefs.Invalidf("volume %s: a volume of files cannot be in memory or have a size limit", v.Name)
	case v.Kind == VolumeEmpty && len(v.Files) > 0:
		return errdefs.Invalidf("volume %s: a volume that starts empty cannot be given files", v.Name)
	case v.SizeLimit < 0:
		return errdefs.Invalidf("volume %s: its size limit is negative", v.Name)
	case v.Group != nil && (*v.Group < 0 || *v.Group > maxID):
		return errdefs.Invalidf("volume %s: %d is not a group id", v.Name, *v.Group)
	}
	if err := v.onlyHostDisk(); err != nil {
		return err
	}
	switch {
	case v.Disk != nil:
		return v.Disk.validate(v.Name)
	case v.Dir != nil:
		return v.Dir.validate(v.Name)
	case v.NFS != nil:
		if err := v.NFS.Validate(); err != nil {
			return fmt.Errorf("volume %s: %w", v.Name, err)
		}
		return nil
	}
	return ValidateFiles(v.Name, v.Files)
}

func (u VolumeUse) validate(volume string) error {
	switch {
	case u.Ref == "" || len(u.Ref) > maxPathPart:
		return errdefs.Invalidf("volume %s: name the disk of the volume store, in at most %d characters", volume, maxPathPart)
	case u.FSType != "" && u.FSType != "ext4" && u.FSType != "xfs":
		return errdefs.Invalidf("volume %s: invalid file system %q; use ext4 or xfs", volume, u.FSType)
	}
	return nil
}

// validateFileMounts checks the mounts of files of the node, and of files on a disk.
func (s Spec) validateFileMounts(mounts []Mount) error {
	for _, m := range mounts {
		i := slices.IndexFunc(s.Volumes, func(v Volume) bool { return v.Name == m.Volume })
		if i >= 0 && s.Volumes[i].Label != "" {
			return errdefs.Invalidf("volume %s is a disk with the label %s, which the guest mounts itself; leave out the path %s or the label", m.Volume, s.Volumes[i].Label, m.Path)
		}
		if i >= 0 && s.Volumes[i].Dir != nil && s.Volumes[i].Dir.File && m.SubPath != DirFile {
			return errdefs.Invalidf("volume %s is a file of the node, so it has no part %q; mount its part %q", m.Volume, m.SubPath, DirFile)
		}
	}
	return nil
}

func (d HostDir) validate(volume string) error {
	if d.Trusted && (d.Published || d.Create) {
		return errdefs.Invalidf("volume %s: what a kubelet asks for is there already", volume)
	}
	if (d.Below || d.ReadOnlyBelow) && (!d.Trusted || d.File) || d.ReadOnlyBelow && !d.ReadOnly {
		return errdefs.Invalidf("volume %s: only a folder for which a kubelet asks has what is mounted below it, and that is read-only only with the folder", volume)
	}
	if d.File && (d.Published || d.Path == "/") {
		return errdefs.Invalidf("volume %s: %q is a folder of the node, not a file", volume, d.Path)
	}
	if d.Path != "/" && (!strings.HasPrefix(d.Path, "/") || !localPath(d.Path[1:])) {
		return errdefs.Invalidf("volume %s: %q is not the path of a folder of the node: it must be absolute and have no empty, \".\" or \"..\" parts", volume, d.Path)
	}
	if d.Published && d.Create {
		return errdefs.Invalidf("volume %s: the folder of a published volume is there already", volume)
	}
	return nil
}

// ValidateFiles returns an InvalidArgument error unless files can be the content of volume.
func ValidateFiles(volume string, files []VolumeFile) error {
	if n := len(files); n > MaxVolumeFiles {
		return errdefs.Invalidf("volume %s: it has %d files; at most %d are possible", volume, n, MaxVolumeFiles)
	}
	if n := filesSize(files); n > MaxVolumeSize {
		return errdefs.Invalidf("volume %s: its files have %d bytes; at most %d are possible", volume, n, MaxVolumeSize)
	}
	kind := map[string]bool{} // true: a file, false: a folder
	for _, f := range files {
		switch {
		case !localPath(f.Path) || strings.HasPrefix(f.Path, ".."):
			return errdefs.Invalidf("volume %s: invalid file path %q", volume, f.Path)
		case f.Mode > 0o777:
			return errdefs.Invalidf("volume %s: file %s cannot have the mode %#o", volume, f.Path, f.Mode)
		case f.UID != nil && (*f.UID < 0 || *f.UID > maxID):
			return errdefs.Invalidf("volume %s: file %s cannot belong to user %d", volume, f.Path, *f.UID)
		}
		if _, taken := kind[f.Path]; taken {
			return errdefs.Invalidf("volume %s: path %s is given twice", volume, f.Path)
		}
		kind[f.Path] = true
		for dir := path.Dir(f.Path); dir != "."; dir = path.Dir(dir) {
			if kind[dir] {
				return errdefs.Invalidf("volume %s: %s is both a file and a folder", volume, dir)
			}
			kind[dir] = false
		}
	}
	return nil
}

func filesSize(files []VolumeFile) (n int) {
	for _, f := range files {
		n += len(f.Path) + len(f.Data)
	}
	return n
}

func (m Mount) validate() error {
	if !strings.HasPrefix(m.Path, "/") || m.Path == "/" || !localPath(m.Path[1:]) {
		return errdefs.Invalidf("volume %s: it cannot be mounted at %q", m.Volume, m.Path)
	}
	below := func(dir string) bool { return m.Path == dir || strings.HasPrefix(m.Path, dir+"/") }
	if m.Device && (m.SubPath != "" || m.Path == "/dev") {
		return errdefs.Invalidf("volume %s: its device cannot be at %s, or at a path inside it", m.Volume, m.Path)
	}
	if slices.ContainsFunc(reserved, below) && !below("/dev/shm") && (!m.Device || !below("/dev")) {
		return errdefs.Invalidf("volume %s: %s belongs to the guest's kernel; mount it elsewhere", m.Volume, m.Path)
	}
	if m.SubPath != "" && !localPath(m.SubPath) {
		return errdefs.Invalidf("volume %s: %q is not a path inside it", m.Volume, m.SubPath)
	}
	return nil
}

// localPath reports whether p is a clean relative path that does not leave its folder.
func localPath(p string) bool {
	if p == "" || p == "." || len(p) > maxPath || path.Clean(p) != p || strings.HasPrefix(p, "/") || strings.IndexByte(p, 0) >= 0 {
		return false
	}
	return !slices.ContainsFunc(strings.Split(p, "/"), func(part string) bool { return part == ".." || len(part) > maxPathPart })
}
