package firecracker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/undo"
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
	d       *Driver
	plan    hypervisor.Plan
	program program
	setup   setup
	undo    undo.Stack

	dir     jail.Dir
	uid     uint32
	cgroup  jail.Cgroup
	console jail.Console
	root    []proc.RootFile // with open files
	memory  *savedmemory.Memory
	errors  *os.File
	proc    *proc.Process
	inst    *instance
}

// Launch implements hypervisor.Driver.
func (d *Driver) Launch(ctx context.Context, p hypervisor.Plan) (hypervisor.Instance, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("launch VM %s: %w", p.Name, err)
	}
	if os.Geteuid() != 0 {
		return nil, errdefs.Preconditionf("launch VM %s: the driver of Firecracker needs root to give each VM a user, namespaces and a cgroup of its own", p.Name)
	}
	l := &launch{d: d, plan: p}
	err := l.run(ctx)
	l.release()
	if err != nil {
		return nil, fmt.Errorf("launch VM %s: %w", p.Name, errors.Join(err, l.undo.Run(ctx)))
	}
	l.undo.Release()
	return l.inst, nil
}

func (l *launch) run(ctx context.Context) error {
	for _, step := range []func(context.Context) error{l.compose, l.loadMemory, l.takeUser, l.makeCgroup, l.openFiles, l.openLogs, l.start, l.boot} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// compose gathers the facts and builds the requests. It changes nothing.
func (l *launch) compose(ctx context.Context) (err error) {
	if l.setup, err = build(l.plan, "/proc/self/fd/"+strconv.Itoa(fdMemory)); err != nil {
		return err
	}
	if l.program, err = l.d.program(ctx); err != nil {
		return err
	}
	if problem := jail.ReadKVM().Problem(); problem != "" {
		return errdefs.Unavailablef("Firecracker needs KVM: %s", problem)
	}
	l.dir, err = jail.OpenDir(l.plan.Dir)
	return err
}

// loadMemory loads the memory of saved state. The program maps it copy-on-write, so all VMs that resume from it share it, and one that is alone has it to itself.
func (l *launch) loadMemory(ctx context.Context) (err error) {
	if l.plan.Incoming != nil {
		l.memory, err = l.d.memory.Load(ctx, l.plan.Incoming, l.plan.Memory)
	}
	return err
}

func (l *launch) takeUser(context.Context) (err error) {
	if l.uid, err = l.d.jail.Users.Take(l.plan.ID); err == nil {
		l.undo.Push(func(context.Context) error { l.d.jail.Users.Drop(l.uid); return nil })
	}
	return err
}

func (l *launch) makeCgroup(context.Context) (err error) {
	p := l.plan
	l.undo.Push(func(context.Context) error { return l.d.jail.Cgroups.Remove(p.ID, p.Dir, l.cgroup.Place) })
	l.cgroup, err = l.d.jail.Cgroups.Make(p.ID, p.Dir, p.CgroupParent, jail.Bounds{CPUs: p.CPUs, Memory: p.Memory, Overhead: overheadBytes})
	return err
}

// openFiles opens what the process finds in its root.
func (l *launch) openFiles(context.Context) error {
	if err := l.dir.Remove(jail.EndFile, programLog, errorLog); err != nil {
		return err
	}
	l.undo.Push(func(context.Context) error { return l.d.jail.RemoveSockets(l.plan.Dir) })
	private, err := l.dir.Private(privateDir, l.uid)
	if err != nil {
		return err
	}
	l.root = append(l.root, proc.RootFile{At: rootPrivate, File: private})
	for _, f := range l.setup.files {
		file, err := jail.OpenData(f.path, f.root, !f.readOnly)
		if err != nil {
			return err
		}
		l.root = append(l.root, proc.RootFile{At: f.at, File: file, ReadOnly: f.readOnly})
	}
	return nil
}

// openLogs opens the logs. The program opens its own by path, so the file belongs to its user, but not the folder that it is in.
func (l *launch) openLogs(context.Context) (err error) {
	if l.console, err = jail.NewConsole(l.dir, consoleLog); err != nil {
		return err
	}
	if l.errors, err = l.dir.AppendTo(errorLog); err != nil {
		return err
	}
	log, err := l.dir.AppendTo(programLog)
	if err != nil {
		return err
	}
	l.root = append(l.root, proc.RootFile{At: rootLog, File: log})
	if err := log.Chown(int(l.uid), int(l.uid)); err != nil {
		return fmt.Errorf("make the log of the program: %w", err)
	}
	return nil
}

func (l *launch) start(context.Context) (err error) {
	root := &proc.Root{Files: l.root, Devices: []string{jail.KVMDevice, "/dev/null", "/dev/urandom"}, Places: []string{rootSavedState, rootSavedMemory}}
	if len(l.plan.NICs) > 0 {
		root.Devices = append(root.Devices, tunDevice)
	}
	files := []*os.File{l.console.End}
	if l.memory != nil {
		files = append(files, l.memory.File)
	}
	l.proc, err = proc.Start(proc.Spec{
		Path: l.program.path, Args: arguments(l.plan.ID), In: l.console.In, Out: l.console.Out, Err: l.errors, Files: files,
		User: &proc.User{UID: l.uid, GID: l.uid}, CgroupDir: l.cgroup.Dir, CgroupTasks: l.cgroup.Tasks, Isolated: true, Root: root,
	})
	if err != nil {
		return err
	}
	p := l.proc
	l.undo.Push(func(ctx context.Context) error {
		err := p.Kill(ctx)
		return errors.Join(err, p.Close())
	})
	return nil
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
	if err := i.h.record(reasonNone); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, l.d.cfg.LaunchTime)
	defer cancel()
	if err := l.answers(wait, i); err != nil {
		return l.explain(ctx, err)
	}
	if err := l.configure(ctx, i); err != nil {
		return l.explain(ctx, err)
	}
	i.run(ctx)
	l.inst = i
	return nil
}

func (l *launch) instance() (*instance, error) {
	h := handle{
		Driver: Name, Version: handleVersion, ID: l.plan.ID, PID: l.proc.PID(), Start: l.proc.StartTime(), UUID: jail.UUID(l.plan.ID), Dir: l.plan.Dir, UID: l.uid,
		Memory: l.plan.Memory, Agent: l.plan.Agent != "", Cgroup: l.cgroup.Place,
	}
	for _, d := range l.plan.Disks {
		h.Disks = append(h.Disks, drive{d.Serial, d.ReadOnly})
	}
	for n, nic := range l.plan.NICs {
		h.Links = append(h.Links, tap{vm.PlaceOf(l.plan.NICs, n), nic.Tap, nic.NetNS})
	}
	i := newInstance(l.d, h, l.proc)
	var err error
	if i.raw, err = h.encode(); err != nil {
		return nil, err
	}
	i.memory, l.memory = l.memory, nil
	l.undo.Push(func(context.Context) error { i.memory.Release(); return nil })
	return i, nil
}

// How often a new process is asked whether it listens.
const answerFirst, answerMost = time.Millisecond, 20 * time.Millisecond

// answers waits until the process has made its socket.
func (l *launch) answers(ctx context.Context, i *instance) error {
	pauses := &backoff.ExponentialBackOff{InitialInterval: answerFirst, RandomizationFactor: 0.25, Multiplier: 1.5, MaxInterval: answerMost}
	conn, err := backoff.Retry(ctx, func() (net.Conn, error) {
		conn, err := jail.DialPrivate(ctx, filepath.Join(l.plan.Dir, privateDir), apiSocket, l.uid)
		select {
		case <-l.proc.Done():
			err = backoff.Permanent(i.endedError())
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
			if err := i.call(ctx, r.Verb, r.Path, r.Body, nil); err != nil {
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
	if l.plan.Incoming != nil {
		return i.call(ctx, "PATCH", "/vm", runState{"Resumed"}, nil)
	}
	if l.plan.Paused {
		return nil
	}
	return i.call(ctx, "PUT", "/actions", action{"InstanceStart"}, nil)
}

// explain adds what the program wrote to its log if it died.
func (l *launch) explain(ctx context.Context, err error) error {
	if refused, ok := errors.AsType[*apiError](err); ok {
		return l.damaged(errdefs.New(errdefs.Internal, "%s", l.named(refused.Error())))
	}
	if ctx.Err() != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, time.Second) // it hung up, so its process ends soon
	defer cancel()
	exit, werr := l.proc.Wait(wait)
	if werr != nil {
		return err
	}
	last := lastLine(filepath.Join(l.plan.Dir, programLog))
	if last == "" {
		last = lastLine(filepath.Join(l.plan.Dir, errorLog))
	}
	if last == "" {
		last = "it logged no message"
	}
	return l.damaged(errdefs.New(errdefs.Internal, "Firecracker ended while it started, with code %d, signal %d: %s", exit.Code, exit.Signal, l.named(last)))
}

// damaged makes err, by which a process did not start, DataLoss if it should have resumed.
func (l *launch) damaged(err error) error {
	if l.plan.Incoming == nil {
		return err
	}
	return errdefs.DataLossf("it does not resume from the saved state %s: %w", l.plan.Incoming.State, err)
}

// named replaces paths in the root of the process by those of the node.
func (l *launch) named(s string) string {
	var pairs []string
	for _, f := range l.setup.files {
		pairs = append(pairs, f.at, f.path)
	}
	return strings.NewReplacer(pairs...).Replace(s)
}

// release closes what only this launch needed, on success and on failure.
func (l *launch) release() {
	for _, f := range l.root {
		_ = f.File.Close()
	}
	jail.CloseAll([]*os.File{l.errors})
	l.console.Close()
	l.cgroup.Close()
	l.memory.Release()
	_ = l.dir.Close()
}
