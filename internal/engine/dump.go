package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"time"

	"cocoonstack.io/cocoon/internal/engine/coredisk"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// dumpName is what a file with a dump may be called.
var dumpName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$`)

// DumpMemory writes the memory of a running VM to a volume that no VM has, as a file with that name, which is the only one of a new file system
// (ext4). It is a core file (ELF), with which tools examine the guest. An earlier dump on the volume is lost; a volume with anything else is
// refused. The guest stands still meanwhile.
// Errors: NotFound (VM, volume), InvalidArgument (name), FailedPrecondition if the VM does not run, or the volume is not free; ResourceExhausted
// if the volume is too small, Unsupported by the driver, Unavailable.
func (v volumeVerbs) DumpMemory(caller context.Context, vmRef, ref, file string) error {
	_, err := v.operate(caller, opDump, vmRef, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.dumpMemory(ctx, ref, file)
	})
	return err
}

func (m *machine) dumpMemory(ctx context.Context, ref, file string) (vm.Record, error) {
	r := m.record()
	switch {
	case m.volumes == nil:
		return r, errdefs.Unsupportedf("this node keeps no volumes")
	case !dumpName.MatchString(file):
		return r, errdefs.Invalidf("the name %.100q of the file may have letters, digits, '.', '_' and '-', and at most 255 of them", file)
	case r.State != vm.StateRunning:
		return r, errdefs.Preconditionf("it does not run (%s), so it has no memory to dump", r.State)
	}
	got, err := m.volumes.Get(ctx, ref)
	if err != nil {
		return r, err
	}
	if len(got.Attachments) > 0 {
		return r, errdefs.Preconditionf("volume %s: it is attached to %s; use a volume that no VM has", got.Name, got.Users())
	}
	if _, err := m.dumper(); err != nil {
		return r, err
	}
	x := dumpArgs{Volume: got.ID, File: file}
	args, _ := json.Marshal(x) // strings always encode
	return dumpOperation.run(ctx, m, &dump{machine: m, dumpArgs: x}, args)
}

// dumper returns what writes the memory of the running guest of m.
func (m *machine) dumper() (hypervisor.MemoryDumper, error) {
	run := m.run.Load()
	if run == nil || run.Over() {
		return nil, errdefs.Preconditionf("its process has ended")
	}
	dumper, ok := hypervisor.As[hypervisor.MemoryDumper](run.Inst)
	if !ok {
		return nil, errdefs.Unsupportedf("driver %s cannot dump the memory of a guest", m.record().Driver)
	}
	return dumper, nil
}

// dumpArgs are the journal arguments of a dump.
type dumpArgs struct {
	Volume vm.ID  `json:"volume"`
	File   string `json:"file"`
}

// dump writes the memory of a VM to a volume. The VM has the volume meanwhile, in the store and not on its record, so that nobody else uses
// it. An interrupted dump leaves no file system. It does not go on, because the memory of the guest has changed since.
type dump struct {
	*machine
	dumpArgs
	disk vm.Disk
	got  volume.Volume
}

var dumpOperation = operation[*dump]{
	name: opDump, told: true, recall: recallDump,
	steps: []step[*dump]{
		{word: stepAttach, run: (*dump).attach, undo: (*dump).undo, recover: (*dump).recover},
		{word: stepDump, run: (*dump).write, undo: (*dump).undo, recover: (*dump).recover},
		{word: stepDetach, run: (*dump).detach, undo: (*dump).undo, recover: (*dump).recover},
	},
}

func recallDump(m *machine, in journal.Intent) (*dump, error) {
	d := &dump{machine: m}
	if err := json.Unmarshal(in.Args, &d.dumpArgs); err != nil || d.Volume == "" {
		return d, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return d, nil
}

func (d *dump) attach(ctx context.Context) (_ outcome, err error) {
	if err := d.durable(ctx); err != nil { // the store's record survives a power cut, so this operation must, too
		return outcome{}, err
	}
	d.got, d.disk, err = d.volumes.Attach(ctx, string(d.Volume), d.id, volume.Mode{})
	return outcome{}, err
}

func (d *dump) write(ctx context.Context) (_ outcome, err error) {
	dumper, err := d.dumper()
	if err != nil {
		return outcome{}, err
	}
	disk, err := os.OpenFile(d.disk.Path, os.O_RDWR, 0)
	if err != nil {
		return outcome{}, fmt.Errorf("open volume %s: %w", d.got.Name, err)
	}
	defer disk.Close()
	if err := coredisk.Check(disk, d.got.Size); err != nil {
		return outcome{}, fmt.Errorf("volume %s: %w", d.got.Name, err)
	}
	goOn := d.standStill()
	err = coredisk.Write(disk, d.got.Size, d.File, time.Now(), func(w io.Writer) error { return dumper.DumpMemory(ctx, w) })
	goOn()
	if err != nil {
		return outcome{}, fmt.Errorf("volume %s: %w", d.got.Name, endedProcess(err))
	}
	return outcome{}, nil
}

// standStill says that the guest does not answer for a while, and is not silent. goOn gives it the time that it has missed.
func (d *dump) standStill() (goOn func()) {
	run := d.run.Load()
	if run == nil || run.Held.Swap(true) { // it is paused
		return func() {}
	}
	return func() {
		run.Held.Store(false)
		d.life.spawn(func(ctx context.Context) { run.link.SetClock(ctx) })
	}
}

func (d *dump) detach(ctx context.Context) (outcome, error) {
	return outcome{}, d.releaseVolume(ctx, d.Volume, d.id)
}

func (d *dump) undo(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	if err := d.releaseVolume(ctx, d.Volume, d.id); err != nil { // the next engine tries again, so the operation stays
		return fmt.Errorf("%w; volume %s is released when cocoond starts again: %w", cause, d.Volume, err)
	}
	d.settleFailed(ctx, opDump, same)
	return cause
}

// recover ends the dump of an earlier process of the engine. Its guest goes on.
func (d *dump) recover(ctx context.Context) (next string, err error) {
	if _, err := d.readopt(ctx); err != nil {
		return "", err
	}
	if err := d.releaseVolume(ctx, d.Volume, d.id); err != nil {
		return "", err
	}
	return "", d.settle(ctx, same)
}
