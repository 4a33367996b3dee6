package aggregated

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/component-helpers/storage/volume"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
)

// dumpAsked is what the status of the machine web asks for, and the node of the claim core.
func (r *rig) dumpAsked() string {
	r.t.Helper()
	var vm v1.VirtualMachine
	var c corev1.PersistentVolumeClaim
	for name, o := range map[string]client.Object{"web": &vm, "core": &c} {
		if err := r.client.Get(r.t.Context(), client.ObjectKey{Namespace: "default", Name: name}, o); err != nil {
			r.t.Fatal(err)
		}
	}
	q := vm.Status.MemoryDumpRequest
	if q == nil {
		return "on:" + c.Annotations[volume.AnnSelectedNode]
	}
	return fmt.Sprintf("%s %s %v on:%s", q.ClaimName, q.Phase, q.Remove, c.Annotations[volume.AnnSelectedNode])
}

// A dump is asked for in the status of the machine, to one claim at a time.
func TestMemoryDump(t *testing.T) {
	vm, vmi, pod := plugs()
	vm.Status.Created = true
	guest := resource.MustParse("1Gi")
	vmi.Spec.Domain.Memory = &v1.Memory{Guest: &guest}
	pod.Annotations = map[string]string{contract.KeyVolumes: "disk=data"}
	sized := func(name, size string) *corev1.PersistentVolumeClaim {
		return claim(name, func(c *corev1.PersistentVolumeClaim) {
			c.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
		})
	}
	r := start(t, vm, vmi, pod, sized("core", "2Gi"), sized("small", "1Gi"), sized("data", "2Gi"), sized("other", "2Gi"), class("local", contract.VolumeDriver))
	const refused = `409 Operation cannot be fulfilled on virtualmachine.kubevirt.io "web": `
	get, remove := "virtualmachines/web/memorydump", "virtualmachines/web/removememorydump"
	phase := func(p v1.MemoryDumpPhase) {
		t.Helper()
		var now v1.VirtualMachine
		if err := r.client.Get(t.Context(), client.ObjectKeyFromObject(vm), &now); err != nil {
			t.Fatal(err)
		}
		now.Status.MemoryDumpRequest.Phase = p
		if err := r.client.Status().Update(t.Context(), &now); err != nil {
			t.Fatal(err)
		}
	}
	for i, c := range []struct {
		path, body, answer, state string
		before                    v1.MemoryDumpPhase
	}{
		{get, `{}`, "400 claimName: Required value: name the PersistentVolumeClaim that the memory is written to", "on:", ""},
		{get, `{"claimName":"none"}`, refused + "PersistentVolumeClaim none does not exist in namespace default", "on:", ""},
		{get, `{"claimName":"small"}`, refused + "PersistentVolumeClaim small has 1Gi, and the dump of the memory needs 1088Mi", "on:", ""},
		{get, `{"claimName":"data"}`, refused + "PersistentVolumeClaim data is a disk of this VM", "on:", ""},
		{remove, "", refused + "can't remove memory dump association for vm web, no association found", "on:", ""},
		{get + "?dryRun=All", `{"claimName":"core"}`, "202", "on:", ""},
		{get, `{"claimName":"core","phase":""}`, "202", "core Associating false on:n1", ""},
		{get, `{"claimName":"core"}`, refused + "memory dump request for vm [web] already exists, and is not over: Associating", "core Associating false on:n1", ""},
		{get, `{"claimName":"other"}`, refused + "can't request memory dump for pvc [other] while pvc [core] is still associated as the memory dump pvc; remove that first (virtctl memory-dump remove web)", "core Associating false on:n1", ""},
		{get, `{}`, "202", "core Associating false on:n1", v1.MemoryDumpCompleted},
		{get, `{"claimName":"core"}`, "202", "core Associating false on:n1", v1.MemoryDumpFailed},
		{remove, "", "202", "core Dissociating true on:n1", v1.MemoryDumpInProgress},
		{remove, "", refused + "memory dump remove request for vm [web] already exists", "core Dissociating true on:n1", ""},
		{"virtualmachines/none/memorydump", `{"claimName":"core"}`, `404 virtualmachine.kubevirt.io "none" not found`, "core Dissociating true on:n1", ""},
	} {
		if c.before != "" {
			phase(c.before)
		}
		if got := r.put(c.path, c.body); got != c.answer {
			t.Errorf("%d: %s %s: %s, want %s", i, c.path, c.body, got, c.answer)
		}
		if got := r.dumpAsked(); got != c.state {
			t.Errorf("%d: after %s %s: %s, want %s", i, c.path, c.body, got, c.state)
		}
	}
}

// The memory of a machine that does not run cannot be dumped.
func TestMemoryDumpOfNothing(t *testing.T) {
	vm, _, _ := plugs()
	r := start(t, vm)
	if got := r.put("virtualmachines/web/memorydump", `{"claimName":"core"}`); got != `409 Operation cannot be fulfilled on virtualmachine.kubevirt.io "web": VM is not running` {
		t.Error(got)
	}
}
