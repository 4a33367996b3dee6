package guestagent

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent/rooms"
	"cocoonstack.io/cocoon/internal/vm"
)

// Rooms are the root file systems of the machine's containers.
type Rooms interface {
	// Await waits until the machine has the disks with these serials, which may just have been plugged.
	Await(ctx context.Context, serials []string) error
	// Make makes the room called name from the layers on the disks with these serials, lowest first, and returns the
	// folder where it is until Seal. From Seal on, c holds in it. Idempotent.
	Make(name string, layers []string, c rooms.Covers) (folder string, err error)
	// Image mounts the files of the image on the disks with these serials, lowest layer first, and returns the folder where they
	// are until Seal. Idempotent until then.
	Image(name string, layers []string) (folder string, err error)
	// Identify gives every room the machine's current identity files. Rooms that have a machine id get machineID,
	// unless it is "". Idempotent.
	Identify(machineID string) error
	// Seal removes the rooms from the machine's own folders. Idempotent.
	Seal() error
	// Remove forgets the room called name and deletes what was written in it. Nothing may run in it any more. Idempotent.
	Remove(name string) error
	// Clear deletes what was written in rooms of an earlier boot. No room may have been made.
	Clear() error
	// Release waits until no room uses the disks with these serials, and makes the kernel forget them. Idempotent.
	// Errors: Unavailable while one is in use.
	Release(ctx context.Context, serials []string) error
	// Written returns what programs of the room called name have written to the disk; false: it is not known, or not yet.
	Written(name string) (bytes, inodes int64, known bool)
	// Show makes the room called name from the machine's own folders as they are mounted, with a read-only root.
	// Idempotent.
	Show(name string) error
	// Enter runs f in a room: paths that f uses and processes that it starts are inside the room. f has a thread of its own,
	// which ends with f.
	Enter(name string, f func() error) error
	// Change is Enter for an f that writes, even where the root of the room is read-only.
	Change(name string, f func() error) error
}

// containerLogBytes is how much output of one run of a container is kept, in bytes.
const containerLogBytes = 256 << 10

// startErrorCode is the exit code of a container that could not be started, the same as in container runtimes.
const startErrorCode = 128

// restartPace is the back-off between runs of a container: none the first time, then base, then twice as long each time
// up to most. A run longer than forgive resets it.
type restartPace struct{ base, most, forgive time.Duration }

var kubernetesPace = restartPace{base: 10 * time.Second, most: 5 * time.Minute, forgive: 10 * time.Minute}

// containers are the programs of a guest that has several. Only run and join start them.
type containers struct {
	procs  *procs
	pace   restartPace
	groups []uint32      // that may use the volumes
	all    []*container  // of the setup
	stop   chan struct{} // closed when nothing may be started any more
	done   chan struct{} // closed when all of the setup have ended permanently; in a sandbox when it was stopped

	stopping sync.Once
	mu       sync.Mutex     // also guards the changing fields of each container
	joined   []*container   // ephemeral ones, which were added later
	kept     sync.WaitGroup // those of joined that were started and have not ended
	changed  chan struct{}
	deadline time.Time // of a stop of all; zero: no stop was requested

	paused *paused // nil: they are not; guarded by Server.setup
}

// container is one of these programs.
type container struct {
	name    string
	kind    vm.ContainerKind
	restart vm.Restart
	command command
	keys    *hostKeys // nil: never renewed
	message message   // of the end of a run
	log     *runLog

	devices  []string     // names of volumes that only it has and sees as devices
	lacks    error        // why it can never start: a part of an image's files that does not exist; nil: it lacks nothing
	fileKeys []vm.FileKey // variables that each run reads from files
	readFile func(volume, path string, limit int) ([]byte, error)

	status vm.ContainerStatus
	main   *mainProcess  // of the current run, nil when there is none
	killed *mainProcess  // of the last run that was killed, nil when there is none
	quit   chan struct{} // closed when it may not be started any more

	pidsOf string // the container whose processes it sees; "": command.pids says it

	root     bool // its root is the guest's own
	hold     bool
	released chan struct{} // closed when no container waits for it any more
	tried    chan struct{} // closed when its first run has ended

	manual bool                // it waits for start
	held   *vm.ContainerStatus // how it was before it was paused and made to wait for start; nil: it was not
	begun  chan struct{}       // closed when its first run has started
	over   chan struct{}       // closed when it has ended permanently
}

func newContainers(procs *procs, pace restartPace) *containers {
	return &containers{
		procs: procs, pace: pace, stop: make(chan struct{}), done: make(chan struct{}), changed: make(chan struct{}),
	}
}

// add appends a container whose first run has the number first.
func (p *containers) add(c *container, first int) {
	c.prepare(vm.ContainerInitGoing, first)
	p.all = append(p.all, c)
}

// prepare sets the state of a container that waits for its first run, which has the number first.
func (c *container) prepare(reason string, first int) {
	c.log, c.quit = newRunLog(containerLogBytes, first), make(chan struct{})
	c.released, c.tried, c.begun, c.over = make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	c.status = vm.ContainerStatus{State: vm.ContainerWaiting, Reason: reason, Restarts: first - 1}
}

// join starts an ephemeral container, or lets it wait for its start, unless the guest is about to end.
func (p *containers) join(c *container) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.stop) || isClosed(p.done) {
		return errdefs.Preconditionf("the guest is stopping")
	}
	c.prepare(vm.ContainerCreating, 1)
	p.joined = append(p.joined, c)
	if c.manual {
		c.status = vm.ContainerStatus{State: vm.ContainerCreated}
	} else {
		p.kept.Go(func() { p.keep(c, c.begun) }) // ends with its process; a power-off ends that
	}
	p.wake()
	return nil
}

// list returns the containers of the setup, then the others.
func (p *containers) list() []*container {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.every()
}

// every is list. Preconditions: mu is held.
func (p *containers) every() []*container { return slices.Concat(p.all, p.joined) }

// run starts the containers in their order and keeps them running until all have ended permanently.
func (p *containers) run() {
	defer close(p.done)
	var sidecars, apps sync.WaitGroup
	for _, c := range p.all {
		if c.kind == vm.ContainerInit {
			p.keep(c, nil)
			if !p.succeeded(c) {
				break
			}
			continue
		}
		kept := &apps
		if c.kind == vm.ContainerSidecar {
			kept = &sidecars
		}
		begun := make(chan struct{})
		kept.Go(func() { p.keep(c, begun) })
		if !p.lets(c, begun) {
			break
		}
	}
	apps.Wait()
	p.endSidecars()
	sidecars.Wait()
	for _, c := range p.all {
		c.log.close()
	}
}

// lets waits until it is known whether the containers after c, which is being started, may start, and reports that.
// Containers after a sidecar need it to run. Containers after one with hold need its release. An app whose first run
// has ended blocks nobody.
func (p *containers) lets(c *container, begun <-chan struct{}) bool {
	var wait []<-chan struct{}
	tried := c.tried
	if c.kind == vm.ContainerSidecar {
		wait, tried = append(wait, begun), nil
	}
	if c.hold {
		wait = append(wait, c.released)
	}
	for _, known := range wait {
		select {
		case <-known:
		case <-tried:
		case <-p.stop:
			return false
		}
	}
	return true
}

// release lets the containers start that wait for the container called name.
func (p *containers) release(name string) error {
	c, err := p.find(name)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !isClosed(c.released) {
		close(c.released)
	}
	return nil
}

// keep runs c until it has ended permanently. begun is closed when its first run has started; it may be nil.
func (p *containers) keep(c *container, begun chan struct{}) {
	defer close(c.over)
	defer c.log.close()
	pause, pauses := time.Duration(0), backoff.ExponentialBackOff{InitialInterval: p.pace.base, Multiplier: 2, MaxInterval: p.pace.most}
	for first := true; ; first = false {
		if p.halted(c) {
			p.change(func() {
				if c.status.State == vm.ContainerWaiting && !c.status.StartedAt.IsZero() { // a restart was planned
					c.status.State, c.status.Exit, c.status.Last = vm.ContainerTerminated, c.status.Last, nil
					c.status.Reason, c.status.Message = c.status.Exit.Reason, c.status.Exit.Message
				}
			})
			return
		}
		args, env, ok := p.configured(c)
		if !ok {
			continue
		}
		exit, failed := p.once(c, first, args, env, func() {
			if begun != nil {
				close(begun)
				begun = nil
			}
		})
		if first {
			close(c.tried)
		}
		again := !p.halted(c) && c.restart.Again(exit.Code, failed)
		if exit.FinishedAt.Sub(exit.StartedAt) > p.pace.forgive {
			pause = 0
			pauses.Reset()
		}
		p.change(func() {
			if c.held != nil {
				c.status, c.held = *c.held, nil
			}
			c.status = ended(c.status, exit, again, pause)
		})
		if !again {
			return
		}
		p.wait(c, pause)
		pause = pauses.NextBackOff()
	}
}

// ended returns s as it is after a run that ended with exit.
func ended(s vm.ContainerStatus, exit vm.ContainerExit, again bool, pause time.Duration) vm.ContainerStatus {
	if !again {
		s.State, s.Reason, s.Message, s.Exit = vm.ContainerTerminated, exit.Reason, exit.Message, &exit
		return s
	}
	s.State, s.Exit, s.Last = vm.ContainerWaiting, nil, &exit
	s.Reason, s.Message = vm.ContainerCrashLoop, fmt.Sprintf("back-off %s restarting failed container", pause)
	return s
}

// once runs c one time, with these arguments and this environment. A run that was killed counts as failed, whatever its code.
func (p *containers) once(c *container, first bool, args, env []string, begun func()) (exit vm.ContainerExit, failed bool) {
	log := c.log.begin()
	c.message.clear()
	began, ooms := time.Now(), oomKills(c.command.cgroup)
	p.mu.Lock()
	if !first {
		c.status.Restarts++
	}
	c.status.StartedAt = began
	var m *mainProcess
	err := errdefs.Preconditionf("the guest is stopping")
	if !isClosed(p.stop) && !isClosed(c.quit) { // under the lock, so that a stop sees every process
		command := c.command
		command.args, command.env = args, env
		if command.pids.of, err = p.leader(c.pidsOf); err == nil {
			m, err = startMain(p.procs, log, command)
		}
	}
	if err == nil {
		c.main = m
		c.status.State, c.status.Reason, c.status.Message = vm.ContainerRunning, "", ""
		c.status.User = m.child.user
	}
	p.wake()
	p.mu.Unlock()
	if err != nil {
		log.end()
		return vm.ContainerExit{Code: startErrorCode, Reason: vm.ContainerStartError, Message: err.Error(), StartedAt: began, FinishedAt: time.Now()}, true
	}
	begun()
	<-m.child.done
	killCgroup(c.command.cgroup) // processes that it left behind
	<-m.kept
	p.mu.Lock()
	c.main, failed = nil, c.killed == m
	p.mu.Unlock()
	exit = vm.ContainerExit{Code: m.child.code(), Reason: vm.ContainerCompleted, StartedAt: m.started, FinishedAt: m.child.finished}
	switch {
	case exit.Code == vm.LostExitCode && oomKills(c.command.cgroup) > ooms:
		exit.Reason = vm.ContainerOOMKilled
	case exit.Code != 0:
		exit.Reason = vm.ContainerError
	}
	exit.Message = c.message.read(exit.Code != 0, log)
	return exit, failed || exit.Code != 0
}

// wait waits until the next run of c is due.
func (p *containers) wait(c *container, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-p.stop:
	case <-c.quit:
	}
}

func (p *containers) halted(c *container) bool { return isClosed(p.stop) || isClosed(c.quit) }

func (p *containers) succeeded(c *container) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return c.status.State == vm.ContainerTerminated && c.status.Exit != nil && c.status.Exit.Code == 0
}

func (p *containers) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.wake()
}

// wake notifies watchers. Preconditions: mu is held.
func (p *containers) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// look returns the state of the containers, in the order of list, and a channel that is closed when it changes.
func (p *containers) look() ([]vm.ContainerStatus, <-chan struct{}) {
	_, all, changed := p.report()
	return all, changed
}

// report is look with the names of the containers.
func (p *containers) report() (names []string, out []vm.ContainerStatus, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.every() {
		names, out = append(names, c.name), append(out, c.status.Clone())
	}
	return names, out, p.changed
}

// find returns the container called name.
func (p *containers) find(name string) (*container, error) {
	if p != nil {
		for _, c := range p.list() {
			if c.name == name {
				return c, nil
			}
		}
	}
	return nil, errdefs.NotFoundf("the guest has no container %q", name)
}

// running returns the main process of the container called name.
func (p *containers) running(name string) (*mainProcess, error) {
	c, err := p.find(name)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.main == nil || c.held != nil {
		return nil, errdefs.Preconditionf("container %s is not running", name)
	}
	return c.main, nil
}

// leader returns the main process of the container called name, which must run; nil if name is "". Preconditions: mu is held.
func (p *containers) leader(name string) (*child, error) {
	if name == "" {
		return nil, nil
	}
	for _, c := range p.every() {
		if c.name == name && c.main != nil {
			return c.main.child, nil
		}
	}
	return nil, errdefs.Preconditionf("container %s, whose processes it is to see, is not running", name)
}

// exit is the result of the guest as a whole: the code is that of the first container that failed, without sidecars and those
// that were added later. Preconditions: done is closed.
func (p *containers) exit() *guestv1.WaitReply {
	all, _ := p.look()
	r := &guestv1.WaitReply{}
	for i, s := range all[:len(p.all)] {
		x := s.Exit
		if x == nil {
			continue
		}
		if x.Code != 0 && r.Code == 0 && p.all[i].kind != vm.ContainerSidecar {
			r.Code = int32(x.Code)
		}
		if n := x.StartedAt.UnixNano(); r.GetStartedUnixNano() == 0 || n < r.GetStartedUnixNano() {
			r.StartedUnixNano = n
		}
		r.FinishedUnixNano = max(r.GetFinishedUnixNano(), x.FinishedAt.UnixNano())
	}
	return r
}
