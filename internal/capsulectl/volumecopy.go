package capsulectl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/manifest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) volumeSnapshotCommand() *cobra.Command {
	create := &cobra.Command{
		Use: "create VOLUME NAME", Short: "Keep the content of a volume as it is", Args: cobra.ExactArgs(2), ValidArgsFunction: first(a.completeVolumes),
		Long:    "Keep the content of a volume as it is. A micro-VM may run with the volume; a container must be stopped.",
		Example: "  capsulectl volume snapshot create data before-upgrade",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			s, err := c.volumes().Snapshot(ctx, &capsulev1.VolumeSnapshotRequest{Volume: args[0], Name: args[1]})
			if err != nil {
				return err
			}
			a.printf("%s  %s\n", textui.Cell(s.GetName()), size(s.GetSizeBytes()))
			return nil
		}),
	}
	var out textui.Format
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the snapshots of volumes", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			answer, err := c.volumes().SnapshotList(ctx, &capsulev1.VolumeSnapshotListRequest{})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return printMessages(a, answer.GetSnapshots())
			}
			var table [][]string
			for _, s := range answer.GetSnapshots() {
				table = append(table, []string{s.GetName(), s.GetVolume(), size(s.GetSizeBytes()), stamp(s.GetCreatedAtUnix())})
			}
			return textui.PrintTable(a.Stdout, []string{"NAME", "VOLUME", "SIZE", "CREATED"}, table)
		}),
	}
	textui.OutputFlag(list, &out)
	remove := &cobra.Command{
		Use: "delete NAME...", Aliases: []string{"rm"}, Short: "Delete snapshots; volumes that were made from them stay", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeSnapshots,
		RunE: a.calling(func(ctx context.Context, c *client, names []string) error {
			return each(names, func(name string) error {
				_, err := c.volumes().SnapshotDelete(ctx, &capsulev1.VolumeSnapshotDeleteRequest{Name: name})
				if err == nil {
					a.printf("%s\n", name)
				}
				return err
			})
		}),
	}
	return group("snapshot", "The content of volumes at an instant", "  capsulectl volume snapshot create data before-upgrade\n  capsulectl volume rollback data before-upgrade", create, list, remove)
}

func (a *app) volumeCloneCommand() *cobra.Command {
	var text string
	var snapshot bool
	cmd := &cobra.Command{
		Use: "clone SOURCE NAME", Short: "Make a volume with the content of another one, or of a snapshot", Args: cobra.ExactArgs(2),
		Example: "  capsulectl volume clone data data-test\n  capsulectl volume clone --snapshot before-upgrade data-test",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			req := &capsulev1.VolumeCloneRequest{Name: args[1], From: &capsulev1.VolumeCloneRequest_Volume{Volume: args[0]}}
			if snapshot {
				req.From = &capsulev1.VolumeCloneRequest_Snapshot{Snapshot: args[0]}
			}
			var err error
			if req.SizeMib, err = sizeFlag(text); err != nil {
				return err
			}
			v, err := c.volumes().Clone(ctx, req)
			if err != nil {
				return err
			}
			return a.printVolume(v)
		}),
	}
	cmd.ValidArgsFunction = func(c *cobra.Command, args []string, to string) ([]string, cobra.ShellCompDirective) {
		if snapshot {
			return first(a.completeSnapshots)(c, args, to)
		}
		return first(a.completeVolumes)(c, args, to)
	}
	cmd.Flags().BoolVar(&snapshot, "snapshot", false, "SOURCE is a snapshot")
	cmd.Flags().StringVar(&text, "size", "", "`SIZE` (default: that of the source)")
	return cmd
}

func (a *app) volumeRollbackCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rollback VOLUME SNAPSHOT", Short: "Give a volume the content of its snapshot", Args: cobra.ExactArgs(2), ValidArgsFunction: first(a.completeVolumes),
		Long: "Give a volume that is not in use the content of its snapshot. What it has now is lost; take a snapshot of it first to keep that.",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			v, err := c.volumes().Rollback(ctx, &capsulev1.VolumeRollbackRequest{Name: args[0], Snapshot: args[1]})
			if err != nil {
				return err
			}
			return a.printVolume(v)
		}),
	}
}

func (a *app) volumeExportCommand() *cobra.Command {
	var raw bool
	cmd := &cobra.Command{
		Use: "export NAME {FILE | -}", Short: "Write the content of a volume to a file", Args: cobra.ExactArgs(2), ValidArgsFunction: first(a.completeVolumes),
		Long: `Write the content of a volume that is not in use to a file, compressed with zstd. The file gets its name when it is complete. To export a
volume that is in use, export a clone of it.`,
		Example: "  capsulectl volume export data data.zst\n  capsulectl volume export --raw data - | ssh backup 'cat >data.raw'",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			if args[1] == "-" {
				if textui.IsTerminal(a.Stdout) {
					return errdefs.Invalidf("the content of a volume is not for a terminal; name a file, or use a pipe")
				}
				return a.exportVolume(ctx, c, args[0], raw, a.Stdout)
			}
			return whole(args[1], func(w io.Writer) error { return a.exportVolume(ctx, c, args[0], raw, w) })
		}),
	}
	cmd.Flags().BoolVar(&raw, "raw", false, "without compression")
	return cmd
}

func (a *app) exportVolume(ctx context.Context, c *client, name string, raw bool, w io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.volumes().Export(ctx, &capsulev1.VolumeExportRequest{Name: name, Raw: raw})
	if err != nil {
		return err
	}
	m, err := s.Recv()
	if err != nil {
		return ended(err, name)
	}
	total := int64(-1)
	if raw {
		total = int64(min(m.GetSizeBytes(), 1<<62)) //nolint:gosec // bounded
	}
	bar := textui.NewBar(a.Stderr, name, false)
	defer bar.Clear()
	r := &chunks[*capsulev1.VolumeExportChunk]{from: s, data: (*capsulev1.VolumeExportChunk).GetData, rest: m.GetData()}
	n, err := io.Copy(&textui.Counter{To: w, Seen: bar.Counter("exporting", total)}, r)
	if err == nil && raw && n != total {
		err = errdefs.DataLossf("%d bytes of volume %s have arrived of %d; export it again", n, name, total)
	}
	return err
}

// ended returns an error for a stream without a first message.
func ended(err error, name string) error {
	if errors.Is(err, io.EOF) {
		return errdefs.New(errdefs.Internal, "the machine sent nothing of volume %s", name)
	}
	return err
}

// whole writes a file that gets its name when it is complete. Only the caller can read it. A pipe or a device is written to directly.
func whole(path string, write func(io.Writer) error) (err error) {
	defer func() {
		if p := (*fs.PathError)(nil); errors.As(err, &p) {
			err = errdefs.New(errdefs.FailedPrecondition, "write %s: %w", path, err)
		}
	}()
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0) // a folder is refused
		if err != nil {
			return err
		}
		return errors.Join(write(f), f.Close())
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".part-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // does nothing once it has its name
	if err := errors.Join(write(f), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func (a *app) volumeImportCommand() *cobra.Command {
	var text string
	cmd := &cobra.Command{
		Use: "import NAME {FILE | -}", Short: "Make a volume with the content of a file", Args: cobra.ExactArgs(2),
		Long: `Make a volume with the content of a file, which may be compressed with zstd, gzip or xz. The volume exists when all of it has arrived, or not
at all.`,
		Example: "  capsulectl volume import data data.zst\n  capsulectl volume import --size 20GiB data - <data.raw",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			mibs, err := sizeFlag(text)
			if err != nil {
				return err
			}
			v, err := a.importVolume(ctx, c, args[0], args[1], mibs)
			if err != nil {
				return err
			}
			return a.printVolume(v)
		}),
	}
	cmd.Flags().StringVar(&text, "size", "", "`SIZE` (default: that of the content)")
	return cmd
}

func (a *app) importVolume(ctx context.Context, c *client, name, path string, mibs uint64) (*capsulev1.Volume, error) {
	r, total, done, err := a.source(path)
	if err != nil {
		return nil, err
	}
	defer done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // a file that could not be read to its end must not become a volume
	s, err := c.volumes().Import(ctx)
	if err != nil {
		return nil, err
	}
	err = s.Send(&capsulev1.VolumeImportRequest{Msg: &capsulev1.VolumeImportRequest_Metadata{
		Metadata: &capsulev1.VolumeImportMetadata{Name: name, SizeMib: mibs, TotalBytes: uint64(total)}, //nolint:gosec // the length of a file
	}})
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	bar := textui.NewBar(a.Stderr, name, false)
	defer bar.Clear()
	counted := io.TeeReader(r, &textui.Counter{To: io.Discard, Seen: bar.Counter("importing", total)})
	err = sendAll(s, counted, func(b []byte) *capsulev1.VolumeImportRequest {
		return &capsulev1.VolumeImportRequest{Msg: &capsulev1.VolumeImportRequest_Chunk{Chunk: b}}
	})
	if err != nil {
		return nil, err
	}
	return s.CloseAndRecv()
}

// source opens a file, or standard input for "-". total is its length; 0: unknown.
func (a *app) source(path string) (r io.Reader, total int64, done func(), err error) {
	if path == "-" {
		return a.Stdin, 0, func() {}, nil
	}
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, 0, nil, errdefs.New(errdefs.InvalidArgument, "read %s: %w", path, err)
	}
	if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
		total = info.Size()
	}
	return f, total, func() { f.Close() }, nil
}

// sizeFlag returns a size in MiB; 0 for none.
func sizeFlag(text string) (uint64, error) {
	if text == "" {
		return 0, nil
	}
	return manifest.VolumeSize(text, mib)
}

func (a *app) printVolume(v *capsulev1.Volume) error {
	_, err := fmt.Fprintf(a.Stdout, "%s  %s\n", textui.Cell(v.GetName()), size(v.GetSizeBytes()))
	return err
}
