package disk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Names in LVM.
const (
	group      = "capsule"
	permVolume = "lv_perm"
	permDraft  = "lv_perm_new" // while its file system is made
	pool       = "thinpool"

	// PermDevice is the device of /perm, once its volume is active.
	PermDevice = "/dev/" + group + "/" + permVolume
)

const (
	mebibyte    = int64(1) << 20
	gibibyte    = int64(1) << 30
	permMinimum = gibibyte
	permMaximum = 32 * gibibyte
	poolPercent = 95 // of what is free
)

// PermSize returns the bytes of the volume for /perm in a group of that many bytes, of which extents of that many bytes are the smallest parts: a quarter, at
// least 1 GiB and at most 32 GiB. Errors: ResourceExhausted if the group is smaller.
func PermSize(groupSize, extent int64) (int64, error) {
	size := min(max(groupSize/4, permMinimum), permMaximum)
	if extent > 0 {
		size = (size + extent - 1) / extent * extent
	}
	if size > groupSize {
		return 0, errdefs.Exhaustedf("the disk has %d MiB for data, and /perm needs %d; use a larger disk", groupSize/mebibyte, size/mebibyte)
	}
	return size, nil
}

// Run runs a program and returns its output. An error has what the program wrote about it.
type Run func(ctx context.Context, program string, args ...string) ([]byte, error)

// Group is the group of volumes on the data partition. Its methods can be interrupted after each program that they run, and go on when they are called again.
type Group struct {
	Run    Run
	Device string // the only one that LVM looks at; "": all
	Log    *slog.Logger
}

// volumes is what LVM says of the group.
type volumes struct {
	size, extent, free int64
	sizes              map[string]int64 // of each volume, in bytes
}

func (v volumes) has(name string) bool { _, ok := v.sizes[name]; return ok }

// lvm runs a command of LVM.
func (g *Group) lvm(ctx context.Context, command string, args ...string) ([]byte, error) {
	words := []string{command}
	if g.Device != "" {
		words = append(words, "--devices", g.Device)
	}
	return g.Run(ctx, "lvm", append(words, args...)...)
}

// Prepare finds the group, or makes it on the device that is returned if that is blank, and makes the volume of /perm active, with a file system.
// Errors: FailedPrecondition if the device holds something else, ResourceExhausted.
func (g *Group) Prepare(ctx context.Context, device func() (string, error)) error {
	v, err := g.volumes(ctx)
	if errdefs.IsNotFound(err) {
		var on string
		if on, err = device(); err != nil {
			return err
		}
		if err = g.make(ctx, on); err == nil {
			v, err = g.volumes(ctx)
		}
	}
	if err != nil {
		return err
	}
	if !v.has(permVolume) {
		if err := g.makePerm(ctx, v); err != nil {
			return err
		}
	}
	_, err = g.lvm(ctx, "lvchange", "-ay", "-K", group+"/"+permVolume)
	return err
}

// MakePool makes the pool of volumes, unless there is one.
func (g *Group) MakePool(ctx context.Context) error {
	v, err := g.volumes(ctx)
	if err != nil || v.has(pool) {
		return err
	}
	g.Log.Info("making the pool of volumes", "op", "first start")
	_, err = g.lvm(ctx, "lvcreate", "-y", "--type", "thin-pool", "-l", strconv.Itoa(poolPercent)+"%FREE", "--monitor", "n", "-n", pool, group)
	return err
}

// Activate makes all volumes active.
func (g *Group) Activate(ctx context.Context) error {
	_, err := g.lvm(ctx, "vgchange", "-ay", group)
	return err
}

// Deactivate makes no volume active, so that nothing uses the disk. It is no error if there is no group. Preconditions: none is mounted.
func (g *Group) Deactivate(ctx context.Context) error {
	if _, err := g.volumes(ctx); errdefs.IsNotFound(err) {
		return nil
	}
	_, err := g.lvm(ctx, "vgchange", "-an", group)
	return err
}

// report is what LVM answers.
type report struct {
	Report []struct {
		VG []map[string]string `json:"vg"`
		LV []map[string]string `json:"lv"`
		PV []map[string]string `json:"pv"`
	} `json:"report"`
}

// ask runs a command of LVM that reports.
func (g *Group) ask(ctx context.Context, command string, args ...string) (report, error) {
	var r report
	out, err := g.lvm(ctx, command, append(args, "--reportformat", "json", "--units", "b", "--nosuffix")...)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return r, fmt.Errorf("read the answer of lvm %s: %w", command, err)
	}
	return r, nil
}

// volumes asks LVM. A group that is not there is a NotFound error.
func (g *Group) volumes(ctx context.Context) (volumes, error) {
	v := volumes{sizes: map[string]int64{}}
	all, err := g.ask(ctx, "vgs", "-o", "vg_name,vg_size,vg_extent_size,vg_free")
	if err != nil {
		return v, err
	}
	found := false
	for _, r := range all.Report {
		for _, x := range r.VG {
			if x["vg_name"] != group {
				continue
			}
			var errs [3]error
			v.size, errs[0] = strconv.ParseInt(x["vg_size"], 10, 64)
			v.extent, errs[1] = strconv.ParseInt(x["vg_extent_size"], 10, 64)
			v.free, errs[2] = strconv.ParseInt(x["vg_free"], 10, 64)
			if err := errors.Join(errs[:]...); err != nil {
				return v, fmt.Errorf("read the sizes of group %s: %w", group, err)
			}
			found = true
		}
	}
	if !found {
		return v, errdefs.NotFoundf("there is no group %s of volumes", group)
	}
	if all, err = g.ask(ctx, "lvs", "-o", "lv_name,lv_size", group); err != nil {
		return v, err
	}
	for _, r := range all.Report {
		for _, l := range r.LV {
			if v.sizes[l["lv_name"]], err = strconv.ParseInt(l["lv_size"], 10, 64); err != nil {
				return v, fmt.Errorf("read the size of volume %q: %w", l["lv_name"], err)
			}
		}
	}
	return v, nil
}

// make makes the group on a device. One that holds something is never touched, but for one that LVM has labelled and that is in no group: that is as far as
// an earlier start came.
func (g *Group) make(ctx context.Context, device string) error {
	empty, err := blank(device)
	if err != nil {
		return err
	}
	if !empty {
		out, err := g.lvm(ctx, "pvs", "--noheadings", "-o", "pv_name,vg_name", device)
		if err != nil || len(strings.Fields(string(out))) != 1 {
			return errdefs.Preconditionf("%s holds something that is no group %s; if nobody needs it, clear it: dd if=/dev/zero of=%s bs=1M count=1", device, group, device)
		}
	}
	g.Log.Info("making the group of volumes", "op", "first start", "device", device)
	_, err = g.lvm(ctx, "vgcreate", "-y", group, device)
	return err
}

// makePerm makes the volume for /perm. It has another name until it has a file system, so it exists with one or not at all.
func (g *Group) makePerm(ctx context.Context, v volumes) error {
	size, err := PermSize(v.size, v.extent)
	if err != nil {
		return err
	}
	g.Log.Info("making /perm", "op", "first start", "bytes", size)
	if v.has(permDraft) {
		if _, err := g.lvm(ctx, "lvremove", "-y", group+"/"+permDraft); err != nil {
			return err
		}
	}
	if _, err := g.lvm(ctx, "lvcreate", "-y", "-W", "y", "-Z", "y", "-L", strconv.FormatInt(size, 10)+"b", "-n", permDraft, group); err != nil {
		return err
	}
	if _, err := g.Run(ctx, "mkfs.ext4", "-q", "-F", "-L", "perm", "-m", "1", "/dev/"+group+"/"+permDraft); err != nil {
		return err
	}
	_, err = g.lvm(ctx, "lvrename", group, permDraft, permVolume)
	return err
}
