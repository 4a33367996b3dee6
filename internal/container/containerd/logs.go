package containerd

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/container/logfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Logs implements container.Access. It reads files, so it goes on while containerd does not answer.
func (r *Runtime) Logs(ctx context.Context, id string, o container.LogOptions, fn func(container.LogEntry) error) error {
	if err := container.CheckID(id); err != nil {
		return err
	}
	if !logfile.Exists(r.logs(id)) {
		if _, _, err := r.get(ctx, id); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over := make(chan struct{})
	if o.Follow {
		go func() { // ends with ctx
			if r.over(ctx, id) == nil {
				close(over)
			}
		}()
	}
	return logfile.Read(ctx, r.logs(id), o, over, fn)
}

// over returns nil when a container does not run or is gone. Its log is whole then, because its task is gone, which ends after its logger.
func (r *Runtime) over(ctx context.Context, id string) error {
	b := backoff.NewExponentialBackOff()
	b.MaxInterval = time.Second
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		_, err := r.Wait(ctx, id)
		if errdefs.IsNotFound(err) {
			err = nil
		}
		return struct{}{}, err
	}, backoff.WithBackOff(b), backoff.WithMaxElapsedTime(0))
	return err
}
