// Package manager holds the rights of cocoon-manager, for whom installs it. It installs nothing.
package manager

import _ "embed"

// Rights are the ClusterRole cocoon-manager: everything the manager does in a cluster, and nothing else.
//
//go:embed clusterrole.yaml
var Rights []byte
