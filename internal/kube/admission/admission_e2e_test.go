//go:build e2e

package admission_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	registration "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// All webhooks against a real API server, with the managers as shipped.
func TestAdmission(t *testing.T) {
	r := newRig(t)
	t.Run("sets", r.sets)
	t.Run("pods", r.pods)
	t.Run("reinvocation", r.reinvocation)
	t.Run("scale", r.scale)
	t.Run("stays", r.stays)
	t.Run("drain", r.drain)
	t.Run("replicas", r.replicas)
	t.Run("strangers", r.strangers)
	t.Run("files", r.files)
}

// refused applies a manifest that must be refused with all of the words.
func (r *rig) refused(t *testing.T, manifest string, words ...string) {
	t.Helper()
	out, err := r.TryKubectl(t, manifest, "apply", "--dry-run=server", "-f", "-")
	if err == nil {
		t.Errorf("%s\nis accepted, want a refusal", manifest)
		return
	}
	for _, w := range words {
		if !strings.Contains(out, w) {
			t.Errorf("%s\nthe refusal does not contain %q: %s", manifest, w, out)
		}
	}
}

func setManifest(namespace, name, spec string) string {
	return fmt.Sprintf("apiVersion: cocoonset.cocoonstack.io/v1\nkind: CocoonSet\nmetadata: {namespace: %s, name: %s}\nspec: %s\n", namespace, name, spec)
}

// Rules that the schema cannot express. The table of TestCheckSet covers each rule.
func (r *rig) sets(t *testing.T) {
	long := strings.Repeat("n", 64)
	r.refused(t, setManifest("default", long, `{agent: {mode: run, image: a}}`), "is invalid: metadata.name", "63")
	r.refused(t, setManifest("default", "s", `{agent: {mode: run, image: a, storage: "-1Gi"}}`), "spec.agent.storage", "must be a positive quantity")
	r.refused(t, setManifest("default", "s", `{agent: {mode: run, image: a}, toolboxes: [{name: t, mode: static, staticIP: x, staticVMID: id}]}`), "spec.toolboxes[0].staticIP", "must be an IP address")

	// VMs of a set with a long name have distinct names. VMs of sets default/b-c and default-b/c have distinct names too. The
	// first of these sets is suspended, so that it creates no pods.
	r.Kubectl(t, setManifest("default", long[1:], `{agent: {mode: run, image: a}}`), "apply", "--dry-run=server", "-f", "-")
	r.Kubectl(t, setManifest("default", "b-c", `{suspend: true, agent: {mode: run, image: a}}`), "apply", "-f", "-")
	r.Kubectl(t, "", "create", "namespace", "default-b")
	r.Kubectl(t, setManifest("default-b", "c", `{agent: {mode: run, image: a}}`), "apply", "--dry-run=server", "-f", "-")
	// An update that leaves the spec unchanged is allowed; one that changes the spec is checked.
	r.Kubectl(t, "", "label", "cocoonset", "b-c", "a=b")
	out, err := r.TryKubectl(t, "", "patch", "cocoonset", "b-c", "--type=merge", "-p", `{"spec":{"agent":{"storage":"0"}}}`)
	if err == nil || !strings.Contains(out, "spec.agent.storage") {
		t.Errorf("update with storage 0: %v %s, want a refusal of spec.agent.storage", err, out)
	}
	r.Kubectl(t, "", "delete", "cocoonset", "b-c", "--timeout=240s")

	static := podManifest("default", "machine", `annotations: {cocoonset.cocoonstack.io/mode: static, vm.cocoonstack.io/id: x, vm.cocoonstack.io/ip: 10.0.0.9}`, "")
	r.Kubectl(t, static+"---\n"+podManifest("default", "plain", "", ""), "apply", "-f", "-")
	for name, why := range map[string]string{"machine": "static VM", "plain": "is not a VM"} {
		kubetest.Eventually(t, "the hibernation of "+name, func() string {
			out, err := r.TryKubectl(t, fmt.Sprintf("apiVersion: cocoonset.cocoonstack.io/v1\nkind: CocoonHibernation\nmetadata: {name: %s}\nspec: {podRef: {name: %s}, desire: Hibernate}\n", name, name), "apply", "--dry-run=server", "-f", "-")
			if err == nil || !strings.Contains(out, "spec.podRef.name") || !strings.Contains(out, why) {
				return out
			}
			return ""
		}, "")
	}
	r.Kubectl(t, "", "delete", "pod", "machine", "plain", "--force", "--grace-period=0")
}

func podManifest(namespace, name, meta, spec string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata:\n  namespace: %s\n  name: %s\n  %s\nspec:\n  containers: [{name: c, image: %s}]\n  %s\n", namespace, name, meta, fakenode.Image, spec)
}

const (
	tolerates = `tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]`
	nowhere   = `schedulerName: nobody`
)

func (r *rig) pods(t *testing.T) {
	create := func(manifest string, flags ...string) *corev1.Pod {
		t.Helper()
		pod := &corev1.Pod{}
		if err := json.Unmarshal([]byte(r.Kubectl(t, manifest, append([]string{"create", "-o", "json", "-f", "-"}, flags...)...)), pod); err != nil {
			t.Fatal(err)
		}
		return pod
	}
	ours := func(pod *corev1.Pod) string {
		n := 0
		for _, tol := range pod.Spec.Tolerations {
			if tol.Key == contract.TaintKey {
				n++
			}
		}
		return fmt.Sprintf("%s %s %d", pod.Annotations[contract.KeyName], pod.Spec.NodeSelector[contract.LabelPool], n)
	}
	asked := podManifest("default", "p", `annotations: {cocoonset.cocoonstack.io/managed: "true", cocoonset.cocoonstack.io/mode: run}`, nowhere)
	const want = "vk-default-p default 1"
	if got := ours(create(asked, "--dry-run=server")); got != want {
		t.Errorf("dry run: %q, want %q", got, want)
	}
	pod := create(asked)
	if got := ours(pod); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for _, tol := range pod.Spec.Tolerations { // other pods get five minutes from the API server
		if tol.TolerationSeconds != nil {
			t.Errorf("a VM with state may be evicted from an unreachable node: %+v", tol)
		}
	}
	// Completion does not change a pod that is already complete.
	pod.ResourceVersion, pod.UID = "", ""
	again, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	r.Kubectl(t, "", "delete", "pod", "p", "--force", "--grace-period=0")
	if got := create(string(again)); ours(got) != want || len(got.Spec.Tolerations) != len(pod.Spec.Tolerations) {
		t.Errorf("completed a second time: %q %v", ours(got), got.Spec.Tolerations)
	}
	r.Kubectl(t, "", "delete", "pod", "p", "--force", "--grace-period=0")

	if got := ours(create(podManifest("default", "p", "", nowhere), "--dry-run=server")); got != "  0" {
		t.Errorf("an ordinary pod is changed: %q", got)
	}
	if got := ours(create(podManifest("default", "p", "", "tolerations: [{operator: Exists}]"), "--dry-run=server")); got != "  0" {
		t.Errorf("a pod that tolerates everything is changed: %q", got)
	}
	if got := ours(create(podManifest("kube-system", "p", "", tolerates), "--dry-run=server")); got != "  1" {
		t.Errorf("a pod of an excluded namespace is changed: %q", got)
	}
	r.refused(t, podManifest("default", "p", `annotations: {cocoonset.cocoonstack.io/mode: teleport}`, tolerates), "metadata.annotations[cocoonset.cocoonstack.io/mode]", "must be one of clone, run, static")
	r.refused(t, podManifest("default", "p", `annotations: {vm.cocoonstack.io/eviction-policy: perhaps}`, tolerates), "metadata.annotations[vm.cocoonstack.io/eviction-policy]", "hibernate, delete, refuse")
	if got := create(podManifest("default", strings.Repeat("p", 60), "", tolerates), "--dry-run=server").Annotations[contract.KeyName]; !strings.HasPrefix(got, "vk---default.ppp") {
		t.Errorf("the VM of a pod with a long name is called %q", got)
	}
	for _, annotation := range []string{"vm.cocoonstack.io/name: vk-victim-db", "vm.cocoonstack.io/fork-from: vk-victim-db", "cocoonset.cocoonstack.io/image: vk-victim-db:hibernate", "cocoonset.cocoonstack.io/image: victim/vk-victim-db"} {
		key, _, _ := strings.Cut(annotation, ": ")
		r.refused(t, podManifest("default", "p", `annotations: {cocoonset.cocoonstack.io/managed: "true", `+annotation+`}`, tolerates), "metadata.annotations["+key+"]", "a VM of another namespace")
	}
	r.refused(t, podManifest("default", "p", `annotations: {cocoonset.cocoonstack.io/managed: "true", vm.cocoonstack.io/clone-from-dir: /var/lib/cocoon/snapshots/x}`, tolerates), "metadata.annotations[vm.cocoonstack.io/clone-from-dir]", "the operator lists the allowed folders")
	if out := r.Kubectl(t, podManifest("default", "p", "", tolerates+"\n  hostNetwork: true"), "create", "--dry-run=server", "-f", "-"); !strings.Contains(out, "Warning: Cocoon nodes of this version refuse the pod: spec.hostNetwork") {
		t.Errorf("no warning for a pod that the nodes refuse: %s", out)
	}
}

// Another webhook changes the pod after our webhook. The API server then calls our webhook again, and it changes nothing.
func (r *rig) reinvocation(t *testing.T) {
	late := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var review admissionv1.AdmissionReview
		body, _ := io.ReadAll(req.Body)
		_ = json.Unmarshal(body, &review)
		kind := admissionv1.PatchTypeJSONPatch
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true, PatchType: &kind, Patch: []byte(`[{"op":"add","path":"/metadata/labels","value":{"late":"yes"}}]`)}
		_ = json.NewEncoder(w).Encode(review)
	}))
	defer late.Close()
	none, fail, url := registration.SideEffectClassNone, registration.Fail, late.URL
	hooks := r.kube.AdmissionregistrationV1().MutatingWebhookConfigurations()
	_, err := hooks.Create(t.Context(), &registration.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "zz-late"}, Webhooks: []registration.MutatingWebhook{{
		Name: "late.example.com", AdmissionReviewVersions: []string{"v1"}, SideEffects: &none, FailurePolicy: &fail,
		ClientConfig:      registration.WebhookClientConfig{URL: &url, CABundle: pemOf(late)},
		NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": "default"}},
		Rules:             []registration.RuleWithOperations{{Operations: []registration.OperationType{"CREATE"}, Rule: registration.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}}}},
	}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = hooks.Delete(t.Context(), "zz-late", metav1.DeleteOptions{}) }()
	kubetest.Eventually(t, "both webhooks change the pod", func() string {
		patched, allowed := r.answers(t, "patched"), r.answers(t, "allowed")
		out := r.Kubectl(t, podManifest("default", "p", "", tolerates), "create", "--dry-run=server", "-o", "jsonpath={.metadata.labels.late} {.metadata.annotations} {.spec.nodeSelector}", "-f", "-")
		if !strings.HasPrefix(out, "yes") {
			return out
		}
		if p, a := r.answers(t, "patched")-patched, r.answers(t, "allowed")-allowed; p != 1 || a != 1 {
			t.Errorf("our webhook patched the pod %d times and allowed it unchanged %d times, want once each", p, a)
		}
		return out
	}, `yes {"vm.cocoonstack.io/name":"vk-default-p"} {"cocoonstack.io/pool":"default"}`)
}

// answers counts the answers of both managers for created pods.
func (r *rig) answers(t *testing.T, result string) int {
	t.Helper()
	sum := 0
	for _, m := range r.managers {
		_, text := get(t, "http://"+m.stat+"/metrics")
		for line := range strings.SplitSeq(text, "\n") {
			if strings.HasPrefix(line, `cocoon_webhook_admission_total{handler="mutate",`) && strings.Contains(line, `result="`+result+`"`) {
				n, err := strconv.Atoi(line[strings.LastIndexByte(line, ' ')+1:])
				if err != nil {
					t.Fatal(err)
				}
				sum += n
			}
		}
	}
	return sum
}

func (r *rig) scale(t *testing.T) {
	workload := func(kind, name, spec string) string {
		return fmt.Sprintf("apiVersion: apps/v1\nkind: %s\nmetadata: {name: %s}\nspec:\n  replicas: 2\n  selector: {matchLabels: {app: %s}}\n  template:\n    metadata: {labels: {app: %s}}\n    spec:\n      containers: [{name: c, image: x}]\n      schedulerName: nobody\n      %s\n", kind, name, name, name, spec)
	}
	r.Kubectl(t, workload("Deployment", "vms", tolerates)+"---\n"+workload("Deployment", "plain", "")+"---\n"+workload("StatefulSet", "vms", tolerates), "apply", "-f", "-")
	refused := func(args ...string) {
		t.Helper()
		out, err := r.TryKubectl(t, "", args...)
		if err == nil || !strings.Contains(out, "Forbidden") && !strings.Contains(out, "forbidden") || !strings.Contains(out, "spec.replicas") {
			t.Errorf("%v: %v %s", args, err, out)
		}
	}
	refused("scale", "deployment/vms", "--replicas=1")
	refused("scale", "statefulset/vms", "--replicas=0")
	refused("patch", "deployment/vms", "--type=merge", "-p", `{"spec":{"replicas":1}}`)
	refused("patch", "statefulset/vms", "--type=merge", "-p", `{"spec":{"replicas":1}}`)
	refused("patch", "deployment/vms", "--type=merge", "-p", `{"spec":{"replicas":1,"template":{"spec":{"tolerations":null}}}}`)
	refused("scale", "deployment/vms", "--replicas=1", "--dry-run=server")
	r.Kubectl(t, "", "scale", "deployment/plain", "--replicas=0")
	r.Kubectl(t, "", "scale", "deployment/vms", "--replicas=3")
	r.Kubectl(t, "", "annotate", "deployment/vms", contract.KeyAllowScaleDown+"=true")
	r.Kubectl(t, "", "scale", "deployment/vms", "--replicas=0")
	r.Kubectl(t, "", "delete", "deployment/vms", "deployment/plain", "statefulset/vms")
}
