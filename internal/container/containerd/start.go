package containerd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/cenkalti/backoff/v5"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/container/containerd/shimlog"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// making is how long a task may take to be made.
const making = 2 * time.Minute

// shimDies is how long containerd may take to find out that a shim has died.
const shimDies = 10 * time.Second

// file is a file of a container that is kept outside of its file system.
type file struct{ source, path, content string }

// filesOf returns the files that the node writes for a container.
func (r *Runtime) filesOf(s container.Spec) []file {
	var all []file
	for name, content := range map[string]string{"hosts": s.Files.Hosts, "resolv.conf": s.Files.ResolvConf} {
		if content != "" {
			all = append(all, file{source: filepath.Join(r.files(s.ID), name), path: "/etc/" + name, content: content})
		}
	}
	return all
}

// Start implements container.Runtime. The order of its steps is: the task is created, which is the container's first process before its
// program; the start is recorded; the program is started. What an interrupted start leaves is a task without a program, which the next one
// removes.
func (r *Runtime) Start(ctx context.Context, id string) error {
	unlock, err := r.locks.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	c, k, err := r.get(ctx, id)
	if err != nil {
		return err
	}
	if begun, _ := removing(c); begun {
		return errdefs.Preconditionf("start container %s: it is being removed; remove it again", id)
	}
	t, err := r.task(ctx, id)
	switch {
	case err != nil:
		return err
	case t != nil && running(t):
		return nil
	}
	if err := r.settle(ctx, id); err != nil {
		return err
	}
	if err := r.prepare(k.Spec); err != nil {
		return fmt.Errorf("start container %s: %w", id, err)
	}
	return r.launch(ctx, id)
}

// prepare looks whether what the container needs of the node is there, and writes its files.
func (r *Runtime) prepare(s container.Spec) error {
	need := append([]string{}, s.Host.BindPaths...)
	for _, m := range s.Mounts {
		need = append(need, m.Source)
	}
	if s.Network.NetNS != "" {
		need = append(need, s.Network.NetNS)
	}
	for _, p := range need {
		if _, err := os.Stat(p); err != nil {
			return errdefs.As(errdefs.FailedPrecondition, err)
		}
	}
	if err := os.MkdirAll(r.files(s.ID), 0o700); err != nil {
		return err
	}
	for _, f := range r.filesOf(s) {
		if err := atomicfile.Write(f.source, 0o644, func(w io.Writer) error { _, err := io.WriteString(w, f.content); return err }); err != nil {
			return err
		}
	}
	return nil
}

// launch makes a task and starts it.
// Preconditions: the container has no task.
func (r *Runtime) launch(ctx context.Context, id string) error {
	c, err := r.client.LoadContainer(ctx, id)
	if err != nil {
		return failed(err, "start container %s", id)
	}
	old, err := c.Info(ctx, client.WithoutRefreshedMetadata)
	if err != nil {
		return failed(err, "start container %s", id)
	}
	before, err := runOf(old)
	if err != nil {
		return err
	}
	if err := shimlog.Begin(r.files(id)); err != nil {
		return fmt.Errorf("start container %s: %w", id, err)
	}
	limited, cancel := context.WithTimeout(ctx, making)
	defer cancel()
	t, err := c.NewTask(limited, cio.LogURI(r.logger(id)))
	if err != nil {
		return errors.Join(refused(err, "start container %s", id), r.giveUp(ctx, id))
	}
	if err := r.keep(ctx, id, run{Started: time.Now()}); err != nil {
		return errors.Join(err, r.giveUp(ctx, id))
	}
	if err := t.Start(ctx); err != nil {
		return errors.Join(refused(err, "start container %s", id), r.giveUp(ctx, id), r.forget(ctx, id, before))
	}
	return nil
}

// logger is the program that serves the log of a container; its shim starts it, and fails if it is not ready.
func (r *Runtime) logger(id string) *url.URL {
	return &url.URL{Scheme: "binary-v2", Path: r.cfg.Logger, RawQuery: url.Values{shimlog.Command: {r.files(id)}}.Encode()}
}

// giveUp removes the task of a start that failed. If it cannot, the next start does.
func (r *Runtime) giveUp(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if err := r.removeTask(ctx, id); err != nil && !errdefs.IsUnavailable(err) {
		return err
	}
	return nil
}

// forget puts the record of the last run back, because the new one did not come to be.
func (r *Runtime) forget(ctx context.Context, id string, before run) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if before.Started.IsZero() {
		return r.unkeep(ctx, id)
	}
	return r.keep(ctx, id, before)
}

// removeTask ends the main process and all others of a container, and removes its task with its shim. No task is no error.
//
// It asks containerd to remove the task even if that says there is none: a removal that was interrupted leaves a shim without a task.
// It is not interrupted itself by the end of ctx, unless it takes very long.
func (r *Runtime) removeTask(ctx context.Context, id string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	t, err := r.task(ctx, id)
	if err != nil {
		return err
	}
	if t != nil && t.GetStatus() != task.Status_STOPPED {
		if err := r.kill(ctx, id); err != nil {
			return err
		}
		if err := r.gone(ctx, id); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	// It returns when the logger has written what was left, because the shim waits for it. If the shim has just died, containerd gives no
	// class of error, and finds out a moment later.
	_, err = backoff.Retry(ctx, func() (struct{}, error) {
		_, err := r.client.TaskService().Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: id})
		switch {
		case err == nil || classOf(err) == errdefs.NotFound:
			return struct{}{}, nil
		case classOf(err) == errdefs.Internal:
			return struct{}{}, err
		}
		return struct{}{}, backoff.Permanent(err)
	}, backoff.WithMaxElapsedTime(shimDies))
	if err != nil {
		return failed(err, "remove the task of container %s", id)
	}
	return r.endOrphans(ctx, id)
}
