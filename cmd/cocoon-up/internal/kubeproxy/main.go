// Package kubeproxy is the unmodified kube-proxy. It only includes it in this
// binary.
package kubeproxy

import (
	"fmt"
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kube-proxy/app"
)

// Main runs kube-proxy with its own flags until a signal arrives, and returns
// the exit code.
func Main(args []string) int {
	cmd := app.NewProxyCommand()
	cmd.Use = "cocoon-up kube-proxy"
	cmd.SetArgs(args)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cli.RunNoErrOutput(cmd); err != nil {
		fmt.Fprintln(os.Stderr, "kube-proxy:", err)
		return 1
	}
	return 0
}
