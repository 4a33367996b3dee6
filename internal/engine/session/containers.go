package session

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// skipLogs leaves out of the VM's logs what its resumed guest had written before.
func (l *Link) skipLogs(reply guest.ResumedReply) error {
	if err := l.logs.Main.Skip(0, reply.LogSeq); err != nil {
		return err
	}
	r := l.vm.Record()
	for i, c := range r.Containers {
		var place guest.LogPlace
		if i < len(reply.Containers) {
			place = reply.Containers[i]
		}
		if err := l.skipLog(c.Name, place); err != nil {
			return err
		}
	}
	for _, e := range r.Ephemeral {
		place := guest.LogPlace{}
		for _, p := range reply.Containers[min(len(r.Containers), len(reply.Containers)):] {
			if p.Name == e.Record.Name {
				place = p
			}
		}
		if err := l.skipLog(e.Record.Name, place); err != nil {
			return err
		}
	}
	return nil
}

func (l *Link) skipLog(container string, place guest.LogPlace) error {
	log, err := l.logs.Resume(container)
	if err != nil {
		return err
	}
	if err := log.Skip(place.Run, place.Seq); err != nil {
		return fmt.Errorf("log of container %s: %w", container, err)
	}
	return nil
}

// followContainers records the status of the VM's containers and keeps their logs until all is reported or the
// session ends.
func (l *Link) followContainers(ctx context.Context, agent guest.Agent) {
	keeper, ok := agent.(guest.ContainerKeeper)
	if !ok {
		l.cfg.Log.Error("agent of vm does not support containers", "vm", l.proc.ID)
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer l.followers.wait()
	follow := func(name string) {
		l.followers.begin(ctx, name, func(ctx context.Context) { l.keepContainerLog(ctx, keeper, agent, name) })
	}
	for _, c := range l.vm.Record().Containers {
		follow(c.Name)
	}
	wg.Go(func() {
		l.addContainers(ctx, agent)
		l.resizeAdded(ctx, agent)
	})
	l.pump(ctx, agent, "status of containers not received, trying again", func() error {
		return keeper.Containers(ctx, func(all []guest.ContainerState) error {
			for _, name := range l.added(all) {
				follow(name)
			}
			return l.noteContainers(ctx, all)
		})
	})
}

func (l *Link) keepContainerLog(ctx context.Context, keeper guest.ContainerKeeper, agent guest.Agent, name string) {
	log, err := l.logs.Resume(name)
	if err != nil {
		l.cfg.Log.Error("log of container not stored", "vm", l.proc.ID, "err", err)
		return
	}
	l.pump(ctx, agent, "log of container not stored, trying again", func() error {
		run, seq := log.Place()
		return keeper.ContainerLogs(ctx, name, run, seq, log.Append)
	})
	if ctx.Err() == nil {
		select {
		case <-agent.Done(): // the next session continues it
		default:
			log.Finish()
		}
	}
}

// noteContainers records the status of the VM's containers.
func (l *Link) noteContainers(ctx context.Context, all []guest.ContainerState) error {
	r := l.vm.Record()
	if len(all) < len(r.Containers) {
		return errdefs.New(errdefs.Internal, "the guest reports %d containers, but it was given %d", len(all), len(r.Containers))
	}
	next := slices.Clone(r.Containers)
	for i := range next {
		s := all[i].Status
		if s.Last == nil && s.Restarts > 0 { // from before this boot, which the guest does not know of
			s.Last = next[i].Status.Last
		}
		next[i].Status = s
	}
	added := noted(r.Ephemeral, all[len(next):])
	defer l.noted.tell()
	if reflect.DeepEqual(r.Containers, next) && reflect.DeepEqual(r.Ephemeral, added) {
		return nil
	}
	_, err := l.vm.Update(ctx, func(r *vm.Record) { r.Containers, r.Ephemeral = next, noted(r.Ephemeral, all[len(next):]) })
	return err
}
