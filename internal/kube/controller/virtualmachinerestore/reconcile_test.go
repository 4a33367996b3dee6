package virtualmachinerestore

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
	"k8s.io/apimachinery/pkg/api/resource"
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

// world is an API server with a machine, a snapshot of it and a restore, and a reconciler.
type world struct {
	*Reconciler
	api    client.WithWatch
	events *events.FakeRecorder
	now    time.Time
	writes int
	killAt int // the write after which the reconciler hears nothing more; 0: none; below 0: each
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
		WithStatusSubresource(&v1.VirtualMachine{}, &v1beta1.VirtualMachineRestore{}).Build()
	w.api = interceptor.NewClient(api, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			o.SetUID(types.UID("uid-" + o.GetName()))
			return write(c.Create(ctx, o, opts...))
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return write(c.Patch(ctx, o, p, opts...))
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			return write(c.SubResource(sub).Update(ctx, o, opts...))
		},
	})
	w.Reconciler = &Reconciler{Client: w.api, Live: w.api, Events: w.events, Now: func() time.Time { return w.now }}
	return w
}

var request = reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "back"}}

func ptr[T any](v T) *T { return &v }

// vm is the machine with the claim of its volume.
func vm(claim string) *v1.VirtualMachine {
	m := &v1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "ns", UID: "vm", Labels: map[string]string{"now": "this"}}}
	m.Spec.RunStrategy = ptr(v1.RunStrategyManual)
	m.Spec.Instancetype = &v1.InstancetypeMatcher{Name: "small"}
	m.Spec.Template = &v1.VirtualMachineInstanceTemplateSpec{}
	m.Spec.Template.Spec.Hostname = "of-" + claim
	m.Spec.Template.Spec.Volumes = []v1.Volume{
		{Name: "image", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "x"}}},
		{Name: "data", VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}},
		{Name: "log", VolumeSource: v1.VolumeSource{DataVolume: &v1.DataVolumeSource{Name: "log"}}},
	}
	return m
}

// things are a machine that has changed since its snapshot, and a restore of it to that.
func things(change ...func(*v1beta1.VirtualMachineRestore)) []client.Object {
	was := vm("then")
	was.Spec.Instancetype.RevisionName = "kept-small"
	was.Labels = map[string]string{"then": "that"}
	snapshot := &v1beta1.VirtualMachineSnapshot{ObjectMeta: metav1.ObjectMeta{Name: "before", Namespace: "ns", UID: "s"}}
	snapshot.Status = &v1beta1.VirtualMachineSnapshotStatus{ReadyToUse: ptr(true), SourceUID: ptr(types.UID("vm")), VirtualMachineSnapshotContentName: ptr("content")}
	content := &v1beta1.VirtualMachineSnapshotContent{ObjectMeta: metav1.ObjectMeta{Name: "content", Namespace: "ns", UID: "c"}}
	content.Spec.Source.VirtualMachine = &v1beta1.VirtualMachine{ObjectMeta: was.ObjectMeta, Spec: was.Spec}
	for _, name := range []string{"data", "log"} {
		b := v1beta1.VolumeBackup{VolumeName: name, VolumeSnapshotName: ptr("vs-" + name)}
		b.PersistentVolumeClaim.Name = "then-" + name
		b.PersistentVolumeClaim.Annotations = map[string]string{"pv.kubernetes.io/bind-completed": "yes", "mine": "stays"}
		b.PersistentVolumeClaim.Spec = corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr("local"), VolumeName: "pv", AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		}
		content.Spec.VolumeBackups = append(content.Spec.VolumeBackups, b)
	}
	later, size := storagev1.VolumeBindingWaitForFirstConsumer, resource.MustParse("2Gi")
	restore := &v1beta1.VirtualMachineRestore{ObjectMeta: metav1.ObjectMeta{Name: "back", Namespace: "ns", UID: "r", CreationTimestamp: metav1.NewTime(epoch)}}
	restore.Spec.Target = corev1.TypedLocalObjectReference{APIGroup: ptr("kubevirt.io"), Kind: "VirtualMachine", Name: "db"}
	restore.Spec.VirtualMachineSnapshotName = "before"
	for _, f := range change {
		f(restore)
	}
	return []client.Object{
		vm("now"), snapshot, content, restore,
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "local"}, VolumeBindingMode: &later},
		&volumesnapshotv1.VolumeSnapshot{ObjectMeta: metav1.ObjectMeta{Name: "vs-data", Namespace: "ns"}, Status: &volumesnapshotv1.VolumeSnapshotStatus{RestoreSize: &size}},
		&volumesnapshotv1.VolumeSnapshot{ObjectMeta: metav1.ObjectMeta{Name: "vs-log", Namespace: "ns"}},
		&appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{Name: "kept-small", Namespace: "ns"}, Data: runtime.RawExtension{Raw: []byte(`{"kind":"x"}`)}},
	}
}

// another makes the target another machine.
func another(r *v1beta1.VirtualMachineRestore) { r.Spec.Target.Name = "copy" }

func (w *world) get(t *testing.T, name string, into client.Object) bool {
	t.Helper()
	err := w.api.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: name}, into)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return err == nil
}

func (w *world) restore(t *testing.T) *v1beta1.VirtualMachineRestoreStatus {
	t.Helper()
	r := &v1beta1.VirtualMachineRestore{}
	w.get(t, "back", r)
	return r.Status
}

func (w *world) target(t *testing.T, name string) *v1.VirtualMachine {
	t.Helper()
	m := &v1.VirtualMachine{}
	w.get(t, name, m)
	return m
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

// claims are the claims of the namespace with their source, size and owner.
func (w *world) claims(t *testing.T) (all []string) {
	t.Helper()
	list := &corev1.PersistentVolumeClaimList{}
	if err := w.api.List(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	for _, c := range list.Items {
		owner := ""
		if o := metav1.GetControllerOf(&c); o != nil {
			owner = " of " + string(o.UID)
		}
		all = append(all, fmt.Sprintf("%s from %s %s%s %s", c.Name, c.Spec.DataSource.Name, c.Spec.Resources.Requests.Storage(), owner, c.Annotations["mine"]+c.Annotations["pv.kubernetes.io/bind-completed"]))
	}
	slices.Sort(all)
	return all
}

func volumesOf(m *v1.VirtualMachine) (all []string) {
	for i := range m.Spec.Template.Spec.Volumes {
		v := &m.Spec.Template.Spec.Volumes[i]
		all = append(all, v.Name+" "+kubevirt.ClaimOf(v))
	}
	return all
}

// A machine ends up the same wherever the manager is killed: with one new claim for each volume of the snapshot, and the spec of then. In between it has
// either its old spec or the new one.
func TestKilledAfterEachWrite(t *testing.T) {
	for at := -1; ; at++ {
		w := newWorld(t, things()...)
		w.killAt = at
		w.run(t)
		if at > w.writes {
			break // it was never killed
		}
		s, m := w.restore(t), w.target(t, "db")
		if s.Complete == nil || !*s.Complete || s.RestoreTime == nil || len(s.Restores) != 2 || m.Status.RestoreInProgress != nil {
			t.Fatalf("killed after write %d: %+v, the machine names %v", at, s, m.Status.RestoreInProgress)
		}
		if d := diff.Of([]string{"image ", "data restore-r-data", "log restore-r-log"}, volumesOf(m)); d != "" {
			t.Errorf("killed after write %d: %s", at, d)
		}
		if m.Spec.Template.Spec.Hostname != "of-then" || *m.Spec.RunStrategy != v1.RunStrategyManual || m.Labels["now"] != "this" {
			t.Errorf("killed after write %d: %+v", at, m)
		}
		if d := diff.Of([]string{"restore-r-data from vs-data 2Gi of vm stays", "restore-r-log from vs-log 1Gi of vm stays"}, w.claims(t)); d != "" {
			t.Errorf("killed after write %d: %s", at, d)
		}
		if name := m.Spec.Instancetype.RevisionName; !w.get(t, name, &appsv1.ControllerRevision{}) || name == "kept-small" {
			t.Errorf("killed after write %d: the machine has no copy of its instancetype: %q", at, name)
		}
	}
}

// The same for another machine, which is made of the snapshot and stopped.
func TestAnotherMachine(t *testing.T) {
	for at := -1; ; at++ {
		w := newWorld(t, things(another, func(r *v1beta1.VirtualMachineRestore) {
			r.Spec.VolumeRestorePolicy = ptr(v1beta1.VolumeRestorePolicyPrefixTargetName)
			r.Spec.VolumeOwnershipPolicy = ptr(v1beta1.VolumeOwnershipPolicyNone)
			r.Spec.VolumeRestoreOverrides = []v1beta1.VolumeRestoreOverride{{VolumeName: "log", RestoreName: "new-log", Annotations: map[string]string{"mine": "changes"}}}
			r.Spec.Patches = []string{`{"op": "replace", "path": "/spec/template/spec/hostname", "value": "a:b,c"}`, `{"op": "add", "path": "/metadata/labels/a", "value": "b"}`}
		})...)
		w.killAt = at
		w.run(t)
		if at > w.writes {
			break
		}
		s, m := w.restore(t), w.target(t, "copy")
		if s.Complete == nil || !*s.Complete || m.Status.RestoreInProgress != nil {
			t.Fatalf("killed after write %d: %+v, the machine names %v", at, s, m.Status.RestoreInProgress)
		}
		if d := diff.Of([]string{"image ", "data copy-data", "log new-log"}, volumesOf(m)); d != "" {
			t.Errorf("killed after write %d: %s", at, d)
		}
		if m.Spec.Template.Spec.Hostname != "a:b,c" || *m.Spec.RunStrategy != v1.RunStrategyHalted || m.Labels["then"] != "that" || m.Labels["a"] != "b" {
			t.Errorf("killed after write %d: %+v", at, m)
		}
		if d := diff.Of([]string{"copy-data from vs-data 2Gi stays", "new-log from vs-log 1Gi changes"}, w.claims(t)); d != "" {
			t.Errorf("killed after write %d: %s", at, d)
		}
		if !w.get(t, m.Spec.Instancetype.RevisionName, &appsv1.ControllerRevision{}) {
			t.Errorf("killed after write %d: no copy %s", at, m.Spec.Instancetype.RevisionName)
		}
		if was := w.target(t, "db"); was.Spec.Template.Spec.Hostname != "of-now" {
			t.Errorf("killed after write %d: the source has changed", at)
		}
	}
}

// A target that runs is stopped, waited for, or a reason to fail, as the policy says.
func TestTargetRuns(t *testing.T) {
	for policy, c := range map[v1beta1.TargetReadinessPolicy]struct {
		at   time.Duration
		want string // the reason
		over bool
	}{
		"":                {0, "the VirtualMachine db runs; stop it within 5m0s after the restore was created", false},
		"WaitGracePeriod": {5 * time.Minute, "the VirtualMachine db was not stopped within 5m0s; stop it, and create another restore", true},
		"WaitEventually":  {time.Hour, "the VirtualMachine db runs; stop it", false},
		"FailImmediate":   {0, "the VirtualMachine db runs; stop it, and create another restore", true},
		"StopTarget":      {time.Hour, "the VirtualMachine db is being stopped", false},
	} {
		t.Run(string(policy), func(t *testing.T) {
			vmi := &v1.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "ns", UID: "i", OwnerReferences: []metav1.OwnerReference{{Kind: "VirtualMachine", Name: "db", UID: "vm", Controller: ptr(true)}}}}
			w := newWorld(t, append(things(func(r *v1beta1.VirtualMachineRestore) {
				if policy != "" {
					r.Spec.TargetReadinessPolicy = &policy
				}
			}), vmi)...)
			w.now = epoch.Add(c.at)
			result := w.run(t)
			s := w.restore(t)
			if got := reason(s, v1beta1.ConditionProgressing); got != c.want || over(s) != c.over || c.over != (result.RequeueAfter == 0) {
				t.Errorf("%q, over: %v, again after %s", got, over(s), result.RequeueAfter)
			}
			strategy := *w.target(t, "db").Spec.RunStrategy
			if stopped := strategy == v1.RunStrategyHalted; stopped != (policy == v1beta1.VirtualMachineRestoreStopTarget) || len(w.claims(t)) > 0 {
				t.Errorf("strategy %s, claims %v", strategy, w.claims(t))
			}
			if c.over {
				return
			}
			if err := w.api.Delete(t.Context(), vmi); err != nil {
				t.Fatal(err)
			}
			w.run(t)
			if s := w.restore(t); !*s.Complete {
				t.Errorf("%+v", s)
			}
		})
	}
}

// What a restore cannot be done for is told in one sentence, and nothing is made or changed.
func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		restore func(*v1beta1.VirtualMachineRestore)
		change  func(t *testing.T, w *world)
		want    string
		over    bool
	}{
		"no snapshot": {func(r *v1beta1.VirtualMachineRestore) { r.Spec.VirtualMachineSnapshotName = "none" }, nil, "the VirtualMachineSnapshot none does not exist", false},
		"another machine": {func(r *v1beta1.VirtualMachineRestore) { r.Spec.Target.Name = "other" }, func(t *testing.T, w *world) {
			other := vm("now")
			other.Name, other.UID = "other", ""
			if err := w.api.Create(t.Context(), other); err != nil {
				t.Fatal(err)
			}
		}, "the VirtualMachine other exists and is not the one of which the snapshot before was taken; restore to another name, or delete it", true},
		"taken claim": {nil, func(t *testing.T, w *world) {
			if err := w.api.Create(t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "restore-r-log", Namespace: "ns"}, Spec: corev1.PersistentVolumeClaimSpec{DataSource: &corev1.TypedLocalObjectReference{}}}); err != nil {
				t.Fatal(err)
			}
		}, "the claim restore-r-log exists and is not of this restore; delete it, or give another name in spec.volumeRestoreOverrides", true},
		"no such volume": {func(r *v1beta1.VirtualMachineRestore) {
			r.Spec.VolumeRestoreOverrides = []v1beta1.VolumeRestoreOverride{{VolumeName: "x", RestoreName: "y"}}
		}, nil, `spec.volumeRestoreOverrides[0].volumeName: the snapshot has no volume "x"`, true},
		"one claim": {func(r *v1beta1.VirtualMachineRestore) {
			r.Spec.VolumeRestoreOverrides = []v1beta1.VolumeRestoreOverride{{VolumeName: "data", RestoreName: "y"}, {VolumeName: "log", RestoreName: "y"}}
		}, nil, "two volumes would have the claim y; change spec.volumeRestoreOverrides", true},
		"patch of the name": {func(r *v1beta1.VirtualMachineRestore) {
			another(r)
			r.Spec.Patches = []string{`{"op": "replace", "path": "/metadata/name", "value": "x"}`}
		}, nil, "create VirtualMachine copy: spec.patches[0] must have a path below /spec/, /metadata/labels or /metadata/annotations", true},
		"no patch": {func(r *v1beta1.VirtualMachineRestore) { another(r); r.Spec.Patches = []string{`x`} }, nil, "create VirtualMachine copy: spec.patches[0] is no operation of a JSON patch", true},
		"snapshot in progress": {nil, func(t *testing.T, w *world) {
			m := w.target(t, "db")
			m.Status.SnapshotInProgress = ptr("next")
			if err := w.api.Status().Update(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}, "the snapshot next of VirtualMachine db is in progress", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, things(func(r *v1beta1.VirtualMachineRestore) {
				if c.restore != nil {
					c.restore(r)
				}
			})...)
			if c.change != nil {
				c.change(t, w)
			}
			before := len(w.claims(t))
			w.run(t)
			s := w.restore(t)
			if got := reason(s, v1beta1.ConditionReady); !strings.HasPrefix(got, c.want) || over(s) != c.over {
				t.Errorf("%q, over: %v", got, over(s))
			}
			if m := w.target(t, "db"); m.Spec.Template.Spec.Hostname != "of-now" || m.Status.RestoreInProgress != nil || len(w.claims(t)) != before || w.get(t, "copy", &v1.VirtualMachine{}) {
				t.Error("something has changed")
			}
			if len(w.events.Events) == 0 {
				t.Error("there is no Event")
			}
		})
	}
}

// A machine whose restore is gone can be started again.
func TestDeletedMeanwhile(t *testing.T) {
	w := newWorld(t, things()...)
	m := w.target(t, "db")
	m.Status.RestoreInProgress = ptr("back")
	if err := errors.Join(w.api.Status().Update(t.Context(), m), w.api.Delete(t.Context(), &v1beta1.VirtualMachineRestore{ObjectMeta: metav1.ObjectMeta{Name: "back", Namespace: "ns"}})); err != nil {
		t.Fatal(err)
	}
	w.run(t)
	if got := w.target(t, "db").Status.RestoreInProgress; got != nil {
		t.Errorf("the machine names %s", *got)
	}
}
