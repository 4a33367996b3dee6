package session

import (
	"context"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// AddContainer tells the guest of a container that was added to the VM's record. If the guest cannot be reached now, that is
// no error: the next session begins with it.
func (l *Link) AddContainer(ctx context.Context, name string) error {
	agent, ready, _ := l.Peek()
	if agent == nil || !ready {
		return nil
	}
	err := l.addContainer(ctx, agent, name)
	select {
	case <-agent.Done():
		return nil
	default:
		return err
	}
}

// addContainers tells a guest, at the begin of a session, of the containers that it may not know yet. A container that it
// refuses has ended.
func (l *Link) addContainers(ctx context.Context, agent guest.Agent) {
	for _, e := range l.vm.Record().Ephemeral {
		if !fresh(e.Record.Status) {
			continue
		}
		err := l.addPatiently(ctx, agent, e.Record.Name)
		select {
		case <-agent.Done():
			return
		default:
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		l.cfg.Log.Warn("guest refuses a container", "vm", l.proc.ID, "err", err)
		if err := l.refusedContainer(ctx, e.Record.Name, err); err != nil {
			l.cfg.Log.Warn("end of container not recorded", "vm", l.proc.ID, "err", err)
		}
	}
}

// addAttempts is how often a guest is told of a container whose disks it does not have: they may just be plugged.
const addAttempts = 6

// addPatiently is addContainer, again and again while the guest lacks the disks of the container.
func (l *Link) addPatiently(ctx context.Context, agent guest.Agent, name string) (err error) {
	wait := l.pauses(l.cfg.ReconnectMax)
	for range addAttempts {
		if err = l.addContainer(ctx, agent, name); !errdefs.IsUnavailable(err) {
			return err
		}
		process.Pause(wait.NextBackOff(), ctx.Done(), agent.Done())
		if s := l.statusOf(name); s == nil || !fresh(*s) { // it was taken back, or somebody else told the guest
			err = nil
			break
		}
		if ctx.Err() != nil {
			break
		}
		select {
		case <-agent.Done():
			return err
		default:
		}
	}
	return err
}

// fresh reports whether a container with the status s may be one that its guest does not know yet.
func fresh(s vm.ContainerStatus) bool {
	return (s.State == vm.ContainerWaiting || s.State == vm.ContainerCreated) && s.StartedAt.IsZero()
}

func (l *Link) addContainer(ctx context.Context, agent guest.Agent, name string) error {
	r := l.vm.Record()
	at := slices.IndexFunc(r.Ephemeral, func(e vm.Ephemeral) bool { return e.Record.Name == name })
	if at < 0 {
		return nil // it was taken back
	}
	e := r.Ephemeral[at]
	adder, ok := agent.(guest.ContainerAdder)
	if !ok {
		return errTooOld(nil)
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.AgentTimeout)
	defer cancel()
	err := adder.AddContainer(ctx, guest.Container{
		Name: name, Kind: e.Spec.Kind, Process: e.Record.Process.Addressed(r.NICs), Layers: e.Record.Layers, Run: 1, Mounts: e.Spec.GuestMounts(),
		Manual: e.Spec.Manual, MessagePath: e.Spec.MessagePath, MessageFromLog: e.Spec.MessageFromLog, Resources: e.Spec.Resources,
		Volumes: ownVolumes(e), PIDs: e.Spec.PIDs,
	})
	if errdefs.Is(err, errdefs.Unsupported) {
		return errTooOld(err)
	}
	return err
}

// ownVolumes returns the volumes of e alone that are disks.
func ownVolumes(e vm.Ephemeral) (out []guest.OwnVolume) {
	for _, known := range e.Volumes {
		for _, v := range e.Spec.Volumes {
			switch own := (guest.OwnVolume{Name: vm.OwnVolume(e.Spec.Name, v.Name)}); {
			case v.Name != known.Volume:
			case v.HostDisk != nil && len(known.Layers) == 1:
				own.Device, own.ReadOnly = known.Layers[0], v.HostDisk.ReadOnly
				out = append(out, own)
			case v.Kind == vm.VolumeImage:
				own.Layers = known.Layers
				out = append(out, own)
			}
		}
	}
	return out
}

func errTooOld(err error) error {
	const text = "the agent in its guest is older and cannot start a container that is added; restart the VM to update the agent"
	if err == nil {
		return errdefs.Unsupportedf(text)
	}
	return errdefs.Unsupportedf(text+": %w", err)
}

// refusedContainer records that a container has ended because the guest refused it.
func (l *Link) refusedContainer(ctx context.Context, name string, cause error) error {
	_, err := l.vm.Update(ctx, func(r *vm.Record) {
		r.Ephemeral = slices.Clone(r.Ephemeral)
		for i := range r.Ephemeral {
			if c := &r.Ephemeral[i].Record; c.Name == name {
				c.Status = NeverStarted(cause)
			}
		}
	})
	return err
}

// NeverStarted is the status of a container that could not be started.
func NeverStarted(cause error) vm.ContainerStatus {
	x := &vm.ContainerExit{Code: startErrorCode, Reason: vm.ContainerStartError, Message: cause.Error()}
	x.FinishedAt = time.Now().UTC().Round(0)
	return vm.ContainerStatus{State: vm.ContainerTerminated, Reason: x.Reason, Message: x.Message, Exit: x}
}

// startErrorCode is the exit code of a container that could not be started, as in container runtimes.
const startErrorCode = 128

// added returns the names of the added containers that the guest reports.
func (l *Link) added(all []guest.ContainerState) (names []string) {
	r := l.vm.Record()
	for _, e := range r.Ephemeral {
		if reported(all[min(len(r.Containers), len(all)):], e.Record.Name) != nil {
			names = append(names, e.Record.Name)
		}
	}
	return names
}

// noted returns the added containers with the status that the guest reports. Those that it does not know yet stay as they are.
func noted(have []vm.Ephemeral, all []guest.ContainerState) []vm.Ephemeral {
	next := slices.Clone(have)
	for i := range next {
		if s := reported(all, next[i].Record.Name); s != nil {
			next[i].Record.Status = *s
		}
	}
	return next
}

func reported(all []guest.ContainerState, name string) *vm.ContainerStatus {
	for i := range all {
		if all[i].Name == name {
			return &all[i].Status
		}
	}
	return nil
}
