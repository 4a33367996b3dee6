package cli

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

const quickly = time.Second // shell completion and version do not wait longer for the daemon

// completeVMs offers the names of VMs that are not on the command line yet.
func (a *app) completeVMs(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return complete(a, cmd, args, (*nodeclient.Client).List, func(x vm.Record) string { return x.Spec.Name })
}

func (a *app) completeImages(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return complete(a, cmd, args, (*nodeclient.Client).ListImages, func(x image.Image) string { return x.Name })
}

func (a *app) completeSnapshots(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return complete(a, cmd, args, (*nodeclient.Client).ListSnapshots, func(x snapshot.Snapshot) string { return x.Name })
}

func (a *app) completeVolumes(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return complete(a, cmd, args, (*nodeclient.Client).ListVolumes, func(v nodewire.StoredVolume) string { return v.Name })
}

func (a *app) completeVolumeSnapshots(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return complete(a, cmd, args, (*nodeclient.Client).ListVolumeSnapshots, func(s volume.Snapshot) string { return s.Name })
}

// inTurn completes the first argument with the first of list, the second with the second, and no further arguments.
func inTurn(list ...cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= len(list) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return list[len(args)](cmd, args, prefix)
	}
}

func completeFiles(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return nil, cobra.ShellCompDirectiveDefault
}

func complete[T any](
	a *app, cmd *cobra.Command, args []string, list func(*nodeclient.Client, context.Context) ([]T, error), name func(T) string,
) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), quickly)
	defer cancel()
	var all []T
	err := a.withClient(func(c *nodeclient.Client) (err error) { all, err = list(c, ctx); return err })
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for _, x := range all {
		if n := name(x); !slices.Contains(args, n) {
			names = append(names, n)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
