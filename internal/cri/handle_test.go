package cri

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/cri/pod"
	"cocoonstack.io/cocoon/internal/cri/relay"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// oneVM is an engine with one sandbox.
type oneVM struct {
	pod.Engine
	record vm.Record
}

func (e oneVM) List(context.Context) ([]vm.Record, error)                  { return []vm.Record{e.record}, nil }
func (e oneVM) ListSnapshots(context.Context) ([]snapshot.Snapshot, error) { return nil, nil }
func (e oneVM) Inspect(_ context.Context, ref string) (vm.Record, error) {
	if ref == string(e.record.ID) {
		return e.record, nil
	}
	return vm.Record{}, errdefs.NotFoundf("no vm %s", ref)
}

func (e oneVM) Watch(ctx context.Context, after int64, fn func(vm.Event) error) error {
	if after == 0 && e.record.Revision > 0 {
		return errdefs.Preconditionf("the journal does not have it any more")
	}
	if err := fn(vm.Event{Type: vm.EventModified, Record: e.record}); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

// noImages is a store without images.
type noImages struct{}

func (noImages) Get(context.Context, string) (image.Image, error) {
	return image.Image{}, errdefs.NotFoundf("no image")
}
func (noImages) List(context.Context) ([]image.Image, error) { return nil, nil }
func (noImages) Remove(context.Context, string) error        { return errdefs.NotFoundf("no image") }

func (noImages) Pull(context.Context, image.PullRequest, func(image.Progress)) (image.Image, error) {
	return image.Image{}, errdefs.Unavailablef("no registry")
}

// old answers as containerd 1.6 does. Its lists have a field that no version of CRI knows.
type old struct {
	cri.UnimplementedRuntimeServiceServer
}

const unknownField = 1000

func (old) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	r := &cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{{Id: "c0ffee"}}}
	r.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, unknownField, protowire.VarintType), 7))
	return r, nil
}

func (old) StopPodSandbox(_ context.Context, r *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	return nil, status.Errorf(codes.NotFound, "sandbox %s", r.GetPodSandboxId())
}

func (old) Status(_ context.Context, r *cri.StatusRequest) (*cri.StatusResponse, error) {
	out := &cri.StatusResponse{Status: &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{{Type: "RuntimeReady", Status: true}}}, RuntimeHandlers: []*cri.RuntimeHandler{{Name: "runc"}}}
	if r.GetVerbose() {
		out.Info = map[string]string{"config": `{"containerd":{"defaultRuntimeName":"runc","runtimes":{"runc":{"options":{"SystemdCgroup":true}}}}}`}
	}
	return out, nil
}

func (old) GetContainerEvents(_ *cri.GetEventsRequest, to cri.RuntimeService_GetContainerEventsServer) error {
	if err := to.Send(&cri.ContainerEventResponse{ContainerId: "c0ffee"}); err != nil {
		return err
	}
	<-to.Context().Done()
	return to.Context().Err()
}

// serveDoor serves a door in front of a containerd, nil for none, and returns a client of it.
func serveDoor(t testing.TB, containerd cri.RuntimeServiceServer) (cri.RuntimeServiceClient, vm.Record) {
	t.Helper()
	dir := t.TempDir()
	theirs := filepath.Join(dir, "containerd.sock")
	if containerd != nil {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", theirs)
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		cri.RegisterRuntimeServiceServer(s, containerd)
		go s.Serve(l) //nolint:errcheck // Stop ends it
		t.Cleanup(s.Stop)
	}
	spec, owner, err := convert.Sandbox(&cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u1"}}, "cocoon", convert.Node{CPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	r := vm.Record{ID: vm.NewID(), Owner: owner, Spec: spec, State: vm.StateRunning, Revision: 1000, NICs: []vm.NIC{{IP: "10.0.0.2"}}}
	recovered := make(chan struct{})
	close(recovered)
	server, err := New(Config{Socket: filepath.Join(dir, "cri.sock"), Containerd: theirs, Handlers: []string{"cocoon"}},
		Deps{Engine: oneVM{record: r}, Images: noImages{}, Recovered: recovered, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-server.Ready():
	case err := <-done:
		t.Fatalf("it does not serve: %v", err)
	}
	conn, err := grpc.NewClient("unix:"+filepath.Join(dir, "cri.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return cri.NewRuntimeServiceClient(conn), r
}

func TestListsAreJoined(t *testing.T) {
	c, r := serveDoor(t, old{})
	list, err := c.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, i := range list.GetItems() {
		ids = append(ids, i.GetId())
	}
	if want := []string{"c0ffee", convert.SandboxID(r.ID)}; !slices.Equal(ids, want) {
		t.Errorf("got %v, want %v", ids, want)
	}
	if got, want := list.ProtoReflect().GetUnknown(), protowire.AppendVarint(protowire.AppendTag(nil, unknownField, protowire.VarintType), 7); !slices.Equal(got, want) {
		t.Errorf("a field that the door does not know became % x, want % x", got, want)
	}
	st, err := c.Status(t.Context(), &cri.StatusRequest{})
	if err != nil || len(st.GetRuntimeHandlers()) != 2 || st.GetRuntimeHandlers()[1].GetName() != "cocoon" || len(st.GetStatus().GetConditions()) != 1 {
		t.Errorf("got %v, %v", st, err)
	}
}

// TestGapsOfOldContainerds: what a kubelet stumbles over is filled, and what is an answer stays one.
func TestGapsOfOldContainerds(t *testing.T) {
	c, _ := serveDoor(t, old{})
	if _, err := c.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: "c0ffee"}); err != nil {
		t.Errorf("stop what is gone: %v", err)
	}
	r, err := c.RuntimeConfig(t.Context(), &cri.RuntimeConfigRequest{})
	if err != nil || r.GetLinux().GetCgroupDriver() != cri.CgroupDriver_SYSTEMD {
		t.Errorf("got %v, %v", r, err)
	}
	if _, err := c.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: "c0ffee"}); status.Code(err) != codes.Unimplemented {
		t.Errorf("what containerd does not know: %v", err)
	}
	s, err := c.StreamPodSandboxes(t.Context(), &cri.StreamPodSandboxesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); status.Code(err) != codes.Unimplemented { // then the kubelet asks for the list
		t.Errorf("a stream that containerd does not know: %v", err)
	}
}

// TestContainerdAway: a VM pod is served, and nobody is told a part of a list.
func TestContainerdAway(t *testing.T) {
	c, r := serveDoor(t, nil)
	if st, err := c.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: convert.SandboxID(r.ID)}); err != nil || st.GetStatus().GetNetwork().GetIp() != "10.0.0.2" {
		t.Errorf("got %v, %v", st, err)
	}
	if l, err := c.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: convert.SandboxID(r.ID)[:10]}}); err != nil || len(l.GetItems()) != 1 {
		t.Errorf("got %v, %v", l, err)
	}
	for what, call := range map[string]func() error{
		"list":    func() error { _, err := c.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{}); return err },
		"version": func() error { _, err := c.Version(t.Context(), &cri.VersionRequest{}); return err },
		"their sandbox": func() error {
			_, err := c.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: "c0ffee"})
			return err
		},
	} {
		if err := call(); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: got %v, want Unavailable", what, err)
		}
	}
}

// TestTheirStatusIsWhole: an error of containerd arrives with its details.
func TestTheirStatusIsWhole(t *testing.T) {
	c, _ := serveDoor(t, detailed{})
	_, err := c.Version(t.Context(), &cri.VersionRequest{})
	if s := status.Convert(err); s.Code() != codes.ResourceExhausted || len(s.Details()) != 1 {
		t.Errorf("got %v with %v", err, s.Details())
	}
}

// detailed refuses with details.
type detailed struct {
	cri.UnimplementedRuntimeServiceServer
}

func (detailed) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	s, err := status.New(codes.ResourceExhausted, "no").WithDetails(&cri.VersionRequest{Version: "detail"})
	if err != nil {
		return nil, err
	}
	return nil, s.Err()
}

// broken ends its events at once.
type broken struct {
	cri.UnimplementedRuntimeServiceServer
}

func (broken) GetContainerEvents(*cri.GetEventsRequest, cri.RuntimeService_GetContainerEventsServer) error {
	return status.Error(codes.Unavailable, "restarting")
}

// TestEventsEnd: a kubelet learns that containerd tells no more, and asks again.
func TestEventsEnd(t *testing.T) {
	c, _ := serveDoor(t, broken{})
	s, err := c.GetContainerEvents(t.Context(), &cri.GetEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want Unavailable", err)
	}
}

func TestEventsOfBothSides(t *testing.T) {
	c, r := serveDoor(t, old{})
	s, err := c.GetContainerEvents(t.Context(), &cri.GetEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	ev, err := s.Recv()
	if err != nil || ev.GetContainerId() != "c0ffee" {
		t.Errorf("got %v, %v; the state of our sandbox %s is no news", ev, err, convert.SandboxID(r.ID))
	}
}

func TestBrokenRequests(t *testing.T) {
	c, r := serveDoor(t, old{})
	if _, err := c.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: "vm-"}); status.Code(err) != codes.NotFound {
		t.Errorf("an empty id: %v", err)
	}
	if _, err := c.ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: convert.SandboxID(r.ID)}); status.Code(err) != codes.NotFound {
		t.Errorf("a sandbox is no container: %v", err)
	}
	_, err := c.RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{RuntimeHandler: "cocoon"})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("no configuration: %v", err)
	}
	b := relay.Frame{0xff, 0xff}
	if err := decoded(b, &cri.VersionRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("no message at all: %v", err)
	}
	if err := decoded(nil, &cri.VersionRequest{}); err != nil || proto.Size(&cri.VersionRequest{}) != 0 {
		t.Error(err)
	}
}
