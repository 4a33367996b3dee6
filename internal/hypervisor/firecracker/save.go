package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// methodStopped is how memory is taken: the guest is paused until everything is saved.
const methodStopped = "stopped"

// abortLimit bounds the rollback to a running guest.
const abortLimit = 30 * time.Second

// save is one Save in progress.
type save struct {
	i       *instance
	plan    hypervisor.SavePlan
	machine vm.Machine

	running       bool // the guest ran before the save
	state, memory *os.File
	base          *os.File // the memory that the new one may be a delta to; nil: none
	began         time.Time
	pause         time.Duration
	written       savedmemory.Written
}

// Save implements hypervisor.Snapshotter. The process writes the memory to the file itself, all of it; when the guest runs again, what is zero or in
// the base is taken out.
func (i *instance) Save(ctx context.Context, p hypervisor.SavePlan) (hypervisor.Saved, error) {
	s := &save{i: i, plan: p}
	err := s.run(ctx)
	jail.CloseAll([]*os.File{s.base})
	if err != nil {
		err = errors.Join(i.OrEnded(err), s.discard())
		return hypervisor.Saved{}, fmt.Errorf("save VM %s: %w", i.h.ID, err)
	}
	return hypervisor.Saved{Pause: s.pause, Method: methodStopped, Memory: s.written.Used, Delta: s.written.Delta, Machine: s.machine}, nil
}

func (s *save) run(ctx context.Context) (err error) {
	if err := s.i.awaitMemory(ctx); err != nil { // otherwise the guest would stand still for so long
		return err
	}
	if err := s.look(ctx); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.abort(ctx))
		}
	}()
	for _, step := range []func(context.Context) error{s.makeFiles, s.stop, s.write, s.goOn, s.thin} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// look checks the plan and the run state of the guest.
func (s *save) look(ctx context.Context) error {
	switch {
	case s.plan.State == "" || s.plan.Memory == "" || s.plan.State == s.plan.Memory:
		return errdefs.Invalidf("state and memory need separate files")
	case len(s.plan.Overlays) > 0:
		return errdefs.Unsupportedf("Firecracker cannot change the disks of a guest")
	}
	now, err := s.i.state(ctx)
	if err != nil {
		return err
	}
	if now == stateNone {
		return errdefs.Preconditionf("its guest has not begun")
	}
	s.running = now == stateRunning
	s.machine, err = s.i.machine(ctx)
	return err
}

// machine describes what the guest depends on. It is of the program that runs it, and not of the one that is installed now.
func (i *instance) machine(ctx context.Context) (vm.Machine, error) {
	if i.h.Program != "" {
		return machineOf(facts{i.h.Program, i.h.Format}), nil
	}
	var runs struct { // an earlier build has started it, and the program knows its version, but not its format
		Version string `json:"firecracker_version"`
	}
	if err := i.call(ctx, "GET", "/version", nil, &runs); err != nil {
		return vm.Machine{}, err
	}
	p, err := i.d.program(ctx)
	if err != nil {
		return vm.Machine{}, err
	}
	if p.version != runs.Version {
		return vm.Machine{}, errdefs.Preconditionf("an earlier release has started it in Firecracker %.40q, which has been replaced by %s since, so the format of its saved state is not known; stop and start it once", runs.Version, p.version)
	}
	return machineOf(p.facts), nil
}

// makeFiles makes the files, and shows them to the process.
func (s *save) makeFiles(context.Context) error {
	if err := s.hide(); err != nil { // what a save has left whose daemon died
		return err
	}
	for _, f := range []struct {
		of   **os.File
		path string
		at   string
	}{{&s.memory, s.plan.Memory, rootSavedMemory}, {&s.state, s.plan.State, rootSavedState}} {
		file, err := os.OpenFile(f.path, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return fmt.Errorf("make a file for the state: %w", err)
		}
		*f.of = file
		if err := s.i.Proc.Show(proc.RootFile{At: f.at, File: file}, proc.User{UID: s.i.h.UID, GID: s.i.h.UID}); err != nil {
			return err
		}
	}
	if s.plan.Base == "" {
		return nil
	}
	var err error
	s.base, err = jail.OpenData(s.plan.Base, "", false)
	return err
}

func (s *save) stop(ctx context.Context) error {
	s.began = time.Now()
	if !s.running {
		return nil
	}
	return s.i.call(ctx, "PATCH", "/vm", runState{"Paused"}, nil)
}

// write writes the state at the instant of the save.
func (s *save) write(ctx context.Context) error {
	if s.plan.Still != nil {
		if err := s.plan.Still(ctx); err != nil {
			return err
		}
	}
	err := jail.Saved(ctx, s.i.d.cfg.LaunchTime, s.i.h.Memory, func(ctx context.Context) error {
		return s.i.callLong(ctx, "PUT", "/snapshot/create", saveConfig{"Full", rootSavedState, rootSavedMemory}, nil)
	})
	if err != nil {
		return err
	}
	return s.hide()
}

// hide takes the files away from the process.
func (s *save) hide() error {
	return errors.Join(s.i.Proc.Hide(rootSavedState), s.i.Proc.Hide(rootSavedMemory))
}

func (s *save) goOn(ctx context.Context) error {
	if s.running && !s.plan.Hold {
		if err := s.i.call(ctx, "PATCH", "/vm", runState{"Resumed"}, nil); err != nil {
			return err
		}
		s.pause = time.Since(s.began)
	}
	if s.plan.Taken != nil {
		s.plan.Taken()
	}
	return nil
}

// thin takes out of the memory what need not be there.
func (s *save) thin(ctx context.Context) (err error) {
	if s.written, err = savedmemory.Thin(ctx, s.memory, s.base, s.i.h.Memory); err != nil {
		return err
	}
	if s.pause == 0 {
		s.pause = time.Since(s.began)
	}
	err = errors.Join(s.memory.Close(), s.state.Close())
	s.memory, s.state = nil, nil
	if err != nil {
		return fmt.Errorf("write the state: %w", err)
	}
	return nil
}

// abort rolls the guest back to its state before the save.
func (s *save) abort(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortLimit)
	defer cancel()
	err := s.hide()
	if s.running {
		err = errors.Join(err, s.i.Resume(ctx))
	}
	select {
	case <-s.i.Proc.Done():
		return nil
	default:
		return err
	}
}

// discard removes the files of a failed save.
func (s *save) discard() (err error) {
	for _, f := range []*os.File{s.memory, s.state} {
		if f != nil {
			_ = f.Close()
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}
	return err
}
