// Package kubectl is the unmodified kubectl. It adds no commands of its own.
package kubectl

import (
	"os"

	// Credential plugins, as in the original.
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

// Main runs kubectl with args and ends the process if it fails. It sets
// os.Args, because kubectl and its plugin handler read them.
func Main(args []string) {
	os.Args = append([]string{"kubectl"}, args...)
	// The verbosity must be set before the command is built, which is before its
	// flags are parsed. The parser reports an invalid value.
	_, _ = logs.GlogSetter(cmd.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}
