//go:build e2e && kubevirt

package kubevirt_test

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/deploy/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

func pool(name, version, more string) string {
	return "apiVersion: pool.kubevirt.io/" + version + "\nkind: VirtualMachinePool\nmetadata: {name: " + name + "}\nspec:\n  selector: {matchLabels: {app: web}}\n" + more +
		"  virtualMachineTemplate:\n    metadata: {labels: {app: web}}\n    spec:\n      runStrategy: Halted\n      template:\n        spec:" + strings.ReplaceAll(spec, "\n    ", "\n          ")
}

// Pools can be scaled. Kinds that Cocoon does not offer can be listed, and are refused by their names.
func TestPools(t *testing.T) {
	c := kubetest.Up(t)
	for _, text := range [][]byte{kubevirt.Pools, kubevirt.Migrations, kubevirt.Presets, kubevirt.MigrationPolicies, kubevirt.Exports} {
		c.Kubectl(t, string(text), "apply", "--server-side", "-f", "-")
	}
	c.Kubectl(t, "", "wait", "--for=condition=Established", "--timeout=240s", "crd/virtualmachinepools.pool.kubevirt.io", "crd/virtualmachineinstancemigrations.kubevirt.io",
		"crd/virtualmachineinstancepresets.kubevirt.io", "crd/migrationpolicies.migrations.kubevirt.io", "crd/virtualmachineexports.export.kubevirt.io")
	if out := c.Kubectl(t, "", "get", "crd", "virtualmachinepools.pool.kubevirt.io", "-o", "jsonpath={.status.storedVersions} {.status.conditions[?(@.type=='NonStructuralSchema')].message}"); strings.TrimSpace(out) != `["v1beta1"]` {
		t.Errorf("the definition of pools: %s", out)
	}
	for what, tc := range map[string]struct{ text, refused string }{
		"a pool":      {pool("a", "v1beta1", ""), ""},
		"an old one":  {pool("old", "v1alpha1", ""), ""},
		"less than 0": {pool("x", "v1beta1", "  replicas: -1\n"), "spec.replicas"},
		"no template": {"{apiVersion: pool.kubevirt.io/v1beta1, kind: VirtualMachinePool, metadata: {name: x}, spec: {selector: {}}}", "spec.virtualMachineTemplate"},
		"sort":        {pool("x", "v1beta1", "  scaleInStrategy: {proactive: {selectionPolicy: {sortPolicy: Best}}}\n"), "sortPolicy"},
		"migration":   {"{apiVersion: kubevirt.io/v1, kind: VirtualMachineInstanceMigration, metadata: {name: x}, spec: {vmiName: web}}", "a VirtualMachineInstanceMigration is not offered: a VM that runs stays on its node"},
		"preset":      {"{apiVersion: kubevirt.io/v1, kind: VirtualMachineInstancePreset, metadata: {name: x}, spec: {selector: {}}}", "a VirtualMachineInstancePreset is not offered; use a VirtualMachineInstancetype"},
		"policy":      {"{apiVersion: migrations.kubevirt.io/v1alpha1, kind: MigrationPolicy, metadata: {name: x}, spec: {selectors: {}}}", "a MigrationPolicy is not offered"},
		"export":      {"{apiVersion: export.kubevirt.io/v1, kind: VirtualMachineExport, metadata: {name: x}, spec: {source: {apiGroup: '', kind: PersistentVolumeClaim, name: x}}}", "a VirtualMachineExport is not offered"},
		"old export":  {"{apiVersion: export.kubevirt.io/v1beta1, kind: VirtualMachineExport, metadata: {name: x}, spec: {source: {apiGroup: '', kind: PersistentVolumeClaim, name: x}}}", "a VirtualMachineExport is not offered"},
	} {
		out, err := c.TryKubectl(t, tc.text, "create", "-f", "-")
		if (err != nil) != (tc.refused != "") || !strings.Contains(out, tc.refused) {
			t.Errorf("%s: %v: %s", what, err, out)
		}
	}
	if out, err := c.TryKubectl(t, "", "patch", "vmpool", "a", "--type=merge", "-p", `{"spec":{"selector":{"matchLabels":{"tier":"front"}}}}`); err == nil || !strings.Contains(out, "create another pool") {
		t.Errorf("the selector of a pool: %v: %s", err, out)
	}
	// A pool that gives no number wants one, and can be scaled. Autoscalers find its pods by the selector of its status.
	c.Kubectl(t, "", "patch", "vmpools", "a", "--type=merge", "--subresource=status", "-p", `{"status":{"replicas":1,"readyReplicas":1,"labelSelector":"app=web"}}`)
	c.Kubectl(t, "", "scale", "vmpool", "a", "--current-replicas=1", "--replicas=3")
	if out := c.Kubectl(t, "", "get", "vmpool", "a", "--subresource=scale", "-o", "jsonpath={.spec.replicas} {.status.replicas} {.status.selector}"); out != "3 1 app=web" {
		t.Errorf("the scale of a pool: %s", out)
	}
	out := strings.Fields(c.Kubectl(t, "", "get", "vmpool", "a"))
	if len(out) != 10 || strings.Join(out[:9], " ") != "NAME DESIRED CURRENT READY AGE a 3 1 1" {
		t.Errorf("columns: %q", out)
	}
	for _, kind := range []string{"vmim", "vmims", "vmipreset", "migrationpolicies", "vmexport"} {
		if out := c.Kubectl(t, "", "get", kind); !strings.Contains(out, "No resources found") {
			t.Errorf("%s: %s", kind, out)
		}
	}
}
