package cli

import (
	"cmp"
	"compress/gzip"
	"io"
	"path/filepath"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) snapshotExportCommand() *cobra.Command {
	var path, dir string
	var compress bool
	cmd := &cobra.Command{
		Use: "export SNAPSHOT [-o FILE|-]", Short: "Write a snapshot to a file, or to a folder", Args: cobra.ExactArgs(1),
		Long: `Write a snapshot to a file or to standard output as a tar stream, as import takes it; or with --to-dir to a folder of
this machine, from which "cocoon vm clone --from-dir" makes VMs without any import.

What it holds is the guest's memory: keep it as safe as the guest's secrets.` + snapshotHelp,
		Example: `  cocoon snapshot export warm -o warm.tar
  cocoon snapshot export warm --gzip -o - | ssh other cocoon snapshot import --name warm
  cocoon snapshot export warm --to-dir /srv/shared/warm`,
		ValidArgsFunction: inTurn(a.completeSnapshots),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, ref := cmd.Context(), args[0]
			if dir != "" {
				if path != "" || compress {
					return errdefs.Invalidf("--to-dir goes neither with --output nor with --gzip")
				}
				abs, err := filepath.Abs(dir)
				if err != nil {
					return errdefs.Invalidf("--to-dir %s: %w", dir, err)
				}
				return a.withClient(func(c *nodeclient.Client) error {
					stop := textui.Waiting(ctx, a.Stderr, "exporting "+ref)
					defer stop()
					return c.ExportSnapshotDir(ctx, ref, abs)
				})
			}
			path = cmp.Or(path, "-")
			if err := a.writable(path, "a snapshot", "cocoon snapshot export SNAPSHOT -o FILE"); err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				s, err := c.GetSnapshot(ctx, ref)
				if err != nil {
					return err
				}
				size := s.Size
				if compress {
					size = 0 // the compressed size is unknown
				}
				return a.exportTo(path, ref, size, func(w io.Writer) error {
					if !compress {
						return c.ExportSnapshot(ctx, s.ID, w)
					}
					z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
					if err != nil {
						return err
					}
					if err := c.ExportSnapshot(ctx, s.ID, z); err != nil {
						return err
					}
					return z.Close()
				})
			})
		},
	}
	fs := cmd.Flags()
	fs.StringVarP(&path, "output", "o", "", "`FILE`, or - for standard output (default -)")
	fs.StringVar(&dir, "to-dir", "", "`DIR` of this machine, new or empty")
	fs.BoolVar(&compress, "gzip", false, "compress the stream")
	fs.SortFlags = false
	return cmd
}

func (a *app) snapshotImportCommand() *cobra.Command {
	var out textui.Format
	var name, description, dir string
	cmd := &cobra.Command{
		Use: "import --name NAME [FILE|-]", Short: "Store what export wrote", Args: cobra.MaximumNArgs(1),
		Long: `Store what export wrote: a tar stream, plain or gzip, from a file or from standard input; or with --from-dir a folder of
this machine that "export --to-dir" made, in place where that can be done.

Either the whole snapshot is there afterwards, or nothing is.`,
		Example: `  cocoon snapshot import --name warm warm.tar
  ssh other cocoon snapshot export warm -o - | cocoon snapshot import --name warm
  cocoon snapshot import --name warm --from-dir /srv/shared/warm`,
		ValidArgsFunction: inTurn(completeFiles),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			if dir != "" {
				if len(args) > 0 {
					return errdefs.Invalidf("a snapshot comes from a file or from --from-dir, not from both")
				}
				abs, err := filepath.Abs(dir)
				if err != nil {
					return errdefs.Invalidf("--from-dir %s: %w", dir, err)
				}
				return a.withClient(func(c *nodeclient.Client) error {
					stop := textui.Waiting(ctx, a.Stderr, "importing "+abs)
					s, err := c.ImportSnapshotDir(ctx, name, description, abs)
					stop()
					return a.printSnapshot(s, out, err)
				})
			}
			r, size, err := a.openSource(argument(args, 0, "-"), "a snapshot", "cocoon snapshot import --name NAME FILE")
			if err != nil {
				return err
			}
			defer r.Close()
			return a.withClient(func(c *nodeclient.Client) error {
				bar := textui.NewBar(a.Stderr, cmp.Or(name, "snapshot"), out == textui.FormatJSON)
				s, err := c.ImportSnapshot(ctx, name, description, r, bar.Counter("importing", size))
				bar.Clear()
				return a.printSnapshot(s, out, err)
			})
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&name, "name", "", "name of the snapshot here (default: the one it has)")
	fs.StringVar(&description, "description", "", "a few words about it (default: its own)")
	fs.StringVar(&dir, "from-dir", "", "`DIR` of this machine that export --to-dir made")
	textui.OutputFlag(cmd, &out)
	fs.SortFlags = false
	return cmd
}

func (a *app) snapshotPushCommand() *cobra.Command {
	var out textui.Format
	var remote remoteFlags
	cmd := &cobra.Command{
		Use: "push SNAPSHOT URL/REPO[:TAG]", Short: "Send a snapshot to a registry", Args: cobra.ExactArgs(2),
		Long: `Send a snapshot to an OCI registry: epoch, or any other. What the registry has already, of this snapshot or of another
one, is not sent again; a push that broke off goes on where it was. The digest of its manifest is printed.

What is sent is the guest's memory: let nobody read the repository who may not read the guest's secrets.` + remoteHelp,
		Example: `  cocoon snapshot push warm https://epoch.example.com:8443/team/warm:v1 --token-file token
  EPOCH_TOKEN=... cocoon snapshot push warm http://127.0.0.1:8080/warm:v1`,
		ValidArgsFunction: inTurn(a.completeSnapshots),
		RunE: func(cmd *cobra.Command, args []string) error {
			auth, err := remote.auth(args[1], a.Getenv)
			if err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				bar := textui.NewBar(a.Stderr, args[0], out == textui.FormatJSON)
				s, err := c.PushSnapshot(cmd.Context(), args[0], args[1], auth, showTransfer(bar))
				bar.Clear()
				return a.printPushed(nodejson.FromSnapshot(s), s.Digest, out, err)
			})
		},
	}
	remote.add(cmd)
	textui.OutputFlag(cmd, &out)
	cmd.Flags().SortFlags = false
	return cmd
}

// printPushed prints the result of a push: as JSON what was pushed, otherwise the digest of its manifest.
func (a *app) printPushed(pushed any, digest string, out textui.Format, err error) error {
	switch {
	case err != nil:
		return err
	case out == textui.FormatJSON:
		return textui.PrintJSON(a.Stdout, pushed)
	}
	a.printf("%s\n", digest)
	return nil
}

func (a *app) snapshotPullCommand() *cobra.Command {
	var out textui.Format
	var remote remoteFlags
	var name string
	var early bool
	cmd := &cobra.Command{
		Use: "pull --name NAME URL/REPO[:TAG]", Short: "Fetch a snapshot from a registry, or from another node", Args: cobra.ExactArgs(1),
		Long: `Fetch a snapshot from an OCI registry. Every byte is verified before the snapshot is there; what snapshots of this node
have already is not fetched.

With --early the command returns when everything but the memory is here, if it is a snapshot of Firecracker: a VM that is
cloned from it starts at once, and waits for the pages that it needs and that are not here yet. Another snapshot is pulled
whole.

With cocoon://HOST:PORT/SNAPSHOT it comes from another node, whose node API listens there and accepts this node's peer
certificate.` + remoteHelp,
		Example: `  cocoon snapshot pull --name warm https://epoch.example.com:8443/team/warm:v1 --token-file token
  cocoon snapshot pull --name warm registry.example.com/team/warm@sha256:6f5b...
  cocoon snapshot pull --name warm cocoon://node-2:9443/warm`,
		RunE: func(cmd *cobra.Command, args []string) error {
			auth, err := remote.auth(args[0], a.Getenv)
			if err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				bar := textui.NewBar(a.Stderr, args[0], out == textui.FormatJSON)
				pull := c.PullSnapshot
				if early {
					pull = c.PullSnapshotEarly
				}
				s, err := pull(cmd.Context(), args[0], name, auth, showTransfer(bar))
				bar.Clear()
				return a.printSnapshot(s, out, err)
			})
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "name of the snapshot here (default: the one it has)")
	cmd.Flags().BoolVar(&early, "early", false, "return before the memory of a snapshot of Firecracker is here, which then comes when it is needed")
	remote.add(cmd)
	textui.OutputFlag(cmd, &out)
	cmd.Flags().SortFlags = false
	return cmd
}

// transfer returns show for the transfer of a snapshot, nil if nothing is drawn.
func showTransfer(b *textui.Bar) func(snapshot.Progress) {
	if b == nil {
		return nil
	}
	return func(p snapshot.Progress) { b.Show(p.Phase, p.Done, p.Total) }
}

// printSnapshot prints the result of a transfer, or returns its error.
func (a *app) printSnapshot(s snapshot.Snapshot, out textui.Format, err error) error {
	switch {
	case err != nil:
		return err
	case out == textui.FormatJSON:
		return textui.PrintJSON(a.Stdout, nodejson.FromSnapshot(s))
	}
	return a.printSnapshots([]snapshot.Snapshot{s})
}
