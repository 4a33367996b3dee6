package convert

import (
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Each object that annotations name is added to the spec once, if no volume of the pod uses it already.
func TestNameWhatAnnotationsName(t *testing.T) {
	volume := func(name string, s corev1.VolumeSource) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: s}
	}
	configMap := func(name string) corev1.VolumeSource {
		return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}}
	}
	secret := func(name string) corev1.VolumeSource {
		return corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name}}
	}
	for name, c := range map[string]struct {
		annotations []string
		volumes     []corev1.Volume
		want        []Object
	}{
		"nothing":             {},
		"three":               {[]string{contract.KeyVirtletUserDataSource, "secret/a", contract.KeyVirtletSSHKeySource, "configmap/a/key", contract.KeyVirtletFiles, "configmap/b"}, nil, []Object{{KindSecret, "a"}, {KindConfigMap, "a"}, {KindConfigMap, "b"}}},
		"one, twice":          {[]string{contract.KeyVirtletUserDataSource, "secret/a", contract.KeyVirtletSSHKeySource, "secret/a"}, nil, []Object{{KindSecret, "a"}}},
		"a volume":            {[]string{contract.KeyVirtletUserDataSource, "secret/a"}, []corev1.Volume{volume("v", secret("a"))}, nil},
		"of the other kind":   {[]string{contract.KeyVirtletUserDataSource, "secret/a"}, []corev1.Volume{volume("v", configMap("a"))}, []Object{{KindSecret, "a"}}},
		"a projected one":     {[]string{contract.KeyVirtletFiles, "configmap/a"}, []corev1.Volume{volume("v", corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "a"}}}}}})}, nil},
		"a name that is used": {[]string{contract.KeyVirtletFiles, "configmap/a"}, []corev1.Volume{volume("cocoon-source-0", secret("x"))}, []Object{{KindConfigMap, "a"}}},
		"a bad annotation":    {[]string{contract.KeyVirtletFiles, "file/a"}, nil, nil},
	} {
		pod := plain(annotate(c.annotations...), func(p *corev1.Pod) { p.Spec.Volumes = c.volumes })
		if got := Unnamed(pod); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v is not named, want %v", name, got, c.want)
		}
		if Name(pod) != (len(c.want) > 0) || len(pod.Spec.Volumes) != len(c.volumes)+len(c.want) || Unnamed(pod) != nil || Name(pod) {
			t.Errorf("%s: volumes %+v", name, pod.Spec.Volumes)
		}
		seen := map[string]bool{}
		for _, v := range pod.Spec.Volumes {
			if seen[v.Name] {
				t.Errorf("%s: two volumes are called %s", name, v.Name)
			}
			seen[v.Name] = true
		}
		if errs := checkVolumes(pod); len(errs) > 0 || len(volumes(pod)) > 0 {
			t.Errorf("%s: %v, mounted: %v", name, errs, volumes(pod))
		}
	}
}

// If a node may not read a source, the error says what to do, and the node retries.
func TestSourceThatTheNodeMayNotRead(t *testing.T) {
	denied := errdefs.As(errdefs.Unavailable, apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "a", nil))
	_, err := CloudInit(t.Context(), plain(annotate(contract.KeyVirtletSSHKeySource, "configmap/a")), cluster{fail: denied})
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "add it to the pod as a volume") {
		t.Error(err)
	}
}
