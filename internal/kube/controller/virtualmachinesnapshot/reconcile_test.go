package virtualmachinesnapshot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	volumesnapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/snapshot/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// world is an API server with a machine and a snapshot of it, and a reconciler.
type world struct {
	*Reconciler
	api    client.WithWatch
	events *events.FakeRecorder
	now    time.Time
	writes int
	killAt int // the write after which the reconciler hears nothing more; 0: none; below 0: each

	frozen  bool
	asked   []string // of the guest
	refuses error    // a freeze
}

// Freeze implements Guests.
func (w *world) Freeze(_ context.Context, pod types.NamespacedName, most time.Duration) error {
	w.asked = append(w.asked, fmt.Sprintf("freeze %s %s", pod, most))
	if w.refuses == nil {
		w.frozen = true
	}
	return w.refuses
}

// Thaw implements Guests.
func (w *world) Thaw(_ context.Context, pod types.NamespacedName) (bool, error) {
	w.asked = append(w.asked, "thaw "+pod.String())
	was := w.frozen
	w.frozen = false
	return was, nil
}

func indications(s v1beta1.VirtualMachineSnapshotStatus) string {
	var all []string
	for _, i := range s.SourceIndications {
		all = append(all, string(i.Indication))
	}
	return strings.Join(all, " ")
}

var errKilled = errors.New("killed")

func newWorld(t *testing.T, objects ...client.Object) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), kubevirt.AddToScheme(scheme), volumesnapshotv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	w := &world{events: events.NewFakeRecorder(100), now: epoch}
	write := func(err error) error {
		if w.writes++; err == nil && (w.writes == w.killAt || w.killAt < 0) {
			return errKilled
		}
		return err
	}
	// The default tracker notes who manages which field, and cannot do so with all types of KubeVirt.
	tracker := clienttesting.NewObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder())
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjectTracker(tracker).WithObjects(objects...).
		WithStatusSubresource(&v1.VirtualMachine{}, &v1beta1.VirtualMachineSnapshot{}, &v1beta1.VirtualMachineSnapshotContent{}, &volumesnapshotv1.VolumeSnapshot{}).Build()
	w.api = interceptor.NewClient(api, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			o.SetUID(types.UID("uid-" + o.GetName()))
			return write(c.Create(ctx, o, opts...))
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return write(c.Delete(ctx, o, opts...))
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return write(c.Patch(ctx, o, p, opts...))
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			return write(c.SubResource(sub).Update(ctx, o, opts...))
		},
	})
	w.Reconciler = &Reconciler{Client: w.api, Live: w.api, Events: w.events, Guests: w, Now: func() time.Time { return w.now }}
	return w
}

var request = reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "before"}}

// things are a machine with two claims and a disk of an image, all that it needs, and a snapshot of it.
func things(change ...func(*v1beta1.VirtualMachineSnapshot)) []client.Object {
	halted := v1.RunStrategyHalted
	vm := &v1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "ns", UID: "vm"}}
	vm.Spec.RunStrategy = &halted
	vm.Spec.Instancetype = &v1.InstancetypeMatcher{Name: "small"}
	vm.Status.InstancetypeRef = &v1.InstancetypeStatusRef{Name: "small", ControllerRevisionRef: &v1.ControllerRevisionRef{Name: "db-small"}}
	vm.Spec.Template = &v1.VirtualMachineInstanceTemplateSpec{}
	vm.Spec.Template.Spec.Volumes = []v1.Volume{
		{Name: "image", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "x"}}},
		onClaim("data", "db-data"), onClaim("log", "db-log"), onClaim("other", "of-nfs"), onClaim("common", "of-several"),
	}
	vm.Spec.Template.Spec.Domain.Devices.Disks = []v1.Disk{{Name: "data"}, {Name: "common", Shareable: ptr(true)}}
	snapshot := &v1beta1.VirtualMachineSnapshot{ObjectMeta: metav1.ObjectMeta{Name: "before", Namespace: "ns", UID: "s", CreationTimestamp: metav1.NewTime(epoch)}}
	snapshot.Spec.Source = corev1.TypedLocalObjectReference{APIGroup: ptr("kubevirt.io"), Kind: "VirtualMachine", Name: "db"}
	for _, f := range change {
		f(snapshot)
	}
	return []client.Object{
		vm, snapshot, claim("db-data", "local"), claim("db-log", "local"), claim("of-nfs", "nfs"), claim("of-several", "local"),
		&appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{Name: "db-small", Namespace: "ns"}, Data: runtime.RawExtension{Raw: []byte(`{"kind":"x"}`)}},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "local"}, Provisioner: "volume.cocoonstack.io"},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "nfs"}, Provisioner: "nfs"},
		&volumesnapshotv1.VolumeSnapshotClass{ObjectMeta: metav1.ObjectMeta{Name: "cocoon-local"}, Driver: "volume.cocoonstack.io"},
	}
}

func onClaim(name, of string) v1.Volume {
	return v1.Volume{Name: name, VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: of}}}}
}

func claim(name, class string) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns"}}
	c.Spec.StorageClassName, c.Status.Phase = &class, corev1.ClaimBound
	return c
}

func (w *world) get(t *testing.T, name string, into client.Object) bool {
	t.Helper()
	err := w.api.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: name}, into)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return err == nil
}

func (w *world) snapshot(t *testing.T) v1beta1.VirtualMachineSnapshotStatus {
	t.Helper()
	s := &v1beta1.VirtualMachineSnapshot{}
	if !w.get(t, "before", s) || s.Status == nil {
		return v1beta1.VirtualMachineSnapshotStatus{}
	}
	return *s.Status
}

// answer makes the cluster's snapshot-controller and the nodes take the VolumeSnapshots, or refuse.
func (w *world) answer(t *testing.T, why string) {
	t.Helper()
	for i := range w.volumeSnapshots(t) {
		v := &w.volumeSnapshots(t)[i]
		v.Status = &volumesnapshotv1.VolumeSnapshotStatus{CreationTime: ptr(metav1.NewTime(w.now)), ReadyToUse: ptr(true)}
		if why != "" {
			v.Status = &volumesnapshotv1.VolumeSnapshotStatus{ReadyToUse: ptr(false), Error: &volumesnapshotv1.VolumeSnapshotError{Message: &why}}
		}
		if err := w.api.Status().Update(t.Context(), v); err != nil && !errors.Is(err, errKilled) {
			t.Fatal(err)
		}
	}
}

func (w *world) volumeSnapshots(t *testing.T) []volumesnapshotv1.VolumeSnapshot {
	t.Helper()
	all := &volumesnapshotv1.VolumeSnapshotList{}
	if err := w.api.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	return all.Items
}

// locked returns the snapshot that the machine names.
func (w *world) locked(t *testing.T) string {
	t.Helper()
	vm := &v1.VirtualMachine{}
	if !w.get(t, "db", vm) || vm.Status.SnapshotInProgress == nil {
		return ""
	}
	return *vm.Status.SnapshotInProgress
}

// run reconciles until nothing is to be done at once, with managers that take the place of those that were killed.
func (w *world) run(t *testing.T) (last reconcile.Result) {
	t.Helper()
	for range 50 {
		before := w.writes
		result, err := w.Reconcile(t.Context(), request)
		if errors.Is(err, errKilled) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if last = result; w.writes == before && result.RequeueAfter != time.Millisecond {
			return last
		}
	}
	t.Fatal("it never rests")
	return last
}

// A snapshot of a machine that is stopped ends up the same wherever the manager is killed: one VolumeSnapshot for each claim that can be kept.
func TestKilledAfterEachWrite(t *testing.T) {
	for at := -1; ; at++ {
		w := newWorld(t, things()...)
		w.killAt = at
		w.run(t)
		if got := w.locked(t); got != "before" {
			t.Fatalf("killed after write %d: the machine names the snapshot %q", at, got)
		}
		w.answer(t, "")
		w.run(t)
		if at > w.writes {
			break // it was never killed
		}
		s := w.snapshot(t)
		got := fmt.Sprint(s.Phase, *s.ReadyToUse, s.Error == nil, s.CreationTime != nil, indications(s), *s.SnapshotVolumes, *s.SourceUID)
		if want := "Succeeded true true true PartialSnapshot {[data log] [image other common]} vm"; !strings.EqualFold(strings.ReplaceAll(got, " ", ""), strings.ReplaceAll(want, " ", "")) {
			t.Errorf("killed after write %d: %s", at, got)
		}
		if d := diff.Of("", w.locked(t)); d != "" {
			t.Errorf("killed after write %d: the machine is still locked: %s", at, d)
		}
		var names []string
		for _, v := range w.volumeSnapshots(t) {
			names = append(names, v.Name+" "+*v.Spec.Source.PersistentVolumeClaimName+" "+*v.Spec.VolumeSnapshotClassName)
		}
		slices.Sort(names)
		if d := diff.Of([]string{"vmsnapshot-s-volume-data db-data cocoon-local", "vmsnapshot-s-volume-log db-log cocoon-local"}, names); d != "" {
			t.Errorf("killed after write %d: %s", at, d)
		}
		content := &v1beta1.VirtualMachineSnapshotContent{}
		if !w.get(t, "vmsnapshot-content-s", content) || content.Status.CreationTime == nil || !*content.Status.ReadyToUse || len(content.Status.VolumeSnapshotStatus) != 2 {
			t.Errorf("killed after write %d: the content %+v", at, content.Status)
		}
		revision := &appsv1.ControllerRevision{}
		if name := content.Spec.Source.VirtualMachine.Spec.Instancetype.RevisionName; !w.get(t, name, revision) || !metav1.IsControlledBy(revision, content) {
			t.Errorf("killed after write %d: the copy of the instancetype, %s, is missing", at, name)
		}
	}
}

// A manager that is killed after each write comes to an end, too, and what it saw of the machine is not lost.
func TestAlwaysKilled(t *testing.T) {
	w := newWorld(t, append(things(), running(v1.VirtualMachineInstanceAgentConnected))...)
	w.killAt = -1
	w.run(t)
	w.answer(t, "")
	w.now = epoch.Add(time.Second)
	w.run(t)
	if s := w.snapshot(t); s.Phase != v1beta1.Succeeded || indications(s) != "Online GuestAgent PartialSnapshot" || w.locked(t) != "" || w.frozen {
		t.Errorf("%s: %s, locked by %q", s.Phase, indications(s), w.locked(t))
	}
}

// A node that refuses is quoted. Once it can, the snapshot is taken. At the deadline nothing is left of one that was not.
func TestRefusedByTheNode(t *testing.T) {
	w := newWorld(t, things()...)
	w.run(t)
	w.answer(t, "a VM writes to it")
	w.run(t)
	s := w.snapshot(t)
	if got := *s.Error.Message; s.Phase != v1beta1.InProgress || got != "VolumeSnapshot vmsnapshot-s-volume-data of claim db-data: a VM writes to it" {
		t.Errorf("%s: %s", s.Phase, got)
	}
	w.now = epoch.Add(5 * time.Minute)
	w.run(t)
	s = w.snapshot(t)
	if got := *s.Error.Message; s.Phase != v1beta1.Failed || !strings.Contains(got, "within 5m0s: VolumeSnapshot vmsnapshot-s-volume-data of claim db-data: a VM writes to it") {
		t.Errorf("%s: %s", s.Phase, got)
	}
	if w.locked(t) != "" || w.get(t, "vmsnapshot-content-s", &v1beta1.VirtualMachineSnapshotContent{}) {
		t.Error("something is left of the snapshot")
	}

	w = newWorld(t, things()...)
	w.run(t)
	w.answer(t, "a VM writes to it")
	w.run(t)
	w.answer(t, "")
	w.run(t)
	if s := w.snapshot(t); s.Phase != v1beta1.Succeeded || s.Error != nil {
		t.Errorf("%s: %+v", s.Phase, s.Error)
	}
}

// A machine whose snapshot is gone is unlocked.
func TestDeletedMeanwhile(t *testing.T) {
	w := newWorld(t, things()...)
	w.run(t)
	if err := w.api.Delete(t.Context(), &v1beta1.VirtualMachineSnapshot{ObjectMeta: metav1.ObjectMeta{Name: "before", Namespace: "ns"}}); err != nil {
		t.Fatal(err)
	}
	w.run(t)
	if got := w.locked(t); got != "" {
		t.Errorf("the machine names %s", got)
	}
}

// What hinders a snapshot is told in one sentence, and it waits.
func TestObstacles(t *testing.T) {
	for name, c := range map[string]struct {
		change func(t *testing.T, w *world)
		want   string
	}{
		"no machine": {func(t *testing.T, w *world) { w.remove(t, &v1.VirtualMachine{}, "db") }, "the VirtualMachine db does not exist"},
		"no claim":   {func(t *testing.T, w *world) { w.remove(t, &corev1.PersistentVolumeClaim{}, "db-log") }, "the claim db-log of volume log does not exist; create it"},
		"not bound": {func(t *testing.T, w *world) {
			c := claim("db-log", "local")
			w.get(t, "db-log", c)
			c.Status.Phase = corev1.ClaimPending
			if err := w.api.Status().Update(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}, "the claim db-log of volume log is not bound; start the machine once"},
		"another one": {func(t *testing.T, w *world) {
			w.status(t, func(s *v1.VirtualMachineStatus) { s.SnapshotInProgress = ptr("first") })
		}, "the snapshot first of VirtualMachine db is in progress"},
		"restored": {func(t *testing.T, w *world) {
			w.status(t, func(s *v1.VirtualMachineStatus) { s.RestoreInProgress = ptr("back") })
		}, "the VirtualMachine db is being restored by VirtualMachineRestore back"},
		"taken name": {func(t *testing.T, w *world) {
			if err := w.api.Create(t.Context(), &volumesnapshotv1.VolumeSnapshot{ObjectMeta: metav1.ObjectMeta{Name: "vmsnapshot-s-volume-log", Namespace: "ns"}}); err != nil {
				t.Fatal(err)
			}
		}, "the VolumeSnapshot vmsnapshot-s-volume-log exists and is not of this snapshot; delete it"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, things()...)
			c.change(t, w)
			result := w.run(t)
			s := w.snapshot(t)
			if s.Error == nil || *s.Error.Message != c.want || s.Phase != v1beta1.InProgress || result.RequeueAfter == 0 {
				t.Errorf("%+v, looked at again after %s", s, result.RequeueAfter)
			}
			if n := len(w.events.Events); n == 0 {
				t.Error("there is no Event")
			}
		})
	}
}

func (w *world) remove(t *testing.T, o client.Object, name string) {
	t.Helper()
	o.SetNamespace("ns")
	o.SetName(name)
	if err := w.api.Delete(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func (w *world) status(t *testing.T, change func(*v1.VirtualMachineStatus)) {
	t.Helper()
	vm := &v1.VirtualMachine{}
	w.get(t, "db", vm)
	change(&vm.Status)
	if err := w.api.Status().Update(t.Context(), vm); err != nil {
		t.Fatal(err)
	}
}

// A content that is to be retained no longer goes with its snapshot once that has succeeded, and not before.
func TestRetain(t *testing.T) {
	w := newWorld(t, things(func(s *v1beta1.VirtualMachineSnapshot) {
		s.Spec.DeletionPolicy = ptr(v1beta1.VirtualMachineSnapshotContentRetain)
	})...)
	content := &v1beta1.VirtualMachineSnapshotContent{}
	w.run(t)
	if w.get(t, "vmsnapshot-content-s", content); len(content.OwnerReferences) != 1 {
		t.Errorf("before: %v", content.OwnerReferences)
	}
	w.answer(t, "")
	w.run(t)
	if w.get(t, "vmsnapshot-content-s", content); len(content.OwnerReferences) != 0 || w.snapshot(t).Phase != v1beta1.Succeeded {
		t.Errorf("after: %v", content.OwnerReferences)
	}
}

// running is the machine's instance, with the conditions.
func running(conditions ...v1.VirtualMachineInstanceConditionType) *v1.VirtualMachineInstance {
	vmi := &v1.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "ns", UID: "i", OwnerReferences: []metav1.OwnerReference{{Kind: "VirtualMachine", Name: "db", UID: "vm", Controller: ptr(true)}}}}
	vmi.Status.Phase = v1.Running
	for _, c := range conditions {
		vmi.Status.Conditions = append(vmi.Status.Conditions, v1.VirtualMachineInstanceCondition{Type: c, Status: corev1.ConditionTrue})
	}
	return vmi
}

// A guest that runs is frozen once for all its disks, and thawed in every outcome.
func TestOnline(t *testing.T) {
	pod := "ns/" + kubevirt.PodName(running())
	for name, c := range map[string]struct {
		conditions  []v1.VirtualMachineInstanceConditionType
		meanwhile   func(t *testing.T, w *world) // after the VolumeSnapshots were asked for
		asked       string
		indications string
	}{
		"agent":    {[]v1.VirtualMachineInstanceConditionType{v1.VirtualMachineInstanceAgentConnected}, func(*testing.T, *world) {}, "freeze " + pod + " 1m0s, thaw " + pod, "Online GuestAgent PartialSnapshot"},
		"no agent": {nil, func(*testing.T, *world) {}, "", "Online NoGuestAgent PartialSnapshot"},
		"paused":   {[]v1.VirtualMachineInstanceConditionType{v1.VirtualMachineInstanceAgentConnected, v1.VirtualMachineInstancePaused}, func(*testing.T, *world) {}, "", "Online Paused PartialSnapshot"},
		"too late": {[]v1.VirtualMachineInstanceConditionType{v1.VirtualMachineInstanceAgentConnected}, func(_ *testing.T, w *world) { w.frozen = false }, "freeze " + pod + " 1m0s, thaw " + pod, "Online GuestAgent QuiesceTimeout PartialSnapshot"},
		"refused first": {[]v1.VirtualMachineInstanceConditionType{v1.VirtualMachineInstanceAgentConnected}, func(t *testing.T, w *world) {
			w.answer(t, "a VM writes to it")
			w.run(t)
			if w.frozen {
				t.Error("the guest stays frozen")
			}
		}, "freeze " + pod + " 1m0s, thaw " + pod + ", thaw " + pod, "Online GuestAgent QuiesceTimeout PartialSnapshot"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, append(things(), running(c.conditions...))...)
			w.run(t)
			c.meanwhile(t, w)
			w.answer(t, "")
			w.run(t)
			s := w.snapshot(t)
			got := slices.Compact(strings.Split(strings.Join(w.asked, ", "), ", "))
			if d := diff.Of(c.indications, indications(s)); d != "" || s.Phase != v1beta1.Succeeded {
				t.Errorf("%s: %s", s.Phase, d)
			}
			if want := strings.Split(c.asked, ", "); got[0] != want[0] || len(got) < len(slices.Compact(want)) || w.frozen || strings.Count(strings.Join(w.asked, ","), "freeze") > 1 {
				t.Errorf("asked %q, want %q", w.asked, want)
			}
		})
	}
}

// A guest that cannot be frozen has no snapshot of several disks, and the reason is told. One that is deleted while its guest is frozen thaws it.
func TestFreezeFails(t *testing.T) {
	w := newWorld(t, append(things(), running(v1.VirtualMachineInstanceAgentConnected))...)
	w.refuses = errors.New("it is busy")
	if result := w.run(t); result.RequeueAfter != freezePause {
		t.Errorf("again after %s", result.RequeueAfter)
	}
	if s := w.snapshot(t); s.Error == nil || !strings.HasSuffix(*s.Error.Message, "stop the machine first: it is busy") || len(w.volumeSnapshots(t)) > 0 {
		t.Errorf("%+v", s)
	}
	w.refuses = nil
	w.run(t)
	if s := w.snapshot(t); s.Error != nil || !w.frozen {
		t.Errorf("%+v", s)
	}
	w.remove(t, &v1beta1.VirtualMachineSnapshot{}, "before")
	w.run(t)
	if w.frozen || w.locked(t) != "" {
		t.Error("the guest stays frozen, or the machine locked")
	}
}
