package appliance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Image is an image of a store.
type Image struct {
	Name, Digest string
	Size         int64 // bytes
	CreatedUnix  int64
}

// ImageStore keeps the images of one kind of workloads.
type ImageStore interface {
	List(ctx context.Context) ([]Image, error)
	// Import stores the image of an archive under each of the names. It may read the archive several times.
	Import(ctx context.Context, names []string, archive *os.File) error
}

// images implements ImageService.
type images struct {
	capsulev1.UnimplementedImageServiceServer
	door *Door
}

// List implements capsulev1.ImageServiceServer. An image that several stores have is listed once.
func (i *images) List(ctx context.Context, _ *capsulev1.ImageListRequest) (*capsulev1.ImageListResponse, error) {
	resp := &capsulev1.ImageListResponse{}
	seen := map[string]bool{}
	for _, s := range i.door.deps.Images {
		all, err := s.List(ctx)
		if err != nil {
			return nil, err
		}
		for _, x := range all {
			if key := x.Name + "@" + x.Digest; !seen[key] {
				seen[key] = true
				resp.Images = append(resp.Images, &capsulev1.Image{Name: x.Name, Digest: x.Digest, SizeBytes: x.Size, CreatedUnix: x.CreatedUnix})
			}
		}
	}
	slices.SortFunc(resp.Images, func(a, b *capsulev1.Image) int { return strings.Compare(a.GetName(), b.GetName()) })
	return resp, nil
}

// Push implements capsulev1.ImageServiceServer.
func (i *images) Push(stream capsulev1.ImageService_PushServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if err := i.mayPush(stream.Context()); err != nil {
		return err
	}
	if first.GetMetadata() == nil {
		return errdefs.Invalidf("the first message of an image tells its size, or 0")
	}
	f, err := i.spool()
	if err != nil {
		return err
	}
	defer f.Close()
	room, err := roomFor(f)
	if err == nil {
		err = room.admit(first.GetMetadata().GetTotalBytes())
	}
	if err != nil {
		return err
	}
	in := &chunks{next: func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetChunk(), err
	}}
	n, err := io.Copy(f, io.TeeReader(in, room))
	if err != nil {
		return fmt.Errorf("receive an image: %w", err)
	}
	if want := first.GetMetadata().GetTotalBytes(); want != 0 && want != uint64(n) {
		return errdefs.Invalidf("%d bytes of an image of %d have arrived", n, want)
	}
	names, err := archiveNames(f)
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.Contains(name, workload.OwnImages) {
			return errdefs.Invalidf("the archive has the name %.100q; images of %s are made by the machine", name, workload.OwnImages)
		}
	}
	for _, s := range i.door.deps.Images {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		if err := s.Import(stream.Context(), names, f); err != nil {
			return err
		}
	}
	return stream.SendAndClose(&capsulev1.ImagePushResponse{ImageRefs: names, BytesReceived: uint64(n)})
}

// mayPush returns PermissionDenied unless the caller may replace the images of all workloads: a workload that has control over the machine
// would run the new image when it starts again.
func (i *images) mayPush(ctx context.Context) error {
	for _, r := range i.door.deps.Desired.List() {
		if len(workload.Reaches(r.Workload)) > 0 {
			return allow(callerOf(ctx), capsulev1.Role_ROLE_ADMIN, "a push of images beside workload "+r.Name()+", which has control over the machine,")
		}
	}
	return nil
}

// spool returns a file without a name, so that a crash leaves nothing.
func (i *images) spool() (*os.File, error) {
	if err := os.MkdirAll(i.door.cfg.Spool, 0o700); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(i.door.cfg.Spool, "image-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.Close()
		return nil, err
	}
	return f, nil
}
