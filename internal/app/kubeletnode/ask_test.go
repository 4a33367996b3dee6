package kubeletnode

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/doctor"
)

type runtimeOf struct {
	cri.UnimplementedRuntimeServiceServer
}

func (runtimeOf) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{RuntimeName: "containerd", RuntimeVersion: "v2.1.0"}, nil
}

type withDriver struct{ runtimeOf }

func (withDriver) RuntimeConfig(context.Context, *cri.RuntimeConfigRequest) (*cri.RuntimeConfigResponse, error) {
	return &cri.RuntimeConfigResponse{Linux: &cri.LinuxRuntimeConfiguration{CgroupDriver: cri.CgroupDriver_CGROUPFS}}, nil
}

func TestAsk(t *testing.T) {
	for driver, server := range map[string]cri.RuntimeServiceServer{"": runtimeOf{}, "cgroupfs": withDriver{}} {
		socket := filepath.Join(t.TempDir(), "s.sock")
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		cri.RegisterRuntimeServiceServer(s, server)
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		if got, err := Ask(t.Context(), socket); err != nil || got != (doctor.Runtime{Name: "containerd", Version: "v2.1.0", CgroupDriver: driver}) {
			t.Errorf("%+v, %v", got, err)
		}
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := Ask(t.Context(), socket); err == nil {
			t.Error("nobody is there, and it answers")
		}
	}
}
