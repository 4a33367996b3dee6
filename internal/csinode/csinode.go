// Package csinode is the contract of the node's part in CSI volumes (CSI specification 1.12, node service): drivers that run on this
// machine, and the volumes of theirs that are published for holders.
//
// It knows neither pods nor virtual machines: a holder has an owner. The attachment of a volume to the machine, which a driver's controller
// service does, is the caller's business. Package local implements it.
package csinode

import (
	"cmp"
	"fmt"

	"cocoonstack.io/cocoon/internal/vm"
)

// Driver is a driver that is registered on this node.
type Driver struct {
	Name       string
	NodeID     string            // the driver's name for this machine
	Topology   map[string]string // where the machine is, for the volumes of the driver; nil: everywhere
	MaxVolumes int64             // that the machine can have attached; 0: no limit is known
}

// Key names a volume that is published for a holder.
type Key struct {
	Owner  vm.Owner `json:"owner"`  // only its namespace tells keys apart
	Holder string   `json:"holder"` // who has the volume, such as the UID of a pod
	Name   string   `json:"name"`   // of the volume, among those of the holder
}

// String returns the volume and its holder, for messages.
func (k Key) String() string {
	return fmt.Sprintf("volume %.100q of %.200q", k.Name, k.Owner.Qualify(k.Holder))
}

// Compare orders keys by namespace, holder and name.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Owner.Namespace, o.Owner.Namespace), cmp.Compare(k.Holder, o.Holder), cmp.Compare(k.Name, o.Name))
}

// Access says how a volume is published.
type Access string

// Values of Access.
const (
	AsFolder Access = "folder" // as a mounted folder
	AsDevice Access = "device" // as a block device
)

// Request asks to publish a volume.
type Request struct {
	Key
	Driver string
	Handle string // the driver's id of the volume; "" for an ephemeral one: an id that follows from the key

	Access     Access
	Mode       string   // access mode as in the CSI specification, such as SINGLE_NODE_WRITER
	FSType     string   // AsFolder; "": the driver's default
	MountFlags []string // AsFolder
	Group      string   // AsFolder: the group that gets the files, if the driver can give them to one (VOLUME_MOUNT_GROUP); "": none
	ReadOnly   bool
	Ephemeral  bool // the driver makes the volume for this holder, and it is not staged
	Again      bool // ask the driver also if the volume is published, so that it can renew what is in it

	Attributes map[string]string // of the volume (volume_context)
	Attachment map[string]string // what attaching told (publish_context)
	Secrets    Secrets
}

// Secrets are passed to a driver. They are never stored or logged.
type Secrets struct {
	Stage, Publish map[string]string
	Context        map[string]string // secret parts of the attributes of the volume, for publishing only (tokens of service accounts)
}

// Published is a volume that is published, or that a call which was interrupted may have published.
type Published struct {
	Key
	Driver, Handle string
	Access         Access
	ReadOnly       bool
	Path           string // of the folder or the device
	Grouped        bool   // the driver gave the files to Request.Group
	Ready          bool   // published completely since the machine started; else Publish must be called again, or Unpublish
}

// Usage is how full a published volume is.
type Usage struct {
	Bytes, Inodes Amount
	Abnormal      string // what the driver says is wrong with the volume; "": nothing
}

// Amount is a number of bytes or inodes. A driver that does not know one says 0.
type Amount struct {
	Total, Used, Available int64
}
