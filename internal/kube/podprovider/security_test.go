package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// As with a kubelet, a pod whose security context forbids it to run waits, and no VM is created.
func TestAPodThatMayNotRunAsItsUser(t *testing.T) {
	nonRoot := func(uid *int64) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: new(true), RunAsUser: uid}
		}
	}
	for name, tc := range map[string]struct {
		change func(*corev1.Pod)
		image  image.Image
		want   string
		event  string
	}{
		"image of root":       {nonRoot(nil), image.Image{Type: vm.ImageOCI}, "Pending waiting:CreateContainerConfigError", "image will run as root"},
		"user 0":              {nonRoot(new(int64(0))), image.Image{Type: vm.ImageOCI}, "Pending waiting:CreateContainerConfigError", "breaks non-root policy"},
		"user by name":        {nonRoot(nil), image.Image{Type: vm.ImageOCI, Config: vm.Process{User: "web"}}, "Pending waiting:CreateContainerConfigError", "non-numeric user (web)"},
		"another user":        {nonRoot(nil), image.Image{Type: vm.ImageOCI, Config: vm.Process{User: "7"}}, "Running running ready", ""},
		"boots its own users": {nonRoot(nil), image.Image{Type: vm.ImageDisk}, "Running running ready", ""},
		"profile of the node": {func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost, LocalhostProfile: new("x.json")}}
		}, image.Image{Type: vm.ImageOCI}, "Pending waiting:CreateContainerError", `cannot load seccomp profile "x.json"`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tc.image.ID, tc.image.Name = "sha256:abc", "cocoon/demo:latest"
				w := startPulling(t, &origin{img: tc.image})
				defer w.stop()
				w.create(pod(tc.change))
				expect(t, w.after(time.Minute), tc.want)
				if events := w.told(); tc.event != "" && (!strings.Contains(events, "Warning Failed Error: CreateContainer") || !strings.Contains(events, tc.event)) {
					t.Errorf("no event %q in:\n%s", tc.event, events)
				}
				if tc.event != "" && w.engine.count() != 0 {
					t.Error("a VM was created")
				}
			})
		})
	}
}
