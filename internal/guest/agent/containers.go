package agent

import (
	"context"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ guest.ContainerKeeper = (*session)(nil)

// Containers implements guest.ContainerKeeper.
func (s *session) Containers(ctx context.Context, fn func([]vm.ContainerStatus) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream when fn fails
	stream, err := s.client.Containers(ctx, &guestv1.ContainersRequest{})
	if err != nil {
		return s.failure(ctx, "watch the guest's containers", err)
	}
	for {
		r, err := stream.Recv()
		if ended(err) {
			return nil
		}
		if err != nil {
			return s.failure(ctx, "watch the guest's containers", err)
		}
		all, err := containersOf(r)
		if err != nil {
			return err
		}
		if err := fn(all); err != nil {
			return err
		}
	}
}

// ContainerLogs implements guest.ContainerKeeper.
func (s *session) ContainerLogs(ctx context.Context, container string, run int, after uint64, fn func(guest.LogEntry) error) error {
	return s.logs(ctx, &guestv1.LogsRequest{Container: container, Run: int32(run), After: after}, fn)
}

// KillContainer implements guest.ContainerKeeper.
func (s *session) KillContainer(ctx context.Context, container string, run int, grace time.Duration) error {
	_, err := s.client.KillContainer(ctx, &guestv1.KillContainerRequest{Name: container, Run: int32(run), GraceMs: grace.Milliseconds()})
	return s.failure(ctx, "kill container "+container, err)
}

// ReleaseContainer implements guest.ContainerKeeper.
func (s *session) ReleaseContainer(ctx context.Context, container string) error {
	_, err := s.client.ReleaseContainer(ctx, &guestv1.ReleaseContainerRequest{Name: container})
	return s.failure(ctx, "release the containers after container "+container, err)
}
