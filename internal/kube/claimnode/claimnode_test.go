package claimnode_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/kube/claimnode"
)

func node(name string, ready corev1.ConditionStatus, cordoned bool) corev1.Node {
	return corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: "host-" + name}}, Spec: corev1.NodeSpec{Unschedulable: cordoned},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}},
	}
}

func room(on, class, size string) storagev1.CSIStorageCapacity {
	q := resource.MustParse(size)
	return storagev1.CSIStorageCapacity{
		ObjectMeta: metav1.ObjectMeta{Name: on + class}, StorageClassName: class, Capacity: &q,
		NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelHostname: "host-" + on}},
	}
}

func TestWithRoom(t *testing.T) {
	nodes := []corev1.Node{node("a", corev1.ConditionTrue, false), node("b", corev1.ConditionTrue, false), node("away", corev1.ConditionUnknown, false), node("cordoned", corev1.ConditionTrue, true)}
	rooms := []storagev1.CSIStorageCapacity{
		room("a", "local", "10Gi"), room("b", "local", "20Gi"), room("away", "local", "90Gi"), room("cordoned", "local", "90Gi"), room("gone", "local", "90Gi"), room("a", "thin", "30Gi"),
		{StorageClassName: "local"},
	}
	claim := func(class, size string) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}}}}
		if class != "" {
			c.Spec.StorageClassName = &class
		}
		return c
	}
	for _, c := range []struct{ class, size, want string }{
		{"local", "1Gi", "b"}, {"local", "20Gi", "b"}, {"local", "21Gi", ""}, {"thin", "1Gi", "a"}, {"other", "1Gi", ""}, {"", "1Gi", ""},
	} {
		if got := claimnode.WithRoom(claim(c.class, c.size), rooms, nodes); got != c.want {
			t.Errorf("%s of %s is made on %q, want %q", c.size, c.class, got, c.want)
		}
	}
}
