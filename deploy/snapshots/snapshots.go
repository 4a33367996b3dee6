// Package snapshots holds the API of volume snapshots, the class of those of the nodes' volumes, and the rights of the controller, for
// programs that install them. The API is generated from its types (make generate).
package snapshots

import _ "embed"

// The API of volume snapshots.
var (
	//go:embed crds/snapshot.storage.k8s.io_volumesnapshots.yaml
	Snapshots []byte
	//go:embed crds/snapshot.storage.k8s.io_volumesnapshotcontents.yaml
	Contents []byte
	//go:embed crds/snapshot.storage.k8s.io_volumesnapshotclasses.yaml
	Classes []byte
)

// Class is the class of snapshots of the nodes' volumes.
//
//go:embed class.yaml
var Class []byte

// Rights are those of the snapshot-controller of `cocoon up`.
//
//go:embed rbac.yaml
var Rights []byte
