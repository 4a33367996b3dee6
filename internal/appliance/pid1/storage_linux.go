package pid1

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Names in LVM.
const (
	group       = "capsule"
	permVolume  = "lv_perm"
	permDraft   = "lv_perm_new" // while its file system is made
	pool        = "thinpool"
	mebibyte    = int64(1) << 20
	gibibyte    = int64(1) << 30
	permMinimum = gibibyte
	permMaximum = 32 * gibibyte
	poolPercent = 95 // of what is free
)

// permSize returns the bytes of the volume for /perm in a group of that many bytes, of which extents of that many bytes are the smallest parts: a quarter, at
// least 1 GiB and at most 32 GiB.
func permSize(groupSize, extent int64) (int64, error) {
	size := min(max(groupSize/4, permMinimum), permMaximum)
	if extent > 0 {
		size = (size + extent - 1) / extent * extent
	}
	if size > groupSize {
		return 0, errdefs.Exhaustedf("the disk has %d MiB for data, and /perm needs %d; use a larger disk", groupSize/mebibyte, size/mebibyte)
	}
	return size, nil
}

// volumes is what LVM says of the group.
type volumes struct {
	size, extent, free int64
	names              map[string]bool
}

// storage finds the group of volumes, or makes it on the data partition if that is blank, and mounts /perm. Each step can be interrupted, and is taken up at the
// next start.
func (m *machine) storage(ctx context.Context) error {
	v, err := m.volumes(ctx)
	if errdefs.IsNotFound(err) {
		if err = m.makeGroup(ctx); err == nil {
			v, err = m.volumes(ctx)
		}
	}
	if err != nil {
		return err
	}
	if !v.names[permVolume] {
		if err := m.makePerm(ctx, v); err != nil {
			return err
		}
	}
	if _, err := m.run(ctx, "lvm", "lvchange", "-ay", "-K", group+"/"+permVolume); err != nil {
		return err
	}
	permErr := m.mountPerm(ctx)
	if !v.names[pool] {
		m.log.Info("making the pool of volumes", "op", "first start")
		if _, err := m.run(ctx, "lvm", "lvcreate", "-y", "--type", "thin-pool", "-l", strconv.Itoa(poolPercent)+"%FREE", "--monitor", "n", "-n", pool, group); err != nil {
			return errors.Join(permErr, err)
		}
	}
	_, err = m.run(ctx, "lvm", "vgchange", "-ay", group)
	return errors.Join(permErr, err)
}

// volumes asks LVM. A group that is not there is a NotFound error.
func (m *machine) volumes(ctx context.Context) (volumes, error) {
	var report struct {
		Report []struct {
			VG []struct {
				Name   string `json:"vg_name"`
				Size   string `json:"vg_size"`
				Extent string `json:"vg_extent_size"`
				Free   string `json:"vg_free"`
			} `json:"vg"`
			LV []struct {
				Name string `json:"lv_name"`
			} `json:"lv"`
		} `json:"report"`
	}
	ask := func(words ...string) error {
		out, err := m.run(ctx, "lvm", append(words, "--reportformat", "json", "--units", "b", "--nosuffix")...)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(out, &report); err != nil {
			return fmt.Errorf("read the answer of lvm %s: %w", words[0], err)
		}
		return nil
	}
	v := volumes{names: map[string]bool{}}
	if err := ask("vgs", "-o", "vg_name,vg_size,vg_extent_size,vg_free"); err != nil {
		return v, err
	}
	found := false
	for _, r := range report.Report {
		for _, g := range r.VG {
			if g.Name != group {
				continue
			}
			var errs [3]error
			v.size, errs[0] = strconv.ParseInt(g.Size, 10, 64)
			v.extent, errs[1] = strconv.ParseInt(g.Extent, 10, 64)
			v.free, errs[2] = strconv.ParseInt(g.Free, 10, 64)
			if err := errors.Join(errs[:]...); err != nil {
				return v, fmt.Errorf("read the sizes of group %s: %w", group, err)
			}
			found = true
		}
	}
	if !found {
		return v, errdefs.NotFoundf("there is no group %s of volumes", group)
	}
	report.Report = nil
	if err := ask("lvs", "-o", "lv_name", group); err != nil {
		return v, err
	}
	for _, r := range report.Report {
		for _, l := range r.LV {
			v.names[l.Name] = true
		}
	}
	return v, nil
}

// makeGroup makes the group on the data partition of the disk of the system. A partition that holds something is never touched, but for one that LVM has
// labelled and that is in no group: that is as far as an earlier start came.
func (m *machine) makeGroup(ctx context.Context) error {
	device, err := m.root.partition("/sys/block", "/dev", dataPartition)
	if err != nil {
		return err
	}
	empty, err := blank(device)
	if err != nil {
		return err
	}
	if !empty {
		out, err := m.run(ctx, "lvm", "pvs", "--noheadings", "-o", "pv_name,vg_name", device)
		if err != nil || len(strings.Fields(string(out))) != 1 {
			return errdefs.Preconditionf("%s holds something that is no group %s; if nobody needs it, clear it: dd if=/dev/zero of=%s bs=1M count=1", device, group, device)
		}
	}
	m.log.Info("making the group of volumes", "op", "first start", "device", device)
	_, err = m.run(ctx, "lvm", "vgcreate", "-y", group, device)
	return err
}

// makePerm makes the volume for /perm. It has another name until it has a file system, so it exists with one or not at all.
func (m *machine) makePerm(ctx context.Context, v volumes) error {
	size, err := permSize(v.size, v.extent)
	if err != nil {
		return err
	}
	m.log.Info("making /perm", "op", "first start", "bytes", size)
	if v.names[permDraft] {
		if _, err := m.run(ctx, "lvm", "lvremove", "-y", group+"/"+permDraft); err != nil {
			return err
		}
	}
	for _, words := range [][]string{
		{"lvm", "lvcreate", "-y", "-W", "y", "-Z", "y", "-L", strconv.FormatInt(size, 10) + "b", "-n", permDraft, group},
		{"mkfs.ext4", "-q", "-F", "-L", "perm", "-m", "1", "/dev/" + group + "/" + permDraft},
		{"lvm", "lvrename", group, permDraft, permVolume},
	} {
		if _, err := m.run(ctx, words[0], words[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// mountPerm checks and mounts /perm. Without it the state of the daemon is in memory.
func (m *machine) mountPerm(ctx context.Context) error {
	device := "/dev/" + group + "/" + permVolume
	if _, err := m.run(ctx, "e2fsck", "-p", device); err != nil {
		exit := (*exec.ExitError)(nil)
		if !errors.As(err, &exit) || exit.ExitCode() > 1 { // 1: it repaired something
			return err
		}
	}
	if err := os.MkdirAll(permDir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(device, permDir, "ext4", unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID, ""); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	return os.MkdirAll(ownDir, 0o750)
}
