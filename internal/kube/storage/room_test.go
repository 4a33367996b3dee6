package storage

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	component "k8s.io/component-helpers/storage/volume"

	"cocoonstack.io/cocoon/api/contract"
)

func TestRoomOfTheNode(t *testing.T) {
	n := start(t, class("other", func(c *storagev1.StorageClass) { c.Provisioner = "example.com/disks" }))
	rooms := func() (list []string) {
		all, err := n.client.StorageV1().CSIStorageCapacities(RoomNamespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range all.Items {
			list = append(list, fmt.Sprintf("%s %s %s %s", c.StorageClassName, c.NodeTopology.MatchLabels[corev1.LabelHostname], c.Capacity, c.OwnerReferences[0].UID))
		}
		return list
	}
	is := func(want ...string) {
		t.Helper()
		until(t, strings.Join(want, ", "), func() bool { return strings.Join(rooms(), ", ") == strings.Join(want, ", ") })
	}
	is("cocoon-local node-1 1Ti node-uid")
	n.free.Store(5 << 30)
	n.create(claim("data", "node-1"))
	is("cocoon-local node-1 5Gi node-uid")
	if err := n.client.StorageV1().StorageClasses().Delete(t.Context(), "cocoon-local", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	is()
	csi, err := n.client.StorageV1().CSINodes().Get(t.Context(), "node-1", metav1.GetOptions{})
	if err != nil || len(csi.Spec.Drivers) != 1 || csi.Spec.Drivers[0].Name != contract.VolumeDriver || csi.OwnerReferences[0].UID != "node-uid" {
		t.Errorf("CSINode %+v, %v", csi, err)
	}
}

// A node without a thin pool says nothing of the class that wants one, and gives such a claim back to the scheduler.
func TestThinClass(t *testing.T) {
	n := start(t, class("cocoon-thin", func(c *storagev1.StorageClass) { c.Parameters = map[string]string{contract.ParamKind: "lvm"} }))
	room := func() string {
		all, err := n.client.StorageV1().CSIStorageCapacities(RoomNamespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var list []string
		for _, c := range all.Items {
			list = append(list, c.StorageClassName+" "+c.Capacity.String())
		}
		slices.Sort(list)
		return strings.Join(list, ", ")
	}
	is := func(want string) {
		t.Helper()
		until(t, want, func() bool { return room() == want })
	}
	is("cocoon-local 1Ti")
	n.create(claim("data", "node-1", func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = new("cocoon-thin") }))
	n.told("this node makes no volumes of the kind \"lvm\"")
	until(t, "another choice of the scheduler", func() bool {
		c, err := n.client.CoreV1().PersistentVolumeClaims("team").Get(t.Context(), "data", metav1.GetOptions{})
		return err == nil && c.Annotations[component.AnnSelectedNode] == ""
	})
	n.thin.Store(3 << 30)
	n.create(claim("other", "node-1")) // the room is looked at again
	is("cocoon-local 1Ti, cocoon-thin 3Gi")
}
