package convert

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

func ephemeral(change func(*corev1.EphemeralContainer)) *corev1.EphemeralContainer {
	c := &corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name: "debugger", Image: "busybox", Command: []string{"sh", "-c"}, Args: []string{"echo $(WHO)"}, Stdin: true, TTY: true,
		Env:                    []corev1.EnvVar{{Name: "WHO", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.annotations['who']"}}}},
		TerminationMessagePath: "/dev/termination-log",
	}, TargetContainerName: "c"}
	if change != nil {
		change(c)
	}
	return c
}

func TestEphemeral(t *testing.T) {
	// The annotation that names the image of the pod's only container does not name that of the ephemeral one.
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", Annotations: map[string]string{"who": "me", contract.KeyImage: "other"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "demo", VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}}}},
	}
	c := ephemeral(func(c *corev1.EphemeralContainer) {
		c.SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"SYS_PTRACE"}}}
	})
	if errs := CheckEphemeral(pod, c); len(errs) > 0 {
		t.Fatal(errs)
	}
	x, err := Ephemeral(t.Context(), pod, c, Node{}, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := x.Process
	if x.Name != "debugger" || x.Image != "busybox" || x.Kind != vm.ContainerEphemeral || x.MessagePath != "/dev/termination-log" || len(x.Mounts) > 0 {
		t.Errorf("container %+v", x)
	}
	if !p.TTY || !p.Stdin || p.Args[0] != "echo me" || len(p.Env) != 1 || !strings.Contains(strings.Join(p.Security.Capabilities, " "), "SYS_PTRACE") {
		t.Errorf("process %+v", p)
	}
	if r := EphemeralPull(c); r.Name != "busybox" || r.Policy != image.PullIfNotPresent {
		t.Errorf("pull %+v", r)
	}
	yes := true
	pod.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: &yes}
	if err := CheckEphemeralUser(pod, c, ""); !errdefs.IsFailedPrecondition(err) && err == nil {
		t.Error("root in a pod that refuses it")
	}
	if err := CheckEphemeralUser(pod, c, "1000"); err != nil {
		t.Error(err)
	}
}

func TestEphemeralHasVolumes(t *testing.T) {
	pod := withFileKeys(fromFile("A", "K", false)) // its container uses the volume, but does not mount it
	c := ephemeral(func(c *corev1.EphemeralContainer) {
		c.Env = []corev1.EnvVar{fromFile("WHO", "K", false)}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "shared", MountPath: "/v", ReadOnly: true}}
	})
	if errs := CheckEphemeral(pod, c); len(errs) > 0 {
		t.Fatal(errs)
	}
	x, err := Ephemeral(t.Context(), pod, c, Node{}, nil, nil, nil)
	if err != nil || len(x.Mounts) != 1 || x.Mounts[0] != (vm.Mount{Volume: "shared", Path: "/v", ReadOnly: true}) || len(x.Process.FileKeys) != 1 {
		t.Errorf("container %+v, %v", x, err)
	}
	if err := x.ValidateIn(Spec(pod, Node{}, nil).Volumes); err != nil {
		t.Error(err)
	}
	if err := x.ValidateIn(nil); !errdefs.IsInvalid(err) {
		t.Errorf("in a VM without the volume: %v", err)
	}
}

func TestCheckEphemeral(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default"}, Spec: corev1.PodSpec{
		Volumes: []corev1.Volume{
			{Name: "here", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}, // nobody uses it, so the VM does not have it
		},
		Containers: []corev1.Container{{Name: "c", Image: "demo", VolumeMounts: []corev1.VolumeMount{{Name: "here", MountPath: "/v"}}}},
	}}
	for want, change := range map[string]func(*corev1.EphemeralContainer){
		"volumeMounts": func(c *corev1.EphemeralContainer) {
			c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}
		},
		"volumeDevices": func(c *corev1.EphemeralContainer) {
			c.VolumeDevices = []corev1.VolumeDevice{{Name: "v", DevicePath: "/dev/v"}}
		},
		"volumeMounts[0].mountPropagation": func(c *corev1.EphemeralContainer) {
			c.VolumeMounts = []corev1.VolumeMount{{Name: "here", MountPath: "/v", MountPropagation: new(corev1.MountPropagationBidirectional)}}
		},
		"env[0]": func(c *corev1.EphemeralContainer) { c.Env = []corev1.EnvVar{fromFile("A", "K", false)} },
		"env":    func(c *corev1.EphemeralContainer) { c.Env = []corev1.EnvVar{{Name: "not=valid"}} },
	} {
		if errs := CheckEphemeral(pod, ephemeral(change)); len(errs) != 1 || !strings.Contains(errs.ToAggregate().Error(), "spec.ephemeralContainers[debugger]."+want) {
			t.Errorf("%s: %v", want, errs)
		}
	}
}
