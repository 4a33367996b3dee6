package v1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// CocoonSet is a main VM, the sub-agents that are forked from it, and the toolboxes beside them.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=cs;cocoonsets,categories=cocoon,path=cocoonsets
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyAgents`
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=`.status.desiredAgents`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type CocoonSet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// What is wanted.
	Spec CocoonSetSpec `json:"spec"`
	// What there is.
	Status CocoonSetStatus `json:"status,omitempty"`
}

// CocoonSetList is a list of CocoonSets.
//
// +kubebuilder:object:root=true
type CocoonSetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []CocoonSet `json:"items"`
}

// HibernatePolicy says what a suspended set keeps.
//
// +kubebuilder:validation:Enum=retain;release
type HibernatePolicy string

// The hibernate policies.
const (
	HibernateRetain  HibernatePolicy = "retain"  // the pods, and so their seats on the nodes
	HibernateRelease HibernatePolicy = "release" // the snapshots alone
)

// CocoonSetSpec is what is wanted.
//
// +kubebuilder:validation:XValidation:rule="!has(self.hibernatePolicy) || self.hibernatePolicy != 'release' || (self.agent.replicas == 0 && (!has(self.toolboxes) || size(self.toolboxes) == 0))",message="release needs agent.replicas 0 and no toolboxes: sub-agents are forked from a main VM that runs",fieldPath=".hibernatePolicy",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.snapshotCompatibilityClass) || size(oldSelf.snapshotCompatibilityClass) == 0 || (has(self.snapshotCompatibilityClass) && self.snapshotCompatibilityClass == oldSelf.snapshotCompatibilityClass)",message="cannot be changed once it is set: the snapshots of the set are of that class",fieldPath=".snapshotCompatibilityClass",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule="!has(self.toolboxes) || !has(self.agent.backend) || self.toolboxes.all(t, t.mode == 'static' || !has(t.backend) || t.backend == self.agent.backend)",message="a toolbox must have the backend of the agent, unless it is static",fieldPath=".toolboxes",reason=FieldValueInvalid
type CocoonSetSpec struct {
	// Suspend hibernates every VM of the set; false wakes them.
	// +optional
	Suspend bool `json:"suspend,omitempty"`
	// SnapshotPolicy says which VMs are saved to the registry before they are deleted.
	// +kubebuilder:default=always
	// +kubebuilder:validation:Enum=always;main-only;never
	// +optional
	SnapshotPolicy contract.SnapshotPolicy `json:"snapshotPolicy,omitempty"`
	// NodePool is the pool of virtual nodes (label cocoonstack.io/pool) that run the set.
	// +kubebuilder:default=default
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$`
	// +optional
	NodePool string `json:"nodePool,omitempty"`
	// NodeName pins the set to one node. Changing it moves a running set there, through the registry.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// HibernatePolicy says whether a suspended set keeps its pods (retain) or only its snapshots (release).
	// +kubebuilder:default=retain
	// +optional
	HibernatePolicy HibernatePolicy `json:"hibernatePolicy,omitempty"`
	// SnapshotCompatibilityClass restricts the set to nodes of one CPU class (label cocoonstack.io/snapshot-cpu-class), so
	// that its memory snapshots work on each of them. It cannot be changed once set.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$`
	// +optional
	SnapshotCompatibilityClass string `json:"snapshotCompatibilityClass,omitempty"`
	// Sticky keeps the main VM and the toolboxes on the nodes that hold their state, by a VMPlacement each. It says what happens
	// when such a node is gone: wait for it unless the VM hibernates in the registry (wait), wait for it in any case (never), or give
	// the state up after that long (a duration, such as 10m). Sub-agents follow the main VM.
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^(wait|never|([0-9]+[hms])+)$`
	// +optional
	Sticky string `json:"sticky,omitempty"`
	// Agent is the main VM and its sub-agents.
	Agent AgentSpec `json:"agent"`
	// Toolboxes are further VMs, each by a name of its own.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	// +optional
	Toolboxes []ToolboxSpec `json:"toolboxes,omitempty"`
}

// AgentMode says how the main VM comes to be.
//
// +kubebuilder:validation:Enum=clone;run
type AgentMode string

// ForkPolicy says where sub-agents may run.
//
// +kubebuilder:validation:Enum=MainNode;PreferMainNode
type ForkPolicy string

// The fork policies.
const (
	ForkMainNode       ForkPolicy = "MainNode"       // on the main VM's node only, as a live fork
	ForkPreferMainNode ForkPolicy = "PreferMainNode" // elsewhere through the registry when that node is full
)

// AgentSpec is the main VM and how many sub-agents are forked from it.
//
// +kubebuilder:validation:XValidation:rule="self.mode != 'clone' || self.image.matches('^[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?$')",message="of a clone must be repo[:tag], without a host's port or a digest",fieldPath=".image",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'firecracker' || self.mode == 'run'",message="firecracker needs mode run",fieldPath=".mode",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'firecracker' || !self.image.matches('^https?://')",message="firecracker cannot boot a cloud image's URL",fieldPath=".image",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'firecracker' || !has(self.os) || self.os != 'windows'",message="firecracker cannot run windows",fieldPath=".os",reason=FieldValueInvalid
type AgentSpec struct {
	// Replicas is the number of sub-agents. The main VM is one more.
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9999
	// +optional
	Replicas int32 `json:"replicas"`
	// Image is a snapshot, repo[:tag], for mode clone; an OCI image or the URL of a cloud image for mode run.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Image string `json:"image"`
	// Mode says whether the main VM is cloned from a snapshot or booted from an image.
	// +kubebuilder:default=clone
	// +optional
	Mode AgentMode `json:"mode,omitempty"`
	// ForkPolicy says where sub-agents may run.
	// +kubebuilder:default=MainNode
	// +optional
	ForkPolicy ForkPolicy `json:"forkPolicy,omitempty"`

	VMOptions `json:",inline"`

	// EnvFrom are ConfigMaps and Secrets whose keys become the environment of every agent.
	// +listType=atomic
	// +optional
	EnvFrom []corev1.EnvFromSource `json:"envFrom,omitempty"`
	// ServiceAccountName is the account whose token the agents get.
	// +optional
	ServiceAccountName string `json:"serviceAccountName,omitempty"`
}

// VMOptions are what agents and toolboxes have in common.
type VMOptions struct {
	// OS of the guest. A node runs linux and windows.
	// +kubebuilder:default=linux
	// +kubebuilder:validation:Enum=linux;windows;android;macos
	// +optional
	OS contract.OS `json:"os,omitempty"`
	// Backend is the hypervisor. The node's own is taken when it is not given.
	// +kubebuilder:validation:Enum=cloud-hypervisor;firecracker;qemu
	// +optional
	Backend contract.Backend `json:"backend,omitempty"`
	// ConnType is how people reach the guest; derived from the OS when it is not given.
	// +kubebuilder:validation:Enum=ssh;rdp;vnc;adb
	// +optional
	ConnType contract.ConnType `json:"connType,omitempty"`
	// Network is the node's network, by name.
	// +optional
	Network string `json:"network,omitempty"`
	// ForcePull fetches the image anew although the node has it.
	// +optional
	ForcePull bool `json:"forcePull,omitempty"`
	// NoDirectIO lets the host cache the writable disks.
	// +optional
	NoDirectIO bool `json:"noDirectIO,omitempty"`
	// ProbePort is the TCP port that must answer before the VM is ready; 0: it must answer pings, or windows at 3389.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	// +optional
	ProbePort int32 `json:"probePort,omitempty"`
	// Storage is the size of the root disk. A clone has its snapshot's.
	// +optional
	Storage *resource.Quantity `json:"storage,omitempty"`
	// Resources are CPU and memory. A clone has its snapshot's.
	// +optional
	Resources corev1.ResourceRequirements `json:"resources,omitempty"`
}

// ToolboxSpec is a VM beside the agents.
//
// +kubebuilder:validation:XValidation:rule="self.mode == 'static' || (has(self.image) && size(self.image) > 0)",message="is required, unless mode is static",fieldPath=".image",reason=FieldValueRequired
// +kubebuilder:validation:XValidation:rule="self.mode != 'static' || (has(self.staticIP) && size(self.staticIP) > 0)",message="is required in mode static",fieldPath=".staticIP",reason=FieldValueRequired
// +kubebuilder:validation:XValidation:rule="self.mode != 'static' || (has(self.staticVMID) && size(self.staticVMID) > 0)",message="is required in mode static",fieldPath=".staticVMID",reason=FieldValueRequired
// +kubebuilder:validation:XValidation:rule="!self.name.matches('^[0-9]+$')",message="must not be a number: those are the agents' slots",fieldPath=".name",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="self.mode != 'clone' || !has(self.image) || self.image.matches('^[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?$')",message="of a clone must be repo[:tag], without a host's port or a digest",fieldPath=".image",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'firecracker' || self.mode == 'run'",message="firecracker needs mode run",fieldPath=".mode",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'firecracker' || !has(self.image) || !self.image.matches('^https?://')",message="firecracker cannot boot a cloud image's URL",fieldPath=".image",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'firecracker' || !has(self.os) || self.os != 'windows'",message="firecracker cannot run windows",fieldPath=".os",reason=FieldValueInvalid
type ToolboxSpec struct {
	// Name of the toolbox; its pod is SET-NAME.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`
	// Image is a snapshot for mode clone, an OCI image or a cloud image's URL for mode run; not used by mode static.
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Image string `json:"image,omitempty"`
	// Mode says how the toolbox comes to be; a static one is a machine that is there already.
	// +kubebuilder:default=run
	// +kubebuilder:validation:Enum=run;clone;static
	// +optional
	Mode contract.Mode `json:"mode,omitempty"`
	// StaticIP is the address of a static toolbox.
	// +kubebuilder:validation:MaxLength=45
	// +optional
	StaticIP string `json:"staticIP,omitempty"`
	// StaticVMID is the id of a static toolbox.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	StaticVMID string `json:"staticVMID,omitempty"`
	// VNCPort is the port of a static toolbox's screen.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	// +optional
	VNCPort int32 `json:"vncPort,omitempty"`

	VMOptions `json:",inline"`
}

// SetPhase sums up a CocoonSet.
//
// +kubebuilder:validation:Enum=Pending;Running;Scaling;Suspending;Suspended;Waking;Migrating;Failed
type SetPhase string

// The phases of a CocoonSet.
const (
	SetPending    SetPhase = "Pending"
	SetRunning    SetPhase = "Running"
	SetScaling    SetPhase = "Scaling"
	SetSuspending SetPhase = "Suspending"
	SetSuspended  SetPhase = "Suspended" // the snapshot of every VM is durable and verified in the registry
	SetWaking     SetPhase = "Waking"
	SetMigrating  SetPhase = "Migrating"
	SetFailed     SetPhase = "Failed"
)

// Role of a VM in a set.
type Role string

// The roles.
const (
	RoleMain     Role = "main"
	RoleSubAgent Role = "sub-agent"
	RoleToolbox  Role = "toolbox"
)

// CocoonSetStatus is what there is.
type CocoonSetStatus struct {
	// ObservedGeneration is the generation of the spec that the status answers for.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Phase sums up the set.
	// +optional
	Phase SetPhase `json:"phase,omitempty"`
	// ReadyAgents counts agents that are ready, the main VM included.
	// +optional
	ReadyAgents int32 `json:"readyAgents"`
	// DesiredAgents is one more than agent.replicas.
	// +optional
	DesiredAgents int32 `json:"desiredAgents"`
	// ReadyToolboxes counts toolboxes that are ready.
	// +optional
	ReadyToolboxes int32 `json:"readyToolboxes"`
	// DesiredToolboxes counts the toolboxes of the spec.
	// +optional
	DesiredToolboxes int32 `json:"desiredToolboxes"`
	// Agents by slot; 0 is the main VM.
	// +listType=map
	// +listMapKey=slot
	// +optional
	Agents []AgentStatus `json:"agents,omitempty"`
	// Toolboxes by name.
	// +listType=map
	// +listMapKey=name
	// +optional
	Toolboxes []ToolboxStatus `json:"toolboxes,omitempty"`
	// SuspendedOn is the node that a set with hibernatePolicy release ran on; it is preferred when the set wakes.
	// +optional
	SuspendedOn string `json:"suspendedOn,omitempty"`
	// Conditions are Ready and Progressing.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// AgentStatus is one agent.
type AgentStatus struct {
	// Slot of the agent; 0 is the main VM.
	// +kubebuilder:default=0
	// +optional
	Slot int32 `json:"slot"`
	// Role is main or sub-agent.
	// +optional
	Role Role `json:"role,omitempty"`
	// PodName is the agent's pod.
	// +optional
	PodName string `json:"podName,omitempty"`
	// VMName is the agent's VM.
	// +optional
	VMName string `json:"vmName,omitempty"`
	// VMID is the id of the VM that runs now; empty while it is hibernated.
	// +optional
	VMID string `json:"vmID,omitempty"`
	// IP of the guest.
	// +optional
	IP string `json:"ip,omitempty"`
	// Phase of the pod, or of the VM's life where that says more.
	// +optional
	Phase string `json:"phase,omitempty"`
	// ForkedFrom is the VM that a sub-agent was forked from.
	// +optional
	ForkedFrom string `json:"forkedFrom,omitempty"`
	// Rebuilds counts how often a failed sub-agent was made anew since the spec changed last.
	// +optional
	Rebuilds int32 `json:"rebuilds,omitempty"`
	// LastRebuild is when that was done last.
	// +optional
	LastRebuild *metav1.Time `json:"lastRebuild,omitempty"`
}

// ToolboxStatus is one toolbox.
type ToolboxStatus struct {
	// Name of the toolbox.
	Name string `json:"name"`
	// PodName is the toolbox' pod.
	// +optional
	PodName string `json:"podName,omitempty"`
	// VMName is the toolbox' VM.
	// +optional
	VMName string `json:"vmName,omitempty"`
	// VMID is the id of the VM that runs now.
	// +optional
	VMID string `json:"vmID,omitempty"`
	// IP of the guest.
	// +optional
	IP string `json:"ip,omitempty"`
	// Phase of the pod, or of the VM's life where that says more.
	// +optional
	Phase string `json:"phase,omitempty"`
	// ConnType is how people reach it.
	// +optional
	ConnType contract.ConnType `json:"connType,omitempty"`
	// VNCPort of a static toolbox.
	// +optional
	VNCPort int32 `json:"vncPort,omitempty"`
}
