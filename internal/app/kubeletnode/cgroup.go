package kubeletnode

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	cgroups   = "/sys/fs/cgroup"
	busyLimit = 3 * time.Second
)

// hierarchies returns the folders of this machine's cgroup hierarchies: one with version 2.
func hierarchies() []string {
	if _, err := os.Stat(filepath.Join(cgroups, "cgroup.controllers")); err == nil {
		return []string{cgroups}
	}
	all, _ := filepath.Glob(cgroups + "/*/cgroup.procs")
	for i, file := range all {
		all[i] = filepath.Dir(file)
	}
	return all
}

// MakeCgroup makes the cgroup of all pods of a kubelet in every hierarchy: a kubelet makes only those below. It is no error if it exists.
func MakeCgroup(name string) error {
	for _, h := range hierarchies() {
		if err := os.MkdirAll(filepath.Join(h, name), 0o755); err != nil {
			return fmt.Errorf("make cgroup %s: %w", name, err)
		}
	}
	return nil
}

// RemoveCgroup removes a cgroup and those below it from every hierarchy. It is no error if there is none.
// Preconditions: no process is in one of them.
func RemoveCgroup(name string) error {
	var failed []error
	for _, h := range hierarchies() {
		var dirs []string
		_ = filepath.WalkDir(filepath.Join(h, name), func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil // what has gone meanwhile needs no removal
		})
		slices.Reverse(dirs)
		for _, dir := range dirs {
			if err := remove(dir); err != nil && !errors.Is(err, unix.ENOENT) {
				failed = append(failed, fmt.Errorf("remove cgroup %s: %w", dir, err))
			}
		}
	}
	return errors.Join(failed...)
}

// remove removes one cgroup. A process that has ended may still count for a moment.
func remove(dir string) error {
	limit := time.NewTimer(busyLimit)
	defer limit.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Rmdir(dir)
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		select {
		case <-tick.C:
		case <-limit.C:
			return err
		}
	}
}
