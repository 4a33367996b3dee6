package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// rawDisk returns the path of the disk of a disk image as a raw file. An image in another format gets one with its first VM that needs it, and
// keeps it: to copy that, or to clone it where the file system can, is much quicker than to decompress the image again.
func (s *Store) rawDisk(ctx context.Context, img image.Image, rec record) (path string, err error) {
	base := s.baseDisk(rec)
	if base.Format == vm.DiskRaw {
		return base.Path, nil
	}
	path = filepath.Join(filepath.Dir(base.Path), rawFile)
	unlock, err := s.building.Lock(ctx, rec.ID)
	if err != nil {
		return "", err
	}
	defer unlock()
	if info, err := os.Stat(path); err == nil && info.Size() == rec.VirtualSize {
		return path, nil
	}
	if err := s.makeRaw(ctx, img, rec.VirtualSize, path); err != nil {
		return "", fmt.Errorf("convert the disk of image %s to a raw one: %w", orID(img), err)
	}
	return path, nil
}

// makeRaw makes the raw file of a disk of size bytes. Another process may do the same: both make the same file.
func (s *Store) makeRaw(ctx context.Context, img image.Image, size int64, path string) (err error) {
	work, err := s.newWork()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	d, err := s.OpenDisk(ctx, img)
	if err != nil {
		return err
	}
	defer d.Close()
	room, err := s.room()
	if err != nil {
		return err
	}
	tmp := work.join(rawFile)
	if _, err := writeSynced(tmp, func(f *os.File) error {
		if err := expand(ctx, f, d.Holed, room, s.room); err != nil {
			return err
		}
		return f.Truncate(size)
	}); err != nil {
		return outOfRoom(full(err), room)
	}
	unlock, err := s.lock(shared) // nobody removes the image meanwhile
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(filepath.Dir(path)); errors.Is(err, fs.ErrNotExist) {
		return notFound(orID(img))
	}
	return full(atomicfile.Rename(tmp, path))
}

// lookEvery is how many bytes are written before the free room is looked at again: others write too.
const lookEvery = 16 << 20

// expand writes what r reads to the empty file f and leaves holes where that is zeros. At most room bytes are not, and it ends earlier if now says
// that no room is left.
func expand(ctx context.Context, f *os.File, r sparse.Holed, room int64, now func() (int64, error)) error {
	buf, unseen := make([]byte, 64<<10), int64(0)
	for at := int64(0); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		hole, err := r.Skip()
		if err != nil {
			return err
		}
		at += hole
		n, err := r.Read(buf)
		if n > 0 && !sparse.IsZero(buf[:n]) {
			if unseen += int64(n); unseen > lookEvery {
				free, err := now()
				if err != nil {
					return err
				}
				room, unseen = min(room, free), 0
			}
			if room -= int64(n); room < 0 {
				return errdefs.Exhaustedf("the disk of the image store has too little free space for it; free some with `cocoon image rm`")
			}
			if err := sparse.WriteAt(f, buf[:n], at); err != nil {
				return fmt.Errorf("write image: %w", err)
			}
		}
		at += int64(n)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
	}
}
