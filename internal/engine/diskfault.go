package engine

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
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

// diskWatch watches the disks of one process.
type diskWatch struct {
	m *machine
	r *run
	w hypervisor.DiskWatcher
}

// watch records what happens to the disk requests of the guest, and resumes a guest that is paused for lack of space
// once there is some. It ends with the process.
func (d diskWatch) watch(ctx context.Context) {
	wait, last := diskPoll, time.Time{} // when it resumed last
	for ctx.Err() == nil && !d.r.Over() {
		fault, changed, err := d.w.DiskFault(ctx)
		if err != nil {
			process.Pause(diskPoll, ctx.Done(), d.r.Ended())
			continue
		}
		noted := d.note(ctx, fault, false)
		if fault == nil || !fault.Stands {
			select {
			case <-changed:
			case <-ctx.Done():
			case <-d.r.Ended():
			}
			continue
		}
		if wait = min(wait*2, diskRest); time.Since(last) > diskCalm {
			wait = diskPoll
		}
		for ctx.Err() == nil && !d.r.Over() {
			process.Pause(wait, changed, d.r.Ended())
			if !noted { // the journal may be on the full disk
				noted = d.note(ctx, fault, true)
			}
			if ok, err := d.retry(ctx); err != nil {
				d.m.log.Debug("guest stays paused", "vm", d.m.id, "err", err)
			} else if ok {
				break
			}
		}
		last = time.Now()
	}
}

// retry resumes the guest if it is paused because of a disk and its disks have room, and reports whether it
// runs. It waits for operations on the VM: a guest that is held by a save stays held.
func (d diskWatch) retry(ctx context.Context) (bool, error) {
	if ok, err := d.m.room(d.m.record()); !ok || err != nil {
		return false, err
	}
	release, err := d.m.vms.queue.Lock(ctx, d.m.id)
	if err != nil {
		return false, err
	}
	defer release()
	if d.m.run.Load() != d.r {
		return true, nil
	}
	if d.m.record().Paused != "" { // who unpauses it resumes it
		return false, nil
	}
	fault, changed, err := d.w.DiskFault(ctx)
	if err != nil || fault == nil || !fault.Stands {
		return err == nil, err
	}
	p, ok := hypervisor.As[hypervisor.Pauser](d.r.Inst)
	if !ok {
		return false, errdefs.Unsupportedf("driver %s cannot resume a paused guest", d.m.record().Driver)
	}
	if err := p.Resume(ctx); err != nil {
		return false, err
	}
	process.Pause(diskPoll, changed, d.r.Ended())
	if _, changed, err = d.w.DiskFault(ctx); err == nil { // it may be paused again at once, which is nothing new
		process.Pause(diskPoll, changed, d.r.Ended())
	}
	return true, nil
}

// room reports whether all disks of r can grow a little.
func (n *node) room(r vm.Record) (bool, error) {
	full, err := n.fullFolders(r)
	return len(full) == 0 && err == nil, err
}

// fullFolders returns the folders of those disks of r that cannot grow a little. Only a try tells that of a block device.
func (n *node) fullFolders(r vm.Record) (full []string, err error) {
	for _, d := range r.Disks {
		dir := filepath.Dir(d.Path)
		if d.ReadOnly || d.Device || slices.Contains(full, dir) {
			continue
		}
		room, err := n.roomIn(dir)
		if err != nil {
			return nil, err
		}
		if room.Free < min(diskMargin, room.Size/diskPart) {
			full = append(full, dir)
		}
	}
	return full, nil
}

// note records the result of the guest's last request, unless it is on record and again is false. If the
// journal fails, only the record in memory has it: callers that ask are told.
func (d diskWatch) note(ctx context.Context, fault *hypervisor.DiskFault, again bool) (noted bool) {
	reason, message := "", ""
	switch {
	case fault == nil:
	case fault.Full && fault.Stands:
		reason = vm.ReasonDiskFull
		message = "its guest is paused because " + d.full() + "; free some space there; the guest then resumes by itself, and no data is lost"
	case fault.Stands:
		reason, message = vm.ReasonDiskError, "its guest is paused because the host's disk failed ("+fault.Cause+"); Cocoon retries from time to time"
	default:
		reason, message = vm.ReasonDiskError, "the host's disk failed ("+fault.Cause+"); its guest got an I/O error and still runs"
	}
	was := d.m.record()
	if d.m.run.Load() != d.r || was.State != vm.StateRunning || was.Reason == reason && !again || !disksMayReplace(was.Reason, reason) {
		return true
	}
	switch {
	case again:
	case reason == "":
		d.m.log.Info("disk of guest works again", "vm", d.m.id)
	default:
		d.m.log.Warn("disk of guest failed", "vm", d.m.id, "reason", reason, "err", fault.Cause)
	}
	change := func(r *vm.Record) {
		if r.State == vm.StateRunning && disksMayReplace(r.Reason, reason) {
			r.Reason, r.Message = reason, message
		}
	}
	if _, err := d.m.update(ctx, change); err != nil {
		d.m.log.Debug("fault of a disk not recorded", "vm", d.m.id, "reason", reason, "err", err)
		d.m.assume(change)
		return false
	}
	return true
}

// full says what is full, as far as that can be told.
func (d diskWatch) full() string {
	r := d.m.record()
	folders, err := d.m.fullFolders(r)
	switch {
	case err == nil && len(folders) > 0:
		return "there is no room left in " + strings.Join(folders, " and ")
	case slices.ContainsFunc(r.Disks, func(d vm.Disk) bool { return d.Device && !d.ReadOnly }):
		return "the thin pool of one of its volumes is full (`cocoon doctor`), or there was no room in " + d.m.cfg.StateDir
	}
	return "there was no room in " + d.m.cfg.StateDir
}

// disksMayReplace reports whether the disks of a running VM may change the reason was to reason: a fault replaces what may pass,
// and its end only ends a fault of the disks.
func disksMayReplace(was, reason string) bool {
	return vm.OfDisk(was) || reason != "" && (was == "" || vm.Passing(was))
}

// standsStill explains why calls into m do not return; nil if its disks are not the reason.
func standsStill(m *machine) error {
	if err := awake(m.record()); err != nil {
		return fmt.Errorf("vm %s: %w", m.name(), err)
	}
	if r := m.record(); r.Reason == vm.ReasonDiskFull {
		return errdefs.Unavailablef("the guest of vm %s does not answer: %s", m.name(), r.Message)
	}
	return nil
}
