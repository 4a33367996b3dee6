package capsulectl

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/manifest"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) volumeCommand() *cobra.Command {
	const sizes = "\n\nSizes are 512MiB, 10GiB, 1TiB; K, M, G and T mean the same. A number without a unit is in MiB."
	var text string
	create := &cobra.Command{
		Use: "create NAME", Short: "Make an empty volume", Args: cobra.ExactArgs(1),
		Long:    "Make an empty volume." + sizes,
		Example: "  capsulectl volume create --size 10GiB data",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			mibs, err := sizeFlag(text)
			if err != nil {
				return err
			}
			v, err := c.volumes().Create(ctx, &capsulev1.VolumeCreateRequest{Name: args[0], SizeMib: mibs})
			if err != nil {
				return err
			}
			a.printf("%s  %s  %s\n", textui.Cell(v.GetName()), size(v.GetSizeBytes()), textui.Cell(v.GetHostPath()))
			return nil
		}),
	}
	create.Flags().StringVar(&text, "size", "", "`SIZE` (default: 10GiB)")

	var out textui.Format
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the volumes", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			answer, err := c.volumes().List(ctx, &capsulev1.VolumeListRequest{})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return printMessages(a, answer.GetVolumes())
			}
			var table [][]string
			for _, v := range answer.GetVolumes() {
				table = append(table, []string{v.GetName(), size(v.GetSizeBytes()), strings.Join(v.GetMountedBy(), ", "), stamp(v.GetCreatedAtUnix()), v.GetHostPath()})
			}
			return textui.PrintTable(a.Stdout, []string{"NAME", "SIZE", "MOUNTED BY", "CREATED", "HOST PATH"}, table)
		}),
	}
	textui.OutputFlag(list, &out)

	get := &cobra.Command{
		Use: "get NAME", Short: "Print all about a volume as JSON", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVolumes,
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			v, err := c.volumes().Get(ctx, &capsulev1.VolumeGetRequest{Name: args[0]})
			if err != nil {
				return err
			}
			return a.printMessage(v)
		}),
	}

	var force bool
	remove := &cobra.Command{
		Use: "delete NAME...", Aliases: []string{"rm"}, Short: "Delete volumes with all that is on them", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVolumes,
		RunE: a.calling(func(ctx context.Context, c *client, names []string) error {
			return each(names, func(name string) error {
				_, err := c.volumes().Delete(ctx, &capsulev1.VolumeDeleteRequest{Name: name, Force: force})
				if err == nil {
					a.printf("%s\n", name)
				}
				return err
			})
		}),
	}
	remove.Flags().BoolVar(&force, "force", false, "even if a workload that does not run names it")

	resize := &cobra.Command{
		Use: "resize NAME SIZE", Short: "Grow a volume that is not in use", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVolumes,
		Long:    "Grow a volume that is not in use. Volumes do not shrink." + sizes,
		Example: "  capsulectl volume resize data 20GiB",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			mibs, err := manifest.VolumeSize(args[1], mib)
			if err != nil {
				return err
			}
			v, err := c.volumes().Resize(ctx, &capsulev1.VolumeResizeRequest{Name: args[0], NewSizeMib: mibs})
			if err != nil {
				return err
			}
			return a.printVolume(v)
		}),
	}
	return group("volume", "Disks that outlive workloads", "  capsulectl volume create --size 10GiB data\n  capsulectl volume list", create, list, get, remove, resize,
		a.volumeSnapshotCommand(), a.volumeCloneCommand(), a.volumeRollbackCommand(), a.volumeExportCommand(), a.volumeImportCommand())
}

func (a *app) imageCommand() *cobra.Command {
	var out textui.Format
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the images that are on the machine", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			answer, err := c.images().List(ctx, &capsulev1.ImageListRequest{})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return printMessages(a, answer.GetImages())
			}
			var table [][]string
			for _, i := range answer.GetImages() {
				digest := i.GetDigest()
				table = append(table, []string{i.GetName(), digest[:min(len(digest), 19)], textui.FormatSize(i.GetSizeBytes()), age(i.GetCreatedUnix())})
			}
			return textui.PrintTable(a.Stdout, []string{"NAME", "DIGEST", "SIZE", "AGE"}, table)
		}),
	}
	textui.OutputFlag(list, &out)

	push := &cobra.Command{
		Use: "push {ARCHIVE | -}", Short: "Store the images of an archive on the machine", Args: cobra.ExactArgs(1),
		Long:    "Store the images of an archive on the machine: what docker save writes, or an OCI image layout, as tar.",
		Example: "  capsulectl image push app.tar\n  docker save app:dev | capsulectl image push -",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			answer, err := a.pushImage(ctx, c, args[0])
			if err != nil {
				return err
			}
			for _, ref := range answer.GetImageRefs() {
				a.printf("%s\n", textui.Cell(ref))
			}
			if len(answer.GetImageRefs()) == 0 {
				a.note("The archive has no image with a name.")
			}
			return nil
		}),
	}
	return group("image", "Images that are on the machine", "  docker save app:dev | capsulectl image push -\n  capsulectl image list", list, push)
}

func age(unix int64) string {
	if unix == 0 {
		return ""
	}
	return textui.Age(time.Now(), time.Unix(unix, 0))
}

func (a *app) pushImage(ctx context.Context, c *client, name string) (*capsulev1.ImagePushResponse, error) {
	r, total, done, err := a.source(name)
	if err != nil {
		return nil, err
	}
	defer done()
	s, err := c.images().Push(ctx)
	if err != nil {
		return nil, err
	}
	err = s.Send(&capsulev1.ImagePushRequest{Msg: &capsulev1.ImagePushRequest_Metadata{
		Metadata: &capsulev1.ImagePushMetadata{TotalBytes: uint64(total)}, //nolint:gosec // the length of a file
	}})
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	bar := textui.NewBar(a.Stderr, name, false)
	defer bar.Clear()
	counted := io.TeeReader(r, &textui.Counter{To: io.Discard, Seen: bar.Counter("sending", total)})
	err = sendAll(s, counted, func(b []byte) *capsulev1.ImagePushRequest {
		return &capsulev1.ImagePushRequest{Msg: &capsulev1.ImagePushRequest_Chunk{Chunk: b}}
	})
	if err != nil {
		return nil, err
	}
	return s.CloseAndRecv()
}
