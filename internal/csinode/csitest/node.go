package csitest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// violation fails the test, because the caller does not keep to the protocol.
func (d *Driver) violation(format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	d.t.Errorf("the caller violates CSI: %s", text)
	return status.Error(codes.InvalidArgument, text)
}

func (d *Driver) can(c csi.NodeServiceCapability_RPC_Type) bool { return slices.Contains(d.o.Able, c) }

// capability checks what a request says of how the volume is used.
func (d *Driver) capability(c *csi.VolumeCapability) error {
	switch mode := c.GetAccessMode().GetMode(); {
	case c.GetMount() == nil && c.GetBlock() == nil:
		return d.violation("no access type in %v", c)
	case mode == csi.VolumeCapability_AccessMode_UNKNOWN:
		return d.violation("no access mode in %v", c)
	case (mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER || mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER) &&
		!d.can(csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER):
		return d.violation("mode %v, which the driver does not have", mode)
	case c.GetMount().GetVolumeMountGroup() != "" && !d.can(csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP):
		return d.violation("a group, which the driver does not have")
	}
	return nil
}

func isFolder(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.IsDir()
}

// volume returns the state of a volume. Preconditions: d.mu is held.
func (d *Driver) volume(id string) *state {
	if d.volumes[id] == nil {
		d.volumes[id] = &state{}
	}
	return d.volumes[id]
}

// NodeStageVolume implements the node service.
func (d *Driver) NodeStageVolume(_ context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.capability(r.GetVolumeCapability()); err != nil {
		return nil, err
	}
	v := d.volume(r.GetVolumeId())
	device := r.GetVolumeCapability().GetBlock() != nil
	switch {
	case !d.can(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME):
		return nil, d.violation("the driver stages no volumes")
	case r.GetVolumeId() == "" || !isFolder(r.GetStagingTargetPath()):
		return nil, d.violation("stage volume %q at %q, which is no folder", r.GetVolumeId(), r.GetStagingTargetPath())
	case v.staging != "" && v.staging != r.GetStagingTargetPath():
		return nil, d.violation("volume %s is staged at %s and %s", r.GetVolumeId(), v.staging, r.GetStagingTargetPath())
	case v.staging != "" && v.device != device:
		return nil, status.Error(codes.AlreadyExists, "the volume is staged otherwise")
	case v.staging != "":
		return &csi.NodeStageVolumeResponse{}, nil
	}
	if d.o.Mount && !device {
		if err := unix.Mount(d.Folder(r.GetVolumeId()), r.GetStagingTargetPath(), "", unix.MS_BIND, ""); err != nil {
			return nil, status.Errorf(codes.Internal, "mount: %v", err)
		}
	}
	v.staging, v.device = r.GetStagingTargetPath(), device
	return &csi.NodeStageVolumeResponse{}, nil
}

// NodePublishVolume implements the node service. A volume that is not staged although the driver stages volumes must have the attribute
// csi.storage.k8s.io/ephemeral.
func (d *Driver) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.capability(r.GetVolumeCapability()); err != nil {
		return nil, err
	}
	v, target := d.volume(r.GetVolumeId()), r.GetTargetPath()
	staged := d.can(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) && r.GetVolumeContext()["csi.storage.k8s.io/ephemeral"] != "true"
	switch {
	case r.GetVolumeId() == "" || !filepath.IsAbs(target) || !isFolder(filepath.Dir(target)):
		return nil, d.violation("publish volume %q at %q, whose parent is no folder", r.GetVolumeId(), target)
	case staged != (r.GetStagingTargetPath() != "") || staged && r.GetStagingTargetPath() != v.staging:
		return nil, d.violation("publish volume %s from %q; it is staged at %q", r.GetVolumeId(), r.GetStagingTargetPath(), v.staging)
	case slices.Contains(v.targets, target):
		return &csi.NodePublishVolumeResponse{}, nil
	}
	v.device = r.GetVolumeCapability().GetBlock() != nil
	if err := d.show(r.GetVolumeId(), target, v.device, r.GetReadonly()); err != nil {
		return nil, status.Errorf(codes.Internal, "publish: %v", err)
	}
	v.targets = append(v.targets, target)
	return &csi.NodePublishVolumeResponse{}, nil
}

// show makes a volume appear at target.
func (d *Driver) show(volume, target string, device, readOnly bool) error {
	if !device {
		if err := os.Mkdir(target, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if !d.o.Mount {
			return nil
		}
		if err := unix.Mount(d.Folder(volume), target, "", unix.MS_BIND, ""); err != nil || !readOnly {
			return err
		}
		return unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	source := d.o.Devices[volume]
	if source == "" || !d.o.Mount {
		return unix.Mknod(target, unix.S_IFBLK|0o600, int(unix.Mkdev(240, 1<<15))) // a number of local use: nothing has it
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	f.Close()
	return unix.Mount(source, target, "", unix.MS_BIND, "")
}

// NodeUnpublishVolume implements the node service.
func (d *Driver) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r.GetVolumeId() == "" || !filepath.IsAbs(r.GetTargetPath()) {
		return nil, d.violation("unpublish volume %q at %q", r.GetVolumeId(), r.GetTargetPath())
	}
	v := d.volume(r.GetVolumeId())
	if at := slices.Index(v.targets, r.GetTargetPath()); at >= 0 {
		if err := d.release(r.GetTargetPath()); err != nil {
			return nil, status.Errorf(codes.Internal, "unpublish: %v", err)
		}
		if err := os.Remove(r.GetTargetPath()); err != nil {
			return nil, status.Errorf(codes.Internal, "unpublish: %v", err)
		}
		v.targets = slices.Delete(v.targets, at, at+1)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// NodeUnstageVolume implements the node service.
func (d *Driver) NodeUnstageVolume(_ context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.volume(r.GetVolumeId())
	switch {
	case !d.can(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME):
		return nil, d.violation("the driver stages no volumes")
	case r.GetVolumeId() == "" || !filepath.IsAbs(r.GetStagingTargetPath()):
		return nil, d.violation("unstage volume %q at %q", r.GetVolumeId(), r.GetStagingTargetPath())
	case len(v.targets) > 0:
		return nil, d.violation("unstage volume %s, which is published at %v", r.GetVolumeId(), v.targets)
	case v.staging == r.GetStagingTargetPath():
		if err := d.release(v.staging); err != nil {
			return nil, status.Errorf(codes.Internal, "unstage: %v", err)
		}
		v.staging = ""
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// release unmounts what the driver has mounted at path. Not being mounted is no error.
func (d *Driver) release(path string) error {
	if !d.o.Mount {
		return nil
	}
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

func (d *Driver) releaseAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, v := range d.volumes {
		for _, path := range append(slices.Clone(v.targets), v.staging) {
			if path == "" {
				continue
			}
			if err := d.release(path); err != nil {
				d.t.Errorf("release %s: %v", path, err)
			}
		}
	}
}

// NodeGetVolumeStats implements the node service.
func (d *Driver) NodeGetVolumeStats(_ context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Contains(d.volume(r.GetVolumeId()).targets, r.GetVolumePath()) {
		return nil, d.violation("usage of volume %q at %q, where it is not published", r.GetVolumeId(), r.GetVolumePath())
	}
	return &csi.NodeGetVolumeStatsResponse{
		Usage: []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: 100, Used: 30, Available: 70},
			{Unit: csi.VolumeUsage_INODES, Total: 10, Used: 3, Available: -1},
		},
		VolumeCondition: &csi.VolumeCondition{Abnormal: true, Message: "worn\x1b out"},
	}, nil
}

// NodeExpandVolume implements the node service.
func (d *Driver) NodeExpandVolume(_ context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.volume(r.GetVolumeId())
	if !slices.Contains(v.targets, r.GetVolumePath()) || r.GetStagingTargetPath() != v.staging {
		return nil, d.violation("grow volume %q at %q, staged at %q", r.GetVolumeId(), r.GetVolumePath(), r.GetStagingTargetPath())
	}
	if err := d.capability(r.GetVolumeCapability()); err != nil {
		return nil, err
	}
	v.size = r.GetCapacityRange().GetRequiredBytes()
	return &csi.NodeExpandVolumeResponse{CapacityBytes: v.size + 1}, nil
}

// NodeGetCapabilities implements the node service.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	r := &csi.NodeGetCapabilitiesResponse{}
	for _, c := range d.o.Able {
		r.Capabilities = append(r.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: c}},
		})
	}
	return r, nil
}

// NodeGetInfo implements the node service.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	r := &csi.NodeGetInfoResponse{NodeId: d.o.NodeID, MaxVolumesPerNode: d.o.MaxVolumes}
	if d.o.Topology != nil {
		r.AccessibleTopology = &csi.Topology{Segments: d.o.Topology}
	}
	return r, nil
}
