package tenancy

// nothing lists the parts of the contract that name nothing that could belong to someone, with the reason.
var nothing = map[string]string{
	// Words and numbers.
	"KeyOS": word, "KeyStorage": size, "KeyDiskBandwidth": size, "KeyDiskIOPS": size, "KeyConnType": word, "KeyBackend": word, "KeyNoDirectIO": word,
	"KeyFirmware": word, "KeySMBIOS": document, "KeyGraphics": word, "KeyMasquerade": "addresses that its own guest alone sees, and ports of that guest", "DiskOfImage": "the name of a disk", "DiskOfSeed": "the name of a disk", "KeyFileDisks": "it names volumes of the pod itself", "HeaderDisplay": "its value is a word of a closed list", "NetworkDataKey": "a key of the source",
	"HeaderGuest": "the guest of the pod that the request attaches to", "GuestDescription": word, "GuestThaw": word, "GuestFreeze": size,
	"KeyKeepSnapshot": word, "KeyResources": size, "KeySticky": "a claim is an object of the pod's namespace, called as the VM", "KeyDeletionPolicy": "the state that it keeps belongs to the namespace and has the name of the VM",
	"KeyAllowScaleDown": "it is on a Deployment, about its own pods",
	"KeyVirtletVCPUs":   size, "KeyVirtletDiskDriver": word, "KeyVirtletRootVolumeSize": size, "KeyVirtletCPUModel": word, "KeyVirtletCPUSetting": document,
	"KeyVirtletSystemUUID": "the guest's own, in its firmware", "KeyVirtletChownMounts": word, "KeyVirtletImageType": word, "KeyVirtletMetaData": document,
	"KeyVirtletUserData": document, "KeyVirtletUserDataOverwrite": word, "KeyVirtletUserDataScript": document, "KeyVirtletUserDataKey": "a key of the source",
	"KeyVirtletUserDataEncoding": word, "KeyVirtletSSHKeys": document, "KeyVirtletForceDHCP": word, "MountScript": document,
	"EncodingPlain": word, "EncodingBase64": word, "StickyWait": word, "StickyNever": word, "StickyScheduler": "the name of a profile",
	"KeyPaused": word, "LinkUp": word, "LinkDown": word, "KeyReboot": "a word, and an ID that only tells requests for the VM of the pod apart",
	"RoleSubAgent": word, "RoleToolbox": word,

	// What the node or the manager writes. It is read from a pod only to show it.
	"KeyPostCloneHint": told, "KeyLifecycleState": told, "KeyLifecycleObserved": told, "KeyLifecycleMessage": told,
	"CommandPing": word, "KeyNetworkStatus": told, "NetworkStatusText": "the text of KeyNetworkStatus", "NetworkName": "a name in KeyNetworks",
	"KeyCID": told, "CIDText": "the text of KeyCID", "KeyKernelSums": told, "KernelSumsText": "the text of KeyKernelSums", "KeyRebooted": told, "ConditionPaused": told, "ConditionFrozen": told, "ConditionAgent": told, "ConditionLogins": told, "ConditionNetworks": told,
	"KeyDeadLetter": told, "KeyRebuildHistory": told,
	"KeyDeleteVMNames": "names of VMs of the set's namespace, in whose repositories alone tags are collected",

	// Volumes of claims. A pod names a claim, which is looked up in the pod's namespace.
	"KeyVolumes": "a claim is looked up in the namespace of the pod, and its volume in that of the VM", "KeyPlugged": "the node's own notes; by an ID in them it only takes a volume from the VM of the pod",
	"KeyMemoryDump": "a claim is looked up in the namespace of the pod, and its volume in that of the VM", "KeyMemoryDumped": told, "MemoryDump.String": "the text of KeyMemoryDump", "MemoryDumped.String": "the text of KeyMemoryDumped",
	"VolumesText": "the text of KeyVolumes", "PluggedText": "the text of KeyPlugged",
	"VolumeDriver": word, "ParamFSType": word, "ParamKind": word, "KeyVolumeClaim": "a node writes it on a volume, and compares it with the claim that it serves",
	"KeyVolumeProgress": told,
	"KeyUploadTarget":   word,
	"KeyVolumeUpload":   "a digest is looked up in the repository of the claim alone", "UploadRepository": "its namespace and claim are those of the claim itself",
	"KeyVolumeImage": "the node pulls the image on behalf of the claim's namespace, as the images of its pods",

	// Nodes, which all namespaces share.
	"KeyTargetRuntime": "it only chooses between the runtimes of the node", "TargetVirtlet": word,
	"KeyHibernatedOnNode": node, "KeyPlacedOn": node, "LabelPool": node, "LabelSnapshotCPUClass": node, "LabelNodeRole": node, "LabelCRI": node, "LabelBackend": node, "TaintKey": node, "TaintValue": node,

	// Prefixes of keys, and parts of other names.
	"PrefixSet": prefix, "PrefixVM": prefix, "PrefixNode": prefix, "PrefixCRI": prefix, "ContainerIDScheme": "it begins the ids in statuses, which the node writes",
	"NodeAnnotations": "it lists keys", "Generation": size, "KeyError.Error": message, "Reboot.String": "the text of KeyReboot", "Rebooted.String": "the text of KeyRebooted", "Errors.Error": message,
}

// Reasons that several entries share.
const (
	word     = "a word of a closed list"
	size     = "a number or a size"
	document = "a document for the guest itself"
	told     = "it tells what became of a pod, or a set, and nothing is looked up by it"
	node     = "it names nodes, which are for all namespaces"
	prefix   = "the beginning of keys"
	message  = "a message"
)
