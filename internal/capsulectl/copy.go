package capsulectl

import (
	"context"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/tree"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) copyCommand() *cobra.Command {
	return &cobra.Command{
		Use: "cp SRC DST", Short: "Copy a file or folder to or from a workload", Args: cobra.ExactArgs(2),
		Long: `Copy a file or folder to or from a workload. One of SRC and DST is WORKLOAD:/PATH, the other one is here.

If DST ends in / or is a folder, the copy is made in it, with the name of SRC. Otherwise DST is the name of the copy. The workload needs
sh and tar. Of what a workload sends, links that lead out of the copy are left out.`,
		Example: `  capsulectl cp ./config.toml api:/etc/app/config.toml   # as this file
  capsulectl cp ./assets api:/srv/                       # as /srv/assets
  capsulectl cp api:/var/log/app.log ./app.log
  capsulectl cp api:/etc ./backups/                      # as ./backups/etc`,
		RunE: func(cmd *cobra.Command, args []string) error {
			from, remoteFrom := parsePlace(args[0])
			to, remoteTo := parsePlace(args[1])
			switch {
			case remoteFrom && remoteTo:
				return errdefs.Invalidf("one of the two must be here; copy through a file of this machine")
			case !remoteFrom && !remoteTo:
				return errdefs.Invalidf("one of the two must be WORKLOAD:/PATH")
			case !path.IsAbs(from.path) && remoteFrom, !path.IsAbs(to.path) && remoteTo:
				return errdefs.Invalidf("the path in the workload must begin with /")
			}
			return a.calling(func(ctx context.Context, c *client, _ []string) error {
				if remoteTo {
					return a.copyTo(ctx, c, from.path, to)
				}
				return a.copyFrom(ctx, c, from, to.path)
			})(cmd, args)
		},
	}
}

// place is a path, in a workload or here.
type place struct{ workload, path string }

// parsePlace reads WORKLOAD:PATH. What has a / before the colon is a path here.
func parsePlace(s string) (place, bool) {
	workload, rest, ok := strings.Cut(s, ":")
	if !ok || workload == "" || strings.Contains(workload, "/") {
		return place{path: s}, false
	}
	return place{workload, rest}, true
}

func (a *app) copyTo(ctx context.Context, c *client, src string, to place) error {
	abs, err := filepath.Abs(src)
	if err != nil {
		return errdefs.New(errdefs.InvalidArgument, "copy %s: %w", src, err)
	}
	if _, err := os.Lstat(abs); err != nil {
		return errdefs.New(errdefs.InvalidArgument, "copy %s: %w", src, err)
	}
	name := filepath.Base(abs)
	if name == "/" || name == "." {
		return errdefs.Invalidf("%s has no name that the copy could have; copy what is in it", src)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // an archive that could not be read to its end must not be unpacked as if it were whole
	s, err := c.workloads().CopyTo(ctx)
	if err != nil {
		return err
	}
	err = s.Send(&capsulev1.WorkloadCopyToRequest{Payload: &capsulev1.WorkloadCopyToRequest_Metadata{
		Metadata: &capsulev1.WorkloadCopyToMetadata{Name: to.workload, DestPath: to.path},
	}})
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	bar := textui.NewBar(a.Stderr, name, false)
	defer bar.Clear()
	r, w := io.Pipe()
	if strings.HasSuffix(src, "/") {
		abs += "/"
	}
	var packing sync.WaitGroup
	packing.Go(func() {
		w.CloseWithError(tree.Pack(&textui.Counter{To: w, Seen: bar.Counter("copying", -1)}, abs, name))
	})
	defer func() {
		r.Close()
		packing.Wait()
	}()
	err = sendAll(s, r, func(b []byte) *capsulev1.WorkloadCopyToRequest {
		return &capsulev1.WorkloadCopyToRequest{Payload: &capsulev1.WorkloadCopyToRequest_Chunk{Chunk: b}}
	})
	if err != nil {
		return err
	}
	_, err = s.CloseAndRecv()
	return err
}

func (a *app) copyFrom(ctx context.Context, c *client, from place, dst string) error {
	root := path.Base(from.path)
	if root == "/" || root == "." || root == ".." {
		return errdefs.Invalidf("%s has no name that the copy could have; copy what is in it", from.path)
	}
	dir, name := filepath.Dir(dst), filepath.Base(dst)
	if info, err := os.Stat(dst); strings.HasSuffix(dst, "/") || err == nil && info.IsDir() {
		dir, name = dst, root
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.workloads().CopyFrom(ctx, &capsulev1.WorkloadCopyFromRequest{Name: from.workload, SrcPath: from.path})
	if err != nil {
		return err
	}
	r := &chunks[*capsulev1.WorkloadCopyFromChunk]{from: s, data: (*capsulev1.WorkloadCopyFromChunk).GetData}
	first, err := s.Recv() // before anything is made here: the workload may not have it
	if err != nil {
		if errors.Is(err, io.EOF) {
			return errdefs.NotFoundf("the machine sent nothing of %s:%s", from.workload, from.path)
		}
		return err
	}
	r.rest = first.GetData()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return errdefs.New(errdefs.InvalidArgument, "copy to %s: %w", dst, err)
	}
	bar := textui.NewBar(a.Stderr, root, false)
	defer bar.Clear()
	counted := io.TeeReader(r, &textui.Counter{To: io.Discard, Seen: bar.Counter("copying", -1)})
	_, err = tree.Unpack(counted, dir, root, name, func(entry, why string) { a.note("%s is left out: %s", textui.Cell(entry), why) })
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, counted) // what follows the end of the archive, and whether it was complete
	return err
}
