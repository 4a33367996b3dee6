package convert

import (
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/vm"
)

func needs(name, cpu, memory string) corev1.Container {
	return corev1.Container{Name: name, Image: name + ":1", Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{"cpu": resource.MustParse(cpu), "memory": resource.MustParse(memory)},
	}}
}

func TestSeveralContainers(t *testing.T) {
	pod := plain(func(p *corev1.Pod) {
		side := needs("side", "250m", "64Mi")
		side.RestartPolicy = ptr(corev1.ContainerRestartPolicyAlways)
		p.Spec.InitContainers = []corev1.Container{needs("first", "1", "1Gi"), side, needs("second", "100m", "960Mi")}
		p.Spec.Containers = []corev1.Container{needs("web", "500m", "128Mi"), needs("db", "600m", "256Mi")}
		p.Spec.Containers[1].Image = "web:1"
		p.Spec.Containers[1].Args = []string{"--me=$(ME)"}
		p.Spec.Containers[1].SecurityContext = &corev1.SecurityContext{RunAsUser: ptr(int64(33))}
		p.Spec.Containers[1].VolumeMounts = []corev1.VolumeMount{{Name: "kube-api-access-x7", MountPath: "/token"}}
		p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	s := Spec(pod, Node{}, Environment{"db": {{Name: "ME", Value: "db"}}})
	var got []string
	for _, c := range s.Containers {
		got = append(got, c.Name+" "+c.Image+" "+string(c.Kind))
	}
	want := []string{"first first:1 init", "side side:1 sidecar", "second second:1 init", "web web:1 app", "db web:1 app"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	db := s.Containers[4]
	if db.Process.User != "33" || db.Process.Args[0] != "--me=db" || len(db.Mounts) != 1 || len(s.Mounts) != 0 || !s.Process.Empty() {
		t.Errorf("process and mounts: %+v, of the VM %+v %+v", db, s.Process, s.Mounts)
	}
	// 250m + 500m + 600m run together; the second init container with the sidecar needs as much memory as the first.
	if s.CPUs != 2 || s.Memory != 1<<30 || s.Restart != vm.RestartOnFailure || Image(pod) != "web:1" {
		t.Errorf("%d CPUs, %d bytes, restart %s, image %s", s.CPUs, s.Memory, s.Restart, s.Image)
	}
	got = nil
	for _, r := range Pulls(pod) {
		got = append(got, r.Name)
	}
	if want := []string{"first:1", "side:1", "second:1", "web:1"}; !reflect.DeepEqual(got, want) {
		t.Errorf("images: got %q, want %q", got, want)
	}
}
