// Package process is one process of a VM as the engine sees it, from its launch or adoption to its end. It does not
// decide what the end means for the VM.
package process

import (
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Process is safe for concurrent use.
type Process struct {
	ID      vm.ID
	Inst    hypervisor.Instance
	Console string      // path of the log of the serial console
	Asked   atomic.Bool // the engine wants the process to end
	Held    atomic.Bool // its guest is paused on purpose, for a save or until it is unpaused, so its silence means nothing

	viewer viewer
	ended  chan struct{}
	exit   hypervisor.Exit // valid once ended is closed
}

// ConsolePath is the path of the console log in a runtime folder unless the driver says otherwise.
func ConsolePath(dir string) string { return filepath.Join(dir, "console.log") }

// New returns the process of a VM whose runtime folder is dir.
func New(id vm.ID, inst hypervisor.Instance, dir string) *Process {
	p := &Process{ID: id, Inst: inst, Console: ConsolePath(dir), ended: make(chan struct{})}
	if c, ok := hypervisor.As[hypervisor.ConsoleOpener](inst); ok {
		p.Console = c.ConsoleLog()
	}
	return p
}

// Ended is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Over reports whether the process has ended.
func (p *Process) Over() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// endTime is how long after its sockets a process may end that is killed.
const endTime = time.Second

// Ending reports whether the process has ended, or ends now: for whoever has lost a connection to it or to its guest.
func (p *Process) Ending() bool {
	Pause(endTime, p.ended, nil)
	return p.Over()
}

// Await waits for the end of the process. ended is false if ctx ends first. Otherwise err says why the exit is not known.
func (p *Process) Await(ctx context.Context) (ended bool, err error) {
	exit, err := p.Inst.Wait(ctx)
	if ctx.Err() != nil {
		return false, err
	}
	if err != nil {
		exit = hypervisor.Exit{Code: -1}
	}
	p.exit = exit
	close(p.ended)
	return true, err
}

// Exit tells how the process ended. Preconditions: it has ended.
func (p *Process) Exit() hypervisor.Exit { return p.exit }

// Kill ends the process and waits until its end is known, whatever becomes of ctx. After the end of the process it
// removes what the process left: its sockets and its cgroup.
func (p *Process) Kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	if err := p.Inst.Kill(ctx); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	select {
	case <-p.ended:
		return nil
	case <-ctx.Done():
		return errdefs.Unavailablef("the process was killed, but it has not ended within %s", undo.Limit)
	}
}

// Retire is Kill for a paused guest whose state is durable elsewhere. If it fails, the process is as before.
func (p *Process) Retire(ctx context.Context) error {
	p.Asked.Store(true)
	err := p.Kill(ctx)
	if err != nil {
		p.Asked.Store(false)
	}
	return err
}

// Unpause resumes the guest if it was paused for a save or for merging layers. A process that has ended is no error.
func (p *Process) Unpause(ctx context.Context) error {
	if w, ok := hypervisor.As[hypervisor.DiskWatcher](p.Inst); ok {
		if fault, _, err := w.DiskFault(ctx); err == nil && fault != nil && fault.Stands {
			return nil // the engine did not pause it: it resumes when its disks have room
		}
	}
	state, err := p.Inst.State(ctx)
	if err == nil && state == hypervisor.Paused {
		pauser, ok := hypervisor.As[hypervisor.Pauser](p.Inst)
		if !ok {
			return errdefs.Unsupportedf("its guest is paused, but its driver cannot resume it")
		}
		err = pauser.Resume(ctx)
	}
	if errdefs.IsNotFound(err) || p.Over() {
		return nil
	}
	return err
}

// Pause pauses the guest unless it is paused already. A process that has ended is no error.
func (p *Process) Pause(ctx context.Context) error {
	state, err := p.Inst.State(ctx)
	if err == nil && state == hypervisor.Running {
		pauser, ok := hypervisor.As[hypervisor.Pauser](p.Inst)
		if !ok {
			return errdefs.Unsupportedf("its guest runs, but its driver cannot pause it")
		}
		err = pauser.Pause(ctx)
	}
	if errdefs.IsNotFound(err) || p.Over() {
		return nil
	}
	return err
}

// Pause waits for d, or less when one of the channels closes.
func Pause(d time.Duration, a, b <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-a:
	case <-b:
	}
}
