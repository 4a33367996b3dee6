package engine

import (
	"context"
	"encoding/json"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

func (m *machine) removeContainer(ctx context.Context, name string) (vm.Record, error) {
	r := m.record()
	if find(r.Ephemeral, name) < 0 {
		if slices.ContainsFunc(r.Containers, func(c vm.ContainerRecord) bool { return c.Name == name }) {
			return r, errdefs.Invalidf("container %s was not added to it; only containers that were added can be removed", name)
		}
		return r, nil
	}
	if r.State != vm.StateRunning && r.State != vm.StateStopped && r.State != vm.StateError {
		return r, errdefs.Preconditionf("it is %s, so no container of it can be removed; start it first", r.State)
	}
	if err := awake(r); err != nil {
		return r, err
	}
	if r.Boots(name) && r.State == vm.StateRunning {
		s := &stop{machine: m}
		if r, err := stopOperation.run(ctx, m, s, s.args()); err != nil {
			return r, err
		}
	}
	return departureOperation.run(ctx, m, &departure{m, name}, additionArgs{name}.json())
}

// departure removes a container that was added to a VM. The guest comes first: it may still use the disks. When they are gone, the
// record has neither them nor the container, and the log follows.
type departure struct {
	*machine
	container string
}

var departureOperation = operation[*departure]{
	name: opRemoveContainer, told: true, recall: recallDeparture,
	steps: []step[*departure]{
		{word: stepLeave, run: (*departure).leave, undo: (*departure).undo, recover: (*departure).recover, lasting: true},
		{word: stepUnplug, run: (*departure).unplug, undo: (*departure).undo, recover: (*departure).recover, lasting: true},
		{word: stepClean, run: (*departure).clean, undo: (*departure).undo, recover: (*departure).recover, lasting: true},
	},
}

func recallDeparture(m *machine, in journal.Intent) (*departure, error) {
	var args additionArgs
	if err := json.Unmarshal(in.Args, &args); err != nil || args.Name == "" {
		return nil, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return &departure{m, args.Name}, nil
}

// own returns the serials of the plugged disks that only the container uses.
func (x *departure) own() (serials []string) {
	r := x.record()
	at := find(r.Ephemeral, x.container)
	if at < 0 {
		return nil
	}
	for _, d := range r.Disks {
		uses := func(e vm.Ephemeral) bool { return e.Uses(d.Serial) }
		others := slices.Delete(slices.Clone(r.Ephemeral), at, at+1)
		if d.Port != 0 && uses(r.Ephemeral[at]) && !slices.ContainsFunc(others, uses) {
			serials = append(serials, d.Serial)
		}
	}
	return serials
}

// inside reports whether the guest that runs may have the container.
func (x *departure) inside() bool { return x.runs() && x.record().BootContainer == "" }

// leave has the guest end the container, and forget its files and disks.
func (x *departure) leave(ctx context.Context) (outcome, error) {
	if !x.inside() {
		return outcome{}, nil
	}
	if err := x.run.Load().link.RemoveContainer(ctx, x.container, x.own()); err != nil {
		return outcome{}, x.unlessOver(err)
	}
	return outcome{change: func(r *vm.Record) { // whatever follows, it has ended
		r.Ephemeral = slices.Clone(r.Ephemeral)
		if at := find(r.Ephemeral, x.container); at >= 0 {
			r.Ephemeral[at].Record.Status = killed(r.Ephemeral[at].Record.Status)
		}
	}}, nil
}

// killed returns s for a container that was killed to be removed.
func killed(s vm.ContainerStatus) vm.ContainerStatus {
	if s.State == vm.ContainerTerminated {
		return s
	}
	s.State, s.Reason, s.Message = vm.ContainerTerminated, vm.ContainerError, ""
	s.Exit = &vm.ContainerExit{Code: vm.LostExitCode, Reason: vm.ContainerError, Message: "it was removed", StartedAt: s.StartedAt, FinishedAt: now()}
	return s
}

// unplug unplugs the disks of the container. The record then has neither them nor the container.
func (x *departure) unplug(ctx context.Context) (outcome, error) {
	own := x.own()
	if all := x.record().Ephemeral; x.inside() && find(all, x.container) >= 0 {
		if err := x.unshareOwn(ctx, all[find(all, x.container)].Spec); err != nil && x.unlessOver(err) != nil {
			return outcome{}, err
		}
	}
	if x.runs() && len(own) > 0 {
		plugger, err := x.plugger()
		if err != nil {
			return outcome{}, x.unlessOver(err)
		}
		ctx, cancel := context.WithTimeout(ctx, x.cfg.AgentTimeout)
		defer cancel()
		for _, serial := range own {
			if err := plugger.UnplugDisk(ctx, serial); err != nil && x.unlessOver(err) != nil {
				return outcome{}, endedProcess(err)
			}
		}
	}
	return outcome{change: func(r *vm.Record) {
		if at := find(r.Ephemeral, x.container); at >= 0 {
			r.Ephemeral = slices.Delete(slices.Clone(r.Ephemeral), at, at+1)
		}
		r.Disks = slices.DeleteFunc(slices.Clone(r.Disks), func(d vm.Disk) bool { return slices.Contains(own, d.Serial) })
	}}, nil
}

// unlessOver returns err unless the process of the VM has ended: then the guest has neither the container nor the disks.
func (x *departure) unlessOver(err error) error {
	if x.ending() {
		return nil
	}
	return err
}

// clean deletes the log of the container.
func (x *departure) clean(context.Context) (outcome, error) {
	if run := x.run.Load(); run != nil {
		run.link.ForgetContainer(x.container)
	}
	return outcome{}, x.logs.Remove(x.container)
}

// undo leaves the container as it is by now. It may have ended in the guest.
func (x *departure) undo(ctx context.Context, cause error) error {
	x.settleFailed(context.WithoutCancel(ctx), opRemoveContainer, same)
	return cause
}

// recover goes on where the earlier process of the engine ended.
func (x *departure) recover(ctx context.Context) (next string, err error) {
	if err := x.adopt(ctx); err != nil {
		return "", err
	}
	if find(x.record().Ephemeral, x.container) < 0 {
		return stepClean, nil
	}
	return stepLeave, nil
}
