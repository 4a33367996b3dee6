package virtualmachine

import (
	"errors"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
)

// A machine waits for its instancetype, copies it before it has an instance, and keeps it.
func TestPlan(t *testing.T) {
	s := runtime.NewScheme()
	if err := errors.Join(kubevirt.AddToScheme(s), appsv1.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	vm := machine(v1.RunStrategyAlways, func(vm *v1.VirtualMachine) {
		vm.Spec.Instancetype = &v1.InstancetypeMatcher{Name: "small"}
		vm.Spec.Template.ObjectMeta.Annotations = map[string]string{"of": "template"}
		vm.Spec.Template.Spec.Volumes = []v1.Volume{{Name: "root", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "a"}}}}
	})
	c := fake.NewClientBuilder().WithScheme(s).WithObjects(vm).WithStatusSubresource(vm).Build()
	r := &Reconciler{Client: c, Live: c}
	next := func() plan {
		t.Helper()
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(vm), vm); err != nil {
			t.Fatal(err)
		}
		p, err := r.plan(t.Context(), vm)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if p := next(); p.reason != machinebase.ReasonInstancetype || !strings.Contains(p.refusal, "small does not exist") || p.again == 0 || p.template != nil || p.captured {
		t.Errorf("missing: %+v", p)
	}
	if !awaits(vm, kubevirt.KindClusterInstancetype, "small") || awaits(vm, kubevirt.KindInstancetype, "small") || awaits(vm, kubevirt.KindClusterInstancetype, "large") || awaits(vm, kubevirt.KindClusterPreference, "small") {
		t.Error("the machine waits for something else")
	}
	small := &v1beta1.VirtualMachineClusterInstancetype{ObjectMeta: metav1.ObjectMeta{Name: "small", UID: "s"}}
	small.Spec.CPU.Guest, small.Spec.Memory.Guest, small.Spec.IOThreadsPolicy = 2, resource.MustParse("1Gi"), ptr[v1.IOThreadsPolicy]("shared")
	if err := c.Create(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	if p := next(); !p.captured {
		t.Errorf("not copied yet: %+v", p)
	}
	p := next()
	if p.captured || p.refusal != "" || p.template.Spec.Domain.CPU.Sockets != 2 || len(p.warnings) != 1 || vm.Status.InstancetypeRef.ControllerRevisionRef == nil {
		t.Errorf("copied: %+v", p)
	}
	if awaits(vm, kubevirt.KindClusterInstancetype, "small") {
		t.Error("the machine waits for what it has")
	}
	vmi := instance(vm, p.template, p.base, now)
	if vmi.Annotations[v1.ClusterInstancetypeAnnotation] != "small" || vmi.Annotations["of"] != "template" || vmi.Spec.Domain.Memory.Guest.String() != "1Gi" {
		t.Errorf("%+v", vmi)
	}
	if len(p.template.ObjectMeta.Annotations) != 1 {
		t.Errorf("the template has the annotations of the instance: %v", p.template.ObjectMeta.Annotations)
	}
	small.Spec.CPU.Guest = 8
	if err := c.Update(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	if p := next(); p.captured || p.template.Spec.Domain.CPU.Sockets != 2 {
		t.Errorf("after a change of the instancetype: %+v", p)
	}
	if s := decide(seen{vm: vm, vmi: vmi, template: p.template, now: now}); len(s.status.Conditions) != 1 {
		t.Errorf("nothing has changed, but: %+v", s.status.Conditions)
	}

	// A conflict is refused and copies nothing.
	vm.Spec.Instancetype.Name = "large"
	vm.Spec.Template.Spec.Domain.CPU = &v1.CPU{Cores: 3}
	large := small.DeepCopy()
	large.ObjectMeta = metav1.ObjectMeta{Name: "large", UID: "l"}
	if err := errors.Join(c.Update(t.Context(), vm), c.Create(t.Context(), large)); err != nil {
		t.Fatal(err)
	}
	if p := next(); p.captured || p.reason != kubevirt.ReasonNotSupported || !strings.Contains(p.refusal, "spec.template.spec.domain.cpu.cores: Forbidden: conflicts with the instancetype large") {
		t.Errorf("a conflict: %+v", p)
	}
	vm.Spec.Template.Spec.Domain.CPU = nil
	if err := c.Update(t.Context(), vm); err != nil {
		t.Fatal(err)
	}
	if p := next(); !p.captured || vm.Spec.Instancetype.Name != "large" {
		t.Errorf("another instancetype: %+v", p)
	}
	if p := next(); p.template.Spec.Domain.CPU.Sockets != 8 {
		t.Errorf("another instancetype: %+v", p)
	}
	if s := decide(seen{vm: vm, vmi: vmi, template: next().template, now: now}); len(s.status.Conditions) != 2 || s.status.Conditions[1].Type != v1.VirtualMachineRestartRequired {
		t.Errorf("the instancetype has changed, but: %+v", s.status.Conditions)
	}
	deleted(vm)
	if p, err := r.plan(t.Context(), vm); err != nil || p.captured || p.template != nil {
		t.Errorf("a deleted machine: %+v %v", p, err)
	}
}
