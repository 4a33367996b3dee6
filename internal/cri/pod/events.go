package pod

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// GetContainerEvents sends what happens to sandboxes and containers from now on.
func (s *Service) GetContainerEvents(_ *cri.GetEventsRequest, to cri.RuntimeService_GetContainerEventsServer) error {
	all, err := s.sandboxes(to.Context())
	if err != nil {
		return err
	}
	known, after := changes{}, int64(0)
	for _, r := range all {
		known.of(r, false)
		after = max(after, r.Revision)
	}
	return s.engine.Watch(to.Context(), after, func(ev vm.Event) error {
		if !convert.IsSandbox(ev.Record) {
			return nil
		}
		news := known.of(ev.Record, ev.Type == vm.EventDeleted)
		if len(news) > 0 {
			for _, e := range ev.Record.Ephemeral {
				s.logs.settle(to.Context(), ev.Record, e)
			}
		}
		for _, c := range news {
			if err := to.Send(event(ev.Record, c)); err != nil {
				return err
			}
		}
		return nil
	})
}

// changes are the states of sandboxes and containers that were told last, by id.
type changes map[string]cri.ContainerEventType

// change is what happened to a sandbox or a container.
type change struct {
	id   string
	what cri.ContainerEventType
}

// of returns what has happened since the last call, and remembers it. A sandbox comes before its containers, and goes after them.
func (k changes) of(r vm.Record, deleted bool) (out []change) {
	sandbox := convert.SandboxID(r.ID)
	has := map[string]bool{}
	tell := func(id string, what cri.ContainerEventType) {
		has[id] = true
		old, known := k[id]
		if !known && what != cri.ContainerEventType_CONTAINER_CREATED_EVENT {
			out = append(out, change{id, cri.ContainerEventType_CONTAINER_CREATED_EVENT})
		}
		if !known || old != what {
			out = append(out, change{id, what})
		}
		k[id] = what
	}
	if !deleted {
		state := cri.ContainerEventType_CONTAINER_STARTED_EVENT
		if !convert.Ready(r) {
			state = cri.ContainerEventType_CONTAINER_STOPPED_EVENT
		}
		tell(sandbox, state)
		for _, e := range r.Ephemeral {
			tell(convert.ContainerID(r.ID, e.Spec.Name), eventOf(e.Record.Status.State))
		}
	}
	for id := range k {
		if machine, container, err := convert.ParseID(id); err == nil && machine == string(r.ID) && !has[id] && container != "" {
			out = append(out, change{id, cri.ContainerEventType_CONTAINER_DELETED_EVENT})
			delete(k, id)
		}
	}
	if _, known := k[sandbox]; known && deleted {
		out = append(out, change{sandbox, cri.ContainerEventType_CONTAINER_DELETED_EVENT})
		delete(k, sandbox)
	}
	return out
}

func eventOf(s vm.ContainerState) cri.ContainerEventType {
	switch s {
	case vm.ContainerRunning:
		return cri.ContainerEventType_CONTAINER_STARTED_EVENT
	case vm.ContainerTerminated:
		return cri.ContainerEventType_CONTAINER_STOPPED_EVENT
	default:
		return cri.ContainerEventType_CONTAINER_CREATED_EVENT
	}
}

func event(r vm.Record, c change) *cri.ContainerEventResponse {
	out := &cri.ContainerEventResponse{ContainerId: c.id, ContainerEventType: c.what, CreatedAt: time.Now().UnixNano(), PodSandboxStatus: convert.SandboxStatus(r)}
	for _, e := range r.Ephemeral {
		out.ContainersStatuses = append(out.ContainersStatuses, convert.ContainerStatus(r, e))
	}
	return out
}
