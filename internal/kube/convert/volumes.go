package convert

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// checkVolumes refuses unsupported kinds of volumes and of mounts. The engine validates paths.
func checkVolumes(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if why := unservable(v); why != "" {
			errs = append(errs, field.Forbidden(field.NewPath("spec", "volumes").Index(i), fmt.Sprintf("volume %q: %s", v.Name, why)))
		}
	}
	for i, c := range containers(pod) {
		at := containerPath(pod, i)
		for j, m := range c.VolumeMounts {
			if propagated(m) {
				errs = append(errs, field.Forbidden(at.Child("volumeMounts").Index(j).Child("mountPropagation"), noPropagation(m)))
			}
		}
	}
	return errs
}

// propagated reports whether mounts in m are to appear on the host, or those of the host in it.
func propagated(m corev1.VolumeMount) bool {
	return m.MountPropagation != nil && *m.MountPropagation != corev1.MountPropagationNone
}

func noPropagation(m corev1.VolumeMount) string {
	return fmt.Sprintf("volume %q: a VM and its host cannot propagate mounts to each other", m.Name)
}

// unservable returns why a VM cannot have volume v, or "" if it can.
func unservable(v *corev1.Volume) string {
	switch {
	case v.ConfigMap != nil, v.Secret != nil, v.DownwardAPI != nil:
		return ""
	case v.EmptyDir != nil:
		if m := v.EmptyDir.Medium; m != corev1.StorageMediumDefault && m != corev1.StorageMediumMemory {
			return fmt.Sprintf("a VM does not support the emptyDir medium %q; use the default or Memory", m)
		}
		return ""
	case v.Projected != nil:
		for _, s := range v.Projected.Sources {
			if s.ConfigMap == nil && s.Secret == nil && s.DownwardAPI == nil && s.ServiceAccountToken == nil && s.ClusterTrustBundle == nil && s.PodCertificate == nil {
				return fmt.Sprintf("this node does not support the projected source %s", kindOf(s))
			}
		}
		return ""
	case v.PersistentVolumeClaim != nil, v.Ephemeral != nil, v.CSI != nil:
		return ""
	case v.HostPath != nil:
		_, why := HostDir(v.HostPath)
		return why
	case v.NFS != nil:
		if err := NFS(v.NFS, nil).Validate(); err != nil {
			return "nfs: " + err.Error()
		}
		return ""
	case v.Image != nil:
		if v.Image.Reference == "" {
			return "the volume names no image"
		}
		return ""
	}
	if kind := kindOf(v.VolumeSource); kind != "" {
		return kind + ": a VM cannot have such a volume; use a PersistentVolumeClaim"
	}
	return "the volume has no source"
}

// HostDir returns the folder or file of the node that src names. If a VM cannot have it, why says the reason. HostDir does not know which folders
// the node's operator allows: the engine checks that. A missing folder is made if src has no type, as container runtimes do.
func HostDir(src *corev1.HostPathVolumeSource) (dir vm.HostDir, why string) {
	dir.Path = path.Clean(src.Path)
	switch kind := or(src.Type, corev1.HostPathUnset); kind {
	case corev1.HostPathUnset, corev1.HostPathDirectoryOrCreate:
		dir.Create = true
	case corev1.HostPathDirectory:
	case corev1.HostPathFile, corev1.HostPathFileOrCreate:
		dir.File, dir.Create = true, kind == corev1.HostPathFileOrCreate
	default:
		return dir, fmt.Sprintf("hostPath of type %s: a VM can have only folders and regular files of its node; use type %s or %s", kind, corev1.HostPathDirectory, corev1.HostPathFile)
	}
	if !path.IsAbs(dir.Path) || slices.Contains(strings.Split(src.Path, "/"), "..") {
		return dir, fmt.Sprintf("hostPath: %q is not an absolute path without \"..\"", src.Path)
	}
	return dir, ""
}

// isFile reports whether src is a file of the node.
func isFile(src *corev1.HostPathVolumeSource) bool {
	if src == nil {
		return false
	}
	dir, _ := HostDir(src)
	return dir.File
}

// NFS returns the folder of a server that src names, mounted with options. It does not check it.
func NFS(src *corev1.NFSVolumeSource, options []string) vm.NFS {
	return vm.NFS{Server: strings.TrimSuffix(strings.TrimPrefix(src.Server, "["), "]"), Path: src.Path, Options: options, ReadOnly: src.ReadOnly}
}

// onlyRead reports whether no container of pod may write to a volume.
func onlyRead(pod *corev1.Pod, volume string) bool {
	return !slices.ContainsFunc(containers(pod), func(c *corev1.Container) bool {
		return slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == volume && !m.ReadOnly })
	})
}

// Shared returns the names of the volumes of pod that are folders of the node or of servers, without those of claims, which the pod's VM has because
// containers mount them.
func Shared(pod *corev1.Pod) (names []string) {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if (v.HostPath != nil || v.CSI != nil || v.NFS != nil) && slices.ContainsFunc(containers(pod), func(c *corev1.Container) bool { return uses(c, v.Name) }) {
			names = append(names, v.Name)
		}
	}
	return names
}

// kindOf returns the name, as in a manifest, of the field of source that is set.
func kindOf(source any) string {
	set := map[string]json.RawMessage{}
	text, err := json.Marshal(source)
	if err != nil || json.Unmarshal(text, &set) != nil {
		return ""
	}
	for _, kind := range slices.Sorted(maps.Keys(set)) {
		return kind
	}
	return ""
}

// volumes returns the volumes of pod that its containers mount, those that are disks themselves or whose files are on disks, and the one with the kernel, without their content.
func volumes(pod *corev1.Pod) []vm.Volume {
	var out []vm.Volume
	ask, _ := contract.ParseMachine(pod.Annotations)
	kernel := kernelVolume(pod)
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		def := vm.Volume{Name: v.Name, Kind: vm.VolumeFiles, Label: ask.FileDisks[v.Name]}
		if d := hostDisk(pod, v); d != nil {
			out = append(out, vm.Volume{Name: v.Name, Kind: vm.VolumeHostDisk, HostDisk: d})
			continue
		}
		if def.Label == "" && v.Name != kernel && !slices.ContainsFunc(containers(pod), func(c *corev1.Container) bool { return uses(c, v.Name) }) {
			continue // like the kubelet, skip volumes that no container mounts
		}
		if sc := pod.Spec.SecurityContext; sc != nil && sc.FSGroup != nil && v.Image == nil && v.HostPath == nil && v.NFS == nil {
			group := *sc.FSGroup
			def.Group = &group
		}
		if d := v.EmptyDir; d != nil {
			def.Kind, def.Memory = vm.VolumeEmpty, d.Medium == corev1.StorageMediumMemory
			if d.SizeLimit != nil {
				def.SizeLimit = d.SizeLimit.Value()
			}
		}
		if v.Image != nil {
			def.Kind, def.Image = vm.VolumeImage, v.Image.Reference
		}
		if v.HostPath != nil {
			dir, _ := HostDir(v.HostPath)
			dir.ReadOnly = onlyRead(pod, v.Name)
			def.Kind, def.Dir = vm.VolumeDir, &dir
		}
		if v.NFS != nil {
			folder := NFS(v.NFS, nil)
			folder.ReadOnly = folder.ReadOnly || onlyRead(pod, v.Name)
			def.Kind, def.NFS = vm.VolumeNFS, &folder
		}
		ref := ClaimName(pod, v) // Fill replaces it by the id of the volume
		if v.CSI != nil {
			ref = v.CSI.Driver
		}
		if ref != "" {
			def.Kind, def.Disk = vm.VolumeDisk, &vm.VolumeUse{Ref: ref, ReadOnly: v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ReadOnly, Shared: ask.Hardware.Disks[v.Name].Shared}
			sc := pod.Spec.SecurityContext
			def.Disk.GroupOnMismatch = sc != nil && sc.FSGroupChangePolicy != nil && *sc.FSGroupChangePolicy == corev1.FSGroupChangeOnRootMismatch
		}
		out = append(out, def)
	}
	return out
}

// ClaimName returns the name of the PersistentVolumeClaim that volume v of pod uses, in pod's namespace, or "" if v uses none. The
// claim of an ephemeral volume has the names of the pod and the volume.
func ClaimName(pod *corev1.Pod, v *corev1.Volume) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		return pod.Name + "-" + v.Name
	}
	return ""
}

// Disks returns the volumes of pod that Fill finds disks or folders for.
func Disks(pod *corev1.Pod) []vm.Volume {
	return slices.DeleteFunc(volumes(pod), func(v vm.Volume) bool { return v.Kind != vm.VolumeDisk })
}

// Published reports whether pod has volumes that a CSI driver may have published for it.
func Published(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.PersistentVolumeClaim != nil || v.Ephemeral != nil || v.CSI != nil
	})
}

// ImageVolumes returns the volumes of pod with the files of images, which the pod's VM has because containers mount them, or its guest boots
// their kernel.
func ImageVolumes(pod *corev1.Pod) (out []*corev1.Volume) {
	kernel := kernelVolume(pod)
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Image != nil && (v.Name == kernel || slices.ContainsFunc(containers(pod), func(c *corev1.Container) bool { return uses(c, v.Name) })) {
			out = append(out, v)
		}
	}
	return out
}

// uses reports whether c mounts a volume, has it as a device, or has variables from files in it.
func uses(c *corev1.Container, volume string) bool {
	return slices.ContainsFunc(c.VolumeDevices, func(d corev1.VolumeDevice) bool { return d.Name == volume }) || slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == volume }) ||
		slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return inFile(e) && e.ValueFrom.FileKeyRef.VolumeName == volume })
}

// mounts returns the mounts and devices of a container. A mount comes before the mounts inside it.
func mounts(pod *corev1.Pod, c *corev1.Container, values map[string]string) []vm.Mount {
	var out []vm.Mount
	for _, m := range c.VolumeMounts {
		mount := vm.Mount{Volume: m.Name, Path: path.Clean("/" + m.MountPath), ReadOnly: m.ReadOnly, SubPath: m.SubPath}
		if m.SubPathExpr != "" {
			mount.SubPath = expand(m.SubPathExpr, values)
		}
		if mount.SubPath != "" {
			if mount.SubPath = path.Clean(mount.SubPath); mount.SubPath == "." {
				mount.SubPath = ""
			}
		}
		if mount.SubPath == "" && slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name && isFile(v.HostPath) }) {
			mount.SubPath = vm.DirFile
		}
		out = append(out, mount)
	}
	for _, d := range c.VolumeDevices {
		out = append(out, vm.Mount{Volume: d.Name, Path: path.Clean("/" + d.DevicePath), Device: true})
	}
	slices.SortStableFunc(out, func(a, b vm.Mount) int { return strings.Count(a.Path, "/") - strings.Count(b.Path, "/") })
	return out
}

// CheckMounts returns a FailedPrecondition error if a sub-path of pod's mounts needs a variable that env does not have.
func CheckMounts(pod *corev1.Pod, env Environment) error {
	var errs []error
	for _, c := range containers(pod) {
		values := env[c.Name].values()
		for _, m := range c.VolumeMounts {
			if name := unknown(m.SubPathExpr, values); name != "" {
				errs = append(errs, errdefs.Preconditionf("subPathExpr %q of volume %q needs the environment variable %s, which is not set", m.SubPathExpr, m.Name, name))
			}
		}
	}
	return errors.Join(errs...)
}

// unknown returns the first variable in s that values does not have, or "" if it has all.
func unknown(s string, values map[string]string) string {
	s = strings.ReplaceAll(s, "$$", "")
	for {
		_, rest, found := strings.Cut(s, "$(")
		if !found {
			return ""
		}
		name, after, closed := strings.Cut(rest, ")")
		if !closed {
			return ""
		}
		if _, ok := values[name]; !ok {
			return name
		}
		s = after
	}
}

// Unnamed returns the ConfigMaps and Secrets that annotations of pod name but no volume of it. A node with its own credentials
// may not read them: the API server lets a node read only objects that the specs of its pods name, and ignores annotations.
func Unnamed(pod *corev1.Pod) []Object {
	ask, _ := contract.ParseVirtlet(pod.Annotations)
	machine, _ := contract.ParseMachine(pod.Annotations)
	var out []Object
	sources := []contract.Source{ask.UserDataSource, ask.SSHKeySource, ask.Files, machine.NetworkData}
	for _, name := range slices.Concat(machine.SSHSecrets, machine.Logins.Secrets()) {
		sources = append(sources, contract.Source{Kind: contract.SourceSecret, Name: name})
	}
	for _, src := range sources {
		o := Object{KindConfigMap, src.Name}
		if src.Kind == contract.SourceSecret {
			o.Kind = KindSecret
		}
		if src.Name != "" && !slices.Contains(out, o) && !names(pod, o) {
			out = append(out, o)
		}
	}
	return out
}

// names reports whether a volume of pod uses o.
func names(pod *corev1.Pod, o Object) bool {
	is := func(kind ObjectKind, name string) bool { return o == Object{kind, name} }
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		switch {
		case v.ConfigMap != nil:
			return is(KindConfigMap, v.ConfigMap.Name)
		case v.Secret != nil:
			return is(KindSecret, v.Secret.SecretName)
		case v.Projected == nil:
			return false
		}
		return slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
			return s.ConfigMap != nil && is(KindConfigMap, s.ConfigMap.Name) || s.Secret != nil && is(KindSecret, s.Secret.Name)
		})
	})
}

// Name adds a volume to pod, which is about to be created, for each of its Unnamed objects, so that its node may read them. No
// container mounts these volumes. Name reports whether it changed the pod. A second call changes nothing.
func Name(pod *corev1.Pod) bool {
	objects := Unnamed(pod)
	for _, o := range objects {
		v := corev1.Volume{Name: freeVolume(pod)}
		if optional := new(true); o.Kind == KindSecret { // optional, because the node reports a missing object with a better message
			v.Secret = &corev1.SecretVolumeSource{SecretName: o.Name, Optional: optional}
		} else {
			v.ConfigMap = &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: o.Name}, Optional: optional}
		}
		pod.Spec.Volumes = append(pod.Spec.Volumes, v)
	}
	return len(objects) > 0
}

func freeVolume(pod *corev1.Pod) string {
	for i := 0; ; i++ {
		name := "cocoon-source-" + strconv.Itoa(i)
		if !slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name }) {
			return name
		}
	}
}
