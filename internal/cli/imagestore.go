package cli

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
)

func (a *app) imageGCCommand() *cobra.Command {
	var out format
	var l image.GCLimits
	var maxSize sizeFlag
	cmd := &cobra.Command{
		Use: "gc", Aliases: []string{"prune"}, Short: "Remove what is not needed any more", Args: cobra.NoArgs,
		Long: `Remove what is not needed any more.

Content that no name refers to goes always, and images by age, by size and by how full the disk is when the flags say
so: those used longest ago first. What a VM uses and what is being pulled or imported stays.`,
		Example: `  cocoon image gc                              # only what has no name
  cocoon image gc --max-age 720h --dry-run     # what was not used for 30 days
  cocoon image gc --max-size 20G
  cocoon image gc --high 85 --low 70           # when the disk is 85% full, until it is 70% full`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l.MaxSize = int64(maxSize)
			return a.withClient(func(c *nodeclient.Client) error {
				got, err := c.CollectImages(cmd.Context(), l)
				if err != nil {
					return err
				}
				return a.printCollected(got, l.DryRun, out)
			})
		},
	}
	fs := cmd.Flags()
	fs.DurationVar(&l.MaxAge, "max-age", 0, "remove images unused for longer")
	fs.Var(&maxSize, "max-size", "remove images until the store is no larger: 20G")
	fs.Lookup("max-size").DefValue = ""
	fs.DurationVar(&l.MinAge, "min-age", 0, "keep what was used later than this ago, whatever the other flags say")
	fs.IntVar(&l.High, "high", 0, "`PERCENT` of the disk used at which images go")
	fs.IntVar(&l.Low, "low", 0, "`PERCENT` of the disk used at which no more images go (default: just below --high)")
	fs.BoolVar(&l.DryRun, "dry-run", false, "only say what would go")
	outputFlag(cmd, &out)
	fs.SortFlags = false
	return cmd
}

func (a *app) printCollected(c image.Collected, dry bool, out format) error {
	if out == formatJSON {
		c.Images = append([]image.Image{}, c.Images...) // prints [] when empty, never null
		return printJSON(a.Stdout, c)
	}
	if len(c.Images) > 0 {
		if err := a.printImages(c.Images, out, false); err != nil {
			return err
		}
	}
	verb := "freed"
	if dry {
		verb = "would free"
	}
	a.printf("%s %s\n", verb, FormatSize(c.Freed))
	return nil
}

func (a *app) imageExportCommand() *cobra.Command {
	return &cobra.Command{
		Use: "export REF [FILE|-]", Short: "Write an image to a file", Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeOneImage,
		Long: `Write an image to a file or to standard output, as import takes it.

A container image becomes an OCI image layout with the layers it came with, uncompressed, and keeps its id. A disk is the
file that VMs boot from: one that was converted when it came is exported as qcow2, which is another image.`,
		Example: `  cocoon image export debian:12 debian.qcow2
  cocoon image export debian:12 | ssh other cocoon image import debian:12`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 2 && args[1] != "-" {
				return a.withClient(func(c *nodeclient.Client) error { return exportTo(cmd.Context(), c, args[0], args[1]) })
			}
			if f := file(a.Stdout); f != nil && term.IsTerminal(int(f.Fd())) {
				return errdefs.Invalidf("an image is not for a terminal; name a file: cocoon image export REF FILE")
			}
			return a.withClient(func(c *nodeclient.Client) error { return c.ExportImage(cmd.Context(), args[0], a.Stdout) })
		},
	}
}

// exportTo gives the file its name when it is complete.
func exportTo(ctx context.Context, c *nodeclient.Client, ref, path string) error {
	if fi, err := os.Stat(path); err == nil && fi.IsDir() {
		return errdefs.Invalidf("%s is a folder; name a file in it", path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".tmp-*")
	if err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "write the image: %w", err)
	}
	defer os.Remove(f.Name()) // does nothing once it has its name
	defer f.Close()
	if err := c.ExportImage(ctx, ref, f); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "write the image: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "write the image: %w", err)
	}
	return nil
}

// completeOneImage offers names of images for the first argument and files after it.
func (a *app) completeOneImage(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return a.completeImages(cmd, args, prefix)
}

func (a *app) imageBuildCommand() *cobra.Command {
	var out format
	var b imageBuild
	cmd := &cobra.Command{
		Use: "build NAME[:TAG] DIR|TAR|-", Short: "Make a container image of a folder or a tar",
		Long: `Make a container image of a root file system: a folder, or a tar of one (also compressed with gzip), and store it.

Files of a folder belong to root in the image and keep their permissions; device nodes and sockets are left out. A tar
keeps the owners it has. The same files and flags give the same image.`,
		Example: `  cocoon image build web ./rootfs --entrypoint /bin/server
  cocoon image build alpine alpine-minirootfs.tar.gz --cmd /bin/sh
  docker export old | cocoon image build old - --entrypoint '["/app", "-v"]' --env PORT=80`,
		Args: cobra.ExactArgs(2),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveDefault
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[1] == "-" {
				if f := file(a.Stdin); f != nil && term.IsTerminal(int(f.Fd())) {
					return errdefs.Invalidf("a tar is expected from a pipe: cocoon image build NAME DIR|TAR")
				}
			}
			if err := b.check(); err != nil {
				return err
			}
			spool, err := b.layer(args[1], a.Stdin)
			if err != nil {
				return err
			}
			defer spool.close()
			return a.withClient(func(c *nodeclient.Client) error {
				r, size, err := b.layout(spool)
				if err != nil {
					return err
				}
				progress, done := a.progress(args[0], size)
				img, err := c.ImportImage(cmd.Context(), args[0], r, progress)
				done()
				if err != nil {
					return err
				}
				return a.printImages([]image.Image{img}, out, false)
			})
		},
	}
	b.add(cmd)
	outputFlag(cmd, &out)
	cmd.Flags().SortFlags = false
	return cmd
}

// words reads the value of --entrypoint or --cmd: one program, or a JSON list of words.
func words(flag, v string) ([]string, error) {
	if v == "" {
		return nil, nil
	}
	if !strings.HasPrefix(v, "[") {
		return []string{v}, nil
	}
	var list []string
	if err := unmarshal(v, &list); err != nil || len(list) == 0 {
		return nil, errdefs.Invalidf(`--%s %s: it is one program, or a list such as ["/bin/app", "-v"]`, flag, v)
	}
	return list, nil
}
