// Package rooms makes the root file systems ("rooms") of a guest's containers: the layers of an image with a private
// writable layer on top, each in its own mount namespace. The kernel's file systems, and with them shared memory, are
// the guest's; so are the network and the processes. A program in a PID namespace of its own mounts its own /proc (MountProc). A room may also be
// the guest's own root, read-only.
//
// It runs nothing: callers enter a room to do so. A room lasts as long as the guest runs; its written data, as long as
// the VM exists.
package rooms

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent/boot"
)

// stagePath is where rooms are built. It is short because the kernel accepts 4096 bytes of options, and these name
// every layer.
const stagePath = "/run/.rooms"

// Keeper owns the rooms of the guest it runs in. Its methods are safe for concurrent use.
type Keeper struct {
	disk *os.File     // a folder of the writable disk's file system; nil without one
	plug func() error // loads what disks need that are plugged while the guest runs

	mu     sync.Mutex
	open   bool
	layers map[string]string // where they are mounted, by serial
	rooms  map[string]*room
	images map[string]bool // those that are mounted, by name
}

type room struct {
	ns      *os.File // mount namespace; nil until sealed
	covers  Covers
	written written
}

// New returns the keeper of a guest without rooms. disk is boot.Result.Disk, plug is boot.Result.Plug.
func New(disk *os.File, plug func() error) *Keeper {
	return &Keeper{disk: disk, plug: plug, layers: map[string]string{}, rooms: map[string]*room{}, images: map[string]bool{}}
}

const plugLimit = 30 * time.Second // of the wait for plugged disks

// Await waits until the guest has the disks with these serials, which may just have been plugged.
func (k *Keeper) Await(ctx context.Context, serials []string) error {
	ctx, cancel := context.WithTimeout(ctx, plugLimit)
	defer cancel()
	_, missing, err := boot.Await(ctx, k.plug, serials...)
	if missing != "" {
		return errdefs.Unavailablef("the disk %s with a layer of an image has not appeared: %w", missing, err)
	}
	return err
}

// Make makes the room called name from the layers on the disks with these serials, lowest first, and returns the folder
// where it is until Seal. From Seal on, c holds in it. It is idempotent.
func (k *Keeper) Make(name string, layers []string, c Covers) (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	dir := path.Join(stagePath, "r", name)
	if _, made := k.rooms[name]; made {
		return dir, nil
	}
	top := path.Join(stagePath, "u") // in memory
	if k.disk != nil {
		top = k.writtenFiles()
	}
	if err := k.assemble(dir, path.Join(top, name), layers); err != nil {
		return "", fmt.Errorf("container %s: %w", name, err)
	}
	if err := furnish(dir); err != nil {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		return "", fmt.Errorf("prepare the file system of container %s: %w", name, err)
	}
	k.rooms[name] = &room{covers: c}
	return dir, nil
}

// Image mounts the files of the image on the disks with these serials, lowest layer first, and returns the folder where they are
// until Seal. It is idempotent until then.
func (k *Keeper) Image(name string, layers []string) (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	dir := path.Join(stagePath, "i", name)
	if k.images[name] {
		return dir, nil
	}
	if err := k.assemble(dir, path.Join(stagePath, "iu", name), layers); err != nil {
		return "", err
	}
	k.images[name] = true
	return dir, nil
}

// assemble mounts an image at dir, with a writable layer in the folder upper. Preconditions: mu is held.
func (k *Keeper) assemble(dir, upper string, layers []string) error {
	if err := k.begin(); err != nil {
		return err
	}
	var lower []string
	for _, serial := range layers {
		at, err := k.layer(serial)
		if err != nil {
			return err
		}
		lower = append(lower, at)
	}
	if len(lower) == 0 {
		return errdefs.Invalidf("its image has no layers")
	}
	slices.Reverse(lower) // overlayfs lists the highest first
	for _, folder := range []string{path.Join(upper, "upper"), path.Join(upper, "work"), dir} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return fmt.Errorf("prepare the writable layer: %w", err)
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", strings.Join(lower, ":"), upper, upper)
	if err := unix.Mount("overlay", dir, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount the writable layer over the image: %w", err)
	}
	_ = os.Remove(dir + "/lost+found") // of the layers' file systems, not of the image; one with content stays
	return nil
}

// begin mounts the stage; everything in it disappears with it. Preconditions: mu is held.
func (k *Keeper) begin() error {
	if k.open {
		return nil
	}
	if err := os.MkdirAll(stagePath, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", stagePath, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
		return fmt.Errorf("mount memory for the containers' file systems: %w", err)
	}
	k.open = true
	return nil
}

// layer mounts the disk with that serial, which several images may share. Preconditions: mu is held.
func (k *Keeper) layer(serial string) (string, error) {
	if at, ok := k.layers[serial]; ok {
		return at, nil
	}
	disks, err := boot.Disks()
	if err != nil {
		return "", err
	}
	dev, ok := disks[serial]
	if !ok {
		return "", errdefs.DataLossf("the disk %s with a layer of an image is missing", serial)
	}
	at := fmt.Sprintf("%s/%d", stagePath, len(k.layers))
	if err := os.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	if err := boot.MountLayer(dev, at); err != nil {
		return "", err
	}
	k.layers[serial] = at
	return at, nil
}

// furnish adds the folders, mounts and files that programs expect. The image may hold anything at these paths.
func furnish(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, name := range []string{"dev", "proc", "sys", "etc", "tmp"} {
		if st, err := root.Lstat(name); err == nil && st.IsDir() {
			continue
		} else if err == nil {
			if err := root.Remove(name); err != nil {
				return err
			}
		}
		mode := os.FileMode(0o755)
		if name == "tmp" {
			mode = 0o777 | os.ModeSticky
		}
		if err := errors.Join(root.Mkdir(name, 0o755), root.Chmod(name, mode)); err != nil {
			return err
		}
	}
	for _, name := range []string{"dev", "proc", "sys"} {
		if err := unix.Mount("/"+name, path.Join(dir, name), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount /%s in the container: %w", name, err)
		}
	}
	own, err := identity()
	if err != nil {
		return err
	}
	return identify(root, own)
}

// identity returns the text of the files that identify the machine.
func identity() (map[string][]byte, error) {
	own := map[string][]byte{}
	for _, name := range []string{"etc/hosts", "etc/resolv.conf", "etc/hostname"} {
		text, err := os.ReadFile("/" + name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err == nil { // it may end with empty lines for a while
			own[name] = append(bytes.TrimRight(text, "\n"), '\n')
		}
	}
	return own, nil
}

// identify writes the files of own into a room, by renaming: a link of the image is not followed, and readers see
// either the old or the new files. A file that is a mount of the container stays unchanged.
func identify(root *os.Root, own map[string][]byte) error {
	for name, text := range own {
		if old, err := root.ReadFile(name); err == nil && bytes.Equal(old, text) {
			if st, err := root.Lstat(name); err == nil && st.Mode().IsRegular() {
				continue
			}
		}
		next := name + ".cocoon"
		_ = root.Remove(next)
		if err := root.WriteFile(next, text, 0o644); err != nil {
			return err
		}
		if err := root.Rename(next, name); err != nil {
			_ = root.Remove(next)
			if !errors.Is(err, unix.EBUSY) {
				return err
			}
		}
	}
	return nil
}

// machineIDs are the files of a file system that hold the machine id.
var machineIDs = []string{"etc/machine-id", "var/lib/dbus/machine-id"}

// Identify gives every room the machine's current identity files. Rooms that have a machine id get machineID, unless it
// is "". It is idempotent.
func (k *Keeper) Identify(machineID string) error {
	own, err := identity()
	if err != nil {
		return err
	}
	k.mu.Lock()
	names := slices.Sorted(maps.Keys(k.rooms))
	k.mu.Unlock()
	for _, name := range names {
		if name == "" {
			continue // the guest's own root has them already
		}
		err := k.Change(name, func() error {
			root, err := os.OpenRoot("/")
			if err != nil {
				return err
			}
			defer root.Close()
			text := maps.Clone(own)
			for _, file := range machineIDs {
				if st, err := root.Lstat(file); err == nil && st.Mode().IsRegular() && st.Size() > 0 && machineID != "" {
					text[file] = []byte(machineID + "\n")
				}
			}
			return identify(root, text)
		})
		if err != nil {
			return fmt.Errorf("write the identity files of container %s: %w", name, err)
		}
	}
	return nil
}

// Seal removes the rooms from the guest's own folders: from then on only callers of Enter see them. It is idempotent.
func (k *Keeper) Seal() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, r := range k.rooms {
		if r.ns != nil {
			continue
		}
		var err error
		if r.ns, err = seal(path.Join(stagePath, "r", name), r.covers); err != nil {
			return fmt.Errorf("isolate the mounts of container %s: %w", name, err)
		}
	}
	if !k.open {
		return nil
	}
	if err := unix.Unmount(stagePath, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("hide the containers' file systems: %w", err)
	}
	k.open = false
	clear(k.layers) // rooms that are made later mount them again
	clear(k.images)
	_ = os.Remove(stagePath) // an empty folder does no harm
	return nil
}

// Show makes the room called name from the guest's own folders as they are mounted, with a read-only root: mounts
// inside it stay as they are. It is idempotent.
func (k *Keeper) Show(name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.rooms[name] != nil {
		return nil
	}
	r := &room{covers: Covers{ReadOnlyRoot: true}}
	err := onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := protect(); err != nil {
			return err
		}
		r.ns, err = os.Open("/proc/thread-self/ns/mnt")
		return err
	})
	if err == nil {
		k.rooms[name] = r
	}
	return err
}

// protect makes the root of the thread's mount namespace read-only. The file system stays writable in other namespaces.
func protect() error {
	if err := unix.Mount("", "/", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("make the root read-only: %w", err)
	}
	return nil
}

// seal returns a mount namespace whose root is dir, with its covers.
func seal(dir string, c Covers) (ns *os.File, err error) {
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Chdir(dir); err != nil {
			return err
		}
		if err := unix.PivotRoot(".", "."); err != nil {
			return fmt.Errorf("change the root: %w", err)
		}
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("leave the old root: %w", err)
		}
		if err := c.impose(); err != nil {
			return err
		}
		ns, err = os.Open("/proc/thread-self/ns/mnt")
		return err
	})
	return ns, err
}

// Enter runs f in a room: paths that f uses and processes that it starts are inside the room. f must not leave its
// goroutine.
func (k *Keeper) Enter(name string, f func() error) error {
	var ns *os.File
	k.mu.Lock()
	if r := k.rooms[name]; r != nil {
		ns = r.ns
	}
	k.mu.Unlock()
	if ns == nil {
		return errdefs.NotFoundf("there is no container %q", name)
	}
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("enter container %s: %w", name, err)
		}
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("enter container %s: %w", name, err)
		}
		return f()
	})
}

// Change is Enter for an f that writes, even where the root of the room is read-only: it is writable for f alone.
func (k *Keeper) Change(name string, f func() error) error {
	k.mu.Lock()
	r := k.rooms[name]
	k.mu.Unlock()
	return k.Enter(name, func() error {
		if r == nil || !r.covers.ReadOnlyRoot {
			return f()
		}
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_BIND|unix.MS_REMOUNT, ""); err != nil {
			return fmt.Errorf("make the root writable: %w", err)
		}
		return f()
	})
}

// onThread runs f on a thread that ends after it. It never uses the first thread of the process, because /proc/self
// shows its root.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: no other goroutine may use the thread
		if unix.Gettid() == unix.Getpid() {
			err := onThread(f) // on another thread, because this one is locked
			runtime.UnlockOSThread()
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}
