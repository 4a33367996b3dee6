package cli

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/volume"
)

func (a *app) volumeSnapshotCommand() *cobra.Command {
	return group("snapshot", "Keep the content of volumes as it is",
		`  cocoon volume snapshot create data --name before-upgrade
  cocoon volume snapshot list
  cocoon volume restore data before-upgrade`,
		a.volumeSnapshotCreateCommand(), a.volumeSnapshotListCommand(), a.volumeSnapshotRmCommand())
}

func (a *app) volumeSnapshotCreateCommand() *cobra.Command {
	var out textui.Format
	var s volume.Spec
	cmd := &cobra.Command{
		Use: "create VOLUME --name NAME", Short: "Keep the content of a volume as it is", Args: cobra.ExactArgs(1),
		Long:    "Keep the content of a volume as it is. A VM that writes to it must be stopped or hibernated." + volumeHelp,
		Example: "  cocoon volume snapshot create data --name before-upgrade", ValidArgsFunction: inTurn(a.completeVolumes),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *nodeclient.Client) error {
				stop := textui.Waiting(cmd.Context(), a.Stderr, "saving "+args[0])
				x, err := c.SaveVolume(cmd.Context(), args[0], s)
				stop()
				if err != nil {
					return err
				}
				if out == textui.FormatJSON {
					return textui.PrintJSON(a.Stdout, nodejson.FromVolumeSnapshot(x))
				}
				return a.printVolumeSnapshots([]volume.Snapshot{x})
			})
		},
	}
	cmd.Flags().StringVar(&s.Name, "name", "", "name of the snapshot (default: one that the node chooses)")
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) volumeSnapshotListCommand() *cobra.Command {
	return listCommand(a, listing[volume.Snapshot]{
		short: "List snapshots of volumes",
		list: func(ctx context.Context, c *nodeclient.Client) ([]volume.Snapshot, error) {
			return c.ListVolumeSnapshots(ctx)
		},
		name:  func(s volume.Snapshot) string { return s.Owner.Qualify(s.Name) },
		json:  func(s volume.Snapshot) any { return nodejson.FromVolumeSnapshot(s) },
		table: a.printVolumeSnapshots,
	})
}

func (a *app) printVolumeSnapshots(all []volume.Snapshot) error {
	now := time.Now()
	rows := make([][]string, len(all))
	for i, s := range all {
		rows[i] = []string{s.Owner.Qualify(s.Name), shortID(string(s.ID)), s.Source, s.Kind, textui.FormatSize(s.Size), textui.Age(now, s.CreatedAt)}
	}
	return textui.PrintTable(a.Stdout, []string{"NAME", "ID", "VOLUME", "KIND", "SIZE", "AGE"}, rows)
}

func (a *app) volumeSnapshotRmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm SNAPSHOT...", Aliases: []string{"remove"}, Short: "Delete snapshots of volumes",
		Long: "Delete snapshots of volumes. Volumes that were made of them stay.",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVolumeSnapshots,
		RunE: a.removing(func(ctx context.Context, c *nodeclient.Client, ref string) error {
			return c.RemoveVolumeSnapshot(ctx, ref)
		}),
	}
}

// counting reports how many bytes were read.
type counting struct {
	io.Reader
	report func(bytes int64) // nil: nobody asks
	total  *int64
}

func newCounting(r io.Reader, report func(int64)) io.Reader { return counting{r, report, new(int64)} }

func (c counting) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	if *c.total += int64(n); c.report != nil {
		c.report(*c.total)
	}
	return n, err
}
