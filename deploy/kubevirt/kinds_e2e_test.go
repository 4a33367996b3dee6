//go:build e2e && kubevirt

package kubevirt_test

import (
	"fmt"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/deploy/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// kubectl does not replace the kinds and the API of another KubeVirt by ours.
func TestBesideAnotherKubeVirt(t *testing.T) {
	c := kubetest.Up(t)
	kind := strings.Replace(string(kubevirt.Machines), "listKind: VirtualMachineList", "listKind: VirtualMachines", 1)
	const api = "{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1.subresources.kubevirt.io}, spec: {group: subresources.kubevirt.io, version: v1, " +
		"service: {namespace: kubevirt, name: virt-api}, insecureSkipTLSVerify: true, groupPriorityMinimum: 1000, versionPriority: 15}}"
	for _, theirs := range []string{kind, api} {
		c.Kubectl(t, theirs, "create", "--field-manager=virt-operator", "-f", "-")
	}
	c.Kubectl(t, "", "create", "namespace", kubetest.Namespace)
	if out, err := c.TryKubectl(t, "", "apply", "--server-side", "-k", "."); err == nil || strings.Count(out, `with "virt-operator"`) != 2 {
		t.Errorf("%v: %s", err, out)
	}
	if out := c.Kubectl(t, "", "get", "apiservice", "v1.subresources.kubevirt.io", "-o", "jsonpath={.spec.service.name} {.metadata.labels}"); strings.TrimSpace(out) != "virt-api" {
		t.Errorf("the API of the other is now %s", out)
	}
}

// Instancetypes and preferences: what KubeVirt's webhooks refuse, their schemas refuse.
func TestInstancetypeKinds(t *testing.T) {
	c := kubetest.Up(t)
	for _, text := range kubevirt.Kinds() {
		c.Kubectl(t, string(text), "apply", "--server-side", "-f", "-")
	}
	for _, plural := range []string{"virtualmachineinstancetypes", "virtualmachineclusterinstancetypes", "virtualmachinepreferences", "virtualmachineclusterpreferences"} {
		c.Kubectl(t, "", "wait", "--for=condition=Established", "--timeout=240s", "crd/"+plural+".instancetype.kubevirt.io")
		if out := c.Kubectl(t, "", "get", "crd", plural+".instancetype.kubevirt.io", "-o", "jsonpath={.status.storedVersions} {.status.conditions[?(@.type=='NonStructuralSchema')].message}"); strings.TrimSpace(out) != `["v1beta1"]` {
			t.Errorf("%s: %s", plural, out)
		}
	}
	object := func(kind, name, spec string) string {
		return "{apiVersion: instancetype.kubevirt.io/v1beta1, kind: " + kind + ", metadata: {name: " + name + "}, spec: " + spec + "}"
	}
	for what, tc := range map[string]struct{ kind, spec, refused string }{
		"small":            {"VirtualMachineInstancetype", "{cpu: {guest: 1}, memory: {guest: 128Mi}}", ""},
		"overcommitted":    {"VirtualMachineClusterInstancetype", "{cpu: {guest: 4, dedicatedCPUPlacement: false}, memory: {guest: 2Gi, overcommitPercent: 15}}", ""},
		"no memory":        {"VirtualMachineInstancetype", "{cpu: {guest: 1}}", "spec.memory"},
		"no CPU":           {"VirtualMachineInstancetype", "{cpu: {guest: 0}, memory: {guest: 1Gi}}", "cpu.guest must be at least 1"},
		"too much":         {"VirtualMachineInstancetype", "{cpu: {guest: 1}, memory: {guest: 1Gi, overcommitPercent: 101}}", "spec.memory.overcommitPercent"},
		"both":             {"VirtualMachineInstancetype", "{cpu: {guest: 1}, memory: {guest: 1Gi, overcommitPercent: 1, hugepages: {pageSize: 2Mi}}}", "exclude each other"},
		"unknown":          {"VirtualMachineClusterInstancetype", "{cpu: {guest: 1, cores: 2}, memory: {guest: 1Gi}}", "spec.cpu.cores"},
		"virtio":           {"VirtualMachinePreference", "{devices: {preferredDiskBus: virtio, preferredInterfaceModel: virtio}}", ""},
		"spread":           {"VirtualMachineClusterPreference", "{cpu: {preferredCPUTopology: preferSpread, spreadOptions: {across: SocketsCoresThreads, ratio: 3}}}", ""},
		"threads":          {"VirtualMachineClusterPreference", "{cpu: {preferredCPUTopology: spread, spreadOptions: {across: CoresThreads}}}", ""},
		"topology":         {"VirtualMachinePreference", "{cpu: {preferredCPUTopology: round}}", "preferredCPUTopology must be"},
		"across":           {"VirtualMachinePreference", "{cpu: {preferredCPUTopology: spread, spreadOptions: {across: Rooms}}}", "spreadOptions.across must be"},
		"ratio":            {"VirtualMachinePreference", "{cpu: {preferredCPUTopology: spread, spreadOptions: {ratio: 0}}}", "spreadOptions.ratio must be at least 1"},
		"threads of cores": {"VirtualMachinePreference", "{cpu: {preferredCPUTopology: spread, spreadOptions: {across: CoresThreads, ratio: 4}}}", "spreadOptions.ratio must be 2"},
		"old ratio":        {"VirtualMachinePreference", "{preferSpreadSocketToCoreRatio: 4, cpu: {preferredCPUTopology: spread, spreadOptions: {across: CoresThreads}}}", "spreadOptions.ratio must be 2"},
	} {
		out, err := c.TryKubectl(t, object(tc.kind, strings.ReplaceAll(strings.ToLower(what), " ", "-"), tc.spec), "apply", "-f", "-")
		if (err != nil) != (tc.refused != "") || !strings.Contains(out, tc.refused) {
			t.Errorf("%s: %v: %s", what, err, out)
		}
	}
	for _, tc := range []struct{ short, want string }{
		{"vmf", "virtualmachineinstancetype.instancetype.kubevirt.io/small"},
		{"vminstancetypes", "virtualmachineinstancetype.instancetype.kubevirt.io/small"},
		{"vmcf", "virtualmachineclusterinstancetype.instancetype.kubevirt.io/overcommitted"},
		{"vmpref", "virtualmachinepreference.instancetype.kubevirt.io/virtio"},
		{"vmcps", "virtualmachineclusterpreference.instancetype.kubevirt.io/spread\nvirtualmachineclusterpreference.instancetype.kubevirt.io/threads"},
		{"all", "service/kubernetes\nvirtualmachineinstancetype.instancetype.kubevirt.io/small\nvirtualmachinepreference.instancetype.kubevirt.io/virtio"},
	} {
		if out := strings.TrimSpace(c.Kubectl(t, "", "get", tc.short, "-n", "default", "-o", "name")); !strings.HasPrefix(out, tc.want) {
			t.Errorf("kubectl get %s: %s", tc.short, out)
		}
	}
}

// DataVolumes: what CDI's webhooks refuse, the schema refuses, and nobody can ask for an upload to a claim that has a volume.
func TestDataVolumeKind(t *testing.T) {
	c := kubetest.Up(t)
	c.Kubectl(t, string(kubevirt.DataVolumes), "apply", "--server-side", "-f", "-")
	c.Kubectl(t, string(kubevirt.Policy), "apply", "--server-side", "-f", "-")
	c.Kubectl(t, "", "wait", "--for=condition=Established", "--timeout=240s", "crd/datavolumes.cdi.kubevirt.io")
	if out := c.Kubectl(t, "", "get", "crd", "datavolumes.cdi.kubevirt.io", "-o", "jsonpath={.status.storedVersions} {.status.conditions[?(@.type=='NonStructuralSchema')].message}"); strings.TrimSpace(out) != `["v1beta1"]` {
		t.Error(out)
	}
	apply := func(spec string) (string, error) {
		return c.TryKubectl(t, "{apiVersion: cdi.kubevirt.io/v1beta1, kind: DataVolume, metadata: {name: disk}, spec: "+spec+"}", "apply", "-f", "-")
	}
	for what, tc := range map[string]struct{ spec, refused string }{
		"unknown": {"{storage: {}, source: {ftp: {}}}", "spec.source.ftp"},
		"content": {"{storage: {}, source: {blank: {}}, contentType: tar}", "spec.contentType"},
	} {
		if out, err := apply(tc.spec); err == nil || !strings.Contains(out, tc.refused) {
			t.Errorf("%s: %v: %s", what, err, out)
		}
	}
	if out, err := apply("{storage: {resources: {requests: {storage: 1Gi}}}, source: {registry: {url: 'docker://example.org/disk'}}}"); err != nil {
		t.Fatal(out)
	}
	if out, err := c.TryKubectl(t, "", "patch", "dv", "disk", "--type=merge", "-p", `{"spec":{"storage":{"resources":{"requests":{"storage":"2Gi"}}}}}`); err == nil || !strings.Contains(out, "cannot change") {
		t.Errorf("the spec: %v: %s", err, out)
	}
	c.Kubectl(t, "", "patch", "dv", "disk", "--type=merge", "--subresource=status", "-p", `{"status":{"phase":"ImportInProgress","progress":"N/A","restartCount":2}}`)
	if out := strings.Join(strings.Fields(c.Kubectl(t, "", "get", "dvs")), " "); !strings.HasPrefix(out, "NAME PHASE PROGRESS RESTARTS AGE disk ImportInProgress N/A 2 ") {
		t.Errorf("kubectl get dvs: %s", out)
	}
	claim := func(name, more string) string {
		return "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: " + name + "}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}" + more + "}}"
	}
	c.Kubectl(t, claim("full", ", volumeName: pv"), "create", "-f", "-")
	c.Kubectl(t, claim("empty", ""), "create", "-f", "-")
	ask := func(name string) string {
		out, _ := c.TryKubectl(t, "", "annotate", "pvc", name, "cdi.kubevirt.io/storage.upload.target=", "--overwrite", "--dry-run=server")
		return fmt.Sprint(strings.Contains(out, "an upload never replaces what is on a volume"))
	}
	kubetest.Eventually(t, "the API server knows the policy", func() string { return ask("full") }, "true")
	if ask("empty") != "false" {
		t.Error("a claim without a volume cannot ask for an upload")
	}
}

// The schemas refuse the snapshots that KubeVirt's webhooks refuse. A machine is protected while a snapshot of it is taken.
func TestSnapshotKinds(t *testing.T) {
	c := kubetest.Up(t)
	for _, text := range kubevirt.Kinds() {
		c.Kubectl(t, string(text), "apply", "--server-side", "-f", "-")
	}
	c.Kubectl(t, "", "wait", "--for=condition=Established", "--timeout=240s", "crd/virtualmachinesnapshots.snapshot.kubevirt.io", "crd/virtualmachinerestores.snapshot.kubevirt.io", "crd/virtualmachineclones.clone.kubevirt.io", "crd/virtualmachines.kubevirt.io")
	source := "source: {apiGroup: kubevirt.io, kind: VirtualMachine, name: a}"
	for what, tc := range map[string]struct{ spec, refused string }{
		"plain":    {source, ""},
		"all":      {source + ", deletionPolicy: Retain, failureDeadline: 1m30s", ""},
		"instance": {strings.Replace(source, "VirtualMachine,", "VirtualMachineInstance,", 1), "source must be a VirtualMachine"},
		"group":    {strings.Replace(source, "apiGroup: kubevirt.io, ", "", 1), "source must be a VirtualMachine"},
		"policy":   {source + ", deletionPolicy: Keep", "deletionPolicy must be Delete or Retain"},
		"deadline": {source + ", failureDeadline: soon", "failureDeadline"},
		"negative": {source + ", failureDeadline: -1s", "failureDeadline must be a duration"},
	} {
		out, err := c.TryKubectl(t, "{apiVersion: snapshot.kubevirt.io/v1beta1, kind: VirtualMachineSnapshot, metadata: {name: "+what+"}, spec: {"+tc.spec+"}}", "create", "-f", "-")
		if (err != nil) != (tc.refused != "") || !strings.Contains(out, tc.refused) {
			t.Errorf("%s: %v: %s", what, err, out)
		}
	}
	target := "target: {apiGroup: kubevirt.io, kind: VirtualMachine, name: a}, virtualMachineSnapshotName: plain"
	for what, tc := range map[string]struct{ spec, refused string }{
		"plain":    {target, ""},
		"all":      {target + ", targetReadinessPolicy: StopTarget, volumeRestorePolicy: PrefixTargetName, volumeOwnershipPolicy: None", ""},
		"instance": {strings.Replace(target, "VirtualMachine,", "VirtualMachineInstance,", 1), "target must be a VirtualMachine"},
		"in-place": {target + ", volumeRestorePolicy: InPlace", "InPlace"},
		"policy":   {target + ", targetReadinessPolicy: Hope", "targetReadinessPolicy"},
		"owner":    {target + ", volumeOwnershipPolicy: Me", "volumeOwnershipPolicy must be"},
	} {
		out, err := c.TryKubectl(t, "{apiVersion: snapshot.kubevirt.io/v1beta1, kind: VirtualMachineRestore, metadata: {name: "+what+"}, spec: {"+tc.spec+"}}", "create", "-f", "-")
		if (err != nil) != (tc.refused != "") || !strings.Contains(out, tc.refused) {
			t.Errorf("restore, %s: %v: %s", what, err, out)
		}
	}
	for what, tc := range map[string]struct{ spec, refused string }{
		"machine":  {source, ""},
		"snapshot": {"source: {apiGroup: snapshot.kubevirt.io, kind: VirtualMachineSnapshot, name: plain}, " + target[:strings.Index(target, "}")+1], ""},
		"no group": {strings.Replace(source, "apiGroup: kubevirt.io, ", "", 1), "source must be"},
		"itself":   {source + ", " + target[:strings.Index(target, "}")+1], "another name than source"},
		"instance": {source + ", target: {apiGroup: kubevirt.io, kind: VirtualMachineInstance, name: b}", "target must be a VirtualMachine"},
		"policy":   {source + ", volumeNamePolicy: InPlace", "volumeNamePolicy"},
	} {
		out, err := c.TryKubectl(t, "{apiVersion: clone.kubevirt.io/v1beta1, kind: VirtualMachineClone, metadata: {name: "+strings.ReplaceAll(what, " ", "-")+"}, spec: {"+tc.spec+"}}", "create", "-f", "-")
		if (err != nil) != (tc.refused != "") || !strings.Contains(out, tc.refused) {
			t.Errorf("clone, %s: %v: %s", what, err, out)
		}
	}
	c.Kubectl(t, machine("a", "  runStrategy: Halted\n"), "create", "-f", "-")
	c.Kubectl(t, "", "patch", "vm", "a", "--subresource=status", "--type=merge", "-p", `{"status":{"snapshotInProgress":"plain"}}`)
	for patch, refused := range map[string]string{
		`{"spec":{"runStrategy":"Always"}}`:                                                       "cannot be started or stopped while a snapshot",
		`{"spec":{"runStrategy":null,"running":false}}`:                                           "cannot be started or stopped while a snapshot",
		`{"spec":{"template":{"spec":{"volumes":[]}}}}`:                                           "volumes of a VirtualMachine cannot change while a snapshot",
		`{"spec":{"template":{"spec":{"domain":{"memory":{"guest":"1Gi"}}}}}}`:                    "",
		`{"metadata":{"labels":{"a":"b"}},"spec":{"template":{"metadata":{"labels":{"c":"d"}}}}}`: "",
	} {
		if out, err := c.TryKubectl(t, "", "patch", "vm", "a", "--type=merge", "-p", patch); (err != nil) != (refused != "") || !strings.Contains(out, refused) {
			t.Errorf("%s: %v: %s", patch, err, out)
		}
	}
	c.Kubectl(t, "", "patch", "vm", "a", "--subresource=status", "--type=merge", "-p", `{"status":{"snapshotInProgress":null,"restoreInProgress":"plain"}}`)
	if out, err := c.TryKubectl(t, "", "patch", "vm", "a", "--type=merge", "-p", `{"spec":{"runStrategy":"Always"}}`); err == nil || !strings.Contains(out, "cannot be started while it is restored") {
		t.Errorf("a start while it is restored: %v: %s", err, out)
	}
	c.Kubectl(t, "", "patch", "vm", "a", "--subresource=status", "--type=merge", "-p", `{"status":{"restoreInProgress":null}}`)
	c.Kubectl(t, "", "patch", "vm", "a", "--type=merge", "-p", `{"spec":{"runStrategy":"Always"}}`)
}
