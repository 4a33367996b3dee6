package containerd

import (
	"context"
	"errors"
	"sync"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/core/runtime"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// settling is how many ends are recorded at a time.
const settling = 16

// Wait implements container.Runtime.
func (r *Runtime) Wait(ctx context.Context, id string) (container.State, error) {
	for {
		c, err := r.Inspect(ctx, id)
		if err != nil {
			return container.State{}, err
		}
		if c.State.Phase == container.Running {
			if err := r.gone(ctx, id); err != nil {
				return container.State{}, err
			}
		}
		if err := r.settled(ctx, id); err != nil {
			return container.State{}, err
		}
		if c.State.Phase != container.Running {
			return c.State, nil
		}
	}
}

// settled is settle for who does not have the lock.
func (r *Runtime) settled(ctx context.Context, id string) error {
	unlock, err := r.locks.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	return r.settle(ctx, id)
}

// taskEvent is what events of containerd about tasks have in common.
type taskEvent interface{ GetContainerID() string }

// execEvent is the end of a process, which need not be the main one.
type execEvent interface {
	GetContainerID() string
	GetID() string
}

// Watch implements container.Runtime. It subscribes before it looks, so that no end falls between the two.
func (r *Runtime) Watch(ctx context.Context, fn func(id string, s container.State) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	events, failures := r.client.EventService().Subscribe(ctx,
		`topic=="`+runtime.TaskStartEventTopic+`"`, `topic=="`+runtime.TaskExitEventTopic+`"`, `topic=="`+runtime.TaskDeleteEventTopic+`"`)
	var mu sync.Mutex // of fn
	group := errgroup.Group{}
	group.SetLimit(settling)
	look := func(id string) {
		group.Go(func() error {
			if err := r.look(ctx, id, &mu, fn); err != nil {
				cancel(err)
			}
			return nil
		})
	}
	defer func() { _ = group.Wait() }()
	if err := r.first(ctx, look); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-failures:
			if cause := context.Cause(ctx); cause != nil {
				return cause
			}
			return failed(err, "watch containers")
		case e := <-events:
			if e == nil || e.Namespace != r.cfg.Namespace {
				continue
			}
			v, err := typeurl.UnmarshalAny(e.Event)
			if err != nil {
				r.cfg.Log.Warn("event of containerd cannot be read", "topic", e.Topic, "err", err)
				continue
			}
			if x, ok := v.(execEvent); ok && x.GetID() != "" && x.GetID() != x.GetContainerID() {
				continue
			}
			if t, ok := v.(taskEvent); ok {
				look(t.GetContainerID())
			}
		}
	}
}

// first looks at all containers, and ends what execs a killed process has left.
func (r *Runtime) first(ctx context.Context, look func(id string)) error {
	cs, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return failed(err, "list containers")
	}
	for _, c := range cs {
		if _, ours, _ := recordOf(c); !ours {
			continue
		}
		if err := r.endExecs(ctx, c.ID); err != nil {
			return err
		}
		look(c.ID)
	}
	return nil
}

// look records the end of a container, if it has ended, and tells how it is. A container that is gone is none to tell of.
func (r *Runtime) look(ctx context.Context, id string, mu *sync.Mutex, fn func(string, container.State) error) error {
	if _, _, err := r.get(ctx, id); err != nil {
		return unless(err, errdefs.NotFound)
	}
	if err := r.settled(ctx, id); err != nil {
		return unless(err, errdefs.NotFound)
	}
	mu.Lock()
	defer mu.Unlock()
	c, err := r.Inspect(ctx, id)
	if err != nil {
		return unless(err, errdefs.NotFound)
	}
	if ctx.Err() != nil {
		return nil
	}
	return fn(id, c.State)
}

// unless returns err, or nil if it has the class.
func unless(err error, c errdefs.Class) error {
	if errdefs.Is(err, c) {
		return nil
	}
	return err
}

// endExecs kills the execs of a container that no process waits for: they were started by one that was killed, or through a containerd that was.
func (r *Runtime) endExecs(ctx context.Context, id string) error {
	pids, err := r.client.TaskService().ListPids(ctx, &tasks.ListPidsRequest{ContainerID: id})
	if err != nil {
		if c := classOf(err); c == errdefs.Unavailable || ctx.Err() != nil {
			return failed(err, "list the processes of container %s", id)
		}
		return nil // it does not run
	}
	for _, p := range pids.GetProcesses() {
		if p.GetInfo() == nil {
			continue
		}
		v, err := typeurl.UnmarshalAny(p.GetInfo())
		if err != nil {
			continue
		}
		d, ok := v.(*options.ProcessDetails)
		if !ok || d.GetExecID() == "" || r.has(d.GetExecID()) {
			continue
		}
		if err := r.endExec(ctx, id, d.GetExecID()); err != nil && errdefs.IsUnavailable(err) {
			return err
		}
	}
	return nil
}

// endExec kills an exec and removes it. It waits at most for a killed process.
func (r *Runtime) endExec(ctx context.Context, id, exec string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s := r.client.TaskService()
	_, kill := s.Kill(ctx, &tasks.KillRequest{ContainerID: id, ExecID: exec, Signal: 9})
	_, wait := s.Wait(ctx, &tasks.WaitRequest{ContainerID: id, ExecID: exec})
	_, remove := s.DeleteProcess(ctx, &tasks.DeleteProcessRequest{ContainerID: id, ExecID: exec})
	for _, err := range []error{kill, wait, remove} {
		if err != nil && classOf(err) != errdefs.NotFound {
			return failed(errors.Join(kill, wait, remove), "end exec %s in container %s", exec, id)
		}
	}
	return nil
}
