package kubevirtstatus

import (
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	kubevirtv1 "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

func TestReconcile(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(kubevirtv1.AddToScheme(scheme), cdi.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	object := func(name, of string) *kubevirtv1.KubeVirt {
		return &kubevirtv1.KubeVirt{ObjectMeta: metav1.ObjectMeta{Namespace: "kubevirt", Name: name, Labels: map[string]string{part: of}}}
	}
	for what, tc := range map[string]struct {
		there []client.Object
		name  string
		want  kubevirtv1.KubeVirtPhase
		none  bool
	}{
		"none yet":               {nil, "kubevirt", kubevirtv1.KubeVirtPhaseDeployed, false},
		"ours":                   {[]client.Object{object("kubevirt", whole)}, "kubevirt", kubevirtv1.KubeVirtPhaseDeployed, false},
		"of an earlier release":  {[]client.Object{&kubevirtv1.KubeVirt{ObjectMeta: metav1.ObjectMeta{Namespace: "kubevirt", Name: "kubevirt", Labels: map[string]string{"app.kubernetes.io/managed-by": "cocoon-up"}}}}, "kubevirt", kubevirtv1.KubeVirtPhaseDeployed, false},
		"ours, with a config":    {[]client.Object{object("kubevirt", whole), &cdi.CDIConfig{ObjectMeta: metav1.ObjectMeta{Name: Config}}}, "kubevirt", kubevirtv1.KubeVirtPhaseDeployed, false},
		"of another KubeVirt":    {[]client.Object{object("kubevirt", "kubevirt")}, "kubevirt", "", false},
		"ours, by another name":  {[]client.Object{object("mine", whole)}, "mine", kubevirtv1.KubeVirtPhaseDeployed, false},
		"another one is deleted": {nil, "mine", "", true},
	} {
		c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&kubevirtv1.KubeVirt{}).WithObjects(tc.there...).Build()
		r, key := &Reconciler{Client: c}, types.NamespacedName{Namespace: "kubevirt", Name: tc.name}
		for range 2 { // the second time is for the event of the creation
			if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
		var k kubevirtv1.KubeVirt
		err := c.Get(t.Context(), key, &k)
		if apierrors.IsNotFound(err) != tc.none || k.Status.Phase != tc.want {
			t.Errorf("%s: phase %q, %v", what, k.Status.Phase, err)
		}
		config := &cdi.CDIConfig{}
		if err := c.Get(t.Context(), types.NamespacedName{Name: Config}, config); (err == nil) != (tc.want != "") || err == nil && config.Status.FilesystemOverhead.Global != "0" {
			t.Errorf("%s: the CDIConfig: %+v, %v", what, config.Status, err)
		}
	}
}
