// Package scheduler holds the configuration and the rights of cocoon-scheduler, for whom installs it. It installs nothing.
package scheduler

import _ "embed"

// Config is the KubeSchedulerConfiguration, but for where the API server is.
//
//go:embed config.yaml
var Config []byte

// Rights are the ClusterRole cocoon-scheduler: what it does beside what system:kube-scheduler may.
//
//go:embed clusterrole.yaml
var Rights []byte
