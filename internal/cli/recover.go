package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

func (a *app) recoverCommand() *cobra.Command {
	var out textui.Format
	var rebuild bool
	cmd := &cobra.Command{
		Use:   "recover",
		Short: "List VMs that this machine has and its records do not, and adopt or remove them",
		Long: `List what this machine has of VMs that cocoond's journal does not know: folders, network interfaces, processes.
cocoond ends and removes nothing of them, and their guests go on. "adopt" makes one a VM again, "rm" removes it.

With --rebuild, print how the journal is made anew from the records that VMs have in their folders.`,
		Example: "  cocoon recover\n  cocoon recover adopt 2f7\n  cocoon recover rm 2f7 --yes",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rebuild {
				return errdefs.Preconditionf("the journal is rebuilt while cocoond does not run: stop it, run `cocoond recover --rebuild` with its configuration, and start it again; VMs run on meanwhile")
			}
			return a.withClient(func(c *nodeclient.Client) error {
				all, err := c.Strays(cmd.Context())
				if err != nil {
					return err
				}
				if out == textui.FormatJSON {
					return textui.PrintJSON(a.Stdout, append([]vm.Stray{}, all...))
				}
				rows := make([][]string, len(all))
				for i, s := range all {
					rows[i] = strayCells(s)
				}
				return textui.PrintTable(a.Stdout, []string{"ID", "NAME", "STATE", "PROCESSES", "TAPS", "WHY"}, rows)
			})
		},
	}
	cmd.Flags().BoolVar(&rebuild, "rebuild", false, "say how the journal is rebuilt")
	textui.OutputFlag(cmd, &out)
	cmd.AddCommand(a.recoverAdoptCommand(), a.recoverRemoveCommand())
	return cmd
}

func strayCells(s vm.Stray) []string {
	return []string{
		string(s.ID), textui.Cell(s.Name), textui.Cell(string(s.State)),
		textui.Cell(strings.Trim(fmt.Sprint(s.PIDs), "[]")), textui.Cell(strings.Join(s.Taps, ",")), s.Reason,
	}
}

func (a *app) recoverAdoptCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "adopt ID", Short: "Make an unknown VM one of cocoond's again, as the record in its folder says", Args: cobra.ExactArgs(1),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			r, err := c.AdoptStray(ctx, args[0], name)
			if err == nil {
				a.printf("%s\n", r.Spec.Name)
			}
			return err
		}),
	}
	cmd.Flags().StringVar(&name, "name", "", "another name, when its own is taken")
	return cmd
}

func (a *app) recoverRemoveCommand() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "rm ID", Short: "End the process of an unknown VM, and remove its disks and interfaces", Args: cobra.ExactArgs(1),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			if !yes {
				if err := a.confirm(fmt.Sprintf("This removes the unknown VM %s with its disks. Go on? [y/N] ", args[0])); err != nil {
					return err
				}
			}
			return c.RemoveStray(ctx, args[0])
		}),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}
