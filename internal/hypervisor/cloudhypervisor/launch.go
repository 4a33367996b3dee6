package cloudhypervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

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
	fdAPI
	fdEvents
	fdMemory // of saved state, and then
	fdTaps   // those that no packet passes yet
)

// overheadBytes is the memory that the program itself may need in addition to the guest's.
const overheadBytes = 256 << 20

// launch is one Launch in progress. Its steps run in the order of their declaration.
type launch struct {
	jail.Rooted

	d       *Driver
	program program
	setup   setup

	api    *os.File
	events *os.File
	log    *os.File
	logAt  int64 // size of the program's log before this run
	taps   []*os.File
	memory *savedmemory.Memory
	inst   *instance
}

// Launch implements hypervisor.Driver.
func (d *Driver) Launch(ctx context.Context, p hypervisor.Plan) (hypervisor.Instance, error) {
	l := &launch{Rooted: jail.Rooted{Launch: jail.Launch{Jail: d.jail, Plan: p}, Title: "Cloud Hypervisor"}, d: d}
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
	if l.setup, err = build(l.Plan, l.d.firmwarePath(), "/proc/self/fd/"+strconv.Itoa(fdMemory)); err != nil {
		return err
	}
	l.Files = l.setup.files
	if l.program, err = l.d.program(ctx); err != nil {
		return err
	}
	if problem := jail.ReadKVM().Problem(); problem != "" {
		return errdefs.Unavailablef("Cloud Hypervisor needs KVM: %s", problem)
	}
	if err := jail.EnoughHugePages(jail.Sysfs, l.Plan); err != nil {
		return err
	}
	l.Dir, err = jail.OpenDir(l.Plan.Dir)
	return err
}

// loadMemory loads the memory of saved state. The program maps it copy-on-write, so all VMs that resume from it share it, and one that is alone has it to itself.
func (l *launch) loadMemory(ctx context.Context) (err error) {
	if l.Plan.Incoming != nil {
		l.memory, err = l.d.memory.Load(ctx, l.Plan.Incoming, l.Plan.Memory)
	}
	return err
}

func (l *launch) makeCgroup(context.Context) error {
	return l.MakeCgroup(jail.Bounds{CPUs: l.Plan.CPUs, Memory: l.Plan.Memory, Overhead: overheadBytes})
}

// openFiles opens what the process finds in its root, and the taps.
func (l *launch) openFiles(ctx context.Context) (err error) {
	if err := l.Dir.Remove(jail.EndFile, eventLog, restoreFile); err != nil {
		return err
	}
	if err := l.OpenRoot(rootPrivate); err != nil {
		return err
	}
	if l.Plan.Boot.Direct() && l.Plan.Incoming == nil {
		if err := unix.Symlinkat(rootKernel, int(l.Root[0].File.Fd()), kernelLink); err != nil {
			return fmt.Errorf("place the kernel: %w", err)
		}
	}
	if l.Plan.Incoming != nil {
		if err := l.describe(); err != nil {
			return err
		}
	}
	l.taps, err = jail.OpenTaps(ctx, l.Plan.NICs)
	return err
}

// describe writes the description of a machine that resumes.
func (l *launch) describe() error {
	text, err := json.Marshal(l.setup.VM)
	if err != nil {
		return err
	}
	path := filepath.Join(l.Plan.Dir, restoreFile)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return fmt.Errorf("describe the machine: %w", err)
	}
	file, err := jail.OpenData(path, "", false)
	if err != nil {
		return err
	}
	l.Root = append(l.Root, proc.RootFile{At: restoreVM, File: file, ReadOnly: true})
	return file.Chmod(0o644) // whatever the mask of this process is
}

// openLogs opens what the process inherits.
func (l *launch) openLogs(context.Context) (err error) {
	if l.Console, err = jail.NewConsole(l.Dir, jail.ConsoleLog); err != nil {
		return err
	}
	if l.events, err = l.Dir.AppendTo(eventLog); err != nil {
		return err
	}
	if l.log, err = l.Dir.AppendTo(programLog); err != nil {
		return err
	}
	if l.logAt, err = l.log.Seek(0, io.SeekEnd); err != nil {
		return err
	}
	l.api, err = l.Dir.Listen(apiSocket)
	return err
}

func (l *launch) start(context.Context) (err error) {
	files := []*os.File{l.Console.End, l.api, l.events}
	if l.memory != nil {
		files = append(files, l.memory.File)
	}
	if l.linksDown() {
		files = append(files, l.taps...)
	}
	err = l.Start(proc.Spec{
		Path: l.program.path, Args: arguments(l.Plan.ID), In: l.Console.In, Out: l.Console.Out, Err: l.log, Files: files,
		Root: &proc.Root{Files: l.Root, Devices: []string{jail.KVMDevice, "/dev/null", "/dev/urandom"}, Folders: []string{rootSave}},
	})
	if err != nil {
		return err
	}
	_ = l.api.Close() // while it is also open here, nobody sees the process hang up
	l.api = nil
	return nil
}

func (l *launch) linksDown() bool { return l.Plan.Incoming != nil && l.Plan.Incoming.LinksDown }

// arguments are those of the process. Everything else is told over its API.
func arguments(id vm.ID) []string {
	return []string{
		marker(jail.UUID(id)), "--api-socket", "fd=" + strconv.Itoa(fdAPI), "--event-monitor", "fd=" + strconv.Itoa(fdEvents), "--seccomp", "true",
		"--no-shutdown", // a guest that powers itself off leaves the process, so that its end is recorded
	}
}

// boot tells the process what its VM is. On return the guest's CPUs run, unless the plan says that the guest starts paused.
func (l *launch) boot(ctx context.Context) error {
	h := handle{
		Handle: l.Handle(Name, handleVersion), Program: l.program.version, Memory: l.Plan.Memory, Huge: l.Plan.Huge > 0, Resets: !l.Plan.Boot.Direct(), Agent: l.Plan.Agent != "", Disks: jail.Drives(fixed(l.Plan.Disks)),
		Queues: queuesOf(l.Plan), DiskRate: l.Plan.DiskRate,
	}
	for n := range l.Plan.NICs {
		at := carrier{Place: vm.PlaceOf(l.Plan.NICs, n)}
		if l.linksDown() {
			at.FD = fdTaps + n
		}
		h.Links = append(h.Links, at)
	}
	raw, err := jail.Encode(&h)
	if err != nil {
		return err
	}
	i := newInstance(l.d, h, raw, l.Proc)
	if l.memory != nil {
		i.Memory = l.memory
	}
	if err := h.Record(reasonNone); err != nil {
		return err
	}
	if err := jail.Started(ctx, l.d.bootTime(l.Plan.Memory, l.Plan.Huge > 0), func(ctx context.Context) error { return l.begin(ctx, i) }); err != nil {
		return l.explain(ctx, err)
	}
	i.Supervise(ctx, i.supervise)
	l.inst, l.memory = i, nil
	return nil
}

// begin makes the machine, and lets its guest run.
func (l *launch) begin(ctx context.Context, i *instance) error {
	if l.Plan.Incoming != nil {
		return l.resume(ctx, i)
	}
	if err := i.callLong(ctx, "PUT", "vm.create", l.setup.VM, nil); err != nil {
		return err
	}
	for n, nic := range l.setup.NICs {
		if err := i.callLong(ctx, "PUT", "vm.add-net", nic, nil, l.taps[n]); err != nil {
			return err
		}
	}
	if l.Plan.Paused {
		return nil
	}
	err := i.start(ctx)
	if err == nil {
		i.beginning.HasBegun()
	}
	return err
}

// resume loads saved state and lets the guest run, which is told of the disks that have grown.
func (l *launch) resume(ctx context.Context, i *instance) error {
	if err := i.callLong(ctx, "PUT", "vm.restore", l.setup.Restore, nil, l.taps...); err != nil {
		return err
	}
	if l.linksDown() {
		for _, tap := range l.taps {
			if err := pass(tap, false); err != nil {
				return err
			}
		}
	}
	if err := i.callLong(ctx, "PUT", "vm.resume", nil, nil); err != nil {
		return err
	}
	i.beginning.HasBegun()
	for n, d := range l.Plan.Disks {
		if !slices.Contains(l.Plan.Incoming.Grown, d.Serial) {
			continue
		}
		size, err := l.sizeOf(n)
		if err != nil {
			return err
		}
		if err := i.callLong(ctx, "PUT", "vm.resize-disk", diskSize{l.setup.VM.Disks[n].ID, size}, nil); err != nil {
			return err
		}
	}
	return nil
}

// sizeOf returns how large the disk with the number n is.
func (l *launch) sizeOf(n int) (int64, error) {
	for _, f := range l.Root {
		if f.At == l.setup.VM.Disks[n].Path {
			size, err := f.File.Seek(0, io.SeekEnd)
			if err != nil {
				return 0, fmt.Errorf("look how large a disk is: %w", err)
			}
			return size, nil
		}
	}
	return 0, errdefs.New(errdefs.Internal, "disk %d is not in the root of the process", n)
}

// explain says why the program did not do what it was told.
func (l *launch) explain(ctx context.Context, err error) error {
	if refused, ok := errors.AsType[*apiError](err); ok {
		return l.Refused(refused)
	}
	return l.Explain(ctx, err, func() string {
		return jail.LastLine(filepath.Join(l.Plan.Dir, programLog), l.logAt, func(string) bool { return false })
	})
}

// release closes what only this launch needed, on success and on failure.
func (l *launch) release() {
	jail.CloseAll(append(l.taps, l.api, l.events, l.log))
	l.memory.Release()
	if l.setup.Restore != nil {
		_ = l.Dir.Remove(restoreFile) // the process has it
	}
	l.Release()
}

// unlinkKernel takes the kernel away from a guest that has it. A guest that resets then ends, and the program with it.
func unlinkKernel(p *proc.Process) error {
	private, err := p.Folder(rootPrivate)
	if errdefs.IsNotFound(err) { // the process has ended, and its folder with it
		return nil
	}
	if err != nil {
		return fmt.Errorf("take the kernel away: %w", err)
	}
	defer private.Close()
	if err := unix.Unlinkat(int(private.Fd()), kernelLink, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("take the kernel away: %w", err)
	}
	return nil
}

// dialAgent opens the channel to the agent: the program connects to a port of the guest when it is asked for it, and says so.
func (i *instance) dialAgent(ctx context.Context) (net.Conn, error) {
	conn, err := jail.DialPrivate(ctx, i.Proc, rootPrivate, agentSocket, i.h.UID)
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	if err := jail.ConnectGuest(wait, conn, vm.AgentPort); err != nil {
		_ = conn.Close()
		if wait.Err() != nil && ctx.Err() == nil {
			err = errdefs.Unavailablef("the guest does not answer: %w", err)
		}
		return nil, err
	}
	return conn, nil
}

// connectTime is how long a guest may take to accept a connection. One that has resumed takes the first for one that it had before, and never answers.
const connectTime = 3 * time.Second
