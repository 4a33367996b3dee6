package containerd

import (
	"context"
	"slices"
	"strings"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/container/containerd/shimlog"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// state returns how a container is. t is its task, nil if it has none.
func state(n run, t *task.Process) container.State {
	s := container.State{Phase: container.Created, StartedAt: n.Started}
	switch {
	case t != nil && running(t):
		s.Phase, s.PID = container.Running, int(t.GetPid())
	case t != nil && t.GetStatus() == task.Status_STOPPED && n.Ended == nil:
		s.Phase, s.ExitCode, s.FinishedAt = container.Exited, int(t.GetExitStatus()), t.GetExitedAt().AsTime()
	case n.Ended != nil:
		s.Phase, s.ExitCode, s.FinishedAt, s.OOMKilled = container.Exited, n.Ended.Code, n.Ended.At, n.Ended.OOM
	case t == nil && !n.Started.IsZero():
		s.Phase, s.ExitCode, s.Reason = container.Exited, container.ExitUnknown, lostWords
	}
	if s.OOMKilled {
		s.Reason = "its memory was used up"
	}
	return s
}

// running reports whether the main process of a task has been started and has not ended.
func running(t *task.Process) bool {
	return slices.Contains([]task.Status{task.Status_RUNNING, task.Status_PAUSED, task.Status_PAUSING}, t.GetStatus())
}

// task returns the task of a container, nil if it has none.
func (r *Runtime) task(ctx context.Context, id string) (*task.Process, error) {
	t, err := r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err == nil {
		return t.GetProcess(), nil
	}
	if classOf(err) == errdefs.NotFound {
		return nil, nil
	}
	return nil, failed(err, "ask for the task of container %s", id)
}

// Inspect implements container.Runtime.
func (r *Runtime) Inspect(ctx context.Context, id string) (container.Container, error) {
	// The task is asked for before the record is, because a start is recorded before the task runs, and an end before it goes.
	t, err := r.task(ctx, id)
	if err != nil {
		return container.Container{}, err
	}
	c, k, err := r.get(ctx, id)
	if err != nil {
		return container.Container{}, err
	}
	return r.container(ctx, c, k, t)
}

func (r *Runtime) container(ctx context.Context, c containers.Container, k record, t *task.Process) (container.Container, error) {
	n, err := runOf(c)
	if err != nil {
		return container.Container{}, err
	}
	if t == nil && n.Ended == nil && !n.Started.IsZero() { // lost, or started since the task was asked for
		if t, err = r.task(ctx, c.ID); err != nil {
			return container.Container{}, err
		}
	}
	if t == nil && n.Ended == nil && !n.Started.IsZero() {
		e, ok, err := shimlog.Read(r.files(c.ID))
		if err != nil {
			return container.Container{}, err
		}
		if ok {
			n.Ended = &ended{Code: e.Code, At: e.At}
		}
	}
	s := state(n, t)
	if s.Phase == container.Exited && n.Ended == nil && t != nil && r.oom(ctx, c.ID, s.ExitCode) {
		s.OOMKilled, s.Reason = true, "its memory was used up"
	}
	if begun, _ := removing(c); begun {
		s = container.State{Phase: container.Removing}
	}
	return container.Container{Spec: k.Spec, Digest: k.Digest, CreatedAt: c.CreatedAt, State: s}, nil
}

// List implements container.Runtime. A container whose record cannot be read is reported in the log, not listed, and stays.
func (r *Runtime) List(ctx context.Context) ([]container.Container, error) {
	ts, err := r.client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, failed(err, "list tasks")
	}
	byID := map[string]*task.Process{}
	for _, t := range ts.GetTasks() {
		byID[t.GetID()] = t
	}
	cs, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, failed(err, "list containers")
	}
	var all []container.Container
	for _, c := range cs {
		k, ours, err := recordOf(c)
		if !ours {
			continue
		}
		if err != nil {
			r.cfg.Log.Error("container cannot be listed", "container", c.ID, "err", err)
			continue
		}
		one, err := r.container(ctx, c, k, byID[c.ID])
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b container.Container) int { return strings.Compare(a.Spec.ID, b.Spec.ID) })
	return all, nil
}
