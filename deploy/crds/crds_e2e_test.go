//go:build e2e

package crds_test

import (
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// Each rule of the schema rejects invalid objects, and the error names the field.
func TestSchema(t *testing.T) {
	client, err := dynamic.NewForConfig(kubetest.Start(t))
	if err != nil {
		t.Fatal(err)
	}
	create := func(resource, text string) (*unstructured.Unstructured, error) {
		t.Helper()
		o := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
			t.Fatal(err)
		}
		o.SetAPIVersion(v1.GroupVersion.String())
		o.SetKind(map[string]string{"cocoonsets": "CocoonSet", "cocoonhibernations": "CocoonHibernation", "vmplacements": "VMPlacement"}[resource])
		return client.Resource(gvr(resource)).Namespace("default").Create(t.Context(), o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict})
	}
	const set = "metadata: {generateName: s-}\nspec: "
	for _, c := range []struct{ resource, text, field string }{ // field "": the object is accepted
		{"cocoonsets", set + `{agent: {image: "base"}}`, ""},
		{"cocoonsets", set + `{agent: {image: "team/base:v1"}, toolboxes: [{name: win, mode: static, staticIP: 10.0.0.9, staticVMID: x, vncPort: 5900}]}`, ""},
		{"cocoonsets", set + `{agent: {mode: run, image: "https://example.com/a.qcow2", os: windows, storage: 20Gi, resources: {limits: {cpu: "2"}}}}`, ""},
		{"cocoonsets", set + `{}`, "spec.agent"},
		{"cocoonsets", set + `{agent: {}}`, "spec.agent.image"},
		{"cocoonsets", set + `{agent: {image: ""}}`, "spec.agent.image"},
		{"cocoonsets", set + `{agent: {image: a, replicas: -1}}`, "spec.agent.replicas"},
		{"cocoonsets", set + `{agent: {image: a, replicas: 2147483647}}`, "spec.agent.replicas"},
		{"cocoonsets", set + `{agent: {image: a, mode: static}}`, "spec.agent.mode"},
		{"cocoonsets", set + `{agent: {image: a, os: plan9}}`, "spec.agent.os"},
		{"cocoonsets", set + `{agent: {image: a, backend: xen}}`, "spec.agent.backend"},
		{"cocoonsets", set + `{agent: {image: a, connType: telnet}}`, "spec.agent.connType"},
		{"cocoonsets", set + `{agent: {image: a, probePort: 65536}}`, "spec.agent.probePort"},
		{"cocoonsets", set + `{agent: {image: a, storage: lots}}`, "spec.agent.storage"},
		{"cocoonsets", set + `{snapshotPolicy: sometimes, agent: {image: a}}`, "spec.snapshotPolicy"},
		{"cocoonsets", set + `{nodePool: "a b", agent: {image: a}}`, "spec.nodePool"},
		{"cocoonsets", set + `{unknown: 1, agent: {image: a}}`, "spec.unknown"},
		{"cocoonsets", set + `{agent: {image: "host:5000/a:b"}}`, "spec.agent.image"},
		{"cocoonsets", set + `{agent: {image: "a@sha256:0000"}}`, "spec.agent.image"},
		{"cocoonsets", set + `{agent: {image: a, backend: firecracker}}`, "spec.agent.mode"},
		{"cocoonsets", set + `{agent: {image: a, mode: run, os: windows, backend: firecracker}}`, "spec.agent.os"},
		{"cocoonsets", set + `{agent: {image: "http://a/b", mode: run, backend: firecracker}}`, "spec.agent.image"},
		{"cocoonsets", set + `{hibernatePolicy: release, agent: {image: a, replicas: 1}}`, "spec.hibernatePolicy"},
		{"cocoonsets", set + `{hibernatePolicy: release, agent: {image: a}, toolboxes: [{name: t, image: b}]}`, "spec.hibernatePolicy"},
		{"cocoonsets", set + `{agent: {image: a}, toolboxes: [{name: t}]}`, "spec.toolboxes[0].image"},
		{"cocoonsets", set + `{agent: {image: a}, toolboxes: [{name: t, mode: static, staticVMID: x}]}`, "spec.toolboxes[0].staticIP"},
		{"cocoonsets", set + `{agent: {image: a}, toolboxes: [{name: t, mode: static, staticIP: 10.0.0.1}]}`, "spec.toolboxes[0].staticVMID"},
		{"cocoonsets", set + `{agent: {image: a}, toolboxes: [{name: T, image: b}]}`, "spec.toolboxes[0].name"},
		{"cocoonsets", set + `{agent: {image: a}, toolboxes: [{name: "7", image: b}]}`, "spec.toolboxes[0].name"},
		{"cocoonsets", set + `{agent: {image: a}, toolboxes: [{name: t, image: b}, {name: t, image: c}]}`, "spec.toolboxes[1]"},
		{"cocoonsets", set + `{agent: {image: a}, toolboxes: [{name: t, mode: clone, image: "h:1/b"}]}`, "spec.toolboxes[0].image"},
		{"cocoonsets", set + `{agent: {image: a, backend: qemu}, toolboxes: [{name: t, image: b, backend: cloud-hypervisor}]}`, "spec.toolboxes"},
		{"cocoonsets", set + `{agent: {image: a}, toolboxes: [{name: t, image: b, backend: cloud-hypervisor}]}`, ""},
		{"cocoonsets", set + `{agent: {image: a, backend: qemu}, toolboxes: [{name: t, image: b}]}`, ""},

		{"cocoonsets", set + `{sticky: 1h30m, agent: {image: a}}`, ""},
		{"cocoonsets", set + `{sticky: "true", agent: {image: a}}`, "spec.sticky"},

		{"vmplacements", "metadata: {name: vk-default-a}", ""},
		{"vmplacements", "metadata: {name: vk-default-b}\nspec: {waitSeconds: 5}", ""},
		{"vmplacements", "metadata: {name: vk-default-c}\nspec: {release: Never, waitSeconds: 5}", "spec.waitSeconds"},
		{"vmplacements", "metadata: {name: vk-default-c}\nspec: {waitSeconds: -1}", "spec.waitSeconds"},
		{"vmplacements", "metadata: {name: vk-default-c}\nspec: {release: Soon}", "spec.release"},

		{"cocoonhibernations", "metadata: {name: p}\nspec: {podRef: {name: p}, desire: Hibernate}", ""},
		{"cocoonhibernations", "metadata: {name: q}\nspec: {podRef: {name: p}, desire: Wake}", "spec.podRef.name"},
		{"cocoonhibernations", "metadata: {name: r}\nspec: {podRef: {name: r}, desire: Sleep}", "spec.desire"},
		{"cocoonhibernations", "metadata: {name: r}\nspec: {podRef: {name: r}}", "spec.desire"},
		{"cocoonhibernations", "metadata: {name: r}\nspec: {podRef: {name: ''}, desire: Wake}", "spec.podRef.name"},
	} {
		switch _, err := create(c.resource, c.text); {
		case c.field == "" && err != nil:
			t.Errorf("%s\nis refused: %v", c.text, err)
		case c.field != "" && err == nil:
			t.Errorf("%s\nis taken", c.text)
		case c.field != "" && !strings.Contains(err.Error(), c.field):
			t.Errorf("%s\nis refused without naming %s: %v", c.text, c.field, err)
		}
	}

	// Another program of this contract leaves out what is zero. Its status is accepted.
	if _, err := create("cocoonsets", "metadata: {name: status}\nspec: {agent: {image: a}, toolboxes: [{name: t, image: b}]}"); err != nil {
		t.Fatal(err)
	}
	patch := `{"status":{"observedGeneration":1,"phase":"Pending","desiredAgents":1,"agents":[{"role":"main","podName":"status-0","phase":"Pending"}],"toolboxes":[{"name":"t"}]}}`
	o, err := client.Resource(gvr("cocoonsets")).Namespace("default").Patch(t.Context(), "status", types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
	agents, _, _ := unstructured.NestedSlice(o.Object, "status", "agents")
	if phase, _, _ := unstructured.NestedString(o.Object, "status", "phase"); phase != "Pending" || len(agents) != 1 || agents[0].(map[string]any)["slot"] != int64(0) {
		t.Errorf("the status is %v", o.Object["status"])
	}

	// Defaults, and immutable fields.
	o, err = create("cocoonsets", "metadata: {name: defaults}\nspec: {snapshotCompatibilityClass: v4, agent: {image: a}, toolboxes: [{name: t, image: b}]}")
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]any{
		"snapshotPolicy": "always", "nodePool": "default", "hibernatePolicy": "retain",
		"agent.mode": "clone", "agent.os": "linux", "agent.replicas": int64(0), "agent.forkPolicy": "MainNode",
	} {
		if got, _, _ := unstructured.NestedFieldNoCopy(o.Object, append([]string{"spec"}, strings.Split(path, ".")...)...); got != want {
			t.Errorf("%s is %v by default, want %v", path, got, want)
		}
	}
	_ = unstructured.SetNestedField(o.Object, "v3", "spec", "snapshotCompatibilityClass")
	if _, err := client.Resource(gvr("cocoonsets")).Namespace("default").Update(t.Context(), o, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.snapshotCompatibilityClass") {
		t.Errorf("another class: %v", err)
	}
}

func gvr(resource string) schema.GroupVersionResource { return v1.GroupVersion.WithResource(resource) }
