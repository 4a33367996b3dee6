package agent

import (
	"context"
	"slices"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ guest.ContainerKeeper = (*session)(nil)
	_ guest.ContainerAdder  = (*session)(nil)

	_ guest.ContainerResizer = (*session)(nil)
	_ guest.ContainerStarter = (*session)(nil)
	_ guest.ContainerPauser  = (*session)(nil)
)

// Containers implements guest.ContainerKeeper.
func (s *session) Containers(ctx context.Context, fn func([]guest.ContainerState) error) error {
	return follow(ctx, s, "watch the guest's containers", s.client.Containers, &guestv1.ContainersRequest{}, func(r *guestv1.ContainersReply) error {
		all, err := containersOf(r)
		if err != nil {
			return err
		}
		return fn(all)
	})
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

// AddContainer implements guest.ContainerAdder.
func (s *session) AddContainer(ctx context.Context, c guest.Container) error {
	if len(c.Process.FileKeys) > 0 {
		if err := s.able(ctx, guestv1.AbilityFileKeys, "read environment variables from files"); err != nil {
			return err
		}
	}
	if filters(c.Process) {
		if err := s.able(ctx, guestv1.AbilitySystemCalls, "filter system calls by a profile; start the VM again"); err != nil {
			return err
		}
	}
	if c.Manual {
		if err := s.able(ctx, guestv1.AbilitySandbox, "prepare containers that are started later"); err != nil {
			return err
		}
	}
	_, err := s.client.AddContainer(ctx, &guestv1.AddContainerRequest{Container: encodeContainer(c)})
	return s.failure(ctx, "add container "+c.Name, err)
}

// StartContainer implements guest.ContainerStarter.
func (s *session) StartContainer(ctx context.Context, container string) error {
	_, err := s.client.StartContainer(ctx, &guestv1.StartContainerRequest{Name: container})
	return s.failure(ctx, "start container "+container, err)
}

// RemoveContainer implements guest.ContainerStarter.
func (s *session) RemoveContainer(ctx context.Context, container string, disks []string) error {
	_, err := s.client.RemoveContainer(ctx, &guestv1.RemoveContainerRequest{Name: container, Disks: disks})
	return s.failure(ctx, "remove container "+container, err)
}

// PauseContainers implements guest.ContainerPauser.
func (s *session) PauseContainers(ctx context.Context) error {
	_, err := s.client.PauseContainers(ctx, &guestv1.PauseContainersRequest{})
	return s.failure(ctx, "pause the containers", err)
}

// ResumeContainers implements guest.ContainerPauser.
func (s *session) ResumeContainers(ctx context.Context, held []string) error {
	_, err := s.client.ResumeContainers(ctx, &guestv1.ResumeContainersRequest{Held: held})
	return s.failure(ctx, "resume the containers", err)
}

// able returns an Unsupported error unless the agent has an ability, which an earlier one would ignore.
func (s *session) able(ctx context.Context, ability, what string) error {
	r, err := s.client.Info(ctx, &guestv1.InfoRequest{})
	if err != nil {
		return s.failure(ctx, "ask the guest agent", err)
	}
	if !slices.Contains(r.GetAbilities(), ability) {
		return errdefs.Unsupportedf("the agent in the guest cannot %s", what)
	}
	return nil
}

// ResizeContainers implements guest.ContainerResizer.
func (s *session) ResizeContainers(ctx context.Context, want map[string]vm.Resources) error {
	r := &guestv1.ResizeContainersRequest{}
	for name, w := range want {
		r.Containers = append(r.Containers, &guestv1.ContainerResources{Name: name, Resources: resources(&w)})
	}
	_, err := s.client.ResizeContainers(ctx, r)
	return s.failure(ctx, "resize containers", err)
}
