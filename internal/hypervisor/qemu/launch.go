package qemu

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// launch is one Launch in progress. Its steps run in the order of their declaration.
type launch struct {
	jail.Launch

	d     *Driver
	kvm   jail.KVM
	accel vm.Accel
	cmd   command

	logAt  int64               // size of QEMU's log before this run
	memory *savedmemory.Memory // nil for a guest that boots
	files  []*os.File
	out    *os.File
	shares servers
	conn   net.Conn // to QMP, connected before the process exists: the kernel queues it, so there is no polling
	inst   *instance
}

// Launch implements hypervisor.Driver.
func (d *Driver) Launch(ctx context.Context, p hypervisor.Plan) (hypervisor.Instance, error) {
	l := &launch{Launch: jail.Launch{Jail: d.jail, Plan: p}, d: d, kvm: jail.ReadKVM()}
	if err := l.Run(ctx, l.run, l.release); err != nil {
		return nil, err
	}
	return l.inst, nil
}

func (l *launch) run(ctx context.Context) error {
	// No time limit here: large memory on a slow disk takes long, and with a limit such a VM could never resume.
	if err := jail.Steps(ctx, l.TakeUser, l.compose, l.remember); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, l.d.cfg.LaunchTime)
	defer cancel()
	return jail.Steps(ctx, l.makeCgroup, l.share, l.startTPM, l.openAll, l.dial, l.start, l.greet)
}

// compose gathers the facts and builds the command line.
func (l *launch) compose(ctx context.Context) (err error) {
	if l.Dir, err = jail.OpenDir(l.Plan.Dir); err != nil {
		return err
	}
	if err := jail.EnoughHugePages(jail.Sysfs, l.Plan); err != nil {
		return err
	}
	if err := hasVSOCK(vhostVSOCK, l.Plan); err != nil {
		return err
	}
	f := facts{uid: l.UID, uuid: jail.UUID(l.Plan.ID), tbSize: l.d.cfg.TBSize, spare: l.d.cfg.SparePorts, qboot: l.d.firmware("qboot.rom")}
	if f.binary, err = l.d.binary(); err != nil {
		return err
	}
	known, err := l.d.facts.Facts(ctx, f.binary, ask)
	if err != nil {
		return err
	}
	f.machine = known.machine
	if err := known.cpus.check(l.Plan.CPU); err != nil {
		return err
	}
	if f.east, err = l.Plan.Clock.East(time.Now()); err != nil {
		return err
	}
	if f.accel, _, err = resolve(l.kvm, l.Plan.Accel); err != nil {
		return err
	}
	l.accel = f.accel
	if f.accel == vm.AccelTCG {
		l.kvm = jail.KVM{Mode: 0o666} // no group is needed
		f.tscKHz = l.d.tscKHz()
	}
	if l.Plan.Incoming == nil {
		if err := checkReadable(l.Plan.Boot.Kernel, l.Plan.Boot.Initrd); err != nil {
			return err
		}
	}
	if l.Plan.Boot.Firmware == vm.FirmwareUEFI {
		if f.ovmfCode, f.ovmfVars, err = l.uefi(); err != nil {
			return err
		}
	}
	l.cmd, err = build(l.Plan, f)
	return err
}

// remember loads the guest's saved memory.
func (l *launch) remember(ctx context.Context) (err error) {
	in := l.Plan.Incoming
	if in == nil {
		return nil
	}
	if in.Summed {
		if err := savedmemory.Verify(ctx, in.State); err != nil {
			return err
		}
	}
	size := atBoot(l.Plan) >> 20 << 20
	if in.Alone {
		l.memory, err = savedmemory.LoadAlone(ctx, in, size)
	} else {
		l.memory, err = l.d.memory.Use(ctx, in, size)
	}
	if err == nil {
		m := l.memory
		l.Undo.Push(func(context.Context) error { m.Release(); return nil })
	}
	return err
}

func (l *launch) openAll(ctx context.Context) (err error) {
	if err := l.Dir.Remove(jail.EndFile); err != nil {
		return err
	}
	dir := l.Plan.Dir
	l.Undo.Push(func(context.Context) error { return l.d.jail.RemoveSockets(dir) })
	var memory *os.File
	if l.memory != nil {
		memory = l.memory.File
	}
	if l.files, err = openFiles(ctx, l.cmd.files, l.Dir, l.Plan, memory, l.shares); err != nil {
		return err
	}
	if l.out, err = l.Dir.AppendTo(qemuLog); err != nil {
		return err
	}
	l.logAt, err = l.out.Seek(0, io.SeekEnd)
	return err
}

// qemuOverhead is the memory in bytes that QEMU itself may need in addition to the guest's memory and the code cache.
const qemuOverhead = 512 << 20

func (l *launch) makeCgroup(context.Context) error {
	return l.MakeCgroup(bounds(l.Plan, l.d.cfg.TBSize))
}

// bounds returns what QEMU and the guest may take for p. tbSize is the code cache in MiB.
func bounds(p hypervisor.Plan, tbSize int) jail.Bounds {
	n := int64(qemuOverhead) + int64(tbSize)<<20
	if p.Graphics {
		n += graphicsOverhead
	}
	return jail.Bounds{CPUs: p.CPUs, Memory: p.Memory, Overhead: n}
}

func (l *launch) dial(ctx context.Context) (err error) {
	l.conn, err = jail.Dial(ctx, l.Plan.Dir, qmpSocket)
	if err == nil {
		conn := l.conn
		l.Undo.Push(func(context.Context) error { _ = conn.Close(); return nil })
	}
	return err
}

func (l *launch) start(ctx context.Context) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	err = l.Start(proc.Spec{Path: l.cmd.args[0], Args: l.cmd.args, Env: l.cmd.env(), Files: l.files, Out: l.out, SmallPages: l.cmd.smallPages}, l.kvm.Groups()...)
	if err != nil {
		return err
	}
	if l.Plan.Incoming != nil && l.Plan.Incoming.Alone {
		l.memory.Release() // the process has it; an open descriptor here would keep its pages after the process ends
	}
	jail.CloseAll(l.files) // our copies: while the listening sockets are also open here, we cannot see QEMU hang up
	l.files = nil
	l.shares.connected() // so that a server sees QEMU hang up
	return nil
}

// greet waits until QEMU answers. If there is saved state it makes QEMU load it. On return the guest's CPUs run, unless the plan
// says that the guest starts paused.
func (l *launch) greet(ctx context.Context) error {
	h := handle{
		Handle: l.Handle(Name, handleVersion), Resets: !l.Plan.Boot.Direct(), Graphics: l.Plan.Graphics, Width: width(l.Plan), VSOCK: l.Plan.VSOCK, DiskRate: l.Plan.DiskRate,
		Shares: l.shares.handles(),
	}
	raw, err := jail.Encode(&h)
	if err != nil {
		return err
	}
	i := newInstance(l.d, h, raw, l.Proc)
	i.shares = l.shares
	client, err := qmp.Open(ctx, l.conn, i.event)
	class := errdefs.Internal
	if err == nil && l.Plan.Incoming != nil {
		class = errdefs.DataLoss // QEMU has started; now only bad saved state can end it
		err = l.goOn(ctx, i, client)
	} else if err == nil {
		err = l.boot(ctx, client)
	}
	if err != nil {
		if client != nil {
			_ = client.Close()
		}
		return l.explain(ctx, class, err)
	}
	if l.memory != nil {
		i.Memory = l.memory
	}
	i.run(ctx, client)
	l.inst = i
	return nil
}

// boot lets a guest without saved state begin, unless it starts paused.
func (l *launch) boot(ctx context.Context, c *qmp.Client) error {
	if err := l.look(ctx, c); err != nil || !waits(l.Plan) {
		return err
	}
	if err := l.setLinks(ctx, c); err != nil {
		return err
	}
	if err := limitDisks(ctx, c, l.Plan.DiskRate); err != nil || l.Plan.Paused {
		return err
	}
	return cont(ctx, c)
}

// explain replaces a connection error by what QEMU wrote to its log when it died.
func (l *launch) explain(ctx context.Context, class errdefs.Class, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if fault := l.shareFault(ctx); fault != nil {
		return fault
	}
	wait, cancel := context.WithTimeout(ctx, time.Second) // it hung up, so its process ends soon
	defer cancel()
	exit, werr := l.Proc.Wait(wait)
	if werr != nil {
		return err
	}
	what := "QEMU ended while it started"
	if exit.Signal != 0 { // it was killed, which tells nothing about the saved state
		class = errdefs.Internal
	}
	if class == errdefs.DataLoss {
		what = "QEMU rejects the saved state " + l.Plan.Incoming.State
	}
	if last := lastWords(filepath.Join(l.Plan.Dir, qemuLog), l.logAt); last != "" {
		return errdefs.New(class, "%s: %s", what, l.cmd.named(last))
	}
	return errdefs.New(class, "%s; it ended with code %d, signal %d and logged no message", what, exit.Code, exit.Signal)
}

// named replaces QEMU's descriptor numbers by file names.
func (c command) named(s string) string {
	for n, f := range slices.Backward(c.files) { // from the highest number: 1 must not match in 12
		number := strconv.Itoa(firstFileFd + n)
		s = strings.ReplaceAll(s, "/dev/fdset/"+number, f.path)
		s = strings.ReplaceAll(s, "/proc/self/fd/"+number, f.path)
	}
	return s
}

// lastWords returns the last message in the log after offset from, on one line and short enough for an error.
func lastWords(path string, from int64) string {
	data, err := jail.Tail(path, from)
	if err != nil {
		return ""
	}
	return lastMessage(strings.ToValidUTF8(string(data), ""))
}

// lastMessage finds the last message in QEMU's own output: "TIME PROGRAM: [-OPTION VALUE: ]text". The text may continue on
// lines without that prefix.
func lastMessage(log string) string {
	var words string
	for line := range strings.Lines(log) {
		line = strings.TrimSpace(line)
		if stamp, rest, ok := strings.Cut(line, " qemu-system-"); ok && strings.HasSuffix(stamp, "Z") {
			_, words, _ = strings.Cut(rest, ": ")
			continue
		}
		if line != "" {
			words = strings.TrimSpace(words + " " + line)
		}
	}
	if strings.HasPrefix(words, "-") { // drop the option, which is ours and long
		if i := strings.LastIndex(words, "}: "); i >= 0 {
			words = words[i+len("}: "):]
		}
	}
	return words[:min(len(words), 500)]
}

// release closes what only this launch needed, on success and on failure.
func (l *launch) release() {
	jail.CloseAll(append(l.files, l.out))
	l.Cgroup.Close()
	_ = l.Dir.Close()
}
