package pod

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/cri/crilog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// followers copy the output of containers from the engine's logs into the files that the kubelet reads.
type followers struct {
	life   context.Context //nolint:containedctx // followers end with the daemon, not with a call
	engine Engine
	log    *slog.Logger

	mu  sync.Mutex
	all map[string]*follower // by the id of the container
}

func newFollowers(life context.Context, engine Engine, log *slog.Logger) *followers {
	return &followers{life: life, engine: engine, log: log, all: map[string]*follower{}}
}

// follower copies the output of one container until that has ended and all of it is written.
type follower struct {
	file   *crilog.File // nil: the log could not be opened
	since  time.Time
	cancel context.CancelFunc
	done   chan struct{}
}

// follow copies the output of a container from where its file ends. It does nothing if that goes on already or is over.
func (f *followers) follow(r vm.Record, e vm.Ephemeral) {
	path, id := convert.LogPath(r, e.Spec), convert.ContainerID(r.ID, e.Spec.Name)
	if path == "" {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all[id] != nil {
		return
	}
	ctx, cancel := context.WithCancel(f.life)
	one := &follower{since: time.Now(), cancel: cancel, done: make(chan struct{})}
	f.all[id] = one
	var err error
	if one.file, err = crilog.Open(path); err != nil {
		f.log.Error("log of container not written", "vm", r.ID, "container", e.Spec.Name, "err", err)
		close(one.done)
		return
	}
	go func() {
		defer close(one.done)
		copies := one.copy
		if r.Boots(e.Spec.Name) {
			copies = one.copyConsole
		}
		if err := copies(ctx, f.engine, string(r.ID), e.Spec.Name); err != nil && ctx.Err() == nil {
			f.log.Warn("log of container is not complete", "vm", r.ID, "container", e.Spec.Name, "err", err)
		}
	}()
}

// copy follows the log of the engine, from behind the last line of the file, until the container has ended and all is written. It tries
// again while the engine cannot read it, or has no run of the container yet.
func (f *follower) copy(ctx context.Context, engine Engine, ref, container string) error {
	last, err := f.file.Last()
	if err != nil {
		return err
	}
	again := backoff.NewExponentialBackOff()
	again.InitialInterval, again.MaxInterval = 20*time.Millisecond, time.Second
	_, err = backoff.Retry(ctx, func() (struct{}, error) {
		ended, err := over(ctx, engine, ref, container)
		if err != nil {
			return struct{}{}, err
		}
		begin := last // the times of two streams are not in order, so only what was there before is left out
		from := guest.LogOptions{Container: container, Follow: true, Tail: -1, Since: begin}
		err = engine.Logs(ctx, ref, from, func(e guest.LogEntry) error {
			if !e.Time.After(begin) {
				return nil
			}
			if err := f.file.Write(e.Time, e.Stream, e.Data); err != nil {
				return err
			}
			if e.Time.After(last) {
				last = e.Time
				again.Reset()
			}
			return nil
		})
		switch {
		case err == nil && !ended:
			err = errdefs.Unavailablef("its run has not begun")
		case err != nil && !errdefs.IsUnavailable(err):
			err = backoff.Permanent(err)
		}
		return struct{}{}, err
	}, backoff.WithBackOff(again), backoff.WithMaxElapsedTime(0))
	return gone(err)
}

// copyConsole copies the serial console of a guest that is one container, whose lines have no time, until it has ended and all is written.
func (f *follower) copyConsole(ctx context.Context, engine Engine, ref, container string) error {
	at := f.file.Mark()
	again := backoff.NewExponentialBackOff()
	again.InitialInterval, again.MaxInterval = 20*time.Millisecond, time.Second
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		ended, err := over(ctx, engine, ref, container)
		if err != nil {
			return struct{}{}, err
		}
		err = engine.Logs(ctx, ref, guest.LogOptions{Container: container, Follow: true, Tail: -1, From: at}, func(e guest.LogEntry) error {
			if err := f.file.Write(time.Now(), e.Stream, e.Data); err != nil {
				return err
			}
			at = e.End
			again.Reset()
			return f.file.SetMark(at)
		})
		switch {
		case err == nil && !ended:
			err = errdefs.Unavailablef("it runs on")
		case err != nil && !errdefs.IsUnavailable(err):
			err = backoff.Permanent(err)
		}
		return struct{}{}, err
	}, backoff.WithBackOff(again), backoff.WithMaxElapsedTime(0))
	return gone(err)
}

// over reports whether a container has ended. Errors: permanent ones.
func over(ctx context.Context, engine Engine, ref, container string) (bool, error) {
	r, err := engine.Inspect(ctx, ref)
	if err != nil {
		return false, backoff.Permanent(err)
	}
	c := r.Container(container)
	if c == nil {
		return false, backoff.Permanent(errdefs.NotFoundf("vm %s has no container %s", ref, container))
	}
	return c.Status.State == vm.ContainerTerminated || r.State != vm.StateRunning && !r.Boots(container), nil // that one may be about to start
}

// restTime limits how long a container that has ended may take to deliver the rest of its output.
const restTime = 5 * time.Second

// settle waits until the output of a container that has ended is written, but not longer than restTime since then. So whoever is told of the end
// finds the whole log, as with other runtimes. It returns at once for one that has not ended.
func (f *followers) settle(ctx context.Context, r vm.Record, e vm.Ephemeral) {
	f.mu.Lock()
	one := f.all[convert.ContainerID(r.ID, e.Spec.Name)]
	f.mu.Unlock()
	st := e.Record.Status
	if one == nil || st.State != vm.ContainerTerminated {
		return
	}
	since := one.since
	if st.Exit != nil && st.Exit.FinishedAt.After(since) {
		since = st.Exit.FinishedAt
	}
	t := time.NewTimer(min(restTime, time.Until(since.Add(restTime)))) // the guest's clock may be ahead
	defer t.Stop()
	select {
	case <-one.done:
	case <-t.C:
	case <-ctx.Done():
	}
}

// finish ends the copying of a container that is about to be removed, after the rest of its output is written.
func (f *followers) finish(ctx context.Context, r vm.Record, e vm.Ephemeral) {
	f.settle(ctx, r, e)
	f.drop(convert.ContainerID(r.ID, e.Spec.Name))
}

// drop ends the copying of a container and forgets it.
func (f *followers) drop(id string) {
	f.mu.Lock()
	one := f.all[id]
	delete(f.all, id)
	f.mu.Unlock()
	if one == nil {
		return
	}
	one.cancel()
	<-one.done
	if one.file != nil {
		if err := one.file.Close(); err != nil {
			f.log.Warn("log of container not closed", "container", id, "err", err)
		}
	}
}

// reopen goes on in a new file.
func (f *followers) reopen(r vm.Record, e vm.Ephemeral) error {
	f.mu.Lock()
	one := f.all[convert.ContainerID(r.ID, e.Spec.Name)]
	f.mu.Unlock()
	if one == nil || one.file == nil {
		return errdefs.Preconditionf("the log of container %s is not written", convert.ContainerID(r.ID, e.Spec.Name))
	}
	return one.file.Reopen()
}

// watch follows the containers of a VM that have been started, and forgets those that are gone.
func (f *followers) watch(ev vm.Event) {
	has := map[string]bool{}
	if ev.Type != vm.EventDeleted && convert.IsSandbox(ev.Record) {
		for _, e := range ev.Record.Ephemeral {
			has[convert.ContainerID(ev.Record.ID, e.Spec.Name)] = true
			if st := e.Record.Status.State; st == vm.ContainerRunning || st == vm.ContainerTerminated {
				f.follow(ev.Record, e)
			}
		}
	}
	f.mu.Lock()
	var over []string
	for id := range f.all {
		if machine, _, err := convert.ParseID(id); err == nil && machine == string(ev.Record.ID) && !has[id] {
			over = append(over, id)
		}
	}
	f.mu.Unlock()
	for _, id := range over {
		f.drop(id)
	}
}
