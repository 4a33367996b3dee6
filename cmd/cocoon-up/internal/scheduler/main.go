// Package scheduler is kube-scheduler with the plugins StickyVM and
// PromptVolumeBinding, as a separate process. Its configuration selects the pods and what is done with them.
package scheduler

import (
	"fmt"
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/promptbinding"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/stickyvm"
)

// Main runs the scheduler with kube-scheduler's own flags until a signal
// arrives, and returns the exit code.
func Main(args []string) int {
	cmd := app.NewSchedulerCommand(app.WithPlugin(stickyvm.Name, stickyvm.New), app.WithPlugin(promptbinding.Name, promptbinding.New))
	cmd.Use = "cocoon-scheduler"
	cmd.SetArgs(args)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cli.RunNoErrOutput(cmd); err != nil {
		fmt.Fprintln(os.Stderr, "cocoon-scheduler:", err)
		return 1
	}
	return 0
}
