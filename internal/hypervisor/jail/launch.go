package jail

import (
	"context"
	"errors"
	"fmt"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/undo"
)

// Launch is what the launches of all drivers have in common. The zero value is not usable: Jail and Plan are set.
type Launch struct {
	Jail *Jail
	Plan hypervisor.Plan
	Undo undo.Stack // what a launch that fails takes back

	Dir    Dir
	UID    uint32
	Cgroup Cgroup
	Proc   *proc.Process
}

// Run runs steps, then release in any case, and takes all back if a step fails.
func (l *Launch) Run(ctx context.Context, steps func(context.Context) error, release func()) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("launch VM %s: %w", l.Plan.Name, err)
	}
	if os.Geteuid() != 0 {
		return errdefs.Preconditionf("launch VM %s: it needs root to give each VM a user, namespaces and a cgroup of its own", l.Plan.Name)
	}
	err := steps(ctx)
	release()
	if err != nil {
		return fmt.Errorf("launch VM %s: %w", l.Plan.Name, errors.Join(err, l.Undo.Run(ctx)))
	}
	l.Undo.Release()
	return nil
}

// Steps runs steps until one fails or ctx ends.
func Steps(ctx context.Context, steps ...func(context.Context) error) error {
	for _, step := range steps {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// TakeUser takes a user for the process.
func (l *Launch) TakeUser(context.Context) (err error) {
	if l.UID, err = l.Jail.Users.Take(l.Plan.ID); err == nil {
		l.Undo.Push(func(context.Context) error { l.Jail.Users.Drop(l.UID); return nil })
	}
	return err
}

// MakeCgroup makes the cgroups of the process.
func (l *Launch) MakeCgroup(b Bounds) (err error) {
	p := l.Plan
	l.Undo.Push(func(context.Context) error { return l.Jail.Cgroups.Remove(p.ID, p.Dir, l.Cgroup.Place) })
	l.Cgroup, err = l.Jail.Cgroups.Make(p.ID, p.Dir, p.CgroupParent, b)
	return err
}

// Start starts the process in its cgroups and namespaces, as its user with the further groups.
func (l *Launch) Start(s proc.Spec, groups ...uint32) (err error) {
	s.User = &proc.User{UID: l.UID, GID: l.UID, Groups: groups}
	s.CgroupDir, s.CgroupTasks, s.Isolated = l.Cgroup.Dir, l.Cgroup.Tasks, true
	if l.Proc, err = proc.Start(s); err != nil {
		return err
	}
	p := l.Proc
	l.Undo.Push(func(ctx context.Context) error {
		err := p.Kill(ctx)
		return errors.Join(err, p.Close())
	})
	return nil
}

// Handle returns the handle of the process that was started.
func (l *Launch) Handle(driver string, version int) Handle {
	return Handle{
		Driver: driver, Version: version, ID: l.Plan.ID, PID: l.Proc.PID(), Start: l.Proc.StartTime(), UUID: UUID(l.Plan.ID),
		Dir: l.Plan.Dir, UID: l.UID, Cgroup: l.Cgroup.Place,
	}
}
