package admission

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
)

func set(t *testing.T, namespace, name, spec string) v1.CocoonSet {
	t.Helper()
	s := v1.CocoonSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	if err := yaml.UnmarshalStrict([]byte(spec), &s.Spec); err != nil {
		t.Fatal(err)
	}
	return s
}

// A pod, and its VM, belongs to one set, although names of sets and slots may contain dashes.
func TestNamesTaken(t *testing.T) {
	const one, four = `{agent: {image: a}}`, `{agent: {image: a, replicas: 4}}`
	for name, c := range map[string]struct {
		namespace, set, spec    string
		namespace2, set2, spec2 string
		field                   string // "": both are valid
	}{
		"same names in another namespace":             {"a", "b", one, "c", "b", one, ""},
		"dash in the namespace or in the name":        {"a", "b-c", one, "a-b", "c", one, ""},
		"toolbox has the name of another set's agent": {"a", "b", `{agent: {image: a}, toolboxes: [{name: c-3, image: x}]}`, "a", "b-c", four, "spec.toolboxes[0].name"},
		"another set has fewer agents":                {"a", "b", `{agent: {image: a}, toolboxes: [{name: c-5, image: x}]}`, "a", "b-c", four, ""},
		"leading zero":                                {"a", "b", `{agent: {image: a}, toolboxes: [{name: c-03, image: x}]}`, "a", "b-c", four, ""},
		"agent has the name of another set's toolbox": {"a", "b-c", four, "a", "b", `{agent: {image: a}, toolboxes: [{name: c-3, image: x}]}`, "metadata.name"},
		"toolboxes have the same name":                {"a", "b", `{agent: {image: a}, toolboxes: [{name: c-d, image: x}]}`, "a", "b-c", `{agent: {image: a}, toolboxes: [{name: d, image: x}]}`, "spec.toolboxes[0].name"},
		"static toolbox creates no VM":                {"a", "b", `{agent: {image: a}, toolboxes: [{name: c-3, mode: static}]}`, "a", "b-c", four, ""},
		"the set itself":                              {"a", "b", one, "a", "b", four, ""},
	} {
		t.Run(name, func(t *testing.T) {
			mine := set(t, c.namespace, c.set, c.spec)
			errs := checkNamesTaken(&mine, []v1.CocoonSet{set(t, c.namespace2, c.set2, c.spec2)})
			if (len(errs) > 0) != (c.field != "") || len(errs) > 0 && errs[0].Field != c.field {
				t.Errorf("%v, want %q", errs, c.field)
			}
		})
	}
}

func TestCheckSet(t *testing.T) {
	long := strings.Repeat("n", 50)
	for _, c := range []struct{ namespace, name, spec, field string }{ // field "": the set is accepted
		{"default", "s", `{nodeName: n1, agent: {image: "team/base:v1", storage: 10Gi, envFrom: [{secretRef: {name: e}}], resources: {requests: {cpu: 1}, limits: {cpu: 2, memory: 1Gi}}}}`, ""},
		{"default", "s", `{agent: {mode: run, image: "https://example.com/a.qcow2"}, toolboxes: [{name: w, mode: static, staticIP: "10.0.0.9", staticVMID: x}]}`, ""},
		{"default", long, `{agent: {image: a}}`, ""},
		{"another-namespace", long, `{agent: {image: a, replicas: 10}}`, ""}, // VMs of such pods have names with a hash
		{"default", long + long, `{agent: {image: a}}`, "metadata.name"},
		{"prod", "s", `{agent: {mode: clone, image: "vk-prod-db"}}`, ""},
		{"prod", "s", `{agent: {mode: clone, image: "vk-victim-db:hibernate"}}`, "spec.agent.image"},
		{"prod", "s", `{agent: {image: a}, toolboxes: [{name: t, mode: clone, image: "victim/vk-victim-db"}]}`, "spec.toolboxes[0].image"},
		{"default", "s", `{agent: {image: a}, toolboxes: [{name: ` + long + long + `, image: x, mode: run}]}`, "spec.toolboxes[0].name"},
		{"default", "s", `{agent: {image: a}, toolboxes: [{name: ` + long + long[:10] + `, mode: static, staticIP: "::1", staticVMID: x}]}`, ""},
		{"default", "s", `{nodeName: "a b", agent: {image: a}}`, "spec.nodeName"},
		{"default", "s", `{agent: {mode: clone, image: "a:` + strings.Repeat("t", 100) + `"}}`, "spec.agent.image"},
		{"default", "s", `{agent: {mode: clone, image: "a@sha256:00"}}`, "spec.agent.image"},
		{"default", "s", `{agent: {mode: run, image: "a b"}}`, "spec.agent.image"},
		{"default", "s", `{agent: {image: a, storage: "-1Gi"}}`, "spec.agent.storage"},
		{"default", "s", `{agent: {image: a, storage: "0"}}`, "spec.agent.storage"},
		{"default", "s", `{agent: {image: a, network: " lab"}}`, "spec.agent.network"},
		{"default", "s", `{agent: {image: a, resources: {limits: {cpu: -1}}}}`, "spec.agent.resources.limits[cpu]"},
		{"default", "s", `{agent: {image: a, resources: {requests: {memory: 2Gi}, limits: {memory: 1Gi}}}}`, "spec.agent.resources.requests[memory]"},
		{"default", "s", `{agent: {image: a, resources: {limits: {"nvidia.com/gpu": 1}}}}`, "spec.agent.resources.limits"},
		{"default", "s", `{agent: {image: a, resources: {claims: [{name: x}]}}}`, "spec.agent.resources.claims"},
		{"default", "s", `{agent: {image: a, envFrom: [{}]}}`, "spec.agent.envFrom[0]"},
		{"default", "s", `{agent: {image: a, envFrom: [{configMapRef: {name: "A B"}}]}}`, "spec.agent.envFrom[0].configMapRef.name"},
		{"default", "s", `{agent: {image: a, serviceAccountName: A_B}}`, "spec.agent.serviceAccountName"},
		{"default", "s", `{agent: {image: a}, toolboxes: [{name: t, mode: clone, image: "h:1/b"}]}`, "spec.toolboxes[0].image"},
		{"default", "s", `{agent: {image: a}, toolboxes: [{name: t, mode: run, image: b, storage: "0"}]}`, "spec.toolboxes[0].storage"},
		{"default", "s", `{agent: {image: a}, toolboxes: [{name: t, mode: static, staticIP: "10.0.0.300", staticVMID: x}]}`, "spec.toolboxes[0].staticIP"},
	} {
		s := set(t, c.namespace, c.name, c.spec)
		errs := checkSet(&s)
		if c.field == "" && len(errs) > 0 || c.field != "" && (len(errs) != 1 || errs[0].Field != c.field) {
			t.Errorf("%s/%s %s\nerrors %v, want one on field %q", c.namespace, c.name, c.spec, errs, c.field)
		}
	}
}

// An update is not refused for errors that the stored set already has, so that its other fields can be changed.
func TestFresh(t *testing.T) {
	old := set(t, "default", "s", `{nodeName: "a b", agent: {image: a}}`)
	now := set(t, "default", "s", `{nodeName: "a b", suspend: true, agent: {image: a, storage: "0"}}`)
	errs := fresh(checkSet(&now), checkSet(&old))
	if len(errs) != 1 || errs[0].Field != "spec.agent.storage" {
		t.Error(errs)
	}
}

func TestComplete(t *testing.T) {
	full := `
metadata: {annotations: {vm.cocoonstack.io/name: vk-ns-p}}
spec: {nodeSelector: {cocoonstack.io/pool: default}, tolerations: [{key: virtual-kubelet.io/provider, operator: Equal, value: cocoon, effect: NoSchedule}]}`
	for name, c := range map[string]struct{ pod, want string }{
		"by toleration": {`spec: {tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]}`, `
metadata: {annotations: {vm.cocoonstack.io/name: vk-ns-p}}
spec: {nodeSelector: {cocoonstack.io/pool: default}, tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]}`},
		"by the pool's label": {`metadata: {labels: {cocoonstack.io/pool: gpu}}`, `
metadata: {labels: {cocoonstack.io/pool: gpu}, annotations: {vm.cocoonstack.io/name: vk-ns-p}}
spec: {nodeSelector: {cocoonstack.io/pool: gpu}, tolerations: [{key: virtual-kubelet.io/provider, operator: Equal, value: cocoon, effect: NoSchedule}]}`},
		"by the pool's annotation": {`metadata: {annotations: {cocoonstack.io/pool: gpu, vm.cocoonstack.io/name: mine}}`, `
metadata: {annotations: {cocoonstack.io/pool: gpu, vm.cocoonstack.io/name: mine}}
spec: {nodeSelector: {cocoonstack.io/pool: gpu}, tolerations: [{key: virtual-kubelet.io/provider, operator: Equal, value: cocoon, effect: NoSchedule}]}`},
		"complete already": {full, full},
		"volumes for objects that annotations name": {`
metadata: {annotations: {vm.cocoonstack.io/name: mine, VirtletSSHKeySource: secret/keys}}
spec: {nodeName: a, tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]}`, `
metadata: {annotations: {vm.cocoonstack.io/name: mine, VirtletSSHKeySource: secret/keys}}
spec: {nodeName: a, tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}], volumes: [{name: cocoon-source-0, secret: {secretName: keys, optional: true}}]}`},
		"pod selects its nodes": {`
metadata: {annotations: {cocoonset.cocoonstack.io/mode: run}}
spec: {nodeSelector: {kubernetes.io/hostname: a}}`, `
metadata: {annotations: {cocoonset.cocoonstack.io/mode: run, vm.cocoonstack.io/name: vk-ns-p}}
spec: {nodeSelector: {kubernetes.io/hostname: a}, tolerations: [{key: virtual-kubelet.io/provider, operator: Equal, value: cocoon, effect: NoSchedule}]}`},
		"VM with state stays on an unreachable node": {`
metadata: {annotations: {cocoonset.cocoonstack.io/managed: "true"}}
spec: {nodeName: a, tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}, {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 300}, {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 10}]}`, `
metadata: {annotations: {cocoonset.cocoonstack.io/managed: "true", vm.cocoonstack.io/name: vk-ns-p}}
spec: {nodeName: a, tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}, {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute}, {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 10}]}`},
	} {
		t.Run(name, func(t *testing.T) {
			read := func(text string) *corev1.Pod {
				pod := &corev1.Pod{}
				if err := yaml.UnmarshalStrict([]byte(text), pod); err != nil {
					t.Fatal(err)
				}
				pod.Namespace, pod.Name = "ns", "p"
				return pod
			}
			pod := read(c.pod)
			before, _ := yaml.Marshal(pod)
			changed := complete(pod)
			got, _ := yaml.Marshal(pod)
			want, _ := yaml.Marshal(read(c.want))
			if string(got) != string(want) || changed != (string(before) != string(got)) {
				t.Errorf("changed %v:\n%s\nwant\n%s", changed, got, want)
			}
			if complete(pod) {
				t.Error("a second call changes the pod again")
			}
		})
	}
}

// A pod that tolerates every taint, or another provider's, is not ours.
func TestTolerates(t *testing.T) {
	for _, c := range []struct {
		t    corev1.Toleration
		want bool
	}{
		{corev1.Toleration{Key: "virtual-kubelet.io/provider", Operator: corev1.TolerationOpExists}, true},
		{corev1.Toleration{Key: "virtual-kubelet.io/provider", Value: "cocoon"}, true},
		{corev1.Toleration{Key: "virtual-kubelet.io/provider", Value: "azure"}, false},
		{corev1.Toleration{Operator: corev1.TolerationOpExists}, false},
	} {
		if got := tolerates([]corev1.Toleration{c.t}); got != c.want {
			t.Errorf("%+v: %v", c.t, got)
		}
	}
}
