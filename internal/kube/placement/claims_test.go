package placement

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// The claim of a VM that hibernates with its pod belongs to the pod's controller: it ends with it, and a controller that is created
// again under the name waits until then.
func TestClaimBelongsToTheController(t *testing.T) {
	custom := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{Resource: "VMPlacementList"})
	nodes := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "u-a"}})
	claims := Claims{Custom: custom, Nodes: nodes, Node: "a"}
	of := func(owner types.UID) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Name: "p", Namespace: "ns", Annotations: map[string]string{contract.KeyDeletionPolicy: "hibernate"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "agents.x-k8s.io/v1alpha1", Kind: "Sandbox", Name: "p", UID: owner, Controller: new(true)}},
		}}
	}
	holder := func(want string) {
		t.Helper()
		if node, found, err := claims.Holder(t.Context(), "ns", "vk-ns-p"); err != nil || node != want || found != (want != "") {
			t.Errorf("claimed by %q, %v, %v; want %q", node, found, err, want)
		}
	}
	holder("")
	for range 2 {
		if err := claims.Hold(t.Context(), of("one")); err != nil {
			t.Fatal(err)
		}
	}
	holder("a")
	api := custom.Resource(Resource).Namespace("ns")
	got, err := api.Get(t.Context(), "vk-ns-p", metav1.GetOptions{})
	if err != nil || len(got.GetOwnerReferences()) != 1 || got.GetOwnerReferences()[0].UID != "one" {
		t.Fatalf("claim %v, %v", got, err)
	}
	if err := claims.Hold(t.Context(), of("two")); !errdefs.IsUnavailable(err) {
		t.Errorf("a claim of an earlier controller: %v", err)
	}
	got.SetDeletionTimestamp(new(metav1.NewTime(time.Now())))
	if _, err := api.Update(t.Context(), got, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	holder("")
}
