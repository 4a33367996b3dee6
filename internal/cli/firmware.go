package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

func (a *app) vmFirmwareCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use:   "firmware",
		Short: "List what UEFI and TPMs of removed VMs have kept, and remove it",
		Long: `List what UEFI and TPMs of removed VMs have kept under a key (cocoon vm run --keep-firmware KEY). The next VM with the same name and key,
in the same namespace, gets it. A virtual node removes that of its pods when their owners are gone.`,
		Example: "  cocoon vm run --name db --tpm persistent --keep-firmware db IMAGE\n  cocoon vm firmware\n  cocoon vm firmware rm db db",
		Args:    cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, _ []string) error {
			all, err := c.KeptFirmware(ctx)
			if err != nil {
				return err
			}
			if out == textui.FormatJSON {
				return textui.PrintJSON(a.Stdout, append([]vm.KeptFirmware{}, all...))
			}
			rows := make([][]string, len(all))
			for i, k := range all {
				rows[i] = []string{textui.Cell(k.Owner.Namespace), textui.Cell(k.VM), textui.Cell(k.Key), k.Since.Format(time.RFC3339)}
			}
			return textui.PrintTable(a.Stdout, []string{"NAMESPACE", "VM", "KEY", "SINCE"}, rows)
		}),
	}
	textui.OutputFlag(cmd, &out)
	cmd.AddCommand(a.vmFirmwareRemoveCommand())
	return cmd
}

func (a *app) vmFirmwareRemoveCommand() *cobra.Command {
	var yes bool
	var namespace string
	cmd := &cobra.Command{
		Use: "rm VM KEY", Short: "Remove what the firmware of a VM has kept; the next VM begins anew", Args: cobra.ExactArgs(2),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			k := vm.KeptFirmware{Owner: vm.Owner{Namespace: namespace}, VM: args[0], Key: args[1]}
			if !yes {
				if err := a.confirm("This removes what the firmware of VM " + k.Owner.Qualify(k.VM) + " has kept, such as the keys of its encrypted disks. Go on? [y/N] "); err != nil {
					return err
				}
			}
			return c.DropFirmware(ctx, k)
		}),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().StringVar(&namespace, "namespace", "", "namespace that the VM belongs to; without it, one that was made by hand")
	return cmd
}
