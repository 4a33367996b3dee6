package virtualmachineclone

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"kubevirt.io/api/clone/v1beta1"
	v1 "kubevirt.io/api/core/v1"
	snapshotv1beta1 "kubevirt.io/api/snapshot/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// world is an API server with a machine and a clone of it, and a reconciler.
type world struct {
	*Reconciler
	api    client.WithWatch
	writes int
	killAt int // the write after which the reconciler hears nothing more; 0: none; below 0: each
}

var errKilled = errors.New("killed")

func newWorld(t *testing.T, objects ...client.Object) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := kubevirt.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	w := &world{}
	write := func(err error) error {
		if w.writes++; err == nil && (w.writes == w.killAt || w.killAt < 0) {
			return errKilled
		}
		return err
	}
	// The default tracker notes who manages which field, and cannot do so with all types of KubeVirt.
	tracker := clienttesting.NewObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder())
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjectTracker(tracker).WithObjects(objects...).WithStatusSubresource(&v1beta1.VirtualMachineClone{}).Build()
	w.api = interceptor.NewClient(api, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			return write(c.Create(ctx, o, opts...))
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			return write(c.SubResource(sub).Update(ctx, o, opts...))
		},
	})
	w.Reconciler = &Reconciler{Client: w.api, Live: w.api, Events: events.NewFakeRecorder(100), Now: func() time.Time { return epoch }}
	return w
}

func ptr[T any](v T) *T { return &v }

// spec is that of a machine with an identity.
func spec() v1.VirtualMachineSpec {
	s := v1.VirtualMachineSpec{Template: &v1.VirtualMachineInstanceTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "1", "b/c": "2"}}}}
	s.Template.Spec.Domain.Firmware = &v1.Firmware{UUID: "u", Serial: "s", Bootloader: &v1.Bootloader{BIOS: &v1.BIOS{}}}
	s.Template.Spec.Domain.Devices.Interfaces = []v1.Interface{{Name: "one", MacAddress: "02:00:00:00:00:01"}, {Name: "two", MacAddress: "02:00:00:00:00:02"}, {Name: "three"}}
	return s
}

func things(change ...func(*v1beta1.VirtualMachineClone)) []client.Object {
	c := &v1beta1.VirtualMachineClone{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "ns", UID: "u"}}
	c.Spec.Source = &corev1.TypedLocalObjectReference{APIGroup: ptr("kubevirt.io"), Kind: "VirtualMachine", Name: "db"}
	c.Spec.Target = &corev1.TypedLocalObjectReference{APIGroup: ptr("kubevirt.io"), Kind: "VirtualMachine", Name: "db-2"}
	c.Spec.VolumeNamePolicy = ptr(v1beta1.VolumeNamePolicyPrefixTargetName)
	for _, f := range change {
		f(c)
	}
	content := &snapshotv1beta1.VirtualMachineSnapshotContent{ObjectMeta: metav1.ObjectMeta{Name: "content", Namespace: "ns"}}
	content.Spec.Source.VirtualMachine = &snapshotv1beta1.VirtualMachine{Spec: spec()}
	return []client.Object{c, content, &v1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "ns"}, Spec: spec()}}
}

func (w *world) get(t *testing.T, name string, into client.Object) bool {
	t.Helper()
	err := w.api.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: name}, into)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return err == nil
}

func (w *world) status(t *testing.T) v1beta1.VirtualMachineCloneStatus {
	t.Helper()
	c := &v1beta1.VirtualMachineClone{}
	w.get(t, "c", c)
	return c.Status
}

// run reconciles until nothing changes, with managers that take the place of those that were killed.
func (w *world) run(t *testing.T) {
	t.Helper()
	for range 20 {
		before := w.writes
		_, err := w.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "c"}})
		if err != nil && !errors.Is(err, errKilled) {
			t.Fatal(err)
		}
		if w.writes == before {
			return
		}
	}
	t.Fatal("it never rests")
}

// others take the snapshot and do the restore, or fail.
func (w *world) others(t *testing.T, why string) {
	t.Helper()
	snapshot, restore := &snapshotv1beta1.VirtualMachineSnapshot{}, &snapshotv1beta1.VirtualMachineRestore{}
	if w.get(t, "clone-u", snapshot) && snapshot.Status == nil {
		snapshot.Status = &snapshotv1beta1.VirtualMachineSnapshotStatus{ReadyToUse: ptr(true), VirtualMachineSnapshotContentName: ptr("content"), Phase: snapshotv1beta1.Succeeded}
		if why != "" {
			snapshot.Status = &snapshotv1beta1.VirtualMachineSnapshotStatus{Phase: snapshotv1beta1.Failed, Error: &snapshotv1beta1.Error{Message: &why}}
		}
		if err := w.api.Update(t.Context(), snapshot); err != nil {
			t.Fatal(err)
		}
	}
	if w.get(t, "clone-u", restore) && restore.Status == nil {
		restore.Status = &snapshotv1beta1.VirtualMachineRestoreStatus{Complete: ptr(true)}
		if err := w.api.Update(t.Context(), restore); err != nil {
			t.Fatal(err)
		}
	}
}

// A clone ends up the same wherever the manager is killed: with one snapshot and one restore, which go with it.
func TestKilledAfterEachWrite(t *testing.T) {
	for at := -1; ; at++ {
		w := newWorld(t, things()...)
		w.killAt = at
		for range 3 {
			w.run(t)
			w.others(t, "")
		}
		if at > w.writes {
			break // it was never killed
		}
		s := w.status(t)
		if s.Phase != v1beta1.Succeeded || *s.TargetName != "db-2" || *s.SnapshotName != "clone-u" || *s.RestoreName != "clone-u" {
			t.Errorf("killed after write %d: %+v", at, s)
		}
		restore := &snapshotv1beta1.VirtualMachineRestore{}
		w.get(t, "clone-u", restore)
		if restore.Spec.VirtualMachineSnapshotName != "clone-u" || restore.Spec.Target.Name != "db-2" || *restore.Spec.VolumeRestorePolicy != "PrefixTargetName" || restore.OwnerReferences[0].UID != "u" {
			t.Errorf("killed after write %d: %+v", at, restore)
		}
		for _, list := range []client.ObjectList{&snapshotv1beta1.VirtualMachineSnapshotList{}, &snapshotv1beta1.VirtualMachineRestoreList{}} {
			if err := w.api.List(t.Context(), list); err != nil {
				t.Fatal(err)
			}
			var n int
			switch l := list.(type) {
			case *snapshotv1beta1.VirtualMachineSnapshotList:
				n = len(l.Items)
			case *snapshotv1beta1.VirtualMachineRestoreList:
				n = len(l.Items)
			}
			if n != 1 {
				t.Errorf("killed after write %d: %d of %T", at, n, list)
			}
		}
	}
}

// What a clone cannot be made of is told, and nothing is made.
func TestFails(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v1beta1.VirtualMachineClone)
		why    string // of the snapshot
		phase  v1beta1.VirtualMachineClonePhase
		want   string
	}{
		"snapshot failed": {func(*v1beta1.VirtualMachineClone) {}, "a VM writes to it", v1beta1.Failed, "the VirtualMachineSnapshot clone-u failed: a VM writes to it"},
		"no source":       {func(c *v1beta1.VirtualMachineClone) { c.Spec.Source.Name = "none" }, "", v1beta1.SnapshotInProgress, "the VirtualMachine none does not exist"},
		"no snapshot":     {func(c *v1beta1.VirtualMachineClone) { c.Spec.Source.Kind = "VirtualMachineSnapshot" }, "", "", "the VirtualMachineSnapshot db does not exist"},
		"target exists":   {func(c *v1beta1.VirtualMachineClone) { c.Spec.Target.Name = "db" }, "", v1beta1.Failed, "the VirtualMachine db exists; delete it, or clone to another name"},
		"no MAC":          {func(c *v1beta1.VirtualMachineClone) { c.Spec.NewMacAddresses = map[string]string{"one": "x"} }, "", v1beta1.Failed, `spec.newMacAddresses[one]: "x" is no MAC address`},
		"no interface": {func(c *v1beta1.VirtualMachineClone) {
			c.Spec.NewMacAddresses = map[string]string{"x": "02:00:00:00:00:03"}
		}, "", v1beta1.Failed, "spec.newMacAddresses[x]: the machine has no interface of this name"},
		"no filter": {func(c *v1beta1.VirtualMachineClone) { c.Spec.LabelFilters = []string{"("} }, "", v1beta1.Failed, `the filter "(" is no regular expression`},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, things(c.change)...)
			for range 3 {
				w.run(t)
				w.others(t, c.why)
			}
			s := w.status(t)
			if i := slices.IndexFunc(s.Conditions, func(c v1beta1.Condition) bool { return c.Type == v1beta1.ConditionReady }); s.Phase != c.phase || i < 0 || !strings.HasPrefix(s.Conditions[i].Message, c.want) {
				t.Errorf("%+v", s)
			}
			if w.get(t, "clone-u", &snapshotv1beta1.VirtualMachineRestore{}) {
				t.Error("there is a restore")
			}
		})
	}
}

// A clone has nothing that only one machine may have.
func TestPatches(t *testing.T) {
	const domain = `"/spec/template/spec/domain/`
	own := []string{
		`{"op":"remove","path":` + domain + `devices/interfaces/0/macAddress"}`, `{"op":"remove","path":` + domain + `devices/interfaces/1/macAddress"}`,
		`{"op":"add","path":` + domain + `firmware","value":{"bootloader":{"bios":{}}}}`,
	}
	for name, c := range map[string]struct {
		change func(*v1beta1.VirtualMachineClone)
		want   []string
	}{
		"plain": {func(*v1beta1.VirtualMachineClone) {}, own},
		"given": {func(c *v1beta1.VirtualMachineClone) {
			c.Spec.NewMacAddresses = map[string]string{"two": "02:00:00:00:00:03"}
			c.Spec.NewSMBiosSerial = ptr("t")
			c.Spec.Patches = []string{`{"op":"x"}`}
		}, []string{
			own[0], `{"op":"add","path":` + domain + `devices/interfaces/1/macAddress","value":"02:00:00:00:00:03"}`,
			`{"op":"add","path":` + domain + `firmware","value":{"bootloader":{"bios":{}},"serial":"t"}}`, `{"op":"x"}`,
		}},
		"filters": {func(c *v1beta1.VirtualMachineClone) {
			c.Spec.LabelFilters = []string{"*", "!^secret"}
			c.Spec.Template.LabelFilters = []string{"b/*"}
			c.Spec.AnnotationFilters = []string{"!x"}
		}, append([]string{
			`{"op":"add","path":"/metadata/labels","value":{"open":"1"}}`, `{"op":"add","path":"/metadata/annotations","value":{}}`,
			`{"op":"add","path":"/spec/template/metadata/labels","value":{"b/c":"2"}}`,
		}, own...)},
	} {
		clone, _ := things(c.change)[0].(*v1beta1.VirtualMachineClone)
		s := spec()
		got, err := patches(clone, map[string]string{"open": "1", "secret-x": "2"}, map[string]string{"n": "1"}, &s)
		if d := diff.Of(c.want, got); d != "" || err != nil {
			t.Errorf("%s: %v: %s", name, err, d)
		}
	}
}
