package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
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

// What the program makes in the folder to which it saves. There is also a description of the machine, which the driver makes itself of the plan of a VM that resumes.
const (
	savedState  = "state.json"
	savedMemory = "memory-ranges"
)

// savingSuffix is that of the folder to which the program saves, which is beside the memory.
const savingSuffix = ".saving"

// save is one Save in progress.
type save struct {
	i       *instance
	plan    hypervisor.SavePlan
	machine vm.Machine

	running bool // the guest ran before the save
	dir     string
	folder  *os.File
	base    *os.File // the memory that the new one may be a delta to; nil: none
	took    bool     // the file of the memory is where the plan says
	began   time.Time
	pause   time.Duration
	written savedmemory.Written
}

// Save implements hypervisor.Snapshotter. The process writes all to a folder that it sees for that time; when the guest runs again, what is zero or in the
// base is taken out of the memory.
func (i *instance) Save(ctx context.Context, p hypervisor.SavePlan) (hypervisor.Saved, error) {
	s := &save{i: i, plan: p, dir: p.Memory + savingSuffix}
	err := s.run(ctx)
	jail.CloseAll([]*os.File{s.base, s.folder})
	if err != nil {
		return hypervisor.Saved{}, fmt.Errorf("save VM %s: %w", i.h.ID, i.OrEnded(err))
	}
	return hypervisor.Saved{Pause: s.pause, Method: methodStopped, Memory: s.written.Used, Delta: s.written.Delta, Machine: s.machine}, nil
}

func (s *save) run(ctx context.Context) (err error) {
	if err := s.look(ctx); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.abort(ctx), s.discard())
		}
	}()
	for _, step := range []func(context.Context) error{s.makeFolder, s.stop, s.write, s.goOn, s.take} {
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
		return errdefs.Unsupportedf("Cloud Hypervisor cannot change the disks of a guest")
	case s.i.h.Program == "":
		return errdefs.Preconditionf("an earlier release has started it; stop and start it once")
	case s.i.h.Huge:
		return errdefs.Unsupportedf("its memory consists of huge pages")
	case !s.i.beginning.Begun():
		return errdefs.Preconditionf("its guest has not begun")
	}
	now, err := s.i.state(ctx)
	if err != nil {
		return err
	}
	if now == stateCreated {
		return errdefs.NotFoundf("its guest has ended")
	}
	s.running = now == stateRunning
	s.machine = machineOf(s.i.h.Program)
	return nil
}

// makeFolder makes the folder, and shows it to the process.
func (s *save) makeFolder(context.Context) error {
	if err := s.clear(); err != nil { // what a save has left whose daemon died
		return err
	}
	err := os.Mkdir(s.dir, 0o700)
	if err == nil {
		err = os.Chown(s.dir, int(s.i.h.UID), int(s.i.h.UID))
	}
	if err == nil {
		s.folder, err = os.OpenFile(s.dir, unix.O_DIRECTORY|unix.O_NOFOLLOW|os.O_RDONLY, 0)
	}
	if err != nil {
		return fmt.Errorf("make a folder for the state: %w", err)
	}
	if err := s.i.Proc.Show(proc.RootFile{At: rootSave, File: s.folder}, proc.User{UID: s.i.h.UID, GID: s.i.h.UID}); err != nil {
		return err
	}
	if s.plan.Base != "" {
		s.base, err = jail.OpenData(s.plan.Base, "", false)
	}
	return err
}

// clear takes the folder away from the process, and removes it.
func (s *save) clear() error {
	return errors.Join(s.i.Proc.Hide(rootSave), atomicfile.RemoveAll(s.dir))
}

func (s *save) stop(ctx context.Context) error {
	s.began = time.Now()
	if !s.running {
		return nil
	}
	return s.i.call(ctx, "PUT", "vm.pause", nil, nil)
}

// write writes the state at the instant of the save.
func (s *save) write(ctx context.Context) error {
	if s.plan.Still != nil {
		if err := s.plan.Still(ctx); err != nil {
			return err
		}
	}
	err := jail.Saved(ctx, s.i.d.cfg.LaunchTime, s.i.h.Memory, func(ctx context.Context) error {
		return s.i.callLong(ctx, "PUT", "vm.snapshot", saveConfig{"file://" + rootSave}, nil)
	})
	return errors.Join(err, s.i.Proc.Hide(rootSave))
}

func (s *save) goOn(ctx context.Context) error {
	if s.running && !s.plan.Hold {
		if err := s.i.call(ctx, "PUT", "vm.resume", nil, nil); err != nil {
			return err
		}
		s.pause = time.Since(s.began)
	}
	if s.plan.Taken != nil {
		s.plan.Taken()
	}
	return nil
}

// take makes the files of the plan of what the process has written. It may still have them open, so nothing here trusts their names or their kinds.
func (s *save) take(ctx context.Context) error {
	memory, err := s.takeMemory()
	if err != nil {
		return fmt.Errorf("take the saved memory: %w", err)
	}
	defer memory.Close()
	if s.written, err = savedmemory.Thin(ctx, memory, s.base, s.i.h.Memory); err != nil {
		return err
	}
	if err := s.takeState(); err != nil {
		return fmt.Errorf("take the saved state: %w", err)
	}
	if s.pause == 0 {
		s.pause = time.Since(s.began)
	}
	return atomicfile.RemoveAll(s.dir)
}

func (s *save) takeMemory() (_ *os.File, err error) {
	if err := atomicfile.RemoveAll(s.plan.Memory); err != nil {
		return nil, err
	}
	if err := os.Rename(filepath.Join(s.dir, savedMemory), s.plan.Memory); err != nil {
		return nil, err
	}
	s.took = true
	f, err := openSaved(unix.AT_FDCWD, s.plan.Memory, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	return f, errors.Join(f.Chown(os.Geteuid(), os.Getegid()), f.Chmod(0o600))
}

// openSaved opens a file that the process has made.
func openSaved(at int, name string, flag int) (*os.File, error) {
	fd, err := unix.Openat(at, name, flag|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1) {
		err = errdefs.DataLossf("%s is no file, or has another name", name)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func (s *save) takeState() error {
	from, err := openSaved(int(s.folder.Fd()), savedState, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer from.Close()
	text, err := io.ReadAll(io.LimitReader(from, maxState))
	if err == nil {
		text, err = mapped(text, s.i.h.Memory)
	}
	if err != nil {
		return err
	}
	to, err := os.OpenFile(s.plan.State, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = to.Write(text)
	return errors.Join(err, to.Close())
}

// abort rolls the guest back to its state before the save.
func (s *save) abort(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortLimit)
	defer cancel()
	err := s.i.Proc.Hide(rootSave)
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
func (s *save) discard() error {
	err := atomicfile.RemoveAll(s.dir)
	if s.took {
		err = errors.Join(err, atomicfile.RemoveAll(s.plan.Memory), atomicfile.RemoveAll(s.plan.State))
	}
	return err
}
