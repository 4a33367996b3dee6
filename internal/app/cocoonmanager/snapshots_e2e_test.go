//go:build e2e

package cocoonmanager_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/deploy/snapshots"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// machineSnapshots takes a snapshot of a machine, restores it and clones it with a manager that is killed after each of its writes: nothing is made
// twice, and the machine is free in the end. There is no snapshot-controller and no storage, so the test says what they would. Preconditions: the kinds
// of KubeVirt are installed.
func machineSnapshots(t *testing.T, r *rig) {
	ns := "machine-snapshots"
	r.namespace(t, ns)
	r.installKubeVirt(t)
	for _, text := range [][]byte{snapshots.Snapshots, snapshots.Contents, snapshots.Classes} {
		r.Kubectl(t, string(text), "apply", "--server-side", "-f", "-")
	}
	r.Kubectl(t, "", "wait", "--for=condition=Established", "--timeout=240s", "crd/volumesnapshots.snapshot.storage.k8s.io", "crd/volumesnapshotclasses.snapshot.storage.k8s.io")
	k := newKiller(t, r.Config)
	k.manager = r.manager(t, k.server, append([]string{"--leader-elect=false"}, kubevirtFlags(t)...)...)
	k.manager.start(t)
	defer k.manager.kill()
	defer k.stop()

	r.Kubectl(t, fmt.Sprintf(`
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: kept}
driver: volume.cocoonstack.io
deletionPolicy: Delete
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: kept}
provisioner: volume.cocoonstack.io
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: data}
spec: {storageClassName: kept, accessModes: [ReadWriteOnce], capacity: {storage: 1Mi}, hostPath: {path: /none}, claimRef: {namespace: %[1]s, name: data}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: %[1]s}
spec: {volumeName: data, storageClassName: kept, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Mi}}}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: web, namespace: %[1]s}
spec:
  runStrategy: Halted
  template:
    spec:
      domain: {devices: {}, memory: {guest: 128Mi}}
      volumes:
      - {name: root, containerDisk: {image: %[2]s}}
      - {name: data, persistentVolumeClaim: {claimName: data}}
`, ns, fakenode.Image), "create", "-f", "-")
	object := func(kind, group, name, spec string) {
		t.Helper()
		r.Kubectl(t, fmt.Sprintf("{apiVersion: %s/v1beta1, kind: %s, metadata: {name: %s, namespace: %s}, spec: {%s}}", group, kind, name, ns, spec), "create", "-f", "-")
	}
	get := func(what, path string) func() string {
		return func() string {
			out, _ := r.TryKubectl(t, "", "get", "-n", ns, what, "-o", "jsonpath="+path)
			return strings.TrimSpace(out)
		}
	}

	object("VirtualMachineSnapshot", "snapshot.kubevirt.io", "before", "source: {apiGroup: kubevirt.io, kind: VirtualMachine, name: web}")
	kubetest.Eventually(t, "the VolumeSnapshots", get("volumesnapshots", "{range .items[*]}{.spec.source.persistentVolumeClaimName} {.spec.volumeSnapshotClassName}{end}"), "data kept")
	kubetest.Eventually(t, "the machine", get("vm/web", "{.status.snapshotInProgress}"), "before")
	name := get("volumesnapshots", "{.items[0].metadata.name}")()
	r.Kubectl(t, "", "patch", "volumesnapshot", name, "-n", ns, "--subresource=status", "--type=merge", "-p", `{"status":{"creationTime":"2026-01-02T03:04:05Z","readyToUse":true}}`)
	kubetest.Eventually(t, "the snapshot", get("vmsnapshot/before", "{.status.phase} {.status.readyToUse}"), "Succeeded true")
	kubetest.Eventually(t, "the machine", get("vm/web", "{.status.snapshotInProgress}"), "")

	object("VirtualMachineRestore", "snapshot.kubevirt.io", "back", "target: {apiGroup: kubevirt.io, kind: VirtualMachine, name: web}, virtualMachineSnapshotName: before, volumeRestorePolicy: PrefixTargetName")
	kubetest.Eventually(t, "the restore", get("vmrestore/back", "{.status.complete}"), "true")
	kubetest.Eventually(t, "the machine", get("vm/web", "{.status.restoreInProgress}{.spec.template.spec.volumes[1].persistentVolumeClaim.claimName}"), "web-data")

	object("VirtualMachineClone", "clone.kubevirt.io", "twin", "source: {apiGroup: snapshot.kubevirt.io, kind: VirtualMachineSnapshot, name: before}, target: {apiGroup: kubevirt.io, kind: VirtualMachine, name: twin}, volumeNamePolicy: PrefixTargetName")
	kubetest.Eventually(t, "the clone", get("vmclone/twin", "{.status.phase}"), "Succeeded")
	kubetest.Eventually(t, "the machines", get("vm", "{range .items[*]}{.metadata.name} {.spec.template.spec.volumes[1].persistentVolumeClaim.claimName}{.status.restoreInProgress} {end}"), "twin twin-data web web-data")

	kills := k.stop()
	for what, want := range map[string]string{
		"volumesnapshots": name, "pvc": "data twin-data web-data", "vmrestores": "back clone-" + get("vmclone/twin", "{.metadata.uid}")(), "vmsnapshots": "before",
		"vmsnapshotcontents": "vmsnapshot-content-" + get("vmsnapshot/before", "{.metadata.uid}")(),
	} {
		if got := get(what, "{.items[*].metadata.name}")(); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	for _, what := range []string{
		http.MethodPost + " virtualmachinesnapshotcontents", http.MethodPut + " virtualmachinesnapshotcontents/status", http.MethodPut + " virtualmachinesnapshots/status",
		http.MethodPost + " volumesnapshots", http.MethodPut + " virtualmachines/status", http.MethodPost + " persistentvolumeclaims", http.MethodPatch + " virtualmachines",
		http.MethodPost + " virtualmachines", http.MethodPost + " virtualmachinerestores", http.MethodPut + " virtualmachinerestores/status", http.MethodPut + " virtualmachineclones/status",
	} {
		if kills[what] == 0 {
			t.Errorf("no manager was killed after %s: %v", what, kills)
		}
	}
	// With its clone, snapshot and machines, everything goes.
	r.Kubectl(t, "", "delete", "vm", "--all", "-n", ns, "--timeout=240s")
	r.Kubectl(t, "", "delete", "vmclone,vmrestore,vmsnapshot", "--all", "-n", ns, "--timeout=240s")
	kubetest.Eventually(t, "what is left", get("vmsnapshotcontents,volumesnapshots,vmrestores", "{.items[*].metadata.name}"), "")
}
