package cli

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/nodeclient"
)

const quickly = time.Second // shell completion and version do not wait longer for the daemon

func completeWords(cmd *cobra.Command, flag string, words ...string) {
	// Fails only for a flag that does not exist, which the first use of the command would show.
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// completeVMs offers the names of VMs that are not on the command line yet.
func (a *app) completeVMs(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, args, func(ctx context.Context, c *nodeclient.Client) (names []string, err error) {
		all, err := c.List(ctx)
		for _, r := range all {
			names = append(names, r.Spec.Name)
		}
		return names, err
	})
}

func (a *app) completeImages(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, args, func(ctx context.Context, c *nodeclient.Client) (names []string, err error) {
		all, err := c.ListImages(ctx)
		for _, i := range all {
			names = append(names, i.Name)
		}
		return names, err
	})
}

func (a *app) completeSnapshots(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, args, func(ctx context.Context, c *nodeclient.Client) (names []string, err error) {
		all, err := c.ListSnapshots(ctx)
		for _, s := range all {
			names = append(names, s.Name)
		}
		return names, err
	})
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

func (a *app) complete(cmd *cobra.Command, args []string, list func(context.Context, *nodeclient.Client) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), quickly)
	defer cancel()
	var names []string
	err := a.withClient(func(c *nodeclient.Client) (err error) { names, err = list(ctx, c); return err })
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.DeleteFunc(names, func(n string) bool { return slices.Contains(args, n) }), cobra.ShellCompDirectiveNoFileComp
}
