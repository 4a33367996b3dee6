// Package contract is the only place that knows the keys by which Kubernetes objects and VMs speak of each other:
// annotations, labels and the taint.
//
// Parsing is total: it never panics and reports every bad key at once. Apply sets what is set and clears what is not.
// The package decides nothing: which combination of keys can be honoured is for the node to say.
package contract

// Prefixes of the keys.
const (
	PrefixSet  = "cocoonset.cocoonstack.io/" // values mirrored from a CocoonSet
	PrefixVM   = "vm.cocoonstack.io/"        // one VM instance
	PrefixNode = "cocoonstack.io/"           // nodes, and our own labels
)

// Annotations that ask for a VM (VMSpec).
const (
	KeyName           = PrefixVM + "name"
	KeyImage          = PrefixSet + "image"
	KeyMode           = PrefixSet + "mode"
	KeyOS             = PrefixSet + "os"
	KeyStorage        = PrefixSet + "storage"
	KeyNetwork        = PrefixSet + "network"
	KeySnapshotPolicy = PrefixSet + "snapshot-policy"
	KeyManaged        = PrefixSet + "managed"
	KeyForcePull      = PrefixSet + "force-pull"
	KeyForkFrom       = PrefixVM + "fork-from"
	KeyConnType       = PrefixVM + "conn-type"
	KeyBackend        = PrefixVM + "backend"
	KeyNoDirectIO     = PrefixVM + "no-direct-io"
	KeyProbePort      = PrefixVM + "probe-port"
	KeyCloneFromDir   = PrefixVM + "clone-from-dir"
)

// Annotations that ask for a change in the life of a VM.
const (
	KeyHibernate            = PrefixVM + "hibernate"
	KeyRestoreFromHibernate = PrefixVM + "restore-from-hibernate"
	KeyKeepSnapshot         = PrefixVM + "keep-snapshot-on-delete"
	KeyGeneration           = PrefixSet + "generation"
	KeyResources            = PrefixSet + "resources"
	KeySticky               = PrefixVM + "sticky"
	KeyEvictionPolicy       = PrefixVM + "eviction-policy"
	KeyForkFromID           = PrefixVM + "fork-from-id"
	KeyOfferFork            = PrefixVM + "offer-fork"
	KeyAllowScaleDown       = PrefixNode + "allow-scale-down" // on a Deployment or StatefulSet
)

// Annotations that tell what became of it (VMRuntime and others).
const (
	KeyID                 = PrefixVM + "id"
	KeyIP                 = PrefixVM + "ip"
	KeyVNCPort            = PrefixVM + "vnc-port"
	KeyPostCloneHint      = PrefixVM + "post-clone-hint"
	KeyLifecycleState     = PrefixVM + "lifecycle-state"
	KeyLifecycleObserved  = PrefixVM + "lifecycle-observed-generation"
	KeyLifecycleMessage   = PrefixVM + "lifecycle-state-message"
	KeyHibernatedOnNode   = PrefixSet + "hibernated-on-node"
	KeyDeleteVMNames      = PrefixSet + "delete-vm-names"
	KeyRebuildHistory     = PrefixSet + "rebuild-history"
	KeyDeadLetter         = PrefixSet + "dead-letter"
	KeyPlacedOn           = PrefixVM + "placed-on"
	LabelSetName          = PrefixSet + "name"
	LabelSetRole          = PrefixSet + "role"
	LabelSetSlot          = PrefixSet + "slot"
	LabelPool             = PrefixNode + "pool"
	LabelSnapshotCPUClass = PrefixNode + "snapshot-cpu-class"
	LabelNodeRole         = "node-role.kubernetes.io/cocoon-vm"
)

// NodeAnnotations are those that the node which runs a pod writes. No other of ours is a node's to change:
// deploy/vk-cocoon/policy.yaml holds it to that.
func NodeAnnotations() []string {
	return []string{KeyID, KeyIP, KeyVNCPort, KeyPostCloneHint, KeyLifecycleState, KeyLifecycleObserved, KeyLifecycleMessage}
}

// The taint of a virtual node, and so the key of the toleration by which a pod asks for one.
const (
	TaintKey   = "virtual-kubelet.io/provider"
	TaintValue = "cocoon"
)

// Labels a virtual node puts on the VMs it makes; by them it knows its own after a restart.
const (
	VMLabelNode         = PrefixNode + "node"
	VMLabelPodNamespace = PrefixNode + "pod-namespace"
	VMLabelPodName      = PrefixNode + "pod-name"
	VMLabelPodUID       = PrefixNode + "pod-uid"
	// VMLabelSave says "true" of a VM that must not be deleted unsaved: what the pod's policy was, for when the pod is gone.
	VMLabelSave = PrefixNode + "save-before-delete"
)

// ContainerIDScheme is the scheme of the container ids in pod statuses; the VM's id follows it.
const ContainerIDScheme = "cocoon://"
