package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/container/containerd/shimlog"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Stop implements container.Runtime. A process that is killed during the grace does not kill the container: the next Stop begins again.
func (r *Runtime) Stop(ctx context.Context, id string, grace time.Duration) error {
	unlock, err := r.locks.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	_, k, err := r.get(ctx, id)
	if err != nil {
		return err
	}
	t, err := r.task(ctx, id)
	if err != nil {
		return err
	}
	if t == nil || !running(t) {
		return r.settle(ctx, id)
	}
	gone := make(chan error, 1)
	wait, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { gone <- r.gone(wait, id) }() // ends with wait
	if grace > 0 {
		if err := r.signal(ctx, id, syscall.Signal(k.Stop), false); err != nil {
			return err
		}
		limit := time.NewTimer(grace)
		defer limit.Stop()
		select {
		case err := <-gone:
			if err != nil {
				return err
			}
			return r.settle(ctx, id)
		case <-limit.C:
		case <-ctx.Done():
			return fmt.Errorf("stop container %s: %w", id, ctx.Err())
		}
	}
	if err := r.kill(ctx, id); err != nil {
		return err
	}
	if err := <-gone; err != nil {
		return err
	}
	return r.settle(ctx, id)
}

// gone returns when the main process of a container has ended.
func (r *Runtime) gone(ctx context.Context, id string) error {
	if _, err := r.client.TaskService().Wait(ctx, &tasks.WaitRequest{ContainerID: id}); err != nil && classOf(err) != errdefs.NotFound {
		return failed(err, "wait for the end of container %s", id)
	}
	return nil
}

// kill kills all processes of a container: with its PID namespace or, if that is the node's, its cgroup.
func (r *Runtime) kill(ctx context.Context, id string) error {
	return r.signal(ctx, id, syscall.SIGKILL, true)
}

// signal sends a signal to the main process of a container. One that has ended is no error.
func (r *Runtime) signal(ctx context.Context, id string, s syscall.Signal, all bool) error {
	_, err := r.client.TaskService().Kill(ctx, &tasks.KillRequest{ContainerID: id, Signal: uint32(s), All: all})
	if err == nil || classOf(err) == errdefs.NotFound {
		return nil
	}
	// A shim that ends has no words for it: its connection closes.
	if _, gone := r.client.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id}); gone != nil && classOf(gone) == errdefs.NotFound {
		return nil
	}
	return failed(err, "send signal %d to container %s", s, id)
}

// settle records the end of a container that has ended, and removes its task with its shim. In this order, so that the exit code is never
// lost. A task without a program, which an interrupted start has left, is removed.
// Preconditions: the caller has the lock of the container.
func (r *Runtime) settle(ctx context.Context, id string) error {
	t, err := r.task(ctx, id)
	if err != nil || t != nil && running(t) {
		return err
	}
	if t == nil || t.GetStatus() == task.Status_STOPPED {
		if err := r.record(ctx, id, t); err != nil {
			return err
		}
	}
	return r.removeTask(ctx, id)
}

// record keeps the end of a run. t is nil if containerd has no task of it any more: then the program that served its log has seen the end,
// unless it ended with the node.
func (r *Runtime) record(ctx context.Context, id string, t *task.Process) error {
	c, _, err := r.get(ctx, id)
	if err != nil {
		return err
	}
	n, err := runOf(c)
	if err != nil || n.Ended != nil || n.Started.IsZero() {
		return err
	}
	if t == nil {
		e, ok, err := shimlog.Read(r.files(id))
		if err != nil || !ok {
			return err
		}
		n.Ended = &ended{Code: e.Code, At: e.At}
	} else {
		code := int(t.GetExitStatus())
		n.Ended = &ended{Code: code, At: t.GetExitedAt().AsTime(), OOM: r.oom(ctx, id, code)}
	}
	return r.keep(ctx, id, n)
}

// Remove implements container.Runtime. The record goes last, so that a removal that was interrupted is still listed.
func (r *Runtime) Remove(ctx context.Context, id string, keepLog bool) error {
	if err := container.CheckID(id); err != nil {
		return err
	}
	if _, _, err := r.get(ctx, id); err == nil {
		if err := r.kill(ctx, id); err != nil { // a Stop that waits has the lock
			return err
		}
	} else if !errdefs.IsNotFound(err) && errdefs.ClassOf(err) != errdefs.DataLoss {
		return err
	}
	unlock, err := r.locks.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	return r.remove(ctx, id, keepLog)
}

// remove is Remove for who has the lock of the container.
func (r *Runtime) remove(ctx context.Context, id string, keepLog bool) error {
	c, err := r.client.ContainerService().Get(ctx, id)
	found := err == nil
	if !found && classOf(err) != errdefs.NotFound {
		return failed(err, "remove container %s", id)
	}
	if found {
		if _, ours, _ := recordOf(c); !ours {
			return errdefs.Preconditionf("remove container %s: it was made by another program", id)
		}
		if err := errors.Join(r.doom(ctx, id, keepLog), r.removeTask(ctx, id)); err != nil {
			return err
		}
	}
	if err := errors.Join(r.removeCgroup(ctx, id), r.removeFiles(id, keepLog)); err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	if err := r.removeSnapshot(ctx, id); err != nil {
		return err
	}
	if found {
		if err := r.client.ContainerService().Delete(ctx, id); err != nil && classOf(err) != errdefs.NotFound {
			return failed(err, "remove container %s", id)
		}
	}
	return r.dropLease(ctx, "create-"+id)
}

// removeFiles removes the files of a container.
func (r *Runtime) removeFiles(id string, keepLog bool) error {
	if !keepLog {
		return os.RemoveAll(r.files(id))
	}
	var errs []error
	for _, f := range r.filesOf(container.Spec{ID: id, Files: container.Files{Hosts: " ", ResolvConf: " "}}) {
		if err := os.Remove(f.source); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// unkeep removes the record of the last run of a container that, after all, was never started.
func (r *Runtime) unkeep(ctx context.Context, id string) error {
	c := containers.Container{ID: id}
	if _, err := r.client.ContainerService().Update(ctx, c, "labels."+runLabel); err != nil {
		return failed(err, "record that container %s was not started", id)
	}
	return nil
}
