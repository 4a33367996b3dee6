// Package kubevirt holds manifests: the kinds of KubeVirt that Cocoon serves, and the rights on them. hack/generate.sh generates the kinds from
// KubeVirt's Go types. The package installs nothing.
package kubevirt

import _ "embed"

// Version is the version of KubeVirt whose kinds and API are served, and whose virtctl the tests use. virtctl warns of a server of another
// minor version.
const Version = "v1.9.0"

// Machines, Instances, ReplicaSets and KubeVirts define VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceReplicaSet and KubeVirt.
var (
	//go:embed crds/kubevirt.io_virtualmachines.yaml
	Machines []byte
	//go:embed crds/kubevirt.io_virtualmachineinstances.yaml
	Instances []byte
	//go:embed crds/kubevirt.io_virtualmachineinstancereplicasets.yaml
	ReplicaSets []byte
	//go:embed crds/kubevirt.io_kubevirts.yaml
	KubeVirts []byte
)

// The CustomResourceDefinitions of the group instancetype.kubevirt.io.
var (
	//go:embed crds/instancetype.kubevirt.io_virtualmachineinstancetypes.yaml
	Instancetypes []byte
	//go:embed crds/instancetype.kubevirt.io_virtualmachineclusterinstancetypes.yaml
	ClusterInstancetypes []byte
	//go:embed crds/instancetype.kubevirt.io_virtualmachinepreferences.yaml
	Preferences []byte
	//go:embed crds/instancetype.kubevirt.io_virtualmachineclusterpreferences.yaml
	ClusterPreferences []byte
)

// DataVolumes and Configs define DataVolume and CDIConfig, of the group cdi.kubevirt.io.
var (
	//go:embed crds/cdi.kubevirt.io_datavolumes.yaml
	DataVolumes []byte
	//go:embed crds/cdi.kubevirt.io_cdiconfigs.yaml
	Configs []byte
)

// The CustomResourceDefinitions of the group snapshot.kubevirt.io.
var (
	//go:embed crds/snapshot.kubevirt.io_virtualmachinesnapshots.yaml
	Snapshots []byte
	//go:embed crds/snapshot.kubevirt.io_virtualmachinesnapshotcontents.yaml
	SnapshotContents []byte
	//go:embed crds/snapshot.kubevirt.io_virtualmachinerestores.yaml
	Restores []byte
)

// Clones defines VirtualMachineClone.
//
//go:embed crds/clone.kubevirt.io_virtualmachineclones.yaml
var Clones []byte

// Pools defines VirtualMachinePool.
//
//go:embed crds/pool.kubevirt.io_virtualmachinepools.yaml
var Pools []byte

// The kinds of which no object can be created: VirtualMachineInstanceMigration, VirtualMachineInstancePreset, MigrationPolicy and VirtualMachineExport.
var (
	//go:embed crds/kubevirt.io_virtualmachineinstancemigrations.yaml
	Migrations []byte
	//go:embed crds/kubevirt.io_virtualmachineinstancepresets.yaml
	Presets []byte
	//go:embed crds/migrations.kubevirt.io_migrationpolicies.yaml
	MigrationPolicies []byte
	//go:embed crds/export.kubevirt.io_virtualmachineexports.yaml
	Exports []byte
)

// Kinds are all kinds.
func Kinds() [][]byte {
	return [][]byte{
		KubeVirts, Machines, Instances, ReplicaSets, Pools, Instancetypes, ClusterInstancetypes, Preferences, ClusterPreferences,
		Snapshots, SnapshotContents, Restores, Clones, DataVolumes, Configs, Migrations, Presets, MigrationPolicies, Exports,
	}
}

// Rights are those of users: KubeVirt's ClusterRoles, which the built-in ones include.
//
//go:embed rbac.yaml
var Rights []byte

// Policy refuses requests to upload disks to claims that have a volume.
//
//go:embed policy.yaml
var Policy []byte

// Namespace is the namespace of the object that tells of the version.
//
//go:embed namespace.yaml
var Namespace []byte

// ManagerRights are the ClusterRole cocoon-manager-kubevirt, which the manager has besides its own.
//
//go:embed manager.yaml
var ManagerRights []byte

// UploadRights are the Role cocoon-manager-uploads, which it has in its namespace.
//
//go:embed uploads.yaml
var UploadRights []byte
