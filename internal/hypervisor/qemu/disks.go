package qemu

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// disks makes new overlays the tops of a guest's disks, all at one instant.
type disks struct {
	pid   int
	c     *qmp.Client
	added []string // nodes of overlays that are not yet attached to a disk
	sets  []int    // ids of their fd sets
	tops  []props  // arguments of the transaction that attaches them
	inUse bool     // at least one overlay was already the top of its disk
}

// prepare opens the overlays in QEMU, without attaching them, while the guest runs.
func (d *disks) prepare(ctx context.Context, overlays []hypervisor.DiskOverlay) error {
	if len(overlays) == 0 {
		return nil
	}
	tops, err := d.current(ctx)
	if err != nil {
		return err
	}
	files, err := d.open(ctx)
	if err != nil {
		return err
	}
	for _, o := range overlays {
		if err := d.stack(ctx, o, tops, files); err != nil {
			return fmt.Errorf("disk %s: %w", o.Serial, err)
		}
	}
	return nil
}

// current asks QEMU for the present top node of each disk, by serial.
func (d *disks) current(ctx context.Context) (map[string]string, error) {
	devices, err := diskDevices(ctx, d.c)
	if err != nil {
		return nil, err
	}
	tops := map[string]string{}
	for _, dev := range devices {
		serial, err := serialOf(ctx, d.c, dev.id())
		if err != nil {
			return nil, err
		}
		tops[serial] = dev.Inserted.Node
	}
	return tops, nil
}

// diskDevice is the device of a disk.
type diskDevice struct {
	QDev     string `json:"qdev"` // its id or path
	Inserted *struct {
		Node string `json:"node-name"`
	} `json:"inserted"`
}

func (d diskDevice) id() string {
	return strings.TrimPrefix(strings.TrimSuffix(d.QDev, "/virtio-backend"), peripheral(""))
}

// diskDevices returns the devices of the disks of the plan and of plugged ones.
func diskDevices(ctx context.Context, c *qmp.Client) (all []diskDevice, err error) {
	if err := c.Execute(ctx, "query-block", nil, &all); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(d diskDevice) bool { return d.Inserted == nil || !isDisk(d.id()) }), nil
}

// inode identifies a file.
type inode struct{ dev, ino uint64 }

func inodeOf(path string) (inode, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return inode{}, err
	}
	return inode{st.Dev, st.Ino}, nil
}

// open asks which files QEMU has open as nodes. QEMU got only descriptors, so the file names identify nothing.
func (d *disks) open(ctx context.Context) (map[inode]string, error) {
	var nodes []struct {
		Driver string `json:"drv"`
		Name   string `json:"node-name"`
		File   string `json:"file"`
	}
	if err := d.c.Execute(ctx, "query-named-block-nodes", props{"flat": true}, &nodes); err != nil {
		return nil, err
	}
	var sets []struct {
		ID  int `json:"fdset-id"`
		FDs []struct {
			FD int `json:"fd"`
		} `json:"fds"`
	}
	if err := d.c.Execute(ctx, "query-fdsets", nil, &sets); err != nil {
		return nil, err
	}
	bySet := map[string]inode{}
	for _, s := range sets {
		for _, f := range s.FDs {
			if id, err := inodeOf(fmt.Sprintf("/proc/%d/fd/%d", d.pid, f.FD)); err == nil {
				bySet[fmt.Sprintf("/dev/fdset/%d", s.ID)] = id
			}
		}
	}
	files := map[inode]string{}
	for _, n := range nodes {
		if id, ok := bySet[n.File]; ok && n.Driver == "file" {
			files[id] = strings.TrimSuffix(n.Name, "-file")
		}
	}
	return files, nil
}

func (d *disks) stack(ctx context.Context, o hypervisor.DiskOverlay, tops map[string]string, files map[inode]string) error {
	top, ok := tops[o.Serial]
	switch {
	case !ok || o.Serial == "":
		return errdefs.Invalidf("the VM has no such disk")
	case o.Disk.Format != vm.DiskQCOW2 || o.Disk.ReadOnly:
		return errdefs.Invalidf("%s is not a writable qcow2 disk", o.Disk.Path)
	}
	f, err := jail.OpenData(o.Disk.Path, "", true)
	if err != nil {
		return err
	}
	defer f.Close()
	id, err := inodeOf(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return err
	}
	switch node, known := files[id]; {
	case known && node == top:
		d.inUse = true
		return nil
	case known: // left by a save that was interrupted
		if err := d.remove(ctx, node); err != nil {
			return err
		}
	}
	return d.add(ctx, top, f)
}

func (d *disks) add(ctx context.Context, top string, f *os.File) error {
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := d.c.ExecuteFile(ctx, "add-fd", nil, &set, f); err != nil {
		return err
	}
	d.sets = append(d.sets, set.ID)
	node := "over-" + strings.ToLower(rand.Text()[:12])
	low := fileNode(fmt.Sprintf("/dev/fdset/%d", set.ID), false)
	low["node-name"] = node + "-file"
	if err := d.c.Execute(ctx, "blockdev-add", low, nil); err != nil {
		return err
	}
	d.added = append(d.added, node+"-file")
	over := props{"driver": "qcow2", "node-name": node, "file": node + "-file", "discard": "unmap", "backing": nil}
	if err := d.c.Execute(ctx, "blockdev-add", over, nil); err != nil {
		return err
	}
	d.added = append(d.added, node)
	d.tops = append(d.tops, props{"type": "blockdev-snapshot", "data": props{"node": top, "overlay": node}})
	return nil
}

func (d *disks) remove(ctx context.Context, node string) error {
	if err := d.c.Execute(ctx, "blockdev-del", props{"node-name": node}, nil); err != nil && !refused(err) {
		return err // only the file node is left
	}
	return d.c.Execute(ctx, "blockdev-del", props{"node-name": node + "-file"}, nil)
}

// change puts all the overlays on top, or none. The guest must be stopped. QEMU flushes the old tops, which are read-only from
// then on.
func (d *disks) change(ctx context.Context) error {
	if len(d.tops) == 0 {
		return nil
	}
	if err := d.c.Execute(ctx, "transaction", props{"actions": d.tops}, nil); err != nil {
		return fmt.Errorf("freeze the disks: %w", err)
	}
	d.tops, d.added, d.sets = nil, nil, nil
	return nil
}

// drop removes the overlays that were not attached.
func (d *disks) drop(ctx context.Context, c *qmp.Client) (err error) {
	for n := len(d.added) - 1; n >= 0; n-- {
		err = errors.Join(err, c.Execute(ctx, "blockdev-del", props{"node-name": d.added[n]}, nil))
	}
	for _, id := range d.sets {
		err = errors.Join(err, c.Execute(ctx, "remove-fd", props{"fdset-id": id}, nil))
	}
	d.added, d.sets = nil, nil
	return err
}

// layer adds the nodes of a disk, the lowest first.
func (c *command) layer(node string, d vm.Disk) {
	_ = stack(node, d, func(f file) (string, error) { return c.fdset(f), nil }, func(p props) error {
		c.blockdev(p)
		return nil
	})
}

// stack adds the nodes of a disk, the lowest first; the top is called node. open returns a name that QEMU can open. Every file and
// its format are stated explicitly. QEMU probes nothing and trusts no image header, because an image may come from an untrusted
// source.
func stack(node string, d vm.Disk, open func(file) (string, error), add func(props) error) error {
	if d.Backing != nil {
		below := *d.Backing
		below.ReadOnly = true
		if err := stack(node+"b", below, open, add); err != nil {
			return err
		}
	}
	kind := fileWrite
	if d.ReadOnly {
		kind = fileRead
	}
	path, err := open(file{kind: kind, path: d.Path, root: d.Root})
	if err != nil {
		return err
	}
	n := diskFile(path, d)
	n["node-name"] = node + "-file"
	if err := add(n); err != nil {
		return err
	}
	top := props{"driver": string(d.Format), "node-name": node, "file": node + "-file", "read-only": d.ReadOnly, "discard": "unmap"}
	if d.Format == vm.DiskQCOW2 {
		top["backing"] = nil // JSON null: ignore the backing file in the header
		if d.Backing != nil {
			top["backing"] = node + "b"
		}
	}
	return add(top)
}
