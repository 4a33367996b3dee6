package qemu

import (
	"context"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// GrowDisk implements hypervisor.DiskGrower.
func (i *instance) GrowDisk(ctx context.Context, serial string, size int64) error {
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.grow(ctx, c, serial, size))
	}
	if err != nil {
		return fmt.Errorf("tell the guest of VM %s that disk %s has grown: %w", i.h.ID, serial, err)
	}
	return nil
}

func (i *instance) grow(ctx context.Context, c *qmp.Client, serial string, size int64) error {
	d := disks{pid: i.h.PID, c: c}
	tops, err := d.current(ctx)
	if err != nil {
		return err
	}
	node, ok := tops[serial]
	if !ok || serial == "" {
		return errdefs.Invalidf("the VM has no such disk")
	}
	n, err := imageOf(ctx, c, node)
	switch {
	case err != nil:
		return err
	case n.Driver != string(vm.DiskRaw) || n.ReadOnly:
		return errdefs.Invalidf("it is no raw disk that the guest can write to")
	case size < n.Image.Size: // QEMU would cut the file
		return errdefs.Invalidf("it has %d bytes already, which are more than %d", n.Image.Size, size)
	}
	return resizeNode(ctx, c, node, size)
}

// resizeNode sets the size of a node. QEMU notifies the guest, even of the same size.
func resizeNode(ctx context.Context, c *qmp.Client, node string, size int64) error {
	return c.Execute(ctx, "block_resize", props{"node-name": node, "size": size}, nil)
}

// tellGrown tells a resumed guest about disks that are larger than it knows. QEMU has just read their sizes from their files.
func (l *launch) tellGrown(ctx context.Context, c *qmp.Client) error {
	fixed, plugged := split(l.Plan.Disks)
	tell := func(d vm.Disk, node string) error {
		if !slices.Contains(l.Plan.Incoming.Grown, d.Serial) || d.ReadOnly {
			return nil
		}
		n, err := imageOf(ctx, c, node)
		if err == nil {
			err = resizeNode(ctx, c, node, n.Image.Size)
		}
		if err != nil {
			return fmt.Errorf("tell the guest that disk %s has grown: %w", d.Serial, err)
		}
		return nil
	}
	for n, d := range fixed {
		if err := tell(d, diskNode(n)); err != nil {
			return err
		}
	}
	for _, d := range plugged {
		if err := tell(d, plugNode(d.Port)); err != nil {
			return err
		}
	}
	return nil
}

// image is a block node of QEMU, with the size that a guest sees.
type image struct {
	Driver   string `json:"drv"`
	Name     string `json:"node-name"`
	ReadOnly bool   `json:"ro"`
	Image    struct {
		Size int64 `json:"virtual-size"` // bytes
	} `json:"image"`
}

func imageOf(ctx context.Context, c *qmp.Client, node string) (image, error) {
	var nodes []image
	if err := c.Execute(ctx, "query-named-block-nodes", props{"flat": true}, &nodes); err != nil {
		return image{}, err
	}
	for _, n := range nodes {
		if n.Name == node {
			return n, nil
		}
	}
	return image{}, errdefs.NotFoundf("QEMU has no disk %s", node)
}
