package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) imageCommand() *cobra.Command {
	return group("image", "Fetch, import, list and remove what VMs boot from",
		`  cocoon image pull debian:12
  cocoon image import demo:latest demo.tar
  cocoon image list
  cocoon image rm demo`,
		a.imagePullCommand(), a.imageExplainCommand(), a.imageImportCommand(), a.imageListCommand(), a.imageInspectCommand(),
		a.imageRmCommand(), a.gcCommand("cocoon image gc"), a.imageExportCommand(), a.imagePushCommand(), a.imageBuildCommand())
}

func (a *app) imageImportCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use:   "import NAME[:TAG] [FILE|-]",
		Short: "Store an image under a name",
		Long: `Store an image under a name, from a file or from standard input.

It may be a container image (a tar of an OCI image layout, or of docker save) or a disk (raw, qcow2, VMDK, VHDX or VHD;
the last three are converted to qcow2); which one is seen from the content. The same content is stored once. Without a tag the name gets the tag latest.`,
		Example: `  cocoon image import debian:12 debian-12-genericcloud-amd64.qcow2
  docker save nginx | cocoon image import nginx`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, size, err := a.openSource(argument(args, 1, "-"), "an image", "cocoon image import NAME FILE")
			if err != nil {
				return err
			}
			defer r.Close()
			return a.withClient(func(c *nodeclient.Client) error {
				return a.importImage(cmd.Context(), c, args[0], r, size, out)
			})
		},
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

// importImage stores the image that r yields, which has about size bytes, and prints it.
func (a *app) importImage(ctx context.Context, c *nodeclient.Client, name string, r io.Reader, size int64, out textui.Format) error {
	b := textui.NewBar(a.Stderr, name, false)
	img, err := c.ImportImage(ctx, name, r, b.Counter("importing", size))
	b.Clear()
	if err != nil {
		return err
	}
	return a.printImages([]image.Image{img}, out)
}

// openSource opens a file or standard input and returns its size in bytes, -1 if that cannot be known.
func (a *app) openSource(source, what, usage string) (io.ReadCloser, int64, error) {
	if source == "-" {
		if f := textui.File(a.Stdin); f != nil && term.IsTerminal(int(f.Fd())) {
			return nil, 0, errdefs.Invalidf("%s is expected from a file or a pipe: %s", what, usage)
		}
		return io.NopCloser(a.Stdin), -1, nil
	}
	f, err := os.Open(source)
	if err != nil {
		class := errdefs.FailedPrecondition
		if errors.Is(err, os.ErrNotExist) {
			class = errdefs.NotFound
		}
		return nil, 0, errdefs.New(class, "read %s: %w", what, err)
	}
	fi, err := f.Stat()
	switch {
	case err != nil:
		f.Close()
		return nil, 0, errdefs.New(errdefs.FailedPrecondition, "read %s: %w", what, err)
	case fi.IsDir():
		f.Close()
		return nil, 0, errdefs.Invalidf("%s is a folder; %s is one file", source, what)
	case !fi.Mode().IsRegular():
		return f, -1, nil
	}
	return f, fi.Size(), nil
}

func (a *app) imageListCommand() *cobra.Command {
	return listCommand(a, listing[image.Image]{
		short: "List images",
		list: func(ctx context.Context, c *nodeclient.Client) ([]image.Image, error) {
			return c.ListImages(ctx)
		},
		name:  func(img image.Image) string { return img.Name },
		json:  func(img image.Image) any { return img },
		table: func(all []image.Image) error { return a.printImages(all, textui.FormatTable) },
	})
}

// printImages prints a table, or as JSON the only image of all.
func (a *app) printImages(all []image.Image, out textui.Format) error {
	if out == textui.FormatJSON {
		return textui.PrintJSON(a.Stdout, all[0])
	}
	now := time.Now()
	rows := make([][]string, len(all))
	for i, img := range all {
		id := strings.TrimPrefix(img.ID, "sha256:")
		rows[i] = []string{img.Name, id[:min(12, len(id))], string(img.Type), textui.FormatSize(img.Size), textui.Age(now, img.CreatedAt)}
	}
	return textui.PrintTable(a.Stdout, []string{"NAME", "ID", "TYPE", "SIZE", "AGE"}, rows)
}

func (a *app) imageInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect REF", Short: "Print one image as JSON", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeImages,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			img, err := c.GetImage(ctx, args[0])
			if err != nil {
				return err
			}
			return textui.PrintJSON(a.Stdout, img)
		}),
	}
}

func (a *app) imageRmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm REF...", Aliases: []string{"remove"}, Short: "Remove images",
		Long: "Remove images by name or id. Content that a VM uses stays until the VM is removed.",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeImages,
		RunE: a.removing(func(ctx context.Context, c *nodeclient.Client, ref string) error { return c.RemoveImage(ctx, ref) }),
	}
}
