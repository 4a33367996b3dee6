package image_test

import (
	"context"
	"encoding/base64"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	service "cocoonstack.io/cocoon/internal/cri/image"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// store has images by name and by id, and notes what it is asked to pull.
type store struct {
	images []image.Image
	pulled []image.PullRequest
	owners []string
}

func (s *store) Get(_ context.Context, ref string) (image.Image, error) {
	i := slices.IndexFunc(s.images, func(i image.Image) bool { return i.Name == ref || i.ID == ref })
	if i < 0 {
		return image.Image{}, errdefs.NotFoundf("no image %s", ref)
	}
	return s.images[i], nil
}

func (s *store) List(context.Context) ([]image.Image, error) { return s.images, nil }

func (s *store) Remove(_ context.Context, ref string) error {
	n := len(s.images)
	s.images = slices.DeleteFunc(s.images, func(i image.Image) bool { return i.Name == ref || i.ID == ref })
	if len(s.images) == n {
		return errdefs.NotFoundf("no image %s", ref)
	}
	return nil
}

func (s *store) Pull(ctx context.Context, r image.PullRequest, _ func(image.Progress)) (image.Image, error) {
	s.pulled, s.owners = append(s.pulled, r), append(s.owners, vm.Behalf(ctx).Namespace)
	return image.Image{ID: "sha256:cc", Name: r.Name}, nil
}

func two() *store {
	return &store{images: []image.Image{
		{ID: "sha256:aa", Name: "r.example/app:1", Size: 10, Digest: "sha256:dd", Config: vm.Process{User: "1000:7"}},
		{ID: "sha256:aa", Name: "r.example:5000/app:2", Size: 10, Digest: "sha256:ee", Config: vm.Process{User: "1000:7"}},
		{ID: "sha256:bb", Name: "web:latest", Size: 20, Config: vm.Process{User: "www"}},
	}}
}

// TestList: an image is listed once, with all its names.
func TestList(t *testing.T) {
	s := service.New(two(), "/images")
	got, err := s.ListImages(t.Context(), &cri.ListImagesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := &cri.ListImagesResponse{Images: []*cri.Image{
		{Id: "sha256:aa", RepoTags: []string{"r.example/app:1", "r.example:5000/app:2"}, RepoDigests: []string{"r.example/app@sha256:dd", "r.example:5000/app@sha256:ee"}, Size: 10, Uid: &cri.Int64Value{Value: 1000}, Spec: &cri.ImageSpec{Image: "sha256:aa"}},
		{Id: "sha256:bb", RepoTags: []string{"web:latest"}, Size: 20, Username: "www", Spec: &cri.ImageSpec{Image: "sha256:bb"}},
	}}
	if !proto.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	for name, n := range map[string]int{"web:latest": 1, "sha256:aa": 1, "none": 0} {
		if l, err := s.ListImages(t.Context(), &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: name}}}); err != nil || len(l.GetImages()) != n {
			t.Errorf("%s: got %v, %v", name, l, err)
		}
		if st, err := s.ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: name}}); err != nil || (st.GetImage() != nil) != (n > 0) {
			t.Errorf("%s: got %v, %v", name, st, err)
		}
	}
	if fs, err := s.ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{}); err != nil || fs.GetImageFilesystems()[0].GetUsedBytes().GetValue() != 30 || fs.GetImageFilesystems()[0].GetFsId().GetMountpoint() != "/images" {
		t.Errorf("got %v, %v", fs, err)
	}
}

func TestRemove(t *testing.T) {
	s := service.New(two(), "/images")
	for range 2 {
		if _, err := s.RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "sha256:aa"}}); err != nil {
			t.Error(err)
		}
	}
	if s.Has(t.Context(), &cri.ImageSpec{Image: "r.example/app:1"}) || !s.Has(t.Context(), &cri.ImageSpec{Image: "web:latest"}) {
		t.Error("the wrong image is gone")
	}
}

// TestPull: an image is pulled on behalf of the namespace of the pod, with what the kubelet knows of its registry.
func TestPull(t *testing.T) {
	pod := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Namespace: "shop"}}
	for name, tc := range map[string]struct {
		auth *cri.AuthConfig
		want []image.RegistryAuth
	}{
		"nothing":  {nil, nil},
		"empty":    {&cri.AuthConfig{}, nil},
		"password": {&cri.AuthConfig{Username: "u", Password: "p"}, []image.RegistryAuth{{Registry: "r.example", Username: "u", Password: "p"}}},
		"base64":   {&cri.AuthConfig{Auth: base64.StdEncoding.EncodeToString([]byte("u:p:q"))}, []image.RegistryAuth{{Registry: "r.example", Username: "u", Password: "p:q"}}},
		"token":    {&cri.AuthConfig{ServerAddress: "r2.example", IdentityToken: "t"}, []image.RegistryAuth{{Registry: "r2.example", Token: "t"}}},
	} {
		st := two()
		r, err := service.New(st, "").PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "r.example/app:1"}, Auth: tc.auth, SandboxConfig: pod})
		if err != nil || r.GetImageRef() != "sha256:cc" || st.owners[0] != "shop" {
			t.Errorf("%s: got %v, %v on behalf of %v", name, r, err, st.owners)
		}
		if d := diff.Of(tc.want, st.pulled[0].Auth); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	for _, text := range []string{"%", base64.StdEncoding.EncodeToString([]byte("no colon"))} {
		if _, err := service.New(two(), "").PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "a"}, Auth: &cri.AuthConfig{Auth: text}}); !errdefs.Is(err, errdefs.InvalidArgument) {
			t.Errorf("credentials %q: %v", text, err)
		}
	}
}

// TestEnsure: an image that the store has is not pulled. A missing image is pulled by the name that the pod has.
func TestEnsure(t *testing.T) {
	st := two()
	s := service.New(st, "")
	if img, err := s.Ensure(t.Context(), "shop", &cri.ImageSpec{Image: "web:latest"}); err != nil || img.ID != "sha256:bb" || len(st.pulled) != 0 {
		t.Errorf("got %q, %v, pulled %v", img.ID, err, st.pulled)
	}
	if img, err := s.Ensure(t.Context(), "shop", &cri.ImageSpec{Image: "sha256:theirs", UserSpecifiedImage: "busybox"}); err != nil || img.ID != "sha256:cc" || st.pulled[0].Name != "busybox" || st.owners[0] != "shop" {
		t.Errorf("got %q, %v, pulled %v", img.ID, err, st.pulled)
	}
}
