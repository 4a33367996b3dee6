package cli

import (
	"context"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

func (a *app) vmAttachNICCommand() *cobra.Command {
	var out textui.Format
	var want vm.NICSpec
	cmd := &cobra.Command{
		Use: "attach-nic REF NETWORK", Short: "Give a VM one more network interface, also while it runs", Args: cobra.ExactArgs(2),
		Long: `Give a VM one more network interface, also while it runs. The guest of a container image configures it at once; an image that boots
itself finds a new interface, and its programs configure it. The VM has it until it is detached, or the VM is removed. It is no error
if the VM has a further interface on the network already.` + refHelp,
		Example:           "  cocoon vm attach-nic web lab",
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			want.Network = args[1]
			r, err := c.AttachNIC(ctx, args[0], want)
			return a.printVM(r, out, err)
		}),
	}
	cmd.Flags().StringVar(&want.MAC, "mac", "", "hardware address; without it the network chooses one")
	cmd.Flags().BoolVar(&want.LinkDown, "link-down", false, "the guest sees no carrier until it is set up (cocoon vm set-link)")
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) vmDetachNICCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "detach-nic REF NETWORK|MAC", Short: "Take a network interface from a VM, also while it runs", Args: cobra.ExactArgs(2),
		Long: `Take a network interface from a VM, also while it runs, and release its addresses. The first interface stays. Name the interface by its
network, or by its hardware address if the VM has several there.` + refHelp,
		Example:           "  cocoon vm detach-nic web lab",
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			r, err := c.DetachNIC(ctx, args[0], args[1])
			return a.printVM(r, out, err)
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) vmSetLinkCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "set-link REF NETWORK|MAC up|down", Short: "Set the link of a network interface up or down, also while the VM runs", Args: cobra.ExactArgs(3),
		Long: `Set the link of a network interface up or down, also while the VM runs. While it is down, the guest sees no carrier and no packet passes.
The link stays as it is set when the VM stops, hibernates or is restored. Name the interface by its network, or by its hardware address if the VM has
several there.` + refHelp,
		Example:           "  cocoon vm set-link web lab down",
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			if args[2] != "up" && args[2] != "down" {
				return errdefs.Invalidf("a link is up or down, not %q", args[2])
			}
			r, err := c.SetLink(ctx, args[0], args[1], args[2] == "down")
			return a.printVM(r, out, err)
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}
