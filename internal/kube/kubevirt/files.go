package kubevirt

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// The labels of disks with files, as in KubeVirt: of one whose volume gives none, and of one with the answers for the setup of Windows.
const (
	defaultLabel = "cfgdata"
	sysprepLabel = "unattendCD"
)

// Of the token of a service account in a guest. The disk stays as it is while the guest runs, so the token is valid as long as the API server allows.
const (
	tokenPath    = "token"
	tokenSeconds = 365 * 24 * 3600
)

// files returns the volume of the pod whose files are a disk of the guest, the label of that disk, and the name of the field of v that has them;
// name is "" if v has no files.
func files(v v1.Volume) (out corev1.Volume, label, name string) {
	out.Name = v.Name
	switch {
	case v.ConfigMap != nil:
		label, name = v.ConfigMap.VolumeLabel, "configMap"
		out.ConfigMap = &corev1.ConfigMapVolumeSource{LocalObjectReference: v.ConfigMap.LocalObjectReference, Optional: v.ConfigMap.Optional}
	case v.Secret != nil:
		label, name = v.Secret.VolumeLabel, "secret"
		out.Secret = &corev1.SecretVolumeSource{SecretName: v.Secret.SecretName, Optional: v.Secret.Optional}
	case v.Sysprep != nil:
		label, name = sysprepLabel, "sysprep"
		if secret := v.Sysprep.Secret; secret != nil {
			out.Secret = &corev1.SecretVolumeSource{SecretName: secret.Name}
		} else if v.Sysprep.ConfigMap != nil {
			out.ConfigMap = &corev1.ConfigMapVolumeSource{LocalObjectReference: *v.Sysprep.ConfigMap}
		}
	case v.DownwardAPI != nil:
		label, name = v.DownwardAPI.VolumeLabel, "downwardAPI"
		out.DownwardAPI = &corev1.DownwardAPIVolumeSource{Items: v.DownwardAPI.Fields}
	case v.ServiceAccount != nil:
		name = "serviceAccount"
		seconds := int64(tokenSeconds)
		out.Projected = &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: tokenPath, ExpirationSeconds: &seconds}},
			{ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: "kube-root-ca.crt"}, Items: []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}},
			}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{
				{Path: "namespace", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.namespace"}},
			}}},
		}}
	}
	if label == "" {
		label = defaultLabel
	}
	return out, label, name
}

// serviceAccount returns the service account of the instance: that of its spec, or of a volume.
func serviceAccount(s *v1.VirtualMachineInstanceSpec) string {
	name := s.ServiceAccountName
	for _, v := range s.Volumes {
		if name == "" && v.ServiceAccount != nil {
			name = v.ServiceAccount.ServiceAccountName
		}
	}
	return name
}

// files checks a volume whose files are a disk.
func (c *check) files(v v1.Volume, at *field.Path) {
	_, label, name := files(v)
	if name == "" {
		return
	}
	at = at.Child(name)
	if !vm.ValidDiskLabel(label) {
		c.invalid(at.Child("volumeLabel"), label, "must be at most 16 letters, digits, '.', '_' and '-'")
	}
	switch {
	case v.ConfigMap != nil && v.ConfigMap.Name == "":
		c.errs = append(c.errs, field.Required(at.Child("name"), ""))
	case v.Secret != nil && v.Secret.SecretName == "":
		c.errs = append(c.errs, field.Required(at.Child("secretName"), ""))
	case v.Sysprep != nil:
		c.sysprep(v.Sysprep, at)
	case v.ServiceAccount != nil && v.ServiceAccount.ServiceAccountName == "":
		c.errs = append(c.errs, field.Required(at.Child("serviceAccountName"), ""))
	case v.ServiceAccount != nil && v.ServiceAccount.ServiceAccountName != serviceAccount(c.spec):
		c.invalid(at.Child("serviceAccountName"), v.ServiceAccount.ServiceAccountName, fmt.Sprintf("a VM has one service account, which is %s here", serviceAccount(c.spec)))
	case v.DownwardAPI != nil:
		c.downward(v.DownwardAPI.Fields, at.Child("fields"))
	}
}

// sysprep checks where the answers for the setup of Windows are.
func (c *check) sysprep(s *v1.SysprepSource, at *field.Path) {
	for name, ref := range map[string]*corev1.LocalObjectReference{"secret": s.Secret, "configMap": s.ConfigMap} {
		if ref != nil && ref.Name == "" {
			c.errs = append(c.errs, field.Required(at.Child(name, "name"), ""))
		}
	}
	if (s.Secret == nil) == (s.ConfigMap == nil) {
		c.errs = append(c.errs, field.Required(at, "give one of secret and configMap, with a file autounattend.xml or unattend.xml"))
	}
}

// downward checks the files of a downward API.
func (c *check) downward(all []corev1.DownwardAPIVolumeFile, at *field.Path) {
	if len(all) == 0 {
		c.errs = append(c.errs, field.Required(at, "say which fields of the pod are files of the disk"))
	}
	for i, f := range all {
		at := at.Index(i)
		if f.Path == "" {
			c.errs = append(c.errs, field.Required(at.Child("path"), ""))
		}
		if f.FieldRef == nil || f.ResourceFieldRef != nil {
			c.errs = append(c.errs, field.Required(at.Child("fieldRef"), "a file of the disk is a field of the pod, such as metadata.labels"))
		}
	}
}
