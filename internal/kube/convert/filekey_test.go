package convert

import (
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

func fromFile(name, key string, optional bool) corev1.EnvVar {
	return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FileKeyRef: &corev1.FileKeySelector{
		VolumeName: "shared", Path: "dir//config.env", Key: key, Optional: &optional,
	}}}
}

func withFileKeys(env ...corev1.EnvVar) *corev1.Pod {
	return plain(on(func(c *corev1.Container) { c.Env, c.Args = env, []string{"$(A)", "$(B)", "$$(A)"} }), func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "shared", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	})
}

// The guest reads the values: until then words stand for them, in the order of the kubelet.
func TestEnvFromFiles(t *testing.T) {
	value := func(name, value string) corev1.EnvVar { return corev1.EnvVar{Name: name, Value: value} }
	key := func(name, key, absent string, optional bool) vm.FileKey {
		return vm.FileKey{Name: name, Volume: "shared", Path: "dir/config.env", Key: key, Optional: optional, Absent: absent}
	}
	zero, one := vm.FileWord(0), vm.FileWord(1)
	for name, tc := range map[string]struct {
		env  []corev1.EnvVar
		want Variables
		args []string
	}{
		"one": {
			[]corev1.EnvVar{value("B", "$(A)"), fromFile("A", "K", false), value("C", "x$(A)")},
			Variables{[]vm.EnvVar{{Name: "B", Value: "$(A)"}, {Name: "C", Value: "x" + zero}}, []vm.FileKey{key("A", "K", "$(A)", false)}},
			[]string{zero, "$(A)", "$(A)"},
		},
		"over a plain one": {
			[]corev1.EnvVar{value("A", "1"), fromFile("A", "K", true)},
			Variables{[]vm.EnvVar{{Name: "A", Value: "1"}}, []vm.FileKey{key("A", "K", "1", true)}},
			[]string{zero, "$(B)", "$(A)"},
		},
		"under a plain one": {
			[]corev1.EnvVar{fromFile("A", "K", true), value("B", "$(A)"), value("A", "1")},
			Variables{[]vm.EnvVar{{Name: "B", Value: zero}, {Name: "A", Value: "1"}}, []vm.FileKey{key("", "K", "$(A)", true)}},
			[]string{"1", zero, "$(A)"},
		},
		"two of a name": {
			[]corev1.EnvVar{fromFile("A", "K", false), fromFile("A", "L", true)},
			Variables{[]vm.EnvVar{}, []vm.FileKey{key("A", "K", "$(A)", false), key("A", "L", zero, true)}},
			[]string{one, "$(B)", "$(A)"},
		},
	} {
		pod := withFileKeys(tc.env...)
		if errs := Check(pod); len(errs) > 0 {
			t.Errorf("%s: %v", name, errs)
			continue
		}
		env, err := Env(t.Context(), pod, Node{}, cluster{}, nil, nil)
		if err != nil || !reflect.DeepEqual(env["c"], tc.want) {
			t.Errorf("%s: %+v, %v", name, env["c"], err)
		}
		s := Spec(pod, Node{}, env)
		if got := s.Containers[0].Process; !reflect.DeepEqual(got.Args, tc.args) || !reflect.DeepEqual(got.FileKeys, tc.want.FileKeys) {
			t.Errorf("%s: %+v", name, got)
		}
		if err := s.Validate(); err != nil { // the volume is there, although no container mounts it
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEnvFromFilesIsRefused(t *testing.T) {
	pod := withFileKeys(fromFile("A", "K", false))
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "shared", MountPath: "/x", SubPathExpr: "a/$(A)"}}
	if errs := Check(pod); len(errs) != 1 || !strings.Contains(errs[0].Error(), "subPathExpr") {
		t.Errorf("a part of a volume that the value names: %v", errs)
	}
	pod = withFileKeys(fromFile("A", "K", false))
	pod.Annotations = map[string]string{contract.KeyManaged: "true"}
	if errs := Check(pod); len(errs) != 1 || !strings.Contains(errs[0].Error(), "fileKeyRef") {
		t.Errorf("a managed VM: %v", errs)
	}
}
