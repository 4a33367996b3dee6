package engine

import (
	"context"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	diskPoll   = time.Second      // how often a guest paused by a disk is checked
	diskRest   = time.Minute      // the same for one that was paused again right after it resumed
	diskCalm   = 10 * time.Second // how long it must have run so that this does not count as right after
	diskMargin = 64 << 20         // bytes that must be free before it resumes, or a part of a small file system
	diskPart   = 64
)

// Room is the free space of a file system for non-root users, and its size, in bytes.
type Room struct{ Free, Size int64 }

// statfs is the Room of the file system that dir is on.
func statfs(dir string) (Room, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return Room{}, fmt.Errorf("look for room in %s: %w", dir, err)
	}
	return Room{Free: int64(st.Bavail) * st.Bsize, Size: int64(st.Blocks) * st.Bsize}, nil
}

// watchDisks records what happens to the disk requests of m's guest, and resumes a guest that is paused for lack of
// space once there is some. It ends with the process.
func (e *Engine) watchDisks(ctx context.Context, m *machine, r *run, w hypervisor.DiskWatcher) {
	wait, last := diskPoll, time.Time{} // when it resumed last
	for ctx.Err() == nil && !r.over() {
		fault, changed, err := w.DiskFault(ctx)
		if err != nil {
			pause(diskPoll, ctx.Done(), r.ended)
			continue
		}
		noted := e.noteFault(ctx, m, r, fault, false)
		if fault == nil || !fault.Stands {
			select {
			case <-changed:
			case <-ctx.Done():
			case <-r.ended:
			}
			continue
		}
		if wait = min(wait*2, diskRest); time.Since(last) > diskCalm {
			wait = diskPoll
		}
		for ctx.Err() == nil && !r.over() {
			pause(wait, changed, r.ended)
			if !noted { // the journal may be on the full disk
				noted = e.noteFault(ctx, m, r, fault, true)
			}
			if ok, err := e.retryDisk(ctx, m, r, w); err != nil {
				e.log.Debug("guest stands still", "vm", m.id, "err", err)
			} else if ok {
				break
			}
		}
		last = time.Now()
	}
}

// retryDisk resumes the guest of m if it is paused because of a disk and its disks have room, and reports whether it
// runs. It waits for operations on the VM: a guest that is held by a save stays held.
func (e *Engine) retryDisk(ctx context.Context, m *machine, r *run, w hypervisor.DiskWatcher) (bool, error) {
	if ok, err := e.room(m.record()); !ok || err != nil {
		return false, err
	}
	release, err := e.queue.acquire(ctx, m.id)
	if err != nil {
		return false, err
	}
	defer release()
	if m.run.Load() != r {
		return true, nil
	}
	fault, changed, err := w.DiskFault(ctx)
	if err != nil || fault == nil || !fault.Stands {
		return err == nil, err
	}
	p, ok := hypervisor.As[hypervisor.Pauser](r.inst)
	if !ok {
		return false, errdefs.Unsupportedf("driver %s cannot have a paused guest go on", m.record().Driver)
	}
	if err := p.Resume(ctx); err != nil {
		return false, err
	}
	pause(diskPoll, changed, r.ended)
	if _, changed, err = w.DiskFault(ctx); err == nil { // it may be paused again at once, which is nothing new
		pause(diskPoll, changed, r.ended)
	}
	return true, nil
}

// room reports whether all disks of r can grow a little.
func (e *Engine) room(r vm.Record) (bool, error) {
	for _, d := range r.Disks {
		if d.ReadOnly {
			continue
		}
		room, err := e.roomIn(filepath.Dir(d.Path))
		if err != nil || room.Free < min(diskMargin, room.Size/diskPart) {
			return false, err
		}
	}
	return true, nil
}

// ofDisk reports whether the reason of a running VM is a disk fault.
func ofDisk(reason string) bool { return reason == vm.ReasonDiskFull || reason == vm.ReasonDiskError }

// noteFault records the result of the last request of m's guest, unless it is on record and again is false. If the
// journal fails, only the record in memory has it: callers that ask are told.
func (e *Engine) noteFault(ctx context.Context, m *machine, r *run, fault *hypervisor.DiskFault, again bool) (noted bool) {
	reason, message := "", ""
	switch {
	case fault == nil:
	case fault.Full && fault.Stands:
		reason = vm.ReasonDiskFull
		message = "its guest stands, because the file system of " + filepath.Join(e.cfg.StateDir, "vms") + " has no room for what it wrote: make some there; it goes on by itself then, and nothing is lost"
	case fault.Stands:
		reason, message = vm.ReasonDiskError, "its guest stands, because the host's disk failed ("+fault.Cause+"); it is tried again now and then"
	default:
		reason, message = vm.ReasonDiskError, "the host's disk failed its guest ("+fault.Cause+"), which was told so and goes on"
	}
	was := m.record()
	if m.run.Load() != r || was.State != vm.StateRunning || was.Reason == reason && !again || was.Reason != "" && !ofDisk(was.Reason) {
		return true
	}
	switch {
	case again:
	case reason == "":
		e.log.Info("guest goes on, its disk takes what it writes", "vm", m.id)
	default:
		e.log.Warn("disk of guest failed", "vm", m.id, "reason", reason, "err", fault.Cause)
	}
	change := func(r *vm.Record) {
		if r.State == vm.StateRunning && (r.Reason == "" || ofDisk(r.Reason)) {
			r.Reason, r.Message = reason, message
		}
	}
	if _, err := e.commit(ctx, m, e.journal.Update, change); err != nil {
		e.log.Debug("fault of a disk not recorded", "vm", m.id, "reason", reason, "err", err)
		e.assume(m, change)
		return false
	}
	return true
}

// standsStill explains why calls into m do not return; nil if its disks are not the reason.
func standsStill(m *machine) error {
	if r := m.record(); r.Reason == vm.ReasonDiskFull {
		return errdefs.Unavailablef("the guest of vm %s does not answer: %s", m.name(), r.Message)
	}
	return nil
}
