//go:build e2e

package cocoonmanager_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/storage/volume"
	kubevirtv1 "kubevirt.io/api/core/v1"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// dataVolumes runs a machine that brings its disk, and a DataVolume that waits for no pod: each has one claim, which goes with it. The test makes
// the volumes in place of a node.
func (r *rig) dataVolumes(t *testing.T, ns string) {
	t.Helper()
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: disks, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: %[2]s
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: storage.k8s.io/v1
kind: CSIStorageCapacity
metadata: {name: room, namespace: kube-system}
storageClassName: disks
capacity: 10Gi
nodeTopology: {matchLabels: {kubernetes.io/hostname: one}}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: pet, namespace: %[1]s}
spec:
  runStrategy: Halted
  dataVolumeTemplates:
  - {metadata: {name: pet-disk}, spec: {storage: {resources: {requests: {storage: 1Gi}}}, source: {registry: {url: "docker://example.org/disk"}}}}
  template: {spec: {domain: {devices: {}, memory: {guest: 128Mi}}, volumes: [{name: root, dataVolume: {name: pet-disk}}]}}
---
apiVersion: cdi.kubevirt.io/v1beta1
kind: DataVolume
metadata: {name: now, namespace: %[1]s, annotations: {cdi.kubevirt.io/storage.bind.immediate.requested: ""}}
spec: {storage: {resources: {requests: {storage: 1Gi}}}, source: {blank: {}}}
`, ns, contract.VolumeDriver), "create", "-f", "-")
	r.Kubectl(t, "", "label", "node", "one", corev1.LabelHostname+"=one", "--overwrite")
	claim, dv, vm := &corev1.PersistentVolumeClaim{}, &v1beta1.DataVolume{}, &kubevirtv1.VirtualMachine{}
	state := func(name string) func() string {
		return func() string {
			key := client.ObjectKey{Namespace: ns, Name: name}
			if err := r.api.Get(t.Context(), key, dv); err != nil {
				return err.Error()
			}
			if err := r.api.Get(t.Context(), key, claim); err != nil {
				return err.Error()
			}
			return fmt.Sprint(dv.Status.Phase, " ", claim.Annotations[contract.KeyVolumeImage], claim.Annotations[volume.AnnSelectedNode])
		}
	}
	fill := func(name string) {
		t.Helper()
		r.Kubectl(t, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: %[2]s}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  volumeMode: Block
  storageClassName: disks
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: %[1]s, name: %[2]s, uid: %[3]s}
  csi: {driver: %[4]s, volumeHandle: x}
`, ns, name, claim.UID, contract.VolumeDriver), "create", "-f", "-")
	}
	kubetest.Eventually(t, "the disk of a machine that is off", state("pet-disk"), "WaitForFirstConsumer docker://example.org/disk")
	fill("pet-disk")
	kubetest.Eventually(t, "the disk that is made", state("pet-disk"), "Succeeded docker://example.org/disk")
	kubetest.Eventually(t, "the machine", func() string {
		if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "pet"}, vm); err != nil {
			return err.Error()
		}
		return string(vm.Status.PrintableStatus)
	}, "Stopped")
	kubetest.Eventually(t, "the DataVolume that waits for no pod", state("now"), "ImportInProgress one")
	fill("now")
	kubetest.Eventually(t, "the DataVolume that waited for no pod", state("now"), "Succeeded one")

	r.Kubectl(t, "", "delete", "vm/pet", "dv/now", "-n", ns, "--timeout=240s")
	kubetest.Eventually(t, "the claims are gone", func() string {
		claims, volumes := &corev1.PersistentVolumeClaimList{}, &v1beta1.DataVolumeList{}
		for _, list := range []client.ObjectList{claims, volumes} {
			if err := r.api.List(t.Context(), list, client.InNamespace(ns)); err != nil {
				return err.Error()
			}
		}
		return fmt.Sprint(len(claims.Items), " ", len(volumes.Items))
	}, "0 0")
	r.Kubectl(t, "", "delete", "-n", "kube-system", "csistoragecapacity/room", "storageclass/disks", "pv/now", "pv/pet-disk")
}
