package convert

import (
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// Unnamed returns the ConfigMaps and Secrets that annotations of pod name but none of its volumes. A node with its own
// identity may not read them: the API server lets it read only what the specs of its pods name, and ignores annotations.
func Unnamed(pod *corev1.Pod) []Object {
	ask, _ := contract.ParseVirtlet(pod.Annotations)
	var out []Object
	for _, src := range []contract.Source{ask.UserDataSource, ask.SSHKeySource, ask.Files} {
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

// Name adds to pod, which is about to be created, a volume that no container mounts for each of its Unnamed objects, so that
// its node may read them. It reports whether there were any. A second call changes nothing.
func Name(pod *corev1.Pod) bool {
	objects := Unnamed(pod)
	for _, o := range objects {
		v := corev1.Volume{Name: freeVolume(pod)}
		if optional := new(true); o.Kind == KindSecret { // the node reports a missing object
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
