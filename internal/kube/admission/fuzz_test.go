package admission

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/testkit/podgen"
)

// world holds the objects that the webhooks can look up: one pod, one node and one claim, returned for any name.
type world struct {
	client.Client // nil: no other method is called
	scheme        *runtime.Scheme
	pod           *corev1.Pod
	claim         *v1.VMPlacement
	marked        int
}

func newWorld(tb testing.TB) *world {
	tb.Helper()
	s := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(s), v1.AddToScheme(s)); err != nil {
		tb.Fatal(err)
	}
	return &world{scheme: s}
}

func (w *world) Scheme() *runtime.Scheme { return w.scheme }

func (w *world) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	switch o := obj.(type) {
	case *corev1.Pod:
		if w.pod != nil {
			w.pod.DeepCopyInto(o)
			return nil
		}
	case *v1.VMPlacement:
		if w.claim != nil {
			w.claim.DeepCopyInto(o)
			return nil
		}
	}
	return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
}

func (*world) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

func (w *world) Patch(context.Context, client.Object, client.Patch, ...client.PatchOption) error {
	w.marked++
	return nil
}

// served returns the webhooks of w by path.
type served struct {
	webhook.Server // nil: only Register is called
	at             map[string]http.Handler
}

func (s served) Register(path string, h http.Handler) { s.at[path] = h }

func serve(w *world) map[string]http.Handler {
	s := served{at: map[string]http.Handler{}}
	(&Webhooks{Client: w, Live: w, Metrics: NewMetrics(prometheus.NewRegistry())}).Register(s)
	return s.at
}

// ask sends body to one of the webhooks. It fails the test unless the answer is a valid AdmissionReview.
func ask(t *testing.T, h http.Handler, body []byte) *admissionv1.AdmissionResponse {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != http.StatusOK {
		if w.Code < 400 || w.Code >= 500 {
			t.Fatalf("HTTP %d", w.Code)
		}
		return nil
	}
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal(w.Body.Bytes(), &review); err != nil || review.Response == nil {
		t.Fatalf("no answer: %v: %q", err, w.Body.Bytes())
	}
	resp := review.Response
	if !resp.Allowed && (resp.Result == nil || resp.Result.Code < 400 || resp.Result.Message == "") {
		t.Errorf("a refusal without a reason: %+v", resp)
	}
	if len(resp.Patch) > 0 && !resp.Allowed {
		t.Error("a refusal with a patch")
	}
	return resp
}

func review(t *testing.T, op admissionv1.Operation, namespace string, now, old runtime.Object) []byte {
	t.Helper()
	req := &admissionv1.AdmissionRequest{UID: "u", Operation: op, Namespace: namespace, Name: "x", Resource: metav1.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}}
	req.Object.Object, req.OldObject.Object = now, old
	out, err := json.Marshal(&admissionv1.AdmissionReview{TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"}, Request: req})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// FuzzPods calls the webhooks for any pod. Completion changes only the allowed fields, and is idempotent. The checker
// refuses invalid keys of a completed pod. VMs are not scaled down.
func FuzzPods(f *testing.F) {
	for i, s := range podgen.Seeds() {
		f.Add(s, i%2 == 0, int32(i%4), int32(i%3))
	}
	f.Fuzz(func(t *testing.T, data []byte, bound bool, was, is int32) {
		w, pod := newWorld(t), podgen.Pod(data)
		if bound {
			w.claim = &v1.VMPlacement{Status: v1.VMPlacementStatus{NodeName: "n1"}}
		}
		at := serve(w)
		pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
		resp := ask(t, at[PathPod], review(t, admissionv1.Create, pod.Namespace, pod, nil))
		if resp == nil || !resp.Allowed {
			t.Fatalf("the completer refuses the pod: %+v", resp)
		}
		onlyPlacing(t, resp.Patch)
		done := pod.DeepCopy()
		if asks(done) || tolerates(done.Spec.Tolerations) {
			complete(done)
			if owner := metav1.GetControllerOf(done); owner == nil || owner.Kind != contract.OwnerKind {
				ask, _ := contract.ParseSticky(done.Annotations)
				if claim := w.claim; !ask.Asked || placement.NameOf(done) == "" {
					placement.Stamp(done, nil)
				} else {
					placement.Stamp(done, claim)
				}
			}
		}
		if reflect.DeepEqual(done, pod) != (len(resp.Patch) == 0) {
			t.Errorf("the patch is %s, and the pod becomes %+v", resp.Patch, done)
		}
		if again := ask(t, at[PathPod], review(t, admissionv1.Create, pod.Namespace, done, nil)); again == nil || len(again.Patch) > 0 {
			t.Errorf("a second call changes the pod: %s", again.Patch)
		}
		for _, op := range []admissionv1.Operation{admissionv1.Update, admissionv1.Delete, admissionv1.Connect} {
			if r := ask(t, at[PathPod], review(t, op, pod.Namespace, pod, pod)); r == nil || len(r.Patch) > 0 {
				t.Errorf("operation %s changes the pod", op)
			}
		}
		checked := ask(t, at[PathCheckPod], review(t, admissionv1.Create, pod.Namespace, done, nil))
		ours := tolerates(done.Spec.Tolerations) && done.Spec.NodeSelector[contract.LabelPool] != ""
		if checked != nil && checked.Allowed && ours && len(convert.CheckKeys(done)) > 0 {
			t.Errorf("the checker allows a pod with invalid keys: %v", convert.CheckKeys(done))
		}
		if checked != nil && !checked.Allowed && !ours {
			t.Errorf("a pod that is not a VM is refused: %v", checked.Result)
		}
		scaled(t, at[PathScale], pod, was, is)
	})
}

// onlyPlacing fails the test if patch changes a field that the completer may not change.
func onlyPlacing(t *testing.T, patch []byte) {
	t.Helper()
	if len(patch) == 0 {
		return
	}
	var ops []struct{ Op, Path string }
	if err := json.Unmarshal(patch, &ops); err != nil {
		t.Fatal(err)
	}
	for _, o := range ops {
		allowed := false
		for _, p := range []string{"/metadata/annotations", "/spec/tolerations", "/spec/nodeSelector", "/spec/affinity"} {
			allowed = allowed || o.Path == p || strings.HasPrefix(o.Path, p+"/")
		}
		// Unmounted volumes name the objects of annotations; the pod's own volumes stay.
		allowed = allowed || o.Op == "add" && (o.Path == "/spec/volumes" || strings.HasPrefix(o.Path, "/spec/volumes/"))
		if !allowed {
			t.Errorf("the patch has an operation that is not allowed: %s %s", o.Op, o.Path)
		}
	}
}

// scaled scales a Deployment of such pods.
func scaled(t *testing.T, h http.Handler, pod *corev1.Pod, was, is int32) {
	t.Helper()
	of := func(n int32) *appsv1.Deployment {
		d := &appsv1.Deployment{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"}}
		d.Spec.Replicas = &n
		d.Spec.Template.ObjectMeta, d.Spec.Template.Spec = pod.ObjectMeta, pod.Spec
		return d
	}
	old, now := of(was), of(is)
	now.Spec.Template.Spec, now.Spec.Template.ObjectMeta = corev1.PodSpec{}, metav1.ObjectMeta{} // the new template does not look like a VM
	resp := ask(t, h, review(t, admissionv1.Update, pod.Namespace, now, old))
	if resp == nil {
		t.Fatal("no answer")
	}
	vms := tolerates(pod.Spec.Tolerations) || asks(pod)
	if resp.Allowed == (vms && is < was) {
		t.Errorf("scaling from %d to %d, VMs %v: allowed %v", was, is, vms, resp.Allowed)
	}
	now.Annotations = map[string]string{contract.KeyAllowScaleDown: "true"}
	if resp := ask(t, h, review(t, admissionv1.Update, pod.Namespace, now, old)); resp == nil || !resp.Allowed {
		t.Errorf("scaling down is refused although annotation %s allows it", contract.KeyAllowScaleDown)
	}
}

// FuzzReviews sends any bytes to every webhook. Each answer must be valid for the API server, and a dry run must not mark a
// pod.
func FuzzReviews(f *testing.F) {
	for _, s := range []string{
		``, `{}`, `[]`, `{"request":{}}`, `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"CREATE","object":{"kind":"Pod","apiVersion":"v1"}}}`,
		`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"UPDATE","object":{"apiVersion":"cocoonset.cocoonstack.io/v1","kind":"CocoonSet","spec":{"agent":{"replicas":2147483647},"toolboxes":[{"mode":"static","staticIP":"fe80::1%x"}]}},"oldObject":null}}`,
		`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"UPDATE","resource":{"resource":"statefulsets"},"subResource":"scale","object":{"apiVersion":"autoscaling/v1","kind":"Scale","spec":{"replicas":1}},"oldObject":{"apiVersion":"autoscaling/v1","kind":"Scale","spec":{"replicas":3}}}}`,
		`{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview","request":{"uid":"u","dryRun":true,"operation":"CREATE","object":{"apiVersion":"policy/v1","kind":"Eviction","deleteOptions":{"dryRun":["All"]}}}}`,
		`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","operation":"CREATE","object":{"apiVersion":"cocoonset.cocoonstack.io/v1","kind":"CocoonHibernation","spec":{"desire":"Hibernate","podRef":{"name":"x"}}}}}`,
	} {
		f.Add([]byte(s), []byte{})
		f.Add([]byte(s), []byte{2, 1, 4, 9})
	}
	f.Fuzz(func(t *testing.T, body, about []byte) {
		w := newWorld(t)
		if len(about) > 0 {
			w.pod = podgen.Pod(about)
		}
		var said admissionv1.AdmissionReview
		dry := json.Unmarshal(body, &said) == nil && said.Request != nil && said.Request.DryRun != nil && *said.Request.DryRun
		for path, h := range serve(w) {
			resp := ask(t, h, body)
			if resp != nil && said.Request != nil && resp.UID != said.Request.UID {
				t.Errorf("%s answers %q to %q", path, resp.UID, said.Request.UID)
			}
		}
		if dry && w.marked > 0 {
			t.Error("a dry run marks a pod")
		}
	})
}
