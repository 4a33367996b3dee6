package contract

// VolumeDriver is the name of the volumes of Cocoon's nodes: the provisioner of a StorageClass, the driver of a PersistentVolume,
// and the name of the CSIDriver object.
const VolumeDriver = "volume.cocoonstack.io"

// ParamFSType is a parameter of a StorageClass whose provisioner is VolumeDriver: ext4 (the default) or xfs.
const ParamFSType = "csi.storage.k8s.io/fstype"

// ParamKind is another one: file (the default), or lvm for volumes on the thin pool of a node.
const ParamKind = "kind"

// KeyVolumeClaim is a label that a node writes on a volume of its own: the UID of the claim that the volume was made for.
const KeyVolumeClaim = "volume.cocoonstack.io/claim"

// KeyVolumeImage is an annotation of a PersistentVolumeClaim of a node: the image whose disk its volume gets when it is made, as a pod's
// image, also docker://NAME and http(s)://….
const KeyVolumeImage = "volume.cocoonstack.io/image"

// KeyVolumeProgress is an annotation of an Event of a claim whose volume gets the disk of an image: how much of the work is done, in percent from 0 to
// 100.
const KeyVolumeProgress = "volume.cocoonstack.io/progress"

// KeyUploadTarget is an annotation of a PersistentVolumeClaim whose volume is not made before a disk has been uploaded for it. CDI defined it, and
// `virtctl image-upload` writes it.
const KeyUploadTarget = "cdi.kubevirt.io/storage.upload.target"

// KeyVolumeUpload is an annotation of such a claim when the disk is there: sha256:DIGEST of the image in UploadRepository, whose disk the volume gets.
const KeyVolumeUpload = "volume.cocoonstack.io/upload"

// UploadRepository is where the registry keeps what was uploaded for a claim. The namespace is in it, so a claim leads to no upload of another.
func UploadRepository(namespace, claim string) string { return "uploads/" + namespace + "/" + claim }
