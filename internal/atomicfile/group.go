package atomicfile

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/batch"
)

// manyPaths is the number of paths of one file system from which that file system is synced as a whole: one wait then serves
// them all.
const manyPaths = 16

// Group makes files and folders durable for many callers together. The zero value is ready. It is safe for concurrent use.
type Group struct {
	queue batch.Queue[*groupCall]

	// Set by tests only; nil means the real functions.
	fsync, syncfs func(*os.File) error
}

type groupCall struct {
	paths []string
	err   error
}

// Sync returns when the content of the files and the names in the folders are durable as they were at the call. Calls that
// arrive during a round share the next round.
func (g *Group) Sync(paths ...string) error {
	c := &groupCall{paths: paths}
	g.queue.Do(c, g.round)
	return c.err
}

// round syncs the paths of todo and sets the error of each call.
func (g *Group) round(todo []*groupCall) {
	errs := map[string]error{} // by path; a path in it is already handled
	byDevice := map[uint64][]string{}
	for _, c := range todo {
		for _, path := range c.paths {
			if _, seen := errs[path]; seen {
				continue
			}
			var st syscall.Stat_t
			if errs[path] = syscall.Stat(path, &st); errs[path] == nil {
				byDevice[st.Dev] = append(byDevice[st.Dev], path)
			}
		}
	}
	for _, paths := range byDevice {
		if len(paths) < manyPaths {
			for _, path := range paths {
				errs[path] = g.one(path, g.fsync, (*os.File).Sync)
			}
			continue
		}
		err := g.one(paths[0], g.syncfs, syncfs)
		for _, path := range paths {
			errs[path] = err
		}
	}
	for _, c := range todo {
		for _, path := range c.paths {
			if err := errs[path]; err != nil {
				c.err = errors.Join(c.err, fmt.Errorf("sync %s: %w", path, err))
			}
		}
	}
}

func (g *Group) one(path string, hook, sync func(*os.File) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if hook != nil {
		return hook(f)
	}
	return sync(f)
}

func syncfs(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = unix.Syncfs(int(fd)) }); err != nil {
		return err
	}
	return serr
}
