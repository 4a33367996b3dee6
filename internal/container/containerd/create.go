package containerd

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/moby/sys/signal"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	leaseLife   = 24 * time.Hour   // of a lease that a killed process has left
	cleanupTime = 30 * time.Second // for what is done after a call was given up
)

// Create implements container.Runtime. containerd collects a file system without a container as garbage, unless a lease has it; the lease
// is known by the ID, so that the next Create or Remove finds both.
func (r *Runtime) Create(ctx context.Context, s container.Spec) error {
	if err := s.Validate(); err != nil {
		return err
	}
	unlock, err := r.locks.Lock(ctx, s.ID)
	if err != nil {
		return err
	}
	defer unlock()
	c, err := r.client.ContainerService().Get(ctx, s.ID)
	switch {
	case err == nil:
		begun, keepLog := removing(c)
		if !begun {
			return errdefs.Existsf("create container %s: it exists", s.ID)
		}
		if err := r.remove(ctx, s.ID, keepLog); err != nil {
			return err
		}
	case classOf(err) != errdefs.NotFound:
		return failed(err, "create container %s", s.ID)
	}
	image, err := r.image(ctx, s.Image)
	if err != nil {
		return fmt.Errorf("create container %s: %w", s.ID, err)
	}
	if err := r.removeSnapshot(ctx, s.ID); err != nil { // of an attempt that was interrupted
		return err
	}
	ctx, done, err := r.lease(ctx, "create-"+s.ID)
	if err != nil {
		return err
	}
	err = r.create(ctx, s, image)
	if err != nil {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		err = errors.Join(err, r.removeSnapshot(cleanup, s.ID))
	}
	return errors.Join(err, done())
}

func (r *Runtime) create(ctx context.Context, s container.Spec, image client.Image) error {
	ic, err := config(ctx, image)
	if err != nil {
		return err
	}
	k := record{Spec: s, Digest: image.Target().Digest.String(), Stop: stopSignal(ic.StopSignal)}
	extension, err := k.extension()
	if err != nil {
		return err
	}
	spec, err := r.specOf(s, image, ic)
	if err != nil {
		return err
	}
	if _, err := r.client.NewContainer(ctx, s.ID,
		client.WithSnapshotter(snapshotter),
		client.WithRuntime(runtimeName, r.runcOptions()),
		client.WithNewSnapshot(s.ID, image),
		client.WithNewSpec(spec...),
		extension,
	); err != nil {
		return refused(err, "create container %s", s.ID)
	}
	return nil
}

// stopSignal returns the number of a signal of an image, which may be a name; SIGTERM if there is none of it.
func stopSignal(name string) int {
	if name == "" {
		return int(syscall.SIGTERM)
	}
	s, err := signal.ParseSignal(name)
	if err != nil || s < 1 || s > 64 {
		return int(syscall.SIGTERM)
	}
	return int(s)
}

// lease returns a context whose new objects of containerd stay until done is called. A lease of an interrupted attempt is taken over.
func (r *Runtime) lease(ctx context.Context, id string) (_ context.Context, done func() error, err error) {
	m := r.client.LeasesService()
	if _, err := m.Create(ctx, leases.WithID(id), leases.WithExpiration(leaseLife)); err != nil && classOf(err) != errdefs.AlreadyExists {
		return nil, nil, failed(err, "make lease %s", id)
	}
	return leases.WithLease(ctx, id), func() error {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		return r.dropLease(cleanup, id)
	}, nil
}

func (r *Runtime) dropLease(ctx context.Context, id string) error {
	if err := r.client.LeasesService().Delete(ctx, leases.Lease{ID: id}); err != nil && classOf(err) != errdefs.NotFound {
		return failed(err, "remove lease %s", id)
	}
	return nil
}

func (r *Runtime) removeSnapshot(ctx context.Context, id string) error {
	if err := r.client.SnapshotService(snapshotter).Remove(ctx, id); err != nil && classOf(err) != errdefs.NotFound {
		return failed(err, "remove the file system of container %s", id)
	}
	return nil
}
