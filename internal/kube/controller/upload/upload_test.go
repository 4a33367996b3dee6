package upload

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/claimnode"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/upload"
)

// registry has images, by repository and digest.
type registry struct {
	has  []string
	away bool
}

func (r *registry) Put(context.Context, string, io.Reader, int64, func(string) error) (string, error) {
	return "", errdefs.Unsupportedf("the controller stores nothing")
}

func (r *registry) Remove(_ context.Context, repo, digest string) error {
	if r.away {
		return errdefs.Unavailablef("the registry is away")
	}
	r.has = slices.DeleteFunc(r.has, func(s string) bool { return s == repo+"@"+digest })
	return nil
}

const digest = "sha256:aa"

var name = types.NamespacedName{Namespace: "team", Name: "disk"}

func claim(change ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	class := "local"
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "disk", UID: "uid-1", Annotations: map[string]string{contract.KeyUploadTarget: ""}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func uploaded(c *corev1.PersistentVolumeClaim) { c.Annotations[contract.KeyVolumeUpload] = digest }

type rig struct {
	*Reconciler
	t        *testing.T
	registry *registry
	events   *events.FakeRecorder
}

func start(t *testing.T, objects ...client.Object) *rig {
	t.Helper()
	room := resource.MustParse("10Gi")
	objects = append(objects, &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "local"}, Provisioner: contract.VolumeDriver},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "foreign"}, Provisioner: "example.org/disks"},
		&storagev1.CSIStorageCapacity{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "room"}, StorageClassName: "local", Capacity: &room,
			NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelHostname: "one"}},
		},
		&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "one", Labels: map[string]string{corev1.LabelHostname: "one"}},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
		})
	c := fake.NewClientBuilder().WithObjects(objects...).Build()
	r := &rig{t: t, registry: &registry{}, events: events.NewFakeRecorder(10)}
	r.Reconciler = &Reconciler{Client: c, Live: c, Events: r.events, Registry: r.registry, Journal: upload.Journal{Client: c, Object: types.NamespacedName{Namespace: "system", Name: "uploads"}}}
	return r
}

// keep puts an image of a claim into the registry, and notes it.
func (r *rig) keep(uid types.UID, digest string) {
	r.t.Helper()
	if err := r.Journal.Add(r.t.Context(), upload.Entry{Claim: upload.Claim{Namespace: "team", Name: "disk", UID: uid}, Digest: digest}); err != nil {
		r.t.Fatal(err)
	}
	r.registry.has = append(r.registry.has, contract.UploadRepository("team", string(uid))+"@"+digest)
}

// reconcile reconciles twice, and returns what the claim says and what is kept.
func (r *rig) reconcile() (says string, kept int) {
	r.t.Helper()
	for range 2 {
		if _, err := r.Reconcile(r.t.Context(), reconcile.Request{NamespacedName: name}); err != nil {
			r.t.Fatal(err)
		}
	}
	c := &corev1.PersistentVolumeClaim{}
	if err := r.Live.Get(r.t.Context(), name, c); client.IgnoreNotFound(err) != nil {
		r.t.Fatal(err)
	}
	all, err := r.Journal.List(r.t.Context())
	if err != nil || len(all) != len(r.registry.has) {
		r.t.Errorf("the journal has %v, the registry %q, %v", all, r.registry.has, err)
	}
	return strings.TrimSpace(fmt.Sprint(c.Annotations[upload.AnnReady], " ", c.Annotations[upload.AnnPhase], " ", claimnode.Of(c))), len(all)
}

func TestOffer(t *testing.T) {
	foreign, none, missing := "foreign", "", "missing"
	for what, c := range map[string]struct {
		change func(*corev1.PersistentVolumeClaim)
		want   string
		event  string // part of it; "": none
	}{
		"a claim":                    {func(*corev1.PersistentVolumeClaim) {}, "true Running", ""},
		"one that must not wait":     {func(c *corev1.PersistentVolumeClaim) { c.Annotations[kubevirt.ImmediateBinding] = "" }, "true Running", ""},
		"one that failed before":     {func(c *corev1.PersistentVolumeClaim) { c.Annotations[upload.AnnPhase] = "Failed" }, "true Running", ""},
		"one of another driver":      {func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &foreign }, "false Failed", "has its volumes from example.org/disks"},
		"one without a class":        {func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &none }, "false Failed", "has no storage class"},
		"one of a class to come":     {func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &missing }, "false Failed", "storage class missing of PersistentVolumeClaim disk does not exist"},
		"one with a volume":          {func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "pv" }, "false Failed", "never replaces what is on a volume"},
		"one for an archive":         {func(c *corev1.PersistentVolumeClaim) { c.Annotations[upload.AnnContentType] = "archive" }, "false Failed", "only disks of machines"},
		"one that asks for nothing":  {func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil }, "", ""},
		"one that has its disk":      {uploaded, "", ""},
		"one that has it, to be now": {func(c *corev1.PersistentVolumeClaim) { uploaded(c); c.Annotations[kubevirt.ImmediateBinding] = "" }, "one", ""},
	} {
		r := start(t, claim(c.change))
		if got, _ := r.reconcile(); got != c.want {
			t.Errorf("%s: %s, want %s", what, got, c.want)
		}
		var told []string
		for len(r.events.Events) > 0 {
			told = append(told, <-r.events.Events)
		}
		if c.event == "" && len(told) > 0 || c.event != "" && (len(told) != 1 || !strings.Contains(told[0], reasonFailed) || !strings.Contains(told[0], c.event)) {
			t.Errorf("%s: the Events are %q, want one with %q", what, told, c.event)
		}
	}
	r := start(t, claim())
	r.Registry = nil
	if got, _ := r.reconcile(); got != "false Failed" || !strings.Contains(<-r.events.Events, upload.NoRegistry) {
		t.Errorf("without a registry: %s", got)
	}
}

// What was uploaded is kept as long as a volume may be made of it, and no longer.
func TestSweep(t *testing.T) {
	for what, c := range map[string]struct {
		claim  *corev1.PersistentVolumeClaim
		uid    types.UID
		digest string
		kept   int
	}{
		"for a claim that waits":      {claim(uploaded), "uid-1", digest, 1},
		"while it is written down":    {claim(), "uid-1", digest, 1},
		"by one that was too slow":    {claim(uploaded), "uid-1", "sha256:bb", 0},
		"for a claim with a volume":   {claim(uploaded, func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "pv" }), "uid-1", digest, 0},
		"for a claim that is gone":    {nil, "uid-1", digest, 0},
		"for one of that name before": {claim(uploaded), "uid-0", digest, 0},
		"for one that asks no longer": {claim(func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil }), "uid-1", digest, 1},
		"for one that is being deleted": {claim(uploaded, func(c *corev1.PersistentVolumeClaim) {
			at := metav1.Now()
			c.DeletionTimestamp, c.Finalizers = &at, []string{"kubernetes.io/pvc-protection"}
		}), "uid-1", digest, 1},
	} {
		var objects []client.Object
		if c.claim != nil {
			objects = append(objects, c.claim)
		}
		r := start(t, objects...)
		r.keep(c.uid, c.digest)
		if _, kept := r.reconcile(); kept != c.kept {
			t.Errorf("uploaded %s: %d kept, want %d", what, kept, c.kept)
		}
	}
}

// A registry that is away is asked again. Claims that went while no manager ran are found by the journal.
func TestSweepAgain(t *testing.T) {
	r := start(t)
	r.keep("uid-1", digest)
	r.registry.away = true
	if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: name}); !errdefs.IsUnavailable(err) {
		t.Errorf("%v", err)
	}
	r.sweepAll(t.Context())
	if all, err := r.Journal.List(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("%v, %v", all, err)
	}
	r.registry.away = false
	r.sweepAll(t.Context())
	if all, err := r.Journal.List(t.Context()); err != nil || len(all) != 0 || len(r.registry.has) != 0 {
		t.Errorf("%v, %q, %v", all, r.registry.has, err)
	}
}
