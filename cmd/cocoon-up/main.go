// Command cocoon-up is a Kubernetes control plane for one machine, kubectl,
// metrics-server, kubelet, kube-proxy, CoreDNS, snapshot-controller and cocoon-scheduler in one binary. The "cocoon up" verb writes its configuration and starts it.
package main

import (
	"fmt"
	"os"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/applet"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/controlplane"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/coredns"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/kubectl"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/kubelet"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/kubeproxy"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/metricsserver"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/scheduler"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/snapshotcontroller"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/version"
)

const usage = `usage: cocoon-up control-plane --config FILE
       cocoon-up kubectl ARGS...
       cocoon-up metrics-server FLAGS...
       cocoon-up cocoon-scheduler FLAGS...
       cocoon-up kubelet FLAGS...
       cocoon-up kube-proxy FLAGS...
       cocoon-up coredns --conf FILE
       cocoon-up snapshot-controller --kubeconfig FILE
       cocoon-up version
`

func main() {
	program, args := applet.Resolve(os.Args)
	switch program {
	case applet.ControlPlane:
		os.Exit(controlplane.Main(args, os.Stderr))
	case applet.Kubectl:
		kubectl.Main(args)
	case applet.MetricsServer:
		os.Exit(metricsserver.Main(args))
	case applet.Kubelet:
		os.Exit(kubelet.Main(args))
	case applet.KubeProxy:
		os.Exit(kubeproxy.Main(args))
	case applet.CoreDNS:
		os.Exit(coredns.Main(args, os.Stderr))
	case applet.Snapshots:
		os.Exit(snapshotcontroller.Main(args, os.Stderr))
	case applet.Scheduler:
		os.Exit(scheduler.Main(args))
	case applet.Version:
		version.Main(os.Stdout)
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
}
