package pod

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file is about checkpoints of pods (KEP-5823). A checkpoint is a snapshot of the VM, exported to the folder that the caller names.

// Saver is the part of the VM engine, and of what is around it, that checkpoints need.
type Saver interface {
	SaveSnapshot(ctx context.Context, ref string, spec vm.SaveSpec) (snapshot.Snapshot, error)
	ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error)
	RemoveSnapshot(ctx context.Context, ref string) error
	ExportSnapshot(ctx context.Context, ref string, w io.Writer) error
	ExportSnapshotDir(ctx context.Context, ref, dir string) error
	SnapshotInDir(ctx context.Context, dir string) (snapshot.Snapshot, error)
	CloneSandbox(ctx context.Context, c vm.SandboxClone) (vm.Record, error)
}

// checkpointPrefix begins the names of snapshots that exist until they are exported.
const checkpointPrefix = "checkpoint-"

// CheckpointPod writes a checkpoint of a sandbox and all its containers, which stand still meanwhile and then go on.
// Errors: InvalidArgument, FailedPrecondition for containers that do not run, or of which a program has a file of the node open.
func (s *Service) CheckpointPod(ctx context.Context, req *cri.CheckpointPodRequest) (*cri.CheckpointPodResponse, error) {
	r, err := s.sandbox(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	out := req.GetOutputPath()
	switch fi, err := os.Lstat(out); {
	case len(req.GetOptions()) > 0:
		return nil, errNoOptions()
	case !filepath.IsAbs(out):
		return nil, errdefs.Invalidf("the path %q of the checkpoint is not absolute", out)
	case err != nil:
		return nil, errdefs.New(errdefs.InvalidArgument, "the folder of the checkpoint: %w", err)
	case !fi.IsDir():
		return nil, errdefs.Invalidf("the path %s of the checkpoint is no folder", out)
	}
	if err := checkpointable(r, req.GetContainerIds()); err != nil {
		return nil, err
	}
	return &cri.CheckpointPodResponse{}, s.checkpoint(ctx, r, func(id string) error { return s.engine.ExportSnapshotDir(ctx, id, out) })
}

// CheckpointContainer writes a checkpoint of the whole pod, as a tar archive, to a file that does not exist yet. A kubelet calls it for the checkpoints
// of its own API.
// Errors: as for CheckpointPod; FailedPrecondition if another container of the pod runs.
func (s *Service) CheckpointContainer(ctx context.Context, req *cri.CheckpointContainerRequest) (*cri.CheckpointContainerResponse, error) {
	r, _, err := s.container(ctx, req.GetContainerId())
	switch {
	case err != nil:
		return nil, err
	case !filepath.IsAbs(req.GetLocation()):
		return nil, errdefs.Invalidf("the path %q of the checkpoint is not absolute", req.GetLocation())
	}
	if err := checkpointable(r, []string{req.GetContainerId()}); err != nil {
		return nil, err
	}
	if limit := req.GetTimeout(); limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(limit)*time.Second)
		defer cancel()
	}
	return &cri.CheckpointContainerResponse{}, s.checkpoint(ctx, r, func(id string) error { return s.archive(ctx, id, req.GetLocation()) })
}

// archive writes a snapshot to a new file, which nobody else can read.
func (s *Service) archive(ctx context.Context, id, file string) (err error) {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write the checkpoint: %w", err)
	}
	err = s.engine.ExportSnapshot(ctx, id, f)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}

// checkpoint saves a sandbox and exports what it has saved.
func (s *Service) checkpoint(ctx context.Context, r vm.Record, export func(id string) error) error {
	x, err := s.engine.SaveSnapshot(ctx, string(r.ID), vm.SaveSpec{
		Name: checkpointPrefix + string(vm.NewID()), Labels: map[string]string{contract.VMLabelCRIHandler: r.Spec.Labels[contract.VMLabelCRIHandler]},
	})
	if err == nil {
		defer s.dropCheckpoint(context.WithoutCancel(ctx), x)
		err = export(x.ID)
	}
	if err != nil {
		return fmt.Errorf("checkpoint sandbox %s: %w", convert.SandboxID(r.ID), err)
	}
	return nil
}

func errNoOptions() error {
	return errdefs.Invalidf("checkpoints of VM pods have no options; leave them out")
}

// checkpointable refuses a checkpoint that is not of all containers of a sandbox that run.
func checkpointable(r vm.Record, ids []string) error {
	if r.State != vm.StateRunning {
		return errdefs.Preconditionf("the sandbox is not ready: %s", r.Message)
	}
	var running []string
	for _, e := range r.Ephemeral {
		switch e.Record.Status.State {
		case vm.ContainerRunning:
			running = append(running, convert.ContainerID(r.ID, e.Spec.Name))
		case vm.ContainerTerminated:
		default:
			return errdefs.Preconditionf("container %s does not run yet; start it, or remove it", convert.ContainerID(r.ID, e.Spec.Name))
		}
	}
	want := slices.Sorted(slices.Values(ids))
	slices.Sort(running)
	if len(want) == 0 || !slices.Equal(want, running) {
		return errdefs.Preconditionf("the checkpoint of a VM has all containers that run, which are %s; name each of them once", strings.Join(running, ", "))
	}
	return nil
}

// dropCheckpoint removes a snapshot that has been exported, or could not be.
func (s *Service) dropCheckpoint(ctx context.Context, x snapshot.Snapshot) {
	if err := s.engine.RemoveSnapshot(ctx, x.ID); err != nil && !errdefs.IsNotFound(err) {
		s.log.Warn("snapshot of checkpoint not removed", "snapshot", x.ID, "err", err)
	}
}

// dropCheckpoints removes the snapshots of checkpoints that an earlier process did not finish.
func (s *Service) dropCheckpoints(ctx context.Context) {
	all, err := s.engine.ListSnapshots(ctx)
	if err != nil {
		s.log.Warn("snapshots of unfinished checkpoints not looked for", "err", err)
	}
	for _, x := range all {
		if x.Labels[contract.VMLabelCRIHandler] != "" && strings.HasPrefix(x.Name, checkpointPrefix) {
			s.dropCheckpoint(ctx, x)
		}
	}
}

// RestorePod makes a sandbox from a checkpoint. Its containers are created, and go on where they were when they are started. A second call for the same
// attempt returns the same sandbox, as long as its containers have not been started.
// Errors: InvalidArgument; FailedPrecondition if the containers are not those of the checkpoint, or their images, commands, users or mounts differ;
// NotFound for a checkpoint of another namespace; DataLoss.
func (s *Service) RestorePod(ctx context.Context, req *cri.RestorePodRequest) (*cri.RestorePodResponse, error) {
	spec, owner, err := convert.Sandbox(req.GetConfig(), req.GetRuntimeHandler(), s.node)
	switch {
	case err != nil:
		return nil, err
	case len(req.GetOptions()) > 0:
		return nil, errNoOptions()
	case !filepath.IsAbs(req.GetCheckpointPath()):
		return nil, errdefs.Invalidf("the path %q of the checkpoint is not absolute", req.GetCheckpointPath())
	}
	x, err := s.engine.SnapshotInDir(ctx, req.GetCheckpointPath())
	if err != nil {
		return nil, fmt.Errorf("restore pod %s/%s: %w", owner.Namespace, req.GetConfig().GetMetadata().GetName(), err)
	}
	if x.Owner.Namespace != owner.Namespace && !x.Owner.Operator() { // before anything of it is told
		return nil, errdefs.NotFoundf("there is no checkpoint of namespace %s in %s", owner.Namespace, req.GetCheckpointPath())
	}
	c := vm.SandboxClone{Dir: req.GetCheckpointPath(), Spec: spec}
	out := &cri.RestorePodResponse{}
	for _, config := range req.GetContainerConfigs() {
		one, err := s.restored(ctx, owner, x, config)
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", config.GetMetadata().GetName(), err)
		}
		c.Containers = append(c.Containers, one)
		out.RestoredContainers = append(out.RestoredContainers, &cri.RestoredContainer{Name: config.GetMetadata().GetName()})
	}
	r, err := s.engine.CloneSandbox(vm.OnBehalf(ctx, owner), c)
	if errdefs.IsAlreadyExists(err) {
		r, err = s.restoredBefore(vm.OnBehalf(ctx, owner), x, c)
	}
	if err != nil {
		return nil, err
	}
	if err := s.awaitGuest(ctx, r.ID); err != nil {
		if failed := s.engine.Remove(context.WithoutCancel(ctx), string(r.ID), true); failed != nil {
			s.log.Warn("sandbox that was not restored not removed", "vm", r.ID, "err", failed)
		}
		return nil, err
	}
	out.PodSandboxId = convert.SandboxID(r.ID)
	for i, one := range c.Containers {
		out.RestoredContainers[i].ContainerId = convert.ContainerID(r.ID, one.Name)
	}
	return out, nil
}

// restoredBefore returns the sandbox that an earlier call has made of x for c, whose caller may not have heard of it.
// Errors: AlreadyExists if it is another one, or goes on already.
func (s *Service) restoredBefore(ctx context.Context, x snapshot.Snapshot, c vm.SandboxClone) (vm.Record, error) {
	r, err := s.engine.Inspect(ctx, c.Spec.Name)
	if err != nil {
		return r, err
	}
	waits := func(e vm.Ephemeral) bool { return e.Record.Status.State == vm.ContainerCreated }
	same := convert.IsSandbox(r) && convert.Ready(r) && r.Snapshot == x.ID && len(r.Ephemeral) == len(c.Containers) && !slices.ContainsFunc(c.Containers, func(want vm.Container) bool {
		return !slices.ContainsFunc(r.Ephemeral, func(e vm.Ephemeral) bool { return e.Spec.Name == want.Name && waits(e) })
	})
	if !same {
		return r, errdefs.Existsf("the sandbox of the attempt exists, and is not a restored one that waits for its start; remove it first")
	}
	return r, nil
}

// restored returns the container of x that config is about, with the settings of config.
// Errors: FailedPrecondition if config is about another program.
func (s *Service) restored(ctx context.Context, owner vm.Owner, x snapshot.Snapshot, config *cri.ContainerConfig) (vm.Container, error) {
	at := slices.IndexFunc(x.Record.Ephemeral, func(e vm.Ephemeral) bool {
		return e.Record.Status.State != vm.ContainerTerminated && convert.ListedContainer(x.Record, e).GetMetadata().GetName() == config.GetMetadata().GetName()
	})
	if at < 0 {
		return vm.Container{}, errdefs.Preconditionf("the checkpoint has no such container that runs")
	}
	was := x.Record.Ephemeral[at]
	c, err := convert.Container(config, was.Spec.Name)
	if err != nil {
		return c, err
	}
	if c, err = s.completed(ctx, owner.Namespace, c, config); err != nil {
		return c, err
	}
	img, err := s.images.Ensure(ctx, owner.Namespace, config.GetImage())
	if err != nil {
		return c, err
	}
	c.Image = img.ID
	switch p, had := c.Process, was.Spec.Process; { // variables may hold the address and the uid of the pod, which are others now
	case c.Image != was.Record.ImageDigest:
		return c, errdefs.Preconditionf("it runs image %s in the checkpoint, and is to run %s; use the same image", was.Record.ImageDigest, c.Image)
	case !slices.Equal(p.Entrypoint, had.Entrypoint) || !slices.Equal(p.Args, had.Args) || p.WorkDir != had.WorkDir || p.User != had.User || p.TTY != had.TTY || p.Stdin != had.Stdin:
		return c, errdefs.Preconditionf("it runs another command, in another folder, by another user or with another input in the checkpoint; use the same")
	case c.PIDs.Own != was.Spec.PIDs.Own:
		return c, errdefs.Preconditionf("it sees other processes in the checkpoint; set shareProcessNamespace as it was")
	case !reflect.DeepEqual(p.Security.Filters(), had.Security.Filters()):
		return c, errdefs.Preconditionf("its system calls are filtered otherwise in the checkpoint; use the same seccomp profile")
	}
	return c, nil
}

// awaitGuest waits until the guest of a VM answers, and until its containers wait for their start.
// Errors: FailedPrecondition if it has ended; DeadlineExceeded, which says why the guest is not ready, as far as that is known.
func (s *Service) awaitGuest(ctx context.Context, id vm.ID) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var last vm.Record
	done := false
	err := s.engine.Watch(ctx, -1, func(ev vm.Event) error {
		if ev.Record.ID != id {
			return nil
		}
		last = ev.Record
		if done = last.AgentReady && last.Resume == nil || last.State != vm.StateRunning; done {
			cancel()
		}
		return nil
	})
	switch {
	case done && last.State == vm.StateRunning:
		return nil
	case done:
		return errdefs.Preconditionf("the guest has ended: %s", last.Message)
	case last.Message != "":
		return errdefs.New(errdefs.ClassOf(err), "the guest is not ready: %s: %w", last.Message, err)
	}
	return err
}
