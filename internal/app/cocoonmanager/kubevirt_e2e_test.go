//go:build e2e

package cocoonmanager_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"
	kubevirtv1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	deploykubevirt "cocoonstack.io/cocoon/deploy/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// machines runs VirtualMachines with a manager that is killed after each of its writes: each ends up as it should, with one pod for
// each run, and nothing is left of a deleted one.
func machines(t *testing.T, r *rig) {
	ns := "machines"
	r.namespace(t, ns)
	seen := r.births(t, ns)
	r.installKubeVirt(t)
	k := newKiller(t, r.Config)
	k.manager = r.manager(t, k.server, append([]string{"--leader-elect=false"}, kubevirtFlags(t)...)...)
	k.manager.start(t)
	defer k.manager.kill()
	defer k.stop()

	vm := &kubevirtv1.VirtualMachine{}
	key := client.ObjectKey{Namespace: ns, Name: "web"}
	status := func() string {
		if err := r.api.Get(t.Context(), key, vm); err != nil {
			return err.Error()
		}
		return fmt.Sprint(vm.Status.PrintableStatus, " ", vm.Status.Ready)
	}
	instance := func() *kubevirtv1.VirtualMachineInstance {
		vmi := &kubevirtv1.VirtualMachineInstance{}
		if err := r.api.Get(t.Context(), key, vmi); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		return vmi
	}
	patch := func(text string) {
		t.Helper()
		if err := r.api.Patch(t.Context(), &kubevirtv1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "web"}}, client.RawPatch("application/merge-patch+json", []byte(text))); err != nil {
			t.Fatal(err)
		}
	}
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: web, namespace: %[1]s}
spec:
  runStrategy: Always
  template:
    metadata: {labels: {app: web}}
    spec:
      domain: {devices: {disks: [{name: root, disk: {bus: virtio}}]}, memory: {guest: 128Mi}, resources: {}}
      terminationGracePeriodSeconds: 1
      volumes: [{name: root, containerDisk: {image: %[2]s}}]
---
# The image of this one is no disk, so its node refuses cloud-init.
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: seeded, namespace: %[1]s}
spec:
  domain: {devices: {}, memory: {guest: 128Mi}}
  volumes:
  - {name: root, containerDisk: {image: %[2]s}}
  - {name: seed, cloudInitNoCloud: {userData: "#!/bin/sh"}}
`, ns, fakenode.Image), "create", "-f", "-")
	kubetest.Eventually(t, "the machine", status, "Running true")
	first := instance()
	if first.Status.NodeName != "one" || len(first.Status.Interfaces) != 1 || first.Labels["app"] != "web" {
		t.Errorf("the instance: %+v", first)
	}
	if n := seen.count(kubevirt.PodName(first)); n != 1 {
		t.Errorf("the instance had %d pods", n)
	}
	seeded := &kubevirtv1.VirtualMachineInstance{}
	kubetest.Eventually(t, "the instance with cloud-init", func() string {
		if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "seeded"}, seeded); err != nil {
			return err.Error()
		}
		c := kubevirt.Condition(seeded, kubevirtv1.VirtualMachineInstanceSynchronized)
		return fmt.Sprint(seeded.Status.Phase, " ", c != nil && c.Message != "")
	}, "Scheduled true")
	secret := &corev1.Secret{}
	if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: kubevirt.PodName(seeded)}, secret); err != nil || string(secret.Data["userdata"]) != "#!/bin/sh" {
		t.Errorf("the Secret: %v %v", secret, err)
	}
	if err := r.api.Delete(t.Context(), seeded); err != nil {
		t.Fatal(err)
	}

	// The guest powers itself off: the next instance takes its place.
	r.node.Crash(t, kubevirt.VMName(first))
	kubetest.Eventually(t, "another instance", func() string { return fmt.Sprint(instance().UID != first.UID, " ", status()) }, "true Running true")
	second := instance()

	patch(`{"spec":{"runStrategy":"Halted"}}`)
	kubetest.Eventually(t, "the machine", status, "Stopped false")
	kubetest.Eventually(t, "the instance of a stopped machine", func() string { return string(instance().UID) }, "")
	kubetest.Eventually(t, "its VMs", func() string { return fmt.Sprint(r.node.Guest(kubevirt.VMName(second)) != nil) }, "false")

	patch(`{"spec":{"runStrategy":"Always"}}`)
	kubetest.Eventually(t, "the machine", status, "Running true")
	// The manager finds no API server while the machine is told to stop, and one that is there is deleted. It does both when the API server is back.
	other := &kubevirtv1.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "alone"}, Spec: *vm.Spec.Template.Spec.DeepCopy()}
	if err := r.api.Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	alone := func() string {
		if err := r.api.Get(t.Context(), client.ObjectKeyFromObject(other), other); apierrors.IsNotFound(err) {
			return "gone"
		}
		return string(other.Status.Phase)
	}
	kubetest.Eventually(t, "the instance without a machine", alone, "Running")
	k.part(func() {
		k.away(t, func() {
			patch(`{"spec":{"runStrategy":"Halted"}}`)
			if err := r.api.Delete(t.Context(), other); err != nil {
				t.Fatal(err)
			}
		})
	})
	kubetest.Eventually(t, "the machine after the absence", status, "Stopped false")
	kubetest.Eventually(t, "the instance after the absence", alone, "gone")
	patch(`{"spec":{"runStrategy":"Always"}}`)
	kubetest.Eventually(t, "the machine", status, "Running true")
	third := instance()
	// What no VM of ours can be is refused with its path, and the machine that runs goes on until somebody restarts it.
	patch(`{"spec":{"template":{"spec":{"domain":{"devices":{"sound":{"name":"a"}}}}}}}`)
	kubetest.Eventually(t, "the conditions", func() string {
		return condition(r, t, key, kubevirtv1.VirtualMachineRestartRequired) + " " + condition(r, t, key, kubevirtv1.VirtualMachineFailure)
	}, "True True")
	if err := r.api.Delete(t.Context(), third); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the machine", status, "Stopped false")
	patch(`{"spec":{"template":{"spec":{"domain":{"devices":{"sound":null}}}}}}`)
	kubetest.Eventually(t, "the machine", status, "Running true")

	k.part(func() { r.instancetypes(t, ns) })
	k.part(func() { r.replicaSets(t, ns, seen) })
	k.part(func() { r.pools(t, ns, seen) })
	k.part(func() { r.dataVolumes(t, ns) })
	k.part(func() { r.uploads(t, ns, k) })
	if err := r.api.Delete(t.Context(), vm); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "what is left", func() string {
		vms, vmis := &kubevirtv1.VirtualMachineList{}, &kubevirtv1.VirtualMachineInstanceList{}
		pods, secrets := &corev1.PodList{}, &corev1.SecretList{}
		for _, list := range []client.ObjectList{vms, vmis, pods, secrets} {
			if err := r.api.List(t.Context(), list, client.InNamespace(ns)); err != nil {
				return err.Error()
			}
		}
		left := len(vms.Items) + len(vmis.Items) + len(pods.Items) + len(secrets.Items)
		return fmt.Sprint(left)
	}, "0")
	kills := k.stop()
	t.Logf("the manager was killed after %v", kills)
	for _, what := range []string{
		http.MethodPost + " virtualmachineinstances", http.MethodPost + " pods", http.MethodPost + " secrets", http.MethodPut + " virtualmachines/status", http.MethodPut + " virtualmachineinstancereplicasets/status",
		http.MethodPost + " virtualmachines", http.MethodDelete + " virtualmachines", http.MethodPut + " virtualmachinepools/status",
		http.MethodPost + " datavolumes", http.MethodPut + " datavolumes/status", http.MethodPost + " persistentvolumeclaims", http.MethodPatch + " persistentvolumeclaims", http.MethodPost + " configmaps", http.MethodPatch + " configmaps", http.MethodPost + " cdiconfigs",
		http.MethodPost + " controllerrevisions", http.MethodPatch + " virtualmachineinstances", http.MethodDelete + " virtualmachineinstances", http.MethodDelete + " pods",
	} {
		if kills[what] == 0 {
			t.Errorf("the manager was not killed after %s: %v", what, kills)
		}
	}
}

// instancetypes runs a machine whose instancetype comes after it, and changes while the machine is stopped: the machine does not change.
func (r *rig) instancetypes(t *testing.T, ns string) {
	t.Helper()
	key := client.ObjectKey{Namespace: ns, Name: "sized"}
	small := func(cpus int) string {
		return fmt.Sprintf("{apiVersion: instancetype.kubevirt.io/v1beta1, kind: VirtualMachineInstancetype, metadata: {name: small, namespace: %s}, spec: {cpu: {guest: %d}, memory: {guest: 128Mi}}}", ns, cpus)
	}
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: sized, namespace: %[1]s}
spec:
  runStrategy: Always
  instancetype: {kind: VirtualMachineInstancetype, name: small}
  preference: {name: cores}
  template:
    spec:
      domain: {devices: {}}
      terminationGracePeriodSeconds: 1
      volumes: [{name: root, containerDisk: {image: %[2]s}}]
---
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineClusterPreference
metadata: {name: cores}
spec: {cpu: {preferredCPUTopology: cores}}
`, ns, fakenode.Image), "create", "-f", "-")
	state := func() string {
		vm, vmi := &kubevirtv1.VirtualMachine{}, &kubevirtv1.VirtualMachineInstance{}
		if err := r.api.Get(t.Context(), key, vm); err != nil {
			return err.Error()
		}
		if err := r.api.Get(t.Context(), key, vmi); client.IgnoreNotFound(err) != nil {
			return err.Error()
		}
		cores := uint32(0)
		if cpu := vmi.Spec.Domain.CPU; cpu != nil {
			cores = cpu.Cores
		}
		reason := ""
		for _, c := range vm.Status.Conditions {
			if c.Type == kubevirtv1.VirtualMachineFailure {
				reason = " " + c.Reason
			}
		}
		return fmt.Sprint(vm.Status.PrintableStatus, " ", cores, " cores", reason)
	}
	kubetest.Eventually(t, "the machine without its instancetype", state, "Stopped 0 cores FailedFindInstancetype")
	r.Kubectl(t, small(2), "create", "-f", "-")
	kubetest.Eventually(t, "the machine with it", state, "Running 2 cores")
	halt := func(strategy string) {
		t.Helper()
		if err := r.api.Patch(t.Context(), &kubevirtv1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "sized"}}, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"runStrategy":"`+strategy+`"}}`))); err != nil {
			t.Fatal(err)
		}
	}
	halt("Halted")
	kubetest.Eventually(t, "the machine", state, "Stopped 0 cores")
	r.Kubectl(t, small(4), "apply", "-f", "-")
	halt("Always")
	kubetest.Eventually(t, "the machine", state, "Running 2 cores")
	copies := &appsv1.ControllerRevisionList{}
	if err := r.api.List(t.Context(), copies, client.InNamespace(ns), client.HasLabels{machinebase.Label}); err != nil || len(copies.Items) != 2 {
		t.Errorf("%d copies, %v", len(copies.Items), err)
	}
	r.Kubectl(t, "", "delete", "vm", "sized", "-n", ns, "--timeout=240s")
	kubetest.Eventually(t, "the copies are gone", func() string {
		if err := r.api.List(t.Context(), copies, client.InNamespace(ns), client.HasLabels{machinebase.Label}); err != nil {
			return err.Error()
		}
		return fmt.Sprint(len(copies.Items))
	}, "0")
}

// installKubeVirt installs the kinds of KubeVirt, unless they are there, and gives the manager its rights on them.
func (r *rig) installKubeVirt(t *testing.T) {
	t.Helper()
	for _, text := range append(deploykubevirt.Kinds(), deploykubevirt.ManagerRights, deploykubevirt.UploadRights, deploykubevirt.Namespace) {
		r.Kubectl(t, string(text), "apply", "--server-side", "-f", "-")
	}
	binding := r.Kubectl(t, "", "create", "clusterrolebinding", "cocoon-manager-kubevirt", "--clusterrole=cocoon-manager-kubevirt", "--serviceaccount="+kubetest.Namespace+":cocoon-manager", "--dry-run=client", "-o", "yaml")
	r.Kubectl(t, binding, "apply", "-f", "-")
	for _, of := range [][]string{{"cocoon-manager-uploads", kubetest.Namespace, "cocoon-manager-uploads"}, {"cocoon-manager-auth-reader", "kube-system", "extension-apiserver-authentication-reader"}} {
		binding = r.Kubectl(t, "", "create", "rolebinding", of[0], "-n", of[1], "--role="+of[2], "--serviceaccount="+kubetest.Namespace+":cocoon-manager", "--dry-run=client", "-o", "yaml")
		r.Kubectl(t, binding, "apply", "-f", "-")
	}
	kubetest.Eventually(t, "the kinds are established", func() string {
		_, err := r.TryKubectl(t, "", "get", "vm,vmi,vmirs,vmpool,vmsnapshot,vmrestore,vmclone,dv", "-A")
		return fmt.Sprint(err)
	}, "<nil>")
}

// kubevirtFlags enables the door for KubeVirt's objects, with a certificate of its own.
func kubevirtFlags(t *testing.T) []string {
	t.Helper()
	crt, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	crtFile, keyFile := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	if err := errors.Join(os.WriteFile(crtFile, crt, 0o600), os.WriteFile(keyFile, key, 0o600)); err != nil {
		t.Fatal(err)
	}
	return []string{"--kubevirt-addr", freeAddr(t), "--kubevirt-cert", crtFile, "--kubevirt-key", keyFile}
}

// condition returns the status of a machine's condition.
func condition(r *rig, t *testing.T, key client.ObjectKey, kind kubevirtv1.VirtualMachineConditionType) string {
	t.Helper()
	vm := &kubevirtv1.VirtualMachine{}
	if err := r.api.Get(t.Context(), key, vm); err != nil {
		return err.Error()
	}
	for _, c := range vm.Status.Conditions {
		if c.Type == kind {
			return string(c.Status)
		}
	}
	return ""
}
