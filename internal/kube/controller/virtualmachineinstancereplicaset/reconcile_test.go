package virtualmachineinstancereplicaset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// world is an API server with a set, and a reconciler.
type world struct {
	*Reconciler
	api     client.WithWatch
	events  *events.FakeRecorder
	now     time.Time
	created []string // in their order
	// before and after are called around each write of an instance or a status; after decides what the writer hears.
	before func(verb string) error
	after  func(verb string) error
}

func newWorld(t *testing.T, objects ...client.Object) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := kubevirt.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	w := &world{events: events.NewFakeRecorder(100), now: epoch, before: func(string) error { return nil }, after: func(string) error { return nil }}
	around := func(verb string, write func() error) error {
		if err := w.before(verb); err != nil {
			return err
		}
		if err := write(); err != nil {
			return err
		}
		return w.after(verb)
	}
	// The default tracker notes who manages which field, and cannot do so with all types of KubeVirt.
	tracker := clienttesting.NewObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder())
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjectTracker(tracker).WithObjects(objects...).WithStatusSubresource(&v1.VirtualMachineInstanceReplicaSet{}).Build()
	w.api = interceptor.NewClient(api, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			return around("create", func() error {
				o.SetUID(types.UID(fmt.Sprintf("uid-%d", len(w.created))))
				err := c.Create(ctx, o, opts...)
				if err == nil {
					w.created = append(w.created, o.GetName())
				}
				return err
			})
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return around("delete", func() error { return c.Delete(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return around("patch", func() error { return c.Patch(ctx, o, p, opts...) })
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			return around("status", func() error { return c.SubResource(sub).Update(ctx, o, opts...) })
		},
	})
	w.Reconciler = &Reconciler{Client: w.api, Live: w.api, Events: w.events, Now: func() time.Time { return w.now }}
	return w
}

var request = reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "web"}}

func (w *world) step(t *testing.T) reconcile.Result {
	t.Helper()
	result, err := w.Reconcile(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// names are those of the instances that are not deleted, * marks those of the set.
func (w *world) names(t *testing.T) string {
	t.Helper()
	all := &v1.VirtualMachineInstanceList{}
	if err := w.api.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, vmi := range all.Items {
		if vmi.DeletionTimestamp == nil {
			name := vmi.Name
			if metav1.IsControlledBy(&vmi, webSet(0)) {
				name += "*"
			}
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

func (w *world) set(t *testing.T) *v1.VirtualMachineInstanceReplicaSet {
	t.Helper()
	set := &v1.VirtualMachineInstanceReplicaSet{}
	if err := w.api.Get(t.Context(), request.NamespacedName, set); err != nil {
		t.Fatal(err)
	}
	return set
}

// gone lets go of the instances that are deleted, as their controller does.
func (w *world) gone(t *testing.T) {
	t.Helper()
	all := &v1.VirtualMachineInstanceList{}
	if err := w.api.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	for _, vmi := range all.Items {
		if vmi.DeletionTimestamp != nil {
			vmi.Finalizers = nil
			if err := w.api.Update(t.Context(), &vmi); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func (w *world) scale(t *testing.T, n int32) {
	t.Helper()
	set := w.set(t)
	set.Spec.Replicas = &n
	if err := w.api.Update(t.Context(), set); err != nil {
		t.Fatal(err)
	}
}

func (w *world) said() string {
	var all []string
	for len(w.events.Events) > 0 {
		all = append(all, <-w.events.Events)
	}
	return strings.Join(all, "\n")
}

func TestReconcile(t *testing.T) {
	w := newWorld(t, webSet(2), instance("stray", "Running@0 ready free"), instance("off", "Running@0 db"))
	w.step(t)
	if got, want := w.names(t), "off stray* "+name(webSet(0), 0)+"*"; got != want {
		t.Fatalf("instances: %s, want %s", got, want)
	}
	first := &v1.VirtualMachineInstance{}
	if err := w.api.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: name(webSet(0), 0)}, first); err != nil {
		t.Fatal(err)
	}
	if first.Labels["app"] != "web" || first.Status.Phase != v1.Pending || !slices.Contains(first.Finalizers, v1.VirtualMachineInstanceFinalizer) {
		t.Errorf("the instance: %+v", first)
	}
	if s := w.set(t).Status; s.Replicas != 2 || s.ReadyReplicas != 1 || s.LabelSelector != "app=web" {
		t.Errorf("the status: %+v", s)
	}
	if got := w.said(); got != "Normal SuccessfulCreate created the instance "+first.Name {
		t.Errorf("Events: %s", got)
	}

	w.before = func(verb string) error { t.Errorf("nothing is to be done, but %s", verb); return nil }
	w.step(t)
	w.before = func(string) error { return nil }

	w.scale(t, 1) // the one that is not ready goes
	w.step(t)
	if got := w.names(t) + ": " + w.said(); got != "off stray*: Normal SuccessfulDelete deleted the instance "+first.Name {
		t.Errorf("after scaling down: %s", got)
	}
	w.scale(t, 2) // the next one takes the place when that is free
	w.step(t)
	if got := w.names(t); got != "off stray*" {
		t.Errorf("an instance that is shut down is replaced already: %s", got)
	}
	w.gone(t)
	w.step(t)
	if got, want := w.names(t), "off stray* "+first.Name+"*"; got != want {
		t.Errorf("instances: %s, want %s", got, want)
	}
}

// The names of the set are in use by instances that are not the set's, or no longer.
func TestNamesInUse(t *testing.T) {
	n := func(i int) string { return name(webSet(0), i) }
	w := newWorld(t, webSet(2), instance(n(0), "Running@0 theirs"), instance(n(1), "Running@0 db"))
	w.step(t)
	if got, want := w.names(t), fmt.Sprintf("%s %s %s* %s*", n(0), n(1), n(2), n(3)); got != want {
		t.Errorf("instances: %s, want %s", got, want)
	}
	long := webSet(0)
	long.Name = strings.Repeat("a", 199) + "." + strings.Repeat("b", 53)
	if got := name(long, 1000); len(got) > 253 || strings.Contains(got, ".-") {
		t.Errorf("the name %s", got)
	}
	later := webSet(0)
	later.UID = "later"
	if name(later, 0) == n(0) {
		t.Error("a later set of the name has the same names")
	}
}

// stale is a cache that has heard of nothing since.
type stale struct {
	client.Client
	old client.Reader
}

func (s stale) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return s.old.Get(ctx, key, o, opts...)
}

func (s stale) List(ctx context.Context, l client.ObjectList, opts ...client.ListOption) error {
	return s.old.List(ctx, l, opts...)
}

// What the cache has not heard of decides nothing.
func TestStaleCache(t *testing.T) {
	old := newWorld(t, webSet(2))
	w := newWorld(t, webSet(2))
	w.step(t)
	before := w.names(t)
	w.Client = stale{w.api, old.api}
	w.step(t)
	if got := w.names(t); got != before || len(w.created) != 2 {
		t.Errorf("a manager that has not heard of its instances: %s", got)
	}

	// Another set has the name now, or it wants something else.
	for what, now := range map[string]func(*v1.VirtualMachineInstanceReplicaSet){
		"another set": func(s *v1.VirtualMachineInstanceReplicaSet) { s.UID = "other" },
		"scaled down": func(s *v1.VirtualMachineInstanceReplicaSet) { s.Spec.Replicas = new(int32) },
		"paused":      func(s *v1.VirtualMachineInstanceReplicaSet) { s.Spec.Paused = true },
		"is deleted": func(s *v1.VirtualMachineInstanceReplicaSet) {
			s.DeletionTimestamp = &metav1.Time{Time: epoch}
			s.Finalizers = []string{"a/b"}
		},
		"other selector": func(s *v1.VirtualMachineInstanceReplicaSet) { s.Spec.Selector.MatchLabels["app"] = "db" },
	} {
		set := webSet(2)
		now(set)
		w := newWorld(t, set)
		w.Client = stale{w.api, newWorld(t, webSet(2), instance("orphan", "Running@0 free")).api}
		w.step(t)
		if len(w.created) > 0 {
			t.Errorf("%s: created %v", what, w.created)
		}
	}
	gone := newWorld(t)
	gone.Client = stale{gone.api, old.api}
	gone.step(t)
	if len(gone.created) > 0 {
		t.Errorf("a set that is gone: created %v", gone.created)
	}
}

// A manager that dies after each of its writes, before it hears of the result, makes no instance too many.
func TestKilledAfterEachWrite(t *testing.T) {
	w := newWorld(t, webSet(3), instance("stray", "Running@0 ready free"), instance("off", "Running@0 db"))
	killed := errors.New("killed")
	w.after = func(string) error { return killed }
	settle := func() {
		t.Helper()
		for range 20 {
			_, err := w.Reconcile(t.Context(), request)
			if err == nil {
				return
			}
			if !errors.Is(err, killed) {
				t.Fatal(err)
			}
		}
		t.Fatal("it does not come to an end")
	}
	settle()
	if got, want := w.names(t), fmt.Sprintf("off stray* %s* %s*", name(webSet(0), 0), name(webSet(0), 1)); got != want || len(w.created) != 2 {
		t.Errorf("instances: %s, want %s; created %v", got, want, w.created)
	}
	w.scale(t, 1)
	settle()
	if got := w.names(t); got != "off stray*" {
		t.Errorf("scaled down: %s", got)
	}
}

// Managers that do not know of each other act at the same time, one before each write of the other.
func TestTwoManagers(t *testing.T) {
	w := newWorld(t, webSet(3))
	busy := false
	w.before = func(string) error {
		if !busy {
			busy = true
			w.step(t)
			busy = false
		}
		return nil
	}
	for range 3 {
		if _, err := w.Reconcile(t.Context(), request); err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
	}
	if len(w.created) != 3 {
		t.Errorf("created %v", w.created)
	}
	w.scale(t, 2)
	for range 3 {
		if _, err := w.Reconcile(t.Context(), request); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := w.names(t), fmt.Sprintf("%s* %s*", name(webSet(0), 0), name(webSet(0), 1)); got != want {
		t.Errorf("scaled down: %s, want %s", got, want)
	}
}

// A quota refuses instances: the set says so, and tries again after a pause.
func TestQuota(t *testing.T) {
	w := newWorld(t, webSet(3))
	w.before = func(verb string) error {
		if verb == "create" && len(w.created) == 1 {
			return apierrors.NewForbidden(v1.Resource("virtualmachineinstances"), "x", errors.New("exceeded quota"))
		}
		return nil
	}
	if wait := w.step(t).RequeueAfter; wait != firstRetryPause {
		t.Errorf("tries again after %s", wait)
	}
	if said := w.said(); strings.Count(said, "Warning FailedCreate") != 1 || !strings.Contains(said, "exceeded quota") {
		t.Errorf("Events: %s", said)
	}
	s := w.set(t).Status
	if len(s.Conditions) != 1 || s.Conditions[0].Reason != ReasonCreateFailed || s.Replicas != 1 {
		t.Errorf("the status: %+v", s)
	}
	if wait := w.step(t).RequeueAfter; wait == 0 || w.said() != "" {
		t.Errorf("tries again at once")
	}
	w.before, w.now = func(string) error { return nil }, after(firstRetryPause)
	w.step(t)
	if s := w.set(t).Status; len(s.Conditions) != 0 || s.Replicas != 3 {
		t.Errorf("the status: %+v", s)
	}
}

// A set whose template Cocoon cannot run creates nothing, and says why once.
func TestRefusedTemplate(t *testing.T) {
	set := webSet(2)
	set.Spec.Template.Spec.Networks = []v1.Network{{Name: "a", NetworkSource: v1.NetworkSource{Multus: &v1.MultusNetwork{NetworkName: "b/"}}}}
	w := newWorld(t, set)
	w.step(t)
	if said := w.said(); len(w.created) > 0 || !strings.HasPrefix(said, "Warning FailedCreate") || !strings.Contains(said, "spec.template.spec.networks[0].multus") {
		t.Errorf("created %v, Events: %s", w.created, said)
	}
	w.step(t)
	if said := w.said(); said != "" {
		t.Errorf("says it again: %s", said)
	}
}

func TestWhoMayAdopt(t *testing.T) {
	db := webSet(1)
	db.Name, db.Spec.Selector.MatchLabels = "db", map[string]string{"app": "db"}
	w := newWorld(t, webSet(1), db)
	for text, want := range map[string]string{"Running@0 free": "[ns/web]", "Running@0 free db": "[ns/db]", "Running@0": "[]"} {
		if got := fmt.Sprint(w.wanting(t.Context(), instance("a", text))); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
