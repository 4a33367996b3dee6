//go:build e2e

package kubevirt_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	authv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/deploy/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// spec is the spec of an instance as KubeVirt's own examples have it.
const spec = `
    terminationGracePeriodSeconds: 0
    domain:
      devices:
        disks: [{name: boot, disk: {bus: virtio}}, {name: seed, disk: {bus: virtio}}]
        interfaces: [{name: default, masquerade: {}, ports: [{port: 22}]}]
        rng: {}
      memory: {guest: 128Mi}
      resources: {}
    networks: [{name: default, pod: {}}]
    volumes:
    - {name: boot, containerDisk: {image: "cocoon/disk-demo:latest"}}
    - {name: seed, cloudInitNoCloud: {userData: "#!/bin/sh\n"}}
`

func instance(name, version string) string {
	return "apiVersion: kubevirt.io/" + version + "\nkind: VirtualMachineInstance\nmetadata: {name: " + name + "}\nspec:" + strings.ReplaceAll(spec, "\n    ", "\n  ")
}

func machine(name, running string) string {
	return "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata: {name: " + name + "}\nspec:\n" + running +
		"  template:\n    metadata: {labels: {app: web}}\n    spec:" + strings.ReplaceAll(spec, "\n    ", "\n      ")
}

func set(name, more string) string {
	return "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstanceReplicaSet\nmetadata: {name: " + name + "}\nspec:\n  selector: {matchLabels: {app: web}}\n" + more +
		"  template:\n    metadata: {labels: {app: web}}\n    spec:" + strings.ReplaceAll(spec, "\n    ", "\n      ")
}

// The kinds are what kubectl, virtctl and other people's tools expect: versions, columns, short names, and the rules of their schemas.
func TestKinds(t *testing.T) {
	c := kubetest.Up(t)
	apply := func(text string, extra ...string) (string, error) {
		return c.TryKubectl(t, text, append([]string{"apply", "--server-side", "-f", "-"}, extra...)...)
	}
	for _, text := range kubevirt.Kinds() {
		if out, err := apply(string(text)); err != nil {
			t.Fatal(out)
		}
	}
	for _, plural := range []string{"kubevirts", "virtualmachines", "virtualmachineinstances", "virtualmachineinstancereplicasets", "virtualmachineinstancemigrations", "virtualmachineinstancepresets"} {
		c.Kubectl(t, "", "wait", "--for=condition=Established", "--timeout=240s", "crd/"+plural+".kubevirt.io")
		if out := c.Kubectl(t, "", "get", "crd", plural+".kubevirt.io", "-o", "jsonpath={.status.storedVersions} {.status.conditions[?(@.type=='NonStructuralSchema')].message}"); strings.TrimSpace(out) != `["v1"]` {
			t.Errorf("%s: %s", plural, out)
		}
	}

	for what, tc := range map[string]struct{ text, refused string }{
		"strategy":    {machine("a", "  runStrategy: Halted\n"), ""},
		"running":     {machine("b", "  running: false\n"), ""},
		"both":        {machine("x", "  running: false\n  runStrategy: Halted\n"), "exactly one of runStrategy and running"},
		"neither":     {machine("x", ""), "exactly one of runStrategy and running"},
		"no template": {"apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata: {name: x}\nspec: {runStrategy: Halted}\n", "spec.template"},
		"instance":    {instance("i", "v1"), ""},
		"set":         {set("s", ""), ""},
		"no selector": {strings.Replace(set("x", ""), "selector: {matchLabels: {app: web}}", "paused: true", 1), "spec.selector"},
		"less than 0": {set("x", "  replicas: -1\n"), "replicas must be at least 0"},
		"unknown":     {strings.Replace(instance("x", "v1"), "rng: {}", "rnd: {}", 1), "spec.domain.devices.rnd"},
	} {
		out, err := apply(tc.text)
		if (err != nil) != (tc.refused != "") || !strings.Contains(out, tc.refused) {
			t.Errorf("%s: %v: %s", what, err, out)
		}
	}
	if out := c.Kubectl(t, "", "get", "vm", "a", "-o", "jsonpath={.spec.template.metadata.labels.app}"); out != "web" {
		t.Errorf("the labels of the template became %q", out)
	}
	if out, err := c.TryKubectl(t, "", "patch", "vmi", "i", "--type=merge", "-p", `{"spec":{"hostname":"other"}}`); err == nil || !strings.Contains(out, "cannot change") {
		t.Errorf("the spec of an instance: %v: %s", err, out)
	}
	if out, err := c.TryKubectl(t, "", "patch", "vmirs", "s", "--type=merge", "-p", `{"spec":{"selector":{"matchLabels":{"tier":"front"}}}}`); err == nil || !strings.Contains(out, "create another set") {
		t.Errorf("the selector of a set: %v: %s", err, out)
	}
	// A set that gives no number wants one, and can be scaled. Autoscalers find its pods by the selector of its status.
	c.Kubectl(t, "", "patch", "vmirs", "s", "--type=merge", "--subresource=status", "-p", `{"status":{"replicas":1,"readyReplicas":1,"labelSelector":"app=web"}}`)
	c.Kubectl(t, "", "scale", "vmirs", "s", "--current-replicas=1", "--replicas=3")
	if out := c.Kubectl(t, "", "get", "vmirs", "s", "--subresource=scale", "-o", "jsonpath={.spec.replicas} {.status.replicas} {.status.selector}"); out != "3 1 app=web" {
		t.Errorf("the scale of a set: %s", out)
	}
	// The status of an instance is written with the instance, that of a machine is not.
	status := `{"metadata":{"labels":{"is":"there"}},"status":{"phase":"Running","interfaces":[{"ipAddress":"10.1.2.3"}],"nodeName":"n","conditions":[{"type":"Ready","status":"True"}]}}`
	c.Kubectl(t, "", "patch", "vmi", "i", "--type=merge", "-p", status)
	ofVM := `{"status":{"printableStatus":"Running","conditions":[{"type":"Ready","status":"True"}]}}`
	c.Kubectl(t, "", "patch", "vm", "a", "--type=merge", "-p", ofVM)
	c.Kubectl(t, "", "patch", "vm", "b", "--type=merge", "--subresource=status", "-p", ofVM)

	for _, tc := range []struct {
		args []string
		want [][]string
	}{
		{[]string{"get", "vms"}, [][]string{{"NAME", "AGE", "STATUS", "READY"}, {"a", "*"}, {"b", "*", "Running", "True"}}},
		{[]string{"get", "vmis", "-o", "wide"}, [][]string{
			{"NAME", "AGE", "PHASE", "IP", "NODENAME", "READY", "LIVE-MIGRATABLE", "PAUSED"}, {"i", "*", "Running", "10.1.2.3", "n", "True"},
		}},
		{[]string{"get", "vmirss"}, [][]string{{"NAME", "DESIRED", "CURRENT", "READY", "AGE"}, {"s", "3", "1", "1", "*"}}},
		{[]string{"get", "all", "-o", "name", "--field-selector", "metadata.name=i"}, [][]string{{"virtualmachineinstance.kubevirt.io/i"}}},
	} {
		var got [][]string
		for line := range strings.Lines(c.Kubectl(t, "", tc.args...)) {
			got = append(got, strings.Fields(line))
		}
		for i, row := range got {
			if at := slices.Index(got[0], "AGE"); i > 0 && at >= 0 {
				row[at] = "*"
			}
		}
		if !slices.EqualFunc(got, tc.want, slices.Equal[[]string]) {
			t.Errorf("kubectl %v: %q, want %q", tc.args, got, tc.want)
		}
	}
	if out, err := apply(instance("old", "v1alpha3")); err != nil || !strings.Contains(out, "deprecated") {
		t.Errorf("v1alpha3: %v: %s", err, out)
	}
	if out := c.Kubectl(t, "", "get", "vmi", "old", "-o", "jsonpath={.apiVersion}"); out != "kubevirt.io/v1" {
		t.Errorf("v1alpha3 is stored as %s", out)
	}
}

// Who may edit a namespace may use its VMs, who may view it may look, and the manager reads no Secret.
func TestRights(t *testing.T) {
	c := kubetest.Up(t)
	for _, text := range append(kubevirt.Kinds(), kubevirt.Rights, kubevirt.ManagerRights) {
		c.Kubectl(t, string(text), "apply", "--server-side", "-f", "-")
	}
	c.Kubectl(t, "", "create", "clusterrolebinding", "manager", "--clusterrole=cocoon-manager-kubevirt", "--user=manager")
	for _, role := range []string{"admin", "edit", "view"} {
		c.Kubectl(t, "", "create", "rolebinding", role, "--clusterrole="+role, "--user="+role, "--namespace=default")
	}
	api, err := kubernetes.NewForConfig(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	reviews := api.AuthorizationV1().SubjectAccessReviews()
	can := func(user, verb, resource string) string {
		t.Helper()
		resource, part, _ := strings.Cut(resource, "/")
		resource, group, _ := strings.Cut(resource, ".")
		got, err := reviews.Create(t.Context(), &authv1.SubjectAccessReview{Spec: authv1.SubjectAccessReviewSpec{
			User: user, Groups: []string{"system:authenticated"},
			ResourceAttributes: &authv1.ResourceAttributes{Namespace: "default", Verb: verb, Group: group, Resource: resource, Subresource: part},
		}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(got.Status.Allowed)
	}
	pools := "virtualmachinepools.pool.kubevirt.io"
	kube, sub, types, snap, clones, cdi := ".kubevirt.io", ".subresources.kubevirt.io", ".instancetype.kubevirt.io", ".snapshot.kubevirt.io", "virtualmachineclones.clone.kubevirt.io", ".cdi.kubevirt.io"
	kubetest.Eventually(t, "whether the controller has aggregated all three roles", func() string {
		return can("edit", "update", "virtualmachines"+sub+"/start") + can("admin", "deletecollection", "virtualmachines"+kube) +
			can("view", "list", "virtualmachineinstancereplicasets"+kube)
	}, "truetruetrue")
	for _, tc := range []struct {
		user, verb, resource, want string
	}{
		{"admin", "deletecollection", "virtualmachines" + kube, "true"},
		{"admin", "get", "virtualmachineinstances" + sub + "/console", "true"},
		{"admin", "get", "virtualmachineinstances" + sub + "/vnc", "true"},
		{"edit", "get", "virtualmachineinstances" + sub + "/vnc/screenshot", "true"},
		{"view", "get", "virtualmachineinstances" + sub + "/vnc", "false"},
		{"view", "get", "virtualmachineinstances" + sub + "/vnc/screenshot", "false"},
		{"edit", "create", "virtualmachineinstances" + kube, "true"},
		{"edit", "deletecollection", "virtualmachines" + kube, "false"},
		{"admin", "deletecollection", "virtualmachineinstancereplicasets" + kube, "true"},
		{"edit", "create", "virtualmachineinstancereplicasets" + kube, "true"},
		{"edit", "patch", "virtualmachineinstancereplicasets" + kube + "/scale", "true"},
		{"edit", "update", "virtualmachineinstancereplicasets" + kube + "/status", "false"},
		{"view", "list", "virtualmachineinstancereplicasets" + kube, "true"},
		{"view", "get", "virtualmachineinstancereplicasets" + kube + "/scale", "true"},
		{"view", "patch", "virtualmachineinstancereplicasets" + kube + "/scale", "false"},
		{"manager", "update", "virtualmachineinstancereplicasets" + kube + "/status", "true"},
		{"manager", "patch", "virtualmachineinstancereplicasets" + kube, "false"},
		{"admin", "deletecollection", pools, "true"},
		{"edit", "create", pools, "true"},
		{"edit", "patch", pools + "/scale", "true"},
		{"edit", "update", pools + "/status", "false"},
		{"view", "get", pools + "/scale", "true"},
		{"view", "update", pools + "/scale", "false"},
		{"manager", "update", pools + "/status", "true"},
		{"manager", "create", pools, "false"},
		{"manager", "delete", "virtualmachines" + kube, "true"},
		{"edit", "create", "virtualmachineinstancemigrations" + kube, "true"},
		{"view", "list", "virtualmachineinstancepresets" + kube, "true"},
		{"view", "create", "virtualmachineinstancemigrations" + kube, "false"},
		{"admin", "deletecollection", "virtualmachinesnapshots" + snap, "true"},
		{"edit", "create", "virtualmachinesnapshots" + snap, "true"},
		{"edit", "create", "virtualmachinesnapshotcontents" + snap, "false"},
		{"edit", "delete", "virtualmachinesnapshotcontents" + snap, "true"},
		{"view", "list", "virtualmachinesnapshotcontents" + snap, "true"},
		{"view", "create", "virtualmachinesnapshots" + snap, "false"},
		{"edit", "create", "virtualmachinerestores" + snap, "true"},
		{"edit", "create", clones, "true"},
		{"view", "create", clones, "false"},
		{"view", "watch", clones, "true"},
		{"manager", "update", clones + "/status", "true"},
		{"manager", "create", clones, "false"},
		{"manager", "create", "virtualmachinerestores" + snap, "true"},
		{"manager", "delete", "virtualmachinesnapshots" + snap, "false"},
		{"view", "list", "virtualmachinerestores" + snap, "true"},
		{"manager", "update", "virtualmachinerestores" + snap + "/status", "true"},
		{"manager", "patch", "virtualmachinerestores" + snap, "false"},
		{"manager", "create", "virtualmachines" + kube, "true"},
		{"manager", "create", "persistentvolumeclaims", "true"},
		{"manager", "update", "virtualmachinesnapshots" + snap + "/status", "true"},
		{"manager", "list", "virtualmachinesnapshotcontents" + snap, "false"},
		{"manager", "create", "volumesnapshots.snapshot.storage.k8s.io", "true"},
		{"manager", "delete", "volumesnapshots.snapshot.storage.k8s.io", "false"},
		{"edit", "update", "virtualmachines" + sub + "/start", "true"},
		{"edit", "get", "virtualmachines" + sub + "/portforward", "true"},
		{"edit", "update", "virtualmachines" + kube + "/status", "false"},
		{"view", "watch", "virtualmachines" + kube, "true"},
		{"view", "update", "virtualmachines" + sub + "/start", "false"},
		{"view", "get", "virtualmachineinstances" + sub + "/console", "false"},
		{"view", "get", "virtualmachines" + sub + "/portforward", "false"},
		{"edit", "update", "expand-vm-spec" + sub, "true"},
		{"edit", "create", "virtualmachineinstancetypes" + types, "true"},
		{"edit", "deletecollection", "virtualmachinepreferences" + types, "false"},
		{"view", "list", "virtualmachinepreferences" + types, "true"},
		{"view", "create", "virtualmachineinstancetypes" + types, "false"},
		{"view", "get", "virtualmachines" + sub + "/expand-spec", "true"},
		{"view", "update", "expand-vm-spec" + sub, "true"},
		{"anybody", "list", "virtualmachineclusterinstancetypes" + types, "true"},
		{"anybody", "get", "virtualmachineclusterpreferences" + types, "true"},
		{"anybody", "create", "virtualmachineclusterpreferences" + types, "false"},
		{"anybody", "list", "virtualmachineinstancetypes" + types, "false"},
		{"anybody", "get", "version" + sub, "true"},
		{"anybody", "list", "kubevirts" + kube, "true"},
		{"anybody", "get", "virtualmachines" + kube, "false"},
		{"manager", "update", "virtualmachines" + kube + "/status", "true"},
		{"manager", "create", "pods/attach", "true"},
		{"manager", "create", "controllerrevisions.apps", "true"},
		{"manager", "update", "controllerrevisions.apps", "false"},
		{"manager", "create", "virtualmachineinstancetypes" + types, "false"},
		{"manager", "get", "persistentvolumeclaims", "true"},
		{"manager", "list", "persistentvolumeclaims", "true"},
		{"manager", "create", "persistentvolumeclaims", "true"},
		{"manager", "create", "datavolumes" + cdi, "true"},
		{"manager", "update", "datavolumes" + cdi, "false"},
		{"manager", "update", "datavolumes" + cdi + "/status", "true"},
		{"manager", "list", "events", "true"},
		{"manager", "list", "csistoragecapacities.storage.k8s.io", "true"},
		{"edit", "create", "datavolumes" + cdi, "true"},
		{"edit", "update", "datavolumes" + cdi + "/status", "false"},
		{"edit", "deletecollection", "datavolumes" + cdi, "false"},
		{"admin", "deletecollection", "datavolumes" + cdi, "true"},
		{"view", "list", "datavolumes" + cdi, "true"},
		{"view", "create", "datavolumes" + cdi, "false"},
		{"anybody", "get", "datavolumes" + cdi, "false"},
		{"manager", "patch", "persistentvolumeclaims", "true"},
		{"manager", "delete", "persistentvolumeclaims", "false"},
		{"manager", "get", "storageclasses.storage.k8s.io", "true"},
		{"edit", "update", "virtualmachines" + sub + "/addvolume", "true"},
		{"edit", "update", "virtualmachineinstances" + sub + "/removevolume", "true"},
		{"edit", "update", "virtualmachineinstances" + sub + "/freeze", "true"},
		{"view", "update", "virtualmachineinstances" + sub + "/unfreeze", "false"},
		{"view", "update", "virtualmachineinstances" + sub + "/addvolume", "false"},
		{"manager", "create", "secrets", "true"},
		{"manager", "get", "secrets", "false"},
		{"manager", "list", "secrets", "false"},
		{"manager", "delete", "secrets", "false"},
	} {
		kubetest.Eventually(t, fmt.Sprintf("may %s %s %s: it", tc.user, tc.verb, tc.resource), func() string { return can(tc.user, tc.verb, tc.resource) }, tc.want)
	}
}
