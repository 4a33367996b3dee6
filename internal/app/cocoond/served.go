package cocoond

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// served is the engine as the doors get it: operations are timed, and a reset includes the network.
type served struct {
	*engine.Engine
	image.Puller
	metrics *metrics
	network *keptNetwork
}

func (s *served) Create(ctx context.Context, spec vm.Spec) (r vm.Record, err error) {
	defer s.metrics.operation("create", time.Now(), &err)
	return s.Engine.Create(ctx, spec)
}

func (s *served) Launch(ctx context.Context, spec vm.Spec) (r vm.Record, err error) {
	defer s.metrics.operation("launch", time.Now(), &err)
	return s.Engine.Launch(ctx, spec)
}

func (s *served) Start(ctx context.Context, ref string) (r vm.Record, err error) {
	defer s.metrics.operation("start", time.Now(), &err)
	return s.Engine.Start(ctx, ref)
}

func (s *served) Stop(ctx context.Context, ref string, grace time.Duration) (r vm.Record, err error) {
	defer s.metrics.operation("stop", time.Now(), &err)
	return s.Engine.Stop(ctx, ref, grace)
}

func (s *served) Restart(ctx context.Context, ref string, grace time.Duration) (r vm.Record, err error) {
	defer s.metrics.operation("restart", time.Now(), &err)
	return s.Engine.Restart(ctx, ref, grace)
}

func (s *served) Remove(ctx context.Context, ref string, force bool) (err error) {
	defer s.metrics.operation("remove", time.Now(), &err)
	return s.Engine.Remove(ctx, ref, force)
}

// Reset removes every VM and then what the network made. The network comes up again with the next VM.
func (s *served) Reset(ctx context.Context) error {
	err := s.Engine.Reset(ctx)
	if err == nil && s.network != nil {
		err = s.network.Teardown(ctx)
	}
	return err
}
