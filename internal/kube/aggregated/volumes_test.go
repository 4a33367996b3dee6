package aggregated

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-helpers/storage/volume"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// adding is what virtctl sends for a claim.
func adding(name, claim string) string {
	return `{"name":"` + name + `","disk":{"disk":{"bus":"scsi"},"serial":"` + name + `"},"volumeSource":{"persistentVolumeClaim":{"claimName":"` + claim + `","hotpluggable":true}}}`
}

func boot() v1.Volume {
	return v1.Volume{Name: "boot", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "disk"}}}
}

// plugs are the objects of a machine that runs on node n1: the machine, its instance and its pod.
func plugs() (*v1.VirtualMachine, *v1.VirtualMachineInstance, *corev1.Pod) {
	vm := machine("Always")
	vm.Spec.Template = &v1.VirtualMachineInstanceTemplateSpec{}
	vm.Spec.Template.Spec.Volumes = []v1.Volume{boot()}
	vmi := instance("web", v1.Running)
	vmi.Spec.Volumes = []v1.Volume{boot()}
	pod := podOf(vmi)
	pod.Spec.NodeName = "n1"
	return vm, vmi, pod
}

func claim(name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "claim"},
		Spec:       corev1.PersistentVolumeClaimSpec{StorageClassName: new("local"), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}},
		Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending},
	}
	if change != nil {
		change(c)
	}
	return c
}

func class(name, provisioner string) *storagev1.StorageClass {
	return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner, VolumeBindingMode: new(storagev1.VolumeBindingWaitForFirstConsumer)}
}

// volumes is what is asked for now: the volumes of the template, the annotation of the pod, and the node of the claim data.
func (r *rig) volumes() string {
	r.t.Helper()
	var out []string
	var vm v1.VirtualMachine
	if err := r.client.Get(r.t.Context(), client.ObjectKey{Namespace: "default", Name: "web"}, &vm); err == nil && vm.Spec.Template != nil {
		for _, v := range vm.Spec.Template.Spec.Volumes {
			out = append(out, v.Name)
		}
		for _, d := range vm.Spec.Template.Spec.Domain.Devices.Disks {
			out = append(out, "/"+d.Name+":"+string(d.Disk.Bus)+d.Serial)
		}
	}
	var pod corev1.Pod
	if r.client.Get(r.t.Context(), client.ObjectKey{Namespace: "default", Name: "virt-launcher-web"}, &pod) == nil {
		out = append(out, "pod:"+pod.Annotations[contract.KeyVolumes])
	}
	var c corev1.PersistentVolumeClaim
	if r.client.Get(r.t.Context(), client.ObjectKey{Namespace: "default", Name: "data"}, &c) == nil {
		out = append(out, "on:"+c.Annotations[volume.AnnSelectedNode])
	}
	return strings.Join(out, " ")
}

// A volume is added to the machine and to the instance that runs, or to one of them, and removed from both.
func TestAddAndRemoveVolume(t *testing.T) {
	vm, vmi, pod := plugs()
	r := start(t, vm, vmi, pod, claim("data", nil), claim("other", func(c *corev1.PersistentVolumeClaim) {
		c.Spec.VolumeName, c.Status.Phase = "pv", corev1.ClaimBound
	}), class("local", contract.VolumeDriver))
	const none, refusedVM, refusedVMI = "boot pod: on:", `409 Operation cannot be fulfilled on virtualmachine.kubevirt.io "web": `, `409 Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io "web": `
	for i, c := range []struct{ path, body, answer, state string }{
		{"virtualmachines/web/removevolume", `{"name":"disk"}`, refusedVM + "Unable to remove volume [disk] because it does not exist", none},
		{"virtualmachines/web/removevolume", `{"name":"boot"}`, refusedVM + "Unable to remove volume [boot] because it is not hotpluggable", none},
		{"virtualmachines/web/removevolume", `{}`, "400 name: Required value", none},
		{"virtualmachines/web/addvolume", `{"dryRun":["All"],` + adding("disk", "data")[1:], "202", none},
		{"virtualmachines/web/addvolume", adding("boot", "data"), refusedVM + "Unable to add volume [boot] because volume with that name already exists", none},
		{"virtualmachines/web/addvolume", adding("disk", "data"), "202", "boot disk /disk:virtio pod:disk=data on:n1"},
		{"virtualmachines/web/addvolume", adding("disk", "data"), refusedVM + "Unable to add volume [disk] because volume with that name already exists", "boot disk /disk:virtio pod:disk=data on:n1"},
		{"virtualmachines/web/addvolume", adding("disk2", "data"), refusedVM + "Unable to add volume source [data] because it already exists", "boot disk /disk:virtio pod:disk=data on:n1"},
		{"virtualmachineinstances/web/addvolume", adding("disk", "other"), refusedVMI + "Unable to add volume [disk] because volume with that name already exists", "boot disk /disk:virtio pod:disk=data on:n1"},
		{"virtualmachineinstances/web/addvolume", adding("more", "other"), "202", "boot disk /disk:virtio pod:disk=data,more=other on:n1"},
		{"virtualmachines/web/removevolume", `{"name":"disk","dryRun":["All"]}`, "202", "boot disk /disk:virtio pod:disk=data,more=other on:n1"},
		{"virtualmachines/web/removevolume", `{"name":"data"}`, "202", "boot pod:more=other on:n1"},
		{"virtualmachines/web/addvolume", adding("more", "other"), "202", "boot more /more:virtio pod:more=other on:n1"}, // it is kept
		{"virtualmachineinstances/web/removevolume", `{"name":"more"}`, "202", "boot more /more:virtio pod: on:n1"},
		{"virtualmachineinstances/web/removevolume", `{"name":"more"}`, refusedVMI + "Unable to remove volume [more] because it does not exist", "boot more /more:virtio pod: on:n1"},
		{"virtualmachines/web/addvolume", adding("more", "other"), "202", "boot more /more:virtio pod:more=other on:n1"}, // what was begun is completed
		{"virtualmachines/web/removevolume", `{"name":"more"}`, "202", "boot pod: on:n1"},
		{"virtualmachines/none/addvolume", adding("disk", "data"), `404 virtualmachine.kubevirt.io "none" not found`, "boot pod: on:n1"},
		{"virtualmachineinstances/none/removevolume", `{"name":"disk"}`, `404 virtualmachineinstance.kubevirt.io "none" not found`, "boot pod: on:n1"},
		{"virtualmachines/web/addvolume", `{"name":"x"}`, "400 disk: Required value", "boot pod: on:n1"},
	} {
		if got := r.put(c.path, c.body); got != c.answer {
			t.Errorf("%d: %s %s: %s, want %s", i, c.path, c.body, got, c.answer)
		}
		if got := r.volumes(); got != c.state {
			t.Errorf("%d: after %s %s: %s, want %s", i, c.path, c.body, got, c.state)
		}
	}
	_, _, header := r.do(call{method: http.MethodPut, path: prefix + "virtualmachines/web/addvolume", body: adding("disk", "data"), cert: r.proxy})
	if d := diff.Of([]string{`299 - "disk.serial has no effect: the node decides about the serial number of a volume that is added"`}, header["Warning"]); d != "" {
		t.Error(d)
	}
	if code, _, _ := r.do(call{method: http.MethodPut, path: prefix + "virtualmachines/web/removevolume", body: `{"name":"disk"}`, cert: r.proxy, user: "bob"}); code != http.StatusForbidden {
		t.Errorf("bob gets %d", code)
	}
}

func TestAddVolumeRefused(t *testing.T) {
	const refused = `409 Operation cannot be fulfilled on virtualmachine.kubevirt.io "web": `
	user := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "user", UID: "user"}, Spec: corev1.PodSpec{
		Volumes: []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}},
	}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	ended := user.DeepCopy()
	ended.Status.Phase = corev1.PodSucceeded
	asks := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "asks", UID: "asks", Annotations: map[string]string{contract.KeyVolumes: "x=data"}}}
	many := map[string]string{}
	for i := range 255 {
		many[fmt.Sprint("v", i)] = fmt.Sprint("c", i)
	}
	const added = "boot disk /disk:virtio pod:disk=data on:"
	for name, c := range map[string]struct {
		claim  *corev1.PersistentVolumeClaim
		change func(*v1.VirtualMachine, *v1.VirtualMachineInstance, *corev1.Pod)
		more   client.Object
		answer string
		state  string // "": nothing has changed
	}{
		"no claim":             {answer: refused + "PersistentVolumeClaim data does not exist in namespace default", state: "boot pod:"},
		"of another namespace": {more: claim("data", func(c *corev1.PersistentVolumeClaim) { c.Namespace = "other" }), answer: refused + "PersistentVolumeClaim data does not exist in namespace default", state: "boot pod:"},
		"lost":                 {claim: claim("data", func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimLost }), answer: refused + "PersistentVolumeClaim data has lost its volume"},
		"used":                 {claim: claim("data", nil), more: user, answer: refused + "PersistentVolumeClaim data is used by pod user"},
		"used before":          {claim: claim("data", nil), more: ended, answer: "202", state: added + "n1"},
		"asked for":            {claim: claim("data", nil), more: asks, answer: refused + "PersistentVolumeClaim data is used by pod asks"},
		"for readers": {claim: claim("data", func(c *corev1.PersistentVolumeClaim) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
		}), more: user, answer: "202", state: added + "n1"},
		"of another driver":     {claim: claim("data", func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = new("nfs") }), answer: refused + "PersistentVolumeClaim data is of storage class nfs, and only volumes of provisioner volume.cocoonstack.io can be added to a VM that runs; stop the VM first"},
		"of no class":           {claim: claim("data", func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = nil }), answer: "202", state: added},
		"of a class that is no": {claim: claim("data", func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = new("gone") }), answer: "202", state: added},
		"on another node": {claim: claim("data", func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = map[string]string{volume.AnnSelectedNode: "n2"}
		}), answer: refused + "the volume of PersistentVolumeClaim data is made on node n2, and the VM runs on node n1", state: "boot pod: on:n2"},
		"hotplug disabled": {claim: claim("data", nil), change: func(_ *v1.VirtualMachine, vmi *v1.VirtualMachineInstance, _ *corev1.Pod) {
			vmi.Spec.Domain.Devices.DisableHotplug = true
		}, answer: refused + "spec.domain.devices.disableHotplug does not allow volumes to be added"},
		"too many": {claim: claim("data", nil), change: func(_ *v1.VirtualMachine, _ *v1.VirtualMachineInstance, pod *corev1.Pod) {
			pod.Annotations = map[string]string{contract.KeyVolumes: contract.VolumesText(many)}
		}, answer: refused + "VMI has 255 volumes that were added, and cannot have more", state: "boot pod:" + contract.VolumesText(many) + " on:"},
		"not yet running": {claim: claim("data", nil), change: func(_ *v1.VirtualMachine, vmi *v1.VirtualMachineInstance, _ *corev1.Pod) {
			vmi.Status.Phase = v1.Scheduled
		}, answer: refused + "VMI is not running yet; try again when it runs"},
		"stopped": {claim: claim("data", nil), change: func(_ *v1.VirtualMachine, vmi *v1.VirtualMachineInstance, _ *corev1.Pod) {
			vmi.Status.Phase = v1.Succeeded
		}, answer: "202", state: "boot disk /disk:virtio pod: on:"},
		"a list that cannot be read": {claim: claim("data", nil), change: func(_ *v1.VirtualMachine, _ *v1.VirtualMachineInstance, pod *corev1.Pod) {
			pod.Annotations = map[string]string{contract.KeyVolumes: "?"}
		}, answer: refused + "the annotations of pod virt-launcher-web: vm.cocoonstack.io/volumes: \"?\" must be a list of NAME=CLAIM by comma, each NAME once", state: "boot pod:? on:"},
	} {
		vm, vmi, pod := plugs()
		if c.change != nil {
			c.change(vm, vmi, pod)
		}
		objects := []client.Object{vm, vmi, pod, class("local", contract.VolumeDriver), class("nfs", "example.com/nfs")}
		if c.claim != nil {
			objects = append(objects, c.claim)
		}
		if c.more != nil {
			objects = append(objects, c.more)
		}
		r := start(t, objects...)
		if got := r.put("virtualmachines/web/addvolume", adding("disk", "data")); got != c.answer {
			t.Errorf("%s: %s, want %s", name, got, c.answer)
		}
		if got := r.volumes(); got != cmpOr(c.state, "boot pod: on:") {
			t.Errorf("%s: %s", name, got)
		}
		r.stop()
	}
	vm, vmi, pod := plugs()
	vmi.Status.Phase = v1.Failed
	r := start(t, vm, vmi, pod, claim("data", nil))
	if got := r.put("virtualmachineinstances/web/addvolume", adding("disk", "data")); got != `409 Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io "web": VMI is not running` {
		t.Error(got)
	}
}

// A volume with which the VM was started is in its pod, and is not taken away while it runs.
func TestRemoveVolumeStarted(t *testing.T) {
	vm, vmi, pod := plugs()
	data := v1.Volume{Name: "disk", VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
		PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}, Hotpluggable: true,
	}}}
	vm.Spec.Template.Spec.Volumes = append(vm.Spec.Template.Spec.Volumes, data)
	vmi.Spec.Volumes = append(vmi.Spec.Volumes, data)
	r := start(t, vm, vmi, pod)
	if got := r.put("virtualmachines/web/removevolume", `{"name":"disk"}`); !strings.HasSuffix(got, "Unable to remove volume [disk] because the VM was started with it; stop the VM first") {
		t.Error(got)
	}
	if err := r.client.Delete(t.Context(), vmi, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	if got := r.put("virtualmachines/web/removevolume", `{"name":"disk"}`) + " " + r.volumes(); got != "202 boot pod:" {
		t.Error(got)
	}
}

// Of two changes at a time none is lost, and one that others always overtake is refused.
func TestAddVolumeOvertaken(t *testing.T) {
	vm, vmi, pod := plugs()
	r := start(t, vm, vmi, pod, claim("data", nil), class("local", contract.VolumeDriver))
	overtaken := 0
	r.hooks.Patch = func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
		if _, ok := o.(*corev1.PersistentVolumeClaim); !ok && overtaken > 0 {
			overtaken--
			return apierrors.NewConflict(schema.GroupResource{Resource: "x"}, o.GetName(), nil)
		}
		return c.Patch(ctx, o, p, opts...)
	}
	overtaken = attempts
	if got := r.put("virtualmachines/web/addvolume", adding("disk", "data")); got != `409 Operation cannot be fulfilled on virtualmachine.kubevirt.io "web": it was changed at the same time; try again` {
		t.Error(got)
	}
	overtaken = 2
	if got := r.put("virtualmachines/web/addvolume", adding("disk", "data")) + " " + r.volumes(); got != "202 boot disk /disk:virtio pod:disk=data on:n1" {
		t.Error(got)
	}
}

// A request that was cut off between the machine and its pod is completed by the same request.
func TestVolumeRequestCutOff(t *testing.T) {
	vm, vmi, pod := plugs()
	r := start(t, vm, vmi, pod, claim("data", nil), class("local", contract.VolumeDriver))
	cut := false
	r.hooks.Patch = func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
		if _, ok := o.(*corev1.Pod); ok && cut {
			return apierrors.NewInternalError(errors.New("the connection is lost"))
		}
		return c.Patch(ctx, o, p, opts...)
	}
	for i, c := range []struct {
		path, body string
		cut        bool
		state      string
	}{
		{"addvolume", adding("disk", "data"), true, "boot disk /disk:virtio pod: on:n1"},
		{"addvolume", adding("disk", "data"), false, "boot disk /disk:virtio pod:disk=data on:n1"},
		{"removevolume", `{"name":"disk"}`, true, "boot pod:disk=data on:n1"},
		{"removevolume", `{"name":"disk"}`, false, "boot pod: on:n1"},
	} {
		cut = c.cut
		if got := r.put("virtualmachines/web/"+c.path, c.body); strings.HasPrefix(got, "500") != c.cut || strings.HasPrefix(got, "202") == c.cut {
			t.Errorf("%d: %s", i, got)
		}
		if got := r.volumes(); got != c.state {
			t.Errorf("%d: %s, want %s", i, got, c.state)
		}
	}
}
