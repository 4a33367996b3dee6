//go:build e2e

package deploy_test

import (
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// objects returns the objects of a stream of manifests, by kind, namespace and name.
func objects(t *testing.T, text string) map[string]map[string]any {
	t.Helper()
	all := map[string]map[string]any{}
	for doc := range strings.SplitSeq("\n"+text, "\n---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		if len(o) > 0 {
			m := o["metadata"].(map[string]any)
			all[fmt.Sprint(o["kind"], " ", m["namespace"], "/", m["name"])] = o
		}
	}
	return all
}

// plain removes what the chart adds to every object.
func plain(o map[string]any) map[string]any {
	m := o["metadata"].(map[string]any)
	for field, keys := range map[string][]string{
		"labels":      {"app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "helm.sh/chart"},
		"annotations": {"helm.sh/resource-policy"},
	} {
		if values, ok := m[field].(map[string]any); ok {
			for _, k := range keys {
				delete(values, k)
			}
			if len(values) == 0 {
				delete(m, field)
			}
		}
	}
	if o["kind"] == "Deployment" {
		for _, c := range o["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)["containers"].([]any) {
			delete(c.(map[string]any), "imagePullPolicy")
		}
	}
	return o
}

// TestChart compares the chart with the kustomization, and installs the chart.
func TestChart(t *testing.T) {
	helm, chart := need.Built(t, "bin/helm", "make helm"), "./chart"
	k := kubetest.Up(t, "--nodes", "2", "--with", "epoch", "--epoch-port", epochPort)
	env := []string{"KUBECONFIG=" + filepath.Join(k.Dir, "kubeconfig"), "HOME=" + t.TempDir(), "PATH=/usr/bin:/bin"}
	try := func(args ...string) (string, error) {
		cmd := exec.Command(helm, args...)
		cmd.Env = env
		out, err := cmd.Output()
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return string(out), err
	}
	run := func(args ...string) string {
		t.Helper()
		out, err := try(args...)
		if err != nil {
			t.Fatalf("helm %v: %v\n%s", args, err, out)
		}
		return out
	}
	run("lint", "--strict", chart)

	// With its defaults, the chart installs the same objects as the kustomization.
	want, got := objects(t, k.Kubectl(t, "", "kustomize", ".")), objects(t, run("template", "cocoon", chart, "--namespace", kubetest.Namespace))
	delete(want, "Namespace <nil>/"+kubetest.Namespace) // helm creates it on request
	if w, g := slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got)); !slices.Equal(w, g) {
		t.Fatalf("the chart has\n%s\nand the kustomization\n%s", strings.Join(g, "\n"), strings.Join(w, "\n"))
	}
	for name, o := range want {
		if is := plain(got[name]); !reflect.DeepEqual(is, o) {
			t.Errorf("%s of the chart is\n%v\nand of the kustomization\n%v", name, is, o)
		}
	}

	// So it does for KubeVirt's objects and the RuntimeClass, which neither installs by default.
	if _, ok := want["Namespace <nil>/kubevirt"]; ok {
		t.Error("KubeVirt's objects are installed by default")
	}
	for folder, flag := range map[string]string{"kubevirt": "kubevirt.enabled=true", "runtimeclass": "runtimeClass.enabled=true"} {
		with := objects(t, run("template", "cocoon", chart, "--namespace", kubetest.Namespace, "--set", flag))
		for name, o := range objects(t, k.Kubectl(t, "", "kustomize", folder)) {
			if with[name] == nil {
				t.Errorf("%s is not in the chart", name)
			} else if is := plain(with[name]); !reflect.DeepEqual(is, o) {
				t.Errorf("%s of the chart is\n%v\nand of the kustomization\n%v", name, is, o)
			}
		}
	}

	// The API server accepts all objects, also in another namespace.
	k.Kubectl(t, "", "create", "namespace", "elsewhere")
	all := []string{
		"--namespace", "elsewhere", "--set", "runtimeClass.enabled=true,scheduler.enabled=true,virtualNodes.approve.enabled=true,virtualNodes.wide.enabled=true,epoch.enabled=true,epoch.tlsSecret=tls,epoch.caSecret=tls,epoch.storage.size=9Gi,manager.from[0].ipBlock.cidr=10.0.0.0/8,manager.clients.configMap=clients,epoch.url=https://registry.example:5000,image.registry=registry.example/cocoon,image.tag=v1",
		"--set-json", "epoch.env.EPOCH_QUOTA=96636764160",
	} // in the form that a number from a values file has
	text := run(append([]string{"template", "cocoon", chart}, all...)...)
	k.Kubectl(t, text, "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
	if strings.Contains(text, kubetest.Namespace) {
		t.Errorf("not all is in the namespace of the release\n%s", text)
	}
	for _, asked := range []string{
		"image: registry.example/cocoon/cocoon-manager:v1", "image: registry.example/cocoon/epoch:v1", "value: https://registry.example:5000", `value: "96636764160"`, "storage: 9Gi",
		"cidr: 10.0.0.0/8", "value: /etc/cocoon/clients/ca.crt", "value: /etc/cocoon/registry/ca.crt", "value: /etc/epoch-tls/tls.key", "scheme: HTTPS",
	} {
		if !strings.Contains(text, asked) {
			t.Errorf("%s is not in\n%s", asked, text)
		}
	}

	// The chart can be installed, upgraded and uninstalled. The custom resources and their objects stay. The control plane already
	// has the custom resources of `cocoon up`, which the release takes over.
	run(append([]string{"install", "cocoon", chart, "--take-ownership", "--server-side=true", "--force-conflicts"}, all...)...)
	run("upgrade", "cocoon", chart, "--namespace", "elsewhere", "--reuse-values", "--server-side=true", "--force-conflicts", "--set", "manager.replicas=3")
	if n := k.Kubectl(t, "", "get", "deployment", "cocoon-manager", "-n", "elsewhere", "-o", "jsonpath={.spec.replicas}"); n != "3" {
		t.Errorf("there are to be %s managers, want 3", n)
	}
	run("uninstall", "cocoon", "--namespace", "elsewhere")
	k.Kubectl(t, "", "get", "crd", "cocoonsets.cocoonset.cocoonstack.io")
	if out, err := k.TryKubectl(t, "", "get", "clusterrole", "cocoon-manager"); err == nil {
		t.Errorf("uninstalled, it leaves %s", out)
	}

	t.Run("in guests", func(t *testing.T) { inGuests(t, k, run) })

	for _, bad := range []string{"manager.replicas=-1", "manager.replica=2", "image.pullPolicy=Often", "epoch.url=registry", "epoch.env.PATH=/", "epoch.replicas=2", "manager.client=a", "image.registry="} {
		key, _, _ := strings.Cut(bad, "=")
		_, err := try("template", "cocoon", chart, "--set", bad)
		if err == nil || !strings.Contains(err.Error(), key[strings.LastIndexByte(key, '.')+1:]) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
