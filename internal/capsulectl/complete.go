package capsulectl

import (
	"context"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/config"
)

func (a *app) completeContexts(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	dir, err := a.configDir()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	c, err := config.Load(dir)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.Sorted(maps.Keys(c.Contexts)), cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeWorkloads(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, args, func(ctx context.Context, c *client) (names []string, err error) {
		answer, err := c.workloads().List(ctx, &capsulev1.WorkloadListRequest{})
		for _, w := range answer.GetWorkloads() {
			names = append(names, w.GetName())
		}
		return names, err
	})
}

func (a *app) completeVolumes(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, args, func(ctx context.Context, c *client) (names []string, err error) {
		answer, err := c.volumes().List(ctx, &capsulev1.VolumeListRequest{})
		for _, v := range answer.GetVolumes() {
			names = append(names, v.GetName())
		}
		return names, err
	})
}

func (a *app) completeSnapshots(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, args, func(ctx context.Context, c *client) (names []string, err error) {
		answer, err := c.volumes().SnapshotList(ctx, &capsulev1.VolumeSnapshotListRequest{})
		for _, s := range answer.GetSnapshots() {
			names = append(names, s.GetName())
		}
		return names, err
	})
}

// first completes the first argument only.
func first(complete cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, to string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return complete(cmd, args, to)
	}
}

func (a *app) completeKeys(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, args, func(ctx context.Context, c *client) (names []string, err error) {
		answer, err := c.identity().KeyList(ctx, &capsulev1.KeyListRequest{})
		for _, k := range answer.GetKeys() {
			names = append(names, k.GetKid()+"\t"+k.GetName())
		}
		return names, err
	})
}

// complete offers the names of list that are not on the command line yet.
func (a *app) complete(cmd *cobra.Command, args []string, list func(ctx context.Context, c *client) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), a.Completion)
	defer cancel()
	c, err := a.open()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	defer c.close()
	names, err := list(ctx, c)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.DeleteFunc(names, func(n string) bool { return slices.Contains(args, n) }), cobra.ShellCompDirectiveNoFileComp
}
