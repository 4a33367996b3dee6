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

// Main runs kubectl with args and ends the process if it fails. kubectl and
// its plugin handler read os.Args, which Main therefore sets.
func Main(args []string) {
	os.Args = append([]string{"kubectl"}, args...)
	// The verbosity must hold while the command is built, before its flags are
	// parsed. An invalid one is reported by the parser.
	_, _ = logs.GlogSetter(cmd.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}
