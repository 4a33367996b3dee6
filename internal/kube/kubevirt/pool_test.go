package kubevirt

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	poolv1 "kubevirt.io/api/pool/v1beta1"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

const poolText = `
metadata: {name: web, namespace: ns, uid: p}
spec:
  selector: {matchLabels: {app: web}}
  virtualMachineTemplate:
    metadata: {labels: {app: web}, annotations: {a: b}}
    spec:
      runStrategy: Always
      dataVolumeTemplates: [{metadata: {name: disk}, spec: {storage: {}}}]
      template:
        spec:
          domain: {devices: {}, memory: {guest: 128Mi}}
          volumes:
          - {name: own, dataVolume: {name: disk}}
          - {name: ofclaim, persistentVolumeClaim: {claimName: disk}}
          - {name: shared, dataVolume: {name: other}}
          - {name: conf, configMap: {name: conf}}
          - {name: secret, secret: {secretName: secret}}
          - {name: seed, cloudInitNoCloud: {secretRef: {name: user}, networkDataSecretRef: {name: net}}}
`

func poolOf(t *testing.T, more string) *poolv1.VirtualMachinePool {
	t.Helper()
	pool := &poolv1.VirtualMachinePool{}
	if err := yaml.Unmarshal([]byte(poolText+more), pool); err != nil {
		t.Fatal(err)
	}
	return pool
}

// names are those of what a machine of a pool has to itself.
func names(vm *v1.VirtualMachine) string {
	all := []string{vm.Name, vm.Spec.DataVolumeTemplates[0].Name}
	for _, v := range vm.Spec.Template.Spec.Volumes {
		switch {
		case v.DataVolume != nil:
			all = append(all, v.DataVolume.Name)
		case v.PersistentVolumeClaim != nil:
			all = append(all, v.PersistentVolumeClaim.ClaimName)
		case v.ConfigMap != nil:
			all = append(all, v.ConfigMap.Name)
		case v.Secret != nil:
			all = append(all, v.Secret.SecretName)
		case v.CloudInitNoCloud != nil:
			all = append(all, v.CloudInitNoCloud.UserDataSecretRef.Name, v.CloudInitNoCloud.NetworkDataSecretRef.Name)
		}
	}
	return strings.Join(all, " ")
}

func TestPoolMachine(t *testing.T) {
	pool := poolOf(t, "")
	before := pool.DeepCopy()
	vm := PoolMachine(pool, 3)
	if got, want := names(vm), "web-3 disk-3 disk-3 disk-3 other conf secret user net"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	revision := vm.Labels[v1.VirtualMachinePoolRevisionName]
	if vm.Labels["app"] != "web" || vm.Annotations["a"] != "b" || !metav1.IsControlledBy(vm, pool) || vm.Namespace != "ns" || !strings.HasPrefix(revision, "web-") ||
		vm.Spec.Template.ObjectMeta.Labels[v1.VirtualMachinePoolRevisionName] != revision {
		t.Errorf("the machine: %+v", vm)
	}
	if text := diff.Of(before, pool); text != "" {
		t.Errorf("the pool has changed: %s", text)
	}
	indexed := poolOf(t, "  nameGeneration: {appendIndexToConfigMapRefs: true, appendIndexToSecretRefs: true}\n")
	if got, want := names(PoolMachine(indexed, 0)), "web-0 disk-0 disk-0 disk-0 other conf-0 secret-0 user-0 net-0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if Revision(indexed) == revision {
		t.Error("the revision does not depend on the names")
	}
	pool.Spec.Replicas = new(int32)
	if Revision(pool) != revision {
		t.Error("the revision depends on the number of machines")
	}
	pool.Name = strings.Repeat("a", 39) + "." + strings.Repeat("b", 100)
	if r := Revision(pool); len(r) > 63 || strings.Contains(r, ".-") {
		t.Errorf("the revision %s", r)
	}
}

func TestOrdinal(t *testing.T) {
	pool := poolOf(t, "")
	for name, want := range map[string]int{"web-0": 0, "web-12": 12, "web-01": -1, "web--1": -1, "web-+1": -1, "web": -1, "other-3": -1, "web-3-4": -1, "web-": -1} {
		if got := Ordinal(pool, name); got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
}

// A guest keeps the numbers by which its programs know it, unless the template gives it others for the first time.
func TestKeepIdentity(t *testing.T) {
	pool := poolOf(t, "")
	vm := PoolMachine(pool, 0)
	next := vm.DeepCopy()
	KeepIdentity(vm, next)
	if next.Spec.Template.Spec.Domain.Firmware != nil {
		t.Errorf("firmware: %v", next.Spec.Template.Spec.Domain.Firmware)
	}
	vm.Spec.Template.Spec.Domain.Firmware = &v1.Firmware{UUID: "u", Serial: "s"}
	KeepIdentity(vm, next)
	if text := diff.Of(vm.Spec.Template.Spec.Domain.Firmware, next.Spec.Template.Spec.Domain.Firmware); text != "" {
		t.Error(text)
	}
}
