//go:build e2e

package admission_test

import (
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

const staying = `annotations: {vm.cocoonstack.io/sticky: wait}`

// stays keeps a VM on its node without the sticky scheduler: the webhook adds a node affinity to the VM's next pod, and the
// stock scheduler obeys it.
func (r *rig) stays(t *testing.T) {
	claims := func() string {
		return r.Kubectl(t, "", "get", "vmplacements", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.resourceVersion} {end}`)
	}
	create := func(manifest string, flags ...string) *corev1.Pod {
		t.Helper()
		pod := &corev1.Pod{}
		if err := json.Unmarshal([]byte(r.Kubectl(t, manifest, append([]string{"create", "-o", "json", "-f", "-"}, flags...)...)), pod); err != nil {
			t.Fatal(err)
		}
		return pod
	}
	bound := func(pod *corev1.Pod) string {
		affinity := pod.Spec.Affinity
		if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
			return ""
		}
		terms := affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		if len(terms) != 1 || len(terms[0].MatchFields) != 1 || terms[0].MatchFields[0].Key != metav1.ObjectNameField {
			t.Errorf("affinity %+v", terms)
			return ""
		}
		return strings.Join(terms[0].MatchFields[0].Values, " ")
	}
	at := func(name string) string {
		return r.Kubectl(t, "", "get", "pod", name, "-o", "jsonpath={.spec.nodeName} {.status.phase}")
	}
	manifest := func(name string) string { return podManifest("default", name, staying, "") }

	if first := create(manifest("stays")); bound(first) != "" || first.Spec.SchedulerName != corev1.DefaultSchedulerName {
		t.Errorf("the first pod is bound to %q, scheduler %s", bound(first), first.Spec.SchedulerName)
	}
	kubetest.Eventually(t, "the pod runs", func() string { _, phase, _ := strings.Cut(at("stays"), " "); return phase }, "Running")
	home, _, _ := strings.Cut(at("stays"), " ")
	if got := r.Kubectl(t, "", "get", "vmplacement", "vk-default-stays", "-o", "jsonpath={.status.nodeName}"); got != home {
		t.Fatalf("the VM runs on %s and has claimed %q", home, got)
	}
	r.Kubectl(t, "", "delete", "pod", "stays", "--timeout=240s")

	// A dry run reports what would happen, and writes nothing. The managers know the claim from their cache.
	kubetest.Eventually(t, "the pod would be bound to", func() string { return bound(create(manifest("stays"), "--dry-run=server")) }, home)
	before := claims()
	again := create(manifest("stays"), "--dry-run=server")
	if again.Annotations[contract.KeyPlacedOn] != home || claims() != before {
		t.Errorf("dry run: placed on %q; claims %s, before %s", again.Annotations[contract.KeyPlacedOn], claims(), before)
	}
	if out, err := r.TryKubectl(t, "", "get", "pod", "stays"); err == nil {
		t.Errorf("a dry run created a pod: %s", out)
	}

	// Every next pod goes to that node, even if another node has more room.
	var pod *corev1.Pod
	for range 3 {
		if pod = create(manifest("stays")); bound(pod) != home || pod.Spec.SchedulerName != corev1.DefaultSchedulerName {
			t.Fatalf("bound to %q by %s", bound(pod), pod.Spec.SchedulerName)
		}
		kubetest.Eventually(t, "the pod is", func() string { return at("stays") }, home+" Running")
		r.Kubectl(t, "", "delete", "pod", "stays", "--timeout=240s")
	}

	// A pod that was exported and renamed is another VM. Neither the claim nor the copied stamp binds it to the node.
	copied := pod.DeepCopy()
	copied.ObjectMeta = metav1.ObjectMeta{Name: "copied", Namespace: "default", Annotations: pod.Annotations}
	delete(copied.Annotations, contract.KeyName)
	copied.Spec.NodeName, copied.Status = "", corev1.PodStatus{}
	text, err := json.Marshal(copied)
	if err != nil {
		t.Fatal(err)
	}
	if got := create(string(text), "--dry-run=server"); bound(got) != "" || got.Annotations[contract.KeyPlacedOn] != "" {
		t.Errorf("a copy is bound to %q", bound(got))
	}
	// A copy that keeps the VM's name is a pod of that VM.
	copied.Annotations[contract.KeyName] = "vk-default-stays"
	if text, err = json.Marshal(copied); err != nil {
		t.Fatal(err)
	}
	if got := create(string(text), "--dry-run=server"); bound(got) != home {
		t.Errorf("another pod of the VM is bound to %q", bound(got))
	}
	// After the claim is released, the VM's next pod may go to any node.
	r.Kubectl(t, "", "delete", "vmplacement", "vk-default-stays")
	kubetest.Eventually(t, "the pod would be bound to", func() string { return bound(create(manifest("stays"), "--dry-run=server")) }, "")
}
