// Package scheduler holds the configuration of cocoon-scheduler, for whom installs it. It installs nothing.
package scheduler

import _ "embed"

// Config is the KubeSchedulerConfiguration, but for where the API server is.
//
//go:embed config.yaml
var Config []byte
