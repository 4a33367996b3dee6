package virtualmachinepool

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// change gives the pool another template.
func (w *world) change(t *testing.T) {
	t.Helper()
	pool := w.pool(t)
	pool.Spec.VirtualMachineTemplate = changed(0).Spec.VirtualMachineTemplate
	if err := w.api.Update(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
}

// start makes the machines ready, with instances of their templates, as their controller does.
func (w *world) start(t *testing.T) {
	t.Helper()
	all := &v1.VirtualMachineList{}
	if err := w.api.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	for i := range all.Items {
		vm := &all.Items[i]
		vmi := kubevirt.Instance(vm, v1.VirtualMachineGroupVersionKind, vm.Spec.Template, vm.Name, epoch)
		old := &v1.VirtualMachineInstance{}
		if err := w.api.Get(t.Context(), client.ObjectKeyFromObject(vm), old); err == nil {
			continue
		}
		if err := w.api.Create(t.Context(), vmi); err != nil {
			t.Fatal(err)
		}
		vm.Status.Ready = true
		if err := w.api.Status().Update(t.Context(), vm); err != nil {
			t.Fatal(err)
		}
	}
	w.created = nil
}

// requireRestart tells that no instance is what its machine says.
func (w *world) requireRestart(t *testing.T) {
	t.Helper()
	all := &v1.VirtualMachineList{}
	if err := w.api.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	for i := range all.Items {
		all.Items[i].Status.Conditions = []v1.VirtualMachineCondition{{Type: v1.VirtualMachineRestartRequired, Status: corev1.ConditionTrue}}
		if err := w.api.Status().Update(t.Context(), &all.Items[i]); err != nil {
			t.Fatal(err)
		}
	}
}

// asked are the machines that were asked to restart.
func (w *world) asked(t *testing.T) string {
	t.Helper()
	all := &v1.VirtualMachineList{}
	if err := w.api.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, vm := range all.Items {
		if len(vm.Status.StateChangeRequests) == 2 {
			names = append(names, vm.Name)
		}
	}
	return strings.Join(names, " ")
}

// A change of the template changes all machines, and restarts those that run, as many at a time as may be away.
func TestChange(t *testing.T) {
	pool := webPool(3)
	one := intstr.FromInt32(1)
	pool.Spec.MaxUnavailable = &one
	w := newWorld(t, pool)
	w.step(t)
	w.start(t)
	mine := &v1.VirtualMachine{}
	if err := w.api.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: "web-1"}, mine); err != nil {
		t.Fatal(err)
	}
	mine.Labels["mine"], mine.Spec.Template.Spec.Domain.Firmware = "yes", &v1.Firmware{UUID: "u"}
	if err := w.api.Update(t.Context(), mine); err != nil {
		t.Fatal(err)
	}
	w.said()
	w.change(t)
	w.step(t)
	if said := w.said(); strings.Count(said, "SuccessfulUpdate") != 3 || strings.Contains(said, "Restart") {
		t.Errorf("Events: %s", said)
	}
	if err := w.api.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: "web-1"}, mine); err != nil {
		t.Fatal(err)
	}
	if mine.Labels["mine"] != "yes" || mine.Spec.Template.Spec.Domain.Firmware.UUID != "u" || mine.Spec.Template.Spec.Hostname != "h" {
		t.Errorf("the machine: %+v", mine)
	}
	w.requireRestart(t)
	w.step(t)
	if got, said := w.asked(t), w.said(); got != "web-0" || said != "Normal SuccessfulRestart restarted the machine web-0, because the template has changed" {
		t.Errorf("restarts %s, Events: %s", got, said)
	}
	w.before = func(verb string) error { t.Errorf("nothing is to be done, but %s", verb); return nil }
	w.step(t)
}

// A snapshot of a machine is taken: the change waits.
func TestRefusedChange(t *testing.T) {
	w := newWorld(t, webPool(1))
	w.step(t)
	w.change(t)
	w.said()
	w.before = func(verb string) error {
		if verb == "patch" {
			return apierrors.NewInvalid(v1.VirtualMachineGroupVersionKind.GroupKind(), "web-0", nil)
		}
		return nil
	}
	if wait := w.step(t).RequeueAfter; wait != firstPause {
		t.Errorf("tries again after %s", wait)
	}
	if said := w.said(); strings.Count(said, "Warning FailedUpdate the API server refuses the machine web-0") != 1 {
		t.Errorf("Events: %s", said)
	}
	w.before, w.now = func(string) error { return nil }, after(firstPause)
	w.step(t)
	if s := w.pool(t).Status; len(s.Conditions) != 0 {
		t.Errorf("the status: %+v", s)
	}
}
