// Package scheduler holds the configuration and the rights of cocoon-scheduler, for programs that install it. It installs nothing.
package scheduler

import _ "embed"

// Config is the KubeSchedulerConfiguration, without the address of the API server.
//
//go:embed config.yaml
var Config []byte

// Rights are the ClusterRole cocoon-scheduler: the permissions in addition to system:kube-scheduler.
//
//go:embed clusterrole.yaml
var Rights []byte
