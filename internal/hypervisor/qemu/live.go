package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/hypervisor"
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
	tree, err := proc.MappedTree(dir, ids, s.ReadOnly)
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
