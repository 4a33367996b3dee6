package cli

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

func (a *app) vmResizeCommand() *cobra.Command {
	var out textui.Format
	var to vm.Size
	var memory textui.Size
	cmd := &cobra.Command{
		Use: "resize REF", Short: "Give a running VM more CPUs or memory", Args: cobra.ExactArgs(1),
		Long: `Give a running VM more CPUs or memory, up to the maximum that it was created with. What is left out stays. Nothing is taken
away. The guest of a container image cannot grow.` + refHelp,
		Example:           "  cocoon vm resize ubuntu --cpu 4 --memory 8G",
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			now, err := c.Inspect(ctx, args[0])
			if err != nil {
				return err
			}
			to := vm.Size{CPUs: cmp.Or(to.CPUs, now.Spec.CPUs), Memory: cmp.Or(int64(memory), now.Spec.Memory)}
			r, err := c.Resize(ctx, string(now.ID), to)
			return a.printVM(r, out, err)
		}),
	}
	cmd.Flags().IntVar(&to.CPUs, "cpu", 0, "number of CPUs")
	cmd.Flags().Var(&memory, "memory", "size of the memory")
	textui.OutputFlag(cmd, &out)
	return cmd
}

// hugePagesFlag is a size of huge pages: 2Mi or 1Gi.
type hugePagesFlag vm.HugePages

func (p *hugePagesFlag) Type() string   { return "size" }
func (p *hugePagesFlag) String() string { return vm.HugePages(*p).String() }

func (p *hugePagesFlag) Set(v string) error {
	size, err := vm.ParseHugePages(v)
	*p = hugePagesFlag(size)
	return err
}
