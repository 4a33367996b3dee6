package firecracker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// Descriptors that the process inherits.
const (
	fdConsole = 3 + iota
	fdMemory
)

// overheadBytes is the memory that the program itself may need in addition to the guest's.
const overheadBytes = 128 << 20

const tunDevice = "/dev/net/tun"

// launch is one Launch in progress. Its steps run in the order of their declaration.
type launch struct {
	jail.Rooted

	d       *Driver
	program program
	setup   setup

	memory *savedmemory.Memory
	late   late // what gives it its memory later
	errors *os.File
	inst   *instance
}

// Launch implements hypervisor.Driver.
func (d *Driver) Launch(ctx context.Context, p hypervisor.Plan) (hypervisor.Instance, error) {
	l := &launch{Rooted: jail.Rooted{Launch: jail.Launch{Jail: d.jail, Plan: p}, Title: "Firecracker"}, d: d}
	if err := l.Run(ctx, l.run, l.release); err != nil {
		return nil, err
	}
	return l.inst, nil
}

func (l *launch) run(ctx context.Context) error {
	return jail.Steps(ctx, l.compose, l.loadMemory, l.TakeUser, l.makeCgroup, l.openFiles, l.openLogs, l.start, l.boot)
}

// compose gathers the facts and builds the requests. It changes nothing.
func (l *launch) compose(ctx context.Context) (err error) {
	if l.setup, err = build(l.Plan, "/proc/self/fd/"+strconv.Itoa(fdMemory)); err != nil {
		return err
	}
	l.Files = l.setup.files
	if l.program, err = l.d.program(ctx); err != nil {
		return err
	}
	if problem := jail.ReadKVM().Problem(); problem != "" {
		return errdefs.Unavailablef("Firecracker needs KVM: %s", problem)
	}
	l.Dir, err = jail.OpenDir(l.Plan.Dir)
	return err
}

// loadMemory loads the memory of saved state. The program maps it copy-on-write, so all VMs that resume from it share it, and one that is alone has it to itself.
func (l *launch) loadMemory(ctx context.Context) (err error) {
	switch in := l.Plan.Incoming; {
	case in == nil:
	case in.Feed != "":
		return l.openLate(ctx)
	default:
		l.memory, err = l.d.memory.Load(ctx, in, l.Plan.Memory)
	}
	return err
}

func (l *launch) makeCgroup(context.Context) error {
	return l.MakeCgroup(jail.Bounds{CPUs: l.Plan.CPUs, Memory: l.Plan.Memory, Overhead: overheadBytes})
}

// openFiles opens what the process finds in its root.
func (l *launch) openFiles(context.Context) error {
	if err := l.Dir.Remove(jail.EndFile, programLog, errorLog, memoryLog); err != nil {
		return err
	}
	err := l.OpenRoot(rootPrivate)
	if err == nil && l.late.used() {
		err = l.listenLate(l.Root[0].File)
	}
	return err
}

// openLogs opens the logs. The program opens its own by path, so the file belongs to its user, but not the folder that it is in.
func (l *launch) openLogs(context.Context) (err error) {
	if l.Console, err = jail.NewConsole(l.Dir, jail.ConsoleLog); err != nil {
		return err
	}
	if l.errors, err = l.Dir.AppendTo(errorLog); err != nil {
		return err
	}
	log, err := l.Dir.AppendTo(programLog)
	if err != nil {
		return err
	}
	l.Root = append(l.Root, proc.RootFile{At: rootLog, File: log})
	if err := log.Chown(int(l.UID), int(l.UID)); err != nil {
		return fmt.Errorf("make the log of the program: %w", err)
	}
	return nil
}

func (l *launch) start(context.Context) error {
	root := &proc.Root{Files: l.Root, Devices: []string{jail.KVMDevice, "/dev/null", "/dev/urandom"}, Places: []string{rootSavedState, rootSavedMemory}}
	if len(l.Plan.NICs) > 0 {
		root.Devices = append(root.Devices, tunDevice)
	}
	if l.late.used() {
		root.Devices = append(root.Devices, faultsDevice)
	}
	files := []*os.File{l.Console.End}
	if l.memory != nil {
		files = append(files, l.memory.File)
	}
	return l.Start(proc.Spec{
		Path: l.program.path, Args: arguments(l.Plan.ID), In: l.Console.In, Out: l.Console.Out, Err: l.errors, Files: files, Root: root,
	})
}

// arguments are those of the process. Everything else is told over its API. Its filters of system calls are on unless an argument says otherwise.
func arguments(id vm.ID) []string {
	uuid := jail.UUID(id)
	return []string{marker(uuid), "--id", uuid, "--api-sock", filepath.Join(rootPrivate, apiSocket), "--log-path", rootLog, "--level", "Info", "--enable-pci"}
}

// boot tells the process what its VM is. On return the guest's CPUs run, unless the plan says that the guest starts paused.
func (l *launch) boot(ctx context.Context) error {
	i, err := l.instance()
	if err != nil {
		return err
	}
	if err := i.h.Record(reasonNone); err != nil {
		return err
	}
	if err := l.begin(ctx, i); err != nil {
		return l.explain(ctx, err)
	}
	i.Supervise(ctx, i.supervise)
	l.inst, l.memory = i, nil
	return nil
}

// begin makes the machine, and lets its guest run. A process that takes too long for that fails the launch.
func (l *launch) begin(ctx context.Context, i *instance) error {
	limit := l.d.cfg.LaunchTime
	if !l.late.used() {
		return jail.Started(ctx, limit, func(ctx context.Context) error {
			if err := l.answers(ctx, i); err != nil {
				return err
			}
			return l.configure(ctx, i)
		})
	}
	if err := jail.Started(ctx, limit, func(ctx context.Context) error { return l.answers(ctx, i) }); err != nil {
		return err
	}
	return l.attended(ctx, i)
}

func (l *launch) instance() (*instance, error) {
	h := handle{
		Handle: l.Handle(Name, handleVersion), Memory: l.Plan.Memory, Agent: l.Plan.Agent != "", Disks: jail.Drives(l.Plan.Disks),
		Program: l.program.version, Format: l.program.format,
	}
	for n, nic := range l.Plan.NICs {
		h.Links = append(h.Links, tap{vm.PlaceOf(l.Plan.NICs, n), nic.Tap, nic.NetNS})
	}
	raw, err := jail.Encode(&h)
	if err != nil {
		return nil, err
	}
	i := newInstance(l.d, h, raw, l.Proc)
	if l.memory != nil {
		i.Memory = l.memory
	}
	return i, nil
}

// How often a new process is asked whether it listens.
const answerFirst, answerMost = time.Millisecond, 20 * time.Millisecond

// answers waits until the process has made its socket.
func (l *launch) answers(ctx context.Context, i *instance) error {
	pauses := &backoff.ExponentialBackOff{InitialInterval: answerFirst, RandomizationFactor: 0.25, Multiplier: 1.5, MaxInterval: answerMost}
	conn, err := backoff.Retry(ctx, func() (net.Conn, error) {
		conn, err := jail.DialPrivate(ctx, l.Proc, rootPrivate, apiSocket, l.UID)
		select {
		case <-l.Proc.Done():
			err = backoff.Permanent(i.Alive())
		default:
		}
		return conn, err
	}, backoff.WithBackOff(pauses), backoff.WithMaxElapsedTime(0))
	if err != nil {
		return err
	}
	return conn.Close()
}

// configure sends the requests of the plan. The taps are in the network namespace of the process while it attaches to them.
func (l *launch) configure(ctx context.Context, i *instance) error {
	send := func(all []request) error {
		for _, r := range all {
			if err := i.callLong(ctx, r.Verb, r.Path, r.Body, nil); err != nil {
				return err
			}
		}
		return nil
	}
	if err := send(l.setup.machine); err != nil {
		return err
	}
	if err := l.lend(ctx, func() error { return send(l.setup.last) }); err != nil {
		return err
	}
	if l.Plan.Incoming != nil {
		if err := l.compare(ctx, i); err != nil {
			return err
		}
		return i.callLong(ctx, "PATCH", "/vm", runState{"Resumed"}, nil)
	}
	if l.Plan.Paused {
		return nil
	}
	return i.callLong(ctx, "PUT", "/actions", action{"InstanceStart"}, nil)
}

// explain says why the program did not do what it was told.
func (l *launch) explain(ctx context.Context, err error) error {
	if refused, ok := errors.AsType[*apiError](err); ok {
		return l.Refused(refused)
	}
	return l.Explain(ctx, err, func() string {
		last := jail.LastLine(filepath.Join(l.Plan.Dir, programLog), 0, isEnd)
		return cmp.Or(last, jail.LastLine(filepath.Join(l.Plan.Dir, errorLog), 0, isEnd))
	})
}

// release closes what only this launch needed, on success and on failure.
func (l *launch) release() {
	jail.CloseAll([]*os.File{l.errors})
	l.memory.Release()
	l.late.close()
	l.Release()
}
