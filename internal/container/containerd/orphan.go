package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/containerd/v2/core/mount"

	"cocoonstack.io/cocoon/internal/proc"
)

const (
	shimProgram = "containerd-shim-runc-v2"
	defaultRunc = "/run/containerd/runc" // of the shim
	// leaving is how long a shim without a task may take to end: containerd itself gives it five seconds for each of two requests.
	leaving = 15 * time.Second
)

// endOrphans ends the shims of a container that has no task, and removes what they leave.
//
// A client that ends while containerd makes a task leaves them: containerd forgets the task, asks its shim to end, and gives up if that
// takes long. The next task would not get a shim of its own, because the socket of the old one answers, and its start would wait for
// ever; or it would find the old folder of the task, which containerd otherwise removes only at its start.
// Preconditions: containerd has no task of the container, and the caller has the lock of the container.
func (r *Runtime) endOrphans(ctx context.Context, id string) error {
	argsOf := map[int][]string{}
	shims, err := proc.Find(ctx, nil, func(pid int, args []string) bool {
		if !r.shim(args) {
			return false
		}
		argsOf[pid] = args
		return true
	})
	if err != nil {
		return fmt.Errorf("look for shims of container %s: %w", id, err)
	}
	defer func() {
		for _, p := range shims {
			_ = p.Close()
		}
	}()
	bundle, own := "", 0
	for _, p := range shims {
		if cwd, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(p.PID()), "cwd")); err == nil && filepath.Base(filepath.Dir(cwd)) == r.cfg.Namespace {
			bundle = filepath.Join(filepath.Dir(cwd), id) // that of each shim is in the same folder
		}
		if slices.Contains(argsOf[p.PID()], id) {
			own++
		}
	}
	if _, err := os.Lstat(bundle); own == 0 && (bundle == "" || errors.Is(err, fs.ErrNotExist)) {
		return nil
	}
	within, cancel := context.WithTimeout(ctx, leaving)
	defer cancel()
	for _, p := range shims {
		if !slices.Contains(argsOf[p.PID()], id) {
			continue
		}
		select { // containerd may be about to end it
		case <-p.Done():
		case <-within.Done():
			r.cfg.Log.Warn("a shim without a task is killed", "container", id, "pid", p.PID())
		}
		if err := p.Kill(ctx); err != nil {
			return fmt.Errorf("end a shim of container %s: %w", id, err)
		}
	}
	return r.removeBundle(ctx, id, bundle)
}

// shim reports whether these are the arguments of a shim of our namespace and our containerd.
func (r *Runtime) shim(args []string) bool {
	value := func(flag string) string {
		if i := slices.Index(args, flag); i > 0 && i+1 < len(args) {
			return args[i+1]
		}
		return ""
	}
	return filepath.Base(args[0]) == shimProgram && value("-namespace") == r.cfg.Namespace && value("-address") == r.cfg.Socket
}

// removeBundle removes the folder of a task, its mounts, its cgroup and runc's state, after containerd had time to do that.
func (r *Runtime) removeBundle(ctx context.Context, id, bundle string) error {
	if err := r.removeCgroup(ctx, id); err != nil {
		return err
	}
	if bundle != "" {
		_, err := backoff.Retry(ctx, func() (struct{}, error) {
			if _, err := os.Lstat(bundle); !errors.Is(err, fs.ErrNotExist) {
				return struct{}{}, fmt.Errorf("folder %s is left: %w", bundle, err)
			}
			return struct{}{}, nil
		}, backoff.WithBackOff(backoff.NewConstantBackOff(50*time.Millisecond)), backoff.WithMaxElapsedTime(leaving/3))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			r.cfg.Log.Warn("the folder of a task that was not completed is removed", "container", id, "path", bundle)
			if err := mount.UnmountRecursive(filepath.Join(bundle, "rootfs"), 0); err != nil {
				return fmt.Errorf("unmount what an incomplete task of container %s has mounted: %w", id, err)
			}
			if err := os.RemoveAll(bundle); err != nil {
				return fmt.Errorf("remove an incomplete task of container %s: %w", id, err)
			}
		}
	}
	if err := os.RemoveAll(filepath.Join(cmp.Or(r.cfg.RuncRoot, defaultRunc), r.cfg.Namespace, id)); err != nil {
		return fmt.Errorf("remove runc's state of container %s: %w", id, err)
	}
	return nil
}
