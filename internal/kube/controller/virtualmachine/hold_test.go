package virtualmachine

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	setv1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// A machine that stays on its node has a claim before it has an instance. The claim is the machine's, not the instance's.
func TestHold(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{kubevirt.AddToScheme, setv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	vm := &v1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "u"}}
	template := &v1.VirtualMachineInstanceTemplateSpec{}
	template.Spec.Volumes = []v1.Volume{{Name: "boot", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "i"}}}}
	claims := func(c client.Client) []setv1.VMPlacement {
		list := &setv1.VMPlacementList{}
		if err := c.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		return list.Items
	}
	for name, x := range map[string]struct {
		annotations map[string]string
		wait        *int64
		holds       bool
	}{
		"nothing":  {},
		"wait":     {map[string]string{contract.KeySticky: "wait"}, nil, true},
		"10m":      {map[string]string{contract.KeySticky: "10m"}, new(int64(600)), true},
		"shutdown": {map[string]string{contract.KeyEvictionPolicy: "shutdown"}, nil, true},
	} {
		c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(vm).Build()
		r := &Reconciler{Client: c, Live: c}
		template.ObjectMeta.Annotations = x.annotations
		for range 2 { // the second attempt finds what the first one made
			if err := r.hold(t.Context(), vm, instance(vm, template, kubevirt.Base{}, time.Now())); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		got := claims(c)
		if !x.holds {
			if len(got) > 0 {
				t.Errorf("%s: %+v", name, got)
			}
			continue
		}
		if len(got) != 1 || got[0].Name != kubevirt.VMName(instance(vm, template, kubevirt.Base{}, time.Now())) ||
			len(got[0].OwnerReferences) != 1 || got[0].OwnerReferences[0].UID != "u" || (x.wait == nil) != (got[0].Spec.WaitSeconds == nil) {
			t.Fatalf("%s: %+v", name, got)
		}
		if x.wait != nil && *got[0].Spec.WaitSeconds != *x.wait {
			t.Errorf("%s: waits %d s", name, *got[0].Spec.WaitSeconds)
		}
		// Another machine of the name waits until the claim of the first is gone.
		next := vm.DeepCopy()
		next.UID = "w"
		if err := r.hold(t.Context(), next, instance(next, template, kubevirt.Base{}, time.Now())); err == nil || !strings.Contains(err.Error(), "belongs to an earlier VirtualMachine") {
			t.Errorf("%s: the next machine: %v", name, err)
		}
	}
}
