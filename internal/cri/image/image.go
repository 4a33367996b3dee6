// Package image is the ImageService of CRI for the images of VM pods, which are those of the node's store.
package image

import (
	"cmp"
	"context"
	"encoding/base64"
	"slices"
	"strconv"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// Store is the part of the node's images that pods need.
type Store interface {
	Get(ctx context.Context, ref string) (image.Image, error)
	List(ctx context.Context) ([]image.Image, error)
	Remove(ctx context.Context, ref string) error
	Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error)
}

// Service implements the ImageService for VM pods.
type Service struct {
	cri.UnimplementedImageServiceServer

	store Store
	dir   string // of the store
}

// New returns a Service. dir is the folder that the store fills.
func New(store Store, dir string) *Service { return &Service{store: store, dir: dir} }

// Has reports whether the store has what a spec names.
func (s *Service) Has(ctx context.Context, spec *cri.ImageSpec) bool {
	_, err := s.store.Get(ctx, spec.GetImage())
	return err == nil
}

// Ensure returns the image that a container of a namespace names. One that is missing is pulled without credentials: a
// kubelet that cannot tell which runtime an image is for finds it at containerd, and does not pull it (feature gate
// RuntimeClassInImageCriApi). It then passes the id that containerd knows, and the name that the pod has.
func (s *Service) Ensure(ctx context.Context, namespace string, spec *cri.ImageSpec) (image.Image, error) {
	img, err := s.store.Get(ctx, spec.GetImage())
	if errdefs.IsNotFound(err) {
		name := cmp.Or(spec.GetUserSpecifiedImage(), spec.GetImage())
		img, err = s.store.Pull(vm.OnBehalf(ctx, vm.Owner{Namespace: namespace}), image.PullRequest{Name: name, Policy: image.PullIfNotPresent}, nil)
	}
	return img, err
}

// PullImage fetches an image on behalf of the namespace of the pod.
func (s *Service) PullImage(ctx context.Context, req *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	if namespace := req.GetSandboxConfig().GetMetadata().GetNamespace(); namespace != "" {
		ctx = vm.OnBehalf(ctx, vm.Owner{Namespace: namespace})
	}
	r := image.PullRequest{Name: req.GetImage().GetImage(), Policy: image.PullAlways}
	auth, err := credentials(req.GetAuth(), r.Name)
	if err != nil {
		return nil, err
	}
	r.Auth = auth
	img, err := s.store.Pull(ctx, r, nil)
	if err != nil {
		return nil, err
	}
	return &cri.PullImageResponse{ImageRef: img.ID}, nil
}

// credentials returns what the kubelet knows for a registry.
func credentials(a *cri.AuthConfig, name string) ([]image.RegistryAuth, error) {
	if a == nil {
		return nil, nil
	}
	host, _, _ := strings.Cut(name, "/")
	out := image.RegistryAuth{
		Registry: cmp.Or(a.GetServerAddress(), host), Username: a.GetUsername(), Password: a.GetPassword(),
		Token: cmp.Or(a.GetIdentityToken(), a.GetRegistryToken()),
	}
	if text := a.GetAuth(); text != "" && out.Username == "" {
		plain, err := base64.StdEncoding.DecodeString(strings.TrimRight(text, "\x00"))
		user, password, ok := strings.Cut(string(plain), ":")
		if err != nil || !ok {
			return nil, errdefs.Invalidf("the credentials for %s are not user:password in base64", out.Registry)
		}
		out.Username, out.Password = user, strings.TrimRight(password, "\x00")
	}
	if out.Username == "" && out.Token == "" {
		return nil, nil
	}
	return []image.RegistryAuth{out}, nil
}

// ImageStatus returns an image; none if the store has no such image.
func (s *Service) ImageStatus(ctx context.Context, req *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	img, err := s.store.Get(ctx, req.GetImage().GetImage())
	if errdefs.IsNotFound(err) {
		return &cri.ImageStatusResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := s.listed(ctx, func(i image.Image) bool { return i.ID == img.ID })
	if err != nil {
		return nil, err
	}
	if len(all) == 0 { // it was removed meanwhile
		return &cri.ImageStatusResponse{}, nil
	}
	return &cri.ImageStatusResponse{Image: all[0]}, nil
}

// ListImages lists images, each once with all its names.
func (s *Service) ListImages(ctx context.Context, req *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	all, err := s.filtered(ctx, req.GetFilter())
	return &cri.ListImagesResponse{Images: all}, err
}

// StreamImages is ListImages as a stream.
func (s *Service) StreamImages(req *cri.StreamImagesRequest, to cri.ImageService_StreamImagesServer) error {
	all, err := s.filtered(to.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	for _, i := range all {
		if err := to.Send(&cri.StreamImagesResponse{Images: []*cri.Image{i}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) filtered(ctx context.Context, f *cri.ImageFilter) ([]*cri.Image, error) {
	name := f.GetImage().GetImage()
	if name == "" {
		return s.listed(ctx, func(image.Image) bool { return true })
	}
	img, err := s.store.Get(ctx, name)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return s.listed(ctx, func(i image.Image) bool { return i.ID == img.ID })
}

// listed returns the images that want accepts.
func (s *Service) listed(ctx context.Context, want func(image.Image) bool) (out []*cri.Image, err error) {
	all, err := s.store.List(ctx)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if !want(i) {
			continue
		}
		at := slices.IndexFunc(out, func(o *cri.Image) bool { return o.GetId() == i.ID })
		if at < 0 {
			out, at = append(out, shown(i)), len(out)
		}
		if i.Name != "" {
			out[at].RepoTags = append(out[at].RepoTags, i.Name)
			if repository, _, ok := cutTag(i.Name); ok && i.Digest != "" {
				out[at].RepoDigests = append(out[at].RepoDigests, repository+"@"+i.Digest)
			}
		}
	}
	return out, nil
}

// cutTag splits a name at its tag.
func cutTag(name string) (repository, tag string, ok bool) {
	i := strings.LastIndexByte(name, ':')
	if i < 0 || strings.Contains(name[i:], "/") {
		return name, "", false
	}
	return name[:i], name[i+1:], true
}

func shown(i image.Image) *cri.Image {
	out := &cri.Image{Id: i.ID, Size: uint64(max(i.Size, 0)), Spec: &cri.ImageSpec{Image: i.ID}}
	user, _, _ := strings.Cut(i.Config.User, ":")
	if uid, err := strconv.ParseInt(user, 10, 64); err == nil {
		out.Uid = &cri.Int64Value{Value: uid}
	} else {
		out.Username = user
	}
	return out
}

// RemoveImage removes an image with all its names, or one name. It is no error if the store does not have it.
func (s *Service) RemoveImage(ctx context.Context, req *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error) {
	if err := s.store.Remove(ctx, req.GetImage().GetImage()); err != nil && !errdefs.IsNotFound(err) {
		return nil, err
	}
	return &cri.RemoveImageResponse{}, nil
}

// ImageFsInfo tells how much the images occupy.
func (s *Service) ImageFsInfo(ctx context.Context, _ *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error) {
	all, err := s.listed(ctx, func(image.Image) bool { return true })
	if err != nil {
		return nil, err
	}
	sum := uint64(0)
	for _, i := range all {
		sum += i.GetSize()
	}
	return &cri.ImageFsInfoResponse{ImageFilesystems: []*cri.FilesystemUsage{{
		Timestamp: time.Now().UnixNano(), FsId: &cri.FilesystemIdentifier{Mountpoint: s.dir}, UsedBytes: &cri.UInt64Value{Value: sum}, InodesUsed: &cri.UInt64Value{},
	}}}, nil
}
