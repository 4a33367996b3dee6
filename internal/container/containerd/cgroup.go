package containerd

import (
	"bytes"
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
	"golang.org/x/sys/unix"
)

// cgroups is where the hierarchies of cgroups are: one with version 2.
const cgroups = "/sys/fs/cgroup"

// emptying is how long processes of a cgroup that were killed may take to end.
const emptying = 10 * time.Second

// removeCgroup removes the cgroup of a container, which only runc removes otherwise, and kills what is in it: a runc, shim or containerd that
// was killed while it made the container may leave both. No cgroup is no error.
// Preconditions: the container has no task.
func (r *Runtime) removeCgroup(ctx context.Context, id string) error {
	hierarchies := []string{cgroups}
	if _, err := os.Stat(filepath.Join(cgroups, "cgroup.controllers")); err != nil {
		hierarchies, _ = filepath.Glob(cgroups + "/*") // the pattern is good
	}
	for _, h := range hierarchies {
		dir := filepath.Join(h, r.cfg.Cgroup, id)
		_, err := backoff.Retry(ctx, func() (struct{}, error) { return struct{}{}, empty(dir) },
			backoff.WithBackOff(backoff.NewConstantBackOff(20*time.Millisecond)), backoff.WithMaxElapsedTime(emptying))
		if err != nil {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
	}
	return nil
}

// empty kills the processes of a cgroup and of those below it, and removes them from the bottom up.
func empty(dir string) error {
	var dirs []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	slices.Reverse(dirs)
	for _, d := range dirs {
		pids, _ := os.ReadFile(filepath.Join(d, "cgroup.procs")) // without it, the removal says what is wrong
		for field := range bytes.FieldsSeq(pids) {
			if pid, err := strconv.Atoi(string(field)); err == nil && pid > 1 {
				_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
			}
		}
		if err := unix.Rmdir(d); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}
