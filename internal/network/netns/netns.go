// Package netns makes the named network namespaces of containers. They outlive the daemon, but not a boot of the machine.
//
// It puts no interface into them: networks do. It never touches a namespace, or another file, that is not in its folder.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/vm"
)

// Folder has one file for each namespace, whose name is an id. It is absolute and on a file system in memory, such as /run/cocoon/netns.
// A process may be killed in each method: what it has begun is completed or removed by the next call. Calls for one id must not overlap.
type Folder string

// Path returns where the namespace of id is.
func (f Folder) Path(id vm.ID) string { return filepath.Join(string(f), string(id)) }

// Make makes the namespace of id, unless it is there, and returns its path. Nothing in it is up.
// Errors: InvalidArgument if id is none, FailedPrecondition if something else has its path.
func (f Folder) Make(id vm.ID) (path string, err error) {
	path = f.Path(id)
	if err := f.check(id); err != nil {
		return "", fmt.Errorf("make network namespace %s: %w", path, err)
	}
	return path, host.Space{Path: path}.Make()
}

// Remove removes the namespace of id, once no process is in it and nobody has it open. It is no error if there is none.
// Errors: as for Make.
func (f Folder) Remove(id vm.ID) error {
	path := f.Path(id)
	if err := f.check(id); err != nil {
		return fmt.Errorf("remove network namespace %s: %w", path, err)
	}
	for (host.Space{Path: path}).Exists() { // a crash of two daemons may have left two mounts, of which one hides the other
		if err := (host.Space{Path: path}).Unmount(); err != nil {
			return err
		}
	}
	return host.Space{Path: path}.Remove()
}

// List returns the ids that have a namespace, or what a crash left of one.
func (f Folder) List() (ids []vm.ID, err error) {
	entries, err := os.ReadDir(string(f))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	for _, e := range entries {
		if id := vm.ID(e.Name()); id.Valid() && f.check(id) == nil {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// check returns an error if the path of id has anything but a namespace or the empty file on which one is mounted.
func (f Folder) check(id vm.ID) error {
	if !filepath.IsAbs(string(f)) {
		return errdefs.Invalidf("the folder of network namespaces %q is not an absolute path", string(f))
	}
	if !id.Valid() {
		return errdefs.Invalidf("%.100q is not an id", string(id))
	}
	path := f.Path(id)
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at it: %w", err)
	case !st.Mode().IsRegular() || st.Size() > 0 && !(host.Space{Path: path}).Exists():
		return errdefs.Preconditionf("%s is no network namespace; move it away", path)
	}
	return nil
}
