package cli

import (
	"cmp"
	"context"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

func (a *app) volumeCommand() *cobra.Command {
	return group("volume", "Disks that outlive the VMs that use them",
		`  cocoon volume create data --size 10G
  cocoon vm run --name db --volume data:/var/lib/db demo
  cocoon volume snapshot create data --name before-upgrade
  cocoon volume clone data data-2`,
		a.volumeCreateCommand(), a.volumeListCommand(), a.volumeInspectCommand(), a.volumeResizeCommand(), a.volumeSnapshotCommand(),
		a.volumeCloneCommand(), a.volumeRestoreCommand(), a.volumeExportCommand(), a.volumeImportCommand(), a.volumeRmCommand())
}

// A VOLUME is a volume's name, its id, or a prefix of the id.
const volumeHelp = "\n\nVOLUME is the name of a volume, its id, or the beginning of its id (three characters or more)."

func (a *app) volumeCreateCommand() *cobra.Command {
	var out textui.Format
	var size textui.Size
	var kind, from string
	var labels []string
	cmd := &cobra.Command{
		Use: "create NAME {--size SIZE|--image IMAGE}", Short: "Make a volume, empty or with the disk of an image", Args: cobra.ExactArgs(1),
		Long: `Make a volume. It takes space on this machine as it is filled. The first VM of a container image that mounts an empty volume
makes a file system on it, inside the VM; this machine never reads what is on a volume.

With --image, the volume has the disk of an image, and a VM can boot from it. The image is pulled as by cocoon image pull: it is a
disk, or a container image with one disk below /disk. Either the whole volume is there afterwards, or nothing is.`,
		Example: `  cocoon volume create data --size 10G
  cocoon volume create system --size 20G --image https://cloud.debian.org/images/cloud/trixie/latest/debian-13-genericcloud-amd64.qcow2
  cocoon volume create data --size 10G --kind lvm
  cocoon volume create data --size 10G -o json | jq -r .serial`,
		RunE: func(cmd *cobra.Command, args []string) error {
			of, err := parseLabels(labels)
			if err != nil {
				return err
			}
			if size == 0 && from == "" {
				return errdefs.Invalidf("a volume needs a size: cocoon volume create %s --size 10G", args[0])
			}
			spec := volume.Spec{Kind: kind, Name: args[0], Size: int64(size), Labels: of}
			return a.withClient(func(c *nodeclient.Client) error {
				if from == "" {
					v, err := c.CreateVolume(cmd.Context(), spec)
					return a.printVolume(v, out, err)
				}
				bar := textui.NewBar(a.Stderr, args[0], out == textui.FormatJSON)
				v, err := c.VolumeFromImage(cmd.Context(), spec, image.PullRequest{Name: from, Policy: image.PullIfNotPresent}, showImage(bar))
				bar.Clear()
				return a.printVolume(v, out, err)
			})
		},
	}
	fs := cmd.Flags()
	fs.Var(&size, "size", "size that a guest sees: 512M, 10G; units are powers of 1024 (default with --image: that of the disk)")
	fs.StringVar(&from, "image", "", "image whose disk the volume gets; it is pulled unless it is here")
	_ = cmd.RegisterFlagCompletionFunc("image", a.completeImages)
	kindFlag(fs, &kind)
	fs.StringArrayVar(&labels, "label", nil, "label KEY=VALUE; may be repeated")
	textui.OutputFlag(cmd, &out)
	fs.SortFlags = false
	return cmd
}

func kindFlag(fs *pflag.FlagSet, kind *string) {
	fs.StringVar(kind, "kind", "", "file, or lvm for a volume on the thin pool of cocoond's --volume-pool (default: file)")
}

func (a *app) volumeListCommand() *cobra.Command {
	return listCommand(a, listing[nodewire.StoredVolume]{
		short: "List volumes",
		list: func(ctx context.Context, c *nodeclient.Client) ([]nodewire.StoredVolume, error) {
			return c.ListVolumes(ctx)
		},
		name:  func(v nodewire.StoredVolume) string { return v.Owner.Qualify(v.Name) },
		json:  func(v nodewire.StoredVolume) any { return nodejson.FromVolume(v) },
		table: a.printVolumes,
	})
}

func (a *app) printVolumes(all []nodewire.StoredVolume) error {
	now := time.Now()
	rows := make([][]string, len(all))
	for i, v := range all {
		var users []string
		for _, at := range v.Attachments {
			users = append(users, shortID(string(at.VM)))
		}
		rows[i] = []string{v.Owner.Qualify(v.Name), shortID(string(v.ID)), v.Kind, textui.FormatSize(v.Size), textui.FormatSize(v.Allocated), strings.Join(users, ","), textui.Age(now, v.CreatedAt)}
	}
	return textui.PrintTable(a.Stdout, []string{"NAME", "ID", "KIND", "SIZE", "ALLOCATED", "VM", "AGE"}, rows)
}

func (a *app) printVolume(v nodewire.StoredVolume, out textui.Format, err error) error {
	if err != nil {
		return err
	}
	if out == textui.FormatJSON {
		return textui.PrintJSON(a.Stdout, nodejson.FromVolume(v))
	}
	return a.printVolumes([]nodewire.StoredVolume{v})
}

func (a *app) volumeInspectCommand() *cobra.Command {
	out := textui.FormatJSON
	cmd := &cobra.Command{
		Use: "inspect VOLUME", Short: "Print everything known of one volume as JSON", Long: "Print everything known of one volume as JSON." + volumeHelp,
		Example: "  cocoon volume inspect data | jq .attachments",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: inTurn(a.completeVolumes),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			v, err := c.GetVolume(ctx, args[0])
			return a.printVolume(v, out, err)
		}),
	}
	jsonByDefault(cmd, &out)
	return cmd
}

func (a *app) volumeResizeCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "resize VOLUME SIZE", Short: "Make a volume larger", Args: cobra.ExactArgs(2),
		Long: `Make a volume larger. A volume cannot shrink. A VM that runs and may write to it sees the new size at once, and a container
image's guest grows the ext4 file system. Others do so when they start. Standard error and "waiting" in the JSON name the VMs that do
not use the new size yet.` + volumeHelp,
		Example: "  cocoon volume resize data 20G", ValidArgsFunction: inTurn(a.completeVolumes),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			size, err := textui.ParseSize(args[1])
			if err != nil {
				return err
			}
			v, err := c.ResizeVolume(ctx, args[0], size)
			return a.printResized(v, out, err)
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) printResized(v nodewire.ResizedVolume, out textui.Format, err error) error {
	if err != nil {
		return err
	}
	for _, w := range v.Waiting {
		a.warn("VM %s does not use the new size of volume %s yet: %s", w.VM, v.Name, w.Reason)
	}
	if out == textui.FormatJSON {
		return textui.PrintJSON(a.Stdout, nodejson.FromResized(v))
	}
	return a.printVolume(v.StoredVolume, out, nil)
}

func (a *app) volumeCloneCommand() *cobra.Command {
	var out textui.Format
	var size textui.Size
	var snapshot bool
	cmd := &cobra.Command{
		Use: "clone VOLUME NAME", Short: "Copy a volume, or a snapshot of one", Args: cobra.ExactArgs(2),
		Long: `Copy a volume, or with --snapshot a snapshot of one. The two share what they have in common where the file system of this
machine can do that. A VM that writes to the volume must be stopped or hibernated.` + volumeHelp,
		Example: `  cocoon volume clone data data-2
  cocoon volume clone --snapshot before-upgrade data-old`,
		ValidArgsFunction: inTurn(a.completeVolumes),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *nodeclient.Client) error {
				clone := c.CloneVolume
				if snapshot {
					clone = c.VolumeFromSnapshot
				}
				stop := textui.Waiting(cmd.Context(), a.Stderr, "copying "+args[0])
				v, err := clone(cmd.Context(), args[0], volume.Spec{Name: args[1], Size: int64(size)})
				stop()
				return a.printVolume(v, out, err)
			})
		},
	}
	fs := cmd.Flags()
	fs.Var(&size, "size", "size of the copy (default: that of the source)")
	fs.BoolVar(&snapshot, "snapshot", false, "VOLUME is a snapshot of a volume")
	textui.OutputFlag(cmd, &out)
	fs.SortFlags = false
	return cmd
}

func (a *app) volumeRestoreCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "restore VOLUME SNAPSHOT", Short: "Return a volume to a snapshot of it", Args: cobra.ExactArgs(2),
		Long:    "Return a volume that no VM has attached to a snapshot of it. What was written since is lost." + volumeHelp,
		Example: "  cocoon volume restore data before-upgrade", ValidArgsFunction: inTurn(a.completeVolumes, a.completeVolumeSnapshots),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *nodeclient.Client) error {
				stop := textui.Waiting(cmd.Context(), a.Stderr, "restoring "+args[0])
				v, err := c.RestoreVolume(cmd.Context(), args[0], args[1])
				stop()
				return a.printVolume(v, out, err)
			})
		},
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) volumeExportCommand() *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use: "export VOLUME [-o FILE|-]", Short: "Write the bytes of a volume to a file", Args: cobra.ExactArgs(1),
		Long:    "Write the bytes of a volume to a file or to standard output, as they are on its disk. No VM may have it attached to write." + volumeHelp,
		Example: "  cocoon volume export data -o data.raw", ValidArgsFunction: inTurn(a.completeVolumes),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			to = cmp.Or(to, "-")
			if err := a.writable(to, "a volume", "cocoon volume export VOLUME -o FILE"); err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				v, err := c.GetVolume(ctx, args[0])
				if err != nil {
					return err
				}
				return a.exportTo(to, args[0], v.Size, func(w io.Writer) error { return c.ExportVolume(ctx, string(v.ID), w) })
			})
		},
	}
	cmd.Flags().StringVarP(&to, "output", "o", "", "`FILE`, or - for standard output (default -)")
	return cmd
}

func (a *app) volumeImportCommand() *cobra.Command {
	var out textui.Format
	var size textui.Size
	var kind string
	cmd := &cobra.Command{
		Use: "import NAME [FILE|-]", Short: "Make a volume of the bytes of a file", Args: cobra.RangeArgs(1, 2),
		Long: `Make a volume of the bytes of a file or of standard input. Zeros take no space. Either the whole volume is there
afterwards, or nothing is.`,
		Example: `  cocoon volume import data data.raw
  zcat data.raw.gz | cocoon volume import data --size 20G`,
		ValidArgsFunction: inTurn(cobra.NoFileCompletions, completeFiles),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, total, err := a.openSource(argument(args, 1, "-"), "a volume", "cocoon volume import NAME FILE")
			if err != nil {
				return err
			}
			defer r.Close()
			return a.withClient(func(c *nodeclient.Client) error {
				bar := textui.NewBar(a.Stderr, args[0], out == textui.FormatJSON)
				v, err := c.ImportVolume(cmd.Context(), volume.Spec{Kind: kind, Name: args[0], Size: int64(size)}, newCounting(r, bar.Counter("importing", total)))
				bar.Clear()
				return a.printVolume(v, out, err)
			})
		},
	}
	fs := cmd.Flags()
	fs.Var(&size, "size", "size of the volume (default: that of the file)")
	kindFlag(fs, &kind)
	textui.OutputFlag(cmd, &out)
	fs.SortFlags = false
	return cmd
}

func (a *app) volumeRmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm VOLUME...", Aliases: []string{"remove"}, Short: "Delete volumes with what is on them",
		Long: "Delete volumes with what is on them. One that a VM has attached is refused." + volumeHelp,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVolumes,
		RunE: a.removing(func(ctx context.Context, c *nodeclient.Client, ref string) error { return c.RemoveVolume(ctx, ref) }),
	}
}

func (a *app) vmAttachVolumeCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "attach-volume REF VOLUME[:/PATH][:ro][:shared]", Short: "Give a VM a volume, also while it runs", Args: cobra.ExactArgs(2),
		Long: `Give a VM a volume, also while it runs. The guest of a container image mounts it at PATH at once, in every container, and makes a
file system on an empty disk. Without PATH, and in an image that boots itself, the guest gets only the disk. The VM has the volume
until it is detached, or the VM is removed.` + refHelp,
		Example: `  cocoon vm attach-volume web data:/data
  cocoon vm attach-volume ubuntu data:ro`,
		ValidArgsFunction: inTurn(a.completeVMs, a.completeVolumes),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			use, at, err := parseVolume(args[1])
			if err != nil {
				return err
			}
			r, err := c.AttachVolume(ctx, args[0], use, at)
			return a.printVM(r, out, err)
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) vmDetachVolumeCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "detach-volume REF VOLUME", Short: "Take a volume from a VM, also while it runs", Args: cobra.ExactArgs(2),
		Long: `Take a volume from a VM, also while it runs. The guest of a container image unmounts it first, and refuses if a program uses it.
In an image that boots itself, unmount the disk before: only qemu-guest-agent, if it runs there, is asked whether it is mounted. A
volume that the VM was created with can only be taken while the VM is stopped. What is on the volume stays.` + refHelp,
		Example:           "  cocoon vm detach-volume web data",
		ValidArgsFunction: inTurn(a.completeVMs, a.completeVolumes),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			r, err := c.DetachVolume(ctx, args[0], args[1])
			return a.printVM(r, out, err)
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

// parseVolumes parses the values of --volume into volumes and their mounts.
func parseVolumes(list []string) (volumes []vm.Volume, mounts []vm.Mount, err error) {
	for i, s := range list {
		if rest, ok := strings.CutPrefix(s, nfsScheme); ok {
			n, at, err := parseNFS(s, rest)
			if err != nil {
				return nil, nil, err
			}
			name := "nfs-" + strconv.Itoa(i)
			volumes = append(volumes, vm.Volume{Name: name, Kind: vm.VolumeNFS, NFS: &n})
			mounts = append(mounts, vm.Mount{Volume: name, Path: at, ReadOnly: n.ReadOnly})
			continue
		}
		use, at, err := parseVolume(s)
		if err != nil {
			return nil, nil, err
		}
		if filepath.IsAbs(use.Ref) { // a folder of the node
			if use.Shared {
				return nil, nil, errdefs.Invalidf("volume %q: VMs always share a folder of the node; leave out :shared", s)
			}
			if at == "" {
				return nil, nil, errdefs.Invalidf("volume %q: use /FOLDER:/PATH or /FOLDER:/PATH:ro for a folder of the node", s)
			}
			name := "dir-" + strconv.Itoa(i)
			volumes = append(volumes, vm.Volume{Name: name, Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: filepath.Clean(use.Ref), ReadOnly: use.ReadOnly}})
			mounts = append(mounts, vm.Mount{Volume: name, Path: at, ReadOnly: use.ReadOnly})
			continue
		}
		v := diskVolume(use)
		volumes = append(volumes, v)
		if at != "" {
			mounts = append(mounts, vm.Mount{Volume: v.Name, Path: at, ReadOnly: use.ReadOnly})
		}
	}
	return volumes, mounts, nil
}

// diskVolume returns the volume of a VM that uses a volume of the store.
func diskVolume(use vm.VolumeUse) vm.Volume {
	return vm.Volume{Name: strings.ReplaceAll(use.Ref, "/", "-"), Kind: vm.VolumeDisk, Disk: &use}
}

// bootVolume returns the image and the volumes of a VM. If image is a volume to boot from, it is one of them.
func bootVolume(image string, volumes []vm.Volume) (string, []vm.Volume) {
	ref, ok := vm.BootVolume(image)
	if !ok {
		return image, volumes
	}
	v := diskVolume(vm.VolumeUse{Ref: ref})
	if !slices.ContainsFunc(volumes, func(o vm.Volume) bool { return o.Name == v.Name }) {
		volumes = append([]vm.Volume{v}, volumes...)
	}
	return vm.FromVolume(v.Name), volumes
}

// nfsScheme begins the value of --volume for a folder of an NFS server.
const nfsScheme = "nfs://"

// parseNFS parses SERVER[:PORT]/FOLDER:/PATH[:ro], which follows the scheme in s. An IPv6 address is in brackets.
func parseNFS(s, rest string) (n vm.NFS, at string, err error) {
	server, folder, ok := strings.Cut(rest, "/")
	folder, n.ReadOnly = strings.CutSuffix(folder, ":ro")
	i := strings.LastIndex(folder, ":/")
	if !ok || i < 0 {
		return n, "", errdefs.Invalidf("volume %q: use nfs://SERVER/FOLDER:/PATH or nfs://SERVER/FOLDER:/PATH:ro for a folder of an NFS server", s)
	}
	n.Path, at, n.Server = "/"+folder[:i], folder[i+1:], server
	if host, port, err := net.SplitHostPort(server); err == nil {
		n.Server, n.Options = host, []string{"port=" + port}
	}
	n.Server = strings.TrimSuffix(strings.TrimPrefix(n.Server, "["), "]")
	return n, at, n.Validate()
}

// parseVolume parses VOLUME[:/PATH][:ro][:shared].
func parseVolume(s string) (use vm.VolumeUse, at string, err error) {
	rest, shared := strings.CutSuffix(s, ":shared")
	rest, readOnly := strings.CutSuffix(rest, ":ro")
	use.Shared, use.ReadOnly = shared, readOnly
	use.Ref, at, _ = strings.Cut(rest, ":")
	if use.Ref == "" || at != "" && !filepath.IsAbs(at) {
		return use, "", errdefs.Invalidf("volume %q: use VOLUME:/PATH or VOLUME:/PATH:ro; for an image that boots itself, VOLUME, VOLUME:ro, VOLUME:shared or VOLUME:ro:shared", s)
	}
	return use, at, nil
}
