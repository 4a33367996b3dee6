// Package kubelet is the unmodified kubelet. It only includes it in this
// binary.
package kubelet

import (
	"context"
	"fmt"
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kubelet/app"
)

// Main runs the kubelet with its own flags until a signal arrives, and returns
// the exit code.
func Main(args []string) int {
	cmd := app.NewKubeletCommand(context.Background())
	cmd.Use = "cocoon-up kubelet"
	cmd.SetArgs(args)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cli.RunNoErrOutput(cmd); err != nil {
		fmt.Fprintln(os.Stderr, "kubelet:", err)
		return 1
	}
	return 0
}
