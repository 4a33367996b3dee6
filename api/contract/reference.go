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
		{KeyImage, "image name, or snapshot repo[:tag]", "user", "the image to run, or the snapshot to clone: of the namespace, or shared with it"},
		{KeyMode, "clone, run, static", "user", "how the VM is created"},
		{KeyOS, "linux, windows, android, macos", "user", "operating system of the guest; default: linux; a node runs linux and windows ([windows.md](windows.md))"},
		{KeyStorage, "quantity", "user", "size of the root disk; a clone inherits its own"},
		{KeyNetwork, "name", "user", "network of the interfaces"},
		{KeySnapshotPolicy, "always, main-only, never", "user", "which VMs are saved before they are deleted"},
		{KeyManaged, "true", "operator", "the node starts, stops and removes the VM"},
		{KeyForcePull, "true", "user", "the image is pulled again"},
		{KeyForkFrom, "VM name", "user", "a running VM of the namespace to clone"},
		{KeyConnType, "ssh, rdp, vnc, adb", "user", "how users connect to the guest; default: derived"},
		{KeyBackend, "cloud-hypervisor, firecracker, qemu", "user", "hypervisor"},
		{KeyNoDirectIO, "true", "user", "writable disks are opened without O_DIRECT"},
		{KeyProbePort, "0-65535", "user", "TCP port of the readiness probe; 0: ICMP; absent: ICMP, or 3389 of windows"},
		{KeyCloneFromDir, "absolute path", "user", "folder of the node with an exported snapshot, below one that the operator lists"},
		{KeyFirmware, "bios, uefi", "user", "what a guest that boots itself starts with; default: bios"},
		{KeySMBIOS, "JSON", "user", "serial number of the system, and manufacturer, version, serial, asset and sku of its chassis; the UUID is VirtletSystemUUID"},
		{KeyGraphics, "true", "user", "a screen, a keyboard and a mouse, for a guest that boots itself"},
		{KeyHardware, "JSON", "user", "for a guest that boots itself: sockets, cores and threads of its CPUs (`topology`), their model and features (`cpu`), its `clock` (`timezone`, `offset`, or `local` for the time of the node), whether it has Secure Boot and keeps the variables of UEFI (`uefi`), its `tpm` (ephemeral, persistent), under which key the node keeps what is persistent of both for the next pod of the VM (`keep`, with `vm.cocoonstack.io/sticky`), whether its memory is `hugePages`, for which its container has the limit `hugepages-2Mi` or `hugepages-1Gi` instead of `memory`, how far it can grow when the pod is resized (`maxSockets`, and `maxMemory` in bytes; with `cpuShare`, the guest has a CPU for each so many thousandths of a CPU that the pod requests), its `panic` device (isa, pci), its `watchdog`, and the bus of each disk (virtio, sata, scsi, usb), also as a CD-ROM, its serial number (`serial`), the size of its blocks (`blocks`: `logical`, `physical`) and whether other VMs may use the volume of its claim at the same time if they say so, too (`shared`), by the name of the volume, `@image` or `@cloud-init`, the model of each network interface (`nics`: virtio, e1000, e1000e, rtl8139) and its hardware address (`macs`; not on a network with other machines on its link) and link (`links`: up, down; also of a VM that runs, and of a container image), and the `kernel` that it boots instead of a disk: `path`, `initrd` and the command line `args`, from the `volume` of the pod that has the files of an image and that no container mounts; without a disk, the image of the container is then `volume://VOLUME`; and which volumes of the type `hostPath` (File, or FileOrCreate with the size in bytes as `capacity`) are `hostDisks`, which no container mounts (`shared`: several VMs may have it at the same time), and whether it has a virtio socket (`vsock`), by which it and programs of its node reach each other"},
		{KeyDiskBandwidth, "quantity", "user", "most bytes per second that each disk of the VM reads and writes, both together: 1Mi to 1Ti. A clone without it has that of its snapshot"},
		{KeyDiskIOPS, "10-1000000000", "user", "most reads and writes per second of each disk of the VM, in the same way"},
		{KeyFileDisks, "NAME=LABEL by comma", "user", "volumes of the pod whose files (ConfigMap, Secret, downward API, projected) are a read-only disk with that label, for a guest that boots itself; no container mounts them, and the disk stays as it is when the VM is created"},
		{KeySSHSecrets, "names by comma", "user", "Secrets whose values are SSH keys that may log in to a guest that boots itself, by its cloud-init; a volume of the pod must name each"},
		{KeyLogins, "JSON", "user", "Secrets by which users log in to a guest that boots itself, set by its qemu-guest-agent and again when they change: `keys` has the users of the SSH keys in each Secret, whose authorized_keys is then these keys; in the Secrets of `passwords`, each key is a user and its value the password; a volume of the pod must name each Secret"},
		{KeyNetworkData, "secret/NAME[/KEY], configmap/NAME[/KEY]", "user", "network configuration for cloud-init, instead of the generated one; a volume of the pod must name the object; default KEY: networkdata"},
		{KeyNetworks, "[NAMESPACE/]NAME by comma, or JSON", "user", "networks of the node that the VM has beside that of `network`, one interface for each, in this order; a running VM gets and gives back interfaces when it changes; NetworkPolicies hold only on networks that can enforce them"},
		{KeyMasquerade, "JSON", "user", "the guest has the second address of a private network on the network of the pod, and its gateway the first: of `cidr` (10.0.2.0/24 without it) and `cidr6` (fd10:0:2::/120). The node translates between that and the address of the pod. `ports`, each with `port`, `last` for a range and `protocol` (TCP, UDP, SCTP), are those of the pod's address that lead to the guest; without any, all do. The node's network must be a bridge of Cocoon's own that checks senders"},
		{KeyHibernate, "true", "operator", "the VM hibernates; when the annotation is removed, it wakes"},
		{KeyPaused, "true", "user", "the guest is paused; when the annotation is removed, it continues. A VM whose pod has it from the beginning does not execute an instruction before"},
		{KeyReboot, "soft ID, hard ID", "user", "the guest, if it boots itself, starts again: after an orderly shutdown, or at once; each ID once"},
		{KeyVolumes, "NAME=CLAIM by comma", "user", "PersistentVolumeClaims of the pod's namespace whose volumes are plugged into the VM while it runs, and taken from it when they are no longer in the list"},
		{KeyMemoryDump, "CLAIM/FILE", "user", "the memory of the VM is written to the volume of the claim, once, as a file with that name; the volume is empty, or has an earlier dump, which is lost"},
		{KeyRestoreFromHibernate, "true", "operator", "the VM must resume from its hibernated state and must not boot"},
		{KeyKeepSnapshot, "true", "operator", "this deletion saves nothing and keeps the tags"},
		{KeyGeneration, "number", "operator", "generation of the CocoonSet that the pod was written for"},
		{KeyResources, "JSON", "operator", "requests and limits of the CocoonSet; a LimitRange may have added more to the pod"},
		{KeySticky, "wait, never, or a duration", "user", "the VM stays on the node that holds its state; without that node it waits: until the registry has its state (wait), without end (never), or that long"},
		{KeyEvictionPolicy, "hibernate, delete, refuse, shutdown", "user", "what an eviction does with the VM; shutdown: it ends, and the next pod waits for its node, as with `sticky`; default: hibernate for a managed VM that is saved before its deletion, otherwise delete"},
		{KeyDeletionPolicy, "hibernate, delete", "user", "what the deletion of the pod does with its VM; hibernate: the next pod of that name and owner resumes the same memory; default: delete"},
		{KeyForkFromID, "id of a VM", "operator", "the id of the VM in fork-from, on any node; if it is on another node, its state comes from the registry"},
		{KeyOfferFork, "true", "operator", "the node puts the state of the running VM into the registry, for forks on other nodes"},
		{KeyAllowScaleDown, "true", "user", "on a Deployment or StatefulSet of VMs: it may be scaled down"},
		{KeyID, "", "node", "id of the VM"},
		{KeyIP, "IP address", "node", "address of the guest"},
		{KeyKernelSums, "number,number", "node", "checksums of the kernel and the initrd that the guest boots instead of a disk (CRC-32 of IEEE); 0: not known, or none"},
		{KeyCID, "number", "node", "context id of the guest's virtio socket on the node, while it runs"},
		{KeyVNCPort, "1-65535", "operator", "VNC port of a static VM; never 0"},
		{KeyPostCloneHint, "base64", "node", "shell commands that set the identity of a clone without an agent"},
		{KeyTargetRuntime, "virtlet.cloud, or the name of a runtime handler", "user", "on the node of a kubelet: the runtime of the pod, if it has no `runtimeClassName` ([cri.md](cri.md))"},
		{KeyLifecycleState, "creating, ready, hibernating, hibernated, failed", "node", "lifecycle state of the VM"},
		{KeyLifecycleObserved, "number", "node", "generation that the state belongs to"},
		{KeyMemoryDumped, "JSON", "node", "the last dump of `memory-dump`, when it began and ended, or why there is none"},
		{KeyRebooted, "ID [reason]", "node", "the last request to reboot that was done, or why it could not be done"},
		{KeyPlugged, "JSON", "node", "the volumes of `volumes` that the node has begun to plug, and why it could not plug them or take them away"},
		{KeyNetworkStatus, "JSON", "node", "network, name in the guest, hardware address and addresses of each interface of the VM"},
		{KeyLifecycleMessage, "", "node", "why the VM failed, or why it takes long"},
		{KeyHibernatedOnNode, "node name", "operator", "on a CocoonSet: the node on which its VMs are hibernated"},
		{KeyDeleteVMNames, "names by comma", "operator", "on a CocoonSet: VMs whose tags must be deleted"},
		{KeyRebuildHistory, "JSON", "operator", "on a CocoonSet: how often each slot was recreated"},
		{KeyDeadLetter, "true", "operator", "the pod failed permanently"},
		{KeyPlacedOn, "node name", "operator", "node that the pod was bound to by an affinity, because it holds the VM's state"},
	}
}
