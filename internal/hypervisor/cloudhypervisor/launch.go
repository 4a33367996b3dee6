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
	"strings"
	"time"

	"golang.org/x/sys/unix"

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
	fdAPI
	fdEvents
	fdMemory // of saved state, and then
	fdTaps   // those that no packet passes yet
)

// overheadBytes is the memory that the program itself may need in addition to the guest's.
const overheadBytes = 256 << 20

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
	api     *os.File
	events  *os.File
	log     *os.File
	logAt   int64 // size of the program's log before this run
	taps    []*os.File
	memory  *savedmemory.Memory
	proc    *proc.Process
	inst    *instance
}

// Launch implements hypervisor.Driver.
func (d *Driver) Launch(ctx context.Context, p hypervisor.Plan) (hypervisor.Instance, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("launch VM %s: %w", p.Name, err)
	}
	if os.Geteuid() != 0 {
		return nil, errdefs.Preconditionf("launch VM %s: the driver of Cloud Hypervisor needs root to give each VM a user, namespaces and a cgroup of its own", p.Name)
	}
	l := &launch{d: d, plan: p}
	err := l.run(ctx)
	l.release()
	if err != nil {
		return nil, fmt.Errorf("launch VM %s: %w", p.Name, errors.Join(err, l.undo.Run(ctx)))
	}
	l.undo.Release()
	return d.offered(l.inst), nil
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
	if l.setup, err = build(l.plan, l.d.firmware(), "/proc/self/fd/"+strconv.Itoa(fdMemory)); err != nil {
		return err
	}
	if l.program, err = l.d.program(ctx); err != nil {
		return err
	}
	if problem := jail.ReadKVM().Problem(); problem != "" {
		return errdefs.Unavailablef("Cloud Hypervisor needs KVM: %s", problem)
	}
	if err := jail.EnoughHugePages(jail.Sysfs, l.plan); err != nil {
		return err
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

// openFiles opens what the process finds in its root, and the taps.
func (l *launch) openFiles(ctx context.Context) (err error) {
	if err := l.dir.Remove(jail.EndFile, eventLog, restoreFile); err != nil {
		return err
	}
	l.undo.Push(func(context.Context) error { return l.d.jail.RemoveSockets(l.plan.Dir) })
	private, err := l.dir.Private(privateDir, l.uid)
	if err != nil {
		return err
	}
	l.root = append(l.root, proc.RootFile{At: rootPrivate, File: private})
	if l.plan.Boot.Direct() && l.plan.Incoming == nil {
		if err := os.Symlink(rootKernel, filepath.Join(l.plan.Dir, privateDir, kernelLink)); err != nil {
			return fmt.Errorf("place the kernel: %w", err)
		}
	}
	for _, f := range l.setup.files {
		file, err := jail.OpenData(f.path, f.root, !f.readOnly)
		if err != nil {
			return err
		}
		l.root = append(l.root, proc.RootFile{At: f.at, File: file, ReadOnly: f.readOnly})
	}
	if l.plan.Incoming != nil {
		if err := l.describe(); err != nil {
			return err
		}
	}
	l.taps, err = jail.OpenTaps(ctx, l.plan.NICs)
	return err
}

// describe writes the description of a machine that resumes.
func (l *launch) describe() error {
	text, err := json.Marshal(l.setup.VM)
	if err != nil {
		return err
	}
	path := filepath.Join(l.plan.Dir, restoreFile)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return fmt.Errorf("describe the machine: %w", err)
	}
	file, err := jail.OpenData(path, "", false)
	if err != nil {
		return err
	}
	l.root = append(l.root, proc.RootFile{At: restoreVM, File: file, ReadOnly: true})
	return file.Chmod(0o644) // whatever the mask of this process is
}

// openLogs opens what the process inherits.
func (l *launch) openLogs(context.Context) (err error) {
	if l.console, err = jail.NewConsole(l.dir, consoleLog); err != nil {
		return err
	}
	if l.events, err = l.dir.AppendTo(eventLog); err != nil {
		return err
	}
	if l.log, err = l.dir.AppendTo(programLog); err != nil {
		return err
	}
	if l.logAt, err = l.log.Seek(0, io.SeekEnd); err != nil {
		return err
	}
	l.api, err = l.dir.Listen(apiSocket)
	return err
}

func (l *launch) start(context.Context) (err error) {
	files := []*os.File{l.console.End, l.api, l.events}
	if l.memory != nil {
		files = append(files, l.memory.File)
	}
	if l.linksDown() {
		files = append(files, l.taps...)
	}
	l.proc, err = proc.Start(proc.Spec{
		Path: l.program.path, Args: arguments(l.plan.ID), In: l.console.In, Out: l.console.Out, Err: l.log,
		Files: files, User: &proc.User{UID: l.uid, GID: l.uid},
		CgroupDir: l.cgroup.Dir, CgroupTasks: l.cgroup.Tasks, Isolated: true,
		Root: &proc.Root{Files: l.root, Devices: []string{jail.KVMDevice, "/dev/null", "/dev/urandom"}, Folders: []string{rootSave}},
	})
	if err != nil {
		return err
	}
	p := l.proc
	l.undo.Push(func(ctx context.Context) error {
		err := p.Kill(ctx)
		return errors.Join(err, p.Close())
	})
	_ = l.api.Close() // while it is also open here, nobody sees the process hang up
	l.api = nil
	return nil
}

func (l *launch) linksDown() bool { return l.plan.Incoming != nil && l.plan.Incoming.LinksDown }

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
		Driver: Name, Version: handleVersion, ID: l.plan.ID, PID: l.proc.PID(), Start: l.proc.StartTime(), UUID: jail.UUID(l.plan.ID), Dir: l.plan.Dir, UID: l.uid,
		Program: l.program.version, Memory: l.plan.Memory, Huge: l.plan.Huge > 0, Resets: !l.plan.Boot.Direct(), Agent: l.plan.Agent != "", Cgroup: l.cgroup.Place,
	}
	for n := range l.plan.NICs {
		at := carrier{Place: vm.PlaceOf(l.plan.NICs, n)}
		if l.linksDown() {
			at.FD = fdTaps + n
		}
		h.Links = append(h.Links, at)
	}
	i := newInstance(l.d, h, l.proc)
	i.memory, l.memory = l.memory, nil
	l.undo.Push(func(context.Context) error { i.memory.Release(); return nil })
	var err error
	if i.raw, err = h.encode(); err != nil {
		return err
	}
	if err := h.record(reasonNone); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, l.d.cfg.LaunchTime)
	defer cancel()
	if err := l.begin(wait, i); err != nil {
		return l.explain(ctx, err)
	}
	i.run(ctx)
	l.inst = i
	return nil
}

// begin makes the machine, and lets its guest run.
func (l *launch) begin(ctx context.Context, i *instance) error {
	if l.plan.Incoming != nil {
		return l.resume(ctx, i)
	}
	if err := i.call(ctx, "PUT", "vm.create", l.setup.VM, nil); err != nil {
		return err
	}
	for n, nic := range l.setup.NICs {
		if err := i.call(ctx, "PUT", "vm.add-net", nic, nil, l.taps[n]); err != nil {
			return err
		}
	}
	if i.unbooted = l.plan.Paused; i.unbooted {
		return nil
	}
	return i.start(ctx)
}

// resume loads saved state and lets the guest run, which is told of the disks that have grown.
func (l *launch) resume(ctx context.Context, i *instance) error {
	if err := i.call(ctx, "PUT", "vm.restore", l.setup.Restore, nil, l.taps...); err != nil {
		return err
	}
	if l.linksDown() {
		for _, tap := range l.taps {
			if err := pass(tap, false); err != nil {
				return err
			}
		}
	}
	if err := i.call(ctx, "PUT", "vm.resume", nil, nil); err != nil {
		return err
	}
	for n, d := range l.plan.Disks {
		if !slices.Contains(l.plan.Incoming.Grown, d.Serial) {
			continue
		}
		size, err := l.sizeOf(n)
		if err != nil {
			return err
		}
		if err := i.call(ctx, "PUT", "vm.resize-disk", diskSize{diskID(n), size}, nil); err != nil {
			return err
		}
	}
	return nil
}

// sizeOf returns how large the disk with the number n is.
func (l *launch) sizeOf(n int) (int64, error) {
	for _, f := range l.root {
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
	last := lastLine(filepath.Join(l.plan.Dir, programLog), l.logAt)
	if last == "" {
		last = "it logged no message"
	}
	return l.damaged(errdefs.New(errdefs.Internal, "Cloud Hypervisor ended while it started, with code %d, signal %d: %s", exit.Code, exit.Signal, l.named(last)))
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

// lastLine returns the last line of a log after offset from, short enough for an error.
func lastLine(path string, from int64) (last string) {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return ""
	}
	const most = 8192
	data, err := io.ReadAll(io.NewSectionReader(f, max(from, end-most), most))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(strings.ToValidUTF8(string(data), "")) {
		if line = strings.TrimSpace(line); line != "" {
			last = line
		}
	}
	return last[:min(len(last), 500)]
}

// release closes what only this launch needed, on success and on failure.
func (l *launch) release() {
	for _, f := range l.root {
		_ = f.File.Close()
	}
	jail.CloseAll(append(l.taps, l.api, l.events, l.log))
	l.console.Close()
	l.cgroup.Close()
	l.memory.Release()
	if l.setup.Restore != nil {
		_ = l.dir.Remove(restoreFile) // the process has it
	}
	_ = l.dir.Close()
}

// unlinkKernel takes the kernel away from a guest that has it. A guest that resets then ends, and the program with it.
func unlinkKernel(dir string) error {
	private, err := os.OpenFile(filepath.Join(dir, privateDir), unix.O_DIRECTORY|unix.O_NOFOLLOW|os.O_RDONLY, 0)
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
func dialAgent(ctx context.Context, h handle) (net.Conn, error) {
	conn, err := jail.DialPrivate(ctx, filepath.Join(h.Dir, privateDir), agentSocket, h.UID)
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
