package cli

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

func (a *app) snapshotCommand() *cobra.Command {
	return group("snapshot", "Save VMs as they are, keep them, carry them elsewhere",
		`  cocoon snapshot save --name warm web
  cocoon vm clone --name web-2 warm
  cocoon snapshot push warm registry.example.com/team/warm:v1
  cocoon snapshot export warm -o warm.tar`,
		a.snapshotSaveCommand(), a.snapshotListCommand(), a.snapshotInspectCommand(), a.snapshotRmCommand(), a.snapshotPublishCommand(),
		a.snapshotExportCommand(), a.snapshotImportCommand(), a.snapshotPushCommand(), a.snapshotPullCommand(), a.snapshotRemoteCommand())
}

// A SNAPSHOT is a snapshot's name, its id, or a prefix of the id.
const snapshotHelp = "\n\nSNAPSHOT is the name of a snapshot, its id, or the beginning of its id (three characters or more)."

func (a *app) snapshotSaveCommand() *cobra.Command {
	var out textui.Format
	var s vm.SaveSpec
	var labels []string
	cmd := &cobra.Command{
		Use: "save --name NAME VM", Short: "Save a VM with its memory and disks, of one instant", Args: cobra.ExactArgs(1),
		Long: `Save a VM with its memory and disks, of one instant. It goes on running; for how long it stood still is printed.
The snapshot of a VM that is stopped has its disks alone: a clone of it boots.

Programs in the guest notice nothing. With --quiesce the guest's file systems are frozen for that instant, so that the
disks alone are consistent too; it needs the guest agent.` + refHelp,
		Example: `  cocoon snapshot save --name warm web
  cocoon snapshot save --name nightly:2026-11-21 --quiesce --description "before the upgrade" db
  cocoon snapshot save --name warm -o json web | jq .pause_ms`,
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if s.Name == "" {
				return errdefs.Invalidf("a snapshot needs a name: cocoon snapshot save --name NAME %s", args[0])
			}
			if s.Labels, err = parseLabels(labels); err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				stop := textui.Waiting(cmd.Context(), a.Stderr, "saving "+args[0])
				snap, err := c.SaveSnapshot(cmd.Context(), args[0], s)
				stop()
				if err != nil {
					return err
				}
				if out == textui.FormatJSON {
					return textui.PrintJSON(a.Stdout, nodejson.FromSnapshot(snap))
				}
				return textui.PrintTable(a.Stdout, []string{"NAME", "ID", "KIND", "SIZE", "PAUSE"}, [][]string{{
					snap.Name, shortID(snap.ID), kind(snap), textui.FormatSize(snap.Size), pause(snap),
				}})
			})
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&s.Name, "name", "", "name of the snapshot: letters, digits, \".\", \"_\", \"-\" and \":\"")
	fs.StringVar(&s.Description, "description", "", "a few words about it")
	fs.BoolVar(&s.Quiesce, "quiesce", false, "freeze the guest's file systems for the instant")
	fs.StringArrayVar(&labels, "label", nil, "label KEY=VALUE; may be repeated")
	textui.OutputFlag(cmd, &out)
	fs.SortFlags = false
	return cmd
}

func (a *app) snapshotListCommand() *cobra.Command {
	var of string
	cmd := listCommand(a, listing[snapshot.Snapshot]{
		short: "List snapshots",
		list: func(ctx context.Context, c *nodeclient.Client) ([]snapshot.Snapshot, error) {
			all, err := c.ListSnapshots(ctx)
			if of == "" {
				return all, err
			}
			return slices.DeleteFunc(all, func(s snapshot.Snapshot) bool {
				return !vm.Named{ID: s.Source.VMID, Name: s.Source.VMName, Owner: s.Owner}.Is(of)
			}), err
		},
		name:  func(s snapshot.Snapshot) string { return s.Name },
		json:  func(s snapshot.Snapshot) any { return nodejson.FromSnapshot(s) },
		table: a.printSnapshots,
	})
	cmd.Flags().StringVar(&of, "vm", "", "only snapshots of the VM `REF`, which may have been removed since")
	return cmd
}

func (a *app) printSnapshots(all []snapshot.Snapshot) error {
	now := time.Now()
	rows := make([][]string, len(all))
	for i, s := range all {
		rows[i] = []string{
			s.Owner.Qualify(s.Name), shortID(s.ID), kind(s), s.Source.VMName, sharing(s.Published), s.Image, strconv.Itoa(s.CPU), textui.FormatSize(s.Memory), textui.FormatSize(s.Size), textui.Age(now, s.CreatedAt),
		}
	}
	return textui.PrintTable(a.Stdout, []string{"NAME", "ID", "KIND", "VM", "PUBLISHED", "IMAGE", "CPU", "MEMORY", "SIZE", "AGE"}, rows)
}

// sharing returns with whom the operator shares something.
func sharing(namespaces []string) string {
	if slices.Contains(namespaces, vm.Everyone) {
		return "all"
	}
	return strings.Join(namespaces, ",")
}

func shortID(id string) string { return id[:min(12, len(id))] }

// kind says what a clone of s does: resume, or boot.
func kind(s snapshot.Snapshot) string {
	if s.Live {
		return "live"
	}
	return "disks"
}

func pause(s snapshot.Snapshot) string {
	if !s.Live {
		return ""
	}
	return strconv.FormatFloat(nodejson.Milliseconds(s.Pause), 'f', 1, 64) + " ms"
}

func (a *app) snapshotInspectCommand() *cobra.Command {
	out := textui.FormatJSON
	cmd := &cobra.Command{
		Use: "inspect SNAPSHOT", Short: "Print everything known of one snapshot as JSON", Long: "Print everything known of one snapshot as JSON." + snapshotHelp,
		Example: "  cocoon snapshot inspect warm | jq .machine",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: inTurn(a.completeSnapshots),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			s, err := c.GetSnapshot(ctx, args[0])
			return a.printSnapshot(s, out, err)
		}),
	}
	jsonByDefault(cmd, &out)
	return cmd
}

func (a *app) snapshotPublishCommand() *cobra.Command {
	var namespaces []string
	var all, none bool
	cmd := &cobra.Command{
		Use: "publish SNAPSHOT (--to NAMESPACE[,...] | --all | --none)", Short: "Let namespaces of the cluster clone from a snapshot",
		Long: `Let namespaces of the cluster clone from a snapshot of yours. Without that, nobody but you does: a clone has all of the
memory of the guest that was saved. What is given replaces what was published before. Clones that were made stay.` + snapshotHelp,
		Example: `  cocoon snapshot publish golden --to prod,staging
  cocoon snapshot publish golden --all
  cocoon snapshot publish golden --none`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: inTurn(a.completeSnapshots),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case (len(namespaces) > 0) == (all != none) || all && none:
				return errdefs.Invalidf("name the namespaces with --to, or give --all or --none")
			case all:
				namespaces = []string{vm.Everyone}
			}
			return a.withClient(func(c *nodeclient.Client) error {
				s, err := c.PublishSnapshot(cmd.Context(), args[0], namespaces)
				return a.printSnapshot(s, textui.FormatTable, err)
			})
		},
	}
	fs := cmd.Flags()
	fs.StringSliceVar(&namespaces, "to", nil, "namespaces that may clone from it")
	fs.BoolVar(&all, "all", false, "all namespaces may, those to come too")
	fs.BoolVar(&none, "none", false, "nobody else may any more")
	fs.SortFlags = false
	return cmd
}

func (a *app) snapshotRmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm SNAPSHOT...", Aliases: []string{"remove"}, Short: "Delete snapshots",
		Long: `Delete snapshots. VMs that were cloned from them are not touched: they have what they need. One that a hibernated VM
is in is refused.` + snapshotHelp,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeSnapshots,
		RunE: a.removing(func(ctx context.Context, c *nodeclient.Client, ref string) error { return c.RemoveSnapshot(ctx, ref) }),
	}
}
