package contract

// Entry describes one annotation.
type Entry struct {
	Key    string
	Values string // the allowed values; "" is free text
	Who    string // who writes it: user, operator, node
	Text   string // what it means
}

// Reference describes every annotation of a pod or a CocoonSet, in the order of declaration.
func Reference() []Entry {
	return []Entry{
		{KeyName, "at most 63 of A-Z a-z 0-9 . _ -", "user", "name of the VM, in its namespace; vk-NAMESPACE-POD without it, or as compat.md says"},
		{KeyImage, "image name, or snapshot repo[:tag]", "user", "what is run, or cloned: a snapshot of the namespace or one that is shared with it"},
		{KeyMode, "clone, run, static", "user", "how the VM comes to be"},
		{KeyOS, "linux, windows, android, macos", "user", "the guest's system; linux without it"},
		{KeyStorage, "quantity", "user", "size of the root disk; a clone inherits its own"},
		{KeyNetwork, "name", "user", "network of the interfaces"},
		{KeySnapshotPolicy, "always, main-only, never", "user", "which VMs are saved before they are deleted"},
		{KeyManaged, "true", "operator", "the node owns the VM's life"},
		{KeyForcePull, "true", "user", "the image is fetched anew"},
		{KeyForkFrom, "VM name", "user", "a running VM of the namespace to go on from"},
		{KeyConnType, "ssh, rdp, vnc, adb", "user", "how a person reaches the guest; derived without it"},
		{KeyBackend, "cloud-hypervisor, firecracker, qemu", "user", "hypervisor"},
		{KeyNoDirectIO, "true", "user", "writable disks are opened without O_DIRECT"},
		{KeyProbePort, "0-65535", "user", "TCP port of the readiness probe; 0 or none is ICMP"},
		{KeyCloneFromDir, "absolute path", "user", "folder of the node with an exported snapshot, below one that the operator lists"},
		{KeyHibernate, "true", "operator", "the VM sleeps; removed, it wakes"},
		{KeyRestoreFromHibernate, "true", "operator", "the VM goes on from where it hibernated and must not boot"},
		{KeyKeepSnapshot, "true", "operator", "this deletion only gives up the seat: nothing is saved, tags stay"},
		{KeyGeneration, "number", "operator", "generation of the CocoonSet that the pod was written for"},
		{KeyResources, "JSON", "operator", "requests and limits that the CocoonSet asked for; the pod may have more, from a LimitRange"},
		{KeySticky, "wait, never, or a duration", "user", "the VM stays on the node that holds its state; when that node is away it waits: unless it hibernates in the registry, without end, or that long"},
		{KeyEvictionPolicy, "hibernate, delete, refuse", "user", "what an eviction does with the VM; hibernate for a managed VM that is to be saved, else delete"},
		{KeyForkFromID, "id of a VM", "operator", "the VM that fork-from must be, wherever it runs: its state is taken from the registry when it is on another node"},
		{KeyOfferFork, "true", "operator", "the node puts the state of the running VM into the registry, for forks on other nodes"},
		{KeyAllowScaleDown, "true", "user", "on a Deployment or StatefulSet of VMs: it may be scaled down"},
		{KeyID, "", "node", "id of the VM"},
		{KeyIP, "IP address", "node", "address of the guest"},
		{KeyVNCPort, "1-65535", "operator", "VNC port of a VM that is not the node's; never 0"},
		{KeyPostCloneHint, "base64", "node", "shell commands that make a clone itself, when nobody in it can be told"},
		{KeyLifecycleState, "creating, ready, hibernating, hibernated, failed", "node", "where the VM is in its life"},
		{KeyLifecycleObserved, "number", "node", "generation that the state answers for"},
		{KeyLifecycleMessage, "", "node", "why it failed, or takes so long"},
		{KeyHibernatedOnNode, "node name", "operator", "on a CocoonSet: where its VMs sleep"},
		{KeyDeleteVMNames, "names by comma", "operator", "on a CocoonSet: VMs whose tags are to be collected"},
		{KeyRebuildHistory, "JSON", "operator", "on a CocoonSet: how often each slot was made anew"},
		{KeyDeadLetter, "true", "operator", "the pod is given up"},
		{KeyPlacedOn, "node name", "operator", "node that the pod was bound to by an affinity, because it holds the VM's state"},
	}
}
