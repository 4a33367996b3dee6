package engine

import (
	"context"
	"maps"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

func (m *machine) resizeContainers(ctx context.Context, want map[string]vm.Resources) (vm.Record, error) {
	r := m.record()
	switch {
	case r.BootContainer != "": // its limits are the size of the VM
		next, err := r.Resized(want)
		if err != nil {
			return r, err
		}
		return m.update(ctx, func(r *vm.Record) { r.Ephemeral = next.Ephemeral })
	case r.ImageType != vm.ImageOCI:
		return r, errdefs.Unsupportedf("its guest boots its own system, which has no containers")
	case len(r.Containers) == 0 && !r.Spec.Sandbox:
		return r, errdefs.Unsupportedf("it has a process instead of containers")
	}
	next, err := r.Resized(want)
	switch {
	case err != nil:
		return r, err
	case maps.Equal(r.Resources(), next.Resources()): // every session with the guest begins with them
		return r, nil
	case r.State != vm.StateRunning || m.run.Load() == nil:
		return r, errdefs.Preconditionf("it does not run (%s), so its containers cannot be resized", r.State)
	}
	if err := awake(r); err != nil {
		return r, err
	}
	now := next.Resources()
	maps.DeleteFunc(now, func(name string, _ vm.Resources) bool { _, asked := want[name]; return !asked && !r.RootContainer() })
	return resizeOperation.run(ctx, m, &resize{machine: m, next: now}, nil)
}

// resizePatience is how long a resize waits for a guest that is between two sessions. Nothing else can be done with the VM meanwhile.
const resizePatience = 10 * time.Second

// resize changes what the containers of a running VM may use. The guest comes first: it knows whether a memory limit is possible.
// The record has the values that the guest has accepted. If a resize is interrupted, the values on record are right, because every
// session with the guest begins with telling them.
type resize struct {
	*machine
	next map[string]vm.Resources // the new values, by name; nil if an earlier process of the engine began the operation
}

var resizeOperation = operation[*resize]{
	name: opResizeContainers, told: true, recall: recallResize,
	steps: []step[*resize]{{word: stepResize, run: (*resize).tell, undo: (*resize).undo, recover: (*resize).recover}},
}

func recallResize(m *machine, _ journal.Intent) (*resize, error) { return &resize{machine: m}, nil }

// tell gives the guest the new values.
func (s *resize) tell(ctx context.Context) (outcome, error) {
	run := s.run.Load()
	if run == nil {
		return outcome{}, errdefs.Preconditionf("its process has ended")
	}
	now, _ := s.changes()
	if err := run.link.ResizeContainers(ctx, now, resizePatience); err != nil {
		return outcome{}, s.orEnded(err)
	}
	return outcome{change: func(r *vm.Record) {
		if next, err := r.Resized(s.next); err == nil { // none of them can have been removed meanwhile
			*r = next
		}
	}}, nil
}

// changes returns the new values of the containers that change, and those on record.
func (s *resize) changes() (now, was map[string]vm.Resources) {
	before := s.record().Resources()
	now, was = maps.Clone(s.next), map[string]vm.Resources{}
	for name, r := range now {
		if old, sized := before[name]; sized && old == r {
			delete(now, name)
		} else {
			was[name] = old
		}
	}
	return now, was
}

// undo gives the guest the values on record. If that fails, its next session does it.
func (s *resize) undo(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	_, was := s.changes()
	if run := s.run.Load(); run != nil && !errdefs.Is(cause, errdefs.Unsupported) {
		if err := run.link.ResizeContainers(ctx, was, 0); err != nil {
			s.log.Warn("containers not resized back until the next session", "vm", s.id, "err", err)
		}
	}
	s.settleFailed(ctx, opResizeContainers, same)
	return cause
}

// recover leaves the values on record, which the next session tells the guest.
func (s *resize) recover(ctx context.Context) (next string, err error) {
	return "", s.adoptAndSettle(ctx)
}
