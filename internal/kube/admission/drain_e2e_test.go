//go:build e2e

package admission_test

import (
	"encoding/pem"
	"net/http/httptest"
	"strings"
	"testing"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

func pemOf(s *httptest.Server) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

// A node is drained: the VM hibernates, moves to the other node and resumes there.
func (r *rig) drain(t *testing.T) {
	r.Kubectl(t, setManifest("default", "team", `{agent: {mode: run, image: demo}}`), "apply", "-f", "-")
	running := func() string {
		return r.Kubectl(t, "", "get", "cocoonset", "team", "-o", "jsonpath={.status.phase}")
	}
	kubetest.Eventually(t, "the set", running, "Running")
	const vm = "vk-default-team-0"
	from := r.mainPod(t).Spec.NodeName
	boot := r.nodes[from].Guest(vm).BootID
	evict := func(dry ...string) error {
		return r.kube.CoreV1().Pods("default").EvictV1(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "team-0"}, DeleteOptions: &metav1.DeleteOptions{DryRun: dry}})
	}

	// The node accepts pods, so the VM does not change. The answer tells the client what to do.
	if err := evict(); !apierrors.IsTooManyRequests(err) || !strings.Contains(err.Error(), "cordon node "+from) {
		t.Errorf("an eviction on a node that accepts pods: %v", err)
	}
	if contract.Hibernate(r.mainPod(t).Annotations) {
		t.Error("an eviction on a node that accepts pods told the VM to hibernate")
	}
	r.Kubectl(t, "", "cordon", from)
	// A dry run changes nothing.
	kubetest.Eventually(t, "the dry run", func() string {
		if out, err := r.TryKubectl(t, "", "drain", from, "--dry-run=server", "--timeout=5s"); err != nil {
			return out
		}
		return ""
	}, "")
	if contract.Hibernate(r.mainPod(t).Annotations) {
		t.Error("a dry run told the VM to hibernate")
	}
	// A drain that was started and cancelled: the VM wakes.
	kubetest.Eventually(t, "the eviction", func() string {
		if err := evict(); !apierrors.IsTooManyRequests(err) {
			t.Fatalf("the eviction is allowed although the VM's state is not saved: %v", err)
		}
		return r.mainPod(t).Annotations[contract.KeyHibernate]
	}, "true")
	r.Kubectl(t, "", "uncordon", from)
	kubetest.Eventually(t, "the VM is awake", func() string {
		a := r.mainPod(t).Annotations
		return a[contract.KeyHibernate] + a[contract.KeyLifecycleState]
	}, "ready")
	if g := r.nodes[from].Guest(vm); g == nil || g.BootID != boot {
		t.Errorf("the VM is another guest: %+v", g)
	}

	r.Kubectl(t, "", "drain", from, "--timeout=240s")
	to := map[string]string{"a": "b", "b": "a"}[from]
	kubetest.Eventually(t, "the node of the pod", func() string {
		return r.Kubectl(t, "", "get", "pod", "team-0", "--ignore-not-found", "-o", "jsonpath={.spec.nodeName}")
	}, to)
	kubetest.Eventually(t, "the set", running, "Running")
	if g := r.nodes[to].Guest(vm); g == nil || g.BootID != boot {
		t.Errorf("the VM lost its state when it moved: %+v", g)
	}
	r.Kubectl(t, "", "uncordon", from)

	// With eviction policy "refuse" a VM is not evicted. With "delete" it is evicted like any pod.
	r.Kubectl(t, "", "annotate", "pod", "team-0", contract.KeyEvictionPolicy+"=refuse")
	kubetest.Eventually(t, "the refusal", func() string {
		if err := evict(); !apierrors.IsForbidden(err) {
			return "no"
		}
		return ""
	}, "")
	r.Kubectl(t, "", "annotate", "pod", "team-0", "--overwrite", contract.KeyEvictionPolicy+"=delete")
	kubetest.Eventually(t, "the eviction", func() string {
		if err := evict(metav1.DryRunAll); err != nil {
			return err.Error()
		}
		return ""
	}, "")
	r.Kubectl(t, "", "delete", "cocoonset", "team", "--timeout=240s")
}

// One manager is enough. Without a manager, only requests that the webhooks guard are refused.
func (r *rig) replicas(t *testing.T) {
	create := func(namespace, spec string) error {
		_, err := r.TryKubectl(t, podManifest(namespace, "p", "", spec), "create", "--dry-run=server", "-f", "-")
		return err
	}
	r.managers[0].kill(t)
	for range 10 {
		if err := create("default", tolerates); err != nil {
			t.Fatalf("with one of two managers: %v", err)
		}
	}
	r.managers[1].kill(t)
	out, err := r.TryKubectl(t, podManifest("default", "p", "", tolerates), "create", "--dry-run=server", "-f", "-")
	if err == nil || !strings.Contains(out, "failed calling webhook") {
		t.Errorf("a VM's pod without a manager: %v %s", err, out)
	}
	if err := create("default", ""); err != nil {
		t.Errorf("an ordinary pod without a manager: %v", err)
	}
	if err := create("kube-system", tolerates); err != nil {
		t.Errorf("a pod of an excluded namespace without a manager: %v", err)
	}
	secret := func() string {
		return r.Kubectl(t, "", "get", "secret", "cocoon-manager-webhook", "-n", "cocoon-system", "-o", "jsonpath={.metadata.resourceVersion}")
	}
	before := secret()
	for _, m := range r.managers {
		m.start(t)
	}
	for _, m := range r.managers {
		m.ready(t)
	}
	if err := create("default", tolerates); err != nil {
		t.Errorf("with both managers again: %v", err)
	}
	if after := secret(); after != before {
		t.Error("a restart of the manager replaced the certificate")
	}
}
