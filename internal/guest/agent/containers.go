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
		var all []vm.ContainerStatus
		for _, c := range r.GetContainers() {
			all = append(all, vm.ContainerStatus{
				State: vm.ContainerState(c.GetState()), Reason: c.GetReason(), Message: c.GetMessage(),
				StartedAt: moment(c.GetStartedUnixNano()), Exit: exit(c.GetExit()), Last: exit(c.GetLast()), Restarts: int(c.GetRestarts()),
			})
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
	return s.failure(ctx, "release those after container "+container, err)
}

func exit(x *guestv1.ContainerExit) *vm.ContainerExit {
	if x == nil {
		return nil
	}
	return &vm.ContainerExit{
		Code: int(x.GetCode()), Reason: x.GetReason(), Message: x.GetMessage(),
		StartedAt: moment(x.GetStartedUnixNano()), FinishedAt: moment(x.GetFinishedUnixNano()),
	}
}

// moment is a time of the guest's clock; the zero time for 0.
func moment(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}
