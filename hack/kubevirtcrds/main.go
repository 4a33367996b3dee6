// Command kubevirtcrds completes the CRDs that controller-gen makes of KubeVirt's Go types: it adds what the types do not say, and
// drops the kinds that Cocoon does not serve.
//
//	kubevirtcrds FROM TO
package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// column is an additional column of `kubectl get`.
type column struct {
	name, kind, path string
	wide             bool // only with -o wide
}

// kind is what the types do not say of a kind.
type kind struct {
	group      string // before kubevirt.io, "" for that group itself
	cluster    bool   // its objects have no namespace
	shortNames []string
	columns    []column
	status     bool                // it has a status subresource
	scaled     bool                // it has a scale subresource; status.labelSelector selects its pods
	spec       []map[string]string // rules (CEL) of its spec
	constant   map[string][]string // parts of its spec, none of whose fields may change but those listed; nil: no rule says so
	message    string              // of that rule
	whole      []map[string]string // rules (CEL) of the object
	older      string              // another version that is served, with the same fields; kinds of kubevirt.io itself have v1alpha3
}

var age = column{name: "Age", kind: "date", path: ".metadata.creationTimestamp"}

// kinds are those that Cocoon serves, by their names in the API.
var kinds = map[string]kind{
	"virtualmachines": {
		shortNames: []string{"vm", "vms"},
		columns: []column{
			age,
			{name: "Status", kind: "string", path: ".status.printableStatus"},
			{name: "Ready", kind: "string", path: condition("Ready")},
		},
		status: true,
		spec: []map[string]string{{
			"rule":    "has(self.running) != has(self.runStrategy)",
			"message": "exactly one of runStrategy and running must be set; running is deprecated",
		}},
		whole: machineRules,
	},
	"virtualmachineinstances": {
		shortNames: []string{"vmi", "vmis"},
		columns: []column{
			age,
			{name: "Phase", kind: "string", path: ".status.phase"},
			{name: "IP", kind: "string", path: ".status.interfaces[0].ipAddress"},
			{name: "NodeName", kind: "string", path: ".status.nodeName"},
			{name: "Ready", kind: "string", path: condition("Ready")},
			{name: "Live-Migratable", kind: "string", path: condition("LiveMigratable"), wide: true},
			{name: "Paused", kind: "string", path: condition("Paused"), wide: true},
		},
		constant: map[string][]string{
			"": {"domain", "networks"}, "domain": {"cpu", "devices", "memory", "resources"}, "domain.cpu": {"sockets"}, "domain.devices": {"interfaces"}, "domain.memory": {"guest"},
			"domain.resources": {"requests"},
		},
		message: "the spec of a VirtualMachineInstance cannot change, except domain.cpu.sockets, domain.memory.guest, domain.resources.requests, domain.devices.interfaces and networks; change its VirtualMachine and restart it",
	},
	"virtualmachineinstancereplicasets": {
		shortNames: []string{"vmirs", "vmirss"},
		columns: []column{
			{name: "Desired", kind: "integer", path: specReplicas},
			{name: "Current", kind: "integer", path: statusReplicas},
			{name: "Ready", kind: "integer", path: ".status.readyReplicas"},
			age,
		},
		status: true,
		scaled: true,
		spec: []map[string]string{
			{"rule": "self.selector == oldSelf.selector", "message": "the selector of a VirtualMachineInstanceReplicaSet cannot change; create another set"},
			{"rule": "self.replicas >= 0", "message": "replicas must be at least 0"},
		},
	},
	"virtualmachinepools": {
		group:      "pool.",
		older:      "v1alpha1",
		shortNames: []string{"vmpool", "vmpools"},
		columns: []column{
			{name: "Desired", kind: "integer", path: specReplicas},
			{name: "Current", kind: "integer", path: statusReplicas},
			{name: "Ready", kind: "integer", path: ".status.readyReplicas"},
			age,
		},
		status: true,
		scaled: true,
		spec: []map[string]string{
			{"rule": "self.selector == oldSelf.selector", "message": "the selector of a VirtualMachinePool cannot change; create another pool"},
		},
	},
	// These cannot be created. They exist so that a tool that lists them finds none, and so that a refusal says why.
	"virtualmachineinstancemigrations": {
		shortNames: []string{"vmim", "vmims"},
		columns:    []column{{name: "Phase", kind: "string", path: ".status.phase"}, {name: "VMI", kind: "string", path: ".spec.vmiName"}},
		status:     true,
		whole:      never("a VirtualMachineInstanceMigration is not offered: a VM that runs stays on its node; stop the machine and start it to change its node"),
	},
	"virtualmachineinstancepresets": {
		shortNames: []string{"vmipreset", "vmipresets"},
		whole:      never("a VirtualMachineInstancePreset is not offered; use a VirtualMachineInstancetype and a VirtualMachinePreference"),
	},
	"migrationpolicies": {
		group: "migrations.", cluster: true,
		whole: never("a MigrationPolicy is not offered: a VM that runs stays on its node"),
	},
	"virtualmachineexports": {
		group: "export.", older: "v1beta1", shortNames: []string{"vmexport", "vmexports"}, status: true,
		columns: []column{
			{name: "SourceKind", kind: "string", path: ".spec.source.kind"},
			{name: "SourceName", kind: "string", path: ".spec.source.name"},
			{name: "Phase", kind: "string", path: ".status.phase"},
		},
		whole: never("a VirtualMachineExport is not offered: nothing serves disks over HTTP; copy the disk within its VM or a pod with its claim, or export the volume on its node with `cocoon volume export`"),
	},
	"kubevirts": {
		shortNames: []string{"kv", "kvs"},
		columns:    []column{age, {name: "Phase", kind: "string", path: ".status.phase"}},
		status:     true,
	},
	"datavolumes": {
		group:      "cdi.",
		shortNames: []string{"dv", "dvs"},
		columns: []column{
			{name: "Phase", kind: "string", path: ".status.phase"},
			{name: "Progress", kind: "string", path: ".status.progress"},
			{name: "Restarts", kind: "integer", path: ".status.restartCount"},
			age,
		},
		status: true,
		spec: []map[string]string{
			{"rule": "self == oldSelf", "message": "the spec of a DataVolume cannot change; create another DataVolume"},
		},
	},
	"cdiconfigs":                         {group: "cdi.", cluster: true}, // virtctl reads in it where uploads go
	"virtualmachineinstancetypes":        {group: "instancetype.", shortNames: []string{"vminstancetype", "vminstancetypes", "vmf", "vmfs"}, spec: instancetypeRules},
	"virtualmachineclusterinstancetypes": {group: "instancetype.", cluster: true, shortNames: []string{"vmclusterinstancetype", "vmclusterinstancetypes", "vmcf", "vmcfs"}, spec: instancetypeRules},
	"virtualmachinepreferences":          {group: "instancetype.", shortNames: []string{"vmpref", "vmprefs", "vmps"}, spec: preferenceRules}, // vmp is a VMPlacement
	"virtualmachineclusterpreferences":   {group: "instancetype.", cluster: true, shortNames: []string{"vmcp", "vmcps"}, spec: preferenceRules},
	"virtualmachinesnapshots": {
		group: "snapshot.", shortNames: []string{"vmsnapshot", "vmsnapshots"}, status: true, spec: snapshotRules,
		columns: []column{
			{name: "SourceKind", kind: "string", path: ".spec.source.kind"},
			{name: "SourceName", kind: "string", path: ".spec.source.name"},
			{name: "Phase", kind: "string", path: ".status.phase"},
			{name: "ReadyToUse", kind: "boolean", path: ".status.readyToUse"},
			{name: "CreationTime", kind: "date", path: ".status.creationTime"},
			{name: "Error", kind: "string", path: ".status.error.message"},
		},
	},
	"virtualmachinerestores": {
		group: "snapshot.", shortNames: []string{"vmrestore", "vmrestores"}, status: true, spec: restoreRules,
		columns: []column{
			{name: "TargetKind", kind: "string", path: ".spec.target.kind"},
			{name: "TargetName", kind: "string", path: ".spec.target.name"},
			{name: "Complete", kind: "boolean", path: ".status.complete"},
			{name: "RestoreTime", kind: "date", path: ".status.restoreTime"},
		},
	},
	"virtualmachineclones": {
		group: "clone.", shortNames: []string{"vmclone", "vmclones"}, status: true, spec: cloneRules,
		columns: []column{
			{name: "Phase", kind: "string", path: ".status.phase"},
			{name: "SourceVirtualMachine", kind: "string", path: ".spec.source.name"},
			{name: "TargetVirtualMachine", kind: "string", path: ".spec.target.name"},
		},
	},
	"virtualmachinesnapshotcontents": {
		group: "snapshot.", shortNames: []string{"vmsnapshotcontent", "vmsnapshotcontents"}, status: true,
		spec: []map[string]string{{"rule": "self == oldSelf", "message": "the spec of a VirtualMachineSnapshotContent cannot change; it is what was there when the snapshot was taken"}},
		columns: []column{
			{name: "ReadyToUse", kind: "boolean", path: ".status.readyToUse"},
			{name: "CreationTime", kind: "date", path: ".status.creationTime"},
			{name: "Error", kind: "string", path: ".status.error.message"},
		},
	},
}

// What KubeVirt's webhooks check of snapshots, and of machines while a snapshot of them is taken.
var (
	snapshotRules = []map[string]string{
		{"rule": "self == oldSelf", "message": "the spec of a VirtualMachineSnapshot cannot change; take another snapshot"},
		{
			"rule":    "has(self.source.apiGroup) && self.source.apiGroup == 'kubevirt.io' && self.source.kind == 'VirtualMachine'",
			"message": "source must be a VirtualMachine of the apiGroup kubevirt.io; a VirtualMachineInstance has no snapshots",
		},
		{"rule": "!has(self.deletionPolicy) || self.deletionPolicy in ['Delete', 'Retain']", "message": "deletionPolicy must be Delete or Retain"},
		{"rule": "!has(self.failureDeadline) || duration(self.failureDeadline) >= duration('0s')", "message": "failureDeadline must be a duration of at least 0s, such as 5m"},
	}
	restoreRules = []map[string]string{
		{"rule": "self == oldSelf", "message": "the spec of a VirtualMachineRestore cannot change; create another restore"},
		{
			"rule":    "has(self.target.apiGroup) && self.target.apiGroup == 'kubevirt.io' && self.target.kind == 'VirtualMachine'",
			"message": "target must be a VirtualMachine of the apiGroup kubevirt.io",
		},
		{
			"rule":    "!has(self.volumeRestorePolicy) || self.volumeRestorePolicy in ['RandomizeNames', 'PrefixTargetName']",
			"message": "volumeRestorePolicy must be RandomizeNames or PrefixTargetName; InPlace, which deletes the claims of the target, is not offered",
		},
		{"rule": "!has(self.volumeOwnershipPolicy) || self.volumeOwnershipPolicy in ['Vm', 'None']", "message": "volumeOwnershipPolicy must be Vm or None"},
	}
	cloneRules = []map[string]string{
		{"rule": "self == oldSelf", "message": "the spec of a VirtualMachineClone cannot change; create another clone"},
		{
			"rule": "has(self.source.apiGroup) && (self.source.apiGroup == 'kubevirt.io' && self.source.kind == 'VirtualMachine' || " +
				"self.source.apiGroup == 'snapshot.kubevirt.io' && self.source.kind == 'VirtualMachineSnapshot')",
			"message": "source must be a VirtualMachine of the apiGroup kubevirt.io, or a VirtualMachineSnapshot of the apiGroup snapshot.kubevirt.io",
		},
		{
			"rule":    "!has(self.target) || has(self.target.apiGroup) && self.target.apiGroup == 'kubevirt.io' && self.target.kind == 'VirtualMachine'",
			"message": "target must be a VirtualMachine of the apiGroup kubevirt.io",
		},
		{
			"rule":    "!has(self.target) || self.source.kind != 'VirtualMachine' || self.target.name != self.source.name",
			"message": "target must have another name than source",
		},
	}
	machineRules = []map[string]string{
		{
			"rule": "!has(self.status) || !has(self.status.restoreInProgress) || " + same("runStrategy") + " && " + same("running") +
				" || has(self.spec.runStrategy) && self.spec.runStrategy == 'Halted' || has(self.spec.running) && !self.spec.running",
			"message": "a VirtualMachine cannot be started while it is restored; wait for the restore in status.restoreInProgress",
		},
		{
			"rule":    "!has(self.status) || !has(self.status.snapshotInProgress) || " + same("template.spec.volumes"),
			"message": "the volumes of a VirtualMachine cannot change while a snapshot of it is taken; wait for the snapshot in status.snapshotInProgress",
		},
		{
			"rule":    "!has(self.status) || !has(self.status.snapshotInProgress) || " + same("runStrategy") + " && " + same("running"),
			"message": "a VirtualMachine cannot be started or stopped while a snapshot of it is taken; wait for the snapshot in status.snapshotInProgress",
		},
	}
)

// Where a kind that can be scaled has its numbers.
const (
	specReplicas   = ".spec.replicas"
	statusReplicas = ".status.replicas"
)

// The checks of KubeVirt's webhooks for instancetypes and preferences, as CEL rules. Both kinds have no extra columns in KubeVirt.
var (
	instancetypeRules = []map[string]string{
		{"rule": "self.cpu.guest > 0", "message": "cpu.guest must be at least 1"},
		{
			"rule":    "!has(self.memory.overcommitPercent) || self.memory.overcommitPercent == 0 || !has(self.memory.hugepages)",
			"message": "memory.overcommitPercent and memory.hugepages exclude each other; remove one",
		},
	}
	preferenceRules = []map[string]string{
		{
			"rule": "!has(self.cpu) || !has(self.cpu.preferredCPUTopology) || self.cpu.preferredCPUTopology in " +
				"['cores', 'sockets', 'threads', 'spread', 'any', 'preferCores', 'preferSockets', 'preferThreads', 'preferSpread', 'preferAny']",
			"message": "cpu.preferredCPUTopology must be cores, sockets, threads, spread or any",
		},
		{
			"rule": "!has(self.cpu) || !has(self.cpu.spreadOptions) || !has(self.cpu.spreadOptions.across) || " +
				"self.cpu.spreadOptions.across in ['SocketsCoresThreads', 'SocketsCores', 'CoresThreads']",
			"message": "cpu.spreadOptions.across must be SocketsCores, CoresThreads or SocketsCoresThreads",
		},
		{
			"rule":    "!has(self.cpu) || !has(self.cpu.spreadOptions) || !has(self.cpu.spreadOptions.ratio) || self.cpu.spreadOptions.ratio > 0",
			"message": "cpu.spreadOptions.ratio must be at least 1",
		},
		{
			"rule": "!has(self.cpu) || !has(self.cpu.spreadOptions) || !has(self.cpu.spreadOptions.across) || self.cpu.spreadOptions.across != 'CoresThreads' || " +
				"(has(self.cpu.spreadOptions.ratio) ? self.cpu.spreadOptions.ratio : (has(self.preferSpreadSocketToCoreRatio) ? self.preferSpreadSocketToCoreRatio : 2)) == 2",
			"message": "cpu.spreadOptions.ratio must be 2, the threads of a core, if across is CoresThreads",
		},
	}
)

// never is the rule of a kind of which there are no objects.
func never(why string) []map[string]string {
	return []map[string]string{{"rule": "false", "message": why}}
}

// same is a rule that a field of the spec, which may be missing, does not change.
func same(of string) string {
	is, was := "self.spec."+of, "oldSelf.spec."+of
	return fmt.Sprintf("has(%[1]s) == has(%[2]s) && (!has(%[1]s) || %[1]s == %[2]s)", is, was)
}

func condition(of string) string {
	return fmt.Sprintf(".status.conditions[?(@.type=='%s')].status", of)
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: kubevirtcrds FROM TO")
		os.Exit(2)
	}
	for plural, k := range kinds {
		if err := complete(os.Args[1], os.Args[2], plural, k); err != nil {
			fmt.Fprintf(os.Stderr, "kubevirtcrds: %s: %v\n", plural, err)
			os.Exit(1)
		}
	}
}

func complete(from, to, plural string, k kind) error {
	file := k.group + "kubevirt.io_" + plural + ".yaml"
	data, err := os.ReadFile(filepath.Join(from, file))
	if err != nil {
		return err
	}
	var crd map[string]any
	if err := yaml.Unmarshal(data, &crd); err != nil {
		return err
	}
	versions, _, err := unstructured.NestedSlice(crd, "spec", "versions")
	if err != nil || len(versions) != 1 {
		return errors.Join(fmt.Errorf("%d versions, want one", len(versions)), err)
	}
	newest, _ := versions[0].(map[string]any)
	if err := k.describe(newest); err != nil {
		return err
	}
	older := k.older
	if k.group == "" { // the version that manifests had before v1
		older = "v1alpha3"
	}
	if older != "" {
		api := k.group + "kubevirt.io/"
		old := maps.Clone(newest)
		old["name"], old["storage"] = older, false
		old["deprecated"], old["deprecationWarning"] = true, fmt.Sprintf("%s%s is deprecated; use %s%v", api, older, api, newest["name"])
		versions = append(versions, old)
	}
	err = errors.Join(
		unstructured.SetNestedSlice(crd, versions, "spec", "versions"),
		unstructured.SetNestedStringSlice(crd, k.shortNames, "spec", "names", "shortNames"),
		unstructured.SetNestedStringMap(crd, map[string]string{"app.kubernetes.io/part-of": "cocoon"}, "metadata", "labels"),
	)
	if k.cluster {
		err = errors.Join(err, unstructured.SetNestedField(crd, "Cluster", "spec", "scope"))
	} else { // `kubectl get all` is about a namespace
		err = errors.Join(err, unstructured.SetNestedStringSlice(crd, []string{"all"}, "spec", "names", "categories"))
	}
	if err != nil {
		return err
	}
	if data, err = yaml.Marshal(crd); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(to, file), data, 0o644) //nolint:gosec // a file of the repository
}

// describe adds columns, subresources and rules to a version.
func (k kind) describe(version map[string]any) error {
	columns := make([]any, 0, len(k.columns))
	for _, c := range k.columns {
		entry := map[string]any{"name": c.name, "type": c.kind, "jsonPath": c.path}
		if c.wide {
			entry["priority"] = int64(1)
		}
		columns = append(columns, entry)
	}
	if len(columns) > 0 {
		version["additionalPrinterColumns"] = columns
	}
	delete(version, "subresources")
	subresources := map[string]any{}
	if k.status {
		subresources["status"] = map[string]any{}
	}
	if k.scaled { // a scale of a set without a number is an error, so the default of the types is one of the schema
		subresources["scale"] = map[string]any{"specReplicasPath": specReplicas, "statusReplicasPath": statusReplicas, "labelSelectorPath": ".status.labelSelector"}
		if err := unstructured.SetNestedField(version, int64(1), "schema", "openAPIV3Schema", "properties", "spec", "properties", "replicas", "default"); err != nil {
			return err
		}
	}
	if len(subresources) > 0 {
		version["subresources"] = subresources
	}
	if len(k.constant) > 0 {
		rule, err := k.unchanged(version)
		if err != nil {
			return err
		}
		k.spec = append(slices.Clone(k.spec), map[string]string{"rule": rule, "message": k.message})
	}
	return errors.Join(checkBy(k.spec, version, "schema", "openAPIV3Schema", "properties", "spec"), checkBy(k.whole, version, "schema", "openAPIV3Schema"))
}

// unchanged returns the rule that no field of the constant parts changes but those listed. A part may be missing, but neither come nor go.
func (k kind) unchanged(version map[string]any) (string, error) {
	var rules []string
	for _, part := range slices.Sorted(maps.Keys(k.constant)) {
		at, is, was := []string{"schema", "openAPIV3Schema", "properties", "spec", "properties"}, "self", "oldSelf"
		if part != "" {
			for name := range strings.SplitSeq(part, ".") {
				at = append(at, name, "properties")
			}
			is, was = is+"."+part, was+"."+part
		}
		fields, found, err := unstructured.NestedMap(version, at...)
		if err != nil || !found {
			return "", errors.Join(fmt.Errorf("the spec has no %s", part), err)
		}
		var all []string
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			if !slices.Contains(k.constant[part], name) {
				all = append(all, fmt.Sprintf("has(%[1]s.%[3]s) == has(%[2]s.%[3]s) && (!has(%[1]s.%[3]s) || %[1]s.%[3]s == %[2]s.%[3]s)", is, was, name))
			}
		}
		rule := strings.Join(all, " && ")
		if strings.Contains(part, ".") {
			rule = fmt.Sprintf("has(%[1]s) == has(%[2]s) && (!has(%[1]s) || %[3]s)", is, was, rule)
		}
		rules = append(rules, rule)
	}
	return strings.Join(rules, " && "), nil
}

// checkBy adds rules to the schema at a path of version.
func checkBy(rules []map[string]string, version map[string]any, path ...string) error {
	if len(rules) == 0 {
		return nil
	}
	out := make([]any, 0, len(rules))
	for _, r := range rules {
		out = append(out, map[string]any{"rule": r["rule"], "message": r["message"]})
	}
	return unstructured.SetNestedSlice(version, out, append(path, "x-kubernetes-validations")...)
}
