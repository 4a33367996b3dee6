package machinebase

import (
	"errors"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

func cluster(t *testing.T, objects ...client.Object) client.Client {
	t.Helper()
	s := runtime.NewScheme()
	if err := errors.Join(kubevirt.AddToScheme(s), corev1.AddToScheme(s), appsv1.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	return fake.NewClientBuilder().WithScheme(s).WithObjects(objects...).Build()
}

func small(cpus uint32) *v1beta1.VirtualMachineClusterInstancetype {
	o := &v1beta1.VirtualMachineClusterInstancetype{ObjectMeta: metav1.ObjectMeta{Name: "small", UID: "type", Generation: int64(cpus), Labels: map[string]string{"a": "b"}}}
	o.Spec.CPU.Guest, o.Spec.Memory.Guest = cpus, resource.MustParse("1Gi")
	return o
}

func linux(namespace string) *v1beta1.VirtualMachinePreference {
	o := &v1beta1.VirtualMachinePreference{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "linux", UID: "preference"}}
	o.Spec.Annotations = map[string]string{"of": namespace}
	return o
}

func web(change ...func(*v1.VirtualMachine)) *v1.VirtualMachine {
	vm := &v1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "vm"}}
	vm.Spec.Instancetype = &v1.InstancetypeMatcher{Name: "small"}
	vm.Spec.Preference = &v1.PreferenceMatcher{Name: "linux", Kind: "virtualmachinepreference"}
	vm.Spec.Template = &v1.VirtualMachineInstanceTemplateSpec{}
	for _, f := range change {
		f(vm)
	}
	return vm
}

func finder(c client.Client) Finder { return Finder{Client: c, Live: c} }

// captured notes the copies in the status, as the controller does.
func captured(t *testing.T, c client.Client, vm *v1.VirtualMachine) Found {
	t.Helper()
	found, err := finder(c).Find(t.Context(), vm)
	if err != nil || len(found.Missing) > 0 {
		t.Fatalf("%v %v", err, found.Missing)
	}
	if vm.Status.InstancetypeRef, vm.Status.PreferenceRef, err = finder(c).Capture(t.Context(), c, vm, found); err != nil {
		t.Fatal(err)
	}
	return found
}

// A machine keeps what it was made of, whatever becomes of the objects; another reference is another copy.
func TestCopiesStay(t *testing.T) {
	c := cluster(t, small(1), linux("ns"), linux("other"))
	vm := web()
	first := captured(t, c, vm)
	if i, p := first.Base.Instancetype, first.Base.Preference; i.Kind != kubevirt.KindClusterInstancetype || i.Name != "small" || i.Spec.CPU.Guest != 1 || p.Spec.Annotations["of"] != "ns" {
		t.Errorf("%+v %+v", i, p)
	}
	ref := vm.Status.InstancetypeRef.DeepCopy()
	if ref.Name != "small" || ref.Kind != kubevirt.KindClusterInstancetype || vm.Status.PreferenceRef.Kind != kubevirt.KindPreference {
		t.Errorf("%+v %+v", ref, vm.Status.PreferenceRef)
	}
	copied := &appsv1.ControllerRevision{}
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: ref.ControllerRevisionRef.Name}, copied); err != nil {
		t.Fatal(err)
	}
	if !metav1.IsControlledBy(copied, vm) || copied.Labels["instancetype.kubevirt.io/object-name"] != "small" || copied.Labels[Label] != kubevirt.KindClusterInstancetype || strings.Contains(string(copied.Data.Raw), "labels") {
		t.Errorf("%+v %s", copied.ObjectMeta, copied.Data.Raw)
	}
	if err := errors.Join(c.Delete(t.Context(), small(1)), c.Create(t.Context(), small(4)), c.Delete(t.Context(), linux("ns"))); err != nil {
		t.Fatal(err)
	}
	again := captured(t, c, vm)
	if again.Base.Instancetype.Spec.CPU.Guest != 1 || again.Base.Preference == nil || vm.Status.InstancetypeRef.ControllerRevisionRef.Name != ref.ControllerRevisionRef.Name {
		t.Errorf("%+v %+v", again.Base.Instancetype, vm.Status.InstancetypeRef)
	}
	list := &appsv1.ControllerRevisionList{}
	if err := c.List(t.Context(), list); err != nil || len(list.Items) != 2 {
		t.Errorf("%d copies, %v", len(list.Items), err)
	}
	// The same name as the kind in the namespace is another object.
	vm.Spec.Instancetype.Kind = kubevirt.KindInstancetype
	if found, err := finder(c).Find(t.Context(), vm); err != nil || len(found.Missing) != 1 || !found.Missing[0].Later || found.Missing[0].String() != "spec.instancetype: the VirtualMachineInstancetype small does not exist; create it" {
		t.Errorf("%+v %v", found.Missing, err)
	}
	// The copy that revisionName names counts, also without a status.
	vm.Spec.Instancetype = &v1.InstancetypeMatcher{Name: "small", RevisionName: ref.ControllerRevisionRef.Name}
	vm.Status.InstancetypeRef = nil
	if found := captured(t, c, vm); found.Base.Instancetype.Spec.CPU.Guest != 1 || vm.Status.InstancetypeRef.ControllerRevisionRef.Name != ref.ControllerRevisionRef.Name {
		t.Errorf("%+v", vm.Status.InstancetypeRef)
	}
	// Without a reference nothing is left of it.
	vm.Spec.Instancetype, vm.Spec.Preference = nil, nil
	if found := captured(t, c, vm); found.Base != (kubevirt.Base{}) || vm.Status.InstancetypeRef != nil || vm.Status.PreferenceRef != nil {
		t.Errorf("%+v %+v", found.Base, vm.Status)
	}
}

// A capture that is repeated, because the manager ended before the status was written, makes no second copy. A ControllerRevision of
// somebody else is never taken for one.
func TestCaptureIsRepeated(t *testing.T) {
	c := cluster(t, small(1), linux("ns"))
	vm := web()
	captured(t, c, vm)
	name := vm.Status.InstancetypeRef.ControllerRevisionRef.Name
	vm.Status = v1.VirtualMachineStatus{}
	captured(t, c, vm)
	if got := vm.Status.InstancetypeRef.ControllerRevisionRef.Name; got != name {
		t.Errorf("%s, then %s", name, got)
	}
	// The next machine of the name has copies of its own.
	next := web(func(vm *v1.VirtualMachine) { vm.UID = "next" })
	captured(t, c, next)
	if got := next.Status.InstancetypeRef.ControllerRevisionRef.Name; got == name {
		t.Errorf("two machines share %s", name)
	}
	for what, spoil := range map[string]func(*appsv1.ControllerRevision){
		"of another machine": func(r *appsv1.ControllerRevision) { r.OwnerReferences[0].UID = "x" },
		"of nobody":          func(r *appsv1.ControllerRevision) { r.OwnerReferences = nil },
		"other content": func(r *appsv1.ControllerRevision) {
			r.Data.Raw = []byte(strings.Replace(string(r.Data.Raw), `"guest":1`, `"guest":9`, 1))
		},
	} {
		c := cluster(t, small(1), linux("ns"))
		vm := web()
		found, err := finder(c).Find(t.Context(), vm)
		if err != nil {
			t.Fatal(err)
		}
		r, err := revisionOf(vm, found.instancetype.object)
		if err != nil {
			t.Fatal(err)
		}
		spoil(r)
		if err := c.Create(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		if _, _, err := finder(c).Capture(t.Context(), c, vm, found); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The names of copies are valid, whatever the names of the machine and the object are.
func TestNamesOfCopies(t *testing.T) {
	long := strings.Repeat("a", 199) + "." + strings.Repeat("b", 53)
	for _, name := range []string{"a", "a.b", strings.Repeat("a", 63), long, strings.Repeat("a.", 126) + "a"} {
		o := small(1)
		o.Name = name
		o.SetGroupVersionKind(v1beta1.SchemeGroupVersion.WithKind(kubevirt.KindClusterInstancetype))
		for _, machine := range []string{"", "a", strings.Repeat("m", 62)} {
			r, err := revisionOf(web(func(vm *v1.VirtualMachine) { vm.Name = machine }), o)
			if err != nil {
				t.Fatal(err)
			}
			if machine != "" {
				if bad := validation.IsDNS1123Subdomain(r.Name); len(bad) > 0 {
					t.Errorf("%s of %s: %s: %v", name, machine, r.Name, bad)
				}
			}
			for k, v := range r.Labels {
				if bad := validation.IsValidLabelValue(v); len(bad) > 0 {
					t.Errorf("%s: %s=%s: %v", name, k, v, bad)
				}
			}
		}
	}
}

func TestMissing(t *testing.T) {
	bare := &appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "daemonset"}, Data: runtime.RawExtension{Raw: []byte(`{"spec":{"template":{}}}`)}}
	old := &appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "old"}, Data: runtime.RawExtension{Raw: []byte(`{"apiVersion":"instancetype.kubevirt.io/v1alpha1","kind":"VirtualMachineInstancetype"}`)}}
	other := &appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "preference"}, Data: runtime.RawExtension{Raw: []byte(`{"apiVersion":"instancetype.kubevirt.io/v1beta1","kind":"VirtualMachinePreference","metadata":{"name":"small"}}`)}}
	large := &appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "large"}, Data: runtime.RawExtension{Raw: []byte(`{"apiVersion":"instancetype.kubevirt.io/v1beta1","kind":"VirtualMachineClusterInstancetype","metadata":{"name":"large"}}`)}}
	c := cluster(t, small(1), linux("other"), bare, old, other, large)
	revision := func(name string) func(*v1.VirtualMachine) {
		return func(vm *v1.VirtualMachine) { vm.Spec.Preference, vm.Spec.Instancetype.RevisionName = nil, name }
	}
	for want, change := range map[string]func(*v1.VirtualMachine){
		"later: spec.preference: the VirtualMachinePreference linux does not exist":                                          func(*v1.VirtualMachine) {},
		"later: spec.instancetype: the VirtualMachineClusterInstancetype none does not exist":                                func(vm *v1.VirtualMachine) { vm.Spec.Preference, vm.Spec.Instancetype.Name = nil, "none" },
		"later: spec.instancetype: the ControllerRevision gone, which is the machine's copy, does not exist":                 revision("gone"),
		"never: spec.instancetype.revisionName: the ControllerRevision daemonset: it is no copy":                             revision("daemonset"),
		"never: spec.instancetype.revisionName: the ControllerRevision old: it is no copy":                                   revision("old"),
		"never: spec.instancetype.revisionName: the ControllerRevision preference is a copy of VirtualMachinePreference":     revision("preference"),
		"never: spec.instancetype.revisionName: the ControllerRevision large is a copy of VirtualMachineClusterInstancetype": revision("large"),
	} {
		found, err := finder(c).Find(t.Context(), web(change))
		got := ""
		for _, m := range found.Missing {
			got += map[bool]string{true: "later", false: "never"}[m.Later] + ": " + m.String()
			if want := map[bool]string{true: ReasonInstancetype, false: ReasonPreference}[strings.HasPrefix(m.String(), "spec.instancetype")]; m.Reason != want {
				t.Errorf("%s has the reason %s", got, m.Reason)
			}
		}
		if err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("%s; want %s, %v", got, want, err)
		}
		if found.Base.Preference != nil || found.Base.Instancetype == nil {
			t.Errorf("%s: %+v", want, found.Base)
		}
	}
}

// A claim says in its labels which instancetype and preference its content is for.
func TestInference(t *testing.T) {
	claim := func(name string, labels map[string]string) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: labels}}
	}
	c := cluster(t, small(1), linux("ns"), claim("bare", nil),
		claim("full", map[string]string{"instancetype.kubevirt.io/default-instancetype": "small", "instancetype.kubevirt.io/default-preference": "linux", "instancetype.kubevirt.io/default-preference-kind": "VirtualMachinePreference"}),
		claim("odd", map[string]string{"instancetype.kubevirt.io/default-instancetype": "small", "instancetype.kubevirt.io/default-instancetype-kind": "Pod"}))
	ignore := v1.IgnoreInferFromVolumeFailure
	for _, x := range []struct {
		volume string
		policy *v1.InferFromVolumeFailurePolicy
		want   string
	}{
		{"full", nil, "VirtualMachineClusterInstancetype small"},
		{"full", &ignore, "VirtualMachineClusterInstancetype small, replaces"},
		{"bare", nil, "never: spec.instancetype.inferFromVolume: the claim of volume bare has no label instancetype.kubevirt.io/default-instancetype; give a name"},
		{"bare", &ignore, "none"},
		{"odd", &ignore, `never: spec.instancetype.inferFromVolume: the label instancetype.kubevirt.io/default-instancetype-kind of the claim of volume odd is "Pod"`},
		{"gone", &ignore, "later: spec.instancetype: the claim gone of volume gone does not exist"},
		{"root", nil, "never: spec.instancetype.inferFromVolume: volume root is neither a dataVolume nor a persistentVolumeClaim"},
		{"root", &ignore, "none"},
		{"x", nil, "never: spec.instancetype.inferFromVolume: the machine has no volume x"},
	} {
		vm := web(func(vm *v1.VirtualMachine) {
			vm.Spec.Instancetype, vm.Spec.Preference = &v1.InstancetypeMatcher{InferFromVolume: x.volume, InferFromVolumeFailurePolicy: x.policy}, nil
			vm.Spec.Template.Spec.Volumes = []v1.Volume{{Name: "root", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{}}}}
			for _, name := range []string{"full", "bare", "odd", "gone"} {
				v := v1.Volume{Name: name}
				v.PersistentVolumeClaim = &v1.PersistentVolumeClaimVolumeSource{PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
				vm.Spec.Template.Spec.Volumes = append(vm.Spec.Template.Spec.Volumes, v)
			}
		})
		found, err := finder(c).Find(t.Context(), vm)
		got := "none"
		switch {
		case err != nil:
			got = err.Error()
		case len(found.Missing) > 0:
			got = map[bool]string{true: "later", false: "never"}[found.Missing[0].Later] + ": " + found.Missing[0].String()
		case found.Base.Instancetype != nil:
			got = found.Base.Instancetype.Kind + " " + found.Base.Instancetype.Name
			if found.Base.Replaces {
				got += ", replaces"
			}
		}
		if !strings.HasPrefix(got, x.want) {
			t.Errorf("%s: %s; want %s", x.volume, got, x.want)
		}
		if x.want != "VirtualMachineClusterInstancetype small" {
			continue
		}
		// What was found once stays, whatever becomes of the claim.
		vm.Spec.Preference = &v1.PreferenceMatcher{InferFromVolume: "full"}
		captured(t, c, vm)
		if r := vm.Status.InstancetypeRef; r.Name != "small" || r.InferFromVolume != "full" || vm.Status.PreferenceRef.Name != "linux" || vm.Status.PreferenceRef.Kind != kubevirt.KindPreference {
			t.Errorf("%+v %+v", r, vm.Status.PreferenceRef)
		}
		gone := cluster(t)
		list := &appsv1.ControllerRevisionList{}
		if err := c.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		for _, r := range list.Items {
			r.ResourceVersion = ""
			if err := gone.Create(t.Context(), &r); err != nil {
				t.Fatal(err)
			}
		}
		before := vm.Status.DeepCopy()
		if found := captured(t, gone, vm); found.Base.Preference.Name != "linux" || vm.Status.InstancetypeRef.ControllerRevisionRef.Name != before.InstancetypeRef.ControllerRevisionRef.Name {
			t.Errorf("%+v %+v", found.Base, vm.Status.InstancetypeRef)
		}
	}
}
