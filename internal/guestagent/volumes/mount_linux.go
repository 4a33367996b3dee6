package volumes

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Mount makes the volumes and mounts them in the order of mounts. images are the folders with the files of volumes of images, by
// name. The key of mounts is the folder that the paths are in. lacks says, by that folder, which parts of an image's files do not
// exist: these are not mounted. Steps that were done before are skipped.
func (k *Keeper) Mount(
	ctx context.Context, volumes []vm.Volume, images map[string]string, mounts map[string][]vm.Mount,
) (lacks map[string]error, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed || len(volumes) == 0 && k.store == nil {
		return k.lacks, nil
	}
	byName := map[string]vm.Volume{}
	for _, v := range volumes {
		v, err := k.placed(v)
		if err == nil {
			err = k.make(ctx, v, images[v.Name])
		}
		if err != nil {
			return nil, fmt.Errorf("make volume %s: %w", v.Name, err)
		}
		byName[v.Name] = v
	}
	for root, list := range mounts {
		lack, err := k.mountIn(ctx, root, byName, list)
		if err != nil {
			return nil, err
		}
		if lack != nil {
			k.lacks[root] = lack
		}
	}
	return k.lacks, k.close()
}

// Message shows a new empty file, which every user may write, at a path in folder, and returns that file. The same path again
// returns the same file.
func (k *Keeper) Message(folder, name string) (*os.File, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	at := path.Join(folder, name)
	if f := k.texts[at]; f != nil {
		return f, nil
	}
	f, err := k.showText(folder, name)
	if err != nil {
		return nil, fmt.Errorf("make the file for messages at %s: %w", name, err)
	}
	k.texts[at] = f
	return f, nil
}

// DropMessage forgets a file of Message, which nothing shows any more, and closes it.
func (k *Keeper) DropMessage(f *os.File) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.texts, func(_ string, text *os.File) bool { return text == f })
	f.Close()
}

// showText makes the file for messages. Preconditions: mu is held.
func (k *Keeper) showText(folder, name string) (*os.File, error) {
	if k.closed {
		return k.showTextLate(folder, name)
	}
	if err := k.open(); err != nil {
		return nil, err
	}
	return k.showTextFrom(k.store, folder, name)
}

// showTextLate is showText after the stage was removed: what is there cannot be mounted any more. The file gets memory of its
// own. Preconditions: mu is held.
func (k *Keeper) showTextLate(folder, name string) (_ *os.File, err error) {
	if err := os.MkdirAll(k.stage, 0o700); err != nil {
		return nil, err
	}
	if err := unix.Mount("tmpfs", k.stage, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700,size=1m"); err != nil {
		return nil, fmt.Errorf("mount memory for a message: %w", err)
	}
	defer func() {
		err = errors.Join(err, unix.Unmount(k.stage, unix.MNT_DETACH))
		_ = os.Remove(k.stage) // an empty folder does no harm
	}()
	store, err := os.OpenRoot(k.stage)
	if err != nil {
		return nil, err
	}
	defer store.Close()
	return k.showTextFrom(store, folder, name)
}

// showTextFrom makes the file for messages in store.
func (k *Keeper) showTextFrom(store *os.Root, folder, name string) (*os.File, error) {
	source := fmt.Sprintf(".message-%d", len(k.texts)) // no volume has such a name
	f, err := store.OpenFile(source, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o666)
	if err != nil {
		return nil, err
	}
	err = f.Chmod(0o666) // independent of the umask
	if err == nil {
		err = showAt(folder, name, f)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// showAt mounts the file f at a path in folder.
func showAt(folder, name string, f *os.File) error {
	root, err := unix.Open(folder, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	dst, err := target(root, name, false)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	return bind(int(f.Fd()), dst, 0)
}

// mountIn makes the mounts in the folder root. lack is the first part of an image's files that does not exist. Preconditions: mu is
// held.
func (k *Keeper) mountIn(ctx context.Context, root string, volumes map[string]vm.Volume, mounts []vm.Mount) (lack, err error) {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("mount volumes in %s: %w", root, err)
	}
	defer unix.Close(fd)
	for _, m := range mounts {
		at := path.Join(root, m.Path)
		if k.mounted[at] {
			continue
		}
		v, ok := volumes[m.Volume]
		if !ok {
			return nil, errdefs.Invalidf("there is no volume %q to mount at %s", m.Volume, m.Path)
		}
		switch err := k.mount(ctx, fd, v, m); {
		case errdefs.IsNotFound(err) && v.Kind == vm.VolumeImage:
			if lack == nil {
				lack = fmt.Errorf("mount volume %s at %s: %w", m.Volume, m.Path, err)
			}
			continue
		case err != nil:
			return nil, waits(v, fmt.Errorf("mount volume %s at %s: %w", m.Volume, m.Path, err))
		}
		k.mounted[at] = true
	}
	return lack, nil
}

// open mounts the in-memory file system that holds the files. Preconditions: mu is held.
func (k *Keeper) open() error {
	if k.store != nil {
		return nil
	}
	if err := os.MkdirAll(k.stage, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", k.stage, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
		return fmt.Errorf("mount memory for volumes: %w", err)
	}
	store, err := os.OpenRoot(k.stage)
	k.store = store
	return err
}

// close removes the stage from the guest's folders. Mounts stay valid, store stays open, and vault keeps the stage.
func (k *Keeper) close() error {
	if k.store != nil {
		if err := k.keepStage(); err != nil {
			return err
		}
		if err := unix.Unmount(k.stage, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("hide the memory of volumes: %w", err)
		}
		_ = os.Remove(k.stage) // an empty folder does no harm
	}
	k.closed = true
	return nil
}

// make prepares v to be mounted. image is the folder with the files of the image, of a volume that has one.
func (k *Keeper) make(ctx context.Context, v vm.Volume, image string) error {
	if k.made[v.Name] {
		return nil
	}
	if v.Kind != vm.VolumeEmpty || v.Memory || limited(v) {
		if err := k.open(); err != nil {
			return err
		}
	}
	var err error
	switch {
	case v.Kind == vm.VolumeDisk: // its mounts tell what to make of it
		k.volumes[v.Name] = v
		return nil
	case v.Kind == vm.VolumeFiles:
		var dir *os.Root
		if dir, err = k.folder(v); err == nil { // empty unless Put gave it files
			err = dir.Close()
		}
	case v.Kind == vm.VolumeImage:
		err = k.makeImage(v, image)
	case v.Kind == vm.VolumeDir:
		err = k.makeHostDir(ctx, v)
	case v.Kind == vm.VolumeNFS:
		err = k.makeNFS(ctx, v)
	case v.Memory:
		err = k.makeMemory(v)
	case limited(v):
		err = k.makeLimited(ctx, v)
	default:
		err = k.makeDisk(v)
	}
	k.made[v.Name], k.volumes[v.Name] = err == nil, v
	return err
}

func (k *Keeper) makeMemory(v vm.Volume) error {
	dir := path.Join(k.stage, v.Name)
	if err := os.Mkdir(dir, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	options := "mode=1777"
	if v.SizeLimit > 0 {
		options += ",size=" + strconv.FormatInt(v.SizeLimit, 10)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return err
	}
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return share(fd, unix.S_ISVTX, v.Group)
}

// makeImage shows the files of an image in the stage.
func (k *Keeper) makeImage(v vm.Volume, image string) error {
	if image == "" {
		return errdefs.Invalidf("its image is not mounted")
	}
	dir := path.Join(k.stage, v.Name)
	if err := os.Mkdir(dir, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	src, err := resolve(image)
	if err != nil {
		return err
	}
	defer unix.Close(src)
	dst, err := resolve(dir)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	return bind(src, dst, 0)
}

// makeDisk makes the folder of v in the writable layer. A folder from an earlier start stays as the guest left it.
func (k *Keeper) makeDisk(v vm.Volume) error {
	dir := path.Join(k.layer, v.Name)
	if fd, err := resolve(dir); err == nil {
		return unix.Close(fd)
	} else if !errors.Is(err, unix.ENOENT) {
		return err
	}
	parent, err := folderInLayer(k.layer)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	return makeFolderWhole(parent, v.Name, v.Group)
}

// folderInLayer opens a folder of the writable layer, and makes it for root only if it is missing. The result is a reference.
func folderInLayer(dir string) (int, error) {
	root, err := resolve("/")
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	fd, err := target(root, dir, true)
	if err != nil {
		return -1, err
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// makeFolderWhole makes the folder of a volume in parent. It has another name first: a guest that is interrupted here must not find an
// unfinished folder.
func makeFolderWhole(parent int, name string, group *int64) error {
	temp := "." + name + ".new"
	if err := unix.Mkdirat(parent, temp, 0o777); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	fd, err := unix.Openat(parent, temp, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := share(fd, 0, group); err != nil {
		return err
	}
	return unix.Renameat(parent, temp, parent, name)
}

// share lets all users use a folder, and makes new files in it belong to the group. sticky is S_ISVTX or 0. The root of a volume
// in memory is sticky as with a kubelet, which leaves it as tmpfs makes it.
func share(fd int, sticky uint32, group *int64) error {
	if group == nil {
		return unix.Fchmod(fd, 0o777|sticky)
	}
	if err := unix.Fchown(fd, -1, int(*group)); err != nil {
		return err
	}
	return unix.Fchmod(fd, 0o777|unix.S_ISGID|sticky)
}

// mount shows v, or the part of it that m names, at m's path in the folder root.
func (k *Keeper) mount(ctx context.Context, root int, v vm.Volume, m vm.Mount) error {
	if v.Kind == vm.VolumeDisk {
		if err := k.prepare(ctx, v, m); err != nil {
			return err
		}
	}
	src, err := k.source(v, m.SubPath)
	if err != nil {
		return err
	}
	defer unix.Close(src)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	dst, err := target(root, m.Path, st.Mode&unix.S_IFMT == unix.S_IFDIR)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	return bind(src, dst, attributes(v, m))
}

// attributes are those of the mount m of v.
func attributes(v vm.Volume, m vm.Mount) uint64 {
	switch {
	case v.Kind == vm.VolumeImage:
		return unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC
	case m.ReadOnly || v.Kind == vm.VolumeFiles || v.Disk != nil && v.Disk.ReadOnly || v.Dir != nil && v.Dir.ReadOnly, v.NFS != nil && v.NFS.ReadOnly:
		return unix.MOUNT_ATTR_RDONLY
	}
	return 0
}

// bind mounts what src refers to at dst, with these attributes of a mount.
func bind(src, dst int, attributes uint64) error {
	tree, err := clone(src, attributes)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	return move(tree, dst)
}

// clone returns a mount of what src refers to that is nowhere yet.
func clone(src int, attributes uint64) (tree int, err error) {
	if tree, err = unix.OpenTree(src, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH); err != nil {
		return -1, fmt.Errorf("clone the mount of the volume: %w", err)
	}
	if attributes != 0 {
		attr := unix.MountAttr{Attr_set: attributes}
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			unix.Close(tree)
			return -1, fmt.Errorf("make it read-only: %w", err)
		}
	}
	return tree, nil
}

// move puts a mount from clone at dst.
func move(tree, dst int) error {
	return unix.MoveMount(tree, "", dst, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// source opens what is to be mounted. The guest may have written the content: links must not lead out of the volume.
func (k *Keeper) source(v vm.Volume, sub string) (int, error) {
	root, err := resolve(k.top(v))
	if err != nil || sub == "" {
		return root, err
	}
	defer unix.Close(root)
	open := beneath
	if v.Kind == vm.VolumeEmpty || v.Kind == vm.VolumeDisk && !v.Disk.ReadOnly {
		open = func(root int, sub string) (int, error) { return subFolder(root, sub, v.Group) }
	}
	if v.Kind == vm.VolumeDir && !v.Dir.ReadOnly || v.Kind == vm.VolumeNFS && !v.NFS.ReadOnly {
		open = subFolderAlike
	}
	fd, err := open(root, sub)
	if err := inVolume(sub, err); err != nil {
		return -1, err
	}
	return fd, nil
}

// inVolume returns err, of opening a part of a volume, as it is told.
func inVolume(sub string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return errdefs.NotFoundf("the volume has no %s", sub)
	case errors.Is(err, unix.EXDEV):
		return errdefs.Invalidf("%s leads out of the volume through a symbolic link", sub)
	}
	return err
}
