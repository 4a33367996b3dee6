// Package csinode does for a node what a container orchestrator does with the node service of CSI drivers (CSI specification 1.12): it
// finds the drivers that run on this machine, and stages, publishes, grows and releases their volumes.
//
// It knows neither pods nor virtual machines: a volume is published for a holder, which has an owner. The attachment of a volume to the
// machine, which a driver's controller service does, is the caller's business.
package csinode

import (
	"log/slog"

	"cocoonstack.io/cocoon/internal/vm"
)

// Config configures a Node.
type Config struct {
	Plugins string       // folder in which drivers put their registration sockets, such as /var/lib/kubelet/plugins_registry
	Dir     string       // absolute folder below which volumes are staged and published; the drivers mount there
	Log     *slog.Logger // nil discards
}

// Driver is a driver that is registered on this node.
type Driver struct {
	Name       string
	NodeID     string            // the driver's name for this machine
	Topology   map[string]string // where the machine is, for the volumes of the driver; nil: everywhere
	MaxVolumes int64             // that the machine can have attached; 0: no limit is known
}

// Key names a volume that is published for a holder.
type Key struct {
	Owner  vm.Owner
	Holder string // who has the volume, such as the UID of a pod
	Name   string // of the volume, among those of the holder
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
	Handle string // the driver's id of the volume

	Access     Access
	Mode       string   // access mode as in the CSI specification, such as SINGLE_NODE_WRITER
	FSType     string   // AsFolder; "": the driver's default
	MountFlags []string // AsFolder
	Group      string   // AsFolder: the group that gets the files, if the driver can give them to one (VOLUME_MOUNT_GROUP); "": none
	ReadOnly   bool
	Ephemeral  bool // the driver makes the volume for this holder, and it is not staged

	Attributes map[string]string // of the volume (volume_context)
	Attachment map[string]string // what attaching told (publish_context)
	Secrets    Secrets
}

// Secrets are passed to a driver. They are never stored or logged.
type Secrets struct {
	Stage, Publish map[string]string
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
