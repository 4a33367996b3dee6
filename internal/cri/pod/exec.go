package pod

import (
	"bytes"
	"context"
	"fmt"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// maxOutput is how much of each output of ExecSync is kept, in bytes. CRI says 16 MB; both and the rest of the message must fit into
// one of a kubelet (CVE-2022-1708).
const maxOutput = 7 << 20

// limited keeps the beginning of what is written, and accepts the rest.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	if room := maxOutput - l.Len(); room > 0 {
		l.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// ExecSync runs a command and returns its output. The timeout is in seconds, 0 is none, and a command that exceeds it is killed.
func (s *Service) ExecSync(ctx context.Context, req *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error) {
	r, e, err := s.running(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if len(req.GetCmd()) == 0 {
		return nil, errdefs.Invalidf("exec in container %s: a command is needed", req.GetContainerId())
	}
	limit := time.Duration(req.GetTimeout()) * time.Second
	exec, cancel := ctx, context.CancelFunc(func() {})
	if limit > 0 {
		exec, cancel = context.WithTimeout(ctx, limit)
	}
	defer cancel()
	var stdout, stderr limited
	code, err := s.engine.Exec(exec, string(r.ID), guest.Exec{Container: e.Spec.Name, Command: req.GetCmd()}, guest.Streams{Stdout: &stdout, Stderr: &stderr})
	if err != nil && exec.Err() != nil && ctx.Err() == nil {
		return nil, errdefs.New(errdefs.DeadlineExceeded, "command %q timed out after %s", req.GetCmd()[0], limit)
	}
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", req.GetContainerId(), err)
	}
	return &cri.ExecSyncResponse{Stdout: stdout.Bytes(), Stderr: stderr.Bytes(), ExitCode: int32(code)}, nil //nolint:gosec // an exit code has a byte
}

// running returns a container that runs.
func (s *Service) running(ctx context.Context, id string) (vm.Record, vm.Ephemeral, error) {
	r, e, err := s.container(ctx, id)
	if err == nil && e.Record.Status.State != vm.ContainerRunning {
		err = errdefs.Preconditionf("container %s does not run, it is %s", id, e.Record.Status.State)
	}
	return r, e, err
}

// Exec returns where a client runs a command.
func (s *Service) Exec(ctx context.Context, req *cri.ExecRequest) (*cri.ExecResponse, error) {
	if _, _, err := s.running(ctx, req.GetContainerId()); err != nil {
		return nil, err
	}
	return s.urls.server.GetExec(req)
}

// Attach returns where a client is connected to the streams of a container.
func (s *Service) Attach(ctx context.Context, req *cri.AttachRequest) (*cri.AttachResponse, error) {
	if _, _, err := s.running(ctx, req.GetContainerId()); err != nil {
		return nil, err
	}
	return s.urls.server.GetAttach(req)
}

// PortForward returns where a client is connected to ports of a pod.
func (s *Service) PortForward(ctx context.Context, req *cri.PortForwardRequest) (*cri.PortForwardResponse, error) {
	r, err := s.sandbox(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if r.State != vm.StateRunning {
		return nil, errdefs.Preconditionf("the guest of sandbox %s does not run", req.GetPodSandboxId())
	}
	return s.urls.server.GetPortForward(req)
}
