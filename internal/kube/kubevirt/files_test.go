package kubevirt

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
)

// Volumes with files are disks of the VM, and a node takes the pod.
func TestFiles(t *testing.T) {
	i := vmi(t, "web")
	add := func(name string, source v1.VolumeSource) {
		i.Spec.Volumes = append(i.Spec.Volumes, v1.Volume{Name: name, VolumeSource: source})
		i.Spec.Domain.Devices.Disks = append(i.Spec.Domain.Devices.Disks, v1.Disk{Name: name, DiskDevice: v1.DiskDevice{Disk: &v1.DiskTarget{Bus: v1.DiskBusVirtio}}})
	}
	yes := true
	add("app", v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "app-config"}, Optional: &yes}})
	add("keys", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "app-keys", VolumeLabel: "OEMDRV"}})
	add("info", v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Fields: []corev1.DownwardAPIVolumeFile{{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}})
	add("account", v1.VolumeSource{ServiceAccount: &v1.ServiceAccountVolumeSource{ServiceAccountName: "robot"}})
	add("answers", v1.VolumeSource{Sysprep: &v1.SysprepSource{Secret: &corev1.LocalObjectReference{Name: "setup"}}})
	if errs, warnings := CheckInstance(i); len(errs)+len(warnings) > 0 {
		t.Fatal(errs, warnings)
	}
	pod := Pod(i)
	if errs := convert.Check(pod); len(errs) > 0 {
		t.Fatalf("a node refuses the pod: %v", errs)
	}
	labels := map[string]string{}
	for _, v := range convert.Spec(pod, convert.Node{}, nil).Volumes {
		labels[v.Name] = v.Label
	}
	for name, want := range map[string]string{"app": "cfgdata", "keys": "OEMDRV", "info": "cfgdata", "account": "cfgdata", "answers": "unattendCD"} {
		if labels[name] != want {
			t.Errorf("disk %s is called %q, want %q", name, labels[name], want)
		}
	}
	if pod.Spec.ServiceAccountName != "robot" || *pod.Spec.AutomountServiceAccountToken {
		t.Errorf("service account %q", pod.Spec.ServiceAccountName)
	}
	for _, v := range pod.Spec.Volumes {
		if v.Name == "answers" && v.Secret.SecretName != "setup" {
			t.Errorf("%+v", v.Secret)
		}
		if v.Name == "app" && (v.ConfigMap.Name != "app-config" || !*v.ConfigMap.Optional) {
			t.Errorf("%+v", v.ConfigMap)
		}
	}
}

func TestFilesThatAreRefused(t *testing.T) {
	for what, tc := range map[string]struct {
		source v1.VolumeSource
		at     string
	}{
		"no name":      {v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{}}, "configMap.name"},
		"no secret":    {v1.VolumeSource{Secret: &v1.SecretVolumeSource{}}, "secret.secretName"},
		"long label":   {v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "a", VolumeLabel: strings.Repeat("x", 17)}}, "secret.volumeLabel"},
		"comma":        {v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "a"}, VolumeLabel: "a,b=c"}}, "configMap.volumeLabel"},
		"no fields":    {v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{}}, "downwardAPI.fields"},
		"no path":      {v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Fields: []corev1.DownwardAPIVolumeFile{{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}}, "downwardAPI.fields[0].path"},
		"resource":     {v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Fields: []corev1.DownwardAPIVolumeFile{{Path: "a", ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu"}}}}}, "downwardAPI.fields[0].fieldRef"},
		"no answers":   {v1.VolumeSource{Sysprep: &v1.SysprepSource{}}, "sysprep"},
		"two answers":  {v1.VolumeSource{Sysprep: &v1.SysprepSource{Secret: &corev1.LocalObjectReference{Name: "a"}, ConfigMap: &corev1.LocalObjectReference{Name: "a"}}}, "sysprep"},
		"nowhere":      {v1.VolumeSource{Sysprep: &v1.SysprepSource{Secret: &corev1.LocalObjectReference{}}}, "sysprep.secret.name"},
		"no account":   {v1.VolumeSource{ServiceAccount: &v1.ServiceAccountVolumeSource{}}, "serviceAccount.serviceAccountName"},
		"two accounts": {v1.VolumeSource{ServiceAccount: &v1.ServiceAccountVolumeSource{ServiceAccountName: "b"}}, "serviceAccount.serviceAccountName"},
	} {
		i := vmi(t, "web")
		if what == "two accounts" {
			i.Spec.ServiceAccountName = "a"
		}
		i.Spec.Volumes = append(i.Spec.Volumes, v1.Volume{Name: "files", VolumeSource: tc.source})
		errs, _ := CheckInstance(i)
		if len(errs) != 1 || !strings.HasSuffix(errs[0].Field, "]."+tc.at) {
			t.Errorf("%s: %v", what, errs)
		}
	}
}
