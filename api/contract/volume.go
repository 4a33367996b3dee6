package contract

// VolumeDriver is the name of the volumes of Cocoon's nodes: the provisioner of a StorageClass, the driver of a PersistentVolume,
// and the name of the CSIDriver object.
const VolumeDriver = "volume.cocoonstack.io"

// Parameters of a StorageClass whose provisioner is VolumeDriver.
const (
	ParamFSType = "csi.storage.k8s.io/fstype" // ext4 or xfs; ext4 by default
)

// Annotations and labels that the node writes.
const (
	KeyVolumeClaim = "volume.cocoonstack.io/claim" // label of a volume of a node: the UID of the claim that it was made for
	KeyVolumeName  = "volume.cocoonstack.io/name"  // label of a volume of a node: the name of its PersistentVolume
)
