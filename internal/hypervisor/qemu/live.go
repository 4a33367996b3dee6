package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/proc"
)

var _ hypervisor.FolderPlugger = (*instance)(nil)

// PlugFolder implements hypervisor.FolderPlugger. The server of the share sees the new mount, because its own is a slave of that of the
// share (package proc).
func (i *instance) PlugFolder(_ context.Context, at string, s hypervisor.Share) error {
	if err := i.plugFolder(at, s); err != nil {
		return fmt.Errorf("share %s with VM %s: %w", s.Path, i.h.ID, err)
	}
	return nil
}

func (i *instance) plugFolder(at string, s hypervisor.Share) error {
	dir, err := hostdir.Open(s.Root, s.Path, s.Create, s.File != "")
	if err != nil {
		return err
	}
	defer dir.Close()
	ids, err := i.d.shareIDs(i.h.UID)
	if err != nil {
		return err
	}
	if err := makePlace(at, s.File != ""); err != nil {
		return err
	}
	if same, err := shows(at, dir, s.ReadOnly); same || err != nil {
		return err
	}
	if err := proc.Detach(at); err != nil { // what an earlier container has left
		return err
	}
	tree, err := i.d.mapped(i.h.ID, dir, ids, s)
	if err != nil {
		return err
	}
	defer tree.Close()
	return proc.Attach(tree, at)
}

// shows reports whether dir is mounted at a path, with the same rights to write.
func shows(at string, dir *os.File, readOnly bool) (bool, error) {
	there, err := proc.Mounted(at)
	if !there || err != nil {
		return false, err
	}
	var have, want unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Stat(at, &have), unix.Fstat(int(dir.Fd()), &want), unix.Statfs(at, &fs)); err != nil {
		return false, err
	}
	return have.Dev == want.Dev && have.Ino == want.Ino && (fs.Flags&unix.ST_RDONLY != 0) == readOnly, nil
}

// makePlace makes the folder or file at which something is to be mounted.
func makePlace(at string, file bool) error {
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	if !file {
		if err := os.Mkdir(at, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		return nil
	}
	f, err := os.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY|unix.O_NOFOLLOW, 0o644)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// UnplugFolder implements hypervisor.FolderPlugger.
func (i *instance) UnplugFolder(_ context.Context, at string) error {
	if err := proc.Detach(at); err != nil {
		return fmt.Errorf("end sharing %s with VM %s: %w", at, i.h.ID, err)
	}
	for _, place := range []string{at, filepath.Dir(at)} { // the folder goes with the last one in it
		if err := os.Remove(place); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			return err
		}
	}
	return nil
}

// The live share has a root port of its own, from which it can be unplugged. The connection to its server, and so the server, stays meanwhile.
const (
	liveShare  = "live" // id of the connection
	livePort   = "live-port"
	liveDevice = "virtio-live"
)

// live adds the port and the device of the live share. A guest that resumes was saved without the device.
func (c *command) live(p hypervisor.Plan) {
	for _, s := range p.Shares {
		if !s.Live {
			continue
		}
		c.device(props{"driver": "pcie-root-port", "id": livePort, "chassis": maxPorts + 1}.at(slotPorts+maxPorts/8, 0))
		if p.Incoming == nil {
			c.device(liveProps(s.Tag))
		}
	}
}

func liveProps(tag string) props {
	return props{"driver": "vhost-user-fs-pci", "chardev": liveShare, "id": liveDevice, "tag": tag, "bus": livePort}
}

// UnplugShare implements hypervisor.FolderPlugger.
func (i *instance) UnplugShare(ctx context.Context, tag string) error {
	c, there, err := i.liveDevices(ctx)
	if err == nil && slices.Contains(there, liveDevice) {
		err = i.OrEnded(i.unplug(ctx, c, liveDevice))
	}
	if err != nil {
		return fmt.Errorf("unplug the shared folder %s of VM %s: %w", tag, i.h.ID, err)
	}
	return nil
}

// PlugShare implements hypervisor.FolderPlugger.
func (i *instance) PlugShare(ctx context.Context, tag string) error {
	c, there, err := i.liveDevices(ctx)
	if err == nil && !slices.Contains(there, liveDevice) {
		err = i.OrEnded(c.Execute(ctx, "device_add", liveProps(tag), nil))
	}
	if err != nil {
		return fmt.Errorf("plug the shared folder %s into VM %s: %w", tag, i.h.ID, err)
	}
	return nil
}

// chardev is a connection of QEMU to something outside.
type chardev struct {
	Label string `json:"label"`
}

// liveDevices returns the ids of the devices of a VM that has a connection for a live share.
func (i *instance) liveDevices(ctx context.Context) (*qmp.Client, []string, error) {
	c, err := i.connected(ctx)
	if err != nil {
		return nil, nil, err
	}
	var all []chardev
	if err := c.Execute(ctx, "query-chardev", nil, &all); err != nil {
		return nil, nil, i.OrEnded(err)
	}
	if !slices.Contains(all, chardev{liveShare}) {
		return nil, nil, errdefs.Unsupportedf("an earlier release has started the VM, or it shares no such folder; restart it")
	}
	there, err := devices(ctx, c)
	return c, there, i.OrEnded(err)
}
