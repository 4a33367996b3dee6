package cli

import (
	"context"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) vmDumpMemoryCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use: "dump-memory REF VOLUME", Short: "Write the memory of a running VM to a volume", Args: cobra.ExactArgs(2),
		Long: `Write the memory of a running VM to a volume that no VM has. The volume gets a file system (ext4) with one file: a core file (ELF), which
crash, gdb and volatility read. The guest stands still meanwhile. The volume must be empty, or have an earlier dump, which is lost, and it
needs a little more room than the VM has memory. Who may read the volume may read every secret in the memory of the guest.` + refHelp,
		Example: `  cocoon volume create core --size 3G
  cocoon vm dump-memory web core
  cocoon vm run --name look --volume core:/core:ro IMAGE`,
		ValidArgsFunction: inTurn(a.completeVMs, a.completeVolumes),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			defer textui.Waiting(ctx, a.Stderr, "dumping the memory of "+args[0])()
			return c.DumpMemory(ctx, args[0], args[1], file)
		}),
	}
	cmd.Flags().StringVar(&file, "file", "memory.dump", "name of the file on the volume")
	return cmd
}
