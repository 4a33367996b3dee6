package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A new pod whose port of the node another pod has fails, as on a kubelet, so that a StatefulSet or Job makes another. The pod of
// a ReplicaSet, which would be replaced at once and without end, is not rejected.
func TestAPortOfTheNodeThatAnotherPodHas(t *testing.T) {
	port := with(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 8080}} })
	second := func(kind string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Name, p.UID = "db", "uid-2"
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: "o", UID: "o", Controller: new(true)}}
		}
	}
	for _, tc := range []struct{ kind, want string }{{"StatefulSet", "Failed/NodePorts"}, {"ReplicaSet", "Running"}} { // the engine of this test knows no ports
		t.Run(tc.kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := start(t, newEngine())
				defer w.stop()
				w.create(pod(port))
				expect(t, w.after(time.Second), "Running running ready")
				w.told()
				w.create(pod(port, second(tc.kind)))
				w.after(time.Second)
				got := w.see("default", "db")
				if brief := strings.TrimSuffix(string(got.Status.Phase)+"/"+got.Status.Reason, "/"); brief != tc.want {
					t.Errorf("it is %s, want %s", brief, tc.want)
				}
				if told := w.told(); strings.Contains(told, "Warning NodePorts Predicate NodePorts failed") != (tc.kind == "StatefulSet") {
					t.Errorf("events: %s", told)
				}
			})
		})
	}
}
