package pod

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// CreateContainer adds a container to a sandbox, whose guest is started if it does not run yet. The container does not run.
func (s *Service) CreateContainer(ctx context.Context, req *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
	r, err := s.sandbox(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if !convert.Ready(r) {
		return nil, errdefs.Preconditionf("the sandbox %s is not ready: %s", req.GetPodSandboxId(), r.Message)
	}
	c, err := convert.Container(req.GetConfig(), convert.NewContainerName())
	if err != nil {
		return nil, err
	}
	if c, err = s.completed(ctx, r.Owner.Namespace, c, req.GetConfig()); err != nil {
		return nil, fmt.Errorf("container %s: %w", req.GetConfig().GetMetadata().GetName(), err)
	}
	if c.PIDs.Of, err = s.pidsOf(ctx, r, req.GetConfig()); err != nil {
		return nil, err
	}
	if err := s.unused(r, req.GetConfig()); err != nil {
		return nil, err
	}
	img, err := s.images.Ensure(ctx, r.Owner.Namespace, req.GetConfig().GetImage())
	if err != nil {
		return nil, fmt.Errorf("container %s: %w", req.GetConfig().GetMetadata().GetName(), err)
	}
	c.Image = img.ID
	if img.Type == vm.ImageOCI {
		err = s.add(ctx, r, c)
	} else {
		err = s.addBooting(ctx, r, c)
	}
	if err != nil {
		return nil, err
	}
	return &cri.CreateContainerResponse{ContainerId: convert.ContainerID(r.ID, c.Name)}, nil
}

// pidsOf returns the name of the container of r whose PID namespace the new container joins. It returns "" if config names no target.
// Errors: InvalidArgument if that container is in another sandbox.
func (s *Service) pidsOf(ctx context.Context, r vm.Record, config *cri.ContainerConfig) (string, error) {
	id, err := convert.PIDsOf(config)
	if id == "" || err != nil {
		return "", err
	}
	at, e, err := s.container(ctx, id)
	switch {
	case err != nil:
		return "", fmt.Errorf("container %s is to see the processes of another one: %w", config.GetMetadata().GetName(), err)
	case at.ID != r.ID:
		return "", errdefs.Invalidf("container %s is to see the processes of container %s, which is in another sandbox", config.GetMetadata().GetName(), id)
	}
	return e.Spec.Name, nil
}

// add adds a container to the guest of a sandbox, which is started if it does not run.
func (s *Service) add(ctx context.Context, r vm.Record, c vm.Container) error {
	if r.State != vm.StateRunning && r.BootContainer == "" {
		if _, err := s.engine.Start(ctx, string(r.ID)); err != nil {
			return err
		}
	}
	_, err := s.engine.AddContainer(ctx, string(r.ID), c)
	return err
}

// addBooting adds a container whose image boots itself: it becomes the guest of the sandbox.
func (s *Service) addBooting(ctx context.Context, r vm.Record, c vm.Container) error {
	boot, err := convert.GuestBoot(convert.Config(r))
	if err == nil {
		_, err = s.engine.AddBootContainer(ctx, string(r.ID), convert.Booting(c), boot)
	}
	return err
}

// completed returns c with what its configuration names on the node and in our store, except its own image.
func (s *Service) completed(ctx context.Context, namespace string, c vm.Container, config *cri.ContainerConfig) (vm.Container, error) {
	find := convert.Finds{
		Path: source, Device: device, Profile: profile,
		Image: func(i *cri.ImageSpec) (string, error) {
			img, err := s.images.Ensure(ctx, namespace, i)
			return img.ID, err
		},
	}
	c, err := convert.Filtered(c, config, find)
	if err != nil {
		return c, err
	}
	return convert.Mounted(c, config, find)
}

// source returns what is at a path of the node, to which the kubelet has resolved a volume. A missing folder is made, as other runtimes do for a
// hostPath without a type.
// Errors: FailedPrecondition for what is neither a folder nor a file.
func source(path string) (convert.Source, error) {
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.MkdirAll(path, 0o755); err == nil { //nolint:gosec // as other runtimes make it
			real, err = filepath.EvalSymlinks(path)
		}
	}
	if err != nil {
		return convert.Source{}, errdefs.New(errdefs.FailedPrecondition, "look at %s on the node: %w", path, err)
	}
	fi, err := os.Stat(real)
	switch {
	case err != nil:
		return convert.Source{}, errdefs.New(errdefs.FailedPrecondition, "look at %s on the node: %w", path, err)
	case fi.IsDir():
		return convert.Source{Path: real, Below: len(proc.MountsBelow(real)) > 0}, nil
	case fi.Mode().IsRegular():
		return convert.Source{Path: real, File: true}, nil
	}
	return convert.Source{}, errdefs.Preconditionf("%s on the node is neither a folder nor a file, and a VM cannot have it", path)
}

// device returns the path of a block device of the node without symbolic links; "" for anything else.
// Errors: FailedPrecondition if there is nothing.
func device(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", errdefs.New(errdefs.FailedPrecondition, "look at %s on the node: %w", path, err)
	}
	fi, err := os.Stat(real)
	switch {
	case err != nil:
		return "", errdefs.New(errdefs.FailedPrecondition, "look at %s on the node: %w", path, err)
	case fi.Mode()&(fs.ModeDevice|fs.ModeCharDevice) != fs.ModeDevice:
		return "", nil
	}
	return real, nil
}

// maxProfile limits a seccomp profile, in bytes. Docker's default one has 20 KiB.
const maxProfile = 256 << 10

// profile returns what a seccomp profile of the node has.
// Errors: FailedPrecondition if it is no file or cannot be read.
func profile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe would wait for its writer
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "read the seccomp profile %s of the node: %w", path, err)
	}
	defer f.Close()
	fi, err := f.Stat()
	switch {
	case err != nil:
		return nil, errdefs.New(errdefs.FailedPrecondition, "read the seccomp profile %s of the node: %w", path, err)
	case !fi.Mode().IsRegular():
		return nil, errdefs.Preconditionf("the seccomp profile %s of the node is not a file", path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxProfile+1))
	switch {
	case err != nil:
		return nil, errdefs.New(errdefs.FailedPrecondition, "read the seccomp profile %s of the node: %w", path, err)
	case len(text) > maxProfile:
		return nil, errdefs.Preconditionf("the seccomp profile %s of the node is larger than %d bytes", path, maxProfile)
	}
	return text, nil
}

// unused refuses a second container with the name and the attempt of another one, as containerd does.
func (s *Service) unused(r vm.Record, c *cri.ContainerConfig) error {
	for _, e := range r.Ephemeral {
		if has := convert.ListedContainer(r, e).GetMetadata(); has.GetName() == c.GetMetadata().GetName() && has.GetAttempt() == c.GetMetadata().GetAttempt() {
			return errdefs.Existsf("the sandbox has attempt %d of container %s already; remove it first", has.GetAttempt(), has.GetName())
		}
	}
	return nil
}

// StartContainer starts a container that was created.
func (s *Service) StartContainer(ctx context.Context, req *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	r, e, err := s.container(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if st := e.Record.Status.State; st != vm.ContainerCreated {
		return nil, errdefs.Preconditionf("container %s has been started already, it is %s", req.GetContainerId(), st)
	}
	s.logs.follow(r, e) //nolint:contextcheck // it goes on after the call
	if _, err := s.engine.StartContainer(ctx, string(r.ID), e.Spec.Name); err != nil {
		return nil, err
	}
	return &cri.StartContainerResponse{}, nil
}

// StopContainer asks a container to end, and kills it after the timeout, which is in seconds.
func (s *Service) StopContainer(ctx context.Context, req *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	r, e, err := s.container(ctx, req.GetContainerId())
	if err == nil && e.Record.Status.State == vm.ContainerRunning {
		err = s.engine.KillContainer(ctx, string(r.ID), e.Spec.Name, 0, max(time.Duration(req.GetTimeout())*time.Second, 0))
		if errdefs.IsFailedPrecondition(err) { // the VM has ended, and the container with it
			if now, _, again := s.container(ctx, req.GetContainerId()); again == nil && now.State != vm.StateRunning {
				err = nil
			}
		}
	}
	return &cri.StopContainerResponse{}, gone(err)
}

// RemoveContainer removes a container, which is killed if it runs. Its log stays.
func (s *Service) RemoveContainer(ctx context.Context, req *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	r, e, err := s.container(ctx, req.GetContainerId())
	if err == nil {
		s.logs.finish(ctx, r, e)
		err = s.engine.RemoveContainer(ctx, string(r.ID), e.Spec.Name)
	}
	return &cri.RemoveContainerResponse{}, gone(err)
}

// ListContainers lists the containers that match a filter.
func (s *Service) ListContainers(ctx context.Context, req *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	all, err := s.listedContainers(ctx, req.GetFilter())
	return &cri.ListContainersResponse{Containers: all}, err
}

// StreamContainers is ListContainers as a stream.
func (s *Service) StreamContainers(req *cri.StreamContainersRequest, to cri.RuntimeService_StreamContainersServer) error {
	all, err := s.listedContainers(to.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	for _, c := range all {
		if err := to.Send(&cri.StreamContainersResponse{Containers: []*cri.Container{c}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) listedContainers(ctx context.Context, f *cri.ContainerFilter) (out []*cri.Container, err error) {
	all, err := s.sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		for _, e := range r.Ephemeral {
			c := convert.ListedContainer(r, e)
			if strings.HasPrefix(c.GetId(), f.GetId()) && strings.HasPrefix(c.GetPodSandboxId(), f.GetPodSandboxId()) &&
				(f.GetState() == nil || f.GetState().GetState() == c.GetState()) && labelled(c.GetLabels(), f.GetLabelSelector()) {
				out = append(out, c)
			}
		}
	}
	return out, nil
}

// ContainerStatus returns the state of a container.
func (s *Service) ContainerStatus(ctx context.Context, req *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	r, e, err := s.container(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	s.logs.settle(ctx, r, e)
	if err := deliver(e); err != nil {
		s.log.Warn("message of container not delivered", "vm", r.ID, "container", e.Spec.Name, "err", err)
	}
	out := &cri.ContainerStatusResponse{Status: convert.ContainerStatus(r, e)}
	if req.GetVerbose() {
		out.Info = map[string]string{"vm": string(r.ID), "container": e.Spec.Name}
	}
	return out, nil
}

// deliver writes the message of a container that has ended where the kubelet looks for it when it has seen the end.
func deliver(e vm.Ephemeral) error {
	file, text := convert.Message(e)
	if file == "" || text == "" {
		return nil
	}
	f, err := os.OpenFile(file, os.O_WRONLY|unix.O_NOFOLLOW, 0) // the kubelet has made it
	if err != nil {
		return fmt.Errorf("write the message of the end: %w", err)
	}
	_, err = f.WriteAt([]byte(text), 0)
	return errors.Join(err, f.Close())
}

// UpdateContainerResources changes what a container may use. What the call does not say stays.
func (s *Service) UpdateContainerResources(ctx context.Context, req *cri.UpdateContainerResourcesRequest) (*cri.UpdateContainerResourcesResponse, error) {
	r, e, err := s.container(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if req.GetLinux() == nil {
		return nil, errdefs.Invalidf("container %s: no resources are given", req.GetContainerId())
	}
	want := convert.Resources(e.Spec.Resources, req.GetLinux())
	if _, err := s.engine.ResizeContainers(ctx, string(r.ID), map[string]vm.Resources{e.Spec.Name: *want}); err != nil {
		return nil, err
	}
	return &cri.UpdateContainerResourcesResponse{}, nil
}

// ReopenContainerLog goes on in a new file after the log was renamed.
func (s *Service) ReopenContainerLog(ctx context.Context, req *cri.ReopenContainerLogRequest) (*cri.ReopenContainerLogResponse, error) {
	r, e, err := s.container(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if e.Record.Status.State != vm.ContainerRunning {
		return nil, errdefs.Preconditionf("container %s does not run, so its log is not written", req.GetContainerId())
	}
	return &cri.ReopenContainerLogResponse{}, s.logs.reopen(r, e)
}
