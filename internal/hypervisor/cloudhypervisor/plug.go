package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// A disk that is plugged while the guest runs is a device as the others are, with a name of its own, by which saved state knows it. Its file is in the root
// of the process for as long as the guest has the device: the program opens it again when the guest resets.
//
// The program forgets the disk when it is asked to remove it, and the device when the guest has let it go. So a name that is in the tree of devices, and not
// in the configuration, is that of a device which is leaving. The name says which disk it is, also to a later daemon.

const plugPrefix = "plug"

// plugged is a disk with a port, as the name of its device has it.
type plugged struct {
	port   int
	serial string
}

func (p plugged) id() string { return fmt.Sprintf("%s%d-%s", plugPrefix, p.port, p.serial) }

func pluggedOf(id string) (plugged, bool) {
	port, serial, ok := strings.Cut(strings.TrimPrefix(id, plugPrefix), "-")
	n, err := strconv.Atoi(port)
	p := plugged{n, serial}
	return p, ok && err == nil && p.id() == id
}

func plugID(d vm.Disk) string { return plugged{d.Port, d.Serial}.id() }

func plugPath(port int) string { return filepath.Join(rootPlugged, strconv.Itoa(port)) }

// fixed returns the disks without a port.
func fixed(disks []vm.Disk) []vm.Disk {
	return slices.DeleteFunc(slices.Clone(disks), func(d vm.Disk) bool { return d.Port != 0 })
}

// devices are what the program says of its VM.
type devices struct {
	State  string `json:"state"`
	Config struct {
		Disks []diskConfig `json:"disks"`
		NICs  []netConfig  `json:"net"`
	} `json:"config"`
	Tree map[string]struct{} `json:"device_tree"` // by their names; null before the guest boots
}

func (i *instance) devices(ctx context.Context) (d devices, err error) {
	err = i.call(ctx, "GET", "vm.info", nil, &d)
	return d, err
}

// disk returns the disk with that name, and an empty one if there is none.
func (d devices) disk(id string) diskConfig {
	if n := slices.IndexFunc(d.Config.Disks, func(c diskConfig) bool { return c.ID == id }); n >= 0 {
		return d.Config.Disks[n]
	}
	return diskConfig{}
}

// has reports whether the guest has the device, or had it and has not let it go.
func (d devices) has(id string) bool { return d.configured(id) || d.leaves(id) }

func (d devices) configured(id string) bool {
	return d.disk(id).ID != "" || slices.ContainsFunc(d.Config.NICs, func(c netConfig) bool { return c.ID == id })
}

// leaves reports whether the guest has not let a device go yet that it no longer has.
func (d devices) leaves(id string) bool {
	_, there := d.Tree[id]
	return there && !d.configured(id)
}

// allPlugged returns the disks with a port, and those that are leaving.
func (d devices) allPlugged() (all []plugged) {
	for _, c := range d.Config.Disks {
		if p, ok := pluggedOf(c.ID); ok {
			all = append(all, p)
		}
	}
	for id := range d.Tree {
		if p, ok := pluggedOf(id); ok && !slices.Contains(all, p) {
			all = append(all, p)
		}
	}
	return all
}

func (d devices) plugged(serial string) (plugged, bool) {
	all := d.allPlugged()
	if n := slices.IndexFunc(all, func(p plugged) bool { return p.serial == serial }); n >= 0 {
		return all[n], true
	}
	return plugged{}, false
}

// change runs f, which changes the devices of the guest. Only one does that at a time. f gets what there is, and a watcher that began before.
func (i *instance) change(ctx context.Context, f func(devices, *watcher) error) error {
	if err := i.Alive(); err != nil {
		return err
	}
	if i.h.Queues == 0 {
		return errdefs.Preconditionf("an earlier release has started it; stop and start it once")
	}
	select {
	case i.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-i.turn }()
	w, err := i.watch(ctx)
	if err != nil {
		return err
	}
	defer w.close()
	now, err := i.devices(ctx)
	if err != nil {
		return err
	}
	return f(now, w)
}

// PlugDisk implements hypervisor.DiskPlugger.
func (i *instance) PlugDisk(ctx context.Context, d vm.Disk) error {
	if d.Port == 0 {
		return errdefs.Invalidf("plug disk %s into VM %s: it has no port", d.Serial, i.h.ID)
	}
	if err := checkDisk(string(i.h.ID), d); err != nil {
		return err
	}
	if err := i.change(ctx, func(now devices, w *watcher) error { return i.plugDisk(ctx, now, w, d) }); err != nil {
		return fmt.Errorf("plug disk %s into VM %s: %w", d.Serial, i.h.ID, err)
	}
	return nil
}

// UnplugDisk implements hypervisor.DiskPlugger.
func (i *instance) UnplugDisk(ctx context.Context, serial string) error {
	if err := i.change(ctx, func(now devices, w *watcher) error { return i.unplugDisk(ctx, now, w, serial) }); err != nil {
		return fmt.Errorf("unplug disk %s of VM %s: %w", serial, i.h.ID, err)
	}
	return nil
}

func (i *instance) plugDisk(ctx context.Context, now devices, w *watcher, d vm.Disk) error {
	want := plugged{d.Port, d.Serial}
	if now.configured(want.id()) {
		return nil
	}
	if now.has(want.id()) { // it was to be removed, and is to stay
		var err error
		if now, err = i.gone(ctx, w, want.id()); err != nil {
			return err
		}
	}
	all := now.allPlugged()
	switch {
	case slices.ContainsFunc(now.Config.Disks, func(c diskConfig) bool { return c.Serial == d.Serial }) || slices.ContainsFunc(all, func(p plugged) bool { return p.serial == d.Serial }):
		return errdefs.Conflictf("the VM has another disk with this serial")
	case slices.ContainsFunc(all, func(p plugged) bool { return p.port == d.Port }):
		return errdefs.Conflictf("another disk is at port %d", d.Port)
	case len(i.h.Disks)+len(all) >= maxDisks:
		return errdefs.Exhaustedf("the VM has %d disks, and Cloud Hypervisor can have no more of ours; detach a volume, or run the VM with the driver qemu", maxDisks)
	}
	if err := i.tidy(all); err != nil {
		return err
	}
	file, err := jail.OpenData(d.Path, d.Root, !d.ReadOnly)
	if err != nil {
		return err
	}
	defer file.Close()
	at := plugPath(d.Port)
	if err := i.Proc.Add(proc.RootFile{At: at, File: file, ReadOnly: d.ReadOnly}, proc.User{UID: i.h.UID, GID: i.h.UID}); err != nil {
		return err
	}
	err = i.call(ctx, "PUT", "vm.add-disk", diskOf(want.id(), at, d, i.h.Queues, i.h.DiskRate), nil)
	if _, refused := errors.AsType[*apiError](err); refused {
		return errors.Join(err, i.Proc.Remove(at))
	}
	if err != nil {
		return err
	}
	return i.taken(w, now, want.id())
}

func (i *instance) unplugDisk(ctx context.Context, now devices, w *watcher, serial string) error {
	of, ok := now.plugged(serial)
	switch {
	case ok:
		var err error
		if now, err = i.remove(ctx, now, w, of.id()); err != nil {
			return err
		}
	case slices.ContainsFunc(i.h.Disks, func(d jail.Drive) bool { return d.Serial == serial }):
		return errdefs.Invalidf("it was there when the guest booted; only disks that were plugged later can be removed")
	}
	return i.tidy(now.allPlugged())
}

// remove takes a device from the guest, and waits until it has let it go.
func (i *instance) remove(ctx context.Context, now devices, w *watcher, id string) (devices, error) {
	if now.configured(id) {
		if err := i.call(ctx, "PUT", "vm.remove-device", removedDevice{id}, nil); err != nil {
			return now, err
		}
	}
	return i.gone(ctx, w, id)
}

// gone waits until the guest has let a device go. A guest that resets does not say so.
func (i *instance) gone(ctx context.Context, w *watcher, id string) (devices, error) {
	for {
		now, err := i.devices(ctx)
		if err == nil && !now.has(id) {
			return now, nil
		}
		if err == nil {
			_, err = w.next()
		}
		if ctx.Err() != nil {
			return now, errdefs.Unavailablef("the guest does not release its device %s: %w", id, ctx.Err())
		}
		if err != nil {
			return now, errors.Join(i.Alive(), err)
		}
	}
}

// takeTime is how long a guest may take to find a device. One that has no driver for it never says that it has found it.
const takeTime = 3 * time.Second

// taken waits a while until the guest uses a new device. A guest that is saved before it has looked would not look when it resumes: the program does not
// save that there is something to look for. before is what there was before the device.
func (i *instance) taken(w *watcher, before devices, id string) error {
	if before.State != stateRunning {
		return nil
	}
	t := time.AfterFunc(takeTime, w.close)
	defer t.Stop()
	for {
		e, err := w.next()
		if err != nil { // it was told, in any case
			return i.Alive()
		}
		if e.Source == "virtio-device" && e.Event == "activated" && e.Of.ID == id {
			return nil
		}
	}
}

// tidy removes files from the root of the process that belong to no disk in all. Such a disk is gone, or its plugging was interrupted.
func (i *instance) tidy(all []plugged) error {
	names, err := namesIn(i.Proc, rootPlugged)
	if errdefs.IsNotFound(err) {
		return i.Alive()
	}
	if err != nil {
		return errdefs.Unavailablef("look which disks are plugged: %w", err)
	}
	for _, name := range names {
		port, err := strconv.Atoi(name)
		if err != nil || slices.ContainsFunc(all, func(p plugged) bool { return p.port == port }) {
			continue
		}
		if err := i.Proc.Remove(plugPath(port)); err != nil {
			return err
		}
	}
	return nil
}

// namesIn returns the names in the folder at a path in the root of a process, or many of them. It follows no symbolic link.
// Errors: NotFound if there is no such folder.
func namesIn(p *proc.Process, at string) ([]string, error) {
	path, err := p.Folder(at)
	if err != nil {
		return nil, err
	}
	defer path.Close()
	fd, err := unix.Openat(int(path.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	dir := os.NewFile(uintptr(fd), at)
	defer dir.Close()
	names, err := dir.Readdirnames(vm.MaxPort)
	if errors.Is(err, io.EOF) { // it is empty
		err = nil
	}
	return names, err
}
