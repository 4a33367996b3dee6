package cli

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

// gcCommand makes the command that collects images. It exists twice, under the given names.
func (a *app) gcCommand(name string) *cobra.Command {
	var out textui.Format
	var l image.GCLimits
	var maxSize textui.Size
	cmd := &cobra.Command{
		Use: "gc", Aliases: []string{"prune"}, Short: "Remove images that are not needed any more", Args: cobra.NoArgs,
		Long: `Remove images that are not needed any more.

Content that no name refers to goes always, and images by age, by size and by how full the disk is when the flags say
so: those used longest ago first. What a VM uses and what is being pulled or imported stays.`,
		Example: strings.ReplaceAll(`  cocoon image gc                              # only what has no name
  cocoon image gc --max-age 720h --dry-run     # what was not used for 30 days
  cocoon image gc --max-size 20G
  cocoon image gc --high 85 --low 70           # when the disk is 85% full, until it is 70% full`, "cocoon image gc", name),
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
	textui.OutputFlag(cmd, &out)
	fs.SortFlags = false
	return cmd
}

func (a *app) printCollected(c image.Collected, dry bool, out textui.Format) error {
	if out == textui.FormatJSON {
		c.Images = append([]image.Image{}, c.Images...) // prints [] when empty, never null
		return textui.PrintJSON(a.Stdout, c)
	}
	if len(c.Images) > 0 {
		if err := a.printImages(c.Images, out); err != nil {
			return err
		}
	}
	verb := "freed"
	if dry {
		verb = "would free"
	}
	a.printf("%s %s\n", verb, textui.FormatSize(c.Freed))
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
			path := argument(args, 1, "-")
			if err := a.writable(path, "an image", "cocoon image export REF FILE"); err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				return a.exportTo(path, args[0], 0, func(w io.Writer) error { return c.ExportImage(cmd.Context(), args[0], w) })
			})
		},
	}
}

// writable refuses to write a large amount of data to a terminal.
func (a *app) writable(path, what, usage string) error {
	if f := textui.File(a.Stdout); path == "-" && f != nil && term.IsTerminal(int(f.Fd())) {
		return errdefs.Invalidf("%s is not for a terminal; name a file: %s", what, usage)
	}
	return nil
}

// exportTo makes export write to a file, or to standard output for "-". The file gets its name when it is complete,
// and only the caller may read it; pipes and devices are written to directly. size is the approximate size, 0 if
// unknown.
func (a *app) exportTo(path, name string, size int64, export func(io.Writer) error) error {
	bar := textui.NewBar(a.Stderr, name, false)
	defer bar.Clear()
	if path == "-" {
		return export(&textui.Counter{To: a.Stdout, Seen: bar.Counter("exporting", size)})
	}
	switch fi, err := os.Stat(path); {
	case err != nil: // missing: CreateTemp reports what else may be wrong
	case fi.IsDir():
		return errdefs.Invalidf("%s is a folder; name a file in it", path)
	case !fi.Mode().IsRegular():
		return exportInto(path, func(w io.Writer) error { return export(&textui.Counter{To: w, Seen: bar.Counter("exporting", size)}) })
	default: // a link stays a link
		target, err := filepath.EvalSymlinks(path)
		if err != nil {
			return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", path, err)
		}
		path = target
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".tmp-*")
	if err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", path, err)
	}
	defer os.Remove(f.Name()) // does nothing once the file has its name
	defer f.Close()
	if err := export(&textui.Counter{To: f, Seen: bar.Counter("exporting", size)}); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", path, err)
	}
	return nil
}

// exportInto makes export write to a pipe or a device, which must not be replaced by a file: /dev/stdout, /dev/null.
func exportInto(path string, export func(io.Writer) error) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", path, err)
	}
	defer f.Close()
	if term.IsTerminal(int(f.Fd())) {
		return errdefs.Invalidf("%s is a terminal; name a file", path)
	}
	if err := export(f); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", path, err)
	}
	return nil
}

func (a *app) imagePushCommand() *cobra.Command {
	var out textui.Format
	var remote remoteFlags
	cmd := &cobra.Command{
		Use: "push IMAGE URL/REPO[:TAG]", Short: "Send an image to a registry", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeOneImage,
		Long: `Send an image to an OCI registry and print the digest of its manifest there. What the registry has already is not sent
again. A container image becomes an ordinary one, which any tool can pull; a disk becomes an artifact of one file. Without
credentials of yours, those of docker's configuration on the node are used.` + remoteHelp,
		Example: `  cocoon image push demo registry.example.com/team/demo:1.4 --token-file token
  EPOCH_TOKEN=... cocoon image push debian:12 http://127.0.0.1:8080/debian:12`,
		RunE: func(cmd *cobra.Command, args []string) error {
			auth, err := remote.auth(args[1], a.Getenv)
			if err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				bar := textui.NewBar(a.Stderr, args[0], out == textui.FormatJSON)
				img, err := c.PushImage(cmd.Context(), image.PushRequest{
					Ref: args[0], To: args[1], Token: auth.Token, Username: auth.Username, Password: auth.Password, CA: auth.CA,
				}, showImage(bar))
				bar.Clear()
				return a.printPushed(img, img.Digest, out, err)
			})
		},
	}
	remote.add(cmd)
	textui.OutputFlag(cmd, &out)
	cmd.Flags().SortFlags = false
	return cmd
}

// completeOneImage offers names of images for the first argument and files after it.
func (a *app) completeOneImage(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return a.completeImages(cmd, args, prefix)
}

func (a *app) imageBuildCommand() *cobra.Command {
	var out textui.Format
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
				if f := textui.File(a.Stdin); f != nil && term.IsTerminal(int(f.Fd())) {
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
				return a.importImage(cmd.Context(), c, args[0], r, size, out)
			})
		},
	}
	b.add(cmd)
	textui.OutputFlag(cmd, &out)
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
	if err := json.Unmarshal([]byte(v), &list); err != nil || len(list) == 0 {
		return nil, errdefs.Invalidf(`--%s %s: it is one program, or a list such as ["/bin/app", "-v"]`, flag, v)
	}
	return list, nil
}
