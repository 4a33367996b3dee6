//go:build e2e

package vkcocoon_test

import (
	"fmt"
	"testing"

	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// volumeOf is a PersistentVolume of a node's disk.
func volumeOf(name, node string, change ...func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: "cocoon-local", PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
			Driver: contract.VolumeDriver, VolumeHandle: name, VolumeAttributes: map[string]string{"node": node},
		}},
		NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
		}}}},
	}}
	for _, f := range change {
		f(pv)
	}
	return pv
}

func roomOf(name, node string) *storagev1.CSIStorageCapacity {
	return &storagev1.CSIStorageCapacity{
		ObjectMeta: metav1.ObjectMeta{Name: name}, StorageClassName: "cocoon-local", Capacity: resource.NewQuantity(1<<40, resource.BinarySI),
		NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelHostname: node}},
	}
}

// The credentials of a node write volumes of its own disks, and its own room, and nothing else.
func TestNodeWritesItsOwnVolumes(t *testing.T) {
	r := &rig{Cluster: kubetest.Up(t)}
	r.Install(t)
	r.admin = r.client(t, "")
	n1, n2 := r.client(t, r.Identity(t, "n1")), r.client(t, r.Identity(t, "n2"))
	create := func(pv *corev1.PersistentVolume) attempt {
		return attempt{"make volume " + pv.Name, func() error {
			_, err := n1.CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{})
			return err
		}}
	}
	patch := func(what, name, text string) attempt {
		return attempt{what, func() error {
			_, err := n1.CoreV1().PersistentVolumes().Patch(t.Context(), name, types.MergePatchType, []byte(text), metav1.PatchOptions{})
			return err
		}}
	}
	remove := func(name string) attempt {
		return attempt{"remove volume " + name, func() error {
			return n1.CoreV1().PersistentVolumes().Delete(t.Context(), name, metav1.DeleteOptions{})
		}}
	}
	hostPath := func(pv *corev1.PersistentVolume) {
		pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}
	}
	kubetest.Eventually(t, "a volume of another machine's files", func() string { // policies take effect after a moment
		return fmt.Sprint(apierrors.IsForbidden(create(volumeOf("forged", "n1", hostPath)).try()))
	}, "true")
	if _, err := n2.CoreV1().PersistentVolumes().Create(t.Context(), volumeOf("theirs", "n2"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.admin.CoreV1().PersistentVolumes().Create(t.Context(), volumeOf("admins", "n1", hostPath), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	granted(t, create(volumeOf("mine", "n1")), patch("grow its volume", "mine", `{"spec":{"capacity":{"storage":"2Gi"}}}`))
	refused(t,
		create(volumeOf("of-another-node", "n2")),
		create(volumeOf("anywhere", "n1", func(pv *corev1.PersistentVolume) { pv.Spec.NodeAffinity = nil })),
		create(volumeOf("pulls-pods-elsewhere", "n1", func(pv *corev1.PersistentVolume) {
			pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values = []string{"n1", "n2"}
		})),
		create(volumeOf("of-another-driver", "n1", func(pv *corev1.PersistentVolume) { pv.Spec.CSI.Driver = "disks.example.com" })),
		patch("give its volume to a claim", "mine", `{"spec":{"claimRef":{"namespace":"default","name":"victim","uid":"x"}}}`),
		patch("change another's volume", "theirs", `{"spec":{"capacity":{"storage":"1Ti"}}}`), remove("theirs"), remove("admins"),
		attempt{"change a claim", func() error {
			_, err := n1.CoreV1().PersistentVolumeClaims("default").Create(t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{})
			return err
		}},
	)
	granted(t, remove("mine"))

	const system = metav1.NamespaceSystem
	rooms := n1.StorageV1().CSIStorageCapacities(system)
	room := func(what string, of *storagev1.CSIStorageCapacity) attempt {
		return attempt{what, func() error {
			_, err := rooms.Create(t.Context(), of, metav1.CreateOptions{})
			return err
		}}
	}
	everywhere := roomOf("everywhere", "n1")
	everywhere.NodeTopology = &metav1.LabelSelector{}
	if _, err := n2.StorageV1().CSIStorageCapacities(system).Create(t.Context(), roomOf("theirs", "n2"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	granted(t, room("say its room", roomOf("mine", "n1")))
	refused(t, room("say another's room", roomOf("of-another-node", "n2")), room("say everybody's room", everywhere),
		attempt{"remove another's room", func() error { return rooms.Delete(t.Context(), "theirs", metav1.DeleteOptions{}) }})
	granted(t, attempt{"remove its room", func() error { return rooms.Delete(t.Context(), "mine", metav1.DeleteOptions{}) }})
}

const contents = `
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata:
  name: %[1]s
  labels: {snapshot.storage.kubernetes.io/managed-by: %[1]s}
spec:
  deletionPolicy: Retain
  driver: volume.cocoonstack.io
  source: {volumeHandle: disk}
  volumeSnapshotRef: {namespace: default, name: x}
`

// A node writes what became of snapshots of its own volumes, and not what they are of.
func TestNodeReportsItsOwnSnapshots(t *testing.T) {
	r := &rig{Cluster: kubetest.Up(t)}
	r.Install(t)
	r.Kubectl(t, "", "apply", "--server-side", "-f", "../snapshots/crds")
	r.Kubectl(t, "", "wait", "crd/volumesnapshotcontents.snapshot.storage.k8s.io", "--for=condition=Established", "--timeout=240s")
	config, err := clientcmd.BuildConfigFromFlags("", r.Identity(t, "n1"))
	if err != nil {
		t.Fatal(err)
	}
	client, err := snapshotclient.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range []string{"n1", "n2"} {
		r.Kubectl(t, fmt.Sprintf(contents, node), "apply", "-f", "-")
	}
	patch := func(what, name, text string, sub ...string) attempt {
		return attempt{what, func() error {
			_, err := client.SnapshotV1().VolumeSnapshotContents().Patch(t.Context(), name, types.MergePatchType, []byte(text), metav1.PatchOptions{}, sub...)
			return err
		}}
	}
	const ready = `{"status":{"readyToUse":true,"snapshotHandle":"x"}}`
	kubetest.Eventually(t, "the state of another's snapshot", func() string { // policies take effect after a moment
		return fmt.Sprint(apierrors.IsForbidden(patch("", "n2", ready, "status").try()))
	}, "true")
	granted(t, patch("say that its snapshot is there", "n1", ready, "status"), patch("note something on its snapshot", "n1", `{"metadata":{"annotations":{"a":"b"}}}`))
	refused(t,
		patch("take another's snapshot over", "n2", `{"metadata":{"labels":{"snapshot.storage.kubernetes.io/managed-by":"n1"}}}`),
		patch("change what becomes of its snapshot", "n1", `{"spec":{"deletionPolicy":"Delete"}}`),
		attempt{"remove its snapshot", func() error {
			return client.SnapshotV1().VolumeSnapshotContents().Delete(t.Context(), "n1", metav1.DeleteOptions{})
		}},
	)
}
