package virtualmachinepool

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
	poolv1 "kubevirt.io/api/pool/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// world is an API server with a pool, and a reconciler.
type world struct {
	*Reconciler
	api     client.WithWatch
	events  *events.FakeRecorder
	now     time.Time
	created []string // in their order
	// before and after are called around each write of a machine or a status; after decides what the writer hears.
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
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjectTracker(tracker).WithObjects(objects...).WithStatusSubresource(&poolv1.VirtualMachinePool{}, &v1.VirtualMachine{}).Build()
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

// names are those of the machines that are not deleted, * marks those of the pool.
func (w *world) names(t *testing.T) string {
	t.Helper()
	all := &v1.VirtualMachineList{}
	if err := w.api.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, vm := range all.Items {
		if vm.DeletionTimestamp == nil {
			name := vm.Name
			if metav1.IsControlledBy(&vm, webPool(0)) {
				name += "*"
			}
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

func (w *world) pool(t *testing.T) *poolv1.VirtualMachinePool {
	t.Helper()
	pool := &poolv1.VirtualMachinePool{}
	if err := w.api.Get(t.Context(), request.NamespacedName, pool); err != nil {
		t.Fatal(err)
	}
	return pool
}

// gone lets go of the machines that are deleted, as their controller does.
func (w *world) gone(t *testing.T) {
	t.Helper()
	all := &v1.VirtualMachineList{}
	if err := w.api.List(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	for _, vm := range all.Items {
		if vm.DeletionTimestamp != nil {
			vm.Finalizers = nil
			if err := w.api.Update(t.Context(), &vm); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func (w *world) scale(t *testing.T, n int32) {
	t.Helper()
	pool := w.pool(t)
	pool.Spec.Replicas = &n
	if err := w.api.Update(t.Context(), pool); err != nil {
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
	w := newWorld(t, webPool(2), machine(1, "theirs"), machine(3, "free"))
	w.step(t)
	if got, want := w.names(t), "web-0* web-1 web-2* web-3"; got != want {
		t.Fatalf("machines: %s, want %s", got, want)
	}
	first := &v1.VirtualMachine{}
	if err := w.api.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: "web-0"}, first); err != nil {
		t.Fatal(err)
	}
	if first.Labels["app"] != "web" || !slices.Contains(first.Finalizers, v1.VirtualMachineControllerFinalizer) {
		t.Errorf("the machine: %+v", first)
	}
	if s := w.pool(t).Status; s.Replicas != 2 || s.ReadyReplicas != 0 || s.LabelSelector != "app=web" {
		t.Errorf("the status: %+v", s)
	}
	if got := w.said(); got != "Normal SuccessfulCreate created the machine web-0\nNormal SuccessfulCreate created the machine web-2" {
		t.Errorf("Events: %s", got)
	}
	w.before = func(verb string) error { t.Errorf("nothing is to be done, but %s", verb); return nil }
	w.step(t)
	w.before = func(string) error { return nil }

	// A machine that is deleted is made again with its name once it is gone.
	if err := w.api.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	w.step(t)
	if got := w.names(t); got != "web-1 web-2* web-3" {
		t.Errorf("a machine that is being deleted is replaced already: %s", got)
	}
	w.gone(t)
	w.step(t)
	if got := w.names(t); got != "web-0* web-1 web-2* web-3" {
		t.Errorf("machines: %s", got)
	}
	w.said()
	w.scale(t, 1)
	w.step(t)
	if got := w.names(t) + ": " + w.said(); got != "web-0* web-1 web-3: Normal SuccessfulDelete deleted the machine web-2" {
		t.Errorf("after scaling down: %s", got)
	}
}

// A machine whose labels do not match any more is not the pool's, and keeps its name.
func TestRelease(t *testing.T) {
	w := newWorld(t, webPool(1), machine(0, "db ready"))
	w.step(t)
	if got := w.names(t); got != "web-0 web-1*" {
		t.Errorf("machines: %s", got)
	}
}

// deaf is a cache that has heard of nothing since.
type deaf struct {
	client.Client
	old client.Reader
}

func (s deaf) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return s.old.Get(ctx, key, o, opts...)
}

func (s deaf) List(ctx context.Context, l client.ObjectList, opts ...client.ListOption) error {
	return s.old.List(ctx, l, opts...)
}

// What the cache has not heard of decides nothing.
func TestStaleCache(t *testing.T) {
	old := newWorld(t, webPool(2))
	w := newWorld(t, webPool(2))
	w.step(t)
	before := w.names(t)
	w.Client = deaf{w.api, old.api}
	w.step(t)
	if got := w.names(t); got != before || len(w.created) != 2 {
		t.Errorf("a manager that has not heard of its machines: %s", got)
	}

	// Another pool has the name now, or it wants something else.
	for what, now := range map[string]func(*poolv1.VirtualMachinePool){
		"another pool": func(s *poolv1.VirtualMachinePool) { s.UID = "other" },
		"scaled down":  func(s *poolv1.VirtualMachinePool) { s.Spec.Replicas = new(int32) },
		"paused":       func(s *poolv1.VirtualMachinePool) { s.Spec.Paused = true },
		"is deleted": func(s *poolv1.VirtualMachinePool) {
			s.DeletionTimestamp = &metav1.Time{Time: epoch}
			s.Finalizers = []string{"a/b"}
		},
		"other selector": func(s *poolv1.VirtualMachinePool) { s.Spec.Selector.MatchLabels["app"] = "db" },
	} {
		pool := webPool(2)
		now(pool)
		w := newWorld(t, pool)
		w.Client = deaf{w.api, newWorld(t, webPool(2)).api}
		w.step(t)
		if len(w.created) > 0 {
			t.Errorf("%s: created %v", what, w.created)
		}
	}
	gone := newWorld(t)
	gone.Client = deaf{gone.api, old.api}
	gone.step(t)
	if len(gone.created) > 0 {
		t.Errorf("a pool that is gone: created %v", gone.created)
	}
}

// A manager that dies after each of its writes, before it hears of the result, makes no machine too many.
func TestKilledAfterEachWrite(t *testing.T) {
	w := newWorld(t, webPool(3))
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
	if got, want := w.names(t), "web-0* web-1* web-2*"; got != want || len(w.created) != 3 {
		t.Errorf("machines: %s, want %s; created %v", got, want, w.created)
	}
	w.after = func(string) error { return nil }
	w.start(t)
	w.after = func(string) error { return killed }
	w.change(t)
	settle()
	w.after = func(string) error { return nil }
	w.requireRestart(t)
	w.after = func(string) error { return killed }
	w.said()
	settle()
	if got := w.asked(t); got != "web-0 web-1 web-2" {
		t.Errorf("restarts %s", got)
	}
	w.scale(t, 1)
	settle()
	if got := w.names(t); got != "web-0*" {
		t.Errorf("scaled down: %s", got)
	}
}

// Managers that do not know of each other act at the same time, one before each write of the other.
func TestTwoManagers(t *testing.T) {
	w := newWorld(t, webPool(3))
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
	if got, want := w.names(t), "web-0* web-1*"; got != want {
		t.Errorf("scaled down: %s, want %s", got, want)
	}
}

// A quota refuses machines: the pool says so, and tries again after a pause.
func TestQuota(t *testing.T) {
	w := newWorld(t, webPool(3))
	w.before = func(verb string) error {
		if verb == "create" && len(w.created) == 1 {
			return apierrors.NewForbidden(v1.Resource("virtualmachines"), "x", errors.New("exceeded quota"))
		}
		return nil
	}
	if wait := w.step(t).RequeueAfter; wait != firstPause {
		t.Errorf("tries again after %s", wait)
	}
	if said := w.said(); strings.Count(said, "Warning FailedCreate") != 1 || !strings.Contains(said, "exceeded quota") {
		t.Errorf("Events: %s", said)
	}
	s := w.pool(t).Status
	if len(s.Conditions) != 1 || s.Conditions[0].Reason != ReasonCreateFailed || s.Replicas != 1 {
		t.Errorf("the status: %+v", s)
	}
	if wait := w.step(t).RequeueAfter; wait == 0 || w.said() != "" {
		t.Errorf("tries again at once")
	}
	w.before, w.now = func(string) error { return nil }, after(firstPause)
	w.step(t)
	if s := w.pool(t).Status; len(s.Conditions) != 0 || s.Replicas != 3 {
		t.Errorf("the status: %+v", s)
	}
}

// A pool whose template Cocoon cannot run creates nothing, and says why once.
func TestRefusedTemplate(t *testing.T) {
	pool := webPool(2)
	pool.Spec.VirtualMachineTemplate.Spec.Template.Spec.Networks = []v1.Network{{Name: "a", NetworkSource: v1.NetworkSource{Multus: &v1.MultusNetwork{NetworkName: "b/"}}}}
	w := newWorld(t, pool)
	w.step(t)
	if said := w.said(); len(w.created) > 0 || !strings.HasPrefix(said, "Warning FailedCreate") || !strings.Contains(said, "spec.virtualMachineTemplate.spec.template.spec.networks[0].multus") {
		t.Errorf("created %v, Events: %s", w.created, said)
	}
	w.step(t)
	if said := w.said(); said != "" {
		t.Errorf("says it again: %s", said)
	}
}

// The instancetype may be created after the pool.
func TestInstancetypeComesLater(t *testing.T) {
	pool := webPool(1)
	spec := &pool.Spec.VirtualMachineTemplate.Spec
	spec.Template.Spec.Domain.Memory, spec.Instancetype = nil, &v1.InstancetypeMatcher{Name: "small", Kind: "VirtualMachineInstancetype"}
	w := newWorld(t, pool)
	w.step(t)
	if got := w.names(t); got != "web-0*" {
		t.Errorf("machines: %q, Events: %s", got, w.said())
	}
}
