// Package applet determines which of the binary's programs to run. It does
// not run them.
package applet

import "path/filepath"

// The programs in the binary.
const (
	ControlPlane  = "control-plane"
	CoreDNS       = "coredns"
	KubeProxy     = "kube-proxy"
	Kubectl       = "kubectl"
	Kubelet       = "kubelet"
	MetricsServer = "metrics-server"
	Scheduler     = "cocoon-scheduler"
	Snapshots     = "snapshot-controller"
	Version       = "version"
)

// Resolve returns the program named by argv, and the arguments for it. A
// link named kubectl or cocoon-scheduler selects that program. Under any other name the
// first argument selects it. The program is empty if that argument is missing, and may be an unknown name.
func Resolve(argv []string) (program string, args []string) {
	if len(argv) == 0 {
		return "", nil
	}
	if name := filepath.Base(argv[0]); name == Kubectl || name == Scheduler {
		return name, argv[1:]
	}
	if len(argv) == 1 {
		return "", nil
	}
	return argv[1], argv[2:]
}
