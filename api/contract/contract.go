// Package contract defines all keys that Kubernetes objects and VMs use to refer to each other: annotations, labels and the
// taint. No other package defines such keys.
//
// Parsing never panics and reports all bad keys at once. Apply sets the keys of non-empty fields and removes the others.
// The package makes no decisions: the node decides which combinations of keys it supports.
package contract

// Prefixes of the keys.
const (
	PrefixSet  = "cocoonset.cocoonstack.io/" // values mirrored from a CocoonSet
	PrefixVM   = "vm.cocoonstack.io/"        // one VM instance
	PrefixNode = "cocoonstack.io/"           // nodes, and our own labels
	PrefixCRI  = "cri.cocoonstack.io/"       // VMs of pods of a kubelet
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

// Annotations that say what the machine of a VM is like (Machine).
const (
	KeyFirmware      = PrefixVM + "firmware"
	KeySMBIOS        = PrefixVM + "smbios"
	KeyGraphics      = PrefixVM + "graphics"
	KeyHardware      = PrefixVM + "hardware"
	KeyDiskBandwidth = PrefixVM + "disk-bandwidth"
	KeyDiskIOPS      = PrefixVM + "disk-iops"
	KeyFileDisks     = PrefixVM + "file-disks"
	KeyNetworkData   = PrefixVM + "network-data-source"
	KeySSHSecrets    = PrefixVM + "ssh-key-secrets"
	KeyLogins        = PrefixVM + "login-secrets"
	KeyMasquerade    = PrefixVM + "masquerade"
)

// Annotations of the Kubernetes Network Custom Resource Definition De-facto Standard, which programs of others write and read.
const (
	KeyNetworks      = "k8s.v1.cni.cncf.io/networks"
	KeyNetworkStatus = "k8s.v1.cni.cncf.io/network-status"
)

// Annotations that ask for a change in the life of a VM.
const (
	KeyHibernate            = PrefixVM + "hibernate"
	KeyPaused               = PrefixVM + "paused"
	KeyReboot               = PrefixVM + "reboot"
	KeyVolumes              = PrefixVM + "volumes"
	KeyMemoryDump           = PrefixVM + "memory-dump"
	KeyRestoreFromHibernate = PrefixVM + "restore-from-hibernate"
	KeyKeepSnapshot         = PrefixVM + "keep-snapshot-on-delete"
	KeyGeneration           = PrefixSet + "generation"
	KeyResources            = PrefixSet + "resources"
	KeySticky               = PrefixVM + "sticky"
	KeyEvictionPolicy       = PrefixVM + "eviction-policy"
	KeyDeletionPolicy       = PrefixVM + "deletion-policy"
	KeyForkFromID           = PrefixVM + "fork-from-id"
	KeyOfferFork            = PrefixVM + "offer-fork"
	KeyAllowScaleDown       = PrefixNode + "allow-scale-down" // on a Deployment or StatefulSet
)

// Annotations that report the state of a VM (VMRuntime and others).
const (
	KeyID                 = PrefixVM + "id"
	KeyIP                 = PrefixVM + "ip"
	KeyCID                = PrefixVM + "vsock-cid"
	KeyKernelSums         = PrefixVM + "kernel-checksums"
	KeyVNCPort            = PrefixVM + "vnc-port"
	KeyPostCloneHint      = PrefixVM + "post-clone-hint"
	KeyLifecycleState     = PrefixVM + "lifecycle-state"
	KeyLifecycleObserved  = PrefixVM + "lifecycle-observed-generation"
	KeyLifecycleMessage   = PrefixVM + "lifecycle-state-message"
	KeyRebooted           = PrefixVM + "rebooted"
	KeyPlugged            = PrefixVM + "volumes-plugged"
	KeyMemoryDumped       = PrefixVM + "memory-dumped"
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
	labelBackend          = PrefixNode + "backend."
)

// LabelBackend is the label of the nodes that run VMs in b itself, without a stand-in.
func LabelBackend(b Backend) string { return labelBackend + string(b) }

// ConditionPaused is the condition of a pod that is True while its VM is paused. A pod whose VM was never paused lacks it.
const ConditionPaused = PrefixVM + "Paused"

// ConditionAgent is the condition of a pod that is True while a qemu-guest-agent answers in its guest. A pod whose guest never had one lacks it.
const ConditionAgent = PrefixVM + "AgentConnected"

// ConditionLogins is the condition of a pod that is True when its guest has the passwords and SSH keys that KeyLogins asks for, and False with the
// reason when it refuses them. A pod without that annotation lacks it, and so does a pod whose agent has not answered yet.
const ConditionLogins = PrefixVM + "LoginsSynchronized"

// ConditionFrozen is the condition of a pod that is True while the file systems of its guest are frozen on request. A pod whose guest was never frozen
// lacks it.
const ConditionFrozen = PrefixVM + "Frozen"

// ConditionNetworks is the condition of a pod that is False, with the reason, while its running VM cannot be attached to a network that KeyNetworks
// names, or detached from one that it does not name any more. A pod for which that never failed lacks it.
const ConditionNetworks = PrefixVM + "NetworksSynchronized"

// CommandPing is the command, of this one word, of an exec probe that succeeds if the qemu-guest-agent of a guest that boots itself answers. No
// program is run.
const CommandPing = PrefixVM + "guest-agent-ping"

// NodeAnnotations are the annotations that the node of a pod writes. A node must not change any other annotation of ours;
// deploy/vk-cocoon/policy.yaml enforces this.
func NodeAnnotations() []string {
	return []string{KeyID, KeyIP, KeyVNCPort, KeyPostCloneHint, KeyLifecycleState, KeyLifecycleObserved, KeyLifecycleMessage, KeyRebooted, KeyPlugged, KeyMemoryDumped, KeyCID, KeyKernelSums}
}

// The taint of a virtual node. A pod uses the same key in its toleration.
const (
	TaintKey   = "virtual-kubelet.io/provider"
	TaintValue = "cocoon"
)

// LabelCRI is the label of nodes that keep their kubelet and run VM pods, with the value "true". A taint of this key keeps other pods away.
const LabelCRI = PrefixNode + "cri"

// Labels that a virtual node sets on its VMs. After a restart it recognizes its VMs by these labels.
const (
	VMLabelNode         = PrefixNode + "node"
	VMLabelPodNamespace = PrefixNode + "pod-namespace"
	VMLabelPodName      = PrefixNode + "pod-name"
	VMLabelPodUID       = PrefixNode + "pod-uid"
	// VMLabelSave is "true" on a VM that must be saved before it is deleted. It keeps the pod's policy after the pod is gone.
	VMLabelSave = PrefixNode + "save-before-delete"
	// VMLabelHibernate is "true" on a VM that hibernates when its pod is deleted. It keeps the pod's policy after the pod is gone.
	VMLabelHibernate = PrefixNode + "hibernate-on-delete"
	// VMLabelOwnerUID is the UID of the controller of the VM's pod, on a snapshot that the node took.
	VMLabelOwnerUID = PrefixNode + "owner-uid"
)

// Labels that the CRI door sets on the VMs of pods, and on their containers. After a restart it recognizes them by these labels. Values
// are JSON of the messages of CRI, but for the name of the runtime handler.
const (
	VMLabelCRISandbox   = PrefixCRI + "sandbox"
	VMLabelCRIHandler   = PrefixCRI + "handler"
	VMLabelCRIContainer = PrefixCRI + "container"
)

// KeyTargetRuntime is the annotation of a pod that names its runtime, if its RuntimeClass names none (Virtlet, seed 001), and
// TargetVirtlet the value of old pods.
const (
	KeyTargetRuntime = "kubernetes.io/target-runtime"
	TargetVirtlet    = "virtlet.cloud"
)

// ContainerIDScheme is the scheme of the container ids in pod statuses. The VM's id follows it.
const ContainerIDScheme = "cocoon://"
