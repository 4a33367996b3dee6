package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/engine/firmware"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// unbornFile exists in the state folder of a VM from before any other file until just before the creation is settled.
// No caller was ever told of a VM whose folder has it. The file has no content.
const unbornFile = "unborn"

// gonePrefix begins the name of a VM's state folder once its removal is decided.
const gonePrefix = ".gone-"

// The disks of a VM that was saved or resumed from a snapshot are chains of files in its folder:
//
//	top-<id>.qcow2  an overlay that a save or a wake added on top
//	disks-<id>/     what the snapshot store made for a clone or a restore
//
// Neither name is used twice. tidy removes files that no record refers to any more.
const (
	topPrefix   = "top-"
	disksPrefix = "disks-"
)

// poolFile is in the state folder of an entry: its record, which no journal has. From it, an engine that finds the
// folder after a crash knows which addresses to release.
const poolFile = "pool.json"

// folders are the folders of the VMs. Each VM has one for what survives a reboot and one for what may vanish with it.
type folders struct {
	stateParent, runParent string
	kept                   *firmware.Store
	syncs                  *atomicfile.Group
}

func newFolders(cfg Config) folders {
	return folders{filepath.Join(cfg.StateDir, "vms"), filepath.Join(cfg.RunDir, "vms"), firmware.New(filepath.Join(cfg.StateDir, "firmware")), &atomicfile.Group{}}
}

// state and run are the folders of one VM.
func (d folders) state(id vm.ID) string { return filepath.Join(d.stateParent, string(id)) }
func (d folders) run(id vm.ID) string   { return filepath.Join(d.runParent, string(id)) }

// shared is the folder of a sandbox in which its guest sees folders of the node. It is in no other folder of the VM: what is mounted
// there belongs to others.
func (d folders) shared(id vm.ID) string {
	return filepath.Join(filepath.Dir(d.runParent), "shared", string(id))
}

// unshare removes the folder of shared. Nothing that was mounted there is touched.
func (d folders) unshare(id vm.ID) error {
	dir := d.shared(id)
	if err := proc.Detach(dir); err != nil {
		return err
	}
	containers, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	places := []string{dir}
	for _, c := range containers {
		at := filepath.Join(dir, c.Name())
		places = append(places, at)
		volumes, err := os.ReadDir(at)
		if err != nil {
			return err
		}
		for _, v := range volumes {
			places = append(places, filepath.Join(at, v.Name()))
		}
	}
	for _, at := range slices.Backward(places) { // one by one: whatever is in a folder by mistake stays
		if err := os.Remove(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the folder that a sandbox shares: %w", err)
		}
	}
	return nil
}

// firmware is the folder for what the firmware of a VM keeps. Its driver makes it.
func (d folders) firmware(id vm.ID) string { return filepath.Join(d.state(id), "firmware") }

// parents creates the folders that hold those of the VMs.
func (d folders) parents() error {
	for _, dir := range []string{d.stateParent, d.runParent} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return err
		}
	}
	return nil
}

// make creates the folders of a VM. An unprivileged hypervisor must be able to pass through them to its files, but
// not to list them.
func (d folders) make(id vm.ID) error {
	for _, dir := range []string{d.state(id), d.run(id)} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
	}
	return nil
}

// makeUnborn creates the folders of a VM that is being created, with a marker that identifies what a crash leaves.
func (d folders) makeUnborn(id vm.ID) error {
	if err := d.make(id); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(d.state(id), unbornFile), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	return f.Close()
}

// born removes the marker of makeUnborn: from here the journal alone decides what becomes of the VM.
func (d folders) born(id vm.ID) error {
	if err := os.Remove(filepath.Join(d.state(id), unbornFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("finish the folder: %w", err)
	}
	return nil
}

// unborn reports whether the files of a VM that the journal does not know prove that no VM is lost with them: it is a
// clone of the pool, its creation never ended, or its folders are empty.
func (d folders) unborn(id vm.ID) (bool, error) {
	for _, name := range []string{poolFile, unbornFile} {
		_, err := os.Lstat(filepath.Join(d.state(id), name))
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
	}
	for _, dir := range []string{d.state(id), d.run(id)} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		if len(entries) > 0 {
			return false, nil
		}
	}
	return true, nil
}

// remove removes the folders of a VM. One rename decides the removal, so that no half-removed folder is ever taken
// for a VM.
func (d folders) remove(id vm.ID) error {
	gone := filepath.Join(d.stateParent, gonePrefix+string(id))
	err := errors.Join(atomicfile.RemoveAll(gone), atomicfile.RemoveAll(d.run(id)))
	if err != nil {
		return err
	}
	if err := os.Rename(d.state(id), gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return atomicfile.RemoveAll(gone)
}

// newDisks creates a folder for the disks that the snapshot store makes.
func (d folders) newDisks(id vm.ID) (string, error) {
	dir := filepath.Join(d.state(id), disksPrefix+string(vm.NewID()))
	if err := os.Mkdir(dir, 0o711); err != nil {
		return "", fmt.Errorf("make a folder for disks: %w", err)
	}
	return dir, nil
}

// syncing starts to make the disks of id that are in its own folder durable, with their names. wait returns when they
// are; it is called before a record refers to them. Layers below the top are no longer written to, and are durable.
func (d folders) syncing(id vm.ID, disks []vm.Disk) (wait func() error) {
	dir := d.state(id)
	paths := []string{dir, filepath.Dir(dir)}
	for _, disk := range disks {
		if disk.ReadOnly || !strings.HasPrefix(disk.Path, dir+string(filepath.Separator)) {
			continue
		}
		paths = append(paths, disk.Path)
		if at := filepath.Dir(disk.Path); at != dir {
			paths = append(paths, at)
		}
	}
	done := make(chan error, 1)
	go func() { done <- d.syncs.Sync(paths...) }() // ends by itself; the caller waits for it
	return func() error { return <-done }
}

// pooled is the file of an entry of the pool.
func (d folders) pooled(id vm.ID) string { return filepath.Join(d.state(id), poolFile) }
