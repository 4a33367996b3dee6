package appliance

import (
	"context"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// shelf keeps the names of the images that it gets.
type shelf struct {
	mu    sync.Mutex
	names []string
}

func (*shelf) List(context.Context) ([]Image, error) { return nil, nil }

func (s *shelf) Import(_ context.Context, names []string, _ *os.File) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names = append(s.names, names...)
	return nil
}

func (s *shelf) has(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.names, name)
}

// push sends an image of that name.
func push(ctx context.Context, c *grpc.ClientConn, name string) error {
	archive := ociimage.Docker(map[string]ociimage.Image{name: {Layers: []ociimage.Layer{ociimage.Of(ociimage.File("hello", name))}}})
	stream, err := capsulev1.NewImageServiceClient(c).Push(ctx)
	if err != nil {
		return err
	}
	for _, m := range []*capsulev1.ImagePushRequest{
		{Msg: &capsulev1.ImagePushRequest_Metadata{Metadata: &capsulev1.ImagePushMetadata{TotalBytes: uint64(len(archive))}}},
		{Msg: &capsulev1.ImagePushRequest_Chunk{Chunk: archive}},
	} {
		if err := stream.Send(m); err != nil && err != io.EOF { //nolint:errorlint // as documented; the answer says why
			return err
		}
	}
	_, err = stream.CloseAndRecv()
	return err
}

// Who reads pushes no image, and beside a workload that has control over the machine only administrators do: it would run the new image
// when it starts again. A refused image is stored nowhere, and the refusal is in the audit log.
func TestPushNeedsRights(t *testing.T) {
	store := &shelf{}
	s, ctx := serve(t, Deps{Images: []ImageStore{store}}), t.Context()
	viewer, worker, admin := s.as(capsulev1.Role_ROLE_VIEW), s.as(capsulev1.Role_ROLE_OPERATE), s.as(capsulev1.Role_ROLE_ADMIN)
	try := func(c *grpc.ClientConn, name string, want codes.Code, words string) {
		t.Helper()
		err := push(ctx, c, name)
		s.code(name, err, want)
		if !strings.Contains(status.Convert(err).Message(), words) {
			t.Errorf("%s: %v does not say %q", name, err, words)
		}
		if store.has(name) != (want == codes.OK) {
			t.Errorf("%s: the store has %v", name, store.names)
		}
	}
	try(viewer, "viewer:1", codes.PermissionDenied, "needs the role operate")
	try(worker, "worker:1", codes.OK, "")
	s.wants(&capsulev1.Workload{Name: "plain", Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER, Container: &capsulev1.ContainerSpec{Image: "worker:1"}})
	try(worker, "worker:2", codes.OK, "")
	root := &capsulev1.Workload{Name: "root", Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER, DesiredState: capsulev1.DesiredState_DESIRED_STATE_STOPPED, Container: &capsulev1.ContainerSpec{Image: "worker:1", Privileged: true}}
	s.wants(root)
	try(worker, "worker:3", codes.PermissionDenied, "workload root, which has control over the machine, needs the role admin")
	try(viewer, "viewer:2", codes.PermissionDenied, "needs the role operate")
	try(admin, "admin:1", codes.OK, "")
	root.Container.Privileged = false
	s.wants(root)
	try(worker, "worker:4", codes.OK, "")

	audit, err := capsulev1.NewIdentityServiceClient(admin).Audit(ctx, &capsulev1.AuditRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range audit.GetEntries() {
		got = append(got, e.GetName()+" "+e.GetCode())
	}
	want := []string{
		"ROLE_VIEW PermissionDenied", "ROLE_OPERATE OK", "ROLE_OPERATE OK", "ROLE_OPERATE PermissionDenied", "ROLE_VIEW PermissionDenied", "ROLE_ADMIN OK", "ROLE_OPERATE OK",
	}
	if !slices.Equal(got, want) {
		t.Errorf("audit %q, want %q", got, want)
	}
}
